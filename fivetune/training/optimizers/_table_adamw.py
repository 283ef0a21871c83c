"""AdamW with factored gradients for large embedding tables, and no committed state memory for rows without gradient.

In: parameter groups. Out: a torch optimizer with the steps and the state_dict of torch's AdamW.
The gradient of a vocabulary of 250,112 tokens takes 512 MB, but consists of a few rows (embedding) or of two thin
factors (head). `TableGrad` stores these; the dense gradient exists for `SLICE` rows at a time.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from fivetune.training.state.snapshot import list_weights

if TYPE_CHECKING:
    from fivetune.types import TorchState

SLICE = 2**14  # rows per slice of the dense gradient


class TableGrad:
    """Factored gradient of a table [V, d]: sparse `rows` at `ids`, plus the product share^T hidden.

    >>> grad = TableGrad()
    >>> grad.add_rows(torch.tensor([2, 0, 2]), torch.tensor([[1.0], [2.0], [3.0]]))
    >>> grad.to_dense(3).tolist()
    [[2.0], [0.0], [4.0]]
    """

    def __init__(self) -> None:
        self.rows: tuple[Tensor, Tensor] | None = None  # ids [u] ascending, gradients [u, d]
        self.product: tuple[Tensor, Tensor] | None = None  # share [n, V], hidden [n, d]

    def __bool__(self) -> bool:
        return self.rows is not None or self.product is not None

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows [N, d] at ids [N], which may repeat."""
        if self.rows:
            ids = torch.cat([self.rows[0], ids])
            rows = torch.cat([self.rows[1], rows])
        distinct, place = ids.unique(return_inverse=True)
        self.rows = distinct, rows.new_zeros(len(distinct), rows.shape[1]).index_add_(0, place, rows)

    def add_product(self, share: Tensor, hidden: Tensor) -> None:
        """Add the product share^T hidden of share [n, V] and hidden [n, d]."""
        share = share.detach()
        hidden = hidden.detach()
        # More tokens, not another product: the sum over tokens is in the product itself.
        if self.product:
            share = torch.cat([self.product[0], share])
            hidden = torch.cat([self.product[1], hidden])
        self.product = share, hidden

    def clear(self) -> None:
        self.rows = self.product = None

    def mul_(self, factor: Tensor | float) -> None:
        """Scale the gradient: the second factor of each part."""
        if self.rows:
            self.rows = self.rows[0], self.rows[1] * factor
        if self.product:
            self.product = self.product[0], self.product[1] * factor

    def compute_norm(self) -> Tensor:
        """Euclidean norm: |R + S^T H|^2 = |R|^2 + 2 <R, S^T H> + <S S^T, H H^T>, with long sums in fp64."""
        # Without the dense gradient: the product's norm follows from two matrices [n, n].
        total = torch.zeros((), dtype=torch.float64)
        if self.rows:
            total += self.rows[1].double().square().sum()
        if self.product:
            share, hidden = self.product
            by_share = (share @ share.t()).double()
            by_hidden = (hidden @ hidden.t()).double()
            total += (by_share * by_hidden).sum()
            if self.rows:
                ids, rows = self.rows
                there = share[:, ids].t() @ hidden
                total += 2 * (rows.double() * there.double()).sum()
        return total.clamp_min(0).sqrt().float()

    def iter_slices(self, num_rows: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the dense gradient of `num_rows` rows in slices of SLICE rows: start, end, [end - start, d]."""
        for start in range(0, num_rows, SLICE):
            end = min(start + SLICE, num_rows)
            grad = None
            if self.product:
                share, hidden = self.product
                grad = share[:, start:end].t() @ hidden
            if self.rows:
                ids, rows = self.rows
                low, high = torch.searchsorted(ids, torch.tensor([start, end])).tolist()
                if grad is None:
                    grad = rows.new_zeros(end - start, rows.shape[1])
                grad.index_add_(0, ids[low:high] - start, rows[low:high])
            assert grad is not None
            yield start, end, grad

    def to_dense(self, num_rows: int) -> Tensor:
        """The dense gradient, [num_rows, d]."""
        return torch.cat([grad for *_, grad in self.iter_slices(num_rows)])


def compute_total_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Euclidean norm of all gradients, factored ones included."""
    for parameter in parameters:
        _merge_parts(parameter)
    dense = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.nn.utils.get_total_norm(dense)]
    for parameter in parameters:
        if parts := getattr(parameter, "table_grad", None):
            norms.append(parts.compute_norm())
    return torch.linalg.vector_norm(torch.stack(norms))


def _merge_parts(parameter: Tensor) -> None:
    """Add the factored gradient to the dense one, if micro-batches have produced both."""
    if parameter.grad is not None and (parts := getattr(parameter, "table_grad", None)):
        parameter.grad += parts.to_dense(len(parameter))
        parts.clear()


def scale_tables(parameters: list[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale factored gradients as torch's clip_grads_with_norm_ scales dense ones."""
    for parameter in parameters:
        if parts := getattr(parameter, "table_grad", None):
            parts.mul_((max_norm / (norm + 1e-6)).clamp_max(1))


class TableAdamW(torch.optim.AdamW):
    """torch's fused AdamW; tables with `table_grad` are updated from the factored gradient.

    If only some rows of a table have gradients (an untied embedding), the other rows have zero moments and change by
    weight decay only. They are skipped, and the system commits memory for their moments only at the first write.
    """

    def __init__(self, groups: list[TorchState], *, smallest: int, **arguments: Any) -> None:
        """`smallest`: least number of elements of a table with a factored gradient."""
        super().__init__(groups, fused=True, **arguments)
        self._seen: dict[Tensor, Tensor] = {}  # rows [V] of each table that have or had a gradient
        for parameter in list_weights(self):
            if parameter.dim() == 2 and parameter.numel() >= smallest and parameter.device.type == "cpu":
                vars(parameter)["table_grad"] = TableGrad()
        self.register_step_pre_hook(self._merge_tables)  # overriding `step` would call other hooks twice
        self.register_step_post_hook(self._step_tables)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for parameter in list_weights(self):
            if parts := getattr(parameter, "table_grad", None):
                parts.clear()

    @torch.no_grad()
    def _merge_tables(self, *called: object) -> None:
        """Before torch's step: add factored to dense gradients. A dense step gives every row moments."""
        for parameter in list_weights(self):
            _merge_parts(parameter)
            if parameter.grad is not None:
                self._seen.pop(parameter, None)

    @torch.no_grad()
    def _step_tables(self, *called: object) -> None:
        """After torch's step: update the tables with a factored gradient, which torch skips."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parts := getattr(parameter, "table_grad", None):
                    self._step_table(parameter, parts, group)

    def _step_table(self, table: Tensor, parts: TableGrad, group: TorchState) -> None:
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = _allocate_zeros(table)
            state["exp_avg_sq"] = _allocate_zeros(table)
        seen = self._find_seen_rows(table)
        # A product, from the head, is the gradient of every row. With rows alone only those that have moments change.
        if parts.rows is None or parts.product or bool(seen.all()):
            for start, end, grad in parts.iter_slices(len(table)):
                rows = slice(start, end)
                _apply_adamw(table[rows], grad, state["exp_avg"][rows], state["exp_avg_sq"][rows], state["step"], group)
            seen.fill_(True)
        else:
            self._update_seen_rows(table, *parts.rows, state, group)
        state["step"] += 1

    def _update_seen_rows(
        self, table: Tensor, ids: Tensor, rows: Tensor, state: dict[str, Tensor], group: TorchState
    ) -> None:
        """Update the rows that have, or had, a gradient: `rows` at `ids`, zeros elsewhere."""
        seen = self._find_seen_rows(table)
        seen[ids] = True
        if group["weight_decay"]:
            table.mul_(1 - group["lr"] * group["weight_decay"])
        due = seen.nonzero()[:, 0]
        grad = rows.new_zeros(len(due), rows.shape[1])
        grad[torch.searchsorted(due, ids)] = rows
        # Rows without moments and gradient would not change: their memory is never touched.
        means = state["exp_avg"]
        squares = state["exp_avg_sq"]
        weight, mean, square = table[due], means[due], squares[due]
        _apply_adamw(weight, grad, mean, square, state["step"], {**group, "weight_decay": 0.0})
        table[due] = weight
        means[due] = mean
        squares[due] = square

    def _find_seen_rows(self, table: Tensor) -> Tensor:
        """Mask [V] of the rows that have or had a gradient; after loading, of rows with a nonzero second moment."""
        if table not in self._seen:
            moments = self.state[table]["exp_avg_sq"]
            self._seen[table] = torch.cat([part.any(1) for part in moments.split(SLICE)])
        return self._seen[table]

    def load_state_dict(self, state_dict: TorchState) -> None:
        super().load_state_dict(state_dict)
        self._seen = {}
        for parameter in list_weights(self):
            state = self.state[parameter]
            # Loaded moments are in ordinary memory: the memory of rows without a gradient is given back.
            if hasattr(parameter, "table_grad") and state:
                seen = self._find_seen_rows(parameter)
                if not seen.all():
                    for name in ("exp_avg", "exp_avg_sq"):
                        kept = _allocate_zeros(parameter)
                        kept[seen] = state[name][seen]
                        state[name] = kept


def _apply_adamw(
    parameter: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: TorchState
) -> None:
    """Apply torch's fused update to one tensor; `step` does not change."""
    beta1, beta2 = group["betas"]
    adamw(
        [parameter],
        [grad],
        [mean],
        [square],
        [],
        [step.clone()],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def _allocate_zeros(like: Tensor) -> Tensor:
    """Zeros of a tensor's shape in mapped memory: the system commits a page at its first write."""
    memory = mmap.mmap(-1, math.prod(like.shape) * like.element_size())
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # in a huge page one row would commit 2 MiB
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)
