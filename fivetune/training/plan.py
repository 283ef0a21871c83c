"""How the numbers of a run are decided: from settings, the size of the data and what the device takes.

In: a RunConfig and what was built from it. Out: a Plan, frozen, which the run writes as plan.json.
"""

from __future__ import annotations

from math import ceil

from fivetune.config import RunConfig
from fivetune.rundir.plan import Plan

EVALUATIONS_PER_RUN = 10
DEFAULT_NUM_EPOCHS = 3


def decide_plan(
    config: RunConfig, *, batch_size: int, steps_per_epoch: float, lr: float | None, max_new_tokens: int | None
) -> Plan:
    """The plan of a run.

    Args:
        batch_size: examples per forward pass that fit into memory.
        lr: peak learning rate of the optimizer; None where it computes its own.
        max_new_tokens: the evaluator's cap; None without evaluation data.
    """
    num_epochs = config.train.num_epochs or DEFAULT_NUM_EPOCHS
    num_steps = config.train.num_steps or max(1, round(num_epochs * steps_per_epoch))
    eval_every_steps = config.eval.every_steps or ceil(num_steps / EVALUATIONS_PER_RUN)
    return Plan(
        batch_size=batch_size,
        num_steps=num_steps,
        eval_every_steps=eval_every_steps,
        checkpoint_every_steps=config.checkpoint.every_steps or eval_every_steps,
        max_new_tokens=max_new_tokens,
        lr=lr,
    )
