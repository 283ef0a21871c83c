"""Write an export of a run, whole or not at all, with its proof.

In: a run directory and an exporter. Out: the export's folder and the content of its export.json. All files are written
into a staging folder beside the target, which is renamed when the proof is in it; a killed export leaves a hidden
staging folder, which the next one of the same name removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

import fivetune
from fivetune import rundir
from fivetune.delivery.exporters import Exporter, load_format
from fivetune.delivery.exporters._proof import compare_export, count_bytes
from fivetune.errors import (
    ConfigError,
    DataError,
    InterruptedRunError,
    ModelError,
    UnknownPluginError,
    describe_failure,
)
from fivetune.model.adapter import find_adapter
from fivetune.model.files import read_model_config
from fivetune.model.save import replace_folder
from fivetune.rundir.checksums import MANIFEST, compute_sha256
from fivetune.rundir.export_file import EXPORT, EXPORT_VERSION, Export
from fivetune.rundir.layout import ABSTENTION
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.tasks import head_of
from fivetune.training.answers.loading import load_run_model
from fivetune.training.answers.promise import read_promise
from fivetune.training.answers.trained_run import TrainedRun
from fivetune.types import OnNote, ignore_note

if TYPE_CHECKING:
    from fivetune.types import JsonTable

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", MANIFEST, "README.md")
"""Files of model/ that only the format hf has: the weights, their checksums, the model card."""


def export(
    run: str | Path,
    format: str,
    options: Mapping[str, object] = MappingProxyType({}),
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    examples: int = 200,
    on_progress: ProgressCallback = ignore_progress,
    on_note: OnNote = ignore_note,
) -> Export:
    """Export a run to another format, with a proof on its evaluation data.

    Args:
        run: the run directory.
        format: name of the format: hf, ctranslate2.
        options: options of the format: {"quantization": "int8"}.
        output: folder to write; default: export/<format> of the run.
        overwrite: replace an existing export.
        examples: questions of the proof, 1 or more.
        on_progress: called with what is done, and the number of questions so far and of all.
        on_note: called with the reasons of the precision and of the number of CPU threads.

    Returns the Export: `folder`, which `open_run` opens, `verdict` and `proof`; the verdict is "not proved" if the
    proof failed. Raises ConfigError for an unknown format or option and for an existing export, ModelError for a model
    that the format does not hold, RunDirError for a run without a model.

    >>> found = export("runs/tickets", "hf", output="exported", examples=8)
    >>> found.verdict, found.proof["identical_predictions"]
    ('use', 1.0)
    """
    if examples < 1:
        raise ConfigError(f"--examples {examples}: is not a number of questions. Allowed: 1 or more. Try 200.")
    exporter = load_format(format, options)
    folder = Path(run)
    target = Path(output) if output else folder / "export" / exporter.get_folder_name()
    _refuse_target(target, overwrite=overwrite)
    original = TrainedRun(folder, loaded=load_run_model(folder, on_damage=on_note, on_note=on_note))
    _refuse_model(original, exporter)
    with _prepare_folder(target) as staging:
        on_progress("converting", 0, None)
        left_out = [*WEIGHTS]
        if not exporter.has_same_probabilities(read_model_config(folder / "model")):
            left_out.append(ABSTENTION)
            if read_promise(folder):
                on_note(
                    "the export gives answers other probabilities, so that the run's max_error is left out: evaluate "
                    "the export with --max-error"
                )
        shutil.copytree(folder / "model", staging / "model", ignore=shutil.ignore_patterns(*left_out))
        exporter.convert(folder / "model", staging)
        for name in (rundir.CONFIG, rundir.MACHINE, rundir.DATA, rundir.STATUS):
            if (folder / name).is_file():
                shutil.copy(folder / name, staging / name)
        # Twice: the proof opens the export, which needs its export.json.
        facts = _describe_export(original, exporter, staging)
        rundir.write_json(staging / EXPORT, facts)
        facts["proof"] = _compare_with_run(original, exporter, staging, examples, on_progress)
        rundir.write_json(staging / EXPORT, facts)
        replace_folder(staging, target)
    return Export(target, facts)


def _refuse_target(target: Path, *, overwrite: bool) -> None:
    """Raise ConfigError for a target that must not be replaced."""
    if not target.exists():
        return
    if not (target / EXPORT).is_file():
        raise ConfigError(f"--output {target}: exists and is no export. Give another folder.")
    if not overwrite:
        raise ConfigError(f"--output {target}: exists. Add --overwrite to replace it, or give another folder.")


def _refuse_model(original: TrainedRun, exporter: Exporter) -> None:
    """Raise ModelError or ConfigError for a run that cannot be exported."""
    if original.is_export:
        raise ConfigError(f"{original.folder}: is an export already. Give the run directory.")
    where = f"{original.folder}: --format {exporter.plugin_name()}"
    if find_adapter(original.loaded.model):
        raise ModelError(
            f"{where}: the run trained virtual tokens (prompt or prefix), which no format holds. Train an adapter "
            "whose matrices are merged: lora, rslora, dora, ia3."
        )
    if reason := exporter.explain_unsupported(
        read_model_config(original.folder / "model"), head_of(original.loaded.config.task)
    ):
        raise ModelError(f"{where}: {reason}. Use --format hf.")


@contextmanager
def _prepare_folder(target: Path) -> Generator[Path]:
    """Create an empty folder beside the target, locked for this process; it is removed if the block raises."""
    staging = target.with_name(f".{target.name}.partial")
    staging.mkdir(parents=True, exist_ok=True)
    with rundir.lock_folder(staging):
        try:
            for path in staging.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != rundir.LOCK:
                    path.unlink()
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def _describe_export(original: TrainedRun, exporter: Exporter, staging: Path) -> JsonTable:
    """Build the content of export.json without the proof."""
    files: JsonTable = {}
    for path in sorted(staging.rglob("*")):
        if path.is_file() and path.name != rundir.LOCK:
            name = str(path.relative_to(staging))
            files[name] = {"sha256": compute_sha256(path), "size": path.stat().st_size}
    return {
        "format_version": EXPORT_VERSION,
        "format": exporter.plugin_name(),
        "options": exporter.model_dump(mode="json"),
        "source": {
            "run": str(original.folder.resolve()),
            "run_id": rundir.read_machine(original.folder, rundir.Damage()).run_id,
            "step": original.step,
        },
        "versions": {
            "fivetune": fivetune.__version__,
            "torch": torch.__version__,
            **{name: _find_version(name) for name in exporter.packages},
        },
        "bytes": {
            "original": count_bytes(original.folder / "model"),
            "export": count_bytes(staging),
        },
        "files": files,
        "proof": None,
    }


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _compare_with_run(
    original: TrainedRun, exporter: Exporter, staging: Path, num_examples: int, on_progress: ProgressCallback
) -> JsonTable:
    """Prove the export; without evaluation data, or if that fails, the verdict is "not proved", with the reason."""
    exported = TrainedRun(staging, loaded=load_run_model(staging, on_damage=ignore_note))
    try:
        return compare_export(
            original,
            exported,
            num_examples=num_examples,
            compares_speed=exporter.has_own_engine,
            on_progress=on_progress,
        )
    except (DataError, UnknownPluginError) as error:  # no evaluation data, or a metric of one's own that is absent
        return {"verdict": "not proved", "reasons": [f"predictions, score and speed are not compared: {error}"]}
    except InterruptedRunError:
        raise
    except Exception as error:  # the export is whole, and its proof must not cost it
        return {"verdict": "not proved", "reasons": [f"the proof failed: {describe_failure(error)}"], "failed": True}
