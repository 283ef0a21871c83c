"""Rules about runs whose result is not what it seems: wrong numbers, frozen weights, devices that did nothing.

In: Evidence. Out: a Verdict, or None where nothing is wrong or the evidence does not tell.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from fivetune import plugins
from fivetune.telemetry.evidence import Evidence, percent
from fivetune.types import Verdict

SKIPPED = 0.02
"""Share of skipped steps. Loss scaling halves its factor from 65,536 at the start and tries a larger one every 2,000
steps, so a healthy run skips 16 steps at most and then one in 2,000; EXPECTED_SKIPS are forgiven."""
EXPECTED_SKIPS = 16

UNMOVED = 1e-4
"""Range of the evaluation loss over a whole run, relative to it, below which the weights stand still. fp32 repeats a
loss to about 1e-6; the first per cent of any fine-tuning moves it by more than 1e-2."""

REPEATS = 10
"""Steps with exactly one loss: batches differ, so even two equal float losses are a coincidence."""

HALF_GAP = {"fp32": 2**-24, "bf16": 2**-9, "fp16": 2**-12}
"""What is added to a number is lost below this share of it: half the gap to the next number (IEEE 754; bf16 has 8 bits
of precision)."""
SMALL_WEIGHT = 0.03
"""Size of the weights of a T5, roughly: matrices begin with a spread of d_model^-0.5, 0.044 in small, 0.03 in large."""

SCORED_RATIO = 1.5
"""Labels scored over labels there are: 1 over an epoch. Part of an epoch may hold longer answers than the rest, hardly
by half of the mean; labels padded to a fixed length are scored several times too often."""
MIN_SCORED_STEPS = 20
MIN_PADDED_LENGTH = 8
"""Tokens: labels of a class, a number or a letter, may well be all of one length, and shorter than this."""

IDLE_RANK = 0.1
"""A process that keeps less than this part of the cores busy that the busiest one does shares no equal work."""


def not_finite(evidence: Evidence) -> Verdict | None:
    """A loss or a gradient was not finite, and the run ended, or went on with a hole."""
    step = evidence.not_finite_step
    if step is None:
        return None
    in_fp16 = evidence.precision == "fp16"
    return Verdict(
        rule="not_finite",
        says=f"The loss or the gradient was not finite at step {step:,}"
        f"{' in fp16, whose largest number is 65,504' if in_fp16 else ''}.",
        figure=float(step), threshold=None, confidence=1.0,
        change={"train.precision": _wide(evidence)} if in_fp16 else _lower_rate(evidence, 0.1),
        advice="T5's feed-forward outputs exceed fp16: train in bf16 or fp32." if in_fp16
        else "Lower the learning rate or warm it up, and look at the examples that the error names.",
    )  # fmt: skip


def overflow(evidence: Evidence) -> Verdict | None:
    """So many gradients overflowed that the run trained on fewer steps than it counts."""
    if evidence.skipped is None or not evidence.train_loss:
        return None
    num_steps = len(evidence.train_loss)
    num_skipped = round(evidence.skipped * num_steps)
    share = max(0, num_skipped - EXPECTED_SKIPS) / num_steps
    if share < SKIPPED:
        return None
    return Verdict(
        rule="overflow",
        says=f"{num_skipped:,} of {num_steps:,} steps had a gradient that overflowed; their updates were skipped.",
        figure=share, threshold=SKIPPED, confidence=0.95,
        change={"train.precision": _wide(evidence)} if evidence.precision == "fp16" else {},
        advice="The skipped steps taught nothing: train in bf16 or fp32.",
    )  # fmt: skip


def world_size(evidence: Evidence) -> Verdict | None:
    """Another number of processes trained together than was asked for."""
    asked, there = evidence.devices_asked, evidence.world_size
    if asked is None or there is None or there == asked:
        return None
    return Verdict(
        rule="world_size",
        says=f"{asked} devices were asked for, but the world size is {there}: "
        f"{'one process' if there == 1 else f'{there} processes'} trained.",
        figure=float(there), threshold=float(asked), confidence=1.0,
        change={"launch.nproc": asked, "strategy.name": "ddp"} if there < asked else {},
        advice="Compare nothing with a run on the devices that were asked for: speed, data and global batch differ.",
    )  # fmt: skip


def idle_device(evidence: Evidence) -> Verdict | None:
    """A device, or a process, that was asked for did nothing while others trained."""
    asked = evidence.devices_asked or evidence.world_size
    if asked is None:
        return None
    known = [device for device in evidence.devices if device.active is not None]
    if known:
        num_busy = sum(device.is_busy for device in known)
        if not num_busy and evidence.train_loss:
            return None  # it trained, so they work and wait: the rules of speed tell for what
        shares = ", ".join(f"device {device.index} {percent(device.utilisation or 0)}" for device in known)
        return _idle(f"{num_busy} of {asked} devices worked. Mean utilisation: {shares}.", num_busy, asked)
    if len(evidence.ranks) < 2:
        return None
    most = max(evidence.ranks.values())
    num_busy = sum(cores > IDLE_RANK * most for cores in evidence.ranks.values())
    shares = ", ".join(f"rank {rank} {cores:.2f}" for rank, cores in evidence.ranks.items())
    return _idle(f"{num_busy} of {asked} processes worked. Cores kept busy: {shares}.", num_busy, asked)


def _idle(says: str, num_busy: int, asked: int) -> Verdict | None:
    if num_busy >= asked:
        return None
    return Verdict(
        rule="idle_device", says=says, figure=float(num_busy), threshold=float(asked), confidence=0.95,
        change={"launch.nproc": asked, "strategy.name": "ddp"},
        advice="Start one process per device, or ask for one device only. Until then a speed-up against one device is "
        "none: one device did the work, on part of the data.",
    )  # fmt: skip


def idle_note(evidence: Evidence) -> str | None:
    """Devices that a log saw idle beside a busy one, where nobody said how many were asked for."""
    idle = [device for device in evidence.devices if device.active is not None and not device.is_busy]
    num, is_log = len(evidence.devices), evidence.world_size is None
    if evidence.devices_asked is not None or not is_log or not 0 < len(idle) < num:
        return None
    names = ", ".join(f"device {device.index} (mean utilisation {percent(device.utilisation or 0)})" for device in idle)
    return f"{names} did no work in the whole log. If {num} devices were asked for, --devices {num} makes it a verdict."


def updates_below_precision(evidence: Evidence) -> Verdict | None:
    """Updates so small that adding them to the weights changes nothing."""
    rate, eps = evidence.peak_lr, HALF_GAP.get(evidence.weights or "")
    if rate is None or eps is None:
        return None
    smallest = eps * SMALL_WEIGHT
    if rate < smallest:
        return Verdict(
            rule="updates_below_precision",
            says=f"The largest update of the run is {rate:.1e} per weight; in {evidence.weights} a weight of "
            f"{SMALL_WEIGHT} does not change by less than {smallest:.1e}.",
            figure=rate, threshold=smallest, confidence=0.95, change={"optimizer.lr": usual_rate(evidence)},
            advice="Raise the learning rate, or keep the weights in fp32.",
        )  # fmt: skip
    return _vanished_gradient(evidence)


def _vanished_gradient(evidence: Evidence) -> Verdict | None:
    """AdamW divides by the gradient's size plus eps: far below eps the update is no longer as large as the rate."""
    eps = evidence.setting("optimizer.eps") if evidence.setting("optimizer.name") == "adamw" else None
    if not (eps and evidence.num_parameters) or evidence.grad_norm is None:
        return None
    each = evidence.grad_norm / math.sqrt(evidence.num_parameters)
    if each >= 0.1 * eps or _has_learnt(evidence):
        return None
    return Verdict(
        rule="updates_below_precision",
        says=f"A weight's gradient is {each:.1e} in the middle of the steps, far below optimizer.eps {eps:.0e}: "
        "AdamW makes almost no update of it.",
        figure=each, threshold=0.1 * eps, confidence=0.7, change={"optimizer.eps": eps * 1e-4},
        advice="Look whether the loss reaches the weights; if it does, lower optimizer.eps.",
    )  # fmt: skip


def _has_learnt(evidence: Evidence) -> bool:
    """Gradients also vanish where nothing is left to learn: the loss then is a small part of what it was."""
    losses = list(evidence.train_loss.values())
    tenth = max(1, len(losses) // 10)
    return bool(losses) and median(losses[-tenth:]) < 0.5 * median(losses[:tenth])


def frozen(evidence: Evidence) -> Verdict | None:
    """The loss does not move, or moves no longer: the weights stand still."""
    if (evidence.loss_repeats or 0) >= REPEATS:
        since = max(evidence.train_loss) - (evidence.loss_repeats or 0) + 1
        return _frozen(evidence, f"The training loss is exactly the same in {evidence.loss_repeats} steps, "
                                 f"since step {since:,}.", float(evidence.loss_repeats or 0), REPEATS)  # fmt: skip
    losses = [(record["step"], record["loss"]) for record in evidence.evals if record.get("loss") is not None]
    values = [loss for _, loss in losses]
    if len(values) < 2 or not max(values):
        return None
    moved = (max(values) - min(values)) / max(values)
    if moved < UNMOVED:
        return _frozen(evidence, f"The evaluation loss moved by {moved:.1e} of itself over {len(values)} evaluations, "
                                 f"from step {losses[0][0]:,} to {losses[-1][0]:,}.", moved, UNMOVED)  # fmt: skip
    same = [step for step, loss in losses if loss == values[-1]]
    if len(same) >= 3 and values[-len(same) :] == [values[-1]] * len(same):
        return _frozen(evidence, f"The evaluation loss is exactly {values[-1]:.4f} in the last {len(same)} "
                                 f"evaluations: nothing was learnt since step {same[0]:,}.", 0.0, UNMOVED)  # fmt: skip
    return None


def _frozen(evidence: Evidence, says: str, figure: float, threshold: float) -> Verdict:
    in_fp16 = evidence.precision == "fp16"
    change: dict[str, Any] = {"train.precision": _wide(evidence)} if in_fp16 else {"optimizer.lr": usual_rate(evidence)}
    if change.get("optimizer.lr") == evidence.setting("optimizer.lr"):
        change = {}
    return Verdict(
        rule="frozen", says=says, figure=figure, threshold=threshold, confidence=0.95, change=change,
        advice="Compare nothing with this run: the weights do not move. Check optimizer.lr, the schedule, "
        "train.precision, and that the weights are not frozen.",
    )  # fmt: skip


def padded_labels(evidence: Evidence) -> Verdict | None:
    """The loss counts labels that are no answers: padding."""
    ratio, length = evidence.scored_ratio, evidence.padded_length
    if ratio is not None and ratio >= SCORED_RATIO and len(evidence.train_loss) >= MIN_SCORED_STEPS:
        return _padded(f"An example was scored on {ratio:.1f} times as many labels as it has: "
                       f"{percent(1 - 1 / ratio)} of the loss is padding.", ratio, SCORED_RATIO, 0.95)  # fmt: skip
    if length is not None and length >= MIN_PADDED_LENGTH:
        return _padded(f"All targets are {length} tokens long, which is data.max_target_tokens, though none was cut: "
                       "they were padded before they were read.", float(length), MIN_PADDED_LENGTH, 0.8)  # fmt: skip
    return None


def _padded(says: str, figure: float, threshold: float, confidence: float) -> Verdict:
    return Verdict(
        rule="padded_labels", says=says, figure=figure, threshold=threshold, confidence=confidence,
        advice="Leave padding out of the labels (-100 is not scored): it is learnt in a few steps and makes the loss "
        "look small. Losses of this run compare with no other's.",
    )  # fmt: skip


def usual_rate(evidence: Evidence) -> float | None:
    """The middle, in magnitude, of the rates that the run's optimizer trains well with."""
    name = evidence.setting("optimizer.name")
    if name is None:
        return None
    lowest, highest = plugins.load("optimizers", name).lr_range
    return float(f"{math.sqrt(lowest * highest):.0e}")


def _lower_rate(evidence: Evidence, factor: float) -> dict[str, Any]:
    rate = evidence.setting("optimizer.lr")
    return {"optimizer.lr": float(f"{factor * rate:.2g}")} if rate else {}


def _wide(evidence: Evidence) -> str:
    """The precision in which T5 does not overflow: bf16 where the device computes in it, else fp32."""
    return "fp32" if evidence.device_kind == "cpu" else "bf16"
