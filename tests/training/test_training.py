"""Training: right gradients, the same result twice, and an end that says why."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import kit
import pytest
import torch
from safetensors.torch import load_file

import fivetune
from fivetune import cli, rundir, train
from fivetune.data.store.batch import collate
from fivetune.errors import (
    ConfigError,
    DataError,
    FiveTuneEnvironmentError,
    NumericError,
    RunDirError,
    translate_oom_errors,
)
from fivetune.machine.telemetry.devices import pick_device, pick_precision
from fivetune.model.backend import Forward
from fivetune.reading.diagnosis.stats import collect_run_stats
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import BestEval, Run
from fivetune.scores.metrics.squad_v2 import SQuADV2 as SquadV2Metric
from fivetune.training import run as training_run
from fivetune.training.step import learner
from fivetune.training.step.learner import Update
from fivetune.training.step.update import train_step

POISONED = "decoder.block.1.layer.2.DenseReluDense.wo"


def _train(folder: Path, model: Path, *, name: str = "run", preflight: bool = False, **overrides) -> Run:
    table = kit.recipe(folder, model, run={"dir": str(folder / name), "seed": 1}, **overrides)
    return train(table, preflight=preflight, quiet=True)


def _gradient(setup, cut: int, *, rows: range = range(8)) -> tuple[Update, torch.Tensor]:
    """The gradient that the optimizer gets for `rows` in micro-batches of `cut`; the weights stay."""
    seen: list[torch.Tensor] = []

    def keep(optimizer, args, kwargs):
        seen.append(torch.cat([p.grad.flatten().clone() for g in optimizer.param_groups for p in g["params"]]))

    handle = setup.learner.optimizer.register_step_pre_hook(keep)
    group = [collate(setup.data.stream.store, list(rows[i : i + cut])) for i in range(0, len(rows), cut)]
    update = train_step(setup.learner, group, lr=0.0, step=1)
    handle.remove()
    return update, seen[0]


@pytest.mark.parametrize("family", list(kit.FAMILIES))
def test_micro_batches_do_not_change_loss_and_gradient(tmp_path, family_folders, family):
    """1x8 = 2x4 = 4x2 = 8x1 with targets of uneven length: the mean of means would be off by per cents."""
    setup = kit.ready(tmp_path, family_folders[family], model__dropout=0.0, train__max_grad_norm=None)
    lengths = {len(setup.data.stream.store.labels[row]) for row in range(8)}
    assert len(lengths) > 1
    whole, gradient = _gradient(setup, 8)
    for cut in (4, 2, 1):
        update, other = _gradient(setup, cut)
        assert math.isclose(update.loss, whole.loss, rel_tol=1e-6)
        assert math.isclose(update.grad_norm, whole.grad_norm, rel_tol=1e-5)
        assert ((other - gradient).norm() / gradient.norm()).item() < 1e-6


def test_loss_is_nats_per_scored_token(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, model__dropout=0.0)
    one, three = _gradient(setup, 1, rows=range(1))[0], _gradient(setup, 1, rows=range(1, 4))[0]
    num_one = len(setup.data.stream.store.labels[0])
    num_three = sum(len(setup.data.stream.store.labels[row]) for row in range(1, 4))
    both = _gradient(setup, 2, rows=range(4))[0]
    assert math.isclose(both.loss, (one.loss * num_one + three.loss * num_three) / (num_one + num_three), rel_tol=1e-6)


def test_gradient_is_clipped_and_its_norm_recorded_before(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, train__max_grad_norm=0.5)
    update, gradient = _gradient(setup, 4)
    assert update.grad_norm > 0.5
    assert math.isclose(gradient.norm().item(), 0.5, rel_tol=1e-3)


def test_training_lowers_the_loss(tmp_path, model_folder):
    run = _train(tmp_path, model_folder, train__num_steps=30, optimizer__lr=1e-2, eval__every_steps=30)
    assert run.steps[-1].loss < 0.5 * run.steps[0].loss
    assert run.evals[-1].loss < 0.5 * run.evals[0].loss
    assert [step.step for step in run.steps] == list(range(1, 31))


def test_same_seed_gives_the_same_bits(tmp_path, model_folder):
    losses = [[s.loss for s in _train(tmp_path, model_folder, name=name).steps] for name in ("a", "b")]
    assert losses[0] == losses[1]
    assert kit.weights_of(tmp_path / "a") == kit.weights_of(tmp_path / "b")


@pytest.mark.slow
def test_another_seed_gives_other_weights(tmp_path, model_folder):
    _train(tmp_path, model_folder, name="a")
    train(kit.recipe(tmp_path, model_folder, run={"dir": str(tmp_path / "b"), "seed": 2}), preflight=False, quiet=True)
    assert kit.weights_of(tmp_path / "a") != kit.weights_of(tmp_path / "b")


def test_library_call_returns_the_run(tmp_path, model_folder):
    run = fivetune.train(kit.recipe(tmp_path, model_folder), {"train.num_steps": 2, "optimizer.lr": 2e-3}, quiet=True)
    assert isinstance(run.records, Run)
    assert (run.name, run.status.state, run.status.step) == ("run", "finished", 2)
    assert run.config["optimizer"]["lr"] == 2e-3
    assert [e.step for e in run.evals] == [0, 2]
    assert run.data.train.num_kept == 24
    assert run.machine.precision == "fp32"
    assert run.machine.command is None
    assert set(run.status.seconds_by_phase) == {"prepare", "evaluate", "train", "checkpoint"}


def test_best_weights_are_exported(tmp_path, model_folder, monkeypatch):
    """They are those of step 4, not the last ones."""
    kit.scored(monkeypatch, [5.0, 9.0, 7.0])
    run = _train(tmp_path, model_folder, eval__every_steps=2)
    best = run.status.best
    assert (best.step, best.metric, best.score) == (4, "f1", 9.0)
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    for step, same in ((4, True), (6, False)):
        kept = load_file(tmp_path / "run" / "checkpoints" / str(step) / "model.safetensors")
        assert all(torch.equal(exported[name], kept[name]) for name in exported) is same
    assert (tmp_path / "run" / "best").resolve().name == "4"
    assert "# run" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("f1", "losses", "best"),
    [
        ([8.0, 8.0, 8.0], [3.0, 1.0, 2.0], 4),
        ([8.0, 8.0, 8.0], [3.0, 2.0, 2.0], 6),
        ([8.0, 9.0, 8.0], [1.0, 9.0, 1.0], 4),
    ],
)
def test_of_equal_scores_the_lower_loss_wins_then_the_later_step(tmp_path, model_folder, monkeypatch, f1, losses, best):
    kit.scored(monkeypatch, f1, losses)
    assert _train(tmp_path, model_folder, eval__every_steps=2).status.best.step == best


@pytest.mark.slow
def test_times_are_counted_once(tmp_path, model_folder, monkeypatch):
    """The best step is not the last, and the final evaluation on all examples belongs to the end of the run."""
    kit.scored(monkeypatch, [9.0, 8.0, 7.0, 9.0])
    started = time.perf_counter()
    run = _train(
        tmp_path,
        model_folder,
        data__eval=str(kit.squad_file(tmp_path / "many.json", num_questions=30, offset=200)),
        eval={"every_steps": 8, "max_examples": 2, "max_new_tokens": 8},
        train__num_steps=24,
    )
    wall = time.perf_counter() - started
    phases = run.status.seconds_by_phase
    assert sum(phases.values()) <= wall
    assert phases["evaluate"] >= sum(e.seconds for e in run.evals)
    assert [(e.step, e.split, e.run_step) for e in run.evals] == [
        (0, "eval", 0), (8, "subset", 8), (16, "subset", 16), (24, "subset", 24), (8, "eval", 24),
    ]  # fmt: skip
    evaluations = collect_run_stats(run).evaluations
    assert evaluations and evaluations.seconds == (run.evals[1].seconds + run.evals[2].seconds) / 2


@pytest.mark.slow
def test_early_stopping_ends_the_run_after_evaluations_without_a_better_one(
    tmp_path, model_folder, monkeypatch, capsys
):
    kit.scored(monkeypatch, [5.0, 9.0, 8.0, 7.0, 6.0, 9.5, 9.0, 9.0], [3.0] * 8)
    table = kit.recipe(tmp_path, model_folder, eval__every_steps=2, train__num_steps=20, train__early_stopping=2)
    run = train(table, preflight=False)
    assert (run.status.state, run.status.step, run.status.best) == ("finished", 8, BestEval(4, "f1", 9.0, 3.0))
    why = "stopped early after step 8 of 20: no evaluation was better than that of step 4 (f1 9.00) in 2 evaluations"
    assert run.status.why.startswith(why) and why in capsys.readouterr().err
    assert train(table, resume=True, quiet=True).status.step == 8
    longer = train(table, {"train.early_stopping": 3}, resume=True, quiet=True)  # counts from where it stopped
    assert (longer.status.step, [e.step for e in longer.evals]) == (10, [0, 2, 4, 6, 8, 10])
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    kept = load_file(tmp_path / "run" / "checkpoints" / "4" / "model.safetensors")
    assert all(torch.equal(exported[name], kept[name]) for name in exported)


def test_early_stopping_needs_evaluations(tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"train.early_stopping: it compares evaluations, and no data.eval is given"):
        _train(tmp_path, model_folder, train__early_stopping=2, data__eval=[])


def test_without_evaluation_data(tmp_path, model_folder):
    run = _train(tmp_path, model_folder, data__eval=[], preflight=True)
    assert (run.evals, run.status.best, run.status.state) == ([], None, "finished")
    assert any("no data.eval: nothing is scored, model/ will hold the last weights" in w for w in run.warnings)
    last = load_file(tmp_path / "run" / "checkpoints" / "6" / "model.safetensors")
    assert torch.equal(
        load_file(tmp_path / "run" / "model" / "model.safetensors")["shared.weight"], last["shared.weight"]
    )


def test_without_training_data(tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"data.train: no training data is given"):
        _train(tmp_path, model_folder, data__train=[])


@pytest.mark.parametrize("preflight", [True, False])
def test_metric_that_is_never_computed_is_refused_before_training(tmp_path, model_folder, preflight):
    with pytest.raises(
        ConfigError, match=r"eval.metric 'f2' is not a score that can select.*Did you mean f1\?"
    ) as caught:
        _train(tmp_path, model_folder, eval__metric="f2", preflight=preflight)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "steps.jsonl").exists()


def test_failure_is_written_down(tmp_path, model_folder, monkeypatch):
    def fall(self, record, num_steps):
        raise ZeroDivisionError("far away")

    monkeypatch.setattr(Progress, "show_step", fall)
    with pytest.raises(ZeroDivisionError):
        _train(tmp_path, model_folder)
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["why"]) == ("failed", "ZeroDivisionError('far away')")


def test_run_that_fails_before_it_began_leaves_nothing(tmp_path, model_folder):
    (tmp_path / "broken.json").write_text('{"data": [')
    with pytest.raises(DataError, match=r"broken.json"):
        _train(tmp_path, model_folder, data__train=str(tmp_path / "broken.json"))
    assert not (tmp_path / "run").exists()


def test_config_with_overrides_is_refused(tmp_path, model_folder):
    config = fivetune.load_config(kit.recipe(tmp_path, model_folder))
    with pytest.raises(ConfigError, match=r"overrides: not allowed with a RunConfig, which is complete"):
        train(config, {"optimizer.lr": 1.0})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
@pytest.mark.parametrize("where", [(Forward, "compute_losses"), (learner, "generate")])
def test_out_of_memory_says_what_to_lower(tmp_path, model_folder, monkeypatch, where, error):
    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(*where, full)
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"device: out of memory: .*Lower train.batch_size .*eval.batch_size"
    ):
        _train(tmp_path, model_folder)
    assert "\n" not in rundir.read_run(tmp_path / "run").status.why


def test_other_errors_pass_the_memory_watch(tmp_path, model_folder):
    with pytest.raises(RuntimeError, match="shapes"), translate_oom_errors():
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize("higher", [True, False])
def test_metric_says_which_score_is_better(tmp_path, model_folder, monkeypatch, higher):
    monkeypatch.setattr(SquadV2Metric, "higher_is_better", higher)
    kit.scored(monkeypatch, [5.0, 3.0, 4.0])
    best = _train(tmp_path, model_folder, eval__every_steps=2, eval__at_start=False).status.best
    assert (best.step, best.score) == ((2, 5.0) if higher else (4, 3.0))


@pytest.mark.slow
def test_lost_best_checkpoint_is_reported(tmp_path, model_folder, monkeypatch, capsys):
    """A resume of the finished run exports again."""
    kit.scored(monkeypatch, [9.0, 8.0])
    run = _train(tmp_path, model_folder)
    assert (run.status.best.step, run.status.incomplete) == (3, None)
    (tmp_path / "run" / "checkpoints" / "3" / "model.safetensors").write_bytes(b"")
    assert cli.main(["train", str(tmp_path / "run"), "--resume", "--quiet"]) == 6
    assert "is damaged (its checksum differs). It was the best checkpoint; model/ holds" in capsys.readouterr().err
    run = rundir.read_run(tmp_path / "run")
    assert (run.status.state, run.status.best) == ("finished", None)
    assert (tmp_path / "run" / "report.html").is_file()
    last = load_file(tmp_path / "run" / "checkpoints" / "6" / "model.safetensors")
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(exported[name], last[name]) for name in exported)


# --- numbers that are not finite, weights that do not move ---


def _poisoned_after(step: int, monkeypatch):
    """A run whose weights get an inf after `step` optimizer steps."""
    whole = training_run.set_up

    def set_up(config, **kwargs):
        setup, steps = whole(config, **kwargs), iter(range(1, 99))

        def poison(optimizer, args, kwargs):
            if next(steps) == step:
                setup.learner.model.get_submodule(POISONED).weight.data[0, 0] = math.inf

        setup.learner.optimizer.register_step_post_hook(poison)
        return setup

    monkeypatch.setattr(training_run, "set_up", set_up)


def test_loss_that_is_not_finite_stops_the_run(tmp_path, model_folder, monkeypatch):
    _poisoned_after(4, monkeypatch)
    with pytest.raises(NumericError, match=rf"^step 5: loss nan, first in {POISONED} \(\d+ of \d+ values") as caught:
        _train(tmp_path, model_folder)
    assert caught.value.exit_code == 5
    assert "examples q" in str(caught.value) and "The weights were not changed." in str(caught.value)
    assert "start a new run" in str(caught.value) and "resume=True would repeat this step" in str(caught.value)
    run = rundir.read_run(tmp_path / "run")
    assert run.status.state == "failed" and run.status.why == str(caught.value).replace("resume=True", "--resume")
    assert caught.value.step == run.status.nonfinite_step == 5
    assert [s.step for s in run.steps] == [1, 2, 3, 4]
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["3"]
    assert not (tmp_path / "run" / "model").exists()


def test_weights_stay_when_the_loss_is_not_finite(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder)
    setup.learner.model.get_submodule(POISONED).weight.data[0, 0] = math.nan
    before = [p.detach().clone() for p in setup.learner.model.parameters()]
    group = [collate(setup.data.stream.store, [0, 1]), collate(setup.data.stream.store, [2, 3])]
    with pytest.raises(NumericError, match=r"step 7: loss nan.*examples q0, q1\."):
        train_step(setup.learner, group, lr=1e-3, step=7)
    assert all(
        torch.equal(a, b) or a.isnan().any() for a, b in zip(before, setup.learner.model.parameters(), strict=True)
    )
    assert setup.learner.optimizer.state_dict()["state"] == {}


def test_gradient_that_is_not_finite_stops_too(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder)
    setup.learner.model.shared.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NumericError, match=r"step 2: gradient norm inf, first in the backward pass"):
        train_step(setup.learner, [collate(setup.data.stream.store, [0, 1])], lr=1e-3, step=2)


def test_numeric_trouble_in_preflight_has_its_exit_code(tmp_path, model_folder, monkeypatch):
    whole = training_run.set_up

    def set_up(config, **kwargs):
        setup = whole(config, **kwargs)
        setup.learner.model.get_submodule(POISONED).weight.data[0, 0] = math.inf
        return setup

    monkeypatch.setattr(training_run, "set_up", set_up)
    with pytest.raises(NumericError, match=r"^pre-flight: train step: .*loss nan"):
        _train(tmp_path, model_folder, preflight=True)


def test_frozen_weights_are_reported(tmp_path, model_folder):
    run = _train(tmp_path, model_folder, optimizer__lr=1e-30)
    assert any("evaluation loss is exactly the same" in w and "at steps 0 and 3" in w for w in run.warnings)


def test_frozen_training_loss_is_reported(tmp_path, model_folder):
    run = _train(
        tmp_path,
        model_folder,
        data__max_train_examples=1,
        model__dropout=0.0,
        optimizer__lr=1e-30,
        data__eval=[],
        train__num_steps=12,
    )
    assert len([w for w in run.warnings if "the training loss is exactly" in w and "10 steps in a row" in w]) == 1


@pytest.mark.slow
def test_divergence_is_reported_once_while_training(tmp_path, model_folder):
    """A rate at which the loss leaves its minimum for good."""
    run = _train(
        tmp_path,
        model_folder,
        data__eval=[],
        train__num_steps=60,
        train__max_grad_norm=None,
        schedule={"name": "linear", "warmup_steps": 60},
        optimizer={"name": "adamw", "lr": 5.0},
    )
    diverged = [warning.message for warning in run.status.warnings if warning.kind == "diverged"]
    assert len(diverged) == 1 and diverged[0].startswith("the training diverges: after step ")
    assert "Start a new run with a lower optimizer.lr" in diverged[0]
    assert diverged[0] in (tmp_path / "run" / "log.txt").read_text()


def test_preflight_refuses_a_learning_rate_that_moves_nothing(tmp_path, model_folder):
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"pre-flight: train step: one optimizer step did not change the weights"
    ):
        _train(tmp_path, model_folder, optimizer__lr=1e-30, preflight=True)


# --- device and precision ---


def test_precision_auto_is_fp32_on_a_cpu():
    assert pick_precision("auto", "cpu") == "fp32"
    assert pick_precision("bf16", "cpu") == "bf16"
    with pytest.raises(ConfigError, match=r"train.precision: fp16 is not supported on mps. Use auto."):
        pick_precision("fp16", "mps")


def test_device_that_is_not_there():
    assert pick_device("cpu") == "cpu"
    with pytest.raises(
        FiveTuneEnvironmentError,
        match=r"device: cuda:63 is not available, this machine has (no|\d+) CUDA devices?\. Use auto",
    ):
        pick_device("cuda:63")


def test_bf16_keeps_fp32_weights(tmp_path, model_folder):
    run = _train(tmp_path, model_folder, train__precision="bf16", train__num_steps=2)
    assert run.machine.precision == "bf16"
    exported = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert {t.dtype for t in exported.values()} == {torch.float32}


def test_fp16_warns_of_transformers_modules(tmp_path, model_folder):
    run = _train(tmp_path, model_folder, train__precision="fp16", train__num_steps=2, train__forward="padded")
    assert any("pass fp16's 65,504" in warning for warning in run.warnings)


# --- one directory, one run ---


def test_second_run_in_a_directory_is_refused(tmp_path, model_folder):
    _train(tmp_path, model_folder, train__num_steps=1)
    before = kit.weights_of(tmp_path / "run")
    with pytest.raises(
        RunDirError, match=r"holds a run already. Add resume=True to continue it, overwrite=True to move it aside"
    ):
        _train(tmp_path, model_folder, train__num_steps=1)
    assert kit.weights_of(tmp_path / "run") == before


@pytest.mark.slow
def test_overwrite_moves_the_run_aside(tmp_path, model_folder):
    _train(tmp_path, model_folder, train__num_steps=1)
    before = kit.weights_of(tmp_path / "run")
    train(kit.recipe(tmp_path, model_folder, train__num_steps=2), overwrite=True, preflight=False, quiet=True)
    (aside,) = tmp_path.glob("run.before-*")
    assert kit.weights_of(aside) == before
    assert len(rundir.read_run(tmp_path / "run").steps) == 2


def test_overwrite_that_is_refused_brings_the_run_back(tmp_path, model_folder):
    _train(tmp_path, model_folder, train__num_steps=1)
    before = kit.weights_of(tmp_path / "run")
    table = kit.recipe(tmp_path, model_folder, eval__metric="f2")
    with pytest.raises(ConfigError):
        train(table, overwrite=True, preflight=False, quiet=True)
    assert kit.weights_of(tmp_path / "run") == before
    assert not list(tmp_path.glob("run.before-*"))


def _resume(folder: Path, model: Path, **overrides) -> Run:
    return train(kit.recipe(folder, model, **overrides), resume=True, quiet=True)


def test_resume_of_nothing_is_refused(tmp_path, model_folder):
    with pytest.raises(RunDirError, match=r"run: there is no run to resume. Leave resume=True out to start it."):
        _resume(tmp_path, model_folder)


@pytest.mark.slow
def test_resume_of_a_finished_run_changes_nothing(tmp_path, model_folder):
    before = _train(tmp_path, model_folder)
    weights = kit.weights_of(tmp_path / "run")
    after = _resume(tmp_path, model_folder)
    assert kit.weights_of(tmp_path / "run") == weights
    assert (after.steps, after.evals, after.status.best) == (
        before.steps,
        before.evals,
        before.status.best,
    )
    assert (after.status.state, after.status.num_resumes) == ("finished", 1)


@pytest.mark.slow
def test_resume_may_train_longer(tmp_path, model_folder):
    _train(tmp_path, model_folder)
    run = _resume(tmp_path, model_folder, train__num_steps=8)
    assert [s.step for s in run.steps] == list(range(1, 9))
    assert [e.step for e in run.evals] == [0, 3, 6, 8]
    assert not [w for w in run.warnings if "schedule" in w]


@pytest.mark.slow
def test_resume_that_changes_the_schedule_says_so(tmp_path, model_folder):
    linear = {"name": "linear"}
    _train(tmp_path, model_folder, schedule=linear)
    run = _resume(tmp_path, model_folder, train__num_steps=8, schedule=linear)
    assert any("started for 6 steps and now has 8: schedule.name linear uses" in w for w in run.warnings)


def test_resume_with_other_settings_is_refused(tmp_path, model_folder):
    _train(tmp_path, model_folder)
    before = (tmp_path / "run" / "status.json").read_bytes()
    with pytest.raises(
        ConfigError, match=r"started with other settings: optimizer.lr was 0.001, is 0.002; train.batch_size"
    ):
        _resume(tmp_path, model_folder, optimizer__lr=2e-3, train__batch_size=8)
    assert (tmp_path / "run" / "status.json").read_bytes() == before


def test_resume_with_other_data_is_refused_and_leaves_the_run_as_it_is(tmp_path, model_folder):
    table = kit.recipe(tmp_path, model_folder)
    train(table, preflight=False, quiet=True)
    before = {name: (tmp_path / "run" / name).read_bytes() for name in ("status.json", "data.json", "config.yaml")}
    kit.squad_file(tmp_path / "train.json", num_questions=23)
    with pytest.raises(RunDirError, match=r"was trained on other data .*6/state\.json differs\). Start a new run"):
        train(table, resume=True, quiet=True)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in before} == before
