"""Checksums of a folder of files: a checkpoint, or the exported model.

    manifest.json    {"format_version": 1, "run_id": null, "files": {"config.json": {"size": 1234, "crc32": 9876}, ...}}

In: a folder. Out: its manifest, or the first file that differs from it. CRC-32 detects accidental
damage by disks and incomplete copies at about 1 GB/s; it does not protect against an attacker.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Collection, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, cast

from fivetune.errors import RunDirError
from fivetune.rundir.files import fsync_folder, open_regular, read_regular, write_json
from fivetune.rundir.layout import ABSTENTION, CARD, CONFIDENCE
from fivetune.values import get_nested, is_file_name

BLOCK_BYTES = 2**20  # of a file, read at once
MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
EDITABLE_FILES = (CARD,)  # not checked: users edit model cards
OPTIONAL_FILES = (CONFIDENCE, ABSTENTION)  # checked if it is there: users delete it


class Checksum(TypedDict):
    """Size and CRC-32 of a file, an entry of manifest.json."""

    size: int
    crc32: int


class Manifest(NamedTuple):
    """The content of manifest.json: the id of the run that the folder belongs to, and the checksums by file name."""

    run_id: str | None
    files: dict[str, Checksum]


class ManifestError(ValueError):
    """Raised for a manifest.json that is damaged, or of a later version."""


def compute_checksum(path: Path) -> Checksum:
    """Make a file durable; returns its size and CRC-32. Raises OSError if the disk refuses."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"size": path.stat().st_size, "crc32": compute_crc32(path)}


def write_checksums(folder: Path, *, run_id: str | None = None, known: Mapping[str, Checksum] | None = None) -> None:
    """Make every file of a folder durable, then write manifest.json with the size and CRC-32 of each.

    Args:
        run_id: id of the run that the folder belongs to.
        known: checksums by file name that other processes computed of the files that they wrote.

    Raises RunDirError or OSError if the disk refuses a write.
    """
    files = dict(known or {})
    for path in sorted(folder.iterdir()):
        if not path.is_file() or path.name == MANIFEST or path.name in files:
            continue
        checksum = compute_checksum(path)
        if path.name not in EDITABLE_FILES:
            files[path.name] = checksum
    write_json(folder / MANIFEST, {"format_version": MANIFEST_VERSION, "run_id": run_id, "files": files})
    fsync_folder(folder)


def update_checksum(folder: Path, name: str) -> None:
    """Write manifest.json again, with a new checksum of one file. Raises ManifestError, and as `write_checksums`."""
    manifest = parse_manifest((folder / MANIFEST).read_bytes())
    manifest.files.pop(name, None)
    write_checksums(folder, run_id=manifest.run_id, known=manifest.files)


def find_damage(folder: Path, *, names: Collection[str] | None = None) -> str | None:
    """Describe the first file of a folder that is missing or differs from manifest.json; None if all are whole.

    Args:
        names: files to check; None for all files of the manifest.
    """
    try:
        listed = parse_manifest(read_regular(folder / MANIFEST)).files
        for name in sorted(listed if names is None else names):
            path = folder / name
            if name in OPTIONAL_FILES and not path.exists():
                continue
            if not path.is_file():
                return f"{name} is missing"
            if name not in listed:
                return f"{name} has no checksum in {MANIFEST}"
            if difference := describe_difference(path, listed[name]):
                return f"{name} {difference}"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except ManifestError as error:
        return str(error)
    except OSError as error:
        return f"{MANIFEST} or a file that it lists cannot be read ({type(error).__name__}: {error})"
    return None


def parse_manifest(content: bytes) -> Manifest:
    """Parse a manifest.json; its names are names of files in its folder. Raises ManifestError.

    >>> parse_manifest(b'{"format_version": 1, "run_id": null, "files": {"a.bin": {"size": 1, "crc32": 2}}}').files
    {'a.bin': {'size': 1, 'crc32': 2}}
    """
    try:
        table: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST} is damaged ({error})") from None
    version, files, run_id = (get_nested(table, key) for key in ("format_version", "files", "run_id"))
    if type(version) is not int or type(files) is not dict:
        raise ManifestError(f"{MANIFEST} is damaged (it has no format_version or no files)")
    if version > MANIFEST_VERSION:
        raise ManifestError(f"written in format {version}, this version reads up to {MANIFEST_VERSION}")
    listed = cast("dict[str, Checksum]", files)
    for name, checksum in listed.items():
        if not is_file_name(name):
            raise ManifestError(f"{MANIFEST} is damaged ({name!r} is not the name of a file of this folder)")
        if any(type(get_nested(checksum, key)) is not int for key in ("size", "crc32")):
            raise ManifestError(f"{MANIFEST} is damaged ({name} has no size or no crc32)")
    return Manifest(run_id if isinstance(run_id, str) else None, listed)


def describe_difference(path: Path, listed: Checksum) -> str | None:
    """Describe that a file differs from its entry in a manifest; None if it does not."""
    # The size is compared first: it costs nothing, and finds incomplete copies of large files at once.
    if path.stat().st_size == listed["size"] and compute_crc32(path) == listed["crc32"]:
        return None
    return "is damaged (its checksum differs)"


def verify_checksums(folder: Path, *, advice: str = "Copy its files again.") -> None:
    """Raise RunDirError if a file of the folder differs from manifest.json; a folder without a manifest passes.

    Folders that FiveTune did not write, such as a published model, have no manifest.

    Args:
        advice: last sentence of the error message.
    """
    if (folder / MANIFEST).exists() and (damage := find_damage(folder)):
        raise RunDirError(f"{folder}: {damage}. {advice}")


def read_owner(folder: Path) -> str | None:
    """Read the id of the run that wrote a folder; None if manifest.json has none or is damaged (`find_damage`)."""
    try:
        return parse_manifest(read_regular(folder / MANIFEST)).run_id
    except (OSError, ManifestError):
        return None


def compute_crc32(path: Path, size: int | None = None) -> int:
    """Compute the CRC-32 of the first `size` bytes of a file, by default of all, read in pieces. Raises OSError."""
    rest = path.stat().st_size if size is None else size
    value = 0
    with open_regular(path) as file:
        while block := file.read(min(rest, BLOCK_BYTES)):
            value = zlib.crc32(block, value)
            rest -= len(block)
    return value


def compute_sha256(path: Path) -> str:
    """Compute the sha256 of a file in hexadecimal digits. Raises OSError."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
