"""The report: its numbers (literal in, literal out), what it refuses to run, odd runs, and a real browser."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, replace
from html import escape
from importlib.resources import files
from pathlib import Path

import kit
import pytest
from browser import browser, open_tab, part, visit
from fake_comparison import comparison, loaded_run, telemetry
from fake_run import (
    HOSTILE,
    NUM_STEPS,
    blind_run,
    change_run,
    fake_run,
    label_run,
    list_tables,
    make_best,
    make_data,
    make_eval,
    make_predictions,
    make_run,
    make_step,
    write_run,
)

from fivetune import plugins
from fivetune.config import load_config
from fivetune.errors import RunDirError
from fivetune.reading.card.card import CardRequest, Place, build_model_card
from fivetune.reading.diagnosis.rules import diagnose_run
from fivetune.reading.report import build_page, write_report
from fivetune.reading.report.comparison import build_comparison_page
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import (
    Chart,
    Example,
    Figure,
    Page,
    Section,
    Table,
    Text,
    collect_quiet_sections,
)
from fivetune.reading.report.page.render import collect_filter_values, render_html
from fivetune.reading.report.page.series import (
    MAX_POINTS,
    compute_quantile,
    select_latest_by_step,
    smooth_series,
    thin_points,
)
from fivetune.reading.report.page.wording import (
    escape_hidden,
    format_bytes,
    format_decimal,
    format_duration,
    format_large_count,
    format_percent,
    format_setting,
    format_signed,
    format_significant,
    shorten_home,
)
from fivetune.reading.report.run import examples
from fivetune.reading.report.run.confidence import build_confidence_section
from fivetune.reading.report.run.learning import _list_points, iter_learning_parts
from fivetune.reading.report.run.load_charts import build_run_load_section
from fivetune.reading.report.run.outcome import describe_blank_golds, describe_verdict
from fivetune.reading.report.run.problems import find_warnings, list_next_commands, list_problems, select_own_warnings
from fivetune.reading.report.run.scores import (
    build_run_summary,
    choose_best_eval,
    find_baseline_eval,
    find_main_score_key,
)
from fivetune.rundir import write_json
from fivetune.rundir.abstention_file import Abstention
from fivetune.rundir.figures import find_exported_eval, find_own_eval
from fivetune.rundir.records import Histogram, Run, RunStatus
from fivetune.scores.analysis.abstention import measure_abstention
from fivetune.scores.analysis.bootstrap import compute_wilson_interval
from fivetune.scores.analysis.calibration import calibrate_prediction
from fivetune.tasks.mixture import Mixture

EMPTY = make_run()


def tell_verdict(run: Run) -> list[str]:
    return describe_verdict(run, [], diagnose_run(run))


# Numbers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (format_decimal(1234.5), "1,234.50"),
        (format_decimal(math.nan), "n/a"),
        (format_decimal("12"), "n/a"),
        (format_significant(0.000123), "1.23e-04"),
        (format_significant(12345), "12,345"),
        (format_significant(0.1678), "0.168"),
        (format_signed(-3.5), "\u22123.50"),
        (format_percent(0.125), "12.5 %"),
        (format_duration(161.4), "2 min 41 s"),
        (format_duration(59.7), "1 min 0 s"),
        (format_duration(7265), "2 h 1 min"),
        (format_bytes(3 * 2**30), "3.0 GiB"),
        (format_large_count(3145728), "3.15 M"),
        (format_large_count(20655), "20.7 k"),
    ],
)
def test_values_are_worded_with_their_units(words: str, expected: str) -> None:
    assert words == expected


def test_smoothing_is_a_weighted_mean_from_the_first_value_on() -> None:
    # span 3: a = 1/2, so s_2 = (1/2 * 4 + 1) / (1/2 + 1) and s_4 = (1/2 * (1/2 * 4 + 1) + 7) / (1/4 + 1/2 + 1)
    assert smooth_series([4.0, 1.0, None, 7.0], span=3) == [4.0, 2.0, None, pytest.approx(8.5 / 1.75)]


def test_quantiles_and_the_interval_of_a_share() -> None:
    assert compute_quantile([3.0, 1.0, 2.0], 0.25) == 1.5
    assert compute_quantile([], 0.5) is None
    # Newcombe 1998, table I, method 3
    assert compute_wilson_interval(81 / 263, 263) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    assert compute_wilson_interval(1.0, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("num", [1, 5, 1999, 2000, 2001, 5000, 100_003])
def test_thinning_keeps_ends_extremes_gaps_and_order(num: int) -> None:
    xs = [float(i) for i in range(num)]
    ys = [
        None if i % 977 == 500 else math.sin(i / 9) + (90 if i == num // 3 else -90 if i == num // 2 else 0)
        for i in range(num)
    ]
    thin_xs, thin_ys = thin_points(xs, ys)
    known = [y for y in ys if y is not None]
    assert len(thin_xs) == len(thin_ys) <= MAX_POINTS
    assert thin_xs == sorted(set(thin_xs)) and (thin_xs[0], thin_xs[-1]) == (xs[0], xs[-1])
    assert all(ys[int(x)] == y for x, y in zip(thin_xs, thin_ys, strict=True))
    assert {min(known), max(known)} <= set(thin_ys)
    assert (None in ys) == (None in thin_ys)


def test_of_a_step_done_again_the_last_record_counts() -> None:
    steps = make_run(steps=[make_step(2, loss=1.0), make_step(1), make_step(2, loss=3.0), {}]).steps
    assert [(one.step, one.loss) for one in select_latest_by_step(steps)] == [(1, 1.0), (2, 3.0)]


def test_headline_scores_stand_beside_baseline_and_other_runs() -> None:
    page = build_page(fake_run(), reference_runs=[blind_run()])
    table = part(page, "Verdict", Table)
    assert table.header == (
        "score",
        "this run, step 250",
        "change",
        "95 % interval",
        "before fine-tuning",
        "context-blind",
    )
    assert table.rows[0] == ("Exact match", "92.65", "+86.55", "90.4 to 94.4", "6.10", "47.50")
    assert table.rows[2] == ("Answerable: exact match", "92.20", "+91.90", "88.7 to 94.7", "0.30", "16.00")
    assert part(page, "Verdict", Figure) == Figure("Exact match", "92.7", "6.1 before")
    assert part(page, "Verdict", Text).body == (
        "Fine-tuning raised F1 from 7.4 to 93.9, measured at step 250 on 640 examples. "
        "Beside it, the run context-blind reaches F1 48.8: 45.1 below. The run finished after 300 steps in 2 min 41 s."
    )


def test_no_line_joins_evaluations_before_and_after_a_resume_that_changed_them() -> None:
    evals = [replace(record, basis="b" if record.step >= 150 else "a") for record in fake_run().evals]
    run = fake_run(evals=evals)
    losses, scores = part(build_page(run), "Learning", Chart), part(build_page(run), "Learning", Chart, 1)
    for trace in (losses.data[-1], scores.data[0]):
        gap = trace["y"].index(None)
        assert trace["x"][gap] == trace["x"][gap + 1] == 150 and trace["y"].count(None) == 1
    assert "At step 150 a resume changed the evaluation: scores before and after it are not" in scores.caption
    assert [note["text"] for note in scores.layout["annotations"]] == ["best", "other evaluation"]
    assert tell_verdict(run)[0].startswith("Fine-tuning reached F1 93.9 at step 250 on 640 examples; the score")


def test_key_figures() -> None:
    figures = {figure.label: (figure.value, figure.remark) for figure in figures_of(build_page(fake_run()))}
    assert figures["Examples seen"] == ("19,200", "4.80 epochs")
    assert figures["Time"] == ("2 min 41 s", "73.2 % of it training")
    assert figures["Peak memory"] == ("705.0 MiB", "highest of all steps")
    assert figures["Model"] == ("3.15 M", "parameters")


def test_mfu_says_what_it_is_a_share_of() -> None:
    run = fake_run()
    steps = [replace(step, mfu=0.29) for step in run.steps]
    peaks = {"peak_flops": 989.4e12, "product_flops": 790e12}
    expected = {
        (
            "peak_flops",
            "product_flops",
        ): "of the dense peak by the data sheet, 989 TFLOP/s; 36.3 % of a product measured here",
        ("peak_flops",): "of the dense peak by the data sheet, 989 TFLOP/s",
        (): "of the dense peak by the data sheet",  # a run of an earlier version
    }
    for known, remark in expected.items():
        machine = replace(run.machine, **{name: peaks[name] for name in known})
        found = {f.label: f for f in figures_of(build_page(replace(run, steps=steps, machine=machine)))}
        assert (found["MFU"].value, found["MFU"].remark) == ("29.0 %", remark)


def figures_of(page: Page) -> list[Figure]:
    found = next(s for s in page.sections if s.title == "Key figures")
    return [p for p in found.parts if isinstance(p, Figure)]


def test_data_table_counts_what_was_lost() -> None:
    rows = part(build_page(fake_run()), "Data", Table).rows
    assert [*rows[2]] == ["records left out", "3", "0.07 %", "1", "0.16 %"]
    assert [*rows[4]] == ["examples made of them", "4,000", "", "640", ""]
    assert [*rows[6]] == ["answers lost to truncation", "8", "0.20 %", "1", "0.16 %"]


def test_records_examples_windows_and_files_are_told_apart() -> None:
    facts = {"num_read": 30, "num_records_kept": 3, "num_skipped": 27, "num_skipped_bad": 2, "num_examples": 35,
             "num_examples_clipped": 0, "num_cut_into_windows": 2, "num_windows": 34, "source": ["a.json", "a.json"],
             "input_lengths": {"edges": [0, 9], "counts": [35]}}  # fmt: skip
    page = build_page(make_run(data={"train": facts}))
    counts, cost = part(page, "Data", Text).body, part(page, "Data", Text, 1).body
    assert (
        counts == "train: 30 records read = 3 kept + 27 left out (25 by the task, 2 that cannot be used); 35 examples."
    )
    assert cost == "train: 2 questions too long for one input became 34 windows. Sources: train: a.json."
    assert "of the windows" in part(page, "Data", Chart).caption
    assert [*find_warnings(make_run(data={"train": facts}))] == [
        "train: 2 of 30 records could not be used and were left out."
    ]


def mixture_run() -> Run:
    """Two parts at step 5: labels that are chosen, all right, and texts that are written, half of them right."""
    task = {"name": "mixture", "parts": {"q": {"task": "stackoverflow_quality"}, "t": {"task": "stackoverflow_tags"}}}
    lines = [
        {
            "id": str(i),
            "references": ["a", "a"],
            "prediction": "a",
            "confidence": 0.9,
            "scores": {"mean": float(i < 4)},
            "teacher_forced_exact": i > 1,
            "free_running_exact": i < 4,
            "meta": {"source_task": "q" if i < 2 else "t"},
            **({"left_label_set": False} if i < 2 else {}),
        }
        for i in range(6)
    ]
    mains = {
        f"{name}_{part.task.main_metric}": 70.0
        for name, part in Mixture.model_validate({"parts": task["parts"]}).parts.items()
    }
    scores = {"mean": 70.0, "q_other": 1.0, **mains, "q_total": 2, "t_total": 4, "total": 6}
    record = make_eval(5, scores, rates={"teacher_forced_exact": 0.6})
    return fake_run(evals=[record], status=make_best(5, "mean"), predictions={"eval-5": lines}, config={"task": task})


def test_a_mixture_shows_its_mains_no_counts_and_one_calibration_of_all_parts() -> None:
    run = mixture_run()
    page = build_page(run)
    scores = set(run.evals[0].scores)
    tiles = {p.label for p in page.sections[0].parts if isinstance(p, Figure)}
    assert tiles == {name.replace("_", " ") for name in scores if not name.endswith(("total", "other"))}
    assert {row[0] for row in part(page, "Verdict", Table).rows} == tiles | {"q other"}
    confidence = next(s for s in page.sections if s.title == "Confidence")
    assert any("Measured on 6 predictions" in p.body for p in confidence.parts if isinstance(p, Text))
    rates = {row[0]: row[1] for row in part(page, "Evidence", Table).rows}
    assert rates == {"target exact, teacher-forced": "100.0 %", "target exact, free-running": "50.0 %"}
    assert part(page, "Examples", Example).references == ("a (2 times)",)


def test_what_taught_nothing_is_told_with_what_was_read() -> None:
    data = {"train": make_data(4000, 3), "eval": make_data(640, 1)}
    page = build_page(fake_run(data={**data, "train": {**data["train"], "num_not_learnt": 3}}))
    words = part(page, "Data", Text, 1).body
    assert "train: 3 examples without the answer in the input have no training target." in words


def test_histogram_shares_leave_out_the_empty_end() -> None:
    assert charts.compute_histogram_shares(Histogram((0.0, 8.0, 16.0, 24.0), (1, 3, 0))) == (
        [0.0, 8.0, 16.0],
        [25.0, 75.0],
    )
    assert charts.compute_histogram_shares(Histogram((0.0, 8.0), ())) == ([], [])
    assert charts.compute_histogram_shares(None) == ([], [])


def test_summary_is_the_headline_for_scripts() -> None:
    told = build_run_summary(fake_run(), reference_runs=[blind_run()])
    assert (told["name"], told["state"], told["best_step"], told["metric"]) == ("quickstart", "finished", 250, "f1")
    exact = [told["scores"]["exact"], told["baseline"]["exact"], told["beside"]["context-blind"]["exact"]]
    assert exact == pytest.approx([92.65, 6.1, 47.5])


def test_without_a_named_best_the_highest_main_score_is_taken() -> None:
    run = fake_run(status={})
    assert find_main_score_key(run) == "f1"
    assert choose_best_eval(run).step == 250 and find_baseline_eval(run).step == 0  # type: ignore[union-attr]


# Warnings


def test_cap_hits_are_warned_of() -> None:
    evals = [make_eval(12, {"f1": 1.0}, rates={"cap_hit": 0.02})]
    (told,) = find_warnings(make_run(evals=evals))
    assert told.startswith("2.0 % of the predictions were cut off at 18 tokens.")


def test_sizes_of_evaluations_of_other_data_are_not_compared() -> None:
    evals = [
        make_eval(at, {"f1": 1.0}, num_examples=20 if at == 1 else 30, basis="b" if at > 1 else "a") for at in (1, 2, 3)
    ]
    assert [*find_warnings(make_run(evals=evals))] == []


def test_what_diagnosis_finds_is_on_the_page_once() -> None:
    steps = [
        replace(step, loss=None if step.step == 3 else 2.5 if step.step <= 14 else step.loss, starved=True)
        for step in fake_run().steps
    ]
    text = render_html(build_page(fake_run(steps=steps, status={"state": "finished", "num_starved_steps": 300})))
    assert text.count("was not finite at step 3") == 1
    assert text.count("The training loss is exactly the same in 11 steps from step 4 on.") == 1
    assert (
        "waited for their batch" not in text
    )  # a batch that is late by microseconds costs nothing: input_bound judges


@pytest.mark.parametrize(
    ("rates", "scores", "told"),
    [
        ({"sentinel": 0.001}, {}, "0.1 % of the predictions hold sentinel tokens"),
        ({"unknown_characters": 0.01}, {}, "1.0 % of the predictions hold unknown tokens"),
        ({"not_in_context": 0.06}, {}, "6.0 % of the answers given do not stand in the context"),
        ({"left_label_set": 0.02}, {}, "2.0 % of the predictions would be none of the labels"),
        ({"empty": 0.02}, {}, "2.0 % of the predictions are empty"),
        ({"empty": 0.7}, {"total": 10, "NoAns_total": 5}, "70.0 % of the questions were left unanswered, but only 50"),
        ({"teacher_forced_exact": 0.5, "free_running_exact": 0.4}, {}, "Given the target so far, the model would"),
    ],
)
def test_rates_of_a_broken_run_are_warned_of(rates: dict, scores: dict, told: str) -> None:
    record = make_eval(5, {"f1": 50.0, **scores}, rates=rates)
    (sentence,) = find_warnings(make_run(evals=[record]))
    assert sentence.startswith(told)
    harmless = record | {"rates": dict.fromkeys(rates, 0.0)}
    assert [*find_warnings(make_run(evals=[harmless]))] == []


def test_empty_is_no_fault_where_a_gold_answer_is_empty() -> None:
    """Records without labels: "55 % of the predictions are empty"."""
    lines = [{"id": "1", "prediction": "", "references": [""]}, {"id": "2", "prediction": "a", "references": ["a"]}]
    record = make_eval(5, {"micro_f1": 50.0}, rates={"empty": 0.5})
    assert [*find_warnings(make_run(evals=[record], predictions={"eval-5": make_predictions(*lines)}))] == []


def test_numbers_that_only_the_lenient_rules_read_are_warned_of() -> None:
    record = make_eval(5, {"accuracy": 0.0, "accuracy_lenient": 56.25})
    (sentence,) = find_warnings(make_run(evals=[record]))
    assert sentence.startswith("accuracy 0.00 beside accuracy_lenient 56.25: the official rules read")
    assert [*find_warnings(make_run(evals=[make_eval(5, {"accuracy": 53.0, "accuracy_lenient": 56.25})]))] == []


def test_scores_of_mlqa_are_named_and_defined() -> None:
    """They were "mlqa f1" beside "F1", and the definitions left them out."""
    scores = {"exact": 40.0, "f1": 50.0, "mlqa_exact": 41.0, "mlqa_f1": 52.0, "total": 8}
    text = render_html(build_page(make_run(evals=[make_eval(5, scores)])))
    assert "F1 (MLQA rules)" in text and "Exact match (MLQA rules)" in text and "mlqa f1" not in text
    assert "which drops the articles of the question&#39;s language" in text


def test_the_evaluation_s_own_interval_is_shown() -> None:
    run = fake_run()
    evals = [replace(record, intervals={"exact": (91.0, 94.5)}) for record in run.evals]
    rows = part(build_page(change_run(run, evals=evals)), "Verdict", Table).rows
    assert (rows[0][3], rows[1][3]) == ("91.0 to 94.5", "91.8 to 95.5")


@pytest.mark.parametrize("applied", [1.0, 2.0])
def test_the_error_of_confidences_is_told_without_and_with_their_temperature(applied) -> None:
    """9 of 10 by the model's words, 3 of 4 in truth: temperature 2."""
    lines = make_predictions(
        *(
            {"id": f"q{i}", "confidence": 0.9 if i % 2 else 0.1, "scores": {"f1": float(i % 8 in (1, 3, 5, 6))}}
            for i in range(400)
        )
    )
    for given in (None, 2.0):
        read = lines if given is None else [calibrate_prediction(line, given) for line in lines]
        record = replace(fake_run().evals[-1], temperature=given)
        parts = build_confidence_section(read, "f1", record=record, applied=applied).parts
        error = next(p for p in parts if isinstance(p, Figure) and p.label == "Calibration error")
        words = next(p.body for p in parts if isinstance(p, Text))
        assert ("15.0 % without temperature" in error.remark) == (applied == 2)
        assert (error.value == "15.0 %") == (applied == 1)
        assert "temperature 2.00, which model/ holds" in words or "Temperature 2.00 would help" in words


def test_the_confidence_of_each_promise_is_shown() -> None:
    """Of the 400 surest of 600 answers one is wrong."""
    lines = [
        {"id": f"q{i}", "confidence": 0.9 if i < 400 else 0.4, "scores": {"f1": 0.5, "exact": float(0 < i < 450)}}
        for i in range(600)
    ]
    record = fake_run().evals[-1]

    def find(kept: Abstention | None = None) -> tuple[str, Table]:
        parts = build_confidence_section(
            make_predictions(*lines), "f1", record=record, kept=kept, folder="runs/a"
        ).parts
        place = parts.index(Text("When to stay silent", "heading"))
        text = parts[place + 1]
        table = parts[place + 3]
        assert isinstance(text, Text) and isinstance(table, Table)
        return text.body, table

    words, table = find()
    assert "600 predictions" in words and "Nothing is withheld" in words
    assert "fivetune evaluate runs/a --max-error 5% keeps" in words
    assert [row[0] for row in table.rows] == ["1%", "2%", "5%", "10%"]
    assert table.rows[0] == ("1%", "none", "", "", "", "", "718") and table.rows[2][2:5] == ("66.7 %", "400", "0.2 %")
    kept = measure_abstention(make_predictions(*lines), "exact", split="eval", step=3)
    assert kept
    words, table = find(replace(kept, max_error=0.05))
    assert "at most 5% of the others are wrong" in words and table.rows[2][0] == "5% (kept)"
    lines = [{**line, "scores": {"f1": 0.5, "exact": float(line["id"][-1] < "5")}} for line in lines]
    assert find()[0].endswith("Nothing is withheld.")  # half of the answers are wrong: no promise can be kept


def test_a_graded_score_has_no_promise_without_its_limit() -> None:
    lines = [{"id": str(i), "confidence": 0.9, "scores": {"f1": 0.5}} for i in range(30)]
    parts = build_confidence_section(make_predictions(*lines), "f1", record=fake_run().evals[-1], folder="runs/a").parts
    assert any("runs/a --max-error 5% --error-below 50" in part.body for part in parts if isinstance(part, Text))


def test_confidence_slices_and_labels_have_their_sections() -> None:
    page = build_page(fake_run())
    assert part(page, "Confidence", Table, 2).rows[0][0] == "Exact match"
    assert "answerable" in {row[1] for row in part(page, "Slices", Table).rows}
    labels = part(build_page(label_run()), "Labels", Table)
    assert [row[1] for row in labels.rows] == ["180", "60", "60"]
    old = [{"id": "a", "inputs": "q", "prediction": "x", "references": ["x"], "scores": {"exact": 1.0, "f1": 1.0}}]
    quiet = part(build_page(fake_run(predictions={"eval-250": old})), "Nothing to report", Table)
    assert quiet.folded and quiet.caption.endswith("Confidence, Slices")
    told = quiet.rows[0][1]
    assert told.startswith("The prediction lines hold no confidences")


def test_predictions_can_be_chosen_by_what_they_differ_in() -> None:
    shown = [p for s in build_page(fake_run()).sections for p in s.parts if isinstance(p, Example)]
    found = collect_filter_values(shown)
    assert set(found) == {"verdict", "chosen", "truncation", "answerable", "source task"}
    assert found["chosen"] == ["random", "lowest scores"] and len(shown) <= 300


def test_what_the_data_lost_is_warned_of_once() -> None:
    data = {"train": {"num_read": 9, "num_kept": 8, "num_skipped_bad": 1, "num_answers_lost": 2}}
    assert [*find_warnings(make_run(data=data))] == [
        "train: 1 of 9 records could not be used and were left out.",
    ]
    counted = "truncation: train: 2 gold answers lost"
    status = {"warnings": [{"message": counted, "kind": "truncation"}, {"message": "b"}]}
    run = make_run(data=data, status=status)
    assert select_own_warnings(run, {"lost_answers"}) == ["b"]
    assert select_own_warnings(run) == [counted, "b"]


def test_unknown_tokens_are_warned_of() -> None:
    data = {"train": {"num_input_tokens": 1000, "num_unknown_tokens": 12}}
    assert [*find_warnings(make_run(data=data))] == ["train: 1.20 % of the input tokens are unknown to the tokenizer."]


def test_shares_and_epochs_count_the_examples_not_the_records() -> None:
    """Training on all answers makes several examples of a record."""
    data = {"train": {"num_read": 8, "num_kept": 8, "num_examples": 16, "num_answers_lost": 2}}
    run = make_run(data=data)
    assert "2 of 16 in train (12.5 %)" in list_problems(run, diagnose_run(run))[0].message
    page = build_page(fake_run(data={"train": {"num_kept": 100, "num_examples": 6400}}))
    figures = [p for s in page.sections for p in s.parts if isinstance(p, Figure)]
    assert next(f for f in figures if f.label == "Examples seen").remark == "3.00 epochs"


def test_the_made_up_run_has_the_counts_of_a_real_one(tmp_path: Path, model_folder: Path) -> None:
    real = kit.ready(tmp_path, model_folder).data.stream.store.summary
    for facts in (make_data(4000, 3), make_data(640, 1)):
        assert set(facts) <= set(real)


def test_scores_of_every_metric_are_points() -> None:
    evals = [make_eval(i, {"exact_match": v}, num_examples=10) for i, v in ((0, 3), (5, 69.6))]
    page = build_page(fake_run(evals=evals, status=make_best(5, "exact_match"), predictions={}))
    assert tell_verdict(make_run(evals=evals))[0].startswith("Fine-tuning raised exact match from 3.0 to 69.6")
    row = part(page, "Verdict", Table).rows[0]
    assert row == ("exact match", "69.60", "+66.60", "39.3 to 89.0", "3.00")


def test_the_best_evaluation_is_the_run_s_own_and_the_whole_set() -> None:
    evals = [
        make_eval(5, {"f1": 1.0}, split="subset"), make_eval(5, {"f1": 2.0}),
        make_eval(5, {"f1": 3.0}, split="subset"), make_eval(5, {"f1": 4.0}, split="other"),
        make_eval(9, {"f1": 5.0}, split="subset"),
    ]  # fmt: skip
    run = make_run(evals=evals, status=make_best(5))
    best = choose_best_eval(run)
    assert best is find_exported_eval(run) is find_own_eval(run.evals, 5) is run.evals[1]
    assert find_own_eval(run.evals, 9) is run.evals[4]
    assert find_exported_eval(make_run(evals=evals)) is find_own_eval(run.evals, 7) is None
    config = load_config({"model": {"path": "m"}, "task": "squad_v2"})
    request = CardRequest(Path("run"), Place("run"), "t5")
    assert "| f1 | 2.00 |" in build_model_card(config, run, best, run.status.best, request)


def test_a_run_that_got_worse_says_so() -> None:
    evals = [make_eval(i, {"f1": f1}, num_examples=400) for i, f1 in ((0, 50.0), (5, 40.0))]
    run = make_run(evals=evals)
    first = tell_verdict(run)[0]
    assert first == "Fine-tuning lowered F1 from 50.0 to 40.0, measured at step 5 on 400 examples."
    untrained = change_run(run, evals=evals[:1])
    assert tell_verdict(untrained)[0] == "Only the model before fine-tuning was evaluated: F1 50.0."
    best_is_first = change_run(run, status=make_best(0))
    assert tell_verdict(best_is_first)[0] == (
        "Nothing was learnt: no evaluation is better than the one before fine-tuning (F1 50.0)."
    )


@pytest.mark.parametrize(
    ("num_fixed", "num_broken", "said"),
    [
        (
            9,
            0,
            r"^Fine-tuning raised exact match from 50\.0 to 65\.0, .* same examples is \+\d.* p (< )?0\.0",
        ),
        (
            9,
            7,
            r"^Exact match is 53\.3 after fine-tuning and 50\.0 before.* not distinguishable, because the 95 % inter",
        ),
        (0, 9, r"^Fine-tuning lowered exact match from 50\.0 to 35\.0, .* is \u2212\d"),
    ],
)
def test_before_and_after_are_compared_on_the_same_examples(num_fixed: int, num_broken: int, said: str) -> None:
    """Of 60 examples, 30 are right before: the intervals of the two scores overlap in each case."""
    right = [*range(30)], [*range(num_broken, 30 + num_fixed)]
    lines = {
        f"eval-{step}": [{"id": str(i), "scores": {"exact_match": float(i in chosen)}} for i in range(60)]
        for step, chosen in zip((0, 5), right, strict=True)
    }
    evals = [
        make_eval(step, {"exact_match": 100 * len(chosen) / 60}, num_examples=60)
        for step, chosen in zip((0, 5), right, strict=True)
    ]
    run = make_run(evals=evals, status=make_best(5, "exact_match"), predictions=lines)
    assert re.search(said, tell_verdict(run)[0])


@pytest.mark.parametrize(
    ("scores", "rates", "sentence"),
    [
        ({"f1": (0.0, 0.0)}, {}, "F1 is 0.0, measured at step 5 on 4 examples. The evaluation loss fell from 9.000 to"),
        ({"f1": (12.5, 12.5)}, {}, "F1 is 12.5, as before fine-tuning"),
        ({"accuracy": (15.8, 55.2)}, {"majority_label": 0.552}, "giving the most frequent label reaches 55.2."),
    ],
)
def test_the_first_sentence_reports_that_nothing_was_learnt(scores: dict, rates: dict, sentence: str) -> None:
    evals = [
        make_eval(step, {name: pair[step > 0] for name, pair in scores.items()},
                  num_examples=4, loss=9.0 - step, rates=rates)
        for step in (0, 5)
    ]  # fmt: skip
    words = " ".join(tell_verdict(make_run(evals=evals, status=make_best(5, next(iter(scores))))))
    assert words.startswith("Nothing was learnt: ") and sentence in words


def test_what_was_cut_is_the_likely_cause_of_nothing_learnt() -> None:
    """95.8 % of the inputs were cut, and the verdict said only that nothing was learnt."""
    evals = [make_eval(step, {"accuracy": 20.0}, num_examples=40, rates={"majority_label": 0.3}) for step in (0, 5)]
    facts = {"num_examples": 10, "num_examples_clipped": 9, "whole_input_p99": 48, "max_input_tokens": 32}
    run = make_run(evals=evals, status=make_best(5, "accuracy"), data={"train": facts})
    said = " ".join(tell_verdict(run))
    assert said.startswith("Nothing was learnt: ") and "The likely cause: inputs are cut." in said
    (problem,) = list_problems(run, diagnose_run(run))
    assert problem.flags == "--data.max_input_tokens 48" and "keeps 99 % whole" in problem.advice


def test_a_cut_of_few_inputs_is_no_cause_of_nothing_learnt() -> None:
    facts = {"num_examples": 100, "num_examples_clipped": 8, "whole_input_p99": 48, "max_input_tokens": 32}
    evals = [make_eval(step, {"f1": 0.0}, num_examples=40) for step in (0, 5)]
    run = make_run(evals=evals, status=make_best(5), data={"train": facts})
    assert "truncated_inputs" in [verdict.rule for verdict in diagnose_run(run)]
    assert "The likely cause" not in " ".join(tell_verdict(run))


def test_a_diverged_run_says_so_before_its_scores() -> None:
    losses = [11.3, *(400.0 + 10 * (i % 7) for i in range(29))]
    steps = [make_step(i, loss=loss) for i, loss in enumerate(losses, start=1)]
    evals = [make_eval(step, {"f1": f1}, num_examples=104) for step, f1 in ((0, 0.0), (20, 1.92))]
    run = make_run(evals=evals, steps=steps, status=make_best(20))
    sentences = tell_verdict(run)
    assert sentences[0] == "The training diverged."
    (problem,) = list_problems(run, diagnose_run(run))
    assert problem.message == "The training diverged after step 1: the loss rose from 11.3 to 435 at the end."
    assert problem.kind == "bad" and "bad" in {badge.kind for badge in build_page(run).badges}
    assert sentences[1] == (
        "F1 is 1.9 after fine-tuning and 0.0 before, measured at step 20 on 104 examples: not distinguishable, because "
        "the 95 % intervals overlap."
    )


def test_a_run_that_failed_otherwise_also_tells_its_losses_that_are_not_finite() -> None:
    steps = [make_step(i, loss=None if i == 3 else 2.0) for i in range(1, 6)]
    status = RunStatus("failed", "the disk is full", step=5)
    run = make_run(steps=steps, status=status)
    assert len(list_problems(run, diagnose_run(run))) == 2
    run = make_run(steps=steps, status=replace(status, why="step 3: loss nan", nonfinite_step=3))
    assert [one.message for one in list_problems(run, diagnose_run(run))] == ["step 3: loss nan"]


def test_a_run_that_only_abstains_says_so_first() -> None:
    def make_scores(has: float, no: float) -> dict[str, float]:
        f1 = (54 * has + 50 * no) / 104
        return {"f1": f1, "HasAns_f1": has, "NoAns_f1": no, "NoAns_total": 50, "HasAns_total": 54, "total": 104}

    def describe(has: float, no: float) -> str:
        scores = {0: make_scores(0.0, 0.0), 60: make_scores(has, no)}
        evals = [make_eval(step, pair, num_examples=104) for step, pair in scores.items()]
        return tell_verdict(make_run(evals=evals, status=make_best(60)))[0]

    assert describe(0.0, 96.0) == (
        "Nothing was learnt but to abstain: F1 is 46.2, measured at step 60 on 104 examples, with 0.0 on answerable "
        "questions; never answering reaches 48.1."
    )
    assert describe(0.0, 4.0).startswith("Nothing was learnt: F1 is 1.9, measured at step 60")
    assert describe(30.0, 60.0).startswith("Fine-tuning raised F1 from 0.0 to 44.4")


def test_the_majority_label_stands_beside_the_scores_before() -> None:
    evals = [make_eval(5, {"accuracy": 70.0}, rates={"majority_label": 0.552})]
    table = part(build_page(make_run(evals=evals)), "Verdict", Table)
    assert table.header[5] == "most frequent label" and table.rows[0][5] == "55.20"


# Examples


def test_examples_do_not_depend_on_the_order_of_the_file() -> None:
    lines = fake_run().predictions["eval-250"]
    assert examples.select_worst(lines) == examples.select_worst(lines[::-1])
    assert examples.sample(lines, []) == examples.sample(lines[::-1], [])
    shown = {line.id for line in examples.select_worst(lines)}
    assert not shown & {line.id for line in examples.sample(lines, examples.select_worst(lines))}


def test_outcomes_are_told_apart() -> None:
    def line(prediction: str, references: list[str], exact: float, f1: float) -> dict:
        return {"prediction": prediction, "references": references, "scores": {"exact": exact, "f1": f1}}

    lines = [
        line("a", ["a"], 1, 1),
        line("", [], 1, 1),
        line("x", [], 0, 0),
        line("", ["a"], 0, 0),
        line("a b", ["a"], 0, 0.67),
        line("b", ["a"], 0, 0),
        {"prediction": "unscored"},
    ]
    lines = make_predictions(*({"id": "1", **one} for one in lines))
    assert [examples.classify_outcome(one) for one in lines] == [
        "right",
        "right",
        "invented",
        "abstained",
        "near",
        "wrong answer",
        None,
    ]
    table = examples.build_outcomes_table(lines)
    assert table and [row[1] for row in table.rows] == ["2", "1", "1", "1", "1"]


def test_all_gold_answers_are_shown() -> None:
    line = {"id": "7", "inputs": "q", "prediction": "a b", "references": ["a", "b c"], "meta": {"question": "q"}}
    line["scores"] = {"exact": 0, "f1": 0.5}
    tags = {"chosen": "random", "answerable": "answerable"}
    wanted = Example("7", "q", "a b", ("a", "b c"), "near", "exact 0.00, f1 0.50", tags)
    assert examples.build_example(make_predictions(line)[0], "random") == wanted


# Escaping


HOSTILE_TEXTS = (HOSTILE, "</script><!--", '" onmouseover="x', "{{ 7 * 7 }}", "\u202eevil", "a\x00b\ud800", "<b>x</b>")


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_text_from_data_stays_text_wherever_it_lands(text: str) -> None:
    parts = (
        Text(text),
        Text(text, "code"),
        Text(text, "lead"),
        Text(text, "heading"),
        Figure(text, text, text),
        Table(text, (text,), ((text,),)),
        Table(text, (text,), ((text,),), folded=True),
        Chart(text, ({"name": text},), {"height": 280}),
        Example(text, text, text, (text,), "wrong", text),
    )
    html = render_html(Page(text, (Section(text, parts),), text, (Text(text),)))
    body = html[: html.rindex("<footer>")]
    assert text not in body or str(escape(escape_hidden(text))) == text
    assert "owned" not in body or "&lt;script&gt;" in body
    assert "<script" not in body
    html.encode()


def test_figures_survive_the_way_through_the_page() -> None:
    figure = Chart("c", ({"name": "a</script><!--&\u2028é"},), {"height": 280})
    html = render_html(Page("t", (Section("s", (figure,)),)))
    (packed,) = re.findall(r'id="figures">([^<]+)<', html)
    (found,) = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert found["data"][0]["name"] == "a</script><!--&\u2028é"
    assert len(html) < 70_000


def test_hidden_characters_secrets_and_the_home_folder() -> None:
    assert escape_hidden("a\u202eb\x1b[31m\u200b\ttab\n") == "a[U+202E]b[U+001B][31m[U+200B]\ttab\n"
    assert escape_hidden(f"https://me:pw@host/x hf_{'ab1' * 11}") == "https://(hidden)@host/x (hidden)"
    assert shorten_home(f"{Path.home()}/runs") == "~/runs"
    assert (format_setting("hub.token", "abc"), format_setting("data.max_input_tokens", 5)) == ("(hidden)", "5")


def test_names_of_other_runs_are_text_in_charts_too() -> None:
    html = render_html(build_page(fake_run(), reference_runs=[replace(blind_run(), name=HOSTILE)]))
    assert HOSTILE not in html


# Odd runs


def odd_runs() -> dict[str, Run]:
    whole = fake_run()
    broken = [record | {"loss": None, "grad_norm": math.nan} for record in list_tables(whole.steps)]
    nulls = [dict.fromkeys(record) | {"step": record["step"]} for record in list_tables(whole.steps)]
    return {
        "nothing": EMPTY,
        "no files but null": make_run("null", config=None, machine=None, status=None, data=None),
        "killed": change_run(
            whole,
            status={"state": "running", "step": 120},
            steps=whole.steps[:120],
            evals=[],
        ),
        "one step": change_run(whole, steps=whole.steps[:1], evals=whole.evals[:1]),
        "null losses": change_run(
            whole, steps=broken, evals=[record | {"loss": math.nan} for record in list_tables(whole.evals)]
        ),
        "null everywhere": change_run(
            whole, steps=nulls, evals=[{"step": 0}, {"step": 5, "scores": None}], predictions={}
        ),
        "null counts": change_run(whole, data={"train": dict.fromkeys(make_data(4000, 3)), "eval": None}),
        "null predictions": change_run(
            whole, predictions={"eval-250": [dict.fromkeys(("id", "inputs", "prediction"))]}
        ),
        "another metric": change_run(whole, evals=[make_eval(3, {"rouge_l": 0.25, "bleu": math.nan})]),
        "failed": change_run(whole, status={"state": "failed", "why": "loss is not finite at step 4."}),
    }


@pytest.mark.parametrize("name", odd_runs())
def test_odd_runs_are_reported_all_the_same(name: str) -> None:
    html = render_html(build_page(odd_runs()[name], reference_runs=[EMPTY]))
    assert "NaN" not in html[: html.rindex("<footer>")] and "None" not in re.sub(
        r"None comes near", "", html[: html.rindex("<footer>")]
    )


def test_a_long_run_keeps_the_page_small() -> None:
    run = fake_run()
    steps = [replace(run.steps[i % NUM_STEPS], step=i) for i in range(20_000)]
    page = build_page(change_run(run, steps=steps))
    lengths = [len(trace["x"]) for s in page.sections for p in s.parts if isinstance(p, Chart) for trace in p.data]
    assert max(lengths) <= MAX_POINTS


# Files and command


def test_the_report_is_written_from_the_run_directory_with_its_neighbours(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", fake_run())
    write_run(tmp_path / "context-blind", blind_run())
    path = write_report(folder)
    assert path == folder / "report.html"
    assert "context-blind reaches F1 48.8" in path.read_text(encoding="utf-8")
    assert [p.name for p in folder.iterdir() if p.name.endswith(".tmp")] == []


def test_a_neighbour_is_found_from_another_working_directory(tmp_path: Path, monkeypatch) -> None:
    """report.beside is relative to where the run was started, and the two runs have no folder in common."""
    folder = write_run(tmp_path / "home" / "mine" / "quickstart", fake_run())
    write_run(tmp_path / "home" / "runs" / "context-blind", blind_run())
    machine = json.loads((folder / "machine.json").read_text())
    write_json(folder / "machine.json", machine | {"working_directory": str(tmp_path / "home")})
    monkeypatch.chdir(tmp_path)
    page = write_report(folder).read_text(encoding="utf-8")
    assert "context-blind reaches F1 48.8" in page and "is left out" not in page


def test_a_missing_neighbour_is_a_note(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / "alone", fake_run()))
    assert "report.beside: runs/context-blind is left out." in path.read_text(encoding="utf-8")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="not a run directory"):
        write_report(tmp_path)


def test_the_command_prints_the_headline_and_needs_no_torch(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "quickstart", fake_run())
    code = (
        "import sys, argparse\n"
        "from fivetune import plugins\n"
        "command = plugins.import_plugin('commands', 'report')\n"
        "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
        "code = command.run(parser.parse_args(sys.argv[1:]))\n"
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    command = [sys.executable, "-c", code, str(folder), "--json", "--output", str(tmp_path / "x.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["report"], told["scores"]["f1"]) == (str(tmp_path / "x.html"), pytest.approx(93.95))
    assert plugins.import_plugin("commands", "report").__doc__


# A real browser


@pytest.mark.slow
@browser
def test_a_browser_draws_every_chart_in_silence_and_asks_nobody(tmp_path: Path) -> None:
    run = fake_run()
    hostile = [
        asdict(line) | {"scores": {"exact": 0.0, "f1": 0.0}}
        for line in run.predictions["eval-250"]
        if line.id == "q0003"
    ]
    page = build_page(
        change_run(run, predictions={"eval-250": hostile}), reference_runs=[replace(blind_run(), name=HOSTILE)]
    )
    drawn = [part for section in page.sections for part in section.parts if isinstance(part, Chart)]
    (tmp_path / "page.html").write_text(render_html(page))
    with open_tab(tmp_path) as tab:
        tab.set_width(390)
        tab.open((tmp_path / "page.html").as_uri())
        assert tab.run("document.documentElement.scrollWidth") <= 390
        tab.set_width(1280)
        tab.wait("document.querySelector('.plot svg')")
        assert tab.run("document.querySelectorAll('.plot > svg').length") < len(drawn)  # those near the screen
        # Before printing all are drawn, in the colours of paper.
        tab.run("dispatchEvent(new Event('beforeprint'))")
        assert tab.run("document.querySelectorAll('.plot > svg').length") == len(drawn) == 14
        tab.run("dispatchEvent(new Event('afterprint'))")
        assert HOSTILE in tab.run("document.querySelector('.plot').textContent")
        assert f"{HOSTILE} [U+202E]on the wall" in tab.read()
        assert tab.run("document.title") == "quickstart - FiveTune"
        assert "1 of 1 shown" in tab.read()
        assert (tab.errors, [one for one in tab.requests if not one.startswith("file:")]) == ([], [])


@browser
@pytest.mark.slow
def test_the_policy_stops_what_got_past_the_escaping(tmp_path: Path) -> None:
    attack = '<img src="http://attacker.invalid/leak.png"><script>document.title = "owned"</script></body>'
    page = render_html(Page("harmless", (Section("s", (Text("t"),)),))).replace("</body>", attack)
    guarded, bare = (tmp_path / name for name in ("guarded", "bare"))
    guarded.mkdir()
    bare.mkdir()
    seen = visit(page, guarded)
    assert "<title>harmless - FiveTune</title>" in seen.dom
    assert seen.requests == [] and len(seen.console) == 2
    unguarded = visit(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page), bare)
    assert "<title>owned</title>" in unguarded.dom
    assert unguarded.requests == ["http://attacker.invalid/leak.png"]


def test_published_scores_stand_beside_the_run():
    run = fake_run()
    report = {"expected": {"f1": 92.08}, "expected_model": "google-t5/t5-nano", "expected_examples": 640}
    page = build_page(change_run(run, config={**run.config, "report": report}))
    table = next(part for part in page.sections[0].parts if isinstance(part, Table))
    place = table.header.index("published")
    assert {row[place] for row in table.rows if row[0] == "F1"} == {"92.08"}
    assert {row[place] for row in table.rows if row[0] != "F1"} == {"n/a"}
    assert "published" in [trace["name"] for trace in part(page, "Verdict", Chart).data]


def test_published_scores_of_another_model_or_other_examples_are_doubted() -> None:
    run = fake_run()
    report = {"expected": {"f1": 77.6}, "expected_model": "mbert", "expected_examples": 1190}
    page = build_page(change_run(run, config={**run.config, "report": report}))
    assert "published, not comparable" in part(page, "Verdict", Table).header
    assert "published" not in [trace["name"] for trace in part(page, "Verdict", Chart).data]
    assert part(page, "Verdict", Text, 1).body == (
        "The published scores are not comparable with this run's: they are of mbert, this run trains t5-nano; they "
        "were measured on 1,190 examples, this run on 640."
    )
    bare = change_run(run, config={**run.config, "report": {"expected": {"f1": 77.6}}})
    assert "do not name their model" in part(build_page(bare), "Verdict", Text, 1).body


# The page kit


def list_properties(value: object) -> set[str]:
    """The names of all properties in a figure."""
    if isinstance(value, dict):
        names = {re.sub(r"\d+$", "", name) for name in value}
        return names.union(*(list_properties(one) for one in value.values()))
    if isinstance(value, list | tuple):
        return set().union(*(list_properties(one) for one in value if isinstance(one, dict | list | tuple)))
    return set()


def test_the_page_s_script_knows_every_property_of_a_chart() -> None:
    script = files("fivetune.reading.report.page").joinpath("templates/charts.js").read_text()
    known = {*re.findall(r"\w+", script), "error_x", "error_y"}
    for page in (build_page(loaded_run()), build_page(label_run()), build_comparison_page(comparison(6, 1))):
        found = [part for section in page.sections for part in section.parts if isinstance(part, Chart)]
        assert found
        for chart in found:
            assert list_properties((chart.data, chart.layout)) <= known


def test_sections_of_notes_are_folded_into_one_at_the_end() -> None:
    figure, note = Figure("a", "1"), Text("Nothing was recorded.")
    sections = (
        Section("One", (note,)),
        Section("Two", (note, note)),
        Section("Three", ()),
        Section("Four", (figure, note)),
    )
    kept = collect_quiet_sections(sections)
    assert [section.title for section in kept] == ["One", "Four", "Nothing to report"]  # the first one stays
    (table,) = kept[-1].parts
    assert isinstance(table, Table) and table.folded
    assert list(table.rows) == [("Two", "Nothing was recorded. Nothing was recorded.")]


def test_what_is_as_it_should_be_is_folded() -> None:
    rates, broken = {"cap_hit": 0.001, "sentinels": 0.0}, {"cap_hit": 0.5, "sentinels": 0.0}
    folded = [
        part(build_page(fake_run(evals=[make_eval(5, {"f1": 70.0}, rates=one)])), "Evidence", Table).folded
        for one in (rates, broken)
    ]
    assert folded == [True, False]
    counts = part(build_page(fake_run()), "Data", Table)
    assert "Zero: targets clipped." in counts.caption and "targets clipped" not in {row[0] for row in counts.rows}


def test_a_row_of_key_figures_leaves_no_empty_box() -> None:
    html = render_html(Page("t", (Section("s", tuple(Figure(str(i), "1") for i in range(7))),)))
    assert 'style="--columns:4;--last:2"' in html


def test_a_series_of_zeros_takes_a_line_and_no_chart_and_each_chart_its_own_legend() -> None:
    parts = build_run_load_section(loaded_run(num_devices=0)).parts
    cores = next(p for p in parts if isinstance(p, Chart) and p.caption.startswith("Busy cores"))
    lines = [trace for trace in cores.data if trace.get("name") in ("whole host", "this run")]
    assert len({trace["line"]["color"] for trace in lines}) == 2 and not any("meta" in trace for trace in lines)
    assert cores.layout["showlegend"]
    quiet = [record | {"disk_read_bytes_per_second": 0.0, "disk_written_bytes_per_second": 0.0}
             for record in telemetry(num_devices=0)]  # fmt: skip
    parts = build_run_load_section(change_run(loaded_run(num_devices=0), telemetry=quiet)).parts
    assert "Zero in every sample: disk." in [p.body for p in parts if isinstance(p, Text)]
    assert not any(isinstance(p, Chart) and p.caption.startswith("Disk") for p in parts)


def test_no_padding_and_a_single_evaluation_take_a_sentence_and_no_chart() -> None:
    run = fake_run()
    steps = [replace(step, padding_fraction=0.0) for step in run.steps]
    pages = [build_page(one) for one in (run, change_run(run, steps=steps, evals=run.evals[-1:]))]
    text = render_html(pages[1])
    assert "Padding: none." in text and "One evaluation was made, so its scores have no curve" in text
    whole, bare = (sum(isinstance(one, Chart) for s in page.sections for one in s.parts) for page in pages)
    assert bare <= whole - 2


def test_a_perfect_calibration_is_not_called_underconfident() -> None:
    lines = [{"id": str(i), "confidence": 0.9999, "scores": {"exact": 1.0}} for i in range(30)]
    parts = build_confidence_section(make_predictions(*lines), "exact").parts
    assert (
        next(p for p in parts if isinstance(p, Figure) and p.label == "Mean confidence").remark == "100.0 % are right"
    )
    assert sum(isinstance(p, Chart) for p in parts) == 1


def test_the_rows_of_a_classification_are_not_answerable() -> None:
    label = {"id": "1", "inputs": "x", "prediction": "a", "references": ["a"], "scores": {}, "meta": {}}
    assert "answerable" not in examples.build_example(make_predictions(label)[0], "random").tags
    question = label | {"meta": {"question": "Who?"}}
    assert examples.build_example(make_predictions(question)[0], "random").tags["answerable"] == "answerable"


def test_blank_gold_answers_are_counted_and_left_out_of_a_second_score() -> None:
    lines = make_predictions(
        {"id": "1", "references": ["a", ""], "scores": {"exact": 1.0}},
        {"id": "2", "references": ["a"], "scores": {"exact": 0.0}},
        {"id": "3", "references": [""], "scores": {"exact": 1.0}},
    )
    assert describe_blank_golds(lines, "exact") == (
        "A blank gold answer beside others, which an empty prediction matches: 1 question. Without them, "
        "Exact match is 50.00."
    )
    assert describe_blank_golds(lines[1:], "exact") == ""


def test_the_parts_of_a_resumed_run_are_listed() -> None:
    parts = [{"step": 0, "device": "cpu", "num_threads": 2}, {"step": 7, "device": "cpu", "changed": ["lr: 1 -> 2"]}]
    page = build_page(fake_run(machine={"parts": parts}))
    assert part(page, "Reproduce", Table, 1).rows[1] == ("7", "n/a", "cpu", "n/a", "lr: 1 -> 2")


def test_scores_of_a_subset_and_of_the_whole_set_are_not_joined():
    run = fake_run()
    evals = [replace(one, split="subset", num_examples=90) if one.step > 100 else one for one in run.evals]
    points = _list_points(evals)
    assert [step for step, record in points if record is None] == [150.0] and len(points) == len(evals) + 1
    whole = replace(evals[-1], split="eval", num_examples=640)
    table = list(iter_learning_parts(replace(run, evals=[*evals, whole]), ()))[2]
    assert [tuple(row[:2]) for row in table.rows[-2:]] == [("300", "90"), ("300", "640")] and table.header[
        1
    ] == "examples"
    other = replace(whole, basis="other")
    table = list(iter_learning_parts(replace(run, evals=[*evals, whole, other]), ()))[2]
    assert [tuple(row[:3]) for row in table.rows[-2:]] == [("300", "1", "640"), ("300", "2", "640")]
    assert table.header[:3] == ["step", "set", "examples"] and "a resume changed it" in table.caption


def test_the_first_screen_has_the_commands_that_come_next() -> None:
    finished = fake_run(has_model=True)
    text = "\n".join(list_next_commands(finished))
    for command in ("predict", "evaluate", "serve", "push"):
        assert f"fivetune {command} runs/quickstart " in text
    shown = [one.body for one in build_page(finished).sections[0].parts if isinstance(one, Text) and one.kind == "code"]
    assert shown == [text]
    status = {"state": "interrupted", "begun": True, "step": 4}
    assert list_next_commands(fake_run(status=status)) == ["fivetune train runs/quickstart --resume"]
    # A model that has learnt nothing is not offered, nor one that is not there.
    scores = {"exact": 50.0, "f1": 50.0, "HasAns_exact": 0.0, "HasAns_f1": 0.0, "NoAns_exact": 100.0, "NoAns_f1": 100.0}
    silent = change_run(finished, evals=[replace(one, scores={**one.scores, **scores}) for one in finished.evals])
    assert Text(text, "code") not in build_page(silent).sections[0].parts
    assert list_next_commands(fake_run()) == []
