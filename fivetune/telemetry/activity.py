"""What devices and processes did while a run trained: the samples of its telemetry, one set of figures each.

In: lines of telemetry.jsonl (TelemetryRecords as dicts), in the order of time. Out: Devices, and cores by rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

IDLE = 0.05
"""Utilisation (0-1) up to which a device does nothing for the run: NVML counts in whole per cents, over up to a second,
and a desktop or the driver itself shows up with a few; a device that trains is seen far above, even when it waits."""

HELD_DOWN = ("thermal", "slowdown", "brake")
"""Parts of the names of NVML's reasons that hold clocks down because something is wrong: heat, or the power supply.
Idleness, clocks that somebody set, and the power limit, which a busy device is meant to reach, are none."""

MIN_SAMPLES = 5
"""Samples from which on something is known of a device or a process: the first ones look back on the time before."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator over the time in which anything was trained; what its driver did not tell is None.

    Args:
        utilisation, memory_busy: means (0-1).
        active: share of the samples with more than IDLE utilisation.
        memory_share: most memory used, of all it has (0-1).
        held_down: share of the samples in which heat or the power supply held the clocks down.
        lost_clock: by which share the clock was lower then than at its best.
        reasons: why, in the driver's words.
    """

    index: int
    name: str | None
    utilisation: float | None
    active: float | None
    memory_busy: float | None
    memory_share: float | None
    held_down: float | None
    lost_clock: float | None
    reasons: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether it worked in more than one of ten samples; one at the start or the end may be another's."""
        return (self.active or 0) > 0.1


def devices_of(lines: Sequence[Line]) -> tuple[Device, ...]:
    """The accelerators of all nodes that were seen MIN_SAMPLES times; one that works for others only is left out."""
    samples: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for line in while_training(lines):
        for device in line.get("devices") or ():
            samples[line.get("host") or "", device["index"]].append(device)
    found = ((_device(index, own), any(one.get("ours") is not False for one in own))
             for (_, index), own in sorted(samples.items()) if len(own) >= MIN_SAMPLES)  # fmt: skip
    return tuple(device for device, may_be_ours in found if may_be_ours or not device.is_busy)


def while_training(lines: Sequence[Line]) -> list[Line]:
    """The samples of the phase "train"; where phases are unknown, those in which a device did something.

    A log begins before the training and ends after it, and joins several runs: what stands between is no evidence.
    """
    if any(line.get("phase") for line in lines):
        return [line for line in lines if line.get("phase") == "train"]
    active = [line for line in lines if any((d.get("utilisation") or 0) > IDLE for d in line.get("devices") or ())]
    return active or list(lines)


def _device(index: int, samples: Sequence[Mapping[str, Any]]) -> Device:
    told = [one for one in samples if one.get("throttle_reasons") is not None]
    held = [one for one in told if _reasons(one)]
    clocks = [one["sm_clock_mhz"] for one in samples if one.get("sm_clock_mhz")]
    held_clocks = [one["sm_clock_mhz"] for one in held if one.get("sm_clock_mhz")]
    return Device(
        index=index,
        name=next((one["name"] for one in samples if one.get("name")), None),
        utilisation=_mean(samples, "utilisation"),
        active=_active(samples),
        memory_busy=_mean(samples, "memory_busy"),
        memory_share=_memory_share(samples),
        held_down=len(held) / len(told) if told else None,
        lost_clock=1 - sum(held_clocks) / len(held_clocks) / max(clocks) if held_clocks else None,
        reasons=tuple(sorted({reason for one in held for reason in _reasons(one)})),
    )


def _reasons(sample: Mapping[str, Any]) -> list[str]:
    return [reason for reason in sample["throttle_reasons"] if any(part in reason.lower() for part in HELD_DOWN)]


def _active(samples: Sequence[Mapping[str, Any]]) -> float | None:
    known = [one["utilisation"] for one in samples if one.get("utilisation") is not None]
    return sum(value > IDLE for value in known) / len(known) if known else None


def _memory_share(samples: Sequence[Mapping[str, Any]]) -> float | None:
    pairs = [(one.get("memory_used_bytes"), one.get("memory_total_bytes")) for one in samples]
    return max((used / total for used, total in pairs if used is not None and total), default=None)


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float | None:
    known = [one[name] for one in samples if one.get(name) is not None]
    return sum(known) / len(known) if known else None


def busy_ranks(lines: Sequence[Line]) -> dict[int, float]:
    """Cores that each process kept busy while it trained, the mean; {} where that was not looked at."""
    cores: dict[int, list[float]] = defaultdict(list)
    for line in lines:
        if line.get("phase") == "train" and line.get("process_cores") is not None:
            cores[line.get("rank", 0)].append(line["process_cores"])
    seen = {rank: values for rank, values in sorted(cores.items()) if len(values) >= MIN_SAMPLES}
    return {rank: sum(values) / len(values) for rank, values in seen.items()}
