"""The flat forward of T5Gemma and T5Gemma 2: losses and gradients of transformers' forward to 1e-5, part by part."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import family_kit
import pytest
import torch
from flat_kit import gradients, make_batch, padded_nats

from fivetune.model.flat import compute_flat_losses, explain_unsupported_model
from fivetune.model.load import load_model_and_tokenizer
from fivetune.types import Batch

LENGTHS = [(19, 11), (3, 2), (70, 9), (1, 1), (8, 70)]  # windows of 6, blocks of one and of several sequences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores and logits are near their bounds."""
    config = family_kit.CONFIGS["t5gemma"][1]
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "max_position_embeddings": 128}
    parts: dict[str, Any] = {name: {**config[name], **caps} for name in ("encoder", "decoder")}
    return family_kit.make_family_model(tmp_path_factory.mktemp("gemma") / "model", "t5gemma", **parts)


def load(folder: Path, dropout: float = 0.0) -> Any:
    return load_model_and_tokenizer(str(folder), dropout=dropout).model.train()


def assert_equal(model: Any, batch: Batch, **options: Any) -> None:
    weight = torch.rand(len(batch.labels), generator=torch.Generator().manual_seed(1))
    expected, flat = padded_nats(model, batch), compute_flat_losses(model, batch, **options)
    assert torch.allclose(flat, expected, rtol=1e-5, atol=1e-5)
    theirs = gradients(model, expected, weight)
    found = gradients(model, flat, weight)
    assert found.keys() == theirs.keys()
    for name, ours in found.items():
        assert (ours - theirs[name]).abs().max() <= 1e-5 * max(1.0, theirs[name].abs().max().item()), name


@pytest.mark.parametrize("recompute", [False, True])
def test_losses_and_gradients_are_those_of_transformers(folder: Path, recompute: bool) -> None:
    model = load(folder)
    assert explain_unsupported_model(model) == ""
    assert_equal(model, make_batch(LENGTHS), recompute=recompute)


@pytest.mark.parametrize("window", [6, 5, 64])
def test_t5gemma_2_is_exact(tmp_path: Path, window: int) -> None:
    """Merged attention, norms of queries and keys, another window, frequencies by type of layer, one table."""
    config = copy.deepcopy(family_kit.CONFIGS["t5gemma2"][1])
    for part in (config["encoder"]["text_config"], config["decoder"]):
        part.update(sliding_window=window, max_position_embeddings=128)
    parts: dict[str, Any] = {name: config[name] for name in ("encoder", "decoder")}
    model = load(family_kit.make_family_model(tmp_path / "model", "t5gemma2", **parts))
    batch = make_batch(LENGTHS)
    batch.input_ids[3] = batch.labels[2] = 381  # the end of an image, spelt out
    assert_equal(model, batch)
    assert_equal(model, make_batch([(3, 2), (20, 9)]), recompute=True)


@pytest.mark.parametrize("change", ["no caps", "own head", "sizes"])
def test_variants_are_exact(tmp_path: Path, folder: Path, change: str) -> None:
    model = load(folder)
    if change == "own head":
        model.lm_head.out_proj.weight = torch.nn.Parameter(torch.randn(384, 32))
    elif change == "no caps":
        for stack in (model.get_encoder(), model.get_decoder()):
            stack.config.attn_logit_softcapping = stack.config.final_logit_softcapping = None
            for layer in stack.layers:
                for attention in (layer.self_attn, *filter(None, [getattr(layer, "cross_attn", None)])):
                    attention.attn_logit_softcapping = None
    else:  # as t5gemma-9b-2b: the encoder is larger than the decoder
        config = family_kit.CONFIGS["t5gemma"][1]
        encoder = {**config["encoder"], "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
        model = load(family_kit.make_family_model(tmp_path / "model", "t5gemma", encoder=encoder))
    assert_equal(model, make_batch(LENGTHS))


def test_dropout_is_applied_everywhere(folder: Path) -> None:
    """In the mean over masks the loss is near that of transformers' masks, and far from the one without dropout."""
    model, batch = load(folder, dropout=0.3), make_batch([(9, 6)] * 8)
    torch.manual_seed(0)
    with torch.no_grad():
        ours = torch.stack([compute_flat_losses(model, batch).mean() for _ in range(60)])
        theirs = torch.stack([padded_nats(model, batch).mean() for _ in range(60)])
        assert compute_flat_losses(model.eval(), batch).mean() != pytest.approx(ours.mean().item(), abs=1e-3)
    error = (ours.var() / 60 + theirs.var() / 60).sqrt()
    assert abs(ours.mean() - theirs.mean()) < 4 * error
    assert 0.5 < ours.std() / theirs.std() < 2


def test_other_devices_and_hooks_are_left_to_transformers(folder: Path) -> None:
    model = load(folder)
    assert explain_unsupported_model(model, "cuda:0").startswith("the kernels of the flat forward have neither")
    handle = model.get_decoder().layers[1].mlp.register_forward_hook(lambda *given: None)
    assert "layers.1.mlp has hooks" in explain_unsupported_model(model)
    handle.remove()
    model.get_encoder().layers[0].mlp.gate_proj.bias = torch.nn.Parameter(torch.zeros(48))
    assert "have a bias or are not plain" in explain_unsupported_model(model)
