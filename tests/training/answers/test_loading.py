"""A finished run answers and is scored again: the commands predict and evaluate, and what they refuse."""

from __future__ import annotations

import csv
import io
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import kit
import numpy as np
import pytest

import fivetune
from fivetune import rundir
from fivetune.cli import main
from fivetune.data.readers.records import read_records
from fivetune.delivery.serving.models import open_models
from fivetune.errors import ConfigError, DataError, RunDirError
from fivetune.model.load import load_model_and_tokenizer
from fivetune.rundir.checksums import MANIFEST, write_checksums
from fivetune.rundir.confidence_file import write_confidence_file
from fivetune.rundir.figures import select_evals_by_step
from fivetune.scores.analysis.calibration import apply_temperature, calibrate_prediction
from fivetune.training.answers.inputs import write_records
from fivetune.training.answers.loading import load_run_model, resolve_config
from fivetune.training.answers.output import PREDICTED


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
    assert all(set(line) == {*PREDICTED} - {"candidates", "skipped", "unsure", "withheld", "reason"} for line in lines)


def test_predictions_equal_those_of_the_evaluation(run: Path, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(answers)])
    best = rundir.read_run(run).status.best.step
    recorded = {line.id: line.prediction for line in rundir.read_run(run).predictions[f"eval-{best}"]}
    assert {x["id"]: x["prediction"] for x in map(json.loads, answers.read_text().splitlines())} == recorded


@pytest.mark.slow
def test_the_generation_cap_of_a_run_does_not_depend_on_its_data_json(tmp_path: Path, model_folder: Path) -> None:
    """Fault F3: without data.json a run wrote other predictions, since its cap fell back to 64."""
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1, eval={"every_steps": 1})
    cap = fivetune.train(recipe, quiet=True, preflight=False).evals[-1].max_new_tokens
    (tmp_path / "run" / "data.json").unlink()
    assert load_run_model(tmp_path / "run").config.eval.max_new_tokens == cap != 64
    with pytest.warns(UserWarning, match=r"data\.json: missing"):
        assert fivetune.evaluate(tmp_path / "run").max_new_tokens == cap
    (tmp_path / "run" / "model" / "generation_config.json").unlink()
    write_checksums(tmp_path / "run" / "model")
    with pytest.raises(RunDirError, match=r"generation_config\.json: holds no max_new_tokens, .*: delete .*run/model,"):
        load_run_model(tmp_path / "run")


@pytest.mark.slow
def test_a_model_folder_of_another_run_or_without_manifest_is_refused_and_exported_again(
    tmp_path: Path, run: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights and the tokenizer of another run gave wrong answers in silence."""
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1, eval__at_start=False)
    fivetune.train(recipe, quiet=True, preflight=False)
    other, model = tmp_path / "run", tmp_path / "run" / "model"
    repair = f"Export the model again: delete {model}, then run: fivetune train {other} --resume"
    shutil.rmtree(model)
    shutil.copytree(run / "model", model)
    assert main(["predict", str(other), "--inputs", "a"]) == 4
    error = " ".join(capsys.readouterr().err.split())
    assert f"{model}/manifest.json: belongs to another run (id " in error and repair in error
    (model / MANIFEST).unlink()
    assert main(["evaluate", str(other)]) == 4
    error = " ".join(capsys.readouterr().err.split())
    assert f"{model}/manifest.json: is missing" in error and repair in error
    assert load_model_and_tokenizer(str(model)).model is not None  # any folder can be a model.path
    shutil.rmtree(model)
    fivetune.train(recipe, resume=True, quiet=True, preflight=False)
    assert main(["predict", str(other), "--inputs", "a"]) == 0


def test_texts_on_the_command_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["question: What has Ann? context: Ann has a red hat.", "question: What has Bob? context: Bob has a bag."]
    assert main(["predict", str(run), "--inputs", *texts]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == ["0", "1"]


def test_a_blank_text_is_skipped_at_its_index(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = fivetune.open_run(run).predict(["question: a", " ", "\ud800"])
    assert [(one.id, bool(one.skipped)) for one in found] == [("0", False), ("1", True), ("2", True)]
    assert found[1].skipped == "inputs is empty. Give it a text."
    assert main(["predict", str(run), "--inputs", "question: a", " "]) == 0
    printed = capsys.readouterr()
    assert "2 records: 1 answered, 1 skipped (first: input 2: inputs is empty. Give it a text.)" in printed.err
    assert json.loads(printed.out.splitlines()[1])["skipped"] == "inputs is empty. Give it a text."
    assert main(["predict", str(run), "--inputs", " "]) == 3
    assert "input 1: inputs is empty. Give it a text." in capsys.readouterr().err


def test_a_batch_of_only_bad_records_gives_what_a_mixed_one_gives_for_them(run: Path) -> None:
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    bad = [{**good, "question": " "}, {"question": "Who?"}, {**good, "x": float("inf")}]
    alone, mixed = fivetune.open_run(run).predict(bad), fivetune.open_run(run).predict([*bad, good])
    assert alone == mixed[:3] and all(one.skipped for one in alone)
    assert [one.id for one in alone] == ["0", "1", "2"]
    assert fivetune.open_run(run).predict([" "])[0].skipped


def test_a_file_without_a_usable_record_is_an_error_of_the_command(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "new.csv", tmp_path / "out.csv"
    source.write_text("ticket,text\n1,a\n2,b\n")
    assert all(one.prediction.skipped for one in fivetune.open_run(run).predict_file(source))
    assert main(["predict", str(run), "--input", str(source), "--output", str(target)]) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert f"{source}: none of 2 records can be answered. The first: {source}:2: there is no column" in error
    assert not target.exists()


def test_records_without_answers_can_be_predicted(run: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"id": "a", "question": "What has Ann?", "context": "Ann has a red hat."}\n')
    assert [one.prediction.id for one in fivetune.open_run(run).predict_file(asked)] == ["a"]


def test_evaluation_on_another_file_keeps_its_own_name(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = kit.squad_file(run.parent / "eval.json", num_questions=5, offset=300)
    before = select_evals_by_step(rundir.read_evals(run))
    assert main(["evaluate", str(run), "--data.eval", str(other), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["num_examples"], told["split"], told["scores"]["total"]) == (5, "other-eval", 5)
    assert select_evals_by_step(rundir.read_evals(run)) == before


def test_a_run_without_a_model_says_how_to_go_on(tmp_path: Path, model_folder: Path) -> None:
    config = fivetune.load_config(kit.recipe(tmp_path, model_folder))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(config.as_dict()))
    with pytest.raises(RunDirError, match=r"has no model/ yet: the run is not finished\. Resume with: fivetune train"):
        load_run_model(tmp_path / "run")


def test_a_finished_run_without_its_model_says_how_to_export_it(tmp_path: Path, model_folder: Path) -> None:
    fivetune.train(kit.recipe(tmp_path, model_folder, train__num_steps=1), quiet=True, preflight=False)
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(
        RunDirError, match=r"model/ is missing, although the run is finished\. Export it again .*--resume"
    ):
        load_run_model(tmp_path / "run")
    fivetune.train(tmp_path / "run", resume=True, quiet=True)
    assert fivetune.open_run(tmp_path / "run").step == 1


def test_damage_that_prediction_does_not_need_is_a_warning(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    for name in ("status.json", "machine.json", "data.json"):
        (copied / name).write_text("{")
    assert main(["predict", str(copied), "--inputs", "a"]) == 0
    assert f"warning: {copied}/status.json:1:2: damaged" in " ".join(capsys.readouterr().err.split())
    assert main(["evaluate", str(copied), "--data.eval", str(run.parent / "dev.json"), "--json"]) == 0
    printed = capsys.readouterr()
    assert f"warning: {copied}/data.json:1:2: damaged" in " ".join(printed.err.split())
    assert json.loads(printed.out.splitlines()[-1])["step"] == fivetune.open_run(run).step
    assert (copied / "status.json").read_text() == "{"


# --- from Python ---


def test_the_temperature_of_model_reaches_every_answer_and_no_score(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    write_confidence_file(copied / "model", {"temperature": 2.0})
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    [own], [tempered] = (fivetune.open_run(folder).predict([record]) for folder in (run, copied))
    assert own.confidence is not None and own.logprob is not None
    assert own.confidence == pytest.approx(math.exp(own.logprob), rel=1e-6)
    assert tempered == calibrate_prediction(own, 2.0) and tempered.logprob == own.logprob != tempered.confidence
    first, second = (fivetune.evaluate(folder) for folder in (run, copied))
    assert first.scores == second.scores and (first.temperature, second.temperature) == (None, 2.0)
    path = f"predictions/{second.split}-{second.step}.jsonl"
    lines = [json.loads((folder / path).read_text().splitlines()[0]) for folder in (run, copied)]
    assert lines[1]["confidence"] == apply_temperature(lines[0]["confidence"], 2.0) != lines[0]["confidence"]
    assert rundir.read_evals(copied)[-1].temperature == 2.0


def test_answers_by_the_slower_path_say_why(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GPU whose kernels fail their trial answered by transformers' modules without a word."""
    question = "question: What has Ann? context: Ann has a red hat."
    assert main(["predict", str(run), "--inputs", question]) == 0
    usual = capsys.readouterr()
    fault = "Triton's attention kernels failed their test on this device: it took more than 180 s"
    monkeypatch.setattr("fivetune.model.decode.engine.explain_unsupported_device", lambda *request: fault)
    assert main(["predict", str(run), "--inputs", question]) == 0
    slower = capsys.readouterr()
    assert slower.err.count(fault) == 1 and fault not in usual.err
    assert json.loads(slower.out)["prediction"] == json.loads(usual.out)["prediction"]
    notes: list[str] = []
    options: dict[str, Any] = {"shares_base": False, "max_input_tokens": 100, "num_examples": 0}
    open_models([str(run)], {}, on_warning=pytest.fail, on_note=notes.append, **options)
    assert [note.endswith(fault) for note in notes].count(True) == 1


def test_an_open_run_predicts_records_and_texts(run: Path) -> None:
    trained, record = fivetune.open_run(run), {"question": "What has Ann?", "context": "Ann has a red hat."}
    (first,) = trained.predict([record])
    assert isinstance(first, fivetune.Prediction) and first.confidence is not None and first.id == "0"
    text = "question: What has Ann? context: Ann has a red hat."
    assert trained.predict([text, text])[1].prediction == first.prediction
    assert fivetune.predict(run, [record], {"device": "cpu"}) == [first]
    assert trained.predict([]) == []
    with pytest.raises(DataError, match="texts and records are mixed"):
        trained.predict([text, record])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"question": "a", "context": "b"}, "the inputs are one dict. Allowed is a list of them"),
        ("question: a", "the inputs are one str. Allowed is a list of them"),
        (SimpleNamespace(columns=["question"]), "Give its rows as a list of records."),
        (None, "the inputs are NoneType. Allowed is a list of records or texts"),
        ([{"question": "a"}, 3], "inputs[1] is '3' (int). Allowed are records"),
        ([None], "inputs[0] is 'None' (NoneType)"),
    ],
)
def test_inputs_that_are_no_list_of_records_are_refused(run: Path, inputs: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        fivetune.open_run(run).predict(inputs)
    assert message in str(caught.value)


def test_the_run_directory_is_a_path() -> None:
    with pytest.raises(ConfigError, match="the run directory is 'None'"):
        load_run_model(cast(str, None))


def test_an_empty_cell_of_a_data_frame_stops_no_other_record(run: Path) -> None:
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([{**good, "x": float("nan")}, {**good, "question": float("nan")}])
    assert not found[0].skipped and "question" in (found[1].skipped or "")


@pytest.mark.parametrize("value", [float("inf"), {"deep": [float("nan")]}, [[float("-inf")]]])
def test_a_number_that_is_not_finite_stops_no_other_record(run: Path, value: Any) -> None:
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([good, {**good, "x": value}, {**good, "id": "c", "x": value}, good])
    assert [(one.id, bool(one.skipped)) for one in found] == [("0", False), ("1", True), ("c", True), ("3", False)]
    assert "is not JSON. Allowed are finite numbers and null." in (found[1].skipped or "") and not found[1].prediction


def test_half_a_surrogate_pair_stops_no_other_record_and_endless_nesting_has_a_name(run: Path) -> None:
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([good, {**good, "question": "\ud800"}, {**good, "note": "é"}])
    assert [bool(one.skipped) for one in found] == [False, True, False]
    assert "half a surrogate pair" in (found[1].skipped or "")
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    found = fivetune.open_run(run).predict([good, {**good, "id": "d", "note": deep}])
    assert [(one.id, bool(one.skipped)) for one in found] == [("0", False), ("d", True)]
    assert (found[1].skipped or "").startswith("inputs[1]['note']: nested too deeply. Allowed are text, ")


def test_numbers_texts_and_arrays_of_numpy_are_those_of_python(run: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {"a": np.int64(3), "b": np.float32(0.5), "c": np.bool_(True), "d": np.str_("é")}
    values |= {"e": np.array([[1, 2]]), "f": {"deep": [np.int8(4)]}, "g": np.array(["a", np.int64(1)], dtype=object)}
    written = tmp_path / "inputs.jsonl"
    assert write_records(written, [{"id": np.int64(7), **values, "h": np.float32("nan")}], {}) == [("7", "")]
    assert json.loads(written.read_text()) == {
        "id": 7, "a": 3, "b": 0.5, "c": True, "d": "é", "e": [[1, 2]], "f": {"deep": [4]}, "g": ["a", 1], "h": None,
    }  # fmt: skip
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([good, {**good, "question": np.str_(good["question"]), **values}])
    assert found[1] == replace(found[0], id="1")


def test_an_empty_cell_of_a_column_with_missing_values_is_null(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": pandas.array([1, None], dtype="Int64"), "b": [pandas.Timestamp(0), pandas.NaT]})
    written = tmp_path / "inputs.jsonl"
    (_, wrong), last = write_records(written, table.to_dict("records"), {})
    assert "inputs[0]['b']: Timestamp('1970-01-01 00:00:00') is of type Timestamp. Allowed are text" in wrong
    assert last == ("1", "") and json.loads(written.read_text().splitlines()[1]) == {"id": "1", "a": None, "b": None}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b"Ann", "b'Ann' is of type bytes. Allowed are text, numbers, true and false, None, lists and objects of "
         "them. Decode it to text."),
        ({"deep": [np.bytes_(b"a")]}, "np.bytes_(b'a') is of type bytes_. "),
        ({(1, 2): 3}, "keys must be str, int, float, bool or None, not tuple. "),
        (np.datetime64("2020-01-01"), "is of type datetime64. "),
        ({1}, "{1} is of type set. Allowed are text, numbers, true and false, None, lists and objects of them. "
         "Convert it, or leave the column out."),
    ],
)  # fmt: skip
def test_a_value_that_json_cannot_represent_stops_no_other_record(run: Path, value: Any, told: str) -> None:
    good = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([good, {**good, "note": value}, good])
    assert [(one.id, bool(one.skipped)) for one in found] == [("0", False), ("1", True), ("2", False)]
    assert (found[1].skipped or "").startswith("inputs[1]['note']: ") and told in (found[1].skipped or "")


@pytest.mark.parametrize(
    ("column", "record", "expected"),
    [
        ("qid", {}, "0"),
        ("qid", {"id": "x"}, "x"),
        ("qid", {"qid": "x", "q": float("inf")}, "x"),
        ("qid", {"qid": None}, "0"),
        ("id", {"id": None}, "0"),
        ("info.id", {"info": {"id": 7}}, "7"),
        ("info.id", {}, "0"),
    ],
)
def test_ids_are_those_of_the_id_column_or_numbers(tmp_path: Path, column: str, record: Any, expected: str) -> None:
    written = tmp_path / "inputs.jsonl"
    assert write_records(written, [{"question": "Why?", **record}], {"id": column}) == [(expected, "")]
    if "q" not in record:  # a number that is not finite cannot be read
        assert next(read_records(str(written), columns={"id": column})).fields["id"] == expected


def test_a_run_with_an_id_column_predicts(run: Path) -> None:
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run, {"data.columns": {"id": "qid"}}).predict([record, {"qid": "x", **record}])
    assert [(one.id, one.skipped) for one in found] == [("0", None), ("x", None)]


@pytest.mark.slow
def test_evaluate_after_a_resume_that_died_has_the_present_data(tmp_path: Path, model_folder: Path) -> None:
    """Its scores counted as those of the earlier evaluation data."""
    table = kit.recipe(tmp_path, model_folder, train__num_steps=1, eval__at_start=False)
    fivetune.train(table, quiet=True, preflight=False)
    assert fivetune.evaluate(tmp_path / "run", split="eval").basis == rundir.read_evals(tmp_path / "run")[0].basis
    changes = {"data.eval": str(tmp_path / "train.json"), "train.num_steps": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fivetune.training.run.run_training_loop", lambda training: pytest.exit("died"))
        with pytest.raises(pytest.exit.Exception):
            fivetune.train(table, changes, resume=True, quiet=True, preflight=False)
    other = fivetune.evaluate(tmp_path / "run", split="eval")
    assert other.num_examples == 24 and other.basis != rundir.read_evals(tmp_path / "run")[0].basis
    assert fivetune.train(table, changes, resume=True, quiet=True, preflight=False).evals[-1].basis == other.basis


def test_records_with_one_id_are_both_answered(run: Path) -> None:
    records = [{"id": "a", "question": f"What has {name}?", "context": "Ann has a red hat."} for name in ("Ann", "Bob")]
    apart = [one.confidence for record in records for one in fivetune.open_run(run).predict([record])]
    found = fivetune.open_run(run).predict(records)
    assert [(one.id, one.skipped) for one in found] == [("a", None), ("a", None)]
    assert [one.confidence for one in found] == pytest.approx(apart, rel=1e-3)


def test_messages_name_the_record_not_a_temporary_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = fivetune.open_run(run).predict([{"question": "", "context": ""}])
    assert found.skipped == "question is empty. Give it a text."
    assert main(["predict", str(run), "--column", "context=a"]) == 3
    assert "fivetune-" not in capsys.readouterr().err


def test_made_up_ids_are_not_those_of_other_records(run: Path) -> None:
    record = {"question": "What has Ann?", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([{"id": "1", **record}, record, record])
    assert [(one.id, bool(one.skipped)) for one in found] == [("1", False), ("3", False), ("2", False)]


def test_a_record_that_cannot_be_used_keeps_its_place(run: Path) -> None:
    good = {"id": "g", "question": "What has Ann?", "context": "Ann has a red hat."}
    bad = {"id": "b", "question": " ", "context": "Ann has a red hat."}
    found = fivetune.open_run(run).predict([good, bad, {**good, "id": "h"}])
    assert [(one.id, bool(one.skipped)) for one in found] == [("g", False), ("b", True), ("h", False)]
    assert "question" in (found[1].skipped or "")


def test_the_public_names_are_found_and_short() -> None:
    assert {"open_run", "predict", "evaluate", "read_run", "write_report", "compare_runs", "train"} <= {*dir(fivetune)}
    assert all(getattr(fivetune, name) is not None for name in fivetune.__all__)


def test_representations_take_one_line(run: Path) -> None:
    assert len(repr(fivetune.read_run(run))) < 100


def test_evaluate_from_python_is_recorded(run: Path) -> None:
    other = kit.squad_file(run.parent / "more.json", num_questions=4, offset=500)
    record = fivetune.evaluate(run, {"data.eval": str(other)})
    assert (record.split, record.num_examples) == ("more", 4)
    assert (run / "predictions" / f"more-{record.step}.jsonl").is_file()


# --- fivetune predict ---

ROWS = (
    'ticket,question,context\n17,What has Ann?,"Ann has a red hat, big."\n18,,Bob has a bag.\n19,What has Bob?,Bob.\n'
)


def test_a_csv_is_joined_to_the_columns_of_the_input(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "new.csv", tmp_path / "out.csv"
    source.write_text(ROWS)
    assert main(["predict", str(run), "--input", str(source), "--output", str(target), "--json"]) == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ticket"], row["context"][:3]) for row in rows] == [("17", "Ann"), ("18", "Bob"), ("19", "Bob")]
    assert list(rows[0]) == ["ticket", "question", "context", "prediction", "confidence", "skipped"]
    assert rows[1]["prediction"] == rows[1]["confidence"] == "" and float(rows[0]["confidence"]) > 0
    printed = capsys.readouterr()
    counts = json.loads(printed.out.splitlines()[-1])
    assert (counts["num_records"], counts["num_answers"], counts["num_skipped"]) == (3, 2, 1)
    assert "3 records: 2 answered, 1 skipped (first: " in printed.err and "new.csv:3: " in printed.err


def test_a_skipped_record_is_a_line_with_null(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "new.csv"
    source.write_text(ROWS)
    assert main(["predict", str(run), "--input", str(source)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prediction"] is None for line in lines] == [False, True, False]
    assert "question" in lines[1]["skipped"]


def test_standard_input_has_a_name(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for content, place in ((b'{"id": "a", "question": "", "context": "b"}\n', "stdin:1: "), (b"abc", "stdin: ")):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert main(["predict", str(run), "--input", "-"]) == 3
        err = capsys.readouterr().err
        assert place in err and "fivetune-" not in err


def test_a_row_without_prediction_keeps_its_columns_and_its_reason(run: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "new.csv", tmp_path / "out.csv"
    source.write_text("id,question,context\na,What has Ann?,Ann.\na,What has Bob?,Bob.\nb,,Bob.\n")
    assert main(["predict", str(run), "--input", str(source), "--output", str(target)]) == 0
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["id"], row["context"], bool(row["confidence"])) for row in rows] == [
        ("a", "Ann.", True), ("a", "Bob.", True), ("b", "Bob.", False),
    ]  # fmt: skip
    assert [bool(row["skipped"]) for row in rows] == [False, False, True] and "question" in rows[2]["skipped"]


def test_an_output_that_cannot_be_written_is_refused_first(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fivetune.training.answers.loading.load_run_model", lambda *_, **__: pytest.fail("the run was opened")
    )
    source = tmp_path / "new.csv"
    source.write_text(ROWS)
    for name, message in (
        ("new.csv", "is the file of --input, which would be overwritten"),
        (
            "x.xls",
            ".xls is not written. Allowed: .csv, .tsv, .txt, .xlsx, .json, .jsonl, .ndjson, .parquet, or no suffix",
        ),
        ("none/x.csv", f"there is no folder {tmp_path / 'none'}. Create it"),
        ("", "is a folder"),
    ):
        assert main(["predict", str(run), "--input", str(source), "--output", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    assert main(["predict", str(run), "--input", str(source), "--output", ""]) == 2
    assert "is a folder" in capsys.readouterr().err
    words = ["--input", str(source), "--format", "bioasq", "--output", str(tmp_path / "x.csv")]
    assert main(["predict", str(run), *words]) == 2
    assert ".csv is not written with --format bioasq. Allowed: .json" in capsys.readouterr().err
    assert source.read_text() == ROWS


def test_a_json_output_is_one_array_and_a_dash_is_standard_output(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["predict", str(run), "--question", "What has Ann?", "--context", "Ann has a red hat.", "--output"]
    assert main([*words, "x.json"]) == main([*words, "-"]) == 0
    assert json.loads((tmp_path / "x.json").read_text()) == [json.loads(capsys.readouterr().out)]
    assert not (tmp_path / "-").exists()


def test_input_from_standard_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b'{"id": "a", "question": "What has Ann?", "context": "Ann has a red hat."}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert main(["predict", str(run), "--input", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "a"


def test_one_question_is_formatted_by_the_template(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--question", "What has Ann?", "--context", "Ann has a red hat."]
    assert main(["predict", str(run), *words]) == 0
    first = json.loads(capsys.readouterr().out)["prediction"]
    assert main(["predict", str(run), *words[:2], "--column", "context=Ann has a red hat."]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] == first
    assert main(["predict", str(run), "--column", "context"]) == 2
    assert "--column context: has no value. Write --column NAME=VALUE." in capsys.readouterr().err
    assert main(["predict", str(run), *words, "--inputs", "a"]) == 2


def test_direction_marks_are_escaped_on_the_terminal(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"id": "a\\u202eb\\u009b", "question": "What has Ann?", "context": "Ann has a red hat."}\n')
    assert main(["predict", str(run), "--input", str(asked)]) == 0
    printed = capsys.readouterr().out
    assert "\u202e" not in printed and "\x9b" not in printed and json.loads(printed)["id"] == "a\u202eb\x9b"


def test_an_impossible_output_name_is_no_internal_error(run: Path, tmp_path: Path) -> None:
    assert main(["predict", str(run), "--inputs", "a", "--output", str(tmp_path / ("a" * 300))]) == 4


def test_a_run_is_evaluated_from_another_working_directory(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths in config.yaml stay as typed; the working directory of the run is tried when they do not exist."""
    monkeypatch.chdir(tmp_path)
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=1)
    recipe["run"]["dir"], recipe["data"] = "run", {**recipe["data"], "train": "train.json", "eval": "dev.json"}
    fivetune.train(recipe, quiet=True, preflight=False)
    monkeypatch.chdir("/")
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["num_examples"] == 12


def test_evaluate_names_damaged_evaluations_once(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The torn line was truncated, and a line without values ignored, in silence."""
    folder = shutil.copytree(run, tmp_path / "run", symlinks=True)
    path = folder / rundir.EVALS
    path.write_text('{"step": 1}\n' + path.read_text() + '{"step": 1, "ta')
    assert main(["evaluate", str(folder)]) == 0
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("damaged line (no whole JSON value). It is left out.") == 1
    assert printed.count(f"{path}: damaged: lines that lack needed values are left out: 1.") == 1


def test_a_run_of_somebody_else_does_not_choose_where_the_cache_is(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    own = fivetune.load_config(folder).data.cache_dir
    assert own and resolve_config(folder, {}).data.cache_dir == own  # it holds the data of the training
    elsewhere = tmp_path / "elsewhere"
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace(f"cache_dir: {own}", f"cache_dir: {elsewhere}"))
    assert fivetune.load_config(folder).data.cache_dir == str(elsewhere)
    assert resolve_config(folder, {}).data.cache_dir is None
    assert resolve_config(folder, {"cache_dir": str(elsewhere)}).data.cache_dir == str(elsewhere)
