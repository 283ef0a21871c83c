"""Launchers: the contract of every file, the files that they write, what is refused, and what a submission does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from fake_run import fake_run, write_run

from fivetune import cli, launchers, plugins
from fivetune.config import load_config
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.launchers import JobPlan, JobTask, Launcher, load_launcher

GOLDEN = Path(__file__).parent / "golden"
NAMES = plugins.list_plugins("launchers")
ONE = JobTask("faq", "runs/faq", "faq.yaml", ("--optimizer.lr", "1e-3", "--launch.nproc", "4"))
TWO = JobTask("faq", "runs/faq", "faq.yaml", ("--launch.nnodes", "2", "--launch.nproc", "4"), ("--overwrite",))
ARRAY = tuple(
    JobTask(f"lr-{rate}", f"runs/s/lr-{rate}", f"runs/s/recipes/lr-{rate}.yaml", flags=flags)
    for rate, flags in (("0.1", ()), ("it's", ("--resume",)))
)
CASES = {
    "one-node": ((ONE,), 1),
    "two-nodes": ((TWO,), 2),
    "array": (ARRAY, 1),
}
OPTIONS = {"gpus": 4, "cpus": 16, "memory": "64G"}
OWN = {
    "slurm": {
        "partition": "gpu",
        "account": "lab",
        "time": "04:00:00",
        "gpu_type": "a100",
        "setup": ("module load x",),
    },
    "kubernetes": {"image": "registry/fivetune:1", "volume": "work", "env": ("HF_HOME=/workspace/hub",)},
    "skypilot": {"gpu_type": "H100", "bucket": "s3://runs"},
}


def plan(tasks: tuple[JobTask, ...], nnodes: int) -> JobPlan:
    return JobPlan(
        name="faq",
        tasks=tasks,
        nnodes=nnodes,
        nproc=4,
        program=("/opt/fivetune/bin/python", "-m", "fivetune"),
        directory=Path("/home/ann/work"),
        folder=Path("/home/ann/work/runs/faq.cluster"),
        version="0.1.0",
        page=("compare", "runs/s") if len(tasks) > 1 else (),
    )


def render(name: str, case: str) -> str:
    tasks, nnodes = CASES[case]
    launcher = load_launcher(name, {**OPTIONS, **OWN.get(name, {}), "nodes": nnodes})
    files = launcher.render(plan(tasks, nnodes))
    return "".join(f"==> {file} <==\n{text}" for file, text in files.items())


def supported_cases() -> list[tuple[str, str]]:
    every = [(name, case) for name in NAMES for case in CASES]
    return [(n, c) for n, c in every if c != "array" or plugins.load_plugin("launchers", n).supports_arrays]


# --- the contract ---


@pytest.mark.parametrize("name", NAMES)
def test_every_launcher_keeps_the_contract(name):
    kind = plugins.load_plugin("launchers", name)
    assert issubclass(kind, Launcher)
    assert all(field.description for field in kind.model_fields.values())
    assert set(Launcher.model_fields) <= set(kind.model_fields)
    for method in ("render", "submit"):
        assert getattr(kind, method) is not getattr(Launcher, method), f"{name} has no {method}"


@pytest.mark.parametrize(("name", "case"), supported_cases())
def test_golden_files(name, case):
    """After a change that is meant: `FIVETUNE_WRITE_GOLDEN=1 python -m pytest tests/launchers`, and read the diff."""
    text = render(name, case)
    path = GOLDEN / f"{name}-{case}.txt"
    if os.environ.get("FIVETUNE_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("name", "case"), supported_cases())
def test_every_job_trains_each_run_with_its_own_words(name, case):
    text = render(name, case)
    tasks, _ = CASES[case]
    for task in tasks:
        assert task.run_dir in text.replace("'\"'\"'", "'") and task.source in text.replace("'\"'\"'", "'")
    assert "16" in text and "64" in text


# --- the command ---


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main([*words, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_strategy_of_several_processes_is_chosen_where_the_recipe_names_none(capsys):
    text = dry_run(capsys, "launch", "quickstart", "--on", "slurm", "--nodes", "2", "--gpus", "4")
    assert "recipe=(quickstart --launch.nnodes 2 --launch.nproc 4 --strategy.name ddp)" in text
    assert "#SBATCH --gpus-per-node=4\n" in text
    text = dry_run(capsys, "launch", "quickstart", "--on", "slurm", "--nodes", "2", "--strategy.name", "fsdp")
    assert "recipe=(quickstart --strategy.name fsdp --launch.nnodes 2)" in text
    assert "--gpus-per-node" not in dry_run(capsys, "launch", "quickstart", "--on", "slurm", "--device", "cpu")


def test_a_job_on_an_empty_disk_continues_from_its_bucket(capsys):
    words = ("launch", "quickstart", "--on", "kubernetes", "--image", "registry/fivetune:1", "--volume", "work")
    assert "--resume" not in dry_run(capsys, *words).partition("[ -e ")[0]
    text = dry_run(capsys, *words, "--checkpoint.url", "s3://b/{run}")
    assert "flags=(--resume)" in text.partition("[ -e ")[0]
    assert (
        "--resume"
        not in dry_run(capsys, *words, "--checkpoint.url", "s3://b/{run}", "--overwrite").partition("[ -e ")[0]
    )


def test_a_dry_run_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dry_run(capsys, "launch", "quickstart", "--on", "slurm")
    dry_run(capsys, "compare", "quick", "--on", "slurm")
    assert list(tmp_path.iterdir()) == []


def test_the_array_of_a_sweep_has_a_task_per_run(capsys):
    text = dry_run(capsys, "compare", "quick", "--on", "slurm", "--at-once", "2")
    assert "#SBATCH --array=0-7%2\n" in text and text.count("recipe=(runs/compare-quick/recipes/") == 8
    assert text.endswith("-m fivetune compare runs/compare-quick\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes 0: Input should be greater than or equal to 1. Give: nodes; default: launch"),
        (["--time", "tomorrow"], "--time tomorrow: has another form. Give: time limit, such as 04:00:00"),
        (["--memory", "lots"], "--memory lots: has another form. Give: memory per node, such as 64G."),
        (["--node", "2"], "--node: node is not a setting."),
        (["--nodes", "3"], "train.batch_size 32 is not a multiple of launch.nnodes 3 times launch.nproc 1"),
        (["--optimizer.lrr", "2"], "--optimizer.lrr: optimizer.lrr is not a setting. Did you mean lr?"),
    ],
)
def test_wrong_options_are_refused_with_their_value(capsys, words, message):
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_option_of_another_launcher_and_one_without_a_launcher_are_refused(capsys):
    with pytest.raises(ConfigError, match=r"^--image x: slurm has no such option\. .*Allowed: account, "):
        load_launcher("slurm", {"image": "x"})
    assert cli.main(["compare", "quick", "--nodes", "2"]) == 2
    assert "--nodes 2: is an option of a cluster. Add --on slurm, or omit it." in capsys.readouterr().err


def test_a_run_that_exists_is_refused_before_it_is_queued(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("x")
    words = ["launch", "quickstart", "--on", "slurm", "--dry-run", "--run.dir", str(tmp_path / "run")]
    assert cli.main(words) == 4
    assert capsys.readouterr().err.startswith(f"fivetune: {tmp_path / 'run'}: ")


@pytest.fixture
def fake_sbatch(tmp_path, monkeypatch) -> Path:
    """An sbatch that records its words and answers as the real one does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\necho "7;cluster"\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fivetune.commands.launch._fetch_inputs", lambda config: None)
    return tmp_path


def test_a_submission_writes_the_job_and_prints_what_to_do_next(capsys, fake_sbatch):
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--nodes", "2"]) == 0
    folder = fake_sbatch / "runs" / "quickstart.slurm"
    assert capsys.readouterr().out.splitlines() == [
        "job     7: The run quickstart on 2 nodes with 1 process each",
        f"file    {folder}/job.sbatch",
        f"logs    {folder}",
        "next    squeue --job 7",
        "next    scancel 7",
        "next    fivetune watch runs/quickstart",
    ]
    assert (fake_sbatch / "words").read_text() == f"--parsable {folder}/job.sbatch\n"
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["job"] == "7"


def test_a_sweep_is_submitted_with_its_page_afterwards(capsys, fake_sbatch):
    (fake_sbatch / "s.yaml").write_text(yaml.safe_dump({"base": "quickstart", "grid": {"optimizer.lr": [0.1, 0.2]}}))
    assert cli.main(["compare", "s.yaml", "--on", "slurm"]) == 0
    folder = fake_sbatch / "runs" / "s.slurm"
    assert (fake_sbatch / "words").read_text().splitlines() == [
        f"--parsable {folder}/job.sbatch",
        f"--parsable --dependency=afterany:7 {folder}/page.sbatch",
    ]
    assert sorted(path.name for path in (fake_sbatch / "runs" / "s" / "recipes").iterdir()) == [
        "lr-0.1-seed0.yaml",
        "lr-0.2-seed0.yaml",
    ]
    assert "fivetune watch runs/s\n" in capsys.readouterr().out


SEEDS = ["launch", "quickstart", "--on", "slurm", "--seeds", "1", "2"]


def test_several_seeds_are_an_array_with_one_page(capsys, fake_sbatch):
    assert cli.main([*SEEDS, "--no-preflight", "--train.num_steps", "5"]) == 0
    assert "job     7: 2 runs of quickstart, each on 1 node with 1 process\n" in capsys.readouterr().out
    folder = fake_sbatch / "runs" / "quickstart"
    job = fake_sbatch / "runs" / "quickstart.slurm"
    assert (fake_sbatch / "words").read_text().splitlines() == [
        f"--parsable {job}/job.sbatch",
        f"--parsable --dependency=afterany:7 {job}/page.sbatch",
    ]
    names = ["quickstart-seed1", "quickstart-seed2"]
    configs = [load_config(folder / "recipes" / f"{name}.yaml") for name in names]
    assert [(one.run.dir, one.run.seed, one.train.num_steps) for one in configs] == [
        (f"runs/quickstart/{name}", seed, 5) for seed, name in enumerate(names, start=1)
    ]
    assert "#SBATCH --array=0-1\n" in (text := (job / "job.sbatch").read_text())
    assert text.count("flags=(--no-preflight)") == 2
    assert cli.main(SEEDS) == 4
    assert "runs/quickstart: holds a sweep already, 0 of 2 runs are finished" in capsys.readouterr().err

    for seed, name in enumerate(names, start=1):
        (folder / name).mkdir()
        write_run(folder / name, fake_run(name=name, seed=seed))
    assert cli.main(["compare", "runs/quickstart", "--json"]) == 0
    (variant,) = json.loads(capsys.readouterr().out.splitlines()[-1])["variants"]
    assert variant["runs"] == names and (folder / "comparison.html").is_file()


def test_seeds_that_are_finished_are_not_trained_again(capsys, fake_sbatch):
    assert cli.main([*SEEDS, "--json"]) == 0
    for seed in (1, 2):
        place = fake_sbatch / "runs" / "quickstart" / f"quickstart-seed{seed}"
        place.mkdir()
        (place / "config.yaml").write_text("x")
        (place / "status.json").write_text('{"state": "finished"}')
        capsys.readouterr()
        assert cli.main([*SEEDS, "--resume", "--json"]) == 0
        runs = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
        assert list(runs) == ["quickstart-seed2"][seed - 1 :]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1", "1"], "--seeds 1 1: give different whole numbers from 0 to 2147483647."),
        (["-1"], "--seeds -1: give different whole numbers"),
        (["1", "2", "--run.seed", "3"], "--run.seed 3: --seeds gives each run its seed. Omit one of them."),
        (["1", "2", "--on", "skypilot"], "--on skypilot: has no arrays, and quickstart has 2 runs. Use --on slurm."),
    ],
)
def test_wrong_seeds_are_refused(capsys, words, message):
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--dry-run", "--seeds", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_or_refusing_scheduler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FiveTuneEnvironmentError, match=r"^sbatch: not found on this machine; SLURM provides it\. Run"):
        launchers.submit_file(["sbatch", "job.sbatch"], tool="SLURM")
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(FiveTuneEnvironmentError, match="refused: sbatch: error: invalid partition specified: gpu"):
        launchers.submit_file(["sbatch", "job.sbatch"], tool="SLURM")


# --- the files are valid ---


@pytest.mark.parametrize("case", CASES)
def test_the_sbatch_file_passes_the_shell_s_checkers(case, tmp_path):
    tasks, nnodes = CASES[case]
    files = load_launcher("slurm", {**OPTIONS, **OWN["slurm"]}).render(plan(tasks, nnodes))
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        checkers = [["bash", "-n"], *([["shellcheck"]] if shutil.which("shellcheck") else [])]
        for checker in checkers:
            done = subprocess.run([*checker, name], cwd=tmp_path, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
