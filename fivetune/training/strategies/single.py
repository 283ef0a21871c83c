"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from fivetune.training.strategies import StrategyOptions


class Single(StrategyOptions):
    """The whole model on one device."""

    supports_multiple: ClassVar[bool] = False
