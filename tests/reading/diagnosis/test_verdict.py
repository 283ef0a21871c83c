"""The verdict on records: of other tools' logs, and of runs whose device counters are made up.

What can be trained for real on a CPU is in tests/reading/diagnosis/test_faults.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fake_run import fake_run, write_run
from kit import NEEDS_SHARED, SHARED

from fivetune.cli import main
from fivetune.reading.diagnosis import speed
from fivetune.reading.diagnosis.device_use import summarise_devices
from fivetune.reading.diagnosis.logs import read_log
from fivetune.reading.diagnosis.rules import RULES, diagnose_run, find_verdicts, list_missing_data
from fivetune.reading.diagnosis.stats import RunStats, collect_log_stats, collect_run_stats, compute_time_breakdown
from fivetune.rundir.plan import Plan
from fivetune.rundir.records import (
    BestEval,
    DataSummary,
    DeviceFacts,
    DeviceSample,
    EvalRecord,
    ForwardFacts,
    Run,
    SplitSummary,
    TelemetryRecord,
)

GIB = 2**30
LOGS = SHARED / "data" / "telemetry"
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason=NEEDS_SHARED)


def samples(*devices: dict[str, Any], num: int = 40, phase: str | None = "train") -> list[TelemetryRecord]:
    """Telemetry of a node: each device always says the same, and what is not given is as on a healthy one."""
    usual = {"utilisation": 0.95, "memory_busy": 0.6, "memory_used_bytes": 30 * GIB, "memory_total_bytes": 80 * GIB,
             "sm_clock_mhz": 1700.0, "throttle_reasons": (), "ours": True}  # fmt: skip
    row = tuple(DeviceSample(**{"index": i, **usual, **device}) for i, device in enumerate(devices))
    return [TelemetryRecord(seconds=float(second), phase=phase, devices=row) for second in range(num)]


def gpu_run(
    *devices: dict[str, Any],
    phases: dict[str, float] | None = None,
    mfu: float | None = 0.3,
    telemetry: list[TelemetryRecord] | None = None,
    settings: dict[str, Any] | None = None,
    step: dict[str, Any] | None = None,
) -> Run:
    """The made-up run of tests/fake_run.py as if on a GPU: shares of a step by phase, and counters."""
    shares = {"data": 0.01, "host": 0.02, "forward": 0.32, "backward": 0.6, "optimizer": 0.05, **(phases or {})}
    whole = sum(shares.values())
    steps = []
    for record in fake_run().steps:
        seconds = {phase: share / whole * record.step_seconds for phase, share in shares.items()}
        usual = {"phase_seconds": seconds, "mfu": mfu, "padding_fraction": 0.0, "peak_bytes": 50 * GIB}
        steps.append(replace(record, data_seconds=seconds["data"], **{**usual, **(step or {})}))
    run = fake_run()
    device = DeviceFacts("cuda", "made up", 80 * GIB)
    machine = replace(run.machine, precision="bf16", forward=ForwardFacts("flat"), device=device)
    config = {**run.config, "launch": {"nproc": 2 if (step or {}).get("world_size") == 2 else 1}, **(settings or {})}
    return replace(run, steps=steps, machine=machine, telemetry=telemetry or samples(*devices or ({},)), config=config)


def first_rule(run: Run, **asked: Any) -> str:
    return diagnose_run(run, **asked)[0].rule


# --- logs of other tools ---


@needs_logs
def test_two_gpus_asked_one_idle_in_system_cs_log():
    records = read_log(LOGS / "system_c_model_4_two_gpus_asked.csv")
    verdicts = find_verdicts(collect_log_stats(records, devices_requested=2))
    assert [verdict.rule for verdict in verdicts] == ["idle_device"]
    assert "1 of 2 devices worked. Mean utilisation" in verdicts[0].message
    assert verdicts[0].message.endswith(": device 0 92 %, device 1 0 %.")
    assert find_verdicts(collect_log_stats(records)) == ()  # nobody said that two were wanted
    assert (
        "idle_device"
        in list_missing_data(collect_log_stats(records), ())["the number of requested devices (--devices N)"]
    )


@needs_logs
@pytest.mark.parametrize(
    ("log", "num_notes"), [("system_c_model_4_two_gpus_asked.csv", 1), ("system_c_model_1_one_gpu.csv", 0)]
)
def test_a_log_with_an_idle_device_gets_a_note_though_nobody_said_how_many_were_asked_for(log, num_notes, capsys):
    assert main(["diagnose", str(LOGS / log), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verdicts"], len(told["notes"])) == ([], num_notes)
    assert told["time"].startswith("the device is busy 9")
    assert main(["diagnose", str(LOGS / log)]) == 0
    assert ("Add --devices 2 if 2 devices were requested" in capsys.readouterr().out) == bool(num_notes)


@needs_logs
@pytest.mark.parametrize("asked", [None, 1])
def test_system_cs_log_of_one_gpu_has_nothing_wrong(asked):
    assert (
        find_verdicts(collect_log_stats(read_log(LOGS / "system_c_model_1_one_gpu.csv"), devices_requested=asked)) == ()
    )


def test_a_log_knows_one_device_where_two_were_asked_for():
    for requested in (2, 4):
        first = find_verdicts(collect_log_stats(samples({}, phase=None), devices_requested=requested))[0]
        assert first.rule == "idle_device" and "request 1 device only" in first.advice
    two = samples({}, {}, phase=None)
    assert "request 2 devices only" in find_verdicts(collect_log_stats(two, devices_requested=4))[0].advice


def test_a_log_does_not_tell_why_the_device_waits():
    first = find_verdicts(collect_log_stats(samples({"utilisation": 0.55, "memory_busy": 0.3}, phase=None)))[0]
    assert (first.rule, first.confidence, first.change, first.gain) == ("host_bound", 0.5, {}, None)


def test_a_log_gets_no_advice_with_settings_of_fivetune_and_no_claim_about_its_data():
    busy, idle = {"memory_busy": 0.95, "memory_used_bytes": 79.9 * GIB}, {"utilisation": 0.0, "memory_busy": 0.0}
    records = samples(busy, idle, phase=None)
    verdicts = find_verdicts(collect_log_stats(records, devices_requested=2))
    assert [verdict.rule for verdict in verdicts] == ["idle_device", "memory_full", "memory_bandwidth_bound"]
    said = " ".join(f"{verdict.message} {verdict.advice}" for verdict in verdicts)
    assert all(verdict.change == {} and verdict.gain is None for verdict in verdicts)
    assert not any(word in said for word in ("train.", "launch.", "part of the data"))


def test_a_log_says_which_samples_its_mean_leaves_out():
    records = [*samples({"utilisation": 0.0}, num=10, phase=None), *samples({"utilisation": 0.6}, phase=None)]
    (verdict,) = find_verdicts(collect_log_stats(records))
    assert "60 % of the time (10 samples in which no device was active are left out)" in verdict.message


# --- healthy records ---


@pytest.mark.parametrize(
    "run",
    [
        fake_run(),
        gpu_run(),
        gpu_run({}, {}, step={"world_size": 2}, phases={"exchange": 0.05}),
        gpu_run({"throttle_reasons": ("sw_power_cap",), "sm_clock_mhz": 1400.0}),
        gpu_run({}, {"utilisation": 0.99, "ours": False}),
        gpu_run({}, {"utilisation": 0.0, "ours": False}),
        gpu_run(telemetry=samples({"utilisation": 0.02}, num=4)),
        gpu_run(step={"padding_fraction": 0.3, "num_target_tokens": 40}),
    ],
    ids=[
        "on a CPU",
        "GPU-like",
        "two GPU-like",
        "at its power limit",
        "beside another program",
        "beside an idle one",
        "too short to be seen",
        "lengths rounded up by CUDA graphs",
    ],
)
def test_healthy_records_get_no_verdict(run):
    assert diagnose_run(run) == ()


# --- faults with made-up counters ---


def test_made_up_counters_one_of_two_ranks_idle_on_its_device():
    run = gpu_run({}, {"utilisation": 0.01, "memory_busy": 0.0}, step={"world_size": 2})
    assert first_rule(run) == "idle_device"


def test_made_up_counters_one_of_two_cpu_ranks_idle():
    lines = [
        {"seconds": float(second), "rank": rank, "phase": "train", "process_cores": cores, "devices": []}
        for second in range(20)
        for rank, cores in enumerate((0.97, 0.01))
    ]
    steps = [replace(step, world_size=2) for step in fake_run().steps]
    run = fake_run(telemetry=lines, steps=steps, config={**fake_run().config, "launch": {"nproc": 2}})
    assert first_rule(run) == "idle_device"


def test_made_up_counters_throttled_clocks():
    hot = {"throttle_reasons": ("hw_thermal_slowdown",), "sm_clock_mhz": 850.0}
    cool = samples({}, num=20)
    first = diagnose_run(gpu_run(telemetry=[*cool, *samples(hot, num=20)]))[0]
    assert (first.rule, first.figure) == ("throttled", 0.5)
    assert first.gain == pytest.approx(1 / (1 - 0.5 * 0.5))


def test_made_up_counters_memory_nearly_full():
    first = diagnose_run(gpu_run(step={"peak_bytes": 76 * GIB}))[0]
    assert (first.rule, first.change["train.batch_size"]) == ("memory_full", 16)


def test_made_up_counters_memory_mostly_empty_while_accumulating():
    small = {"train": {"batch_size": 8, "global_batch_size": 64}}
    first = diagnose_run(gpu_run(step={"peak_bytes": 16 * GIB}, settings=small))[0]
    assert (first.rule, first.change) == ("memory_empty", {"train.batch_size": 32})  # 64 would need 128 GiB


def test_made_up_counters_memory_bandwidth():
    slow = gpu_run({"memory_busy": 0.75}, mfu=0.08)
    assert first_rule(slow) == "memory_bandwidth_bound"
    assert diagnose_run(gpu_run({"memory_busy": 0.75}, mfu=0.35)) == ()


def test_made_up_counters_exchange_of_gradients():
    first = diagnose_run(gpu_run({}, {}, step={"world_size": 2}, phases={"exchange": 1.0}))[0]
    assert (first.rule, first.gain) == ("communication_bound", pytest.approx(2.0))


def test_made_up_counters_launch_bound_by_utilisation():
    first = diagnose_run(gpu_run({"utilisation": 0.5}))[0]
    assert (first.rule, first.gain) == ("host_bound", pytest.approx(2.0))


def test_a_device_that_hardly_works_for_want_of_data_is_not_idle():
    verdicts = diagnose_run(gpu_run({"utilisation": 0.03, "memory_busy": 0.0}, phases={"data": 30.0}))
    assert [verdict.rule for verdict in verdicts] == ["input_bound"]


@pytest.mark.parametrize(
    ("asked", "change"), [("padded", {"train.forward": "flat"}), ("auto", {"data.bucket_pool": 32})]
)
def test_flat_tokens_are_advised_where_they_were_not_ruled_out(asked, change):
    run = gpu_run(step={"padding_fraction": 0.4}, settings={"train": {"forward": asked}})
    padded = ForwardFacts("padded", "measured: flat 9.0 ms, padded 8.0 ms a batch")
    first = diagnose_run(replace(run, machine=replace(run.machine, forward=padded)))[0]
    assert (first.rule, first.change) == ("padding_bound", change)


def test_waiting_for_data_is_not_taken_for_slow_launches():
    verdicts = diagnose_run(gpu_run({"utilisation": 0.5}, phases={"data": 1.0}))
    assert [verdict.rule for verdict in verdicts] == ["input_bound"]


# --- learning ---


def evaluation(step: int, **changes: Any) -> EvalRecord:
    return replace(fake_run().evals[0], **{"step": step, "run_step": step, "intervals": {}, "rates": {}, **changes})


def _scored(*points: tuple[float, float]) -> Run:
    evals = []
    for number, (has, no) in enumerate(points):
        scores = {"exact": (has + no) / 2, "HasAns_exact": has, "NoAns_exact": no, "HasAns_total": 5928.0}
        evals.append(evaluation(100 * number, scores=scores, num_examples=11873, loss=1 / (1 + number)))
    return fake_run(evals=evals, status={})


def test_system_bs_score_rises_by_silence():
    first = diagnose_run(_scored((68.94, 0.0), (43.56, 50.08)))[0]  # published, reference system B
    assert first.rule == "abstention"
    assert first.figure == pytest.approx(25.38)
    assert (
        diagnose_run(_scored((68.94, 0.0), (65.76, 69.52))) == ()
    )  # its better run learnt silence and kept the answers


def test_a_model_that_never_answers():
    first = diagnose_run(_scored((0.0, 20.0), (0.0, 99.0)))[0]
    assert (first.rule, first.figure) == ("abstention", 0.0)
    assert first.message.startswith("The score comes from silence")


def over_fitted(*f1: float, **changes: Any) -> Run:
    """A run whose evaluation loss rises from its second evaluation on, with the given F1 of each."""
    losses = (1.0, 0.5, 0.6, 0.7, 0.9)
    steps = (0, 100, 200, 250, 300)
    evals = [
        evaluation(step, loss=loss, scores={"f1": score, "exact": score}, num_examples=400)
        for step, loss, score in zip(steps, losses, f1, strict=True)
    ]
    best = max(evals[1:], key=lambda record: record.scores["f1"]).step
    status = replace(fake_run().status, best=BestEval(best, "f1", 1.0))
    return fake_run(evals=evals, status=status, **changes)


def test_over_fitting_does_not_depend_on_where_the_best_score_lands_by_chance():
    assert first_rule(over_fitted(10.0, 50.0, 50.5, 49.8, 50.2)) == "over_fitting"
    assert (
        first_rule(over_fitted(10.0, 50.0, 49.0, 49.8, 50.6)) == "over_fitting"
    )  # the best is the last, by 0.6 points


LATER_SCORES = [(49.0, 49.8, 48.2), (50.5, 49.8, 50.2), (49.0, 49.8, 50.6)]
"""F1 of the evaluations after the lowest loss: the best is before them, among them, the last of them."""


def test_over_fitting_advises_no_steps_below_those_of_the_best_score():
    until = [diagnose_run(over_fitted(10.0, 50.0, *later))[0].change.get("train.num_steps") for later in LATER_SCORES]
    assert until == [100, 200, None]


def test_over_fitting_says_the_same_on_the_last_steps_alone():
    run = over_fitted(10.0, 50.0, 50.5, 49.8, 50.2)
    whole, part = (diagnose_run(replace(run, steps=run.steps[start:]))[0].message for start in (0, 50))
    assert part == whole and "while the training loss went from" in whole
    assert "training loss" not in diagnose_run(replace(run, steps=run.steps[95:]))[0].message


def test_a_score_that_improves_beyond_its_interval_is_no_over_fitting():
    assert diagnose_run(over_fitted(10.0, 50.0, 58.0, 62.0, 66.0)) == ()


def diverging(*, lr: float = 0.003, vocab_size: int | None = None, last: float = 40.0) -> Run:
    """Losses that fall to 2 for 200 steps and then leave for `last`, with an evaluation loss that follows."""
    steps = [
        replace(step, loss=2 + 0.01 * (step.step % 7) if step.step < 200 else last + step.step % 3)
        for step in fake_run().steps
    ]
    evals = [evaluation(step, loss=5 - step / 100 if step < 200 else last + step / 100) for step in range(0, 301, 50)]
    config = {**fake_run().config, "optimizer": {"name": "adafactor", "lr": lr}}
    machine = replace(fake_run().machine, vocab_size=vocab_size)
    return fake_run(steps=steps, evals=evals, config=config, machine=machine)


def test_divergence_comes_before_over_fitting():
    verdicts = diagnose_run(diverging())
    assert [verdict.rule for verdict in verdicts] == ["diverged"]
    assert verdicts[0].change == {"optimizer.lr": 0.0003}
    assert "after step 203: the loss rose from 2.02 to 41" in verdicts[0].message


def test_a_loss_above_guessing_is_divergence_though_it_is_not_twice_its_minimum():
    assert first_rule(diverging(vocab_size=32, last=2.8)) == "diverged"  # ln 32 = 3.47
    assert "diverged" not in [verdict.rule for verdict in diagnose_run(diverging(last=2.8))]


def test_an_exploding_gradient_norm_is_divergence():
    run = diverging(last=2.5)
    exploding = [replace(step, grad_norm=1e4 if step.step > 200 else 1.0) for step in run.steps]
    first = diagnose_run(replace(run, steps=exploding))[0]
    assert (first.rule, "the gradient norm grew 10,000-fold" in first.message) == ("diverged", True)


@pytest.mark.parametrize("first_loss", [10.4, 90.0])
def test_a_model_that_has_not_learnt_yet_has_not_diverged(first_loss):
    steps = [replace(step, loss=first_loss - 0.001 * step.step) for step in fake_run().steps]
    machine = replace(fake_run().machine, vocab_size=32128)
    assert "diverged" not in [verdict.rule for verdict in diagnose_run(fake_run(steps=steps, machine=machine))]


def short_run(*, loss_per_step: float = 0.1, score: float = 0.0, num_examples: int = 2_000) -> Run:
    """A run whose loss falls in 30 steps of 8 examples, with its score before and after."""
    steps = [
        replace(step, loss=9 - loss_per_step * step.step, num_examples_seen=8 * step.step)
        for step in fake_run().steps[:30]
    ]
    evals = [evaluation(at, scores={"f1": score * (at > 0)}, loss=9 - at / 10) for at in (0, 30)]
    data = DataSummary(train=SplitSummary(num_examples=num_examples))
    status = replace(fake_run().status, best=BestEval(step=30, metric="f1", score=score))
    return replace(fake_run(steps=steps, evals=evals), data=data, status=status)


def test_less_than_an_epoch_explains_that_nothing_was_learnt():
    (verdict,) = (one for one in diagnose_run(short_run()) if one.rule == "short_training")
    assert verdict.change == {"train.num_epochs": 3, "train.num_steps": None}
    assert "saw 240 of 2,000 examples (12 % of an epoch)" in verdict.message
    others = short_run(loss_per_step=0.0), short_run(score=20.0), short_run(num_examples=200)
    assert all("short_training" not in [one.rule for one in diagnose_run(run)] for run in others)


def labelled(**rates: float) -> Run:
    scores = {"accuracy": 55.2, "total": 500}
    return fake_run(evals=[evaluation(step, scores=scores, rates=rates, loss=1 / (1 + step)) for step in (0, 250)])


def test_one_label_for_everything():
    first = diagnose_run(labelled(one_label=1.0, majority_label=0.552))[0]
    assert first.rule == "majority_label"
    assert first.message == (
        "100 % of the predictions at step 250 are the same label. Always predicting the most frequent label is right "
        "for 55 % of the examples."
    )
    assert diagnose_run(labelled(one_label=0.6, majority_label=0.552)) == ()
    assert diagnose_run(labelled(one_label=1.0, majority_label=0.99)) == ()  # the data hold one label as well


def test_targets_that_were_padded_before_they_were_read():
    run = fake_run()
    padded = replace(run.data.train, num_target_tokens=16 * run.data.train.num_examples)
    steps = [replace(step, num_target_tokens=16 * 64, num_examples_seen=64 * step.step) for step in run.steps]
    assert first_rule(fake_run(steps=steps, data=DataSummary(train=padded))) == "padded_labels"


def test_a_model_that_stops_learning_half_way():
    run = fake_run()
    evals = [replace(record, loss=3.0073 if record.step >= 150 else record.loss) for record in run.evals]
    first = diagnose_run(fake_run(evals=evals))[0]
    assert first.rule == "frozen"
    assert "since step 150" in first.message


# --- times ---


def test_the_evaluation_of_the_exported_weights_is_no_interruption():
    """With eval.max_examples the last evaluation, on all examples, carries the step of the best checkpoint."""
    evals = [evaluation(0, num_examples=3000, seconds=90.0)]
    evals += [evaluation(s, split="subset", num_examples=8, seconds=0.5, loss=50 / s) for s in (100, 200, 300)]
    evals += [evaluation(200, run_step=300, num_examples=3000, seconds=500.0)]
    run = fake_run(evals=evals, plan=Plan(32, 300, 100, 100))
    found = collect_run_stats(run).evaluations
    assert found and (found.seconds, found.every_steps) == (0.5, 100)
    assert diagnose_run(run) == ()


def test_heavy_checkpoints_are_found_and_light_ones_are_not():
    status = replace(fake_run().status, seconds_by_phase={"train": 117.0, "checkpoint": 60.0})
    plan = Plan(32, 300, 50, 50)
    assert first_rule(fake_run(status=status, plan=plan)) == "checkpoint_bound"
    light = replace(status, seconds_by_phase={"train": 117.0, "checkpoint": 6.0, "evaluate": 500.0})
    assert diagnose_run(fake_run(status=light, plan=plan)) == ()


def host_samples(*, own: float, others: float, num_cores: int = 2) -> list[TelemetryRecord]:
    """Telemetry of a CPU run beside other programs, in busy cores."""
    used = (own + others) / num_cores
    return [
        TelemetryRecord(seconds=float(second), phase="train", process_cores=own, core_utilisation=(used,) * num_cores)
        for second in range(20)
    ]


def test_cores_that_other_programs_take():
    machine = replace(fake_run().machine, num_threads=2)
    first = diagnose_run(fake_run(machine=machine, telemetry=host_samples(own=0.3635, others=1.6)))[0]
    assert (first.rule, first.change) == ("shared_cores", {"train.num_threads": 1})
    assert diagnose_run(fake_run(machine=machine, telemetry=host_samples(own=1.9, others=0.1))) == ()
    assert diagnose_run(fake_run(machine=machine, telemetry=host_samples(own=0.4, others=0.1))) == ()  # nobody else


# --- the list of rules ---


def test_a_rule_that_has_spoken_is_not_listed_as_not_checked():
    run = gpu_run({"utilisation": 0.5})
    steps = [replace(step, phase_seconds={}) for step in run.steps]
    stats = collect_run_stats(replace(run, steps=steps))
    verdicts = find_verdicts(stats)
    assert [verdict.rule for verdict in verdicts] == ["host_bound"]
    assert "host_bound" not in sum(list_missing_data(stats, verdicts).values(), ())


def test_the_step_of_a_numeric_error_is_a_field_of_the_status():
    status = replace(fake_run().status, state="failed", why="step 12: loss inf", nonfinite_step=301)
    first = diagnose_run(fake_run(status=status))[0]
    assert (first.rule, first.figure) == ("not_finite", 301.0)


def test_frozen_from_ten_equal_losses_on():
    def frozen(num: int) -> Run:
        return fake_run(steps=[replace(s, loss=0.5 if 100 < s.step <= 100 + num else s.loss) for s in fake_run().steps])

    first = diagnose_run(frozen(10))[0]
    assert first.rule == "frozen" and "in 10 steps from step 101 on" in first.message
    assert diagnose_run(frozen(9)) == ()


def test_wrong_results_come_before_lost_time():
    run = gpu_run({"utilisation": 0.5}, step={"loss": None}, phases={"host": 1.0})
    assert [verdict.rule for verdict in diagnose_run(run)] == ["not_finite", "host_bound"]


def test_no_rule_speaks_of_what_is_not_known():
    assert find_verdicts(RunStats()) == ()
    assert (
        find_verdicts(collect_run_stats(fake_run(steps=[], evals=[], status={}, data={}, machine={}, config={}))) == ()
    )
    assert set(sum(list_missing_data(RunStats(), ()).values(), ())) >= {"idle_device", "input_bound", "frozen"}


def test_every_rule_is_in_the_manual():
    manual = (Path(__file__).parents[3] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert [rule.name for rule in RULES if f"| `{rule.name}` " not in manual] == [], "add a row to docs/diagnose.md"


def test_times_are_unknown_until_enough_steps_were_timed():
    steps = [replace(step, warm_up=step.step <= 3) for step in fake_run().steps]
    assert compute_time_breakdown(steps[:12]) is None
    times = compute_time_breakdown(steps[:13])
    assert times and times.num_steps == 10


@pytest.mark.parametrize(
    ("utilisation", "num_active", "is_busy"), [(0.06, 11, True), (0.06, 10, False), (1.0, 9, False), (0.05, 100, False)]
)
def test_from_where_on_a_device_is_busy(utilisation, num_active, is_busy):
    """Active above 5 % utilisation, busy when active in more than a tenth of the samples."""
    active = samples({"utilisation": utilisation}, num=num_active)
    (device,) = summarise_devices([*active, *samples({"utilisation": 0.0}, num=100 - num_active)])
    assert (device.is_busy, device.active_share) == (is_busy, num_active / 100 if utilisation > 0.05 else 0)


def test_a_device_of_another_program_is_left_out():
    records = samples({}, {"ours": False}, {"ours": False, "utilisation": 0.0})
    assert [(device.index, device.is_used) for device in summarise_devices(records)] == [(0, True), (2, False)]


# --- what a pass costs ---


def passes(*, fixed: float, num: int = 60, noise: float = 0.1, batch_size: int = 1) -> Run:
    """Passes of 48 to 96 tokens, of whose middle time a share is fixed, on a machine that slows down to a third."""
    random = Random(5)
    usual, steps = fake_run().steps[0], []
    for number in range(num):
        tokens = random.randint(40, 88)
        slower = (1 + 2 * number / num) * (1 + noise * random.random())
        seconds = slower * (fixed + (1 - fixed) * (tokens + 8) / 72) / 50
        steps.append(
            replace(
                usual,
                step=number + 1,
                loss=1 / (1 + number),
                num_input_tokens=tokens,
                num_target_tokens=8,
                padding_fraction=0.0,
                step_seconds=seconds,
                data_seconds=0.0,
                warm_up=number < 3,
                phase_seconds={"host": 0.0, "forward": 0.4 * seconds, "backward": 0.6 * seconds},
            )
        )
    config = {"train": {"batch_size": batch_size, "global_batch_size": 16}}
    return fake_run(steps=steps, config=config, evals=[], plan=None)


@pytest.mark.parametrize("fixed", [0.2, 0.8])
def test_a_slowing_machine_does_not_hide_what_a_pass_costs(fixed):
    times = collect_run_stats(passes(fixed=fixed)).times
    assert times and times.fixed_cost_share
    least, likely, most = times.fixed_cost_share
    assert least <= likely <= most
    assert likely == pytest.approx(fixed, abs=0.1)


def test_tiny_batches_are_told_on_a_slowing_machine():
    first = diagnose_run(passes(fixed=0.8))[0]
    assert (first.rule, first.change) == ("launch_bound", {"train.batch_size": 16})
    assert 0.6 < first.confidence < 0.95


def test_a_run_that_computes_is_told_so():
    assert speed.describe_time_use(collect_run_stats(passes(fixed=0.2))).startswith("compute-bound, as it should be: ")


@pytest.mark.parametrize("unclear", [{"num": 20}, {"noise": 20.0}], ids=["few steps", "a busy machine"])
def test_computing_is_not_claimed_where_the_times_do_not_tell(unclear):
    evidence = collect_run_stats(passes(fixed=0.8, **unclear))
    assert find_verdicts(evidence) == ()
    assert "launch_bound" in sum(list_missing_data(evidence, ()).values(), ())
    assert speed.describe_time_use(evidence).endswith("the shares of computing and of launching kernels are unknown")


# --- the command ---


def test_rules_that_lack_data_are_listed_by_their_titles(tmp_path, capsys):
    """A GPU run without telemetry ended in KeyError: waiting_device had no title."""
    folder = write_run(tmp_path / "run", replace(gpu_run(), telemetry=[]))
    assert main(["diagnose", str(folder), "--verbose"]) == 0
    assert "   utilisation of the devices: The device waits\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "task", "rule", "change"),
    [
        ({"num_clipped_targets": 99, "whole_target_p99": 9}, "jsonl", "truncated_targets", {"max_target_tokens": 16}),
        ({"num_examples_clipped": 90, "whole_input_p99": 48}, "jsonl", "truncated_inputs", {"max_input_tokens": 48}),
        ({"num_examples_clipped": 90}, "jsonl", "truncated_inputs", {}),  # an earlier version counted no whole lengths
        ({"num_answers_lost": 3, "whole_input_p99": 41}, "squad", "lost_answers", {"max_input_tokens": 48}),
        ({"num_examples_clipped": 90}, "squad", None, None),
        ({"num_examples_clipped": 5, "num_clipped_targets": 1, "num_answers_lost": 1}, "jsonl", None, None),
    ],
)
def test_what_length_limits_cut_is_a_verdict_without_pre_flight(facts, task, rule, change):
    """99 % of the targets were cut to 2 tokens, and diagnose had no verdict for it."""
    options = {"name": task} | ({"inputs": "{a}", "targets": "{b}"} if task == "jsonl" else {})
    data = DataSummary(train=SplitSummary(num_examples=100, **facts))
    found = [one for one in diagnose_run(Run("r", config={"task": options}, data=data)) if "train" in one.message]
    assert [one.rule for one in found] == ([rule] if rule else [])
    if rule:
        assert found[0].change == {f"data.{key}": value for key, value in change.items()}


def test_a_run_whose_weights_are_ruined_has_diverged():
    """The loss exploded and then stayed at that of guessing: a constant loss was the first of seven warnings."""
    losses = [8.1, 400.0, 8e4, 2e6, 1e8, 1e9, 1e10, 8e10, 3e9, 5e7, *[7.6246] * 30]
    steps = [replace(step, loss=loss) for step, loss in zip(fake_run().steps, losses, strict=False)]
    found = diagnose_run(fake_run(steps=steps))
    assert found[0].rule == "diverged" and "frozen" not in {one.rule for one in found}
    assert "from step 11 on it is exactly 7.62" in found[0].message
    running = diagnose_run(fake_run(steps=steps, status={"state": "running"}))
    assert "model/" in found[0].advice and "model/" not in running[0].advice


def test_no_verdict_on_speed_where_other_programs_distort_the_times():
    slow = [replace(step, data_seconds=0.9 * step.step_seconds) for step in fake_run().steps]
    machine = replace(fake_run().machine, num_threads=2)
    beside = host_samples(own=0.36, others=1.6)
    alone, disturbed = (
        {one.rule for one in diagnose_run(fake_run(steps=slow, machine=machine, telemetry=telemetry))}
        for telemetry in ([], beside)
    )
    assert "input_bound" in alone and "shared_cores" in disturbed and "input_bound" not in disturbed


def test_the_command_needs_no_torch(tmp_path):
    steps = [replace(step, lr=1e-12, effective_lr=None) for step in fake_run().steps]
    folder = write_run(tmp_path / "frozen", fake_run(steps=steps))
    code = "import sys; sys.modules['torch'] = None; from fivetune.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "diagnose", str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1. The updates are too small to change the weights  (updates_below_precision, " in done.stdout


def test_the_command_says_what_to_change(tmp_path, capsys):
    run = gpu_run(phases={"data": 1.0})
    folder = write_run(tmp_path / "slow", run)
    assert main(["diagnose", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "1. Steps wait for data  (input_bound, confidence" in said
    assert "predicted: 2." in said
    assert main(["diagnose", str(folder), "--json"]) == 0
    assert '"rule": "input_bound"' in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_read(tmp_path, capsys):
    (tmp_path / "log.csv").write_text("Timestamp (s),0:GPU (%)\n1,90\n31,91\n")
    assert main(["diagnose", str(tmp_path / "none")]) == 4
    assert "no such run or log" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "log.csv"), "--verify"]) == 2
    assert "there is no recipe to run again" in capsys.readouterr().err
    assert main(["diagnose", str(tmp_path / "log.csv"), "--devices", "0"]) == 2
