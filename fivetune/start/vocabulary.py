"""What is known of a model's vocabulary without its tokenizer: the characters that it lacks, and the length of texts.

In: a model's name, and texts. Out: characters, estimated tokens, the model that suits the letters of some texts.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from fivetune.start.columns import WITHOUT_BLANKS
from fivetune.types import TextExample

MODEL = "google-t5/t5-small"
MULTILINGUAL = "google/mt5-small"
FOREIGN = 0.1  # share of texts with letters that T5 lacks from which on its vocabulary does not suit

Vocabulary = Literal["t5", "multilingual", "bytes", "unknown"]
VOCABULARIES: dict[Vocabulary, str] = {
    "bytes": r"byt5",
    "multilingual": r"mt5|mt0",
    "t5": r"^(?:google-t5/|t5-)|^google/(?:t5|flan|long-t5)|[Ff]lan-[Tt]5|^allenai/|^bigscience/T0",
}
"""Vocabulary -> the names of models that have it."""

T5_LACKS = "{}<^\\~`"  # of ASCII, as its tokenizer.json has them; line ends and tabs become spaces
T5_LETTERS = "ÉÎÜßàáâäçèéêîóôöùûüăşţșț"  # with ASCII: English, German, French, Romanian
T5_SIGNS = "£«®°»–—‘’“”„•′€"
T5_WORDS = (
    "the of and that for with it was are you this what how is not have from by be at can if has which select where "
    "table name und der das ist nicht wie ich den les et des est une du dans pour qui în din care sunt este cu și şi că"
)
"""Frequent words of its four languages and of SQL, and of few others."""
T5_SHARE = 0.085  # least share of T5_WORDS in a text of these languages

# Tokens per letter, measured with T5's tokenizer on 420 columns of published files: words of its languages, other words
# and words in capitals, words of other vocabularies; codes such as kX9a
KNOWN, STRANGE, OTHER, MIXED = 0.26, 0.72, 0.33, 0.85
PER_SIGN, PER_DIGIT = 1.25, 0.5
LETTER = 1.7  # tokens of a word of one letter
PART = re.compile(r"[^\W_]+|_|[^\w\s]")


def find_vocabulary(model: str) -> Vocabulary:
    """Find the vocabulary of a model by its name.

    >>> find_vocabulary("google/flan-t5-base"), find_vocabulary("google/byt5-small"), find_vocabulary("me/x")
    ('t5', 'bytes', 'unknown')
    """
    for vocabulary, names in VOCABULARIES.items():
        if re.search(names, model):
            return vocabulary
    return "unknown"


def find_lost_characters(model: str, characters: Collection[str]) -> set[str]:
    """Find the characters that a model cannot write, as far as its vocabulary is known.

    >>> sorted(find_lost_characters("t5-base", '{"größe": 1}')), find_lost_characters("google/mt5-base", "{}")
    (['{', '}'], set())
    """
    vocabulary = find_vocabulary(model)
    if vocabulary not in ("t5", "multilingual"):
        return set()
    lost: set[str] = set()
    for character in characters:
        is_break = character.isspace() and character != " "
        if is_break or (vocabulary == "t5" and not _is_in_t5(character)):
            lost.add(character)
    return lost


def _is_in_t5(character: str) -> bool:
    if character.isascii():
        return character not in T5_LACKS
    return character in T5_LETTERS + T5_SIGNS


def choose_start_model(examples: Sequence[TextExample]) -> tuple[str, str]:
    """Return the model and the reason: the small T5, unless many texts have letters that its vocabulary lacks."""
    lost: Counter[str] = Counter()
    num_hit = 0
    for example in examples:
        letters = {letter for letter in example.inputs + example.targets if letter.isalpha() and not _is_in_t5(letter)}
        lost.update(sorted(letters))  # in an order, so that the reason is the same at each start
        num_hit += bool(letters)
    if num_hit < FOREIGN * len(examples):
        return MODEL, "the smallest T5 that is useful: trains on a CPU too"
    shown = " ".join(letter for letter, _ in lost.most_common(5))
    return MULTILINGUAL, f"T5's vocabulary lacks letters of these texts, such as {shown}; mT5's has 101 languages"


def estimate_lengths(model: str, texts: Collection[str]) -> list[int]:
    """Estimate the tokens of some texts of one kind, the end token included."""
    vocabulary = find_vocabulary(model)
    if vocabulary == "bytes":
        return [len(text.encode()) + 1 for text in texts]
    words = Counter(word for text in texts for word in re.findall(r"[^\W\d_]+", text.casefold()))
    num_known = sum(words[word] for word in T5_WORDS.split())
    per_letter = KNOWN if num_known >= T5_SHARE * words.total() else STRANGE
    if vocabulary == "multilingual":
        per_letter = OTHER
    return [estimate_tokens(text, per_letter) for text in texts]


def estimate_tokens(text: str, per_letter: float) -> int:
    """Estimate the tokens of a text, the end token included; a character of a script without blanks is one.

    Args:
        per_letter: tokens per letter of a word; a word has at least one token.

    >>> estimate_tokens("red hat", KNOWN), estimate_tokens("什么是人工智能", KNOWN), estimate_tokens("x={1}", KNOWN)
    (3, 8, 8)
    """
    rest, num_signs = WITHOUT_BLANKS.subn(" ", text)
    num_tokens = float(num_signs)
    for part in PART.findall(rest):
        if part.isdecimal():
            rate = PER_DIGIT
        elif not part.isalnum():
            rate = PER_SIGN
        elif part.islower() or part.istitle():
            rate = per_letter if part.isalpha() else MIXED
        else:
            rate = max(per_letter, STRANGE) if part.isupper() else MIXED
        least = LETTER if len(part) == 1 and part.isalpha() else 1.0
        num_tokens += max(least, rate * len(part))
    return math.ceil(num_tokens) + 1
