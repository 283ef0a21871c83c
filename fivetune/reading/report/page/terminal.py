"""Rendering of a page as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from fivetune.reading.report.page.parts import Chart, Example, Figure, Page, Problem, Table, Text
from fivetune.reading.report.page.render import choose_column_classes
from fivetune.reading.report.page.wording import escape_hidden

MAX_CELL_CHARACTERS = 90  # characters of a cell in the terminal


def format_page_lines(page: Page) -> Iterator[str]:
    """Format a page as lines of text, without charts and figures; invisible characters are named."""
    yield escape_hidden(page.title)
    yield escape_hidden(page.subtitle)
    for section in page.sections:
        yield ""
        yield f"== {section.title} =="
        for part in section.parts:
            if isinstance(part, Text):
                yield from ("", f"{'warning: ' if part.kind == 'warning' else ''}{escape_hidden(part.body)}")
            elif isinstance(part, Problem):
                yield from ("", escape_hidden(f"warning: {part.message} {part.advice}".rstrip()))
            elif isinstance(part, Table):
                yield from ("", escape_hidden(part.caption), *_format_table_lines(part))
            else:
                assert isinstance(part, Chart | Figure | Example)  # shown in HTML only


def _format_table_lines(table: Table) -> Iterator[str]:
    """Format a table as aligned columns, numbers to the right.

    >>> print(*_format_table_lines(Table("", ("limit", "cut"), (("8", "1,200"), ("16", "7")))), sep="|")
    limit    cut|    8  1,200|   16      7
    """
    rows: list[list[str]] = []
    for row in (table.header, *table.rows):
        cells = [escape_hidden(" ".join(cell.split())) for cell in row]
        rows.append([_shorten_cell(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if kind == "num" else "<" for kind in choose_column_classes(table)]
    for row in rows:
        cells = [f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def _shorten_cell(text: str) -> str:
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[: MAX_CELL_CHARACTERS - 4]} ..."
