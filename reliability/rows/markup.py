"""Hostile texts in data, predictions, names, settings and errors: what pages, cards and terminals make of them."""

from __future__ import annotations

import csv
import html
import io
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.search import build_search_page
from fivetune.types import Search
from fivetune.types import Trial as SearchTrial
from reliability.campaign import Row, Trial
from reliability.payloads import HARMLESS, PAYLOADS, find_foreign, find_hidden, get_mark
from reliability.requests import start_server
from reliability.rows.kills import FEW_STEPS
from reliability.warm import WarmProcess, check_success, run_command
from reliability.workload import OnceEach, Workload

TEXTS_PER_RUN = 25
PLANTED = "planted.json"  # a file of questions that are these texts
NAMES = "runs"  # a folder of runs, of which each has a text as its name
LAUNCHERS = {
    "slurm": (),
    "kubernetes": ("--image", "i", "--volume", "v"),
    "skypilot": ("--image", "i", "--bucket", "s3://b"),
}
PREFIX = 20  # characters of a run's name that `fivetune watch` shows at least
SHOW_ALL = (
    "report", "comparison", "inspection", "search", "card",
    *(f"terminal of {command}" for command in ("compare", "inspect", "diagnose", "predict", "errors")),
)  # fmt: skip
SHOW_RUN = ("terminal of report", "terminal of card", "terminal of check", "server /docs")  # the name of a run
Pages = dict[str, str]


def show_hostile_texts(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """A trial for each payload; 25 of them share a run that has them in every text, and all ways to show it."""
    usual, shown = OnceEach[Pages](), OnceEach[dict[str, list[str]]]()
    order = random.sample(PAYLOADS, len(PAYLOADS))

    def show_harmless() -> Pages:
        return show_texts(workload, workload.make_folder("harmless"), HARMLESS[:TEXTS_PER_RUN])

    def judge(first: int) -> dict[str, list[str]]:
        """What is wrong, by the place that shows it."""
        texts = order[first : first + TEXTS_PER_RUN]
        try:
            harmless = usual.get("harmless", show_harmless)
            pages = show_texts(workload, workload.make_folder(f"hostile-{first}"), texts)
        except Exception as error:  # nothing was shown
            return {"set-up": [f"{type(error).__name__}: {error}"]}
        wrong = {name: found for name in pages if (found := judge_page(name, pages[name], harmless[name]))}
        return wrong | find_absent(pages, texts)

    for number, text in enumerate(order):

        def run(folder: Path, first: int = number - number % TEXTS_PER_RUN) -> None:
            wrong = shown.get(str(first), lambda: judge(first))
            assert not wrong, f"with payloads {first + 1} to {first + TEXTS_PER_RUN}: {wrong}"

        yield Trial(f"{number + 1}: {text!r}", run)


def find_absent(pages: Pages, texts: Sequence[str]) -> dict[str, list[str]]:
    """The texts that a page or a terminal should show and does not, by its name."""
    wrong: dict[str, list[str]] = {}
    for name in (*SHOW_ALL, *SHOW_RUN):
        page = html.unescape(pages[name])
        wrong[f"{name} lacks"] = [
            text for text in (texts if name in SHOW_ALL else texts[:1]) if get_mark(text) not in page
        ]
    starts = [_make_name(text)[:PREFIX] for text in texts]
    watched = "".join(pages["terminal of watch"].split())  # a table has spaces in place of a tab
    wrong["watch lacks"] = [one for one in starts if not find_hidden(one) and "".join(one.split()) not in watched]
    return {name: absent for name, absent in wrong.items() if absent}


def judge_page(name: str, page: str, harmless: str) -> list[str]:
    """What a payload has done to a page, the card, or the text of a terminal."""
    if name.startswith("terminal"):
        return find_hidden(page)
    if name == "card":
        return find_foreign(render_markdown(page), render_markdown(harmless))
    return find_foreign(page, harmless)


def show_texts(workload: Workload, folder: Path, texts: Sequence[str]) -> Pages:
    """Pages, card, table, terminal, jobs and answers of a run that has these texts everywhere."""
    run = plant_texts(workload, folder, texts)
    compared, inspected = folder / "comparison.html", folder / "inspection.html"
    named = sorted((folder / NAMES).iterdir())
    files = [str(path) for path in sorted((folder / "data").iterdir())]
    shown = {
        "report": run_command("report", str(run)),
        "compare": run_command("compare", *map(str, named), "--output", str(compared)),
        "inspect": run_command("inspect", *files, "--task", "squad_v2", "--html", str(inspected)),
        "watch": run_command("watch", str(folder / NAMES), "--once"),
        "diagnose": run_command("diagnose", str(run)),
        "predict": run_command("predict", str(run), "--input", str(folder / PLANTED)),
        "check": run_command("check", str(folder / "hostile.yaml")),
        "card": run_command("card", str(run)),
        "errors": show_each(folder, texts),
    }
    pages = {"search": render_search(texts)}
    for command, one in shown.items():
        check_success(one)
        assert "damaged" not in one.stderr, one.stderr[-600:]
        pages[f"terminal of {command}"] = one.stdout + one.stderr
    for name, path in (
        ("report", run / "report.html"), ("comparison", compared), ("inspection", inspected),
        ("card", run / "model" / "README.md"),
    ):  # fmt: skip
        pages[name] = path.read_text(encoding="utf-8")
    check_table(run, folder, texts)
    check_jobs(folder, texts)
    pages |= read_served_pages(run, texts)
    return pages


def render_search(texts: Sequence[str]) -> str:
    """The page of a study whose name, settings, reasons and runs are these texts."""
    trials = [
        SearchTrial(number, "failed" if number % 2 else "finished", {"model.path": text, "optimizer.lr": number / 1e3},
                    None if number % 2 else float(number), ((1, 1.0), (2, float(number))), 1.0, text, text)
        for number, text in enumerate(texts)
    ]  # fmt: skip
    found = Search(" ".join(texts), "f1", True, tuple(trials), trials[0], {"model.path": 0.5, "optimizer.lr": 0.5})
    return render_html(build_search_page(found))


def show_each(folder: Path, texts: Sequence[str]) -> CompletedProcess[str]:
    """Each text as the name of a setting, of a missing run, and as a title that is printed: errors and settings."""
    recipe = str(folder / "recipe.yaml")
    plan = [
        one
        for text in _without_nul(texts)
        for one in (
            (2, ["train", recipe, f"--report.{_make_word(text)}", text]),
            (4, ["evaluate", str(folder / "missing" / _make_name(text))]),
            (0, ["config", recipe, f"--report.title={text}"]),
        )
    ]
    done = WarmProcess(call_each, json.dumps(plan)).finish()
    check_success(done)
    return done


def call_each(plan: str) -> int:
    """Run commands one after the other; 1 at the first that has another exit code."""
    from fivetune.cli import main

    for code, words in json.loads(plan):
        found = main(words)
        if found != code:
            print(f"exit code {found}, not {code}: {words!r}", file=sys.stderr)
            return 1
    return 0


def check_jobs(folder: Path, texts: Sequence[str]) -> None:
    """The job of a run with such a name is refused, or has the name as one word of its script."""
    names = ["usual", *(_make_name(text) for text in _without_nul(texts))]
    for kind, options in LAUNCHERS.items():
        target = folder / f"{kind}.json"
        launch = ["launch", str(folder / "recipe.yaml"), "--dry-run", "--on", kind, *options]
        launch += ["--mount", str(folder)] if kind == "kubernetes" else []
        plan = [[*launch, f"--run.dir=runs/{name}"] for name in names]
        done = WarmProcess(record_each, str(target), json.dumps(plan)).finish()
        check_success(done)
        found = json.loads(target.read_text())
        assert found[0][0] == 0, f"{kind}: no job of a usual name: {done.stderr[-300:]}"
        for name, (code, job) in zip(names, found, strict=True):
            assert code in (0, 2), f"{kind}: exit code {code} of {name!r}: {done.stderr[-300:]}"
            if code == 0:
                check_job(list_scripts(job, kind), name, list_scripts(found[0][1], kind))


def record_each(target: str, plan: str) -> None:
    """Write exit code and output of each command."""
    from fivetune.cli import main

    found: list[tuple[int, str]] = []
    for words in json.loads(plan):
        with redirect_stdout(io.StringIO()) as printed:
            code = main(words)
        found.append((code, printed.getvalue()))
    Path(target).write_text(json.dumps(found))


def list_scripts(job: str, kind: str) -> list[str]:
    """The shell scripts of a job: all of it, or texts of its YAML."""
    if kind == "slurm":
        return [job]
    return [text for one in job.split("\n---\n") for text in iter_texts(yaml.safe_load(one)) if "fivetune" in text]


def check_job(scripts: list[str], name: str, usual: list[str]) -> None:
    """A word of the scripts has the name, which adds no other word to those of the job of a usual name."""
    words = [word for script in scripts for word in split_words(script)]
    assert any(name in word for word in words), f"no word of the job has {name!r}: {scripts}"
    num_usual = sum(len(split_words(script)) for script in usual)
    assert len(words) == num_usual, f"{name!r} is not quoted: {len(words)} words, {num_usual} are usual: {scripts}"
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{name!r}: {done.stderr}"


def split_words(script: str) -> list[str]:
    """The words and operators of a script, without its comments."""
    words = shlex.shlex(script, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    return list(words)


def iter_texts(value: Any) -> Iterator[str]:
    """All texts of a value of YAML."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from iter_texts(one)


def plant_texts(workload: Workload, folder: Path, texts: Sequence[str]) -> Path:
    """A finished run with these texts as questions, predictions, settings, warnings and reasons; one named by each."""
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
    (folder / PLANTED).write_text(json.dumps({"data": [{"title": joined, "paragraphs": paragraphs}]}))
    (folder / "data").mkdir()
    for text, paragraph in zip(texts, paragraphs, strict=True):
        table = {"data": [{"title": text, "paragraphs": [paragraph]}]}
        (folder / "data" / f"{_make_name(text)}.json").write_text(json.dumps(table))
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
    _change(run / "status.json", lambda table: table.update(why=joined, warnings=_make_warnings(texts)))
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["report"]["title"] = joined
    config["model"]["path"] = joined
    config["data"] |= {"train": list(_without_nul(texts)), "eval": [str(folder / PLANTED)]}
    (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
    with (run / "log.txt").open("a") as file:
        file.write(joined)
    plant_names(workload, folder, texts)
    return run


def plant_names(workload: Workload, folder: Path, texts: Sequence[str]) -> None:
    """Runs that are named by these texts and differ in a setting, and a recipe that has them."""
    recipe = workload.write_recipe(folder, **FEW_STEPS, run__dir=str(folder / "checked" / _make_name(texts[0])))
    table = yaml.safe_load(recipe.read_text())
    table["report"] = {"title": " ".join(texts)}
    table["data"]["train"] = [str(path) for path in sorted((folder / "data").iterdir())]
    (folder / "hostile.yaml").write_text(yaml.safe_dump(table, allow_unicode=True))
    for number, text in enumerate(texts):
        run = folder / NAMES / _make_name(text)
        shutil.copytree(workload.run_undisturbed(**FEW_STEPS).run, run, symlinks=True, ignore=_ignore_weights)
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["optimizer"]["lr"] = (number + 1) / 1000
        config["report"]["title"] = text
        (run / "config.yaml").write_text(yaml.safe_dump(config, allow_unicode=True))
        _change(run / "status.json", lambda table, text=text: table.update(why=text, warnings=_make_warnings([text])))


def _make_warnings(texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"message": text, "kind": ""} for text in texts]


def _ignore_weights(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in ("checkpoints", "model", "best")]


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


def read_served_pages(run: Path, texts: Sequence[str]) -> Pages:
    """The pages of the server; its answers about these texts are JSON, which no browser takes for a page."""
    with start_server(run) as (_, port):
        pages: Pages = {}
        for text in texts:
            body = json.dumps({"id": text, "question": text, "context": text}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/predict", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.headers["Content-Type"] == "application/json"
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert json.loads(answer.read())["id"] == text
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
    return re.sub("[/\0]", "_", text)


def _make_word(text: str) -> str:
    return re.sub(r"\s|=", "_", text)


def _change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


ROWS = [
    Row("R24", "a payload (of 200) as question, context, answer, prediction, name of a run, a file, a setting and a "
        "job, setting, warning, reason and error; 25 share a run",
        "pages and terminals show it as text: no foreign element, handler, address or control character",
        show_hostile_texts, 25, 200),
]  # fmt: skip
