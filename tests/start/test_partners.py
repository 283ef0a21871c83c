"""Texts in one table and what is learned in another one of equal length: the command that joins them."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fivetune.errors import DataError
from fivetune.start.partners import describe_partner
from fivetune.start.plan import build_plan

TEXTS = [["id", "text"], *([str(row), f"a hat, a coat\nand {row} rings"] for row in range(30))]
LABELS = [["id", "label"], *([str(row), "ab"[row % 2]] for row in range(30))]


def write(path: Path, rows: list[list[str]], **form: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, **form).writerows(rows)


@pytest.mark.parametrize(
    "names", ["X_train.csv y_train.csv", "texts.csv labels.csv", "it's-inputs.csv it's-outputs.csv"]
)
@pytest.mark.parametrize("has_ids", [True, False])
def test_the_printed_command_joins_texts_and_labels(tmp_path, monkeypatch, names, has_ids):
    monkeypatch.chdir(tmp_path)
    first, second = names.split()
    write(tmp_path / first, [row[not has_ids :] for row in TEXTS])
    write(tmp_path / second, [row[not has_ids :] for row in LABELS], delimiter=";")
    write(tmp_path / "X_test.csv", TEXTS[:12])
    with pytest.raises(DataError) as raised:
        build_plan(first, given={}, load_tokenizer=lambda name: None)
    found = re.search(r"join them: (python -c .*), and name that file\.", str(raised.value))
    assert found
    subprocess.run(["bash", "-c", f'python() {{ "{sys.executable}" -S "$@"; }}; {found[1]}'], check=True)
    written = found[1].rpartition(" > ")[2].strip("\"'").replace("'\"'\"'", "'")
    with (tmp_path / written).open(newline="") as file:
        assert [row[-2:] for row in csv.reader(file)] == [
            [text, label] for (_, text), (_, label) in zip(TEXTS, LABELS, strict=True)
        ]
    plan = build_plan(written, given={}, load_tokenizer=lambda name: None)
    assert (plan.reading.inputs, plan.reading.targets) == (["text"], ["label"])


def test_tables_of_unequal_length_do_not_belong_together(tmp_path):
    write(tmp_path / "X.csv", TEXTS)
    write(tmp_path / "y.csv", LABELS[:-2])
    told = describe_partner(str(tmp_path / "X.csv"))
    assert "30 records" in told and " 28" in told and "python" not in told


@pytest.mark.parametrize("other", [[["id", "label"], *reversed(LABELS[1:])], TEXTS, [["id", "label"]]])
def test_other_tables_are_not_joined(tmp_path, other):
    """Other ids, no further column, no record."""
    write(tmp_path / "X.csv", TEXTS)
    write(tmp_path / "y.csv", other)
    assert describe_partner(str(tmp_path / "X.csv")) == ""
    assert describe_partner(str(tmp_path / "none.csv")) == ""
