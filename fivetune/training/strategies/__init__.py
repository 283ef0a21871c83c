"""Strategies: how the model is placed on the devices of the ranks, one per file.

A strategy's file holds one subclass of `StrategyOptions`, whose fields are its options. All of them compute the same
update: `launch.nproc` and `strategy` change speed and memory, not the result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Self

from fivetune.distributed.collective_log import find_collective_log
from fivetune.distributed.sharding import compute_sharded_norm, is_sharded, scale_gradients
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import is_out_of_memory
from fivetune.plugins import Options
from fivetune.training.strategies._buckets import get_reducer
from fivetune.types import Layout, ModelT

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fivetune.types import Batch, Passes, RunSettings

__all__ = ["ShardedOptions", "StrategyOptions", "build_minimal_batch", "is_on_meta"]

MINIMAL_LENGTHS = (9, 2)  # tokens of inputs and targets; a span head has two targets


def is_on_meta(model: nn.Module) -> bool:
    """Whether the weights have no values yet: they are loaded in shards after `StrategyOptions.wrap`."""
    return next(model.parameters()).is_meta


def list_divisors(number: int) -> list[int]:
    """List the divisors from 2 on.

    >>> list_divisors(8)
    [2, 4, 8]
    """
    return [size for size in range(2, number + 1) if number % size == 0]


def build_minimal_batch(batch: Batch) -> Batch:
    """Build a batch of weight 0 that takes almost no memory, in place of another one.

    Its inputs and targets have different lengths, also in rectangles of a few fixed sizes, so that a number of rows
    identifies the stack.
    """
    import torch

    num_inputs, num_targets = MINIMAL_LENGTHS
    return replace(
        batch,
        input_ids=torch.zeros(num_inputs, dtype=torch.int64),
        labels=torch.zeros(num_targets, dtype=torch.int64),
        cu_seqlens_src=torch.tensor([0, num_inputs]),
        cu_seqlens_tgt=torch.tensor([0, num_targets]),
        ids=batch.ids[:1],
        is_filler=True,
    )


class StrategyOptions(Options):
    """Base of all strategies, which describes the contract `fivetune.types.Strategy`.

    The defaults are for an unsharded model; gradients are summed over its copies, during the last backward pass.
    """

    supports_multiple: ClassVar[bool] = True  # whether it supports more than one rank
    sharded: ClassVar[bool] = False  # whether each rank holds a shard of the weights
    supports_tpu: ClassVar[bool] = False  # whether the chips of device tpu, which one process uses, are divided alike
    complexity: ClassVar[int] = 9  # place in the order in which estimates propose what fits, the simplest first
    size_option: ClassVar[str] = "size"  # option that sets `get_model_size`

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]:
        """Yield the options that an estimate compares on so many ranks, the ones that communicate least first.

        Args:
            per_node: ranks of one node, which divides num_ranks or equals it.
        """
        yield cls()

    @property
    def needs_block_seconds(self) -> bool:
        """Whether the costs that `wrap` receives are measured seconds; else operations."""
        return False

    def explain_incompatibility(self, settings: RunSettings) -> str:
        """Explain why several ranks cannot train with these settings, beginning with a key; empty if they can."""
        return ""

    def get_model_size(self, num_ranks: int) -> int:
        """The number of ranks that share one copy of the model and compute the same examples.

        >>> StrategyOptions().get_model_size(4)
        1
        """
        return 1

    def get_layout(self, num_ranks: int) -> Layout:
        """How so many ranks share the model, from which its memory is estimated."""
        return Layout(num_ranks)

    def get_seed_offset(self, world: World) -> int:
        """What to add to the seed of this rank's dropout masks: ranks with the same number draw the same masks."""
        return world.data_rank

    def wrap(
        self,
        model: ModelT,
        device: str,
        world: World = SINGLE_PROCESS,
        *,
        precision: str = "fp32",
        costs: Sequence[float] = (),
    ) -> ModelT:
        """Place the model on its device with the weights of rank 0. Collective: all ranks call it.

        A model on torch's meta device is sharded there; `fivetune.model.shards.load_shards` gives it values.

        Args:
            precision: precision of the matrix products; gathered weights need no more.
            costs: cost of computing every block, the encoder's first, in any unit; () if unknown.
        """
        model = model.to(device)
        world.broadcast(list(model.parameters()))
        return model

    def get_weight_device(self, device: str) -> str:
        """The device of weights that are loaded in shards, for computations on `device`."""
        return device

    @contextmanager
    def suppress_warnings(self) -> Iterator[None]:
        """Hide the warnings of libraries that need no action, as long as a run lasts."""
        yield

    def prepare_backward(self, model: nn.Module, world: World, *, is_last: bool) -> None:
        """Called before the forward pass of every micro-batch.

        Args:
            is_last: whether it is the last one of the step, after which gradients are reduced.
        """
        if is_last and world.data_size > 1:
            get_reducer(model, world).start()

    def accumulate_gradients(self, model: nn.Module, world: World, batches: Sequence[Batch], passes: Passes) -> Tensor:
        """Add the gradients of all micro-batches of a step to the parameters; returns the sum of their losses, [].

        An out-of-memory error is raised when this rank has taken part in all collectives of the micro-batches, so that
        no other rank waits for it; the gradients are not valid then, on any rank.
        """
        total: Tensor | None = None
        for number, batch in enumerate(batches, start=1):
            self.prepare_backward(model, world, is_last=number == len(batches))
            loss = passes.compute_loss(batch)
            passes.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None, "a step has at least one micro-batch"
        return total

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        """Sum the gradients over the copies of the model, as far as the backward pass has not.

        Collective: a rank whose backward pass failed calls it too, and its gradients count as 0.
        """
        if world.data_size > 1:
            get_reducer(model, world).finish()

    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor:
        """Scale the gradients so that their global norm is at most `max_norm`; returns the norm before."""
        import torch

        from fivetune.training.optimizers._table_adamw import compute_total_norm, scale_tables

        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # Sharded gradients: squares are summed over the ranks, each shard once.
        if any(is_sharded(gradient) for gradient in gradients):
            norm = compute_sharded_norm(gradients)
            scale_gradients(gradients, norm, max_norm)
            return norm
        norm = compute_total_norm(parameters)
        if max_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
            scale_tables(parameters, max_norm, norm)
        return norm


class ShardedOptions(StrategyOptions):
    """Base of the strategies under which each rank holds a part of the weights."""

    sharded = True

    def explain_incompatibility(self, settings: RunSettings) -> str:
        name = self.plugin_name()
        if settings.precision == "fp16":
            return f"train.precision fp16 adapts the loss scale on each rank alone. Use bf16 with strategy.name {name}"
        if settings.batch_size == "auto":
            return f"train.batch_size auto is measured on each rank alone; strategy.name {name} needs all. Set a number"
        return ""

    def explain_whole_tensors(self, settings: RunSettings) -> str:
        """Explain that the optimizer needs whole tensors, if it does; for strategies that divide them."""
        if settings.supports_shards:
            return ""
        return (
            f"optimizer.name {settings.optimizer} needs whole tensors, and strategy.name {self.plugin_name()} divides "
            "them. Use another optimizer (docs/optimizers.md), or strategy.name ddp or pipeline"
        )

    def wrap(
        self,
        model: ModelT,
        device: str,
        world: World = SINGLE_PROCESS,
        *,
        precision: str = "fp32",
        costs: Sequence[float] = (),
    ) -> ModelT:
        if world.size == 1:
            return model.to(device)
        # A model with values: all ranks begin with rank 0's. One without them reads its shards from the files.
        if not is_on_meta(model):
            world.broadcast(list(model.parameters()))
        self.shard(model, device, world, precision=precision, costs=costs)
        return model

    def accumulate_gradients(self, model: nn.Module, world: World, batches: Sequence[Batch], passes: Passes) -> Tensor:
        log = find_collective_log(model)
        total = None
        failed = None
        for number, batch in enumerate(batches, start=1):
            is_last = number == len(batches)
            log.begin()
            if failed is None:
                try:
                    self.prepare_backward(model, world, is_last=is_last)
                    loss = passes.compute_loss(batch)
                    passes.backward(loss)
                    total = loss.detach() if total is None else total + loss.detach()
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error) or not self.can_forget_passes(model):
                        raise
                    failed = error.with_traceback(None)  # whose frames hold activations
                loss = None  # frees its activations before a minimal batch or the next one
            # In place of what failed, and of all that follows, a minimal batch takes part in the collectives: the log
            # says which of them this rank has not run yet.
            if failed is not None:
                self.forget_passes(model)
                minimal = build_minimal_batch(batch)
                rows = zip(passes.count_rows(minimal), passes.count_rows(batch), strict=True)
                log.replay(dict(rows))
                self.prepare_backward(model, world, is_last=is_last)
                passes.backward(passes.compute_loss(minimal))
        log.begin()
        if failed is not None:
            self.forget_passes(model)
            raise failed
        assert total is not None, "a step has at least one micro-batch"
        return total

    def can_forget_passes(self, model: nn.Module) -> bool:
        """Whether passes that ended with an error leave no trace after `forget_passes`."""
        return True

    def forget_passes(self, model: nn.Module) -> None:
        """Remove what passes that ended with an error, or of minimal batches, left in the model."""
        model.zero_grad(set_to_none=True)

    @abstractmethod
    def shard(self, model: nn.Module, device: str, world: World, *, precision: str, costs: Sequence[float]) -> None:
        """Shard the weights of a model in place; several ranks share it. For the arguments see `wrap`."""
