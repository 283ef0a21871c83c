"""Time until a page can be used, in headless Chromium: python -m benchmarks.pages PAGE.html ...

In: HTML files. Out: a row for each: size, first text on the screen, time until the page answers at once, memory; with
`--picture`, the first screen of the first page as PNG instead.
A page answers at once when six timers of 50 ms in a row are late by less than 30 ms; their time is taken off.
"""

from __future__ import annotations

import base64
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.harness import make_parser, table
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
    parser = make_parser(__doc__, results=None)
    parser.add_argument("pages", nargs="+", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--turns", type=int, default=3, help="the median of these is printed")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--height", type=int, default=1000)
    args = parser.parse_args()
    if args.picture:
        args.picture.write_bytes(take_picture(args.pages[0], args.width, args.height))
        return
    rows: list[tuple[str, ...]] = [COLUMNS]
    found: list[dict[str, str | float]] = []
    for page in args.pages:
        turns = [measure(page, args.width) for _ in range(args.turns)]
        medians = [statistics.median(numbers) for numbers in zip(*turns, strict=True)]
        found.append(dict(zip(COLUMNS, (page.name, *medians), strict=True)))
        rows.append((page.name, *(f"{number:.2f}" for number in medians[:-1]), f"{medians[-1]:.0f}"))
    print(table(rows))
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
