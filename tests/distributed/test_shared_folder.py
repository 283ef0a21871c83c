"""run.dir must be one folder for all nodes: a node that sees another one is named before anything is loaded."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import kit
import pytest
from ranks import start_ranks

from fivetune.distributed import shared_folder as shared
from fivetune.distributed.world import World
from fivetune.errors import FiveTuneError
from fivetune.training.run import train


def train_as_node(table: dict[str, Any], folders: list[str]) -> int:
    """One process of a node: its run.dir leads to a folder of its own, or to one that all see."""
    rank = World.from_environment().rank
    os.environ["LOCAL_RANK"] = "0"
    Path(folders[rank]).mkdir(exist_ok=True)
    os.chdir(folders[rank])
    check = shared.refuse_separate_folders
    patch = pytest.MonkeyPatch()
    look = partial(check, seconds=0.3, host=f"n{rank}")
    patch.setattr("fivetune.training.run.refuse_separate_folders", look)
    try:
        train(table, preflight=False, quiet=True)
    except FiveTuneError as error:
        print(error)
        return error.exit_code
    return 0


@pytest.mark.slow
def test_nodes_with_folders_of_their_own_are_refused(tmp_path, model_folder):
    table = kit.recipe(tmp_path, model_folder, strategy="ddp", launch={"nnodes": 2}, eval__at_start=False)
    table["run"]["dir"] = "run"
    first, second = (str(tmp_path / name) for name in ("a", "b"))
    ended = start_ranks(train_as_node, table, [first, second])
    assert [one.returncode for one in ended] == [4, 4], ended[0].stderr + ended[1].stderr
    told = "".join(one.stdout for one in ended).strip()
    assert told == (
        "run.dir: run of node 1 (n1) is not the folder of node 0 (n0): a file that node 0 wrote there did not appear "
        "within 0.3 s. All nodes read and write checkpoints there: put run.dir on a file system that they share."
    )
    assert not (tmp_path / "a/run").exists()
    ended = start_ranks(train_as_node, table, [first, first])
    assert [one.returncode for one in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert (tmp_path / "a/run/model").is_dir() and not [*(tmp_path / "a/run").glob(".shared*")]


def test_one_node_is_not_asked(tmp_path):
    shared.refuse_separate_folders(tmp_path / "none", World(), nnodes=1)
