"""A file that several jobs answer: each its shard of the records into a folder of its own, the last one merges them.

In: the folders of the shards, which all jobs share. Out: which shards are whole, and the predictions of all records.
A shard's folder has its answers (`answer_file`) and, when all are there, `done`. Every job must read the same file
with the same weights and settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivetune.data.shard import WHOLE, Shard
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.training.answers.predicted_file import PredictedFile, PredictedRow

DONE, SETTINGS = "done", "answers.json"


def list_shard_folders(folder: Path, shard: Shard) -> list[Path]:
    """List the folders of this shard and all others, in their order, whether they exist or not."""
    return [folder / one.name for one in shard.list_all()]


def refuse_other_work(folder: Path, shard: Shard) -> None:
    """Raise FiveTuneEnvironmentError for answers of a command with another number of shards, or without shards."""
    own = {path.name for path in list_shard_folders(folder, shard)}
    for path in sorted(folder.iterdir()):
        found = re.fullmatch(r"\d+-of-(\d+)", path.name)
        is_plain = path.name == SETTINGS
        if path.name not in own and (found or (is_plain and shard.count > 1)):
            what = f"{found[1]} shards" if found else "a command without --shard"
            raise FiveTuneEnvironmentError(
                f"{folder}: holds answers of {what}. Go on with these commands, or delete the folder."
            )


def list_open_shards(folder: Path, shard: Shard) -> list[int]:
    """List the numbers, from 1, of the shards that are not whole."""
    folders = list_shard_folders(folder, shard)
    return [number for number, path in enumerate(folders, start=1) if not (path / DONE).is_file()]


def merge_shards(
    folder: Path, shard: Shard, own: Mapping[str, Iterable[PredictedRow]]
) -> dict[str, Iterable[PredictedRow]]:
    """Return the predictions of all records, in the order of the file.

    Args:
        folder: holds the folders of the shards, which are whole.
        own: the files of this shard, by the name of the part of a mixture.

    Raises DataError for shards that were answered from another content of the file, or with other weights or settings.
    """
    found: dict[str, Iterable[PredictedRow]] = {}
    for name, file in own.items():
        assert isinstance(file, PredictedFile)
        folders = [path / name for path in list_shard_folders(folder, shard)]
        refuse_other_answers(folders[shard.number], folders)
        found[name] = replace(file, folders=tuple(folders), shard=WHOLE)
    return found


def refuse_other_answers(own: Path, folders: Sequence[Path]) -> None:
    """Raise DataError if a folder holds answers that belong to other data, weights or settings than those in `own`."""
    expected = _read_table(own / SETTINGS)
    for folder in folders:
        found = _read_table(folder / SETTINGS) if (folder / SETTINGS).is_file() else expected
        for key, value in expected.items():
            if found.get(key) != value:
                raise DataError(
                    f"{folder}: was answered with other data, weights or settings: {key} was {found.get(key)}, it is "
                    f"{value}. Delete the folder of the shard that is wrong, and run its command again."
                )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}. Delete {path.parent}, and run its command again.") from None
