"""Load of devices and hosts during a run: its telemetry as series over time.

In: telemetry records. Out: Tracks and PhaseIntervals for charts and tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

from fivetune.reading.report.page.series import Series, compute_quantile
from fivetune.rundir.figures import list_device_series
from fivetune.rundir.records import DeviceSample, TelemetryRecord
from fivetune.values import select_finite

Row = tuple[float, str, TelemetryRecord | DeviceSample]
"""Seconds on the clock, the name of a device, host or process, and what was measured of it."""

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


class Load:
    """The telemetry of one run, on a clock without the pauses between its resumed parts."""

    def __init__(self, telemetry: Sequence[TelemetryRecord]) -> None:
        self._records = sorted(telemetry, key=lambda record: record.seconds)
        times = [record.seconds for record in self._records]
        self._clock = dict(zip(times, _remove_pauses(times), strict=True))
        self._tracks: dict[str, list[Track]] = {}
        self._is_multi_host = len({record.host for record in self._records}) > 1
        self._devices, self._unused = self._list_device_rows()
        # A host is measured by each of its processes, and counts once: as its first process recorded it.
        first_ranks: dict[str | None, int] = {}
        for record in self._records:
            first_ranks[record.host] = min(record.rank, first_ranks.get(record.host, record.rank))
        is_multi_process = len({record.rank for record in self._records}) > 1
        self._hosts: list[Row] = []
        self._processes: list[Row] = []
        for record in self._records:
            at = self._clock[record.seconds]
            if record.rank == first_ranks[record.host]:
                self._hosts.append((at, str(record.host) if self._is_multi_host else "", record))
            self._processes.append((at, f"rank {record.rank}" if is_multi_process else "", record))

    def build_tracks(self, gauge: Gauge) -> list[Track]:
        """Build a gauge's series of all devices or hosts, in the gauge's unit; those without any value are left out."""
        known = self._tracks.get(gauge.title)
        if known is not None:
            return known
        found: list[Track] = []
        for field, word in gauge.fields.items():
            if field in PROCESS_FIELDS:  # the limit is of the host, and drawn once
                found += _build_field_tracks(self._processes, field, word, gauge.scale, None)
            else:
                rows = self._devices if gauge in DEVICE_GAUGES else self._hosts
                found += _build_field_tracks(rows, field, word, gauge.scale, gauge.limit, self._unused)
        self._tracks[gauge.title] = [track for track in found if select_finite(track.values)]
        return self._tracks[gauge.title]

    def list_phase_intervals(self) -> list[PhaseInterval]:
        """List the phases of the first process, in seconds; intervals of an unknown phase are left out."""
        first = min((record.rank for record in self._records), default=0)
        phases = [(self._clock[one.seconds], one.phase) for one in self._records if one.rank == first]
        starts = [(phase, next(group)[0]) for phase, group in groupby(phases, key=lambda pair: pair[1])]
        ends = [start for _, start in starts[1:]] + [at for at, _ in phases[-1:]]
        return [PhaseInterval(phase, start, end) for (phase, start), end in zip(starts, ends, strict=True) if phase]

    def _list_device_rows(self) -> tuple[list[Row], set[str]]:
        """List each device at each time, and the names of those that the run does not use.

        A name has the host if there are several, the index, and the MIG instance.
        """
        rows: list[Row] = []
        unused: set[str] = set()
        for device in list_device_series(self._records):
            name = f"GPU {device.index}"
            if self._is_multi_host:
                name = f"{device.host} {name}"
            if device.mig is not None:
                name += f" MIG {device.mig}"
            if not device.is_used:
                name += " (not used by the run)"
                unused.add(name)
            for seconds, sample in zip(device.seconds, device.samples, strict=True):
                rows.append((self._clock[seconds], name, sample))
        return rows, unused


def _build_field_tracks(
    rows: Iterable[Row], field: str, word: str, scale: float, limit: str | None, unused: Collection[str] = ()
) -> list[Track]:
    """Build the series of one field of a gauge, one of each device, host or process.

    Args:
        word: name of the series beside others of the gauge; "" if it is the only one.
        limit: field with the highest possible value.
    """
    points: dict[str, tuple[list[float], Series]] = {}
    limits: dict[str, float] = {}
    for at, name, record in rows:
        times, values = points.setdefault(name, ([], []))
        value = _read_field(record, field)
        times.append(at)
        values.append(None if value is None else scale * value)
        most = _read_field(record, limit) if limit else None
        if most is not None:
            limits[name] = scale * most
    tracks: list[Track] = []
    for name, (times, values) in points.items():
        full_name = f"{name} {word}".strip()
        tracks.append(Track(full_name, times, values, limits.get(name), word, name not in unused))
    return tracks


def _read_field(record: TelemetryRecord | DeviceSample, field: str) -> float | None:
    """Read a field of a record, or what is computed of the load of its cores."""
    if field in ("busy_cores", "num_cores"):
        assert isinstance(record, TelemetryRecord)
        cores = record.core_utilisation
        if not cores:
            return None
        return sum(cores) if field == "busy_cores" else len(cores)
    return getattr(record, field)


def _remove_pauses(times: Sequence[float]) -> list[float]:
    """Compute the seconds since the first time; a gap much longer than the median counts as the median.

    >>> _remove_pauses([5.0, 6.0, 7.0, 100.0])
    [0.0, 1.0, 2.0, 3.0]
    """
    if not times:
        return []
    gaps = [later - earlier for earlier, later in pairwise(times)]
    usual = compute_quantile([gap for gap in gaps if gap > 0], 0.5) or 0.0
    longest = max(PAUSE_SECONDS, 10 * usual)
    steps = [usual if gap > longest else gap for gap in gaps]
    return list(accumulate(steps, initial=0.0))
