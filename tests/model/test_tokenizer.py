"""Tokenizers: every published form loads, a lost or foreign vocabulary is refused, transformers is left as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import kit
import pytest
from transformers.utils import logging

from fivetune.errors import ModelError
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.tokenizer import list_pieces, load_tokenizer, save_tokenizer, suppress_output
from recipes.nano.tokenizer import train_tokenizer

SHARED_TOKENIZERS = kit.SHARED / "data/tokenizers"
needs_shared = pytest.mark.skipif(not kit.SHARED.is_dir(), reason=kit.NEEDS_SHARED)


@pytest.fixture
def folder(tmp_path: Path, model_folder: Path) -> Path:
    return shutil.copytree(model_folder, tmp_path / "model")


@needs_shared
def test_a_folder_with_spiece_model_alone_loads_with_a_random_model(tmp_path: Path) -> None:
    config = {**kit.SHAPE, **kit.FAMILIES["mt5"], "vocab_size": 32128, "decoder_start_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = SHARED_TOKENIZERS / "ptt5-portuguese"
    assert [path.name for path in folder.iterdir()] == ["spiece.model"]
    loaded = load_model_and_tokenizer(str(tmp_path), tokenizer=str(folder), init="random")
    assert loaded.tokenizer("Olá mundo").input_ids == [28, 2647, 265, 1]


@needs_shared
def test_spiece_model_and_tokenizer_json_give_the_same_ids(tmp_path: Path) -> None:
    shutil.copy(SHARED_TOKENIZERS / "t5-small/spiece.model", tmp_path)
    text = "Translate English to German: That is good, isn't it?"
    whole = load_tokenizer(str(SHARED_TOKENIZERS / "t5-small"), tmp_path)
    assert load_tokenizer(None, tmp_path)(text).input_ids == whole(text).input_ids


def test_a_damaged_spiece_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(b"no model" * 9)
    with pytest.raises(ModelError, match=r"spiece.model is damaged: sentencepiece cannot read it. Copy the file again"):
        load_tokenizer(None, tmp_path)


@pytest.mark.parametrize(
    "settings", [{"eos_token": "</s>", "pad_token": "<pad>", "tokenizer_class": "T5Tokenizer"}, {}]
)
def test_a_bpe_tokenizer_loads(tmp_path: Path, settings: dict[str, str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    words = Tokenizer(models.BPE(unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=100, special_tokens=["<pad>", "</s>", "<unk>"])
    words.train_from_iterator(["Ann has a red hat."] * 5, trainer)
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(None, tmp_path)
    ids = loaded("Ann has a hat.").input_ids
    assert ids[-1] == loaded.eos_token_id == 1 and loaded.pad_token_id == 0
    assert loaded.decode(ids, skip_special_tokens=True).strip() == "Ann has a hat."


def test_a_lost_vocabulary_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert (folder / "tokenizer_config.json").is_file()
    with pytest.raises(
        ModelError, match=r"has tokenizer_config.json but no vocabulary: tokenizer.json and spiece.model"
    ):
        load_model_and_tokenizer(str(folder))


def test_a_vocabulary_without_pieces_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = [
        pair for pair in content["model"]["vocab"] if pair[0] == "▁" or pair[0][:1] == "<" != pair[0]
    ]
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"vocabulary has no pieces, only special tokens"):
        load_model_and_tokenizer(str(folder))


def test_whole_files_that_cannot_be_read_are_not_called_damaged(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["type"] = "Hieroglyphs"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match=r"files are whole, but this version of transformers cannot read") as caught:
        load_tokenizer(None, folder)
    assert "Copy the file" not in str(caught.value)


def test_another_vocabulary_with_pretrained_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"

    texts = [f"wholly other {word} words {i} of {i * 7} far {word * 3}" for i, word in enumerate("abcdefghijklmnopqr")]
    train_tokenizer(other, texts * 4, num_pieces=320)
    with pytest.raises(ModelError, match=r"is not the vocabulary of the pre-trained weights: .* pieces of .*differ"):
        load_model_and_tokenizer(str(folder), tokenizer=str(other))
    assert load_model_and_tokenizer(str(folder), tokenizer=str(other), init="random").tokenizer is not None


def test_the_models_own_vocabulary_with_more_pieces_is_accepted(folder: Path, tmp_path: Path) -> None:
    words = load_tokenizer(None, folder)
    words.add_tokens(["<new>"])
    words.save_pretrained(tmp_path / "more")
    loaded = load_model_and_tokenizer(str(folder), tokenizer=str(tmp_path / "more"))
    assert "<new>" in list_pieces(loaded.tokenizer)


def test_bytes_need_no_vocabulary_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert load_tokenizer(None, tmp_path)("a").input_ids == [100, 1]


def test_progress_bars_and_warnings_of_transformers_are_restored() -> None:
    before = logging.get_verbosity()
    logging.enable_progress_bar()
    with suppress_output():
        assert not logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == logging.ERROR
    assert logging.is_progress_bar_enabled() and logging.get_verbosity() == before


def test_a_tokenizer_that_cannot_be_written_is_an_os_error(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(OSError, match="Is a directory"):  # tokenizers raises Exception itself
        save_tokenizer(load_tokenizer(None, tokenizer_folder), tmp_path)
