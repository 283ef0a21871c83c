"""LoRA (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"): W + (alpha / r) B A, B begins at 0."""

from __future__ import annotations

from fivetune.model.adapters import LowRankOptions


class Lora(LowRankOptions):
    """A trained product of two thin matrices beside each frozen matrix."""
