"""Classification and tags: the published matrix, the bootstrap, any text."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.bootstrap import compute_intervals
from fivetune.scores.analysis.labels import build_confusion
from fivetune.scores.metrics import Scorer, list_score_names
from fivetune.scores.metrics.by_part import ByPart
from fivetune.scores.metrics.classification import CASES, Classification, ConfusionMatrix, choose_gold_labels
from fivetune.scores.metrics.tags import SEPARATORS, Tags
from fivetune.tasks.bioasq_yesno import BioASQYesNo

WORDS = st.sampled_from(["yes", "no", "maybe", "?"])
PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=30)
PUBLISHED = CASES[0]


def test_published_matrix():
    golds = choose_gold_labels(PUBLISHED.predictions, PUBLISHED.references)
    found = ConfusionMatrix(("none", "low", "high"), Counter(zip(golds, PUBLISHED.predictions, strict=True)))
    assert [found.count_support(label) for label in found.labels] == [5000, 5000, 5000]
    assert [round(found.compute_f1(label), 3) for label in found.labels] == [0.901, 0.999, 0.909]


def test_label_tasks_that_generate_are_told_too():
    """Without eval.score_labels a line does not say whether the model left the label set."""
    meta = {"labels": ["HQ", "LQ"]}
    lines = [Prediction(id=text, references=("HQ",), prediction=text, meta=meta) for text in ("HQ", "huh")]
    found = build_confusion(lines)
    assert found is not None
    assert (found.labels, found.compute_recall("HQ"), found.compute_precision("HQ")) == (("HQ", "huh"), 0.5, 1.0)
    assert build_confusion([Prediction(id="1", references=("HQ",), prediction="HQ")]) is None


@given(PAIRS)
def test_classification_of_any_texts(pairs):
    golds, predictions = zip(*pairs, strict=True)
    references, labels = [(gold,) for gold in golds], ["yes", "no", "maybe"]
    scores = Classification().score(predictions, references, details=[{"labels": labels}] * len(pairs))
    assert all(0 <= value <= 100 + 1e-9 for name, value in scores.corpus.items() if name != "total")
    assert scores.resample is not None
    drawn = scores.resample(np.arange(len(pairs)))
    assert drawn == pytest.approx({name: scores.corpus[name] for name in drawn})


def test_labels_that_never_occur_do_not_lower_macro_f1():
    """As scikit-learn: the labels of gold and prediction. BioASQ's mean is over yes and no, whatever occurs."""
    perfect, labels = [("a",), ("b",), ("a",)], [{"labels": ["a", "b", "c", "d"]}] * 3
    scores = Classification().score(["a", "b", "a"], perfect, details=labels)
    assert scores.corpus["macro_f1"] == 100
    assert scores.resample is not None
    assert scores.resample(np.array([0, 0, 2]))["macro_f1"] == 100  # b is not drawn
    fixed = Scorer(BioASQYesNo.metrics).score(["yes"], [("yes",)], details=[{"labels": ["yes", "no"]}])
    assert (fixed.corpus["macro_f1"], fixed.resample(np.array([0]))["macro_f1"]) == (50, 50)  # pyright: ignore
    assert list_score_names(BioASQYesNo.metrics) == Classification.score_names


@pytest.mark.parametrize("metric", [Classification(), Classification(count_absent=True), Tags(), ByPart()])
@given(PAIRS, st.integers(0, 9))
def test_resampling_is_scoring_again(metric, pairs, seed):
    golds, predictions = zip(*pairs, strict=True)
    rows = np.random.default_rng(seed).integers(len(pairs), size=len(pairs))
    labels = [{"labels": ["yes", "no", "maybe", "?"]}] * len(pairs)
    drawn = metric.score(predictions, [(gold,) for gold in golds], details=labels).resample(rows)
    again = metric.score([predictions[i] for i in rows], [(golds[i],) for i in rows], details=labels)
    assert drawn == pytest.approx({name: again.corpus[name] for name in drawn})


@given(st.text(), st.text())
def test_tag_sets(one, other):
    split = Tags(separator=",").split
    tags = split(one)
    assert split(", ".join(tags)) == tags
    assert set(split(f"{other},{one}")) == {*tags, *split(other)}
    assert all(tag == " ".join(tag.split()) and tag for tag in tags)


def test_empty_sets_of_tags():
    scores = Tags().score(["", "a", ""], [("",), ("",), ("a",)])
    assert [one["exact_set"] for one in scores.each] == [1, 0, 0]
    assert (scores.corpus["micro_f1"], scores.corpus["exact_set"]) == (0, 100 / 3)


@pytest.mark.parametrize("separator", [",", ";", "|", " / ", "\n", "\t"])
def test_tags_may_have_any_separator(separator):
    golds = [(separator.join(tags),) for tags in (("billing", "delivery"), ("billing",))]
    predictions = [separator.join(("billing", "login")), "Billing"]
    given = Tags(separator=separator).score(predictions, golds).corpus
    assert (given["micro_f1"], given["exact_set"]) == (pytest.approx(200 / 3), 50)
    if separator in SEPARATORS:
        assert Tags().score(predictions, golds).corpus == given
    else:
        assert Tags().score(predictions, golds).corpus["micro_f1"] == 50


@given(st.lists(st.tuples(st.text("abc;,"), st.text("abc;,")), min_size=1, max_size=8), st.integers(0, 99))
def test_resampled_tags_are_the_scores_of_the_drawn_rows(pairs, seed):
    predictions, golds = [pair[0] for pair in pairs], [(pair[1],) for pair in pairs]
    rows = np.random.default_rng(seed).integers(len(pairs), size=len(pairs))
    drawn = Tags().score(predictions, golds).resample(rows)
    again = Tags().score([predictions[i] for i in rows], [golds[i] for i in rows])
    assert drawn == pytest.approx({name: again.corpus[name] for name in drawn})


def test_parts_are_scored_apart():
    metrics = [{"name": "by_part", "parts": {"a": ["classification"], "b": ["tags", "exact_match"]},
                "mains": {"a": "macro_f1", "b": "micro_f1"}}]  # fmt: skip
    details = [
        {"source_task": "a", "labels": ["x", "y"]},
        {"source_task": "b"},
        {"source_task": "a", "labels": ["x", "y"]},
    ]
    scores = Scorer(metrics).score(["x", "p, q", "y"], [("x",), ("p",), ("x",)], details=details)
    assert scores.corpus["a_accuracy"] == 50
    assert scores.corpus["mean"] == pytest.approx((100 / 3 + 200 / 3) / 2)
    assert scores.each[1] == {
        "mean": 2 / 3,
        "b_micro_f1": 2 / 3,
        "b_sample_f1": 2 / 3,
        "b_exact_set": 0,
        "b_exact_match": 0,
    }
    assert set(scores.corpus) <= set(list_score_names(metrics))
    found = compute_intervals(scores, num_samples=50)
    assert found["a_accuracy"][0] <= 50 <= found["a_accuracy"][1]
    assert {"mean", "b_micro_f1"} <= set(found)
