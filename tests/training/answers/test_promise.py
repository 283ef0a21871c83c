"""`evaluate --max-error` keeps a promise in the model folder; `predict` withholds the answers below its confidence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import kit
import pytest
from fake_run import fake_run, make_eval, make_predictions, write_run

import fivetune
from fivetune import cli
from fivetune.errors import ConfigError, PromiseError
from fivetune.rundir.abstention_file import Abstention, Level, read_abstention, write_abstention
from fivetune.rundir.checksums import find_damage, write_checksums
from fivetune.rundir.records import BestEval
from fivetune.training.export import calibrate_confidence

TASK: dict[str, Any] = {"task": {"name": "classification", "inputs": "colour: {thing}", "label": "colour"}}
FAST = {"train.num_steps": 2, "eval.every_steps": 2, "eval.at_start": False}
ROWS: list[dict[str, Any]] = [
    {"id": f"r{i}", "thing": f"{kit.COLOURS[i % 2]} hat {i}", "colour": kit.COLOURS[i % 2]} for i in range(12)
]
NEW = [{**row, "id": f"n{i}", "thing": row["thing"].replace("hat", "coat")} for i, row in enumerate(ROWS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> fivetune.TrainedRun:
    folder = tmp_path_factory.mktemp("promise")
    given = {**kit.recipe(folder, model_folder, **TASK), "data": {"train": ROWS, "cache_dir": str(folder / "cache")}}
    return fivetune.train(given, FAST, quiet=True, preflight=False)


def keep(run: fivetune.TrainedRun, probability: float) -> None:
    """A promise whose level is a probability of the model's."""
    levels = (Level(probability, 100, 0), Level(0.0, 200, 150))
    write_abstention(run.folder / "model", Abstention("accuracy", 1.0, 200, "eval", 2, levels, 0.05))


def test_a_training_measures_its_errors_and_promises_nothing(tmp_path: Path) -> None:
    lines = [{"id": f"q{i}", "confidence": 0.9, "scores": {"f1": 0.5, "exact": float(i % 4 > 0)}} for i in range(40)]
    run = fake_run(evals=[make_eval(300, {"f1": 75.0})], predictions={"eval-300": make_predictions(*lines)})
    folder = write_run(tmp_path / "run", run)
    (folder / "model").mkdir(exist_ok=True)
    write_checksums(folder / "model")
    calibrate_confidence(folder, BestEval(step=300, metric="f1", score=75.0), "f1")
    found = read_abstention(folder / "model")
    assert found and (found.score, found.num, found.max_error) == ("exact", 40, None)
    assert found.levels == (Level(0.0, 40, 10),) and find_damage(folder / "model") is None


def test_an_evaluation_keeps_a_promise(run: fivetune.TrainedRun) -> None:
    with pytest.raises(PromiseError, match="no confidence keeps it on 12 predictions of own") as caught:
        run.evaluate(NEW, split="own", max_error="1%")
    assert caught.value.record.num_examples == 12 and "earlier promise" not in str(caught.value)
    record = run.evaluate(NEW, split="own", max_error=0.9)
    kept = read_abstention(run.folder / "model")
    assert kept and (kept.max_error, kept.num, kept.split, kept.settings) == (0.9, record.num_examples, "own", {})
    assert find_damage(run.folder / "model") is None
    with pytest.raises(ConfigError, match=r"task\.labels"):
        fivetune.predict(run.folder, NEW, {"task.labels": ["red", "blue"]})
    # An evaluation that keeps none says which one is in force.
    with pytest.raises(PromiseError, match="earlier promise of 90%, of 12 predictions of own, stays in force"):
        run.evaluate(NEW, split="other", max_error="1%")
    assert read_abstention(run.folder / "model") == kept


def test_what_was_learnt_chooses_no_confidence(run: fivetune.TrainedRun, tmp_path: Path) -> None:
    """The file of the training, or a set with examples of it; a single equal text is chance."""
    before, num = read_abstention(run.folder / "model"), len(run.evals)
    learnt = Path(run.config["data"]["train"][0])
    for data, words in ((str(learnt), "has examples that"), ([*NEW[:6], *ROWS[:6]], "has learnt 50% of")):
        with pytest.raises(ConfigError, match=words):
            run.evaluate(data, max_error=0.9)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(learnt.read_bytes())
    with pytest.raises(ConfigError, match=r"copy\.jsonl has examples that"):
        run.evaluate(str(copy), max_error=0.9)
    assert read_abstention(run.folder / "model") == before and len(run.evals) == num
    many = [{**NEW[0], "id": f"m{i}", "thing": f"red coat {i}"} for i in range(24)]
    assert run.evaluate([*many, ROWS[0]], split="many", max_error=0.9).num_examples == 25


@pytest.mark.parametrize(
    ("given", "words"),
    [({"max_error": 5}, "5% or 0.05"), ({"max_error": 0.1, "error_below": 0}, "above 0 and up to 100")],
)
def test_a_wrong_promise_is_refused_before_the_evaluation(
    run: fivetune.TrainedRun, given: dict[str, Any], words: str
) -> None:
    num = len(run.evals)
    with pytest.raises(ConfigError, match=words):
        run.evaluate(**given)
    assert len(run.evals) == num


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["evaluate", "--max-error", "150%"], "--max-error 150%: is no share"),
        (["predict", "--inputs", "a", "--max-error", "abc"], "--max-error abc: is no share"),
        (["serve", "--min-confidence", "90"], "--min-confidence 90: is no probability"),
    ],
)
def test_a_wrong_flag_is_refused_before_the_run_is_read(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *flags = words
    assert cli.main([command, str(tmp_path / "none"), *flags]) == 2
    assert told in capfd.readouterr().err


def test_answers_below_the_confidence_are_unsure(run: fivetune.TrainedRun, tmp_path: Path) -> None:
    plain = run.predict(ROWS, min_confidence=0)
    shares = sorted(one.confidence or 0.0 for one in plain)
    keep(run, shares[5])
    found = run.predict(ROWS)
    assert [bool(one.unsure) for one in found] == [(one.confidence or 0.0) < shares[5] for one in plain]
    assert [one.withheld or one.prediction for one in found] == [one.prediction for one in plain]
    assert {one.prediction for one in found if one.unsure} == {""}
    rows = list(run.predict_file(_write(tmp_path), min_confidence="100%"))
    assert len(rows) == sum(bool(row.prediction.unsure) for row in rows) == 12


def _write(folder: Path, rows: list[dict[str, Any]] = ROWS) -> str:
    path = folder / "new.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    return str(path)


def test_the_outputs_say_which_answers_are_unsure(
    run: fivetune.TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = _write(tmp_path)
    shares = sorted(one.confidence or 0.0 for one in run.predict(ROWS, min_confidence=0))
    keep(run, shares[5])
    command = ["predict", str(run.folder), "--input", source]
    assert cli.main(command) == 0
    shown = capfd.readouterr()
    lines = [json.loads(line) for line in shown.out.splitlines()]
    unsure = [line for line in lines if line.get("unsure")]
    assert "7 answered, 5 unsure" in shown.err and len(unsure) == 5
    assert all(line["prediction"] is None and line["withheld"] and "is below" in line["reason"] for line in unsure)

    assert cli.main([*command, "--output", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert list(cells[0])[-4:] == ["prediction", "confidence", "unsure", "withheld"]
    assert sorted((row["unsure"], not row["prediction"]) for row in cells) == [("", False)] * 7 + [("true", True)] * 5

    # A submission has no unsure answers; all answers have no further columns.
    assert cli.main([*command, "--format", "kaggle"]) == 2 and "--min-confidence 0" in capfd.readouterr().err
    assert cli.main([*command, "--format", "kaggle", "--min-confidence", "0"]) == 0
    assert "unsure" not in capfd.readouterr().out


def test_a_command_names_what_it_keeps(
    run: fivetune.TrainedRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    new = _write(tmp_path, NEW)
    assert cli.main(["evaluate", str(run.folder), "--error-below", "50"]) == 2
    assert "--max-error" in capfd.readouterr().err
    assert cli.main(["evaluate", str(run.folder), "--data.eval", new, "--max-error", "90%", "--json"]) == 0
    result = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert result["promise"]["max_error"] == 0.9 and result["promise"]["num_examples"] == result["num_examples"]
    # A promise that cannot be kept is told behind the scores.
    assert cli.main(["evaluate", str(run.folder), "--data.eval", new, "--max-error", "1%"]) == 6
    printed = capfd.readouterr()
    assert "accuracy" in printed.out and "no confidence keeps it" in printed.err
