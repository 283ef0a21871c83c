"""Guess the task of a table: candidates in order, each of which fits, or is rejected with its reason.

In: a RawTable, the task and the columns that the user named. Out: a Guess with the task's options and the reasons.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from fivetune.errors import ConfigError, DataError, RecordError
from fivetune.metrics.gsm8k import extract_final_number
from fivetune.start.columns import Column, RawTable, as_text, find_value
from fivetune.start.roles import (
    LANGUAGES,
    ROLES,
    SUMMARIES,
    Given,
    check_given,
    check_header,
    find_group,
    find_role,
    is_id,
    normalize_name,
    split_names,
)
from fivetune.tasks import find_text
from fivetune.tasks._questions import read_gold_answers
from fivetune.tasks.unifiedqa import YES_NO
from fivetune.types import JsonTable, RawRecord

IN_CONTEXT = 0.7  # least share of answers that are parts of their context, if the task is extractive
LONG_ANSWER_WORDS = 8.0
OTHER_COLUMNS = "other columns than that data set"
SAMPLE = 2_000  # records of which answers are compared with contexts


@dataclass(frozen=True, slots=True)
class Guess:
    """A task that fits a table.

    Args:
        kind: the task in words.
        options: of the task, as a recipe has them.
        columns: data.columns.
        roles: role -> column, as --column names them.
        reason: why it fits.
        rejected: (kind, reason) of the candidates before it.
        warnings: what the user should look at.
    """

    kind: str
    task: str
    roles: Mapping[str, str]
    reason: str
    options: JsonTable = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    id_column: str | None = None
    group_column: str | None = None
    rejected: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()


Candidate = Callable[[RawTable, Given], Guess | str]


def infer_task(table: RawTable, *, task: str | None = None, given: Given | None = None) -> Guess:
    """Return the first candidate that fits; with `task`, of that task alone.

    Raises ConfigError for a wrong column in `given`, DataError for a table without a header, and if nothing fits.
    """
    if task == "mixture":
        raise ConfigError(
            "--task mixture: its parts are data sets of their own. Run fivetune new for each, and join their recipes "
            "in task.parts (docs/tasks.md)."
        )
    given = given or {}
    check_header(table)
    check_given(given, table)
    named = [one for one in CANDIDATES if task is None or task in one[1]]
    rejected: list[tuple[str, str]] = []
    for kind, _, candidate in named:
        found = candidate(table, given)
        if isinstance(found, Guess) and task not in (None, found.task):
            found = replace(found, task=task) if {task, found.task} == {"squad", "squad_v2"} else found.reason
        if isinstance(found, Guess):
            unread = [role for role in given if role not in ("id", "group") and role not in found.roles]
            found = f"it reads no {unread[0]}, which --column names" if unread else found
        if isinstance(found, Guess):
            return _complete(found, table, given, rejected)
        rejected.append((kind, found))
    if task is not None and not named:
        own = {role: name for role, name in given.items() if role not in ("id", "group")}
        reason = "--task names it"
        return _complete(Guess(task, task, given, reason, columns=own), table, given, [])
    own = [pair for pair in merge_rejected(rejected) if pair[1] != OTHER_COLUMNS]
    reasons = "; ".join(f"not {kind}: {reason}" for kind, reason in own)
    raise DataError(
        f"{table.source}: no task fits the columns {', '.join(table.columns)}: {reasons}. Name the columns, such as "
        "--column text=NAME --column label=NAME or --column inputs=NAME --column targets=NAME, or the task with --task."
    )


def _complete(found: Guess, table: RawTable, given: Given, rejected: Sequence[tuple[str, str]]) -> Guess:
    """Add the columns of ids and groups, the rejected candidates and the mappings that differ from their names."""
    taken = [name for role, names in found.roles.items() for name in split_names(role, names)]
    identity = given.get("id")
    if identity is None and "id" not in table.columns:
        identity = next((n for n, c in table.columns.items() if n not in taken and is_id(n, c) and c.has_names), None)
    columns = {wanted: name for wanted, name in found.columns.items() if wanted != name}
    group = find_group(table, given, [*taken, identity or ""])
    return replace(found, columns=columns, id_column=identity, group_column=group, rejected=merge_rejected(rejected))


def merge_rejected(rejected: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Join the candidates that were rejected for the same reason.

    >>> merge_rejected([("squad", "no question"), ("gsm8k", "no question"), ("jsonl", "no pair")])
    (('squad, gsm8k', 'no question'), ('jsonl', 'no pair'))
    """
    merged: dict[str, list[str]] = {}
    for kind, reason in rejected:
        merged.setdefault(reason, []).append(kind)
    return tuple((", ".join(kinds), reason) for reason, kinds in merged.items())


# --- data sets that have a task of their own ---


def _try_signature(task: str, needed: Sequence[str]) -> Candidate:
    def match(table: RawTable, given: Given) -> Guess | str:
        if not set(needed) <= table.columns.keys():
            return OTHER_COLUMNS
        return Guess(task, task, {}, f"it has the columns {', '.join(needed)} of that data set")

    return match


def _try_bioasq(table: RawTable, given: Given) -> Guess | str:
    if not {"body", "type", "exact_answer"} <= table.columns.keys():
        return OTHER_COLUMNS
    counts = table.columns["type"].values
    numbers = {kind: counts.get(kind, 0) for kind in ("factoid", "yesno")}
    kind = max(numbers, key=numbers.__getitem__)
    if not numbers[kind]:
        return "none of its questions has the type factoid or yesno"
    reason = f"it has BioASQ's columns, and {numbers[kind]:,} of {table.num_records:,} questions are of type {kind}"
    return Guess(f"BioASQ {kind}", f"bioasq_{kind}", {}, f"{reason}; the others are left out")


def _try_stackoverflow(table: RawTable, given: Given) -> Guess | str:
    found = _try_signature("stackoverflow_quality", ("Title", "Body", "Y"))(table, given)
    if isinstance(found, str):
        return found
    labels = list(table.columns["Y"].values)
    if len(labels) < 2:
        return "the column Y holds no labels"
    known = {"LQ_CLOSE": "none", "LQ_EDIT": "low", "HQ": "high"}
    own = {} if set(labels) == set(known) else {"labels": {label: known.get(label, label) for label in sorted(labels)}}
    return replace(found, options=own, roles={"label": "Y"})


# --- questions ---


def _find_question(table: RawTable, given: Given) -> dict[str, str] | str:
    """Find the columns of question, answer and, if there is one, context; else the reason why not."""
    question = find_role("question", table, given, fits=lambda column: column.kind == "text")
    if question is None:
        return "there is no column of questions"
    roles = {"question": question}
    if answer := find_role("answer", table, given, [question], fits=lambda column: column.kind != "empty"):
        roles["answer"] = answer
    context = find_role("context", table, given, list(roles.values()), fits=_is_running_text)
    return roles | ({"context": context} if context else {})


def _find_answered_question(table: RawTable, given: Given) -> dict[str, str] | str:
    """Find the same columns where there is one of answers; else the reason why not."""
    roles = _find_question(table, given)
    return roles if isinstance(roles, str) or "answer" in roles else "there is no column of answers"


def _is_running_text(column: Column) -> bool:
    return column.kind == "text" and column.mean_words >= 3


def _has_yes_no(column: Column) -> bool:
    return len(column.values) in (1, 2) and {value.lower() for value in column.values} <= YES_NO.keys()


def _try_choices(table: RawTable, given: Given) -> Guess | str:
    roles = _find_question(table, given)
    choices = find_role("choices", table, given, fits=lambda column: column.kind in ("list", "object"))
    if isinstance(roles, str):
        return roles
    if choices is None:
        return "there is no column with a list of choices"
    label = roles.get("answer") or find_role("label", table, given, [choices, *roles.values()])
    columns = {**roles, "choices": choices}
    if label:
        keeps = label in ("answerKey", "label")  # forms that unifiedqa reads by these names
        columns = {key: name for key, name in columns.items() if key != "answer"} | ({} if keeps else {"answer": label})
        roles = {**roles, "answer": label}
    reason = f"{roles['question']} is text and {choices} a list in each record"
    own = {"format": "multiple_choice", "lower_case": False}
    return Guess("multiple choice", "unifiedqa", {**roles, "choices": choices}, reason, own, columns)


def _try_yes_no(table: RawTable, given: Given) -> Guess | str:
    roles = _find_answered_question(table, given)
    if isinstance(roles, str):
        return roles
    column = table.columns[roles["answer"]]
    if not _has_yes_no(column):
        return f"the answers in {roles['answer']} are not only yes and no"
    if len(column.values) < 2:
        return f"all answers in {roles['answer']} are {column.example}"
    reason = f"all answers in {roles['answer']} are {' or '.join(sorted(column.values))}"
    own = {"format": "yes_no", "lower_case": False}
    return Guess("yes/no questions", "unifiedqa", roles, reason, own, roles)


def _try_reasoning(table: RawTable, given: Given) -> Guess | str:
    roles = _find_answered_question(table, given)
    if isinstance(roles, str):
        return roles
    answers = [as_text(find_value(record.fields, roles["answer"])) for record in table.records[:SAMPLE]]
    num_marked = sum("####" in answer and extract_final_number(answer) is not None for answer in answers)
    if num_marked < 0.9 * len(answers):
        return "the answers do not end in #### and a number"
    reason = f"{num_marked:,} of {len(answers):,} answers in {roles['answer']} end in #### and a number"
    used = {role: roles[role] for role in ("question", "answer")}
    return Guess("reasoning with a final number", "gsm8k", used, reason, columns=used)


def _try_extractive(table: RawTable, given: Given) -> Guess | str:
    roles = _find_question(table, given)
    if isinstance(roles, str):
        return roles
    if "answer" not in roles or "context" not in roles:
        return f"there is no column of {'answers' if 'answer' not in roles else 'contexts'}"
    key, answers = _read_answers(table, roles["answer"])
    if key is None:
        return f"the values of {roles['answer']} are no answers"
    answered = [
        (record, golds) for record, golds in zip(table.records, answers, strict=True) if any(map(str.strip, golds))
    ]
    num_answered = min(len(answered), SAMPLE)
    num_found = sum(_is_in_context(record, roles["context"], golds) for record, golds in answered[:SAMPLE])
    if num_found < IN_CONTEXT * num_answered or not num_answered:
        return f"{num_found:,} of {num_answered:,} answers in {roles['answer']} are parts of {roles['context']}"
    num_open = sum(golds == () for golds in answers)
    task = "squad_v2" if num_open else "squad"
    reason = f"{num_found:,} of {num_answered:,} answers in {roles['answer']} are parts of their {roles['context']}" + (
        f", and {num_open:,} questions have no answer" if num_open else ", and every question has an answer"
    )
    columns = {"question": roles["question"], "context": roles["context"], key: roles["answer"]}
    return Guess("extractive question answering", task, roles, reason, columns=columns)


def _is_in_context(record: RawRecord, name: str, golds: Sequence[str]) -> bool:
    context = as_text(find_value(record.fields, name))
    return any(find_text(context, gold.strip()) is not None for gold in golds)


def _try_free_answers(table: RawTable, given: Given) -> Guess | str:
    roles = _find_answered_question(table, given)
    if isinstance(roles, str):
        return roles
    column = table.columns[roles["answer"]]
    if column.has_labels and "question" not in given:
        return f"the {column.num_distinct} answers in {roles['answer']} repeat, as labels do"
    key, answers = _read_answers(table, roles["answer"])
    words = [len(golds[0].split()) for golds in answers if any(golds)]
    if key is None or not words:
        return f"the values of {roles['answer']} are no answers"
    columns = {"question": roles["question"], key: roles["answer"]}
    if "context" in roles or sum(words) / len(words) > LONG_ANSWER_WORDS:
        columns |= {"context": roles["context"]} if "context" in roles else {}
        reason = f"the answers in {roles['answer']} have {sum(words) / len(words):.0f} words on average" + (
            f" and are often no parts of {roles['context']}" if "context" in roles else " and there is no context"
        )
        own = {"format": "abstractive", "lower_case": False}
        return Guess("questions with free answers", "unifiedqa", roles, reason, own, columns)
    reason = f"{roles['question']} is answered by short texts in {roles['answer']}, and there is no context"
    own = {"template": "question: {question}"}
    return Guess("questions without a context", "squad", roles, reason, own, columns)


def _read_answers(table: RawTable, name: str) -> tuple[str | None, list[tuple[str, ...]]]:
    """Return the name by which tasks read a column of answers, None if they cannot, and the answers; ("",) if bad."""
    example = table.columns[name].example
    key = "answers" if table.columns[name].kind != "text" or example[:1] in ("[", "{") else "answer"
    read: list[tuple[str, ...]] = []
    num_bad = 0
    for record in table.records:
        value = find_value(record.fields, name)
        value = as_text(value) if isinstance(value, int | float) else value
        try:
            read.append(read_gold_answers(RawRecord({key: value}, record.where)) or ())
        except RecordError:
            num_bad += 1
            read.append(("",))
    return (key, read) if num_bad <= 0.1 * len(read) else (None, [])


# --- classification and text to text ---


def _try_labels(table: RawTable, given: Given) -> Guess | str:
    pair = _find_pair(table, given)
    label = find_role("label", table, given, fits=lambda column: column.has_labels)
    if label is None and pair is not None and _is_named_pair(pair[1]):
        return f"{pair[0]} and {pair[1]} are named as a pair of texts, and no column as a label"
    others = [
        name
        for name, column in table.columns.items()
        if column.has_labels and not is_id(name, column) and name not in (label, *ROLES["group"], *given.values())
    ]
    label = label or (others.pop() if others else None)
    if label is None:
        named = find_role("label", table, given)
        if named is None:
            return "no column holds few and short values that repeat"
        column = table.columns[named]
        if column.num_distinct == 1:
            return f"all values of {named} are {column.example!r}, and a classification needs two labels or more"
        return (
            f"{named} has {column.num_distinct:,} different values in {column.num_filled:,} records, so it is no label"
        )
    column = table.columns[label]
    if len(column.values) < 2:
        return f"{label} holds {column.num_distinct:,} different values, and labels are 2 to some dozen short ones"
    texts = split_names("text", given["text"]) if "text" in given else _list_texts(table, label, given)
    if not texts:
        return f"no column but {label} holds text"
    shown = ", ".join(f"{value} ({count:,})" for value, count in list(column.values.items())[:4])
    num_more = len(column.values) - 4
    more = f" and {num_more} {'other' if num_more == 1 else 'others'}" if num_more > 0 else ""
    verb = "holds" if len(texts) == 1 else "hold"
    reason = (
        f"{label} has {len(column.values)} values that repeat, {shown}{more}, and {' and '.join(texts)} {verb} text"
    )
    slots, columns = _name_slots([*texts, label])
    inputs = slots[0] if len(texts) == 1 else ""
    template = f"{{{inputs}}}" if inputs else " ".join(f"{slot}: {{{slot}}}" for slot in slots[:-1])
    unsure = [f"{name} could be the label too: --column label={name}" for name in others if not _is_certain(label)]
    roles = {"text": "\n".join(texts), "label": label}
    own = {"inputs": template, "label": slots[-1]}
    return Guess("classification", "classification", roles, reason, own, columns, warnings=tuple(unsure[:3]))


def _is_named_pair(target: str) -> bool:
    """Whether a target's name leaves no doubt; a title or a reply may belong to a text that is classified."""
    plain = normalize_name(target.rpartition(".")[2])
    return plain in LANGUAGES or plain in ("targets", "target", "output", "summary", "highlights", "translation")


def _is_certain(label: str) -> bool:
    return normalize_name(label) in ROLES["label"][:6]


def _list_texts(table: RawTable, label: str, given: Given) -> list[str]:
    """List the columns that inputs are built from: running text, or, without any, all short texts."""
    free = {
        name: column
        for name, column in table.columns.items()
        if name not in (label, given.get("id"), given.get("group"))
        and column.kind == "text"
        and not is_id(name, column)
    }
    usual = (*ROLES["text"], *ROLES["inputs"])
    running = [
        name
        for name, column in free.items()
        if column.mean_words >= 2 and (not column.has_labels or normalize_name(name) in usual)
    ]
    varied = [name for name, column in free.items() if not column.has_labels and not column.has_names]
    return running or varied or [name for name in free if normalize_name(name) in usual]


def _find_pair(table: RawTable, given: Given) -> tuple[str, str] | None:
    """Find the columns of source and target by their names, or two languages of a translation."""
    inner = {normalize_name(name.rpartition(".")[2]): name for name in table.columns}
    languages = [name for plain, name in inner.items() if plain in LANGUAGES and table.columns[name].kind == "text"]
    if len(languages) == 2 and not given.keys() & {"inputs", "targets"}:
        return languages[0], languages[1]

    def is_free(column: Column) -> bool:
        return column.kind == "text" and not column.has_labels

    target = find_role("targets", table, given, fits=is_free)
    source = find_role("inputs", table, given, [target or ""], fits=is_free)
    return (source, target) if source and target and source != target else None


def _try_pair(table: RawTable, given: Given) -> Guess | str:
    pair = _find_pair(table, given)
    if pair is None:
        texts = [name for name, column in table.columns.items() if _is_free_text(name, column)]
        if len(texts) != 2:
            found = ("1 column holds text" if len(texts) == 1 else f"{len(texts)} columns hold text") + (
                f" ({', '.join(texts)})" if texts else ""
            )
            return f"{found}, and none is named as source or target"
        pair = (texts[0], texts[1])
        if "targets" in given or "inputs" in given:
            target = given.get("targets") or next(name for name in texts if name != given["inputs"])
            pair = (given.get("inputs") or next(name for name in texts if name != target), target)
    sources, target = split_names("inputs", pair[0]), pair[1]
    first, last = table.columns[sources[0]], table.columns[target]
    names = [normalize_name(name.rpartition(".")[2]) for name in (sources[0], target)]
    slots, columns = _name_slots([*sources, target])
    inputs = " ".join(f"{{{slot}}}" for slot in slots[:-1])
    metric, kind = ("rouge", "rougeL_f1"), "text to text"
    reason = f"{' and '.join(sources)} and {target} hold free text"
    if names[0] in LANGUAGES and names[1] in LANGUAGES:
        kind, inputs = "translation", f"translate {LANGUAGES[names[0]]} to {LANGUAGES[names[1]]}: {inputs}"
        metric = ("bleu", "bleu") if find_spec("sacrebleu") else metric
        reason = f"the columns {sources[0]} and {target} are named after languages"
    elif names[1] in SUMMARIES or (last.mean_chars < 0.4 * first.mean_chars and last.mean_words >= 4):
        kind, inputs = "summarisation", f"summarize: {inputs}"
        reason += f", {target} {last.mean_chars / max(first.mean_chars, 1):.0%} as long as {sources[0]}"
    own = {"inputs": inputs, "targets": f"{{{slots[-1]}}}", "metrics": [metric[0]], "main_metric": metric[1]}
    roles = {"inputs": pair[0], "targets": target}
    return Guess(kind, "jsonl", roles, reason, own, columns)


def _is_free_text(name: str, column: Column) -> bool:
    return column.kind == "text" and column.num_distinct > 1 and not is_id(name, column) and not column.has_names


def _name_slots(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return names that a template can hold, and data.columns for those that differ.

    >>> _name_slots(["Betreff", "was {1}", "info.text"])
    (['Betreff', 'was__1', 'info_text'], {'was__1': 'was {1}', 'info_text': 'info.text'})
    """
    slots: list[str] = []
    for name in names:
        slot = name if not re.search(r"[{}\[\]!:.,]|^\s|\s$", name) else re.sub(r"\W", "_", name).strip("_") or "column"
        slots.append(slot if slot not in slots else f"{slot}_{len(slots)}")
    return slots, {slot: name for slot, name in zip(slots, names, strict=True) if slot != name}


CANDIDATES: tuple[tuple[str, tuple[str, ...], Candidate], ...] = (
    ("BioASQ", ("bioasq_factoid", "bioasq_yesno"), _try_bioasq),
    ("BioASQ yes/no as a table", ("bioasq_yesno",), _try_signature("bioasq_yesno", ("yesno_label", "question"))),
    ("PubMedQA", ("pubmedqa",), _try_signature("pubmedqa", ("QUESTION", "CONTEXTS", "final_decision"))),
    ("CausalQA", ("causalqa",), _try_signature("causalqa", ("question_processed", "context_processed", "answer"))),
    ("Stack Overflow quality", ("stackoverflow_quality",), _try_stackoverflow),
    ("multiple choice", ("unifiedqa",), _try_choices),
    ("yes/no questions", ("unifiedqa",), _try_yes_no),
    ("reasoning", ("gsm8k",), _try_reasoning),
    ("extractive question answering", ("squad", "squad_v2"), _try_extractive),
    ("questions with free answers", ("unifiedqa", "squad"), _try_free_answers),
    ("classification", ("classification",), _try_labels),
    ("text to text", ("jsonl",), _try_pair),
)
"""Kind, tasks that it can give, and function, the most specific first."""
