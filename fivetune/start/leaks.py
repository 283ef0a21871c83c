"""Targets that stand in their inputs: what the model would learn to copy, not to find.

In: examples. Out: sentences that the user should read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from fivetune.data.readers.source_files import quote_value
from fivetune.start.roles import USUAL, rate_name
from fivetune.types import TextExample

LONG_TARGET = 12  # characters of a target that stands in its input by no chance
HELD, OFTEN = 0.8, 0.3  # share of inputs that hold their targets: where parts of texts are learned, and elsewhere
WHOLE = 0.8  # length of a target, as a share of its input, from which on the pair is a text and its correction
MARKED = re.compile(r"([^\W\d_]+)\s*(?:[:=：]\s*)+")
FILLERS = ("OA", "is")  # words between a mark and the answer
SPOILERS = ("show", "spoiler", "oa")
ROLES = ("answer", "label", "targets")  # their words mark what is learned
MIN_MARKED, MARKED_SHARE = 3, 0.02  # inputs with a marked target that are no chance
MAX_OTHER = 0.2  # share of marks with the target of another record up to which they mark their own


def describe_held(examples: Sequence[TextExample], what: str, *, is_usual: bool) -> Iterator[str]:
    """Yield a sentence if most or many inputs hold their targets word for word.

    Args:
        what: the examples in words: "sampled inputs".
        is_usual: parts of the inputs may be learned on purpose.
    """
    held = [one for one in examples if len(one.targets) >= LONG_TARGET and one.targets in one.inputs]
    parts = [one for one in held if len(one.targets) < WHOLE * len(one.inputs)]
    if len(held) > HELD * len(examples) or (len(parts) > OFTEN * len(examples) and not is_usual):
        shown = quote_value(held[0].targets, limit=40)
        yield (
            f"{len(held):,} of {len(examples):,} {what} hold what is to be learned word for word, such as {shown}: the "
            "model would learn to copy it. Name other columns if these are whole prompts, else leave such records out"
        )


def describe_marked(examples: Sequence[TextExample], what: str) -> Iterator[str]:
    """Yield a sentence if inputs give their targets away behind a word such as `Answer:`."""
    known = {_split_words(one.targets) for one in examples}
    found: dict[str, list[str]] = {}  # mark -> inputs
    num_found = num_other = 0
    for one in examples:
        goal = _split_words(one.targets)
        behind = _find_marked(one.inputs, len(one.targets))
        own = [mark for mark, words in behind.items() if goal and words[: len(goal)] == goal]
        if own:
            num_found += 1
            found.setdefault(own[0], []).append(one.inputs)
        elif any(words[:number] in known for words in behind.values() for number in (1, 2, 3)):
            num_other += 1
    least = max(MIN_MARKED, MARKED_SHARE * len(examples))
    if num_found >= least and num_other <= MAX_OTHER * (num_found + num_other):
        mark = max(found, key=lambda one: len(found[one]))
        first = found[mark][0]
        place = first.rindex(mark)
        yield (
            f"{num_found:,} of {len(examples):,} {what} give away what is to be learned, behind a word such as "
            f"{mark!r}: {quote_value(first[place : place + 40])}. Remove it from the texts"
        )


def _find_marked(text: str, num_chars: int) -> dict[str, tuple[str, ...]]:
    """Find the words behind the last place of each mark; earlier places belong to examples in a prompt."""
    found: dict[str, tuple[str, ...]] = {}
    for match in MARKED.finditer(text):
        if _is_mark(match[1]):
            words = _split_words(text[match.end() : match.end() + num_chars + LONG_TARGET])
            while words and words[0] in FILLERS:
                words = words[1:]
            found[match[1]] = words
    return found


@lru_cache(10_000)
def _is_mark(word: str) -> bool:
    return word.casefold() in SPOILERS or max(rate_name(role, word) for role in ROLES) >= USUAL


def _split_words(text: str) -> tuple[str, ...]:
    return (*re.findall(r"\w+", text),)
