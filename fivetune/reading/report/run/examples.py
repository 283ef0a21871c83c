"""Examples to browse, and counts of predictions by outcome: the section on examples.

In: predictions. Out: Examples, Tables, and their Section. The choice of examples is deterministic: it depends on the
ids, not on their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

from fivetune.reading.compare.changes import compare_predictions
from fivetune.reading.report.page.parts import Example, Section, Table, Text, build_section
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_percent,
    format_plural,
    merge_repeats,
)
from fivetune.reading.report.run.scores import (
    choose_best_eval,
    find_baseline_eval,
    find_main_score_key,
    get_score_label,
)
from fivetune.rundir.records import Prediction, Run
from fivetune.scores.analysis.slices import DIMENSIONS

NUM_WORST, NUM_RANDOM = 200, 100
MAX_INPUT_CHARS = 2000
TAGS = ("truncation", "answerable", "language", "source task")
OUTCOMES = (
    ("right", "right"),
    ("near", "near miss (F1 of 0.5 or more)"),
    ("wrong answer", "wrong answer to an answerable question"),
    ("abstained", "no answer to an answerable question"),
    ("invented", "an answer to an unanswerable question"),
)


def build_run_examples_section(run: Run, lines: Sequence[Prediction]) -> Section:
    """Build the section: predictions by outcome, and single predictions with the lowest scores and random ones."""
    best = choose_best_eval(run)
    baseline = find_baseline_eval(run)
    if not lines:
        reason = "The best evaluation left no predictions in the run directory" if best else "No evaluation was made"
        return build_section("Examples", Text(f"{reason}, so there are no examples to show."))
    before = run.read_predictions(baseline) if baseline is not best else []
    lowest = select_worst(lines)
    others = sample(lines, lowest)
    words = (
        f"{format_plural(len(others), 'prediction')} drawn at random, of {format_count(len(lines))} at the best "
        "evaluation."
    )
    if lowest:
        words = f"The {format_count(len(lowest))} lowest scored that are not right, and {words}"
    return build_section(
        "Examples",
        build_outcomes_table(lines),
        build_changes_table(before, lines, find_main_score_key(run) or ""),
        Text("Single predictions", "heading"),
        Text(words),
        [build_example(line, "lowest scores") for line in lowest],
        [build_example(line, "random") for line in others],
    )


def compute_mean_score(prediction: Prediction) -> float | None:
    """Compute the mean of a prediction's scores (0-1), so that F1 breaks ties of exact match."""
    values = prediction.scores.values()
    return sum(values) / len(values) if values else None


def select_worst(predictions: Sequence[Prediction], num: int = NUM_WORST) -> list[Prediction]:
    """Select the wrong predictions with the lowest scores; ties are ordered by a hash of the id."""
    wrong: list[tuple[float, str, Prediction]] = []
    for prediction in predictions:
        value = compute_mean_score(prediction)
        if value is not None and value < 1:
            wrong.append((value, _compute_order_key(prediction, "worst"), prediction))
    wrong.sort(key=lambda one: one[:2])
    return [prediction for *_, prediction in wrong[:num]]


def sample(predictions: Sequence[Prediction], exclude: Sequence[Prediction], num: int = NUM_RANDOM) -> list[Prediction]:
    """Draw random predictions outside `exclude`, by a hash of the id."""
    shown = {p.id for p in exclude}
    others = [p for p in predictions if p.id not in shown]
    return sorted(others, key=lambda p: _compute_order_key(p, "sample"))[:num]


def _compute_order_key(prediction: Prediction, salt: str) -> str:
    return sha256(f"{salt}:{prediction.id}".encode("utf-8", "surrogatepass")).hexdigest()


def classify_outcome(prediction: Prediction) -> str | None:
    """Return the outcome (OUTCOMES) of a question-answering prediction; None without exact match and F1."""
    exact, f1 = prediction.scores.get("exact"), prediction.scores.get("f1")
    if exact is None or f1 is None:
        return None
    if exact == 1:
        return "right"
    if not any(prediction.references):  # no gold answer, or a blank one: an unanswerable question
        return "invented"
    if not prediction.prediction:
        return "abstained"
    return "near" if f1 >= 0.5 else "wrong answer"


def show_gold_answers(references: Sequence[str]) -> tuple[str, ...]:
    """Return the gold answers that are not blank, shortened and each once; () for an unanswerable question."""
    return tuple(merge_repeats(truncate_text(reference) for reference in references if reference))


def build_example(prediction: Prediction, reason: str) -> Example:
    """Build the Example of one prediction; `reason` is the reason for its choice."""
    value = compute_mean_score(prediction)
    scores = [f"{key} {format_decimal(score)}" for key, score in prediction.scores.items()]
    if prediction.confidence is not None:
        scores.append(f"confidence {format_decimal(prediction.confidence)}")
    if prediction.hit_cap:
        scores.append("cut off at the length cap")
    if value is None:
        verdict = "unscored"
    elif value == 1:
        verdict = "right"
    else:
        verdict = "near" if value >= 0.25 else "wrong"
    tags = {"chosen": reason}
    for name in TAGS:
        tag = DIMENSIONS[name](prediction)
        if tag is not None:
            tags[name] = tag
    return Example(
        id=prediction.id,
        inputs=truncate_text(prediction.inputs),
        prediction=truncate_text(prediction.prediction),
        references=show_gold_answers(prediction.references),
        verdict=verdict,
        remark=", ".join(scores) or "not scored",
        tags=tags,
    )


def truncate_text(text: str) -> str:
    """Truncate a text to MAX_INPUT_CHARS characters, and append the number of removed ones."""
    rest = len(text) - MAX_INPUT_CHARS
    if rest <= 0:
        return text
    return f"{text[:MAX_INPUT_CHARS]} ... ({format_count(rest)} more characters)"


def build_outcomes_table(predictions: Sequence[Prediction]) -> Table | None:
    """Build the table of number and share of each outcome."""
    counts = Counter(classify_outcome(prediction) for prediction in predictions)
    scored = sum(counts.values()) - counts[None]
    if not scored:
        return None
    rows = [(words, format_count(counts[key]), format_percent(counts[key] / scored)) for key, words in OUTCOMES]
    return Table("Predictions of the best evaluation by outcome.", ("outcome", "examples", "share"), rows)


def build_changes_table(before: Sequence[Prediction], after: Sequence[Prediction], metric: str) -> Table | None:
    """Build the table of examples in two evaluations: fixed, broken, right or wrong in both."""
    moves = compare_predictions(before, after, metric=metric)
    if moves is None:
        return None
    groups = {
        "fixed: wrong before, right now": moves.fixed,
        "broken: right before, wrong now": moves.broken,
        "right both times": moves.both_right,
        "wrong both times": moves.both_wrong,
    }
    total = sum(map(len, groups.values()))
    rows = [(words, format_count(len(one)), format_percent(len(one) / total)) for words, one in groups.items()]
    caption = (
        "The same examples before fine-tuning and at the best evaluation. Right means "
        f"{get_score_label(moves.score)} of 1."
    )
    return Table(caption, ("change", "examples", "share"), rows)
