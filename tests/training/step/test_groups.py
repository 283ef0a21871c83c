"""Parameter groups: kinds of weights, patterns, layer-wise learning rates."""

from __future__ import annotations

import sys
from typing import Any

import kit
import pytest
import torch

from fivetune.config import load_config
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.model.load import load_model_and_tokenizer
from fivetune.training import setup
from fivetune.training.step.groups import group_weights
from fivetune.training.step.update import train_step


@pytest.fixture(params=["t5", "v1_1", "umt5"])
def model(request, family_folders) -> Any:
    return load_model_and_tokenizer(str(family_folders[request.param])).model


def test_every_weight_is_in_one_group_with_its_kind(model):
    groups = group_weights(model)
    kinds = {id(weight): group["kind"] for group in groups for weight in group["params"]}
    assert len(kinds) == sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        is_table = name in ("shared.weight", "lm_head.weight") or "relative_attention_bias" in name
        assert kinds[id(weight)] == ("norm" if "layer_norm" in name else "table" if is_table else "matrix")
    assert [group.get("weight_decay") for group in groups] == [None, None, 0.0]
    assert {group["lr_factor"] for group in groups} == {1.0}


def test_layers_have_smaller_rates_towards_the_embedding(model):
    factors = {
        id(weight): group["lr_factor"] for group in group_weights(model, layer_decay=0.5) for weight in group["params"]
    }
    expected = {f"{stack}.block.{i}": factor for stack in ("encoder", "decoder") for i, factor in enumerate((0.5, 1.0))}
    expected |= {"shared": 0.25, "lm_head": 1.0, "encoder.final_layer_norm": 1.0, "decoder.final_layer_norm": 1.0}
    for name, weight in model.named_parameters():
        (factor,) = (factor for part, factor in expected.items() if name.startswith(f"{part}."))
        assert factors[id(weight)] == factor, name


def test_rules_and_depth_act_on_the_step(tmp_path, model_folder):
    """SGD without momentum and without clipping: the change of a weight is rate times gradient."""

    def run(name: str, **changes: Any) -> dict[str, torch.Tensor]:
        folder = tmp_path / name
        folder.mkdir()
        sgd = {"name": "sgd", "momentum": 0.0, "lr": 0.1, "weight_decay": 0.5}
        options = {"optimizer": sgd, "model__dropout": 0.0, "train__max_grad_norm": None}
        ready = kit.ready(folder, model_folder, **options, **{f"train__{key}": value for key, value in changes.items()})
        learner = ready.learner
        before = {name: weight.detach().clone() for name, weight in learner.model.named_parameters()}
        assert ready.plan.lr == 0.1
        train_step(learner, ready.data.stream.build_micro_batches(0), lr=0.1, step=1)
        return {name: before[name] - weight.detach() for name, weight in learner.model.named_parameters()}

    plain = run("plain")
    rules = [{"match": "encoder.block.0", "lr": 0.1}, {"match": "encoder", "weight_decay": 0.0}]
    changed = run("changed", param_groups=rules, layer_decay=0.5)
    name = "{}.layer.0.SelfAttention.q.weight"
    factors = {"encoder.block.0": 0.05, "decoder.block.0": 0.5, "decoder.block.1": 1.0}
    for part, factor in factors.items():
        torch.testing.assert_close(changed[name.format(part)], factor * plain[name.format(part)], rtol=1e-3, atol=1e-7)
    weight = load_model_and_tokenizer(str(model_folder)).model.get_parameter(name.format("encoder.block.1")).detach()
    undecayed = plain[name.format("encoder.block.1")] - 0.1 * 0.5 * weight
    torch.testing.assert_close(changed[name.format("encoder.block.1")], undecayed, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"param_groups": [{"match": "encodr", "lr": 0.1}]}, "train.param_groups: 'encodr' matches no weight.*encoder"),
        ({"layer_decay": 1.5}, "layer_decay.*less than 1"),
        ({"param_groups": [{"match": "encoder", "lr": 0}]}, "greater than 0"),
        ({"param_groups": [{"match": "encoder", "rate": 1}]}, "rate"),
    ],
)
def test_wrong_rules_are_refused(tmp_path, model_folder, changes, words):
    with pytest.raises(ConfigError, match=words):
        kit.ready(tmp_path, model_folder, **{f"train__{key}": value for key, value in changes.items()})


def test_an_optimizer_with_rates_of_its_own_has_no_factors(tmp_path, model_folder):
    adafactor = {"name": "adafactor", "relative_step": True}
    with pytest.raises(ConfigError, match=r"train.layer_decay changes learning rates, and has no effect"):
        load_config(kit.recipe(tmp_path, model_folder, optimizer=adafactor, train__layer_decay=0.9))


def test_muon_orthogonalises_the_matrices_of_the_blocks_only(tmp_path, model_folder):
    ready = kit.ready(tmp_path, model_folder, optimizer={"name": "muon", "lr": 1e-3})
    learner = ready.learner
    train_step(learner, ready.data.stream.build_micro_batches(0), lr=1e-3, step=1)
    states = {name: set(learner.optimizer.state[weight]) for name, weight in learner.model.named_parameters()}
    for name, keys in states.items():
        is_matrix = name.endswith((".q.weight", ".k.weight", ".v.weight", ".o.weight", ".wi.weight", ".wo.weight"))
        assert keys == ({"momentum_buffer"} if is_matrix else {"step", "exp_avg", "exp_avg_sq"}), name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_the_factors_of_ia3_are_vectors(tmp_path, model_folder):
    """Decay would pull them to 0, although 1 leaves the base as it is; Muon would make all of one size."""
    muon = {"name": "muon", "lr": 1e-3, "weight_decay": 0.5}
    learner = kit.ready(tmp_path, model_folder, optimizer=muon, model__adapter="ia3").learner
    [group] = learner.optimizer.param_groups
    assert {weight.dim() for weight in group["params"]} == {2} and group["weight_decay"] == 0
    for weight in group["params"]:
        weight.grad = torch.full_like(weight, 1e-30)
    learner.optimizer.step()
    assert all(set(state) == {"step", "exp_avg", "exp_avg_sq"} for state in learner.optimizer.state.values())
    assert all(torch.allclose(weight, torch.ones(())) for weight in group["params"])
    pairs = group_weights(kit.ready(tmp_path, model_folder, model__adapter={"name": "lora", "r": 1}).learner.model)
    assert [group["kind"] for group in pairs] == ["matrix"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("name", ["adafactor", "adamw_rms", "adamw"])
def test_an_adapter_that_begins_at_zero_moves_by_the_rate(tmp_path, model_folder, name):
    """Steps in proportion to the size of a weight would be 1,000 times smaller."""
    ready = kit.ready(tmp_path, model_folder, optimizer={"name": name, "lr": 1e-2}, model__adapter="lora")
    train_step(ready.learner, ready.data.stream.build_micro_batches(0), lr=1e-2, step=1)
    moved = [weight for name, weight in ready.learner.model.named_parameters() if "lora_B" in name]
    assert moved and all(3e-3 < weight.square().mean().sqrt() < 3e-2 for weight in moved)


def test_an_optimizer_without_its_package_is_refused_before_the_model_is_loaded(tmp_path, model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(setup, "load_configured_model", None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"optimizer\.name adamw_8bit: the package bitsandbytes"):
        kit.ready(tmp_path, model_folder, optimizer={"name": "adamw_8bit"})
