"""Tables of text as people have them: separators, quotes that are text, lines without a header."""

from __future__ import annotations

import csv
import gzip
import io
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from fivetune.data.readers.delimited import describe_quotes, find_start, read_first_cells
from fivetune.data.readers.records import check_source, draw_records, read_records
from fivetune.data.readers.source_files import BadRecord
from fivetune.errors import DataError
from fivetune.types import RawRecord

PAIRS = [(f"Gus has key {i}.", f"Gus hat Schlüssel {i}.") for i in range(40)]


@pytest.fixture
def read(tmp_path):
    """Write a file, and return its records without ids and the line of each, with the places of bad ones."""

    def write_and_read(name: str, content: str | bytes, header: tuple[str, ...] = ()):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        bad = []
        found = list(read_records(str(path), header=header, on_bad=bad.append))
        rows = [tuple(value for name, value in one.fields.items() if name != "id") for one in found]
        return rows, [int(one.where.rpartition(":")[2]) for one in bad]

    return write_and_read


def format_lines(rows, separator="\t", header=("en", "de"), end="\n"):
    return "".join(separator.join(row) + end for row in [header, *rows])


# ---- quotes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
@pytest.mark.parametrize(
    "odd",
    [
        {5: ('"Where? asked Ada.', "Wo? fragte Ada.")},  # never closed
        {5: ('"Where? asked Ada.', "Wo?"), 30: ('The size is 15"', "Die Größe ist 15")},  # closed much later
        {5: ('"Where? asked Ada.', "Wo?"), 6: ('The size is 15"', "Die Größe ist 15")},
        {5: ("Where?", '"Wo? fragte Ada.'), 30: ("The size", 'Die Größe ist 15"')},
        {5: ('"Two cups" is a title.', '"Zwei Tassen" ist ein Titel.')},
        {5: ('He said "no".', 'Er sagte "nein".'), 7: ('5" pipe', '"')},
        {0: ('"First', "Erste"), 39: ('last"', "letzte")},
        {5: ('""Where?"', "Wo?"), 9: ('"a" and "b"', '"a" und "b"')},
    ],
)
def test_quotes_of_tab_separated_texts_are_text(read, odd, start, end, packed):
    rows = [odd.get(place, pair) for place, pair in enumerate(PAIRS)]
    content = (start + format_lines(rows, end=end)).encode()
    assert read("a.tsv.gz" if packed else "a.tsv", gzip.compress(content) if packed else content) == (rows, [])


@pytest.mark.parametrize("separator", ["\t", ",", ";", "|"])
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_quoted_tables_stay_quoted(read, separator, quoting):
    rows = [
        *PAIRS,
        ("q", "\n0" + separator),
        ("code", "def f():\n\treturn 1"),
        (f"two{separator}cells", 'a "word"'),
        ("line\nline", "Dear Ann,\nthanks"),
        ('"', "x"),
    ]
    out = io.StringIO()
    csv.writer(out, delimiter=separator, quoting=quoting, lineterminator="\n").writerows([("en", "de"), *rows])
    assert read("a.tsv" if separator == "\t" else "a.csv", out.getvalue()) == (rows, [])


@pytest.mark.parametrize("separator", [",", ";", "|"])
def test_a_quote_that_is_never_closed_on_its_line_swallows_no_rows(read, separator):
    rows = [*PAIRS]
    rows[5], rows[30] = ('"Where? asked Ada.', "Wo?"), ("The size", 'Die 15"')
    assert read("a.csv", format_lines(rows, separator)) == (rows, [])


def test_one_bad_row_of_a_quoted_table_is_told_and_others_keep_their_form(read):
    lines = ['"text";"label"', *(f'"text {i}";"a"' for i in range(9)), '"one "two" three";"b"', '"last";"b"']
    rows, bad = read("a.csv", "\n".join(lines) + "\n")
    assert (rows[0], rows[-1], len(rows), bad) == (("text 0", "a"), ("last", "b"), 10, [11])


def test_rows_with_other_numbers_of_cells_are_told_by_line(read):
    lines = [*format_lines(PAIRS[:9]).splitlines(), "one cell", '"three\tcells\there', "\t", ""]
    rows, bad = read("a.tsv", "\n".join(lines) + "\n")
    assert (rows, bad) == ([*PAIRS[:9], ("", "")], [11, 12])


# ---- separators


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        *[(name, one) for name in ("a.csv", "a.tsv", "a.txt") for one in ",;\t|"],
        ("a.txt", "|||"),
        ("a.txt", " ||| "),
        ("a.csv", "####"),
        ("a.csv", "::"),
        ("a.txt", " +++$+++ "),
    ],
)
def test_the_separator_is_found_whatever_the_suffix(read, name, separator):
    assert read(name, format_lines(PAIRS, separator)) == (PAIRS, [])


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.tsv", "Title, short\tlabel\ngood, new\tpos\n", ("good, new", "pos")),
        ("a.txt", "Title, short\tlabel\ngood, new\tpos\n", ("good, new", "pos")),
        ("a.csv", "text;label\ngood, new;pos\nold, bad, sad;neg\n", ("good, new", "pos")),
        ("a.tsv", "text,label\ngood;pos\n", None),
        ("a.csv", "sep=;\r\nText;Label\r\ngut, neu;ja\r\n", ("gut, neu", "ja")),
        ("a.csv", '\ufeff"sep=\t"\r\nText\tLabel\r\ngut\tja\r\n', ("gut", "ja")),
        ("a.csv", ",text,label\n0,good,pos\n1,bad,neg\n", ("0", "good", "pos")),
        ("a.csv", "text,label,,\ngood,pos,,\n", ("good", "pos")),
        ("a.tsv", "text\tlabel\ngood\tpos\t\nbad\tneg\t\n", ("good", "pos")),
        ("a.csv", 'example,label\nsure,"yes\nmaybe,no"\nok,yes\n', ("sure", '"yes')),
        ("a.tsv", 'x\ty\na " c\tb\n" b c\ta\n', ('a " c', "b")),
    ],
)
def test_lines_of_tables(read, name, content, row):
    rows, bad = read(name, content)
    assert rows[:1] == ([row] if row else []) and len(bad) == (row is None)


def test_twenty_thousand_columns_are_read_in_linear_time(read):
    names = [f"c{i}" for i in range(20_000)]
    rows, _ = read("a.csv", format_lines([["x"] * len(names)] * 3, ",", header=names))
    assert len(rows) == 3


# ---- headers

HEADERLESS = {
    "sentences": ("Go.\tGeh.\nRun!\tLauf!\nWho?\tWer?\nWow!\tDonnerwetter!\n", 4),
    "questions": ("Who is it?\tAda\nWho was it?\tBea\nWhere is it?\there\n", 3),
    "label first": ("ham\tGo on\nspam\tWin now\nham\tOk\nham\tYes\n", 4),
    "label last": ("i feel fine;joy\ni cry;sadness\ni laugh;joy\ni smile;joy\ni weep;sadness\n", 5),
    "number last": ("So there is no way\t0\nGood case\t1\nGreat\t1\n", 3),
    "index and label": ("0\t1\tGo on\n1\t0\tNo way\n2\t1\tYes\n", 3),
    "index from 1, rating": ("1\t2\tGo on\n2\t3\tNo way\n3\t1\tYes\n", 3),
    "index, text, label": ("0\tGo on\t1\n1\tNo way\t0\n2\tYes\t1\n", 3),
    "number first": ('"3","Wall St.","Short-sellers"\n"1","Oil","prices"\n"4","Chip","new"\n', 3),
    "three columns": ("gj04\t1\t\tOur friends\ngj04\t0\t*\tOne more\ngj05\t1\t\tMore\n", 3),
    "marks": ("Go. ||| Geh.\nRun! ||| Lauf!\nWow. ||| Ui.\n", 3),
    "Chinese": ("你好。\tHello.\n谢谢。\tThanks.\n再见。\tBye.\n", 3),
    "quoted sentences": ('"Go," he said.\tGeh.\n"Run," he said.\tLauf.\nNo.\tNein.\n', 3),
}


def test_a_box_that_is_ticked_with_its_own_name_is_no_record(read):
    rows, bad = read("a.csv", "comment,late,rude\n" + "Well then,late,\nSo it is,,rude\nYes,late,rude\n" * 9)
    assert (len(rows), bad) == (27, [])


@pytest.mark.parametrize("kind", HEADERLESS)
def test_a_table_without_header_is_refused_until_its_columns_are_named(read, kind):
    content, num = HEADERLESS[kind]
    with pytest.raises(DataError, match=r"no header: .*--header column1,column2"):
        read("a.txt", content)
    widths = {"index and label": 3, "index from 1, rating": 3, "index, text, label": 3, "number first": 3}
    header = ("a", "b", "c", "d")[: {**widths, "three columns": 4}.get(kind, 2)]
    rows, bad = read("a.txt", content, header)
    assert (len(rows), bad) == (num, [])


@pytest.mark.parametrize(
    "content",
    [
        "en,de\nGo.,Geh.\nRun.,Lauf.\n",
        "0,1\nGo.,3\nRun.,4\nWow.,5\n",  # names of pandas
        ",0,1\n0,Go.,3\n1,Run.,4\n",
        "name,2019,2020\nGo on,3,4\nRun,4,4\n",
        "What would you change?,How old are you?\nmore food,31\nnothing,28\nless noise.,40\n",  # a form
        "label,text\nlabel,a\nlabel,b\nlabel,c\n",
        "hi,hallo\nbye,tschüs\nyes,ja\n",  # nothing is certain
        "text,2019\ngood,3\nbad,4\n",
        "No.,Text\n1,a\n2,b\n",
    ],
)
def test_a_header_is_not_taken_for_a_record(read, content):
    rows, bad = read("a.csv", content)
    assert (len(rows), bad) == (len(content.splitlines()) - 1, [])


BELOW = "1,Late again,no\n2,Lost it,yes\n3,Came,no\n"


@pytest.mark.parametrize(
    ("above", "names"),
    [
        ("Tickets of this year\n", "Nr,Body,Kind"),
        ("Tickets\n\n", "Nr,Body,Kind"),
        ("# source: us, you\n# licence, of both, for all: CC BY\n", "id,text,label"),
        ("# a line of a licence, in English\n" * 30 + "\n", "id,text,label"),
        ("Tickets 2024,,\n,,\n", "Nr,Betreff,Art"),  # as Excel writes it
        ("\ufeffExport, all of them\n", "id,text,label"),
        ('"Tickets, all"\n', '"id","text","label"'),
        ("Tickets, old, new\n", "id,text,label"),
    ],
)
def test_the_header_is_found_below_a_title_which_is_told(tmp_path, above, names):
    path = tmp_path / "a.csv"
    path.write_text(f"{above}{names}\n{BELOW}", encoding="utf-8")
    bad = []
    records = list(read_records(str(path), on_bad=bad.append))
    assert [{*names.replace('"', "").split(",")} <= record.fields.keys() for record in records] == [True] * 3
    assert bad[0].where == f"{path}:1" and f"above the header, in line {above.count(chr(10)) + 1}" in bad[0].reason
    assert read_first_cells(path.read_bytes(), path) == names.replace('"', "").split(",")


@pytest.mark.parametrize(
    ("content", "num_bad"),
    [
        ("Frage,Antwort\nr1,foo,bar\nr2,oof,rab\nr3,ofo,abr\n", 3),  # the names of rows have no name
        ("Frage,Antwort\nfoo,bar,\noof,rab,\nofo,arb,\n", 0),
        ("Kommentar\nHallo, du\nNa, du\nWer, ich\n", 3),
        ("Frage,\nfoo,a\noof,b\nofo,a\n", 0),
        (",Frage,Art\n1,foo,a\n2,oof,b\n3,ofo,a\n", 0),
        ("Frage,Art,Notiz\nfoo,a,\noof,b,\nofo,a,\n", 0),
    ],
)
def test_a_header_with_other_cells_than_the_rows_is_no_title(read, content, num_bad):
    rows, bad = read("a.csv", content)
    assert (len(rows), len(bad)) == (3 - num_bad, num_bad)


def test_a_title_above_rows_without_header(read):
    with pytest.raises(DataError, match=r"a.csv:2: no header: '1' is a number.*--header column1,column2,column3"):
        read("a.csv", f"Tickets\n{BELOW}")
    assert len(read("a.csv", f"Tickets\n{BELOW}", ("a", "b", "c"))[0]) == 3


@pytest.mark.parametrize(
    ("content", "header", "rows"),
    [
        ("Go.\tGeh.\n", ("en", "de"), [("Go.", "Geh.")]),
        ("en\tde\nGo.\tGeh.\n", ("en", "de"), [("Go.", "Geh.")]),  # the first line has the names
        ("yes\tno\nyes\tno\nyes\tno\n", ("yes", "no"), [("yes", "no")] * 2),
    ],
)
def test_named_columns(read, content, header, rows):
    assert read("a.tsv", content, header) == (rows, [])


@pytest.mark.parametrize(
    ("header", "wrong"),
    [(("a",), "2 cells, but data.header names 1: a"), (("a", "a"), "the columns 1 and 2 are both named 'a'")],
)
def test_names_that_do_not_fit(read, header, wrong):
    with pytest.raises(DataError, match=wrong):
        read("a.tsv", "Go.\tGeh.\n", header)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", '[["Go", "x"], ["No", "y"]]'), ("a.jsonl", '["Go", "x"]\n'), ("a.txt", '["Go", "x"]\n["No", "y"]\n')],
)
def test_records_that_are_lists(tmp_path, read, name, content):
    assert read(name, content, ("text", "label"))[0][0] == ("Go", "x")
    with pytest.raises(DataError, match=r"no header: .*--header column1,column2"):
        list(read_records(str(tmp_path / name)))


RETURNS = {
    "alone": "text,label\rgood,pos\rbad,neg\r",
    "with one line end of Windows": "text,label\rgood,pos\rbad,neg\r\n",
    "with one line feed": "text,label\ngood,pos\rbad,neg\rfine,pos\rwell,pos",
    "without a header": "1;Land;A;B;B\r2;Sea;A;B;A\r3;Sky;A;B;A\r\n",
    "with quoted line ends": 'text,label\r"good\rand well, too",pos\r"bad",neg\r\n',
}


@pytest.mark.parametrize("kind", RETURNS)
@pytest.mark.parametrize("name", ["a.csv", "a.txt"])
def test_carriage_returns_are_refused_with_the_command_that_replaces_them(tmp_path, read, name, kind):
    with pytest.raises(DataError, match=r"tr < .*a\.(csv|txt) '\\r' '\\n' > a-lines\."):
        read(name, RETURNS[kind])
    command = "tr < {0} '\\r' '\\n' > {0}-lines".format(tmp_path / name)
    subprocess.run(command, shell=True, check=True)
    replaced = (tmp_path / f"{name}-lines").read_text()
    rows, bad = read(name, replaced, ("a", "b", "c", "d", "e") if ";" in replaced else ())
    assert len(rows) > 1 and not bad


def test_carriage_returns_within_texts_are_kept_and_told_where_they_divide_no_row(tmp_path, read):
    texts = "id\ttext\tlabel\n" + "".join(f"{n}\tone\rtwo\rthree\tpos\n" for n in range(8))
    rows, bad = read("a.tsv", texts)
    assert len(rows) == 8 and rows[0][0] == "one\rtwo\rthree" and not bad
    path = tmp_path / "a.csv"
    path.write_bytes(b"text,label\ngood,pos\nbad\rso bad,neg\nfine,pos\n")
    bad: list[BadRecord] = []
    assert len(list(read_records(str(path), on_bad=bad.append))) == 2
    assert bad[0].where.endswith("a.csv:3") and "tr < " in bad[0].reason


def test_files_of_lines_are_refused_with_the_name_for_both(tmp_path):
    for name, told in (("train.en", r"'A\.\{en,de\}'"), ("train.de", r"'\S*/train\.\{de,en\}'")):
        (tmp_path / name).write_text("Gus hat: Hut, rot.\n" * 5)
        with pytest.raises(DataError, match=told):
            list(read_records(str(tmp_path / name)))
    with pytest.raises(DataError, match=r"'\S*/train\.\{en,de\}'"):
        list(read_records(f"{tmp_path}/train.en,{tmp_path}/train.de"))


def test_lines_of_several_files_are_the_columns_of_a_table(tmp_path):
    (tmp_path / "a.de").write_bytes(b'\xef\xbb\xbfEin "Hut, rot\r\n\r\n{"x": 1}\tTab')
    with gzip.open(tmp_path / "a.en.gz", "wt") as file:
        file.write("A hat\n\nNo\n")
    found = [record.fields for record in read_records(f"{tmp_path}/{{a.de,a.en.gz}}")]
    assert [one["de"] for one in found] == ['Ein "Hut, rot', "", '{"x": 1}\tTab']
    assert [one["en"] for one in found] == ["A hat", "", "No"] and found[2]["id"] == "a-3"
    assert [*next(read_records(f"{tmp_path}/{{a.de,a.en.gz}}", header=["x", "y"])).fields] == ["id", "x", "y"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a.{de,fr}", r"a\.de has 3, .*a\.fr has 2\."),
        ("a.{de,it}", "a.it: no such file"),
        ("{a.de,a.csv}", "a.csv is no file of lines"),
        ("{a.de,more}", "more/.* is no file of lines"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path, name, told):
    for file, text in (("a.de", "a\nb\nc"), ("a.fr", "a\nb\n"), ("a.csv", "x,y\na,b\n"), ("more/x.csv", "x,y\n")):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    for read in (check_source, read_records):
        with pytest.raises(DataError, match=told):
            list(read(f"{tmp_path}/{name}") or ())


@pytest.mark.parametrize(
    "names", ["train.en train.de", "faq_questions.txt faq_answers.txt", "questions.txt answers.txt"]
)
def test_files_with_different_numbers_of_lines_do_not_belong_together(tmp_path, names):
    first, second = (tmp_path / name for name in names.split())
    first.write_text("Gus hat: Hut, rot.\n" * 7)
    second.write_text("Gus hat: Hut, rot.\n" * 5 + "no line end")
    for source in (first, f"{first},{second}", tmp_path):
        with pytest.raises(DataError, match="7") as raised:
            list(read_records(str(source)))
        assert f"{second} has 6" in str(raised.value) and "paste" not in str(raised.value)


# ---- tables for the eye, comments, rows of different widths


def test_padding_is_no_part_of_names_and_cells(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text      ,label   \nred hat   ,   1\nblue coat ,   0\n")
    assert [record.fields for record in read_records(str(path))] == [
        {"id": "a-1", "text": "red hat", "label": "1"},
        {"id": "a-2", "text": "blue coat", "label": "0"},
    ]


def test_spaces_within_a_table_are_kept(read):
    assert read("a.tsv", "text\tlabel\n  red hat\tgood \n")[0] == [("  red hat", "good ")]


def test_below_comments_rows_may_lack_their_last_cells():
    rows = "".join(f"{number}\twhere is house {number}\n" for number in range(9))
    assert find_start("# of us\n" * 25 + f"id\tauthor.text\tlabel\n{rows}", Path("a.tsv")) == (26, "\t")


def test_comments_are_above_the_header(tmp_path):
    path = tmp_path / "a.csv"
    rows = "".join(f"{number % 2}; wo ist haus {number}; dort\n" for number in range(9))
    path.write_text(f"// Fragen\n// kategorie; frage; antwort\n{rows}")
    bad = []
    records = list(read_records(str(path), on_bad=bad.append))
    assert len(records) == 9
    assert {"kategorie", "frage", "antwort"} <= records[0].fields.keys()
    assert [one.where for one in bad] == [f"{path}:1"]


def test_a_row_with_more_cells_names_the_command_that_keeps_the_first(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("en\tde\na\tb\nc\td\te\n")
    bad = []
    assert len(list(read_records(str(path), on_bad=bad.append))) == 1
    assert f"cut -f1-2 {path}" in bad[0].reason


def test_separators_at_the_ends_of_lines_are_no_column(tmp_path):
    path = tmp_path / "a.csv"
    rows = "".join(f"It rains {row}.,It rained {row}.,\n" for row in range(20))
    path.write_text(f"from,to,\n{rows}He goes.,He went, and came.\n")
    bad = []
    records = list(read_records(str(path), on_bad=bad.append))
    assert len(records) == 20 and records[0].fields.keys() == {"from", "to", "id"}
    assert [one.where for one in bad] == [f"{path}:22"] and "3 cells" in bad[0].reason


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("again", ["text{}label", "Text{}LABEL ", "\ufefftext{}label", '"text"{}"label"'])
def test_names_that_stand_again_are_no_record_and_are_told(read, separator, again):
    rows = [f"Is {row} late?{separator}{'no' if row % 2 else 'yes'}\n" for row in range(9)]
    rows.insert(4, again.format(separator) + "\n")
    found, bad = read("a.csv", f"text{separator}label\n{''.join(rows)}")
    assert len(found) == 9 and {label for _, label in found} == {"no", "yes"}
    assert bad == [6]


def test_names_without_that_of_the_index_stand_again(read):
    assert read("a.csv", ",text,label\n0,Go.,no\n,text,label\n0,Stay.,yes\n") == (
        [("0", "Go.", "no"), ("0", "Stay.", "yes")],
        [3],
    )


def test_a_text_may_be_the_name_of_its_only_column(read):
    assert read("a.txt", "text\nhello\n", ("text",))[0] == [("text",), ("hello",)]


@pytest.mark.parametrize("end", [" \n", "   \r\n"])
def test_blanks_behind_the_quote_that_ends_a_line_are_no_part_of_it(read, end):
    rows = [f'"Is house {row} open?","It is, from {row} on."' + (end if row % 4 == 0 else "\n") for row in range(12)]
    found, bad = read("a.csv", f"question,answer\n{''.join(rows)}")
    assert not bad and found == [(f"Is house {row} open?", f"It is, from {row} on.") for row in range(12)]


LABELS = ("pos", "neg")


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize(
    "names", [("text", "label"), ("label", "text"), ("id", "text", "label"), ("text", "n", "label")]
)
def test_separators_without_quotes_belong_to_the_only_column_of_texts(tmp_path, separator, names):
    values = [
        {
            "text": f"No {row}" + f"{separator} not{separator} so" * (row % 4 == 0),
            "label": LABELS[row % 3 == 0],
            "id": f"{row}",
            "n": "7",
        }
        for row in range(24)
    ]
    path = tmp_path / "a.csv"
    path.write_text(
        "".join(f"{separator.join(row)}\n" for row in [names, *([one[name] for name in names] for one in values)])
    )
    found = list(read_records(str(path)))
    assert [[record.fields[name] for name in names] for record in found] == [
        [one[name] for name in names] for one in values
    ]
    assert "is part of text in 6 lines, the first: 2" in describe_quotes(path)


def test_separators_without_quotes_far_below_are_part_of_the_text(tmp_path):
    path = tmp_path / "a.csv"
    rows = [f"good {row},{LABELS[row % 2]}" for row in range(300)]
    path.write_text("\n".join(["text,label", *rows, '"say ""no"", not", yes,pos', *rows]) + "\n")
    assert [one.fields["text"] for one in read_records(str(path))][300] == 'say "no", not, yes'
    assert "is part of text in 1 line, the first: 302" in describe_quotes(path)


@pytest.mark.parametrize(
    "rows",
    [
        [f"Who is it{row}?,It is, I{row} think" if row % 4 else f"Who is{row}?,I am{row}" for row in range(24)],
        [f"good{row}, yes,{LABELS[row % 2]}" for row in range(24)],  # a name is missing
        [f"good{row},{LABELS[row % 2]}" for row in range(200)] + ["good, yes,odd"],
        [f"good{row},{row % 7}" + ",5" * (row % 4 == 0) for row in range(24)],  # 3,5
        [f"good{row},{LABELS[row % 2]}" + ",pos" * (row % 4 == 0) for row in range(24)],
    ],
)
def test_rows_stay_unread_where_another_column_may_be_meant(tmp_path, rows):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    bad = []
    assert len(list(read_records(str(path), on_bad=bad.append))) == sum(row.count(",") == 1 for row in rows)
    assert len(bad) == sum(row.count(",") > 1 for row in rows) and describe_quotes(path) == ""
    assert "3 cells, beginning with" in bad[0].reason


def test_a_blank_name_beside_the_name_that_it_would_get(read):
    content = ",Unnamed: 0,text\n0,4,red\n1,5,blue\n"
    assert read("a.csv", content)[0] == [("0", "4", "red"), ("1", "5", "blue")]


def test_blank_rows_are_not_drawn():
    rows = [
        RawRecord({"id": f"a-{i}", "text": " " if i > 40 else "x", "n": None}, "", has_own_id=False)
        for i in range(9_000)
    ]
    drawn, num_read = draw_records(rows, 1_000)
    assert drawn == rows[:41] and num_read == 41
    assert draw_records([RawRecord({"id": "7", "text": ""}, "")], 20)[1] == 1


@pytest.mark.parametrize("separator", [",", "\t"])
@pytest.mark.parametrize("names", [[], ["place", *["question", "answer", "note"] * 4]])
def test_several_records_in_a_line_are_told_with_the_command_that_divides_them(tmp_path, separator, names):
    blocks = [[[f"Who is {row}{place}?", f"I{separator} {row}", ""] for place in range(4)] for row in range(9)]
    path = tmp_path / "it's.csv"
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.writer(file, delimiter=separator)
        rows = [[f"place {row}", *chain.from_iterable(own)] for row, own in enumerate(blocks)]
        table.writerows([names] * bool(names) + rows)
    with pytest.raises(DataError) as raised:
        list(read_records(str(path)))
    found = re.search(r"(python -c .*) > .*and name that file(, with --header (\S+))?\.", str(raised.value))
    assert found and (found[3] is None if names else found[3].split(",") == [f"column{n}" for n in range(1, 5)])
    done = subprocess.run(
        ["bash", "-c", f'python() {{ "{sys.executable}" -S "$@"; }}; {found[1]}'], stdout=-1, check=True
    )
    wanted = [[f"place {row}", *block] for row, own in enumerate(blocks) for block in own]
    assert [*csv.reader(io.StringIO(done.stdout.decode()))] == [names[:4]] * bool(names) + wanted


@pytest.mark.parametrize("names", ["text,label,text", "a,b,a,b,c"])
def test_repeated_names_of_other_tables_are_refused(read, names):
    with pytest.raises(DataError, match="the columns 1 and 3 are both named"):
        read("a.csv", f"{names}\n" + f"{names}\n".upper() * 5)


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("a.txt", "text\tlabel", "{};{}"),
        ("a.txt", "text,label", "{}\t{}"),
        ("a.csv", "text;label", "{},{}"),
        ("a.txt", "text label", "{}\t{}"),
        ("a.tsv", "text,label", "{}\t{}"),
        ("a.csv", '"text" | "label"', "{},{}"),
        ("a.txt", "text,label", "{} ||| {}"),
    ],
)
def test_a_header_may_have_another_separator_than_its_rows(read, tmp_path, name, header, row):
    rows = [(f"hat {number}", ("pos", "neg")[number % 2]) for number in range(20)]
    assert read(name, "\n".join([header, *(row.format(*cells) for cells in rows)]) + "\n") == (rows, [])
    content = (tmp_path / name).read_bytes()
    assert read_first_cells(content, tmp_path / name) == ["text", "label"]


def test_words_above_rows_are_no_header_of_theirs(read):
    with pytest.raises(DataError, match="no header"):
        read("a.csv", "Good, all\n" + "".join(f"hat {number};pos\n" for number in range(20)))


def test_unknown_names_above_rows_are_their_header(read):
    rows = [(f"un gato {number}", ("bien", "mal")[number % 2]) for number in range(20)]
    assert read("a.csv", "frase,etiqueta\n" + "".join(f"{text};{label}\n" for text, label in rows)) == (rows, [])
    assert read("a.csv", "a,b\n;\n;0\n;0\n") == ([("", ""), ("", "0"), ("", "0")], [])


def test_bytes_that_are_no_utf_8_are_told_with_a_missing_header(read):
    lines = [f"{number}\tThe {'tea' if number < 9 else 'café'} number {number} is there.\n" for number in range(20)]
    message = r"no header: .*--header column1,column2.*a\.txt:10: not UTF-8.*iconv"
    with pytest.raises(DataError, match=message) as caught:
        read("a.txt", "".join(lines).encode("cp1252"))
    assert "\n" not in str(caught.value)
