"""confidence.json of model/."""

from __future__ import annotations

import pytest

from fivetune.errors import RunDirError
from fivetune.rundir.checksums import find_damage, parse_manifest, write_checksums
from fivetune.rundir.confidence_file import read_temperature, write_confidence_file
from fivetune.rundir.layout import CONFIDENCE


def test_the_file_is_part_of_the_manifest(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "README.md").write_text("a card that users edit")
    write_checksums(tmp_path, run_id="abc")
    assert read_temperature(tmp_path) == 1
    for temperature in (1.25, 2.5):
        write_confidence_file(tmp_path, {"temperature": temperature, "num": 600})
        assert read_temperature(tmp_path) == temperature
        assert find_damage(tmp_path) is None
    manifest = parse_manifest((tmp_path / "manifest.json").read_bytes())
    assert (manifest.run_id, set(manifest.files)) == ("abc", {"config.json", CONFIDENCE})
    (tmp_path / CONFIDENCE).write_text('{"temperature": 9}')
    assert find_damage(tmp_path) == "confidence.json is damaged (its checksum differs)"
    (tmp_path / CONFIDENCE).unlink()  # as docs/method.md says, for temperature 1
    assert (find_damage(tmp_path), read_temperature(tmp_path)) == (None, 1)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"temperature": "1"}', '{"temperature": 0}', '{"temperature": NaN}']
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / CONFIDENCE).write_text(content)
    with pytest.raises(RunDirError, match="Delete the file"):
        read_temperature(tmp_path)
