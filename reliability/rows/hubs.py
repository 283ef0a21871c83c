"""A model hub that refuses, fails, gives half a file, or does not answer."""

from __future__ import annotations

import importlib
import os
import random
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess

from reliability.campaign import Row, Trial
from reliability.fake_hub import FakeHub, running_hub
from reliability.rows.damage import STEPS
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import TRAIN_WORDS, Workload, check_weights, read_weights

MODEL = "org/tiny-t5"
MOST_SECONDS = 15.0
OFFLINE = ("HF_HOME", "HF_HUB_OFFLINE")
FAULTS: dict[str, tuple[str, ...]] = {  # what happens, and what is said if the model is not in the cache
    "401": ("log in",),
    "403": ("403",),
    "404": ("404",),
    "429": ("429", *OFFLINE),
    "500": ("500", *OFFLINE),
    "503": ("503", *OFFLINE),
    "half a file": ("the download was not finished", *OFFLINE),
    "a bit of a file changed": ("model.safetensors has another checksum",),
    "a file never comes": ("the download was not finished", *OFFLINE),
    "no answer": OFFLINE,
    "refused": OFFLINE,
    "an address without a host": OFFLINE,
}


def disturb_hub(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Train a model of the hub under each fault, with and without the model in the cache."""
    whole = workload.run_undisturbed(**STEPS)
    cache = workload.make_folder("hub-cache")
    with running_hub() as hub:
        fill(hub, workload.model)
        done = train_from_hub(workload, cache, hub.address, cache / "home")
    check_success(done)
    cached = random.sample(list(FAULTS), len(FAULTS))
    for fault, is_cached in [*((fault, False) for fault in FAULTS), *((fault, True) for fault in cached)]:

        def run(folder: Path, fault: str = fault, is_cached: bool = is_cached) -> None:
            home = folder / "home"
            if is_cached:
                shutil.copytree(cache / "home", home, symlinks=True)
            with running_hub() as hub:
                fill(hub, workload.model)
                address = spoil(hub, fault)
                start = time.monotonic()
                done = train_from_hub(workload, folder, address, home)
                seconds = time.monotonic() - start
            check_no_trace(done.stderr)
            assert seconds < MOST_SECONDS, f"the command took {seconds:.1f} s: {done.stderr[-600:]}"
            if is_cached:
                check_success(done)
            else:
                assert done.returncode == 4, f"exit code {done.returncode}: {done.stderr[-600:]}"
                lost = [text for text in FAULTS[fault] if text not in done.stderr]
                assert not lost, f"{lost} is not said: {done.stderr[-600:]}"
                with running_hub() as hub:
                    fill(hub, workload.model)
                    done = train_from_hub(workload, folder, hub.address, home)
                assert done.returncode == 0, f"after the fault, exit code {done.returncode}: {done.stderr[-600:]}"
            check_weights(read_weights(folder / "run"), whole.weights)

        yield Trial(f"{fault}, {'in' if is_cached else 'not in'} the cache", run)


def fill(hub: FakeHub, model: Path) -> None:
    """Give the hub a model folder."""
    hub.repos[MODEL] = False
    hub.files[MODEL] = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}


def spoil(hub: FakeHub, fault: str) -> str:
    """Begin a fault; returns the address to ask."""
    if fault.isdecimal():
        hub.fails[MODEL] = int(fault)
    elif fault == "half a file":
        hub.spoils["model.safetensors"] = "half"
    elif fault == "a bit of a file changed":
        hub.spoils["model.safetensors"] = "changed"
    elif fault == "a file never comes":
        hub.spoils["resolve/"] = "never"
    elif fault == "no answer":
        hub.spoils["/"] = "never"
    elif fault == "refused":
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            return f"http://127.0.0.1:{free.getsockname()[1]}"
    else:
        return "http://hub.invalid"
    return hub.address


def train_from_hub(workload: Workload, folder: Path, address: str, home: Path) -> CompletedProcess[str]:
    """Train the model of the hub; the run directory is `folder`/run."""
    recipe = workload.write_recipe(folder, **STEPS, model__path=MODEL)
    environ = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_TOKEN": FakeHub().token}
    environ |= {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}  # seconds between two pieces of a file; 10 by default, tried six times
    environ.pop("HF_HUB_OFFLINE", None)
    with WarmProcess(train_with_hub, str(recipe), environ=environ) as process:
        return process.wait()


def train_with_hub(recipe: str) -> int:
    """Run `fivetune train RECIPE` with the hub of the environment, which the server process has read before."""
    from huggingface_hub import constants

    importlib.reload(constants)
    from fivetune.cli import main

    return main(["train", recipe, *TRAIN_WORDS])


ROWS = [
    Row("R22", "the hub refuses, fails, gives half a file or a changed one, never answers, cannot be reached",
        "a model in the cache is used; else the reason and what to do in 15 s; the next attempt succeeds",
        disturb_hub, 14, 24),
]  # fmt: skip
