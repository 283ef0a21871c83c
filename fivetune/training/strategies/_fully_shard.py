"""torch's FSDP2 on a model of the T5 family: what `fsdp` and `fsdp_tensor` share.

In: a model and the mesh of the ranks that share it. Out: the same model; each rank holds a shard of every weight.
Gradients are summed in the backward pass.
Groups: each table of relative biases (blocks share it), each block, and the rest: embeddings, norms, head.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fivetune.distributed.collective_log import CollectiveLog, find_collective_log
from fivetune.distributed.sharding import GATHER, is_gathered_by_call
from fivetune.training.strategies import ShardedOptions

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from fivetune.distributed.world import World
    from fivetune.types import RunSettings


class FullyShardedOptions(ShardedOptions):
    """Options and steps of a strategy that shards by FSDP2."""

    offload: bool = Field(default=False, description="keep weights, gradients and optimizer state in the host's memory")
    reduce_once: bool = Field(
        default=True,
        description="reduce gradients once per step; false: after every micro-batch, which takes less memory",
    )

    def explain_incompatibility(self, settings: RunSettings) -> str:
        return self.explain_whole_tensors(settings) or super().explain_incompatibility(settings)

    def get_weight_device(self, device: str) -> str:
        return "cpu" if self.offload else device

    @contextmanager
    def suppress_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module.*returned a view")  # never changed in place
            yield

    def prepare_backward(self, model: nn.Module, world: World, *, is_last: bool) -> None:
        if world.size > 1:
            sharded: Any = model
            sharded.set_requires_gradient_sync(is_last or not self.reduce_once)

    def can_forget_passes(self, model: nn.Module) -> bool:
        return hasattr(model, "reset_iter_state")  # from torch 2.13 on

    def forget_passes(self, model: nn.Module) -> None:
        super().forget_passes(model)
        sharded: Any = model
        if sharded._get_fsdp_state()._is_root:  # else no pass has begun
            sharded.reset_iter_state()
        # The gradients of a module that were summed over the copies must not be summed again by the minimal batch.
        reduced = find_collective_log(model).reduced
        for module in filter(is_gathered_by_call, model.modules()):
            module.set_requires_all_reduce(module not in reduced, recurse=False)  # type: ignore[operator]  # of FSDP2

    def reduce_gradients(self, model: nn.Module, world: World) -> None:
        """No-op: the backward pass has reduced them."""


def shard_fully(model: nn.Module, mesh: DeviceMesh, *, precision: str, offload: bool = False) -> None:
    """Shard the model's weights over a mesh; with two dimensions they are replicated over the first.

    The gradients of a step are summed in fp32, not averaged: the loss is already divided by all tokens.

    Args:
        precision: with bf16, weights are gathered in bf16; the shards and the optimizer's state stay in fp32.
        offload: keep shards, gradients and optimizer state in the host's memory.
    """
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    placement = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in iter_groups(model):
        sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=placement)
        # FSDP2 averages by default.
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        _log_collectives(sharded, find_collective_log(model))
        _add_gather_method(module)


def iter_groups(model: Any) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together, inner ones first."""
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            # The first block has the table that all blocks of its stack use.
            if block.layer[0].SelfAttention.has_relative_attention_bias:
                yield block.layer[0].SelfAttention.relative_attention_bias
            yield block
    yield model


def _log_collectives(module: Any, log: CollectiveLog) -> None:
    """Log the all-gathers and the reduce-scatters of a module's weights.

    The all-reduce between copies follows a reduce-scatter at once: one counts for both.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

    class LoggedGather(DefaultAllGather):
        def __call__(self, *tensors: Any, **options: Any) -> Any:
            return log.run(partial(super().__call__, *tensors, **options))

    class LoggedReduction(DefaultReduceScatter):
        def __call__(self, *tensors: Any, **options: Any) -> Any:
            work = log.run(partial(super().__call__, *tensors, **options))
            log.reduced.add(module)
            return work

    module.set_custom_all_gather(LoggedGather())
    module.set_custom_reduce_scatter(LoggedReduction())


def _add_gather_method(module: Any) -> None:
    """Give a module the method of `call_gathered`, around which FSDP2 gathers its weights."""
    import torch
    from torch.distributed.fsdp import register_fsdp_forward_method

    def call(own: nn.Module, run: Callable[..., object], *inputs: object) -> object:
        return run(own, *inputs)

    # FSDP2 gathers around methods that it knows: forward, and this one, within which any function can run.
    setattr(module, GATHER, MethodType(call, module))
    register_fsdp_forward_method(module, GATHER)
    gather = getattr(module, GATHER)

    def call_and_release(run: Callable[..., object], *inputs: object) -> object:
        result = gather(run, *inputs)
        if not torch.is_grad_enabled():  # FSDP2 keeps the outermost group for a backward pass that never comes
            module.reshard()
        return result

    setattr(module, GATHER, call_and_release)
