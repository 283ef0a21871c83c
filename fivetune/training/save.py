"""Checkpoints of a run in progress: written at once or in the background, linked, copied, tidied up.

In: a Training. Out: checkpoints/<step>/, the link `best`, the step in status.json.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from fivetune.errors import InterruptedRunError, NumericError, RunDirError
from fivetune.training.state import checkpoint
from fivetune.training.state.snapshot import ShardedSnapshot, take_shards, take_snapshot
from fivetune.training.step_records import write_steps
from fivetune.training.training import Training


def save_checkpoint(training: Training) -> None:
    """Write a checkpoint, point `best` at the best one, remove old ones.

    With checkpoint.background only the copy of the state is made now; `finish_save` does the rest.
    """
    finish_save(training)
    with training.setup.learner.swap_in_averages() as trained:
        _start_save(training, trained)
    if not training.writer.is_parallel:
        finish_save(training)


def _start_save(training: Training, trained: Mapping[str, Tensor]) -> None:
    """Write a checkpoint, or begin to write a copy of the state.

    Args:
        trained: the trained weights by name, if the model holds their averages.
    """
    setup = training.setup
    learner = training.setup.learner
    write_steps(training, wait=True)  # a checkpoint knows all steps before it; one that is not finite refuses it
    learner.fetch()  # of an engine whose weights are elsewhere, such as on TPU chips
    sharded = setup.config.strategy.sharded and learner.world.size > 1
    take = take_shards if sharded else take_snapshot
    taken = take(learner.model, learner.optimizer, learner.scaler, learner.world, trained)
    # Whole tensors of an accelerator were copied to the host already; others change with the next step.
    is_copied = not sharded and learner.compute.device != "cpu"
    if training.writer.is_parallel and not is_copied:
        taken = taken.copy()
    # A run directory that was moved away would be made anew, with this checkpoint alone.
    learner.world.run_on_all(training.run.refuse_moved)

    folder = training.run.path / "checkpoints"
    # Copies: the run goes on while the writer reads them.
    owner = replace(training.owner, batch_size=training.plan.batch_size)
    position = replace(training.state, seconds=dict(training.state.seconds))

    def write() -> None:
        if isinstance(taken, ShardedSnapshot):
            checkpoint.write_shards(folder, taken, position, owner, training.writer.world)
        elif learner.world.is_first:
            checkpoint.write_checkpoint(folder, taken, position, owner)

    # Once more: a disk that fails for a moment should not end the run.
    def write_or_retry() -> None:
        try:
            write()
        except RunDirError as error:
            time.sleep(1)
            training.progress.warn(f"{error} Retrying once.")
            write()
        training.uploader.submit(position)

    training.saving = position
    training.writer.start(write_or_retry)


def finish_save(training: Training) -> None:
    """Wait for the checkpoint that is being written, if there is one; then update `best`, and remove old ones.

    Raises RunDirError if it could not be written.
    """
    # Forgotten before it can fail: a second call would tidy up after a checkpoint that is not there.
    saved = training.saving
    training.saving = None
    training.writer.finish()
    for message in training.uploader.take_notes():
        training.warn(message)
    if saved is None or not training.setup.learner.world.is_first:
        return
    setup = training.setup
    folder = training.run.path / "checkpoints"
    best_step = saved.best.step if saved.best else None
    if best_step is not None and (folder / str(best_step)).is_dir():
        try:
            checkpoint.update_best_link(training.run.path, best_step)
        except RunDirError as error:  # the link is for people; a resume does not need it
            training.warn(str(error))
    # Not removed: the best ones, and those whose upload is under way.
    held = {*saved.kept_steps, *training.uploader.get_held_steps()}
    checkpoint.remove_old_checkpoints(folder, keep=setup.config.checkpoint.keep, held=held, on_failure=training.warn)
    training.run.update_status(
        step=saved.step, seconds_by_phase=saved.seconds, num_starved_steps=setup.data.stream.num_starved
    )


@contextmanager
def complete_saves(training: Training) -> Iterator[None]:
    """After the block, wait until its checkpoints are written and copied to checkpoint.url.

    An error of the block does not lose the checkpoint that is being written; that it failed is a warning then.
    """
    try:
        try:
            yield
        finally:
            if failure := training.writer.take_error():
                training.warn(str(failure))
    except (InterruptedRunError, NumericError, RunDirError):
        # All ranks raise these, so that all are there to wait together. After another error a rank may be alone.
        training.uploader.finish(training.progress.log, training.warn)
        raise
    training.uploader.finish(training.progress.log, training.warn)
