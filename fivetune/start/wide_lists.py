"""A list that was written with a column for each text: `tag, patterns/0, patterns/1, ...`.

In: a Survey. Out: the command that writes a row for each text, as a sentence.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from fivetune.start.columns import read_first_line
from fivetune.start.partners import format_reader
from fivetune.start.roles import USUAL
from fivetune.start.survey import FEW_WORDS, READ, Survey, is_named_output

MIN_COLUMNS = 3  # of one list
UNLIKE = 0.9  # different labels per row: each has its row
END = re.compile(r"[/._ \[]*\d+\]?$")


def explain_wide_list(survey: Survey) -> str | None:
    """Explain that each row of a table holds all texts of a label, which has no other row; None for other tables."""
    columns = survey.columns
    labels: list[str] = []
    lists: dict[str, list[str]] = {}
    for name, column in columns.items():
        stem = END.sub("", name)
        if stem == name:
            # named as a label, more than as a text, with a value in each row that no other row has
            is_label = survey.rate(name, "label", "tags") > survey.rate(name, "targets", "answer", *READ)
            if is_label and column.num_distinct > UNLIKE * column.num_filled and not column.has_fractions:
                labels.append(name)
            continue
        is_output = is_named_output(stem) or survey.rate(stem, "choices", "answer") >= USUAL
        if column.kind == "text" and not column.has_labels and not is_output:
            lists.setdefault(stem, []).append(name)
    if survey.given or not labels or not lists:
        return None
    stem = max(lists, key=lambda one: len(lists[one]))
    names = lists[stem]
    if len(names) < MIN_COLUMNS or all(columns[name].mean_words <= FEW_WORDS for name in names):
        return None
    label = labels[0]
    what = f"{names[0]} to {names[-1]} look like a list of texts with one {label}, which no other row has"
    way = "Write a row for each text"
    path = Path(survey.table.source)
    header = [name.strip() for name in read_first_line(str(path))]
    if path.is_file() and label in header:
        # of the header, as the survey leaves columns out that few rows fill
        places = [place for place, name in enumerate(header) if END.sub("", name) == stem != name]
        rows = f"[[r[i], r[{header.index(label)}]] for r in rows for i in {places} if r[i]]"
        code = f"import csv, sys; rows = {format_reader(path)}; next(rows); w = csv.writer(sys.stdout); "
        code += f'w.writerows([["text", "label"], *{rows}])'
        way += f": python -c {shlex.quote(code)} > {shlex.quote(f'{path.stem}-rows.csv')}, and name that file"
    return f"{what}. Allowed is one text in each row. {way}"
