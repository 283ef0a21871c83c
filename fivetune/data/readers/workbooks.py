"""Read the rows of a sheet of an Excel workbook (.xlsx). `openpyxl` is imported on first use.

In: a path, with #SHEET for another sheet than the first visible one. Out: rows of values as JSON has them, dates and
times apart. Memory holds the row and the different texts of the workbook, which its format keeps in one list.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import datetime, time, timedelta
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from fivetune.data.readers.source_files import open_bytes, quote_value, split_sheet
from fivetune.errors import DataError, FiveTuneError
from fivetune.installation import require_package
from fivetune.tasks import list_names

SAMPLE_ROWS = 100
ROWS_AT_ONCE = 1_000
OVERLAP = 2**15  # bytes of a block that are searched again with the next one: more than a cell with its formula
MERGED = re.compile(rb'<(?:\w+:)?mergeCell ref="([A-Z]+)(\d+):[A-Z]+(\d+)"')
# A formula without the value that Excel stores with it, unless that is an empty text.
UNCALCULATED = re.compile(
    rb'<(?:\w+:)?c\b(?![^>]*t="str")[^>]* r="([A-Z]+\d+)"[^>]*>\s*<(?:\w+:)?f\b[^>]*(?:/>|>[^<]*</(?:\w+:)?f>)\s*'
    rb"(?:<(?:\w+:)?v\s*/>|<(?:\w+:)?v>\s*</(?:\w+:)?v>)?\s*</(?:\w+:)?c>"
)


def iter_sheet_rows(path: Path) -> Iterator[tuple[int, list[object]]]:
    """Yield number, from 1, and cells of each row with a value; None for an empty cell and for an error such as #N/A.

    A cell that is merged with cells below it has its value in all of their rows. A number in the format 000 is text.

    Raises DataError for a damaged workbook, an absent sheet, and a formula that was never calculated;
    FiveTuneEnvironmentError without openpyxl.
    """
    with _open_sheet(path) as (_, sheet):
        sheet.reset_dimensions()  # some programs write wrong ones
        merged = _find_merged(sheet, path)
        rows = enumerate(sheet.iter_rows(), 1)
        held: dict[int, tuple[int, object]] = {}  # column -> the last row that its value belongs to, the value
        while True:
            with warnings.catch_warnings(action="ignore"):
                block = list(islice(rows, ROWS_AT_ONCE))
            if not block:
                return
            for number, cells in block:
                values = [_read_cell(cell) for cell in cells]
                if all(value is None for value in values):
                    continue
                values += [None] * (max(held, default=0) + 1 - len(values))
                for place, (last, value) in held.items():
                    if number <= last:
                        values[place] = value
                for place, last in merged.get(number, ()):
                    if place < len(values):
                        held[place] = last, values[place]
                yield number, values


def describe_sheets(path: Path) -> str:
    """Describe which sheet of a workbook is read; "" if it is named, or no other one is there."""
    if split_sheet(str(path))[1]:
        return ""
    with _open_sheet(path) as (book, chosen):
        others = [sheet.title for sheet in book.worksheets if sheet is not chosen]
    if not others:
        return ""
    name = f"{path}#{others[0]}"
    return f"the sheet {chosen.title} is read, not {list_names(others)}: {others[0]} would be {name!r}"


def take_head(rows: Iterator[tuple[int, list[object]]]) -> tuple[list[tuple[int, list[object]]], str]:
    """Take the first rows of a sheet; return them, and as lines of text with tabs between the cells."""
    head = list(islice(rows, SAMPLE_ROWS))
    lines: list[str] = []
    for _, cells in head:
        lines.append("\t".join("" if value is None else re.sub(r"\s", " ", str(value)) for value in cells))
    return head, "\n".join(lines)


@contextmanager
def _open_sheet(path: Path) -> Generator[tuple[Any, Any]]:
    """Open a workbook; return it with the sheet that is read."""
    openpyxl = import_openpyxl(str(path))
    with open_bytes(path) as file, _translate_errors(path):
        with warnings.catch_warnings(action="ignore"):  # of parts that are not read, such as styles
            book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        yield book, _choose_sheet(book, path)


def _choose_sheet(book: Any, path: Path) -> Any:
    wanted = split_sheet(str(path))[1]
    names = [sheet.title for sheet in book.worksheets]
    if wanted and wanted not in names:
        raise DataError(f"{path}: there is no sheet {wanted!r}. Allowed: {list_names(names)}. Correct the name.")
    for sheet in book.worksheets:
        if sheet.title == wanted or (not wanted and sheet.sheet_state == "visible"):
            return sheet
    raise DataError(f"{path}: holds no visible sheet. Allowed is one with a header and rows. Name it: FILE.xlsx#SHEET.")


def _find_merged(sheet: Any, path: Path) -> dict[int, list[tuple[int, int]]]:
    """Find the cells that are merged with cells below: row -> (column from 0, last row); they stand behind all rows.

    Raises DataError for a formula without a value.
    """
    merged: dict[int, list[tuple[int, int]]] = {}
    column_index = import_module("openpyxl.utils").column_index_from_string
    text = b""
    with sheet._get_source() as xml:
        while block := xml.read(2**20):
            text = text[-OVERLAP:] + block
            if found := UNCALCULATED.search(text):
                raise DataError(
                    f"{path}: the formula in cell {found[1].decode()} has no value, as programs write it that do not "
                    "calculate. Allowed are formulas with values. Open the file in Excel or LibreOffice, and save it."
                )
            for column, first, last in MERGED.findall(text):
                if first != last:
                    merged.setdefault(int(first), []).append((column_index(column.decode()) - 1, int(last)))
    return merged


def _read_cell(cell: Any) -> object:
    """Return a cell's value as its reader sees it: 3.0 is 3, a date has no time, 7 in the format 000 is "007"."""
    value = cell.value
    if value is None or value == "" or cell.data_type == "e":
        return None
    if isinstance(value, str):
        return value.replace("_x000D_", "\r")  # as Excel writes it
    if isinstance(value, datetime) and value.time() == time() and "h" not in cell.number_format.lower():
        return value.date()
    if isinstance(value, time | timedelta):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and re.fullmatch("0{2,}", cell.number_format):
        return str(value).zfill(len(cell.number_format))
    return value


def import_openpyxl(where: str) -> ModuleType:
    """Import openpyxl. Raises FiveTuneEnvironmentError where it is not installed.

    Args:
        where: what needs it, for the message.
    """
    require_package(where, "openpyxl", "excel", ". Or use CSV in UTF-8")
    return import_module("openpyxl")


@contextmanager
def _translate_errors(path: Path) -> Generator[None]:
    try:
        yield
    except (FiveTuneError, MemoryError):
        raise
    except Exception as error:  # a damaged file raises errors of many types in openpyxl
        raise DataError(
            f"{path}: damaged workbook: {quote_value(error, limit=120)}. Allowed is a complete .xlsx file. Copy it "
            "again, or open and save it."
        ) from error
