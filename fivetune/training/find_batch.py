"""The micro-batch to train with: what fits into memory, and from where on a larger one is no faster.

In: a recipe. Out: a BatchTest. Every size goes forward and backward over the same examples, cut into pieces of that
size, in rounds that take all sizes in turn, so that a drift of the machine hits all alike. The optimizer's step is
left out: it comes once per global batch, whatever the pieces are. Weights stay as they are; nothing is saved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from fivetune.config import RunConfig
from fivetune.data.batch import collate
from fivetune.progress import Count, uncounted
from fivetune.telemetry.devices import enough_memory
from fivetune.training.find_lr import alone
from fivetune.training.micro_batch import Fit, largest_fit
from fivetune.training.setup import Setup, set_up

LARGEST = 256  # tried where the recipe has no global batch
CLOSE = 0.95  # of the best throughput is as good
NUM_ROUNDS = 3
RULE = (
    f"The smallest size that reaches {100 * CLOSE:.0f} % of the highest throughput, among those that fit into memory."
)


@dataclass(frozen=True, slots=True)
class Speed:
    """Throughput of one micro-batch size.

    Args:
        tokens_per_second: input and target tokens, padding not counted, forward and backward.
    """

    batch_size: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class BatchTest:
    """What was measured.

    Args:
        batch_size: the choice.
        fit: the largest size that fits, and why no larger one.
        total: the global batch that the sizes are parts of.
    """

    speeds: tuple[Speed, ...]
    batch_size: int
    total: int
    fit: Fit
    device: str
    precision: str
    rule: str = RULE

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_batch(config: RunConfig, *, largest: int | None = None, count: Count = uncounted) -> BatchTest:
    """Measure every part of the recipe's global batch that fits into memory.

    Args:
        largest: of the sizes, where the recipe has no train.global_batch_size; default 256.

    Raises EnvironmentProblem if not even one example fits.
    """
    total = config.train.global_batch_size or largest or LARGEST
    pieces = {"batch_size": 1, "global_batch_size": total}
    config = alone(config).model_copy(update={"train": config.train.model_copy(update=pieces)})
    setup = set_up(config, count=count)
    fit = largest_fit(
        setup.model, setup.forward, setup.stream.store, total=total, device=setup.place.device,
        autocast=setup.place.autocast, state_bytes_per_parameter=config.optimizer.state_bytes_per_parameter,
    )  # fmt: skip
    sizes = [size for size in range(1, fit.batch_size + 1) if total % size == 0]
    with enough_memory():
        speeds = measure(setup, sizes, count)
    return BatchTest(speeds, choose(speeds), total, fit, setup.place.device, setup.place.precision)


def choose(speeds: Sequence[Speed]) -> int:
    """The smallest size whose throughput is close to the best.

    >>> choose([Speed(1, 50.0), Speed(2, 96.0), Speed(4, 100.0), Speed(8, 90.0)])
    2
    """
    best = max(one.tokens_per_second for one in speeds)
    return min(one.batch_size for one in speeds if one.tokens_per_second >= CLOSE * best)


def measure(setup: Setup, sizes: Sequence[int], count: Count) -> tuple[Speed, ...]:
    """Tokens per second of each size over the same global batches; the gradients are thrown away."""
    seconds = dict.fromkeys(sizes, 0.0)
    num_tokens = 0
    setup.model.train()
    for turn in range(NUM_ROUNDS + 1):  # the first one warms up
        rows = np.concatenate(setup.stream.rows(turn)).tolist()
        for done, size in enumerate(sizes):
            count("measuring", turn * len(sizes) + done + 1, (NUM_ROUNDS + 1) * len(sizes))
            taken, tokens = _pass(setup, rows, size)
            seconds[size] += taken if turn else 0.0
        num_tokens += tokens if turn else 0
    setup.model.zero_grad(set_to_none=True)
    return tuple(Speed(size, num_tokens / seconds[size]) for size in sizes)


def _pass(setup: Setup, rows: list[int], size: int) -> tuple[float, int]:
    """Seconds and tokens of all rows, forward and backward, in pieces of a size."""
    batches = [collate(setup.stream.store, rows[i : i + size]) for i in range(0, len(rows), size)]
    _wait(setup.place.device)
    started = time.perf_counter()
    for batch in batches:
        with setup.place.autocast():
            loss = setup.forward.nats(setup.model, batch, device=setup.place.device)[0].sum()
        (loss / batch.num_target_tokens).backward()
    _wait(setup.place.device)
    taken = time.perf_counter() - started
    return taken, sum(batch.num_input_tokens + batch.num_target_tokens for batch in batches)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
