"""Frozen weights: patterns, gradients, optimizer state, backward work, and unfreezing by steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from safetensors.torch import load_file

from fivetune.errors import ConfigError, InterruptedRunError
from fivetune.model.freeze import Unfreezing, freeze_weights, is_matched
from fivetune.model.load import count_parameters, load_model_and_tokenizer
from fivetune.rundir import read_run
from fivetune.training.run import train
from fivetune.training.step.update import train_step

QUERY = "encoder.block.3.layer.0.SelfAttention.q.weight"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("encoder", True),
        ("block.3", True),
        ("encoder.block.0-3", True),
        ("encoder.block.4-12", False),
        ("encoder.layer", False),
        ("SelfAttention.[qk]", True),
        ("block.*.layer.0", True),
        ("coder", False),
        ("encoder.block.3.layer.0.SelfAttention.q.weight", True),
        ("encoder.block.3.layer.0.SelfAttention.q.weight.more", False),
    ],
)
def test_patterns_match_neighbouring_parts_of_names(pattern, expected):
    assert is_matched(pattern, QUERY) == expected


def test_a_pattern_that_matches_nothing_names_the_nearest(model_folder):
    model = load_model_and_tokenizer(str(model_folder)).model
    with pytest.raises(ConfigError, match=r"model.freeze: 'encoder.blok.0' matches no weight of the model. .*Allowed"):
        freeze_weights(model, ["encoder.blok.0"])
    with pytest.raises(ConfigError, match="Did you mean encoder or decoder"):
        freeze_weights(model, ["encodr"])
    with pytest.raises(ConfigError, match=r"all weights are frozen, so there is nothing to train. Remove a pattern"):
        freeze_weights(model, ["*"])


def test_frozen_weights_have_neither_gradient_nor_state_nor_change(tmp_path, model_folder):
    ready = kit.ready(tmp_path, model_folder, model__freeze=["shared", "encoder.block.0", "*layer_norm"])
    learner, before = ready.learner, {}
    for name, weight in learner.model.named_parameters():
        before[name] = weight.detach().clone()
    frozen = {name for name, weight in learner.model.named_parameters() if not weight.requires_grad}
    assert {
        name for name in before if "layer_norm" in name or name.startswith(("shared", "encoder.block.0."))
    } == frozen
    train_step(learner, ready.data.stream.build_micro_batches(0), lr=1e-2, step=1)
    changed = {name for name, weight in learner.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed and not changed & frozen
    assert {learner.model.get_parameter(name) for name in before if name not in frozen} == set(learner.optimizer.state)
    share = count_parameters(learner.model, trained=True) / count_parameters(learner.model)
    assert share == sum(before[name].numel() for name in before if name not in frozen) / sum(
        weight.numel() for weight in before.values()
    )


@pytest.mark.parametrize("forward", ["flat", "padded"])
def test_nothing_below_the_lowest_trained_weight_is_in_the_backward_pass(tmp_path, model_folder, forward):
    def list_names(**model: list[str]) -> Counter[str]:
        folder = tmp_path / str(len(model))
        folder.mkdir()
        changes = {f"model__{key}": value for key, value in model.items()}
        ready = kit.ready(folder, model_folder, train__forward=forward, **changes)
        learner, batch = ready.learner, ready.data.stream.build_micro_batches(0)[0]
        losses, _ = learner.forward.compute_losses(learner.model.train(), batch, device="cpu")
        todo, seen = [losses.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                todo += [other for other, _ in node.next_functions]
        return Counter(node.name() for node in seen)

    everything, decoder = list_names(), list_names(freeze=["shared", "encoder"])
    norm = "RmsNormBackward" if forward == "flat" else "MeanBackward1"
    layers = {"encoder": 2 * 2 + 1, "decoder": 3 * 2 + 1}  # two blocks each, and a final norm
    assert everything[norm] == layers["encoder"] + layers["decoder"]
    assert decoder[norm] <= layers["decoder"]


def test_unfreezing_is_a_function_of_the_step(model_folder):
    model = load_model_and_tokenizer(str(model_folder)).model
    unfreezing = Unfreezing(model, {"encoder": 4, "encoder.block.1": 2})
    trained = []
    for num_done in (0, 2, 3, 4, 1):
        unfreezing.update(num_done)
        parts = {name: weight.requires_grad for name, weight in model.named_parameters()}
        trained.append([parts[f"encoder.block.{i}.layer.0.layer_norm.weight"] for i in (0, 1)])
        assert parts["decoder.block.0.layer.0.layer_norm.weight"]
    assert trained == [[False, False], [False, True], [False, True], [True, True], [False, False]]
    freeze_weights(model, ["encoder"])
    with pytest.raises(ConfigError, match=r"model.unfreeze: 'encoder' matches encoder.* which model.freeze freezes"):
        Unfreezing(model, {"encoder": 4})


def test_a_resumed_run_unfreezes_at_the_same_step(tmp_path: Path, model_folder, monkeypatch):
    def build_recipe(name: str) -> dict[str, Any]:
        (tmp_path / name).mkdir(exist_ok=True)
        changes = {"model__unfreeze": {"encoder": 2, "shared": 3}, "checkpoint": {"every_steps": 1}}
        return kit.recipe(tmp_path / name, model_folder, train__num_steps=4, **changes)

    train(build_recipe("straight"), preflight=False, quiet=True)
    with monkeypatch.context() as patched, pytest.raises(InterruptedRunError):
        kit.signal_at(patched, "show_step", 1)
        train(build_recipe("stopped"), preflight=False, quiet=True)
    train(build_recipe("stopped"), resume=True, quiet=True)
    straight, stopped = (tmp_path / name / "run" for name in ("straight", "stopped"))
    losses = [[step.loss for step in read_run(run).steps] for run in (straight, stopped)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert kit.weights_of(straight) == kit.weights_of(stopped)
    early, late = (load_file(straight / "checkpoints" / str(step) / "model.safetensors") for step in (3, 4))
    given = load_file(model_folder / "model.safetensors")
    assert torch.equal(given["shared.weight"], early["shared.weight"])
    assert not torch.equal(early["shared.weight"], late["shared.weight"])


@pytest.mark.parametrize(
    ("freeze", "unfreeze"), [([], {"encoder": 4, "decoder": 2, "shared": 3}), (["encoder", "shared"], {"decoder": 2})]
)
def test_a_run_whose_first_step_has_nothing_to_train_is_refused(tmp_path, model_folder, freeze, unfreeze):
    with pytest.raises(ConfigError, match=r"^model.unfreeze: all weights are frozen until step 2 .* such as decoder\."):
        kit.ready(tmp_path, model_folder, model__freeze=freeze, model__unfreeze=unfreeze)
    del unfreeze["decoder"]
    kit.ready(tmp_path, model_folder, model__freeze=freeze, model__unfreeze=unfreeze)


def test_numbers_of_blocks_above_the_last_one_are_refused(model_folder):
    """The tiny model has two blocks in the encoder and three layers in each block of the decoder."""
    model = load_model_and_tokenizer(str(model_folder)).model
    for pattern, end in (("encoder.block.0-30", "30, .*encoder.block end at 1 .2 in all, from 0.. Lower"),
                         ("encoder.block.2", "2, .*encoder.block end at 1 "), ("block.9-12.layer.0", "12, .*block end"),
                         ("decoder.block.*.layer.0-3", r"3, .*decoder.block.\*.layer end at 2 .3 in all")):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"model.freeze: '.*' asks for number {end}"):
            freeze_weights(model, [pattern])
    freeze_weights(model, ["encoder.block.0-1", "decoder.block.0.layer.1-2"])
