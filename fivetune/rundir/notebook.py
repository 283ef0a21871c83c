"""Output in a notebook: one display that is updated in place, and HTML pages in a frame.

In: lines of text, or an HTML file. Out: displays of Jupyter, Colab and VS Code. IPython is never imported here: where
there is a notebook, its kernel has imported it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

MAX_LINES = 12  # that a panel shows above its live line
SECONDS_BETWEEN_UPDATES = 0.25
SECONDS_BEFORE_PROGRESS = 1.0  # what takes less shows no live line
FRAME_HEIGHT = 720  # pixels
FRAME_STYLE = "border: 1px solid #8884; box-sizing: border-box"
STYLE = "white-space: pre-wrap; font-family: monospace"


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which shows HTML; false in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def prepare_imports() -> None:
    """Import tqdm, by which the hub's client shows downloads, without its warning of a notebook without ipywidgets."""
    if is_notebook() and "tqdm.auto" not in sys.modules:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module("tqdm.auto")


class Panel:
    """A display of a cell with the last lines of a log and one live line, updated in place.

    Args:
        log: the file that holds all lines; None if there is none.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._log = log
        self._lines: list[tuple[str, bool]] = []
        self._live = ""
        self._handle: Any = None
        self._shown_at = time.monotonic() + SECONDS_BEFORE_PROGRESS - SECONDS_BETWEEN_UPDATES

    def add_line(self, text: str, *, is_important: bool = False) -> None:
        """Add a line; of more than MAX_LINES lines, the oldest unimportant line is no longer shown."""
        self._lines.append((text, is_important))
        self.update()

    def show_live(self, text: str) -> None:
        """Replace the live line; at most every SECONDS_BETWEEN_UPDATES the display changes."""
        self._live = text
        if time.monotonic() - self._shown_at > SECONDS_BETWEEN_UPDATES:
            self.update()

    def close(self) -> None:
        """Remove the live line; the lines above it stay in the cell. Without any, the live line stays as the result."""
        if self._handle is not None:
            self._live = "" if self._lines else self._live
            self.update()

    def update(self) -> None:
        """Write the present content to the display."""
        self._shown_at = time.monotonic()
        lines = [*select_lines(self._lines, self._log), *([self._live] if self._live else [])]
        text = "\n".join(lines)
        content = {"text/plain": text, "text/html": f'<pre style="{STYLE}">{escape(text)}</pre>'}
        if self._handle is None:
            from IPython.display import display  # pyright: ignore[reportMissingImports, reportUnknownVariableType]

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


def select_lines(lines: Sequence[tuple[str, bool]], log: Path | None, *, most: int = MAX_LINES) -> list[str]:
    """Select at most `most` lines, the important ones first, then the latest; a first line counts the omitted ones.

    >>> select_lines([("a", False), ("warning: b", True), ("c", False), ("d", False)], Path("log.txt"), most=3)
    ['(1 earlier line in log.txt)', 'warning: b', 'c', 'd']
    """
    order = sorted(range(len(lines)), key=lambda index: (lines[index][1], index))
    kept = set(order[-most:])
    num = len(lines) - len(kept)
    shown = [text for index, (text, _) in enumerate(lines) if index in kept]
    if num:
        where = f" in {log}" if log else ""
        shown.insert(0, f"({num} earlier line{'s' if num > 1 else ''}{where})")
    return shown


@dataclass(frozen=True, slots=True, repr=False)
class HtmlPage:
    """A self-contained HTML file, shown by a notebook in its own frame: the styles of page and notebook stay apart.

    Args:
        path: of the file; `str(page)` too.
    """

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"HtmlPage({str(self.path)!r})"

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """Return the page as an iframe with all of its content, which needs no file and no server."""
        content = escape(self.path.read_text(encoding="utf-8"), quote=True)
        return (
            f'<iframe srcdoc="{content}" title="{escape(str(self.path), quote=True)}" width="100%" '
            f'height="{FRAME_HEIGHT}" sandbox="allow-scripts allow-downloads" style="{FRAME_STYLE}"></iframe>'
        )
