"""The run: fine-tune by a recipe, and return the finished run.

In: a recipe. Out: a run directory with a trained model. `run_recipe` is the page that is the run: it connects, opens,
sets up, trains and exports; the loop is in `loop.py`, the parts of a run are built by `setup.py`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fivetune import rundir
from fivetune.config import RunConfig
from fivetune.config.recipes import refuse_missing_run
from fivetune.data.readers.tables import name_tables
from fivetune.distributed.shared_folder import refuse_separate_folders
from fivetune.distributed.world import World, refuse_shared_devices, refuse_wrong_world_size
from fivetune.errors import ConfigError, RunDirError
from fivetune.machine.telemetry.devices import get_device_peak_flops
from fivetune.machine.telemetry.meter import Meter
from fivetune.model.tokenizer import load_hub_tokenizer
from fivetune.rundir import DATA, RunDir
from fivetune.rundir.layout import PLAN
from fivetune.start.files import find_data_recipe
from fivetune.training.answers.evaluator import select_subset
from fivetune.training.answers.trained_run import TrainedRun, open_run
from fivetune.training.autotune.graphs import decide_graphs, read_graph_decision
from fivetune.training.checks.preflight import check_before_training
from fivetune.training.compute import restore_process_settings
from fivetune.training.export import describe_few_evals, export_model
from fivetune.training.loop import run_training_loop
from fivetune.training.machine import describe_machine, format_headline, record_machine
from fivetune.training.outcome import name_python_call, record_outcome, report_stop
from fivetune.training.outputs import open_outputs, open_sampler, open_sinks, record_seconds
from fivetune.training.save import complete_saves
from fivetune.training.setup import NOTHING_CHOSEN, set_up
from fivetune.training.signals import StopRequest
from fivetune.training.sinks import refuse_missing_sinks
from fivetune.training.sources import with_data_labels
from fivetune.training.state.bucket import Uploader, open_copy
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.state.restore import find_evaluated_steps, restore_newest_checkpoint, restore_plan
from fivetune.training.state.resume import describe_owner, read_choices, refuse_changes, with_saved_batch_size
from fivetune.training.state.saving import BackgroundWriter
from fivetune.training.state.snapshot import seed_everything
from fivetune.training.step.nonfinite import make_nonfinite_flag
from fivetune.training.stopping import describe_stop
from fivetune.training.tables import TableFiles, load_config_of_tables
from fivetune.training.threads import ThreadControl
from fivetune.training.training import Training

FP16_WARNING = (
    "train.precision is fp16 with transformers' modules, in which the feed-forward outputs of most T5 models pass "
    "fp16's 65,504. Flat tokens keep these sums in fp32 (train.forward); else use bf16 or fp32."
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
            to a file next to the run directory, tables/train-<hash of its content>.jsonl, which the run names.
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
        return run_recipe(config, resume=resume, overwrite=overwrite, preflight=preflight, quiet=quiet, command=command)


def run_recipe(
    config: RunConfig, *, resume: bool, overwrite: bool, preflight: bool, quiet: bool, command: str | None
) -> TrainedRun:
    """Run a complete recipe, as `train` describes it: connect, open, set up, train, export."""
    folder = Path(config.run.dir)
    world = World.from_environment()

    # Connect. What one rank can refuse alone is refused before it waits for the others.
    cuda = config.device != "cpu" and torch.cuda.is_available()
    with world.report_errors_once():
        refuse_wrong_world_size(world, config.launch.num_processes, nnodes=config.launch.nnodes)
        if cuda and world.size > 1:
            refuse_shared_devices(torch.cuda.device_count())
        refuse_missing_sinks(config.report.sinks if world.is_first else ())
        config = with_data_labels(config)
    with (
        restore_process_settings(),
        StopRequest(silent=not world.is_first, can_resume=resume) as stop,
        world.connect(cuda=cuda, timeout_minutes=config.launch.timeout_minutes) as world,
        world.report_errors_once(),
        report_stop(stop, folder),
    ):
        # Open. A copy in a bucket may bring the run to this machine; without one the folder must be here.
        if resume and not config.checkpoint.url and not world.broadcast_object(folder.is_dir()):
            raise RunDirError(f"{folder}: there is no run to resume. Leave --resume out to start it.")
        url, notes = open_copy(config.checkpoint.url, folder, world, resume=resume)
        # A run that was killed before it wrote a whole file has no state to resume from: it starts at step 0.
        resume = stop.can_resume = resume and world.broadcast_object(rundir.find_conflict(folder) is not None)
        with open_outputs(config, world, stop, notes, resume=resume, overwrite=overwrite, quiet=quiet) as outputs:
            run = outputs.run
            progress = outputs.progress
            refuse_separate_folders(folder, world, nnodes=config.launch.nnodes)
            if resume:
                config = with_saved_batch_size(folder, config)
                refuse_changes(folder, config)
            # From here on status.json says how the run ends, and a log how the machine does.
            with (
                config.strategy.suppress_warnings(),
                record_outcome(run, progress, stop, world),
                open_sampler(config, outputs, world) as sampler,
            ):
                # Set up. A resumed run keeps what it measured when it began: other choices round differently.
                started = time.perf_counter()
                if not resume:
                    _write_initial_status(config, run)
                progress.start()
                chosen = read_choices(run.path) if resume else NOTHING_CHOSEN
                setup = set_up(config, on_progress=progress.update, chosen=chosen, world=world)
                plan = setup.plan
                compute = setup.learner.compute
                owner = describe_owner(run.path, setup)  # by which a later resume knows the run's checkpoints
                if setup.fit:  # config.yaml has the size that was found, so that a resume does not search again
                    found = config.replace("train", batch_size=setup.fit.batch_size)
                    run.write_config(found.as_redacted_yaml())
                    progress.log(str(setup.fit))
                for message in (*setup.warnings, *describe_few_evals(config.checkpoint.average_best, plan)):
                    outputs.warn(message)
                if resume:
                    plan = restore_plan(setup, outputs, owner)
                    _write_initial_status(config, run)  # not before: what restore_plan refuses stays as it was
                if compute.precision == "fp16" and setup.learner.forward.kind != "flat":
                    outputs.warn(FP16_WARNING)
                run.write(DATA, {name: store.summary for name, store in setup.data.stores})
                run.write(PLAN, plan.as_dict())
                if preflight and not resume:
                    plan = check_before_training(setup, progress, run)
                    run.write(PLAN, plan.as_dict())
                before = read_graph_decision(run.path) if resume else None
                learner, decision = decide_graphs(setup, resumed_decision=before)
                setup = replace(setup, learner=learner)
                if decision:
                    progress.log(f"steps are {decision}")
                # From here on the random numbers are the training's: all that tried something has drawn its own.
                seed_everything(config.run.seed + config.strategy.get_seed_offset(learner.world))
                state = restore_newest_checkpoint(setup, outputs, owner) if resume else TrainingState()
                machine = {"run_id": owner.run_id, **describe_machine(setup, command)}
                if decision:
                    machine["capture"] = asdict(decision)
                record_machine(outputs, machine, step=state.step, resume=resume)
                seconds = state.seconds.get("prepare", 0.0)  # of earlier parts of the run
                state.seconds["prepare"] = seconds + time.perf_counter() - started

                # Train. The trackers and the uploads end with the run, whatever ends it.
                keep = config.checkpoint.keep
                subset = None
                if evaluator := setup.data.evaluator:
                    subset = select_subset(evaluator.store, config.eval.max_examples)
                threads = None
                if compute.kind == "cpu":
                    threads = ThreadControl.from_setting(config.train.num_threads)
                training = Training(
                    setup=setup,
                    plan=plan,
                    run=run,
                    progress=progress,
                    state=state,
                    stop=stop,
                    meter=Meter.from_device(compute.device),
                    sampler=sampler,
                    nonfinite_flag=make_nonfinite_flag(learner),
                    peak_flops=get_device_peak_flops(compute.device, compute.precision),
                    subset=subset,
                    threads=threads,
                    evaluated_steps=find_evaluated_steps(run, world, state, owner.eval_basis),
                    owner=owner,
                    writer=BackgroundWriter(world, is_parallel=config.checkpoint.background),
                    uploader=Uploader(url, run.path, keep=keep, start_step=state.step, world=learner.world),
                )
                progress.log(format_headline(setup, state.step))
                with (
                    record_seconds(run, state),
                    training.uploader,
                    open_sinks(setup.config, run, world, first_step=state.step + 1) as training.sinks,
                ):
                    run.update_status(state="running", begun=True)
                    stop.can_resume = True
                    sampler.start()
                    with complete_saves(training):
                        run_training_loop(training)
                    why = describe_stop(state, config.train.early_stopping, training.plan.num_steps)
                    if why:
                        progress.log(why)

                    # Export. What fails once the model is written is named in status.json, and ends no run.
                    with setup.learner.swap_in_averages():
                        missing = export_model(training)
                    with training.measure("checkpoint"):
                        if failure := training.uploader.upload_results(training.warn):
                            missing.append(failure)

                # The end. A run that is finished has checksums of its records, status.json among them: they come last.
                run.update_status(
                    state="finished",
                    why=why,
                    step=state.step,
                    seconds_by_phase=state.seconds,
                    incomplete=" ".join(missing) or None,
                    num_starved_steps=setup.data.stream.num_starved,
                    seconds=sum(state.seconds.values()),
                    best=state.best,
                )
                training.uploader.upload_status(training.warn)
                world.barrier()
            run.write_checksums(progress.warn)
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


def _write_initial_status(config: RunConfig, run: RunDir) -> None:
    run.write_config(config.as_redacted_yaml())
    run.update_status(
        state="preparing",
        why="",
        seconds=None,
        started=run.status.started or time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
