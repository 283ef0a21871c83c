"""Checks of a machine before any run: packages, devices, memory, disk, hub, and the speed of a real training step.

In: the folder of runs, a device. Out: Checks, as `preflight` has them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from fivetune.config import load_config
from fivetune.data.corpus import CHECKPOINT
from fivetune.data.store.token_store import get_cache_folder
from fivetune.errors import FiveTuneEnvironmentError, format_size, translate_oom_errors
from fivetune.installation import list_extras, name_install
from fivetune.machine.telemetry.accelerators import describe_accelerator
from fivetune.machine.telemetry.cores import count_cores
from fivetune.machine.telemetry.devices import (
    collect_machine_info,
    find_bf16_units,
    pick_device,
    read_cpu_info,
)
from fivetune.machine.telemetry.limits import get_host_memory
from fivetune.machine.telemetry.nvml import Nvml
from fivetune.model.flops import count_train_flops
from fivetune.model.shapes import KNOWN_SHAPES, build_model_config
from fivetune.redaction import hide_tokens
from fivetune.rundir.files import lock_file
from fivetune.rundir.progress import format_time_span
from fivetune.training.autotune.probe import synchronize
from fivetune.training.checks.data_checks import Outcome
from fivetune.training.checks.preflight import Check, find_existing_parent
from fivetune.training.setup import Setup, set_up
from fivetune.training.step.update import train_step

SMALL_MEMORY, SMALL_DISK = 4 * 2**30, 10 * 2**30
WRITTEN_BYTES = 32 * 2**20
CHECKPOINT_BYTES = 12  # per weight: fp32 and both moments of AdamW
HUB_SECONDS = 5.0
EXTRAS_OF_DEVELOPERS = ("test", "bench", "docs", "release")
VECTOR_FLAGS = {"avx2": "AVX2", "avx512f": "AVX-512", "amx_tile": "AMX", "asimd": "NEON", "sve": "SVE"}
PROBED, LARGER = "t5-small", "t5-base"
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
INPUT_TOKENS, BATCH_SIZE = 175, 8  # SQuAD's mean length
NUM_EXAMPLES_TOLD = 10_000


def run_machine_checks(folder: Path, *, device: str, seconds: float) -> Iterator[Check]:
    """Yield a check of everything that a run needs from the machine.

    Args:
        folder: where runs will be written.
        device: device as in a recipe.
        seconds: length of the speed test; 0 leaves it out.
    """
    checks: dict[str, Callable[[], Outcome]] = {
        "packages": _check_packages,
        "extras": _check_extras,
        "processor": _check_processor,
        "device": partial(_check_device, device),
        "memory": _check_memory,
        "disk": partial(_check_disk, folder),
        "data cache": partial(_check_disk, get_cache_folder(None)),
        "hub": _check_hub,
    }
    if seconds:
        checks["speed"] = partial(_check_speed, device, seconds)
    for name, check in checks.items():
        yield Check.run(name, check)


def _check_packages() -> Outcome:
    versions = collect_machine_info("cpu")["versions"]
    return "pass", ", ".join(f"{name} {number}" for name, number in versions.items() if number)


def _check_extras() -> Outcome:
    """Name the extras of which all packages are installed, and the others."""
    packages = {extra: names for extra, names in list_extras().items() if extra not in EXTRAS_OF_DEVELOPERS}
    if not packages:
        return "pass", "not installed as a package: extras unknown"
    there = [extra for extra, names in packages.items() if all(map(_is_installed, names))]
    missing = [extra for extra in packages if extra not in there]
    text = f"installed: {', '.join(there) or 'none'}"
    if missing:
        text += f"; not: {', '.join(missing)} (such as: {name_install(missing[0])})"
    return "pass", text


def _is_installed(requirement: str) -> bool:
    try:
        metadata.version(re.split(r"[^\w.-]", requirement)[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def _check_processor() -> Outcome:
    facts = [collect_machine_info("cpu")["host"]["cpu"] or "unknown processor", f"{count_cores()} cores for computing"]
    flags = read_cpu_info("flags").split()
    facts += [name for flag, name in VECTOR_FLAGS.items() if flag in flags]
    units = find_bf16_units()
    facts.append(f"bf16 units ({units})" if units else "no bf16 units")
    return "pass", ", ".join(facts)


def _check_device(requested: str) -> Outcome:
    """Name the device that is taken, and the GPUs that torch does not see."""
    chosen = pick_device(requested)
    # NVML is the driver's: it finds GPUs that a torch without CUDA, or for another driver, does not.
    nvml = Nvml()
    found = [device.name for device in nvml.sample() if device.name]
    nvml.close()
    if found and not torch.cuda.is_available():
        return "warn", (
            f"{chosen}: the driver finds {', '.join(found)}, and torch {torch.__version__} cannot use it. Install a "
            "build of torch with CUDA for this driver: https://pytorch.org/get-started"
        )
    if not torch.cuda.is_available():
        return "pass", f"{chosen}; torch sees no GPU"
    if not chosen.startswith("cuda"):
        return "pass", chosen
    names: list[str] = []
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        facts = describe_accelerator(device.name, device.total_memory // 2**20)
        sheet = f"; by its data sheet {facts}" if facts else "; not in the tables of devices, so its peaks are unknown"
        names.append(f"{device.name} ({format_size(device.total_memory)}{sheet})")
    return "pass", f"{chosen}: {', '.join(names)}, CUDA {torch.version.cuda}"


def _check_memory() -> Outcome:
    total, free = get_host_memory()
    text = f"{format_size(free)} free of {format_size(total)}"
    if free < SMALL_MEMORY:
        return "warn", f"{text}: training {PROBED} takes about 3 GiB. Close other programs"
    return "pass", text


def _check_disk(folder: Path) -> Outcome:
    """Write, sync, lock and remove a file in a folder, or in the next one above that exists."""
    try:
        folder = find_existing_parent(folder)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".fivetune-doctor-") as file:
            started = time.perf_counter()
            file.write(os.urandom(2**20) * (WRITTEN_BYTES // 2**20))  # a file system may compress other bytes
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / (time.perf_counter() - started)
            lock_file(file)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise FiveTuneEnvironmentError(
            f"{folder}: {error.strerror or error}. Runs need a folder that can be written, synced and locked: choose "
            "another one with run.dir and data.cache_dir."
        ) from None
    text = f"{folder}: {format_size(free)} free, written at {format_size(int(speed))}/s"
    if free < SMALL_DISK:
        size = format_size(CHECKPOINT_BYTES * KNOWN_SHAPES[LARGER].num_weights)
        return "warn", f"{text}: a checkpoint of {LARGER} with AdamW takes {size}. Free space, or choose another folder"
    return "pass", text


def _check_hub() -> Outcome:
    from huggingface_hub import constants, get_token

    token = "a token is set" if get_token() else "no token is set, which gated and private models need"
    if constants.HF_HUB_OFFLINE:
        return "pass", f"not asked: HF_HUB_OFFLINE is set; {token}"
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    shown = hide_tokens(constants.ENDPOINT)
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return "pass", f"{shown} answers; {token}"
    except urllib.error.HTTPError as error:
        state = "pass" if error.code < 500 else "warn"  # a mirror may have no page at its root
        return state, f"{shown} answers with {error.code} {error.reason}; {token}"
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return "warn", (
            f"{shown} cannot be reached ({reason}): models and data sets come from local folders only. "
            "Set HTTPS_PROXY or HF_ENDPOINT, or HF_HUB_OFFLINE=1 to skip the attempts"
        )


def _check_speed(device: str, seconds: float) -> Outcome:
    """Train the shape of t5-small with random weights; what a larger model reaches follows from its operations."""
    with tempfile.TemporaryDirectory(prefix="fivetune-doctor-") as folder:
        setup = _set_up_probe(Path(folder), device)
        with translate_oom_errors():
            num_examples, elapsed = _time_steps(setup, seconds)
    rate = num_examples / elapsed
    targets = [setup.data.stream.store.labels.lengths[0]]
    small = count_train_flops(KNOWN_SHAPES[PROBED], [INPUT_TOKENS], targets).total
    large = count_train_flops(KNOWN_SHAPES[LARGER], [INPUT_TOKENS], targets).total
    compute = setup.learner.compute
    threads = f", {torch.get_num_threads()} threads" if compute.kind == "cpu" else ""
    return "pass", (
        f"{PROBED} trains {rate:.3g} examples of {INPUT_TOKENS} tokens a second ({compute.precision} on {compute.name}"
        f"{threads}, {setup.learner.forward.kind} forward): {NUM_EXAMPLES_TOLD:,} examples in "
        f"{format_time_span(NUM_EXAMPLES_TOLD / rate)}; {LARGER}, by its operations, "
        f"{format_time_span(NUM_EXAMPLES_TOLD / rate * large / small)}"
    )


def _set_up_probe(folder: Path, device: str) -> Setup:
    # Without a download: the shape with random weights, and the tokenizer of the quickstart's model.
    model = {**build_model_config(KNOWN_SHAPES[PROBED], "t5"), **TOKENS}
    (folder / "config.json").write_text(json.dumps(model))
    line = json.dumps({"inputs": "the red hat of Ann is on the table. " * INPUT_TOKENS, "targets": "the red hat"})
    (folder / "lines.jsonl").write_text(f"{line}\n" * BATCH_SIZE)
    config = load_config(
        {
            "run": {"dir": str(folder / "run")},
            "model": {"config": str(folder), "tokenizer": str(CHECKPOINT), "init": "random"},
            "task": {"name": "jsonl"},
            "data": {
                "train": str(folder / "lines.jsonl"),
                "cache_dir": str(folder / "cache"),
                "max_input_tokens": INPUT_TOKENS,
            },
            "train": {"num_steps": 10**6, "batch_size": BATCH_SIZE},
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "device": device,
        }
    )
    return set_up(config)


def _time_steps(setup: Setup, seconds: float) -> tuple[int, float]:
    """Train for some seconds after one step; returns the number of examples and the time that they took."""
    learner = setup.learner
    learner.model.train()
    batches = setup.data.stream.build_micro_batches(0)
    device = learner.compute.device
    num_steps = 0
    started = 0.0
    while not num_steps or time.perf_counter() - started < seconds:
        train_step(learner, batches, lr=1e-3, step=num_steps)
        synchronize(device)
        if not started:  # the first step compiles and allocates
            started = time.perf_counter()
            continue
        num_steps += 1
    return num_steps * setup.config.train.examples_per_step, time.perf_counter() - started
