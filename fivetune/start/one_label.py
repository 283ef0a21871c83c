"""Texts with one label or one number in a table.

In: a Survey. Out: Readings of each column of values that repeat, or of numbers, with the texts that it is given for.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fivetune.data.labels import PLACEHOLDERS
from fivetune.start.columns import MIN_WORDS, Column, as_text, find_value, is_empty_cell
from fivetune.start.roles import CLEAR, COMMENTS, SYSTEMS, USUAL, has_word, rate_name, split_name
from fivetune.start.survey import (
    COPY,
    GENERAL_LABELS,
    LEARNED,
    NUM_ANSWERED,
    READ,
    SAMPLE,
    VALUES,
    Reading,
    Survey,
    describe_columns,
    describe_outputs,
    join_names,
)
from fivetune.tasks import list_names

CONFLICTS = 0.2  # share of records whose inputs another record has with another label
MAX_WORDS = 3  # distinct words of a column that may be a label whatever its name
PLAIN_TEXTS = "text texts sentence sentences utterance prompt question"  # which need no comment to be read
MIN_LABEL = 3  # characters of a label that is looked for in texts
NO_LABEL = "no column is named as a label"
STANCES = "against favor favour pro con support deny agree disagree"

_TextsRead = tuple[list[str], list[str], list[str]]
"""The texts that a label is learned from, the texts that are left out, and why that is doubtful."""


def read_labels(survey: Survey) -> Iterator[Reading]:
    """Yield each column of few and short values that repeat, as the label of the texts."""
    columns = survey.columns
    repeating = [name for name in columns if columns[name].has_labels and not survey.is_amount(name)]
    labels = [name for name in survey.list_columns("label", "answer", minimum=0) if name in repeating][:8]
    if not labels:
        # what says something of the records may be learned, such as their language, if there are no other facts
        facts = [name for name in columns if columns[name].num_distinct > 1 and survey.is_aside(name)]
        if all(name in repeating or rate_name("id", name) >= USUAL for name in facts):
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


def _list_read(survey: Survey, label: str, same: Sequence[str]) -> Iterator[_TextsRead]:
    """Yield the texts that a label may be given for, what else is known of them, and why it is doubtful.

    Args:
        same: columns that say the same as the label.
    """
    texts, known = survey.list_texts(label), survey.list_texts(label, only_known=True)
    doubts: list[str] = []
    leaks = [name for name in texts if _has_gaps(survey, name, label)]
    leaks = [name for name in leaks if survey.rate(name, *READ) < 2] or leaks  # rather than a passage
    told = [name for name in texts if _is_label_told(survey, name, label)]
    notes = [name for name in texts if has_word(name, COMMENTS)]
    if not any(has_word(name, PLAIN_TEXTS) for name in texts if name not in notes):
        notes = []  # the comments are the texts themselves
    for spare, doubt in (
        (leaks, f"has text for some values of {label} only, as a comment of who chose {label} has"),
        (told, f"holds the {label} itself in nearly all records, as a reasoning about it does"),
        (_find_short_pair(survey, texts), "may be parts of the other texts, or be read"),
        (notes, f"may be what the giver of {label} writes, or be read"),
    ):
        if 0 < len(spare) < len(texts):
            doubts.append(f"{join_names(spare)} {doubt}")
            yield [name for name in texts if name not in spare], spare, doubts
    # of two forms of one text, one is enough
    for pair in itertools.combinations(texts, 2):
        if survey.is_form(*pair):
            doubts.append(f"{join_names(pair)} hold nearly the same texts, one of which is enough")
            for spare in reversed(pair):
                yield [name for name in texts if name != spare], [spare], doubts
            return
    if texts and "text" not in survey.given:
        yield from _list_more(survey, label, [label, *same], texts, doubts)
    yield texts, [], doubts
    if known != texts:
        yield known, [], doubts


def _list_more(
    survey: Survey, label: str, learned: Sequence[str], texts: Sequence[str], doubts: list[str]
) -> Iterator[_TextsRead]:
    """Yield the texts with one more column: what they are about, or answers to them, if these tell labels apart, or
    another text, which repeats.

    Args:
        learned: label, and columns that say the same.
        doubts: doubts of the texts; a doubt of the further text is added.
    """
    for name in survey.list_unread([*learned, *texts]):
        column = survey.columns[name]
        is_subject = survey.is_subject(name)
        is_answer = column.has_text and survey.rate(name, "answer") >= USUAL
        own = [f"{name} is named as an answer, and may be read or not"] if is_answer else []
        is_told = is_subject and _is_stance(survey, label)
        is_said = column.has_labels and column.kind == "text" and column.mean_words >= MIN_WORDS
        if not is_told and is_said and survey.rate(label, "label") > survey.rate(name, "label"):
            doubts.append(f"{name} holds texts that repeat, and may be read or not")
            is_told = True
        if not is_told and (is_subject or is_answer):
            # equal texts have different labels, and do not with the column
            before = _count_conflicts(survey, texts, label)
            is_told = before >= CONFLICTS * survey.table.num_records
            is_told = is_told and _count_conflicts(survey, [*texts, name], label) < before / 2
        if is_told:
            yield survey.sort_names([*texts, name]), [], [*doubts, *own]


def _find_short_pair(survey: Survey, texts: Sequence[str]) -> list[str]:
    """Find the shorter of two pairs of texts, `word1, word2` beside `query1, query2`, whose texts are in the others."""
    pairs: dict[str, list[str]] = {}
    for name in texts:
        pairs.setdefault(" ".join(split_name(name)), []).append(name)
    both = sorted(pairs.values(), key=lambda pair: survey.columns[pair[0]].mean_chars)
    if [*map(len, both)] != [2, 2]:
        return []
    short, long = both
    share, _ = survey.measure_overlap(short[0], long[0])
    return short if share >= COPY else []


def _has_gaps(survey: Survey, name: str, label: str) -> bool:
    """Whether a text is there for some labels, and missing for others: "N/A", if its name says nothing of it."""
    absent = PLACEHOLDERS if survey.rate(name, *READ) < 2 else ()
    if not absent and survey.columns[name].num_filled > 0.95 * survey.table.num_records:
        return False
    filled: dict[str, list[bool]] = {}
    for record in survey.table.records[:NUM_ANSWERED]:
        text = find_value(record.fields, name)
        is_blank = is_empty_cell(text) or as_text(text) in absent
        filled.setdefault(as_text(find_value(record.fields, label)), []).append(not is_blank)
    shares = [sum(of_label) / len(of_label) for of_label in filled.values() if len(of_label) >= 3]
    return len(shares) > 1 and min(shares) < 0.2 and max(shares) > 0.8


def _is_label_told(survey: Survey, name: str, label: str) -> bool:
    """Whether a text holds the label in nearly all records: words that another label has are not in the text."""
    records = survey.table.records[:SAMPLE]
    num_told = 0
    for record in records:
        text = as_text(find_value(record.fields, name)).casefold()
        value = as_text(find_value(record.fields, label)).casefold()
        if len(value) >= MIN_LABEL:
            num_told += re.search(rf"\b{re.escape(value)}\b", text) is not None
    return num_told > 0.9 * len(records)


def _is_stance(survey: Survey, label: str) -> bool:
    values = {value.casefold() for value in survey.columns[label].values}
    return "stance" in split_name(label) or not values.isdisjoint(STANCES.split())


def _read_label(
    survey: Survey, label: str, texts: Sequence[str], same: Sequence[str], doubts: Sequence[str]
) -> Reading:
    """Read a label from its texts.

    Args:
        same: further columns that are known of the texts, or say the same as the label.
        doubts: doubts of the texts.
    """
    values = survey.columns[label].values
    shown = ", ".join(f"{value} ({count:,})" for value, count in [*values.items()][:4])
    if len(values) > 4:
        shown += ", ..."
    reason = f"{label} has {len(values)} values that repeat, {shown}, and {describe_columns(texts)} text"
    found = Reading("classification", "classification", {"text": texts, "label": (label,)}, reason)
    used = [label, *texts, *same]
    is_only = len(texts) == 1 and survey.columns[label].num_filled > 0.9 * survey.table.num_records
    is_only = is_only and not survey.can_learn_other(used)
    doubts = [*doubts]
    num_unlike = _count_conflicts(survey, texts, label)
    if num_unlike >= CONFLICTS * survey.table.num_records:  # something is missing from the inputs
        doubts.append(f"{num_unlike:,} records have the texts of others and another {label}")
    if survey.rate(label, "label", "answer") == 0 and not is_only:
        doubts.append(NO_LABEL)
    if "label" not in survey.given:
        if label in survey.attributes:
            others = list_names([name for name in survey.attributes if name != label])
            doubts.insert(0, f"{others} may be learned, too: the texts hold their values, as those of {label}")
        rivals = _list_rivals(survey, label, used)
        if rivals:
            doubts.append(f"{join_names(rivals[:2])} may be the label, too")
        doubts += describe_outputs(survey.list_outputs(used))
    # positive, negativ, pozitivní: whatever the name says, nothing else would be learned
    points = VALUES
    starts = {value.casefold()[:3] for value in values}
    if starts in ({"pos", "neg"}, {"pos", "neg", "neu"}) and survey.rate(label, "label") == 0:
        points += CLEAR
    return survey.weigh(found, values="the values repeat", points=points, read=same, doubts=doubts)


def _list_rivals(survey: Survey, label: str, used: Sequence[str]) -> list[str]:
    """List what may be meant instead of a label: another label, unless the name is a general one."""
    if _is_general(label) and len(split_name(label)) == 1:
        return []
    least = USUAL if survey.rate(label, "label") >= USUAL else 0
    columns = survey.columns
    values = columns[label].values
    named: list[str] = []
    unknown: list[str] = []
    for name in survey.list_unread(used):
        if not columns[name].has_labels or survey.is_amount(name):
            continue
        if survey.rate(name, "label", "flag", "answer") >= least or _is_general(name):
            named.append(name)
        elif survey.rate(name, *READ, *LEARNED) == 0 and _is_judgement(columns[name], values):
            unknown.append(name)
    if _is_general(label):  # of label_sexist and label_category none is the label alone
        return [name for name in (*named, *unknown) if _is_general(name)]
    return [*named, *unknown]


def _is_general(name: str) -> bool:
    return has_word(name, GENERAL_LABELS) and not has_word(name, SYSTEMS)


def _is_judgement(column: Column, values: Mapping[str, int]) -> bool:
    """Whether a column whose name says nothing may be a label like one with some values: it has the same ones, as one
    of several aspects, or two or three single words, such as truthful and deceptive, or 0 and 1 of what one word names:
    `ironic`, but not `has_link`.
    """
    is_flag = column.values.keys() == {"0", "1"} and len(split_name(column.name)) == 1
    are_words = column.kind == "text" and column.num_distinct <= MAX_WORDS and column.mean_words <= 1
    return is_flag or are_words or column.values.keys() == values.keys()


def _choose_words(survey: Survey, same: Sequence[str]) -> str:
    """Choose which of the columns that say the same is learned: T5 learns words rather than numbers."""
    words = [name for name in same if survey.columns[name].kind != "number"] or same
    return max(reversed(words), key=lambda name: survey.rate(name, "label"))


def _count_conflicts(survey: Survey, texts: Sequence[str], label: str) -> int:
    """Count the records whose texts others have with another label."""
    by_text: dict[tuple[str, ...], Counter[str]] = {}
    for record in survey.table.records:
        key = tuple(as_text(find_value(record.fields, name)) for name in texts)
        value = find_value(record.fields, label)
        if not is_empty_cell(value):
            by_text.setdefault(key, Counter())[as_text(value)] += 1
    return sum(labels.total() for labels in by_text.values() if len(labels) > 1)


def read_numbers(survey: Survey) -> Iterator[Reading]:
    """Yield texts with a number: a similarity, a score. Numbers that may be labels, or whose names say nothing, are
    among them: --task names them (`Survey.is_score`).
    """
    names = survey.list_columns("targets", "number", "label", minimum=0)
    numbers = [name for name in names if _has_numbers(survey, name)]
    if not names or not numbers:  # what counts or measures something may be meant if nothing else is there
        numbers = [name for name in survey.columns if _has_numbers(survey, name) and not survey.is_given(name)]
    for name in numbers:
        texts = [*survey.given.get("inputs", ())] or survey.list_texts(name)
        forms = [texts]
        if "inputs" not in survey.given and survey.rate(name, "answer") == 0:
            # an answer is scored beside its reference
            both = [*texts]
            for one in survey.list_unread([name, *texts]):
                if survey.columns[one].has_text and survey.rate(one, "answer") > 1:
                    both.append(one)
            if len(both) > len(texts):
                forms.insert(0, survey.sort_names(both))
        for inputs in forms:
            if inputs:
                reason = f"{name} holds numbers, and {describe_columns(inputs)} text"
                found = Reading("numbers", "regression", {"inputs": inputs, "targets": [name]}, reason)
                yield survey.weigh(found, values="numbers that are no labels")


def _has_numbers(survey: Survey, name: str) -> bool:
    column = survey.columns[name]
    return column.kind == "number" and column.num_distinct > 1 and not survey.is_id(name)
