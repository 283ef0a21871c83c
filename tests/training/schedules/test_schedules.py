"""Every schedule: the contract of fivetune/training/schedules; then the values of each."""

from __future__ import annotations

from math import cos, pi
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fivetune import plugins
from fivetune.training.schedules.cosine import Cosine
from fivetune.training.schedules.inverse_sqrt import InverseSqrt
from fivetune.training.schedules.linear import Linear
from fivetune.training.schedules.wsd import WSD

SCHEDULES = plugins.list_plugins("schedules")
STEPS = st.integers(1, 10_000)


# --- the contract ---


@pytest.mark.parametrize("name", SCHEDULES)
@given(num_steps=STEPS, share=st.floats(0, 0.99), data=st.data())
def test_factors_are_shares_of_the_learning_rate(name, num_steps, share, data):
    schedule = plugins.load_plugin("schedules", name)(warmup_fraction=share)
    step = data.draw(st.integers(0, num_steps - 1))
    assert 0 < schedule.factor(step, num_steps) <= 1
    assert schedule.factor(step, num_steps) == schedule.factor(step, num_steps)


@pytest.mark.parametrize(("share", "num_steps"), [(0.1, 25), (0.1, 35), (0.1, 5), (0.06, 1000), (0.07, 100), (0.0, 9)])
def test_a_share_is_rounded_up_as_transformers_does(share, num_steps):
    from transformers import TrainingArguments  # slow: not in each process that collects tests

    asked: Any = SimpleNamespace(warmup_steps=share)  # a share below 1, as they take it
    theirs = TrainingArguments.get_warmup_steps(asked, num_steps)
    assert Linear(warmup_fraction=share).count_warmup_steps(num_steps) == theirs


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [{"warmup_steps": 4}, {"warmup_fraction": 0.2}])
def test_warmup_rises_in_equal_steps_to_the_full_rate(name, warmup):
    schedule = plugins.load_plugin("schedules", name)(**warmup)
    assert [schedule.factor(step, 20) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_full_rate_comes_first(name):
    schedule = plugins.load_plugin("schedules", name)()
    assert [schedule.factor(0, num_steps) for num_steps in (1, 10)] == [1.0, 1.0]
    factors = [schedule.factor(step, 50) for step in range(50)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warmup_longer_than_the_run_never_gets_there(name):
    schedule = plugins.load_plugin("schedules", name)(warmup_steps=8)
    assert [schedule.factor(step, 2) for step in range(2)] == [0.125, 0.25]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"warmup_steps": 1, "warmup_fraction": 0.1},
            "warmup_steps and warmup_fraction are both given. Keep one of them",
        ),
        ({"warmup_steps": -1}, "greater than or equal to 0"),
        ({"warmup_fraction": 1.0}, "less than 1"),
        ({"warm_up": 1}, "Extra inputs are not permitted"),
    ],
)
def test_wrong_options_are_refused(name, options, words):
    with pytest.raises(ValidationError, match=words):
        plugins.load_plugin("schedules", name)(**options)


# --- each one ---


def test_linear():
    assert [Linear().factor(step, 5) for step in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    ending = Linear(final_fraction=0.5, warmup_steps=1)
    assert [ending.factor(step, 5) for step in range(5)] == pytest.approx([1.0, 1.0, 0.875, 0.75, 0.625])


@given(progress=st.floats(0, 1), final=st.floats(0, 1))
def test_cosine_is_its_formula(progress, final):
    expected = final + (1 - final) * (1 + cos(pi * progress)) / 2
    assert Cosine(final_fraction=final).compute_decay(progress) == pytest.approx(expected, abs=1e-12)
    assert Cosine(final_fraction=final).compute_decay(1.0) == pytest.approx(final, abs=1e-12)


def test_inverse_square_root():
    decay = InverseSqrt(warmup_steps=4)
    assert [decay.factor(step, 100) for step in (3, 4, 16)] == pytest.approx([1.0, 1.0, 0.5])
    assert decay.factor(50, 100) == decay.factor(50, 1000)
    assert InverseSqrt().factor(30_000, 40_000) == pytest.approx(0.5)


def test_wsd():
    linear = WSD(warmup_steps=2, decay_fraction=0.5, final_fraction=0.2)
    assert [linear.factor(step, 10) for step in (1, 2, 6, 8, 9)] == pytest.approx([1.0, 1.0, 1.0, 0.6, 0.4])
    curved = WSD(decay_fraction=1.0, shape="sqrt")
    assert [curved.factor(step, 4) for step in range(4)] == pytest.approx([1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5])
