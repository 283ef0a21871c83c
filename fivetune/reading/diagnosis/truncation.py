"""Rules about length limits: answers cut out of the inputs, inputs and targets cut short.

In: the counts of data.json by split. Out: Verdicts with the limit that fits. Pre-flight reports the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fivetune.reading.diagnosis.stats import RunStats
from fivetune.rundir.records import SplitSummary
from fivetune.types import Verdict

INPUT_SHARE = 0.05
"""Share of shortened inputs from which on the model lacks evidence, where the whole input is evidence. Of an extractive
task only the answer counts, which LOST_SHARE judges."""
LOST_SHARE = 0.01
"""Share of examples whose answer was cut out of the input, or of targets that were cut: they teach something wrong."""
FITTING_SHARE = "99 %"  # of the texts are whole under the suggested limit
BLOCK = 8  # suggested limits are multiples of it


def find_cuts(splits: Mapping[str, SplitSummary], *, extractive: bool) -> Iterator[Verdict]:
    """Yield what the length limits cut, above the tolerated shares: of the inputs, then of the targets.

    Args:
        splits: counts by name, "train" first.
        extractive: answers are parts of the inputs, so a shortened input that holds its answer is enough.
    """
    memory = " T5 has no fixed limit. Where memory does not allow it,"
    windows = "read contexts in windows (data.overlong: windows)"
    both_ends = "keep both ends (data.overlong: head_tail)"
    lost = _describe_shares({name: one.num_answers_lost for name, one in splits.items()}, splits, LOST_SHARE)
    clipped = _describe_shares({name: one.num_examples_clipped for name, one in splits.items()}, splits, INPUT_SHARE)
    cut = _describe_shares({name: one.num_clipped_targets for name, one in splits.items()}, splits, LOST_SHARE)
    if lost:
        words, share = lost
        message = f"The limit of the inputs cuts the answer out of {words}."
        way = f"{memory} {windows if extractive else both_ends}."
        yield _build_verdict("lost_answers", message, share, LOST_SHARE, "input", splits, way)
    elif clipped and not extractive:
        words, share = clipped
        way = f"{memory} {both_ends}."
        message = f"The limit of the inputs cuts {words}."
        yield _build_verdict("truncated_inputs", message, share, INPUT_SHARE, "input", splits, way)
    if cut:
        words, share = cut
        message = f"The limit of the targets cuts {words}, and the model learns the cut."
        yield _build_verdict("truncated_targets", message, share, LOST_SHARE, "target", splits, "")


def _describe_shares(
    counts: Mapping[str, int | None], splits: Mapping[str, SplitSummary], threshold: float
) -> tuple[str, float] | None:
    """Describe by split what is cut: 640 of 716 in train (89.4 %), 12 of 80 in eval (15.0 %); None if little is.

    Returns the description and the largest share.
    """
    totals = {name: max(splits[name].num_examples or 0, num or 0) for name, num in counts.items()}
    shares = {name: num / totals[name] for name, num in counts.items() if num}
    if max(shares.values(), default=0.0) <= threshold:
        return None
    words = [f"{counts[name]:,} of {totals[name]:,} in {name} ({100 * share:.1f} %)" for name, share in shares.items()]
    return ", ".join(words), max(shares.values())


def _build_verdict(
    rule: str, message: str, share: float, threshold: float, kind: str, splits: Mapping[str, SplitSummary], more: str
) -> Verdict:
    """Build a verdict with the limit that fits all splits, if their lengths before clipping are known."""
    is_input = kind == "input"
    whole = [one.whole_input_p99 if is_input else one.whole_target_p99 for one in splits.values()]
    known = [length for length in whole if length is not None]
    first = next(iter(splits.values()))
    now = first.max_input_tokens if is_input else first.max_target_tokens
    key = f"data.max_{kind}_tokens"
    advice = f"Raise {key}"
    if now:
        advice += f" from {now:,}"
    change: dict[str, int] = {}
    if len(known) == len(whole):
        limit = -(-max(known) // BLOCK) * BLOCK
        change[key] = limit
        advice += f" to {limit:,}, which keeps {FITTING_SHARE} whole"
    return Verdict(
        rule=rule,
        message=message,
        figure=share,
        threshold=threshold,
        confidence=0.95,
        change=change,
        advice=f"{advice}.{more}",
    )


def check_lost_answers(stats: RunStats) -> Verdict | None:
    """The input limit cuts answers out of the inputs."""
    return _find_cut(stats, "lost_answers")


def check_truncated_inputs(stats: RunStats) -> Verdict | None:
    """The input limit shortens inputs that are the evidence for the answer."""
    return _find_cut(stats, "truncated_inputs")


def check_truncated_targets(stats: RunStats) -> Verdict | None:
    """The target limit cuts what the model is to write."""
    return _find_cut(stats, "truncated_targets")


def _find_cut(stats: RunStats, rule: str) -> Verdict | None:
    for verdict in find_cuts(stats.splits, extractive=stats.extractive):
        if verdict.rule == rule:
            return verdict
    return None
