"""An optimizer step that CUDA graphs can replay: forward, backward, clip and AdamW on static buffers.

In: a model, AdamW's groups, micro-batches. Out: new weights, and the values of `Update`. The parameters are fp32 views
of one buffer and products have the autocast dtype, as in any other run: checkpoints, evaluations and exports are the
same, and a run can resume with torch's AdamW from this state, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fivetune.model.cuda.optimizer import NORM, POWER1, POWER2, STEPS, FlatAdamW
from fivetune.model.cuda.static_step import Buckets, CapturedStep, GraphRecorder, StaticBatch, compute_static_losses
from fivetune.model.objective import PLAIN, Objective
from fivetune.types import Autocast, Batch, TorchState

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model


class GraphedAdamW(torch.optim.Optimizer):
    """FlatAdamW with the interface of torch's AdamW: parameter groups, and state by parameter.

    Args:
        optimizer: the optimizer to replace, before its first step; all groups but those of norms have one weight decay.
        max_norm: largest gradient norm; infinity disables clipping.
    """

    keeps_whole_state = True

    def __init__(self, optimizer: torch.optim.Optimizer, *, max_norm: float) -> None:
        groups = optimizer.param_groups
        first, options = groups[0], ("lr", "betas", "eps", "weight_decay")
        super().__init__([dict(group) for group in groups], {name: first[name] for name in options})
        self.flat = FlatAdamW(
            [p for group in groups if group["kind"] != "norm" for p in group["params"]],
            [p for group in groups if group["kind"] == "norm" for p in group["params"]],
            lr=first["lr"],
            betas=first["betas"],
            eps=first["eps"],
            weight_decay=first["weight_decay"],
            max_norm=max_norm,
            dtype=torch.float32,
        )
        for parameter in self._list_parameters():
            vars(parameter).pop("table_grad", None)  # gradients are dense here
            start = parameter.storage_offset()
            place = slice(start, start + parameter.numel())
            self.state[parameter] = {
                "exp_avg": self.flat.mean[place].view(parameter.shape),
                "exp_avg_sq": self.flat.square[place].view(parameter.shape),
            }

    def _list_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None
        self.flat.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place, because graphs write to their addresses."""
        self.flat.grads.zero_()

    def state_dict(self) -> TorchState:
        """The state dict of torch's AdamW, and the counters of FlatAdamW."""
        for state in self.state.values():
            state["step"] = self.flat.state[STEPS].float()
        return {**super().state_dict(), "flat": self.flat.state}

    def load_state_dict(self, state_dict: TorchState) -> None:
        """Load the state of a GraphedAdamW or of torch's AdamW, in place; the learning rate is set at every step."""
        saved = state_dict["state"]
        for number, parameter in enumerate(self._list_parameters()):
            for name in ("exp_avg", "exp_avg_sq"):
                self.state[parameter][name].copy_(saved[number][name])
        if "flat" in state_dict:
            self.flat.state.copy_(state_dict["flat"])
            return
        steps = float(saved[0]["step"])
        self.flat.state[STEPS] = steps
        for place, beta in zip((POWER1, POWER2), self.flat.betas, strict=True):
            self.flat.state[place] = beta**steps


class GraphedUpdate:
    """Runs whole optimizer steps in buckets of tokens, replayed as CUDA graphs once these are recorded.

    Args:
        record: as in CapturedStep; None launches every step.
        training: run the model in training mode, with dropout.
        fused: compute norms, dropout and activations by Triton's kernels, as the launched steps do.
        objective: of every token; neither R-Drop nor class weights.

    Attributes:
        nonfinite_flag: [] fp32 on the device, set to 1 at the first non-finite step; from then on no update is applied.
    """

    def __init__(
        self,
        model: T5Model,
        optimizer: GraphedAdamW,
        buckets: Buckets,
        *,
        device: str,
        autocast: Autocast,
        record: GraphRecorder | None,
        training: bool = True,
        fused: bool = False,
        objective: Objective = PLAIN,
        warm_up: int = 3,
    ) -> None:
        self.fused, self.objective = fused, objective
        self.model, self.optimizer, self.autocast, self.training = model, optimizer, autocast, training
        self.total, self.nonfinite_flag = (torch.zeros((), device=device) for _ in range(2))
        self.steps = CapturedStep(
            self._step,
            buckets,
            start_id=model.config.decoder_start_token_id,
            device=device,
            record=record,
            warm_up=warm_up,
        )

    def update(self, group: Sequence[Batch], *, lr: float) -> Tensor:
        """Run one optimizer step. Returns: `Update.values` [3] on the host, valid once the device has finished."""
        flat = self.optimizer.flat
        flat.lr.fill_(lr)
        self.model.train(self.training)
        loss = self.steps.update(group)
        buckets = [self.steps.buckets.find_bucket(batch) for batch in group]
        positions = sum(bucket.num_inputs + bucket.num_targets for bucket in buckets)
        values = torch.stack([loss, flat.state[NORM].float(), torch.full_like(loss, positions)])
        return values.to("cpu", non_blocking=True)

    def forget(self) -> None:
        """Clear the gradients and the loss that a failed step has accumulated."""
        self.optimizer.zero_grad()
        self.total.zero_()

    def _step(self, static: StaticBatch, last: bool) -> Tensor:
        with self.autocast():
            nats = compute_static_losses(self.model, static, fused=self.fused, objective=self.objective)
        loss = (nats * static.weights).sum()
        loss.backward()
        self.total.add_(loss.detach())
        if last:
            flat = self.optimizer.flat
            flat.grads[:1].masked_fill_(
                self.nonfinite_flag.bool() | ~self.total.isfinite(), float("nan")
            )  # skips the step
            flat.step()
            self.nonfinite_flag.logical_or_(~flat.state[NORM].isfinite())
            self.total.zero_()
        return loss.detach().float()
