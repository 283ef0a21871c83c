"""`fivetune` commands in processes that start in milliseconds: one server has imported torch and transformers.

In: the words after `fivetune`. Out: a process of its own that takes signals, its output and its exit code. The server
forks before any computation; what a command imports lazily beside PRELOADED, it imports itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess

PRELOADED = [
    "fivetune.commands.train",
    "fivetune.training",
    "fivetune.report.run.build",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)


class WarmCommand:
    """A running `fivetune WORDS`; leaving its context kills it."""

    def __init__(self, *words: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        places = [str(file) for file in self._files]
        self._process = SERVER.Process(target=_run, args=(words, places, dict(os.environ), str(Path.cwd())))
        self._process.start()
        self.words = words
        self.pid = self._process.pid or 0

    def __enter__(self) -> WarmCommand:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._folder.cleanup()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs, -n if signal n ended it."""
        return self._process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.pid, signum)

    def wait(self, seconds: float = 300) -> CompletedProcess[str]:
        """Wait until it ends. Raises TimeoutError after `seconds`."""
        self._process.join(seconds)
        if self.code is None:
            raise TimeoutError(f"fivetune {' '.join(self.words)} still runs after {seconds:g} s")
        stdout, stderr = (file.read_text(encoding="utf-8") if file.exists() else "" for file in self._files)
        return CompletedProcess(list(self.words), self.code, stdout, stderr)


def run_command(*words: str) -> CompletedProcess[str]:
    """Run `fivetune WORDS` to its end."""
    with WarmCommand(*words) as command:
        return command.wait()


def _run(words: tuple[str, ...], files: list[str], environ: Mapping[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for file, standard in zip(files, (1, 2), strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), standard)
    from fivetune.cli import main

    sys.exit(main(list(words)))
