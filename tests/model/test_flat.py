"""The forward on flat tokens: the loss and every gradient are those of transformers on padded input."""

from __future__ import annotations

import pytest
import torch
from flat_kit import SHAPES, gradients, make_batch, make_model, padded_nats
from torch import Tensor

from fivetune.model import loss
from fivetune.model.flat import compute_flat_losses, explain_unsupported_model

LENGTHS = [(5, 2), (70, 9), (1, 1), (33, 70), (66, 1), (9, 3), (9, 30)]


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() <= tolerance * grad.abs().max(), name


@pytest.mark.parametrize("lengths", [LENGTHS, [(70, 30)], [(1, 1)], [(40, 2), (200, 3)]], ids=str)
@pytest.mark.parametrize("family", list(SHAPES))
def test_loss_and_gradients_are_those_of_transformers(family, lengths):
    model, batch = make_model(family), make_batch(lengths)
    theirs, ours = padded_nats(model, batch), compute_flat_losses(model, batch)
    assert explain_unsupported_model(model) == "" and ours.shape == (batch.num_target_tokens,)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    weight = torch.rand(len(ours))
    assert_equal(gradients(model, ours, weight), gradients(model, theirs, weight))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "silu", "relu"])
@pytest.mark.parametrize("gated", ["gated-", ""])
def test_every_activation(act, gated):
    model, batch = make_model("t5", feed_forward_proj=gated + act), make_batch(LENGTHS)
    assert_equal(gradients(model, compute_flat_losses(model, batch)), gradients(model, padded_nats(model, batch)))


def test_micro_batches_add_up():
    model, parts = make_model("t5"), [make_batch(LENGTHS), make_batch([(4, 4), (90, 2)])]
    separate = [gradients(model, compute_flat_losses(model, part)) for part in parts]
    model.zero_grad()
    for part in parts:
        compute_flat_losses(model, part).sum().backward()
    assert_equal(
        {n: p.grad for n, p in model.named_parameters()}, {n: separate[0][n] + separate[1][n] for n in separate[0]}
    )


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_chunks_of_the_loss_are_the_loss(monkeypatch, family):
    model, batch = make_model(family), make_batch(LENGTHS)
    whole = gradients(model, compute_flat_losses(model, batch))
    monkeypatch.setattr(loss, "MAX_SAVED_LOGITS", 0)
    monkeypatch.setattr(loss, "MAX_CHUNK_LOGITS", 10 * 384)
    assert_equal(gradients(model, compute_flat_losses(model, batch)), whole)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_the_blocks_changes_nothing(dropout):
    model, batch = make_model("v1_1", dropout=dropout), make_batch(LENGTHS)
    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        found.append(gradients(model, compute_flat_losses(model, batch, recompute=recompute)))
    assert_equal(found[1], found[0], tolerance=1e-7)


def test_frozen_weights_get_no_gradient():
    model, batch = make_model("t5"), make_batch(LENGTHS)
    theirs = gradients(model, padded_nats(model, batch))
    model.zero_grad()
    model.shared.weight.requires_grad_(False)
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.requires_grad_(False)
    compute_flat_losses(model, batch).sum().backward()
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(theirs) - len(ours) == 2
    assert_equal(ours, {name: theirs[name] for name in ours})


def test_modules_that_are_not_plain_are_called():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model, batch = make_model("t5"), make_batch(LENGTHS)
    for block in model.decoder.block:
        for module, name in ((block.layer[0].SelfAttention, "q"), (block.layer[1].EncDecAttention, "k")):
            scaled = Scaled(32, 32, bias=False)
            scaled.weight = getattr(module, name).weight
            setattr(module, name, scaled)
    assert_equal(gradients(model, compute_flat_losses(model, batch)), gradients(model, padded_nats(model, batch)))


def test_what_cannot_run_flat_is_said():
    model = make_model("t5")
    assert explain_unsupported_model(torch.nn.Linear(1, 1)).startswith(
        "it is a Linear, not one of T5ForConditionalGeneration"
    )
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert explain_unsupported_model(model) == "its output head is not a plain linear module"
    assert explain_unsupported_model(make_model("t5").bfloat16()) == "some of its weights are not fp32"


@pytest.mark.parametrize("where", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_are_not_passed_over(where):
    model = make_model("t5")
    padded_nats(model, make_batch([(3, 2)]))  # leaves transformers' recorders on the blocks
    handle = getattr(model.encoder.block[1], f"register_{where}")(lambda *_: None)
    assert (
        explain_unsupported_model(model)
        == "its module encoder.block.1 has hooks, which the flat forward would not call"
    )
    handle.remove()
    assert explain_unsupported_model(model) == ""


def test_an_empty_sequence_is_refused():
    for lengths in ([(3, 2), (2, 0)], [(0, 1), (2, 3)]):
        with pytest.raises(AssertionError, match="a sequence is empty"):
            compute_flat_losses(make_model("t5"), make_batch(lengths))


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_a_start_id_other_than_pad(family):
    model, batch = make_model(family, decoder_start_token_id=7), make_batch(LENGTHS)
    ours = compute_flat_losses(model, batch)
    assert (ours - padded_nats(model, batch)).abs().max() <= 1e-5 * ours.abs().max()
    model.config.decoder_start_token_id = 0
    assert (ours - compute_flat_losses(model, batch)).abs().max() > 1e-3
