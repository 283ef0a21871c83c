"""What recording costs: training steps with everything written down against the same steps with nothing.

"recorded" is the step of a run: phases measured, records and operations counted, steps.jsonl and log.txt written, the
sampler beside it. "bare" calls the optimizer step alone. Windows of both are interleaved A B B A. Two figures besides
say what noise hides: the time of recording alone, and what the sampler takes of a core while nothing else runs.
    python -m benchmarks.telemetry --model t5-nano
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.harness import (
    Window,
    Work,
    facts,
    interleaved,
    make_parser,
    num_units_in,
    publish_result,
    ratio,
    same_totals,
    table,
    timed_window,
)
from benchmarks.plan import Plan
from benchmarks.sides import own_setup
from benchmarks.workloads import MODELS, WORKLOADS, Examples, make_model, write_examples
from fivetune.data.corpus import CHECKPOINT
from fivetune.machine.telemetry.cores import count_cores
from fivetune.machine.telemetry.meter import Meter
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.rundir import RunDir
from fivetune.rundir.progress import Progress
from fivetune.training import loop
from fivetune.training.checks import loss_warnings
from fivetune.training.loop import run_step
from fivetune.training.signals import StopRequest
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.step.learner import Update
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.step.update import train_step
from fivetune.training.training import Training
from fivetune.types import PhaseTimer, ignore_phase

BAR = 0.015  # of a step's time that recording may take
EVERY_SECONDS = 1.0  # between two looks of the sampler, as in a run
NUM_WINDOWS, WARM_UP, NUM_EXAMPLES = 12, 3, 2000
MAX_STEPS = 120_000  # of NUM_WINDOWS windows
NUM_ALONE, SECONDS_ALONE = 1000, 5.0


class Bare:
    """The optimizer steps of a set-up, nothing recorded."""

    name = "bare"

    def __init__(self, plan: Plan) -> None:
        self.setup = own_setup(plan)
        self.step = 0
        self.halted = make_nonfinite_flag(self.setup.learner)
        self.groups = self.setup.data.stream.iter_micro_batches(0, self.setup.plan.num_steps)

    def work(self, num_units: int) -> Work:
        for _ in range(num_units):
            lr = self.setup.compute_lr(self.step)
            self.step += 1
            train_step(self.setup.learner, next(self.groups), lr=lr, step=self.step, nonfinite_flag=self.halted)
        return Work(num_units, {"examples": self.setup.data.stream.count_examples_before(self.step)})


class Recorded:
    """The steps of a run, with its sampler."""

    name = "recorded"

    def __init__(self, plan: Plan) -> None:
        setup = own_setup(plan)
        run = RunDir.create(plan.folder / "run")
        progress = Progress(run.path / "log.txt", quiet=True)
        meter = Meter.from_device(setup.learner.compute.device)
        self.training = Training(
            setup,
            setup.plan,
            run,
            progress,
            TrainingState(),
            StopRequest(),
            meter,
            self._sampler(run),
            nonfinite_flag=make_nonfinite_flag(setup.learner),
        )
        self.groups = setup.data.stream.iter_micro_batches(0, setup.plan.num_steps)

    def _sampler(self, run: RunDir) -> Sampler:
        return Sampler(run.path / "telemetry.jsonl", every_seconds=EVERY_SECONDS)

    def work(self, num_units: int) -> Work:
        training = self.training
        training.meter.pause()
        training.sampler = self._sampler(training.run)
        with training.sampler:
            for _ in range(num_units):
                run_step(training, self.groups)
        return Work(num_units, {"examples": training.setup.data.stream.count_examples_before(training.state.step)})

    def recording_seconds(self) -> float:
        """Seconds that a step takes when there is nothing to compute: its marks, its record, its lines."""
        training, device = self.training, self.training.setup.learner.compute.device
        group, update = training.setup.data.stream.build_micro_batches(0), Update(torch.tensor([1.0, 1.0, 1000.0]), 8)

        def nothing(*_: Any, timer: PhaseTimer = ignore_phase, **__: Any) -> Update:
            for phase in ("host", "forward", "backward", "optimizer", "host"):
                timer(phase)
            return update

        with patch.object(loop, "train_step", nothing), patch.object(loss_warnings, "FROZEN_STEPS", 0):
            training.meter.pause()
            window = timed_window(_Steps(training, group), NUM_ALONE, device=device)
        return window.seconds / NUM_ALONE


class _Steps:
    """Steps of one group over and over."""

    name = "recording"

    def __init__(self, training: Training, group: Any) -> None:
        self.training, self.groups = training, repeat(group)

    def work(self, num_units: int) -> Work:
        for _ in range(num_units):
            run_step(self.training, self.groups)
        return Work(num_units)


def sampler_cores(folder: Path) -> float:
    """Cores that a sampler keeps busy in a process that does nothing else, its start left out."""
    with Sampler(folder / "telemetry.jsonl", every_seconds=EVERY_SECONDS):
        time.sleep(EVERY_SECONDS * 1.5)
        before = time.process_time()
        time.sleep(SECONDS_ALONE)
        return (time.process_time() - before) / SECONDS_ALONE


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="t5-nano", choices=["t5-nano", *MODELS], help="t5-nano is the quickstart's")
    parser.add_argument("--workload", default="squad", choices=list(WORKLOADS))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="CPU threads; default: physical cores")
    parser.add_argument("--minutes", type=float, default=2.0, help="for all windows together")
    args = parser.parse_args()
    torch.set_num_threads(args.threads or count_cores())
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    report(result)
    publish_result(args, f"telemetry-{args.device}", result)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The interleaved windows of both sides, and recording and sampler alone."""
    model = CHECKPOINT if args.model == "t5-nano" else make_model(args.model, folder)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    write_examples(folder, args.workload, NUM_EXAMPLES, vocab_size=vocab_size)
    sides: list[Any] = []
    for kind in (Bare, Recorded):
        own = folder / kind.name
        own.mkdir()
        sides.append(
            kind(Plan(model, Examples(folder), args.workload, args.batch_size, args.device, own, max_steps=MAX_STEPS))
        )
    warm = [timed_window(side, WARM_UP, device=args.device).seconds / WARM_UP for _ in range(2) for side in sides][-2:]
    num_units = num_units_in(60 * args.minutes, warm, NUM_WINDOWS, most=10_000)
    print(f"{NUM_WINDOWS} windows of {num_units} steps each", flush=True)
    windows = interleaved(sides, num_units, NUM_WINDOWS, device=args.device)
    same_totals(windows, "examples")
    bare, recorded = windows["bare"], windows["recorded"]
    alone = sides[1].recording_seconds()
    sides[1].training.run.close()
    per_step = {name: _seconds_per_step(each) for name, each in windows.items()}
    return {
        "model": args.model,
        "workload": args.workload,
        "batch_size": args.batch_size,
        "device": args.device,
        "steps_per_window": num_units,
        "num_windows": NUM_WINDOWS,
        "seconds_per_step": per_step,
        "overhead": [share - 1 for share in ratio(bare, recorded, "units").as_list()],
        "recording_seconds_per_step": alone,
        "recording_share": alone / per_step["bare"],
        "sampler_cores": sampler_cores(folder),
        "bar": BAR,
        "machine": facts(args.device),
        "windows": {name: [window.seconds for window in each] for name, each in windows.items()},
    }


def _seconds_per_step(windows: list[Window]) -> float:
    return sum(w.seconds for w in windows) / sum(w.work.num_units for w in windows)


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    times, alone = result["seconds_per_step"], result["recording_seconds_per_step"]
    middle, least, most = result["overhead"]
    rows = [
        ["side", "ms a step", "more than bare", "(least to most of neighbouring windows)"],
        ["bare", f"{1000 * times['bare']:.2f}", "", ""],
        ["recorded", f"{1000 * times['recorded']:.2f}", f"{middle:.2%}", f"{least:.2%} to {most:.2%}"],
        ["recording alone", f"{1000 * alone:.3f}", f"{result['recording_share']:.2%}", ""],
    ]
    print(
        f"\n{result['model']}, {result['workload']}, batch {result['batch_size']}, {result['device']}, "
        f"{result['machine']['num_threads']} threads\n\n{table(rows)}\n"
    )
    kept = "kept" if middle < result["bar"] else "NOT kept"
    print(f"The sampler alone: {result['sampler_cores']:.2%} of a core. Bar of {result['bar']:.1%}: {kept}.")


if __name__ == "__main__":
    main()
