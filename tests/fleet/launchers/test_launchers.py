"""Launchers: the contract of every file, the files that they write, what is refused, and what a submission does."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_run import fake_run, write_run

from fivetune import cli, plugins
from fivetune.commands import fetch_inputs
from fivetune.commands.launch import read_change_time, watch_new_run
from fivetune.config import load_config
from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.fleet import launchers
from fivetune.fleet.launchers import JobPlan, JobRun, Launcher, SharedWork, load_launcher
from fivetune.training.answers.answer_folder import lock_answers

GOLDEN = Path(__file__).parent / "golden"
NAMES = plugins.list_plugins("launchers")
ONE = JobRun("faq", "runs/faq", "faq.yaml", ("--optimizer.lr", "1e-3", "--launch.nproc", "4"))
TWO = JobRun("faq", "runs/faq", "faq.yaml", ("--launch.nnodes", "2", "--launch.nproc", "4"), ("--overwrite",))
ARRAY = tuple(
    JobRun(f"lr-{rate}", f"runs/s/lr-{rate}", f"runs/s/recipes/lr-{rate}.yaml", flags=flags)
    for rate, flags in (("0.1", ()), ("it's", ("--resume",)))
)
WORK = SharedWork(
    ("predict", "runs/faq", "--input", "it's.csv", "--output", "out.csv"), ("runs/faq", "out.csv"), (1, 2, 4), 4
)
CASES = {
    "one-node": ((ONE,), 1),
    "two-nodes": ((TWO,), 2),
    "array": (ARRAY, 1),
    "shards": ((), 1),
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


def plan(tasks: tuple[JobRun, ...], nnodes: int) -> JobPlan:
    return JobPlan(
        name="faq",
        runs=tasks,
        nnodes=nnodes,
        nproc=4,
        program=("/opt/fivetune/bin/python", "-m", "fivetune"),
        directory=Path("/home/ann/work"),
        folder=Path("/home/ann/work/runs/faq.cluster"),
        version="0.1.0",
        launch_id="0a1b2c3d",
        page=("compare", "runs/s") if len(tasks) > 1 else (),
        work=None if tasks else WORK,
        folders=(Path("/scratch/ann"),),
        caches={"HF_HOME": "/scratch/ann/hub", "XDG_CACHE_HOME": "/home/ann/.cache"},
    )


def render(name: str, case: str, **options: Any) -> str:
    tasks, nnodes = CASES[case]
    launcher = load_launcher(name, {**OPTIONS, **OWN.get(name, {}), "nodes": nnodes, **options})
    files = launcher.render(plan(tasks, nnodes))
    return "".join(f"==> {file} <==\n{text}" for file, text in files.items())


def supported_cases() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name in NAMES:
        kind = plugins.load_plugin("launchers", name)
        unsupported = {"array": not kind.supports_arrays, "shards": not kind.supports_shards}
        found += [(name, case) for case in CASES if not unsupported.get(case)]
    return found


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory, in which the corpus of the quickstart is not written: that takes two seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fivetune.commands.fetch_inputs", lambda configs, models=True: None)
    monkeypatch.setattr("fivetune.commands.launch.fetch_inputs", lambda configs, models=True: None)
    monkeypatch.setattr("fivetune.fleet.experiments.runs.write_corpus", lambda corpus: None)


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
    """After an intended change: `FIVETUNE_WRITE_GOLDEN=1 python -m pytest tests/fleet/launchers`, and read the diff."""
    check_golden(render(name, case), f"{name}-{case}.txt")


@pytest.mark.parametrize(("runtime", "image"), [("apptainer", "five tune.sif"), ("pyxis", "nvcr.io#fivetune:1")])
def test_golden_files_of_containers(runtime, image):
    options = {"container": image, "container_runtime": runtime, "bind": ("/data",), "modules": ("cuda/12 gcc", "x")}
    check_golden(render("slurm", "array", **options), f"slurm-{runtime}.txt")


def check_golden(text: str, name: str) -> None:
    path = GOLDEN / name
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


def test_a_dry_run_writes_what_it_names_and_checks_the_data(capsys, tmp_path, monkeypatch):
    text = dry_run(capsys, "launch", "quickstart", "--on", "slurm")
    assert (tmp_path / "runs" / "quickstart.slurm" / "job.sbatch").read_text() == text
    (tmp_path / "s.yaml").write_text(yaml.safe_dump({"base": "quickstart", "grid": {"optimizer.lr": [0.1, 0.2]}}))
    text = dry_run(capsys, "compare", "s.yaml", "--on", "slurm")
    recipes = re.findall(r"recipe=\((.*)\)", text)
    assert len(recipes) == 2 and all(Path(recipe).is_file() for recipe in recipes)
    # The second one finds the sweep that the first one has written, and a launch goes on with it.
    assert cli.main(["compare", "s.yaml", "--on", "slurm", "--dry-run", "--json"]) == 0
    printed = capsys.readouterr()
    assert "without --dry-run this is refused: runs/s: holds a sweep already" in printed.err
    assert json.loads(printed.out)["folder"] == str(tmp_path / "runs" / "s.slurm")
    dry_run(capsys, "compare", "s.yaml", "--on", "slurm", "--resume")
    monkeypatch.setattr("fivetune.commands.launch.fetch_inputs", fetch_inputs)
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--dry-run", "--data.train", "no.json"]) == 3
    assert "no.json" in capsys.readouterr().err


def test_the_array_of_a_sweep_has_a_task_per_run(capsys):
    text = dry_run(capsys, "compare", "quick", "--on", "slurm", "--at-once", "2")
    assert "#SBATCH --array=0-7%2\n" in text and text.count("recipe=(runs/compare-quick/recipes/") == 8
    assert text.endswith('"${fivetune[@]}" compare runs/compare-quick\n')


def test_the_page_of_a_sweep_has_the_arguments_of_the_command(capsys):
    words = ["--baseline", "adamw forward=flat", "--metric", "f1", "--price-per-hour", "3", "--output", "page.html"]
    text = dry_run(capsys, "compare", "quick", "--on", "slurm", *words)
    page = "--baseline 'adamw forward=flat' --metric f1 --price-per-hour 3.0 --output page.html"
    assert text.endswith(f'"${{fivetune[@]}}" compare runs/compare-quick {page}\n')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "nope"], "--baseline nope: there is no such name."),
        (["--metric", "nope"], "--metric nope: there is no such name."),
        (["--output", "/nowhere/page.html"], "--output /nowhere/page.html: there is no folder /nowhere."),
    ],
)
def test_wrong_arguments_of_the_page_are_refused_before_the_runs(capsys, words, message):
    assert cli.main(["compare", "quick", "--on", "slurm", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_sweep_fetches_each_of_its_models_and_data_once(capsys, fake_sbatch, monkeypatch):
    models, checked = [], []
    monkeypatch.setattr("fivetune.commands.fetch_inputs", fetch_inputs)
    monkeypatch.setattr("fivetune.model.load.find_source", lambda path, **kw: models.append(path))
    monkeypatch.setattr("fivetune.training.sources.check_sources", lambda config: checked.append(config.data.train))
    grid = {"model.path": ["a", "b"], "optimizer.lr": [0.1, 0.2]}
    (fake_sbatch / "s.yaml").write_text(yaml.safe_dump({"base": "quickstart", "grid": grid}))
    assert cli.main(["compare", "s.yaml", "--on", "slurm"]) == 0
    assert sorted(models) == ["a", "b"] and len(checked) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes 0: is not allowed. Give 1 or more: nodes; default: launch"),
        (["--gpus", "x"], "--gpus x: is not allowed. Give a whole number: GPUs per node"),
        (["--time", "tomorrow"], "--time tomorrow: is not allowed. Give: time limit, such as 04:00:00"),
        (["--memory", "lots"], "--memory lots: is not allowed. Give: memory per node, such as 64G."),
        (["--sbatch=--array=1-9"], "--sbatch --array=1-9: changes how the job starts its processes. Leave it out"),
        (["--sbatch=-N2"], "--sbatch -N2: changes how the job starts"),
        (["--container-runtime", "pyxis"], "--container-runtime: has no effect without --container. Add it."),
        (["--bind", "/data"], "--bind: has no effect without --container. Add it."),
        (["--node", "2"], "--node: node is not a setting."),
        (["--nodes", "3"], "train.batch_size 32 is not a multiple of launch.nnodes 3 times launch.nproc 1"),
        (["--gpus", "4", "--launch.nproc", "2"], "--gpus 4: contradicts --launch.nproc 2. Give one of them."),
        (["--nodes", "2", "--launch.nnodes", "3"], "--nodes 2: contradicts --launch.nnodes 3. Give one of them."),
        (["--nodes", "1", "--launch.nnodes", "2"], "--nodes 1: contradicts --launch.nnodes 2. Give one of them."),
        (["--launch.nnodes", "x"], "--launch.nnodes x: give a whole number, 1 or more."),
        (["--nodes", "2", "--strategy.name", "single"], "launch.nnodes 2 times launch.nproc 1 needs a strategy for"),
        (["--model.revision", "hf_" + "a" * 30], "--model.revision (hidden): holds a password or token, which the job"),
        (
            ["--run.dir", "runs/a\nb"],
            "run.dir: 'a\\nb': has a character that cannot be printed, such as a line break.",
        ),
        (["--partition", "a\nb"], "--partition 'a\\nb': has a line break, a backslash or such. sbatch does not read"),
        (["--run.dir", "runs/a\\b"], "a\\\\b': has a line break, a backslash or such. sbatch does not read it."),
        (["--time", "00:02:00"], "--time 00:02:00: is 120 s, and the run would save and stop at once"),
        (["--sbatch", "foo"], "--sbatch 'foo': is not an option. Give one line, such as --sbatch=--exclusive."),
        (["--optimizer.lrr", "2"], "--optimizer.lrr: optimizer.lrr is not a setting. Did you mean lr?"),
    ],
)
def test_wrong_options_are_refused_with_their_value(capsys, words, message):
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_option_of_another_launcher_and_one_without_a_launcher_are_refused(capsys):
    with pytest.raises(ConfigError, match=r"slurm has no such option\. It is an option of kubernetes and skypilot\."):
        load_launcher("slurm", {"image": "x"})
    assert cli.main(["compare", "quick", "--nodes", "2"]) == 2
    assert "--nodes 2: is an option of a cluster. Add --on slurm, or omit it." in capsys.readouterr().err


@pytest.mark.parametrize("run_dir", ["/tmp/run", "../run", "/workspace/../run"])
def test_a_run_outside_of_the_volume_is_refused(capsys, run_dir):
    words = ("launch", "quickstart", "--on", "kubernetes", "--dry-run", "--image", "i", "--volume", "v")
    assert cli.main([*words, "--run.dir", run_dir]) == 2
    assert f"run.dir: {run_dir} is not on the volume, which pods have at /workspace" in capsys.readouterr().err
    assert cli.main([*words, "--run.dir", "/workspace/runs/a"]) == 0


def test_a_run_that_exists_is_refused_before_it_is_queued(capsys, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("x")
    words = ["launch", "quickstart", "--on", "slurm", "--run.dir", str(tmp_path / "run")]
    assert cli.main(words) == 4
    assert capsys.readouterr().err.startswith(f"fivetune: {tmp_path / 'run'}: ")
    assert cli.main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("#!/bin/bash") and f"refused: {tmp_path / 'run'}: " in printed.err


def test_a_run_to_resume_must_exist(capsys, tmp_path):
    words = ["launch", "quickstart", "--on", "slurm", "--resume", "--run.dir", str(tmp_path / "run")]
    assert cli.main(words) == 4
    assert f"{tmp_path / 'run'}: there is no run to resume. Leave --resume out" in capsys.readouterr().err
    assert cli.main([*words, "--dry-run", "--checkpoint.url", "s3://b/{run}"]) == 0
    assert "refused" not in capsys.readouterr().err


def test_the_watch_begins_with_the_status_of_the_new_run(tmp_path, monkeypatch):
    status, shown = tmp_path / "status.json", []
    status.write_text("old")
    before = read_change_time(tmp_path)

    def write(seconds: float) -> None:
        assert not shown
        os.utime(status, ns=(before + 1, before + 1))

    monkeypatch.setattr("fivetune.commands.launch.time.sleep", write)
    monkeypatch.setattr("fivetune.commands.watch.run", lambda args: shown.append(args.folder))
    watch_new_run(tmp_path, before)
    assert shown == [tmp_path] and read_change_time(tmp_path) == before + 1


@pytest.fixture
def fake_sbatch(tmp_path, monkeypatch) -> Path:
    """An sbatch that records its words and answers as the real one does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/words\necho "7;cluster"\n')
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
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
    words = "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    with pytest.raises(launchers.SubmissionError, match=r"\(gres\) specification\. .* or add --device cpu\."):
        load_launcher("slurm", {}).submit(tmp_path)


def test_a_page_that_is_refused_leaves_the_runs_submitted_and_says_so(capsys, fake_sbatch):
    (fake_sbatch / "bin" / "sbatch").write_text(
        '#!/bin/sh\ncase "$*" in *page.sbatch) echo no >&2; exit 1;; esac\necho 7\n'
    )
    assert cli.main(SEEDS) == 4
    page = fake_sbatch / "runs" / "quickstart.slurm" / "page.sbatch"
    told = capsys.readouterr().err
    assert "refused: no. The runs were submitted as job 7, the job of their page was not. Submit it with: " in told
    assert told.endswith(f"sbatch --dependency=afterany:7 {page}\n")


def test_a_refused_sweep_can_be_launched_again(capsys, fake_sbatch, monkeypatch):
    answer = fake_sbatch / "bin" / "sbatch"
    accepting = answer.read_text()
    answer.write_text("#!/bin/sh\necho 'invalid partition' >&2\nexit 1\n")
    assert cli.main(SEEDS) == 4
    assert (
        "refused: invalid partition. Nothing was submitted; launch it again with --resume." in capsys.readouterr().err
    )
    answer.write_text(accepting)
    assert cli.main([*SEEDS, "--resume"]) == 0


def test_a_sweep_that_cannot_be_rendered_or_fetched_leaves_nothing(capsys, fake_sbatch, monkeypatch):
    assert cli.main([*SEEDS, "--sbatch=--comment=a\nb"]) == 2
    assert "--sbatch '--comment=a\\nb': is not an option. Give one line" in capsys.readouterr().err

    def refuse(configs: object, models: bool) -> None:
        raise ConfigError("no model")

    monkeypatch.setattr("fivetune.commands.fetch_inputs", refuse)
    assert cli.main(SEEDS) == 2
    assert not (fake_sbatch / "runs").exists()


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


# --- what the files do ---


@pytest.fixture
def nodes(tmp_path, monkeypatch) -> Path:
    """Programs of a node that record their words; `python` and `srun` begin a run as training does."""
    (tmp_path / "bin").mkdir()
    begin = "mkdir -p runs/faq; echo ' \"started\": \"'$(wc -l < words)'\"' > runs/faq/status.json"
    scripts = {
        "python": f'echo "${{@: -1}}" >> words; {begin}',
        "srun": f'echo "${{@: -1}}" >> words; {begin}; exit "${{SRUN_CODE:-0}}"',
        "scontrol": 'echo "$@" >> words',
        "fivetune": '[ -z "$WARN" ] || { kill -USR1 "$PPID"; exec sleep 60; }; exit "${PREPARE_CODE:-0}"',
    }
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def leave_old_run(folder: Path) -> None:
    (folder / "runs" / "faq").mkdir(parents=True)
    (folder / "runs" / "faq" / "status.json").write_text(' "started": "long ago"\n')


def start_node(folder: Path, name: str, *flags: str, launch_id: str = "1", **environ: str) -> tuple[int, list[str]]:
    """Run the script of a job; returns its exit code and the last words of its programs since the test began."""
    run = JobRun("faq", "runs/faq", "faq.yaml", flags=flags)
    job = JobPlan("faq", (run,), 1, 1, ("fivetune",), folder, folder / "runs" / f"faq.{name}", "0.1.0", launch_id)
    options = {"kubernetes": {"image": "i", "volume": "v", "mount": str(folder)}}.get(name, {})
    (text,) = load_launcher(name, options).render(job).values()
    if name == "kubernetes":
        (text,) = yaml.safe_load(text)["spec"]["template"]["spec"]["containers"][0]["args"]
    elif name == "skypilot":
        text = yaml.safe_load(text)["run"]
    environ = {**os.environ, "SLURM_JOB_ID": "7", **environ}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=environ, check=False)
    words = folder / "words"
    return done.returncode, words.read_text().splitlines() if words.exists() else []


@pytest.mark.parametrize("name", NAMES)
def test_a_job_continues_its_own_run_only(nodes, name):
    leave_old_run(nodes)
    assert start_node(nodes, name, "--overwrite") == (0, ["--overwrite"])
    assert start_node(nodes, name, "--overwrite") == (0, ["--overwrite", "--resume"])
    _, words = start_node(nodes, name, launch_id="2")
    assert words[2:] != ["--resume"]  # without a flag the old run is refused by fivetune train


def test_a_job_queued_again_while_it_staged_does_not_continue_the_run_before(nodes):
    leave_old_run(nodes)
    assert start_node(nodes, "slurm", "--overwrite", PREPARE_CODE="3") == (3, [])
    again = start_node(nodes, "slurm", "--overwrite", SLURM_RESTART_COUNT="1")
    assert again == (0, ["--overwrite"])


def test_the_warning_before_the_time_limit_requeues_a_job_that_stages(nodes):
    assert start_node(nodes, "slurm", WARN="1") == (138, ["requeue 7"])


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (138, True), (143, False)])
def test_the_exit_code_of_a_run_is_that_of_its_job(nodes, code, requeued):
    found, words = start_node(nodes, "slurm", SRUN_CODE=str(code))
    assert found == code and ("requeue 7" in words) == requeued


def test_sbatch_options_are_quoted(tmp_path):
    """sbatch's own reading is in test_slurm.py."""
    run = JobRun("my run", "runs/my run", "faq.yaml")
    folder = Path("/w/my dir/100%")
    job = JobPlan("my run", (run,), 1, 1, ("fivetune",), folder, folder / "runs" / "my run.slurm", "0.1.0", "1")
    (text,) = load_launcher("slurm", {}).render(job).values()
    options = dict(re.findall(r"^#SBATCH --(\S+)=(.*)$", text, re.MULTILINE))
    assert shlex.split(options["job-name"]) == ["my run"]
    assert shlex.split(options["chdir"]) == ["/w/my dir/100%"]
    assert shlex.split(options["output"]) == ["/w/my dir/100%%/runs/my run.slurm/%j.log"]
    assert "--output='/w/my dir/100%%/runs/my run.slurm/%j-node%n.log' " in text


# --- shards of a prediction and of data ---


@pytest.fixture
def answering(tmp_path: Path) -> list[str]:
    """The words that start the prediction of six records by a finished run."""
    write_run(tmp_path / "runs" / "faq", fake_run(name="faq"))
    (tmp_path / "runs" / "faq" / "model").mkdir(exist_ok=True)
    (tmp_path / "runs" / "faq" / "model" / "generation_config.json").write_text('{"max_new_tokens": 8}')
    rows = [{"question": f"Who is {number}?", "context": "It is Ann."} for number in range(6)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "empty.jsonl").write_text("{}\n" * 3)
    return ["launch", "runs/faq", "--predict", "in.jsonl", "--output", "out.csv", "--on", "slurm"]


def test_a_prediction_is_an_array_of_shards(capsys, fake_sbatch, answering):
    words = ["--shards", "3", "--at-once", "2", "--gpus", "2", "--safe-csv", "--max-error", "5%"]
    assert cli.main([*answering, *words, "--eval.num_beams", "2"]) == 0
    text = (fake_sbatch / "out.csv.slurm" / "job.sbatch").read_text()
    assert "#SBATCH --array=1-3%2\n" in text and "#SBATCH --gpus-per-node=2\n" in text
    assert (
        "work=(predict runs/faq --input in.jsonl --output out.csv --safe-csv --max-error 5% --eval.num_beams 2 "
        '--launch.nproc 2 --shard "$SLURM_ARRAY_TASK_ID/3")\n' in text
    )
    assert capsys.readouterr().out.startswith("job     7: 3 of 3 shards of out.csv, each on 1 node with 2 processes\n")


def test_processes_of_a_shard_have_a_gpu_each(capsys, fake_sbatch, answering):
    assert cli.main([*answering, "--shards", "3", "--launch.nproc", "4"]) == 0
    assert "#SBATCH --gpus-per-node=4\n" in (fake_sbatch / "out.csv.slurm" / "job.sbatch").read_text()


def test_shards_that_are_answered_are_not_started_again(capsys, fake_sbatch, answering):
    for number in (1, 3):
        (fake_sbatch / "out.csv.partial" / f"{number}-of-3").mkdir(parents=True)
        (fake_sbatch / "out.csv.partial" / f"{number}-of-3" / "done").touch()
    assert cli.main([*answering, "--shards", "3", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["shards"] == [2]
    text = (fake_sbatch / "out.csv.slurm" / "job.sbatch").read_text()
    assert "#SBATCH --array=2\n" in text and "gpus" not in text
    assert cli.main([*answering, "--shards", "2"]) == 4
    assert "out.csv.partial: holds answers of 3 shards. Go on with these commands" in capsys.readouterr().err


def test_shards_that_a_job_answers_are_not_started_again(capsys, fake_sbatch, answering):
    folder = fake_sbatch / "out.csv.partial" / "2-of-3"
    folder.mkdir(parents=True)
    with lock_answers(folder):
        assert cli.main([*answering, "--shards", "3"]) == 0
        assert "a job still answers shard 2 of 3, not submitted again" in capsys.readouterr().out
        assert "#SBATCH --array=1,3\n" in (fake_sbatch / "out.csv.slurm" / "job.sbatch").read_text()
        for number in (1, 3):
            (folder.with_name(f"{number}-of-3")).mkdir()
            (folder.with_name(f"{number}-of-3") / "done").touch()
        assert cli.main([*answering, "--shards", "3"]) == 2
        assert "a job still answers shard 2 of 3, and no other is missing. Wait" in capsys.readouterr().err
    assert cli.main([*answering, "--shards", "3"]) == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--shards", "7"], 2, "--shards 7: in.jsonl has 6 records. Give at most as many."),
        (["--shards", "0"], 2, "--predict: needs --shards N, the number of jobs that share the records"),
        ([], 2, "--predict: needs --shards N"),
        (["--shards", "2", "--nodes", "2"], 2, "--nodes 2: each shard works on one node. Give more --shards instead."),
        (["--shards", "2", "--resume"], 2, "--resume: has no effect with --predict. Leave it out."),
        (["--shards", "2", "--output", "no/out.csv"], 2, "--output no/out.csv: there is no folder no."),
        (["--shards", "2", "--predict", "no.csv"], 3, "no.csv"),
        (["--shards", "2", "--predict", "empty.jsonl"], 3, "empty.jsonl: none of 3 records can be answered."),
        (["--shards", "2", "--optimizer.lr", "1"], 2, "--optimizer.lr: has no effect here: the model is trained."),
        (["--shards", "2", "--on", "skypilot"], 2, "--on skypilot: has no arrays of jobs. Use --on slurm"),
    ],
)
def test_a_wrong_prediction_is_refused_before_it_is_queued(capsys, tmp_path, answering, words, code, message):
    assert cli.main([*answering, *words]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out.csv*"))


def test_a_prediction_needs_a_run_with_a_model_and_an_output(capsys, tmp_path, answering):
    assert cli.main([*answering[:4], "--shards", "2", "--on", "slurm"]) == 2
    assert "--predict: needs --output FILE, which the last job writes." in capsys.readouterr().err
    shutil.rmtree(tmp_path / "runs" / "faq" / "model")
    assert cli.main([*answering, "--shards", "2"]) == 4
    assert "runs/faq: model/ is missing" in capsys.readouterr().err
    assert cli.main(["launch", "runs/no", *answering[2:], "--shards", "2"]) == 4
    assert "runs/no: no such directory." in capsys.readouterr().err
    assert cli.main(["launch", "quickstart", "--on", "slurm", "--shards", "2"]) == 2
    assert "--shards: has no effect without --predict" in capsys.readouterr().err


def test_a_wrong_argument_of_predict_is_told_in_one_line(capsys, answering):
    with pytest.raises(SystemExit, match="2"):
        cli.main([*answering, "--shards", "2", "--format", "x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fivetune launch --predict: error: argument --format: invalid choice: 'x'")


def test_files_of_a_prediction_must_be_on_the_volume(capsys):
    words = ["launch", "runs/faq", "--predict", "in.csv", "--shards", "4", "--on", "kubernetes", "--dry-run"]
    words += ["--image", "i", "--volume", "v", "--at-once", "2", "--output"]
    assert cli.main([*words, "/tmp/out.csv"]) == 2
    assert "/tmp/out.csv: is not on the volume, which pods have at /workspace" in capsys.readouterr().err
    assert cli.main([*words, "out.csv"]) == 0
    spec = yaml.safe_load(capsys.readouterr().out)["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 2, "Indexed")


@pytest.mark.parametrize("place", ["data/prepared", "s3://bucket/prepared"])
def test_data_are_prepared_by_an_array_without_gpus(capsys, tmp_path, place):
    words = ["launch", "quickstart", "--prepare", place, "--shards", "4", "--on", "slurm", "--cpus", "8", "--gpus", "2"]
    text = dry_run(capsys, *words, "--data.max_input_tokens", "99")
    assert "#SBATCH --array=1-4\n" in text and "gpus" not in text
    work = f"prepare quickstart --output {place} --quiet --data.max_input_tokens 99"
    assert f'work=({work} --shard "$SLURM_ARRAY_TASK_ID/4")\n' in text
    assert (tmp_path / place.removeprefix("s3://bucket/")).with_name("prepared.slurm").is_dir()
    assert cli.main([*words, "--overwrite"]) == 2
    assert "--overwrite: has no effect with --prepare." in capsys.readouterr().err


def test_this_folder_names_the_job_that_prepares_data_in_it(capsys, tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path / "corpus")
    text = dry_run(capsys, "launch", "quickstart", "--prepare", ".", "--shards", "2", "--on", "slurm")
    assert "#SBATCH --job-name=corpus\n" in text


@pytest.mark.parametrize("place", ["s3://", ""])
def test_a_place_without_a_name_is_refused_before_it_is_queued(capsys, tmp_path, place):
    assert cli.main(["launch", "quickstart", "--prepare", place, "--shards", "2", "--on", "slurm"]) == 2
    assert f"--prepare {place!r}: names no bucket or folder." in capsys.readouterr().err


@pytest.mark.parametrize("case", ["array", "shards"])
def test_what_a_container_cannot_have_is_refused(case):
    with pytest.raises(ConfigError, match=r"^--container a\.sif: pyxis reads FILE\.sqsh or an image's name\."):
        render("slurm", case, container="a.sif", container_runtime="pyxis")
