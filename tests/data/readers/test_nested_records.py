"""Records in lists within lists: the command that is told for them works when it is followed."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fivetune.data.readers.nested_records import describe_nested
from fivetune.data.readers.records import read_records
from fivetune.errors import DataError

PAIR = {"question": "Who is it?", "answer": "Ann is."}
CHAPTER = {"context": "It is Ann who sleeps.", "more": {"a": 1}, "qa": [PAIR, {**PAIR, "options": ["Ann", "Bob"]}]}
ASKED = [{"context": CHAPTER["context"], **pair} for pair in CHAPTER["qa"]]
CLAIM = {"claim": "It rains.", "docs": ["It does rain.", "No rain."], "stances": ["agree", "deny"]}
JUDGED = [
    {"claim": "It rains.", "docs": "It does rain.", "stances": "agree"},
    {"claim": "It rains.", "docs": "No rain.", "stances": "deny"},
]
TALE = {"原文": "関門海峡は本州と九州の間にある。", "list": [{"by": "a", "文": "海峡は本州と九州の間。"}] * 2}
INTENTS = {"intents": [{"tag": "hello", "patterns": ["Hi", "Good day"], "responses": ["Hi"]}]}


def follow(message: str, folder: Path) -> list[dict[str, object]]:
    """Run the command of a message, and read what it writes."""
    found = re.search(r"(python -c .*) > (.*?)[,.] ", f"{message} ")
    assert found, message
    command, name = found.groups()
    out = subprocess.run(["bash", "-c", f'python() {{ "{sys.executable}" -S "$@"; }}; {command} > {name}'], cwd=folder)
    assert out.returncode == 0
    return [json.loads(line) for line in (folder / shlex.split(name)[0]).read_text().splitlines()]


@pytest.mark.parametrize(
    ("document", "records"),
    [
        ({"a": CHAPTER, "b": CHAPTER}, [{"key": key, **one} for key in "ab" for one in ASKED]),
        ({"version": 1, "chapters": [{"no": 3, "parts": [CHAPTER]}]}, [{"no": 3, **one} for one in ASKED]),
        ({"data": [CHAPTER]}, ASKED),
        ({"train": [CHAPTER], "test": [CHAPTER]}, ASKED),
        ([CLAIM, CLAIM], JUDGED * 2),
        ([TALE], [{"原文": TALE["原文"], **one} for one in TALE["list"]]),
        ({"t 1": [PAIR], "it's": [PAIR, PAIR]}, [{"key": key, **PAIR} for key in ("t 1", "it's", "it's")]),
        ({"pos": ["good", "fine"], "neg": ["bad"]},
         [{"label": "pos", "text": "good"}, {"label": "pos", "text": "fine"}, {"label": "neg", "text": "bad"}]),
        (INTENTS, [{"tag": "hello", "text": "Hi"}, {"tag": "hello", "text": "Good day"}]),
        ({"a": {"q1": PAIR, "q2": PAIR}, "b": {"q1": PAIR}},
         [{"key": key, "key1": q, **PAIR} for key, q in (("a", "q1"), ("a", "q2"), ("b", "q1"))]),
        ({"nlu": {"examples": [PAIR, PAIR]}}, [PAIR, PAIR]),
        # sets within sets, whose names differ, or that are on several levels
        ({"easy": {"who": [PAIR], "what": [PAIR]}, "hard": {"how": [{**PAIR, "options": []}]}},
         [{"key": "easy", "key1": "who", **PAIR}, {"key": "easy", "key1": "what", **PAIR},
          {"key": "hard", "key1": "how", **PAIR, "options": []}]),
        ({"about": "All of it.", "a": [PAIR], "b": {"c": {"d": [PAIR]}}, "by": [{"name": "Ann"}]},
         [{"about": "All of it.", "key": "a", **PAIR},
          {"about": "All of it.", "key": "b", "key1": "c", "key2": "d", **PAIR}]),
        ([{"topic": "sleep", "easy": [PAIR]}, {"topic": "rest", "hard": [PAIR]}],
         [{"topic": "sleep", "key1": "easy", **PAIR}, {"topic": "rest", "key1": "hard", **PAIR}]),
        # pages with their records, and lists beside those of texts
        ([{"page": {"items": [PAIR]}}, {"page": {"items": [PAIR] * 2}}],
         [{"key1": "page", "key2": "items", **PAIR}] * 3),
        # nests like SQuAD's with other names
        ({"data": [{"title": "Sleep", "passages": [CHAPTER]}]}, [{"title": "Sleep", **one} for one in ASKED]),
        ({"articles": [{"paragraphs": [CHAPTER, CHAPTER]}]}, ASKED * 2),
        ({"meta": {"n": 1}, "prompt": "You are kind.", "body": {"examples": [PAIR]}},
         [{"prompt": "You are kind.", **PAIR}]),
    ],
)  # fmt: skip
def test_nested_records_are_joined_by_the_command_that_is_told(tmp_path, document, records):
    path = tmp_path / "it's a.json"
    path.write_text(json.dumps(document, indent=1))
    assert follow(describe_nested(path), tmp_path) == records


def test_the_command_tells_how_many_records_it_keeps_and_the_message_what_it_leaves_out(tmp_path):
    path = tmp_path / "a.json"
    command = r"python -c (.*) > "
    path.write_text(json.dumps({"a": {"b": [PAIR], "c": [PAIR, PAIR]}, "by": [{"name": "Ann"}]}))
    found = re.search(command, describe_nested(path))
    out = subprocess.run([sys.executable, "-S", "-c", *shlex.split(found[1])], capture_output=True, text=True)
    assert (len(out.stdout.splitlines()), out.stderr) == (3, "3 records and 1 others left out\n")
    path.write_text(json.dumps([CHAPTER] * 4 + [{"context": "It rains."}]))
    found = re.search(command, describe_nested(path))
    out = subprocess.run([sys.executable, "-S", "-c", *shlex.split(found[1])], capture_output=True, text=True)
    assert out.stderr == "8 records and 1 objects without qa\n"
    path.write_text(json.dumps({"train": {"easy": [PAIR], "hard": [PAIR]}, "test": {"easy": [PAIR]}}))
    assert describe_nested(path).endswith("It leaves 'test' out.")


def test_the_texts_beside_a_list_of_records_are_kept(tmp_path):
    document = {"prompt": "You are kind.", "examples": [PAIR, PAIR]}
    (tmp_path / "a.json").write_text(json.dumps(document, indent=1))
    with pytest.raises(DataError) as caught:
        list(read_records(str(tmp_path / "a.json")))
    (tmp_path / "line.json").write_text(json.dumps(document))  # which is read as one record
    for message in (str(caught.value), describe_nested(tmp_path / "line.json")):
        assert follow(message, tmp_path) == [{"prompt": "You are kind.", **PAIR}] * 2


def test_lines_and_packed_files_have_their_own_commands(tmp_path):
    content = f"{json.dumps(CHAPTER)}\n\n{json.dumps(CHAPTER)}\n".encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert follow(describe_nested(tmp_path / "a.jsonl.gz"), tmp_path) == ASKED * 2


@pytest.mark.parametrize(
    "document",
    [
        [PAIR, PAIR],
        {"data": [PAIR]},
        {"a": PAIR, "b": PAIR},
        {"items": [PAIR], "n": 1},  # told by the reader
        [{"tokens": ["Ann", "sleeps"], "tags": ["B", "O"]}],
        [{"question": "Who?", "choices": [{"text": "Ann is.", "right": True}]}],
        [{"messages": [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "Ann is."}]}],
        [{"text": "It rains.", "label": "yes", "notes": [{"by": "me", "note": "It does rain."}]}],
        [{"text": ["good", "bad"], "label": ["x"]}],
        {"text": ["good", "bad"], "label": ["x"]},
        {"data": [{"title": "It", "paragraphs": [{"context": "It is Ann.", "qas": [PAIR]}]}]},
        [{"text": "It rains.", "labels": ["bad weather", "rain"], "ids": [3, 4]}],
        [], {}, "text",
    ],
)  # fmt: skip
def test_other_documents_have_no_such_command(tmp_path, document):
    path = tmp_path / "a.json"
    path.write_text(json.dumps(document, indent=1))
    assert describe_nested(path) == ""


def test_tables_and_damaged_files_have_no_such_command(tmp_path):
    for content in (b"a,b\n1,2\n", b"[{", b"\xff\xfe", b""):
        (tmp_path / "a.csv").write_bytes(content)
        assert describe_nested(tmp_path / "a.csv") == ""
    assert describe_nested(tmp_path / "none.json") == describe_nested(tmp_path) == ""


def test_the_reader_tells_the_command_where_it_finds_no_list(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"x": [PAIR], "y": [PAIR, PAIR]}))
    with pytest.raises(DataError, match=r"its records are nested: \*\.\*\."):
        list(read_records(str(tmp_path / "a.json")))


@pytest.mark.parametrize(
    ("lists", "written"),
    [
        (("images", "texts"), ["texts"]),
        (("texts", "images"), ["texts"]),
        (("people", "texts"), ["texts", "people"]),
        (("numbers", "train"), ["train"]),
        (("texts", "pairs", "images"), ["pairs", "texts"]),
        (("images", "numbers"), ["numbers"]),
    ],
)
def test_of_several_lists_those_that_hold_texts_have_commands(tmp_path, lists, written):
    values = {
        "images": [{"path": f"a/{i}.jpg", "label": 1} for i in range(4)],
        "texts": [{"message": "It rains again.", "tone": "sad"}] * 2,
        "people": [{"name": "Ann Lee", "town": "Oslo"}] * 6,
        "numbers": [{"n": i} for i in range(9)],
        "train": [{"message": "It rains again.", "tone": "sad"}] * 2,
        "pairs": [["It rains again and again.", "sad"]] * 3,
    }
    (tmp_path / "a.json").write_text(json.dumps({name: values[name] for name in lists}, indent=1))
    with pytest.raises(DataError) as caught:
        list(read_records(str(tmp_path / "a.json")))
    assert re.findall(r" > (\w+)\.jsonl", str(caught.value)) == written
    assert follow(str(caught.value).replace("; or", ", or"), tmp_path) == values[written[0]]


def test_objects_over_several_lines_have_their_own_command(tmp_path):
    (tmp_path / "a.json").write_text(f"{json.dumps(CHAPTER, indent=1)}\n\n{json.dumps(CHAPTER, indent=1)}\n")
    assert follow(describe_nested(tmp_path / "a.json"), tmp_path) == ASKED * 2


@pytest.mark.parametrize("indent", [None, 1])
def test_one_value_beside_lists_of_equal_length_is_one_of_each_record(tmp_path, indent):
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(
            {"id": "R", **{name: value * 5 if name != "claim" else value for name, value in CLAIM.items()}},
            indent=indent,
        )
    )
    found = [dict(record.fields) for record in read_records(str(path))]
    assert found == [{"id": f"R-{row}", **one} for row, one in enumerate(JUDGED * 5)]


def test_one_record_with_a_few_choices_stays_one(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"question": "Who?", "choices": ["Ann", "Bob"], "scores": [1, 0]}))
    assert len(list(read_records(str(path)))) == 1
