"""plan.json: the numbers that a run resolves at its start, and their only home.

config.yaml holds the settings as given or defaulted; plan.json holds the numbers derived from settings, data and
machine: optimizer steps, evaluation interval, micro-batch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

from fivetune.errors import RunDirError
from fivetune.rundir.damage import Damage
from fivetune.rundir.layout import PLAN
from fivetune.rundir.parse import name_json_type
from fivetune.types import JsonTable, JsonValue

COUNTS = ("batch_size", "num_steps", "eval_every_steps", "checkpoint_every_steps")
OPTIONAL = ("max_new_tokens", "lr")


@dataclass(frozen=True, slots=True)
class Plan:
    """The resolved numbers of a run.

    Args:
        batch_size: examples per forward pass; below the one in config.yaml if memory ran out in a step.
        num_steps: optimizer steps of the whole run.
        eval_every_steps, checkpoint_every_steps: at least 1; the last step always has both.
        max_new_tokens: generation cap; None without evaluation data.
        lr: peak learning rate; None where the optimizer computes its own.
        class_weights: factor of the loss by label; {} without loss.class_weights.
    """

    batch_size: int
    num_steps: int
    eval_every_steps: int
    checkpoint_every_steps: int
    max_new_tokens: int | None = None
    lr: float | None = None
    class_weights: dict[str, float] = field(default_factory=dict[str, float])

    def with_batch_size(self, batch_size: int) -> Plan:
        """Return the plan with another micro-batch, the only number that may change during a run.

        >>> Plan(8, 100, 10, 10).with_batch_size(4).batch_size
        4
        """
        return replace(self, batch_size=batch_size)

    def as_dict(self) -> JsonTable:
        return asdict(self)


def read_plan(folder: str | Path, damage: Damage | None = None) -> Plan | None:
    """Read plan.json; None if the run ended before it was written.

    Args:
        damage: receives a sentence if the file is damaged, which then counts as missing; only a resume needs it.

    Raises RunDirError for a damaged file if `damage` is None.
    """
    try:
        return _parse_plan(Path(folder) / PLAN)
    except RunDirError as error:
        if damage is None:
            raise
        damage.append(str(error))
        return None


def _parse_plan(path: Path) -> Plan | None:
    if not path.is_file():
        return None
    try:
        found: JsonValue = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _build_damage_error(path, f"it cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _build_damage_error(path, "it is not JSON") from None
    if not isinstance(found, dict):
        raise _build_damage_error(path, f"it holds {name_json_type(found)} instead of an object")
    if missing := [name for name in (*COUNTS, *OPTIONAL) if name not in found]:
        raise _build_damage_error(path, f"it has no {', '.join(missing)}")
    for name in (*COUNTS, "max_new_tokens"):
        if name == "max_new_tokens" and found[name] is None:  # no evaluation data
            continue
        if type(found[name]) is not int or found[name] < 1:
            raise _build_damage_error(path, f"{name} is {found[name]!r}, not a whole number from 1 on")
    if found["lr"] is not None and not isinstance(found["lr"], int | float):
        raise _build_damage_error(path, f"lr is {found['lr']!r}, not a number")
    weights: object = found.get("class_weights", {})
    if not isinstance(weights, dict):
        raise _build_damage_error(path, f"class_weights is {weights!r}, not a table")
    return Plan(**{name: found[name] for name in (*COUNTS, *OPTIONAL)}, class_weights=cast("dict[str, float]", weights))


def _build_damage_error(path: Path, reason: str) -> RunDirError:
    return RunDirError(f"{path}: damaged: {reason}. To resume the run, delete the file: a resume writes it again.")
