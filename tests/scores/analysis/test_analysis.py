"""How sure, how calibrated, for whom: against figures by hand and known laws."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivetune.plugins import list_plugins, load_plugin
from fivetune.rundir.records import Candidate, Prediction
from fivetune.scores.analysis.bootstrap import (
    Z,
    compare_paired,
    compute_intervals,
    compute_wilson_interval,
    format_p_value,
)
from fivetune.scores.analysis.calibration import (
    apply_temperature,
    calibrate_prediction,
    compute_calibration_error,
    compute_reliability,
    compute_risk_coverage,
    measure_temperature,
    restore_lines,
)
from fivetune.scores.analysis.slices import compute_slices, find_question_word
from fivetune.scores.analysis.threshold import tune_threshold
from fivetune.scores.metrics.classification import Classification
from fivetune.scores.metrics.squad_v2 import SQuADV2
from fivetune.types import Scores


def of(values, name="exact"):
    return Scores({name: 100 * sum(values) / len(values), "total": len(values)}, [{name: v} for v in values])


def test_bootstrap_of_a_share_agrees_with_wilson():
    (low, high), edges = compute_intervals(of([1] * 300 + [0] * 100))["exact"], compute_wilson_interval(0.75, 400)
    assert (low, high) == (pytest.approx(100 * edges[0], abs=1), pytest.approx(100 * edges[1], abs=1))
    assert compute_intervals(of([1, 0])) == compute_intervals(of([1, 0]))
    assert compute_intervals(Scores({"bleu": 3.0}, [{}, {}])) == compute_intervals(Scores({}, [])) == {}


@pytest.mark.parametrize("value", [0, 1])
def test_a_score_without_any_spread_has_wilson_s_interval(value):
    low, high = compute_intervals(of([value] * 31))["exact"]
    assert (low / 100, high / 100) == pytest.approx(compute_wilson_interval(value, 31)) and high - low > 10


@pytest.mark.parametrize("metric", sorted(set(list_plugins("metrics")) - {"by_part"}))
def test_no_metric_claims_certainty_for_right_answers(metric):
    """Macro F1 of 90 right answers had the interval 100 to 100 beside accuracy's 95.9 to 100."""
    case = {
        "squad_v2": ["a", ""], "yes_no": ["yes", "no"], "classification": ["a", "b"], "tags": ["a, b", "b"],
        "gsm8k": ["#### 3", "#### 4"], "correlation": ["3", "4"], "bleu": ["one two three four five", "a b c d e"],
        "rouge": ["a b", "c d"],
    }.get(metric, ["red", "blue"])  # fmt: skip
    golds = [case[i % 9 == 0] for i in range(90)]
    details = [{"choices": ["red", "blue"], "candidates": [gold]} for gold in golds]
    options = load_plugin("metrics", metric)()
    scores = options.score(golds, [[gold] for gold in golds], details=details)
    whole, found = 100 * 90 / (90 + Z * Z), compute_intervals(scores)
    assert found
    for name, (low, high) in found.items():
        value = scores.corpus[name]
        if not options.higher_is_better:  # 0 to 4.1 is as wide as 95.9 to 100
            value, low, high = 100 - value, 100 - high, 100 - low
        assert (value, high) == (pytest.approx(100), 100), name
        assert 60 < low <= whole + 1e-9, name
        assert low == pytest.approx(whole) or name in ("macro_f1", "yes_accuracy", "no_accuracy") or "Ans_" in name


def test_wilson_s_interval_is_of_the_examples_behind_a_score():
    """10 of 90 are unanswerable; by hand K^2 / sum(1 / n) = 4 / (1 / 80 + 1 / 10) = 35.6 for the mean of two labels."""
    golds = [["", "a"][i >= 10] for i in range(90)]
    found = compute_intervals(SQuADV2().score(golds, [(gold,) for gold in golds]))
    assert [round(found[name][0], 2) for name in ("exact", "HasAns_exact", "NoAns_exact")] == [95.91, 95.42, 72.25]
    labels = compute_intervals(Classification().score(golds, [(gold,) for gold in golds]))
    assert round(labels["macro_f1"][0], 2) == round(100 * 35.5556 / (35.5556 + Z * Z), 2) == 90.25


def test_an_interval_of_equal_partial_scores_has_a_width():
    low, high = compute_intervals(of([0.5] * 31))["exact"]
    assert (low / 100, high / 100) == pytest.approx(compute_wilson_interval(0.5, 31))


@pytest.mark.parametrize("num", [1, 3, 20, 67, 88, 90, 1000])
def test_wilson_s_interval_ends_at_certainty_exactly(num):
    assert compute_wilson_interval(1, num)[1] == 1 and compute_wilson_interval(0, num)[0] == 0


def test_the_95_percent_interval_holds_the_truth_about_95_times_of_100():
    rng, hits = random.Random(0), 0
    for seed in range(200):
        low, high = compute_intervals(of([rng.random() < 0.3 for _ in range(150)]), num_samples=200, seed=seed)["exact"]
        hits += low <= 30 <= high
    assert 0.89 <= hits / 200 <= 0.99


def test_squad_v2_resamples_each_kind_of_question():
    scores = SQuADV2().score(["x", "y", ""], [("x",), ("z",), ("",)])
    assert scores.resample is not None
    again = scores.resample(np.arange(3))
    assert again == pytest.approx({name: scores.corpus[name] for name in again})
    assert scores.resample(np.array([0, 0])) == {"exact": 100, "f1": 100, "HasAns_exact": 100, "HasAns_f1": 100}
    assert "HasAns_f1" in compute_intervals(scores) and "total" not in compute_intervals(scores)


def test_pairing_finds_what_two_intervals_hide():
    rng = random.Random(1)
    base = [float(rng.random() < 0.5) for _ in range(1000)]
    better = [1.0 if i % 50 == 0 else value for i, value in enumerate(base)]
    found = compare_paired(of(better), of(base))["exact"]
    assert 0 < found.low < found.difference < found.high < 3 and found.p_value < 0.01
    assert compare_paired(of(base), of(base))["exact"] == (0, 0, 0, 1)
    names = [name for name in ("f1", "exact") if name in compare_paired(of(base), of(base), names=["f1", "exact"])]
    assert names == ["exact"]


def test_confidence_that_is_a_probability_is_calibrated():
    rng = random.Random(2)
    sure = [rng.random() for _ in range(20_000)]
    right = [rng.random() < p for p in sure]
    assert compute_calibration_error(compute_reliability(sure, right)) < 0.02
    curve = compute_risk_coverage(sure, right)
    assert curve.area == pytest.approx(0.25, abs=0.01)  # the integral of (coverage / 2) over 0 to 1
    assert compute_risk_coverage(sure[::-1], right[::-1]).area == pytest.approx(curve.area)
    assert compute_risk_coverage([0.5] * 4, [1, 0, 0, 0]).risk.tolist() == [0.75] * 4


def question(i, answerable, leaning):
    references = ("a",) if answerable else ("",)
    exact = float(answerable)  # answers everything: right where there is an answer
    return Prediction(
        id=f"q{i}", prediction="a", references=references, scores={"exact": exact}, no_answer_score=leaning
    )


def test_threshold_is_reported_on_questions_that_did_not_choose_it():
    lines = [question(i, i % 2 == 0, 0.2 + 0.6 * (i % 2)) for i in range(200)]
    found = tune_threshold(lines, "exact")
    assert found is not None and found == tune_threshold(lines[::-1], "exact")
    assert (found.threshold, found.tuned, found.held_out) == (0.2, 100, 100)
    assert found.num_tuned + found.num_held_out == 200 and 40 < found.plain < 60 and found.gain.low > 0
    noise = [question(i, i % 2 == 0, random.Random(i).random()) for i in range(400)]
    flattered = tune_threshold(noise, "exact")
    assert flattered is not None and flattered.gain.low < 0 < flattered.tuned
    assert tune_threshold(lines[::2], "exact") is None


@pytest.mark.parametrize(
    ("asked", "word"),
    [
        ("Who is it?", "who"),
        ("In which year?", "which"),
        ("¿Quién fue?", "quién"),
        ("¿Por qué?", "por qué"),
        ("How much is it?", "how much"),
        ("¿En qué año?", "qué"),
        ("Name it.", "other"),
        ("Was Einstein born in Ulm?", "other"),  # an auxiliary in English
        ("Was ist die Hauptstadt?", "was"),
        ("In welchem Jahr war das?", "welchem"),
        ("Quem foi o rei?", "quem"),
        ("Por que o rei fugiu?", "por que"),
        ("Como se chama a cidade?", "como"),
        ("¿Cuántos años dijo que tenía?", "cuántos"),
        ("When Ann came, Bo left. How far did Bo walk?", "how"),
    ],
)
def test_question_words(asked, word):
    assert find_question_word(asked) == word


def test_the_language_of_the_data_decides_what_is_a_question_word():
    assert [find_question_word("was", language) for language in ("en", "de")] == ["other", "was"]


def test_a_p_value_is_not_given_below_what_resampling_can_tell():
    p_value = compare_paired(of([1] * 50), of([0] * 50))["exact"].p_value
    assert format_p_value(p_value) == "< 0.001" and format_p_value(0.0104) == "0.010"


def test_merged_lines_have_no_length_and_no_truncation():
    meta = {"question": "Which gene?"}
    line = Prediction(
        id="1", scores={"f1": 1.0}, num_input_tokens=30, num_clipped_tokens=0, references=("a",), meta=meta
    )
    found = compute_slices([line, replace(line, num_passages=4)], "f1")
    assert [one.value for one in found["question word"]] == ["which"]
    assert [sum(one.num for one in found[name]) for name in ("input length", "truncation", "answerable")] == [1, 1, 2]


def test_slices_count_every_line_once_in_natural_order():
    lines = [
        Prediction(
            id=str(i),
            references=("a " * (1 + i % 12),),
            scores={"f1": i % 3 / 2},
            num_input_tokens=30 * i,
            num_clipped_tokens=0,
            meta={"source_task": f"t{i % 15}"},
        )
        for i in range(120)
    ]
    found = compute_slices(lines, "f1")
    lengths, sources = found["answer length"], found["source task"]
    assert [one.value for one in lengths][0::5] == ["1 word", "over 10 words"]
    assert sum(one.num for one in lengths) == sum(one.num for one in sources) == 120
    assert (len(sources), sources[-1].value) == (13, "other")
    assert all(one.low - 1e-9 <= one.score <= one.high + 1e-9 for group in found.values() for one in group)
    assert found["language"] == []


# --- temperature ---


def draw_answers(num, temperature):
    """Probabilities of a model, whose answers are right as often as it would say at this temperature."""
    rng = np.random.default_rng(0)
    known = 1 / (1 + np.exp(-rng.normal(1.5, 2, num)))
    right = rng.random(num) < apply_temperature(known, temperature)
    return [f"q{i}" for i in range(num)], known.tolist(), right.tolist()


@pytest.mark.parametrize("true", [0.5, 2.0, 4.0])
def test_the_temperature_of_a_wrongly_sure_model_is_found_and_lowers_its_error(true):
    found = measure_temperature(*draw_answers(2000, true))
    assert found and found.helps and found.num == 2000
    assert found.temperature == pytest.approx(true, rel=0.1)
    assert found.error_after < 0.5 * found.error_before


def test_a_temperature_is_kept_only_where_it_helps():
    """At temperature 1 chance alone moves the fit; without right or wrong answers there is none."""
    ids, known, right = draw_answers(2000, 1.0)
    calibrated = measure_temperature(ids, known, right)
    assert calibrated and calibrated.temperature == pytest.approx(1, rel=0.1)
    assert calibrated.nats_after == pytest.approx(calibrated.nats_before, rel=0.01)
    assert measure_temperature(ids, known, [True] * 2000) is None
    assert measure_temperature(ids[:20], known[:20], right[:20]) is None


shares = st.lists(st.floats(1e-6, 1), min_size=1, max_size=6).map(lambda parts: [one / sum(parts) for one in parts])


@given(shares, st.floats(0.05, 20), st.booleans())
def test_a_list_of_answers_adds_up_to_one_at_most_at_every_temperature(parts, temperature, abstains):
    first, *others = [one * 0.999 for one in parts]
    texts = ["" if abstains else "a", *(f"b{i}" for i in range(len(others)))]
    before = Prediction(
        id="q",
        prediction=texts[0],
        confidence=first,
        candidates=tuple(map(Candidate, texts, [first, *others])),
        no_answer_score=first if abstains else (1 - sum([first, *others])) / 2,
    )
    after = calibrate_prediction(before, temperature)
    assert after.confidence == after.candidates[0].score
    listed = [one.score for one in after.candidates]
    assert sum(listed) + (0 if abstains else after.no_answer_score) <= 1 + 1e-9
    assert sorted(listed[1:], reverse=True) == [
        listed[1 + i] for i in sorted(range(len(others)), key=others.__getitem__, reverse=True)
    ]
    if abstains:
        assert after.no_answer_score == after.confidence
    [again] = restore_lines([after], temperature)
    if 1e-9 < after.confidence < 1 - 1e-9:
        assert again.confidence == pytest.approx(first, rel=1e-4)
        assert again.no_answer_score == pytest.approx(before.no_answer_score, rel=1e-4)
