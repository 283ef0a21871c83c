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
from reliability.warm import start_command
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
WRITTEN = {
    "token in a setting": "hf_CanaryCanaryCanaryCanary08",
    "password in a setting": "canary-horse-staple-09",
    "password in the URL of data": "canary-url-10",
    "password in the URL of a study": "canary-study-11",
    "token on the command line": "glpat-CanaryCanary12",
}


def hide_secrets(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """One set of commands with all the secrets; a trial looks for one of them."""
    used = OnceEach[tuple[Path, str]]()

    def use() -> tuple[Path, str]:
        folder = workload.make_folder("secrets")
        return folder, use_secrets(workload, folder)

    for place, secret in {**{f"{name} in the environment": ENVIRON[name] for name in ENVIRON}, **WRITTEN}.items():

        def run(folder: Path, secret: str = secret) -> None:
            produced, said = used.get("secrets", use)
            files = [path for path in produced.rglob("*") if path.is_file() and path.name != "recipe.yaml"]
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
    recipe = workload.write_recipe(folder, **FEW_STEPS)
    table = yaml.safe_load(recipe.read_text())
    table["report"] = {"title": f"{WRITTEN['token in a setting']} password={WRITTEN['password in a setting']}"}
    recipe.write_text(yaml.safe_dump(table))
    run, train = str(folder / "run"), ("train", str(recipe), *TRAIN_WORDS)
    address = f"https://me:{WRITTEN['password in the URL of data']}@127.0.0.1:9/x.json"
    storage = f"postgresql+psycopg2://me:{WRITTEN['password in the URL of a study']}@127.0.0.1:9/db"
    over = "{optimizer.lr: {choices: [0.001, 0.002]}}"
    commands = [
        (0, train),
        (0, ("report", run)),
        (0, ("card", run)),
        (0, ("evaluate", run)),
        (None, ("train", run, "--resume", *TRAIN_WORDS, "--report.title", WRITTEN["token on the command line"])),
        (None, (*train, "--overwrite", "--data.train", address)),
        (None, ("tune", str(recipe), "--search.over", over, "--search.storage", storage)),
        (None, ("predict", run, "--input", address)),
    ]
    said: list[str] = []
    for code, words in commands:
        with start_command(*words, environ=environ) as process:
            done = process.wait()
        assert code is None or done.returncode == code, f"{words[0]}: {done.stderr[-600:]}"
        said += [done.stdout, done.stderr]
    with start_server(Path(run), environ=environ) as (server, port):
        ask_with_a_wrong_token(port)
        said.append(stop_server(server))
    return "".join(said)


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
        "no file that training, report, card, evaluation, search and server write holds one, nor their output",
        hide_secrets, 12),
]  # fmt: skip
