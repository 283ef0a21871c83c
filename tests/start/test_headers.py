"""Tables without names of columns: the names that are invented, and the commands with them."""

from __future__ import annotations

import json
import random

import pytest

from fivetune.errors import DataError
from fivetune.start.choose import DoubtError, build_command
from fivetune.start.headers import explain_missing_header

WORDS = ("river", "bridge", "garden", "train", "dog", "water", "road", "town", "is", "near", "the")


def write_rows(folder, fill) -> tuple[str, int]:
    draw = random.Random(2)

    def draw_text(num: int) -> str:
        return " ".join(draw.choices(WORDS, k=num))

    rows = [fill(i, draw_text, draw) for i in range(40)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "t.jsonl"), len(rows[0])


@pytest.mark.parametrize(
    ("fill", "header", "roles"),
    [
        (lambda i, text, draw: [f"{i}", draw.choice("ab"), text(6)], "id,label,text", [("text", "label")]),
        (lambda i, text, draw: [text(9), draw.choice("01")], "text,label", [("text", "label")]),
        (lambda i, text, draw: [text(9), text(8)], "column1,column2", [("column1", "column2"), ("column2", "column1")]),
        (lambda i, text, draw: [f"{text(5)}?", text(9)], "question,answer", [("question", "answer")]),
        (
            lambda i, text, draw: [f"{text(5)}?", *(text(2) for _ in range(4)), draw.choice("ABCD")],
            "question,A,B,C,D,answer",
            [("question A B C D", "answer")],
        ),
        (lambda i, text, draw: [text(3), text(9), draw.choice("ab")], "text1,text2,label", [("text1 text2", "label")]),
        (
            lambda i, text, draw: [text(9), draw.choice("ab"), draw.choice("cd")],
            "text,label1,label2",
            [("text", "label1"), ("text", "label2")],
        ),
        (
            lambda i, text, draw: [
                f"r{i}.txt",
                ",".join(sorted(draw.sample(["oil", "gas", "tea"], 1 + i % 2))),
                text(9),
            ],
            "id,labels,text",
            [("text", "labels")],
        ),
        (lambda i, text, draw: [i, round(draw.random(), 3), text(9)], "id,score,text", [("text", "score")]),
    ],
)
def test_a_command_names_columns_and_roles_at_once(tmp_path, fill, header, roles):
    source, num = write_rows(tmp_path, fill)
    doubt = explain_missing_header(source, num, "no header")
    assert isinstance(doubt, DoubtError), str(doubt)
    assert [(" ".join(one.inputs), " ".join(one.targets)) for _, one in doubt.choices] == roles
    for table, reading in doubt.choices:
        assert f"--header {header} --task {reading.task} --column " in build_command(table, reading)


def test_names_for_what_fits_no_task_are_told(tmp_path):
    source, num = write_rows(tmp_path, lambda i, text, draw: [i, text(9)])
    error = explain_missing_header(source, num, "no header")
    assert isinstance(error, DataError) and not isinstance(error, DoubtError)
    assert "--header id,text" in str(error)


def test_of_few_records_nothing_is_said(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("1,a text\n2,another text\n3,a third text\n")
    assert explain_missing_header(str(path), 2, "no header") is None
