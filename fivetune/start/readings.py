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

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

from fivetune.data.labels import PLACEHOLDERS
from fivetune.errors import RecordError
from fivetune.scores.metrics.gsm8k import extract_final_number
from fivetune.start.columns import (
    MAX_LABELS,
    MIN_WORDS,
    Column,
    as_text,
    count_words,
    find_value,
    is_empty_cell,
)
from fivetune.start.quizzes import read_quizzes
from fivetune.start.roles import CLEAR, USUAL, find_language, has_word, rate_name, split_name
from fivetune.start.survey import (
    ANNOTATIONS,
    CERTAIN,
    CODE,
    GENERAL_LABELS,
    IN_TEXT,
    LEARNED,
    LONG_WORDS,
    NUM_ANSWERED,
    READ,
    SAMPLE,
    SHORTER,
    TARGET_ROLES,
    UNKNOWN,
    VALUES,
    Evidence,
    Reading,
    Survey,
    is_statistic,
)
from fivetune.tasks import find_text, list_names
from fivetune.tasks._questions import read_gold_answers
from fivetune.tasks.tags import FLAGS
from fivetune.tasks.unifiedqa import YES_NO
from fivetune.types import JsonTable, RawRecord

IN_CONTEXT = 0.7  # least share of answers that are parts of their context, if the task is extractive
LONG_ANSWER_WORDS = 8.0
SHORT_TARGET_WORDS = 2.0  # mean words up to which a target is right or wrong as a whole
LESS_DETAIL = 0.5  # length of a text, as a share of a longer one, up to which it tells the same in less detail
CONFLICTS = 0.2  # share of records whose inputs another record has with another label
MAX_NUMBERED = 20  # distinct whole numbers up to which they may be labels without a name that says so
NOTES = "note notes notiz remark remarks comment comments"  # are no text that is asked about
LONG_CONTEXT = 20  # mean words from which on a text may be asked about
SEPARATORS = (";", "|", ",")  # of labels in one cell, beside line ends
LOOSE_SEPARATORS = ("/", "+", " ")  # words have these, too
MAX_WORDS = 3  # distinct words of a column that may be a label whatever its name
MIN_LABEL = 3  # characters of a label that is looked for in texts
NO_LABEL = "no column is named as a label"
OUTPUTS = "output outputs completion response answer answers reply a chosen gold reference"
NO_PEARSON = "numbers are learned as text, and exact_match counts equal ones only: there is no correlation yet"
STANCES = "against favor favour pro con support deny agree disagree"
SOURCES = ("inputs", "text", "question")  # roles of what a pair is learned from
CHATS = (
    ("role", "content", "system", "user", "assistant"),
    ("role", "text", "system", "user", "assistant"),
    ("from", "value", "system", "human", "gpt"),
)
TURN_TEXTS = ("text", "content", "utterance", "value", "message")
DIALOGUES = "messages chat chats turns dialog dialogs dialogue dialogues conversation conversations utterances"


# --- data sets that have a task of their own ---

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
        name, roles, options = task, {}, {}
        reason = f"it has the columns {', '.join(needed)} of that data set"
        if task == "stackoverflow_quality":
            roles = {"label": ("Y",)}
            options = {"labels": {label: QUALITIES.get(label, label) for label in sorted(survey.columns["Y"].values)}}
        elif task == "bioasq_factoid":
            counts = Counter(survey.columns["type"].values)
            kind = "yesno" if counts["yesno"] > counts["factoid"] else "factoid"
            name = f"bioasq_{kind}"
            reason += f", and {counts[kind]:,} questions are of type {kind}; the others are left out"
        yield Reading(name, name, roles, reason, options, evidence=[Evidence(CERTAIN, reason)])


# --- text to text ---


def fill_options(survey: Survey, reading: Reading) -> Reading:
    """Return a reading of texts with the options of its task: templates of its columns, and what scores the target.

    Of a target that is a list, the first text is learned, and all of them are scored.
    """
    if len(choices := reading.roles.get("choices", ())) > 1:
        names, columns = name_slots([name for name in choices if name not in reading.targets])
        names[:0] = ["answer"] * (len(choices) - len(names))  # the right one, if the others are wrong in all records
        return replace(reading, options={**reading.options, "choices": names}, columns={**reading.columns, **columns})
    if reading.task not in TEXT_TASKS:
        return reading
    targets = reading.targets
    names, columns = name_slots([*reading.inputs, *targets])
    read, learned = names[: -len(targets)], names[-len(targets) :]
    options: JsonTable = {"inputs": reading.prefix + _build_template(survey, reading.inputs, read), **reading.options}
    if reading.task == "tags":
        options["tags"] = learned
    elif reading.task == "classification":
        options["label"] = learned[0]
    else:
        name = targets[0]
        target = survey.describe(name)
        options["targets"] = f"{{{learned[0]}}}"
        if target.kind == "list":
            columns[f"{learned[0]}_first"] = f"{target.name}.0"
            options |= {"targets": f"{{{learned[0]}_first}}", "references": learned[0]}
            if survey.has_several(name):
                note = f"of the texts in each list of {name} the first is learned, and all count as right"
                reading = replace(reading, warnings=[*reading.warnings, note])
        options |= choose_metrics(survey, target, reading.kind)
    return replace(reading, options=options, columns=columns)


def _build_template(survey: Survey, columns: Sequence[str], slots: Sequence[str]) -> str:
    """Build the template of inputs; instructions and chats excepted, several have their names."""
    plain = [f"{{{name}}}" for name in slots]
    if split_name(columns[0]) == ["prefix"]:  # simpletransformers
        return ": ".join(plain)
    is_turn = re.search(r"\.\d+\.", columns[0]) is not None  # of a chat
    if len(slots) == 1 or is_turn or survey.rate(columns[0], "instruction") >= USUAL:
        return " ".join(plain)
    return " ".join(f"{name}: {{{name}}}" for name in slots)


def choose_metrics(survey: Survey, column: Column, kind: str) -> JsonTable:
    """Choose the metrics of a target, and the score that selects the best weights: one that sees its text.

    Code and answers of a word or two are right or wrong as a whole; of longer texts parts count.
    """
    is_ascii = "".join(survey.list_examples(column.name, 200)).isascii()
    rouge: object = "rouge" if is_ascii else {"name": "rouge", "words": "unicode"}
    if column.has_code:
        return {"metrics": ["exact_match", rouge], "main_metric": "exact_match"}
    own_words = column.mean_words - _count_shared_words(survey, column)
    if column.kind == "number" or (own_words <= SHORT_TARGET_WORDS and column.kind == "text"):
        return {"metrics": ["exact_match"], "main_metric": "exact_match"}
    if kind == "translation" and find_spec("sacrebleu"):
        return {"metrics": ["bleu"], "main_metric": "chrf"}
    return {"metrics": [rouge], "main_metric": "rougeL_f1"}


def _count_shared_words(survey: Survey, column: Column) -> int:
    """Count the words that all texts of a column begin with up to a mark: of ANSWER: D the first."""
    places = zip(*map(str.split, survey.list_examples(column.name, 200)), strict=False)
    shared = [words[0] for words in itertools.takewhile(lambda words: len({*words}) == 1, places)]
    return len(shared) if shared and shared[-1].endswith((":", "：", "=", "#", ">")) else 0


def read_pairs(survey: Survey) -> Iterator[Reading]:
    """Yield each source with each target: by languages, else by names, else of two or three texts each with each."""
    columns = survey.columns
    languages = [name for name, column in columns.items() if find_language(name) and column.has_text]
    is_translation = 1 < len(languages) == len({*map(find_language, languages)})  # several texts in one have a label
    if is_translation and not survey.given.keys() & {"inputs", "targets"}:
        for target in languages[1:]:  # the first is the source
            yield _read_pair(survey, languages[:1], target)
        return
    targets = survey.list_columns("targets", minimum=2)
    texts = [name for name in survey.list_unread(()) if columns[name].has_text]
    if "targets" not in survey.given:
        nested = [name for name in targets if columns[name].kind != "text" and not columns[name].is_list_of_texts]
        has_label = any(column.has_labels for column in columns.values())
        apart = [name for name in nested if _read_golds(survey, name, "answers")]
        apart += [name for name in nested if has_label and has_word(name, ANNOTATIONS)]
        targets = [form for name in targets if name not in apart for form in survey.list_forms(name)]
        if texts and all(survey.rate(name, "text") >= USUAL for name in targets):  # a title
            lists = [name for name in survey.list_unread(()) if survey.has_several(name) and survey.has_phrases(name)]
            targets += [form for name in lists if name not in (*targets, *apart) for form in survey.list_forms(name)]
        unknown = [name for name in reversed(texts) if survey.rate(name, "targets", *SOURCES) == 0]
        if len(texts) <= 3 or len(unknown) == 1:
            targets += unknown
        questions = [name for name in texts if survey.rate(name, "question") >= CLEAR]
        is_labelled = any(survey.rate(name, "label") == CLEAR for name in columns)
        if not targets and len(texts) <= 2 and not is_labelled:  # it may be written for a text, or for another one
            targets = questions[::-1]
    for target in targets:
        for sources in _list_sources(survey, target, texts):
            if sources[-1] in targets and survey.has_questions(target) and not survey.has_questions(sources[-1]):
                continue  # a question is not learned from its answer
            yield _read_pair(survey, sources, target)
            if target in columns and _is_longer_summary(survey, target, sources[-1]):
                yield _read_pair(survey, [target], sources[-1])
    is_told = not survey.given.keys().isdisjoint(("inputs", "targets"))
    for short, long in () if is_told else _find_levels(survey, texts):
        found = _read_pair(survey, [long], short)
        doubt = f"{short} may be a short form of {long}, or another text"
        yield found if found.doubts or survey.rate(short, "targets") >= 2 else replace(found, doubts=[doubt])


def _find_levels(survey: Survey, texts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield texts that report in less detail, by their lengths, what another text reports whose name shares a
    word: juniorDescription and seniorDescription.
    """
    chars = {name: survey.columns[name].mean_chars for name in texts if survey.columns[name].is_running}
    for name in chars:
        alike = [one for one in chars if not {*split_name(one)}.isdisjoint(split_name(name))]
        longest = max(alike, key=chars.__getitem__, default=name)
        if chars[name] < LESS_DETAIL * chars[longest]:
            yield name, longest


def _list_sources(survey: Survey, target: str, texts: Sequence[str]) -> list[list[str]]:
    """List the inputs that a target may have: the user's, else each text with a known name, else each text."""
    if "inputs" in survey.given:
        return [[*survey.given["inputs"]]]
    known = survey.list_columns(*SOURCES, "context", minimum=2)
    known = [name for name in known if survey.columns[name].has_text and name != target]
    contexts = [name for name in survey.list_columns("context", minimum=USUAL) if name in known]
    # nothing is answered from a query
    known = [name for name in known if name in contexts or not survey.columns[name].has_code] or known
    questions = [name for name in known if survey.rate(name, "question") >= USUAL and name not in contexts]
    if questions and contexts:  # of a question and the schema of its tables, both
        return [[name for name in survey.columns if name in (questions[0], contexts[0])]]
    unknown = [name for name in texts if survey.rate(name, "targets", "answer", *SOURCES) < 2]
    others = [name for name in unknown or texts if name != target]
    long = [name for name in contexts if survey.columns[name].mean_words >= LONG_CONTEXT]
    if long and survey.rate(target, "targets") == 0 and len(known) > len(contexts):  # what a text asks of a long one
        short = next(name for name in known if name not in contexts)
        return [[name for name in survey.columns if name in (short, long[0])], [short], long[:1]]
    both = [name for name in texts if name != target]
    is_unknown = survey.rate(target, "targets", "label") == 0
    are_read = len(both) == 2 and all(survey.rate(name, "targets", "answer") < 2 for name in both)
    if is_unknown and target == texts[-1] and are_read:  # one text of two others
        return [both, *([name] for name in (known or others)[:2])]
    return [[name] for name in (known or others)[:3]]


def _is_longer_summary(survey: Survey, name: str, other: str) -> bool:
    """Whether a column is named as a summary, and its texts are longer than those of another column."""
    return rate_name("summary", name) >= 2 and survey.describe(name).mean_chars > survey.columns[other].mean_chars


def _read_pair(survey: Survey, sources: Sequence[str], target: str) -> Reading:
    source = sources[-1]
    first, last = survey.columns[source], survey.describe(target)
    kind, prefix, form, values, points = "text to text", "", "", "", 0
    reason = f"{_describe_columns(sources)} what is read, {target} what is learned"
    used = [*sources, target, target.removesuffix(".*")]
    others: list[str] = []
    # what the values of the target say
    is_short = last.mean_chars < 0.4 * first.mean_chars and last.mean_words >= 4
    is_longer = _is_longer_summary(survey, target, source)
    is_unknown = survey.rate(target, "targets") == 0
    if last.has_code:
        values, points = f"{target} holds code, a query or a formula", CODE
    elif target in survey.golds and any(map(survey.is_of_system, survey.free)):
        values, points = f"{target} is right, others what systems answered", IN_TEXT
    elif is_short or is_longer:
        values, points = f"length of {target}", SHORTER if is_short else UNKNOWN
    # the kind of the pair
    languages = find_language(source), find_language(target)
    if all(languages) and languages[0] != languages[1]:
        kind, prefix = "translation", f"translate {languages[0]} to {languages[1]}: "
        form = reason = f"the columns {source} and {target} are named after languages"
        others = [name for name in survey.columns if find_language(name) and name not in used]
    elif not is_longer and rate_name("summary", target) >= 2:
        kind, prefix = "summarisation", "summarize: "
        reason = f"{target} is {last.mean_chars / max(first.mean_chars, 1):.0%} as long as {_join(sources)}"
    # what speaks against it
    named = survey.rate(target, "targets")
    texts = [name for name in survey.columns if survey.columns[name].has_text]
    is_text = named <= survey.rate(target, "text") and survey.can_learn_other([*used, *texts])
    table = [
        (last.has_fractions, NO_PEARSON),
        (survey.rate(source, *READ) < survey.rate(source, "targets"), f"{source} is named as what is learned, too"),
    ]
    if not form:
        table += [
            (is_longer, f"{target} is longer than {source}, so it is no summary of it: perhaps the other way round"),
            (is_text and not is_unknown, f"{target} is named as a text, too"),
            (is_text and is_unknown, f"no name says that {target} is learned"),
        ]
    doubts = [words for is_so, words in table if is_so]
    if target in survey.golds:
        doubts += _describe_outputs(
            [name for name in texts if survey.rate(name, "targets") == CLEAR and name not in used]
        )
    if _is_named_output(target) or last.has_code:
        doubts += _describe_outputs(_list_outputs(survey, used))
    found = Reading(kind, "jsonl", {"inputs": sources, "targets": (target,)}, reason, prefix=prefix)
    return survey.weigh(found, form=form, values=values, points=points, read=others, doubts=doubts)


def read_instructions(survey: Survey) -> Iterator[Reading]:
    """Yield instruction, input and output: the form of Alpaca and Dolly. An empty input is usual."""
    texts = [name for name, column in survey.columns.items() if column.kind == "text"]
    found = survey.list_columns("instruction", minimum=USUAL)
    if "inputs" in survey.given or not set(texts).intersection(found):
        return
    learned = survey.list_columns("targets", "answer", minimum=USUAL)
    targets = [form for name in learned for form in ([name] if name in texts else survey.list_forms(name))]
    further = survey.list_columns("inputs", "context", "question", minimum=USUAL)
    read = [found[0], *(name for name in texts if name in further and name not in (*targets, found[0]))]
    for target in targets:
        reason = f"{_join(read)} instruct, {target} is the answer"
        pair = Reading("instructions", "jsonl", {"inputs": read, "targets": [target]}, reason)
        doubts = _describe_outputs(_list_outputs(survey, [*read, target]))
        yield survey.weigh(pair, form="instruction and output", doubts=doubts)


def read_chat(survey: Survey) -> Iterator[Reading]:
    """Yield the first exchange of lists of messages, {"role": ..., "content": ...} or {"from": ..., "value": ...}, or
    of texts."""
    for name, column in survey.columns.items():
        member = _find_text_of_turns(survey, name) if has_word(name, DIALOGUES) else None
        if member is not None:
            reason = f"{name} holds the turns of dialogues; the first answer is learned, and what follows is not read"
            roles = {"inputs": [f"{name}.0{member}"], "targets": [f"{name}.1{member}"]}
            others = _describe_outputs(_list_outputs(survey, [name]))
            evidence = [Evidence(CERTAIN, "lists of turns")]
            yield Reading("chat", "jsonl", roles, reason, evidence=evidence, doubts=others)
        for role, content, *speakers in CHATS if column.kind == "list" else ():
            yield from _read_messages(survey, name, role, content, speakers)


def _find_text_of_turns(survey: Survey, name: str) -> str | None:
    """Find the member of turns without a role that holds their text, with a dot before: the second one of pairs with a
    speaker; "" for turns that are texts, None for others.
    """
    column = survey.columns[name]
    if column.is_list_of_texts:
        return ""
    lists = [value for value in survey.table.list_values(name) if isinstance(value, list)]
    turns = [turn for value in lists[:SAMPLE] for turn in cast("list[object]", value)]
    if turns and all(isinstance(turn, list) and len(cast("list[object]", turn)) == 2 for turn in turns):
        return ".1"
    objects = [turn for turn in turns if isinstance(turn, Mapping)]
    if column.kind != "list" or not objects or not {*objects[0]}.isdisjoint(role for role, *_ in CHATS):
        return None
    return next((f".{one}" for one in TURN_TEXTS if all(isinstance(turn.get(one), str) for turn in objects)), None)


def _read_messages(survey: Survey, name: str, role: str, content: str, speakers: Sequence[str]) -> Iterator[Reading]:
    """Yield the readings of a column of chats.

    Args:
        role, content: the members of a message with its speaker and its text.
        speakers: system, user and assistant as `role` names them.
    """
    chats = [value for value in survey.table.list_values(name) if isinstance(value, list)]
    spoken = [[turn.get(role) for turn in chat if isinstance(turn, Mapping)] for chat in chats]
    if not any(content in turn for chat in chats for turn in chat if isinstance(turn, Mapping)):
        return
    form = speakers if spoken[0][:1] == speakers[:1] else speakers[1:]  # with or without a system
    num_other = sum(roles[: len(form)] != form for roles in spoken)
    paths = [f"{name}.{place}.{content}" for place in range(len(form))]
    if num_other > 0.5 * len(chats):
        # what is asked alone, beside a column of answers
        answers = survey.list_columns("targets", "answer", minimum=USUAL)
        for target in answers if all(roles == form[:-1] for roles in spoken) else ():
            reason = f"{name} holds messages by {_join(form[:-1])}, and {target} the answer"
            roles = {"inputs": paths[:-1], "targets": [target]}
            others = _describe_outputs([one for one in answers if one != target])
            evidence = [Evidence(CERTAIN, "messages that end with a question")]
            yield Reading("chat", "jsonl", roles, reason, evidence=evidence, doubts=others)
        return
    reason = f"{name} holds messages by {_join(form)}; the first answer is learned"
    num_long = sum(len(roles) > len(form) for roles in spoken)
    further = f"{num_long:,} of {len(chats):,} chats go on after the first answer, which is not read"
    warnings = [further] if num_long else []
    counts = Counter(str(one) for roles in spoken for one in roles if one not in speakers)
    shown = ", ".join(f"{one} ({number:,})" for one, number in counts.most_common(5))
    doubts: list[str] = []
    if num_other:  # a call of a tool would be learned as the answer
        others = f"{num_other:,} of {len(chats):,} chats do not begin with {_join(form)}"
        doubts.append(f"{others}, and their first turns are read as if they did{f': {shown}' if shown else ''}")
    elif shown:
        warnings.append(f"turns of others are not read: {shown}")
    warnings += [f"{one} is not read" for one in survey.columns if one in ("tools", "functions")]
    outputs = _list_outputs(survey, [name])
    doubts += _describe_outputs(outputs)
    evidence = [Evidence(CERTAIN, "lists of messages")]
    for target in (paths[-1], *outputs):
        roles = {"inputs": paths[:-1], "targets": [target]}
        yield Reading("chat", "jsonl", roles, reason, warnings=warnings, evidence=evidence, doubts=doubts)


# --- questions ---


def read_questions(survey: Survey) -> Iterator[Reading]:
    """Yield questions with each column of answers; the values of the answers decide the form."""
    columns = survey.columns
    named = [name for name in survey.list_columns("question", minimum=2) if columns[name].kind == "text"]
    questions = [name for name in named if not columns[name].has_code] or named  # a query in SQL is none
    is_told = {"question", "answer"} <= survey.given.keys() and "context" not in survey.given
    contexts = {name: found for name in questions[:1] if not is_told and (found := _find_context(survey, name))}
    yield from read_quizzes(survey, contexts)
    if not questions:
        return
    context = contexts.get(questions[0])
    for answer in survey.list_columns("answer", minimum=2):
        if answer not in (questions[0], context):
            for roles, doubts in _list_asked(survey, questions, context, answer):
                if found := _read_answers(survey, {**roles, "answer": answer}):
                    yield replace(found, doubts=[*doubts, *found.doubts])


def _list_asked(
    survey: Survey, questions: Sequence[str], context: str | None, answer: str
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the roles of what may be asked, with their doubts: the question and its context, the question alone if the
    context has the length of a title and the answers are longer texts, another column of questions.
    """
    columns = survey.columns
    question, *rest = questions
    others = [name for name in rest if columns[name].is_running and columns[name].has_text]
    doubts = [f"{one} is named as a question, too" for one in others[:1] if "question" not in survey.given]
    if context:
        is_title = columns[answer].is_running and columns[context].mean_words < LONG_WORDS
        title = [f"{context} may be the title of a source, in which {answer} is not found"] if is_title else []
        yield {"question": question, "context": context}, [*title, *doubts]
        if is_title and not survey.is_given(context):
            yield {"question": question}, doubts
    else:
        yield {"question": question}, doubts
    for other in others[:1] if doubts else ():
        yield {"question": other, **({"context": context} if context else {})}, doubts


def _find_context(survey: Survey, question: str) -> str | None:
    """Find the text that questions are about: the one with the clearest name."""
    texts = [name for name in survey.list_columns("context", "text", minimum=2) if survey.columns[name].has_text]
    texts = [name for name in texts if survey.is_given(name) or not has_word(name, NOTES)]
    texts = [name for name in texts if survey.rate(name, "question") < 2 or survey.rate(name, "context") >= USUAL]
    known = [name for name in texts if name != question and survey.rate(name, "answer", "targets", "label") < USUAL]
    if known and (survey.rate(known[0], "context") >= 2 or len(known) == 1):
        return known[0]
    return None


def _read_answers(survey: Survey, roles: Mapping[str, str]) -> Reading | None:
    """Read questions by the values of their answers."""
    answer, context = roles["answer"], roles.get("context")
    column = survey.columns[answer]
    points, options, columns = VALUES, {"lower_case": False}, roles
    values = {value.lower() for value in column.values}
    texts = survey.list_examples(answer, 200)
    num_marked = sum("####" in text and extract_final_number(text) is not None for text in texts)
    if values and values <= YES_NO.keys() and column.kind != "number":
        kind, task = "yes/no questions", "unifiedqa"
        options |= {"format": "yes_no"}
        reason = f"all answers in {answer} are {' or '.join(sorted(column.values))}"
    elif texts and num_marked >= 0.9 * len(texts):
        kind, task, points = "reasoning with a final number", "gsm8k", IN_TEXT
        options, columns = {}, {"question": roles["question"], "answer": answer}
        reason = f"{num_marked:,} of {len(texts):,} answers in {answer} end in #### and a number"
    elif column.kind == "number" or column.has_code or _has_mark(survey, column):
        what = "code" if column.has_code else "words behind a mark"
        what = "numbers" if column.kind == "number" else what
        kind, reason = f"questions with {what} as answers", f"the answers in {answer} are {what}"
        inputs = [name for name in survey.columns if name in (roles["question"], context)]
        is_told = "answer" in survey.given
        named = {role: [name] for role, name in roles.items()} if is_told else {"inputs": inputs, "targets": [answer]}
        return survey.weigh(Reading(kind, "jsonl", named, reason), values=reason)
    else:
        # texts, or lists of texts
        key = "answers" if column.kind != "text" or column.example[:1] in ("[", "{") else "answer"
        golds = _read_golds(survey, answer, key)
        if not golds:
            return None
        columns = {key if role == "answer" else role: name for role, name in roles.items()}
        num_open = sum(one == () for one in golds)
        num_found, num_answered = _count_parts(survey, context, golds) if context else (0, 0)
        words = [count_words(one[0]) for one in golds if any(one)]
        mean_words = sum(words) / max(1, len(words))
        where = f"are often no parts of {context}" if context else "there is no context"
        reason = f"the answers in {answer} have {mean_words:.0f} words on average and {where}"
        if num_answered and num_found >= IN_CONTEXT * num_answered:
            kind, task, options, points = "extractive question answering", "squad", {}, IN_TEXT
            reason = f"{num_found:,} of {num_answered:,} answers in {answer} are parts of their {context}, and "
            reason += f"{num_open:,} questions have no answer" if num_open else "every question has an answer"
            if num_open:
                task = "squad_v2"
        elif context or mean_words > LONG_ANSWER_WORDS:
            kind, task = "questions with free answers", "unifiedqa"
            options |= {"format": "abstractive"}
        else:
            kind, task, options = "questions without a context", "squad", {"template": "question: {question}"}
    found = Reading(kind, task, {role: (name,) for role, name in roles.items()}, reason, options, columns)
    return survey.weigh(found, values=reason, points=points)


def _has_mark(survey: Survey, column: Column) -> bool:
    """Whether answers are a word or two behind words that all of them begin with, which say nothing of them."""
    num_shared = _count_shared_words(survey, column) if column.kind == "text" else 0
    return num_shared > 0 and column.mean_words - num_shared <= SHORT_TARGET_WORDS


def _read_golds(survey: Survey, answer: str, key: str) -> list[tuple[str, ...]]:
    """Return all answers of each record, as the tasks read them by the name `key`; none if they cannot."""
    found: list[tuple[str, ...]] = []
    num_bad = 0
    for value in survey.table.list_values(answer):
        text = as_text(value) if isinstance(value, int | float) else value
        try:
            found.append(read_gold_answers(RawRecord({key: text}, "")) or ())
        except RecordError:
            num_bad += 1
            found.append(("",))
    return found if num_bad <= 0.1 * len(found) else []


def _count_parts(survey: Survey, context: str, golds: Sequence[tuple[str, ...]]) -> tuple[int, int]:
    """Count the answers of the first NUM_ANSWERED records that are parts of their contexts, and all of them."""
    num_found = num_answered = 0
    for text, answers in zip(survey.table.list_values(context, NUM_ANSWERED), golds, strict=False):
        if any(map(str.strip, answers)):
            num_answered += 1
            num_found += any(find_text(as_text(text), gold.strip()) for gold in answers)
    return num_found, num_answered


# --- labels ---


def read_labels(survey: Survey) -> Iterator[Reading]:
    """Yield each column of few and short values that repeat, as the label of the texts."""
    repeating = [name for name, column in survey.columns.items() if column.has_labels and not _is_amount(survey, name)]
    labels = [name for name in survey.list_columns("label", "answer", minimum=0) if name in repeating][:8]
    facts = [name for name in survey.columns if survey.is_aside(name) and survey.columns[name].num_distinct > 1]
    if not labels and all(name in repeating or rate_name("id", name) >= USUAL for name in facts):  # a language may be
        labels = [name for name in repeating if survey.rate(name, "label") > 1]
    for label in labels:
        same = [name for name in repeating if survey.is_same(name, label)]
        if "label" not in survey.given and label != _choose_words(survey, same):
            continue
        is_answer = survey.rate(label, "answer") >= USUAL > survey.rate(label, "label")
        for texts, spare, doubts in _list_read(survey, label, same):
            has_question = any(survey.rate(name, "question") > 2 for name in texts)
            if texts and not (is_answer and has_question):
                yield _read_label(survey, label, texts, [*same, *spare], doubts)


def _list_read(survey: Survey, label: str, same: Sequence[str]) -> Iterator[tuple[list[str], list[str], list[str]]]:
    """Yield the texts that a label may be given for, what else is known of them, and why it is doubtful."""
    texts, known = survey.list_texts(label), survey.list_texts(label, only_known=True)
    leaks = [name for name in texts if _has_gaps(survey, name, label)]
    leaks = [name for name in leaks if survey.rate(name, *READ) < 2] or leaks  # rather than a passage
    told = [name for name in texts if _is_label_told(survey, name, label)]
    pairs = itertools.combinations(texts, 2)
    alike = next((pair for pair in pairs if survey.is_copy(*pair) or survey.is_version(*pair)), ())
    doubts: list[str] = []
    if 0 < len(leaks) < len(texts):
        doubts.append(f"{_join(leaks)} is filled for some values of {label} only, as what the giver of it writes")
        yield [name for name in texts if name not in leaks], leaks, doubts
    if 0 < len(told) < len(texts):
        doubts.append(f"{_join(told)} holds the {label} itself in nearly all records, as a reasoning about it does")
        yield [name for name in texts if name not in told], told, doubts
    if alike:
        doubts.append(f"{_join(alike)} hold nearly the same texts, one of which is enough")
    for spare in reversed(alike):
        yield [name for name in texts if name != spare], [spare], doubts
    if alike:
        return
    # what the texts are about, and answers to them, if these tell labels apart; a text that repeats may be that
    for name in survey.list_unread([label, *same, *texts]) if texts and "text" not in survey.given else ():
        column = survey.columns[name]
        is_subject = survey.is_subject(name)
        is_answer = column.has_text and survey.rate(name, "answer") >= USUAL
        is_told = is_subject and _is_stance(survey, label)
        is_said = column.has_labels and column.kind == "text" and column.mean_words >= MIN_WORDS
        if not is_told and is_said and survey.rate(label, "label") > survey.rate(name, "label"):
            doubts.append(f"{name} holds texts that repeat, and may be read or not")
            is_told = True
        if is_told or ((is_subject or is_answer) and _is_missing(survey, texts, label, name)):
            named = [f"{name} is named as an answer, and may be read or not"] if is_answer else []
            yield [one for one in survey.columns if one in (*texts, name)], [], [*doubts, *named]
    yield texts, [], doubts
    if known != texts:
        yield known, [], doubts


def _has_gaps(survey: Survey, name: str, label: str) -> bool:
    """Whether a text is there for some labels, and missing for others: "N/A", if its name says nothing of it."""
    absent = PLACEHOLDERS if survey.rate(name, *READ) < 2 else ()
    if not absent and survey.columns[name].num_filled > 0.95 * survey.table.num_records:
        return False
    filled: dict[str, list[bool]] = {}
    columns = (survey.table.list_values(one, NUM_ANSWERED) for one in (label, name))
    for value, text in zip(*columns, strict=True):
        is_blank = is_empty_cell(text) or as_text(text) in absent
        filled.setdefault(as_text(value), []).append(not is_blank)
    shares = [sum(of_label) / len(of_label) for of_label in filled.values() if len(of_label) >= 3]
    return len(shares) > 1 and min(shares) < 0.2 and max(shares) > 0.8


def _is_label_told(survey: Survey, name: str, label: str) -> bool:
    """Whether a text holds the label in nearly all records: words that another label has are not in the text."""
    records = survey.table.records[:SAMPLE]
    pairs = [(as_text(find_value(one.fields, name)), as_text(find_value(one.fields, label))) for one in records]
    filled = [(text.casefold(), value.casefold()) for text, value in pairs if len(value) >= MIN_LABEL]
    num_told = sum(re.search(rf"\b{re.escape(value)}\b", text) is not None for text, value in filled)
    return num_told > 0.9 * len(records)


def _is_stance(survey: Survey, label: str) -> bool:
    values = {value.casefold() for value in survey.columns[label].values}
    return "stance" in split_name(label) or not values.isdisjoint(STANCES.split())


def _is_missing(survey: Survey, texts: Sequence[str], label: str, name: str) -> bool:
    """Whether equal texts have different labels, and do not with another column beside them."""
    before = _count_conflicts(survey, texts, label)
    return (
        before >= CONFLICTS * survey.table.num_records and _count_conflicts(survey, [*texts, name], label) < before / 2
    )


def _read_label(
    survey: Survey, label: str, texts: Sequence[str], same: Sequence[str], doubts: Sequence[str]
) -> Reading:
    values = survey.columns[label].values
    shown = ", ".join(f"{value} ({count:,})" for value, count in list(values.items())[:4])
    if len(values) > 4:
        shown += ", ..."
    reason = f"{label} has {len(values)} values that repeat, {shown}, and {_describe_columns(texts)} text"
    found = Reading("classification", "classification", {"text": texts, "label": (label,)}, reason)
    is_only = len(texts) == 1 and survey.columns[label].num_filled > 0.9 * survey.table.num_records
    is_only = is_only and not survey.can_learn_other([label, *texts, *same])
    doubts = [*doubts, *_describe_values(survey, texts, label)]
    if survey.rate(label, "label", "answer") == 0 and not is_only:
        doubts.append(NO_LABEL)
    if "label" not in survey.given:
        doubts += _find_rivals(survey, label, [label, *texts, *same])
        if label in survey.attributes:
            others = [name for name in survey.attributes if name != label]
            told = f"{list_names(others)} may be learned, too: the texts hold their values, as those of {label}"
            doubts.insert(0, told)
    starts = {value.casefold()[:3] for value in values}  # positive, negativ, pozitivní: what else would be learned
    is_opinion = survey.columns[label].kind == "text" and starts in ({"pos", "neg"}, {"pos", "neg", "neu"})
    points = VALUES + CLEAR if is_opinion and survey.rate(label, "label") == 0 else VALUES
    return survey.weigh(found, values="the values repeat", points=points, read=same, doubts=doubts)


def _find_rivals(survey: Survey, label: str, used: Sequence[str]) -> Iterator[str]:
    """Yield what may be meant instead of a label: another label, unless the name is a general one, or an output."""
    unread = survey.list_unread(used)
    least = USUAL if survey.rate(label, "label") >= USUAL else 0
    labels = [name for name in unread if survey.columns[name].has_labels and not _is_amount(survey, name)]
    named = [name for name in labels if survey.rate(name, "label", "flag", "answer") >= least]
    values = survey.columns[label].values
    # names that say nothing: words such as truthful and deceptive, or 0 and 1 of what one word names, or the same
    # values, as of several aspects
    unknown = [name for name in labels if survey.rate(name, *READ, *LEARNED) == 0 and name not in named]
    others = [*named, *(name for name in unknown if _is_judgement(survey, name) or _has_values(survey, name, values))]
    if others and not has_word(label, GENERAL_LABELS):
        yield f"{_join(others[:2])} may be the label, too"
    yield from _describe_outputs(_list_outputs(survey, used))


def _is_judgement(survey: Survey, name: str) -> bool:
    """Whether the values of a column are two or three single words, or 0 and 1 of what one word names: `ironic`, but
    not `has_link`.
    """
    column = survey.columns[name]
    is_flag = _has_values(survey, name, {"0", "1"}) and len(split_name(name)) == 1
    return is_flag or (column.kind == "text" and column.num_distinct <= MAX_WORDS and column.mean_words <= 1)


def _has_values(survey: Survey, name: str, values: Collection[str]) -> bool:
    return survey.columns[name].values.keys() == {*values}


def _list_outputs(survey: Survey, used: Sequence[str]) -> list[str]:
    """List the further columns that are named as what is learned."""
    unread = survey.list_unread({*used, *(name.removesuffix(".*") for name in used)})
    return [name for name in unread if _is_named_output(name) and survey.list_forms(name)]


def _is_named_output(name: str) -> bool:
    """Whether the last word of a name says that the column is learned; a name such as `0` has no word."""
    words = split_name(name)
    return bool(words) and words[-1] in OUTPUTS.split()


def _describe_outputs(outputs: Sequence[str]) -> list[str]:
    return [f"{name} is named as what is learned, too, and is not read" for name in outputs]


def _choose_words(survey: Survey, same: Sequence[str]) -> str:
    """Choose which of the columns that say the same is learned: T5 learns words rather than numbers."""
    ranks = {name: (survey.columns[name].kind != "number", survey.rate(name, "label")) for name in reversed(same)}
    return max(ranks, key=ranks.__getitem__)


def _describe_values(survey: Survey, texts: Sequence[str], label: str) -> Iterator[str]:
    """Yield that equal texts have different labels: something is missing from the inputs."""
    num_unlike = _count_conflicts(survey, texts, label)
    if num_unlike >= CONFLICTS * survey.table.num_records:
        yield f"{num_unlike:,} records have the texts of others and another {label}"


def _count_conflicts(survey: Survey, texts: Sequence[str], label: str) -> int:
    """Count the records whose texts others have with another label."""
    by_text: dict[tuple[str, ...], Counter[str]] = {}
    for record in survey.table.records:
        key = tuple(as_text(find_value(record.fields, name)) for name in texts)
        value = find_value(record.fields, label)
        if not is_empty_cell(value):
            by_text.setdefault(key, Counter())[as_text(value)] += 1
    return sum(labels.total() for labels in by_text.values() if len(labels) > 1)


def read_tags(survey: Survey) -> Iterator[Reading]:
    """Yield several labels for each text: a list, a separated text, numbered columns, a column of 0 and 1 for each."""
    named = survey.given.get("tags", ())
    for name in named or survey.list_unread(()):
        separator = _find_separator(survey, name) if len(named) < 2 else ""
        texts = survey.list_texts(name) if separator else []
        if texts:
            num_blank = survey.table.num_records - survey.columns[name].num_filled
            blank = f", {num_blank:,} have none" if num_blank else ""
            reason = f"{name} has several labels for some records{blank}, and {_describe_columns(texts)} text"
            is_guess = survey.is_mostly_blank(name) and survey.rate(name, "tags") < CLEAR
            doubts = [f"{name} is empty in {num_blank:,} records, which are learned to have no label"] * is_guess
            roles = {"text": texts, "tags": [name]}
            reading = Reading("several labels", "tags", roles, reason, {"separator": separator})
            points = IN_TEXT if _are_combined(_split_cells(survey, name, separator)) else VALUES + 1
            yield survey.weigh(reading, values="several labels that repeat", points=points, doubts=doubts)
    yield from _read_columns_of_tags(survey)


def _read_columns_of_tags(survey: Survey) -> Iterator[Reading]:
    """Yield several labels in a column each: columns of words, or one of 0 and 1 for each label."""
    named, texts = survey.given.get("tags", ()), survey.list_texts("")
    if not texts:
        return
    are_flags = all({*survey.columns[name].values} <= FLAGS.keys() for name in named)
    stems = Counter(" ".join(split_name(name)) for name in survey.columns)
    flags = named if are_flags else []
    flags = flags or [name for name in survey.list_unread(()) if not named and _is_flag(survey, name, stems)]
    if len(flags) >= 3:
        shown = ", ".join([*flags[:4], *(["..."] if len(flags) > 4 else [])])
        reason = f"{len(flags)} columns hold 0 or 1 ({shown}), and {_describe_columns(texts)} text"
        own = {"separator": _choose_separator(flags)}
        reading = Reading("several labels", "tags", {"text": texts, "tags": flags}, reason, own)
        # facts that are yes or no stand beside a label of words, too
        words = [name for name in survey.list_unread([*flags, *texts]) if survey.columns[name].kind == "text"]
        labels = [name for name in words if survey.columns[name].has_labels]
        doubts = [f"{_join(labels[:2])} may be the label, too"] if labels else []
        yield survey.weigh(reading, form="a column of 0 and 1 per label", doubts=doubts)
    numbered = [] if named else _find_numbered(survey)
    several = named if len(named) > 1 and not are_flags else survey.attributes
    for names, form in ((numbered, "numbered columns of labels"), (several, "")):
        if names:
            reason = f"{list_names(names)} hold labels, and {_describe_columns(texts)} text"
            held = [as_text(part) for name in names for one in _split_cells(survey, name, "\n") for part in one]
            own = {"separator": _choose_separator(held)}
            reading = Reading("several labels", "tags", {"text": texts, "tags": names}, reason, own)
            doubts = [] if form or named else [f"one of {list_names(names)} may be the label alone"]
            yield survey.weigh(reading, form=form, values="" if form else "labels that stand in texts", doubts=doubts)


def _find_numbered(survey: Survey) -> list[str]:
    """Find columns whose names differ in a number or letter and that hold the same labels, the later ones for fewer
    records: `code 1`, `code 2` ... of answers with several codes.
    """
    by_stem: dict[tuple[str, ...], list[str]] = {}
    for name, column in survey.columns.items():
        if column.values and column.kind == "text" and not survey.is_given(name):
            by_stem.setdefault((*split_name(name),), []).append(name)
    for names in by_stem.values():
        first, *others = (survey.columns[name] for name in names)
        shared = [one for one in others if len({*one.values} & {*first.values}) > 1 or one.num_distinct == 1]
        if others and shared == others and others[-1].num_filled < 0.8 * first.num_filled:
            return names
    return []


def _is_flag(survey: Survey, name: str, stems: Mapping[str, int]) -> bool:
    values = {*survey.columns[name].values}
    is_one_of_several = stems[" ".join(split_name(name))] > 2  # category_a, _b, _c
    is_label = survey.rate(name, "label") >= CLEAR and not survey.rate(name, "flag") and not is_one_of_several
    return not is_label and values in ({"0", "1"}, {"true", "false"}, {"0.0", "1.0"})


def _find_separator(survey: Survey, name: str) -> str:
    """Find what separates the labels of a column; "" if its values are no sets of labels that repeat."""
    column = survey.columns[name]
    rating = survey.rate(name, "tags")
    is_list = column.kind in ("list", "text list")
    if column.num_distinct < 2 or not (is_list or column.kind == "text"):
        return ""
    if survey.rate(name, *READ, *TARGET_ROLES["targets"]) > max(1, rating) or (is_list and survey.is_sequence(name)):
        return ""
    # a list needs no guess about its parts: with a known name a few records may do; so where most have no label
    is_rare = rating >= USUAL and survey.is_mostly_blank(name)
    times = 1.5 if is_rare or (is_list and rating >= 2) else 3
    least = USUAL if is_list else CLEAR
    is_loose = rating >= CLEAR or is_rare
    for separator in [", "] if is_list else [*SEPARATORS, *(LOOSE_SEPARATORS if is_loose else ())]:
        parts = _split_cells(survey, name, separator)
        tags = Counter(as_text(part) for one in parts for part in one)
        known = str if column.kind == "text list" else str | int  # numbers as text are places in texts
        if not all(isinstance(part, known) for one in parts for part in one):
            break
        share = sum(len(one) > 1 for one in parts) / max(1, len(parts))
        is_short = sum(len(tag.split()) for tag in tags) <= 5 * len(tags)
        repeats = len(tags) <= MAX_LABELS and tags.total() >= times * len(tags)
        is_varied = len({*map(frozenset, parts)}) > 1
        is_clear = separator not in LOOSE_SEPARATORS or _are_combined(parts)
        is_usual = (share >= 0.1 or (is_rare and share > 0)) and repeats
        is_named = rating >= least and share > 0.5 and all(isinstance(part, str) for one in parts for part in one)
        if is_short and is_varied and is_clear and (is_usual or is_named):
            return _choose_separator(tags) if is_list else separator
    # where most have none, the others may have one each
    return "," if is_rare and column.values and column.num_filled >= times * column.num_distinct else ""


def _split_cells(survey: Survey, name: str, separator: str) -> list[Sequence[object]]:
    """Split the filled cells of a column, lists excepted, which are divided already."""
    if survey.columns[name].kind in ("list", "text list"):
        return survey.read_lists(name)
    cells = (as_text(value).splitlines() for value in survey.table.list_values(name) if not is_empty_cell(value))
    return [[part.strip() for line in lines for part in line.split(separator)] for lines in cells]


def _are_combined(parts: Sequence[Sequence[object]]) -> bool:
    """Whether parts that a usual sign of texts divides are labels: codes, or nearly all stand with others elsewhere."""
    sets = {frozenset(map(as_text, one)) for one in parts}
    times = Counter(part for one in sets for part in one)
    several = [one for one in sets if len(one) > 1]
    num_known = sum(all(times[part] > 1 for part in one) for one in several)
    return num_known > 0.8 * len(several) or all(map(re.compile(r"\w*\d\w*").fullmatch, times))


def _choose_separator(tags: Iterable[str]) -> str:
    """Choose what separates labels in a target: the first of the usual signs that none of them holds."""
    text = "\n".join(tags)
    return next((sign for sign in (", ", "; ", " | ") if sign not in text), " || ")


def read_numbers(survey: Survey) -> Iterator[Reading]:
    """Yield texts with a number that is no label: a similarity, a score. There is no metric for them yet."""
    for name in survey.list_columns("number", "label", "targets", minimum=2):
        if not _is_amount(survey, name) or survey.columns[name].num_distinct < 2:
            continue
        texts = survey.list_texts(name)
        answers = [one for one in survey.list_unread([name, *texts]) if survey.columns[one].has_text]
        answers = [one for one in answers if survey.rate(one, "answer") > 1 and survey.rate(name, "answer") == 0]
        every = [one for one in survey.columns if one in (*texts, *answers)]  # an answer is scored beside its reference
        for one in [every, texts] if every != texts and "inputs" not in survey.given else [texts]:
            if one:
                reason = f"{name} holds numbers, and {_describe_columns(one)} text"
                found = Reading("numbers as text", "jsonl", {"inputs": one, "targets": [name]}, reason)
                yield survey.weigh(found, values="numbers that are no labels", doubts=[NO_PEARSON])


def read_named(survey: Survey) -> Iterator[Reading]:
    """Yield what the columns of the user say by themselves, whatever else their values look like."""
    given = survey.given
    for learned, read, task in (
        ("label", "text", "classification"),
        ("tags", "text", "tags"),
        ("targets", "inputs", "jsonl"),
    ):
        if learned not in given:
            continue
        column = survey.columns[given[learned][0]]
        texts = given.get(read) or (survey.list_texts(column.name) if read == "text" else ())
        if not texts:
            continue
        if task == "classification" and not 2 <= column.num_distinct <= column.num_filled / 2:
            continue
        roles = {read: texts, learned: given[learned]}
        many = f"{column.name} has {column.num_distinct:,} different values in {column.num_filled:,} records"
        warnings = [many] if task == "classification" and not column.has_labels else []
        options: JsonTable = {"separator": ","} if task == "tags" else {}
        yield Reading(task, task, roles, "the columns were named", options, warnings=warnings)


def _is_amount(survey: Survey, name: str) -> bool:
    """Whether a column holds numbers that are no labels: with fractions, many whole ones without a label's name, or
    counts.
    """
    column = survey.columns[name]
    is_many = column.num_distinct > MAX_NUMBERED and survey.rate(name, "label") < CLEAR
    is_count = is_statistic(name) and not survey.is_given(name)
    return column.kind == "number" and (is_many or is_count or not column.has_labels)


def _join(names: Sequence[str]) -> str:
    return " and ".join(names)


def _describe_columns(names: Sequence[str]) -> str:
    """Join names before what they hold.

    >>> _describe_columns(["a"]), _describe_columns(["a", "b"])
    ('a holds', 'a and b hold')
    """
    return f"{_join(names)} {'holds' if len(names) == 1 else 'hold'}"


def name_slots(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return names that a template can hold, and data.columns for those that differ.

    >>> name_slots(["Betreff", "was {1}", "info.text"])
    (['Betreff', 'was__1', 'info_text'], {'was__1': 'was {1}', 'info_text': 'info.text'})
    """
    slots: dict[str, str] = {}
    for name in names:
        is_plain = not re.search(r"[{}\[\]!:.,]|^\s|\s$", name)
        slot = name if is_plain else re.sub(r"\W", "_", name).strip("_") or "column"
        slots[slot if slot not in slots else f"{slot}_{len(slots)}"] = name
    return list(slots), {slot: name for slot, name in slots.items() if slot != name}


def iter_readings(survey: Survey) -> Iterator[Reading]:
    """Yield the readings of all forms; of columns in several languages, those of each. A choice is never learned."""
    for part in survey.split_by_language():
        choices: set[str] = set()
        for form in (
            *(read_signatures, read_chat, read_instructions, read_questions),
            *(read_pairs, read_labels, read_tags, read_numbers, read_named),
        ):
            for reading in form(part):
                choices.update(reading.roles.get("choices", ()))
                if "choices" in reading.roles or choices.isdisjoint(reading.targets):
                    yield fill_options(part, reading)


TEXT_TASKS = ("jsonl", "classification", "tags")
TASKS = frozenset((*SIGNATURES, *TEXT_TASKS, "unifiedqa", "squad", "squad_v2", "gsm8k"))
