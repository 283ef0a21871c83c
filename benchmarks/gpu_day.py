"""A day with a GPU: is the CUDA path right, how fast does it train, and what else is there to know?

Three calls of less than ten minutes: right, train, rest. Each has stages, the most valuable first, and each stage is a
process of its own with a limit: one that fails, hangs or breaks the device costs nothing but itself. The file
gpu-day-CALL-DEVICE.json under --out is written before and after every stage, so a call that is killed leaves what it
measured. A stage that has no time left is named; --only runs it in a further call.
    python -m benchmarks.gpu_day right --out results --minutes 9
    python -m benchmarks.gpu_day right --device cpu --minutes 5
On a CPU the stages run in a reduced form: it shows that they run, no figure means anything.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, make_parser, table, write_result

INTERPRET = "TRITON_INTERPRET"
INTERPRETED = {"models", "kernels", "capture", "randomness", "failed-capture", "syncs", "tiles"}
"""Stages in which Triton's interpreter runs the kernels on a CPU."""
LEAST_ON_CPU, LIMIT_ON_CPU = 15.0, 240.0
WIDEST = 160  # of what the table tells; the file has all


@dataclass(frozen=True, slots=True)
class Stage:
    """A program whose last line is a JSON object.

    Args:
        seconds: about how long it takes on a GPU; twice that is its limit.
        module: of benchmarks.
        words: its arguments; {device} and {folder}, where its own files go, are filled in.
        on_cpu: arguments after those on a CPU; None leaves it out there.
    """

    name: str
    seconds: float
    module: str
    words: str
    on_cpu: str | None = ""


def make_right(name: str, seconds: float) -> Stage:
    return Stage(name, seconds, "gpu_right", f"{name} --device {{device}}")


def make_training(name: str, model: str, batch_size: int, peers: str, seconds: float, words: str = "") -> Stage:
    """Training of that model and batch size against peers, of which half is start-up; on a CPU a few tiny steps."""
    settings = f"--model {model} --batch-size {batch_size} --workload squad --peers {peers} {words}"
    words = f"{settings} --minutes {seconds / 120:.2f} --device {{device}} --results {{folder}} --json"
    tiny = "--model t5-tiny --batch-size 2 --workload translation --peers fivetune-launched --minutes 0.01"
    return Stage(name, seconds, "train", words, tiny)


DECODE = "--device {device} --results {folder} --json"
CALLS: dict[str, tuple[Stage, ...]] = {
    "right": (
        make_right("facts", 20),
        make_right("models", 60),
        make_right("kernels", 70),
        make_right("capture", 80),
        make_right("randomness", 60),
        make_right("resume", 80),
        make_right("decode-right", 50),
        make_right("syncs", 50),
        make_right("failed-capture", 60),
        make_right("out-of-memory", 40),
        make_right("telemetry", 45),
        make_right("compile", 40),
        make_right("sanitizer", 120),
    ),
    "train": (
        make_training("base-16", "t5-base", 16, "default,tuned,fivetune-launched", 140),
        make_training("small-16", "t5-small", 16, "default,tuned,fivetune-launched", 120),
        make_training("small-128", "t5-small", 128, "default,tuned", 110),
        make_training("base-128-tuned", "t5-base", 128, "tuned", 100),
        make_training("base-128-default", "t5-base", 128, "default", 100),
        make_training("base-16-compiled", "t5-base", 16, "compiled", 120),
    ),
    "rest": (
        Stage("decode", 120, "gpu_decode", f"--model t5-base {DECODE}", "--model t5-tiny --questions 4"),
        make_right("profile", 60),
        Stage("kernels-fast", 90, "kernels", "--results {folder} --json", None),
        Stage("tiles", 120, "gpu_tiles", "--minutes 1.5 --device {device} --json", "--minutes 0.1"),
        make_training("small-16-compiled", "t5-small", 16, "compiled", 100),
        make_training("large-16", "t5-large", 16, "tuned", 120),
        make_training("small-32-tf32", "t5-small", 32, "tuned", 80, "--precision tf32"),
        make_training("small-16-adafactor", "t5-small", 16, "default", 80, "--optimizer adafactor"),
        make_training("mt5-small-8", "mt5-small", 8, "tuned", 90),
        Stage("optimizers", 40, "optimizers", f"--model t5-base {DECODE}", "--model t5-tiny"),
    ),
}
"""Two peers with t5-base and a batch of 128 may not fit beside FiveTune into 80 GB: they run apart."""


def main() -> None:
    args = parse_arguments()
    stages = [stage for stage in CALLS[args.call] if not args.only or stage.name in args.only]
    results: dict[str, Any] = {"call": args.call, "device": args.device, "stages": {}}
    name = "-".join(["gpu-day", args.call, *args.only, args.device])
    end = time.monotonic() + 60 * args.minutes
    for stage in stages:
        results["stages"][stage.name] = {"state": "began, and was cut off"}
        write_result(name, results, args.out)
        found = run_stage(stage, args.device, seconds_left=end - time.monotonic())
        results["stages"][stage.name] = found
        print(f"{stage.name}: {found['state']}, {found.get('seconds', 0):.0f} s", flush=True)
        path = write_result(name, results, args.out)
    print(f"\n{table(build_rows(results['stages']))}\n\nwritten to {path}")
    if args.json:
        print(json.dumps(results))
    if any(found["state"] not in ("passed", "no time left") for found in results["stages"].values()):
        sys.exit(1)


def parse_arguments(words: Sequence[str] | None = None) -> Any:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("call", choices=list(CALLS))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, help="folder of the JSON file; default: benchmarks/results, on a CPU build")
    parser.add_argument("--minutes", type=float, default=9, help="when no further stage begins, and the last one ends")
    parser.add_argument("--only", default="", help="names of stages, with commas between them")
    args = parser.parse_args(words)
    known = [stage.name for stage in CALLS[args.call]]
    args.only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only: {args.call} has no {', '.join(unknown)}. Allowed: {', '.join(known)}.")
    args.out = args.out or (RESULTS if args.device == "cuda" else RESULTS.parents[1] / "build")
    return args


def run_stage(stage: Stage, device: str, *, seconds_left: float) -> dict[str, Any]:
    """What a stage printed in its last line, with its state and seconds; its end if it failed."""
    least, limit = LEAST_ON_CPU, LIMIT_ON_CPU
    if device == "cuda":
        least, limit = stage.seconds / 2, 2 * stage.seconds
    if device == "cpu" and stage.on_cpu is None:
        return {"state": "passed", "left_out": "it needs a GPU"}
    if seconds_left < least:
        return {"state": "no time left"}
    started, limit = time.monotonic(), min(limit, seconds_left)
    with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as folder:
        words = stage.words.format(device=device, folder=folder).split()
        words += (stage.on_cpu or "").split() if device == "cpu" else []
        command = [sys.executable, "-m", f"benchmarks.{stage.module}", *words]
        code, output, errors = run_process(command, make_environment(stage, device), limit)
    took = {"seconds": round(time.monotonic() - started, 1)}
    if code is None:
        return {"state": f"more than {limit:.0f} s", **took, "end": (output + errors)[-3000:]}
    lines = output.strip().splitlines()
    if code or not lines or not lines[-1].startswith("{"):
        return {"state": f"ended with code {code}", **took, "end": (output + errors)[-3000:]}
    return {"state": "passed", **json.loads(lines[-1]), **took}


def make_environment(stage: Stage, device: str) -> dict[str, str]:
    """The environment of a stage: Triton's interpreter where a CPU acts as a GPU, and nowhere else."""
    environment = {key: value for key, value in os.environ.items() if key != INTERPRET}
    return environment | ({INTERPRET: "1"} if device == "cpu" and stage.name in INTERPRETED else {})


def run_process(command: list[str], environment: dict[str, str], seconds: float) -> tuple[int | None, str, str]:
    """Exit code, None if the limit was reached; output; errors. All processes that it started end with it."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env=environment,
        start_new_session=True,
    )
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `finally` runs where this process is ended
    try:
        output, errors = process.communicate(timeout=seconds)
        return process.returncode, output, errors
    except subprocess.TimeoutExpired:
        _kill_group(process)
        return None, *process.communicate()
    finally:
        _kill_group(process)
        signal.signal(signal.SIGTERM, before)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# --- the table ---


def build_rows(stages: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The rows of the table: what each stage found in a few words."""
    rows = [["stage", "state", "s", "found"]]
    for name, found in stages.items():
        rows.append([name, found["state"], f"{found.get('seconds', 0):.0f}", describe_result(found)[:WIDEST]])
    return rows


def describe_result(found: dict[str, Any]) -> str:
    """
    >>> describe_result({"state": "failed", "num_checks": 3, "wrong": ["loss: 0.2, allowed 0.1"]})
    '1 of 3 checks: loss: 0.2, allowed 0.1'
    """
    if found.get("wrong"):
        return f"{len(found['wrong'])} of {found['num_checks']} checks: " + "; ".join(found["wrong"][:3])
    if "end" in found:
        return next(iter(found["end"].strip().splitlines()[::-1]), "")[:120]
    if "sides" in found:
        return describe_training(found)
    if "answers_per_second" in found:
        speeds = (f"{name} {speed[0]:.0f}/s" for name, speed in found["answers_per_second"].items())
        return ", ".join([*speeds, *(f"{ratio[0]:.2f} x {name}" for name, ratio in found["ratios"].items())])
    return found.get("left_out") or (f"{found['num_checks']} checks" if found.get("num_checks") else "")


def describe_training(found: dict[str, Any]) -> str:
    """Speed and MFU of FiveTune, and how many times faster it is than each peer on the same examples."""
    ours = found["sides"]["fivetune"]
    parts = [f"{ours['precision']}, {ours['tokens_per_second'][0]:,.0f} tokens/s, MFU {ours['mfu']:.1%}"]
    parts += [f"{figures['same_examples']:.2f} x {name}" for name, figures in found["ratios"].items()]
    return ", ".join([*parts, f"peak {(ours['peak_bytes'] or 0) / 1e9:.1f} GB"])


if __name__ == "__main__":
    main()
