"""The readings of a table: what its columns may mean for a task, each with its evidence.

In: a Survey. Out: Readings, in no order; choose.py takes the best, or doubts. A function per form of data:

    signatures    columns of one published data set, which has a task of its own
    chat          messages with roles
    instructions  instruction, input and output
    questions     questions with answers: choices, yes/no, numbers, parts of a context, free text
    pairs         text to text: languages, summaries, code, corrections
    labels        texts with one label
    tags          texts with several labels: a list, a separated text, a column for each
    numbers       texts with a number
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from fivetune.errors import RecordError
from fivetune.metrics.gsm8k import extract_final_number
from fivetune.start.columns import FRACTION, MAX_LABELS, Column, as_text, find_foreign_share, find_value
from fivetune.start.roles import CLEAR, SUMMARIES, USUAL, find_language, split_name, split_names
from fivetune.start.survey import CODE, IN_TEXT, READ, SHORTER, VALUES, Evidence, Survey, iter_same
from fivetune.tasks import find_text
from fivetune.tasks._questions import read_gold_answers
from fivetune.tasks.unifiedqa import YES_NO
from fivetune.types import JsonTable, RawRecord

IN_CONTEXT = 0.7  # least share of answers that are parts of their context, if the task is extractive
LONG_ANSWER_WORDS = 8.0
SHORT_TARGET_WORDS = 2.0  # mean words up to which a target is right or wrong as a whole
SAMPLE = 2_000  # records of which answers are compared with contexts
FOREIGN = 0.1  # share of letters of another script from which on English scores do not suit
CONFLICTS = 0.2  # share of records whose inputs another record has with another label
SEPARATORS = (";", "|", ",")
NO_PEARSON = "FiveTune has no correlation (Pearson) yet: exact_match counts equal numbers only"


@dataclass(frozen=True, slots=True)
class Reading:
    """A task that may be meant by a table.

    Args:
        kind: the task in words.
        roles: role -> column, as --column names them.
        target: the columns that are learned.
        reason: what was seen of the columns.
        evidence: points for and against it.
        doubts: why it is not taken without a word of the user.
        options: of the task, as a recipe has them.
        columns: data.columns.
        warnings: what the user should look at.
    """

    kind: str
    task: str
    roles: Mapping[str, str]
    target: str
    reason: str
    evidence: Sequence[Evidence] = ()
    doubts: Sequence[str] = ()
    options: JsonTable = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    id_column: str | None = None
    group_column: str | None = None

    @property
    def points(self) -> int:
        return sum(one.points for one in self.evidence)

    def list_columns(self) -> list[str]:
        """List the columns that it reads or learns."""
        return [name for role, names in self.roles.items() for name in split_names(role, names)]


# --- data sets that have a task of their own ---

SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "bioasq_yesno": ("yesno_label", "question"),
    "pubmedqa": ("QUESTION", "CONTEXTS", "final_decision"),
    "causalqa": ("question_processed", "context_processed", "answer"),
    "stackoverflow_quality": ("Title", "Body", "Y"),
    "bioasq_factoid": ("body", "type", "exact_answer"),
}


def read_signatures(survey: Survey) -> Iterator[Reading]:
    """Yield the task of a published data set by its columns."""
    for task, needed in SIGNATURES.items():
        if survey.given.keys() - {"id", "group"} or not set(needed) <= survey.table.columns.keys():
            continue
        reason = f"it has the columns {', '.join(needed)} of that data set"
        found = Reading(task, task, {}, needed[-1], reason, (Evidence(100, reason),))
        if task == "stackoverflow_quality":
            known = {"LQ_CLOSE": "none", "LQ_EDIT": "low", "HQ": "high"}
            labels = sorted(survey.columns["Y"].values)
            own = {"labels": {label: known.get(label, label) for label in labels}} if {*labels} != {*known} else {}
            found = Reading(task, task, {"label": "Y"}, "Y", reason, found.evidence, options=own)
        if task == "bioasq_factoid":
            counts = survey.columns["type"].values
            kind = max(("factoid", "yesno"), key=lambda one: counts.get(one, 0))
            reason = f"{counts.get(kind, 0):,} of {survey.table.num_records:,} questions are of type {kind}"
            words = f"it has BioASQ's columns, and {reason}; the others are left out"
            found = Reading(f"BioASQ {kind}", f"bioasq_{kind}", {}, "exact_answer", words, found.evidence)
        yield found


# --- text to text ---


def build_pair(
    survey: Survey,
    kind: str,
    sources: Sequence[str],
    target: str,
    reason: str,
    weighed: tuple[Sequence[Evidence], Sequence[str]],
    *,
    prefix: str = "",
    warnings: Sequence[str] = (),
) -> Reading:
    """Build a reading of task jsonl; a target that is a list has its first text learned, all of them scored."""
    column = survey.columns[target]
    names, columns = name_slots([*sources, target])
    slots = [f"{{{name}}}" for name in names[:-1]]
    if split_name(sources[0]) == ["prefix"]:
        inputs = ": ".join(slots)
    elif len(slots) == 1 or survey.rate(sources[0], "instruction") >= USUAL or find_turn(sources[0]):
        inputs = prefix + " ".join(slots)
    else:
        inputs = prefix + build_template(names[:-1])
    options: JsonTable = {"inputs": inputs}
    options["targets"] = f"{{{names[-1]}}}"
    if column.kind == "list":
        slot = f"{names[-1]}_first"
        columns |= {slot: f"{target}.0"}
        options |= {"targets": f"{{{slot}}}", "references": names[-1]}
    options |= choose_metrics(survey, target, kind)
    roles = {"inputs": "\n".join(sources), "targets": target}
    return Reading(kind, "jsonl", roles, target, reason, *weighed, options, columns, warnings)


def find_turn(name: str) -> bool:
    """Whether a column is a part of a list, such as a message of a chat (`messages.0.content`)."""
    return any(part.isdecimal() for part in name.split("."))


def build_template(names: Sequence[str]) -> str:
    """Build the template of inputs; several columns have their names before them.

    >>> build_template(["text"]), build_template(["subject", "body"])
    ('{text}', 'subject: {subject} body: {body}')
    """
    return f"{{{names[0]}}}" if len(names) == 1 else " ".join(f"{name}: {{{name}}}" for name in names)


def choose_metrics(survey: Survey, target: str, kind: str) -> JsonTable:
    """Choose the metrics of a target, and the score that selects the best weights: one that sees its text.

    Code and answers of a word or two are right or wrong as a whole; of longer texts parts count.
    """
    column = survey.columns[target]
    texts = survey.list_examples(target, 200)
    words = "unicode" if not "".join(texts).isascii() else "ascii"
    rouge: object = "rouge" if words == "ascii" else {"name": "rouge", "words": words}
    if column.has_code:
        return {"metrics": ["exact_match", rouge], "main_metric": "exact_match"}
    if column.kind == "number" or (column.mean_words <= SHORT_TARGET_WORDS and column.kind == "text"):
        return {"metrics": ["exact_match"], "main_metric": "exact_match"}
    if kind == "translation" and find_spec("sacrebleu"):
        return {"metrics": ["bleu"], "main_metric": "chrf"}
    return {"metrics": [rouge], "main_metric": "rougeL_f1"}


def read_pairs(survey: Survey) -> Iterator[Reading]:
    """Yield each source with each target: by languages, else by names, else of two or three texts each with each."""
    if survey.given.keys() & {"text", "label", "question", "answer", "tags"}:
        return
    languages = [name for name, column in survey.columns.items() if find_language(name) and column.kind == "text"]
    if len(languages) > 1 and not survey.given.keys() & {"inputs", "targets"}:
        for target in languages[1:]:  # the first is the source
            yield _read_pair(survey, languages[:1], target)
        return
    targets = survey.list_columns("targets", minimum=2, fits=_can_be_target)
    texts = [name for name, column in survey.columns.items() if column.has_text and not survey.is_aside(name)]
    if "targets" not in survey.given and len(texts) <= 3:
        targets += [name for name in texts if survey.rate(name, "targets", *_INPUTS) == 0]
    for target in targets:
        for sources in _list_sources(survey, target, texts):
            yield _read_pair(survey, sources, target)


_INPUTS = ("inputs", "text", "question")


def _can_be_target(column: Column) -> bool:
    is_answer = column.kind in ("text", "number") and not column.has_labels
    return is_answer or (column.kind == "list" and column.example.startswith(("['", '["')))


def _list_sources(survey: Survey, target: str, texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the inputs that a target may have: the user's, else each text with a known name, else each text."""
    if "inputs" in survey.given:
        yield split_names("inputs", survey.given["inputs"])
        return
    prefixes = [name for name in survey.columns if split_name(name) == ["prefix"]]  # simpletransformers
    named = survey.list_columns(*_INPUTS, minimum=2, fits=_is_free)
    unknown = [name for name in texts if survey.rate(name, "targets", "answer", *_INPUTS) < 2]
    found = [name for name in named if name != target] or [name for name in unknown if name != target]
    for name in found[:3]:
        yield [*prefixes, name]


def _read_pair(survey: Survey, sources: Sequence[str], target: str) -> Reading:
    first, last = survey.columns[sources[-1]], survey.columns[target]
    kind, prefix, values, points, warnings = "text to text", "", "", 0, []
    reason = (
        f"{' and '.join(sources)} {'holds' if len(sources) == 1 else 'hold'} what is read, {target} what is learned"
    )
    is_short = last.mean_chars < 0.4 * first.mean_chars and last.mean_words >= 4
    if last.has_code:
        values, points = f"{target} holds code, a query or a formula", CODE
    elif is_short:
        values, points = f"{target} is shorter", SHORTER
    if (survey.rate(target, "targets") >= USUAL - 1 and split_name(target)[-1] in SUMMARIES) or is_short:
        kind, prefix = "summarisation", "summarize: "
        reason = f"{target} is {last.mean_chars / max(first.mean_chars, 1):.0%} as long as {' and '.join(sources)}"
    form, others = "", []
    spoken = [find_language(name) for name in (sources[-1], target)]
    if split_name(sources[0]) == ["prefix"]:
        form, prefix = "a prefix for each record", ""
    elif all(spoken):
        kind, prefix = "translation", f"translate {spoken[0]} to {spoken[1]}: "
        form = reason = f"the columns {sources[-1]} and {target} are named after languages"
        others = [name for name in survey.columns if find_language(name) and name not in (*sources, target)]
    evidence, doubts = survey.weigh(target, "targets", sources, form=form, values=values, points=points, read=others)
    if others:
        doubts = (*doubts, f"{others[0]} is named after a language, too")
    is_named = survey.rate(target, "targets") >= 2
    if not is_named and not form and last.mean_chars > 3 * first.mean_chars:
        doubts = (*doubts, f"{target} is much longer than {sources[-1]}: perhaps the other way round")
    if last.kind == "number":
        kind, warnings = "numbers as text", [NO_PEARSON]
    weighed = (evidence, doubts)
    return build_pair(survey, kind, sources, target, reason, weighed, prefix=prefix, warnings=warnings)


def read_instructions(survey: Survey) -> Iterator[Reading]:
    """Yield instruction, input and output: the form of Alpaca and Dolly. An empty input is usual."""
    if survey.given.keys() & {"inputs", "targets", "text", "label", "question", "answer"}:
        return
    found = survey.list_columns("instruction", minimum=USUAL, fits=_is_text)
    if not found or split_name(found[0]) == ["prefix"]:
        return
    targets = survey.list_columns("targets", "answer", minimum=USUAL, fits=_is_text)
    further = [
        name
        for name in survey.list_columns("inputs", "context", "question", minimum=USUAL, fits=_is_text)
        if name not in (found[0], *targets) or survey.rate(name, "question") >= CLEAR
    ]
    for target in targets:
        inputs = [found[0], *(name for name in survey.columns if name in further and name not in (target, found[0]))]
        reason = f"{' and '.join(inputs)} instruct, {target} is the answer"
        weighed = survey.weigh(target, "targets", inputs, form="instruction and output")
        yield build_pair(survey, "instructions", inputs, target, reason, weighed)


def _is_text(column: Column) -> bool:
    return column.kind == "text"


CHATS = (("role", "content", "system", "user", "assistant"), ("from", "value", "system", "human", "gpt"))


def read_chat(survey: Survey) -> Iterator[Reading]:
    """Yield the first exchange of lists of messages, {"role": ..., "content": ...} or {"from": ..., "value": ...}."""
    for name, column in survey.columns.items():
        if column.kind != "list" or survey.given.keys() & {"text", "label", "question"}:
            continue
        chats = [value for value in survey.table.list_values(name) if isinstance(value, list)]
        for role, content, *speakers in CHATS:
            spoken = [[_get_member(turn, role) for turn in chat] for chat in chats]
            first = Counter(tuple(roles[: 3 if roles[:1] == speakers[:1] else 2]) for roles in spoken)
            form = first.most_common(1)[0][0] if first else ()
            if form not in (tuple(speakers), tuple(speakers[1:])):
                continue
            paths = [f"{name}.{place}.{content}" for place in range(len(form))]
            num_long = sum(len(roles) > len(form) for roles in spoken)
            further = f"{num_long:,} of {len(spoken):,} chats go on after the first answer, which is not read"
            reason = f"{name} holds messages by {' and '.join(form)}; the first answer is learned"
            evidence = (Evidence(100, "lists of messages"),)
            described = Survey(survey.table, survey.given, {**survey.columns, **_describe_paths(survey, paths)})
            warnings = [further] if num_long else []
            yield build_pair(described, "chat", paths[:-1], paths[-1], reason, (evidence, ()), warnings=warnings)


def _describe_paths(survey: Survey, paths: Sequence[str]) -> dict[str, Column]:
    from fivetune.start.columns import describe_column

    return {path: describe_column(path, survey.table.list_values(path)) for path in paths}


def _get_member(value: object, name: str) -> str:
    return str(value.get(name)) if isinstance(value, Mapping) else ""


# --- questions ---


def read_questions(survey: Survey) -> Iterator[Reading]:
    """Yield questions with each column of answers; the values of the answers decide the form."""
    if survey.given.keys() & {"text", "label", "inputs", "targets", "tags"}:
        return
    questions = survey.list_columns("question", minimum=2, fits=_is_text)
    if not questions:
        return
    question = questions[0]
    context = _find_context(survey, question)
    choices = survey.list_columns("choices", minimum=USUAL, fits=_is_nested)
    answers = [
        name for name in survey.list_columns("answer", minimum=2, fits=_is_filled) if name not in (question, context)
    ]
    if choices:
        keys = answers or survey.list_columns("label", minimum=USUAL, fits=_is_filled)
        yield from _read_choices(survey, question, context, choices[0], keys)
        return
    for answer in answers:
        yield from _read_answers(survey, question, context, answer)


def _is_nested(column: Column) -> bool:
    return column.kind in ("list", "object")


def _is_filled(column: Column) -> bool:
    return column.kind != "empty"


def _find_context(survey: Survey, question: str) -> str | None:
    """Find the text that questions are about: the clearest name, else the only running text without a known name."""
    named = [
        name
        for name in survey.list_columns("context", "text", minimum=2, fits=_is_free)
        if name != question and survey.rate(name, "answer", "targets") < USUAL
    ]
    if named:
        return named[0] if "context" in survey.given or survey.rate(named[0], "context") >= 2 else _take_only(named)
    unknown = [
        name
        for name in survey.list_columns("context", minimum=0, fits=_is_long)
        if name != question and survey.rate(name, "answer", "targets", "label", "question") == 0
    ]
    return _take_only(unknown)


def _is_free(column: Column) -> bool:
    return column.has_text


def _is_long(column: Column) -> bool:
    return column.has_text and column.mean_chars > 100


def _take_only(names: Sequence[str]) -> str | None:
    return names[0] if len(names) == 1 else None


def _read_choices(
    survey: Survey, question: str, context: str | None, choices: str, keys: Sequence[str]
) -> Iterator[Reading]:
    roles = {"question": question, "choices": choices} | ({"context": context} if context else {})
    columns = dict(roles)
    form = f"{question} is text and {choices} a list in each record"
    options: JsonTable = {"format": "multiple_choice", "lower_case": False}
    for key in keys or [choices]:  # the choices may mark the right one
        used = {**roles, "answer": key} if key != choices else roles
        named = {**columns, "answer": key} if key not in (choices, "answerKey", "label") else columns
        evidence, doubts = survey.weigh(key, "answer", [question], form=form, read=list(used.values()))
        yield Reading("multiple choice", "unifiedqa", used, key, form, evidence, doubts, options, named)


def _read_answers(survey: Survey, question: str, context: str | None, answer: str) -> Iterator[Reading]:
    column = survey.columns[answer]
    base = {"question": question, "answer": answer}
    roles = base | ({"context": context} if context else {})
    values = [value.lower() for value in column.values]
    inputs = [question, *([context] if context else [])]

    def build(
        kind: str, task: str, reason: str, used: Mapping[str, str], points: int = VALUES, **more: object
    ) -> Reading:
        evidence, doubts = survey.weigh(answer, "answer", inputs, values=reason, points=points)
        columns = {("answers" if wanted == "answer" else wanted): name for wanted, name in used.items()}
        columns = columns if _has_nested_answers(column) else dict(used)
        options = dict(more)
        return Reading(kind, task, used, answer, reason, evidence, doubts, options, columns)

    if values and len(values) <= 2 and {*values} <= YES_NO.keys() and column.kind != "number":
        reason = f"all answers in {answer} are {' or '.join(sorted(column.values))}"
        own = {"format": "yes_no", "lower_case": False}
        if len(values) == 2:
            yield build("yes/no questions", "unifiedqa", reason, roles, **own)
        return
    texts = survey.list_examples(answer, 200)
    num_marked = sum("####" in text and extract_final_number(text) is not None for text in texts)
    if texts and num_marked >= 0.9 * len(texts):
        reason = f"{num_marked:,} of {len(texts):,} answers in {answer} end in #### and a number"
        yield build("reasoning with a final number", "gsm8k", reason, base, IN_TEXT)
        return
    if column.kind == "number":
        reason = f"the answers in {answer} are numbers"
        weighed = survey.weigh(answer, "answer", inputs, values=reason)
        ordered = [name for name in survey.columns if name in inputs]
        found = build_pair(survey, "questions with numbers as answers", ordered, answer, reason, weighed)
        yield found
        return
    golds = _read_golds(survey, answer)
    if golds is None:
        return
    if context and (found := _read_extractive(survey, roles, golds, build)):
        yield found
        return
    words = [len(one[0].split()) for one in golds if any(one)]
    mean_words = sum(words) / max(1, len(words))
    if not context and mean_words <= LONG_ANSWER_WORDS and not column.has_code:
        reason = f"{question} is answered by short texts in {answer}, and there is no context"
        yield build("questions without a context", "squad", reason, base, template="question: {question}")
        return
    reason = f"the answers in {answer} have {mean_words:.0f} words on average"
    reason += f" and are often no parts of {context}" if context else " and there is no context"
    is_foreign = find_foreign_share(text for one in golds[:100] for text in one)[0] >= FOREIGN
    if column.has_code or (is_foreign and not _has_nested_answers(column)):
        weighed = survey.weigh(answer, "answer", inputs, values=reason)
        yield build_pair(survey, "questions with free answers", inputs, answer, reason, weighed)
        return
    own = {"format": "abstractive", "lower_case": False}
    yield build("questions with free answers", "unifiedqa", reason, roles, **own)


def _has_nested_answers(column: Column) -> bool:
    return column.kind != "text" or column.example[:1] in ("[", "{")


def _read_golds(survey: Survey, answer: str) -> list[tuple[str, ...]] | None:
    """Return the answers of all records, ("",) where there is a bad one; None if the tasks cannot read them."""
    key = "answers" if _has_nested_answers(survey.columns[answer]) else "answer"
    read: list[tuple[str, ...]] = []
    num_bad = 0
    for record in survey.table.records:
        value = find_value(record.fields, answer)
        value = as_text(value) if isinstance(value, int | float) else value
        try:
            read.append(read_gold_answers(RawRecord({key: value}, record.where)) or ())
        except RecordError:
            num_bad += 1
            read.append(("",))
    return read if num_bad <= 0.1 * len(read) else None


def _read_extractive(
    survey: Survey, roles: Mapping[str, str], golds: Sequence[tuple[str, ...]], build: Callable[..., Reading]
) -> Reading | None:
    context = roles["context"]
    answered = [
        (as_text(find_value(record.fields, context)), one)
        for record, one in zip(survey.table.records, golds, strict=True)
        if any(map(str.strip, one))
    ][:SAMPLE]
    num_found = sum(any(find_text(text, gold.strip()) for gold in one) for text, one in answered)
    if not answered or num_found < IN_CONTEXT * len(answered):
        return None
    num_open = sum(one == () for one in golds)
    reason = f"{num_found:,} of {len(answered):,} answers in {roles['answer']} are parts of their {context}" + (
        f", and {num_open:,} questions have no answer" if num_open else ", and every question has an answer"
    )
    return build("extractive question answering", "squad_v2" if num_open else "squad", reason, roles, IN_TEXT)


# --- labels ---


def read_labels(survey: Survey) -> Iterator[Reading]:
    """Yield each column of few and short values that repeat, as the label of the texts."""
    if survey.given.keys() & {"inputs", "targets", "question", "answer", "tags"}:
        return
    labels = survey.list_columns("label", "answer", minimum=0, fits=_has_labels)[:8]
    if not labels:  # a language is a label if nothing else is
        labels = [name for name, one in survey.columns.items() if one.has_labels and survey.rate(name, "label") > 1]
    twins = list(iter_same(survey, [name for name, column in survey.columns.items() if column.has_labels]))
    if "label" not in survey.given:
        numbered = {_choose_wordless(survey, *pair) for pair in twins}
        labels = [name for name in labels if name not in numbered]
    for label in labels:
        column = survey.columns[label]
        texts = survey.list_texts(label)
        is_answer = survey.rate(label, "answer") >= USUAL > survey.rate(label, "label")
        if not texts or not column.has_labels or (is_answer and any(survey.rate(one, "question") > 2 for one in texts)):
            continue  # answers to questions are not labels
        shown = ", ".join(f"{value} ({count:,})" for value, count in list(column.values.items())[:4])
        num_more = len(column.values) - 4
        more = f" and {num_more} {'other' if num_more == 1 else 'others'}" if num_more > 0 else ""
        verb = "holds" if len(texts) == 1 else "hold"
        reason = f"{label} has {len(column.values)} values that repeat, {shown}{more}, and {_join(texts)} {verb} text"
        same = [name for pair in twins if label in pair for name in pair]
        evidence, doubts = survey.weigh(label, "label", texts, values="the values repeat", read=same)
        if conflict := _describe_conflicts(survey, texts, label):
            doubts = (*doubts, conflict)
        names, columns = name_slots([*texts, label])
        options: JsonTable = {"inputs": build_template(names[:-1]), "label": names[-1]}
        roles = {"text": "\n".join(texts), "label": label}
        yield Reading("classification", "classification", roles, label, reason, evidence, doubts, options, columns)


def _has_labels(column: Column) -> bool:
    return column.has_labels


def _choose_wordless(survey: Survey, name: str, other: str) -> str:
    """Choose which of two columns that say the same is not learned: T5 learns words rather than numbers."""
    is_number = survey.columns[name].kind == "number"
    if is_number == (survey.columns[other].kind == "number"):
        return min(name, other, key=lambda one: survey.rate(one, "label"))
    return name if is_number else other


def _describe_conflicts(survey: Survey, texts: Sequence[str], label: str) -> str:
    """Describe equal texts with different labels: then something is missing from the inputs, or there are several."""
    by_text: dict[tuple[str, ...], set[str]] = {}
    keys: list[tuple[str, ...]] = []
    for record in survey.table.records:
        keys.append(tuple(as_text(find_value(record.fields, name)) for name in texts))
        by_text.setdefault(keys[-1], set()).add(as_text(find_value(record.fields, label)))
    num_unlike = sum(len(by_text[key]) > 1 for key in keys)
    if num_unlike < CONFLICTS * len(keys):
        return ""
    return f"{num_unlike:,} records have the texts of others and another {label}"


def read_tags(survey: Survey) -> Iterator[Reading]:
    """Yield several labels for each text: a list, a separated text, or a column of 0 and 1 for each label."""
    if survey.given.keys() & {"inputs", "targets", "question", "answer", "label"}:
        return
    named = split_names("tags", survey.given["tags"]) if "tags" in survey.given else []
    for name in [named[0]] if len(named) == 1 else [*([] if named else survey.columns)]:
        found = None if survey.is_aside(name) else _find_tags(survey, name)
        texts = survey.list_texts(name)
        if not texts or found is None:
            continue
        separator, tags = found
        reason = f"{name} has {len(tags):,} labels, several for some records, and {_join(texts)} is text"
        weighed = survey.weigh(name, "tags", texts, values="several labels that repeat", points=VALUES + 1)
        yield _build_tags(survey, texts, [name], separator, reason, weighed)
    flags = [name for name in (named or survey.columns) if _is_flag(survey, name) or name in named]
    texts = survey.list_texts("")
    if len(flags) >= 3 and texts:
        reason = f"{len(flags)} columns hold 0 or 1 ({', '.join(flags[:4])} ...), and {_join(texts)} is text"
        evidence, doubts = survey.weigh(flags[0], "tags", texts, form="a column of 0 and 1 per label", read=flags)
        yield _build_tags(survey, texts, flags, ",", reason, (evidence, doubts))


def _is_flag(survey: Survey, name: str) -> bool:
    column = survey.columns[name]
    is_flag = {*column.values} in ({"0", "1"}, {"true", "false"}, {"0.0", "1.0"})
    is_label = survey.rate(name, "label") >= USUAL and not survey.rate(name, "flag")
    return is_flag and not is_label and not survey.is_aside(name)


def _find_tags(survey: Survey, name: str) -> tuple[str, Counter[str]] | None:
    """Find the separator and the labels of a column; None if its values are no sets of labels that repeat."""
    column = survey.columns[name]
    rating = survey.rate(name, "tags")
    values = [value for value in survey.table.list_values(name) if value is not None]
    if column.kind == "list":
        items = [item for value in values if isinstance(value, list) for item in value]
        tags = Counter(as_text(item) for item in items if isinstance(item, str | int))
        repeats = len(tags) <= MAX_LABELS and tags.total() >= 3 * len(tags)
        is_short = sum(len(tag.split()) for tag in tags) <= 5 * len(tags)
        is_fit = tags.total() == len(items) > 0 and is_short and (repeats or rating >= USUAL)
        return (", ", tags) if is_fit and rating >= 2 else None
    if column.kind != "text" or survey.rate(name, *READ) > max(1, rating):
        return None
    texts = [as_text(value) for value in values if as_text(value)]
    for separator in SEPARATORS:
        parts = [[part.strip() for part in text.split(separator) if part.strip()] for text in texts]
        tags = Counter(part for one in parts for part in one)
        num_several = sum(len(one) > 1 for one in parts)
        is_short = sum(len(tag.split()) for tag in tags) <= 4 * len(tags)
        is_open = survey.rate(name, "tags") >= CLEAR and num_several > 0.5 * len(texts)
        repeats = len(tags) <= MAX_LABELS and tags.total() >= 3 * len(tags)
        if num_several >= 0.1 * len(texts) and is_short and (repeats or is_open):
            return separator, tags
    return None


def _build_tags(
    survey: Survey,
    texts: Sequence[str],
    tags: Sequence[str],
    separator: str,
    reason: str,
    weighed: tuple[Sequence[Evidence], Sequence[str]],
) -> Reading:
    names, columns = name_slots([*texts, *tags])
    read, learned = names[: len(texts)], names[len(texts) :]
    options: JsonTable = {"inputs": build_template(read), "tags": learned, "separator": separator}
    roles = {"text": "\n".join(texts), "tags": "\n".join(tags)}
    return Reading("several labels", "tags", roles, "\n".join(tags), reason, *weighed, options, columns)


def read_numbers(survey: Survey) -> Iterator[Reading]:
    """Yield texts with a number that is no label: a similarity, a score. There is no metric for them yet."""
    if survey.given.keys() & {"inputs", "targets", "question", "answer", "label", "tags"}:
        return
    for name in survey.list_columns("number", "label", "targets", minimum=2, fits=_has_numbers):
        texts = survey.list_texts(name)
        if not texts:
            continue
        reason = f"{name} holds numbers, and {_join(texts)} {'holds' if len(texts) == 1 else 'hold'} text"
        evidence, doubts = survey.weigh(name, "number", texts, values="numbers that are no labels")
        weighed = (evidence, (*doubts, NO_PEARSON))
        yield build_pair(survey, "numbers as text", texts, name, reason, weighed, warnings=[NO_PEARSON])


def _has_numbers(column: Column) -> bool:
    has_fractions = not column.values or any(map(FRACTION.fullmatch, column.values))
    return column.kind == "number" and (has_fractions or not column.has_labels)


def _join(names: Sequence[str]) -> str:
    return " and ".join(names)


def name_slots(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return names that a template can hold, and data.columns for those that differ.

    >>> name_slots(["Betreff", "was {1}", "info.text"])
    (['Betreff', 'was__1', 'info_text'], {'was__1': 'was {1}', 'info_text': 'info.text'})
    """
    slots: list[str] = []
    for name in names:
        slot = name if not re.search(r"[{}\[\]!:.,]|^\s|\s$", name) else re.sub(r"\W", "_", name).strip("_") or "column"
        slots.append(slot if slot not in slots else f"{slot}_{len(slots)}")
    return slots, {slot: name for slot, name in zip(slots, names, strict=True) if slot != name}


FORMS: Mapping[str, Callable[[Survey], Iterator[Reading]]] = {
    "signatures": read_signatures,
    "chat": read_chat,
    "instructions": read_instructions,
    "questions": read_questions,
    "pairs": read_pairs,
    "labels": read_labels,
    "tags": read_tags,
    "numbers": read_numbers,
}
TASKS = frozenset((*SIGNATURES, "jsonl", "unifiedqa", "squad", "squad_v2", "gsm8k", "classification", "tags"))
