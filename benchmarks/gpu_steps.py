"""Stages of `benchmarks.gpu_day` about training steps: CUDA graphs against launched kernels, failures, waits, profiles.

On a CPU `act_as_cuda` makes a graph of a function that is called again, so that all but the capture itself runs.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.gpu_checks import Findings, Steps, measure_seconds, prepare_plan, set_up_graphs
from benchmarks.plan import Plan
from benchmarks.sides import own_setup
from fivetune.errors import FiveTuneEnvironmentError, NumericError
from fivetune.machine.profiling.kernels import classify_kernel
from fivetune.model.flat import compute_device_losses
from fivetune.training.setup import Setup
from fivetune.training.step.nonfinite import refuse_nonfinite
from fivetune.training.step.update import train_step

NUM_DRAWS = 60
SPARE_BYTES = 3 * 2**30

# --- graphs ---


CLOSENESS = {"fp32": (1e-4, 0.02), "bf16": (1e-2, 0.3)}
"""Of replayed and launched steps: largest relative difference of losses, largest distance of weights as a share of
their way. Stand-ins for graphs on a CPU, 60 steps: 1e-5 and 0.002 in fp32, 2e-4 and 0.025 in bf16 after 16."""


def check_capture(findings: Findings, device: str, *, precision: str) -> None:
    """Replayed steps without dropout against launched ones, accumulated gradients, and a step that is not finite."""
    with prepare_plan(device) as plan:
        num_steps = len(plan.examples) // plan.batch_size
        with Steps(own_setup(plan, dropout=0.0, capture="off", precision=precision)) as launched:
            before = _list_weights(launched.setup)
            losses = [update.loss for update in launched.finish(num_steps)]
            reached = _list_weights(launched.setup)
        with Steps(own_setup(plan, dropout=0.0, capture="on", precision=precision)) as replayed:
            ours = [update.loss for update in replayed.finish(num_steps)]
            of_losses, of_weights = CLOSENESS[precision]
            difference = max(abs(a / b - 1) for a, b in zip(ours, losses, strict=True))
            findings.check("losses", difference, of_losses)
            away, way = _measure_distance(_list_weights(replayed.setup), reached), _measure_distance(before, reached)
            findings.check("weights, as a share of their way", away / way, of_weights)
            findings.note("replayed_and_launched", replayed.count_calls())
            findings.require("all steps are replayed", replayed.count_calls() == (num_steps, 0))
            _check_not_finite(findings, replayed)
        if device == "cuda":
            _check_accumulation(findings, plan, precision)
            findings.note("peak_bytes", torch.cuda.max_memory_allocated())


def check_randomness(findings: Findings, device: str) -> None:
    """Two replays of one batch draw different masks, the same random state the same; the mean is that of launches."""
    num_draws = NUM_DRAWS if device == "cuda" else 0
    with prepare_plan(device) as plan:
        with Steps(set_up_graphs(plan)) as replayed:
            draw = _prepare_draw(replayed)
            state = torch.cuda.get_rng_state() if plan.on_gpu else torch.get_rng_state()
            first, second = draw(), draw()
            (torch.cuda.set_rng_state if plan.on_gpu else torch.set_rng_state)(state)
            findings.require("two replays draw different masks", first != second)
            findings.check("a random state that is put back repeats its masks", abs(draw() / first - 1), 1e-5)
            ours = [draw() for _ in range(num_draws)]
        if num_draws:
            with Steps(own_setup(plan, capture="off")) as launched:
                draw = _prepare_draw(launched)
                theirs = [draw() for _ in range(num_draws)]
            error = math.sqrt(sum((x - mean(each)) ** 2 for each in (ours, theirs) for x in each)) / num_draws
            findings.check("mean loss with dropout, in standard errors", abs(mean(ours) - mean(theirs)) / error, 3.5)


def _prepare_draw(steps: Steps) -> Callable[[], float]:
    """A call that returns the loss of the first batch; the weights stay."""
    group, learner = next(steps.groups), steps.setup.learner
    return lambda: train_step(learner, group, lr=0.0, step=1).loss


def _list_weights(setup: Setup) -> list[Tensor]:
    return [parameter.detach().to("cpu", torch.float64, copy=True) for parameter in setup.learner.model.parameters()]


def _measure_distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return math.hypot(*[(a - b).norm().item() for a, b in zip(ours, theirs, strict=True)])


def _check_not_finite(findings: Findings, steps: Steps) -> None:
    """A weight that is not a number: the host refuses the step, which changes no weight."""
    with torch.no_grad():
        steps.setup.learner.model.shared.weight[:, 0] = torch.nan
    before, refused = _list_weights(steps.setup), False
    try:
        (update,) = steps.finish()
        refuse_nonfinite(steps.setup.learner, next(steps.groups), steps.taken, update.loss, update.grad_norm)
    except NumericError:
        refused = True
    findings.require("a loss that is not finite is refused", refused)
    pairs = zip(before, _list_weights(steps.setup), strict=True)
    findings.require("it changes no weight", all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs))


def _check_accumulation(findings: Findings, plan: Plan, precision: str) -> None:
    """A step of four micro-batches is that of one batch."""
    norms = []
    for size in (plan.batch_size, plan.batch_size // 4):
        setup = set_up_graphs(
            plan, dropout=0.0, batch_size=size, global_batch_size=plan.batch_size, precision=precision
        )
        with Steps(setup) as steps:
            norms += [update.grad_norm for update in steps.finish()]
    findings.check("gradient norm of four micro-batches", abs(norms[1] / norms[0] - 1), 2e-2)


LARGE_SUMS = 2.0**15  # times the sums at the end of each branch, which pass fp16's 65,504 by it


def check_fp16(findings: Findings, device: str) -> None:
    """Losses and skipped steps in fp16, as on GPUs without bf16 (T4, V100), beside fp32: of a random model, and of one
    with sums beyond the range of fp16."""
    for name, factor in (("losses", 1.0), ("losses of large sums", LARGE_SUMS)):
        with prepare_plan(device, num_steps=30) as plan:
            num_steps = len(plan.examples) // plan.batch_size
            losses = {}
            for precision in ("fp32", "fp16"):
                with Steps(own_setup(plan, dropout=0.0, capture="off", precision=precision)) as steps:
                    _multiply_sums(steps.setup, factor)
                    updates = steps.finish(num_steps)
                    losses[precision] = [update.loss for update in updates]
                    skipped = sum(not math.isfinite(update.grad_norm) for update in updates)
                    findings.note(f"{name}, {precision}, forward", str(steps.setup.learner.forward))
            findings.note(f"{name}, skipped steps", skipped)
            pairs = zip(losses["fp16"], losses["fp32"], strict=True)
            findings.check(f"{name}, relative to fp32", max(abs(a / b - 1) for a, b in pairs), 2e-2)


@torch.no_grad()
def _multiply_sums(setup: Setup, factor: float) -> None:
    for name, weight in setup.learner.model.named_parameters():
        if name.endswith((".o.weight", ".wo.weight")):
            weight.mul_(factor)


# --- failures ---


def check_out_of_memory(findings: Findings, device: str) -> None:
    """With little memory left, a launched step is halved until it fits."""
    if device == "cpu":
        findings.note("left_out", "memory of a GPU is filled up")
        return
    with prepare_plan(device, num_steps=16) as plan:
        big = replace(plan, batch_size=len(plan.examples))
        with Steps(own_setup(big, capture="off")) as steps:
            torch.cuda.empty_cache()
            ballast = torch.empty(torch.cuda.mem_get_info()[0] - SPARE_BYTES, dtype=torch.uint8, device=device)
            (update,) = steps.finish()
            del ballast
        findings.note("batch_size", update.batch_size)
        findings.require("the batch is smaller", update.batch_size < big.batch_size)
        findings.require("its loss is a number", math.isfinite(update.loss))


@contextmanager
def plant_read() -> Iterator[None]:
    """A read of the device in the static forward, which no capture allows; without CUDA its error alone."""

    def read(*args: Any, **named: Any) -> Tensor:
        losses = compute_device_losses(*args, **named)
        if not losses.is_cuda:
            raise RuntimeError("operation not permitted when stream is capturing")
        if torch.cuda.is_current_stream_capturing():
            losses.sum().item()
        return losses

    with patch("fivetune.model.cuda.static_step.compute_device_losses", read):
        yield


TRIAL = """
import sys
from benchmarks import gpu_steps
from fivetune.training.autotune.capture_trial import main
with gpu_steps.plant_read():
    sys.exit(main())
"""


def check_failed_capture(findings: Findings, device: str) -> None:
    """A capture that fails in the trial's process leaves the run launched; in the run's own, likewise or with advice.

    The second failure may end what this process can do on the device, so it is the last.
    """
    with prepare_plan(device) as plan:
        if device == "cuda":
            with patch("fivetune.training.autotune.capture_trial.COMMAND", (sys.executable, "-c", TRIAL)):
                _check_launched(findings, plan, "after a failed trial")
        with plant_read(), patch("fivetune.training.autotune.graphs._try_elsewhere", lambda setup: ""):
            try:
                _check_launched(findings, plan, "after a failed capture")
            except FiveTuneEnvironmentError as error:
                findings.note("refused", str(error))
                findings.require("the error says what helps", "--train.capture off" in str(error))


def _check_launched(findings: Findings, plan: Plan, name: str) -> None:
    with Steps(own_setup(plan, capture="auto")) as steps:
        findings.require(f"{name}, steps are launched", not steps.setup.learner.engine.num_graphs)
        findings.require(f"{name}, they go on", all(math.isfinite(update.loss) for update in steps.finish(2)))


# --- waits, kernels ---


def check_syncs(findings: Findings, device: str) -> None:
    """No step waits for the device; how many kernels a step runs, and how long it takes."""
    with prepare_plan(device, num_steps=80) as plan:
        for capture in ("off", "on"):
            with Steps(set_up_graphs(plan) if capture == "on" else own_setup(plan, capture="off")) as steps:
                steps.finish(2)
                if device == "cpu":
                    findings.require(f"capture {capture}", steps.taken == 2)
                    continue
                torch.cuda.set_sync_debug_mode("error")
                waited = ""
                try:
                    steps.run(20)
                except RuntimeError as error:
                    waited = f": {str(error).splitlines()[0]}"
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                findings.require(f"no wait with capture {capture}{waited}", not waited)
                seconds = measure_seconds(lambda steps=steps: steps.run(20), device) / 20
                findings.note(f"seconds per step, capture {capture}", seconds)
                findings.note(f"kernels per step, capture {capture}", len(_trace_kernels(steps.run)))


def profile_steps(findings: Findings, device: str) -> None:
    """Where the time of a replayed step of t5-base goes: by class of kernel, and the kernels that take most."""
    if device == "cpu":
        findings.note("left_out", "kernels of a GPU are traced")
        return
    for batch_size in (16, 128):
        with (
            prepare_plan(device, model="t5-base", batch_size=batch_size, num_steps=8) as plan,
            Steps(set_up_graphs(plan)) as steps,
        ):
            steps.finish(3)
            seconds = measure_seconds(steps.run, device)
            kernels = _trace_kernels(steps.run)
        nanoseconds, classes = Counter[str](), Counter[str]()
        for name, length in kernels:
            nanoseconds[name[:80]] += length
            classes[classify_kernel(name)] += length
        found: dict[str, Any] = {
            "seconds": seconds,
            "num_kernels": len(kernels),
            "nanoseconds_by_class": dict(classes.most_common()),
            "nanoseconds_by_kernel": dict(nanoseconds.most_common(25)),
        }
        findings.note(f"batch {batch_size}", found)


def _trace_kernels(run: Callable[[], Any]) -> list[tuple[str, int]]:
    """Name and nanoseconds of every kernel and copy that a call runs on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return [(event.name, round(1000 * event.time_range.elapsed_us())) for event in events]
