"""confidence.json of model/, and confidences of earlier versions."""

from __future__ import annotations

import json
import math

import pytest
from fake_run import fake_run, make_predictions, write_run

from fivetune.errors import RunDirError
from fivetune.rundir import read_run
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


def test_confidences_of_earlier_versions_are_read_as_probabilities(tmp_path):
    """They were exp(logprob / num_tokens) for written answers; labels had shares of their set then as now."""
    old = {"logprob": -3.0, "num_tokens": 6, "confidence": math.exp(-0.5)}
    lines = [
        {"id": "old", **old},
        {"id": "new", "logprob": -3.0, "num_tokens": 6, "confidence": math.exp(-3)},
        {"id": "tempered", "logprob": -3.0, "num_tokens": 6, "confidence": 0.2},
        {"id": "label", "left_label_set": False, **old},
    ]
    run = fake_run(predictions={"eval-300": make_predictions(*lines)})
    read = read_run(write_run(tmp_path / "run", run)).predictions["eval-300"]
    expected = [math.exp(-3), math.exp(-3), 0.2, math.exp(-0.5)]
    assert [one.confidence for one in read] == pytest.approx(expected)
    assert all(json.dumps(one.as_dict()) for one in read)
