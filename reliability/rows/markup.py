"""Hostile texts in data, predictions, names, settings and errors: what pages, cards and terminals make of them."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from reliability.campaign import Row, Trial
from reliability.payloads import HARMLESS, PAYLOADS, find_foreign, find_hidden
from reliability.requests import start_server
from reliability.rows.kills import FEW_STEPS
from reliability.warm import check_no_trace, check_success, run_command
from reliability.workload import OnceEach, Workload

TEXTS_PER_TRIAL = 25
Pages = dict[str, str]


def show_hostile_texts(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Write 25 payloads at a time into every text of a run, and show the run in every way."""
    usual = OnceEach[Pages]()

    def show_harmless() -> Pages:
        return show_texts(workload, workload.make_folder("harmless"), HARMLESS[:TEXTS_PER_TRIAL])

    order = random.sample(PAYLOADS, len(PAYLOADS))
    for first in range(0, len(order), TEXTS_PER_TRIAL):

        def run(folder: Path, texts: Sequence[str] = tuple(order[first : first + TEXTS_PER_TRIAL])) -> None:
            pages, harmless = show_texts(workload, folder, texts), usual.get("harmless", show_harmless)
            wrong = {name: found for name in pages if (found := judge_page(name, pages[name], harmless[name]))}
            assert not wrong, f"{wrong}"

        yield Trial(f"payloads {first + 1} to {first + TEXTS_PER_TRIAL}", run)


def judge_page(name: str, page: str, harmless: str) -> list[str]:
    """What a payload has done to a page, the card, or the text of a terminal."""
    if name.startswith("terminal"):
        return find_hidden(page)
    if name == "card":
        return find_foreign(render_markdown(page), render_markdown(harmless))
    return find_foreign(page, harmless)


def show_texts(workload: Workload, folder: Path, texts: Sequence[str]) -> Pages:
    """Report, comparison, card, table, terminal and server's pages of a run that has these texts everywhere."""
    run = plant_texts(workload, folder, texts)
    pages = {"report": _read_after(run_command("report", str(run)), run / "report.html")}
    compared = folder / "comparison.html"
    done = run_command("compare", str(run), str(workload.run_undisturbed(**FEW_STEPS).run), "--output", str(compared))
    pages["comparison"] = _read_after(done, compared)
    pages["card"] = _read_after(run_command("card", str(run)), run / "model" / "README.md")
    shown = [
        done,
        run_command("diagnose", str(run)),
        run_command("predict", str(run), "--input", str(folder / "dev.json")),
    ]
    shown += [
        run_command("train", str(folder / "recipe.yaml"), f"--report.{_make_word(text)}", text) for text in texts[:3]
    ]
    shown += [run_command("evaluate", str(folder / _make_name(text))) for text in texts[:3]]
    for number, one in enumerate(shown):
        pages[f"terminal {number}"] = one.stdout + one.stderr
        check_no_trace(one.stderr)
    check_table(run, folder, texts)
    pages |= read_served_pages(run)
    return pages


def plant_texts(workload: Workload, folder: Path, texts: Sequence[str]) -> Path:
    """A finished run with these texts as questions, predictions, names, settings, warnings and reasons."""
    run = folder / _make_name(texts[0])
    shutil.copytree(workload.run_undisturbed(**FEW_STEPS).run, run, symlinks=True)
    (run / "model" / "README.md").unlink()
    joined = " ".join(texts)
    paragraphs = [
        {
            "context": text,
            "qas": [{"id": f"{number} {text}", "question": text, "answers": [{"text": text, "answer_start": 0}]}],
        }
        for number, text in enumerate(_without_nul(texts))
    ]
    (folder / "dev.json").write_text(json.dumps({"data": [{"title": joined, "paragraphs": paragraphs}]}))
    lines = [json.loads(line) for line in (run / "predictions" / "eval-2.jsonl").read_text().splitlines()]
    planted = [
        {
            **lines[number % len(lines)],
            "id": f"{number} {text}",
            "inputs": f"question: {text} context: {text}",
            "prediction": text,
            "references": [text, "other"],
            "meta": {"question": text, "title": text, "answerable": True},
        }
        for number, text in enumerate(texts)
    ]
    for file in (run / "predictions").iterdir():
        file.write_text("".join(json.dumps(line) + "\n" for line in planted))
    skips = [{"where": f"{text}:1", "reason": text} for text in texts]

    def change_data(table: dict[str, Any]) -> None:
        for part in table.values():
            part |= {"skips": skips, "num_skipped": len(skips), "num_skipped_bad": len(skips), "source": list(texts)}

    def change_machine(table: dict[str, Any]) -> None:
        table |= {"command": joined, "working_directory": joined, "precision_why": joined}
        table["device"]["name"] = table["host"]["cpu"] = table["host"]["os"] = joined

    _change(run / "data.json", change_data)
    _change(run / "machine.json", change_machine)
    _change(run / "status.json", lambda table: table.update(why=joined, warnings=list(texts)))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["report"]["title"] = joined
    config["model"]["path"] = joined
    config["data"] |= {"train": list(_without_nul(texts)), "eval": [str(folder / "dev.json")]}
    (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    with (run / "log.txt").open("a") as file:
        file.write(joined)
    return run


def check_table(run: Path, folder: Path, texts: Sequence[str]) -> None:
    """A table of predictions has the texts of its input back, each in its cell."""
    source, target = folder / "asked.csv", folder / "answered.csv"
    rows = [
        ("id", "question", "context"),
        *((str(number), text, text) for number, text in enumerate(_without_nul(texts))),
    ]
    with source.open("w", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    done = run_command("predict", str(run), "--input", str(source), "--output", str(target))
    check_success(done)
    with target.open(newline="") as file:
        found = [tuple(row[:3]) for row in csv.reader(file)]
    assert found == rows, "the cells of the table are not those of the input"


def read_served_pages(run: Path) -> Pages:
    """The pages of the server, and its answers, which are JSON."""
    with start_server(run) as (_, port):
        pages: Pages = {}
        for path in ("/", "/docs", "/demo.json", "/openapi.json", "/v1/models", "/metrics"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
                kind, text = answer.headers["Content-Type"], answer.read().decode()
            if kind.startswith("text/html"):
                pages[f"server {path}"] = text
            else:
                assert "json" in kind or kind.startswith("text/plain"), f"{path} is sent as {kind}"
    return pages


def render_markdown(text: str) -> str:
    """HTML of a card as a viewer that lets HTML through makes it; metadata and mark are left out."""
    from markdown_it import MarkdownIt

    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    return MarkdownIt("commonmark", {"html": True}).enable("table").render(body)


def _without_nul(texts: Sequence[str]) -> list[str]:
    return [text.replace("\0", "") for text in texts]


def _make_name(text: str) -> str:
    """The text as the name of a file."""
    return re.sub("[/\0]", "_", text)[:80] or "x"


def _make_word(text: str) -> str:
    return re.sub(r"\s|=", "_", text)


def _read_after(done: CompletedProcess[str], path: Path) -> str:
    check_success(done)
    return path.read_text(encoding="utf-8")


def _change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


ROWS = [
    Row("R24", "25 of 200 payloads as question, context, answer, prediction, name, setting, warning, file and error",
        "report, comparison, card and the server's pages have no foreign element, handler or address, the terminal no "
        "control character; a table gives each cell back", show_hostile_texts, 2, 8),
]  # fmt: skip
