"""What is converted is what was hashed: files that change under a build, tokenised data that change under a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fivetune.data.examples import Source
from fivetune.data.guard import ChangedSourceError, SourceGuard
from fivetune.data.store import build
from fivetune.data.store import token_store as store_module
from fivetune.data.store.arrays import DamagedStoreError
from fivetune.data.store.batch import collate
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.prepared import open_prepared, write_prepared
from fivetune.data.store.token_store import TokenStore, load_or_build_store, read_index
from fivetune.errors import DataError
from fivetune.tasks.jsonl import JSONL

NUM = 60
SHARD, ROWS = "shard-00001.safetensors", "rows.safetensors"


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def make_lines(word: str) -> str:
    rows = ({"id": f"example-{i:03d}", "inputs": "a hat " * (i % 5 + 1), "targets": word} for i in range(NUM))
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """60 examples, six shards of ten."""
    monkeypatch.setattr(build, "BLOCK", 5)
    monkeypatch.setattr(build, "SHARD_ROWS", 10)
    (tmp_path / "pairs.jsonl").write_text(make_lines("red"))
    return Source((str(tmp_path / "pairs.jsonl"),), JSONL(), LengthLimits(32, 8), for_training=True)


def rows_of(store: TokenStore) -> list[tuple[Any, ...]]:
    return [
        (store.get_id(row), store.inputs[row].tolist(), store.labels[row].tolist(), store.read_example(row))
        for row in range(len(store))
    ]


# --- files that change while they are read ---


def overwrite(path: Path) -> None:
    with path.open("r+") as file:
        file.write(make_lines("tan"))


def overwrite_and_restore_time(path: Path) -> None:
    before = path.stat()
    overwrite(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_another(path: Path) -> None:
    (path.parent / "new").write_text(make_lines("tan"))
    (path.parent / "new").rename(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 7)  # in the middle of a line


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(make_lines("tan").replace("example", "other"))


CHANGES = [overwrite, overwrite_and_restore_time, replace_by_another, cut, append, os.unlink]


def change_once(path: Path, change: Callable[[Path], object], *, after: int) -> Callable[..., None]:
    """Progress that changes a file when so many examples are converted."""
    done: list[int] = []

    def report(what: str, num: int, total: int | None = None) -> None:
        if num >= after and not done:
            done.append(num)
            change(path)

    return report


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("after", [0, 25, NUM])
def test_a_file_that_changes_while_it_is_converted_is_refused(source, tokenizer, tmp_path, change, after):
    path, cache = tmp_path / "pairs.jsonl", tmp_path / "cache"
    with pytest.raises(DataError, match=r"pairs\.jsonl: changed while it was read") as caught:
        load_or_build_store(source, tokenizer, cache=cache, on_progress=change_once(path, change, after=after))
    assert caught.value.exit_code == 3 and list(cache.iterdir()) == []
    path.write_text(make_lines("red"))
    store = load_or_build_store(source, tokenizer, cache=cache)
    assert {store.read_example(row).targets for row in range(NUM)} == {"red"}


@pytest.mark.parametrize("change", [overwrite, overwrite_and_restore_time, cut])
def test_nothing_is_left_of_a_preparation_whose_file_changes(source, tokenizer, tmp_path, change):
    path, out = tmp_path / "pairs.jsonl", tmp_path / "out"
    with pytest.raises(ChangedSourceError):
        write_prepared(str(out), source, tokenizer, on_progress=change_once(path, change, after=30))
    assert list(out.iterdir()) == []
    path.write_text(make_lines("red"))
    write_prepared(str(out), source, tokenizer)
    assert open_prepared(str(out), source, tokenizer, cache=tmp_path).read_example(59).targets == "red"


def test_a_stopped_build_keeps_only_shards_of_the_file_that_was_hashed(source, tokenizer, tmp_path):
    """The file changes, the build is killed before it ends, the first file is put back: what went before is used."""
    path, cache = tmp_path / "pairs.jsonl", tmp_path / "cache"

    def change_and_stop(what: str, num: int, total: int | None = None) -> None:
        if num == 25:
            overwrite(path)
        if num == 29:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, ChangedSourceError)):
        load_or_build_store(source, tokenizer, cache=cache, on_progress=change_and_stop)
    path.write_text(make_lines("red"))
    store = load_or_build_store(source, tokenizer, cache=cache)
    assert {store.read_example(row).targets for row in range(NUM)} == {"red"}


def test_a_file_that_comes_to_a_folder_is_a_change(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(make_lines("red"))
    guard = SourceGuard.take([str(tmp_path / "data")], "{}")
    guard.refuse_change(whole=True)
    (tmp_path / "data" / "b.jsonl").write_text(make_lines("tan"))
    with pytest.raises(ChangedSourceError, match=r"b\.jsonl: changed while it was answered"):
        guard.refuse_change("answered")


# --- damage of tokenised data ---


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 2
    path.write_bytes(content)


def list_places(path: Path) -> list[int]:
    """A byte in the middle of the header, and one of every array that is not empty."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    offsets = [entry["data_offsets"] for entry in json.loads(content[8:start]).values()]
    return [start // 2, *(start + (low + high) // 2 for low, high in offsets if high > low)]


@pytest.mark.parametrize("name", [SHARD, ROWS])
def test_every_damage_of_an_array_is_found_and_mended(source, tokenizer, tmp_path, name):
    cache = tmp_path / "cache"
    expected = rows_of(load_or_build_store(source, tokenizer, cache=cache))
    (folder,) = cache.iterdir()
    whole = (folder / name).read_bytes()
    places = list_places(folder / name)
    assert len(places) > 5
    damages: list[Callable[[Path], object]] = [
        *(lambda path, place=place: flip(path, place) for place in places),
        lambda path: path.write_bytes(whole[:-64] + 64 * bytes([9])),
        lambda path: os.truncate(path, len(whole) // 2),
        lambda path: path.write_bytes(b""),
        os.unlink,
    ]
    for damage in damages:
        damage(folder / name)
        store = load_or_build_store(source, tokenizer, cache=cache)
        assert rows_of(store) == expected and name in store.rebuilt
        assert {path.name for path in cache.iterdir()} == {folder.name, f"{folder.name}.damaged"}
        assert (folder / name).read_bytes() == whole
    assert load_or_build_store(source, tokenizer, cache=cache).rebuilt == ""


def test_no_flipped_bit_of_an_index_is_taken(source, tokenizer, tmp_path):
    load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    whole = (folder / "index.json").read_bytes()
    for place in range(0, len(whole), 7):
        content = bytearray(whole)
        content[place] ^= 2
        try:
            index = json.loads(content)
        except ValueError:
            continue
        assert not build.is_index(index) or build.find_index_fault(index)
    flip(folder / "index.json", whole.index(b"num_examples") - 20)
    with pytest.raises(ValueError):
        read_index(folder)


@pytest.mark.parametrize("name", [SHARD, ROWS])
def test_damage_of_a_prepared_folder_is_refused(source, tokenizer, tmp_path, name):
    out = tmp_path / "out"
    write_prepared(str(out), source, tokenizer)
    for place in list_places(out / name):
        flip(out / name, place)
        with pytest.raises(DataError, match=rf"{name}: has the checksum .* Prepare the data again"):
            rows_of(open_prepared(str(out), source, tokenizer, cache=tmp_path))
        flip(out / name, place)
    assert len(rows_of(open_prepared(str(out), source, tokenizer, cache=tmp_path))) == NUM


def test_a_damaged_shard_of_a_stopped_build_is_converted_again(source, tokenizer, tmp_path):
    def stop(what: str, num: int, total: int | None = None) -> None:
        if num >= 45:
            raise KeyboardInterrupt

    expected = rows_of(load_or_build_store(source, tokenizer, cache=tmp_path / "whole"))
    for name in ("shard-00001.safetensors", "progress-00002.npz"):
        cache = tmp_path / name
        with pytest.raises(KeyboardInterrupt):
            load_or_build_store(source, tokenizer, cache=cache, on_progress=stop)
        (folder,) = cache.iterdir()
        flip(folder / name, (folder / name).stat().st_size // 2)
        store = load_or_build_store(source, tokenizer, cache=cache)
        store.verify(lambda what, done, total=None: None)
        assert rows_of(store) == expected


def test_data_that_are_cut_or_removed_under_a_run_are_named(source, tokenizer, tmp_path, monkeypatch):
    load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    expected = rows_of(TokenStore(folder))
    held = TokenStore(folder)  # so small that it is in memory when it was read once
    assert rows_of(held) == expected
    monkeypatch.setattr(store_module, "MEMORY_BYTES", 0)
    opened, late = TokenStore(folder), TokenStore(folder)
    assert rows_of(opened) == expected
    assert collate(opened, [3, 33, 5]).labels.tolist() == collate(held, [3, 33, 5]).labels.tolist()
    os.truncate(folder / SHARD, 200)
    with pytest.raises(DamagedStoreError, match=rf"{SHARD}: ends too early: .*Run the same command again"):
        collate(opened, [12, 13])
    shutil.rmtree(folder)
    assert opened.get_id(3) == expected[3][0]
    with pytest.raises(DamagedStoreError, match=r"shard-00000\.safetensors: No such file or directory"):
        collate(late, [3])
    assert rows_of(held) == expected


def test_a_store_that_another_process_replaced_is_not_set_aside(source, tokenizer, tmp_path, monkeypatch):
    """Two runs find the same damage; the slower one must not take the new store from the faster one."""
    cache = tmp_path / "cache"
    expected = rows_of(load_or_build_store(source, tokenizer, cache=cache))
    (folder,) = cache.iterdir()
    flip(folder / SHARD, 100)
    faster, verify = [], TokenStore.verify

    def verify_slowly(store, on_progress):
        monkeypatch.setattr(TokenStore, "verify", verify)
        try:
            verify(store, on_progress)
        finally:
            load_or_build_store(source, tokenizer, cache=cache)
            faster.append(folder.stat())

    monkeypatch.setattr(TokenStore, "verify", verify_slowly)
    assert rows_of(load_or_build_store(source, tokenizer, cache=cache)) == expected
    assert os.path.samestat(faster[0], folder.stat())


def test_a_limit_is_no_change_of_the_file(source, tokenizer, tmp_path):
    store = load_or_build_store(replace(source, max_examples=12), tokenizer, cache=tmp_path / "cache")
    assert len(store) == 12
