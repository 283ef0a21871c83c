"""bf16 on CPUs: when it is chosen, what it says, what resumed runs and answers compute in; copies of weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import ready, recipe

import fivetune
from fivetune import plugins
from fivetune.config import load_config
from fivetune.distributed.world import World
from fivetune.errors import ConfigError
from fivetune.machine.telemetry import devices
from fivetune.model.precision import cast_weights, copy_weights, get_matmul_dtype
from fivetune.training import setup as setting_up
from fivetune.training.autotune import precision
from fivetune.training.autotune.precision import adopt_trained_precision, choose_precision
from fivetune.training.compute import choose_compute, restore_process_settings
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.optimizers.adamw import AdamW
from fivetune.training.setup import Setup
from fivetune.training.step.groups import build_optimizer

CPU = ComputeConfig("cpu", "fp32")


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Setup:
    return ready(tmp_path_factory.mktemp("run"), model_folder)


def has_units(monkeypatch: Any, folder: Path, flags: str) -> None:
    """The CPU has these flags."""
    file = folder / "cpuinfo"
    file.write_text(f"model name\t: a CPU\nflags\t\t: fpu sse2 {flags}\n")
    monkeypatch.setattr(devices, "CPU_INFO", file)


def choose(setup: Setup, requested: str = "auto", **options: Any) -> ComputeConfig:
    batch = setup.data.stream.build_micro_batches(0)[0]
    return choose_precision(requested, setup.learner.model, CPU, batch, setup.learner.forward, **options)


@pytest.mark.parametrize(
    ("flags", "name"),
    [("avx512_bf16 amx_bf16 amx_tile", "AMX"), ("avx512f avx512_bf16", "AVX512-BF16"), ("avx512f", ""), ("", "")],
)
def test_units_of_the_processor(monkeypatch, tmp_path, flags, name):
    has_units(monkeypatch, tmp_path, flags)
    assert devices.find_bf16_units() == name
    monkeypatch.setattr(devices, "CPU_INFO", tmp_path / "none")
    assert devices.find_bf16_units() == ""


def test_auto_is_fp32_without_units_and_for_narrow_models(monkeypatch, tmp_path, setup):
    has_units(monkeypatch, tmp_path, "avx2")
    assert choose(setup) == replace(CPU, precision_why="the CPU has no units for bf16")
    has_units(monkeypatch, tmp_path, "amx_bf16")
    assert choose(setup) == replace(CPU, precision_why="d_model 32 is too small to gain from bf16")


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, "bf16"), (0.95, "fp32"), (2.0, "fp32")])
def test_auto_takes_bf16_where_it_is_clearly_faster(monkeypatch, tmp_path, setup, seconds, chosen):
    has_units(monkeypatch, tmp_path, "amx_bf16")
    monkeypatch.setattr(precision, "MIN_WIDTH", 1)
    monkeypatch.setattr(
        precision, "_measure_seconds", lambda m, b, one, f: {"fp32": 1.0, "bf16": seconds}[one.precision]
    )
    found = choose(setup)
    assert found.precision == chosen
    assert found.precision_why == f"measured: bf16 takes {1000 * seconds:.0f} ms, fp32 1000 ms, by AMX"


def test_a_trial_measures_both_and_changes_nothing(monkeypatch, tmp_path, setup):
    has_units(monkeypatch, tmp_path, "amx_bf16")
    monkeypatch.setattr(precision, "MIN_WIDTH", 1)
    model, before = setup.learner.model, torch.get_rng_state()
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    assert choose(setup).precision_why.startswith("measured: bf16 takes ")
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(weights[name], weight) and weight.grad is None for name, weight in model.named_parameters())


def test_bf16_that_does_not_agree_is_refused_with_the_figures(monkeypatch, tmp_path, setup):
    has_units(monkeypatch, tmp_path, "amx_bf16")
    monkeypatch.setattr(precision, "MIN_WIDTH", 1)
    monkeypatch.setattr(precision, "MAX_GRADIENT_CHANGE", 0.0)
    with pytest.raises(
        ConfigError,
        match=r"train.precision: bf16 does not agree with fp32 here: the loss of 4 examples is \d\.\d+ in fp32 and "
        r"\d\.\d+ in bf16 \(allowed: 1%\), their gradients differ by \d\.\d% \(allowed: 0%\)\. Use fp32\.",
    ):
        choose(setup, "bf16")
    found = choose(setup)
    assert found.precision == "fp32" and found.precision_why.startswith("bf16 does not agree: the loss of 4 examples")


def test_requested_bf16_says_when_the_processor_has_no_units(monkeypatch, tmp_path, setup):
    has_units(monkeypatch, tmp_path, "avx512_bf16")
    assert choose(setup, "bf16") == replace(CPU, precision="bf16", precision_why="requested")
    has_units(monkeypatch, tmp_path, "avx2")
    assert choose(setup, "bf16").precision_why == "requested; this CPU has no units for it and computes it slower"
    assert choose(setup, "fp32") == CPU
    answers = precision.adopt_trained_precision(CPU, "bf16", "bf16")
    assert answers.precision_why == "requested; this CPU has no units for it and computes it slower"


def test_a_resumed_run_keeps_its_precision_until_another_is_asked_for(monkeypatch, tmp_path, model_folder):
    has_units(monkeypatch, tmp_path, "avx2")
    given = recipe(tmp_path, model_folder, train__precision="bf16", train__num_steps=2)
    fivetune.train(given, quiet=True)
    folder = tmp_path / "run"
    asked = fivetune.train(folder, {"train.num_steps": 4, "train.precision": "auto"}, resume=True, quiet=True)
    assert asked.machine.precision == "bf16"
    assert asked.machine.precision_why == "as the run began; this CPU has no units for it and computes it slower"
    asked = fivetune.train(folder, {"train.num_steps": 6, "train.precision": "fp32"}, resume=True, quiet=True)
    assert asked.machine.precision == "fp32"
    words = "precision: bf16 -> fp32. Losses differ by the rounding of fp32 instead of bf16."
    assert f"from step 4 on the environment differs: {words}" in asked.warnings


@pytest.mark.parametrize(
    ("device", "resumed", "expected", "why"),
    [
        ("cuda", "fp32", "fp32", "as the run began"),
        ("cuda", "tf32", "tf32", "as the run began"),
        ("cuda", "bf16", "bf16", "as the run began"),
        ("mps", "bf16", "fp32", "the run began in bf16; train.precision bf16: fp32 is used instead, because bf16"),
        ("mps", "fp16", "fp32", "the run began in fp16; fp32 is used instead, because fp16 is not supported on mps"),
        ("cpu", "tf32", "fp32", "the run began in tf32; train.precision tf32: fp32 is used instead, because only"),
        ("cpu", "bf16", "bf16", "as the run began; this CPU has no units for it and computes it slower"),
    ],
)
def test_every_device_keeps_the_precision_of_a_resumed_run(monkeypatch, tmp_path, device, resumed, expected, why):
    has_units(monkeypatch, tmp_path, "avx2")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    found, reason = devices.decide_precision("auto", device, resumed)
    assert found == expected and reason.startswith(why)
    assert devices.decide_precision("fp32", device, resumed) == ("fp32", "")


def test_a_resumed_fp16_run_keeps_what_its_scaler_needs(monkeypatch, tmp_path, model_folder):
    """A GradScaler cannot unscale the factored gradients that AdamW has in other precisions."""
    monkeypatch.setattr(AdamW, "build_for_tables", lambda self, groups: pytest.fail("factored gradients"))
    given = recipe(tmp_path, model_folder, train__precision="fp16", train__num_steps=1, optimizer="adamw")
    fivetune.train(given, quiet=True, preflight=False)
    asked = fivetune.train(tmp_path / "run", {"train.num_steps": 2, "train.precision": "auto"}, resume=True, quiet=True)
    assert (asked.machine.precision, asked.status.step) == ("fp16", 2)


def test_a_sharded_run_keeps_its_precision(monkeypatch, tmp_path, model_folder):
    """Two processes with fsdp have no weights to try a precision with."""
    config = load_config(recipe(tmp_path, model_folder, strategy="fsdp", train__precision="auto"))
    compute = choose_compute(config, World(size=2), "bf16")
    assert compute.precision == "bf16"
    unused: Any = None
    chosen = setting_up.MeasuredChoices(precision="bf16")
    assert setting_up._choose_precision(config, unused, unused, compute, World(size=2), chosen) == compute


def test_answers_are_computed_as_the_run_was_trained(monkeypatch, tmp_path):
    has_units(monkeypatch, tmp_path, "amx_bf16")
    assert adopt_trained_precision(CPU, "auto", "bf16").precision == "bf16"
    assert adopt_trained_precision(CPU, "auto", "fp32") == adopt_trained_precision(CPU, "fp32", "bf16") == CPU
    has_units(monkeypatch, tmp_path, "")
    why = "the run was trained in bf16, for which this CPU has no units"
    assert adopt_trained_precision(CPU, "auto", "bf16") == replace(CPU, precision_why=why)


def test_tf32_is_set_for_the_run_and_needs_its_units(tmp_path, model_folder, monkeypatch):
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    words = "train.precision tf32: fp32 is used instead, because only NVIDIA GPUs"
    assert devices.pick_precision("tf32", "cpu") == "fp32"
    assert devices.explain_replaced_precision("tf32", "mps").startswith(words)
    for capability, expected in (((7, 5), "fp32"), ((8, 0), "tf32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr("fivetune.training.compute.pick_device", lambda asked: "cuda")
        section = SimpleNamespace(num_threads=1, precision="tf32")
        compute = choose_compute(SimpleNamespace(device="cuda", train=section))  # type: ignore[arg-type]
        assert compute.precision == expected and bool(compute.precision_why) == (expected == "fp32")
        assert matmul.fp32_precision == ("tf32" if expected == "tf32" else "ieee")
        assert matmul.allow_tf32 == (expected == "tf32")  # raises where torch's settings are not in step
        assert torch.get_float32_matmul_precision() == ("high" if expected == "tf32" else "highest")
    with compute.make_autocast():
        assert get_matmul_dtype(torch.device("cpu")) == torch.float32
    monkeypatch.undo()
    run = fivetune.train(recipe(tmp_path, model_folder, train__precision="tf32", train__num_steps=1), quiet=True)
    assert run.machine.precision == "fp32" and run.machine.precision_why.startswith(words)
    assert matmul.fp32_precision == "tf32"  # as before the run
    torch.set_float32_matmul_precision(before)


def test_a_run_restores_the_settings_of_the_process(tmp_path, model_folder):
    matmul, products = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.set_flush_denormal(False)
        fivetune.train(recipe(tmp_path, model_folder, train__num_steps=1), quiet=True, preflight=False)
        assert torch.get_float32_matmul_precision() == "high" and matmul.allow_tf32
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.tensor(1e-40).mul(0.5) > 0
        with restore_process_settings():
            torch.set_flush_denormal(True)
            torch.backends.cuda.enable_cudnn_sdp(True)
            torch.set_float32_matmul_precision("highest")
        assert matmul.fp32_precision == "tf32" and not torch.backends.cuda.cudnn_sdp_enabled()
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = "tf32"  # the newer setting alone
        with restore_process_settings():
            torch.set_float32_matmul_precision("highest")
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)


def test_mps_and_old_gpus_say_what_happens_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    for device in ("mps", "cuda"):
        assert devices.pick_precision("bf16", device) == "fp32"
        assert devices.explain_replaced_precision("bf16", device).startswith(
            "train.precision bf16: fp32 is used instead, because "
        )
        assert devices.explain_replaced_precision("fp32", device) == ""


# --- copies of weights ---


@pytest.mark.parametrize("name", plugins.list_plugins("optimizers"))
def test_every_optimizer_changes_the_copies(name, tmp_path, model_folder):
    config = load_config(recipe(tmp_path, model_folder, optimizer={"name": name, "lr": 0.1}))
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64, bias=False), "shared": torch.nn.Embedding(64, 64)})
    optimizer = build_optimizer(config, model)
    for _ in range(2):
        held = {weight: copy_weights(torch.bfloat16, weight) for weight in model.parameters()}
        for weight, copy in held.items():
            assert torch.equal(copy, weight.bfloat16())
            assert copy_weights(torch.bfloat16, weight).data_ptr() == copy.data_ptr()
        sum(weight.square().sum() for weight in held).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(torch.equal(copy, weight.bfloat16()) for weight, copy in held.items())


def test_a_broadcast_changes_the_copies(monkeypatch):
    """gloo writes without torch counting it."""
    weight = torch.nn.Parameter(torch.randn(4, 8))
    copy_weights(torch.bfloat16, weight)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, src: tensor.data.fill_(7.0))
    World(size=2).broadcast([weight])
    assert torch.equal(copy_weights(torch.bfloat16, weight), weight.bfloat16())


def test_merged_weights_get_gradients_of_their_own_dtype():
    a, b = (torch.nn.Parameter(torch.randn(n, 8)) for n in (4, 2))
    frozen = torch.nn.Parameter(torch.randn(3, 8), requires_grad=False)
    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        merged = cast_weights(a, frozen, b)
        (x.bfloat16() @ merged.t()).float().sum().backward()
    assert merged.dtype == torch.bfloat16 and frozen.grad is None
    for weight in (a, b):
        assert weight.grad is not None and weight.grad.dtype == torch.float32
        torch.testing.assert_close(weight.grad, x.sum(0).expand_as(weight), rtol=0.02, atol=0.1)
