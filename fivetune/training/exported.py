"""An export of a run, opened for answers: what its export.json lists is verified, then its format's engine is loaded.

In: a folder that `fivetune export` wrote. Out: its export.json, its model and the engine that answers.
The format is a plugin of fivetune/exporters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fivetune.config.aliases import ALIASES
from fivetune.decode import GenerateAnswers
from fivetune.errors import ConfigError, RunDirError
from fivetune.plugins import load_plugin
from fivetune.rundir.checksums import compute_sha256
from fivetune.training.learner import ComputeConfig
from fivetune.types import JsonTable

EXPORT = "export.json"
FORMAT_VERSION = 1
DEVICES = ("cpu", "cuda")


def read_export(folder: Path) -> JsonTable | None:
    """Read export.json; None if the folder has none, so that it is a run directory.

    Raises RunDirError if it is damaged or of a later version.
    """
    path = folder / EXPORT
    if not path.is_file():
        return None
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        version = found["format_version"]
        assert isinstance(found["format"], str) and isinstance(found["options"], dict)
        assert isinstance(found["files"], dict) and type(version) is int
    except (OSError, ValueError, KeyError, TypeError, AssertionError, RecursionError):
        raise RunDirError(f"{path}: damaged. Export the run again with --overwrite.") from None
    if version > FORMAT_VERSION:
        raise RunDirError(f"{path}: written in format {version}, this version reads up to {FORMAT_VERSION}. Upgrade.")
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


def load_exporter_of(folder: Path) -> Any:
    """Load the exporter of an export whose files are whole; None if the folder is of a run. Raises RunDirError."""
    export = read_export(folder)
    if export is None:
        return None
    verify_export(folder, export)
    kind = load_plugin("exporters", export["format"])
    try:
        return kind.model_validate(export["options"])
    except ValueError:
        raise RunDirError(
            f"{folder / EXPORT}: options {export['options']} of format {export['format']} are unknown. Upgrade."
        ) from None


def refuse_fixed_settings(overrides: Iterable[str], name: str) -> None:
    """Raise ConfigError for a setting that an engine of its own does not have."""
    for given in overrides:
        if ALIASES.get(given.replace("-", "_"), given) == "train.precision":
            raise ConfigError(
                f"--{given}: has no effect here: the precision of an export of format {name} is fixed when "
                "it is written. Leave it out, or export the run with another --quantization."
            )


def open_engine(exporter: Any, folder: Path, compute: ComputeConfig) -> GenerateAnswers:
    """Load the engine of an export. Raises ConfigError for a device that engines do not have."""
    if compute.kind not in DEVICES:
        raise ConfigError(
            f"device {compute.kind}: an export of format {exporter.plugin_name()} has no such device. Allowed: "
            f"{', '.join(DEVICES)}. Set --device."
        )
    return exporter.open(folder, device=compute.device, num_threads=torch.get_num_threads())
