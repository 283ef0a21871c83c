"""Readers: literal in, literal out, for each format and each kind of bad input; fuzz; the counts of real files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivetune import installation
from fivetune.data import hub
from fivetune.data.readers import delimited, json_text, records, source_files
from fivetune.data.readers.records import (
    BadRecord,
    detect_format,
    is_hub_name,
    read_records,
    refuse_duplicate_ids,
)
from fivetune.errors import DataError, FiveTuneEnvironmentError, FiveTuneError, RecordError
from fivetune.tasks import get_text, load_task
from fivetune.types import RawRecord

SHARED = Path(__file__).parents[4] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data (real data sets) is not on this machine")

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "paragraphs": [
                {
                    "context": "Dr. Ann slept.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Who?",
                            "answers": [{"text": "Ann", "answer_start": 4}],
                            "is_impossible": False,
                        },
                        {"id": "q2", "question": "Why?", "answers": [], "is_impossible": True, "plausible_answers": []},
                    ],
                }
            ],
            "title": "Ann",
        }
    ],
}
FLAT_SQUAD = [
    {
        "id": "q1",
        "question": "Who?",
        "title": "Ann",
        "context": "Dr. Ann slept.",
        "answers": {"text": ["Ann"], "answer_start": [4]},
        "is_impossible": False,
    },
    {
        "id": "q2",
        "question": "Why?",
        "title": "Ann",
        "context": "Dr. Ann slept.",
        "answers": {"text": [], "answer_start": []},
        "is_impossible": True,
    },
]
ROWS = [{"id": "a", "question": "Who?"}, {"id": "b", "question": "Why ñ?"}]
JSONL = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.fixture
def put(tmp_path, monkeypatch):
    """put(name, content) writes a file into an empty working directory and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, content: str | bytes | list | dict) -> str:
        if isinstance(content, list | dict):
            content = json.dumps(content)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
        return name

    return write


def fields(source: str, **options) -> list[dict]:
    return [dict(record.fields) for record in read_records(source, **options)]


def complaint(source: str, error: type[FiveTuneError] = DataError, **options) -> str:
    with pytest.raises(error) as raised:
        list(read_records(source, **options))
    message = str(raised.value)
    assert "\n" not in message
    return message


def kept_and_rejected(source: str) -> tuple[list[RawRecord], list[BadRecord]]:
    bad: list[BadRecord] = []
    return list(read_records(source, on_bad=bad.append)), bad


# ---- formats


@pytest.mark.parametrize("indent", [None, 2])
def test_squad_document_gives_one_record_per_question(put, indent):
    source = put("dev.json", json.dumps(SQUAD, indent=indent))
    assert fields(source) == FLAT_SQUAD
    assert [r.where for r in read_records(source)] == [f"dev.json: data[0].paragraphs[0].qas[{i}]" for i in (0, 1)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", {"version": 1.5, "data": ROWS}),
        ("a.json", {"questions": ROWS}),
        ("a.json", ROWS),
        ("a.jsonl", JSONL),
        ("a.json", JSONL),  # content before suffix
        ("a.txt", JSONL + "\n\n"),
        ("a.jsonl", "\ufeff" + JSONL.replace("\n", "\r\n")),
        ("a.csv", "id,question\na,Who?\nb,Why ñ?\n"),
        ("a.csv", "id;question\r\na;Who?\r\nb;Why ñ?"),
        ("a.csv", "\ufeffid,question\n\na,Who?\nb,Why ñ?\n\n"),
        ("a.tsv", 'id\tquestion\na\t"Who?"\nb\tWhy ñ?\n'),
        ("a.jsonl.gz", gzip.compress(JSONL.encode(), mtime=0)),
        ("a.jsonl", gzip.compress(JSONL.encode(), mtime=0)),  # gzipped without saying so
        ("a", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
    ],
)
def test_flat_formats_give_the_same_records(put, name, content):
    assert fields(put(name, content)) == ROWS


def test_csv_cell_with_html_over_several_lines(put):
    body = '<p class="x">one,\n\ntwo</p>\n'
    out = io.StringIO()
    csv.writer(out).writerows([["Id", "Body"], ["1", body], ["2", "y"]])
    found = list(read_records(put("so.csv", out.getvalue()), columns={"id": "Id", "text": "Body"}))
    assert [(r.fields, r.where) for r in found] == [
        ({"id": "1", "text": body}, "so.csv:2"),
        ({"id": "2", "text": "y"}, "so.csv:6"),
    ]


@pytest.mark.parametrize("packed", [False, True])
def test_parquet(put, packed):
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    answers = [{"text": ["Ann"], "answer_start": [4]}, {"text": [], "answer_start": []}]
    parquet.write_table(pyarrow.table({"id": [1, 2], "answers": answers}), sink)
    source = put("a.parquet", gzip.compress(sink.getvalue()) if packed else sink.getvalue())
    assert fields(source) == [{"id": "1", "answers": answers[0]}, {"id": "2", "answers": answers[1]}]
    assert [r.where for r in read_records(source)] == ["a.parquet: row 1", "a.parquet: row 2"]


def test_a_gzipped_parquet_file_that_would_fill_the_disk(put):
    pytest.importorskip("pyarrow")
    source = put("a.parquet.gz", gzip.compress(b"PAR1" + bytes(2**24)))
    assert complaint(source).startswith("a.parquet.gz: unpacks to more than 100 times its size")


@pytest.mark.parametrize(
    ("checksum", "wrong"), [(False, "'utf-8' codec can't decode byte 0xff"), (True, "could not verify page integrity")]
)
def test_a_damaged_text_of_a_parquet_file(put, checksum, wrong):
    """A text that is not UTF-8 was an internal error, and checksums of pages were not compared."""
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.table({"a": ["some text"]}), sink, compression="none", write_page_checksum=checksum)
    damaged = sink.getvalue().replace(b"some text", b"some \xffext")
    assert complaint(put("a.parquet", damaged)).startswith("a.parquet: damaged Parquet file: ")
    assert wrong in complaint("a.parquet")


def test_saved_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(ROWS)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "all"))
    assert fields(str(tmp_path / "one")) == ROWS
    assert fields(str(tmp_path / "all" / "test")) == ROWS
    assert "several splits: test, train. Name one:" in complaint(str(tmp_path / "all"))
    assert len(records.list_source_files(str(tmp_path / "one"))) == 3
    (tmp_path / "one" / "state.json").write_text("{")
    assert "the folder saved by datasets cannot be loaded" in complaint(str(tmp_path / "one"))


def test_folder_of_files_is_read_in_sorted_order(put):
    Path("parts").mkdir()
    put("parts/b.csv", "question\nWhy?\n")
    put("parts/a.jsonl", '{"question": "Who?"}\n')
    put("parts/README.md", "not data")
    assert fields("parts") == [{"id": "a-1", "question": "Who?"}, {"id": "b-1", "question": "Why?"}]
    assert records.list_source_files("parts") == [Path("parts/a.jsonl"), Path("parts/b.csv")]


@pytest.mark.parametrize(
    ("row", "id"),
    [
        ('"Id": 7', "7"),
        ('"ID": "x"', "x"),
        ('"Id": 1, "ID": 2', "a-1"),
        ('"Id": [1]', "a-1"),
        ('"id": "q", "Id": 7', "q"),
    ],
)
def test_an_id_of_another_case(put, row, id):
    (record,) = read_records(str(put("a.jsonl", "{" + row + ', "b": "c"}\n')))
    assert record.fields["id"] == id


def test_ids_are_positions_where_there_are_none_and_count_bad_records(put):
    source = put("v.1.jsonl", '{"a": 1}\n{"a": \n{"a": 2, "id": ""}\n{"a": 3, "id": null}\n{"a": 4, "id": 9}\n')
    kept, bad = kept_and_rejected(source)
    assert [r.fields["id"] for r in kept] == ["v.1-1", "v.1-3", "v.1-4", "9"]
    assert [b.where for b in bad] == ["v.1.jsonl:2"]
    assert "'id' is a list: [1]. Allowed is text or a whole number." in complaint(put("l.jsonl", '{"id": [1]}'))


def test_columns_rename_and_leave_the_rest(put):
    source = put("a.jsonl", '{"id": 1, "Frage": "Wer?", "question": "old", "n": 2}\n')
    assert fields(source, columns={"question": "Frage"}) == [{"id": "1", "question": "Wer?", "n": 2}]


@pytest.mark.parametrize("window", [16, 17, 18, 19, 64])
def test_window_size_changes_nothing(put, monkeypatch, window):
    document = json.dumps({"n": -1.25e3, "t": None, **SQUAD, "s": 'é\\"\u2028', "x": 123}, ensure_ascii=False)
    monkeypatch.setattr(json_text, "WINDOW_BYTES", window)
    assert fields(put("a.json", document)) == FLAT_SQUAD
    bad = document.replace('"question": "Why?"', '"question" "Why?"')
    column = bad.index('"Why?"') + 1
    assert f"a.json:1:{column}: malformed JSON: Expecting ':' delimiter" in complaint(put("a.json", bad))


def test_article_over_the_limit_is_read_paragraph_by_paragraph(put, monkeypatch):
    article = {"title": "Ann", "paragraphs": SQUAD["data"][0]["paragraphs"] * 3}
    monkeypatch.setattr(json_text, "WINDOW_BYTES", 16)
    monkeypatch.setattr(json_text, "MAX_RECORD_BYTES", 400)
    assert fields(put("a.json", {"data": [article]})) == FLAT_SQUAD * 3
    assert "a.json:1:11: this value is longer than" in complaint(put("a.json", [{"text": "x" * 900}]))
    assert "a.json:1:11: this value is longer than" in complaint(
        put("a.json", {"data": [{"a": "x" * 300, "b": "y" * 300}]})
    )


# ---- hub names


def test_hub_names_are_told_from_paths(put):
    Path("data").mkdir()
    assert is_hub_name("rajpurkar/squad_v2")
    assert is_hub_name("rajpurkar/squad_v2::validation[:10%]")
    assert not any(map(is_hub_name, ("data", "data/trian", "org/dev.json", "/org/name", "a/b/c", "C:/x")))


def test_hub_rows_come_through_datasets(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub.DATASETS, "_known", {})
    asked = []

    def load(name, config, *, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = list(read_records("org/name:en:test"))
    assert [dict(r.fields) for r in found] == ROWS and found[1].where == "org/name:en:test: row 2"
    assert records.list_source_files("org/name") == []  # a data set in memory has no files
    assert asked == [("org/name", "en", "test"), ("org/name", None, "train")]


def test_hub_failure_says_what_to_do(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(hub.DATASETS, "_known", {})

    def load(*_, **__):
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = complaint("org/name", FiveTuneEnvironmentError)
    assert message.startswith("org/name: cannot be loaded from the Hugging Face hub or its cache /")
    assert "(HF_HUB_OFFLINE is 1): ConnectionError:" in message and "name local files" in message


def test_hub_without_the_package(monkeypatch):
    monkeypatch.setattr(installation, "find_spec", {"datasets": None}.get)
    assert "the package datasets is not installed. Install it: pip install " in complaint(
        "org/name", FiveTuneEnvironmentError
    )


# ---- what is no data


def test_missing_file_names_the_nearest(put):
    put("dev-v2.0.json", "[]")
    put("other.txt", "")
    message = complaint("dev-v2.json")
    assert message.startswith("dev-v2.json: no such file or folder. Near it in .: dev-v2.0.json. Allowed: a file,")
    assert complaint("squad/x/dev.json").startswith("squad/x/dev.json: the folder squad does not exist. Allowed: ")
    assert "other.txt is a file, not a folder" in complaint("other.txt/dev.json")
    assert "this is a file, not a folder" in complaint("dev-v2.0.json/")
    assert "the name of the source is empty" in complaint(" ")


@pytest.mark.parametrize("wanted", ["nope.json", "va.csv", "a", "x.json"])
def test_names_that_are_not_alike_are_not_proposed(put, wanted):
    for name in ("out2.jsonl", "new.csv", "bin.csv", "bom.csv", ".dockerenv", "boot", "adir"):
        put(name, "[]")
    assert complaint(wanted).startswith(f"{wanted}: no such file or folder. Allowed: a file, a folder, or a hub name")
    put("train.json", "[]")
    assert "Near it in .: train.json." in complaint("tran.csv")


def test_folder_without_data(put):
    Path("empty").mkdir()
    assert "empty: a folder without data files; it holds nothing." in complaint("empty")
    Path("prepared/train").mkdir(parents=True)
    put("prepared/train/index.json", "{}")
    assert "prepared: holds prepared data in folders. Name one of them, such as" in complaint("prepared")
    put("empty/model.bin", "x")
    assert "it holds model.bin. Allowed in a folder: .json, .jsonl" in complaint("empty")
    assert "The folder empty is" not in complaint("empty/x.json")


def test_neither_file_nor_folder():
    assert complaint("/dev/null").startswith("/dev/null: neither a file nor a folder.")


def test_unreadable_file_is_a_problem_of_the_environment(put, monkeypatch):
    source = put("a.json", "[]")
    monkeypatch.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    message = complaint(source, FiveTuneEnvironmentError)
    assert message == "a.json: cannot be read: Permission denied. Check its rights and the disk."


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "a.json: the file is empty."),
        (b"\xef\xbb\xbf \n\n", "a.json: the file holds white space only."),
        (b"\0" * 100, "a.json: holds NUL bytes instead of text."),
        (gzip.compress(b"", mtime=0), "a.json: the file is empty."),
        (gzip.compress(JSONL.encode() * 9, mtime=0)[:-9], "a.json: the gzip file is cut off before its end."),
        (gzip.compress(JSONL.encode(), mtime=0)[:-8] + b"\xff" * 8, "a.json: the gzip file is damaged ("),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d",
            "a.json: this is a Git-LFS pointer, not the data",
        ),
        (b"<!DOCTYPE html>\n<html>", "a.json: this is an HTML page, not data."),
        (b"\n<html lang='en'>", "Download the file itself (its raw link)."),
        (b"PK\x03\x04\0\0", "a.json: this is a zip archive."),
        (JSONL.encode("utf-16"), "the text is utf-16. Allowed is UTF-8. Convert it: iconv -f utf-16 -t utf-8 a.json >"),
        (JSONL.encode("utf-16-le"), "the text is utf-16-le."),
        (JSONL.encode("utf-16-be"), "the text is utf-16-be."),
        (JSONL.encode("utf-32"), "the text is utf-32."),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "a.json: this is no text file (PNG). Allowed: SQuAD JSON,"),
        (bytes(range(256)) * 40, "a.json: this is no text file. Allowed: SQuAD JSON,"),
    ],
    ids=range(16),
)
def test_files_that_are_no_data(put, content, wrong):
    assert wrong in complaint(put("a.json", content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_not_utf8_names_an_encoding(put, name):
    lines = b"question,n\nWho?,1\n" if name == "a.csv" else b'{"question": 1}\n{"question": 2}\n'
    message = complaint(put(name, lines + b"caf\xe9,2\n"))
    assert message.startswith(f"{name}:3: not UTF-8: byte 0xe9 in ")
    assert message.endswith(f"cp1252 reads it: iconv -f cp1252 -t utf-8 {name} > utf8-{name}")
    packed = put(f"packed-{name}.gz", gzip.compress(lines + b"caf\xe9,2\n"))
    assert f"gzip -dc {packed} | iconv -f cp1252 -t utf-8 > utf8-packed-{name}" in complaint(packed)
    message = complaint(put(name, lines + b"\x81,2\n"))  # latin-1 reads any bytes: it is not proposed
    assert "cp850 reads it" in message


def test_nested_columns_have_dotted_names(put):
    """Fault C12: nested columns could be reached by no mapping."""
    columns = {"context": "background.text", "answer": "answers.0.text"}
    nested = {"background": {"text": "Ann slept."}, "answers": [{"text": "Ann"}]}
    source = put("a.jsonl", json.dumps(nested) + "\n")
    [record] = read_records(source, columns=columns)
    assert (record.fields["context"], record.fields["answer"]) == ("Ann slept.", "Ann")
    with pytest.raises(
        DataError, match=r"a\.jsonl:1: 'background' is .*, without 'background\.x', which data\.columns names"
    ):
        list(read_records(source, columns={"context": "background.x"}))


def test_mapped_columns_may_be_absent_in_prediction(put):
    """Fault A3 DEFECT 1: predict demanded the columns of the target."""
    for name, content in (("new.csv", "Frage\nWer?\n"), ("new.json", '[{"Frage": "Wer?"}]')):
        mapping = {"question": "Frage", "answer": "Antwort"}
        [record] = read_records(put(name, content), columns=mapping, require_columns=False)
        assert record.fields["question"] == "Wer?" and "answer" not in record.fields
        with pytest.raises(DataError, match=r"no column 'Nummer', which data\.columns names for 'id'"):
            list(read_records(name, columns={"id": "Nummer"}, require_columns=False))


def test_not_utf8_in_a_json_document(put):
    document = b'{"data": [\n{"a": 1},\n{"a": "caf\xe9"}]}'
    assert 'a.json:3: not UTF-8: byte 0xe9 in \'{"a": "café"}]}\'' in complaint(put("a.json", document))


def test_formats_that_are_not_recognised(put):
    assert "lines of text without labels, which nothing divides alike; the first begins with 'hello'" in complaint(
        put("a.txt", "hello")
    )
    for name in ("a.parquet", "a.xlsx"):
        assert f"not {Path(name).suffix} but text: begins with 'hello'" in complaint(put(name, "hello"))
    message = complaint(put("a.parquet", b"PAR1 and no more"))
    assert message.startswith("a.parquet: damaged Parquet file: 'Parquet magic bytes not found in footer.")
    assert detect_format(b"[1, 2]", Path("a.json")) == "json"


# ---- JSON


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ('{"data": [\n  {"a": 1,\n   "b" 2}]}', "a.json:3:8: malformed JSON: Expecting ':' delimiter, near '2}]}'."),
        (
            '{"data": [{"a": 1}',
            "a.json:1:19: malformed JSON: Expecting ',' or ']', near the end of the file: it is cut",
        ),
        (  # the bracket of the list is missing
            '{"data": [{"a": 1}, "version": "1.1"}',
            "a.json:1:30: malformed JSON: Expecting ']' before 'version', near ': \"1.1\"}'.",
        ),
        ('{"data": [{"a": "x', "a.json:1:17: malformed JSON: Unterminated string starting, near '\"x'."),
        ('{"data": [{"a": 1}]} {"a": 1}', "a.json:1:22: malformed JSON: data after the end of the document, near"),
        (
            '{"data": [{"a": 1}], 5: 1}',
            "a.json:1:22: malformed JSON: Expecting property name enclosed in double quotes",
        ),
        ('{"data": [{"a": 1}], "data": []}', "the key 'data' occurs more than once"),
        ('{"n": %s}' % ("[" * 100_000), "malformed JSON: nested too deeply"),
        ('{"n": %s}' % ("1" * 5000), "malformed JSON: a whole number of more than 4,300 digits"),
        (
            '{"version": 1,\n "items": []}',
            "a.json: no list of records: the keys are 'version', 'items'. Allowed: {'data'",
        ),
        ('{"data": {"a": 1}}', "a.json: 'data' is an object. It must be a list of records."),
        ("5", "a.json: a number: 5. Allowed: {'data': [...]}"),
        ('{"data": []}', "a.json: holds no records."),
        ("[]", "a.json: holds no records."),
        ("[{}, 5]", "a.json: [1]: a number: 5. A record is an object"),
    ],
    ids=range(15),
)
def test_malformed_documents(put, content, wrong):
    assert wrong in complaint(put("a.json", content))


def test_objects_are_records_only_where_nothing_else_stands(put):
    head = {"info": {"year": 2016}, "license": {"name": "CC0"}}
    assert fields(put("a.json", {**head, "data": [{"id": "q1"}]})) == [{"id": "q1"}]
    assert fields(put("b.json", {"21645374": {"a": 1}})) == [{"a": 1, "id": "21645374"}]
    document = put("c.json", json.dumps({**head, "year": 1}, indent=1))
    assert "no list of records: the keys are 'info', 'license', 'year'" in complaint(document)
    assert "data after the end" in complaint(put("d.json", '{"1": {"a": 1}} 5'))


@pytest.mark.parametrize(
    ("path", "value", "wrong"),
    [
        (("question",), None, "a.json: data[0].paragraphs[0].qas[1]: 'question' is null. A question has"),
        (("question",), ..., "a.json: data[0].paragraphs[0].qas[1]: no 'question'; the keys are 'id', 'answers',"),
        (("answers",), "Ann", "qas[1]: 'answers' is text: 'Ann'. A question has"),
        (("answers",), 0, "qas[1]: 'answers' is a number: 0. A question has"),  # F10: an internal error
        (("answers",), False, "qas[1]: 'answers' is true or false: false. A question has"),
        (("answers",), ["Ann"], "qas[1]: answers[0]: text, not an object."),
        (("answers",), [{"answer": "Ann"}], "qas[1]: answers[0]: no 'text'; the keys are 'answer'."),
        (("answers",), [{"text": "A", "answer_start": "4"}], "answers[0]: 'answer_start' is text: '4'."),
        (("is_impossible",), "no", "qas[1]: 'is_impossible' is text: 'no'."),
        ((), 5, "a.json: data[0].paragraphs[0].qas[1]: a number: 5, not an object."),
    ],
)
def test_wrong_schema_of_a_question(put, path, value, wrong):
    document = json.loads(json.dumps(SQUAD))
    questions = document["data"][0]["paragraphs"][0]["qas"]
    if not path:
        questions[1] = value
    elif value is ...:
        del questions[1][path[0]]
    else:
        questions[1][path[0]] = value
    source = put("a.json", document)
    assert wrong in complaint(source)
    kept, bad = kept_and_rejected(source)
    assert [r.fields["id"] for r in kept] == ["q1"] and len(bad) == 1


@pytest.mark.parametrize(
    ("article", "wrong"),
    [
        ({"paragraphs": 5}, "a.json: data[0]: 'paragraphs' is a number."),
        ({"paragraphs": ["x"]}, "a.json: data[0].paragraphs[0]: text: 'x'. Allowed is an object."),
        ({"paragraphs": [{"context": "x"}]}, "a.json: data[0].paragraphs[0]: no 'qas'; the keys are 'context'."),
        (
            {"paragraphs": [{"qas": [{"question": "Who?"}]}]},
            "a.json: data[0].paragraphs[0].qas[0]: its paragraph: no 'context'; the keys are 'qas'.",
        ),
    ],
)
def test_wrong_schema_above_a_question(put, article, wrong):
    assert wrong in complaint(put("a.json", {"data": [article]}))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (
            '{"a" 1}',
            "malformed JSON at column 6: Expecting ':' delimiter, near '1}'. Allowed is one JSON object per line.",
        ),
        ("[1]", "a list: [1]. A record is an object {name: value}."),
        ('{"a": NaN}', "field 'a': NaN is not JSON. Allowed are finite numbers and null. Write null."),
        ('{"a": {"b": [1, -Infinity]}}', "field 'a.b[1]': -Infinity is not JSON."),
        ('{"a": 1, "b": 2, "a": 3}', "the key 'a' occurs more than once. Keys must be unique."),
        ('{"x": [{"a": 1, "a": 3}]}', "field 'x[0]': the key 'a' occurs more than once."),
        (r'{"a": "x\u0000"}', "field 'a': NUL character at position 1."),
        ('{"a": "x\0"}', "NUL byte at column 9."),
        (r'{"a": "x\ud800y"}', r"field 'a': \ud800 at position 1 is half a surrogate pair"),
        (r'{"\udc00": 1}', r"half a surrogate pair"),
        ("[" * 100_000, "malformed JSON: nested too deeply."),
        ('{"a": %s}' % ("1" * 5000), "malformed JSON: a whole number of more than 4,300 digits"),
    ],
    ids=range(12),
)
def test_bad_line_of_jsonl_is_confined_to_its_record(put, line, wrong):
    source = put("a.jsonl", f'{{"a": 1}}\n{line}\n{{"a": 2}}\n')
    message = complaint(source)
    assert message.startswith("a.jsonl:2: ") and wrong in message
    kept, bad = kept_and_rejected(source)
    assert [r.fields["a"] for r in kept] == [1, 2] and [b.where for b in bad] == ["a.jsonl:2"]


@pytest.mark.parametrize("cut", [-1, -4, -9])  # the middle one is inside a character
def test_torn_last_line(put, cut):
    kept, bad = kept_and_rejected(put("a.jsonl", '{"a": 1}\n{"a": "ññ"}'.encode()[:cut]))
    assert len(kept) == 1 and bad[0].where == "a.jsonl:2"
    assert bad[0].reason.startswith("the last line is cut off: it has no line end, and ")


def test_flaws_inside_documents_are_confined_to_their_record(put):
    text = json.dumps(SQUAD).replace('"id": "q1"', '"id": "q1", "id": "q0"')
    kept, bad = kept_and_rejected(put("a.json", text))
    assert [r.fields["id"] for r in kept] == ["q2"]
    assert bad == [BadRecord("a.json: data[0].paragraphs[0].qas[0]", bad[0].reason)]
    for repeated, place in (('"title": "Ann"', "data[0]"), ('"context": "Dr. Ann slept."', "data[0].paragraphs[0]")):
        text = json.dumps(SQUAD).replace(repeated, f"{repeated}, {repeated}")
        assert f"a.json: {place}: the key " in complaint(put("a.json", text))


def test_gigantic_lines_are_never_loaded(put, monkeypatch):
    for module in (source_files, records.read_jsonl_lines.__globals__, delimited):
        patch = monkeypatch.setitem if isinstance(module, dict) else monkeypatch.setattr
        patch(module, "MAX_RECORD_BYTES", 2**20)
    long = "x" * 5 * 2**20
    kept, bad = kept_and_rejected(put("a.jsonl", f'{{"a": 1}}\n{{"a": "{long}"}}\n{{"a": 2}}\n'))
    assert [r.fields["a"] for r in kept] == [1, 2]
    assert bad == [
        BadRecord("a.jsonl:2", "the line is longer than 1 MiB, the limit for one record. Split it or leave it out.")
    ]
    assert "a.csv:3: the line is longer than 1 MiB" in complaint(put("a.csv", f"a,b\n1,2\n{long},2\n"))


# ---- tables


def test_ragged_rows_are_confined_to_their_record(put):
    source = put("a.csv", 'a,b\n1,2\n3\n"4\n4",5,6\n7,8\n')
    kept, bad = kept_and_rejected(source)
    assert [r.fields["a"] for r in kept] == ["1", "7"]
    assert [b.where for b in bad] == ["a.csv:3", "a.csv:4"]
    assert complaint(source).startswith(
        "a.csv:3: 1 cell, beginning with '3', but the header has 2. Allowed is one cell"
    )


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        ("a,b\n", "a.csv: holds no records."),
        ("a,b,a\n1,2,3\n", "a.csv:1: the columns 1 and 3 are both named 'a'."),
        ('a,b\n1,2\n3,"four\n5,6\n', "a.csv:3: a quoted cell that begins in this row is never closed."),
        ('a,b\n1,"two" 2\n', "a.csv:2: not CSV: ',' expected after '\"'."),
        ("a,b\n1,\0\n", "a.csv:2: field 'b': NUL character at position 0."),
    ],
)
def test_malformed_csv(put, content, wrong):
    assert wrong in complaint(put("a.csv", content))


def test_missing_columns_say_which_exist(put):
    import pyarrow
    from pyarrow import parquet

    wrong = "no column 'Frage', which data.columns names for 'question'. There are: id, text. Correct data.columns."
    parquet.write_table(pyarrow.table({"id": [1], "text": ["x"]}), Path("a.parquet").name)
    columns = {"question": "Frage"}
    assert complaint(put("a.csv", "id,text\n1,x\n"), columns=columns) == f"a.csv:1: {wrong}"
    assert complaint("a.parquet", columns=columns) == f"a.parquet: {wrong}"
    assert f"a.jsonl:1: {wrong}" in complaint(put("a.jsonl", '{"id": 1, "text": "x"}\n'), columns=columns)


# ---- ids


def test_duplicate_ids_name_both_places():
    found = [RawRecord({"id": name}, f"a.jsonl:{n}") for n, name in enumerate("abac", 1)]
    with pytest.raises(DataError, match=r"^a\.jsonl:3: the id 'a' is already used by record 1\. Ids must be unique\."):
        list(refuse_duplicate_ids(found))
    bad: list[BadRecord] = []
    assert [r.fields["id"] for r in refuse_duplicate_ids(found, on_bad=bad.append)] == ["a", "b", "c"]
    assert [b.where for b in bad] == ["a.jsonl:3"]


# ---- fuzz

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
scraps = st.sampled_from(
    ['{"a": 1}', '{"a": ', "[1]", '"', "NaN", "\0", "é", "\\ud800", ",", "\t", "\r", "a,b", '"x"y', ""]
)
texts = st.lists(st.one_of(scraps, st.text(max_size=8)), max_size=8)


@quick
@given(lines=texts)
def test_fuzzed_jsonl_is_kept_or_rejected(put, lines):
    text = "\n".join(line.replace("\n", " ") for line in ['{"a": 0}', *lines]) + "\n"
    source = put("fuzz.jsonl", text.encode("utf-8", "surrogatepass"))
    try:
        kept, bad = kept_and_rejected(source)
    except FiveTuneError:
        return
    assert len(kept) + len(bad) == sum(bool(line.strip()) for line in text.encode().split(b"\n"))


@quick
@given(rows=texts, name=st.sampled_from(["fuzz.csv", "fuzz.tsv"]))
def test_fuzzed_tables_are_kept_or_rejected(put, rows, name):
    text = "\n".join(["a,b", *(row.replace("\n", " ") for row in rows)]) + "\n"
    source = put(name, text.encode("utf-8", "surrogatepass"))
    try:
        kept, bad = kept_and_rejected(source)
    except FiveTuneError:
        return
    assert kept or bad
    names = {frozenset(record.fields) for record in kept}
    assert len(names) <= 1
    if not {*"\t;|"} & {*text}:  # else most lines may be a table with another separator, below a title
        assert names <= {frozenset({"id", "a", "b"})}


@quick
@given(content=st.binary(max_size=60), suffix=st.sampled_from(["json", "jsonl", "csv", "parquet", "gz", "x"]))
def test_any_bytes_give_records_or_an_error_of_ours(put, content, suffix):
    try:
        kept_and_rejected(put(f"fuzz.{suffix}", content))
    except FiveTuneError as error:
        assert str(error).startswith("fuzz.")


@quick
@given(rows=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=5))
def test_csv_round_trip(put, rows):
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_ALL).writerows([("q", "a"), *rows])
    source = put("fuzz.csv", out.getvalue().encode())
    kept, bad = kept_and_rejected(source)
    clean = [row for row in rows if "\0" not in "".join(row)]
    assert [(r.fields["q"], r.fields["a"]) for r in kept] == clean
    assert len(kept) + len(bad) == len(rows)


# ---- real files (counts from shared/data/README.md)


@needs_shared
@pytest.mark.parametrize(
    ("name", "num_records"),
    [
        ("squad_v2/dev-v2.0.json.gz", 11_873),
        ("squad_v1.1/dev-v1.1.json.gz", 10_570),
        ("squad_es/dev-v2.0-es_small.json.gz", 7_134),
        ("squad_es_dist/dev.json.gz", 95),
        ("xquad/xquad.es.json.gz", 1_190),
        ("gsm8k/test.jsonl.gz", 1_319),
        ("bioasq/golden/4B_golden.json.gz", 497),
        ("bioasq/yesno/train.tsv.gz", 615),
        ("bioasq/yesno/test.tsv.gz", 105),
        ("causalqa/squad_causal_valid.csv.gz", 259),
        ("causalqa/wikiwhy_nocontext_600.csv.gz", 600),
        ("so_quality/raw_schema_hq_lq.train.csv.gz", 1_100),
        ("so_quality/clean_text_3class.valid.csv.gz", 6_750),
    ],
)
def test_real_files_have_the_stated_number_of_records(name, num_records):
    num_kept, num_impossible = 0, 0
    for record in refuse_duplicate_ids(read_records(str(SHARED / name))):
        num_kept += 1
        num_impossible += record.fields.get("is_impossible", False)
    assert num_kept == num_records
    assert num_impossible == {"dev-v2.0.json.gz": 5_945, "dev-v2.0-es_small.json.gz": 3_256}.get(Path(name).name, 0)


def test_a_null_is_named_null(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('null\n{"question": null, "label": null}\n')
    bad: list[BadRecord] = []
    (record,) = read_records(str(source), on_bad=bad.append)
    assert bad[0].reason.startswith("null. A record is an object")
    for name, options, told in (
        ("jsonl", {"inputs": "{question}"}, "question is null. It must be text or a number."),
        ("squad", {}, "question is null. It must be text."),
        ("classification", {"inputs": "{id}"}, "label is null, which is not a label."),
        ("classification", {"inputs": "{id}", "labels": {"a": "a", "b": "b"}}, "label is null, which is not a label."),
    ):
        with pytest.raises(RecordError) as caught:
            load_task(name, options).to_text(record)
        assert caught.value.reason.startswith(told)


def test_line_ends_in_the_names_of_columns_do_not_divide_a_message(put):
    source = put("a.csv", '"one\ntwo",b\n1,2\n')
    assert "There are: one\\ntwo, b. Correct" in complaint(source, columns={"question": "Frage"})
    (record,) = read_records(source)
    with pytest.raises(RecordError, match=r"no column 'inputs'\. Columns: one\\ntwo, b\. If"):
        load_task("jsonl", {}).to_text(record)


# ---- forms of JSON that data frames and published sets have

FRAME = [{"text": f"good {i}", "label": "pos"} for i in range(30)]
BY_ROW = {name: {str(i): row[name] for i, row in enumerate(FRAME)} for name in ("text", "label")}
BY_NAME = {name: {f"row{i}": row[name] for i, row in enumerate(FRAME)} for name in ("text", "label")}
AS_LISTS = {name: [row[name] for row in FRAME] for name in ("text", "label")}
SPLIT = {"columns": ["text", "label"], "index": [*range(30)], "data": [[*row.values()] for row in FRAME]}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("table", [BY_ROW, BY_NAME, AS_LISTS, SPLIT], ids=["rows", "named rows", "lists", "split"])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_columns_of_data_frames_are_records(put, name, table, indent):
    content = json.dumps(table, indent=indent).encode()
    found = fields(put(name, gzip.compress(content) if name.endswith("gz") else content))
    assert [{"text": row["text"], "label": row["label"]} for row in found] == FRAME
    assert table is not BY_NAME or found[7]["id"] == "row7"


@pytest.mark.parametrize(
    ("document", "num"),
    [
        ({"q1": {"text": "a", "label": "b"}, "q2": {"text": "c", "label": "d"}}, 2),  # by id
        ({"q1": {"text": "a"}}, 1),
        ({"text": ["a"]}, 1),
        ({"text": [["a", "b"], ["c"]], "label": ["x", "y"]}, 2),
    ],
)
def test_small_objects_keep_their_form(put, document, num):
    assert len(fields(put("a.json", json.dumps(document, indent=1)))) == num


@pytest.mark.parametrize(
    "dialogues",
    [
        [["Hi.", "Ho."], ["Who?", "Ann.", "Thanks."]],
        [["Hi."], ["Who?", "Ann.", "Thanks."]],
        [[{"text": "Hi."}, {"text": "Ho."}], [{"text": "Who?"}, {"text": "Ann."}]],
        [[{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Ho."}]] * 2,
    ],
)
def test_lists_of_different_lengths_or_of_objects_are_dialogues(put, dialogues):
    lines = "".join(json.dumps(one) + "\n" for one in dialogues)
    for content in (json.dumps(dialogues), lines):
        assert [one["turns"] for one in fields(put("a.json", content))] == dialogues
    assert fields(put("b.jsonl", lines), header=("talk",))[1]["talk"] == dialogues[1]


def test_lists_of_a_text_and_its_labels_are_no_dialogues(put):
    rows = [[f"text {row}", *"ab"[: 1 + row % 2]] for row in range(20)]
    with pytest.raises(RecordError, match="no header"):
        fields(put("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))


def test_a_header_names_the_values_of_lists(put):
    assert fields(put("b.json", json.dumps([["Hi.", "a"], ["Ho.", "b"]])), header=("text", "label"))[0]["text"] == "Hi."


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("a.src a.trg", r"'\S*/a\.\{src,trg\}'"),
        ("dev.src dev.trg train.src train.trg", r"'\S*/train\.\{src,trg\}'"),
        ("all.csb.txt all.pl.txt", r"'\S*/all\.\{csb,pl\}\.txt'"),
        ("source.txt target.txt", r"'\S*/\{source,target\}\.txt'"),
        ("a.en a.de README.md", r"'\S*/a\.\{de,en\}'"),
        ("neg.txt pos.txt", r"of one label each .* \S*neg.txt \S*pos.txt > all.tsv, with --header text,label"),
    ],
)
def test_a_folder_of_files_of_lines_names_how_they_become_a_table(put, tmp_path, names, told):
    (tmp_path / "pair").mkdir()
    for name in names.split():
        put(f"pair/{name}", "a text\n" * 9)
    with pytest.raises(DataError, match=told):
        fields(str(tmp_path / "pair"))


def test_files_of_texts_and_of_labels_for_them_are_one_table(put, tmp_path):
    (tmp_path / "pair").mkdir()
    for name, line in (("labels.txt", "0"), ("sents.txt", "It is a good film."), ("LICENSE", "Free.")):
        put(f"pair/{name}", f"{line}\n" * (7 if name == "LICENSE" else 9))
    with pytest.raises(DataError, match=r"'\S*/\{labels,sents\}\.txt'"):
        fields(str(tmp_path / "pair"))
    assert fields(f"{tmp_path}/pair/{{labels,sents}}.txt")[0] == {
        "id": "labels-1",
        "labels": "0",
        "sents": "It is a good film.",
    }


@pytest.mark.parametrize(
    ("place", "name", "content", "record"),
    [
        ("", "1.txt", "\ufeffCaf\u00e9.\nGood.".encode(), {"text": "Caf\u00e9.\nGood."}),
        ("train/", "1.txt", b"Caf\xe9", {"text": "Caf\ufffd"}),
        ("", "51060", b"Good.", {"text": "Good."}),
        ("all/", "1.json", b'{"body": "Good.", "n": [1]}', {"body": "Good.", "n": [1]}),
        ("", "1.json", b'{"label": 1}', {"label": 1, "folder": ""}),
    ],
)
def test_a_folder_for_each_label_is_joined_by_the_command_that_is_told(tmp_path, place, name, content, record):
    for folder in ("it's", "no", "test"):
        (tmp_path / "a" / place / folder).mkdir(parents=True)
        for number in range(2):
            (tmp_path / "a" / place / folder / f"{number}{name}").write_bytes(content)
    (tmp_path / "a" / "README").write_text("all")
    (tmp_path / "a" / place / "no" / ".hidden").write_bytes(b"\0")
    found = re.search("(python -c .*) > ([a-z]+.jsonl), and", complaint(str(tmp_path / "a")))
    assert found
    done = subprocess.run(["bash", "-c", f'python() {{ "{sys.executable}" -S "$@"; }}; {found[1]}'], stdout=-1)
    key = "folder" if "folder" in record else "label"
    wanted = [
        {"id": f"{folder}/{number}{name}", **record, key: folder}
        for folder in ("it's", "no", "test")
        for number in (0, 1)
    ]
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted


@pytest.mark.parametrize("names", ["train/1.txt train/2.txt test/1.txt", "a/1.png a/2.png b/1.png", "a/1.txt b/1.txt"])
def test_other_folders_of_folders_have_no_such_command(tmp_path, names):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\x89PNG\0")
    assert "a folder without data files" in complaint(str(tmp_path))


def test_lines_of_lists_in_a_json_file_are_records(put):
    assert len(fields(put("a.json", '{"tokens": ["a"], "tags": [1]}\n{"tokens": ["b"], "tags": [0]}\n'))) == 2


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"train": FRAME, "test": FRAME[:9]}, ["'train' (30), 'test' (9)", '["train"]', "> train.jsonl."]),
        (
            {"oos_val": [["hi", "a"]], "val": [["ho", "b"]]},
            ["> oos_val.jsonl, and name the values", "--header text,label"],
        ),
        ({"version": 1, "dev": FRAME}, ["there are 'dev' (30)"]),
        (
            {"physics": {"sound": [["Why?", "So."]] * 3}, "example": [["Why?", "So."]] * 9, "count": 2},
            ["'example' (9)", "Lists within 'physics' are not among them."],
        ),
        ({"chapters": [{"name": "One"}] * 3, "mcqs": FRAME}, ["'mcqs' (30), 'chapters' (3)", "> mcqs.jsonl."]),
        ({"version": "1", "count": 3}, ["the keys are 'version', 'count'"]),
    ],
)
def test_sets_in_one_document_are_told_with_the_command_that_divides_them(put, document, told, indent):
    if "count" in document and indent is None:
        pytest.skip("is one line, and so a record")
    message = complaint(put("a.json", json.dumps(document, indent=indent)))
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("record", "column", "way"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}, "inputs",
         "data.columns: {inputs: messages.0.content}"),
        ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}, "inputs",
         "conversations.0.value, conversations.1.value"),
        ({"question": {"stem": "Who?", "choices": [{"label": "A", "text": "Ann"}]}}, "question",
         "data.columns: {question: question.stem}"),
        ({"translation": {"en": "Go", "de": "Geh"}}, "inputs", "translation.en, translation.de"),
        ({"answers": [{"text": "Ann"}]}, "answer", "answers.0.text"),
    ],
)  # fmt: skip
def test_values_inside_columns_are_named_by_dotted_paths(record, column, way):
    with pytest.raises(DataError) as raised:
        get_text(RawRecord({"id": "1", **record}, "a.jsonl:1"), column)
    assert way in str(raised.value)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_objects_over_several_lines_are_records(put, name):
    kept, rejected = kept_and_rejected(put(name, "\n".join(json.dumps({"n": {"x": i}}, indent=2) for i in range(9))))
    assert ([one.fields["n"] for one in kept], rejected) == ([{"x": i} for i in range(9)], [])
    assert kept[8].where.endswith(f"{name}: object 9")


def test_an_object_of_texts_holds_pairs(put):
    pairs = {f"list {number} files": f"ls -{number}" for number in range(12)}
    kept, rejected = kept_and_rejected(put("a.json", json.dumps(pairs, indent=1)))
    assert (len(kept), rejected) == (12, [])
    assert (kept[0].fields["text"], kept[0].fields["value"]) == ("list 0 files", "ls -0")
