"""What a run shows while it works: one live display in a terminal, one line per interval elsewhere.

Every line also goes to log.txt of the run; control characters never do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fivetune.types import EvalRecord, StepRecord

SECONDS_BETWEEN_LINES = 5.0  # for phases that count something, outside a terminal


class Count(Protocol):
    """How a part that works through many things says how far it is; `Progress.count` is one."""

    def __call__(self, what: str, done: int, total: int | None = None) -> None: ...


def uncounted(what: str, done: int, total: int | None = None) -> None:
    """A Count for when nobody watches."""


class Progress:
    """Tells the user what is going on.

    Args:
        log: file that every line is appended to.
        log_every_steps: one step line per so many steps outside a terminal.
    """

    def __init__(self, log: Path | None = None, *, log_every_steps: int = 10, quiet: bool = False) -> None:
        self._log: TextIO | None = log.open("a", encoding="utf-8") if log else None
        self._every = log_every_steps
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
        self._live: Live | None = None
        self._facts: dict[str, str] = {}
        self._rates: list[tuple[float, int]] = []
        self._last_line = time.monotonic()

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def say(self, text: str, style: str = "") -> None:
        """One line, on the terminal and in the log."""
        if self._log:
            self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")
            self._log.flush()
        self._console.print(text, style=style, markup=False)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", style="yellow")

    def start(self) -> None:
        """Open the live display; nothing outside a terminal."""
        if self.is_terminal and self._live is None:
            self._facts.setdefault("phase", "preparing")
            self._live = Live(self._panel(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def count(self, what: str, done: int, total: int | None = None) -> None:
        """Show how far a phase is."""
        now = time.monotonic()
        if self._facts.get("phase") != what:
            self._last_line = now
        of = f" of {total:,}" if total else ""
        self._show(phase=what, done=f"{done:,}{of}")
        if not self.is_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            self.say(f"{what}: {done:,}{of}")

    def counter(self, what: str) -> Callable[[int, int | None], None]:
        """`count` for one phase, to call with (done, total)."""
        return partial(self.count, what)

    def step(self, record: StepRecord, num_steps: int) -> None:
        """Show one optimizer step."""
        tokens = record.num_input_tokens + record.num_target_tokens
        self._rates = [*self._rates[-49:], (record.step_seconds, tokens)]
        seconds = sum(s for s, _ in self._rates)
        rate = sum(t for _, t in self._rates) / seconds
        eta = (num_steps - record.step) * seconds / len(self._rates)
        loss = "not finite" if record.loss is None else f"{record.loss:.4f}"
        self._show(
            phase="training", done=f"step {record.step:,} of {num_steps:,}", loss=f"loss {loss}",
            lr=f"lr {record.lr:.3g}", speed=f"{rate:,.0f} tokens/s", eta=f"{duration(eta)} left",
        )  # fmt: skip
        if not self.is_terminal and (record.step % self._every == 0 or record.step == num_steps):
            self.say(
                f"step {record.step:>6,}/{num_steps:,}  loss {loss}  lr {record.lr:.3g}  "
                f"{rate:,.0f} tokens/s  {duration(eta)} left"
            )
        elif self._log and record.step % self._every == 0:
            self._log.write(f"{time.strftime('%H:%M:%S')} step {record.step} loss {loss}\n")

    def evaluation(self, record: EvalRecord) -> None:
        """Show one evaluation."""
        shown = "  ".join(
            f"{k} {v:.2f}"
            for k, v in record.scores.items()
            if not k.endswith(("total", "thresh", "best_exact", "best_f1"))
        )
        loss = "" if record.loss is None else f"  loss {record.loss:.4f}"
        self._show(score=shown.split("  HasAns")[0])
        self.say(f"{record.split} at step {record.step:,}: {shown}{loss}  ({duration(record.seconds)})", style="bold")

    def close(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        if self._log:
            self._log.close()
            self._log = None

    def _show(self, **facts: str) -> None:
        self._facts |= facts
        if self._live:
            self._live.update(self._panel())

    def _panel(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in self._facts:
            table.add_column(no_wrap=True)
        order = ("phase", "done", "loss", "score", "speed", "lr", "eta")
        table.add_row(*(Text(self._facts[name]) for name in order if name in self._facts))
        return table


def duration(seconds: float) -> str:
    """A time span in at most two units.

    >>> duration(0.04), duration(7.04), duration(59.97), duration(161.4), duration(7260)
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
