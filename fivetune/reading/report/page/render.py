"""Rendering of a page as one self-contained HTML file; its content security policy admits only its own scripts.

In: a Page. Out: HTML text.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fivetune.reading.report.page.parts import Chart, Example, Page, Section, Table
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.values import are_numbers


def render_html(page: Page) -> str:
    """Render a page as HTML. Text from data is escaped, invisible characters are named."""
    script = "\n".join(map(_read_template, ("charts.js", "page.js")))
    style = _read_template("style.css")
    policy = (
        f"default-src 'none'; script-src {_hash_script(script)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return (
        _build_environment()
        .get_template("page.html")
        .render(page=page, policy=policy, figures=_pack_charts(page), script=Markup(script), style=Markup(style))
    )


@cache
def _read_template(name: str) -> str:
    """Return a script or style without indentation and lines of comments."""
    return re.sub(r"\n\s*(//.*)?", "\n", _build_environment().get_template(name).render())


def _hash_script(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


def _pack_charts(page: Page) -> str:
    """Return the figures of all charts, in their order, as gzipped JSON in base64, which the page's script unpacks."""
    figures: list[dict[str, Any]] = []
    for section in page.sections:
        for part in section.parts:
            if isinstance(part, Chart):
                figures.append({"data": part.data, "layout": part.layout})
    text = json.dumps(figures, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@cache
def _build_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fivetune.reading.report.page"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_escape_text,
    )
    environment.filters |= {  # pyright: ignore[reportUnknownMemberType]
        "blocks": group_parts,
        "slug": to_slug,
        "align": choose_column_classes,
        "tile_columns": choose_tile_columns,
        "unbroken": insert_nonbreaking_spaces,
        "choices": collect_filter_values,
        "chosen_by": get_filter_value,
    }
    return environment


def _escape_text(value: Any) -> Any:
    """Name the invisible characters of a text from data; return Markup and other values unchanged."""
    return escape_hidden(value) if type(value) is str else value


def to_slug(title: str) -> str:
    """Convert a title to an anchor: "Key figures" -> key-figures."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def choose_tile_columns(num: int) -> int:
    """Choose the columns of a grid of figures: one row up to six, else 5, 4 or 3 columns, by the fullest last row.

    >>> [choose_tile_columns(num) for num in (1, 3, 6, 7, 8, 9, 10)]
    [1, 3, 6, 4, 4, 3, 5]
    """
    return num if num <= 6 else min((4, 5, 3), key=lambda columns: -num % columns)


def insert_nonbreaking_spaces(text: str) -> str:
    """Put a no-break space between numbers and units, and into "p < 0.001"."""
    return re.sub(r"(?<=\d) (?=%|[smh]\b|min\b)|(?<=p) (?=< )|(?<=p <) ", "\N{NO-BREAK SPACE}", text)


def group_parts(section: Section) -> Iterator[tuple[str, Sequence[Any]]]:
    """Group neighbouring parts of one kind: figures in a grid, half-width charts and small tables in pairs."""
    for name, parts in groupby(section.parts, key=_classify_part):
        yield name, list(parts)


def _classify_part(part: Any) -> str:
    if isinstance(part, Chart):
        return "wide" if part.wide else "half"
    if isinstance(part, Table) and not part.folded and not part.values and len(part.header) <= 3:
        return "small"
    return type(part).__name__.lower()


def collect_filter_values(examples: Sequence[Example]) -> dict[str, list[str]]:
    """Collect the filters of examples: each tag in which they differ, with its values, the most frequent first."""
    names: dict[str, None] = {}
    for example in examples:
        names |= dict.fromkeys(("verdict", *example.tags))
    filters: dict[str, list[str]] = {}
    for name in names:
        counts = Counter(get_filter_value(example, name) for example in examples)
        if len(counts) > 1:
            filters[name] = [value for value, _ in counts.most_common()]
    return filters


def get_filter_value(example: Example, name: str) -> str:
    """Return an example's value of a filter, a tag or the verdict; "unknown" if it has none."""
    return example.verdict if name == "verdict" else example.tags.get(name, "unknown")


def choose_column_classes(table: Table) -> list[str]:
    """Choose the CSS class of each column: "num" if all cells are numbers, or any has a numeric sort key."""
    classes: list[str] = []
    for i in range(len(table.header)):
        has_keys = any(keys[i] is not None for keys in table.values)
        classes.append("num" if has_keys or are_numbers(row[i] for row in table.rows) else "")
    return classes
