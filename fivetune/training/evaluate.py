"""Evaluations of a run in progress: at a step, and of the exported weights.

In: a Training. Out: a line of evals.jsonl and a predictions file; the best score so far and the
count of early stopping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from fivetune.errors import ConfigError, translate_oom_errors
from fivetune.rundir import EVALS
from fivetune.rundir.figures import build_best_eval, is_better_eval
from fivetune.rundir.layout import OWN_SPLITS
from fivetune.rundir.records import BestEval, EvalRecord, Prediction
from fivetune.scores.metrics import is_maximized
from fivetune.training.state.past_evals import log_whole_evaluation
from fivetune.training.step_records import write_steps
from fivetune.training.stopping import count_evaluation, rank_evaluation
from fivetune.training.threads import watch_threads
from fivetune.training.training import Training


class EvaluationStoppedError(Exception):
    """Raised when a signal interrupts an evaluation; it is repeated on resume."""


def evaluate_model(training: Training) -> None:
    """Evaluate at the current step, on the subset of eval.max_examples; before the first step as eval.final says.

    Raises EvaluationStoppedError after a signal.
    """
    setup = training.setup
    state = training.state
    write_steps(training, wait=True)  # so that the lines of steps stand before the line of the evaluation
    limited = state.step > 0 or setup.config.eval.final == "subset"
    questions = training.subset if limited else None
    with setup.learner.swap_in_averages():
        record = run_evaluation(training, step=state.step, questions=questions)
    training.evaluated_steps.add(state.step)

    # The untrained model is neither a candidate for the best checkpoint, nor does early stopping count from it.
    if state.step > 0:
        rank_evaluation(
            state,
            build_best_eval(record, setup.metric),
            num_kept=setup.config.checkpoint.average_best or 1,
            higher_is_better=is_maximized(setup.config.task.metrics, setup.metric),
        )
        rule = setup.config.train.early_stopping
        watched = setup.watched_metric
        count_evaluation(
            state,
            record,
            metric=watched,
            min_delta=rule.min_delta if rule else 0.0,
            higher_is_better=watched != "loss" and is_maximized(setup.config.task.metrics, watched),
        )
    training.run.update_status(step=state.step, best=state.best)

    # Two evaluations of trained weights never agree in every digit, unless the steps between them changed nothing.
    last = training.evals[-1] if training.evals else None
    if last and record.loss is not None and record.loss == last.loss and record.split == last.split:
        training.warn(
            f"evaluation loss is exactly the same ({record.loss:.4g}) at steps {last.step} and {state.step}: "
            "the weights do not move. Check optimizer.lr and train.precision.",
            "frozen_loss",
        )
    training.evals.append(record)


def run_evaluation(
    training: Training, *, step: int, questions: Sequence[int] | None = None, split: str = "eval"
) -> EvalRecord:
    """Evaluate the model, recorded under `step` as `split`, or as "subset" if only some questions are asked."""
    setup = training.setup
    evaluator = training.setup.data.evaluator
    world = training.setup.learner.world
    assert evaluator is not None
    if questions is not None:
        split = "subset"
    else:
        usual = setup.config.eval.max_examples
        log = training.progress.log
        log_whole_evaluation(evaluator.num_questions, training.run, world, usual_limit=usual, log=log)

    report = watch_threads(training.threads, training.progress.update, training.report_threads)

    # In the loop a signal waits for the end of a step, but not for the end of an evaluation, which may take long.
    def count(done: int, total: int) -> None:
        report("evaluating", done, total)
        if training.stop.is_deferring and training.stop.signum:
            raise EvaluationStoppedError

    def write(made: Iterable[Prediction]) -> None:
        training.run.write_predictions(split, step, (one.as_dict() for one in made))

    with translate_oom_errors():
        record = replace(evaluator, on_note=training.warn).run(
            setup.learner.model,
            step=step,
            split=split,
            questions=questions,
            write=write,
            on_progress=count,
            world=world,
        )
    record = replace(record, run_step=training.state.step, basis=training.owner.eval_basis)
    if setup.metric not in record.scores:
        known = ", ".join(record.scores)
        raise ConfigError(f"eval.metric: the evaluation has no score {setup.metric!r}. It has: {known}.")

    def publish() -> None:
        training.run.append(EVALS, record.as_dict())
        training.progress.show_evaluation(record, metric=setup.metric, best=_find_best(training, record))
        if split in OWN_SPLITS:
            for sink in training.sinks:
                sink.evaluation(record)

    world.run_on_all(publish)  # a full disk or a sink fails on rank 0 alone, and the others go on
    return record


def _find_best(training: Training, record: EvalRecord) -> BestEval | None:
    """Find the best evaluation so far, this one included; None before the first step."""
    best = training.state.best
    if record.step == 0 or record.split not in OWN_SPLITS:
        return best
    setup = training.setup
    found = build_best_eval(record, setup.metric)
    higher = is_maximized(setup.config.task.metrics, setup.metric)
    return found if best is None or is_better_eval(found, best, higher_is_better=higher) else best
