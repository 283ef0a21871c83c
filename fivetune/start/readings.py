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
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from fivetune.errors import RecordError
from fivetune.metrics.gsm8k import extract_final_number
from fivetune.start.columns import FRACTION, MAX_LABELS, Column, as_text, describe_column, find_value
from fivetune.start.roles import CLEAR, SUMMARIES, USUAL, find_language, split_name, split_names
from fivetune.start.survey import CODE, IN_TEXT, READ, SHORTER, VALUES, Evidence, Survey, iter_same
from fivetune.tasks import find_text
from fivetune.tasks._questions import read_gold_answers
from fivetune.tasks.unifiedqa import YES_NO
from fivetune.types import JsonTable, RawRecord

IN_CONTEXT = 0.7  # least share of answers that are parts of their context, if the task is extractive
LONG_ANSWER_WORDS = 8.0
SHORT_TARGET_WORDS = 2.0  # mean words up to which a target is right or wrong as a whole
CONTEXT_CHARS = 100  # mean characters from which on a text without a known name may be a context
SAMPLE = 2_000  # records of which answers are compared with contexts
CONFLICTS = 0.2  # share of records whose inputs another record has with another label
MAX_NUMBERED = 20  # distinct whole numbers up to which they may be labels without a name that says so
SEPARATORS = (";", "|", ",")
NO_PEARSON = "FiveTune has no correlation (Pearson) yet: exact_match counts equal numbers only"

TARGET_ROLES: Mapping[str, tuple[str, ...]] = {
    "label": ("label",),
    "tags": ("tags",),
    "answer": ("answer", "label"),
    "targets": ("targets", "answer", "number"),
}
"""Role of what is learned -> the words of roles.py that say so."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A task that may be meant by a table.

    Args:
        kind: the task in words.
        roles: role -> column, as --column names them.
        reason: what was seen of the columns.
        options: of the task, as a recipe has them.
        columns: data.columns.
        warnings: what the user should look at.
        evidence: points for and against it.
        doubts: why it is not taken without a word of the user.
    """

    kind: str
    task: str
    roles: Mapping[str, str]
    reason: str
    options: JsonTable = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    evidence: Sequence[Evidence] = ()
    doubts: Sequence[str] = ()
    id_column: str | None = None
    group_column: str | None = None

    @property
    def points(self) -> int:
        return sum(one.points for one in self.evidence)

    @property
    def target(self) -> str:
        """The columns that are learned, one a line; "" if the task has its own."""
        return next((names for role, names in self.roles.items() if role in TARGET_ROLES), "")

    def list_columns(self) -> list[str]:
        """List the columns that it reads or learns."""
        return [name for role, names in self.roles.items() for name in split_names(role, names)]

    def list_inputs(self) -> list[str]:
        """List the columns that it reads."""
        return [name for name in self.list_columns() if name not in self.target.split("\n")]


def add_evidence(
    survey: Survey,
    reading: Reading,
    *,
    form: str = "",
    values: str = "",
    points: int = VALUES,
    read: Sequence[str] = (),
    doubts: Sequence[str] = (),
) -> Reading:
    """Return a reading with its evidence (see `Survey.weigh`) and with further doubts."""
    names = next(names for role, names in TARGET_ROLES.items() if role in reading.roles)
    targets = reading.target.split("\n")
    further = (*targets[1:], *read)
    evidence, found = survey.weigh(
        targets[0], names, reading.list_inputs(), form=form, values=values, points=points, read=further
    )
    return replace(reading, evidence=evidence, doubts=(*found, *doubts))


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
        if not set(needed) <= survey.table.columns.keys():
            continue
        reason = f"it has the columns {', '.join(needed)} of that data set"
        found = Reading(task, task, {}, reason, evidence=[Evidence(100, reason)])
        if task == "stackoverflow_quality":
            known = {"LQ_CLOSE": "none", "LQ_EDIT": "low", "HQ": "high"}
            labels = sorted(survey.columns["Y"].values)
            own = {"labels": {label: known.get(label, label) for label in labels}} if {*labels} != {*known} else {}
            found = replace(found, roles={"label": "Y"}, options=own)
        if task == "bioasq_factoid":
            counts = survey.columns["type"].values
            kind = max(("factoid", "yesno"), key=lambda one: counts.get(one, 0))
            reason = f"{counts.get(kind, 0):,} of {survey.table.num_records:,} questions are of type {kind}"
            words = f"it has BioASQ's columns, and {reason}; the others are left out"
            found = replace(found, kind=f"BioASQ {kind}", task=f"bioasq_{kind}", reason=words)
        yield found


# --- text to text ---


def build_pair(
    survey: Survey,
    kind: str,
    sources: Sequence[str],
    target: str,
    reason: str,
    *,
    prefix: str = "",
    warnings: Sequence[str] = (),
) -> Reading:
    """Build a reading of task jsonl; a target that is a list has its first text learned, all of them scored."""
    names, columns = name_slots([*sources, target])
    inputs = prefix + build_template(names[:-1])
    if split_name(sources[0]) == ["prefix"]:
        inputs = ": ".join(f"{{{name}}}" for name in names[:-1])
    elif survey.rate(sources[0], "instruction") >= USUAL or re.search(r"\.\d+\.", sources[0]):  # a turn of a chat
        inputs = " ".join(f"{{{name}}}" for name in names[:-1])
    options: JsonTable = {"inputs": inputs, "targets": f"{{{names[-1]}}}"}
    if survey.columns[target].kind == "list":
        slot = f"{names[-1]}_first"
        columns |= {slot: f"{target}.0"}
        options |= {"targets": f"{{{slot}}}", "references": names[-1]}
    options |= choose_metrics(survey, target, kind)
    roles = {"inputs": "\n".join(sources), "targets": target}
    return Reading(kind, "jsonl", roles, reason, options, columns, warnings)


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
    is_ascii = "".join(survey.list_examples(target, 200)).isascii()
    rouge: object = "rouge" if is_ascii else {"name": "rouge", "words": "unicode"}
    if column.has_code:
        return {"metrics": ["exact_match", rouge], "main_metric": "exact_match"}
    if column.kind == "number" or (column.mean_words <= SHORT_TARGET_WORDS and column.kind == "text"):
        return {"metrics": ["exact_match"], "main_metric": "exact_match"}
    if kind == "translation" and find_spec("sacrebleu"):
        return {"metrics": ["bleu"], "main_metric": "chrf"}
    return {"metrics": [rouge], "main_metric": "rougeL_f1"}


def read_pairs(survey: Survey) -> Iterator[Reading]:
    """Yield each source with each target: by languages, else by names, else of two or three texts each with each."""
    languages = [name for name, column in survey.columns.items() if find_language(name) and column.kind == "text"]
    if len(languages) > 1 and not survey.given.keys() & {"inputs", "targets"}:
        for target in languages[1:]:  # the first is the source
            yield _read_pair(survey, languages[:1], target)
        return
    targets = survey.list_columns("targets", minimum=2)
    texts = [name for name, column in survey.columns.items() if column.has_text and not survey.is_aside(name)]
    if "targets" not in survey.given:
        unknown = [name for name in texts if survey.rate(name, "targets", *_INPUTS) == 0]
        targets = [name for name in targets if _can_be_target(survey.columns[name])]
        targets += unknown[::-1] if len(texts) <= 3 else []
    for target in targets:
        for sources in _list_sources(survey, target, texts):
            yield _read_pair(survey, sources, target)


_INPUTS = ("inputs", "text", "question")


def _can_be_target(column: Column) -> bool:
    is_answer = column.kind in ("text", "number") and not column.has_labels
    return is_answer or (column.kind == "list" and column.example.startswith(("['", '["')))


def _list_sources(survey: Survey, target: str, texts: Sequence[str]) -> list[list[str]]:
    """List the inputs that a target may have: the user's, else each text with a known name, else each text."""
    if "inputs" in survey.given:
        return [split_names("inputs", survey.given["inputs"])]
    prefixes = [name for name in survey.columns if split_name(name) == ["prefix"]]  # simpletransformers
    named = [name for name in survey.list_columns(*_INPUTS, "context", minimum=2) if survey.columns[name].has_text]
    unknown = [name for name in texts if survey.rate(name, "targets", "answer", *_INPUTS) < 2]
    known, others = ([name for name in names if name != target] for names in (named, unknown or texts))
    contexts = [name for name in survey.list_columns("context", minimum=USUAL) if name in known]
    questions = [name for name in known if survey.rate(name, "question") >= USUAL and name not in contexts]
    if questions and contexts:  # of a question and the schema of its tables, both
        return [[name for name in survey.columns if name in (questions[0], contexts[0])]]
    return [[*prefixes, name] for name in (known or others)[:3]]


def _read_pair(survey: Survey, sources: Sequence[str], target: str) -> Reading:
    first, last = survey.columns[sources[-1]], survey.columns[target]
    kind, prefix, form, values, points = "text to text", "", "", "", 0
    reason = f"{_join(sources)} {_choose_verb(sources)} what is read, {target} what is learned"
    others: list[str] = []
    doubts: list[str] = []
    is_short = last.mean_chars < 0.4 * first.mean_chars and last.mean_words >= 4
    if last.has_code:
        values, points = f"{target} holds code, a query or a formula", CODE
    elif is_short:
        values, points = f"{target} is shorter", SHORTER
    spoken = [find_language(name) for name in (sources[-1], target)]
    if split_name(sources[0]) == ["prefix"]:
        form = "a prefix for each record"
    elif all(spoken):
        kind, prefix = "translation", f"translate {spoken[0]} to {spoken[1]}: "
        form = reason = f"the columns {sources[-1]} and {target} are named after languages"
        others = [name for name in survey.columns if find_language(name) and name not in (*sources, target)]
        doubts += [f"{name} is named after a language, too" for name in others[:1]]
    elif last.kind == "number":
        kind = "numbers as text"
    elif is_short or (split_name(target)[-1] in SUMMARIES and survey.rate(target, "targets") >= 2):
        kind, prefix = "summarisation", "summarize: "
        reason = f"{target} is {last.mean_chars / max(first.mean_chars, 1):.0%} as long as {_join(sources)}"
    if survey.rate(sources[-1], *READ) < survey.rate(sources[-1], "targets"):
        doubts.append(f"{sources[-1]} is named as what is learned, too")
    unread = [name for name in survey.list_unread([*sources, target]) if not survey.columns[name].has_text]
    is_text = survey.rate(target, "targets") <= survey.rate(target, "text")
    if not form and is_text and any(map(survey.is_learnable, unread)):
        doubts.append(f"{target} is named as a text, too")
    if not form and survey.rate(target, "targets") < 2 and last.mean_chars > 3 * first.mean_chars:
        doubts.append(f"{target} is much longer than {sources[-1]}: perhaps the other way round")
    warnings = [NO_PEARSON] if last.kind == "number" else []
    found = build_pair(survey, kind, sources, target, reason, prefix=prefix, warnings=warnings)
    return add_evidence(survey, found, form=form, values=values, points=points, read=others, doubts=doubts)


def read_instructions(survey: Survey) -> Iterator[Reading]:
    """Yield instruction, input and output: the form of Alpaca and Dolly. An empty input is usual."""
    texts = {name for name, column in survey.columns.items() if column.kind == "text"}
    found = [name for name in survey.list_columns("instruction", minimum=USUAL) if split_name(name) != ["prefix"]]
    if "inputs" in survey.given or not texts.intersection(found):
        return
    targets = [name for name in survey.list_columns("targets", "answer", minimum=USUAL) if name in texts]
    further = survey.list_columns("inputs", "context", "question", minimum=USUAL)
    for target in targets:
        extra = [name for name in survey.columns if name in further and name in texts and name not in targets]
        inputs = [found[0], *(name for name in extra if name != found[0])]
        reason = f"{_join(inputs)} instruct, {target} is the answer"
        pair = build_pair(survey, "instructions", inputs, target, reason)
        yield add_evidence(survey, pair, form="instruction and output")


CHATS = (("role", "content", "system", "user", "assistant"), ("from", "value", "system", "human", "gpt"))


def read_chat(survey: Survey) -> Iterator[Reading]:
    """Yield the first exchange of lists of messages, {"role": ..., "content": ...} or {"from": ..., "value": ...}."""
    for name, column in survey.columns.items():
        chats = [value for value in survey.table.list_values(name) if isinstance(value, list)]
        for role, content, *speakers in CHATS if column.kind == "list" else ():
            spoken = [[turn.get(role) for turn in chat if isinstance(turn, Mapping)] for chat in chats]
            form = speakers if spoken[0][:1] == speakers[:1] else speakers[1:]  # with or without a system
            if sum(roles[: len(form)] == form for roles in spoken) < 0.5 * len(chats):
                continue
            paths = [f"{name}.{place}.{content}" for place in range(len(form))]
            described = {path: describe_column(path, survey.table.list_values(path)) for path in paths}
            reason = f"{name} holds messages by {_join(form)}; the first answer is learned"
            num_long = sum(len(roles) > len(form) for roles in spoken)
            further = f"{num_long:,} of {len(spoken):,} chats go on after the first answer, which is not read"
            own = replace(survey, columns={**survey.columns, **described})
            warnings = [further] if num_long else []
            found = build_pair(own, "chat", paths[:-1], paths[-1], reason, warnings=warnings)
            yield replace(found, evidence=[Evidence(100, "lists of messages")])


# --- questions ---


def read_questions(survey: Survey) -> Iterator[Reading]:
    """Yield questions with each column of answers; the values of the answers decide the form."""
    columns = survey.columns
    questions = [name for name in survey.list_columns("question", minimum=2) if columns[name].kind == "text"]
    if not questions:
        return
    question = questions[0]
    context = _find_context(survey, question)
    answers = [name for name in survey.list_columns("answer", minimum=2) if name not in (question, context)]
    roles = {"question": question} | ({"context": context} if context else {})
    lists = [name for name in survey.list_columns("choices", minimum=USUAL) if columns[name].kind in ("list", "object")]
    if lists:
        keys = answers or survey.list_columns("label", minimum=USUAL) or [lists[0]]
        yield _read_choices(survey, {**roles, "choices": lists[0]}, keys[0])
        return
    for answer in answers:
        if found := _read_answers(survey, {**roles, "answer": answer}):
            yield found


def _find_context(survey: Survey, question: str) -> str | None:
    """Find the text that questions are about: the clearest name, else the only long text without a known name."""
    names = [name for name, one in survey.columns.items() if one.has_text and name != question]
    known = [
        name
        for name in survey.list_columns("context", "text", minimum=2)
        if name in names and survey.rate(name, "answer", "targets") < USUAL
    ]
    if known and (survey.rate(known[0], "context") >= 2 or len(known) == 1):
        return known[0]
    unknown = [
        name
        for name in survey.list_columns("context", minimum=0)
        if name in names
        and survey.columns[name].mean_chars > CONTEXT_CHARS
        and survey.rate(name, *READ) == 0
        and survey.rate(name, *TARGET_ROLES["targets"]) == 0
    ]
    return unknown[0] if len(unknown) == 1 and not known else None


def _read_choices(survey: Survey, roles: Mapping[str, str], key: str) -> Reading:
    """Read multiple choice; `key` is the choices themselves if they mark the right one."""
    reason = f"{roles['question']} is text and {roles['choices']} a list in each record"
    named = {**roles, "answer": key} if key not in (roles["choices"], "answerKey", "label") else roles
    options: JsonTable = {"format": "multiple_choice", "lower_case": False}
    used = {**roles, "answer": key} if key != roles["choices"] else roles
    found = Reading("multiple choice", "unifiedqa", used, reason, options, named)
    if key == roles["choices"]:
        return replace(found, evidence=[Evidence(100, "choices of which one is marked")])
    return add_evidence(survey, found, form=reason)


def _read_answers(survey: Survey, roles: Mapping[str, str]) -> Reading | None:
    """Read questions by the values of their answers."""
    answer, context = roles["answer"], roles.get("context")
    column = survey.columns[answer]
    values = {value.lower() for value in column.values}
    inputs = [name for name in survey.columns if name in (roles["question"], context)]
    texts = survey.list_examples(answer, 200)
    num_marked = sum("####" in text and extract_final_number(text) is not None for text in texts)
    if values and len(values) <= 2 and values <= YES_NO.keys() and column.kind != "number":
        reason = f"all answers in {answer} are {' or '.join(sorted(column.values))}"
        own: JsonTable = {"format": "yes_no", "lower_case": False}
        found = Reading("yes/no questions", "unifiedqa", roles, reason, own, roles)
        return add_evidence(survey, found, values=reason) if len(values) == 2 else None
    if texts and num_marked >= 0.9 * len(texts):
        reason = f"{num_marked:,} of {len(texts):,} answers in {answer} end in #### and a number"
        used = {role: roles[role] for role in ("question", "answer")}
        found = Reading("reasoning with a final number", "gsm8k", used, reason, columns=used)
        return add_evidence(survey, found, values=reason, points=IN_TEXT)
    if column.kind == "number" or column.has_code:
        what = "numbers" if column.kind == "number" else "code"
        reason = f"the answers in {answer} are {what}"
        found = build_pair(survey, f"questions with {what} as answers", inputs, answer, reason)
        return add_evidence(survey, found, values=reason)
    key, golds = _read_golds(survey, answer)
    columns = {key if role == "answer" else role: name for role, name in roles.items()}
    if not golds:
        return None
    if context and (found := _read_extractive(survey, roles, columns, golds)):
        return found
    words = [len(one[0].split()) for one in golds if any(one)]
    mean_words = sum(words) / max(1, len(words))
    reason = f"the answers in {answer} have {mean_words:.0f} words on average and there is no context"
    if context or mean_words > LONG_ANSWER_WORDS:
        own = {"format": "abstractive", "lower_case": False}
        reason = reason.replace("there is no context", f"are often no parts of {context}") if context else reason
        found = Reading("questions with free answers", "unifiedqa", roles, reason, own, columns)
    else:
        own = {"template": "question: {question}"}
        found = Reading("questions without a context", "squad", roles, reason, own, columns)
    return add_evidence(survey, found, values=reason)


def _read_golds(survey: Survey, answer: str) -> tuple[str, list[tuple[str, ...]]]:
    """Return the name by which the tasks read a column of answers, and all answers; none if they cannot."""
    column = survey.columns[answer]
    key = "answers" if column.kind != "text" or column.example[:1] in ("[", "{") else "answer"
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
    return key, read if num_bad <= 0.1 * len(read) else []


def _read_extractive(
    survey: Survey, roles: Mapping[str, str], columns: Mapping[str, str], golds: Sequence[tuple[str, ...]]
) -> Reading | None:
    """Read answers that are parts of their contexts; None if too few are."""
    contexts = survey.table.list_values(roles["context"])
    answered = [(as_text(text), one) for text, one in zip(contexts, golds, strict=True) if any(map(str.strip, one))]
    answered = answered[:SAMPLE]
    num_found = sum(any(find_text(text, gold.strip()) for gold in one) for text, one in answered)
    if not answered or num_found < IN_CONTEXT * len(answered):
        return None
    num_open = sum(one == () for one in golds)
    reason = f"{num_found:,} of {len(answered):,} answers in {roles['answer']} are parts of their {roles['context']}"
    reason += f", and {num_open:,} questions have no answer" if num_open else ", and every question has an answer"
    task = "squad_v2" if num_open else "squad"
    found = Reading("extractive question answering", task, roles, reason, columns=columns)
    return add_evidence(survey, found, values=reason, points=IN_TEXT)


# --- labels ---


def read_labels(survey: Survey) -> Iterator[Reading]:
    """Yield each column of few and short values that repeat, as the label of the texts."""
    repeating = [name for name, column in survey.columns.items() if column.has_labels and not _is_amount(survey, name)]
    labels = [name for name in survey.list_columns("label", "answer", minimum=0) if name in repeating][:8]
    if not labels:  # a language is a label if nothing else is
        labels = [name for name in repeating if survey.rate(name, "label") > 1]
    twins = list(iter_same(survey, repeating))
    if "label" not in survey.given:
        numbered = {_choose_wordless(survey, *pair) for pair in twins}
        labels = [name for name in labels if name not in numbered]
    for label in labels:
        same = [name for pair in twins if label in pair for name in pair]
        choices = [survey.list_texts(label), survey.list_texts(label, only_known=True)]
        for texts in choices if choices[0] != choices[1] else choices[:1]:
            is_answer = survey.rate(label, "answer") >= USUAL > survey.rate(label, "label")
            if texts and not (is_answer and any(survey.rate(name, "question") > 2 for name in texts)):
                yield _read_label(survey, label, texts, same)


def _read_label(survey: Survey, label: str, texts: Sequence[str], same: Sequence[str]) -> Reading:
    column = survey.columns[label]
    shown = ", ".join(f"{value} ({count:,})" for value, count in list(column.values.items())[:4])
    num_more = len(column.values) - 4
    more = f" and {num_more} {'other' if num_more == 1 else 'others'}" if num_more > 0 else ""
    read = f"{_join(texts)} {_choose_verb(texts)} text"
    reason = f"{label} has {len(column.values)} values that repeat, {shown}{more}, and {read}"
    names, columns = name_slots([*texts, label])
    options: JsonTable = {"inputs": build_template(names[:-1]), "label": names[-1]}
    roles = {"text": "\n".join(texts), "label": label}
    found = Reading("classification", "classification", roles, reason, options, columns)
    doubts = _describe_conflicts(survey, texts, label)
    found = add_evidence(survey, found, values="the values repeat", read=same, doubts=doubts)
    unread = survey.list_unread([label, *texts, *same])
    is_only = len(texts) == 1 and not any(map(survey.is_learnable, unread))
    if survey.rate(label, "label", "answer") == 0 and not is_only:
        found = replace(found, doubts=(*found.doubts, "no column is named as a label"))
    return found


def _choose_wordless(survey: Survey, name: str, other: str) -> str:
    """Choose which of two columns that say the same is not learned: T5 learns words rather than numbers."""
    is_number = survey.columns[name].kind == "number"
    if is_number == (survey.columns[other].kind == "number"):
        return name if survey.rate(name, "label") < survey.rate(other, "label") else other
    return name if is_number else other


def _describe_conflicts(survey: Survey, texts: Sequence[str], label: str) -> list[str]:
    """Describe equal texts with different labels: then something is missing from the inputs, or there are several."""
    by_text: dict[tuple[str, ...], set[str]] = {}
    keys: list[tuple[str, ...]] = []
    for record in survey.table.records:
        keys.append(tuple(as_text(find_value(record.fields, name)) for name in texts))
        by_text.setdefault(keys[-1], set()).add(as_text(find_value(record.fields, label)))
    num_unlike = sum(len(by_text[key]) > 1 for key in keys)
    is_unclear = num_unlike >= CONFLICTS * len(keys)
    return [f"{num_unlike:,} records have the texts of others and another {label}"] if is_unclear else []


def read_tags(survey: Survey) -> Iterator[Reading]:
    """Yield several labels for each text: a list, a separated text, or a column of 0 and 1 for each label."""
    named = split_names("tags", survey.given["tags"]) if "tags" in survey.given else []
    for name in named or survey.columns:
        found = None if survey.is_aside(name) or len(named) > 1 else _find_tags(survey, name)
        texts = survey.list_texts(name) if found else []
        if texts and found:
            separator, tags = found
            reason = f"{name} has {len(tags):,} labels, several for some records, and {_join(texts)} is text"
            reading = _build_tags(texts, [name], separator, reason)
            yield add_evidence(survey, reading, values="several labels that repeat", points=VALUES + 1)
    flags = [name for name in named or survey.columns if name in named or _is_flag(survey, name)]
    texts = survey.list_texts("")
    if len(flags) >= 3 and texts:
        reason = f"{len(flags)} columns hold 0 or 1 ({', '.join(flags[:4])} ...), and {_join(texts)} is text"
        yield add_evidence(survey, _build_tags(texts, flags, ",", reason), form="a column of 0 and 1 per label")


def _is_flag(survey: Survey, name: str) -> bool:
    column = survey.columns[name]
    is_flag = {*column.values} in ({"0", "1"}, {"true", "false"}, {"0.0", "1.0"})
    is_label = survey.rate(name, "label") >= USUAL and not survey.rate(name, "flag")
    return is_flag and not is_label and not survey.is_aside(name)


def _find_tags(survey: Survey, name: str) -> tuple[str, Counter[str]] | None:
    """Find the separator and the labels of a column; None if its values are no sets of labels that repeat."""
    column = survey.columns[name]
    rating = survey.rate(name, "tags")
    values = [value for value in survey.table.list_values(name) if value]
    for separator in SEPARATORS if column.kind == "text" else [", "]:
        parts = [value if isinstance(value, list) else str(value).split(separator) for value in values]
        tags = Counter(as_text(part) for one in parts for part in one)
        num_several = sum(len(one) > 1 for one in parts)
        is_short = 0 < sum(len(tag.split()) for tag in tags) <= 5 * len(tags)
        repeats = len(tags) <= MAX_LABELS and tags.total() >= 3 * len(tags)
        is_known = rating >= (CLEAR if column.kind == "text" else USUAL) and num_several > 0.5 * len(values)
        if column.kind == "list" and rating >= 2:  # a list needs no guess about its parts: a few records may do
            repeats = len(tags) <= MAX_LABELS and tags.total() >= 1.5 * len(tags)
        is_tagged = survey.rate(name, *READ, *TARGET_ROLES["targets"]) <= max(1, rating)
        is_plain = all(isinstance(part, str | int) for one in parts for part in one)
        if column.kind not in ("text", "list") or not (is_tagged and is_plain and is_short):
            return None
        if num_several >= 0.1 * len(values) and (repeats or is_known):
            return separator, tags
    return None


def _build_tags(texts: Sequence[str], tags: Sequence[str], separator: str, reason: str) -> Reading:
    names, columns = name_slots([*texts, *tags])
    read, learned = names[: len(texts)], names[len(texts) :]
    options: JsonTable = {"inputs": build_template(read), "tags": learned, "separator": separator}
    roles = {"text": "\n".join(texts), "tags": "\n".join(tags)}
    return Reading("several labels", "tags", roles, reason, options, columns)


def read_numbers(survey: Survey) -> Iterator[Reading]:
    """Yield texts with a number that is no label: a similarity, a score. There is no metric for them yet."""
    for name in survey.list_columns("number", "label", "targets", minimum=2):
        texts = survey.list_texts(name)
        if texts and _is_amount(survey, name):
            reason = f"{name} holds numbers, and {_join(texts)} {_choose_verb(texts)} text"
            found = build_pair(survey, "numbers as text", texts, name, reason, warnings=[NO_PEARSON])
            yield add_evidence(survey, found, values="numbers that are no labels", doubts=[NO_PEARSON])


def _is_amount(survey: Survey, name: str) -> bool:
    """Whether a column holds numbers that are no labels: with fractions, or many whole ones without a label's name."""
    column = survey.columns[name]
    has_fractions = not column.values or any(map(FRACTION.fullmatch, column.values))
    is_many = column.num_distinct > MAX_NUMBERED and survey.rate(name, "label") < CLEAR
    return column.kind == "number" and (has_fractions or is_many or not column.has_labels)


def _join(names: Sequence[str]) -> str:
    return " and ".join(names)


def _choose_verb(names: Sequence[str]) -> str:
    return "holds" if len(names) == 1 else "hold"


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


FORMS: tuple[Callable[[Survey], Iterator[Reading]], ...] = (
    *(read_signatures, read_chat, read_instructions, read_questions, read_pairs, read_labels, read_tags, read_numbers),
)
TASKS = frozenset((*SIGNATURES, "jsonl", "unifiedqa", "squad", "squad_v2", "gsm8k", "classification", "tags"))
