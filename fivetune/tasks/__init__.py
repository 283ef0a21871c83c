"""Tasks, one per file: a raw record in, a TextExample out, and back from the model's text to an answer.

A task's file has a docstring with source, licence and one real record, one frozen options class (a `TaskOptions`) and
its `SAMPLE`:

    version                  class variable, raised whenever the same record would give another example
    metrics, main_metric     metrics that score it; the score that chooses the best checkpoint
    no_answer_text           target text of an unanswerable question, None where there are none
    labels                   label -> target text, None for free text; labels are scored, nothing is generated
    head                     an option of extractive tasks: "extractive" lets the model point at the answer
    extractive               whether answers are parts of `inputs[slice(*clippable)]`
    merging                  how the answers of examples with the same `group` become one: the "best", or "ranked"
    to_text(record, *, labelled=True) -> TextExample, several of them (one for each snippet), or None
                             None: left out on purpose. A bad record raises RecordError.
                             labelled=False (prediction) lets the answers be absent: references (), targets "".
    from_text(text)          the model's text as an answer
    to_score(record)         question and right answers for `fivetune score`; what only the model reads may lack
    from_answer(text)        a prediction of a file in the form of the references; the text itself unless there are
                             several ways to write it
    train_targets(example)   targets to train on: each gives one training example
    SAMPLE                   (RawRecord, TextExample) that it must convert to

What they share is below: templates, columns, labels; what question-answering tasks share is in `_questions.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field

from fivetune.config.layers import parse_table
from fivetune.errors import DataError, MissingLabelError, RecordError
from fivetune.metrics import MetricSpec, list_selectable_scores
from fivetune.metrics.mlqa import detect_script_language
from fivetune.plugins import Options
from fivetune.types import JsonTable, RawRecord, TextExample

Head = Literal["generate", "extractive"]
Merging = Literal["best", "ranked"]
DROPPED_SYNONYMS = "num_blank_synonyms"  # in `meta`: blank ones among the right answers of a golden file
ConversionResult = TextExample | tuple[TextExample, ...] | None


class Task(Protocol):
    """What the options class of every file in this folder offers."""

    version: ClassVar[int]

    model_fields: ClassVar[dict[str, Any]]

    @classmethod
    def plugin_name(cls) -> str: ...
    def model_dump(self, *, mode: str = ...) -> JsonTable: ...
    @property
    def metrics(self) -> tuple[MetricSpec, ...]: ...
    @property
    def main_metric(self) -> str: ...
    @property
    def no_answer_text(self) -> str | None: ...
    @property
    def labels(self) -> Mapping[str, str] | None: ...
    @property
    def extractive(self) -> bool: ...
    @property
    def merging(self) -> Merging: ...
    def to_text(self, record: RawRecord, *, labelled: bool = True) -> ConversionResult: ...
    def from_text(self, text: str) -> str: ...
    def to_score(self, record: RawRecord) -> ConversionResult: ...
    def from_answer(self, text: str) -> str: ...
    def train_targets(self, example: TextExample) -> tuple[str, ...]: ...


class _DefaultOptions(Options):
    """What most tasks have in common, whatever they answer with."""

    @property
    def no_answer_text(self) -> str | None:
        return None

    @property
    def extractive(self) -> bool:
        return False

    @property
    def merging(self) -> Merging:
        return "best"

    def from_text(self, text: str) -> str:
        """The model's text without surrounding space."""
        return text.strip()

    def list_selectable_scores(self: Task) -> tuple[str, ...]:
        """The scores that eval.metric may name."""
        return list_selectable_scores(self.metrics)

    def to_score(self: Task, record: RawRecord) -> ConversionResult:
        """The question with its right answers."""
        return self.to_text(record)

    def from_answer(self, text: str) -> str:
        """The prediction as it stands."""
        return text

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The example's target."""
        if not example.targets:
            raise DataError(f"{example.id}: there is no target to learn. Train on records that have targets.")
        return (example.targets,)


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Return a label set if it has two labels at least, each with a word of its own; else raise ValueError."""
    words = [normalize_label(word) for word in labels.values()]
    if (
        len(labels) < 2
        or not all(words)
        or len(set(words)) < len(words)
        or len({*map(normalize_label, labels)}) < len(words)
    ):
        raise ValueError(
            f"{labels} is no label set. It needs two labels or more, each with a word of its own, such as "
            "{HQ: high, LQ: low}; upper and lower case are the same"
        )
    return labels


def normalize_label(text: str) -> str:
    """A label in the form in which two writings of it are equal: case and white space do not count."""
    return " ".join(text.split()).casefold()


def is_missing_label(text: str) -> bool:
    """Whether a label is blank, or what pandas writes for an empty cell.

    >>> is_missing_label("NaN"), is_missing_label(" "), is_missing_label("none")
    (True, True, False)
    """
    return text.strip() in ("", "nan", "NaN")


Labels = Annotated[dict[str, str], BeforeValidator(parse_table), AfterValidator(check_labels)]


class TaskOptions(_DefaultOptions):
    """Base of most tasks: free text, every question has an answer, the target is learnt."""

    @property
    def labels(self) -> Mapping[str, str] | None:
        return None


class LabelOptions(_DefaultOptions):
    """Base of classification: the target is the word of a label, references and answers hold the label itself."""

    metrics: ClassVar[tuple[MetricSpec, ...]] = ("classification",)
    main_metric: ClassVar[str] = "accuracy"

    labels: Labels = Field(default={}, description="label as the data has it: word that the model learns for it")

    def from_text(self, text: str) -> str:
        """The label whose word the model wrote, else the text; case and space do not count."""
        words = {normalize_label(word): label for label, word in self.labels.items()}
        return words.get(normalize_label(text), text.strip())

    def from_answer(self, text: str) -> str:
        """The label that a text names, itself or by the word that is learnt for it, in any case; else the text."""
        return self._find_label(text) or self.from_text(text)

    def build_example(
        self, record: RawRecord, name: str, inputs: str, clippable: tuple[int, int], *, labelled: bool
    ) -> TextExample:
        """The example of a record whose label stands in the column `name`.

        Raises RecordError for a label outside the set; one that need not be there is then not looked at.
        """
        meta = {"labels": list(self.labels)}
        value = get_column(record, name) if labelled else record.fields.get(name)
        given = "" if value is None else str(value).strip()
        label = self._find_label(given)
        if label is not None:
            return TextExample(get_record_id(record), inputs, self.labels[label], (label,), clippable, meta)
        if not labelled:
            return TextExample(get_record_id(record), inputs, "", (), clippable, meta)
        error_class = MissingLabelError if is_missing_label(given) else RecordError
        raise error_class(
            record.where,
            f"{name} is {shorten_repr(given)}, which is no label. Labels: {', '.join(self.labels)}. Set "
            "task.labels to those of the data, as {label: word}.",
        )

    def _find_label(self, text: str) -> str | None:
        """The label that a text is, None for any other and for a blank one."""
        return {normalize_label(own): own for own in self.labels if own.strip()}.get(normalize_label(text))


def suggest_language(task: Task, references: Iterable[Sequence[str]]) -> str | None:
    """The `task.language` that gold answers need to be scored by words, None where the task has it or has none."""
    if "language" not in type(task).model_fields or getattr(task, "language", None):
        return None
    return detect_script_language([golds[0] for golds in references if golds and golds[0].strip()])


def head_of(task: Task) -> Head:
    """Whether the model writes the answer or points at it: the task's option `head`, if it has one."""
    return getattr(task, "head", "generate")


# --- templates ---


def parse_template(template: str) -> list[tuple[str, str | None]]:
    """A template as (literal, column or None) pairs; a doubled brace is a brace. Raises ValueError.

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
    """Names of the columns in a template, each once; raises ValueError if none is or one stands twice.

    >>> list_template_columns("question: {question} context: {context}")
    ['question', 'context']
    """
    columns = [name for _, name in parse_template(template) if name is not None]
    if not columns:
        raise ValueError(
            f"template {template!r} names no column: every record would read the same. Write one as {{column}}"
        )
    twice = [name for name in columns if columns.count(name) > 1]
    if twice:
        raise ValueError(f"template {template!r} names {{{twice[0]}}} twice. Keep one")
    return columns


def check_template(template: str) -> str:
    """Return the template if it names columns; else raise ValueError."""
    list_template_columns(template)
    return template


def fill_template(template: str, values: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template; also return where each value lies in the result, as [start, end).

    >>> fill_template("q: {question} c: {context}", {"question": "Who?", "context": "Rollo."})
    ('q: Who? c: Rollo.', {'question': (3, 7), 'context': (11, 17)})
    """
    text = ""
    spans: dict[str, tuple[int, int]] = {}
    for literal, name in parse_template(template):
        text += literal
        if name is not None:
            spans[name] = (len(text), len(text) + len(values[name]))
            text += values[name]
    return text, spans


def fill_from_record(record: RawRecord, template: str) -> tuple[str, dict[str, tuple[int, int]]]:
    """`fill_template` with the columns of a record: text and numbers. Raises RecordError for others, or if all are
    blank."""
    values: dict[str, str] = {}
    for name in list_template_columns(template):
        value = get_column(record, name)
        if not isinstance(value, str | int | float):
            raise RecordError(record.where, f"{name} is {value!r}. It must be text or a number.")
        values[name] = str(value)
    if not "".join(values.values()).strip():
        raise RecordError(record.where, f"{', '.join(values)} is empty. Give it a text.")
    return fill_template(template, values)


# --- columns ---


def get_column(record: RawRecord, name: str) -> Any:
    """The value of a column; raises RecordError that names the existing ones."""
    if name not in record.fields:
        raise RecordError(record.where, describe_absent_column(record, name))
    return record.fields[name]


def get_text(record: RawRecord, name: str) -> str:
    """The value of a column that must hold text which is not blank."""
    value = get_column(record, name)
    if not isinstance(value, str):
        raise RecordError(record.where, f"{name} is {shorten_repr(value)}. It must be text.")
    if not value.strip():
        raise RecordError(record.where, f"{name} is empty. Give it a text.")
    return value


def is_blank(record: RawRecord, name: str) -> bool:
    """Whether a column is absent or holds nothing: null, blank text, an empty list."""
    value = record.fields.get(name)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def get_record_id(record: RawRecord) -> str:
    """The column `id` as text; where there is none, the record's place in its file."""
    value = record.fields.get("id")
    return record.where if value is None or value == "" else str(value)


def describe_absent_column(record: RawRecord, name: str) -> str:
    """The reason for a record that lacks a column, with the columns that it has."""
    existing = ", ".join(str(key) for key in record.fields if key != "id" or record.has_own_id) or "none"
    return (
        f"there is no column {name!r}. Columns: {existing}. "
        f"If one of them is meant, name it: data.columns: {{{name}: ITS NAME}}."
    )


def shorten_repr(value: object) -> str:
    """A value as messages show it: its repr, cut at 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- answers in texts ---


def find_text(text: str, wanted: str, low: int = 0, high: int | None = None) -> tuple[int, int] | None:
    """The characters [start, end) of `text[low:high]` where `wanted` stands first, upper and lower case apart.

    None if it does not stand there; the empty text stands nowhere.

    >>> find_text("Die Straße in Köln", "köln"), find_text("Die Straße in Köln", "köln", high=17)
    ((14, 18), None)
    """
    if not wanted:
        return None
    found = re.compile(re.escape(wanted), re.IGNORECASE).search(text, low, len(text) if high is None else high)
    return found.span() if found else None
