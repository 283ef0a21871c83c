"""Characters that a tokenizer does not keep: it writes them as <unk>, drops them, or turns them into others.

In: a tokenizer and texts. Out: which characters, what comes back for each, and how often they occur.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LossyCharacter(NamedTuple):
    """One character, what the model reads in its place ("" if nothing), and how often it stands in how many texts."""

    character: str
    becomes: str
    num_times: int
    num_texts: int


class CharacterCoverage(NamedTuple):
    """The characters that are lost, the most frequent first, and how many of the texts hold one.

    White space other than the space is listed, but not counted: T5 tokenizers make a space of all of it.
    """

    lossy: list[LossyCharacter]
    num_texts_hit: int
    num_texts: int


def find_lossy_characters(tokenizer: PreTrainedTokenizerBase, characters: Iterable[str]) -> dict[str, str]:
    """The characters that do not come back from a round trip between two letters, each with what comes back."""
    lossy = {}
    for character in sorted(set(characters) - {" "}):
        ids = tokenizer(f"a{character}a", add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.decode(ids, skip_special_tokens=True) != f"a{character}a":
            lossy[character] = str(tokenizer.decode(ids)).removeprefix("a").removesuffix("a")
    return lossy


def measure_coverage(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> CharacterCoverage:
    """What a tokenizer loses of some texts."""
    times: Counter[str] = Counter()
    holding: Counter[str] = Counter()
    alphabets: Counter[frozenset[str]] = Counter()
    for text in texts:
        times.update(text)
        alphabets[frozenset(text)] += 1
    lossy = find_lossy_characters(tokenizer, times)
    num_hit = 0
    for alphabet, num_texts in alphabets.items():
        hit = alphabet & lossy.keys()
        num_hit += 0 if all(map(str.isspace, hit)) else num_texts
        holding.update(dict.fromkeys(hit, num_texts))
    found = [LossyCharacter(character, lossy[character], times[character], holding[character]) for character in lossy]
    found.sort(key=lambda lost: (-lost.num_times, lost.character))
    return CharacterCoverage(found, num_hit, alphabets.total())
