"""Score a file of predictions; no model is needed.

By a task's official metrics.
In: a task's name, or a recipe or run that has one, a data file with the gold answers, and predictions: what `fivetune
predict` writes, the table that pandas writes of it, {id: text} as JSON, or without ids one row or line of text per
record in order. Out: a table, or with --json one JSON object, on standard output: every score with its 95 % interval,
and the difference from other predictions with its own interval.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fivetune.commands import (
    add_flag,
    add_output_arguments,
    print_json,
    print_scores,
    print_table,
    print_warning,
    refuse_outputs,
    write_outputs,
)
from fivetune.config.layers import parse_overrides

if TYPE_CHECKING:
    from fivetune.scores.metrics.classification import ConfusionMatrix
    from fivetune.training.answers.score import ScoredPredictions

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "task",
        metavar="TASK",
        help="task whose metrics apply, such as squad_v2 (fivetune list tasks), or a recipe or run, whose task it is",
    )
    parser.add_argument(
        "references",
        metavar="REFERENCES",
        help="data file with the gold answers; after a recipe or run it may be left out: data.eval",
    )
    parser.add_argument(
        "predictions",
        nargs="?",  # `run` takes the place of absent references
        metavar="PREDICTIONS",
        help="JSON lines, JSON, CSV, TSV or Parquet with id and prediction, {id: text}, or lines in order; .gz too",
    )
    parser.add_argument(
        "--no-answer-scores",
        metavar="FILE",
        help="{id: number}: no-answer score of each question; finds the best thresholds",
    )
    parser.add_argument(
        "--missing",
        choices=("error", "wrong"),
        default="error",
        help="a question without prediction is an error (default), or counts as wrong",
    )
    add_flag(parser, "--raw", "predictions are raw model output, which the task converts to answers first")
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="other predictions of the same questions: prints the difference with its p-value",
    )
    add_output_arguments(parser)
    add_flag(parser, "--json", "print one JSON object instead of the table")
    parser.epilog = "Settings: --data.columns.question Frage, --task.no_answer 'no answer'"


def run(args: argparse.Namespace) -> int:
    from fivetune.training.answers.score import score

    if args.predictions is None and args.settings and not args.settings[0].startswith("-"):
        args.predictions = args.settings.pop(0)  # after a flag argparse no longer takes an optional argument
    refuse_outputs(args, page=False)
    if args.predictions is None:
        args.references, args.predictions = None, args.references
    found = score(
        args.task,
        args.references,
        args.predictions,
        settings=parse_overrides(args.settings),
        no_answer_scores=args.no_answer_scores,
        missing=args.missing,
        raw=args.raw,
        against=args.against,
        on_warning=print_warning,
    )
    if args.json:
        _write_files(args, found)
        print_json(found.as_dict())
        return 0
    print(f"{found.task}: {found.num_examples} examples")
    print_scores(found.scores, found.intervals)
    if found.differences:
        _print_differences(found)
    if blanks := found.without_blank_golds:
        words = f"without the blank gold answers of {blanks['num_questions']:,} questions"
        print(f"\n{words}, which an empty prediction matches:")
        print_scores(blanks["scores"], {})
    if found.confusion:
        _print_labels(found.confusion)
    _write_files(args, found)
    return 0


def _write_files(args: argparse.Namespace, found: ScoredPredictions) -> None:
    """Write the files of --output and --figures, if they are given."""
    if not args.output and args.figures is None:
        return
    from fivetune.reading.report.score import build_score_page

    page, results = build_score_page(
        found.task,
        found.num_examples,
        found.scores,
        found.intervals,
        found.against,
        found.differences,
        found.confusion,
    )
    write_outputs(args, page, results)


def _print_labels(found: ConfusionMatrix) -> None:
    """Print the figures of each label, then the counts with gold labels as rows."""
    from fivetune.training.answers.score import build_label_table

    table = build_label_table(found)
    rows: list[list[str]] = []
    for name, one in table["labels"].items():
        row = [name]
        for key in ("precision", "recall", "f1"):
            row.append("n/a" if one[key] is None else f"{one[key]:.2f}")
        rows.append([*row, str(one["gold"]), str(one["predicted"])])
    print()
    print_table(["label", "precision", "recall", "f1", "gold", "predicted"], rows)
    counts: dict[str, dict[str, int]] = table["confusion"]
    print()
    print_table(["gold", *counts[found.labels[0]]], [[gold, *map(str, row.values())] for gold, row in counts.items()])


def _print_differences(found: ScoredPredictions) -> None:
    from fivetune.scores.analysis.bootstrap import format_p_value

    rows: list[list[str]] = []
    for name, (difference, low, high, p_value) in found.differences.items():
        values = [f"{found.scores[name]:.2f}", f"{found.against[name]:.2f}", f"{difference:+.2f}"]
        rows.append([name, *values, f"{low:+.2f} to {high:+.2f}", format_p_value(p_value)])
    print()
    print_table(("difference", "these", "against", "change", "95 % interval", "p"), rows)
