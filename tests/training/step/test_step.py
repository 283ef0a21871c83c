"""One optimizer step: which examples it learns, and what it leaves behind."""

from __future__ import annotations

from dataclasses import replace

import kit
import pytest
import torch

from fivetune.data.store.batch import collate
from fivetune.distributed.sharding import scale_gradients
from fivetune.errors import NumericError
from fivetune.model.loss import compute_head_losses
from fivetune.training.step.update import train_step


@pytest.fixture
def make_setup(tmp_path, model_folder):
    return lambda dropout=0.0: kit.ready(tmp_path, model_folder, model__dropout=dropout)


def test_a_filler_batch_is_not_learnt(make_setup):
    alone, filled = make_setup(), make_setup()
    own, other = (collate(alone.data.stream.store, rows) for rows in ([0, 1], [2]))
    options = {"lr": 1e-3, "step": 1}
    expected = train_step(alone.learner, [own], **options)
    found = train_step(filled.learner, [own, replace(other, is_filler=True)], **options)
    assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_memory_that_runs_out_later_leaves_no_trace(make_setup, monkeypatch, dropout):
    """The second micro-batch does not fit: the gradients and the random numbers of the first one are forgotten."""
    whole, cut = make_setup(dropout), make_setup(dropout)
    store = whole.data.stream.store
    torch.manual_seed(3)
    halves = [collate(store, rows) for rows in ([0, 1], [2, 3], [4, 5], [6, 7])]
    expected = train_step(whole.learner, halves, lr=1e-3, step=1)
    compute, num_calls = type(cut.learner.forward).compute_losses, 0

    def run_out(*args, **named):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(*args, **named)

    monkeypatch.setattr(type(cut.learner.forward), "compute_losses", run_out)
    torch.manual_seed(3)
    group = [collate(store, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]
    found = train_step(cut.learner, group, lr=1e-3, step=1)
    assert (num_calls, found.batch_size) == (6, 2)
    assert (found.loss, found.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-6)


@pytest.mark.parametrize(("norm", "scale"), [(0.5, 1.0), (4.0, 0.5)])
def test_small_sharded_gradients_stay_as_they_are(norm, scale):
    gradients = [torch.ones(3), torch.ones(2)]
    scale_gradients(gradients, torch.tensor(norm), 2.0)
    assert torch.cat(gradients).tolist() == pytest.approx([scale] * 5)
    scale_gradients(gradients, torch.tensor(norm), None)
    assert torch.cat(gradients).tolist() == pytest.approx([scale] * 5)


def test_losses_of_16_bit_products_are_summed_in_32():
    """A loss of bf16 logits is their exact one: 8 bits of the normaliser would be off by per cents of a nat."""
    torch.manual_seed(0)
    hidden, head = torch.randn(8, 16).bfloat16(), torch.randn(4000, 16).bfloat16()
    labels = torch.arange(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = compute_head_losses(hidden, head, labels, None)
    exact = torch.nn.functional.cross_entropy((hidden @ head.t()).double(), labels, reduction="none")
    assert (losses - exact).abs().max() < 1e-3


def test_fp16_gradients_that_overflow_at_every_loss_scale_end_the_run(tmp_path, model_folder):
    """16 scales from 65,536 on are tried; at 1 the gradient itself overflows."""
    learner = (setup := kit.ready(tmp_path, model_folder, train__precision="fp16")).learner
    group = [collate(setup.data.stream.store, [0, 1])]
    learner.model.shared.weight.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    before = [weight.detach().clone() for weight in learner.model.parameters()]
    for step in range(1, 17):
        assert train_step(learner, group, lr=1e-3, step=step).grad_norm == torch.inf
    with pytest.raises(NumericError, match=r"^step 17: gradient norm inf, .* with train.precision bf16 or fp32: "):
        train_step(learner, group, lr=1e-3, step=17)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
