"""The proof of an export: what it answers and how fast, against the run that it was made from.

In: a run and its export, both open. Out: a table for export.json with a verdict: "use", or "do not use" or "not proved"
and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fivetune.rundir.progress import ProgressCallback
from fivetune.scores.analysis.bootstrap import compare_paired, compute_intervals
from fivetune.scores.metrics import Scorer, is_maximized
from fivetune.training.answers.evaluator import Evaluator, select_rows, select_subset
from fivetune.training.answers.tally import Tally
from fivetune.training.answers.trained_run import TrainedRun
from fivetune.types import Scores

if TYPE_CHECKING:
    from fivetune.types import JsonTable

BATCH_SIZES = (1, 8, 32)
MIN_CALLS, MAX_SECONDS = 5, 20.0  # per batch size and side; the calls end with the first that reaches the seconds
SIDES = ("original", "export")


@dataclass(frozen=True, slots=True)
class Side:
    """A run or its export, with the evaluator of its data."""

    trained: TrainedRun
    evaluator: Evaluator

    def answer(self, rows: Sequence[int], batch_size: int) -> None:
        """Compute the answers to some rows, as `predict` does."""
        own = next(iter(self.evaluator.parts.values()), self.evaluator)
        decoding = replace(own.decoding, batch_size=batch_size, score_targets=False)
        for _ in own.generate(
            self.trained.loaded.model, own.store, rows, decoding, device=own.device, autocast=own.autocast
        ):
            pass


def compare_export(
    original: TrainedRun,
    exported: TrainedRun,
    *,
    num_examples: int,
    compares_speed: bool,
    on_progress: ProgressCallback,
) -> JsonTable:
    """Compare an export with its run on a sample of the run's evaluation data.

    Args:
        num_examples: questions of the sample.
        compares_speed: whether another engine answers, so that the speed may differ.

    Raises DataError if the run has no evaluation data.
    """
    sides = [Side(one, one.loaded.build_evaluator(on_progress=on_progress)) for one in (original, exported)]
    evaluator = sides[0].evaluator
    # The same questions for both, with the metric that the run was chosen by.
    questions = select_subset(evaluator.store, num_examples)
    answers, score = _answer(sides[0], questions, on_progress)
    other_answers, other_score = _answer(sides[1], questions, on_progress)
    num_same = sum(other_answers[question] == text for question, text in answers.items())
    metric = original.loaded.config.eval.metric or evaluator.task.main_metric
    proof: JsonTable = {
        "examples": len(answers),
        "identical_predictions": num_same / len(answers),
        "metric": metric,
        **_compare_scores(score, other_score, metric),
        "precision": original.loaded.compute.precision,
        "device": original.loaded.compute.name,
        "speed": [],
    }
    # Timed on the same rows; whole batches only, so that both sides compute as much.
    if compares_speed:
        first = next(iter(evaluator.parts.values()), evaluator)
        rows = select_rows(first.store, None if evaluator.parts else questions).tolist()[: max(num_examples, 1)]
        for batch_size in BATCH_SIZES:
            if batch_size <= len(rows):
                on_progress(f"measuring batches of {batch_size}", 0, None)
                proof["speed"].append({"batch_size": batch_size, **_compare_speed(sides, rows, batch_size)})
    higher = is_maximized(evaluator.task.metrics, metric) if score else True
    return proof | choose_verdict(proof, higher_is_better=higher)


def _answer(
    side: Side, questions: Sequence[int] | None, on_progress: ProgressCallback
) -> tuple[dict[int, str], Scores | None]:
    """Answer the questions; returns the predictions by number of the question, and their scores if they have any."""
    tally = Tally(Scorer(side.evaluator.task.metrics))
    name = "export" if side.trained.is_export else "original"

    def report(done: int, total: int) -> None:
        on_progress(f"answering ({name})", done, total)

    answered = list(side.evaluator.predict(side.trained.loaded.model, questions=questions, on_progress=report))
    for _ in tally.score_each(answered):
        pass
    return {question: prediction.prediction for question, prediction in answered}, tally.compute_scores()


def _compare_scores(before: Scores | None, after: Scores | None, metric: str) -> JsonTable:
    """Both scores with their 95 % intervals, and export - original by a paired bootstrap; {} without references."""
    if before is None or after is None:
        return {}
    found: JsonTable = {}
    for name, one in zip(SIDES, (before, after), strict=True):
        interval = compute_intervals(one, names=[metric]).get(metric)
        found[name] = {"score": one.corpus[metric], "interval": interval}
    found["difference"] = None
    difference = compare_paired(after, before, names=[metric]).get(metric)
    if difference:
        interval = [difference.low, difference.high]
        found["difference"] = {"score": difference.difference, "interval": interval, "p_value": difference.p_value}
    return found


def _compare_speed(sides: Sequence[Side], rows: Sequence[int], batch_size: int) -> JsonTable:
    """Measure both sides on the same batches, interleaved A B B A after a call of each that is not counted."""
    calls: list[list[Callable[[], object]]] = []
    for start in range(0, len(rows) - batch_size + 1, batch_size):
        batch = rows[start : start + batch_size]
        calls.append([partial(side.answer, batch, batch_size) for side in sides])
    seconds = time_calls(calls)
    return {name: summarise_seconds(own, batch_size) for name, own in zip(SIDES, seconds, strict=True)}


def time_calls(
    calls: Sequence[Sequence[Callable[[], object]]], *, max_seconds: float = MAX_SECONDS
) -> tuple[list[float], list[float]]:
    """Time pairs of calls, the second first in every other pair; returns the seconds of the calls of each side.

    The pairs are repeated until there are MIN_CALLS, and end early after `max_seconds` per side.
    """
    for call in calls[0]:
        call()
    seconds: tuple[list[float], list[float]] = ([], [])
    for number, pair in enumerate(islice(cycle(calls), max(len(calls), MIN_CALLS))):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            started = time.perf_counter()
            pair[side]()
            seconds[side].append(time.perf_counter() - started)
        if number + 1 >= MIN_CALLS and sum(map(sum, seconds)) > 2 * max_seconds:
            break
    return seconds


def summarise_seconds(seconds: Sequence[float], batch_size: int) -> JsonTable:
    """Summarise the seconds of calls: latency in ms, examples per second.

    >>> summarise_seconds([0.1, 0.3], 8)["examples_per_second"], summarise_seconds([0.1, 0.3], 8)["p50_ms"]
    (40.0, 200.0)
    """
    p50, p99 = (1000 * np.percentile(seconds, (50, 99))).tolist()
    return {
        "calls": len(seconds),
        "p50_ms": round(p50, 3),
        "p99_ms": round(p99, 3),
        "examples_per_second": round(batch_size * len(seconds) / sum(seconds), 3),
    }


def choose_verdict(proof: JsonTable, *, higher_is_better: bool = True) -> JsonTable:
    """Return the verdict and its reasons; other predictions without a score that shows what they cost prove nothing."""
    if reasons := find_reasons(proof, higher_is_better=higher_is_better):
        return {"verdict": "do not use", "reasons": reasons}
    if proof.get("difference") or proof["identical_predictions"] == 1:
        return {"verdict": "use", "reasons": []}
    return {"verdict": "not proved", "reasons": ["predictions differ, and without references there is no score"]}


def find_reasons(proof: JsonTable, *, higher_is_better: bool = True) -> list[str]:
    """Find reasons against an export: a worse score beyond its paired interval, or slower at every batch size.

    >>> find_reasons({"metric": "f1", "difference": {"score": -3.0, "interval": [-5.0, -1.0]}, "speed": []})
    ['f1 differs by -3.00 (95 % interval -5.00 to -1.00)']
    """
    reasons: list[str] = []
    difference = proof.get("difference")
    if difference:
        low, high = difference["interval"]
        is_worse = high < 0 if higher_is_better else low > 0
        if is_worse:
            change = f"{difference['score']:+.2f} (95 % interval {low:+.2f} to {high:+.2f})"
            reasons.append(f"{proof['metric']} differs by {change}")
    slower: list[str] = []
    for one in proof["speed"]:
        before, after = (one[name]["examples_per_second"] for name in SIDES)
        if after < before:
            slower.append(str(one["batch_size"]))
    if slower and len(slower) == len(proof["speed"]):
        reasons.append(f"slower than the original at batches of {', '.join(slower)}")
    return reasons


def count_bytes(folder: Path) -> int:
    """Count the bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
