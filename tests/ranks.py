"""Connected processes of one run, started with the environment that torchrun makes."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from subprocess import CompletedProcess
from typing import Any

from reliability.warm import WarmProcess


def start_ranks(
    work: Callable[..., None], *args: Any, count: int = 2, seconds: float = 120
) -> list[CompletedProcess[str]]:
    """Run `work(*args)` on each rank, to the end of all; a rank that is killed has the code -9."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    environs = [{**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(count))]
    with ExitStack() as stack:
        ranks = [stack.enter_context(WarmProcess(work, *args, environ=environ)) for environ in environs]
        return [rank.wait(seconds) for rank in ranks]
