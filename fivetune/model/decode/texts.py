"""The text of an answer. In: token ids. Out: text without special tokens, cut where an answer is to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def to_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, keep_special: bool = False) -> str:
    """Decode generated ids to text; special tokens, sentinels among them, are dropped unless `keep_special`."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=not keep_special)).strip()


def cut_at_stop(text: str, stop: Sequence[str]) -> str:
    """Cut a text before the first place at which one of the texts `stop` begins.

    >>> cut_at_stop("Rouen. Q: Who", ["Q:", "."]), cut_at_stop("Rouen", ["."])
    ('Rouen', 'Rouen')
    """
    places = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(places)].rstrip() if places else text
