"""The forward on flat tokens: the loss and every gradient are those of transformers on padded input."""

from __future__ import annotations

from typing import Any

import kit
import pytest
import torch
from torch import Tensor

from fivetune.data.batch import NOT_SCORED, pad
from fivetune.model import loss
from fivetune.model.flat import flat_nats, supports_flat
from fivetune.model.forward import label_nats
from fivetune.types import Batch

SHAPES = {**kit.FAMILIES, "byt5": {**kit.FAMILIES["mt5"], "num_layers": 3, "num_decoder_layers": 1}}
LENGTHS = [(5, 2), (70, 9), (1, 1), (33, 70), (66, 1), (9, 3), (9, 30)]


def make_model(family: str, *, dropout: float = 0.0, **changes: Any) -> Any:
    """A random model of a family in training mode, with every weight of a size that shows in the loss."""
    import transformers

    settings = {**kit.SHAPE, **SHAPES[family], "vocab_size": 384, "decoder_start_token_id": 0, **changes}
    kind = settings.pop("model_type").upper()
    config = getattr(transformers, f"{kind}Config")(**settings, dropout_rate=dropout)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    if not settings.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def make_batch(lengths: list[tuple[int, int]]) -> Batch:
    """Random examples of the given (input, target) lengths."""
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0)
    inputs, labels = (torch.randint(3, 384, (int(n),), generator=random) for n in ends[-1])
    return Batch(inputs, labels, ends[:, 0], ends[:, 1], tuple(map(str, range(len(lengths)))))


def padded_nats(model: Any, batch: Batch) -> Tensor:
    padded = pad(batch, pad_id=0)
    return label_nats(model, padded)[padded.labels != NOT_SCORED]


def gradients(model: Any, nats: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    (nats if weight is None else nats * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert (ours[name] - grad).abs().max() <= tolerance * grad.abs().max(), name


@pytest.mark.parametrize("lengths", [LENGTHS, [(70, 30)], [(1, 1)], [(40, 2), (200, 3)]], ids=str)
@pytest.mark.parametrize("family", list(SHAPES))
def test_loss_and_gradients_are_those_of_transformers(family, lengths):
    model, batch = make_model(family), make_batch(lengths)
    theirs, ours = padded_nats(model, batch), flat_nats(model, batch)
    assert supports_flat(model) == "" and ours.shape == (batch.num_target_tokens,)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    weight = torch.rand(len(ours))
    assert_equal(gradients(model, ours, weight), gradients(model, theirs, weight))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "silu", "relu"])
@pytest.mark.parametrize("gated", ["gated-", ""])
def test_every_activation(act, gated):
    model, batch = make_model("t5", feed_forward_proj=gated + act), make_batch(LENGTHS)
    assert_equal(gradients(model, flat_nats(model, batch)), gradients(model, padded_nats(model, batch)))


def test_micro_batches_add_up():
    model, parts = make_model("t5"), [make_batch(LENGTHS), make_batch([(4, 4), (90, 2)])]
    separate = [gradients(model, flat_nats(model, part)) for part in parts]
    model.zero_grad()
    for part in parts:
        flat_nats(model, part).sum().backward()
    assert_equal(
        {n: p.grad for n, p in model.named_parameters()}, {n: separate[0][n] + separate[1][n] for n in separate[0]}
    )


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_chunks_of_the_loss_are_the_loss(monkeypatch, family):
    model, batch = make_model(family), make_batch(LENGTHS)
    whole = gradients(model, flat_nats(model, batch))
    monkeypatch.setattr(loss, "KEPT_VALUES", 0)
    monkeypatch.setattr(loss, "CHUNK_VALUES", 10 * 384)
    assert_equal(gradients(model, flat_nats(model, batch)), whole)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_the_blocks_changes_nothing(dropout):
    model, batch = make_model("v1_1", dropout=dropout), make_batch(LENGTHS)
    found = []
    for recompute in (False, True):
        torch.manual_seed(5)
        found.append(gradients(model, flat_nats(model, batch, recompute=recompute)))
    assert_equal(found[1], found[0], tolerance=1e-7)


def test_frozen_weights_get_no_gradient():
    model, batch = make_model("t5"), make_batch(LENGTHS)
    theirs = gradients(model, padded_nats(model, batch))
    model.zero_grad()
    model.shared.weight.requires_grad_(False)
    model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.requires_grad_(False)
    flat_nats(model, batch).sum().backward()
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
    assert_equal(gradients(model, flat_nats(model, batch)), gradients(model, padded_nats(model, batch)))


def test_what_cannot_run_flat_is_said():
    model = make_model("t5")
    assert supports_flat(torch.nn.Linear(1, 1)).startswith("it is a Linear, not one of T5ForConditionalGeneration")
    model.lm_head = torch.nn.Sequential(model.lm_head)
    assert supports_flat(model) == "its output head is not a plain linear module"
    assert supports_flat(make_model("t5").bfloat16()) == "some of its weights are not fp32"


@pytest.mark.parametrize("where", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_are_not_passed_over(where):
    model = make_model("t5")
    padded_nats(model, make_batch([(3, 2)]))  # leaves transformers' recorders on the blocks
    handle = getattr(model.encoder.block[1], f"register_{where}")(lambda *_: None)
    assert supports_flat(model) == "its module encoder.block.1 has hooks, which the flat forward would not call"
    handle.remove()
    assert supports_flat(model) == ""


def test_an_empty_sequence_is_refused():
    for lengths in ([(3, 2), (2, 0)], [(0, 1), (2, 3)]):
        with pytest.raises(AssertionError, match="a sequence is empty"):
            flat_nats(make_model("t5"), make_batch(lengths))
