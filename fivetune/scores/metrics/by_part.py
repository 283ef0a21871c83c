"""Scores of a mixture: every part by its own metrics, and the mean of the parts' main scores.

In: predictions, references, and from the details `source_task`, the name of the part. Out: `<part>_<score>` for every
score of every part; `mean`, the unweighted mean of the main scores, as GLUE averages its tasks (Wang et al. 2018).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from pydantic import Field

from fivetune.scores.metrics import (
    Case,
    Details,
    MetricOptions,
    Scorer,
    add_prefix,
    compute_pooled_size,
    list_score_names,
)
from fivetune.types import DrawnRows, MetricSpec, Scores


class ByPart(MetricOptions):
    """Scores of each part, and the mean of the main ones."""

    main = "mean"
    source = "those of the parts; GLUE's unweighted mean over tasks"

    parts: dict[str, tuple[MetricSpec, ...]] = Field(
        default={"only": ("exact_match",)}, min_length=1, description="metrics of each part"
    )
    mains: dict[str, str] = Field(default={"only": "exact_match"}, description="main score of each part")

    @property
    def score_names(self) -> tuple[str, ...]:
        named: list[str] = []
        for part, metrics in self.parts.items():
            named += [f"{part}_{score}" for score in list_score_names(metrics)]
        return ("mean", *named, "total")

    @cached_property
    def _scorers(self) -> dict[str, Scorer]:
        return {part: Scorer(metrics) for part, metrics in self.parts.items()}

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return the scores of all parts. Reads `source_task`; an example without one belongs to the first part.

        `mean` is present only if all parts have examples; an example's own `mean` is its main score.
        """
        import numpy as np

        details = details or [{}] * len(predictions)
        first = next(iter(self.parts))
        sources = np.array([str(one.get("source_task", first)) for one in details])
        each: list[dict[str, float]] = [{} for _ in predictions]
        found: dict[str, Scores] = {}
        place = np.zeros(len(predictions), dtype=int)  # index of each example within its part
        # One call of each part's metrics, on its examples alone.
        for part in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == part).tolist()
            place[rows] = range(len(rows))
            answers = [predictions[i] for i in rows]
            golds = [references[i] for i in rows]
            found[part] = self._scorers[part].score(answers, golds, details=[details[i] for i in rows])
            for i, own in zip(rows, found[part].each, strict=True):
                if self.mains[part] in own:
                    each[i]["mean"] = own[self.mains[part]]
                each[i] |= add_prefix(part, own)

        def resample(rows: DrawnRows) -> dict[str, float]:
            every = np.asarray(rows)
            resampled: dict[str, dict[str, float]] = {}
            for part, scores in found.items():
                # A part's own resampler numbers the rows within the part.
                drawn = every[sources[rows] == part]
                if scores.resample and len(drawn):
                    resampled[part] = scores.resample(place[drawn])
            return self._merge_part_scores(resampled)

        corpus = self._merge_part_scores({part: scores.corpus for part, scores in found.items()})
        sizes: dict[str, float] = {}
        for part, scores in found.items():
            for name in scores.corpus:
                sizes[f"{part}_{name}"] = scores.sizes.get(name, len(scores.each))
        sizes["mean"] = compute_pooled_size(sizes[f"{part}_{self.mains[part]}"] for part in found)
        return Scores({**corpus, "total": len(each)}, each, resample, sizes)

    def _merge_part_scores(self, scores: dict[str, dict[str, float]]) -> dict[str, float]:
        """Return the parts' scores with the part as prefix, and the mean if every part has scores."""
        joined: dict[str, float] = {}
        mains = [scores[part][self.mains[part]] for part in self.parts if part in scores]
        if len(mains) == len(self.parts):
            joined["mean"] = sum(mains) / len(mains)
        for part in self.parts:
            joined |= add_prefix(part, scores.get(part, {}))
        return joined


CASES = (
    Case(
        predictions=("a", "b", "c"),
        references=(("a",), ("a",), ("c",)),
        expected={"mean": 200 / 3, "only_exact_match": 200 / 3, "only_total": 3, "total": 3},
        source="by hand",
        details=({"source_task": "only"}, {"source_task": "only"}, {}),
    ),
)
