"""The options of the loss: values stay -log p, gradients are those of torch's functions on whole logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from flat_kit import gradients, make_batch, make_model, padded_nats
from torch import Tensor

from fivetune.data.store.batch import IGNORE_INDEX, join_batches, pad, split_batch
from fivetune.model import flat, loss, ops
from fivetune.model.backend import Forward
from fivetune.model.forward import compute_padded_losses
from fivetune.model.loss import TiedGradient, compute_head_losses, embed
from fivetune.model.objective import Objective, attach_gradient, compute_token_losses

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z": {"z_loss": 1e-2},
    "r_drop": {"r_drop": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "r_drop": 1.0},
}


def expect(logits: Tensor, labels: Tensor, *, label_smoothing: float = 0, z_loss: float = 0, r_drop: float = 0) -> Any:
    """The objective of every row by torch's functions; of R-Drop's passes, the sum of a pair is that of both."""
    whole = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    whole = whole + z_loss * logits.exp().sum(-1).log() ** 2
    if r_drop:
        one, two = logits.log_softmax(-1).chunk(2)
        both = [F.kl_div(a, b, log_target=True, reduction="none").sum(-1) for a, b in ((one, two), (two, one))]
        whole = whole + r_drop / 4 * (both[0] + both[1]).repeat(2)
    return whole


@pytest.mark.parametrize("chunk", [2**24, 50 * 5], ids=["whole", "chunked"])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_head_has_the_gradient_of_torch_on_whole_logits(monkeypatch, name, cap, chunk):
    for limit in ("MAX_CHUNK_LOGITS", "MAX_SAVED_LOGITS"):
        monkeypatch.setattr(loss, limit, chunk)
    torch.manual_seed(0)
    hidden, table = torch.randn(22, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    labels, weights = torch.randint(0, 50, (11,)).repeat(2), torch.rand(11).repeat(2)
    logits = hidden @ table.t()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    plain, whole = F.cross_entropy(logits, labels, reduction="none"), expect(logits, labels, **OPTIONS[name])
    expected = torch.autograd.grad((whole * weights).sum(), (hidden, table), retain_graph=True)
    objective = Objective(**OPTIONS[name])
    flat_losses = compute_head_losses(hidden, table, labels, None, cap=cap, objective=objective)
    padded_losses = compute_token_losses(logits[:, None], labels[:, None], objective)[:, 0]
    for losses in (flat_losses, padded_losses):
        torch.testing.assert_close(losses, plain, rtol=1e-5, atol=1e-5)
        found = torch.autograd.grad((losses * weights).sum(), (hidden, table), retain_graph=True)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)


def test_a_tied_table_gets_the_gradient_of_lookup_and_objective():
    torch.manual_seed(0)
    table, ids, labels = torch.randn(30, 8, requires_grad=True), torch.arange(12), torch.arange(12, 24)
    meeting, objective = TiedGradient(), Objective(label_smoothing=0.1, z_loss=1e-2)
    ours = compute_head_losses(embed(table, ids, meeting), table, labels, meeting, objective=objective)
    theirs = expect(table[ids] @ table.t(), labels, label_smoothing=0.1, z_loss=1e-2)
    torch.testing.assert_close(*(torch.autograd.grad(each.sum(), table)[0] for each in (ours, theirs)))


@pytest.mark.parametrize("family", ["t5", "v1_1"])
@pytest.mark.parametrize("name", ["smoothing", "z", "all"])
def test_flat_tokens_have_the_gradients_of_padded_ones(family, name):
    """Of uneven targets, which the padded forward pads."""
    model, batch = make_model(family), make_batch([(5, 3), (9, 4), (3, 1)])
    batch = join_batches([batch, batch])
    objective = Objective(**OPTIONS[name])
    padded = pad(batch, pad_id=0)
    theirs = compute_padded_losses(model, padded, objective=objective)
    assert not theirs[padded.labels == IGNORE_INDEX].any()
    ours = flat.compute_flat_losses(model, batch, objective=objective)
    torch.testing.assert_close(ours, padded_nats(model, batch), rtol=1e-5, atol=1e-5)
    found, expected = gradients(model, ours), gradients(model, theirs)
    assert max((found[key] - value).norm() / value.norm() for key, value in expected.items()) < 1e-5


def spread_passes(x: Tensor, rate: float, *, fused: bool = False) -> Tensor:
    """In place of dropout: the rows of the second pass are larger, whatever the split of a step."""
    x[len(x) // 2 :] *= 1.1
    return x


@pytest.mark.parametrize("cut", [1, 2])
def test_r_drop_of_a_split_batch_is_that_of_the_whole(monkeypatch, cut):
    monkeypatch.setattr(ops, "apply_dropout_", spread_passes)
    model = make_model("t5")
    forward = Forward("flat", "", objective=Objective(r_drop=2.0, label_smoothing=0.1))
    lengths = [(5, 3), (9, 4), (3, 1), (4, 2)]
    whole, positions = forward.compute_losses(model, make_batch(lengths), device="cpu")
    assert (whole.shape, positions) == ((10,), 31)
    model.zero_grad()
    whole.sum().backward()
    expected = model.shared.weight.grad.clone()
    model.zero_grad()
    batches = [make_batch(lengths)]
    for _ in range(cut):
        batches = [half for batch in batches for half in split_batch(batch)]
    parts = [forward.compute_losses(model, batch, device="cpu")[0] for batch in batches]
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.cat(parts).sum().backward()
    torch.testing.assert_close(model.shared.weight.grad, expected, rtol=1e-4, atol=1e-5)
    plain = Forward("flat", "", objective=Objective(label_smoothing=0.1))
    other = gradients(model, plain.compute_losses(model, make_batch(lengths), device="cpu")[0])["shared.weight"]
    assert (other - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["flat", "padded"])
def test_a_class_weight_scales_the_gradient_of_an_example_and_not_its_loss(kind):
    model, lengths = make_model("t5"), [(5, 3), (9, 4), (3, 1)]
    batch = make_batch(lengths)
    rare = tuple(batch.labels[3:7].tolist())
    plain, weighted = (Forward(kind, "", objective=Objective(class_weights=table)) for table in ({}, {rare: 3.0}))
    usual, ours = (each.compute_losses(model, batch, device="cpu")[0] for each in (plain, weighted))
    assert torch.equal(usual, ours)
    factors = torch.tensor([1.0] * 3 + [3.0] * 4 + [1.0]) if kind == "flat" else torch.tensor([[1.0], [3.0], [1.0]])
    expected, found = gradients(model, usual * factors), gradients(model, ours)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def test_forwards_are_keys_of_what_was_measured():
    one, other = (Forward("flat", "", objective=Objective(class_weights={(1,): w})) for w in (1.0, 2.0))
    assert len({one: 0, other: 1, replace(one): 2}) == 2


def test_values_and_gradient_may_come_from_different_tensors():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    found = attach_gradient(x * 2, x * 5)
    assert found.tolist() == [2.0, 4.0] and torch.autograd.grad(found.sum(), x)[0].tolist() == [5.0, 5.0]
