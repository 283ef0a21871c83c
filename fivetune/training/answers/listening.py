"""Answers heard while they are written: what a search reports by rows and ids, by requests and texts.

In: tokens of rows. Out: a WrittenToken for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivetune.model.decode.texts import to_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNFINISHED = "\ufffd"  # what the tokenizer shows of a letter whose last bytes are missing


@dataclass(frozen=True, slots=True)
class WrittenToken:
    """A token of an answer.

    Args:
        record: number of the record in its request.
        answer: number of the answer to the record.
        text: what the token adds to the text of the answer, which may be nothing.
        logprob: log p of the token.
        is_end: whether it is the end token.
    """

    record: int
    answer: int
    text: str
    logprob: float
    is_end: bool


OnWritten = Callable[[int, WrittenToken], object]
"""Called with the number of a request and each token of the answers to it."""


class Listener:
    """Reports the tokens of rows to the requests that the rows belong to; an OnToken.

    Args:
        places: number of the request and of its record, by row; other rows are left out.
    """

    def __init__(
        self,
        places: Mapping[int, tuple[int, int]],
        on_written: OnWritten,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_special: bool,
    ) -> None:
        self._places = places
        self._on_written = on_written
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._written: dict[tuple[int, int], tuple[list[int], str]] = {}  # ids and text by row and number of the answer

    def __call__(self, row: int, answer: int, token_id: int, logprob: float) -> None:
        place = self._places.get(row)
        if place is None:
            return
        ids, before = self._written.get((row, answer), ([], ""))
        is_end = token_id == self._tokenizer.eos_token_id
        text = before
        if not is_end:
            ids.append(token_id)
            text = to_text(self._tokenizer, ids, keep_special=self._keep_special)
        if not text.startswith(before) or text.endswith(UNFINISHED):
            text = before
        self._written[row, answer] = ids, text
        request, record = place
        self._on_written(request, WrittenToken(record, answer, text[len(before) :], logprob, is_end))
