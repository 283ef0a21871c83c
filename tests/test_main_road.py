"""The main road by the command line: a CSV, a recipe, a model, answers in a file and on a page."""

from __future__ import annotations

import csv
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from browser import browser, open_tab

TEXTS = {
    "Lieferung": ("Mein Paket {n} ist noch nicht da", "Wo bleibt die Sendung {n}?\nDer Kurier kam nie, trotz Termin"),
    "Rechnung": (
        'Die Rechnung {n} über "Zubehör" ist falsch',
        "Ich wurde für Rechnung {n} doppelt belastet; bitte prüfen",
    ),
    "Rückgabe": ("Ich möchte Artikel {n} zurückgeben", "Rücksendung {n}: Größe passt nicht\n\nGrüße, Jörg"),
}
COLUMNS: tuple[str, ...] = ("ticket_id", "channel", "subject", "body", "category")
COMMAND = (sys.executable, "-m", "fivetune")


def write_tickets(path: Path, *, delimiter: str = ",") -> list[dict[str, str]]:
    """600 tickets: 24 of them sent twice, three labels misspelt."""
    draw = random.Random(5)
    rows: list[dict[str, str]] = []
    for number in range(600):
        label = draw.choice(list(TEXTS))
        body = draw.choice(TEXTS[label]).format(n=draw.randrange(10_000, 99_999))
        values = (f"T-{number:05d}", draw.choice(("mail", "chat")), f"Anfrage {number % 9}", body, label)
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    for row in draw.sample(rows, 24):
        sent = draw.choice(rows)
        row |= {name: sent[name] for name in ("subject", "body", "category")}
    for row, label in zip(draw.sample(rows, 3), ("Lieferng", "rechnung", "Rueckgabe"), strict=True):
        row["category"] = label
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return rows


def run(folder: Path, *words: str) -> str:
    """Run a command in a folder; what it prints."""
    done = subprocess.run([*COMMAND, *words], cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextmanager
def serving(folder: Path, run_dir: str) -> Iterator[str]:
    """Serve a run; the address of its page."""
    command = [*COMMAND, "serve", run_dir, "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        assert server.stdout
        page = next((found for line in server.stdout if (found := re.match(r"page: (\S+)", line))), None)
        try:
            assert page, "the server has ended"
            yield page[1]
        finally:
            server.terminate()
        assert server.wait(60) == 0


@browser
@pytest.mark.slow
@pytest.mark.release
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_from_a_csv_to_an_answer_on_a_page(tmp_path: Path, delimiter: str) -> None:
    rows = write_tickets(tmp_path / "tickets.csv", delimiter=delimiter)
    printed = run(tmp_path, "new", "tickets.csv", "--model", "t5-nano")
    assert "task    classification: category has" in printed and re.search(r"sets +\d+ train, 60 validation", printed)
    for found, meant in (("Lieferng", "Lieferung"), ("Rueckgabe", "Rückgabe")):
        assert f"'{found}' (1) for '{meant}'" in printed
    recipe = yaml.safe_load((tmp_path / "tickets.yaml").read_text(encoding="utf-8"))
    assert recipe["task"] == {
        "name": "classification",
        "inputs": "subject: {subject} body: {body}",
        "label": "category",
    }

    train, evaluate = (shlex.split(line)[1:] for line in re.findall(r"^next +(.+)$", printed, re.MULTILINE))
    assert "report  runs/tickets/report.html" in run(tmp_path, *train)
    scores = run(tmp_path, *evaluate)
    accuracy = re.search(r"accuracy +([\d.]+)", scores)
    assert accuracy and float(accuracy[1]) > 90, scores

    run(tmp_path, "predict", "runs/tickets", "--input", "tickets.csv", "--output", "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        answers = list(csv.DictReader(file))
    assert [{name: one[name] for name in COLUMNS} for one in answers] == rows
    assert sum(one["prediction"] == one["category"] for one in answers) > 0.9 * len(rows)
    assert all(0 < float(one["confidence"]) <= 1 for one in answers)

    with serving(tmp_path, "runs/tickets") as page, open_tab(tmp_path / "browser") as tab:
        tab.open(page)
        tab.wait("document.querySelector('[name=subject]')")
        for name, text in {"subject": "Anfrage", "body": "Mein Paket 12345 ist noch nicht da"}.items():
            tab.run(f"document.querySelector('[name={name}]').focus()")
            tab.type(text)
        tab.press("Enter", ctrl=True)
        tab.wait("document.querySelector('#answers .answer')")
        assert "Lieferung" in tab.read("#answers .answer")
        assert tab.run("document.querySelectorAll('#right button').length") > 0 and tab.errors == []
