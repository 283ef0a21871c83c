"""Predictions as BioASQ's submission: written for factoid and yes/no questions together, read by `fivetune score`."""

from __future__ import annotations

import json
from pathlib import Path

import kit
import pytest

import fivetune
from fivetune.cli import main

FACTOID = {
    "id": "f1",
    "type": "factoid",
    "body": "What has Ann?",
    "snippets": [{"text": "Ann has a red hat."}, {"text": "Bob has a blue coat."}],
    "exact_answer": [["red hat"]],
}
YES_NO = {
    "id": "y1",
    "type": "yesno",
    "body": "Has Ann a hat?",
    "snippets": [{"text": "Ann has a red hat."}],
    "exact_answer": "yes",
}
LIST = {"id": "l1", "type": "list", "body": "Who?", "snippets": [{"text": "Ann."}], "exact_answer": [["Ann"]]}
BARE = {**FACTOID, "id": "f2", "snippets": []}


def put(path: Path, *questions: dict) -> str:
    path.write_text(json.dumps({"questions": questions}))
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("bioasq")
    golden = put(folder / "golden.json", FACTOID, YES_NO)
    parts = {"factoid": {"task": "bioasq_factoid"}, "yesno": {"task": "bioasq_yesno"}}
    recipe = kit.recipe(
        folder,
        model_folder,
        task={"name": "mixture", "by": "size", "parts": parts},
        data__train=golden,
        data__eval=golden,
        train__num_steps=1,
        eval__num_beams=8,
        eval__num_candidates=8,
    )
    fivetune.train(recipe, quiet=True, preflight=False)
    return folder / "run"


def test_the_official_form_for_both_types_is_scored(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, target = put(tmp_path / "asked.json", FACTOID, BARE, YES_NO, LIST), str(tmp_path / "submission.json")
    assert main(["predict", str(run), "--input", asked, "--format", "bioasq", "--output", target]) == 0
    assert "4 records: 2 answered, 1 of other types, 1 skipped (first: " in capsys.readouterr().err
    by_id = {question["id"]: question for question in json.loads(Path(target).read_text())["questions"]}
    assert by_id["y1"]["exact_answer"] in ("yes", "no") and by_id["f1"]["type"] == "factoid"
    assert 1 <= len(by_id["f1"]["exact_answer"]) <= 5
    assert all(isinstance(one, list) and len(one) == 1 for one in by_id["f1"]["exact_answer"])
    golden = put(tmp_path / "golden.json", FACTOID, YES_NO)
    for task, score in (("bioasq_factoid", "lenient_accuracy"), ("bioasq_yesno", "accuracy")):
        assert main(["score", task, golden, target, "--json"]) == 0
        assert score in json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]


def test_questions_of_other_types_and_without_snippets_keep_their_lines(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, target = put(tmp_path / "asked.json", FACTOID, BARE, YES_NO), tmp_path / "out.jsonl"
    words = ["--task.part", "factoid", "--input", asked, "--output", str(target), "--json"]
    assert main(["predict", str(run), *words]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(line["id"], line["prediction"] is None) for line in lines] == [("f1", False), ("f2", True), ("y1", True)]
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (counts["num_answers"], counts["num_skipped"], counts["num_other_types"]) == (1, 1, 1)


def test_a_question_that_is_asked_twice_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = put(tmp_path / "asked.json", FACTOID, YES_NO, FACTOID)
    assert main(["predict", str(run), "--input", asked, "--format", "bioasq"]) == 3
    assert "the id 'f1' is used twice; --format bioasq has one answer per id." in capsys.readouterr().err


def test_other_tasks_have_no_such_form(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fivetune.train(kit.recipe(tmp_path, model_folder, train__num_steps=1), quiet=True, preflight=False)
    dev = str(tmp_path / "dev.json")
    assert main(["predict", str(tmp_path / "run"), "--input", dev, "--format", "bioasq"]) == 2
    assert "--format bioasq: the run's task is squad_v2. Allowed: bioasq_factoid" in capsys.readouterr().err
