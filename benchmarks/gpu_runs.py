"""Stages of `benchmarks.gpu_day` about a run: its telemetry beside nvidia-smi, and whether it resumes exactly."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

from safetensors.torch import load_file
from torch import Tensor

import fivetune
from benchmarks.gpu_checks import Findings, Steps, prepare_plan
from benchmarks.sides import own_setup
from benchmarks.workloads import share_model
from fivetune.errors import InterruptedRunError
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.rundir.progress import Progress

QUERY = "utilization.gpu,utilization.memory,memory.used,power.draw,clocks.sm,temperature.gpu"
COMPARED = (("utilisation", 0, 0.01), ("memory_used_bytes", 2, 2**20), ("power_watts", 3, 1.0))
"""Name in a record, column of QUERY, its unit."""


def check_telemetry(findings: Findings, device: str) -> None:
    """The sampler beside nvidia-smi during training: means of utilisation, memory and power; on a CPU the host's."""
    seconds, every = (20.0, 0.5) if device == "cuda" else (1.0, 0.2)
    records: list[dict[str, Any]] = []
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-lms", "500"]
    with prepare_plan(device) as plan, Steps(own_setup(plan)) as steps:
        steps.finish(2)
        on_path = device == "cuda" and shutil.which(command[0])
        watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True) if on_path else None
        with Sampler(records.append, every_seconds=every):
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                steps.finish()
    sampled = len(records) > 2 and all(record.get("cpu_utilisation", 0) >= 0 for record in records[1:])
    findings.require("the host is sampled", sampled)
    if watcher is not None:
        watcher.terminate()
        _compare_means(findings, records, watcher.communicate()[0])


def _compare_means(findings: Findings, records: list[dict[str, Any]], lines: str) -> None:
    """The sampler's records against the lines of nvidia-smi, without the first two of each."""
    theirs = [[float(cell) for cell in line.split(",")] for line in lines.splitlines()[2:] if line.count(",") == 5]
    ours = [record["devices"][0] for record in records[2:] if record.get("devices")]
    findings.require("the device is sampled", bool(ours) and bool(theirs))
    if not (ours and theirs):
        return
    for name, column, unit in COMPARED:
        mine, other = mean(float(one[name]) for one in ours), mean(row[column] * unit for row in theirs)
        findings.note(name, [mine, other])  # two samplers of a grid of 0.5 s: a difference is no failure


def check_resume(findings: Findings, device: str) -> None:
    """A run that is stopped at half its steps and resumed against one that is not, with AdamW and with Adafactor."""
    num_steps = 20 if device == "cuda" else 4
    for optimizer in ("adamw", "adafactor"):
        with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as name:
            recipe = _write_recipe(Path(name), device, optimizer, num_steps)
            weights = {}
            for run in ("whole", "stopped"):
                recipe["run"] = {"dir": str(Path(name) / run), "seed": 1}
                if run == "stopped":
                    with stop_after(num_steps // 2), suppress(InterruptedRunError):
                        fivetune.train(recipe, preflight=False, quiet=True)
                fivetune.train(recipe, preflight=False, quiet=True, resume=run == "stopped")
                weights[run] = load_file(Path(name) / run / "model" / "model.safetensors")
            for run in weights:
                machine = json.loads((Path(name) / run / "machine.json").read_text())
                findings.note(f"{run}, {optimizer}", {key: machine.get(key) for key in ("capture", "forward")})
        findings.check(f"largest difference, {optimizer}", _measure_difference(weights["whole"], weights["stopped"]))


def _measure_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max((ours[name] - value).abs().max().item() for name, value in theirs.items())


def _write_recipe(folder: Path, device: str, optimizer: str, num_steps: int) -> dict[str, Any]:
    """A recipe of short posts with labels, for a small model of random weights."""
    model = share_model("t5-tiny" if device == "cpu" else "t5-small")
    choices = {"capture": "on", "forward": "flat"} if device == "cuda" else {}  # both are chosen by time otherwise
    for name, count in (("train", 400), ("eval", 8)):
        lines = [
            {"id": str(i), "inputs": f"Ann has a red hat {i} " * (1 + i % 9), "targets": f"hat {i % 7}"}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {
        "model": {"path": str(model)},
        "task": {"name": "jsonl"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "eval": str(folder / "eval.jsonl"),
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"name": optimizer, "lr": 1e-3},
        "train": {"num_steps": num_steps, "batch_size": 4, "num_threads": 1, **choices},
        "eval": {"every_steps": num_steps, "max_new_tokens": 4},
        "device": device,
    }


@contextmanager
def stop_after(step: int) -> Iterator[None]:
    """The process gets a SIGTERM when the record of that step is shown."""
    original, left = Progress.show_step, [True]

    def show_step(self: Progress, record: Any, *rest: Any) -> Any:
        if record.step == step and left:
            left.clear()
            signal.raise_signal(signal.SIGTERM)
        return original(self, record, *rest)

    with patch.object(Progress, "show_step", show_step):
        yield
