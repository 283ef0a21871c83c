"""Faults inside a process: an act before its k-th file operation, limits on what it may write.

These functions run in a warm process that ends with its trial: nothing that they change is put back.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHANGES: dict[str, tuple[int, int]] = {
    "os.rename": (0, 2),
    "os.remove": (0, 1),
    "os.mkdir": (0, 2),
    "os.rmdir": (0, 1),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.truncate": (0, -1),
}
"""Where the arguments of an audit event have the path that changes and the open folder that it is relative to."""
NEVER_FIRED = 99  # exit code of a process whose fault found no place
LONG_STEP_BEGINS = "the long step begins"
NO_FOLDER = -1  # the path is relative to the working directory
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def watch_file_operations(folder: str, act: Callable[[int], None]) -> None:
    """Call `act(number)` before each operation that changes a file below `folder`; the first has number 1.

    An operation opens a file to write, renames, removes, links, makes or removes a folder, or flushes to the disk. What
    native code opens (safetensors) is seen at the flush and at the rename that follow it.
    """
    place, lock, number = os.path.realpath(folder), threading.RLock(), 0

    def count(path: Any, within: int = NO_FOLDER) -> None:
        nonlocal number
        if not isinstance(path, (str, os.PathLike)):
            return
        if within != NO_FOLDER:  # shutil.rmtree gives a bare name and its open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{within}"), path)
        if os.path.join(os.path.realpath(path), "").startswith(os.path.join(place, "")):
            with lock:
                number += 1
                act(number)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[2] & WRITING:
            count(args[0])
        elif event in CHANGES:
            path, within = CHANGES[event]
            count(args[path], args[within] if within >= 0 else NO_FOLDER)

    flush = os.fsync

    def fsync(file: Any) -> None:
        number = file if isinstance(file, int) else file.fileno()
        count(os.readlink(f"/proc/self/fd/{number}"))
        flush(file)

    os.fsync = fsync
    sys.addaudithook(hook)


def train_and_count(recipe: str, folder: str, counted: str, *words: str) -> int:
    """Run `fivetune train RECIPE WORDS` and write the number of its file operations into the file `counted`."""
    last = 0

    def act(number: int) -> None:
        nonlocal last
        last = number

    watch_file_operations(folder, act)
    code = train(recipe, *words)
    Path(counted).write_text(str(last))
    return code


def train_and_die(recipe: str, folder: str, at: int, *words: str) -> int:
    """Run `fivetune train RECIPE WORDS` and end the process, without any clean-up, before its file operation `at`."""
    watch_file_operations(folder, lambda number: os._exit(137) if number == at else None)
    return train(recipe, *words)


def train_and_die_before_renaming_to(recipe: str, name: str) -> int:
    """Run `fivetune train RECIPE` and end the process before anything is renamed to, or made as, `name`."""
    die_before_renaming_to(name)
    return train(recipe)


def die_before_renaming_to(name: str) -> None:
    """End this process, without any clean-up, before a path that ends in `name` appears."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        target = args[1] if event == "os.rename" else args[0] if event == "os.mkdir" else ""
        if isinstance(target, (str, os.PathLike)) and os.fspath(target).endswith(name):
            os._exit(137)

    sys.addaudithook(hook)


def train_on_a_full_disk(recipe: str, folder: str, at: int, error: int = errno.ENOSPC) -> int:
    """Run `fivetune train RECIPE`; its file operation `at` and all that follow find the disk full, or another error."""

    def act(number: int) -> None:
        if number >= at:
            raise OSError(error, os.strerror(error))

    watch_file_operations(folder, act)
    return train(recipe)


def train_with_small_files(recipe: str, num_bytes: int) -> int:
    """Run `fivetune train RECIPE` where no file may become larger than `num_bytes`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    return train(recipe)


def train(recipe: str, *words: str, quiet: bool = True) -> int:
    """Run `fivetune train RECIPE WORDS` without its pre-flight checks, and, if `quiet`, without its progress."""
    from fivetune.cli import main

    return main(["train", recipe, "--no-preflight", *(["--quiet"] if quiet else []), *words])


def train_with_a_long_step(recipe: str, step: int, seconds: float) -> int:
    """Run `fivetune train RECIPE`; its step `step` takes `seconds` longer, and says so."""
    from fivetune.training import loop

    plain: Callable[..., Any] = loop.train_step

    def train_step(*values: Any, **named: Any) -> Any:
        if named["step"] == step:
            print(LONG_STEP_BEGINS, flush=True)
            time.sleep(seconds)
        return plain(*values, **named)

    loop.train_step = train_step
    return train(recipe)


def train_with_wrong_clock(recipe: str, kind: str, after: float, *words: str) -> int:
    """Run `fivetune train RECIPE` with a wall clock that goes wrong `after` seconds: CLOCKS."""
    set_wrong_clock(kind, after)
    return train(recipe, *words)


CLOCKS: dict[str, Callable[[float], float]] = {
    "a day ahead": lambda seconds: seconds + 86_400,
    "a day back": lambda seconds: seconds - 86_400,
    "stopped": lambda seconds: 0.0,
    "backwards": lambda seconds: -seconds,
}
"""What the clock shows after the fault, in seconds since it, for the seconds that have passed."""


def set_wrong_clock(kind: str, after: float) -> None:
    """Replace the functions of `time` that read the wall clock; those that measure durations stay."""
    plain = {name: getattr(time, name) for name in ("time", "localtime", "gmtime", "strftime")}
    broken_at = time.time() + after

    def tell() -> float:
        now = plain["time"]()
        return now if now < broken_at else broken_at + CLOCKS[kind](now - broken_at)

    time.time = tell
    time.time_ns = lambda: int(tell() * 1e9)
    time.localtime = lambda seconds=None: plain["localtime"](tell() if seconds is None else seconds)
    time.gmtime = lambda seconds=None: plain["gmtime"](tell() if seconds is None else seconds)
    time.strftime = lambda form, moment=None: plain["strftime"](form, time.localtime() if moment is None else moment)
