"""Trim the vocabulary of a model: keep the pieces that some texts use, drop the rows of all others.

In: a model of T5's tables with a unigram tokenizer, the number of times that texts use each id. Out: a tokenizer and
tables of the kept pieces. A unigram model segments a text into the most probable pieces, whatever pieces it has beside
them (Kudo 2018), so a text whose pieces are all kept has the same segmentation: old ids [7, 9, 9] are new ids [3, 4, 4]
where 7 and 9 are the 4th and 5th kept piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fivetune.data.letters import tokenize
from fivetune.data.store.encode import find_frame
from fivetune.errors import ModelError
from fivetune.model.family import find_family, has_span_head
from fivetune.model.tokenizer import TOKENIZER, WORD_START, load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import JsonTable

ROW_MULTIPLE = 8  # of the tables: matrix products of other sizes are slower on GPUs
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
ID_SETTINGS = (  # settings of generation with ids, besides names that end in _token_id
    "bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_decoder_ids", "sequence_bias",
    "suppress_tokens",
)  # fmt: skip
LOADED_SETTINGS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "transformers_version")
SENTINEL_PART = "extra_id_"  # mT5's sentinels are pieces, with a mark of a space before them
MAX_CHARACTERS = 1_000_000  # per call of the tokenizer, which returns about 200 bytes per token
Ids = NDArray[np.int64]


def refuse_untrimmable(raw: JsonTable, tokenizer: PreTrainedTokenizerBase, where: Path | str) -> None:
    """Raise ModelError for a model whose vocabulary cannot be trimmed.

    Args:
        raw: content of config.json.
    """
    family = find_family(raw, where, any_seq2seq=None)
    if not family.t5_tables:
        raise ModelError(
            f"{where}: model_type {family.model_type!r} has other tables than T5's, which trim-vocab does not divide. "
            "Trim a model with T5's embedding and head: t5, mt5, umt5, longt5."
        )
    if has_span_head(raw):
        raise ModelError(f"{where}: has a span head. Trim the model with a language model head that it was made of.")
    if not tokenizer.is_fast:
        raise ModelError(f"{where}: the tokens of {type(tokenizer).__name__} are bytes: there is nothing to trim.")
    kind = _read_pipeline(tokenizer)["model"]["type"]
    if kind != "Unigram":
        raise ModelError(
            f"{where}: the tokenizer is a {kind} model, whose pieces are merged from others and cannot be dropped one "
            "by one. Trim a model with a unigram vocabulary, as T5's and mT5's."
        )


def iter_ids(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield each text with its ids, special tokens included; memory holds MAX_CHARACTERS."""
    frame = find_frame(tokenizer)
    for batch in _iter_text_batches(texts):
        for text, one in zip(batch, tokenize(tokenizer, batch), strict=True):
            yield text, [*frame.before, *one.ids, *frame.after]


def _iter_text_batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters > MAX_CHARACTERS:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def choose_ids(
    tokenizer: PreTrainedTokenizerBase, counts: Ids, characters: set[str], *, config_ids: Iterable[int], margin: int
) -> Ids:
    """Choose the ids to keep, in ascending order; a multiple of ROW_MULTIPLE of them if there are enough pieces.

    Kept are the ids that the texts use, special tokens, sentinels, byte pieces, the mark of a space, the single
    characters that occur, the least probable piece, on which the score of an unknown character depends, and, of the
    others, the pieces with the lowest ids, which are the most probable in T5's vocabularies.

    Args:
        counts: [rows of the table] how often the texts use each id.
        config_ids: ids in config.json: start, end, pad.
        margin: number of further pieces.
    """
    pipeline = _read_pipeline(tokenizer)
    pieces: list[tuple[str, float]] = pipeline["model"]["vocab"]
    normalizer = getattr(tokenizer, "backend_tokenizer").normalizer  # noqa: B009 (only fast tokenizers have one)
    shown = set(characters)
    if normalizer:
        shown.update(normalizer.normalize_str("".join(sorted(characters))))
    added = [token["id"] for token in pipeline["added_tokens"]]
    keep = counts > 0
    keep[[*tokenizer.all_special_ids, *config_ids, *added]] = True
    # An unknown character's score is the least one of all pieces, minus a constant.
    keep[min(range(len(pieces)), key=lambda number: pieces[number][1])] = True
    for number, (piece, _) in enumerate(pieces):
        is_character = piece.removeprefix(WORD_START) in shown or piece == WORD_START
        keep[number] |= is_character or SENTINEL_PART in piece or BYTE_PIECE.fullmatch(piece) is not None
    # A margin of further pieces, and as many more as make the tables' size a multiple.
    others = np.flatnonzero(~keep[: len(pieces)])
    num_more = min(margin, len(others))
    num_more += -(int(keep.sum()) + num_more) % ROW_MULTIPLE
    keep[others[:num_more]] = True
    return np.flatnonzero(keep)


def trim_tokenizer(tokenizer: PreTrainedTokenizerBase, kept: Ids, folder: Path) -> PreTrainedTokenizerBase:
    """Write a tokenizer of the kept ids into `folder`, and load it; pieces keep their order and scores."""
    save_tokenizer(tokenizer, folder)
    path = folder / TOKENIZER
    pipeline = json.loads(path.read_bytes())
    new = {old: number for number, old in enumerate(kept.tolist())}
    model = pipeline["model"]
    # Added tokens have the ids behind the vocabulary.
    model["vocab"] = [model["vocab"][old] for old in kept.tolist() if old < len(model["vocab"])]
    model["unk_id"] = new[model["unk_id"]]
    for token in pipeline["added_tokens"]:
        token["id"] = new[token["id"]]
    for token in ((pipeline["post_processor"] or {}).get("special_tokens") or {}).values():
        token["ids"] = [new[old] for old in token["ids"]]
    path.write_text(json.dumps(pipeline, ensure_ascii=False), encoding="utf-8")
    return load_tokenizer(None, folder)


def verify_segmentation(
    old: PreTrainedTokenizerBase, new: PreTrainedTokenizerBase, kept: Ids, texts: Iterable[str]
) -> int:
    """Return the number of tokens of the texts. Raises ModelError unless the new ids are those of the old pieces."""
    num_tokens = 0
    num_special = find_frame(old).num_input_tokens
    for batch in _iter_text_batches(texts):
        for text, before, after in zip(batch, tokenize(old, batch), tokenize(new, batch), strict=True):
            if not np.array_equal(before.ids, kept[np.array(after.ids, np.int64)]):
                raise ModelError(
                    f"trim-vocab: the trimmed tokenizer segments a text of the data differently: {text[:60]!r}. "
                    "Nothing is written; report it with this text."
                )
            num_tokens += len(after.ids) + num_special
    return num_tokens


def trim_tables(model: T5Model, kept: Ids) -> None:
    """Reduce embedding and output head, tied or not, to the kept rows in place, and renumber the ids of the config."""
    # Tied tables are one weight, which stays one: modules find their new table by the old one.
    tables = {model.get_input_embeddings().weight, model.get_output_embeddings().weight}
    trimmed = {table: nn.Parameter(table.detach()[torch.from_numpy(kept)]) for table in tables}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.Linear) and module.weight in tables:
            module.weight = trimmed[module.weight]
            setattr(module, "num_embeddings" if isinstance(module, nn.Embedding) else "out_features", len(kept))
    model.config.vocab_size = len(kept)
    both: tuple[Any, ...] = (model.config, model.generation_config)
    for settings in both:
        for name, value in replace_token_ids(settings.to_dict(), kept).items():
            setattr(settings, name, value)


def list_token_ids(settings: JsonTable) -> dict[str, list[int]]:
    """The ids of tokens in the entries of config.json or generation_config.json, such as eos_token_id or bad_words_ids.

    >>> list_token_ids({"eos_token_id": [1, 7], "bad_words_ids": [[5, 6], [9]], "max_new_tokens": 4})
    {'eos_token_id': [1, 7], 'bad_words_ids': [5, 6, 9]}
    """
    found: dict[str, list[int]] = {}
    for name, value in settings.items():
        ids: list[int] = []

        def collect(one: int, ids: list[int] = ids) -> int:
            ids.append(one)
            return one

        _convert_ids(name, value, collect)
        if ids:
            found[name] = ids
    return found


def replace_token_ids(settings: JsonTable, kept: Ids) -> JsonTable:
    """The entries with ids of tokens, by their new numbers; all of them are kept."""
    new = {old: number for number, old in enumerate(kept.tolist())}
    return {name: _convert_ids(name, settings[name], new.__getitem__) for name in list_token_ids(settings)}


def _convert_ids(name: str, value: Any, convert: Callable[[int], int]) -> Any:
    """The value of an entry with each id of a token converted; values of other entries are returned unchanged."""
    if not name.endswith(("_token_id", "_token_ids")) and name not in ID_SETTINGS:
        return value
    if name == "sequence_bias":  # [[ids, bias], ...]
        return [[_convert_ids("bad_words_ids", ids, convert), bias] for ids, bias in value or ()] or value
    if name == "forced_decoder_ids":  # [[position, id], ...]
        return [[position, _convert_ids("suppress_tokens", one, convert)] for position, one in value or ()] or value
    if isinstance(value, list):
        return [_convert_ids(name, one, convert) for one in value]
    return convert(value) if type(value) is int and value >= 0 else value


def read_generation_settings(folder: Path) -> JsonTable:
    """The entries of generation_config.json that a loaded model does not have; {} without the file.

    Raises ModelError for a file that transformers would refuse to write.
    """
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_bytes())
        GenerationConfig(**table).validate(strict=True)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path}: is refused: {str(error).strip().splitlines()[0]} Correct it.") from None
    return {name: value for name, value in table.items() if name not in LOADED_SETTINGS and value is not None}


def find_unknown_characters(tokenizer: PreTrainedTokenizerBase, characters: Iterable[str]) -> list[str]:
    """The characters that the tokenizer encodes as unknown, in order."""
    unknown: list[str] = []
    rest = iter(sorted(characters))
    while batch := list(islice(rest, 1_000)):
        encoded: Sequence[list[int]] = tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]
        unknown += [one for one, ids in zip(batch, encoded, strict=True) if tokenizer.unk_token_id in ids]
    return unknown


def _read_pipeline(tokenizer: PreTrainedTokenizerBase) -> JsonTable:
    """tokenizer.json of a fast tokenizer."""
    return json.loads(getattr(tokenizer, "backend_tokenizer").to_str())  # noqa: B009 (only fast tokenizers have one)
