"""The live view: what a frame says about runs in every state, and how little of their files it reads."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from fake_run import fake_run, make_eval, make_run, write_run
from rich.console import Console

from fivetune import cli, rundir
from fivetune.errors import RunDirError
from fivetune.reading.compare.measures import find_best_metric_eval
from fivetune.reading.report.live import (
    SAMPLE_BYTES,
    TAIL_BYTES,
    Watcher,
    list_run_folders,
    read_last_records,
    render_frame,
    sample_records,
)
from fivetune.reading.report.run.scores import choose_best_eval
from fivetune.rundir import RunDir, read_run
from fivetune.rundir.activity import Activity, ActivityFile
from fivetune.rundir.progress import Progress
from fivetune.rundir.reader import read_plan


def shown(folder: Path, *, width: int = 100, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(render_frame(Watcher(folder).read_views(), width=width, height=height))
    return console.export_text()


def a_run(
    folder: Path, *, state: str = "finished", steps: int = 300, why: str = "", telemetry: list | None = None
) -> Path:
    run = fake_run(name=folder.name)
    status = replace(run.status, state=state, step=steps, why=why)
    write_run(folder, fake_run(name=folder.name, status=status, steps=run.steps[:steps], predictions={}))
    if telemetry:
        (folder / rundir.TELEMETRY).write_text("".join(json.dumps(line) + "\n" for line in telemetry))
    return folder


def test_a_name_and_a_reason_move_no_terminal(tmp_path):
    a_run(tmp_path / "a\x1b[2J\u202eb", state="failed", why="lost\x1b[31m")
    text = shown(tmp_path)
    assert "a[U+001B][2J[U+202E]b" in text and "lost[U+001B][31m" in text and not set(text) & {"\x1b", "\u202e"}


def test_a_finished_run_in_a_frame(tmp_path):
    a_run(tmp_path / "one")
    text = shown(tmp_path)
    assert "1 finished" in text
    assert "one" in text and "300/300" in text and "100 %" in text and "2 min 41 s" in text
    assert "f1 93.95 at step 250" in text and "tok/s" in text
    assert "█" in text and "▁" in text


def test_a_running_run_tells_time_left_and_utilisation(tmp_path):
    device = {"index": 0, "utilisation": 0.75, "ours": True}
    foreign = {"index": 1, "utilisation": 0.05, "ours": False}
    samples = [{"seconds": 100.0 + i, "core_utilisation": [0.1], "devices": [device, foreign]} for i in range(5)]
    a_run(tmp_path / "one", state="running", steps=150, telemetry=samples)
    text = shown(tmp_path)
    assert "150/300" in text and "50 %" in text and "gpu 75 %" in text
    # 150 steps of 0.39 s, and three evaluations of 4.8 s at steps 200, 250 and 300
    left = float(text.partition(" min ")[2].partition(" s left")[0]) + 60
    assert abs(left - (150 * 0.39 + 3 * 4.8)) < 3


def test_utilisation_of_a_machine_without_a_gpu_is_that_of_its_cores(tmp_path):
    old = {"seconds": 1.0, "core_utilisation": [0.0, 0.0], "devices": []}
    new = {"seconds": 100.0, "core_utilisation": [1.0, 0.5], "devices": []}
    a_run(tmp_path / "one", state="running", steps=150, telemetry=[old, new])
    assert "cpu 75 %" in shown(tmp_path)


def test_the_best_score_is_that_of_the_report_and_the_comparison(tmp_path):
    """status.json has the score by which training chose; a resume with eval.max_examples made it that of a subset."""
    whole = make_eval(2, {"f1": 90.0}, basis="a")
    subset = make_eval(2, {"f1": 1.0}, basis="a", split="subset", num_examples=4)
    status = {"state": "finished", "best": {"step": 2, "metric": "f1", "score": 1.0}}
    for name, best in [("one", status), ("two", {**status, "best": None})]:  # the latter: resumed, not evaluated yet
        path = write_run(tmp_path / name, fake_run(name=name, predictions={}))
        (path / rundir.EVALS).write_text("".join(json.dumps(line) + "\n" for line in (whole, subset)))
        (path / rundir.STATUS).write_text(json.dumps(best))
        run = read_run(path)
        assert find_best_metric_eval(run, "f1") == choose_best_eval(run) == run.evals[0]
    assert shown(tmp_path).count("f1 90.00 at step 2 ") == 2


def test_what_is_unknown_is_not_made_up(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump({"run": {"dir": "x"}}))
    text = shown(tmp_path)
    assert "preparing" in text and "n/a" in text and "0 %" not in text


def test_states_reasons_and_the_order_of_runs(tmp_path):
    a_run(tmp_path / "a", state="failed", why="step 7: loss nan, first in decoder.")
    a_run(tmp_path / "d", state="pruned", steps=10, why="pruned after evaluation 2")
    a_run(tmp_path / "deep" / "b", state="running", steps=10)
    killed = a_run(tmp_path / "c", state="running", steps=10)
    (killed / rundir.LOCK).write_text("process 1 on gone")
    text = shown(tmp_path)
    assert "1 running, 1 pruned, 1 interrupted, 1 failed" in text and "pruned after evaluation 2" in text
    assert text.index("deep/b") < text.index("\na ") < text.index("\nc ")
    assert "step 7: loss nan, first in decoder." in text and "killed (process 1 on gone is gone)" in text


def test_a_damaged_run_does_not_hide_the_others(tmp_path):
    a_run(tmp_path / "one")
    (a_run(tmp_path / "two") / "config.yaml").write_text("{")
    (a_run(tmp_path / "three") / "status.json").write_text("{")
    text = shown(tmp_path, width=300)
    assert "1 finished" in text and "2 unreadable" in text and "two/config.yaml: damaged" in text
    assert "three/status.json:1:2: damaged" in text and "300/300" in text


def test_a_damaged_plan_is_named_and_the_run_is_shown(tmp_path):
    run = a_run(tmp_path / "one")
    (run / "plan.json").write_text("{")
    text = shown(tmp_path, width=300)
    assert "1 finished" in text and "f1 93.95 at step 250" in text and f"{run}/plan.json:1:2: damaged: " in text
    assert read_run(run).plan is None
    assert read_run(run).warnings[-1].startswith(f"{run}/plan.json:1:2: damaged: ")
    with pytest.raises(RunDirError, match=r"plan\.json:1:2: damaged: .*Delete the file: a resume writes"):
        read_plan(run)
    assert cli.main(["report", str(run)]) == 0 and "plan.json:1:2: damaged: " in (run / "report.html").read_text()
    other = a_run(tmp_path / "two")
    changed = {**rundir.read_run_config(other), "optimizer": {"name": "adamw"}}
    rundir.write_text(other / rundir.CONFIG, yaml.safe_dump(changed))
    assert cli.main(["compare", str(run), str(other)]) == 0
    assert cli.main(["diagnose", str(run)]) == 0


@pytest.mark.parametrize("name", ["status.json", "steps.jsonl", "evals.jsonl", "telemetry.jsonl", "machine.json"])
def test_damage_that_a_report_does_not_need_is_a_warning_of_commands_and_pages(tmp_path, capsys, name):
    run, other = a_run(tmp_path / "one"), a_run(tmp_path / "two")
    changed = {**rundir.read_run_config(other), "optimizer": {"name": "adamw"}}
    rundir.write_text(other / rundir.CONFIG, yaml.safe_dump(changed))
    with (run / name).open("ab") as file:
        file.write(b"\x00\n")
    assert cli.main(["report", str(run)]) == 0
    assert f"warning: {run}/{name}" in " ".join(capsys.readouterr().err.split())
    assert f"one/{name}" in (run / "report.html").read_text()
    page = tmp_path / "page.html"
    assert cli.main(["compare", str(run), str(other), "--output", str(page)]) == 0
    assert f"warning: {run}/{name}" in capsys.readouterr().out and f"one/{name}" in page.read_text()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("status.json", "{}"),
        ("status.json", '{"state": null}'),
        ("status.json", '{"state": "oops"}'),
        ("machine.json", "{}"),
        ("evals.jsonl", '{"step": 300, "ta'),
    ],
)
def test_empty_files_unknown_states_and_torn_evaluations_are_named_once_by_all(tmp_path, capsys, name, content):
    run, other = a_run(tmp_path / "one"), a_run(tmp_path / "two")
    changed = {**rundir.read_run_config(other), "optimizer": {"name": "adamw"}}
    rundir.write_text(other / rundir.CONFIG, yaml.safe_dump(changed))
    with (run / name).open("a" if name == "evals.jsonl" else "w") as file:
        file.write(content)
    for words in (["report", str(run)], ["diagnose", str(run)], ["compare", str(run), str(other)]):
        assert cli.main(words) == 0
        printed = " ".join("".join(capsys.readouterr()).split())
        assert printed.count(f"warning: {run}/{name}") == 1, words
        assert "oops" not in printed.replace("'state' is 'oops'", "")
    page = (run / "report.html").read_text()
    assert f"one/{name}" in page and "(state )" not in page
    text = shown(tmp_path, width=400)
    assert text.count(f"{run}/{name}") == 1 and "preparing," not in text.partition("\n")[0]
    assert ("1 unreadable" in text) == (name == "status.json")


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_torn_evaluation_is_damage_unless_it_may_be_in_the_middle_of_being_written(tmp_path, state):
    run = a_run(tmp_path / "one", state=state, why="step 7: loss nan.")
    with (run / rundir.EVALS).open("a") as file:
        file.write('{"step": 300, "ta')
    text = shown(tmp_path, width=400)
    assert text.count(f"{run}/evals.jsonl") == text.count("step 7: loss nan.") == (state == "failed")


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    a_run(tmp_path / ("a-long-name-of-a-run-" * 6), state="failed", why="because " * 40)
    a_run(tmp_path / "other", state="running", steps=100)
    lines = shown(tmp_path, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 6 + 1 or len(lines) == 6  # the running one may have no verdict


def test_a_low_terminal_says_how_many_are_left_out(tmp_path):
    for number in range(9):
        a_run(tmp_path / f"run-{number}")
    text = shown(tmp_path, height=8)
    assert len(text.splitlines()) <= 8
    assert "and 4 more" in text


def test_only_the_ends_of_long_files_are_read(tmp_path):
    path = tmp_path / "steps.jsonl"
    with path.open("w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps({"step": step, "loss": 1 / step, "pad": "x" * 60}) + "\n")
        file.write('{"step": 100001, "lo')  # torn
    tail = read_last_records(path)
    assert tail[-1]["step"] == 100_000 and 500 < len(tail) < 1000
    places = list(sample_records(path, 40))
    assert 38 <= len(places) <= 41 and places[0][0]["step"] == 1
    firsts = [records[0]["step"] for records in places]
    assert firsts == sorted(firsts) and firsts[20] == pytest.approx(50_000, rel=0.05)
    assert path.stat().st_size / 50 > TAIL_BYTES + 41 * SAMPLE_BYTES


def test_a_run_that_does_not_change_is_read_once(tmp_path, monkeypatch):
    a_run(tmp_path / "one")
    watcher = Watcher(tmp_path)
    first = watcher.read_views()
    monkeypatch.setattr(rundir, "read_status", lambda path: pytest.fail("read again"))
    assert watcher.read_views() == first


def test_runs_are_found_in_folders_but_not_inside_runs(tmp_path):
    outer = a_run(tmp_path / "x" / "outer")
    a_run(outer / "checkpoints" / "inner")
    assert list_run_folders(tmp_path) == [outer] and list_run_folders(outer) == [outer]


def test_once_prints_a_frame_and_mistakes_are_named(tmp_path, capsys):
    a_run(tmp_path / "one")
    assert cli.main(["watch", str(tmp_path), "--once"]) == 0
    assert "300/300" in capsys.readouterr().out
    assert cli.main(["watch", str(tmp_path / "gone")]) == 4
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["watch", str(tmp_path / "empty"), "--once"]) == 4
    assert "no run in it" in capsys.readouterr().err
    assert cli.main(["watch", str(tmp_path), "--interval", "0"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", ["q", signal.SIGINT, signal.SIGTERM])
def test_the_live_view_leaves_the_terminal_as_it_was(tmp_path, how):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    import termios

    a_run(tmp_path / "one")
    control, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    words = [sys.executable, "-m", "fivetune", "watch", str(tmp_path), "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "20"}
    process = subprocess.Popen(words, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    seen, deadline = b"", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([control], [], [], 0.1)[0]:
            before_it = b"300/300" in seen
            seen += os.read(control, 65536)
            if b"300/300" in seen and not before_it:
                os.write(control, b"q") if how == "q" else process.send_signal(how)
    assert process.poll() == 0
    assert termios.tcgetattr(terminal) == before
    assert seen.count(b"\x1b[?1049h") == 1
    os.close(terminal)
    os.close(control)


def test_scores_on_the_terminal_have_their_interval(capsys):
    line = make_eval(7, {"f1": 93.5, "total": 24}, intervals={"f1": [90.2, 95.5]}, seconds=1.0)
    record = make_run(evals=[line]).evals[0]
    Progress().show_evaluation(record)
    assert "eval at step 7: f1 93.50 (90.2-95.5)" in " ".join(capsys.readouterr().err.split())


def test_what_an_active_run_does_is_shown(tmp_path):
    run = RunDir.create(tmp_path / "one")
    run.write_config("task: {name: squad_v2}\n")
    run.update_status(state="running")
    ActivityFile(run.path).update(Activity("evaluating", 30, 600))
    assert "evaluating 30 of 600" in shown(tmp_path)
    run.close()
