"""The evaluations of a run, best and baseline, and its scores: labels, definitions, intervals.

In: a Run. Out: its evaluations, and labels for their scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fivetune.reading.compare.measures import find_best_metric_eval, get_score
from fivetune.rundir.figures import find_own_eval, select_current_evals, select_evals_by_step
from fivetune.rundir.records import EvalRecord, Prediction, Run
from fivetune.scores.analysis.bootstrap import compute_wilson_interval
from fivetune.scores.metrics import is_selectable_score
from fivetune.tasks import load_run_task
from fivetune.values import get_nested

LABELS = {
    "exact": "Exact match",
    "f1": "F1",
    "HasAns_exact": "Answerable: exact match",
    "HasAns_f1": "Answerable: F1",
    "NoAns_exact": "Unanswerable: exact match",
    "NoAns_f1": "Unanswerable: F1",
    "mlqa_exact": "Exact match (MLQA rules)",
    "mlqa_f1": "F1 (MLQA rules)",
    "korquad_exact": "Exact match (KorQuAD rules)",
    "korquad_f1": "F1 (KorQuAD rules)",
    "best_exact": "Exact match at the best threshold",
    "best_f1": "F1 at the best threshold",
}
MEANS = (*(key for key in LABELS if not key.startswith("best")), "exact_match")
LABEL_SCORES = ("accuracy", "exact_match")  # main scores to which always giving the most frequent label compares
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
        "Scores over the questions that have none: the share that the model left unanswered (NoAns).",
    ),
    "mlqa_exact": (
        "MLQA rules",
        "Exact match and F1 with MLQA's normalisation, which drops the articles of the question's language (Spanish: "
        "un, una, el, la, ...) where SQuAD's drops a/an/the, and compares Chinese character by character.",
    ),
    "korquad_exact": (
        "KorQuAD rules",
        "Exact match and F1 with KorQuAD's normalisation, which keeps all words; F1 is over characters, not words.",
    ),
    "best_exact": (
        "Best threshold",
        "The score if questions whose no-answer score exceeds the best threshold were left unanswered; "
        "the threshold is chosen on the same questions, so this is an upper bound.",
    ),
}


def get_score_label(key: str) -> str:
    """Return the printed name of a score; an unknown key without underscores."""
    return LABELS.get(key, key.replace("_", " "))


def find_baseline_eval(run: Run) -> EvalRecord | None:
    """Find the evaluation before the first step; None if a resume changed the evaluation data or settings since."""
    return find_own_eval(select_current_evals(run.evals), 0)


def choose_best_eval(run: Run) -> EvalRecord | None:
    """Choose the evaluation that status.json names as the best; without it, the best by the main score.

    Without any score, the last evaluation; None without evaluations.
    """
    key = find_main_score_key(run)
    if key:
        return find_best_metric_eval(run, key)
    evals = select_evals_by_step(run.evals)
    return evals[-1] if evals else None


def find_main_score_key(run: Run) -> str | None:
    """Find the score that chooses the best checkpoint: of status.json, the settings, else F1, else the first score.

    None without scores.
    """
    keys = list_score_keys(select_evals_by_step(run.evals))
    best = run.status.best
    for key in (best.metric if best else None, get_nested(run.config, "eval", "metric"), "f1"):
        if key in keys:
            return key
    return keys[0] if keys else None


def list_score_keys(records: Sequence[EvalRecord]) -> list[str]:
    """List the scores of evaluations without counts and thresholds; those of LABELS first, in their order."""
    present: dict[str, float] = {}
    for record in records:
        present |= record.scores
    others = [key for key in present if key not in LABELS and is_selectable_score(key)]
    return [key for key in LABELS if key in present] + others


def select_headline_scores(run: Run, keys: Sequence[str]) -> list[str]:
    """Select the scores of the key figures: of a mixture the mean and each part's main score, else the first six."""
    mains: list[str] = []
    if get_nested(run.config, "task", "name") == "mixture":
        task = load_run_task(run.config)  # None for a task that this version refuses
        metric = task.metrics[0] if task else None
        if isinstance(metric, Mapping):
            mains = ["mean", *(f"{part}_{main}" for part, main in metric["mains"].items())]
    return [key for key in mains if key in keys] or list(keys[:6])


def find_line_score_key(run: Run, lines: Sequence[Prediction]) -> str | None:
    """Find the score of single predictions (0-1) that sections use: the main one if they have it, else their first.

    None if no prediction has a score.
    """
    present: dict[str, float] = {}
    for line in lines:
        present |= line.scores
    key = find_main_score_key(run)
    return key if key in present else next(iter(present), None)


def compute_score_interval(record: EvalRecord, key: str) -> tuple[float, float] | None:
    """Compute the 95 % interval of a score in points: the evaluation's bootstrap interval, else Wilson's for a mean.

    None for scores that are no means: unlike the diagnosis's `compute_eval_interval`, which needs one of every score.
    """
    written = record.intervals.get(key)
    if written is not None:
        return written
    value = get_score(record, key)
    counter = PARTS.get(key.split("_")[0], "total")
    num = get_score(record, counter) or (record.num_examples if counter == "total" else None)
    if value is None or not num or key not in MEANS or not 0 <= value <= 100:
        return None
    low, high = compute_wilson_interval(value / 100, num)
    return 100 * low, 100 * high


def get_best_scores(run: Run) -> dict[str, float]:
    """Return the scores of the best evaluation in points; {} without one."""
    best = choose_best_eval(run)
    return best.scores if best else {}


def build_run_summary(run: Run, *, reference_runs: Sequence[Run] = ()) -> dict[str, Any]:
    """Build the headline of the page as one JSON table, for scripts; scores are in points."""
    best = choose_best_eval(run)
    baseline = find_baseline_eval(run)
    return {
        "name": run.name,
        "state": run.status.state or None,
        "metric": find_main_score_key(run),
        "best_step": best.step if best else None,
        "scores": best.scores if best else {},
        "baseline": baseline.scores if baseline else {},
        "beside": {other.name: get_best_scores(other) for other in reference_runs},
    }
