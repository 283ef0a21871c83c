"""The forward of a run: token losses of flat tokens, of a padded rectangle, or of rectangles with a few fixed sizes.

In: a model and a Batch. Out: the loss of every scored token. `training/autotune/forward.py` chooses one for a run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from fivetune.data.store.batch import join_batches, pad
from fivetune.model.cuda.dispatch import needs_attention_kernel
from fivetune.model.flat import compute_flat_losses
from fivetune.model.forward import compute_padded_losses
from fivetune.model.modules import T5Model
from fivetune.model.objective import PLAIN, Objective, attach_gradient
from fivetune.model.teacher import Teacher
from fivetune.types import Batch, JsonTable, PhaseTimer, ignore_phase

ForwardKind = Literal["flat", "padded", "buckets"]
Parts = Literal["torch", "triton"]


@dataclass(frozen=True, slots=True)
class Forward:
    """One way of computing token losses.

    Args:
        kind: flat computes real tokens only; padded a rectangle as large as the longest example; buckets a rectangle
            with one of a few fixed sizes, for devices that compile every new shape.
        why: reason of the choice, for the log and machine.json.
        recompute: save only the inputs of every block, and recompute the rest in the backward pass.
        parts: implementation of norms, dropout and activations of flat tokens.
        objective: loss of which the gradient is computed; the values of the losses remain -log p.
        teacher: model of which the objective contains the predictions; None without one.
    """

    kind: ForwardKind
    why: str
    recompute: bool = False
    parts: Parts = "torch"
    objective: Objective = PLAIN
    teacher: Teacher | None = field(default=None, compare=False, repr=False)

    @property
    def is_fused(self) -> bool:
        return self.parts == "triton"

    def __str__(self) -> str:
        if self.kind != "flat":
            return self.kind
        return f"flat ({self.parts} norms and activations)"

    def compute_losses(
        self, model: T5Model, batch: Batch, *, device: str, timer: PhaseTimer = ignore_phase
    ) -> tuple[Tensor, int]:
        """Compute -log p of every scored label in nats, 0 at other positions, and the number of computed positions.

        With R-Drop both are means of two passes. The gradient belongs to `objective`, the values do not.

        Args:
            timer: function called with the phase that begins: host, copy, forward.

        Returns: losses, [N_tgt] for flat and [B, T] for the other kinds ([B, 2] with a span head; [0] of a pipeline
            stage that is not the last one); positions.
        """
        passes = self.objective.num_passes
        losses, num_positions = self._compute_passes(model, self._copy_examples(batch), device=device, timer=timer)
        if passes > 1:  # the copies follow each other, one batch after the other
            losses = losses.unflatten(0, (passes, len(losses) // passes)).mean(0)
        # Of a pipeline, only the last stage has losses.
        if self.objective.class_weights and losses.numel():
            weights = self.objective.weigh_examples(batch)
            sizes = batch.cu_seqlens_tgt.diff()
            weights = weights.repeat_interleave(sizes) if self.kind == "flat" else weights[:, None]
            weights = weights.to(losses.device, non_blocking=True)
            losses = attach_gradient(losses, losses * weights)
        return losses, num_positions // passes

    def _compute_passes(self, model: T5Model, batch: Batch, *, device: str, timer: PhaseTimer) -> tuple[Tensor, int]:
        objective = self.objective
        if self.teacher is not None:
            objective = replace(objective, soft=self.teacher.predict(batch, fused=self.is_fused))
        if self.kind == "flat":
            losses = compute_flat_losses(
                model, batch, recompute=self.recompute, fused=self.is_fused, objective=objective, timer=timer
            )
            return losses, batch.num_input_tokens + batch.num_target_tokens
        sizes = SIZES if self.kind == "buckets" else None
        timer("host")
        padded = pad(batch, pad_id=model.config.pad_token_id, sizes=sizes)
        if device != "cpu":
            timer("copy")
            padded = padded.to(device)
        timer("forward")
        return compute_padded_losses(model, padded, objective=objective), padded.num_positions

    def _copy_examples(self, batch: Batch) -> Batch:
        """The batch with every example as often as the objective computes it."""
        passes = self.objective.num_passes
        if passes == 1:
            return batch
        return join_batches([batch] * passes)

    def as_facts(self) -> JsonTable:
        """The fields by which a resumed run computes as it began; objective and teacher are in its recipe."""
        return {"kind": self.kind, "why": self.why, "recompute": self.recompute, "parts": self.parts}

    def count_rows(self, batch: Batch) -> tuple[int, int]:
        """Count the rows of the encoder's and of the decoder's activations."""
        batch = self._copy_examples(batch)
        if self.kind == "flat":
            return batch.num_input_tokens, batch.num_target_tokens
        padded = pad(batch, pad_id=0, sizes=SIZES if self.kind == "buckets" else None)
        return padded.input_ids.numel(), padded.labels.numel()

    def prepare(self, model: T5Model) -> None:
        """Switch gradient checkpointing of transformers' own forward on or off."""
        switch = "enable" if self.recompute and self.kind != "flat" else "disable"
        renamed = getattr(model, f"activation_checkpointing_{switch}", None)  # the name since transformers 5.2x
        (renamed or getattr(model, f"gradient_checkpointing_{switch}"))()

    def describe_attention(self, model: T5Model) -> str | None:
        """The implementation of attention in this autocast: triton (kernel), blocks (torch), or one of transformers."""
        if self.kind == "flat":
            return "triton" if needs_attention_kernel(model.get_output_embeddings().weight) else "blocks"
        return getattr(model.config, "_attn_implementation", None)


SIZES = (8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Lengths of the rectangles of `buckets`, in tokens; above the last, lengths are rounded up to multiples of 1,024."""
