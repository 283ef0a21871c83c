"""Live view of running and finished runs: loss, score, utilisation, speed, time left, verdict."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivetune.watch import Watcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN|DIR", type=Path, nargs="?", default=Path("runs"),
                        help="a run directory, or a folder of them (default: runs)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="print one frame; so it is outside a terminal too")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two frames (default: 1)")
    parser.epilog = "q or Ctrl-C leaves; the runs go on."


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from fivetune.errors import ConfigError, RunDirError
    from fivetune.watch import Watcher, frame, run_folders

    if not args.folder.is_dir():
        raise RunDirError(f"{args.folder}: no such directory. Give a run directory or a folder of runs.")
    if not args.interval > 0:
        raise ConfigError(f"--interval {args.interval}: must be above 0 seconds.")
    console, watcher = Console(highlight=False), Watcher(args.folder)
    if args.once or not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        if not run_folders(args.folder):
            raise RunDirError(f"{args.folder}: no run in it. Give a run directory or a folder of runs.")
        console.print(frame(watcher.look(), width=console.width))
        return 0
    with _one_key_at_a_time():
        _live(console, watcher, args.interval)
    console.print(frame(watcher.look(), width=console.width, height=console.height))
    return 0


def _live(console: Any, watcher: Watcher, interval: float) -> None:
    """Draw until q or a signal; the terminal is as it was afterwards."""
    from rich.live import Live

    from fivetune.watch import frame

    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(frame(watcher.look(), width=console.width, height=console.height), refresh=True)
                ready, _, _ = select.select([sys.stdin], [], [], interval)
                if ready and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b""):
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _one_key_at_a_time() -> Iterator[None]:
    """Keys arrive without Enter and are not shown; SIGTERM leaves as Ctrl-C does."""
    import termios
    import tty

    def leave(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before, handler = termios.tcgetattr(sys.stdin), signal.signal(signal.SIGTERM, leave)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, handler)
