"""The gradient of a table from the rows that were read: rows of equal ids are summed in the order of the tokens.

In: ids [N] and the gradient of each read row [N, d]. Out: the sums, added to rows of a gradient [V, d]. torch's
index_add_ adds by atomics on CUDA, so that the last bits differ from run to run; here a resumed run repeats them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fivetune.model.cuda.tiles import TILES, divide_up, launch


def add_rows_(total: Tensor, ids: Tensor, grad: Tensor) -> Tensor:
    """Add grad [N, d] to the rows `ids` [N] int64 of total [V, d], in place; ids may repeat.

    The sort is stable, sums are fp32, and nothing is read back to the host, so a CUDA graph can capture it.
    """
    assert total.is_contiguous(), total.stride()
    ordered, order = ids.sort(stable=True)
    tile = TILES["rows", ""]
    grid = (len(ids), divide_up(total.shape[1], tile.cols))
    numbers = {"num_rows": len(ids), "width": total.shape[1], "ROWS": tile.rows, "COLS": tile.cols}
    launch(_add_runs, grid, total, ordered, order, grad.contiguous(), tile=tile, **numbers)
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _add_runs(total, ids, order, grad, num_rows, width, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Sum one run of equal ids, ROWS rows at a time. Grid: (positions, blocks of columns); others than the first of a
    run return."""
    place = tl.program_id(0)
    own = tl.load(ids + place)
    if tl.load(ids + place - 1, mask=place > 0, other=-1) == own:
        return
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < width
    sums = tl.zeros([COLS], tl.float32)
    num_alike = ROWS
    while num_alike == ROWS:
        places = place + tl.arange(0, ROWS)
        alike = tl.load(ids + places, mask=places < num_rows, other=-1) == own
        rows = tl.load(order + places, mask=alike, other=0)
        values = tl.load(grad + rows[:, None] * width + cols[None, :], mask=alike[:, None] & inside[None, :], other=0.0)
        sums += tl.sum(values.to(tl.float32), 0)
        num_alike = tl.sum(alike.to(tl.int32))
        place += ROWS
    target = total + own * width + cols
    sums += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, sums.to(total.dtype.element_ty), mask=inside)
