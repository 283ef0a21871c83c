"""Hostile texts in pages that a browser opens."""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from reliability.campaign import Row, Trial
from reliability.chromium import CHROMIUM, open_tab, visit
from reliability.payloads import PAYLOADS
from reliability.requests import start_server
from reliability.rows.kills import FEW_STEPS
from reliability.rows.markup import TEXTS_PER_RUN, show_texts
from reliability.workload import OnceEach, Workload

PAGES = ("report", "comparison", "inspection", "search", "server /docs")


def explain_absence() -> str:
    return "" if CHROMIUM else "chromium is not installed"


def open_hostile_pages(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A trial for each page of 25 payloads; the first shows that a payload which is not escaped is noticed."""
    shown = OnceEach[dict[str, str]]()
    yield Trial("noticed: a page that does not escape", check_notice)
    yield Trial("the server's page answers 200 payloads", lambda folder: ask_demo(workload, folder))
    order = random.sample(PAYLOADS, len(PAYLOADS))
    for first in range(0, len(order), TEXTS_PER_RUN):
        for name in PAGES:

            def run(folder: Path, first: int = first, name: str = name) -> None:
                def show() -> dict[str, str]:
                    texts = order[first : first + TEXTS_PER_RUN]
                    return show_texts(workload, workload.make_folder(f"opened-{first}"), texts)

                check_visit(shown.get(str(first), show)[name], folder)

            yield Trial(f"{name} of payloads {first + 1} to {first + TEXTS_PER_RUN}", run)


def check_visit(page: str, folder: Path) -> None:
    """No script of a payload runs or is blocked, nothing is asked for, and the title is that of the page."""
    found = visit(page, folder / "visit")
    assert not found.console, f"{found.console[:3]}"
    assert not found.requests, f"asks for {found.requests}"
    assert read_title(found.dom) == read_title(page), f"the title became {read_title(found.dom)!r}"


def ask_demo(workload: Workload, folder: Path) -> None:
    """All payloads are typed into the server's page, which shows each answer as text and asks this server alone."""
    run = workload.run_undisturbed(**FEW_STEPS).run
    with start_server(run) as (_, port), open_tab(folder) as tab:
        address = f"http://127.0.0.1:{port}/"
        tab.open(address)
        tab.wait("document.querySelector('[name=question]')")
        title, plain = tab.run("document.title"), set[str]()
        for text in ("a harmless question", *PAYLOADS):
            tab.run("document.getElementById('answers').replaceChildren()")
            for name in ("question", "context"):
                tab.run(f"document.querySelector('[name={name}]').value = {json.dumps(text)}")
            tab.run("document.getElementById('ask').requestSubmit()")
            tab.wait("document.querySelector('#answers .answer')")
            tags = set(tab.run("[...document.querySelectorAll('#answers *')].map(one => one.tagName)"))
            plain = plain or tags
            assert tags == plain, f"{text!r} makes {tags ^ plain}"
        assert not tab.errors, f"{tab.errors[:3]}"
        assert all(one.startswith(address) for one in tab.requests), f"{set(tab.requests)}"
        assert tab.run("document.title") == title


def check_notice(folder: Path) -> None:
    for number, text in enumerate(("<img src=x onerror=pwn()>", "<img src=http://evil.invalid/a.png>")):
        (folder / str(number)).mkdir()
        try:
            check_visit(f"<title>a</title>{text}", folder / str(number))
        except AssertionError:
            continue
        raise AssertionError(f"{text} was not noticed")


def read_title(page: str) -> str:
    found = re.search(r"<title>(.*?)</title>", page, re.DOTALL)
    return " ".join(html.unescape(found[1]).split()) if found else ""


ROWS = [
    Row("R24b", "pages of R24 are opened in Chromium: report, comparison, inspection, search, the server's /docs",
        "no script of a payload runs or is blocked, no page asks for an address, the title stays",
        open_hostile_pages, 0, 42, explain_absence=explain_absence),
]  # fmt: skip
