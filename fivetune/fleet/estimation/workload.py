"""What a run computes, and how a strategy divides it: the inputs of all estimates.

In: numbers of a recipe. Out: a Workload, the same for all strategies, and a Layout of the ranks for one of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fivetune.model.flops import count_train_flops, list_block_flops
from fivetune.model.shapes import ModelShape

FP32 = 4  # bytes
BUCKET_BYTES = 16 * 2**20  # as strategies/_buckets.py


@dataclass(frozen=True, slots=True)
class Workload:
    """The examples of an optimizer step, all as long as the limits allow.

    Args:
        batch_size: examples of a micro-batch (train.batch_size).
        examples_per_step: of all ranks (train.global_batch_size).
        num_inputs, num_targets: tokens of each example.
        matmul_bytes: of a number in matrix products: 2 with bf16 or fp16, else 4.
        dropout: rate.
        recompute: as train.recompute.
        state_bytes: of the optimizer for each weight.
        gathers_state: whether an optimizer step needs whole weights, and each rank holds the whole state (Adafactor).
        on_gpu: whether Triton's kernels compute attention and dropout, which then save no weights and no masks.
        passes: how often a step computes each example: 2 with R-Drop.
        teacher: a model whose predictions the loss contains; its forward pass is a third of a step of its own.
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

    @property
    def tokens_per_step(self) -> int:
        """Input and target tokens of a step, of all ranks."""
        return self.examples_per_step * (self.num_inputs + self.num_targets)

    def count_flops(self, num_examples: int) -> float:
        """Operations of forward and backward over so many examples, without recomputation."""
        lengths = self._list_lengths(num_examples)
        frozen = count_train_flops(self.teacher, *lengths).total / 3 if self.teacher else 0.0
        return count_train_flops(self.shape, *lengths).total + frozen

    def list_block_flops(self) -> list[float]:
        """Operations of each block for one example, the encoder's first; the last one's with the head."""
        return list_block_flops(self.shape, *self._list_lengths(1))

    def count_head_flops(self, num_examples: int) -> float:
        """Operations of the output head over so many examples."""
        return 6.0 * self.shape.table_size * self.num_targets * num_examples * self.passes

    def _list_lengths(self, num_examples: int) -> tuple[list[int], list[int]]:
        return [self.num_inputs] * num_examples * self.passes, [self.num_targets] * num_examples * self.passes


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a run share the model and the examples.

    Args:
        strategy: name of the plugin.
        world: ranks.
        heads: ranks that share each block's heads and features (tensor parallel).
        stages: ranks that each hold some of the blocks (pipeline).
        shards: ranks among which weights, gradients and state are sharded (FSDP2).
        offload: whether the shards are in the host's memory.
        reduce_once: whether whole gradients are kept until the last micro-batch of a step, else shards after each.
    """

    strategy: str
    world: int = 1
    heads: int = 1
    stages: int = 1
    shards: int = 1
    offload: bool = False
    reduce_once: bool = True

    @property
    def copies(self) -> int:
        """Groups of ranks that compute different examples.

        >>> Layout("fsdp", 8, shards=8).copies, Layout("tensor", 8, heads=4).copies
        (8, 2)
        """
        return self.world // (self.heads * self.stages)

    @property
    def replicas(self) -> int:
        """Copies of the shards, between which gradients are all-reduced."""
        return self.copies // self.shards

    def count_micro_batches(self, work: Workload) -> int:
        """Micro-batches of a step that each copy computes."""
        return ceil(work.examples_per_step / self.copies / work.batch_size)

    def get_batch_size(self, work: Workload) -> int:
        """Examples of a micro-batch: those of the recipe, or all of a copy's share if that is less."""
        return min(work.batch_size, work.examples_per_step // self.copies)

    def as_settings(self) -> dict[str, object]:
        """The dotted settings that give this layout."""
        settings: dict[str, object] = {"strategy.name": self.strategy}
        if self.heads > 1 and (self.strategy, self.heads) != ("tensor", self.world):
            settings["strategy.size"] = self.heads
        if 1 < self.stages < self.world:
            settings["strategy.stages"] = self.stages
        if self.shards > 1 and self.replicas > 1:
            settings["strategy.replicas"] = self.replicas
        if self.offload:
            settings["strategy.offload"] = "true"
        if not self.reduce_once:
            settings["strategy.reduce_once"] = "false"
        return settings
