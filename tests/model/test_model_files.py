"""Model folders that are not what they claim: each is named as what it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import kit
import pytest
from huggingface_hub import constants

from fivetune.data.corpus import CHECKPOINT
from fivetune.errors import FiveTuneEnvironmentError, ModelError
from fivetune.model.files import find_folder, find_weight_files, read_model_config
from fivetune.model.load import load_model_and_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 242043056\n"


@pytest.fixture
def folder(tmp_path, model_folder):
    return shutil.copytree(model_folder, tmp_path / "model")


def test_whole_folder_is_taken(folder):
    assert find_folder(str(folder)) == folder
    assert find_weight_files(folder) == [folder / "model.safetensors"]
    assert find_folder("t5-nano") == CHECKPOINT


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_git_lfs_pointer_is_named(folder, name):
    (folder / name).write_bytes(POINTER)
    with pytest.raises(
        ModelError, match=rf"model/{name}: is a Git-LFS pointer, not the file itself. Run `git lfs pull`"
    ):
        load_model_and_tokenizer(str(folder))


def test_a_pointer_is_named_before_the_tokenizer_that_is_missing_too(folder):
    (folder / "model.safetensors").write_bytes(POINTER)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"model/model.safetensors: is a Git-LFS pointer"):
        load_model_and_tokenizer(str(folder))


def test_truncated_weights_are_named_with_their_size(folder):
    path = folder / "model.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"model.safetensors: truncated: {size - 100} bytes of {size}. Copy the file"):
        load_model_and_tokenizer(str(folder))


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, (20).to_bytes(8, "little") + b"[1, 2, 3] not a table"])
def test_weights_without_a_header_are_damaged(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"model.safetensors: damaged: its header cannot be read. Copy the file again."
    ):
        load_model_and_tokenizer(str(folder))


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model.safetensors. Copy the folder again."):
        load_model_and_tokenizer(str(folder))


def test_weights_of_another_format_are_named(folder):
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    with pytest.raises(
        ModelError, match=r"has no model.safetensors. It has tf_model.h5; FiveTune reads safetensors only"
    ):
        load_model_and_tokenizer(str(folder))


def test_bin_only_is_refused_with_a_way_out(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"It has pytorch_model.bin. FiveTune reads safetensors only, .* convert a file"
    ):
        load_model_and_tokenizer(str(folder))


def test_missing_shard_is_named(folder):
    index = {"weight_map": {"shared.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has no model-00001-of-00002.safetensors"):
        find_weight_files(folder)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/tmp/model.safetensors", "..", 3])
def test_a_shard_outside_the_folder_is_refused(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"shared.weight": name}}))
    with pytest.raises(ModelError, match=r"index.json: .* is not the name of a file of this folder. Copy the"):
        find_weight_files(folder)


def test_damaged_shard_index_is_named(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ModelError, match=r"model.safetensors.index.json: damaged: .*Copy the file again."):
        find_weight_files(folder)


def test_missing_config(folder):
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json. Give a folder that save_pretrained wrote."):
        load_model_and_tokenizer(str(folder))


def test_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{'model_type': 't5'}")
    with pytest.raises(ModelError, match=r"config.json: not a JSON file: .*line 1 column 2.*Copy the file again."):
        read_model_config(folder)
    (folder / "config.json").write_text('["t5"]')
    with pytest.raises(ModelError, match=r"config.json: holds a list, not settings"):
        read_model_config(folder)


@pytest.mark.parametrize("name", ["./no/such", "/no/such/folder", "a/b/c", "~/t5"])
def test_folder_that_is_not_there(name):
    with pytest.raises(ModelError, match=rf"{name}: no such model folder. Give a local folder, a hub name"):
        find_folder(name)


def test_name_that_no_hub_takes():
    with pytest.raises(ModelError, match=r"neither a local folder nor a hub name \(org/name\)"):
        find_folder("org/na me?")


def test_hub_name_without_network_fails_at_once(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    started = time.perf_counter()
    with pytest.raises(FiveTuneEnvironmentError, match=r"org/absent: no local folder of that name.*t5-nano") as caught:
        find_folder("org/absent")
    assert caught.value.exit_code == 4
    assert time.perf_counter() - started < 5


@pytest.mark.slow
def test_offline_switch_of_the_environment_is_respected(tmp_path):
    program = "from fivetune.model.files import find_folder; find_folder('org/absent')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert "FiveTuneEnvironmentError: org/absent: no local folder of that name" in done.stderr


@pytest.mark.skipif(not kit.SHARED.is_dir(), reason=kit.NEEDS_SHARED)
def test_real_published_file_is_whole():
    folder = kit.SHARED / "data/models/dummy-t5-chronos"
    assert find_weight_files(folder) == [folder / "model.safetensors"]
    assert read_model_config(folder)["model_type"] == "t5"
