"""gsm8k, causalqa, unifiedqa and jsonl: what they make of real records, and what they refuse."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fivetune.config import load_config
from fivetune.config.recipes import find_recipe
from fivetune.data.readers.records import read_records
from fivetune.errors import DataError
from fivetune.scores.metrics import Scorer
from fivetune.tasks._choices import parse_choices
from fivetune.tasks.causalqa import CausalQA, is_causal
from fivetune.tasks.gsm8k import GSM8K
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.unifiedqa import UnifiedQA
from fivetune.types import RawRecord

SHARED = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.exists(), reason="../shared with the published sets is absent")


def _shared(name: str) -> list[RawRecord]:
    return list(read_records(str(SHARED / name)))


def _example(task: Any, *, labelled: bool = True, **fields: Any) -> Any:
    return task.to_text(RawRecord(fields, "x.jsonl:3"), labelled=labelled)


def _refused(task: Any, message: str, **fields: Any) -> None:
    with pytest.raises(DataError) as error:
        _example(task, **fields)
    assert str(error.value).startswith(f"x.jsonl:3: {message}")


# --- gsm8k ---

EGGS = {"question": "How many eggs?", "answer": "6 * 200 = <<6*200=1200>>1,200 eggs.\n#### 1,200"}


@pytest.mark.parametrize(
    ("options", "target"),
    [
        ({}, "6 * 200 = 1,200 eggs.\n#### 1,200"),
        ({"calculator": "keep"}, EGGS["answer"]),
        ({"target": "number"}, "1200"),
        ({"target": "phrase"}, "The answer is 1200"),
    ],
)
def test_gsm8k_targets(options, target):
    task = GSM8K(template="solve: {question}", **options)
    example = _example(task, **EGGS)
    assert (example.inputs, example.targets, example.references) == ("solve: How many eggs?", target, ("1200",))
    assert example.inputs[slice(*example.clippable)] == "How many eggs?"
    assert task.from_text(target) == "1200"


@pytest.mark.parametrize("answer", ["1,200 eggs", "#### many", "####1200", "#### 1.200.", "#### ,"])
def test_gsm8k_numbers_that_cannot_be_read(answer):
    _refused(GSM8K(), f"answer ends in {answer!r}, which has no number after '#### '.", question="?", answer=answer)


@pytest.mark.parametrize("template", ["{question} {context}", "{prompt}"])
def test_gsm8k_template(template):
    with pytest.raises(ValidationError, match=r"must have \{question\} and no other column"):
        GSM8K(template=template)


@needs_data
@pytest.mark.parametrize("target", ["number", "phrase", "rationale"])
def test_gsm8k_test_set_reads_back(target):
    task = GSM8K(target=target)
    examples = [task.to_text(record) for record in _shared("gsm8k/test.jsonl.gz")]
    assert len(examples) == 1_319
    written = [task.from_text(example.targets) for example in examples if example]
    assert Scorer(["gsm8k"]).score(written, [e.references for e in examples if e]).corpus["accuracy"] == 100
    assert not any("<<" in example.targets for example in examples if example)


# --- causalqa ---


@needs_data
@pytest.mark.parametrize(
    ("name", "size"), [("squad_causal_train", 289), ("squad_causal_valid", 259), ("wikiwhy_nocontext_600", 600)]
)
def test_causal_sets(name, size):
    task = CausalQA(causal_only=name.startswith("squad"))
    examples = [task.to_text(record) for record in _shared(f"causalqa/{name}.csv.gz")]
    assert len(list(filter(None, examples))) == size
    for example in filter(None, examples):
        assert example.references and (" \\n " in example.inputs) == (name != "wikiwhy_nocontext_600")


@needs_data
def test_causal_rules_find_the_whole_set():
    """`squad_causal_valid` holds what the published rules find among the answerable questions of SQuAD v2.0 dev."""
    dev = [record.fields for record in _shared("squad_v2/dev-v2.0.json.gz") if not record.fields["is_impossible"]]
    found = {fields["id"] for fields in dev if is_causal(fields["question"])}
    assert found == {record.fields["id"] for record in _shared("causalqa/squad_causal_valid.csv.gz")}


@pytest.mark.parametrize(
    ("question", "causal"),
    [
        ("Why?", True),
        ("If it rains, why does it pour?", True),
        ("Tell me why is it so", True),
        ("What causes rain", True),
        ("The probable cause", False),
        ("because of what happened", True),
        ("How come it rains?", True),
        ("How did it end?", True),
        ("Name two effects of rain.", True),
        ("What is the dopplar effect in rain?", False),
        ("Was it effective?", False),
        ("Does it affect me?", True),
        ("Can rain lead to floods?", True),
        ("What happens to plants when it rains?", True),
        ("What happened?", False),
        ("What to do if it rains", True),
        ("What should be done to stop it?", True),
        ("Who paints?", False),
    ],
)
def test_causal_rules(question, causal):
    assert is_causal(question) is causal


def test_causalqa_columns_and_answers():
    fields = {"id": 1, "question": "Why Rain?", "context": "A Front.", "answer": "Cold air\t Warm air \t\tCold air"}
    task = CausalQA(form="plain", lower_case=True, train_answers="all", separator=" | ")
    example = _example(task, **fields)
    assert example.inputs == "why rain? | a front."
    assert example.inputs[slice(*example.clippable)] == "a front."
    assert example.references == task.train_targets(example) == ("cold air", "warm air")
    assert _example(CausalQA(form="plain", causal_only=True), **{**fields, "question": "Who?"}) is None
    _refused(CausalQA(), "there is no column 'question_processed'. Did you mean question? Columns: id, ", **fields)
    _refused(task, "answer is empty.", **{**fields, "answer": " "})
    _refused(task, "context is 7. It must be text, empty if there is none.", **{**fields, "context": 7})


# --- unifiedqa ---

RIVER = {"question": "Where did Rollo's fleet land?", "context": "It came up the Seine."}
CHOICES = ["The Rhine", "The Seine"]


@pytest.mark.parametrize(
    "fields",
    [
        {"choices": CHOICES, "answer": "the seine"},
        {"choices": CHOICES, "answer": "B"},
        {"choices": CHOICES, "label": 1},
        {"choices": CHOICES, "label": "1"},
        {"choices": {"text": CHOICES, "label": ["1", "2"]}, "answerKey": "2"},
        {"choices": {"X": CHOICES[0], "Y": CHOICES[1]}, "answerKey": "Y"},
        {"choices": [{"label": "X", "text": CHOICES[0]}, {"label": "Y", "text": CHOICES[1]}], "answerKey": "Y"},
        {"choices": [{"text": CHOICES[0], "type": "distractor"}, {"text": CHOICES[1], "type": "correct answer"}]},
    ],
)
def test_forms_of_choices(fields):
    example = _example(UnifiedQA(format="multiple_choice"), **RIVER, **fields)
    # the first and the last quote go, as in UnifiedQA; here there is one only
    assert example.inputs == "where did rollo's fleet land? \\n (a) the rhine (b) the seine \\n it came up the seine."
    assert example.inputs[slice(*example.clippable)] == "it came up the seine."
    assert (example.targets, example.references) == ("the seine", ("the seine",))
    assert example.meta["choices"] == ["the rhine", "the seine"]


def test_a_column_for_each_choice() -> None:
    task = UnifiedQA(format="multiple_choice", choices=("A", "B", "C"))
    fields = {"A": "Elbe", "B": "", "C": 7}
    assert _example(task, **RIVER, **fields, answer="C").targets == "7"  # a blank one is left out
    numbered = UnifiedQA(format="multiple_choice", choices=("x1", "x2", "x3"), numbers_from=1)
    assert _example(numbered, **RIVER, x1=3, x2=1, x3=2, answer="3.0").targets == "2"  # a number, no text
    _refused(task, "answer is 'D', which is not in the list", **RIVER, **fields, answer="D")


@pytest.mark.parametrize(
    "cell", ["['The Rhine', 'The Seine']", '{"A": "The Rhine", "B": "The Seine"}', "A) The Rhine B) The Seine"]
)
def test_a_text_that_holds_the_choices(cell: str) -> None:
    assert _example(UnifiedQA(format="multiple_choice"), **RIVER, choices=cell, answer="(B)").targets == "the seine"


@pytest.mark.parametrize(
    ("cell", "texts"),
    [
        (r"""["$\frac{1}{3}$", "$2 \times 5$"]""", [r"$\frac{1}{3}$", r"$2 \times 5$"]),
        (r"""['A. $\theta$', 'B. $\beta \right)$']""", [r"A. $\theta$", r"B. $\beta \right)$"]),
        (r"""["\text{m}", "\alpha", "\vec{v}", "\sqrt{2}"]""", [r"\text{m}", r"\alpha", r"\vec{v}", r"\sqrt{2}"]),
        (r"""["$a \ne b$", "$\nu$", "$\tau$"]""", [r"$a \ne b$", r"$\nu$", r"$\tau$"]),
        (r"""['\theta', '\nu']""", [r"\theta", r"\nu"]),
        (r"""["$2 \\times 5$", "$\\frac12$"]""", [r"$2 \times 5$", r"$\frac12$"]),
        (r"""['Roma\ne Milano', 'hat\tcoat', "say \"a\""]""", ["Roma\ne Milano", "hat\tcoat", 'say "a"']),
        (r"""['it\'s', '\u00e9 \xe9']""", ["it's", "é é"]),
        ("['one\nline', 'two'\n 'three']", ["one\nline", "two", "three"]),
        ('["one\r\nline", "two"]', ["one\r\nline", "two"]),
        ("{'A': 'one\n', 'B': 'two'}", {"A": "one\n", "B": "two"}),
    ],
)
def test_commands_and_line_ends_in_choices_are_letters(cell, texts):
    assert parse_choices(cell) == texts


def test_choices_named_by_numbers_are_not_their_texts():
    choices = {"text": ["2", "1"], "label": ["1", "2"]}
    assert _example(UnifiedQA(format="multiple_choice"), question="?", choices=choices, answerKey="2").targets == "1"
    assert _example(UnifiedQA(format="multiple_choice"), question="?", choices=choices, answer="2").targets == "2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"choices": CHOICES, "answer": "The Elbe"}, "answer is 'The Elbe', which is not in the list ['The Rhine', "),
        ({"choices": CHOICES, "label": 2}, "label is 2, which is not in the list"),
        ({"choices": CHOICES, "answer": ""}, "answer is empty."),
        ({"choices": CHOICES}, "there is no column 'answer'. Columns: question, context, choices."),
        ({"choices": ["The Rhine"], "answer": "A"}, "choices is ['The Rhine']. It must be a list of 2 to 26 texts"),
        ({"choices": "a, b", "answer": "A"}, "choices is 'a, b'. It must be a list of 2 to 26 texts"),
        ({"choices": ["", "x"], "answer": "A"}, "choices is ['', 'x']. It must be a list of 2 to 26 texts, none empty"),
        ({"answer": "A"}, "there is no column 'choices'."),
    ],
)
def test_bad_choices(fields, message):
    _refused(UnifiedQA(format="multiple_choice"), message, **RIVER, **fields)


@pytest.mark.parametrize(
    ("given", "answer"), [(True, "yes"), ("False", "no"), (0, "no"), ("YES", "yes"), ("1", "yes"), (False, "no")]
)
def test_yes_and_no(given, answer):
    task = UnifiedQA(format="yes_no")
    example = _example(task, question="Is rust iron?", passage="Rust is an oxide.", answer=given)
    assert (example.inputs, example.references) == ("is rust iron? \\n rust is an oxide.", (answer,))
    assert _example(task, question="Is it?", labelled=False).references == ()
    _refused(task, "answer is 'perhaps'. It must be yes or no", question="Is it?", answer="perhaps")


def test_open_formats():
    asked = {"question": "Why?", "context": "", "answers": ["He was 'bold'", "Courage"]}
    abstractive = UnifiedQA(format="abstractive", train_answers="all")
    example = _example(abstractive, **asked)
    assert (example.inputs, example.clippable) == ("why?", (0, 4))
    assert abstractive.train_targets(example) == example.references == ("he was bold", "courage")
    assert _example(UnifiedQA(lower_case=False), **asked).references == ("He was 'bold'", "Courage")
    unanswerable = _example(UnifiedQA(), **{**asked, "answers": []})
    assert (unanswerable.targets, unanswerable.references) == ("no answer", ("",))
    assert UnifiedQA().train_targets(unanswerable) == ("no answer",)
    _refused(
        abstractive, "the question has no answer, and abstractive questions must have one.", question="?", answers=[]
    )


@given(st.text(), st.text(min_size=1))
def test_the_span_is_the_context(question, context):
    fields = {"question": f"Why {question}?", "context": f"x {context} x", "answers": ["x"]}
    for lower_case in (False, True):
        example = _example(UnifiedQA(lower_case=lower_case), **fields)
        clipped = example.inputs[slice(*example.clippable)]
        expected = " ".join(fields["context"].split())
        expected = expected.lower() if lower_case else expected
        assert clipped.replace("'", "") == expected.replace("'", "")
        assert clipped.startswith("x") and clipped.endswith("x")


@needs_data
def test_spanish_choices():
    records = _shared("squad_es_dist/training.json.gz")
    plain, shuffled = (UnifiedQA(format="multiple_choice", shuffle_choices=mixed) for mixed in (False, True))
    places = [Counter[int](), Counter[int]()]
    for record in records:
        for task, place in zip((plain, shuffled), places, strict=True):
            example = task.to_text(record)
            assert example is not None
            place[example.meta["choices"].index(example.references[0])] += 1
    assert [sum(place.values()) for place in places] == [835, 835]
    assert places[0][0] > 700  # the right one stands first
    assert places[1][0] < 250


# --- jsonl ---


@pytest.mark.parametrize(
    ("metrics", "main", "expected"),
    [
        (["exact_match"], "exact_match", 0.0),
        ([{"name": "exact_match", "ignore_case": True}], "exact_match", 100.0),
        (["squad"], "f1", 100.0),
        (["squad", {"name": "rouge", "types": ["rougeL"]}], "rougeL_f1", 100.0),
        (["bleu"], "bleu", 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25),
        ([{"name": "bleu", "lowercase": True}], "bleu", 100.0),
    ],
)
def test_jsonl_metrics(metrics, main, expected):
    task = JSONL(metrics=metrics, main_metric=main, references="ways")
    example = _example(task, inputs="x", targets="a", ways=["nothing", "The cat is here now"])
    scores = Scorer(task.metrics).score(["the cat is here now"], [example.references]).corpus
    assert scores[task.main_metric] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ({"name": "rouge", "stem": True}, "metrics: rouge has no option 'stem'. Did you mean stemmer? Allowed: "),
        ({"name": "rouge", "types": ["rouge7"]}, "metrics: rouge: types ['rouge7']: Input should be 'rouge1', "),
        ({"name": "roug"}, "metrics: there is no 'roug'. Did you mean rouge?"),
        ({"stemmer": True}, "metrics: {'stemmer': True} has no name."),
    ],
)
def test_jsonl_metric_options(metric, message):
    with pytest.raises(ValidationError) as error:
        JSONL(metrics=[metric], main_metric="rougeL_f1")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (GSM8K(), {"question": "?", "answer": ""}),
        (JSONL(), {"inputs": "a", "targets": " "}),
        (JSONL(references="all"), {"inputs": "a", "targets": "b", "all": []}),
        (UnifiedQA(format="abstractive"), {"question": "?", "answers": {"text": []}}),
        (UnifiedQA(format="abstractive"), {"question": "?", "answer": ""}),
        (UnifiedQA(format="yes_no"), {"question": "?", "answer": " "}),
        (UnifiedQA(format="multiple_choice"), {"question": "?", "choices": ["a", "b"], "answer": " "}),
        (CausalQA(form="plain"), {"question": "?", "context": None, "answer": " "}),
    ],
)
def test_blank_answers_are_absent_in_prediction(task, fields):
    assert _example(task, labelled=False, **fields).references == ()
    with pytest.raises(DataError):
        _example(task, **fields)


def test_unifiedqa_context_is_text():
    _refused(UnifiedQA(), "context is ['a']. It must be text", question="?", context=["a"], answer="a")


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k_rationale", "causalqa_unifiedqa", "unifiedqa", "cnn_dailymail"])
def test_recipes_load_and_say_what_they_reproduce(name):
    path = find_recipe(name)
    assert load_config(path).data.train
    first = path.read_text(encoding="utf-8").partition("base:")[0]
    assert first.startswith("# ") and "Published" in first and "base.yaml" in first
