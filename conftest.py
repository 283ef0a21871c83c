"""Examples of the public API run where their files are: tickets.csv and the trained run runs/tickets."""

from __future__ import annotations

import csv
import itertools
import shutil
from pathlib import Path

import pytest
from _pytest.doctest import DoctestItem

# Its functions are those of the modules below, where their examples run.
collect_ignore = ["fivetune/__init__.py"]

PUBLIC = {
    "fivetune.reading.compare",
    "fivetune.config",
    "fivetune.delivery.exporters._export",
    "fivetune.reading.diagnosis.diagnose",
    "fivetune.reading.report.run.build",
    "fivetune.rundir.reader",
    "fivetune.rundir.records",
    "fivetune.start.files",
    "fivetune.training",
    "fivetune.training.answers.trained_run",
}
"""Modules with examples that read these files."""

LATE = ("where is my parcel", "my parcel is late", "the courier never came", "nothing has arrived")
REFUND = ("i want my money back", "please refund my order", "give me a refund", "return the payment")


@pytest.fixture(scope="session")
def tickets_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tickets.csv, 40 rows of text and label, and runs/tickets, trained on them."""
    from built_once import build_once

    def build(folder: Path) -> Path:
        import fivetune

        folder.mkdir(parents=True, exist_ok=True)
        pairs = itertools.product(("", "hello, ", "hi! ", "again: ", "urgent: "), (*LATE, *REFUND))
        rows = [(start + text, "delivery" if text in LATE else "refund") for start, text in pairs]
        with (folder / "tickets.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            settings = {
                "run.dir": "runs/tickets",
                "train.num_steps": 40,
                "train.batch_size": 8,
                "train.num_threads": 1,
                "optimizer.lr": 1e-2,
                "eval.every_steps": 40,
                "device": "cpu",
            }
            recipe = {
                "model": {"path": "t5-nano"},
                "task": {"name": "classification"},
                "data": {"train": "tickets.csv", "eval": "tickets.csv", "cache_dir": "cache"},
            }
            fivetune.train(recipe, settings, preflight=False, quiet=True)
        return folder

    return build_once(tmp_path_factory, "tickets", build)


@pytest.fixture(autouse=True)
def in_tickets_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each example of a public module in its own copy of the folder."""
    item = request.node
    if not isinstance(item, DoctestItem) or not item.name.startswith(tuple(PUBLIC)):
        return
    if any("tickets" in each.source or "train(" in each.source for each in item.dtest.examples):
        shutil.copytree(request.getfixturevalue("tickets_folder"), tmp_path / "work")
        monkeypatch.chdir(tmp_path / "work")
