"""Operations of a step with frozen weights, against torch's own count of what transformers' forward and autograd do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from family_kit import make_family_model
from torch.utils.flop_counter import FlopCounterMode

from fivetune import plugins
from fivetune.model.adapter import attach_adapter
from fivetune.model.backend import Forward
from fivetune.model.freeze import freeze_weights
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.module_flops import ModelFlops, StepFlops
from fivetune.model.teacher import Teacher
from fivetune.types import Batch

SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}


def measure(model: Any, num_inputs: int, num_targets: int) -> float:
    """The operations of one padded step; few targets, because it computes the whole square of causal attention."""
    ids = torch.arange(10, 10 + num_inputs)[None]
    labels = torch.arange(20, 20 + num_targets)[None]
    with FlopCounterMode(display=False) as counter:
        loss = model.forward(input_ids=ids, labels=labels).loss
        if loss.requires_grad:
            loss.backward()
    return counter.get_total_flops()


def freeze(*patterns: str) -> Callable[[Any], object]:
    return lambda model: freeze_weights(model, patterns)


def adapt(name: str, **options: Any) -> Callable[[Any], object]:
    return lambda model: attach_adapter(model, plugins.load_plugin("adapters", name)(**options), base="x")


BLOCK = ("q", "k", "v", "o", "wi_0", "wi_1", "wo", "layer_norm", "final_layer_norm")
CASES = {
    "nothing frozen": freeze(),
    "embedding": freeze("shared"),
    "encoder": freeze("encoder", "shared"),
    "all but the top layer": freeze("shared", "encoder", "decoder.block.0-1"),
    "all but the head": freeze("shared", "encoder", "decoder"),
    "decoder": freeze("decoder", "lm_head"),
    "all but the biases": freeze("shared", "lm_head", *BLOCK),
    "all": lambda model: model.requires_grad_(False),
    "lora": adapt("lora", r=4),
    "lora of the top": adapt("lora", r=4, target_modules=["decoder.block.2.*.*.*"]),
    "ia3": adapt("ia3"),
}


def make_model(folder: Path, tokenizer: Path, *, seed: int = 0) -> Any:
    kit.make_model(folder, tokenizer, family="v1_1", seed=seed, **SHAPE)
    model = load_model_and_tokenizer(str(folder)).model.train()
    model.set_attn_implementation("eager")  # whose products torch counts
    return model


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("case", CASES)
def test_frozen_weights_cost_what_autograd_computes(tmp_path: Path, tokenizer_folder: Path, case: str) -> None:
    model = make_model(tmp_path / "model", tokenizer_folder)
    CASES[case](model)
    assert ModelFlops(model).count([200], [3]).total == pytest.approx(measure(model, 200, 3), rel=2e-3)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("name", ["t5gemma", "t5gemma2", "bart"])
@pytest.mark.parametrize("adapter", [None, "lora"])
def test_other_families_with_frozen_weights(tmp_path: Path, name: str, adapter: str | None) -> None:
    folder = make_family_model(tmp_path / name, name)
    model: Any = load_model_and_tokenizer(str(folder), any_seq2seq=True).model.train()
    model.set_attn_implementation("eager")
    if adapter:
        adapt(adapter, r=4)(model)
    else:
        freeze("encoder", *(["shared"] if name == "bart" else []))(model)
    assert ModelFlops(model).count([6], [2]).total == pytest.approx(measure(model, 6, 2), rel=5e-3)


@pytest.mark.parametrize("name", ["prompt", "prefix"])
def test_virtual_tokens_cost_what_autograd_computes(tmp_path: Path, tokenizer_folder: Path, name: str) -> None:
    model = make_model(tmp_path / "model", tokenizer_folder)
    adapt(name, num_virtual_tokens=50)(model)
    batch = Batch(torch.arange(10, 110), torch.arange(20, 24), torch.tensor([0, 100]), torch.tensor([0, 4]), ("a",))
    with FlopCounterMode(display=False) as counter:
        Forward("padded", "").compute_losses(model, batch, device="cpu")[0].sum().backward()
    assert ModelFlops(model).count([100], [4]).total == pytest.approx(counter.get_total_flops(), rel=2e-3)


def test_a_teacher_costs_its_forward_pass(tmp_path: Path, tokenizer_folder: Path) -> None:
    model, other = (make_model(tmp_path / str(n), tokenizer_folder, seed=n) for n in range(2))
    forward = Forward("padded", "", teacher=Teacher(other.requires_grad_(False), 0.5, 2.0, is_flat=False))
    expected = measure(model, 200, 3) + measure(other, 200, 3)
    assert StepFlops(model, forward).count([200], [3]).total == pytest.approx(expected, rel=2e-3)
