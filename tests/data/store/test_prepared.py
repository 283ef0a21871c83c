"""Prepared data in folders and buckets: written once, read anywhere, in an order that only seed and step decide."""

from __future__ import annotations

import csv
import json
import pickle
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import numpy as np
import pytest
from bucket import bucket, s3_server  # noqa: F401
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from fivetune import cli, tasks
from fivetune.config import load_config
from fivetune.data import storage
from fivetune.data.examples import Source
from fivetune.data.readers import table_records
from fivetune.data.readers.records import parse_item, read_records
from fivetune.data.shard import Shard
from fivetune.data.storage import StorageError, delete_object, get_object, join_location, list_objects, put_object
from fivetune.data.store import build, prepared, worker
from fivetune.data.store.blocks import BlockReader
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.prepared import open_prepared, write_prepared
from fivetune.data.store.stream import BatchPlan, TrainingStream
from fivetune.data.store.token_store import TokenStore, load_or_build_store
from fivetune.distributed.world import World
from fivetune.errors import ConfigError, DataError, FiveTuneEnvironmentError
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.training.run import train
from fivetune.training.setup import set_up
from fivetune.types import RawRecord

NUM = 60


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six shards of ten examples."""
    monkeypatch.setattr(build, "BLOCK", 5)
    monkeypatch.setattr(build, "SHARD_ROWS", 10)


@pytest.fixture
def source(tmp_path: Path, small_shards: None) -> Source:
    """60 examples of different lengths."""
    lines = (
        {"id": f"example-{i:03d}", "inputs": "Ann has " + "a red hat " * (i % 7 + 1), "targets": kit.WORDS[i % 9]}
        for i in range(NUM)
    )
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Source((str(tmp_path / "pairs.jsonl"),), JSONL(), LengthLimits(32, 8), for_training=True)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "place") if request.param == "folder" else request.getfixturevalue("bucket") + "/pairs"


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PAUSES", ())


def contents(location: str) -> dict[str, bytes]:
    return {name: get_object(join_location(location, name)) for name in list_objects(location)}


def rows_of(store: TokenStore) -> list[tuple[Any, ...]]:
    return [
        (store.get_id(row), store.inputs[row].tolist(), store.labels[row].tolist(), store.read_example(row))
        for row in range(len(store))
    ]


# --- writing ---


def test_what_is_written_is_what_a_run_would_build(source, tokenizer, place, tmp_path):
    index, was_there = write_prepared(place, source, tokenizer)
    assert not was_there and len(index["shards"]) == 6
    assert set(list_objects(place)) == {"index.json", "rows.safetensors", *(e["file"] for e in index["shards"])}
    built = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    read = open_prepared(place, source, tokenizer, cache=tmp_path / "other")
    assert rows_of(read) == rows_of(built) and len(built.index["shards"]) == 6
    assert {**read.summary, "source": None} == {**built.summary, "source": None}
    assert read.inputs.lengths.tolist() == [len(read.inputs[row]) for row in range(NUM)]
    assert write_prepared(place, source, tokenizer)[1]


def test_a_shard_is_a_safetensors_file(source, tokenizer, tmp_path):
    write_prepared(str(tmp_path / "out"), source, tokenizer)
    arrays = load_file(tmp_path / "out" / "shard-00001.safetensors")
    first = arrays["inputs.values"][: arrays["inputs.offsets"][1]]
    assert tokenizer.decode(first, skip_special_tokens=True) == "Ann has " + " ".join(["a red hat"] * 4)
    assert arrays["inputs.values"].dtype == np.uint16


def test_a_stopped_preparation_writes_the_missing_shards_only(source, tokenizer, place, monkeypatch):
    whole = f"{place}-at-once"
    write_prepared(whole, source, tokenizer)

    def stop(what: str, done: int, total: int | None = None) -> None:
        if done >= 35:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prepared(place, source, tokenizer, on_progress=stop)
    assert "index.json" not in list_objects(place) and "shard-00002.safetensors" in list_objects(place)
    written: list[str] = []
    plain = build._write_to
    monkeypatch.setattr(
        build, "_write_to", lambda place, name, arrays: [written.append(name), plain(place, name, arrays)][1]
    )
    write_prepared(place, source, tokenizer)
    assert written == [f"shard-0000{n}.safetensors" for n in (3, 4, 5)] + ["rows.safetensors"]
    assert contents(place) == contents(whole)


@pytest.mark.slow
def write_in_shards(place: str, source: Source, tokenizer: Any, order: tuple[int, ...] = (2, 0, 1)) -> None:
    """Three jobs; stretches are longer than a block, and no multiple of one."""
    for number in order:
        index, _ = write_prepared(place, replace(source, shard=Shard(number, len(order), stretch=7)), tokenizer)
        assert (index is None) == (number != order[-1])


def test_several_jobs_write_what_one_writes(source, tokenizer, place, tmp_path):
    whole = str(tmp_path / "whole")
    write_prepared(whole, source, tokenizer)
    write_in_shards(place, source, tokenizer)
    first, second = (open_prepared(one, source, tokenizer, cache=tmp_path / "cache") for one in (whole, place))
    assert rows_of(first) == rows_of(second)
    assert np.array_equal(first.groups, second.groups) and np.array_equal(first.input_hashes, second.input_hashes)
    assert {**first.summary, "source": 0} == {**second.summary, "source": 0}
    assert not [name for name in list_objects(place) if not name.startswith(("shard-", "rows", "index"))]
    # A job that is started again changes nothing.
    index, was_there = write_prepared(place, replace(source, shard=Shard(1, 3, stretch=7)), tokenizer)
    assert was_there and index and index["shards"] == second.index["shards"]


def test_a_job_that_was_stopped_goes_on(source, tokenizer, tmp_path, monkeypatch):
    place = str(tmp_path / "place")
    job = replace(source, shard=Shard(0, 3, stretch=7))
    write = build._write_to
    written: list[str] = []

    def fail(target: str, name: str, arrays: Any) -> Any:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(name)
        return write(target, name, arrays)

    monkeypatch.setattr(build, "_write_to", fail)
    with pytest.raises(KeyboardInterrupt):
        write_prepared(place, job, tokenizer)
    monkeypatch.setattr(build, "_write_to", lambda *given: written.append(given[1]) or write(*given))
    write_in_shards(place, source, tokenizer)
    assert len(written) == len(set(written)) and sum("1-of-3" in name for name in written) == 3
    assert len(open_prepared(place, source, tokenizer, cache=tmp_path / "cache")) == NUM


def test_what_several_jobs_cannot_prepare_is_refused(source, tokenizer, tmp_path):
    jobs = [replace(source, shard=Shard(number, 2, stretch=10)) for number in (0, 1)]
    with pytest.raises(ConfigError, match=r"^--shard 1/2: data.max_train_examples counts the records of all shards\."):
        write_prepared(str(tmp_path / "a"), replace(jobs[0], max_examples=5), tokenizer)
    path = Path(source.paths[0])
    write_prepared(str(tmp_path / "b"), jobs[0], tokenizer)
    whole = path.read_text()
    path.write_text(whole.replace("hat", "cat"))
    with pytest.raises(DataError, match=r"shard 1/2 was prepared from other data or settings\. Delete shard-1-of-2-"):
        write_prepared(str(tmp_path / "b"), jobs[1], tokenizer)
    path.write_text(whole.replace("example-013", "example-005").replace("example-021", "example-020"))
    skipping = [replace(job, on_bad_record="skip") for job in jobs]
    write_prepared(str(tmp_path / "c"), skipping[0], tokenizer)  # in this job the record 21 is left out
    with pytest.raises(DataError, match=r"pairs\.jsonl: 1 records have the id of a record in another shard\."):
        write_prepared(str(tmp_path / "c"), skipping[1], tokenizer)
    with pytest.raises(DataError, match="the preparation is not finished"):
        open_prepared(str(tmp_path / "c"), source, tokenizer, cache=tmp_path / "cache")


def test_prepare_by_the_command_in_two_shards(recipe_file, tmp_path, capsys):
    words = ["prepare", str(recipe_file), "--output", str(tmp_path / "out"), "--shard"]
    assert cli.main([*words, "2/2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missing_shards"] == {"train": [1], "eval": [1]}
    assert cli.main([*words, "1/2"]) == 0
    assert "The run reads it from there: fivetune train" in capsys.readouterr().out
    assert cli.main(["prepare", str(recipe_file), "--shard", "1/2"]) == 2
    assert "--shard 1/2: several jobs share a folder or bucket. Add --output PLACE." in capsys.readouterr().err


def test_several_processes_write_the_same(source, tokenizer, tmp_path):
    lines = Path(source.paths[0]).read_text().splitlines()
    lines[7], lines[31] = "{torn", lines[3].replace("red", "blue")  # a bad record, and an id for the second time
    Path(source.paths[0]).write_text("\n".join(lines) + "\n")
    skipping = replace(source, on_bad_record="skip", max_examples=50)
    for num in (1, 2):
        index, _ = write_prepared(str(tmp_path / str(num)), skipping, tokenizer, num_processes=num)
        assert [index["summary"][f"num_{name}"] for name in ("read", "skipped_bad", "examples")] == [52, 2, 50]
        reasons = [skip["reason"] for skip in index["summary"]["skips"]]
        assert (
            reasons[0].startswith("malformed JSON at column 2")
            and "'example-003' is already used by record 4" in reasons[1]
        )
    assert contents(str(tmp_path / "1")) == contents(str(tmp_path / "2"))
    with pytest.raises(DataError, match=r"pairs\.jsonl:8: .*To leave such records out, set data\.on_bad_record: skip"):
        write_prepared(str(tmp_path / "3"), source, tokenizer, num_processes=2)


def test_limits_give_the_same_shards_for_every_number_of_processes(source, tokenizer, tmp_path):
    lines = Path(source.paths[0]).read_text().splitlines()
    lines[6] = "{torn"
    Path(source.paths[0]).write_text("\n".join(lines) + "\n")
    limited = replace(source, on_bad_record="skip", max_examples=11)
    for num in (1, 2):
        write_prepared(str(tmp_path / str(num)), limited, tokenizer, num_processes=num)
    assert contents(str(tmp_path / "1")) == contents(str(tmp_path / "2"))


def test_what_was_built_is_kept_when_a_process_that_converts_ends(source, tokenizer, tmp_path, monkeypatch):
    pools: list[worker.ConverterPool] = []
    monkeypatch.setattr(
        build, "ConverterPool", lambda *given: [pools.append(worker.ConverterPool(*given)), pools[-1]][1]
    )
    plain, written = build._write_to, list[str]()

    def write(target: str, name: str, arrays: Any) -> Any:
        written.append(name)
        if len(written) == 3:
            for process in pools[-1]._workers:
                process.kill()
        return plain(target, name, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(build, "_write_to", write)
        with pytest.raises(FiveTuneEnvironmentError, match=r"ended \(exit code -9\).*what was done is kept"):
            load_or_build_store(source, tokenizer, cache=tmp_path / "cache", num_processes=2)
    done = len(written)
    monkeypatch.setattr(build, "_write_to", lambda *given: [written.append(given[1]), plain(*given)][1])
    store = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert written[done:] == [f"shard-0000{n}.safetensors" for n in range(done, 6)] + ["rows.safetensors"]
    assert rows_of(store) == rows_of(load_or_build_store(source, tokenizer, cache=tmp_path / "other"))


@pytest.mark.parametrize("target", ["folder", "cache"])
def test_a_process_that_ends_at_its_start_is_named(source, tokenizer, tmp_path, monkeypatch, target):
    monkeypatch.setattr(worker.sys, "executable", "/bin/false")
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"a process that converts records 1 to \d+ of \w+ ended \(exit code 1\)"
    ):
        if target == "folder":
            write_prepared(str(tmp_path / "out"), source, tokenizer, num_processes=2)
        else:
            load_or_build_store(source, tokenizer, cache=tmp_path / "cache", num_processes=2)


def test_a_process_that_converts_and_does_nothing_is_ended(source, tokenizer, tmp_path, monkeypatch):
    """A hung process was waited for without end."""
    monkeypatch.setattr(worker, "HUNG_SECONDS", 0.4)
    plain = worker.subprocess.Popen

    def start(*given: Any, **options: Any) -> Any:
        process = plain(*given, **options)
        process.send_signal(signal.SIGSTOP)
        return process

    monkeypatch.setattr(worker.subprocess, "Popen", start)
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"converts records 1 to \d+ of \w+ did nothing for 0.4 s, and was"
    ):
        load_or_build_store(source, tokenizer, cache=tmp_path / "cache", num_processes=2)


def load_failing_task(name: str, error: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A task of the user's that raises an error for every record."""
    (folder / "tasks").mkdir()
    own = "from fivetune.tasks.jsonl import JSONL\n\n\nclass Own(JSONL):\n    def to_text(self, record, **options):\n"
    (folder / "tasks" / f"{name}.py").write_text(f'"""Mine."""\n\n{own}        raise {error}\n')
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(folder))
    monkeypatch.setattr(tasks, "__path__", list(tasks.__path__))
    return tasks.load_task(name, {})


@pytest.mark.parametrize(
    ("num", "error", "words"), [(1, MemoryError, "^$"), (2, FiveTuneEnvironmentError, "exit code 1.*memory may be too")]
)
def test_memory_that_runs_out_in_a_task_skips_no_record(source, tokenizer, tmp_path, monkeypatch, num, error, words):
    task = load_failing_task("hungry", "MemoryError", tmp_path, monkeypatch)
    failing = replace(source, task=task, on_bad_record="skip")
    with pytest.raises(error, match=words):
        load_or_build_store(failing, tokenizer, cache=tmp_path / "cache", num_processes=num)


@pytest.mark.parametrize("num", [1, 2])
def test_a_task_that_fails_names_the_record_and_its_own_line(source, tokenizer, tmp_path, monkeypatch, num):
    """It was an internal error, from a worker with a traceback in the message."""
    failing = replace(source, task=load_failing_task("fragile", 'KeyError("colour")', tmp_path, monkeypatch))
    said = rf"^{source.paths[0]}:1: task fragile fails on this record: KeyError: 'colour' \(.*fragile.py:8\)\. Correct"
    with pytest.raises(DataError, match=said):
        load_or_build_store(failing, tokenizer, cache=tmp_path / "cache", num_processes=num)


def write_table(path: Path, lines: list[dict[str, Any]]) -> None:
    """CSV with line ends and quotes in cells; Parquet with nested columns, in groups of 7 rows."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)
        return
    from pyarrow import Table, parquet

    nested = [{**line, "more": {"names": [line["id"]], "none": None}} for line in lines]
    parquet.write_table(Table.from_pylist(nested), path, row_group_size=7)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_that_workers_parse_are_those_of_one_process(source, tokenizer, tmp_path, suffix, monkeypatch):
    """Blocks of 5 rows, batches of 3: every row arrives once, with its values, its place and its errors."""
    monkeypatch.setattr(table_records, "BATCH_ROWS", 3)
    lines = [json.loads(line) for line in Path(source.paths[0]).read_text().splitlines()]
    lines[3]["inputs"] = 'a "red",\nhat\r\n'
    lines[9]["id"] = lines[4]["id"]
    path = tmp_path / f"table.{suffix}"
    write_table(path, lines)
    if suffix == "csv":
        with path.open("a", newline="") as file:
            file.write("too,few\n")
    given = replace(source, paths=(str(path),), on_bad_record="skip")
    reader, blocks = BlockReader(given), []
    while block := reader.read(5):
        blocks.append(pickle.loads(pickle.dumps(block)))  # noqa: S301
    assert [len(block.items) for block in blocks[:3]] == [5, 5, 5]
    records = [parse_item(item, {}, {}, "x") for block in blocks for item in block.items]
    assert [record.fields["inputs"] for record in records if isinstance(record, RawRecord)] == [
        line["inputs"] for line in lines
    ]
    expected = list(read_records(str(path), on_bad=lambda bad: None))
    assert [record for record in records if isinstance(record, RawRecord)] == expected
    index, _ = write_prepared(str(tmp_path / "out"), given, tokenizer)
    bad = index["summary"]["skips"]
    assert "'example-004' is already used by record 5" in bad[0]["reason"]
    assert (suffix == "csv") == (index["summary"]["num_skipped_bad"] == 2)


@pytest.mark.release
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_several_processes_write_the_same_tables(source, tokenizer, tmp_path, suffix):
    path = tmp_path / f"table.{suffix}"
    write_table(path, [json.loads(line) for line in Path(source.paths[0]).read_text().splitlines()])
    for num in (1, 2):
        write_prepared(str(tmp_path / str(num)), replace(source, paths=(str(path),)), tokenizer, num_processes=num)
    assert contents(str(tmp_path / "1")) == contents(str(tmp_path / "2"))


def test_other_data_at_the_place_is_not_overwritten(source, tokenizer, place):
    write_prepared(place, source, tokenizer)
    before = contents(place)
    with pytest.raises(DataError, match=r"holds prepared data of other files or settings\. Give another --output"):
        write_prepared(place, replace(source, max_examples=10), tokenizer)
    assert contents(place) == before


def test_two_preparations_of_one_folder(source, tokenizer, tmp_path):
    (tmp_path / "out").mkdir()
    lock = prepared.lock_build_folder(tmp_path / "out")
    assert lock is not None
    with lock, pytest.raises(FiveTuneEnvironmentError, match=r"out: another process prepares data there"):
        write_prepared(str(tmp_path / "out"), source, tokenizer)


# --- order ---


def order_of(store: TokenStore, plan: BatchPlan, steps: range, world: World | None = None) -> list[list[str]]:
    stream = TrainingStream(store, plan, world=world or World())
    return [[id for batch in group for id in batch.ids] for group in stream.iter_micro_batches(steps.start, steps.stop)]


def test_the_order_is_that_of_local_data(source, tokenizer, bucket, tmp_path):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    plan = BatchPlan(8, 4, 2, seed=3)
    local = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    remote = open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "other")
    assert order_of(remote, plan, range(20)) == order_of(local, plan, range(20))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_shards_give_every_rank_its_share(source, tokenizer, tmp_path, monkeypatch, size):
    """Shards of 25, 25 and 10 examples; each epoch ends with a step of 4 examples."""
    monkeypatch.setattr(build, "SHARD_ROWS", 25)
    write_prepared(str(tmp_path / "out"), source, tokenizer)
    store = open_prepared(str(tmp_path / "out"), source, tokenizer, cache=tmp_path / "cache")
    plan = BatchPlan(8 if size != 3 else 6, 2, 2, seed=3)
    alone = order_of(store, plan, range(20))
    shares = [order_of(store, plan, range(20), World(rank, size)) for rank in range(size)]
    for step, ids in enumerate(alone):
        assert sorted(id for share in shares for id in set(share[step])) == sorted(ids)


@pytest.mark.parametrize("window", [2, 4])
def test_a_window_holds_few_shards_and_its_order_resumes(source, tokenizer, bucket, tmp_path, window):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    plan = BatchPlan(4, 2, 2, seed=3, window_shards=window)
    store = open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache", window_shards=window)
    (folder,) = (tmp_path / "cache").iterdir()
    assert not list(folder.glob("shard-*"))
    stream, found, counts = TrainingStream(store, plan), [], []
    for step in range(30):  # two epochs
        found.append([id for batch in stream.build_micro_batches(step) for id in batch.ids])
        counts.append(len(list(folder.glob("shard-*"))))
    assert max(counts) <= window  # of 6; a pool of 8 examples lies in two groups of shards at most
    for epoch in (found[:15], found[15:]):
        assert sorted(id for ids in epoch for id in ids) == [f"example-{i:03d}" for i in range(NUM)]
    assert found[:15] != found[15:]
    again = open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "fresh", window_shards=window)
    assert order_of(again, plan, range(11, 30)) == found[11:]
    local = load_or_build_store(source, tokenizer, cache=tmp_path / "local")
    assert order_of(local, plan, range(30)) == found
    shares = [order_of(local, plan, range(30), World(rank, 2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [sorted(ids) for ids in found]


def test_shards_that_follow_are_copied_ahead(source, tokenizer, bucket, tmp_path):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    store = open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache", window_shards=2)
    store.shards.keep(frozenset({4}), frozenset({1}))
    (folder,) = (tmp_path / "cache").iterdir()
    for number in (4, 1):
        store.shards._begin(number).result()  # type: ignore[attr-defined]
    assert {path.name for path in folder.glob("shard-*")} == {"shard-00001.safetensors", "shard-00004.safetensors"}
    assert store.get_id(12) == "example-012"
    copied: list[int] = []
    store.shards._begin = lambda number: copied.append(number)  # type: ignore[attr-defined]
    assert store.get_id(40) == "example-040" and copied == []


def test_a_copy_under_way_that_the_window_gives_up_is_not_kept(source, tokenizer, bucket, tmp_path, monkeypatch):  # noqa: F811
    """Shard 0 is given up and wanted again, shard 1 given up, shard 2 given up while `locate` waits for it."""
    write_prepared(f"{bucket}/a", source, tokenizer)
    cache: Any = open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache", window_shards=2).shards
    (folder,) = (tmp_path / "cache").iterdir()
    plain, may_arrive = prepared.fetch_file, threading.Event()

    def fetch(location: str, target: Path, **options: Any) -> None:
        assert may_arrive.wait(60)
        plain(location, target, **options)

    monkeypatch.setattr(prepared, "fetch_file", fetch)
    cache.keep(frozenset({0}), frozenset({1}))
    with ThreadPoolExecutor() as threads:
        located = threads.submit(cache.locate, 2)
        while len(cache._fetching) < 3:
            time.sleep(0.001)
        cache.keep(frozenset({3}), frozenset({4}))
        cache.keep(frozenset({0}), frozenset())
        copies = [*cache._fetching.values()]
        may_arrive.set()
        assert located.result().is_file()
    for copy in copies:
        copy.result()
    assert {path.name for path in folder.glob("shard-*")} == {"shard-00000.safetensors", "shard-00002.safetensors"}
    assert not list(folder.glob(".*.tmp"))
    assert cache.locate(1).is_file()


def test_processes_of_a_node_copy_a_shard_once(source, tokenizer, bucket, tmp_path, monkeypatch):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    fetched: list[str] = []
    plain = prepared.fetch_file
    monkeypatch.setattr(
        prepared, "fetch_file", lambda name, path, **kw: [fetched.append(name), plain(name, path, **kw)][1]
    )
    stores = [open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache") for _ in range(2)]
    assert rows_of(stores[0]) == rows_of(stores[1])
    assert len(fetched) == len(set(fetched)) == 7  # six shards and the facts of the rows


def test_an_error_does_not_wait_for_the_rest_of_the_shards(source, tokenizer, bucket, tmp_path, monkeypatch):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    begun: list[str] = []
    plain, failed = prepared.fetch_file, threading.Event()

    def fetch(location: str, target: Path, **options: Any) -> None:
        if target.name.startswith("shard-"):
            begun.append(target.name)
            if target.name == "shard-00000.safetensors":
                raise StorageError(f"{location}: lost")
            failed.wait(20)
        plain(location, target, **options)

    monkeypatch.setattr(prepared, "fetch_file", fetch)
    monkeypatch.setattr(prepared, "NUM_FETCHED_AT_ONCE", 2)
    with pytest.raises(StorageError, match="lost"):
        open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache")
    failed.set()
    assert len(begun) < 6


def test_runs_with_a_window_have_a_folder_each(recipe_file, tmp_path, bucket):  # noqa: F811
    assert cli.main(["prepare", recipe_file, "--output", f"{bucket}/squad", "--quiet"]) == 0
    recipe = json.loads(Path(recipe_file).read_text())
    recipe["data"] |= {"train": f"{bucket}/squad/train", "eval": f"{bucket}/squad/eval", "window_shards": 2}
    folders = []
    for name in ("one", "two"):
        recipe["run"]["dir"] = str(tmp_path / name)
        store = set_up(load_config(recipe)).data.stream.store
        folders.append(store.shards.locate(0).parent)  # type: ignore[attr-defined]
    assert folders[0] != folders[1]


# --- training ---


@pytest.fixture
def recipe_file(tmp_path, model_folder, small_shards):
    (tmp_path / "recipe.json").write_text(json.dumps(kit.recipe(tmp_path, model_folder)))
    return str(tmp_path / "recipe.json")


def test_prepare_train_kill_resume_from_a_bucket(recipe_file, tmp_path, bucket, capsys, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:
        local = note_ids(patch)
        train(recipe_file, {"run.dir": str(tmp_path / "local")}, quiet=True, preflight=False)
    assert cli.main(["prepare", recipe_file, "--output", f"{bucket}/squad", "--quiet", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train   24 records read, 0 skipped; 24 examples of ") and "; 3 shards of " in lines[0]
    flags = f"--data.train {bucket}/squad/train --data.eval {bucket}/squad/eval"
    assert lines[-1] == f"The run reads it from there: fivetune train {recipe_file} {flags}"
    assert json.loads(last)["train"]["location"] == f"{bucket}/squad/train"
    for name in ("train.json", "dev.json"):
        (tmp_path / name).unlink()
    there = {"data.train": f"{bucket}/squad/train", "data.eval": f"{bucket}/squad/eval"}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        killed = note_ids(patch, kill_at=4)
        train(recipe_file, {**there, "run.dir": str(tmp_path / "far")}, quiet=True, preflight=False)
    shutil.rmtree(tmp_path / "cache")  # resumed on another machine
    resumed = note_ids(monkeypatch)
    train(recipe_file, {**there, "run.dir": str(tmp_path / "far")}, resume=True, quiet=True, preflight=False)
    assert sorted(killed) == [0, 1, 2, 3, 4] and sorted(resumed)[-3:] == [3, 4, 5]
    assert all(resumed[step] == local[step] for step in resumed) and all(killed[step] == local[step] for step in killed)
    assert kit.weights_of(tmp_path / "far") == kit.weights_of(tmp_path / "local")


def note_ids(monkeypatch: pytest.MonkeyPatch, kill_at: int | None = None) -> dict[int, list[tuple[str, ...]]]:
    """The ids of the batches of each step that is assembled; at one step the run is killed."""
    found: dict[int, list[tuple[str, ...]]] = {}
    plain = TrainingStream.build_micro_batches

    def note(self: TrainingStream, step: int) -> Any:
        batches = plain(self, step)
        found[step] = [batch.ids for batch in batches]
        if step == kill_at:
            raise KeyboardInterrupt
        return batches

    monkeypatch.setattr(TrainingStream, "build_micro_batches", note)
    return found


def test_evaluation_through_a_window_gives_the_same_scores(recipe_file, tmp_path, bucket, monkeypatch):  # noqa: F811
    monkeypatch.setattr(build, "SHARD_ROWS", 5)
    assert cli.main(["prepare", recipe_file, "--output", f"{bucket}/squad", "--quiet"]) == 0
    there = {"data.train": f"{bucket}/squad/train", "data.eval": f"{bucket}/squad/eval"}
    runs = [
        train(recipe_file, {**there, **more, "train.num_steps": 1, "run.dir": str(tmp_path / name)}, quiet=True)
        for name, more in (("whole", {}), ("window", {"data.window_shards": 2, "data.cache_dir": str(tmp_path / "w")}))
    ]
    whole, window = ([(one.step, one.scores, one.num_examples) for one in run.evals][:1] for run in runs)
    assert whole == window and whole[0][2] == 12
    (folder,) = (one.parent for one in (tmp_path / "w").rglob("index.json") if '"num_read": 12' in one.read_text())
    assert len(json.loads((folder / "index.json").read_text())["shards"]) == 3
    assert len(list(folder.glob("shard-*"))) <= 2


# --- what goes wrong ---


def corrupt(location: str, name: str) -> None:
    content = bytearray(get_object(join_location(location, name)))
    content[-1] ^= 255
    put_object(join_location(location, name), bytes(content))


def change_index(location: str, **changes: Any) -> None:
    index = json.loads(get_object(join_location(location, "index.json")))
    index |= changes
    index["crc32"] = build._compute_index_crc32(index)
    put_object(join_location(location, "index.json"), json.dumps(index).encode())


def test_a_shard_with_a_wrong_checksum(source, tokenizer, place, tmp_path):
    write_prepared(place, source, tokenizer)
    corrupt(place, "shard-00002.safetensors")
    with pytest.raises((DataError, FiveTuneEnvironmentError)) as caught:
        rows_of(open_prepared(place, source, tokenizer, cache=tmp_path / "cache"))
    assert "shard-00002.safetensors: has the checksum " in str(caught.value)
    assert "Prepare the data again, to another folder" in str(caught.value)
    assert not list((tmp_path / "cache").glob("*/shard-00002*"))


def test_a_shard_that_is_missing(source, tokenizer, place, tmp_path, no_pauses):
    write_prepared(place, source, tokenizer)
    delete_object(join_location(place, "shard-00002.safetensors"))
    with pytest.raises(
        (DataError, FiveTuneEnvironmentError), match=r"shard-00002\.safetensors.*(missing|no such file)"
    ):
        rows_of(open_prepared(place, source, tokenizer, cache=tmp_path / "cache"))


def test_another_tokenizer_than_the_shards(source, tokenizer, place, tmp_path):
    write_prepared(place, source, tokenizer)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.add_tokens(["<new>"])
    with pytest.raises(DataError) as caught:
        open_prepared(place, source, other, cache=tmp_path / "cache")
    name = Path(tokenizer.name_or_path).name
    assert f"{place}: its shards hold the ids of another tokenizer: {name} with {len(tokenizer)} pieces; " in str(
        caught.value
    )
    assert f"the model's is {name} with {len(other)}" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"limits": LengthLimits(16, 8)}, "was prepared with data.max_input_tokens 32, this run has 16. Set it to 32"),
        ({"max_examples": 9}, "was prepared with data.max_train_examples null, this run has 9"),
        ({"for_training": False}, "was prepared as training data, and is given as data.eval"),
        ({"task": SQuADV2()}, 'was prepared with task.name "jsonl", this run has "squad_v2"'),
    ],
)
def test_other_settings_than_the_shards(source, tokenizer, tmp_path, change, words):
    write_prepared(str(tmp_path / "out"), source, tokenizer)
    with pytest.raises(DataError) as caught:
        open_prepared(str(tmp_path / "out"), replace(source, **change), tokenizer, cache=tmp_path / "cache")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../evil"])
def test_an_index_that_leads_elsewhere_is_refused(source, tokenizer, place, tmp_path, name):
    write_prepared(place, source, tokenizer)
    shards = json.loads(get_object(join_location(place, "index.json")))["shards"]
    change_index(place, shards=[{**shards[0], "file": name}])
    with pytest.raises(DataError, match=r"index\.json: '.*evil' is not the name of a file of this folder\. Prepare"):
        open_prepared(place, source, tokenizer, cache=tmp_path / "a" / "cache")
    assert not list(tmp_path.rglob("evil"))


def test_an_index_of_another_version(source, tokenizer, place, tmp_path):
    write_prepared(place, source, tokenizer)
    change_index(place, format_version=3)
    with pytest.raises(
        DataError, match=r"index\.json: is of format 3, this version of FiveTune reads up to 2\. Prepare"
    ):
        open_prepared(place, source, tokenizer, cache=tmp_path / "cache")


def test_a_place_without_prepared_data(source, tokenizer, place, tmp_path):
    with pytest.raises(DataError, match=r"holds no prepared data: index\.json is missing"):
        open_prepared(place, source, tokenizer, cache=tmp_path / "cache")

    def stop(what: str, done: int, total: int | None = None) -> None:
        if done >= 35:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_prepared(place, source, tokenizer, on_progress=stop)
    with pytest.raises(DataError, match=r"the preparation is not finished.*Repeat the command that began it"):
        open_prepared(place, source, tokenizer, cache=tmp_path / "cache")


def test_a_disk_that_is_full(source, tokenizer, bucket, tmp_path, monkeypatch):  # noqa: F811
    write_prepared(f"{bucket}/a", source, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(prepared.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 100}))
        with pytest.raises(
            FiveTuneEnvironmentError, match=r"the shards of s3://\S+ take .*, 100 B are free.*data\.window_shards: 8"
        ):
            open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache")

    def fill(location: str, target: Path, **_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepared, "fetch_file", fill)
    with pytest.raises(
        FiveTuneEnvironmentError, match=r"cannot be written: No space left.*choose another data\.cache_dir"
    ):
        open_prepared(f"{bucket}/a", source, tokenizer, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*/shard-*"))


def test_a_bucket_without_rights_or_network_leaves_nothing(recipe_file, bucket, monkeypatch, capsys, no_pauses):  # noqa: F811
    import s3fs

    for name, value, words in (
        ("AWS_ENDPOINT_URL", "http://127.0.0.1:9", "cannot be read after 1 attempts"),
        ("AWS_ACCESS_KEY_ID", "", "no rights"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            if not value:
                patch.setenv("AWS_SECRET_ACCESS_KEY", "")
                patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            s3fs.S3FileSystem.clear_instance_cache()
            assert cli.main(["prepare", recipe_file, "--output", f"{bucket}/squad", "--quiet"]) == 4
        assert words in capsys.readouterr().err
        s3fs.S3FileSystem.clear_instance_cache()
        assert list_objects(bucket) == []
    assert cli.main(["prepare", recipe_file, "--output", f"{bucket}-none/squad", "--quiet"]) == 4
    assert "no such file or bucket" in capsys.readouterr().err


def test_a_connection_that_breaks_while_uploading_goes_on(source, tokenizer, bucket, monkeypatch):  # noqa: F811
    write_prepared(f"{bucket}/whole", source, tokenizer)
    monkeypatch.setattr(storage.time, "sleep", lambda _: None)
    opened, calls = storage.open_file_system, []

    def break_often(location: str) -> Any:
        system, path = opened(location)

        class Flaky:
            def __getattr__(self, name: str) -> Any:
                def call(*args: Any, **kwargs: Any) -> Any:
                    calls.append(name)
                    if len(calls) % 3 == 0:
                        raise ConnectionResetError("the connection was reset")
                    return getattr(system, name)(*args, **kwargs)

                return call

        return Flaky(), path

    monkeypatch.setattr(storage, "open_file_system", break_often)
    write_prepared(f"{bucket}/flaky", source, tokenizer)
    monkeypatch.setattr(storage, "open_file_system", opened)
    assert contents(f"{bucket}/flaky") == contents(f"{bucket}/whole") and len(calls) > 20


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["--data.train", "[{out}/train, {out}/train]"], 2, "is prepared data, and there are 2 sources"),
        (
            ["--data.train", "{out}/train", "--data.eval", "[]", "--data.eval_share", "0.5"],
            2,
            "is prepared data, which is split",
        ),
        (["--data.train", "{out}/eval"], 3, "was prepared as evaluation data, and is given as data.train"),
    ],
)
def test_settings_that_prepared_data_does_not_allow(recipe_file, tmp_path, capsys, settings, code, words):
    out = str(tmp_path / "out")
    assert cli.main(["prepare", recipe_file, "--output", out, "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["train", recipe_file, "--quiet", *(word.format(out=out) for word in settings)]) == code
    assert words in capsys.readouterr().err
