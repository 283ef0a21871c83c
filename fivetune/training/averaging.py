"""Averages of weights that are evaluated, saved and exported in place of the weights that are trained.

In: the weights of an optimizer, after each step. Out: a model that holds the averages as long as `Averages.swap_in`
lasts, and then the trained weights again, bit for bit. The averages are a moving average (train.ema), or computed by an
optimizer that replaces the decay of the rate by averaging (schedule_free).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivetune.distributed.sharding import get_local, release_gathered
from fivetune.training.state.snapshot import list_weights, map_names
from fivetune.types import Optimizer

many: Any = torch  # untyped, because torch's _foreach functions are private


def build_averages(
    options: Optimizer, model: nn.Module, optimizer: torch.optim.Optimizer, ema: float | None
) -> Averages | None:
    """Build the averages of a run; None if the trained weights are evaluated."""
    if options.replaces_decay:
        return Averages(model, optimizer, optimizer.compute_averages)  # type: ignore[attr-defined]
    return MovingAverages(model, optimizer, ema) if ema else None


class Averages:
    """Averages that the optimizer computes when they are needed.

    Args:
        compute: returns the averages of a list of weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        compute: Callable[[list[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        names = map_names(model)
        self._model = model
        self._compute = compute
        self._weights: dict[str, Tensor] = {names[weight]: weight for weight in list_weights(optimizer)}
        self._others: dict[str, Tensor] = {}  # what the model does not hold: averages, or trained weights

    @property
    def num_bytes(self) -> int:
        """Memory of this rank that the averages take as long as the run lasts."""
        return sum(get_local(tensor).numel() * tensor.element_size() for tensor in self._others.values())

    @property
    def num_saved_bytes(self) -> int:
        """Bytes that the averages add to a checkpoint, all ranks together."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._weights.values())

    def update(self, step: int) -> None:
        """Take in the weights after a step (1-based)."""

    @contextmanager
    def swap_in(self) -> Iterator[dict[str, Tensor]]:
        """Put the averages into the model; yields the trained weights, by name, which are put back on exit.

        An optimizer's own averages take memory meanwhile: as much as gradients take, of which there are none.
        """
        # A moving average is held all the time, an optimizer's own average is computed for the occasion.
        if self._compute:
            averages = self._compute([*self._weights.values()])
            self._others = dict(zip(self._weights, averages, strict=True))
        self._swap()
        try:
            yield self._others
        finally:
            self._swap()
            if self._compute:
                self._others = {}

    @torch.no_grad()
    def restore(self, read: Callable[[dict[str, Tensor]], object]) -> None:
        """Continue from a checkpoint whose weights, the averages, are in the model.

        Args:
            read: reads the trained weights into tensors by name.
        """
        # The checkpoint's weights are the averages: they are in the model, and change places here.
        self._others = {name: torch.empty_like(weight.detach()) for name, weight in self._weights.items()}
        read(self._others)
        self._swap()
        if self._compute:
            self._others = {}

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._weights.items():
            here = get_local(weight)
            there = get_local(self._others[name])
            before = here.clone()  # one weight at a time: a second copy of the whole model may not fit
            here.copy_(there)
            there.copy_(before)
        release_gathered(self._model)


class MovingAverages(Averages):
    """Exponential moving averages: a += (1 - d) (w - a) after each step, with d = min(decay, (1 + t) / (10 + t)).

    Averages of iterates: Polyak and Juditsky 1992. The smaller d of the first steps, by which the initial weights are
    soon forgotten, comes from TensorFlow's ExponentialMovingAverage(num_updates=t).
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
        super().__init__(model, optimizer)
        self._decay = decay
        self._others = {name: weight.detach().clone() for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = compute_decay(self._decay, step)
        averages = [get_local(average) for average in self._others.values()]
        weights = [get_local(weight) for weight in self._weights.values()]
        many._foreach_lerp_(averages, weights, 1 - decay)


def compute_decay(decay: float, step: int) -> float:
    """Compute the share that the averages keep at a 1-based step.

    >>> [round(compute_decay(0.9, step), 3) for step in (1, 11, 1000)]
    [0.182, 0.571, 0.9]
    """
    return min(decay, (1 + step) / (10 + step))
