"""Long contexts as overlapping windows: one example in, one for each window out.

Every window keeps the question whole and belongs to the question's group, so that the answers of all windows become
one (fivetune/evaluation/merge.py).

    limit 8, overlap 2   "question: who? context: a b c d e f"
    windows              "question: who? context: a b c"   "question: who? context: b c d"  ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fivetune.data.encode import LengthLimits, TokenizedInput, tokenize_inputs
from fivetune.tasks import Task, find_text
from fivetune.types import TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SLACK = 2  # tokens that a cut may cost: a word that begins a window can be other pieces than inside a text
MIN_WINDOW_TOKENS = 8  # tokens of context below which a window is not worth asking


def split_into_windows(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample], limits: LengthLimits
) -> list[TextExample]:
    """The examples, each over-long one as its windows, in order.

    The windows of `q1` have the ids `q1#1`, `q1#2`, the group `q1`, and in `meta["window"]` their number and how many
    there are. An example whose question alone fills the limit stays as it is, and is truncated.
    """
    if limits.max_input_tokens is None:
        return list(examples)
    found = []
    for example, pieces in zip(examples, tokenize_inputs(tokenizer, examples), strict=True):
        found += _split_example(example, pieces, limits.max_input_tokens - 1, limits.window_overlap)
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
    """First tokens of windows of `room` tokens over `span`; the last window is moved back to be full.

    Windows overlap by half of themselves at most, so that their number stays in proportion to the span.

    >>> compute_window_starts(10, 4, 2), compute_window_starts(9, 4, 1)
    ([0, 2, 4, 6], [0, 3, 5])
    """
    step = room - min(overlap, room // 2)
    return [*range(0, span - room, step), span - room]


def _cut_window(example: TextExample, low: int, high: int, number: int, count: int) -> TextExample:
    """The example with the characters [low, high) of its clippable span only."""
    start, end = example.clippable
    low = max(low, start)
    low += len(example.inputs[low:high]) - len(example.inputs[low:high].lstrip())
    meta = {**example.meta, "window": [number, count]}
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
    """What is learnt from an example.

    An answer is learnt from the windows that hold it; the others teach that there is none, or nothing at all.
    """
    targets = task.train_targets(example)
    if "window" not in example.meta or task.no_answer_text in targets:
        return targets
    held = tuple(target for target in targets if find_text(example.inputs, target, *example.clippable))
    return held or ((task.no_answer_text,) if task.no_answer_text else ())
