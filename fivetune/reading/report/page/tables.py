"""The results of a page as a table for a paper: CSV, Markdown, or LaTeX with booktabs.

In: the Results of a page. Out: one file. Markdown and LaTeX print numbers as the page does; CSV has the numbers
themselves, with a column each for the ends of an interval and for the mark.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import wrap

from fivetune.reading.card.facts import escape_markdown
from fivetune.reading.report.page.parts import Measured, Results
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.rundir import write_text
from fivetune.values import are_numbers

HEADING_CHARS, NAME_CHARS = 13, 24  # of a line in a cell
SUFFIXES = (".csv", ".md", ".tex")
LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", "\n": " ", "\u00a0": "~", "\u00b0": r"\textdegree{}",
    "\u00b7": r"\textperiodcentered{}", "\u00d7": r"\texttimes{}", "\u2020": r"\textdagger{}", "\u2212": r"$-$",
    "\u201c": "``", "\u201d": "''",
}  # fmt: skip
"""Characters that LaTeX reads as commands, and characters that pdfLaTeX does not set by itself."""


def write_results(results: Results, path: Path) -> None:
    """Write the table to a file in the format of its suffix, one of SUFFIXES. Raises RunDirError if it cannot."""
    build = {".csv": build_csv, ".md": build_markdown, ".tex": build_latex}[path.suffix.lower()]
    write_text(path, build(results))


def build_csv(results: Results) -> str:
    """Build CSV of the table's numbers; a column with intervals is followed by their ends, one with marks by these."""
    columns: list[list[str]] = []
    for place, name in enumerate(results.header):
        cells = [row[place] for row in results.rows]
        unit = f" ({results.units[name]})" if name in results.units else ""
        columns.append([name + unit, *map(_format_value, cells)])
        numbers = list(map(_as_measured, cells))
        if any(one.interval for one in numbers):
            for end, words in enumerate(("low", "high")):
                column = [f"{name} {words}{unit}"]
                for one in numbers:
                    column.append(format_number(one.interval[end]) if one.interval else "")
                columns.append(column)
        if any(one.mark for one in numbers):
            columns.append([f"{name} mark", *(results.marks.get(one.mark, one.mark) for one in numbers)])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue()


def _as_measured(cell: str | Measured) -> Measured:
    """Return a text as a cell without a number."""
    return Measured(cell) if isinstance(cell, str) else cell


def _format_value(cell: str | Measured) -> str:
    if isinstance(cell, Measured):
        return "" if cell.value is None else format_number(cell.value)
    return escape_hidden(" ".join(cell.split()))


def format_number(value: float) -> str:
    """Format a number for other programs, without the noise of its last bits.

    >>> format_number(86.54999999999998), format_number(300.0)
    ('86.55', '300')
    """
    return f"{value:.10g}"


def build_markdown(results: Results) -> str:
    """Build a table of GitHub's Markdown under its caption, and under the paragraph on methods."""
    results = drop_named_columns(results)
    lines = [escape_markdown(results.methods), ""] if results.methods else []
    lines += [escape_markdown(build_caption(results)), ""]
    lines.append(_join_cells(map(escape_markdown, results.header)))
    lines.append(_join_cells("---:" if is_number else "---" for is_number in _find_number_columns(results)))
    for row in results.rows:
        cells: list[str] = []
        for cell in row:
            one = _as_measured(cell)
            ends = f" ({one.ends})" if one.ends else ""
            cells.append(escape_markdown(f"{one.text}{one.mark}{ends}"))
        lines.append(_join_cells(cells))
    return "\n".join(lines) + "\n"


def _join_cells(cells: Iterator[str] | Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def build_latex(results: Results) -> str:
    r"""Build a LaTeX table with the rules of booktabs; text is escaped, so that `50 %` is `50 \%`."""
    results = drop_named_columns(results)
    columns = "".join("r" if is_number else "l" for is_number in _find_number_columns(results))
    lines = ["% \\usepackage{booktabs,graphicx}; names in other scripts than Latin need XeLaTeX or LuaLaTeX"]
    if results.methods:
        lines += [escape_latex(results.methods), ""]
    lines += [
        r"\begin{table}",
        r"  \centering\footnotesize\setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{escape_latex(build_caption(results))}}}",
        "  % A table that is wider than the text is made smaller.",
        r"  \resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        rf"    {' & '.join(_stack_words(name, HEADING_CHARS) for name in results.header)} \\",
        r"    \midrule",
    ]
    for row in results.rows:
        cells: list[str] = []
        for cell in row:
            if isinstance(cell, str):
                cells.append(_stack_words(cell, NAME_CHARS))
                continue
            text = escape_latex(cell.text)
            if cell.mark:
                text += rf"\textsuperscript{{{escape_latex(cell.mark)}}}"
            if cell.ends:
                text = rf"\shortstack[r]{{{text}\\{{\tiny {escape_latex(cell.ends)}}}}}"
            cells.append(text)
        lines.append(rf"    {' & '.join(cells)} \\")
    lines += [r"    \bottomrule", r"  \end{tabular}}", r"\end{table}"]
    return "\n".join(lines) + "\n"


def drop_named_columns(results: Results) -> Results:
    """Drop the columns of settings whose values the rows' names have.

    >>> drop_named_columns(Results("", ("variant", "optimizer.lr"), [["lr=0.1", "0.1"], ["lr=0.2", "0.2"]])).header
    ('variant',)
    """
    kept: list[int] = []
    for place in range(len(results.header)):
        is_named = bool(place and results.rows)
        for row in results.rows:
            is_named &= isinstance(row[place], str) and f"={row[place]}" in _as_measured(row[0]).text
        if not is_named:
            kept.append(place)
    header = tuple(results.header[place] for place in kept)
    return replace(results, header=header, rows=[[row[place] for place in kept] for row in results.rows])


def _stack_words(text: str, width: int) -> str:
    """Break a text into lines of at most `width` characters, one above the other, so that its column is narrow."""
    lines = list(map(escape_latex, wrap(text, width, break_long_words=False)))
    words = r"\\".join(lines)
    return rf"\shortstack[l]{{{words}}}" if len(lines) > 1 else words


def escape_latex(text: str) -> str:
    r"""Escape a text for LaTeX.

    >>> escape_latex("f1_best \u2212 50 % & <b>")
    'f1\\_best $-$ 50 \\% \\& \\textless{}b\\textgreater{}'
    """
    return escape_hidden(text).translate(str.maketrans(LATEX))


def build_caption(results: Results) -> str:
    """Build the caption with the meaning of each mark that the table has."""
    used: set[str] = set()
    for row in results.rows:
        used.update(cell.mark for cell in row if isinstance(cell, Measured))
    notes = [f" {mark} {meaning}." for mark, meaning in results.marks.items() if mark in used]
    return results.caption + "".join(notes)


def _find_number_columns(results: Results) -> list[bool]:
    """Find the columns of numbers, which are set to the right."""
    found: list[bool] = []
    for place in range(len(results.header)):
        cells = [row[place] for row in results.rows]
        texts = [cell for cell in cells if isinstance(cell, str)]
        found.append(len(texts) < len(cells) or are_numbers(texts))
    return found
