"""Optimizer steps: memory that runs out within one, and the same step in other micro-batches and on two ranks."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, cast

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.faults import train
from reliability.peer import train_peer
from reliability.ranks import Ranks
from reliability.rows.resume import CLOSE, is_close
from reliability.warm import WarmProcess, check_success
from reliability.workload import FAMILIES, NUM_STEPS, Workload, make_model

MOMENTS = ("before the forward pass", "after the forward pass", "in the backward pass")
LARGE: dict[str, Any] = {"train__batch_size": 8, "model__dropout": 0.0}
NUM_EXAMPLES, LONGER = 12, 5  # one of the examples whose target is longer than most
CUTS = {1: (12, 4, 1), 2: (6, 2, 1)}  # examples of a micro-batch, by the number of ranks


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


def cut_step(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The gradient of 12 examples with targets of uneven length: in micro-batches of 12, 4 and 1, on 1 and 2 ranks."""
    for number, family in enumerate(cycle(random.sample(sorted(FAMILIES), len(FAMILIES)))):
        rows = [LONGER, *random.sample([row for row in range(24) if row != LONGER], NUM_EXAMPLES - 1)]

        def run(folder: Path, family: str = family, rows: list[int] = rows) -> None:
            model = folder / "model"
            made = WarmProcess(make_tiny_model, str(model), str(workload.folder / "tokenizer"), family).finish()
            check_success(made)
            found: dict[str, Any] = {}
            for num, cuts in CUTS.items():
                several = {"strategy": "ddp", "launch": {"nproc": num}} if num > 1 else {}
                options = {"model__path": str(model), "model__dropout": 0.0, "train__max_grad_norm": None, **several}
                recipe, file = workload.write_recipe(folder, **options), folder / f"gradients-{num}.npz"
                with Ranks(write_gradients, str(recipe), rows, cuts, str(file), num=num) as ranks:
                    done = ranks.wait()
                check_success(done)
                import numpy as np

                for key, value in np.load(file).items():
                    cut, _, name = key.partition(" ")
                    found.setdefault(f"{cut} of {num} ranks", {})[name] = value
            whole, *others = found.values()
            assert len(whole) > 10, f"gradients of {list(whole)} alone"
            for cut, gradients in zip(list(found)[1:], others, strict=True):
                assert gradients.keys() == whole.keys(), f"micro-batches of {cut}: gradients of other weights"
                off = {name: measure_difference(gradients[name], whole[name]) for name in whole}
                worst = max(off, key=lambda name: off[name])
                assert off[worst] <= CLOSE, (
                    f"micro-batches of {cut}: the gradient of {worst} is off by {off[worst]:.1e}"
                )

        yield Trial(f"{number} {family}", run)


def measure_difference(found: Any, whole: Any) -> float:
    """The norm of the difference of two gradients of a weight, by the norm of the second."""
    import numpy as np

    norm = float(np.linalg.norm(whole))
    off = float(np.linalg.norm(found - whole))
    return off / norm if norm else math.inf if off else 0.0


def write_gradients(recipe: str, rows: Sequence[int], cuts: Sequence[int], file: str) -> None:
    """Write the gradients that the optimizer gets for these rows, by size of micro-batches and name of the weight."""
    import numpy as np

    from fivetune.config import load_config
    from fivetune.data.store.batch import collate
    from fivetune.distributed.world import World
    from fivetune.training.setup import set_up
    from fivetune.training.step.update import train_step

    found: dict[str, Any] = {}
    with World.from_environment().connect(cuda=False, timeout_minutes=2) as world:
        setup = set_up(load_config(recipe), world=world)
        learner, store = setup.learner, setup.data.stream.store
        lengths = [len(store.labels[row]) for row in rows]
        assert len(set(lengths)) > 1, "targets of one length show nothing"
        own = list(rows)[world.rank :: world.size]

        def keep(*_: Any) -> None:
            for name, weight in learner.model.named_parameters():
                if weight.grad is not None:
                    found[f"{cut} {name}"] = weight.grad.numpy().copy()

        learner.optimizer.register_step_pre_hook(keep)
        for cut in cuts:
            group = [collate(store, own[i : i + cut]) for i in range(0, len(own), cut)]
            train_step(learner, group, lr=0.0, step=1, num_scored_tokens=sum(lengths))
    if world.is_first:
        np.savez(file, **found)


def make_tiny_model(folder: str, tokenizer: str, family: str) -> None:
    make_model(Path(folder), Path(tokenizer), family=family)


def cut_peer_step(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """The Trainer's gradient norm of 12 examples in micro-batches of 4 and 1, beside that of one of 12."""
    for cut in (4, 1):

        def run(folder: Path, cut: int = cut) -> None:
            norms: list[float] = []
            for size in (NUM_EXAMPLES, cut):
                options = {
                    "per_device_train_batch_size": size,
                    "gradient_accumulation_steps": NUM_EXAMPLES // size,
                    "max_steps": 1,
                    "max_grad_norm": 1e9,
                }
                log = run_peer(workload, folder / f"{size}", fault=(NUM_EXAMPLES, 1), **options)
                norms.append(log[-1]["grad_norm"])
            assert math.isclose(*norms, rel_tol=CLOSE), f"the norm is {norms[1]}, not {norms[0]}"

        yield Trial(f"micro-batches of {cut}", run)


ROWS = [
    Row("R14", "memory runs out in a forward or backward pass, also on one of two ranks",
        "repeats the step with smaller micro-batches: the same examples, losses within 1e-5",
        run_out_of_memory, 4, 40, run_peer_out_of_memory),
    Row("R15", "a step of 12 examples cut into 1, 3 or 12 micro-batches, on 1 and 2 ranks",
        "the gradient of each weight within 1e-5 of its own norm; Trainer: the norm over all weights, on one rank",
        cut_step, 2, 24, cut_peer_step),
]  # fmt: skip
