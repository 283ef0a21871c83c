"""Writing in the background: one piece of work at a time, in a thread of its own while training continues.

In: a function that writes a checkpoint. Out: its error, for the training's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

from fivetune.distributed.world import SINGLE_PROCESS, World


class BackgroundWriter:
    """Runs the function given to `start` at once, or in a thread that `finish` waits for.

    A daemon thread: a process that must end does not wait for it, and what it has not finished is not a checkpoint.

    Args:
        world: the ranks that write together. With a thread, all construct it: its collectives need their own group.
        is_parallel: whether to use a thread.
    """

    def __init__(self, world: World = SINGLE_PROCESS, *, is_parallel: bool = False) -> None:
        self.world = world.separate() if is_parallel else world
        self.is_parallel = is_parallel
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Begin to write. An earlier piece of work must be finished."""
        assert self._thread is None
        if not self.is_parallel:
            write()
            return

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error

        self._thread = Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def take_error(self) -> BaseException | None:
        """Wait until nothing is being written; returns the error of the work."""
        if self._thread is not None:
            self._thread.join()
        error = self._error
        self._thread = None
        self._error = None
        return error

    def finish(self) -> None:
        """Wait until nothing is being written; raises the error of the work."""
        if error := self.take_error():
            raise error
