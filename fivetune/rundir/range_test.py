"""The result of `fivetune find-lr`, which lies next to the run directory (<run>.find-lr.json)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

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
