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
                             None: skipped on purpose. A bad record raises DataError with record.where and the column.
                             labelled=False (prediction) lets the answers be absent: references (), targets "".
    from_text(text)          the model's text as an answer
    to_score(record)         question and right answers for `fivetune score`; what only the model reads may lack
    from_answer(text)        a prediction of a file in the form of the references; the text itself unless there are
                             several ways to write it
    train_targets(example)   one training example for each
    SAMPLE                   (RawRecord, TextExample) that it must convert to

What they share is below: templates, columns, and the question-and-answer fields of SQuAD-like records.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field

from fivetune.config_layers import read_table
from fivetune.errors import DataError, nearest
from fivetune.metrics import Spec
from fivetune.metrics.mlqa import Language, language_code
from fivetune.plugins import Options
from fivetune.types import RawRecord, TextExample

SEPARATOR = " \\n "  # a backslash and an n: what UnifiedQA saw between the parts of a question
QA_FIELDS = ("question", "context", "title")
TrainAnswers = Literal["first", "all", "random"]
Head = Literal["generate", "extractive"]
Merging = Literal["best", "ranked"]
Converted = TextExample | tuple[TextExample, ...] | None


class Task(Protocol):
    """What the options class of every file in this folder offers."""

    version: ClassVar[int]

    @classmethod
    def plugin_name(cls) -> str: ...
    def model_dump(self, *, mode: str = ...) -> dict[str, Any]: ...
    @property
    def metrics(self) -> tuple[Spec, ...]: ...
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
    def to_text(self, record: RawRecord, *, labelled: bool = True) -> Converted: ...
    def from_text(self, text: str) -> str: ...
    def to_score(self, record: RawRecord) -> Converted: ...
    def from_answer(self, text: str) -> str: ...
    def train_targets(self, example: TextExample) -> tuple[str, ...]: ...


class _Defaults(Options):
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

    def to_score(self: Task, record: RawRecord) -> Converted:
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
    words = [_squeezed(word) for word in labels.values()]
    if len(labels) < 2 or not all(words) or len(set(words)) < len(words) or len({*map(_squeezed, labels)}) < len(words):
        raise ValueError(f"{labels} is no label set. It needs two labels or more, each with a word of its own, such as "
                         "{HQ: high, LQ: low}; upper and lower case are the same")  # fmt: skip
    return labels


def _squeezed(text: str) -> str:
    return " ".join(text.split()).casefold()


Labels = Annotated[dict[str, str], BeforeValidator(read_table), AfterValidator(check_labels)]


class TaskOptions(_Defaults):
    """Base of most tasks: free text, every question has an answer, the target is learnt."""

    @property
    def labels(self) -> Mapping[str, str] | None:
        return None


class LabelOptions(_Defaults):
    """Base of classification: the target is the word of a label, references and answers hold the label itself."""

    metrics: ClassVar[tuple[Spec, ...]] = ("classification",)
    main_metric: ClassVar[str] = "accuracy"

    labels: Labels = Field(default={}, description="label as the data has it: word that the model learns for it")

    def from_text(self, text: str) -> str:
        """The label whose word the model wrote, else the text; case and space do not count."""
        words = {_squeezed(word): label for label, word in self.labels.items()}
        return words.get(_squeezed(text), text.strip())

    def from_answer(self, text: str) -> str:
        """The label that a text names, itself or by the word that is learnt for it, in any case; else the text."""
        return self._label(text) or self.from_text(text)

    def example(
        self, record: RawRecord, name: str, inputs: str, clippable: tuple[int, int], *, labelled: bool
    ) -> TextExample:
        """The example of a record whose label stands in the column `name`.

        Raises DataError for a label outside the set; one that need not be there is then not looked at.
        """
        meta = {"labels": list(self.labels)}
        value = column(record, name) if labelled else record.fields.get(name)
        given = "" if value is None else str(value).strip()
        label = self._label(given)
        if label is not None:
            return TextExample(record_id(record), inputs, self.labels[label], (label,), clippable, meta)
        if not labelled:
            return TextExample(record_id(record), inputs, "", (), clippable, meta)
        raise DataError(
            f"{record.where}: {name} is {_shown(given)}, which is no label. Labels: {', '.join(self.labels)}. Set "
            "task.labels to those of the data, as {label: word}, or data.on_bad_record: skip."
        )

    def _label(self, text: str) -> str | None:
        """The label that a text is, None for any other and for a blank one."""
        return {_squeezed(own): own for own in self.labels if own.strip()}.get(_squeezed(text))


def head_of(task: Task) -> Head:
    """Whether the model writes the answer or points at it: the task's option `head`, if it has one."""
    return getattr(task, "head", "generate")


# --- templates ---


def template_pieces(template: str) -> list[tuple[str, str | None]]:
    """A template as (literal, column or None) pairs; a doubled brace is a brace. Raises ValueError.

    >>> template_pieces("question: {question} {{x}}")
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


def template_columns(template: str) -> list[str]:
    """Names of the columns in a template, each once; raises ValueError if none is or one stands twice.

    >>> template_columns("question: {question} context: {context}")
    ['question', 'context']
    """
    columns = [name for _, name in template_pieces(template) if name is not None]
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
    template_columns(template)
    return template


def check_qa_template(template: str) -> str:
    """Return the template if it has {question} and nothing but QA_FIELDS; else raise ValueError."""
    columns = template_columns(template)
    for name in columns:
        if name not in QA_FIELDS:
            raise ValueError(f"template {template!r}: there is no {{{name}}}. {nearest(name, QA_FIELDS)}")
    if "question" not in columns:
        raise ValueError(f"template {template!r} lacks {{question}}: the model would not see what is asked. Add it")
    return template


def fill(template: str, values: Mapping[str, str]) -> tuple[str, dict[str, tuple[int, int]]]:
    """Fill a template; also say where each value lies in the result, as [start, end).

    >>> fill("q: {question} c: {context}", {"question": "Who?", "context": "Rollo."})
    ('q: Who? c: Rollo.', {'question': (3, 7), 'context': (11, 17)})
    """
    text = ""
    spans: dict[str, tuple[int, int]] = {}
    for literal, name in template_pieces(template):
        text += literal
        if name is not None:
            spans[name] = (len(text), len(text) + len(values[name]))
            text += values[name]
    return text, spans


# --- columns ---


def column(record: RawRecord, name: str) -> Any:
    """The value of a column; raises DataError that names the existing ones."""
    if name not in record.fields:
        raise DataError(_missing(record, name))
    return record.fields[name]


def text_column(record: RawRecord, name: str) -> str:
    """The value of a column that must hold text which is not blank."""
    value = column(record, name)
    if not isinstance(value, str):
        raise DataError(f"{record.where}: {name} is {_shown(value)}. It must be text.")
    if not value.strip():
        raise DataError(f"{record.where}: {name} is empty. Give it a text, or set data.on_bad_record: skip.")
    return value


def is_blank(record: RawRecord, name: str) -> bool:
    """Whether a column is absent or holds nothing: null, blank text, an empty list."""
    value = record.fields.get(name)
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


def record_id(record: RawRecord) -> str:
    """The column `id` as text; where there is none, the record's place in its file."""
    value = record.fields.get("id")
    return record.where if value is None or value == "" else str(value)


def _missing(record: RawRecord, name: str) -> str:
    existing = ", ".join(str(key) for key in record.fields if key != "id" or record.has_own_id) or "none"
    return (
        f"{record.where}: there is no column {name!r}. Columns: {existing}. "
        f"If one of them is meant, say so with data.columns: {{{name}: its name}}."
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- questions and answers ---


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


def qa_inputs(record: RawRecord, template: str, *, padded: bool = False) -> tuple[str, tuple[int, int]]:
    """Fill a question-answering template from a record; with the span of the context, (0, 0) if it has none.

    `padded`: with the punctuation of every column set apart (`pad_punctuation`), single spaces between the columns.
    """
    names = template_columns(template)
    values = {name: text_column(record, name) for name in names if name != "title"}
    if "title" in names:
        values["title"] = str(column(record, "title") or "")
    if padded:
        values = {name: pad_punctuation(value).strip() for name, value in values.items()}
    inputs, spans = fill(template, values)
    return inputs, spans.get("context", (0, 0))


def pad_punctuation(text: str) -> str:
    """Spaces around everything but letters, numbers, marks and the underscore, runs of space as one.

    What the T5 paper's models of SQuAD read and write. Source: the SQuAD preprocessor of
    google-research/text-to-text-transfer-transformer.

    >>> pad_punctuation("the U.S. (1776)")
    'the U . S . ( 1776 ) '
    """
    spaced = re.sub(r"[^\w\s]", lambda m: m[0] if unicodedata.category(m[0])[0] == "M" else f" {m[0]} ", text)
    return re.sub(r"\s+", " ", spaced)


def qa_meta(record: RawRecord, language: str | None) -> dict[str, Any]:
    """What reports and metrics want to know of a question; the record's own `language` goes before the set's.

    Raises DataError where the set has a language, so that MLQA's rules apply, and the record's own is no code.
    """
    meta = {"title": str(record.fields.get("title") or ""), "question": record.fields["question"]}
    spoken = record.fields.get("language") or language
    if not spoken:
        return meta
    try:
        return {**meta, "language": language_code(str(spoken)) if language else str(spoken)}
    except ValueError as error:
        raise DataError(f"{record.where}: {error}. Correct it, or drop task.language.") from None


def told_span(record: RawRecord, context: tuple[int, int], *, head: Head) -> dict[str, list[int]]:
    """For the extractive head: where in the inputs the source says that the first answer stands, if it does.

    >>> told_span(RawRecord({"answers": {"text": ["Rollo"], "answer_start": [3]}}, "a.json:1"), (10, 50),
    ...           head="extractive")
    {'answer_span': [13, 18]}
    """
    answers = record.fields.get("answers")
    if head != "extractive" or not isinstance(answers, Mapping):
        return {}
    starts, texts = answers.get("answer_start"), answers.get("text")
    if not starts or not texts or not isinstance(starts[0], int) or not isinstance(texts[0], str):
        return {}
    return {"answer_span": [context[0] + starts[0], context[0] + starts[0] + len(texts[0])]}


def gold_answers(record: RawRecord) -> tuple[str, ...] | None:
    """All gold answers in source order; () if it says that there are none, None if it says nothing about answers.

    Read from `answers` as SQuAD has it ({"text": [...]}, a list of {"text": ...} or of texts, or any of these as JSON
    text), else from `answer` (one text, or a list). Raises DataError for what is neither, and if all answers are blank.
    Some blank ones beside others stay, as "": translated sets have them, and the v1.1 script counts them.

    >>> gold_answers(RawRecord({"answers": {"text": ["Rollo", "the Rollo"], "answer_start": [0, 5]}}, "dev.json:1"))
    ('Rollo', 'the Rollo')
    >>> gold_answers(RawRecord({"answers": '["1066"]'}, "dev.csv:2"))
    ('1066',)
    >>> gold_answers(RawRecord({"answer": ""}, "dev.csv:3"))
    ()
    >>> gold_answers(RawRecord({"question": "Who?"}, "ask.jsonl:1")) is None
    True
    """
    if record.fields.get("answers") is not None:
        return _texts(record, "answers", _parsed(record, record.fields["answers"]))
    answer = record.fields.get("answer")
    if answer is None:
        return None
    if isinstance(answer, str):
        return (answer,) if answer.strip() else ()
    return _texts(record, "answer", answer)


def _parsed(record: RawRecord, value: Any) -> Any:
    """A CSV file can only hold `answers` as JSON text; blank text is an empty list."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else []
    except json.JSONDecodeError:
        raise DataError(
            f"{record.where}: answers is the text {_shown(value)}, which is not JSON. Write a list such as "
            f'["one", "two"], or put a single plain answer into a column named answer.'
        ) from None


def _texts(record: RawRecord, name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, Mapping) and "text" in value:
        value = [value["text"]] if isinstance(value["text"], str) else value["text"]
    if not isinstance(value, list | tuple):
        raise DataError(f'{record.where}: {name} is {_shown(value)}. It must be a list of texts or {{"text": [...]}}.')
    texts: list[Any] = [item.get("text") if isinstance(item, Mapping) else item for item in value]
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"{record.where}: {name}[{i}] is {_shown(value[i])}. Every answer must be text.")
    if texts and not any(map(str.strip, texts)):
        raise DataError(
            f"{record.where}: {name} holds empty text only. A question without an answer has an empty list."
        )
    return tuple(text if text.strip() else "" for text in texts)


def said_impossible(record: RawRecord) -> bool | None:
    """The column `is_impossible`; None where it is absent or blank. CSV's true, false, 1 and 0 are understood."""
    value = record.fields.get("is_impossible")
    word = str(value).strip().lower()
    if value is None or word == "":
        return None
    if word not in ("true", "false", "1", "0"):
        raise DataError(f"{record.where}: is_impossible is {_shown(value)}. It must be true or false.")
    return word in ("true", "1")


def no_gold(record: RawRecord) -> DataError:
    """The error for a record that says nothing about its answers where they are needed."""
    return DataError(_missing(record, "answers") + " Without answers a file is good for `fivetune predict` only.")


def choose_targets(example: TextExample, train_answers: TrainAnswers) -> tuple[str, ...]:
    """The targets to train on: the first answer, all distinct ones, or one drawn by a hash of the example's id.

    The draw is the same in every run and on every machine, and takes an answer that several annotators gave more often.

    >>> example = TextExample("q1", "Who?", "Rollo", ("Rollo", "Rolf", "Rollo"))
    >>> choose_targets(example, "first"), choose_targets(example, "all"), choose_targets(example, "random")
    (('Rollo',), ('Rollo', 'Rolf'), ('Rollo',))
    """
    if not example.references:
        raise DataError(f"{example.id}: there is no answer to learn. Train on records that have answers.")
    golds = [answer for answer in example.references if answer]
    if not golds:  # unanswerable: the phrase, not a gold answer
        return (example.targets,)
    if train_answers == "all":
        return tuple(dict.fromkeys(golds))
    if train_answers == "random":
        digest = hashlib.blake2b(example.id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return (golds[int.from_bytes(digest, "big") % len(golds)],)
    return (golds[0],)


class QuestionOptions(TaskOptions):
    """What the two versions of SQuAD have in common: answers are parts of the context."""

    main_metric: ClassVar[str] = "f1"

    template: Annotated[str, AfterValidator(check_qa_template)] = Field(
        default="question: {question} context: {context}",
        description="the inputs; may use {question}, {context} and {title}; without {context} it answers blindly",
    )
    train_answers: TrainAnswers = Field(
        default="first",
        description="which gold answers to train on: the first, all distinct ones, or one drawn by the id",
    )
    language: Language | None = Field(
        default=None, description="language of the set (es, de, zh ...): also scores by MLQA's rules for it"
    )
    head: Head = Field(
        default="generate", description="generate writes the answer; extractive points at it in the context"
    )
    pad_punctuation: bool = Field(
        default=False, description="spaces around punctuation in inputs and answers, as the T5 paper had it"
    )

    @property
    def extractive(self) -> bool:
        return True

    def train_targets(self, example: TextExample) -> tuple[str, ...]:
        """The targets to train on, at least one; an unanswerable question has the phrase."""
        return choose_targets(example, self.train_answers)
