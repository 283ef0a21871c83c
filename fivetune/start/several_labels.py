"""Texts with several labels in a table: a list, a separated text, numbered columns, a column of 0 and 1 for each.

In: a Survey. Out: Readings, with the separator of the labels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fivetune.start.columns import MAX_LABELS, as_text, is_empty_cell
from fivetune.start.roles import CLEAR, USUAL, split_name
from fivetune.start.survey import IN_TEXT, READ, TARGET_ROLES, VALUES, Reading, Survey, describe_columns, join_names
from fivetune.tasks import list_names
from fivetune.tasks.tags import FLAGS

SEPARATORS = (";", "|", ",")  # of labels in one cell, beside line ends
LOOSE_SEPARATORS = ("/", "+", " ")  # words have these, too


def read_tags(survey: Survey) -> Iterator[Reading]:
    """Yield several labels for each text: a list, a separated text, numbered columns, a column of 0 and 1 for each."""
    named = survey.given.get("tags", ())
    for name in named or survey.list_unread(()):
        separator = _find_separator(survey, name) if len(named) < 2 else ""
        texts = survey.list_texts(name) if separator else []
        if not texts:
            continue
        reason = f"{name} has several labels for some records"
        doubts: list[str] = []
        num_blank = survey.table.num_records - survey.columns[name].num_filled
        if num_blank:
            reason += f", {num_blank:,} have none"
            if survey.is_mostly_blank(name) and survey.rate(name, "tags") < CLEAR:
                doubts.append(f"{name} is empty in {num_blank:,} records, which are learned to have no label")
        points = IN_TEXT if _are_combined(_split_cells(survey, name, separator)) else VALUES + 1
        reading = _build(reason, texts, [name], separator)
        yield survey.weigh(reading, values="several labels that repeat", points=points, doubts=doubts)
    texts = survey.list_texts("")
    if texts:
        yield from _read_columns_of_tags(survey, named, texts)


def _build(reason: str, texts: Sequence[str], tags: Sequence[str], separator: str) -> Reading:
    reason = f"{reason}, and {describe_columns(texts)} text"
    return Reading("several labels", "tags", {"text": texts, "tags": tags}, reason, {"separator": separator})


def _read_columns_of_tags(survey: Survey, named: Sequence[str], texts: Sequence[str]) -> Iterator[Reading]:
    """Yield several labels in a column each: columns of words, or one of 0 and 1 for each label.

    Args:
        named: columns that the user named as tags.
        texts: columns that the labels are given for.
    """
    columns = survey.columns
    are_flags = True
    for name in named:
        are_flags &= all(value.casefold() in FLAGS for value in columns[name].values)
    flags = named if are_flags else []
    if not named:
        stems = Counter(" ".join(split_name(name)) for name in columns)
        flags = [name for name in survey.list_unread(()) if _is_flag(survey, name, stems)]
    ticked = [name for name in flags if survey.is_ticked(name)]
    # two columns of 0 and 1 may be facts, two boxes are labels
    if len(flags) >= (2 if ticked == flags else 3):
        shown = ", ".join(flags[:4]) + (", ..." if len(flags) > 4 else "")
        what = "are ticked" if ticked else "hold 0 or 1"
        reading = _build(f"{len(flags)} columns {what} ({shown})", texts, flags, _choose_separator(flags))
        # facts that are yes or no stand beside a label of words, too
        labels: list[str] = []
        for name in survey.list_unread([*flags, *texts]):
            if columns[name].kind == "text" and columns[name].has_labels:
                labels.append(name)
        doubts = [f"{join_names(labels[:2])} may be the label, too"] if labels else []
        yield survey.weigh(reading, form="a column of 0 and 1 per label", doubts=doubts)
    numbered = [] if named else _find_numbered(survey)
    if numbered:
        yield survey.weigh(_build_columns(survey, texts, numbered), form="numbered columns of labels")
    several = named if len(named) > 1 and not are_flags else survey.attributes
    if several:
        doubts = [] if named else [f"one of {list_names(several)} may be the label alone"]
        reading = _build_columns(survey, texts, several)
        yield survey.weigh(reading, values="labels that stand in texts", doubts=doubts)


def _build_columns(survey: Survey, texts: Sequence[str], names: Sequence[str]) -> Reading:
    """Build the reading of columns that hold the labels themselves."""
    held: list[str] = []
    for name in names:
        for labels in _split_cells(survey, name, "\n"):
            held += map(as_text, labels)
    return _build(f"{list_names(names)} hold labels", texts, names, _choose_separator(held))


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
        is_shared = all(one.num_distinct == 1 or len(one.values.keys() & first.values) > 1 for one in others)
        if others and is_shared and others[-1].num_filled < 0.8 * first.num_filled:
            return names
    return []


def _is_flag(survey: Survey, name: str, stems: Mapping[str, int]) -> bool:
    """Whether a column of 0 and 1, or of ticks, is one of several labels.

    Args:
        stems: names of the columns without numbers and letters -> how many columns have them.
    """
    if survey.is_ticked(name):
        return True
    # the name of one label of words, unless there are several such columns: category_a, _b, _c
    is_label = survey.rate(name, "label") >= CLEAR and survey.rate(name, "flag") == 0
    if is_label and stems[" ".join(split_name(name))] <= 2:
        return False
    return survey.columns[name].has_flags


def _find_separator(survey: Survey, name: str) -> str:
    """Find what separates the labels of a column; "" if its values are no sets of labels that repeat."""
    column = survey.columns[name]
    rating = survey.rate(name, "tags")
    is_list = column.has_lists
    if column.num_distinct < 2 or not (is_list or column.kind == "text"):
        return ""
    # a text to be read or an answer is none, and neither is a list with a value for each word
    if survey.rate(name, *READ, *TARGET_ROLES["targets"]) > max(1, rating):
        return ""
    if is_list and survey.is_sequence(name):
        return ""
    # where most records have no label, a few with several may do; so of a list, which needs no guess about its parts
    is_rare = rating >= USUAL and survey.is_mostly_blank(name)
    times, least = 3, CLEAR
    separators = [*SEPARATORS]
    if rating >= CLEAR or is_rare:
        separators += LOOSE_SEPARATORS
    if is_list:
        separators, least = [", "], USUAL
    if is_rare or (is_list and rating >= 2):
        times = 1.5
    for separator in separators:
        # the values must be sets of labels: short ones, in different combinations
        parts = _split_cells(survey, name, separator)
        labels = [part for one in parts for part in one]
        known = str if column.kind == "text list" else str | int  # numbers as text are places in texts
        if not all(isinstance(part, known) for part in labels):
            break
        tags = Counter(map(as_text, labels))
        is_short = sum(len(tag.split()) for tag in tags) <= 5 * len(tags)
        is_varied = len({*map(frozenset, parts)}) > 1
        if not is_short or not is_varied or (separator in LOOSE_SEPARATORS and not _are_combined(parts)):
            continue
        # some records have several labels, and these repeat or the column is named after them
        share = sum(len(one) > 1 for one in parts) / len(parts)
        repeats = len(tags) <= MAX_LABELS and tags.total() >= times * len(tags)
        is_usual = repeats and (share >= 0.1 or (is_rare and share > 0))
        is_named = rating >= least and share > 0.5 and all(isinstance(part, str) for part in labels)
        if is_usual or is_named:
            return _choose_separator(tags) if is_list else separator
    # where most have none, the others may have one each
    return "," if is_rare and column.values and column.num_filled >= times * column.num_distinct else ""


def _split_cells(survey: Survey, name: str, separator: str) -> list[Sequence[object]]:
    """Split the filled cells of a column, lists excepted, which are divided already."""
    if survey.columns[name].has_lists:
        return survey.read_lists(name)
    cells: list[Sequence[object]] = []
    for value in survey.table.list_values(name):
        if not is_empty_cell(value):
            text = separator.join(as_text(value).splitlines())
            cells.append([part.strip() for part in text.split(separator)])
    return cells


def _are_combined(parts: Sequence[Sequence[object]]) -> bool:
    """Whether parts that a usual sign of texts divides are labels: codes, or nearly all stand with others elsewhere."""
    sets = {frozenset(map(as_text, one)) for one in parts}
    times = Counter(part for one in sets for part in one)
    several = [one for one in sets if len(one) > 1]
    num_known = sum(all(times[part] > 1 for part in one) for one in several)
    return num_known > 0.8 * len(several) or all(re.fullmatch(r"\w*\d\w*", part) for part in times)


def _choose_separator(tags: Iterable[str]) -> str:
    """Choose what separates labels in a target: the first of the usual signs that none of them holds."""
    text = "\n".join(tags)
    return next((sign for sign in (", ", "; ", " | ") if sign not in text), " || ")
