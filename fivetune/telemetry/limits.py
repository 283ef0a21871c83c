"""Rules about speed: what the time of a run goes into that is not computing, and what memory allows.

In: Evidence. Out: a Verdict with the predicted gain, or None where the time is well spent or not known.
A gain is that of a step where a rule is about steps, and of steps and pauses together where it is about pauses.
"""

from __future__ import annotations

import math
from typing import Any

from fivetune.telemetry.activity import Device
from fivetune.telemetry.evidence import Evidence, percent
from fivetune.types import Verdict

WORTH = 0.10
"""Share of the time from which on it is worth a change: without it the run is 1.1 times as fast. The input analysis of
TensorFlow's profiler calls a step moderately input-bound from 5 %, highly from 20 % on."""

HOST_SHARE = 0.20
"""Share of a step that the host may take for itself: starting the step, checking the values, writing the record is a
millisecond or two, which is a tenth of a tiny model's step and nothing of a real one's."""

FIXED_SHARE = 0.5
"""Share of the passes' time that is paid per pass, not per token: above it, more time goes into starting kernels than
into what they compute. It matters where as much of the steps' time is fixed."""

LOW_UTILISATION = 0.7
"""Mean utilisation of a device below which it stands idle often enough to matter. NVML counts a moment in which any
kernel runs, however small: a published run of mT5 whose kernels filled 82 % of the time showed 91 %."""

MEMORY_BUSY = 0.85
"""Share of the time in which memory is read or written. Published logs of T5 training in fp32 have 0.6 to 0.73 with the
device busy 95 % of the time, so this alone speaks late; with a known, low mfu it speaks from MEMORY_BUSY_LOW_MFU on."""
MEMORY_BUSY_LOW_MFU = 0.6
LOW_MFU = 0.2
"""Published T5 training reaches 0.24 to 0.36 of the peak (docs/diagnose.md): below this, computing is not the limit."""

EVALUATION_SHARE = 0.25
"""Share of the time between the first and the last step. Evaluations show the way, so they may cost more than WORTH; a
quarter makes the training a third longer."""

CHECKPOINT_SHARE = 0.10
LITTLE = 0.05
"""What pauses are brought down to: from here on the same profiler calls a share no limit."""

FULL = 0.92
"""Share of a device's memory in tensors. The allocator cannot use all that lies between them, and the driver and the
libraries take about half a GiB besides: a longer batch than any so far then fails."""
FULL_AS_SEEN = 0.98
"""The same by the driver's count, which holds what the allocator keeps without using it."""
EMPTY = 0.5
"""Share of a device's memory below which twice the batch fits: not all of it grows with the batch."""
FITS = 0.9


def sure(figure: float, threshold: float) -> float:
    """Confidence (0-1) in a share that is above its threshold: 0.6 there, 0.95 at twice of it.

    >>> [round(sure(figure, 0.1), 3) for figure in (0.1, 0.15, 0.2, 0.9)]
    [0.6, 0.775, 0.95, 0.95]
    """
    return min(0.95, 0.6 + 0.35 * (figure - threshold) / threshold)


# --- the steps ---


def input_bound(evidence: Evidence) -> Verdict | None:
    """Steps wait for their batch."""
    times = evidence.times
    if times is None or times.shares["data"] < WORTH:
        return None
    share = min(times.shares["data"], 0.99)
    change, gain = _spared_core(evidence, share)
    return Verdict(
        rule="input_bound",
        says=f"{percent(share)} of the steps' time waits for the batch ({1000 * share * times.step_seconds:.0f} ms of "
        f"{1000 * times.step_seconds:.0f} ms); {percent(times.starved)} of the steps had to wait.",
        figure=share, threshold=WORTH, confidence=sure(share, WORTH), change=change, gain=gain,
        advice="Keep the tokenised data (data.cache_dir) on a fast local disk, and look what else keeps the processor "
        "busy: batches are assembled beside the training.",
    )  # fmt: skip


def _spared_core(evidence: Evidence, share: float) -> tuple[dict[str, Any], float]:
    """On a CPU whose cores all compute, one left to the assembling of batches, where that pays; and the gain."""
    threads = evidence.num_threads or 1
    slower = threads / max(1, threads - 1)
    if evidence.device_kind != "cpu" or threads == 1 or (1 - share) * slower >= 1:
        return {}, 1 / (1 - share)
    return {"train.num_threads": threads - 1}, 1 / ((1 - share) * slower)


def host_bound(evidence: Evidence) -> Verdict | None:
    """Steps wait for work of the host between them."""
    times = evidence.times
    if times is None or (times.host or 0) < HOST_SHARE:
        return None
    share = min(times.host or 0, 0.99)
    return Verdict(
        rule="host_bound",
        says=f"{percent(share)} of the steps' time is work of the host between batches and passes "
        f"({1000 * share * times.step_seconds:.0f} ms of {1000 * times.step_seconds:.0f} ms).",
        figure=share, threshold=HOST_SHARE, confidence=sure(share, HOST_SHARE), gain=1 / (1 - share),
        change={"report.sinks": []} if evidence.setting("report.sinks") else {},
        advice="Find what runs in every step: a tracker, a hook, something that waits for the device or empties its "
        "memory. fivetune profile names it.",
    )  # fmt: skip


def launch_bound(evidence: Evidence) -> Verdict | None:
    """A forward pass has so few tokens that starting it costs more than computing it."""
    times = evidence.times
    if times is None or times.per_pass is None or times.per_pass[0] < FIXED_SHARE:
        return None
    fixed = (times.fixed or 0.0) + (0.0 if evidence.accumulates else times.shares.get("optimizer", 0.0))
    change, factor = larger_batch(evidence)
    if not change or fixed < FIXED_SHARE:
        return None
    gain = 1 / (1 - fixed * (1 - 1 / factor))
    other = "" if evidence.accumulates else " It is another training: more examples in an update, so fewer updates."
    return Verdict(
        rule="launch_bound",
        says=f"{percent(fixed)} of the steps' time does not depend on how much is computed: "
        f"{evidence.tokens_per_pass:.0f} tokens in a forward pass are too few.",
        figure=fixed, threshold=FIXED_SHARE, confidence=sure(times.per_pass[0], FIXED_SHARE), change=change, gain=gain,
        advice=f"Give each forward pass more examples.{other}",
    )  # fmt: skip


def knows_passes(evidence: Evidence) -> bool:
    """Whether the times tell on which side of FIXED_SHARE the passes are."""
    found = evidence.times.per_pass if evidence.times else None
    return found is not None and (found[0] >= FIXED_SHARE or found[2] < FIXED_SHARE)


def waiting_device(evidence: Evidence) -> Verdict | None:
    """The device stands idle, and not for the data: the host does not launch fast enough, or nobody knows why."""
    times, busy = evidence.times, [d for d in evidence.devices if d.is_busy and d.utilisation is not None]
    if not busy or (times is not None and times.shares["data"] + (times.host or 0) + (times.exchange or 0) > WORTH):
        return None
    share = sum(device.utilisation or 0 for device in busy) / len(busy)
    if share >= LOW_UTILISATION:
        return None
    change = larger_batch(evidence)[0] if times and evidence.accumulates else {}
    why = "not for data: the host does not launch kernels fast enough" if times else "the log does not tell for what"
    return Verdict(
        rule="host_bound",
        says=f"The device is busy {percent(share)} of the time while training; it waits, {why}.",
        figure=share, threshold=LOW_UTILISATION, confidence=0.8 if times else 0.5, change=change, gain=1 / share,
        advice="Give each forward pass more examples (train.batch_size), and use the flat forward."
        if times else "Record the steps' times: data, host, forward and backward tell apart who makes it wait.",
    )  # fmt: skip


def padding_bound(evidence: Evidence) -> Verdict | None:
    """A good part of the time is spent on padding."""
    times = evidence.times
    wasted = times.padding * max(0.0, times.computing - (times.fixed or 0.0)) if times else 0.0
    if times is None or wasted < WORTH or evidence.forward == "flat":
        return None
    if evidence.setting("train.forward") != "auto" and evidence.setting("strategy.name") != "fsdp":
        change: dict[str, Any] = {"train.forward": "flat"}  # auto takes it where it runs and is the faster one
    else:
        change = {"data.bucket_pool": max(8, 4 * (evidence.setting("data.bucket_pool") or 1))}
    return Verdict(
        rule="padding_bound",
        says=f"{percent(times.padding)} of the positions that are computed are padding; they take {percent(wasted)} of "
        "the steps' time.",
        figure=wasted, threshold=WORTH, confidence=sure(wasted, WORTH), change=change, gain=1 / (1 - wasted),
        advice="Compute real tokens only (train.forward: flat). Examples of like lengths in a batch (data.bucket_pool) "
        "pad less, but not nothing: there the gain is at most the predicted one.",
    )  # fmt: skip


def communication_bound(evidence: Evidence) -> Verdict | None:
    """Steps wait for the exchange of gradients."""
    times = evidence.times
    if times is None or (times.exchange or 0) < WORTH:
        return None
    share = min(times.exchange or 0, 0.99)
    return Verdict(
        rule="communication_bound",
        says=f"{percent(share)} of the steps' time goes into the exchange of gradients between "
        f"{evidence.world_size} processes.",
        figure=share, threshold=WORTH, confidence=sure(share, WORTH), gain=1 / (1 - share),
        advice="Exchange less often (a larger train.global_batch_size), or over a faster link.",
    )  # fmt: skip


# --- the device ---


def memory_bandwidth_bound(evidence: Evidence) -> Verdict | None:
    """The device moves data more than it computes."""
    low_mfu = evidence.mfu is not None and evidence.mfu < LOW_MFU
    threshold = MEMORY_BUSY_LOW_MFU if low_mfu else MEMORY_BUSY
    busy = [d for d in evidence.devices if d.is_busy and d.memory_busy is not None and d.utilisation is not None]
    if not busy or (evidence.mfu or 0) >= LOW_MFU or min(d.utilisation or 0 for d in busy) < LOW_UTILISATION:
        return None
    share = sum(device.memory_busy or 0 for device in busy) / len(busy)
    if share < threshold:
        return None
    halved = evidence.precision == "fp32" and evidence.device_kind == "cuda"
    known = f", and {percent(evidence.mfu)} of its peak is computed" if evidence.mfu is not None else ""
    return Verdict(
        rule="memory_bandwidth_bound",
        says=f"The device's memory is read or written {percent(share)} of the time{known}.",
        figure=share, threshold=threshold, confidence=0.8 if low_mfu else 0.6,
        change={"train.precision": "bf16"} if halved else {}, gain=1 / (1 - share / 2) if halved else None,
        advice="Half the bytes in 16 bits." if halved
        else "Fewer passes over memory: fused kernels (the flat forward on CUDA), a fused optimizer.",
    )  # fmt: skip


def throttled(evidence: Evidence) -> Verdict | None:
    """Heat or the power supply held a device's clocks down."""
    held = [device for device in evidence.devices if device.is_busy and (device.held_down or 0) >= WORTH]
    if not held:
        return None
    worst = max(held, key=lambda device: device.held_down or 0)
    share, lost = worst.held_down or 0.0, worst.lost_clock
    clocks = "" if lost is None else f", its clock {percent(lost)} lower then"
    return Verdict(
        rule="throttled",
        says=f"Device {worst.index} was held down {percent(share)} of the time ({', '.join(worst.reasons)}){clocks}.",
        figure=share, threshold=WORTH, confidence=0.9, gain=1 / (1 - share * lost) if lost else None,
        advice="Look to the cooling and the power supply of the machine; compare no times with those of a cool one.",
    )  # fmt: skip


# --- the pauses ---


def evaluation_bound(evidence: Evidence) -> Verdict | None:
    """Evaluations on the way take a good part of the run."""
    pauses = evidence.evaluations
    if pauses is None or pauses.share < EVALUATION_SHARE:
        return None
    kept = LITTLE / pauses.share
    fewer = math.ceil(evidence.evals[-1]["num_examples"] * kept) if evidence.evals else 0
    rarer = math.ceil(pauses.every_steps / kept)
    change = {"eval.max_examples": fewer} if fewer >= 100 else {"eval.every_steps": rarer}
    return Verdict(
        rule="evaluation_bound",
        says=f"{percent(pauses.share)} of the time between the first and the last step are evaluations: "
        f"{pauses.seconds:.1f} s every {pauses.every_steps:,} steps.",
        figure=pauses.share, threshold=EVALUATION_SHARE, confidence=sure(pauses.share, EVALUATION_SHARE),
        change=change, gain=1 / (1 - pauses.share * (1 - kept)),
        advice="Evaluate on a part of the examples, or less often; the last evaluation takes all of them anyway.",
    )  # fmt: skip


def checkpoint_bound(evidence: Evidence) -> Verdict | None:
    """Checkpoints on the way take a good part of the run."""
    pauses = evidence.checkpoints
    if pauses is None or pauses.share < CHECKPOINT_SHARE:
        return None
    kept = LITTLE / pauses.share
    return Verdict(
        rule="checkpoint_bound",
        says=f"{percent(pauses.share)} of the time between the first and the last step are checkpoints: "
        f"{pauses.seconds:.2f} s every {pauses.every_steps:,} steps.",
        figure=pauses.share, threshold=CHECKPOINT_SHARE, confidence=sure(pauses.share, CHECKPOINT_SHARE),
        change={"checkpoint.every_steps": math.ceil(pauses.every_steps / kept)},
        gain=1 / (1 - pauses.share * (1 - kept)),
        advice="Save less often, or on a faster disk. What a crash costs is the time since the last checkpoint.",
    )  # fmt: skip


# --- memory ---


def memory_full(evidence: Evidence) -> Verdict | None:
    """So little memory is left that a longer batch fails; or one has failed."""
    share, threshold = memory_share(evidence)
    lowered = evidence.batch_size_now
    if lowered is None and (share is None or share < threshold):
        return None
    size = evidence.setting("train.batch_size")
    smaller = lowered or max((n for n in _parts(evidence) if isinstance(size, int) and n < size), default=None)
    says = f"Memory ran out with {size} examples in a forward pass; {lowered} are computed since." if lowered else (
        f"{percent(share or 0)} of the memory were in use; a longer batch may not fit.")  # fmt: skip
    return Verdict(
        rule="memory_full", says=says, figure=share, threshold=threshold, confidence=1.0 if lowered else 0.8,
        change={"train.batch_size": smaller, "train.global_batch_size": evidence.examples_per_step} if smaller else {},
        advice="Fewer examples in a forward pass with the same train.global_batch_size give the same result; "
        "train.recompute needs less memory too.",
    )  # fmt: skip


def memory_empty(evidence: Evidence) -> Verdict | None:
    """An update is made of several small passes though one larger one would fit."""
    share, _ = memory_share(evidence)
    if share is None or share >= EMPTY or evidence.device_kind == "cpu" or not evidence.accumulates:
        return None
    change, factor = larger_batch(evidence)
    if not change:
        return None
    fixed = evidence.times.fixed if evidence.times else None
    return Verdict(
        rule="memory_empty",
        says=f"{percent(share)} of the memory were in use, while {evidence.setting('train.batch_size')} examples at a "
        f"time make an update of {evidence.examples_per_step}.",
        figure=share, threshold=EMPTY, confidence=0.6, change=change,
        gain=1 / (1 - fixed * (1 - 1 / factor)) if fixed else None,
        advice="A larger pass gives the same result in fewer launches.",
    )  # fmt: skip


def memory_share(evidence: Evidence) -> tuple[float | None, float]:
    """Most memory used (0-1), and from where on it is full: by the run's own count, else by the driver's."""
    if evidence.peak_bytes and evidence.memory_bytes:
        return evidence.peak_bytes / evidence.memory_bytes, FULL
    shares = [device.memory_share for device in evidence.devices if device.memory_share is not None]
    return max(shares, default=None), FULL_AS_SEEN


def larger_batch(evidence: Evidence) -> tuple[dict[str, Any], float]:
    """The next batch size, and how many times as large it is: the largest part of an update that fits into memory.

    Where the update is one pass already, four times as much, which changes the training. Memory is taken to grow with
    the batch as a whole, which is too much, for weights and states do not.
    """
    size, total = evidence.setting("train.batch_size"), evidence.examples_per_step
    share, _ = memory_share(evidence)
    if not isinstance(size, int) or not total:
        return {}, 1.0
    most = size * FITS / share if share else math.inf
    if evidence.accumulates:
        fitting = [n for n in _parts(evidence) if size < n <= most]
        return ({"train.batch_size": fitting[-1]}, fitting[-1] / size) if fitting else ({}, 1.0)
    if 4 * size > most:
        return {}, 1.0
    return {"train.batch_size": 4 * size, "train.global_batch_size": 4 * total}, 4.0


def _parts(evidence: Evidence) -> list[int]:
    """The batch sizes that divide what a device does for an update, in order."""
    own = (evidence.examples_per_step or 0) // (evidence.world_size or 1)
    return [n for n in range(1, own + 1) if own % n == 0]


def state(evidence: Evidence) -> str:
    """What takes the time of a run that no rule of speed speaks of; it is computing only where that is known."""
    busy: list[Device] = [device for device in evidence.devices if device.is_busy]
    found = evidence.times.per_pass if evidence.times else None
    parts = []
    if evidence.times is not None:
        parts.append(f"forward and backward take {percent(evidence.times.computing)} of a step")
    if busy and busy[0].utilisation is not None:
        parts.append(f"the device is busy {percent(busy[0].utilisation)} of the time")
    if evidence.mfu is not None:
        parts.append(f"{percent(evidence.mfu)} of its peak is computed")
    if not parts:
        return "nothing is known of the time"
    if not knows_passes(evidence):
        return f"{', '.join(parts)}; how much of it is computing and how much starting kernels is not known"
    if found and found[0] >= FIXED_SHARE:
        return f"{', '.join(parts)}; {percent(found[1])} of forward and backward do not depend on how much is computed"
    return f"compute-bound, as it should be: {', '.join(parts)}"
