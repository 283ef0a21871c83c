"""Results of `fivetune find-lr` and `fivetune find-batch`, which lie beside a run (<run>.find-lr.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fivetune.errors import format_size

if TYPE_CHECKING:
    from fivetune.types import JsonTable


@dataclass(frozen=True, slots=True)
class RangeTest:
    """Result of a range test of the learning rate.

    Args:
        lrs, losses, smoothed: one value per step; losses in nats per target token.
        steepest, tenth: the rates of the two rules; None if the loss did not fall.
        lr: the choice, `tenth` rounded to two digits.
        stopped: the reason why the test ended; rule: how the rate was chosen, in a sentence.
    """

    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    tenth: float | None
    lr: float | None
    stopped: str
    rule: str

    def find_flaw(self) -> str | None:
        """Return the reason why the values cannot be drawn; None if they can."""
        if not len(self.lrs) == len(self.losses) == len(self.smoothed) > 0:
            return "lrs, losses and smoothed are empty or differ in length"
        lowest = min(*self.lrs, self.lrs[0] if self.lr is None else self.lr)
        return None if lowest > 0 else f"a learning rate is {lowest:g}"

    def as_dict(self) -> JsonTable:
        """Return the table of the JSON file."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Fit:
    """The largest micro-batch that fits into memory.

    Args:
        batch_size: examples per forward pass; a divisor of the global batch.
        measured_bytes: peak memory of forward and backward with weights and gradients; on a GPU with state_bytes too.
        forecast_bytes: the linear forecast of measured_bytes from the smaller trials.
        state_bytes: size of the optimizer's state.
        why: the reason why the search ended.
    """

    batch_size: int
    measured_bytes: int
    forecast_bytes: int
    state_bytes: int
    why: str

    def __str__(self) -> str:
        return (
            f"train.batch_size auto: {self.batch_size} examples, {format_size(self.measured_bytes)} measured on the "
            f"longest (forecast {format_size(self.forecast_bytes)}), optimizer state {format_size(self.state_bytes)}; "
            f"{self.why}"
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
    """The throughput of each micro-batch size, and the choice.

    Args:
        batch_size: the choice.
        fit: the largest size that fits into memory, and the reason why no larger one does.
        total: the global batch; the sizes are its divisors. rule: how the size was chosen, in a sentence.
    """

    speeds: tuple[Speed, ...]
    batch_size: int
    total: int
    fit: Fit
    device: str
    precision: str
    rule: str

    def find_flaw(self) -> str | None:
        """Return the reason why the values cannot be drawn; None if they can."""
        if not self.speeds:
            return "speeds is empty"
        lowest = min(self.batch_size, *(min(one.batch_size, one.tokens_per_second) for one in self.speeds))
        return None if lowest > 0 else f"a size or a speed is {lowest:g}"

    def as_dict(self) -> JsonTable:
        """Return the table of the JSON file."""
        return asdict(self)
