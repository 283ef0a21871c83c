"""`fivetune doctor`: what a machine has, what is wrong with it, and how fast it trains."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fivetune import installation
from fivetune.cli import main
from fivetune.model.shapes import KNOWN_SHAPES
from fivetune.training.checks import machine_checks
from fivetune.training.checks.machine_checks import run_machine_checks


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_the_command_names_every_part_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["doctor", "--device", "cpu", "--seconds", "0", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = [check["name"] for check in printed["checks"]]
    assert names == ["packages", "extras", "processor", "device", "memory", "disk", "data cache", "hub"]
    assert printed["machine"]["versions"]["torch"] == torch.__version__ and printed["failed"] == 0
    assert not list(tmp_path.iterdir())


def test_a_checkout_that_is_not_installed_has_unknown_extras(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(installation, "PACKAGE", "not-a-package-of-this-environment")
    found = {one.name: one for one in run_machine_checks(tmp_path, device="cpu", seconds=0)}["extras"]
    assert (found.state, found.detail) == ("pass", "not installed as a package: extras unknown")


@pytest.mark.slow
def test_the_speed_is_that_of_real_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2}
    monkeypatch.setitem(KNOWN_SHAPES, "t5-small", replace(KNOWN_SHAPES["t5-small"], **tiny))
    steps: list[int] = []
    train_step = machine_checks.train_step
    monkeypatch.setattr(machine_checks, "train_step", lambda *a, **k: steps.append(1) or train_step(*a, **k))
    clock = itertools.count()  # the machine may be busy: each look at the clock is a twentieth of a second
    monkeypatch.setattr(machine_checks, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 20))
    (*_, speed) = run_machine_checks(tmp_path, device="cpu", seconds=0.2)
    assert speed.state == "pass" and "fp32 on cpu, 1 threads, flat forward" in speed.detail
    assert len(steps) == 5


def test_what_is_wrong_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(machine_checks, "get_host_memory", lambda: (8 * 2**30, 2**30))
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
    device = SimpleNamespace(name="NVIDIA H100")
    monkeypatch.setattr(machine_checks, "Nvml", lambda: SimpleNamespace(sample=lambda: [device], close=lambda: None))
    monkeypatch.setattr(machine_checks.torch.cuda, "is_available", lambda: False)
    found = {one.name: one for one in run_machine_checks(tmp_path, device="auto", seconds=0)}
    for name, told in (
        ("device", "the driver finds NVIDIA H100, and torch"),
        ("memory", "1.0 GiB free of 8.0 GiB: training t5-small takes about 3 GiB. Close other programs"),
        ("disk", "a checkpoint of t5-base with AdamW takes 2.5 GiB. Free space"),
        ("hub", "http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused)"),
    ):
        assert found[name].state == "warn" and told in found[name].detail


def test_a_gpu_is_described_by_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(name=name, total_memory=15 * 2**30) for name in ("Tesla T4", "NVIDIA T1000")]
    cuda = machine_checks.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(cuda, "get_device_properties", cards.__getitem__)
    state, told, *_ = machine_checks._check_device("cuda")
    assert state == "pass" and "Tesla T4 (15.0 GiB; by its data sheet dense peaks 8.1 TFLOP/s in fp32, 65 in" in told
    assert "NVIDIA T1000 (15.0 GiB; not in the tables" in told


@pytest.mark.parametrize(("code", "state"), [(404, "pass"), (503, "warn")])
def test_a_hub_that_answers_with_an_error_is_reached(monkeypatch: pytest.MonkeyPatch, code: int, state: str) -> None:
    def refuse(request: urllib.request.Request, timeout: float) -> None:
        raise urllib.error.HTTPError(request.full_url, code, "Reason", Message(), None)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://me:password@mirror")
    monkeypatch.setattr(machine_checks.urllib.request, "urlopen", refuse)
    found = machine_checks._check_hub()
    assert found[0] == state and found[1].startswith(f"http://(hidden)@mirror answers with {code} Reason; ")


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["doctor", "--folder", str(tmp_path / "file"), "--seconds", "0"]) == 4
    out = " ".join(capsys.readouterr().out.split())
    assert f"fail disk {tmp_path / 'file'}: Not a directory. Runs need a folder that can be written" in out
    assert "1 failed" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--seconds", "-1"), "--seconds -1: allowed are 0 to 600"), (("--device", "gpu"), "device")],
)
def test_arguments_are_checked(words: tuple[str, str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert told in capsys.readouterr().err
