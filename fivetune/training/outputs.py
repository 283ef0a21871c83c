"""What a run writes to while it runs: its directory, its progress display, its telemetry, its trackers.

In: a RunConfig and the ranks. Out: each as a context, closed at its end; the directory of a run that was refused before
it began is removed, so that the corrected command can use the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune import plugins
from fivetune.config import RunConfig
from fivetune.distributed.world import World
from fivetune.errors import RunDirError
from fivetune.machine.telemetry.sampler import Sampler
from fivetune.rundir import LOG, TELEMETRY, TELEMETRY_OF_RANK, NullRunDir, RunDir
from fivetune.rundir.activity import ActivityFile
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import RunStatus
from fivetune.training.signals import StopRequest
from fivetune.training.state import checkpoint
from fivetune.training.state.checkpoint import TrainingState


@dataclass(frozen=True, slots=True)
class RunOutputs:
    """The run directory and the progress display; on ranks above 0 neither writes nor prints."""

    run: RunDir
    progress: Progress

    def warn(self, message: str) -> None:
        """Print a warning, also one that an earlier part of the run gave; record it for status.json and the report."""
        self.run.add_warning(message)
        self.progress.warn(message)


@contextmanager
def open_outputs(
    config: RunConfig,
    world: World,
    stop: StopRequest,
    notes: Sequence[str],
    *,
    resume: bool,
    overwrite: bool,
    quiet: bool,
) -> Iterator[RunOutputs]:
    """Open the run directory and the progress display.

    Args:
        stop: says whether the run can be resumed; a new one is discarded after an error until then.
        notes: warnings to begin with.
    """
    folder = Path(config.run.dir)
    # The other ranks wait for the status, which rank 0 sends once the run directory is open.
    if not world.is_first:
        outputs = RunOutputs(NullRunDir(folder, world.broadcast_object(RunStatus())), Progress(silent=True))
    else:
        run = RunDir.resume(folder) if resume else RunDir.create(folder, overwrite=overwrite)
        try:
            checkpoint.restore_replaced_checkpoints(folder / "checkpoints")
            world.broadcast_object(run.status)
            progress = Progress(
                folder / LOG,
                log_every_steps=config.train.log_every_steps,
                quiet=quiet,
                activity=ActivityFile(folder),
            )
        except BaseException:
            # Nothing has used the run yet: a new one leaves no folder behind.
            if resume:
                run.close()
            else:
                run.discard()
            raise
        outputs = RunOutputs(run, progress)
    try:
        for message in outputs.run.damage:
            outputs.progress.warn(message)
        if world.is_first:
            for message in notes:
                outputs.warn(message)
        yield outputs
    except BaseException:
        if not stop.can_resume:
            outputs.run.discard()
        raise
    finally:
        outputs.progress.close()
        outputs.run.close()


@contextmanager
def open_sampler(config: RunConfig, outputs: RunOutputs, world: World) -> Iterator[Sampler]:
    """Open the telemetry sampler of this rank; local rank 0 samples the devices of its machine too.

    Only rank 0's has started: the others write to the run directory once nothing can refuse the run, because rank 0
    removes the directory of a refused run.
    """
    name = TELEMETRY if world.is_first else TELEMETRY_OF_RANK.format(rank=world.rank)
    sampler = Sampler(
        outputs.run.path / name,
        every_seconds=config.telemetry.every_seconds,
        rank=world.rank,
        devices=world.local_rank == 0,
        warn=outputs.progress.warn,
    )
    sampler.phase = "prepare"
    if world.is_first:
        sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


@contextmanager
def open_sinks(config: RunConfig, run: RunDir, world: World, *, first_step: int) -> Iterator[list[Any]]:
    """Open the trackers of report.sinks on rank 0, and close them in any case; other ranks have none."""
    sinks: list[Any] = []
    try:
        if world.is_first:
            for name in config.report.sinks:
                sink = plugins.load_plugin("sinks", name)()
                sinks.append(sink.open(run.path, config.as_redacted_dict(), first_step=first_step))
        yield sinks
    finally:
        for sink in sinks:
            sink.close()


@contextmanager
def record_seconds(run: RunDir, state: TrainingState) -> Iterator[None]:
    """Record in status.json how long a run took that an error ends in this block."""
    try:
        yield
    except BaseException:
        with suppress(RunDirError):  # the error that ends the run is told, not that its times are unknown
            run.update_status(seconds_by_phase=state.seconds, seconds=sum(state.seconds.values()))
        raise
