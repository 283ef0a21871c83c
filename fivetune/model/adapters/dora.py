"""DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation"): a trained length for each row of W + s B A."""

from __future__ import annotations

from typing import Any, ClassVar

from fivetune.model.adapters import LowRankOptions


class Dora(LowRankOptions):
    """LoRA for the directions of a matrix's rows, and a trained vector for their lengths."""

    extra: ClassVar[dict[str, Any]] = {"use_dora": True}
