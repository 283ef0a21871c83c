"""Mutants: one fault written into the code that keeps users safe, which the tests of the default tier must find.

A trial copies the checkout, replaces one text of one file, and runs the named tests there: one of them must fail. A
text that is not in its file exactly once, tests that are not there, and code that cannot be imported fail the trial.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from reliability.campaign import ROOT, Row, Trial
from reliability.mutants import MUTANTS, Mutant
from reliability.workload import Workload

COPIED = ("fivetune", "tests", "reliability", "conftest.py", "pyproject.toml")
LINKED = ("docs", "recipes", "benchmarks", "README.md", "CHANGELOG.md", "Makefile")
BROKEN_CODE = re.compile(
    r"^E +(ImportError|ModuleNotFoundError|SyntaxError|NameError|UnboundLocalError)\b", re.MULTILINE
)
SECONDS = 300


def plant_mutants(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The mutants in random order, each beside the same tests without it."""
    for mutant in random.sample(MUTANTS, len(MUTANTS)):

        def run(folder: Path, mutant: Mutant = mutant) -> None:
            copy_checkout(folder)
            done = run_tests(folder, mutant.tests, mutant.only)
            assert done.returncode == 0, f"without the mutant {' '.join(mutant.tests)} fail: {done.stdout[-1500:]}"
            plant(folder / "fivetune" / mutant.file, mutant.old, mutant.new)
            done = run_tests(folder, mutant.tests, mutant.only)
            told = done.stdout[-2500:]
            assert done.returncode != 0, f"survived {' '.join(mutant.tests)}: {told[-300:]}"
            assert done.returncode == 1, f"pytest ended with {done.returncode} instead of a failed test: {told}"
            assert not BROKEN_CODE.search(done.stdout), f"the mutant cannot be imported or run: {told}"

        yield Trial(mutant.name, run)


def copy_checkout(folder: Path) -> None:
    """Copy what tests import into a folder, and link what they read."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, folder / name)
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)


def plant(path: Path, old: str, new: str) -> None:
    """Replace the one place of a text in a file."""
    text = path.read_text(encoding="utf-8")
    found = text.count(old)
    assert found == 1, f"{path.name} has {old!r} {found} times instead of once: the mutant is stale"
    path.write_text(text.replace(old, new), encoding="utf-8")


def run_tests(folder: Path, tests: Sequence[str], only: str) -> subprocess.CompletedProcess[str]:
    """Run tests of the default tier in a copy, up to the first failure."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTEST_DEBUG_TEMPROOT": str(scratch),
        "OMP_NUM_THREADS": "1",
    }
    chosen = ["-k", only] if only else []
    words = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not release", *chosen, *tests]
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=SECONDS
    )


ROWS = [
    Row("R35", "a mutant of the code that keeps users safe",
        "a test of the default tier fails, and passes without it", plant_mutants, 4),
]  # fmt: skip
