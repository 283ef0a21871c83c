"""The teacher of a distillation: predicts the tokens that the model is trained on.

In: a Batch. Out: SoftTargets, from which the loss computes the teacher's logits in chunks of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from fivetune.data.store.batch import pad
from fivetune.model.family import get_family, get_logit_cap
from fivetune.model.flat import compute_flat_states
from fivetune.model.forward import compute_padded_states
from fivetune.model.modules import T5Model
from fivetune.model.objective import SoftTargets
from fivetune.model.precision import get_matmul_dtype, suppress_half
from fivetune.types import Batch


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """A frozen model without dropout; it is no part of the trained model and is not saved.

    Args:
        model: on the device of the run, in evaluation mode.
        alpha, temperature: see `SoftTargets`.
        is_flat: whether it computes flat tokens.
    """

    model: T5Model
    alpha: float
    temperature: float
    is_flat: bool

    def predict(self, batch: Batch, *, fused: bool = False) -> SoftTargets:
        """Compute the soft targets of a batch on the host.

        Args:
            fused: use Triton's kernels.
        """
        head = self.model.get_output_embeddings().weight
        if self.is_flat and get_family(self.model.config).t5_blocks:
            hidden = compute_flat_states(self.model, batch, fused=fused)
        else:
            padded = pad(batch, pad_id=self.model.config.pad_token_id).to(str(head.device))
            with suppress_half(head.device):
                hidden = compute_padded_states(self.model, padded)
        kind = get_matmul_dtype(head.device)
        cap = get_logit_cap(self.model.config)
        return SoftTargets(hidden.to(kind), head.to(kind), cap, self.alpha, self.temperature)
