"""One process, one device."""

from __future__ import annotations

from typing import ClassVar

from fivetune.strategies import Strategy


class Single(Strategy):
    """The whole model on one device."""

    supports_multiple: ClassVar[bool] = False
