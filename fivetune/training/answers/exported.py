"""An export of a run, opened for answers: what its export.json lists is verified, then its format's engine is loaded.

In: a folder that `fivetune export` wrote. Out: its export.json, its model and the engine that answers.
The format is a plugin of fivetune/delivery/exporters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivetune.config import RunConfig
from fivetune.config.aliases import find_setting
from fivetune.distributed.world import World
from fivetune.errors import ConfigError, RunDirError
from fivetune.machine.telemetry.cores import count_cores
from fivetune.model.decode import GenerateAnswers
from fivetune.model.plain_tokenizer import load_plain_tokenizer, read_plain_model
from fivetune.plugins import load_plugin
from fivetune.rundir.export_file import EXPORT, read_export, verify_export
from fivetune.training.compute_config import ComputeConfig

DEVICES = ("cpu", "cuda")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


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


@dataclass(frozen=True, slots=True)
class OpenedExport:
    """An export whose engine answers.

    Args:
        model: stands for the model where its config is asked for; the engine holds the weights.
    """

    model: Any
    tokenizer: Any
    compute: ComputeConfig
    generate: GenerateAnswers


def open_export(exporter: Any, folder: Path, config: RunConfig, world: World) -> OpenedExport:
    """Open an export with an engine of its own, without torch and transformers where its tokenizer allows that.

    Raises ConfigError for a device that engines do not have.
    """
    tokenizer = load_plain_tokenizer(folder / "model")
    on_cpu = config.device == "cpu" or (config.device == "auto" and not NVIDIA_DRIVER.exists())
    # Where torch is there already, as in a proof, the engine gets the number of threads that torch measured.
    if tokenizer is not None and on_cpu and "torch" not in sys.modules:
        compute = ComputeConfig("cpu", "fp32")
        model: Any = read_plain_model(folder / "model")
        num_threads = config.train.num_threads or count_cores()
    else:
        import torch

        from fivetune.model.load import load_without_weights
        from fivetune.training.compute import choose_compute

        compute = replace(choose_compute(config, world), precision="fp32", precision_why="")
        loaded = load_without_weights(folder / "model")
        model, tokenizer = loaded.model.eval(), loaded.tokenizer
        num_threads = torch.get_num_threads()
    if compute.kind not in DEVICES:
        raise ConfigError(
            f"device {compute.kind}: an export of format {exporter.plugin_name()} has no such device. Allowed: "
            f"{', '.join(DEVICES)}. Set --device."
        )
    engine = exporter.open(folder, device=compute.device, num_threads=num_threads)
    return OpenedExport(model, tokenizer, compute, engine)
