"""Split long contexts into overlapping windows: one example in, one per window out.

Every window keeps the whole question and the question's group, by which fivetune/training/answers/merge.py merges the
answers of all windows.

    limit 8, overlap 2   "question: who? context: a b c d e f"
    windows              "question: who? context: a b c"   "question: who? context: b c d"  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fivetune.data.letters import LITERALS
from fivetune.data.store.encode import LengthLimits, TokenizedInput, compute_input_room, tokenize_inputs
from fivetune.tasks import find_text
from fivetune.types import Task, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLACK = 2  # spare tokens of a window: its first word may be tokenised into more pieces than inside the text
MIN_WINDOW_TOKENS = 8  # smallest useful window of context


def split_into_windows(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample], limits: LengthLimits
) -> list[TextExample]:
    """Return the examples in order, each over-long one replaced by its windows.

    The windows of `q1` have the ids `q1#1`, `q1#2`, the group `q1`, and `meta["window"]` = [number from 1, how many].
    An example whose question leaves no room for a window is not split; `encode` truncates it.
    """
    room = compute_input_room(tokenizer, limits)
    if room is None:
        return list(examples)
    found = []
    tokenized = tokenize_inputs(tokenizer, examples, max_tokens=room)
    for example, pieces in zip(examples, tokenized, strict=True):
        found += _split_example(example, pieces, room, limits.window_overlap)
    return found


def _split_example(example: TextExample, pieces: TokenizedInput, room: int, overlap: int) -> list[TextExample]:
    span = pieces.stop - pieces.start
    room -= len(pieces.ids) - span
    if span <= room or room - SLACK < MIN_WINDOW_TOKENS or pieces.offsets is None:
        return [example]
    starts = compute_window_starts(span, room - SLACK, overlap)
    cuts = [
        (
            int(pieces.offsets[pieces.start + first, 0]),
            int(pieces.offsets[pieces.start + first + room - SLACK - 1, 1]),
        )
        for first in starts
    ]
    return [_cut_window(example, low, high, number, len(cuts)) for number, (low, high) in enumerate(cuts, start=1)]


def compute_window_starts(span: int, room: int, overlap: int) -> list[int]:
    """Return the first token of each window of `room` tokens over `span`; the last window is moved back to be full.

    `overlap` counts as half a window at most, so that the number of windows is proportional to the span.

    >>> compute_window_starts(10, 4, 2), compute_window_starts(9, 4, 1)
    ([0, 2, 4, 6], [0, 3, 5])
    """
    step = room - min(overlap, room // 2)
    return [*range(0, span - room, step), span - room]


def _cut_window(example: TextExample, low: int, high: int, number: int, count: int) -> TextExample:
    """Return the example with its clippable span reduced to the characters [low, high)."""
    start, end = example.clippable
    low = max(low, start)
    low += len(example.inputs[low:high]) - len(example.inputs[low:high].lstrip())
    meta = {**example.meta, "window": [number, count]}
    if LITERALS in example.meta:
        before = [place for place in example.meta[LITERALS] if place < start]
        inside = [place - low + start for place in example.meta[LITERALS] if low <= place < high]
        after = [place - end + start + high - low for place in example.meta[LITERALS] if place >= end]
        meta[LITERALS] = [*before, *inside, *after]
    if example.meta.get("answer_span"):
        a, b = example.meta["answer_span"]
        meta["answer_span"] = [a - low + start, b - low + start] if low <= a and b <= high else None
    return replace(
        example,
        id=f"{example.id}#{number}",
        inputs=example.inputs[:start] + example.inputs[low:high] + example.inputs[end:],
        clippable=(start, start + high - low),
        meta=meta,
        group=example.group or example.id,
    )


def select_window_targets(task: Task, example: TextExample) -> tuple[str, ...]:
    """Return the targets to train on.

    The answer is a target of the windows that contain it; the others have the no-answer text, or no target if the task
    has none.
    """
    targets = task.train_targets(example)
    if "window" not in example.meta or task.no_answer_text in targets:
        return targets
    held = tuple(target for target in targets if find_text(example.inputs, target, *example.clippable))
    return held or ((task.no_answer_text,) if task.no_answer_text else ())
