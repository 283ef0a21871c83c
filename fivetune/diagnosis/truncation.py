"""Rules about length limits: answers cut out of the inputs, inputs and targets cut short.

In: the counts of data.json by split. Out: Verdicts with the limit that fits. Pre-flight reports the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fivetune.diagnosis.stats import RunStats
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
    lost = {name: one.num_answers_lost for name, one in splits.items()}
    clipped = {name: one.num_examples_clipped for name, one in splits.items()}
    limit = next((one.max_input_tokens for one in splits.values()), None)
    if _find_largest_share(lost, splits) > LOST_SHARE:
        windows = "read contexts in windows (data.overlong: windows)"
        way = windows if extractive else "keep both ends (data.overlong: head_tail)"
        yield _build_verdict(
            "lost_answers",
            f"The limit of {limit:,} input tokens cuts the answer out of the input: {_list_shares(lost, splits)}.",
            _find_largest_share(lost, splits),
            LOST_SHARE,
            _suggest_limit(splits, "input"),
            f" T5 has no fixed limit. Where memory does not allow it, {way}.",
        )
    elif not extractive and _find_largest_share(clipped, splits) > INPUT_SHARE:
        yield _build_verdict(
            "truncated_inputs",
            f"Inputs are cut at {limit:,} tokens: {_list_shares(clipped, splits)}.",
            _find_largest_share(clipped, splits),
            INPUT_SHARE,
            _suggest_limit(splits, "input"),
            " T5 has no fixed limit. Where memory does not allow it, keep both ends (data.overlong: head_tail).",
        )
    cut = {name: one.num_clipped_targets for name, one in splits.items()}
    if _find_largest_share(cut, splits) > LOST_SHARE:
        limit = next((one.max_target_tokens for one in splits.values()), None)
        yield _build_verdict(
            "truncated_targets",
            f"Targets are cut at {limit:,} tokens, and the model learns the cut: {_list_shares(cut, splits)}.",
            _find_largest_share(cut, splits),
            LOST_SHARE,
            _suggest_limit(splits, "target"),
            "",
        )


def _build_verdict(
    rule: str, message: str, figure: float, threshold: float, change: Mapping[str, Any], more: str
) -> Verdict:
    key, limit = next(iter(change.items()))
    fits = "" if limit is None else f" to {limit:,}, which keeps {FITTING_SHARE} whole"
    return Verdict(
        rule=rule,
        message=message,
        figure=figure,
        threshold=threshold,
        confidence=0.95,
        change={} if limit is None else change,
        advice=f"Raise {key}{fits}.{more}",
    )


def _suggest_limit(splits: Mapping[str, SplitSummary], kind: str) -> dict[str, int | None]:
    """Return the setting with the limit that fits all splits; None for data that an earlier version converted."""
    whole = [one.whole_input_p99 if kind == "input" else one.whole_target_p99 for one in splits.values()]
    known = [length for length in whole if length is not None]
    blocks = -(-max(known) // BLOCK) if len(known) == len(whole) else None
    return {f"data.max_{kind}_tokens": blocks and blocks * BLOCK}


def _find_largest_share(counts: Mapping[str, int | None], splits: Mapping[str, SplitSummary]) -> float:
    return max(((num or 0) / max(splits[name].num_examples or 0, 1) for name, num in counts.items()), default=0.0)


def _list_shares(counts: Mapping[str, int | None], splits: Mapping[str, SplitSummary]) -> str:
    """List by split: 640 of 716 in train (89.4 %), 12 of 80 in eval (15.0 %)."""
    return ", ".join(
        f"{num:,} of {total:,} in {name} ({100 * num / total:.1f} %)"
        for name, num in counts.items()
        if num and (total := splits[name].num_examples)
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
    return next((one for one in find_cuts(stats.splits, extractive=stats.extractive) if one.rule == rule), None)
