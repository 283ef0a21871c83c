"""What devices and hosts did while a run ran: its telemetry as series over the time that it ran.

In: telemetry records as JSON gave them (anything may be missing or null). Out: Tracks and Spans for charts and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any

from fivetune.report.series import Series, quantile
from fivetune.values import dig, known, number

Record = dict[str, Any]
Row = tuple[float, str, Mapping[str, Any]]  # time, name, counters

GIB, MB = 2**30, 1e6
PAUSE = 30.0  # seconds without a sample, from which on the run is taken to have stood still


@dataclass(frozen=True, slots=True)
class Gauge:
    """One thing that is measured: what charts and tables call it, and where it stands in the records.

    Args:
        unit: after the value was multiplied by `scale`.
        fields: field -> word for it, "" where it is the only one.
        limit: field with the highest value that there can be.
        says: what the figure means, and what it does not.
    """

    title: str
    unit: str
    scale: float
    fields: Mapping[str, str]
    says: str
    limit: str | None = None


DEVICE_GAUGES = (
    Gauge("GPU utilisation", "%", 100, {"utilisation": ""},
          "Share of the time in which any kernel ran; one tiny kernel is enough."),
    Gauge("GPU time spent accessing memory", "%", 100, {"memory_busy": ""},
          "Share of the time in which the device's memory was read or written; not how full it is."),
    Gauge("GPU memory used", "GiB", 1 / GIB, {"memory_used_bytes": ""},
          "What the driver counts as used, by all processes; the dotted line is all there is.", "memory_total_bytes"),
    Gauge("GPU temperature", "\u00b0C", 1, {"temperature_celsius": ""}, "Temperature of the chip."),
    Gauge("GPU power", "W", 1, {"power_watts": ""}, "Power drawn; the dotted line is the limit.",
          "power_limit_watts"),
    Gauge("GPU clock", "MHz", 1, {"sm_clock_mhz": ""}, "Clock of the multiprocessors."),
    Gauge("PCIe traffic", "MB/s", 1 / MB, {"pcie_sent_bytes_per_second": "sent", "pcie_received_bytes_per_second":
          "received"}, "Between host and device, as the driver samples it."),
)  # fmt: skip
HOST_GAUGES = (
    Gauge("Busy cores", "cores", 1, {"busy_cores": "whole host", "process_cores": "this run"},
          "Cores that were kept busy; the dotted line is all cores.", "num_cores"),
    Gauge("Memory of the host", "GiB", 1 / GIB, {"ram_used_bytes": "whole host", "process_ram_bytes": "this run",
          "swap_used_bytes": "swap"}, "Memory used; the dotted line is all there is.", "ram_total_bytes"),
    Gauge("Disk", "MB/s", 1 / MB, {"disk_read_bytes_per_second": "read", "disk_written_bytes_per_second": "written"},
          "Traffic of all disks of the host."),
    Gauge("Network", "MB/s", 1 / MB, {"network_sent_bytes_per_second": "sent", "network_received_bytes_per_second":
          "received"}, "Traffic of all networks of the host."),
)  # fmt: skip
PROCESS_FIELDS = ("process_cores", "process_ram_bytes")


@dataclass(frozen=True, slots=True)
class Track:
    """One quantity of one device, host or process: seconds since the run began, and values (None = gap).

    `word` says which of a gauge's quantities it is; `used` is False for a device that no process of the run uses.
    """

    name: str
    seconds: list[float]
    values: Series
    limit: float | None = None
    word: str = ""
    used: bool = True


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a run's time in one phase, in seconds since it began."""

    phase: str
    start: float
    end: float


class Load:
    """The telemetry of one run, with a clock that leaves out the pauses between its resumed parts."""

    def __init__(self, telemetry: Sequence[Record]) -> None:
        timed = [(at, record) for record in telemetry or () if (at := number(record.get("seconds"))) is not None]
        timed.sort(key=lambda pair: pair[0])
        self._records = [record for _, record in timed]
        self._seconds = _without_pauses([at for at, _ in timed])
        self._tracks: dict[str, list[Track]] = {}

    def tracks(self, gauge: Gauge) -> list[Track]:
        """A gauge's series of all devices or hosts; none of those that were never read."""
        if gauge.title not in self._tracks:
            rows = self._devices if gauge in DEVICE_GAUGES else self._hosts
            found = [one for field, word in gauge.fields.items() for one in _series(rows, gauge, field, word)]
            self._tracks[gauge.title] = [track for track in found if known(track.values)]
        return self._tracks[gauge.title]

    def spans(self) -> list[Span]:
        """What the first process did and when; stretches of an unknown phase are left out."""
        first = min((record.get("rank") or 0 for record in self._records), default=0)
        told = [
            (at, record.get("phase"))
            for at, record in zip(self._seconds, self._records, strict=True)
            if (record.get("rank") or 0) == first
        ]
        starts = [(phase, next(group)[0]) for phase, group in groupby(told, key=lambda pair: pair[1])]
        ends = [start for _, start in starts[1:]] + [told[-1][0] if told else 0.0]
        return [Span(str(phase), start, end) for (phase, start), end in zip(starts, ends, strict=True) if phase]

    @cached_property
    def _devices(self) -> list[Row]:
        """Each device at each time, told by the first process of its node."""
        found = [
            (at, (record.get("host"), device.get("index"), device.get("mig")), device)
            for at, record in self._told_by_node()
            for device in record.get("devices") or ()
            if isinstance(device, Mapping)
        ]
        used = {place for _, place, device in found if device.get("ours") is not False}
        names = {
            place: self._called(*place) + ("" if place in used else " (not used by the run)") for _, place, _ in found
        }
        return [(at, names[place], {**device, "used": place in used}) for at, place, device in found]

    def _called(self, host: Any, index: Any, mig: Any) -> str:
        instance = "" if mig is None else f" MIG {mig}"
        return f"{host if self._several_hosts else ''} GPU {index}{instance}".strip()

    @cached_property
    def _hosts(self) -> list[Row]:
        """Each host at each time, and each process of the run."""
        several = len({record.get("rank") or 0 for record in self._records}) > 1
        hosts = [
            (at, str(record.get("host")) if self._several_hosts else "", _host_counters(record))
            for at, record in self._told_by_node()
        ]
        processes = [
            (at, f"rank {record.get('rank') or 0}" if several else "", {key: record.get(key) for key in PROCESS_FIELDS})
            for at, record in zip(self._seconds, self._records, strict=True)
        ]
        return [*hosts, *processes]

    def _told_by_node(self) -> Iterator[tuple[float, Record]]:
        speaker: dict[Any, int] = {}
        for record in self._records:
            host, rank = record.get("host"), record.get("rank") or 0
            speaker[host] = min(rank, speaker.get(host, rank))
        for at, record in zip(self._seconds, self._records, strict=True):
            if (record.get("rank") or 0) == speaker[record.get("host")]:
                yield at, record

    @cached_property
    def _several_hosts(self) -> bool:
        return len({record.get("host") for record in self._records}) > 1


def _series(rows: Sequence[Row], gauge: Gauge, field: str, word: str) -> list[Track]:
    """One field of a gauge: a series of each device, host or process that has it."""
    points: dict[str, tuple[list[float], Series]] = {}
    limits: dict[str, float] = {}
    unused = {name for _, name, table in rows if table.get("used") is False}
    for at, name, table in rows:
        if field not in table:
            continue
        value = number(table[field])
        times, values = points.setdefault(name, ([], []))
        times.append(at)
        values.append(None if value is None else gauge.scale * value)
        if gauge.limit and (limit := number(table.get(gauge.limit))) is not None:
            limits[name] = gauge.scale * limit
    return [
        Track(f"{name} {word}".strip(), times, values, limits.get(name), word, name not in unused)
        for name, (times, values) in points.items()
    ]


def _without_pauses(times: Sequence[float]) -> list[float]:
    """Seconds since the first time; a spacing much longer than usual counts as the usual one."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual = quantile([gap for gap in gaps if gap > 0], 0.5) or 0.0
    longest = max(PAUSE, 10 * usual)
    steps = [usual if gap > longest else gap for gap in gaps]
    return list(accumulate(steps, initial=0.0)) if times else []


def _host_counters(record: Record) -> Record:
    """A record's counters of the host, the cores as a sum."""
    cores = [number(core) for core in dig(record, "core_utilisation") or ()]
    counters = {key: value for key, value in record.items() if key not in PROCESS_FIELDS}
    return counters | {
        "busy_cores": sum(known(cores)) if cores and None not in cores else None,
        "num_cores": len(cores) or None,
    }
