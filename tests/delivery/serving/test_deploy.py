"""The files of deploy/: what they name exists, and fits together. No image is built here."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving_kit import Slow, serving

from fivetune.commands import serve
from fivetune.delivery.serving.guard import Guard
from fivetune.delivery.serving.serve import read_server_token

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
TOKEN = "0123456789abcdef"


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, str]]:
    """Instruction and value of each line of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.fixture(scope="module")
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def find(steps: list[tuple[str, str]], name: str) -> str:
    return next(rest for word, rest in reversed(steps) if word == name)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    return parser.parse_args(words)


def test_what_the_image_copies_exists_and_is_let_through(steps: list[tuple[str, str]]) -> None:
    copied = [shlex.split(rest)[:-1] for word, rest in steps if word == "COPY" and not rest.startswith("--from")]
    names = [name for line in copied for name in line]
    assert {"pyproject.toml", "fivetune", "recipes"} <= set(names)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for name in names:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"]} <= set(names)


def test_the_image_installs_what_the_lock_has_by_hash_and_nothing_else(steps: list[tuple[str, str]]) -> None:
    installs = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert len(installs) == 2
    assert "--require-hashes" in installs[0] and installs[0].endswith("-r release/image.txt")
    assert {"--no-deps", "--no-build-isolation"} <= set(installs[1].split())
    bases = [rest for word, rest in steps if word == "FROM"]
    python = re.fullmatch(r"BASE=python:(3\.\d+)-slim", find(steps, "ARG"))
    assert python and all("linux/amd64 ${BASE}" in base for base in bases)
    lock = (ROOT / "Makefile").read_text().partition("\nlock:")[2].partition("\n\n")[0]
    assert f"--python-version {python[1]}" in (ROOT / "Makefile").read_text() and "release/image.txt" in lock
    assert {"serve", "export", "adapters"} <= set(re.findall(r"--extra (\w+)", lock))


def test_the_image_has_a_place_for_plugins(steps: list[tuple[str, str]]) -> None:
    variables = dict(one.split("=", 1) for one in shlex.split(find(steps, "ENV")))
    folder = variables["FIVETUNE_PLUGINS"]
    made = " ".join(rest for word, rest in steps if word == "RUN")
    assert f"{folder}/tasks" in made and f"{folder}/metrics" in made  # a folder without one of them is refused


def test_the_image_starts_a_server_that_is_not_root(
    steps: list[tuple[str, str]], compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert int(find(steps, "USER")) > 0
    words = json.loads(find(steps, "ENTRYPOINT"))
    assert words[:2] == ["fivetune", "serve"]
    args = parse([*words[2:], *json.loads(find(steps, "CMD"))])
    assert args.port == int(find(steps, "EXPOSE")) and args.host == "0.0.0.0"
    service = compose["services"]["fivetune"]
    args = parse([*words[2:], *service["command"]])
    assert args.runs == json.loads(find(steps, "CMD")) and service["volumes"][0].endswith(f":{args.runs[0]}:ro")
    assert float(service["stop_grace_period"].removesuffix("s")) > args.drain_seconds
    assert list(service["environment"]) == [serve.TOKEN]
    monkeypatch.setenv(serve.TOKEN, TOKEN)
    assert read_server_token(args.host) == TOKEN
    [target] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0][
        "targets"
    ]
    name, _, port = target.partition(":")
    assert (name, port) == ("fivetune", str(args.port)) and name in compose["services"] and name in args.allow_host
    Guard(frozenset(args.allow_host)).check("/health", {"host": target})


def test_prometheus_finds_its_files_and_the_token(compose: Any) -> None:
    job = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    [secret] = compose["services"]["prometheus"]["secrets"]
    assert job["authorization"] == {"type": "Bearer", "credentials_file": f"/run/secrets/{secret}"}
    assert compose["secrets"][secret] == {"environment": serve.TOKEN}
    build = compose["services"]["fivetune"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    for volume in compose["services"]["prometheus"]["volumes"]:
        assert (DEPLOY / volume.partition(":")[0]).is_file()
    with serving(Slow(), token=TOKEN) as server:
        answer = server.client.get(job["metrics_path"])
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")


def test_the_health_check_fails_while_the_server_stops(steps: list[tuple[str, str]]) -> None:
    command = json.loads(find(steps, "HEALTHCHECK").partition("CMD ")[2])
    with serving(Slow(), token=TOKEN) as server:
        check = [sys.executable, *[one.replace(":8000", f":{server.port}") for one in command[1:]]]
        assert subprocess.run(check, check=False).returncode == 0
        server.batcher.close()
        assert subprocess.run(check, check=False, stderr=subprocess.DEVNULL).returncode == 1
