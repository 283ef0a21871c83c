"""A list that was written with a column for each of its texts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from fivetune.data.readers.records import read_records
from fivetune.start.choose import explain_few
from fivetune.start.columns import build_table
from fivetune.start.survey import make_survey
from fivetune.start.wide_lists import explain_wide_list


def explain(path, head, rows):
    path.write_text("\n".join([head, *rows]))
    return explain_wide_list(make_survey(build_table(str(path), read_records(str(path))), {}))


@pytest.mark.parametrize("stem", ["patterns/{}", "patterns.{}", "example_{}", "utterance{}", "text {}"])
def test_the_command_writes_a_row_for_each_text(tmp_path, stem):
    head = ",".join(["tag", *map(stem.format, (0, 1, 2))])
    rows = [f"t{i},where is number {i},is {i} still here," + f"who has number {i}" * (i < 9) for i in range(10)]
    told = explain(tmp_path / "t.csv", head, rows) or ""
    code = shlex.split(re.findall(r"python -c (.*) > ", told)[0])[0]
    written = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split(
        "\n"
    )
    assert written[:3] == ["text,label", "where is number 0,t0", "is 0 still here,t0"]
    assert len(written[:-1]) == 1 + 29


@pytest.mark.parametrize(
    ("head", "row"),
    [
        ("tag,a1,a2,a3", "t,where is number {0},is {0} still here,who has {0} there"),  # a label with several rows
        ("tag,choice1,choice2,choice3", "t{0},where is number {0},is {0} still here,who has {0} there"),
        ("tag,text1,text2", "t{0},where is number {0},is {0} still here"),
        ("name,text1,text2,text3", "t{0},where is number {0},is {0} still here,who has {0} there"),
    ],
)
def test_other_columns_with_numbers_are_no_list(tmp_path, head, row):
    assert explain(tmp_path / "t.csv", head, [row.format(i) for i in range(12)]) is None


def test_of_few_rows_the_list_is_told(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "tag,b/0,b/1,b/2\n" + "".join(f"t{i},where is {i},is {i} here,who has {i} there\n" for i in range(4))
    )
    assert "b/0 to b/2" in explain_few(build_table(str(path), read_records(str(path))), [], {})
