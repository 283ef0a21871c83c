"""Rules about speed and memory: time that is not computing, memory that is full or unused.

In: RunStats. Out: a Verdict with the predicted gain, or None if nothing is wrong or data is missing.
Gains are speed-ups of the steps; for rules about interruptions, of steps and interruptions together.
"""

from __future__ import annotations

import math
from typing import Any

from fivetune.reading.diagnosis.faults import describe_left_out
from fivetune.reading.diagnosis.stats import RunStats, format_share
from fivetune.types import Verdict

MIN_TIME_SHARE = 0.10
"""Share of the time from which on a change pays: without it the run is 1.1 times as fast. The input analysis of
TensorFlow's profiler calls a step moderately input-bound from 5 %, highly input-bound from 20 % on."""

HOST_SHARE = 0.20
"""Share of a step above which it is host-bound: starting the step, checking values and writing the record take a
millisecond or two, a tenth of a tiny model's step and negligible for a real one."""

FIXED_SHARE = 0.5
"""Fixed cost share, of the passes' time and of the steps' time, above which launching kernels takes longer than running
them."""

LOW_UTILISATION = 0.7
"""Mean utilisation below which a device waits too much. NVML counts time in which any kernel runs, however small: a
published run of mT5 whose kernels filled 82 % of the time shows 91 %."""

MEMORY_BUSY = 0.85
"""Share of the time in which memory is read or written. Published logs of T5 training in fp32 have 0.6 to 0.73 on a
device that is busy 95 % of the time; with a known, low mfu MEMORY_BUSY_LOW_MFU is the threshold."""
MEMORY_BUSY_LOW_MFU = 0.6
LOW_MFU = 0.2
"""Published T5 training reaches 0.24 to 0.36 of the peak (docs/diagnose.md): below this, computing is not the limit."""

EVALUATION_SHARE = 0.25
"""Share of the time between the first and the last step. Evaluations choose the best checkpoint, so they may cost more
than MIN_TIME_SHARE; a quarter makes the training a third longer."""

CHECKPOINT_SHARE = 0.10
TARGET_SHARE = 0.05
"""Share after the suggested change; TensorFlow's profiler reports no bottleneck below it."""

OTHER_LOAD_SHARE = 0.2
"""Share of a host's cores used by other programs: a fifth of the machine distorts every time."""
OWN_CORES_SHARE = 0.7
"""Busy cores of the run per compute thread, below which threads wait for cores. A healthy CPU run reaches 0.9."""

FULL_MEMORY_SHARE = 0.92
"""Share of a device's memory in tensors, above which a longer batch may not fit: gaps between tensors are partly
unusable, and driver and libraries take about half a GiB."""
FULL_DRIVER_SHARE = 0.98
"""The same threshold for the driver's count, which includes unused memory of the allocator."""
LOW_MEMORY_SHARE = 0.5
"""Share of a device's memory below which twice the batch fits, because not all memory grows with the batch."""
USABLE_MEMORY_SHARE = 0.9


def compute_confidence(figure: float, threshold: float) -> float:
    """Compute the confidence (0-1) in a share above its threshold: 0.6 at the threshold, 0.95 from twice of it on.

    >>> [round(compute_confidence(figure, 0.1), 3) for figure in (0.1, 0.15, 0.2, 0.9)]
    [0.6, 0.775, 0.95, 0.95]
    """
    return min(0.95, 0.6 + 0.35 * (figure - threshold) / threshold)


def _build_verdict(
    rule: str, message: str, share: float | None, threshold: float, advice: str, *, confidence: float = 0.0, **more: Any
) -> Verdict:
    """Build the verdict on a share; its confidence follows from the threshold, unless it is given."""
    sure = confidence or compute_confidence(share or 0.0, threshold)
    return Verdict(rule, message, figure=share, threshold=threshold, confidence=sure, advice=advice, **more)


# --- the steps ---


def check_input_bound(stats: RunStats) -> Verdict | None:
    """Steps wait for their batches."""
    times = stats.times
    if times is None or times.shares["data"] < MIN_TIME_SHARE:
        return None
    share = min(times.shares["data"], 0.99)
    change: dict[str, Any] = {}
    gain = 1 / (1 - share)
    # On a CPU, a compute thread less leaves a core for the assembly of batches, if that pays.
    threads = stats.num_threads or 1
    slower = threads / max(1, threads - 1)
    if stats.device_kind == "cpu" and threads > 1 and (1 - share) * slower < 1:
        change["train.num_threads"] = threads - 1
        gain = 1 / ((1 - share) * slower)
    return _build_verdict(
        "input_bound",
        f"{format_share(share)} of the steps' time waits for the batch "
        f"({1000 * share * times.step_seconds:.0f} ms of "
        f"{1000 * times.step_seconds:.0f} ms); {format_share(times.starved)} of the steps wait.",
        share,
        MIN_TIME_SHARE,
        "Keep the tokenised data (data.cache_dir) on a fast local disk, and check what else uses the processor: "
        "a thread assembles batches beside the training.",
        change=change,
        gain=gain,
    )


def check_host_bound(stats: RunStats) -> Verdict | None:
    """Work of the host between batches and passes takes a considerable part of every step."""
    times = stats.times
    if times is None or (times.host or 0) < HOST_SHARE:
        return None
    share = min(times.host or 0, 0.99)
    return _build_verdict(
        "host_bound",
        f"{format_share(share)} of the steps' time is work of the host between batches and passes "
        f"({1000 * share * times.step_seconds:.0f} ms of {1000 * times.step_seconds:.0f} ms).",
        share,
        HOST_SHARE,
        "Find the cause with fivetune profile: a tracker, a hook, a call that synchronises the device or "
        "empties its cache in every step.",
        change={"report.sinks": []} if stats.get_setting("report.sinks") else {},
        gain=1 / (1 - share),
    )


def check_launch_bound(stats: RunStats) -> Verdict | None:
    """Forward passes have so few tokens that launching kernels costs more than computing."""
    times = stats.times
    if times is None or times.fixed_cost_share is None or times.fixed_cost_share[0] < FIXED_SHARE:
        return None
    fixed = (times.fixed_step_share or 0.0) + (0.0 if stats.accumulates else times.shares.get("optimizer", 0.0))
    change, factor = suggest_larger_batch(stats)
    if not change or fixed < FIXED_SHARE:
        return None
    gain = 1 / (1 - fixed * (1 - 1 / factor))
    other = "" if stats.accumulates else " This changes the training: more examples per update, so fewer updates."
    return _build_verdict(
        "launch_bound",
        f"{format_share(fixed)} of the steps' time does not depend on the number of tokens: "
        f"{stats.tokens_per_pass or 0:.0f} tokens per forward pass are too few.",
        fixed,
        FIXED_SHARE,
        f"Give each forward pass more examples.{other}",
        confidence=compute_confidence(times.fixed_cost_share[0], FIXED_SHARE),
        change=change,
        gain=gain,
    )


def is_fixed_cost_known(stats: RunStats) -> bool:
    """Whether the fixed cost share is known well enough to compare it with FIXED_SHARE."""
    found = stats.times.fixed_cost_share if stats.times else None
    return found is not None and (found[0] >= FIXED_SHARE or found[2] < FIXED_SHARE)


def check_waiting_device(stats: RunStats) -> Verdict | None:
    """The device is often idle, but not for lack of data: the host launches too slowly, or the cause is unknown."""
    times = stats.times
    busy = [device.utilisation for device in stats.devices if device.is_busy and device.utilisation is not None]
    if not busy:
        return None
    # Waiting that has a name is the business of another rule.
    if times is not None and times.shares["data"] + (times.host or 0) + (times.exchange or 0) > MIN_TIME_SHARE:
        return None
    share = sum(busy) / len(busy)
    if share >= LOW_UTILISATION:
        return None
    # Nothing tells what the machine did in another tool's log.
    span = "of the time" if stats.is_log else "of the time while training"
    busy_share = f"The device is busy {format_share(share)} {span}{describe_left_out(stats)}"
    if times is None:
        return _build_verdict(
            "host_bound",
            f"{busy_share}; it waits for an unknown reason.",
            share,
            LOW_UTILISATION,
            "Record the times of the steps: data, host, forward and backward show what the device waits for.",
            confidence=0.5,
        )
    return _build_verdict(
        "host_bound",
        f"{busy_share}; it waits not for data: the host does not launch kernels fast enough.",
        share,
        LOW_UTILISATION,
        "Increase the examples per forward pass (train.batch_size), and use the flat forward.",
        confidence=0.8,
        change=suggest_larger_batch(stats)[0] if stats.accumulates else {},
        gain=1 / share,
    )


def check_padding_bound(stats: RunStats) -> Verdict | None:
    """Computing padding takes a considerable part of the time."""
    times = stats.times
    if times is None or stats.forward == "flat":
        return None
    wasted = times.padding * max(0.0, times.compute_share - (times.fixed_step_share or 0.0))
    if wasted < MIN_TIME_SHARE:
        return None
    if stats.get_setting("train.forward") != "auto" and stats.get_setting("strategy.name") != "fsdp":
        change: dict[str, Any] = {"train.forward": "flat"}  # auto chooses it where it runs and is faster
    else:
        change = {"data.bucket_pool": max(8, 4 * (stats.get_setting("data.bucket_pool") or 1))}
    return _build_verdict(
        "padding_bound",
        f"{format_share(times.padding)} of the computed positions are padding; they take "
        f"{format_share(wasted)} of the steps' time.",
        wasted,
        MIN_TIME_SHARE,
        "Compute tokens only (train.forward: flat). Batches of similar lengths (data.bucket_pool) still pad: "
        "their gain is below the predicted one.",
        change=change,
        gain=1 / (1 - wasted),
    )


def check_communication_bound(stats: RunStats) -> Verdict | None:
    """Steps wait for the all-reduce of gradients."""
    times = stats.times
    if times is None or (times.exchange or 0) < MIN_TIME_SHARE:
        return None
    share = min(times.exchange or 0, 0.99)
    return _build_verdict(
        "communication_bound",
        f"{format_share(share)} of the steps' time is the all-reduce of gradients between "
        f"{stats.world_size} processes.",
        share,
        MIN_TIME_SHARE,
        "Reduce gradients less often (a larger train.global_batch_size), or over a faster link.",
        gain=1 / (1 - share),
    )


# --- the device ---


def check_memory_bandwidth_bound(stats: RunStats) -> Verdict | None:
    """Memory traffic of the device, not computing, limits the speed."""
    low_mfu = stats.mfu is not None and stats.mfu < LOW_MFU
    threshold = MEMORY_BUSY_LOW_MFU if low_mfu else MEMORY_BUSY
    busy = [d for d in stats.devices if d.is_busy and d.memory_busy is not None and d.utilisation is not None]
    if not busy or (stats.mfu or 0) >= LOW_MFU or min(d.utilisation or 0 for d in busy) < LOW_UTILISATION:
        return None
    share = sum(device.memory_busy or 0 for device in busy) / len(busy)
    if share < threshold:
        return None
    halved = stats.precision == "fp32" and stats.device_kind == "cuda"
    known = f", and the computing reaches {format_share(stats.mfu)} of the peak" if stats.mfu is not None else ""
    return _build_verdict(
        "memory_bandwidth_bound",
        f"The device reads or writes its memory {format_share(share)} of the time{known}.",
        share,
        threshold,
        "16-bit values halve the traffic."
        if halved
        else "Use fewer passes over memory: fused kernels (the flat forward on CUDA), a fused optimizer.",
        confidence=0.8 if low_mfu else 0.6,
        change={"train.precision": "bf16"} if halved else {},
        gain=1 / (1 - share / 2) if halved else None,
    )


def check_throttled(stats: RunStats) -> Verdict | None:
    """Heat or the power supply lowered the clock of a device."""
    held = [device for device in stats.devices if device.is_busy and (device.throttled_share or 0) >= MIN_TIME_SHARE]
    if not held:
        return None
    worst = max(held, key=lambda device: device.throttled_share or 0)
    share, lost = worst.throttled_share or 0.0, worst.clock_loss
    clocks = "" if lost is None else f"; the clock was then {format_share(lost)} below its maximum"
    return _build_verdict(
        "throttled",
        f"The clock of device {worst.index} was throttled {format_share(share)} of the time "
        f"({', '.join(worst.reasons)}){clocks}.",
        share,
        MIN_TIME_SHARE,
        "Check the cooling and the power supply of the machine. Do not compare these times with other runs.",
        confidence=0.9,
        gain=1 / (1 - share * lost) if lost else None,
    )


def check_shared_cores(stats: RunStats) -> Verdict | None:
    """Other programs take the cores that the compute threads of a CPU run need."""
    load, threads = stats.host_load, stats.num_threads
    if load is None or not threads or stats.device_kind != "cpu":
        return None
    wanted = min(threads * (stats.world_size or 1), load.num_cores)
    share = load.own_cores / wanted
    if share >= OWN_CORES_SHARE or load.other_cores < OTHER_LOAD_SHARE * load.num_cores:
        return None
    unit = "thread" if wanted == 1 else "threads"
    fewer = max(1, round(load.own_cores / (stats.world_size or 1)))
    return _build_verdict(
        "shared_cores",
        f"The run got {load.own_cores:.2g} cores for {wanted} compute {unit}, while other programs used "
        f"{load.other_cores:.2g} of the {load.num_cores} cores: this distorts its times.",
        share,
        OWN_CORES_SHARE,
        "Stop the other programs, or use fewer threads: threads that wait for each other on busy cores can be "
        "many times slower than one. Its speed is not judged: do not compare these times with other runs.",
        confidence=compute_confidence(1 - share, 1 - OWN_CORES_SHARE),
        change={"train.num_threads": fewer} if fewer < threads else {},
    )


# --- interruptions ---


def check_evaluation_bound(stats: RunStats) -> Verdict | None:
    """Evaluations during training take a considerable part of the run."""
    found = stats.evaluations
    if found is None or found.share < EVALUATION_SHARE:
        return None
    kept = TARGET_SHARE / found.share
    fewer = math.ceil(stats.evals[-1].num_examples * kept) if stats.evals else 0
    rarer = math.ceil(found.every_steps / kept)
    change = {"eval.max_examples": fewer} if fewer >= 100 else {"eval.every_steps": rarer}
    return _build_verdict(
        "evaluation_bound",
        f"{format_share(found.share)} of the time between the first and the last step is evaluation: "
        f"{found.seconds:.1f} s every {found.every_steps:,} steps.",
        found.share,
        EVALUATION_SHARE,
        "Evaluate fewer examples, or less often; the exported weights are evaluated on all of them anyway.",
        change=change,
        gain=1 / (1 - found.share * (1 - kept)),
    )


def check_checkpoint_bound(stats: RunStats) -> Verdict | None:
    """Checkpoints during training take a considerable part of the run."""
    found = stats.checkpoints
    if found is None or found.share < CHECKPOINT_SHARE:
        return None
    kept = TARGET_SHARE / found.share
    return _build_verdict(
        "checkpoint_bound",
        f"{format_share(found.share)} of the time between the first and the last step is saving checkpoints: "
        f"{found.seconds:.2f} s every {found.every_steps:,} steps.",
        found.share,
        CHECKPOINT_SHARE,
        "Save less often, or on a faster disk. A crash then costs the time since the last checkpoint.",
        change={"checkpoint.every_steps": math.ceil(found.every_steps / kept)},
        gain=1 / (1 - found.share * (1 - kept)),
    )


# --- memory ---


def check_memory_full(stats: RunStats) -> Verdict | None:
    """Memory ran out, or a longer batch may not fit."""
    share, threshold = compute_memory_share(stats)
    lowered = stats.batch_size_now
    if lowered is None and (share is None or share < threshold):
        return None
    size = stats.get_setting("train.batch_size")
    smaller = lowered
    message = f"Memory ran out with {size} examples per forward pass; later steps use {lowered}."
    if not lowered:
        fitting = [n for n in _list_batch_sizes(stats) if isinstance(size, int) and n < size]
        smaller = max(fitting, default=None)
        message = f"{format_share(share or 0)} of the memory was in use; a longer batch may not fit."
    return _build_verdict(
        "memory_full",
        message,
        share,
        threshold,
        "Fewer examples per forward pass with the same train.global_batch_size give the same result; "
        "train.recompute also needs less memory.",
        confidence=1.0 if lowered else 0.8,
        change={"train.batch_size": smaller, "train.global_batch_size": stats.examples_per_step} if smaller else {},
    )


def check_memory_empty(stats: RunStats) -> Verdict | None:
    """An update takes several small forward passes, although a larger one fits."""
    share, _ = compute_memory_share(stats)
    if share is None or share >= LOW_MEMORY_SHARE or stats.device_kind == "cpu" or not stats.accumulates:
        return None
    change, factor = suggest_larger_batch(stats)
    if not change:
        return None
    fixed = stats.times.fixed_step_share if stats.times else None
    return _build_verdict(
        "memory_empty",
        f"{format_share(share)} of the memory was in use, while an update of {stats.examples_per_step} "
        f"examples took passes of {stats.get_setting('train.batch_size')}.",
        share,
        LOW_MEMORY_SHARE,
        "Larger passes give the same result with fewer launches.",
        confidence=0.6,
        change=change,
        gain=1 / (1 - fixed * (1 - 1 / factor)) if fixed else None,
    )


def compute_memory_share(stats: RunStats) -> tuple[float | None, float]:
    """Return peak memory (0-1) and the threshold of full memory, by the run's own count, else by the driver's."""
    if stats.peak_bytes and stats.memory_bytes:
        return stats.peak_bytes / stats.memory_bytes, FULL_MEMORY_SHARE
    shares = [device.memory_share for device in stats.devices if device.memory_share is not None]
    return max(shares, default=None), FULL_DRIVER_SHARE


def suggest_larger_batch(stats: RunStats) -> tuple[dict[str, Any], float]:
    """Suggest the largest micro-batch that divides an update and fits into memory, with its factor; else ({}, 1.0).

    If an update is a single pass, suggest four times the batch, which changes the training. All memory is assumed to
    grow with the batch, an upper bound, because weights and optimizer states do not.
    """
    size = stats.get_setting("train.batch_size")
    total = stats.examples_per_step
    share, _ = compute_memory_share(stats)
    if not isinstance(size, int) or not total:
        return {}, 1.0
    most = size * USABLE_MEMORY_SHARE / share if share else math.inf
    if stats.accumulates:
        fitting = [n for n in _list_batch_sizes(stats) if size < n <= most]
        if not fitting:
            return {}, 1.0
        return {"train.batch_size": fitting[-1]}, fitting[-1] / size
    if 4 * size > most:
        return {}, 1.0
    return {"train.batch_size": 4 * size, "train.global_batch_size": 4 * total}, 4.0


def _list_batch_sizes(stats: RunStats) -> list[int]:
    """List the micro-batch sizes that divide a device's part of an update, ascending."""
    own = (stats.examples_per_step or 0) // (stats.world_size or 1)
    return [n for n in range(1, own + 1) if own % n == 0]


def describe_time_use(stats: RunStats) -> str:
    """Describe the use of time in a run without a verdict on speed; "compute-bound" only if that is known."""
    busy = [device.utilisation for device in stats.devices if device.is_busy and device.utilisation is not None]
    fixed = stats.times.fixed_cost_share if stats.times else None
    parts: list[str] = []
    if stats.times is not None:
        parts.append(f"forward and backward take {format_share(stats.times.compute_share)} of a step")
    if busy:
        parts.append(f"the device is busy {format_share(busy[0])} of the time{describe_left_out(stats)}")
    if stats.mfu is not None:
        parts.append(f"the computing reaches {format_share(stats.mfu)} of the peak")
    if not parts:
        return "unknown"
    if not is_fixed_cost_known(stats):
        return f"{', '.join(parts)}; the shares of computing and of launching kernels are unknown"
    if fixed and fixed[0] >= FIXED_SHARE:
        parts.append(f"{format_share(fixed[1])} of forward and backward do not depend on the number of tokens")
        return ", ".join(parts)
    return f"compute-bound, as it should be: {', '.join(parts)}"
