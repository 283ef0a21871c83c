"""Checksums of the records of a finished run, which show a changed digit in a file that still reads well.

    checksums.json    {"steps.jsonl": {"size": 1234, "crc32": 9876}, "predictions/eval-30.jsonl": {...}, ...}

In: a run directory. Out: the checksums of its records, or a sentence for each file that differs from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from fivetune.rundir.checksums import compute_crc32
from fivetune.rundir.layout import CHECKSUMS, CONFIG, DATA, EVALS, MACHINE, PLAN, STATUS, STEPS, TELEMETRY_FILES
from fivetune.types import JsonTable, JsonValue

PREDICTION_FILES = "predictions/*.jsonl"
OPENED = (CONFIG, STATUS, MACHINE, DATA, PLAN, STEPS, EVALS, TELEMETRY_FILES)  # with the run
RECORDS = (*OPENED, PREDICTION_FILES)
GROWING = (EVALS, TELEMETRY_FILES)  # after the end of the run too; what was there stays


def compute_record_checksums(folder: Path) -> JsonTable:
    """Compute the checksum of each record file of a run directory, by name. Raises OSError."""
    paths: list[Path] = []
    for pattern in RECORDS:
        paths.extend(path for path in folder.glob(pattern) if path.is_file())
    return {path.relative_to(folder).as_posix(): compute_record_checksum(path) for path in sorted(paths)}


def compute_record_checksum(path: Path, size: int | None = None) -> JsonTable:
    """Compute the CRC-32 of the first `size` bytes of a file, by default of all, and the size. Raises OSError."""
    found = path.stat().st_size
    size = found if size is None else min(found, size)
    return {"size": size, "crc32": compute_crc32(path, size)}


def find_changes(folder: Path, listed: Mapping[str, JsonValue], *, known: Sequence[str]) -> list[str]:
    """Find the records of a finished run, predictions excepted, that are missing or differ; a sentence for each.

    Args:
        listed: the checksums of the run, by name.
        known: sentences about damage, each of which begins with the path of its file; these files are skipped.
    """
    changes: list[str] = []
    for name in listed:
        is_known = any(sentence.startswith(f"{folder / name}:") for sentence in known)
        if _is_one_of(name, OPENED) and not is_known:
            change = describe_change(folder, name, listed)
            changes += [change] if change else []
    return changes


def _is_one_of(name: str, patterns: Iterable[str]) -> bool:
    return "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)


def describe_change(folder: Path, name: str, listed: Mapping[str, JsonValue]) -> str:
    """Describe that a record file is missing or differs from its checksum; "" if not, or if it has none."""
    path = folder / name
    expected = listed.get(name)
    if expected is None:
        return ""
    if not isinstance(expected, dict) or not isinstance(size := expected.get("size"), int):
        return f"{folder / CHECKSUMS}: damaged: of {name!r} it has no checksum."
    try:
        found = compute_record_checksum(path, size if _is_one_of(name, GROWING) else None)
    except FileNotFoundError:
        return f"{path}: missing: the run wrote {size:,} bytes. Restore the file."
    except OSError as error:
        if path.is_file():
            return ""  # who reads the records reports it
        return f"{path}: cannot be read: {error.strerror}. Restore the file."
    if found == expected:
        return ""
    return f"{path}: differs from what the run wrote (its checksum differs). Unless you edited it, restore the file."
