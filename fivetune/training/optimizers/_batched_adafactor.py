"""Adafactor (Shazeer and Stern 2018) with the update rule of transformers, on stacked tensors, without host syncs.

In: parameter groups with gradients. Out: the steps of transformers' Adafactor, up to rounding, and its state:
step, RMS, and exp_avg_sq_row with exp_avg_sq_col (matrices) or exp_avg_sq (vectors), exp_avg with beta1.
Tensors of one shape are stacked; a large tensor is processed in blocks of rows, so that intermediate results fit into
a CPU's cache and never reach the size of the embedding. Sharded parameters (FSDP2) are gathered one stack at a time;
every rank computes the full update, keeps its shard of the weights, and holds the full optimizer state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from fivetune.distributed.sharding import gather_tensor, shard_like
from fivetune.training.optimizers._listed import many

if TYPE_CHECKING:
    from fivetune.types import TorchState

BLOCK = {"cpu": 1 << 18}  # elements per block: 1 MiB of fp32 fits into a core's cache
BLOCK_ELSEWHERE = 1 << 25


class BatchedAdafactor(Optimizer):
    """Drop-in replacement for `transformers.optimization.Adafactor`: same options, same state, same checkpoints.

    `keeps_whole_state`: every rank holds the full state, of sharded parameters too. `found_inf`: as for torch's fused
    optimizers, a number on the device; a step leaves weights and averages as they are unless it is 0.

    Its groups have the options of fivetune/training/optimizers/adafactor.py and `eps`: the constant added to squared
    gradients, and the lower bound of the RMS in scale_parameter.
    """

    keeps_whole_state = True
    _step_supports_amp_scaling = True
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for stack in self._iter_stacks(group):
                # Rows and columns are averaged over whole matrices: shards are gathered, and written back as shards.
                parts = stack.parameters
                stack.parameters = [_gather_parameter(part) for part in parts]
                stack.update()
                for part, full in zip(parts, stack.parameters, strict=True):
                    if full is not part:
                        part.copy_(shard_like(full, part))

    def compute_mean_rate(self) -> float | None:
        """Learning rate of the last step, averaged over all parameters; None before the first step."""
        total: Tensor | float = 0.0
        count = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state:
                    scale = state["RMS"].clamp(min=group["eps"][1]) if group["scale_parameter"] else 1.0
                    total = total + scale * compute_base_rate(group, state["step"]) * parameter.numel()
                    count += parameter.numel()
        return float(total) / count if count else None

    def _iter_stacks(self, group: TorchState) -> Iterator[_Stack]:
        """Yield the parameters with a gradient, stacked by shape and step number, at most one block per stack."""
        alike: dict[tuple[torch.Size, torch.device, torch.dtype, int], list[Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if not state:
                    state.update(create_adafactor_state(parameter, group["beta1"]))
                state["step"] += 1
                alike[parameter.shape, parameter.device, parameter.dtype, state["step"]].append(parameter)
        # Small tensors are stacked, as many as fit into a block: one launch for each operation.
        for (shape, device, _, _), parameters in alike.items():
            block = BLOCK.get(device.type, BLOCK_ELSEWHERE)
            size = max(1, block // max(shape.numel(), 1))
            for i in range(0, len(parameters), size):
                chunk = parameters[i : i + size]
                yield _Stack(group, chunk, [self.state[p] for p in chunk], block, self.found_inf)


def _gather_parameter(parameter: Tensor) -> Tensor:
    """Gather a sharded parameter and its gradient; an unsharded one is returned unchanged."""
    full = gather_tensor(parameter)
    if full is not parameter:
        assert parameter.grad is not None
        full.grad = gather_tensor(parameter.grad)
    return full


def compute_base_rate(group: TorchState, step: int) -> float:
    """Learning rate of a 1-based step before scaling: the group's, or with relative_step min(1/sqrt(step), cap)."""
    if not group["relative_step"]:
        return group["lr"]
    cap = 1e-6 * step if group["warmup_init"] else 1e-2
    return min(cap, 1 / math.sqrt(step))


def create_adafactor_state(parameter: Tensor, beta1: float | None) -> TorchState:
    """Create the state of a parameter before its first step."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=parameter.device)

    shape = parameter.shape
    momentum = {} if beta1 is None else {"exp_avg": zeros(*shape)}
    if len(shape) >= 2:
        squares = {"exp_avg_sq_row": zeros(*shape[:-1]), "exp_avg_sq_col": zeros(*shape[:-2], shape[-1])}
    else:
        squares = {"exp_avg_sq": zeros(*shape)}
    return {"step": 0, **momentum, **squares, "RMS": 0}


@dataclass(slots=True)
class _Stack:
    """n parameters of one shape [..., R, C] (or [C], or []), their states, and the block size in elements."""

    group: TorchState
    parameters: list[Tensor]
    states: list[TorchState]
    block: int
    found_inf: Tensor | None = None

    def update(self) -> None:
        """Apply one step. A tensor's rate is divided by RMS(update) / clip_threshold if that is above 1."""
        grads = _stack_tensors([p.grad for p in self.parameters])  # type: ignore[misc]
        rates = self._compute_rates()
        if grads.dim() > 2:
            self._update_matrices(grads, rates)
        else:
            self._update_vectors(grads, rates)

    def _compute_rates(self) -> Tensor:
        """Compute the learning rate of each parameter in this step, [n], and store its RMS in the state."""
        rate = compute_base_rate(self.group, self.states[0]["step"])
        if not self.group["scale_parameter"]:
            return rate * torch.ones(len(self.parameters), device=self.parameters[0].device)
        norms = many._foreach_norm(self.parameters, 2, dtype=torch.float32)
        rms = torch.stack(norms) / math.sqrt(self.parameters[0].numel())
        for state, value in zip(self.states, rms.unbind(), strict=True):
            state["RMS"] = value
        return rms.clamp(min=self.group["eps"][1]) * rate

    def _update_vectors(self, grads: Tensor, rates: Tensor) -> None:
        squares = grads.square() + self.group["eps"][0]
        update = self._update_averages("exp_avg_sq", squares).rsqrt_().mul_(grads)
        scale = self._clip_rates(rates, update.square())
        update.mul_(_align_dims(scale, update))
        self._subtract(self.parameters, self._list_averages("exp_avg"), update, rates)

    def _update_matrices(self, grads: Tensor, rates: Tensor) -> None:
        """Apply update = grad * row * col; its squared norm is sum over rows of row^2 * sum((grad * col)^2)."""
        # First pass over the blocks: the means of squares by row and by column.
        blocks = self._split_rows(grads)
        rows = []
        cols = torch.zeros_like(grads[..., 0, :])
        for block in blocks:
            squares = grads[..., block, :].square()
            rows.append(squares.mean(-1))
            cols += squares.sum(-2)
        eps = self.group["eps"][0]
        row = self._update_averages("exp_avg_sq_row", torch.cat(rows, -1) + eps)
        col = self._update_averages("exp_avg_sq_col", cols / grads.shape[-2] + eps)
        col = col.rsqrt_().unsqueeze(-2)
        # The factored second moment is row col / mean(row) (Shazeer and Stern 2018, algorithm 4).
        row = (row / row.mean(-1, keepdim=True)).rsqrt_()

        # Second pass: the size of the update, which bounds the rate. Third pass: the update itself.
        sums = [(grads[..., block, :] * col).square_().sum(-1) for block in blocks]
        scale = self._clip_rates(rates, torch.cat(sums, -1) * row.square())
        row = row.mul_(_align_dims(scale, row)).unsqueeze(-1)
        momenta = self._list_averages("exp_avg")
        for block in blocks:
            update = (grads[..., block, :] * col).mul_(row[..., block, :])
            parameters = [p[..., block, :] for p in self.parameters]
            self._subtract(parameters, [m[..., block, :] for m in momenta], update, rates)

    def _split_rows(self, grads: Tensor) -> list[slice]:
        """Slices of the rows with about `block` elements each, counted over all matrices."""
        num_rows = grads.shape[-2]
        size = max(1, self.block * num_rows // max(grads.numel(), 1))
        return [slice(i, i + size) for i in range(0, num_rows, size)]

    def _update_averages(self, name: str, value: Tensor) -> Tensor:
        """Update the running averages `name` with `value` [n, ...]; returns a copy of the averages."""
        weight = math.pow(self.states[0]["step"], self.group["decay_rate"])
        averages = self._list_averages(name)
        before = _stack_tensors(averages)
        moved = before * (1 - weight) + value * weight
        # The host does not know yet whether the step is finite: the device chooses.
        if self.found_inf is not None:
            moved = torch.where(self.found_inf > 0, before, moved)
        many._foreach_copy_(averages, list(moved.unbind()))
        return moved

    def _list_averages(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.states if name in state]

    def _clip_rates(self, rates: Tensor, squares: Tensor) -> Tensor:
        """Divide the rates [n] by max(1, RMS(update) / clip_threshold).

        Args:
            squares: [n, ...]; its sum per parameter is the squared norm of the update.
        """
        totals = squares.reshape(len(rates), -1).sum(1)
        rms = (totals / self.parameters[0].numel()).sqrt()
        return rates / (rms / self.group["clip_threshold"]).clamp(min=1)

    def _subtract(self, parameters: list[Tensor], momenta: list[Tensor], update: Tensor, rates: Tensor) -> None:
        """Apply weight decay and updates [n, ...] to (blocks of) n parameters, through their momenta if any."""
        if momenta and self.found_inf is not None:
            before = _stack_tensors(momenta)
            moved = before * self.group["beta1"] + update * (1 - self.group["beta1"])
            update = torch.where(self.found_inf > 0, before, moved)
            many._foreach_copy_(momenta, list(update.unbind()))
        elif momenta:
            many._foreach_mul_(momenta, self.group["beta1"])
            many._foreach_add_(momenta, list(update.unbind()), alpha=1 - self.group["beta1"])
            update = _stack_tensors(momenta)
        if self.group["weight_decay"]:
            update = torch.addcmul(
                update, _stack_tensors(parameters), _align_dims(self.group["weight_decay"] * rates, update)
            )
        if self.found_inf is not None:
            update = update.masked_fill(self.found_inf > 0, 0.0)
        many._foreach_sub_(parameters, list(update.unbind()))


def _stack_tensors(tensors: list[Tensor]) -> Tensor:
    """Stack tensors to [n, ...] in fp32; a single fp32 tensor is not copied."""
    if len(tensors) == 1:
        return tensors[0].unsqueeze(0).float()
    return torch.stack(tensors).float()


def _align_dims(scale: Tensor, tensor: Tensor) -> Tensor:
    """Reshape [n] so that it multiplies [n, ...] along the first dimension."""
    return scale.view(-1, *[1] * (tensor.dim() - 1))
