"""Traces of torch.profiler: a made one of a device, real ones of the CPU, the command, and the report's section."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import kit
import pytest

from fivetune.cli import main
from fivetune.config import load_config
from fivetune.errors import ConfigError, DataError
from fivetune.machine.profiling.chrome import read_trace, summarise_trace
from fivetune.machine.profiling.summary import SpanCoverage, downsample_points
from fivetune.reading.report import build_page
from fivetune.reading.report.page.parts import Chart, Table
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.run.trace import build_trace_page, build_trace_section
from fivetune.rundir import TRACE, RunDir, read_run, write_json
from fivetune.training.window import profile_steps


def event(cat: str, name: str, start: float, end: float, thread: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": thread, "args": args}


def launch(number: int, start: float, end: float, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event("cuda_runtime", name, start, end, correlation=number)


def kernel(number: int, start: float, end: float, name: str, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return event(cat, name, start, end, thread=7, device=0, stream=7, correlation=number, **args)


DEVICE: dict[str, Any] = {
    "deviceProperties": [{"id": 0, "name": "NVIDIA A100"}],
    "traceEvents": [  # microseconds
        event("user_annotation", "ProfilerStep#1", 1000, 1500),
        event("user_annotation", "ProfilerStep#2", 1500, 2000),
        event("user_annotation", "fivetune.data", 1000, 1050),
        event("user_annotation", "fivetune.forward", 1100, 1400),
        event("user_annotation", "fivetune.forward", 1500, 1700),
        launch(1, 1100, 1110),
        launch(2, 1120, 1130),
        launch(3, 1600, 1615),
        launch(4, 1700, 1701, "cudaMemcpyAsync"),
        launch(5, 1702, 1990, "cudaStreamSynchronize"),
        kernel(1, 1150, 1250, "ampere_sgemm_128x64_tn"),
        kernel(2, 1255, 1275, "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"),
        kernel(3, 1625, 1725, "ampere_sgemm_128x64_tn"),
        kernel(4, 1725, 1735, "Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", bytes=4096),
        event("cpu_op", "aten::mm", 1095, 1115),
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "ts": 1200,
            "args": {"Device Type": 1, "Total Allocated": 3000},
        },
        {
            "ph": "i",
            "cat": "cpu_instant_event",
            "name": "[memory]",
            "ts": 1300,
            "args": {"Device Type": 0, "Total Allocated": 9},
        },
    ],
}


def test_a_device_trace_by_hand():
    found = summarise_trace(DEVICE, parts={"weights": 1000})
    times = {work.name: round(1e6 * work.seconds) for work in found.classes}
    assert times == {"GEMM": 200, "pointwise": 20, "copy": 10}
    assert sum(work.share for work in found.classes) == pytest.approx(1)
    assert found.window_seconds == pytest.approx(1e-3) and found.num_steps == 2
    (device,) = found.devices
    assert (device.name, device.busy_seconds) == ("NVIDIA A100", pytest.approx(230e-6))
    assert [(num, round(1e6 * seconds)) for _, num, seconds in device.gaps] == [(1, 5), (0, 0), (1, 350), (0, 0)]
    assert device.host_bound_seconds == pytest.approx(340e-6)  # until the launch had ended
    assert found.divide_by_steps(found.num_launches) == 1.5 and found.divide_by_steps(found.num_synchronisations) == 0.5
    forward = next(phase for phase in found.phases if phase.name == "forward")
    assert (forward.host_seconds, forward.device_seconds) == (pytest.approx(500e-6), pytest.approx(220e-6))
    assert forward.idle_seconds == pytest.approx(305e-6)
    assert found.memory is not None and found.memory.peak_bytes == 3000 and sum(found.memory.parts.values()) == 3000
    assert found.outside_seconds is None


def test_waiting_for_data_and_for_the_device_is_not_the_hosts_launching():
    waited = [event("user_annotation", "fivetune.data", 1400, 1500), launch(9, 1275, 1300, "cudaDeviceSynchronize")]
    (device,) = summarise_trace({"traceEvents": [*DEVICE["traceEvents"], *waited]}).devices
    assert device.host_bound_seconds == pytest.approx((340 - 100 - 25) * 1e-6)


def test_without_launches_nothing_is_said_of_them():
    bare = [one for one in DEVICE["traceEvents"] if one.get("cat") not in ("cuda_runtime", "user_annotation")]
    found = summarise_trace({"traceEvents": bare})
    assert found.host_bound_share is None and found.num_steps is None and found.as_dict()["launches_per_step"] is None


def test_own_time_of_operators_adds_up():
    nested = [
        event("cpu_op", "aten::linear", 0, 100),
        event("cpu_op", "aten::addmm", 10, 90),
        event("cpu_op", "aten::copy_", 20, 30),
        event("cpu_op", "aten::add", 120, 140),
        event("cpu_op", "aten::mm", 0, 50, thread=2),
    ]
    found = summarise_trace({"traceEvents": nested})
    assert {work.name: round(1e6 * work.seconds) for work in found.top} == {
        "aten::addmm": 70,
        "aten::mm": 50,
        "aten::add": 20,
        "aten::linear": 20,
        "aten::copy_": 10,
    }
    assert found.outside_seconds == pytest.approx(20e-6) and found.busy_share is None and found.devices == ()


def test_backward_is_found_where_nobody_named_it():
    engine = "autograd::engine::evaluate_function: MmBackward0"
    found = summarise_trace(
        {
            "traceEvents": [
                event("user_annotation", "fivetune.forward", 0, 10),
                event("user_annotation", "fivetune.forward", 50, 60),
                event("cpu_op", engine, 12, 20),
                event("cpu_op", engine, 25, 40),
                event("cpu_op", engine, 61, 70),
                event("user_annotation", "Optimizer.step#AdamW.step", 71, 90),
            ]
        }
    )
    assert {phase.name: (phase.num, round(1e6 * phase.host_seconds)) for phase in found.phases} == {
        "forward": (2, 20),
        "backward": (2, 37),
        "optimizer": (1, 19),
    }


def test_cover_and_thinning():
    cover = SpanCoverage([(0, 2), (4, 6)])
    assert [
        cover.measure_overlap(1, 5),
        cover.measure_overlap(2, 4),
        cover.measure_overlap(-1, 9),
        cover.measure_overlap(5, 4),
    ] == [2, 0, 4, 0]
    points = [(float(i), 100 if i == 777 else i % 10) for i in range(10_000)]
    kept = list(downsample_points(points, limit=100))
    assert len(kept) <= 100 and (777.0, 100) in kept and kept == sorted(kept) and kept[-1] == points[-1]


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b broken", b"[1, 2", b"[]", b'{"traceEvents": 3}'])
def test_what_is_no_trace_is_told_in_a_sentence(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"trace\.json: .* export_chrome_trace|\(export_chrome_trace\)"):
        read_trace(path)
    with pytest.raises(DataError, match="is empty"):
        summarise_trace({"traceEvents": []})


# --- real steps ---


@pytest.mark.slow
def test_real_steps_are_recorded_and_nothing_else_is_written(tmp_path, model_folder):
    config = load_config(kit.recipe(tmp_path, model_folder))
    trace = tmp_path / "run" / "trace" / "trace.json.gz"
    window = profile_steps(config, trace, num_steps=2, num_warm_up=1)
    found = summarise_trace(read_trace(trace), parts=window.bytes_by_part, plain_step_seconds=window.plain_step_seconds)
    assert found.num_steps == 2 and found.measures == "operators" and found.devices == ()
    assert sum(work.share for work in found.classes) == pytest.approx(1)
    spent = sum(work.seconds for work in found.classes) + (found.outside_seconds or 0)
    assert spent == pytest.approx(found.window_seconds, rel=0.02)  # one thread: every moment is counted once
    phases = {phase.name: phase.host_seconds for phase in found.phases}
    assert {"data", "host", "forward", "backward", "optimizer"} <= set(phases)
    assert sum(phases.values()) <= found.window_seconds and phases["backward"] > phases["data"]
    assert next(work for work in found.classes if work.kind == "GEMM").num > 0  # of all, not of the slowest alone
    assert found.top and all(work.num > 0 for work in found.top)
    assert found.memory is not None and found.memory.since_start and window.bytes_by_part["weights"] > 10_000
    assert {path.name for path in (tmp_path / "run").rglob("*")} == {"trace", "trace.json.gz"}
    with pytest.raises(ConfigError, match="uses several processes"):
        profile_steps(
            load_config(kit.recipe(tmp_path, model_folder, strategy={"name": "ddp"})), trace, num_steps=1, num_warm_up=1
        )


def command(folder: Path, model: Path, *words: str) -> int:
    path = folder / "recipe.json"
    path.write_text(json.dumps(kit.recipe(folder, model)))
    return main(["profile", str(path), "--steps", "1", "--warm-up", "1", *words])


@pytest.mark.slow
def test_the_command_leaves_a_run_as_it_is_but_for_its_trace(tmp_path, model_folder, capsys):
    run = RunDir.create(tmp_path / "run")
    (run.path / "config.yaml").write_text("run: {dir: x}\n")
    run.close()
    assert command(tmp_path, model_folder, "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["num_steps"] == 1 and told["plain_step_seconds"] > 0 and told["launches_per_step"] is None
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.yaml", ".lock", "trace"}
    assert (tmp_path / "run" / "config.yaml").read_text() == "run: {dir: x}\n"
    assert read_run(tmp_path / "run").trace["window_seconds"] == told["window_seconds"]


@pytest.mark.slow
def test_a_new_run_directory_can_still_be_trained_in_and_keeps_its_trace(tmp_path, model_folder, capsys):
    assert command(tmp_path, model_folder) == 0
    printed = capsys.readouterr().out
    assert "operators on the CPU" in printed and "GEMM" in printed and "(ms)" in printed
    run = RunDir.create(tmp_path / "run")
    (run.path / "checkpoints").mkdir()
    run.discard()
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == [
        "summary.json",
        "trace",
        "trace.html",
        "trace.json.gz",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--steps", "0"], "--steps: 0 is not a number of steps"),
        (["--run.dir", "{}/data"], "is not empty and not a run directory"),
        (["--train.batch_siez", "1"], "batch_size"),
    ],
)
def test_what_cannot_be_profiled_is_refused(tmp_path, model_folder, capsys, words, says):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").write_text("mine")
    assert command(tmp_path, model_folder, *(word.format(tmp_path) for word in words)) in (2, 4)
    assert says in capsys.readouterr().err


def test_files_are_read_by_their_names(tmp_path, capsys):
    trace = tmp_path / "a.json.gz"
    trace.write_bytes(gzip.compress(json.dumps(DEVICE).encode()))
    page = tmp_path / "a.html"
    assert main(["profile", str(trace), "--html", str(page)]) == 0
    assert "NVIDIA A100" in capsys.readouterr().out and "NVIDIA A100" in page.read_text()
    assert main(["profile", str(tmp_path / "a.nsys-rep")]) == 3
    assert "nsys export --type sqlite" in capsys.readouterr().err


# --- the report ---


def test_the_section_states_its_units_and_escapes_names(tmp_path):
    assert build_trace_section({}).parts == ()
    hostile = event("kernel", "<script>alert(1)</script>", 1200, 1300, device=0)
    summary = json.loads(
        json.dumps(summarise_trace({**DEVICE, "traceEvents": [*DEVICE["traceEvents"], hostile]}).as_dict())
    )
    section = build_trace_section(summary)
    tables = [part for part in section.parts if isinstance(part, Table)]
    rows = {row[0]: row[1] for row in tables[0].rows}
    assert rows["window (ms)"] == "1.00" and rows["launches per step"] == "1.5"
    assert tables[1].header == ("class", "time (ms)", "per step (ms)", "count", "mean (ms)", "share")
    assert tables[1].rows[0][:4] == ("GEMM", "0.20", "0.10", "2")
    assert sum(isinstance(part, Chart) for part in section.parts) == 2
    html = render_html(build_trace_page(summary, title="t"))
    assert "<script>alert" not in html


def test_the_runs_report_shows_the_trace(tmp_path):
    run = RunDir.create(tmp_path / "run")
    (run.path / "config.yaml").write_text("run: {dir: x}\n")
    run.close()
    assert "Trace" not in [section.title for section in build_page(read_run(run.path)).sections]
    write_json(run.path / TRACE, summarise_trace(DEVICE).as_dict())
    assert "Trace" in [section.title for section in build_page(read_run(run.path)).sections]
