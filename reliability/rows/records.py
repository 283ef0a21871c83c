"""Data files that are wrong: random records in every format, files as people damage them, a line without an end."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import re
import resource
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fivetune.data.readers.records import detect_format
from fivetune.data.readers.source_files import HEAD_BYTES
from fivetune.types import RawRecord
from reliability.batch import share_process
from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_success
from reliability.workload import Workload

FORMATS = ("jsonl", "csv", "tsv", "json", "parquet")
PER_PROCESS = 100  # files that one process reads
MOST_PLAIN = 100  # characters: a longer question leaves no room for its paragraph
TEXTS = (
    "What has Ann?", "Ann has a red hat.", "red hat", "", " ", "nan", "null", "NaN", "0", "a\nb", "a\r\nb", "\t", '"',
    "''", "a,b;c\td", "é", "e\u0301", "\u2028", "\ufeff", "\u202e", "\u200b", "\U0001f600", "\x01", "\0", "\x85",
    "=1+1", "{x}", "<extra_id_0>", "</s>", "<html>", "\\", "\\u0041", "[", "}", "x" * 3000, "\u0663", "-1", "1e999",
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 7, 2**70, 0.5, 1e308, [], {}, ["a"], [None], {"text": "a"}, {"text": [1]}, [[["a"]]],
)  # fmt: skip
TOKENS = (
    b"\0", b"\n", b"\r", b'"', b"\\", b"{", b"}", b"[", b"]", b",", b"\t", b"\xff", b"\xe9", b"\xef\xbb\xbf", b"NaN",
    b"null", b"\\ud800", b"-Infinity", b'"a":1,' * 2, b"[" * 300, b"9" * 5000, b"\x1f\x8b", b"PAR1", b" " * 70_000,
)  # fmt: skip

MOST_MEMORY = 256 * 2**20
BLOCK = b"a" * 2**20
LONG_LINES = {"data.jsonl": b'{"inputs": "', "data.json": b'[{"inputs": "', "data.csv": b"inputs,targets\n"}
LINE = b'{"id": "1", "inputs": "a", "targets": "b"}\n'


def make_squad(**question: Any) -> bytes:
    """A document of SQuAD with one question; None takes a key out."""
    context = question.pop("context", "Ann sleeps.")
    whole = {"id": "q1", "question": "Who?", "answers": [{"text": "Ann", "answer_start": 0}], **question}
    asked = {name: value for name, value in whole.items() if value is not ...}
    return json.dumps({"version": "v2.0", "data": [{"paragraphs": [{"context": context, "qas": [asked]}]}]}).encode()


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "a.jsonl: a line that is no JSON": (LINE + LINE.replace(b"1", b"2") + b'{"id": \n', "a.jsonl:3: "),
    "a.jsonl: a NUL byte": (LINE.replace(b"a", b"\0"), "a.jsonl:1: NUL byte"),
    "a.jsonl: half a surrogate pair": (LINE.replace(b"a", b"\\ud800"), "half a surrogate pair, no character"),
    "a.jsonl: a key twice": (
        b'{"inputs": "a", "inputs": "b", "targets": "c"}\n',
        "the key 'inputs' occurs more than once",
    ),
    "a.jsonl: the last line is cut off": (LINE + LINE[:20], "a.jsonl:2: the last line is cut off"),
    "a.jsonl: cut in a character": (LINE + '{"inputs": "é'.encode()[:-1], "the last character is incomplete"),
    "a.jsonl: Latin-1": (LINE + LINE.replace(b"a", b"\xe9"), "a.jsonl:2: not UTF-8: byte 0xe9"),
    "a.jsonl: UTF-16": (LINE.decode().encode("utf-16"), "the text is utf-16. Allowed is UTF-8"),
    "a.jsonl: UTF-32": (LINE.decode().encode("utf-32"), "the text is utf-32. Allowed is UTF-8"),
    "a.jsonl: empty": (b"", "the file is empty"),
    "a.jsonl: white space": (b"\n \n", "holds white space only"),
    "a.jsonl: zeros": (bytes(1000), "NUL bytes instead of text"),
    "a.jsonl: a list": (LINE + b'["a", "b"]\n', "a.jsonl:2: no header: the record is a list"),
    "a.jsonl: a number": (LINE + b"7\n", "a.jsonl:2: a number: 7."),
    "a.jsonl: a column is missing": (
        b'{"id": "1", "inputs": "a"}\n',
        "there is no column 'targets'. Columns: id, inputs",
    ),
    "a.jsonl: null": (LINE.replace(b'"a"', b"null"), "a.jsonl:1: inputs is null"),
    "a.jsonl: NaN": (LINE.replace(b'"a"', b"NaN"), "NaN is not JSON"),
    "a.jsonl: a list as the input": (LINE.replace(b'"a"', b'["a"]'), "inputs is ['a']. It must be text"),
    "a.jsonl: blank": (LINE.replace(b'"a"', b'" "'), "inputs is empty"),
    "a.jsonl: an id twice": (LINE + LINE, "a.jsonl:2: the id '1' is already used by record 1"),
    "a.jsonl: an id that is a list": (LINE.replace(b'"1"', b'["1"]'), "'id' is a list"),
    "a.jsonl: 64 MiB in a line": (LINE + LINE.replace(b"a", b"a" * 2**26), "a.jsonl:2: the line is longer than 16 MiB"),
    "a.jsonl: nested deeply": (LINE.replace(b'"a"', b"[" * 100_000), "nested too deeply"),
    "a.jsonl: a number of 5,000 digits": (
        LINE.replace(b'"a"', b"9" * 5000),
        "a whole number of more than 4,300 digits",
    ),
    "a.jsonl: gzip, cut off": (gzip.compress(LINE * 100, mtime=0)[:-9], "the gzip file is cut off"),
    "a.jsonl: gzip, damaged": (gzip.compress(LINE, mtime=0)[:-8] + bytes(8), "the gzip file is damaged"),
    "a.jsonl: a Git-LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d",
        "this is a Git-LFS pointer, not the data",
    ),
    "a.jsonl: an HTML page": (b"<!DOCTYPE html>\n<html></html>", "this is an HTML page, not data"),
    "a.jsonl: a zip archive": (b"PK\3\4\0\0", "this is a zip archive"),
    "a.csv: too many cells": (b"inputs,targets\na,b\nc,d,e\n", "a.csv:3: 3 cells"),
    "a.csv: too few cells": (b"inputs,targets\na\n", "a.csv:2: 1 cell, beginning"),
    "a.csv: a quote that is never closed": (
        b'inputs,targets\n"a,b\nc,d\n',
        "a.csv:2: a quoted cell that begins in this row is never closed",
    ),
    "a.csv: a column twice": (b"inputs,inputs\na,b\n", "the columns 1 and 2 are both named 'inputs'"),
    "a.csv: a header alone": (b"inputs,targets\n", "holds no records"),
    "a.csv: an empty cell": (b"inputs,targets\n,b\n", "a.csv:2: inputs is empty"),
    "a.csv: Latin-1": (b"inputs,targets\na,\xe9\n", "a.csv:2: not UTF-8: byte 0xe9"),
    "a.json: cut off": (make_squad()[:-20], "a.json:1:142: malformed JSON: Unterminated string"),
    "a.json: data after the end": (make_squad() + b"{}", "a.json:1:168: malformed JSON: data after the end"),
    "a.json: no list of records": (
        b'{"version": 1, "items": []}',
        "there is no column 'question'. Did you mean version? Columns: version, items",
    ),
    "a.json: a question without text": (make_squad(question=...), "qas[0]: no 'question'"),
    "a.json: answers are a number": (make_squad(answers=0), "'answers' is a number: 0."),
    "a.json: a context that is null": (make_squad(context=None), "'context' is null"),
    "a.json: a blank question": (make_squad(question=" "), "question is empty"),
    "a.parquet: cut off": (b"PAR1 and no more", "damaged Parquet file"),
    "a.parquet: text": (b"inputs,targets\na,b\n", "not a Parquet file"),
}


def fuzz_records(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Read files of random records, a third of them undamaged, in each format in turn."""
    tokenizer = str(workload.folder / "tokenizer")
    for first in count(step=PER_PROCESS):
        batches = []
        for kind in FORMATS:
            numbers = range(first, first + PER_PROCESS)
            cases = {f"{kind} {number}": (kind, random.getrandbits(32), tokenizer) for number in numbers}
            batches.append(share_process(check_reading, cases))
        for trials in zip(*batches, strict=True):
            yield from trials


def check_reading(folder: Path, case: tuple[str, int, str]) -> None:
    """Read one file twice: each record is kept or rejected with its place and the reason, both times alike."""
    kind, seed, tokenizer = case
    random_ = random.Random(seed)
    path = folder / f"data.{kind}"
    rows = make_rows(random_, kind)
    content = WRITERS[kind](rows, random_)
    is_damaged = random_.random() < 2 / 3
    if is_damaged:
        content = damage_bytes(content, random_)
    path.write_bytes(content)
    first, second = (convert_file(path, tokenizer) for _ in range(2))
    assert first == second, f"read twice, the results differ: {str(first)[:300]} and {str(second)[:300]}"
    plain = set[str]() if is_damaged else check_against_rows(path, kind, rows)
    if told := first["error"]:
        assert told.startswith(str(path)) and "\n" not in told, f"the message does not name the file: {told[:300]!r}"
        assert is_damaged or "no example is left" in told, f"a whole file is refused: {told[:300]}"
        assert not plain, f"whole records are refused: {plain}: {told[:300]}"
        return
    counts = first["counts"]
    assert counts["num_read"] == counts["num_records_kept"] + counts["num_skipped"], str(counts)
    lost = [skip for skip in counts["skips"] if skip["where"] in plain]
    assert not lost and counts["num_records_kept"] >= len(plain), f"whole records are refused: {lost}, {counts}"
    for skip in counts["skips"]:
        assert skip["where"].startswith(str(path)) and skip["reason"], f"a rejected record has no place: {skip}"
    content = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    is_jsonl = detect_format(content[:HEAD_BYTES], path) == "jsonl"
    expected = sum(bool(line.strip()) for line in content.split(b"\n")) if is_jsonl else len(rows)
    if is_jsonl or not is_damaged:
        assert counts["num_read"] == expected, f"{counts['num_read']} records are read, {expected} are there"
    if is_jsonl:
        check_against_json(path, content)


def convert_file(path: Path, tokenizer: str, *, on_bad_record: str = "skip") -> dict[str, Any]:
    """What a run makes of a file: counts and rows, or the message of the error."""
    from fivetune.data.examples import Source
    from fivetune.data.store.encode import LengthLimits
    from fivetune.data.store.token_store import load_or_build_store
    from fivetune.errors import DataError, FiveTuneEnvironmentError
    from fivetune.tasks import load_task

    is_squad = path.suffix == ".json"
    limits = LengthLimits(64, 16, overlong="windows" if is_squad else "truncate", window_overlap=8)
    task = load_task("squad_v2" if is_squad else "jsonl", {})
    source = Source((str(path),), task, limits, on_bad_record=on_bad_record, for_training=True)
    with TemporaryDirectory() as cache:
        try:
            store = load_or_build_store(source, load_tokenizer_once(tokenizer), cache=Path(cache))
        except (DataError, FiveTuneEnvironmentError) as error:
            return {"error": str(error)}
        rows = [(store.inputs[index].tolist(), store.labels[index].tolist()) for index in range(len(store.groups))]
    return {"error": "", "counts": store.summary, "rows": rows}


@cache
def load_tokenizer_once(folder: str) -> Any:
    from fivetune.model.tokenizer import load_tokenizer

    return load_tokenizer(folder, Path(folder))


def check_against_json(path: Path, content: bytes) -> None:
    """Each record that is read from a line is what Python's own decoder makes of it."""
    from fivetune.data.readers.records import read_records

    lines = content.split(b"\n")
    for record in read_records(str(path), on_bad=lambda bad: None):
        number = int(record.where.rpartition(":")[2])
        expected = json.loads(lines[number - 1].decode("utf-8-sig" if number == 1 else "utf-8"))
        fields = {name: value for name, value in record.fields.items() if name != "id"}
        expected.pop("id", None)
        assert fields == expected, f"line {number} is read as {fields}"


def check_against_rows(path: Path, kind: str, rows: list[dict[str, Any]]) -> set[str]:
    """An undamaged file is read as what was written; returns the places of records that every task must keep."""
    from fivetune.data.readers.records import read_records

    found: list[RawRecord | None] = []
    for record in read_records(str(path), on_bad=lambda bad: found.append(None)):
        found.append(record)
    assert len(found) == len(rows), f"{len(found)} records are read, {len(rows)} were written"
    ids, plain = [row["id"] for row in rows], set[str]()
    for record, row in zip(found, rows, strict=True):
        if record is None:
            assert not is_plain(row), f"a whole record is refused: {row}"
            continue
        ours, theirs = (json.dumps(each, sort_keys=True) for each in (record.fields, FIELDS[kind](row)))
        assert ours == theirs, f"{record.where}: {theirs[:300]} is read as {ours[:300]}"
        if is_plain(row) and ids.count(row["id"]) == 1:
            plain.add(record.where)
    return plain


def is_plain(row: dict[str, Any]) -> bool:
    """Whether input and target are texts of words, and the target is no empty cell of pandas."""
    texts = [row["inputs"], row["targets"]]
    return all(isinstance(text, str) and re.fullmatch(r"[\w.?,; ]*\w[\w.?,; ]*", text) for text in texts) and (
        len(row["inputs"]) < MOST_PLAIN and row["targets"].lower() != "nan"
    )


def make_rows(random: random.Random, kind: str) -> list[dict[str, Any]]:
    """One to eight records; one value in ten is of another type, where the format has types."""

    def make_value() -> Any:
        if kind in ("json", "jsonl") and random.random() < 0.1:
            return random.choice(VALUES)
        return random.choice(TEXTS) if random.random() < 0.5 else random.choice(TEXTS[:3])

    return [
        {"id": f"q{number if random.random() < 0.95 else 0}", "inputs": make_value(), "targets": make_value()}
        for number in range(random.randint(1, 8))
    ]


def write_jsonl(rows: list[dict[str, Any]], random: random.Random) -> bytes:
    is_ascii = random.random() < 0.5
    return "".join(json.dumps(row, ensure_ascii=is_ascii) + "\n" for row in rows).encode()


def write_table(rows: list[dict[str, Any]], random: random.Random, *, delimiter: str) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter, lineterminator=random.choice(("\n", "\r\n")))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def write_squad(rows: list[dict[str, Any]], random: random.Random) -> bytes:
    """A document of SQuAD with a paragraph for each record."""
    paragraphs = [
        {
            "context": f"{row['targets']} is here" if isinstance(row["targets"], str) else row["targets"],
            "qas": [
                {"id": row["id"], "question": row["inputs"], "answers": [{"text": row["targets"], "answer_start": 0}]}
            ],
        }
        for row in rows
    ]
    return json.dumps({"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]}).encode()


def describe_question(row: dict[str, Any]) -> dict[str, Any]:
    """The record that `write_squad` makes of a row, as it is read."""
    context = row["targets"] if not isinstance(row["targets"], str) else f"{row['targets']} is here"
    answers = {"text": [row["targets"]], "answer_start": [0]}
    return {"id": row["id"], "title": "a", "context": context, "question": row["inputs"], "answers": answers}


def write_parquet(rows: list[dict[str, Any]], random: random.Random) -> bytes:
    import pyarrow
    from pyarrow import parquet

    sink = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


WRITERS: dict[str, Callable[[list[dict[str, Any]], random.Random], bytes]] = {
    "jsonl": write_jsonl,
    "csv": partial(write_table, delimiter=","),
    "tsv": partial(write_table, delimiter="\t"),
    "json": write_squad,
    "parquet": write_parquet,
}
FIELDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {  # of the record that is read from a row
    **dict.fromkeys(FORMATS, dict), "json": describe_question,
}  # fmt: skip


def damage_bytes(content: bytes, random: random.Random) -> bytes:
    """Change one to four places of a file: bytes put in, flipped, lost, doubled, cut off; or compress it."""
    for _ in range(random.randint(1, 4)):
        kind = random.choice(("put in", "flipped", "lost", "doubled", "cut off", "compressed"))
        at, end = sorted(random.randrange(len(content) + 1) for _ in range(2))
        if kind == "put in":
            content = content[:at] + random.choice(TOKENS) + content[at:]
        elif kind == "flipped":
            content = content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
        elif kind == "lost":
            content = content[:at] + content[min(end, at + 20) :]
        elif kind == "doubled":
            content = content[:end] + content[at:]
        elif kind == "cut off":
            content = content[:end]
        else:
            content = gzip.compress(content, mtime=0)
    return content


def read_bad_files(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Read the files of BAD_FILES; for a release then documents and tables that are one line of 2 GiB."""
    tokenizer = str(workload.folder / "tokenizer")
    yield from share_process(check_bad_file, {name: (name, tokenizer) for name in BAD_FILES})
    for name, start in LONG_LINES.items():

        def run(folder: Path, name: str = name, start: bytes = start) -> None:
            path = folder / name
            with path.open("wb") as file:
                file.write(start)
                for _ in range(2**31 // len(BLOCK)):
                    file.write(BLOCK)
            done = WarmProcess(read_within_memory, str(path), tokenizer).finish()
            check_success(done)
            assert "MiB, the limit for one record" in done.stdout or "is never closed" in done.stdout, done.stdout

        yield Trial(f"2 GiB in a line, {name}", run)


def check_bad_file(folder: Path, case: tuple[str, str]) -> None:
    """A bad file is refused with its place and the reason, in one line."""
    name, tokenizer = case
    content, expected = BAD_FILES[name]
    path = folder / name.partition(": ")[0]
    path.write_bytes(content)
    told = convert_file(path, tokenizer, on_bad_record="fail")["error"]
    assert told.startswith(str(path)) and "\n" not in told, f"the message does not name the file: {told[:300]!r}"
    assert expected in told, f"expected {expected!r}, told: {told}"


def read_within_memory(path: str, tokenizer: str) -> int:
    """Print the error of a file; exit code 1 if reading it took more than MOST_MEMORY."""
    convert_file(Path(path).with_name("none.jsonl"), tokenizer)  # loads what reading needs
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(convert_file(Path(path), tokenizer, on_bad_record="fail")["error"])
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"{taken / 2**20:.0f} MiB", file=sys.stderr)
    return int(taken > MOST_MEMORY)


ROWS = [
    Row("R16", "random records as JSONL, CSV, TSV, SQuAD JSON, Parquet; two thirds of the files damaged",
        "read = kept + rejected, each with file, place and reason; the same result twice; an undamaged file is read as "
        "it was written, and no record of plain text with an id of its own is rejected", fuzz_records, 1000, 10_000),
    Row("R17", "45 files as people damage them; for a release also a line of 2 GiB in three formats",
        "the expected message with file and place; of the lines of 2 GiB in at most 256 MiB more memory",
        read_bad_files, len(BAD_FILES)),
]  # fmt: skip
