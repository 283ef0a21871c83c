"""Pipeline parallel: every rank of a copy holds consecutive blocks, a stage, through which the micro-batches pass.

The first stages hold the encoder, the others the decoder; where to cut follows from the blocks' cost, measured or
counted, or from their weights. A weight that several stages use (an embedding that the head shares, a table
of relative biases) is held by each of them, and its gradients are summed. Micro-batches (train.batch_size) fill the
pipeline: with m of them and p stages, a stage waits for at least (p - 1) / (m + p - 1) of a step (the bubble).

Sources: Huang et al. 2019, "GPipe"; Narayanan et al. 2019, "PipeDream" (1F1B, here with a flush after each step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from fivetune.distributed.pipeline import find_stage, order_passes
from fivetune.distributed.sharding import scale_gradients
from fivetune.errors import is_out_of_memory
from fivetune.training.strategies import ShardedOptions, list_divisors
from fivetune.training.strategies._stages import assign_stage, count_block_weights
from fivetune.types import Layout, ignore_phase

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fivetune.distributed.world import World
    from fivetune.types import Batch, PhaseTimer, RunSettings


class Pipeline(ShardedOptions):
    """Consecutive blocks on each rank; micro-batches pass through all of them."""

    complexity: ClassVar[int] = 5
    size_option: ClassVar[str] = "stages"

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
        assign_stage(model, device, world, count_block_weights(model) if self.balance == "memory" else costs)

    def accumulate_gradients(
        self,
        model: nn.Module,
        world: World,
        batches: Sequence[Batch],
        compute_loss: Callable[[Batch], Tensor],
        backward: Callable[[Tensor], object],
        count_rows: Callable[[Batch], tuple[int, int]],
        timer: PhaseTimer,
    ) -> Tensor:
        import torch

        stage = find_stage(model)
        if stage is None:
            return super().accumulate_gradients(model, world, batches, compute_loss, backward, count_rows, timer)
        total, losses, failed = torch.zeros((), device=stage.device), deque[Any](), None
        waiting = {"F": iter(batches), "B": iter(batches)}
        stage.timer = timer
        for kind in order_passes(self.schedule, stage.number, len(stage.ranks), len(batches)):
            batch = next(waiting[kind])
            stage.begin_pass()
            try:
                if failed is None and kind == "F":
                    losses.append(compute_loss(batch))
                    total += losses[-1].detach()
                elif failed is None:
                    stage.run_backward(losses.popleft(), backward)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failed = error.with_traceback(None)  # whose frames hold activations
                losses.clear()
                stage.forget_passes()
                model.zero_grad(set_to_none=True)
            if failed is not None:
                config: Any = model.config
                stage.send_zeros(kind, count_rows(batch), config.d_model)
        stage.timer = ignore_phase  # generation passes through the stages too
        timer("exchange")
        stage.finish_sends()
        stage.sum_shared_gradients(model)
        total = stage.broadcast_last(total)
        if failed is not None:
            raise failed
        return total

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        import torch

        stage = find_stage(model)
        if stage is None:
            return super().clip(model, max_norm)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        own = [gradient for name, gradient in gradients.items() if stage.is_owner(name)]
        norm = stage.sum_over_stages(torch.nn.utils.get_total_norm(own).float().square()).sqrt()
        scale_gradients(list(gradients.values()), norm, max_norm)
        return norm
