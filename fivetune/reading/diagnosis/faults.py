"""Rules about invalid results: non-finite values, frozen weights, idle devices, padded labels.

In: RunStats. Out: a Verdict, or None if nothing is wrong or data is missing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from fivetune import plugins
from fivetune.config.sections import STRATEGY_OF_SEVERAL
from fivetune.reading.diagnosis.stats import RunStats, format_share
from fivetune.rundir.figures import FROZEN_STEPS
from fivetune.types import Optimizer, Verdict

MAX_SKIPPED_SHARE = 0.02
"""Share of skipped steps. Loss scaling starts with a factor of 65,536, halves it on overflow and doubles it every 2,000
steps: a healthy run skips 16 steps at most, then one in 2,000. EXPECTED_SKIPS are not counted."""
EXPECTED_SKIPS = 16

MIN_LOSS_RANGE = 1e-4
"""Relative range of the evaluation loss over a whole run below which the weights do not change. fp32 repeats a loss to
about 1e-6; the first per cent of any fine-tuning changes it by more than 1e-2."""

FROZEN_EVALS = 3
"""Number of last evaluations with exactly the same loss."""

HALF_GAP = {"fp32": 2**-24, "bf16": 2**-9, "fp16": 2**-12}
"""Half the gap to the next larger number, relative: a smaller addend is rounded away (IEEE 754; bf16 has 8 bits of
precision)."""
SMALL_WEIGHT = 0.03
"""Typical size of a weight of T5: matrices start with a standard deviation of d_model^-0.5, 0.044 in small, 0.03 in
large."""

SCORED_RATIO = 1.5
"""Scored labels over labels of the data: 1 over an epoch. Part of an epoch can have longer answers than the rest, but
hardly by half of the mean; labels padded to a fixed length give several times as many."""
MIN_SCORED_STEPS = 20
MIN_PADDED_LENGTH = 8
"""Minimum length of padded targets in tokens: all labels of a classification can have the same length, but a shorter
one."""

IDLE_RANK = 0.1
"""Busy cores of a process, relative to the busiest process, below which it is idle."""


def check_not_finite(stats: RunStats) -> Verdict | None:
    """Non-finite loss or gradient: the run stopped at this step or continued after it."""
    step = stats.nonfinite_step
    if step is None:
        return None
    message = f"The loss or the gradient was not finite at step {step:,}"
    num_others = stats.num_nonfinite - 1
    if num_others:
        message += f" and in {num_others:,} more step{'s' if num_others > 1 else ''}"
    if stats.precision == "fp16":
        message += " in fp16, whose largest number is 65,504"
        change: Mapping[str, Any] = {"train.precision": _choose_wide_precision(stats)}
        advice = "Train in bf16 or fp32, which hold larger numbers."
    else:
        change = suggest_lower_lr(stats)
        advice = "Lower the learning rate or add warm-up steps, and inspect the examples that the error names."
    return Verdict(
        rule="not_finite",
        message=f"{message}.",
        figure=float(step),
        threshold=None,
        confidence=1.0,
        change=change,
        advice=advice,
    )


def check_overflow(stats: RunStats) -> Verdict | None:
    """fp16 overflow: so many updates were skipped that the run trained less than its step count suggests."""
    if stats.skipped_share is None or not stats.train_loss:
        return None
    num_steps = len(stats.train_loss)
    num_skipped = round(stats.skipped_share * num_steps)
    share = max(0, num_skipped - EXPECTED_SKIPS) / num_steps
    if share < MAX_SKIPPED_SHARE:
        return None
    return Verdict(
        rule="overflow",
        message=f"The gradient overflowed in {num_skipped:,} of {num_steps:,} steps; these updates were skipped.",
        figure=share,
        threshold=MAX_SKIPPED_SHARE,
        confidence=0.95,
        change={"train.precision": _choose_wide_precision(stats)} if stats.precision == "fp16" else {},
        advice="The model learns nothing in skipped steps: train in bf16 or fp32.",
    )


def check_world_size(stats: RunStats) -> Verdict | None:
    """World size other than the requested number of devices."""
    requested, actual = stats.devices_requested, stats.world_size
    if requested is None or actual is None or actual == requested:
        return None
    return Verdict(
        rule="world_size",
        message=f"{requested} devices were requested, but the world size is {actual}: "
        f"{'one process' if actual == 1 else f'{actual} processes'} trained.",
        figure=float(actual),
        threshold=float(requested),
        confidence=1.0,
        change={"launch.nproc": requested, "strategy.name": STRATEGY_OF_SEVERAL} if actual < requested else {},
        advice="Do not compare this run with one on the requested devices: speed, data and global batch differ.",
    )


def check_idle_device(stats: RunStats) -> Verdict | None:
    """A requested device or process is idle while others train."""
    requested = stats.devices_requested or stats.world_size
    if requested is None:
        return None
    known = [device for device in stats.devices if device.active_share is not None]
    if known:
        num_busy = sum(device.is_busy for device in known)
        if not num_busy and stats.train_loss:
            return None  # the run trained, so the devices do work, but wait: the rules of speed find the cause
        shares = ", ".join(f"device {device.index} {format_share(device.utilisation or 0)}" for device in known)
        message = f"{num_busy} of {requested} devices worked. Mean utilisation{describe_left_out(stats)}: {shares}."
    elif len(stats.ranks) > 1:
        most = max(stats.ranks.values())
        num_busy = sum(cores > IDLE_RANK * most for cores in stats.ranks.values())
        shares = ", ".join(f"rank {rank} {cores:.2f}" for rank, cores in stats.ranks.items())
        message = f"{num_busy} of {requested} processes worked. Busy cores: {shares}."
    else:
        return None
    if num_busy >= requested:
        return None
    return Verdict(
        rule="idle_device",
        message=message,
        figure=float(num_busy),
        threshold=float(requested),
        confidence=0.95,
        change={"launch.nproc": requested, "strategy.name": STRATEGY_OF_SEVERAL},
        advice=f"Start one process per device, or request {num_busy or 1} device{'s' if num_busy > 1 else ''} only. "
        f"Until then, do not report a speed-up by {requested} devices.",
    )


def describe_idle_devices(stats: RunStats) -> str | None:
    """Describe idle devices beside a busy one in a log, if the number of requested devices is unknown; else None."""
    idle = [device for device in stats.devices if device.active_share is not None and not device.is_busy]
    num = len(stats.devices)
    if stats.devices_requested is not None or not stats.is_log or not 0 < len(idle) < num:
        return None
    names = ", ".join(
        f"device {device.index} (mean utilisation {format_share(device.utilisation or 0)})" for device in idle
    )
    return f"{names} did no work in the whole log. Add --devices {num} if {num} devices were requested."


def describe_left_out(stats: RunStats) -> str:
    """Describe the samples of a log that its figures exclude; "" if there are none."""
    num = stats.num_inactive_samples
    return f" ({num:,} samples in which no device was active are left out)" if num else ""


def check_updates_below_precision(stats: RunStats) -> Verdict | None:
    """All updates are below the precision of the weights and do not change them."""
    rate, eps = stats.peak_lr, HALF_GAP.get(stats.weights or "")
    if rate is None or eps is None:
        return None
    smallest = eps * SMALL_WEIGHT
    if rate < smallest:
        return Verdict(
            rule="updates_below_precision",
            message=f"The largest update of the run is {rate:.1e} per weight; in {stats.weights}, adding less than "
            f"{smallest:.1e} does not change a weight of {SMALL_WEIGHT}.",
            figure=rate,
            threshold=smallest,
            confidence=0.95,
            change={"optimizer.lr": suggest_typical_lr(stats)},
            advice="Raise the learning rate, or keep the weights in fp32.",
        )
    # A vanished gradient: far below AdamW's eps, which then dominates the denominator and shrinks the updates.
    # Gradients also vanish when nothing is left to learn: the loss has halved.
    eps = stats.get_setting("optimizer.eps") if stats.get_setting("optimizer.name") == "adamw" else None
    if not (eps and stats.num_parameters) or stats.grad_norm is None:
        return None
    each = stats.grad_norm / math.sqrt(stats.num_parameters)
    losses = list(stats.train_loss.values())
    tenth = max(1, len(losses) // 10)
    has_learnt = bool(losses) and median(losses[-tenth:]) < 0.5 * median(losses[:tenth])
    if each >= 0.1 * eps or has_learnt:
        return None
    return Verdict(
        rule="updates_below_precision",
        message=f"The median gradient of a weight is {each:.1e}, far below optimizer.eps {eps:.0e}: AdamW's updates "
        "are almost 0.",
        figure=each,
        threshold=0.1 * eps,
        confidence=0.7,
        change={"optimizer.eps": eps * 1e-4},
        advice="Check that the loss reaches the weights; if it does, lower optimizer.eps.",
    )


def check_frozen(stats: RunStats) -> Verdict | None:
    """The loss is constant, or becomes constant: the weights do not change."""
    length, first = stats.freeze or (0, 0)
    losses = [(record.step, record.loss) for record in stats.evals if record.loss is not None]
    values = [loss for _, loss in losses]
    highest = max(values, default=0.0)
    final = values[-1] if values else 0.0
    moved = (highest - min(values)) / highest if highest else math.inf
    same = [step for step, loss in losses if loss == final]
    if length >= FROZEN_STEPS:
        message = f"The training loss is exactly the same in {length:,} steps from step {first:,} on."
        figure, threshold = float(length), FROZEN_STEPS
    elif len(values) < 2 or not highest:
        return None
    elif moved < MIN_LOSS_RANGE:
        message = (
            f"The evaluation loss changed by {moved:.1e}, relative, over {len(values)} evaluations "
            f"from step {losses[0][0]:,} to {losses[-1][0]:,}."
        )
        figure, threshold = moved, MIN_LOSS_RANGE
    elif len(same) >= FROZEN_EVALS and set(values[-len(same) :]) == {final}:
        message = (
            f"The evaluation loss is exactly {final:.4f} in the last {len(same)} evaluations, since step {same[0]:,}."
        )
        figure, threshold = float(len(same)), FROZEN_EVALS
    else:
        return None
    change: dict[str, Any] = {"optimizer.lr": suggest_typical_lr(stats)}
    if stats.precision == "fp16":
        change = {"train.precision": _choose_wide_precision(stats)}
    elif change["optimizer.lr"] == stats.get_setting("optimizer.lr"):
        change = {}
    return Verdict(
        rule="frozen",
        message=message,
        figure=figure,
        threshold=threshold,
        confidence=0.95,
        change=change,
        advice="The weights do not change, so do not compare this run with others. Check optimizer.lr, the schedule, "
        "train.precision, and that the weights require gradients.",
    )


def check_padded_labels(stats: RunStats) -> Verdict | None:
    """The loss counts padding as labels."""
    ratio, length = stats.scored_ratio, stats.padded_length
    if ratio is not None and ratio >= SCORED_RATIO and len(stats.train_loss) >= MIN_SCORED_STEPS:
        padding = format_share(1 - 1 / ratio)
        message = (
            f"The loss counts {ratio:.1f} times as many labels as the examples have: {padding} of the loss is padding."
        )
        figure, threshold, confidence = ratio, SCORED_RATIO, 0.95
    elif length is not None and length >= MIN_PADDED_LENGTH:
        message = (
            f"All targets are {length} tokens long, which is data.max_target_tokens, though none was truncated: "
            "they were padded before FiveTune read them."
        )
        figure, threshold, confidence = float(length), MIN_PADDED_LENGTH, 0.8
    else:
        return None
    return Verdict(
        rule="padded_labels",
        message=message,
        figure=figure,
        threshold=threshold,
        confidence=confidence,
        advice="Leave padding out of the labels (-100 is not scored): a model learns it in a few steps, which makes "
        "the loss look small. Do not compare losses of this run with others.",
    )


def suggest_typical_lr(stats: RunStats) -> float | None:
    """Return the geometric mean of the learning-rate range of the run's optimizer; None if the optimizer is unknown."""
    name = stats.get_setting("optimizer.name")
    if name is None:
        return None
    optimizer: type[Optimizer] = plugins.load_plugin("optimizers", name)
    lowest, highest = optimizer.lr_range
    return float(f"{math.sqrt(lowest * highest):.0e}")


def scale_lr(stats: RunStats, factor: float) -> Mapping[str, Any]:
    """Return the change of optimizer.lr by a factor; {} if the run sets no rate."""
    rate = stats.get_setting("optimizer.lr")
    return {"optimizer.lr": float(f"{factor * rate:.2g}")} if isinstance(rate, int | float) and rate else {}


def suggest_lower_lr(stats: RunStats) -> Mapping[str, Any]:
    """Return a tenth of optimizer.lr, or the typical rate of the optimizer if that is even lower."""
    tenth, typical = scale_lr(stats, 0.1), suggest_typical_lr(stats)
    if tenth and typical is not None:
        return {"optimizer.lr": min(tenth["optimizer.lr"], typical)}
    return tenth


def _choose_wide_precision(stats: RunStats) -> str:
    """Return a precision in which T5 does not overflow: bf16 on an accelerator, else fp32."""
    return "fp32" if stats.device_kind == "cpu" else "bf16"
