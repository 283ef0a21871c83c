"""Teacher-generated targets on disk, and a store that returns them instead of the data's targets.

In: a store, labels of its rows. Out: files part-00000.safetensors ... in a folder, each with its size and CRC-32 in
part-00000.json, which is written after the part: an interrupted generation continues after the last part, and a damaged
part is generated again; a DistilledStore.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fivetune.data.store.arrays import Array, find_fault, read_arrays, write_arrays
from fivetune.data.store.ragged import Ragged, ShardedRagged
from fivetune.data.store.token_store import DamagedStoreError, TokenStore
from fivetune.rundir.files import write_json

ROWS_PER_PART = 1024


def list_missing_parts(folder: Path, num_rows: int) -> list[range]:
    """List the rows of each part that a folder lacks for a store of `num_rows`, or has damaged."""
    missing: list[range] = []
    for start in range(0, num_rows, ROWS_PER_PART):
        if not _is_whole(_locate_part(folder, start)):
            missing.append(range(start, min(start + ROWS_PER_PART, num_rows)))
    return missing


def _locate_part(folder: Path, start: int) -> Path:
    return folder / f"part-{start // ROWS_PER_PART:05}.safetensors"


def _is_whole(part: Path) -> bool:
    try:
        return find_fault(part, json.loads(part.with_suffix(".json").read_bytes())) is None
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_part(folder: Path, start: int, labels: Sequence[Sequence[int]], is_cut: Sequence[bool]) -> None:
    """Write the labels of the rows of a part, and which of them were cut at the longest length.

    Args:
        start: first row of the part.
    """
    path = _locate_part(folder, start)
    rows = Ragged.from_rows(labels, np.uint32)
    arrays: dict[str, Array] = {"values": rows.values, "offsets": rows.offsets, "is_cut": np.array(is_cut, np.uint8)}
    write_json(path.with_suffix(".json"), write_arrays(path, arrays))


class DistilledStore(TokenStore):
    """A view of a store with labels that a teacher wrote, and a fingerprint of its own.

    Args:
        folder: folder with all parts for the rows of `store`.

    Raises DamagedStoreError for a file that does not fit the store.
    """

    def __init__(self, store: TokenStore, folder: Path) -> None:
        super().__init__(store.folder, store.shards)
        self.rebuilt = store.rebuilt
        try:
            parts = [read_arrays(path) for path in sorted(folder.glob("part-*.safetensors"))]
            labels = [Ragged(part["values"], part["offsets"]) for part in parts]
            ends = np.cumsum([len(part) for part in labels], dtype=np.int64)
            if ends[-1] != len(store):
                raise ValueError(f"{ends[-1]} targets for {len(store)} examples")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedStoreError(f"{folder}: damaged targets of a teacher: {error}. Delete that folder.") from None
        lengths = np.concatenate([part.lengths for part in labels])
        self.labels = ShardedRagged(ends, labels.__getitem__, lengths)
        num_equal = num_cut = 0
        for row in range(len(store)):
            num_equal += np.array_equal(self.labels[row], store.labels[row])
        for part in parts:
            num_cut += int(part["is_cut"].sum())
        num_empty = int((lengths == 1).sum())  # the end token alone
        self.summary = {
            **store.summary,
            "fingerprint": blake2b(f"{store.fingerprint} {folder.name}".encode(), digest_size=16).hexdigest(),
            "num_target_tokens": int(lengths.sum()),
            "longest_target": int(lengths.max()),
            "distilled": {"num_equal": num_equal, "num_empty": num_empty, "num_cut": num_cut},
        }
