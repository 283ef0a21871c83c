"""What must hold for every input: records are conserved, the order of data is a function, scores and settings last.

`--hypothesis-profile=release` (make test-release) tries some hundred examples of each instead of some dozen.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import yaml
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pyarrow import parquet

from fivetune.config import load_config
from fivetune.config.layers import PATHS, format_override, parse_overrides
from fivetune.data.examples import ReadCounts, Source, convert_records
from fivetune.data.readers.records import BadRecord, read_records, refuse_duplicate_ids
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.stream import BatchPlan, TrainingStream
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError
from fivetune.plugins import load_plugin
from fivetune.scores.metrics import Scorer

few = settings(
    max_examples=settings().max_examples // 4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# ---- JSON is read as the standard library reads it

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
RECORDS = st.lists(st.dictionaries(TEXT.filter(lambda name: name != "id"), VALUE, max_size=3), max_size=5)
FORMS = st.fixed_dictionaries(
    {
        "ensure_ascii": st.booleans(),
        "indent": st.none() | st.integers(0, 2),
        "separators": st.sampled_from([None, (",", ":"), (" ,\t", " :\r\n")]),
    }
)


def read(path: Path, content: bytes) -> tuple[list[dict[str, Any]], list[BadRecord]]:
    path.write_bytes(content)
    bad: list[BadRecord] = []
    return [dict(record.fields) for record in read_records(str(path), on_bad=bad.append)], bad


@few
@given(
    records=RECORDS.filter(bool), form=FORMS, wrapped=st.sampled_from([None, "data", "questions"]), packed=st.booleans()
)
def test_a_json_document_is_read_as_the_standard_library_reads_it(tmp_path, records, form, wrapped, packed):
    named = [{"id": str(number), **record} for number, record in enumerate(records)]
    content = json.dumps({wrapped: named} if wrapped else named, **form).encode()
    found, bad = read(tmp_path / "a.json", gzip.compress(content) if packed else content)
    assert (found, bad) == (json.loads(content)[wrapped] if wrapped else json.loads(content), [])


@few
@given(
    records=RECORDS.filter(bool),
    ascii_only=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    mark=st.booleans(),
)
def test_json_lines_are_read_as_the_standard_library_reads_them(tmp_path, records, ascii_only, end, mark):
    lines = [json.dumps({"id": str(number), **one}, ensure_ascii=ascii_only) for number, one in enumerate(records)]
    found, bad = read(tmp_path / "a.jsonl", end.join(lines).encode("utf-8-sig" if mark else "utf-8"))
    assert (found, bad) == ([json.loads(line) for line in lines], [])


# ---- tables are read as Python's csv module and pyarrow read them

NAMES = st.lists(st.text("aB é.", max_size=4).map(str.strip).filter(bool), max_size=3, unique=True)
DIALECTS = [(csv.QUOTE_ALL, "\n"), (csv.QUOTE_ALL, "\r\n"), (csv.QUOTE_MINIMAL, "\r\n"), (csv.QUOTE_NONNUMERIC, "\r\n")]


@few
@given(
    names=NAMES, suffix=st.sampled_from(["csv", "tsv"]), dialect=st.sampled_from(DIALECTS), mark=st.booleans(),
    packed=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_table_is_read_as_the_csv_module_reads_it(tmp_path, names, suffix, dialect, mark, packed, data):
    delimiter, out = {"csv": ",", "tsv": "\t"}[suffix], io.StringIO()
    rows = data.draw(st.lists(st.lists(TEXT, min_size=len(names), max_size=len(names)), min_size=1, max_size=5))
    writer = csv.writer(out, delimiter=delimiter, quoting=dialect[0], lineterminator=dialect[1])
    writer.writerow([*names, "id"])
    writer.writerows([*row, f"q{number}"] for number, row in enumerate(rows))
    content = out.getvalue().encode("utf-8-sig" if mark else "utf-8")
    found, bad = read(tmp_path / f"a.{suffix}", gzip.compress(content) if packed else content)
    assert (found, bad) == (list(csv.DictReader(io.StringIO(out.getvalue(), newline=""), delimiter=delimiter)), [])


COLUMNS = [  # of Parquet, each of one type
    TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.lists(TEXT, max_size=3), st.fixed_dictionaries({"text": st.lists(TEXT, max_size=2), "start": st.integers(0, 9)}),
]  # fmt: skip


@few
@given(names=NAMES, num_rows=st.integers(1, 5), group=st.integers(1, 3), packed=st.booleans(), data=st.data())
def test_parquet_is_read_as_pyarrow_reads_it(tmp_path, names, num_rows, group, packed, data):
    columns = {
        name: data.draw(
            st.sampled_from(COLUMNS).flatmap(
                lambda values: st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)
            )
        )
        for name in names
    }
    table = pyarrow.table({**columns, "id": [f"q{number}" for number in range(num_rows)]})
    parquet.write_table(table, sink := io.BytesIO(), row_group_size=group)
    content = sink.getvalue()
    found, bad = read(tmp_path / "a.parquet", gzip.compress(content) if packed else content)
    assert (found, bad) == (parquet.read_table(io.BytesIO(content)).to_pylist(), [])


ANSWER = st.fixed_dictionaries({"text": TEXT, "answer_start": st.integers(0, 9)})
QUESTION = st.fixed_dictionaries(
    {"question": TEXT, "answers": st.lists(ANSWER, max_size=2)}, optional={"is_impossible": st.booleans()}
)
PARAGRAPH = st.fixed_dictionaries({"context": TEXT, "qas": st.lists(QUESTION, max_size=3)})
ARTICLES = st.lists(st.fixed_dictionaries({"title": TEXT, "paragraphs": st.lists(PARAGRAPH, max_size=2)}), max_size=3)
KEPT = {"paragraphs": [{"context": "Ann slept.", "qas": [{"id": "last", "question": "Who?", "answers": []}]}]}


@few
@given(articles=ARTICLES, form=FORMS)
def test_questions_of_squad_are_read_as_the_standard_library_reads_them(tmp_path, articles, form):
    asked = [
        (article, paragraph, question)
        for article in articles
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]
    for number, (_, _, question) in enumerate(asked):
        question["id"] = f"q{number}"
    content = json.dumps({"version": "1", "data": [*articles, KEPT]}, **form).encode()
    found, bad = read(tmp_path / "a.json", content)
    expected = [
        {
            **{key: value for key, value in question.items() if key != "answers"},
            "title": article["title"],
            "context": paragraph["context"],
            "answers": {key: [one[key] for one in question["answers"]] for key in ("text", "answer_start")},
        }
        for article, paragraph, question in asked
    ]
    assert (found[:-1], bad) == (expected, [])


# ---- no record is lost or counted twice

WRONG = st.sampled_from([[], "text", None, 3, {"a": "b\0"}, {"question": 1}, {"id": [1], "question": "Who?"}])
RIGHT = st.fixed_dictionaries({"question": TEXT, "answers": st.lists(TEXT, max_size=2)}, optional={"context": TEXT})


@few
@given(items=st.lists(RIGHT | WRONG, min_size=1, max_size=8), suffix=st.sampled_from(["json", "jsonl"]))
def test_every_record_is_kept_or_rejected_with_its_place(tmp_path, items, suffix):
    items = [{"question": "Who?", "context": "Ann slept.", "answers": ["Ann"]}, *items]
    text = json.dumps(items) if suffix == "json" else "\n".join(map(json.dumps, items))
    path, counts = tmp_path / f"a.{suffix}", ReadCounts()
    path.write_text(text)
    source = Source((str(path),), load_plugin("tasks", "squad_v2")(), LengthLimits(64, 16), on_bad_record="skip")
    records = refuse_duplicate_ids(read_records(str(path), on_bad=counts.skip), on_bad=counts.skip)
    examples = list(convert_records(records, source, counts, None, counts.skip))
    assert counts.num_read == len(items) == counts.num_records_kept + counts.num_skipped
    assert counts.num_skipped == counts.num_skipped_bad + counts.num_unlabelled
    assert len(examples) == counts.num_records_kept
    assert all(skip["where"].startswith(str(path)) and skip["reason"] for skip in counts.skips)


# ---- the order of the data is a function of (seed, epoch, step)

PLANS = st.fixed_dictionaries(
    {
        "examples_per_step": st.integers(1, 12),
        "batch_size": st.integers(1, 5),
        "bucket_pool": st.integers(1, 4),
        "seed": st.integers(0, 9),
    }
)
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=50)


def deal(lengths: list[int], plan: dict[str, int], world: World = SINGLE_PROCESS, **changes: Any) -> TrainingStream:
    """A stream of rows of these lengths; `shards` gives their number, read through a window of `window_shards`."""
    num_shards, window = changes.pop("shards", 1), changes.pop("window_shards", None)
    ends = np.linspace(0, len(lengths), min(num_shards, len(lengths)) + 1).astype(int)[1:]
    store: Any = SimpleNamespace(
        inputs=SimpleNamespace(lengths=np.array(lengths)),
        labels=SimpleNamespace(lengths=np.ones(len(lengths), int)),
        shard_ends=ends,
    )
    store = type("Rows", (), {**vars(store), "__len__": lambda self: len(lengths)})()
    return TrainingStream(store, BatchPlan(**{**plan, **changes, "window_shards": window}), world=world)


def rows_of(stream: TrainingStream, step: int) -> list[int]:
    return np.concatenate(stream.select_rows(step)).tolist()


@few
@given(
    lengths=LENGTHS, plan=PLANS, size=st.integers(1, 4), batch_size=st.integers(1, 12),
    window=st.none() | st.integers(1, 4), data=st.data(),
)  # fmt: skip
def test_the_order_does_not_depend_on_ranks_batches_or_what_was_read_before(
    lengths, plan, size, batch_size, window, data
):
    options = {"window_shards": window, "shards": 5}
    whole = deal(lengths, plan, **options)
    num_steps = 3 * whole.steps_per_epoch
    expected = [rows_of(whole, step) for step in range(num_steps)]
    for epoch in range(3):
        dealt = chain(*expected[epoch * whole.steps_per_epoch : (epoch + 1) * whole.steps_per_epoch])
        assert sorted(dealt) == list(range(len(lengths)))
    cut = deal(lengths, plan, batch_size=batch_size, **options)
    ranks = [deal(lengths, plan, World(rank, size), **options) for rank in range(size)]
    for step in data.draw(st.permutations(range(num_steps))):
        assert rows_of(cut, step) == expected[step]
        shares = [rows_of(rank, step) for rank in ranks]
        assert sorted(chain(*shares)) == sorted(expected[step])
        assert whole.count_examples_before(step) == sum(map(len, expected[:step]))


@few
@given(plan=PLANS)
def test_another_seed_gives_another_order(plan):
    streams = [deal([1 + row % 7 for row in range(40)], {**plan, "seed": plan["seed"] + more}) for more in (0, 1)]
    orders = [[rows_of(stream, step) for step in range(stream.steps_per_epoch)] for stream in streams]
    assert orders[0] != orders[1]


# ---- scores

WORDS = st.lists(st.sampled_from(["the", "Cat", "sat", "on", "a", "mat.", "42", "né", "Ann's"]), max_size=4).map(
    " ".join
)
ROWS = st.lists(st.tuples(WORDS, st.lists(WORDS.filter(bool), min_size=1, max_size=3)), min_size=1, max_size=8)
METRICS = ("squad", "squad_v2", "exact_match", "mlqa", "causalqa")


def score(metric: str, rows: list[tuple[str, list[str]]]) -> tuple[dict[str, float], list[dict[str, float]]]:
    scores = Scorer([metric]).score([one for one, _ in rows], [golds for _, golds in rows])
    return dict(scores.corpus), [dict(one) for one in scores.each]


def near(scores: Mapping[str, float]) -> Any:
    return pytest.approx({key: value for key, value in scores.items() if not key.endswith("total")}, abs=1e-9)


def rates(scores: Mapping[str, float]) -> dict[str, float]:
    return {key: value for key, value in scores.items() if not key.endswith("total")}


@pytest.mark.parametrize("metric", METRICS)
@few
@given(rows=ROWS, times=st.integers(2, 3), data=st.data())
def test_scores_do_not_depend_on_the_order_of_examples_or_golds_nor_on_repetition(metric, rows, times, data):
    corpus, each = score(metric, rows)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled, apart = score(metric, [rows[place] for place in order])
    assert rates(shuffled) == near(corpus) and apart == [each[place] for place in order]
    assert rates(score(metric, rows * times)[0]) == near(corpus)
    golds = [(one, [*data.draw(st.permutations(known)), known[0]]) for one, known in rows]
    assert score(metric, golds) == (corpus, each)


NOISE = st.sampled_from([" ", "\t", "\n", "  the ", " A ", " an\t", "! ", " ?!", "; the ."])


@pytest.mark.parametrize("metric", ["squad", "squad_v2"])
@few
@given(rows=ROWS, inner=NOISE, outer=st.tuples(NOISE | st.just("."), NOISE | st.just(".")), upper=st.booleans())
def test_scores_of_squad_ignore_case_white_space_articles_and_punctuation(metric, rows, inner, outer, upper):
    def add_noise(text: str) -> str:
        changed = (text.upper() if upper else text.lower()).replace(" ", inner)
        return f"{outer[0]}{changed}{outer[1]}" if text else text

    changed = [(add_noise(one), golds) for one, golds in rows]
    assert score(metric, changed) == score(metric, rows)


# ---- settings

TITLE = st.text("ab 1.:#-é𐀀'\"\\{[", max_size=12)
SCHEMA = json.loads((Path(__file__).parents[1] / "docs" / "recipe.schema.json").read_text())


def draw_value(field: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows for a setting: numbers, words, booleans, null; nothing for other types."""
    found: list[st.SearchStrategy[Any]] = []
    for kind in field.get("anyOf", [field]):
        low, high = (kind.get(name, kind.get(f"exclusive{name.title()}")) for name in ("minimum", "maximum"))
        if "enum" in kind:
            found.append(st.sampled_from(kind["enum"]))
        elif kind.get("type") == "integer":
            found.append(st.integers(low, 10**6 if high is None else high - 1))
        elif kind.get("type") == "number":
            found.append(
                st.floats(
                    0 if low is None else low,
                    1e6 if high is None else high,
                    exclude_min="exclusiveMinimum" in kind,
                    exclude_max="exclusiveMaximum" in kind,
                )
            )
        elif kind.get("type") in ("boolean", "null"):
            found.append(st.booleans() if kind["type"] == "boolean" else st.none())
    return st.one_of(found)


DRAWN = {
    f"{section}.{name}": values
    for section, place in SCHEMA["properties"].items()
    if "$ref" in place
    for name, field in SCHEMA["$defs"][place["$ref"].rpartition("/")[2]]["properties"].items()
    if not (values := draw_value(field)).is_empty and values != st.none()
} | {
    "optimizer.lr": st.floats(1e-9, 1),
    "report.title": TITLE,
    "data.train": st.lists(TITLE.map(lambda text: f"{text}.json"), min_size=2, max_size=3, unique=True),
}
SETTINGS = st.lists(st.sampled_from(sorted(DRAWN)), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: DRAWN[name] for name in names})
)


@few
@given(changes=SETTINGS)
def test_flags_and_a_file_and_a_written_config_give_the_same_settings(tmp_path, changes):
    basic: dict[str, Any] = {"run": {"dir": "r"}, "model": {"path": "m"}, "task": {"name": "squad_v2"}}
    nested = {key: dict(value) for key, value in basic.items()}
    words: list[str] = []
    for key, value in changes.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
        if key in PATHS:  # a name may begin with --
            words.append(f"--{key}={format_override(key, value)}")
        else:
            several = value if isinstance(value, list) else [value]
            words += [f"--{key}", *(format_override(key, one) for one in several)]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(nested, allow_unicode=True), encoding="utf-8")
    try:
        by_file = load_config(tmp_path / "recipe.yaml")
    except ConfigError:  # two settings that exclude each other
        reject()
    assert load_config(basic, changes) == by_file
    assert load_config(basic, parse_overrides(words)) == by_file
    (tmp_path / "written.yaml").write_text(by_file.as_yaml(), encoding="utf-8")
    assert load_config(tmp_path / "written.yaml") == by_file
