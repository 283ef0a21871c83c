"""The folder that the nodes of a run share: one check before the run begins.

In: run.dir as each node sees it. Out: nothing, or one error that names the node which sees another folder.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from fivetune.distributed.world import World
from fivetune.errors import FiveTuneEnvironmentError

SECONDS_TO_APPEAR = 60.0  # NFS shows a file that another node wrote after half a minute by default
POLL_SECONDS = 0.1


def refuse_separate_folders(
    folder: Path, world: World, *, nnodes: int, seconds: float = SECONDS_TO_APPEAR, host: str | None = None
) -> None:
    """Raise FiveTuneEnvironmentError unless every node sees the file that rank 0 writes to `folder`. Collective.

    Args:
        seconds: longest time until the file is seen.
        host: name of this node; default: its own.
    """
    if nnodes == 1 or world.size == 1:
        return
    host = host or socket.gethostname()
    token = folder / f".shared-{uuid.uuid4().hex}.tmp"
    if world.is_first:
        token.touch()
    token = folder / world.broadcast_object(token.name)
    until = time.monotonic() + seconds
    while not (is_seen := token.exists()) and time.monotonic() < until:
        with suppress(OSError):
            os.listdir(folder)  # makes a network file system look again
        time.sleep(POLL_SECONDS)
    found = world.gather((is_seen, host))
    if world.is_first:
        token.unlink(missing_ok=True)
    for rank, (is_seen, other) in enumerate(found):
        if not is_seen:
            node = rank // (world.size // nnodes)
            raise FiveTuneEnvironmentError(
                f"run.dir: {folder} of node {node} ({other}) is not the folder of node 0 ({found[0][1]}): a file that "
                f"node 0 wrote there did not appear within {seconds:g} s. All nodes read and write checkpoints there: "
                "put run.dir on a file system that they share."
            )
