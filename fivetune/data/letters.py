"""Encode special tokens that a text spells out as letters: `</s>` in a user's text does not end the text.

In: a tokenizer and texts. Out: ids and offsets, those of the tokenizer for all texts that spell out none. Tokens that
were added for use in texts, as <extra_id_0> or <hl>, stay tokens.

The option `split_special_tokens` of transformers does not do it: it also divides the sentinels, and a unigram
vocabulary holds `</s>` as a piece, which the model then finds in the letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.types import JsonTable

STRUCTURAL = ("eos_token", "pad_token", "unk_token", "bos_token", "cls_token", "sep_token")
UNMATCHED = "\uffff"  # no character, so no text has it


class EncodedText(NamedTuple):
    """Ids of a text without special tokens, and the characters [start, end) of each if they are known."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


def list_structural_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens that the tokenizer puts around a text or in its place: end, pad, unknown, start."""
    named = (getattr(tokenizer, name, None) for name in STRUCTURAL)
    return tuple(dict.fromkeys(str(token) for token in named if token))


def tokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, with_offsets: bool = False
) -> list[EncodedText]:
    """Tokenise texts without special tokens, those that they spell out as letters.

    Args:
        with_offsets: only fast tokenizers have them.
    """
    if not texts:
        return []
    options = {"return_offsets_mapping": True} if with_offsets else {}
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)
    found = encoded["input_ids"]
    offsets = encoded["offset_mapping"] if with_offsets else [None] * len(found)
    rows = map(EncodedText, found, offsets)
    return [spell_out(tokenizer, text, row.ids) or row for text, row in zip(texts, rows, strict=True)]


def spell_out(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> EncodedText | None:
    """Return the letters of a text that spells out a structural token, None for any other text.

    Args:
        ids: of the text, as the tokenizer gives them. They show tokens that only its normaliser makes, of full-width
            characters for example; but an unknown token stands for characters, too.
    """
    structural, unknown = _find_structural_ids(tokenizer)
    if structural.isdisjoint(ids) and not (unknown and unknown in text):
        return None
    if not tokenizer.is_fast:
        return EncodedText(_encode_without_trie(tokenizer, text), None)
    found = _find_letter_backend(tokenizer).encode(text, add_special_tokens=False)
    return EncodedText(found.ids, found.offsets)


def _find_structural_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], str]:
    """Return the ids of the structural tokens but the unknown one, and the unknown token."""
    unknown = str(tokenizer.unk_token or "")
    known = vars(tokenizer).get("_fivetune_structural")
    if known is None:
        tokens = [token for token in list_structural_tokens(tokenizer) if token != unknown]
        known = frozenset(int(tokenizer.convert_tokens_to_ids(token)) for token in tokens)
        vars(tokenizer)["_fivetune_structural"] = known
    return known, unknown


def _encode_without_trie(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode with a tokenizer in Python (ByT5, MyT5): other added tokens stay tokens."""
    structural = list_structural_tokens(tokenizer)
    others = {token: number for token, number in tokenizer.get_added_vocab().items() if token not in structural}
    pattern = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text) if others else [text]:
        if part in others:
            ids.append(others[part])
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
    return ids


def _find_letter_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return a copy of a fast tokenizer that does not know the structural tokens, made at the first text with one."""
    known = vars(tokenizer).get("_fivetune_letters")
    if known is None or known[0] != len(tokenizer):
        known = len(tokenizer), _build_letter_backend(tokenizer)
        vars(tokenizer)["_fivetune_letters"] = known
    return known[1]


def _build_letter_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    from tokenizers import Tokenizer

    pipeline: JsonTable = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore
    structural, model = list_structural_tokens(tokenizer), pipeline["model"]
    hidden = {token: f"{UNMATCHED}{number}" for number, token in enumerate(structural)}
    if isinstance(model["vocab"], list):  # Unigram: pairs of piece and score
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        hidden.pop(str(model.get("unk_token")), None)  # the model looks it up by its name
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in model["vocab"].items()}
    pipeline["added_tokens"] = [one for one in pipeline["added_tokens"] if one["content"] not in structural]
    return Tokenizer.from_str(json.dumps({**pipeline, "post_processor": None, "truncation": None, "padding": None}))
