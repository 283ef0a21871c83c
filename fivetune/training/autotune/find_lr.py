"""Learning-rate range test (Smith 2017): training steps with a growing learning rate, until the loss diverges.

In: a recipe. Out: a RangeTest with the loss curve and a rate to use. The weights are restored; nothing is saved.

The rate grows by a constant factor per step. The loss is smoothed (bias-corrected exponential moving average). Smith
takes the range from the rate where the loss begins to fall to the rate where it stops falling. Within it, `steepest`
is the rate where the smoothed loss falls most per factor of the rate, and `tenth` a tenth of the rate at its minimum,
one order of magnitude below the onset of divergence. The choice is `tenth`: in fine-tuning, the steepest fall is often
the fall of the first steps, which every rate causes.

Leslie N. Smith, Cyclical Learning Rates for Training Neural Networks, WACV 2017, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from fivetune import plugins
from fivetune.config import RunConfig
from fivetune.config.data import NO_SPLIT
from fivetune.config.sections import DEFAULT_STRATEGY
from fivetune.data.store.stream import TrainingStream
from fivetune.errors import ConfigError, NumericError, translate_oom_errors
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.rundir.range_test import RangeTest
from fivetune.training.autotune.probe import restore_learner
from fivetune.training.setup import set_up
from fivetune.training.step.groups import build_optimizer
from fivetune.training.step.learner import Learner
from fivetune.training.step.update import train_step

SMOOTHING = 0.9  # weight of the previous average: a mean over about ten steps
DIVERGENCE_FACTOR = 4.0  # times the lowest smoothed loss
NUM_SETTLING = 5  # steps at the start whose slope is noise
RULE = "A tenth of the rate at the lowest point of the smoothed loss (range test of Smith 2017)."


def find_lr(
    config: RunConfig,
    *,
    low: float | None = None,
    high: float | None = None,
    num_steps: int = 100,
    on_progress: ProgressCallback = ignore_progress,
) -> RangeTest:
    """Test the rates from `low` to `high` on the recipe's data, model and optimizer, in at most `num_steps` steps.

    Args:
        low, high: default: a tenth of the lower and a hundred times the upper end of the optimizer's `lr_range`.

    Raises ConfigError for an optimizer that computes its own rate, and for an empty range.
    """
    if config.optimizer.computes_rate:
        raise ConfigError(
            "optimizer.relative_step: the optimizer computes its own rate, so there is none to find. "
            "Set optimizer.relative_step false."
        )
    usual = config.optimizer.lr_range
    if low is None:
        low = usual[0] / 10
    if high is None:
        high = usual[1] * 100
    if not 0 < low < high or num_steps < 2 * NUM_SETTLING:
        raise ConfigError(
            f"find-lr: from {low:g} to {high:g} in {num_steps} steps is not a range. Give --low below "
            f"--high, both above 0, and at least {2 * NUM_SETTLING} steps."
        )
    setup = set_up(as_single_process(config), on_progress=on_progress)
    if setup.compute_lr(0) is None:
        raise ConfigError(
            f"optimizer.name {config.optimizer.plugin_name()}: the optimizer computes its own rate, so "
            "there is none to find. Choose another one."
        )
    # Equal factors from step to step: rates differ by orders of magnitude.
    rates = [low * (high / low) ** (i / (num_steps - 1)) for i in range(num_steps)]
    optimizer = build_optimizer(setup.config, setup.learner.model)
    with restore_learner(setup.learner, optimizer) as learner, translate_oom_errors():
        losses, stopped = _run_range_test(learner, setup.data.stream, rates, on_progress)
    return choose_lr(rates[: len(losses)], losses, stopped)


def as_single_process(config: RunConfig) -> RunConfig:
    """The config with a single process and without evaluation data."""
    config = config.replace("launch", nnodes=1, nproc=1).replace("data", eval=(), **NO_SPLIT)
    return config.model_copy(update={"strategy": plugins.load_plugin("strategies", DEFAULT_STRATEGY)()})


def _run_range_test(
    learner: Learner, stream: TrainingStream, rates: Sequence[float], on_progress: ProgressCallback
) -> tuple[list[float], str]:
    """Run the steps. Returns: the loss of each step before its update, and the reason why the steps ended."""
    losses: list[float] = []
    batch_size = None
    for step, rate in enumerate(rates):
        on_progress("steps", step + 1, len(rates))
        try:
            batches = stream.build_micro_batches(step)
            update = train_step(learner, batches, lr=rate, step=step + 1, batch_size=batch_size)
        except NumericError:
            return losses, f"the loss was not finite at a rate of {rate:.2g}"
        losses.append(update.loss)
        batch_size = update.batch_size
        means = smooth_losses(losses)
        # Higher rates would only diverge faster.
        if means[-1] > DIVERGENCE_FACTOR * min(means):
            return losses, f"at a rate of {rate:.2g} the loss was {DIVERGENCE_FACTOR:g} times its lowest value"
    return losses, "all rates were tried"


def choose_lr(lrs: Sequence[float], losses: Sequence[float], stopped: str) -> RangeTest:
    """Choose a rate from the loss curve; returns the complete RangeTest.

    >>> falling = [3 - i / 10 for i in range(20)] + [1.2 + 2 * i for i in range(5)]
    >>> found = choose_lr([1e-5 * 1.5**i for i in range(25)], falling, "")
    >>> round(found.tenth / found.lrs[20], 3), found.steepest < found.lrs[20]
    (0.1, True)
    >>> choose_lr([1e-3, 1e-2, 1e-1], [1.0, 2.0, 9.0], "").lr is None
    True
    """
    means = smooth_losses(losses)
    lowest = min(range(len(means)), key=means.__getitem__, default=0)
    # A lowest point among the first steps is noise: every rate was too large.
    steepest = tenth = choice = None
    if lowest > NUM_SETTLING:
        falls = {i: means[i - 1] - means[i + 1] for i in range(NUM_SETTLING, lowest)}
        steepest = lrs[max(falls, key=falls.__getitem__)]
        tenth = lrs[lowest] / 10
        choice = float(f"{tenth:.1e}")  # two digits: the test knows no more
    return RangeTest(tuple(lrs), tuple(losses), tuple(means), steepest, tenth, choice, stopped, RULE)


def smooth_losses(losses: Sequence[float]) -> list[float]:
    """Bias-corrected exponential moving average.

    >>> [round(mean, 3) for mean in smooth_losses([2.0, 2.0, 3.0])], smooth_losses([])
    ([2.0, 2.0, 2.369], [])
    """
    mean = weight = 0.0
    means = []
    for loss in losses:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + 1 - SMOOTHING
        means.append(mean / weight)
    return means
