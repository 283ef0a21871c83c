"""Embedding and head: the two ends of the model that share a large table, and its one gradient.

In: ids, hidden states [N, d], a table [V, d]. Out: embeddings [N, d]; -log p of every label [N], in nats.
The logits of a step are never made whole unless they are small: mT5 has 250,112 of them per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fivetune.model.precision import product_dtype, without_autocast

KEPT_VALUES = 2**24  # logits kept from forward to backward (64 MiB); more of them are computed again
CHUNK_VALUES = 2**24  # logits made at once
THIN = 4  # a product of n rows is kept as its factors up to n = d / THIN; beyond, the dense gradient is as cheap


class Meeting:
    """Where the gradients of a tied table meet: the head leaves its own, the embedding adds its rows to it."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None


def embed(table: Tensor, ids: Tensor, meeting: Meeting) -> Tensor:
    """Rows of the table, [N, d]; all ids of a step in one call, so that the table gets one gradient."""
    return Embed.apply(table, ids, meeting)


class Embed(torch.autograd.Function):
    """A lookup whose gradient is added to what the head left, or to the parts that the optimizer takes."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, meeting: Meeting) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.meeting, ctx.parameter = meeting, table
        return table[ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        total, ctx.meeting.grad = ctx.meeting.grad, None
        if total is None and (parts := _parts(ctx.parameter)) is not None:
            parts.add_rows(ids, grad)
            return None, None, None
        if total is None:
            total = grad.new_zeros(ctx.parameter.shape)
        return total.index_add_(0, ids, grad), None, None, None


def _parts(parameter: Any) -> Any:
    """Where the optimizer wants the gradient of a table in parts; None where it wants, or has begun, a dense one."""
    return getattr(parameter, "table_grad", None) if parameter.grad is None else None


def label_nats_of(hidden: Tensor, head: Tensor, labels: Tensor, meeting: Meeting | None) -> Tensor:
    """-log softmax(hidden head^T)[label], [N] fp32.

    Args:
        hidden: [N, d]. head: [V, d]. labels: [N], every one scored.
        meeting: where the head's gradient is left for the embedding of the same table; None for a head of its own.
    """
    kind = product_dtype(hidden.device)
    with without_autocast(hidden.device):
        return LinearCrossEntropy.apply(hidden.to(kind), head, labels, meeting)


class LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy, some rows at a time: products in the type of `hidden`, the head's gradient in its own.

    A sum of thousands of rows in 16 bits would stop growing at a few hundred.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, meeting: Meeting | None) -> Tensor:
        ctx.parameter = head
        rows, ctx.table_dtype = max(1, CHUNK_VALUES // len(head)), head.dtype
        head = head.to(hidden.dtype)
        keeps = len(hidden) * len(head) <= KEPT_VALUES
        nats, norms, kept = [], [], []
        for part, wanted in zip(hidden.split(rows), labels.split(rows), strict=True):
            logits = part @ head.t()
            norm = logits.float().logsumexp(-1)
            nats.append(norm - logits.gather(1, wanted[:, None])[:, 0])
            norms.append(norm)
            if keeps:
                kept.append(logits)
        ctx.save_for_backward(hidden, head, labels, torch.cat(norms), *kept)
        ctx.rows, ctx.meeting = rows, meeting
        return torch.cat(nats)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, labels, norms, *kept = ctx.saved_tensors
        of_hidden, of_head = torch.empty_like(hidden), None
        table_grad = _parts(ctx.parameter) if len(hidden) * THIN <= hidden.shape[1] else None
        parts = (t.split(ctx.rows) for t in (hidden, labels, norms, grad, of_hidden))
        for i, (part, wanted, norm, weight, of_part) in enumerate(zip(*parts, strict=True)):
            logits = kept[i] if kept else part @ head.t()
            share = logits.float().sub(norm[:, None]).exp_()
            share.scatter_add_(1, wanted[:, None], torch.full_like(norm, -1)[:, None])
            share = share.mul_(weight[:, None]).to(head.dtype)
            torch.mm(share, head, out=of_part)
            if table_grad is not None:
                table_grad.add_product(share, part)
            elif ctx.needs_input_grad[1]:
                of_head = _add_product(of_head, share.t(), part, ctx.table_dtype)
        if ctx.meeting is not None and of_head is not None:
            ctx.meeting.grad, of_head = of_head, None
        return of_hidden, of_head, None, None


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a b in `dtype`, in place."""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)
