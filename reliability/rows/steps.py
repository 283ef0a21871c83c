"""Optimizer steps: memory that runs out within one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.faults import train
from reliability.peer import train_peer
from reliability.ranks import Ranks
from reliability.rows.resume import CLOSE, is_close
from reliability.warm import WarmProcess, check_success
from reliability.workload import NUM_STEPS, Workload

MOMENTS = ("before the forward pass", "after the forward pass", "in the backward pass")
LARGE: dict[str, Any] = {"train__batch_size": 8, "model__dropout": 0.0}


def run_out_of_memory(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """From a random pass on, passes over more than a few examples run out of memory, every third time on one of two
    ranks."""
    for number in count():
        num = 1 + (number % 3 == 2)
        fault = (random.randint(1, 3), random.randint(1, NUM_STEPS), MOMENTS[number // 3 % len(MOMENTS)])

        def run(folder: Path, fault: tuple[int, int, str] = fault, num: int = num) -> None:
            options = {**LARGE, "strategy": "ddp", "launch": {"nproc": 2}} if num > 1 else LARGE
            whole = read_run(workload.run_undisturbed(**LARGE).run)
            recipe = workload.write_recipe(folder, **options)
            with Ranks(train_with_little_memory, str(recipe), *fault, num=num) as ranks:
                done = ranks.wait()
            check_success(done)
            found = read_run(folder / "run")
            assert [one.step for one in found.steps] == list(range(1, NUM_STEPS + 1)), "a step was left out or redone"
            assert any("memory ran out with" in one.message for one in found.status.warnings), "nothing on record"
            for ours, theirs in zip(found.steps, whole.steps, strict=True):
                assert ours.num_examples_seen == theirs.num_examples_seen, f"step {ours.step}: other examples"
                assert is_close(ours.loss, theirs.loss), f"{ours.step}: {ours.loss}, {theirs.loss}"

        yield Trial(f"{number} above {fault[0]} from pass {fault[1]} {fault[2]} of {num} ranks", run)


def train_with_little_memory(recipe: str, limit: int, first: int, moment: str) -> int:
    """Train; on the last rank, from its pass `first` on, passes over more than `limit` examples run out of memory."""
    import torch

    from fivetune.distributed.world import World
    from fivetune.model.backend import Forward

    compute, world, num_calls = Forward.compute_losses, World.from_environment(), 0

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def compute_losses(self: Any, model: Any, batch: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        is_full = num_calls >= first and len(batch.ids) > limit
        if is_full and moment == MOMENTS[0]:
            fail()
        losses, num_positions = compute(self, model, batch, **options)
        if is_full and moment == MOMENTS[1]:
            fail()
        if is_full:
            losses.register_hook(fail)
        return losses, num_positions

    if world.rank == world.size - 1:
        Forward.compute_losses = compute_losses
    return train(recipe)


def run_peer_out_of_memory(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The same of the Trainer with auto_find_batch_size: as many updates, and the loss of a run with memory."""
    for number in count():
        limit, first = random.randint(1, 3), random.randint(2, NUM_STEPS)

        def run(folder: Path, limit: int = limit, first: int = first) -> None:
            found = run_peer(workload, folder / "full", auto_find_batch_size=True, fault=(limit, first))
            whole = run_peer(workload, folder / "whole", fault=(8, first))
            updates = [json.loads((folder / name / "updates.json").read_text()) for name in ("full", "whole")]
            assert updates[0] == updates[1], f"{updates[0]} updates instead of {updates[1]}"
            losses = [log[-1]["loss"] for log in (found, whole)]
            assert math.isclose(*losses, rel_tol=CLOSE), f"the last loss is {losses[0]}, not {losses[1]}"

        yield Trial(f"{number} above {limit} from pass {first}", run)


def run_peer(workload: Workload, folder: Path, *, fault: tuple[int, int], **options: Any) -> list[dict[str, Any]]:
    """A run of the Trainer with 8 examples in a pass and without dropout; its log of steps."""
    folder.mkdir()
    usual = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    prepare = partial(limit_trainer, str(folder / "updates.json"), *fault)
    done = WarmProcess(train_peer, str(folder), str(workload.model), {**usual, **options}, prepare).finish()
    check_success(done)
    states = (folder / "run").glob("checkpoint-*/trainer_state.json")
    newest = max(states, key=lambda path: int(path.parent.name.partition("-")[2]))
    return [entry for entry in json.loads(newest.read_text())["log_history"] if "loss" in entry]


def limit_trainer(updates: str, limit: int, first: int) -> None:
    """Count the Trainer's updates, switch its dropout off, and let large passes run out of memory from one on."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from transformers.trainer import Trainer

    compute, functional = Trainer.compute_loss, cast("Any", torch.nn.functional)
    counts = {"passes": 0, "updates": 0}

    def compute_loss(self: Any, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        counts["passes"] += 1
        if counts["passes"] >= first and len(inputs["labels"]) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(self, model, inputs, *args, **named)

    def note_update(*_: Any) -> None:
        counts["updates"] += 1
        Path(updates).write_text(json.dumps(counts["updates"]))

    Trainer.compute_loss = compute_loss
    functional.dropout = lambda values, *args, **named: values
    register_optimizer_step_post_hook(note_update)


ROWS = [
    Row("R14", "memory runs out in a forward or backward pass, also on one of two ranks",
        "repeats the step with smaller micro-batches: the same examples, losses within 1e-5",
        run_out_of_memory, 4, 40, run_peer_out_of_memory),
]  # fmt: skip
