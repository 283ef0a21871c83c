"""Progress display of a run: a live panel in a terminal or a notebook, one line per interval elsewhere.

Lines are also appended to log.txt of the run, without control characters.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fivetune.redaction import name_invisible, redact_secrets
from fivetune.rundir.activity import Activity, ActivityFile
from fivetune.rundir.lines import append_line, open_for_append
from fivetune.rundir.notebook import Panel, is_notebook
from fivetune.rundir.records import BestEval, EvalRecord, StepRecord

MAX_COLUMNS = 80  # of a line in a terminal, and of a line of a step or an evaluation anywhere
FOLD = "\n  "  # between the lines of a folded one
FACTS = ("phase", "done", "loss", "score", "speed", "lr", "eta")  # of the live line of a notebook, in this order
BELOW_BAR = ("loss", "score", "speed", "lr")  # facts of the second line in a terminal
MIN_BAR, MAX_BAR = 6, 28  # columns
SECONDS_BETWEEN_LINES = 5.0  # of a phase's progress, outside a terminal


class ProgressCallback(Protocol):
    """Reports the progress of a long operation; `Progress.update` implements it."""

    def __call__(self, what: str, done: int, total: int | None = None) -> None: ...


def ignore_progress(what: str, done: int, total: int | None = None) -> None:
    """A ProgressCallback that shows nothing."""


class Progress:
    """Shows progress on the terminal and appends it to a log file.

    Args:
        log: path of the log file; if it cannot be written, the run continues without it.
        log_every_steps: number of steps per step line outside a terminal.
        quiet: print warnings only.
        silent: print nothing, because another rank prints.
        activity: receives the progress of each phase, for readers of the run directory.
    """

    def __init__(
        self,
        log: Path | None = None,
        *,
        log_every_steps: int = 10,
        quiet: bool = False,
        silent: bool = False,
        activity: ActivityFile | None = None,
    ) -> None:
        self._activity = activity
        self._every = log_every_steps
        self._quiet = quiet or silent
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=silent)
        self._live: Live | None = None
        self._panel = Panel(log) if is_notebook() and not silent else None
        self._facts: dict[str, str] = {}
        self._share: float | None = None  # of the phase that is done; None if its length is unknown
        self._recent: list[StepRecord] = []
        self._last_line = time.monotonic()
        self._phase_start = (self._last_line, 0)  # time and count at which the speed of a phase is first known
        self._done = 0
        self._log: FileIO | None = None
        self._log_path = log
        if log is not None:
            try:
                self._log = open_for_append(log)
            except OSError as error:
                self._give_up_log(error)

    def __enter__(self) -> Progress:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    @property
    def _is_live(self) -> bool:
        """Whether a display is updated in place; else lines are printed now and then."""
        return self.is_terminal or self._panel is not None

    def log(self, text: str, style: str = "") -> None:
        """Write one line to the log file and, unless quiet, print it: in a terminal folded at MAX_COLUMNS, else whole.

        The lines of steps and evaluations are built of several short ones, which a pipe gets too.
        """
        text = name_invisible(redact_secrets(text))
        self.write_log(text.replace(FOLD, "  "))
        if self._panel and not self._quiet:
            self._panel.add_line(text)
        elif not self._quiet:
            shown = wrap_text(text) if self.is_terminal and "\n" not in text else text
            self._print(shown, style)

    def warn(self, text: str) -> None:
        """Write a warning to the log file and to the terminal, also when quiet."""
        text = name_invisible(redact_secrets(f"warning: {text}"))
        self.write_log(text)
        if self._panel:
            self._panel.add_line(text, is_important=True)
        else:
            self._print(text, "yellow")

    def _print(self, text: str, style: str) -> None:
        """Print to standard error; where it is a file on a full disk, later lines are in the log alone."""
        try:
            self._console.print(text, style=style, markup=False)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._console.quiet = True
            self.write_log(f"warning: standard error: cannot be written: {error.strerror}. The run continues.")

    def write_log(self, text: str) -> None:
        """Write lines to the log file alone, without secrets: a traceback quotes what a library was given."""
        if self._log is None:
            return
        try:
            append_line(
                self._log, f"{time.strftime('%H:%M:%S')} {redact_secrets(text)}\n".encode(errors="backslashreplace")
            )
        except OSError as error:
            self._give_up_log(error)

    def _give_up_log(self, error: OSError) -> None:
        """Close the log and warn, because an unwritable log must not end a run."""
        if self._log is not None:
            self._log.close()
            self._log = None
        self.warn(f"{self._log_path}: cannot be written: {error.strerror}. The run continues without it.")

    def start(self) -> None:
        """Open the live display of a terminal; the display of a notebook opens at the first text."""
        if self.is_terminal and not self._quiet and self._live is None:
            self._facts.setdefault("phase", "preparing")
            self._live = Live(self._build_panel(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def update(self, what: str, done: int, total: int | None = None) -> None:
        """Show the progress of a phase, with the time that it will take, once it has shown its speed."""
        if self._activity:
            self._activity.update(Activity(what, done, total))
        now = time.monotonic()
        if self._facts.get("phase") != what or done < self._done:  # the same phase again: its speed is measured again
            self._last_line = now
            self._phase_start = (now, done)
        self._done = done
        progress = f"{done:,}" if done else ""
        self._share = None
        if total:
            progress = f"{done:,} of {total:,}"
            self._share = done / total
        started, first = self._phase_start
        left = ""
        if total and done > first and now - started > SECONDS_BETWEEN_LINES:
            seconds_each = (now - started) / (done - first)
            left = f"{format_time_span(max(total - done, 0) * seconds_each)} left"
        self._show(phase=what, done=progress, eta=left)
        if not self._is_live and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.log(f"{what}: {progress}, {left}" if left else f"{what}: {progress}")

    def show_step(self, record: StepRecord, num_steps: int) -> None:
        """Show one optimizer step."""
        # Speed and remaining time are means over the last 50 steps.
        self._recent = [*self._recent[-49:], record]
        seconds = sum(step.step_seconds for step in self._recent)
        num_tokens = sum(step.num_input_tokens + step.num_target_tokens for step in self._recent)
        eta = (num_steps - record.step) * seconds / len(self._recent)
        loss = "loss not finite" if record.loss is None else f"loss {record.loss:.4f}"
        lr = f"lr {record.lr:.3g}"
        speed = f"{num_tokens / seconds:,.0f} tokens/s"
        left = f"{format_time_span(eta)} left"
        done = f"step {record.step:,} of {num_steps:,}"
        self._share = record.step / num_steps
        self._show(phase="training", done=done, loss=loss, lr=lr, speed=speed, eta=left)
        if not self._is_live and (record.step % self._every == 0 or record.step == num_steps):
            self.log(wrap_line([f"step {record.step:>6,}/{num_steps:,}", loss, lr, speed, left]))
        elif record.step % self._every == 0:
            self.write_log(f"step {record.step} {loss}")

    def show_evaluation(self, record: EvalRecord, *, metric: str = "", best: BestEval | None = None) -> None:
        """Show one evaluation: a display that is updated in place has the main score alone, the log file all scores.

        Args:
            metric: the main score; "": all scores are shown everywhere.
            best: the best evaluation so far, this one included.
        """
        shown: list[str] = []
        for name, score in record.scores.items():
            if name.endswith(("total", "thresh", "best_exact", "best_f1")):  # SQuAD's counts and thresholds
                continue
            text = f"{name} {score:.2f}"
            if name in record.intervals:
                low, high = record.intervals[name]
                text += f" ({low:.1f}-{high:.1f})"
            shown.append(text)
        main = [text for text in shown if text.startswith(f"{metric} ")]
        last: list[str] = []
        if record.loss is not None:
            last.append(f"loss {record.loss:.4f}")
        last.append(f"({format_time_span(record.seconds)})")
        when = f"{record.split} at step {record.step:,}:"
        whole = wrap_line([when, *shown, *last])
        if not (self._is_live and main):
            self._show(score=shown[0] if shown else "")
            self.log(whole, style="bold")
            return
        self.write_log(whole.replace(FOLD, "  "))
        is_best = best is not None and best.step == record.step
        score = f"{metric} {record.scores[metric]:.2f}"
        if best is not None and not is_best:
            score += f" (best {best.score:.2f} at step {best.step:,})"
        self._show(score=score)
        mark = ["best so far"] if is_best else []
        line = "  ".join([f"{record.split} at step {record.step:>6,}:", *main, *last, *mark])
        if self._panel and not self._quiet:
            self._panel.add_line(line)
        elif not self._quiet:
            self._print(line, "bold green" if is_best else "")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._panel:
            self._panel.close()
        if self._log:
            self._log.close()
            self._log = None
        if self._activity:
            self._activity.remove()

    def _show(self, **facts: str) -> None:
        self._facts |= facts
        if self._live:
            self._live.update(self._build_panel())
        elif self._panel and not self._quiet:
            self._panel.show_live("  ".join(self._facts[name] for name in FACTS if self._facts.get(name)))

    def _build_panel(self) -> Group:
        """Build the live lines of a terminal: phase, bar, progress and time left; below them the figures."""
        width = min(self._console.width, MAX_COLUMNS)
        facts = self._facts
        first = Table.grid(padding=(0, 2, 0, 0))
        cells: list[Text | ProgressBar] = [Text(facts.get("phase", ""))]
        words = [facts.get("done", "")]
        if self._share is not None:
            words.append(f"{100 * self._share:.0f} %")
        words.append(facts.get("eta", ""))
        words = [word for word in words if word]
        if self._share is not None:
            room = width - len(facts.get("phase", "")) - sum(len(word) + 2 for word in words) - 2
            bar = max(MIN_BAR, min(room, MAX_BAR))
            cells.append(ProgressBar(total=1.0, completed=self._share, width=bar))
        cells += [Text(word) for word in words]
        for _ in cells:
            first.add_column(no_wrap=True)
        first.add_row(*cells)
        figures = "  ".join(facts[name] for name in BELOW_BAR if facts.get(name))
        if not figures:
            return Group(first)
        second = Text(figures, style="dim", no_wrap=True, overflow="ellipsis")
        second.truncate(width, overflow="ellipsis")
        return Group(first, second)


def wrap_line(parts: Sequence[str]) -> str:
    """Join the parts of a message; where they exceed the width of a terminal, the next line is indented.

    >>> wrap_line(["step 7:", "loss 2", "a" * 70]).splitlines() == ["step 7:  loss 2", "  " + "a" * 70]
    True
    """
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(joined) + 2 * (len(lines) > 1) > MAX_COLUMNS and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = joined
    return FOLD.join(lines)


def wrap_text(text: str) -> str:
    """Fold a line between words where it exceeds the width of a terminal, and indent the following ones.

    >>> wrap_text("to be " * 14).splitlines()
    ['to be to be to be to be to be to be to be to be to be to be to be to be to be to', '  be']
    """
    return textwrap.fill(text, MAX_COLUMNS, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def format_time_span(seconds: float) -> str:
    """Format a time span in at most two units.

    >>> (format_time_span(0.04), format_time_span(7.04), format_time_span(59.97), format_time_span(161.4),
    ...  format_time_span(7260))
    ('0.04 s', '7.0 s', '1 min 0 s', '2 min 41 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600:,} h {total % 3600 // 60} min"
