"""LoRA with flat tokens: losses and gradients of peft's modules, by one product per input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_kit import make_family_model
from flat_kit import gradients, make_batch, make_model, padded_nats

from fivetune import plugins
from fivetune.model import layers
from fivetune.model.adapter import attach_adapter, find_adapter
from fivetune.model.flat import compute_flat_losses, explain_unsupported_model
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.low_rank import find_pair

LENGTHS = [(7, 9), (3, 1), (12, 6)]
SHORT = [(30, 2), (24, 1)]  # cross-attention in the encoder's space


def make_adapted(family: str, name: str = "lora", *, seed: int = 0, **options: Any) -> Any:
    """A small model with an adapter whose weights are all other than 0, drawn in the order of the model's parameters.

    The names of an adapter are a set, whose order is another in every process.
    """
    model = make_model(family)
    options |= {"alpha": 4} if name not in ("ia3", "prompt") else {}  # with larger steps rounding grows
    attach_adapter(model, plugins.load_plugin("adapters", name)(**options), base="small")
    attached = find_adapter(model)
    assert attached
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight_name in attached.names:
                weight.add_(0.05 * torch.randn_like(weight))
    return model


def assert_equal_to_padded(model: Any, lengths: list[tuple[int, int]]) -> None:
    batch = make_batch(lengths)
    assert explain_unsupported_model(model) == ""
    expected, found = padded_nats(model, batch), compute_flat_losses(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    weight = torch.rand(len(expected))
    theirs, ours = gradients(model, expected, weight), gradients(model, found, weight)
    attached = find_adapter(model)
    assert attached and theirs.keys() == ours.keys() == attached.names
    for name, gradient in theirs.items():  # small ones are sums of large addends: both forwards round there
        assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name
    whole = [torch.cat([each[name].flatten() for name in theirs]) for each in (ours, theirs)]
    assert (whole[0] - whole[1]).norm() <= 1e-5 * whole[1].norm()


@pytest.mark.parametrize("family", ["t5", "v1_1", "umt5"])
@pytest.mark.parametrize("lengths", [LENGTHS, SHORT])
def test_flat_losses_and_gradients_are_those_of_peft(family, lengths):
    assert_equal_to_padded(make_adapted(family, r=3), lengths)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lora", {"target_modules": ["q", "v"]}),  # some of the matrices of one input
        ("lora", {"target_modules": ["decoder.block.1"]}),
        ("rslora", {}),
        ("dora", {}),
        ("ia3", {}),
        ("qlora", {}),
    ],
)
def test_every_adapter_of_matrices_computes_flat_tokens(name, options):
    for lengths in (LENGTHS, SHORT):
        assert_equal_to_padded(make_adapted("v1_1", name, **options), lengths)


def test_the_matrices_of_one_input_are_one_product(monkeypatch):
    """Four products per block of an encoder, five of a decoder; peft's modules are not called."""
    model, calls = make_adapted("t5"), []
    whole = layers.apply_low_rank
    monkeypatch.setattr(layers, "apply_low_rank", lambda x, pairs: calls.append(len(pairs)) or whole(x, pairs))
    module = model.encoder.block[0].layer[0].SelfAttention.q
    monkeypatch.setattr(type(module), "forward", lambda self, x: pytest.fail("peft's module is called"))
    compute_flat_losses(model, make_batch(LENGTHS))
    assert calls == [3, 1, 1, 1] * 2 + [3, 1, 1, 2, 1, 1, 1] * 2


def test_dropout_of_an_adapter_is_that_of_peft():
    """peft's modules draw it: a mask for each matrix, on the input of A alone."""
    model = make_adapted("t5", dropout=0.5)
    module = model.encoder.block[0].layer[0].SelfAttention.q
    assert find_pair(module) is None and find_pair(module.eval()) is not None
    model.train()
    batch = make_batch(LENGTHS)
    drawn = [compute_flat_losses(model, batch).detach() for _ in range(2)]
    assert not torch.equal(*drawn)
    torch.testing.assert_close(
        compute_flat_losses(model.eval(), batch), padded_nats(model, batch), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(5))  # the largest error of a token varies by a factor of 5 with the weights
def test_under_autocast_products_are_in_16_bits(seed):
    model, batch = make_adapted("v1_1", seed=seed), make_batch(LENGTHS)
    exact = compute_flat_losses(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = compute_flat_losses(model, batch)
    assert 1e-4 < (rounded - exact).norm() / exact.norm() < 0.03
    found, expected = gradients(model, rounded), gradients(model, exact)
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    norms = [torch.stack([gradient.norm() for gradient in each.values()]).norm().item() for each in (found, expected)]
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


@pytest.mark.parametrize("family", ["t5gemma", "t5gemma2"])
def test_other_families(tmp_path, family):
    model = load_model_and_tokenizer(str(make_family_model(tmp_path / "model", family)), dropout=0.0).model
    attach_adapter(model, plugins.load_plugin("adapters", "lora")(alpha=4), base="small")
    assert_equal_to_padded(model.train(), LENGTHS)
