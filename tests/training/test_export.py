"""The end of a run: model/ is written first, and what fails after it is named and costs nothing else."""

from __future__ import annotations

import json

import kit
from safetensors.torch import load_file

from fivetune import cli, train
from fivetune.evaluation.evaluator import Evaluator
from fivetune.report import write_report
from fivetune.training import export


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
