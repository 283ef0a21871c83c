"""Sheets of Excel workbooks are read as the table that their reader sees, or refused with the reason."""

from __future__ import annotations

import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from fivetune.data.readers.delimited import read_first_cells
from fivetune.data.readers.records import BadRecord, check_source, read_records
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.start.columns import describe_form, read_first_line

ROWS = [["text", "label"], ["Late again.", "late"], ["I want my money.", "refund"], ["Where is it?", "late"]]
Fields = list[dict[str, object]]


def save(path: Path, rows: Sequence[Sequence[object]] = ROWS, change: Callable[[Any], object] | None = None) -> str:
    book = openpyxl.Workbook()
    sheet = book.active
    assert sheet is not None
    for row in rows:
        sheet.append(list(row))
    if change:
        change(sheet)
    book.save(path)
    return str(path)


def read(source: str, **settings: Any) -> tuple[Fields, list[str]]:
    bad: list[BadRecord] = []
    found = [dict(record.fields) for record in read_records(source, on_bad=bad.append, **settings)]
    return found, [str(one) for one in bad]


def replace_in_sheet(path: Path, old: str, new: str) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    name = "xl/worksheets/sheet1.xml"
    assert old.encode() in parts[name]
    parts[name] = parts[name].replace(old.encode(), new.encode())
    with zipfile.ZipFile(path, "w") as archive:
        for one, content in parts.items():
            archive.writestr(one, content)


@pytest.mark.parametrize(
    ("value", "form", "found"),
    [
        ("007", "General", "007"),
        (7, "000", "007"),
        (7, "0.00", 7),
        (3.0, "General", 3),
        (2.5, "General", 2.5),
        (True, "General", True),
        (datetime(2026, 1, 2), "dd.mm.yyyy", date(2026, 1, 2)),
        (datetime(2026, 1, 2), "dd.mm.yyyy hh:mm", datetime(2026, 1, 2)),
        (datetime(2026, 1, 2, 3, 4), "dd.mm.yyyy", datetime(2026, 1, 2, 3, 4)),
        (time(3, 4), "hh:mm", "03:04:00"),
        ("#N/A", "General", None),
        ("one\ntwo", "General", "one\ntwo"),
        ("one_x000D_\ntwo", "General", "one\r\ntwo"),
        ("", "General", None),
    ],
)
def test_a_cell_has_the_value_that_is_seen(tmp_path: Path, value: object, form: str, found: object) -> None:
    def change(sheet: Any) -> None:
        sheet["C2"] = value
        sheet["C2"].number_format = form

    source = save(tmp_path / "a.xlsx", [[*ROWS[0], "x"], *ROWS[1:]], change)
    assert [one["x"] for one in read(source)[0]] == [found, None, None]


def merge(sheet: Any) -> None:
    sheet["B3"] = sheet["B4"] = None
    sheet.merge_cells("B2:B3")
    sheet.merge_cells("A4:B4")


@pytest.mark.parametrize(
    ("rows", "change", "labels"),
    [
        (ROWS, lambda sheet: sheet.insert_cols(1, 2), ["late", "refund", "late"]),
        ([*ROWS[:2], [], [], *ROWS[2:], []], None, ["late", "refund", "late"]),
        (ROWS, merge, ["late", "late", None]),
        (ROWS, lambda sheet: sheet.cell(900, 90).__setattr__("number_format", "000"), ["late", "refund", "late"]),
    ],
)
def test_a_table_lies_anywhere_in_its_sheet(tmp_path: Path, rows: Any, change: Any, labels: list[str]) -> None:
    found, bad = read(save(tmp_path / "a.xlsx", rows, change))
    assert [one["label"] for one in found] == labels and found[0]["text"] == "Late again." and not bad
    assert [*found[0]] == ["id", "text", "label"]


def test_what_is_outside_of_the_table_is_told(tmp_path: Path) -> None:
    rows = [["Tickets of May"], [], *ROWS, *ROWS[1:] * 6]
    found, bad = read(save(tmp_path / "a.xlsx", rows, lambda sheet: sheet.__setitem__("D5", "ask Ann")))
    assert [one["text"] for one in found[:2]] == ["Late again.", "Where is it?"] and len(found) == 20
    assert "a.xlsx:1: 'Tickets of May' is outside" in bad[0] and "a.xlsx:5: 'ask Ann' is outside" in bad[1]


def test_a_table_without_a_header_gets_one(tmp_path: Path) -> None:
    source = save(tmp_path / "a.xlsx", ROWS[1:] * 4)
    with pytest.raises(DataError, match=r"no header: .* --header column1,column2"):
        read(source)
    assert read(source, header=("text", "label"))[0][0] == {"id": "a-1", "text": "Late again.", "label": "late"}


def test_a_sheet_is_chosen_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    book = openpyxl.Workbook()
    hidden = book.active
    assert hidden is not None
    hidden.append(["list", "of"])
    hidden.sheet_state = "hidden"
    for name, rows in (("May", ROWS), ("June #2", ROWS[:2])):
        sheet = book.create_sheet(name)
        for row in rows:
            sheet.append(row)
    book.save(path)
    assert len(read(str(path))[0]) == 3 and read_first_line(str(path)) == ROWS[0]
    named = f"{path}#June #2"
    assert read(named)[0] == [{"id": "a-1", "text": "Late again.", "label": "late"}]
    assert next(read_records(named)).where == f"{named}:2"
    assert describe_form(named) == [] and f"'{path}#Sheet'" in describe_form(str(path))[0]
    with pytest.raises(DataError, match=r"no sheet 'July'. Allowed: Sheet, May, June #2"):
        check_source(f"{path}#July")


def test_a_formula_has_the_value_that_was_stored(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    rows = [[*ROWS[0], "n"], [*ROWS[1], "=LEN(A2)"], [*ROWS[2], 3]]
    source = save(path, rows)
    with pytest.raises(DataError, match=r"formula in cell C2 has no value.*Open the file in Excel or LibreOffice"):
        check_source(source)
    for attribute, stored, found in (("", "11", 11), (' t="str"', "ab", "ab"), (' t="str"', "", None)):
        save(path, rows)
        cell = f"<f>LEN(A2)</f><v>{stored}</v>"
        replace_in_sheet(path, '<c r="C2"><f>LEN(A2)</f><v></v>', f'<c r="C2"{attribute}>{cell}')
        assert [one["n"] for one in read(source)[0]] == [found, 3]


def test_cells_of_other_programs_have_a_prefix(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    save(path, [*ROWS, ["=LEN(A2)", "late"]])
    with zipfile.ZipFile(path) as archive:
        plain = archive.read("xl/worksheets/sheet1.xml").decode()
    replace_in_sheet(path, plain, re.sub(r"<(/?)([a-zA-Z])", r"<\1x:\2", plain).replace("xmlns=", "xmlns:x="))
    with pytest.raises(DataError, match="formula in cell A5 has no value"):
        read(str(path))


def test_a_wrong_size_of_the_sheet_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    save(path)
    replace_in_sheet(path, 'ref="A1:B4"', 'ref="A1"')
    assert len(read(str(path))[0]) == 3


def test_a_workbook_is_known_by_its_content_and_read_without_warnings(tmp_path: Path) -> None:
    source = save(tmp_path / "upload")
    with warnings.catch_warnings(action="error"):
        assert len(read(source)[0]) == 3
    assert read_first_cells((tmp_path / "upload").read_bytes(), tmp_path / "upload") == ROWS[0]
    assert describe_form(source) == []
    assert len(read(save(tmp_path / "A.XLSX"))[0]) == 3


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.xls", b"\xd0\xcf\x11\xe0" + bytes(600), r"Excel 97 \(\.xls\).*save it as \.xlsx"),
        ("a.xlsx", b"\xd0\xcf\x11\xe0" + bytes(600), "with a password.*save it without"),
        ("a.ods", b"PK\x03\x04mimetypeapplication/vnd.oasis.opendocument.spreadsheet", r"save it as \.xlsx"),
        ("a.xlsb", b"PK\x03\x04" + bytes(99) + b"xl/workbook.bin", r"save it as \.xlsx"),
        ("a.xlsx", b"PK\x03\x04" + bytes(99) + b"xl/workbook.xml" + bytes(99), "damaged workbook"),
        ("a.xlsx", b"text,label\nLate.,late\n", "not .xlsx but text"),
    ],
)
def test_what_is_no_whole_workbook_is_refused(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{re.escape(name)}.*{told}"):
        check_source(str(path))


def test_a_sheet_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no records"):
        read(save(tmp_path / "a.xlsx", []))


def test_without_openpyxl_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "a.xlsx")
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"openpyxl is not installed. Install it: pip install"):
        check_source(source)


def test_a_file_that_excel_holds_open_does_not_disturb(tmp_path: Path) -> None:
    save(tmp_path / "a.xlsx")
    (tmp_path / "~$a.xlsx").write_bytes(b"Ann")
    assert len(read(str(tmp_path))[0]) == 3
