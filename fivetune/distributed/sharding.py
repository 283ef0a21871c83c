"""Sharded tensors (torch's DTensor): conversion to full ones and back, and their norm.

In: any tensor. Out: the full tensor, or the shard of this rank. A tensor that is not sharded is returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from fivetune.distributed.pipeline import find_stage

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.tensor import DTensor

T = TypeVar("T")
GATHER = "call_gathered"  # attribute of a module whose weights are sharded outside of its computations


def call_gathered(module: nn.Module, run: Callable[..., T], *inputs: object) -> T:
    """Return run(module, *inputs); if a strategy shards the weights of the module, they are gathered meanwhile.

    Collective if they are: all ranks call it.
    """
    gather = module.__dict__.get(GATHER)
    return run(module, *inputs) if gather is None else gather(run, *inputs)


def is_gathered_by_call(module: nn.Module) -> bool:
    """Whether a strategy gathers the weights of a module for each of its computations, which all ranks run together."""
    return GATHER in module.__dict__


def release_gathered(model: nn.Module) -> None:
    """Free gathered weights, after the shards have changed."""
    for module in model.modules():
        if is_gathered_by_call(module):
            module.reshard()  # type: ignore[operator]  # of FSDP2


def gather_tensor(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor; other tensors are returned unchanged. Collective: all ranks call it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def iter_held(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of every weight of which this rank holds values; not those of other pipeline stages."""
    return ((name, parameter) for name, parameter in model.named_parameters() if not parameter.is_meta)


def iter_gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every weight, gathered one at a time; tied weights once.

    Collective: all ranks iterate to the end.
    """
    stage = find_stage(model)
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        yield name, stage.gather_weight(name, value) if stage else gather_tensor(value)


def get_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor; differentiable."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def compute_shard_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Compute which part of the full tensor this rank's shard is: one slice per dimension.

    The last dimension of a mesh divides first: with tensor parallelism inside FSDP2, a rank's shard is a part of its
    share of heads. Parts are those of torch.chunk.
    """
    ranges = [(0, length) for length in tensor.shape]
    if is_sharded(tensor):
        mesh = tensor.device_mesh
        for number in reversed(range(mesh.ndim)):
            placement = tensor.placements[number]
            if not placement.is_replicate():
                dim: int = placement.dim  # type: ignore[attr-defined]
                start, length = ranges[dim]
                part = -(-length // mesh.size(number))
                first = min(part * mesh.get_local_rank(number), length)
                ranges[dim] = (start + first, min(part, length - first))
    return tuple(slice(start, start + length) for start, length in ranges)


def shard_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Shard a full tensor as `other` of the same shape is sharded; if `other` is not, return the tensor unchanged."""
    if not is_sharded(other) or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(other.device), other.device_mesh, other.placements, src_data_rank=None)


def compute_sharded_norm(tensors: list[Tensor]) -> Tensor:
    """Compute the Euclidean norm of tensors, some of them sharded, in fp32: [] on their device.

    Each tensor is sharded over its own dimensions of a mesh and replicated over the others; all that are alike are
    summed by one all-reduce per dimension. Collective: all ranks call it.
    """
    import torch

    total = torch.zeros((), device=tensors[0].device)
    for alike, groups in _iter_alike(tensors):
        locals_ = [get_local(tensors[number]) for number in alike]
        square = torch.nn.utils.get_total_norm(locals_).float().square()
        total = total + _sum_over(square, groups)
    return total.sqrt()


def compute_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Compute the Euclidean norm of each tensor, as `compute_sharded_norm` does for all: [] each."""
    import torch

    many: Any = torch  # untyped, because torch's _foreach functions are private
    norms = [*tensors]
    for alike, groups in _iter_alike(tensors):
        own = torch.stack(many._foreach_norm([get_local(tensors[number]) for number in alike], 2))
        found = _sum_over(own.square(), groups).sqrt() if groups else own
        for number, norm in zip(alike, found.unbind(), strict=True):
            norms[number] = norm
    return norms


def _iter_alike(tensors: list[Tensor]) -> Iterator[tuple[list[int], list[object]]]:
    """Yield the numbers of tensors that are sharded over the same dimensions of a mesh, with these process groups."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        key: tuple[object, ...] = ()
        if is_sharded(tensor):
            dims = [i for i, placement in enumerate(tensor.placements) if not placement.is_replicate()]
            key = (tensor.device_mesh, *dims)
        alike.setdefault(key, []).append(number)
    for key, numbers in alike.items():
        mesh, *dims = key or (None,)
        yield numbers, [mesh.get_group(i) for i in dims]  # type: ignore[union-attr]  # a mesh, where there are dims


def _sum_over(tensor: Tensor, groups: list[object]) -> Tensor:
    import torch

    for group in groups:
        torch.distributed.all_reduce(tensor, group=group)  # type: ignore[arg-type]
    return tensor


def scale_gradients(gradients: list[Tensor], norm: Tensor, max_norm: float | None) -> None:
    """Scale gradients of the global norm `norm` in place to at most `max_norm`; None: leave them."""
    if max_norm is not None:
        scale = (max_norm / (norm + 1e-6)).clamp_max(1)
        for gradient in gradients:
            get_local(gradient).mul_(scale)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether the tensor is a DTensor. Checks an attribute, because importing DTensor takes time."""
    return hasattr(tensor, "full_tensor")
