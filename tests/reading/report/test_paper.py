"""What a page gives a paper: figures with their data, tables with intervals and marks, a paragraph on methods."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from fake_comparison import comparison
from fake_run import fake_run, make_run

from fivetune.cli import main
from fivetune.errors import ConfigError
from fivetune.reading.compare.changes import compute_paired_difference
from fivetune.reading.compare.records import Measure, Variant
from fivetune.reading.diagnosis.logs import read_log
from fivetune.reading.report.comparison import build_comparison_page
from fivetune.reading.report.comparison.variants import build_comparison_results
from fivetune.reading.report.logs import build_logs_page
from fivetune.reading.report.page.charts import build_bars_chart, build_chart, build_error_bars, build_marks_trace
from fivetune.reading.report.page.figures import build_chart_csv, draw_chart, iter_named_charts, write_figures
from fivetune.reading.report.page.parts import Measured, Page, Results, Text, build_section
from fivetune.reading.report.page.tables import build_csv, build_latex, build_markdown, escape_latex, write_results
from fivetune.reading.report.run.build import build_page
from fivetune.reading.report.run.methods import build_run_results, describe_methods
from fivetune.reading.report.run.slices import iter_confusion_parts
from fivetune.scores.metrics import Scorer, collect_details
from fivetune.scores.metrics.classification import ConfusionMatrix

LOG = """Timestamp (s),CPU (%),RAM (%),Swap (%),0:GPU (%),0:Mem (%),0:Temp (C)
0,50,20,0,{gpu},60,{heat}
30,70,22,0,90,62,{heat}
"""
HOSTILE = "50 % of {a_b} & $c$ \\ ~^#<i>|*"


@pytest.fixture(scope="module")
def results() -> Results:
    rows = [
        ["plain", Measured("80.00", 80.0, (78.0, 82.5), "78.0 to 82.5")],
        [HOSTILE, Measured("\u22121.00", -1.0, (-2.0, -0.5), "\u22122.0 to \u22120.5", "*")],
        ["none", Measured("n/a")],
    ]
    return Results("All 3.", ("name", "F1"), rows, {"F1": "points"}, {"*": "marks it", "+": "is not used"})


def read_rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


# --- tables ---


def test_csv_has_numbers_and_the_ends_of_intervals(results):
    header, first, second, third = read_rows(build_csv(results))
    assert header == ["name", "F1 (points)", "F1 low (points)", "F1 high (points)", "F1 mark"]
    assert first == ["plain", "80", "78", "82.5", ""]
    assert second[1:] == ["-1", "-2", "-0.5", "marks it"]
    assert third == ["none", "", "", "", ""]


def test_latex_is_escaped_and_has_the_rules_of_booktabs(results):
    text = build_latex(results)
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(rf"\{rule}") == 1
    assert r"\caption{All 3. * marks it.}" in text
    assert r"\shortstack[r]{$-$1.00\textsuperscript{*}\\{\tiny $-$2.0 to $-$0.5}}" in text
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert [len(re.findall(r"(?<!\\)&", line)) for line in body] == [1, 1, 1, 1]
    braces = re.sub(r"\\[\\{}]", "", text)  # without escaped ones and line ends
    assert braces.count("{") == braces.count("}")
    assert escape_latex(HOSTILE) == (
        r"50 \% of \{a\_b\} \& \$c\$ \textbackslash{} \textasciitilde{}\textasciicircum{}\#\textless{}i\textgreater{}"
        r"\textbar{}*"
    )


def test_markdown_has_one_cell_per_column(results):
    lines = build_markdown(results).splitlines()
    assert lines[0] == r"All 3. \* marks it."
    for line in lines[2:]:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
    assert lines[3] == "| --- | ---: |"


def test_a_file_has_the_format_of_its_suffix(results, tmp_path):
    for name, start in (("a.csv", "name,"), ("a.md", "All 3."), ("a.TEX", "%")):
        write_results(results, tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)


def test_a_comparison_marks_only_differences_that_are_significant():
    found = comparison()
    first, second, *others = found.variants
    sure = Measure(2.0, 1.0, 3.0, 3, "seeds")
    unsure = Measure(2.0, -1.0, 3.0, 3, "seeds")
    shown = replace(second, against={**second.against, "score_best": sure, "loss_best": unsure})
    by_example = replace(others[0], against={}, over_examples=replace(sure, spread="examples"))
    changed = replace(found, variants=(first, shown, by_example))
    table = build_comparison_results(changed)
    place = table.header.index("best F1")
    marks = {row[0]: [cell.mark for cell in row if isinstance(cell, Measured)] for row in table.rows}
    assert not any(marks[first.name])
    assert isinstance(table.rows[1][place], Measured) and table.rows[1][place].mark == "*"
    assert marks[second.name].count("*") == 2  # the score, and its difference; the loss is not sure
    assert marks[by_example.name].count("\u2020") == 1  # the difference over the examples
    assert table.rows[0][place - 1] == "baseline"


def test_a_table_of_a_comparison_repeats_no_column():
    found = comparison()
    first, second, *_ = found.variants
    equal: list[Variant] = []
    for variant, name in ((first, "lr=0.1"), (second, "lr=0.2")):
        measures = {**variant.measures, "score_last": variant.measures["score_best"]}
        equal.append(replace(variant, name=name, settings={"optimizer.lr": float(name[3:])}, measures=measures))
    table = build_comparison_results(replace(found, variants=tuple(equal), varied=("optimizer.lr",)))
    assert "last F1" not in table.header and "The last scores are equal to the best ones." in table.caption
    assert "optimizer.lr" in build_csv(table) and "optimizer.lr" not in build_markdown(table) + build_latex(table)
    assert "last F1" in build_comparison_results(found).header


def test_the_scores_of_a_run_stand_beside_those_before(tmp_path):
    header, first, *_ = read_rows(build_csv(build_run_results(fake_run())))
    assert header[:3] == ["score", "before fine-tuning", "before fine-tuning low"]
    assert first[0] == "Exact match" and float(first[header.index("fine-tuned")]) == 92.65
    empty = build_run_results(make_run())
    assert not empty.rows and build_latex(empty)


def test_scores_that_cannot_be_resampled_have_no_interval():
    run = fake_run()
    lines = {}
    evals = []
    for record in (run.evals[0], run.evals[-1]):
        name = f"eval-{record.step}"
        lines[name] = [replace(line, references=line.references or ("",)) for line in run.read_predictions(record)]
        scores = Scorer(["squad_v2"]).score(
            [line.prediction for line in lines[name]],
            [line.references for line in lines[name]],
            details=[collect_details(line) for line in lines[name]],
        )
        evals.append(replace(record, scores=scores.corpus))
    run = replace(run, evals=evals, predictions=lines)
    assert compute_paired_difference([(run, evals[1])], [(run, evals[0])], metric="HasAns_f1") is not None
    assert compute_paired_difference([(run, evals[1])], [(run, evals[0])], metric="best_exact") is None
    assert build_run_results(run).rows


# --- methods ---


def test_methods_tell_every_fact_of_the_records():
    text = describe_methods(fake_run())
    for fact in (
        "t5-nano, with 3,145,984 parameters, was fine-tuned on the task squad_v2",
        "4,000 examples from 4,000 records",
        "Inputs were cut at 192 tokens (56 were longer, and 8 lost the answer)",
        "The optimizer was adafactor with a peak learning rate of 0.003",
        "300 steps of 64 examples, 4.80 epochs",
        "highest F1 on the evaluation data was kept (step 250)",
        "greedy search",
        "evaluate-v2.0.py",
        "2 min 41 s",
        "torch 2.13.0",
        "seed 0",
    ):
        assert fact in text
    assert re.findall(r"\[(.*?) not recorded\]", text) == ["energy"]


def test_methods_name_the_earlier_run_whose_model_was_trained_on(tmp_path):
    earlier = tmp_path / "first"
    (earlier / "model").mkdir(parents=True)
    settings = {"model": {"path": "t5-nano"}, "task": {"name": "denoising"}, "data": {"train": ["x/texts.jsonl"]}}
    (earlier / "config.yaml").write_text(yaml.safe_dump(settings))
    (earlier / "status.json").write_text('{"format_version": 1, "started": "2026-01-01T10:00:00+0000"}')
    later = {"model": {"path": "first/model"}, "task": {"name": "jsonl", "inputs": "translate:\n{de}"}}
    made = "The model of the earlier run first (there, t5-nano was trained on the task denoising with texts.jsonl)"
    for started, words in (("2026-01-02", made), ("2025-12-31", "The local model first/model")):
        text = describe_methods(
            make_run(
                config=later,
                status={"started": f"{started}T10:00:00+0000"},
                machine={"working_directory": str(tmp_path), "device": {"kind": "cpu"}, "num_threads": 2},
            )
        )
        assert text.startswith(f"{words}, with")
        assert r'with inputs made as "translate:\n{de}".' in text and "in 2 CPU threads" in text


def test_unknown_facts_are_named_and_not_guessed():
    text = describe_methods(make_run())
    assert "n/a" not in text and "None" not in text
    missing = set(re.findall(r"\[(.*?) not recorded\]", text))
    assert missing >= {"number of parameters", "data", "optimizer", "schedule", "seed", "device", "time", "versions"}


# --- figures ---


def test_each_chart_of_a_page_has_its_own_name():
    names = [name for name, _ in iter_named_charts(build_comparison_page(comparison()))]
    assert len(set(names)) == len(names) > 10
    assert all(re.fullmatch(r"[a-z0-9-]{3,52}", name) for name in names)


def test_a_chart_becomes_svg_and_pdf_with_its_words(tmp_path):
    bars = build_error_bars([60.0, 70.0, None], [(50.0, 72.0), None, None], "var(--muted)")
    marks = build_marks_trace(
        [60.0, 70.0, None],
        ["a <b>", "costs $5_x$", "none"],
        {"symbol": "diamond-open", "color": ["var(--series-1)", "#ff0000", "var(--ink)"], "size": 9},
        "",
        name="seed",
        error_x=bars,
    )
    axis = {"type": "category", "autorange": "reversed"}
    chart = build_chart("Scores. (x)", [marks], "F1", "", yaxis=axis)
    files = draw_chart(chart)
    assert files["pdf"].startswith(b"%PDF")
    words = " ".join(ElementTree.fromstring(files["svg"]).itertext())
    assert "a <b>" in words and "costs $5_x$" in words and "F1" in words
    assert draw_chart(chart) == files  # no dates, no chance
    header, first, second, third = read_rows(build_chart_csv(chart))
    assert header == ["series", "F1", "name", "x low", "x high"]
    assert first == ["seed", "60.0", "a <b>", "50.0", "72.0"]
    assert second[3:] == ["70.0", "70.0"] and third == ["seed", "", "none", "", ""]


def test_a_log_axis_has_plain_numbers():
    trace = build_marks_trace([1e-4, 1e-2], [1.0, 2.0], {"symbol": "circle"}, "")
    chart = build_chart("Rates.", [trace], "rate", "", xaxis={"type": "log"})
    words = " ".join(ElementTree.fromstring(draw_chart(chart)["svg"]).itertext())
    assert "0.001" in words and "$" not in words


def test_a_matrix_has_a_row_per_cell():
    matrix = ConfusionMatrix(("yes", "no"), Counter({("yes", "yes"): 3, ("no", "yes"): 1, ("no", "no"): 2}))
    page = Page("labels", (build_section("Labels", iter_confusion_parts(matrix)),))
    ((name, chart),) = iter_named_charts(page)
    assert name.startswith("labels-")
    rows = read_rows(build_chart_csv(chart))
    assert rows[0][1:] == ["predicted", "gold", "number", "per cent"]
    assert ["", "yes", "no", "1"] in [row[:4] for row in rows]
    assert b"<svg" in draw_chart(chart)["svg"]


def test_a_page_without_charts_writes_nothing(tmp_path):
    empty = build_chart("Nothing.", [], "x", "y")
    page = Page("bare", (build_section("All", Text("words"), empty),))
    with pytest.raises(ConfigError, match="no chart with data"):
        write_figures(page, tmp_path / "figures", warn=print)
    assert not (tmp_path / "figures").exists()


def test_letters_that_the_font_lacks_are_reported(tmp_path):
    notes: list[str] = []
    chart = build_bars_chart({"\u6f22\u5b57": 1.0}, "Bars.", unit="n", hover="")
    assert write_figures(Page("p", (build_section("S", chart),)), tmp_path, warn=notes.append) == 1
    assert len(notes) == 1 and "\u6f22" in notes[0]
    assert "\u6f22\u5b57" in (tmp_path / "s-bars.svg").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_all_charts_of_a_page_are_drawn(kind, tmp_path):
    page = build_page(fake_run()) if kind == "run" else build_comparison_page(comparison())
    num = write_figures(page, tmp_path, warn=print)
    for suffix in ("svg", "pdf", "csv"):
        assert len(list(tmp_path.glob(f"*.{suffix}"))) == num > 10


# --- logs ---


def test_logs_stand_side_by_side(tmp_path):
    logs = {}
    for name, gpu, heat in (("cool", 90, 60), ("hot", 40, 80)):
        (tmp_path / f"{name}.csv").write_text(LOG.format(gpu=gpu, heat=heat))
        logs[name] = read_log(tmp_path / f"{name}.csv")
    page, results = build_logs_page(logs, {})
    charts = dict(iter_named_charts(page))
    assert set(charts) == {
        "load-gpu-utilisation",
        "load-gpu-time-spent-accessing-memory",
        "load-gpu-temperature",
        "load-cpu-utilisation",
        "load-host-memory-in-use",
        "load-highest-temperature-of-a-gpu-in-each-log",
    }
    rows = read_rows(build_chart_csv(charts["load-gpu-temperature"]))
    assert {row[0] for row in rows[1:]} == {"cool", "hot"}
    assert read_rows(build_chart_csv(charts["load-highest-temperature-of-a-gpu-in-each-log"]))[1:] == [
        ["", "80.0", "hot"],
        ["", "60.0", "cool"],
    ]
    table = read_rows(build_csv(results))
    assert ["hot", "GPU utilisation", "GPU 0", "%", "65", "90", "2"] in table


@pytest.mark.parametrize("num", [1, 2])
def test_a_figure_of_logs_names_its_quantity_and_the_device_of_each_dash(num, tmp_path):
    logs = {}
    for place in range(num):
        path = tmp_path / f"log{place}.csv"
        path.write_text("Timestamp (s),0:GPU (%),1:GPU (%)\n0,50,40\n30,70,60\n60,80,70\n")
        logs[path.stem] = read_log(path)
    ((_, chart),) = iter_named_charts(build_logs_page(logs, {})[0])
    drawing = ElementTree.fromstring(draw_chart(chart)["svg"])
    words = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("GPU 0") == words.count("GPU 1") == words.count("GPU utilisation (%)") == 1
    assert read_rows(build_chart_csv(chart))[0] == ["series", "seconds", "GPU utilisation (%)"]


def test_diagnose_writes_pictures_table_and_page_of_logs(tmp_path, capsys):
    log = tmp_path / "log.csv"
    log.write_text(LOG.format(gpu=90, heat=60))
    names = [tmp_path / f"load.{suffix}" for suffix in ("html", "csv", "tex")]
    words = ["diagnose", str(log), "--figures", str(tmp_path / "figures")]
    for name in names:
        words += ["--output", str(name)]
    assert main(words) == 0
    assert all(name.stat().st_size > 100 for name in names)
    assert (tmp_path / "figures" / "load-gpu-temperature.pdf").is_file()
    assert "each as .svg, .pdf and .csv" in capsys.readouterr().out


# --- what is refused ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output", "{}/t.xlsx"], "none of the suffixes .html, .csv, .md, .tex"),
        (["--output", "{}/t"], "none of the suffixes"),
        (["--output", "{}"], "is a folder"),
        (["--output", "{}/none/t.csv"], "there is no folder"),
        (["--figures", "{}/log.csv"], "is a file"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_work_begins(words, message, tmp_path, capsys):
    (tmp_path / "log.csv").write_text(LOG.format(gpu=90, heat=60))
    given = [word.format(tmp_path) for word in words]
    assert main(["diagnose", str(tmp_path / "log.csv"), *given]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_without_matplotlib_the_error_names_its_installation(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "log.csv").write_text(LOG.format(gpu=90, heat=60))
    assert main(["diagnose", str(tmp_path / "log.csv"), "--figures", str(tmp_path / "f")]) == 4
    assert "matplotlib is not installed. Install it: pip install" in capsys.readouterr().err


def test_score_writes_a_table_and_figures(tmp_path, capsys):
    gold = tmp_path / "gold.jsonl"
    gold.write_text('{"id": "a", "prompt": "1", "response": "x"}\n{"id": "b", "prompt": "2", "response": "y"}\n')
    for name, second in (("new", "y"), ("old", "n")):
        lines = f'{{"id": "a", "prediction": "x"}}\n{{"id": "b", "prediction": "{second}"}}\n'
        (tmp_path / f"{name}.jsonl").write_text(lines)
    table = tmp_path / "t.csv"
    words = ["score", "jsonl", str(gold), str(tmp_path / "new.jsonl"), "--against", str(tmp_path / "old.jsonl")]
    words += ["--output", str(table), "--figures", str(tmp_path / "figures")]
    words += ["--task.inputs", "{prompt}", "--task.targets", "{response}"]
    assert main(words) == 0, capsys.readouterr().err
    header, row = read_rows(table.read_text())
    assert (row[0], row[1], row[header.index("against")]) == ("exact match", "100", "50")
    assert len(list(Path(tmp_path / "figures").glob("*.pdf"))) == 1
