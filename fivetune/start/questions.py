"""Questions with answers in a table: yes/no, numbers, parts of a context, free text.

In: a Survey. Out: Readings; the values of the answers decide the form. Those with choices are from quizzes.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fivetune.errors import RecordError
from fivetune.scores.metrics.gsm8k import extract_final_number
from fivetune.start.columns import Column, as_text, count_words
from fivetune.start.quizzes import read_quizzes
from fivetune.start.roles import COMMENTS, NOTES, USUAL, has_word
from fivetune.start.survey import IN_TEXT, LONG_WORDS, NUM_ANSWERED, VALUES, Reading, Survey
from fivetune.start.task_options import SHORT_TARGET_WORDS, count_shared_words
from fivetune.tasks import find_text
from fivetune.tasks._questions import read_gold_answers
from fivetune.tasks.unifiedqa import YES_NO
from fivetune.types import JsonTable, RawRecord

IN_CONTEXT = 0.7  # least share of answers that are parts of their context, if the task is extractive
LONG_ANSWER_WORDS = 8.0


def read_questions(survey: Survey) -> Iterator[Reading]:
    """Yield questions with each column of answers; the values of the answers decide the form."""
    columns = survey.columns
    named = [name for name in survey.list_columns("question", minimum=2) if columns[name].kind == "text"]
    questions = [name for name in named if not columns[name].has_code] or named  # a query in SQL is none
    context = None
    # the user's question and answer are without a context, unless that is given, too
    is_told = {"question", "answer"} <= survey.given.keys() and "context" not in survey.given
    if questions and not is_told:
        context = _find_context(survey, questions[0])
    yield from read_quizzes(survey, {questions[0]: context} if context else {})
    if not questions:
        return
    for answer in survey.list_columns("answer", minimum=2):
        if answer in (questions[0], context):
            continue
        for roles, doubts in _list_asked(survey, questions, context, answer):
            found = _read_answers(survey, {**roles, "answer": answer})
            if found:
                yield replace(found, doubts=[*doubts, *found.doubts])


def _list_asked(
    survey: Survey, questions: Sequence[str], context: str | None, answer: str
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield the roles of what may be asked, with their doubts: the question and its context, the question alone if the
    context has the length of a title and the answers are longer texts, another column of questions.
    """
    columns = survey.columns
    alone = {"question": questions[0]}
    others: list[str] = []
    if "question" not in survey.given:
        others = [name for name in questions[1:] if columns[name].is_running and columns[name].has_text][:1]
    doubts = [f"{one} is named as a question, too" for one in others]
    told: dict[str, str] = {}
    title: list[str] = []
    if context:
        told["context"] = context
        if columns[answer].is_running and columns[context].mean_words < LONG_WORDS:
            title.append(f"{context} may be the title of a source, in which {answer} is not found")
    yield {**alone, **told}, [*title, *doubts]
    if context and title and not survey.is_given(context):
        yield alone, doubts
    for other in others:
        yield {"question": other, **told}, doubts


def _find_context(survey: Survey, question: str) -> str | None:
    """Find the text that questions are about: the one with the clearest name."""
    known: list[str] = []
    for name in survey.list_columns("context", "text", minimum=2):
        if name == question or not survey.columns[name].has_text:
            continue
        is_asked = survey.rate(name, "question") >= 2 and survey.rate(name, "context") < USUAL
        is_spare = has_word(name, f"{NOTES} {COMMENTS}") or survey.rate(name, "answer", "targets", "label") >= USUAL
        if not is_asked and (survey.is_given(name) or not is_spare):
            known.append(name)
    if known and (survey.rate(known[0], "context") >= 2 or len(known) == 1):
        return known[0]
    return None


def _read_answers(survey: Survey, roles: Mapping[str, str]) -> Reading | None:
    """Read questions by the values of their answers; None if these are no answers.

    Args:
        roles: question, answer and perhaps context -> column.
    """
    answer = roles["answer"]
    named: dict[str, Sequence[str]] = {role: (name,) for role, name in roles.items()}
    column = survey.columns[answer]
    values = {value.lower() for value in column.values}
    if values and values <= YES_NO.keys() and column.kind != "number":
        reason = f"all answers in {answer} are {' or '.join(sorted(column.values))}"
        options: JsonTable = {"lower_case": False, "format": "yes_no"}
        found = Reading("yes/no questions", "unifiedqa", named, reason, options, roles)
        return survey.weigh(found, values=reason)
    texts = survey.list_examples(answer, 200)
    num_marked = sum("####" in text and extract_final_number(text) is not None for text in texts)
    if texts and num_marked >= 0.9 * len(texts):
        columns = {"question": roles["question"], "answer": answer}
        first = "of the first " if len(texts) < column.num_filled else "of "
        reason = f"{num_marked:,} {first}{len(texts):,} answers in {answer} end in #### and a number"
        found = Reading("reasoning with a final number", "gsm8k", named, reason, columns=columns)
        return survey.weigh(found, values=reason, points=IN_TEXT)
    # answers that are right or wrong as a whole are text to text
    what = ""
    if column.kind == "number":
        what = "numbers"
    elif column.has_code:
        what = "code"
    elif _has_mark(survey, column):
        what = "words behind a mark"
    if what:
        if "answer" not in survey.given:
            inputs = survey.sort_names([name for role, name in roles.items() if role != "answer"])
            named = {"inputs": inputs, "targets": [answer]}
        reason = f"the answers in {answer} are {what}"
        return survey.weigh(Reading(f"questions with {what} as answers", "jsonl", named, reason), values=reason)
    return _read_texts(survey, roles, named)


def _read_texts(survey: Survey, roles: Mapping[str, str], named: Mapping[str, Sequence[str]]) -> Reading | None:
    """Read questions with answers that are texts or lists of texts: parts of a context, or free ones.

    Args:
        named: the same roles, as a reading has them.
    """
    answer, context = roles["answer"], roles.get("context")
    column = survey.columns[answer]
    key = "answers" if column.kind != "text" or column.example[:1] in ("[", "{") else "answer"
    golds = read_golds(survey, answer, key)
    if not golds:
        return None
    num_found, num_answered = _count_parts(survey, context, golds) if context else (0, 0)
    words = [count_words(one[0]) for one in golds if any(one)]
    mean_words = sum(words) / max(1, len(words))
    where = f"are often no parts of {context}" if context else "there is no context"
    reason = f"the answers in {answer} have {mean_words:.0f} words on average and {where}"
    points = VALUES
    options: JsonTable = {}
    if num_answered and num_found >= IN_CONTEXT * num_answered:
        kind, task, points = "extractive question answering", "squad", IN_TEXT
        first = "the first " if len(golds) > NUM_ANSWERED else ""
        reason = f"{num_found:,} of {first}{num_answered:,} answers in {answer} are parts of their {context}, and "
        num_open = golds.count(())
        if num_open:
            task = "squad_v2"
            reason += f"{num_open:,} questions have no answer"
        else:
            reason += "every question has an answer"
    elif context or mean_words > LONG_ANSWER_WORDS:
        kind, task = "questions with free answers", "unifiedqa"
        options = {"lower_case": False, "format": "abstractive"}
    else:
        kind, task, options = "questions without a context", "squad", {"template": "question: {question}"}
    columns = {key if role == "answer" else role: name for role, name in roles.items()}
    return survey.weigh(Reading(kind, task, named, reason, options, columns), values=reason, points=points)


def _has_mark(survey: Survey, column: Column) -> bool:
    """Whether answers are a word or two behind words that all of them begin with, which say nothing of them."""
    num_shared = count_shared_words(survey, column) if column.kind == "text" else 0
    return num_shared > 0 and column.mean_words - num_shared <= SHORT_TARGET_WORDS


def read_golds(survey: Survey, answer: str, key: str) -> list[tuple[str, ...]]:
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
