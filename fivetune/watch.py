"""The live view: what runs are doing now, from the ends of their files.

In: a run directory or a folder of them. Out: a View per run, and a frame of text for a terminal. A run of a hundred
thousand steps costs no more than one of a hundred: only the last records are read, and a few places in between for
the curve of the loss.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fivetune import rundir
from fivetune.errors import FiveTuneError
from fivetune.report.wording import UNKNOWN, amount, duration, fixed, percent, whole
from fivetune.types import Run
from fivetune.values import dig, number

TAIL_BYTES = 64 * 2**10  # about 150 steps
SAMPLE_BYTES = 2 * 2**10  # about five steps
MAX_DEPTH = 4  # folders below the given one
MAX_NAME = 60  # characters
NUM_RECENT = 50  # steps that speeds are of
SECONDS_RECENT = 30.0  # that utilisation is of
SECONDS_BETWEEN_VERDICTS = 10.0
SECONDS_UNTIL_DOUBTED = 5.0  # without a new record before a running run is looked for
ACTIVE = ("preparing", "running")
STYLES = {
    "finished": "green", "preparing": "cyan", "running": "cyan", "pruned": "dim", "interrupted": "yellow",
    "failed": "red",
}  # fmt: skip
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class View:
    """One run as it stands; what is not known is None.

    Args:
        losses: of the whole run, evenly spread, oldest first.
        utilisation: 0-1, of the run's accelerators, or of the host's cores where it has none (`on_gpu`).
        seconds_left: steps and evaluations that are still to come.
        verdict: what limits or spoils the run now, in a sentence.
    """

    name: str
    state: str
    why: str = ""
    step: int | None = None
    num_steps: int | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    metric: str = ""
    score: float | None = None
    score_step: int | None = None
    utilisation: float | None = None
    on_gpu: bool = False
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    seconds: float | None = None
    verdict: str = ""


@dataclass(slots=True)
class Watcher:
    """Looks at the runs of a folder again and again; what has not changed is not read again."""

    folder: Path
    _views: dict[Path, tuple[Any, View]] = field(default_factory=dict)
    _verdicts: dict[Path, tuple[float, str]] = field(default_factory=dict)

    def look(self) -> list[View]:
        """All runs: the active ones first, then the others, each by name."""
        views = [self._view(path) for path in run_folders(self.folder)]
        return sorted(views, key=lambda view: (view.state not in ACTIVE, view.name))

    def _view(self, path: Path) -> View:
        mark = _mark(path)
        known = self._views.get(path)
        if known and known[0] == mark:
            is_over, is_fresh = known[1].state not in ACTIVE, time.time() - mark[0] < SECONDS_UNTIL_DOUBTED
            if is_over or is_fresh:
                return known[1]
        name = str(path.relative_to(self.folder)) if path != self.folder else path.resolve().name
        try:
            view = view_of(path, name=name, verdict=self._verdict(path))
        except (FiveTuneError, OSError) as error:
            view = View(name, "unreadable", why=str(error))
        self._views[path] = (mark, view)
        return view

    def _verdict(self, path: Path) -> str:
        made, verdict = self._verdicts.get(path, (float("-inf"), ""))
        if time.monotonic() - made > SECONDS_BETWEEN_VERDICTS:
            verdict = verdict_of(path)
            self._verdicts[path] = (time.monotonic(), verdict)
        return verdict


def run_folders(folder: Path) -> list[Path]:
    """The run directories in a folder, or the folder itself if it is one."""
    return sorted(_runs_below(folder, MAX_DEPTH))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    if (folder / rundir.CONFIG).is_file():
        yield folder
    elif depth:
        with suppress(OSError), os.scandir(folder) as entries:  # unreadable, or gone meanwhile
            inner = [Path(entry) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            for one in inner:
                yield from _runs_below(one, depth - 1)


def view_of(path: Path, *, name: str, verdict: str = "") -> View:
    """One run, read now. Raises RunDirError for a damaged file."""
    status, config = rundir.read_status(path), rundir.read_config(path)
    steps = last_records(path / rundir.STEPS)
    last = steps[-1] if steps else {}
    state, step = str(status.get("state") or "preparing"), last.get("step", status.get("step"))
    num_steps, best = status.get("num_steps"), status.get("best") or {}
    seconds, tokens = _mean(steps, "step_seconds"), [_mean(steps, f"num_{side}_tokens") for side in ("input", "target")]
    utilisation, on_gpu = _utilisation(path)
    return View(
        name=name, state=state, why=str(status.get("why") or ""), step=step, num_steps=num_steps,
        loss=number(last.get("loss")), losses=tuple(_losses(path / rundir.STEPS)),
        metric=str(best.get("metric") or ""), score=number(best.get("score")), score_step=best.get("step"),
        utilisation=utilisation if state in ACTIVE else None, on_gpu=on_gpu,
        tokens_per_second=sum(known) / seconds if seconds and len(known := [n for n in tokens if n]) == 2 else None,
        seconds_left=_seconds_left(path, config, step, num_steps, seconds) if state in ACTIVE else None,
        seconds=number(status.get("seconds")), verdict=verdict,
    )  # fmt: skip


def last_records(path: Path, *, num_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The records in the last bytes of a JSONL file, torn lines left out; [] if there is no file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return _records(lines[1:] if start else lines)


def sampled_records(path: Path, num: int) -> Iterator[list[dict[str, Any]]]:
    """A few neighbouring records at each of `num` evenly spread places of a JSONL file, in order."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        room = max(SAMPLE_BYTES, size // num)
        for start in range(0, size, room):
            file.seek(start)
            lines = file.read(SAMPLE_BYTES).split(b"\n")
            if records := _records(lines[1:] if start else lines):
                yield records


def _records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _losses(path: Path, num: int = 40) -> Iterator[float]:
    """The loss over the whole run: the mean of a few steps at each place."""
    for records in sampled_records(path, num):
        losses = [loss for one in records if (loss := number(one.get("loss"))) is not None]
        if losses:
            yield fmean(losses)


def _mean(steps: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [value for one in steps[-NUM_RECENT:] if (value := number(one.get(key))) is not None]
    return fmean(values) if values else None


def _seconds_left(
    path: Path, config: dict[str, Any], step: int | None, num_steps: int | None, seconds: float | None
) -> float | None:
    """Time of the steps and of the evaluations to come, as the last ones took it."""
    if step is None or num_steps is None or seconds is None:
        return None
    every = dig(config, "eval", "every_steps") or ceil(num_steps / 10)
    evals = last_records(path / rundir.EVALS)
    each = number(evals[-1].get("seconds")) if evals else None
    return (num_steps - step) * seconds + (each or 0.0) * (ceil(num_steps / every) - step // every)


def _utilisation(path: Path) -> tuple[float | None, bool]:
    """Mean over the last seconds and the devices that the run uses; of the host's cores if there are none."""
    lines = _telemetry(path)
    newest = lines[-1]["seconds"] if lines else 0.0
    lines = [one for one in lines if newest - one["seconds"] <= SECONDS_RECENT]
    devices = [
        used for one in lines for device in one.get("devices") or ()
        if device.get("ours") is not False and (used := number(device.get("utilisation"))) is not None
    ]  # fmt: skip
    if devices:
        return fmean(devices), True
    cores = [fmean(used) for one in lines if (used := one.get("core_utilisation"))]
    return (fmean(cores) if cores else None), False


def _telemetry(path: Path) -> list[dict[str, Any]]:
    """The last records of all processes of a run, in the order of time."""
    lines = [one for file in path.glob("telemetry*.jsonl") for one in last_records(file) if number(one.get("seconds"))]
    return sorted(lines, key=lambda one: one["seconds"])


def verdict_of(path: Path) -> str:
    """What the rules of `fivetune diagnose` say about the last part of a run; "" if nothing."""
    from fivetune.telemetry.verdict import verdicts_of

    try:
        status = rundir.read_status(path)
        found = verdicts_of(Run(
            name=path.name, config=rundir.read_config(path), machine=rundir.read_machine(path), status=status,
            data=rundir.read_data(path), steps=last_records(path / rundir.STEPS),
            evals=last_records(path / rundir.EVALS), predictions={}, warnings=list(status.get("warnings", ())),
            telemetry=_telemetry(path),
        ))  # fmt: skip
    except FiveTuneError as error:
        return str(error)
    return found[0].says if found else ""


def frame(views: Sequence[View], *, width: int, height: int | None = None) -> RenderableType:
    """All runs as text. Where `height` lines do not hold them, runs that are over take one line, the last ones none."""
    blocks = [_lines(view, width, folded=len(views) > 1) for view in views]
    room = max(height - 2, 2) if height else sum(map(len, blocks))
    if sum(map(len, blocks)) > room:
        blocks = [lines if view.state in ACTIVE else lines[:1] for view, lines in zip(views, blocks, strict=True)]
    shown: list[Text] = []
    for index, lines in enumerate(blocks):
        if len(shown) + len(lines) > room - (index < len(blocks) - 1):
            shown.append(Text(f"and {len(blocks) - index} more", style="dim"))
            break
        shown += lines
    return Group(_headline(views), *(shown or [Text("no run yet")]))


def _headline(views: Sequence[View]) -> Text:
    counts = {state: sum(view.state == state for view in views) for state in (*ACTIVE, *STYLES, "unreadable")}
    told = ", ".join(f"{num} {state}" for state, num in counts.items() if num)
    return Text(f"{time.strftime('%H:%M:%S')}  {told}", style="dim")


def _lines(view: View, width: int, *, folded: bool = True) -> list[Text]:
    """One run in up to three lines: where it stands, its figures, its verdict (`folded`: cut to one line)."""
    end = duration(view.seconds) if view.seconds_left is None else f"{duration(view.seconds_left)} left"
    steps = done = UNKNOWN
    if view.step is not None and view.num_steps:
        steps, done = f"{whole(view.step)}/{whole(view.num_steps)}", f"{100 * view.step // view.num_steps} %"
    style = STYLES.get(view.state, "red")
    name = Text(view.name, style="bold")
    name.truncate(min(max(width - 52, 8), MAX_NAME), overflow="ellipsis", pad=True)
    lines = [Text.assemble(name, " ", (f"{view.state:<11}", style), f"{steps:>17}{done:>6}{end:>17}", no_wrap=True)]
    if view.losses or view.score is not None:
        lines.append(_figures(view, width))
    failed = view.state not in ("finished", *ACTIVE)
    if told := view.why if failed else view.verdict:
        lines.append(Text(f"  {told}", style=style if failed else "yellow", no_wrap=folded, overflow="ellipsis"))
    return lines


def _figures(view: View, width: int) -> Text:
    where = "gpu" if view.on_gpu else "cpu"
    score = f"{view.metric or 'score'} {fixed(view.score)} at step {whole(view.score_step)}"
    facts = [f"{amount(view.tokens_per_second)} tok/s"]
    if view.state in ACTIVE:
        facts.append(f"{where} {percent(view.utilisation, 0)}")
    told = "  ".join([f"loss {fixed(view.loss, 3)}", score if view.score is not None else "no score yet", *facts])
    curve = sparkline(view.losses, num=max(8, min(40, width - len(told) - 6)))
    return Text.assemble("  ", (curve, "cyan"), f"  {told}", no_wrap=True, overflow="ellipsis")


def sparkline(values: Sequence[float], *, num: int) -> str:
    """At most `num` blocks from the lowest value to the highest; each is the mean of its neighbours.

    >>> sparkline([4.0, 3.0, 2.0, 1.0], num=40), sparkline([1.0, 1.0], num=40), sparkline([8.0, 8.0, 1.0, 1.0], num=2)
    ('█▆▃▁', '▁▁', '█▁')
    """
    cuts = [len(values) * i // num for i in range(num + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(cuts) if high > low]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in means)


def _mark(path: Path) -> tuple[float, ...]:
    """Changes whenever the run wrote something; the newest time of all files first."""
    marks = []
    for name in (rundir.STATUS, rundir.STEPS, rundir.EVALS, rundir.TELEMETRY):
        try:
            found = (path / name).stat()
            marks += [found.st_mtime, float(found.st_size)]
        except OSError:
            marks += [0.0, -1.0]
    return (max(marks[::2]), *marks)
