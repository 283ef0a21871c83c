"""Training: `train` takes a recipe and gives a finished run directory.

The folder is called training, not train, so that `fivetune.train` can be the function.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fivetune import plugins, rundir
from fivetune.config import RunConfig, load_config
from fivetune.errors import ConfigError, FiveTuneError, Interrupted, RunDirError
from fivetune.model.load import num_parameters
from fivetune.model.save import save_model
from fivetune.progress import Progress, duration
from fivetune.rundir import CONFIG, DATA, EVALS, FORMAT_VERSION, MACHINE, RunDir, write_json, write_text
from fivetune.training import checkpoint
from fivetune.training.card import model_card
from fivetune.training.checkpoint import Progression
from fivetune.training.loop import Training, fit, resume_command, score, timed, warn
from fivetune.training.preflight import check_before_training
from fivetune.training.resume import as_begun, changed_schedule, forward_begun, refuse_changes, refuse_other_data
from fivetune.training.setup import Setup, describe_machine, seed_everything, set_up, with_batch_size
from fivetune.training.signals import StopNow, StopRequest
from fivetune.types import Run


def train(
    recipe: str | Path | Mapping[str, Any] | RunConfig,
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    preflight: bool = True,
    quiet: bool = False,
    command: str | None = None,
) -> Run:
    """Fine-tune as a recipe says; returns the finished run, read back from its directory.

    Args:
        recipe: YAML file, name of a shipped recipe, run directory, nested dict, or a RunConfig, which is complete.
        overrides: dotted settings that win over the recipe: {"optimizer.lr": 1e-3}.
        resume: go on with the run in `run.dir`, exactly where it stopped.
        overwrite: move a run that is there aside instead of refusing.
        preflight: check files, model, tokenizer, one step, one evaluation and one save before starting.
        command: what the user typed, for machine.json.

    Raises the errors of fivetune.errors; a signal raises Interrupted after the state was saved.
    """
    if isinstance(recipe, RunConfig) and overrides:
        raise ConfigError("overrides: they are given beside a RunConfig, which is complete. "
                          "Give them to load_config, with the recipe.")  # fmt: skip
    config = recipe if isinstance(recipe, RunConfig) else load_config(recipe, overrides)
    folder = Path(config.run.dir)
    if resume and not folder.is_dir():
        raise RunDirError(f"{folder}: there is no run to go on with. Leave --resume out to start it.")
    with StopRequest() as stop:
        run = RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite)
        progress = Progress(folder / "log.txt", log_every_steps=config.train.log_every_steps, quiet=quiet)
        try:
            if resume:
                config = as_begun(folder, config)
                refuse_changes(folder, config)
            with _told(run, progress, stop):
                training = _prepare(config, run, progress, stop, resume=resume, preflight=preflight, command=command)
                _finish(training)
        except BaseException:
            if not resume and not run.past("begun", False):
                run.discard()  # refused before it began: the mended command finds the place free
            raise
        finally:
            torch.set_flush_denormal(False)  # as the caller had it: find_place sets it for the whole process
            progress.close()
            run.close()
    return rundir.read(folder)


def _prepare(
    config: RunConfig, run: RunDir, progress: Progress, stop: StopRequest, *,
    resume: bool, preflight: bool, command: str | None,
) -> Training:  # fmt: skip
    """Everything before the first step; its time counts as the phase "prepare"."""
    started = time.perf_counter()
    if not resume:
        _begin(config, run)
    progress.start()
    setup = set_up(config, count=progress.count, begun=forward_begun(run.path) if resume else None)
    if resume:
        refuse_other_data(run.path, setup.stream.store.fingerprint)
        setup.batch_size = run.past("batch_size", setup.batch_size)
        _begin(config, run)
    if setup.fit:
        write_text(run.path / CONFIG, with_batch_size(config, setup.batch_size).as_yaml())
        progress.say(str(setup.fit))
    for message in (*setup.loaded.warnings, *_changed_length(setup, run)):
        run.warn(message)
        progress.warn(message)
    before = run.past("num_steps", setup.num_steps)
    if before != setup.num_steps:
        progress.say(f"the run was {before:,} steps long and is now {setup.num_steps:,}")
    _record_setup(setup, run, command)
    if preflight and not resume:
        check_before_training(setup, progress, run)
    state = _state(setup, run, progress, resume=resume)
    evaluated = {record["step"] for record in rundir.own_evals(rundir.read_jsonl(run.path / EVALS))}
    state.seconds["prepare"] = state.seconds.get("prepare", 0.0) + time.perf_counter() - started
    return Training(setup, run, progress, state, stop, evaluated=evaluated)


def _finish(training: Training) -> None:
    """Train to the end and export; whatever happens, the trackers are closed."""
    setup, run, state = training.setup, training.run, training.state
    training.progress.say(_headline(setup, state))
    try:
        for name in setup.config.report.sinks:
            sink = plugins.load("sinks", name)()
            training.sinks.append(sink.open(run.path, setup.config.as_dict(), first_step=state.step + 1))
        run.status(state="running", begun=True, batch_size=setup.batch_size)
        fit(training)
        with timed(state, "checkpoint"):
            incomplete = _export(training)
    finally:
        for sink in training.sinks:
            sink.close()
    run.status(state="finished", step=state.step, seconds_by_phase=state.seconds, incomplete=incomplete,
               num_starved_steps=setup.stream.num_starved,
               seconds=sum(state.seconds.values()), best=state.best)  # fmt: skip


def _begin(config: RunConfig, run: RunDir) -> None:
    write_text(run.path / CONFIG, config.as_yaml())
    run.status(state="preparing", why="", started=run.past("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")))


def _state(setup: Setup, run: RunDir, progress: Progress, *, resume: bool) -> Progression:
    """A fresh start, or the state of the newest whole checkpoint."""
    seed_everything(setup.config.run.seed)
    state = Progression()
    path = checkpoint.newest(run.path / "checkpoints", report=progress.warn) if resume else None
    if path is not None:
        state = checkpoint.restore(path, setup.plain, setup.optimizer, setup.scaler)
    if resume:
        run.keep_until(state.step)
        run.status(num_resumes=run.past("num_resumes", 0) + 1, step=state.step)
        progress.say(f"resuming at step {state.step:,} of {setup.num_steps:,}")
    return state


def _changed_length(setup: Setup, run: RunDir) -> list[str]:
    before = run.past("num_steps", setup.num_steps)
    changed = setup.lr(0) is not None and changed_schedule(setup.config.schedule, before, setup.num_steps)
    return [changed] if changed else []


def _record_setup(setup: Setup, run: RunDir, command: str | None) -> None:
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


def _export(training: Training) -> str | None:
    """model/: the best weights, or the last ones where nothing was evaluated. A subset's best is scored in full.

    Returns what is missing, if the best weights are lost.
    """
    setup, state, run = training.setup, training.state, training.run
    incomplete = None
    if state.best and state.best["step"] != state.step:
        path = run.path / "checkpoints" / str(state.best["step"])
        if reason := checkpoint.damage(path):
            incomplete = f"{path}: {reason}. It was the best checkpoint; model/ holds the last weights instead."
            warn(training, incomplete)
            state.best = None
        else:
            checkpoint.load_weights(path, setup.plain)
    scored = {(e["step"], e["split"]) for e in rundir.read_jsonl(run.path / EVALS)}
    if state.best and (state.best["step"], "eval") not in scored:
        with timed(state, "evaluate"):
            score(training, step=state.best["step"])
    card = model_card(setup.config, rundir.read(run.path), state.best)
    save_model(setup.plain, setup.loaded.tokenizer, run.path / "model", card=card)
    return incomplete


def _headline(setup: Setup, state: Progression) -> str:
    config, store = setup.config, setup.stream.store
    return (
        f"{setup.num_steps - state.step:,} steps of {config.train.examples_per_step} examples "
        f"({len(store):,} in the set), {num_parameters(setup.plain):,} parameters, "
        f"{setup.place.precision} on {setup.place.device}, {setup.forward.kind} forward ({setup.forward.why})"
    )


@contextlib.contextmanager
def _told(run: RunDir, progress: Progress, stop: StopRequest) -> Iterator[None]:
    """Whatever ends the run is written into status.json before it goes on its way.

    A run that is refused before it goes on keeps the state that it had.
    """
    started = time.monotonic()

    def tell(state: str, why: str) -> None:
        if run.past("state", "preparing") in ("preparing", "running"):
            run.status(state=state, why=why)

    try:
        yield
    except Interrupted as error:
        tell("interrupted", str(error))
        raise
    except StopNow:
        begun = run.past("begun", False)
        rest = f"Go on with: {resume_command(run.path)}" if begun else "Nothing was trained, nothing is kept."
        tell("interrupted", f"stopped by {stop.name}. {rest}")
        raise Interrupted(f"stopped by {stop.name}. {rest}", signum=stop.signum or 0) from None
    except KeyboardInterrupt:
        tell("interrupted", "stopped by a second signal; the last checkpoint is whole")
        raise
    except BaseException as error:
        tell("failed", str(error) if isinstance(error, FiveTuneError) else repr(error))
        raise
    progress.say(f"finished in {duration(time.monotonic() - started)}")
