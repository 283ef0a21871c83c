"""Determinism: the same run again under other surroundings, and with another number of threads."""

from __future__ import annotations

import argparse
import html
import math
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from threading import Lock
from typing import Any

from fivetune.reading.diagnosis.rules import diagnose_run, is_severe
from fivetune.rundir import read_run
from reliability.campaign import ROOT, Row, Trial
from reliability.warm import WarmProcess, check_success
from reliability.workload import NUM_STEPS, VARIANTS, Workload, check_same_run, make_model, read_weights, resume

ALONE = [name for name, options in VARIANTS.items() if "launch" not in options]
WIDE_LOCK = Lock()
OTHER_THREADS = (1e-5, 0.2)  # relative, in two steps and in NUM_STEPS: docs/reliability.md has what was measured
STABLE_SECTIONS = ("Verdict", "Confidence", "Slices", "Labels", "Examples", "Definitions")  # of a report
SHUFFLED_FOLDERS = """
import os, random
order, listdir, scandir = random.Random({seed}), os.listdir, os.scandir
def shuffle(entries):
    entries = list(entries)
    shuffled = order.sample(entries, len(entries))
    if shuffled != entries:
        open({marker!r}, "w").close()
    return shuffled
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
    for number, variant in enumerate(cycle(random.sample(ALONE, len(ALONE)))):
        seed = random.randrange(1, 2**32)

        def run(folder: Path, variant: str = variant, seed: int = seed) -> None:
            whole = workload.run_undisturbed(variant).run
            recipe = workload.write_recipe(folder, variant)
            elsewhere, site = folder / "elsewhere", folder / "site"
            elsewhere.mkdir()
            site.mkdir()
            marker = folder / "shuffled"
            (site / "sitecustomize.py").write_text(SHUFFLED_FOLDERS.format(seed=seed, marker=str(marker)))
            paths = os.pathsep.join([str(site), str(ROOT)])
            words = ["-m", "fivetune", "train", str(recipe), "--no-preflight", "--quiet"]
            environ = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": paths}
            done = subprocess.run(
                [sys.executable, *words], cwd=elsewhere, env=environ, capture_output=True, text=True, timeout=300
            )
            check_success(done)
            assert marker.exists(), "no folder was listed in another order"
            check_same_run(folder / "run", whole)
            ours, theirs = (read_report(each) for each in (folder / "run", whole))
            assert ours == theirs, f"the reports differ: {[name for name in theirs if ours.get(name) != theirs[name]]}"

        yield Trial(f"{number} {variant} with hash seed {seed}", run)


def read_report(run: Path) -> dict[str, str]:
    """The sections of a report, by title, that have no time, place or speed.

    The verdict is without its duration, and without problems of speed and of the machine, which other programs change.
    """
    page = (run / "report.html").read_text(encoding="utf-8")
    for one in diagnose_run(read_run(run)):
        if not is_severe(one):
            page = re.sub(rf"\s*<li [^>]*><p>{re.escape(html.escape(one.message))}</p>.*?</li>", "", page)
    page = re.sub(r"\s*<ol[^>]*>\s*</ol>", "", page)
    page = re.sub(r"(finished after [\d,]+ steps) in \d[^<]*?[a-z]\.(?=[ <])", r"\1.", page)
    found = dict(re.findall(r"<section[^>]*>\s*<h2[^>]*>(.*?)</h2>(.*?)</section>", page, re.DOTALL))
    assert {"Verdict", "Examples"} <= found.keys(), f"sections of the report: {list(found)}"
    return {name: text for name, text in found.items() if name in STABLE_SECTIONS}


def change_threads(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A run of two threads twice, and beside one of a single thread."""
    for number, variant in enumerate(cycle(random.sample(ALONE, len(ALONE)))):

        def run(folder: Path, variant: str = variant) -> None:
            alone, both, again = run_wide(workload, folder, variant, [{"train__num_threads": num} for num in (1, 2, 2)])
            assert read_weights(both) == read_weights(again), "two runs of two threads differ"
            for off, bound in zip(measure_difference(both, alone), OTHER_THREADS, strict=True):
                assert off <= bound, f"losses of another number of threads are off by {off:.1e}"

        yield Trial(f"{number} {variant}", run)


def run_wide(workload: Workload, folder: Path, variant: str, settings: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Runs with these settings of a model that is wide enough for its products to be shared by threads."""
    model = workload.folder / "wide-t5"
    with WIDE_LOCK:
        if not model.exists():
            check_success(WarmProcess(make_wide_model, str(model), str(workload.folder / "tokenizer")).finish())
    runs: list[Path] = []
    for number, overrides in enumerate(settings):
        place = folder / str(number)
        place.mkdir()
        # auto measures whether bf16 is faster, and a busy machine may decide otherwise than a quiet one
        options = {"train__precision": "fp32", "model__path": str(model), **overrides}
        resume(workload.write_recipe(place, variant, **options), place / "run")
        runs.append(place / "run")
    return runs


def make_wide_model(folder: str, tokenizer: str) -> None:
    make_model(Path(folder), Path(tokenizer), d_model=256, d_kv=32, d_ff=1024, num_heads=8)


def measure_difference(one: Path, other: Path) -> tuple[float, float]:
    """The relative difference of the losses of two runs: in the first two steps, and the largest of all steps."""
    ours, theirs = ([step.loss or math.nan for step in read_run(run).steps] for run in (one, other))
    differences = [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return max(differences[:2]), max(differences)


ROWS = [
    Row("R29", "another hash seed, working directory and order of folders",
        "identical weights, losses, scores, predictions, and verdict and examples of the report",
        repeat_elsewhere, 1, 5 * len(ALONE)),
    Row("R36", "two threads instead of one",
        "two runs of two threads are identical; losses within 1e-5 of those of one thread in 2 steps, 0.2 in 30",
        change_threads, 1, 14),
]  # fmt: skip


def main() -> None:
    """Print what the bounds are measured by."""
    parser = argparse.ArgumentParser(prog="python -m reliability.rows.determinism", description=main.__doc__)
    parser.add_argument("--device", default="cpu", help="beside one thread of the CPU: cuda (default: two threads)")
    device = parser.parse_args().device
    alone: dict[str, Any] = {"train__num_threads": 1}
    other, settings = "2 threads", {"train__num_threads": 2}
    if device != "cpu":  # devices draw other random numbers
        alone = {**alone, "model__dropout": 0.0}
        other, settings = device, {"model__dropout": 0.0, "device": device}
    with tempfile.TemporaryDirectory() as place:
        workload = Workload(Path(place, "workload"))
        print(f"{'':14} {'each twice':^24} {f'{other} beside 1 thread':>30}")
        print(f"{'run':14} {'1 thread':>12}{other:>12} {'first 2 steps':>18} {f'all {NUM_STEPS}':>11}")
        for variant in ALONE:
            folder = Path(place, variant)
            folder.mkdir()
            one, one_again, two, two_again = run_wide(workload, folder, variant, [alone, alone, settings, settings])
            same = [
                "identical" if read_weights(a) == read_weights(b) else "differ"
                for a, b in ((one, one_again), (two, two_again))
            ]
            first, last = measure_difference(two, one)
            print(f"{variant:14} {same[0]:>12}{same[1]:>12} {first:18.1e} {last:11.1e}", flush=True)


if __name__ == "__main__":
    main()
