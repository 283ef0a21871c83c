"""`fivetune train`: every ending leaves a report with its path printed, and keeps its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import kit
import pytest
import yaml

from fivetune import cli
from fivetune.commands import train as command
from fivetune.distributed.world import ProcessGroupError
from fivetune.errors import NumericError
from fivetune.reading.report.run.build import build_page
from fivetune.rundir import read_run

LONG = {"train__num_steps": 40, "eval__every_steps": 40}


def _train(folder: Path, model: Path, *flags: str, **overrides: Any) -> int:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(kit.recipe(folder, model, **overrides)))
    return cli.main(["train", str(recipe), "--quiet", "--no-preflight", *flags])


def _read_lead(folder: Path) -> str:
    page = (folder / "run" / "report.html").read_text(encoding="utf-8")
    [lead] = re.findall(r'<p class="lead">(.*?)</p>', page)
    return " ".join(lead.replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_an_interrupted_run_has_a_report(signum, tmp_path, model_folder, monkeypatch, capsys) -> None:
    kit.signal_at(monkeypatch, "show_step", 3, signum)
    assert _train(tmp_path, model_folder, **LONG) == 128 + signum
    report, error = capsys.readouterr().err.splitlines()[-2:]
    assert report == f"report  {tmp_path / 'run' / 'report.html'}" and "--resume" in error
    lead = _read_lead(tmp_path)
    assert "The run was interrupted after 3 steps of 40 in " in lead and lead.count("stopped by") == 1
    assert "--resume" not in lead and "--resume</code>" in (tmp_path / "run" / "report.html").read_text()


def test_a_failed_run_has_a_report_that_counts_its_steps_and_claims_no_model(tmp_path, model_folder, capsys) -> None:
    optimizer = {"name": "sgd", "lr": 10}
    code = _train(tmp_path, model_folder, optimizer=optimizer, train__max_grad_norm=1e30, **LONG)
    assert code == NumericError.exit_code
    assert "report  " in capsys.readouterr().err and not (tmp_path / "run" / "model").exists()
    run = read_run(tmp_path / "run")
    assert run.status.step == len(run.steps) > 0 and run.status.seconds
    lead = _read_lead(tmp_path)
    assert f"The run failed after {len(run.steps)} step" in lead and "no model was saved" in lead
    assert "model/ holds" not in (tmp_path / "run" / "report.html").read_text()
    assert {badge.kind for badge in build_page(run).badges} == {"bad"}


def test_a_run_that_fails_after_its_model_says_that_there_is_one(tmp_path, model_folder, monkeypatch) -> None:
    """A lost rank ends a run although model/ is written."""

    def fail(*args: object) -> None:
        raise ProcessGroupError("another process ended")

    monkeypatch.setattr("fivetune.training.export.calibrate_confidence", fail)
    assert _train(tmp_path, model_folder, train__num_steps=1) == ProcessGroupError.exit_code
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    lead = _read_lead(tmp_path)
    assert "The run failed after 1 step" in lead and "model/ was saved" in lead


def test_a_refused_start_leaves_the_report_of_the_run_that_is_there(tmp_path, model_folder, capsys) -> None:
    assert _train(tmp_path, model_folder, train__num_steps=1, data__eval=[]) == 0
    before = (tmp_path / "run" / "report.html").stat().st_mtime_ns
    capsys.readouterr()
    assert _train(tmp_path, model_folder, train__num_steps=1, data__eval=[]) == 4
    assert _train(tmp_path, model_folder, "--resume", train__num_steps=1, data__eval=[], optimizer__lr=0.1) != 0
    assert (tmp_path / "run" / "report.html").stat().st_mtime_ns == before
    assert "report  " not in capsys.readouterr().err


def test_without_a_step_there_is_no_report(tmp_path, model_folder, monkeypatch, capsys) -> None:
    monkeypatch.setattr("fivetune.training.loop.run_step", _fail)
    assert _train(tmp_path, model_folder, data__eval=[], **LONG) == 1
    assert not (tmp_path / "run" / "report.html").exists() and "report  " not in capsys.readouterr().err


def _fail(*args: object, **kwargs: object) -> None:
    raise ValueError("a fault")


@pytest.mark.parametrize("hinder", [lambda folder: time.sleep(60), _fail])
def test_a_report_that_cannot_be_written_changes_no_ending(hinder, tmp_path, model_folder, monkeypatch, capsys) -> None:
    """A scheduler kills the process soon after its signal, so the report has a few seconds."""
    kit.signal_at(monkeypatch, "show_step", 2)
    monkeypatch.setattr(command, "REPORT_SECONDS", 0.2)
    monkeypatch.setattr("fivetune.reading.report.write_report", hinder)
    started = time.monotonic()
    assert _train(tmp_path, model_folder, data__eval=[], **LONG) == 128 + signal.SIGTERM
    assert time.monotonic() - started < 50
    assert f"Write it with: fivetune report {tmp_path / 'run'}" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "interrupted"


@pytest.mark.parametrize("is_rank", [True, False])
def test_the_report_outlasts_torchrun_that_ends_its_rank(is_rank, tmp_path, monkeypatch) -> None:
    """When a rank has failed, torchrun sends SIGTERM to the others: rank 0 writes the report then."""

    def write_while_ended(folder: str) -> Path:
        os.kill(os.getpid(), signal.SIGTERM)
        return Path(folder, "report.html")

    if is_rank:
        monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("fivetune.reading.report.write_report", write_while_ended)
    line = command._try_report(str(tmp_path), None)
    assert line.startswith(f"report  {tmp_path}" if is_rank else "The report is not written. Write it with")


def test_a_killed_run_counts_its_steps_and_its_time(tmp_path, model_folder) -> None:
    """status.json has the last checkpoint's step and no time; the records have both."""
    assert _train(tmp_path, model_folder, train__num_steps=3, data__eval=[]) == 0
    status = tmp_path / "run" / "status.json"
    left = {"step": 0, "seconds": None, "seconds_by_phase": {}, "state": "interrupted", "begun": True}
    status.write_text(json.dumps({**json.loads(status.read_text()), **left}))
    run = read_run(tmp_path / "run")
    assert run.status.step == 3 and run.status.seconds is not None and run.status.seconds > 0
