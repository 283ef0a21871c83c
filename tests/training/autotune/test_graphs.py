"""Steps by graphs on the CPU: when they are taken, and that they train what launched kernels train.

Triton's interpreter runs the optimizer, torch the attention of static buffers (the kernel's own tests are in
test_kernels.py and test_fused.py), and a recorder that calls again stands in for CUDA graphs.
"""

from __future__ import annotations

import gc
import json
import os
import re
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import kit
import pytest
import torch
from cuda_kit import attend

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")

from fivetune import rundir
from fivetune.errors import ConfigError, NumericError
from fivetune.model.cuda import dispatch, kernel_trial
from fivetune.model.cuda.buckets import plan_buckets
from fivetune.model.cuda.optimizer import FlatAdamW
from fivetune.model.objective import PLAIN, Objective
from fivetune.training.autotune import capture_trial
from fivetune.training.autotune import graphs as capture
from fivetune.training.autotune.graphs import count_micro_batches, decide_graphs, find_graph_obstacle
from fivetune.training.run import train
from fivetune.training.state import checkpoint
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.state.snapshot import take_snapshot
from fivetune.training.step.nonfinite import refuse_nonfinite
from fivetune.training.step.update import train_step

pytestmark = pytest.mark.slow


def again():
    """Makes a recorder whose graphs call the function."""
    return lambda function: function


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The CPU counts as a device of kernels and graphs; its buckets are small."""
    monkeypatch.setattr("fivetune.model.cuda.attention.compute_attention", attend)
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(capture, "supports_graphs", lambda device: True)
    monkeypatch.setattr(capture, "make_graph_recorder", again)


def ready(folder, model_folder, **overrides: Any):
    overrides = {"train__batch_size": 2, "train__global_batch_size": 2, "model__dropout": 0.0, **overrides}
    return kit.ready(folder, model_folder, **overrides)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that are measured, one call after the other: launched, with graphs."""
    left = [0.3, 0.2]
    monkeypatch.setattr(capture, "_measure_batch_seconds", lambda learner, batches: left.pop(0))
    return left


def weights(setup) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in setup.learner.model.parameters()]


def test_graphs_that_agree_and_are_faster_are_taken(tmp_path, model_folder, clock):
    setup = ready(tmp_path, model_folder)
    before, random = weights(setup), torch.get_rng_state()
    learner, chosen = decide_graphs(setup)
    assert chosen and chosen.on
    assert re.fullmatch(
        "measured: 200.0 ms a batch with graphs, 300.0 ms a batch without; [0-9]+ graphs, [0-9.]+% of the positions "
        "are filler",
        chosen.why,
    )
    assert learner.engine.num_graphs > 0 and learner.engine.graphs.steps.num_launched == 0
    assert all(torch.equal(a, b) for a, b in zip(before, setup.learner.model.parameters(), strict=True))
    assert torch.equal(random, torch.get_rng_state()) and not learner.optimizer.flat.mean.any()


def test_graphs_agree_with_launched_kernels_whose_groups_have_other_rates(tmp_path, model_folder, clock):
    setup = ready(tmp_path, model_folder, train__param_groups=[{"match": "encoder", "lr": 0.1}])
    _, chosen = decide_graphs(setup)
    assert chosen and chosen.on, chosen


def test_graphs_minimise_the_same_objective(tmp_path, model_folder, clock):
    """The loss is plain in both, and the norms of the gradients are compared."""
    setup = ready(tmp_path, model_folder, loss={"label_smoothing": 0.3, "z_loss": 0.1})
    learner, chosen = decide_graphs(setup)
    assert chosen and chosen.on and learner.engine.num_graphs
    plain = with_learner(setup, forward=replace(setup.learner.forward, objective=PLAIN))
    optimizer = capture.build_optimizer(setup.config, setup.learner.model)
    norms = [
        train_step(one, setup.data.stream.build_micro_batches(0), lr=0.0, step=1).grad_norm
        for one in (learner, capture._build_learner(plain, optimizer, (), None))
    ]
    assert abs(norms[0] - norms[1]) > 0.02 * norms[1]


def wrong():
    return lambda function: lambda: 1.5 * function()


def broken():
    raise RuntimeError("no graphs here\nmore")


def unrecorded():
    def record(function):
        raise RuntimeError("operation not permitted when stream is capturing")

    return record


@pytest.mark.parametrize(
    ("graphs", "seconds", "why"),
    [
        (again, 0.4, "measured: 400.0 ms a batch with graphs, 300.0 ms a batch without"),
        (wrong, 0.2, "with graphs, the loss: "),
        (broken, 0.2, "RuntimeError: no graphs here"),
        (unrecorded, 0.2, "a graph could not be recorded: RuntimeError: operation not permitted when"),
    ],
)
def test_otherwise_the_run_is_launched_and_why_is_said(
    tmp_path, model_folder, monkeypatch, clock, graphs, seconds, why
):
    monkeypatch.setattr(capture, "make_graph_recorder", graphs)
    clock[1] = seconds
    setup = ready(tmp_path, model_folder)
    before = weights(setup)
    learner, chosen = decide_graphs(setup)
    assert chosen is not None and not chosen.on and chosen.why.startswith(why)
    assert learner is setup.learner
    assert all(torch.equal(a, b) for a, b in zip(before, setup.learner.model.parameters(), strict=True))
    assert len({p.untyped_storage().data_ptr() for p in setup.learner.model.parameters()}) == len(before)
    if graphs is wrong:
        with pytest.raises(ConfigError, match=r"train\.capture: on cannot run: with graphs, the loss: .* Use auto or"):
            object.__setattr__(setup.config.train, "capture", "on")
            decide_graphs(setup)


def test_an_optimizer_that_goes_elsewhere_is_not_taken(tmp_path, model_folder, monkeypatch, clock):
    original = FlatAdamW.step

    def too_far(self):
        self.lr.mul_(2)
        original(self)

    monkeypatch.setattr(FlatAdamW, "step", too_far)
    monkeypatch.setattr(capture, "TOLERANCES", {"fp32": 1.0})
    _, chosen = decide_graphs(ready(tmp_path, model_folder))
    assert chosen is not None and not chosen.on
    assert chosen.why.startswith("after 3 steps the weights differ by ")


def test_what_cannot_be_captured_is_named(tmp_path, model_folder, monkeypatch):
    setup = ready(tmp_path, model_folder)
    assert find_graph_obstacle(setup) == ""
    recomputing = with_learner(setup, forward=replace(setup.learner.forward, recompute=True))
    assert find_graph_obstacle(recomputing) == "train.recompute keeps random states on the host"
    half = with_learner(setup, compute=replace(setup.learner.compute, precision="fp16"))
    assert find_graph_obstacle(half) == "the precision is fp16, not bf16, tf32 or fp32"
    for options, reason in (
        ({"r_drop": 1.0}, "loss.r_drop computes every example twice"),
        ({"class_weights": {(1,): 2.0}}, "loss.class_weights is set"),
    ):
        other = with_learner(setup, forward=replace(setup.learner.forward, objective=Objective(**options)))
        assert find_graph_obstacle(other) == reason
    monkeypatch.setattr(capture, "supports_graphs", lambda device: False)
    assert find_graph_obstacle(setup) == "the device is cpu, which has no CUDA graphs"
    assert decide_graphs(setup) == (setup.learner, None)


def with_learner(setup, **changes: Any):
    return replace(setup, learner=replace(setup.learner, **changes))


def steps(setup, first: int, last: int) -> list[float]:
    return [
        train_step(setup.learner, setup.data.stream.build_micro_batches(step), lr=1e-3 / (1 + step), step=step + 1).loss
        for step in range(first, last)
    ]


def captured(folder, model_folder, **overrides: Any):
    """A set-up whose steps are replayed, in the buckets of its run."""
    setup = ready(folder, model_folder, **overrides)
    planned = plan_buckets(count_micro_batches(setup), max_buckets=4)
    learner = capture._build_learner(setup, setup.learner.optimizer, planned, again())
    assert 1 <= learner.engine.num_graphs <= 4
    return replace(setup, learner=learner)


OPTIMIZERS = [{"optimizer": {"name": "adafactor"}}]  # adamw: the next test
MORE_OPTIMIZERS = [
    {"optimizer": {"name": "schedule_free"}, "schedule": {"name": "constant"}},
    {"optimizer": {"name": "adamw"}, "train__layer_decay": 0.9},
    {"optimizer": {"name": "adafactor", "relative_step": True, "beta1": 0.9}},
    {"optimizer": {"name": "lion"}},
    {"optimizer": {"name": "muon"}},
]


@pytest.mark.parametrize("options", [*OPTIMIZERS, *(kit.release(options) for options in MORE_OPTIMIZERS)])
def test_every_optimizer_steps_beside_the_graphs_as_beside_launched_kernels(
    tmp_path, model_folder, monkeypatch, options
):
    """With accumulation: two micro-batches a step."""
    options = {"train__batch_size": 2, "train__global_batch_size": 4, **options}
    mine = captured(tmp_path, model_folder, **options)
    found = steps(mine, 0, 4)
    assert mine.learner.engine.graphs.steps.num_replayed == 8 and mine.learner.engine.graphs.steps.num_launched == 0
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda",))
    launched = ready(tmp_path, model_folder, **options)
    assert found == pytest.approx(steps(launched, 0, 4), rel=1e-3)
    moved = [(a - b).abs().max() for a, b in zip(weights(mine), weights(launched), strict=True)]
    assert max(moved) < 2e-3  # a step is up to 1e-3 long where a gradient is only rounding error


def test_six_steps_are_those_of_launched_kernels(tmp_path, model_folder, monkeypatch):
    options = {
        "train__batch_size": 2,
        "train__global_batch_size": 4,
        "optimizer": {"name": "adamw", "weight_decay": 0.1},
    }
    mine = captured(tmp_path, model_folder, **options)
    found = steps(mine, 0, 6)
    monkeypatch.setattr(dispatch, "DEVICES", ("cuda",))
    launched = ready(tmp_path, model_folder, **options)
    assert found == pytest.approx(steps(launched, 0, 6), rel=1e-5)
    state, reference = mine.learner.optimizer.state_dict()["state"], launched.learner.optimizer.state_dict()["state"]
    assert mine.learner.engine.graphs.steps.num_replayed == 12 and float(state[0]["step"]) == 6
    moved = [(a - b).abs().max() for a, b in zip(weights(mine), weights(launched), strict=True)]
    assert max(moved) < 2e-3  # a step is up to 1e-3 long where a gradient is only rounding error
    for number, values in reference.items():
        for name in ("exp_avg", "exp_avg_sq"):
            error = (state[number][name] - values[name]).abs().max()
            assert error <= 1e-3 * values[name].abs().max(), (number, name)


def test_a_checkpoint_goes_on_exactly_and_in_either_way(tmp_path, model_folder):
    one = captured(tmp_path, model_folder, model__dropout=0.1)
    steps(one, 0, 2)
    taken = take_snapshot(one.learner.model, one.learner.optimizer, one.learner.scaler)
    path = checkpoint.write_checkpoint(tmp_path / "checkpoints", taken, TrainingState(step=2))
    expected = steps(one, 2, 4)
    two = captured(tmp_path, model_folder, model__dropout=0.1)
    checkpoint.restore_checkpoint(path, two.learner.model, two.learner.optimizer, two.learner.scaler)
    assert steps(two, 2, 4) == expected
    assert all(
        torch.equal(a, b) for a, b in zip(one.learner.model.parameters(), two.learner.model.parameters(), strict=True)
    )
    plain = ready(tmp_path, model_folder)
    checkpoint.restore_checkpoint(path, plain.learner.model, plain.learner.optimizer, plain.learner.scaler)
    dropless = captured(tmp_path, model_folder)
    checkpoint.restore_checkpoint(path, dropless.learner.model, dropless.learner.optimizer, dropless.learner.scaler)
    assert steps(dropless, 2, 4) == pytest.approx(steps(plain, 2, 4), rel=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_from_there_on(tmp_path, model_folder, monkeypatch):
    setup = captured(tmp_path, model_folder)
    steps(setup, 0, 1)
    nats, before = sys_nats(), weights(setup)
    monkeypatch.setattr(
        "fivetune.model.cuda.graphed.compute_static_losses", lambda *args, **named: nats(*args, **named) * torch.inf
    )
    flag, batches = torch.zeros(()), setup.data.stream.build_micro_batches
    update = train_step(setup.learner, batches(1), lr=1e-3, step=2, nonfinite_flag=flag)
    with pytest.raises(NumericError, match="step 2: loss"):
        train_step(setup.learner, batches(1), lr=1e-3, step=2)
    monkeypatch.setattr("fivetune.model.cuda.graphed.compute_static_losses", nats)
    assert train_step(setup.learner, batches(2), lr=1e-3, step=3, nonfinite_flag=flag).grad_norm != 0
    assert flag == 1
    assert all(torch.equal(a, b) for a, b in zip(before, setup.learner.model.parameters(), strict=True))
    with pytest.raises(NumericError, match="step 2: loss"):
        refuse_nonfinite(setup.learner, setup.data.stream.build_micro_batches(1), 2, update.loss, update.grad_norm)


def sys_nats():
    from fivetune.model.cuda import graphed

    return graphed.compute_static_losses


def test_memory_that_runs_out_halves_the_step(tmp_path, model_folder):
    setup = captured(tmp_path, model_folder, train__batch_size=2)
    expected = captured(tmp_path, model_folder, train__batch_size=2)
    original, failing = setup.learner.engine.graphs.steps.run, [True]

    def run(batch, *, weight):
        if failing and failing.pop():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(batch, weight=weight)

    setup.learner.engine.graphs.steps.run = run
    update = train_step(setup.learner, setup.data.stream.build_micro_batches(0), lr=1e-3, step=1, batch_size=2)
    assert update.batch_size == 1
    assert [update.loss, *steps(setup, 1, 2)] == pytest.approx(steps(expected, 0, 2), rel=1e-5)


@pytest.mark.release
def test_a_run_by_graphs_is_recorded_resumed_and_exported(tmp_path, model_folder, capsys):
    options: dict[str, Any] = {
        "train__capture": "on", "train__batch_size": 2, "train__global_batch_size": 2, "train__num_steps": 4,
        "eval__every_steps": 2, "model__dropout": 0.1, "schedule": {"name": "constant"},
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    run = train(kit.recipe(whole, model_folder, **options), preflight=False)
    assert run.machine.capture["on"] and run.machine.capture["why"].startswith("requested; ")
    assert "steps are replayed as CUDA graphs (requested; " in capsys.readouterr().err
    recipe = kit.recipe(parts, model_folder, **options)
    train(recipe, {"train.num_steps": 2}, quiet=True, preflight=False)
    resumed = train(recipe, quiet=True, resume=True)
    assert [s.loss for s in resumed.steps] == [s.loss for s in run.steps]
    assert kit.weights_of(whole / "run") == kit.weights_of(parts / "run")
    assert all(0 < step.padding_fraction < 1 for step in rundir.read_run(parts / "run").steps)


def test_a_trial_leaves_nothing_in_memory(tmp_path, model_folder):
    """No cycle of references keeps the graphs and the optimizer's state until Python's collector comes."""
    setup = captured(tmp_path, model_folder)
    gc.collect()
    gc.disable()
    try:
        learner = capture._build_learner(setup, capture.build_optimizer(setup.config, setup.learner.model), (), None)
        left = weakref.ref(learner.engine.graphs), weakref.ref(learner.optimizer)
        del learner
        assert [ref() for ref in left] == [None, None]
    finally:
        gc.enable()


def test_a_first_capture_is_tried_in_another_process(tmp_path, model_folder, monkeypatch):
    setup = ready(tmp_path, model_folder)
    monkeypatch.setattr(kernel_trial.subprocess, "run", lambda command, **named: run_here(json.loads(named["input"])))
    assert capture._try_elsewhere(setup) == ""
    monkeypatch.setattr(torch, "randint", lambda *args, **named: fail("Offset increment outside graph capture\nmore"))
    assert capture._try_elsewhere(setup) == (
        "a first capture, in a process of its own, failed: train.capture: a capture failed and has left torch's "
        "generator unusable for this process: Offset increment outside graph capture. Start again with --train.capture "
        "off."
    )


def fail(words: str) -> None:
    raise RuntimeError(words)


def run_here(request) -> SimpleNamespace:
    assert request["config"]["num_layers"] == 1 and request["fused"] is False
    try:
        capture_trial.run_request(request, again())
    except Exception as error:
        return SimpleNamespace(returncode=1, stderr=f"a warning\n{error}\n")
    return SimpleNamespace(returncode=0, stdout="", stderr="")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.release
def test_the_reason_of_the_other_process_is_returned(tmp_path, model_folder, monkeypatch):
    setup = ready(tmp_path, model_folder)
    assert capture._try_elsewhere(setup).startswith(
        "a first capture, in a process of its own, failed: FiveTuneEnvironmentError: cuda graphs: torch sees no CUDA"
    )
    monkeypatch.setattr(capture_trial, "LONGEST_SECONDS", 0.01)
    assert capture._try_elsewhere(setup).endswith(" failed: it took more than 0 s")
