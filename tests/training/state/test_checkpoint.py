"""Checkpoints: everything comes back, whatever happens to the files."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import shutil
from pathlib import Path

import kit
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fivetune import rundir
from fivetune.data.store.batch import collate
from fivetune.errors import FiveTuneEnvironmentError, RunDirError
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.rundir.checksums import write_checksums
from fivetune.rundir.records import BestEval
from fivetune.training.run import train
from fivetune.training.state import checkpoint
from fivetune.training.state.checkpoint import TrainingState
from fivetune.training.state.snapshot import get_random_states, set_random_states, take_snapshot
from fivetune.training.step.update import train_step

FILES = ("model.safetensors", "state.pt", "state.json")


def _step(setup) -> float:
    return train_step(setup.learner, [collate(setup.data.stream.store, [0, 1, 2, 3])], lr=1e-3, step=1).loss


def _save(folder: Path, setup, step: int = 1, **facts) -> Path:
    taken = take_snapshot(setup.learner.model, setup.learner.optimizer, setup.learner.scaler)
    return checkpoint.write_checkpoint(folder, taken, TrainingState(step=step, **facts))


@pytest.fixture(scope="module")
def setup(tmp_path_factory, model_folder):
    """Something to save; no test changes it."""
    return kit.ready(tmp_path_factory.mktemp("setup"), model_folder)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_everything_comes_back(tmp_path, model_folder, optimizer):
    """After a restore the next step, dropout included, is the step that would have been."""
    table = {"optimizer": {"name": optimizer, "lr": 1e-3}, "model__dropout": 0.1}
    setup = kit.ready(tmp_path, model_folder, **table)
    _step(setup)
    _ = random.random(), np.random.rand()  # no longer the states of the seed
    facts = {"best": BestEval(1, "f1", 50.0), "seconds": {"train": 1.5}}
    path = _save(tmp_path / "checkpoints", setup, **facts)
    expected = [_step(setup), random.random(), float(np.random.rand()), torch.rand(1).item()]

    fresh = kit.ready(tmp_path, model_folder, **table)
    assert checkpoint.restore_checkpoint(
        path, fresh.learner.model, fresh.learner.optimizer, fresh.learner.scaler
    ) == TrainingState(step=1, **facts)
    assert [_step(fresh), random.random(), float(np.random.rand()), torch.rand(1).item()] == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(setup.learner.model.parameters(), fresh.learner.model.parameters(), strict=True)
    )


def test_the_loss_scale_comes_back(tmp_path, setup):
    scaled, fresh = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0**7, 2.0**16))
    scaled.scale(torch.ones(()))  # makes its tensors
    model, optimizer = setup.learner.model, setup.learner.optimizer
    taken = take_snapshot(model, optimizer, scaled)
    path = checkpoint.write_checkpoint(tmp_path / "checkpoints", taken, TrainingState(step=1))
    checkpoint.restore_checkpoint(path, model, optimizer, fresh)
    assert fresh.get_scale() == 2.0**7


def test_random_states_of_more_devices_than_are_visible_are_those_of_this_one(monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: taken.append(int(state)))
    states = get_random_states()
    set_random_states(states)
    set_random_states({**states, "cuda": [torch.tensor([number]) for number in range(8)]})  # of an earlier version
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_random_states(states)
    assert len(states["cuda"]) == 1 and taken == [1, 1]


def test_state_with_a_field_of_another_version_is_read(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup, 3)
    facts = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**facts, "mood": "good"}))
    assert (
        checkpoint.restore_checkpoint(path, setup.learner.model, setup.learner.optimizer, setup.learner.scaler).step
        == 3
    )


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o027, 0o640)])
def test_file_modes_follow_the_umask(tmp_path, model_folder, mask, mode):
    """Weights had mode 0600, so that no other user could read them."""
    before = os.umask(mask)
    try:
        train(kit.recipe(tmp_path, model_folder, train__num_steps=1), preflight=False, quiet=True)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.parent.parent.name == "checkpoints" for path in files)
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {path.name: mode for path in files}


def test_checkpoint_of_another_model_is_refused(tmp_path, setup, family_folders):
    path = _save(tmp_path / "checkpoints", setup)
    other = kit.ready(tmp_path, family_folders["v1_1"])
    with pytest.raises(RunDirError, match=r"checkpoints/1: is of another model or optimizer: .*Start a new run."):
        checkpoint.restore_checkpoint(path, other.learner.model, other.learner.optimizer, other.learner.scaler)


def test_manifest_lists_every_file(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup)
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(listed) == sorted(FILES)
    assert sorted(p.name for p in path.iterdir()) == sorted([*FILES, "manifest.json"])
    assert checkpoint.find_damage(path) is None


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "flipped": _flip,
}


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
@pytest.mark.parametrize("kind", list(DAMAGE))
def test_damage_is_found_and_set_aside(tmp_path, setup, name, kind):
    folder = tmp_path / "checkpoints"
    older, newer = _save(folder, setup, 1), _save(folder, setup, 2)
    DAMAGE[kind](newer / name)
    if checkpoint.find_damage(newer) is None:  # a manifest cut by its last newline, or changed in white space, is whole
        assert name == "manifest.json"
        return
    said: list[str] = []
    assert checkpoint.find_newest_checkpoint(folder, on_damage=said.append) == older
    assert sorted(p.name for p in folder.iterdir()) == ["1", "2.damaged"]
    assert len(said) == 1 and "Set aside as 2.damaged; going back to the checkpoint before it." in said[0]
    if name != "manifest.json":  # a damaged manifest may accuse any file
        assert (
            f"checkpoints/2: {name} is {'missing' if kind == 'missing' else 'damaged (its checksum differs)'}"
            in said[0]
        )


def test_every_flipped_bit_of_the_manifest_is_found_or_harmless(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup)
    content = (path / "manifest.json").read_bytes()
    for position in range(len(content)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (path / "manifest.json").write_bytes(changed)
        if checkpoint.find_damage(path) is None:  # a lower format version, or other white space
            assert json.loads(changed)["files"] == json.loads(content)["files"]


def test_format_of_a_later_version_is_not_read(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format_version": 9}))
    assert checkpoint.find_damage(path) == "written in format 9, this version reads up to 1"


def test_nothing_whole_means_from_the_start(tmp_path, setup):
    assert checkpoint.find_newest_checkpoint(tmp_path / "checkpoints", on_damage=print) is None
    _flip(_save(tmp_path / "checkpoints", setup) / "state.pt")
    assert checkpoint.find_newest_checkpoint(tmp_path / "checkpoints", on_damage=lambda text: None) is None


@pytest.fixture(scope="module")
def finished(tmp_path_factory, model_folder):
    """A run of 6 steps with checkpoints at 2 (the best), 4 and 6; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    table = kit.recipe(folder, model_folder, eval__every_steps=2, eval__metric="HasAns_exact", checkpoint__keep=3)
    train(table, preflight=False, quiet=True)
    return table


def _copied(finished: dict, folder: Path) -> dict:
    run = shutil.copytree(finished["run"]["dir"], folder / "run", symlinks=True)
    return {**finished, "run": {"dir": str(run), "seed": 1}}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in FILES] + ["manifest.json"])
def test_run_with_a_damaged_checkpoint_still_ends_the_same(tmp_path, finished, name):
    table = _copied(finished, tmp_path)
    run = Path(table["run"]["dir"])
    before = rundir.read_run(run)
    DAMAGE["empty"](run / "checkpoints" / "6" / name)
    shutil.rmtree(run / "model")
    after = train(table, resume=True, quiet=True)
    assert kit.weights_of(run) == kit.weights_of(Path(finished["run"]["dir"]))
    assert [s.step for s in after.steps] == [1, 2, 3, 4, 5, 6]
    assert [s.loss for s in after.steps] == [s.loss for s in before.steps]
    assert after.status.best == before.status.best
    assert "Set aside as 6.damaged" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_damaged_best_checkpoint_is_not_exported(tmp_path, model_folder, monkeypatch):
    kit.scored(monkeypatch, [9.0, 8.0])
    table = kit.recipe(tmp_path, model_folder)
    run = tmp_path / "run"
    assert train(table, preflight=False, quiet=True).status.best.step == 3
    _flip(run / "checkpoints" / "3" / "model.safetensors")
    after = train(table, resume=True, quiet=True)
    assert any("It was the best checkpoint; model/ holds the last weights instead." in w for w in after.warnings)
    last = load_file(run / "checkpoints" / "6" / "model.safetensors")
    exported = load_file(run / "model" / "model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in exported.items() if name in last)
    assert exported.keys() & last.keys()
    assert after.status.best is None


def test_rotation_keeps_the_newest_and_the_best(tmp_path, setup):
    folder = tmp_path / "checkpoints"
    for step in (2, 9, 10, 11):
        _save(folder, setup, step)
    (folder / "7.damaged").mkdir()
    (folder / ".staging-5").mkdir()  # of a process that was killed
    (folder / ".9.old").mkdir()
    checkpoint.remove_old_checkpoints(folder, keep=2, held={2})
    assert sorted(p.name for p in folder.iterdir()) == ["10", "11", "2", "7.damaged"]


def _write_state(path: Path, **changes) -> None:
    """A state.json with another content and a right manifest, as a program with a fault would write it."""
    facts = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**facts, **changes}))
    write_checksums(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "x"},
        {"step": 1_000_000},
        {"step": None},
        {"best": {"step": 99, "metric": "f1", "score": 1}},
        {"best": [1]},
        {"seconds": []},
        {"seconds": {"train": "long"}},
        {"owner": []},
        {"owner": {"batch_size": "many"}},
    ],
    ids=str,
)
def test_a_state_of_the_wrong_kind_is_damage(tmp_path, setup, changes):
    folder, said = tmp_path / "checkpoints", []
    older = _save(folder, setup, 1)
    _write_state(_save(folder, setup, 2), **changes)
    assert checkpoint.find_newest_checkpoint(folder, on_damage=said.append) == older
    assert len(said) == 1 and "checkpoints/2: state.json is damaged (" in said[0]


def test_a_state_of_another_kind_of_json_is_damage(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup)
    for content in (b"[]", b'"x"', b"null", b"{}", b"\xe5", b"[" * 100_000):
        (path / "state.json").write_bytes(content)
        assert "state.json is damaged" in (checkpoint.find_state_damage(path) or "")
        with pytest.raises(RunDirError, match=r"checkpoints/1: state.json is damaged"):
            checkpoint.restore_checkpoint(path, setup.learner.model, setup.learner.optimizer, setup.learner.scaler)


def test_a_foreign_pickle_is_not_loaded(tmp_path, setup):
    path = _save(tmp_path / "checkpoints", setup)
    torch.save({"optimizer": Path("x")}, path / "state.pt")
    write_checksums(path)
    with pytest.raises(RunDirError, match=r"state.pt: holds objects other than tensors and plain values, .*Remove"):
        checkpoint.restore_checkpoint(path, setup.learner.model, setup.learner.optimizer, setup.learner.scaler)


@pytest.mark.parametrize(
    "thing",
    [os.system, Path.unlink, checkpoint.TrainingState(), OSError],
    ids=["function", "method", "record", "class"],
)
def test_foreign_metadata_of_shards_are_not_loaded(tmp_path, setup, thing):
    path = _save(tmp_path / "checkpoints", setup)
    (path / ".metadata").write_bytes(pickle.dumps(thing))
    with pytest.raises(RunDirError, match=r"\.metadata: holds objects other than tensors and plain values, .*Remove"):
        checkpoint.load_weights(path, setup.learner.model)


def test_weights_that_do_not_fit_into_memory_are_an_environment_error(tmp_path, setup, monkeypatch):
    path = _save(tmp_path / "checkpoints", setup)

    def full(file):
        raise MemoryError

    monkeypatch.setattr(checkpoint, "load_file", full)
    with pytest.raises(RunDirError, match=r"model.safetensors: cannot be loaded: MemoryError. Free memory and resume"):
        checkpoint.load_weights(path, setup.learner.model)


def test_damaged_weights_do_not_ask_for_memory(tmp_path, setup):
    """They were "Free memory and resume"."""
    path = _save(tmp_path / "checkpoints", setup)
    (path / "model.safetensors").write_bytes(b"\x80\x04" * 64)
    with pytest.raises(RunDirError, match=r"model.safetensors: cannot be loaded: .* Remove the folder and resume\.$"):
        checkpoint.load_weights(path, setup.learner.model)


def test_checkpoints_are_ordered_by_number(tmp_path, setup):
    folder = tmp_path / "checkpoints"
    for step in (7, 14):
        _save(folder, setup, step)
    assert checkpoint.find_newest_checkpoint(folder, on_damage=print) == folder / "14"
    checkpoint.remove_old_checkpoints(folder, keep=1, held=())
    assert checkpoint.list_steps(folder) == [14]


def test_other_names_among_checkpoints_are_left_alone(tmp_path, setup):
    folder = tmp_path / "checkpoints"
    path = _save(folder, setup, 1)
    for name in ("9\u00b2", "\u0663", "7x", "1" * 30):
        (folder / name).mkdir()
    assert checkpoint.find_newest_checkpoint(folder, on_damage=print) == path
    checkpoint.remove_old_checkpoints(folder, keep=1, held=())
    assert len(list(folder.iterdir())) == 5


def test_a_linked_checkpoint_is_removed_without_its_target(tmp_path, setup):
    folder = tmp_path / "checkpoints"
    elsewhere = _save(tmp_path / "elsewhere", setup, 1)
    folder.mkdir()
    (folder / "1").symlink_to(elsewhere)
    _save(folder, setup, 2)
    checkpoint.remove_old_checkpoints(folder, keep=1, held=())
    assert checkpoint.list_steps(folder) == [2] and checkpoint.find_damage(elsewhere) is None


def test_a_checkpoint_that_cannot_be_removed_is_reported_and_stays(tmp_path, setup, monkeypatch):
    folder, said = tmp_path / "checkpoints", []
    for step in (1, 2):
        _save(folder, setup, step)

    def refuse(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    checkpoint.remove_old_checkpoints(folder, keep=1, held=(), on_failure=said.append)
    assert said == [f"{folder}/1: cannot be removed: No space left on device. The run continues; remove it by hand."]


def test_a_run_goes_on_when_neither_link_nor_rotation_succeeds(tmp_path, model_folder, monkeypatch, capfd):
    def refuse(*_, ignore_errors=False, **__):
        if not ignore_errors:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    table = kit.recipe(tmp_path, model_folder, checkpoint={"every_steps": 1, "keep": 2}, eval__at_start=False)
    run = train(table, preflight=False, quiet=True)
    assert run.status.state == "finished"
    assert any("best: cannot be pointed at" in text for text in run.warnings)
    assert any("cannot be removed: No space left on device" in text for text in run.warnings)


def test_a_missing_earlier_checkpoint_is_not_promised(tmp_path, setup, monkeypatch):
    folder = tmp_path / "checkpoints"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(RunDirError, match=r"It needs \d+\.\d KiB, .* are free\. .*There is no earlier checkpoint\.$"):
        _save(folder, setup, 1)
    (folder / "1").mkdir(parents=True)
    with pytest.raises(RunDirError, match=r"Earlier checkpoints are whole\.$"):
        _save(folder, setup, 2)


@pytest.mark.parametrize(
    "said", ["[inline_container.cc:672] . unexpected pos 1 vs 0", "basic_ios::clear: iostream error"]
)
def test_what_torch_says_of_a_write_that_fails_is_explained(tmp_path, setup, monkeypatch, said):
    def fail(*_):
        raise RuntimeError(said)

    monkeypatch.setattr(checkpoint.torch, "save", fail)
    with pytest.raises(RunDirError, match=r"cannot be written: the system did not write the whole file\. It needs"):
        _save(tmp_path / "checkpoints", setup, 1)


def test_best_link_follows(tmp_path, setup):
    for step in (1, 2):
        path = _save(tmp_path / "checkpoints", setup, step)
        checkpoint.update_best_link(tmp_path, step)
        assert (tmp_path / "best").resolve() == path.resolve()
    assert os.readlink(tmp_path / "best") == "checkpoints/2"


# --- a disk that does not take it ---


@pytest.mark.parametrize("k", range(1, 8))
def test_failed_write_leaves_nothing_half_written(tmp_path, setup, monkeypatch, k):
    """The k-th fsync fails, wherever that is: the checkpoint of before is whole, nothing else is there."""
    folder = tmp_path / "checkpoints"
    older = _save(folder, setup, 1)
    whole, calls = os.fsync, iter(range(1, 99))

    def full(handle: int) -> None:
        if next(calls) == k:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        RunDirError, match=r"checkpoints/2: the checkpoint cannot be written: .*No space left on device"
    ):
        _save(folder, setup, 2)
    assert checkpoint.find_damage(older) is None
    assert all(checkpoint.find_damage(path) is None for path in folder.iterdir())
    assert [p.name for p in folder.iterdir() if p.name.startswith(".")] == []


@pytest.fixture
def small_disk():
    """No file may grow beyond 20 kB: the system itself refuses, in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_real_full_disk(tmp_path, setup, small_disk):
    with pytest.raises(
        RunDirError,
        match=r"checkpoints/1: the checkpoint cannot be written: .*File too large.* It needs .* are free. "
        r"Look at the quota and at the limit of a file's size \(ulimit -f\). There is no earlier",
    ):
        _save(tmp_path / "checkpoints", setup)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_model_that_cannot_be_written(tmp_path, model_folder, small_disk):
    loaded = load_model_and_tokenizer(str(model_folder))
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"out: the model cannot be written: .*Free disk space, or look at .*ulimit -f"
    ):
        save_model(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_second_try_may_succeed(tmp_path, model_folder, monkeypatch):
    """One failed write does not end a run; it is told."""
    whole, calls = checkpoint.save_file, iter(range(99))

    def once(weights, path):
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(weights, path)

    monkeypatch.setattr(checkpoint, "save_file", once)
    monkeypatch.setattr("fivetune.training.save.time.sleep", lambda seconds: None)
    run = train(kit.recipe(tmp_path, model_folder), preflight=False, quiet=True)
    assert run.status.state == "finished"
    assert "Retrying once." in (tmp_path / "run" / "log.txt").read_text()
