"""The step clock: phases add up to the step, events are read late and used again, a bad step never moves a weight."""

from __future__ import annotations

import math
import threading
import time
from collections import deque

import kit
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fivetune import rundir
from fivetune.data.store.batch import collate
from fivetune.errors import NumericError
from fivetune.machine.telemetry.accelerators import find_peak_flops
from fivetune.machine.telemetry.devices import measure_product_flops
from fivetune.machine.telemetry.meter import WARM_UP_STEPS, EventClock, HostClock, Meter
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.model.flops import count_train_flops
from fivetune.model.module_flops import ModelFlops
from fivetune.rundir import RunDir
from fivetune.rundir.progress import Progress
from fivetune.training import loop, save
from fivetune.training.run import train
from fivetune.training.signals import StopRequest
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.step.update import train_step
from fivetune.training.training import Training
from fivetune.types import PHASES


class Device:
    """A device that is told what to do and does it when `run` says so; its clock stands still meanwhile.

    Args:
        tick: milliseconds that an event takes.
    """

    def __init__(self, *, tick: float = 0.0) -> None:
        self.tick = tick
        self.milliseconds, self.queue, self.num_events, self.num_waits = 0.0, deque(), 0, 0

    def work(self, milliseconds: float) -> None:
        self.queue.append(milliseconds)

    def run(self) -> None:
        while self.queue:
            task = self.queue.popleft()
            if isinstance(task, Event):
                task.at = self.milliseconds
                self.milliseconds += self.tick
            else:
                self.milliseconds += task

    def event(self) -> Event:
        self.num_events += 1
        return Event(self)


class Event:
    """What torch.cuda.Event does, on a Device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at: float | None = None

    def record(self) -> None:
        self.at = None
        self.device.queue.append(self)

    def query(self) -> bool:
        return self.at is not None

    def synchronize(self) -> None:
        if not self.query():
            self.device.num_waits += 1
            self.device.run()

    def elapsed_time(self, other: Event) -> float:
        assert self.at is not None and other.at is not None
        return other.at - self.at


def _step(meter: Meter, device: Device, *milliseconds: float):
    meter.begin()
    for phase, duration in zip(("forward", "backward", "optimizer"), milliseconds, strict=True):
        meter.enter(phase)
        device.work(duration)
    return meter.end()


def test_events_tell_the_time_of_the_device_once_it_is_done():
    device = Device()
    meter = Meter(EventClock(device.event))
    first, second = _step(meter, device, 2, 4, 1), _step(meter, device, 3, 5, 1)
    assert not first.is_done() and not second.is_done()
    device.run()
    assert first.is_done() and first.read() == (
        0.007,
        {"data": 0.0, "forward": 0.002, "backward": 0.004, "optimizer": 0.001},
    )
    seconds, phases = second.read()
    assert seconds == pytest.approx(0.009) == sum(phases.values()) and phases["host"] == 0
    assert device.num_waits == 0


def test_events_are_used_again():
    device = Device()
    meter = Meter(EventClock(device.event))
    for _ in range(20):
        times = _step(meter, device, 1, 1, 1)
        device.run()
        times.read()
        meter.pause()
    assert device.num_events == 6  # begin, three phases, end, and the beginning of what comes


def test_reading_early_waits():
    device = Device()
    times = _step(Meter(EventClock(device.event)), device, 1, 1, 1)
    assert times.read()[0] == pytest.approx(0.003) and device.num_waits == 1


def test_what_the_host_does_between_steps_is_measured_and_what_stands_between_them_is_not(monkeypatch):
    ticks = iter([0, 1, 1, 3, 4, 4, 50, 51, 51])
    monkeypatch.setattr(HostClock, "stamp", lambda self: float(next(ticks)))
    meter, seen = Meter(HostClock()), []
    for between in (lambda: None, meter.pause, lambda: None):
        meter.begin()
        seen.append(meter.end().read())
        between()
    assert seen == [(1.0, {"data": 1.0}), (3.0, {"data": 1.0, "host": 2.0}), (1.0, {"data": 1.0})]


def test_a_device_whose_work_the_clock_does_not_see_has_no_phases():
    meter = Meter.from_device("mps")
    meter.begin()
    seconds, phases = meter.end().read()
    assert seconds > 0 and phases == {}


def test_a_change_of_the_batch_size_warms_up_again_from_its_own_step_on():
    meter, seen = Meter(HostClock()), []
    for step in range(1, 9):
        meter.begin()
        if step == 5:
            meter.reset_warm_up()
        seen.append(meter.end().warm_up)
    assert seen == [True] * 3 + [False] + [True] * 3 + [False]


# --- records ---


def test_steps_say_what_their_seconds_went_into(tmp_path, model_folder):
    steps = train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True).steps
    for step in steps:
        assert set(step.phase_seconds) == {"data", "host", "forward", "backward", "optimizer"}
        assert list(step.phase_seconds) == [phase for phase in PHASES if phase in step.phase_seconds]
        assert sum(step.phase_seconds.values()) == pytest.approx(step.step_seconds, rel=1e-9)
        assert step.phase_seconds["data"] >= step.data_seconds > 0
        assert (step.mfu, type(step.starved)) == (None, bool)
        assert step.encoder_flops > step.decoder_flops > 0
    assert [step.warm_up for step in steps] == [True] * WARM_UP_STEPS + [False] * (6 - WARM_UP_STEPS)


def test_steps_add_up_to_the_time_of_training(tmp_path, model_folder):
    run = train(kit.recipe(tmp_path, model_folder, data__eval=[]), preflight=False, quiet=True)
    whole = run.status.seconds_by_phase["train"]
    assert 0.5 * whole < sum(step.step_seconds for step in run.steps) <= whole


def test_a_slow_tracker_shows_as_work_of_the_host(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr(Progress, "show_step", lambda self, record, num_steps: time.sleep(0.05))
    recipe = kit.recipe(tmp_path, model_folder, data__eval=[], checkpoint__every_steps=100)
    steps = train(recipe, preflight=False, quiet=True).steps
    assert all(step.phase_seconds["host"] > 0.05 for step in steps[1:])


def test_a_resumed_run_warms_up_again(tmp_path, model_folder):
    recipe = kit.recipe(tmp_path, model_folder, data__eval=[], train__num_steps=5)
    train(recipe, preflight=False, quiet=True)
    steps = train(recipe, {"train.num_steps": 9}, resume=True, quiet=True).steps
    assert [step.warm_up for step in steps] == [True] * 3 + [False] * 2 + [True] * 3 + [False]


def test_share_of_the_peak(tmp_path, model_folder, monkeypatch):
    monkeypatch.setattr("fivetune.training.run.get_device_peak_flops", lambda device, precision: 1e12)
    for step in train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True).steps:
        done = step.encoder_flops + step.decoder_flops
        assert step.mfu == pytest.approx(done / step.step_seconds / 1e12)


def test_the_measured_product_stands_beside_the_peak(tmp_path, model_folder, monkeypatch):
    """It is measured on a GPU alone, and not where memory is short."""
    assert train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True).machine.product_flops is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 80 * 2**30))
    assert measure_product_flops("cuda", "bf16") is None


def test_measuring_a_product_draws_no_number_of_the_run(monkeypatch):
    """A resumed run restores its generators first: its dropout masks must be those of a run without a pause."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out: out)
    before = torch.get_rng_state()
    assert measure_product_flops("cpu", "bf16")
    assert torch.equal(torch.get_rng_state(), before)


def test_operations_of_a_step_are_those_of_its_examples(tmp_path, model_folder):
    setup = kit.ready(tmp_path, model_folder)
    lengths = setup.data.stream.get_lengths(0)
    config = setup.learner.model.config
    assert ModelFlops(setup.learner.model).count(*lengths) == count_train_flops(config, *lengths)
    # A head that points: the decoder runs over the inputs, and has two outputs in place of the vocabulary.
    setup.learner.model.qa_outputs = torch.nn.Linear(config.d_model, 2)
    whole, found = count_train_flops(config, lengths[0], lengths[0]), ModelFlops(setup.learner.model).count(*lengths)
    head = 6 * config.d_model * (config.vocab_size - 2) * sum(lengths[0])
    assert (found.encoder, found.decoder) == (whole.encoder, whole.decoder - head)


def test_telemetry_goes_on_where_a_run_is_resumed(tmp_path, model_folder):
    recipe = kit.recipe(tmp_path, model_folder, telemetry={"every_seconds": 0.02})
    train(recipe, preflight=False, quiet=True)
    before = rundir.read_run(tmp_path / "run").telemetry
    run = train(recipe, {"train.num_steps": 9}, resume=True, quiet=True)
    assert {line.phase for line in run.telemetry} == {"prepare", "train", "evaluate", "checkpoint"}
    assert run.telemetry[: len(before)] == before and run.telemetry[len(before)].phase == "prepare"
    assert run.telemetry[-1].step == 9
    assert not [thread for thread in threading.enumerate() if thread.name == "telemetry"]


def test_telemetry_may_be_off(tmp_path, model_folder):
    assert train(kit.recipe(tmp_path, model_folder, telemetry={"every_seconds": 0}), quiet=True).telemetry == []
    assert not (tmp_path / "run" / "telemetry.jsonl").exists()


# --- a device that is not waited for ---


class Reads(TorchDispatchMode):
    """Counts how often a value of a tensor is asked for: what makes a host wait for a GPU."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def begin(tmp_path, model_folder):
    """Makes a run whose steps count as done when a device has run, as on a GPU."""
    runs = [RunDir.create(tmp_path / "run")]

    def make(device: Device, **overrides):
        setup = kit.ready(tmp_path, model_folder, data__eval=[], checkpoint__every_steps=100, **overrides)
        meter = Meter(EventClock(device.event))
        training = Training(
            setup,
            setup.plan,
            runs[0],
            Progress(quiet=True),
            TrainingState(),
            StopRequest(),
            meter,
            Sampler(print, every_seconds=0),
            nonfinite_flag=torch.zeros(()),
        )
        return training, setup.data.stream.iter_micro_batches(0, setup.plan.num_steps)

    yield make
    runs[0].close()


def _written(folder) -> list[int]:
    return [line["step"] for line in rundir.read_jsonl(folder / "run" / "steps.jsonl")]


def test_steps_are_written_once_in_order_and_without_a_read_between_log_lines(tmp_path, begin):
    device = Device(tick=1.0)
    training, groups = begin(device, train__log_every_steps=4, train__num_steps=99, model__dropout=0.0)
    seen = []
    with Reads() as reads:
        for step in range(1, 9):
            before = reads.num
            loop.run_step(training, groups)
            seen.append(len(_written(tmp_path)))
            assert (reads.num > before) == (step % 4 == 0)
    assert seen == [0, 0, 0, 4, 4, 4, 4, 8] and device.num_waits == 2
    assert _written(tmp_path) == list(range(1, 9))


def test_what_is_done_is_written_without_waiting(tmp_path, begin):
    device = Device(tick=1.0)
    training, groups = begin(device, train__log_every_steps=50, train__num_steps=99)
    loop.run_step(training, groups)
    device.run()
    loop.run_step(training, groups)
    assert _written(tmp_path) == [1] and len(training.pending_steps) == 1 and device.num_waits == 0
    save.save_checkpoint(training)  # a checkpoint knows all steps before it
    assert _written(tmp_path) == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_from_the_first_bad_step_on_no_weight_moves(tmp_path, begin, bad):
    """The host learns of it two steps later, and nothing is saved."""
    training, groups = begin(Device(tick=1.0), train__log_every_steps=4, optimizer__weight_decay=0.1)
    model = training.setup.learner.model
    loop.run_step(training, groups)
    before = [p.detach().clone() for p in model.parameters()]
    hook = model.shared.weight.register_hook(lambda gradient: gradient + bad)
    loop.run_step(training, groups)
    hook.remove()
    loop.run_step(training, groups)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with pytest.raises(NumericError, match=rf"^step 2: gradient norm {bad}, first in the backward pass; examples q"):
        save.save_checkpoint(training)
    assert _written(tmp_path) == [1]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_step_that_is_not_waited_for_is_the_same_step(tmp_path, model_folder):
    ours, theirs = (kit.ready(tmp_path, model_folder, model__dropout=0.0) for _ in range(2))
    group = [collate(ours.data.stream.store, [0, 1]), collate(ours.data.stream.store, [2, 3])]
    for step in (1, 2):
        waited = train_step(ours.learner, group, lr=1e-3, step=step)
        other = train_step(theirs.learner, group, lr=1e-3, step=step, nonfinite_flag=torch.zeros(()))
        assert torch.equal(waited.values, other.values)
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.learner.model.parameters(), theirs.learner.model.parameters(), strict=True)
    )


def test_a_cpu_looks_at_each_step(tmp_path, model_folder):
    assert make_nonfinite_flag(kit.ready(tmp_path, model_folder).learner) is None


# --- peaks ---


@pytest.mark.parametrize(
    ("name", "precision", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA GH200 144G HBM3e", "bf16", 989.4),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", 70),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("Tesla T4", "fp16", 65),
        ("Tesla P100-PCIE-16GB", "fp16", 18.7),
        ("NVIDIA GeForce RTX 2080 Ti", "bf16", None),
        ("NVIDIA GeForce RTX 5090", "bf16", 209.5),
        ("Tesla T4", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-PCIE-32GB", "fp32", 14.0),
        ("NVIDIA GeForce RTX 3090", "bf16", 71),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Quadro RTX 8000", "fp16", 130.5),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA L400", "bf16", None),
        ("AMD Instinct MI300X", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_peaks_are_dense_and_of_exactly_that_device(name, precision, teraflops):
    expected = None if teraflops is None else pytest.approx(teraflops * 1e12)
    assert find_peak_flops(name, precision) == expected
