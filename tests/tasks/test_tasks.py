"""Every task: the contract of fivetune/tasks, then what each refuses and with which words."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import fivetune.tasks
from fivetune import plugins
from fivetune.errors import DataError
from fivetune.scores.metrics import list_score_names, load_metric
from fivetune.tasks import fill_template, list_input_columns, load_task
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.squad import SQuAD
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.types import RawRecord

TASKS = plugins.list_plugins("tasks")
QUESTION = {"id": "q1", "title": "Normans", "question": "Who?", "context": "Rollo came."}


def _record(**changes: Any) -> RawRecord:
    fields = {**QUESTION, "answers": {"text": ["Rollo"], "answer_start": [0]}, **changes}
    return RawRecord({name: value for name, value in fields.items() if value is not ...}, "train.json:17")


def _is_read(task: Any, record: RawRecord, name: str) -> bool:
    """Whether the inputs cannot be made without a column; those of the answers are not among these."""
    fewer = RawRecord({key: value for key, value in record.fields.items() if key != name}, record.where)
    try:
        return task.to_text(fewer, labelled=False).inputs != task.to_text(record, labelled=False).inputs
    except DataError:
        return True


# --- the contract ---


@pytest.mark.parametrize("name", TASKS)
def test_sample_converts_exactly(name):
    task, (record, example) = plugins.load_plugin("tasks", name)(), plugins.import_plugin("tasks", name).SAMPLE
    assert task.to_text(record) == example
    assert task.to_text(record, labelled=False) == example
    assert example.references
    assert task.from_text(example.targets) in example.references
    assert all(task.from_text(target) in example.references for target in task.train_targets(example))


@pytest.mark.parametrize("name", TASKS)
def test_names_exist(name):
    task = plugins.load_plugin("tasks", name)()
    assert all(map(load_metric, task.metrics))
    assert task.main_metric in list_score_names(task.metrics)
    assert task.version >= 1
    assert "Licence: " in (plugins.import_plugin("tasks", name).__doc__ or "")


@pytest.mark.parametrize("name", TASKS)
def test_every_piece_of_the_sample_is_needed(name):
    task, (record, _) = plugins.load_plugin("tasks", name)(), plugins.import_plugin("tasks", name).SAMPLE
    with pytest.raises(DataError, match=r":\d+: there is no column"):
        task.to_text(RawRecord({"id": "1"}, record.where))


@pytest.mark.parametrize("name", TASKS)
def test_context_may_be_clipped_and_nothing_before_it(name):
    _, example = plugins.import_plugin("tasks", name).SAMPLE
    start, end = example.clippable
    assert 0 <= start < end <= len(example.inputs)


@pytest.mark.parametrize("name", sorted({*TASKS} - {"denoising"}))  # whose targets are parts of the inputs
def test_unlabelled_records_are_for_prediction_only(name):
    task, (record, labelled) = plugins.load_plugin("tasks", name)(), plugins.import_plugin("tasks", name).SAMPLE
    asked = RawRecord({key: record.fields[key] for key in record.fields if _is_read(task, record, key)}, "ask.jsonl:3")
    example = task.to_text(asked, labelled=False)
    assert (example.inputs, example.targets, example.references) == (labelled.inputs, "", ())
    with pytest.raises(DataError, match=r"ask\.jsonl:3: there is no column '"):
        task.to_text(asked)
    with pytest.raises(DataError, match=r"there is no (answer|target) to learn"):
        task.train_targets(example)


# --- questions and answers ---


@pytest.mark.parametrize(
    "gold",
    [
        {"answers": {"text": ["Rollo", "he"], "answer_start": [0, 6]}},
        {"answers": [{"text": "Rollo", "answer_start": 0}, {"text": "he", "answer_start": 6}]},
        {"answers": ["Rollo", "he"]},
        {"answers": '["Rollo", "he"]'},
        {"answers": '{"text": ["Rollo", "he"], "answer_start": [0, 6]}'},
        {"answers": ..., "answer": ["Rollo", "he"]},
    ],
)
@pytest.mark.parametrize("task", [SQuAD(), SQuADV2()])
def test_forms_of_answers(task, gold):
    example = task.to_text(_record(**gold))
    assert (example.targets, example.references) == ("Rollo", ("Rollo", "he"))


@pytest.mark.parametrize(
    "gold",
    [
        {"answers": {"text": [], "answer_start": []}, "is_impossible": True},
        {"answers": {"text": []}},
        {"answers": [], "is_impossible": "True"},
        {"answers": "", "is_impossible": ""},
        {"answers": ..., "answer": " "},
        {"answers": ..., "is_impossible": 1},
    ],
)
def test_unanswerable(gold):
    task = SQuADV2(train_answers="all")
    example = task.to_text(_record(**gold))
    assert example is not None
    assert (example.targets, example.references, example.meta["answerable"]) == ("unanswerable", ("",), False)
    assert task.train_targets(example) == ("unanswerable",)
    with pytest.raises(DataError, match=r"train\.json:17: the question has no answer.*squad_v2"):
        SQuAD().to_text(_record(**gold))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"question": ...},
            "there is no column 'question'. Columns: id, title, context, answers. If one of them is "
            "meant, name it: data.columns: {question: ITS NAME}.",
        ),
        ({"context": ...}, "there is no column 'context'. Columns: id, title, question, answers."),
        ({"question": " "}, "question is empty. Give it a text."),
        ({"context": ""}, "context is empty."),
        ({"context": 7}, "context is 7. It must be text."),
        ({"answers": ...}, "there is no column 'answers'."),
        ({"answers": None}, "answers is null. Give the answer; a question that has none has an empty text or list."),
        ({"answers": 7}, "answers is 7. It must be a list of texts"),
        ({"answers": "Rollo"}, "answers is the text 'Rollo', which is not JSON."),
        ({"answers": {"text": None}}, "answers is null. It must be a list of texts"),
        ({"answers": {"start": [0]}}, "answers is {'start': [0]}. It must be a list of texts"),
        ({"answers": [7]}, "answers[0] is 7. Every answer must be text."),
        ({"answers": ["", " "]}, "answers holds empty text only. A question without an answer has an empty list."),
    ],
)
@pytest.mark.parametrize("task", [SQuAD(), SQuADV2()])
def test_bad_records(task, changes, message):
    with pytest.raises(DataError) as error:
        task.to_text(_record(**changes))
    assert str(error.value).startswith(f"train.json:17: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_impossible": True}, "is_impossible is true, but there is the answer 'Rollo'."),
        ({"is_impossible": False, "answers": []}, "is_impossible is false, but there are no answers."),
        ({"is_impossible": "perhaps"}, "is_impossible is 'perhaps'. It must be true or false."),
        ({"answers": ["Unanswerable"]}, "the answer 'Unanswerable' reads as the no-answer phrase 'unanswerable'."),
    ],
)
def test_contradictions(changes, message):
    with pytest.raises(DataError) as error:
        SQuADV2().to_text(_record(**changes))
    assert str(error.value).startswith(f"train.json:17: {message}")


@pytest.mark.parametrize("text", ["", " unanswerable", "Unanswerable.", "UNANSWERABLE !", "unanswerable。"])
def test_no_answer_phrase_is_read_back(text):
    assert SQuADV2().from_text(text) == ""


@given(st.text())
def test_from_text_keeps_every_other_text(text):
    answer = SQuADV2().from_text(text)
    assert answer in ("", text.strip())
    assert (answer == "") == (text.strip() == "" or text.strip().lower().startswith("unanswerable"))


def test_train_answers():
    golds = {"answers": ["Rollo", "Rolf", "Rollo"]}
    examples = [SQuADV2().to_text(_record(**golds, id=str(i))) for i in range(300)]
    for example in filter(None, examples):
        assert SQuADV2(train_answers="first").train_targets(example) == ("Rollo",)
        assert SQuADV2(train_answers="all").train_targets(example) == ("Rollo", "Rolf")
    drawn = [SQuADV2(train_answers="random").train_targets(example) for example in filter(None, examples)]
    assert 60 < drawn.count(("Rolf",)) < 140
    assert drawn == [SQuADV2(train_answers="random").train_targets(example) for example in filter(None, examples)]


@pytest.mark.parametrize("task", [SQuAD(train_answers="all"), SQuADV2(train_answers="all")])
def test_blank_answers_beside_others_are_not_learned(task):
    example = task.to_text(_record(answers=[" ", "Rollo", "he"]))  # as in SQuAD-es
    assert (example.targets, example.references) == ("Rollo", ("", "Rollo", "he"))
    assert task.train_targets(example) == ("Rollo", "he")


@pytest.mark.parametrize("task", [SQuAD(), SQuADV2()])
def test_empty_answers_are_unknown_answers_in_prediction(task):
    example = task.to_text(_record(answers=[], is_impossible=False), labelled=False)
    assert (example.targets, example.references) == ("", ())


def test_ids():
    assert SQuADV2().to_text(_record(id=7)).id == "7"  # type: ignore[union-attr]
    assert SQuADV2().to_text(_record(id=...)).id == "train.json:17"  # type: ignore[union-attr]


def test_context_blind_template():
    example = SQuADV2(template="question: {question}").to_text(_record(context=...))
    assert example is not None
    assert (example.inputs, example.clippable) == ("question: Who?", (0, 0))


def test_braces_in_the_data_stay():
    example = SQuADV2(template="{{{title}}} {question} | {context}").to_text(_record(context="f{x} {question}"))
    assert example is not None
    assert example.inputs == "{Normans} Who? | f{x} {question}"
    assert example.inputs[slice(*example.clippable)] == "f{x} {question}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "context: {context}"}, "lacks {question}: the model would not see the question"),
        ({"template": "{question} {contxt}"}, "there is no {contxt}. Did you mean context? Allowed: "),
        ({"template": "fixed"}, "names no column: all records would have the same text"),
        ({"template": "{question} {context} {context}"}, "names {context} twice"),
        ({"template": "{question!r}"}, "only {column} with a plain name"),
        ({"template": "{question.__class__}"}, "there is no {question.__class__}"),
        ({"template": "{question"}, "Write a column as {column}, a brace as {{ or }}"),
        ({"no_answer": "<pad>"}, "looks like a special token: T5 drops those when it decodes"),
        ({"no_answer": "</s>"}, "looks like a special token"),
        ({"no_answer": " "}, "has no letter or digit"),
        ({"train_answers": "last"}, "'first', 'all' or 'random'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValidationError) as error:
        SQuADV2(**options)
    assert message in str(error.value)


@given(st.text(), st.text())
def test_fill_says_where_the_values_are(question, context):
    text, spans = fill_template("q: {question} c: {context}", {"question": question, "context": context})
    assert text[slice(*spans["question"])] == question
    assert text[slice(*spans["context"])] == context


# --- jsonl ---


def test_jsonl_columns_and_references():
    task = JSONL(inputs="add: {a} and {b}", targets="{sum}", references="ways", clip="b")
    example = task.to_text(RawRecord({"a": 1, "b": "two", "sum": 3, "ways": ["3", "three"]}, "sums.csv:2"))
    assert example is not None
    assert (example.id, example.inputs, example.targets) == ("sums.csv:2", "add: 1 and two", "3")
    assert example.references == ("3", "three")
    assert example.inputs[slice(*example.clippable)] == "two"


def test_jsonl_clips_all_but_the_first_words():
    example = JSONL(inputs="add: {a} and {b}").to_text(RawRecord({"a": "1", "b": "2", "targets": "3"}, "x:1"))
    assert example is not None
    assert example.inputs[slice(*example.clippable)] == "1 and 2"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": "a"}, "x:1: there is no column 'inputs'. Columns: text."),
        ({"inputs": "", "targets": "b"}, "x:1: inputs is empty."),
        ({"inputs": "a", "targets": " "}, "x:1: targets is empty."),
        (
            {"inputs": ["a"], "targets": "b"},
            "x:1: inputs is ['a']. It must be text or a number. All of it as one text is inputs.*.",
        ),
        ({"inputs": "a", "targets": "b"}, "x:1: there is no column 'gold'."),
        ({"inputs": "a", "targets": "b", "gold": []}, "x:1: gold is []. It must be a text or a list of texts"),
        ({"inputs": "a", "targets": "b", "gold": ["b", ""]}, "x:1: gold is ['b', '']. It must be a text or a list"),
    ],
)
def test_jsonl_bad_records(fields, message):
    with pytest.raises(DataError) as error:
        JSONL(references="gold").to_text(RawRecord(fields, "x:1"))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inputs": "fixed"}, "names no column"),
        ({"metrics": ["sqad"]}, "there is no 'sqad'. Did you mean squad"),
        ({"metrics": []}, "no metric gives no score 'exact_match'"),
        ({"metrics": [{"name": "squad"}]}, "main_metric: squad gives no score 'exact_match'. "),
        ({"metrics": ["squad"]}, "squad gives no score 'exact_match'. "),
        ({"clip": "body"}, "'body' is not in inputs '{inputs}'. Allowed: inputs."),
    ],
)
def test_jsonl_bad_options(options, message):
    with pytest.raises(ValidationError) as error:
        JSONL(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("task", [SQuAD, SQuADV2])
def test_languages_are_codes(task):
    assert task(language="es-ES").to_text(_record(language="DE")).meta["language"] == "de"
    assert task(language="ES").to_text(_record()).meta["language"] == "es"
    with pytest.raises(DataError, match=r"train\.json:17: language 'spanish' is not a known code"):
        task(language="es").to_text(_record(language="spanish"))
    for wrong in ("spanish", "xx"):
        with pytest.raises(ValidationError, match=f"language '{wrong}' is not a known code. Allowed: ar, bg"):
            task(language=wrong)


def test_padded_columns_are_joined_by_single_spaces():
    example = SQuAD(pad_punctuation=True).to_text(_record(context="'Rollo' came."))
    assert example and example.inputs == "question: Who ? context: ' Rollo ' came ."


def test_a_task_of_one_s_own_without_sample_has_the_columns_of_its_template(tmp_path, monkeypatch):
    """A run of such a task ended with an internal error after the training, at its model card."""
    (tmp_path / "tasks").mkdir()
    own = '"""Mine."""\n\nfrom fivetune.tasks.jsonl import JSONL\n\n\nclass Bare(JSONL):\n    pass\n'
    (tmp_path / "tasks" / "bare.py").write_text(own)
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    monkeypatch.setattr(fivetune.tasks, "__path__", list(fivetune.tasks.__path__))
    task = load_task("bare", {"inputs": "{colour} {size}"})
    assert list(list_input_columns(task)) == ["colour", "size"]
    sys.modules.pop("fivetune.tasks.bare")
