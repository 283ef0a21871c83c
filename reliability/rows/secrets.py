"""Secrets in environment, settings, command lines and URLs: none is in what a command wrote or said."""

from __future__ import annotations

import os
import random
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from reliability.campaign import Row, Trial
from reliability.requests import start_server, stop_server
from reliability.rows.kills import FEW_STEPS
from reliability.rows.search import tune_warm
from reliability.warm import WarmProcess, start_command
from reliability.workload import TRAIN_WORDS, OnceEach, Workload

ENVIRON = {
    "HF_TOKEN": "hf_CanaryCanaryCanaryCanary01",
    "WANDB_API_KEY": "0ca0a0e5ca0a0e5ca0a0e5ca0a0e5ca0a0e5ca02",
    "AWS_SECRET_ACCESS_KEY": "CanaryCanary/K7MDENG/bPxRfiCYCanaryKey03",
    "OPENAI_API_KEY": "sk-proj-CanaryCanaryCanary04",
    "GITHUB_TOKEN": "ghp_CanaryCanaryCanaryCanaryCanary05",
    "DATABASE_PASSWORD": "correct-canary-battery-06",
    "FIVETUNE_TOKEN": "canary-of-the-server-07",
}
SEARCH = "search.yaml"
WRITTEN = {
    "token in a setting": "hf_CanaryCanaryCanaryCanary08",
    "password in a setting": "canary-horse-staple-09",
    "password in the URL of data": "canary-url-10",
    "password in the URL of a study": "canary-study-11",
    "token on the command line": "glpat-CanaryCanary12",
}


def hide_secrets(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """One set of commands with all the secrets; a trial looks for one of them."""
    used = OnceEach[tuple[Path, str, str]]()

    def use() -> tuple[Path, str, str]:
        """The folder, what was said, and what failed, which is not tried again."""
        folder = workload.make_folder("secrets")
        try:
            return folder, use_secrets(workload, folder), ""
        except Exception as error:  # nothing was shown
            return folder, "", f"{type(error).__name__}: {error}"

    for place, secret in {**{f"{name} in the environment": ENVIRON[name] for name in ENVIRON}, **WRITTEN}.items():

        def run(folder: Path, secret: str = secret) -> None:
            produced, said, failure = used.get("secrets", use)
            assert not failure, failure
            written = {produced / "recipe.yaml", produced / SEARCH}
            files = [path for path in produced.rglob("*") if path.is_file() and path not in written]
            assert len(files) > 20
            found = [str(path.relative_to(produced)) for path in files if secret.encode() in path.read_bytes()]
            assert not found, f"in {found}"
            assert secret not in said, f"said: {said[said.find(secret) - 200 :][:300]}"

        yield Trial(place, run)


def use_secrets(workload: Workload, folder: Path) -> str:
    """Train, show, serve and fail with the secrets; returns all that the commands said."""
    places = {name: str(folder / name.lower()) for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME")}
    for place in places.values():
        Path(place).mkdir()
    environ = {**os.environ, **places, **ENVIRON}
    recipe, search = workload.write_recipe(folder, **FEW_STEPS), folder / SEARCH
    table = yaml.safe_load(recipe.read_text())
    table["report"] = {"title": f"{WRITTEN['token in a setting']} password={WRITTEN['password in a setting']}"}
    recipe.write_text(yaml.safe_dump(table))
    table["search"] = {"over": {"optimizer.lr": {"choices": [0.001]}}, "num_trials": 1}
    search.write_text(yaml.safe_dump(table))
    said: list[str] = []
    for code, words in list_commands(folder, recipe, search):
        with start_command(*words, environ=environ) as process:
            said += check_code(process, code)
    with WarmProcess(tune_warm, str(search), str(folder / "study"), "", environ=environ) as process:
        said += check_code(process, 0)
    assert (folder / "study" / "search.html").exists()
    with start_server(folder / "run", environ=environ) as (server, port):
        ask_with_a_wrong_token(port)
        said.append(stop_server(server))
    return "".join(said)


def list_commands(folder: Path, recipe: Path, search: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Commands that get the secrets by recipes or as words, each with its exit code."""
    run, train = str(folder / "run"), ("train", str(recipe), *TRAIN_WORDS)
    address = f"https://me:{WRITTEN['password in the URL of data']}@127.0.0.1:9/x.json"
    storage = f"postgresql+psycopg2://me:{WRITTEN['password in the URL of a study']}@127.0.0.1:9/db"
    launch = ("launch", str(recipe), "--dry-run", "--run.dir", "runs/launched", "--on")
    pods = ("kubernetes", "--image", "i", "--volume", "v", "--mount", str(folder))
    return [
        (0, train),
        (0, ("config", str(recipe), "--data.train", address)),
        (0, ("config", run)),
        (0, ("check", str(recipe), "--run.dir", f"{run}-3")),
        (0, ("report", run)),
        (0, ("card", run)),
        (0, ("evaluate", run)),
        (0, ("export", run, "--format", "hf")),
        (
            0,
            (
                *train,
                "--run.dir",
                f"{run}-2",
                "--optimizer.lr",
                "0.002",
                "--report.title",
                WRITTEN["token on the command line"],
            ),
        ),
        (0, ("compare", run, f"{run}-2", "--output", str(folder / "comparison.html"))),
        (0, (*launch, "slurm")),
        (0, (*launch, *pods)),
        (0, (*launch, "skypilot", "--image", "i", "--bucket", "s3://b")),
        (2, (*launch, "slurm", "--data.eval", address)),
        (4, (*train, "--overwrite", "--data.train", address)),
        (4, ("tune", str(search), "--search.storage", storage)),
        (3, ("predict", run, "--input", address)),
    ]


def check_code(process: WarmProcess, code: int) -> list[str]:
    """Wait for the end of a command, which has this exit code; returns what it said."""
    done = process.wait()
    assert done.returncode == code, f"{process.name}: exit code {done.returncode}: {done.stderr[-600:]}"
    return [done.stdout, done.stderr]


def ask_with_a_wrong_token(port: int) -> None:
    """One request with another token than the server's."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers={"Authorization": "Bearer wrong"})
    try:
        urllib.request.urlopen(request, timeout=30).close()
    except urllib.error.HTTPError as error:
        error.close()
        assert error.code == 401
    else:
        raise AssertionError("a wrong token was accepted")


ROWS = [
    Row("R27", "12 secrets in environment, settings, command lines and URLs",
        "no file and no output contains a secret; a job that would is refused", hide_secrets, 12),
]  # fmt: skip
