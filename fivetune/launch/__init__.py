"""Starts the processes of a run on this machine, with torchrun, and stands in for them.

In: how many, and the words of the command. Out: the exit code of the process that ended the run. Signals are passed on.
torchrun runs in a child (`python -m fivetune.launch`), so that nothing here needs torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from fivetune.errors import ConfigError

PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def is_needed(nproc: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the processes are still to be started: not under torchrun, nor for one.

    Raises ConfigError where SLURM would start each of them several times.

    >>> is_needed(2, {}), is_needed(2, {"RANK": "0"}), is_needed(1, {})
    (True, False, False)
    """
    if nproc == 1 or "RANK" in environ:
        return False
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise ConfigError(f"launch.nproc: srun starts this command {tasks} times, and each would start {nproc} "
                          "processes. Give srun --ntasks=1; launch.nproc alone says how many train.")  # fmt: skip
    return True


def start(words: Sequence[str], *, nproc: int) -> int:
    """Run `fivetune WORDS` in `nproc` processes that know each other; the exit code, 128 + n after signal n."""
    command = [sys.executable, "-m", "fivetune.launch", str(nproc), *words]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    before = {number: signal.signal(number, _passing_to(agent)) for number in PASSED_ON}
    try:
        code = agent.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _passing_to(agent: subprocess.Popen[bytes]) -> Any:
    """A handler that asks torchrun to stop the processes; a second signal goes to each of them at once."""
    asked: list[int] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        if not asked:
            agent.send_signal(signum)
        else:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(agent.pid).children():
                    process.send_signal(signum)
        asked.append(signum)

    return pass_on
