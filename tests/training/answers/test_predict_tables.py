"""`fivetune predict` into tables: CSV in the form of the input, workbooks, a line per record."""

from __future__ import annotations

import csv
from contextlib import nullcontext
from datetime import date, datetime
from pathlib import Path
from typing import Any

import kit
import pytest

import fivetune
from fivetune.cli import main
from fivetune.errors import DataError
from fivetune.rundir.records import Candidate, Prediction
from fivetune.training.answers import output
from fivetune.training.answers.inputs import InputRow
from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts
from reliability.workload import label_file


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A run that names the colour in a text."""
    folder = tmp_path_factory.mktemp("labels")
    data = {"train": str(label_file(folder / "train.csv")), "eval": str(folder / "train.csv"), "eval_share": None}
    fivetune.train(kit.recipe(folder, model_folder, task={"name": "classification"}, data=data), quiet=True)
    return folder / "run"


TEXTS = ["=1+1 red", "-3.5", "- blue; no", "Größe\nrot", "@red", "\tred", ""]


@pytest.mark.parametrize(
    ("name", "separator", "mark", "end", "words", "divider"),
    [
        ("a.csv", ";", "\ufeff", "\r\n", (), ";"),
        ("a.csv", ",", "", "\n", (), ","),
        ("a.csv", "\t", "\ufeff", "\r\n", (), "\t"),
        ("a.tsv", "\t", "", "\r\n", (), ","),
        ("a.csv", ",", "", "\n", ("--delimiter", "tab"), "\t"),
        ("a.csv", ";", "\ufeff", "\r\n", ("--safe-csv",), ";"),
    ],
)
def test_a_table_is_written_as_the_input_is(
    labels: Path, tmp_path: Path, name: str, separator: str, mark: str, end: str, words: tuple[str, ...], divider: str
) -> None:
    with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
        file.write(mark)
        table = csv.writer(file, delimiter=separator, lineterminator=end)
        table.writerows([["no", "text"], *([f"00{number}", text] for number, text in enumerate(TEXTS))])
    source, target = tmp_path / name, tmp_path / "out.csv"
    assert main(["predict", str(labels), "--input", str(source), "--output", str(target), *words]) == 0
    written = target.read_bytes().decode()
    header = divider.join(["no", "text", "prediction", "confidence", "skipped"])
    assert written.startswith(f"{mark}{header}{end}") and written.endswith(end)
    with target.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.reader(file, delimiter=divider))[1:]
    harmless = [f"'{text}" if (text and text[0] in "=@\t") or text[:2] == "- " else text for text in TEXTS]
    assert [row[1] for row in rows] == (harmless if "--safe-csv" in words else TEXTS)
    assert [row[0] for row in rows] == [f"00{number}" for number in range(len(TEXTS))]


def load(path: Path) -> list[Any]:
    import openpyxl

    sheet: Any = openpyxl.load_workbook(path).active
    return list(sheet)


def test_a_workbook_comes_from_one_and_from_a_table(labels: Path, tmp_path: Path) -> None:
    import openpyxl

    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    values = [True, 7, 2.5, date(2026, 1, 2), "007", "=text", None]
    for row in (["text", *"abcdefg"], ["a red hat", *values]):
        sheet.append(row)
    sheet["G2"].data_type = "s"
    book.save(tmp_path / "a.xlsx")
    target = tmp_path / "out.xlsx"
    assert main(["predict", str(labels), "--input", str(tmp_path / "a.xlsx"), "--output", str(target)]) == 0
    cells = load(target)[1]
    assert [cell.value for cell in cells[1:8]] == [*values[:3], datetime(2026, 1, 2), *values[4:]]
    assert cells[6].data_type == "s" and isinstance(cells[9].value, float)
    long = "x" * 40_000
    for value, told in (
        (2**60, str(2**60)),
        ("a\x0bb", "a\ufffdb"),
        ([1], "[1]"),
        (date(1066, 1, 2), "1066-01-02"),
        (long, "40,000 characters"),
    ):
        rows = [PredictedRow(InputRow("a", "a", {"x": value}), Prediction(id="a", prediction="y"))]
        predicted = output.Predicted(rows, PredictionCounts.count(rows), {}, {})
        with target.open("wb") as file, nullcontext() if value != long else pytest.raises(DataError, match=told):
            output.write_predictions(file, "xlsx", predicted)
        if value != long:
            assert load(target)[1][0].value == told


def test_further_answers_are_columns_or_told(labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = (Candidate("y", 0.5), Candidate("z", 0.25))
    first, second = Prediction(id="a", prediction="y", candidates=pair), Prediction(id="b", prediction="", skipped="no")
    rows = [PredictedRow(InputRow("a", one.id, {"x": "1"}), one) for one in (first, second)]
    counts = PredictionCounts(num_records=2, num_skipped=1, num_answers=2, columns={"x": None})
    with (tmp_path / "a.csv").open("wb") as file:
        output.write_predictions(file, "csv", output.Predicted(rows, counts, {}, {}))
    assert (tmp_path / "a.csv").read_text().splitlines() == [
        "x,prediction,confidence,skipped,prediction_2",
        "1,y,,,z",
        "1,,,no,",
    ]
    words = ["predict", str(labels), "--inputs", "a red hat", "--temperature", "1", "--eval.num_candidates", "2"]
    words += ["--eval.score_labels", "false"]
    assert main([*words, "--output", str(tmp_path / "a.txt")]) == 0
    assert ".jsonl has all" in capsys.readouterr().err


def test_lines_of_text_are_answered_line_by_line(labels: Path, tmp_path: Path) -> None:
    (tmp_path / "a.en").write_text("a red hat\n\nAda, a blue hat\n")
    target = tmp_path / "out.txt"
    assert main(["predict", str(labels), "--input", str(tmp_path / "a.en"), "--output", str(target)]) == 0
    lines = target.read_text().split("\n")
    assert len(lines) == 4 and lines[0] and lines[1] == "" and lines[2] and lines[3] == ""


def test_the_form_of_a_table_needs_one(labels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(labels.parent / "train.csv")
    for words, told in (
        (("--delimiter", ";"), "--delimiter: has an effect on .csv alone"),
        (("--delimiter", ";", "--output", "a.tsv"), "--delimiter: has an effect on .csv alone"),
        (("--safe-csv", "--output", "a.json"), "--safe-csv: has an effect on .csv and .tsv alone"),
        (("--safe-csv", "--format", "kaggle", "--output", "a.csv"), "--safe-csv: has an effect"),
    ):
        assert main(["predict", str(labels), "--input", source, *words]) == 2
        assert told in capsys.readouterr().err
