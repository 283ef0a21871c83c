"""Tokens that a vocabulary is grown by: texts come back, transformers alone reads them alike, rows begin as means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from family_kit import make_family_tokenizer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from fivetune.data.characters import find_lossy_characters
from fivetune.errors import ConfigError, ModelError
from fivetune.model.added_tokens import add_tokens
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.model.tokenizer import load_tokenizer
from fivetune.training.setup import load_configured_model

TOKENS = ["→", "漢", "\n", "\t", "COVID-19", "hats"]
TEXTS = ["a→b", "a → b", "Ann\nhas\n\na hat", "if a→漢:\n\tb", "\na", "COVID-19→hats", "hatss whats"]
SPIECE = kit.SHARED / "data/tokenizers/t5-small"


def read_back(tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back_without_further_spaces(tokenizer_folder, text):
    grown, added = add_tokens(load_tokenizer(None, tokenizer_folder), TOKENS)
    assert read_back(grown, text) == text
    assert len(added) == len(TOKENS)
    assert len(grown) == len(load_tokenizer(None, tokenizer_folder)) + len(TOKENS)
    assert grown.unk_token_id not in grown(text).input_ids
    assert not find_lossy_characters(grown, set(text))


@pytest.mark.skipif(not SPIECE.exists(), reason=kit.NEEDS_SHARED)
def test_t5_reads_code():
    signs = ["<", "{", "}", "\\", "^", "~", "`", "\n", "\t"]
    own = load_tokenizer(None, SPIECE)
    grown, _ = add_tokens(own, signs)
    text = "if (a<b) {\n\tx = `y^2` ~ \\z;\n}"
    assert read_back(own, text) != text == read_back(grown, text)
    plain = "Older texts keep their pieces: 1,200 hats."
    assert own(plain).input_ids == grown(plain).input_ids


@pytest.mark.parametrize("kind", ["gemma", "roberta"])
def test_other_vocabularies_have_added_tokens(tmp_path, kind):
    grown, added = add_tokens(load_tokenizer(None, make_family_tokenizer(tmp_path / kind, kind)), ["hats", "→"])
    assert added
    for text in ("Ann has a hats", "Ann→hats"):
        assert read_back(grown, text) == text


@pytest.mark.parametrize("family", ["t5", "v1_1"])  # a tied and an untied head
def test_rows_begin_as_means_and_transformers_alone_agrees(tmp_path, family_folders, family):
    before = load_model_and_tokenizer(str(family_folders[family]))
    loaded = load_model_and_tokenizer(str(family_folders[family]), new_tokens=TOKENS)
    save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    ids = words(TEXTS, return_tensors="pt", padding=True)
    assert ids["input_ids"].tolist() == loaded.tokenizer(TEXTS, padding=True).input_ids
    assert words.batch_decode(ids["input_ids"], skip_special_tokens=True) == TEXTS
    models: tuple[Any, ...] = (loaded.model, theirs)
    written = [model.eval().generate(**ids, max_new_tokens=8) for model in models]
    assert torch.equal(*written)
    # Of a word the mean of its pieces, of an unknown sign the mean of all rows.
    for table, old in (
        (loaded.model.shared.weight, before.model.shared.weight),
        (loaded.model.lm_head.weight, before.model.lm_head.weight),
    ):
        replaced = before.tokenizer("hats", add_special_tokens=False).input_ids
        word = loaded.tokenizer.convert_tokens_to_ids("▁hats")
        assert torch.allclose(table[word], old[replaced].mean(0), atol=1e-6)
        sign = loaded.tokenizer.convert_tokens_to_ids("→")
        assert torch.allclose(table[sign], old[: len(before.tokenizer)].mean(0), atol=1e-6)


def test_tokens_are_added_once(tmp_path, family_folders):
    loaded = load_model_and_tokenizer(str(family_folders["t5"]), new_tokens=["→", "\n"])
    save_model(loaded.model, loaded.tokenizer, tmp_path / "model")
    again = load_model_and_tokenizer(str(tmp_path / "model"), new_tokens=["→", "\n", "\t", "漢"])
    assert len(again.tokenizer) == len(loaded.tokenizer) + 2
    assert "2 of 4 tokens are in the vocabulary already" in again.warnings[-1]
    assert read_back(again.tokenizer, "a→b\n漢\tc") == "a→b\n漢\tc"


def test_tables_that_grow_for_added_tokens_are_no_alarm():
    """Their rows begin as means; only rows that nothing fills are told of."""
    loaded = load_model_and_tokenizer("t5-nano", new_tokens=["<ticket>", "{"])
    assert loaded.model.shared.weight.shape[0] > 2048
    assert loaded.warnings == ["model.add_tokens: 1 of 2 tokens are in the vocabulary already."]


@pytest.mark.parametrize("token", ["a b", "", " →", "\r"])
def test_what_is_no_token_is_refused(tokenizer_folder, token):
    with pytest.raises(ModelError, match="is no token"):
        add_tokens(load_tokenizer(None, tokenizer_folder), [token])


@pytest.mark.skipif(not SPIECE.exists(), reason=kit.NEEDS_SHARED)
def test_a_sign_that_the_normaliser_changes_is_refused():
    with pytest.raises(ModelError, match="would lose 'Ⅻ'"):
        add_tokens(load_tokenizer(None, SPIECE), ["Ⅻ"])


def test_bytes_need_none(tmp_path):
    with pytest.raises(ModelError, match="reads bytes"):
        add_tokens(load_tokenizer(None, make_family_tokenizer(tmp_path / "b", "bytes")), ["→"])


@pytest.mark.parametrize("frozen", [{"freeze": ["shared"]}, {"adapter": {"name": "lora"}}])
def test_an_embedding_that_is_not_trained_is_refused(tmp_path: Path, model_folder, frozen):
    from fivetune.config import load_config

    table = kit.recipe(tmp_path, model_folder)
    table["model"] |= {"add_tokens": ["→"], **frozen}
    with pytest.raises(ConfigError, match="the embedding is not trained"):
        load_configured_model(load_config(table), "cpu")
