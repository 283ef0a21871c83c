"""One run of the board: its curves, and its predictions over the evaluations.

In: a run directory. Out: JSON with at most NUM_POINTS steps, MAX_EVALS evaluations and NUM_EXAMPLES examples, so that a
page stays small however long the run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fivetune import rundir
from fivetune.reading.report.live import sample_records
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.reading.report.run.examples import compute_mean_score, sample, truncate_text
from fivetune.reading.report.run.scores import (
    choose_best_eval,
    compute_score_interval,
    find_main_score_key,
    get_score_label,
    list_score_keys,
)
from fivetune.rundir.damage import Damage
from fivetune.rundir.reader import PredictionFiles
from fivetune.rundir.records import EvalRecord, Prediction, Run
from fivetune.types import JsonTable
from fivetune.values import select_finite

NUM_POINTS = 300  # of the loss curve
MAX_SCORES = 6  # columns of the table of evaluations
MAX_EVALS = 20  # whose predictions are read: a file may have 100,000
NUM_EXAMPLES = 300


def describe_curves(folder: Path, run: Run) -> JsonTable:
    """Describe the steps and the evaluations of a run.

    Args:
        run: as the list has read it, without its steps.
    """
    steps: list[tuple[float, float]] = []  # means of neighbouring steps
    for records in sample_records(folder / rundir.STEPS, NUM_POINTS):
        losses = select_finite([record.get("loss") for record in records])
        numbers = select_finite([record.get("step") for record in records])
        if losses and numbers:
            steps.append((fmean(numbers), fmean(losses)))

    metric = find_main_score_key(run)
    best = choose_best_eval(run)
    keys = list_score_keys(run.evals)
    if metric in keys:  # the score that counts comes first
        keys.remove(metric)
        keys.insert(0, metric)
    del keys[MAX_SCORES:]
    evals: list[JsonTable] = []
    for record in run.evals:
        shown = _describe_eval(record, keys)
        shown["is_best"] = record is best
        evals.append(shown)
    return {
        "metric": get_score_label(metric) if metric else "",
        "scores": [escape_hidden(get_score_label(key)) for key in keys],
        "steps": steps,
        "evals": evals,
        "warnings": [escape_hidden(text) for text in run.warnings],
    }


def _describe_eval(record: EvalRecord, keys: Sequence[str]) -> JsonTable:
    scores: list[JsonTable] = []
    for key in keys:
        interval = compute_score_interval(record, key)
        scores.append({"value": record.scores.get(key), "interval": interval})
    return {
        "step": record.step,
        "split": escape_hidden(record.split),
        "num_examples": record.num_examples,
        "seconds": record.seconds,
        "loss": record.loss,
        "scores": scores,
    }


def describe_predictions(folder: Path, run: Run) -> JsonTable:
    """Describe the answers of each evaluation to the same examples, which are drawn by a hash of their ids."""
    damage = Damage()
    chosen: dict[str, JsonTable] = {}
    answers: list[dict[str, list[object]]] = []
    evals: list[JsonTable] = []
    total = 0
    # The newest evaluation chooses the examples: it has all of them if any has. One file is in memory at a time.
    for record in reversed(select_evals(run)):
        files = PredictionFiles(folder, [record], {}, damage)
        lines = files[f"{record.split}-{record.step}"]
        if not lines:
            continue
        if not chosen:
            total = len(lines)
            for one in sample(lines, [], NUM_EXAMPLES):
                chosen[one.id] = _describe_example(one)
        evals.append({"step": record.step, "split": escape_hidden(record.split)})
        answers.append({one.id: _describe_answer(one) for one in lines if one.id in chosen})
    evals.reverse()
    answers.reverse()
    for key, example in chosen.items():
        example["answers"] = [given.get(key) for given in answers]
    return {
        "total": total,
        "evals": evals,
        "examples": list(chosen.values()),
        "damage": [escape_hidden(text) for text in damage],
    }


def select_evals(run: Run) -> list[EvalRecord]:
    """Select at most MAX_EVALS evaluations, evenly spaced, with the first, the best and the last; each file once."""
    by_file = {(record.split, record.step): record for record in run.evals}
    evals = list(by_file.values())
    if len(evals) <= MAX_EVALS:
        return evals
    best = choose_best_eval(run)
    num_even = MAX_EVALS - 1  # one place is for the best
    spacing = (len(evals) - 1) / (num_even - 1)
    places = {round(i * spacing) for i in range(num_even)}
    selected: list[EvalRecord] = []
    for place, record in enumerate(evals):
        if place in places or record is best:
            selected.append(record)
    return selected


def _describe_example(one: Prediction) -> JsonTable:
    return {
        "id": escape_hidden(one.id),
        "inputs": escape_hidden(truncate_text(one.inputs)),
        "references": [escape_hidden(truncate_text(text)) for text in one.references],
    }


def _describe_answer(one: Prediction) -> list[object]:
    """Describe an answer as [text, score 0-1, confidence 0-1]; null where unknown."""
    text = one.skipped or truncate_text(one.prediction)
    return [escape_hidden(text), compute_mean_score(one), one.confidence]
