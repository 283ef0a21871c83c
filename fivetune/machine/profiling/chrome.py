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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
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
    sum_by_class,
    sum_work,
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
    events = _parse_events(trace["traceEvents"])
    steps = [event for event in events if event.kind == "user_annotation" and event.name.startswith(STEP)]
    start, end = _find_window(steps or events)

    works: list[TraceEvent] = []
    operators: list[TraceEvent] = []
    calls: list[TraceEvent] = []
    waits: list[TraceEvent] = []
    annotations: list[TraceEvent] = []
    for event in events:
        # a device works behind the host: it ends the work of the last step after the step's range
        if event.start < start or (event.start >= end and event.kind not in DEVICE_CATEGORIES):
            continue
        if event.kind in DEVICE_CATEGORIES:
            works.append(event)
        elif event.kind == "cpu_op":
            operators.append(event)
        elif event.kind in CALLS:
            calls.append(event)
            if SYNCHRONISE.search(event.name):
                waits.append(event)
        elif event.kind == "user_annotation":
            annotations.append(event)
    if not works and not operators:
        raise DataError("the trace holds neither kernels nor operators. Profile at least one step.")
    for work in works:
        end = max(end, work.end)
    seconds = end - start
    spans = _collect_phase_spans(annotations, operators)
    # calls of the host by correlation number, which they share with the work that they launch
    launched = {call.args["correlation"]: call for call in calls if "correlation" in call.args}
    if works:
        ranked = sum_work((work.name, classify_kernel(work.name), work.seconds, 1) for work in works)
    else:
        ranked = _rank_operators(operators)
    summary = TraceSummary(
        source="torch.profiler",
        measures="kernels" if works else "operators",
        window_seconds=seconds,
        num_steps=len(steps) or None,
        classes=sum_by_class(ranked),
        top=ranked[:NUM_TOP],
        phases=tuple(_build_phases(spans, works, launched)),
        calls=sum_work((call.name, "call", call.seconds, 1) for call in calls)[:NUM_TOP],
        memory=_build_memory_curve(trace["traceEvents"], start, on_device=bool(works), parts=parts or {}),
        plain_step_seconds=plain_step_seconds,
        profiled_step_seconds=seconds / len(steps) if steps else None,
    )
    if not works:
        busy = SpanCoverage(operator.span for operator in operators).measure_overlap(start, end)
        return replace(summary, outside_seconds=seconds - busy)
    # gaps in which the host waits, for a device or for data, are not the fault of slow launches
    waiting = SpanCoverage([wait.span for wait in waits] + spans.get("data", []))
    return replace(
        summary,
        devices=tuple(_build_device_times(works, launched, waiting, trace.get("deviceProperties") or ())),
        transfers=_build_transfers(works),
        num_launches=sum(bool(LAUNCH.search(call.name)) for call in calls),
        num_synchronisations=len(waits),
        synchronisation_seconds=sum(wait.seconds for wait in waits),
    )


def _parse_events(raw: Iterable[Mapping[str, Any]]) -> list[TraceEvent]:
    events: list[TraceEvent] = []
    for one in raw:
        if one.get("ph") == "X" and "dur" in one:
            start = one["ts"] * MICRO
            end = start + one["dur"] * MICRO
            kind, name = one.get("cat", ""), str(one["name"])
            events.append(TraceEvent(kind, name, start, end, one.get("tid"), one.get("args") or {}))
    return events


def _find_window(events: list[TraceEvent]) -> TimeSpan:
    if not events:
        raise DataError("the trace is empty. Profile at least one step.")
    return min(event.start for event in events), max(event.end for event in events)


def _rank_operators(operators: list[TraceEvent]) -> tuple[Work, ...]:
    """Rank operators by self time: the time of the operators that they call is subtracted, so all counts once."""
    own = {id(event): event.seconds for event in operators}
    callers: dict[Any, list[TraceEvent]] = defaultdict(list)  # of the current event, by thread
    for event in sorted(operators, key=lambda event: (event.start, -event.end)):
        above = callers[event.thread]
        while above and above[-1].end <= event.start:
            above.pop()
        if above:
            own[id(above[-1])] -= event.seconds
        above.append(event)
    rows: list[tuple[str, str, float, int]] = []
    for event in operators:
        # rounded times of the trace can give the called operators more than their caller
        rows.append((event.name, classify_operator(event.name), max(own[id(event)], 0.0), 1))
    return sum_work(rows)


def _collect_phase_spans(annotations: list[TraceEvent], operators: list[TraceEvent]) -> dict[str, list[TimeSpan]]:
    """The spans of each phase; backward is from the first to the last node of the autograd engine in each pass."""
    spans: dict[str, list[TimeSpan]] = defaultdict(list)
    optimizer_steps: list[TimeSpan] = []
    for event in annotations:
        if event.name.startswith(RANGE_PREFIX):
            spans[event.name.removeprefix(RANGE_PREFIX)].append(event.span)
        elif event.name.startswith(OPTIMIZER):
            optimizer_steps.append(event.span)
    if optimizer_steps and "optimizer" not in spans:
        spans["optimizer"] = optimizer_steps
    engine = [event.span for event in operators if event.name.startswith(ENGINE)]
    if not engine or "backward" in spans:
        return spans

    # the engine's nodes between two starts of other phases are one backward pass
    cuts: list[float] = []
    for some in spans.values():
        cuts += [start for start, _ in some]
    cuts.sort()
    passes: dict[int, TimeSpan] = {}
    for start, end in engine:
        place = bisect.bisect_right(cuts, start)
        first, last = passes.get(place, (start, end))
        passes[place] = (min(first, start), max(last, end))
    spans["backward"] = list(passes.values())
    return spans


def _build_phases(
    spans: Mapping[str, list[TimeSpan]], works: list[TraceEvent], launched: Mapping[Any, TraceEvent]
) -> Iterator[Phase]:
    """Phases in the order in which they begin; without a device only host seconds are known."""
    busy = SpanCoverage(work.span for work in works)
    for name in sorted(spans, key=lambda name: min(spans[name])):
        cover = SpanCoverage(spans[name])
        if not works:
            yield Phase(name, len(spans[name]), cover.seconds)
            continue
        device_seconds = 0.0
        for work in works:
            # work belongs to the phase of its launch: the device computes it when the host is phases ahead
            call = launched.get(work.args.get("correlation"))
            if call and cover.measure_overlap(*call.span) > 0:
                device_seconds += work.seconds
        idle = 0.0
        for start, end in cover.spans:
            idle += end - start - busy.measure_overlap(start, end)
        yield Phase(name, len(spans[name]), cover.seconds, device_seconds, idle)


def _build_device_times(
    works: list[TraceEvent],
    launched: Mapping[Any, TraceEvent],
    waiting: SpanCoverage,
    properties: Iterable[Mapping[str, Any]],
) -> Iterator[DeviceTime]:
    names = {device.get("id"): device.get("name") for device in properties}
    by_device: dict[int, list[TraceEvent]] = defaultdict(list)
    for work in works:
        by_device[int(work.args.get("device", 0))].append(work)
    for index, some in sorted(by_device.items()):
        some.sort(key=lambda work: work.start)
        gaps: list[float] = []
        host_bound = 0.0
        reached = some[0].end
        for work in some:
            if work.start > reached:
                gaps.append(work.start - reached)
                # the host is late where its launch ends after the previous work
                call = launched.get(work.args.get("correlation"))
                late = min(work.start, call.end) if call else reached
                host_bound += max(late - reached, 0.0) - waiting.measure_overlap(reached, late)
            reached = max(work.end, reached)
        yield DeviceTime(
            index,
            names.get(index),
            SpanCoverage(work.span for work in some).seconds,
            build_gap_histogram(gaps),
            max(gaps, default=0.0),
            host_bound if launched else None,
        )


def _build_transfers(works: list[TraceEvent]) -> tuple[Transfer, ...]:
    by_name: dict[str, list[TraceEvent]] = defaultdict(list)
    for work in works:
        if work.kind == "gpu_memset":
            by_name["memory set"].append(work)
        elif work.kind == "gpu_memcpy":
            direction = DIRECTION.search(work.name)
            by_name[direction.group() if direction else work.name].append(work)
    transfers: list[Transfer] = []
    for name, some in by_name.items():
        seconds = sum(work.seconds for work in some)
        num_bytes: int | None = None
        if all(work.args.get("bytes") is not None for work in some):
            num_bytes = sum(int(work.args["bytes"]) for work in some)
        transfers.append(Transfer(name, len(some), seconds, num_bytes))
    return tuple(sorted(transfers, key=lambda transfer: -transfer.seconds))


def _build_memory_curve(
    raw: Iterable[Mapping[str, Any]], start: float, *, on_device: bool, parts: Mapping[str, int]
) -> MemoryCurve | None:
    """Allocated bytes over time: of the device if one was used, else of the host since the profiler started."""
    points: list[tuple[float, int]] = []
    for one in raw:
        if one.get("name") != "[memory]":
            continue
        args: Mapping[str, Any] = one.get("args") or {}
        is_device = args.get("Device Type") != 0
        time = one["ts"] * MICRO - start
        if is_device == on_device and "Total Allocated" in args and time >= 0:
            points.append((time, int(args["Total Allocated"])))
    if not points:
        return None
    points.sort()
    peak = max(size for _, size in points)
    curve = tuple(downsample_points(points))
    if not on_device:
        return MemoryCurve("host", curve, peak, True, {**parts, REST: peak} if parts else {})
    rest = peak - sum(parts.values())
    return MemoryCurve("device", curve, peak, False, {**parts, REST: rest} if parts else {})
