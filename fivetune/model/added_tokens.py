"""Add tokens to a vocabulary: signs such as < and {, line ends, words of a domain.

In: a tokenizer and a model. Out: a tokenizer that writes each token without spaces around it, which transformers loads
from the saved files alone; new rows of the embedding, and of an untied head.

A unigram vocabulary such as T5's gets a further piece, not a token of the added kind, behind which the next word would
begin with a space: "a<b" is _a, <, b, and "a < b" is _a, _, <, _b. A word becomes a piece at the beginning of words.
Line ends and tabs, which T5's normaliser makes spaces, are taken out of the text before it; the spaces beside them are
lost.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from fivetune.errors import ModelError
from fivetune.model.tokenizer import TOKENIZER, TOKENIZER_CONFIG, WORD_START, load_tokenizer, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import JsonTable

KEY = "model.add_tokens"
AddedTokens = Mapping[int, Sequence[int]]
"""Id of an added token -> the ids of the known pieces that it replaces."""


def add_tokens(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]
) -> tuple[PreTrainedTokenizerBase, AddedTokens]:
    """Return a tokenizer with further tokens, and what they replace; a token that is one piece already is left out.

    Raises ModelError for a token that no text can hold, or that a text loses.
    """
    if not tokens:
        return tokenizer, {}
    if not tokenizer.is_fast:
        raise ModelError(f"{KEY}: this tokenizer reads bytes, and knows every sign. Remove the setting.")
    new: dict[str, list[int]] = {}
    words: set[str] = set()
    for token in tokens:
        if token not in ("\n", "\t") and token.split() != [token]:
            raise ModelError(f"{KEY}: {token!r} is no token. Allowed are texts without spaces, a line end and a tab.")
        ids = _split(tokenizer, token)
        known = [number for number in ids if number != tokenizer.unk_token_id]
        if len(ids) != 1 or not known:
            new[token] = known
            # Of a script with spaces between words; a letter that is unknown may stand inside of words.
            if token.isalnum() and token.lower() != token.upper() and known == ids:
                words.add(token)
    if not new:
        return tokenizer, {}
    with TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, Path(folder))
        _write_tokens(Path(folder), [*new], words)
        grown = load_tokenizer(None, Path(folder), key=None)
    added: dict[int, Sequence[int]] = {}
    for token, replaced in new.items():
        ids = _split(grown, token)
        spaced = f"a{token}b a {token} b"
        read = grown.decode(grown(spaced, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
        if len(ids) != 1 or read not in (spaced, f"a{token}b a{token}b"):
            raise ModelError(f"{KEY}: the tokenizer makes {read!r} of {spaced!r}, and would lose {token!r}. Remove it.")
        added[ids[0]] = replaced
    return grown, added


def fill_rows(model: T5Model, added: AddedTokens) -> None:
    """Set the rows of added tokens, in the embedding and in an untied head, to the mean of the rows that they replace.

    Where a token replaces unknown signs alone, to the mean of all rows, with which the model begins with nearly the
    same answers as before (Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for table in [embedding] if head is embedding else [embedding, head]:
            mean = table[: min(added)].mean(0)
            for number, replaced in added.items():
                table[number] = table[[*replaced]].mean(0) if replaced else mean


def _split(tokenizer: PreTrainedTokenizerBase, token: str) -> list[int]:
    """Return the ids of the pieces of a token, without the space before it."""
    bare = tokenizer.convert_tokens_to_ids(WORD_START)
    ids = tokenizer(token, add_special_tokens=False)["input_ids"]
    return [number for number in ids if number != bare or bare == tokenizer.unk_token_id]


def _write_tokens(folder: Path, tokens: Sequence[str], words: Container[str]) -> None:
    """Write tokens into the files of a tokenizer: as pieces of a unigram vocabulary, else as tokens in front of it."""
    path, settings_path = folder / TOKENIZER, folder / TOKENIZER_CONFIG
    pipeline: JsonTable = json.loads(path.read_bytes())
    known = sorted(pipeline["added_tokens"], key=itemgetter("id"))
    pieces = pipeline["model"]["vocab"]
    outside = [*tokens]
    if pipeline["model"]["type"] == "Unigram":
        # An id is the place of a piece: tokens that were added behind the pieces become pieces, too.
        pieces += [[one["content"], 0.0] for one in known if one["id"] >= len(pieces)]
        outside = [token for token in tokens if token.isspace()]
        for token in tokens:
            if token not in outside:
                # Scores are logarithms of shares: no piece has more than 0, so that the token is always taken.
                pieces.append([WORD_START * (token in words) + token, 0.0])
        _keep_line_ends(pipeline, outside)
    first = max(len(pieces), *(one["id"] + 1 for one in known))
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for number, token in enumerate(outside, first):
        pipeline["added_tokens"].append({"id": number, "content": token, **plain})
    path.write_text(json.dumps(pipeline), encoding="utf-8")
    if outside:
        # The class of T5 makes its own pipeline when it loads; this class takes the file's pipeline.
        settings: JsonTable = json.loads(settings_path.read_bytes())
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings_path.write_text(json.dumps(settings), encoding="utf-8")


def _keep_line_ends(pipeline: JsonTable, tokens: Sequence[str]) -> None:
    """Let the decoder remove the space with which the word after a line end or tab begins."""
    steps = [pipeline["decoder"], {"type": "Fuse"}]
    steps += [{"type": "Replace", "pattern": {"String": f"{token} "}, "content": token} for token in tokens]
    if tokens:
        pipeline["decoder"] = {"type": "Sequence", "decoders": steps}
