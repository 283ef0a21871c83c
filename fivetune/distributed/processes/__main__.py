"""torchrun in a child process: starts the ranks; exits with the code of the first failed rank.

In: the numbers of nodes and of ranks per node, the seconds that a rank waits for another, and the words of the command.
When its parent ends, it stops all ranks and itself.
"""

# torchrun has no types, and its handler of signals no public name.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Set
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from fivetune.distributed.processes.nodes import Meeting, NodePlace, NodeRecord, connect_nodes
from fivetune.distributed.processes.signals import ALL_SIGNALS, SignalHandler
from fivetune.errors import FiveTuneEnvironmentError, FiveTuneError, ReportedByOtherRankError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

HUNG_RANK_SECONDS = 30.0  # for the other ranks to end after rank 0
SHUTDOWN_TIMEOUT_SECONDS = 24 * 3600  # for a step and a checkpoint after a signal
TORCH_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU,SIGALRM"


def run_node(nnodes: int, nproc: int, timeout_seconds: float, words: list[str]) -> int:
    """Run `fivetune WORDS` in `nproc` ranks of this node, together with the other nodes if there are any.

    Ranks that outlive rank 0 by HUNG_RANK_SECONDS, or by `timeout_seconds` if that is shorter, are killed.
    """
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    meeting = None
    if nnodes > 1:
        place, record = NodePlace.from_environment(nnodes), NodeRecord.from_this_node(nnodes, nproc)
        try:
            with _suppress_torch_log():
                meeting = connect_nodes(place, record, timeout_seconds=timeout_seconds)
        except FiveTuneError as error:
            if not isinstance(error, ReportedByOtherRankError):
                sys.stderr.write(f"fivetune: {error}\n")
            return error.exit_code
    try:
        return _run_torchrun(nproc, meeting, min(HUNG_RANK_SECONDS, timeout_seconds), words)
    finally:
        if meeting:
            meeting.leave()


def _run_torchrun(nproc: int, meeting: Meeting | None, grace_seconds: float, words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from fivetune.machine.telemetry.cores import count_cores

    logging.disable()  # the ranks report their errors themselves
    os.environ["OMP_NUM_THREADS"] = str(max(1, count_cores() // nproc))
    # A scheduler signals every process of a job, and this process's parent passes its own signal on: the second one
    # would end torchrun while its ranks save.
    api._terminate_process_handler = _ignore_repeated(api._terminate_process_handler)
    hung: set[int] = set()
    threading.Thread(target=_kill_hung_ranks, args=(grace_seconds, meeting, hung), daemon=True).start()
    options = ["--nproc-per-node", str(nproc), "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_SECONDS)]
    options += ["--signals-to-handle", HANDLED_SIGNALS]
    if meeting is None:
        options += ["--standalone"]
    else:
        place = meeting.place
        options += ["--rdzv-backend", "static", "--nnodes", str(place.count), "--node-rank", str(place.rank)]
        options += ["--master-addr", place.address, "--master-port", str(place.port)]
    try:
        with tempfile.TemporaryDirectory(prefix="fivetune-launch-") as logs:  # torchrun leaves its folder behind
            torchrun([*options, "--log-dir", logs, "-m", "fivetune", *words])
    except ChildFailedError as error:
        for line in describe_killed_ranks(error, hung):
            sys.stderr.write(f"fivetune: {line}\n")
        failure = error.get_first_failure()[1]
        if failure.pid in hung:  # the failure that ended the run was on another node
            return FiveTuneEnvironmentError.exit_code
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except api.SignalException as error:
        return 128 + error.sigval
    return 0


def describe_killed_ranks(error: ChildFailedError, hung: Set[int] = frozenset()) -> list[str]:
    """One sentence for each rank that a signal killed; a rank that exited has printed its own error.

    Args:
        hung: process ids of ranks that were killed because they outlived rank 0.
    """
    first, _ = error.get_first_failure()
    lines: list[str] = []
    for rank, failure in sorted(error.failures.items(), key=lambda item: (item[0] != first, item[0])):
        if failure.exitcode >= 0:
            continue
        signum = -failure.exitcode
        name = signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
        who = f"launch: rank {rank} (process {failure.pid})"
        if rank == first and failure.pid in hung:
            lines.append(f"{who} did not end after rank 0 had ended, and was killed.")
        elif rank == first:
            hint = ". Often memory ran out (see dmesg)" if signum == signal.SIGKILL else ""
            lines.append(f"{who} was killed by {name}{hint}. Continue the run with --resume.")
        elif signum == signal.SIGKILL:
            lines.append(f"{who} did not end after rank {first} had failed, and was killed.")
    return lines


def _kill_hung_ranks(grace_seconds: float, meeting: Meeting | None, hung: set[int]) -> None:
    """SIGKILL every rank that still runs `grace_seconds` after rank 0 ended: a hung rank ignores SIGTERM.

    Rank 0 writes the checkpoints and the report, so in a healthy run the others end before it or right after.
    """
    agent = psutil.Process()
    ranks: dict[psutil.Process, str] = {}
    first_ended: float | None = None
    while True:
        time.sleep(1)
        for child in agent.children():
            if child not in ranks:
                with suppress(psutil.Error):
                    ranks[child] = child.environ().get("RANK", "")
        with suppress(psutil.Error):
            running = [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
            if not ranks or any(ranks[rank] == "0" for rank in running):
                continue
            if "0" in ranks.values():
                if meeting and first_ended is None:
                    meeting.record_end_of_rank_zero()
            elif meeting is None or meeting.place.rank == 0 or not meeting.has_rank_zero_ended():
                continue
            first_ended = first_ended or time.monotonic()
            if time.monotonic() - first_ended > grace_seconds:
                for rank in running:
                    hung.add(rank.pid)
                    rank.kill()


def _ignore_repeated(handler: SignalHandler) -> SignalHandler:
    """Make a handler of signals that handles the first one only; the parent sends further ones to the ranks itself."""
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if len(received) == 1:
            handler(signum, frame)

    return handle


def _stop_when_orphaned() -> None:
    """Stop this process when its parent ends, which closes the pipe to stdin."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _suppress_torch_log() -> Generator[None]:
    """Import torch without the log of its sockets, which has stack traces; the ranks log as the user has set."""
    before = os.environ.get(TORCH_LOG_LEVEL)
    os.environ.setdefault(TORCH_LOG_LEVEL, "FATAL")
    yield
    if before is None:
        del os.environ[TORCH_LOG_LEVEL]


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback before torchrun has its handlers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ALL_SIGNALS)  # the parent has blocked them
    sys.exit(run_node(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:]))
