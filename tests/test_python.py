"""Python has a function for each command: the same names, typed results, tables in memory, errors without flags."""

from __future__ import annotations

import json
import pickle
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import fivetune
from fivetune.errors import ConfigError, DataError, FiveTuneError, RunDirError

ROWS = [{"text": f"the {colour} hat {i}", "label": colour} for i in range(12) for colour in ("red", "blue")]
GOLD = [{"text": "late", "label": "delivery"}, {"text": "money back", "label": "refund"}]


@pytest.fixture
def folder(tickets_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The finished run and its data, beside the working directory, in which the functions write."""
    monkeypatch.chdir(tmp_path)
    return tickets_folder


def test_new_writes_what_train_takes_and_an_error_names_arguments(folder: Path) -> None:
    started = fivetune.new(folder / "tickets.csv", model="t5-nano", columns={"label": "label"})
    assert started.recipe.is_file() and started.plan.reading.task == "classification"
    with pytest.raises(ConfigError, match=r"exists\..* Add overwrite=True to write it again, or give output\.$"):
        fivetune.new(folder / "tickets.csv")
    with pytest.raises(ConfigError, match=r"^seed -1: "):
        fivetune.new(folder / "tickets.csv", output="other", seed=-1)
    with pytest.raises(FiveTuneError, match=r"none\.csv"):
        fivetune.new("none.csv")


@pytest.mark.parametrize("form", ["records", "pandas", "polars"])
def test_score_takes_files_tables_and_lists(form: str, tmp_path: Path) -> None:
    gold: Any = GOLD
    if form != "records":
        gold = pytest.importorskip(form).DataFrame(GOLD)
    found = fivetune.score("classification", gold, ["delivery", "delivery"], against=["refund", "refund"])
    assert found.scores["accuracy"] == 50 and found.num_examples == 2 and found.differences["accuracy"].p_value <= 1
    path = tmp_path / "gold.jsonl"
    path.write_text("".join(f"{json.dumps({'id': str(i), **row})}\n" for i, row in enumerate(GOLD)))
    by_id = fivetune.score("classification", str(path), {"1": "refund", "0": "delivery"})
    assert by_id.scores["accuracy"] == 100 and by_id.as_dict()["intervals"] == dict(by_id.intervals)
    with pytest.warns(UserWarning, match="1 ids are not in the data"):
        fivetune.score("classification", path, {"0": "x", "1": "y", "2": "z"})
    with pytest.raises(DataError, match=r"^predictions: 1 of 2 questions are missing.* with missing='wrong'\.$"):
        fivetune.score("classification", path, {"1": "refund"})
    with pytest.raises(DataError, match=r"^references\[1\]: label is null"):
        fivetune.score("classification", [GOLD[0], {"text": "x", "label": None}], ["a", "b"])
    with pytest.raises(ConfigError, match="two files are needed"):
        fivetune.score("classification")


def test_predictions_of_a_run_are_scored(folder: Path) -> None:
    run = fivetune.open_run(folder / "runs/tickets")
    texts = ["where is my parcel", "i want my money back"]
    gold = [{"text": text, "label": label} for text, label in zip(texts, ("delivery", "refund"), strict=True)]
    assert fivetune.score(folder / "runs/tickets", gold, run.predict(texts)).scores["accuracy"] == 100


def test_inspect_finds_leaks_of_tables(folder: Path) -> None:
    found = fivetune.inspect(ROWS, task="classification", against=ROWS[:2])
    assert found.sets["train"]["num_examples"] == 24 and found.sets["train"]["sources"] == ["data"]
    assert found.leakage and "data:" in found.recipe and "/tmp" not in json.dumps(found.facts)
    assert found.build_page().title == "Data for classification"
    named = fivetune.inspect(folder / "tickets.csv", task="classification")
    assert named.sets["train"]["num_examples"] == 40 and named.leakage == {}
    with pytest.raises(ConfigError, match=r"^near: 2 is not a similarity"):
        fivetune.inspect(ROWS, task="classification", near=2)
    with pytest.raises(ConfigError, match=r"^task: is needed to read data"):
        fivetune.inspect(ROWS)


def test_diagnose_returns_verdicts_with_advice(folder: Path, tmp_path: Path) -> None:
    found = fivetune.diagnose(folder / "runs/tickets")
    assert found.stats.state == "finished" and found.as_dict()["source"] == str(folder / "runs/tickets")
    assert all(one.message and one.advice for one in found.verdicts) and found.describe_time()
    for wrong, words in ((tmp_path / "none", "no such run or log"), (tmp_path, "run")):
        with pytest.raises(RunDirError, match=words):
            fivetune.diagnose(wrong)
    with pytest.raises(ConfigError, match=r"^devices: 0 is not a number"):
        fivetune.diagnose(folder / "runs/tickets", devices=0)


def test_export_proves_and_refuses(folder: Path, tmp_path: Path) -> None:
    run = folder / "runs/tickets"
    with pytest.raises(ConfigError, match=r"^format='gguf': is not offered"):
        fivetune.export(run, "gguf")
    with pytest.raises(ConfigError, match=r"^examples 0: "):
        fivetune.export(run, "hf", examples=0)
    found = fivetune.export(run, "hf", output=tmp_path / "made", examples=4)
    assert found.verdict == "use" and not found.reasons and found.proof["identical_predictions"] == 1
    assert fivetune.predict(found.folder, ["my parcel is late"])[0].prediction == "delivery"
    with pytest.raises(ConfigError, match=r"^output .*made: exists\. Add overwrite=True"):
        fivetune.export(run, "hf", output=tmp_path / "made")


def test_tune_refuses_before_a_trial_runs(tmp_path: Path) -> None:
    recipe = {"model": {"path": "t5-nano"}, "task": {"name": "classification"}, "data": {"eval_share": 0.2}}
    with pytest.raises(ConfigError, match=r"search\.over is missing"):
        fivetune.tune(recipe, folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_serve_answers_until_it_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    from fivetune.delivery.serving import server

    started, lines, made = threading.Event(), [], []
    build = server.build_server

    def keep(*args: Any, **settings: Any) -> Any:
        made.append(build(*args, **settings))
        return made[0]

    def note(line: str) -> None:
        lines.append(line)
        if line.startswith("page: "):
            started.set()

    monkeypatch.setattr(server, "build_server", keep)
    ended: list[bool] = []
    thread = threading.Thread(
        target=lambda: ended.append(fivetune.serve(folder / "runs/tickets", port=0, write_line=note))
    )
    thread.start()
    assert started.wait(60)
    [address] = [line.removeprefix("serving on ") for line in lines if line.startswith("serving on ")]
    request = urllib.request.Request(
        f"{address}/predict", data=b'{"text": "my parcel is late"}', headers={"Content-Type": "application/json"}
    )
    assert "delivery" in urllib.request.urlopen(request, timeout=30).read().decode()
    made[0].should_exit = True  # as its signal does
    thread.join(30)
    assert ended == [True]
    for wrong, words in (({"port": 99_999}, r"^port 99999: "), ({"max_batch": 0}, r"^max_batch 0: must be above 0")):
        with pytest.raises(ConfigError, match=words):
            fivetune.serve(folder / "runs/tickets", **wrong)


def test_the_functions_are_pickled_by_name_and_their_errors_keep_their_class(tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(fivetune.train)) is fivetune.train  # noqa: S301
    with pytest.raises(FiveTuneError) as caught:
        fivetune.open_run(tmp_path, {"optimizer.lr": 1.0})
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), type(caught.value))  # noqa: S301
