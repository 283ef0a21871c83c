"""Every strategy: the contract of fivetune/strategies."""

from __future__ import annotations

import pytest
import torch

from fivetune import plugins

STRATEGIES = plugins.names("strategies")


def model_with_gradients() -> torch.nn.Module:
    """Two weights with the gradient (3, 4)."""
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    return model


@pytest.mark.parametrize("name", STRATEGIES)
def test_unwrapping_gives_the_plain_model(name):
    strategy, model = plugins.load("strategies", name)(), model_with_gradients()
    assert strategy.unwrap(strategy.wrap(model, "cpu")) is model


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(("limit", "clipped"), [(None, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_clipping_says_the_norm_before(name, limit, clipped):
    strategy, model = plugins.load("strategies", name)(), model_with_gradients()
    norm = strategy.clip(strategy.wrap(model, "cpu"), limit)
    assert float(norm) == pytest.approx(5.0)
    assert float(next(model.parameters()).grad.norm()) == pytest.approx(clipped, rel=1e-4)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_broken_gradient_is_not_hidden(name):
    strategy, model = plugins.load("strategies", name)(), model_with_gradients()
    next(model.parameters()).grad[0, 0] = float("nan")  # type: ignore[index]
    assert not torch.isfinite(strategy.clip(strategy.wrap(model, "cpu"), 1.0))


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_add_up_over_micro_batches(name):
    strategy, model = plugins.load("strategies", name)(), torch.nn.Linear(2, 1, bias=False)
    wrapped = strategy.wrap(model, "cpu")
    for number in range(3):
        with strategy.accumulate(wrapped, is_last=number == 2):
            wrapped(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]  # type: ignore[union-attr]
