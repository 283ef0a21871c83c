"""A resume after something changed: settings, data, model, tokenizer, environment."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune.rundir import read_run
from reliability.campaign import Row, Trial
from reliability.rows.damage import STEPS, begin_run, copy_run, stop_before_end
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import (
    Workload,
    check_weights,
    make_model,
    make_tokenizer,
    read_weights,
    squad_file,
    start_training,
)


@dataclass(frozen=True)
class Change:
    """What differs in a resume, and what is told.

    Args:
        words: of the command.
        told: what the message, or a warning that the run records, must say.
        is_refused: False where the run goes on.
        edit: changes files of the trial: the run, and data, model and tokenizer of a run with files of its own.
        variant: of a run with files of its own; "" for the common one.
        has_recipe: False where the run is resumed by its config.yaml alone.
    """

    words: tuple[str, ...]
    told: str
    is_refused: bool = True
    edit: Callable[[Path], None] = lambda folder: None
    variant: str = ""
    has_recipe: bool = True


def record_other_version(folder: Path) -> None:
    """Make the run one that another version of torch began."""
    path = folder / "run" / "machine.json"
    machine = json.loads(path.read_text())
    machine["parts"][-1]["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(machine))


def edit_settings(folder: Path) -> None:
    path = folder / "run" / "config.yaml"
    path.write_text(re.sub(r"(?m)^  lr: .*$", "  lr: 0.002", path.read_text()))


def change_questions(folder: Path) -> None:
    squad_file(folder / "train.json", num_questions=24, offset=1)


def change_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    check_success(WarmProcess(_make_other_model, str(folder)).finish())


def change_tokenizer(folder: Path) -> None:
    """Give two pieces of the vocabulary each other's place."""
    path = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    pieces = tokenizer["model"]["vocab"]
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    path.write_text(json.dumps(tokenizer))


def _make_other_model(folder: str) -> None:
    tokenizer = make_tokenizer(Path(folder) / "tokenizer")
    make_model(Path(folder) / "model", tokenizer, seed=1)


CHANGES: dict[str, Change] = {
    "data.train": Change(("--data.train", "{folder}/other.json"), "data.train was"),
    "order of the data": Change((), "was trained on other data", edit=change_questions, variant="adamw"),
    "weights of the model, all trained": Change(
        (), "The weights at model.path have changed", is_refused=False, edit=change_model, variant="adamw"
    ),
    "weights of the model, an adapter trained": Change(
        (), "its adapter was trained on", edit=change_model, variant="lora"
    ),
    "tokenizer": Change((), "was trained on other data", edit=change_tokenizer, variant="adamw"),
    "optimizer.name": Change(("--optimizer.name", "adafactor"), "optimizer.name was 'adamw', is 'adafactor'"),
    "optimizer.lr": Change(("--optimizer.lr", "2e-3"), "optimizer.lr was 0.001, is 0.002"),
    "schedule.name": Change(("--schedule.name", "cosine"), "schedule.name was 'linear', is 'cosine'"),
    "train.batch_size": Change(("--train.batch_size", "2"), "train.batch_size was 4, is 2"),
    "train.global_batch_size": Change(("--train.global_batch_size", "4"), "train.global_batch_size was 8, is 4"),
    "config.yaml of the run": Change(
        (),
        "was trained with other settings: optimizer.lr",
        edit=edit_settings,
        has_recipe=False,
    ),
    "run.seed": Change(("--run.seed", "2"), "run.seed was 1, is 2"),
    "model.dropout": Change(("--model.dropout", "0"), "model.dropout was 0.1, is 0.0"),
    "model.adapter": Change(("--model.adapter", "lora"), "model.adapter"),
    "data.max_input_tokens": Change(("--data.max_input_tokens", "20"), "data.max_input_tokens was"),
    "fewer steps": Change(("--train.num_steps", "1"), "train.num_steps or train.num_epochs sets 1"),
    "more steps": Change(("--train.num_steps", "6"), "learning rate jumps", is_refused=False),
    "eval.num_beams": Change(("--eval.num_beams", "2"), "eval.num_beams was 1, is 2", is_refused=False),
    "data.eval": Change(("--data.eval", "{folder}/other.json"), "the evaluation data differ", is_refused=False),
    "train.precision": Change(("--train.precision", "bf16"), "by the rounding of bf16", is_refused=False),
    "train.num_threads": Change(("--train.num_threads", "2"), "num_threads: 1 -> 2", is_refused=False),
    "version of torch": Change((), "versions.torch: 1.0 ->", is_refused=False, edit=record_other_version),
}
LINEAR = {"schedule__name": "linear"}
SAME_WEIGHTS = ("weights of the model, all trained", "eval.num_beams", "data.eval", "version of torch")


def change_before_resume(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Change one thing, resume, and where that is refused resume again without the change."""
    stopped = begin_run(workload, "changes", **LINEAR)
    whole = workload.run_undisturbed(**STEPS, **LINEAR)
    for name in random.sample(list(CHANGES), len(CHANGES)):

        def run(folder: Path, name: str = name, change: Change = CHANGES[name]) -> None:
            reference = workload.run_undisturbed(change.variant, **STEPS) if change.variant else whole
            if change.variant:
                begin_with_own_files(workload, folder, change.variant)
            else:
                copy_run(stopped, folder)
            recipe, run = (folder if change.variant else stopped.parent) / "recipe.yaml", folder / "run"
            squad_file(folder / "other.json", num_questions=20, offset=40)
            kept = keep_inputs(folder)
            change.edit(folder)
            words = [word.format(folder=folder) for word in change.words]
            where = ["--run.dir", str(run)] if change.has_recipe else []
            done = start_training(recipe if change.has_recipe else run, "--resume", *where, *words).finish()
            check_no_trace(done.stderr)
            said = " ".join(done.stderr.split())
            assert change.told in said, f"expected {change.told!r}, told: {said[-600:] or 'nothing'}"
            if change.is_refused:
                assert done.returncode in (2, 3, 4), f"exit code {done.returncode}: {said[-600:]}"
                bring_back(folder, kept)
                if not change.variant:
                    shutil.copy(stopped / "config.yaml", run)
                resume_as_it_was(recipe, run, reference.weights)
                return
            check_success(done)
            found = read_run(run)
            recorded = [*found.warnings, *(text for part in found.machine.parts for text in part.changed)]
            assert any(change.told in text for text in recorded), f"recorded is {recorded}"
            if name in SAME_WEIGHTS:
                check_weights(read_weights(run), reference.weights)

        yield Trial(name, run)


def begin_with_own_files(workload: Workload, folder: Path, variant: str) -> None:
    """A run that ended before its last step, with its data and model in `folder`."""
    shutil.copytree(workload.model, folder / "model")
    overrides: dict[str, Any] = {"model__path": str(folder / "model")}
    recipe = workload.write_recipe(folder, variant, **STEPS, **overrides)
    stop_before_end(recipe)


def keep_inputs(folder: Path) -> Path:
    """Copy what a change may edit, the run excepted; returns the copy."""
    kept = folder / "kept"
    return shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("run", "kept", "cache"))


def bring_back(folder: Path, kept: Path) -> None:
    """Undo a change of the inputs."""
    for path in kept.iterdir():
        if path.is_dir():
            shutil.rmtree(folder / path.name)
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copy(path, folder / path.name)


def resume_as_it_was(recipe: Path, run: Path, weights: bytes) -> None:
    """The refusal has left the run as it is."""
    check_success(start_training(recipe, "--resume", "--run.dir", str(run)).finish())
    check_weights(read_weights(run), weights)


ROWS = [
    Row("R11", "a resume with other data, model, tokenizer, settings or versions",
        "refused with the difference, or recorded with identical weights", change_before_resume, 14),
]  # fmt: skip
