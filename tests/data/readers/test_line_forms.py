"""Files of lines that are no tables: fastText's, LibSVM's, one token a line, JSON below other lines, and texts without
labels."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess

import pytest

from fivetune.data.readers.records import read_records
from fivetune.errors import DataError

SENTENCES = [
    [("Ann", "NNP", "B-PER"), ("saw", "VBD", "O"), ('"', "PUNCT", "O"), (f"Paris{i}", "NNP", "B-LOC")] for i in range(9)
]


def complain(path, **options) -> str:
    with pytest.raises(DataError) as error:
        list(read_records(str(path), **options))
    return str(error.value)


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv", "a.valid", "train", "a.ft.txt"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_fasttext(tmp_path, name, end):
    path = tmp_path / name
    lines = [f'__label__{"pos" if i % 2 else "very-neg"} film, number {i};\t"fine"' for i in range(9)]
    path.write_text(end.join([*lines, "", ""]), encoding="utf-8", newline="")
    fields = [record.fields for record in read_records(str(path))]
    assert [one["label"] for one in fields[:2]] == ["very-neg", "pos"] and len(fields) == 9
    assert fields[1]["text"] == 'film, number 1;\t"fine"'


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.tsv"])
def test_labels_of_fasttext_at_the_ends_of_lines(tmp_path, name):
    path = tmp_path / name
    path.write_text("A film, a good one . __label__pos\n" * 9 + "Bad\t__label__neg\r\nno label\n")
    bad = []
    found = [record.fields for record in read_records(str(path), on_bad=bad.append)]
    assert [(one["text"], one["label"]) for one in found[8:]] == [("A film, a good one .", "pos"), ("Bad", "neg")]
    assert [one.where for one in bad] == [f"{path}:11"]
    path.write_text("A __label__pos __label__new\n" * 9)
    assert next(read_records(str(path))).fields["labels"] == ["pos", "new"]


def test_a_column_of_labels_of_fasttext_is_a_column(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "A film, __label__pos\n" * 9)
    assert next(read_records(str(path))).fields["text"] == "A film"


def test_fasttext_with_several_labels_and_bad_lines(tmp_path):
    path = tmp_path / "a.txt"
    content = (
        "\ufeff__label__a text\n" * 1 + "__label__a text\n" * 20 + "__label__a __label__b two\nno label\n__label__c\n"
    )
    path.write_text(content, encoding="utf-8")
    bad = []
    fields = [record.fields for record in read_records(str(path), on_bad=bad.append)]
    assert {name: value for name, value in fields[21].items() if name != "id"} == {"labels": ["a", "b"], "text": "two"}
    assert fields[0]["labels"] == ["a"] and fields[22]["text"] == ""
    assert [one.where for one in bad] == [f"{path}:23"]


@pytest.mark.parametrize("line", ["1 3:0.5 7:1", "-1 1:2.5e-3", "+1 1:1 2:0 # note", "1,4 3:0.5", "2.5 1:0.25"])
def test_features(tmp_path, line):
    for name in ("a.txt", "a.csv", "a.svm"):
        (tmp_path / name).write_text(f"{line}\n" * 9)
        assert "features (LibSVM), no text" in complain(tmp_path / name)


@pytest.mark.parametrize("name", ["a.bio", "a.tsv", "a.csv"])
@pytest.mark.parametrize("separator", ["\t", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("columns", [(0, 2), (0, 1, 2), (0, 1)])
@pytest.mark.parametrize("first", ["", "-DOCSTART- -X- O\n\n", "word{}tag\n"])
def test_tokens_become_sentences_by_the_command_that_is_named(
    tmp_path, monkeypatch, name, separator, end, columns, first
):
    if first.startswith("word") and len(columns) == 3:
        return
    rows = [[separator.join(token[column] for column in columns) for token in one] for one in SENTENCES]
    content = first.format(separator) + "\n\n".join("\n".join(one) for one in rows) + "\n"
    (tmp_path / name).write_text(content, newline=end)
    monkeypatch.chdir(tmp_path)
    message = complain(name)
    assert "one token a line" in message and message == complain(name, header=["a", "b"])
    if shutil.which("awk"):
        command = re.search(r"awk .*?\.tsv", message.replace(name, "IN"))[0].replace("IN", name)
        subprocess.run(command, shell=True, check=True)
        fields = [record.fields for record in read_records("a-lines.tsv", header=["text", "tags"])]
        assert [(one["text"], one["tags"]) for one in fields] == [
            (" ".join(token[0] for token in one), " ".join(token[columns[-1]] for token in one)) for one in SENTENCES
        ]


@pytest.mark.parametrize("is_named", [True, False])
def test_tokens_of_a_table_whose_sentences_are_numbered_once(tmp_path, is_named):
    lines = ["Sentence #,Word,POS,Tag"] if is_named else []
    for number, one in enumerate(SENTENCES):
        for place, (word, kind, tag) in enumerate(one):
            written = word.replace('"', '""""')
            lines.append(f"{f'Sentence: {number}' if place == 0 else ''},{written},{kind},{tag}")
    path = tmp_path / "a.csv"
    path.write_text("\n".join(lines) + "\n")
    assert "one token a line, with its tag" in complain(path)


@pytest.mark.parametrize(
    "content",
    [
        "en\tde\n" + "".join(f"cat{i}\tKatze{i}\n" for i in range(9)),
        "word\tclass\n" + "".join(f"cat{i}\t{'OB'[i % 2]}\n" for i in range(9)),
        "word\tclass\n" + "".join(f"cat{i}\tO\n" for i in range(9)),
        "text\ttags\n" + "".join(f"Ann saw {i}\tB-PER O O\n" for i in range(9)),
        "id,text,label\n" + "".join(f"{i},a text {i},{'O' if i % 2 else 'B-1'}\n" for i in range(9)),
        "id,text,label\n\n" + "\n".join(f"{i},word,a\n" for i in range(9)),
    ],
)
def test_tables_stay_tables(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_text(content)
    assert len(list(read_records(str(path)))) == 9


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.data"])
def test_lines_of_prose_are_no_table(tmp_path, monkeypatch, name):
    texts = [
        "no 1, 3 and 5, again",
        "so, and so, and so, on",
        "well",
        "red, blue",
        "one",
        "a, b, c, d",
        "this, or that",
    ]
    monkeypatch.chdir(tmp_path)
    for one in (name, "pos.txt", "neg.txt"):
        (tmp_path / one).write_text("\n".join(texts) + "\n")
    message = complain(name)
    assert "lines of text without labels" in message
    if shutil.which("awk"):
        subprocess.run(re.search(r"awk .*?all\.tsv", message)[0], shell=True, check=True)
        fields = [record.fields for record in read_records("all.tsv", header=["text", "label"])]
        assert [(one["text"], one["label"]) for one in fields] == [
            *((text, "pos.txt") for text in texts),
            *((text, "neg.txt") for text in texts),
        ]


RECORD = {"text": "It rains.", "more": [{"a": 1}]}
SPREAD = f"{json.dumps(RECORD, indent=1)}\n" * 3
LINES = f"{json.dumps(RECORD)}\n" * 3


@pytest.mark.parametrize("above", ["mainKey:\tQID\n", "# made by me\n\n", "[INFO] start\n", "2024-01-02 wrote {3}\n"])
@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("a.json", SPREAD), ("a.json", LINES), ("a.txt", LINES), ("a.jsonl", SPREAD), ("a.json.gz", SPREAD),
        ("a.json", json.dumps([RECORD] * 3, indent=1)), ("a.json", json.dumps({"data": [RECORD] * 3})),
    ],
)  # fmt: skip
def test_json_below_other_lines_is_told_with_the_command_that_takes_it(tmp_path, above, name, below):
    content = f"{above}{below}".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match="no JSON") as caught:
        list(read_records(str(tmp_path / name)))
    found = re.search(r"what is above: (.* > (\S+)), and", str(caught.value))
    assert found
    subprocess.run(["bash", "-c", found[1]], cwd=tmp_path, check=True)
    assert [record.fields["text"] for record in read_records(str(tmp_path / found[2]))] == ["It rains."] * 3


def test_json_that_is_damaged_has_no_such_command(tmp_path):
    for content in (f"# x\n{SPREAD}}}", "# x\n{'a': 1}\n" * 3, f"# x\n{SPREAD}done\n"):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(DataError, match="malformed JSON"):
            list(read_records(str(tmp_path / "a.json")))


@pytest.mark.parametrize(
    ("name", "separator", "first", "header"),
    [
        ("a.txt", "\t", "", "id,labels,text"),
        ("a.tsv", "\t", "", "id,labels,text"),
        ("a.csv", "|", "", "id,labels,text"),
        ("a b.tsv", "\t", "id\tlabel\ttokens\n", "id,label,text"),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_that_end_in_the_words_of_a_text_are_joined_by_the_command(tmp_path, name, separator, first, header, end):
    words = ["bank", "oil", "rate", "wheat", "trade", "coffee", "ship"]
    rows = [[f"r{i}", "acq,gas" if i % 3 else "earn", *words[i % 4 : 7 - i % 3]] for i in range(12)]
    path = tmp_path / name
    path.write_text(first + "".join(separator.join(row) + end for row in rows), newline="")
    message = complain(path)
    command, named = re.findall(r"each line: (awk .+), and name that file, with --header (\S+)\.$", message)[0]
    assert "begins with 2 cells" in message and named == header
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    [joined] = tmp_path.glob("*-joined.tsv")
    found = [[*record.fields.values()] for record in read_records(str(joined), header=header.split(","))]
    assert found == [[*row[:2], " ".join(row[2:])] for row in rows]


@pytest.mark.parametrize(
    "row",
    [
        lambda i, words: [
            f"r{i}",
            "ham",
            *(f"well {one}" for one in words),
        ],  # sentences: their place may mean something
        lambda i, words: words,  # baskets without a label
        lambda i, words: [*words, "ham"],
        lambda i, words: [f"r{i}", "ham", *words[:4]],
    ],
)
def test_other_lines_of_many_cells_are_not_joined(tmp_path, row):
    words = ["bank", "oil", "rate", "wheat", "trade", "coffee", "ship"]
    path = tmp_path / "a.txt"
    path.write_text("".join("\t".join(row(i, words[i % 4 : 7 - i % 3])) + "\n" for i in range(12)))
    try:
        list(read_records(str(path), on_bad=lambda bad: None))
    except DataError as error:
        assert "-joined" not in str(error)


@pytest.mark.parametrize(
    ("before", "names"),
    [
        (["pos", "neg"], "label,text"),
        (["health pos {i}.txt", "music neg {i}.txt", "dvd pos {i}.txt"], "label,label_2,id,text"),
        (["LOC:city", "NUM:count", "HUM:ind"], "label,text"),
        (["1", "5", "3"], "label,text"),
        (["+1", "-1"], "label,text"),
    ],
)
def test_labels_that_are_the_first_words_of_a_line_come_with_the_command(tmp_path, before, names):
    path = tmp_path / "reviews.txt"
    texts = [
        f"{word} film, all in all" for word in ["a", "the", "no", "one", "some", "what", "why", "good", "bad", "dull"]
    ]
    lines = [f"{before[i % len(before)].format(i=i)} {texts[i % 10]} {i}" for i in range(40)]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as error:
        list(read_records(str(path)))
    command, _, header = re.search(r"(sed .*), (with) --header ([\w,]+)\.", str(error.value)).groups()
    assert header == names
    subprocess.run(command, shell=True, check=True)
    records = list(read_records(str(path.with_suffix(".tsv")), header=tuple(names.split(","))))
    assert [record.fields["text"] for record in records] == [f"{texts[i % 10]} {i}" for i in range(40)]
    assert records[1].fields["label"] == before[1].split()[0]


def test_first_words_of_sentences_are_no_labels(tmp_path):
    path = tmp_path / "lines.txt"
    starts = ["the", "a", "it", "we", "she", "he", "they", "one", "some", "all", "most", "few"]
    path.write_text("".join(f"{starts[i % len(starts)]} line number {i} of a poem\n" for i in range(40)))
    with pytest.raises(DataError, match="nothing divides alike") as error:
        list(read_records(str(path)))
    assert "sed " not in str(error.value)
