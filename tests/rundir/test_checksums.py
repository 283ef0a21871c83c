import json

import pytest

from fivetune.errors import RunDirError
from fivetune.rundir.checksums import (
    MANIFEST,
    ManifestError,
    find_damage,
    parse_manifest,
    verify_checksums,
    write_checksums,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"w" * 4096)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("card")
    write_checksums(tmp_path)
    return tmp_path


def test_an_unchanged_folder_is_whole(folder):
    assert find_damage(folder) is None
    verify_checksums(folder)


def test_one_flipped_bit_is_found(folder):
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    assert find_damage(folder) == "model.safetensors is damaged (its checksum differs)"
    with pytest.raises(RunDirError, match=r"model\.safetensors is damaged .*\. Export again\."):
        verify_checksums(folder, advice="Export again.")


def test_a_cut_or_missing_file_is_found(folder):
    (folder / "model.safetensors").write_bytes(b"w")
    assert find_damage(folder) == "model.safetensors is damaged (its checksum differs)"
    (folder / "model.safetensors").unlink()
    assert find_damage(folder) == "model.safetensors is missing"
    assert find_damage(folder, names=["config.json"]) is None


def test_an_edited_model_card_is_no_damage(folder):
    (folder / "README.md").write_text("my own card")
    assert find_damage(folder) is None


def test_a_folder_without_manifest_passes_verify_only(folder):
    (folder / MANIFEST).unlink()
    verify_checksums(folder)
    assert find_damage(folder) == "manifest.json is missing"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format_version": "1", "files": {}}', '{"format_version": 1}'])
def test_a_damaged_manifest_is_damage(folder, content):
    (folder / MANIFEST).write_text(content)
    assert "manifest.json" in (find_damage(folder) or "")
    with pytest.raises(RunDirError):
        verify_checksums(folder)


@pytest.mark.parametrize(
    "files",
    [[], {"../a": {"size": 0, "crc32": 0}}, {"a": 7}, {"a": {"size": 1}}, {"a": {"size": "1", "crc32": 2}}],
)
def test_a_manifest_lists_sizes_and_checksums_of_its_folder(files):
    """Only one of five readers looked at the names, and a malformed entry was an internal error in others."""
    with pytest.raises(ManifestError, match=r"^manifest\.json is damaged \("):
        parse_manifest(json.dumps({"format_version": 1, "files": files}).encode())


def test_a_manifest_of_a_newer_version_is_refused(folder):
    (folder / MANIFEST).write_text('{"format_version": 2, "files": {}}')
    assert find_damage(folder) == "written in format 2, this version reads up to 1"
