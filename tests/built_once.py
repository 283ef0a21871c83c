"""Results that take long to build and that every worker of a test session needs: one builds, the others wait.

In: a name and a function. Out: its result, through pickle. Tests must not change its files.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from fivetune.rundir import lock_file

T = TypeVar("T")


def build_once(tmp_path_factory: pytest.TempPathFactory, name: str, build: Callable[[Path], T]) -> T:
    """Return the result of `build(folder)`, of this worker or of the one that was first."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, result = root / name, root / f"{name}.pickle"
    with (root / f"{name}.lock").open("wb") as lock:
        lock_file(lock, wait=True)
        if not result.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            result.write_bytes(pickle.dumps(build(folder)))
        return pickle.loads(result.read_bytes())  # noqa: S301  (written by a worker of this session)
