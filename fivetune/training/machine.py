"""The facts of machine.json: device, forward, size of the model, strategy and command of a run.

In: a Setup. Out: a table.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from fivetune.model.load import count_parameters
from fivetune.telemetry.devices import collect_machine_info, get_device_peak_flops

if TYPE_CHECKING:
    from fivetune.training.setup import Setup
    from fivetune.types import JsonTable


def describe_machine(setup: Setup, command: str | None) -> JsonTable:
    """Collect the content of machine.json; `command` is None if FiveTune is used as a library."""
    learner, compute = setup.learner, setup.learner.compute
    return {
        **collect_machine_info(compute.kind if compute.num_chips else compute.device),
        "precision": compute.precision,
        "forward": asdict(learner.forward),
        "batch_size_auto": asdict(setup.fit) if setup.fit else None,
        "attention": learner.forward.describe_attention(learner.model, compute.device),
        "num_threads": torch.get_num_threads(),
        "peak_flops": get_device_peak_flops(compute.device, compute.precision),
        "num_parameters": count_parameters(learner.model),
        "num_trained_parameters": count_parameters(learner.model, trained=True),
        "vocab_size": learner.model.config.vocab_size,
        "strategy": {
            "name": setup.config.strategy.plugin_name(),
            "world_size": learner.world.size,
            "devices": learner.world.gather(compute.name),
            "block_seconds": setup.block_seconds,
        },
        "command": command,
        "working_directory": os.getcwd(),
    }
