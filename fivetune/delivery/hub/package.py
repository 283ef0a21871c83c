"""The card and the files of a run or an export, read from its directory.

In: a folder. Out: its card; the files to publish with that card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune import rundir
from fivetune.config import load_config
from fivetune.config.paths import resolve_adapter
from fivetune.delivery.hub.files import ADAPTER, RepoFile, list_adapter_files, list_export_files, list_run_files
from fivetune.errors import ConfigError, RunDirError
from fivetune.reading.card.card import CardRequest, Kind, Place, build_model_card, find_base, is_generated
from fivetune.rundir.export_file import read_export
from fivetune.rundir.figures import find_exported_eval
from fivetune.rundir.layout import CARD
from fivetune.types import OnNote

if TYPE_CHECKING:
    from fivetune.types import JsonTable


def build_card(
    folder: Path, *, repo: str | None, license: str | None, kind: Kind | None = None, on_note: OnNote
) -> str:
    """Build the card of a run or an export from its records.

    Args:
        repo: the repository that the card is for; None: the folder itself.
        kind: "adapter" for the adapter of a run alone; None: the model, or the export if the folder is one.
        on_note: called with a sentence for each damaged file, whose facts are left out.

    Raises RunDirError for a folder that is neither, or has no model.
    """
    rundir.refuse_foreign(folder)
    export = read_export(folder)
    run = rundir.read_run(folder)
    if export and (source := _find_source(export)):
        run = rundir.read_run(source)
    for sentence in run.damage:
        on_note(sentence)
    config = load_config(folder / rundir.CONFIG, trained=True)
    request = CardRequest(
        folder=folder,
        place=Place(repo or str(folder), is_published=repo is not None),
        model_type=_read_model_type(folder),
        kind=kind or ("export" if export else "model"),
        export=export or {},
        license=license,
        with_checksums=True,
    )
    num_damaged = len(run.damage)
    text = build_model_card(config, run, find_exported_eval(run), run.status.best, request)
    for sentence in run.damage[num_damaged:]:  # files of predictions are read when they are needed
        on_note(sentence)
    return text


def _find_source(export: JsonTable) -> Path | None:
    """The run that an export was made of, if it is still there: it has the records of the evaluations."""
    folder = Path(export["source"]["run"])
    if not (folder / rundir.CONFIG).is_file():
        return None
    same = rundir.read_machine(folder, rundir.Damage()).run_id == export["source"].get("run_id")
    return folder if same else None


def _read_model_type(folder: Path) -> str:
    path = folder / "model" / "config.json"
    if not path.is_file():
        raise RunDirError(
            f"{folder}: has no model/ with a config.json. Finish the run: fivetune train {folder} --resume"
        )
    try:
        return str(json.loads(path.read_bytes()).get("model_type", ""))
    except (OSError, ValueError, AttributeError):
        raise RunDirError(f"{path}: damaged. Copy the file again.") from None


def find_card_paths(folder: Path) -> dict[Kind, Path]:
    """Find where the cards of a run or an export belong: in the folder that `from_pretrained` takes."""
    export = read_export(folder)
    if export and export.get("format") != "hf":
        return {"export": folder / CARD}
    paths: dict[Kind, Path] = {"export" if export else "model": folder / "model" / CARD}
    if (folder / ADAPTER).is_dir():
        paths["adapter"] = folder / ADAPTER / CARD
    return paths


def read_edited_card(path: Path) -> str | None:
    """Read a card that the user has written or changed; None without one. Raises RunDirError for unreadable text."""
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise RunDirError(
            f"{path}: cannot be read as UTF-8. Write the card again: fivetune card --overwrite."
        ) from None
    return None if is_generated(text) else text


def list_files(
    folder: Path, repo: str, *, only_adapter: bool, with_report: bool, license: str | None, on_note: OnNote
) -> list[RepoFile]:
    """List the files that are published, the card first: the user's own if it was edited, else a new one.

    Raises ConfigError or RunDirError for what must not or cannot be published.
    """
    rundir.refuse_foreign(folder)
    export = read_export(folder)
    if export and (only_adapter or with_report):
        raise ConfigError(
            f"--{'adapter' if only_adapter else 'report'}: {folder} is an export. Give the run directory."
        )
    config = load_config(folder / rundir.CONFIG, trained=True)
    base, has_adapter = find_base(config, folder), (folder / ADAPTER).is_dir()
    if only_adapter and (not has_adapter or resolve_adapter(config.model.adapter, str(folder)) is None):
        raise ConfigError(f"--adapter: {folder} has no adapter/: the run trained the whole model. Leave out --adapter.")
    if only_adapter and base is None:
        raise ConfigError(
            f"--adapter: the base {config.model.path} is no model of the hub, so that no one could use the adapter "
            "alone. Leave out --adapter: the merged model is published."
        )
    kind: Kind = "export" if export else "model"
    if only_adapter:
        kind = "adapter"
    path = find_card_paths(folder).get(kind)
    # A card that its user has written is theirs: it is published, and never replaced.
    edited = read_edited_card(path) if path else None
    if edited is not None:
        on_note(f"{path}: was edited, and is published as it is.")
    card = edited or build_card(folder, repo=repo, license=license, kind=kind, on_note=on_note)
    if export:
        return list_export_files(folder, export, card)
    if only_adapter:
        return list_adapter_files(folder, card, base=base)
    if base is None and has_adapter:
        on_note(
            f"{folder / ADAPTER}: its base, {config.model.path}, is no model of the hub: the adapter is published with "
            "the name of that folder alone, and peft needs it. The published model needs no base."
        )
    return list_run_files(folder, card, base=base, with_report=with_report)
