"""Efficiency of runs on several devices against one, and what is lost by phase of the step.

In: Variants with the measures of their runs. Out: shares (0-1); None or {} without a one-device run to compare with.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fivetune.reading.compare.records import Variant
from fivetune.reading.compare.variants import select_work_settings
from fivetune.rundir.figures import compute_examples_per_second, compute_phase_shares
from fivetune.rundir.records import Run
from fivetune.types import PHASES

PARALLELISM_KEYS = ("launch.", "strategy.")  # number of devices, and division of the work
BATCH_KEYS = ("train.batch_size", "train.global_batch_size")  # may grow with the devices
OTHER = "other"  # the part of a step that no phase measures


def find_one_device_runs(run: Run, variants: Sequence[Variant]) -> list[Run]:
    """Return the runs on one device with the settings of `run`.

    Those with another batch size count only if none has the same batch size.
    """
    alone: list[Run] = []
    for variant in variants:
        alone += [other for other in variant.runs if _count_processes(other) == 1]
    # A batch that grows with the devices is the next best: the same work per device.
    for ignored in (PARALLELISM_KEYS, PARALLELISM_KEYS + BATCH_KEYS):
        own = _exclude_settings(ignored, run)
        found = [other for other in alone if _exclude_settings(ignored, other) == own]
        if found:
            return found
    return []


def _count_processes(run: Run) -> int:
    return max((step.world_size for step in run.steps), default=0)


def _exclude_settings(ignored: tuple[str, ...], run: Run) -> dict[str, object]:
    return {key: value for key, value in select_work_settings(run).items() if not key.startswith(ignored)}


def compute_scaling_efficiency(run: Run, reference: Sequence[Run]) -> float | None:
    """Compute examples per second / (processes x the median of one-device runs); None for one process."""
    size = _count_processes(run)
    rate = compute_examples_per_second(run.steps)
    rates = [compute_examples_per_second(one.steps) for one in reference]
    known = [each for each in rates if each]
    if size < 2 or rate is None or not known:
        return None
    return rate / (size * statistics.median(known))


def compute_scaling_losses(runs: Sequence[Run], reference: Sequence[Run], efficiency: float) -> dict[str, float]:
    """Divide 1 - efficiency among the phases of the step.

    With n devices an example takes t_n seconds, on one device t_1; the efficiency is E = t_1 / (n t_n). Ideally every
    phase p takes 1 / n of its time on one device, so its loss as a share of t_n is s_n(p) - E s_1(p), where s(p) is the
    phase's share of a step. The sum over all phases is 1 - E. The loss of a phase that is faster than this is negative.

    Args:
        runs: runs of one variant, on several devices.
        reference: runs on one device, with the same settings.
        efficiency: scaling efficiency of the variant (0-1).
    """
    means: list[dict[str, float]] = []
    for side in (runs, reference):
        each = [compute_phase_shares(run.steps) for run in side]
        if not each or not all("forward" in shares for shares in each):  # without measured phases
            return {}
        mean: dict[str, float] = {}
        for phase in dict.fromkeys(phase for shares in each for phase in shares):
            mean[phase] = statistics.fmean(shares.get(phase, 0.0) for shares in each)
        mean[OTHER] = 1.0 - sum(mean.values())
        means.append(mean)
    ours, alone = means
    losses: dict[str, float] = {}
    for phase in (*PHASES, OTHER):
        if phase in ours or phase in alone:
            losses[phase] = ours.get(phase, 0.0) - efficiency * alone.get(phase, 0.0)
    return losses
