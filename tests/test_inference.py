"""A finished run answers and is scored again: the commands predict and evaluate, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import kit
import pytest

import fivetune
from fivetune import rundir
from fivetune.cli import main
from fivetune.errors import DataError, RunDirError
from fivetune.training.inference import PREDICTED, open_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder), quiet=True, preflight=False)
    return folder / "run"


def test_predictions_come_in_the_order_of_the_file(run: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    assert main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(answers)]) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"q{i}" for i in range(100, 112)]
    assert all(set(line) == {*PREDICTED} - {"candidates"} for line in lines)


def test_predictions_equal_those_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(answers)])
    best = rundir.read(run).status["best"]["step"]
    recorded = {line["id"]: line["prediction"] for line in rundir.read(run).predictions[f"eval-{best}"]}
    assert {x["id"]: x["prediction"] for x in map(json.loads, answers.read_text().splitlines())} == recorded


def test_texts_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["question: What has Ann? context: Ann has a red hat.", "question: What has Bob? context: Bob has a bag."]
    assert main(["predict", str(run), "--inputs", *texts]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["0", "1"]


def test_an_empty_text_is_refused(run: Path) -> None:
    with pytest.raises(DataError, match="--inputs: text 2 is empty"):
        open_run(run).answers(source=None, texts=["question: a", " "])


def test_records_without_answers_can_be_predicted(run: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"id": "a", "question": "What has Ann?", "context": "Ann has a red hat."}\n')
    assert [line["id"] for line in open_run(run).answers(source=str(asked), texts=None)] == ["a"]


def test_evaluation_on_another_file_keeps_its_own_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = kit.squad_file(run.parent / "eval.json", num_questions=5, offset=300)
    before = rundir.own_evals(rundir.read(run).evals)
    assert main(["evaluate", str(run), "--data.eval", str(other), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["num_examples"], told["split"], told["scores"]["total"]) == (5, "other-eval", 5)
    assert rundir.own_evals(rundir.read(run).evals) == before


def test_a_run_without_a_model_says_how_to_go_on(tmp_path: Path, model_folder: Path) -> None:
    config = fivetune.load_config(kit.recipe(tmp_path, model_folder))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config.as_dict()))
    with pytest.raises(RunDirError, match=r"has no model/ yet: the run is not finished\. Go on with: fivetune train"):
        open_run(tmp_path / "run")
