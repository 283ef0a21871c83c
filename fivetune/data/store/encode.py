"""Tokenise examples within length limits, and count the tokens and answers that the limits remove.

In: TextExamples and a transformers tokenizer. Out: TokenExamples. Inputs have the special tokens that the tokenizer
puts around a text, as when it is called with the text; the labels end with the end token exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
from numpy.typing import NDArray

from fivetune.data.letters import LITERALS, NO_LITERALS, tokenize
from fivetune.data.store.spans import find_answer_span, find_token_span
from fivetune.data.store.words import find_word_table
from fivetune.tasks import Head, find_text
from fivetune.types import TextExample, TokenExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Overlong = Literal["truncate", "head_tail", "windows"]
MAX_CHARACTERS = 1_000_000  # of inputs per call of the tokenizer
GAP = "<extra_id_1>"  # replaces the middle that head_tail removes


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Longest sequences in tokens, end token included (None: no limit), and the treatment of longer inputs."""

    max_input_tokens: int | None = None
    max_target_tokens: int | None = None
    overlong: Overlong = "truncate"
    window_overlap: int = 128


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens before and after the text of inputs, and before the text of targets; targets end with </s>.

        tokenizer                   inputs            targets
        T5, or without any          text </s>         text </s>
        RoBERTa (CodeT5, Bart)      <s> text </s>     <s> text </s>
        Gemma (T5Gemma)             <bos> text        text <eos>

    Gemma's tokenizer adds no end token; the decoder starts with <bos> by itself.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    before_target: tuple[int, ...]

    @property
    def num_input_tokens(self) -> int:
        return len(self.before) + len(self.after)

    @property
    def num_target_tokens(self) -> int:
        return len(self.before_target) + 1


def find_frame(tokenizer: PreTrainedTokenizerBase) -> Frame:
    """Return the frame of a tokenizer, found at the first call by a probe."""
    known = vars(tokenizer).get("_fivetune_frame")
    if known is not None:
        return known
    plain = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    framed = tokenizer("a", verbose=False)["input_ids"]
    at = 0
    while at < len(framed) and framed[at : at + len(plain)] != plain:
        at += 1
    before = tuple(framed[:at])
    after = tuple(framed[at + len(plain) :])
    if before and at < len(framed):
        frame = Frame(before, after, before if after else ())
    else:
        frame = Frame((), (cast("int", tokenizer.eos_token_id),), ())
    vars(tokenizer)["_fivetune_frame"] = frame
    return frame


def encode(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[TextExample],
    targets: Sequence[str],
    *,
    limits: LengthLimits,
    head: Head = "generate",
    extractive: bool = True,
) -> Iterator[TokenExample]:
    """Encode examples with one target each; the extractive head's labels are the answer's first and last position.

    Over-long inputs lose tokens of their `clippable` span first, so that the question stays whole: `truncate` removes
    the end of the span, `head_tail` its middle and puts <extra_id_1> into the gap.

        inputs  "question: who? context: a b c d e f"  limit 8, end token included
        truncate   question : who ? context : a </s>

    Args:
        extractive: answers are parts of the inputs, so that clipping can remove one (`answer_clipped`).
    """
    if head == "extractive":
        pieces = tokenize_inputs(tokenizer, examples)
        for example, piece, target in zip(examples, pieces, targets, strict=True):
            yield _encode_extractive(tokenizer, example, piece, target, limits)
        return
    room = compute_input_room(tokenizer, limits)
    pieces = tokenize_inputs(tokenizer, examples, max_tokens=room)
    for example, piece, label_ids in zip(examples, pieces, _tokenize_targets(tokenizer, targets), strict=True):
        yield _encode_generative(tokenizer, example, piece, label_ids, limits, extractive=extractive)


def compute_input_room(tokenizer: PreTrainedTokenizerBase, limits: LengthLimits) -> int | None:
    """Return the most tokens of an input without its special tokens; None without a limit."""
    if limits.max_input_tokens is None:
        return None
    return max(limits.max_input_tokens - find_frame(tokenizer).num_input_tokens, 0)


def encode_labels(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the labels of whole targets."""
    before = find_frame(tokenizer).before_target
    end = cast("int", tokenizer.eos_token_id)
    return [[*before, *ids, end] for ids in _tokenize_targets(tokenizer, texts)]


@dataclass(frozen=True, slots=True)
class TokenizedInput:
    """Token ids of an input; tokens [start, stop) are clippable; `offsets` [n, 2] are their characters, if known."""

    ids: list[int]
    start: int
    stop: int
    offsets: NDArray[np.int32] | None


def _tokenize_targets(tokenizer: PreTrainedTokenizerBase, targets: Sequence[str]) -> list[list[int]]:
    if table := find_word_table(tokenizer):
        return table.encode(targets)
    return [one.ids for one in tokenize(tokenizer, targets)]


def tokenize_inputs(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample], *, max_tokens: int | None = 0
) -> Iterator[TokenizedInput]:
    """Tokenise the inputs of examples, without special tokens.

    A call of the tokenizer gets MAX_CHARACTERS at most (or one example), because the tokenizer returns Python objects
    of about 200 bytes per token and offset.

    Args:
        max_tokens: inputs of at most so many tokens may lack offsets and clippable tokens, because nothing of them is
            clipped; None: every input may; 0: none may.
    """
    if not tokenizer.is_fast:
        for example in examples:
            yield _tokenize_by_parts(tokenizer, example)
        return
    table = None if max_tokens == 0 else find_word_table(tokenizer)
    for batch in _iter_batches(examples):
        # The word table is faster than the tokenizer, and gives no offsets: it is enough for inputs that fit.
        fitting: list[list[int] | None] = [None] * len(batch)
        if table:
            literals = [e.meta.get(LITERALS, NO_LITERALS) for e in batch]
            for i, ids in enumerate(table.encode([e.inputs for e in batch], literals)):
                if max_tokens is None or len(ids) <= max_tokens:
                    fitting[i] = ids
        rest = [example for example, ids in zip(batch, fitting, strict=True) if ids is None]
        tokenized = _tokenize_with_offsets(tokenizer, rest)
        for ids in fitting:
            if ids is None:
                yield next(tokenized)
            else:
                yield TokenizedInput(ids, len(ids), len(ids), None)


def _tokenize_with_offsets(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample]
) -> Iterator[TokenizedInput]:
    literals = [example.meta.get(LITERALS, NO_LITERALS) for example in examples]
    encoded = tokenize(tokenizer, [example.inputs for example in examples], literals=literals, with_offsets=True)
    for example, (ids, pairs) in zip(examples, encoded, strict=True):
        offsets = np.array(pairs, dtype=np.int32).reshape(-1, 2)
        low, high = example.clippable
        # A token may begin with the space before the span.
        is_inside = (offsets[:, 0] >= low - 1) & (offsets[:, 1] <= high) & (offsets[:, 1] > low)
        inside = np.flatnonzero(is_inside)
        start = stop = len(ids)
        if len(inside):
            start = int(inside[0])
            stop = int(inside[-1]) + 1
        yield TokenizedInput(list(ids), start, stop, offsets)


def _iter_batches(examples: Sequence[TextExample]) -> Iterator[list[TextExample]]:
    batch: list[TextExample] = []
    num_characters = 0
    for example in examples:
        if batch and num_characters + len(example.inputs) > MAX_CHARACTERS:
            yield batch
            batch = []
            num_characters = 0
        batch.append(example)
        num_characters += len(example.inputs)
    if batch:
        yield batch


def _tokenize_by_parts(tokenizer: PreTrainedTokenizerBase, example: TextExample) -> TokenizedInput:
    """Tokenise without the tokenizer's offsets (ByT5, MyT5): encode the text before, inside and after the span."""
    low, high = example.clippable
    texts = example.inputs[:low], example.inputs[low:high], example.inputs[high:]
    literals: list[list[int]] = []
    for start, end in ((0, low), (low, high), (high, len(example.inputs))):
        literals.append([place - start for place in example.meta.get(LITERALS, NO_LITERALS) if start <= place < end])
    before, inside, after = (one.ids for one in tokenize(tokenizer, texts, literals=literals))
    ids = [*before, *inside, *after]
    # A token of ByT5 is a byte, unless the text holds a sentinel; MyT5 writes other bytes than the text's.
    offsets = None
    if type(tokenizer).__name__ == "ByT5Tokenizer":
        pairs: list[tuple[int, int]] = []
        for i, char in enumerate(example.inputs):
            pairs += [(i, i + 1)] * len(char.encode("utf-8", "surrogatepass"))
        if len(pairs) == len(ids):
            offsets = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return TokenizedInput(ids, len(before), len(before) + len(inside), offsets)


def _encode_generative(
    tokenizer: PreTrainedTokenizerBase,
    example: TextExample,
    pieces: TokenizedInput,
    label_ids: list[int],
    limits: LengthLimits,
    *,
    extractive: bool = True,
) -> TokenExample:
    frame = find_frame(tokenizer)
    ids, low, high = _clip_inputs(tokenizer, pieces, limits)
    label_room = len(label_ids)
    if limits.max_target_tokens is not None:
        label_room = max(limits.max_target_tokens - frame.num_target_tokens, 0)
    return TokenExample(
        id=example.id,
        input_ids=[*frame.before, *ids, *frame.after],
        labels=[*frame.before_target, *label_ids[:label_room], cast("int", tokenizer.eos_token_id)],
        num_clipped_inputs=len(pieces.ids) - len(ids),
        num_clipped_targets=max(len(label_ids) - label_room, 0),
        answer_clipped=extractive and high > low and _is_answer_lost(tokenizer, example, pieces, low, high),
    )


def _encode_extractive(
    tokenizer: PreTrainedTokenizerBase, example: TextExample, pieces: TokenizedInput, target: str, limits: LengthLimits
) -> TokenExample:
    """Encode an example with the positions of its answer as labels; (0, 0) for no answer or a clipped answer."""
    span = find_answer_span(example, target) if any(example.references) else None
    labels = find_token_span(span, _compute_offsets(tokenizer, pieces, limits))
    return replace(_encode_generative(tokenizer, example, pieces, [], limits), labels=labels)


def compute_encoded_offsets(
    tokenizer: PreTrainedTokenizerBase, example: TextExample, limits: LengthLimits
) -> list[tuple[int, int] | None]:
    """Return the characters [start, end) of each position that `encode` keeps, without the special tokens at the end;
    None for a gap and a special token.
    """
    [pieces] = tokenize_inputs(tokenizer, [example])
    return _compute_offsets(tokenizer, pieces, limits)


def find_clipped_spans(
    tokenizer: PreTrainedTokenizerBase, example: TextExample, limits: LengthLimits
) -> tuple[tuple[int, int], ...]:
    """Find the characters [start, end) of the inputs that `encode` removes; () without offsets, as of MyT5."""
    [pieces] = tokenize_inputs(tokenizer, [example])
    limit = compute_input_room(tokenizer, limits)
    num = len(pieces.ids)
    if limit is None or num <= limit or pieces.offsets is None:
        return ()
    if num - limit < pieces.stop - pieces.start:
        ranges = [_clip_inputs(tokenizer, pieces, limits)[1:]]
    elif limit > pieces.start:  # the whole span, and the end of what follows it
        ranges = [(pieces.start, pieces.stop), (pieces.stop + limit - pieces.start, num)]
    else:
        ranges = [(limit, num)]
    spans: list[tuple[int, int]] = []
    for low, high in ranges:
        if low < high:
            spans.append((int(pieces.offsets[low, 0]), int(pieces.offsets[high - 1, 1])))
    return tuple(spans)


def _compute_offsets(
    tokenizer: PreTrainedTokenizerBase, pieces: TokenizedInput, limits: LengthLimits
) -> list[tuple[int, int] | None]:
    assert pieces.offsets is not None, "the extractive head needs the offsets of the tokens"
    ids, low, high = _clip_inputs(tokenizer, pieces, limits)
    num_put_in = max(len(ids) - len(pieces.ids) + (high - low), 0)  # 1 for the gap token, which has no characters
    pairs: list[tuple[int, int]] = list(map(tuple, pieces.offsets.tolist()))
    kept: list[tuple[int, int] | None] = [*pairs[:low], *[None] * num_put_in, *pairs[high:]]
    return [*[None] * len(find_frame(tokenizer).before), *kept[: len(ids)]]


def _clip_inputs(
    tokenizer: PreTrainedTokenizerBase, pieces: TokenizedInput, limits: LengthLimits
) -> tuple[list[int], int, int]:
    """Return the ids within the limit of inputs, and the range [low, high) of the removed tokens."""
    room = compute_input_room(tokenizer, limits)
    if room is None:
        return pieces.ids, 0, 0
    gap = cast("int | None", tokenizer.convert_tokens_to_ids(GAP))
    if gap == tokenizer.unk_token_id:  # the tokenizer has no gap token
        gap = None
    return _truncate_to_fit(pieces, room, limits.overlong, gap)


def _truncate_to_fit(
    pieces: TokenizedInput, room: int, overlong: Overlong, gap: int | None
) -> tuple[list[int], int, int]:
    """Return the ids that fit into `room`, and the range [low, high) of the removed tokens.

    >>> _truncate_to_fit(TokenizedInput([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "truncate", 99)
    ([1, 2, 3, 4, 5, 8], 5, 7)
    >>> _truncate_to_fit(TokenizedInput([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), 6, "head_tail", 99)
    ([1, 2, 3, 99, 7, 8], 3, 6)
    """
    ids = pieces.ids
    excess = len(ids) - room
    if excess <= 0:
        return ids, 0, 0
    span = pieces.stop - pieces.start
    # The whole span is not enough: the end of the text after it goes too.
    if excess >= span:
        kept = [*ids[: pieces.start], *ids[pieces.stop :]]
        return kept[:room], min(pieces.start, room), len(ids)
    if overlong == "truncate" or gap is None or span - excess < 3:
        low = pieces.stop - excess
        return [*ids[:low], *ids[pieces.stop :]], low, pieces.stop
    # The gap token takes a place; of an odd number of tokens the head keeps one more.
    tail = (span - excess - 1) // 2
    low = pieces.start + (span - excess - 1) - tail
    high = pieces.stop - tail
    return [*ids[:low], gap, *ids[high:]], low, high


def _is_answer_lost(
    tokenizer: PreTrainedTokenizerBase, example: TextExample, pieces: TokenizedInput, low: int, high: int
) -> bool:
    """Return whether removing tokens [low, high) removes every reference that the inputs contain."""
    there = [reference for reference in example.references if find_text(example.inputs, reference)]
    if not there:
        return False
    if pieces.offsets is not None:
        before = example.inputs[: int(pieces.offsets[low, 0])]
        behind = example.inputs[int(pieces.offsets[high - 1, 1]) :]
    else:
        before = str(tokenizer.decode(pieces.ids[:low]))
        behind = str(tokenizer.decode(pieces.ids[high:]))
    return not any(find_text(before, reference) or find_text(behind, reference) for reference in there)
