"""The operations of which the layers in `flat.py` and `flat_gemma.py` are made.

In: flat tokens [N, d] and modules of transformers. Out: flat tokens. The layers hold the model alone; kernels,
recomputation, low-rank pairs, gathered weights and the dropout of tensor parallelism are here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivetune.distributed.sharding import call_gathered, get_local, is_gathered_by_call
from fivetune.distributed.tensor_parallel import draw_own_masks
from fivetune.model.attention import SequenceBounds, SequencePairs, attend
from fivetune.model.cuda.dispatch import needs_attention_kernel
from fivetune.model.layers import (
    Residual,
    apply_dropout_,
    apply_gated_dropout,
    apply_last_projection,
    apply_projections,
    apply_relu_dropout_,
    is_plain_linear,
    normalize_branch,
    rms_norm,
)
from fivetune.model.low_rank import add_pair, add_transposed_pair, find_pair
from fivetune.model.modules import T5Attention, T5Norm
from fivetune.model.precision import cast_weights, get_matmul_dtype
from fivetune.model.weight_cache import find_kept

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FlatInputs:
    """The tokens of a batch on the device.

    Args:
        ids: [N_src + N_tgt], the encoder's inputs, then the decoder's.
        labels: [N_tgt].
        source, target: bounds of the inputs and of the labels.
    """

    ids: Tensor
    labels: Tensor
    source: SequenceBounds
    target: SequenceBounds

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Split one row per id, [N_src + N_tgt, ...], into the encoder's and the decoder's."""
        num_targets = len(self.labels)
        encoder, decoder = rows.split([len(rows) - num_targets, num_targets])
        return encoder, decoder


class EncoderOutput(NamedTuple):
    """What a decoder attends to besides its own tokens.

    A tuple, because FSDP2 looks for the tensors of a block's inputs in tuples, lists and tables: with their gradients
    the block's backward pass ends.

    Args:
        states: [N_src, d], the encoder's output, in the dtype of matrix products.
        bounds: bounds of the inputs.
        order: rows of [inputs, targets] by sequence, for attention to both at once; None: cross-attention.
        projected: keys and values of a block, if they are computed; see `Ops.project_memory`.
    """

    states: Tensor
    bounds: SequenceBounds
    order: Tensor | None = None
    projected: tuple[Tensor, Tensor] | None = None

    @classmethod
    def cast(cls, states: Tensor, bounds: SequenceBounds) -> EncoderOutput:
        """The memory of states in any dtype; the encoder's last norm has cast them, a pipeline stage receives fp32."""
        return cls(states.to(get_matmul_dtype(states.device)), bounds)


@dataclass(frozen=True, slots=True)
class Ops:
    """How a model computes; chosen once per forward pass.

    Args:
        fused: compute norms, dropout, activations and the cross-entropy by Triton's kernels where these support them.
        recompute: save only the input of every block and recompute the block in the backward pass (exact).
    """

    fused: bool = False
    recompute: bool = False

    def run_block(self, block: nn.Module, run: Callable[..., T], *inputs: object) -> T:
        """Return run(block, *inputs); a strategy that shards the block's weights gathers them meanwhile."""
        if self.recompute and torch.is_grad_enabled():  # without a gradient nothing is saved
            run = partial(checkpoint, run, use_reentrant=False)
        return call_gathered(block, run, *inputs)

    def normalize(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The root mean square norm of x."""
        return rms_norm(x, weight, eps, fused=self.fused)

    def begin_branch(self, x: Residual, norm: T5Norm) -> tuple[Tensor, Tensor]:
        """The residual stream and its norm; one kernel sums the stream and computes the norm, and adds gradients."""
        return normalize_branch(x, norm.weight, norm.variance_epsilon, fused=self.fused)

    def end_branch(self, stream: Tensor, x: Tensor, dropout: nn.Dropout) -> Residual:
        """stream + dropout(x), which overwrites x when it is computed."""
        return Residual(stream, x, _get_rate(dropout))

    def end_block(self, block: nn.Module, x: Residual) -> Residual:
        """The residual stream as it leaves a block: summed if the block is recomputed or its weights are gathered."""
        return Residual(x.sum(fused=self.fused)) if self.recompute or is_gathered_by_call(block) else x

    def drop(self, x: Tensor, dropout: nn.Dropout) -> Tensor:
        """dropout(x), in place."""
        return apply_dropout_(x, _get_rate(dropout), fused=self.fused)

    def project(self, x: Tensor, *linears: nn.Linear) -> Tensor:
        """The outputs of linear modules side by side, [N, sum of widths]: one product if all are plain or low-rank."""
        return apply_projections(x, linears)

    def project_last(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """The output of the linear module that ends a branch, [N, d]; in fp32 with products in fp16."""
        return apply_last_projection(x, linear)

    def project_heads(self, x: Tensor, size: int, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """The outputs of linear modules of one width by head, [N, H, size] each."""
        parts = self.project(x, *linears).view(len(x), len(linears), -1, size)
        return SplitProjections.apply(parts) if needs_attention_kernel(x) else parts.unbind(1)

    def project_memory(self, memory: EncoderOutput, modules: Sequence[T5Attention]) -> list[EncoderOutput]:
        """The memory of each cross-attention: of all, keys and values are one product if their weights are kept.

        Its backward pass is one product too, instead of a sum of one for each. Blocks that are recomputed, and passes
        without a gradient, compute their own instead of holding those of all.
        """
        linears = [linear for module in modules for linear in (module.k, module.v)]
        is_held = torch.is_grad_enabled() and not self.recompute
        is_kept = is_held and needs_attention_kernel(memory.states) and all(map(_is_kept, linears))
        # The kernels count the elements from the first row of a sequence in 32 bits.
        if not is_kept or memory.bounds.longest * sum(len(linear.weight) for linear in linears) >= 2**31:
            return [memory] * len(modules)
        parts = self.project_heads(memory.states, modules[0].key_value_proj_dim, *linears)
        return [memory._replace(projected=pair) for pair in zip(parts[::2], parts[1::2], strict=True)]

    def apply_activation(self, dense: Any, x: Tensor, act: str, *, gated: bool) -> Tensor:
        """dropout(act(x)); of a gated layer dropout(act(a) * b) of x = [a, b]. Overwrites x."""
        rate = _get_rate(dense.dropout)
        with draw_own_masks(dense):
            if gated:
                return apply_gated_dropout(x, act, rate, fused=self.fused)
            if act == "relu":
                return apply_relu_dropout_(x, rate, fused=self.fused)
            return apply_dropout_(dense.act(x), rate, fused=self.fused)

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pairs: SequencePairs,
        dropout: float,
        *,
        table: Tensor | None = None,
        cap: float | None = None,
        overwrite: bool = False,
    ) -> Tensor:
        """`attention.attend` of a module's heads, [Nq, H, D].

        Args:
            dropout: rate at which a module in training drops attention weights.
        """
        rate = dropout if module.training else 0.0
        with draw_own_masks(module):
            return attend(q, k, v, pairs, table=table, dropout=rate, cap=cap, overwrite=overwrite)

    def attend_memory(self, module: T5Attention, q: Tensor, queries: SequenceBounds, memory: EncoderOutput) -> Tensor:
        """Attention to the encoder's output in the cheaper of two orders: [Nq, H, D] -> [Nq, H, D].

        q (M W^T)^T = (q W) M^T: either keys and values are computed, or the queries are projected into the encoder's
        space, where its output serves as both.
        """
        heads = module.n_heads
        size = module.key_value_proj_dim
        keys = memory.bounds
        if needs_attention_kernel(q) or not should_attend_memory(module, queries, keys):
            k, v = memory.projected or self.project_heads(memory.states, size, module.k, module.v)
            pairs = SequencePairs(queries, keys)
            # The gradients lie side by side, as keys and values do, whose memory they take.
            return self.attend(module, q, k, v, pairs, module.dropout, overwrite=True)
        weights = cast_weights(module.k.weight, module.v.weight)
        of_key, of_value = weights.view(2, heads, size, -1).unbind()
        # Queries in the encoder's space, [H, Nq, D] -> [H, Nq, d].
        q = q.transpose(0, 1)
        wide = add_pair(torch.bmm(q, of_key), q, find_pair(module.k)).transpose(0, 1)
        # To the encoder's output, which all heads share, each query of a head is a query of its own.
        seen = memory.states.unsqueeze(1)
        rows = wide.reshape(-1, 1, seen.shape[2])
        pairs = SequencePairs(queries.scale(heads), keys)
        found = self.attend(module, rows, seen, seen, pairs, module.dropout)
        # Back to the space of each head's values, [H, Nq, d] -> [H, Nq, D].
        found = found.view(q.shape[1], heads, -1).transpose(0, 1)
        out = torch.bmm(found, of_value.transpose(1, 2))
        return add_transposed_pair(out, found, find_pair(module.v)).transpose(0, 1)

    def read_biases(self, embedding: nn.Embedding, buckets: Tensor) -> Tensor:
        """The bias of each bucket, [N] -> [H, N]."""
        return call_gathered(embedding, _read_biases, buckets)


def should_attend_memory(module: T5Attention, queries: SequenceBounds, keys: SequenceBounds) -> bool:
    """Whether projecting the queries into the encoder's space costs less than projecting its tokens to keys and values.

    The keys and values of a source cost 4 S d i operations for any target length T; the other order costs 4 T H S d,
    which is less if T is below the head size (64 in all models of the family).
    """
    for linear in (module.k, module.v):
        if not is_plain_linear(linear) and not find_pair(linear):
            return False  # its weights alone do not say what it computes
    pairs = sum(s * t for s, t in zip(keys.lengths, queries.lengths, strict=True))
    return 2 * pairs < keys.ends[-1] * module.key_value_proj_dim


def _is_kept(linear: nn.Linear) -> bool:
    return is_plain_linear(linear) and find_kept(linear.weight) is not None


def _get_rate(dropout: nn.Dropout) -> float:
    return dropout.p if dropout.training else 0.0


def _read_biases(embedding: nn.Embedding, buckets: Tensor) -> Tensor:
    weight = get_local(embedding.weight)
    found = BiasLookup.apply(weight, buckets) if needs_attention_kernel(weight) else weight[buckets]
    return found.t().contiguous()


class SplitProjections(torch.autograd.Function):
    """unbind(1) with a gradient that is not copied if the kernel has written its parts side by side."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor) -> tuple[Tensor, ...]:
        return parts.unbind(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        first = grads[0]
        count = len(grads)
        rows, heads, width = first.shape
        size = heads * width
        stride = (count * size, width, 1)
        memory = first.untyped_storage().data_ptr()
        for i, grad in enumerate(grads):
            is_part = grad.untyped_storage().data_ptr() == memory
            is_next = grad.storage_offset() == first.storage_offset() + i * size
            if not (is_part and is_next and grad.stride() == stride):
                return torch.stack(grads, 1)
        return first.as_strided((rows, count, heads, width), (count * size, size, width, 1))


class BiasLookup(torch.autograd.Function):
    """Reads the bias of each bucket [N] from a table [B, H]; the gradient is one product on the device.

    torch's own gradient of an index sorts it and walks the positions of each bucket one by one: most of a long
    sequence's distances share one bucket.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, buckets: Tensor) -> Tensor:
        ctx.save_for_backward(buckets)
        ctx.num_buckets = len(weight)
        return weight[buckets]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (buckets,) = ctx.saved_tensors
        # One row per position, 1 in the column of its bucket.
        members = grad.new_zeros(len(buckets), ctx.num_buckets).scatter_(1, buckets[:, None], 1.0)
        return members.t() @ grad, None
