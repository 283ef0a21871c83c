"""An export of a run, opened for answers: what its export.json lists is verified, then its format's engine is loaded.

In: a folder that `fivetune export` wrote. Out: its export.json, its model and the engine that answers.
The format is a plugin of fivetune/delivery/exporters.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fivetune.config.aliases import find_setting
from fivetune.errors import ConfigError, RunDirError
from fivetune.model.decode import GenerateAnswers
from fivetune.plugins import load_plugin
from fivetune.rundir.export_file import EXPORT, read_export, verify_export
from fivetune.training.compute import ComputeConfig

DEVICES = ("cpu", "cuda")


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
        if find_setting(given) == "train.precision":
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
