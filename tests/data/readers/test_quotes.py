"""How tables quote their cells: cells of several lines, backslashes, single quotes, and quotes that are text."""

from __future__ import annotations

import csv
import io

import pytest

from fivetune.data.readers.quotes import Quoting, are_quotes_well_formed
from fivetune.data.readers.records import read_records

PLAIN = [(f"{i}", f"plain text {i}", "ab"[i % 2]) for i in range(30)]
LINED = {  # each line of the text has as many separators as the table
    "greeting": "Hello all;, it is so;,.\nViolence;, and the rest;, you see.",
    "doubled": 'He said;, "no";,.\n"Yes";, said she;, "of course"',
    "blank line": "One;, two;, three\n\nfour;, five;, six",
    "line end first": "\nred;, green;, blue",
    "ten lines": "\n".join(f"line {i};, is;, long" for i in range(10)),
    "quote alone": '"\n;,;,"',
}


@pytest.fixture
def read(tmp_path):
    def write_and_read(content: str, header=("id", "text", "label"), name="a.csv"):
        path = tmp_path / name
        path.write_bytes(content.encode())
        bad = []
        rows = [record.fields for record in read_records(str(path), header=header, on_bad=bad.append)]
        return [(row["id"], row["text"], row["label"]) for row in rows], bad

    return write_and_read


def write(rows, **form):
    out = io.StringIO()
    csv.writer(out, **{"lineterminator": "\n", **form}).writerows(rows)
    return out.getvalue()


@pytest.mark.parametrize("kind", LINED)
@pytest.mark.parametrize("separator", [",", ";"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("place", [0, 3, 29])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC])
def test_a_cell_of_several_lines_is_one_whatever_its_lines_look_like(read, kind, separator, end, place, quoting):
    rows = [*PLAIN]
    rows[place] = ("7", LINED[kind], "b")
    rows[5] = ("5", f"a{separator} b", "a")
    assert read(write(rows, delimiter=separator, quoting=quoting, lineterminator=end)) == (rows, [])


def test_cells_of_a_large_table(read):
    rows = [(f"{i}", LINED["greeting"] if i == 1_900 else f"text, {i}", "a") for i in range(2_000)]
    assert read(write(rows)) == (rows, [])


def test_more_lines_than_any_cell_has_are_told(read):
    lines = write(PLAIN).splitlines()
    lines[0] = '0,"plain, text",a'
    lines[3], lines[28] = '3,"The first,a', '28,The size is 15",b'
    rows, bad = read("\n".join(lines) + "\n")
    assert len(rows) == 4 and "ends in line 29" in bad[0].reason


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (r'"\"@bob hi, all\" she said"', '"@bob hi, all" she said'),
        (r'"a \"b\", c"', 'a "b", c'),
        ('"two\nlines, \\"x\\", y"', 'two\nlines, "x", y'),
        (r'"path C:\new, \"n\""', r'path C:\new, "n"'),
        (r'"\"\""', '""'),
        (r'"a, ""b"" and \"c\""', 'a, "b" and "c"'),
    ],
)
@pytest.mark.parametrize("broken", ["", '31,"an "odd" one",b\n'])
def test_quotes_after_a_backslash(read, cell, text, broken):
    content = "".join(f"{i},{cell},a\n" for i in range(30)) + broken
    rows, bad = read(content)
    assert rows == [(f"{i}", text, "a") for i in range(30)] and len(bad) == bool(broken)


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_single_quotes(read, quoting, separator, name):
    text = f'it\'s{separator} so "they"{separator} said;,'
    rows = [(f"{i}", text if i % 3 else f"plain {i}", "a") for i in range(30)]
    content = write(rows, delimiter=separator, quotechar="'", quoting=quoting)
    assert read(content, name=name) == (rows, [])
    assert read(content.replace("''", "\\'"), name=name) == (rows, [])


@pytest.mark.parametrize(
    "text", ["'Twas the night", "rock 'n' roll", "'no' said he", "the boys'", "'", "''", "'quoted'"]
)
@pytest.mark.parametrize("separator", [",", "\t"])
def test_apostrophes_are_text(read, text, separator):
    rows = [(f"{i}", text if i == 3 else f"plain {i}", "a") for i in range(30)]
    assert read(write(rows, delimiter=separator)) == (rows, [])


@pytest.mark.parametrize(
    ("content", "is_well_formed"),
    [
        (b'a,"b"\n', True),
        (b'a,"b\nc"\n', False),  # no cell on one line
        (b'"a",b\n"c\nd,e",f', True),
        (b'a,"b""c"\r\nd,""\r\n', True),
        (b'a,"""b"""', True),
        (b'a,b"c"\n', False),
        (b'a,"b"c\n', False),
        (b'a,"b",c"\n', False),
        (b'"a"\n"', False),
        (b"a,b\n", False),
    ],
)
@pytest.mark.parametrize("block", [1, 4, 1_000])
def test_well_formed_quotes(monkeypatch, content, is_well_formed, block):
    monkeypatch.setattr("fivetune.data.readers.quotes.BLOCK_BYTES", block)
    assert are_quotes_well_formed(io.BytesIO(content), ",", Quoting()) == is_well_formed
