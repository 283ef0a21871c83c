"""Training: `train` takes a recipe and gives a finished run directory.

The folder is called training, not train, so that `fivetune.train` can be the function.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fivetune import plugins, rundir
from fivetune.config import RunConfig, load_config
from fivetune.errors import ConfigError, FiveTuneError, Interrupted, RunDirError
from fivetune.model.load import num_parameters
from fivetune.model.save import save_model
from fivetune.progress import Progress, duration
from fivetune.rundir import (
    CONFIG,
    DATA,
    EVALS,
    FORMAT_VERSION,
    MACHINE,
    TELEMETRY,
    TELEMETRY_OF_RANK,
    Bystander,
    RunDir,
)
from fivetune.strategies import Lost, World, refuse_other_world, refuse_shared_devices
from fivetune.telemetry.devices import peak_of
from fivetune.telemetry.meter import Meter
from fivetune.telemetry.sampler import Sampler
from fivetune.training import checkpoint
from fivetune.training.capture import capture_begun, choose_capture
from fivetune.training.card import model_card
from fivetune.training.checkpoint import Progression
from fivetune.training.loop import Training, fit, resume_command, score, timed, warn
from fivetune.training.preflight import check_before_training
from fivetune.training.resume import (
    as_begun,
    changed_schedule,
    forward_begun,
    refuse_changes,
    refuse_fewer_steps,
    refuse_other_data,
)
from fivetune.training.setup import Setup, describe_machine, seed_everything, set_up, with_batch_size
from fivetune.training.signals import StopNow, StopRequest
from fivetune.training.update import halting
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

    Under torchrun every process calls it; the first one writes the run and tells the user.

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
    folder, world = Path(config.run.dir), World.here()
    cuda = config.device != "cpu" and torch.cuda.is_available()
    with world.telling_once():
        refuse_other_world(world, config.launch.nproc)
        if cuda and world.size > 1:
            refuse_shared_devices(torch.cuda.device_count())
        if resume and not folder.is_dir():
            raise RunDirError(f"{folder}: there is no run to go on with. Leave --resume out to start it.")
    connected = world.connected(cuda=cuda, timeout_minutes=config.launch.timeout_minutes)
    with StopRequest(silent=not world.is_first) as stop, connected as world, world.telling_once():
        run, progress = _opened(config, world, resume=resume, overwrite=overwrite, quiet=quiet)
        try:
            if resume:
                config = as_begun(folder, config)
                refuse_changes(folder, config)
            with _told(run, progress, stop, world), _telemetry(config, run, progress, world) as sampler:
                training = _prepare(
                    config, run, progress, stop, world, sampler, resume=resume, preflight=preflight, command=command
                )  # fmt: skip
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


def _opened(config: RunConfig, world: World, *, resume: bool, overwrite: bool, quiet: bool) -> tuple[RunDir, Progress]:
    """The run directory and who speaks to the user: the first process; the others have silent ones."""
    folder = Path(config.run.dir)
    if not world.is_first:
        return Bystander(folder, world.from_first({})), Progress(quiet=True)
    run = RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite)
    world.from_first(run.facts())
    return run, Progress(folder / "log.txt", log_every_steps=config.train.log_every_steps, quiet=quiet)


def _telemetry(config: RunConfig, run: RunDir, progress: Progress, world: World) -> Sampler:
    """What looks at the machine beside this process; the first process of a machine looks at its devices too."""
    name = TELEMETRY if world.is_first else TELEMETRY_OF_RANK.format(rank=world.rank)
    sampler = Sampler(
        run.path / name, every_seconds=config.telemetry.every_seconds, rank=world.rank,
        devices=world.local_rank == 0, warn=progress.warn,
    )  # fmt: skip
    sampler.phase = "prepare"
    return sampler


def _prepare(
    config: RunConfig, run: RunDir, progress: Progress, stop: StopRequest, world: World, sampler: Sampler, *,
    resume: bool, preflight: bool, command: str | None,
) -> Training:  # fmt: skip
    """Everything before the first step; its time counts as the phase "prepare"."""
    started = time.perf_counter()
    if not resume:
        _begin(config, run)
    progress.start()
    setup = set_up(config, count=progress.count, begun=forward_begun(run.path) if resume else None, world=world)
    if resume:
        refuse_other_data(run.path, setup.stream.store.fingerprint)
        refuse_fewer_steps(run.path, run.past("step", 0), setup.num_steps)
        setup.batch_size = run.past("batch_size", setup.batch_size)
        _begin(config, run)
    if setup.fit:
        run.write(CONFIG, with_batch_size(config, setup.batch_size).as_yaml())
        progress.say(str(setup.fit))
    for message in (*setup.loaded.warnings, *_changed_length(setup, run)):
        run.warn(message)
        progress.warn(message)
    before = run.past("num_steps", setup.num_steps)
    if before != setup.num_steps:
        progress.say(f"the run was {before:,} steps long and is now {setup.num_steps:,}")
    graphs_begun = capture_begun(run.path) if resume else None
    machine = _record_setup(setup, run, command)
    if preflight and not resume:
        check_before_training(setup, progress, run)
    if capture := choose_capture(setup, begun=graphs_begun):
        run.write(MACHINE, {**machine, "capture": asdict(capture)})
        progress.say(f"steps are {capture}")
    state = _state(setup, run, progress, resume=resume)
    evaluated = {record["step"] for record in rundir.own_evals(_past_evals(run, world))}
    state.seconds["prepare"] = state.seconds.get("prepare", 0.0) + time.perf_counter() - started
    return Training(
        setup, run, progress, state, stop, Meter.of(setup.place.device), sampler, halted=halting(setup),
        peak_flops=peak_of(setup.place.device, setup.place.precision), evaluated=evaluated,
    )  # fmt: skip


def _finish(training: Training) -> None:
    """Train to the end and export; whatever happens, the trackers are closed."""
    setup, run, state = training.setup, training.run, training.state
    training.progress.say(_headline(setup, state))
    try:
        for name in setup.config.report.sinks if setup.world.is_first else ():
            sink = plugins.load("sinks", name)()
            training.sinks.append(sink.open(run.path, setup.config.as_dict(), first_step=state.step + 1))
        run.status(state="running", begun=True, batch_size=setup.batch_size)
        fit(training)
        with timed(training, "checkpoint"):
            incomplete = _export(training)
    finally:
        for sink in training.sinks:
            sink.close()
    run.status(state="finished", step=state.step, seconds_by_phase=state.seconds, incomplete=incomplete,
               num_starved_steps=setup.stream.num_starved,
               seconds=sum(state.seconds.values()), best=state.best)  # fmt: skip
    setup.world.wait()


def _past_evals(run: RunDir, world: World) -> list[dict[str, Any]]:
    """The evaluations that the first process has written."""
    return world.from_first(rundir.read_jsonl(run.path / EVALS) if world.is_first else [])


def _begin(config: RunConfig, run: RunDir) -> None:
    run.write(CONFIG, config.as_yaml())
    run.status(state="preparing", why="", started=run.past("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")))


def _state(setup: Setup, run: RunDir, progress: Progress, *, resume: bool) -> Progression:
    """A fresh start, or the state of the newest whole checkpoint."""
    world = setup.world
    seed_everything(setup.config.run.seed + world.rank)
    state = Progression()
    found = checkpoint.newest(run.path / "checkpoints", report=progress.warn) if resume and world.is_first else None
    path = world.from_first(found)
    if path is not None:
        state = checkpoint.restore(path, setup.model, setup.optimizer, setup.scaler, world)
    if resume:
        run.keep_until(state.step)
        run.status(num_resumes=run.past("num_resumes", 0) + 1, step=state.step)
        progress.say(f"resuming at step {state.step:,} of {setup.num_steps:,}")
    return state


def _changed_length(setup: Setup, run: RunDir) -> list[str]:
    before = run.past("num_steps", setup.num_steps)
    changed = setup.lr(0) is not None and changed_schedule(setup.config.schedule, before, setup.num_steps)
    return [changed] if changed else []


def _record_setup(setup: Setup, run: RunDir, command: str | None) -> dict[str, Any]:
    """Write down the machine and the data. Returns: what was written of the machine."""
    machine = {"format_version": FORMAT_VERSION, **describe_machine(setup, command)}
    run.write(MACHINE, machine)
    data = {"train": {**setup.stream.store.summary}}
    if setup.evaluator:
        data["eval"] = setup.evaluator.store.summary
    run.write(DATA, data)
    run.status(num_steps=setup.num_steps)
    if setup.place.precision == "fp16":
        run.warn("train.precision fp16 was asked for. T5's feed-forward outputs exceed fp16's 65,504 in all but the "
                 "smallest models; the authors trained in bf16. Overflowing steps are skipped.")  # fmt: skip
    return machine


def _export(training: Training) -> str | None:
    """model/: the best weights, or the last ones where nothing was evaluated. A subset's best is scored in full.

    Returns what is missing, if the best weights are lost.
    """
    setup, state, run, world = training.setup, training.state, training.run, training.setup.world
    incomplete = None
    if state.best and state.best["step"] != state.step:
        path = run.path / "checkpoints" / str(state.best["step"])
        if reason := world.from_first(checkpoint.damage(path) if world.is_first else None):
            incomplete = f"{path}: {reason}. It was the best checkpoint; model/ holds the last weights instead."
            warn(training, incomplete)
            state.best = None
        else:
            checkpoint.load_weights(path, setup.model)
    scored = {(e["step"], e["split"]) for e in _past_evals(run, world)}
    if state.best and (state.best["step"], "eval") not in scored:
        with timed(training, "evaluate"):
            score(training, step=state.best["step"])
    with setup.whole() as plain:
        if world.is_first:
            card = model_card(setup.config, rundir.read(run.path), state.best)
            save_model(plain, setup.loaded.tokenizer, run.path / "model", card=card)
    return incomplete


def _headline(setup: Setup, state: Progression) -> str:
    config, store = setup.config, setup.stream.store
    return (
        f"{setup.num_steps - state.step:,} steps of {config.train.examples_per_step} examples "
        f"({len(store):,} in the set), {num_parameters(setup.model):,} parameters, "
        f"{setup.place.precision} on {_devices(setup)}, {setup.forward.kind} forward ({setup.forward.why})"
    )


def _devices(setup: Setup) -> str:
    size, device = setup.world.size, setup.place.device
    if size == 1:
        return device
    return f"{size} x {device.partition(':')[0]} ({setup.config.strategy.plugin_name()})"


@contextlib.contextmanager
def _told(run: RunDir, progress: Progress, stop: StopRequest, world: World) -> Iterator[None]:
    """Whatever ends the run is written into status.json before it goes on its way.

    A run that is refused before it goes on keeps the state that it had.
    """
    started = time.monotonic()

    def tell(state: str, why: str) -> None:
        if run.past("state", "preparing") in ("preparing", "running"):
            run.status(state=state, why=why)

    try:
        with world.reaching_all():
            yield
    except Interrupted as error:
        tell("interrupted", str(error))
        raise
    except StopNow:
        begun = run.past("begun", False)
        if said := world.said_elsewhere():
            tell("failed", said)
        rest = f"Go on with: {resume_command(run.path)}" if begun else "Nothing was trained, nothing is kept."
        tell("interrupted", f"stopped by {stop.name}. {rest}")
        raise Interrupted(f"stopped by {stop.name}. {rest}", signum=stop.signum or 0) from None
    except KeyboardInterrupt:
        tell("interrupted", "stopped by a second signal; the last checkpoint is whole")
        raise
    except BaseException as error:
        stop.end()
        words = str(error) if isinstance(error, FiveTuneError) else repr(error)
        tell("failed", (isinstance(error, Lost) and world.said_elsewhere(seconds=5)) or words)
        raise
    progress.say(f"finished in {duration(time.monotonic() - started)}")
