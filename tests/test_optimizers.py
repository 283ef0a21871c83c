"""Every optimizer: the contract of fivetune/optimizers; then what each does by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fivetune import plugins
from fivetune.optimizers.adafactor import Adafactor
from fivetune.optimizers.adamw import AdamW

OPTIMIZERS = plugins.names("optimizers")
SIZE = 64


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Quadratic:
    """Half the squared distance of a matrix and a vector from where they should be."""

    def __init__(self, options: Any, *, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.goals = [torch.randn(SIZE, SIZE, generator=random), torch.randn(SIZE, generator=random)]
        self.weights = [torch.nn.Parameter(torch.randn(goal.shape, generator=random)) for goal in self.goals]
        matrix, vector = self.weights
        self.optimizer = options.build([{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}])

    def loss(self) -> torch.Tensor:
        return sum(((w - g) ** 2).sum() / 2 for w, g in zip(self.weights, self.goals, strict=True))  # type: ignore[return-value]

    def run(self, num_steps: int) -> list[float]:
        losses = []
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def options_of(name: str) -> Any:
    return plugins.load("optimizers", name)


# --- the contract ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reduces_a_quadratic_over_the_range_of_rates(name):
    low, high = options_of(name).lr_range
    assert 0 < low < high <= 10
    for lr in (low, (low * high) ** 0.5, high):
        losses = Quadratic(options_of(name)(lr=lr)).run(60)
        assert losses[-1] < losses[20] < losses[0]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deterministic(name):
    first, second = Quadratic(options_of(name)()), Quadratic(options_of(name)())
    assert first.run(20) == second.run(20)
    assert all(torch.equal(a, b) for a, b in zip(first.weights, second.weights, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_round_trips(name):
    straight, stopped = Quadratic(options_of(name)()), Quadratic(options_of(name)())
    straight.run(20)
    stopped.run(10)
    resumed = Quadratic(options_of(name)())
    for weight, saved in zip(resumed.weights, stopped.weights, strict=True):
        weight.data.copy_(saved.data)
    resumed.optimizer.load_state_dict(copy.deepcopy(stopped.optimizer.state_dict()))
    resumed.run(10)
    assert all(torch.equal(a, b) for a, b in zip(straight.weights, resumed.weights, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_takes_the_declared_bytes(name):
    problem = Quadratic(options_of(name)())
    problem.run(2)
    state = problem.optimizer.state[problem.weights[0]]
    measured = sum(v.numel() * v.element_size() for v in state.values() if torch.is_tensor(v)) / SIZE**2
    assert measured == pytest.approx(options_of(name).state_bytes_per_parameter, rel=0.01, abs=0.05)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_effective_rate_follows_the_schedule(name):
    options = options_of(name)(lr=1e-3)
    problem = Quadratic(options)
    assert options.effective_lr(problem.optimizer) in (None, 1e-3)
    problem.run(3)
    full = options.effective_lr(problem.optimizer)
    for group in problem.optimizer.param_groups:
        group["lr"] = group["lr"] / 2
    assert 0 < full <= 1e-2
    assert options.effective_lr(problem.optimizer) == pytest.approx(full / 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": 0}, "greater than 0"), ({"lr": 11}, "less than or equal to 10"), ({"lrr": 1}, "Extra inputs"),
     ({"weight_decay": -1}, "greater than or equal to 0")],
)  # fmt: skip
def test_wrong_options_are_refused(name, options, words):
    with pytest.raises(ValidationError, match=words):
        options_of(name)(**options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norms_are_not_decayed(name):
    problem = Quadratic(options_of(name)(lr=1e-2, weight_decay=0.5))
    assert [group["weight_decay"] for group in problem.optimizer.param_groups] == [0.5, 0.0]


# --- adafactor ---


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True), ({"preset": "hf"}, False), ({"scale_parameter": True}, True),
        ({"preset": "hf", "scale_parameter": False}, False),
    ],
)  # fmt: skip
def test_presets_say_whether_steps_are_scaled(options, expected):
    problem = Quadratic(Adafactor(**options))
    assert [group["scale_parameter"] for group in problem.optimizer.param_groups] == [expected] * 2
    assert [group["lr"] for group in problem.optimizer.param_groups] == [1e-3, 1e-3]


def test_the_presets_take_the_steps_that_they_log():
    for preset, share in (("hf", 1.0), ("t5-paper", 3.0)):
        options = Adafactor(preset=preset, lr=1e-3)  # type: ignore[arg-type]
        problem = Quadratic(options)
        for weight in problem.weights:
            weight.data.fill_(3.0)
        problem.run(1)
        assert options.effective_lr(problem.optimizer) == pytest.approx(1e-3 * share, rel=1e-2)
        step = (problem.weights[0].data - 3.0).square().mean().sqrt()
        assert float(step) == pytest.approx(1e-3 * share, rel=0.05)


def test_relative_step_makes_its_own_rate():
    options = Adafactor(relative_step=True, warmup_init=True, preset="hf")
    problem = Quadratic(options)
    problem.run(5)
    assert options.effective_lr(problem.optimizer) == pytest.approx(5e-6)
    assert [group["lr"] for group in problem.optimizer.param_groups] == [None, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 1e-3, "relative_step": True}, "lr 0.001 is given together with relative_step, which makes its own"),
        ({"scale_parameter": False}, "scale_parameter False contradicts preset t5-paper. Set preset: hf"),
        ({"preset": "hf", "scale_parameter": True}, "contradicts preset hf. Set preset: t5-paper"),
        ({"warmup_init": True}, "warmup_init belongs to relative_step. Set relative_step: true or drop warmup_init"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValidationError, match=words):
        Adafactor(**options)


# --- adamw ---


def test_adamw_is_torchs_with_these_settings():
    optimizer = Quadratic(AdamW(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6)).optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "fused")} == {
        "lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "fused": True,
    }  # fmt: skip
