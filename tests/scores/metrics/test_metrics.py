"""Every metric: its worked cases, and what must hold whatever the texts are."""

from __future__ import annotations

import gzip
import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivetune import plugins
from fivetune.errors import ConfigError
from fivetune.scores.metrics import (
    UNANSWERED,
    Scorer,
    compute_percent,
    compute_token_f1,
    list_score_names,
    load_metric,
    normalize_answer,
)
from fivetune.scores.metrics.squad_v2 import SQuADV2, find_best_threshold

SHARED = Path(__file__).parents[4] / "shared" / "data"
METRICS = plugins.list_plugins("metrics")
ALL_CASES = [
    pytest.param(name, case, id=f"{name}-{i}")
    for name in METRICS
    for i, case in enumerate(plugins.import_plugin("metrics", name).CASES)
]


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_cases(name, case):
    metric = plugins.load_plugin("metrics", name)()
    scores = metric.score(case.predictions, case.references, details=case.details)
    assert {key: scores.corpus[key] for key in case.expected} == pytest.approx(case.expected, rel=1e-12)
    assert len(scores.each) == len(case.predictions)
    assert all(0 <= value <= 1 for one in scores.each for value in one.values())
    assert set(scores.corpus) <= set(metric.score_names)
    assert metric.main in scores.corpus
    assert case.source


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_order_does_not_matter(name, case):
    metric = plugins.load_plugin("metrics", name)()
    details = case.details[::-1] if case.details else None
    forward = metric.score(case.predictions, case.references, details=case.details)
    backward = metric.score(case.predictions[::-1], case.references[::-1], details=details)
    assert forward.corpus == pytest.approx(backward.corpus, rel=1e-12)
    assert forward.each == backward.each[::-1]


@pytest.mark.parametrize("name", METRICS)
def test_perfect_beats_empty(name):
    metric = plugins.load_plugin("metrics", name)()
    references = [("42", "forty-two"), ("41",)]
    perfect = metric.score(["42", "41"], references).corpus[metric.main]
    empty = metric.score(["", ""], references).corpus[metric.main]
    assert (perfect > empty) == metric.higher_is_better
    assert perfect in (0, 100)
    assert metric.source


@pytest.mark.parametrize(("name", "case"), ALL_CASES)
def test_a_missing_prediction_is_wrong_everywhere(name, case):
    metric = plugins.load_plugin("metrics", name)()
    known = case.details or [{}] * len(case.references)
    meta = [{key: value for key, value in one.items() if key != "answer"} for one in known]
    details = [{**one, "candidates": [UNANSWERED], "no_answer_score": 2.0} for one in meta]
    scores = metric.score([UNANSWERED] * len(case.references), case.references, details=details)
    worst = 0 if metric.higher_is_better else 1
    assert {value for one in scores.each for value in one.values()} == {worst}
    assert scores.corpus[metric.main] == scores.corpus.get(f"best_{metric.main}", 100 * worst) == 100 * worst


def test_languages_are_codes():
    references, texts = [("casa",)], ["la casa"]
    for code in ("ES", "es-ES"):
        assert (
            plugins.load_plugin("metrics", "mlqa")(language=code).score(texts, references).corpus["mlqa_exact"] == 100
        )
    with pytest.raises(ValueError, match="language 'spanish' is not a known code"):
        plugins.load_plugin("metrics", "mlqa")().score(texts, references, details=[{"language": "spanish"}])


@given(st.text(), st.text())
def test_normalize_answer(text, other):
    once = normalize_answer(text)
    assert normalize_answer(once) == once
    assert not set(once) & set(string.punctuation)
    assert not {"a", "an", "the"} & set(re.split(r"\W", once))
    assert once == once.strip()
    assert normalize_answer(f"{text} {other}").split() == once.split() + normalize_answer(other).split()


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_token_f1(one, other):
    f1 = compute_token_f1(one, other)
    assert f1 == pytest.approx(compute_token_f1(other, one))
    assert 0 <= f1 <= 1 + 1e-12
    assert (f1 == 1.0) == (bool(one) and sorted(one) == sorted(other))


def test_a_word_counts_as_often_as_both_texts_have_it():
    assert compute_token_f1(["a", "a"], ["a"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", ["squad", "squad_v2"])
def test_the_best_of_several_gold_answers_counts(name):
    metric = plugins.load_plugin("metrics", name)()
    (one,) = metric.score(["the red hat"], [("a blue coat", "red hat", "red")]).each
    assert set(one.values()) == {1}


def _leanings(values):
    return [{"no_answer_score": value} for value in values]


@given(st.lists(st.tuples(st.text(), st.lists(st.text(), min_size=1), st.floats(-2, 2)), min_size=1))
def test_squad_v2_on_any_text(rows):
    predictions, references, leanings = zip(*rows, strict=True)
    corpus = SQuADV2(no_answer_threshold=2.0).score(predictions, references, details=_leanings(leanings)).corpus
    assert corpus["exact"] <= corpus["f1"] + 1e-9
    assert corpus["best_exact"] <= corpus["best_f1"] + 1e-9 <= 100 + 2e-9
    assert corpus.get("HasAns_total", 0) + corpus.get("NoAns_total", 0) == corpus["total"] == len(rows)


def test_threshold_turns_predictions_into_no_answer():
    scores = SQuADV2(no_answer_threshold=0.5).score(["x", "y"], [("x",), ("",)], details=_leanings([0.6, 0.6]))
    assert scores.each == [{"exact": 0, "f1": 0}, {"exact": 1, "f1": 1}]


def test_a_best_threshold_gives_its_score():
    """Fault D: the walk stopped between equal no-answer scores, and reported a score that no threshold gives."""
    best, threshold = find_best_threshold(
        [1.0, 0.0], predictions=["x", "y"], answerable=[True, False], no_answer_scores=[0.5, 0.5]
    )
    assert (best, threshold) == (50.0, 0.0)
    assert find_best_threshold(
        [1.0, 0.0], predictions=["x", "y"], answerable=[True, False], no_answer_scores=[0.5, 0.6]
    ) == (100.0, 0.5)


def test_articles_go_after_the_punctuation():
    assert normalize_answer("a.m. the-end") == "am theend"  # articles first would leave "m. -end"


def test_several_metrics_keep_all_scores():
    scores = Scorer(["squad", "squad_v2"]).score(["", "x"], [["the"], ["x"]])
    assert (scores.corpus["f1"], scores.corpus["squad_v2_f1"], scores.corpus["total"]) == (50.0, 100.0, 2)
    assert scores.each[0] == {"exact": 1, "f1": 0, "squad_v2_exact": 1, "squad_v2_f1": 1}
    assert set(scores.corpus) <= set(list_score_names(["squad", "squad_v2"]))


def test_percent_adds_from_left_to_right():
    assert compute_percent([1e16, 1.0, -1e16], 1) == 0.0  # compensated summation would give 100


@pytest.mark.skipif(not SHARED.exists(), reason="../shared with the published prediction files is absent")
def test_published_parts():
    """HasAns and NoAns of reference system B's second file (reference-systems.md, section 2)."""
    dev = json.loads(gzip.decompress((SHARED / "squad_v2/dev-v2.0.json.gz").read_bytes()))
    questions = [qa for article in dev["data"] for paragraph in article["paragraphs"] for qa in paragraph["qas"]]
    found = json.loads(gzip.decompress((SHARED / "reference/igor_finetuned_t5small.json.gz").read_bytes()))
    references = [tuple(answer["text"] for answer in qa["answers"]) or ("",) for qa in questions]
    corpus = SQuADV2().score([found[qa["id"]] for qa in questions], references).corpus
    assert {name: round(corpus[name], 2) for name in ("HasAns_exact", "HasAns_f1", "NoAns_exact")} == {
        "HasAns_exact": 43.56,
        "HasAns_f1": 49.99,
        "NoAns_exact": 50.08,
    }
    assert (corpus["HasAns_total"], corpus["NoAns_total"]) == (5_928, 5_945)


def test_the_name_of_a_score_leads_to_its_metric():
    with pytest.raises(ConfigError, match=r"a score of bleu. Write metrics: \[bleu\], main_metric: chrf"):
        load_metric("chrf")
