"""Files of inputs as people give them to predict: lines of text, tables with and without a header."""

from __future__ import annotations

import gzip

import pytest

from fivetune.errors import DataError
from fivetune.tasks import load_task
from fivetune.training.answers.inputs import iter_input_rows

ONE_COLUMN = load_task("jsonl", {"inputs": "translate: {en}", "targets": "{de}"})
TWO_COLUMNS = load_task("squad_v2", {})


def rows(path, content, *, task=ONE_COLUMN, columns=None, header=()):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = list(iter_input_rows(str(path), task, columns or {}, header))
    return [(row.fields.get((columns or {}).get("en", "en")), bool(row.skipped)) for row in found]


@pytest.mark.parametrize("name", ["lines.txt", "lines.en", "lines", "stdin"])
@pytest.mark.parametrize(
    "content",
    ["Go now.\nHello, Ann.\n\nStop", "Go, now.\r\nHello, Ann.\r\n\r\nSt, op\r\n", "\ufeffa; b\nc; d\n\ne; f\n"],
)
def test_a_line_of_text_is_an_input(tmp_path, name, content):
    lines = content.lstrip("\ufeff").splitlines()
    expected = [(line, not line) for line in lines]
    assert rows(tmp_path / name, content) == expected
    assert rows(tmp_path / f"{name}.gz", gzip.compress(content.encode())) == expected
    assert rows(tmp_path / name, content, columns={"en": "text"}) == expected


@pytest.mark.parametrize(
    ("name", "content", "header"),
    [
        ("a.csv", "en\nGo.\nStop.\n", ()),
        ("a.csv", "en\nGo.\nStop.\n", ("en", "de")),  # has a header, which the data of the run lacked
        ("a.tsv", "Go.\tGeh.\nStop.\tHalt.\n", ("en", "de")),
        ("a.txt", "Go.\tGeh.\nStop.\tHalt.\n", ("en", "de")),
        ("a.txt", "Go.\nStop.\n", ("en", "de")),
        ("a.txt", "id\ten\n1\tGo.\n2\tStop.\n", ("en", "de")),
        ("a.txt", '{"en": "Go."}\n{"en": "Stop."}\n', ("en", "de")),
        ("a.json", '[["Go.", "Geh."], ["Stop.", "Halt."]]', ("en", "de")),
    ],
)
def test_tables_of_inputs(tmp_path, name, content, header):
    assert rows(tmp_path / name, content, header=header) == [("Go.", False), ("Stop.", False)]


def test_lines_for_a_task_of_several_columns_are_refused(tmp_path):
    with pytest.raises(DataError, match="lines of text, but the task reads question, context"):
        rows(tmp_path / "a.txt", "Who?\nWhy?\n", task=TWO_COLUMNS)
