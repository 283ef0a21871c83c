"""Damaged predictions, traces and results of find-lr: named on the terminal and in the report, which omits them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_run, write_run

from fivetune.cli import main
from fivetune.reading.report.run.trace import build_trace_page
from fivetune.rundir import read_run
from fivetune.rundir.records import Run

NAN, HUGE = float("nan"), 1e308
DEEP = json.loads("[" * 900 + "]" * 900)  # valid, and deeper than a recursive function may go
WORK = {"name": "mm", "kind": "GEMM", "seconds": 0.1, "num": 2, "share": 1.0}
TRACE = {
    "source": "torch.profiler", "measures": "kernels", "window_seconds": 0.2, "num_steps": 2, "classes": [WORK],
    "top": [WORK],
    "devices": [{"index": 0, "name": "A100", "busy_seconds": 0.1, "gaps": [[1e-5, 1, 0.1]],
                 "longest_gap_seconds": 0.1, "host_bound_seconds": None}],
    "memory": {"kind": "device", "points": [[0.0, 1]], "peak_bytes": 9, "since_start": True, "parts": {"weights": 1}},
}  # fmt: skip
RATES = {
    "lrs": [1e-3, 1e-2], "losses": [3.0, 2.0], "smoothed": [3.0, 2.0], "steepest": None, "tenth": 1e-3, "lr": 1e-3,
    "stopped": "all rates were tried", "rule": "a tenth", "optimizer": "adamw",
}  # fmt: skip
LINE = {"id": "q1", "prediction": "a", "references": ["a"], "scores": {"exact": 1.0, "f1": 1.0}, "confidence": 0.5}
FILES = {"run/trace/summary.json": TRACE, "run.find-lr.json": RATES}
PREDICTIONS = "run/predictions/eval-250.jsonl"
NO_JSON = [b"", b" \n", b"{", b"[" * 100_000, b"[]", b"null", b"3", b'"text"', b"{}", b"\x00\xff\x80", b'{"a": "\xe5"}']
CHANGES: list[tuple[str, tuple[str | int, ...], Any]] = [
    *(("run/trace/summary.json", path, value) for path, value in (
        (("classes",), None), (("classes",), {}), (("classes", 0), None), (("classes", 0), "x"), (("measures",), 3),
        (("classes", 0, "seconds"), "1"), (("classes", 0, "seconds"), NAN), (("top", 0, "num"), 0.5), (("top",), 7),
        (("window_seconds",), NAN), (("window_seconds",), HUGE), (("window_seconds",), 10**400), (("num_steps",), "2"),
        (("devices", 0, "gaps"), [[1]]), (("devices", 0, "gaps"), 3), (("devices", 0, "gaps", 0, 2), None),
        (("devices", 0, "host_bound_seconds"), "x"), (("devices", 0, "busy_seconds"), HUGE), (("notes",), [3]),
        (("memory", "points"), [[1, 2, 3]]), (("memory", "parts"), []), (("memory", "parts", "weights"), "x"),
        (("notes",), DEEP), (("memory", "points"), DEEP),
    )),
    *(("run.find-lr.json", path, value) for path, value in (
        (("lrs",), []), (("lrs",), [1e-3]), (("losses",), None), (("losses",), "x"), (("losses", 0), NAN),
        (("losses", 0), None), (("losses", 1), HUGE), (("lrs", 0), 0), (("lrs", 0), -1.0), (("lrs", 1), "1e-2"),
        (("lr",), -1), (("lr",), 0), (("lr",), NAN), (("lr",), {}), (("stopped",), None), (("stopped",), 3),
        (("rule",), []), (("smoothed",), {"a": 1}), (("smoothed",), [True, 1.0]), (("smoothed", 1), float("inf")),
        (("lrs",), DEEP), (("rule",), DEEP),
    )),
]  # fmt: skip
LINES = [
    *NO_JSON[2:],
    *(json.dumps(LINE | change).encode() for change in (
        {"id": None}, {"id": 7}, {"id": []}, {"inputs": 3}, {"prediction": 3}, {"prediction": ["a"]},
        {"references": "a"}, {"references": [1]}, {"references": {}}, {"scores": []}, {"scores": {"f1": "1"}},
        {"scores": {"f1": NAN}}, {"scores": {"f1": HUGE}}, {"scores": {"f1": [1]}}, {"confidence": "high"},
        {"confidence": NAN}, {"confidence": float("inf")}, {"confidence": HUGE}, {"confidence": -HUGE},
        {"hit_cap": "yes"}, {"num_tokens": 1.5}, {"candidates": 3}, {"candidates": [{"text": "a"}]}, {"meta": []},
        {"candidates": [{"text": "a", "score": NAN}]}, {"num_input_tokens": {}}, {"skipped": 1},
        {"prediction": DEEP}, {"candidates": DEEP},
    )),
    json.dumps(LINE).encode()[:-5],
]  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A small run directory with a trace, and the result of find-lr next to it."""
    folder = tmp_path_factory.mktemp("damaged")
    run = fake_run()
    small = {name: lines[:3] for name, lines in run.predictions.items()}
    evals = [replace(record, num_examples=3) for record in run.evals]
    config = run.config | {"report": {}}
    status = replace(run.status, step=9)
    steps = run.steps[:9]
    write_run(folder / "run", replace(run, status=status, predictions=small, steps=steps, evals=evals, config=config))
    (folder / "run" / "trace").mkdir()
    for name, table in FILES.items():
        (folder / name).write_text(json.dumps(table))
    return folder


@pytest.fixture
def damage(written) -> Iterator[Callable[[str, bytes], Run]]:
    """Write bytes to a file of the run and read the run; the file is restored afterwards."""
    before: dict[Path, bytes] = {}

    def write(name: str, content: bytes) -> Run:
        path = written / name
        before[path] = path.read_bytes()
        path.write_bytes(content)
        return read_run(written / "run")

    yield write
    for path, content in before.items():
        path.write_bytes(content)


def change_value(table: Any, path: tuple[str | int, ...], value: Any) -> bytes:
    """The JSON of a table with one other value."""
    made = json.loads(json.dumps(table))
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(made).encode()


def test_whole_files_are_no_damage(written):
    run = read_run(written / "run")
    assert len(run.predictions["eval-250"]) == 3 and run.range_test["lr"] == 1e-3
    assert run.trace["busy_share"] == 0.5 and run.range_test["optimizer"] == "adamw"
    assert build_trace_page(run.trace, title="t").sections[0].parts and run.damage == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, content) for name in FILES for content in NO_JSON),
        *((name, change_value(FILES[name], path, value)) for name, path, value in CHANGES),
    ],
)
def test_a_damaged_result_is_left_out_and_named_once(damage, name, content):
    run = damage(name, content)
    assert len(run.damage) == 1 and f"/{name}" in run.damage[0] and "damaged: " in run.damage[0]
    assert run.damage[0].endswith("Restore the file. It is left out.") and run.warnings[-1] == run.damage[0]
    kept = {"run/trace/summary.json": run.trace, "run.find-lr.json": run.range_test}
    assert not kept.get(name) and sum(map(bool, kept.values())) == 1


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_of_predictions_is_left_out_and_named_once(damage, line):
    run = damage(PREDICTIONS, json.dumps(LINE).encode() + b"\n" + line)
    assert run.damage == []  # the file is read on access
    assert [one.id for one in run.predictions["eval-250"]] == [one.id for one in run.predictions["eval-250"]] == ["q1"]
    assert len(run.damage) == 1 and f"{PREDICTIONS}:2: damaged line (" in run.damage[0]
    assert run.warnings[-1] == run.damage[0] and run.damage[0].endswith("It is left out.")


@pytest.mark.parametrize(("num", "told"), [(0, "0 of 3"), (2, "2 of 3")])
def test_lost_lines_of_predictions_are_counted(damage, num, told):
    run = damage(PREDICTIONS, (json.dumps(LINE).encode() + b"\n") * num)
    assert len(run.predictions["eval-250"]) == num
    assert run.damage[0].endswith(f"{PREDICTIONS}: damaged: it has {told} predictions. Restore the file.")


def test_numbers_of_any_size_in_the_columns_of_the_data_are_no_damage(damage):
    run = damage(PREDICTIONS, (json.dumps(LINE | {"meta": {"tweet": 2**60}}).encode() + b"\n") * 3)
    assert len(run.predictions["eval-250"]) == 3 and run.damage == []


@pytest.mark.parametrize("name", FILES)
def test_unknown_keys_of_a_result_are_no_damage_at_any_depth(damage, name):
    run = damage(name, json.dumps(FILES[name] | {"new": DEEP, "large": HUGE}).encode())
    assert run.damage == [] and run.trace and run.range_test


@pytest.mark.parametrize("extra", [{"new": DEEP}, {"meta": {"topic": DEEP}}])
def test_deep_values_in_predictions_are_no_damage(damage, written, extra):
    run = damage(PREDICTIONS, (json.dumps(LINE | extra).encode() + b"\n") * 3)
    assert len(run.predictions["eval-250"]) == 3 and run.damage == []
    assert main(["report", str(written / "run")]) == 0


def test_a_path_moves_no_terminal(written, tmp_path, capsys):
    run = shutil.copytree(written / "run", tmp_path / "a\x1b[2Jb")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.endswith("/a[U+001B][2Jb/report.html\n")


def test_the_report_and_the_terminal_name_all_damage(damage, written, capsys):
    names = ["run/predictions/eval-0.jsonl", PREDICTIONS, *FILES]
    for name in names:
        damage(name, b"{}\n\x80")
    assert main(["report", str(written / "run")]) == 0
    told, page = capsys.readouterr().err, (written / "run" / "report.html").read_text()
    assert told.count("warning: ") == len(names) and all(told.count(f"/{name}") == 1 for name in names)
    assert all(page.count(f"/{name}") == 1 for name in names)
    assert "Damaged lines in all: 2." in told and "<h2>Trace" not in page and "range test" not in page


def test_a_comparison_names_damaged_predictions(damage, written, tmp_path, capsys):
    run = read_run(written / "run")
    other = write_run(tmp_path / "other", replace(run, config=run.config | {"optimizer": {"lr": 0.1}}))
    damage(PREDICTIONS, b"\x80\n")
    page = tmp_path / "page.html"
    assert main(["compare", str(written / "run"), str(other), "--output", str(page)]) == 0
    assert capsys.readouterr().out.count(f"{PREDICTIONS}:1: damaged line") == 1
    assert page.read_text().count(f"{PREDICTIONS}:1: damaged line") == 1


@pytest.fixture
def lose(damage, written) -> Callable[[str], None]:
    """Delete a file of the run; it is restored afterwards."""

    def delete(name: str) -> None:
        damage(name, b"")
        (written / name).unlink()

    return delete


def test_a_lost_file_of_predictions_is_named_once(lose, written):
    lose(PREDICTIONS)
    run = read_run(written / "run")
    record = next(one for one in run.evals if one.step == 250)
    assert run.damage == []
    assert run.read_predictions(record) == run.read_predictions(record) == run.predictions["eval-250"] == []
    assert (
        run.damage
        == [f"{written / PREDICTIONS}: missing: the evaluation made 3 predictions. Restore the file."]
        == run.warnings[-1:]
    )
    with pytest.raises(KeyError):
        run.predictions["eval-251"]


def test_the_report_and_the_terminal_name_lost_predictions(lose, written, capsys):
    names = ["run/predictions/eval-0.jsonl", PREDICTIONS]
    for name in names:
        lose(name)
    assert main(["report", str(written / "run")]) == 0
    told, page = capsys.readouterr().err, (written / "run" / "report.html").read_text()
    assert told.count("warning: ") == 2 and all(told.count(f"/{name}: missing: ") == 1 for name in names)
    assert all(page.count(f"/{name}: missing: ") == 1 for name in names)


def test_a_comparison_names_lost_predictions(lose, written, tmp_path, capsys):
    run = read_run(written / "run")
    other = write_run(tmp_path / "other", replace(run, config=run.config | {"optimizer": {"lr": 0.1}}))
    lose(PREDICTIONS)
    page = tmp_path / "page.html"
    assert main(["compare", str(written / "run"), str(other), "--output", str(page)]) == 0
    assert capsys.readouterr().out.count(f"{PREDICTIONS}: missing: ") == 1
    assert page.read_text().count(f"{PREDICTIONS}: missing: ") == 1


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_file_of_predictions_is_read_once(command, written, tmp_path, monkeypatch):
    run = read_run(written / "run")
    write_run(tmp_path / "other", replace(run, config=run.config | {"optimizer": {"lr": 0.1}}))
    read: list[Path] = []
    plain = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), plain(path))[1])
    folders = [written / "run", tmp_path / "other"] if command == "compare" else [written / "run"]
    assert main([command, *map(str, folders), "--output", str(tmp_path / "page.html")]) == 0
    files = [path for path in read if path.parent.name == "predictions"]
    names = ("eval-0", "eval-250") if command == "report" else ("eval-250",)
    assert sorted(files) == sorted(folder / "predictions" / f"{name}.jsonl" for folder in folders for name in names)


def test_the_name_of_a_split_is_no_path(damage, written):
    (written / "run" / "eval-250.jsonl").write_text(json.dumps(LINE) + "\n")
    records = [json.loads(line) for line in (written / "run" / "evals.jsonl").read_text().splitlines()]
    splits = ("../eval", "x" * 5000, "\0")
    lines = [json.dumps(record | {"split": split}) for record in records if record["step"] == 250 for split in splits]
    run = damage("run/evals.jsonl", "\n".join(lines).encode())
    assert [run.read_predictions(record) for record in run.evals] == [[], [], []]
    assert sum(": missing: " in text for text in run.damage) == 3
