"""Launcher: starts the ranks of a run on this machine with torchrun, waits for them and forwards signals.

In: the number of ranks and the words of the command. Out: the exit code of the rank that ended the run. torchrun runs
in a child process (`python -m fivetune.launch`), so that this module does not import torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType

import psutil

from fivetune.errors import ConfigError
from fivetune.launch.signals import ALL_SIGNALS, STOP_SIGNALS, SignalHandler, handle_signals

LAUNCH_ID = "FIVETUNE_LAUNCH_ID"  # environment variable that all processes of one launch share
HUNG_RANK_SECONDS = 30.0  # for the other ranks to end after rank 0
ORPHAN_SAVE_SECONDS = 900  # for ranks that lost torchrun to write a checkpoint


def is_needed(nproc: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has to start the ranks: false for one rank, and in a rank that torchrun started.

    Raises ConfigError if srun runs this command several times, because each would start all ranks.

    >>> is_needed(2, {}), is_needed(2, {"RANK": "0"}), is_needed(1, {})
    (True, False, False)
    """
    if nproc == 1 or "RANK" in environ:
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ConfigError(
            f"launch.nproc: srun starts this command {tasks} times, and each would start {nproc} "
            "processes. Give srun --ntasks=1; launch.nproc sets the number of processes that train."
        )
    return True


def start_processes(words: Sequence[str], *, nproc: int, timeout_minutes: float) -> int:
    """Run `fivetune WORDS` in `nproc` connected ranks; returns the exit code, 128 + n after signal n.

    A rank that still runs HUNG_RANK_SECONDS after rank 0 has ended is killed; earlier if `timeout_minutes`, the longest
    time that a rank waits for another, is shorter.
    If torchrun itself is killed, the ranks are stopped too: as orphans they would continue to train.
    """
    launch_id = uuid.uuid4().hex
    grace_seconds = min(HUNG_RANK_SECONDS, 60 * timeout_minutes)
    agent = subprocess.Popen(
        [sys.executable, "-m", "fivetune.launch", str(nproc), str(grace_seconds), *words],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, LAUNCH_ID: launch_id},
    )
    with handle_signals(ALL_SIGNALS, _make_signal_forwarder(agent, launch_id)):
        code = agent.wait()
        if code < 0:
            _stop_orphaned_ranks(launch_id, agent.pid, -code)
    return code if code >= 0 else 128 - code


def find_ranks(launch_id: str) -> list[psutil.Process]:
    """Running ranks of a launch, identified by its id in their environment; orphans are included."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            if environ.get(LAUNCH_ID) == launch_id and "RANK" in environ and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _make_signal_forwarder(agent: subprocess.Popen[bytes], launch_id: str) -> SignalHandler:
    """Make a signal handler: the first signal goes to torchrun, the second to each rank, the third as SIGKILL."""
    received: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1 and agent.poll() is None:
            agent.send_signal(signum)
            return
        if signum not in STOP_SIGNALS:
            return  # a repeated request to save: the first one was forwarded
        stops = sum(number in STOP_SIGNALS for number in received)
        for process in find_ranks(launch_id):
            with suppress(psutil.Error):
                process.send_signal(signum if stops < 3 else signal.SIGKILL)

    return forward


def _stop_orphaned_ranks(launch_id: str, agent_pid: int, signum: int) -> None:
    """Report that torchrun was killed, and stop its ranks; after SIGTERM they save a checkpoint first."""
    name = signal.Signals(signum).name
    sys.stderr.write(
        f"fivetune: launch: torchrun (process {agent_pid}) was killed by {name}, often because memory ran out. "
        "Its ranks are stopped now. Continue the run with --resume.\n"
    )
    ranks = find_ranks(launch_id)
    for process in ranks:
        with suppress(psutil.Error):
            process.terminate()
    for process in psutil.wait_procs(ranks, timeout=ORPHAN_SAVE_SECONDS)[1]:
        with suppress(psutil.Error):
            process.kill()
