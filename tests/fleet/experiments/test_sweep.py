"""Sweeps: the file and its mistakes, the order, the processes (a stand-in for `fivetune train`), going on, Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fivetune import rundir
from fivetune.cli import main
from fivetune.config import load_config
from fivetune.errors import ConfigError, RunDirError
from fivetune.fleet.experiments.record import compare_sweep, read_record, read_run_state
from fivetune.fleet.experiments.runs import estimate_seconds, run_sweep
from fivetune.fleet.experiments.sweep import find_sweep, read_sweep
from fivetune.rundir import write_json

RECIPE = "model: {path: m}\ntask: squad_v2\ndata: {train: t.json, eval: d.json}\noptimizer: {name: adamw, lr: 1e-3}\n"

# Writes a run directory as `fivetune train` does; what it does is said by the learning rate and by files.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
from fivetune import rundir
from fivetune.config import load_config
from fivetune.rundir.records import StepRecord

sys.argv.remove("train")
config = load_config(sys.argv[1])
folder, lr = Path(config.run.dir), config.optimizer.lr
with (folder.parent / "calls.txt").open("a") as calls:
    print(folder.name, *sys.argv[2:], file=calls)
if lr == 0.5:
    sys.exit("fivetune: step 3: loss nan. Lower optimizer.lr.")
if "--overwrite" in sys.argv:
    run = rundir.RunDir.create(folder, overwrite=True)
else:
    run = rundir.RunDir.resume(folder) if "--resume" in sys.argv else rundir.RunDir.create(folder)
rundir.write_text(folder / "config.yaml", config.as_yaml())
run.update_status(state="running", begun=True)
if lr == 0.25 and not (folder.parent / "crashed").exists():
    (folder.parent / "crashed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
if lr == 0.125:
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        run.update_status(state="interrupted", why="stopped by SIGINT")
        sys.exit(130)
score = 50 + 100 * lr + config.run.seed
run.append("evals.jsonl", {"step": 4, "split": "eval", "task": "squad_v2", "task_version": 1, "loss": 1.0,
                           "num_examples": 2, "num_clipped": 0, "rates": {}, "max_new_tokens": 8, "seconds": 1.0,
                           "scores": {"f1": score}})
for number in range(1, 5):
    step = StepRecord(number, 1.0, lr, lr, 1.0, 8, 2, 0.0, 2.0, 0.0, None, None, 1, 16)
    run.append("steps.jsonl", step.as_dict())
run.update_status(state="finished", step=4, seconds=3.0, best={"step": 4, "metric": "f1", "score": score})
"""

Write = Callable[..., Path]


@pytest.fixture
def sweep_file(tmp_path: Path) -> Write:
    (tmp_path / "base.yaml").write_text(RECIPE)

    def write(text: str, *, base: str = "base.yaml") -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_text(f"base: {base}\ndir: {tmp_path / 'runs'}\n{textwrap.dedent(text)}")
        return path

    return write


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs are made by TRAIN; returns the file in which it notes its calls."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    monkeypatch.setattr("fivetune.distributed.processes.jobs.PROGRAM", (sys.executable, str(script)))
    return tmp_path / "runs" / "calls.txt"


# --- the file ---


def test_grid_list_and_zip_multiply(sweep_file):
    sweep = read_sweep(
        sweep_file("""
        set: {train: {num_steps: 4}}
        list: [{name: small, train.batch_size: 4}, {train.batch_size: 8}]
        zip: {optimizer.lr: [1e-3, 2e-3], model.dropout: [0.0, 0.1]}
        grid: {train.forward: [flat, padded]}
        seeds: [3, 4]
    """)
    )
    assert len(sweep.variants) == 8 and len(sweep.runs) == 16
    assert next(iter(sweep.variants)) == "small lr=0.001 dropout=0 forward=flat"
    assert list(sweep.variants)[-1] == "batch_size=8 lr=0.002 dropout=0.1 forward=padded"
    config = sweep.runs[0].config
    assert (config.train.num_steps, config.train.batch_size, config.model.dropout, config.run.seed) == (4, 4, 0.0, 3)
    assert config.run.dir == str(sweep.folder / "small-lr-0.001-dropout-0-forward-flat-seed3")
    assert sweep.metric == "f1" and sweep.baseline == next(iter(sweep.variants))


@pytest.mark.parametrize(
    ("order", "expected"),
    [("interleaved", ["a1", "b1", "c1", "c2", "b2", "a2"]), ("by_variant", ["a1", "a2", "b1", "b2", "c1", "c2"])],
)
def test_order_of_the_runs(sweep_file, order, expected):
    names = ["{name: a, device: cpu}", "{name: b, optimizer.lr: 1e-2}", "{name: c, optimizer.lr: 1e-1}"]
    sweep = read_sweep(sweep_file(f"list: [{', '.join(names)}]\nseeds: [1, 2]\norder: {order}"))
    assert [f"{run.variant}{run.seed}" for run in sweep.runs] == expected


def test_baseline_by_settings_and_a_setting_over_the_base(sweep_file):
    path = sweep_file("grid: {optimizer.lr: [1e-3, 1e-2]}\nbaseline: {optimizer.lr: 1e-2}\nset: {train.num_steps: 5}")
    sweep = read_sweep(path, {"train.num_epochs": 2})
    assert sweep.baseline == "lr=0.01"
    assert (sweep.runs[0].config.train.num_steps, sweep.runs[0].config.train.num_epochs) == (None, 2)
    with pytest.raises(ConfigError, match=r"--learning_rate: is varied by .*sweep.yaml. Change it there"):
        read_sweep(path, {"learning_rate": 1})
    with pytest.raises(ConfigError, match=r"--run.seed: is set by the sweep. Change `seeds:` in .*sweep.yaml"):
        read_sweep(path, {"run.seed": 1})


def test_arguments_of_transformers_keep_their_meaning(sweep_file):
    sweep = read_sweep(
        sweep_file("""
        set: {ddp_timeout: 1800, doc_stride: 64, data.eval: [], validation_split_percentage: 20}
        grid: {bf16: [true, false], learning_rate: [1e-3]}
        baseline: {bf16: true}
    """)
    )
    assert list(sweep.variants) == ["precision=bf16 lr=0.001", "bf16=false lr=0.001"]
    first, second = (run.config for run in sweep.runs)
    assert (first.train.precision, second.train.precision) == ("bf16", "auto")
    assert (first.launch.timeout_minutes, first.data.eval_share) == (30, 0.2)
    assert (first.data.overlong, first.data.window_overlap) == ("windows", 64)
    with pytest.raises(ConfigError, match=r"sweep.yaml:3: .*fp16 has no setting of its own here. train.precision"):
        read_sweep(sweep_file("grid: {fp16: [true]}"))


def test_whole_sections_can_be_varied(sweep_file):
    sweep = read_sweep(sweep_file("grid: {optimizer: [{name: adamw, lr: 1e-2}, {name: adafactor}]}"))
    assert list(sweep.variants) == ["optimizer=name=adamw+lr=0.01", "optimizer=name=adafactor"]
    assert sweep.varied == ("optimizer.name", "optimizer.lr")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gird: {optimizer.lr: [1]}", r"sweep.yaml:3: gird is not a key of a sweep. Did you mean grid\?"),
        ("seeds: [1]", r"sweep.yaml: nothing is varied. Give grid, zip or list"),
        ("grid: {optimizer.lr: 1}", r"sweep.yaml:3: grid: optimizer.lr is 1. Give a list of values"),
        ("grid: {run.seed: [1, 2]}", r"sweep.yaml:3: grid: run.seed is set by the sweep. Use `seeds:`"),
        ("seeds: 3\ngrid: {optimizer.lr: [1]}", r"sweep.yaml:3: seeds is 3. Give a list of different whole numbers"),
        ("seeds: [2147483648]\ngrid: {optimizer.lr: [1]}", r":3: seeds is \[2147483648\]. Give a list of different"),
        ("order: random\ngrid: {optimizer.lr: [1]}", r":3: order is 'random'. Give interleaved or by_variant"),
        ("zip: {optimizer.lr: [1], device: [cpu, mps]}", r":3: zip: the lists differ in length .*lr 1, d"),
        ("grid: {optimizer.lr: [1], device: [cpu, cpu]}", r"two variants are called 'lr=1 device=cpu'"),
        ("list: [{device: cpu}, {name: b, device: auto}]\ngrid: {device: [cpu]}", r"device is varied twice"),
        ("list: [{name: a, device: auto}, {name: b, device: auto}]", r"variants 'a' and 'b' have the same settings"),
        (
            "grid:\n  optimizer.lr: [1]\n  optimizer.lrr: [1]",
            r"sweep.yaml:5: optimizer.lrr is not a setting. Did you mean lr\?.* \(variant lr=1 lrr=1\)",
        ),
        ("grid: {train.precision: [fp8, fp32]}", r"sweep.yaml:3: train.precision: Input should be .*'fp8'.*=fp8\)"),
        ("set: {train.num_stps: 4}\ngrid: {optimizer.lr: [1]}", r":3: train.num_stps is not a setting. Did you"),
        ("metric: f2\ngrid: {optimizer.lr: [1]}", r":3: metric: variant 'lr=1' has no score 'f2'. Did you"),
        ("baseline: lr=2\ngrid: {optimizer.lr: [1]}", r"sweep.yaml:3: baseline: there is no variant 'lr=2'"),
        ("corpus: {dir: x}\ngrid: {optimizer.lr: [1]}", r"sweep.yaml:3: corpus has no num_train"),
    ],
)
def test_mistakes_are_told_with_their_place(sweep_file, text, said):
    with pytest.raises(ConfigError, match=said):
        read_sweep(sweep_file(text))


@pytest.mark.parametrize(
    ("text", "said"), [("# nothing\n", "is empty. A sweep needs at least base"), ("[a, b]", "a sweep is a table .*'b'")]
)
def test_a_file_that_is_no_table(tmp_path, text, said):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"s.yaml: .*{said}"):
        read_sweep(tmp_path / "s.yaml")


def test_unknown_base_and_unknown_sweep(sweep_file):
    with pytest.raises(ConfigError, match=r"sweep.yaml:1: base: quickstrat: no such recipe. Did you mean quickstart"):
        read_sweep(sweep_file("grid: {optimizer.lr: [1]}", base="quickstrat"))
    with pytest.raises(ConfigError, match=r"quik: no such sweep, nor a run directory. Did you mean quick\?"):
        find_sweep("quik")


@pytest.mark.parametrize("name", ["quick", "system_c"])
def test_shipped_sweeps_are_valid(name):
    sweep = read_sweep(name)
    assert len(sweep.variants) >= 4 and len({run.name for run in sweep.runs}) == len(sweep.runs)


# --- the processes ---


@pytest.mark.slow
def test_runs_are_made_and_compared(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01, 0.02]}\nseeds: [1, 2]\nprice_per_hour: 3600"))
    assert set(estimate_seconds(sweep).values()) == {None}
    run_sweep(sweep, quiet=True)
    assert stand_in.read_text().split("\n")[0] == "lr-0.01-seed1 --quiet"
    assert load_config(sweep.folder / "recipes" / "lr-0.02-seed2.yaml") == sweep.runs[2].config
    comparison = compare_sweep(sweep.folder)
    first, second = comparison.variants
    assert (first.measures["score_best"].value, second.measures["score_best"].value) == (52.5, 53.5)
    assert second.against["score_best"].value == 1.0 and first.measures["cost"].value == 3.0
    assert set(estimate_seconds(sweep).values()) == {0.0}


def test_no_file_of_a_sweep_holds_a_secret(sweep_file, stand_in):
    token = "hf_" + "aB3" * 11
    text = f"title: {token}\ngrid: {{optimizer.lr: [0.01]}}\nset: {{report.title: mine {token}}}"
    sweep = read_sweep(sweep_file(text))
    run_sweep(sweep, quiet=True)
    run_sweep(sweep, resume=True, quiet=True)  # nothing counts as changed
    assert load_config(sweep.folder / "recipes" / "lr-0.01-seed0.yaml").report.title == "mine (hidden)"
    files = [path for path in sweep.folder.rglob("*") if path.is_file()]
    assert [path for path in files if token.encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_a_failed_run_is_told_and_the_others_go_on(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.5, 0.01]}\nretries: 2"))
    run_sweep(sweep, quiet=True)
    assert [line.split()[0] for line in stand_in.read_text().splitlines()] == ["lr-0.5-seed0"] * 3 + ["lr-0.01-seed0"]
    failed, good = compare_sweep(sweep.folder).variants
    assert failed.failures == ("lr-0.5-seed0: failed: step 3: loss nan. Lower optimizer.lr.",)
    assert (failed.runs, len(good.runs)) == ((), 1)


@pytest.mark.slow
def test_a_damaged_run_does_not_hide_the_others(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01, 0.02]}\nseeds: [1, 2]"))
    run_sweep(sweep, quiet=True)
    (sweep.folder / "lr-0.02-seed1" / "status.json").write_text('{"state": "fini')
    (sweep.folder / "lr-0.02-seed2" / "config.yaml").write_text("{")
    with (sweep.folder / "lr-0.01-seed1" / "evals.jsonl").open("a") as file:
        file.write("{}}\n{}\n")
    comparison = compare_sweep(sweep.folder)
    good, bad = comparison.variants
    assert len(good.runs) == 2 and bad.runs == ()
    assert "status.json:1:11: damaged" in bad.failures[0] and "config.yaml: damaged" in bad.failures[1]
    (warning,) = [text for text in comparison.warnings if "damaged line" in text]
    assert "lr-0.01-seed1/evals.jsonl:" in warning and "Damaged lines in all: 2." in warning


@pytest.mark.slow
def test_a_killed_run_goes_on(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.25]}\nretries: 1"))
    run_sweep(sweep, quiet=True)
    assert stand_in.read_text().splitlines() == ["lr-0.25-seed0 --quiet", "lr-0.25-seed0 --quiet --resume"]
    (entry,) = read_record(sweep.folder).runs
    assert (entry.name, entry.variant, entry.seed) == ("lr-0.25-seed0", "lr=0.25", 0)
    assert (entry.attempts, entry.failure) == (2, None)


@pytest.mark.slow
def test_finished_runs_are_kept_and_a_changed_sweep_is_refused(sweep_file, stand_in):
    run_sweep(read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}")), quiet=True)
    more = read_sweep(sweep_file("grid: {optimizer.lr: [0.01, 0.02]}"))
    with pytest.raises(RunDirError, match=r"runs: holds a sweep already, 1 of 2 runs are finished. Add --resume"):
        run_sweep(more, quiet=True)
    run_sweep(more, resume=True, quiet=True)
    assert [line.split()[0] for line in stand_in.read_text().splitlines()] == ["lr-0.01-seed0", "lr-0.02-seed0"]
    changed = read_sweep(sweep_file("grid: {optimizer.lr: [0.01, 0.02]}\nset: {train.num_steps: 9}"))
    with pytest.raises(RunDirError, match=r"lr-0.01-seed0: was trained with train.num_steps None, not 9"):
        run_sweep(changed, resume=True, quiet=True)
    run_sweep(changed, overwrite=True, quiet=True)
    assert len(list(more.folder.parent.glob("runs.before-*"))) == 1


def test_two_sweeps_do_not_share_a_directory(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}"))
    sweep.folder.mkdir()
    owned = rundir.lock_folder(sweep.folder)
    with pytest.raises(RunDirError, match=r"runs: in use by process \d+"):
        run_sweep(sweep, quiet=True)
    owned.close()
    (sweep.folder / "notes.txt").write_text("mine")
    with pytest.raises(RunDirError, match=r"runs: is not empty and holds no sweep"):
        run_sweep(sweep, overwrite=True, quiet=True)


@pytest.mark.slow
def test_a_sweep_whose_first_write_failed_can_be_started(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}"))
    sweep.folder.mkdir()
    for name in (".lock", "log.txt", f".sweep.json.{os.getpid()}.tmp"):
        (sweep.folder / name).touch()
    run_sweep(sweep, quiet=True)
    assert read_run_state(sweep.folder / "lr-0.01-seed0") == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_and_the_sweep(sweep_file, stand_in, number, tmp_path):
    path = sweep_file("grid: {optimizer.lr: [0.125, 0.01]}")
    train = (sys.executable, str(tmp_path / "train.py"))
    code = (
        f"import fivetune.distributed.processes.jobs as jobs; from fivetune.cli import main; jobs.PROGRAM = {train}; "
        f"raise SystemExit(main(['compare', {str(path)!r}]))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    run = tmp_path / "runs" / "lr-0.125-seed0"
    until = time.monotonic() + 60
    while read_run_state(run) != "running" and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(child.pid, number)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + number, errors
    assert "stopped with 0 of 2 runs finished. Resume with: fivetune compare" in errors
    assert read_run_state(run) == "interrupted" and not (tmp_path / "runs" / "lr-0.01-seed0").exists()


# --- the command ---


@pytest.mark.slow
def test_dry_run_makes_nothing(sweep_file, stand_in, capsys):
    path = sweep_file("grid: {optimizer.lr: [0.01, 0.02]}\nseeds: [1, 2]")
    assert main(["compare", str(path), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert ["3", "lr=0.02", "2", "unknown"] in [line.split() for line in printed.splitlines()]
    assert "2 variants, 4 runs" in printed and "time left: unknown, because no run of the sweep has finished" in printed
    assert not stand_in.parent.exists()
    run_sweep(read_sweep(path), quiet=True)
    main(["compare", str(path), "--dry-run", "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert {run["state"] for run in plan["runs"]} == {"finished"} and {run["seconds"] for run in plan["runs"]} == {0.0}


def test_dry_run_of_a_sweep_that_begins_anew(sweep_file, stand_in, capsys):
    path = str(sweep_file("grid: {optimizer.lr: [0.01]}"))
    run_sweep(read_sweep(path), quiet=True)
    assert main(["compare", path, "--dry-run", "--overwrite"]) == 0
    printed = capsys.readouterr().out
    assert "finished" not in printed and "time left: about" in printed and "is moved aside first" in printed
    assert main(["compare", path, "--resume", "--overwrite"]) == 2 and "exclude each other" in capsys.readouterr().err
    assert len(stand_in.read_text().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metric", "f2"], "--metric f2: there is no such name. Did you mean f1"),
        (["--baseline", "lr=2"], "--baseline lr=2: there is no such name. Did you mean lr=0.01?"),
        (["--output", "/nonexistent/x.html"], "--output /nonexistent/x.html: there is no folder /nonexistent."),
    ],
)
def test_wrong_flags_are_told_before_anything_runs_and_after(sweep_file, stand_in, capsys, flags, said):
    path = str(sweep_file("grid: {optimizer.lr: [0.01]}"))
    assert main(["compare", path, *flags]) == 2 and said in capsys.readouterr().err
    assert not stand_in.parent.exists()
    run_sweep(read_sweep(path), quiet=True)
    assert main(["compare", str(stand_in.parent), *flags]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_killed_sweep_left_is_told_of_each_run(sweep_file, stand_in, capsys):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01, 0.02, 0.03, 0.04]}"))
    run_sweep(sweep, quiet=True)
    folder = sweep.folder
    write_json(folder / "lr-0.02-seed0" / "status.json", {"state": "preparing"})
    write_json(folder / "lr-0.03-seed0" / "status.json", {"state": "failed", "why": "disk full"})
    shutil.rmtree(folder / "lr-0.04-seed0")
    assert main(["compare", str(folder)]) == 6
    printed = capsys.readouterr()
    assert "3 of 4 runs are missing" in printed.err
    told = [line.removeprefix("not compared: lr-0.0") for line in printed.out.splitlines() if "not compared" in line]
    assert [line.partition(" (")[0] for line in told] == [
        "2-seed0: interrupted: killed",
        "3-seed0: failed: disk full.",
        "4-seed0: not started.",
    ]


@pytest.mark.slow
def test_a_run_that_finished_without_its_sweep_is_recorded(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}"))
    run_sweep(sweep, quiet=True)
    record = read_record(sweep.folder)
    record.runs[0] = record.runs[0].model_copy(update={"seconds": None, "attempts": 0})
    record.write(sweep.folder)
    run_sweep(sweep, resume=True, quiet=True)
    entry = read_record(sweep.folder).runs[0]
    assert (entry.seconds, entry.attempts, entry.failure) == (3.0, 1, None)


def test_a_damaged_record_is_named(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}"))
    run_sweep(sweep, quiet=True)
    text = (sweep.folder / "sweep.json").read_text()
    (sweep.folder / "sweep.json").write_text(text.replace('"seed": 0', '"seed": "x"'))
    with pytest.raises(RunDirError, match=r"sweep.json: damaged: runs.0.seed: Input should be a valid integer"):
        read_record(sweep.folder)
    (sweep.folder / "sweep.json").write_text(text[:40])
    with pytest.raises(RunDirError, match=r"sweep.json: damaged: Invalid JSON.*Restore the file"):
        compare_sweep(sweep.folder)


@pytest.mark.slow
def test_when_all_runs_fail_the_page_is_written_and_the_exit_code_says_so(sweep_file, stand_in, capsys):
    path = sweep_file("grid: {optimizer.lr: [0.5]}\nretries: 0")
    assert main(["compare", str(path), "--quiet"]) == 6
    printed = capsys.readouterr()
    assert (
        "not compared: lr-0.5-seed0: failed: step 3: loss nan" in printed.out
        and "1 of 1 runs are missing" in printed.err
    )
    assert (stand_in.parent / "comparison.html").is_file()


def test_a_run_that_still_runs_is_left_alone(sweep_file, stand_in):
    sweep = read_sweep(sweep_file("grid: {optimizer.lr: [0.01]}"))
    run_sweep(sweep, quiet=True)
    run = rundir.RunDir.resume(sweep.folder / "lr-0.01-seed0")
    run.update_status(state="running")
    with pytest.raises(RunDirError, match=r"lr-0.01-seed0: is still running in process \d+ on .*Wait"):
        run_sweep(sweep, resume=True, quiet=True)
    assert compare_sweep(sweep.folder).variants[0].failures == (
        f"lr-0.01-seed0: still running, in process {os.getpid()} on {socket.gethostname()}.",
    )
    run.close()


def test_a_shipped_sweep_has_its_path_as_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where an installed package has no recipes/
    assert find_sweep("recipes/compare/quick.yaml") == find_sweep("quick")
