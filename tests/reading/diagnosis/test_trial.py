"""A predicted gain, tried out: the short runs are real, but in this process, which has loaded torch already."""

from __future__ import annotations

import tempfile
from pathlib import Path

import kit
import pytest
from uneven_questions import questions

from fivetune.cli import main
from fivetune.config import load_config
from fivetune.config.layers import as_yaml, parse_overrides
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.reading.diagnosis import verify as trial
from fivetune.reading.diagnosis.rules import find_verdicts
from fivetune.reading.diagnosis.stats import RunStats, collect_run_stats
from fivetune.reading.diagnosis.verify import can_verify, verify_change
from fivetune.training.run import train
from fivetune.types import Verdict

pytestmark = pytest.mark.slow


class JobHere:
    """`fivetune WORDS` without a new process."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.words = words

    def __enter__(self) -> JobHere:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> int:
        return main(self.words)

    def read_error(self) -> str:
        return "what the error said"


@pytest.fixture
def here(monkeypatch):
    """Short runs in this process, once with and once without the change."""
    monkeypatch.setattr(trial, "Job", JobHere)
    monkeypatch.setattr(trial, "ROUNDS", 1)


def tiny_run(folder, model, **settings):
    data = {"data__train": questions(folder / "some.json", num=200), "data__bucket_pool": 32}
    return train(
        kit.recipe(folder, model, **{**data, "train__global_batch_size": 8, "telemetry__every_seconds": 0, **settings}),
        quiet=True,
        preflight=False,
    )


@pytest.mark.release
def test_larger_passes_are_faster_as_predicted(tmp_path, model_folder, here, cpu_clock, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the short runs are in the system's temporary directory
    monkeypatch.setitem(trial.SHORT_RUN_SETTINGS, "train.num_steps", 20)
    run = tiny_run(tmp_path, model_folder, train__batch_size=1, train__num_steps=24, data__eval=[])
    evidence = collect_run_stats(run)
    first = find_verdicts(evidence)[0]
    assert first.rule == "launch_bound" and can_verify(first) and first.gain
    said = []
    done = verify_change(tmp_path / "run", evidence, first, on_progress=said.append)
    assert said == ["round 1 of 1, without the change", "round 1 of 1, with the change"]
    assert done.predicted == first.gain
    assert done.measured > 1.5
    assert done.low == done.measured == done.high  # one round
    assert not list(tmp_path.glob("fivetune-trial-*"))


def test_rarer_evaluations_are_measured_by_what_one_takes(tmp_path, model_folder, here, cpu_clock):
    others = questions(tmp_path / "others.json", num=48, offset=300)
    run = tiny_run(
        tmp_path,
        model_folder,
        data__eval=others,
        train__num_steps=14,
        train__batch_size=8,
        eval__every_steps=1,
        checkpoint__every_steps=14,
    )
    evidence = collect_run_stats(run)
    first = next(verdict for verdict in find_verdicts(evidence) if verdict.rule == "evaluation_bound")
    done = verify_change(tmp_path / "run", evidence, first, on_progress=lambda words: None)
    assert 0.5 < done.measured / done.predicted < 2  # evaluations of milliseconds vary


def test_what_is_changed_is_as_the_recipe_has_it_in_the_runs_without_the_change(monkeypatch):
    commands: list[list[str]] = []

    class JobNowhere(JobHere):
        def wait(self) -> int:
            commands.append(self.words)
            return 0

    monkeypatch.setattr(trial, "_measure_cost", lambda *_: 1.0)
    monkeypatch.setattr(trial.rundir, "read_run", lambda _: None)
    monkeypatch.setattr(trial, "Job", JobNowhere)
    change = {"report.sinks": []}
    verdict = Verdict("host_bound", "", None, None, 1.0, "", change, gain=1.5)
    verify_change(Path("runs/x"), RunStats(), verdict, on_progress=lambda _: None)
    assert ["--report.sinks=[]" in command for command in commands] == [False, True, True, False]


@pytest.mark.parametrize("rule", ["host_bound", "checkpoint_bound", "evaluation_bound"])
def test_only_short_runs_that_measure_evaluations_evaluate(monkeypatch, tmp_path, model_folder, rule):
    """Without evaluations there is no early stopping either; a share of the training data is not held back."""
    configs = []

    class JobLoads(JobHere):
        def wait(self) -> int:
            configs.append(load_config(self.words[1], parse_overrides(self.words[4:])))
            return 0

    table = kit.recipe(tmp_path, model_folder, train__early_stopping=2, data__eval=[], data__eval_share=0.2)
    table["data"]["group_column"] = "id"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(as_yaml(table))
    monkeypatch.setattr(trial, "_measure_cost", lambda *_: 1.0)
    monkeypatch.setattr(trial.rundir, "read_run", lambda _: None)
    monkeypatch.setattr(trial, "Job", JobLoads)
    verdict = Verdict(rule, "", None, None, 1.0, "", {"train.batch_size": 4}, gain=1.5)
    verify_change(recipe, RunStats(), verdict, on_progress=lambda _: None)
    assert {config.train.early_stopping for config in configs} == {None}
    assert {config.data.eval_share for config in configs} == {0.2 if rule == "evaluation_bound" else None}


def test_a_short_run_that_fails_says_why(tmp_path, model_folder, here):
    tiny_run(tmp_path, model_folder, train__batch_size=8, train__num_steps=1, data__eval=[])
    (tmp_path / "some.json").unlink()
    verdict = Verdict("launch_bound", "", None, None, 1.0, "", {"train.batch_size": 4}, gain=1.5)
    with pytest.raises(FiveTuneEnvironmentError, match="the short run without the change failed: what the error"):
        verify_change(tmp_path / "run", RunStats(), verdict, on_progress=lambda words: None)
