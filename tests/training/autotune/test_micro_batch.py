"""The micro-batch: found before training, halved where memory runs out, the same training either way."""

from __future__ import annotations

import json
import math

import kit
import pytest
import torch
import yaml

from fivetune.config import load_config
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.machine.telemetry.memory import get_free_bytes, get_used_bytes, measure_peak_bytes
from fivetune.model.backend import Forward
from fivetune.rundir.plan import Plan
from fivetune.rundir.reader import read_plan
from fivetune.training.autotune import micro_batch
from fivetune.training.optimizers.adafactor import Adafactor
from fivetune.training.optimizers.muon import Muon
from fivetune.training.run import train
from fivetune.training.step.groups import count_state_bytes
from fivetune.training.step.update import train_step

AUTO = {"train__batch_size": "auto", "model__dropout": 0.0}


def _full_above(monkeypatch, limit: int) -> list[int]:
    """Let a forward pass over more than `limit` examples run out of memory; the sizes that were tried."""
    forward, tried = Forward.compute_losses, []

    def nats(self, model, batch, **others):
        tried.append(len(batch.ids))
        if len(batch.ids) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, model, batch, **others)

    monkeypatch.setattr(Forward, "compute_losses", nats)
    return tried


# --- batch_size: auto ---


def test_the_largest_part_of_the_global_batch_is_found(tmp_path, model_folder, monkeypatch):
    tried = _full_above(monkeypatch, 5)
    setup = kit.ready(tmp_path, model_folder, train__global_batch_size=24, **AUTO)
    assert tried == [1, 2, 3, 4, 6]
    assert setup.plan.batch_size == setup.config.train.batch_size == 4
    assert {len(rows) for rows in setup.data.stream.select_rows(0)} == {4}
    assert setup.fit and setup.fit.why.startswith("6 would take ") and setup.fit.why.endswith(" and ran out of memory")


def test_the_search_leaves_no_trace(tmp_path, model_folder):
    fixed, found = (kit.ready(tmp_path, model_folder, train__batch_size=size) for size in (4, "auto"))
    assert found.plan.batch_size == 8 and found.fit and found.fit.why == "that is the whole global batch"
    assert all(p.grad is None for p in found.learner.model.parameters()) and not found.learner.model.training
    assert all(
        torch.equal(a, b)
        for a, b in zip(fixed.learner.model.parameters(), found.learner.model.parameters(), strict=True)
    )


def test_the_state_is_counted_in_whole_bytes_of_what_is_trained(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder, optimizer={"name": "adafactor"}, **AUTO)
    model = setup.learner.model
    assert setup.fit and setup.fit.state_bytes == count_state_bytes(model, Adafactor())
    counts = [weight.numel() for weight in model.parameters() if weight is not model.shared.weight]
    model.shared.weight.requires_grad_(False)
    assert count_state_bytes(model, Adafactor()) == math.ceil(0.1 * sum(counts)) < setup.fit.state_bytes


def test_the_state_of_tables_and_norms_is_their_own(tmp_path, model_folder):
    model = kit.ready(tmp_path, model_folder).learner.model
    matrices = sum(p.numel() for name, p in model.named_parameters() if ".block." in name and p.dim() == 2)
    biases = sum(p.numel() for name, p in model.named_parameters() if "relative_attention_bias" in name)
    assert biases
    total = sum(p.numel() for p in model.parameters())
    assert count_state_bytes(model, Muon()) == 8 * total - 4 * (matrices - biases)


def test_on_the_cpu_nothing_is_tried_that_would_not_fit():
    tried = []

    def trial(size: int) -> int:
        tried.append(size)
        return 100 + 10 * size

    fit = micro_batch._search_batch_size(trial, 64, 7, base=100, room=300)
    assert tried == [1, 2, 4, 8, 16]
    assert (fit.batch_size, fit.measured_bytes, fit.forecast_bytes, fit.state_bytes) == (16, 260, 260, 7)
    assert fit.why.startswith("32 would take ")


def test_peak_is_seen_while_it_lasts():
    before = get_used_bytes("cpu")
    assert measure_peak_bytes(lambda: torch.ones(2**24).sum().item(), "cpu") - before > 2**25
    assert 0 < get_free_bytes() < 2**50


def test_a_run_keeps_what_was_found_and_resumes_with_it(tmp_path, model_folder, monkeypatch):
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=2, **AUTO)
    tried = _full_above(monkeypatch, 2)
    train(recipe, quiet=True)
    run = tmp_path / "run"
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["batch_size"] == 2
    machine = json.loads((run / "machine.json").read_text())["batch_size_auto"]
    assert machine["batch_size"] == 2 and machine["measured_bytes"] > 0 and machine["forecast_bytes"] > 0
    assert "train.batch_size auto: 2 examples, " in (run / "log.txt").read_text()
    tried.clear()
    train(recipe, {"train.num_steps": 3}, resume=True, quiet=True)
    assert tried == [2, 2, 2, 2], "nothing is searched again"


def test_auto_needs_the_whole():
    with pytest.raises(ConfigError, match="batch_size auto needs global_batch_size"):
        load_config({"model": {"path": "m"}, "task": "squad", "train": {"batch_size": "auto"}})
    with pytest.raises(ConfigError, match="Input should be a valid integer of at least 1, or auto, not 'most'"):
        load_config({"model": {"path": "m"}, "task": "squad", "train": {"batch_size": "most"}})


# --- out of memory in a step ---


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_that_does_not_fit_is_repeated_with_half(tmp_path, model_folder, monkeypatch, dropout):
    """With dropout, it is the step that a run with that size from the start makes."""
    overrides = {"train__batch_size": 8 if dropout == 0 else 2, "model__dropout": dropout}
    whole, cut = (
        kit.ready(tmp_path, model_folder, **overrides),
        kit.ready(tmp_path, model_folder, train__batch_size=8, model__dropout=dropout),
    )
    group = next(cut.data.stream.iter_micro_batches(0, 1))
    torch.manual_seed(3)
    expected = train_step(whole.learner, next(whole.data.stream.iter_micro_batches(0, 1)), lr=1e-3, step=1)
    tried = _full_above(monkeypatch, 2)
    torch.manual_seed(3)
    update = train_step(cut.learner, group, lr=1e-3, step=1)
    assert tried == [8, 4, 2, 2, 2, 2] and update.batch_size == 2
    assert update.loss == pytest.approx(expected.loss, abs=1e-6)
    for ours, theirs in zip(cut.learner.model.parameters(), whole.learner.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_later_steps_keep_the_half_and_the_log_says_so(tmp_path, model_folder, monkeypatch):
    recipe = kit.recipe(tmp_path, model_folder, train__num_steps=3, data__eval=[])
    tried = _full_above(monkeypatch, 3)
    run = train(recipe, quiet=True, preflight=False)
    assert tried == [4, *[2] * 12]
    assert [step.num_examples_seen for step in run.steps] == [8, 16, 24]
    assert read_plan(tmp_path / "run") == Plan(2, 3, 3, 3, None, 1e-3)
    said = "step 1: memory ran out with 4 examples in a forward pass. The step was repeated with 2, and later"
    assert [warning for warning in run.warnings if warning.startswith(said)]
    assert (tmp_path / "run" / "log.txt").read_text().count(said) == 1


def test_one_example_that_does_not_fit_is_an_error(tmp_path, model_folder, monkeypatch):
    recipe = kit.recipe(tmp_path, model_folder, data__eval=[])
    _full_above(monkeypatch, 0)
    with pytest.raises(FiveTuneEnvironmentError, match=r"device: out of memory: .*Lower train.batch_size"):
        train(recipe, quiet=True, preflight=False)
