"""`fivetune prepare`: the data as the run will find it; a build that was stopped goes on."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import kit
import pytest
import yaml
from transformers import AutoTokenizer

from fivetune import cli
from fivetune.data.examples import Source
from fivetune.data.store import build, convert, partial
from fivetune.data.store import token_store as store_module
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.partial import lock_build_folder
from fivetune.data.store.token_store import load_or_build_store
from fivetune.model import load as load_module
from fivetune.tasks.squad_v2 import SQuADV2

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(build, "BLOCK", 5)
    monkeypatch.setattr(build, "SHARD_ROWS", 10)


def _source(folder: Path) -> Source:
    """24 examples in windows: several rows and one group for each; three records are bad."""
    path = kit.squad_file(folder / "train.json")
    table = json.loads(path.read_text())
    for number in (2, 8, 20):
        table["data"][0]["paragraphs"][number]["qas"][0]["question"] = None
    path.write_text(json.dumps(table))
    limits = LengthLimits(24, 8, "windows", 4)
    return Source((str(path),), SQuADV2(), limits, on_bad_record="skip", for_training=True)


def _files(cache: Path) -> dict[str, bytes]:
    (folder,) = cache.iterdir()
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("tokenised_before", [10, 15, 20])
def test_a_stopped_build_goes_on_and_gives_the_same(
    tmp_path, tokenizer_folder, monkeypatch, small_shards, tokenised_before
):
    source, tokenizer = _source(tmp_path), AutoTokenizer.from_pretrained(tokenizer_folder)
    load_or_build_store(source, tokenizer, cache=tmp_path / "at once")

    def stop(what: str, done: int, total: int | None = None) -> None:
        if done >= tokenised_before:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_or_build_store(source, tokenizer, cache=tmp_path / "in two", on_progress=stop)
    tokenised, encode = [], convert.encode

    def counted(words, examples, targets, **rest):
        tokenised.extend({e.group or e.id for e in examples})
        return encode(words, examples, targets, **rest)

    monkeypatch.setattr(convert, "encode", counted)
    load_or_build_store(source, tokenizer, cache=tmp_path / "in two")
    assert 0 < len(tokenised) <= 11
    assert _files(tmp_path / "in two") == _files(tmp_path / "at once")


def test_two_processes_do_not_build_in_one_folder(tmp_path, tokenizer_folder, small_shards):
    source, tokenizer = _source(tmp_path), AutoTokenizer.from_pretrained(tokenizer_folder)
    cache = tmp_path / "cache"
    folder = cache / store_module._compute_cache_key(
        store_module.describe_data(source, tokenizer)[1].fingerprint, source.task, tokenizer
    )
    other = folder.with_name(f".{folder.name}.partial")
    other.mkdir(parents=True)
    with lock_build_folder(other) or pytest.fail("the folder is free"):
        assert lock_build_folder(other) is None
        assert load_or_build_store(source, tokenizer, cache=cache).summary["num_read"] == 24
    assert {path.name for path in cache.iterdir()} == {folder.name, other.name}


def test_a_build_that_begins_while_another_ends_is_left_alone(tmp_path, tokenizer_folder, monkeypatch):
    def begin_another(path: Path) -> None:
        if path.name == "cache":  # the first build has just renamed its folder
            (folder,) = path.iterdir()
            folder.with_name(f".{folder.name}.partial").mkdir()

    monkeypatch.setattr(store_module, "fsync_folder", begin_another)
    load_or_build_store(_source(tmp_path), AutoTokenizer.from_pretrained(tokenizer_folder), cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob(".*.partial"))) == 1


def test_a_lock_that_another_machine_has_removed_is_none(tmp_path, monkeypatch):
    def lose(*given: object, **more: object) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")  # of NFS

    monkeypatch.setattr(partial, "lock_file", lose)
    assert lock_build_folder(tmp_path) is None


def test_no_process_can_lock_a_build_whose_folder_moves(tmp_path, tokenizer_folder, monkeypatch):
    rename, locks = Path.rename, []

    def lock_and_rename(path: Path, target: Path) -> Path:
        locks.append(lock_build_folder(path))  # before the folder has its final name, and after
        moved = rename(path, target)
        locks.append(lock_build_folder(path))
        return moved

    monkeypatch.setattr(Path, "rename", lock_and_rename)
    load_or_build_store(_source(tmp_path), AutoTokenizer.from_pretrained(tokenizer_folder), cache=tmp_path / "cache")
    assert locks == [None, None]
    assert not list((tmp_path / "cache").glob("*/.lock"))


def test_a_build_that_another_process_finishes_first_is_dropped(tmp_path, tokenizer_folder, monkeypatch):
    source, tokenizer = _source(tmp_path), AutoTokenizer.from_pretrained(tokenizer_folder)
    load_or_build_store(source, tokenizer, cache=tmp_path / "first")
    (built,) = (tmp_path / "first").iterdir()
    plain = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if not target.exists():
            shutil.copytree(built, target)
        return plain(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    store = load_or_build_store(source, tokenizer, cache=tmp_path / "cache")
    assert store.summary["num_read"] == 24
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [built.name]


# --- the command ---


def test_command_prepares_what_the_run_takes(tmp_path, model_folder, capsys, monkeypatch):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(kit.recipe(tmp_path, model_folder)))
    with monkeypatch.context() as patch:
        patch.setattr(load_module, "load_model_and_tokenizer", lambda *_, **__: pytest.fail("loads weights"))
        assert cli.main(["prepare", str(recipe), "--json", "--quiet"]) == 0
        lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("train   24 records read, 0 skipped; 24 examples of ") and "examples/s" in lines[0]
    assert lines[1].startswith("eval    12 records read, ")
    assert lines[2:4] == [f"cache   {tmp_path}/cache", f"The run reads it from there: fivetune train {recipe}"]
    result = json.loads(lines[-1])
    assert result["train"]["num_examples"] == 24 and not result["train"]["was_there"]
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(store_module, "_build_store", lambda *_: pytest.fail("built twice"))
    kit.ready(tmp_path, model_folder)
    assert cli.main(["prepare", str(recipe)]) == 0
    assert "were in the cache" in capsys.readouterr().out


def test_command_without_data(tmp_path, model_folder, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model": {"path": str(model_folder)}, "task": "squad_v2"}))
    assert cli.main(["prepare", str(recipe)]) == 2
    assert "data.train: no data is given. Add --data.train FILE or --data.eval FILE." in capsys.readouterr().err


@pytest.mark.parametrize("output", ["s3://", "s3:", "file:///", ""])
def test_command_with_an_output_that_names_no_place(tmp_path, model_folder, capsys, output):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(kit.recipe(tmp_path, model_folder)))
    assert cli.main(["prepare", str(recipe), "--output", output]) == 2
    assert f"--output {output!r}: names no bucket or folder." in capsys.readouterr().err


def test_what_is_odd_about_the_data_is_told(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pre-flight named it, prepare did not."""
    kinds = ["late", "Late", "late", "refund", "None", ""]
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"text {i},{kind}\n" for i, kind in enumerate(kinds)))
    (tmp_path / "b.csv").write_text("text,label\nm,late\n,refund\n")
    recipe = tmp_path / "recipe.yaml"
    data = {"train": str(tmp_path / "a.csv"), "eval": str(tmp_path / "b.csv"), "on_bad_record": "skip"}
    data["cache_dir"] = str(tmp_path / "cache")
    recipe.write_text(yaml.safe_dump({"model": {"path": str(model_folder)}, "task": "classification", "data": data}))
    assert cli.main(["prepare", str(recipe), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == [
        "warning: train: records left out because they have no label (blank, or nan): 1",
        "warning: train: forms that differ only in case, white space or invisible characters count as one label: "
        "'late' (2 records), 'Late' (1); rename those that are another label",
        "warning: train: 1 record has a label that programs write for an empty cell: 'None' (1 record); it counts as "
        "a label",
    ]
    first = f"{tmp_path}/b.csv:3: text is empty. Give it a text"
    assert lines[5] == f"warning: eval: 1 of 2 records cannot be used, the first: {first}"
    assert [f"warning: {note}" for note in json.loads(lines[-1])["train"]["notes"]] == lines[1:4]
