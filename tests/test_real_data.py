"""All real data, whole, through all that reads texts: inspect, scores, the records of an evaluation, report, card.

What a text can do to these is met here: a question that ends in "No. 15?", answers in other scripts, HTML. Texts that
nobody has written yet are drawn at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_run, make_eval, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import release

from fivetune import cli
from fivetune.config import load_config
from fivetune.data.inspect import InspectedDataset, read_dataset
from fivetune.reading.card.card import CardRequest, Place, build_model_card
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.run.build import build_page
from fivetune.rundir.records import BestEval, Prediction, Run
from fivetune.scores.metrics import Scorer
from fivetune.training.answers.score_file import read_rankings
from fivetune.training.answers.tally import Tally
from fivetune.types import Task, TextExample

SHARED = Path(__file__).parents[2] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data (real data sets) is not on this machine")

SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "squad_v2/dev-v2.0.json.gz": ("squad_v2", {}),
    "squad_v2/train-v2.0.first10articles.json.gz": ("squad_v2", {}),
    "squad_v1.1/dev-v1.1.json.gz": ("squad", {}),
    "squad_v1.1/train-v1.1.part44articles.json.gz": ("squad", {}),
    "squad_es/dev-v1.1-es_small.json.gz": ("squad", {"language": "es"}),
    "squad_es/dev-v2.0-es_small.json.gz": ("squad_v2", {"language": "es"}),
    "xquad/xquad.en.json.gz": ("squad", {}),
    "xquad/xquad.es.json.gz": ("squad", {"language": "es"}),
    "gsm8k/train.jsonl.gz": ("gsm8k", {}),
    "gsm8k/test.jsonl.gz": ("gsm8k", {}),
    "bioasq/golden/4B_golden.json.gz": ("bioasq_factoid", {}),
    "bioasq/golden/6B1_golden.json.gz": ("bioasq_yesno", {}),
    "bioasq/golden/8B1_golden.json.gz": ("bioasq_factoid", {}),
    "bioasq/factoid/derived-annotated-factoid-4b.json.gz": ("bioasq_factoid", {}),
    "bioasq/factoid/bio_electra-bioasq-factoid.no7b.json.gz": ("bioasq_factoid", {}),
    "bioasq/yesno/train.tsv.gz": ("classification", {"label": "yesno_label", "inputs": "{question} {ideal_answer}"}),
    "causalqa/squad_causal_train.csv.gz": ("causalqa", {}),
    "causalqa/wikiwhy_nocontext_600.csv.gz": ("causalqa", {}),
    "squad_es_dist/training.json.gz": (
        "jsonl",
        {"inputs": "{question} {context}", "targets": "{answer}", "metrics": ["rouge"], "main_metric": "rougeL_f1"},
    ),
    "so_quality/raw_schema_hq_lq.train.csv.gz": ("stackoverflow_quality", {"labels": {"HQ": "good", "LQ": "bad"}}),
    "so_quality/clean_text_3class.valid.csv.gz": ("classification", {"label": "rating", "inputs": "{text}"}),
}


COLUMNS = {"squad_es_dist/training.json.gz": {"answer": "choices.0.text"}}
LARGE = {
    "squad_v2/dev-v2.0.json.gz",
    "squad_v1.1/dev-v1.1.json.gz",
    "squad_v1.1/train-v1.1.part44articles.json.gz",
    "squad_es/dev-v1.1-es_small.json.gz",
    "gsm8k/train.jsonl.gz",
    "so_quality/clean_text_3class.valid.csv.gz",
}
"""Sets that take seconds and stand beside a smaller one of their kind."""
LARGE_PAGES = {
    *LARGE,
    "squad_v2/train-v2.0.first10articles.json.gz",
    "squad_es/dev-v2.0-es_small.json.gz",
    "xquad/xquad.en.json.gz",
    "causalqa/wikiwhy_nocontext_600.csv.gz",
    "bioasq/factoid/bio_electra-bioasq-factoid.no7b.json.gz",
}
"""Sets whose tokens take seconds to count, beside a smaller one of their kind."""


@cache
def read_all(name: str) -> tuple[Task, InspectedDataset]:
    kind, options = SETS[name]
    config = load_config({"model": {"path": "t5-nano"}, "task": {"name": kind, **options}})
    columns = COLUMNS.get(name, {})
    found = read_dataset([str(SHARED / name)], config.task, columns, max_records=None, on_progress=lambda *_: None)
    return config.task, found


def answer(examples: Mapping[str, TextExample], given: Mapping[str, str]) -> Iterator[tuple[int, Prediction]]:
    """The prediction to each question, with its number."""
    for number, (key, example) in enumerate(examples.items()):
        yield (
            number,
            Prediction(
                id=key,
                inputs=example.inputs,
                prediction=given.get(key, ""),
                references=tuple(example.references),
                meta=dict(example.meta),
                confidence=0.5,
            ),
        )


def evaluate(task: Task, examples: Mapping[str, TextExample], given: Mapping[str, str]) -> Run:
    """A run with one evaluation, of these predictions."""
    tally = Tally(Scorer(task.metrics))
    predictions = list(tally.score_each(answer(examples, given)))
    scores = tally.compute_scores()
    assert scores is not None
    record = make_eval(10, scores.corpus, num_examples=len(predictions), rates=tally.compute_rates())
    status = {"state": "finished", "step": 10, "best": {"step": 10, "metric": task.main_metric, "score": 1.0}}
    return make_run(
        "real", config=fake_run().config, status=status, evals=[record], predictions={"eval-10": predictions}
    )


def build_documents(task: Task, run: Run) -> tuple[str, str]:
    """The report and the card of a run."""
    config = load_config({"model": {"path": "t5-nano"}, "task": {"name": "jsonl"}})
    best = BestEval(10, task.main_metric, 1.0)
    request = CardRequest(Path("runs/real"), Place("runs/real"), model_type="t5")
    return render_html(build_page(run)), build_model_card(config, run, run.evals[0], best, request)


def first_answer(example: TextExample) -> str:
    """The first gold answer that is no empty text, which SQuAD-es has."""
    return next(filter(None, example.references), "")


def inspect(name: str, folder: Path) -> str:
    """The page of `fivetune inspect`."""
    kind, options = SETS[name]
    words = ["inspect", str(SHARED / name), "--task", kind, "--html", str(folder / "page.html")]
    words += [word for key, value in options.items() for word in (f"--task.{key}", json.dumps(value))]
    assert (
        cli.main(
            [*words, *(word for key, path in COLUMNS.get(name, {}).items() for word in (f"--data.columns.{key}", path))]
        )
        == 0
    )
    return (folder / "page.html").read_text(encoding="utf-8")


@needs_shared
@pytest.mark.parametrize("name", [release(name) if name in LARGE else name for name in SETS])
def test_all_texts_pass_through_scores_report_and_card(name):
    task, found = read_all(name)
    assert found.examples and not found.skipped
    examples = {one.group or one.id: one for one in found.examples}
    run = evaluate(task, examples, {key: first_answer(one) for key, one in examples.items()})
    if "squad_es/" not in name:  # whose metrics take an empty gold answer as one
        assert run.evals[0].scores[task.main_metric] == 100
    page, card = build_documents(task, run)
    assert f"{len(examples):,}" in page and "## Limits" in card


@needs_shared
@pytest.mark.parametrize("name", [release(name) if name in LARGE_PAGES else name for name in SETS])
def test_all_texts_pass_through_inspect(name, tmp_path):
    assert f"{len(read_all(name)[1].examples):,}" in inspect(name, tmp_path)


@needs_shared
@pytest.mark.parametrize("name", ["igor_baseline_t5small", release("igor_finetuned_t5small")])
def test_published_answers_of_a_model_pass_through_report_and_card(name):
    task, found = read_all("squad_v2/dev-v2.0.json.gz")
    given = {key: texts[0] for key, texts in read_rankings(str(SHARED / f"reference/{name}.json.gz")).items()}
    run = evaluate(task, {one.group or one.id: one for one in found.examples}, given)
    assert run.evals[0].scores["exact"] == {"igor_baseline_t5small": 34.42263960245936}.get(name, 46.8205171397288)
    page, card = build_documents(task, run)
    assert "question word" in page and "Worse where" in card


# --- texts that nobody has written yet ---

TEXT = st.text(max_size=40) | st.sampled_from(["No. 15?", "?", "...", "</s>", "<extra_id_0>", "\0", "a|b\n#", "\u202e"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT, TEXT), min_size=20, max_size=24))
def test_any_text_as_question_context_and_answer_passes(rows):
    task = load_config({"model": {"path": "t5-nano"}, "task": {"name": "squad_v2"}}).task
    examples = {
        str(number): TextExample(
            str(number), f"{question} {context}", answer, (answer,), meta={"question": question, "context": context}
        )
        for number, (question, context, answer) in enumerate(rows)
    }
    run = evaluate(task, examples, {str(number): row[number % 3] for number, row in enumerate(rows)})
    page, card = build_documents(task, run)
    assert page and card


@settings(max_examples=20, deadline=None)
@given(st.lists(TEXT.filter(str.strip), min_size=2, max_size=6, unique=True), st.data())
def test_any_text_as_label_passes(labels, data):
    label = st.sampled_from(labels)
    task = load_config(
        {
            "model": {"path": "t5-nano"},
            "task": {"name": "jsonl", "metrics": ["classification"], "main_metric": "accuracy"},
        }
    ).task
    given = [(data.draw(label), data.draw(label)) for _ in range(24)]
    meta = {"labels": list(labels)}
    examples = {str(i): TextExample(str(i), "text", gold, (gold,), meta=meta) for i, (gold, _) in enumerate(given)}
    page, card = build_documents(task, evaluate(task, examples, {str(i): said for i, (_, said) in enumerate(given)}))
    assert page and card
