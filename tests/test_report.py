"""The report: its numbers (literal in, literal out), what it refuses to run, odd runs, and a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TypeVar

import kit
import pytest
from fake_run import HOSTILE, NUM_STEPS, blind_run, fake_run, label_run, write_run

from fivetune import plugins, rundir
from fivetune.analysis.bootstrap import wilson
from fivetune.config import load_config
from fivetune.errors import RunDirError
from fivetune.report import build_page, charts, examples, findings, render, write_report
from fivetune.report.render import choices
from fivetune.report.scores import baseline_eval, best_eval, main_score, summary
from fivetune.report.series import MAX_POINTS, by_step, quantile, smooth, thin
from fivetune.report.wording import amount, change, discreet, duration, fixed, percent, setting, short, size, visible
from fivetune.tasks.mixture import Mixture
from fivetune.training.card import model_card
from fivetune.types import Chart, Example, Figure, Page, Run, Section, Table, Text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EMPTY = Run("empty", {}, {}, {}, {}, [], [], {}, [])


Kind = TypeVar("Kind")


def part(page: Page, section: str, kind: type[Kind], at: int = 0) -> Kind:
    """The at-th part of a kind in a section."""
    found = next(s for s in page.sections if s.title == section)
    return [p for p in found.parts if isinstance(p, kind)][at]


# Numbers


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (fixed(1234.5), "1,234.50"),
        (fixed(math.nan), "n/a"),
        (fixed("12"), "n/a"),
        (short(0.000123), "1.23e-04"),
        (short(12345), "12,345"),
        (short(0.1678), "0.168"),
        (change(-3.5), "\u22123.50"),
        (percent(0.125), "12.5 %"),
        (duration(161.4), "2 min 41 s"),
        (duration(59.7), "1 min 0 s"),
        (duration(7265), "2 h 1 min"),
        (size(3 * 2**30), "3.0 GiB"),
        (amount(3145728), "3.15 M"),
        (amount(20655), "20.7 k"),
    ],
)
def test_values_are_worded_with_their_units(words: str, expected: str) -> None:
    assert words == expected


def test_smoothing_is_a_weighted_mean_from_the_first_value_on() -> None:
    # span 3: a = 1/2, so s_2 = (1/2 * 4 + 1) / (1/2 + 1) and s_4 = (1/2 * (1/2 * 4 + 1) + 7) / (1/4 + 1/2 + 1)
    assert smooth([4.0, 1.0, None, 7.0], span=3) == [4.0, 2.0, None, pytest.approx(8.5 / 1.75)]


def test_quantiles_and_the_interval_of_a_share() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.25) == 1.5
    assert quantile([], 0.5) is None
    # Newcombe 1998, table I, method 3
    assert wilson(81 / 263, 263) == (pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4))
    assert wilson(1.0, 10)[1] == pytest.approx(1.0)


@pytest.mark.parametrize("num", [1, 5, 1999, 2000, 2001, 5000, 100_003])
def test_thinning_keeps_ends_extremes_gaps_and_order(num: int) -> None:
    xs = [float(i) for i in range(num)]
    ys = [
        None if i % 977 == 500 else math.sin(i / 9) + (90 if i == num // 3 else -90 if i == num // 2 else 0)
        for i in range(num)
    ]
    thin_xs, thin_ys = thin(xs, ys)
    known = [y for y in ys if y is not None]
    assert len(thin_xs) == len(thin_ys) <= MAX_POINTS
    assert thin_xs == sorted(set(thin_xs)) and (thin_xs[0], thin_xs[-1]) == (xs[0], xs[-1])
    assert all(ys[int(x)] == y for x, y in zip(thin_xs, thin_ys, strict=True))
    assert {min(known), max(known)} <= set(thin_ys)
    assert (None in ys) == (None in thin_ys)


def test_of_a_step_done_again_the_last_record_counts() -> None:
    assert by_step([{"step": 2, "loss": 1}, {"step": 1}, {"step": 2, "loss": 3}, {}]) == [
        {"step": 1},
        {"step": 2, "loss": 3},
    ]


def test_headline_scores_stand_beside_baseline_and_other_runs() -> None:
    page = build_page(fake_run(), beside=[blind_run()])
    table = part(page, "Verdict", Table)
    assert table.header == (
        "score",
        "this run, step 250",
        "95 % interval",
        "before fine-tuning",
        "context-blind",
        "change",
    )
    assert table.rows[0] == ("Exact match", "92.65", "90.4 to 94.4", "6.10", "47.50", "+86.55")
    assert table.rows[2] == ("Answerable: exact match", "92.20", "88.7 to 94.7", "0.30", "16.00", "+91.90")
    assert part(page, "Verdict", Figure) == Figure("Exact match", "92.7", "6.1 before")
    assert part(page, "Verdict", Text).body == (
        "Fine-tuning raised F1 from 7.4 to 93.9, measured at step 250 on 640 examples. "
        "Beside it, the run context-blind reaches F1 48.8: 45.1 below. The run finished after 300 steps in 2 min 41 s."
    )


def test_key_figures() -> None:
    figures = {figure.label: (figure.value, figure.remark) for figure in figures_of(build_page(fake_run()))}
    assert figures["Examples seen"] == ("19,200", "4.80 epochs")
    assert figures["Time"] == ("2 min 41 s", "73.2 % of it training")
    assert figures["Peak memory"] == ("705.0 MiB", "highest of all steps")
    assert figures["Model"] == ("3.15 M", "parameters")


def figures_of(page: Page) -> list[Figure]:
    found = next(s for s in page.sections if s.title == "Key figures")
    return [p for p in found.parts if isinstance(p, Figure)]


def test_data_table_counts_what_was_lost() -> None:
    rows = part(build_page(fake_run()), "Data", Table).rows
    assert rows[2] == ("records left out", "3", "0.07 %", "1", "0.16 %")
    assert rows[4] == ("examples made of them", "4,000", "", "640", "")
    assert rows[6] == ("answers lost to truncation", "8", "0.20 %", "1", "0.16 %")


def test_records_examples_windows_and_files_are_told_apart() -> None:
    facts = {"num_read": 30, "num_records_kept": 3, "num_skipped": 27, "num_skipped_bad": 2, "num_examples": 35,
             "num_examples_clipped": 0, "num_cut_into_windows": 2, "num_windows": 34, "source": ["a.json", "a.json"],
             "input_lengths": {"edges": [0, 9], "counts": [35]}}  # fmt: skip
    page = build_page(replace(EMPTY, data={"train": facts}))
    counts, cost = part(page, "Data", Text).body, part(page, "Data", Text, 1).body
    assert (
        counts == "train: 30 records read = 3 kept + 27 left out (25 by the task, 2 that cannot be used); 35 examples."
    )
    assert cost == "train: 2 questions too long for one input became 34 windows. Sources: train: a.json."
    assert "of the windows" in part(page, "Data", Chart).caption
    assert findings.warnings(replace(EMPTY, data={"train": facts})) == [
        "train: 2 of 30 records could not be used and were left out."
    ]


def mixture_run() -> Run:
    """Two parts at step 5: labels that are chosen, all right, and texts that are written, half of them right."""
    task = {"name": "mixture", "parts": {"q": {"task": "stackoverflow_quality"}, "t": {"task": "stackoverflow_tags"}}}
    lines = [
        {"id": str(i), "references": ["a", "a"], "prediction": "a", "confidence": 0.9, "scores": {"mean": float(i < 4)},
         "teacher_forced_exact": i > 1, "free_running_exact": i < 4, "meta": {"source_task": "q" if i < 2 else "t"},
         **({"left_label_set": False} if i < 2 else {})}
        for i in range(6)
    ]  # fmt: skip
    mains = {f"{name}_{part.task.main_metric}": 70.0 for name, part in Mixture.model_validate(
        {"parts": task["parts"]}).parts.items()}  # fmt: skip
    scores = {"mean": 70.0, "q_other": 1.0, **mains, "q_total": 2, "t_total": 4, "total": 6}
    record = {"step": 5, "split": "eval", "scores": scores, "rates": {"teacher_forced_exact": 0.6}}
    return fake_run(evals=[record], status={"best": {"step": 5}}, predictions={"eval-5": lines}, config={"task": task})


def test_a_mixture_shows_its_mains_no_counts_and_each_part_s_own_calibration() -> None:
    run = mixture_run()
    page = build_page(run)
    scores = set(run.evals[0]["scores"])
    tiles = {p.label for p in page.sections[0].parts if isinstance(p, Figure)}
    assert tiles == {name.replace("_", " ") for name in scores if not name.endswith(("total", "other"))}
    assert {row[0] for row in part(page, "Verdict", Table).rows} == tiles | {"q other"}
    confidence = next(s for s in page.sections if s.title == "Confidence")
    assert [p.body for p in confidence.parts if isinstance(p, Text) and p.kind == "heading"] == ["q", "t"]
    rates = {row[0]: row[1] for row in part(page, "Warnings", Table).rows}
    assert rates == {"target exact, teacher-forced": "100.0 %", "target exact, free-running": "50.0 %"}
    assert part(page, "Examples", Example).references == ("a (2 times)",)


def test_what_taught_nothing_is_told_with_what_was_read() -> None:
    data = fake_run().data
    page = build_page(fake_run(data={**data, "train": {**data["train"], "num_not_learnt": 3}}))
    words = part(page, "Data", Text, 1).body
    assert "train: nothing is learnt from 3 examples without the answer in the input." in words


def test_histogram_shares_leave_out_the_empty_end() -> None:
    assert charts.bins({"edges": [0, 8, 16, 24], "counts": [1, 3, 0]}) == ([0.0, 8.0, 16.0], [25.0, 75.0])
    assert charts.bins({"edges": [0, 8], "counts": []}) == ([], [])
    assert charts.bins(None) == ([], [])


def test_summary_is_the_headline_for_scripts() -> None:
    told = summary(fake_run(), beside=[blind_run()])
    assert (told["name"], told["state"], told["best_step"], told["metric"]) == ("quickstart", "finished", 250, "f1")
    exact = [told["scores"]["exact"], told["baseline"]["exact"], told["beside"]["context-blind"]["exact"]]
    assert exact == pytest.approx([92.65, 6.1, 47.5])


def test_without_a_named_best_the_highest_main_score_is_taken() -> None:
    run = fake_run(status={})
    assert main_score(run) == "f1"
    assert best_eval(run)["step"] == 250 and baseline_eval(run)["step"] == 0  # type: ignore[index]


# Warnings


def test_cap_hits_frozen_and_missing_losses_are_warned_of() -> None:
    steps = [{"step": i, "loss": None if i == 3 else 2.5} for i in range(1, 13)]
    evals = [{"step": 12, "split": "eval", "scores": {"f1": 1.0}, "rates": {"cap_hit": 0.02}, "max_new_tokens": 18}]
    told = findings.warnings(replace(EMPTY, steps=steps, evals=evals))
    assert told[0] == "The loss was not finite in 1 step of 12, first in step 3. The curves have gaps there."
    assert told[1].startswith("The loss stayed exactly the same for 9 steps from step 4 on")
    assert told[2].startswith("2.0 % of the predictions were cut off at 18 tokens.")


def test_a_model_that_only_abstains_is_warned_of() -> None:
    scores = {"f1": 53.0, "HasAns_f1": 0.0, "NoAns_f1": 100.0}
    run = replace(fake_run(), evals=[{"step": 5, "split": "eval", "scores": scores}], status={"best": {"step": 5}})
    assert [w for w in findings.warnings(run) if "abstaining" in w] == [
        "The score was gained by abstaining alone: F1 on answerable questions is 0.0, on unanswerable ones 100.0. "
        "The model does not answer yet. Train longer."
    ]


def test_a_score_gained_by_abstaining_is_warned_of() -> None:
    scores = [(60.0, 20.0), (40.0, 95.0)]
    evals = [
        {"step": i, "split": "eval", "scores": {"f1": (has + no) / 2, "HasAns_f1": has, "NoAns_f1": no}}
        for i, (has, no) in enumerate(scores)
    ]
    assert findings.warnings(replace(EMPTY, evals=evals)) == [
        "Part of the score was gained by abstaining: since step 0 F1 on answerable questions fell from 60.0 to 40.0, "
        "on unanswerable ones it rose from 20.0 to 95.0."
    ]


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
    record = {"step": 5, "split": "eval", "rates": rates, "scores": scores}
    (sentence,) = findings.warnings(replace(EMPTY, evals=[record]))
    assert sentence.startswith(told)
    harmless = record | {"rates": dict.fromkeys(rates, 0.0)}
    assert findings.warnings(replace(EMPTY, evals=[harmless])) == []


def test_the_evaluation_s_own_interval_is_shown() -> None:
    run = fake_run()
    evals = [record | {"intervals": {"exact": [91.0, 94.5]}} for record in run.evals]
    rows = part(build_page(replace(run, evals=evals)), "Verdict", Table).rows
    assert (rows[0][2], rows[1][2]) == ("91.0 to 94.5", "91.8 to 95.5")


def test_confidence_slices_and_labels_have_their_sections() -> None:
    page = build_page(fake_run())
    assert part(page, "Confidence", Table, 1).rows[0][0] == "Exact match"
    assert "answerable" in {row[1] for row in part(page, "Slices", Table).rows}
    labels = part(build_page(label_run()), "Labels", Table)
    assert [row[1] for row in labels.rows] == ["180", "60", "60"]
    old = [{"id": "a", "inputs": "q", "prediction": "x", "references": ["x"], "scores": {"exact": 1.0, "f1": 1.0}}]
    told = part(build_page(fake_run(predictions={"eval-250": old})), "Confidence", Text).body
    assert told.startswith("The prediction lines hold no confidences")


def test_predictions_can_be_chosen_by_what_they_differ_in() -> None:
    shown = [p for s in build_page(fake_run()).sections for p in s.parts if isinstance(p, Example)]
    found = choices(shown)
    assert set(found) == {"verdict", "chosen", "truncation", "answerable", "source task"}
    assert found["chosen"] == ["random", "lowest scores"] and len(shown) <= 300


def test_what_the_data_lost_is_warned_of_and_equal_warnings_are_counted() -> None:
    data = {"train": {"num_read": 9, "num_kept": 8, "num_skipped_bad": 1, "num_answers_lost": 2}}
    assert findings.warnings(replace(EMPTY, data=data)) == [
        "train: in 2 examples (25.0 %) truncation cut the answer out of the input. Raise data.max_input_tokens.",
        "train: 1 of 9 records could not be used and were left out.",
    ]
    told = ["truncation: train: 2 gold answers lost", "b", "b"]
    assert findings.own_warnings(replace(EMPTY, data=data, warnings=told)) == ["b (2 times)"]


def test_unknown_tokens_are_warned_of() -> None:
    data = {"train": {"num_input_tokens": 1000, "num_unknown_tokens": 12}}
    assert findings.warnings(replace(EMPTY, data=data)) == [
        "train: 1.20 % of the input tokens are unknown to the tokenizer."
    ]


def test_shares_and_epochs_count_the_examples_not_the_records() -> None:
    """Training on all answers makes several examples of a record."""
    data = {"train": {"num_read": 8, "num_kept": 8, "num_examples": 16, "num_answers_lost": 2}}
    assert "in 2 examples (12.5 %) truncation" in findings.warnings(replace(EMPTY, data=data))[0]
    page = build_page(fake_run(data={"train": {"num_kept": 100, "num_examples": 6400}}))
    figures = [p for s in page.sections for p in s.parts if isinstance(p, Figure)]
    assert next(f for f in figures if f.label == "Examples seen").remark == "3.00 epochs"


def test_the_made_up_run_has_the_counts_of_a_real_one(tmp_path: Path, model_folder: Path) -> None:
    real = kit.ready(tmp_path, model_folder).stream.store.summary
    for facts in fake_run().data.values():
        assert set(facts) <= set(real)


def test_scores_of_every_metric_are_points() -> None:
    evals = [
        {"step": i, "split": "eval", "num_examples": 10, "scores": {"exact_match": v}} for i, v in ((0, 3), (5, 69.6))
    ]
    page = build_page(fake_run(evals=evals, status={"best": {"step": 5, "metric": "exact_match"}}, predictions={}))
    assert findings.verdict(replace(EMPTY, evals=evals), [])[0].startswith(
        "Fine-tuning raised exact match from 3.0 to 69.6"
    )
    row = part(page, "Verdict", Table).rows[0]
    assert row == ("exact match", "69.60", "39.3 to 89.0", "3.00", "+66.60")


def test_the_best_evaluation_is_the_run_s_own_and_the_whole_set() -> None:
    evals = [
        {"step": 5, "split": "subset", "scores": {"f1": 1.0}}, {"step": 5, "split": "eval", "scores": {"f1": 2.0}},
        {"step": 5, "split": "subset", "scores": {"f1": 3.0}}, {"step": 5, "split": "other", "scores": {"f1": 4.0}},
        {"step": 9, "split": "subset", "scores": {"f1": 5.0}},
    ]  # fmt: skip
    run = replace(EMPTY, evals=evals, status={"best": {"step": 5}})
    assert best_eval(run) == rundir.best_eval(evals, {"step": 5}) == evals[1]
    assert rundir.best_eval(evals, {"step": 9}) == evals[4]
    assert rundir.best_eval(evals, None) is rundir.best_eval(evals, {"step": 7}) is None
    config = load_config({"model": {"path": "m"}, "task": "squad_v2"})
    assert "| f1 | 2.00 |" in model_card(
        config, replace(run, evals=[e | {"num_examples": 4} for e in evals]), {"step": 5}
    )


def test_a_run_that_got_worse_says_so() -> None:
    evals = [{"step": i, "split": "eval", "num_examples": 4, "scores": {"f1": f1}} for i, f1 in ((0, 50.0), (5, 40.0))]
    run = replace(EMPTY, evals=evals)
    assert findings.verdict(run, [])[0] == "Fine-tuning lowered F1 from 50.0 to 40.0, measured at step 5 on 4 examples."
    untrained = replace(run, evals=evals[:1])
    assert findings.verdict(untrained, [])[0] == "Only the model before fine-tuning was evaluated: F1 50.0."
    best_is_first = replace(run, status={"best": {"step": 0}})
    assert "Fine-tuning has not helped" in findings.verdict(best_is_first, [])[0]


# Examples


def test_examples_do_not_depend_on_the_order_of_the_file() -> None:
    lines = fake_run().predictions["eval-250"]
    assert examples.worst(lines) == examples.worst(lines[::-1])
    assert examples.sample(lines, []) == examples.sample(lines[::-1], [])
    shown = {line["id"] for line in examples.worst(lines)}
    assert not shown & {line["id"] for line in examples.sample(lines, examples.worst(lines))}


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
    assert [examples.kind(one) for one in lines] == [
        "right",
        "right",
        "invented",
        "abstained",
        "near",
        "wrong answer",
        None,
    ]
    table = examples.kinds_table(lines)
    assert table and [row[1] for row in table.rows] == ["2", "1", "1", "1", "1"]


def test_all_gold_answers_are_shown() -> None:
    line = {"id": 7, "inputs": "q", "prediction": "a b", "references": ["a", "b c"], "scores": {"exact": 0, "f1": 0.5}}
    tags = {"chosen": "random", "answerable": "answerable"}
    wanted = Example("7", "q", "a b", ("a", "b c"), "near", "exact 0.00, f1 0.50", tags)
    assert examples.shown(line, "random") == wanted


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
        Chart(text, ({"name": charts.label(text)},), {"height": 280}),
        Example(text, text, text, (text,), "wrong", text),
    )
    html = render(Page(text, (Section(text, parts),), text, (Text(text),)))
    body = html[: html.rindex("<footer>")]
    assert text not in body or str(escape(visible(text))) == text
    assert "owned" not in body or "&lt;script&gt;" in body
    assert body.count("<script") == body.count("</script>") == 1
    html.encode()


def test_chart_json_survives_the_way_through_the_page() -> None:
    figure = Chart("c", ({"name": "a</script><!--&\u2028é"},), {"height": 280})
    html = render(Page("t", (Section("s", (figure,)),)))
    (inside,) = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert not set(inside) & set("<>&")
    assert json.loads(inside)["data"][0]["name"] == "a</script><!--&\u2028é"


def test_hidden_characters_secrets_and_the_home_folder() -> None:
    assert visible("a\u202eb\x1b[31m\u200b\ttab\n") == "a[U+202E]b[U+001B][31m[U+200B]\ttab\n"
    assert discreet("https://me:pw@host/x hf_abcdefghijkl") == "https://(hidden)@host/x (hidden)"
    assert discreet(f"{Path.home()}/runs") == "~/runs"
    assert (setting("hub.token", "abc"), setting("data.max_input_tokens", 5)) == ("(hidden)", "5")


def test_names_of_other_runs_are_text_in_charts_too() -> None:
    html = render(build_page(fake_run(), beside=[replace(blind_run(), name=HOSTILE)]))
    assert HOSTILE not in html
    assert "&lt;script" in charts.label(HOSTILE)


# Odd runs


def odd_runs() -> dict[str, Run]:
    whole = fake_run()
    broken = [record | {"loss": None, "grad_norm": math.nan} for record in whole.steps]
    nulls = [dict.fromkeys(record) | {"step": record["step"]} for record in whole.steps]
    return {
        "nothing": EMPTY,
        "no files but null": Run("null", None, None, None, None, [], [], {}, []),  # type: ignore[arg-type]
        "killed": replace(
            whole, status={"state": "running", "step": 120, "num_steps": 300}, steps=whole.steps[:120], evals=[]
        ),
        "one step": replace(whole, steps=whole.steps[:1], evals=whole.evals[:1]),
        "null losses": replace(whole, steps=broken, evals=[record | {"loss": math.nan} for record in whole.evals]),
        "null everywhere": replace(
            whole, steps=nulls, evals=[{"step": 0}, {"step": 5, "scores": None}], predictions={}
        ),
        "null counts": replace(whole, data={"train": dict.fromkeys(whole.data["train"]), "eval": None}),
        "null predictions": replace(whole, predictions={"eval-250": [dict.fromkeys(("id", "inputs", "prediction"))]}),
        "another metric": replace(
            whole, evals=[{"step": 3, "split": "eval", "scores": {"rouge_l": 0.25, "bleu": math.nan}}]
        ),
        "failed": replace(whole, status={"state": "failed", "why": "loss is not finite at step 4."}),
    }


@pytest.mark.parametrize("name", odd_runs())
def test_odd_runs_are_reported_all_the_same(name: str) -> None:
    html = render(build_page(odd_runs()[name], beside=[EMPTY]))
    assert "NaN" not in html[: html.rindex("<footer>")] and "None" not in re.sub(
        r"None comes near", "", html[: html.rindex("<footer>")]
    )


def test_a_long_run_keeps_the_page_small() -> None:
    run = fake_run()
    steps = [run.steps[i % NUM_STEPS] | {"step": i} for i in range(20_000)]
    page = build_page(replace(run, steps=steps))
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
        "command = plugins.module('commands', 'report')\n"
        "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
        "code = command.run(parser.parse_args(sys.argv[1:]))\n"
        "sys.exit(code or ('torch' in sys.modules) * 9)"
    )
    command = [sys.executable, "-c", code, str(folder), "--json", "--output", str(tmp_path / "x.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["report"], told["scores"]["f1"]) == (str(tmp_path / "x.html"), pytest.approx(93.95))
    assert plugins.module("commands", "report").__doc__


# A real browser


@dataclass(frozen=True)
class Visit:
    """What a browser made of a page: the DOM, its console lines, the requests that the page itself started."""

    dom: str
    console: list[str]
    requests: list[str]


def visit(html: str, folder: Path) -> Visit:
    """Open a page in headless Chromium. Requests without an initiator are the browser's own and left out."""
    folder.mkdir(exist_ok=True)
    (folder / "page.html").write_text(html, encoding="utf-8")
    quiet = (
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        *(f"--{flag}" for flag in quiet),
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--log-net-log={folder / 'net.json'}",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=20000",
    ]
    command = [str(CHROMIUM), *flags, "--dump-dom", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    log = json.loads((folder / "net.json").read_text(encoding="utf-8"))
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in log["events"] if event["type"] == start]
    requests = [
        p["url"] for p in started if p.get("url", "").startswith("http") and p.get("initiator") != "not an origin"
    ]
    return Visit(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], requests)


browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium binary on this machine (Debian: apt install chromium)"
)


@browser
def test_a_browser_draws_every_chart_in_silence_and_asks_nobody(tmp_path: Path) -> None:
    run = fake_run()
    hostile = [
        line | {"scores": {"exact": 0.0, "f1": 0.0}} for line in run.predictions["eval-250"] if line["id"] == "q0003"
    ]
    page = build_page(replace(run, predictions={"eval-250": hostile}), beside=[replace(blind_run(), name=HOSTILE)])
    num_charts = sum(isinstance(p, Chart) for s in page.sections for p in s.parts)
    seen = visit(render(page), tmp_path)
    drawn = re.findall(r'<div class="plot[^"]*"[^>]*>.*?class="main-svg"', seen.dom, flags=re.DOTALL)
    assert (len(drawn), num_charts) == (13, 13)
    assert "1 of 1 shown" in seen.dom
    assert seen.dom.count("trace scatter") > 9
    assert (seen.console, seen.requests) == ([], [])
    assert "<title>quickstart - FiveTune</title>" in seen.dom
    assert "&lt;script&gt;document.title='owned'&lt;/script&gt; [U+202E]on the wall" in seen.dom


@browser
@pytest.mark.slow
def test_the_policy_stops_what_got_past_the_escaping(tmp_path: Path) -> None:
    attack = '<img src="http://attacker.invalid/leak.png"><script>document.title = "owned"</script></body>'
    page = render(Page("harmless", (Section("s", (Text("t"),)),))).replace("</body>", attack)
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
    page = build_page(replace(run, config={**run.config, "report": {"expected": {"f1": 92.08}}}))
    table = next(part for part in page.sections[0].parts if isinstance(part, Table))
    place = table.header.index("published")
    assert {row[place] for row in table.rows if row[0] == "F1"} == {"92.08"}
    assert {row[place] for row in table.rows if row[0] != "F1"} == {"n/a"}
