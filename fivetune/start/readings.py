"""The readings of a table: what its columns may mean for a task, each with its evidence.

In: a Survey. Out: Readings, in no order; choose.py takes the best, or doubts. A file per kind of data:

    chats           messages with roles
    pairs           text to text: languages, summaries, code, corrections; instruction, input and output
    questions       questions with answers: choices (quizzes.py), yes/no, numbers, parts of a context, free text
    one_label       texts with one label, or with a number
    several_labels  texts with several labels: a list, a separated text, a column for each

Here are the two readings that ask for no form of the values: the columns of a published data set, which has a task of
its own, and the columns that the user named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from fivetune.start.chats import read_chat
from fivetune.start.one_label import read_labels, read_numbers
from fivetune.start.pairs import read_instructions, read_pairs
from fivetune.start.questions import read_questions
from fivetune.start.several_labels import read_tags
from fivetune.start.survey import CERTAIN, MAX_NUMBERED, Evidence, Reading, Survey
from fivetune.start.task_options import TEXT_TASKS, fill_options
from fivetune.types import JsonTable

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "bioasq_yesno": ("yesno_label", "question"),
    "pubmedqa": ("QUESTION", "CONTEXTS", "final_decision"),
    "causalqa": ("question_processed", "context_processed", "answer"),
    "stackoverflow_quality": ("Title", "Body", "Y"),
    "bioasq_factoid": ("body", "type", "exact_answer"),
}
QUALITIES = {"LQ_CLOSE": "none", "LQ_EDIT": "low", "HQ": "high"}


def read_signatures(survey: Survey) -> Iterator[Reading]:
    """Yield the task of a published data set by its columns."""
    for task, needed in SIGNATURES.items():
        if not set(needed) <= survey.table.columns.keys():
            continue
        roles: dict[str, Sequence[str]] = {}
        options: JsonTable = {}
        reason = f"it has the columns {', '.join(needed)} of that data set"
        if task == "stackoverflow_quality":
            roles = {"label": ("Y",)}
            options = {"labels": {label: QUALITIES.get(label, label) for label in sorted(survey.columns["Y"].values)}}
        elif task == "bioasq_factoid":
            counts = Counter(survey.columns["type"].values)
            kind = "yesno" if counts["yesno"] > counts["factoid"] else "factoid"
            task = f"bioasq_{kind}"
            reason += f", and {counts[kind]:,} questions are of type {kind}; the others are left out"
        yield Reading(task, task, roles, reason, options, evidence=[Evidence(CERTAIN, reason)])


def read_named(survey: Survey) -> Iterator[Reading]:
    """Yield what the user's columns say by themselves, whatever their values look like."""
    given = survey.given
    for learned, read, task in (
        ("label", "text", "classification"),
        ("tags", "text", "tags"),
        ("targets", "inputs", "jsonl"),
        ("targets", "inputs", "regression"),
    ):
        if learned not in given:
            continue
        column = survey.columns[given[learned][0]]
        texts = given.get(read) or (survey.list_texts(column.name) if read == "text" else ())
        if not texts or (task == "regression" and column.kind != "number"):
            continue
        most = max(column.num_filled / 2, min(MAX_NUMBERED, column.num_filled - 1))
        if task == "classification" and not 2 <= column.num_distinct <= most:
            continue
        roles = {read: texts, learned: given[learned]}
        warnings: list[str] = []
        if task == "classification" and not column.has_labels:
            warnings = [f"{column.name} has {column.num_distinct:,} different values in {column.num_filled:,} records"]
        options: JsonTable = {"separator": ","} if task == "tags" else {}
        yield Reading(task, task, roles, "the columns were named", options, warnings=warnings)


def iter_readings(survey: Survey) -> Iterator[Reading]:
    """Yield the readings of all forms, for each language if the columns are there in several."""
    for part in survey.split_by_language():
        choices: set[str] = set()
        for reading in chain.from_iterable(form(part) for form in FORMS):
            choices.update(reading.roles.get("choices", ()))
            if "choices" in reading.roles or choices.isdisjoint(reading.targets):  # a choice is never learned
                yield fill_options(part, reading)


FORMS = (
    read_signatures,
    read_chat,
    read_instructions,
    read_questions,  # before all that may learn one of the choices
    read_pairs,
    read_labels,
    read_tags,
    read_numbers,
    read_named,
)


TASKS = frozenset((*SIGNATURES, *TEXT_TASKS, "unifiedqa", "squad", "squad_v2", "gsm8k"))
