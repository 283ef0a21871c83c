"""Which device is used, and what the machine is: unknown facts are None, never a guess."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from fivetune.errors import ConfigError, EnvironmentProblem
from fivetune.model.memory import is_out_of_memory

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets")


def pick_device(asked: str) -> str:
    """The device to use; `auto` takes CUDA, then MPS, then the CPU. Raises EnvironmentProblem if it is not there."""
    if asked == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    kind, _, index = asked.partition(":")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= there:
        raise EnvironmentProblem(f"device: {asked} is asked for, this machine has {there} of {kind}. Use auto or cpu.")
    return asked


def pick_precision(asked: str, device: str) -> str:
    """fp32, bf16 or fp16; `auto` takes bf16 where the device computes in it, else fp32."""
    native = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    if asked == "auto":
        return "bf16" if native else "fp32"
    if asked == "fp16" and device == "mps":
        raise ConfigError("train.precision: fp16 is not supported on mps. Use auto.")
    return asked


def num_cores() -> int:
    """Physical cores that this process may use; OMP_NUM_THREADS, where it is set, is the user's word."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def peak_bytes(device: str) -> int | None:
    """Most memory used so far: allocated on a CUDA device, resident for a CPU process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).is_file():  # ru_maxrss of a child begins with its parent's peak
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak(device: str) -> None:
    """Let `peak_bytes` of a CUDA device count from here; a process cannot forget its own peak."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def enough_memory() -> Iterator[None]:
    """Turn an allocation that failed, on any device, into an EnvironmentProblem that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EnvironmentProblem(
            f"device: out of memory: {(str(error) or 'no details').splitlines()[0]} "
            "Lower train.batch_size (keep train.global_batch_size: the result stays the same), "
            "data.max_input_tokens, or eval.batch_size if it happened in an evaluation."
        ) from None


def machine_facts(device: str) -> dict[str, Any]:
    """Device, host, versions, commit: what a reader needs to judge a figure."""
    return {
        "device": _device_facts(device),
        "host": {
            "cpu": _cpu_name(),
            "num_cores": num_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "os": platform.platform(terse=True),
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "git": _git_facts(),
    }


def _device_facts(device: str) -> dict[str, Any]:
    if not device.startswith("cuda"):
        return {"kind": device, "name": _cpu_name() if device == "cpu" else None, "memory_bytes": None}
    facts = torch.cuda.get_device_properties(device)
    return {"kind": "cuda", "name": facts.name, "memory_bytes": facts.total_memory}


def _cpu_name() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ("fivetune", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _git_facts() -> dict[str, Any]:
    """Commit of the sources, and whether they were changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
