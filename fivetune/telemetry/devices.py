"""Choice of the device and the precision, and facts about the machine; unknown facts are None, never a guess."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

from fivetune.errors import ConfigError, FiveTuneEnvironmentError, is_out_of_memory
from fivetune.types import JsonTable

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets", "torchax", "jax")

PEAK_TERAFLOPS: dict[str, tuple[float, float | None, float | None]] = {
    # device: (fp32, fp16, bf16)                                        source
    "V100 SXM2": (15.7, 125, None),  # NVIDIA V100 data sheet (2020)
    "V100 PCIE": (14.0, 112, None),
    "V100S PCIE": (16.4, 130, None),
    "T4": (8.1, 65, None),  # NVIDIA T4 data sheet
    "QUADRO RTX 6000": (16.3, 130.5, None),  # NVIDIA Turing architecture white paper, table 5
    "QUADRO RTX 8000": (16.3, 130.5, None),
    "A100 SXM4": (19.5, 312, 312),  # NVIDIA A100 data sheet
    "A100 PCIE": (19.5, 312, 312),
    "A30": (10.3, 165, 165),  # NVIDIA A30 data sheet
    "A10": (31.2, 125, 125),  # NVIDIA A10 data sheet
    "A10G": (35, 70, 70),  # NVIDIA A10G data sheet (as AWS offers it)
    "A40": (37.4, 149.7, 149.7),  # NVIDIA A40 data sheet
    "RTX A6000": (38.7, 154.8, 154.8),  # NVIDIA RTX A6000 data sheet
    "RTX 3090": (35.6, 71, 71),  # NVIDIA GA102 white paper, with fp32 accumulation
    "L4": (30.3, 121, 121),  # NVIDIA L4 data sheet
    "L40": (90.5, 181, 181),  # NVIDIA L40 data sheet
    "L40S": (91.6, 362, 362),  # NVIDIA L40S data sheet
    "RTX 6000 ADA GENERATION": (91.1, 364.2, 364.2),  # NVIDIA AD102 white paper
    "RTX 4090": (82.6, 165.2, 165.2),  # NVIDIA AD102 white paper, with fp32 accumulation
    "H100": (66.9, 989.4, 989.4),  # NVIDIA H100 white paper: the SXM5 board; its name gives no form
    "H100 PCIE": (51.2, 756, 756),
    "H100 NVL": (60, 835, 835),  # NVIDIA H100 data sheet
    "H200": (66.9, 989.4, 989.4),  # NVIDIA H200 data sheet: the SXM5 board
    "H200 NVL": (60, 836, 836),
    "GH200": (66.9, 989.4, 989.4),  # NVIDIA GH200 data sheet
    "B200": (75, 2250, 2250),  # NVIDIA HGX B200: an eighth of the board's
}
"""Dense peaks in 10^12 operations per second: fp32 without tensor cores, 16-bit products with them. Data sheets often
state the value with structured sparsity, which is twice as high. None: not supported by the device."""
VENDORS = {"NVIDIA", "TESLA", "GEFORCE"}
MEMORY_SIZE = re.compile(r"\d+GB?|HBM\d\w*")


def pick_device(requested: str) -> str:
    """Pick the device; `auto` prefers CUDA, then MPS, then the CPU. Raises FiveTuneEnvironmentError if missing."""
    if requested == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    if requested == "tpu":
        count_tpu_chips()
        return requested
    kind, _, index = requested.partition(":")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= there:
        raise FiveTuneEnvironmentError(
            f"device: {requested} is not available, this machine has {there} of {kind}. Use auto or cpu."
        )
    return requested


def count_tpu_chips() -> int:
    """Count the TPU chips that jax finds; virtual CPU devices stand in for them if JAX_PLATFORMS is cpu.

    Raises FiveTuneEnvironmentError without chips, or without the packages.
    """
    if find_spec("jax") is None or find_spec("torchax") is None:
        raise FiveTuneEnvironmentError(
            "device: tpu needs torchax and jax, which are not installed. On a TPU machine: "
            "pip install 'fivetune[tpu]' 'jax[tpu]'. Elsewhere use device auto."
        )
    import jax

    try:
        found = jax.default_backend()
    except RuntimeError as error:
        raise FiveTuneEnvironmentError(f"device: tpu cannot start: {str(error).splitlines()[0]}. Use auto.") from None
    if found != "tpu" and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise FiveTuneEnvironmentError(
            f"device: tpu is not available, jax finds {found}. Use auto, install jax[tpu] on a TPU machine, or set "
            "JAX_PLATFORMS=cpu to try it on virtual devices."
        )
    return jax.device_count()


def pick_precision(requested: str, device: str) -> str:
    """Pick fp32, bf16 or fp16; `auto` is bf16 if the device supports it natively, else fp32."""
    if requested == "auto" and device == "tpu":
        return "fp32" if os.environ.get("JAX_PLATFORMS") == "cpu" else "bf16"
    native = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    if requested == "auto":
        return "bf16" if native else "fp32"
    if requested == "fp16" and device == "mps":
        raise ConfigError("train.precision: fp16 is not supported on mps. Use auto.")
    return requested


def count_cores() -> int:
    """Physical cores that this process may use; OMP_NUM_THREADS overrides it."""
    if os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, int(os.environ["OMP_NUM_THREADS"]))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def find_peak_flops(name: str, precision: str) -> float | None:
    """Find the peak dense operations per second of a device; None if unknown.

    The words of the name, without vendor and memory size, must match PEAK_TERAFLOPS exactly: a laptop version, a MIG
    instance or another form factor is another device.

    Args:
        name: the driver's name of the device.
        precision: fp32, fp16 or bf16.

    >>> find_peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), find_peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    (312000000000000.0, 989400000000000.0)
    >>> find_peak_flops("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "bf16"), find_peak_flops("Tesla T4", "bf16")
    (None, None)
    """
    words = [
        word for word in re.split(r"[\s-]+", name.upper()) if word not in VENDORS and not MEMORY_SIZE.fullmatch(word)
    ]
    peaks = PEAK_TERAFLOPS.get(" ".join(words))
    peak = peaks[("fp32", "fp16", "bf16").index(precision)] if peaks else None
    return None if peak is None else peak * 1e12


def get_device_peak_flops(device: str, precision: str) -> float | None:
    """`find_peak_flops` of a torch device; None for devices other than CUDA."""
    return find_peak_flops(torch.cuda.get_device_name(device), precision) if device.startswith("cuda") else None


def get_peak_memory_bytes(device: str) -> int | None:
    """Peak memory so far: allocated on a CUDA device, resident for a CPU process."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    if (status := Path("/proc/self/status")).is_file():  # ru_maxrss of a child begins with its parent's peak
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: str) -> None:
    """Reset the peak of a CUDA device; the peak of a CPU process cannot be reset."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def translate_oom_errors() -> Iterator[None]:
    """Turn a failed allocation on any device into a FiveTuneEnvironmentError that names the settings to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise FiveTuneEnvironmentError(
            f"device: out of memory: {(str(error) or 'no details').splitlines()[0]} "
            "Lower train.batch_size (keep train.global_batch_size: the result stays the same), "
            "data.max_input_tokens, or eval.batch_size if it happened in an evaluation."
        ) from None


def collect_machine_info(device: str) -> JsonTable:
    """Device, host, versions and commit, for machine.json."""
    return {
        "device": _describe_device(device),
        "host": {
            "cpu": _read_cpu_name(),
            "num_cores": count_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "os": platform.platform(terse=True),
        },
        "versions": {"python": platform.python_version(), **_collect_versions()},
        "git": _read_git_state(),
    }


def _describe_device(device: str) -> JsonTable:
    if not device.startswith("cuda"):
        return {"kind": device, "name": _read_cpu_name() if device == "cpu" else None, "memory_bytes": None}
    facts = torch.cuda.get_device_properties(device)
    return {"kind": "cuda", "name": facts.name, "memory_bytes": facts.total_memory}


def _read_cpu_name() -> str | None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _collect_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in ("fivetune", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _read_git_state() -> JsonTable:
    """Commit of the sources and whether they have changes; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
