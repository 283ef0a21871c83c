"""Determinism: the same run again under other surroundings, and with another number of threads."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from fivetune.rundir import read_run
from reliability.campaign import ROOT, Row, Trial
from reliability.workload import VARIANTS, Workload, read_weights, resume

ALONE = [name for name, options in VARIANTS.items() if "launch" not in options]
OTHER_THREADS = 1e-4  # relative bound of a loss after NUM_STEPS steps; docs/reliability.md has what was measured
SHUFFLED_FOLDERS = """
import os, random
order, listdir, scandir = random.Random({seed}), os.listdir, os.scandir
def shuffle(entries):
    entries = list(entries)
    order.shuffle(entries)
    return entries
class Scan:
    def __init__(self, *args):
        with scandir(*args) as found:
            self.entries = iter(shuffle(found))
    def __iter__(self): return self
    def __next__(self): return next(self.entries)
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def close(self): pass
os.listdir = lambda *args: shuffle(listdir(*args))
os.scandir = Scan
"""


def repeat_elsewhere(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A run with another hash seed, working directory, and order in which folders list their entries."""
    for number in count():
        variant, seed = ALONE[number % len(ALONE)], random.randrange(1, 2**32)

        def run(folder: Path, variant: str = variant, seed: int = seed) -> None:
            whole = workload.run_undisturbed(variant).run
            recipe = workload.write_recipe(folder, variant)
            elsewhere, site = folder / "elsewhere", folder / "site"
            elsewhere.mkdir()
            site.mkdir()
            (site / "sitecustomize.py").write_text(SHUFFLED_FOLDERS.format(seed=seed))
            paths = os.pathsep.join([str(site), str(ROOT)])
            words = ["-m", "fivetune", "train", str(recipe), "--no-preflight", "--quiet"]
            environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths}
            done = subprocess.run(
                [sys.executable, *words], cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0, done.stderr[-600:]
            assert read_weights(folder / "run") == read_weights(whole), "the weights differ"
            ours, theirs = (describe_results(each) for each in (folder / "run", whole))
            assert ours == theirs, f"differ: {[name for name in theirs if ours.get(name) != theirs[name]]}"

        yield Trial(f"{number} {variant} with hash seed {seed}", run)


def describe_results(run: Path) -> dict[str, Any]:
    """What must not depend on surroundings: losses, scores, predictions."""
    found = read_run(run)
    steps = [(one.step, one.loss, one.grad_norm, one.lr, one.num_examples_seen) for one in found.steps]
    evals = [(one.step, one.split, one.loss, one.scores) for one in found.evals]
    predictions = {path.name: path.read_bytes() for path in sorted((run / "predictions").iterdir())}
    return {"steps": steps, "evaluations": evals, "best": found.status.best, **predictions}


def change_threads(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A run of two threads twice, and beside one of a single thread."""
    for number in count():
        variant = ALONE[number % len(ALONE)]

        def run(folder: Path, variant: str = variant) -> None:
            whole = workload.run_undisturbed(variant)
            runs: list[Path] = []
            for name in ("two", "two again"):
                (folder / name).mkdir()
                resume(workload.write_recipe(folder / name, variant, train__num_threads=2), folder / name / "run")
                runs.append(folder / name / "run")
            assert read_weights(runs[0]) == read_weights(runs[1]), "two runs of two threads differ"
            off = measure_difference(runs[0], whole.run)
            assert off <= OTHER_THREADS, f"losses of another number of threads are off by {off:.1e}"

        yield Trial(f"{number} {variant}", run)


def measure_difference(one: Path, other: Path) -> float:
    """The largest relative difference of the losses of two runs, of steps and of evaluations."""
    losses = [
        [(kind, each.step, each.loss) for kind in ("steps", "evals") for each in getattr(read_run(run), kind)]
        for run in (one, other)
    ]
    assert [key[:2] for key in losses[0]] == [key[:2] for key in losses[1]], "other steps"
    pairs = [(a[2], b[2]) for a, b in zip(*losses, strict=True) if a[2] is not None]
    return max(abs(a - b) / abs(b) for a, b in pairs)


ROWS = [
    Row("R29", "another hash seed, working directory and order of folders",
        "identical weights, losses, scores and predictions", repeat_elsewhere, 1, 5 * len(ALONE)),
    Row("R36", "two threads instead of one",
        "two runs of two threads are identical; losses within 1e-4 of those of one thread", change_threads, 1, 14),
]  # fmt: skip
