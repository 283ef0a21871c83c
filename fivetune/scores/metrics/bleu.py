"""BLEU and chrF of a whole corpus, for translation and other free text.

In: one prediction and all reference texts per example, any number. Out: bleu and chrf by sacrebleu, from counts summed
over the corpus, so they are not means of the examples' own scores. The main score is chrf, because corpus BLEU is 0 if
no prediction has four words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any, Literal

from pydantic import Field, model_validator

from fivetune.installation import require_package
from fivetune.scores.metrics import Case, Details, MetricOptions
from fivetune.types import DrawnRows, Scores


class SacreBLEU(MetricOptions):
    """BLEU and chrF by sacrebleu."""

    main = "chrf"
    score_names = ("bleu", "chrf", "total")
    source = "sacrebleu, Post 2018"
    packages = ("sacrebleu",)

    tokenize: Literal["13a", "intl", "char", "zh", "none"] = Field(
        default="13a", description="sacrebleu's tokenizer for BLEU: 13a, intl, char, zh or none"
    )
    lowercase: bool = Field(default=False, description="ignore case")
    word_order: int = Field(default=0, ge=0, le=2, description="chrF: longest word n-gram; 2 is chrF++")

    @model_validator(mode="after")
    def _check_installed(self) -> SacreBLEU:
        require_package("metrics: bleu", "sacrebleu", "metrics")
        return self

    @cached_property
    def _scorers(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """sacrebleu's scorers of a corpus, and of one example, whose BLEU has effective order."""
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF

        options: dict[str, Any] = {"lowercase": self.lowercase, "tokenize": self.tokenize, "force": True}
        chrf = CHRF(word_order=self.word_order, lowercase=self.lowercase)
        return {"bleu": BLEU(**options), "chrf": chrf}, {"bleu": BLEU(**options, effective_order=True), "chrf": chrf}

    def describe_source(self, references: Sequence[Sequence[str]], versions: Mapping[str, str | None]) -> str:
        """Describe the scores by sacrebleu's signatures; without references, or the version, these are left out."""
        counts = {len(own) for own in references}
        number = next(iter(counts)) if len(counts) == 1 else "var"
        signatures: list[str] = []
        for scorer, name in zip(self._scorers[0].values(), ("BLEU", f"chrF2{'+' * self.word_order}"), strict=True):
            scorer.num_refs = number
            signature = scorer.get_signature()
            signature.info |= {"nrefs": number if counts else None, "version": versions.get("sacrebleu")}
            signatures.append(f"{name} {signature}")
        return f"{self.source}; {', '.join(signatures)}"

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Return corpus scores (0-100); an example's BLEU has effective order. `details` are not read."""
        import numpy as np

        assert predictions, "nothing to score"
        scorers, of_one = self._scorers
        streams = list(zip_longest(*references))  # None pads examples with fewer references, as sacrebleu requires
        counts: dict[str, Any] = {}  # [num_examples, number of counts]
        for name, scorer in scorers.items():
            counts[name] = np.array(scorer._extract_corpus_statistics(predictions, streams))

        def resample(rows: DrawnRows) -> dict[str, float]:
            return {name: _compute_score(scorers[name], counts[name][rows].sum(axis=0)) for name in scorers}

        each: list[dict[str, float]] = []
        for i in range(len(predictions)):
            each.append({name: _compute_score(of_one[name], counts[name][i]) / 100 for name in scorers})
        return Scores({**resample(np.arange(len(each))), "total": len(each)}, each, resample)


def _compute_score(scorer: Any, counts: Any) -> float:
    """Return sacrebleu's score of n-gram counts, at most 100: rounding can exceed it."""
    return min(100.0, scorer._compute_score_from_stats(counts.tolist()).score)


CASES = (
    Case(
        predictions=("the cat sat on the mat", "a b"),
        references=(("the cat sat on a mat",), ("a b", "b a c")),
        # n-grams found of n-grams written: 5 + 2 of 8, 3 + 1 of 6, 2 of 4, 1 of 3; as long as the references
        expected={"bleu": 100 * (7 / 8 * 4 / 6 * 2 / 4 * 1 / 3) ** 0.25, "total": 2},
        source="by hand: geometric mean of the precisions, no penalty for length",
    ),
    Case(
        predictions=("ab",),
        references=(("ac",),),
        expected={"bleu": 0.0, "chrf": 25.0},
        source="by hand: 1 of 2 letters, 0 of 1 pairs; precision and recall are both 1/4",
    ),
)
