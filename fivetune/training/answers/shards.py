"""A file that several jobs answer: each its shard of the records into a folder of its own, the last one merges them.

In: the folders of the shards, which all jobs share. Out: which shards are whole, and the predictions of all records.
A shard's folder has its answers (`answer_file`) and, when all are there, done.json. Every job must read the same file
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
from fivetune.rundir.files import write_text
from fivetune.training.answers.predicted_file import PredictedFile, PredictedRow

DONE, SETTINGS = "done.json", "answers.json"
FACTS: Mapping[str, str] = {"data": "another content of the input", "weights": "other weights", "task": "another task"}


def name_shard_folder(shard: Shard) -> str:
    """Return the name of a shard's folder."""
    return f"{shard.number + 1}-of-{shard.count}"


def list_shard_folders(folder: Path, shard: Shard) -> list[Path]:
    """List the folders of this shard and all others, in their order, whether they exist or not."""
    return [folder / name_shard_folder(Shard(number, shard.count)) for number in range(shard.count)]


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


def finish_shard(folder: Path, files: Mapping[str, Iterable[PredictedRow]], num_records: int) -> None:
    """Note that all records of a shard are answered."""
    facts = {"num_records": num_records, "data": _get_fingerprints(files)}
    write_text(folder / DONE, json.dumps(facts))


def _get_fingerprints(files: Mapping[str, Iterable[PredictedRow]]) -> dict[str, str]:
    return {name: file.guard.fingerprint for name, file in files.items() if isinstance(file, PredictedFile)}


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
    folders = list_shard_folders(folder, shard)
    for path in folders:
        if _read_table(path / DONE)["data"] != _get_fingerprints(own):
            raise DataError(
                f"{path}: was answered from another content of the input, which must not change before all shards are "
                "answered. Delete the folder, and run the command of this shard again."
            )
    found: dict[str, Iterable[PredictedRow]] = {}
    for name, file in own.items():
        assert isinstance(file, PredictedFile)
        places = [path / name for path in folders]
        refuse_other_answers(places[shard.number], places)
        found[name] = replace(file, folders=tuple(places), shard=WHOLE)
    return found


def refuse_other_number(folder: Path, shard: Shard, num_records: int) -> None:
    """Raise DataError unless the shards together have this number of records."""
    found = sum(_read_table(path / DONE)["num_records"] for path in list_shard_folders(folder, shard))
    if found != num_records:
        raise DataError(f"{folder}: has {found:,} records, the input {num_records:,}. Delete it, and answer again.")


def refuse_other_answers(own: Path, folders: Sequence[Path]) -> None:
    """Raise DataError if the answers in a folder belong to other data, weights or settings than the answers in `own`.

    A folder without answers, of a shard whose records are all skipped, fits any.
    """
    if not (own / SETTINGS).is_file():
        return
    expected = _read_table(own / SETTINGS)
    for folder in folders:
        found = _read_table(folder / SETTINGS) if (folder / SETTINGS).is_file() else expected
        for key in sorted({*expected, *found}):
            if found.get(key) != expected.get(key):
                what = FACTS.get(key, f"{key} {found.get(key)}; here it is {expected.get(key)}")
                raise DataError(
                    f"{folder}: was answered with {what}. All shards must have the same. Delete the folder of the "
                    "wrong shard, and run its command again."
                )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: damaged: {error}. Delete {path.parent}, and run its command again.") from None
