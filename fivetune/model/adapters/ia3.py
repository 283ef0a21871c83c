"""IA3 (Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning").

Trained factors, which begin at 1, of the keys, the values and the inner activations of the feed-forward layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from fivetune.model.adapters import TASK_TYPE, AdapterOptions, TargetNames

if TYPE_CHECKING:
    from peft import PeftConfig


class Ia3(AdapterOptions):
    """A trained factor for each key, value and inner activation: the fewest weights that can be merged."""

    usual = ("k", "v", "wo", "k_proj", "v_proj", "down_proj")
    inner: ClassVar[tuple[str, ...]] = ("wo", "down_proj")  # their input is scaled, the output of the others

    target_modules: TargetNames = ()

    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        from peft import IA3Config

        feed_forward = [name for name in targets if name.rpartition(".")[2] in self.inner]
        return IA3Config(task_type=TASK_TYPE, target_modules=list(targets), feedforward_modules=feed_forward)
