"""SLURM for real: two nodes on this machine, a preempted run, an array of runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
import yaml
from safetensors.torch import load_file

from fivetune import cli, rundir
from reliability import slurm_cluster
from reliability.slurm_cluster import is_started_early, train_on_two_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm_cluster.explain_absence()), reason=slurm_cluster.explain_absence()),
]


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Generator[None]:
    """A cluster whose commands work in this process and its children, in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    with slurm_cluster.start_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def wait_until(is_done: Callable[[], Any], folder: Path, *, seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > until:
            pytest.fail("\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in folder.rglob("*.log")))
        time.sleep(0.1)


def is_running_again(job: str) -> bool:
    shown = run("scontrol", "show", "job", job)
    return "Restarts=1" in shown and "JobState=RUNNING" in shown


def write_recipe(folder: Path, model: Path, **overrides: Any) -> Path:
    table = kit.recipe(
        folder,
        model,
        model__dropout=0.0,
        eval__at_start=False,
        eval__every_steps=10**6,
        telemetry={"every_seconds": 0},
        **overrides,
    )
    (folder / "r.yaml").write_text(yaml.safe_dump(table))
    return folder / "r.yaml"


def test_a_preempted_run_on_two_nodes_ends_with_the_weights_of_an_uninterrupted_one(
    cluster, tmp_path, model_folder, capsys
):
    recipe = str(write_recipe(tmp_path, model_folder, strategy="ddp", train__num_steps=150))
    launch = ["launch", recipe, "--on", "slurm", "--nodes", "2", "--no-preflight", "--json", "--stage", "false"]
    assert cli.main(launch) == 0
    job = json.loads(capsys.readouterr().out.splitlines()[-1])["job"]
    folder = tmp_path / "run"
    wait_until((folder / "steps.jsonl").exists, tmp_path)
    run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: rundir.read_status(folder).state == "interrupted", tmp_path)
    stopped = rundir.read_status(folder).step
    wait_until(lambda: is_started_early(job), tmp_path)
    wait_until(lambda: is_running_again(job), tmp_path)
    train_on_two_ranks(recipe, "whole")
    wait_until(lambda: rundir.read_status(folder).state in ("finished", "failed"), tmp_path)

    done, expected = (rundir.read_run(path) for path in (folder, tmp_path / "whole"))
    assert 0 < stopped < 150 and done.status.num_resumes == 1
    assert [step.loss for step in done.steps] == [step.loss for step in expected.steps]
    assert {step.world_size for step in done.steps} == {2}
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (folder, tmp_path / "whole"))
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    logs = {path.name for path in (tmp_path / "run.slurm").glob("*.log")}
    assert logs == {f"{job}.log", f"{job}-node0.log", f"{job}-node1.log"}
    assert "SIGTERM received" in (tmp_path / "run.slurm" / f"{job}-node0.log").read_text()


def test_a_sweep_of_four_runs_is_an_array_with_one_page(cluster, tmp_path, model_folder, capsys):
    write_recipe(tmp_path, model_folder, train__num_steps=2)
    sweep = {"base": "r.yaml", "dir": "a 100% sweep", "grid": {"optimizer.lr": [1e-3, 1e-2]}, "seeds": [1, 2]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(sweep))
    assert cli.main(["compare", "s.yaml", "--on", "slurm", "--stage", "false"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^job +\d+: 4 runs of a 100% sweep, each on 1 node with 1 process$", out, re.MULTILINE)
    wait_until((tmp_path / "a 100% sweep" / "comparison.html").exists, tmp_path)
    assert len(list((tmp_path / "a 100% sweep.slurm").glob("*_[0-3]-node0.log"))) == 4
    runs = [rundir.read_run(path.parent) for path in sorted((tmp_path / "a 100% sweep").glob("*/status.json"))]
    assert [(run.name, run.status.state) for run in runs] == [
        (f"lr-{rate}-seed{seed}", "finished") for rate in (0.001, 0.01) for seed in (1, 2)
    ]


STOPPED_ONCE = """\
# Python starts this file before the program: in the middle of their work one shard is killed, another one waits.
import os, sys, time
from pathlib import Path

files = {"2/3": Path("killed"), "3/3": Path("waiting")}
file = files.get(sys.argv[-1])
if file and not file.exists():
    from fivetune.training.answers.answer_log import AnswerWriter

    append = AnswerWriter.append

    def stop(writer, question, prediction):
        append(writer, question, prediction)
        file.touch()
        if file.name == "killed":
            os.kill(os.getpid(), 9)
        time.sleep(600)

    AnswerWriter.append = stop
"""


def test_a_prediction_with_a_killed_and_a_preempted_shard_is_merged_once(
    cluster, tmp_path, model_folder, capsys, monkeypatch
):
    recipe = write_recipe(tmp_path, model_folder, train__num_steps=2)
    assert cli.main(["train", str(recipe), "--quiet", "--no-preflight"]) == 0
    source = str(tmp_path / "dev.json")
    assert cli.main(["predict", "run", "--input", source, "--output", "whole.jsonl"]) == 0
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STOPPED_ONCE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{os.environ.get('PYTHONPATH', '')}")
    capsys.readouterr()
    words = ["--output", "out.jsonl", "--shards", "3", "--device", "cpu", "--json"]
    assert cli.main(["launch", "run", "--predict", source, "--on", "slurm", *words]) == 0
    job = json.loads(capsys.readouterr().out.splitlines()[-1])["job"]
    wait_until(lambda: (tmp_path / "killed").exists() and (tmp_path / "waiting").exists(), tmp_path)
    run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    for number in (2, 3):
        wait_until(partial(is_started_early, f"{job}_{number}"), tmp_path)
    wait_until((tmp_path / "out.jsonl").exists, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    wait_until(lambda: not (tmp_path / "out.jsonl.partial").exists(), tmp_path)
    logs = "".join(path.read_text() for path in (tmp_path / "out.jsonl.slurm").glob("*-node0.log"))
    assert logs.count("1 of 4 records are answered already") == 2
    assert logs.count("12 records: 12 answered") == 1


def test_a_run_in_a_container_trains_and_prepares_by_its_program(cluster, tmp_path, model_folder, capsys, monkeypatch):
    """No apptainer is here: a program of this name records its words, and runs what follows the image."""
    recipe = str(write_recipe(tmp_path, model_folder, train__num_steps=2))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "apptainer"
    program.write_text(
        f'#!/bin/bash\necho "$@" >> {tmp_path}/words\n'
        f'while [ "$1" != five.sif ]; do shift; done\nexec {sys.executable} "${{@:3}}"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("BASH_FUNC_module%%", "() { echo $@ > modules; }")
    words = ["launch", recipe, "--on", "slurm", "--no-preflight", "--container", "five.sif", "--modules", "cuda/12"]
    assert cli.main(words) == 4
    assert "--container five.sif: there is no such file." in capsys.readouterr().err
    (tmp_path / "five.sif").touch()
    assert cli.main(words) == 0
    wait_until(lambda: rundir.read_status(tmp_path / "run").state in ("finished", "failed"), tmp_path)
    assert rundir.read_status(tmp_path / "run").state == "finished"
    assert (tmp_path / "modules").read_text() == "load cuda/12\n"
    first, second = (tmp_path / "words").read_text().splitlines()
    assert f"--pwd {tmp_path} five.sif python -m fivetune prepare {recipe}" in first
    assert first.startswith(f"exec --bind {tmp_path}") and f"python -m fivetune train {recipe}" in second
