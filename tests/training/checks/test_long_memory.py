"""The forecast of memory for LongT5, whose long inputs make an allocator keep what was freed, against real runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kit
import pytest
from family_kit import make_family_model

from fivetune.config.layers import as_yaml
from fivetune.rundir import read_run
from fivetune.training.checks.preflight import find_kept_share

SIZES = {"d_model": 256, "d_kv": 64, "d_ff": 512, "local_radius": 127, "global_block_size": 16}
UNITS = {"MiB": 2**20, "GiB": 2**30}


def test_what_the_allocator_keeps_is_in_the_forecast_unless_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.41"))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    kinds = ("local", "transient-global")
    assert [find_kept_share(SimpleNamespace(encoder_attention_type=kind)) for kind in kinds] == [0.25, 0.1]
    assert find_kept_share(object()) == 0
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4194304")
    assert find_kept_share(SimpleNamespace(encoder_attention_type="local")) == 0


@pytest.mark.release
def test_the_forecast_is_that_of_the_run(tmp_path: Path) -> None:
    """In a process of its own, as a peak cannot be reset; in fp32, as a trial of bf16 adds to the peak of some CPUs."""
    length = 2048
    model = make_family_model(tmp_path / "long", "longt5-local", **SIZES)
    table: dict[str, Any] = kit.recipe(tmp_path, model, train__batch_size=1, train__global_batch_size=1)
    table["train"]["precision"] = "fp32"
    lines = [{"inputs": " ".join(kit.WORDS * length)[: 12 * length], "targets": "red hat"}] * 8
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table |= {"task": {"name": "jsonl"}}
    table["data"] |= {"train": str(tmp_path / "long.jsonl"), "eval": [], "max_input_tokens": length}
    (tmp_path / "recipe.yaml").write_text(as_yaml(table))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fivetune", "check", str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = re.search(r"forecast: up to ([\d.]+) (MiB|GiB)", " ".join((done.stdout + done.stderr).split()))
    assert found
    forecast = float(found[1]) * UNITS[found[2]]
    command[3:] = ["train", command[-1], "--no-preflight"]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    peak = max(step.peak_bytes or 0 for step in read_run(tmp_path / "run").steps)
    print(f"\n{length}: {forecast / 2**30:.2f} {peak / 2**30:.2f}")
    assert 0.9 < forecast / peak < 1.2
