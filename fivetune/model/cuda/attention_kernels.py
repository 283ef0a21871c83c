"""The Triton kernels of attention.py: forward, gradients of q and the bias, of k and v; called only from there.

Names: rows are positions of queries in their sequence, cols positions of keys; a tile is M rows and N cols of one head
of one sequence. Every kernel recomputes the scores from q, k and bias, so nothing of their size is stored.
A program returns at once if its tile begins after the end of the sequence, so grids need only the longest lengths.
"""

# pyright: reportGeneralTypeIssues=false
# Triton has no types for functions within kernels that return several values.
from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from fivetune.model.cuda.random import gain, keep

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
COUNTS = ("num_rows", "groups", "num_sequences", "tiles_q", "tiles_k")
"""Arguments that change from batch to batch: Triton would compile again for 1 and for multiples of 16."""

# --- pieces ---


@triton.jit
def _dot(a, b, sums, PRODUCTS: tl.constexpr):
    """sums + a b in fp32; PRODUCTS: ieee, or tf32 for fp32 factors.

    Converted for the interpreter, which would multiply the bits of bf16; results are equal.
    """
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)
    return tl.dot(a, b, sums, input_precision=PRODUCTS)


@triton.jit
def _span(cu_seqlens, sequence):
    """First row (int64, for offsets) and number of rows of a sequence."""
    first = tl.load(cu_seqlens + sequence)
    return first.to(tl.int64), (tl.load(cu_seqlens + sequence + 1) - first).to(tl.int32)


@triton.jit
def _load(tensor, rows, num_rows, stride, D: tl.constexpr):
    """Load rows of a matrix, [len(rows), D]; zeros after the end of the sequence."""
    places = rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(tensor + places, mask=(rows < num_rows)[:, None], other=0.0)


@triton.jit
def _store(tensor, values, rows, num_rows, stride, D: tl.constexpr):
    places = rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(tensor + places, values.to(tensor.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit
def _scores(q, k, bias, rows, cols, num_q, num_k, scale, CAUSAL: tl.constexpr, PRODUCTS: tl.constexpr):
    """Scores [M, N] in fp32, -inf at keys after the end of the sequence or, if causal, after the query.

    bias points to distance 0 of the head.
    """
    scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32), PRODUCTS) * scale
    visible = (cols < num_k)[None, :]
    if CAUSAL:
        visible = visible & (cols[None, :] <= rows[:, None])
    if bias is not None:
        distance = cols[None, :] - rows[:, None]
        scores += tl.load(bias + distance, mask=visible & (rows < num_q)[:, None], other=0.0).to(tl.float32)
    return tl.where(visible, scores, -float("inf"))


@triton.jit
def _draw_kept(seed, row_places, start, rate, N: tl.constexpr):
    """Dropout mask of a tile's attention weights, [M, N]: True where kept."""
    return keep(seed, row_places[:, None] + (start // 8 + tl.arange(0, N // 8))[None, :], rate)


@triton.jit
def _row_places(first_row, rows, head, groups):
    """First random group of each row of scores; groups are numbered over rows of q, heads and key positions."""
    return ((first_row + rows) * tl.num_programs(1) + head) * groups


@triton.jit
def _gradients(scores, v, grad, lse, delta, seed, row_places, start, rate, N: tl.constexpr, PRODUCTS: tl.constexpr):
    """The attention weights of a tile after dropout, and the gradient of its scores, p (dp - delta)."""
    weights = tl.exp(scores - lse[:, None])
    grad_weights = _dot(grad, tl.trans(v), tl.zeros([grad.shape[0], v.shape[0]], tl.float32), PRODUCTS)
    met = weights
    if seed is not None:
        kept = _draw_kept(seed, row_places, start, rate, N)
        met = tl.where(kept, weights * gain(rate), 0.0)
        grad_weights = tl.where(kept, grad_weights * gain(rate), 0.0)
    return met, weights * (grad_weights - delta[:, None])


@triton.jit
def _slot(first_q, sequence, tile, M: tl.constexpr):
    """Number of a tile of queries among all: no two of a batch have the same. It is below rows // M + sequences."""
    return first_q // M + sequence + tile


# --- kernels ---


@triton.jit(do_not_specialize=COUNTS)
def forward(
    q,
    k,
    v,
    bias,
    seed,
    cu_q,
    cu_k,
    out,
    lse,
    q_stride,
    k_stride,
    v_stride,
    num_rows,
    width,
    groups,
    rate,
    scale,
    CAUSAL: tl.constexpr,
    PRODUCTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Compute out and lse, the log-sum-exp of each row, for one tile of queries, by online softmax.

    Grid: (query tiles of the longest sequence, heads, sequences).
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_q, num_q = _span(cu_q, sequence)
    if tl.program_id(0) * M >= num_q:
        return
    first_k, num_k = _span(cu_k, sequence)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    if bias is not None:
        bias += head * width + width // 2
    k += first_k * k_stride + head * D
    v += first_k * v_stride + head * D
    q_tile = _load(q + first_q * q_stride + head * D, rows, num_q, q_stride, D)
    row_places = _row_places(first_q, rows, head, groups)

    top = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    # Keys after the last query of the tile are masked for all of its rows.
    end = num_k
    if CAUSAL:
        end = tl.minimum(num_k, (tl.program_id(0) + 1) * M)
    for start in range(0, end, N):
        cols = start + tl.arange(0, N)
        k_tile = _load(k, cols, num_k, k_stride, D)
        v_tile = _load(v, cols, num_k, v_stride, D)
        scores = _scores(q_tile, k_tile, bias, rows, cols, num_q, num_k, scale, CAUSAL, PRODUCTS)
        # What was summed so far is scaled to the new largest score.
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        shrink = tl.exp(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        # Dropout comes after `total`, which is the sum of all weights.
        if seed is not None:
            weights = tl.where(_draw_kept(seed, row_places, start, rate, N), weights * gain(rate), 0.0)
        sums = _dot(weights.to(v_tile.dtype), v_tile, sums * shrink[:, None], PRODUCTS)
        top = new_top
    total = tl.where(num_k > 0, total, 1.0)  # without keys the output is 0 / 1
    stride = tl.num_programs(1) * D
    _store(out + first_q * stride + head * D, sums / total[:, None], rows, num_q, stride, D)
    tl.store(lse + head * num_rows + first_q + rows, top + tl.log(total), mask=rows < num_q)


@triton.jit(do_not_specialize=COUNTS)
def grad_q(
    q,
    k,
    v,
    bias,
    seed,
    cu_q,
    cu_k,
    grad,
    lse,
    delta,
    out,
    grad_q,
    parts,
    tiles_k,
    grad_stride,
    q_stride,
    k_stride,
    v_stride,
    num_rows,
    width,
    groups,
    rate,
    scale,
    CAUSAL: tl.constexpr,
    PRODUCTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the gradient of one tile of queries, and delta = sum of out * grad over columns for grad_kv.

    Grid: (query tiles of the longest sequence, heads, sequences). With parts [slots, heads, tiles_k + 1, N], which
    takes M = N, also the sums of the tile's score gradients by distance: piece p has N distances from (p - t - 1) N on
    for the t-th tile of queries in its sequence. See `sum_parts`.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_q, num_q = _span(cu_q, sequence)
    if tl.program_id(0) * M >= num_q:
        return
    first_k, num_k = _span(cu_k, sequence)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    if bias is not None:
        bias += head * width + width // 2
    k += first_k * k_stride + head * D
    v += first_k * v_stride + head * D
    q_tile = _load(q + first_q * q_stride + head * D, rows, num_q, q_stride, D)
    row_places = _row_places(first_q, rows, head, groups)
    stride = tl.num_programs(1) * D
    own = first_q * stride + head * D
    grad_tile = _load(grad + own, rows, num_q, stride, D)
    # sum over keys of p dp, which the gradient of a softmax subtracts, is the sum over columns of out * grad.
    row_delta = tl.sum(_load(out + own, rows, num_q, stride, D).to(tl.float32) * grad_tile.to(tl.float32), 1)
    row_stats = head * num_rows + first_q + rows
    tl.store(delta + row_stats, row_delta, mask=rows < num_q)
    row_lse = tl.load(lse + row_stats, mask=rows < num_q, other=0.0)

    if parts is not None:
        slot = _slot(first_q, sequence, tl.program_id(0), M)
        parts += (slot * tl.num_programs(1) + head) * (tiles_k + 1) * N + tl.arange(0, N)
    carried = tl.zeros([N], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    end = num_k
    if CAUSAL:
        end = tl.minimum(num_k, (tl.program_id(0) + 1) * M)
    for start in range(0, end, N):
        cols = start + tl.arange(0, N)
        k_tile = _load(k, cols, num_k, k_stride, D)
        v_tile = _load(v, cols, num_k, v_stride, D)
        scores = _scores(q_tile, k_tile, bias, rows, cols, num_q, num_k, scale, CAUSAL, PRODUCTS)
        _, grad_scores = _gradients(
            scores, v_tile, grad_tile, row_lse, row_delta, seed, row_places, start, rate, N, PRODUCTS
        )
        if parts is not None:
            # Rotate row r left by r: column c then holds the element c right of the diagonal or, wrapped, N - c left
            # of it. Those on the right share distances with the left ones of the next tile. `start`, a multiple of N,
            # keeps the compiler from holding the indices in registers for the whole loop.
            shifted = tl.arange(0, M)[:, None] + cols[None, :]
            turned = tl.gather(grad_scores, shifted & (N - 1), axis=1)
            is_left = shifted >= start + N
            tl.store(parts, carried + tl.sum(tl.where(is_left, turned, 0.0), 0))
            carried = tl.sum(tl.where(is_left, 0.0, turned), 0)
            parts += N
        sums = _dot(grad_scores.to(k_tile.dtype), k_tile, sums, PRODUCTS)
    if parts is not None:
        tl.store(parts, carried)
    _store(grad_q + first_q * grad_stride + head * D, sums * scale, rows, num_q, grad_stride, D)


@triton.jit(do_not_specialize=COUNTS)
def grad_kv(
    q,
    k,
    v,
    bias,
    seed,
    cu_q,
    cu_k,
    grad,
    lse,
    delta,
    grad_k,
    grad_v,
    grad_stride,
    q_stride,
    k_stride,
    v_stride,
    num_rows,
    width,
    groups,
    rate,
    scale,
    CAUSAL: tl.constexpr,
    PRODUCTS: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Compute the gradients of one tile of keys and of its values, over all queries of the sequence.

    Grid: (key tiles of the longest sequence, heads, sequences). delta comes from grad_q, which runs before.
    """
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_k, num_k = _span(cu_k, sequence)
    if tl.program_id(0) * N >= num_k:
        return
    first_q, num_q = _span(cu_q, sequence)
    start = tl.program_id(0) * N
    cols = start + tl.arange(0, N)
    if bias is not None:
        bias += head * width + width // 2
    k_tile = _load(k + first_k * k_stride + head * D, cols, num_k, k_stride, D)
    v_tile = _load(v + first_k * v_stride + head * D, cols, num_k, v_stride, D)
    stride = tl.num_programs(1) * D
    q += first_q * q_stride + head * D
    grad += first_q * stride + head * D
    lse += head * num_rows + first_q
    delta += head * num_rows + first_q

    k_sums = tl.zeros([N, D], tl.float32)
    v_sums = tl.zeros([N, D], tl.float32)
    # Queries before the first key of the tile do not see it.
    begin = 0
    if CAUSAL:
        begin = start // M * M
    for first in range(begin, num_q, M):
        rows = first + tl.arange(0, M)
        q_tile = _load(q, rows, num_q, q_stride, D)
        grad_tile = _load(grad, rows, num_q, stride, D)
        row_lse = tl.load(lse + rows, mask=rows < num_q, other=0.0)
        row_delta = tl.load(delta + rows, mask=rows < num_q, other=0.0)
        row_places = _row_places(first_q, rows, head, groups)
        scores = _scores(q_tile, k_tile, bias, rows, cols, num_q, num_k, scale, CAUSAL, PRODUCTS)
        met, grad_scores = _gradients(
            scores, v_tile, grad_tile, row_lse, row_delta, seed, row_places, start, rate, N, PRODUCTS
        )
        v_sums = _dot(tl.trans(met).to(grad_tile.dtype), grad_tile, v_sums, PRODUCTS)
        k_sums = _dot(tl.trans(grad_scores).to(q_tile.dtype), q_tile, k_sums, PRODUCTS)
    own = first_k * grad_stride + head * D
    _store(grad_k + own, k_sums * scale, cols, num_k, grad_stride, D)
    _store(grad_v + own, v_sums, cols, num_k, grad_stride, D)


@triton.jit(do_not_specialize=COUNTS)
def sum_parts(
    parts,
    cu_q,
    cu_k,
    grad_bias,
    tiles_q,
    tiles_k,
    num_sequences,
    width,
    CAUSAL: tl.constexpr,
    SIDE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Sum the parts of grad_q to the gradient of SIDE distances of a head, in a fixed order: without atomics.

    Grid: (blocks of SIDE distances, of which the middle one begins at 0; heads). TOGETHER sequences are read at a time.
    Out: grad_bias [heads, width].
    """
    block, head = tl.program_id(0) - tl.num_programs(0) // 2, tl.program_id(1)
    places = tl.arange(0, SIDE)
    sums = tl.zeros([TOGETHER, SIDE], tl.float32)
    size = (tiles_k + 1) * SIDE  # of a slot and head
    for first in range(0, num_sequences, TOGETHER):
        sequences = first + tl.arange(0, TOGETHER)
        inside = sequences < num_sequences
        first_q = tl.load(cu_q + sequences, mask=inside, other=0)
        num_q = tl.load(cu_q + sequences + 1, mask=inside, other=0) - first_q
        num_k = tl.load(cu_k + sequences + 1, mask=inside, other=0) - tl.load(cu_k + sequences, mask=inside, other=0)
        # Tiles of queries that have the block: their pieces 0 to the number of their tiles of keys.
        for tile in range(tl.maximum(-block - 1, 0), tl.minimum(tiles_q, tiles_k - block)):
            piece = block + tile + 1
            last = tl.cdiv(num_k, SIDE)
            if CAUSAL:
                last = tl.minimum(last, tile + 1)
            is_written = (tile * SIDE < num_q) & (piece <= last)
            slot = _slot(first_q.to(tl.int64), sequences, tile, SIDE)
            rows = (slot * tl.num_programs(1) + head) * size + piece * SIDE
            sums += tl.load(parts + rows[:, None] + places[None, :], mask=is_written[:, None], other=0.0)
    index = block * SIDE + places + width // 2
    tl.store(grad_bias + head * width + index, tl.sum(sums, 0), mask=(index >= 0) & (index < width))
