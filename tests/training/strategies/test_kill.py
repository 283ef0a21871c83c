"""Processes of a sharded run that are killed while they save: it goes on exactly from the checkpoint before."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from built_once import build_once
from ranks import start_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from fivetune.distributed.world import World
from fivetune.rundir.checksums import find_damage
from fivetune.training.run import train
from fivetune.training.state import checkpoint

STAGES = {  # the ranks that are killed in the second save
    "before the shards": [1],
    "between the files of the ranks": [1],
    "before the manifest": [0],
    "before the rename": [0],
    "all before the manifest": [0, 1],
}
IN_BACKGROUND = ("between the files of the ranks", "before the manifest")
CASES = [*((stage, "") for stage in STAGES), *((stage, "background") for stage in IN_BACKGROUND)]
CASES += [("all before the manifest", "bucket")]  # with a copy at a URL, and a disk that is lost
DEFAULT = (("all before the manifest", "bucket"),)  # in `make test`


def recipe(folder: Path, model: Path, stage: str, kind: str) -> dict[str, Any]:
    name = f"{stage} {kind}".strip().replace(" ", "-")
    table = kit.recipe(
        folder,
        model,
        strategy="fsdp",
        launch={"nproc": 2},
        model__dropout=0.1,
        train__num_steps=5,
        eval__at_start=False,
        checkpoint={"every_steps": 2, "background": kind == "background"},
    )
    table["run"]["dir"] = str(folder / name)
    table["data"]["eval"] = []
    if kind == "bucket":
        table["checkpoint"]["url"] = f"file://{folder}/bucket"
    return table


def kill_all(pids: Path) -> None:
    """Kill this process and those that are in the folder, which wait for nothing but this."""
    for other in pids.iterdir():
        if int(other.name) != os.getpid():
            os.kill(int(other.name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(table: dict[str, Any], stage: str, pids: Path) -> None:
    """The ranks of the stage are killed in the second save, of step 4."""
    torch.set_num_threads(1)
    rank, staging = World.from_environment().rank, Path(table["run"]["dir"], "checkpoints", ".staging-4")
    patch = pytest.MonkeyPatch()
    (pids / str(os.getpid())).touch()

    def kill_before(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def run(*args: Any, **options: Any) -> Any:
            if (staging / "state.json").exists():
                if stage == "between the files of the ranks":
                    wait_for(staging / "__0_0.distcp")
                if url := table["checkpoint"].get("url"):
                    wait_for(Path(url.removeprefix("file://"), "checkpoints/2/manifest.json"))
                kill_all(pids) if stage.startswith("all") else os.kill(os.getpid(), signal.SIGKILL)
            return work(*args, **options)

        patch.setattr(owner, name, run)

    if rank == STAGES[stage][0]:
        if stage == "before the shards":
            from fivetune.distributed import shards

            kill_before(shards, "write_tensors")
        elif stage == "between the files of the ranks":
            kill_before(FileSystemWriter, "write_data")
        elif stage == "before the rename":
            kill_before(checkpoint, "replace_folder")
        else:
            kill_before(checkpoint, "write_checksums")
    train(table, preflight=False, quiet=True)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def resume_each(tables: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    for table in tables:
        resume = Path(table["run"]["dir"]).exists() or "url" in table["checkpoint"]
        train(table, resume=resume, preflight=False, quiet=True)


@dataclass(frozen=True)
class Killed:
    """Run directories by case; what the processes returned, and the checkpoints that were there then."""

    folders: dict[tuple[str, str], Path]
    codes: dict[tuple[str, str], list[int]]
    left: dict[tuple[str, str], list[str]]


@pytest.fixture(scope="module")
def killed(request, tmp_path_factory, model_folder) -> Killed:
    """All cases if tests of the release tier are selected."""
    cases = CASES if kit.has_release_tests(request) else DEFAULT
    return build_once(tmp_path_factory, "killed", partial(kill_and_resume, model_folder, cases))


def kill_and_resume(model_folder: Path, cases: Sequence[tuple[str, str]], folder: Path) -> Killed:
    tables = {case: recipe(folder, model_folder, *case) for case in [*cases, ("whole", "")]}
    folders = {case: Path(table["run"]["dir"]) for case, table in tables.items()}

    def kill(case: tuple[str, str]) -> list[int]:
        pids = folders[case].with_suffix(".pids")
        pids.mkdir()
        return [one.returncode for one in start_ranks(train_until_killed, tables[case], case[0], pids)]

    with ThreadPoolExecutor(4) as pool:
        codes = dict(zip(cases, pool.map(kill, cases), strict=True))
    left = {case: sorted(path.name for path in (folders[case] / "checkpoints").iterdir()) for case in cases}
    for case in cases:
        assert find_damage(folders[case] / "checkpoints/2") is None
        if case[1] == "bucket":
            shutil.rmtree(folders[case])
    ended = start_ranks(resume_each, list(tables.values()))
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return Killed(folders, codes, left)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [case if case in DEFAULT else kit.release(case) for case in CASES],
    ids=" ".join,
)
def test_a_run_killed_in_a_save_resumes_from_the_checkpoint_before(killed, case):
    ranks, codes = STAGES[case[0]], killed.codes[case]
    assert [codes[rank] for rank in ranks] == [-signal.SIGKILL] * len(ranks)
    assert all(code != 0 for code in codes)
    assert killed.left[case] in ([".staging-4", "2"], ["2"])
    run, whole = killed.folders[case], killed.folders["whole", ""]
    assert [line["step"] for line in read_lines(run)] == [1, 2, 3, 4, 5]
    assert [line["loss"] for line in read_lines(run)] == [line["loss"] for line in read_lines(whole)]
    assert kit.weights_of(run) == kit.weights_of(whole)
    parts = json.loads((run / "machine.json").read_text())["parts"]
    assert [part["step"] for part in parts] == [0, 2]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["4", "5"]


@pytest.mark.slow
def test_each_rank_uploads_its_own_shards(killed):
    """The copy of a run of two processes, one of which is on another node: all files, the model, nothing torn."""
    copy = killed.folders["whole", ""].parent / "bucket"
    assert sorted(path.parent.name for path in copy.glob("checkpoints/*/*.distcp")) == ["4", "4", "5", "5"]
    assert [find_damage(copy / name) for name in ("checkpoints/4", "checkpoints/5", "model")] == [None] * 3
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in (copy / "checkpoints/5").iterdir()}
    assert kit.weights_of(copy) == kit.weights_of(killed.folders["whole", ""])


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
