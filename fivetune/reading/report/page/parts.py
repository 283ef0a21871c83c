"""The parts of a page before it is rendered: text, figures, tables, charts, examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph of plain text; `kind` is its style: lead, note, warning, good, code or heading."""

    body: str
    kind: str = "note"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, what to do about it, and the flags that do it; `kind` is bad or warning.

    Neighbouring problems are one numbered list, the most important first.
    """

    message: str
    advice: str = ""
    flags: str = ""
    kind: str = "warning"


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure: label, printed value, remark."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of printable cells under a header, with a caption; a `folded` table opens on a click.

    Args:
        values: sort key of each cell, row by row (None: its text). A table with values can be sorted and filtered on
            the page; text after a line break in a cell is printed small.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False
    values: Sequence[Sequence[float | None]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure in the form of Plotly's (`data`, `layout` as plain dicts) with a caption.

    Colours are the page's CSS variables (`var(--series-1)`). Two neighbours that are not `wide` share a row.
    Charts of one `group` synchronise their hover labels, and neighbours among them share a legend, whose entries are
    the `meta` of their traces.
    """

    caption: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    wide: bool = True
    group: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One prediction beside all its gold answers; `verdict` is right, near, wrong or unscored.

    `tags` are filters on the page: {"truncation": "whole", "answerable": "unanswerable"}. `before` is the prediction of
    the first of two compared runs; `verdict` is then fixed, broken or both wrong.
    """

    id: str
    inputs: str
    prediction: str
    references: tuple[str, ...]
    verdict: str
    remark: str = ""
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    before: str | None = None


Cell = str | tuple[str, float | None]
"""Text of a cell, or its text and its sort key."""

Part = Text | Problem | Figure | Table | Chart | Example


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page."""

    title: str
    parts: tuple[Part, ...]


def build_section(title: str, *parts: Part | Iterable[Part] | None) -> Section:
    """Build a section of parts and of lists of parts; None is left out."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, Part):
            found.append(part)
        else:
            found += part or ()
    return Section(title, tuple(found))


def collect_quiet_sections(sections: Iterable[Section]) -> tuple[Section, ...]:
    """Move sections that hold notes alone into a folded one at the end; the first stays, those without parts go."""
    kept: list[Section] = []
    quiet: list[tuple[str, str]] = []
    for section in sections:
        notes = [part.body for part in section.parts if isinstance(part, Text) and part.kind == "note"]
        if len(notes) < len(section.parts) or (notes and not kept):
            kept.append(section)
        elif notes:
            quiet.append((section.title, " ".join(notes)))
    if quiet:
        names = ", ".join(title for title, _ in quiet)
        table = Table(f"Why there is nothing on: {names}", ("section", "reason"), quiet, folded=True)
        kept.append(Section("Nothing to report", (table,)))
    return tuple(kept)


def build_sortable_table(
    caption: str,
    header: Sequence[str],
    cells: Sequence[Sequence[Cell]],
    *,
    folded: bool = False,
) -> Table:
    """Build a table that can be sorted on the page."""
    rows: list[tuple[str, ...]] = []
    values: list[tuple[float | None, ...]] = []
    for row in cells:
        pairs = [(cell, None) if isinstance(cell, str) else cell for cell in row]
        texts, keys = zip(*pairs, strict=True)
        rows.append(texts)
        values.append(keys)
    return Table(caption, header, rows, folded, values)


@dataclass(frozen=True, slots=True)
class Measured:
    """A number in a table of results.

    Args:
        text: the number as a page prints it, with its unit.
        value: the number itself, in the unit of its column; None if unknown.
        interval: lower and upper end of its interval; None without one.
        ends: the interval as a page prints it; "" without one.
        mark: sign of its significance, one of `Results.marks`; "" without one.
    """

    text: str
    value: float | None = None
    interval: tuple[float, float] | None = None
    ends: str = ""
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a page as one table for a paper.

    Args:
        units: column -> unit of its numbers, for files in which numbers have no unit of their own.
        marks: sign -> meaning, as a clause.
        methods: a paragraph that stands before the table; "" without one.
    """

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str | Measured]]
    units: Mapping[str, str] = field(default_factory=dict[str, str])
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    methods: str = ""


def build_plain_table(results: Results, caption: str) -> Table:
    """Build the table of a page from the results of a paper: numbers as they are printed."""
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in results.rows]
    return Table(caption, results.header, rows)


@dataclass(frozen=True, slots=True)
class Page:
    """One HTML page before it is rendered; `badges` are short labels of its state."""

    title: str
    sections: tuple[Section, ...]
    subtitle: str = ""
    badges: tuple[Text, ...] = ()
