"""A predicted gain, tried out: the short runs are real, but in this process, which has loaded torch already."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import kit
import pytest
from test_faults import questions

from fivetune.cli import main
from fivetune.errors import EnvironmentProblem
from fivetune.telemetry import trial
from fivetune.telemetry.evidence import Evidence, of_run
from fivetune.telemetry.trial import can_try, try_out
from fivetune.telemetry.verdict import diagnose
from fivetune.training import train
from fivetune.types import Verdict

Done = subprocess.CompletedProcess([], 0)


@pytest.fixture
def here(monkeypatch):
    """Runs `python -m fivetune ...` without a new process, once with and once without the change."""

    def run_it(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        if command[1:3] != ["-m", "fivetune"]:
            return started(command, **how)
        code = main(command[3:])
        return subprocess.CompletedProcess(command, code, "", "fivetune: what the error said\n" if code else "")

    started = subprocess.run
    monkeypatch.setattr(subprocess, "run", run_it)
    monkeypatch.setattr(trial, "ROUNDS", 1)


def tiny_run(folder, model, **settings):
    data = {"data__train": questions(folder / "some.json", num=200), "data__bucket_pool": 32}
    return train(kit.recipe(folder, model, **{**data, "train__global_batch_size": 8, **settings}), quiet=True,
                 preflight=False)  # fmt: skip


def test_larger_passes_are_faster_as_predicted(tmp_path, model_folder, here):
    run = tiny_run(tmp_path, model_folder, train__batch_size=1, train__num_steps=40, data__eval=[])
    evidence = of_run(run)
    first = diagnose(evidence)[0]
    assert first.rule == "launch_bound" and can_try(first) and first.gain
    said = []
    done = try_out(tmp_path / "run", evidence, first, say=said.append)
    assert said == ["round 1 of 1, without the change", "round 1 of 1, with the change"]
    assert done.predicted == first.gain
    assert done.measured > 1.5
    assert done.low == done.measured == done.high  # one round
    assert not list(tmp_path.glob("fivetune-trial-*"))


def test_rarer_evaluations_are_measured_by_what_one_takes(tmp_path, model_folder, here):
    others = questions(tmp_path / "others.json", num=96, offset=300)
    run = tiny_run(tmp_path, model_folder, data__eval=others, train__num_steps=14, train__batch_size=8,
                   eval__every_steps=1, checkpoint__every_steps=14)  # fmt: skip
    evidence = of_run(run)
    first = diagnose(evidence)[0]
    assert first.rule == "evaluation_bound"
    done = try_out(tmp_path / "run", evidence, first, say=lambda words: None)
    assert done.measured == pytest.approx(done.predicted, rel=0.6)


def test_what_is_changed_is_as_the_recipe_has_it_in_the_runs_without_the_change(monkeypatch):
    commands = []
    monkeypatch.setattr(trial, "_cost", lambda *_: 1.0)
    monkeypatch.setattr(trial.rundir, "read", lambda _: None)
    monkeypatch.setattr(trial.subprocess, "run", lambda command, **_: commands.append(command) or Done)
    change = {"report.sinks": []}
    verdict = Verdict("host_bound", "", None, None, 1.0, "", change, gain=1.5)
    try_out(Path("runs/x"), Evidence(), verdict, say=lambda _: None)
    assert ["--report.sinks=[]" in command for command in commands] == [False, True, True, False]


def test_a_short_run_that_fails_says_why(tmp_path, model_folder, here):
    tiny_run(tmp_path, model_folder, train__batch_size=8, train__num_steps=1, data__eval=[])
    (tmp_path / "some.json").unlink()
    verdict = Verdict("launch_bound", "", None, None, 1.0, "", {"train.batch_size": 4}, gain=1.5)
    with pytest.raises(EnvironmentProblem, match="the short run without the change failed: fivetune: what the error"):
        try_out(tmp_path / "run", Evidence(), verdict, say=lambda words: None)
