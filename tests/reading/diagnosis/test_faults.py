"""Runs with a fault put in on purpose: the first verdict names it; healthy runs get none.

The runs of this file are real trainings of a tiny model. Where a machine would be needed that is not there (devices,
links, heat), test_verdict.py has records with made-up counters, and says so in the tests' names.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from kit import changed_weights
from uneven_questions import questions

from fivetune import rundir
from fivetune.data.store import stream
from fivetune.data.store.stream import TrainingStream
from fivetune.errors import NumericError
from fivetune.model.backend import Forward
from fivetune.reading.diagnosis.rules import diagnose_run
from fivetune.rundir.records import Run
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.run import train
from fivetune.training.state import checkpoint
from fivetune.training.step.plain import PlainEngine
from fivetune.types import Batch

pytestmark = pytest.mark.slow

SLOW = 0.25  # seconds: several steps of the tiny model, on a busy machine too


@pytest.fixture
def trained(tmp_path, model_folder):
    """Trains the tiny model for some 30 steps of 16 examples; settings as in kit.recipe."""

    def train_it(model: Path | str = model_folder, num_questions: int = 200, **settings: Any) -> Run:
        usual = {
            "data__train": questions(tmp_path / "some.json", num=num_questions),
            "data__eval": questions(tmp_path / "others.json", num=24, offset=300),
            "train__num_steps": 30,
            "train__batch_size": 16,
            "train__global_batch_size": 16,
            "eval__every_steps": 15,
            "telemetry__every_seconds": 0,  # else shared_cores speaks on a loaded machine
        }
        recipe = kit.recipe(tmp_path, Path(model), **{**usual, **settings})
        return train(recipe, quiet=True, preflight=False)

    return train_it


def rules(run: Run, **asked: Any) -> list[str]:
    return [verdict.rule for verdict in diagnose_run(run, **asked)]


def slowed(work: Any, wait: Callable[[float], None]) -> Any:
    """`work` after a wait."""

    def wait_and_work(*args: Any, **kwargs: Any) -> Any:
        wait(SLOW)
        return work(*args, **kwargs)

    return wait_and_work


# --- healthy runs ---


@pytest.mark.parametrize(
    "settings",
    [
        {},
        kit.release({"train__global_batch_size": 32, "train__num_steps": 26}),
        kit.release({"data__eval": [], "optimizer__name": "adafactor", "optimizer__lr": 1e-2}),
        # fewer questions than four pools are sorted in smaller pools, and padding takes its share
        kit.release(
            {"num_questions": 640, "train__forward": "padded", "schedule": {"name": "linear", "warmup_steps": 5}}
        ),
    ],
    ids=["with evaluations", "in two passes", "without evaluation", "padded forward, sorted by length"],
)
def test_healthy_runs_get_no_verdict(trained, settings, cpu_clock):
    assert diagnose_run(trained("t5-nano", **settings)) == ()


# --- faults of speed ---


def test_a_slow_loader(trained, monkeypatch):
    """The loader, in a thread of its own, takes several times as long as a step, however busy the machine is."""
    work, last = PlainEngine.step, [0.0]

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        update = work(*args, **kwargs)
        last[0] = time.perf_counter() - started
        return update

    monkeypatch.setattr(PlainEngine, "step", timed)
    monkeypatch.setattr(stream, "collate", slowed(stream.collate, lambda least: time.sleep(max(least, 4 * last[0]))))
    assert rules(trained(train__num_steps=16, data__eval=[]))[0] == "input_bound"


def test_no_worker_beside_the_training(trained, monkeypatch, cpu_clock):
    def one_after_the_other(self: TrainingStream, first_step: int, num_steps: int) -> Any:
        yield from (slowed(self.build_micro_batches, cpu_clock)(step) for step in range(first_step, num_steps))

    monkeypatch.setattr(TrainingStream, "iter_micro_batches", one_after_the_other)
    assert rules(trained(train__num_steps=16, data__eval=[]))[0] == "input_bound"


def test_housekeeping_in_every_step(trained, monkeypatch, cpu_clock):
    def with_housekeeping(*args: Any, **kwargs: Any) -> Any:
        update = work(*args, **kwargs)
        gc.collect(0)
        cpu_clock(SLOW)  # what emptying the memory of a device and waiting for it would take
        return update

    work = PlainEngine.step
    monkeypatch.setattr(PlainEngine, "step", with_housekeeping)
    assert rules(trained(train__num_steps=16, data__eval=[]))[0] == "host_bound"


@pytest.mark.release
def test_tiny_batches(trained, cpu_clock):
    run = trained(
        data__eval=[],
        data__bucket_pool=32,
        train__batch_size=1,  # uneven: tells what a token costs
        train__global_batch_size=8,
        train__num_steps=40,
    )
    first = diagnose_run(run)[0]
    assert (first.rule, first.change) == ("launch_bound", {"train.batch_size": 8})
    assert first.gain and first.gain > 2


def test_tiny_batches_with_an_update_after_each(trained, cpu_clock):
    run = trained(data__eval=[], train__batch_size=1, train__global_batch_size=None, train__num_steps=80)
    first = diagnose_run(run)[0]
    assert (first.rule, first.change) == ("launch_bound", {"train.batch_size": 4, "train.global_batch_size": 4})
    assert first.gain and first.gain > 1.5


def test_no_bucketing(trained, cpu_clock):
    first = diagnose_run(trained(train__forward="padded", train__num_steps=16, data__bucket_pool=1, data__eval=[]))[0]
    assert (first.rule, first.change) == ("padding_bound", {"train.forward": "flat"})


def test_heavy_evaluation(trained, cpu_clock):
    verdicts = diagnose_run(trained(eval__every_steps=1, train__num_steps=16, checkpoint__every_steps=16))
    (heavy,) = [verdict for verdict in verdicts if verdict.rule == "evaluation_bound"]  # it may be silent too
    assert heavy.change["eval.every_steps"] > 1


def test_heavy_checkpoints(trained, monkeypatch, cpu_clock):
    monkeypatch.setattr(checkpoint, "write_checkpoint", slowed(checkpoint.write_checkpoint, cpu_clock))
    first = diagnose_run(trained(checkpoint__every_steps=1, train__num_steps=16, data__eval=[]))[0]
    assert first.rule == "checkpoint_bound"
    assert first.figure and first.figure > 0.5  # of a quarter of a second each


# --- faults of numbers ---


def test_fp16_overflow_ends_the_run(trained, tmp_path, tokenizer_folder):
    model = kit.make_model(tmp_path / "large", tokenizer_folder)
    changed_weights(model, encoder__block__0__layer__1__DenseReluDense__wo__weight=torch.full((32, 48), 3e4))
    with pytest.raises(NumericError):
        trained(model, train__precision="fp16", train__forward="padded", data__eval=[])
    first = diagnose_run(rundir.read_run(tmp_path / "run"))[0]
    assert (first.rule, first.change) == ("not_finite", {"train.precision": "fp32"})


@pytest.mark.release
def test_fp16_overflow_skips_steps(trained, monkeypatch):
    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**40, growth_interval=1)
    monkeypatch.setattr(ComputeConfig, "make_scaler", lambda place: scaler())
    assert rules(trained(train__precision="fp16", train__num_steps=40, data__eval=[]))[0] == "overflow"


def test_frozen_weights(trained, monkeypatch):
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    monkeypatch.setattr(
        "fivetune.training.optimizers._table_adamw.TableAdamW.step", lambda self, closure=None: None, raising=False
    )
    assert rules(trained(train__num_steps=16, eval__every_steps=8))[0] == "frozen"


def test_a_rate_that_fp32_cannot_add(trained):
    first = diagnose_run(trained(optimizer__lr=1e-12, train__num_steps=16, data__eval=[]))[0]
    assert (first.rule, first.change) == ("updates_below_precision", {"optimizer.lr": 2e-4})


def test_padding_in_the_labels(trained, monkeypatch):
    def padded(*args: Any) -> Batch:
        batch = work(*args)
        ends = torch.arange(len(batch.ids) + 1) * 32
        labels = torch.zeros(int(ends[-1]), dtype=torch.int64)
        for i, (first, last) in enumerate(zip(batch.cu_seqlens_tgt, batch.cu_seqlens_tgt[1:], strict=False)):
            labels[32 * i : 32 * i + last - first] = batch.labels[first:last]
        return replace(batch, labels=labels, cu_seqlens_tgt=ends)

    work = stream.collate
    monkeypatch.setattr(stream, "collate", padded)
    assert rules(trained(data__eval=[]))[0] == "padded_labels"


# --- faults of the set-up ---


def test_two_devices_asked_one_process_there(trained):
    run = trained(train__num_steps=16, data__eval=[])
    assert "world_size" not in rules(run)
    assert rules(run, devices_requested=2)[0] == "world_size"


def test_memory_that_ran_out(trained, monkeypatch):
    def nats(self: Forward, model: Any, batch: Batch, **kwargs: Any) -> Any:
        if len(batch.ids) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return work(self, model, batch, **kwargs)

    work = Forward.compute_losses
    monkeypatch.setattr(Forward, "compute_losses", nats)
    first = diagnose_run(trained(train__num_steps=16, data__eval=[]))[0]
    assert (first.rule, first.change["train.batch_size"]) == ("memory_full", 8)


# --- faults of learning ---


def test_a_rate_at_which_training_diverges(trained):
    first = diagnose_run(
        trained("t5-nano", train__num_steps=16, data__eval=[], optimizer__name="adafactor", optimizer__lr=1.0)
    )[0]
    assert first.rule == "diverged" and first.change["optimizer.lr"] < 0.1


def test_over_fitting(trained, tmp_path):
    few = questions(tmp_path / "few.json", num=8)
    # The evaluation asks for the owner, which training never answers: F1 stays 0 on every processor, the loss rises.
    others = json.loads(Path(questions(tmp_path / "others.json", num=24, offset=300)).read_text())
    for paragraph in others["data"][0]["paragraphs"]:
        owner = paragraph["context"].split()[0]
        paragraph["qas"][0] |= {"answers": [{"text": owner, "answer_start": 0}], "is_impossible": False}
    (tmp_path / "owners.json").write_text(json.dumps(others))
    run = trained(
        data__train=few,
        data__eval=str(tmp_path / "owners.json"),
        train__num_steps=120,
        train__batch_size=8,
        train__global_batch_size=8,
        optimizer__lr=5e-3,
        model__dropout=0.0,
        eval__every_steps=20,
    )
    first = diagnose_run(run)[0]
    assert first.rule == "over_fitting"
    assert 0 < first.change["train.num_steps"] < 120
