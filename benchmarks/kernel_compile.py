"""Every Triton kernel compiled for Hopper (sm_90) on a machine without a GPU: registers, spills, memory, products.

In: the kernels and tiles of fivetune.model.cuda. Out: a table; products are PTX instructions: wgmma of four warps, mma
of one. It says that a kernel compiles, not that it is fast.
    python -m benchmarks.kernel_compile
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from benchmarks.harness import make_parser, table
from fivetune.model.cuda import attention, attention_kernels, cross_entropy, norm, optimizer, pointwise, rows
from fivetune.model.cuda.tiles import TILES, Tile, choose_attention_tile

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
FP32 = {"lse", "delta", "parts", "factors", "grad_bias", "bias", "total", "nats", "norms", "weights"}
INT64 = {"seed", "cu_q", "cu_k", "ids", "order", "labels"}
FLOATS = {"scale", "eps", "max_norm", "weight_decay"}
COUNTS = {"q_stride", "k_stride", "v_stride", "grad_stride", "num_rows", "width", "groups", "rate", "tiles_q"} | {
    "tiles_k",
    "size",
    "num_sequences",
    "rows",
    "num_copied",
    "num_decayed",
}


def main() -> None:
    args = make_parser(__doc__, results=None).parse_args()
    found = [["kernel", "of", "registers", "spilled bytes", "shared memory bytes", "wgmma", "mma"]]
    for name, kernel, kind, constants, tile in cases():
        found.append([name, kind, *compiled(kernel, kind.partition(",")[0], constants, tile)])
    print(table(found))
    if args.json:
        print(json.dumps({"rows": found[1:]}))


def cases() -> Iterator[tuple[str, Any, str, dict[str, Any], Tile]]:
    """Name, kernel, what of, constants, tile: each kernel at the sizes of t5-base and with all that it can do."""
    for kind, num_bytes in (("bf16", 2), ("fp32", 4)):
        for head_size in (64, 128):
            for name in ("forward", "grad_q", "grad_kv"):
                tile = choose_attention_tile(name, head_size, num_bytes=num_bytes)
                constants = {"CAUSAL": True, "PRODUCTS": "ieee", "D": head_size, "M": tile.rows, "N": tile.cols}
                yield f"attention {name}", getattr(attention_kernels, name), f"{kind}, {head_size}", constants, tile
        tile = choose_attention_tile("grad_q", 64, num_bytes=num_bytes)
        side = {"CAUSAL": True, "SIDE": tile.cols, "TOGETHER": attention.SEQUENCES_TOGETHER}
        yield "attention sum_parts", attention_kernels.sum_parts, kind, side, tile
        yield "norm forward", norm._forward, kind, {"BLOCK": 1024}, TILES["norm", ""]
        yield "norm backward", norm._backward, kind, {"BLOCK": 1024}, TILES["norm", ""]
        pointwise_tile = TILES["pointwise", ""]
        block = {"BLOCK": pointwise_tile.cols}
        gate = {"GELU": True, "GATED": True, **block}
        yield "dropout and sum", pointwise._dropped, kind, block, pointwise_tile
        yield "activation", pointwise._activated, kind, gate, pointwise_tile
        yield "activation backward", pointwise._activated_backward, kind, gate, pointwise_tile
        tile = TILES["rows", ""]
        yield "rows of a table", rows._add_runs, kind, {"ROWS": tile.rows, "COLS": tile.cols}, tile
        tile = TILES["logits", ""]
        yield "losses of logits", cross_entropy._forward, kind, {"BLOCK": tile.cols}, tile
        yield "gradient of logits", cross_entropy._backward, kind, {"BLOCK": tile.cols}, tile
    tile = TILES["optimizer", ""]
    betas = {"BETA1": 0.9, "BETA2": 0.999}
    yield "square sums", optimizer._square_sums, "fp32", {"BLOCK": tile.cols}, tile
    yield "clip", optimizer._decide, "fp32", {**betas, "BLOCK": tile.rows}, tile
    yield "adamw", optimizer._update, "fp32", {**betas, "EPS": 1e-8, "BLOCK": tile.cols}, tile


def compiled(kernel: Any, kind: str, constants: dict[str, Any], tile: Tile, target: GPUTarget = HOPPER) -> list[str]:
    """Registers per thread, spilled bytes per thread, shared memory bytes, products by instruction."""
    signature, fixed, aligned = {}, {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], fixed[(place,)] = "constexpr", constants[name]
            continue
        signature[name] = argument_type(name, kind, kernel)
        if signature[name][0] == "*" or name.endswith("stride"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, aligned)
    done = triton.compile(source, target, {"num_warps": tile.warps, "num_stages": tile.stages})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(done.asm["cubin"])
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert used is not None, text
    products = [str(done.asm["ptx"].count(name)) for name in ("wgmma.mma_async", "mma.sync")]
    return [used[1], used[2], str(done.metadata.shared), *products]


def argument_type(name: str, kind: str, kernel: Any) -> str:
    """How Triton writes the type of an argument, by its name."""
    if name in COUNTS:
        return "i32"
    if name in FLOATS:
        return "fp32"
    if name == "state":
        return "*fp64"
    if name == "copies":
        return "*bf16"
    if name == "seen":
        return "*i8"
    return "*i64" if name in INT64 else "*fp32" if name in FP32 else f"*{kind}"


if __name__ == "__main__":
    main()
