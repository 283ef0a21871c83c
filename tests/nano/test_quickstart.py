"""The quickstart, short: the whole road on the carried checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fivetune.cli import main
from fivetune.nano import CHECKPOINT


@pytest.mark.release
def test_quickstart_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("fivetune.nano.reading.QUICKSTART_TRAIN", 3_000)
    monkeypatch.setattr("fivetune.nano.reading.QUICKSTART_EVAL", 100)
    assert main(["quickstart", "--dir", str(tmp_path), "--steps", "60", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["before"]["exact"] < 20
    assert result["scores"]["exact"] > result["before"]["exact"] + 20


@pytest.mark.slow
def test_quickstart_leaves_a_model_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("fivetune.nano.reading.QUICKSTART_TRAIN", 200)
    monkeypatch.setattr("fivetune.nano.reading.QUICKSTART_EVAL", 20)
    assert main(["quickstart", "--dir", str(tmp_path), "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["scores"]["total"] == result["before"]["total"] == 20
    assert Path(result["report"]).stat().st_size > 1_000_000
    assert (tmp_path / "quickstart" / "model" / "model.safetensors").is_file()


def test_the_carried_checkpoint_is_small_and_documented() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 8_000_000
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert "recipes/nano/pretrain.yaml" in card
