"""Attention over concatenated sequences (ragged attention) with T5's relative position bias.

In: flat queries, keys, values [N, H, D], the sequence bounds, a bias table [H, 2 * longest - 1].
Out: [N, H, D]. Nothing is padded to the longest sequence. The attention weights of each block, [H, Lq, Lk] fp32, are
saved for the backward pass; Triton's kernel on CUDA saves one number per query and head instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fivetune.model.cuda.dispatch import explain_missing_triton, needs_attention_kernel
from fivetune.model.cuda.kernel_trial import find_kernel_fault
from fivetune.model.cuda.tiles import LARGEST_HEAD
from fivetune.model.dropout import compute_keep_scale, draw_dropout, split_dropout, zero_dropped_
from fivetune.model.half import multiply_wide
from fivetune.model.modules import AutogradContext, T5Settings
from fivetune.model.precision import get_matmul_dtype, suppress_autocast
from fivetune.model.weight_cache import add_at_
from fivetune.types import Autocast


class _Context(AutogradContext):
    pairs: SequencePairs
    scale: float
    cap: float | None


MAX_BLOCK_ROWS = 64  # short neighbours share a block: its overhead is about the cost of its matrix products


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Bounds of the sequences in a flat tensor.

    Args:
        cu_seqlens: [B + 1] int64 on the device of the tokens: start of each sequence and end of the last.
        longest: upper bound of the sequence lengths, in tokens.
        ends: the values of `cu_seqlens` on the host; () if they are only on the device.
    """

    cu_seqlens: Tensor
    longest: int
    ends: tuple[int, ...] = ()

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, device: torch.device) -> SequenceBounds:
        """Build the bounds from a tensor on the host; every sequence must have at least one token."""
        ends = tuple(cu_seqlens.tolist())
        lengths = [b - a for a, b in pairwise(ends)]
        assert min(lengths) > 0, f"a sequence is empty: the sequences end at {ends[1:]}"
        return cls(cu_seqlens.to(device, non_blocking=True), max(lengths), ends)

    @property
    def lengths(self) -> list[int]:
        return [b - a for a, b in pairwise(self.ends)]

    def scale(self, factor: int) -> SequenceBounds:
        """The bounds after replacing every row by `factor` rows."""
        ends = tuple(end * factor for end in self.ends)
        return SequenceBounds(self.cu_seqlens * factor, self.longest * factor, ends)


@dataclass(frozen=True, slots=True)
class SequencePairs:
    """The sequences of queries, each with the sequence of its keys, and which of the keys a query sees.

    Args:
        queries, keys: bounds of the same B sequences.
        causal: mask the keys after each query's position.
        prefixes: number of keys at the begin of every sequence that have no query of their own, and that all queries
            see; () for none, the only choice of the CUDA kernel.
        window: with `prefixes`, number of keys behind the prefix that a query sees, its own included; 0: all.
    """

    queries: SequenceBounds
    keys: SequenceBounds
    causal: bool = False
    prefixes: tuple[int, ...] = ()
    window: int = 0

    def build_blocks(self) -> tuple[Block, ...]:
        return build_blocks(self.queries.ends, self.keys.ends, self.causal, self.prefixes, self.window)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of neighbouring sequences that one matrix product computes.

    Args:
        queries, keys: rows of the block, [start, end).
        distances: [Lq, Lk] int64, key - query, 0 where masked; None for a block of one sequence.
        hidden: [Lq, Lk] bool mask of pairs without attention; None for a block of one sequence.
    """

    queries: slice
    keys: slice
    distances: Tensor | None = None
    hidden: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start


@lru_cache(maxsize=8)  # all layers of a step, forward and backward, request the same few
def build_blocks(
    queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, prefixes: tuple[int, ...], window: int
) -> tuple[Block, ...]:
    """Group sequences, given by their bounds, into blocks of at most MAX_BLOCK_ROWS rows; a longer one has its own.

    For `prefixes` and `window` see SequencePairs.
    """
    cuts = [0]
    for i in range(1, len(queries) - 1):
        # With sequence i, the block that begins at the last cut would have this many rows.
        num_rows = max(queries[i + 1] - queries[cuts[-1]], keys[i + 1] - keys[cuts[-1]])
        if num_rows > MAX_BLOCK_ROWS:
            cuts.append(i)
    cuts.append(len(queries) - 1)
    blocks: list[Block] = []
    for a, b in pairwise(cuts):
        blocks.append(_build_block(queries[a : b + 1], keys[a : b + 1], causal, prefixes[a:b], window))
    return tuple(blocks)


def _build_block(
    queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, prefixes: tuple[int, ...], window: int
) -> Block:
    query_rows = slice(queries[0], queries[-1])
    key_rows = slice(keys[0], keys[-1])
    # One sequence needs no mask: its bias is a corner of the large square.
    if len(queries) == 2 and not prefixes:
        return Block(query_rows, key_rows)
    owner, place = _locate_rows(queries)
    key_owner, key_place = _locate_rows(keys)
    if prefixes:
        # A query's place counts from the begin of its prefix, as its key's does.
        sizes = torch.tensor(prefixes)
        place = place + sizes[owner]
        is_own = key_place >= sizes[key_owner]
    distances = key_place - place[:, None]
    hidden = key_owner != owner[:, None]
    if causal:
        hidden |= distances > 0
    if prefixes and window:
        hidden |= (distances <= -window) & is_own
    # A masked distance may be outside of the table; 0 is in it.
    return Block(query_rows, key_rows, distances.masked_fill_(hidden, 0), hidden)


def _locate_rows(ends: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The sequence number of every row, and its position in that sequence."""
    lengths = torch.tensor(ends).diff()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    starts = torch.tensor(ends[:-1]) - ends[0]
    return owner, torch.arange(len(owner)) - starts[owner]


def compute_relative_buckets(longest: int, *, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """Compute the bucket of every distance key - query from 1 - longest to longest - 1; [2 * longest - 1] int64.

    The rule of Raffel et al. 2020: half of the buckets hold one distance each, the others grow logarithmically;
    a unidirectional table maps every key after the query to distance 0.
    """
    distance = torch.arange(1 - longest, longest)
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = (distance > 0) * num_buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp_min(0)
    # Of the buckets of a direction, half hold one distance each; the others grow up to max_distance.
    exact = num_buckets // 2
    far = torch.log(distance.clamp_min(1).float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    bucket = torch.where(distance < exact, distance, (exact + far.long()).clamp_max(num_buckets - 1))
    return offset + bucket


MIN_TABLE_TOKENS = 512  # tokens


def get_relative_buckets(device: torch.device, longest: int, **rule: int) -> Tensor:
    """`compute_relative_buckets` from a cache on the device: a slice of the table for the next power of two.

    So few tables exist, and a captured step copies none from the host.
    """
    size = max(MIN_TABLE_TOKENS, 1 << (longest - 1).bit_length())
    kept = _build_bucket_table(device, size, **rule)
    return kept[size - longest : size + longest - 1]


@cache
def _build_bucket_table(device: torch.device, size: int, **rule: Any) -> Tensor:
    return compute_relative_buckets(size, **rule).to(device)


def explain_unsupported_kernel(head_size: int, kind: torch.dtype, device: str) -> str:
    """Explain why `attend` cannot run on a CUDA device with this head size and matmul dtype; empty if it can.

    Kernels that could run are tested on the device, by `find_kernel_fault`.
    """
    if kind == torch.float16:
        return ""  # plain torch computes it, on every GPU
    if reason := explain_missing_triton():
        return reason
    if head_size & (head_size - 1) or head_size > LARGEST_HEAD:
        return f"its heads have {head_size} columns, Triton's kernel has powers of two up to {LARGEST_HEAD}"
    return find_kernel_fault(head_size, kind, device)


def explain_unsupported_device(settings: T5Settings, device: str, autocast: Autocast) -> str:
    """Explain why `attend` cannot run on a device in an autocast context; empty if it can, as on all but CUDA.

    Args:
        settings: config of the model; the kernel must support its heads.
    """
    if not device.startswith("cuda"):
        return ""
    decoder: Any = settings.get_text_config(decoder=True)  # in every family it has head_dim: T5's other name of d_kv
    with autocast():
        return explain_unsupported_kernel(decoder.head_dim, get_matmul_dtype(torch.device(device)), device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: SequencePairs,
    *,
    table: Tensor | None,
    dropout: float,
    cap: float | None,
    overwrite: bool = False,
) -> Tensor:
    """softmax(q k^T + bias) v within every sequence; T5 does not scale the products.

    Args:
        q: [Nq, H, D]. k, v: [Nk, H, D].
        pairs: sequences of q with their sequences in k and v.
        table: [H, 2 * longest - 1], bias of every distance key - query in ascending order; None: no bias.
        dropout: rate at which attention weights are dropped.
        cap: bound of the products, cap tanh(q k^T / cap); None: not bounded, the only choice of the kernel.
        overwrite: let the kernel write the gradients of k and v over them, which nothing else reads then.

    Returns: [Nq, H, D] in the dtype of q.
    """
    if needs_attention_kernel(q):
        assert cap is None and not pairs.prefixes, "the kernel neither bounds products nor has prefixes"
        from fivetune.model.cuda.attention import compute_attention

        queries = pairs.queries
        keys = pairs.keys
        return compute_attention(
            q,
            k,
            v,
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.longest,
            keys.longest,
            bias=table,
            causal=pairs.causal,
            dropout=dropout,
            overwrite=overwrite,
        )
    with suppress_autocast(q.device):
        return BlockAttention.apply(q, k, v, table, pairs, dropout, cap)


class RelativeBias:
    """Expands a bias table to the score matrices of blocks, and reduces their gradients to that of the table.

    A block of one sequence reads a corner of one large square, because the bias depends only on the distance.
    """

    def __init__(
        self, table: Tensor | None, longest: int, causal: bool, device: torch.device, kind: torch.dtype
    ) -> None:
        self.table = table
        self.longest = longest
        self.causal = causal
        self.device = device
        self.kind = kind
        self.square: Tensor | None = None
        self.square_grad: Tensor | None = None
        self.grad: Tensor | None = None

    def build_block_bias(self, block: Block) -> Tensor | None:
        """The bias [H, Lq, Lk] (without a table [1, Lq, Lk]), -inf at masked keys; None if it is zero everywhere."""
        if block.distances is None or block.hidden is None:
            if self.table is None and not self.causal:
                return None
            if self.square is None:
                self.square = self._build_square()
            lq, lk = block.shape
            return self.square[:, :lq, :lk]
        hidden = block.hidden.to(self.device, non_blocking=True)
        if self.table is None:
            bias = torch.zeros((1, *hidden.shape), device=self.device)
        else:
            bias = self.table[:, self._index(block)].view(-1, *block.shape)
        return bias.masked_fill_(hidden, -math.inf).to(self.kind)

    def _index(self, block: Block) -> Tensor:
        assert block.distances is not None
        return (block.distances + self.longest - 1).flatten().to(self.device, non_blocking=True)

    def _build_square(self) -> Tensor:
        if self.table is None:
            square = torch.zeros(1, self.longest, self.longest, device=self.device)
        else:
            # Row i of the square is the table from the distance of key 0 to query i on: windows, from the last one.
            square = self.table.unfold(1, self.longest, 1).flip(1)
        if self.causal:
            ahead = torch.ones(self.longest, self.longest, dtype=torch.bool, device=self.device).triu_(1)
            square.masked_fill_(ahead, -math.inf)
        return square.to(self.kind)

    def add_grad(self, block: Block, scores: Tensor) -> None:
        """Add the gradient of a block's scores, [H, Lq, Lk]."""
        if self.table is None:
            return
        if block.distances is not None:
            if self.grad is None:
                self.grad = torch.zeros_like(self.table, dtype=torch.float32)  # FSDP gathers the table in 16 bits
            add_at_(self.grad, self._index(block), scores.flatten(1).float(), dim=1)
            return
        if self.square_grad is None:
            self.square_grad = scores.new_zeros(len(scores), self.longest, self.longest, dtype=torch.float32)
        lq, lk = block.shape
        self.square_grad[:, :lq, :lk] += scores

    def compute_table_grad(self) -> Tensor | None:
        """The gradient of the table, [H, 2 * longest - 1]: the square's is summed along its diagonals."""
        if self.square_grad is None:
            return self.grad
        heads, longest, _ = self.square_grad.shape
        # Rows of 2 S elements, read as rows of 2 S - 1, shift by one each: diagonals become columns.
        skewed = self.square_grad.new_zeros(heads, longest, 2 * longest)
        skewed[:, :, :longest] = self.square_grad.flip(1)
        diagonals = skewed.view(heads, -1)[:, : longest * (2 * longest - 1)].view(heads, longest, 2 * longest - 1)
        if self.grad is None:
            return diagonals.sum(1)
        return self.grad + diagonals.sum(1)


def _get_score_dtype(q: Tensor) -> torch.dtype:
    return torch.float32 if q.dtype == torch.float16 else q.dtype


def _multiply_scores(a: Tensor, b: Tensor) -> Tensor:
    """A product of batches whose result the softmax reads: in fp32 where the factors are in fp16."""
    return multiply_wide(a, b) if a.dtype == torch.float16 else torch.bmm(a, b)


class BlockAttention(torch.autograd.Function):
    """`attend` one block at a time, so that the data of a block stays in the CPU's cache.

    Scores and weights are in the dtype of q, in fp32 if q is in fp16.
    """

    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor | None,
        pairs: SequencePairs,
        rate: float,
        cap: float | None,
    ) -> Tensor:
        blocks = pairs.build_blocks()
        kind = _get_score_dtype(q)
        bias = RelativeBias(table, pairs.keys.longest, pairs.causal, q.device, kind)
        sizes = [q.shape[1] * math.prod(block.shape) for block in blocks]
        # All blocks draw at once: one call of the generator, whatever the division into blocks is.
        drawn = draw_dropout(sum(sizes), rate, q.device)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        weights: list[Tensor] = []
        for block, dropped in zip(blocks, split_dropout(drawn, sizes), strict=True):
            query, key, value = _slice_heads(block, q, k, v)
            added = bias.build_block_bias(block)
            key = key.transpose(1, 2)
            if cap is not None:
                scores = _multiply_scores(query, key).div_(cap).tanh_().mul_(cap)
            elif added is not None and kind == q.dtype:
                scores = torch.baddbmm(added, query, key)
                added = None
            else:
                scores = _multiply_scores(query, key)
            if added is not None:
                scores.add_(added)
            # The weights before dropout are saved; the positions of the zeros are few and saved once.
            weight = torch.softmax(scores, -1)
            kept = weight
            if dropped is not None:  # the scores are not needed any more: their memory takes the copy
                kept = zero_dropped_(scores.copy_(weight), dropped)
            out[block.queries] = torch.bmm(kept.to(value.dtype), value).transpose(0, 1)
            weights.append(weight)
        ctx.save_for_backward(q, k, v, table, drawn, *weights)
        ctx.pairs = pairs
        ctx.scale = compute_keep_scale(rate)
        ctx.cap = cap
        # Kept weights are not scaled one by one: the sum of their values is.
        return out if drawn is None else out.mul_(ctx.scale)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, table, drawn, *weights = ctx.saved_tensors
        pairs = ctx.pairs
        blocks = pairs.build_blocks()
        trained = table if ctx.needs_input_grad[3] else None
        bias = RelativeBias(trained, pairs.keys.longest, pairs.causal, q.device, _get_score_dtype(q))
        if drawn is not None:
            grad = grad * ctx.scale
        of_q, of_k, of_v = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        drops = split_dropout(drawn, [weight.numel() for weight in weights])
        for block, weight, dropped in zip(blocks, weights, drops, strict=True):
            query, key, value = _slice_heads(block, q, k, v)
            out = grad[block.queries].transpose(0, 1)
            kept = weight if dropped is None else zero_dropped_(weight.clone(), dropped)
            of_v[block.keys] = torch.bmm(kept.transpose(1, 2).to(out.dtype), out).transpose(0, 1)
            of_weight = zero_dropped_(_multiply_scores(out, value.transpose(1, 2)), dropped)
            scores = torch.ops.aten._softmax_backward_data(of_weight, weight, -1, weight.dtype)
            bias.add_grad(block, scores)
            if ctx.cap is not None:  # the slope of the cap, 1 - tanh^2, from the products again
                share = _multiply_scores(query, key.transpose(1, 2)).div_(ctx.cap).tanh_()
                scores = scores.addcmul(scores, share.square_(), value=-1)
            scores = scores.to(q.dtype)
            of_q[block.queries] = torch.bmm(scores, key).transpose(0, 1)
            of_k[block.keys] = torch.bmm(scores.transpose(1, 2), query).transpose(0, 1)
        return of_q, of_k, of_v, bias.compute_table_grad(), None, None, None


def _slice_heads(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block's rows of q, k, v as views [H, rows, D]."""
    return q[block.queries].transpose(0, 1), k[block.keys].transpose(0, 1), v[block.keys].transpose(0, 1)
