"""Choice of the micro-batch: the smallest size with nearly the highest throughput.

In: a recipe. Out: a BatchTest. Every size runs forward and backward over the same examples, in rounds over all sizes,
so that a drift of the machine's speed affects all sizes equally. The optimizer step is left out, because there is one
per global batch with any micro-batch. Weights do not change; nothing is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from fivetune.config import RunConfig
from fivetune.data.store.batch import collate
from fivetune.errors import ConfigError
from fivetune.machine.telemetry.devices import translate_oom_errors
from fivetune.rundir.finders import BatchTest, Speed
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.training.autotune.find_lr import as_single_process
from fivetune.training.autotune.micro_batch import find_largest_fit
from fivetune.training.autotune.probe import forward_backward, measure_seconds, restore_state
from fivetune.training.setup import Setup, set_up
from fivetune.training.step.groups import count_state_bytes
from fivetune.training.step.learner import Learner
from fivetune.types import Batch

DEFAULT_LARGEST_SIZE = 256  # if the recipe sets no global batch
CLOSE_SHARE = 0.95  # of the highest throughput, from which on a size may be chosen
NUM_ROUNDS = 3
RULE = (
    f"The smallest size that reaches {100 * CLOSE_SHARE:.0f} % of the highest throughput, among those that "
    "fit into memory. Passes are launched kernel by kernel: where a run replays CUDA graphs, small sizes lose less."
)


def find_batch(
    config: RunConfig, *, largest: int | None = None, on_progress: ProgressCallback = ignore_progress
) -> BatchTest:
    """Measure the throughput of every divisor of the recipe's global batch that fits into memory, and choose one.

    Args:
        largest: largest size if the recipe has no train.global_batch_size; default 256.

    Raises FiveTuneEnvironmentError if not even one example fits.
    """
    if config.device == "tpu":
        raise ConfigError("device: tpu is not measured by find-batch. Try sizes with train --train.num_steps 20.")
    total = config.train.global_batch_size or largest or DEFAULT_LARGEST_SIZE
    pieces = {"batch_size": 1, "global_batch_size": total}
    config = as_single_process(config).model_copy(update={"train": config.train.model_copy(update=pieces)})
    setup = set_up(config, on_progress=on_progress)
    learner = setup.learner
    fit = find_largest_fit(
        learner.model,
        learner.forward,
        setup.data.stream.store,
        total=total,
        device=learner.compute.device,
        autocast=learner.compute.make_autocast,
        state_bytes=count_state_bytes(learner.model, config.optimizer),  # a moving average is there already
    )
    sizes = [size for size in range(1, fit.batch_size + 1) if total % size == 0]
    with translate_oom_errors():
        speeds = measure_speeds(setup, sizes, on_progress)
    compute = learner.compute
    return BatchTest(speeds, choose_batch_size(speeds), total, fit, compute.device, compute.precision, RULE)


def choose_batch_size(speeds: Sequence[Speed]) -> int:
    """The smallest size with at least CLOSE_SHARE of the highest throughput.

    >>> choose_batch_size([Speed(1, 50.0), Speed(2, 96.0), Speed(4, 100.0), Speed(8, 90.0)])
    2
    """
    best = max(one.tokens_per_second for one in speeds)
    return min(one.batch_size for one in speeds if one.tokens_per_second >= CLOSE_SHARE * best)


def measure_speeds(setup: Setup, sizes: Sequence[int], on_progress: ProgressCallback) -> tuple[Speed, ...]:
    """Measure tokens per second of each size over the same global batches; gradients are cleared."""
    seconds = dict.fromkeys(sizes, 0.0)
    num_tokens, learner, store = 0, setup.learner, setup.data.stream.store
    with restore_state(learner.model):
        learner.model.train()
        for turn in range(NUM_ROUNDS + 1):  # the first one warms up
            rows = np.concatenate(setup.data.stream.select_rows(turn)).tolist()
            for done, size in enumerate(sizes):
                on_progress("measuring", turn * len(sizes) + done + 1, (NUM_ROUNDS + 1) * len(sizes))
                batches = [collate(store, rows[i : i + size]) for i in range(0, len(rows), size)]
                elapsed = measure_seconds(partial(_run_passes, learner, batches), learner.compute.device)
                seconds[size] += elapsed if turn else 0.0
            num_tokens += sum(batch.num_input_tokens + batch.num_target_tokens for batch in batches) if turn else 0
    return tuple(Speed(size, num_tokens / seconds[size]) for size in sizes)


def _run_passes(learner: Learner, batches: Sequence[Batch]) -> None:
    for batch in batches:
        forward_backward(
            learner.model,
            learner.forward,
            batch,
            device=learner.compute.device,
            autocast=learner.compute.make_autocast,
        )
