"""Multiple choice in a table: the columns of the choices, and the column that says which one is right.

In: a Survey. Out: Readings. Names of any language do: values decide, as each answer is one of its record's choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
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
MIXED = 0.5  # least share of answers that are choices if the others, such as answers with several, are left out
ASKED = 0.2  # least share of records with choices
LABELS = "label target gold key"  # names of the right choice
WRONG = "distractor distractors incorrect wrong false"


class _Key(NamedTuple):
    """What a column says of the right choice.

    Args:
        first: number of the first choice, None if the values are no numbers.
        places: index of the right choice in each record, None where the column says none.
        num_other: number of values that are none of the choices, 0 if they are few.
    """

    first: int | None
    places: Sequence[int | None]
    num_other: int


def read_quizzes(survey: Survey, contexts: Mapping[str, str]) -> Iterator[Reading]:
    """Yield multiple choice: each group of choices with each column that says which of them is right.

    Args:
        contexts: question -> the text that it is about.
    """
    for choices in _list_groups(survey):
        found = [_read(choices, record) for record in survey.table.records[:NUM_ANSWERED]]
        known = [one for one in found if one]
        # the choices of one record differ from each other
        num_unlike = sum(len({*one.texts}) == len(one.texts) for one in known)
        if num_unlike <= 0.9 * len(known) or len(known) < ASKED * len(found):
            continue
        question, doubts = _find_question(survey, choices)
        if not question:
            continue
        roles: dict[str, Sequence[str]] = {"question": [question]}
        context = contexts.get(question)
        if context and context not in choices:
            roles["context"] = [context]
        roles["choices"] = choices
        num_marked = sum(one.marked is not None for one in known)
        if num_marked >= RESOLVED * len(known):
            evidence = [Evidence(CERTAIN, "choices of which one is marked")]
            yield replace(_build(roles, "", {}), evidence=evidence)
            continue
        keys = _list_keys(survey, choices, question, found)
        for key in keys:
            if len(known) >= MIXED * len(found) or _is_named(survey, key):
                yield from _read_key(survey, roles, keys, key, doubts)
        if not keys and has_word(choices[0], WRONG):
            # the right choice stands apart from the wrong ones
            for key in survey.list_columns("answer", minimum=2):
                if survey.columns[key].kind in ("text", "number"):
                    reading = _build({**roles, "choices": [key, *choices]}, key, {"shuffle_choices": True})
                    yield survey.weigh(reading, form=reading.reason, doubts=doubts)


def _read_key(
    survey: Survey, roles: Mapping[str, Sequence[str]], keys: Mapping[str, _Key], key: str, doubts: Sequence[str]
) -> Iterator[Reading]:
    """Yield the reading in which one of the keys says the right choice; with answers that are no choices, also the
    reading of all records as text to text.
    """
    first, places, num_other = keys[key]
    choices = roles["choices"]
    options: JsonTable = {}
    warnings: list[str] = []
    doubts = [*doubts]
    if first is not None:
        options["numbers_from"] = first
        if not _is_named(survey, key):
            doubts.append(f"{key} is not named as an answer")
    if key in choices:
        options["shuffle_choices"] = True
    elif len({*places} - {None}) == 1:
        # unshuffled, the model would learn the place alone
        options["shuffle_choices"] = True
        warnings.append(f"{key} is the same one of the choices in all records: they are shuffled (shuffle_choices)")
    if num_other:
        doubts.append(f"{num_other:,} of {len(places):,} answers in {key} are none of the choices, or several")
    reading = replace(_build(roles, key, options), warnings=warnings)
    yield survey.weigh(reading, form=reading.reason, read=[*keys], doubts=doubts)
    if num_other:
        question = roles["question"][0]
        given = {"inputs": [question, *choices], "targets": [key]}
        pair = Reading("text to text", "jsonl", given, f"{key} answers {question}, with and without choices")
        yield survey.weigh(pair, values=pair.reason, read=[*keys], doubts=doubts)


def _is_named(survey: Survey, key: str) -> bool:
    """Whether the name of a column says that it has the right choice."""
    return survey.rate(key, "answer") >= 2 or has_word(key, LABELS)


def _build(roles: Mapping[str, Sequence[str]], key: str, own: JsonTable) -> Reading:
    """Build the reading of a question and its choices.

    Args:
        key: column of the right choice, "" if the choices themselves mark it.
        own: options beside the usual ones.
    """
    columns = {role: names[0] for role, names in roles.items() if len(names) == 1}
    choices = roles["choices"]
    reason = f"{columns['question']} is text, {', '.join(choices)} the choices"
    if key:
        reason += f", and {key} says which one is right"
        roles = {**roles, "answer": [key]}
        if key not in ("answerKey", "label"):  # names that the task finds by itself
            columns["answer"] = key
    options: JsonTable = {"format": "multiple_choice", "lower_case": False, **own}
    return Reading("multiple choice", "unifiedqa", roles, reason, options, columns)


def _read(choices: Sequence[str], record: RawRecord) -> Choices | None:
    """Read the choices of a record; None if it has none."""
    values = {name: find_value(record.fields, name) for name in choices}
    try:
        return read_choices(RawRecord(values, record.where), choices)
    except RecordError:
        return None


def _list_groups(survey: Survey) -> list[list[str]]:
    """List the columns that may hold choices together: the user's, one of lists, or several whose names differ in a
    letter or number; columns before an answer by a letter; columns of which one has the text of each answer.
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
    is_nameless = False
    for names in by_stem.values():
        is_nameless |= len(names) == len(columns)
        ordered = [names[mark] for mark in _list_first(names)]
        # if all columns are numbered, the names have no meaning
        if MIN_COLUMNS <= len(ordered) <= MAX_COLUMNS and len(ordered) < len(columns):
            is_known = survey.rate(ordered[0], "choices") >= 2
            if is_known or (not has_list and _can_be_choices(survey, ordered)):
                groups.append(ordered)
    if not has_list:
        groups += _list_runs(survey, groups, is_nameless=is_nameless)
    return groups or _list_equal(survey)


def _list_runs(survey: Survey, groups: Sequence[Sequence[str]], *, is_nameless: bool) -> list[list[str]]:
    """List the columns that stand before an answer by a letter, as many as there are letters.

    Args:
        groups: choices that are known already.
        is_nameless: the names of all columns differ in a number alone; an answer may be a number then.
    """
    order = [name for name in survey.columns if not survey.is_id(name)]
    found: list[list[str]] = []
    for place, key in enumerate(order):
        values = {value.casefold() for value in survey.columns[key].values}
        num = len(values)
        if not place > num >= MIN_COLUMNS:
            continue
        is_letter = values == {*LETTERS[:num]}
        is_number = is_nameless and values == {*map(str, range(1, num + 1))}
        run = order[place - num : place]
        is_new = not any({*run} <= {*one} for one in (*groups, *found))
        if (is_letter or is_number) and is_new and _can_be_choices(survey, run):
            found.append(run)
    return found


def _list_first(marks: Iterable[str]) -> list[str]:
    """List the letters or numbers that follow each other from a, 0, 1, or the first one of another alphabet.

    >>> _list_first(["", "q", "c", "b", "a"]), _list_first(["10", "9", "11"]), _list_first(["а", "б"])
    (['a', 'b', 'c'], [], ['а', 'б'])
    """
    ordered = {int(mark) if mark.isdecimal() else ord(mark): mark for mark in marks if mark}
    first = min(ordered, default=0)
    found: list[str] = []
    if first in (0, 1, ord("a")) or first >= 128:
        for place in count(first):
            if place not in ordered:
                break
            found.append(ordered[place])
    return found


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
        if is_named:
            num_parsed += isinstance(parsed, list | dict) and len(parsed) >= 2
        elif isinstance(parsed, dict) or (isinstance(parsed, list) and text[0] == "["):  # not any separated text
            num_parsed += len(parsed) >= 3
    return num_parsed > 0.9 * len(texts)


def _list_equal(survey: Survey) -> list[list[str]]:
    """List the columns of which just one has the text of another column, in each record another one."""
    least = 0.9 * survey.table.num_records
    values: dict[str, list[str]] = {}
    for name, column in survey.columns.items():
        if column.kind == "text" and column.num_filled > least:
            values[name] = [as_text(value) for value in survey.table.list_values(name, NUM_ANSWERED)]
    if len(values) <= MIN_COLUMNS:
        return []
    for key, answers in values.items():
        shares: dict[str, float] = {}
        for name, texts in values.items():
            share = sum(map(eq, texts, answers)) / len(answers)
            if name != key and share > 0.03:
                shares[name] = share
        if len(shares) >= MIN_COLUMNS and RESOLVED < sum(shares.values()) < 1.1:
            return [[*shares]]
    return []


def _find_question(survey: Survey, choices: Sequence[str]) -> tuple[str, list[str]]:
    """Find the question: by its name, else the longest text before the choices; with a doubt if there is another."""
    columns = survey.columns
    order = [name for name in columns if columns[name].kind == "text" or name == choices[0]]
    for name in survey.list_columns("question", minimum=2):
        if name in order and name not in choices:
            return name, []
    texts = [name for name in order if columns[name].has_text and name not in choices]
    first = order.index(choices[0]) if choices[0] in order else 0
    before = [name for name in texts if name in order[:first]]
    found = [name for name in before or texts if not survey.is_aside(name)]
    if not found:
        return "", []
    found.sort(key=lambda name: -columns[name].mean_chars)
    others = [name for name in found[1:] if name in before and columns[name].is_running]
    return found[0], [f"{name} may be a part of the question" for name in others[:1]]


def _list_keys(
    survey: Survey, choices: Sequence[str], question: str, found: Sequence[Choices | None]
) -> dict[str, _Key]:
    """List the columns whose values say which choice is right, the clearest name first. Of several columns that say
    the same, the first counts.
    """
    others = [name for name in survey.columns if name not in (*choices, question)]
    # the clearest name first, texts before numbers, which may be counts
    others.sort(key=lambda name: -survey.rate(name, "answer", "label"))
    others.sort(key=lambda name: survey.columns[name].kind == "number")
    is_named = survey.rate(choices[0], "choices") >= USUAL
    num_asked = len(found) - found.count(None)
    widest = max(filter(None, found), key=lambda one: len(one.texts))
    keys: dict[str, _Key] = {}
    for name in survey.given.get("answer", others):
        column = survey.columns[name]
        if column.kind not in ("text", "number"):
            continue
        values = survey.table.list_values(name, len(found))
        first = None
        if column.kind == "number" and not _has_texts(values, found):
            has_letters = any(known.first is None for known in keys.values())
            if has_letters and survey.rate(name, "answer") < 2:  # a count next to the letters
                continue
            first = 0 if "0" in map(as_text, values) else 1
        # the right choice of each record, and the values that are no choice
        places: list[int | None] = []
        num_none = 0
        num_apart = 0
        for value, one in zip(values, found, strict=True):
            is_blank = is_empty_cell(value)
            place = None if one is None or is_blank else one.find(as_text(value), numbers_from=first)
            places.append(place)
            if one:
                num_none += place is None
            elif not is_blank:
                # Y and N of records without choices, but not the letter of choices that are lost
                num_apart += widest.find(as_text(value), numbers_from=first) is None
        is_varied = is_named or len({*places}) > 0.6 * len(widest.places)
        if num_none > (1 - MIXED) * num_asked or not is_varied:
            continue
        least = RESOLVED * len(places)
        if not any(sum(map(eq, places, known.places)) >= least for known in keys.values()):
            num_other = num_none + num_apart
            is_many = num_other > (1 - RESOLVED) * len(found)
            keys[name] = _Key(first, places, num_other if is_many else 0)
    return keys


def _has_texts(values: Sequence[object], found: Sequence[Choices | None]) -> bool:
    """Whether nearly all values are texts of their choices."""
    num_held = num_known = 0
    for value, one in zip(values, found, strict=True):
        if one:
            num_known += 1
            num_held += as_text(value) in one.texts
    return num_held >= RESOLVED * num_known
