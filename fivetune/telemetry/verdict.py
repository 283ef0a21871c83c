"""What limits or spoils a run, in plain words: every rule looks at the evidence, and what matters most comes first.

In: Evidence. Out: Verdicts, sorted; and what could not be judged, with what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fivetune.telemetry import faults, learning, limits
from fivetune.telemetry.evidence import MIN_STEPS, Evidence, of_run
from fivetune.types import Run, Verdict

WRONG, LEARNT, AT_RISK, SLOW = range(4)
"""Kinds of rules, the worst first: a result that is not what it seems, a model that learnt the wrong thing, a run that
may fail, time that is wasted."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something that a rule must know.

    Args:
        words: what it is.
        is_known: whether the evidence tells it.
        is_asked: whether the question makes sense; a CPU run has no device clocks.
    """

    words: str
    is_known: Callable[[Evidence], bool]
    is_asked: Callable[[Evidence], bool] = lambda evidence: True


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong with a run.

    Args:
        judge: the verdict on some evidence, None where nothing is wrong or not enough is known.
        needs: what it must know to see anything.
    """

    judge: Callable[[Evidence], Verdict | None]
    kind: int
    needs: tuple[Need, ...] = ()


def _on_devices(evidence: Evidence) -> bool:
    return evidence.device_kind != "cpu"


def _knows(name: str) -> Callable[[Evidence], bool]:
    """Whether a device told a figure."""
    return lambda evidence: any(getattr(device, name) is not None for device in evidence.devices)


STEPS = Need("the records of the steps", lambda e: bool(e.train_loss) or e.not_finite_step is not None)
TIMES = Need(f"the times of {MIN_STEPS} steps after the warm-up", lambda e: e.times is not None)
PHASES = Need("what the steps' time went into, by phase", lambda e: e.times is not None and e.times.host is not None)
LENGTHS = Need("what a pass takes whatever its length (steps of different lengths, clear times)", limits.knows_passes)
EXCHANGE = Need(
    "the time of the exchange of gradients",
    lambda e: e.times is not None and e.times.exchange is not None,
    lambda e: (e.world_size or 1) > 1,
)
ASKED = Need(
    "how many devices were asked for (--devices N)",
    lambda e: e.devices_asked is not None,
    lambda e: _on_devices(e) or (e.world_size or 1) > 1,
)
EVALS = Need("evaluations, two at least", lambda e: len(e.evals) > 1)
LABELS = Need("how many labels the data have", lambda e: e.scored_ratio is not None)
MEMORY = Need("memory in use, and how much there is", lambda e: limits.memory_share(e)[0] is not None)
BUSY = Need("the devices' utilisation", _knows("utilisation"), _on_devices)
MOVING = Need("the share of the time in which device memory is read or written", _knows("memory_busy"), _on_devices)
CLOCKS = Need("why the devices' clocks were held down", _knows("held_down"), _on_devices)
WORKERS = Need("what each device or process did", lambda e: bool(e.devices) or len(e.ranks) > 1, ASKED.is_asked)

RULES = (
    Rule(faults.not_finite, WRONG, (STEPS,)),
    Rule(faults.overflow, WRONG, (STEPS,)),
    Rule(faults.world_size, WRONG, (STEPS, ASKED)),
    Rule(faults.idle_device, WRONG, (ASKED, WORKERS)),
    Rule(faults.updates_below_precision, WRONG, (STEPS,)),
    Rule(faults.frozen, WRONG, (EVALS,)),
    Rule(faults.padded_labels, WRONG, (STEPS, LABELS)),
    Rule(learning.abstention, LEARNT, (EVALS,)),
    Rule(learning.over_fitting, LEARNT, (EVALS,)),
    Rule(limits.memory_full, AT_RISK, (MEMORY,)),
    Rule(limits.input_bound, SLOW, (TIMES,)),
    Rule(limits.host_bound, SLOW, (PHASES,)),
    Rule(limits.waiting_device, SLOW, (BUSY,)),
    Rule(limits.launch_bound, SLOW, (LENGTHS,)),
    Rule(limits.padding_bound, SLOW, (TIMES,)),
    Rule(limits.communication_bound, SLOW, (EXCHANGE,)),
    Rule(limits.evaluation_bound, SLOW, (STEPS,)),
    Rule(limits.checkpoint_bound, SLOW, (STEPS,)),
    Rule(limits.throttled, SLOW, (CLOCKS,)),
    Rule(limits.memory_bandwidth_bound, SLOW, (MOVING,)),
    Rule(limits.memory_empty, SLOW, (MEMORY,)),
)


def diagnose(evidence: Evidence) -> tuple[Verdict, ...]:
    """All verdicts, what matters most first: by kind, then the largest gain, then in the order of RULES."""
    found = [(rule.kind, verdict) for rule in RULES if (verdict := rule.judge(evidence)) is not None]
    return tuple(verdict for _, verdict in sorted(found, key=lambda pair: (pair[0], -(pair[1].gain or 0.0))))


def verdicts_of(run: Run, *, devices_asked: int | None = None) -> tuple[Verdict, ...]:
    """The verdicts on a run directory that was read back, finished or under way.

    Args:
        devices_asked: how many devices the user wanted, where the recipe does not tell.
    """
    return diagnose(of_run(run, devices_asked=devices_asked))


def unjudged(evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """What the records do not tell, each with the rules that could not judge for want of it."""
    missing: dict[str, list[str]] = {}
    for rule in RULES:
        need = next((need for need in rule.needs if not need.is_known(evidence)), None)
        if need and all(need.is_asked(evidence) for need in rule.needs):
            missing.setdefault(need.words, []).append(rule.judge.__name__)
    return {words: tuple(rules) for words, rules in missing.items()}
