"""What test_strategies.py runs in two connected processes, started with the environment that torchrun makes.

In: a folder with recipes by name. Out: in it, run directories, and what each process saw in seen-<rank>.pt.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fivetune.config import load_config
from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.sharding import gather_tensor
from fivetune.distributed.world import World
from fivetune.errors import DataError, FiveTuneError
from fivetune.model import flat, ops
from fivetune.model.backend import Forward
from fivetune.model.objective import Objective
from fivetune.training import loop, save, setup
from fivetune.training.run import train
from fivetune.training.setup import set_up
from fivetune.training.step.learner import StepInputs
from fivetune.training.training import Training
from fivetune.types import Batch


def gradients_of_all_losses(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`gradients` with all options of the loss; a factor replaces dropout, so that R-Drop's passes differ alike."""

    def spread(x: torch.Tensor, rate: float, *, fused: bool = False) -> torch.Tensor:
        x[len(x) // 2 :] *= 1.1
        return x

    objective = Objective(label_smoothing=0.1, z_loss=0.01, r_drop=2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "apply_dropout_", spread)
        patch.setattr(setup, "build_objective", lambda *_: (objective, {}))
        return gradients(recipe)


def gradients(recipe: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What the optimizer gets in the first step, after clipping, and the loss."""
    seen: dict[str, torch.Tensor] = {}
    with World.from_environment().connect(cuda=False, timeout_minutes=2) as world:
        config = load_config(recipe)
        ready = set_up(config, world=world)

        def keep(*_: Any) -> None:
            stage = find_stage(ready.learner.model)
            for name, p in ready.learner.model.named_parameters():
                grad = p if p.grad is None else p.grad  # without one on the stages that do not hold the weight
                seen[name] = (stage.gather_weight(name, grad) if stage else gather_tensor(grad)).detach().clone()

        ready.learner.optimizer.register_step_pre_hook(keep)
        scored = int(ready.data.stream.get_lengths(0)[1].sum())
        with config.strategy.suppress_warnings():
            batches = ready.data.stream.build_micro_batches(0)
            largest = max(len(batch.ids) for batch in batches)
            update = ready.learner.engine.step(ready.learner, StepInputs(batches, 1, 0.0, largest, scored))
        return {**seen, "loss": update.values[0], "norm": update.values[1]}


def stopped(recipe: dict[str, Any]) -> str:
    """A run whose second process gets SIGTERM in its second step."""
    step = loop.run_step

    def hit(training: Training, groups: Any) -> bool:
        if training.setup.learner.world.rank == 1 and training.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training, groups)

    loop.run_step = hit
    try:
        return failing(lambda: train(recipe, preflight=False, quiet=True))
    finally:
        loop.run_step = step


def out_of_memory(recipe: dict[str, Any], place: str) -> dict[str, torch.Tensor]:
    """`gradients`, where the second process runs out of memory with two examples: after the forward pass of the last
    micro-batch, or in the middle of a forward pass, or in that of a backward pass."""
    world = World.from_environment()
    compute, attend, calls, failures = Forward.compute_losses, flat.apply_self_attention, [], []

    def fail(*_: Any) -> Any:
        failures.append(0)
        raise torch.OutOfMemoryError("out of memory")

    def fail_after(self: Forward, model: Any, batch: Batch, **options: Any) -> Any:
        found = compute(self, model, batch, **options)
        return found if len(batch.ids) == 1 else fail()

    def fail_within(layer: Any, x: Any, bounds: Any, *inputs: Any, causal: bool) -> Any:
        out = attend(layer, x, bounds, *inputs, causal=causal)
        if len(bounds.lengths) > 1 and (causal or recipe["strategy"]["name"] == "pipeline"):
            calls.append(0)
            if place == "forward":
                fail()
            if len(calls) > world.size % 4:  # on two processes in the second micro-batch; on four there may be one
                out.stream.register_hook(fail)
        return out

    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(Forward, "compute_losses", fail_after if place == "after" else compute)
            patch.setattr(flat, "apply_self_attention", attend if place == "after" else fail_within)
        found = gradients(recipe)
    assert bool(failures) == (world.rank == 1)
    return found


def broken(recipe: dict[str, Any]) -> str:
    """A run whose second process computes values that are not numbers."""
    compute = flat.apply_feed_forward

    def compute_broken(*inputs: Any, **options: Any) -> Any:
        found = compute(*inputs, **options)
        return found._replace(stream=found.stream * math.nan)

    with pytest.MonkeyPatch.context() as patch:
        if World.from_environment().rank == 1:
            patch.setattr(flat, "apply_feed_forward", compute_broken)
        return failing(lambda: train(recipe, preflight=False, quiet=True))


def full(recipe: dict[str, Any]) -> str:
    """A run with a checkpoint after each step; the disk of the second process is full once, and later for good."""
    write, calls = FileSystemWriter.write_data, []

    def refuse(*args: Any) -> Any:
        calls.append(0)
        if len(calls) != 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save.time, "sleep", lambda seconds: None)
        if World.from_environment().rank == 1:
            patch.setattr(FileSystemWriter, "write_data", refuse)
        return failing(lambda: train(recipe, preflight=False, quiet=True))


def told(message: str) -> str:
    """Both processes fail, with these words."""

    def work(world: World) -> None:
        raise DataError(message.format(rank=world.rank))

    return failing(lambda: connected(work))


def lost() -> str:
    """The second process leaves while the first one waits for it."""

    def work(world: World) -> None:
        if world.rank == 1:
            raise DataError("no more")
        world.barrier()

    return failing(lambda: connected(work))


def alike() -> str:
    """One of them cannot do its part."""

    def work(world: World) -> None:
        world.run_on_all(lambda: 1 // (1 - world.rank))

    return failing(lambda: connected(work))


def connected(work: Any) -> None:
    with World.from_environment().connect(cuda=False, timeout_minutes=2) as world, world.report_errors_once():
        work(world)


def failing(work: Any) -> str:
    try:
        work()
    except FiveTuneError as error:
        return f"{type(error).__name__} {error.exit_code}: {error}"
    except ZeroDivisionError as error:
        return type(error).__name__
    return "no error"


def run_rank(folder: Path) -> None:
    warnings.filterwarnings("error", category=UserWarning, module="fivetune")
    torch.set_num_threads(1)
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    seen: dict[str, Any] = {}
    for name, recipe in recipes.items():
        if name.startswith("gradients-losses"):
            seen[name] = gradients_of_all_losses(recipe)
        elif name.startswith("gradients"):
            seen[name] = gradients(recipe)
        elif name.startswith("memory"):
            seen[name] = out_of_memory(recipe, name.rpartition("-")[2])
        elif name.startswith("stopped"):
            seen[name] = stopped(recipe)
        elif name.startswith("broken"):
            seen[name] = broken(recipe)
        elif name.startswith("full"):
            seen[name] = full(recipe)
        else:
            resume = name.startswith(("resumed", "switched"))  # what was stopped goes on as "switched"
            train(recipe, preflight=name.endswith("checked"), resume=resume, quiet=True)
    if World.from_environment().size == 2:
        seen |= {"same": told("bad file"), "different": told("bad file {rank}"), "lost": lost(), "alike": alike()}
    seen["filters"] = [str(message) for _, message, *_ in warnings.filters]
    torch.save(seen, folder / f"seen-{World.from_environment().rank}.pt")
