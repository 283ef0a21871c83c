"""Pages in headless Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from fivetune.report.page.parts import Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


Kind = TypeVar("Kind")


def part(page: Page, section: str, kind: type[Kind], at: int = 0) -> Kind:
    """The at-th part of a kind in a section."""
    found = next(s for s in page.sections if s.title == section)
    return [p for p in found.parts if isinstance(p, kind)][at]


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page: the DOM, its console lines, the requests that the page itself started."""

    dom: str
    console: list[str]
    requests: list[str]


def visit(html: str, folder: Path) -> Visit:
    """Open a page in headless Chromium. Requests without an initiator are the browser's own and left out."""
    folder.mkdir(exist_ok=True)
    (folder / "page.html").write_text(html, encoding="utf-8")
    quiet = (
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        *(f"--{flag}" for flag in quiet),
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--log-net-log={folder / 'net.json'}",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=20000",
    ]
    command = [str(CHROMIUM), *flags, "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    log = json.loads((folder / "net.json").read_text(encoding="utf-8"))
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in log["events"] if event["type"] == start]
    requests = [
        p["url"] for p in started if p.get("url", "").startswith("http") and p.get("initiator") != "not an origin"
    ]
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], requests)


browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on this machine (Debian: apt install chromium)"
)
