"""Device tpu: equal to torch on virtual devices; what it refuses; its optimizers, which need no jax.

torchax and jax (500 MB) are not in the extra `test`: the tests that need them skip where they are not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kit import recipe

from fivetune.config import load_config
from fivetune.data.store.batch import IGNORE_INDEX, collate, join_batches, pad
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.machine.telemetry import devices
from fivetune.training import compute as computing
from fivetune.training.answers.loading import load_run_model
from fivetune.training.optimizers._traced import apply_update, compute_rates, create_state
from fivetune.training.optimizers.adafactor import Adafactor
from fivetune.training.optimizers.adamw import AdamW
from fivetune.training.run import train
from fivetune.training.step.plain import PlainEngine

HAS_JAX = find_spec("jax") is not None and find_spec("torchax") is not None
TESTS = Path(__file__).parents[2]
FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",  # nearly all of the time is compilation
    "--xla_llvm_disable_expensive_passes=true",
)
VIRTUAL = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(FLAGS)}


def run_process(script: str, *words: object, **environ: str) -> None:
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(TESTS / script), *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def seen(tmp_path_factory, family_folders):
    if not HAS_JAX:
        pytest.skip("torchax and jax are not installed (pip install -e '.[tpu]')")
    place = tmp_path_factory.mktemp("tpu")
    run_process("tpu_process.py", place, family_folders["t5"], family_folders["v1_1"], **VIRTUAL)
    return json.loads((place / "seen.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["one", "four", "sharded"])
def test_steps_equal_those_of_torch(seen, case):
    assert seen[case]["loss"] < 1e-5 and seen[case]["weights"] < 1e-5 and seen[case]["state"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["free", "labels"])
def test_answers_equal_those_of_torch(seen, kind):
    torch_answers, answers = seen["one"][kind]
    assert [exact for exact, _ in answers] == [exact for exact, _ in torch_answers]
    for (_, found), (_, expected) in zip(answers, torch_answers, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    assert kind == "labels" or any(len(exact[0]) > 3 for exact, _ in answers)


@pytest.mark.slow
def test_dropout_follows_from_the_seed(seen):
    first, same, other = seen["dropout"]
    assert first == same and abs(first - other) > 1e-4


@pytest.mark.slow
def test_a_run_moves_from_chips_to_a_cpu(seen):
    losses = seen["resumed"]
    assert len(losses["tpu"]) == 6 and losses["tpu"] == pytest.approx(losses["cpu"], rel=1e-5)


# --- without jax ---


@pytest.mark.parametrize(
    "options",
    [
        AdamW(lr=1e-2, weight_decay=0.1),
        Adafactor(lr=1e-2, weight_decay=0.1),
        Adafactor(preset="hf", lr=1e-3, beta1=0.9),
        Adafactor(relative_step=True),
    ],
    ids=["adamw", "t5-paper", "hf", "relative"],
)
def test_traced_updates_equal_those_of_torch(options):
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(5))]
    optimizer = options.build([{"params": weights}])
    values = [weight.detach().clone().numpy() for weight in weights]
    states = [
        {name: np.asarray(value, np.float32) for name, value in create_state(optimizer, weight).items()}
        for weight in weights
    ]
    for step in range(1, 5):
        rates = compute_rates(optimizer, step)
        for i, weight in enumerate(weights):
            weight.grad = torch.randn_like(weight) * 3
            group = optimizer.param_groups[0]
            values[i], states[i] = apply_update(np, optimizer, group, values[i], states[i], weight.grad.numpy(), rates)
        optimizer.step()
    for value, state, weight in zip(values, states, weights, strict=True):
        assert value == pytest.approx(weight.detach().numpy(), abs=1e-5)
        for name in set(state) - {"step"}:
            assert state[name] == pytest.approx(np.asarray(optimizer.state[weight][name]), rel=1e-4, abs=1e-5)


def test_another_optimizer_has_no_traced_update():
    weight = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(
        ConfigError, match=r"optimizer\.name: SGD has no update for device tpu\. Use adamw or adafactor"
    ):
        create_state(torch.optim.SGD([weight], lr=1.0), weight)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("eval.num_beams", 4, r"eval\.num_beams 4 is not supported with device tpu\. Use 1"),
        ("optimizer.name", "lion", r"optimizer\.name lion is not supported with device tpu\. Use adafactor or adamw"),
        ("train.forward", "flat", r"train\.forward flat is not supported with device tpu\. Use auto or buckets"),
        ("train.batch_size", "auto", r"train\.batch_size auto is measured by torch"),
        ("strategy.name", "tensor", r"strategy\.name tensor is not supported .* Use ddp or fsdp or single"),
    ],
)
def test_unsupported_settings_are_refused(tmp_path, model_folder, key, value, message):
    given = recipe(tmp_path, model_folder, device="tpu")
    assert load_config(given).device == "tpu"
    with pytest.raises(ConfigError, match=message):
        load_config(given, {key: value})


@pytest.mark.parametrize("adapter", ["lora", "prompt"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
def test_a_trained_run_answers_whatever_it_was_trained_with(tmp_path, model_folder, monkeypatch, adapter):
    """Only the settings of its answers are refused; the chips are counted, and jax is not installed here."""
    options = {"optimizer": {"name": "lion", "lr": 1e-3}, "loss__z_loss": 1e-4, "train__recompute": True}
    train(recipe(tmp_path, model_folder, model__adapter=adapter, train__num_steps=1, **options), quiet=True)
    run, built = tmp_path / "run", []
    monkeypatch.setattr(computing, "pick_device", lambda name: name)
    monkeypatch.setattr(computing, "count_tpu_chips", lambda: 4)

    def build(model, **options):
        built.append(options["precision"])
        return PlainEngine()

    monkeypatch.setitem(sys.modules, "fivetune.training.step.tpu", SimpleNamespace(Chips=build))
    if adapter == "prompt":
        with pytest.raises(ConfigError, match=r"device: tpu has no virtual tokens, which the run was trained with"):
            load_run_model(run, {"device": "tpu"})
        return
    load_run_model(run, {"device": "tpu", "train.precision": "fp32"})
    assert built == ["fp32"]
    for key, value in (("eval.num_beams", 4), ("train.precision", "fp16")):
        with pytest.raises(ConfigError, match=rf"{key} {value} is not supported with device tpu"):
            load_run_model(run, {"device": "tpu", key: value})
    with pytest.raises(ConfigError, match=r"model.adapter lora is not supported with device tpu"):
        load_config(run, {"device": "tpu"})


def test_a_run_of_several_processes_answers_on_one_device(tmp_path, model_folder):
    given = recipe(tmp_path, model_folder, launch__nproc=2, strategy="ddp", train__batch_size=4)
    with pytest.raises(ConfigError, match=r"device cuda:1 is one device, launch.nproc 2 needs 2"):
        load_config(given, {"device": "cuda:1"})
    assert load_config(given, {"device": "cuda:1"}, trained=True).device == "cuda:1"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"device: tpu needs torchax and jax, which are not installed"):
        devices.pick_device("tpu")


@pytest.mark.skipif(not HAS_JAX, reason="torchax and jax are not installed (pip install -e '.[tpu]')")
def test_without_chips_the_device_is_refused():
    code = "from fivetune.machine.telemetry.devices import pick_device; pick_device('tpu')"
    environ = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert "device: tpu is not available, jax finds cpu" in done.stderr or "device: tpu cannot start" in done.stderr


def test_rows_without_labels_fill_a_batch(tmp_path, model_folder):
    from kit import ready

    store = ready(tmp_path, model_folder).data.stream.store
    padded = pad(join_batches([collate(store, [0, 1]), collate(store, [2])]), pad_id=0, sizes=(64,))
    filled = padded.extend(8, pad_id=0)
    assert filled.input_ids.shape == (8, 64) and torch.equal(filled.input_ids[:3], padded.input_ids)
    assert (filled.labels[3:] == IGNORE_INDEX).all() and filled.attention_mask[3:].sum(1).tolist() == [1] * 5


# --- ahead of time, for a real chip ---


@pytest.mark.slow
def test_the_step_compiles_for_v5e(tmp_path, family_folders):
    if not HAS_JAX or find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (pip install 'jax[tpu]', 700 MB); it compiles without a chip")
    if not os.environ.get("FIVETUNE_TEST_TPU_COMPILER"):
        pytest.skip("takes a minute or more; set FIVETUNE_TEST_TPU_COMPILER=1")
    environ = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
    run_process("tpu_compile.py", tmp_path, family_folders["t5"], **environ)
    found = json.loads((tmp_path / "seen.json").read_text())
    assert found["all_reduces"] > 0 and found["argument_bytes"] > 0
