"""Score a file of predictions by a task's official metrics; needs no model.

In: a task's name, a data file with the right answers, and predictions: `{id: text}` as JSON, or JSON lines (or a list)
of {"id": ..., "prediction": ...}, plain or gzipped. Out: a table, or with --json one JSON object, on standard output.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivetune.commands import print_json
from fivetune.config import load_task
from fivetune.config_layers import parse_overrides
from fivetune.data.json_text import Window
from fivetune.data.source_files import local_files, open_bytes, shown
from fivetune.errors import ConfigError, DataError
from fivetune.metrics import score_all

PREDICTION_KEYS = ("prediction", "prediction_text")
NO_ANSWER_KEYS = ("no_answer_score", "no_answer_probability")

UNANSWERED = "\ue000"
"""Stands for a prediction that is not there: a private-use character, which no gold answer holds and which is not "",
so that it scores 0 everywhere. An empty text would be right for every unanswerable question."""


TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", metavar="TASK", help="task whose metrics apply, such as squad_v2 (fivetune list tasks)")
    parser.add_argument("references", metavar="REFERENCES", help="data file with the right answers")
    parser.add_argument("predictions", metavar="PREDICTIONS", help="{id: text} JSON, or JSON lines {id, prediction}")
    parser.add_argument(
        "--no-answer-scores",
        metavar="FILE",
        help="{id: number}: how strongly each leans to no answer; finds thresholds",
    )
    parser.add_argument(
        "--missing",
        choices=("error", "wrong"),
        default="error",
        help="a question without prediction is an error (default), or counts as wrong",
    )
    parser.add_argument(
        "--raw", action="store_true", help="predictions are the model's own words: let the task read them first"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.epilog = "Settings: --data.columns.question Frage, --task.no_answer 'no answer'"


def run(args: argparse.Namespace) -> int:
    columns, options = _split_settings(parse_overrides(args.settings))
    task = load_task(args.task, options)
    if args.no_answer_scores and task.no_answer_text is None:
        raise ConfigError(f"--no-answer-scores: {args.task} has no unanswerable questions. Drop it, or score squad_v2.")
    ids, references = _read_references(task, args.references, columns)
    found = read_values(args.predictions, keys=PREDICTION_KEYS, check=_text)
    _compare_ids(ids, found, args.predictions, missing_is_error=args.missing == "error")
    predictions = [found.get(key, UNANSWERED) for key in ids]
    if args.raw:
        predictions = [task.from_text(prediction) for prediction in predictions]
    else:
        _warn_about_phrases(task, predictions)
    leanings = None
    if args.no_answer_scores:
        by_id = read_values(args.no_answer_scores, keys=NO_ANSWER_KEYS, check=_number)
        _compare_ids(ids, by_id, args.no_answer_scores, missing_is_error=True)
        leanings = [by_id[key] for key in ids]
    scores = score_all(task.metrics, predictions, references, no_answer_scores=leanings).corpus
    if args.json:
        print_json({"task": args.task, "num_examples": len(ids), "scores": scores})
    else:
        print(f"{args.task}: {len(ids)} examples", *_table_lines(scores), sep="\n")
    return 0


def read_values(source: str, *, keys: Sequence[str], check: Callable[[Any], str]) -> dict[str, Any]:
    """One value per id, from `{id: value}` or from rows with `id` and one of `keys`; a folder's files together.

    `check` says what is wrong with a value, "" if nothing. Raises DataError with the file, and the id or the line.
    """
    values: dict[str, Any] = {}
    for path in local_files(source):
        with open_bytes(path) as file:
            for key, value in _pairs(Window(file, path), path, keys):
                problem = check(value)
                if problem:
                    raise DataError(f"{path}: the value of {key!r} is {shown(value)}. {problem}")
                if key in values:
                    raise DataError(f"{path}: the id {key!r} stands twice. Ids must be unique. Keep one.")
                values[key] = value
    if not values:
        raise DataError(f"{source}: holds nothing to read. {_expected(keys)}")
    return values


def _pairs(window: Window, path: Path, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """(id, value) of each entry; JSON lines are objects one after the other, so one loop reads every form."""
    while start := window.peek():
        if start == "[":
            yield from (_row_pair(window.value(), path, keys) for _ in window.items())
        elif start == "{":
            members = [(name, window.value()) for name in window.members()]
            names = [name for name, _ in members]
            is_row = "id" in names and any(key in names for key in keys)
            if is_row and len(set(names)) < len(names):
                raise DataError(f"{path}: {shown(dict(members))} has a key twice. Keys must be unique. Remove one.")
            yield from [_row_pair(dict(members), path, keys)] if is_row else members
        else:
            raise DataError(f"{path}: holds {shown(window.value())} where an object was expected. {_expected(keys)}")


def _row_pair(row: Any, path: Path, keys: Sequence[str]) -> tuple[str, Any]:
    present = [key for key in keys if isinstance(row, dict) and key in row]
    if not present or row.get("id") is None:
        raise DataError(f"{path}: {shown(row)} has no id or no {keys[0]}. {_expected(keys)}")
    return str(row["id"]), row[present[0]]


def _expected(keys: Sequence[str]) -> str:
    return f'Allowed is one JSON object {{id: value}}, or lines {{"id": ..., "{keys[0]}": ...}}.'


def _text(value: Any) -> str:
    is_text = type(value) is str  # the reader gives JSON's NaN as a kind of str
    return "" if is_text else 'It must be text; no answer is the empty text "".'


def _number(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return "" if is_number else "It must be a finite number."


def _split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings that matter here: data.columns, and the options of the task."""
    columns: dict[str, str] = {}
    options: dict[str, Any] = {}
    for key, value in settings.items():
        if key.startswith("data.columns."):
            columns[key.removeprefix("data.columns.")] = str(value)
        elif key.startswith("task."):
            options[key.removeprefix("task.")] = value
        else:
            raise ConfigError(
                f"--{key}: is no setting of score. Allowed: --data.columns.NAME COLUMN, --task.OPTION VALUE."
            )
    return columns, options


def _read_references(task: Any, source: str, columns: Mapping[str, str]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Ids and right answers, in the file's order."""
    from fivetune.data.records import read_records, refuse_duplicate_ids  # readers of many formats, not for --help

    examples = [task.to_text(record) for record in refuse_duplicate_ids(read_records(source, columns=columns))]
    scored = [example for example in examples if example is not None]
    if not scored:
        raise DataError(f"{source}: holds nothing to score against. Give a file with questions and answers.")
    return [example.id for example in scored], [example.references for example in scored]


def _compare_ids(ids: Sequence[str], found: dict[str, Any], source: str, *, missing_is_error: bool) -> None:
    """Missing ids are an error unless they count as wrong; surplus ones are told."""
    missing = [key for key in ids if key not in found]
    surplus = found.keys() - set(ids)
    if missing and missing_is_error:
        advice = (
            "None of the ids fits: these are the predictions of another data file."
            if len(missing) == len(ids)
            else "Add them, or count them as wrong with --missing wrong."
        )
        raise DataError(
            f"{source}: {len(missing)} of {len(ids)} questions are missing, first {_first(missing)}. {advice}"
        )
    if missing:
        print(
            f"warning: {source}: {len(missing)} of {len(ids)} questions are missing and count as wrong", file=sys.stderr
        )
    if surplus:
        first = _first([key for key in found if key in surplus])
        print(f"warning: {source}: {len(surplus)} ids are not in the data, first {first}; left out", file=sys.stderr)


def _first(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (" ..." if len(ids) > 3 else "")


def _warn_about_phrases(task: Any, predictions: Sequence[str]) -> None:
    """Raw model output in the file would have its no-answer phrase scored as a wrong answer."""
    num_phrases = sum(bool(text.strip()) and not task.from_text(text) for text in predictions)
    if num_phrases:
        print(
            f"warning: {num_phrases} predictions read {task.no_answer_text!r} and are scored as that text; "
            "with --raw they would be no answer",
            file=sys.stderr,
        )


def _table_lines(scores: dict[str, float]) -> list[str]:
    """Names and values, decimal points under each other.

    >>> print(*_table_lines({"exact": 9.25, "total": 11873}), sep="|")
    exact      9.25|total  11873
    """
    width = max(map(len, scores))
    whole = max(len(str(value).partition(".")[0]) for value in scores.values())
    return [
        f"{name:{width}}  {' ' * (whole - len(str(value).partition('.')[0]))}{value}" for name, value in scores.items()
    ]
