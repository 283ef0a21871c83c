"""The rows of a few sources in memory, for predictions that need no files.

In: sources that were converted one by one. Out: a TokenStore of all their rows. Questions of different sources stay
apart, whatever their ids are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fivetune.data.examples import Source
from fivetune.data.store.blocks import BlockReader
from fivetune.data.store.convert import CHUNK, KINDS, ConvertedRows, Converter, GroupNumbers, join_columns
from fivetune.data.store.ragged import Ragged, compute_offsets
from fivetune.data.store.token_store import TokenStore
from fivetune.types import JsonTable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert_source(source: Source, tokenizer: PreTrainedTokenizerBase) -> list[ConvertedRows]:
    """Convert a whole source in this process."""
    reader = BlockReader(source)
    converter = Converter(source, tokenizer)
    found: list[ConvertedRows] = []
    while block := reader.read(CHUNK):
        found.append(converter.convert(block))
    return found


class MemoryStore(TokenStore):
    """The rows of several sources, at least one row in all.

    `first_groups[i]` is the number of the first question of source i; `whole_lengths` are the tokens of each row's
    inputs before clipping.

    Args:
        sources: what `convert_source` returned for each.
    """

    def __init__(self, sources: Sequence[Sequence[ConvertedRows]]) -> None:
        numbers = GroupNumbers()
        groups: list[Any] = []
        blocks: list[ConvertedRows] = []
        self.first_groups: list[int] = []
        for pieces in sources:
            self.first_groups.append(numbers.count)
            numbers.known.clear()  # an id of another source is another question
            for rows in pieces:
                blocks.append(rows)
                groups.extend(map(numbers.assign, rows.arrays["group_hashes"]))
        columns = join_columns(blocks)
        self._kinds: dict[str, Ragged] = {}
        for kind in KINDS:
            self._kinds[kind] = Ragged(columns[kind], compute_offsets(columns[f"{kind}_lengths"]))
        self.inputs: Any = self._kinds["inputs"]
        self.labels: Any = self._kinds["labels"]
        self.groups = np.concatenate(groups)
        self.num_clipped = columns["num_clipped"]
        self.answer_clipped = columns["answer_clipped"]
        self.given_ids = columns["given_ids"]
        self.input_hashes = columns["input_hashes"]
        self.whole_lengths = columns["whole_inputs"]
        self.shard_ends = np.array([len(self.groups)])
        self.window_shards = None
        self.summary: JsonTable = {"num_examples": len(self.groups), "num_groups": numbers.count}

    def _read_bytes(self, kind: str, row: int) -> bytes:
        return self._kinds[kind][row].tobytes()
