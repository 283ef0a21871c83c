"""One evaluation of a trained run, recorded in its directory.

In: the model of a run, loaded with a config that names the data. Out: an EvalRecord; the run directory has it too, and
the predictions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from fivetune import rundir
from fivetune.config import RunConfig, load_config
from fivetune.errors import translate_oom_errors
from fivetune.rundir.progress import ProgressCallback
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.training.answers.learnt import refuse_learnt_data
from fivetune.training.answers.loading import RunModel
from fivetune.training.state import checkpoint
from fivetune.training.state.resume import with_evaluation
from fivetune.training.threads import watch_threads
from fivetune.types import OnNote

MAX_NAME = 60  # characters of a name that several sources make


def record_evaluation(
    folder: Path,
    loaded: RunModel,
    *,
    step: int,
    split: str | None,
    has_own_settings: bool,
    learnt: RunConfig | None = None,
    on_progress: ProgressCallback,
    on_damage: OnNote,
    on_note: OnNote,
) -> EvalRecord:
    """Evaluate the model of a run on the data of its config and record it in the run directory.

    Args:
        folder: the run directory.
        step: optimizer step of the weights.
        split: name of the predictions file; default: the data file's name.
        has_own_settings: whether nothing is overridden.
        learnt: config with the run's training data, of which a promise must have no example; None: nothing is promised.
        on_damage: called with a sentence for each damaged file that the evaluation does not need.
        on_note: called with a sentence when the number of CPU threads changes.
    """
    evaluator = loaded.build_evaluator(on_progress=on_progress, on_damage=on_damage)
    if learnt:
        refuse_learnt_data(folder, learnt, evaluator.store, loaded.tokenizer, on_progress=on_progress)
    damage = rundir.Damage()
    own = rundir.read_data(folder, damage).eval
    is_own = has_own_settings and own is not None and own.fingerprint == evaluator.store.fingerprint
    name = choose_split_name(split, evaluator.store.summary["source"], is_own=is_own)
    run = rundir.RunDir.resume(folder, repair=False)
    try:
        damage += run.damage
        rundir.read_evals(folder, is_growing=False, damage=damage)  # the new evaluation is appended to them
        for message in damage:
            on_damage(message)
        report = watch_threads(loaded.threads, on_progress, on_note)

        def write(predictions: Iterable[Prediction]) -> None:
            run.write_predictions(name, step, (one.as_dict() for one in predictions))

        with translate_oom_errors():
            record = evaluator.run(
                loaded.model, step=step, split=name, write=write, on_progress=partial(report, "evaluating")
            )
        # Of the run's own data, by the settings of config.yaml: those that answer have the exported cap too.
        if name == "eval":
            config = load_config(folder / rundir.CONFIG, trained=True)
            basis = with_evaluation(checkpoint.NO_OWNER, config, evaluator).eval_basis
            record = replace(record, basis=basis)
        run.append(rundir.EVALS, record.as_dict())
    finally:
        run.close()
    return record


def choose_split_name(given: str | None, sources: Sequence[str], *, is_own: bool) -> str:
    """Choose the name of an evaluation; `eval` only for the run's own data and settings, `subset` never.

    Several sources have a name of their own, so that their predictions replace those of no single one.

    >>> choose_split_name(None, ["data/dev.json"], is_own=False), choose_split_name(None, ["eval.csv"], is_own=False)
    ('dev', 'other-eval')
    >>> choose_split_name(None, ["a.csv", "b.csv"], is_own=False)
    'a-and-b'
    >>> choose_split_name("eval", ["dev.csv"], is_own=True), choose_split_name("subset", ["dev.csv"], is_own=True)
    ('eval', 'other-subset')
    """
    name = given or "-and-".join(Path(source).name.partition(".")[0] for source in sources)
    if not given and len(name) > MAX_NAME:  # a file system takes 255 bytes with step and suffix
        name = f"{name[:MAX_NAME]}-{zlib.crc32(name.encode()):08x}"
    name = re.sub(r"[^\w.-]+", "-", name).strip(".-") or "other"
    # The names of a run's own evaluations: a report would take one of other data for the run's.
    if name in rundir.OWN_SPLITS and not (is_own and name == "eval"):
        return f"other-{name}"
    return name
