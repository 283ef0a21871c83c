"""Gradients of micro-batches by CUDA graphs, and AdamW with few launches beside them.

In: a model, micro-batches. Out: gradients in one buffer, and the sums of loss and positions. Exchange, clipping and any
optimizer are launched after the graphs of a step. `GraphedAdamW` clips and updates in three kernels: the parameters are
then fp32 views of one buffer too. Checkpoints, evaluations and exports are the same, and a run can resume with torch's
AdamW from this state, or the reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fivetune.model.cuda.buckets import Buckets
from fivetune.model.cuda.optimizer import NORM, POWER1, POWER2, STEPS, FlatAdamW
from fivetune.model.cuda.random import draw_seeds_together
from fivetune.model.cuda.static_step import CapturedStep, GraphRecorder, StaticBatch, compute_static_losses
from fivetune.model.modules import T5Model
from fivetune.model.objective import PLAIN, Objective
from fivetune.model.precision import get_matmul_dtype
from fivetune.model.weight_cache import KeptWeights, allocate_views, list_factors
from fivetune.types import Autocast, Batch, TorchState


class GraphedAdamW(torch.optim.Optimizer):
    """FlatAdamW with the interface of torch's AdamW: parameter groups, and state by parameter.

    Args:
        optimizer: the optimizer to replace, before its first step; all groups except norms have one weight decay.
        max_norm: largest gradient norm; infinity disables clipping.
        factors: matrices of linear modules, which lie below each other in this order. kind: dtype of their products.
    """

    keeps_whole_state = True
    _step_supports_amp_scaling = True  # it skips a step on the device

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, max_norm: float, factors: Sequence[nn.Parameter], kind: torch.dtype
    ) -> None:
        groups = optimizer.param_groups
        options = {name: groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
        super().__init__([dict(group) for group in groups], options)
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for group in groups:
            if group["kind"] == "norm":
                plain += group["params"]
            else:
                decayed += group["params"]
        trained = set(decayed)
        first = [factor for factor in factors if factor in trained]
        num_copied = 0 if kind == torch.float32 else len(first)
        decayed = list(dict.fromkeys([*first, *decayed]))
        self.flat = FlatAdamW(decayed, plain, max_norm=max_norm, num_copied=num_copied, kind=kind, **options)
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
        self.flat.lr.fill_(self.param_groups[0]["lr"])
        self.flat.step()

    def clip_and_step(self, loss: Tensor, nonfinite_flag: Tensor | None) -> Tensor:
        """Clip, update and clear the gradients; nothing changes if the loss, the norm or an earlier step is not finite.

        Args:
            loss: [] on the device. nonfinite_flag: see `make_nonfinite_flag`.

        Returns: the gradient norm before clipping, [] fp32.
        """
        skipped = ~loss.isfinite()
        if nonfinite_flag is not None:
            skipped |= nonfinite_flag.bool()
        # One gradient that is not finite: the kernels then skip the step, without a word to the host.
        self.flat.grads[:1].masked_fill_(skipped, float("nan"))
        self.step()
        return self.flat.state[NORM].float()

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
        self.flat.find_seen()
        if "flat" in state_dict:
            self.flat.state.copy_(state_dict["flat"])
            return
        # torch's AdamW keeps no powers of its betas.
        steps = float(saved[0]["step"])
        self.flat.state[STEPS] = steps
        for place, beta in zip((POWER1, POWER2), self.flat.betas, strict=True):
            self.flat.state[place] = beta**steps


def attach_flat_gradients(model: T5Model) -> Tensor:
    """Make the gradients of all trainable parameters views of one buffer of zeros, which is returned: [P] fp32."""
    parameters = dict.fromkeys([*list_factors(model), *model.parameters()])
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    flat, gradients = allocate_views(trained)
    for parameter, gradient in zip(trained, gradients, strict=True):
        vars(parameter).pop("table_grad", None)  # gradients are dense here
        parameter.grad = gradient
    return flat


class GraphedUpdate:
    """Adds the gradients of micro-batches in buckets of tokens, by CUDA graphs once these are recorded.

    Args:
        gradients: the buffer of which the parameters' gradients are views.
        copies: `FlatAdamW.copies`; None if the optimizer writes none.
        training: run the model in training mode, with dropout.
        fused: compute norms, dropout and activations by Triton's kernels, as the launched steps do.
        objective: objective of every token; neither R-Drop nor class weights.
    """

    def __init__(
        self,
        model: T5Model,
        gradients: Tensor,
        buckets: Buckets,
        *,
        device: str,
        autocast: Autocast,
        training: bool = True,
        fused: bool = False,
        objective: Objective = PLAIN,
        copies: Tensor | None = None,
    ) -> None:
        self.model = model
        self.gradients = gradients
        self.training = training
        self.device = device
        with autocast():
            self.kept = KeptWeights(model, get_matmul_dtype(gradients.device), copies)
        # Without a reference to this object, whose memory would then wait for Python's cycle collector.
        step = partial(_add_gradients, model, self.kept, autocast, fused, objective)
        self.steps = CapturedStep(step, buckets, start_id=model.config.decoder_start_token_id, device=device)

    def record(self, record: GraphRecorder) -> None:
        """Record the graphs of the planned buckets."""
        self.model.train(self.training)
        self.kept.update()
        self.steps.record(record)
        self.clear_gradients()

    def accumulate_gradients(self, group: Sequence[Batch], *, num_scored_tokens: int) -> Tensor:
        """Add the gradients of micro-batches. Returns: [2], sums of loss and of computed positions."""
        self.model.train(self.training)
        self.kept.update()
        losses: list[Tensor] = []
        num_positions = 0
        for batch in group:
            loss, num = self.steps.run(batch, weight=0 if batch.is_filler else 1 / num_scored_tokens)
            losses.append(loss)
            num_positions += num
        total = torch.stack(losses).sum()
        return torch.stack([total, torch.full_like(total, num_positions)])

    def clear_gradients(self) -> None:
        """Zero the gradients in place, because graphs write to their addresses."""
        self.gradients.zero_()


def _add_gradients(
    model: T5Model, kept: KeptWeights, autocast: Autocast, fused: bool, objective: Objective, static: StaticBatch
) -> Tensor:
    """Forward and backward of a static batch. Returns: the weighted loss, [] fp32, detached."""
    with kept.attach():
        with autocast(), draw_seeds_together():
            nats = compute_static_losses(model, static, fused=fused, objective=objective)
        loss = (nats * static.weights).sum()
        loss.backward()
    return loss.detach().float()
