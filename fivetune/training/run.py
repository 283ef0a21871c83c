"""The run: fine-tune by a recipe, and return the finished run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivetune import plugins, rundir
from fivetune.config import RunConfig
from fivetune.config.recipes import refuse_missing_run
from fivetune.data.readers.tables import name_tables
from fivetune.distributed.shared_folder import refuse_separate_folders
from fivetune.distributed.world import (
    World,
    refuse_shared_devices,
    refuse_wrong_world_size,
)
from fivetune.errors import ConfigError, InterruptedRunError, NumericError, RunDirError
from fivetune.machine.telemetry.devices import get_device_peak_flops
from fivetune.machine.telemetry.meter import Meter
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.model.tokenizer import load_hub_tokenizer
from fivetune.rundir import (
    DATA,
    FORMAT_VERSION,
    LOG,
    MACHINE,
    TELEMETRY,
    TELEMETRY_OF_RANK,
    NullRunDir,
    RunDir,
)
from fivetune.rundir.figures import select_evals_by_step
from fivetune.rundir.layout import PLAN
from fivetune.rundir.plan import Plan, read_plan
from fivetune.rundir.progress import Progress
from fivetune.start.files import find_data_recipe
from fivetune.training.answers.evaluator import select_subset
from fivetune.training.answers.trained_run import TrainedRun, open_run
from fivetune.training.autotune.graphs import decide_graphs, read_graph_decision
from fivetune.training.checks.preflight import check_before_training
from fivetune.training.export import describe_few_evals, export_model
from fivetune.training.loop import (
    Training,
    measure_phase,
    run_training_loop,
    warn_once,
)
from fivetune.training.machine import describe_machine, format_headline
from fivetune.training.outcome import name_python_call, record_outcome, report_stop
from fivetune.training.setup import Setup, set_up, with_batch_size
from fivetune.training.signals import StopRequest
from fivetune.training.sinks import refuse_missing_sinks
from fivetune.training.sources import with_data_labels
from fivetune.training.state import checkpoint
from fivetune.training.state.bucket import Uploader, open_copy
from fivetune.training.state.checkpoint import CheckpointOwner, TrainingProgress
from fivetune.training.state.past_evals import read_past_evals
from fivetune.training.state.resume import (
    add_part,
    describe_last_evaluation,
    describe_lost_files,
    describe_other_evaluation,
    describe_owner,
    describe_schedule_change,
    list_saved_steps,
    read_batch_size,
    read_choices,
    refuse_changes,
    refuse_fewer_steps,
    refuse_foreign_checkpoints,
    with_saved_batch_size,
)
from fivetune.training.state.saving import BackgroundWriter
from fivetune.training.state.snapshot import seed_everything
from fivetune.training.step.learner import restore_process_settings
from fivetune.training.step.update import make_nonfinite_flag
from fivetune.training.stopping import describe_stop
from fivetune.training.tables import TableFiles, load_config_of_tables
from fivetune.training.threads import ThreadControl

if TYPE_CHECKING:
    from fivetune.types import JsonTable

FP16_WARNING = (
    "train.precision is fp16. T5's feed-forward outputs exceed fp16's 65,504 in all but the smallest models; the "
    "authors trained in bf16. Overflowing steps are skipped."
)


def train(
    recipe: str | Path | Mapping[str, object] | RunConfig,
    overrides: Mapping[str, object] | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    preflight: bool = True,
    quiet: bool = False,
    command: str | None = None,
) -> TrainedRun:
    """Fine-tune by a recipe. Under torchrun every rank calls it; rank 0 writes and prints.

    Args:
        recipe: YAML file, name of a shipped recipe, run directory, nested dict, or a RunConfig, which is complete; or
            a data file, whose recipe is written first, as by `fivetune new`: fivetune.train("tickets.csv").
        overrides: dotted settings that override the recipe: {"optimizer.lr": 1e-3}. data.train and data.eval may be
            pandas DataFrames, data sets of `datasets` or lists of records, here and in a nested dict; each is written
            to a file beside the run directory, tables/train-<hash of its content>.jsonl, which the run names.
        resume: continue the run in `run.dir` exactly where it stopped.
        overwrite: move an existing run aside instead of refusing.
        preflight: check files, model, tokenizer, one step, one evaluation and one save before starting.
        quiet: print warnings only.
        command: the command line, for machine.json.

    Returns the finished run. Raises the errors of fivetune.errors; Ctrl-C, the interrupt of a notebook's kernel or
    another signal raises InterruptedRunError after the state is saved, whose text has the call that resumes.

    >>> import fivetune
    >>> rows = [{"text": "my parcel is late", "label": "delivery"}, {"text": "money back", "label": "refund"}]
    >>> task, settings = {"name": "classification"}, {"num_steps": 2, "batch_size": 2}
    >>> recipe = {"model": {"path": "t5-nano"}, "task": task, "data": {"train": rows * 4}, "train": settings}
    >>> run = fivetune.train(recipe, {"run.dir": "runs/doctest"}, overwrite=True, preflight=False, quiet=True)
    >>> run.status.state, run.config["data"]["train"]
    ('finished', ['runs/tables/train-1c489e1b8bfe.jsonl'])
    """
    config, tables = _load_recipe(recipe, overrides, resume=resume, overwrite=overwrite)
    with name_tables(tables), name_python_call(config.run.dir, command):
        return _train(config, resume=resume, overwrite=overwrite, preflight=preflight, quiet=quiet, command=command)


def _train(
    config: RunConfig, *, resume: bool, overwrite: bool, preflight: bool, quiet: bool, command: str | None
) -> TrainedRun:
    folder, world = Path(config.run.dir), World.from_environment()
    run: RunDir | None = None

    def has_begun() -> bool:
        return resume or (run is not None and run.get_status_value("begun", False))

    cuda = config.device != "cpu" and torch.cuda.is_available()
    with world.report_errors_once():
        refuse_wrong_world_size(world, config.launch.num_processes, nnodes=config.launch.nnodes)
        if cuda and world.size > 1:
            refuse_shared_devices(torch.cuda.device_count())
        refuse_missing_sinks(config.report.sinks if world.is_first else ())
        config = with_data_labels(config)
    connected = world.connect(cuda=cuda, timeout_minutes=config.launch.timeout_minutes)
    stopping = StopRequest(silent=not world.is_first)
    with (
        restore_process_settings(),
        stopping as stop,
        connected as world,
        world.report_errors_once(),
        report_stop(stop, folder, has_begun),
    ):
        if resume and not config.checkpoint.url and not world.broadcast_object(folder.is_dir()):
            raise RunDirError(f"{folder}: there is no run to resume. Leave --resume out to start it.")
        url, notes = open_copy(config.checkpoint.url, folder, world, resume=resume)
        # A run that was killed before it wrote a whole file has no state to resume from: it starts at step 0.
        resume = resume and world.broadcast_object(rundir.find_conflict(folder) is not None)
        run, progress = _open_run_outputs(config, world, notes, resume=resume, overwrite=overwrite, quiet=quiet)
        try:
            refuse_separate_folders(folder, world, nnodes=config.launch.nnodes)
            if resume:
                config = with_saved_batch_size(folder, config)
                refuse_changes(folder, config)
            with (
                config.strategy.suppress_warnings(),
                record_outcome(run, progress, stop, world),
                _open_sampler(config, run, progress, world) as sampler,
            ):
                start = partial(_prepare, resume=resume, preflight=preflight, command=command)
                _train_and_export(start(config, run, progress, stop, world, sampler), url)
            run.write_checksums(progress.warn)
        except BaseException:
            if not has_begun():
                run.discard()  # refused before it began: the corrected command can use the folder
            raise
        finally:
            progress.close()
            run.close()
    return open_run(folder)


def _load_recipe(
    recipe: str | Path | Mapping[str, object] | RunConfig,
    overrides: Mapping[str, object] | None,
    *,
    resume: bool,
    overwrite: bool,
) -> tuple[RunConfig, TableFiles]:
    if isinstance(recipe, RunConfig):
        if overrides:
            advice = "Give them to load_config, with the recipe."
            raise ConfigError(f"overrides: not allowed with a RunConfig, which is complete. {advice}")
        return recipe, {}
    if isinstance(recipe, str | Path):
        recipe, _ = find_data_recipe(
            str(recipe), overrides or {}, resume=resume, overwrite=overwrite, load_tokenizer=load_hub_tokenizer
        )
        if resume:
            refuse_missing_run(recipe)
    return load_config_of_tables(recipe, overrides)


def _open_run_outputs(
    config: RunConfig, world: World, notes: Sequence[str], *, resume: bool, overwrite: bool, quiet: bool
) -> tuple[RunDir, Progress]:
    """Open the run directory and the progress display; on ranks above 0 neither writes nor prints."""
    folder = Path(config.run.dir)
    if not world.is_first:
        return NullRunDir(folder, world.broadcast_object({})), Progress(silent=True)
    run = RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite)
    try:
        checkpoint.restore_replaced_checkpoints(folder / "checkpoints")
        world.broadcast_object(run.get_status())
        progress = Progress(folder / LOG, log_every_steps=config.train.log_every_steps, quiet=quiet)
        for message in run.damage:
            progress.warn(message)
        for message in notes:
            _warn(run, progress, message)
    except BaseException:
        run.close() if resume else run.discard()
        raise
    return run, progress


@contextlib.contextmanager
def _open_sampler(config: RunConfig, run: RunDir, progress: Progress, world: World) -> Iterator[Sampler]:
    """Open the telemetry sampler of this rank; local rank 0 samples the devices of its machine too.

    Only that of rank 0 has started: the others write to the run directory once nothing can refuse the run, because
    rank 0 removes the directory of a refused run.
    """
    name = TELEMETRY if world.is_first else TELEMETRY_OF_RANK.format(rank=world.rank)
    sampler = Sampler(
        run.path / name,
        every_seconds=config.telemetry.every_seconds,
        rank=world.rank,
        devices=world.local_rank == 0,
        warn=progress.warn,
    )
    sampler.phase = "prepare"
    if world.is_first:
        sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def _prepare(
    config: RunConfig,
    run: RunDir,
    progress: Progress,
    stop: StopRequest,
    world: World,
    sampler: Sampler,
    *,
    resume: bool,
    preflight: bool,
    command: str | None,
) -> Training:
    """Set up the run up to its first step; the time counts as the phase "prepare"."""
    started = time.perf_counter()
    if not resume:
        _write_initial_status(config, run)
    progress.start()
    choices = read_choices(run.path) if resume else {}
    setup = set_up(config, on_progress=progress.update, world=world, **choices)
    plan, is_half = setup.plan, setup.learner.compute.precision == "fp16"
    warnings = [*setup.warnings, *describe_few_evals(config.checkpoint.average_best, plan)]
    owner = describe_owner(run.path, setup)
    if resume:
        plan = _restore_plan(setup, run, progress, warnings, owner)
        _write_initial_status(config, run)
    if setup.fit:
        run.write_config(with_batch_size(config, setup.fit.batch_size).as_redacted_yaml())
        progress.log(str(setup.fit))
    for message in (*warnings, FP16_WARNING) if is_half else warnings:
        _warn(run, progress, message)
    run.write(DATA, {name: store.summary for name, store in setup.data.stores})
    run.write(PLAN, plan.as_dict())
    if preflight and not resume:
        plan = check_before_training(setup, progress, run)
        run.write(PLAN, plan.as_dict())
    learner, decision = decide_graphs(setup, resumed_decision=read_graph_decision(run.path) if resume else None)
    if decision:
        progress.log(f"steps are {decision}")
    setup = replace(setup, learner=learner)
    state = _load_progress(setup, run, progress, owner, resume=resume)
    graphs = {"capture": asdict(decision)} if decision else {}
    evaluator = setup.data.evaluator
    machine = {"run_id": owner.run_id, **describe_machine(setup, command), **graphs}
    _record_machine(run, progress, machine, step=state.step, resume=resume)
    state.seconds["prepare"] = state.seconds.get("prepare", 0.0) + time.perf_counter() - started
    return Training(
        setup,
        plan,
        run,
        progress,
        state,
        stop,
        Meter.from_device(learner.compute.device),
        sampler,
        nonfinite_flag=make_nonfinite_flag(learner),
        peak_flops=get_device_peak_flops(learner.compute.device, learner.compute.precision),
        subset=select_subset(evaluator.store, config.eval.max_examples) if evaluator else None,
        threads=ThreadControl.from_setting(config.train.num_threads) if learner.compute.kind == "cpu" else None,
        evaluated_steps=_find_evaluated_steps(run, world, state, owner.eval_basis),
        owner=owner,
        writer=BackgroundWriter(world, is_parallel=config.checkpoint.background),
    )


def _record_machine(run: RunDir, progress: Progress, machine: JsonTable, *, step: int, resume: bool) -> None:
    """Write machine.json with the list of the run's parts; warn of differences from the previous part."""
    before = rundir.read_machine(run.path).parts if resume else ()
    parts, changes = add_part(before, machine, step=step)
    run.write(MACHINE, {"format_version": FORMAT_VERSION, **machine, "parts": [asdict(part) for part in parts]})
    for message in changes:
        _warn(run, progress, message)


def _restore_plan(setup: Setup, run: RunDir, progress: Progress, warnings: list[str], owner: CheckpointOwner) -> Plan:
    """The plan of a resumed run: that of this set-up, with the micro-batch of the newest checkpoint or of plan.json.

    Raises RunDirError for other training data, ConfigError for fewer steps than the run has done.
    """
    refuse_foreign_checkpoints(run.path, owner)
    saved = list_saved_steps(run.path / "checkpoints")  # status.json may be lost, or older
    refuse_fewer_steps(run.path, max([run.get_status_value("step", 0), *saved]), setup.plan.num_steps)
    world = setup.learner.world
    warnings += world.broadcast_object(describe_lost_files(run.path, set_aside=run.set_aside))
    before = world.broadcast_object(read_plan(run.path))
    batch_size = world.broadcast_object(read_batch_size(run.path))
    if before is None:
        return setup.plan.with_batch_size(batch_size) if batch_size else setup.plan
    batch_size = batch_size or before.batch_size
    if batch_size != before.batch_size:  # edited, or halved after the checkpoint: then it will be halved again
        progress.log(f"batch_size is {batch_size}, as at the checkpoint ({PLAN} has {before.batch_size})")
    if before.num_steps != setup.plan.num_steps:
        progress.log(f"the number of steps changes from {before.num_steps:,} to {setup.plan.num_steps:,}")
    if setup.plan.lr is not None:
        warnings += describe_schedule_change(setup.config.schedule, before.num_steps, setup.plan.num_steps)
    return setup.plan.with_batch_size(batch_size)


def _train_and_export(training: Training, url: str | None) -> None:
    """Train to the end and export the model; the trackers are closed in any case.

    Args:
        url: of the run's copy.
    """
    setup, run, state = training.setup, training.run, training.state
    keep, world = setup.config.checkpoint.keep, setup.learner.world
    uploader = Uploader(url, run.path, keep=keep, start_step=state.step, world=world)
    training.uploader = uploader
    warn = partial(warn_once, training)
    training.progress.log(format_headline(setup, state.step))
    try:
        for name in setup.config.report.sinks if world.is_first else ():
            sink = plugins.load_plugin("sinks", name)()
            training.sinks.append(sink.open(run.path, setup.config.as_redacted_dict(), first_step=state.step + 1))
        run.update_status(state="running", begun=True)
        training.sampler.start()
        try:
            try:
                run_training_loop(training)
            finally:  # an error of a step does not lose the checkpoint that is being written, or that it failed
                if failure := training.writer.take_error():
                    warn(str(failure))
        except (InterruptedRunError, NumericError, RunDirError):  # raised by all ranks: the others are there to help
            uploader.finish(training.progress.log, warn)
            raise
        uploader.finish(training.progress.log, warn)
        if why := describe_stop(state, setup.config.train.early_stopping, training.plan.num_steps):
            training.progress.log(why)
        with setup.learner.swap_in_averages():
            missing = export_model(training)
        with measure_phase(training, "checkpoint"):
            missing += filter(None, [uploader.upload_results(warn)])
    except BaseException:
        with contextlib.suppress(RunDirError):  # the error that ends the run is told, not that its times are unknown
            run.update_status(seconds_by_phase=state.seconds, seconds=sum(state.seconds.values()))
        raise
    finally:
        uploader.stop()
        for sink in training.sinks:
            sink.close()
    run.update_status(
        state="finished",
        why=why,
        step=state.step,
        seconds_by_phase=state.seconds,
        incomplete=" ".join(missing) or None,
        num_starved_steps=setup.data.stream.num_starved,
        seconds=sum(state.seconds.values()),
        best=asdict(state.best) if state.best else None,
    )
    uploader.upload_status(warn)
    world.barrier()


def _find_evaluated_steps(run: RunDir, world: World, state: TrainingProgress, basis: str) -> set[int]:
    """Find the steps whose evaluation is not repeated: none after step 0 if no score counts as the best so far.

    Those of other data or settings are repeated.
    """
    records = [record for record in select_evals_by_step(read_past_evals(run, world)) if record.basis == basis]
    return {record.step for record in records if state.best or record.step == 0}


def _write_initial_status(config: RunConfig, run: RunDir) -> None:
    run.write_config(config.as_redacted_yaml())
    run.update_status(
        state="preparing",
        why="",
        seconds=None,
        started=run.get_status_value("started", time.strftime("%Y-%m-%dT%H:%M:%S%z")),
    )


def _load_progress(
    setup: Setup, run: RunDir, progress: Progress, owner: CheckpointOwner, *, resume: bool
) -> TrainingProgress:
    """Restore the newest whole checkpoint if the run is resumed; otherwise start at step 0."""
    learner, world = setup.learner, setup.learner.world
    seed_everything(setup.config.run.seed + setup.config.strategy.get_seed_offset(world))
    state = TrainingProgress()
    found = (
        checkpoint.find_newest_checkpoint(run.path / "checkpoints", on_damage=partial(_warn, run, progress))
        if resume and world.is_first
        else None
    )
    path = world.broadcast_object(found)
    if path is not None:
        state = checkpoint.restore_checkpoint(
            path, learner.model, learner.optimizer, learner.scaler, world, learner.averages
        )
        _, before = checkpoint.read_state(path)
        past = [one for one in select_evals_by_step(read_past_evals(run, world)) if one.step <= state.step]
        is_lost = before.eval_basis != owner.eval_basis and any(one.basis == before.eval_basis for one in past)
        if state.best and setup.data.evaluator is None:
            _warn(run, progress, describe_last_evaluation(state.best))
        elif (state.best or is_lost) and (
            message := describe_other_evaluation(state.best, setup.metric, before, owner)
        ):
            _warn(run, progress, message)
            state.best, state.improved, state.num_evals_without_improvement = None, None, 0
            state.runners_up = []
        if state.improved and state.improved.metric != setup.watched_metric:  # early stopping counts from here
            state.improved, state.num_evals_without_improvement = None, 0
    if resume:
        for message in run.truncate_after(state.step):
            _warn(run, progress, message)
        best = asdict(state.best) if state.best else None
        run.update_status(num_resumes=run.get_status_value("num_resumes", 0) + 1, step=state.step, best=best)
        progress.log(f"resuming at step {state.step:,} of {setup.plan.num_steps:,}")
    return state


def _warn(run: RunDir, progress: Progress, message: str) -> None:
    """Print a warning and record it for status.json and the report."""
    run.add_warning(message)
    progress.warn(message)
