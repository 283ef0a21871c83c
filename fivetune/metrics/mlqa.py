"""Exact match and F1 by the rules of MLQA: articles and punctuation of each language, Chinese cut into characters.

In: one predicted answer and all gold answers per question; of the details `language` (a two-letter code). Out:
mlqa_exact and mlqa_f1, the best over the gold answers. Where the gold answer is that there is none, only an empty
prediction is right, as in SQuAD v2.0; MLQA itself has no such questions.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from fivetune.metrics import Case, Details, mean_scores, token_f1
from fivetune.plugins import Options
from fivetune.types import Scores

ARTICLES = {
    "en": re.compile(r"\b(?:a|an|the)\b"),
    "es": re.compile(r"\b(?:un|una|unos|unas|el|la|los|las)\b"),
    "vi": re.compile(r"\b(?:của|là|cái|chiếc|những)\b"),
    "de": re.compile(r"\b(?:ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"),
    "ar": re.compile("\\sال^|ال"),  # the first part cannot match; the second takes the article off anywhere
}
"""What MLQA's script drops; other languages keep all words."""

LANGUAGES = (
    "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi", "fr", "gl", "he", "hi", "hr",
    "hu", "id", "it", "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "sw", "ta", "te",
    "th", "tr", "uk", "ur", "vi", "zh",
)  # fmt: skip
"""ISO 639-1 codes of MLQA, XQuAD and TyDi QA, and of other languages with sets in SQuAD's form."""


def language_code(language: str) -> str:
    """The two letters of a language; raises ValueError where it is none of LANGUAGES.

    >>> language_code("ES"), language_code("es-ES"), language_code("zh_CN")
    ('es', 'es', 'zh')
    """
    found = re.fullmatch(r"([a-z]{2})(?:[-_]\w+)?", language.strip().lower(), re.ASCII)
    if not found or found[1] not in LANGUAGES:
        raise ValueError(f"language {language!r} is no code that is known. Allowed: {', '.join(LANGUAGES)}")
    return found[1]


Language = Annotated[str, AfterValidator(language_code)]

_HAN = re.compile("[\u4e00-\u9fa5]")


class Mlqa(Options):
    """MLQA."""

    main: ClassVar[str] = "mlqa_f1"
    score_names: ClassVar[tuple[str, ...]] = ("mlqa_exact", "mlqa_f1", "total")
    higher_is_better: ClassVar[bool] = True
    source: ClassVar[str] = "mlqa_evaluation_v1.py of MLQA (Lewis et al. 2020)"

    language: Language = Field(default="en", description="language of answers that do not say their own")

    def score(
        self,
        predictions: Sequence[str],
        references: Sequence[Sequence[str]],
        *,
        details: Sequence[Details] | None = None,
    ) -> Scores:
        """Percentages over all questions. Reads of `details`: language; raises ValueError if one is no code."""
        assert predictions, "nothing to score"
        each = []
        for i, (prediction, golds) in enumerate(zip(predictions, references, strict=True)):
            own = (details[i] if details else {}).get("language")
            each.append(_score_one(prediction, golds, language_code(str(own)) if own else self.language))
        return mean_scores(each)


def normalize(text: str, language: str) -> str:
    """Lower-case, drop the punctuation of all scripts, then the articles of the language, then surplus space.

    >>> normalize("¿El Niño, o la Niña?", "es")
    'niño o niña'
    >>> normalize("北京is big", "zh")
    '北 京 is big'
    """
    lowered = "".join(char for char in text.lower() if not _is_punctuation(char))
    articles = ARTICLES.get(language)
    bare = articles.sub(" ", lowered) if articles else lowered
    words: Callable[[str], list[str]] = _segments if language == "zh" else str.split
    return " ".join(words(bare))


def _is_punctuation(char: str) -> bool:
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def _segments(text: str) -> list[str]:
    """Words at white space, and each Chinese character for itself."""
    return _HAN.sub(lambda found: f" {found[0]} ", text).split()


def _score_one(prediction: str, references: Sequence[str], language: str) -> dict[str, float]:
    predicted = normalize(prediction, language)
    if not any(references):
        right = int(not predicted)
        return {"mlqa_exact": right, "mlqa_f1": right}
    golds = [normalize(reference, language) for reference in references]
    return {
        "mlqa_exact": max(int(predicted == gold) for gold in golds),
        "mlqa_f1": max(token_f1(predicted.split(), gold.split()) for gold in golds),
    }


CASES = (
    Case(
        predictions=("los Denver Broncos", "«Rollo»", "la casa"),
        references=(("Denver Broncos",), ("Rollo", "Rolf"), ("una casa grande",)),
        details=({"language": "es"},) * 3,
        expected={"mlqa_exact": 200 / 3, "mlqa_f1": 100 * (1 + 1 + 2 / 3) / 3, "total": 3},
        source="by hand: 'casa' and 'casa grande' share 1 of 1 and 1 of 2 words",
    ),
    Case(
        predictions=("北京市", "der Hund", "the Hund"),
        references=(("北京",), ("Hund",), ("Hund",)),
        details=({"language": "zh"}, {"language": "de"}, {"language": "de"}),
        expected={"mlqa_exact": 100 / 3, "mlqa_f1": 100 * (4 / 5 + 1 + 2 / 3) / 3},
        source="by hand: 2 of 3 and 2 of 2 characters; 'the' is no German article",
    ),
    Case(
        predictions=("", "x"),
        references=(("",), ("",)),
        expected={"mlqa_exact": 50.0, "mlqa_f1": 50.0},
        source="by hand: unanswerable questions as in SQuAD v2.0",
    ),
)
