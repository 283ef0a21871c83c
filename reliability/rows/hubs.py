"""A hub that refuses, fails, gives half a file, or does not answer: models, data sets and uploads."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

from reliability.campaign import Row, Trial
from reliability.fake_hub import FakeHub, make_certificate, running_hub
from reliability.ranks import find_free_port
from reliability.rows.damage import STEPS
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import TRAIN_WORDS, Reference, Workload, check_weights, read_weights

MODEL, DATA, PUSHED = "org/tiny-t5", "org/things", "org/pushed"
OFFLINE = ("--model.path t5-nano", "HF_HOME")
LIMIT = ("5 seconds", "6 times", "HF_HUB_DOWNLOAD_TIMEOUT")
NO_FILES = ("name local files", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Fault:
    """What happens: a status by a part of the path, or a way by which files are given; what is said, and by when."""

    said: tuple[str, ...]
    status: int = 0
    way: str = ""
    part: str = ""
    address: str = ""
    is_self_signed: bool = False
    most_seconds: float = 15.0

    def begin(self, hub: FakeHub) -> str:
        """Begin it; returns the address to ask."""
        if self.status:
            hub.fails[self.part] = self.status
        elif self.way:
            hub.spoils[self.part] = self.way
        if self.address == "refused":
            return f"http://127.0.0.1:{find_free_port()}"
        return self.address or hub.address


MODEL_FAULTS = {  # what is said if the model is not in the cache
    "401": Fault(("log in",), 401, part=MODEL),
    "403": Fault(("403",), 403, part=MODEL),
    "404": Fault(("404",), 404, part=MODEL),
    "429": Fault(("429", *OFFLINE), 429, part=MODEL),
    "500": Fault(("500", *OFFLINE), 500, part=MODEL),
    "503": Fault(("503", *OFFLINE), 503, part=MODEL),
    "half a file": Fault(("the download was not finished", *LIMIT, *OFFLINE), way="half", part="model.safetensors"),
    "weights changed": Fault(("model.safetensors has another checksum",), way="changed", part="model.safetensors"),
    "tokenizer changed": Fault(("tokenizer.json has another checksum",), way="changed", part="tokenizer.json"),
    "a file never comes": Fault(
        ("the download was not finished", *LIMIT, *OFFLINE), way="never", part="resolve/", most_seconds=45
    ),
    "no answer": Fault(OFFLINE, way="never", part="/"),
    "refused": Fault(OFFLINE, address="refused"),
    "an address without a host": Fault(OFFLINE, address="http://hub.invalid"),
    "a self-signed certificate": Fault(("certificate", "SSL_CERT_FILE", *OFFLINE), is_self_signed=True),
}
DATA_FAULTS = {
    "500": Fault(("500", *NO_FILES), 500, part=DATA),
    "no answer": Fault(NO_FILES, way="never", part=DATA),
    "half a file": Fault((*LIMIT, *NO_FILES), way="half", part="train.jsonl"),
    "a file never comes": Fault((*LIMIT, *NO_FILES), way="never", part="train.jsonl", most_seconds=45),
    "refused": Fault(NO_FILES, address="refused"),
    "a self-signed certificate": Fault(("certificate", *NO_FILES), is_self_signed=True),
}
PUSH_FAULTS = {
    "500 at the commit": Fault(("500 while committing",), 500, part="/commit/"),
    "no answer": Fault(("did not answer for 2 seconds",), way="never", part="/"),
    "429 at the weights": Fault(("(429)",), 429, part="/objects/batch"),
    "429 at the repository": Fault(("(429)",), 429, part="/repos/create"),
    "refused": Fault(("cannot be reached",), address="refused"),
}


def disturb_hub(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Models and data sets under each fault, with and without them in the cache, and uploads."""
    whole, cache = workload.run_undisturbed(**STEPS), workload.make_folder("hub-cache")
    with running_hub() as hub:
        fill(hub, workload.model)
        done = train_from_hub(workload, cache, hub.address, cache / "home")
        check_success(done)
        shutil.rmtree(cache / "run")
        done = train_from_hub(workload, cache, hub.address, cache / "home", data__train=DATA)
        check_success(done)
    data = Reference(cache / "run", read_weights(cache / "run"), 0.0, 0.0)
    trials = [
        make_reading_trial(workload, f"{kind}, {name}, {place} the cache", fault, wanted, home, **overrides)
        for kind, faults, wanted, overrides in (
            ("model", MODEL_FAULTS, whole, {}),
            ("data set", DATA_FAULTS, data, {"data__train": DATA}),
        )
        for place, home in (("not in", None), ("in", cache / "home"))
        for name, fault in faults.items()
    ]
    trials += [make_push_trial(workload, name, fault) for name, fault in PUSH_FAULTS.items()]
    random.shuffle(trials)
    slow = [one for one in trials if "never comes, not in" in one.name]
    first = list[Trial]()
    for kind, place, num in (("model", "not in", 8), ("data set", "not in", 2), ("", ", in", 2), ("push", "", 2)):
        found = [one for one in trials if one.name.startswith(kind) and place in one.name and one not in slow]
        first += found[:num]
    yield from first
    yield from (one for one in trials if one not in first)


def make_reading_trial(
    workload: Workload, name: str, fault: Fault, wanted: Reference, cache: Path | None, **overrides: str
) -> Trial:
    """Train by a hub under a fault; what the cache holds is used, else the reason is said and the next run succeeds."""

    def run(folder: Path) -> None:
        home = folder / "home"
        if cache is not None:
            shutil.copytree(cache, home, symlinks=True)
        elif overrides:  # the fault is the data set's
            with running_hub() as hub:
                fill(hub, workload.model)
                fetch_model(hub.address, home)
        with running_hub(make_certificate(folder) if fault.is_self_signed else None) as hub:
            fill(hub, workload.model)
            address = fault.begin(hub)
            start = time.monotonic()
            done = train_from_hub(workload, folder, address, home, **overrides)
            seconds = time.monotonic() - start
        check_no_trace(done.stderr)
        assert seconds < fault.most_seconds, f"the command took {seconds:.1f} s: {done.stderr[-600:]}"
        if cache is not None:
            check_success(done)
        else:
            check_failure_told(done, fault)
            with running_hub() as hub:
                fill(hub, workload.model)
                done = train_from_hub(workload, folder, hub.address, home, **overrides)
            assert done.returncode == 0, f"after the fault, exit code {done.returncode}: {done.stderr[-600:]}"
        check_weights(read_weights(folder / "run"), wanted.weights)

    return Trial(name, run)


def make_push_trial(workload: Workload, name: str, fault: Fault) -> Trial:
    """Upload a run under a fault: nothing is published or changed, and the same command succeeds after it."""

    def run(folder: Path) -> None:
        source = folder / "run"
        shutil.copytree(workload.run_undisturbed(**STEPS).run, source, symlinks=True)
        before = read_files(source)
        with running_hub() as hub:
            words, home = ("push", str(source), PUSHED), folder / "home"
            done = use_hub(words, fault.begin(hub), home, HF_HUB_DOWNLOAD_TIMEOUT="2")
            check_failure_told(done, fault)
            assert "Nothing was published" in done.stderr, done.stderr[-600:]
            assert not hub.files.get(PUSHED), f"published: {sorted(hub.files[PUSHED])}"
            assert read_files(source) == before, "the run has changed"
            hub.fails.clear()
            hub.spoils.clear()
            done = use_hub(words, hub.address, home)
            check_success(done)
            assert hub.files[PUSHED]["model.safetensors"] == before[Path("model/model.safetensors")]

    return Trial(f"push, {name}", run)


def check_failure_told(done: CompletedProcess[str], fault: Fault) -> None:
    """The command ended with the exit code of the environment, and said what the fault is and what to do."""
    check_no_trace(done.stderr)
    assert done.returncode == 4, f"exit code {done.returncode}: {done.stderr[-600:]}"
    lost = [text for text in fault.said if text not in done.stderr]
    assert not lost, f"{lost} is not said: {done.stderr[-600:]}"


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill(hub: FakeHub, model: Path) -> None:
    """Give the hub a model folder, and a data set that trains it."""
    hub.repos |= {MODEL: False, DATA: False}
    hub.files[MODEL] = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    rows = [
        {
            "id": f"q{number}",
            "question": "What has Ann?",
            "context": f"Ann has {number} red hats.",
            "answers": {"text": [f"{number} red hats"], "answer_start": [8]},
        }
        for number in range(24)
    ]
    hub.files[DATA] = {"train.jsonl": "".join(json.dumps(row) + "\n" for row in rows).encode()}


def train_from_hub(
    workload: Workload, folder: Path, address: str, home: Path, **overrides: str
) -> CompletedProcess[str]:
    """Train the model of the hub; the run directory is `folder`/run."""
    recipe = workload.write_recipe(folder, **{**STEPS, "model__path": MODEL, **overrides})
    return use_hub(("train", str(recipe), *TRAIN_WORDS), address, home)


def use_hub(words: tuple[str, ...], address: str, home: Path, **environ: str) -> CompletedProcess[str]:
    """Run `fivetune WORDS` with the hub at an address."""
    return run_with_hub(call_command, words, address, home, **environ)


def fetch_model(address: str, home: Path) -> None:
    """Put the model into the cache."""
    done = run_with_hub(call_find_folder, (MODEL,), address, home)
    check_success(done)


def run_with_hub(
    work: Callable[..., int], words: tuple[str, ...], address: str, home: Path, **more: str
) -> CompletedProcess[str]:
    environ = {**os.environ, **more, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_TOKEN": FakeHub().token}
    environ["HF_HUB_DISABLE_XET"] = "1"  # the hub of these trials has no storage of that kind
    environ.pop("HF_HUB_OFFLINE", None)
    return WarmProcess(work, *words, environ=environ).finish()


def call_command(*words: str) -> int:
    read_environment()
    from fivetune.cli import main

    return main(list(words))


def call_find_folder(name: str) -> int:
    read_environment()
    from fivetune.model.files import find_folder

    find_folder(name)
    return 0


def read_environment() -> None:
    """Have the hub's libraries read the environment, which the server process has read before."""
    from huggingface_hub import constants

    importlib.reload(constants)
    if "datasets" in sys.modules:
        importlib.reload(sys.modules["datasets.config"])


ROWS = [
    Row("R22", "the hub refuses, fails, gives half a file or a changed one (of a model), never answers, cannot be "
        "reached, has a certificate of its own: for a model, a data set, an upload",
        "uses the cache, or gives the reason and the remedy within 15 s",
        disturb_hub, 14),
]  # fmt: skip
