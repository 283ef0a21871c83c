"""Linear modules and embeddings whose weights are split among the ranks of a group (Megatron-LM's tensor parallelism).

In: modules of a model and a one-dimensional device mesh. Out: the same modules, each with this rank's shard (a DTensor)
of its weight. A column-wise module computes a part of the features from the whole input; a row-wise module computes the
whole output from a part of the features. Between the two, nothing is communicated:

    x --(backward: all-reduce)--> column-wise --> activation, heads --> row-wise --(forward: all-reduce)--> y

Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.distributed.collective_log import CollectiveLog
from fivetune.distributed.sharding import get_local
from fivetune.distributed.world import import_collectives

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that share the features of a model's modules, and the log of their collectives."""

    mesh: DeviceMesh
    log: CollectiveLog


class ColumnLinear(nn.Linear):
    """A Linear without bias that computes this rank's share of the output features: [..., in] -> [..., out / ranks]."""

    split_dim: ClassVar[int] = 0  # of the weight, [out, in]
    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(copy_to_group(input, self.group), get_local(self.weight))


class RowLinear(nn.Linear):
    """A Linear without bias over this rank's share of the input features: [..., in / ranks] -> [..., out], summed.

    Every rank gets the same sum, and the sum's gradient is not changed.
    """

    split_dim: ClassVar[int] = 1
    group: TensorGroup

    def forward(self, input: Tensor) -> Tensor:
        return _apply(_SumOverGroup, F.linear(input, get_local(self.weight)), self.group)


class ColumnEmbedding(nn.Embedding):
    """An Embedding with this rank's share of the columns: ids [...] -> [..., columns / ranks]."""

    split_dim: ClassVar[int] = 1

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, get_local(self.weight))


def shard_module(
    module: nn.Linear | nn.Embedding, kind: type[ColumnLinear | RowLinear | ColumnEmbedding], group: TensorGroup
) -> None:
    """Turn a plain Linear without bias, or a plain Embedding, into one of `kind`, in place."""
    from torch.distributed.tensor import Shard, distribute_tensor

    assert type(module) in kind.__bases__ and getattr(module, "bias", None) is None
    # Every rank has the whole weight, so nothing is sent.
    shard = distribute_tensor(module.weight.detach(), group.mesh, [Shard(kind.split_dim)], src_data_rank=None)
    module.weight = nn.Parameter(shard, requires_grad=module.weight.requires_grad)
    module.__class__ = kind  # type: ignore[assignment]  # a subclass, by the assertion
    module.__dict__["group"] = group


def separate_masks(module: nn.Module, group: TensorGroup) -> None:
    """Let a module between column-wise and row-wise ones draw dropout masks for this rank's features alone."""
    forward = module.forward

    def run(*inputs: object, **options: object) -> object:
        with draw_own_masks(module):
            return forward(*inputs, **options)

    module.__dict__.update(group=group, forward=run)


@contextmanager
def draw_own_masks(module: nn.Module) -> Generator[None]:
    """Draw dropout masks of this rank alone inside the block, if it computes a share of the module's features.

    Their seed is drawn from the random state that the ranks share, which is afterwards the same on all of them; so a
    block that is recomputed draws the same masks.
    """
    group: TensorGroup | None = module.__dict__.get("group")
    if group is None or not module.training:
        yield
        return
    seed = int(torch.randint(2**62, ())) + group.mesh.get_local_rank()
    generators = [torch.default_generator]
    if group.mesh.device_type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def copy_to_group(x: Tensor, group: TensorGroup) -> Tensor:
    """Return x; its gradient is summed over the group, because every rank computes a part of what follows."""
    return _apply(_CopyToGroup, x, group) if x.requires_grad else x


def _apply(function: Any, x: Tensor, group: TensorGroup) -> Tensor:
    return function.apply(x, group)  # untyped in torch


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _sum_over_ranks(grad, ctx.group), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, x: Tensor, group: TensorGroup) -> Tensor:
        return _sum_over_ranks(x, group)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


def _sum_over_ranks(x: Tensor, group: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.log.run(lambda: import_collectives().all_reduce(group.log.fit(total), group=group.mesh.get_group()))
    return total


if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    class _GroupContext(FunctionCtx):
        group: TensorGroup
