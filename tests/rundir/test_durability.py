"""What a power cut may find: the order in which files are flushed to the disk and get their names."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

from fivetune.model.save import replace_folder
from fivetune.rundir.checksums import MANIFEST, compute_crc32, write_checksums
from fivetune.training.state.bucket import _fetch_checkpoint
from fivetune.training.state.checkpoint import TrainingState, write_checkpoint
from fivetune.training.state.snapshot import Snapshot


@pytest.fixture
def watch(monkeypatch) -> list[str]:
    """What is flushed and renamed, in order, by name."""
    done: list[str] = []
    rename, replace = Path.rename, Path.replace

    def flush(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        done.append("flush " + (MANIFEST if path.name.startswith(f".{MANIFEST}") else path.name))

    def note(call):
        def move(self: Path, target: Path) -> Path:
            done.append(f"name {Path(target).name}")
            return call(self, target)

        return move

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", note(rename))
    monkeypatch.setattr(Path, "replace", note(replace))
    return done


def test_the_order_of_a_checkpoint(tmp_path, watch):
    """All files are on the disk before the manifest, that before the folder's name, and the name before an older one
    is removed."""
    state = {"optimizer": {}, "scaler": {}, "random": {}, "random_of_others": []}
    write_checkpoint(tmp_path / "checkpoints", Snapshot({"w": torch.ones(2)}, state), TrainingState(step=3))
    name = watch.index(f"name {MANIFEST}")
    assert {"flush model.safetensors", "flush state.pt", "flush state.json"} <= set(watch[:name])
    assert watch[name - 1] == f"flush {MANIFEST}"
    assert watch[name:] == [f"name {MANIFEST}", *["flush .staging-3"] * 2, "name 3", "flush checkpoints"]


def test_the_order_of_a_fetched_checkpoint(tmp_path, watch):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "w").write_text("1234")
    write_checksums(tmp_path / "copy")
    watch.clear()
    _fetch_checkpoint(str(tmp_path / "copy"), tmp_path / "3")
    staging = ".staging-fetched-3"
    assert watch == [
        *("flush .w.tmp", "name w", f"flush {staging}"),
        *(f"flush {MANIFEST}", f"name {MANIFEST}", f"flush {staging}"),
        *("name 3", f"flush {tmp_path.name}"),
    ]


def test_a_folder_is_there_until_it_is_replaced(tmp_path, monkeypatch):
    """A process that ends between the renames leaves the old folder under another name."""
    old, new = tmp_path / "model", tmp_path / ".model.tmp"
    for folder in (old, new):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    rename = Path.rename

    def die(self: Path, target: Path) -> Path:
        if target == old:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(new, old)
    assert (tmp_path / ".model.old" / "name").read_text() == "model"


def test_the_checksum_of_a_large_file_is_that_of_all_its_blocks(tmp_path):
    content = os.urandom(2**20) + b"end"
    (tmp_path / "file").write_bytes(content)
    assert compute_crc32(tmp_path / "file") == zlib.crc32(content)
