"""Search: what may be searched, how a study is shared and resumed, and one real study of a tiny model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any

import kit
import pytest
import yaml

from fivetune import cli
from fivetune.config import load_config
from fivetune.distributed.processes import jobs
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, IncompleteError, InterruptedRunError
from fivetune.fleet.experiments import search
from fivetune.fleet.experiments import study as study_module
from fivetune.fleet.experiments.space import build_trial_config, load_search, select_recipe_values
from fivetune.fleet.experiments.study import Study, record_heartbeat
from fivetune.reading.report.page.parts import Chart, Problem, Text
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.search import build_search_page
from fivetune.rundir import CHECKSUMS, EVALS, STATUS, read_status, write_json
from fivetune.rundir.layout import PLAN
from fivetune.rundir.plan import Plan
from fivetune.rundir.records import EvalRecord
from fivetune.types import Search, Trial

RATES = {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}}


def basic(over: Any = None, **section: Any) -> dict[str, Any]:
    return {
        "run": {"dir": "runs/x"},
        "model": {"path": "m"},
        "task": "squad_v2",
        "data": {"train": "t", "eval": "e"},
        "search": {"over": RATES if over is None else over, **section},
    }


def refusal(over: Any, **section: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_search(basic(over, **section))
    return str(caught.value).removeprefix("the given dict: ")


# --- the space ---


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({}, "search.over is missing. Give the settings"),
        ({"optimizer.lrr": {"low": 1, "high": 2}}, "search.over: optimizer.lrr is not a setting. Did you mean lr?"),
        ({"optimiser.lr": {"low": 1, "high": 2}}, "search.over: optimiser.lr: optimiser is not a setting"),
        ({"optimizer.lr": {"low": 1e-3, "high": 200}}, "search.over: optimizer.lr: Input should be less than or equal"),
        ({"optimizer.lr": {"low": 1e-3}}, "search.over.optimizer.lr: needs {low: ..., high: ...} or {choices: [...]}."),
        ({"optimizer.lr": {"lo": 1e-3}}, "search.over.optimizer.lr.lo is not a setting. Did you mean low or log?"),
        ({"optimizer.lr": {"low": 2e-3, "high": 1e-3}}, "search.over.optimizer.lr: low 0.002 is not below high 0.001."),
        ({"optimizer.lr": {"low": 0, "high": 1, "log": True}}, "search.over.optimizer.lr: log needs a low above 0"),
        (
            {"optimizer.lr": {"low": 1, "high": 2, "choices": [1]}},
            "search.over.optimizer.lr: choices exclude low, high, log and step.",
        ),
        ({"optimizer.lr": {"choices": ["big"]}}, "search.over: optimizer.lr: Input should be a valid number"),
        ({"optimizer.lr": {"choices": [[1]]}}, "search.over.optimizer.lr.choices.0: a choice is a number, a text"),
        ({"optimizer.name": {"choices": ["adamw", "sgdd"]}}, "search.over: optimizer.name: there is no 'sgdd'."),
        ({"train.global_batch_size": {"low": 8, "high": 64, "step": 0.5}}, "search.over.train.global_batch_size.step"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_runs(over, message):
    assert message in refusal(over)


def test_a_refusal_names_file_and_line(tmp_path):
    table = basic({"optimizer.lrr": {"low": 1, "high": 2}})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(table, sort_keys=False))
    with pytest.raises(ConfigError, match=r"r\.yaml:\d+: search\.over: optimizer\.lrr is not a setting"):
        load_search(tmp_path / "r.yaml")


def test_ranges_are_in_the_numbers_of_their_setting():
    over = load_search(
        basic(
            {
                "optimizer.weight_decay": {"low": 0, "high": 1},
                "schedule.warmup_steps": {"low": 0, "high": 1e2, "step": 10},
            }
        )
    ).search.over
    decay, warmup = over.values()
    assert (type(decay.low), decay.high) == (float, 1.0)
    assert (type(warmup.low), warmup.high, warmup.step) == (int, 100, 10)


def test_rules_between_settings_are_left_to_the_trial():
    over = {"train.batch_size": {"choices": [6, 8]}, "train.global_batch_size": {"choices": [6, 8]}}
    config = load_search(basic(over))
    assert build_trial_config(config, {"train.batch_size": 6, "train.global_batch_size": 6}, "d").train.batch_size == 6
    with pytest.raises(ConfigError, match="not a multiple"):
        build_trial_config(config, {"train.batch_size": 6, "train.global_batch_size": 8}, "d")


def test_a_grid_is_a_sweep():
    assert "grid is no sampler. Allowed: tpe, random." in refusal(RATES, sampler="grid")
    assert "fivetune compare" in refusal(RATES, sampler="grid")


def test_training_writes_the_section_through_and_ignores_it():
    config = load_config(basic())
    again = load_config(yaml.safe_load(config.as_yaml()))
    assert again.search == config.search and again.search.over["optimizer.lr"].high == 1e-2


def test_the_recipes_own_values_are_the_first_trial():
    config = load_search({**basic({**RATES, "model.dropout": {"choices": [None, 0.1]}}), "optimizer": {"lr": 0.5}})
    assert select_recipe_values(config) == {"model.dropout": 0.1}


# --- the study ---


def a_study(folder: Path, **section: Any) -> Study:
    return Study(load_search(basic(**section)), folder)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_two_processes_share_a_study_and_never_draw_the_same(tmp_path, storage):
    first, second = (a_study(tmp_path / "s", storage=storage, sampler="random", num_trials=4) for _ in range(2))
    trials = [one.start_next_trial() for one in (first, second, first, second)]
    assert [one.number for one in trials] == [0, 1, 2, 3]
    assert len({one.params["optimizer.lr"] for one in trials}) == 4
    assert first.start_next_trial() is None
    first.finish(trials[0], score=40.0, seconds=1.0)
    second.finish(trials[1], score=60.0, seconds=1.0)
    assert first.build_search().best.number == 1
    assert [one.state for one in second.build_search().trials] == ["finished", "finished", "running", "running"]


def test_a_trial_whose_process_died_is_marked_and_drawn_again(tmp_path):
    study = a_study(tmp_path / "s", num_trials=1)
    dead = study.start_next_trial()
    (tmp_path / "s" / "trial-000").mkdir()
    (tmp_path / "s" / "trial-000" / "kept").touch()
    dead.set_user_attr("owner", {**dead.user_attrs["owner"], "process": [2**22 - 1, 0.0]})
    again = a_study(tmp_path / "s", num_trials=1).start_next_trial()
    assert (again.number, again.params, again.user_attrs["run"]) == (1, dead.params, "trial-001")
    assert (tmp_path / "s" / "trial-001" / "kept").is_file() and not (tmp_path / "s" / "trial-000").exists()
    told = [(one.state, one.run, one.why) for one in study.build_search().trials]
    assert told == [("failed", "", "its process died; retried as trial 1"), ("running", "trial-001", "")]


@pytest.mark.parametrize(("silent_seconds", "num"), [(0.0, 1), (60.0, 1), (130.0, 2)])
def test_a_process_of_another_node_is_dead_once_it_is_silent(tmp_path, silent_seconds, num):
    study = a_study(tmp_path / "s", num_trials=1)
    trial = study.start_next_trial()
    trial.set_user_attr("owner", {"host": "other", "process": [1, 0.0]})
    trial.set_user_attr("seen", time.time() - silent_seconds)
    study.start_next_trial()
    assert len(study._study.trials) == num


def test_a_node_whose_clock_is_behind_is_refused(tmp_path):
    """Heartbeats of another node are in its future; that node would count its own processes as dead."""
    study = a_study(tmp_path / "s", num_trials=2)
    trial = study.start_next_trial()
    trial.set_user_attr("owner", {"host": "other", "process": [1, 0.0]})
    trial.set_user_attr("seen", time.time() + 20)
    assert study.start_next_trial() is not None
    trial.set_user_attr("seen", time.time() + 90)
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"at least (89|90) s behind that of other, .*; 30 s are allowed"
    ):
        study.start_next_trial()


def test_a_folder_without_locks_is_refused(tmp_path, monkeypatch):
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(FiveTuneEnvironmentError, match=r"s/\.study\.lock: cannot be locked: No locks .*--dir"):
        a_study(tmp_path / "s")


def test_a_trial_that_fails_again_and_again_is_given_up(tmp_path):
    study = a_study(tmp_path / "s", num_trials=1)
    for _ in range(3):
        study.fail(study.start_next_trial(), "killed", retry=True)
    assert study.start_next_trial() is None
    assert [(one.state, one.why) for one in study.build_search().trials] == [
        ("failed", "killed; retried as trial 1"),
        ("failed", "killed; retried as trial 2"),
        ("failed", "killed"),
    ]


def test_another_recipe_does_not_go_on_with_a_study(tmp_path):
    a_study(tmp_path / "s")
    a_study(tmp_path / "s", num_trials=99)
    with pytest.raises(ConfigError, match=r"holds a study with search\.seed 0, now it is 1"):
        a_study(tmp_path / "s", seed=1)


def test_only_the_best_weights_stay(tmp_path):
    study = a_study(tmp_path / "s", num_trials=3)
    for number, score in enumerate((40.0, 60.0, 50.0)):
        trial = study.start_next_trial()
        (tmp_path / "s" / f"trial-{number:03d}" / "model").mkdir(parents=True)
        (tmp_path / "s" / f"trial-{number:03d}" / "steps.jsonl").touch()
        study.finish(trial, score=score, seconds=1.0)
    assert [path.parent.name for path in (tmp_path / "s").glob("*/model")] == ["trial-001"]
    assert len(list((tmp_path / "s").glob("*/steps.jsonl"))) == 3


def test_a_storage_that_cannot_be_opened_and_optuna_missing(tmp_path, monkeypatch):
    with pytest.raises(FiveTuneEnvironmentError, match=r"search\.storage nodb://x: cannot be opened"):
        a_study(tmp_path / "s", storage="nodb://x")
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"optuna is not installed. Install it: pip install"):
        a_study(tmp_path / "t")


# --- the loop, with trainings that only write what a training writes ---


class FakeChild:
    """A training that has written three evaluations of `optimizer.lr` times 1,000 and ends when it is asked."""

    exit_code = 0

    def __init__(self, words: list[str], log: Path) -> None:
        recipe = load_config(words[1])
        self.run = Path(recipe.run.dir)
        self.looks, self.code_now = 0, None
        score = recipe.optimizer.lr * 1000  # type: ignore[attr-defined]
        self.run.mkdir()
        write_json(self.run / STATUS, {"best": {"step": 2, "metric": "f1", "score": score}})
        write_json(self.run / PLAN, Plan(2, 3, 1, 1).as_dict())
        evals = [
            EvalRecord(step, "squad_v2", 1, "eval", 2, 0, {"f1": score + step / 100}, 1.0, {}, 16, 1.0)
            for step in (0, 1, 2)
        ]
        (self.run / EVALS).write_text("".join(json.dumps(one.as_dict()) + "\n" for one in evals))
        self.pid = os.getpid()

    @property
    def code(self) -> int | None:
        self.looks += 1
        return self.code_now if self.code_now is not None else (self.exit_code if self.looks > 1 else None)

    def stop(self) -> None:
        """It has finished just before."""
        self.code_now = 0
        write_json(self.run / CHECKSUMS, {STATUS: {"size": 1, "crc32": 2}})

    def __enter__(self) -> FakeChild:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def read_error(self) -> str:
        return "step 7: loss nan"


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(search, "Job", FakeChild)
    monkeypatch.setattr(search, "POLL_SECONDS", 0.0)


def tuned(folder: Path, over: Any, **section: Any) -> tuple[Search, list[str]]:
    said: list[str] = []
    found = search.tune(load_search(basic(over, **section)), folder=folder, write_line=said.append)
    assert said[0].endswith(f"fivetune watch {found.folder}") and found.folder == str(folder)
    return found, said[1:]


def tuned_in_order(folder: Path, rates: list[float], **section: Any) -> tuple[Search, list[str]]:
    """A study that tries these learning rates one after the other."""
    over = {"optimizer.lr": {"choices": rates}}
    study = a_study(folder, over=over, num_trials=len(rates), **section)
    for rate in rates:
        study._study.enqueue_trial({"optimizer.lr": rate})
    return tuned(folder, over, num_trials=len(rates), **section)


def test_a_database_that_fails_is_named(tmp_path, fast, monkeypatch):
    def lose(study: Any, trial: Any, run: Path) -> FakeChild:
        (study.folder / "study.db").write_bytes(b"no database" * 100)
        return start(study, trial, run)

    start = search._start_trial
    monkeypatch.setattr(search, "_start_trial", lose)
    with pytest.raises(FiveTuneEnvironmentError, match=r"search\.storage sqlite: failed: .*Finished trials are kept"):
        tuned(tmp_path / "s", RATES, storage="sqlite", num_trials=2)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [12.5, None])
def test_the_time_of_a_resumed_trial_is_that_of_all_parts_or_unknown(tmp_path, fast, monkeypatch, seconds):
    """It was the time of the last part: 0.05 s."""

    class StoppedChild(FakeChild):
        def __init__(self, words: list[str], log: Path) -> None:
            if "--resume" not in words:
                super().__init__(words, log)
                write_json(self.run / STATUS, {"state": "interrupted", "begun": True})
                raise KeyboardInterrupt
            self.run, self.looks, self.code_now, self.pid = Path(words[1]), 0, None, os.getpid()
            best = {"step": 2, "metric": "f1", "score": 5.0}
            write_json(self.run / STATUS, {"state": "finished", "begun": True, "best": best, "seconds": seconds})

    monkeypatch.setattr(search, "Job", StoppedChild)
    with pytest.raises(InterruptedRunError):
        tuned(tmp_path / "s", RATES, num_trials=1)
    found, _ = tuned(tmp_path / "s", RATES, num_trials=1)
    assert [one.seconds for one in found.trials if one.state == "finished"] == [seconds]


@pytest.mark.slow
def test_worse_trials_are_stopped_early(tmp_path, fast):
    found, said = tuned_in_order(tmp_path / "s", [5e-3, 6e-3, 1e-3, 9e-3], startup_trials=2)
    assert [one.state for one in found.trials] == ["finished", "finished", "pruned", "finished"]
    assert found.best is not None and found.best.settings == {"optimizer.lr": 9e-3}
    assert found.trials[2].curve == ((1, 1.01), (2, 1.02)) and "pruned" in said[2]
    status = read_status(tmp_path / "s" / "trial-002")
    assert (status.state, status.why) == ("pruned", "pruned after evaluation 2")
    assert not (tmp_path / "s" / "trial-002" / CHECKSUMS).exists()
    best = load_config(tmp_path / "s" / "best.yaml")
    assert best.optimizer.lr == 9e-3 and best.run.dir == "runs/x-best" and not best.search.over  # type: ignore[attr-defined]


def test_no_file_of_a_study_holds_a_secret(tmp_path, fast):
    token = "hf_" + "aB3" * 11
    config = load_search({**basic(RATES, num_trials=1), "report": {"title": f"mine {token}"}})
    search.tune(config, folder=tmp_path / "s", write_line=print)
    assert load_config(tmp_path / "s" / "best.yaml").report.title == "mine (hidden)"
    search.tune(config, folder=tmp_path / "s", write_line=print)  # the recipe is still that of the study
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert {"best.yaml", "trial-000.yaml", "search.html", "study.db"} <= {path.name for path in files}
    assert [path for path in files if token.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_divergence_counts_as_a_bad_trial_and_other_failures_as_none(tmp_path, fast, monkeypatch):
    monkeypatch.setattr(FakeChild, "exit_code", 5)
    with pytest.raises(IncompleteError, match="no trial has a score"):
        tuned(tmp_path / "a", RATES, num_trials=1)
    monkeypatch.setattr(FakeChild, "exit_code", 3)
    with pytest.raises(IncompleteError, match=r"all of 3 trials failed, the last one: step 7: loss nan"):
        tuned(tmp_path / "b", RATES, num_trials=9)


def test_a_trial_that_another_process_took_over_is_left_to_it(tmp_path, fast, monkeypatch):
    def lose(study: Study, trial: Any, *args: Any) -> bool:
        monkeypatch.undo()
        monkeypatch.setattr(search, "Job", FakeChild)
        trial.set_user_attr("owner", {"host": "other", "process": [1, 0.0]})
        trial.set_user_attr("seen", 0.0)
        other = a_study(study.folder, num_trials=1)
        other.finish(other.start_next_trial(), score=7.0, seconds=1.0)
        trial.report(1.0, 1)
        return False

    monkeypatch.setattr(search, "_watch_trial", lose)
    found, said = tuned(tmp_path / "s", RATES, num_trials=1)
    assert said[0].startswith("trial 0: failed: its process died; retried as trial 1")
    assert [(one.state, one.score) for one in found.trials] == [("failed", None), ("finished", 7.0)]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_a_trial_that_waits_for_its_training_to_save_is_not_dead(tmp_path, fast, monkeypatch, storage):
    seen = Event()

    def record(trial: Any) -> None:
        record_heartbeat(trial)
        seen.set()

    def stop(child: FakeChild) -> None:
        seen.clear()
        assert seen.wait(20)
        child.code_now = 143

    monkeypatch.setattr(study_module, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(study_module, "record_heartbeat", record)
    monkeypatch.setattr(FakeChild, "stop", stop)
    found, _ = tuned_in_order(tmp_path / "s", [5e-3, 6e-3, 1e-3], startup_trials=2, storage=storage)
    assert [one.state for one in found.trials] == ["finished", "finished", "pruned"]


def test_an_error_of_a_heartbeat_is_raised_where_the_trial_is_watched(tmp_path, monkeypatch):
    study = a_study(tmp_path / "s", num_trials=1)
    trial = study.start_next_trial()
    study.finish(trial, score=1.0, seconds=1.0)
    monkeypatch.setattr(study_module, "HEARTBEAT_SECONDS", 0.0)
    with study.ignore_lost_trial(), study_module.Heartbeat(trial) as heartbeat:
        heartbeat._thread.join(20)
        heartbeat.check()
        pytest.fail("the error is lost")


@pytest.mark.slow
def test_an_interrupted_study_goes_on(tmp_path, fast, monkeypatch):
    def interrupt(*args: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(search, "_watch_trial", interrupt)
        with pytest.raises(InterruptedRunError, match="Resume with the same command") as caught:
            tuned(tmp_path / "s", RATES, num_trials=2)
    assert caught.value.exit_code == 130
    shutil.rmtree(tmp_path / "s" / "trial-000")
    found, _ = tuned(tmp_path / "s", RATES, num_trials=2)
    assert sorted(one.state for one in found.trials) == ["failed", "finished", "finished"]
    assert [one.run for one in found.trials] == ["", "trial-001", "trial-002"]


# --- the page ---


def test_the_page_shows_history_importance_and_every_trial():
    trials = tuple(
        Trial(
            number=i,
            state="finished" if i else "pruned",
            settings={"optimizer.lr": 10.0 ** -(i + 1)},
            score=10.0 * i,
            curve=((1, 5.0), (2, 10.0 * i)),
            seconds=3.0,
            why="" if i else "stopped early",
        )
        for i in range(5)
    )
    page = build_search_page(Search("s", "f1", True, trials, trials[4], {"optimizer.lr": 1.0}))
    html = render_html(page)
    assert [section.title for section in page.sections] == ["Result", "History", "Importance of settings", "Trials"]
    assert "Trial 4 is the best of 5 trials: 40.00." in html and "stopped early" in html
    history = next(part for part in page.sections[1].parts if hasattr(part, "data"))
    assert [trace["name"] for trace in history.data] == ["best so far", "finished", "pruned"]
    [rates] = [
        part for part in page.sections[2].parts if isinstance(part, Chart) and part.caption.startswith("Score by")
    ]
    assert [trace["name"] for trace in rates.data] == ["finished", "pruned"] and rates.layout["xaxis"][
        "type"
    ] == "linear"
    log = build_search_page(Search("s", "f1", True, trials, trials[4], {}, ("optimizer.lr",)))
    [rates] = [part for part in log.sections[2].parts if isinstance(part, Chart)]
    assert rates.layout["xaxis"]["type"] == "log"
    empty = build_search_page(Search("s", "f1", True, (), None))
    assert "No trial has finished yet" in render_html(empty)


def test_a_search_that_found_nothing_better_says_so_and_what_to_do_next():
    states = {0: "finished", 1: "finished", 2: "pruned", 3: "pruned"}
    trials = tuple(Trial(number=i, state=state, settings={}, score=9.0 - i) for i, state in states.items())
    found = Search("s", "f1", True, trials, trials[0], starts_from_recipe=True)
    page = build_search_page(found, recipe="runs/s/best.yaml", doubt="The score comes from silence.")
    lead, problem, command = page.sections[0].parts[:3]
    assert isinstance(lead, Text) and "the recipe's own values" in lead.body
    assert lead.body.endswith("No trial beat the recipe.")
    assert isinstance(problem, Problem) and problem.message == "The score comes from silence."
    assert command == Text("fivetune train runs/s/best.yaml", "code")
    history = next(part for part in page.sections[1].parts if isinstance(part, Chart))
    assert history.data[0]["name"] == "best so far" and history.data[0]["x"][-1] == 3  # until the last trial


# --- real trainings ---


class TrainingHere(FakeChild):
    """`fivetune WORDS` in this process, which has imported torch."""

    def __init__(self, words: list[str], log: Path) -> None:
        self.pid, self.looks, self.code_now = os.getpid(), 0, cli.main(words)


@pytest.mark.slow
def test_a_real_study_of_two_trials(tmp_path, model_folder, monkeypatch, capsys):
    monkeypatch.setattr(search, "Job", TrainingHere)
    table = kit.recipe(
        tmp_path,
        model_folder,
        search={
            "over": {"optimizer.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
            "num_trials": 2,
            "pruner": "none",
        },
    )
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(table))
    assert cli.main(["tune", str(tmp_path / "r.yaml"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = Path(result["study"])
    assert folder == tmp_path / "run-search" and result["num_trials"] == 2
    first = yaml.safe_load((folder / "trial-000" / "config.yaml").read_text())
    assert first["optimizer"]["lr"] == 1e-3  # the recipe's own
    best = folder / f"trial-{result['best']['trial']:03d}"
    assert search.read_best_score(best, "f1") == result["best"]["score"]
    assert [path.parent for path in folder.glob("*/model")] == [best]
    assert (folder / "search.html").is_file() and load_config(folder / "best.yaml").run.dir.endswith("run-best")


@pytest.mark.slow
def test_a_training_is_stopped_and_an_orphan_ended(tmp_path):
    mark = tmp_path / "saved"
    code = f"""
import pathlib, signal, sys, time
def save(*args):
    pathlib.Path({str(mark)!r}).touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
print("up", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None and orphan.stdout.readline() == b"up\n"
        known = jobs.identify_process(orphan.pid)
        assert jobs.is_alive(known) and not jobs.is_alive(known._replace(started=0.0))
        jobs.stop_orphan(known)
        assert mark.exists() and not jobs.is_alive(known)
    with jobs.Job(["train", str(tmp_path / "gone.yaml")], tmp_path / "log") as refused:
        assert refused.wait() == 2
    assert "no such recipe" in refused.read_error()
