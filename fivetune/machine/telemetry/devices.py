"""Choice of the device and the precision, and facts about the machine; unknown facts are None, never a guess."""

from __future__ import annotations

import math
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch

from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.installation import name_install
from fivetune.machine.telemetry.accelerators import find_peak_flops
from fivetune.machine.telemetry.cores import count_cores
from fivetune.types import JsonTable

CPU_INFO = Path("/proc/cpuinfo")
BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "bf16": "BF16"}  # by their flag on Linux
TF32_CAPABILITY = (8, 0)  # of A100
PRODUCT_BYTES = 2 * 2**30  # free memory for the measured product, whose matrices take half of it in fp32
PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "datasets", "torchax", "jax")


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
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[kind]
    if int(index or 0) >= present:
        devices = f"{present or 'no'} {kind.upper()} device"
        if present != 1:
            devices += "s"
        raise FiveTuneEnvironmentError(
            f"device: {requested} is not available, this machine has {devices}. Use auto or cpu."
        )
    return requested


def count_tpu_chips() -> int:
    """Count the TPU chips that jax finds; virtual CPU devices stand in for them if JAX_PLATFORMS is cpu.

    Raises FiveTuneEnvironmentError without chips, or without the packages.
    """
    if find_spec("jax") is None or find_spec("torchax") is None:
        raise FiveTuneEnvironmentError(
            "device: tpu needs torchax and jax, which are not installed. On a TPU machine: "
            f"{name_install('tpu')} 'jax[tpu]'. Elsewhere use device auto."
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


def set_fp32_products(precision: str) -> None:
    """Let CUDA multiply fp32 matrices in tf32 (10 bits of the mantissa), or exactly in other precisions.

    This function of torch alone keeps its older and its newer settings in step; where they differ, reading the older
    ones raises.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


@contextmanager
def restore_fp32_products() -> Iterator[None]:
    """Restore torch's settings of fp32 products after the block."""
    backends: Any = torch.backends
    products = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [one.fp32_precision for one in products]
    older = None
    with suppress(RuntimeError):  # the user has set the newer ones alone
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(older or "highest")
        for one, precision in zip(products, before, strict=True):
            one.fp32_precision = precision


def pick_precision(requested: str, device: str) -> str:
    """Pick fp32, tf32, bf16 or fp16; `auto` is bf16 if the device supports it natively, else fp32.

    tf32 and bf16 become fp32 where `explain_replaced_precision` says why. On a CPU, `auto` is decided by a measurement
    later.
    """
    if requested == "auto" and device == "tpu":
        return "fp32" if os.environ.get("JAX_PLATFORMS") == "cpu" else "bf16"
    native = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False)
    if requested == "auto":
        return "bf16" if native else "fp32"
    if requested == "fp16" and device == "mps":
        raise ConfigError("train.precision: fp16 is not supported on mps. Use auto.")
    return "fp32" if explain_replaced_precision(requested, device) else requested


def decide_precision(requested: str, device: str, resumed: str | None = None) -> tuple[str, str]:
    """Resolve train.precision to fp32, tf32, bf16 or fp16; `auto` keeps that of a resumed run where the device has it.

    Returns: the precision, and the reason of a kept or replaced one, "" if it needs none.
    """
    if requested != "auto" or not resumed:
        return pick_precision(requested, device), explain_replaced_precision(requested, device)
    replaced = explain_replaced_precision(resumed, device)
    if resumed == "fp16" and device == "mps":
        replaced = "fp32 is used instead, because fp16 is not supported on mps"
    if replaced:
        return "fp32", f"the run began in {resumed}; {replaced}"
    is_slow = device == "cpu" and resumed == "bf16" and not find_bf16_units()
    why = "; this CPU has no units for it and computes it slower" if is_slow else ""
    return resumed, f"as the run began{why}"


def explain_replaced_precision(requested: str, device: str) -> str:
    """Explain why a device computes in fp32 although tf32 or bf16 is requested; empty if it does not."""
    if requested == "tf32" and not (
        device.startswith("cuda") and torch.cuda.get_device_capability() >= TF32_CAPABILITY
    ):
        return "train.precision tf32: fp32 is used instead, because only NVIDIA GPUs from A100 on have units for tf32"
    if requested != "bf16":
        return ""
    if device == "mps":
        return "train.precision bf16: fp32 is used instead, because bf16 is not tested on mps"
    if device.startswith("cuda") and not torch.cuda.is_bf16_supported(including_emulation=False):
        return (
            "train.precision bf16: fp32 is used instead, because this GPU has no units for bf16 and emulates it slowly"
        )
    return ""


def find_bf16_units() -> str:
    """Name the CPU's units for products of bf16 matrices: AMX, AVX512-BF16 or BF16 (ARM); empty without any."""
    flags = read_cpu_info("flags", "Features").split()
    for flag, name in BF16_UNITS.items():
        if flag in flags:
            return name
    return ""


def read_cpu_info(*names: str) -> str:
    """Read the first value of one of these names in /proc/cpuinfo: of the first processor, all of which are alike.

    "" on systems without the file or the name.
    """
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""


def get_device_peak_flops(device: str, precision: str) -> float | None:
    """`find_peak_flops` of a torch device; None for devices other than CUDA."""
    if not device.startswith("cuda"):
        return None
    return find_peak_flops(torch.cuda.get_device_name(device), precision)


def measure_product_flops(device: str, precision: str) -> float | None:
    """Operations per second of the fastest of ten large matrix products: what a device reaches of its peak.

    tf32 is measured where `set_fp32_products` has allowed it. None where less than PRODUCT_BYTES of memory are free.
    """
    on_cuda = device.startswith("cuda")
    if on_cuda and torch.cuda.mem_get_info(device)[0] < PRODUCT_BYTES:
        return None
    size = 8192 if on_cuda else 2048
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    own = torch.Generator(device).manual_seed(0)  # the run's would give a resumed run other dropout masks
    a = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    b = torch.randn(size, size, device=device, dtype=dtype, generator=own)
    product = torch.empty_like(a)
    best = math.inf
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(a, b, out=product)
        if on_cuda:
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


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


def collect_machine_info(device: str, packages: Sequence[str] = ()) -> JsonTable:
    """Device, host, versions (of `packages` too) and commit, for machine.json."""
    cpu = read_cpu_info("model name") or platform.processor() or None
    described: JsonTable = {"kind": device, "name": cpu if device == "cpu" else None, "memory_bytes": None}
    if device.startswith("cuda"):
        facts = torch.cuda.get_device_properties(device)
        described = {"kind": "cuda", "name": facts.name, "memory_bytes": facts.total_memory}
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("fivetune", *PACKAGES, *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "device": described,
        "host": {
            "cpu": cpu,
            "num_cores": count_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "os": platform.platform(terse=True),
        },
        "versions": versions,
        "git": _read_git_state(),
    }


def _read_git_state() -> JsonTable:
    """Commit of the sources and whether they have changes; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10).stdout

    try:
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}
