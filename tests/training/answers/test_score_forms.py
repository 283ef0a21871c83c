"""`score` reads every file that `predict` writes, what pandas makes of it, and lines in order."""

from __future__ import annotations

import gzip
import io
import json

import pytest

from fivetune.cli import main
from fivetune.config import load_config
from fivetune.errors import DataError
from fivetune.rundir.records import Prediction
from fivetune.tasks import load_task
from fivetune.training.answers.inputs import iter_input_rows
from fivetune.training.answers.output import FORMATS, Predicted, write_predictions
from fivetune.training.answers.predicted_file import PredictedRow, PredictionCounts
from fivetune.training.answers.score import GoldSet, _map_to_own_ids, _read_references
from fivetune.training.answers.score_file import read_no_answer_scores, read_rankings
from fivetune.types import RawRecord

TASK = load_task("classification", {"inputs": "{text}", "label": "label", "labels": {"pos": "pos", "neg": "neg"}})
ROWS = [("good, new", "pos"), ('the "best"', "pos"), ("a\tb", "neg"), ("line\nline", "neg"), ("bad", "neg")]
SAID = ["pos", "", "neg", 'no "answer"', "a, b"]


def read_gold(folder, *, with_ids=True) -> tuple[str, GoldSet]:
    lines = [{"text": text, "label": label} for text, label in ROWS]
    named = [{"id": f"q{number}", **line} if with_ids else line for number, line in enumerate(lines)]
    path = folder / "refs.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in named))
    return str(path), _read_references(TASK, str(path), {}, (), skips=False)


def read_said(path, gold: GoldSet) -> list[str]:
    found = _map_to_own_ids(read_rankings(str(path)), gold, str(path), None)
    return [found[key][0] for key in gold.questions]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "bioasq"])
def test_what_predict_writes(tmp_path, name, with_ids, packed):
    source, gold = read_gold(tmp_path, with_ids=with_ids)
    inputs = list(iter_input_rows(source, TASK, {}))
    rows = [
        PredictedRow(row, Prediction(id=row.id, prediction=said, confidence=0.5))
        for row, said in zip(inputs, SAID, strict=True)
    ]
    file = io.BytesIO()
    write_predictions(file, name, Predicted(rows, PredictionCounts.count(rows), {}, {}))
    path = tmp_path / f"preds{FORMATS[name].suffixes[0]}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(file.getvalue()) if packed else file.getvalue())
    assert read_said(path, gold) == SAID


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("columns", [("id", "prediction"), ("text", "prediction"), ("prediction",), ("id", "label")])
@pytest.mark.parametrize("form", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_what_pandas_writes(tmp_path, columns, index, form):
    pandas = pytest.importorskip("pandas")
    _, gold = read_gold(tmp_path)
    table = {"id": [*gold.questions], "text": [text for text, _ in ROWS], "prediction": SAID, "label": SAID}
    frame = pandas.DataFrame({name: table[name] for name in columns})
    path = tmp_path / f"preds.{form}"
    if form in ("csv", "tsv"):
        frame.to_csv(path, index=index, sep="\t" if form == "tsv" else ",")
    elif form == "parquet":
        frame.to_parquet(path, index=index)
    else:
        frame.to_json(path, orient="records", lines=form == "jsonl")
    assert read_said(path, gold) == SAID


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("name", ["preds.txt", "generated_predictions.txt", "preds", "preds.txt.gz"])
def test_lines_in_order(tmp_path, name, end):
    said = ["pos", "", "a, b", "x\ty", '"neg"']
    content = ("".join(line + end for line in said) + end).encode()  # and a blank line at the end
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    _, gold = read_gold(tmp_path, with_ids=False)
    assert read_said(tmp_path / name, gold) == said


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.txt", "pos\nneg\n", r"2 predictions without ids, but the references have 5 records\. Allowed is one per"),
        ("a.csv", "text,answer\na,b\n", r"no prediction in text, answer\. Allowed is .*JSON lines, CSV"),
        ("a.csv", "id,prediction\nq0,pos\nq0,neg\n", "the id 'q0' occurs twice"),
        ("a.jsonl", '{"id": "q0", "prediction": "a"}\n{"prediction": "b"}\n', "some rows have an id, others none"),
    ],
)
def test_what_does_not_fit(tmp_path, name, content, wrong):
    (tmp_path / name).write_text(content)
    _, gold = read_gold(tmp_path)
    with pytest.raises(DataError, match=wrong):
        read_said(tmp_path / name, gold)


def test_numbers_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("id,no_answer_score\nq0,0.5\nq1,-1e-3\n")
    assert read_no_answer_scores(str(tmp_path / "a.csv")) == {"q0": 0.5, "q1": -1e-3}


def test_records_without_an_answer_keep_their_place(tmp_path):
    _, gold = read_gold(tmp_path, with_ids=False)
    rows = [(text, said, "why" if said == "" else "") for (text, _), said in zip(ROWS, SAID, strict=True)]
    frame = "text,prediction,skipped\n" + "".join(f"x{i},{said!r},{why}\n" for i, (_, said, why) in enumerate(rows))
    (tmp_path / "a.csv").write_text(frame.replace("'", '"').replace('"answer""', '""answer"""'))
    found = _map_to_own_ids(read_rankings(str(tmp_path / "a.csv")), gold, "a.csv", None)
    assert [*found] == [key for place, key in enumerate(gold.questions) if place != 1]


@pytest.mark.parametrize("lines", [True, False])
def test_records_of_json_without_an_answer_keep_their_place(tmp_path, lines):
    rows = [{"prediction": "mine", "prediction_2": "a"}, {"skipped": "why"}, {"prediction": "b"}]
    (tmp_path / "a.json").write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    assert read_rankings(str(tmp_path / "a.json")) == [["a"], None, ["b"]]


@pytest.mark.parametrize("form", ["run", "recipe"])
def test_a_recipe_or_run_gives_task_columns_and_references(tmp_path, capsys, form):
    """`score runs/x predictions.csv` answered "there is no task"; the template's columns were asked for."""
    golds = tmp_path / "golds.csv"
    golds.write_text("key,topics\n1,a|b\n2,\n", encoding="utf-8")
    said = tmp_path / "said.csv"
    said.write_text("id,prediction\n1,a|b\n2,a\n", encoding="utf-8")
    folder = tmp_path / "x"
    folder.mkdir()
    recipe = load_config(
        {
            "model": {"path": "t5-small"},
            "task": {"name": "tags", "inputs": "{title}", "tags": ["topics"], "separator": "|"},
            "data": {"train": "t.csv", "eval": str(golds), "columns": {"id": "key"}},
        }
    ).as_redacted_yaml()
    path = folder / ("config.yaml" if form == "run" else "my.yaml")
    path.write_text(recipe, encoding="utf-8")
    source = str(folder if form == "run" else path)
    for words in ([str(said)], [str(golds), str(said)], [str(golds), "--json", str(said)]):
        assert main(["score", source, *words]) == 0, capsys.readouterr().err
    *_, last = capsys.readouterr().out.splitlines()
    table = json.loads(last)
    assert (table["task"], table["num_examples"], table["scores"]["micro_f1"]) == ("tags", 2, 80.0)


def test_a_task_needs_both_files(tmp_path, capsys):
    assert main(["score", "squad", "preds.csv"]) == 2
    assert "REFERENCES" in capsys.readouterr().err
    recipe = tmp_path / "my.yaml"
    recipe.write_text("task: {name: squad}\ndata: {train: a.json}\n", encoding="utf-8")
    assert main(["score", str(recipe), "preds.csv"]) == 2
    assert "data.eval is not set" in capsys.readouterr().err
    assert main(["score", str(tmp_path), "preds.csv"]) == 2
    assert "is neither a task nor a recipe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("tags", {}, {"tags": "a"}),
        ("jsonl", {"inputs": "q: {question}", "targets": "{answer}"}, {"answer": "a"}),
        ("gsm8k", {}, {"answer": "#### 7"}),
        ("stackoverflow_tags", {}, {"Tags": "<a>"}),
        ("stackoverflow_quality", {}, {"Y": "HQ"}),
    ],
)
def test_scoring_needs_no_inputs(name, options, fields):
    task = load_task(name, options)
    example = task.to_score(RawRecord({"id": "1", **fields}, "a.csv:2"))
    assert example.references == (next(iter(fields.values())).strip("<># "),)
    with pytest.raises(DataError, match=rf"no column '{next(iter(fields))}'.*Columns: id, other\."):
        task.to_score(RawRecord({"id": "1", "other": "a"}, "a.csv:2"))
