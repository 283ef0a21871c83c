"""What a run computes: the input of all estimates.

In: numbers of a recipe. Out: a Workload, the same for all strategies.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fivetune.model.flops import list_block_flops
from fivetune.model.shapes import ModelShape
from fivetune.types import Layout

FP32 = 4  # bytes


@dataclass(frozen=True, slots=True)
class Workload:
    """The examples of an optimizer step, all as long as the limits allow.

    Args:
        batch_size: examples of a micro-batch (train.batch_size).
        examples_per_step: examples of all ranks (train.global_batch_size).
        num_inputs, num_targets: tokens of each example.
        matmul_bytes: bytes of a number in matrix products: 2 with bf16 or fp16, else 4.
        dropout: rate.
        recompute: as train.recompute.
        state_bytes: bytes of the optimizer for each weight.
        gathers_state: whether an optimizer step needs whole weights, and each rank holds the whole state (Adafactor).
        on_gpu: whether Triton's kernels compute attention and dropout, which then save no weights and no masks.
        passes: how often a step computes each example: 2 with R-Drop.
        teacher: a model whose predictions the loss contains.
    """

    shape: ModelShape
    batch_size: int
    examples_per_step: int
    num_inputs: int
    num_targets: int
    matmul_bytes: int = 2
    dropout: float = 0.1
    recompute: bool = False
    state_bytes: float = 8.0
    gathers_state: bool = False
    on_gpu: bool = True
    passes: int = 1
    teacher: ModelShape | None = None

    def list_block_flops(self) -> list[float]:
        """Operations of each block for one example, the encoder's first; the last one's with the head."""
        return list_block_flops(self.shape, [self.num_inputs] * self.passes, [self.num_targets] * self.passes)

    def count_micro_batches(self, layout: Layout) -> int:
        """Micro-batches of a step that each copy of the model computes."""
        return ceil(self.examples_per_step / layout.copies / self.batch_size)

    def get_batch_size(self, layout: Layout) -> int:
        """Examples of a micro-batch: those of the recipe, or all of a copy's share if that is less."""
        return min(self.batch_size, self.examples_per_step // layout.copies)
