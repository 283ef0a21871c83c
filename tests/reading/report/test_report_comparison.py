"""The page of a comparison: its sentences, tables and charts, what it refuses to run, its size, and a real browser."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import browser, open_tab, part
from fake_comparison import comparison, large
from fake_run import HOSTILE

from fivetune.reading.compare import MEASURES
from fivetune.reading.compare.records import Comparison, Measure, Variant
from fivetune.reading.report.comparison import build_comparison_page
from fivetune.reading.report.comparison.charts import MAX_UNSORTED, build_variant_scores_chart
from fivetune.reading.report.comparison.variants import (
    describe_outcome,
    format_measure,
    format_measure_difference,
    format_with_range,
    is_significant,
)
from fivetune.reading.report.page.figures import build_chart_csv
from fivetune.reading.report.page.parts import Chart, Example, Page, Table, Text
from fivetune.reading.report.page.render import choose_column_classes, collect_filter_values, render_html
from fivetune.reading.report.page.series import thin_points


@pytest.fixture(scope="module")
def found() -> Comparison:
    return comparison()


@pytest.fixture(scope="module")
def page(found: Comparison) -> Page:
    return build_comparison_page(found)


def test_sections_follow_a_reader_s_questions(page: Page) -> None:
    assert [section.title for section in page.sections] == [
        "Outcome",
        "Warnings",
        "Variants",
        "Settings",
        "Training time",
        "Curves",
        "Load",
        "Step time",
        "Scaling",
        "Pareto front",
        "Verdicts",
        "Examples",
        "Machine",
        "Definitions",
    ]


def test_what_wins_is_said_with_its_interval_and_its_doubt(found: Comparison) -> None:
    base, other = found.variants[0], found.variants[1]
    pair = replace(found, variants=(base, other))
    assert describe_outcome(pair)[1].startswith(
        "“lr 0.003, nproc 1” has the best F1: 92.15 (91.75 and 92.55), +0.80 against"
    )
    doubts = {
        (0.1, 1.5): "that is significant, because the interval over seeds",
        (-0.1, 1.7): "may be chance, because the interval over",
    }
    for (low, high), words in doubts.items():
        sure = replace(other, against={"score_best": Measure(0.8, low, high, 2, "seeds")})
        assert words in describe_outcome(replace(pair, variants=(base, sure)))[1]
    worse = replace(pair, baseline=other.name, variants=(other, base))
    assert (
        describe_outcome(worse)[1]
        == "No variant has a better F1 than the baseline “lr 0.003, nproc 1”: 92.15 (91.75 and 92.55)."
    )
    losses = replace(pair, higher_is_better=False)
    assert describe_outcome(losses)[1].startswith(
        "No variant has a better F1 than the baseline “lr 0.001, nproc 1”: 91.35"
    )


def test_failures_and_differences_stand_on_top(page: Page) -> None:
    told = [text for section in page.sections[:2] for text in section.parts if isinstance(text, Text)]
    assert "1 run did not finish and is excluded." in told[0].body
    assert any("version of torch" in text.body for text in told)
    assert told[-1].body.endswith("the process was killed (signal 9), out of memory.")
    assert [badge.body for badge in page.badges] == ["4 variants", "7 runs", "3 warnings", "1 missing"]


def test_measures_are_worded_by_their_kind() -> None:
    def say(name: str, value: float) -> tuple[str, str]:
        return format_measure(MEASURES[name], value), format_measure_difference(MEASURES[name], value)

    assert say("score_best", 1.5) == ("1.50", "+1.50")
    assert say("loss_best", -0.1234) == ("\u22120.123", "\u22120.123")
    assert say("seconds", 161.4) == ("2 min 41 s", "161.40 x")
    assert say("padding", 0.125) == ("12.5 %", "+12.5 points")
    assert say("energy_joules", 38_000) == ("38.0 kJ", "38,000.00 x")
    seconds = MEASURES["seconds"]
    assert format_with_range(format_measure, seconds, Measure(20, 10, 30)) == "20.0 s\n10.0 s to 30.0 s"
    assert format_with_range(format_measure, seconds, Measure(20, 20, 20)) == "20.0 s"
    assert format_with_range(format_measure, seconds, Measure(None)) == "n/a"
    assert [is_significant(seconds, one) for one in (Measure(2, 1.5, 3), Measure(2, 0.9, 3), Measure(2))] == [
        True,
        False,
        None,
    ]


def test_the_table_sorts_by_values_and_shows_best_and_last(page: Page, found: Comparison) -> None:
    table = part(page, "Variants", Table)
    assert table.header[:6] == ("variant", "optimizer.lr", "launch.nproc", "runs", "best F1", "last F1")
    assert table.rows[0][0] == "lr 0.001, nproc 1\nbaseline"
    assert table.rows[0][4] == "91.35\n90.95 and 91.75"
    assert table.values[1][:5] == (None, 0.003, 1, 2, pytest.approx(92.15))
    assert choose_column_classes(table)[:2] == ["", "num"]
    against = next(p for p in page.sections[2].parts if isinstance(p, Table) and p.caption.startswith("Against"))
    assert [row[0] for row in against.rows] == [one.name for one in found.variants[1:]]
    speed = against.header.index(MEASURES["examples_per_second"].label)
    assert [row[speed] for row in against.rows] == ["1.20 x", "1.40 x", "1.60 x"]


def test_a_varied_setting_that_a_variant_leaves_alone_is_that_of_its_base(found: Comparison) -> None:
    base = replace(found.variants[0], settings={})
    table = part(build_comparison_page(replace(found, variants=(base, *found.variants[1:]))), "Variants", Table)
    assert table.rows[0][1:3] == ("0.001", "1") and table.values[0][1:3] == (0.001, 1)


def test_settings_that_differ_stand_apart_from_those_that_all_share(page: Page) -> None:
    table, shared = part(page, "Settings", Table), part(page, "Settings", Table, 1)
    assert table.header == ("variant", "optimizer.lr", "launch.nproc")
    assert table.rows[3] == ("lr 0.003, nproc 2", "0.003", "2")
    assert shared.folded and "optimizer.lr" not in {row[0] for row in shared.rows}
    assert part(page, "Machine", Table).header == ("variant", "run", "version of torch")


def test_every_run_has_a_curve_and_its_variant_s_look(page: Page, found: Comparison) -> None:
    chart = part(page, "Curves", Chart)
    assert [trace["meta"] for trace in chart.data] == [one.name for one in found.variants for _ in one.runs]
    looks = {(trace["meta"], trace["line"]["color"], trace["line"]["dash"]) for trace in chart.data}
    assert len(looks) == 4 and chart.group == "step"
    assert part(page, "Curves", Chart, 2).data[0]["x"][-1] == 300


def test_many_variants_stand_in_the_order_of_their_scores(found: Comparison) -> None:
    many = [replace(found.variants[i % 2], name=f"v{i:02}") for i in range(MAX_UNSORTED + 1)]
    chart = build_variant_scores_chart(many, found.metric, "c")
    best = chart.data[-1]
    assert best["x"] == sorted(best["x"], reverse=True) and len(set(best["x"])) == 2
    assert build_variant_scores_chart(many[1:], found.metric, "c").data[-1]["y"] == [one.name for one in many[1:]]


def test_scaling_is_held_against_the_ideal(page: Page) -> None:
    ideal, first, _ = part(page, "Scaling", Chart).data
    assert (ideal["x"], ideal["y"]) == ([1, 2], [1, 2])
    assert (first["x"], first["y"]) == ([1, 2], [1, pytest.approx(1.4)])
    assert part(page, "Scaling", Table).rows[0] == ("lr 0.001, nproc 2", "2", "224", "70.0 %")
    losses = part(page, "Scaling", Table, 1)
    assert losses.rows[0][:3] == ("lr 0.001, nproc 2", "2", "70.0 %")
    for row in losses.values:
        assert sum(value or 0 for value in row[2:]) == pytest.approx(1)
    column = losses.header.index("forward")
    assert losses.rows[0][column] == "8.3 %"  # 0.3 of the share of the forward pass, as all phases grew alike


def test_scaling_beyond_the_ideal_is_not_the_same_work(found: Comparison) -> None:
    faster = {**found.variants[2].measures, "scaling_efficiency": Measure(1.2)}
    variants = (*found.variants[:2], replace(found.variants[2], measures=faster), found.variants[3])
    table = part(build_comparison_page(replace(found, variants=variants)), "Scaling", Table)
    assert table.rows[0][0] == "lr 0.001, nproc 2 (not the same work)"


def test_examples_of_each_kind_can_be_picked_for_any_two_variants(page: Page, found: Comparison) -> None:
    shown = [p for section in page.sections for p in section.parts if isinstance(p, Example)]
    picks = collect_filter_values(shown)
    names = [one.name for one in found.variants]
    assert set(picks["verdict"]) == {"fixed", "broken", "both wrong"}
    assert set(picks["compared"]) == {f"{a} \u2192 {b}" for a, b in combinations(names, 2)}
    assert len({one.verdict for one in shown[:20]}) == 3  # what is printed on paper
    table = part(page, "Examples", Table)
    assert [row[:2] for row in table.rows[:3]] == [(names[0], other) for other in names[1:]]
    assert all(sum(row[2:6]) == 640 for row in table.values)  # type: ignore[arg-type]
    fixed = next(one for one in shown if one.verdict == "fixed")
    assert fixed.before != fixed.prediction and fixed.remark == "F1 0.00, then 1.00"


def test_a_comparison_of_which_nothing_is_known_has_a_page() -> None:
    empty = Variant("a", {}, (), {}, failures=("out of memory.",))
    html = render_html(build_comparison_page(Comparison("t", "a", "f1", (), (empty,))))
    assert "No variant has a score" in html and "a: out of memory." in html
    body = html[: html.rindex("<footer>")]
    assert "None" not in body and "NaN" not in body


def test_text_from_runs_stays_text(page: Page) -> None:
    assert HOSTILE not in render_html(page)


def test_thinning_keeps_extremes_at_small_budgets_too() -> None:
    ys: list[float | None] = [0.0] * 10_000
    ys[1234], ys[8765] = 9.0, -9.0
    xs, kept = thin_points(list(range(10_000)), ys, limit=150)
    assert len(xs) <= 150 and {9.0, -9.0} <= set(kept)


@pytest.mark.release
def test_twenty_runs_of_ten_thousand_steps_stay_small() -> None:
    assert len(render_html(build_comparison_page(large())).encode()) < 500_000


@browser
@pytest.mark.slow
def test_a_browser_draws_sorts_searches_and_saves(page: Page, tmp_path: Path) -> None:
    drawn = [part for section in page.sections for part in section.parts if isinstance(part, Chart)]
    (tmp_path / "page.html").write_text(render_html(page))
    with open_tab(tmp_path) as tab:
        tab.set_width(1280)
        tab.open((tmp_path / "page.html").as_uri())
        tab.wait("document.querySelectorAll('.files').length")
        tab.run("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
        assert tab.run("document.querySelectorAll('.plot > svg').length") == len(drawn)
        assert tab.run("document.querySelectorAll('fieldset.legend').length") >= 3
        # A click on a column's name sorts, upwards first.
        table = "document.querySelector('table.sortable')"
        tab.run(f"{table}.querySelectorAll('th button')[4].click(); {table}.querySelectorAll('th button')[4].click()")
        assert tab.run(f"{table}.tBodies[0].rows[0].cells[0].textContent").startswith("lr 0.003, nproc 2")
        # A pointer shows the values there, in all charts of the axis, but not of what is switched off.
        tab.run("document.querySelector('.legend input').click()")
        first, second = (f"document.querySelectorAll('[data-group=step] .plot')[{place}]" for place in (0, 1))
        tab.run(f"{second}.scrollIntoView({{ block: 'center', behavior: 'instant' }})")
        tab.run(f"""(() => {{
          const {{ left, top, width, height }} = {first}.getBoundingClientRect();
          const place = {{ clientX: left + width / 2, clientY: top + height / 2, bubbles: true }};
          {first}.dispatchEvent(new PointerEvent("pointermove", place));
        }})()""")
        told = tab.read("[data-group=step] .label").split("\n")
        assert told[:2] == ["150", "lr 0.003, nproc 1, seed 0"]
        assert tab.run(f"{second}.querySelector('.label') !== null")
        # The files of a chart: the same rows as `--figures` writes, and a drawing without the page's variables.
        tab.run("""(() => {
          window.saved = [];
          URL.createObjectURL = (blob) => { window.saved.push(blob); return "#"; };
          for (const button of document.querySelectorAll(".files button")) button.click();
        })()""")
        texts = tab.run("Promise.all(window.saved.map((blob) => blob.text()))")
        for chart, svg, rows in zip(drawn, texts[::2], texts[1::2], strict=True):
            assert "var(" not in svg and ElementTree.fromstring(svg).tag.endswith("svg")
            assert [*map(read_cell, flatten(rows))] == [*map(read_cell, flatten(build_chart_csv(chart)))]
        assert (tab.errors, [one for one in tab.requests if not one.startswith("file:")]) == ([], [])


def flatten(text: str) -> list[str]:
    return [cell for row in csv.reader(io.StringIO(text)) for cell in row]


def read_cell(text: str) -> str | float:
    try:
        return round(float(text), 9)
    except ValueError:
        return text
