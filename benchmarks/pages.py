"""Time until a page can be used, in headless Chromium: python -m benchmarks.pages PAGE.html ...

In: HTML files. Out: a row for each: size, first text on the screen, time until the page answers at once, memory; with
`--picture`, the first screen of the first page as PNG instead.
A page answers at once when six timers of 50 ms in a row are late by less than 30 ms; their time is taken off.
"""

from __future__ import annotations

import argparse
import base64
import statistics
import tempfile
from pathlib import Path

from reliability.chromium import open_tab

ANSWERS = """new Promise((done) => {
  let inTime = 0, before = performance.now();
  const next = () => {
    const now = performance.now();
    inTime = now - before < 80 ? inTime + 1 : 0;
    before = now;
    if (inTime === 6) done(now - 300);
    else setTimeout(next, 50);
  };
  setTimeout(next, 50);
})"""
COLUMNS = ("page", "MB", "first text (s)", "answers (s)", "script (s)", "heap (MB)", "elements")


def measure(page: Path, width: int) -> list[float]:
    """Open a page in a new browser; returns the numbers of COLUMNS."""
    with tempfile.TemporaryDirectory() as folder, open_tab(Path(folder)) as tab:
        tab.call("Performance.enable")
        tab.set_width(width)
        tab.open(page.resolve().as_uri())
        answers = tab.run(ANSWERS) / 1000
        text = tab.run("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
        found = {one["name"]: one["value"] for one in tab.call("Performance.getMetrics")["metrics"]}
        num = tab.run("document.querySelectorAll('*').length")
    return [page.stat().st_size / 1e6, text, answers, found["ScriptDuration"], found["JSHeapUsedSize"] / 1e6, num]


def take_picture(page: Path, width: int, height: int) -> bytes:
    """Return the first screen of a page as PNG."""
    with tempfile.TemporaryDirectory() as folder, open_tab(Path(folder)) as tab:
        tab.set_width(width, height)
        tab.call("Emulation.setScrollbarsHidden", hidden=True)
        tab.open(page.resolve().as_uri())
        tab.run(ANSWERS)
        return base64.b64decode(tab.call("Page.captureScreenshot")["data"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--turns", type=int, default=3, help="the median of these is printed")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--height", type=int, default=1000)
    options = parser.parse_args()
    if options.picture:
        options.picture.write_bytes(take_picture(options.pages[0], options.width, options.height))
        return
    print(" | ".join(COLUMNS))
    for page in options.pages:
        turns = [measure(page, options.width) for _ in range(options.turns)]
        cells = [f"{statistics.median(numbers):.2f}" for numbers in zip(*turns, strict=True)]
        print(" | ".join((page.name, *cells[:-1], str(int(turns[0][-1])))))


if __name__ == "__main__":
    main()
