"""The folder of the answers next to an output, while they are computed: who uses it, and when it goes.

In: the path of the output, and the shard of a job. Out: a folder that no other process answers into. It stays after a
kill, and the next command keeps what is answered.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fivetune.data.shard import Shard
from fivetune.data.store.partial import lock_build_folder
from fivetune.distributed.processes.signals import report_interrupts
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.training.answers.answer_log import PATTERN
from fivetune.training.answers.shards import DONE, list_shard_folders, refuse_other_work

LOCK = "lock"  # marks a folder of answers
NFS_REMOVED = ".nfs"  # begins the name of a file that NFS keeps until the process that removed it closes it


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
    is_whole = is_over = False
    try:
        with ExitStack() as stack:
            if is_first and folder == whole:
                stack.enter_context(lock_answers(whole))
                refuse_other_work(whole, shard)
            elif is_first:
                with lock_answers(whole, waits=True):  # for a moment, as all shards do
                    refuse_other_work(whole, shard)
                    stack.enter_context(lock_answers(folder))
                    (folder / DONE).unlink(missing_ok=True)
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
                pass  # the folder goes with the lock if no other shard is in it


def _has_answers(folder: Path) -> bool:
    return any(path.stat().st_size > 0 for path in folder.rglob(PATTERN))


def _describe_kept(folder: Path) -> str:
    if _has_answers(folder):
        return f"the answers so far are kept in the folder {folder}. Run the same command again to go on"
    return "nothing was answered yet. Run the same command again"


def remove_answers(folder: Path) -> None:
    """Remove what a folder of answers holds; this process has locked it, and the folder goes with the lock."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:  # the last to go: without it nobody takes over the rest
                path.unlink()


@contextmanager
def lock_answers(folder: Path, *, waits: bool = False) -> Generator[None]:
    """Create a folder of answers, or take over what a stopped command has left; no other process can use the folder.
    If it is empty at the end, it is removed.

    Args:
        waits: wait for processes that use it.

    Raises FiveTuneEnvironmentError.
    """
    place = folder / LOCK
    lock = None
    while lock is None:  # again if another process has just removed the folder
        try:
            if _is_in_the_way(folder):
                raise FiveTuneEnvironmentError(f"{folder}: is in the way: the answers are kept there. Rename it.")
            folder.mkdir(exist_ok=True)
            lock = lock_build_folder(folder, LOCK, waits=waits)
        except OSError as error:
            raise FiveTuneEnvironmentError(
                f"{folder}: cannot be written or locked: {error.strerror}. Choose another --output."
            ) from None
        if lock is None and place.is_file() and not waits:
            raise FiveTuneEnvironmentError(f"{folder}: another process answers into it. Wait for it, or stop it.")
    try:
        with lock:
            try:
                yield
            finally:
                with suppress(OSError):
                    if os.listdir(folder) == [LOCK]:
                        place.unlink()
    finally:
        with suppress(OSError):
            folder.rmdir()  # not before: NFS keeps the removed file in it until the file is closed


def _is_in_the_way(folder: Path) -> bool:
    """Whether there is something else than a folder of answers. An empty one is of a command that was killed."""
    try:
        names = os.listdir(folder)  # once: another process may be removing it
    except FileNotFoundError:
        names = []
    except NotADirectoryError:
        return True
    is_empty = all(name.startswith(NFS_REMOVED) for name in names)
    return folder.is_symlink() or not (is_empty or LOCK in names)


def list_busy_shards(folder: Path, shard: Shard) -> list[int]:
    """List the numbers, from 1, of the shards that a process answers now."""
    busy: list[int] = []
    for number, path in enumerate(list_shard_folders(folder, shard), start=1):
        with suppress(OSError):  # then its job, too, cannot lock it and says why
            if (path / LOCK).is_file():
                lock = lock_build_folder(path, LOCK)
                if lock is None:
                    busy.append(number)
                else:
                    lock.close()
    return busy
