"""Score a file of predictions by a task's official metrics; needs no model.

In: a task's name, a data file with the right answers, and predictions: `{id: text}` as JSON, JSON lines (or a list) of
{"id": ..., "prediction": ...}, or BioASQ's {"questions": [{"id": ..., "exact_answer": ...}]}, plain or gzipped. A list
of texts is a ranking, the best first. Out: a table, or with --json one JSON object, on standard output: every score
with its 95 % interval, and beside other predictions the difference with its own.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fivetune.commands import print_json
from fivetune.config import load_task
from fivetune.config_layers import Layers, parse_overrides
from fivetune.data.json_text import Window
from fivetune.data.source_files import local_files, open_bytes, shown
from fivetune.errors import ConfigError, DataError
from fivetune.metrics import UNANSWERED, score_all
from fivetune.metrics.classification import Confusion, gold_labels
from fivetune.tasks import Task
from fivetune.tasks.mixture import Mixture
from fivetune.types import Scores, TextExample

PREDICTION_KEYS = ("prediction", "prediction_text", "exact_answer")
OTHER = "(other)"  # a prediction that is none of the labels, or missing
NO_ANSWER_KEYS = ("no_answer_score", "no_answer_probability")

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
    parser.add_argument(
        "--against", metavar="FILE", help="other predictions for the same questions: tells the difference, and how sure"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.epilog = "Settings: --data.columns.question Frage, --task.no_answer 'no answer'"


def run(args: argparse.Namespace) -> int:
    columns, options = _split_settings(parse_overrides(args.settings))
    task = load_task(args.task, options)
    part = task.part if isinstance(task, Mixture) else None
    if part:
        task = task.parts[part].task
    if args.no_answer_scores and task.no_answer_text is None:
        raise ConfigError(f"--no-answer-scores: {args.task} has no unanswerable questions. Drop it, or score squad_v2.")
    questions = _read_references(task, args.references, columns)
    leanings: dict[str, float] = {}
    if args.no_answer_scores:
        leanings = read_values(args.no_answer_scores, keys=NO_ANSWER_KEYS, check=_number)
        leanings = _own_ids(leanings, questions, part)
        _compare_ids(list(questions), leanings, args.no_answer_scores, missing_is_error=True)
    ranked = _ranked(args, task, questions, args.predictions, part)
    ours = _score(task, questions, ranked, leanings)
    others = _ranked(args, task, questions, args.against, part) if args.against else None
    theirs = _score(task, questions, others, {}) if others else None
    labels = _confusion(task, questions, ranked, args.predictions)
    if args.json:
        print_json(_as_table(args.task, len(questions), ours, theirs) | (label_table(labels) if labels else {}))
    else:
        print(f"{args.task}: {len(questions)} examples", *_lines(ours, theirs), sep="\n")
        print(*(label_lines(labels) if labels else ()), sep="\n", end="\n" if labels else "")
    return 0


def _ranked(
    args: argparse.Namespace, task: Any, questions: Mapping[str, TextExample], source: str, part: str | None
) -> list[list[str]]:
    """The answers to each question in one file of predictions, the best first, in the form of the references."""
    found = _own_ids(read_values(source, keys=PREDICTION_KEYS, check=_answer), questions, part)
    _compare_ids(list(questions), found, source, missing_is_error=args.missing == "error")
    ranked = [_ranking(found.get(key, UNANSWERED)) for key in questions]
    readers = [_reader(task, example) for example in questions.values()]
    ranked = [
        [reader.from_text(text) if args.raw else reader.from_answer(text) for text in texts]
        for reader, texts in zip(readers, ranked, strict=True)
    ]
    if not args.raw:
        _warn_about_phrases(readers, _firsts(ranked))
    return ranked


def _firsts(ranked: Sequence[Sequence[str]]) -> list[str]:
    return [texts[0] if texts else "" for texts in ranked]


def _score(
    task: Any, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], leanings: Mapping[str, float]
) -> Scores:
    """The scores of one file of predictions."""
    details = []
    for (key, example), texts in zip(questions.items(), ranked, strict=True):
        leaning = {"no_answer_score": leanings[key]} if leanings else {}
        details.append({**example.meta, **leaning, "candidates": texts})
    return score_all(task.metrics, _firsts(ranked), [e.references for e in questions.values()], details=details)


def _confusion(
    task: Task, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], source: str
) -> Confusion | None:
    """Which labels are taken for which, None of other tasks; what is no label is told, and counts as OTHER."""
    labels = tuple(task.labels or ())
    if not labels:
        return None
    said = _firsts(ranked)
    outside = [text for text in said if text not in labels and text != UNANSWERED]
    if outside:
        print(
            f"warning: {source}: {len(outside)} of {len(said)} predictions are none of the labels and count as wrong, "
            f"first {shown(outside[0])}; labels: {', '.join(labels)}",
            file=sys.stderr,
        )
    golds = gold_labels(said, [example.references for example in questions.values()])
    counts = Counter(zip(golds, (text if text in labels else OTHER for text in said), strict=True))
    return Confusion(labels, counts)


def label_table(found: Confusion) -> dict[str, Any]:
    """What --json tells: figures of each label in percent, then how many of each gold label are predicted as which.

    >>> table = label_table(Confusion(("a", "b"), Counter({("a", "a"): 1, ("a", "b"): 3, ("b", "b"): 2})))
    >>> table["labels"]["a"], table["confusion"]["a"]
    ({'precision': 100.0, 'recall': 25.0, 'f1': 40.0, 'gold': 4, 'predicted': 1}, {'a': 1, 'b': 3})
    """
    each = {}
    for label in found.labels:
        shares = {"precision": found.precision(label), "recall": found.recall(label), "f1": found.f1(label)}
        percents = {name: None if share is None else 100 * share for name, share in shares.items()}
        each[label] = {**percents, "gold": found.support(label), "predicted": found.predicted(label)}
    said = [*found.labels, *([OTHER] if found.predicted(OTHER) else [])]
    return {"labels": each, "confusion": {a: {b: found.counts[a, b] for b in said} for a in found.labels}}


def label_lines(found: Confusion) -> list[str]:
    """The tables of the terminal: figures of each label, then gold labels down and predicted ones across.

    >>> print(*label_lines(Confusion(("a", "b"), Counter({("a", "a"): 1, ("b", "a"): 1}))), sep="\\n")
    <BLANKLINE>
    label  precision  recall     f1  gold  predicted
    a          50.00  100.00  66.67     1          2
    b              -    0.00   0.00     1          0
    <BLANKLINE>
    gold   a  b
    a      1  0
    b      1  0
    """
    table = label_table(found)
    figures = [
        [name, *("-" if (value := one[key]) is None else f"{value:.2f}" for key in ("precision", "recall", "f1")),
         str(one["gold"]), str(one["predicted"])]
        for name, one in table["labels"].items()
    ]  # fmt: skip
    counts = [[gold, *map(str, row.values())] for gold, row in table["confusion"].items()]
    said = next(iter(table["confusion"].values()))
    first = max(map(len, ("label", *found.labels)))
    header = ["label", "precision", "recall", "f1", "gold", "predicted"]
    return ["", *_aligned([header, *figures], first), "", *_aligned([["gold", *said], *counts], first)]


def _aligned(rows: Sequence[Sequence[str]], first: int) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][1:]
    return [
        "  ".join([f"{row[0]:<{first}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths, strict=True))])
        for row in rows
    ]


def _reader(task: Any, example: TextExample) -> Task:
    """The task that reads the answers to an example: of a mixture that of the example's part."""
    return task.parts[example.meta["source_task"]].task if isinstance(task, Mixture) else task


def _own_ids(found: Mapping[str, Any], questions: Mapping[str, TextExample], part: str | None) -> dict[str, Any]:
    """Values under the ids of the data: the runs of a mixture write the part's name and / before them."""
    written = {f"{example.meta.get('source_task', part)}/{key}": key for key, example in questions.items()}
    return {written.get(key, key): value for key, value in found.items()}


def _as_table(task: str, num_examples: int, ours: Scores, theirs: Scores | None) -> dict[str, Any]:
    """What --json prints."""
    from fivetune.analysis.bootstrap import intervals, paired

    table: dict[str, Any] = {"task": task, "num_examples": num_examples, "scores": ours.corpus}
    table["intervals"] = intervals(ours)
    if theirs:
        differences = {name: difference._asdict() for name, difference in paired(ours, theirs).items()}
        table |= {"against": theirs.corpus, "differences": differences}
    return table


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
            rows = dict(members).get("questions")
            if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):  # BioASQ's form
                yield from [_row_pair(row, path, keys) for row in rows if any(key in row for key in keys)]
                continue
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


def _answer(value: Any) -> str:
    if isinstance(value, list):
        firsts = [item[0] if isinstance(item, list) and item else item for item in value]
        return "" if all(type(first) is str for first in firsts) else "A ranking is a list of texts, the best first."
    is_text = type(value) is str  # the reader gives JSON's NaN as a kind of str
    return "" if is_text else 'It must be text; no answer is the empty text "".'


def _number(value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return "" if is_number else "It must be a finite number."


def _split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The settings that matter here: data.columns, and the options of the task."""
    columns: dict[str, str] = {}
    options = Layers()
    for key, value in settings.items():
        if key.startswith("data.columns."):
            columns[key.removeprefix("data.columns.")] = str(value)
        elif key.startswith("task."):
            options.add_overrides({key: value})
        else:
            raise ConfigError(
                f"--{key}: is no setting of score. Allowed: --data.columns.NAME COLUMN, --task.OPTION VALUE."
            )
    return columns, options.table().get("task", {})


def _read_references(task: Any, source: str, columns: Mapping[str, str]) -> dict[str, TextExample]:
    """The questions by id, in the file's order; of several examples that ask one question, the first."""
    from fivetune.data.records import read_records, refuse_duplicate_ids  # readers of many formats, not for --help

    questions: dict[str, TextExample] = {}
    for record in refuse_duplicate_ids(read_records(source, columns=columns)):
        converted = task.to_score(record)
        for example in converted if isinstance(converted, tuple) else filter(None, (converted,)):
            questions.setdefault(example.group or example.id, example)
    if not questions:
        raise DataError(f"{source}: holds nothing to score against. Give a file with questions and answers.")
    return questions


def _ranking(value: Any) -> list[str]:
    """One text, a list of texts, or BioASQ's list of lists of synonyms, as a ranked list of texts."""
    if isinstance(value, str):
        return [value]
    return [item[0] if isinstance(item, list) else item for item in value]


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


def _warn_about_phrases(readers: Sequence[Task], predictions: Sequence[str]) -> None:
    """Raw model output in the file would have its no-answer phrase scored as a wrong answer."""
    phrases = [
        reader.no_answer_text
        for reader, text in zip(readers, predictions, strict=True)
        if text.strip() and not reader.from_text(text)
    ]
    if phrases:
        print(
            f"warning: {len(phrases)} predictions read {phrases[0]!r} and are scored as that text; "
            "with --raw they would be no answer",
            file=sys.stderr,
        )


def _lines(ours: Scores, theirs: Scores | None) -> list[str]:
    """The table of the terminal: full values and intervals, then the differences."""
    from fivetune.analysis.bootstrap import intervals, paired

    ranges = {name: f"  95 % interval {low:.1f} to {high:.1f}" for name, (low, high) in intervals(ours).items()}
    values = _table_lines(ours.corpus)
    widest = max(map(len, values))
    lines = [f"{line:{widest}}{ranges.get(name, '')}".rstrip() for name, line in zip(ours.corpus, values, strict=True)]
    if theirs is None:
        return lines
    width = max(map(len, ours.corpus))
    lines += ["", f"{'difference':{width}}  {'these':>7}  {'against':>7}  change  95 % interval      p"]
    for name, (difference, low, high, p_value) in paired(ours, theirs).items():
        before = f"{name:{width}}  {ours.corpus[name]:7.2f}  {theirs.corpus[name]:7.2f}  {difference:+6.2f}"
        lines.append(f"{before}  {f'{low:+.2f} to {high:+.2f}':16}  {p_value:5.3f}")
    return lines


def _table_lines(scores: Mapping[str, float]) -> list[str]:
    """Names and values, decimal points under each other.

    >>> print(*_table_lines({"exact": 9.25, "total": 11873}), sep="|")
    exact      9.25|total  11873
    """
    width = max(map(len, scores))
    whole = max(len(str(value).partition(".")[0]) for value in scores.values())
    return [
        f"{name:{width}}  {' ' * (whole - len(str(value).partition('.')[0]))}{value}" for name, value in scores.items()
    ]
