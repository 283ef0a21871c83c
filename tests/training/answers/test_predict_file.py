"""`fivetune predict` from file to file: streamed, resumed after a kill, shared by processes, in every format."""

from __future__ import annotations

import csv
import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import kit
import pytest

import fivetune
from fivetune.cli import main
from fivetune.data.shard import WHOLE
from fivetune.errors import DataError, InterruptedRunError
from fivetune.rundir.records import Candidate, Prediction
from fivetune.training.answers import answer_log, output
from fivetune.training.answers.answer_folder import keep_answers
from fivetune.training.answers.answer_log import AnswerLog, AnswerWriter
from fivetune.training.answers.inputs import InputRow
from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts
from fivetune.training.answers.trained_run import TrainedRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder), quiet=True, preflight=False)
    return folder / "run"


@pytest.fixture(scope="module")
def expected(run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    return predict(run, tmp_path_factory.mktemp("expected") / "out.jsonl")


def predict(run: Path, target: Path, *words: str) -> list[dict[str, object]]:
    assert main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(target), *words]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def stop_after(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction ends as if killed, after some answers and half a line."""
    append = AnswerWriter.append

    def die(writer: AnswerWriter, question: int, prediction: Prediction) -> None:
        nonlocal num
        if num == 0:
            with open(next(iter(PLACES)), "ab") as file:
                file.write(b'{"question": 3, "id": "q1')
            raise KeyboardInterrupt
        num -= 1
        append(writer, question, prediction)

    PLACES: list[Path] = []
    init = AnswerWriter.__init__

    def note(writer: AnswerWriter, folder: Path, rank: int = 0) -> None:
        PLACES.append(folder / f"answers-{rank}.jsonl")
        init(writer, folder, rank)

    monkeypatch.setattr(AnswerWriter, "__init__", note)
    monkeypatch.setattr(AnswerWriter, "append", die)


def test_a_stopped_prediction_goes_on_where_it_was(
    run: Path, tmp_path: Path, expected: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        assert main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(target)]) == 130
    assert not target.exists() and (tmp_path / "out.jsonl.partial").is_dir()
    capsys.readouterr()
    found = predict(run, target, "--eval.batch_size", "3")  # changes no answer
    assert "5 of 12 records are answered already in " in capsys.readouterr().err
    assert [(one["id"], one["prediction"]) for one in found] == [(one["id"], one["prediction"]) for one in expected]
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_half_written_output_lies_in_the_folder_that_the_next_command_removes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half_written: list[list[str]] = []

    def look_and_write(*args: Any) -> None:
        half_written.append([path.name for path in tmp_path.iterdir()])
        write(*args)

    write = output.write_predictions
    monkeypatch.setattr(output, "write_predictions", look_and_write)
    assert len(predict(run, tmp_path / "out.jsonl")) == 12
    assert half_written == [["out.jsonl.partial"]] and [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize("error", [None, DataError("no record can be answered")])
def test_the_removal_of_the_answers_changes_no_result(
    error: DataError | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal in it said that the answers are kept, though the output was whole; a failure of it hid the real one."""
    handlers: list[object] = []

    def fail(folder: Path, ignore_errors: bool = False) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        if not ignore_errors:
            raise OSError(f"{folder}: busy")

    monkeypatch.setattr("shutil.rmtree", fail)
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(DataError, match="no record can") if error else nullcontext(),
        keep_answers(tmp_path / "out.csv", WHOLE, is_first=True) as folder,
    ):
        (folder / "data").mkdir()
        assert signal.getsignal(signal.SIGTERM) is not before
        if error:
            raise error
    assert handlers == [before]


def test_a_finished_output_is_replaced_only_on_demand(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    words = ["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(target)]
    target.write_text("answers of last week")
    assert main(words) == 2
    told = f"--output {target}: exists. Add --overwrite to replace it, or give another file."
    assert told in " ".join(capsys.readouterr().err.split())
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        assert main([*words, "--overwrite"]) == 130
    assert target.read_text() == "answers of last week"  # until the new ones are whole
    capsys.readouterr()
    assert len(predict(run, target, "--overwrite")) == 12
    assert "5 of 12 records are answered already in " in capsys.readouterr().err
    assert main([*words[:-2], "--overwrite"]) == 2
    assert "--overwrite: has no effect without --output FILE." in capsys.readouterr().err


def test_answers_of_other_settings_are_computed_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        stop_after(5, patch)
        main(["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(target)])
    capsys.readouterr()
    found = predict(run, target, "--eval.num_beams", "2")
    told = capsys.readouterr().err
    assert "its answers are of other weights, settings or data, and are computed again" in told
    assert "answered already" not in told and len(found) == 12


@pytest.mark.parametrize("moment", [(AnswerWriter, "append"), (output, "_list_table_columns")])
def test_answers_are_not_joined_to_other_records(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moment: Any
) -> None:
    """An export that is written again under a prediction, with the same ids: while it is answered, or written."""
    source, target = tmp_path / "input.csv", tmp_path / "out.csv"
    words = ["predict", str(run), "--input", str(source), "--output", str(target)]

    def write(person: str) -> None:
        source.write_text("id,question,context\n" + f"1,Who has a hat?,{person} has a hat.\n" * 3)

    def change_and_go_on(*args: Any) -> Any:
        write("Bob")
        return whole(*args)

    write("Ann")
    whole = getattr(*moment)
    with monkeypatch.context() as patch:
        patch.setattr(*moment, change_and_go_on)
        assert main(words) == 3
    assert "input.csv: changed while it was answered" in capsys.readouterr().err
    assert not target.exists() and (tmp_path / "out.csv.partial").exists()
    assert main(words) == 0
    assert "its answers are of other weights, settings or data" in capsys.readouterr().err
    with target.open(newline="") as file:
        assert {row["context"] for row in csv.DictReader(file)} == {"Bob has a hat."}


def test_records_of_another_content_are_not_read(run: Path, tmp_path: Path) -> None:
    """Through the Python interface: the result reads the file again whenever it is iterated."""
    source = tmp_path / "input.csv"
    source.write_text("question,context\nWho?,Ann has a hat.\n")
    found = fivetune.open_run(run).predict_file(source)
    assert [one.row.fields["context"] for one in found] == ["Ann has a hat."]
    source.write_text("question,context\nWho?,Bob has a hat.\nWho?,A cut")
    with pytest.raises(DataError, match=r"input\.csv: changed while it was answered"):
        next(iter(found))


@pytest.mark.release
def test_a_killed_process_is_continued_by_two(run: Path, tmp_path: Path) -> None:
    kit.squad_file(tmp_path / "many.json", num_questions=800)
    target, partial = tmp_path / "out.csv", tmp_path / "out.csv.partial"
    command = [sys.executable, "-m", "fivetune", "predict", str(run), "--input", str(tmp_path / "many.json")]
    command += ["--output", str(target), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not any(path.stat().st_size > 5_000 for path in partial.glob("answers-*")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    command += ["--launch.nproc", "2", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "of 800 records are answered already" in done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["num_answers"] == 800
    with target.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == [f"q{number}" for number in range(800)] and not partial.exists()


def test_a_folder_of_another_process_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(tmp_path / "out.csv")]
    codes: list[int] = []
    monkeypatch.setattr(TrainedRun, "predict_file", lambda *_, **__: codes.append(main(words)) or [])
    main(words)
    assert codes == [4] and "out.csv.partial: another process answers into it" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where no folder can be made")
def test_a_place_where_no_folder_can_be_made_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", "/proc/out.csv"]
    assert main(words) == 4
    assert "/proc/out.csv.partial: cannot be written or locked: " in capsys.readouterr().err


@pytest.mark.parametrize(("written", "told"), [("", "nothing was answered yet"), ("{}\n", "kept in the folder ")])
def test_a_stop_names_the_answers_that_there_are(tmp_path: Path, written: str, told: str) -> None:
    with (
        pytest.raises(InterruptedRunError, match=told),
        keep_answers(tmp_path / "out.csv", WHOLE, is_first=True) as folder,
    ):
        (folder / "answers-0.jsonl").write_text(written)
        signal.raise_signal(signal.SIGINT)
    assert (tmp_path / "out.csv.partial").exists() == bool(written)


KILLED_WHILE_IT_REMOVES = """
import os, sys
from pathlib import Path
from fivetune.data.shard import WHOLE
from fivetune.training.answers.answer_folder import keep_answers

def die(event, args):
    left.append(event)
    if left.count("os.remove") + left.count("os.rmdir") == int(sys.argv[2]):
        os._exit(9)

left = []
with keep_answers(Path(sys.argv[1]), WHOLE, is_first=True) as folder:
    (folder / "answers-0.jsonl").write_text("")
    sys.addaudithook(die)
"""


@pytest.mark.parametrize(("removal", "left"), [(1, ["answers-0.jsonl", "lock"]), (2, ["lock"]), (3, [])])
def test_a_kill_while_the_answers_are_removed_leaves_nothing_in_the_way(
    tmp_path: Path, removal: int, left: list[str]
) -> None:
    """Killed before the removal of the answers, of the lock, and of the folder."""
    command = [sys.executable, "-c", KILLED_WHILE_IT_REMOVES, str(tmp_path / "out.csv"), str(removal)]
    assert subprocess.run(command).returncode == 9
    assert sorted(path.name for path in (tmp_path / "out.csv.partial").iterdir()) == left
    with keep_answers(tmp_path / "out.csv", WHOLE, is_first=True):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("fivetune.training.answers.answer_log.JsonlFile.append", "answers-0.jsonl: cannot be written: No space left "
         "on device. The answers so far are kept: free space and run the same command again, or choose another "
         "--output."),
        ("fivetune.data.store.token_store._make_staging_folder", "data: cannot be written: No space left on "
         "device. Free space, or choose another --output."),
    ],
)  # fmt: skip
def test_a_full_disk_is_named(
    run: Path,
    tmp_path: Path,
    function: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*values: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(function, refuse)
    words = ["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(tmp_path / "out.csv")]
    assert main(words) == 4
    assert f"{tmp_path}/out.csv.partial/{told}" in capsys.readouterr().err


def test_a_folder_of_the_user_stays(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out.csv.partial").mkdir()
    (tmp_path / "out.csv.partial" / "thesis.txt").write_text("years")
    words = ["predict", str(run), "--input", str(run.parent / "dev.json"), "--output", str(tmp_path / "out.csv")]
    assert main(words) == 4
    assert "out.csv.partial: is in the way: the answers are kept there. Rename it." in capsys.readouterr().err
    assert (tmp_path / "out.csv.partial" / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--launch.nproc", "0"), "--launch.nproc 0: allowed are whole numbers from 1"),
        (("--launch.nproc", "2"), "several processes share a file. Give --input FILE and --output FILE"),
    ],
)
def test_processes_need_a_file_to_share(
    run: Path, words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run), "--inputs", "a", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_refused_prediction_leaves_nothing(run: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    assert main(["predict", str(run), "--input", str(tmp_path / "bad.csv"), "--output", str(tmp_path / "o.csv")]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["bad.csv"]


# --- formats ---


def test_parquet_keeps_the_types_of_the_columns(run: Path, tmp_path: Path) -> None:
    from pyarrow import parquet

    question = {"question": "What has Ann?", "context": "Ann has a red hat."}
    records = [{"id": str(n), **question, "n": n, "x": 0.5, "mixed": "a", "none": None} for n in range(3)]
    records[1] |= {"mixed": 7, "x": 3, "question": ""}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["predict", str(run), "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.parquet")]
    assert main(words) == 0
    table = parquet.read_table(tmp_path / "out.parquet")
    types = {field.name: str(field.type) for field in table.schema}
    assert types["n"] == "int64" and types["x"] == types["confidence"] == "double"
    assert types["mixed"] == types["none"] == types["prediction"] == types["skipped"] == "string"
    assert table["mixed"].to_pylist() == ["a", "7", "a"] and table["x"].to_pylist() == [0.5, 3.0, 0.5]
    assert table["prediction"].to_pylist()[1] is None and "question" in table["skipped"].to_pylist()[1]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, None, 2.5], "double"),
        ([2**60 + 1, None, 1.5], "string"),
        ([Decimal("1.50"), None, 1.5], "string"),
        ([date(2026, 1, 2), None, date(2026, 1, 3)], "date32[day]"),
        (["a", 1, [True]], "string"),
        ([None, None, None], "string"),
        ([[{}], None], "string"),
    ],
)
def test_a_column_has_one_type_over_all_groups_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[object], kind: str
) -> None:
    from pyarrow import parquet

    monkeypatch.setattr(output, "ROWS_PER_GROUP", 1)
    rows = [PredictedRow(InputRow("a", "a", {"x": value}), Prediction(id="a", prediction="y")) for value in values]
    predicted = output.Predicted(rows, PredictionCounts.count(rows), {}, {})
    for name in ("parquet", "csv"):
        with (tmp_path / name).open("wb") as file:
            output.write_predictions(file, name, predicted)
    table = parquet.read_table(tmp_path / "parquet")
    assert str(table.schema.field("x").type) == kind and table["x"].null_count == values.count(None)
    texts = [line.split(",")[0] for line in (tmp_path / "csv").read_text().splitlines()[1:]]
    assert kind != "string" or [text or None for text in texts] == table["x"].to_pylist()


def test_squad_and_kaggle_are_what_their_scorers_read(
    run: Path, tmp_path: Path, expected: list[dict[str, object]], capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(run.parent / "dev.json")
    for name, target in (("squad", "out.json"), ("kaggle", "out.csv")):
        words = ["predict", str(run), "--input", source, "--format", name, "--output", str(tmp_path / target)]
        assert main(words) == 0
    answers = {str(one["id"]): one["prediction"] for one in expected}
    assert json.loads((tmp_path / "out.json").read_text()) == answers
    with (tmp_path / "out.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [["id", "prediction"], *([key, text] for key, text in answers.items())]
    assert main(["score", "squad_v2", source, str(tmp_path / "out.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["scores"]["total"] == 12
    capsys.readouterr()
    twice = tmp_path / "twice.csv"
    twice.write_text("id,question,context\na,What has Ann?,Ann.\na,What has Bob?,Bob.\n")
    assert main(["predict", str(run), "--input", str(twice), "--format", "squad"]) == 3
    printed = capsys.readouterr()
    assert "twice.csv:3: the id 'a' is used twice; --format squad has one answer per id" in printed.err
    assert printed.out == ""


def test_a_kaggle_submission_has_the_names_of_the_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "test.csv"
    source.write_text("Id,Frage,Text\n7\u200d,What has Ann?,Ann has a hat.\n8,,Bob.\n")
    columns = ["--data.columns", '{"id": "Id", "question": "Frage", "context": "Text", "answers": "Y"}']
    assert main(["predict", str(run), "--input", str(source), "--format", "kaggle", *columns]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Id,Y" and lines[1].startswith("7\u200d,") and lines[2] == "8,"


# --- the answers on disk ---


def test_answers_are_found_by_id_and_a_damaged_line_is_named(tmp_path: Path) -> None:
    first = Prediction(id="aé", prediction="x", confidence=0.25, candidates=(Candidate("x", 0.25),))
    with AnswerWriter(tmp_path, 0) as one, AnswerWriter(tmp_path, 1) as other:
        one.append(4, first)
        other.append(2, Prediction(id="b"))
    with AnswerLog(tmp_path) as log:
        assert log.find("aé") == first and sorted(log.questions.tolist()) == [2, 4]
        with pytest.raises(DataError, match="no answer to 'c'"):
            log.find("c")
    with (tmp_path / "answers-1.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(DataError, match=r"answers-1\.jsonl: damaged\. Delete the folder"), AnswerLog(tmp_path):
        pass
    whole = (tmp_path / "answers-1.jsonl").read_text().replace("{}\n", "")
    for edited in (whole.replace('"prediction": ""', '"prediction": "y"'), whole.replace('"b"', '"d"'), "{}\n"):
        (tmp_path / "answers-1.jsonl").write_text(edited)
        with pytest.raises(DataError, match=r"answers-1\.jsonl: damaged\. Delete the folder"), AnswerLog(tmp_path):
            pass
    (tmp_path / "answers-1.jsonl").write_text(whole)
    with AnswerLog(tmp_path) as log:
        assert log.find("b").id == "b"


def test_each_answer_is_parsed_once(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = answer_log.parse_record
    monkeypatch.setattr(
        answer_log, "parse_record", lambda kind, table: parsed.append(table["id"]) or parse(kind, table)
    )
    found = predict(run, tmp_path / "out.jsonl")
    assert parsed == [one["id"] for one in found] and len(parsed) == 12


def test_the_array_of_standard_output_is_that_of_a_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(run.parent / "dev.json")
    assert main(["predict", str(run), "--input", source, "--output", str(tmp_path / "out.json")]) == 0
    capsys.readouterr()
    assert main(["predict", str(run), "--input", source, "--json"]) == 0
    assert capsys.readouterr().out == (tmp_path / "out.json").read_text()
