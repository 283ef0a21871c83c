"""export.json, which `fivetune export` writes: the format of an export, its run, its proof, and sha256 of its files.

In: the folder of an export. Out: the content of its export.json, or the first file that differs from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune.errors import RunDirError
from fivetune.rundir.checksums import compute_sha256
from fivetune.types import JsonTable
from fivetune.values import is_file_name

EXPORT, EXPORT_VERSION = "export.json", 1


@dataclass(frozen=True, slots=True)
class Export:
    """An export that was written.

    Args:
        folder: the export, which `fivetune.open_run` opens.
        facts: the content of its export.json.
    """

    folder: Path
    facts: JsonTable

    @property
    def proof(self) -> JsonTable:
        """What the export and the run answered: shares of the same predictions, scores, speeds."""
        return self.facts["proof"]

    @property
    def verdict(self) -> str:
        """The proof in a word, such as `use`; `reasons` explain it."""
        return self.proof["verdict"]

    @property
    def reasons(self) -> list[str]:
        """A sentence for each reason of the verdict."""
        return self.proof["reasons"]


def read_export(folder: Path) -> JsonTable | None:
    """Read export.json; None if the folder has none, so that it is a run directory.

    Raises RunDirError if it is damaged or of a later version.
    """
    path = folder / EXPORT
    if not path.is_file():
        return None
    damage = RunDirError(f"{path}: damaged. Export the run again with --overwrite.")
    try:
        found: Any = json.loads(path.read_bytes())
        version = found["format_version"]
        options = found["options"]
        texts = [found["format"], found["source"]["run"], *(one["sha256"] for one in found["files"].values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damage from None
    is_inside = all(is_file_name(part) for name in found["files"] for part in name.split("/"))
    is_typed = type(version) is int and type(options) is dict and all(type(text) is str for text in texts)
    if not is_inside or not is_typed:
        raise damage
    if version > EXPORT_VERSION:
        raise RunDirError(f"{path}: written in format {version}, this version reads up to {EXPORT_VERSION}. Upgrade.")
    return found


def verify_export(folder: Path, export: JsonTable) -> None:
    """Raise RunDirError if a file that export.json lists is missing or has another sha256."""
    for name, listed in sorted(export["files"].items()):
        path = folder / name
        if not path.is_file():
            reason = "is missing"
        elif compute_sha256(path) != listed["sha256"]:
            reason = "is damaged (its sha256 differs)"
        else:
            continue
        raise RunDirError(f"{folder}: {name} {reason}. Export the run again with --overwrite.")
