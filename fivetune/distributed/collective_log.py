"""Which collectives of a micro-batch this rank has taken part in, so that it can take part in the rest after a failure.

In: every collective of the forward and backward pass, in order. Out: the same. A rank that runs out of memory in the
middle of a micro-batch would leave the others waiting. It computes a minimal batch instead: the passes of any batch
have the same collectives in the same order, so those that were sent are skipped, and the rest are sent, with
activations of the size that the other ranks send. Their values are wrong: all ranks discard the gradients of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
LOG = "collective_log"  # attribute of a model


class CollectiveLog:
    """Counts the collectives of one micro-batch."""

    def __init__(self) -> None:
        self._position = 0  # collectives of the passes so far
        self._num_sent = 0
        self._rows: Mapping[int, int] = {}
        self.reduced: set[nn.Module] = set()  # modules whose gradients this rank has reduced in this micro-batch

    def begin(self) -> None:
        """Begin the passes of a micro-batch."""
        self._position, self._num_sent, self._rows = 0, 0, {}
        self.reduced.clear()

    def replay(self, rows: Mapping[int, int]) -> None:
        """Begin the passes of a minimal batch in place of those that failed.

        Args:
            rows: number of rows of an activation that the other ranks send, by that of the minimal batch.
        """
        self._position, self._rows = 0, rows

    def run(self, send: Callable[[], T]) -> T | None:
        """Run a collective, unless this rank has taken part in it before the failure."""
        self._position += 1
        if self._position <= self._num_sent:
            return None
        result = send()
        self._num_sent = self._position
        return result

    def fit(self, activation: Tensor) -> Tensor:
        """The tensor to send for an activation [..., d]: in a replay, zeros of the size that the other ranks send."""
        rows = self._rows.get(activation.shape[:-1].numel())
        return activation if rows is None else activation.new_zeros(rows, activation.shape[-1])


def find_collective_log(model: nn.Module) -> CollectiveLog:
    """The log of the collectives in a model's passes, created at the first call."""
    return model.__dict__.setdefault(LOG, CollectiveLog())
