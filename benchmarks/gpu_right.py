"""Is the CUDA path right? One stage of `benchmarks.gpu_day` in this process.

In: the name of a stage; cuda, or cpu for a reduced form in which Triton's interpreter runs the kernels and a function
that is called again stands in for a CUDA graph. Out: a JSON line for each check, with what was found and what is
allowed, and for each fact, as soon as it is known. The exit code is 1 if a check failed.
    python -m benchmarks.gpu_right models --device cuda
    TRITON_INTERPRET=1 python -m benchmarks.gpu_right models --device cpu
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from benchmarks.gpu_checks import Findings, act_as_cuda
from benchmarks.gpu_day import INTERPRETED
from benchmarks.gpu_decode import check_decoding
from benchmarks.gpu_kernels import check_kernels, check_memory, check_models, measure_facts
from benchmarks.gpu_runs import check_resume, check_telemetry
from benchmarks.gpu_steps import (
    check_capture,
    check_failed_capture,
    check_fp16,
    check_out_of_memory,
    check_randomness,
    check_syncs,
    profile_steps,
)
from benchmarks.gpu_warm import warm_up
from benchmarks.harness import make_parser

STAGES: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "facts": (measure_facts, {}),
    "warm": (warm_up, {}),
    "models": (check_models, {}),
    "kernels-64-bf16": (check_kernels, {"head_size": 64, "kind": "bfloat16", "others": True}),
    "kernels-64-fp32": (check_kernels, {"head_size": 64, "kind": "float32", "others": True}),
    "kernels-128": (check_kernels, {"head_size": 128}),
    "kernels-32": (check_kernels, {"head_size": 32}),
    "kernels-16": (check_kernels, {"head_size": 16}),
    "kernels-8": (check_kernels, {"head_size": 8}),
    "capture-bf16": (check_capture, {"precision": "bf16"}),
    "capture-fp32": (check_capture, {"precision": "fp32"}),
    "randomness": (check_randomness, {}),
    "failed-capture": (check_failed_capture, {}),
    "resume": (check_resume, {}),
    "decode-right": (check_decoding, {}),
    "syncs": (check_syncs, {}),
    "fp16": (check_fp16, {}),
    "out-of-memory": (check_out_of_memory, {}),
    "telemetry": (check_telemetry, {}),
    "memcheck": (check_memory, {}),
    "profile": (profile_steps, {}),
}


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args()
    is_right = True

    def tell(line: dict[str, Any]) -> None:
        nonlocal is_right
        is_right &= "check" not in line or line["check"][1] <= line["check"][2]
        print(json.dumps(line), flush=True)

    run_stage(args.stage, args.device, tell)
    sys.exit(not is_right)


def run_stage(name: str, device: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Tell what a stage finds, up to an error if there is one; on a CPU in its reduced form."""
    findings, (check, options) = Findings(tell), STAGES[name]
    try:
        with act_as_cuda() if device == "cpu" and name in INTERPRETED else nullcontext():
            check(findings, device, **options)
    except Exception as error:  # of any class: what was found before it counts
        findings.note("error", traceback.format_exc()[-3000:])
        findings.require(f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}", False)


if __name__ == "__main__":
    main()
