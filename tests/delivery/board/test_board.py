"""The board: the list of runs and its changes, one run, pages, refusals; in a browser, with a run that trains."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browser, open_tab
from fake_run import HOSTILE, change_run, fake_run, make_step, write_run
from starlette.testclient import TestClient

from fivetune import cli
from fivetune.delivery.board.app import PAGE, build_board_app
from fivetune.delivery.board.details import MAX_EVALS, describe_curves, describe_predictions, select_evals
from fivetune.delivery.board.rows import Board
from fivetune.delivery.page import render_page
from fivetune.delivery.serving.guard import Guard
from fivetune.delivery.serving.server import bind_socket, build_server
from fivetune.reading.report import live
from fivetune.reading.report.page.wording import escape_hidden
from fivetune.rundir import RunDir, read_run
from fivetune.rundir.activity import Activity, ActivityFile, read_activity
from fivetune.rundir.plan import Plan
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import EvalRecord, Run

# What stands out of the window at the right, and is not in a table that scrolls.
WIDE = """[...document.querySelectorAll("body *")].filter((one) => !one.closest(".scroll, .hidden")
  && one.getBoundingClientRect().right > document.documentElement.clientWidth)
  .map((one) => one.outerHTML.slice(0, 90))"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs that differ in the rate, and one that failed."""
    folder = tmp_path_factory.mktemp("board") / "runs"
    for name, rate, seed in (("one", 0.003, 0), ("two", 0.001, 1)):
        run = fake_run(name=name, seed=seed)
        config = {**run.config, "optimizer": {**run.config["optimizer"], "lr": rate}}
        write_run(folder / name, change_run(run, config=config))
    failed = fake_run(name="bad", evals=[], predictions={}, status={"state": "failed", "why": f"no memory {HOSTILE}"})
    write_run(folder / "deep" / "bad", failed)
    return folder


@pytest.fixture
def board(runs: Path) -> Board:
    return Board([runs])


@pytest.fixture
def client(board: Board) -> TestClient:
    return TestClient(build_board_app(board, Guard()), base_url="http://localhost:8070")


def read_rows(board: Board) -> dict[str, Any]:
    return {row["name"]: row for row in board.read_changes("", 0)["rows"]}


# --- the list ---


def test_a_row_has_state_task_score_with_interval_date_and_what_differs(board: Board, runs: Path) -> None:
    rows = read_rows(board)
    assert list(rows) == ["deep/bad", "one", "two"]
    row = rows["one"]
    best = max(one.scores["f1"] for one in read_run(runs / "one").evals)
    assert (row["state"], row["task"], row["metric"], row["score"]) == ("finished", "squad_v2", "f1", best)
    assert row["interval"][0] < row["score"] < row["interval"][1] and row["started"].startswith("2026-11-21")
    assert ("optimizer.lr", "0.003") in row["settings"] and ("optimizer.lr", "0.001") in rows["two"]["settings"]
    assert {name.partition(".")[0] for name, _ in row["settings"]} <= {"optimizer"}
    assert rows["deep/bad"]["state"] == "failed" and "no memory" in rows["deep/bad"]["why"]


def test_only_changes_are_sent(board: Board, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivetune.delivery.board.rows.MIN_SECONDS", 0.0)
    first = board.read_changes("", 0)
    server, number = first["server"], first["number"]
    assert board.read_changes(server, number)["rows"] == []
    other = write_run(runs / "three", fake_run(name="three"))
    try:
        later = board.read_changes(server, number)
        assert [row["name"] for row in later["rows"]] == ["three"] and later["number"] > number
        assert len(board.read_changes("another server", later["number"])["rows"]) == 4
    finally:
        os.rename(other, runs.parent / "gone")
    assert board.read_changes(server, later["number"])["names"] == ["deep/bad", "one", "two"]


def test_the_files_are_looked_at_once_however_many_pages_ask(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    real = live.list_run_folders
    monkeypatch.setattr(live, "list_run_folders", lambda folder: looks.append(1) or real(folder))
    for _ in range(5):
        board.read_changes("", 0)
    assert len(looks) == 1


def test_a_long_list_comes_in_several_answers(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivetune.delivery.board.rows.MAX_SECONDS", -1.0)
    first = board.read_changes("", 0)
    assert (first["rows"], first["waiting"]) == ([], 3)
    monkeypatch.setattr("fivetune.delivery.board.rows.MAX_SECONDS", 60.0)
    rest = board.read_changes(first["server"], first["number"])
    assert (len(rest["rows"]), rest["waiting"]) == (3, 0)


def test_runs_of_several_folders_are_told_apart(runs: Path) -> None:
    rows = read_rows(Board([runs, runs / "deep"]))
    assert set(rows) == {str(runs / name) for name in ("one", "two", "deep/bad")}


def test_a_damaged_run_is_on_the_board(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "torn", fake_run(name="torn"))
    (folder / "config.yaml").write_text("{", encoding="utf-8")
    row = read_rows(Board([tmp_path]))["torn"]
    assert row["state"] == "unreadable" and "config.yaml" in row["why"]


# --- a run that trains ---


def test_what_a_run_does_between_its_steps_is_read_from_outside(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    run.write_config("task: {name: squad_v2}\n")
    run.update_status(state="running")
    progress = Progress(tmp_path / "run" / "log.txt", silent=True, activity=ActivityFile(tmp_path / "run"))
    progress.update("evaluating", 30, 600)
    progress.update("evaluating", 31, 600)  # within a second: not written
    row = read_rows(Board([tmp_path]))["run"]
    assert (row["state"], row["activity"]) == ("running", {"what": "evaluating", "done": 30, "total": 600})
    records = tmp_path / "run" / "evals.jsonl"
    records.write_text("")
    later = records.stat().st_mtime + 1
    assert read_activity(tmp_path / "run", after=later) is None  # the evaluation is over
    progress.close()
    assert read_activity(tmp_path / "run", after=0.0) is None
    run.close()
    assert ActivityFile(tmp_path / "missing").update(Activity("evaluating")) is None  # no error


# --- one run ---


def test_curves_stay_small_and_name_the_best_evaluation(runs: Path) -> None:
    found = describe_curves(runs / "one", read_run(runs / "one"))
    assert len(found["steps"]) <= 300 and found["steps"][0][1] > found["steps"][-1][1]
    assert [one["step"] for one in found["evals"] if one["is_best"]] == [250]
    assert found["scores"][0] == "F1" and found["evals"][5]["scores"][0]["interval"]


def test_predictions_are_of_the_same_examples_at_each_evaluation(runs: Path) -> None:
    run = read_run(runs / "one")
    found = describe_predictions(runs / "one", run)
    assert found["total"] == 640 and len(found["examples"]) == 300
    assert [one["step"] for one in found["evals"]] == [one.step for one in run.evals]
    written = {one.id: one for one in run.read_predictions(run.evals[2])}
    for example in found["examples"][:20]:
        assert len(example["answers"]) == len(run.evals)
        assert example["answers"][2][0] == escape_hidden(written[example["id"]].prediction)


def test_a_run_without_predictions_says_so(runs: Path, tmp_path: Path) -> None:
    assert describe_predictions(tmp_path, Run(name="a"))["examples"] == []
    lost = describe_predictions(tmp_path, read_run(runs / "one"))
    assert lost["evals"] == [] and len(lost["damage"]) == 7


def test_of_many_evaluations_first_best_and_last_are_read() -> None:
    def make(step: int) -> EvalRecord:
        return EvalRecord(step, "squad", 1, "eval", 9, 0, {"f1": -abs(step - 37.0)}, None, {}, 8, 1.0)

    chosen = select_evals(Run(name="a", config={"task": {"name": "squad"}}, evals=[make(step) for step in range(100)]))
    steps = [one.step for one in chosen]
    assert len(steps) == MAX_EVALS and {0, 37, 99} <= set(steps) and steps == sorted(steps)


# --- pages ---


def test_routes_answer_and_refuse(client: TestClient, runs: Path) -> None:
    assert client.get("/").headers["content-security-policy"] == render_page(PAGE)[1]
    assert {row["name"] for row in client.get("/runs.json").json()["rows"]} == {"one", "two", "deep/bad"}
    assert client.get("/run.json", params={"run": "one"}).json()["settings"]
    assert client.get("/predictions.json", params={"run": "deep/bad"}).json()["evals"] == []
    for name in ("..", "/etc", "three", ""):
        answer = client.get("/run.json", params={"run": name})
        assert answer.status_code == 404 and "not on the board" in answer.json()["error"]["message"]
    assert client.get("/etc/passwd").status_code == 404
    assert client.post("/runs.json").status_code == 405
    assert client.get("/runs.json", headers={"host": "evil.example"}).status_code == 403
    assert client.get("/runs.json", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/runs.json", params={"since": "x" * 99}).status_code == 200


def test_a_report_is_written_where_it_is_missing_or_old(client: TestClient, runs: Path) -> None:
    report = runs / "one" / "report.html"
    answer = client.get("/report", params={"run": "one"})
    assert answer.status_code == 200 and answer.text == report.read_text(encoding="utf-8")
    assert "sandbox" in answer.headers["content-security-policy"]
    report.write_text("<p>my own")
    assert client.get("/report", params={"run": "one"}).text == "<p>my own"
    os.utime(report, (0, 0))
    assert "<title>" in client.get("/report", params={"run": "one"}).text


def test_a_folder_that_cannot_be_written_has_a_report(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("fivetune.reading.report.run.build.write_text", refuse)
    assert "<title>" in client.get("/report", params={"run": "two"}).text


def test_ticked_runs_are_compared(client: TestClient, runs: Path) -> None:
    answer = client.get("/comparison", params={"run": ["one", "two"]})
    assert answer.status_code == 200 and "Comparison" in answer.text
    assert not list(runs.glob("*.html"))
    alone = client.get("/comparison", params={"run": ["one", "one"]})
    assert alone.status_code == 422 and "Tick two" in alone.text


def test_the_command_refuses_what_it_cannot_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["board", str(tmp_path / "none")]) == 4
    assert "no such directory" in capsys.readouterr().err
    assert cli.main(["board", str(tmp_path), "--port", "99999"]) == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert cli.main(["board", str(tmp_path), "--port", str(taken.getsockname()[1])]) == 4
    assert "--port" in capsys.readouterr().err


# --- in a browser ---


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the board of a folder; yields its address."""
    with bind_socket("127.0.0.1", 0) as bound:
        ready = threading.Event()
        server = build_server(build_board_app(Board([folder]), Guard()), drain_seconds=1, on_listening=ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            assert ready.wait(20)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


@browser
@pytest.mark.slow
def test_the_board_in_a_browser_with_a_live_run(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    os.makedirs(folder)
    for name in ("one", "two"):
        os.symlink(runs / name, folder / name)
    run = RunDir.create(folder / "live")
    run.write_config("task: {name: squad_v2}\nmodel: {path: t5-nano}\n")
    run.write("plan.json", Plan(8, 100, 50, 50).as_dict())
    run.update_status(state="running", started="2026-11-22T02:10:24+00:00")
    for step in range(1, 11):
        run.append("steps.jsonl", make_step(step, loss=5.0 - step / 10))
    with closing(run), serving(folder) as address, open_tab(tmp_path) as tab:
        tab.set_width(1280)
        tab.open(address)
        tab.wait("document.querySelectorAll('#rows tr').length === 3")
        first = tab.read("#rows tr")
        assert "live" in first and "running" in first and "step 10 of 100" in first and "left" in first
        run.append("steps.jsonl", make_step(11, loss=1.25))
        tab.wait("document.querySelector('#rows tr').innerText.includes('step 11 of 100')")
        assert "1.250" in tab.read("#rows tr")
        _check_keyboard(tab)
        _check_one_run(tab, run)
        for width in (390, 1280):
            tab.set_width(width)
            for place in ("", "#run=one"):
                tab.run(f"location.hash = '{place}'")
                tab.wait(f"document.getElementById('detail').hidden === {json.dumps(not place)}")
                assert tab.run(WIDE) == [], (width, place)
        assert tab.errors == []
        assert all(url.startswith((address, "data:")) for url in tab.requests)


def _check_keyboard(tab: Tab) -> None:
    """Tick two runs and find one, by keys alone."""
    tab.run("document.querySelectorAll('#rows input')[1].focus()")
    tab.press("Space")
    tab.run("document.querySelectorAll('#rows input')[2].focus()")
    tab.press("Space")
    assert tab.read("#compare") == "Compare 2 runs"
    assert tab.run("document.getElementById('compare').getAttribute('href')") == "/comparison?run=one&run=two"
    tab.run("document.getElementById('find').focus()")
    tab.type("squad_v2 two")
    tab.wait("document.querySelectorAll('#rows tr').length === 1")
    tab.run("document.querySelector('#rows a').focus()")
    tab.press("Enter")
    tab.wait("!document.getElementById('detail').hidden")
    assert tab.read("#title") == "two"
    tab.run("document.querySelector('#back a').focus()")
    tab.press("Enter")
    tab.wait("document.getElementById('detail').hidden")


def _check_one_run(tab: Tab, run: RunDir) -> None:
    """Curves and predictions of a finished run; of the live one the curve grows."""
    tab.run("location.hash = '#run=one'")
    tab.wait("document.querySelectorAll('.example').length === 20")
    assert tab.run("document.querySelectorAll('.chart svg .line').length") == 2
    assert tab.run("document.querySelectorAll('.said del, .said ins').length") > 5
    tab.run("document.getElementById('more').click()")
    assert tab.run("document.querySelectorAll('.example').length") == 40
    tab.run("location.hash = '#run=live'")
    tab.wait("document.querySelectorAll('#loss-chart svg').length === 1")
    before = tab.run("document.querySelector('#loss-chart .line').getAttribute('d').length")
    run.append("steps.jsonl", make_step(12, loss=1.0))
    tab.wait(f"document.querySelector('#loss-chart .line').getAttribute('d').length > {before}")
    assert "no predictions yet" in tab.read("#num-examples")
