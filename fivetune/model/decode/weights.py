"""The weights of a decoder's block as its steps use them: side by side, in the dtype of matrix products.

In: a block of T5. Out: tensors, made once per evaluation. Cross-attention has no keys and values: the queries are
projected into the encoder's space, where its output serves as both, q (M W_k^T)^T = (q W_k) M^T. So nothing is stored
per layer and input, and a short answer costs no pass over all input tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.sharding import get_local, is_gathered_by_call
from fivetune.distributed.tensor_parallel import ColumnLinear
from fivetune.model.cuda.dispatch import has_kernels
from fivetune.model.family import is_gated
from fivetune.model.half import multiply_half
from fivetune.model.layers import apply_last_projection, apply_projections, is_plain_linear
from fivetune.model.modules import T5Attention, T5Block, T5Model
from fivetune.model.precision import copy_weights, get_matmul_dtype, suppress_autocast
from fivetune.model.weight_cache import KeptWeights
from fivetune.types import Autocast

Projection = Tensor | tuple[nn.Linear, ...]
"""Weights below each other, or modules that have no plain weight: adapters, quantised or row-wise parallel ones."""


def keep_weights(model: T5Model, device: str, autocast: Autocast) -> Callable[[], AbstractContextManager[None]]:
    """Copy the weights of an evaluation in the dtype of products. Returns: a context in which products use the copies.

    For CUDA: on a CPU `copy_weights` knows how long its copies hold. Weights that a strategy divides are not copied.
    """
    with autocast():
        kind = get_matmul_dtype(torch.device(device))
    divided = is_gathered_by_call(model) or find_stage(model)
    if divided or kind == torch.float32 or not has_kernels(torch.device(device)):
        return nullcontext
    kept = KeptWeights(model, kind)
    kept.update()
    return kept.attach


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Projections of a block; `keys` and `values` of cross-attention are [h, d_kv, d]."""

    qkv: Projection
    own_out: Projection
    queries: Projection
    keys: Tensor
    values: Tensor
    cross_out: Projection
    wide: Projection
    narrow: Projection

    @classmethod
    def read(cls, block: T5Block) -> BlockWeights:
        own = block.layer[0].SelfAttention
        cross = block.layer[1].EncDecAttention
        dense = block.layer[2].DenseReluDense
        keys, values = _read_heads(cross)
        wide = (dense.wi_0, dense.wi_1) if is_gated(dense) else (dense.wi,)
        # Matrices of one input are one product.
        return cls(
            qkv=merge_projections(own.q, own.k, own.v),
            own_out=merge_projections(own.o),
            queries=merge_projections(cross.q),
            keys=keys,
            values=values,
            cross_out=merge_projections(cross.o),
            wide=merge_projections(*wide),
            narrow=merge_projections(dense.wo),
        )


def merge_projections(*modules: nn.Linear) -> Projection:
    """The weights of linear modules below each other; the modules themselves where one is not plain."""
    if not all(is_plain_linear(module) or type(module) is ColumnLinear for module in modules):
        return modules
    kind = get_matmul_dtype(modules[0].weight.device)
    return copy_weights(kind, *[get_local(module.weight) for module in modules]).detach()


def apply_projection(x: Tensor, projection: Projection) -> Tensor:
    """The outputs side by side, [..., sum of widths]."""
    if isinstance(projection, Tensor):
        return F.linear(x, projection)
    flat = apply_projections(x.flatten(0, -2), projection)
    return flat.view(*x.shape[:-1], -1)


def apply_last(x: Tensor, projection: Projection) -> Tensor:
    """The output of the projection that ends a branch, [..., d]; in fp16 in fp32, see `half.py`."""
    if isinstance(projection, Tensor):
        return multiply_half(x, projection) if projection.dtype == torch.float16 else F.linear(x, projection)
    (module,) = projection
    return apply_last_projection(x.flatten(0, -2), module).view(*x.shape[:-1], -1)


def _read_heads(attention: T5Attention) -> tuple[Tensor, Tensor]:
    """The weights of keys and values by head; of modules that are not plain, their outputs for the identity."""
    modules = attention.k, attention.v
    found = merge_projections(*modules)
    if not isinstance(found, Tensor):
        device = attention.o.weight.device
        # A module without bias is a matrix, whatever it computes: its outputs for the unit vectors are the columns.
        with suppress_autocast(device):
            identity = torch.eye(attention.config.d_model, device=device)
            found = torch.cat([module(identity).t() for module in modules])
        found = found.to(get_matmul_dtype(device))
    keys, values = found.view(2, attention.n_heads, attention.key_value_proj_dim, -1).unbind()
    return keys, values
