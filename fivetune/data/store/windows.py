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
    """Return the examples in order, every over-long example replaced by its windows.

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
    size = room - SLACK
    starts = compute_window_starts(span, size, overlap)
    windows: list[TextExample] = []
    for number, start in enumerate(starts, start=1):
        first = pieces.start + start
        low = int(pieces.offsets[first, 0])
        high = int(pieces.offsets[first + size - 1, 1])
        windows.append(_cut_window(example, low, high, number, len(starts)))
    return windows


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
    # A window begins with a word, not with the space before it.
    low += len(example.inputs[low:high]) - len(example.inputs[low:high].lstrip())
    meta = {**example.meta, "window": [number, count]}
    # Places in the inputs move with the text.
    if LITERALS in example.meta:
        meta[LITERALS] = []
        for place in example.meta[LITERALS]:
            if place < start:
                meta[LITERALS].append(place)
            elif low <= place < high:
                meta[LITERALS].append(place - low + start)
            elif place >= end:
                meta[LITERALS].append(place - end + start + high - low)
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

    The answer is a target of the windows that contain it. A window without it has the no-answer text, or no target if
    the task has no such text.
    """
    targets = task.train_targets(example)
    if "window" not in example.meta or task.no_answer_text in targets:
        return targets
    held = tuple(target for target in targets if find_text(example.inputs, target, *example.clippable))
    if not held and task.no_answer_text:
        return (task.no_answer_text,)
    return held
