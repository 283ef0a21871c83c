"""The ranks of a run as warm processes, connected as torchrun connects its own."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from subprocess import CompletedProcess

from reliability.warm import WarmProcess


class Ranks:
    """`work(*args)` in each of `num` ranks; leaving the context kills them. One rank is a plain process."""

    def __init__(self, work: Callable[..., int | None], *args: object, num: int = 2) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        places = {"WORLD_SIZE": num, "LOCAL_WORLD_SIZE": num, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
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
    def has_ended(self) -> bool:
        return all(process.code is not None for process in self.processes)

    def kill(self) -> None:
        """SIGKILL them at once, as a machine that goes down does."""
        for process in self.processes:
            process.kill_tree()

    def wait(self, seconds: float = 300) -> CompletedProcess[str]:
        """Wait until all have ended: the largest exit code, and what they printed."""
        end = time.monotonic() + seconds
        done = [process.wait(max(0.0, end - time.monotonic())) for process in self.processes]
        printed = ("".join(one.stdout for one in done), "".join(one.stderr for one in done))
        return CompletedProcess(done[0].args, max(one.returncode for one in done), *printed)
