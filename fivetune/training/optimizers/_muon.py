"""torch's Muon and AdamW as one optimizer.

In: parameter groups; a group's key `kind` is "table" for embeddings and head. Out: changed weights and the state of the
two optimizers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from fivetune.distributed.sharding import gather_tensor, is_sharded, shard_like

if TYPE_CHECKING:
    from fivetune.types import TorchState

MUON_OPTIONS = ("lr", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


class MuonWithAdamW(Optimizer):
    """Muon for groups of matrices other than tables, AdamW for the others."""

    def __init__(
        self,
        groups: list[TorchState],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        matrices = [group for group in groups if is_for_muon(group)]
        others = [group for group in groups if not is_for_muon(group)]
        self._parts: list[Optimizer] = []
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
            )
            self._parts.append(muon)
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        # In the order of the parts, each with the defaults of its optimizer.
        torch_groups: list[TorchState] = []
        for part in self._parts:
            torch_groups += part.param_groups
        super().__init__(torch_groups, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        at = 0
        for part in self._parts:
            # Handed over in each step, because load_state_dict replaces groups and state.
            part.param_groups = self.param_groups[at : at + len(part.param_groups)]
            part.state = self.state
            if isinstance(part, torch.optim.Muon):
                self._step_sharded(part)
            part.step()
            at += len(part.param_groups)

    def _step_sharded(self, muon: torch.optim.Muon) -> None:
        """Update the sharded matrices and take their gradients; the others are left to Muon itself.

        The momentum is kept in shards; each rank gathers and orthogonalises one matrix after the other.
        """
        for group in muon.param_groups:
            for weight in filter(is_sharded, group["params"]):
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - group["momentum"])
                direction = gather_tensor(weight.grad.lerp_(momentum, group["momentum"]))
                # torch's own Muon takes the step of a whole copy that begins at 0.
                step = torch.zeros_like(direction)
                step.grad = direction
                weight.grad = None
                options = {key: group[key] for key in MUON_OPTIONS}
                orthogonalizer = torch.optim.Muon([step], **options, momentum=0, weight_decay=0)
                orthogonalizer.step()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(shard_like(step, weight))


def is_for_muon(group: TorchState) -> bool:
    """Whether a group holds matrices, other than tables that are looked up by row."""
    return group.get("kind", "matrix") == "matrix" and all(weight.dim() == 2 for weight in group["params"])
