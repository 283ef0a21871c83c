"""Is the CUDA path right? One stage of `benchmarks.gpu_day right` in this process.

In: the name of a stage; cuda, or cpu for a reduced form in which Triton's interpreter runs the kernels and a function
that is called again stands in for a CUDA graph. Out, as JSON: facts, and checks with what was found and what is
allowed.
    python -m benchmarks.gpu_right models --device cuda
    TRITON_INTERPRET=1 python -m benchmarks.gpu_right models --device cpu
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from benchmarks.gpu_checks import Findings, act_as_cuda
from benchmarks.gpu_day import INTERPRETED
from benchmarks.gpu_decode import check_decoding
from benchmarks.gpu_kernels import check_kernels, check_memory, check_models, compile_kernels, measure_facts
from benchmarks.gpu_runs import check_resume, check_telemetry
from benchmarks.gpu_steps import (
    check_capture,
    check_failed_capture,
    check_out_of_memory,
    check_randomness,
    check_syncs,
    profile_steps,
)
from benchmarks.harness import make_parser

STAGES: dict[str, Callable[[Findings, str], None]] = {
    "facts": measure_facts,
    "models": check_models,
    "kernels": check_kernels,
    "capture": check_capture,
    "randomness": check_randomness,
    "failed-capture": check_failed_capture,
    "resume": check_resume,
    "decode-right": check_decoding,
    "syncs": check_syncs,
    "out-of-memory": check_out_of_memory,
    "telemetry": check_telemetry,
    "compile": compile_kernels,
    "sanitizer": check_memory,
    "profile": profile_steps,
}


def main() -> None:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    args = parser.parse_args()
    print(json.dumps(run_stage(args.stage, args.device)))


def run_stage(name: str, device: str) -> dict[str, Any]:
    """What a stage found, up to an error if there was one; on a CPU in its reduced form."""
    findings = Findings()
    try:
        with act_as_cuda() if device == "cpu" and name in INTERPRETED else nullcontext():
            STAGES[name](findings, device)
    except Exception as error:  # of any class: what was found before it counts
        findings.facts["error"] = traceback.format_exc()[-3000:]
        findings.require(f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}", False)
    return findings.to_json()


if __name__ == "__main__":
    main()
