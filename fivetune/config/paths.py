"""The paths of a run's config.yaml, which stay as they were typed, found from another working directory."""

from __future__ import annotations

import json
import os
from pathlib import Path


def find_typed_path(typed: str, run_directory: str | Path) -> str:
    """`typed` if it exists or is no relative path; else where it was when the run began, if it is there.

    A run records its working directory in machine.json. A hub name, or a file that is nowhere, is returned as typed.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "dev.json").write_text("[]")
    >>> _ = (folder / "machine.json").write_text(json.dumps({"working_directory": str(folder)}))
    >>> find_typed_path("dev.json", folder) == str(folder / "dev.json"), find_typed_path("org/name", folder)
    (True, 'org/name')
    """
    path = Path(typed).expanduser()
    if os.path.exists(path) or path.is_absolute():
        return typed
    try:
        machine = json.loads((Path(run_directory) / "machine.json").read_text(encoding="utf-8"))
        candidate = Path(machine["working_directory"]) / path
    except (OSError, ValueError, KeyError, TypeError):
        return typed
    return str(candidate) if os.path.exists(candidate) else typed
