"""Find the characters that a tokenizer loses: it encodes them as <unk>, drops them, or replaces them by others.

In: a tokenizer and texts. Out: the lossy characters, the replacement of each, and how often they occur.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fivetune.data.letters import list_structural_tokens
from fivetune.tasks.denoising import SENTINEL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.types import TextExample


T5_TOKENS = ("</s>", "<pad>", "<unk>")
_MARK = r"<\|\w+\|>|<\w+>|\[[A-Z_]+\]|[#*~=|$-]{2,}"
MARKS = {
    "begin with": re.compile(rf"^\s*(?:{_MARK})"),
    "end in": re.compile(rf"(?:{_MARK}|(?<=[\s.!?])[A-Z]{{3,}})\s*$"),
}
"""What data for other models begin with and end in: <bos>, <|endoftext|>, [END], ###, END."""
MIN_PLACES = 20  # questions whose right choices have one place, from which on that is no chance
SHARED_END = 0.8  # least share of the targets that end alike


class LossyCharacter(NamedTuple):
    """One character, its replacement ("" if dropped), how often it occurs, and in how many texts."""

    character: str
    becomes: str
    num_times: int
    num_texts: int


class CharacterCoverage(NamedTuple):
    """The lossy characters, the most frequent first, and the number of texts that contain one.

    White space other than the space is listed, but `num_texts_hit` ignores it: T5 tokenizers encode all of it as a
    space.
    """

    lossy: list[LossyCharacter]
    num_texts_hit: int
    num_texts: int


def find_lossy_characters(tokenizer: PreTrainedTokenizerBase, characters: Iterable[str]) -> dict[str, str]:
    """Return the characters that a round trip between two letters changes, each with its replacement."""
    lossy = {}
    for character in sorted(set(characters) - {" "}):
        ids = tokenizer(f"a{character}a", add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.decode(ids, skip_special_tokens=True) != f"a{character}a":
            lossy[character] = str(tokenizer.decode(ids)).removeprefix("a").removesuffix("a")
    return lossy


def describe_odd_targets(
    tokenizer: PreTrainedTokenizerBase | None,
    examples: Sequence[TextExample],
    lost: Collection[str] | None = None,
    noun: str = "targets",
    *,
    keeps_sentinels: bool = False,
) -> list[str]:
    """Describe what is odd about targets, a sentence for each finding.

    Findings are marks that begin or end most targets, what no answer of the model can hold (special tokens spelt in the
    data, line ends), and right choices that always have one place. Without a tokenizer the tokens are T5's.

    Args:
        lost: characters that the vocabulary lacks, if known; else the tokenizer is asked about line ends.
        noun: what messages call the targets, for example if they are a sample.
        keeps_sentinels: whether answers may have tokens <extra_id_N>, which are then nothing odd.
    """
    if lost is None:
        lost = find_lossy_characters(tokenizer, "\n") if tokenizer else ()
    examples = [one for one in examples if one.targets]
    targets = [SENTINEL.sub("", one.targets) if keeps_sentinels else one.targets for one in examples]
    tokens = list_structural_tokens(tokenizer) if tokenizer else T5_TOKENS
    end = tokens[0]
    total = f"of {len(targets):,} {noun}"
    notes: list[str] = []
    num = sum(target.rstrip().endswith(end) for target in targets)
    if num:
        notes.append(
            f"{num:,} {total} end in {end}, which FiveTune adds itself; in the data it is letters, and part of the "
            "answer. Remove it from the data"
        )
    bare = [target.rstrip().removesuffix(end) for target in targets]
    for words, form in MARKS.items():
        marks: Counter[str] = Counter()
        for text in bare:
            match = form.search(text)
            if match:
                marks[match[0].strip()] += 1
        for mark, num in marks.most_common(1):
            if num >= SHARED_END * len(targets) and len(set(targets)) > 1:
                notes.append(
                    f"{num:,} {total} {words} {mark}, and so will the answers. FiveTune marks the ends itself: remove "
                    "it, unless it is part of the answer"
                )
    for token in tokens:
        num = sum(token in text for text in bare)
        if num:
            notes.append(
                f"{num:,} {total} hold {token}, a special token of the tokenizer: it is read as letters, not as the "
                "token. Remove it, unless the letters are meant"
            )
    sentinels = list(filter(None, map(SENTINEL.search, bare)))
    if sentinels:
        notes.append(
            f"{len(sentinels):,} {total} hold {sentinels[0][0]}, a token of pre-training, which answers leave out. "
            "Remove it, or write another mark"
        )
    if "\n" in lost:
        # Of a reasoning that ends in a number, only the number is compared.
        num = 0
        for one in examples:
            compared = one.references or (one.targets,)
            num += any(len(text.strip().splitlines()) > 1 for text in compared)
        if num:
            notes.append(
                f"{num:,} {total} hold line ends, which the tokenizer turns into spaces: no answer can equal them. "
                "Write another mark, such as ' | ', keep them by model.add_tokens: ['\\n'], or use ByT5"
            )
    note = _describe_fixed_place(examples)
    return [*notes, note] if note else notes


def _describe_fixed_place(examples: Sequence[TextExample]) -> str:
    """Describe that the right choice has the same place in all questions, which the model would learn; else ""."""
    places: Counter[int] = Counter()
    for one in examples:
        choices = one.meta.get("choices", ())
        if one.references and one.references[0] in choices:
            places[choices.index(one.references[0])] += 1
    if len(places) != 1 or places.total() < MIN_PLACES:
        return ""
    ((place, num),) = places.items()
    return (
        f"the right choice is number {place + 1} in all of {num:,} questions: the model would learn its place. Set "
        "task.shuffle_choices: true"
    )


def measure_coverage(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> CharacterCoverage:
    """Count the lossy characters of `texts`."""
    times: Counter[str] = Counter()
    holding: Counter[str] = Counter()
    alphabets: Counter[frozenset[str]] = Counter()
    for text in texts:
        times.update(text)
        alphabets[frozenset(text)] += 1
    lossy = find_lossy_characters(tokenizer, times)
    num_hit = 0
    # Texts of the same characters are counted together: there are few such sets.
    for alphabet, num_texts in alphabets.items():
        hit = alphabet & lossy.keys()
        if not all(map(str.isspace, hit)):
            num_hit += num_texts
        holding.update(dict.fromkeys(hit, num_texts))
    found = [LossyCharacter(character, lossy[character], times[character], holding[character]) for character in lossy]
    found.sort(key=lambda lost: (-lost.num_times, lost.character))
    return CharacterCoverage(found, num_hit, alphabets.total())
