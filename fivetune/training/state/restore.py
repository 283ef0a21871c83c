"""Brings back what a resumed run has reached: its numbers, its position, the evaluations that it need not repeat.

In: a Setup, and the run directory. Out: a Plan, a TrainingState, with the model and optimizer of the checkpoint.
"""

from __future__ import annotations

from fivetune.distributed.world import World
from fivetune.rundir import RunDir
from fivetune.rundir.figures import select_evals_by_step
from fivetune.rundir.layout import PLAN
from fivetune.rundir.plan import Plan
from fivetune.rundir.reader import read_plan
from fivetune.training.outputs import RunOutputs
from fivetune.training.setup import Setup
from fivetune.training.state import checkpoint
from fivetune.training.state.checkpoint import CheckpointOwner, TrainingState
from fivetune.training.state.past_evals import read_past_evals
from fivetune.training.state.resume import (
    describe_last_evaluation,
    describe_lost_files,
    describe_other_evaluation,
    describe_schedule_change,
    list_saved_steps,
    read_batch_size,
    refuse_fewer_steps,
    refuse_foreign_checkpoints,
)


def restore_plan(setup: Setup, outputs: RunOutputs, owner: CheckpointOwner) -> Plan:
    """The plan of a resumed run: the setup's, with the micro-batch of the newest checkpoint or of plan.json.

    Raises RunDirError for other training data, ConfigError for fewer steps than the run has done.
    """
    run = outputs.run
    log = outputs.progress.log
    world = setup.learner.world
    refuse_foreign_checkpoints(run.path, owner)
    saved = list_saved_steps(run.path / "checkpoints")  # status.json may be lost, or older
    refuse_fewer_steps(run.path, max([run.status.step, *saved]), setup.plan.num_steps)
    for message in world.broadcast_object(describe_lost_files(run.path, set_aside=run.set_aside)):
        outputs.warn(message)
    before = world.broadcast_object(read_plan(run.path))
    batch_size = world.broadcast_object(read_batch_size(run.path))
    if before is None:
        return setup.plan.with_batch_size(batch_size) if batch_size else setup.plan
    # The checkpoint counts: plan.json was edited, or the size was halved after the checkpoint and will be halved again.
    batch_size = batch_size or before.batch_size
    if batch_size != before.batch_size:
        log(f"batch_size is {batch_size}, as at the checkpoint ({PLAN} has {before.batch_size})")
    if before.num_steps != setup.plan.num_steps:
        log(f"the number of steps changes from {before.num_steps:,} to {setup.plan.num_steps:,}")
    if setup.plan.lr is not None:
        for message in describe_schedule_change(setup.config.schedule, before.num_steps, setup.plan.num_steps):
            outputs.warn(message)
    return setup.plan.with_batch_size(batch_size)


def restore_newest_checkpoint(setup: Setup, outputs: RunOutputs, owner: CheckpointOwner) -> TrainingState:
    """Restore the newest whole checkpoint; without one the run starts at step 0. Later records are removed."""
    run = outputs.run
    learner = setup.learner
    world = setup.learner.world
    found = None
    if world.is_first:
        found = checkpoint.find_newest_checkpoint(run.path / "checkpoints", on_damage=outputs.warn)
    path = world.broadcast_object(found)
    state = TrainingState()
    if path is not None:
        state = checkpoint.restore_checkpoint(
            path, learner.model, learner.optimizer, learner.scaler, world, learner.averages
        )
        _, before = checkpoint.read_state(path)
        _forget_other_scores(setup, outputs, state, before, owner)
    # Steps after the checkpoint are repeated: their lines would stand twice.
    for message in run.truncate_after(state.step):
        outputs.warn(message)
    run.update_status(
        num_resumes=run.status.num_resumes + 1,
        step=state.step,
        best=state.best,
    )
    outputs.progress.log(f"resuming at step {state.step:,} of {setup.plan.num_steps:,}")
    return state


def _forget_other_scores(
    setup: Setup, outputs: RunOutputs, state: TrainingState, before: CheckpointOwner, owner: CheckpointOwner
) -> None:
    """Forget the best scores so far if later ones cannot be compared with them: of other data, settings or metric.

    Args:
        before, owner: the owner that the checkpoint records, and the resumed run's.
    """
    # Without a best evaluation there may be scores all the same: of the untrained model, or before a change of data.
    past = select_evals_by_step(read_past_evals(outputs.run, setup.learner.world))
    bases = {one.basis for one in past if one.step <= state.step}
    is_lost = before.eval_basis != owner.eval_basis and before.eval_basis in bases
    if state.best and setup.data.evaluator is None:
        outputs.warn(describe_last_evaluation(state.best))
    elif state.best or is_lost:
        message = describe_other_evaluation(state.best, setup.metric, before, owner)
        if message:
            outputs.warn(message)
            state.best = None
            state.improved = None
            state.num_evals_without_improvement = 0
            state.runners_up = []
    # With another watched score early stopping counts from here.
    if state.improved and state.improved.metric != setup.watched_metric:
        state.improved = None
        state.num_evals_without_improvement = 0


def find_evaluated_steps(run: RunDir, world: World, state: TrainingState, basis: str) -> set[int]:
    """Find the steps whose evaluation is not repeated: none after step 0 if no score counts as the best so far.

    Args:
        basis: identifies the evaluation data and settings; the steps of another basis are evaluated again.
    """
    past = select_evals_by_step(read_past_evals(run, world))
    own = [record.step for record in past if record.basis == basis]
    return {step for step in own if state.best or step == 0}
