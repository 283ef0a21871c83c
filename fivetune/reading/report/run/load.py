"""Load of devices and hosts during a run: its telemetry as series over time.

In: telemetry records. Out: Tracks and PhaseIntervals for charts and tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise

from fivetune.reading.report.page.series import Series, compute_quantile
from fivetune.rundir.figures import DeviceSeries, list_device_series
from fivetune.rundir.records import DeviceSample, TelemetryRecord
from fivetune.values import as_finite_number

Counters = Mapping[str, float | None]

GIB, MB = 2**30, 1e6
PAUSE_SECONDS = 30.0  # a longer gap between samples counts as a pause of the run


@dataclass(frozen=True, slots=True)
class Gauge:
    """One measured quantity: its title, and the fields of a record that hold it.

    Args:
        unit: unit of the value times `scale`.
        fields: field -> name of the series, "" where it is the only one.
        description: what the figure means, and what it does not.
        limit: field with the highest possible value.
    """

    title: str
    unit: str
    scale: float
    fields: Mapping[str, str]
    description: str
    limit: str | None = None


DEVICE_GAUGES = (
    Gauge("GPU utilisation", "%", 100, {"utilisation": ""},
          "Share of the time in which any kernel ran; one tiny kernel is enough."),
    Gauge("GPU time spent accessing memory", "%", 100, {"memory_busy": ""},
          "Share of the time in which the device's memory was read or written; not how full it is."),
    Gauge("GPU memory used", "GiB", 1 / GIB, {"memory_used_bytes": ""},
          "Memory in use by all processes; the dotted line is the capacity.", "memory_total_bytes"),
    Gauge("GPU temperature", "\u00b0C", 1, {"temperature_celsius": ""}, "Temperature of the chip."),
    Gauge("GPU power", "W", 1, {"power_watts": ""}, "Power drawn; the dotted line is the limit.",
          "power_limit_watts"),
    Gauge("GPU clock", "MHz", 1, {"sm_clock_mhz": ""}, "Clock of the multiprocessors."),
    Gauge("PCIe traffic", "MB/s", 1 / MB, {"pcie_sent_bytes_per_second": "sent", "pcie_received_bytes_per_second":
          "received"}, "Between host and device, as the driver samples it."),
)  # fmt: skip
HOST_GAUGES = (
    Gauge("Busy cores", "cores", 1, {"busy_cores": "whole host", "process_cores": "this run"},
          "Cores in use; the dotted line is all cores.", "num_cores"),
    Gauge("Memory of the host", "GiB", 1 / GIB, {"ram_used_bytes": "whole host", "process_ram_bytes": "this run",
          "swap_used_bytes": "swap"}, "Memory in use; the dotted line is the capacity.", "ram_total_bytes"),
    Gauge("Disk", "MB/s", 1 / MB, {"disk_read_bytes_per_second": "read", "disk_written_bytes_per_second": "written"},
          "Traffic of all disks of the host."),
    Gauge("Network", "MB/s", 1 / MB, {"network_sent_bytes_per_second": "sent", "network_received_bytes_per_second":
          "received"}, "Traffic of all networks of the host."),
)  # fmt: skip
DEVICE_FIELDS, HOST_FIELDS = (
    tuple({*(field for gauge in gauges for field in gauge.fields), *(gauge.limit for gauge in gauges if gauge.limit)})
    for gauges in (DEVICE_GAUGES, HOST_GAUGES)
)
PROCESS_FIELDS = ("process_cores", "process_ram_bytes")


@dataclass(frozen=True, slots=True)
class Track:
    """One quantity of one device, host or process: seconds since the start of the run, and values (None = gap).

    `quantity` is the name of the gauge's field; `used` is False for a device that no process of the run uses.
    """

    name: str
    seconds: list[float]
    values: Series
    limit: float | None = None
    quantity: str = ""
    used: bool = True


@dataclass(frozen=True, slots=True)
class PhaseInterval:
    """A part of a run in one phase, in seconds since the start of the run."""

    phase: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class _Row:
    """Counters of one device, host or process at one time."""

    seconds: float
    name: str
    counters: Counters
    is_used: bool = True


class Load:
    """The telemetry of one run, on a clock without the pauses between its resumed parts."""

    def __init__(self, telemetry: Sequence[TelemetryRecord]) -> None:
        self._records = sorted(telemetry, key=lambda record: record.seconds)
        self._seconds = _remove_pauses([record.seconds for record in self._records])
        self._tracks: dict[str, list[Track]] = {}

    def build_tracks(self, gauge: Gauge) -> list[Track]:
        """Build a gauge's series of all devices or hosts, in the gauge's unit; those without any value are left out."""
        if gauge.title not in self._tracks:
            rows = self._devices if gauge in DEVICE_GAUGES else self._hosts
            found = [
                one for field, word in gauge.fields.items() for one in _build_field_tracks(rows, gauge, field, word)
            ]
            self._tracks[gauge.title] = [
                track for track in found if any(as_finite_number(v) is not None for v in track.values)
            ]
        return self._tracks[gauge.title]

    def list_phase_intervals(self) -> list[PhaseInterval]:
        """List the phases of the first process, in seconds; intervals of an unknown phase are left out."""
        first = min((record.rank for record in self._records), default=0)
        phases = [(at, record.phase) for at, record in self._iter_records() if record.rank == first]
        starts = [(phase, next(group)[0]) for phase, group in groupby(phases, key=lambda pair: pair[1])]
        ends = [start for _, start in starts[1:]] + [phases[-1][0] if phases else 0.0]
        return [PhaseInterval(phase, start, end) for (phase, start), end in zip(starts, ends, strict=True) if phase]

    @cached_property
    def _devices(self) -> list[_Row]:
        """Each device at each time."""
        clock = {record.seconds: at for at, record in self._iter_records()}
        return [
            _Row(clock[at], self._format_device_name(device), _read_fields(sample, DEVICE_FIELDS), device.is_used)
            for device in list_device_series(self._records)
            for at, sample in zip(device.seconds, device.samples, strict=True)
        ]

    def _format_device_name(self, device: DeviceSeries) -> str:
        """Format the name of a device: host if there are several, index, MIG instance, whether the run uses it."""
        instance = "" if device.mig is None else f" MIG {device.mig}"
        unused = "" if device.is_used else " (not used by the run)"
        return f"{device.host if self._is_multi_host else ''} GPU {device.index}{instance}{unused}".strip()

    @cached_property
    def _hosts(self) -> list[_Row]:
        """Each host at each time, as its first process recorded it, and each process of the run."""
        first_ranks: dict[str | None, int] = {}
        for record in self._records:
            first_ranks[record.host] = min(record.rank, first_ranks.get(record.host, record.rank))
        several = len({record.rank for record in self._records}) > 1
        hosts = [
            _Row(at, str(record.host) if self._is_multi_host else "", _read_host_counters(record))
            for at, record in self._iter_records()
            if record.rank == first_ranks[record.host]
        ]
        processes = [
            _Row(at, f"rank {record.rank}" if several else "", _read_fields(record, PROCESS_FIELDS))
            for at, record in self._iter_records()
        ]
        return [*hosts, *processes]

    def _iter_records(self) -> Iterator[tuple[float, TelemetryRecord]]:
        """Yield the seconds on the clock without pauses, and the record."""
        yield from zip(self._seconds, self._records, strict=True)

    @cached_property
    def _is_multi_host(self) -> bool:
        return len({record.host for record in self._records}) > 1


def _build_field_tracks(rows: Sequence[_Row], gauge: Gauge, field: str, word: str) -> list[Track]:
    """Build the series of one field of a gauge, one of each device, host or process that has it.

    Args:
        word: name of the series beside others of the gauge; "" if it is the only one.
    """
    points: dict[str, tuple[list[float], Series]] = {}
    limits: dict[str, float] = {}
    unused = {row.name for row in rows if not row.is_used}
    for row in rows:
        if field not in row.counters:
            continue
        value = row.counters[field]
        times, values = points.setdefault(row.name, ([], []))
        times.append(row.seconds)
        values.append(None if value is None else gauge.scale * value)
        if gauge.limit and (limit := row.counters.get(gauge.limit)) is not None:
            limits[row.name] = gauge.scale * limit
    return [
        Track(f"{name} {word}".strip(), times, values, limits.get(name), word, name not in unused)
        for name, (times, values) in points.items()
    ]


def _remove_pauses(times: Sequence[float]) -> list[float]:
    """Compute the seconds since the first time; a gap much longer than the median counts as the median.

    >>> _remove_pauses([5.0, 6.0, 7.0, 100.0])
    [0.0, 1.0, 2.0, 3.0]
    """
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual = compute_quantile([gap for gap in gaps if gap > 0], 0.5) or 0.0
    longest = max(PAUSE_SECONDS, 10 * usual)
    steps = [usual if gap > longest else gap for gap in gaps]
    return list(accumulate(steps, initial=0.0)) if times else []


def _read_fields(record: TelemetryRecord | DeviceSample, fields: Sequence[str]) -> Counters:
    """Read those fields that a record of this kind has."""
    return {field: getattr(record, field) for field in fields if hasattr(record, field)}


def _read_host_counters(record: TelemetryRecord) -> Counters:
    """Read a record's counters of the host, with the number of its cores and how many of them are busy."""
    cores = record.core_utilisation
    fields = [field for field in HOST_FIELDS if field not in PROCESS_FIELDS]
    return {
        **_read_fields(record, fields),
        "busy_cores": sum(cores) if cores else None,
        "num_cores": len(cores) if cores else None,
    }
