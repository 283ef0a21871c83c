"""The leases of `benchmarks.gpu_day`: stages on a GPU (-m gpu), in a reduced form on a CPU, and what may go wrong."""

from __future__ import annotations

import json
import os
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed; it exists for Linux only")
sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gpu_day
from benchmarks.gpu_day import DEVICE_WORKS, LEASES, Lease, Stage, run_group

STAGES = [stage for groups in LEASES.values() for group in groups for stage in group]
CHECKS = list({stage.name: stage for stage in STAGES if stage.words.startswith("benchmarks.gpu_right")}.values())


@pytest.fixture
def lease(tmp_path, monkeypatch):
    """A lease of a CPU before its first stage."""
    monkeypatch.setitem(gpu_day.LEAST_SECONDS, "cpu", 2.0)
    (tmp_path / "work" / "logs").mkdir(parents=True)
    environment = gpu_day.make_environment(tmp_path / "work", tmp_path)  # where the programs of `make_stage` are
    return Lease("1", "cpu", tmp_path / "out", tmp_path / "work", {"remarks": []}, environment)


def run(lease: Lease, *stages: Stage, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
    return {stage.name: found for stage, found in run_group(lease, stages, end=time.monotonic() + seconds, jobs=8)}


def make_stage(folder: Path, name: str, code: str) -> Stage:
    """A stage that runs this code; its line of facts comes first."""
    path = folder / f"program_{name}.py"
    path.write_text(f'import json, os, sys, time\nprint(\'{{"facts": {{"begun": true}}}}\', flush=True)\n{code}\n')
    return Stage(name, 100, path.stem)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize("stage", CHECKS, ids=lambda stage: stage.name)
def test_the_cuda_path_is_right(stage, lease):
    lease.device = "cuda"
    found = run(lease, stage, seconds=600)[stage.name]
    assert found["state"] == "passed", json.dumps(found, indent=1)


@pytest.mark.release
@pytest.mark.parametrize("number", list(LEASES))
def test_a_lease_runs_to_its_end_on_a_cpu(number, tmp_path, monkeypatch, capsys):
    words = ["lease", number, "--device", "cpu", "--minutes", "15", "--out", str(tmp_path)]
    assert run_main(words, monkeypatch) == 0, capsys.readouterr().out
    printed = capsys.readouterr().out
    assert len(printed) < 12_000
    with tarfile.open(tmp_path / f"lease-{number}.tgz") as archive:
        content = json.load(archive.extractfile(f"lease-{number}.json"))  # type: ignore[arg-type]
        names = archive.getnames()
    states = {found["state"] for found in content["stages"].values()}
    assert states <= {"passed", "left out"} and len(content["stages"]) == sum(map(len, LEASES[number]))
    assert ("run-report.html" in names) == (number == "2")


def run_main(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_day", *words])
    with pytest.raises(SystemExit) as ended:
        gpu_day.main()
    return int(ended.value.code or 0)


def test_a_stage_costs_only_itself(lease, tmp_path):
    """One passes, one fails, one crashes, one hangs, one is killed; each keeps the lines that it had printed."""
    check = "print(json.dumps({'check': ['loss', 0.2, 0.1]}), flush=True)"
    stages = (
        make_stage(tmp_path, "good", "print(json.dumps({'name': 'x', 'answers': 3}))"),
        make_stage(tmp_path, "wrong", check),
        make_stage(tmp_path, "crash", "raise RuntimeError('CUDA error: the GPU is lost')"),
        make_stage(tmp_path, "hang", f"{check}\ntime.sleep(99)"),
        make_stage(tmp_path, "killed", "os.kill(os.getpid(), 9)"),
    )
    found = run(lease, *stages, seconds=8)
    states = {name: each["state"] for name, each in found.items()}
    assert states["good"] == "passed" and found["good"]["results"] == {"x": {"name": "x", "answers": 3}}
    assert states["wrong"] == "failed" and found["wrong"]["wrong"] == ["loss: 0.2, allowed 0.1"]
    assert states["crash"] == "ended with code 1" and found["crash"]["end"].endswith("the GPU is lost\n")
    assert states["hang"].startswith("more than ") and found["hang"]["checks"] == [["loss", 0.2, 0.1]]
    assert states["killed"] == "ended with code -9"
    assert all(each["facts"] == {"begun": True} for each in found.values())
    lease.results = found
    printed = gpu_day.summarize(lease)
    assert "1 of 1 checks failed: loss: 0.2, allowed 0.1" in printed and "the GPU is lost" in printed


def test_a_stage_that_fills_the_disk_is_ended_and_its_files_are_gone(lease, tmp_path, monkeypatch):
    usage = gpu_day.shutil.disk_usage(tmp_path)
    lease.spare_bytes = 2.0**30
    monkeypatch.setattr(gpu_day.shutil, "disk_usage", lambda path: usage._replace(free=2**29))
    stage = make_stage(tmp_path, "full", "time.sleep(99)")
    assert run(lease, stage)["full"]["state"] == "ended, because it had filled the disk"
    assert not list((lease.work / "stages").iterdir())

    def refuse(*args, **named):
        raise OSError(28, "No space left on device")

    lease.write()
    before = lease.archive.read_bytes()
    monkeypatch.setattr(gpu_day.tarfile, "open", refuse)
    lease.write()
    assert lease.archive.read_bytes() == before and [path.name for path in lease.out.iterdir()] == ["lease-1.tgz"]


def test_a_stage_takes_nothing_away_that_others_share(lease, tmp_path):
    """The folder of the stage `models` is not that of the models which all stages share."""
    code = "place = os.environ['FIVETUNE_BENCH_MODELS'] + '/x'\nos.makedirs(place, exist_ok=True)"
    for _ in range(2):
        for name in ("models", "logs"):
            assert run(lease, make_stage(tmp_path, name, code))[name]["state"] == "passed"
    assert (lease.work / "models" / "x").exists() and (lease.work / "logs" / "logs.out").exists()


def test_all_that_a_stage_started_ends_with_it(lease, tmp_path):
    hang = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    code = f"import subprocess\nchild = {hang}\nprint(json.dumps({{'facts': {{'pid': child.pid}}}}), flush=True)"
    found = run(lease, make_stage(tmp_path, "parent", code))["parent"]
    end = time.monotonic() + 5
    while psutil.pid_exists(found["facts"]["pid"]) and _is_running(found["facts"]["pid"]):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert found["state"] == "passed"


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_was_found_is_in_the_archive_when_a_lease_is_cut_off(lease, tmp_path, monkeypatch):
    good, bad = make_stage(tmp_path, "good", ""), make_stage(tmp_path, "bad", "")
    started = gpu_day.start_stage

    def cut_off(lease: Lease, stage: Stage, *, end: float):
        if stage is bad:
            raise SystemExit(143)
        return started(lease, stage, end=end)

    monkeypatch.setattr(gpu_day, "start_stage", cut_off)
    with pytest.raises(SystemExit):
        gpu_day.run_lease(lease, [[good], [bad]], end=time.monotonic() + 60, jobs=1)
    with tarfile.open(lease.archive) as archive:
        content = json.load(archive.extractfile("lease-1.json"))  # type: ignore[arg-type]
    assert content["stages"]["good"]["state"] == "passed"


@pytest.mark.parametrize("gone", ["the device does not work", "nvidia-smi finds the card no more"])
def test_a_lease_ends_where_the_card_is_of_no_use(lease, tmp_path, monkeypatch, gone):
    """A driver that is too old, or a card that is taken away in the middle of a stage."""
    works = {DEVICE_WORKS: True} if "nvidia" in gone else {}
    code = f"print(json.dumps({{'facts': {works!r}}}))\nraise SystemExit(1)"
    lease.device, lease.card = "cuda", {"gpu": ["H100"], "remarks": []}
    monkeypatch.setattr(gpu_day, "is_card_gone", lambda card: "nvidia" in gone)
    groups = [[make_stage(tmp_path, "facts", code)], [make_stage(tmp_path, "later", "")]]
    gpu_day.run_lease(lease, groups, end=time.monotonic() + 60, jobs=1)
    assert list(lease.results) == ["facts"] and gone in gpu_day.summarize(lease)


def test_the_card_and_who_else_uses_it(tmp_path, monkeypatch):
    assert gpu_day.describe_card("cpu") == {"remarks": []}
    monkeypatch.setenv("PATH", str(tmp_path))
    (remark,) = gpu_day.describe_card("cuda")["remarks"]
    assert remark.startswith("nvidia-smi cannot be run: ")
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "print('NVIDIA H100, 580.1, Enabled' if '--query-gpu' in sys.argv[1] else '17, python3, 900 MiB')\n"
    )
    program.chmod(0o755)
    card = gpu_day.describe_card("cuda")
    assert card["remarks"] == [
        "NVIDIA H100, 580.1, Enabled",
        "MIG is enabled: the figures are those of a part of the card",
        "other processes use the card: 17, python3, 900 MiB",
    ]
    assert not gpu_day.is_card_gone(card)
    program.write_text(f"#!{sys.executable}\nraise SystemExit(9)\n")
    assert gpu_day.is_card_gone(card) and not gpu_day.is_card_gone({"remarks": []})


def test_wheels_are_unpacked_and_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    with zipfile.ZipFile(tmp_path / "one-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("package_of_a_wheel/__init__.py", "")
    (tmp_path / "two-1.0-py3-none-any.whl").write_text("cut off")
    site = gpu_day.unpack_wheels(tmp_path, tmp_path / "site")
    assert site == tmp_path / "site" and "two-1.0-py3-none-any.whl: cannot be unpacked" in capsys.readouterr().out
    monkeypatch.setattr(gpu_day, "PACKAGES", ("json", "package_of_a_wheel", "no_such_package"))
    assert gpu_day.find_missing_packages(site) == ["no_such_package"]
    assert gpu_day.make_environment(tmp_path, site)["PYTHONPATH"].split(os.pathsep)[0] == str(site)
    assert gpu_day.unpack_wheels(tmp_path / "absent", tmp_path / "site") is None


def test_a_lease_needs_python_alone():
    """The machine may lack what `import fivetune` and torch need until the wheels are there."""
    source = Path(gpu_day.__file__).read_text(encoding="utf-8")
    imported = {
        line.split()[1].partition(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))
    }
    assert imported <= sys.stdlib_module_names


def test_no_time_left_and_unknown_stages(lease, monkeypatch, capsys):
    assert run(lease, STAGES[0], seconds=1) == {"facts": {"state": "no time left"}}
    assert run_main(["lease", "1", "--only", "facts,nonsense", "--device", "cpu"], monkeypatch) == 2
    assert "--only: there is no nonsense. Allowed: base, capture-bf16, " in capsys.readouterr().err
    names = [
        [stage.name for stage in group] for group in gpu_day.select_stages("2", ["profile", "capture-fp32", "warm"])
    ]
    assert names == [["warm"], ["profile"], ["capture-fp32"]]


def test_a_check_is_told_at_once_and_what_is_no_number_is_wrong(capsys):
    from benchmarks.gpu_checks import Findings

    lines: list[Any] = []
    findings = Findings(lines.append)
    findings.check("loss", 0.5, 1.0)
    findings.require("it goes on", True)
    findings.check("norm", float("nan"), 1.0)
    findings.note("seconds", 2)
    assert [list(line) for line in lines] == [["check"]] * 3 + [["facts"]]
    found = gpu_day.read_lines("\n".join(map(json.dumps, lines)) + '\n{"check": ["cut o')
    assert found["wrong"] == ["norm: nan, allowed 1"] and len(found["checks"]) == 3 and found["facts"] == {"seconds": 2}


def test_a_stage_that_crashes_has_told_its_checks(monkeypatch):
    from benchmarks import gpu_right

    def crash(findings, device):
        findings.check("loss", 0.5, 1.0)
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    monkeypatch.setitem(gpu_right.STAGES, "models", (crash, {}))
    lines: list[Any] = []
    gpu_right.run_stage("models", "cuda", lines.append)
    found = gpu_day.read_lines("\n".join(map(json.dumps, lines)))
    assert found["wrong"] == ["RuntimeError: CUDA error: an illegal memory access was encountered: 1, allowed 0"]
    assert len(found["checks"]) == 2 and "Traceback" in found["facts"]["error"]


def test_a_training_in_a_few_words():
    side = {"precision": "bf16", "seconds_per_step": 0.0495, "mfu": 0.29, "product_share": 0.36, "peak_bytes": 12e9}
    result = {
        "batch_size": 128,
        "sides": {"fivetune": side, "tuned": {"peak_bytes": 24e9}},
        "ratios": {"tuned": {"same_examples": 2.08}},
        "died": {"default": "out of memory: CUDA out of memory."},
        "num_rounds": 2,
        "num_windows": 4,
    }
    assert gpu_day.describe_training(result) == (
        "batch 128, bf16, 49.5 ms a step, MFU 29.0%, of a measured product 36.0%, peak 12.0 GB, "
        "2.08 x tuned (memory 0.50 x), default died: out of memory: CUDA out of memory., only 2 of 4 rounds"
    )
