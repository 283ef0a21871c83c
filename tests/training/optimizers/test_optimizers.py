"""Every optimizer: the contract of fivetune/training/optimizers; then what each does by itself."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import fivetune
from fivetune import plugins
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.training.optimizers import _batched_adafactor
from fivetune.training.optimizers._batched_adafactor import BatchedAdafactor
from fivetune.training.optimizers.adafactor import Adafactor
from fivetune.training.optimizers.adamw import AdamW
from fivetune.training.optimizers.adamw_8bit import AdamW8bit
from fivetune.training.optimizers.adamw_rms import AdamWRMS
from fivetune.training.optimizers.lion import Lion
from fivetune.training.optimizers.muon import Muon
from fivetune.training.optimizers.schedule_free import ScheduleFree
from fivetune.training.optimizers.sgd import SGD

OPTIMIZERS = plugins.list_plugins("optimizers")
SIZE = 64
PAGE = (Path(fivetune.__file__).parents[1] / "docs" / "optimizers.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Quadratic:
    """Half the squared distance of a matrix and a vector from where they should be."""

    def __init__(self, options: Any, *, seed: int = 0, size: int = SIZE, kind: str = "matrix") -> None:
        random = torch.Generator().manual_seed(seed)
        self.goals = [torch.randn(size, size, generator=random), torch.randn(size, generator=random)]
        self.weights = [torch.nn.Parameter(torch.randn(goal.shape, generator=random)) for goal in self.goals]
        matrix, vector = self.weights
        self.optimizer = options.build([{"params": [matrix], "kind": kind}, {"params": [vector], "weight_decay": 0.0}])

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
    return plugins.load_plugin("optimizers", name)


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


@pytest.mark.parametrize("kind", ["matrix", "table"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_takes_the_declared_bytes(name, kind):
    options, size = options_of(name)(), 4 * SIZE  # the tables of 8-bit numbers take 2 KiB
    problem = Quadratic(options, size=size, kind=kind)
    problem.run(2)
    state = problem.optimizer.state[problem.weights[0]]
    measured = sum(v.numel() * v.element_size() for v in state.values() if torch.is_tensor(v)) / size**2
    assert measured == pytest.approx(options.get_state_bytes(kind), rel=0.01, abs=0.08)


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
    [
        ({"lr": 0}, "greater than 0"),
        ({"lr": 11}, "less than or equal to 10"),
        ({"lrr": 1}, "Extra inputs"),
        ({"weight_decay": -1}, "greater than or equal to 0"),
    ],
)
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
        ({}, True),
        ({"preset": "hf"}, False),
        ({"scale_parameter": True}, True),
        ({"preset": "hf", "scale_parameter": False}, False),
    ],
)
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


@pytest.mark.parametrize("options", [{}, {"preset": "hf", "beta1": 0.9, "weight_decay": 0.1}])
def test_adafactor_skips_a_step_on_the_device(options):
    """As torch's fused optimizers: with a flag of 1 nothing changes, with one of 0 the step is the plain one."""
    plain, flagged = (Quadratic(Adafactor(**options)) for _ in range(2))
    flagged.optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    for problem in (plain, flagged):
        problem.run(3)
    for one, other in zip(plain.weights, flagged.weights, strict=True):
        torch.testing.assert_close(one, other)
    before = copy.deepcopy([flagged.weights, [*flagged.optimizer.state.values()]])
    flagged.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    for weight in flagged.weights:
        weight.grad = torch.full_like(weight, float("nan"))
    flagged.optimizer.step()
    for one, other in zip(before[0], flagged.weights, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(before[1], flagged.optimizer.state.values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one if "exp" in name)


def test_relative_step_makes_its_own_rate():
    options = Adafactor(relative_step=True, warmup_init=True, preset="hf")
    problem = Quadratic(options)
    problem.run(5)
    assert options.effective_lr(problem.optimizer) == pytest.approx(5e-6)
    assert [group["lr"] for group in problem.optimizer.param_groups] == [None, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 1e-3, "relative_step": True}, "lr 0.001 is given together with relative_step, which computes its own"),
        ({"scale_parameter": False}, "scale_parameter False contradicts preset t5-paper. Set preset: hf"),
        ({"preset": "hf", "scale_parameter": True}, "contradicts preset hf. Set preset: t5-paper"),
        ({"warmup_init": True}, "warmup_init belongs to relative_step. Set relative_step: true or drop warmup_init"),
    ],
)
def test_contradictions_are_refused(options, words):
    with pytest.raises(ValidationError, match=words):
        Adafactor(**options)


SHAPES = [(), (48,), (48,), (8, 6), (48, 16), (48, 16), (48, 16), (2, 3, 48, 16), (300, 16)]
VARIANTS = {
    "t5-paper": {"lr": 1e-3},
    "hf": {"lr": 1e-3, "scale_parameter": False},
    "relative": {"relative_step": True, "warmup_init": True},
    "relative without warm-up": {"relative_step": True, "scale_parameter": False},
    "momentum": {"lr": 1e-3, "beta1": 0.9},
    "decay": {"lr": 1e-3, "weight_decay": 0.1, "clip_threshold": 0.5, "decay_rate": -0.6},
}


def both(variant: str, *, dtype: torch.dtype = torch.float32) -> list[torch.optim.Optimizer]:
    """transformers' Adafactor and ours over equal tensors of many shapes, one of which never gets a gradient."""
    from transformers.optimization import Adafactor as Original

    random = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=random).to(dtype) for shape in [*SHAPES, (3, 3)]]
    options = {"relative_step": False, **VARIANTS[variant]}
    theirs, ours = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    original = Original(theirs, **options)
    return [original, BatchedAdafactor(ours, original.defaults)]


def train(optimizers: list[torch.optim.Optimizer], num_steps: int, *, seed: int = 1) -> None:
    """Steps with the same gradients of all sizes, rows of zeros and gaps among them, at a rate that changes."""
    random = torch.Generator().manual_seed(seed)
    for step in range(num_steps):
        sizes = 10 ** torch.randint(-4, 2, (len(SHAPES),), generator=random).float()
        grads = [torch.randn(s, generator=random) * size for s, size in zip(SHAPES, sizes, strict=True)]
        grads[4][7] = 0
        for optimizer in optimizers:
            parameters = optimizer.param_groups[0]["params"]
            for i, grad in enumerate(grads):
                parameters[i].grad = None if i == 5 and step % 3 == 0 else grad.to(parameters[i].dtype)
            if optimizer.param_groups[0]["lr"]:
                optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step % 5)
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("block", [64, 1 << 18])
@pytest.mark.parametrize("variant", VARIANTS)
def test_50_steps_are_those_of_transformers(variant, block, monkeypatch):
    monkeypatch.setattr(_batched_adafactor, "BLOCK", {"cpu": block})
    optimizers = both(variant)
    train(optimizers, 50)
    theirs, ours = (o.param_groups[0]["params"] for o in optimizers)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(o.param_groups[0]["params"][-1], theirs[-1]) for o in optimizers)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_of_either_load_into_the_other(variant):
    optimizers = both(variant)
    train(optimizers, 5)
    states = [copy.deepcopy(o.state_dict()) for o in optimizers]
    for a, b in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
        assert list(a) == list(b)
        torch.testing.assert_close(
            {k: v for k, v in b.items() if k != "RMS"}, {k: v for k, v in a.items() if k != "RMS"}
        )
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for optimizer, state in zip(optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    train(optimizers, 5, seed=2)
    theirs, ours = (o.param_groups[0]["params"] for o in optimizers)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bf16_weights_are_stepped_in_fp32():
    optimizers = both("t5-paper", dtype=torch.bfloat16)
    train(optimizers, 5)
    theirs, ours = (o.param_groups[0]["params"] for o in optimizers)
    torch.testing.assert_close(ours, theirs, rtol=8e-3, atol=1e-6)
    assert optimizers[1].state[ours[4]]["exp_avg_sq_row"].dtype == torch.float32


def test_no_step_waits_for_a_value(monkeypatch):
    def waits(*_):
        raise AssertionError("a value was read from the device")

    optimizer = both("momentum")[1]
    for name in ("item", "__float__", "__int__", "__bool__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, waits)
    train([optimizer], 2)


# --- adamw ---


def test_adamw_is_torchs_with_these_settings():
    optimizer = Quadratic(AdamW(lr=1e-2, beta1=0.8, beta2=0.9, eps=1e-6)).optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert {key: optimizer.defaults[key] for key in ("lr", "betas", "eps", "fused")} == {
        "lr": 1e-2,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        "fused": True,
    }


# --- lion, muon, sgd, adamw_rms ---


def test_lion_steps_by_the_sign():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = Lion(lr=0.1, weight_decay=0.5, beta1=0.5, beta2=0.8).build([{"params": [weight]}])
    weight.grad = torch.tensor([4.0, -1.0, 0.0])
    optimizer.step()  # the mean of nothing and the gradient; 5 % of decay
    assert weight.tolist() == pytest.approx([0.95 - 0.1, -1.9 + 0.1, 2.85])
    assert optimizer.state[weight]["exp_avg"].tolist() == pytest.approx([0.8, -0.2, 0.0])
    weight.grad = torch.tensor([-0.5, -1.0, 0.0])
    optimizer.step()  # 0.5 * 0.8 - 0.5 * 0.5 is positive
    assert weight.tolist() == pytest.approx([0.85 * 0.95 - 0.1, -1.8 * 0.95 + 0.1, 2.85 * 0.95])


def test_adamw_rms_is_adamw_where_the_weights_have_size_one():
    def run(options: Any, **given: Any) -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        weights = [torch.nn.Parameter(torch.ones(8, 4)), torch.nn.Parameter(torch.ones(5))]
        optimizer = options(lr=1e-2, weight_decay=0.1, **given).build([{"params": weights}])
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random)
        optimizer.step()
        return weights

    for ours, theirs in zip(run(AdamWRMS), run(AdamW), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_adamw_rms_scales_by_the_size_of_the_tensor():
    small, large = torch.nn.Parameter(torch.full((4,), 0.5)), torch.nn.Parameter(torch.full((4,), 2.0))
    empty = torch.nn.Parameter(torch.zeros(8))
    optimizer = AdamWRMS(lr=0.1, min_rms=0.01).build([{"params": [small, large, empty]}])
    for weight in (small, large, empty):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert [weight[0].item() for weight in (small, large, empty)] == pytest.approx([0.45, 1.8, -0.001])
    expected = 0.1 * (4 * 0.5 + 4 * 2.0 + 8 * 0.01) / 16
    assert AdamWRMS(lr=0.1).effective_lr(optimizer) == pytest.approx(expected)


def test_muon_updates_matrices_and_adamw_the_rest():
    matrix, table, norm = (torch.nn.Parameter(torch.randn(*shape)) for shape in [(6, 4), (9, 4), (4,)])
    groups = [{"params": [matrix]}, {"params": [table], "kind": "table"}, {"params": [norm], "weight_decay": 0.0}]
    before = matrix.detach().clone()
    optimizer = Muon(lr=0.01, weight_decay=0.1).build(groups)
    for weight in (matrix, table, norm):
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert [sorted(optimizer.state[weight]) for weight in (matrix, table, norm)] == [
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq", "step"],
        ["exp_avg", "exp_avg_sq", "step"],
    ]
    assert {group["params"][0].dim(): group["weight_decay"] for group in optimizer.param_groups} == {2: 0.1, 1: 0.0}
    update = (before * (1 - 0.01 * 0.1) - matrix.detach()) / 0.01
    sizes = torch.linalg.svdvals(update) / (0.2 * 6**0.5)
    assert sizes.min() > 0.5 and sizes.max() < 1.3  # nearly orthogonal: five iterations of Newton and Schulz


def test_sgd_is_torchs():
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = SGD(lr=0.1, momentum=0.5).build([{"params": [weight]}])
    for _ in range(2):
        weight.grad = torch.tensor([1.0])
        optimizer.step()
    assert weight.item() == pytest.approx(1.0 - 0.1 - 0.15)


# --- adamw_8bit ---


def test_8bit_adamw_takes_adamws_steps_to_the_precision_of_its_moments():
    exact, small = Quadratic(AdamW(lr=1e-2)), Quadratic(AdamW8bit(lr=1e-2))
    before = exact.weights[0].detach().clone()
    exact.run(10), small.run(10)
    torch.testing.assert_close(small.weights[1], exact.weights[1])  # 64 elements: moments of 32 bits
    ours, theirs = small.weights[0].detach(), exact.weights[0].detach()
    assert 0 < (ours - theirs).norm() < 0.05 * (theirs - before).norm()


@pytest.mark.parametrize(
    ("kind", "bits", "dtype"), [("matrix", 32, torch.uint8), ("table", 32, torch.float32), ("table", 8, torch.uint8)]
)
def test_tables_have_moments_of_table_bits(kind, bits, dtype):
    problem = Quadratic(AdamW8bit(table_bits=bits), kind=kind)
    problem.run(1)
    assert problem.optimizer.state[problem.weights[0]]["state1"].dtype == dtype


def test_8bit_adamw_needs_bitsandbytes(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"bitsandbytes is not installed. Install it: pip install"):
        Quadratic(AdamW8bit())


# --- schedule_free ---


def test_schedule_free_takes_the_steps_of_its_authors():
    from schedulefree import AdamWScheduleFree

    ours = Quadratic(ScheduleFree(lr=1e-2, weight_decay=0.1))
    theirs = [torch.nn.Parameter(weight.detach().clone()) for weight in ours.weights]
    original = AdamWScheduleFree(
        [{"params": theirs[:1]}, {"params": theirs[1:], "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )
    original.train()
    random = torch.Generator().manual_seed(1)
    for step in range(30):
        for optimizer in (ours.optimizer, original):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1, (step + 1) / 10)
        for weight, twin in zip(ours.weights, theirs, strict=True):
            weight.grad = torch.randn(weight.shape, generator=random)
            twin.grad = weight.grad.clone()
        ours.optimizer.step()
        original.step()
    torch.testing.assert_close(ours.weights, theirs)
    original.eval()
    torch.testing.assert_close(ours.optimizer.compute_averages(ours.weights), [weight.detach() for weight in theirs])


def test_schedule_free_counts_the_steps_of_each_weight():
    """A weight that is trained later began with moments that were corrected for steps it had not taken."""
    first, later = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))
    optimizer = ScheduleFree(lr=0.1).build([{"params": [first, later]}])
    for step in range(20):
        first.grad = torch.ones(3)
        later.grad = torch.ones(3) if step == 19 else None
        optimizer.step()
    assert later.tolist() == pytest.approx([-0.1] * 3)
    assert torch.equal(optimizer.compute_averages([later])[0], later)


# --- docs/optimizers.md ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_page_of_optimizers_is_true(name):
    options = options_of(name)
    state = " | ".join(f"{options().get_state_bytes(kind):.3g}" for kind in ("matrix", "table"))
    low, high = options.lr_range
    supports = [options.supports_shards, options.supports_tpu]
    answers = " | ".join("yes" if supported else "no" for supported in supports)
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    assert len(rows) == 3, f"docs/optimizers.md: what {name} is, when to use it, what was measured: a row each"
    assert rows[0].endswith(f" | {state} | {options().lr or 1e-3:g} | {low:g} to {high:g} | {answers} |")


def test_the_page_of_optimizers_names_schedules_and_averages():
    for name in (*plugins.list_plugins("schedules"), "train.ema", "checkpoint.average_best"):
        assert re.search(rf"^\| `{re.escape(name)}(: [\d.]+)?` \|", PAGE, re.MULTILINE), name
