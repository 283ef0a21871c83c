"""Pipeline parallel: every rank of a copy holds consecutive blocks, a stage, through which the micro-batches pass.

The first stages hold the encoder, the others the decoder; where to cut follows from the blocks' cost, measured or
counted, or from their weights. A weight that several stages use (an embedding that the head shares, a table
of relative biases) is held by each of them, and its gradients are summed. Micro-batches (train.batch_size) fill the
pipeline: with m of them and p stages, a stage waits for at least (p - 1) / (m + p - 1) of a step (the bubble).
The passes are run by `fivetune.training.step.pipeline`.

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B, here with a flush after each step).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field

from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.sharding import scale_gradients
from fivetune.training.strategies import ShardedOptions, list_divisors
from fivetune.training.strategies._stages import assign_stage, count_block_weights
from fivetune.types import Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class Pipeline(ShardedOptions):
    """Consecutive blocks on each rank; micro-batches pass through all of them."""

    complexity = 5
    size_option = "stages"

    stages: Annotated[int, Field(ge=2)] | None = Field(
        None, description="ranks that share one copy of the model, each with some of its blocks; default: all"
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        default="1f1b",
        description="order of passes: gpipe, all forward passes first; 1f1b, a backward pass as soon as possible, so "
        "that a rank keeps the activations of at most `stages` micro-batches",
    )

    balance: Literal["measured", "counted", "memory"] = Field(
        default="measured",
        description="what the stages have equal shares of: measured, the seconds of a first micro-batch; counted, the "
        "operations for the data's lengths; memory, the weights of the blocks",
    )

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]:
        for stages in list_divisors(num_ranks):
            yield cls(stages=None if stages == num_ranks else stages)

    def get_layout(self, num_ranks: int) -> Layout:
        return Layout(num_ranks, stages=self.get_model_size(num_ranks))

    @property
    def needs_block_seconds(self) -> bool:
        return self.balance == "measured"

    def get_model_size(self, num_ranks: int) -> int:
        return self.stages or num_ranks

    def get_seed_offset(self, world: World) -> int:
        return world.rank  # the stages compute different blocks: their dropout masks are independent

    def explain_incompatibility(self, settings: RunSettings) -> str:
        if settings.forward not in ("auto", "flat"):
            return (
                f"train.forward {settings.forward} computes the whole model. Use auto or flat with strategy.name "
                "pipeline"
            )
        return super().explain_incompatibility(settings)

    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        if self.balance == "memory":
            costs = count_block_weights(model)
        assign_stage(model, device, world, costs, schedule=self.schedule)

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        import torch

        stage = find_stage(model)
        if stage is None:
            return super().clip(model, max_norm)
        # A weight of several stages counts once: on the stage that owns it.
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        own = [gradient for name, gradient in gradients.items() if stage.is_owner(name)]
        square = torch.nn.utils.get_total_norm(own).float().square()
        norm = stage.sum_over_stages(square).sqrt()
        scale_gradients(list(gradients.values()), norm, max_norm)
        return norm
