"""Text to token ids, within length limits, with a count of what the limits cost.

In: TextExamples and a transformers tokenizer. Out: TokenExamples, each sequence ending in the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fivetune.types import TextExample, TokenExample

Overlong = Literal["truncate", "head_tail"]
GAP = "<extra_id_1>"  # stands for the middle that head_tail cuts out


@dataclass(frozen=True, slots=True)
class Limits:
    """Longest sequences in tokens, end token included (None: no limit), and what to do beyond."""

    max_input_tokens: int | None = None
    max_target_tokens: int | None = None
    overlong: Overlong = "truncate"


def encode(
    tokenizer: Any, examples: Sequence[TextExample], targets: Sequence[str], *, limits: Limits
) -> list[TokenExample]:
    """Encode examples with one target each.

    Over-long inputs lose tokens inside their `clippable` span only, as long as that suffices: the question
    stays whole. `truncate` cuts the end of the span, `head_tail` its middle, with <extra_id_1> in the gap.

        inputs  "question: who? context: a b c d e f"  limit 8, end token included
        truncate   question : who ? context : a </s>
    """
    plain = tokenizer(list(targets), add_special_tokens=False, verbose=False)["input_ids"]
    pieces = _pieces(tokenizer, examples)
    return [
        _one(tokenizer, example, piece, label_ids, limits)
        for example, piece, label_ids in zip(examples, pieces, plain, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Token ids of an input; tokens [start, stop) lie in the clippable span; `offsets` per token if known."""

    ids: list[int]
    start: int
    stop: int
    offsets: list[tuple[int, int]] | None


def _pieces(tokenizer: Any, examples: Sequence[TextExample]) -> list[_Pieces]:
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
        found.append(_Pieces(list(ids), start, stop, [tuple(o) for o in offsets]))
    return found


def _pieces_by_parts(tokenizer: Any, example: TextExample) -> _Pieces:
    """For tokenizers without offsets (ByT5): encode before, inside and after the span apart."""
    low, high = example.clippable
    texts = example.inputs[:low], example.inputs[low:high], example.inputs[high:]
    before, inside, after = (tokenizer.encode(t, add_special_tokens=False) for t in texts)
    return _Pieces([*before, *inside, *after], len(before), len(before) + len(inside), None)


def _one(tokenizer: Any, example: TextExample, pieces: _Pieces, label_ids: list[int], limits: Limits) -> TokenExample:
    room = len(pieces.ids) if limits.max_input_tokens is None else limits.max_input_tokens - 1
    ids, low, high = _fit(pieces, room, limits.overlong, tokenizer.convert_tokens_to_ids(GAP))
    label_room = len(label_ids) if limits.max_target_tokens is None else limits.max_target_tokens - 1
    return TokenExample(
        id=example.id,
        input_ids=[*ids, tokenizer.eos_token_id],
        labels=[*label_ids[:label_room], tokenizer.eos_token_id],
        num_clipped_inputs=max(len(pieces.ids) - room, 0),
        num_clipped_targets=max(len(label_ids) - label_room, 0),
        answer_clipped=high > low and _answer_lost(tokenizer, example, pieces, low, high),
    )


def _fit(pieces: _Pieces, room: int, overlong: Overlong, gap: int | None) -> tuple[list[int], int, int]:
    """Ids that fit, and which tokens [low, high) were taken out.

    >>> _fit(_Pieces([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "truncate", 99)
    ([1, 2, 3, 4, 5, 8], 5, 7)
    >>> _fit(_Pieces([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "head_tail", 99)
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


def _answer_lost(tokenizer: Any, example: TextExample, pieces: _Pieces, low: int, high: int) -> bool:
    """Whether every reference that stood in the inputs is gone with tokens [low, high)."""
    text = example.inputs.casefold()
    there = [r.casefold() for r in example.references if r and r.casefold() in text]
    if not there:
        return False
    if pieces.offsets is not None:
        before = example.inputs[: pieces.offsets[low][0]].casefold()
        after = example.inputs[pieces.offsets[high - 1][1] :].casefold()
    else:
        before, after = (tokenizer.decode(part).casefold() for part in (pieces.ids[:low], pieces.ids[high:]))
    return not any(r in before or r in after for r in there)
