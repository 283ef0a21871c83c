"""QLoRA (Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs"): LoRA on a base in 4 bits.

The adapted matrices are stored as NF4 by bitsandbytes, with their scales quantised again: about 4.1 bits a weight.
"""

from __future__ import annotations

from fivetune.model.adapters import LowRankOptions


class QuantisedLora(LowRankOptions):
    """LoRA beside matrices that are kept in 4 bits and converted for each product."""

    base_bits = 4
