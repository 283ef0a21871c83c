"""Multiple choice in a table: the columns of the choices, and the column that says which one is right.

In: a Survey. Out: Readings. Names of any language do: values decide, as each answer is one of its record's choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, takewhile
from operator import eq
from typing import NamedTuple

from fivetune.errors import RecordError
from fivetune.start.columns import Column, as_text, find_value, is_empty_cell
from fivetune.start.roles import USUAL, has_word
from fivetune.start.survey import CERTAIN, NUM_ANSWERED, Evidence, Reading, Survey
from fivetune.tasks._choices import LETTERS, Choices, parse_choices, read_choices, split_enumerator
from fivetune.types import JsonTable, RawRecord

MIN_COLUMNS, MAX_COLUMNS = 3, 10  # of choices: two texts and a number are mostly a pair with a label
RESOLVED = 0.95  # least share of answers that are choices
MIXED = 0.5  # least share of these if others, such as those of several answers, are left out
ASKED = 0.2  # least share of records with choices
LABELS = "label target gold key"  # names of the right choice
WRONG = "distractor distractors incorrect wrong false"


def read_quizzes(survey: Survey, contexts: Mapping[str, str]) -> Iterator[Reading]:
    """Yield multiple choice: each group of choices with each column that says which of them is right.

    Args:
        contexts: question -> the text that it is about.
    """
    for choices in _list_groups(survey):
        found = [_read(survey, choices, record) for record in survey.table.records[:NUM_ANSWERED]]
        known = [one for one in found if one]
        num_unlike = sum(len({*one.texts}) == len(one.texts) for one in known)  # those of one record
        if num_unlike <= 0.9 * len(known) or len(known) < ASKED * len(found):
            continue
        question, doubts = _find_question(survey, choices)
        if not question:
            continue
        roles: dict[str, Sequence[str]] = {"question": [question]}
        if question in contexts and contexts[question] not in choices:
            roles["context"] = [contexts[question]]
        roles["choices"] = choices
        if sum(one.marked is not None for one in known) >= RESOLVED * len(known):
            evidence = [Evidence(CERTAIN, "choices of which one is marked")]
            yield replace(_build(roles, "", {}), evidence=evidence)
            continue
        keys = _list_keys(survey, choices, question, found)
        for key, (first, places, num_other) in keys.items():
            own: JsonTable = {} if first is None else {"numbers_from": first}
            is_fixed = key in choices or len({*places} - {None}) == 1  # else the model would learn the place
            reading = _build(roles, key, {**own, "shuffle_choices": True} if is_fixed else own)
            if is_fixed and key not in choices:
                note = f"{key} is the same one of the choices in all records: they are shuffled (shuffle_choices)"
                reading = replace(reading, warnings=[note])
            is_named = survey.rate(key, "answer") >= 2 or has_word(key, LABELS)
            if len(known) < MIXED * len(found) and not is_named:
                continue
            is_guess = first is not None and not is_named
            guess = [f"{key} is not named as an answer"] if is_guess else []
            if num_other:
                guess.append(f"{num_other:,} of {len(places):,} answers in {key} are none of the choices, or several")
            yield survey.weigh(reading, form=reading.reason, read=[*keys], doubts=[*doubts, *guess])
            if num_other:  # all records, with what choices they have
                given = {"inputs": [question, *choices], "targets": [key]}
                pair = Reading("text to text", "jsonl", given, f"{key} answers {question}, with and without choices")
                yield survey.weigh(pair, values=pair.reason, read=[*keys], doubts=[*doubts, *guess])
        if not keys and has_word(choices[0], WRONG):
            answers = survey.list_columns("answer", minimum=2)
            for key in [name for name in answers if survey.columns[name].kind in ("text", "number")]:
                reading = _build({**roles, "choices": [key, *choices]}, key, {"shuffle_choices": True})
                yield survey.weigh(reading, form=reading.reason, doubts=doubts)


def _build(roles: Mapping[str, Sequence[str]], key: str, own: JsonTable) -> Reading:
    columns = {role: names[0] for role, names in roles.items() if len(names) == 1}
    choices = roles["choices"]
    reason = f"{columns['question']} is text, {', '.join(choices)} the choices"
    if key:
        reason += f", and {key} says which one is right"
        roles = {**roles, "answer": [key]}
        columns |= {} if key in ("answerKey", "label") else {"answer": key}
    options: JsonTable = {"format": "multiple_choice", "lower_case": False, **own}
    return Reading("multiple choice", "unifiedqa", roles, reason, options, columns)


def _read(survey: Survey, choices: Sequence[str], record: RawRecord) -> Choices | None:
    values = {name: find_value(record.fields, name) for name in choices}
    try:
        return read_choices(RawRecord(values, record.where), choices)
    except RecordError:
        return None


def _list_groups(survey: Survey) -> list[list[str]]:
    """List the columns that may hold choices together: the user's, one of lists, or several whose names differ in a
    letter or number; those before an answer by a letter; those of which one has each answer's text.
    """
    if "choices" in survey.given:
        return [[*survey.given["choices"]]]
    columns = survey.columns
    groups = [[name] for name, column in columns.items() if _has_choices(survey, column)]
    has_list = any(survey.rate(name, "choices") >= USUAL for [name] in groups)
    by_stem: dict[str, dict[str, str]] = {}
    for name in columns:
        stem, mark = split_enumerator(name)
        by_stem.setdefault(stem if mark else "", {})[mark] = name
    for names in by_stem.values():
        ordered = [names[mark] for mark in _list_first(names)]
        is_known = survey.rate(ordered[0], "choices") >= 2 if ordered else False
        is_apart = len(ordered) < len(columns)  # else these are names without a meaning
        can_be = is_known or (not has_list and _can_be_choices(survey, ordered))
        if MIN_COLUMNS <= len(ordered) <= MAX_COLUMNS and is_apart and can_be:
            groups.append(ordered)
    is_nameless = any(len(names) == len(columns) for names in by_stem.values())
    order = [name for name in columns if not survey.is_id(name)]
    for place, key in enumerate(order):
        values = {value.casefold() for value in columns[key].values}
        num = len(values)
        run = order[max(0, place - num) : place]
        is_key = values == {*LETTERS[:num]} or (values == {*map(str, range(1, num + 1))} and is_nameless)
        is_new = not has_list and not any({*run} <= {*one} for one in groups)
        if place > num >= MIN_COLUMNS and is_key and is_new and _can_be_choices(survey, run):
            groups.append(run)
    return groups or _list_equal(survey)


def _list_first(marks: Iterable[str]) -> list[str]:
    """List the letters or numbers that follow each other from a, 0, 1, or the first one of another alphabet.

    >>> _list_first(["", "q", "c", "b", "a"]), _list_first(["10", "9", "11"]), _list_first(["а", "б"])
    (['a', 'b', 'c'], [], ['а', 'б'])
    """
    ordered = {int(mark) if mark.isdecimal() else ord(mark): mark for mark in marks if mark}
    first = min(ordered, default=0)
    if first not in (0, 1, ord("a")) and first < 128:
        return []
    following = takewhile(ordered.__contains__, count(first))
    return [ordered[place] for place in following]


def _can_be_choices(survey: Survey, names: Sequence[str]) -> bool:
    """Whether columns with unknown names may be choices: mostly filled with texts or numbers."""
    columns = [survey.columns[name] for name in names]
    is_filled = all(column.num_filled >= ASKED * survey.table.num_records for column in columns[:2])
    are_scores = all(one.kind == "number" and len(one.name) > 1 for one in columns)
    return is_filled and not are_scores and all(one.kind in ("text", "number", "date") for one in columns)


def _has_choices(survey: Survey, column: Column) -> bool:
    """Whether a column holds lists, objects or texts of choices; with an unknown name at least three, that vary."""
    is_named = survey.rate(column.name, "choices") >= USUAL
    if column.kind in ("list", "object"):
        is_varied = column.num_distinct > 0.5 * column.num_filled and survey.rate(column.name, "tags") == 0
        return is_named or is_varied
    if column.kind not in ("text", "text list"):
        return False
    texts = survey.list_examples(column.name, 100)
    num_parsed = 0
    for text in texts:
        parsed = parse_choices(text)
        is_list = isinstance(parsed, list | dict) and len(parsed) >= (2 if is_named else 3)
        num_parsed += is_list and (is_named or isinstance(parsed, dict) or text[0] == "[")  # not any separated text
    return num_parsed > 0.9 * len(texts)


def _list_equal(survey: Survey) -> list[list[str]]:
    """List the columns of which just one has the text of another, in each record another one."""
    least = 0.9 * survey.table.num_records
    texts = [name for name, column in survey.columns.items() if column.kind == "text" and column.num_filled > least]
    values = {name: [as_text(value) for value in survey.table.list_values(name, NUM_ANSWERED)] for name in texts}
    for key in texts if len(texts) > MIN_COLUMNS else ():
        equal = {name: sum(map(eq, values[name], values[key])) / len(values[key]) for name in texts if name != key}
        choices = [name for name in equal if equal[name] > 0.03]
        if len(choices) >= MIN_COLUMNS and RESOLVED < sum(map(equal.__getitem__, choices)) < 1.1:
            return [choices]
    return []


def _find_question(survey: Survey, choices: Sequence[str]) -> tuple[str, list[str]]:
    """Find the question: by its name, else the longest text before the choices; with a doubt if there is another."""
    texts = [name for name, one in survey.columns.items() if one.kind == "text" and name not in choices]
    named = [name for name in survey.list_columns("question", minimum=2) if name in texts]
    if named:
        return named[0], []
    order = [*survey.columns]
    first = order.index(choices[0]) if choices[0] in order else 0
    before = [name for name in texts if order.index(name) < first and survey.columns[name].has_text]
    read = [name for name in before or texts if survey.columns[name].has_text and not survey.is_aside(name)]
    found = sorted(read, key=lambda name: -survey.columns[name].mean_chars)
    others = [name for name in found[1:] if name in before and survey.columns[name].is_running]
    return (found or [""])[0], [f"{name} may be a part of the question" for name in others[:1]]


class _Key(NamedTuple):
    """What a column says of the right choice: the number of the first choice, None if the values are no numbers, the
    place of the right choice in each record, None where the column says none, and the number of values that are none of
    the choices, if there are many.
    """

    first: int | None
    places: Sequence[int | None]
    num_other: int


def _list_keys(
    survey: Survey, choices: Sequence[str], question: str, found: Sequence[Choices | None]
) -> dict[str, _Key]:
    """List the columns whose values say which choice is right, the clearest name first. Of several that say the same,
    the first counts.
    """
    others = [name for name in survey.columns if name not in (*choices, question)]
    ranks = {name: (survey.columns[name].kind == "number", -survey.rate(name, "answer", "label")) for name in others}
    names = survey.given.get("answer") or sorted(others, key=ranks.__getitem__)
    keys: dict[str, _Key] = {}
    for name in names:
        column = survey.columns[name]
        values = survey.table.list_values(name, len(found))
        first = None
        if column.kind == "number" and not _has_texts(values, found):
            has_letters = any(known.first is None for known in keys.values())
            if has_letters and survey.rate(name, "answer") < 2:  # a count next to the letters
                continue
            first = 0 if "0" in map(as_text, values) else 1
        places = _list_places(values, first, found)
        num_asked = sum(one is not None for one in found)
        num_other = num_asked - sum(place is not None for place in places)
        # Y and N of records without choices, but not the letter of choices that are lost
        widest = max(filter(None, found), key=lambda one: len(one.texts))
        unasked = [value for value, one in zip(values, found, strict=True) if not one and not is_empty_cell(value)]
        num_apart = num_other + sum(widest.find(as_text(value), numbers_from=first) is None for value in unasked)
        is_key = num_other <= (1 - MIXED) * num_asked
        is_key &= len({*places}) > 0.6 * len(widest.places) or survey.rate(choices[0], "choices") >= USUAL
        is_new = not any(_is_same(places, known.places) for known in keys.values())
        if column.kind in ("text", "number") and is_key and is_new:
            keys[name] = _Key(first, places, num_apart if num_apart > (1 - RESOLVED) * len(found) else 0)
    return keys


def _list_places(values: Sequence[object], first: int | None, found: Sequence[Choices | None]) -> list[int | None]:
    """List the place of the right choice in each record, None where the key's value says none."""
    places: list[int | None] = []
    for value, one in zip(values, found, strict=True):
        is_read = one is not None and not is_empty_cell(value)
        places.append(one.find(as_text(value), numbers_from=first) if is_read and one else None)
    return places


def _has_texts(values: Sequence[object], found: Sequence[Choices | None]) -> bool:
    both = [(value, one) for value, one in zip(values, found, strict=True) if one]
    return sum(as_text(value) in one.texts for value, one in both) >= RESOLVED * len(both)


def _is_same(places: Sequence[int | None], others: Sequence[int | None]) -> bool:
    return sum(map(eq, places, others)) >= RESOLVED * len(places)
