"""Summary of a torch.profiler trace file (Chrome's JSON format, plain or gzip), without torch.

In: the trace file. Out: a TraceSummary.

Times in the file are microseconds, in the summary seconds. Steps are the ranges `ProfilerStep#N`; phases are the ranges
`fivetune.<phase>`, the optimizer's own range, and the time in which the autograd engine runs (backward).
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune.errors import DataError
from fivetune.machine.profiling.kernels import classify_kernel, classify_operator
from fivetune.machine.profiling.summary import (
    NUM_TOP,
    REST,
    SpanCoverage,
    TimeSpan,
    build_gap_histogram,
    downsample_points,
    rank_work,
    sum_by_class,
)
from fivetune.rundir.trace import DeviceTime, MemoryCurve, Phase, TraceSummary, Transfer, Work
from fivetune.types import JsonTable, JsonValue

MICRO = 1e-6
RANGE_PREFIX = "fivetune."
STEP, ENGINE, OPTIMIZER = "ProfilerStep#", "autograd::engine::evaluate_function", "Optimizer.step#"
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch")
SYNCHRONISE = re.compile(r"Synchronize|^cudaMemcpy(_v\d+)?$")
DIRECTION = re.compile(r"[HDPA]to[HDPA]")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A range of the trace, in seconds since the start of the trace's clock."""

    kind: str
    name: str
    start: float
    end: float
    thread: Any
    args: Mapping[str, Any]

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def span(self) -> TimeSpan:
        return self.start, self.end


def read_trace(path: Path) -> JsonTable:
    """Parse a trace file. Raises DataError if it is not a trace."""
    try:
        raw = path.read_bytes()
        trace: JsonValue = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read as a trace: {error}. Give a file that torch.profiler exported "
            "(export_chrome_trace)."
        ) from None
    if isinstance(trace, dict) and isinstance(trace.get("traceEvents"), list):
        return trace
    raise DataError(
        f"{path}: not a trace: it has no list traceEvents. "
        "Give a file that torch.profiler exported (export_chrome_trace)."
    )


def summarise_trace(
    trace: Mapping[str, Any],
    *,
    parts: Mapping[str, int] | None = None,
    plain_step_seconds: float | None = None,
) -> TraceSummary:
    """Summarise a parsed trace.

    Args:
        parts: bytes of memory by category, counted from tensors; the rest of the peak is added as REST.
        plain_step_seconds: mean step of the same steps without the profiler.

    Raises DataError if it holds neither device work nor operators.
    """
    events = list(_parse_events(trace["traceEvents"]))
    steps = [event for event in events if event.kind == "user_annotation" and event.name.startswith(STEP)]
    start, end = _find_window(steps or events)
    events = [event for event in events if start <= event.start < end or (event.kind in DEVICE_CATEGORIES and steps)]
    works = [event for event in events if event.kind in DEVICE_CATEGORIES and event.start >= start]
    if works:
        end = max(end, *(work.end for work in works))
    operators = [event for event in events if event.kind == "cpu_op"]
    if not works and not operators:
        raise DataError("the trace holds neither kernels nor operators. Profile at least one step.")
    calls = [event for event in events if event.kind in CALLS]
    host = _rank_operators(operators) if not works else _rank_events(works, classify_kernel)
    seconds, memory = (
        end - start,
        _build_memory_curve(trace["traceEvents"], start, on_device=bool(works), parts=parts or {}),
    )
    spans = _collect_phase_spans(events)
    waits = SpanCoverage([call.span for call in calls if SYNCHRONISE.search(call.name)] + spans.get("data", []))
    synchronised = [call for call in calls if SYNCHRONISE.search(call.name)]
    return TraceSummary(
        source="torch.profiler",
        measures="kernels" if works else "operators",
        window_seconds=seconds,
        num_steps=len(steps) or None,
        classes=sum_by_class(host),
        top=host[:NUM_TOP],
        outside_seconds=None
        if works
        else seconds - SpanCoverage(one.span for one in operators).measure_overlap(start, end),
        devices=tuple(_build_device_times(works, calls, waits, _get_device_names(trace))),
        phases=tuple(_build_phases(spans, works, calls)),
        calls=rank_work(_sum_by_name((call.name, "call", call.seconds) for call in calls))[:NUM_TOP],
        transfers=_build_transfers(works),
        num_launches=sum(bool(LAUNCH.search(call.name)) for call in calls) if works else None,
        num_synchronisations=len(synchronised) if works else None,
        synchronisation_seconds=sum(call.seconds for call in synchronised) if works else None,
        memory=memory,
        plain_step_seconds=plain_step_seconds,
        profiled_step_seconds=seconds / len(steps) if steps else None,
    )


def _parse_events(raw: Iterable[Mapping[str, Any]]) -> Iterator[TraceEvent]:
    for one in raw:
        if one.get("ph") == "X" and "dur" in one:
            start = one["ts"] * MICRO
            end = start + one["dur"] * MICRO
            yield TraceEvent(one.get("cat", ""), str(one["name"]), start, end, one.get("tid"), one.get("args") or {})


def _find_window(events: list[TraceEvent]) -> TimeSpan:
    if not events:
        raise DataError("the trace is empty. Profile at least one step.")
    return min(event.start for event in events), max(event.end for event in events)


def _sum_by_name(works: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], tuple[float, int]]:
    """Sum (name, kind, seconds) to (seconds, number) by name and kind."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for name, kind, seconds in works:
        before, num = found.get((name, kind), (0.0, 0))
        found[name, kind] = (before + seconds, num + 1)
    return found


def _rank_events(works: list[TraceEvent], classify: Callable[[str], str]) -> tuple[Work, ...]:
    return rank_work(_sum_by_name((work.name, classify(work.name), work.seconds) for work in works))


def _rank_operators(operators: list[TraceEvent]) -> tuple[Work, ...]:
    """Rank operators by self time: the time of the operators that they call is subtracted, so all counts once."""
    by_thread: dict[Any, list[TraceEvent]] = defaultdict(list)
    for event in operators:
        by_thread[event.thread].append(event)
    own: list[tuple[str, str, float]] = []
    for thread in by_thread.values():
        above: list[tuple[TraceEvent, list[float]]] = []  # callers of the current event, with their callees' seconds
        for event in sorted(thread, key=lambda one: (one.start, -one.end)):
            while above and above[-1][0].end <= event.start:
                own.append(_compute_self_time(*above.pop()))
            if above:
                above[-1][1].append(event.seconds)
            above.append((event, []))
        own += [_compute_self_time(*one) for one in above]
    return rank_work(_sum_by_name(own))


def _compute_self_time(event: TraceEvent, callees: list[float]) -> tuple[str, str, float]:
    return event.name, classify_operator(event.name), max(event.seconds - sum(callees), 0.0)


def _collect_phase_spans(events: list[TraceEvent]) -> dict[str, list[TimeSpan]]:
    """The spans of each phase; backward is from the first to the last node of the autograd engine in each pass."""
    spans: dict[str, list[TimeSpan]] = defaultdict(list)
    annotations = [event for event in events if event.kind == "user_annotation"]
    for event in annotations:
        if event.name.startswith(RANGE_PREFIX):
            spans[event.name.removeprefix(RANGE_PREFIX)].append(event.span)
    if "optimizer" not in spans and (steps := [e.span for e in annotations if e.name.startswith(OPTIMIZER)]):
        spans["optimizer"] = steps
    engine = [event.span for event in events if event.kind == "cpu_op" and event.name.startswith(ENGINE)]
    if engine and "backward" not in spans:
        cuts = sorted(start for some in spans.values() for start, _ in some)
        passes: dict[int, list[TimeSpan]] = defaultdict(list)
        for span in engine:
            passes[bisect.bisect_right(cuts, span[0])].append(span)
        spans["backward"] = [(min(s for s, _ in some), max(e for _, e in some)) for some in passes.values()]
    return dict(spans)


def _build_phases(
    spans: Mapping[str, list[TimeSpan]], works: list[TraceEvent], calls: list[TraceEvent]
) -> Iterator[Phase]:
    """Phases in the order in which they begin; without a device only host seconds are known."""
    busy = SpanCoverage(work.span for work in works)
    launched = _index_launches(calls)
    for name in sorted(spans, key=lambda name: min(spans[name])):
        cover = SpanCoverage(spans[name])
        phase = Phase(name, len(spans[name]), sum(end - start for start, end in cover.spans))
        if not works:
            yield phase
            continue
        device = sum(
            work.seconds
            for work in works
            if (call := launched.get(work.args.get("correlation"))) and cover.measure_overlap(*call.span) > 0
        )
        idle = sum(end - start - busy.measure_overlap(start, end) for start, end in cover.spans)
        yield Phase(name, phase.num, phase.host_seconds, device, idle)


def _index_launches(calls: list[TraceEvent]) -> dict[Any, TraceEvent]:
    """Calls of the host by correlation number, which they share with the work that they launch."""
    return {call.args["correlation"]: call for call in calls if "correlation" in call.args}


def _build_device_times(
    works: list[TraceEvent], calls: list[TraceEvent], waits: SpanCoverage, names: Mapping[int, str]
) -> Iterator[DeviceTime]:
    by_device: dict[int, list[TraceEvent]] = defaultdict(list)
    for work in works:
        by_device[int(work.args.get("device", 0))].append(work)
    launched = _index_launches(calls)
    for index, some in sorted(by_device.items()):
        gaps: list[float] = []
        host_bound, reached = 0.0, None
        for work in sorted(some, key=lambda one: one.start):
            if reached is not None and work.start > reached:
                gaps.append(work.start - reached)
                call = launched.get(work.args.get("correlation"))
                late = min(work.start, call.end) if call else reached
                host_bound += max(late - reached, 0.0) - waits.measure_overlap(reached, late)
            reached = max(work.end, reached if reached is not None else work.end)
        yield DeviceTime(
            index,
            names.get(index),
            sum(end - start for start, end in SpanCoverage(work.span for work in some).spans),
            build_gap_histogram(gaps),
            max(gaps, default=0.0),
            host_bound if launched else None,
        )


def _get_device_names(trace: Mapping[str, Any]) -> dict[int, str]:
    return {one["id"]: one["name"] for one in trace.get("deviceProperties") or () if "id" in one and "name" in one}


def _build_transfers(works: list[TraceEvent]) -> tuple[Transfer, ...]:
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for work in works:
        if work.kind != "kernel":
            direction = DIRECTION.search(work.name)
            name = "memory set" if work.kind == "gpu_memset" else direction.group() if direction else work.name
            found[name].append(work)
    transfers: list[Transfer] = []
    for name, some in found.items():
        sizes = [work.args.get("bytes") for work in some]
        known = [int(size) for size in sizes if size is not None]
        num_bytes = sum(known) if len(known) == len(sizes) else None
        transfers.append(Transfer(name, len(some), sum(work.seconds for work in some), num_bytes))
    return tuple(sorted(transfers, key=lambda one: -one.seconds))


def _build_memory_curve(
    raw: Iterable[Mapping[str, Any]], start: float, *, on_device: bool, parts: Mapping[str, int]
) -> MemoryCurve | None:
    """Allocated bytes over time: of the device if one was used, else of the host since the profiler started."""
    points: list[tuple[float, int]] = []
    for one in raw:
        args: Mapping[str, Any] = one.get("args") or {}
        if one.get("name") == "[memory]" and (args.get("Device Type") != 0) == on_device and "Total Allocated" in args:
            points.append((one["ts"] * MICRO - start, int(args["Total Allocated"])))
    points = sorted(point for point in points if point[0] >= 0)
    if not points:
        return None
    peak = max(size for _, size in points)
    rest = peak - sum(parts.values()) if on_device else peak
    named = {**parts, REST: rest} if parts else {}
    return MemoryCurve("device" if on_device else "host", tuple(downsample_points(points)), peak, not on_device, named)
