"""The report's sections on where the time went: telemetry as series, phases as spans, steps by part, verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from fake_comparison import PHASES, START, loaded_run, measured, telemetry
from fake_run import change_run, fake_run, make_run, make_step

from fivetune.reading.report import build_page
from fivetune.reading.report.page.parts import Chart, Section, Table
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.run.load import DEVICE_GAUGES, HOST_GAUGES, Load, PhaseInterval
from fivetune.reading.report.run.load_charts import Lane, build_run_load_section, compute_point_budget, draw_lanes_chart
from fivetune.reading.report.run.problems import build_evidence_section
from fivetune.reading.report.run.speed import build_step_time_section, compute_step_breakdown, select_measured_steps
from fivetune.types import Verdict

UTILISATION, CORES, POWER = DEVICE_GAUGES[0], HOST_GAUGES[0], DEVICE_GAUGES[4]


def load_of(records: list[dict[str, Any]]) -> Load:
    return Load(make_run(telemetry=records).telemetry)


def charts_of(section: Section) -> list[Chart]:
    return [part for part in section.parts if isinstance(part, Chart)]


def test_each_device_and_host_is_a_series_in_the_unit_of_its_gauge() -> None:
    load = load_of(telemetry())
    busy, idle = load.build_tracks(UTILISATION)
    assert (busy.name, idle.name) == ("GPU 0", "GPU 1 (not used by the run)")
    assert busy.values[20] == pytest.approx(93, rel=0.06) and set(idle.values) == {0.0, None}
    assert busy.values[33] is None and busy.seconds[33] == 33.0
    cores = {track.name: track.limit for track in load.build_tracks(CORES)}
    assert cores == {"whole host": 4, "this run": None}
    assert load.build_tracks(POWER)[0].limit == 300


def test_what_was_never_read_has_no_series_and_no_chart() -> None:
    load = load_of(telemetry(num_devices=0))
    assert [gauge.title for gauge in DEVICE_GAUGES if load.build_tracks(gauge)] == []
    titles = [chart.caption.partition(".")[0] for chart in charts_of(build_run_load_section(loaded_run(num_devices=0)))]
    assert titles == ["Busy cores", "Memory of the host", "Disk"]
    assert build_run_load_section(fake_run()).parts == ()


def test_devices_are_told_once_and_processes_by_rank() -> None:
    both = telemetry() + telemetry(rank=1, start=START + 0.4)
    assert [track.name for track in load_of(both).build_tracks(UTILISATION)] == ["GPU 0", "GPU 1 (not used by the run)"]
    assert [track.name for track in load_of(both).build_tracks(CORES)] == [
        "whole host",
        "rank 0 this run",
        "rank 1 this run",
    ]


def test_the_pause_before_a_resume_is_left_out() -> None:
    first, second = telemetry(num=20), telemetry(num=20, start=START + 86_400)
    seconds = load_of(first + second).build_tracks(POWER)[0].seconds
    assert seconds[-1] == 39.0 and seconds[20] == 20.0


def test_phases_are_spans_that_follow_each_other() -> None:
    assert load_of(telemetry(num=61)).list_phase_intervals() == [
        PhaseInterval("prepare", 0, 10),
        PhaseInterval("train", 10, 50),
        PhaseInterval("evaluate", 50, 58),
        PhaseInterval("train", 58, 60),
    ]
    nothing = [record | {"phase": None, "devices": None, "core_utilisation": None} for record in telemetry(num=3)]
    assert load_of(nothing).list_phase_intervals() == [] and load_of([{}, {"seconds": None}]).build_tracks(CORES) == []


def test_all_phases_but_training_are_shaded_behind_the_lines() -> None:
    load = load_of(telemetry())
    chart = draw_lanes_chart(
        UTILISATION,
        [Lane("run", load.build_tracks(UTILISATION), load.list_phase_intervals())],
        "c",
        wide=True,
    )
    shades = [trace for trace in chart.data if trace.get("fill") == "toself"]
    assert [trace["meta"] for trace in shades] == ["prepare", "evaluate"]
    assert shades[1]["x"][:5] == [50, 50, 58, 58, None]
    assert chart.data[len(shades)]["meta"] == "GPU 0" and None in chart.data[len(shades)]["y"]


def test_lanes_keep_extremes_of_long_runs_and_get_an_axis_each() -> None:
    records = telemetry(num=9000, num_devices=1)
    records[5000]["devices"][0]["power_watts"] = 299.5
    load = load_of(records)
    lanes = [
        Lane(f"run {i}", load.build_tracks(POWER), load.list_phase_intervals(), ("red", "solid")) for i in range(20)
    ]
    chart = draw_lanes_chart(POWER, lanes, "c", wide=True)
    lines = [trace for trace in chart.data if trace.get("meta", "").startswith("run")]
    assert len(lines) == 20 and all(len(line["x"]) <= compute_point_budget(20) and 299.5 in line["y"] for line in lines)
    assert {line["yaxis"] for line in lines} == {"y", *(f"y{i}" for i in range(2, 21))}
    assert "yaxis20" in chart.layout


def test_a_step_is_its_measured_parts_and_the_rest() -> None:
    steps = select_measured_steps(make_run(steps=[*measured(1.0), make_step(301)]).steps)
    assert len(steps) == 297
    parts = compute_step_breakdown(steps)
    assert parts == pytest.approx({**PHASES, "other": 0.4 - sum(PHASES.values())})
    assert sum(parts.values()) == pytest.approx(0.4)
    (table,) = [part for part in build_step_time_section(loaded_run()).parts if isinstance(part, Table)]
    assert table.rows[4][:2] == ("backward: backward pass", "50.0 %")
    assert build_step_time_section(fake_run()).parts == ()


def test_verdicts_say_what_to_change_and_what_it_gives() -> None:
    verdict = Verdict(
        "input_bound", "Waiting for data takes 31 %.", 0.31, 0.1, 0.9, "Use two workers.", {"a.b": 2}, 1.4
    )
    _, table = build_evidence_section(fake_run(), [verdict]).parts
    assert isinstance(table, Table)
    assert table.rows == [("input bound", "0.310", "0.100", "90 %", "a.b 2", "1.40 x")]
    assert build_evidence_section(change_run(fake_run(), steps=[], evals=[]), []).parts == ()


def test_a_single_run_s_page_has_the_sections() -> None:
    page = build_page(loaded_run())
    titles = [section.title for section in page.sections]
    assert [title for title in titles if title in ("Evidence", "Step time", "Load")] == [
        "Evidence",
        "Step time",
        "Load",
    ]
    html = render_html(page)
    assert 'data-group="load"' in html and "GPU time spent accessing memory" in html
