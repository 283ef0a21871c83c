"""torch's FSDP2 on a model of the T5 family: what `fsdp` and `fsdp_tensor` share.

In: a model and the mesh of the ranks that share it. Out: the same model; each rank holds a shard of every weight.
Groups: each table of relative biases (blocks share it), each block, and the rest: embeddings, norms, head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from fivetune.distributed.sharding import GATHER

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh


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
        sharded.set_force_sum_reduction_for_comms(True)
        sharded.set_gradient_divide_factor(1.0)
        _add_gather_method(module)


def iter_groups(model: Any) -> Iterator[nn.Module]:
    """Yield the modules whose weights are gathered together, inner ones first."""
    for stack in (model.encoder, model.decoder):
        for block in stack.block:
            if block.layer[0].SelfAttention.has_relative_attention_bias:
                yield block.layer[0].SelfAttention.relative_attention_bias
            yield block
    yield model


def _add_gather_method(module: Any) -> None:
    """Give a module the method of `call_gathered`, around which FSDP2 gathers its weights."""
    import torch
    from torch.distributed.fsdp import register_fsdp_forward_method

    def call(own: nn.Module, run: Callable[..., object], *inputs: object) -> object:
        return run(own, *inputs)

    setattr(module, GATHER, MethodType(call, module))
    register_fsdp_forward_method(module, GATHER)
    gather = getattr(module, GATHER)

    def call_and_release(run: Callable[..., object], *inputs: object) -> object:
        result = gather(run, *inputs)
        if not torch.is_grad_enabled():  # FSDP2 keeps the outermost group for a backward pass that never comes
            module.reshard()
        return result

    setattr(module, GATHER, call_and_release)
