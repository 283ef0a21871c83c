"""Text to ids within limits: what is cut, what is kept, and what is said to be lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fivetune.data.store.encode import GAP, LengthLimits, TokenizedInput, _truncate_to_fit, encode
from fivetune.types import TextExample, TokenExample

QUESTION = "question: What has Ann? context: "


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


class BySpelling:
    """A tokenizer without offsets, as ByT5 is: one id per character."""

    is_fast = False
    eos_token_id, unk_token_id = 1, 0
    eos_token, unk_token = "</s>", "<unk>"

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(character) + 2 for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(number - 2) for number in ids)

    def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def convert_tokens_to_ids(self, token: str) -> int:
        return 1 if token == self.eos_token else 0


def example(context: str, *references: str, start: str = QUESTION) -> TextExample:
    inputs = start + context
    return TextExample("q1", inputs, references[0] if references else "", references, (len(start), len(inputs)))


def one(tokenizer: Any, given: TextExample, **limits: Any) -> TokenExample:
    (encoded,) = encode(tokenizer, [given], [given.targets], limits=LengthLimits(**limits))
    return encoded


# --- nothing to cut ---


def test_ids_are_those_of_the_tokenizer(tokenizer):
    given = example("Ann has a red hat.", "red hat")
    encoded = one(tokenizer, given)
    assert list(encoded.input_ids) == tokenizer(given.inputs)["input_ids"]
    assert list(encoded.labels) == tokenizer("red hat")["input_ids"]
    assert (encoded.num_clipped_inputs, encoded.num_clipped_targets, encoded.answer_clipped) == (0, 0, False)


def test_a_text_that_just_fits_is_left_alone(tokenizer):
    given = example("Ann has a red hat.", "red hat")
    length, target = len(tokenizer(given.inputs)["input_ids"]), len(tokenizer("red hat")["input_ids"])
    fits = one(tokenizer, given, max_input_tokens=length, max_target_tokens=target)
    assert fits == one(tokenizer, given)
    tight = one(tokenizer, given, max_input_tokens=length - 1, max_target_tokens=target - 1)
    assert (tight.num_clipped_inputs, tight.num_clipped_targets) == (1, 1)
    assert list(tight.labels) == [*fits.labels[: target - 2], tokenizer.eos_token_id]


# --- cutting ---


@pytest.mark.parametrize("overlong", ["truncate", "head_tail"])
@pytest.mark.parametrize("limit", [30, 40, 60])
def test_the_question_stays_whole(tokenizer, overlong, limit):
    context = " ".join(f"{who} has a {colour} hat." for who in ("Bob", "Cid", "Dan") for colour in ("red", "blue"))
    encoded = one(tokenizer, example(context), max_input_tokens=limit, overlong=overlong)
    text = tokenizer.decode(encoded.input_ids[:-1])
    assert len(encoded.input_ids) == limit
    assert encoded.input_ids[-1] == tokenizer.eos_token_id
    assert text.startswith(QUESTION + "Bob")
    assert (GAP in text, text.endswith("hat.")) == (overlong == "head_tail",) * 2


def test_the_question_stays_whole_behind_the_context(tokenizer):
    context, question = "context: " + "Bob has a red hat. " * 8, "question: What has Ann?"
    given = TextExample("q1", context + question, "", (), (len("context: "), len(context)))
    text = tokenizer.decode(one(tokenizer, given, max_input_tokens=36).input_ids[:-1])
    assert text.startswith("context: Bob")
    assert text.endswith(question)


@pytest.mark.parametrize(
    ("room", "overlong", "kept"),
    [
        (8, "truncate", ([1, 2, 3, 4, 5, 6, 7, 8], 0, 0)),
        (5, "truncate", ([1, 2, 3, 4, 8], 4, 7)),
        (5, "head_tail", ([1, 2, 3, 4, 8], 4, 7)),  # too little is left for a gap
        (6, "head_tail", ([1, 2, 3, 99, 7, 8], 3, 6)),
        (3, "truncate", ([1, 2, 8], 2, 8)),
        (2, "head_tail", ([1, 2], 2, 8)),
        (1, "truncate", ([1], 1, 8)),
    ],
)
def test_which_ids_are_kept(room, overlong, kept):
    assert _truncate_to_fit(TokenizedInput([1, 2, 3, 4, 5, 6, 7, 8], 2, 7, None), room, overlong, 99) == kept


@given(
    length=st.integers(0, 40),
    span=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    room=st.integers(0, 45),
    overlong=st.sampled_from(["truncate", "head_tail"]),
)
def test_what_is_kept_always_fits(length, span, room, overlong):
    start, stop = sorted(min(place, length) for place in span)
    ids = list(range(length))
    kept, low, high = _truncate_to_fit(TokenizedInput(ids, start, stop, None), room, overlong, 99)
    assert len(kept) == min(length, room)
    assert 0 <= low <= high <= length
    assert [number for number in kept if number != 99] == [number for number in ids if number in kept]
    assert not set(kept) & set(ids[low:high]) or high == length  # past the span, only the tail is cut loosely
    if stop - start > length - room:
        assert set(ids[:start]) | set(ids[stop:]) <= set(kept)


# --- answers ---


@pytest.mark.parametrize(
    ("references", "lost"),
    [(("blue ring",), True), (("red hat",), False), (("blue ring", "hat"), False), (("gold",), False), (("",), False)],
)
@pytest.mark.parametrize("spelling", [False, True])
def test_answers_lost_to_truncation_are_counted(tokenizer, references, lost, spelling):
    chosen = BySpelling() if spelling else tokenizer
    given = example("Ann has a red hat. " + "Bob has a green coat. " * 4 + "Eve has a BLUE ring.", *references)
    full = len(one(chosen, given).input_ids)
    assert one(chosen, given).answer_clipped is False
    assert one(chosen, given, max_input_tokens=full - 12).answer_clipped is lost


def test_head_tail_keeps_an_answer_at_the_end(tokenizer):
    given = example("Ann has a red hat. " + "Bob has a green coat. " * 6 + "Eve has a blue ring.", "blue ring")
    limits = {"max_input_tokens": len(one(tokenizer, given).input_ids) - 40}
    assert one(tokenizer, given, **limits, overlong="truncate").answer_clipped
    assert not one(tokenizer, given, **limits, overlong="head_tail").answer_clipped


def test_letters_that_grow_when_folded_do_not_shift_the_cut(tokenizer):
    given = example("ẞ" * 20 + " Ann has a red hat. " + "Bob has a green coat. " * 6, "red hat")
    full = len(one(tokenizer, given).input_ids)
    assert not one(tokenizer, given, max_input_tokens=full - 10).answer_clipped


def test_an_input_that_nothing_may_be_cut_from(tokenizer):
    given = TextExample("q1", "Ann has a red hat. Bob has a blue ring.", "blue ring", ("blue ring",))
    encoded = one(tokenizer, given, max_input_tokens=8)
    assert list(encoded.input_ids[:-1]) == tokenizer(given.inputs)["input_ids"][:7]
    assert encoded.answer_clipped


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=3), limit=st.integers(1, 20))
def test_any_text_is_encoded_within_the_limits(tokenizer, texts, limit):
    examples = [TextExample(str(i), text, text, (text,), (0, len(text))) for i, text in enumerate(texts)]
    for overlong in ("truncate", "head_tail"):
        for encoded in encode(tokenizer, examples, texts, limits=LengthLimits(limit, limit, overlong)):
            assert 1 <= len(encoded.input_ids) <= limit
            assert 1 <= len(encoded.labels) <= limit
            assert encoded.input_ids[-1] == encoded.labels[-1] == tokenizer.eos_token_id
