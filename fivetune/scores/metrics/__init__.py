"""Metrics, one family per file: score the predictions of a whole corpus against their references.

A metric's file holds one frozen options class and its `CASES`:

    main               its headline score, such as "f1"
    score_names        every score that it can produce
    higher_is_better   whether higher scores are better
    source             the script or paper that defines the scores
    packages           packages other than FiveTune's own that compute them, whose versions a run records
    score(predictions, references, *, details=None) -> Scores
    CASES              predictions, references and their expected corpus scores, with the origin of the numbers

`references[i]` holds all gold answers of example i; ("",) means that it has no answer. `details[i]` holds the example's
`TextExample.meta` and, if known, the prediction's `no_answer_score`, `answer` and `candidates` (texts, the best first);
every metric documents which of them it reads. Corpus scores are percentages (0-100), an example's own scores 0-1.
Shared code is below: the SQuAD normalisation, token F1 and means.

A recipe names a metric, or gives it options: `metrics: [squad, {name: rouge, stemmer: true}]`.
"""

from __future__ import annotations

import re
import string
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from fivetune import plugins
from fivetune.errors import ConfigError, UnknownPluginError, suggest_names
from fivetune.rundir.records import Prediction
from fivetune.types import DrawnRows, JsonTable, MetricSpec, Resampler, Scores

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")

Details = Mapping[str, Any]

UNANSWERED = "\ue000"
"""Placeholder of a missing prediction: a private-use character, which no gold answer contains and which is not empty,
so that it is wrong by every metric. An empty text would be right for every unanswerable question."""


class Metric(Protocol):
    """Interface of the options class in every file of this folder."""

    main: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    higher_is_better: ClassVar[bool]
    source: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores: ...

    def describe_source(self, references: Sequence[Sequence[str]], versions: Mapping[str, str | None]) -> str: ...


class MetricOptions(plugins.Options):
    """Base of metrics whose names of scores are the same with all options."""

    main: ClassVar[str]
    score_names: ClassVar[tuple[str, ...]]
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()

    def describe_source(self, references: Sequence[Sequence[str]], versions: Mapping[str, str | None]) -> str:
        """Describe what defines the scores of examples with these references, computed by these versions."""
        return self.source


class PerExample(MetricOptions):
    """Base of metrics whose corpus scores are means: a subclass scores one example, `score` averages over all."""

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return the means over all examples as percentages, and `total`."""
        assert predictions, "nothing to score"
        known = details or [{}] * len(predictions)
        # An example's scores depend on that example alone.
        each = [self.score_one(*example) for example in zip(predictions, references, known, strict=True)]
        return average_scores(each)

    @abstractmethod
    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return the scores (0-1) of one example, under the same names for every example."""


class Case(NamedTuple):
    """A worked example of a metric; `source` is the origin of the expected numbers."""

    predictions: tuple[str, ...]
    references: tuple[tuple[str, ...], ...]
    expected: Mapping[str, float]
    source: str
    details: tuple[Details, ...] | None = None


class Scorer:
    """Scores by several metrics, which are loaded once, under the names of `list_score_names`.

    >>> Scorer(["squad", "exact_match"]).score(["the cat", "dog"], [["cat"], ["dog"]]).corpus
    {'exact': 100.0, 'f1': 100.0, 'total': 2, 'exact_match': 50.0}
    """

    def __init__(self, metrics: Sequence[MetricSpec]) -> None:
        self._metrics = _resolve_score_names(metrics)

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return the merged scores of all metrics."""
        corpus: dict[str, float] = {}
        sizes: dict[str, float] = {}
        each: list[dict[str, float]] = [{} for _ in predictions]
        resamplers: list[tuple[Resampler, Mapping[str, str]]] = []
        for metric, names in self._metrics:
            found = metric.score(predictions, references, details=details)
            corpus |= _rename_scores(found.corpus, names)
            sizes |= _rename_scores(found.sizes, names)
            for merged, own in zip(each, found.each, strict=True):
                merged |= _rename_scores(own, names)
            # A metric without a resampler has means only.
            resamplers.append((found.resample or build_mean_resampler(found), names))

        def resample(rows: DrawnRows) -> dict[str, float]:
            drawn: dict[str, float] = {}
            for resample_metric, names in resamplers:
                drawn |= _rename_scores(resample_metric(rows), names)
            return drawn

        return Scores(corpus, each, resample, sizes)


def collect_details(prediction: Prediction) -> JsonTable:
    """Return the `details` of a prediction: its `meta`, and no-answer score, answer and candidate texts if known.

    >>> from fivetune.rundir.records import Candidate
    >>> collect_details(Prediction(id="q", meta={"choices": "ab"}, candidates=(Candidate("a", 0.5),)))
    {'choices': 'ab', 'candidates': ['a']}
    """
    known: JsonTable = dict(prediction.meta)
    if prediction.no_answer_score is not None:
        known["no_answer_score"] = prediction.no_answer_score
    if prediction.answer is not None:
        known["answer"] = prediction.answer
    if prediction.candidates:
        known["candidates"] = [candidate.text for candidate in prediction.candidates]
    return known


def drop_blank_golds(references: Sequence[str]) -> tuple[str, ...]:
    """Return the gold answers without blank ones, unless all are blank: ("",), no answer, stays.

    >>> drop_blank_golds(["Rollo", " "]), drop_blank_golds([""])
    (('Rollo',), ('',))
    """
    return tuple(gold for gold in references if gold.strip()) or tuple(references)


def rewards_blank(scorer: Scorer, references: Sequence[str]) -> bool:
    """Return whether one of several gold answers is blank and gives an empty prediction a score.

    >>> rewards_blank(Scorer(["squad"]), ["Rollo", ""]), rewards_blank(Scorer(["squad_v2"]), ["Rollo", ""])
    (True, False)
    """
    if len(drop_blank_golds(references)) == len(references):
        return False
    [scores] = scorer.score([""], [references]).each
    return any(scores.values())


def load_metric(spec: MetricSpec) -> Metric:
    """Load a metric by name, or with options. Raises UnknownPluginError, ValidationError for an invalid option, and
    ConfigError for the name of a score.

    >>> load_metric({"name": "exact_match", "ignore_case": True}).ignore_case
    True
    """
    table = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = table.pop("name", None)
    if not isinstance(name, str):
        raise ValueError(f"metrics: {spec!r} has no name. {suggest_names('', plugins.list_plugins('metrics'))}")
    try:
        plugin = plugins.load_plugin("metrics", name)
    except UnknownPluginError:
        owner = _find_owner(name)
        if owner is None:
            raise
        raise ConfigError(
            f"metrics: {name!r} is a score of {owner}. Write metrics: [{owner}], main_metric: {name}."
        ) from None
    return plugin(**table)


def _find_owner(score: str) -> str | None:
    """Find the first metric that has a score whatever its options are; None without one."""
    for name in plugins.list_plugins("metrics"):
        with suppress(ConfigError):  # a plugin that cannot be loaded is reported where it is named
            scores = plugins.load_plugin("metrics", name).score_names
            if isinstance(scores, tuple) and score in scores:
                return name
    return None


def find_absent(metrics: Sequence[MetricSpec]) -> list[str]:
    """Return the names of metrics whose plugins are absent.

    >>> find_absent(["squad", {"name": "my_metric"}])
    ['my_metric']
    """
    known = plugins.list_plugins("metrics")  # by the names of their files: none is loaded
    return [name for name in map(get_metric_name, metrics) if name not in known]


def get_metric_name(spec: MetricSpec) -> str:
    """Return the name in a specification, which is a name alone or a table with options."""
    return spec if isinstance(spec, str) else str(spec.get("name"))


def list_score_names(metrics: Sequence[MetricSpec]) -> tuple[str, ...]:
    """Return the names of all scores of these metrics; the later of two equal names gets its metric's as prefix.

    >>> list_score_names(["squad", "exact_match"])
    ('exact', 'f1', 'total', 'exact_match')
    """
    merged: dict[str, None] = {}
    for _, names in _resolve_score_names(metrics):
        merged |= dict.fromkeys(names.values())
    return tuple(merged)


def list_selectable_scores(metrics: Sequence[MetricSpec]) -> tuple[str, ...]:
    """Return the scores that can choose a checkpoint: all but counts and thresholds.

    >>> list_selectable_scores(["squad", "exact_match"])
    ('exact', 'f1', 'exact_match')
    """
    return tuple(filter(is_selectable_score, list_score_names(metrics)))


def is_selectable_score(name: str) -> bool:
    """Whether a score says how good answers are: it is neither a count nor a threshold.

    >>> is_selectable_score("best_f1"), is_selectable_score("best_f1_thresh"), is_selectable_score("HasAns_total")
    (True, False, False)
    """
    return not name.endswith(("total", "_thresh"))


def is_maximized(metrics: Sequence[MetricSpec], score: str) -> bool:
    """Return whether a higher score is better, as its metric declares.

    >>> is_maximized(["squad", "exact_match"], "exact_match")
    True
    """
    return next(metric.higher_is_better for metric, names in _resolve_score_names(metrics) if score in names.values())


def _resolve_score_names(metrics: Sequence[MetricSpec]) -> list[tuple[Metric, dict[str, str]]]:
    """Return each metric with its own score names -> names in the merged scores; all metrics share `total`."""
    taken: set[str] = set()
    # The first metric keeps the plain name, so that adding a metric renames no score.
    resolved: list[tuple[Metric, dict[str, str]]] = []
    for metric in map(load_metric, metrics):
        prefix = type(metric).__module__.rpartition(".")[2]
        names: dict[str, str] = {}  # own name -> name in the merged scores
        for own in metric.score_names:
            names[own] = f"{prefix}_{own}" if own in taken else own
        resolved.append((metric, names))
        taken.update(set(metric.score_names) - {"total"})
    return resolved


def _rename_scores(scores: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    return {names.get(name, name): value for name, value in scores.items()}


def build_mean_resampler(scores: Scores) -> Resampler:
    """Return a Resampler of scores that are means: 100 times the mean over the drawn rows.

    >>> build_mean_resampler(Scores({"exact": 50.0}, [{"exact": 1}, {"exact": 0}]))([0, 0, 1, 0])
    {'exact': 75.0}
    """
    import numpy as np

    columns: dict[str, NDArray[np.float64]] = {}
    for name in scores.corpus:
        # A score that some examples lack is no mean of theirs.
        if all(name in one for one in scores.each):
            columns[name] = np.array([one[name] for one in scores.each], dtype=float)

    def resample(rows: DrawnRows) -> dict[str, float]:
        return {name: 100 * average_array(column[rows]) for name, column in columns.items()}

    return resample


def compute_pooled_size(sizes: Iterable[float]) -> float:
    """Return the size of one group whose mean varies as the mean of the means of K groups of n_k examples does.

    If a right answer is as likely in each group, the variances p (1 - p) / n_k give p (1 - p) sum(1 / n_k) / K^2, the
    variance of K^2 / sum(1 / n_k) examples: all examples for equal groups, less for unequal ones.

    >>> compute_pooled_size([45, 45]), round(compute_pooled_size([85, 5]), 1)
    (90.0, 18.9)
    """
    found = [max(size, 1) for size in sizes]  # a group may have no example
    return len(found) ** 2 / sum(1 / size for size in found)


def average_array(values: NDArray[np.float64]) -> float:
    """Return the mean of an array [n] with n > 0: the bits of numpy's `mean` in half the time.

    A bootstrap takes thousands of means of few values, where the checks of `mean` cost more than the sum.

    >>> import numpy as np
    >>> average_array(np.array([1.0, 0.0]))
    0.5
    """
    import numpy as np

    return float(np.add.reduce(values) / len(values))


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then the words a, an, the, then surplus space: both SQuAD scripts' rule.

    >>> normalize_answer(" The Duke of  Normandy's (a title)")
    'duke of normandys title'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def compute_token_f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Return the harmonic mean of token precision and recall; a word counts as often as it occurs in both.

    F1 = 2PR / (P + R), P = common / len(prediction), R = common / len(reference); 0.0 if nothing is common.

    >>> compute_token_f1(["in", "1066"], ["1066"])  # P = 1/2, R = 1
    0.6666666666666666
    >>> compute_token_f1([], [])
    0.0
    """
    num_common = sum((Counter(prediction) & Counter(reference)).values())
    if num_common == 0:
        return 0.0
    precision = num_common / len(prediction)
    recall = num_common / len(reference)
    return 2 * precision * recall / (precision + recall)


def compute_best_match(predicted: str, golds: Sequence[str]) -> tuple[int, float]:
    """Return exact match and token F1 of normalised texts, each against its best gold answer.

    >>> compute_best_match("norman dukes", ["norman duke", "dukes"])
    (0, 0.6666666666666666)
    """
    words = predicted.split()
    return int(predicted in golds), max(compute_token_f1(words, gold.split()) for gold in golds)


def average_scores(each: list[dict[str, float]]) -> Scores:
    """Return the means over all examples as percentages, and the number of examples as `total`.

    >>> average_scores([{"exact": 1, "f1": 1.0}, {"exact": 0, "f1": 0.5}]).corpus
    {'exact': 50.0, 'f1': 75.0, 'total': 2}
    """
    corpus = {name: average_column(each, name) for name in each[0]}
    return Scores({**corpus, "total": len(each)}, each)


def add_prefix(prefix: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a part of the examples under its name: `<prefix>_<score>`."""
    return {f"{prefix}_{name}": value for name, value in scores.items()}


def average_column(each: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the mean of one score over all examples as a percentage."""
    return compute_percent([scores[name] for scores in each], len(each))


def compute_percent(values: Iterable[float], total: int) -> float:
    """Return 100 * sum / total, added from left to right.

    The order determines the last digit, and from Python 3.12 on `sum` rounds differently.

    >>> compute_percent([1, 0.5, 0], 3)
    50.0
    """
    added = 0.0
    for value in values:
        added += value
    return 100.0 * added / total
