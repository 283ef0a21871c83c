"""Page -> HTML: one self-contained file that runs no script but its own and asks the network for nothing.

In: a Page, or a run directory. Out: HTML text, or the file report.html.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fivetune.errors import FiveTuneError
from fivetune.report.pages import build_page
from fivetune.report.wording import UNKNOWN, visible
from fivetune.rundir import read, write_text
from fivetune.types import Chart, Example, Page, Run, Section, Table
from fivetune.values import dig

_NUMERIC = re.compile(r"[\u2212+-]?[\d,.]+(e[+-]?\d+)?( %| s| to [\d.]+| \([\d.,]+ %\))?")


def write_report(folder: str | Path, *, output: str | Path | None = None) -> Path:
    """Build report.html of a run directory; the file is there whole or not at all.

    Args:
        output: another place for the file.
    """
    folder = Path(folder)
    run = read(folder)
    beside, notes = read_beside(folder, run)
    path = Path(output) if output else folder / "report.html"
    write_text(path, render(build_page(run, beside=beside, notes=notes)))
    return path


def read_beside(folder: Path, run: Run) -> tuple[list[Run], list[str]]:
    """The runs that `report.beside` names, and a note for each one that cannot be read.

    A relative path is looked for from the working directory, from the run, and among the run's neighbours:
    a moved folder of runs still finds its own.
    """
    found, notes = [], []
    for name in dig(run.config, "report", "beside") or ():
        places = (Path(name), folder / name, folder.resolve().parent / Path(name).name)
        place = next((place for place in places if place.is_dir()), places[0])
        try:
            found.append(read(place))
        except FiveTuneError as error:
            notes.append(f"report.beside: {name} is left out. {error}")
    return found, notes


def render(page: Page) -> str:
    """The page as HTML text. Whatever comes from data is escaped, hidden characters are made visible."""
    scripts = (_plotly_script(), _own_script())
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_fingerprint, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    environment = _environment()
    style = environment.get_template("style.css").render()
    return environment.get_template("page.html").render(
        page=page, policy=policy, scripts=[Markup(script) for script in scripts], style=Markup(style)
    )


def _fingerprint(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


@cache
def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    assert "</script" not in script.lower() and "<!--" not in script and "\r" not in script, (
        "cannot be inlined as it is"
    )
    return script


def _own_script() -> str:
    return _environment().get_template("page.js").render()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fivetune.report"),
        autoescape=lambda name: name is not None and name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters |= {
        "blocks": blocks, "figure_json": figure_json, "slug": slug, "align": align, "unbroken": unbroken,
        "choices": choices, "chosen_by": chosen_by,
    }  # fmt: skip
    return environment


def slug(title: str) -> str:
    """An anchor for a title: "Key figures" -> key-figures."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def unbroken(text: str) -> str:
    """Numbers stay on the line of their units."""
    return re.sub(r"(?<=\d) (?=(?:%|[smh]|min)\b)", "\N{NO-BREAK SPACE}", text)


def blocks(section: Section) -> Iterator[tuple[str, Sequence[Any]]]:
    """Neighbouring parts of one kind together: tiles in a grid, half-width charts and small tables in pairs."""
    for name, parts in groupby(section.parts, key=_kind):
        yield name, list(parts)


def _kind(part: Any) -> str:
    if isinstance(part, Chart):
        return "wide" if part.wide else "half"
    if isinstance(part, Table) and not part.folded and not part.values and len(part.header) <= 3:
        return "small"
    return type(part).__name__.lower()


def choices(examples: Sequence[Example]) -> dict[str, list[str]]:
    """What examples can be chosen by: each tag in which they differ, with its values, the most frequent first."""
    names = dict.fromkeys(name for example in examples for name in ("verdict", *example.tags))
    found = {name: Counter(chosen_by(example, name) for example in examples) for name in names}
    return {name: [value for value, _ in counts.most_common()] for name, counts in found.items() if len(counts) > 1}


def chosen_by(example: Example, name: str) -> str:
    """The value of one of `choices`: an example's tag or its verdict, "unknown" if it has none."""
    return example.verdict if name == "verdict" else example.tags.get(name, "unknown")


def align(table: Table) -> list[str]:
    """CSS class of each column: "num" where all cells are numbers, or some sort by one."""
    columns = zip(*table.rows, strict=True) if table.rows else ((),) * len(table.header)
    valued = zip(*table.values, strict=True) if table.values else ((),) * len(table.header)
    return [
        "num" if any(value is not None for value in values) or _all_numbers(cells) else ""
        for cells, values in zip(columns, valued, strict=True)
    ]


def _all_numbers(cells: Sequence[str]) -> bool:
    given = [cell for cell in cells if cell not in (UNKNOWN, "")]
    return bool(given) and all(_NUMERIC.fullmatch(cell) for cell in given)


def figure_json(chart: Chart) -> Markup:
    """A chart as JSON that is safe inside a script element: no "<", ">" or "&" is left in it."""
    text = json.dumps({"data": chart.data, "layout": chart.layout}, ensure_ascii=True, allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
