"""The folder of the answers next to an output, while they are computed: who uses it, and when it goes.

In: the path of the output, and the shard of a job. Out: a folder that no other process answers into. It stays after a
kill, and the next command keeps what is answered.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from fivetune.data.shard import Shard
from fivetune.data.store.partial import lock_build_folder
from fivetune.distributed.processes.signals import report_interrupts
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.training.answers.answer_log import PATTERN
from fivetune.training.answers.shards import DONE, refuse_other_work

LOCK = "lock"  # marks a folder of answers


def find_answers(target: Path) -> Path:
    """The folder of the answers next to the output."""
    return target.with_name(f"{target.name}.partial")


@contextmanager
def keep_answers(target: Path, shard: Shard, *, is_first: bool) -> Generator[Path]:
    """Create the folder of the answers next to the output, or in it one of a shard. It stays if the block ends early
    and has answered some, and for a shard until all are merged.

    Args:
        is_first: whether this rank creates and removes the folder.

    Raises FiveTuneEnvironmentError if another process uses it, InterruptedRunError for a signal.
    """
    whole = find_answers(target)
    folder = whole / shard.name if shard.count > 1 else whole
    if is_first and folder != whole:
        with lock_answers(whole, waits=True):  # for a moment, as all shards do
            refuse_other_work(whole, shard)
            folder.mkdir(exist_ok=True)
            (folder / DONE).unlink(missing_ok=True)
    is_whole = is_over = False
    try:
        with lock_answers(folder) if is_first else nullcontext():
            if is_first:
                refuse_other_work(whole, shard)
            try:
                with report_interrupts(lambda name: f"stopped by {name}; {_describe_kept(folder)}"):
                    yield folder
                is_whole = True
            finally:  # outside the block above: nothing that happens here changes what the command has done
                is_over = is_first and (folder == whole if is_whole else not _has_answers(folder))
                if is_over:
                    remove_answers(folder)
    finally:
        if is_over and folder != whole:
            with suppress(FiveTuneEnvironmentError), lock_answers(whole, waits=True):
                if [path.name for path in whole.iterdir()] == [LOCK]:
                    remove_answers(whole)


def _has_answers(folder: Path) -> bool:
    return any(path.stat().st_size > 0 for path in folder.rglob(PATTERN))


def _describe_kept(folder: Path) -> str:
    if _has_answers(folder):
        return f"the answers so far are kept in the folder {folder}. Run the same command again to go on"
    return "nothing was answered yet. Run the same command again"


def remove_answers(folder: Path) -> None:
    """Remove a folder of answers, which this process has locked."""
    with suppress(OSError):
        for path in folder.iterdir():  # before the lock, without which nobody takes them over
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def lock_answers(folder: Path, *, waits: bool = False) -> Generator[None]:
    """Create a folder of answers, or take over what a stopped command has left; no other process can use the folder.

    Args:
        waits: wait for processes that use it.

    Raises FiveTuneEnvironmentError.
    """
    place = folder / LOCK
    # A command that was killed while it removed the folder has left it empty.
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if folder.is_symlink() or (os.path.lexists(folder) and not place.is_file() and not is_empty):
        raise FiveTuneEnvironmentError(f"{folder}: is in the way: the answers are kept there. Rename it.")
    lock = None
    while lock is None:  # again if another process has just removed the folder
        try:
            folder.mkdir(exist_ok=True)
            lock = lock_build_folder(folder, LOCK, waits=waits)
        except OSError as error:
            raise FiveTuneEnvironmentError(
                f"{folder}: cannot be written or locked: {error.strerror}. Choose another --output."
            ) from None
        if lock is None and place.is_file() and not waits:
            raise FiveTuneEnvironmentError(f"{folder}: another process answers into it. Wait for it, or stop it.")
    with lock:
        yield
