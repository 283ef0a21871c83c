"""Decides the plan of a run: its numbers of steps, micro-batch, intervals and generation cap.

In: a RunConfig, the size of the data, the micro-batch. Out: a Plan, frozen, which the run writes as plan.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from fivetune.config import RunConfig
from fivetune.rundir.plan import Plan

EVALUATIONS_PER_RUN = 10
DEFAULT_NUM_EPOCHS = 3


def decide_plan(
    config: RunConfig,
    *,
    batch_size: int,
    steps_per_epoch: float,
    lr: float | None,
    max_new_tokens: int | None,
    class_weights: Mapping[str, float],
) -> Plan:
    """Decide the plan of a run.

    Args:
        batch_size: examples per forward pass.
        steps_per_epoch: optimizer steps per epoch.
        lr: peak learning rate; None if the optimizer computes its own.
        max_new_tokens: generation cap of the evaluator; None without evaluation data.
        class_weights: factor of the loss by label; {} without loss.class_weights.
    """
    num_epochs = config.train.num_epochs or DEFAULT_NUM_EPOCHS
    num_steps = config.train.num_steps or max(1, round(num_epochs * steps_per_epoch))
    # A checkpoint with each evaluation, so that the best weights can be exported.
    eval_every_steps = config.eval.every_steps or ceil(num_steps / EVALUATIONS_PER_RUN)
    return Plan(
        batch_size=batch_size,
        num_steps=num_steps,
        eval_every_steps=eval_every_steps,
        checkpoint_every_steps=config.checkpoint.every_steps or eval_every_steps,
        max_new_tokens=max_new_tokens,
        lr=lr,
        class_weights=dict(class_weights),
    )
