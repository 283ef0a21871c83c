"""Text to token ids, within length limits, with a count of what the limits cost.

In: TextExamples and a transformers tokenizer. Out: TokenExamples, each sequence ending in the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fivetune.data.spans import answer_span, token_span
from fivetune.tasks import Head, find_text
from fivetune.types import TextExample, TokenExample

Overlong = Literal["truncate", "head_tail", "windows"]
GAP = "<extra_id_1>"  # stands for the middle that head_tail cuts out


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest sequences in tokens, end token included (None: no limit), and what to do beyond."""

    max_input_tokens: int | None = None
    max_target_tokens: int | None = None
    overlong: Overlong = "truncate"
    window_overlap: int = 128


def encode(
    tokenizer: Any,
    examples: Sequence[TextExample],
    targets: Sequence[str],
    *,
    limits: Limits,
    head: Head = "generate",
    extractive: bool = True,
) -> list[TokenExample]:
    """Encode examples with one target each; for the extractive head, its first and last position in the inputs.

    Over-long inputs lose tokens inside their `clippable` span only, as long as that suffices: the question
    stays whole. `truncate` cuts the end of the span, `head_tail` its middle, with <extra_id_1> in the gap.

        inputs  "question: who? context: a b c d e f"  limit 8, end token included
        truncate   question : who ? context : a </s>

    Only where answers are parts of the inputs, `extractive`, can a cut lose one.
    """
    pieces = pieces_of(tokenizer, examples)
    if head == "extractive":
        return [
            _pointed(tokenizer, example, piece, target, limits)
            for example, piece, target in zip(examples, pieces, targets, strict=True)
        ]
    plain = tokenizer(list(targets), add_special_tokens=False, verbose=False)["input_ids"]
    return [
        _one(tokenizer, example, piece, label_ids, limits, extractive=extractive)
        for example, piece, label_ids in zip(examples, pieces, plain, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Token ids of an input; tokens [start, stop) lie in the clippable span; `offsets` per token if known."""

    ids: list[int]
    start: int
    stop: int
    offsets: list[tuple[int, int]] | None


def pieces_of(tokenizer: Any, examples: Sequence[TextExample]) -> list[Pieces]:
    """The inputs of examples in tokens, without end token."""
    if not tokenizer.is_fast:
        return [_pieces_by_parts(tokenizer, example) for example in examples]
    encoded = tokenizer(
        [e.inputs for e in examples], add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    found = []
    for example, ids, offsets in zip(examples, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        low, high = example.clippable
        inside = [i for i, (a, b) in enumerate(offsets) if a >= low - 1 and b <= high and b > low]
        start, stop = (inside[0], inside[-1] + 1) if inside else (len(ids), len(ids))
        found.append(Pieces(list(ids), start, stop, [tuple(o) for o in offsets]))
    return found


def _pieces_by_parts(tokenizer: Any, example: TextExample) -> Pieces:
    """For tokenizers without offsets (ByT5): encode before, inside and after the span apart."""
    low, high = example.clippable
    texts = example.inputs[:low], example.inputs[low:high], example.inputs[high:]
    before, inside, after = (tokenizer.encode(t, add_special_tokens=False) for t in texts)
    ids = [*before, *inside, *after]
    offsets = [(i, i + 1) for i, char in enumerate(example.inputs) for _ in char.encode("utf-8", "surrogatepass")]
    is_bytes = len(offsets) == len(ids)  # no special token is written out in the text
    return Pieces(ids, len(before), len(before) + len(inside), offsets if is_bytes else None)


def _one(
    tokenizer: Any,
    example: TextExample,
    pieces: Pieces,
    label_ids: list[int],
    limits: Limits,
    *,
    extractive: bool = True,
) -> TokenExample:
    room = len(pieces.ids) if limits.max_input_tokens is None else limits.max_input_tokens - 1
    ids, low, high = _fit(pieces, room, limits.overlong, tokenizer.convert_tokens_to_ids(GAP))
    label_room = len(label_ids) if limits.max_target_tokens is None else limits.max_target_tokens - 1
    return TokenExample(
        id=example.id,
        input_ids=[*ids, tokenizer.eos_token_id],
        labels=[*label_ids[:label_room], tokenizer.eos_token_id],
        num_clipped_inputs=max(len(pieces.ids) - room, 0),
        num_clipped_targets=max(len(label_ids) - label_room, 0),
        answer_clipped=extractive and high > low and _answer_lost(tokenizer, example, pieces, low, high),
    )


def _pointed(tokenizer: Any, example: TextExample, pieces: Pieces, target: str, limits: Limits) -> TokenExample:
    """An example whose labels are the positions of its answer; the no-answer text and a cut answer are nowhere."""
    span = answer_span(example, target) if any(example.references) else None
    labels = token_span(span, _kept_offsets(tokenizer, pieces, limits))
    return replace(_one(tokenizer, example, pieces, [], limits), labels=labels)


def kept_offsets(tokenizer: Any, example: TextExample, limits: Limits) -> list[tuple[int, int] | None]:
    """Characters of the inputs at each position that `encode` keeps, the end token's apart; None for a gap."""
    return _kept_offsets(tokenizer, pieces_of(tokenizer, [example])[0], limits)


def _kept_offsets(tokenizer: Any, pieces: Pieces, limits: Limits) -> list[tuple[int, int] | None]:
    assert pieces.offsets is not None, "an extractive head needs to know where each token stands"
    room = len(pieces.ids) if limits.max_input_tokens is None else limits.max_input_tokens - 1
    ids, low, high = _fit(pieces, room, limits.overlong, tokenizer.convert_tokens_to_ids(GAP))
    num_put_in = max(len(ids) - len(pieces.ids) + (high - low), 0)
    return [*pieces.offsets[:low], *[None] * num_put_in, *pieces.offsets[high:]][: len(ids)]


def _fit(pieces: Pieces, room: int, overlong: Overlong, gap: int | None) -> tuple[list[int], int, int]:
    """Ids that fit, and which tokens [low, high) were taken out.

    >>> _fit(Pieces([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "truncate", 99)
    ([1, 2, 3, 4, 5, 8], 5, 7)
    >>> _fit(Pieces([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "head_tail", 99)
    ([1, 2, 3, 99, 7, 8], 3, 6)
    """
    ids, excess = pieces.ids, len(pieces.ids) - room
    if excess <= 0:
        return ids, 0, 0
    span = pieces.stop - pieces.start
    if excess >= span:
        kept = [*ids[: pieces.start], *ids[pieces.stop :]]
        return kept[:room], min(pieces.start, room), len(ids)
    if overlong == "truncate" or gap is None or span - excess < 3:
        return [*ids[: pieces.stop - excess], *ids[pieces.stop :]], pieces.stop - excess, pieces.stop
    tail = (span - excess - 1) // 2
    low = pieces.start + (span - excess - 1) - tail
    high = pieces.stop - tail
    return [*ids[:low], gap, *ids[high:]], low, high


def _answer_lost(tokenizer: Any, example: TextExample, pieces: Pieces, low: int, high: int) -> bool:
    """Whether every reference that stood in the inputs is gone with tokens [low, high)."""
    there = [reference for reference in example.references if find_text(example.inputs, reference)]
    if not there:
        return False
    if pieces.offsets is not None:
        kept = example.inputs[: pieces.offsets[low][0]], example.inputs[pieces.offsets[high - 1][1] :]
    else:
        kept = tokenizer.decode(pieces.ids[:low]), tokenizer.decode(pieces.ids[high:])
    return not any(find_text(text, reference) for text in kept for reference in there)
