"""Span corruption: shares and places of spans, nothing lost, long texts, and a model that is fine-tuned from it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fivetune
from fivetune.config import load_config
from fivetune.scores.metrics import Scorer
from fivetune.tasks.denoising import Denoising, corrupt_spans, draw_spans
from fivetune.training.sources import check_sources, describe_split
from fivetune.types import RawRecord, TextExample


def read(text: str, *, labelled: bool = True, **options: Any) -> Any:
    return Denoising(**options).to_text(RawRecord({"id": "1", "text": text}, "a:1"), labelled=labelled)


def fill(example: TextExample) -> str:
    """Put the words of a target back into their places."""
    parts = re.split(r"<extra_id_\d+>", example.targets)[1:-1]
    for number, part in enumerate(parts):
        example_inputs = example.inputs.replace(f"<extra_id_{number}>", part.strip())
        example = TextExample("", example_inputs, example.targets, (), (0, 0))
    return example.inputs


def test_corrupt_spans_literal() -> None:
    assert corrupt_spans(["the", "flag", "of", "Velka", "is", "red"], [(1, 2), (4, 6)]) == (
        "the <extra_id_0> of Velka <extra_id_1>",
        "<extra_id_0> flag <extra_id_1> is red <extra_id_2>",
    )


@given(st.integers(2, 400), st.floats(0.01, 0.99), st.floats(1, 9), st.integers(0, 99))
def test_spans_are_apart_and_within_the_text(num_words: int, share: float, mean: float, seed: int) -> None:
    spans = draw_spans(Random(seed), num_words, share, mean)
    assert spans[0][0] >= 0 and spans[-1][1] <= num_words and len(spans) < 100
    assert all(start < end for start, end in spans)
    assert all(one[1] < two[0] for one, two in pairwise(spans))
    assert sum(end - start for start, end in spans) == min(max(round(share * num_words), 1), num_words - 1)


def test_shares_are_those_of_t5() -> None:
    drawn = [draw_spans(Random(seed), 200, 0.15, 3) for seed in range(50)]
    assert fmean(end - start for spans in drawn for start, end in spans) == 3
    assert {sum(end - start for start, end in spans) for spans in drawn} == {30}
    ends = sum(spans[-1][1] == 200 for spans in drawn)
    assert 0 < ends < 25  # a span at the end is one of many


def test_nothing_is_lost_and_copies_differ() -> None:
    text = " ".join(f"w{number}" for number in range(100))
    examples = read(text, copies=3, words=40)
    assert [example.id for example in examples] == ["1", *(f"1/{number}" for number in range(2, 10))]
    for copy in range(3):
        assert " ".join(map(fill, examples[3 * copy : 3 * copy + 3])) == text
    assert examples[0].inputs != examples[3].inputs
    assert read(text, words=40) == examples[:3]
    assert read(text, seed=1).inputs != read(text).inputs


@pytest.mark.parametrize("text", ["hat", "<extra_id_0>", "<extra_id_3> hat"])
def test_a_single_word_is_left_out(text: str) -> None:
    assert read(text) is None


def test_a_text_with_gaps_is_filled_as_it_stands() -> None:
    assert read("Ann has a <extra_id_0> hat", labelled=False).inputs == "Ann has a <extra_id_0> hat"
    assert "<extra_id_0>" in read("Ann has a red hat", labelled=False).inputs


def test_a_blank_line_between_paragraphs_is_left_out() -> None:
    assert read(" ") is None


def test_an_article_that_is_filled_in_counts_in_both_scores() -> None:
    scores = Scorer(Denoising.metrics).score(["the", "a hat"], [["the"], ["a cat"]]).corpus
    assert (scores["exact_match"], scores["rouge1_f1"]) == (50, 75)


@pytest.mark.parametrize(("name", "lines"), [("a.txt", True), ("a.tsv", False)])
def test_lines_are_texts(tmp_path: Path, name: str, *, lines: bool) -> None:
    path = tmp_path / name
    path.write_text("text\tnote\nAnn has a hat\tx\n\nBob has a cat\ty\n" if not lines else "Ann has\n\nBob has\n")
    config = load_config({"model": {"path": "m"}, "task": {"name": "denoising"}, "data": {"train": str(path)}})
    check_sources(config)
    source = describe_split(config, "train")
    assert source is not None and source.header == (("text",) if lines else ())


@pytest.mark.slow
def test_a_run_is_fine_tuned_from_one_that_learned_to_fill_spans(tmp_path: Path, model_folder: Path) -> None:
    rows = [{"text": f"{owner} has a {colour} hat", "colour": colour} for owner in kit.OWNERS for colour in kit.COLOURS]
    data = {"train": rows, "eval": rows, "cache_dir": str(tmp_path / "cache")}
    fast = {"train.num_steps": 1, "eval.every_steps": 1, "eval.at_start": False}
    recipe = {**kit.recipe(tmp_path, model_folder, task={"name": "denoising", "copies": 2}), "data": data}
    first = fivetune.train({**recipe, "run": {"dir": str(tmp_path / "first")}}, fast, quiet=True, preflight=False)
    assert first.evals[-1].num_examples == 2 * len(rows)
    task = {"name": "classification", "inputs": "{text}", "label": "colour"}
    later = kit.recipe(tmp_path, first.folder / "model", task=task)
    second = fivetune.train({**later, "data": data}, fast, quiet=True, preflight=False)
    assert kit.weights_of(second.folder) != kit.weights_of(first.folder)
    assert second.predict(rows[:1])[0].prediction in kit.COLOURS
