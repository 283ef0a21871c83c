"""The display of a run in a terminal: a bar, what is prepared, one line for each evaluation, in 80 columns."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_run import make_eval, make_run, make_step
from rich.console import Console

from fivetune.rundir.progress import Progress
from fivetune.rundir.records import BestEval

SCORES: dict[str, float] = dict.fromkeys(("exact", "f1", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"), 42.5)


@pytest.fixture
def progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    monkeypatch.setattr(Progress, "is_terminal", True)
    shown = Progress(tmp_path / "log.txt")
    yield shown
    shown.close()


def draw(progress: Progress, width: int = 80) -> list[str]:
    """The lines of the live display."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    progress._console = console
    with console.capture() as captured:
        console.print(progress._build_panel())
    return captured.get().splitlines()


def test_the_display_names_what_is_prepared(progress: Progress) -> None:
    progress.update("loading the model", 0)
    assert draw(progress)[0].split() == ["loading", "the", "model"]
    progress.update("tokenising train", 4_000, 16_000)
    (line,) = draw(progress)
    assert "4,000 of 16,000" in line and "25 %" in line and "\u2501" in line


@pytest.mark.parametrize("width", [80, 200])
def test_the_display_has_a_bar_and_fits_80_columns(progress: Progress, width: int) -> None:
    steps = make_run(steps=[make_step(step, step_seconds=9_000.0, loss=12.3456) for step in (1, 123_456)]).steps
    for step in steps:
        progress.show_step(step, 1_234_567)
    record = make_run(evals=[make_eval(50, SCORES)]).evals[0]
    progress.show_evaluation(record, metric="f1", best=BestEval(20, "f1", 52.8))
    first, second = draw(progress, width)
    assert (
        "\u2501" in first and "step 123,456 of 1,234,567" in first and "10 %" in first and first.rstrip()[-4:] == "left"
    )
    assert "loss 12.3456" in second and "f1 42.50 (best 52.80 at step 20)" in second
    assert max(len(first.rstrip()), len(second.rstrip())) <= 80


def test_an_evaluation_is_one_line_and_the_best_is_marked(
    progress: Progress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    intervals = dict.fromkeys(SCORES, (40.1, 45.2))
    for step, best in ((20, 20), (40, 20)):
        record = make_run(evals=[make_eval(step, SCORES, intervals=intervals, loss=0.5)]).evals[0]
        progress.show_evaluation(record, metric="f1", best=BestEval(best, "f1", 42.5))
    progress.close()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "eval at step     20:  f1 42.50 (40.1-45.2)  loss 0.5000  (4.8 s)  best so far"
    assert second == "eval at step     40:  f1 42.50 (40.1-45.2)  loss 0.5000  (4.8 s)"
    log = (tmp_path / "log.txt").read_text()
    assert len(re.findall("NoAns_f1", log)) == 2  # the log has all scores
