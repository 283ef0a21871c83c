"""The end of a run: model/ with the weights of the best evaluation.

In: a run whose steps are done. Out: the model folder, and an evaluation of its weights on all examples.
"""

from __future__ import annotations

from fivetune import rundir
from fivetune.distributed.world import World
from fivetune.rundir import RunDir
from fivetune.rundir.figures import find_own_eval
from fivetune.rundir.records import EvalRecord
from fivetune.training import checkpoint
from fivetune.training.card import build_model_card
from fivetune.training.loop import Training, measure_phase, run_evaluation, warn_once
from fivetune.training.setup import build_decoding


def read_past_evals(run: RunDir, world: World) -> list[EvalRecord]:
    """The evaluations that rank 0 has written, on every rank; `truncate_after` names the damage of a resumed run."""
    found = rundir.read_evals(run.path, on_damage=lambda text: None) if world.is_first else []
    return world.broadcast_object(found)


def export_model(training: Training) -> str | None:
    """Write model/ with the best weights, or with the last ones if the run has no evaluation.

    If the best evaluation was of a subset, its weights are evaluated on all examples.
    Returns: None, or a sentence if the checkpoint of the best weights is damaged.
    """
    setup, learner, state, run = training.setup, training.setup.learner, training.state, training.run
    world = learner.world
    incomplete = None
    with measure_phase(training, "checkpoint"):
        if state.best and state.best.step != state.step:
            path = run.path / "checkpoints" / str(state.best.step)
            if reason := world.broadcast_object(checkpoint.find_weights_damage(path) if world.is_first else None):
                incomplete = f"{path}: {reason}. It was the best checkpoint; model/ holds the last weights instead."
                warn_once(training, incomplete)
                state.best = None
            else:
                checkpoint.load_weights(path, learner.model)
    scored = {(e.step, e.split, e.basis) for e in read_past_evals(run, world)}
    whole = (state.best.step, "eval", training.owner.eval_basis) if state.best else None
    if whole and setup.data.evaluator and whole not in scored:
        with measure_phase(training, "evaluate"):
            run_evaluation(training, step=whole[0])
    with measure_phase(training, "checkpoint"):
        if world.is_first:
            run.refuse_moved()
        best = find_own_eval(rundir.read_evals(run.path), state.best.step) if state.best else None
        name, model_type = run.path.resolve().name, learner.model.config.model_type
        target_p99 = setup.data.stream.store.summary["target_p99"]
        learner.save_model(
            setup.loaded.tokenizer,
            run.path / "model",
            generation=build_decoding(
                setup.config, setup.loaded.tokenizer, target_p99=target_p99
            ).as_generation_config(),
            card=build_model_card(setup.config, best, name=name, model_type=model_type),
            run_id=training.owner.run_id,
        )
    return incomplete
