"""The tokenizer without transformers is that of transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fivetune.data.letters import list_structural_tokens, tokenize
from fivetune.data.store.encode import encode_labels, find_frame
from fivetune.errors import ModelError
from fivetune.model.decode.texts import to_text
from fivetune.model.plain_tokenizer import load_plain_tokenizer
from fivetune.model.tokenizer import list_pieces, list_sentinel_ids, load_tokenizer

TEXTS = [
    "Where is my parcel?",
    "Ann </s> has <extra_id_0> a hat.",
    "",
    "  zwei  Räume ",
    "\u4e2d\u6587 \U0001f600 x{y}",
    "<pad>",
]


def test_ids_offsets_and_texts_are_equal(model_folder: Path) -> None:
    plain, whole = load_plain_tokenizer(model_folder), load_tokenizer(None, model_folder)
    assert tokenize(plain, TEXTS, with_offsets=True) == tokenize(whole, TEXTS, with_offsets=True)
    assert encode_labels(plain, TEXTS) == encode_labels(whole, TEXTS)
    assert find_frame(plain) == find_frame(whole)
    for text in TEXTS:
        ids = whole(text)["input_ids"]
        assert plain(text)["input_ids"] == ids
        assert to_text(plain, ids) == to_text(whole, ids)
        assert to_text(plain, ids, keep_special=True) == to_text(whole, ids, keep_special=True)


def test_special_tokens_are_equal(model_folder: Path) -> None:
    plain, whole = load_plain_tokenizer(model_folder), load_tokenizer(None, model_folder)
    assert list_structural_tokens(plain) == list_structural_tokens(whole)
    assert list_sentinel_ids(plain) == list_sentinel_ids(whole) and list_pieces(plain) == list_pieces(whole)
    assert set(plain.all_special_ids) == set(whole.all_special_ids)
    assert plain.get_added_vocab() == whole.get_added_vocab() and len(plain) == len(whole)
    for name in ("eos_token_id", "pad_token_id", "unk_token_id", "unk_token", "bos_token"):
        assert getattr(plain, name) == getattr(whole, name)
    assert plain.convert_tokens_to_ids("no such piece") == whole.convert_tokens_to_ids("no such piece")


def test_other_tokenizers_are_left_to_transformers(model_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model_folder, tmp_path / "model"))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "model_type": "t5gemma"}))
    assert load_plain_tokenizer(folder) is None
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"Export the run again\."):
        load_plain_tokenizer(folder)
