"""Long contexts: every token is asked about, the question stays whole, windows become one answer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import kit
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivetune import rundir
from fivetune.config import load_config
from fivetune.data.store.encode import LengthLimits, encode
from fivetune.data.store.windows import SLACK, compute_window_starts, select_window_targets, split_into_windows
from fivetune.errors import ConfigError
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks.squad import SQuAD
from fivetune.tasks.squad_v2 import SQuADV2
from fivetune.training.run import train
from fivetune.training.setup import set_up
from fivetune.types import RawRecord

CONTEXT = " ".join(f"{owner} has a {colour} hat." for owner in kit.OWNERS for colour in kit.COLOURS)
RECORD = RawRecord({"id": "q", "question": "What has Dan?", "context": CONTEXT, "answer": "grey hat. Eve"}, "a.json:1")
LIMITS = LengthLimits(40, 16, "windows", window_overlap=8)


@given(st.integers(5, 400), st.integers(1, 60), st.integers(0, 80))
def test_windows_cover_everything(span, room, overlap):
    if span <= room:
        return
    starts = compute_window_starts(span, room, overlap)
    assert starts[0] == 0 and starts[-1] + room == span
    assert all(0 < b - a <= room for a, b in pairwise(starts))
    assert len(starts) <= 2 * span / room + 1  # whatever the overlap


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return load_tokenizer(str(tokenizer_folder), kit.SHARED)


def test_every_window_fits_and_keeps_the_question(tokenizer):
    example = SQuAD().to_text(RECORD)
    cut = split_into_windows(tokenizer, [example], LIMITS)
    assert len(cut) > 3
    assert [one.id for one in cut] == [f"q#{i}" for i in range(1, len(cut) + 1)]
    assert {one.group for one in cut} == {"q"}
    assert all(one.inputs.startswith("question: What has Dan? context: ") for one in cut)
    encoded = list(encode(tokenizer, cut, ["x"] * len(cut), limits=LIMITS))
    assert max(len(one.input_ids) for one in encoded) <= 40
    assert max(len(one.input_ids) for one in encoded[:-1]) > 40 - 3 * SLACK
    assert sum(one.num_clipped_inputs for one in encoded) == 0
    words = " ".join(one.inputs[slice(*one.clippable)] for one in cut)
    assert set(words.split()) >= {word for word in CONTEXT.split() if len(word) > 4}


def test_what_a_window_teaches(tokenizer):
    for task, absent in ((SQuAD(), ()), (SQuADV2(), ("unanswerable",))):
        cut = split_into_windows(tokenizer, [task.to_text(RECORD)], LIMITS)
        taught = [select_window_targets(task, one) for one in cut]
        for one, targets in zip(cut, taught, strict=True):
            assert targets == (("grey hat. Eve",) if "grey hat. Eve" in one.inputs else absent)
        assert ("grey hat. Eve",) in taught


@pytest.mark.parametrize("task", ["gsm8k", "pubmedqa", "stackoverflow_tags", "jsonl", "mixture"])
def test_tasks_without_a_context_to_answer_from_have_no_windows(task):
    with pytest.raises(ConfigError, match=r"^--data.overlong: data.overlong windows .* Use truncate or head_tail\.$"):
        load_config({"model": {"path": "m"}, "task": task}, {"data.overlong": "windows"})


def test_a_short_context_and_a_long_question_stay_as_they_are(tokenizer):
    task, long = SQuAD(), {**RECORD.fields, "question": CONTEXT}
    short = RawRecord({**RECORD.fields, "context": "Dan has a red hat. grey hat. Eve"}, "a.json:2")
    for record in (short, RawRecord(long, "a.json:3")):
        example = task.to_text(record)
        assert split_into_windows(tokenizer, [example], LIMITS) == [example]


def windowed(folder: Path, model: Path, *, overlap: int) -> dict[str, Any]:
    """A recipe that evaluates two questions about one long context."""
    long = {"data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": [
        {"id": "q1", "question": "What has Dan?", "answers": [{"text": "red hat", "answer_start": 6}]},
        {"id": "q2", "question": "What has Zoe?", "answers": [], "is_impossible": True}]}]}]}  # fmt: skip
    (folder / "long.json").write_text(json.dumps(long))
    return kit.recipe(
        folder,
        model,
        data__overlong="windows",
        data__max_input_tokens=40,
        data__window_overlap=overlap,
        data__eval=str(folder / "long.json"),
    )


@pytest.mark.slow
def test_one_answer_per_question(tmp_path, model_folder):
    settings = windowed(tmp_path, model_folder, overlap=8)
    run = train(settings)
    assert run.evals[-1].num_examples == run.evals[-1].scores["total"] == 2
    lines = rundir.read_run(settings["run"]["dir"]).predictions["eval-6"]
    assert sorted(line.id for line in lines) == ["q1", "q2"]
    assert all(line.num_passages > 3 and line.num_clipped_tokens == 0 for line in lines)


def test_window_overlap_decides_how_much_two_windows_share():
    """Part D: nothing noticed when window_overlap was ignored."""
    assert [len(compute_window_starts(100, 20, overlap)) for overlap in (0, 5, 10)] == [5, 7, 9]
    assert compute_window_starts(100, 20, 5)[:2] == [0, 15]


def test_the_recipe_decides_the_overlap(tmp_path, model_folder):
    """Windows of the same size: the more of a window is shared, the more windows a context takes."""
    setups = [set_up(load_config(windowed(tmp_path, model_folder, overlap=overlap))) for overlap in (0, 2, 8)]
    numbers = [len(setup.data.evaluator.store) for setup in setups]
    assert numbers == sorted({*numbers})
