"""Which evaluations and scores of a run count: the best, the baseline, and what each score is called.

In: a Run as read back. Out: EvalRecord tables of it, and names for their scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivetune import plugins, rundir
from fivetune.analysis.bootstrap import wilson
from fivetune.report.wording import fixed
from fivetune.types import Run
from fivetune.values import dig, number

Eval = dict[str, Any]

LABELS = {
    "exact": "Exact match",
    "f1": "F1",
    "HasAns_exact": "Answerable: exact match",
    "HasAns_f1": "Answerable: F1",
    "NoAns_exact": "Unanswerable: exact match",
    "NoAns_f1": "Unanswerable: F1",
    "best_exact": "Exact match at the best threshold",
    "best_f1": "F1 at the best threshold",
}
MEANS = (*(key for key in LABELS if not key.startswith("best")), "exact_match")
PARTS = {"HasAns": "HasAns_total", "NoAns": "NoAns_total"}

DEFINITIONS = {
    "exact": (
        "Exact match",
        "Share of predictions that equal one of the gold answers after the official normalisation "
        "(lower case; no punctuation, no articles a/an/the, single spaces).",
    ),
    "f1": (
        "F1",
        "Overlap of the words of prediction and gold answer: harmonic mean of precision and recall, the best of all "
        "gold answers, averaged over the questions. For an unanswerable question 1 if the prediction is empty, else 0.",
    ),
    "HasAns_exact": ("Answerable", "Scores over the questions that have an answer (HasAns in the official script)."),
    "NoAns_exact": (
        "Unanswerable",
        "Scores over the questions that have none: the share for which the model said so (NoAns).",
    ),
    "best_exact": (
        "Best threshold",
        "The score if questions whose no-answer score exceeds the best threshold were left unanswered; "
        "the threshold is chosen on the same questions, so it flatters.",
    ),
}


def label(key: str) -> str:
    """A score's name for people."""
    return LABELS.get(key, key.replace("_", " "))


def main_evals(run: Run) -> list[Eval]:
    """Evaluations of the run itself, one per step, in order; where a step has both, the whole set beats the subset."""
    return rundir.own_evals(run.evals)


def score(record: Eval | None, key: str) -> float | None:
    return number(dig(record, "scores", key))


def baseline_eval(run: Run) -> Eval | None:
    """The evaluation before the first step."""
    return next((record for record in main_evals(run) if record["step"] == 0), None)


def best_eval(run: Run) -> Eval | None:
    """The evaluation that the run itself names as its best; without such a word, the highest of the main score."""
    records = main_evals(run)
    named = rundir.best_eval(run.evals, dig(run.status, "best"))
    tuned = [record for record in records if record["step"] > 0] or records
    key = main_score(run)
    scored = [record for record in tuned if key and score(record, key) is not None]
    highest = max(scored, key=lambda record: score(record, key or "") or 0.0, default=None)
    return named or highest or next(reversed(tuned), None)


def main_score(run: Run) -> str | None:
    """Name of the score that decides: what the run says, else F1, else the first score there is."""
    keys = score_keys(main_evals(run))
    said = (dig(run.status, "best", "metric"), dig(run.config, "eval", "metric"), "f1")
    return next((key for key in said if key in keys), next(iter(keys), None))


def score_keys(records: Sequence[Eval]) -> list[str]:
    """Scores (no counts, no thresholds) that the evaluations hold; the known ones first, in their usual order."""
    present = {key: None for record in records for key in (dig(record, "scores") or {})}
    others = [key for key in present if key not in LABELS and not key.endswith(("total", "_thresh"))]
    return [key for key in LABELS if key in present] + others


def first_scores(run: Run, keys: Sequence[str]) -> list[str]:
    """Those of the scores that are shown large: of a mixture the mean and each part's main one, else the first six."""
    mains = ["mean", *(f"{part}_{main}" for part, main in _mains(dig(run.config, "task")).items())]
    return [key for key in mains if len(mains) > 1 and key in keys] or list(keys[:6])


def _mains(task: Any) -> dict[str, str]:
    """Main score of each part of a mixture; none for other tasks, or if these settings are no longer understood."""
    if dig(task, "name") != "mixture":
        return {}
    try:
        options = plugins.load("tasks", "mixture").model_validate({k: v for k, v in task.items() if k != "name"})
    except ValueError:
        return {}
    return options.metrics[0]["mains"]


def is_mean(key: str) -> bool:
    """Whether a score is known to be a mean over examples, whose number gives it an interval."""
    return key in MEANS


def points(value: float | None, digits: int = 2) -> str:
    """A score as printed: every metric gives points of 0-100."""
    return fixed(value, digits)


def num_scored(record: Eval, key: str) -> float | None:
    """How many examples a score is the mean of."""
    counter = PARTS.get(key.split("_")[0], "total")
    return score(record, counter) or (number(record.get("num_examples")) if counter == "total" else None)


def predictions_of(run: Run, record: Eval | None) -> list[dict[str, Any]]:
    """The predictions that an evaluation wrote."""
    if record is None:
        return []
    return run.predictions.get(f"{record.get('split')}-{record.get('step')}", [])


def score_of_lines(run: Run, lines: Sequence[dict[str, Any]]) -> str | None:
    """Which score of each prediction counts: the main one, where predictions have it, else the first that they have."""
    present = {key: None for line in lines for key in (dig(line, "scores") or {})}
    key = main_score(run)
    return key if key in present else next(iter(present), None)


def interval(record: Eval, key: str) -> tuple[float, float] | None:
    """95 % interval of a score in points: the bootstrap one that the evaluation wrote, else Wilson's for a mean."""
    written = dig(record, "intervals", key)
    edges = [number(edge) for edge in written] if isinstance(written, list | tuple) else []
    if len(edges) == 2 and edges[0] is not None and edges[1] is not None:
        return edges[0], edges[1]
    value, num = score(record, key), num_scored(record, key)
    if value is None or not num or not is_mean(key) or not 0 <= value <= 100:
        return None
    low, high = wilson(value / 100, num)
    return 100 * low, 100 * high


def summary(run: Run, *, beside: Sequence[Run] = ()) -> dict[str, Any]:
    """The headline of the page as one JSON table, for scripts."""
    best, baseline = best_eval(run), baseline_eval(run)
    return {
        "name": run.name,
        "state": dig(run.status, "state"),
        "metric": main_score(run),
        "best_step": dig(best, "step"),
        "scores": dig(best, "scores") or {},
        "baseline": dig(baseline, "scores") or {},
        "beside": {other.name: dig(best_eval(other), "scores") or {} for other in beside},
    }
