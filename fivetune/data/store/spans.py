"""Convert answers to token spans of the inputs and back, for the extractive head.

In: an example with its answer, and the character offsets of its encoded tokens. Out: the positions of the answer's
first and last token; in reverse, the text between two positions. (0, 0) means no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivetune.tasks import find_text
from fivetune.types import TextExample

NO_SPAN = (0, 0)
Offsets = Sequence[tuple[int, int] | None]


def find_answer_span(example: TextExample, target: str) -> tuple[int, int] | None:
    """Return the characters [start, end) of the answer: by the source's offset, else its first occurrence, else None.

    >>> find_answer_span(TextExample("q", "q: Where? c: by the Seine", "Seine", ("Seine",), clippable=(13, 25)),
    ...     "Seine")
    (20, 25)
    """
    given = example.meta.get("answer_span")
    if given:
        start, end = given
        if example.inputs[start:end] == target:
            return start, end
    return find_text(example.inputs, target, *example.clippable)


def find_token_span(span: tuple[int, int] | None, offsets: Offsets) -> tuple[int, int]:
    """Return the positions of a span's first and last token; (0, 0) if the tokens do not cover the whole span.

    Args:
        offsets: characters [start, end) of the token at each position; None for an inserted gap token.

    >>> find_token_span((20, 25), [(0, 2), (2, 19), (19, 22), (22, 25)])
    (2, 3)
    >>> find_token_span((20, 25), [(0, 2), (2, 19), (19, 22)])
    (0, 0)
    """
    if span is None:
        return NO_SPAN
    start, end = span
    inside: list[tuple[int, int, int]] = []
    for position, (low, high) in _iter_known_offsets(offsets):
        if low < end and high > start:
            inside.append((position, low, high))
    if not inside:
        return NO_SPAN
    first, low, _ = inside[0]
    last, _, high = inside[-1]
    # Where a token was cut away, a part of the answer is missing.
    return (first, last) if low <= start and high >= end else NO_SPAN


def extract_span_text(inputs: str, offsets: Offsets, first: int, last: int) -> str:
    """Return the text of the inputs between two positions, without surrounding space.

    >>> extract_span_text("by the Seine", [(0, 2), (2, 6), (6, 9), (9, 12)], 2, 3)
    'Seine'
    """
    kept = [pair for pair in offsets[first : last + 1] if pair is not None]
    return inputs[kept[0][0] : kept[-1][1]].strip() if kept else ""


def find_context_positions(example: TextExample, offsets: Offsets) -> range:
    """Return the positions of the context's tokens; the context is the clippable part of the inputs.

    >>> example = TextExample("q", "q: Where? c: the Seine", "", (), clippable=(13, 22))
    >>> find_context_positions(example, [(0, 2), (2, 9), (9, 12), (12, 16), (16, 22)])
    range(3, 5)
    """
    start, end = example.clippable
    inside: list[int] = []
    for position, (low, high) in _iter_known_offsets(offsets):
        # A token may begin with the space before the context.
        if low >= start - 1 and start < high <= end:
            inside.append(position)
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def _iter_known_offsets(offsets: Offsets) -> Iterator[tuple[int, tuple[int, int]]]:
    for position, pair in enumerate(offsets):
        if pair is not None:
            yield position, pair
