"""model/ of a run directory: whether it is there and the run's own, and what its files say about answers.

In: a run directory. Out: the step of its weights, the generation cap; or an error with the command that repairs it.
"""

from __future__ import annotations

import json
from pathlib import Path

from fivetune.config import RunConfig
from fivetune.errors import RunDirError
from fivetune.model.decode import estimate_max_new_tokens
from fivetune.rundir import MACHINE, find_model_folder, read_data
from fivetune.rundir.checksums import MANIFEST, find_damage, read_owner
from fivetune.rundir.records import RunStatus
from fivetune.tasks import head_of


def find_whole_checkpoint(folder: Path) -> Path | None:
    """Find the newest whole checkpoint of a run, which may be in progress: nothing is renamed."""
    from fivetune.training.state import checkpoint  # needs torch

    for step in reversed(checkpoint.list_steps(folder / "checkpoints")):
        path = folder / "checkpoints" / str(step)
        if (find_damage(path) or checkpoint.find_state_damage(path)) is None:
            return path
    return None


def find_answering_checkpoint(folder: Path, status: RunStatus) -> Path | None:
    """Find the checkpoint that answers for a run that is not finished; None: model/ does. Raises RunDirError if a run
    has neither.
    """
    is_open = status.state != "finished" and not find_model_folder(folder).is_dir()
    if is_open and (checkpoint := find_whole_checkpoint(folder)):
        return checkpoint
    refuse_missing_model(folder, status)
    return None


def refuse_missing_model(folder: Path, status: RunStatus) -> None:
    """Raise RunDirError with the command that exports the model if there is no model/."""
    if find_model_folder(folder).is_dir():
        return
    if status.state == "finished":
        why = "model/ is missing, although the run is finished"
        advice = "Export it again from the checkpoint with"
    else:
        why = "has no model/ yet: the run is not finished"
        advice = "Resume with"
    raise RunDirError(f"{folder}: {why}. {advice}: fivetune train {folder} --resume")


def find_exported_step(folder: Path, status: RunStatus) -> int:
    """The step of the weights in model/; of the best checkpoint, else of the last one, if status.json is damaged; 0
    without checkpoints.
    """
    if status.best:
        return status.best.step
    if status.step:
        return status.step
    from fivetune.training.state import checkpoint  # needs torch

    # Without status.json the link says which checkpoint is the best.
    steps = checkpoint.list_steps(folder / "checkpoints")
    best = (folder / "best").resolve().name
    for step in steps:
        if str(step) == best:
            return step
    return max(steps, default=0)


def refuse_foreign_model(folder: Path, own: str | None) -> None:
    """Raise RunDirError if model/ of a run directory has no manifest or was exported by another run.

    Args:
        own: id of the run; None if machine.json is lost.
    """
    model = find_model_folder(folder)
    manifest = model / MANIFEST
    exporter = read_owner(model)
    if not manifest.is_file():
        reason = "is missing: whether model/ is whole and belongs to the run is unknown"
    elif own and exporter and exporter != own:
        reason = f"belongs to another run (id {exporter}; {MACHINE} of this run has {own})"
    else:
        return
    raise RunDirError(f"{manifest}: {reason}. {_advise_export(model)}")


def _advise_export(folder: Path) -> str:
    return f"Export the model again: delete {folder}, then run: fivetune train {folder.parent} --resume"


def with_exported_cap(config: RunConfig, folder: Path) -> RunConfig:
    """Add the generation cap of the exported model to the config, unless eval.max_new_tokens is set."""
    if config.eval.max_new_tokens or head_of(config.task) == "extractive":
        return config
    if not folder.is_dir():  # an unfinished run answers with a checkpoint
        train = read_data(folder.parent).train
        cap = estimate_max_new_tokens(train.target_p99) if train and train.target_p99 else None
        return config.replace("eval", max_new_tokens=cap)
    path = folder / "generation_config.json"
    try:
        cap = json.loads(path.read_bytes())["max_new_tokens"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RunDirError(
            f"{path}: holds no max_new_tokens, the generation cap of the run. {_advise_export(folder)}"
        ) from None
    return config.replace("eval", max_new_tokens=cap)
