"""Names for the columns of a table that has none, by the kinds of their values, and the readings by these names.

In: a source whose columns have no names. Out: a DoubtError with commands that give both names and roles.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from fivetune.data.readers.delimited import QUESTION_END, list_plain_names
from fivetune.errors import DataError
from fivetune.start.choose import DoubtError, infer_divided
from fivetune.start.columns import MIN_RECORDS, Column, RawTable, as_text, read_table
from fivetune.start.several_labels import read_tags
from fivetune.start.survey import make_survey

MIN_CHOICES = 3  # texts beside a question and the label that says which of them is right
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
        names = _name_columns(read_table(source, list_plain_names(num), flags))
        table = read_table(source, names, flags)
    except DataError:  # of another file of a folder
        return None
    if table.num_records < MIN_RECORDS:
        return None
    invented = f"{why}; the names in --header are invented, and may be others"
    try:
        return DoubtError(invented, [infer_divided(table, task=task)])
    except DoubtError as doubt:
        return DoubtError(invented, doubt.choices)
    except DataError as error:
        return DataError(f"{error} These names are invented, as there is {why}: --header {','.join(names)}.")


def _name_columns(table: RawTable) -> list[str]:
    """Invent names for columns by what their values are; a name that says nothing for the texts of a pair, of which
    either may be learned.
    """
    columns = {name: table.columns[name] for name in table.header if name in table.columns}
    survey = make_survey(table, {})
    tags = {name for reading in read_tags(survey) for name in reading.roles["tags"]}
    kinds = {name: "labels" if name in tags else _find_kind(table, column) for name, column in columns.items()}
    texts = [name for name, kind in kinds.items() if kind == "text"]
    labels = [name for name, kind in kinds.items() if kind in ("label", "labels")]
    asked = [name for name in texts if _has_form(table, name, QUESTION_END)][:1]
    others = [name for name in texts if name not in asked]
    if asked and len(labels) == 1 and len(others) >= max(MIN_CHOICES, columns[labels[0]].num_distinct):
        kinds |= {
            asked[0]: "question",
            labels[0]: "answer",
            **{name: chr(ord("A") + i) for i, name in enumerate(others)},
        }
    elif not labels and len(texts) == 2:
        if asked:
            kinds |= {asked[0]: "question", others[0]: "answer"}
        else:
            kinds |= {name: name for name in texts}
    times = Counter(kinds.values())
    numbers: Counter[str] = Counter()
    names: list[str] = []
    for name in table.header:
        kind = kinds.get(name, name)
        numbers[kind] += 1
        names.append(f"{kind}{numbers[kind]}" if times[kind] > 1 else kind)
    return names


def _find_kind(table: RawTable, column: Column) -> str:
    if column.has_labels and (column.kind == "text" or column.num_distinct <= MAX_NUMBERED_LABELS):
        return "label"
    is_whole = column.kind == "number" and not column.has_fractions
    if column.num_distinct == table.num_records and (column.has_codes or is_whole):
        return "id"
    if column.kind == "number":
        return "number" if is_whole and column.num_distinct > MAX_SCORES else "score"
    if column.kind == "text":
        return "key" if column.mean_words < LONG_KEY and _has_form(table, column.name, CODE) else "text"
    return column.kind if column.kind in ("date", "link") else column.name


def _has_form(table: RawTable, name: str, form: re.Pattern[str]) -> bool:
    """Whether nearly all texts of a column hold what is looked for."""
    texts = [as_text(value) for value in table.list_values(name)]
    return sum(map(bool, map(form.search, texts))) >= MOST * len(texts)
