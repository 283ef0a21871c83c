"""What the server counts, in the text format of Prometheus (version 0.0.4).

Written here because the format is three kinds of lines: prometheus-client would be a dependency whose registry is one
per process, so that two servers of a process, as in tests, would share their counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Series:
    """One histogram: how many values are at most each bound, and their sum.

    >>> series = Series((1.0, 2.0))
    >>> for value in (1, 2, 5): series.add(value)
    >>> list(series.format_lines("size"))[:4]
    ['size_bucket{le="1.0"} 1', 'size_bucket{le="2.0"} 2', 'size_bucket{le="+Inf"} 3', 'size_sum 8.0']
    """

    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(default_factory=list[int])

    def add(self, value: float) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def format_lines(self, name: str) -> list[str]:
        seen, lines = 0, list[str]()
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts or [0] * 99, strict=False):
            seen += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {seen}')
        return [*lines, f"{name}_sum {self.total}", f"{name}_count {seen}"]


class ServerMeasures:
    """Counts of requests, tokens and batches; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._counts: dict[str, dict[Labels, int]] = {}
        self._series = {
            "fivetune_request_seconds": Series(SECONDS),
            "fivetune_batch_records": Series(SIZES),
            "fivetune_batch_seconds": Series(SECONDS),
        }

    def count(self, name: str, number: int = 1, **labels: str) -> None:
        """Add to a counter; the values of labels come from the server, never from a request."""
        with self._lock:
            counter, key = self._counts.setdefault(name, {}), tuple(labels.items())
            counter[key] = counter.get(key, 0) + number

    def add_batch(self, num_records: int, seconds: float) -> None:
        with self._lock:
            self._series["fivetune_batch_records"].add(num_records)
            self._series["fivetune_batch_seconds"].add(seconds)

    def add_request(self, route: str, code: int, seconds: float) -> None:
        self.count("fivetune_requests_total", route=route, code=str(code))
        with self._lock:
            self._series["fivetune_request_seconds"].add(seconds)

    def format_text(self, gauges: Mapping[str, float]) -> str:
        """Format all measures, with gauges that hold now."""
        lines: list[str] = []
        with self._lock:
            for name, counter in self._counts.items():
                lines.append(f"# TYPE {name} counter")
                for labels, number in counter.items():
                    shown = ",".join(f'{key}="{_escape(value)}"' for key, value in labels)
                    lines.append(f"{name}{{{shown}}} {number}" if shown else f"{name} {number}")
            for name, series in self._series.items():
                lines += [f"# TYPE {name} histogram", *series.format_lines(name)]
        for name, value in gauges.items():
            lines += [f"# TYPE {name} gauge", f"{name} {value}"]
        return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
