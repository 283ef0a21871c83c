"""Ids word by word are the tokenizer's own, for any text; tokenizers that join words have no table."""

from __future__ import annotations

from typing import Any

import kit
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from fivetune.data.corpus import CHECKPOINT
from fivetune.data.letters import tokenize
from fivetune.data.store import words
from fivetune.data.store.words import find_word_table
from fivetune.model.tokenizer import load_tokenizer

T5 = kit.SHARED / "data" / "tokenizers" / "t5-small"
LETTERS = "aZé1,.-'’_/\\\t\n  <>▁́­¨  İßﬁſẛ̣Жαﷺำ\r\x1c가一😀"
TEXTS = st.lists(
    st.text(LETTERS, max_size=12) | st.sampled_from(["hat", "</s>", "<extra_id_0>", " ", "Año"]), max_size=6
)


@pytest.fixture(scope="module", params=["t5-nano", "t5-small"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "t5-small" and not T5.is_dir():
        pytest.skip(kit.NEEDS_SHARED)
    return load_tokenizer(None, T5 if request.param == "t5-small" else CHECKPOINT)


@settings(max_examples=200, deadline=None)
@given(st.lists(TEXTS.map(" ".join), min_size=1, max_size=3))
def test_the_ids_are_those_of_the_tokenizer(tokenizer, texts):
    table = find_word_table(tokenizer)
    assert table is not None
    expected = [one.ids for one in tokenize(tokenizer, texts)]
    assert table.encode(texts) == table.encode(texts) == expected


def test_a_full_table_begins_again(tokenizer, monkeypatch):
    monkeypatch.setattr(words, "MAX_WORDS", 3)
    table = words.WordTable(tokenizer)
    for text in ("one two three four", "five", "one six"):
        assert table.encode([text]) == tokenizer([text], add_special_tokens=False)["input_ids"]
        assert len(table._ids) <= 5


def test_a_tokenizer_that_joins_words_has_none(tokenizer_folder):
    other = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert find_word_table(other) is not None
    other.add_tokens(["red hat"])
    assert find_word_table(other) is None
