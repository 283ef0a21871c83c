"""The quickstart, short: the whole road on the carried checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivetune.cli import main
from fivetune.data.corpus import CHECKPOINT


@pytest.fixture
def run_quickstart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the quickstart in tmp_path with few questions; returns what it prints."""

    def run(*, num_train: int, num_eval: int, num_steps: int) -> dict[str, Any]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr("fivetune.data.corpus.reading.QUICKSTART_TRAIN", num_train)
        monkeypatch.setattr("fivetune.data.corpus.reading.QUICKSTART_EVAL", num_eval)
        assert main(["quickstart", "--dir", str(tmp_path), "--steps", str(num_steps), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.release
def test_quickstart_learns(run_quickstart: Callable[..., dict[str, Any]]) -> None:
    result = run_quickstart(num_train=3_000, num_eval=100, num_steps=60)
    assert result["before"]["exact"] < 20
    assert result["scores"]["exact"] > result["before"]["exact"] + 20


@pytest.mark.slow
def test_quickstart_leaves_a_model_and_a_report(tmp_path: Path, run_quickstart: Callable[..., dict[str, Any]]) -> None:
    result = run_quickstart(num_train=200, num_eval=20, num_steps=2)
    assert result["scores"]["total"] == result["before"]["total"] == 20
    assert Path(result["report"]).stat().st_size > 50_000
    assert (tmp_path / "quickstart" / "model" / "model.safetensors").is_file()


def test_the_carried_checkpoint_is_small_and_documented() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) < 8_000_000
    card = (CHECKPOINT / "README.md").read_text(encoding="utf-8")
    assert "recipes/nano/pretrain.yaml" in card
