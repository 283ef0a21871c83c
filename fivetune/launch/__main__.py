"""torchrun as a child of `fivetune.launch`: starts the processes, ends with the exit code of the first that failed.

In: the number of processes and the words of the command. It stops when its parent is gone, with all that it started.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

PATIENCE = 24 * 3600  # seconds that a step and a checkpoint may take after a signal


def main(nproc: int, words: list[str]) -> int:
    """Run `fivetune WORDS` in `nproc` processes."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    from fivetune.telemetry.devices import num_cores

    logging.disable()  # the processes speak for themselves
    os.environ["OMP_NUM_THREADS"] = str(max(1, num_cores() // nproc))
    threading.Thread(target=_stop_when_orphaned, daemon=True).start()
    options = ["--standalone", "--nproc-per-node", str(nproc), "--shutdown-timeout", str(PATIENCE)]
    try:
        torchrun([*options, "-m", "fivetune", *words])
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _stop_when_orphaned() -> None:
    """The pipe from the parent ends when that one does."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
