"""A trace file of torch.profiler (Chrome's JSON format, plain or gzip) -> TraceSummary, without torch.

The file counts in microseconds, the summary in seconds. Steps are the ranges `ProfilerStep#N`; phases are the ranges
`fivetune.<phase>`, the optimizer's own, and the time in which the autograd engine works (backward).
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune.errors import DataError
from fivetune.telemetry.kernels import kernel_class, operator_class
from fivetune.telemetry.trace import (
    NUM_TOP,
    REST,
    Cover,
    DeviceTime,
    Memory,
    Phase,
    Span,
    TraceSummary,
    Transfer,
    Work,
    by_class,
    gap_table,
    ranked,
    thinned,
)

MICRO = 1e-6
PREFIX = "fivetune."
STEP, ENGINE, OPTIMIZER = "ProfilerStep#", "autograd::engine::evaluate_function", "Optimizer.step#"
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
LAUNCH = re.compile(r"Launch(Cooperative)?Kernel|GraphLaunch")
SYNCHRONISE = re.compile(r"Synchronize|^cudaMemcpy(_v\d+)?$")
DIRECTION = re.compile(r"[HDPA]to[HDPA]")


@dataclass(frozen=True, slots=True)
class Event:
    """A range of the trace, in seconds since the trace's own zero."""

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
    def span(self) -> Span:
        return self.start, self.end


def read_trace(path: Path) -> dict[str, Any]:
    """The parsed file. Raises DataError if it is no trace."""
    try:
        raw = path.read_bytes()
        trace = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a trace: {error}. Give a file that torch.profiler exported "
                        "(export_chrome_trace).") from None  # fmt: skip
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise DataError(f"{path}: is not a trace: it has no list traceEvents. Give a file that torch.profiler exported "
                        "(export_chrome_trace).")  # fmt: skip
    return trace


def summarise(
    trace: Mapping[str, Any],
    *,
    parts: Mapping[str, int] | None = None,
    plain_step_seconds: float | None = None,
) -> TraceSummary:
    """What a parsed trace says.

    Args:
        parts: bytes of memory by category, as counted from the tensors; the rest of the peak is added.
        plain_step_seconds: mean of the same steps without profiler.

    Raises DataError where it holds neither device work nor operators.
    """
    events = list(_ranges(trace["traceEvents"]))
    steps = [event for event in events if event.kind == "user_annotation" and event.name.startswith(STEP)]
    start, end = _extent(steps or events)
    events = [event for event in events if start <= event.start < end or (event.kind in DEVICE_WORK and steps)]
    works = [event for event in events if event.kind in DEVICE_WORK and event.start >= start]
    if works:
        end = max(end, *(work.end for work in works))
    operators = [event for event in events if event.kind == "cpu_op"]
    if not works and not operators:
        raise DataError("the trace holds neither kernels nor operators. Profile at least one step.")
    calls = [event for event in events if event.kind in CALLS]
    host = _host_work(operators) if not works else _names(works, kernel_class)
    seconds, memory = end - start, _memory(trace["traceEvents"], start, on_device=bool(works), parts=parts or {})
    spans = _phase_spans(events)
    waits = Cover([call.span for call in calls if SYNCHRONISE.search(call.name)] + spans.get("data", []))
    synchronised = [call for call in calls if SYNCHRONISE.search(call.name)]
    return TraceSummary(
        source="torch.profiler",
        measures="kernels" if works else "operators",
        window_seconds=seconds,
        num_steps=len(steps) or None,
        classes=by_class(host),
        top=host[:NUM_TOP],
        outside_seconds=None if works else seconds - Cover(one.span for one in operators).seconds(start, end),
        devices=tuple(_devices(works, calls, waits, _device_names(trace))),
        phases=tuple(_phases(spans, works, calls)),
        calls=ranked(_counted((call.name, "call", call.seconds) for call in calls))[:NUM_TOP],
        transfers=_transfers(works),
        num_launches=sum(bool(LAUNCH.search(call.name)) for call in calls) if works else None,
        num_synchronisations=len(synchronised) if works else None,
        synchronisation_seconds=sum(call.seconds for call in synchronised) if works else None,
        memory=memory,
        plain_step_seconds=plain_step_seconds,
        profiled_step_seconds=seconds / len(steps) if steps else None,
    )


def _ranges(raw: Iterable[Mapping[str, Any]]) -> Iterator[Event]:
    for one in raw:
        if one.get("ph") == "X" and "dur" in one:
            start = one["ts"] * MICRO
            end = start + one["dur"] * MICRO
            yield Event(one.get("cat", ""), str(one["name"]), start, end, one.get("tid"), one.get("args") or {})


def _extent(events: list[Event]) -> Span:
    if not events:
        raise DataError("the trace is empty. Profile at least one step.")
    return min(event.start for event in events), max(event.end for event in events)


def _counted(works: Iterable[tuple[str, str, float]]) -> dict[tuple[str, str], tuple[float, int]]:
    """(name, kind, seconds) each -> (seconds, number) by name and kind."""
    found: dict[tuple[str, str], tuple[float, int]] = {}
    for name, kind, seconds in works:
        before, num = found.get((name, kind), (0.0, 0))
        found[name, kind] = (before + seconds, num + 1)
    return found


def _names(works: list[Event], classify: Any) -> tuple[Work, ...]:
    return ranked(_counted((work.name, classify(work.name), work.seconds) for work in works))


def _host_work(operators: list[Event]) -> tuple[Work, ...]:
    """Operators with the time that was spent in them and in no operator that they called: nothing counts twice."""
    by_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in operators:
        by_thread[event.thread].append(event)
    own: list[tuple[str, str, float]] = []
    for thread in by_thread.values():
        above: list[tuple[Event, list[float]]] = []  # callers of the event at hand, with the seconds of their callees
        for event in sorted(thread, key=lambda one: (one.start, -one.end)):
            while above and above[-1][0].end <= event.start:
                own.append(_own_time(*above.pop()))
            if above:
                above[-1][1].append(event.seconds)
            above.append((event, []))
        own += [_own_time(*one) for one in above]
    return ranked(_counted(own))


def _own_time(event: Event, callees: list[float]) -> tuple[str, str, float]:
    return event.name, operator_class(event.name), max(event.seconds - sum(callees), 0.0)


def _phase_spans(events: list[Event]) -> dict[str, list[Span]]:
    """The spans of each phase; backward is where the autograd engine works, from first to last node of each pass."""
    spans: dict[str, list[Span]] = defaultdict(list)
    annotations = [event for event in events if event.kind == "user_annotation"]
    for event in annotations:
        if event.name.startswith(PREFIX):
            spans[event.name.removeprefix(PREFIX)].append(event.span)
    if "optimizer" not in spans and (steps := [e.span for e in annotations if e.name.startswith(OPTIMIZER)]):
        spans["optimizer"] = steps
    engine = [event.span for event in events if event.kind == "cpu_op" and event.name.startswith(ENGINE)]
    if engine and "backward" not in spans:
        cuts = sorted(start for some in spans.values() for start, _ in some)
        passes: dict[int, list[Span]] = defaultdict(list)
        for span in engine:
            passes[bisect.bisect_right(cuts, span[0])].append(span)
        spans["backward"] = [(min(s for s, _ in some), max(e for _, e in some)) for some in passes.values()]
    return dict(spans)


def _phases(spans: Mapping[str, list[Span]], works: list[Event], calls: list[Event]) -> Iterator[Phase]:
    """In the order in which they begin; without a device there are only host seconds."""
    busy = Cover(work.span for work in works)
    launched = _launches(calls)
    for name in sorted(spans, key=lambda name: min(spans[name])):
        cover = Cover(spans[name])
        phase = Phase(name, len(spans[name]), sum(end - start for start, end in cover.spans))
        if not works:
            yield phase
            continue
        device = sum(
            work.seconds
            for work in works
            if (call := launched.get(work.args.get("correlation"))) and cover.seconds(*call.span) > 0
        )
        idle = sum(end - start - busy.seconds(start, end) for start, end in cover.spans)
        yield Phase(name, phase.num, phase.host_seconds, device, idle)


def _launches(calls: list[Event]) -> dict[Any, Event]:
    """Calls of the host by the number that they share with what they launched."""
    return {call.args["correlation"]: call for call in calls if "correlation" in call.args}


def _devices(works: list[Event], calls: list[Event], waits: Cover, names: Mapping[int, str]) -> Iterator[DeviceTime]:
    by_device: dict[int, list[Event]] = defaultdict(list)
    for work in works:
        by_device[int(work.args.get("device", 0))].append(work)
    launched = _launches(calls)
    for index, some in sorted(by_device.items()):
        gaps, host_bound, reached = [], 0.0, None
        for work in sorted(some, key=lambda one: one.start):
            if reached is not None and work.start > reached:
                gaps.append(work.start - reached)
                call = launched.get(work.args.get("correlation"))
                late = min(work.start, call.end) if call else reached
                host_bound += max(late - reached, 0.0) - waits.seconds(reached, late)
            reached = max(work.end, reached if reached is not None else work.end)
        yield DeviceTime(
            index, names.get(index), sum(end - start for start, end in Cover(work.span for work in some).spans),
            gap_table(gaps), max(gaps, default=0.0), host_bound if launched else None,
        )  # fmt: skip


def _device_names(trace: Mapping[str, Any]) -> dict[int, str]:
    return {one["id"]: one["name"] for one in trace.get("deviceProperties") or () if "id" in one and "name" in one}


def _transfers(works: list[Event]) -> tuple[Transfer, ...]:
    found: dict[str, list[Event]] = defaultdict(list)
    for work in works:
        if work.kind != "kernel":
            direction = DIRECTION.search(work.name)
            name = "memory set" if work.kind == "gpu_memset" else direction.group() if direction else work.name
            found[name].append(work)
    transfers = []
    for name, some in found.items():
        sizes = [work.args.get("bytes") for work in some]
        known = [int(size) for size in sizes if size is not None]
        num_bytes = sum(known) if len(known) == len(sizes) else None
        transfers.append(Transfer(name, len(some), sum(work.seconds for work in some), num_bytes))
    return tuple(sorted(transfers, key=lambda one: -one.seconds))


def _memory(
    raw: Iterable[Mapping[str, Any]], start: float, *, on_device: bool, parts: Mapping[str, int]
) -> Memory | None:
    """Allocated bytes over time: of the device if one took part, else of the host since the profiler began."""
    points = []
    for one in raw:
        args = one.get("args") or {}
        if one.get("name") == "[memory]" and (args.get("Device Type") != 0) == on_device and "Total Allocated" in args:
            points.append((one["ts"] * MICRO - start, int(args["Total Allocated"])))
    points = sorted(point for point in points if point[0] >= 0)
    if not points:
        return None
    peak = max(size for _, size in points)
    rest = peak - sum(parts.values()) if on_device else peak
    named = {**parts, REST: rest} if parts else {}
    return Memory("device" if on_device else "host", tuple(thinned(points)), peak, not on_device, named)
