"""Score a file of predictions; no model is needed.

By a task's official metrics.
In: a task's name, or a recipe or run that has one, a data file with the gold answers, and predictions: what `fivetune
predict` writes, the table that pandas writes of it, {id: text} as JSON, or without ids one row or line of text per
record in order. Out: a table, or with --json one JSON object, on standard output: every score with its 95 % interval,
and the difference from other predictions with its own interval.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fivetune.commands import (
    add_output_arguments,
    print_json,
    print_scores,
    print_table,
    print_warning,
    refuse_outputs,
    write_outputs,
)
from fivetune.config import load_layers
from fivetune.config.layers import Layers, parse_listed_names, parse_overrides
from fivetune.config.recipes import is_run_directory
from fivetune.data.readers.source_files import BadRecord, quote_value
from fivetune.errors import ConfigError, DataError, RecordError
from fivetune.plugins import list_plugins
from fivetune.scores.metrics import UNANSWERED, Scorer, drop_blank_golds, rewards_blank
from fivetune.scores.metrics.classification import ConfusionMatrix, choose_gold_labels
from fivetune.scores.metrics.gsm8k import describe_lenient_gap
from fivetune.tasks import DROPPED_SYNONYMS, load_task, suggest_language
from fivetune.tasks.mixture import Mixture
from fivetune.training.answers.score_file import Values, read_no_answer_scores, read_rankings
from fivetune.types import JsonTable, Scores, Task, TextExample

if TYPE_CHECKING:
    from fivetune.scores.analysis.bootstrap import Difference

OTHER = "(other)"  # a prediction that is none of the labels, or missing
TAKES_SETTINGS = True
T = TypeVar("T")


@dataclass(slots=True)
class GoldSet:
    """The questions to score by id, in the file's order, and the records that are not scored.

    Args:
        questions: the first example of each question.
        left_out: ids of records that do not belong to the task, such as other question types.
        skipped: records that cannot be used.
        order: for every record the id of its question, "" if the record cannot be read.
    """

    questions: dict[str, TextExample] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    skipped: list[BadRecord] = field(default_factory=list)
    order: list[str] = field(default_factory=list)

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be read."""
        self.skipped.append(bad)
        self.order.append("")


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
    parser.add_argument(
        "--raw", action="store_true", help="predictions are raw model output, which the task converts to answers first"
    )
    parser.add_argument(
        "--against",
        metavar="FILE",
        help="other predictions of the same questions: prints the difference with its p-value",
    )
    add_output_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.epilog = "Settings: --data.columns.question Frage, --task.no_answer 'no answer'"


def run(args: argparse.Namespace) -> int:
    if args.predictions is None and args.settings and not args.settings[0].startswith("-"):
        args.predictions = args.settings.pop(0)  # after a flag argparse no longer takes an optional argument
    refuse_outputs(args, page=False)
    recipe = _read_recipe(args.task)
    if args.predictions is None:
        args.references, args.predictions = _find_references(args.task, recipe), args.references
    # Settings win over the recipe's; a part of a mixture is scored as the task that it is.
    columns, header, options, skips = _split_settings(parse_overrides(args.settings), recipe)
    args.task = options.pop("name", args.task)
    task = load_task(args.task, options)
    part = None
    if isinstance(task, Mixture) and (part := task.part):
        task = task.parts[part].task
    if args.no_answer_scores and task.no_answer_text is None:
        raise ConfigError(f"--no-answer-scores: {args.task} has no unanswerable questions. Drop it, or score squad_v2.")
    # The questions to score, then what their file says that distorts scores.
    gold = _read_references(task, args.references, columns, header, skips=skips)
    questions = gold.questions
    _warn_about_golds(task, gold, args.references)
    # Answers and no-answer scores, by the ids of the references.
    leanings: dict[str, float] = {}
    if args.no_answer_scores:
        scores = read_no_answer_scores(args.no_answer_scores)
        leanings = _map_to_own_ids(scores, gold, args.no_answer_scores, part)
        _compare_ids(gold, leanings, args.no_answer_scores, missing_is_error=True)
    ranked = _read_rankings(args, task, gold, args.predictions, part)
    ours = _score_rankings(task, questions, ranked, leanings)
    others = _read_rankings(args, task, gold, args.against, part) if args.against else None
    theirs = _score_rankings(task, questions, others, {}) if others else None
    # What the scores do not show by themselves.
    if words := describe_lenient_gap(ours.corpus):
        print_warning(words)
    labels = _build_confusion(task, questions, ranked, args.predictions)
    without_blanks = _score_without_blanks(task, questions, ranked, leanings)
    from fivetune.scores.analysis.bootstrap import compare_paired, compute_intervals  # numpy, not for --help

    intervals = compute_intervals(ours)
    differences = compare_paired(ours, theirs) if theirs else {}
    if args.json:
        table: JsonTable = {"task": args.task, "num_examples": len(questions), "scores": ours.corpus}
        table["intervals"] = intervals
        if theirs:
            table["against"] = theirs.corpus
            table["differences"] = {name: difference._asdict() for name, difference in differences.items()}
        if labels:
            table |= build_label_table(labels)
        if without_blanks:
            table["without_blank_golds"] = without_blanks
        _write_files(args, len(questions), ours, intervals, theirs, differences, labels)
        print_json(table)
        return 0
    print(f"{args.task}: {len(questions)} examples")
    print_scores(ours.corpus, intervals, all_digits=True)
    if theirs:
        _print_differences(differences, ours, theirs)
    if without_blanks:
        words = f"without the blank gold answers of {without_blanks['num_questions']:,} questions"
        print(f"\n{words}, which an empty prediction matches:")
        print_scores(without_blanks["scores"], {}, all_digits=True)
    if labels:
        _print_labels(labels)
    _write_files(args, len(questions), ours, intervals, theirs, differences, labels)
    return 0


def _write_files(
    args: argparse.Namespace,
    num: int,
    ours: Scores,
    intervals: Mapping[str, tuple[float, float]],
    theirs: Scores | None,
    differences: Mapping[str, Difference],
    labels: ConfusionMatrix | None,
) -> None:
    """Write the files of --output and --figures, if they are given."""
    if not args.output and args.figures is None:
        return
    from fivetune.reading.report.score import build_score_page, build_score_results

    others = theirs.corpus if theirs else {}
    page = build_score_page(args.task, ours.corpus, intervals, others, labels)
    write_outputs(args, page, build_score_results(args.task, num, ours.corpus, intervals, others, differences))


def _read_recipe(source: str) -> JsonTable:
    """Read the sections task and data of a recipe or run; {} for the name of a task."""
    path = Path(source)
    if not (is_run_directory(path) or path.suffix in (".yaml", ".yml")):
        if ("/" in source or path.exists()) and source not in list_plugins("tasks"):
            raise ConfigError(
                f"{source}: is neither a task nor a recipe (.yaml) nor a run, which has a config.yaml. "
                f"Write: fivetune score TASK REFERENCES PREDICTIONS (fivetune list tasks)."
            )
        return {}
    table = load_layers(source, {})[0].to_dict()
    if not table.get("task", {}).get("name"):
        raise ConfigError(f"{source}: names no task. Write task.name there, or give a task (fivetune list tasks).")
    return {name: table.get(name, {}) for name in ("task", "data")}


def _find_references(source: str, recipe: Mapping[str, Any]) -> str:
    """The file of data.eval. Raises ConfigError where there is not one."""
    if not recipe:
        raise ConfigError(
            f"score: two files are needed after the task {source!r}: REFERENCES with the gold answers, then "
            "PREDICTIONS. After a recipe or run, PREDICTIONS alone: data.eval has the gold answers."
        )
    found = recipe["data"].get("eval")
    found = found[0] if isinstance(found, list) and len(found) == 1 else found
    if not isinstance(found, str) or not found:
        shown = "is not set" if not found else "names several sets"
        raise ConfigError(f"{source}: data.eval {shown}. Write: fivetune score {source} REFERENCES PREDICTIONS.")
    return found


def _score_without_blanks(
    task: Any, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], leanings: Mapping[str, float]
) -> dict[str, Any]:
    """Scores without blank gold answers, and the number of questions where a blank one scores; {} if there is none."""
    scorer = Scorer(task.metrics)
    num_questions = sum(rewards_blank(scorer, one.references) for one in questions.values())
    if not num_questions:
        return {}
    kept = {key: replace(one, references=drop_blank_golds(one.references)) for key, one in questions.items()}
    return {"num_questions": num_questions, "scores": _score_rankings(task, kept, ranked, leanings).corpus}


def _read_rankings(
    args: argparse.Namespace, task: Any, gold: GoldSet, source: str, part: str | None
) -> list[list[str]]:
    """Read the answers to each question from a file of predictions, best first, in the form of the references."""
    questions = gold.questions
    found = _map_to_own_ids(read_rankings(source), gold, source, part)
    _compare_ids(gold, found, source, missing_is_error=args.missing == "error")
    ranked: list[list[str]] = []
    readers: list[Task] = []
    for key, example in questions.items():
        # Of a mixture the task of the example's part converts its answers.
        reader = task.parts[example.meta["source_task"]].task if isinstance(task, Mixture) else task
        convert = reader.from_text if args.raw else reader.from_answer
        ranked.append([convert(text) for text in found.get(key, [UNANSWERED])])
        readers.append(reader)
    # Raw model output contains no-answer phrases, which would be scored as wrong answers.
    phrases: list[str | None] = []
    for reader, text in zip(readers, _select_first_answers(ranked), strict=True):
        if not args.raw and text.strip() and not reader.from_text(text):
            phrases.append(reader.no_answer_text)
    if phrases:
        print_warning(
            f"{len(phrases)} predictions read {phrases[0]!r} and are scored as that text; "
            "with --raw they would be no answer"
        )
    return ranked


def _select_first_answers(ranked: Sequence[Sequence[str]]) -> list[str]:
    return [texts[0] if texts else "" for texts in ranked]


def _score_rankings(
    task: Any, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], leanings: Mapping[str, float]
) -> Scores:
    """Score the ranked answers of all questions."""
    details = []
    for (key, example), texts in zip(questions.items(), ranked, strict=True):
        leaning = {"no_answer_score": leanings[key]} if leanings else {}
        details.append({**example.meta, **leaning, "candidates": texts})
    references = [example.references for example in questions.values()]
    return Scorer(task.metrics).score(_select_first_answers(ranked), references, details=details)


def _build_confusion(
    task: Task, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], source: str
) -> ConfusionMatrix | None:
    """Build the confusion matrix of a label task; None for other tasks. Other texts are reported and count as OTHER."""
    labels = tuple(task.labels or ())
    if not labels:
        return None
    said = _select_first_answers(ranked)
    outside = [text for text in said if text not in labels and text != UNANSWERED]
    if outside:
        print_warning(
            f"{source}: {len(outside)} of {len(said)} predictions are none of the labels and count as wrong, "
            f"first {quote_value(outside[0])}; labels: {', '.join(labels)}"
        )
    golds = choose_gold_labels(said, [example.references for example in questions.values()])
    counts: Counter[tuple[str, str]] = Counter()
    for gold, text in zip(golds, said, strict=True):
        counts[gold, text if text in labels else OTHER] += 1
    return ConfusionMatrix(labels, counts)


def build_label_table(found: ConfusionMatrix) -> dict[str, Any]:
    """Build the --json result: figures of each label in percent, and counts by gold and predicted label.

    >>> table = build_label_table(ConfusionMatrix(("a", "b"), Counter({("a", "a"): 1, ("a", "b"): 3, ("b", "b"): 2})))
    >>> table["labels"]["a"], table["confusion"]["a"]
    ({'precision': 100.0, 'recall': 25.0, 'f1': 40.0, 'gold': 4, 'predicted': 1}, {'a': 1, 'b': 3})
    """
    each: dict[str, dict[str, float | None]] = {}
    for label in found.labels:
        each[label] = {
            "precision": _compute_percent(found.compute_precision(label)),
            "recall": _compute_percent(found.compute_recall(label)),
            "f1": _compute_percent(found.compute_f1(label)),
            "gold": found.count_support(label),
            "predicted": found.count_predicted(label),
        }
    said = list(found.labels)
    if found.count_predicted(OTHER):
        said.append(OTHER)
    confusion: dict[str, dict[str, int]] = {}
    for gold in found.labels:
        confusion[gold] = {label: found.counts[gold, label] for label in said}
    return {"labels": each, "confusion": confusion}


def _compute_percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _print_labels(found: ConfusionMatrix) -> None:
    """Print the figures of each label, then the counts with gold labels as rows."""
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


def _map_to_own_ids(found: Values[T], gold: GoldSet, source: str, part: str | None) -> dict[str, T]:
    """Map values to the ids of the data.

    Values without ids are in the order of the records or of the questions. Runs of a mixture write the part's name and
    a slash before an id. Raises DataError for another number of values than there are records.
    """
    questions = gold.questions
    if isinstance(found, list):
        while len(found) > len(gold.order) and found[-1] in ([""], None):  # blank lines at the end
            found = found[:-1]
        ids = [*questions] if len(found) == len(questions) != len(gold.order) else gold.order
        if len(found) != len(ids):
            raise DataError(
                f"{source}: {len(found):,} predictions without ids, but the references have {len(ids):,} records. "
                "Allowed is one per record, in their order. Add the others, or give predictions with ids."
            )
        pairs = zip(ids, found, strict=True)
        return {key: value for key, value in pairs if key in questions and value is not None}
    written = {f"{example.meta.get('source_task', part)}/{key}": key for key, example in questions.items()}
    return {written.get(key, key): value for key, value in found.items()}


def _split_settings(
    settings: Mapping[str, Any], recipe: Mapping[str, Any]
) -> tuple[dict[str, str], tuple[str, ...], dict[str, Any], bool]:
    """Split settings into columns, header, the options of the task, and whether data.on_bad_record is skip.

    Args:
        recipe: the sections task and data of a recipe, over which the settings win; {} without one.
    """
    data = recipe.get("data", {})
    columns: dict[str, str] = {**(data.get("columns") or {})}
    header = tuple(cast("Iterable[str]", parse_listed_names(data.get("header") or [])))
    skips = data.get("on_bad_record") == "skip"
    options = Layers()
    options.add_table({"task": recipe.get("task", {})}, where="the recipe")
    for key, value in settings.items():
        if key.startswith("data.columns."):
            columns[key.removeprefix("data.columns.")] = str(value)
        elif key == "data.header":
            header = tuple(cast("Iterable[str]", parse_listed_names(value)))
        elif key.startswith("task."):
            options.add_overrides({key: value})
        elif key == "data.on_bad_record" and value in ("fail", "skip"):
            skips = value == "skip"
        else:
            raise ConfigError(
                f"--{key}: not a setting of score. Allowed: --data.columns.NAME COLUMN, --header NAMES, "
                "--data.on_bad_record fail or skip, --task.OPTION VALUE."
            )
    return columns, header, options.to_dict().get("task", {}), skips


def _read_references(
    task: Task, source: str, columns: Mapping[str, str], header: Sequence[str], *, skips: bool
) -> GoldSet:
    """Read the questions of a file with their gold answers. Raises DataError at a bad record unless `skips`."""
    from fivetune.data.readers.records import (  # readers of many formats, not for --help
        as_bad_record,
        read_records,
        refuse_duplicate_ids,
    )

    gold = GoldSet()
    on_bad = gold.skip if skips else None
    try:
        records = read_records(source, columns=columns, header=header, on_bad=on_bad)
        for record in refuse_duplicate_ids(records, on_bad=on_bad):
            gold.order.append(str(record.fields["id"]))
            try:
                converted = task.to_score(record)
            except DataError as error:
                if not skips:
                    raise
                gold.skipped.append(as_bad_record(error, record))
                continue
            if not converted:
                gold.left_out.add(str(record.fields["id"]))
                continue
            examples = converted if isinstance(converted, tuple) else (converted,)
            gold.order[-1] = examples[0].group or examples[0].id
            for example in examples:
                gold.questions.setdefault(example.group or example.id, example)
    except RecordError as error:
        advice = " To leave such records out, give --data.on_bad_record skip." if error.skippable else ""
        raise DataError(f"{error}{advice}") from None
    if not gold.questions:
        raise DataError(f"{source}: contains no gold answers to score against. Give a file with questions and answers.")
    return gold


def _warn_about_golds(task: Task, gold: GoldSet, source: str) -> None:
    """Warn of properties of the gold answers that distort the scores."""
    if gold.skipped:
        first = gold.skipped[0]
        print_warning(f"{source}: {len(gold.skipped):,} records cannot be used, first {first}")
    num_dropped = sum(DROPPED_SYNONYMS in example.meta for example in gold.questions.values())
    if num_dropped:
        print_warning(
            f"{source}: {num_dropped:,} questions have blank synonyms among their gold answers; they are dropped"
        )
    references = [example.references for example in gold.questions.values()]
    if language := suggest_language(task, references):
        print_warning(
            f"{source}: the gold answers are in the script of {language!r}, whose words the scores do not separate. "
            f"Add --task.language {language}"
        )


def _compare_ids(gold: GoldSet, found: dict[str, Any], source: str, *, missing_is_error: bool) -> None:
    """Raise DataError for missing ids unless they count as wrong; print a warning about surplus ones."""
    ids = list(gold.questions)
    missing = [key for key in ids if key not in found]
    skipped = found.keys() & gold.left_out
    surplus = found.keys() - set(ids) - skipped
    if missing and missing_is_error:
        advice = "Add them, or count them as wrong with --missing wrong."
        if len(missing) == len(ids):  # a wrong file is likelier than no answer at all
            advice = "No id matches: these are the predictions of another data file."
            if skipped:
                advice = (
                    f"The {len(skipped)} answers whose ids match are to records that the task leaves out. Give the "
                    "task of these answers, or add those of this one."
                )
        raise DataError(
            f"{source}: {len(missing)} of {len(ids)} questions are missing, first {_format_first_ids(missing)}. "
            f"{advice}"
        )
    if missing:
        print_warning(f"{source}: {len(missing)} of {len(ids)} questions are missing and count as wrong")
    if skipped:
        first = _format_first_ids([key for key in found if key in skipped])
        print_warning(
            f"{source}: {len(skipped)} ids are of records that the task leaves out, first {first}; not scored"
        )
    if surplus:
        first = _format_first_ids([key for key in found if key in surplus])
        print_warning(f"{source}: {len(surplus)} ids are not in the data, first {first}; left out")


def _format_first_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (" ..." if len(ids) > 3 else "")


def _print_differences(differences: Mapping[str, Difference], ours: Scores, theirs: Scores) -> None:
    from fivetune.scores.analysis.bootstrap import format_p_value

    rows: list[list[str]] = []
    for name, (difference, low, high, p_value) in differences.items():
        values = [f"{ours.corpus[name]:.2f}", f"{theirs.corpus[name]:.2f}", f"{difference:+.2f}"]
        rows.append([name, *values, f"{low:+.2f} to {high:+.2f}", format_p_value(p_value)])
    print()
    print_table(("difference", "these", "against", "change", "95 % interval", "p"), rows)
