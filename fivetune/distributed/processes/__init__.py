"""Starts the ranks of a run on this node with torchrun, waits for them and forwards signals.

In: the numbers of nodes and of ranks per node, and the words of the command. Out: the exit code of the rank that ended
the run. torchrun runs in a child process (`python -m fivetune.distributed.processes`), so that this module does not
import torch. Of several nodes each runs this command once (nodes.py).
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

from fivetune.distributed.processes.nodes import NodePlace
from fivetune.distributed.processes.signals import ALL_SIGNALS, STOP_SIGNALS, SignalHandler, handle_signals
from fivetune.errors import ConfigError

LAUNCH_ID = "FIVETUNE_LAUNCH_ID"  # environment variable that all processes of one launch share
ORPHAN_SAVE_SECONDS = 900  # for ranks that lost torchrun to write a checkpoint


def is_needed(nproc: int, nnodes: int = 1, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process has to start the ranks of its node: false for one rank, and in a rank of torchrun.

    Raises ConfigError if srun runs this command more than once per node, because each would start all ranks.

    >>> is_needed(2, 1, {}), is_needed(2, 1, {"LOCAL_RANK": "0"}), is_needed(1, 1, {}), is_needed(1, 2, {})
    (True, False, False, True)
    """
    if nproc * nnodes == 1 or "LOCAL_RANK" in environ:
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS", str(nnodes))
    if tasks != str(nnodes):
        raise ConfigError(
            f"launch.nproc: srun starts this command {tasks} times, and each would start {nproc} processes. Give srun "
            f"--ntasks={nnodes} (launch.nnodes); launch.nproc sets the number of processes on each node."
        )
    return True


def start_processes(words: Sequence[str], *, nproc: int, nnodes: int = 1, timeout_minutes: float) -> int:
    """Run `fivetune WORDS` in `nproc` connected ranks on this node; returns the exit code, 128 + n after signal n.

    Of several nodes, each starts its own ranks at its place (`NodePlace.from_environment`).

    A rank that still runs half a minute after rank 0 has ended is killed; earlier if `timeout_minutes`, the longest
    time that a rank waits for another, is shorter.
    If torchrun itself is killed, the ranks are stopped too: as orphans they would continue to train.
    """
    if nnodes > 1:
        NodePlace.from_environment(nnodes)  # raises before a process is started
    launch_id = uuid.uuid4().hex
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ALL_SIGNALS)  # until both processes can handle them
    agent = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "fivetune.distributed.processes",
            str(nnodes),
            str(nproc),
            str(60 * timeout_minutes),
            *words,
        ],
        stdin=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, LAUNCH_ID: launch_id},
    )
    received: list[int] = []
    with agent, handle_signals(ALL_SIGNALS, _make_signal_forwarder(agent, launch_id, received)):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = agent.wait()
        if -code in received:  # torchrun has handlers while it has ranks
            sys.stderr.write(f"fivetune: launch: stopped by {signal.Signals(-code).name} while no rank was running.\n")
        elif code < 0:
            _stop_orphaned_ranks(launch_id, agent.pid, -code)
    return code if code >= 0 else 128 - code


def find_ranks(launch_id: str) -> list[psutil.Process]:
    """Running ranks of a launch, identified by its id in their environment; orphans are included."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            environ = process.environ()
            if (
                environ.get(LAUNCH_ID) == launch_id
                and "LOCAL_RANK" in environ
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def _make_signal_forwarder(agent: subprocess.Popen[bytes], launch_id: str, received: list[int]) -> SignalHandler:
    """Make a signal handler: the first signal goes to torchrun, the second to each rank, the third as SIGKILL.

    It appends the signals to `received`.
    """

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
