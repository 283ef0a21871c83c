"""Resolution of the relative paths in a run's config.yaml from another working directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivetune.types import Adapter


def find_typed_path(typed: str, run_directory: str | Path) -> str:
    """Resolve a path as typed: if it exists or is absolute, only `~` is expanded; else relative to the run's directory.

    machine.json records the working directory of the run. A hub name or a path that exists in neither place is returned
    unchanged.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "dev.json").write_text("[]")
    >>> _ = (folder / "machine.json").write_text(json.dumps({"working_directory": str(folder)}))
    >>> find_typed_path("dev.json", folder) == str(folder / "dev.json"), find_typed_path("org/name", folder)
    (True, 'org/name')
    """
    path = Path(typed).expanduser()
    if os.path.exists(path) or path.is_absolute():
        return os.path.expanduser(typed)
    try:
        machine = json.loads((Path(run_directory) / "machine.json").read_bytes())
        candidate = Path(machine["working_directory"]) / path
    except (OSError, ValueError, KeyError, TypeError):
        return typed
    return str(candidate) if os.path.exists(candidate) else typed


def resolve_adapter(options: Adapter | None, run_directory: str | Path) -> Adapter | None:
    """The options of an adapter, the folder of a saved one as `find_typed_path` resolves it."""
    if options is None or not options.saved_in:
        return options
    return options.model_copy(update={"path": find_typed_path(options.saved_in, run_directory)})
