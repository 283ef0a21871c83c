"""The end of a run: model/ with the weights of the best evaluation, or with the mean of the best ones.

In: a run whose steps are done. Out: the model folder, and an evaluation of its weights on all examples. Averages of
checkpoints: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima"; the last ones: Vaswani et al. 2017.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fivetune import rundir
from fivetune.distributed.sharding import get_local, release_gathered
from fivetune.distributed.world import ProcessGroupError
from fivetune.errors import InterruptedRunError, describe_failure
from fivetune.model.adapter import select_own_weights
from fivetune.reading.card.card import CardRequest, Place, build_model_card
from fivetune.rundir.confidence_file import write_confidence_file
from fivetune.rundir.figures import build_best_eval, find_chosen_eval, find_own_eval, is_better_eval
from fivetune.rundir.layout import AVERAGE, CARD
from fivetune.rundir.plan import Plan
from fivetune.rundir.records import BestEval
from fivetune.scores.analysis.calibration import FittedTemperature, calibrate_lines, choose_scored_name, restore_lines
from fivetune.scores.metrics import is_maximized
from fivetune.training.answers.decoding import build_decoding
from fivetune.training.answers.promise import record_errors
from fivetune.training.evaluate import run_evaluation
from fivetune.training.state import checkpoint
from fivetune.training.state.past_evals import read_past_evals
from fivetune.training.training import Training


def export_model(training: Training) -> list[str]:
    """Write model/ with the best weights, or with the last ones if the run has no evaluation; then what describes it.

    If the best evaluation was of a subset, its weights are evaluated on all examples, unless eval.final is subset. With
    checkpoint.average_best the mean of the best checkpoints is evaluated too, and exported if it is better.
    Returns: a sentence for each result that is missing: a damaged checkpoint of the best weights, or what failed once
    model/ was written.
    """
    missing: list[str] = []
    best = training.state.best
    # The model holds the last weights: the best ones are read from their checkpoint.
    with training.measure("checkpoint"):
        if best and best.step != training.state.step:
            path = training.run.path / "checkpoints" / str(best.step)
            if reason := _find_damage(training, path):
                missing.append(f"{path}: {reason}. It was the best checkpoint; model/ holds the last weights instead.")
                training.warn(missing[0])
                training.state.best = None
            else:
                checkpoint.load_weights(path, training.setup.learner.model)
    # Everything below can fail by a text of the data, a plugin or the disk: hours of training end in a model first.
    _save_model(training)

    # Then what the weights are worth: scores on all data, the mean of the best ones, calibrated confidences, a card.
    with _record_failure(training, "the evaluation on all examples", missing):
        _evaluate_whole(training, "eval")
    with _record_failure(training, "the mean of the best checkpoints (checkpoint.average_best)", missing):
        if mean := average_best(training):
            _save_model(training)
            training.state.best = mean  # not before: if the disk is full, model/ holds the single best one
    with _record_failure(training, "the calibration of the confidence", missing):
        if training.setup.learner.world.is_first:
            found = calibrate_confidence(training.run.path, training.state.best, training.setup.metric)
            if found and found.helps:
                training.progress.write_log(
                    f"confidence: temperature {found.temperature:.2f}, fitted on {found.num:,} predictions, changes "
                    f"the calibration error from {found.error_before:.1%} to {found.error_after:.1%} on halves that "
                    "it was not fitted on"
                )
    with _record_failure(training, "the model card", missing), training.measure("checkpoint"):
        if training.setup.learner.world.is_first:
            rundir.write_text(training.run.path / "model" / CARD, _build_card(training))
    return missing


def _save_model(training: Training) -> None:
    """Write model/ with the weights that the model holds."""
    setup = training.setup
    run = training.run
    target_p99 = setup.data.stream.store.summary["target_p99"]
    decoding = build_decoding(setup.config, setup.loaded.tokenizer, target_p99=target_p99)
    with training.measure("checkpoint"):
        if setup.learner.world.is_first:
            run.refuse_moved()
        setup.learner.save_model(
            setup.loaded.tokenizer,
            run.path / "model",
            generation=decoding.as_generation_config(),
            run_id=training.owner.run_id,
        )


def calibrate_confidence(folder: Path, best: BestEval | None, metric: str) -> FittedTemperature | None:
    """Write the temperature of the confidences into model/ of a run, if it lowers their error, and the errors by
    confidence, from which a promised share of errors is kept.

    It is fitted on the predictions of the exported weights on the evaluation data, by whether they are wholly right,
    and judged on halves that it was not fitted on (`FittedTemperature.helps`).

    Args:
        best: the evaluation of the exported weights. metric: name of the score of a right answer, if each prediction
            has it.

    Returns: what was fitted; None without enough right and wrong predictions.
    """
    run = rundir.read_run(folder)
    record = find_chosen_eval(run.evals, best) if best else None
    if record is None:
        return None
    # The model's own confidences: the record's may have a temperature already.
    lines = restore_lines(run.read_predictions(record), record.temperature)
    record_errors(folder, lines, metric, record)
    key = choose_scored_name(lines, metric)
    if not key:
        return None
    found = calibrate_lines(lines, key)
    if found and found.helps:
        write_confidence_file(folder / "model", found._asdict())
    return found


@contextmanager
def _record_failure(training: Training, what: str, missing: list[str]) -> Iterator[None]:
    """Add a sentence on an error of the block to `missing`: the block makes a result that the model does not need.

    The block raises on all ranks or on none, so that they stay together. What ends a run passes: a signal, a lost rank.
    """
    try:
        yield
    except (InterruptedRunError, ProcessGroupError):
        raise
    except Exception as error:
        missing.append(f"{what} failed: {describe_failure(error)} The model is saved in {training.run.path}/model.")
        training.warn(missing[-1])
        training.progress.write_log("".join(traceback.format_exception(error)))


def _build_card(training: Training) -> str:
    """Build the model card from what the run has recorded until now."""
    setup = training.setup
    best = training.state.best
    request = CardRequest(
        folder=training.run.path,
        place=Place(setup.config.run.dir),
        model_type=setup.learner.model.config.model_type,
    )
    run = rundir.read_run(training.run.path)
    record = find_chosen_eval(run.evals, best) if best else None
    return build_model_card(setup.config, run, record, best, request)


def _find_damage(training: Training, path: Path) -> str | None:
    """Describe damage of a checkpoint's weights; all ranks get the same answer."""
    world = training.setup.learner.world
    # Rank 0 reads the large files for all, and all ranks go the same way.
    found = checkpoint.find_weights_damage(path) if world.is_first else None
    return world.broadcast_object(found)


def _evaluate_whole(training: Training, split: str) -> None:
    """Evaluate the model on all examples as the best step's, unless that is done already."""
    best = training.state.best
    basis = training.owner.eval_basis
    if best is None or training.setup.data.evaluator is None or training.setup.config.eval.final == "subset":
        return
    # An average is always evaluated: an earlier export may have averaged other checkpoints.
    if split != AVERAGE:
        past = read_past_evals(training.run, training.setup.learner.world)
        if (best.step, split, basis) in {(one.step, one.split, one.basis) for one in past}:
            return
    with training.measure("evaluate"):
        run_evaluation(training, step=best.step, split=split)


def average_best(training: Training) -> BestEval | None:
    """Put the mean of the best checkpoints into the model, which holds the best one, and evaluate it.

    Returns: its evaluation; None if it is not better, without checkpoint.average_best and without evaluations.
    """
    state = training.state
    model = training.setup.learner.model
    folder = training.run.path / "checkpoints"
    num_wanted = training.setup.config.checkpoint.average_best
    if num_wanted is None or state.best is None or training.setup.data.evaluator is None:
        return None
    ranked = [state.best, *state.runners_up][:num_wanted]
    damaged = {one.step: _find_damage(training, folder / str(one.step)) for one in ranked}
    steps = sorted(step for step, reason in damaged.items() if reason is None)
    if len(steps) < num_wanted:
        training.warn(_describe_missing(num_wanted, steps, damaged))
    if len(steps) < 2:
        return None
    with training.measure("checkpoint"):
        paths = [folder / str(step) for step in steps]
        training.setup.learner.world.run_on_all(lambda: load_mean_weights(paths, model))
    # Both on all examples: the mean, and the best checkpoint alone, which was evaluated before.
    _evaluate_whole(training, AVERAGE)
    past = read_past_evals(training.run, training.setup.learner.world)
    single = find_own_eval(past, state.best.step)
    mean = find_chosen_eval(past, replace(state.best, averaged=tuple(steps)))
    assert single and mean
    metric = training.setup.metric
    tasks = training.setup.config.task.metrics
    found = build_best_eval(mean, metric)
    before = build_best_eval(single, metric)
    is_better = is_better_eval(found, before, higher_is_better=is_maximized(tasks, metric))
    listed = ", ".join(f"{step:,}" for step in steps)
    chosen = "the mean" if is_better else "the latter"
    training.progress.log(
        f"the mean of the checkpoints of steps {listed} has {metric} {found.score:.2f}, that of step {before.step:,} "
        f"alone {before.score:.2f}: model/ gets {chosen} (checkpoint.average_best)"
    )
    return replace(found, averaged=tuple(steps)) if is_better else None


def _describe_missing(num_wanted: int, steps: Sequence[int], damaged: Mapping[int, str | None]) -> str:
    found = "1 evaluated checkpoint" if len(steps) == 1 else f"{len(steps)} evaluated checkpoints"
    places: list[str] = []
    for step, reason in sorted(damaged.items()):
        places.append(f"step {step:,}: {reason}" if reason else f"step {step:,}")
    result = "their mean is taken" if len(steps) > 1 else "nothing is averaged"
    return (
        f"checkpoint.average_best {num_wanted}: no more than {found} found ({'; '.join(places)}), and {result}. "
        "Lower it, or eval.every_steps."
    )


@torch.no_grad()
def load_mean_weights(paths: Sequence[Path], model: nn.Module) -> None:
    """Load the mean of the weights of checkpoints, summed in fp64 on the host, sharded as the model is."""
    sums: dict[str, Tensor] = {}
    for path in paths:
        checkpoint.load_weights(path, model)
        for name, weight in select_own_weights(model):
            # fp64: the mean of fp32 weights is rounded once.
            own = get_local(weight).cpu().double()
            sums[name] = sums[name].add_(own) if name in sums else own
    for name, weight in select_own_weights(model):
        get_local(weight).copy_((sums[name] / len(paths)).to(weight.dtype))
    release_gathered(model)


def describe_few_evals(num_wanted: int | None, plan: Plan) -> list[str]:
    """Describe that a run of this plan has fewer evaluations than checkpoint.average_best; [] if it has enough.

    >>> describe_few_evals(3, Plan(batch_size=4, num_steps=25, eval_every_steps=10, checkpoint_every_steps=10))
    []
    """
    found = math.ceil(plan.num_steps / plan.eval_every_steps)
    if num_wanted is None or found >= num_wanted:
        return []
    return [
        f"checkpoint.average_best {num_wanted}: the run evaluates {found} times in {plan.num_steps:,} steps, so that "
        "fewer checkpoints are averaged. Lower it, or eval.every_steps."
    ]
