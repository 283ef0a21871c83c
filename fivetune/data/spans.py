"""Answers as token spans of the inputs, for a model that points instead of writing.

In: an example with its answer, and the tokens that were kept of it. Out: the positions of the answer's first and last
token; back again, the text between two positions of the inputs. Position 0 stands for no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivetune.tasks import find_text
from fivetune.types import TextExample

NO_SPAN = (0, 0)
Offsets = Sequence[tuple[int, int] | None]


def find_answer_span(example: TextExample, target: str) -> tuple[int, int] | None:
    """Characters [start, end) of the answer in the inputs: the position given by the source, else its first occurrence.

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
    """Positions of the first and last token of a span; (0, 0) if it is not whole there.

    Args:
        offsets: characters of the token at each position; None for what was put in.

    >>> find_token_span((20, 25), [(0, 2), (2, 19), (19, 22), (22, 25)])
    (2, 3)
    >>> find_token_span((20, 25), [(0, 2), (2, 19), (19, 22)])
    (0, 0)
    """
    if span is None:
        return NO_SPAN
    start, end = span
    inside = [(i, low, high) for i, (low, high) in _iter_known_offsets(offsets) if low < end and high > start]
    if not inside or inside[0][1] > start or inside[-1][2] < end:
        return NO_SPAN
    return inside[0][0], inside[-1][0]


def extract_span_text(inputs: str, offsets: Offsets, first: int, last: int) -> str:
    """The inputs between two positions, without surrounding space.

    >>> extract_span_text("by the Seine", [(0, 2), (2, 6), (6, 9), (9, 12)], 2, 3)
    'Seine'
    """
    ends = [(low, high) for i, (low, high) in _iter_known_offsets(offsets) if first <= i <= last]
    return inputs[ends[0][0] : ends[-1][1]].strip() if ends else ""


def find_context_positions(example: TextExample, offsets: Offsets) -> range:
    """The positions whose tokens lie in the part of the inputs that answers are taken from.

    >>> example = TextExample("q", "q: Where? c: the Seine", "", (), clippable=(13, 22))
    >>> find_context_positions(example, [(0, 2), (2, 9), (9, 12), (12, 16), (16, 22)])
    range(3, 5)
    """
    low, high = example.clippable
    inside = [i for i, (a, b) in _iter_known_offsets(offsets) if a >= low - 1 and b <= high and b > low]
    return range(inside[0], inside[-1] + 1) if inside else range(0)


def _iter_known_offsets(offsets: Offsets) -> Iterator[tuple[int, tuple[int, int]]]:
    return ((i, pair) for i, pair in enumerate(offsets) if pair is not None)
