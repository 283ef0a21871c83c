"""Show running and finished runs live.

Loss, score, utilisation, speed, time left, verdict.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import add_flag

if TYPE_CHECKING:
    from fivetune.reading.report.live import Watcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        metavar="RUN|DIR",
        type=Path,
        nargs="?",
        default=Path("runs"),
        help="a run directory, or a folder of them (default: runs)",
    )
    add_flag(parser, "--once", "print one frame and exit (always so outside a terminal)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between frames (default: 1)")
    parser.epilog = "q or Ctrl-C quits; the runs continue."


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fivetune.errors import ConfigError, RunDirError
    from fivetune.reading.report.live import Watcher, list_run_folders, render_frame

    if not args.folder.is_dir():
        raise RunDirError(f"{args.folder}: no such directory. Give a run directory or a folder of runs.")
    if not args.interval > 0:
        raise ConfigError(f"--interval {args.interval}: must be above 0 seconds.")
    console = Console(highlight=False)
    watcher = Watcher(args.folder)
    # Without a terminal, such as in a log, one frame is all that can be shown.
    if args.once or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        if not list_run_folders(args.folder):
            raise RunDirError(f"{args.folder}: no run in it. Give a run directory or a folder of runs.")
        console.print(render_frame(watcher.read_views(), width=console.width))
        return 0
    with _set_cbreak_mode():
        _run_live_view(console, watcher, args.interval)
    console.print(render_frame(watcher.read_views(), width=console.width, height=console.height))
    return 0


def _run_live_view(console: Any, watcher: Watcher, interval: float) -> None:
    """Draw until q or a signal; the terminal is restored."""
    from rich.live import Live

    from fivetune.reading.report.live import render_frame

    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(
                    render_frame(watcher.read_views(), width=console.width, height=console.height), refresh=True
                )
                ready, _, _ = select.select([sys.stdin], [], [], interval)
                if ready and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _set_cbreak_mode() -> Iterator[None]:
    """Read keys without Enter and without echo inside the block; SIGTERM and SIGHUP end it as Ctrl-C does."""
    import termios
    import tty

    from fivetune.distributed.processes.signals import interrupt_on_all_signals

    before = termios.tcgetattr(sys.stdin)
    with interrupt_on_all_signals():
        tty.setcbreak(sys.stdin)
        try:
            yield
        finally:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
