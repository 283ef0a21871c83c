"""abstention.json of model/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fivetune.errors import RunDirError
from fivetune.rundir.abstention_file import Abstention, Level, read_abstention, write_abstention
from fivetune.rundir.checksums import find_damage, parse_manifest, write_checksums
from fivetune.rundir.layout import ABSTENTION

FOUND = Abstention("exact", 1.0, 120, "eval", 300, (Level(0.9, 60, 0), Level(0.0, 120, 12)))


def test_the_file_is_part_of_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_checksums(tmp_path, run_id="abc")
    assert read_abstention(tmp_path) is None
    for found in (FOUND, replace(FOUND, max_error=0.05, settings={"eval.num_beams": 2})):
        write_abstention(tmp_path, found)
        assert read_abstention(tmp_path) == found and find_damage(tmp_path) is None
    manifest = parse_manifest((tmp_path / "manifest.json").read_bytes())
    assert (manifest.run_id, set(manifest.files)) == ("abc", {"config.json", ABSTENTION})
    (tmp_path / ABSTENTION).write_text("{}")
    assert find_damage(tmp_path) == "abstention.json is damaged (its checksum differs)"
    (tmp_path / ABSTENTION).unlink()  # users may delete it: nothing is withheld then
    assert (find_damage(tmp_path), read_abstention(tmp_path)) == (None, None)


def test_an_export_without_a_manifest_gets_the_file_alone(tmp_path: Path) -> None:
    write_abstention(tmp_path, FOUND)
    assert [path.name for path in tmp_path.iterdir()] == [ABSTENTION]


@pytest.mark.parametrize(
    "change",
    [{"levels": []}, {"levels": [[1, 2]]}, {"levels": 3}, {"max_error": 1.5}, {"num": None}, {"settings": 3}, None],
)
def test_a_damaged_file_is_named(tmp_path: Path, change: dict[str, object] | None) -> None:
    write_abstention(tmp_path, FOUND)
    table = json.loads((tmp_path / ABSTENTION).read_text())
    (tmp_path / ABSTENTION).write_text(json.dumps({**table, **change}) if change else "[")
    with pytest.raises(RunDirError, match="delete it"):
        read_abstention(tmp_path)
