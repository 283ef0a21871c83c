"""ROUGE-1, -2, -L and -Lsum: the overlap of two texts in words, bigrams or longest common subsequences.

In: one prediction and all reference texts per example. Out: mean precision, recall and F1 of each kind, against the
reference with the best F1. The scores are `rouge_score`'s: its words are runs of a-z and 0-9, so a letter with an
accent ends a word. rougeLsum compares line by line; a T5 tokenizer writes no line ends, so it equals rougeL.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.metrics import Case, Details, PerExample, normalize_answer

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Kind = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]
PARTS = {"precision": "precision", "recall": "recall", "f1": "fmeasure"}  # our names, rouge_score's


class ROUGE(PerExample):
    """ROUGE by Google's rouge_score."""

    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "rouge_score 0.1.2, RougeScorer.score_multi (Lin 2004); unweighted mean over the examples"

    types: tuple[Kind, ...] = Field(
        default=("rouge1", "rouge2", "rougeL"), min_length=1, description="kinds: rouge1, rouge2, rougeL, rougeLsum"
    )
    stemmer: bool = Field(default=False, description="compare word stems (Porter) of words longer than 3 letters")
    normalize: bool = Field(default=False, description="first lower-case, drop punctuation and a, an, the")

    @property
    def main(self) -> str:
        return f"{'rougeL' if 'rougeL' in self.types else self.types[0]}_f1"

    @property
    def score_names(self) -> tuple[str, ...]:
        return (*(f"{kind}_{part}" for kind in self.types for part in PARTS), "total")

    @model_validator(mode="after")
    def _check_installed(self) -> ROUGE:
        if find_spec("rouge_score") is None:
            raise FiveTuneEnvironmentError(
                "metrics: rouge needs the package rouge-score, which is not installed. "
                "Install it: pip install rouge-score"
            )
        return self

    @cached_property
    def _scorer(self) -> RougeScorer:
        from rouge_score.rouge_scorer import RougeScorer  # imports nltk

        return RougeScorer(list(self.types), use_stemmer=self.stemmer)

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return precision, recall and F1 (0-1) of each kind; `details` are not read."""
        if self.normalize:
            prediction, references = normalize_answer(prediction), [normalize_answer(text) for text in references]
        found = self._scorer.score_multi(references, prediction)
        return {
            f"{kind}_{part}": getattr(found[kind], attribute)
            for kind in self.types
            for part, attribute in PARTS.items()
        }


CASES = (
    Case(
        predictions=("the cat sat on the mat", ""),
        references=(("the cat lay on a mat", "dogs"), ("x",)),
        expected={
            "rouge1_precision": 100 * 4 / 6 / 2,
            "rouge1_f1": 100 * 4 / 6 / 2,
            "rouge2_f1": 100 * 1 / 5 / 2,
            "rougeL_precision": 100 * 4 / 6 / 2,
            "rougeL_recall": 100 * 4 / 6 / 2,
            "total": 2,
        },
        source="by hand: in common are 'the cat on mat' of 6 and 6 words, and 'the cat' of 5 and 5 bigrams",
    ),
    Case(
        predictions=("b a c d",),
        references=(("a b c", "a"),),
        expected={"rouge1_f1": 100 * 6 / 7, "rougeL_precision": 50.0, "rougeL_recall": 200 / 3, "rougeL_f1": 400 / 7},
        source="by hand: 3 of 4 and 3 of 3 words; the longest common sequence, a c, has 2",
    ),
)
