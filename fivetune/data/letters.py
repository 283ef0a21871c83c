"""Encode special tokens that a text spells out as letters: `</s>` in a user's text does not end the text.

In: a tokenizer and texts. Out: ids and offsets, the tokenizer's own for all texts that spell out none. Two kinds stay
tokens: tokens that were added for use in texts, such as <extra_id_0> or <hl>, and tokens in the template of a task, as
in `{Title}</s>{Body}`: their places are known from filling it.

The option `split_special_tokens` of transformers does not do it: it also divides the sentinels, and a unigram
vocabulary holds `</s>` as a piece, which the model then finds in the letters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from fivetune.tasks import parse_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.types import JsonTable

STRUCTURAL = ("eos_token", "pad_token", "unk_token", "bos_token", "cls_token", "sep_token")
UNMATCHED = "\uffff"  # no character, so no text has it
LITERALS = "template_tokens"  # key of `meta`: where in the inputs tokens of the template begin, if it holds any
Places = Sequence[int]
NO_LITERALS: Places = ()
MARKS = [chr(number) for number in range(0xFDD0, 0xFDF0)]  # Unicode has no such characters
UNMARKED = dict.fromkeys(map(ord, MARKS), "<")


class EncodedText(NamedTuple):
    """Ids of a text without special tokens, and the characters [start, end) of each if they are known."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


def list_structural_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Return the tokens that the tokenizer puts around a text or in its place: end, pad, unknown, start."""
    named = (getattr(tokenizer, name, None) for name in STRUCTURAL)
    return tuple(dict.fromkeys(str(token) for token in named if token))


@lru_cache
def mark_template(template: str, mark: str) -> str:
    """Write a template with `mark` for the "<" of each token <...> in its own text.

    >>> mark_template("<{tag}> {{{text}}}</s>", "*")
    '<{tag}> {{{text}}}*/s>'
    """
    marked = ""
    for literal, name in parse_template(template):
        marked += re.sub("<(?=[^<>]+>)", mark, literal).replace("{", "{{").replace("}", "}}")
        marked += "" if name is None else f"{{{name}}}"
    return marked


def tokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    literals: Sequence[Places] = (),
    with_offsets: bool = False,
) -> list[EncodedText]:
    """Tokenise texts without special tokens; tokens that a text spells out are letters.

    Args:
        literals: for each text, the places where a structural token is a token.
        with_offsets: return offsets too; only fast tokenizers have them.
    """
    if not texts:
        return []
    options: Any = {"return_offsets_mapping": True} if with_offsets else {}
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False, **options)
    found = encoded["input_ids"]
    offsets = encoded["offset_mapping"] if with_offsets else [None] * len(found)
    places = literals or [NO_LITERALS] * len(texts)
    rows: list[EncodedText] = []
    for text, ids, pairs, own in zip(texts, found, offsets, places, strict=True):
        letters = encode_letters(tokenizer, text, ids, literals=own)
        rows.append(letters or EncodedText(ids, pairs))
    return rows


def encode_letters(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int], *, literals: Places = NO_LITERALS
) -> EncodedText | None:
    """Return the letters of a text that spells out a structural token, None for any other text.

    Args:
        ids: ids of the text from the tokenizer. They show tokens that only its normaliser makes, of full-width
            characters for example; but an unknown token stands for characters, too.
        literals: places where a structural token is a token.
    """
    structural, unknown = _find_structural_ids(tokenizer)
    if structural.isdisjoint(ids) and not (unknown and unknown in text):
        return None
    # Each token has a name of the same length where it is meant, which no text holds.
    hidden: dict[str, str] = {}
    for number, token in enumerate(list_structural_tokens(tokenizer)):
        hidden[token] = UNMATCHED * (len(token) - 1) + chr(ord("0") + number)
    num_meant = 0
    for start in literals:
        for token, name in hidden.items():
            if text.startswith(token, start):
                num_meant += 1
                text = text[:start] + name + text[start + len(token) :]
    # Where all tokens are meant, the text spells out none.
    num_found = sum(number in structural for number in ids)
    if num_meant and num_meant == num_found and not (unknown and unknown in text):
        return None
    if not tokenizer.is_fast:
        return EncodedText(_encode_without_trie(tokenizer, text, hidden), None)
    found = _find_letter_backend(tokenizer, hidden).encode(text, add_special_tokens=False)
    return EncodedText(found.ids, found.offsets)


def _find_structural_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[frozenset[int], str]:
    """Return the ids of the structural tokens except the unknown token, and the unknown token."""
    unknown = str(tokenizer.unk_token or "")
    known = vars(tokenizer).get("_fivetune_structural")
    if known is None:
        tokens = {*list_structural_tokens(tokenizer)} - {unknown}
        known = frozenset(_find_id(tokenizer, token) for token in tokens)
        vars(tokenizer)["_fivetune_structural"] = known
    return known, unknown


def _find_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    return cast("int", tokenizer.convert_tokens_to_ids(token))


def _encode_without_trie(tokenizer: PreTrainedTokenizerBase, text: str, hidden: Mapping[str, str]) -> list[int]:
    """Encode with a tokenizer in Python (ByT5, MyT5): tokens are other added tokens, and the names of hidden ones."""
    added: dict[str, int] = cast("Any", tokenizer).get_added_vocab()
    others = {token: number for token, number in added.items() if token not in hidden}
    others |= {name: _find_id(tokenizer, token) for token, name in hidden.items()}
    pattern = "|".join(map(re.escape, sorted(others, key=len, reverse=True)))
    ids: list[int] = []
    for part in re.split(f"({pattern})", text):
        if part in others:
            ids.append(others[part])
        elif part:
            ids += tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
    return ids


def _find_letter_backend(tokenizer: PreTrainedTokenizerBase, hidden: Mapping[str, str]) -> Any:
    """Return a copy of a fast tokenizer that knows structural tokens by other names, made at the first such text."""
    known = vars(tokenizer).get("_fivetune_letters")
    if known is None or known[0] != len(tokenizer):
        known = len(tokenizer), _build_letter_backend(tokenizer, hidden)
        vars(tokenizer)["_fivetune_letters"] = known
    return known[1]


def _build_letter_backend(tokenizer: PreTrainedTokenizerBase, hidden: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer

    pipeline: JsonTable = json.loads(tokenizer.backend_tokenizer.to_str())  # pyright: ignore
    model = pipeline["model"]
    unknown = str(model.get("unk_token"))  # BPE looks this token up by its name
    hidden = {token: name for token, name in hidden.items() if token != unknown}
    if isinstance(model["vocab"], list):  # Unigram: pairs of piece and score
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in model["vocab"].items()}
    added: list[JsonTable] = []
    for one in pipeline["added_tokens"]:
        content = one["content"]
        if content != unknown:
            added.append({**one, "content": hidden.get(content, content)})
    pipeline |= {"added_tokens": added, "post_processor": None, "truncation": None, "padding": None}
    return Tokenizer.from_str(json.dumps(pipeline))
