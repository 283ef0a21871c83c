"""A made-up comparison: variants of `fake_run` with two seeds each, telemetry of two devices, and a failed run."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from fake_run import HOSTILE, fake_run

from fivetune.reading.compare import compare
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.rundir.parse import parse_records
from fivetune.rundir.records import EvalRecord, Prediction, Run, StepRecord, TelemetryRecord
from fivetune.types import Verdict

PHASES = {"data": 0.01, "host": 0.02, "copy": 0.003, "forward": 0.11, "backward": 0.2, "optimizer": 0.03}
START = 1.79e9


def telemetry(
    *, num: int = 160, num_devices: int = 2, rank: int = 0, seed: int = 0, start: float = START
) -> list[dict[str, Any]]:
    """`num` records a second apart: 10 s of preparing, then evaluations every 50 s; the last device stands idle."""
    rng, records = random.Random(seed), []
    for second in range(num):
        phase = "prepare" if second < 10 else "evaluate" if second % 50 < 8 else "train"
        busy = {"prepare": 0.0, "train": 0.93, "evaluate": 0.6}[phase]
        records.append(
            {
                "seconds": start + second,
                "host": "alpha",
                "rank": rank,
                "phase": phase,
                "step": 2 * second,
                "core_utilisation": [0.1 + 0.8 * rng.random() for _ in range(4)],
                "process_cores": 1.5 + 0.4 * rng.random(),
                "ram_used_bytes": 6 * 2**30 + second * 2**20,
                "ram_total_bytes": 16 * 2**30,
                "process_ram_bytes": 3 * 2**30,
                "swap_used_bytes": None,
                "disk_read_bytes_per_second": None if second == 0 else 2e6 * rng.random(),
                "disk_written_bytes_per_second": None if second == 0 else 1e6,
                "network_sent_bytes_per_second": None,
                "network_received_bytes_per_second": None,
                "devices": [_device(i, busy if i == 0 else 0.0, second, rng) for i in range(num_devices)],
            }
        )
    return records


def _device(index: int, busy: float, second: int, rng: random.Random) -> dict[str, Any]:
    return {
        "index": index,
        "name": "NVIDIA Example",
        "utilisation": None if second % 60 == 33 else busy * rng.uniform(0.95, 1.05),
        "memory_busy": 0.6 * busy,
        "memory_used_bytes": 5 * 2**30 if busy else 2**29,
        "memory_total_bytes": 24 * 2**30,
        "temperature_celsius": 30 + 40 * busy * (1 - math.exp(-second / 40)),
        "power_watts": 40 + 240 * busy,
        "power_limit_watts": 300.0,
        "sm_clock_mhz": None,
        "energy_joules": None,
        "ours": index == 0,
    }


def measured(seconds: float, warm_up: int = 3) -> list[StepRecord]:
    """The steps of `fake_run`, each taking `seconds` times what PHASES say; the first are warm-up."""
    return [
        replace(
            record,
            phase_seconds={name: seconds * value for name, value in PHASES.items()},
            step_seconds=seconds * 0.4,
            warm_up=record.step <= warm_up,
        )
        for record in fake_run().steps
    ]


def loaded_run(*, name: str = "quickstart", seconds: float = 1.0, num_devices: int = 2, **changes: Any) -> Run:
    """`fake_run` with telemetry and measured steps."""
    fields: dict[str, Any] = {"steps": measured(seconds), "telemetry": telemetry(num_devices=num_devices)} | changes
    return fake_run(name=name, **fields)


def comparison(num_variants: int = 4, num_seeds: int = 2) -> Comparison:
    """Learning rate and number of processes varied; the last variant's second run failed, its torch is another one."""
    variants = [_variant(i, num_seeds, last=i == num_variants - 1) for i in range(num_variants)]
    found = compare(variants, title="Learning rate and processes", metric="f1", varied=("optimizer.lr", "launch.nproc"))
    idle = Verdict(
        "idle_device",
        "GPU 1 was asked for but stood idle.",
        0.0,
        0.05,
        0.98,
        "Start a process per device.",
        {"launch.nproc": 2},
        1.9,
    )
    marked = [replace(one, verdicts=(idle,) if i == 1 else ()) for i, one in enumerate(found.variants)]
    return replace(found, variants=tuple(marked))


def settings(place: int) -> dict[str, Any]:
    return {"optimizer.lr": (1e-3, 3e-3)[place % 2], "launch.nproc": 1 + place // 2 % 2}


def _variant(place: int, num_seeds: int, *, last: bool) -> Variant:
    found, speed = settings(place), 1.0 + 0.2 * place
    runs = tuple(_run(place, seed, speed) for seed in range(num_seeds - last))
    name = ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in found.items())
    failures = ("seed 1: the process was killed (signal 9), out of memory.",) if last else ()
    return Variant(name if place < 4 else f"{name} #{place}", found, runs, {}, failures=failures)


def _run(place: int, seed: int, speed: float) -> Run:
    run = loaded_run(name=f"v{place}-seed{seed}", seconds=1 / speed, seed=seed, num_devices=1 + place % 2)
    found = settings(place)
    config = {
        **run.config,
        "optimizer": {**run.config["optimizer"], "lr": found["optimizer.lr"]},
        "launch": {"nproc": found["launch.nproc"]},
        "run": {**run.config["run"], "seed": seed},
    }
    steps = [replace(record, world_size=found["launch.nproc"]) for record in run.steps]
    evals = [
        replace(
            record,
            loss=record.loss * (1 + 0.1 * place),
            scores={**record.scores, "f1": _moved(record, place + seed)},
        )
        for record in run.evals
    ]
    phases = {key: value / speed for key, value in run.status.seconds_by_phase.items()}
    status = replace(run.status, seconds=161.4 / speed, seconds_by_phase=phases)
    versions = {**run.machine.versions, **({"torch": HOSTILE} if place == 3 else {})}
    lines = [_flipped(line) if i % 23 == place else line for i, line in enumerate(run.predictions["eval-250"])]
    return replace(
        run,
        config=config,
        steps=steps,
        evals=evals,
        status=status,
        machine=replace(run.machine, versions=versions),
        predictions={"eval-250": lines},
    )


def _flipped(line: Prediction) -> Prediction:
    right = line.scores["exact"] == 1
    answer = (line.references or ("",))[0]
    scores = dict.fromkeys(line.scores, float(not right))
    return replace(line, prediction=HOSTILE if right else answer, scores=scores)


def _moved(record: EvalRecord, place: int) -> float:
    return max(0.0, record.scores["f1"] + 0.8 * place - 3)


def large(num_runs: int = 20, num_steps: int = 10_000, num_samples: int = 4000) -> Comparison:
    """As many runs of as many steps, each with an evaluation every 100 steps and a sample a second."""
    rng, base = random.Random(1), comparison(num_runs, 2)
    short = base.variants[0].runs[0].steps
    steps = [replace(short[i % len(short)], step=i, loss=1 + rng.random()) for i in range(1, num_steps + 1)]
    samples = parse_records(TelemetryRecord, telemetry(num=num_samples))
    evals = [replace(base.variants[0].runs[0].evals[-1], step=step) for step in range(0, num_steps + 1, 100)]
    variants = [
        replace(one, runs=(replace(one.runs[0], steps=steps, telemetry=samples, evals=evals),)) for one in base.variants
    ]
    return replace(base, variants=tuple(variants))
