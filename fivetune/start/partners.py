"""Texts and what is learned from them in two tables of equal length, such as X_train.csv and y_train.csv.

In: the source of a table that fits no task. Out: the command that joins it with its neighbour, as a sentence.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from fivetune.data.readers.delimited import find_start
from fivetune.data.readers.records import is_hub_name, list_source_files, read_records
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    SUFFIXES,
    BadRecord,
    decode_head,
    find_partner,
    get_data_suffix,
    is_saved_dataset,
    open_bytes,
    quote_in_code,
)
from fivetune.errors import DataError
from fivetune.start.columns import read_first_line

MAX_BYTES = 2**26  # of a table that is compared with another one


def describe_partner(source: str) -> str:
    """Describe another table of a folder with the rest of a table's records; "" without such a table."""
    path = Path(source).expanduser()
    if is_hub_name(source) or not path.exists() or is_saved_dataset(path):
        return ""
    for file in sorted(list_source_files(source), key=_is_no_training_set):
        partner = find_partner(file)
        if partner and _can_be_compared(file) and _can_be_compared(partner):
            return _describe_tables(file, partner)
    return ""


def _can_be_compared(path: Path) -> bool:
    return SUFFIXES.get(get_data_suffix(path)) == "csv" and path.stat().st_size <= MAX_BYTES and path.suffix != ".gz"


def _is_no_training_set(path: Path) -> bool:
    return "train" not in path.name.casefold()


def _describe_tables(first: Path, second: Path) -> str:
    one, two = _read_rows(first), _read_rows(second)
    if not one or not two:
        return ""
    if len(one) != len(two):
        return (
            f" {first} has {len(one):,} records, and {second} beside it {len(two):,}: they do not belong together one "
            "by one. Find those that are missing."
        )
    same = [name for name in one[0] if name in two[0]]
    added = [place for place, name in enumerate(two[0]) if name not in same]
    if not added or any(a[name] != b[name] for a, b in zip(one, two, strict=True) for name in same):
        return ""
    code = f"import csv, sys; a, b = {format_reader(first)}, {format_reader(second)}; w = csv.writer(sys.stdout); "
    code += f"[w.writerow(x + [y[i] for i in {added}]) for x, y in zip(a, b)]"
    into = shlex.quote(f"{first.stem}-{second.stem}.csv")
    return (
        f" If the records of {second} belong to its records, join them: python -c {shlex.quote(code)} > {into}, and "
        "name that file."
    )


def _read_rows(path: Path) -> list[dict[str, object]]:
    """Read the records of a table, in the order of its columns; none if one is bad."""
    bad: list[BadRecord] = []
    try:
        records = [*read_records(str(path), on_bad=bad.append)]
    except DataError:
        return []
    names = read_first_line(str(path))
    return [] if bad else [{name: record.fields.get(name) for name in names} for record in records]


def format_reader(path: Path) -> str:
    """Format the call of Python that reads the rows of a table."""
    with open_bytes(path) as file:
        _, separator = find_start(decode_head(file.read(HEAD_BYTES)), path)
    opened = f'open({quote_in_code(str(path))}, encoding="utf-8-sig", newline="")'
    return f"csv.reader({opened}, delimiter={quote_in_code(separator or ',')})"
