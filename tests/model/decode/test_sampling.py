"""Sampling: transformers' distribution, and the same answers whatever runs beside them."""

from __future__ import annotations

from contextlib import nullcontext

import kit
import numpy as np
import pytest
import torch
from decoding_kit import lively, question_store
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fivetune.errors import ConfigError
from fivetune.model.decode import Decoding, Sampling, generate, to_text
from fivetune.model.decode.sampling import draw_tokens, draw_uniforms
from fivetune.model.load import load_model_and_tokenizer

OTHERS = [family for family in kit.FAMILIES if family != "t5"]
WAYS = [
    Sampling(),
    Sampling(0.6),
    Sampling(1.7, top_k=3),
    Sampling(0.8, top_p=0.7),
    Sampling(1.3, top_k=40, top_p=0.9),
    Sampling(3.0, top_p=0.98),
    Sampling(1.0, top_k=1),
    Sampling(1.0, top_p=1e-6),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory, model_folder):
    return question_store(tmp_path_factory.mktemp("data"), model_folder, num_questions=14)


def answer(model, store, sampling, rows=None, **settings):
    decoding = Decoding(**{"max_new_tokens": 10, "score_targets": False, "sampling": sampling, **settings})
    rows = range(len(store)) if rows is None else rows
    found = generate(model, store, rows, decoding, device="cpu", autocast=nullcontext)
    return {one.row: one for one in found}


def compute_deviation(observed, expected):
    """How many standard deviations the chi-square statistic is above its mean (Wilson and Hilferty 1931)."""
    freedom = len(observed) - 1
    statistic = sum((a - b) ** 2 / b for a, b in zip(observed, expected, strict=True))
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - 1 + spread) / spread**0.5


def warp(scores, sampling):
    """What transformers draws from."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)] if sampling.temperature != 1 else [])
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    return steps(torch.zeros(len(scores), 1, dtype=torch.int64), scores.clone()).softmax(-1)


@pytest.mark.parametrize("sampling", WAYS, ids=str)
@pytest.mark.parametrize("size", [50, 700])
def test_tokens_have_the_probabilities_of_transformers(sampling, size):
    """At evenly spaced uniform numbers a token is drawn as often as its probability, but for one draw at either end."""
    torch.manual_seed(1)
    scores, num = torch.randn(2, size) * 2, 4_000
    scores[:, ::7] = -torch.inf
    expected = warp(scores, sampling)
    uniforms = (torch.arange(num) + 0.5) / num
    for row in range(2):
        ids, logprobs = draw_tokens(scores[row].expand(num, -1).clone(), sampling, uniforms)
        counts = ids.bincount(minlength=size)
        assert (counts / num - expected[row]).abs().max() <= 1.01 / num
        assert not counts[expected[row] == 0].any()
        plain = scores[row].log_softmax(-1)[ids]
        torch.testing.assert_close(logprobs, plain, rtol=1e-4, atol=1e-4)


def test_small_shares_beside_a_large_one_are_not_lost():
    """A running sum in fp32 stays 1 when each of them is added."""
    scores = torch.full((3, 30_000), -17.0)
    scores[:, 5] = 0.0
    small = 29_999 * np.exp(-17.0) / (1 + 29_999 * np.exp(-17.0))
    uniforms = torch.tensor([1 - 1.01 * small, 1 - 0.99 * small, 1 - 0.5 * small], dtype=torch.float32)
    drawn = draw_tokens(scores, Sampling(), uniforms)[0].tolist()
    assert drawn[0] == 5 and drawn[1] == pytest.approx(300, abs=10) and drawn[2] == pytest.approx(15_000, abs=30)


def test_uniforms_are_uniform_and_differ_by_all_that_names_them():
    ids = np.array([5, 6, 1], np.int32)
    table = draw_uniforms(3, [ids], 200, 50)
    assert table.min() >= 0 and table.max() < 1
    assert compute_deviation(np.histogram(table, 20, (0, 1))[0], [len(table.flat) / 20] * 20) < 3
    assert len(np.unique(table)) > 9_980
    others = [draw_uniforms(4, [ids], 1, 50), draw_uniforms(3, [ids[:2]], 1, 50), table[1:2]]
    for other in others:
        assert abs(np.corrcoef(table[0], other[0])[0, 1]) < 0.5
    assert np.array_equal(draw_uniforms(3, [ids.astype(np.int64)], 3, 50), table[:3])


@pytest.mark.parametrize("family", ["t5", *OTHERS])
def test_answers_are_as_frequent_as_transformers_draws_them(family_folders, store, family):
    """Two tokens of one input, against the product of both steps' probabilities."""
    model = lively(family_folders[family])
    sampling = Sampling(6.0, top_k=5, top_p=0.95, seed=1)
    row, num = 3, 1_500
    found = answer(model, store, sampling, [row], max_new_tokens=2, num_candidates=num, batch_size=500)[row]
    assert len(found.candidates) == num and found.candidates[0] == (found.token_ids, found.logprob)
    counts: dict[tuple[int, ...], int] = {}
    for ids, _ in found.candidates:
        counts[tuple(ids)] = counts.get(tuple(ids), 0) + 1
    expected = list_answers(model, store.inputs[row].tolist(), sampling)
    assert set(counts) <= set(expected)
    assert len(expected) > 4
    observed = [counts.get(ids, 0) for ids in expected]
    assert compute_deviation(observed, [share * num for share in expected.values()]) < 3


@torch.no_grad()
def list_answers(model, ids, sampling):
    """The probability of every answer of at most two tokens."""
    found: dict[tuple[int, ...], float] = {}
    inputs = torch.tensor([ids])
    first = warp(
        model(input_ids=inputs, decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64)).logits[:, -1], sampling
    )
    for token in first[0].nonzero()[:, 0].tolist():
        share = first[0, token].item()
        if token == 1:
            found[()] = share
            continue
        second = warp(model(input_ids=inputs, decoder_input_ids=torch.tensor([[0, token]])).logits[:, -1], sampling)
        for next_token in second[0].nonzero()[:, 0].tolist():
            answer = (token,) if next_token == 1 else (token, next_token)
            found[answer] = share * second[0, next_token].item()
    return found


@pytest.mark.parametrize("family", ["t5", *OTHERS])
def test_answers_do_not_depend_on_the_batch_or_the_order(family_folders, store, family):
    model = lively(family_folders[family])
    sampling = Sampling(1.2, top_p=0.9, seed=5)
    together = answer(model, store, sampling, batch_size=64)
    for rows, batch_size in (([*range(len(store))], 3), ([9, 2, 5], 2), ([2], 1)):
        found = answer(model, store, sampling, rows, batch_size=batch_size)
        assert {row: one.token_ids for row, one in found.items()} == {row: together[row].token_ids for row in rows}
    several = answer(model, store, sampling, num_candidates=3, batch_size=4)
    assert {row: one.token_ids for row, one in several.items()} == {row: one.token_ids for row, one in together.items()}
    more = answer(model, store, sampling, [4, 5], num_candidates=5, batch_size=4)  # more answers than a batch has slots
    for row in (4, 5):
        first = [ids for ids, _ in more[row].candidates[:3]]
        assert first == [ids for ids, _ in several[row].candidates]
    other = answer(model, store, Sampling(1.2, top_p=0.9, seed=6))
    assert any(other[row].token_ids != one.token_ids for row, one in together.items())


def test_an_answer_ends_as_soon_as_it_has_a_stop_text(model_folder, store):
    loaded = load_model_and_tokenizer(str(model_folder))
    model = lively(model_folder)
    for sampling in (None, Sampling(1.5, seed=2)):
        whole = answer(model, store, sampling)
        longest = max((one.token_ids for one in whole.values()), key=len)
        stop = to_text(loaded.tokenizer, longest[: len(longest) // 2 + 1])[-2:]
        decoding = Decoding(10, score_targets=False, sampling=sampling, stop=("\n", stop), batch_size=5)
        found = generate(
            model, store, range(14), decoding, device="cpu", autocast=nullcontext, tokenizer=loaded.tokenizer
        )
        num_stopped = 0
        for one in found:
            ids = whole[one.row].token_ids
            ends = [end for end in range(1, len(ids)) if stop in to_text(loaded.tokenizer, ids[:end])]
            num_stopped += bool(ends)
            assert one.token_ids == ids[: (ends or [len(ids)])[0]]
            assert not (ends and one.hit_cap)
        assert num_stopped


def test_a_low_temperature_is_greedy_search(model_folder, store):
    model = lively(model_folder)
    greedy = answer(model, store, None)
    cold = answer(model, store, Sampling(1e-3))
    assert {row: one.token_ids for row, one in cold.items()} == {row: one.token_ids for row, one in greedy.items()}
    assert [cold[row].logprob for row in cold] == pytest.approx([greedy[row].logprob for row in cold], abs=1e-4)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}]
)
def test_impossible_sampling_is_refused(wrong):
    with pytest.raises(ConfigError, match="decoding: "):
        Sampling(**wrong)


def test_sampling_with_beams_is_refused():
    with pytest.raises(ConfigError, match="num_beams"):
        Decoding(4, num_beams=2, sampling=Sampling())
