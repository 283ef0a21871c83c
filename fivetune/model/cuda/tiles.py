"""Tile sizes and warps of all kernels in one table, and the function that launches a kernel with them.

In: a kernel's name, the dtype and head size of its inputs. Out: a `Tile`.

NOT MEASURED. Chosen for Hopper (228 KiB shared memory, 64 Ki registers per multiprocessor) by reasoning, and by the
compiler's report for sm_90 (registers, spills, shared memory: `python -m benchmarks.kernel_compile`, no GPU needed):
- Fine-tuning has sequences of 100 to 500 tokens: tiles of 128 rows would be one third empty, so 64.
- A tile of 64x64 fp32 takes 32 registers per thread with 4 warps; masks, random bits and bias take as many.
  The gradient of keys and values also holds two sums of cols x head size: half the rows prevent spilling.
- Tiles of grad_q are square: it sums the gradient of the bias along diagonals, which meet the next tile's there.
- Heads of 128 columns need 8 warps for the same reason; fp32 has no tensor cores here and needs small tiles.
- Heads of 32 columns and fewer have tiles of 32 rows, which the compiler multiplies without wgmma: with it, Triton 3.6
  and later may read shared memory out of bounds there on Hopper (triton#10486).
- Two stages overlap the loads of the next tile with the products of this one; loops of 3 to 8 iterations gain nothing
  from more.
- Pointwise kernels: 1024 divides T5's feed-forward sizes and gives each thread 16-byte loads; logits have long rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tile:
    """Size of the work of one program.

    Args:
        rows: query rows (attention), programs that share all rows (norm, optimizer), or rows of a turn (rows).
        cols: key columns (attention), or elements per block (pointwise, optimizer, rows, logits).
        warps: warps per program.
        stages: depth of the load pipeline.
    """

    rows: int
    cols: int
    warps: int
    stages: int = 1


LARGEST_HEAD = 128  # columns of a head, which the attention kernels hold in registers

TILES = {
    ("forward", "bf16, 32"): Tile(32, 32, 4, 2),
    ("forward", "bf16, 64"): Tile(64, 64, 4, 2),
    ("forward", "bf16, 128"): Tile(64, 64, 8, 2),
    ("forward", "fp32"): Tile(32, 32, 4),
    ("grad_q", "bf16, 32"): Tile(32, 32, 4, 2),
    ("grad_q", "bf16, 64"): Tile(64, 64, 4, 2),
    ("grad_q", "bf16, 128"): Tile(64, 64, 8, 2),
    ("grad_q", "fp32"): Tile(32, 32, 8),
    ("grad_kv", "bf16, 32"): Tile(32, 32, 4, 2),
    ("grad_kv", "bf16, 64"): Tile(32, 64, 4, 2),
    ("grad_kv", "bf16, 128"): Tile(32, 64, 8, 2),
    ("grad_kv", "fp32"): Tile(32, 32, 8),
    ("norm", ""): Tile(1024, 0, 4),
    ("pointwise", ""): Tile(0, 1024, 4),
    ("optimizer", ""): Tile(1024, 2048, 4),
    ("rows", ""): Tile(32, 128, 4),
    ("logits", ""): Tile(0, 4096, 8),
}


def choose_attention_tile(kernel: str, head_size: int, *, num_bytes: int) -> Tile:
    """Choose the tile of an attention kernel by head size (up to 128) and bytes per element."""
    if num_bytes == 4:
        return TILES[kernel, "fp32"]
    width = next(width for width in (32, 64, LARGEST_HEAD) if head_size <= width)
    return TILES[kernel, f"bf16, {width}"]


def divide_up(size: int, block: int) -> int:
    """The number of blocks that cover `size`. `triton.cdiv` has the type of a value within a kernel."""
    return -(-size // block)


def round_up(size: int, block: int) -> int:
    """The size of the blocks that cover `size`.

    >>> round_up(70, 64)
    128
    """
    return divide_up(size, block) * block


class Kernel(Protocol):
    """A function compiled by Triton: indexed with a grid, it returns the function that launches the kernel."""

    def __getitem__(self, grid: tuple[int, ...], /) -> Callable[..., object]: ...


def launch(
    kernel: Kernel, grid: tuple[int, ...], *args: Tensor | float | None, tile: Tile, **named: float | str
) -> None:
    """Launch a kernel on the current stream."""
    kernel[grid](*args, num_warps=tile.warps, num_stages=tile.stages, **named)
