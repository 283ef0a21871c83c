"""Names for the columns of a table that has none, by the kinds of their values, and the readings by these names.

In: a source whose columns have no names. Out: a DoubtError with commands that give both names and roles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from string import ascii_uppercase

from fivetune.data.readers.delimited import QUESTION_END, list_plain_names
from fivetune.errors import DataError
from fivetune.start.choose import DoubtError, infer_divided
from fivetune.start.columns import MIN_RECORDS, Column, RawTable, as_text, build_table, count_matches, read_table
from fivetune.start.several_labels import read_tags
from fivetune.start.survey import make_survey
from fivetune.types import RawRecord

MIN_CHOICES = 3  # texts with a question, and with the label that says which of them is right
MAX_NUMBERED_LABELS = 5  # whole numbers that are labels, such as stars
MAX_SCORES = 101  # whole numbers that are scores
LONG_KEY = 1.1  # mean words of codes such as u0
CODE = re.compile(r"\d")
MOST = 0.8  # share of texts that hold what makes them questions or codes


def explain_missing_header(
    source: str, num: int, why: str, *, task: str | None = None, flags: Sequence[str] = ()
) -> DataError | None:
    """Explain how a source whose columns have no names may be read: by invented names, in one command for each reading.

    Args:
        num: number of columns.
        why: as a clause, what shows that there are no names.
        flags: further words of the command line, which the commands repeat.

    Returns: the error; None if the values say nothing of the columns, as of fewer than MIN_RECORDS records.
    """
    try:
        plain = read_table(source, list_plain_names(num), flags)
    except DataError:  # of another file of a folder
        return None
    if plain.num_records < MIN_RECORDS:
        return None
    names = _name_columns(plain)
    table = _rename_columns(plain, names)
    invented = f"{why}; the names in --header are invented, and may be others"
    try:
        return DoubtError(invented, [infer_divided(table, task=task)])
    except DoubtError as doubt:
        return DoubtError(invented, doubt.choices)
    except DataError as error:
        return DataError(f"{error} These names are invented, as there is {why}: --header {','.join(names)}.")


def _rename_columns(table: RawTable, names: Sequence[str]) -> RawTable:
    """Return a table as it is read with other names in its header."""
    by_plain = dict(zip(table.header, names, strict=True))
    records: list[RawRecord] = []
    for record in table.records:
        fields = {by_plain.get(name, name): value for name, value in record.fields.items()}
        fields["id"] = str(fields["id"])  # of a column, else made up by the reader
        records.append(RawRecord(fields, record.where, record.has_own_id or "id" in names))
    renamed = build_table(table.source, records, header=names, flags=table.flags)
    return replace(renamed, num_read=table.num_read)


def _name_columns(table: RawTable) -> list[str]:
    """Invent names for columns by what their values are; a name that says nothing for the texts of a pair, of which
    either may be learned.
    """
    kinds: dict[str, str] = {}
    for name in table.header:
        if name in table.columns:
            kinds[name] = _find_kind(table, table.columns[name])
    for reading in read_tags(make_survey(table, {})):
        kinds |= dict.fromkeys(reading.roles["tags"], "labels")
    texts = [name for name, kind in kinds.items() if kind == "text"]
    labels = [name for name, kind in kinds.items() if kind in ("label", "labels")]
    asked = [name for name in texts if _has_form(table, name, QUESTION_END)][:1]
    others = [name for name in texts if name not in asked]
    if asked and len(labels) == 1 and len(others) >= max(MIN_CHOICES, table.columns[labels[0]].num_distinct):
        kinds |= {asked[0]: "question", labels[0]: "answer"}
        kinds |= dict(zip(others, ascii_uppercase, strict=False))
    elif asked and not labels and len(texts) == 2:
        kinds |= {asked[0]: "question", others[0]: "answer"}
    elif not labels and len(texts) == 2:
        kinds |= {name: name for name in texts}
    # equal names are numbered
    times = Counter(kinds.values())
    numbers: Counter[str] = Counter()
    names: list[str] = []
    for name in table.header:
        kind = kinds.get(name, name)
        numbers[kind] += 1
        names.append(f"{kind}{numbers[kind]}" if times[kind] > 1 else kind)
    return names


def _find_kind(table: RawTable, column: Column) -> str:
    is_number = column.kind == "number"
    if column.has_labels and (not is_number or column.num_distinct <= MAX_NUMBERED_LABELS):
        return "label"
    is_whole = is_number and not column.has_fractions
    if column.num_distinct == table.num_records and (column.has_codes or is_whole):
        return "id"
    if is_number:
        return "number" if is_whole and column.num_distinct > MAX_SCORES else "score"
    if column.kind == "text":
        return "key" if column.mean_words < LONG_KEY and _has_form(table, column.name, CODE) else "text"
    return column.kind if column.kind in ("date", "link") else column.name


def _has_form(table: RawTable, name: str, form: re.Pattern[str]) -> bool:
    """Whether nearly all texts of a column hold what is looked for."""
    return count_matches(form, map(as_text, table.list_values(name))) >= MOST * table.num_records
