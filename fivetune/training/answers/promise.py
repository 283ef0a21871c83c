"""The promised share of errors of a run: measured on an evaluation, kept in model/.

In: a run directory, or an export, with an evaluation of its weights. Out: abstention.json of its model folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fivetune import rundir
from fivetune.errors import ConfigError
from fivetune.rundir.abstention_file import read_abstention, write_abstention
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.export_file import read_export
from fivetune.rundir.layout import ABSTENTION, find_model_folder
from fivetune.rundir.reader import PredictionFiles
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.scores.analysis.abstention import (
    choose_level,
    describe_broken_promise,
    find_error_score,
    format_promise,
    list_promise_facts,
    measure_abstention,
    parse_share,
    select_answer_settings,
)
from fivetune.scores.analysis.calibration import restore_lines
from fivetune.types import JsonTable


def record_errors(folder: Path, lines: Sequence[Prediction], metric: str, record: EvalRecord) -> None:
    """Write the errors by confidence into model/ of a run, where answers are right or wrong; nothing is promised.

    Args:
        lines: predictions of the evaluation `record`, with the model's own probabilities.
        metric: the main score.
    """
    score = find_error_score(lines, metric)
    if score:
        found = measure_abstention(lines, score, split=record.split, step=record.step)
        if found:
            write_abstention(folder / "model", found)


def refuse_promise(folder: Path, max_error: str | float, error_below: float | None) -> None:
    """Raise ConfigError, before an evaluation, for a promise that cannot be made or kept."""
    parse_share(max_error, "max_error")
    if error_below is not None and not 0 < error_below <= 100:
        raise ConfigError(f"error_below {error_below:g}: is no score. Allowed are scores above 0 and up to 100.")
    export = read_export(folder)
    if export and f"model/{ABSTENTION}" in export["files"]:
        raise ConfigError(
            f"max_error: {folder} is an export with the promise of its run. Evaluate {export['source']['run']} with "
            "max_error, then export it again."
        )


def read_promise(folder: Path) -> JsonTable:
    """Read the facts of the promise that a run keeps; {} without one. Raises RunDirError for a damaged file."""
    model = find_model_folder(folder)
    kept = read_abstention(model)
    return list_promise_facts(kept, read_temperature(model)) if kept else {}


def describe_kept_promise(folder: Path) -> str:
    """Say, in a sentence after a space, which promise a run keeps; "" without one."""
    facts = read_promise(folder)
    if not facts:
        return ""
    return (
        f" The earlier promise of {format_promise(facts['max_error'])}, of {facts['num_examples']:,} predictions of "
        f"{facts['split']}, stays in force."
    )


def keep_promise(
    folder: Path,
    record: EvalRecord,
    *,
    metric: str,
    max_error: str | float,
    error_below: float | None,
    overrides: Mapping[str, object],
) -> None:
    """Choose the confidence that keeps a promise on an evaluation, and keep the promise in the model folder.

    Args:
        record: an evaluation of the weights in the model folder.
        metric: the main score. error_below: score (0-100) below which an answer is wrong; None: 100, for a score that
            is 0 or 100 for each prediction.
        overrides: settings of the evaluation that differ from the run's.

    Raises ConfigError if no prediction has such a score, or if no confidence keeps the promise.
    """
    share = parse_share(max_error, "max_error")
    # The file of these predictions alone: a long run has 100,000 steps.
    written = PredictionFiles(folder, [record], {}, rundir.Damage())[f"{record.split}-{record.step}"]
    lines = restore_lines(written, record.temperature)
    score = find_error_score(lines, metric, is_graded=error_below is not None)
    if score is None:
        if any(metric in line.scores for line in lines):
            raise ConfigError(
                f"max_error: {metric} is graded. Say from which score on an answer is right: --error-below 50"
            )
        known = ", ".join(lines[0].scores) if lines else ""
        raise ConfigError(
            f"max_error: {metric} has no value for a single prediction, so that no answer is right or wrong. Leave "
            f"max_error out, or train with another eval.metric{f': {known}' if known else ''}."
        )
    found = measure_abstention(
        lines, score, error_below=(error_below or 100) / 100, split=record.split, step=record.step
    )
    if found is None:
        raise ConfigError("max_error: the predictions have no confidence. Leave it out.")
    if choose_level(found.levels, share) is None:
        raise ConfigError(describe_broken_promise(str(folder), found, share))
    kept = replace(found, max_error=share, settings=select_answer_settings(overrides))
    write_abstention(find_model_folder(folder), kept)
