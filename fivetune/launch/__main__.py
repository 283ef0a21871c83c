"""torchrun in a child process of `fivetune.launch`: starts the ranks; exits with the code of the first failed rank.

In: the number of ranks, the seconds that the others may outlive rank 0, and the words of the command. When its parent
ends, it stops all ranks and itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

SHUTDOWN_TIMEOUT_SECONDS = 24 * 3600  # for a step and a checkpoint after a signal
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"


def run_torchrun(nproc: int, grace_seconds: float, words: list[str]) -> int:
    """Run `fivetune WORDS` in `nproc` ranks; those that outlive rank 0 by `grace_seconds` are killed."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from fivetune.telemetry.devices import count_cores

    logging.disable()  # the ranks report their errors themselves
    os.environ["OMP_NUM_THREADS"] = str(max(1, count_cores() // nproc))
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    threading.Thread(target=_kill_hung_ranks, args=(grace_seconds,), daemon=True).start()
    options = ["--standalone", "--nproc-per-node", str(nproc), "--shutdown-timeout", str(SHUTDOWN_TIMEOUT_SECONDS)]
    options += ["--signals-to-handle", HANDLED_SIGNALS]
    try:
        torchrun([*options, "-m", "fivetune", *words])
    except ChildFailedError as error:
        for line in describe_killed_ranks(error):
            sys.stderr.write(f"fivetune: {line}\n")
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def describe_killed_ranks(error: ChildFailedError) -> list[str]:
    """One sentence for each rank that a signal killed; a rank that exited has printed its own error."""
    first, _ = error.get_first_failure()
    lines: list[str] = []
    for rank, failure in sorted(error.failures.items(), key=lambda item: (item[0] != first, item[0])):
        if failure.exitcode >= 0:
            continue
        signum = -failure.exitcode
        name = signal.Signals(signum).name if signum in set(signal.Signals) else f"signal {signum}"
        who = f"launch: rank {rank} (process {failure.pid})"
        if rank == first:
            hint = ". Often memory ran out (see dmesg)" if signum == signal.SIGKILL else ""
            lines.append(f"{who} was killed by {name}{hint}. Continue the run with --resume.")
        elif signum == signal.SIGKILL:
            lines.append(f"{who} did not end after rank {first} had failed, and was killed.")
    return lines


def _kill_hung_ranks(grace_seconds: float) -> None:
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
            if "0" not in ranks.values() or any(ranks[rank] == "0" for rank in running):
                continue
            first_ended = first_ended or time.monotonic()
            if time.monotonic() - first_ended > grace_seconds:
                for rank in running:
                    rank.kill()


def _stop_when_orphaned() -> None:
    """Stop this process when its parent ends, which closes the pipe to stdin."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_torchrun(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
