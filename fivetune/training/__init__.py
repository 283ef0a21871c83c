"""Training: `train` takes a recipe and gives a finished run directory.

The folder is called training, not train, so that `fivetune.train` can be the function.
"""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivetune import plugins, rundir
from fivetune.config import RunConfig, load_config
from fivetune.errors import FiveTuneError, Interrupted, RunDirError
from fivetune.model.save import save_model
from fivetune.progress import Progress, duration
from fivetune.rundir import CONFIG, DATA, EVALS, FORMAT_VERSION, MACHINE, RunDir, write_json, write_text
from fivetune.training import checkpoint
from fivetune.training.card import model_card
from fivetune.training.checkpoint import Progression
from fivetune.training.loop import Training, fit, score, timed, warn
from fivetune.training.preflight import check_before_training
from fivetune.training.resume import refuse_changes, refuse_other_data
from fivetune.training.setup import Setup, describe_machine, seed_everything, set_up
from fivetune.types import Run


def train(
    recipe: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    preflight: bool = True,
    quiet: bool = False,
) -> Run:
    """Fine-tune as a recipe says; returns the finished run, read back from its directory.

    Args:
        recipe: YAML file, name of a shipped recipe, run directory, nested dict, or a RunConfig.
        overrides: dotted settings that win over the recipe: {"optimizer.lr": 1e-3}.
        resume: go on with the run in `run.dir`, exactly where it stopped.
        overwrite: move a run that is there aside instead of refusing.
        preflight: check files, model, tokenizer, one step, one evaluation and one save before starting.

    Raises the errors of fivetune.errors; a signal raises Interrupted after the state was saved.
    """
    config = recipe if isinstance(recipe, RunConfig) else load_config(recipe, overrides)
    folder = Path(config.run.dir)
    if resume and not folder.is_dir():
        raise RunDirError(f"{folder}: there is no run to go on with. Leave --resume out to start it.")
    run = RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite)
    progress = Progress(folder / "log.txt", log_every_steps=config.train.log_every_steps, quiet=quiet)
    try:
        if resume:
            refuse_changes(folder, config)
        with _told(run, progress):
            _train(config, run, progress, resume=resume, preflight=preflight)
    except BaseException:
        if not resume and not run.past("begun", False):
            run.discard()  # refused before it began: the mended command finds the place free
        raise
    finally:
        progress.close()
        run.close()
    return rundir.read(folder)


def _train(config: RunConfig, run: RunDir, progress: Progress, *, resume: bool, preflight: bool) -> None:
    state = Progression()
    if not resume:
        _begin(config, run)
    counters: dict[str, Any] = {}
    with timed(state, "prepare"):
        setup = set_up(config, count=lambda what, n: counters.setdefault(what, progress.counter(what))(n, None))
        if resume:
            refuse_other_data(run.path, setup.stream.store.fingerprint)
            _begin(config, run)
        _record_setup(setup, run)
        for message in setup.loaded.warnings:
            run.warn(message)
            progress.warn(message)
        if preflight and not resume:
            check_before_training(setup, progress, run)
        training = _training(setup, run, progress, state, resume=resume)
    progress.say(_headline(setup, training.state))
    progress.start()
    run.status(state="running", begun=True)
    fit(training)
    with timed(training.state, "checkpoint"):
        _export(training)
    for sink in training.sinks:
        sink.close()
    run.status(state="finished", step=training.state.step, seconds_by_phase=training.state.seconds,
               seconds=sum(training.state.seconds.values()), best=training.state.best)  # fmt: skip


def _begin(config: RunConfig, run: RunDir) -> None:
    write_text(run.path / CONFIG, config.as_yaml())
    run.status(state="preparing", why="", started=run.past("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")))


def _training(setup: Setup, run: RunDir, progress: Progress, state: Progression, *, resume: bool) -> Training:
    """A fresh start, or the state of the newest whole checkpoint."""
    seed_everything(setup.config.run.seed)
    path = checkpoint.newest(run.path / "checkpoints", report=progress.warn) if resume else None
    if path is not None:
        restored = checkpoint.restore(path, setup.plain, setup.optimizer, setup.scaler)
        restored.seconds["prepare"] = restored.seconds.get("prepare", 0.0) + state.seconds.get("prepare", 0.0)
        state = restored
    if resume:
        run.keep_until(state.step)
        run.status(num_resumes=run.past("num_resumes", 0) + 1, step=state.step)
        progress.say(f"resuming at step {state.step:,} of {setup.num_steps:,}")
    evaluated = {record["step"] for record in rundir.read_jsonl(run.path / EVALS)}
    sinks = [plugins.load("sinks", name)().open(run.path, setup.config.as_dict()) for name in setup.config.report.sinks]
    return Training(setup, run, progress, state, sinks=sinks, evaluated=evaluated)


def _record_setup(setup: Setup, run: RunDir) -> None:
    command = shlex.join(["fivetune", *sys.argv[1:]]) if sys.argv else ""
    machine = {"format_version": FORMAT_VERSION, **describe_machine(setup, command)}
    write_json(run.path / MACHINE, machine)
    data = {"train": {**setup.stream.store.summary}}
    if setup.evaluator:
        data["eval"] = setup.evaluator.store.summary
    write_json(run.path / DATA, data)
    run.status(num_steps=setup.num_steps)
    if setup.place.precision == "fp16":
        run.warn("train.precision fp16 was asked for. T5's feed-forward outputs exceed fp16's 65,504 in all but the "
                 "smallest models; the authors trained in bf16. Overflowing steps are skipped.")  # fmt: skip


def _export(training: Training) -> None:
    """model/: the best weights, or the last ones where nothing was evaluated. A subset's best is scored in full."""
    setup, state, run = training.setup, training.state, training.run
    if state.best and state.best["step"] != state.step:
        path = run.path / "checkpoints" / str(state.best["step"])
        if reason := checkpoint.damage(path):
            warn(training, f"{path}: {reason}. It was the best checkpoint; model/ holds the last weights instead.")
            state.best = None
        else:
            checkpoint.load_weights(path, setup.plain)
    scored = {(e["step"], e["split"]) for e in rundir.read_jsonl(run.path / EVALS)}
    if state.best and (state.best["step"], "eval") not in scored:
        with timed(state, "evaluate"):
            score(training, step=state.best["step"])
    card = model_card(setup.config, rundir.read(run.path), state.best)
    save_model(setup.plain, setup.loaded.tokenizer, run.path / "model", card=card)


def _headline(setup: Setup, state: Progression) -> str:
    config, store = setup.config, setup.stream.store
    parameters = sum(p.numel() for p in setup.plain.parameters())
    return (
        f"{setup.num_steps - state.step:,} steps of {config.train.examples_per_step} examples "
        f"({len(store):,} in the set), {parameters:,} parameters, "
        f"{setup.place.precision} on {setup.place.device}"
    )


@contextlib.contextmanager
def _told(run: RunDir, progress: Progress) -> Iterator[None]:
    """Whatever ends the run is written into status.json before it goes on its way.

    A run that is refused before it goes on keeps the state that it had.
    """
    started = time.monotonic()
    try:
        yield
    except Interrupted as stop:
        run.status(state="interrupted", why=str(stop))
        raise
    except KeyboardInterrupt:
        run.status(state="interrupted", why="stopped by a second signal; the last checkpoint is whole")
        raise
    except BaseException as error:
        if run.past("state", "preparing") in ("preparing", "running"):
            run.status(state="failed", why=str(error) if isinstance(error, FiveTuneError) else repr(error))
        raise
    progress.say(f"finished in {duration(time.monotonic() - started)}")
