"""Pre-flight checks: on a few examples, find in under a minute the errors that would end a run after hours.

In: a Setup. Out: Checks, each with pass, warn or fail and a remedy. Weights, optimizer and random states are restored.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import psutil
import torch

from fivetune.data.store.batch import collate, pad
from fivetune.distributed.sharding import gather_tensor, iter_gathered
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, FiveTuneError, format_size, translate_oom_errors
from fivetune.machine.telemetry.devices import get_peak_memory_bytes, reset_peak_memory
from fivetune.model.adapter import attach_exported, find_adapter, select_own_weights
from fivetune.model.forward import compute_padded_losses
from fivetune.model.load import count_bytes, count_parameters, load_model_and_tokenizer
from fivetune.model.modules import T5Model
from fivetune.rundir import CONFIG, RunDir, find_conflict
from fivetune.rundir.plan import Plan
from fivetune.rundir.progress import Progress, format_time_span
from fivetune.rundir.records import Prediction
from fivetune.tasks import head_of
from fivetune.training.answers.evaluator import select_subset
from fivetune.training.autotune.probe import restore_learner
from fivetune.training.checks.data_checks import (
    Outcome,
    check_characters,
    check_data,
    check_leakage,
    check_records,
    check_truncation,
)
from fivetune.training.setup import Setup
from fivetune.training.step.groups import build_optimizer, count_state_bytes
from fivetune.training.step.update import train_step

NUM_GENERATED = 16
RELOADED_ERROR = 1e-5  # of token losses in nats, or of weights
MERGED_ERROR = 1e-3  # of token losses: (W + B A) x rounds otherwise than W x + B A x
MAX_RELOADED = 1_000_000_000  # parameters above which saving and reloading would take longer than a minute


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Args:
        error_class: class of the exception that a failure raises.
        batch_size: a smaller micro-batch, if the planned one does not fit into memory.
    """

    name: str
    state: Literal["pass", "warn", "fail"]
    detail: str
    error_class: type[FiveTuneError] = FiveTuneEnvironmentError
    batch_size: int | None = None

    @classmethod
    def run(cls, name: str, check: Callable[..., Outcome], *args: object) -> Check:
        """Run a check; a FiveTuneError becomes a failed one."""
        try:
            state, detail, *smaller = check(*args)
        except FiveTuneError as error:
            return cls(name, "fail", str(error), type(error))
        return cls(name, state, detail, batch_size=smaller[0] if smaller else None)


def check_before_training(setup: Setup, progress: Progress, run: RunDir) -> Plan:
    """Run all checks: warnings are printed and recorded, the first failure raises.

    Returns: the plan, with a smaller micro-batch if the planned one did not fit into memory.
    """
    started = time.perf_counter()
    plan = setup.plan
    checks = []
    for number, check in enumerate(run_checks(setup), start=1):
        checks.append(check)
        progress.update("pre-flight checks", number)
        if check.state == "fail":
            raise check.error_class(f"pre-flight: {check.name}: {check.detail}")
        if check.state == "warn" and run.add_warning(f"{check.name}: {check.detail}", check.name):
            progress.warn(f"{check.name}: {check.detail}")
        if check.batch_size is not None:
            plan = plan.with_batch_size(check.batch_size)
    good = sum(check.state == "pass" for check in checks)
    progress.log(
        f"pre-flight: {good} of {len(checks)} checks passed in {format_time_span(time.perf_counter() - started)}"
    )
    return plan


def run_checks(setup: Setup) -> Iterator[Check]:
    """Run the checks in order and yield their outcomes."""
    # The order matters: the memory is forecast from the peak of the train step.
    checks: dict[str, Callable[[Setup], Outcome]] = {
        "data": check_data,
        "records": check_records,
        "leakage": check_leakage,
        "model": _check_model,
        "characters": check_characters,
        "truncation": check_truncation,
        "learning rate": _check_learning_rate,
        "train step": _check_train_step,
        "generation": _check_generation,
        "save and reload": _check_reload,
        "memory": _check_memory,
        "disk": _check_disk,
        "cores": _check_cores,
    }
    # With an optimizer of its own the trial leaves no state in the run's.
    optimizer = build_optimizer(setup.config, setup.learner.model)
    with restore_learner(setup.learner, optimizer) as learner:
        trial = replace(setup, learner=learner)
        for name, check in checks.items():
            yield Check.run(name, check, trial)


def _check_model(setup: Setup) -> Outcome:
    model = setup.learner.model
    kind = model.config.model_type
    count = count_parameters(model)
    verified = "compared with its file" if setup.config.model.init == "pretrained" else "random weights"
    if setup.loaded.warnings:
        return "warn", " ".join(setup.loaded.warnings)
    return "pass", f"{kind}, {count:,} parameters, {verified}"


def _check_learning_rate(setup: Setup) -> Outcome:
    lr = setup.plan.lr
    if lr is None:
        return "pass", "the optimizer computes its own"
    low, high = setup.config.optimizer.lr_range
    if setup.config.model.adapter:  # higher rates than for a whole model
        high *= setup.config.model.adapter.lr_scale
    if not low <= lr <= high:
        return "warn", f"optimizer.lr {lr:g} is outside {low:g} to {high:g}, where T5 fine-tuning is known to work"
    return "pass", f"optimizer.lr {lr:g}"


def _check_train_step(setup: Setup) -> Outcome:
    """Run one optimizer step on the longest examples, which shows whether memory suffices."""
    learner = setup.learner
    plan = setup.plan
    store = setup.data.stream.store
    # The longest examples: what fits here fits in every step.
    rows = store.inputs.lengths.argsort()[::-1][: plan.batch_size].tolist()
    trained = (parameter for parameter in learner.model.parameters() if parameter.requires_grad)
    num_probes = 2 if find_adapter(learner.model) else 1  # A of a pair has no gradient while B is 0
    probes = list(islice(trained, num_probes))
    before = [gather_tensor(probe.detach()).clone() for probe in probes]
    reset_peak_memory(learner.compute.device)
    lr = setup.compute_lr(plan.num_steps // 2)  # of the middle of the run: a warm-up begins near 0
    # In fp16 the first steps may overflow; each lowers the loss scale, and one at the lowest scale is an error.
    while True:
        started = time.perf_counter()
        with translate_oom_errors():
            update = train_step(learner, [collate(store, rows)], lr=lr, step=0, batch_size=plan.batch_size)
        seconds = time.perf_counter() - started
        if math.isfinite(update.grad_norm):
            break
    learner.fetch()  # the weights of chips, to compare them
    if update.batch_size < len(rows):
        detail = f"memory ran out with {len(rows)} examples in a forward pass; the run uses {update.batch_size}"
        return "warn", detail, update.batch_size
    after = [gather_tensor(probe.detach()) for probe in probes]
    if all(map(torch.equal, before, after)):
        return "fail", "one optimizer step did not change the weights. Check optimizer.lr and train.precision"
    return (
        "pass",
        f"loss {update.loss:.3f}, {format_time_span(seconds)} for {len(rows)} examples of up to "
        f"{store.inputs.lengths.max():,} tokens",
    )


def _check_generation(setup: Setup) -> Outcome:
    evaluator = setup.data.evaluator
    if evaluator is None:
        return "warn", "no data.eval, nothing to generate for"
    # All that an evaluation calls, from decoding to metrics, runs once on a few questions.
    predictions: list[Prediction] = []
    questions = select_subset(evaluator.store, NUM_GENERATED)
    with translate_oom_errors():
        record = evaluator.run(setup.learner.model, step=0, questions=questions, write=predictions.extend)
    if setup.metric not in record.scores:
        raise ConfigError(f"eval.metric: there is no {setup.metric!r}. Allowed: {', '.join(sorted(record.scores))}.")
    return (
        "pass",
        f"{len(predictions)} predictions, {setup.metric} {record.scores[setup.metric]:.2f}, "
        f"cap {record.max_new_tokens} tokens",
    )


def _check_reload(setup: Setup) -> Outcome:
    """Save and reload the model; compare token losses, or with sharded weights the weights."""
    learner = setup.learner
    if count_parameters(learner.model) > MAX_RELOADED:
        return "warn", "skipped: the model is too large to be written and read in a minute"
    with tempfile.TemporaryDirectory(prefix="fivetune-check-") as place:
        folder = Path(place) / "model"
        learner.save_model(setup.loaded.tokenizer, folder)
        reloaded = None
        if learner.world.is_first:
            foreign = setup.config.model.any_seq2seq
            reloaded = load_model_and_tokenizer(str(folder), head=head_of(setup.config.task), any_seq2seq=foreign).model
            attach_exported(reloaded, folder)  # virtual tokens are next to the model
    if learner.strategy.sharded:
        what = "weights"
        loaded = dict(reloaded.named_parameters()) if reloaded is not None else {}
        errors: list[float] = []
        for name, weight in iter_gathered(learner.model):  # all ranks gather, rank 0 compares
            if loaded:
                difference = (loaded[name] - weight.cpu()).abs()
                errors.append(difference.max().item())
        error = max(errors, default=0.0)
    else:
        what = "token losses"
        error = _measure_reload_error(setup, reloaded) if reloaded is not None else 0.0
    error = learner.world.broadcast_object(error)
    allowed = MERGED_ERROR if find_adapter(learner.model) else RELOADED_ERROR
    if not error <= allowed:  # NaN fails too
        return (
            "fail",
            f"a saved and reloaded model differs by {error:.3g} in its {what}. Report this with your versions",
        )
    return "pass", f"the reloaded model gives the same {what} (largest difference {error:.1g})"


def _measure_reload_error(setup: Setup, reloaded: T5Model) -> float:
    # Both on the CPU in fp32: kernels of a device would add their own rounding.
    model = setup.learner.model
    batch = pad(collate(setup.data.stream.store, [0]), pad_id=model.config.pad_token_id)
    with torch.no_grad():
        expected = compute_padded_losses(model.to("cpu").eval(), batch)
        found = compute_padded_losses(reloaded.eval(), batch)
    model.to(setup.learner.compute.device)
    return (found - expected).abs().max().item()


def _check_memory(setup: Setup) -> Outcome:
    """Forecast the peak memory of training from the size of the model and the step on the longest examples.

    In that step the optimizer had no state during the forward pass; later steps hold activations and state at once.
    """
    if setup.learner.compute.kind == "tpu":
        return "pass", "not forecast on TPU chips"
    device = setup.learner.compute.device
    model = setup.learner.model
    averages = setup.learner.averages.num_bytes if setup.learner.averages else 0
    weights = count_bytes(model)
    gradients = 4 * count_parameters(model, trained=True)
    state = count_state_bytes(model, setup.config.optimizer, has_average=averages > 0)
    teacher = setup.learner.forward.teacher
    frozen = count_bytes(teacher.model) if teacher else 0
    # Activations, buffers of the libraries, Python: what the peak has beyond all that is known.
    peak = get_peak_memory_bytes(device) or 0
    rest = max(peak - weights - gradients - averages - frozen, 0)
    if device == "cpu":
        rest += int(find_kept_share(model.config) * max(rest - PROCESS_BYTES, 0))
    forecast = weights + gradients + state + frozen + rest
    if device.startswith("cuda"):
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = psutil.virtual_memory().total
    of_teacher = f"teacher {format_size(frozen)}, " if frozen else ""
    text = (
        f"forecast: up to {format_size(forecast)} of {format_size(there)}: weights {format_size(weights)}, gradients "
        f"{format_size(gradients)}, optimizer {format_size(state)}, {of_teacher}activations and the rest "
        f"{format_size(rest)}"
    )
    if forecast > 0.9 * there:
        return "warn", f"{text}. Lower train.batch_size (keep train.global_batch_size) or data.max_input_tokens"
    return "pass", text


KEPT_SHARES = {"local": 0.25, "transient-global": 0.1}
"""What glibc keeps of LongT5's activations beyond their peak in a first step, measured by its attention: tensors of
less than 32 MiB leave holes in the heap (docs/LOG.md)."""
PROCESS_BYTES = 540 * 2**20  # of Python and its libraries, the peak of a run with a tiny model


def find_kept_share(config: object) -> float:
    """The share of activations that a CPU's allocator keeps after they are freed; 0 for models without long inputs."""
    if platform.libc_ver()[0] != "glibc" or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return 0.0
    kind = getattr(config, "encoder_attention_type", None)
    return KEPT_SHARES.get(str(kind), 0.0)


def _check_cores(setup: Setup) -> Outcome:
    """Check whether each compute thread of a CPU run has a core of its own."""
    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    if setup.learner.compute.kind != "cpu":
        return "pass", f"{cores} cores; the model runs on the device"
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return "pass", f"{threads} threads on {cores} cores, load unknown"
    text = f"{threads} {'thread' if threads == 1 else 'threads'} on {cores} cores, load {load:.1f}"
    if load <= cores or threads == 1:  # a single thread does not wait for others
        return "pass", text
    return "warn", f"{text}: other programs use the cores. Stop them, or set train.num_threads 1"


def check_run_directory(path: Path) -> Check:
    """Check whether a run could start in `path`. Only for `fivetune check`: `train` has created it by then."""
    name = "run directory"
    there = find_existing_parent(path)
    if not there.is_dir():
        return Check(name, "fail", f"{there} is a file. Choose another run.dir")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, "fail", f"{there} cannot be written. Choose another run.dir")
    if reason := find_conflict(path):
        return Check(name, "warn" if (path / CONFIG).is_file() else "fail", reason)
    return Check(name, "pass", f"{path} is free")


def find_existing_parent(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(one for one in (path, *path.absolute().parents) if one.exists())


def _check_disk(setup: Setup) -> Outcome:
    """Check the disk space for the kept checkpoints, the best ones, one more during a save, and model/."""
    config = setup.config
    # Each checkpoint has weights in fp32, of an adapter alone if there is one, and the optimizer's state.
    own = sum(weight.numel() for _, weight in select_own_weights(setup.learner.model))
    each = own * 4 + count_state_bytes(setup.learner.model, config.optimizer)
    if setup.learner.averages:
        each += setup.learner.averages.num_saved_bytes
    num_checkpoints = config.checkpoint.keep + (config.checkpoint.average_best or 1) + 1
    needed = each * num_checkpoints + count_parameters(setup.learner.model) * 8
    free = shutil.disk_usage(find_existing_parent(Path(config.run.dir))).free
    text = f"{format_size(needed)} for checkpoints and model, {format_size(free)} free"
    if free < needed:
        return "fail", f"{text}. Free space, lower checkpoint.keep, or choose another run.dir"
    return ("warn" if free < 2 * needed else "pass"), text
