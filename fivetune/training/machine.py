"""The facts of machine.json: device, forward, size of the model, strategy and command of a run; its first line.

In: a Setup. Out: a table, a text.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path

import torch

from fivetune.config.model import ModelSection
from fivetune.machine.telemetry.devices import collect_machine_info, get_device_peak_flops, measure_product_flops
from fivetune.model.files import find_weight_files
from fivetune.model.load import count_parameters, describe_parameters
from fivetune.rundir import FORMAT_VERSION, MACHINE, RunDir
from fivetune.rundir.damage import Damage
from fivetune.rundir.reader import read_json, read_machine
from fivetune.scores.metrics import load_metric
from fivetune.training.distill import describe_distillation
from fivetune.training.outputs import RunOutputs
from fivetune.training.setup import Setup
from fivetune.training.state.resume import add_part
from fivetune.training.step.objective import describe_loss
from fivetune.types import JsonTable

SAMPLE_BYTES = 2**20  # of the head and of the tail of a file: training changes all of its bytes


def describe_machine(setup: Setup, command: str | None) -> JsonTable:
    """Collect the content of machine.json; `command` is None if FiveTune is used as a library."""
    learner = setup.learner
    compute = learner.compute
    product_flops = None  # measured on a GPU only
    if compute.kind == "cuda":
        product_flops = measure_product_flops(compute.device, compute.precision)
    scorers: list[str] = []
    for task in setup.config.tasks:
        for spec in task.metrics:
            scorers += load_metric(spec).packages
    with compute.make_autocast():
        attention = learner.forward.describe_attention(learner.model)
    return {
        **collect_machine_info(compute.step_device, scorers),
        "precision": compute.precision,
        "precision_why": compute.precision_why,
        "forward": learner.forward.as_facts(),
        "batch_size_auto": asdict(setup.fit) if setup.fit else None,
        "attention": attention,
        "num_threads": torch.get_num_threads(),
        "num_threads_why": compute.threads_why,
        "peak_flops": get_device_peak_flops(compute.device, compute.precision),
        "product_flops": product_flops,
        "model": compute_weights_fingerprint(setup.config.model),
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


def compute_weights_fingerprint(model: ModelSection) -> str | None:
    """Fingerprint of the weight files in a local folder, from the size, head and tail of each, as they may be large.

    None for a model of the hub, whose revision says which weights it has, and for random weights.
    """
    if model.init == "random" or not model.path or not Path(model.path).is_dir():
        return None
    digest = blake2b(digest_size=8)
    for path in find_weight_files(Path(model.path)):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            digest.update(f"{path.name} {size} ".encode())
            for place in (0, max(0, size - SAMPLE_BYTES)):
                file.seek(place)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def record_machine(outputs: RunOutputs, machine: JsonTable, *, step: int, resume: bool) -> None:
    """Write machine.json with the list of the run's parts; warn of differences from the previous part.

    Args:
        step: first step of the part that begins now.
    """
    run = outputs.run
    before = read_machine(run.path).parts if resume else ()
    parts, changes = add_part(before, machine, step=step)
    # The facts of this part replace the earlier ones; what differs is in the parts.
    run.write(MACHINE, {"format_version": FORMAT_VERSION, **machine, "parts": [asdict(part) for part in parts]})
    for message in changes:
        outputs.warn(message)


def record_threads(run: RunDir, step: int) -> None:
    """Record in machine.json that the last part of the run has another number of threads from `step` on.

    A resume is compared with the number that the part ended with.
    """
    parts = read_machine(run.path, Damage()).parts
    if not parts:  # a lost or damaged file, which a resume reports
        return
    now = torch.get_num_threads()
    change = f"num_threads from step {step:,} on: {parts[-1].num_threads} -> {now}"
    last = replace(parts[-1], num_threads=now, changed=(*parts[-1].changed, change))
    table = read_json(run.path / MACHINE, Damage())
    run.write(MACHINE, {**table, "parts": [asdict(part) for part in (*parts[:-1], last)]})


def format_headline(setup: Setup, step: int) -> str:
    """Describe what a run computes from `step` on: steps, model, device, forward and the options of its loss."""
    config = setup.config
    learner = setup.learner
    compute = learner.compute
    store = setup.data.stream.store
    where = f"{compute.precision} on {compute.name}"
    if learner.world.size > 1:
        kind = compute.name.partition(":")[0]
        where = f"{compute.precision} on {learner.world.size} x {kind} ({config.strategy.plugin_name()})"
    if compute.precision_why:
        where = f"{where} ({compute.precision_why})"
    line = (
        f"{setup.plan.num_steps - step:,} steps of {config.train.examples_per_step} examples ({len(store):,} in the "
        f"set), {describe_parameters(learner.model)}, {where}, {learner.forward.kind} forward ({learner.forward.why})"
    )

    # What is not as usual.
    notes = [line]
    if compute.threads_why:
        notes.append(compute.threads_why)
    if options := describe_loss(config.loss, setup.plan.class_weights):
        notes.append(f"loss with {options}")
    if learner.averages:
        notes.append("averages of the weights are evaluated and exported")
    return "; ".join(notes) + describe_distillation(config, store)
