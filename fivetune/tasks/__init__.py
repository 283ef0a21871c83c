"""Tasks, one per file: convert a raw record to a TextExample, and the model's text to an answer.

A task's file has a docstring with source, licence and one real record, one frozen options class (a `TaskOptions`) and
its `SAMPLE`:

    version                  class variable, increased whenever the same record would give another example
    metrics, main_metric     metrics that score it; the score that chooses the best checkpoint
    no_answer_text           target text of an unanswerable question, None if the task has no such questions
    labels                   label -> target text, None for free text; labels are scored, not generated
    head                     an option of extractive tasks: "generate" the answer, or predict its span ("extractive")
    extractive               whether answers are parts of `inputs[slice(*clippable)]`
    merging                  how the answers of examples with the same `group` are merged: "best" or "ranked"
    part_tasks               the tasks of a mixture's parts, () for other tasks
    to_text(record, *, labelled=True) -> TextExample, a tuple of them (one per snippet), or None
                             None: left out on purpose. A bad record raises RecordError.
                             labelled=False (prediction): answers may be absent; then references (), targets "".
    from_text(text)          converts the model's text to an answer
    to_score(record)         question and gold answers for `fivetune score`; the inputs may be absent
    from_answer(text)        converts a prediction of a file to the form of the references, if it has another one
    train_targets(example)   targets to train on: each gives one training example
    SAMPLE                   a RawRecord, and the TextExample that `to_text` must return for it

Shared code: templates, columns and labels below, question answering in `_questions.py`, posts in `_posts.py`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fivetune.config import describe_error
from fivetune.config.layers import Layers, parse_table
from fivetune.errors import AbsentColumnError, ConfigError, DataError, MissingLabelError, RecordError
from fivetune.plugins import Options, import_plugin, load_plugin
from fivetune.scores.metrics import is_maximized, list_score_names, list_selectable_scores
from fivetune.scores.metrics.mlqa import detect_script_language
from fivetune.types import ConversionResult, Merging, MetricSpec, RawRecord, Task, TextExample

Head = Literal["generate", "extractive"]
DROPPED_SYNONYMS = "num_blank_synonyms"  # key of `meta`: number of blank synonyms dropped from the gold answers
LABEL_FORM = "label_form"  # key of `meta`: the label as the record has it, if it differs from the label
MAX_NESTED_NAMES = 6  # that a message lists
MAX_NAMES, MAX_NAME_CHARS = 20, 80  # of the columns that a message lists
INVISIBLE_IN_LABELS = re.compile(  # soft hyphen, joiners, marks of direction, byte order mark, variation selectors
    "[\u00ad\u034f\u061c\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufe00-\ufe0f\ufeff]"
)


class _DefaultOptions(Options):
    """Defaults of all tasks, with labels or free text."""

    metrics: ClassVar[tuple[MetricSpec, ...]]
    main_metric: ClassVar[str]

    @property
    def no_answer_text(self) -> str | None:
        return None

    @property
    def extractive(self) -> bool:
        return False

    @property
    def merging(self) -> Merging:
        return "best"

    @property
    def part_tasks(self) -> tuple[Task, ...]:
        return ()

    def from_text(self, text: str) -> str:
        """Return the model's text without surrounding space."""
        return text.strip()

    def list_selectable_scores(self: Task) -> tuple[str, ...]:
        """Return the scores that eval.metric may name."""
        return list_selectable_scores(self.metrics)

    def to_score(self: Task, record: RawRecord) -> ConversionResult:
        """Return the question with its gold answers."""
        return self.to_text(record)

    def from_answer(self, text: str) -> str:
        """Return the prediction unchanged."""
        return text

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """Return the example's target. Raises DataError if it has none."""
        if not example.targets:
            raise DataError(f"{example.id}: there is no target to learn. Train on records that have targets.")
        return (example.targets,)


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return a label set if it has at least two labels with distinct words; else raise ValueError."""
    words = {*map(normalize_label, labels.values())}
    names = {*map(normalize_label, labels)}
    if len(labels) < 2 or "" in words or min(len(words), len(names)) < len(labels):
        raise ValueError(
            f"{labels} is not a label set. It needs two labels or more with distinct words, such as "
            "{HQ: high, LQ: low}; case is ignored"
        )
    return labels


def normalize_label(text: str) -> str:
    """Casefold a label, collapse its white space and remove invisible characters, so that its spellings compare equal.

    >>> normalize_label("New\u00a0 York\u200b"), normalize_label("Cafe\u0301") == normalize_label("CAF\u00c9")
    ('new york', True)
    """
    visible = INVISIBLE_IN_LABELS.sub("", unicodedata.normalize("NFC", text))
    return " ".join((visible if visible.strip() else text).split()).casefold()


def is_missing_label(text: str) -> bool:
    """Return whether a label is blank or nan, which pandas writes for an empty cell.

    >>> is_missing_label("NaN"), is_missing_label(" "), is_missing_label("none")
    (True, True, False)
    """
    return text.strip() in ("", "nan", "NaN")


Labels = Annotated[dict[str, str], BeforeValidator(parse_table), AfterValidator(check_labels)]


class TaskOptions(_DefaultOptions):
    """Base of tasks with free text as answers; by default every question has an answer and a target."""

    @property
    def labels(self) -> Mapping[str, str] | None:
        return None


class LabelOptions(_DefaultOptions):
    """Base of label tasks: the target is the word of a label; references and answers are the label itself."""

    metrics = ("classification",)
    main_metric = "accuracy"

    labels: Labels = Field(default={}, description="label in the data: target word")

    def from_text(self, text: str) -> str:
        """Return the label whose word the model wrote, else the text; case and white space are ignored."""
        words = {normalize_label(word): label for label, word in self.labels.items()}
        return words.get(normalize_label(text), text.strip())

    def from_answer(self, text: str) -> str:
        """Return the label that a text gives, by name or by target word, ignoring case; else the text."""
        return self._find_label(text) or self.from_text(text)

    def build_example(
        self, record: RawRecord, name: str, inputs: str, clippable: tuple[int, int], *, labelled: bool
    ) -> TextExample:
        """Build the example of a record whose label is in the column `name`.

        Raises RecordError for a label outside the set, MissingLabelError for a blank one; if not `labelled`, both give
        an example without references.
        """
        meta: dict[str, object] = {"labels": list(self.labels)}
        value = get_column(record, name) if labelled else record.fields.get(name)
        given = "" if value is None else str(value).strip()
        label = self._find_label(given)
        if label is not None:
            if str(value) != label:
                meta[LABEL_FORM] = str(value)
            return TextExample(get_record_id(record), inputs, self.labels[label], (label,), clippable, meta)
        if not labelled:
            return TextExample(get_record_id(record), inputs, "", (), clippable, meta)
        shown = shorten_repr(None if value is None else given)
        error_class = MissingLabelError if is_missing_label(given) else RecordError
        raise error_class(
            record.where,
            f"{name} is {shown}, which is not a label. Labels: {', '.join(self.labels)}. Set "
            "task.labels to those of the data, as {label: word}.",
        )

    def _find_label(self, text: str) -> str | None:
        """Return the label that a text spells, else None."""
        known = {normalize_label(own): own for own in self.labels if own.strip()}
        return known.get(normalize_label(text))


def load_task(name: str, options: Mapping[str, object]) -> Task:
    """Load a task by name with its options, outside a recipe. Raises ConfigError as `load_config` does."""
    plugin = load_plugin("tasks", name)
    try:
        return plugin.model_validate(dict(options))
    except ValidationError as error:
        layers = Layers()
        layers.add_table({"task": {"name": name, **options}}, where="task")
        located = [{**e, "loc": ("task", *e["loc"])} for e in error.errors()]
        raise ConfigError("\n".join(describe_error(e, layers) for e in located)) from None


def load_run_task(config: Mapping[str, Any]) -> Task | None:
    """The task of a run with its options, from its config.yaml; None if this version does not understand them."""
    section = config.get("task")
    if not isinstance(section, Mapping):
        return None
    table: dict[str, Any] = {**section}
    try:
        return load_plugin("tasks", table.pop("name", "")).model_validate(table)
    except (ValueError, ConfigError):
        return None


def is_higher_better(configs: Iterable[Mapping[str, Any]], score: str) -> bool:
    """Whether more is better of a score, by the first task of these runs that has it; True where that is unknown.

    >>> is_higher_better([{"task": {"name": "squad"}}], "f1"), is_higher_better([], "error")
    (True, True)
    """
    for config in configs:
        task = load_run_task(config)
        if task and score in list_score_names(task.metrics):
            return is_maximized(task.metrics, score)
    return True


def suggest_language(task: Task, references: Iterable[Sequence[str]]) -> str | None:
    """Return the `task.language` that scoring these gold answers needs; None if it is set or not an option."""
    if getattr(task, "language", "no setting"):
        return None
    return detect_script_language([golds[0] for golds in references if golds and golds[0].strip()])


def head_of(task: Task) -> Head:
    """Return the task's option `head`, "generate" if it has none."""
    return getattr(task, "head", "generate")


def has_sentinels(task: Task) -> bool:
    """Return whether a task learns to write tokens <extra_id_N> from texts without labels, as span corruption does."""
    return getattr(task, "writes_sentinels", False)


# --- templates ---


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """Parse a template into (literal, column or None) pairs; a doubled brace is a literal one. Raises ValueError.

    >>> parse_template("question: {question} {{x}}")
    [('question: ', 'question'), (' {', None), ('x}', None)]
    """
    pieces: list[tuple[str, str | None]] = []
    try:
        for literal, name, spec, conversion in Formatter().parse(template):
            if name is not None and (spec or conversion or not name):
                raise ValueError("only {column} with a plain name")
            pieces.append((literal, name))
    except ValueError as error:
        raise ValueError(
            f"template {template!r}: {error}. Write a column as {{column}}, a brace as {{{{ or }}}}"
        ) from None
    return pieces


def list_template_columns(template: str) -> list[str]:
    """Return the columns of a template. Raises ValueError if it has none, or one twice.

    >>> list_template_columns("question: {question} context: {context}")
    ['question', 'context']
    """
    columns = [name for _, name in parse_template(template) if name is not None]
    if not columns:
        raise ValueError(
            f"template {template!r} names no column: all records would have the same text. Write one as {{column}}"
        )
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(f"template {template!r} names {{{twice[0]}}} twice. Keep one")
    return columns


def check_template(template: str) -> str:
    """Return the template if it names columns; else raise ValueError."""
    list_template_columns(template)
    return template


Template = Annotated[str, AfterValidator(check_template)]


def find_clippable(template: str, inputs: str) -> tuple[int, int]:
    """Return the characters [start, end) of filled inputs that may be clipped: all but the fixed text before the first
    column.

    >>> find_clippable("summarize: {text}", "summarize: Snow.")
    (11, 16)
    """
    return len(parse_template(template)[0][0]), len(inputs)


def fill_template(template: str, values: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template; return the text, and the characters [start, end) of each value.

    >>> fill_template("q: {question} c: {context}", {"question": "Who?", "context": "Rollo."})
    ('q: Who? c: Rollo.', {'question': (3, 7), 'context': (11, 17)})
    """
    text = ""
    spans: dict[str, tuple[int, int]] = {}
    for literal, name in parse_template(template):
        text += literal
        if name is not None:
            start = len(text)
            text += values[name]
            spans[name] = (start, len(text))
    return text, spans


def fill_from_record(record: RawRecord, template: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template with texts and numbers of a record. Raises RecordError for other values, or if all are blank."""
    values: dict[str, str] = {}
    for name in list_template_columns(template):
        value = get_column(record, name)
        if not isinstance(value, str | int | float):
            wrong = f"{name} is {shorten_repr(value)}. It must be text or a number."
            raise RecordError(
                record.where, wrong + f" All of it as one text is {name}.*." * isinstance(value, list | dict)
            )
        values[name] = str(value)
    if not "".join(values.values()).strip():
        raise RecordError(record.where, f"{', '.join(values)} is empty. Give it a text.")
    return fill_template(template, values)


# --- columns ---


def fill_absent_inputs(record: RawRecord, template: str, gold: Iterable[str]) -> RawRecord:
    """Return a record to score: columns of the template that it lacks hold a dash. Raises AbsentColumnError for
    columns of the gold answer.

    >>> fill_absent_inputs(RawRecord({"tags": "a"}, "a.csv:2"), "{text} {tags}", ["tags"]).fields
    {'text': '-', 'tags': 'a'}
    """
    for name in gold:  # before the dashes, which are no columns of the file
        get_column(record, name)
    absent = [name for name in list_template_columns(template) if name not in record.fields]
    return replace(record, fields={**dict.fromkeys(absent, "-"), **record.fields})


def list_input_columns(task: Task) -> dict[str, object]:
    """List the columns of a task's template, else of its SAMPLE, each with an example value; {} if it has neither.

    >>> list_input_columns(load_task("jsonl", {"inputs": "summarize: {article}"}))
    {'article': 'a text'}
    """
    sample = getattr(import_plugin("tasks", task.plugin_name()), "SAMPLE", None)  # a user's own task may lack it
    known = sample[0].fields if sample else {}
    template = getattr(task, "inputs", None) or getattr(task, "template", None)
    names = list_template_columns(template) if isinstance(template, str) else [n for n in known if n != "id"]
    return {name: known.get(name, "a text") for name in names}


def find_needed_columns(task: Task) -> dict[str, object]:
    """Find the fewest columns that a task makes inputs from, each with an example value.

    >>> list(find_needed_columns(load_task("squad_v2", {}))), list(find_needed_columns(load_task("gsm8k", {})))
    (['question', 'context'], ['question'])
    """
    needed = list_input_columns(task)
    for name in reversed(list(needed)):
        rest = {key: value for key, value in needed.items() if key != name}
        needed = rest if rest and convert_inputs(task, rest) else needed
    return needed


def convert_inputs(task: Task, fields: Mapping[str, object]) -> list[str]:
    """Convert a record without its answer to inputs; [] if the task refuses it."""
    try:
        found = task.to_text(RawRecord({"id": "1", **fields}, "sample"), labelled=False)
    except Exception:  # a user's own task may fail in its own way at values that are examples
        return []
    examples = found if isinstance(found, tuple) else (found,)
    return [one.inputs for one in examples if one is not None]


def get_column(record: RawRecord, name: str) -> Any:
    """Return the value of a column. Raises AbsentColumnError with the existing columns."""
    if name not in record.fields:
        raise AbsentColumnError(record.where, describe_absent_column(record, name))
    return record.fields[name]


def get_text(record: RawRecord, name: str) -> str:
    """Return the text of a column. Raises RecordError if it is absent, not text, or blank."""
    value = get_column(record, name)
    if not isinstance(value, str):
        inside = _describe_nested_names({name: value}, name)
        raise RecordError(record.where, f"{name} is {shorten_repr(value)}. It must be text.{inside}")
    if not value.strip():
        raise RecordError(record.where, f"{name} is empty. Give it a text.")
    return value


def is_blank(record: RawRecord, name: str) -> bool:
    """Return whether a column is absent or empty: null, blank text, an empty list."""
    value = record.fields.get(name)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def get_record_id(record: RawRecord) -> str:
    """Return the column `id` as text; without one, the record's position in its file."""
    value = record.fields.get("id")
    return record.where if value is None or value == "" else str(value)


def describe_absent_column(record: RawRecord, name: str) -> str:
    """Return the error for an absent column, with the existing ones."""
    names = [str(key).replace("\n", "\\n") for key in record.fields if key != "id" or record.has_own_id]
    existing = list_names(names)
    near = get_close_matches(name, names, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    inside = _describe_nested_names(record.fields, name)
    return (
        f"there is no column {name!r}. {hint}Columns: {existing}. If one of them is meant, name it: data.columns: "
        f"{{{name}: {near[0] if near else 'ITS NAME'}}}.{inside} If the file is for another task, choose that one: "
        "fivetune list tasks."
    )


def _describe_nested_names(fields: Mapping[str, object], name: str) -> str:
    found = list_nested_names(fields)[:MAX_NESTED_NAMES]
    if not found:
        return ""
    least = min(one.count(".") for one in found)
    shallow = [one for one in found if one.count(".") == least]
    chosen = shallow[0] if any(part.isdecimal() for part in shallow[0].split(".")) else shallow[-1]
    return f" Values inside have dotted names, such as {', '.join(found)}: data.columns: {{{name}: {chosen}}}."


def list_nested_names(fields: Mapping[str, object]) -> list[str]:
    """List the dotted names of texts and numbers inside objects and lists, of a list its first two items; of messages
    of a chat their contents.

    >>> list_nested_names({"id": "1", "question": {"stem": "Who?", "choices": [{"text": "Ann"}, {"text": "Bob"}]}})
    ['question.stem', 'question.choices.0.text', 'question.choices.1.text']
    >>> list_nested_names({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]})
    ['messages.0.content', 'messages.1.content']
    """
    found: list[str] = []

    def collect(value: object, path: str) -> None:
        if isinstance(value, Mapping):
            members = cast("Mapping[str, object]", value)
            speaker = next((key for key in ("role", "from") if key in members and len(members) > 1), None)
            for key, inner in members.items():
                if key != speaker:
                    collect(inner, f"{path}.{key}")
        elif isinstance(value, list | tuple):
            for place, inner in enumerate(cast("Sequence[object]", value)[:2]):
                collect(inner, f"{path}.{place}")
        elif value is not None and "." in path:
            found.append(path)

    for name, value in fields.items():
        collect(value, str(name))
    return [name for name in found if name.partition(".")[0] in fields and name not in fields]


def list_names(names: Iterable[str]) -> str:
    """List names of columns for messages: each on one line, cut to 80 characters; of more than 20 the first ones.

    >>> list_names(["text", "a" * 90])
    'text, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...'
    """
    listed = [name.replace("\n", "\\n") for name in names]
    shown = [name[:MAX_NAME_CHARS] + "..." * (len(name) > MAX_NAME_CHARS) for name in listed[:MAX_NAMES]]
    more = f" and {len(listed) - MAX_NAMES:,} more" if len(listed) > MAX_NAMES else ""
    return f"{', '.join(shown) or 'none'}{more}"


def shorten_repr(value: object) -> str:
    """Return the repr of a value for messages, truncated to 60 characters; null, true and false as files have them.

    >>> shorten_repr(None), shorten_repr("a")
    ('null', "'a'")
    """
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- answers in texts ---


def find_text(text: str, wanted: str, low: int = 0, high: int | None = None) -> tuple[int, int] | None:
    """Return the first occurrence [start, end) of `wanted` within `text[low:high]`, ignoring case; else None.

    Positions count from the start of `text`. The empty text never occurs.

    >>> find_text("Die Straße in Köln", "köln"), find_text("Die Straße in Köln", "köln", high=17)
    ((14, 18), None)
    """
    if not wanted:
        return None
    found = re.compile(re.escape(wanted), re.IGNORECASE).search(text, low, len(text) if high is None else high)
    return found.span() if found else None
