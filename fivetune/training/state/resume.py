"""Rules of resuming: which settings, data and checkpoints must not change, and which changes are only reported.

In: a run directory, the config of the resumed run. Out: the run's earlier choices, warnings, or an error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from fivetune import rundir
from fivetune.config import RunConfig
from fivetune.config.layers import format_value
from fivetune.data.store.stream import ORDER_VERSION
from fivetune.errors import ConfigError, RunDirError
from fivetune.model.adapter import find_adapter
from fivetune.model.backend import Forward, ForwardKind, Parts
from fivetune.rundir import CONFIG, DATA, EVALS, MACHINE, STEPS
from fivetune.rundir.parse import parse_record
from fivetune.rundir.records import BestEval, ForwardFacts, RunPart
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.setup import MeasuredChoices, Setup
from fivetune.training.state import checkpoint
from fivetune.training.state.checkpoint import CheckpointOwner
from fivetune.types import JsonTable, Schedule
from fivetune.values import flatten_table, get_nested

SAME_SCORES = (
    "eval.every_steps",
    "eval.at_start",
    "eval.final",
    "eval.batch_size",
    "eval.metric",
)  # do not change any score
COMPARED = ("device", "precision", "num_threads", "model", "versions")  # facts compared between two parts of a run

CHANGEABLE = (  # settings that a resume may change; the number of steps too, so that a run can be extended
    "run.dir", "report", "telemetry", "search", "eval", "checkpoint", "launch", "strategy", "device", "data.cache_dir",
    "data.eval", "data.max_eval_examples",
    "data.num_processes", "train.capture", "train.precision", "train.log_every_steps", "train.num_threads",
    "train.num_steps", "train.num_epochs", "train.early_stopping",
)  # fmt: skip


def with_saved_batch_size(folder: Path, config: RunConfig) -> RunConfig:
    """Replace train.batch_size auto by the size that the run found when it began."""
    # Not searched again: with another size losses would round differently.
    before = get_nested(rundir.read_run_config(folder), "train", "batch_size")
    if config.train.batch_size != "auto" or type(before) is not int or before < 1:
        return config
    return config.replace("train", batch_size=before)


def read_forward(folder: Path) -> Forward | None:
    """Read the forward of a run from its newest checkpoint, else from machine.json; None if neither has it.

    Another forward rounds differently, so a resumed run would end with other weights.
    """
    # The checkpoint first: machine.json may be lost, or of a part that has saved nothing.
    newest = _find_newest(folder, "forward")
    found = parse_record(ForwardFacts, newest) if newest else rundir.read_machine(folder).forward
    if found is None or found.kind not in get_args(ForwardKind):
        return None
    parts = found.parts if found.parts in get_args(Parts) else "torch"
    return Forward(cast("ForwardKind", found.kind), found.why, found.recompute, cast("Parts", parts))


def read_choices(folder: Path) -> MeasuredChoices:
    """Read what a run chose by measurement when it began."""
    machine = rundir.read_machine(folder)
    return MeasuredChoices(read_forward(folder), machine.precision, machine.strategy.block_seconds)


def read_batch_size(folder: Path) -> int | None:
    """Read the examples per forward pass from the newest checkpoint; None without a checkpoint."""
    return _find_newest(folder, "batch_size")


def read_run_id(folder: Path) -> str:
    """Read the id of a run from machine.json, else from its newest checkpoint; a new id if neither has one."""
    return rundir.read_machine(folder).run_id or _find_newest(folder, "run_id") or uuid.uuid4().hex


def _find_newest(folder: Path, name: str) -> Any:
    """Find a fact in the owner of the newest checkpoint that has it; None if none has it."""
    values = [getattr(owner, name) for _, owner in _iter_owners(folder)]
    return next(filter(None, reversed(values)), None)


def describe_owner(folder: Path, setup: Setup) -> CheckpointOwner:
    """Build the owner record of the checkpoints that the run of a set-up writes in `folder`."""
    flat = _flatten_sections(setup.config.as_redacted_dict())
    adapter = find_adapter(setup.learner.model)
    base = ""
    if adapter and adapter.base:
        base = adapter.base.checksum
    owner = CheckpointOwner(
        run_id=read_run_id(folder),
        settings={key: value for key, value in flat.items() if not _is_changeable(key)},
        data=f"{setup.data.stream.store.fingerprint}, order {ORDER_VERSION}",
        forward=setup.learner.forward.as_facts(),
        base=base,
    )
    if setup.data.evaluator:
        return with_evaluation(owner, setup.config, setup.data.evaluator)
    # Without evaluation data the best evaluation so far remains: of the earlier data and settings.
    owners = [found for _, found in _iter_owners(folder)]
    before = owners[-1] if owners else owner
    return replace(owner, eval_data=before.eval_data, eval_settings=before.eval_settings)


def with_evaluation(owner: CheckpointOwner, config: RunConfig, evaluator: Evaluator) -> CheckpointOwner:
    """Replace the evaluation data and settings of an owner record, which decide its eval_basis."""
    # A limit that limits nothing is the same as none.
    settings = select_scored_settings(config)
    limit = config.eval.max_examples
    if limit is None or limit >= evaluator.num_questions:
        settings["eval.max_examples"] = None
    return replace(owner, eval_data=evaluator.store.fingerprint, eval_settings=settings)


def select_scored_settings(config: RunConfig) -> JsonTable:
    """Select the settings of evaluation that can change a prediction or a score, by dotted name."""
    flat = _flatten_sections(config.as_redacted_dict())
    return {key: flat[key] for key in flat if key.startswith("eval.") and key not in SAME_SCORES}


def refuse_foreign_checkpoints(folder: Path, owner: CheckpointOwner) -> None:
    """Raise unless all whole checkpoints in `folder` belong to the run: its id, data, settings, base of an adapter.

    config.yaml may have been edited since they were written: the settings of the checkpoint count.
    """
    for path, found in reversed(list(_iter_owners(folder))):  # of several, the newest is named
        if found.run_id and found.run_id != owner.run_id:
            raise RunDirError(
                f"{path}: belongs to another run (id {found.run_id}; {MACHINE} of this run has {owner.run_id}). "
                f"Put back the run's own checkpoint, or the run's own {MACHINE}."
            )
        # The order of examples is part of it: the position in the data is a number of steps.
        if found.data and found.data != owner.data:
            file = path.relative_to(folder) / "state.json"
            raise RunDirError(
                f"{folder}: was trained on other data (the fingerprint in {file} differs). Start a new run for new "
                "data, put back the files of data.train, or go on with the version of FiveTune that began it "
                "(machine.json): another one may tokenise or order them differently."
            )
        # Settings that a resume may change are not among them.
        changed = _compare_settings(found.settings, owner.settings, found.settings)
        if changed:
            raise ConfigError(
                f"{folder}: the checkpoint of step {path.name} was trained with other settings: "
                f"{_list_changes(changed)}. Put them back into {CONFIG}, or start a new run in another run.dir."
            )

        # An adapter's checkpoint has no weights of the base, which is read anew.
        if found.base and found.base != owner.base:
            raise RunDirError(
                f"{path}: its adapter was trained on {owner.settings['model.path']} with weights {found.base}, and "
                f"that model has weights {owner.base} now. Put its files back, or start a new run in another run.dir."
            )


def _iter_owners(folder: Path) -> Iterator[tuple[Path, CheckpointOwner]]:
    """Yield the checkpoints with a whole state.json in order of steps, each with its owner."""
    for step in checkpoint.list_steps(folder / "checkpoints"):
        path = folder / "checkpoints" / str(step)
        with suppress(ValueError):
            if checkpoint.find_damage(path, names=("state.json",)) is None:
                yield path, checkpoint.read_state(path)[1]


def refuse_changes(folder: Path, config: RunConfig) -> None:
    """Raise ConfigError, listing the differences, if `config` changes settings that a resume must not change."""
    changed = find_changed_settings(rundir.read_run_config(folder), config.as_redacted_dict())
    if changed:
        raise ConfigError(
            f"{folder}: the run was started with other settings: {_list_changes(changed)}. "
            f"Resume it as it was (fivetune train {folder} --resume), or choose another run.dir."
        )


def _list_changes(changed: dict[str, tuple[Any, Any]]) -> str:
    return "; ".join(f"{key} was {format_value(old)}, is {format_value(new)}" for key, (old, new) in changed.items())


def list_saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints that have a state, damaged or not; an empty folder is none."""
    return [step for step in checkpoint.list_steps(folder) if (folder / str(step) / "state.json").is_file()]


def describe_lost_files(folder: Path, *, set_aside: Container[str] = ()) -> list[str]:
    """Describe each missing file that a run with a checkpoint has written.

    Args:
        set_aside: names of damaged files that were renamed and reported already.
    """
    if not list_saved_steps(folder / "checkpoints"):
        return []
    names = [MACHINE, DATA, STEPS]
    if (folder / "best").is_symlink():  # the run has evaluated
        names.append(EVALS)
    lost = [name for name in names if name not in set_aside and not (folder / name).is_file()]
    return [f"{name} is missing: a new one is written, without the run's earlier records." for name in lost]


def add_part(parts: Sequence[RunPart], machine: JsonTable, *, step: int) -> tuple[list[RunPart], list[str]]:
    """Append the part that begins now to the parts of a run.

    Args:
        parts: parts in machine.json, as the previous part wrote them.
        machine: the facts of this part, as in machine.json.
        step: first step of this part.

    Returns: the parts, and a warning if the environment differs from the previous part's.
    """
    part = RunPart(
        step=step,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        device=get_nested(machine, "device", "name") or get_nested(machine, "device", "kind"),
        precision=machine.get("precision"),
        num_threads=machine.get("num_threads"),
        model=machine.get("model"),
        versions=machine.get("versions", {}),
    )
    if not parts:
        return [part], []
    old = flatten_table({name: getattr(parts[-1], name) for name in COMPARED})
    new = flatten_table({name: getattr(part, name) for name in COMPARED})
    changed: dict[str, str] = {}
    for key in sorted({*old, *new}):
        was = old.get(key)
        now = new.get(key)
        if was is None and key in ("precision", "model"):  # of a run that began before this was recorded
            continue
        if was != now:
            changed[key] = f"{key}: {'none' if was is None else was} -> {'none' if now is None else now}"
    if not changed:
        return [*parts, part], []

    # What the change does to losses and weights.
    effects: list[str] = []
    if "precision" in changed:
        effects.append(f"Losses differ by the rounding of {part.precision} instead of {parts[-1].precision}.")
    elif list(changed) != ["model"]:
        effects.append("Losses may differ in the last bits.")
    if "model" in changed:
        source = "the checkpoint" if step else "the new files"
        effects.append(f"The weights at model.path have changed: the run continues with those of {source}.")
    warning = f"from step {step:,} on the environment differs: {'; '.join(changed.values())}. {' '.join(effects)}"
    return [*parts, replace(part, changed=tuple(changed.values()))], [warning]


def refuse_fewer_steps(folder: Path, done: int, num_steps: int) -> None:
    """Raise ConfigError if the run has done more than `num_steps` steps."""
    if num_steps < done:
        raise ConfigError(
            f"{folder}: has done {done:,} steps, and train.num_steps or train.num_epochs sets {num_steps:,}. "
            "Set at least as many, or choose another run.dir."
        )


def describe_schedule_change(schedule: Schedule, before: int, after: int) -> list[str]:
    """Describe that `after` steps instead of `before` change the learning rate of their common steps; [] if not."""
    # Tried, not known by name: a constant rate, or one without a length, is the same.
    common = range(min(before, after))
    if all(schedule.factor(step, before) == schedule.factor(step, after) for step in common):
        return []
    return [
        f"the run was started for {before:,} steps and now has {after:,}: schedule.name {schedule.plugin_name()} "
        "uses the new number from here, so the learning rate jumps, unlike in an uninterrupted run"
    ]


def describe_other_evaluation(best: BestEval | None, metric: str, before: CheckpointOwner, now: CheckpointOwner) -> str:
    """Describe why later scores cannot be compared with earlier ones; "" if they can.

    They cannot if eval.metric, the evaluation data or a setting that changes scores is another one.

    Args:
        best: the best evaluation of the checkpoint that `before` owns; None if no evaluation counts as the best.
    """
    changes: list[str] = []
    if best and best.metric != metric:
        changes.append(f"eval.metric was {best.metric}, is {metric}")
    if before.eval_data and before.eval_data != now.eval_data:
        changes.append("the evaluation data differ")
    # A setting that one of two versions of FiveTune does not have is no change.
    common = [key for key in before.eval_settings if key in now.eval_settings]
    changed = _compare_settings(before.eval_settings, now.eval_settings, common)
    if changed:
        changes.append(_list_changes(changed))
    if not changes:
        return ""
    if best is None:
        return f"the evaluations so far are not compared with later ones: {' and '.join(changes)}."
    return (
        f"the best evaluation so far, of step {best.step:,}, is no longer compared with later ones: "
        f"{' and '.join(changes)}. The best one is chosen among the evaluations from here."
    )


def describe_last_evaluation(best: BestEval) -> str:
    """Describe what follows for a run that is resumed without the evaluation data that it had."""
    return (
        "the run has no evaluation data now: later steps are not evaluated. model/ gets the weights of the best "
        f"evaluation so far, of step {best.step:,}. To choose among later steps too, resume with evaluation data."
    )


def find_changed_settings(before: JsonTable, after: JsonTable) -> dict[str, tuple[object, object]]:
    """Find changed settings that a resume must not change: (before, after) by dotted name.

    >>> find_changed_settings({"run": {"seed": 1}, "device": "cpu"}, {"run": {"seed": 2}, "device": "cpu"})
    {'run.seed': (1, 2)}
    """
    old = _flatten_sections(before)
    new = _flatten_sections(after)
    fixed = [key for key in sorted({*old, *new}) if not _is_changeable(key)]
    return _compare_settings(old, new, fixed)


def _compare_settings(old: JsonTable, new: JsonTable, keys: Iterable[str]) -> dict[str, tuple[object, object]]:
    """Compare two tables of settings: (old, new) by each of the keys whose values differ."""
    changed: dict[str, tuple[object, object]] = {}
    for key in keys:
        if old.get(key) != new.get(key):
            changed[key] = old.get(key), new.get(key)
    return changed


def _is_changeable(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in CHANGEABLE)


def _flatten_sections(table: JsonTable) -> JsonTable:
    flat: JsonTable = {}
    for section, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            flat[section] = value
    return flat
