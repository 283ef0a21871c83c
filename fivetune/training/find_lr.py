"""The learning-rate range test (Smith 2017): real training steps whose rate grows, until the loss blows up.

In: a recipe. Out: a RangeTest with the curve of the loss and a rate to use. The weights are put back; nothing is saved.

The rate grows by the same factor from step to step. The loss is smoothed (an exponential mean, without the bias of its
beginning). Smith takes the range between the rate where the loss begins to fall and the one where it stops falling. In
it, `steepest` is where the smoothed loss falls most per factor of the rate, and `tenth` a tenth of the rate at its
lowest point, one order of magnitude away from where training begins to diverge. The choice is `tenth`: the steepest
fall of a fine-tuning is often that of the first steps, which any rate brings about.

Leslie N. Smith, Cyclical Learning Rates for Training Neural Networks, WACV 2017, section 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fivetune import plugins
from fivetune.config import RunConfig
from fivetune.errors import ConfigError, NumericError
from fivetune.progress import Count, uncounted
from fivetune.telemetry.devices import enough_memory
from fivetune.training.setup import Setup, build_optimizer, seed_everything, set_up
from fivetune.training.update import update_weights

KEEP = 0.9  # of the smoothed loss at each step: a mean over about ten
DIVERGED = 4.0  # times the lowest smoothed loss
NUM_SETTLING = 5  # steps at the start whose slope is noise
RULE = "A tenth of the rate at the lowest point of the smoothed loss (range test of Smith 2017)."


@dataclass(frozen=True, slots=True)
class RangeTest:
    """What the test saw.

    Args:
        lrs, losses, smoothed: one each per step; losses in nats per target token.
        steepest, tenth: what the two rules say; None where the loss never fell.
        lr: the choice, `tenth` in two digits.
        stopped: what ended the test.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    tenth: float | None
    lr: float | None
    stopped: str
    rule: str = RULE


def find_lr(
    config: RunConfig, *,
    low: float | None = None, high: float | None = None, num_steps: int = 100, count: Count = uncounted,
) -> RangeTest:  # fmt: skip
    """Test the rates from `low` to `high` on the recipe's data, model and optimizer, in `num_steps` steps at most.

    Args:
        low, high: default to a tenth of the optimizer's least usual rate and a hundred times the largest one.

    Raises ConfigError for an optimizer that makes its own rate, and for a range that is none.
    """
    if getattr(config.optimizer, "relative_step", False):
        raise ConfigError("optimizer.relative_step: the optimizer makes its own rate, so there is none to find. "
                          "Set optimizer.relative_step false.")  # fmt: skip
    usual = getattr(config.optimizer, "lr_range", (1e-5, 1e-2))
    low, high = float(usual[0] / 10 if low is None else low), float(usual[1] * 100 if high is None else high)
    if not 0 < low < high or num_steps < 2 * NUM_SETTLING:
        raise ConfigError(f"find-lr: from {low:g} to {high:g} in {num_steps} steps is no range. Give --low below "
                          f"--high, both above 0, and at least {2 * NUM_SETTLING} steps.")  # fmt: skip
    setup = set_up(alone(config), count=count)
    if setup.lr(0) is None:
        raise ConfigError(f"optimizer.name {config.optimizer.plugin_name()}: the optimizer makes its own rate, so "
                          "there is none to find. Choose another one.")  # fmt: skip
    rates = [low * (high / low) ** (i / (num_steps - 1)) for i in range(num_steps)]
    with kept(setup), enough_memory():
        losses, stopped = _grow(setup, rates, count)
    return judged(rates[: len(losses)], losses, stopped)


def alone(config: RunConfig) -> RunConfig:
    """The recipe for one process and without evaluation data."""
    return config.model_copy(update={
        "strategy": plugins.load("strategies", "single")(),
        "launch": config.launch.model_copy(update={"nproc": 1}),
        "data": config.data.model_copy(update={"eval": ()}),
    })  # fmt: skip


def _grow(setup: Setup, rates: Sequence[float], count: Count) -> tuple[list[float], str]:
    """The loss before each step, and what ended the steps."""
    losses: list[float] = []
    for step, rate in enumerate(rates):
        count("steps", step + 1, len(rates))
        try:
            losses.append(update_weights(setup, setup.stream.group(step), lr=rate, step=step + 1).loss)
        except NumericError:
            return losses, f"the loss was not finite any more at a rate of {rate:.2g}"
        means = smooth(losses)
        if means[-1] > DIVERGED * min(means):
            return losses, f"at a rate of {rate:.2g} the loss was {DIVERGED:g} times its lowest value"
    return losses, "all rates were tried"


def judged(lrs: Sequence[float], losses: Sequence[float], stopped: str) -> RangeTest:
    """The test with its choice.

    >>> falling = [3 - i / 10 for i in range(20)] + [1.2 + 2 * i for i in range(5)]
    >>> found = judged([1e-5 * 1.5**i for i in range(25)], falling, "")
    >>> round(found.tenth / found.lrs[20], 3), found.steepest < found.lrs[20]
    (0.1, True)
    >>> judged([1e-3, 1e-2, 1e-1], [1.0, 2.0, 9.0], "").lr is None
    True
    """
    means = smooth(losses)
    lowest = min(range(len(means)), key=means.__getitem__, default=0)
    steepest = tenth = None
    if lowest > NUM_SETTLING:
        falls = {i: means[i - 1] - means[i + 1] for i in range(NUM_SETTLING, lowest)}
        steepest, tenth = lrs[max(falls, key=falls.__getitem__)], lrs[lowest] / 10
    choice = None if tenth is None else float(f"{tenth:.1e}")
    return RangeTest(tuple(lrs), tuple(losses), tuple(means), steepest, tenth, choice, stopped)


def smooth(losses: Sequence[float]) -> list[float]:
    """Exponential mean, divided by the weight that it has so far.

    >>> [round(mean, 3) for mean in smooth([2.0, 2.0, 3.0])], smooth([])
    ([2.0, 2.0, 2.369], [])
    """
    mean = weight = 0.0
    means = []
    for loss in losses:
        mean, weight = KEEP * mean + (1 - KEEP) * loss, KEEP * weight + 1 - KEEP
        means.append(mean / weight)
    return means


@contextmanager
def kept(setup: Setup) -> Iterator[None]:
    """Weights, optimizer and seeds are afterwards what they were before."""
    before = {name: p.detach().to("cpu", copy=True) for name, p in setup.model.named_parameters()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in setup.model.named_parameters():
                parameter.copy_(before[name])
                parameter.grad = None
        setup.optimizer = build_optimizer(setup.config, setup.model)
        setup.scaler = setup.place.scaler()
        seed_everything(setup.config.run.seed)
