"""Embedding lookup and output head with cross-entropy; a tied table receives a single gradient.

In: ids, hidden states [N, d], a table [V, d]. Out: embeddings [N, d]; -log p of every label [N], in nats, with the
gradient of the objective (`objective.py`).
Logits are computed in chunks unless they are small: mT5 has 250,112 of them per token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fivetune.model.cuda.dispatch import needs_attention_kernel, supports_fused
from fivetune.model.modules import AutogradContext
from fivetune.model.objective import MAX_CHUNK_LOGITS, PLAIN, Objective, apply_cap, compute_logit_gradient
from fivetune.model.precision import copy_weights, get_matmul_dtype, suppress_autocast
from fivetune.model.weight_cache import add_at_, add_product_, get_kept_grad


class _EmbedContext(AutogradContext):
    tied_gradient: TiedGradient
    parameter: Tensor
    by_kernel: bool


class _HeadContext(AutogradContext):
    tied_gradient: TiedGradient | None
    parameter: Tensor
    table_dtype: torch.dtype
    rows: int
    cap: float | None
    objective: Objective
    fused: bool


class _TableGrad(Protocol):
    def add_rows(self, ids: Tensor, rows: Tensor) -> None: ...
    def add_product(self, share: Tensor, hidden: Tensor) -> None: ...


CUDA_CHUNKS = 8  # chunks of MAX_CHUNK_LOGITS that CUDA computes at once: 512 MiB of fp32
CHUNK_TILE = 128  # rows of a tile of cuBLAS's products
MAX_SAVED_LOGITS = 2**24  # most logits saved for the backward pass (64 MiB in fp32); beyond, all are recomputed
THIN = 4  # the head's gradient stays factored up to n = d / THIN rows; beyond, the dense gradient is as cheap


class TiedGradient:
    """Accumulates the gradient of a tied embedding: the head writes it, the lookup adds to it."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None


def embed(table: Tensor, ids: Tensor, tied_gradient: TiedGradient) -> Tensor:
    """Look up rows of the table, [N, d]; all ids of a step in one call, so that the table receives one gradient."""
    return Embed.apply(table, ids, tied_gradient)


class Embed(torch.autograd.Function):
    """A lookup; its gradient is added to the head's, or to the optimizer's factored gradient."""

    @staticmethod
    def forward(ctx: _EmbedContext, table: Tensor, ids: Tensor, tied_gradient: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.tied_gradient = tied_gradient
        ctx.parameter = table
        ctx.by_kernel = needs_attention_kernel(table)  # the backward pass is outside of autocast
        return table[ids]

    @staticmethod
    def backward(ctx: _EmbedContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (ids,) = ctx.saved_tensors
        place = get_kept_grad(ctx.parameter)
        total = ctx.tied_gradient.grad if place is None else place
        ctx.tied_gradient.grad = None
        # Without the head's dense gradient, the rows stay factored too.
        if total is None and (parts := _get_table_grad(ctx.parameter)) is not None:
            parts.add_rows(ids, grad)
            return None, None, None
        if total is None:
            total = grad.new_zeros(ctx.parameter.shape)
        if ctx.by_kernel:
            from fivetune.model.cuda import rows

            rows.add_rows_(total, ids, grad)
        else:
            add_at_(total, ids, grad)
        if place is not None:  # the gradient is where the optimizer reads it
            total = None
        return total, None, None


def _get_table_grad(parameter: Tensor) -> _TableGrad | None:
    """The optimizer's factored gradient of a table; None if its gradient is dense."""
    return getattr(parameter, "table_grad", None) if parameter.grad is None else None


def compute_head_losses(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    tied_gradient: TiedGradient | None,
    *,
    cap: float | None = None,
    objective: Objective = PLAIN,
    fused: bool = False,
) -> Tensor:
    """-log softmax(hidden head^T)[label] with the gradient of the objective, [N] fp32.

    Args:
        hidden: [N, d]. head: [V, d]. labels: [N], every one scored.
        tied_gradient: receives the gradient of a tied head; None for an untied one.
        cap: bound of the logits, cap tanh(logits / cap); None: not bounded.
        objective: with R-Drop, N counts the tokens of both passes, first all of the first pass.
        fused: compute the losses and the gradient of the logits by Triton's kernels where these support them.
    """
    kind = get_matmul_dtype(hidden.device)
    if objective.r_drop:
        # A chunk holds both passes of its tokens: rows 2i and 2i + 1 belong to one token.
        hidden = hidden.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
        labels = labels.view(2, -1).t().flatten()
    with suppress_autocast(hidden.device):
        hidden = hidden.to(kind)
        fused = fused and cap is None and objective.is_plain and supports_fused(hidden)
        nats = LinearCrossEntropy.apply(hidden, head, labels, tied_gradient, cap, objective, fused)
    if objective.r_drop:
        nats = nats.view(-1, 2).t().flatten()
    return nats


class LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in chunks of rows: products in the dtype of `hidden`, the head's gradient in its own.

    In 16 bits the sum over thousands of rows would lose small addends and stop growing.
    """

    @staticmethod
    def forward(
        ctx: _HeadContext,
        hidden: Tensor,
        head: Tensor,
        labels: Tensor,
        tied_gradient: TiedGradient | None,
        cap: float | None,
        objective: Objective,
        fused: bool,
    ) -> Tensor:
        ctx.parameter = head  # `head` is a copy in the dtype of products below
        step = objective.num_passes
        rows = choose_chunk_rows(len(head), hidden.device.type, step)
        ctx.table_dtype = head.dtype
        head = copy_weights(hidden.dtype, head)
        # Small logits are kept for the backward pass; large ones would take more memory than time.
        keeps = len(hidden) * len(head) <= MAX_SAVED_LOGITS
        nats = []
        norms = []
        kept = []
        for part, targets in zip(hidden.split(rows), labels.split(rows), strict=True):
            logits = apply_cap(part @ head.t(), cap)
            if fused:
                from fivetune.model.cuda.cross_entropy import compute_nats

                nat, norm = compute_nats(logits, targets)
            else:
                norm = logits.float().logsumexp(-1)
                nat = norm - logits.gather(1, targets[:, None])[:, 0]
            nats.append(nat)
            norms.append(norm)
            if keeps:
                kept.append(logits)
        ctx.save_for_backward(hidden, head, labels, torch.cat(norms), *kept)
        ctx.rows = rows
        ctx.tied_gradient = tied_gradient
        ctx.cap = cap
        ctx.objective = objective
        ctx.fused = fused
        return torch.cat(nats)

    @staticmethod
    def backward(ctx: _HeadContext, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, head, labels, norms, *kept = ctx.saved_tensors
        place = get_kept_grad(ctx.parameter)
        of_hidden = torch.empty_like(hidden)
        of_head = place
        # Few rows of a large table: the optimizer takes the two thin factors of its gradient.
        factored = ctx.needs_input_grad[1] and len(hidden) * THIN <= hidden.shape[1]
        table_grad = _get_table_grad(ctx.parameter) if factored else None
        parts = (t.split(ctx.rows) for t in (hidden, labels, norms, grad, of_hidden))
        for i, (part, targets, norm, weight, of_part) in enumerate(zip(*parts, strict=True)):
            logits = kept[i] if kept else apply_cap(part @ head.t(), ctx.cap)
            if ctx.fused:
                from fivetune.model.cuda.cross_entropy import compute_nats_gradient

                share = compute_nats_gradient(logits, norm, targets, weight)
            else:
                share = compute_logit_gradient(logits, norm, targets, weight, ctx.objective, start=i * ctx.rows)
            if ctx.cap is not None:  # the slope of the cap, 1 - tanh^2
                share.addcmul_(share, (logits.float() / ctx.cap).square_(), value=-1)
            share = share.to(head.dtype)
            torch.mm(share, head, out=of_part)
            if table_grad is not None:
                table_grad.add_product(share, part)
            elif ctx.needs_input_grad[1]:
                if of_head is None:
                    of_head = (share.t() @ part).to(ctx.table_dtype)
                else:
                    of_head = add_product_(of_head, share.t(), part)
        if place is not None:
            of_head = None  # it was added where the optimizer reads it
        elif ctx.tied_gradient is not None and of_head is not None:
            # The lookup's backward pass comes later and adds its rows to this gradient.
            ctx.tied_gradient.grad = of_head
            of_head = None
        return of_hidden, of_head, None, None, None, None, None


def choose_chunk_rows(num_logits: int, kind: str, step: int = 1) -> int:
    """Choose the rows of a chunk of logits: a multiple of `step` (1 or 2), on CUDA whole tiles of a product.

    Each chunk writes and reads a product of the table's size, so that a GPU with its memory takes few large ones.

    >>> choose_chunk_rows(250112, "cpu"), choose_chunk_rows(250112, "cuda")
    (67, 512)
    """
    if kind == "cuda":
        return max(1, CUDA_CHUNKS * MAX_CHUNK_LOGITS // num_logits // CHUNK_TILE) * CHUNK_TILE
    return max(1, MAX_CHUNK_LOGITS // num_logits // step) * step
