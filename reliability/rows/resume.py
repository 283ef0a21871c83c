"""Resumes: every kind of run after a kill, and with another number of processes."""

from __future__ import annotations

import math
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any

from fivetune.rundir import read_run
from fivetune.rundir.records import StepRecord
from reliability.campaign import Row, Trial
from reliability.faults import train
from reliability.ranks import Ranks
from reliability.warm import check_success
from reliability.workload import (
    Workload,
    check_resumed_from,
    check_same_run,
    find_newest_step,
    find_resume_words,
    resume,
    wait_for_checkpoint,
)

PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "optimizer": {"adamw": {}, "adafactor": {"optimizer": {"name": "adafactor", "lr": 1e-3}}},
    "precision": {"fp32": {"train__precision": "fp32"}, "bf16": {"train__precision": "bf16"}},
    "strategy": {name: {"strategy": name, "launch": {"nproc": 1 + (name != "single")}} for name in
                 ("single", "ddp", "fsdp")},
    "accumulation": {"1x": {"micro_batches": 1}, "2x": {"micro_batches": 2}},
    "threads": {"1 thread": {"train__num_threads": 1}, "2 threads": {"train__num_threads": 2}},
    "weights": {"full": {}, "lora": {"model__adapter": "lora"}},
}  # fmt: skip
GLOBAL_BATCH = 8  # examples, of all recipes
REFUSED = {"fsdp", "lora"}  # together: 16 of the 96 combinations
FEW = {"train__num_steps": 8, "eval__every_steps": 4, "num_questions": 25}  # an epoch ends with a step of one example
CONVERTED_EVERY = 3
READERS_EVERY = 12  # trials; processes that read data import torch, which takes longer than the trial
CLOSE = 1e-5  # relative: sums in another order
SINGLE, DDP, FSDP = ("single", 1), ("ddp", 2), ("fsdp", 2)
MOVES = ((SINGLE, DDP, SINGLE), (SINGLE, FSDP, SINGLE), (DDP, SINGLE, DDP), (FSDP, SINGLE, DDP))


def resume_each_kind(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Every combination of PARTS in random order: four of one process, then one of two, then four of one ..."""
    names = list(product(*PARTS.values()))
    random.shuffle(names)
    alone, together = ([one for one in names if ("single" in one) == flag] for flag in (True, False))
    rounds = (chain(alone[i * 4 : i * 4 + 4], together[i : i + 1]) for i in range(len(together)))
    for number, combination in enumerate(chain.from_iterable(rounds), start=1):
        at, num_readers = random.randint(2, 6), 1 + (number % READERS_EVERY == 0)
        name = f"{' '.join(combination)} at {at}{', data in two processes' if num_readers > 1 else ''}"
        yield Trial(name, make_resume(workload, combination, at, num_readers))


def make_resume(workload: Workload, combination: tuple[str, ...], at: int, num_readers: int) -> Any:
    """A trial that kills a run after its checkpoint of step `at`, and compares it with one that nothing disturbs."""
    overrides: dict[str, Any] = {**FEW, "data__num_processes": num_readers}
    for part, name in zip(PARTS.values(), combination, strict=True):
        overrides |= part[name]
    num = overrides["launch"]["nproc"]
    overrides["train__batch_size"] = GLOBAL_BATCH // (num * overrides.pop("micro_batches"))

    def run(folder: Path) -> None:
        whole, killed = (folder / name for name in ("whole", "killed"))
        whole.mkdir()
        killed.mkdir()
        done = Ranks(train, str(workload.write_recipe(whole, **overrides)), num=num).finish()
        if set(combination) >= REFUSED:
            assert done.returncode == 2, f"not refused: exit code {done.returncode}"
            assert re.search(r"strategy\.name fsdp .* model\.adapter lora ", done.stderr), done.stderr[-600:]
            return
        check_success(done)
        recipe = workload.write_recipe(killed, **overrides)
        with Ranks(train, str(recipe), num=num) as ranks:
            wait_for_checkpoint(ranks, killed / "run", at)
            ranks.kill_tree()
            assert ranks.wait().returncode != 0, "it ended before the kill"
        newest = find_newest_step(killed / "run")
        assert newest >= at, f"the checkpoint of step {at} was there, the newest whole one is that of step {newest}"
        resume(recipe, killed / "run", num_ranks=num)
        check_same_run(killed / "run", whole / "run")

    return run


def move_between_ranks(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Runs that begin, go on and end with different numbers of processes, without dropout, whose masks are a rank's."""
    for number, places in enumerate(cycle(random.sample(MOVES, len(MOVES)))):
        stops = sorted(random.sample(range(2, 11), 2))
        optimizer = "adafactor" if number % 2 and FSDP not in places else "adamw"
        readers = (1, 2, 1) if number % CONVERTED_EVERY == 0 else ()

        def run(
            folder: Path,
            places: Any = places,
            stops: list[int] = stops,
            optimizer: str = optimizer,
            readers: Sequence[int] = readers,
        ) -> None:
            overrides: dict[str, Any] = {
                "train__num_steps": 12,
                "eval__every_steps": 6,
                "model__dropout": 0.0,
                "optimizer": {"name": optimizer, "lr": 1e-3},
            }
            whole = read_run(workload.run_undisturbed(**overrides).run)
            recipe = workload.write_recipe(folder, **overrides)
            for part, ((strategy, num), stop) in enumerate(zip(places, (*stops, None), strict=True)):
                words = ["--strategy.name", strategy, "--launch.nproc", str(num)]
                if readers:
                    words += ["--data.num_processes", str(readers[part])]
                    shutil.rmtree(folder / "cache", ignore_errors=True)  # the records are converted again
                if stop is None:
                    resume(recipe, folder / "run", *words, num_ranks=num)
                    break
                newest = find_newest_step(folder / "run")
                with Ranks(train, str(recipe), *find_resume_words(folder / "run"), *words, num=num) as ranks:
                    wait_for_checkpoint(ranks, folder / "run", max(stop, newest + 1))
                    ranks.kill_tree()
                    assert ranks.wait().returncode != 0, "it ended before the kill"
                check_resumed_from(folder / "run", newest)
            check_same_work(read_run(folder / "run").steps, whole.steps, {num for _, num in places})

        name = f"{number} {optimizer} {' '.join(name for name, _ in places)} at {stops}"
        yield Trial(f"{name}{', converted by other numbers of processes' if readers else ''}", run)


def check_same_work(found: list[StepRecord], whole: list[StepRecord], sizes: set[int]) -> None:
    """The same examples in the same order, close losses, and the number of processes with each step."""
    orders = [[(one.step, one.num_input_tokens, one.num_target_tokens, one.num_examples_seen) for one in steps]
              for steps in (found, whole)]  # fmt: skip
    assert orders[0] == orders[1], f"other examples: {orders}"
    for ours, theirs in zip(found, whole, strict=True):
        assert is_close(ours.loss, theirs.loss), f"step {ours.step}: {ours.loss} not {theirs.loss}"
    recorded = {one.world_size for one in found}
    assert recorded <= sizes and len(recorded) > 1, f"numbers of processes on record: {recorded}, not {sizes}"


def is_close(loss: float | None, other: float | None) -> bool:
    return loss is not None and other is not None and math.isclose(loss, other, rel_tol=CLOSE)


ROWS = [
    Row("R9", "SIGKILL after a checkpoint, of every optimizer, precision, strategy, accumulation, threads, adapter",
        "resumes to identical weights, records and predictions", resume_each_kind, 12, 96),
    Row("R10", "resumed with another number of processes, twice; in every third trial other numbers of processes also "
        "convert the records again",
        "the same examples in the same order, losses within 1e-5", move_between_ranks, 1, 12),
]  # fmt: skip
