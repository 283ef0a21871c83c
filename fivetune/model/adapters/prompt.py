"""Prompt tuning (Lester et al. 2021, "The Power of Scale for Parameter-Efficient Prompt Tuning").

Trained vectors precede the embedded tokens of every input; they begin as embeddings of random tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fivetune.model.adapters import TASK_TYPE, VirtualTokenOptions

if TYPE_CHECKING:
    from peft import PeftConfig


class Prompt(VirtualTokenOptions):
    """Trained vectors before the tokens of every input: the fewest weights, the slowest to learn."""

    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        from peft import PromptTuningConfig

        return PromptTuningConfig(task_type=TASK_TYPE, num_virtual_tokens=self.num_virtual_tokens)
