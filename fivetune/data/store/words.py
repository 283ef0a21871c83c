"""Tokenise text word by word, and remember the ids of each word.

In: texts and a fast tokenizer with pieces that never cross a space, such as T5's. Out: the ids that the tokenizer
gives, ten times as fast, because a text consists of words that were seen before. A text with other characters than
ASCII, Latin, Greek and Cyrillic is left to the tokenizer, because combining characters may join a space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from fivetune.data.letters import NO_LITERALS, Places, encode_letters

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_WORDS = 100_000  # remembered at once, about 30 MB
# No other white space than space, tab and line end; no "<", with which the special tokens of a text begin.
_PLAIN_TEXT = re.compile(r"[ \t\n!-;=-~\u00a1-\u024f\u0370-\u0482\u048a-\u052f\u2013\u2014\u2018-\u201e\u2026\u20ac]*")
_SPLITTERS = ("WhitespaceSplit", "Metaspace")
_NORMALIZERS = ("Precompiled", "Replace")
_PROBE = "Ann's 1,234.5 hats (red, blue)\tcost 3 € — é, naïve, ÷x ¨y Ж. a-b_c/d \u00ad e\u00adf … ½ ª\n“Why?” "


class WordTable:
    """The ids of words.

    Args:
        tokenizer: a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = tokenizer.backend_tokenizer  # pyright: ignore
        self._ids: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str], literals: Sequence[Places] = ()) -> list[list[int]]:
        """Return the ids of texts, without end token.

        Args:
            literals: of each text the places where a structural token is a token.
        """
        divided: list[list[str] | None] = []  # the words of each text; None: the whole text is tokenised
        whole: list[str] = []
        words: set[str] = set()
        for text in texts:
            if _PLAIN_TEXT.fullmatch(text):
                parts = text.split()
                divided.append(parts)
                words.update(parts)
            else:
                divided.append(None)
                whole.append(text)
        if len(self._ids) > MAX_WORDS:
            self._ids.clear()

        # One call for the new words and the whole texts, in this order.
        unseen = list(words.difference(self._ids))
        encoded = iter(self._backend.encode_batch_fast([*unseen, *whole], add_special_tokens=False))
        for word in unseen:
            self._ids[word] = next(encoded).ids
        look_up = self._ids.__getitem__
        rows: list[list[int]] = []
        for text, parts, own in zip(texts, divided, literals or [NO_LITERALS] * len(texts), strict=True):
            if parts is None:
                ids = next(encoded).ids
                letters = encode_letters(self._tokenizer, text, ids, literals=own)
                rows.append(letters.ids if letters else ids)
            else:
                rows.append([*chain.from_iterable(map(look_up, parts))])
        return rows


def find_word_table(tokenizer: PreTrainedTokenizerBase) -> WordTable | None:
    """Return the table of a tokenizer, made at the first call; None if a text's ids are not its words' ids.

    The structure of the tokenizer decides, and a probe: added tokens begin with "<", the normalizer replaces
    characters, text is divided at white space.
    """
    if not tokenizer.is_fast:
        return None
    backend: Any = tokenizer.backend_tokenizer  # pyright: ignore
    known = vars(tokenizer).get("_fivetune_words")
    key = len(tokenizer)
    if known is None or known[0] != key:
        table = WordTable(tokenizer) if _is_divided_at_spaces(json.loads(backend.to_str())) else None
        if table is not None and table.encode([_PROBE]) != [backend.encode(_PROBE, add_special_tokens=False).ids]:
            table = None
        known = key, table
        vars(tokenizer)["_fivetune_words"] = known
    return known[1]


def _is_divided_at_spaces(pipeline: dict[str, Any]) -> bool:
    """Return whether a tokenizer's pipeline handles each word by itself."""
    if pipeline["truncation"] is not None or pipeline["padding"] is not None or pipeline["model"]["type"] != "Unigram":
        return False
    splitters = _list_steps(pipeline["pre_tokenizer"])
    for step in splitters:
        if step["type"] not in _SPLITTERS or not step.get("split", True):
            return False
        if step.get("prepend_scheme", "always") != "always":  # the first word would differ from the next ones
            return False
    for step in _list_steps(pipeline["normalizer"]):
        if step["type"] not in _NORMALIZERS:
            return False
    for token in pipeline["added_tokens"]:
        if not token["content"].startswith("<"):
            return False
    return bool(splitters)


def _list_steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in a flat list."""
    if step is None:
        return []
    inner = step.get("normalizers") or step.get("pretokenizers")
    if not inner:
        return [step]
    steps: list[dict[str, Any]] = []
    for part in inner:
        steps += _list_steps(part)
    return steps
