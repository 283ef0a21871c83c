"""What may change between the parts of a run that is stopped and resumed, and what may not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from fivetune import rundir
from fivetune.config import RunConfig
from fivetune.errors import ConfigError, RunDirError
from fivetune.model.backend import Forward
from fivetune.rundir import CONFIG, MACHINE
from fivetune.training.setup import with_batch_size

FREE = (  # what may change; the number of steps too, so that a run can be made longer
    "run.dir", "report", "telemetry", "search", "eval", "checkpoint", "launch", "strategy", "data.cache_dir",
    "data.eval", "data.max_eval_examples", "train.capture", "train.log_every_steps", "train.num_threads",
    "train.num_steps", "train.num_epochs",
)  # fmt: skip


def as_begun(folder: Path, config: RunConfig) -> RunConfig:
    """The config with the batch size that the run found when it began, where it says auto."""
    before = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))["train"]["batch_size"]
    if config.train.batch_size != "auto" or before == "auto":
        return config
    return with_batch_size(config, before)


def forward_begun(folder: Path) -> Forward | None:
    """The forward that the run in `folder` began with; None where it did not get that far."""
    path = folder / MACHINE
    return Forward(**json.loads(path.read_text(encoding="utf-8"))["forward"]) if path.is_file() else None


def refuse_changes(folder: Path, config: RunConfig) -> None:
    """Raise ConfigError, listing what differs, if `config` would train something else than the run did so far."""
    before = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    changed = differences(before, config.as_dict())
    if changed:
        listed = "; ".join(f"{key} was {old!r}, is {new!r}" for key, (old, new) in changed.items())
        raise ConfigError(
            f"{folder}: the run was started with other settings: {listed}. "
            f"Resume it as it was (fivetune train {folder} --resume), or choose another run.dir."
        )


def refuse_other_data(folder: Path, fingerprint: str) -> None:
    """Raise RunDirError if the run in `folder` was trained on a set with another fingerprint."""
    before = rundir.read_data(folder).get("train", {}).get("fingerprint", fingerprint)
    if before != fingerprint:
        raise RunDirError(
            f"{folder}: was trained on other data (its fingerprint differs). Start a new run for new data, "
            "or put back the files of data.train."
        )


def refuse_fewer_steps(folder: Path, done: int, num_steps: int) -> None:
    """Raise ConfigError if a run of `num_steps` is to go on from a later step."""
    if num_steps < done:
        raise ConfigError(
            f"train.num_steps: {num_steps:,} steps are asked for, and {folder} has done {done:,}. "
            "Ask for at least as many, or choose another run.dir."
        )


def changed_schedule(schedule: Any, before: int, after: int) -> str | None:
    """What to warn of if `after` steps instead of `before` change the learning rate of steps that both have."""
    if all(schedule.factor(step, before) == schedule.factor(step, after) for step in range(min(before, after))):
        return None
    return (
        f"the run was started for {before:,} steps and goes on for {after:,}: schedule.name {schedule.plugin_name()} "
        "follows the new number from here, so the learning rate makes a jump that no uninterrupted run has"
    )


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ and matter, by dotted name.

    >>> differences({"run": {"seed": 1}, "device": "cpu"}, {"run": {"seed": 2}, "device": "cpu"})
    {'run.seed': (1, 2)}
    """
    found = {}
    for key in sorted({*_flat(before), *_flat(after)}):
        old, new = _flat(before).get(key), _flat(after).get(key)
        if old != new and not any(key == free or key.startswith(f"{free}.") for free in FREE):
            found[key] = (old, new)
    return found


def _flat(table: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            flat[section] = value
    return flat
