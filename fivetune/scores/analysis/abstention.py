"""When a model stays silent: the confidence from which on its answers keep a promised share of errors.

In: the model's own probability of each answer of an evaluation, and whether the answer is wrong. Out: counts by level
of probability, and the lowest level that keeps a promise.

Selective prediction (Geifman and El-Yaniv 2017) with a bound: let R(t) be the share of wrong answers among those with
p >= t, on data like the evaluation's. "At most a" is to hold with a confidence of 95 %, although the level is chosen on
the same data. Learn then Test (Angelopoulos et al. 2021) turns the choice into a sequence of tests: the levels t are
fixed beforehand; from the strictest one down, the hypothesis R(t) > a is rejected as long as

    P(Binomial(n_t, a) <= k_t) <= 0.05        n_t answers with p >= t, k_t of them wrong

which is where the upper bound of Clopper and Pearson (1934) is at most a. The first level that is not rejected ends the
sequence, and the last one before it is chosen. A wrong choice needs the first false level to be rejected, which has a
probability of 5 % at most, so that no correction for many tests is needed (fixed-sequence testing). Levels with too few
answers to be rejected are passed over, which needs that R does not fall where t does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fivetune.errors import ConfigError
from fivetune.rundir.abstention_file import Abstention, Level
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.calibration import apply_temperature, expit
from fivetune.types import JsonTable

ALPHA = 0.05  # probability that the promise is broken
GRID = np.append(expit(np.arange(18, -36.25, -0.25)), 0.0)  # levels of probability: equal steps of log-odds
SPARE_ERRORS = (2, 1)  # wrong answers with which the first level may pass, where the evaluation is large enough
FIRST_SHARE = 0.25  # of all answers, which the first level has at least
RIGHT_OR_WRONG = ("exact", "exact_match", "accuracy")  # scores of 0 or 1, in place of a graded main score
ANSWER_SETTINGS = ("data.max_input_tokens", "data.max_target_tokens", "data.overlong")


# --- the test ---


def compute_tail(wrong: int, answered: int, share: float) -> float:
    """Compute P(Binomial(answered, share) <= wrong), for a share above 0 and below 1.

    >>> round(compute_tail(0, 59, 0.05), 4), round(compute_tail(1, 2, 0.5), 4)
    (0.0485, 0.75)
    """
    k = np.arange(wrong + 1)
    # log C(n, k) from log C(n, k - 1): there is no factorial that overflows.
    choices = np.concatenate([[0.0], np.cumsum(np.log(answered - k[:-1]) - np.log(k[1:]))])
    terms = choices + k * math.log(share) + (answered - k) * math.log1p(-share)
    return min(float(np.exp(terms).sum()), 1.0)


def compute_upper_bound(wrong: int, answered: int) -> float:
    """Compute the upper bound of a share of errors with a confidence of 95 % (Clopper and Pearson 1934, one-sided).

    >>> round(compute_upper_bound(0, 59), 3), round(compute_upper_bound(5, 100), 3), compute_upper_bound(3, 3)
    (0.05, 0.102, 1.0)
    """
    if wrong >= answered:
        return 1.0
    low = wrong / answered
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if compute_tail(wrong, answered, middle) > ALPHA:
            low = middle
        else:
            high = middle
    return high


def count_answers(probabilities: Sequence[float], wrong: Sequence[bool]) -> tuple[Level, ...]:
    """Count answers and errors from each level of GRID on; of levels with the same answers the lowest is listed.

    >>> [(level.answered, level.wrong) for level in count_answers([0.9, 0.99, 0.5], [False, False, True])]
    [(1, 0), (2, 0), (3, 1)]
    """
    known = np.asarray(probabilities, dtype=float)
    order = np.argsort(-known, kind="stable")
    # How many answers reach each level, and how many of the first n are wrong.
    answered: NDArray[np.intp] = np.searchsorted(-known[order], -GRID, side="right")
    errors = np.concatenate([[0], np.cumsum(np.asarray(wrong, dtype=int)[order])])
    is_last = np.append(answered[1:] > answered[:-1], True) & (answered > 0)
    levels: list[Level] = []
    for probability, num in zip(GRID[is_last].tolist(), answered[is_last].tolist(), strict=True):
        levels.append(Level(probability, num, int(errors[num])))
    return tuple(levels)


def choose_level(levels: Sequence[Level], max_error: float) -> Level | None:
    """Choose the lowest level that keeps a promise; None if none does.

    Args:
        max_error: promised share of errors, above 0 and below 1.
    """
    least = _count_first(levels[-1].answered, max_error)
    chosen = None
    for level in levels:
        if level.answered < least:
            continue
        if compute_tail(level.wrong, level.answered, max_error) > ALPHA:
            break
        chosen = level
    return chosen


def count_needed(levels: Sequence[Level], max_error: float) -> int | None:
    """Estimate how many predictions an evaluation needs for a promise, if the errors at some level stay as measured.

    None if no level with enough answers has fewer errors than promised.

    >>> count_needed([Level(0.9, 30, 0), Level(0.0, 40, 4)], 0.05)  # 59 answers, as 3 of 4 predictions have
    79
    """
    total = levels[-1].answered
    found: list[int] = []
    for level in levels:
        if level.answered < FIRST_SHARE * total or level.wrong >= max_error * level.answered:
            continue
        factor = 1.0
        while compute_tail(round(level.wrong * factor), math.ceil(level.answered * factor), max_error) > ALPHA:
            factor *= 1.02
        found.append(math.ceil(total * factor))
    return min(found, default=None)


def _count_passing(wrong: int, max_error: float) -> int:
    """Count the answers with which so many errors still keep a promise."""
    num = wrong + 1
    while compute_tail(wrong, num, max_error) > ALPHA:
        num = math.ceil(num * 1.01)
    return num


def _count_first(num: int, max_error: float) -> int:
    """Count the answers of the first level that is tested, by the number of predictions alone.

    A quarter of them, and enough for an error or two: the first test that fails ends the sequence, and with few
    answers one error by chance fails it.
    """
    for spare in SPARE_ERRORS:
        least = _count_passing(spare, max_error)
        if 2 * least <= num:
            return max(least, math.ceil(FIRST_SHARE * num))
    return _count_passing(0, max_error)


# --- from predictions to a level ---


def find_error_score(lines: Sequence[Prediction], metric: str, *, is_graded: bool = False) -> str | None:
    """Find the score of each prediction that says whether it is wrong: `metric`, or one that is 0 or 1 in its place.

    Args:
        is_graded: whether values between 0 and 1 are allowed.

    None if there is none.
    """
    names = (metric,) if is_graded else (metric, *RIGHT_OR_WRONG)
    for name in names:
        values = {line.scores.get(name) for line in lines}
        if values and None not in values and (is_graded or values <= {0.0, 1.0}):
            return name
    return None


def measure_abstention(
    lines: Sequence[Prediction], score: str, *, error_below: float = 1.0, split: str, step: int
) -> Abstention | None:
    """Count the errors of an evaluation by confidence; None if a prediction has no confidence.

    Args:
        lines: predictions with the model's own probabilities (`restore_lines`).
        score: from `find_error_score`. error_below: score (0-1) below which a prediction is wrong.
    """
    probabilities: list[float] = []
    wrong: list[bool] = []
    for line in lines:
        if line.confidence is None:
            return None
        probabilities.append(line.confidence)
        wrong.append(line.scores[score] < error_below)
    return Abstention(score, error_below, len(lines), split, step, count_answers(probabilities, wrong))


def parse_share(given: str | float, name: str) -> float:
    """Parse a share of errors. Raises ConfigError.

    >>> parse_share("5%", "max_error"), parse_share("0.05", "max_error"), parse_share(0.1, "max_error")
    (0.05, 0.05, 0.1)
    """
    share = _parse_part(given)
    if not 0 < share < 1:
        raise ConfigError(
            f"{name} {given}: is no share of errors. Allowed are shares above 0 and below 1: 5% or 0.05. Correct it."
        )
    return share


def parse_probability(given: str | float, name: str) -> float:
    """Parse a confidence. Raises ConfigError.

    >>> parse_probability("90%", "min_confidence"), parse_probability("0.9", "min_confidence")
    (0.9, 0.9)
    """
    share = _parse_part(given)
    if not 0 <= share <= 1:
        raise ConfigError(f"{name} {given}: is no probability. Allowed are 0 to 1: 90% or 0.9. Correct it.")
    return share


def _parse_part(given: str | float) -> float:
    """Parse a part of 1, or of 100 with a percent sign; NaN for another text."""
    text = str(given).strip()
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        return math.nan


# --- which answers are withheld ---


@dataclass(frozen=True, slots=True)
class Silence:
    """The confidence below which answers are withheld, and what is promised of the others; "" if nothing is."""

    min_confidence: float
    promise: str = ""


def select_answer_settings(overrides: Mapping[str, object]) -> JsonTable:
    """Select the overrides that change answers or their confidences: a promise holds for the same ones.

    >>> select_answer_settings({"eval.num_beams": 4, "eval.batch_size": 8, "data.eval": "a.csv"})
    {'eval.num_beams': 4}
    """
    found: JsonTable = {}
    # Settings of eval that only a training has are no overrides of a run.
    for name, value in sorted(overrides.items()):
        is_of_answers = name.startswith(("eval.", "task.")) or name in ANSWER_SETTINGS
        if is_of_answers and name != "eval.batch_size":
            found[name] = value
    return found


def choose_silence(
    run: str,
    abstention: Abstention | None,
    temperature: float,
    overrides: Mapping[str, object],
    *,
    max_error: str | float | None = None,
    min_confidence: str | float | None = None,
) -> Silence | None:
    """Choose the confidence below which answers are withheld; None: none is.

    Args:
        run: name of the run for errors.
        abstention: of model/. temperature: of the confidences.
        overrides: settings of the call that differ from the run's.
        max_error: promised share of errors; None: the promise of model/, if it has one.
        min_confidence: the confidence itself, 0.9 or "90%", 0 for all answers; no promise is given.

    Raises ConfigError for both, for a promise that the evaluation does not support, and for settings that it was not
    measured with.
    """
    if min_confidence is not None:
        if max_error is not None:
            raise ConfigError("max_error and min_confidence: both are given. Allowed is one of them. Leave one out.")
        least = parse_probability(min_confidence, "min_confidence")
        return Silence(least) if least > 0 else None
    if max_error is None:
        if abstention is None or abstention.max_error is None:
            return None
        share = abstention.max_error
    else:
        share = parse_share(max_error, "max_error")
    if abstention is None:
        raise ConfigError(
            f"max_error {format_promise(share)}: the model folder of {run} has no abstention.json. Write it with: "
            f"fivetune evaluate {run} --max-error {format_promise(share)}"
        )
    given = select_answer_settings(overrides)
    if given != abstention.settings:
        raise ConfigError(
            f"max_error {format_promise(share)}: was measured with {_name_settings(abstention.settings)}, and this "
            f"call has {_name_settings(given)}. Use the same ones, evaluate the run with these and --max-error, or "
            "give --min-confidence 0 to withhold nothing."
        )
    least = find_min_confidence(run, abstention, share, temperature)
    return Silence(least, f"at most {format_promise(share)} of the answers are wrong")


def find_min_confidence(run: str, abstention: Abstention, max_error: float, temperature: float) -> float:
    """Find the confidence from which on a promise holds. Raises ConfigError, naming the run, if no level keeps it."""
    level = choose_level(abstention.levels, max_error)
    if level is None:
        raise ConfigError(describe_broken_promise(run, abstention, max_error))
    return compute_min_confidence(level, temperature)


def compute_min_confidence(level: Level, temperature: float) -> float:
    """Compute the confidence from which on the answers of a level are given."""
    if temperature == 1 or level.probability == 0:  # the confidence is the probability; or all answers are given
        return level.probability
    return float(apply_temperature(level.probability, temperature))


def list_promise_facts(abstention: Abstention, temperature: float) -> JsonTable:
    """List what a kept promise says and was measured on, for scripts; {} without one that a level keeps."""
    if abstention.max_error is None:
        return {}
    level = choose_level(abstention.levels, abstention.max_error)
    if level is None:
        return {}
    return {
        "max_error": abstention.max_error,
        "min_confidence": compute_min_confidence(level, temperature),
        "num_examples": abstention.num,
        "num_answered": level.answered,
        "num_wrong": level.wrong,
        "score": abstention.score,
        "error_below": 100 * abstention.error_below,
        "split": abstention.split,
    }


def describe_promise(facts: JsonTable) -> str:
    """Describe what a kept promise says, from its facts."""
    num = facts["num_answered"]
    return (
        f"Answers with a confidence below {facts['min_confidence']:.4g} are withheld as unsure: at most "
        f"{format_promise(facts['max_error'])} of the others are wrong, with a confidence of 95 %, on data like the "
        f"evaluation's. Of its {facts['num_examples']:,} predictions {num / facts['num_examples']:.1%} were answered, "
        f"{facts['num_wrong'] / num:.1%} of them wrong ({facts['score']} below {facts['error_below']:g})."
    )


def describe_broken_promise(run: str, abstention: Abstention, max_error: float) -> str:
    """Describe that no level keeps a promise, and what would help.

    Args:
        run: its folder.
    """
    share = format_promise(max_error)
    needed = count_needed(abstention.levels, max_error)
    advice = "No confidence has fewer errors. Train a better model, or promise less."
    if needed:
        advice = (
            f"About {needed:,} predictions would show it, if errors stay as they are. Evaluate on more data, several "
            f"files as one set: fivetune evaluate {run} --max-error {share} --data.eval FILE FILE"
        )
    every = abstention.levels[-1]
    return (
        f"max_error {share}: no confidence keeps it on {abstention.num:,} predictions of {abstention.split} (of all "
        f"answers {every.wrong / every.answered:.1%} are wrong). {advice}"
    )


def format_promise(share: float) -> str:
    """Format a share as a command line takes it.

    >>> format_promise(0.05), format_promise(0.005)
    ('5%', '0.5%')
    """
    return f"{100 * share:.6g}%"


def _name_settings(settings: Mapping[str, object]) -> str:
    named = [f"--{name} {value}" for name, value in settings.items()]
    return ", ".join(named) or "the run's own settings"


def withhold(prediction: Prediction, silence: Silence | None) -> Prediction:
    """Return a prediction as it is, or as unsure if its confidence is too low.

    >>> found = withhold(Prediction(id="1", prediction="refund", confidence=0.4), Silence(0.8))
    >>> found.prediction, found.unsure, found.withheld, found.reason
    ('', True, 'refund', 'confidence 0.4 is below 0.8')
    """
    if silence is None or prediction.skipped:
        return prediction
    known = prediction.confidence
    if known is not None and known >= silence.min_confidence:
        return prediction
    low = "it has no confidence" if known is None else f"confidence {known:.4g} is below {silence.min_confidence:.4g}"
    reason = f"{low}, from which on {silence.promise}" if silence.promise else low
    return replace(prediction, prediction="", unsure=True, withheld=prediction.prediction, reason=reason)
