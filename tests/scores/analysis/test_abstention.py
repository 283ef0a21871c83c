"""Which answers are withheld so that a promised share of errors holds."""

from __future__ import annotations

from dataclasses import replace
from math import comb
from typing import Any

import numpy as np
import pytest

from fivetune.errors import ConfigError
from fivetune.rundir.abstention_file import Abstention, Level
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.abstention import (
    Silence,
    choose_level,
    choose_silence,
    compute_tail,
    compute_upper_bound,
    count_answers,
    count_needed,
    describe_promise,
    find_error_score,
    find_min_confidence,
    list_promise_facts,
    measure_abstention,
    withhold,
)
from fivetune.scores.analysis.calibration import apply_temperature

# 400 predictions, 40 of them wrong; of the 200 surest one.
FOUND = Abstention("exact", 1.0, 400, "eval", 300, (Level(0.9, 200, 1), Level(0.5, 300, 6), Level(0.0, 400, 40)))


def test_the_tail_is_the_binomial_distribution() -> None:
    for wrong, answered, share in ((0, 59, 0.05), (3, 40, 0.1), (7, 12, 0.3), (12, 12, 0.5)):
        terms = [comb(answered, k) * share**k * (1 - share) ** (answered - k) for k in range(wrong + 1)]
        assert compute_tail(wrong, answered, share) == pytest.approx(sum(terms), rel=1e-9)
    assert 0 < compute_tail(4_900, 100_000, 0.05) < 0.1  # no factorial overflows


def test_the_bound_of_clopper_and_pearson() -> None:
    """1 - 0.05^(1/n) without an error; 10 of 100 are 16.37 % at most, as beta tables have it."""
    assert compute_upper_bound(0, 100) == pytest.approx(1 - 0.05 ** (1 / 100))
    assert compute_upper_bound(10, 100) == pytest.approx(0.16372, abs=2e-5)


def test_the_promise_is_broken_in_at_most_one_of_twenty_choices() -> None:
    """Answers whose true risk is known: right with probability p^0.7, over 100 evaluations of 300 answers."""
    generator = np.random.default_rng(0)
    everything = np.sort(generator.beta(2, 0.5, 50_000))[::-1]
    risk = np.cumsum(1 - everything**0.7) / np.arange(1, len(everything) + 1)
    num_broken = num_chosen = 0
    for _ in range(100):
        known = generator.beta(2, 0.5, 300)
        wrong = generator.random(300) > known**0.7
        level = choose_level(count_answers(known.tolist(), wrong.tolist()), 0.1)
        if level:
            num_chosen += 1
            place = np.searchsorted(-everything, -level.probability, side="right") - 1
            num_broken += bool(risk[place] > 0.1)
    assert num_chosen > 50 and num_broken <= 5


def test_levels_are_fixed_before_the_answers_are_seen() -> None:
    """They do not depend on the answers, and the last one has them all."""
    levels = count_answers([1.0, 0.9999999999, 0.3, 0.0], [False, False, True, True])
    assert levels[-1] == Level(0.0, 4, 2) and levels[0].answered == 2
    more = count_answers([0.8, 0.3], [True, False])
    assert more[-1].probability == 0.0 and more[0].probability < 0.8


def test_the_sequence_ends_with_the_first_level_that_fails() -> None:
    level = choose_level(FOUND.levels, 0.05)
    assert level and level.probability == 0.5
    assert choose_level((*FOUND.levels[:1], Level(0.6, 250, 40), *FOUND.levels[1:]), 0.05) == FOUND.levels[0]
    assert choose_level(FOUND.levels, 0.2) == FOUND.levels[-1]
    assert choose_level(FOUND.levels, 0.01) is None
    # Too few answers to show anything are passed over, whatever they are.
    assert choose_level((Level(0.99, 3, 3), *FOUND.levels), 0.05) == level


def test_how_many_examples_would_be_needed() -> None:
    assert count_needed((Level(0.9, 100, 1), Level(0.0, 100, 1)), 0.02) == 528
    assert compute_tail(5, 528, 0.02) <= 0.05 < compute_tail(5, 510, 0.02)  # as 1 of 100
    assert count_needed((Level(0.0, 400, 40),), 0.05) is None
    with pytest.raises(ConfigError, match="No confidence has fewer errors"):
        find_min_confidence("runs/a", replace(FOUND, levels=(Level(0.0, 400, 40),)), 0.05, 1.0)
    with pytest.raises(ConfigError, match=r"About \d+ predictions"):
        find_min_confidence("runs/a", replace(FOUND, num=100, levels=(Level(0.0, 100, 1),)), 0.02, 1.0)


def test_a_graded_score_is_no_right_or_wrong() -> None:
    lines = [Prediction(id="1", confidence=0.5, scores={"f1": 0.5, "exact": 0.0})]
    assert find_error_score(lines, "f1") == "exact"
    assert find_error_score(lines, "f1", is_graded=True) == "f1"
    assert find_error_score([replace(lines[0], scores={"rouge1": 0.5})], "rouge1") is None
    assert find_error_score([replace(lines[0], scores={})], "bleu") is find_error_score([], "f1") is None
    found = measure_abstention(lines, "f1", error_below=0.4, split="eval", step=3)
    assert found and found.levels[-1] == Level(0.0, 1, 0)
    assert measure_abstention([replace(lines[0], confidence=None)], "f1", split="eval", step=3) is None


def test_the_threshold_is_on_the_scale_of_the_confidences() -> None:
    assert find_min_confidence("runs/a", FOUND, 0.05, 1.0) == 0.5
    level = replace(FOUND, levels=FOUND.levels[:1])
    assert find_min_confidence("runs/a", level, 0.05, 2.0) == float(apply_temperature(0.9, 2.0))
    assert find_min_confidence("runs/a", FOUND, 0.2, 2.0) == 0  # all answers


def choose(**changes: Any) -> Silence | None:
    given: dict[str, Any] = {"abstention": FOUND, "temperature": 1.0, "overrides": {}, **changes}
    return choose_silence("runs/a", given.pop("abstention"), given.pop("temperature"), given.pop("overrides"), **given)


def test_what_is_given_comes_before_what_is_kept() -> None:
    kept = replace(FOUND, max_error=0.05)
    assert choose() is None and choose(abstention=None) is None
    assert choose(max_error="5%") == choose(abstention=kept) == Silence(0.5, "at most 5% of the answers are wrong")
    assert choose(abstention=kept, min_confidence=0.7) == Silence(0.7)
    assert choose(abstention=kept, min_confidence=0) is None
    assert choose(abstention=kept, overrides={"eval.batch_size": 3, "data.eval": "a.csv", "device": "cpu"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_error": "5"}, "5% or 0.05"),
        ({"max_error": "much"}, "5% or 0.05"),
        ({"max_error": 0}, "5% or 0.05"),
        ({"max_error": "1%"}, "no confidence keeps it on 400 predictions of eval"),
        ({"min_confidence": 1.5}, "Allowed are 0 to 1"),
        ({"min_confidence": float("nan")}, "Allowed are 0 to 1"),
        ({"min_confidence": 0.5, "max_error": "5%"}, "Leave one out"),
        ({"abstention": None, "max_error": "5%"}, "fivetune evaluate runs/a --max-error 5%"),
        ({"max_error": "5%", "overrides": {"eval.num_beams": 4}}, "eval.num_beams 4"),
        ({"abstention": replace(FOUND, max_error=0.05), "overrides": {"eval.num_beams": 4}}, "eval.num_beams 4"),
    ],
)
def test_a_promise_that_cannot_be_kept_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose(**changes)


def test_an_unsure_answer_is_withheld_with_its_reason() -> None:
    silence = Silence(0.8, "at most 5% of the answers are wrong")
    low, high = (Prediction(id="1", prediction="refund", confidence=share) for share in (0.4, 0.8))
    found = withhold(low, silence)
    assert (found.prediction, found.unsure, found.withheld, found.confidence) == ("", True, "refund", 0.4)
    assert found.reason == "confidence 0.4 is below 0.8, from which on at most 5% of the answers are wrong"
    assert withhold(high, silence) == high and withhold(low, None) == low
    assert withhold(replace(low, confidence=None), silence).unsure
    skipped = Prediction(id="2", skipped="no text")
    assert withhold(skipped, silence) == skipped


def test_what_a_promise_says() -> None:
    facts = list_promise_facts(replace(FOUND, max_error=0.05), 1.0)
    assert (facts["num_examples"], facts["num_answered"], facts["num_wrong"]) == (400, 300, 6)
    assert "75.0% were answered, 2.0% of them wrong" in describe_promise(facts)
    assert list_promise_facts(FOUND, 1.0) == {}
