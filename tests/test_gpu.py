"""The stages of `benchmarks.gpu_day`, each in its own process: on a GPU (-m gpu), and in a reduced form on a CPU."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_day, gpu_right
from benchmarks.gpu_day import CALLS, Stage, run_process, run_stage

RIGHT = CALLS["right"]
SIMILAR = ("randomness", "syncs")  # on a CPU the steps of "capture", which take the interpreter 10 s each
ON_CPU = [stage for stage in RIGHT if stage.name not in SIMILAR]
OTHERS = [stage for stage in CALLS["rest"] if stage.module in ("gpu_decode", "gpu_tiles")]  # benchmarks.train has tests


def check(stage: Stage, device: str) -> None:
    """Run a stage; on a CPU in this process, which has imported torch, unless it compiles kernels."""
    is_here = device == "cpu" and stage.module == "gpu_right" and stage.name != "compile"
    found = gpu_right.run_stage(stage.name, device) if is_here else run_stage(stage, device, seconds_left=600)
    assert found["state"] == "passed", json.dumps(found, indent=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("stage", RIGHT, ids=[stage.name for stage in RIGHT])
def test_the_cuda_path_is_right(stage):
    check(stage, "cuda")


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of steps that are not finite on purpose
@pytest.mark.parametrize("stage", [*ON_CPU, *OTHERS[:2]], ids=lambda stage: stage.name)
def test_a_stage_runs_on_a_cpu(stage):
    check(stage, "cpu")


def run_main(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_day", *words])
    gpu_day.main()


@pytest.mark.release
def test_a_stage_that_fails_costs_only_itself(tmp_path, monkeypatch, capsys):
    stages = (Stage("bad", 30, "data", "--nonsense"), RIGHT[0])
    monkeypatch.setitem(CALLS, "right", stages)
    with pytest.raises(SystemExit, match="1"):
        run_main(["right", "--device", "cpu", "--out", str(tmp_path), "--minutes", "2", "--json"], monkeypatch)
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name == "gpu-day-right-cpu.json" and json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    bad, good = found["stages"]["bad"], found["stages"]["facts"]
    assert bad["state"] == "ended with code 2" and "--nonsense" in bad["end"]
    assert good["state"] == "passed" and good["host"]["num_cores"] and good["bytes_copied_per_second"] > 0


def test_what_was_measured_is_in_the_file_when_a_call_is_cut_off(tmp_path, monkeypatch):
    def cut_off(stage: Stage, device: str, *, seconds_left: float) -> dict[str, str]:
        if stage.name == "kernels":
            raise KeyboardInterrupt
        return {"state": "passed"}

    monkeypatch.setattr(gpu_day, "run_stage", cut_off)
    with pytest.raises(KeyboardInterrupt):
        run_main(["right", "--device", "cpu", "--out", str(tmp_path)], monkeypatch)
    states = json.loads((tmp_path / "gpu-day-right-cpu.json").read_text())["stages"]
    assert {name: found["state"] for name, found in states.items()} == {
        "facts": "passed",
        "models": "passed",
        "kernels": "began, and was cut off",
    }


def test_a_process_that_hangs_ends_with_all_that_it_started():
    hang = "import time; print('ready', flush=True); time.sleep(99)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {hang!r}]); print(p.pid); p.wait()"
    state, output, _ = run_process([sys.executable, "-u", "-c", code], dict(os.environ), 2.0)
    child = int(next(line for line in output.splitlines() if line.isdecimal()))
    end = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert state is None


def test_a_check_that_is_no_number_is_wrong():
    from benchmarks.gpu_checks import Findings

    findings = Findings()
    findings.check("loss", 0.5, 1.0)
    findings.require("it goes on", True)
    assert findings.to_json()["state"] == "passed"
    findings.check("norm", float("nan"), 1.0)
    assert findings.to_json()["wrong"] == ["norm: nan, allowed 1"]


def test_no_time_left_and_unknown_stages(tmp_path, monkeypatch, capsys):
    assert run_stage(RIGHT[0], "cpu", seconds_left=10) == {"state": "no time left"}
    with pytest.raises(SystemExit):
        run_main(["right", "--only", "facts,tiles", "--device", "cpu"], monkeypatch)
    assert "--only: right has no tiles. Allowed: facts, models, " in capsys.readouterr().err


def test_a_result_in_a_few_words():
    speed = {"precision": "bf16", "tokens_per_second": [1234.5, 1, 2], "mfu": 0.3, "peak_bytes": 2e9}
    found = {"sides": {"fivetune": speed}, "ratios": {"tuned": {"same_examples": 1.76}}}
    assert gpu_day.describe_result(found) == "bf16, 1,234 tokens/s, MFU 30.0%, 1.76 x tuned, peak 2.0 GB"
    assert gpu_day.describe_result({"end": "a\nValueError: b\n"}) == "ValueError: b"
