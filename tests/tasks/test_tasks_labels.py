"""Label tasks and tags: their forms of data, what they refuse, and the cut of system E."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import kit
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoTokenizer

from fivetune.data.examples import Source
from fivetune.data.labels import read_label_set
from fivetune.data.readers.records import apply_task, read_records
from fivetune.data.store.encode import LengthLimits, encode
from fivetune.data.store.token_store import load_or_build_store
from fivetune.errors import ConfigError, DataError, MissingLabelError
from fivetune.scores.metrics import load_metric
from fivetune.scores.metrics.classification import compute_label_rates, describe_majority
from fivetune.tasks._posts import strip_markup
from fivetune.tasks.bioasq_yesno import BioASQYesNo
from fivetune.tasks.classification import Classification
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.pubmedqa import PubMedQA
from fivetune.tasks.stackoverflow_quality import StackOverflowQuality
from fivetune.tasks.stackoverflow_tags import StackOverflowTags
from fivetune.tasks.tags import Tags
from fivetune.types import RawRecord, TextExample

DATA = kit.SHARED / "data"
SHARED = pytest.mark.skipif(not DATA.exists(), reason=kit.NEEDS_SHARED)
POST = {"Title": "Why?", "Body": "<p>x</p>", "Tags": "<c#>", "Y": "HQ"}
TWO: Any = StackOverflowQuality(labels={"HQ": "high", "LQ": "low"})


def _example(task: Any, fields: dict[str, Any], **options: bool) -> TextExample:
    example = task.to_text(RawRecord(fields, "train.csv:17"), **options)
    assert isinstance(example, TextExample)
    return example


def _all(task: Any, *names: str) -> list[TextExample | None]:
    return [task.to_text(record) for name in names for record in read_records(str(DATA / name))]


# --- labels ---


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (
            StackOverflowQuality(),
            {**POST, "Y": "LQ"},
            "Y is 'LQ', which is not a label. Labels: LQ_CLOSE, LQ_EDIT, HQ. Set task.labels to those of the data",
        ),
        (StackOverflowQuality(), {**POST, "Y": ""}, "Y is '', which is not a label."),
        (StackOverflowQuality(), {**POST, "Body": " "}, "Body is empty. Give it a text."),
        (StackOverflowQuality(), {"Title": "a", "Body": "b"}, "there is no column 'Y'. Columns: Title, Body. If one"),
        (StackOverflowTags(), {**POST, "Tags": "<>"}, "Tags is '<>', which has no tag. Allowed are forms such as"),
        (StackOverflowTags(), {**POST, "Tags": 7}, "Tags is 7, which has no tag."),
        (
            BioASQYesNo(),
            {"body": "Is it?", "snippets": [{"text": "x"}]},
            "there is no column 'exact_answer' or 'yesno_label'. Columns: body, snippets. Test sets of BioASQ come",
        ),
        (BioASQYesNo(), {"body": "Is it?", "snippets": [{"text": "x"}], "exact_answer": 7}, "exact_answer is '7'"),
        (BioASQYesNo(), {"body": "Is it?", "snippets": [], "exact_answer": "yes"}, "there is no column 'context'"),
        (PubMedQA(), {"QUESTION": "Is it?", "CONTEXTS": ["x"], "final_decision": "perhaps"}, "Labels: yes, no, maybe."),
    ],
)
def test_bad_records(task, fields, message):
    with pytest.raises(DataError) as error:
        task.to_text(RawRecord(fields, "train.csv:17"))
    assert str(error.value).startswith("train.csv:17: ")
    assert message in str(error.value)


def test_labels_are_an_option():
    example = _example(TWO, {**POST, "Y": " lq "})
    assert (example.targets, example.references, example.meta) == (
        "low",
        ("LQ",),
        {"labels": ["HQ", "LQ"], "label_form": " lq "},
    )
    assert (TWO.from_text(" High"), TWO.from_text("higher")) == ("HQ", "higher")


@pytest.mark.parametrize("labels", [{}, {"a": "x"}, {"a": "x", "b": "X"}, {"a": "x", "b": " "}, {"a": "x", "A": "y"}])
def test_label_sets_that_are_none(labels):
    with pytest.raises(ValidationError, match=r"is not a label set\. It needs two labels or more"):
        StackOverflowQuality(labels=labels)


@given(st.text())
def test_any_text_is_read_as_a_label_or_as_itself(text):
    answer = TWO.from_text(text)
    assert answer in ("HQ", "LQ", text.strip())
    assert TWO.from_text(f" {text}\n") == answer


@pytest.mark.parametrize("blank", [None, " "])
def test_no_label_is_not_the_label_none(blank):
    task = StackOverflowQuality(labels={"none": "none", "some": "some"})
    with pytest.raises(DataError, match=r"Y is (null|''), which is not a label"):
        _example(task, {**POST, "Y": blank})


def test_unknown_labels_do_not_matter_in_prediction():
    example = _example(StackOverflowQuality(), {**POST, "Y": "?"}, labelled=False)
    assert (example.targets, example.references) == ("", ())


# --- posts ---


def test_markup_is_an_option():
    body = '<p>Is <code>a&lt;b</code>?</p>\n<pre class="x">vector<int> a; if (a<b && c>d)</pre>'
    assert _example(TWO, {**POST, "Body": body}).inputs == "quality: Why?</s>Is a<b ? vector<int> a; if (a<b && c>d)"
    kept = StackOverflowQuality(labels=TWO.labels, markup=True)
    assert _example(kept, {**POST, "Body": body}).inputs == f"quality: Why?</s>{body}"


@given(st.text())
def test_plain_text_of_anything(text):
    assert strip_markup(text) == " ".join(strip_markup(text).split())
    assert "<p>" not in strip_markup(f"<p>{text}</p>".replace("&", ""))


def test_one_text_column(tmp_path):
    path = tmp_path / "clean.csv"
    path.write_text("text,rating\nhow to,HQ\n")
    (record,) = read_records(str(path), columns={"Y": "rating"})
    example = StackOverflowQuality(template="quality: {text}").to_text(record)
    assert (example.id, example.inputs, example.references) == ("clean-1", "quality: how to", ("HQ",))


@pytest.mark.parametrize("tags", ["<c#><.net>", "|c#|.net|", "c#, .net", "c# .net", ["c#", ".net"], "<c#><.net><c#>"])
def test_forms_of_tags(tags):
    assert _example(StackOverflowTags(), {**POST, "Tags": tags}).targets == "c#, .net"


def test_head_sentinel_and_tail(tmp_path):
    """512 tokens are 255 of the head, <extra_id_1>, and 256 of the tail, of which the last is the end token."""
    tokenizer = AutoTokenizer.from_pretrained(kit.make_tokenizer(tmp_path))
    post = {**POST, "Title": "red hat", "Body": " ".join(kit.WORDS * 60)}
    [example] = apply_task(TWO, RawRecord(post, "train.csv:17"))
    (cut,) = encode(tokenizer, [example], [example.targets], limits=LengthLimits(512, 8, "head_tail"))
    whole = [*tokenizer("quality: red hat")["input_ids"], *tokenizer(" ".join(kit.WORDS * 60))["input_ids"]]
    gap = tokenizer.convert_tokens_to_ids("<extra_id_1>")
    assert cut.input_ids == [*whole[:255], gap, *whole[-256:]]
    assert (len(cut.input_ids), cut.input_ids[-1], cut.num_clipped_inputs) == (512, 1, len(whole) - 512)


def test_bad_encodings_and_labels_are_named(tmp_path):
    path, tokenizer = tmp_path / "posts.csv", AutoTokenizer.from_pretrained(kit.make_tokenizer(tmp_path / "t"))
    path.write_bytes("Id,Title,Body,Y\n1,na\xefve,<p>x</p>,HQ\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"posts\.csv:2: .*UTF-8.*iconv"):
        load_or_build_store(Source((str(path),), TWO, LengthLimits()), tokenizer, cache=tmp_path)
    path.write_text('Id,Title,Body,Y\n1,a,"<p>x\ny</p>",HQ\n2,b,c,LQ_EDIT\n')
    with pytest.raises(DataError, match=r"posts\.csv:4: Y is 'LQ_EDIT', which is not a label. Labels: HQ, LQ"):
        load_or_build_store(Source((str(path),), TWO, LengthLimits()), tokenizer, cache=tmp_path)
    store = load_or_build_store(
        Source((str(path),), TWO, LengthLimits(), on_bad_record="skip"), tokenizer, cache=tmp_path
    )
    assert (len(store), store.summary["num_skipped_bad"]) == (1, 1)


# --- questions with yes and no ---


def test_pubmedqa_forms(tmp_path):
    official = {"QUESTION": "Is it?", "CONTEXTS": ["One.", "Two."], "LONG_ANSWER": "It is.", "final_decision": "maybe"}
    hub = {"pubid": 12, "question": "Is it?", "context": {"contexts": ["One.", "Two."], "labels": ["A", "B"]},
           "long_answer": "It is.", "final_decision": "maybe"}  # fmt: skip
    for indent in (None, 4):
        path = tmp_path / f"pqal-{indent}.json"
        path.write_text(json.dumps({"12": official, "13": official}, indent=indent))
        first, second = map(PubMedQA().to_text, read_records(str(path)))
        assert (first.id, second.id) == ("12", "13")
        assert first == _example(PubMedQA(), hub)
    assert (first.inputs, first.targets) == ("question: Is it? context: One. Two.", "maybe")


def test_yes_and_no_of_a_table():
    fields = {"id": "t-1", "question": "Is it?", "ideal_answer": "Yes, it is.", "yesno_label": "0"}
    example = _example(BioASQYesNo(), fields)
    assert (example.inputs, example.references) == ("question: Is it? context: Yes, it is.", ("no",))


def test_other_types_are_left_out():
    assert BioASQYesNo().to_text(RawRecord({"type": "factoid", "body": "Who?"}, "golden.json:1")) is None


# --- real files ---


@SHARED
def test_bioasq_files():
    train = _all(BioASQYesNo(), "bioasq/yesno/train.tsv.gz", "bioasq/yesno/test.tsv.gz")
    assert len(train) == 720
    golden = _all(BioASQYesNo(), *(f"bioasq/golden/{name.name}" for name in Path(DATA / "bioasq/golden").iterdir()))
    kept = list(filter(None, golden))
    assert (len(golden), len(kept)) == (1997, 545)
    assert Counter(example.targets for example in kept) == {"yes": 406, "no": 139}


@SHARED
def test_stack_overflow_files():
    name = "so_quality/raw_schema_hq_lq.train.csv.gz"
    assert Counter(example and example.targets for example in _all(TWO, name)) == {"high": 579, "low": 521}
    assert len(list(filter(None, _all(StackOverflowTags(), name)))) == 1100
    with pytest.raises(DataError, match=r"train\.csv\.gz:\d+: Y is 'LQ', which is not a label"):
        _all(StackOverflowQuality(), name)
    records = list(read_records(str(DATA / "so_quality/clean_text_3class.valid.csv.gz"), columns={"Y": "rating"}))
    task = StackOverflowQuality(template="quality: {text}")
    assert Counter(task.to_text(record).targets for record in records) == {"none": 2250, "low": 2250, "high": 2250}


# --- labels from the data ---


def test_the_label_set_of_a_table(tmp_path):
    (tmp_path / "a.csv").write_text("text,kind\na,late\nb,Refund\nc,refund\nd,Refund\ne,nan\nf,\n")
    task = Classification(label="kind")
    assert read_label_set(task, [str(tmp_path / "a.csv")], {}) == {"Refund": "Refund", "late": "late"}
    (tmp_path / "b.csv").write_text("text,kind\na,late\n")
    with pytest.raises(ConfigError, match=r"the column 'kind' of .*b\.csv holds 'late'\. A classification needs two"):
        read_label_set(task, [str(tmp_path / "b.csv")], {})


@pytest.mark.parametrize("value", ["nan", "NaN", "", " ", None, float("nan")])
def test_missing_labels_are_left_out_not_learnt(value):
    """Fault A3: nan, which pandas writes for an empty cell, was trained as a word."""
    for task, name in ((Classification(), "label"), (JSONL(inputs="{text}", targets="{label}"), "label")):
        with pytest.raises(DataError, match="label"):
            task.to_text(RawRecord({"text": "a", name: value}, "a.csv:2"))
    with pytest.raises(MissingLabelError):
        Classification().to_text(RawRecord({"text": "a", "label": value}, "a.csv:2"))
    assert Classification().to_text(RawRecord({"text": "a"}, "a.csv:2"), labelled=False).references == ()


def test_a_model_that_says_one_label_is_described():
    """Fault C2: 500 of 500 "yes" was reported as success."""
    rates = compute_label_rates(["yes"] * 3, [["yes"], ["yes"], ["no"]])
    assert rates == {"majority_label": 2 / 3, "one_label": 1.0}
    words = describe_majority({"accuracy": 200 / 3}, rates, {"no": 1, "yes": 2})
    assert words == "accuracy 66.67 is as good as always predicting yes (66.67)"
    assert describe_majority({"accuracy": 70.0}, rates, {"no": 1, "yes": 2}) == ""


# --- several labels ---


@pytest.mark.parametrize(
    ("task", "fields", "targets", "references"),
    [
        (Tags(separator=";"), {"tags": "login; billing;login"}, "login; billing", "login; billing"),
        (Tags(separator="|"), {"tags": ["login", "a, b"]}, "login| a, b", "login| a, b"),
        (Tags(), {"tags": [3, 7]}, "3, 7", "3, 7"),
        (Tags(), {"tags": []}, "none", ""),
        (Tags(no_tags="nothing"), {"tags": None}, "nothing", ""),
        (Tags(tags=("late", "paid")), {"late": 1, "paid": "false"}, "late", "late"),
        (Tags(tags=("late", "paid")), {"late": 0.0, "paid": ""}, "none", ""),
        (Tags(), {"tags": '["login", "billing"]'}, "login, billing", "login, billing"),
        (Tags(separator=";"), {"tags": "['it\\'s late', \"a, b\"]"}, "it's late; a, b", "it's late; a, b"),
        (Tags(), {"tags": "['login'\n 'billing']"}, "login, billing", "login, billing"),
        (Tags(), {"tags": "{'login', 'billing'}"}, "billing, login", "billing, login"),
        (Tags(), {"tags": "('login',)"}, "login", "login"),
        (Tags(), {"tags": "login\nbilling"}, "login, billing", "login, billing"),
        (Tags(separator=" "), {"tags": "cr2 ter2"}, "cr2 ter2", "cr2 ter2"),
        (Tags(), {"tags": "[login, 'billing']"}, "login, billing", "login, billing"),
        (Tags(), {"tags": "{login,billing}"}, "login, billing", "login, billing"),
        (Tags(), {"tags": "[3, 7]"}, "3, 7", "3, 7"),
        (Tags(), {"tags": "[]"}, "none", ""),
        (Tags(), {"tags": "[urgent] note"}, "[urgent] note", "[urgent] note"),
        (Tags(tags=("t1", "t2", "t3")), {"t1": "joy", "t2": None, "t3": "fear"}, "joy, fear", "joy, fear"),
        (Tags(tags=("t1", "t2")), {"t1": "joy", "t2": "joy, fear"}, "joy, fear", "joy, fear"),
        (Tags(tags=("t1", "t2")), {"t1": "['joy']", "t2": float("nan")}, "joy", "joy"),
        (Tags(tags=("t1", "t2")), {"t1": "", "t2": " "}, "none", ""),
    ],
)
def test_several_labels_are_one_text(task: Tags, fields: dict[str, Any], targets: str, references: str) -> None:
    example = _example(task, {"id": "1", "text": "a text", **fields})
    assert (example.targets, example.references) == (targets, (references,))
    assert task.from_text(example.targets) == references
    (metric,) = task.metrics
    scores = load_metric(metric).score([task.from_text(targets)], [example.references])
    assert scores.corpus["exact_set"] == 100


def test_several_labels_may_be_absent_where_they_are_asked_for() -> None:
    example = _example(Tags(tags=("late", "paid")), {"id": "1", "text": "a text"}, labelled=False)
    assert (example.targets, example.references) == ("", ())


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        (Tags(), {"tags": 3.5}, "tags is 3.5. It must be a list of labels, or a text."),
        (
            Tags(),
            {"tags": ["Doe, Ann", "Roe"]},
            "the label 'Doe, Ann' holds the separator ',', and would count as several. "
            "Set task.separator to what no label holds, such as '; '.",
        ),
        (Tags(), {"tags": [["a"]]}, "tags holds ['a']. Each label must be text or a number."),
        (
            Tags(tags=("late", "paid")),
            {"late": 2, "paid": 0},
            "late is 2. Of several columns, all hold 1 or 0, true or false, or all hold labels in words",
        ),
        (Tags(tags=("late", "paid")), {"late": 1, "paid": "joy"}, "late is 1. Of several columns"),
        (Tags(), {"tags": '{"late": 1}'}, "It must be a list of labels, or a text."),
    ],
)
def test_values_that_are_no_labels_are_refused(task: Tags, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        task.to_text(RawRecord({"id": "1", "text": "a text", **fields}, "a.csv:2"))
