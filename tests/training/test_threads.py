"""The number of CPU threads: chosen at the start, and again when the cores are taken or free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from kit import recipe

import fivetune
from fivetune import cli
from fivetune.machine.telemetry.devices import find_bf16_units
from fivetune.training import threads
from fivetune.training.threads import ThreadControl, measure_threads


@pytest.fixture(autouse=True)
def keep_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def is_measured(monkeypatch, **seconds: float) -> None:
    """The probe takes so long with t1, t2, t4 threads."""
    found = {int(name[1:]): value for name, value in seconds.items()}
    monkeypatch.setattr(threads, "measure_threads", lambda most, now: found)


@pytest.mark.parametrize(
    ("seconds", "number", "why"),
    [
        ({"t1": 1.0, "t2": 0.55, "t4": 0.3}, 4, ""),
        ({"t1": 1.0, "t2": 0.9, "t4": 1.05}, 4, ""),
        (
            {"t1": 1.0, "t2": 1.5, "t4": 3.0},
            1,
            "1 of 4 CPU threads, measured 3.0 times as fast as 4: other programs use the cores",
        ),
        (
            {"t1": 1.0, "t2": 0.5, "t4": 3.0},
            2,
            "2 of 4 CPU threads, measured 6.0 times as fast as 4: other programs use the cores",
        ),
    ],
)
def test_the_start_takes_the_fastest_number_where_it_is_clearly_faster(monkeypatch, seconds, number, why):
    is_measured(monkeypatch, **seconds)
    assert ThreadControl(4).start(measure=True) == why
    assert torch.get_num_threads() == number


def test_a_number_of_the_user_stays(monkeypatch):
    is_measured(monkeypatch, t1=1.0, t2=9.0)
    for control in (ThreadControl.from_setting(2), ThreadControl(2, is_fixed=True)):
        assert control.start(measure=True) == "" and torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    control = ThreadControl.from_setting(None)
    assert (control.most, control.is_fixed) == (2, True)
    assert ThreadControl(2).start(measure=False) == ""


def test_a_run_follows_its_cores(monkeypatch):
    """Waiting is what threads do whose cores others use: the process was hardly busy."""
    control = ThreadControl(2)
    is_measured(monkeypatch, t1=1.0, t2=0.5)
    control.start(measure=True)
    is_measured(monkeypatch, t1=1.0, t2=4.0)
    assert control.update() == ""  # too early
    monkeypatch.setattr(threads, "SECONDS_BETWEEN", 0.0)
    control._wall -= 100
    assert control.update() == "1 of 2 CPU threads, measured 4.0 times as fast as 2: other programs use the cores"
    is_measured(monkeypatch, t1=1.0, t2=0.5)
    assert control.update() == "2 of 2 CPU threads, measured 2.0 times as fast as 1: the cores are free again"
    is_measured(monkeypatch, t1=1.0, t2=4.0)
    control._busy -= 1e6  # busy all the time: nothing is measured
    assert control.update() == ""


def test_every_number_of_threads_is_measured():
    before = torch.get_rng_state()
    assert {*measure_threads(6, 2)} == {1, 2, 3, 6} and all(seconds > 0 for seconds in measure_threads(2, 2).values())
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_says_how_many_threads_it_has_and_why(monkeypatch, tmp_path, model_folder):
    monkeypatch.setattr(threads, "count_cores", lambda: 2)
    monkeypatch.setattr(threads, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(threads, "BUSY_SHARE", 1e9)
    is_measured(monkeypatch, t1=1.0, t2=4.0)
    given = recipe(tmp_path, model_folder, train__num_threads=None, train__log_every_steps=2, train__num_steps=2)
    run = fivetune.train(given, quiet=True, preflight=False)
    why = "1 of 2 CPU threads, measured 4.0 times as fast as 2: other programs use the cores"
    assert run.machine.num_threads == 1 and run.machine.num_threads_why == why
    assert why in (tmp_path / "run" / "log.txt").read_text()
    is_measured(monkeypatch, t1=4.0, t2=1.0)
    run = fivetune.train(tmp_path / "run", {"train.num_steps": 4}, resume=True, quiet=True)
    assert run.machine.num_threads == 2


def test_a_change_during_a_run_is_recorded_for_its_resume(monkeypatch, tmp_path, model_folder):
    monkeypatch.setattr(threads, "count_cores", lambda: 2)
    monkeypatch.setattr(threads, "SECONDS_BETWEEN", 0.0)
    is_measured(monkeypatch, t1=4.0, t2=1.0)
    monkeypatch.setattr(ThreadControl, "update", lambda self: torch.set_num_threads(1) or "1 of 2 CPU threads")
    given = recipe(tmp_path, model_folder, train__num_threads=None, train__num_steps=1, eval__at_start=True)
    run = fivetune.train(given, quiet=True, preflight=False)
    assert "from step 1 on 1 of 2 CPU threads. Losses may differ in the last bits." in run.warnings  # while evaluating
    (part,) = run.machine.parts
    assert part.num_threads == 1 and part.changed[0] == "num_threads from step 1 on: 2 -> 1"
    is_measured(monkeypatch, t1=1.0, t2=4.0)
    run = fivetune.train(tmp_path / "run", {"train.num_steps": 2}, resume=True, quiet=True)
    assert run.machine.num_threads == 1 and not any("environment differs" in warning for warning in run.warnings)


def test_predict_and_evaluate_say_why_and_follow_their_cores(monkeypatch, tmp_path, model_folder, capsys):
    table = recipe(tmp_path, model_folder, train__num_steps=1)
    fivetune.train(table, quiet=True, preflight=False)
    monkeypatch.setattr(threads, "count_cores", lambda: 2)
    is_measured(monkeypatch, t1=1.0, t2=4.0)
    monkeypatch.setattr(ThreadControl, "from_setting", lambda given: ThreadControl(2))
    monkeypatch.setattr(ThreadControl, "update", lambda self: "2 of 2 CPU threads, again")
    run, source = str(tmp_path / "run"), table["data"]["eval"]
    source = source if isinstance(source, str) else source[0]
    for words in (["evaluate", run], ["predict", run, "--input", source], ["predict", run, "--inputs", "a text"]):
        assert cli.main(words) == 0
        printed = capsys.readouterr().err
        assert "1 of 2 CPU threads, measured 4.0 times as fast as 2: other programs use the cores\n" in printed
        assert "2 of 2 CPU threads, again\n" in printed


def test_threads_that_wait_do_not_spin():
    """The package sets OpenMP's policy before torch is imported, unless the user has; the same holds for caches."""
    program = "import os, fivetune; print(os.environ['OMP_WAIT_POLICY'])"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    for given, policy in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        found = subprocess.run(
            [sys.executable, "-c", program], env=environment | given, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == policy


GROWTH = """
import sys
if sys.argv[1] == "with":
    import fivetune
import torch
def read():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
torch.set_num_threads(1)
weight = torch.ones(1024, 256, dtype=torch.bfloat16)
for rows in range(20, 20 + 1200):
    torch.nn.functional.linear(torch.ones(rows, 256, dtype=torch.bfloat16), weight)
    if rows == 20 + 599:  # of AMX, freed programs leave gaps: the memory stops growing some 500 shapes after the limit
        before = read()
print(read() - before)
"""


@pytest.mark.skipif(find_bf16_units() not in ("AMX", "AVX512-BF16"), reason="oneDNN compiles products in bf16 for them")
@pytest.mark.release
def test_products_of_new_shapes_do_not_fill_the_memory():
    """Each shape of a product in bf16 is a compiled program of 0.4 to 1.2 MB; predict meets new ones in every round."""
    environment = {name: value for name, value in os.environ.items() if name not in fivetune.ENVIRONMENT}
    grown = {
        how: float(subprocess.check_output([sys.executable, "-c", GROWTH, how], env=environment, text=True))
        for how in ("with", "without")
    }
    assert grown["with"] < 0.6 * grown["without"], grown
