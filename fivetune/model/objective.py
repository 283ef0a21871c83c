"""The objective of a training step: the gradient of token losses, of which the values remain -log p.

In: logits and labels. Out: losses with the value of the negative log-likelihood and the gradient of the objective, or
that gradient itself. So the recorded losses of runs with different options can be compared.

    objective of a token = (1 - e) nll + e / V sum_v(-log p_v) + z log(Z)^2
    with R-Drop          = mean of both passes' objectives + alpha / 4 (KL(P1 || P2) + KL(P2 || P1))

e is label smoothing (Szegedy et al. 2016, as in torch), z the z-loss on the log-partition log Z of the logits (Mesh
TensorFlow; PaLM, Chowdhery et al. 2022), R-Drop (Liang et al. 2021) the divergence of two passes with different
dropout: half the paper's loss, so that alpha has its meaning and the rate need not change. A class weight multiplies
the sum of an example. With the soft targets of a teacher (Hinton et al. 2015), whose predictions are Q,

    objective = (1 - alpha) objective of the label + alpha T^2 KL(Q_T || P_T)

where both are divided by the temperature T before the softmax; T^2 keeps the gradient's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivetune.data.store.batch import IGNORE_INDEX
from fivetune.types import Batch

MAX_CHUNK_LOGITS = 2**24  # logits of one chunk


@dataclass(frozen=True, slots=True, eq=False)
class SoftTargets:
    """A teacher's predictions of the scored tokens of a batch; their logits are computed in chunks.

    Args:
        hidden: [N, d] the teacher's decoder output, scaled for its head, in the order of the labels.
        head: [V, d] the teacher's head, of the dtype of `hidden`.
        cap: bound of the teacher's logits; None: not bounded.
        alpha: the teacher's share of the objective.
        temperature: divides the logits of both.
    """

    hidden: Tensor
    head: Tensor
    cap: float | None
    alpha: float
    temperature: float

    def compute_gradient(self, logits: Tensor, start: int) -> Tensor:
        """The gradient of alpha T^2 KL(Q_T || P_T) by logits [n, V] of the tokens from `start` on: fp32.

        Rows of a table beyond the other model's are not pieces; the teacher gives them no probability.
        """
        teacher = self.hidden[start : start + len(logits)] @ self.head[: logits.shape[-1]].t()
        teacher = apply_cap(teacher.float(), self.cap)
        share = logits.float().div(self.temperature).softmax(-1)
        share[:, : teacher.shape[-1]] -= teacher.div_(self.temperature).softmax(-1)
        return share.mul_(self.alpha * self.temperature)


@dataclass(frozen=True, slots=True)
class Objective:
    """Options of the objective; 0 or an empty table is off.

    Args:
        label_smoothing: share of the target probability that is spread over all tokens, from 0 to below 1.
        z_loss: factor of log(Z)^2.
        r_drop: alpha of R-Drop; the batch has every example twice, the second copies after all first ones.
        class_weights: factor of an example's gradient by the token ids of its target; others have 1.
        soft: the predictions of a teacher for the batch; None without one. Not with R-Drop.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    r_drop: float = 0.0
    class_weights: Mapping[tuple[int, ...], float] = field(default_factory=dict[tuple[int, ...], float], hash=False)
    soft: SoftTargets | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the gradient of a token is that of its negative log-likelihood, but for a factor."""
        return not (self.label_smoothing or self.z_loss or self.r_drop or self.soft)

    @property
    def num_passes(self) -> int:
        """How often an example is computed in a step."""
        return 2 if self.r_drop else 1

    def weigh_examples(self, batch: Batch) -> Tensor:
        """The weights of a batch's examples, [B] fp32.

        >>> ids, ends = torch.tensor([7, 1, 9, 1]), torch.tensor([0, 2, 4])
        >>> Objective(class_weights={(7, 1): 3.0}).weigh_examples(Batch(ids, ids, ends, ends, ("a", "b"))).tolist()
        [3.0, 1.0]
        """
        targets = batch.labels.split(batch.cu_seqlens_tgt.diff().tolist())
        return torch.tensor([self.class_weights.get(tuple(target.tolist()), 1.0) for target in targets])


PLAIN = Objective()


def apply_cap(logits: Tensor, cap: float | None) -> Tensor:
    """cap tanh(logits / cap), in place; without a cap the logits."""
    if cap is None:
        return logits
    return logits.div_(cap).tanh_().mul_(cap)


def attach_gradient(values: Tensor, objective: Tensor) -> Tensor:
    """A tensor with the values of the first and the gradient of the second; of one shape."""
    return values.detach() + (objective - objective.detach())


def compute_token_losses(logits: Tensor, labels: Tensor, objective: Objective = PLAIN) -> Tensor:
    """-log softmax(logits)[label] with the gradient of the objective; 0 at labels of -100.

    Args:
        logits: [B, T, V] fp32. labels: [B, T]. With R-Drop, B counts both copies.
    """
    rows = logits.flatten(0, 1)
    targets = labels.flatten()
    nats = F.cross_entropy(rows, targets, ignore_index=IGNORE_INDEX, reduction="none")
    if objective.is_plain:
        return nats.view_as(labels)
    # The losses of all terms; only their gradient is used.
    smoothing = objective.label_smoothing
    whole = F.cross_entropy(rows, targets, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing)
    whole = whole + objective.z_loss * rows.logsumexp(-1).square()
    if objective.r_drop:
        first, second = rows.log_softmax(-1).chunk(2)
        # KL(P || Q) + KL(Q || P) = sum((p - q) (log p - log q)), for both copies of a token.
        divergence = ((first.exp() - second.exp()) * (first - second)).sum(-1)
        whole = whole + objective.r_drop / 4 * divergence.repeat(2)
    whole = whole.masked_fill(targets == IGNORE_INDEX, 0.0)
    if objective.soft:
        divergence = _SoftGradient.apply(rows, targets != IGNORE_INDEX, objective.soft)
        whole = (1 - objective.soft.alpha) * whole + divergence
    return attach_gradient(nats, whole).view_as(labels)


class _SoftGradient(torch.autograd.Function):
    """Adds the gradient of the soft targets to that of logits [N, V], in chunks; its values, [N], are 0."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, is_scored: Tensor, soft: SoftTargets) -> Tensor:
        ctx.save_for_backward(logits, is_scored)
        ctx.soft = soft
        return logits.new_zeros(len(logits))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, is_scored = ctx.saved_tensors
        total = torch.zeros_like(logits)
        start = 0  # the teacher has rows for scored tokens only
        for rows in is_scored.nonzero()[:, 0].split(max(1, MAX_CHUNK_LOGITS // logits.shape[-1])):
            total[rows] = ctx.soft.compute_gradient(logits[rows], start).mul_(grad[rows, None])
            start += len(rows)
        return total, None, None


def compute_logit_gradient(
    logits: Tensor, norms: Tensor, labels: Tensor, weights: Tensor, objective: Objective = PLAIN, *, start: int = 0
) -> Tensor:
    """The gradient of sum(weights x objective) by the logits, [N, V] fp32.

    Args:
        logits: [N, V], with R-Drop the two passes of a token in rows 2i and 2i + 1, which have the same weight.
        norms: [N] fp32, the logits' log Z. labels: [N]. weights: [N].
        start: number of the first row among the tokens of the batch.
    """
    share = logits.float().sub(norms[:, None])  # one buffer of the logits' size for all terms
    # Before `share` is overwritten: it is log p here, the gradient of the label's loss below.
    divergence = _compute_divergence_gradient(share) if objective.r_drop else None
    share = share.exp_()
    if objective.z_loss:  # log(Z)^2 has the gradient 2 log(Z) p
        share.mul_((1 + 2 * objective.z_loss * norms)[:, None])
    if objective.label_smoothing:
        share.sub_(objective.label_smoothing / logits.shape[-1])
    share.scatter_add_(1, labels[:, None], torch.full_like(norms, objective.label_smoothing - 1)[:, None])
    if divergence is not None:
        share.add_(divergence, alpha=objective.r_drop / 2)
    if objective.soft:
        share.mul_(1 - objective.soft.alpha).add_(objective.soft.compute_gradient(logits, start))
    return share.mul_(weights[:, None])


def _compute_divergence_gradient(log_p: Tensor) -> Tensor:
    """The gradient of KL(P || Q) + KL(Q || P) by the logits of both, where rows 2i and 2i + 1 are log P and log Q."""
    first, second = log_p.unflatten(0, (-1, 2)).unbind(1)
    p = first.exp()
    q = second.exp()
    ratio = first - second
    of_first = p * (ratio - (p * ratio).sum(-1, keepdim=True)) + p - q
    of_second = q * ((q * ratio).sum(-1, keepdim=True) - ratio) + q - p
    return torch.stack([of_first, of_second], 1).flatten(0, 1)
