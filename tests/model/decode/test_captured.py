"""Steps that graphs replay, on the CPU with a stand-in for graphs: the answers are those of launched steps."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace

import kit
import pytest
import torch
from decoding_kit import lively, question_store
from graph_kit import Recorder

from fivetune.data.corpus import CHECKPOINT
from fivetune.data.examples import Source
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import load_or_build_store
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.decode import Decoding, Sampling, captured, generate, to_text
from fivetune.model.decode.steps import Decoder
from fivetune.model.load import load_model_and_tokenizer
from fivetune.tasks.jsonl import JSONL
from fivetune.tasks.squad_v2 import SQuADV2

GREEDY = Decoding(12, batch_size=16, score_targets=False)
LABELS = ((7, 1), (9, 1), (7, 12, 1), (214, 1), (127, 1))


@pytest.fixture(scope="module")
def model(model_folder):
    return lively(model_folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory, model_folder):
    """Texts of many lengths."""
    folder = tmp_path_factory.mktemp("data")
    words = ["red hat", "blue cap", "old grey boat", "cat"]
    lines = [
        {"id": str(i), "inputs": f"Ann has a {words[i % 4]}. " * (1 + i * 7 % 13), "targets": words[i % 3]}
        for i in range(500)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = Source((str(folder / "data.jsonl"),), JSONL(), LengthLimits(512, 128, "truncate"))
    return load_or_build_store(source, load_model_and_tokenizer(str(model_folder)).tokenizer, cache=folder)


@pytest.fixture
def recorder(monkeypatch):
    """The CPU counts as a device of graphs, which the stand-in replays; inputs differ in width as long ones do."""
    made = Recorder()
    monkeypatch.setattr(captured, "supports_graphs", lambda device: True)
    monkeypatch.setattr(captured, "get_recorder", lambda device: made)
    monkeypatch.setattr(captured, "WIDTH", 8)
    return made


def answer(model, store, decoding, rows, **others):
    found = generate(model, store, rows, decoding, device="cpu", autocast=nullcontext, **others)
    return {one.row: one for one in found}


def check_same(model, store, decoding, rows=range(40), **others) -> dict:
    """The answers with graphs, which equal those without."""
    launched = answer(model, store, replace(decoding, capture=False), rows, **others)
    notes: list[str] = []
    found = answer(model, store, decoding, rows, on_note=notes.append, **others)
    assert notes == [] and found.keys() == launched.keys()
    for row, one in launched.items():
        mine = found[row]
        assert (mine.token_ids, mine.hit_cap) == (one.token_ids, one.hit_cap)
        assert [ids for ids, _ in mine.candidates] == [ids for ids, _ in one.candidates]
        assert (mine.label_logprobs or ()) == pytest.approx(one.label_logprobs or (), rel=1e-4)
        for a, b in ((mine.logprob, one.logprob), (mine.target_loss, one.target_loss)):
            assert math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-4)
    return found


def test_500_questions_get_the_answers_of_launched_steps(model, store, recorder):
    found = check_same(model, store, replace(GREEDY, batch_size=64), range(500))
    assert len({len(one.token_ids) for one in found.values()}) > 4 and len(recorder.tapes) > 1


def test_500_questions_get_the_labels_of_launched_passes(model, store, recorder):
    found = check_same(model, store, replace(GREEDY, label_ids=LABELS, batch_size=64), range(500))
    assert len({tuple(one.token_ids) for one in found.values()}) > 1 and not recorder.tapes


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 4, "suppressed_ids": (5, 6)},
        {"sampling": Sampling(1.3), "num_candidates": 3, "score_targets": True},
        {"sampling": Sampling(0.8, top_k=20, top_p=0.9), "num_candidates": 40},  # more answers than slots
        {"max_new_tokens": 1},
        {"max_new_tokens": 1, "suppressed_ids": (0, *range(2, 384))},  # every answer ends at once
        {"batch_size": 1},
        {"batch_size": 64},  # more slots than inputs
    ],
    ids=str,
)
def test_rules_and_sampling_are_part_of_the_step(model, store, recorder, options):
    rows = range(0, 300, 20 * options.get("num_candidates", 1))
    check_same(model, store, replace(GREEDY, **options), rows)
    assert recorder.tapes or options.get("max_new_tokens") == 1


def test_stop_texts_are_searched_late(model, store, recorder, model_folder):
    words = load_model_and_tokenizer(str(model_folder)).tokenizer
    free = replace(GREEDY, suppressed_ids=(1,))
    written = [to_text(words, one.token_ids) for one in answer(model, store, free, range(20)).values()]
    letter = next(one for one in sorted(set("".join(written))) if 0 < sum(one in text for text in written) < 20)
    found = check_same(model, store, replace(free, stop=(letter,)), range(20), tokenizer=words)
    assert 0 < sum(one.hit_cap for one in found.values()) < 20 and recorder.tapes


@pytest.mark.parametrize("family", ["mt5", "umt5"])
def test_tables_of_every_layer(family_folders, tmp_path, recorder, family):
    folder = family_folders[family]
    check_same(lively(folder), question_store(tmp_path, folder, num_questions=20), GREEDY, range(20))
    assert recorder.tapes


def test_columns_double_for_longer_answers(model, store, recorder, monkeypatch):
    """Also while slots that have ended, and get no further input, are older than there are columns."""
    for name in ("MOST_COLUMNS", "FEWEST_COLUMNS"):
        monkeypatch.setattr(captured, name, 4)
    drawn = replace(GREEDY, max_new_tokens=40, batch_size=4, sampling=Sampling(1.0, seed=0))
    found = check_same(model, store, drawn, range(12))
    lengths = sorted(len(one.token_ids) for one in found.values())
    assert lengths[0] < 4 < 16 < lengths[-1] and len(recorder.tapes) >= 3, lengths


def test_no_rows_and_a_broken_off_search(model, store, recorder):
    assert answer(model, store, GREEDY, []) == {}
    search = generate(model, store, range(40), GREEDY, device="cpu", autocast=nullcontext)
    next(search)
    search.close()
    assert recorder.num_alive == 0  # nothing refers to the graphs, whose memory would wait


def test_the_least_recently_used_graphs_are_dropped(model, store, recorder, monkeypatch):
    monkeypatch.setattr(captured, "WIDTH", 1)
    alive = []
    recorder.watch = lambda name: alive.append(recorder.num_alive)
    check_same(model, store, replace(GREEDY, batch_size=4), range(0, 500, 9))
    assert len(recorder.tapes) > captured.MAX_GRAPHS == max(alive) - 1


def test_slots_are_filled_in_order_and_tokens_come_late(model, store, recorder, monkeypatch):
    heard = defaultdict(list)
    behind = []
    read = captured.CapturedSteps.read
    monkeypatch.setattr(
        captured.CapturedSteps, "read", lambda self, step: behind.append(self.num_steps - step) or read(self, step)
    )
    found = answer(model, store, GREEDY, range(60), on_token=lambda row, _, token, logprob: heard[row].append(token))
    for row, one in found.items():
        assert heard[row] == ([*one.token_ids] if one.hit_cap else [*one.token_ids, 1])
    lengths = store.inputs.lengths[list(heard)]
    assert all(lengths[:-1] >= lengths[1:])  # in the order of their first tokens
    late = captured.LATE
    assert set(behind[:-late]) == {late + 1} and len(behind) < sum(len(ids) + late for ids in heard.values()) / 14


@pytest.mark.parametrize("where", ["record", "replay"])
def test_a_graph_that_fails_costs_the_graphs_alone(model, store, recorder, where):
    expected = answer(model, store, replace(GREEDY, capture=False), range(40))
    left = [3]

    def watch(name):
        left[0] -= name == where
        if left[0] <= 0:
            raise RuntimeError("out of memory\nmore")

    recorder.watch = watch
    notes: list[str] = []
    found = answer(model, store, GREEDY, range(40), on_note=notes.append)
    assert {row: one.token_ids for row, one in found.items()} == {row: one.token_ids for row, one in expected.items()}
    assert len(notes) == 1 and notes[0].endswith("RuntimeError: out of memory") and recorder.num_alive == 0


def test_a_broken_device_ends_the_search(model, store, recorder):
    def watch(name):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    recorder.watch = watch
    with pytest.raises(FiveTuneEnvironmentError, match=r"--train\.capture off"):
        answer(model, store, GREEDY, range(40))


@pytest.mark.parametrize(
    "options",
    [
        {"capture": False},
        {"num_beams": 2},
        {"label_ids": LABELS},
        {"sampling": Sampling(1.0, top_p=0.9)},
    ],
    ids=str,
)
def test_searches_whose_steps_are_launched(model, recorder, options):
    decoder = Decoder(model, num_beams=1, max_steps=12)
    assert captured.can_capture(decoder, GREEDY)
    assert not captured.can_capture(decoder, replace(GREEDY, **options))


def test_a_device_without_graphs_and_an_adapter(model):
    decoder = Decoder(model, num_beams=1, max_steps=12)
    assert not captured.can_capture(decoder, GREEDY) and decoder.is_plain
    model.decoder.block[0].layer[2].DenseReluDense.wo.register_forward_hook(lambda *_: None)
    assert not Decoder(model, num_beams=1, max_steps=12).is_plain
    model.decoder.block[0].layer[2].DenseReluDense.wo._forward_hooks.clear()


class Graph:
    """A graph that cannot end a capture in which an operation failed, as those of CUDA."""

    failed = False
    num_open = 0

    def capture_begin(self, pool, capture_error_mode):
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        Graph.num_open += 1

    def capture_end(self):
        Graph.num_open -= 1
        if Graph.failed:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        pass


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_recording_that_fails_says_why_and_others_go_on(monkeypatch, error):
    def fail():
        raise error

    for name, stand_in in {
        "CUDAGraph": Graph,
        "Stream": str,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: "pool",
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    record = captured.DeviceRecorder(torch.device("cpu")).record
    monkeypatch.setattr(Graph, "failed", True)
    with pytest.raises(error):
        record(fail)
    monkeypatch.setattr(Graph, "failed", False)
    assert record(lambda: torch.ones(2))().tolist() == [1, 1] and Graph.num_open == 0


def test_the_stand_in_reads_what_was_recorded():
    recorder, state = Recorder(), {"x": torch.ones(2)}
    kept, total = state["x"], torch.zeros(2)
    replay = recorder(lambda: total.add_(state["x"] * 2))
    assert total.tolist() == [0, 0]  # a recording runs nothing
    state["x"] = torch.full((2,), 5.0)
    replay()
    kept += 1
    replay()
    assert total.tolist() == [6, 6]
    del kept
    with pytest.raises(RuntimeError, match="is gone"):
        replay()
    with pytest.raises(RuntimeError, match="not permitted"):
        recorder(lambda: torch.zeros(int(total.sum())))


@pytest.mark.release
@pytest.mark.parametrize("options", [{}, {"label_ids": ((100, 1), (200, 300, 1), (40, 1))}], ids=["greedy", "labels"])
def test_500_real_questions_and_a_trained_model(tmp_path, recorder, monkeypatch, options):
    dev = kit.SHARED / "data" / "squad_v2" / "dev-v2.0.json.gz"
    if not dev.is_file():
        pytest.skip(kit.NEEDS_SHARED)
    monkeypatch.setattr(captured, "WIDTH", 64)
    loaded = load_model_and_tokenizer(str(CHECKPOINT))
    source = Source((str(dev),), SQuADV2(), LengthLimits(256, 128, "truncate"), max_examples=500)
    real = load_or_build_store(source, loaded.tokenizer, cache=tmp_path)
    found = check_same(loaded.model, real, Decoding(16, **options), range(500))
    assert bool(recorder.tapes) != bool(options) and (
        options or len({str(one.token_ids) for one in found.values()}) > 9
    )
