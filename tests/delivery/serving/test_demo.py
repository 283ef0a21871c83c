"""The page of a server: what it is made of, and how it is used in a browser: typed into, answered, refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browser, open_tab
from serving_kit import FIELDS, RECORDS, Server, Slow, serving

from fivetune.delivery.page import render_page
from fivetune.delivery.serving.demo import PAGE, find_examples
from fivetune.delivery.serving.models import open_models
from fivetune.delivery.serving.schema import DemoExample, RunFacts, list_fields
from fivetune.model.decode import Decoding, Sampling
from fivetune.plugins import list_plugins, load_plugin
from fivetune.rundir.config_file import stamp_config
from fivetune.rundir.layout import CHECKSUMS
from fivetune.rundir.records import Candidate, Prediction
from fivetune.tasks.classification import Classification
from fivetune.training.answers.trained_run import TrainedRun

EXAMPLES = (
    DemoExample({**RECORDS[0]}, "question: a", "red hat", ("red hat",), True),
    DemoExample(None, "question: b context: c", "", ("<b>blue</b>",), False),
)
SHOWN = "!document.getElementById('work').hidden"
LONG = "question: " + "é😀 " * 900 + " tail"


def answer(requests: Sequence[Sequence[Any]], name: str = "a", **options: Any) -> list[list[Prediction]]:
    """Answer by the question; one that begins with `cut` is too long by its last 4 characters, `long` is refused."""
    return [[_answer_one(one, name) for one in request] for request in requests]


def _answer_one(one: Any, name: str) -> Prediction:
    asked = one if isinstance(one, str) else one["question"]
    if asked.startswith("long"):
        return Prediction(id="0", skipped="the input has 9,999 tokens. Allowed are 200. Shorten it.")
    cut: Any = {}
    if asked.startswith("cut"):
        cut = {"num_clipped_tokens": 4, "inputs": LONG, "clipped_spans": ((len(LONG) - 4, len(LONG)),)}
    candidates = (Candidate(f"<b>{name}</b>", 0.75), Candidate("other", 0.125))
    return Prediction(
        id="0", prediction=f"<b>{name}</b>", confidence=0.75, candidates=candidates, num_input_tokens=9, **cut
    )


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Generator[Tab]:
    with open_tab(tmp_path_factory.mktemp("browser")) as found:
        yield found


@contextmanager
def showing(tab: Tab, answers: Any = answer, **options: Any) -> Iterator[Server]:
    """Serve, and open the page."""
    facts = {"a": RunFacts("a", "squad_v2", 6, FIELDS, Decoding(8), examples=EXAMPLES)}
    names = answers if isinstance(answers, dict) else {"a": answers}
    models = {name: RunFacts(name, "squad_v2", 6, FIELDS, Decoding(8)) for name in names} | facts
    with serving(names, facts=models, **options) as server:
        tab.open(f"http://127.0.0.1:{server.port}/")
        tab.wait(f"{SHOWN} || !document.getElementById('access').hidden")
        yield server


def write(tab: Tab, **values: str) -> None:
    """Type into fields by their names, then press Ctrl + Enter."""
    for name, text in values.items():
        tab.run(f"document.querySelector('[name={name}]').focus()")
        tab.run("document.activeElement.select()")
        tab.type(text)
    tab.press("Enter", ctrl=True)


# --- without a browser ---


def test_the_fields_are_those_that_a_task_reads() -> None:
    for name in set(list_plugins("tasks")) - {"mixture"}:
        task = load_plugin("tasks", name)()
        names = [field.name for field in list_fields(task, {})]
        assert names and not {"id", "answers", "label", "targets", "final_decision"} & set(names), name
    assert [one.name for one in list_fields(load_plugin("tasks", "squad_v2")(), {})] == ["question", "context"]
    optional = list_fields(load_plugin("tasks", "unifiedqa")(), {"context": "Text"})[1]
    assert (optional.name, optional.is_required) == ("Text", False)
    assert [one.name for one in list_fields(Classification(inputs="{a}: {b}"), {})] == ["a", "b"]


def test_examples_are_of_the_best_evaluation(trained: TrainedRun, tmp_path: Path) -> None:
    trained = TrainedRun(Path(shutil.copytree(trained.folder, tmp_path / "run")), loaded=trained.loaded)
    fields = list_fields(trained.loaded.config.task, {})
    path = trained.folder / "predictions" / f"eval-{trained.step}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["scores"] = dict.fromkeys(line["scores"], float(number % 3 == 0))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (trained.folder / CHECKSUMS).unlink()  # by which a changed file is told
    warned: list[str] = []
    found = find_examples(trained, fields, num=3, on_warning=warned.append)
    assert [one.is_right for one in found] == [True] * 3 + [False] * 3 and not warned
    by_text = {line["inputs"]: line for line in lines}
    for one in found:
        line = by_text[one.text]
        assert one.record and list(one.record) == ["question", "context"] and str(one.record["question"]) in one.text
        assert (one.prediction, one.is_right) == (line["prediction"], set(line["scores"].values()) == {1.0})
    data = Path(trained.loaded.config.data.eval[0])
    moved = data.rename(tmp_path / "dev.json")
    assert {one.record for one in find_examples(trained, fields, num=3, on_warning=warned.append)} == {None}
    moved.rename(data)
    assert find_examples(trained, fields, num=0, on_warning=warned.append) == ()
    path.write_text("{\n" + path.read_text())
    opened = TrainedRun(trained.folder, loaded=trained.loaded)  # an open run has read the file
    find_examples(opened, fields, num=3, on_warning=warned.append)
    assert len(warned) == 1 and path.name in warned[0]


def test_settings_of_another_run_are_reported_once(trained: TrainedRun, tmp_path: Path) -> None:
    """Loading the run and reading its examples each reported them."""
    folder, warned = Path(shutil.copytree(trained.folder, tmp_path / "run")), list[str]()
    path = folder / "config.yaml"
    path.write_text(stamp_config(path.read_text().partition("\n")[2] + "# another run\n"))
    options: Any = {"shares_base": False, "max_input_tokens": 64, "num_examples": 1, "on_note": print}
    open_models([str(folder)], {}, on_warning=warned.append, **options)
    assert [text.partition(" (")[0] for text in warned] == [f"{path}: differs from what the run wrote"]


def test_the_page_needs_no_token_and_its_data_does() -> None:
    with serving(Slow(), token="0123456789abcdef") as server:
        page = server.client.get("/", headers={"Authorization": ""})
        assert page.status_code == 200 and "squad" not in page.text
        assert page.headers.get_list("Content-Security-Policy") == [render_page(PAGE)[1]]
        assert server.client.get("/demo.json", headers={"Authorization": ""}).status_code == 401
        assert [one["name"] for one in server.client.get("/demo.json").json()["models"]] == ["run"]


# --- in a browser ---


@browser
@pytest.mark.slow
def test_type_submit_answer(tab: Tab) -> None:
    """By keyboard alone: the form is filled in, submitted, and answered; the page asks this server alone."""
    with showing(tab) as server:
        tab.run("document.getElementById('field-0').focus()")
        tab.type("Who?")
        tab.press("Tab")
        tab.type("Ann.")
        tab.press("Tab")
        assert tab.run("document.activeElement.tagName") == "SUMMARY"
        tab.press("Tab")
        tab.press("Enter")
        tab.wait("document.querySelector('#answers .answer')")
        text = tab.read("#answers")
        assert (
            "<b>a</b>" in text and "75.0 %" in text and "other" in text and "12.5 %" in text and "9 tokens read" in text
        )
        widths = tab.run("[...document.querySelectorAll('.bar > span')].map(one => one.style.width)")
        assert widths == ["75%", "12.5%"]
        assert tab.run("document.querySelector('#answers').getAttribute('aria-live')") == "polite"
        assert {one.partition("/")[0] + "//127.0.0.1" for one in tab.requests} == {"http://127.0.0.1"}
        assert {one.split("/")[2] for one in tab.requests} == {f"127.0.0.1:{server.port}"}
        assert tab.errors == []
        for control in ("textarea", "select", "input:not([type=radio])"):
            names = f"[...document.querySelectorAll('{control}')].map(one => one.labels.length)"
            assert set(tab.run(names)) == {1}


@browser
@pytest.mark.slow
def test_the_part_that_was_cut_is_shown(tab: Tab) -> None:
    with showing(tab):
        write(tab, question="cut", context="c")
        tab.wait("document.querySelector('#answers del')")
        assert tab.read("#answers del") == "tail" and LONG in tab.read("#answers .read")
        assert "4 tokens were not read" in tab.read("#answers")
        places = tab.run("[...document.querySelectorAll('.read, del')].map(one => one.getBoundingClientRect().bottom)")
        assert places[1] <= places[0] + 1


@browser
@pytest.mark.slow
def test_examples_fill_in_the_form(tab: Tab) -> None:
    with showing(tab):
        assert "<b>blue</b>" in tab.read("#wrong") and tab.run("document.querySelectorAll('#right button').length") == 1
        tab.run("document.querySelector('#right button').click()")
        tab.wait("document.querySelector('#answers .answer')")
        assert tab.run("document.querySelector('[name=question]').value") == RECORDS[0]["question"]
        tab.run("document.querySelector('#wrong button').click()")
        tab.wait("document.querySelector('[name=inputs]') && document.querySelector('#answers .answer')")
        assert tab.run("document.querySelector('[name=inputs]').value") == "question: b context: c"
        tab.run("document.getElementById('clear').click()")
        assert tab.run("document.querySelector('[name=inputs]').value") == "" and "take an example" in tab.read(
            "#answers"
        )


@browser
@pytest.mark.slow
def test_two_models_answer_side_by_side(tab: Tab) -> None:
    answers = {name: lambda asked, name=name, **options: answer(asked, name) for name in ("a", "b")}
    with showing(tab, answers):
        tab.set_width(1100)
        write(tab, question="Who?", context="Ann.")
        tab.wait("document.querySelectorAll('#answers .answer').length === 2")
        assert tab.run("[...document.querySelectorAll('article h3')].map(one => one.innerText)") == ["a", "b"]
        assert "<b>a</b>" in tab.read("article") and "<b>b</b>" in tab.read("article + article")
        places = tab.run("[...document.querySelectorAll('article')].map(one => one.getBoundingClientRect().x)")
        assert places[0] < places[1]
        tab.run("const one = document.getElementById('second'); one.value = ''; one.dispatchEvent(new Event('change'))")
        tab.press("Enter", ctrl=True)
        tab.wait("document.querySelectorAll('#answers article').length === 1")


@browser
@pytest.mark.slow
def test_options_of_the_search_are_sent_and_all_answers_are_listed(tab: Tab) -> None:
    asked: list[Any] = []

    def draw(requests: Sequence[Sequence[Any]], **options: Any) -> list[list[Prediction]]:
        asked.append(options["decoding"])
        drawn = Prediction(id="0", prediction="x", candidates=(Candidate("x", 0.5), Candidate("y", 0.2)) * 2)
        return [[replace(drawn, num_input_tokens=9)] for _ in requests]

    with showing(tab, draw):
        tab.set_width(390)
        tab.run("document.querySelector('#search summary').focus()")
        tab.press("Enter")
        assert tab.run("document.getElementById('search').open")
        for name, text in (("temperature", "1.5"), ("top_k", "3"), ("n", "4"), ("seed", "7"), ("stop", ".")):
            tab.run(f"document.getElementById('option-{name}').focus()")
            tab.type(text)
        write(tab, question="Who?", context="Ann.")
        tab.wait("document.querySelectorAll('#answers li').length === 4")
        assert asked == [Decoding(8, num_candidates=4, stop=(".",), sampling=Sampling(1.5, 3, 1.0, 7))]
        assert tab.run("[...document.querySelectorAll('#answers li > :first-child')].map(one => one.innerText)") == [
            *"xyxy"
        ]
        assert tab.run("document.documentElement.scrollWidth") <= 390
        assert set(tab.run("[...document.querySelectorAll('.option')].map(one => one.labels.length)")) == {1}
        tab.run("document.getElementById('option-top_p').focus()")
        tab.type("2")
        tab.run("document.getElementById('search').open = false")
        tab.press("Enter")
        tab.wait("document.activeElement.id === 'option-top_p' && document.getElementById('search').open")
        assert tab.read("#option-top_p-wrong") == "Allowed: 0 to 1." and len(asked) == 1


@browser
@pytest.mark.slow
def test_errors_are_shown_where_they_are(tab: Tab) -> None:
    model = Slow()
    with showing(tab, model, max_queue=1, max_batch=1) as server, ThreadPoolExecutor(2) as pool:
        tab.run("document.querySelector('#ask button').click()")
        assert tab.read("#field-0-wrong") == "Empty. Write something."
        assert tab.run("document.activeElement.name") == "question"
        assert tab.run("document.activeElement.getAttribute('aria-invalid')") == "true"
        waiting = [pool.submit(server.post, json=RECORDS[0])]
        assert model.begun.wait(10)
        waiting.append(pool.submit(server.post, json=RECORDS[0]))
        while not len(server.batcher):
            pass
        write(tab, question="Who?", context="Ann.")
        tab.wait("document.querySelector('#answers .error')")
        assert tab.read("#answers .error") == "The server is busy: its queue is full. Send the input again in 1 s."
        model.may_answer.set()
        assert [one.result()[0] for one in waiting] == [200, 200]
    tab.press("Enter", ctrl=True)
    tab.wait("document.querySelector('#answers').innerText.includes('does not answer')")
    assert "Start it again" in tab.read("#answers .error")
    with showing(tab):
        write(tab, question="long", context="c")
        tab.wait("document.querySelector('#answers .error')")
        assert tab.read("#answers .error").startswith("the input has 9,999 tokens. Allowed are 200.")
        write(tab, question="x" * 70_000)
        tab.wait("document.querySelector('#answers').innerText.includes('too many bytes')")


@browser
@pytest.mark.slow
def test_a_token_is_asked_for(tab: Tab) -> None:
    with showing(tab, token="0123456789abcdef"):
        assert tab.run("document.activeElement.id") == "token" and not tab.run(SHOWN)
        tab.type("wrong")
        tab.press("Enter")
        tab.wait("!document.getElementById('failure').hidden")
        assert tab.read("#failure") == "The token is missing or wrong."
        tab.run("document.getElementById('token').select()")
        tab.type("0123456789abcdef")
        tab.press("Enter")
        tab.wait(SHOWN)
        write(tab, question="Who?", context="Ann.")
        tab.wait("document.querySelector('#answers .answer')")


@browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(tab: Tab, scheme: str) -> None:
    """Contrast of WCAG 2.1, AA: 4.5 for text; nothing is wider than a narrow screen."""
    tab.set_scheme(scheme)
    tab.set_width(400)
    with showing(tab, {name: lambda asked, name=name, **options: answer(asked, name) for name in ("a", "b")}):
        write(tab, question="cut", context="c" * 300)
        tab.wait("document.querySelectorAll('#answers del').length === 2")
        assert tab.run("document.documentElement.scrollWidth") <= 400
        for selector in (
            "body",
            ".hint",
            "button[type=submit]",
            "#clear",
            "textarea",
            ".answer",
            "del",
            "#wrong b",
            "a",
        ):
            ratio = tab.run(f"({CONTRAST})(document.querySelector('{selector}'))")
            assert ratio >= 4.5, (selector, ratio)
        is_dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert is_dark == (scheme == "dark")


CONTRAST = """(node) => {
  const parse = (text) => text.match(/[0-9.]+/g).map(Number);
  const straighten = (one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const light = (color) => {
    const [r, g, b] = parse(color).map((one) => straighten(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let under = node;
  while (under && parse(getComputedStyle(under).backgroundColor)[3] === 0) under = under.parentElement;
  const ink = light(getComputedStyle(node).color);
  const paper = light(getComputedStyle(under || document.body).backgroundColor);
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}"""
