"""Numbers as text: T5's rounding, what is refused, and the scores of written numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fivetune.errors import DataError, MissingLabelError, RecordError
from fivetune.scores.analysis.bootstrap import compute_intervals
from fivetune.scores.metrics.correlation import Correlation, parse_number, rank_numbers
from fivetune.tasks.regression import Regression
from fivetune.types import RawRecord


def read(value: object, **options: Any) -> Any:
    return Regression(**options).to_text(RawRecord({"id": "1", "text": "a hat", "score": value}, "a.tsv:2"))


@pytest.mark.parametrize(
    ("value", "written"),
    # T5 takes half steps to the even one: 2.5 is 12.5 steps of 0.2
    [("5.000", "5.0"), (2.57, "2.6"), (2.5, "2.4"), ("2,25", "2.2"), (3, "3.0"), (-0.04, "0.0"), ("1e1", "10.0")],
)
def test_numbers_are_rounded_as_t5_does(value: object, written: str) -> None:
    example = read(value)
    assert example.targets == written
    assert float(example.references[0]) == pytest.approx(parse_number(str(value)))


@pytest.mark.parametrize(("step", "written"), [(0.05, "3.80"), (0.5, "4.0"), (1, "4"), (5, "5"), (1e-3, "3.814")])
def test_a_step_has_its_decimals(step: float, written: str) -> None:
    assert read("3.814", step=step).targets == written


@pytest.mark.parametrize(
    ("value", "options", "kind"),
    [
        ("good", {}, RecordError),
        ("1,200", {}, RecordError),
        (True, {}, RecordError),
        ("inf", {}, RecordError),
        ("38", {"high": 5}, RecordError),
        ("-1", {"low": 0}, RecordError),
        ("", {}, MissingLabelError),
        (None, {}, MissingLabelError),
        ("nan", {}, MissingLabelError),
    ],
)
def test_what_is_no_number_is_refused(value: object, options: dict[str, Any], kind: type[DataError]) -> None:
    with pytest.raises(kind) as caught:
        read(value, **options)
    assert type(caught.value) is kind
    assert str(caught.value).startswith("a.tsv:2: score is ")


def test_a_range_has_two_ends() -> None:
    with pytest.raises(ValidationError, match="is not below high"):
        Regression(low=5, high=0)


def test_a_record_to_predict_needs_no_number() -> None:
    task = Regression()
    assert task.to_text(RawRecord({"text": "a"}, "a:1"), labelled=False).references == ()
    assert task.to_score(RawRecord({"score": 2}, "a:1")).references == ("2.0",)


def test_a_text_that_is_no_number_lowers_the_correlation_and_is_counted() -> None:
    golds = [(str(number),) for number in range(6)]
    right = Correlation().score([gold for [gold] in golds], golds).corpus
    lost = Correlation().score(["0", "1", "2", "3", "4", "none"], golds).corpus
    t5 = Correlation().score(["0", "1", "2", "3", "4", "-1"], golds).corpus  # T5's default for STS-B
    assert right["pearson"] == right["spearman"] == pytest.approx(100)
    assert lost["pearson"] == pytest.approx(t5["pearson"])
    assert lost["spearman"] < 50
    assert lost["parsed"] == pytest.approx(500 / 6)


def test_ranks_and_correlation_equal_the_definition() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, 200) / 2, rng.integers(0, 9, 200) / 2
    ranks = [np.mean([place + 1 for place, other in enumerate(sorted(x)) if other == one]) for one in x]
    assert rank_numbers(x).tolist() == ranks
    scores = Correlation().score([*map(str, x)], [(str(one),) for one in y])
    assert scores.corpus["pearson"] == pytest.approx(100 * np.corrcoef(x, y)[0, 1])
    assert scores.corpus["spearman"] == pytest.approx(100 * np.corrcoef(rank_numbers(x), rank_numbers(y))[0, 1])
    low, high = compute_intervals(scores)["pearson"]
    assert low < scores.corpus["pearson"] < high


def test_a_gold_answer_is_a_number() -> None:
    with pytest.raises(DataError, match="'red' is no number"):
        Correlation().score(["1"], [("red",)])
