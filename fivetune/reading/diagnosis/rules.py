"""The rules of the diagnosis and their order.

In: RunStats, or a Run. Out: Verdicts, most important first; and missing data with the rules that require it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fivetune.reading.diagnosis import faults, learning, speed, truncation
from fivetune.reading.diagnosis.device_use import DeviceUse
from fivetune.reading.diagnosis.stats import MIN_STEPS, RunStats, collect_run_stats
from fivetune.rundir.records import Run
from fivetune.types import Verdict

WRONG, LEARNT, AT_RISK, DISTURBED, SLOW = range(5)
"""Kinds of rules, most severe first: invalid results, a failed learning goal, a run that may fail, times distorted by
other programs, wasted time."""

LOG_ADVICE = {
    "host_bound": "Record the times of data loading, host, forward and backward: they show what the device waits for.",
    "memory_bandwidth_bound": "Use 16-bit values or fused kernels.",
    "memory_full": "Use smaller batches.",
}
"""Advice for another tool's log, to which FiveTune's settings do not apply."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """Data that a rule requires.

    Args:
        description: name of the data, for the list of unchecked rules.
        is_known: whether the records contain it.
        applies: whether it exists for this run; a CPU run has no device clocks.
    """

    description: str
    is_known: Callable[[RunStats], bool]
    applies: Callable[[RunStats], bool] = lambda stats: True


@dataclass(frozen=True, slots=True)
class Rule:
    """One question about a run.

    Args:
        check: the function `check_<name>`; returns the verdict, whose `rule` is the name; None without a problem or
            without the required data.
        title: plain words for the verdict, for headings.
        kind: place among the verdicts: WRONG, LEARNT, AT_RISK, DISTURBED or SLOW.
        requirements: the data that the check needs.
    """

    check: Callable[[RunStats], Verdict | None]
    title: str
    kind: int
    requirements: tuple[Requirement, ...] = ()

    @property
    def name(self) -> str:
        return self.check.__name__.removeprefix("check_")


def _has_accelerator(stats: RunStats) -> bool:
    return stats.device_kind != "cpu"


def _make_device_predicate(get: Callable[[DeviceUse], float | None]) -> Callable[[RunStats], bool]:
    """Return a predicate: whether any device reports a figure."""
    return lambda stats: any(get(device) is not None for device in stats.devices)


STEP_RECORDS = Requirement("step records", lambda e: bool(e.train_loss) or e.nonfinite_step is not None)
STEP_TIMES = Requirement(f"times of {MIN_STEPS} steps after the warm-up", lambda e: e.times is not None)
PHASE_TIMES = Requirement("times of the steps by phase", lambda e: e.times is not None and e.times.host is not None)
FIXED_COST = Requirement(
    "the fixed cost of a pass (steps of different lengths, steady times)", speed.is_fixed_cost_known
)
HOST_LOAD = Requirement(
    "busy cores of the host and of the run", lambda e: e.host_load is not None, lambda e: e.device_kind == "cpu"
)
COMMUNICATION_TIME = Requirement(
    "the time of the all-reduce of gradients",
    lambda e: e.times is not None and e.times.exchange is not None,
    lambda e: (e.world_size or 1) > 1,
)
REQUESTED_DEVICES = Requirement(
    "the number of requested devices (--devices N)",
    lambda e: e.devices_requested is not None,
    lambda e: _has_accelerator(e) or (e.world_size or 1) > 1,
)
DATA_COUNTS = Requirement("the counts of the data", lambda e: bool(e.splits), lambda e: not e.is_log)
EVALUATIONS = Requirement("two evaluations", lambda e: len(e.evals) > 1)
LABEL_COUNTS = Requirement("the number of labels of the data", lambda e: e.scored_ratio is not None)
LABEL_RATES = Requirement(
    "the share of the most frequent predicted label",
    lambda e: any("one_label" in record.rates for record in e.evals),
    lambda e: any("left_label_set" in record.rates for record in e.evals),
)
MEMORY_USE = Requirement("memory in use and its size", lambda e: speed.compute_memory_share(e)[0] is not None)
UTILISATION = Requirement(
    "utilisation of the devices", _make_device_predicate(lambda device: device.utilisation), _has_accelerator
)
MEMORY_TRAFFIC = Requirement(
    "the time in which device memory is read or written",
    _make_device_predicate(lambda device: device.memory_busy),
    _has_accelerator,
)
THROTTLING = Requirement(
    "why the clocks of the devices are lowered",
    _make_device_predicate(lambda device: device.throttled_share),
    _has_accelerator,
)
WORKER_ACTIVITY = Requirement(
    "the activity of each device or process", lambda e: bool(e.devices) or len(e.ranks) > 1, REQUESTED_DEVICES.applies
)

RULES = (
    Rule(faults.check_not_finite, "The loss or the gradient was not finite", WRONG, (STEP_RECORDS,)),
    Rule(faults.check_overflow, "Updates were skipped", WRONG, (STEP_RECORDS,)),
    Rule(
        faults.check_world_size,
        "Another number of processes trained than was requested",
        WRONG,
        (STEP_RECORDS, REQUESTED_DEVICES),
    ),
    Rule(faults.check_idle_device, "A device was idle", WRONG, (REQUESTED_DEVICES, WORKER_ACTIVITY)),
    Rule(
        faults.check_updates_below_precision, "The updates are too small to change the weights", WRONG, (STEP_RECORDS,)
    ),
    Rule(faults.check_frozen, "The weights do not change", WRONG, (EVALUATIONS,)),
    Rule(faults.check_padded_labels, "The loss counts padding", WRONG, (STEP_RECORDS, LABEL_COUNTS)),
    Rule(learning.check_diverged, "The training diverged", LEARNT, (STEP_RECORDS,)),
    Rule(learning.check_short_training, "The training was too short", LEARNT, (STEP_RECORDS, DATA_COUNTS)),
    Rule(truncation.check_truncated_targets, "Targets are cut", LEARNT, (DATA_COUNTS,)),
    Rule(truncation.check_lost_answers, "Answers are cut out of the inputs", LEARNT, (DATA_COUNTS,)),
    Rule(truncation.check_truncated_inputs, "Inputs are cut", LEARNT, (DATA_COUNTS,)),
    Rule(learning.check_majority_label, "One label is always predicted", LEARNT, (LABEL_RATES,)),
    Rule(learning.check_abstention, "The model does not answer", LEARNT, (EVALUATIONS,)),
    Rule(learning.check_over_fitting, "The model over-fits", LEARNT, (EVALUATIONS,)),
    Rule(speed.check_memory_full, "The memory is nearly full", AT_RISK, (MEMORY_USE,)),
    Rule(speed.check_shared_cores, "Other programs used the cores", DISTURBED, (HOST_LOAD,)),
    Rule(speed.check_input_bound, "Steps wait for data", SLOW, (STEP_TIMES,)),
    Rule(speed.check_host_bound, "The device waits for the host", SLOW, (PHASE_TIMES,)),
    Rule(speed.check_waiting_device, "The device waits", SLOW, (UTILISATION,)),
    Rule(speed.check_launch_bound, "Passes are too small for the device", SLOW, (FIXED_COST,)),
    Rule(speed.check_padding_bound, "Padding takes much of the time", SLOW, (STEP_TIMES,)),
    Rule(speed.check_communication_bound, "Steps wait for other processes", SLOW, (COMMUNICATION_TIME,)),
    Rule(speed.check_evaluation_bound, "Evaluations take much of the time", SLOW, (STEP_RECORDS,)),
    Rule(speed.check_checkpoint_bound, "Checkpoints take much of the time", SLOW, (STEP_RECORDS,)),
    Rule(speed.check_throttled, "The device lowers its clocks", SLOW, (THROTTLING,)),
    Rule(speed.check_memory_bandwidth_bound, "The device waits for its memory", SLOW, (MEMORY_TRAFFIC,)),
    Rule(speed.check_memory_empty, "Memory is unused", SLOW, (MEMORY_USE,)),
)

CUTS = ("truncated_targets", "lost_answers", "truncated_inputs")
CAUSES = ("diverged", "updates_below_precision", "frozen", "short_training", *CUTS)
"""Rules that explain why nothing was learnt, the first being the cause."""
CUT_OF_ALL = 0.5
"""Share of the examples that a cut must reach to explain it: the others are whole, and teach."""

TITLES = {rule.name: rule.title for rule in RULES}

SEVERE = {rule.name for rule in RULES if rule.kind in (WRONG, LEARNT)}

CONSEQUENCES = {
    "not_finite": {"diverged", "majority_label", "abstention", "over_fitting"},
    "diverged": {"frozen", "majority_label", "abstention", "over_fitting"},
}
"""Verdicts that another one explains, which is the one to act on."""


def is_severe(verdict: Verdict) -> bool:
    """Return whether results are invalid, or the goal of the training was missed."""
    return verdict.rule in SEVERE


def find_cause(verdicts: Iterable[Verdict]) -> str | None:
    """Find the rule of the verdict that explains why nothing was learnt; None if none does."""
    for verdict in verdicts:
        if verdict.rule in CAUSES and (verdict.rule not in CUTS or (verdict.figure or 0.0) >= CUT_OF_ALL):
            return verdict.rule
    return None


def find_verdicts(stats: RunStats) -> tuple[Verdict, ...]:
    """Return all verdicts, most important first: by kind, then by gain, then in the order of RULES.

    Without what another verdict explains, and without verdicts on speed where other programs distorted the times.
    """
    found: list[tuple[int, Verdict]] = []
    explained: set[str] = set()
    for rule in RULES:
        verdict = rule.check(stats)
        if verdict is not None:
            found.append((rule.kind, verdict))
            explained |= CONSEQUENCES.get(verdict.rule, set())
    is_distorted = any(kind == DISTURBED for kind, _ in found)
    found.sort(key=lambda pair: (pair[0], -(pair[1].gain or 0.0)))
    verdicts: list[Verdict] = []
    for kind, verdict in found:
        if verdict.rule in explained or (is_distorted and kind == SLOW):
            continue
        if stats.is_log:
            advice = LOG_ADVICE.get(verdict.rule, verdict.advice)
            verdict = replace(verdict, change={}, gain=None, advice=advice)
        verdicts.append(verdict)
    return tuple(verdicts)


def diagnose_run(run: Run, *, devices_requested: int | None = None) -> tuple[Verdict, ...]:
    """Return the verdicts on a run, finished or in progress.

    Args:
        devices_requested: requested number of devices, if the recipe does not contain it.
    """
    return find_verdicts(collect_run_stats(run, devices_requested=devices_requested))


def list_missing_data(stats: RunStats, verdicts: Iterable[Verdict]) -> dict[str, tuple[str, ...]]:
    """Return the missing data, each with the rules that require it.

    Args:
        verdicts: verdicts of `find_verdicts`; a rule whose verdict another check has returned is excluded, because low
            utilisation is reported as host_bound too.
    """
    given = {verdict.rule for verdict in verdicts}
    missing: dict[str, list[str]] = {}
    for rule in RULES:
        unknown = [need for need in rule.requirements if not need.is_known(stats)]
        if unknown and rule.name not in given and all(need.applies(stats) for need in rule.requirements):
            missing.setdefault(unknown[0].description, []).append(rule.name)
    return {description: tuple(rules) for description, rules in missing.items()}
