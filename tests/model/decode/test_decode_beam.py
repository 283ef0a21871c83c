"""Beam search and the rules of decoding: the sequences and scores of transformers' generate, in every family."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import kit
import pytest
from decoding_kit import lively, question_store

from fivetune.data.store.batch import collate, pad
from fivetune.errors import ConfigError
from fivetune.model.decode import Decoding, generate

CAP = 12
OTHERS = [family for family in kit.FAMILIES if family != "t5"]
RULES = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 5},
    {"suppressed_ids": (3, 5, 8, 9, 40)},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "suppressed_ids": (4, 7)},
]
SEARCHES = [
    {},
    {"early_stopping": False},
    {"early_stopping": True},
    {"early_stopping": "never"},
    {"early_stopping": False, "length_penalty": 2.0},
    {"early_stopping": "never", "length_penalty": 0.4},
    {"early_stopping": True, "length_penalty": -1.0},
    {"early_stopping": "never", "length_penalty": 0.0},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory, model_folder):
    return question_store(tmp_path_factory.mktemp("data"), model_folder, num_questions=11)


def ours(model, store, rows, **settings):
    decoding = Decoding(CAP, batch_size=4, score_targets=False, **settings)
    return {one.row: one for one in generate(model, store, rows, decoding, device="cpu", autocast=nullcontext)}


def theirs(model, store, rows, *, suppressed_ids=(), num_candidates=1, **settings):
    """transformers' sequences up to the end token and their scores, by row; early stopping only where it has beams."""
    batch = pad(collate(store, rows), pad_id=0)
    options = {
        "max_new_tokens": CAP,
        "do_sample": False,
        "suppress_tokens": list(suppressed_ids) or None,
        "num_return_sequences": num_candidates,
        "output_scores": True,
        "return_dict_in_generate": True,
    }
    out = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **options, **settings)
    written = [ids[: ids.index(1)] if 1 in ids else ids for ids in out.sequences[:, 1:].tolist()]
    if "num_beams" in settings:
        return written, out.sequences_scores.tolist()
    steps = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    return written, [s[: len(ids) + 1].sum().item() for s, ids in zip(steps, written, strict=True)]


@pytest.mark.parametrize("family, rule", [*product(["t5"], RULES), *product(OTHERS, (RULES[0], RULES[-1]))], ids=str)
def test_greedy_writes_and_scores_as_transformers(family_folders, store, family, rule):
    model, rows = lively(family_folders[family]), range(len(store))
    got = ours(model, store, rows, **rule)
    written, logprobs = theirs(model, store, list(rows), **rule)
    assert [got[row].token_ids for row in rows] == written
    assert [got[row].logprob for row in rows] == pytest.approx(logprobs, rel=3e-5, abs=1e-5)
    assert all(got[row].num_scored_tokens == len(ids) + (not got[row].hit_cap) for row, ids in enumerate(written))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, search",
    [*product(["t5"], [*SEARCHES, *RULES[1:]]), *product(OTHERS, (SEARCHES[1], SEARCHES[4], RULES[-1]))],
    ids=str,
)
def test_beams_find_and_score_what_transformers_does(family_folders, store, family, search):
    model, rows = lively(family_folders[family]), range(len(store))
    settings = {"num_beams": 4, "num_candidates": 3, "length_penalty": 1.0, "early_stopping": False, **search}
    got = ours(model, store, rows, **settings)
    written, scores = theirs(model, store, list(rows), **settings)
    found = [one for row in rows for one in got[row].candidates]
    assert [ids for ids, _ in found] == written
    lengths = [min(len(ids) + 1, CAP) for ids, _ in found]
    ranked = [p / n ** settings["length_penalty"] for (_, p), n in zip(found, lengths, strict=True)]
    assert ranked == pytest.approx(scores, rel=1e-5, abs=1e-5)
    assert all((one.token_ids, one.logprob) == one.candidates[0] for one in got.values())


def test_answers_end_at_different_lengths_in_these_tests(family_folders, store):
    """Otherwise nothing is dropped from a batch, and the tests above say little."""
    for family in kit.FAMILIES:
        for settings in ({}, {"num_beams": 4}):
            answers = ours(lively(family_folders[family]), store, range(len(store)), **settings)
            assert len({len(one.token_ids) for one in answers.values()}) > 2, (family, settings)


def test_long_answers_outgrow_the_first_cache(model_folder, store, monkeypatch):
    monkeypatch.setattr("fivetune.model.decode.cache.FIRST_STEPS", 2)
    model = lively(model_folder)
    for settings in ({}, {"num_beams": 3}):
        got = ours(model, store, range(5), min_new_tokens=9, **settings)
        assert [got[row].token_ids for row in range(5)] == theirs(
            model, store, [*range(5)], min_new_tokens=9, **settings
        )[0]


@pytest.mark.parametrize("wrong", [{"num_candidates": 2}, {"early_stopping": "always"}, {"label_ids": ((),)}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match="decoding: "):
        Decoding(4, **wrong)
