"""Exact match and F1 by the rules of MLQA: articles of each language are dropped, Chinese is split into characters.

In: one predicted answer and all gold answers per question; from the details `language` (ISO 639-1). Out: mlqa_exact and
mlqa_f1, the best over the gold answers. For an unanswerable question only a prediction that is empty after
normalisation is right, as in SQuAD v2.0; MLQA itself has no such questions.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from fivetune.scores.metrics import Case, Details, PerExample, compute_best_match

ARTICLES = {
    "en": re.compile(r"\b(?:a|an|the)\b"),
    "es": re.compile(r"\b(?:un|una|unos|unas|el|la|los|las)\b"),
    "vi": re.compile(r"\b(?:của|là|cái|chiếc|những)\b"),
    "de": re.compile(r"\b(?:ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b"),
    "ar": re.compile("\\sال^|ال"),  # the first alternative never matches; the second removes the article anywhere
}
"""Articles that MLQA's script removes; other languages keep all words."""

MLQA_LANGUAGES = ("ar", "de", "en", "es", "hi", "vi", "zh")
"""The languages of MLQA; others have no mlqa_* scores."""

LANGUAGES = (
    "ar", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "es", "et", "eu", "fa", "fi", "fr", "gl", "he", "hi", "hr",
    "hu", "id", "it", "ja", "ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sv", "sw", "ta", "te",
    "th", "tr", "uk", "ur", "vi", "zh",
)  # fmt: skip
"""ISO 639-1 codes of MLQA, XQuAD and TyDi QA, and of other languages with sets in SQuAD's form."""


def parse_language_code(language: str) -> str:
    """Return the two-letter code of a language, region ignored. Raises ValueError if it is not in LANGUAGES.

    >>> parse_language_code("ES"), parse_language_code("es-ES"), parse_language_code("zh_CN")
    ('es', 'es', 'zh')
    """
    found = re.fullmatch(r"([a-z]{2})(?:[-_]\w+)?", language.strip().lower(), re.ASCII)
    if not found or found[1] not in LANGUAGES:
        raise ValueError(f"language {language!r} is not a known code. Allowed: {', '.join(LANGUAGES)}")
    return found[1]


Language = Annotated[str, AfterValidator(parse_language_code)]

_HAN = re.compile("[\u4e00-\u9fa5]")
_KANA = re.compile("[\u3040-\u30ff]")
_SCRIPTS = {"zh": _HAN, "ar": re.compile("[\u0620-\u064a]"), "ko": re.compile("[\uac00-\ud7a3]")}


def detect_script_language(texts: Sequence[str]) -> str | None:
    """Return zh, ar or ko if most texts have Chinese (and none kana), Arabic or Korean letters, else None.

    >>> detect_script_language(["北京", "1949 年"]), detect_script_language(["きょうと", "京都"])
    ('zh', None)
    """
    for language, letters in _SCRIPTS.items():
        num_written = sum(bool(letters.search(text)) for text in texts)
        if 2 * num_written <= len(texts):
            continue
        if language == "zh" and any(map(_KANA.search, texts)):
            return None  # Japanese is written with Chinese characters too
        return language
    return None


class MLQA(PerExample):
    """MLQA's exact match and F1."""

    main = "mlqa_f1"
    score_names = ("mlqa_exact", "mlqa_f1", "total")
    source = "mlqa_evaluation_v1.py of MLQA (Lewis et al. 2020)"

    language: Language = Field(default="en", description="language of answers that do not name their own")

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return exact match and F1 (0-1). Reads `language`. Raises ValueError if that is not a known code."""
        own = details.get("language")
        language = parse_language_code(str(own)) if own else self.language
        predicted = normalize(prediction, language)
        if not any(references):  # unanswerable
            right = int(not predicted)
            return {"mlqa_exact": right, "mlqa_f1": right}
        exact, f1 = compute_best_match(predicted, [normalize(reference, language) for reference in references])
        return {"mlqa_exact": exact, "mlqa_f1": f1}


def normalize(text: str, language: str) -> str:
    """Lower-case, drop the punctuation of all scripts, then the articles of the language, then surplus space.

    >>> normalize("¿El Niño, o la Niña?", "es")
    'niño o niña'
    >>> normalize("北京is big", "zh")
    '北 京 is big'
    """
    kept: list[str] = []
    # MLQA's script: Unicode's punctuation, and ASCII's, to which symbols such as $ belong.
    for char in text.lower():
        if char not in string.punctuation and not unicodedata.category(char).startswith("P"):
            kept.append(char)
    bare = "".join(kept)
    if language in ARTICLES:
        bare = ARTICLES[language].sub(" ", bare)
    if language == "zh":  # each character is a word
        bare = _HAN.sub(r" \g<0> ", bare)
    return " ".join(bare.split())


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
