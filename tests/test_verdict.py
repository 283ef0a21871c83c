"""The verdict on records: of other tools' logs, and of runs whose device counters are made up.

What can be trained for real on a CPU is in tests/test_faults.py.
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
from fivetune.telemetry import limits
from fivetune.telemetry.activity import devices_of
from fivetune.telemetry.evidence import Evidence, of_log, of_run, times_of
from fivetune.telemetry.logs import read_log
from fivetune.telemetry.verdict import RULES, diagnose, unjudged, verdicts_of
from fivetune.types import DeviceSample, Run, TelemetryRecord

GIB = 2**30
LOGS = SHARED / "data" / "telemetry"
needs_logs = pytest.mark.skipif(not LOGS.is_dir(), reason=NEEDS_SHARED)


def samples(*devices: dict[str, Any], num: int = 40, phase: str | None = "train") -> list[TelemetryRecord]:
    """Telemetry of a node: each device always says the same, and what is not given is as on a healthy one."""
    usual = {"utilisation": 0.95, "memory_busy": 0.6, "memory_used_bytes": 30 * GIB, "memory_total_bytes": 80 * GIB,
             "sm_clock_mhz": 1700.0, "throttle_reasons": (), "ours": True}  # fmt: skip
    row = tuple(DeviceSample(**{"index": i, **usual, **device}) for i, device in enumerate(devices))
    return [TelemetryRecord(seconds=float(second), phase=phase, devices=row) for second in range(num)]


def gpu_run(*devices: dict[str, Any], phases: dict[str, float] | None = None, mfu: float | None = 0.3,
            telemetry: list[TelemetryRecord] | None = None, settings: dict[str, Any] | None = None,
            step: dict[str, Any] | None = None) -> Run:  # fmt: skip
    """The made-up run of tests/fake_run.py as if on a GPU: shares of a step by phase, and counters."""
    shares = {"data": 0.01, "host": 0.02, "forward": 0.32, "backward": 0.6, "optimizer": 0.05, **(phases or {})}
    whole = sum(shares.values())
    steps = []
    for record in fake_run().steps:
        seconds = {phase: share / whole * record["step_seconds"] for phase, share in shares.items()}
        steps.append({**record, "data_seconds": seconds["data"], "phase_seconds": seconds, "mfu": mfu,
                      "padding_fraction": 0.0, "peak_bytes": 50 * GIB, **(step or {})})  # fmt: skip
    run = fake_run()
    machine = {**run.machine, "precision": "bf16", "forward": {"kind": "flat", "why": ""},
               "device": {"kind": "cuda", "name": "made up", "memory_bytes": 80 * GIB}}  # fmt: skip
    lines = [record.as_dict() for record in telemetry or samples(*devices or ({},))]
    config = {**run.config, "launch": {"nproc": 2 if (step or {}).get("world_size") == 2 else 1}, **(settings or {})}
    return fake_run(steps=steps, machine=machine, telemetry=lines, config=config)


def first_rule(run: Run, **asked: Any) -> str:
    return verdicts_of(run, **asked)[0].rule


# --- logs of other tools ---


@needs_logs
def test_two_gpus_asked_one_idle_in_system_cs_log():
    records = read_log(LOGS / "system_c_model_4_two_gpus_asked.csv")
    verdicts = diagnose(of_log(records, devices_asked=2))
    assert [verdict.rule for verdict in verdicts] == ["idle_device"]
    assert verdicts[0].says == "1 of 2 devices worked. Mean utilisation: device 0 92 %, device 1 0 %."
    assert diagnose(of_log(records)) == ()  # nobody said that two were wanted
    assert "idle_device" in unjudged(of_log(records))["how many devices were asked for (--devices N)"]


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
    assert ("--devices 2 makes it a verdict" in capsys.readouterr().out) == bool(num_notes)


@needs_logs
@pytest.mark.parametrize("asked", [None, 1])
def test_system_cs_log_of_one_gpu_has_nothing_wrong(asked):
    assert diagnose(of_log(read_log(LOGS / "system_c_model_1_one_gpu.csv"), devices_asked=asked)) == ()


def test_a_log_knows_one_device_where_two_were_asked_for():
    assert diagnose(of_log(samples({}, phase=None), devices_asked=2))[0].rule == "idle_device"


def test_a_log_does_not_tell_why_the_device_waits():
    first = diagnose(of_log(samples({"utilisation": 0.55, "memory_busy": 0.3}, phase=None)))[0]
    assert (first.rule, first.confidence, first.change) == ("host_bound", 0.5, {})


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
    assert verdicts_of(run) == ()


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
    steps = [{**step, "world_size": 2} for step in fake_run().steps]
    run = fake_run(telemetry=lines, steps=steps, config={**fake_run().config, "launch": {"nproc": 2}})
    assert first_rule(run) == "idle_device"


def test_made_up_counters_throttled_clocks():
    hot = {"throttle_reasons": ("hw_thermal_slowdown",), "sm_clock_mhz": 850.0}
    cool = samples({}, num=20)
    first = verdicts_of(gpu_run(telemetry=[*cool, *samples(hot, num=20)]))[0]
    assert (first.rule, first.figure) == ("throttled", 0.5)
    assert first.gain == pytest.approx(1 / (1 - 0.5 * 0.5))


def test_made_up_counters_memory_nearly_full():
    first = verdicts_of(gpu_run(step={"peak_bytes": 76 * GIB}))[0]
    assert (first.rule, first.change["train.batch_size"]) == ("memory_full", 16)


def test_made_up_counters_memory_mostly_empty_while_accumulating():
    small = {"train": {"batch_size": 8, "global_batch_size": 64}}
    first = verdicts_of(gpu_run(step={"peak_bytes": 16 * GIB}, settings=small))[0]
    assert (first.rule, first.change) == ("memory_empty", {"train.batch_size": 32})  # 64 would need 128 GiB


def test_made_up_counters_memory_bandwidth():
    slow = gpu_run({"memory_busy": 0.75}, mfu=0.08)
    assert first_rule(slow) == "memory_bandwidth_bound"
    assert verdicts_of(gpu_run({"memory_busy": 0.75}, mfu=0.35)) == ()


def test_made_up_counters_exchange_of_gradients():
    first = verdicts_of(gpu_run({}, {}, step={"world_size": 2}, phases={"exchange": 1.0}))[0]
    assert (first.rule, first.gain) == ("communication_bound", pytest.approx(2.0))


def test_made_up_counters_launch_bound_by_utilisation():
    first = verdicts_of(gpu_run({"utilisation": 0.5}))[0]
    assert (first.rule, first.gain) == ("host_bound", pytest.approx(2.0))


def test_a_device_that_hardly_works_for_want_of_data_is_not_idle():
    verdicts = verdicts_of(gpu_run({"utilisation": 0.03, "memory_busy": 0.0}, phases={"data": 30.0}))
    assert [verdict.rule for verdict in verdicts] == ["input_bound"]


@pytest.mark.parametrize(
    ("asked", "change"), [("padded", {"train.forward": "flat"}), ("auto", {"data.bucket_pool": 32})]
)
def test_flat_tokens_are_advised_where_they_were_not_ruled_out(asked, change):
    run = gpu_run(step={"padding_fraction": 0.4}, settings={"train": {"forward": asked}})
    padded = {**run.machine, "forward": {"kind": "padded", "why": "measured: flat 9.0 ms, padded 8.0 ms a batch"}}
    first = verdicts_of(replace(run, machine=padded))[0]
    assert (first.rule, first.change) == ("padding_bound", change)


def test_waiting_for_data_is_not_taken_for_slow_launches():
    verdicts = verdicts_of(gpu_run({"utilisation": 0.5}, phases={"data": 1.0}))
    assert [verdict.rule for verdict in verdicts] == ["input_bound"]


# --- learning ---


def _scored(*points: tuple[float, float]) -> Run:
    evals = []
    for number, (has, no) in enumerate(points):
        scores = {"exact": (has + no) / 2, "HasAns_exact": has, "NoAns_exact": no, "HasAns_total": 5928.0}
        evals.append({"step": 100 * number, "split": "eval", "num_examples": 11873, "scores": scores, "rates": {},
                      "loss": 1 / (1 + number)})  # fmt: skip
    return fake_run(evals=evals)


def test_system_bs_score_rises_by_silence():
    first = verdicts_of(_scored((68.94, 0.0), (43.56, 50.08)))[0]  # published, reference system B
    assert first.rule == "abstention"
    assert first.figure == pytest.approx(25.38)
    assert (
        verdicts_of(_scored((68.94, 0.0), (65.76, 69.52))) == ()
    )  # its better run learnt silence and kept the answers


def test_targets_that_were_padded_before_they_were_read():
    run = fake_run()
    padded = {**run.data["train"], "num_target_tokens": 16 * run.data["train"]["num_examples"]}
    steps = [{**step, "num_target_tokens": 16 * 64, "num_examples_seen": 64 * step["step"]} for step in run.steps]
    assert first_rule(fake_run(steps=steps, data={"train": padded})) == "padded_labels"


def test_a_model_that_stops_learning_half_way():
    run = fake_run()
    evals = [{**record, "loss": 3.0073 if record["step"] >= 150 else record["loss"]} for record in run.evals]
    first = verdicts_of(fake_run(evals=evals))[0]
    assert first.rule == "frozen"
    assert "since step 150" in first.says


# --- the list of rules ---


def test_wrong_results_come_before_lost_time():
    run = gpu_run({"utilisation": 0.5}, step={"loss": None}, phases={"host": 1.0})
    assert [verdict.rule for verdict in verdicts_of(run)] == ["not_finite", "host_bound"]


def test_no_rule_speaks_of_what_is_not_known():
    assert diagnose(Evidence()) == ()
    assert diagnose(of_run(fake_run(steps=[], evals=[], status={}, data={}, machine={}, config={}))) == ()
    assert set(sum(unjudged(Evidence()).values(), ())) >= {"idle_device", "input_bound", "frozen"}


def test_every_rule_is_in_the_manual():
    manual = (Path(__file__).parents[1] / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert [rule.judge.__name__ for rule in RULES if f"`{rule.judge.__name__}`" not in manual] == []


def test_times_are_unknown_until_enough_steps_were_timed():
    steps = [{**step, "warm_up": step["step"] <= 3} for step in fake_run().steps]
    assert times_of(steps[:12]) is None
    times = times_of(steps[:13])
    assert times and times.num_steps == 10


def test_a_device_of_another_program_is_left_out():
    lines = [record.as_dict() for record in samples({}, {"ours": False}, {"ours": False, "utilisation": 0.0})]
    assert [device.index for device in devices_of(lines)] == [0, 2]


# --- what a pass costs ---


def passes(*, fixed: float, num: int = 60, noise: float = 0.1, batch_size: int = 1) -> Run:
    """Passes of 48 to 96 tokens, of whose middle time a share is fixed, on a machine that slows down to a third."""
    random = Random(5)
    steps = []
    for number in range(num):
        tokens = random.randint(40, 88)
        slower = (1 + 2 * number / num) * (1 + noise * random.random())
        seconds = slower * (fixed + (1 - fixed) * (tokens + 8) / 72) / 50
        steps.append({**fake_run().steps[0], "step": number + 1, "loss": 1 / (1 + number),
                      "num_input_tokens": tokens, "num_target_tokens": 8, "padding_fraction": 0.0,
                      "step_seconds": seconds, "data_seconds": 0.0, "warm_up": number < 3,
                      "phase_seconds": {"host": 0.0, "forward": 0.4 * seconds, "backward": 0.6 * seconds}})  # fmt: skip
    return fake_run(steps=steps, config={"train": {"batch_size": batch_size, "global_batch_size": 16}}, evals=[])


@pytest.mark.parametrize("fixed", [0.2, 0.8])
def test_a_slowing_machine_does_not_hide_what_a_pass_costs(fixed):
    times = of_run(passes(fixed=fixed)).times
    assert times and times.per_pass
    least, likely, most = times.per_pass
    assert least <= likely <= most
    assert likely == pytest.approx(fixed, abs=0.1)


def test_tiny_batches_are_told_on_a_slowing_machine():
    first = verdicts_of(passes(fixed=0.8))[0]
    assert (first.rule, first.change) == ("launch_bound", {"train.batch_size": 16})
    assert 0.6 < first.confidence < 0.95


def test_a_run_that_computes_is_told_so():
    assert limits.state(of_run(passes(fixed=0.2))).startswith("compute-bound, as it should be: ")


@pytest.mark.parametrize("unclear", [{"num": 20}, {"noise": 20.0}], ids=["few steps", "a busy machine"])
def test_computing_is_not_claimed_where_the_times_do_not_tell(unclear):
    evidence = of_run(passes(fixed=0.8, **unclear))
    assert diagnose(evidence) == ()
    assert "launch_bound" in sum(unjudged(evidence).values(), ())
    assert limits.state(evidence).endswith("how much of it is computing and how much starting kernels is not known")


# --- the command ---


def test_the_command_needs_no_torch(tmp_path):
    steps = [{**step, "lr": 1e-12, "effective_lr": None} for step in fake_run().steps]
    folder = write_run(tmp_path / "frozen", fake_run(steps=steps))
    code = "import sys; sys.modules['torch'] = None; from fivetune.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "diagnose", str(folder)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1. updates_below_precision" in done.stdout


def test_the_command_says_what_to_change(tmp_path, capsys):
    run = gpu_run(phases={"data": 1.0})
    folder = write_run(tmp_path / "slow", run)
    assert main(["diagnose", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "1. input_bound" in said
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
