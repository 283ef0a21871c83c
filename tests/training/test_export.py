"""The end of a run: model/ is written first, and what fails after it is named and costs nothing else."""

from __future__ import annotations

import json

import kit
import pytest
from fake_run import fake_run, make_eval, make_predictions, write_run
from safetensors.torch import load_file

from fivetune import cli, train
from fivetune.reading.report import write_report
from fivetune.rundir.checksums import find_damage, write_checksums
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.records import BestEval
from fivetune.training import export
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.export import calibrate_confidence


def raise_internal(*args, **options):
    raise ValueError("zip() argument 2 is longer than argument 1")


def test_a_card_that_fails_is_named_and_costs_nothing(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(export, "build_model_card", raise_internal)
    run = train(kit.recipe(tmp_path, model_folder, train__num_steps=1), preflight=False, quiet=True)
    assert run.status.state == "finished" and run.evals[-1].scores
    told = "the model card failed: internal error: ValueError: zip() argument 2 is longer than argument 1. The model is"
    assert run.status.incomplete and run.status.incomplete.startswith(told)
    assert load_file(tmp_path / "run/model/model.safetensors")
    assert not (tmp_path / "run/model/README.md").exists()
    assert "raise_internal" in (tmp_path / "run/log.txt").read_text()  # the traceback, for who mends it
    assert write_report(tmp_path / "run").is_file()


def test_an_evaluation_that_fails_after_the_last_step_costs_no_model(tmp_path, model_folder, monkeypatch):
    """The evaluations while training are of a subset: the first of all examples comes when the steps are done."""
    evaluate = Evaluator.run

    def fail_on_all(self, model, **options):
        return raise_internal() if options["questions"] is None else evaluate(self, model, **options)

    monkeypatch.setattr(Evaluator, "run", fail_on_all)
    table = kit.recipe(tmp_path, model_folder, train__num_steps=1, eval__max_examples=4, eval__at_start=False)
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(table))
    assert cli.main(["train", str(path), "--no-preflight", "--quiet"]) == 6
    assert load_file(tmp_path / "run/model/model.safetensors")
    assert (tmp_path / "run/model/README.md").is_file() and (tmp_path / "run/report.html").is_file()
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert status["state"] == "finished" and "the evaluation on all examples failed" in status["incomplete"]


def test_a_temperature_that_helps_is_written_into_model(tmp_path):
    """9 of 10 by its own words, 3 of 4 in truth: one temperature for all, judged on halves."""
    lines = [
        {"id": f"q{i}", "prediction": "a", "references": ["a"], "confidence": 0.9 if i % 2 else 0.1,
         "scores": {"f1": float(i % 8 in (1, 3, 5, 6))}}
        for i in range(400)
    ]  # fmt: skip
    best = {"step": 300, "metric": "f1", "score": 50.0}
    run = fake_run(evals=[make_eval(300, {"f1": 50.0})], predictions={"eval-300": make_predictions(*lines)})
    folder = write_run(tmp_path / "run", run)
    (folder / "model").mkdir(exist_ok=True)
    write_checksums(folder / "model")
    found = calibrate_confidence(folder, BestEval(**best), "f1")
    assert found and found.helps and found.temperature == pytest.approx(2, rel=0.01)
    assert (round(found.error_before, 3), found.error_after < 0.05) == (0.15, True)
    assert read_temperature(folder / "model") == found.temperature and find_damage(folder / "model") is None


def test_a_temperature_that_does_not_help_is_not_written(tmp_path):
    lines = [{"id": f"q{i}", "confidence": 0.75, "scores": {"f1": float(i % 4 > 0)}} for i in range(400)]
    run = fake_run(evals=[make_eval(300, {"f1": 75.0})], predictions={"eval-300": make_predictions(*lines)})
    folder = write_run(tmp_path / "run", run)
    calibrate_confidence(folder, BestEval(step=300, metric="f1", score=75.0), "f1")
    assert calibrate_confidence(folder, None, "f1") is None
    assert not list(folder.rglob("confidence.json"))


def test_the_traceback_in_the_log_has_no_secrets(tmp_path, model_folder, monkeypatch):
    def fail(*args, **options):
        raise ValueError("https://ann:hunter2hunter2@example.org refused")

    monkeypatch.setattr(export, "build_model_card", fail)
    train(kit.recipe(tmp_path, model_folder, train__num_steps=1), preflight=False, quiet=True)
    log = (tmp_path / "run/log.txt").read_text()
    assert "Traceback" in log and "hunter2" not in log
