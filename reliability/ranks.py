"""The ranks of a run as warm processes, connected as torchrun connects its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from subprocess import CompletedProcess

from reliability.warm import WarmProcess


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def join_codes(codes: Sequence[int]) -> int:
    """The exit code of several processes: the largest one, or that of a signal where the others succeeded.

    >>> join_codes([0, -9]), join_codes([5, -6]), join_codes([0, 0])
    (-9, 5, 0)
    """
    return max(codes) or min(codes)


class Ranks:
    """`work(*args)` in each of `num` ranks; leaving the context kills them. One rank is a plain process."""

    def __init__(self, work: Callable[..., int | None], *args: object, num: int = 2) -> None:
        places = {"WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1"}
        places["MASTER_PORT"] = find_free_port()
        environs = [{**places, "RANK": rank, "LOCAL_RANK": rank} for rank in range(num)] if num > 1 else [{}]
        self.processes = [
            WarmProcess(work, *args, environ={**os.environ, **{name: str(value) for name, value in one.items()}})
            for one in environs
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Ranks:
        for process in self.processes:
            self._stack.enter_context(process)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def code(self) -> int | None:
        """The code of all (`join_codes`); None while one of them runs."""
        codes = [code for process in self.processes if (code := process.code) is not None]
        return join_codes(codes) if len(codes) == len(self.processes) else None

    def kill_tree(self) -> None:
        """SIGKILL them at once, as a machine that goes down does."""
        for process in self.processes:
            process.kill_tree()

    def wait(self, seconds: float = 300) -> CompletedProcess[str]:
        """Wait until all have ended: the code of all (`join_codes`), and what they printed."""
        end = time.monotonic() + seconds
        done = [process.wait(max(0.0, end - time.monotonic())) for process in self.processes]
        printed = ("".join(one.stdout for one in done), "".join(one.stderr for one in done))
        return CompletedProcess(done[0].args, join_codes([one.returncode for one in done]), *printed)

    def finish(self) -> CompletedProcess[str]:
        """Wait until all have ended, and leave the context."""
        with self:
            return self.wait()
