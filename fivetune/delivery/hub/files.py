"""The files of a run that are published: listed, checked for secrets, with size and sha256.

In: a run directory or an export. Out: RepoFiles. Only files that FiveTune wrote are taken, by name: data, predictions,
logs and telemetry stay, and an unknown file beside the weights is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune import rundir
from fivetune.config.layers import as_yaml
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, RunDirError
from fivetune.reading.card.card import shorten_paths
from fivetune.redaction import hide_tokens
from fivetune.rundir.checksums import MANIFEST, compute_sha256, find_damage, parse_manifest, verify_checksums
from fivetune.rundir.export_file import EXPORT
from fivetune.rundir.layout import CARD
from fivetune.rundir.records import MachineRecord

if TYPE_CHECKING:
    from fivetune.types import JsonTable

REPORT = "report.html"
ADAPTER = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "base.json")
BASE_KEYS = {"adapter_config.json": "base_model_name_or_path", "base.json": "name"}  # as model.path had it
VOCABULARIES = re.compile(r"(^|/)(tokenizer\.json|vocab\.\w+|[\w.-]*vocabulary\.\w+|[\w.-]*\.(model|safetensors|bin))$")
"""Weights and vocabularies, in which a piece may look like a token of a service."""


@dataclass(frozen=True, slots=True)
class RepoFile:
    """A file to upload.

    Args:
        name: its path in the repository. content: its bytes, or the file that holds them.
    """

    name: str
    content: bytes | Path
    size: int
    sha256: str

    def read(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()


def make_file(name: str, content: bytes | Path) -> RepoFile:
    """Measure a file. Raises FiveTuneEnvironmentError if it cannot be read."""
    if isinstance(content, bytes):
        return RepoFile(name, content, len(content), sha256(content).hexdigest())
    try:
        return RepoFile(name, content, content.stat().st_size, compute_sha256(content))
    except OSError as error:
        raise FiveTuneEnvironmentError(f"{content}: cannot be read: {error.strerror}. Check its permissions.") from None


def list_run_files(folder: Path, card: str, *, base: str | None, with_report: bool) -> list[RepoFile]:
    """List the files of a run: model/ at the root, adapter/, the card, and what `open_run` reads of the run.

    Args:
        base: name of the adapter's base on the hub; None for a local folder, whose last part is published.

    Raises RunDirError for a damaged or missing file, ConfigError for one that FiveTune did not write.
    """
    files = [make_file(CARD, card.encode()), *_list_model_files(folder / "model")]
    if (folder / ADAPTER).is_dir():
        for file in _list_adapter_files(folder / ADAPTER, base):
            files.append(replace(file, name=f"{ADAPTER}/{file.name}"))
    files += _build_records(folder)
    if with_report:
        if not (folder / REPORT).is_file():
            raise RunDirError(f"{folder / REPORT}: missing. Write it with: fivetune report {folder}")
        files.append(make_file(REPORT, folder / REPORT))
    return _check_files(files)


def list_adapter_files(folder: Path, card: str, *, base: str | None) -> list[RepoFile]:
    """List the files of a run's adapter alone. Raises RunDirError as `list_run_files`."""
    return _check_files([make_file(CARD, card.encode()), *_list_adapter_files(folder / ADAPTER, base)])


def list_export_files(folder: Path, export: JsonTable, card: str) -> list[RepoFile]:
    """List the files of an export as its export.json lists them; `hf` has its model at the root, as a run has.

    Raises RunDirError as `list_run_files`.
    """
    if export.get("format") == "hf":
        files = [make_file(CARD, card.encode()), *_list_model_files(folder / "model"), *_build_records(folder)]
        return _check_files(files)
    # config.yaml and its kin name paths of this machine: they are published rewritten.
    records = _build_records(folder)
    left_out = {rundir.DATA, CARD, *(record.name for record in records)}
    files: list[RepoFile] = []
    for name, listed in sorted(export["files"].items()):
        if name in left_out:
            continue
        file = make_file(name, folder / name) if (folder / name).is_file() else None
        if file is None or file.sha256 != listed["sha256"]:
            raise RunDirError(f"{folder / name}: is missing or damaged. Export the run again with --overwrite.")
        files.append(file)
    files += records
    source = {**export["source"], "run": Path(export["source"]["run"]).name}
    listed = {one.name: {"sha256": one.sha256, "size": one.size} for one in files}
    table = json.dumps({**export, "source": source, "files": listed}, indent=2).encode()
    return _check_files([make_file(CARD, card.encode()), *files, make_file(EXPORT, table)])


def _list_model_files(model: Path) -> Iterator[RepoFile]:
    """Yield the files of model/ that its manifest lists. Raises ConfigError for any other file."""
    if not model.is_dir():
        raise RunDirError(f"{model}: missing: the run has no model yet. Finish it with --resume.")
    damage = find_damage(model)
    if damage:
        raise RunDirError(f"{model}: {damage}. Copy its files again, or export the model again with --resume.")
    names = set(parse_manifest((model / MANIFEST).read_bytes()).files) | {MANIFEST}
    _refuse_other_files(model, names | {CARD})
    for name in sorted(names):
        yield make_file(name, model / name)


def _list_adapter_files(folder: Path, base: str | None) -> Iterator[RepoFile]:
    if not (folder / ADAPTER_FILES[0]).is_file():
        raise RunDirError(f"{folder}: holds no adapter. Leave out --adapter: the model itself is published.")
    verify_checksums(folder, advice="Copy its files again, or export them again with --resume.")
    _refuse_other_files(folder, {*ADAPTER_FILES, MANIFEST, CARD})
    for name in ADAPTER_FILES:  # without the checksums: two of the files are published with another text
        if (folder / name).is_file():
            yield make_file(name, _replace_base(folder / name, base))


def _replace_base(path: Path, base: str | None) -> Path | bytes:
    """Return a file of an adapter; one that names its base by a path of this machine as text with `base`, else with the
    name of that folder. Raises RunDirError for one that is damaged.
    """
    key = BASE_KEYS.get(path.name)
    if key is None:
        return path
    try:
        table = json.loads(path.read_bytes())
        before = table.get(key)
    except (OSError, ValueError, AttributeError):
        raise RunDirError(f"{path}: damaged. Export the run again from its checkpoint with --resume.") from None
    if not isinstance(before, str):
        return path
    name = base or Path(before.removesuffix("/model")).name
    if name == before:
        return path
    return json.dumps({**table, key: name}, indent=2, sort_keys=True).encode()


def _refuse_other_files(folder: Path, allowed: set[str]) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and str(path.relative_to(folder)) not in allowed:
            raise ConfigError(
                f"{path}: is no part of the model, and is not published: it may be data or a secret. Move "
                f"it out of {folder}."
            )


def _build_records(folder: Path) -> list[RepoFile]:
    """Build what `open_run` reads of a run, without paths, hosts, commands and scores of the machine."""
    config = shorten_paths(rundir.read_run_config(folder))
    machine = rundir.read_machine(folder)
    status = rundir.read_status(folder)
    best = status.best
    facts = {
        "format_version": MachineRecord().format_version,
        "run_id": machine.run_id,
        "precision": machine.precision,
    }
    outcome: dict[str, Any] = {"state": "finished", "step": status.step, "best": None}
    if best:
        outcome["best"] = {"step": best.step, "metric": best.metric, "score": best.score, "loss": best.loss}
    return [
        make_file(rundir.CONFIG, as_yaml(config).encode()),
        make_file(rundir.MACHINE, json.dumps(facts, indent=2).encode()),
        make_file(rundir.STATUS, json.dumps(outcome, indent=2).encode()),
    ]


def _check_files(files: list[RepoFile]) -> list[RepoFile]:
    """Return the files by name. Raises ConfigError for one that holds a secret, whose text is not repeated."""
    for file in files:
        if VOCABULARIES.search(file.name):
            continue
        text = file.read().decode("utf-8", errors="replace")
        for number, line in enumerate(text.split("\n"), start=1):
            if hide_tokens(line) != line:
                where = file.content if isinstance(file.content, Path) else file.name
                raise ConfigError(
                    f"{where}:{number}: holds what looks like an access token or a password. Nothing is uploaded. "
                    "Remove it; if the file was public before, revoke the token."
                )
    return sorted(files, key=lambda one: (one.name != CARD, one.name))
