"""plan.json: the numbers that a run resolves at its start, and their only home.

config.yaml holds the settings as given or defaulted; plan.json holds the numbers derived from settings, data and
machine: optimizer steps, evaluation interval, micro-batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace

from fivetune.types import JsonTable


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

    def find_flaw(self) -> str | None:
        """Return why a plan cannot be one; None if it can."""
        for name in ("batch_size", "num_steps", "eval_every_steps", "checkpoint_every_steps", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                return f"{name} is {value}, not a whole number from 1 on"
        return None

    def as_dict(self) -> JsonTable:
        return asdict(self)
