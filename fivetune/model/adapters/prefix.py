"""Prefix tuning (Li and Liang 2021, "Prefix-Tuning: Optimizing Continuous Prompts for Generation").

Trained keys and values precede the keys and values of the answer's tokens in each self-attention of the decoder, as in
peft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivetune.model.adapters import TASK_TYPE, VirtualTokenOptions

if TYPE_CHECKING:
    from peft import PeftConfig


class Prefix(VirtualTokenOptions):
    """Trained keys and values that each layer of the decoder sees before those of the answer."""

    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        from peft import PrefixTuningConfig

        return PrefixTuningConfig(task_type=TASK_TYPE, num_virtual_tokens=self.num_virtual_tokens)
