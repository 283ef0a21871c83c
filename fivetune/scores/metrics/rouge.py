"""ROUGE-1, -2, -L and -Lsum: the overlap of two texts in words, bigrams or longest common subsequences.

In: one prediction and all reference texts per example. Out: mean precision, recall and F1 of each kind, against the
reference with the best F1. The scores are `rouge_score`'s.

Words (option `words`). `ascii` is the published rule, runs of a-z and 0-9: a letter with an accent ends a word, and
Russian has no words. `unicode` takes runs of letters, marks and digits of any script, after NFKC and case folding;
each character of a script that is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese) is a word.
`auto` decides for each example: `ascii` for `language` en, `unicode` for another one; without a language `unicode` if
at least a quarter of the letters of the references are of another script than Latin, else `ascii`.

Sentences (option `sentences`). rougeLsum compares sentence by sentence, rougeL the texts as one. The ROUGE-L of papers
on summaries, T5's among them, is rougeLsum.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from fivetune.errors import FiveTuneEnvironmentError
from fivetune.scores.metrics import Case, Details, PerExample, normalize_answer

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

Kind = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]
PARTS = {"precision": "precision", "recall": "recall", "f1": "fmeasure"}  # our names, rouge_score's
MIN_FOREIGN_SHARE = 0.25  # of letters: English with Greek symbols or a foreign name stays below it
UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]"
_SENTENCE_END = re.compile(
    r"(?<=[.!?\u2026\u061f\u06d4\u0964\u0965])[\"')\]\u00bb\u2019\u201d]*(\s+)"  # . ! ? ... and Arabic, Urdu, Hindi
    r"|(?<=[\u3002\uff01\uff1f])[\"')\]\u300d\u300f\u2019\u201d]*(\s*)"  # Chinese and Japanese, without a space
)


class ROUGE(PerExample):
    """ROUGE by Google's rouge_score."""

    source = "rouge_score 0.1.2, RougeScorer.score_multi (Lin 2004); unweighted mean over the examples"

    types: tuple[Kind, ...] = Field(
        default=("rouge1", "rouge2", "rougeL"), min_length=1, description="kinds: rouge1, rouge2, rougeL, rougeLsum"
    )
    stemmer: bool = Field(default=False, description="compare word stems (Porter) of words longer than 3 letters")
    normalize: bool = Field(default=False, description="first lower-case, drop punctuation and a, an, the")
    words: Literal["auto", "ascii", "unicode"] = Field(
        default="auto",
        description="ascii: a-z and 0-9, as published; unicode: letters of all scripts; auto: by language or script",
    )
    sentences: Literal["punctuation", "lines", "t5", "nltk"] = Field(
        default="punctuation",
        description="sentences of rougeLsum end at . ! ? and line ends; at line ends only; at ' . ' as in T5's own "
        "evaluation; as nltk's Punkt finds them, whose data must be installed",
    )

    @property
    def main(self) -> str:
        kind = "rougeL" if "rougeL" in self.types else self.types[0]
        return f"{kind}_f1"

    @property
    def score_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for kind in self.types:
            names += [f"{kind}_{part}" for part in PARTS]
        return (*names, "total")

    @model_validator(mode="after")
    def _check_data(self) -> ROUGE:
        if self.sentences == "nltk":
            _load_punkt()
        return self

    @cached_property
    def _scorers(self) -> dict[str, RougeScorer]:
        """The scorers with the words `ascii` and `unicode`."""
        from rouge_score.rouge_scorer import RougeScorer  # imports nltk

        kinds = list(self.types)
        # Both are needed: with words auto, each example chooses.
        return {
            "ascii": RougeScorer(kinds, use_stemmer=self.stemmer),
            "unicode": RougeScorer(kinds, tokenizer=_UnicodeWords(stemmer=self.stemmer)),
        }

    @cached_property
    def _split_sentences(self) -> Callable[[str], str]:
        """The function that writes a line end after each sentence."""
        if "rougeLsum" not in self.types or self.sentences == "lines":
            return str
        if self.sentences == "nltk":
            return _load_punkt()
        if self.sentences == "t5":
            return _split_as_t5
        return split_sentences

    def score_one(self, prediction: str, references: Sequence[str], details: Details) -> dict[str, float]:
        """Return precision, recall and F1 (0-1) of each kind. Reads `language` for `words` auto."""
        scorer = self._scorers[self._choose_words(references, details)]
        prediction, *references = map(self._prepare, (prediction, *references))
        found = scorer.score_multi(references, prediction)
        scores: dict[str, float] = {}
        for kind in self.types:
            for part, attribute in PARTS.items():
                scores[f"{kind}_{part}"] = getattr(found[kind], attribute)
        return scores

    def _choose_words(self, references: Sequence[str], details: Details) -> str:
        if self.words != "auto":
            return self.words
        # rouge_score's own rule is what papers on English report.
        language = details.get("language")
        if language:
            is_english = re.fullmatch(r"en(g|glish)?([-_].*)?", str(language).casefold())
        else:
            is_english = not is_mostly_foreign(references)
        return "ascii" if is_english else "unicode"

    def _prepare(self, text: str) -> str:
        text = self._split_sentences(text)
        if not self.normalize:
            return text
        # Line by line: a line is a sentence.
        return "\n".join(map(normalize_answer, text.split("\n")))


class _UnicodeWords:
    """A tokenizer for rouge_score whose words are of any script; only words of a-z are stemmed."""

    def __init__(self, *, stemmer: bool) -> None:
        import regex  # nltk needs it, so it is there where rouge_score is
        from nltk.stem.porter import PorterStemmer

        self._find = regex.compile(rf"{UNSPACED}\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--{UNSPACED}]+", regex.V1).findall
        self._stem: Callable[[str], str] | None = PorterStemmer().stem if stemmer else None

    def tokenize(self, text: str) -> list[str]:
        """Return the words.

        >>> _UnicodeWords(stemmer=True).tokenize("Running (ÉTÉ) 北京2008")
        ['run', 'été', '北', '京', '2008']
        """
        words: list[str] = self._find(unicodedata.normalize("NFKC", text).casefold())
        if self._stem is None:
            return words
        for i, word in enumerate(words):
            if len(word) > 3 and word.isascii():
                words[i] = self._stem(word)
        return words


def is_mostly_foreign(texts: Sequence[str]) -> bool:
    """Return whether at least a quarter of the letters are of another script than Latin.

    >>> [is_mostly_foreign([text]) for text in ("café", "α-helix of the protein", "Кот", "GPUで学習する")]
    [False, False, True, True]
    """
    num_letters = num_foreign = 0
    for char in "".join(texts):
        if char.isalpha():
            num_letters += 1
            num_foreign += not char.isascii() and "LATIN" not in unicodedata.name(char, "")
    return num_foreign > 0 and num_foreign >= MIN_FOREIGN_SHARE * num_letters


def split_sentences(text: str) -> str:
    r"""Write a line end after each sentence: after its last mark and closing quotes, before white space.

    Abbreviations such as "Dr." end a sentence too, on both sides of the comparison alike.

    >>> split_sentences('"No." He left! 3.5 km\nfar')
    '"No."\nHe left!\n3.5 km\nfar'
    """
    return _SENTENCE_END.sub(lambda found: found[0].rstrip() + "\n", text)


def _split_as_t5(text: str) -> str:
    """Write a line end as T5's metrics.rouge does, for texts in tokens as in CNN/DailyMail's."""
    return text.replace(" . ", " .\n")


def _load_punkt() -> Callable[[str], str]:
    """Return the splitter of run_summarization. Raises FiveTuneEnvironmentError without nltk's data."""
    import nltk

    try:
        nltk.sent_tokenize("One. Two.")
    except LookupError:
        raise FiveTuneEnvironmentError(
            "metrics: rouge with sentences nltk needs nltk's data punkt_tab, which is not on this machine. "
            "Download it: python -m nltk.downloader punkt_tab. Or set sentences punctuation."
        ) from None
    return lambda text: "\n".join(nltk.sent_tokenize(text.strip()))


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
    Case(
        predictions=("Кот спит.", "北京市", "ΤΟ ΣΠΙΤΙ", "ไทย", "café au lait"),
        references=(("кот спит",), ("北京",), ("το σπιτι",), ("ไทย",), ("caf lait",)),
        expected={
            "rouge1_f1": 100 * (1 + 4 / 5 + 1 + 1 + 4 / 5) / 5,
            "rougeL_f1": 100 * (1 + 4 / 5 + 1 + 1 + 4 / 5) / 5,
        },
        source="by hand: 2 of 3 and 2 of 2 characters; in Latin letters caf, au and lait are the words of rouge_score",
    ),
)
