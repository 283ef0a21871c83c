"""The live view of runs, read from the ends of their files.

In: a run directory or a folder of them. Out: a View per run, and a frame of text for a terminal. The cost does not
grow with the number of steps: of steps and telemetry it reads only the last records, and samples of earlier steps for
the loss curve. The few evaluations are all read, because the best one may be any of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil, inf
from pathlib import Path
from statistics import fmean

from pydantic_core import from_json
from rich.console import Group, RenderableType
from rich.text import Text

from fivetune import rundir
from fivetune.errors import FiveTuneError
from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_duration,
    format_large_count,
    format_percent,
    format_significant,
)
from fivetune.reading.report.run.scores import choose_best_eval, compute_score_interval, find_main_score_key
from fivetune.redaction import name_invisible
from fivetune.rundir.activity import Activity, read_activity
from fivetune.rundir.damage import Damage
from fivetune.rundir.figures import count_tokens, list_device_series
from fivetune.rundir.layout import ACTIVITY, TELEMETRY_FILES
from fivetune.rundir.parse import parse_records
from fivetune.rundir.reader import read_plan
from fivetune.rundir.records import Run, StepRecord, TelemetryRecord
from fivetune.types import JsonTable, JsonValue
from fivetune.values import select_finite

TAIL_BYTES = 64 * 2**10  # about 150 steps
SAMPLE_BYTES = 2 * 2**10  # about five steps
MAX_DEPTH = 4  # folders below the given one
MAX_NAME = 60  # characters
NUM_SAMPLES = 40  # of the loss curve
NUM_RECENT_STEPS = 50  # window of the mean speed
RECENT_SECONDS = 30.0  # window of the mean utilisation
VERDICT_INTERVAL_SECONDS = 10.0
STALE_SECONDS = 5.0  # time without a new record after which the process of a run is checked
ACTIVE = ("preparing", "running")
MAX_PLAIN_LOSS = 1000.0  # nats: a larger one is of a training that diverges, and its decimals say nothing
STYLES = {
    "finished": "green", "preparing": "cyan", "running": "cyan", "pruned": "dim", "interrupted": "yellow",
    "failed": "red",
}  # fmt: skip
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class View:
    """The present state of one run; unknown values are None.

    Args:
        losses: evenly spaced losses of the whole run, oldest first.
        utilisation: mean utilisation (0-1) of the run's accelerators, or of the host's cores without one.
        on_gpu: whether `utilisation` is of accelerators.
        seconds_left: seconds of the remaining steps and evaluations.
        verdict: message of the first verdict of the diagnosis.
        is_bad: whether the verdict says that the training failed its goal.
        interval: 95 % interval of the score.
        activity: what an active run does instead of training, such as evaluating, and how far it is.
        run: what was read of the run, without steps, telemetry and predictions.
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
    is_bad: bool = False
    interval: tuple[float, float] | None = None
    activity: Activity | None = None
    run: Run | None = None


Marked = tuple[tuple[float, ...], View]
"""Times and sizes of a run's files, and the view that was read of them."""

Timed = tuple[float, tuple[str, bool]]
"""The time of a verdict, its message, and whether it is bad."""


@dataclass(slots=True)
class Watcher:
    """Reads the runs of a folder repeatedly, but only changed files."""

    folder: Path
    _views: dict[Path, Marked] = field(default_factory=dict[Path, Marked])
    _verdicts: dict[Path, Timed] = field(default_factory=dict[Path, Timed])

    def read_views(self) -> list[View]:
        """Return the views of all runs: active ones first, then the others, each by name."""
        views = [view for view in self.read_folders().values() if view]
        return sorted(views, key=lambda view: (view.state not in ACTIVE, view.name))

    def read_folders(self, *, until: float = inf) -> dict[Path, View | None]:
        """Return the views of all runs by their folders; a view of a run without new records is the same object.

        Args:
            until: seconds of the monotonic clock after which runs that were never read before are left out, as None.
        """
        views: dict[Path, View | None] = {}
        for path in list_run_folders(self.folder):
            is_late = path not in self._views and time.monotonic() > until
            views[path] = None if is_late else self._read_view(path)
        return views

    def _read_view(self, path: Path) -> View:
        times: list[float] = []
        sizes: list[int] = []
        for name in (rundir.STEPS, rundir.EVALS, rundir.STATUS, rundir.TELEMETRY, ACTIVITY):
            try:
                found = os.stat(f"{path}/{name}")  # of hundreds of runs; a Path for each name would take as long again
            except OSError:
                times.append(0.0)
                sizes.append(-1)
            else:
                times.append(found.st_mtime)
                sizes.append(found.st_size)
        marks = (*times, *sizes)  # they change with every record
        known_marks, known = self._views.get(path, ((), None))
        if known and known_marks == marks:
            # An active run without a new record may have been killed, which only its lock tells.
            is_fresh = time.time() - max(times) < STALE_SECONDS
            if known.state not in ACTIVE or is_fresh:
                return known
        name = str(path.relative_to(self.folder)) if path != self.folder else path.resolve().name
        try:
            damage = Damage()
            run = _read_recent_run(path, name, damage)
            made, (verdict, is_bad) = self._verdicts.get(path, (float("-inf"), ("", False)))
            if time.monotonic() - made > VERDICT_INTERVAL_SECONDS:
                verdict, is_bad = _find_first_verdict(run, damage)
                self._verdicts[path] = (time.monotonic(), (verdict, is_bad))
            view = replace(_build_view(path, run, damage), verdict=verdict, is_bad=is_bad)
            if view.state in ACTIVE:
                # Steps and evaluations that are newer than the file tell that the activity is over.
                view = replace(view, activity=read_activity(path, after=max(times[:2])))
        except (FiveTuneError, OSError) as error:
            view = View(name, "unreadable", why=str(error))
        self._views[path] = (marks, view)
        return view


def list_run_folders(folder: Path) -> list[Path]:
    """List the run directories in a folder, or the folder itself if it is one."""
    return [Path(one) for one in sorted(_iter_run_folders(str(folder), MAX_DEPTH))]


def _iter_run_folders(folder: str, depth: int) -> Iterator[str]:
    if os.path.isfile(f"{folder}/{rundir.CONFIG}"):
        yield folder
    elif depth:
        with suppress(OSError), os.scandir(folder) as entries:  # unreadable or removed
            for entry in list(entries):
                if entry.is_dir() and not entry.name.startswith("."):
                    yield from _iter_run_folders(entry.path, depth - 1)


def _read_recent_run(path: Path, name: str, damage: Damage) -> Run:
    """Read a run without its predictions, and of steps and telemetry the last records only.

    Raises RunDirError for a damaged config.yaml.
    """
    status = rundir.read_status(path, damage)
    return Run(
        name=name,
        config=rundir.read_run_config(path),  # raises where the directory is damaged
        machine=rundir.read_machine(path, damage),
        status=status,
        data=rundir.read_data(path, damage),
        steps=parse_records(StepRecord, read_last_records(path / rundir.STEPS)),
        evals=rundir.read_evals(path, is_growing=status.state in ACTIVE, damage=damage),
        telemetry=_read_telemetry(path),
        plan=read_plan(path, damage),
    )


def _build_view(path: Path, run: Run, damage: Damage) -> View:
    """Build the View of a run that was read by `_read_recent_run`."""
    status = run.status
    plan = run.plan
    evals = run.evals
    recent = run.steps[-NUM_RECENT_STEPS:]
    seconds = fmean(step.step_seconds for step in recent) if recent else None
    tokens = fmean(map(count_tokens, recent)) if recent else None
    state = status.state
    if not state:  # a damaged status.json, or none yet
        state = "unreadable" if (path / rundir.STATUS).is_file() else "preparing"
    is_active = state in ACTIVE
    step = recent[-1].step if recent else status.step or None
    utilisation, on_gpu = _compute_utilisation(run.telemetry)
    metric = find_main_score_key(run)
    best = choose_best_eval(run)
    # The remaining steps and evaluations take as long as the last ones.
    left = None
    if is_active and plan and step is not None and seconds is not None:
        num_evals = ceil(plan.num_steps / plan.eval_every_steps) - step // plan.eval_every_steps
        left = (plan.num_steps - step) * seconds + (evals[-1].seconds if evals else 0.0) * num_evals
    # The curve is of means at evenly spaced places.
    losses: list[float] = []
    for records in sample_records(path / rundir.STEPS, NUM_SAMPLES):
        known = select_finite([record.get("loss") for record in records])
        if known:
            losses.append(fmean(known))
    return View(
        name=run.name,
        state=state,
        why=" ".join([status.why, *damage[:1]]).strip(),
        step=step,
        num_steps=plan.num_steps if plan else None,
        loss=recent[-1].loss if recent else None,
        losses=tuple(losses),
        metric=metric or "",
        score=get_score(best, metric) if metric else None,
        score_step=best.step if best else None,
        utilisation=utilisation if is_active else None,
        on_gpu=on_gpu,
        tokens_per_second=tokens / seconds if seconds and tokens else None,
        seconds_left=left,
        seconds=status.seconds,
        interval=compute_score_interval(best, metric) if best and metric else None,
        run=replace(run, steps=[], telemetry=[]),  # which would be most of the memory
    )


def read_last_records(path: Path, *, num_bytes: int = TAIL_BYTES) -> list[JsonTable]:
    """Read the records in the last bytes of a JSONL file, without partial lines; [] if there is no file."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
            file.seek(start)
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    return _parse_records(lines[1:] if start else lines)


def sample_records(path: Path, num: int) -> Iterator[list[JsonTable]]:
    """Yield a few neighbouring records at each of `num` evenly spaced places of a JSONL file, in order."""
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
            records = _parse_records(lines[1:] if start else lines)
            if records:
                yield records


def _parse_records(lines: Sequence[bytes]) -> list[JsonTable]:
    records: list[JsonTable] = []
    for line in lines:
        try:
            record: JsonValue = from_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _compute_utilisation(records: Sequence[TelemetryRecord]) -> tuple[float | None, bool]:
    """Compute the mean utilisation over the last seconds of the devices that the run uses, else of the host's cores."""
    newest = records[-1].seconds if records else 0.0
    records = [record for record in records if newest - record.seconds <= RECENT_SECONDS]
    values: list[float] = []
    for device in list_device_series(records):
        if device.is_used:
            values += select_finite([sample.utilisation for sample in device.samples])
    if values:
        return fmean(values), True
    cores = [fmean(record.core_utilisation) for record in records if record.core_utilisation]
    return (fmean(cores) if cores else None), False


def _read_telemetry(path: Path) -> list[TelemetryRecord]:
    """Read the last records of all processes of a run, in order of time."""
    tables: list[JsonTable] = []
    for file in path.glob(TELEMETRY_FILES):
        tables += read_last_records(file)
    return sorted(parse_records(TelemetryRecord, tables), key=lambda record: record.seconds)


def find_first_verdict(path: Path) -> tuple[str, bool]:
    """Return the damage of a run's files, else the first verdict on its last part or "", and whether it is bad."""
    damage = Damage()
    try:
        return _find_first_verdict(_read_recent_run(path, path.name, damage), damage)
    except FiveTuneError as error:
        return str(error), True


def _find_first_verdict(run: Run, damage: Damage) -> tuple[str, bool]:
    from fivetune.reading.diagnosis.rules import diagnose_run, is_severe

    try:
        found = diagnose_run(run)
    except FiveTuneError as error:
        return str(error), True
    if damage:
        return damage[0], False
    if not found:
        return "", False
    return found[0].message, is_severe(found[0])


def render_frame(views: Sequence[View], *, width: int, height: int | None = None) -> RenderableType:
    """Render all runs as text. Beyond `height` lines, finished runs take one line, the last ones none."""
    blocks = [_format_run_lines(view, width, folded=len(views) > 1) for view in views]
    num_lines = sum(map(len, blocks))
    room = max(height - 2, 2) if height else num_lines
    if num_lines > room:
        for view, lines in zip(views, blocks, strict=True):
            if view.state not in ACTIVE:
                del lines[1:]
    shown: list[Text] = []
    for index, lines in enumerate(blocks):
        is_last = index == len(blocks) - 1
        # Every block but the last leaves a line for the number of the others.
        if len(shown) + len(lines) > (room if is_last else room - 1):
            shown.append(Text(f"and {len(blocks) - index} more", style="dim"))
            break
        shown += lines
    states = [view.state for view in views]
    known = dict.fromkeys((*ACTIVE, *STYLES, "unreadable"))
    listed = ", ".join(f"{states.count(state)} {state}" for state in known if state in states)
    headline = Text(f"{time.strftime('%H:%M:%S')}  {listed}", style="dim")
    return Group(headline, *(shown or [Text("no run yet")]))


def _format_run_lines(view: View, width: int, *, folded: bool) -> list[Text]:
    """Format one run in up to four lines: progress, figures, activity, verdict (`folded`: shortened to one line)."""
    end = format_duration(view.seconds)
    if view.seconds_left is not None:
        end = f"{format_duration(view.seconds_left)} left"
    steps = done = UNKNOWN
    if view.step is not None and view.num_steps:
        steps = f"{format_count(view.step)}/{format_count(view.num_steps)}"
        done = f"{100 * view.step // view.num_steps} %"
    style = "red" if view.is_bad else STYLES.get(view.state, "red")
    name = Text(name_invisible(view.name), style="bold")
    name.truncate(min(max(width - 52, 8), MAX_NAME), overflow="ellipsis", pad=True)
    lines = [Text.assemble(name, " ", (f"{view.state:<11}", style), f"{steps:>17}{done:>6}{end:>17}", no_wrap=True)]
    if view.losses or view.score is not None:
        is_small = view.loss is None or view.loss < MAX_PLAIN_LOSS
        loss = format_decimal(view.loss, 3) if is_small else format_significant(view.loss)
        score = "no score yet"
        if view.score is not None:
            score = f"{view.metric or 'score'} {format_decimal(view.score)} at step {format_count(view.score_step)}"
        facts = [f"loss {loss}", score]
        facts.append(f"{format_large_count(view.tokens_per_second)} tok/s")
        if view.state in ACTIVE:
            facts.append(f"{'gpu' if view.on_gpu else 'cpu'} {format_percent(view.utilisation, 0)}")
        figures = "  ".join(facts)
        curve = draw_sparkline(view.losses, num=max(8, min(40, width - len(figures) - 6)))
        lines.append(Text.assemble("  ", (curve, "cyan"), f"  {figures}", no_wrap=True, overflow="ellipsis"))
    if view.activity:
        activity = view.activity
        parts = f"{format_count(activity.done)} of {format_count(activity.total)}" if activity.total else ""
        lines.append(Text(f"  {activity.what} {parts}".rstrip(), style="cyan"))
    failed = view.state not in ("finished", *ACTIVE)
    reason = view.why if failed else view.verdict
    if reason:
        shown = Text(f"  {name_invisible(reason)}", style=style if failed or view.is_bad else "yellow")
        shown.no_wrap, shown.overflow = folded, "ellipsis"
        lines.append(shown)
    return lines


def draw_sparkline(values: Sequence[float], *, num: int) -> str:
    """Draw at most `num` blocks, scaled from the lowest to the highest value; each is a mean of neighbouring values.

    >>> (draw_sparkline([4.0, 3.0, 2.0, 1.0], num=40), draw_sparkline([1.0, 1.0], num=40),
    ...  draw_sparkline([8.0, 8.0, 1.0, 1.0], num=2))
    ('█▆▃▁', '▁▁', '█▁')
    """
    cuts = [len(values) * i // num for i in range(num + 1)]
    means = [fmean(values[low:high]) for low, high in pairwise(cuts) if high > low]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(BLOCKS[round((value - low) / span * (len(BLOCKS) - 1))] for value in means)
