"""Tiles of the attention kernels, tried on this GPU: one kernel at a time, the others as they are.

In: TILES of fivetune.model.cuda, minutes. Out: seconds of forward and backward with each tile, at several lengths, with
and without dropout; lines for TILES with the fastest. A tile that does not fit or computes something else is no
candidate. Those nearest to the present tile come first, so that a run that is cut short has tried the likely ones.
    python -m benchmarks.gpu_tiles --minutes 5
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from statistics import geometric_mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_checks import act_as_cuda, measure_seconds
from benchmarks.harness import facts, make_parser, table
from fivetune.errors import FiveTuneEnvironmentError, refuse_broken_context
from fivetune.model.cuda.attention import compute_attention
from fivetune.model.cuda.tiles import TILES, Tile

KERNELS = ("forward", "grad_q", "grad_kv")
SIDES, WARPS, STAGES = (16, 32, 64, 128), (4, 8), (1, 2, 3)
MOST_ELEMENTS = 128 * 64
WORKLOADS = (("175 of up to 512", 32, 175, 512), ("512", 16, 512, 512), ("2048", 4, 2048, 2048))
"""Name, sequences, mean and largest length."""
LARGEST_DIFFERENCE = 2e-2  # of outputs and gradients, relative to the largest value
GAIN = 0.97  # a new tile takes at most that share of the present one's time
NUM_CALLS = 20
HEADS = 12  # of t5-base


@dataclass(frozen=True, slots=True)
class Case:
    """Attention with bias, forward and backward, on one workload."""

    name: str
    call: Callable[[], list[Tensor]]


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--head-size", type=int, default=64, choices=(64, 128))
    parser.add_argument("--minutes", type=float, default=5)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise FiveTuneEnvironmentError("benchmarks.gpu_tiles: torch sees no CUDA device. This benchmark needs one.")
    with act_as_cuda() if args.device == "cpu" else nullcontext():
        result = {**sweep_tiles(args.device, args.head_size, 60 * args.minutes), "facts": facts(args.device)}
    rows = [[str(cell) for cell in row] for row in result["fastest"]]
    print(table([["kernel", "present", "fastest", "its time / the present"], *rows]))
    print(f"{result['num_tried']} of {result['num_candidates']} candidates tried, {len(result['failed'])} do not run")
    print("\n".join(result["lines"]))
    if args.json:
        print(json.dumps(result))


def sweep_tiles(device: str, head_size: int, seconds: float) -> dict[str, Any]:
    """Try the candidates of all kernels in turns until the time is over."""
    end = time.monotonic() + seconds
    cases, kind = list(make_cases(device, head_size)), f"bf16, {head_size}"
    exact = {case.name: case.call() for case in cases}
    present = {case.name: time_case(case, device) for case in cases}
    queues = {kernel: list_candidates(TILES[kernel, kind], kernel, device) for kernel in KERNELS}
    turns = [(kernel, tile) for turn in range(max(map(len, queues.values()))) for kernel, tile in _pick(queues, turn)]
    times: dict[str, dict[Tile, float]] = {kernel: {TILES[kernel, kind]: 1.0} for kernel in KERNELS}
    failed: list[str] = []
    num_tried = 0
    for kernel, tile in turns:
        if time.monotonic() > end:
            break
        with patch.dict(TILES, {(kernel, kind): tile}):
            found = try_tile(cases, exact, present, device)
        if isinstance(found, str):
            failed.append(f"{kernel} {tile}: {found}")
        else:
            times[kernel][tile] = found
        num_tried += 1
    fastest = {kernel: min(each, key=lambda tile: each[tile]) for kernel, each in times.items()}
    chosen = {k: tile if times[k][tile] <= GAIN else TILES[k, kind] for k, tile in fastest.items()}
    return {
        "microseconds": {name: 1e6 * each for name, each in present.items()},
        "fastest": [[k, _write(TILES[k, kind]), _write(fastest[k]), round(times[k][fastest[k]], 3)] for k in KERNELS],
        "lines": [f'("{kernel}", "{kind}"): {_write(tile)},' for kernel, tile in chosen.items()],
        "times": {k: {_write(tile): round(value, 4) for tile, value in each.items()} for k, each in times.items()},
        "failed": failed,
        "num_tried": num_tried,
        "num_candidates": len(turns),
    }


def _pick(queues: dict[str, list[Tile]], turn: int) -> Iterator[tuple[str, Tile]]:
    return ((kernel, tiles[turn]) for kernel, tiles in queues.items() if turn < len(tiles))


def _write(tile: Tile) -> str:
    return f"Tile({tile.rows}, {tile.cols}, {tile.warps}, {tile.stages})"


def list_candidates(present: Tile, kernel: str, device: str) -> list[Tile]:
    """Other tiles, the nearest first; those of grad_q are square. On a CPU two."""

    def measure_distance(tile: Tile) -> float:
        pairs = zip((tile.rows, tile.cols, tile.warps), (present.rows, present.cols, present.warps), strict=True)
        return sum(abs(math.log2(a / b)) for a, b in pairs) + 0.5 * abs(tile.stages - present.stages)

    if device == "cpu":
        return [Tile(16, 16, 1), Tile(32, 32, 1)]
    sizes = [(m, n) for m, n in product(SIDES, SIDES) if m * n <= MOST_ELEMENTS and (kernel != "grad_q" or m == n)]
    tiles = [Tile(m, n, warps, stages) for (m, n), warps, stages in product(sizes, WARPS, STAGES)]
    return sorted((tile for tile in tiles if tile != present), key=measure_distance)


def make_cases(device: str, head_size: int) -> Iterator[Case]:
    """The workloads in bf16, with and without dropout; on a CPU one that is short."""
    torch.manual_seed(0)
    workloads = WORKLOADS if device == "cuda" else (("short", 2, 20, 40),)
    for (name, count, middle, longest), dropout in product(workloads, (0.0, 0.1)):
        lengths = torch.randn(count).mul(0.36).exp().mul(middle).long().clamp(1, longest)
        lengths[0] = longest
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths]).cumsum(0).int().to(device)
        shape = (int(lengths.sum()), HEADS if device == "cuda" else 1, head_size)
        q, k, v = (torch.randn(shape, device=device).bfloat16().requires_grad_() for _ in range(3))
        bias = torch.randn(shape[1], 2 * longest - 1, device=device).requires_grad_()
        seed = torch.full((1,), 7, dtype=torch.int64, device=device)
        grad = torch.randn(shape, device=device).bfloat16()
        leaves = [q.detach().mul_(head_size**-0.5).requires_grad_(), k, v, bias]
        yield Case(f"{name}, dropout {dropout:g}", _make_call(leaves, grad, ends, longest, dropout, seed))


def _make_call(
    leaves: list[Tensor], grad: Tensor, ends: Tensor, longest: int, dropout: float, seed: Tensor
) -> Callable[[], list[Tensor]]:
    q, k, v, bias = leaves

    def call() -> list[Tensor]:
        out = compute_attention(q, k, v, ends, ends, longest, longest, bias, False, dropout, seed)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return call


def time_case(case: Case, device: str) -> float:
    """Seconds of a call: the least of several, each a graph that is replayed often."""
    replay = record_graph(case.call) if device == "cuda" else case.call
    num_calls = NUM_CALLS if device == "cuda" else 1

    def run() -> None:
        for _ in range(num_calls):
            replay()

    return min(measure_seconds(run, device) for _ in range(3)) / num_calls


def record_graph(call: Callable[[], object]) -> Callable[[], None]:
    """A call as a CUDA graph, as a training step is: launching from Python is not what is measured."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph.replay


def try_tile(cases: list[Case], exact: dict[str, list[Tensor]], present: dict[str, float], device: str) -> float | str:
    """The mean share of the present tiles' time; or why the tile is none."""
    try:
        for case in cases:
            pairs = zip(case.call(), exact[case.name], strict=True)
            far = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
            if not far <= LARGEST_DIFFERENCE:
                return f"{case.name}: results differ by {far:.2g}"
        return geometric_mean([time_case(case, device) / present[case.name] for case in cases])
    except Exception as error:  # of any class: Triton raises many for what does not fit
        refuse_broken_context(error, "another tile")
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


if __name__ == "__main__":
    main()
