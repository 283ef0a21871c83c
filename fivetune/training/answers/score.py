"""Scores of predictions against gold answers, by a task's official metrics; no model is needed.

In: a task's name, or a recipe or run that has one, the gold answers, and predictions: files or tables and lists in
memory. Out: a ScoredPredictions.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from fivetune.config import load_layers
from fivetune.config.layers import Layers, parse_listed_names
from fivetune.config.recipes import is_run_directory
from fivetune.data.readers.source_files import BadRecord, quote_value
from fivetune.errors import ConfigError, DataError, RecordError
from fivetune.plugins import list_plugins
from fivetune.rundir.records import Prediction
from fivetune.scores.metrics import UNANSWERED, Scorer, drop_blank_golds, rewards_blank
from fivetune.scores.metrics.classification import ConfusionMatrix, choose_gold_labels
from fivetune.scores.metrics.gsm8k import describe_lenient_gap
from fivetune.tasks import DROPPED_SYNONYMS, load_task, suggest_language
from fivetune.tasks.mixture import Mixture
from fivetune.training.answers.score_file import Values, read_no_answer_scores, read_rankings
from fivetune.types import JsonTable, OnNote, Scores, Task, TextExample

if TYPE_CHECKING:
    from fivetune.scores.analysis.bootstrap import Difference

OTHER = "(other)"  # a prediction that is none of the labels, or missing
NO_SETTINGS: Mapping[str, object] = {}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ScoredPredictions:
    """The scores of predictions, as `fivetune.score` returns them.

    Args:
        scores: score by name, in the unit of its metric; most are percent.
        intervals: the edges of the 95 % bootstrap interval of each score that has one.
        against: the scores of the other predictions; {} without them.
        differences: score by name -> difference from the other predictions, with its interval and p-value.
        confusion: counts by gold and predicted label; None where the task has no labels.
        without_blank_golds: the scores without the questions that an empty prediction answers, and `num_questions`,
            their number; {} where there are none.
    """

    task: str
    num_examples: int
    scores: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    against: Mapping[str, float] = field(default_factory=dict[str, float])
    differences: Mapping[str, Difference] = field(default_factory=dict[str, "Difference"])
    confusion: ConfusionMatrix | None = None
    without_blank_golds: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def as_dict(self) -> JsonTable:
        """Return the JSON object that `fivetune score --json` prints."""
        table: JsonTable = {"task": self.task, "num_examples": self.num_examples, "scores": {**self.scores}}
        table["intervals"] = {**self.intervals}
        if self.against:
            table["against"] = {**self.against}
            table["differences"] = {name: difference._asdict() for name, difference in self.differences.items()}
        if self.confusion:
            table |= build_label_table(self.confusion)
        if self.without_blank_golds:
            table["without_blank_golds"] = {**self.without_blank_golds}
        return table


@dataclass(slots=True)
class GoldSet:
    """The questions to score by id, in the file's order, and the records that are not scored.

    Args:
        questions: the first example of each question.
        left_out: ids of records that do not belong to the task, such as other question types.
        skipped: records that cannot be used.
        order: for every record the id of its question, "" if the record cannot be read.
    """

    questions: dict[str, TextExample] = field(default_factory=dict[str, TextExample])
    left_out: set[str] = field(default_factory=set[str])
    skipped: list[BadRecord] = field(default_factory=list[BadRecord])
    order: list[str] = field(default_factory=list[str])

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be read."""
        self.skipped.append(bad)
        self.order.append("")


def score(
    task: str | Path,
    references: object = None,
    predictions: object = None,
    *,
    settings: Mapping[str, object] = NO_SETTINGS,
    no_answer_scores: str | Path | None = None,
    missing: Literal["error", "wrong"] = "error",
    raw: bool = False,
    against: object = None,
    on_warning: OnNote = warnings.warn,
) -> ScoredPredictions:
    """Score predictions against gold answers, by the metrics of a task. No model is needed.

    Args:
        task: name of a task, such as squad_v2, or a recipe or run, whose task it is.
        references: data with the gold answers: a file, a DataFrame, a data set of `datasets` or a list of records.
            None: data.eval of the recipe or run.
        predictions: a file in any form that `fivetune predict` writes; what `TrainedRun.predict` returns; a DataFrame
            with id and prediction; {id: text}; or a list of texts, one per record in their order.
        settings: dotted settings of task and data.columns, data.header, data.on_bad_record; they win over the recipe's.
        no_answer_scores: file of {id: number}, which gives the best thresholds of squad_v2.
        missing: a question without a prediction is an error, or counts as wrong.
        raw: the predictions are raw output of a model, which the task converts to answers first.
        against: other predictions of the same questions, for the difference.
        on_warning: called with a sentence for whatever distorts the scores.

    Returns the scores with 95 % intervals. Raises ConfigError for a setting without effect, DataError for unusable
    files and for ids that do not match.

    >>> gold = [{"text": "late", "label": "delivery"}, {"text": "money back", "label": "refund"}]
    >>> found = score("classification", gold, ["delivery", "delivery"])
    >>> found.scores["accuracy"], found.num_examples
    (50.0, 2)
    """
    name = str(task)
    recipe = _read_recipe(name)
    # Settings win over the recipe's; a part of a mixture is scored as the task that it is.
    columns, header, options, skips = _split_settings(settings, recipe)
    gold_source = _find_references(name, recipe) if references is None else references
    name = options.pop("name", name)
    own = load_task(name, options)
    part = None
    if isinstance(own, Mixture) and (part := own.part):
        own = own.parts[part].task
    if no_answer_scores and own.no_answer_text is None:
        raise ConfigError(f"--no-answer-scores: {name} has no unanswerable questions. Drop it, or score squad_v2.")
    with _write_values(on_warning) as (find_file, warn):
        # The questions to score, then what their file says that distorts scores.
        source = find_file(gold_source, "references")
        gold = _read_references(own, source, columns, header, skips=skips)
        questions = gold.questions
        _warn_about_golds(own, gold, source, warn)
        # Answers and no-answer scores, by the ids of the references.
        leanings: dict[str, float] = {}
        if no_answer_scores:
            place = str(no_answer_scores)
            leanings = _map_to_own_ids(read_no_answer_scores(place), gold, place, part)
            _compare_ids(gold, leanings, place, missing_is_error=True, on_warning=warn)

        def read_answers(place: str) -> list[list[str]]:
            found = _map_to_own_ids(read_rankings(place), gold, place, part)
            _compare_ids(gold, found, place, missing_is_error=missing == "error", on_warning=warn)
            num_withheld = list(found.values()).count([UNANSWERED])
            if num_withheld:
                warn(f"{place}: {num_withheld:,} answers are withheld as unsure and count as wrong")
            return _convert_rankings(own, questions, found, is_raw=raw, on_warning=warn)

        answer_file = find_file(predictions, "predictions")
        ranked = read_answers(answer_file)
        ours = _score_rankings(own, questions, ranked, leanings)
        theirs = None
        if against is not None:
            theirs = _score_rankings(own, questions, read_answers(find_file(against, "against")), {})
        # What the scores do not show by themselves.
        if words := describe_lenient_gap(ours.corpus):
            warn(words)
        confusion = _build_confusion(own, questions, ranked, answer_file, warn)
        without_blanks = _score_without_blanks(own, questions, ranked, leanings)
    from fivetune.scores.analysis.bootstrap import compare_paired, compute_intervals  # numpy, not for --help

    return ScoredPredictions(
        task=name,
        num_examples=len(questions),
        scores=ours.corpus,
        intervals=compute_intervals(ours),
        against=theirs.corpus if theirs else {},
        differences=compare_paired(ours, theirs) if theirs else {},
        confusion=confusion,
        without_blank_golds=without_blanks,
    )


@contextmanager
def _write_values(on_warning: OnNote) -> Generator[tuple[Callable[[object, str], str], OnNote]]:
    """Give a function that returns the file of values, which it writes if they are in memory, and one that warns.

    Both kinds of messages name the values, not their temporary files.
    """
    from fivetune.data.readers.tables import is_table, iter_rows, name_tables, save_table

    with tempfile.TemporaryDirectory(prefix="fivetune-score-") as folder:
        files: dict[Path, str] = {}

        def find_file(given: object, where: str) -> str:
            if isinstance(given, str | Path):
                return str(given)
            if is_table(given):
                if where == "references":  # the ids that `predict` gives records without one
                    given = [{"id": str(number), **row} for number, row in enumerate(iter_rows(given, where))]
                path = save_table(given, Path(folder), where)
            else:
                path = Path(folder, f"{where}.json")
                path.write_text(json.dumps(_list_answers(given, where)), encoding="utf-8")
            files[path] = where
            return str(path)

        def warn(text: str) -> None:
            for path, name in files.items():
                text = text.replace(str(path), name)
            on_warning(text)

        with name_tables(files):
            yield find_file, warn


def _list_answers(given: object, where: str) -> object:
    """List answers in memory in the form of a JSON file. Raises DataError for other values."""
    if isinstance(given, Mapping):
        return dict(cast("Mapping[str, object]", given))
    if not isinstance(given, Iterable):
        raise DataError(
            f"{where}: {type(given).__name__}. Allowed are a file, a table, {{id: text}} or texts in order."
        )
    answers: list[object] = []
    for one in cast("Iterable[object]", given):
        if isinstance(one, Prediction):
            kept = {"id": one.id, "prediction": one.prediction, "unsure": one.unsure, "skipped": one.skipped}
            answers.append(kept)
        else:
            answers.append(one)
    return answers


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
    found: Any = recipe["data"].get("eval")
    if isinstance(found, list) and len(cast("list[Any]", found)) == 1:
        found = cast("list[Any]", found)[0]
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


def _convert_rankings(
    task: Any,
    questions: Mapping[str, TextExample],
    found: Mapping[str, Sequence[str]],
    *,
    is_raw: bool,
    on_warning: OnNote,
) -> list[list[str]]:
    """Convert the answers to each question, best first, to the form of the references."""
    ranked: list[list[str]] = []
    readers: list[Task] = []
    for key, example in questions.items():
        # Of a mixture the task of the example's part converts its answers.
        reader = task.parts[example.meta["source_task"]].task if isinstance(task, Mixture) else task
        convert = reader.from_text if is_raw else reader.from_answer
        ranked.append([convert(text) for text in found.get(key, [UNANSWERED])])
        readers.append(reader)
    # Raw model output contains no-answer phrases, which would be scored as wrong answers.
    phrases: list[str | None] = []
    for reader, text in zip(readers, _select_first_answers(ranked), strict=True):
        if not is_raw and text.strip() and not reader.from_text(text):
            phrases.append(reader.no_answer_text)
    if phrases:
        on_warning(
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
    details: list[dict[str, Any]] = []
    for (key, example), texts in zip(questions.items(), ranked, strict=True):
        leaning = {"no_answer_score": leanings[key]} if leanings else {}
        details.append({**example.meta, **leaning, "candidates": texts})
    references = [example.references for example in questions.values()]
    return Scorer(task.metrics).score(_select_first_answers(ranked), references, details=details)


def _build_confusion(
    task: Task, questions: Mapping[str, TextExample], ranked: Sequence[Sequence[str]], source: str, on_warning: OnNote
) -> ConfusionMatrix | None:
    """Build the confusion matrix of a label task; None for other tasks. Other texts are reported and count as OTHER."""
    labels = tuple(task.labels or ())
    if not labels:
        return None
    said = _select_first_answers(ranked)
    outside = [text for text in said if text not in labels and text != UNANSWERED]
    if outside:
        on_warning(
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


def _warn_about_golds(task: Task, gold: GoldSet, source: str, on_warning: OnNote) -> None:
    """Warn of properties of the gold answers that distort the scores."""
    if gold.skipped:
        first = gold.skipped[0]
        on_warning(f"{source}: {len(gold.skipped):,} records cannot be used, first {first}")
    num_dropped = sum(DROPPED_SYNONYMS in example.meta for example in gold.questions.values())
    if num_dropped:
        on_warning(
            f"{source}: {num_dropped:,} questions have blank synonyms among their gold answers; they are dropped"
        )
    references = [example.references for example in gold.questions.values()]
    if language := suggest_language(task, references):
        on_warning(
            f"{source}: the gold answers are in the script of {language!r}, whose words the scores do not separate. "
            f"Add --task.language {language}"
        )


def _compare_ids(
    gold: GoldSet, found: dict[str, Any], source: str, *, missing_is_error: bool, on_warning: OnNote
) -> None:
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
        on_warning(f"{source}: {len(missing)} of {len(ids)} questions are missing and count as wrong")
    if skipped:
        first = _format_first_ids([key for key in found if key in skipped])
        on_warning(f"{source}: {len(skipped)} ids are of records that the task leaves out, first {first}; not scored")
    if surplus:
        first = _format_first_ids([key for key in found if key in surplus])
        on_warning(f"{source}: {len(surplus)} ids are not in the data, first {first}; left out")


def _format_first_ids(ids: Sequence[str]) -> str:
    return ", ".join(ids[:3]) + (" ..." if len(ids) > 3 else "")
