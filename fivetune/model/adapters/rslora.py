"""rsLoRA (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA"): alpha / sqrt(r)."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, PositiveFloat

from fivetune.model.adapters import LowRankOptions


class RankStabilisedLora(LowRankOptions):
    """LoRA whose scale falls with the root of the rank, so that large ranks learn as fast as small ones."""

    extra: ClassVar[dict[str, Any]] = {"use_rslora": True}

    alpha: PositiveFloat = Field(8, description="the scale is alpha / sqrt(r)")
