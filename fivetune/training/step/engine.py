"""The choice of the engine that runs the steps and the answers of a run: torch, or TPU chips.

In: a RunConfig and a model. Out: a StepEngine, or the reason why the chips cannot run them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fivetune.config import RunConfig
from fivetune.errors import ConfigError
from fivetune.model.adapter import find_adapter
from fivetune.model.family import explain_unsupported_parts, get_family
from fivetune.tasks import head_of
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.step.learner import StepEngine
from fivetune.training.step.plain import PlainEngine

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model


def build_engine(config: RunConfig, model: T5Model, compute: ComputeConfig) -> StepEngine:
    """Build what runs steps and answers: torch, or TPU chips. Raises ConfigError for what these do not support."""
    if compute.kind != "tpu":
        return PlainEngine()
    if reason := explain_unsupported_parts(get_family(model.config), strategy="single", sharded=False, device="tpu"):
        raise ConfigError(reason)
    # Training refuses adapters before; those that a trained run still has are virtual tokens, which are not merged.
    if find_adapter(model):
        raise ConfigError("device: tpu has no virtual tokens, which the run was trained with. Use device cpu or cuda.")
    if head_of(config.task) == "extractive":
        raise ConfigError("device: tpu has no extractive answers. Set task.head generate, or use device cpu or cuda.")
    from fivetune.training.step.tpu import Chips

    return Chips(
        model,
        sharded=config.strategy.sharded,
        precision=compute.precision,
        max_norm=config.train.max_grad_norm,
        seed=config.run.seed,
    )
