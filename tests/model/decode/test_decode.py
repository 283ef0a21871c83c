"""Generation: the same tokens as transformers alone, every row once, no sentinels."""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial

import kit
import pytest
import torch
from decoding_kit import lively, question_store

from fivetune.data.corpus import CHECKPOINT
from fivetune.data.examples import Source
from fivetune.data.store.batch import collate, pad
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import load_or_build_store
from fivetune.distributed.sharding import GATHER
from fivetune.distributed.world import World
from fivetune.model.decode import Decoding, estimate_max_new_tokens, generate, group_by_length, to_text
from fivetune.model.decode.greedy import DONE, RUNNING
from fivetune.model.decode.logits import LogitsProcessor
from fivetune.model.decode.steps import Decoder
from fivetune.model.forward import compute_padded_losses
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.precision import cast_weights
from fivetune.model.tokenizer import list_sentinel_ids
from fivetune.model.weight_cache import join_projections
from fivetune.tasks.squad_v2 import SQuADV2

FAMILIES = list(kit.FAMILIES)


@pytest.fixture(scope="module")
def store(tmp_path_factory, model_folder):
    return question_store(tmp_path_factory.mktemp("data"), model_folder, num_questions=14)


def _generate(model, store, decoding: Decoding, rows=None):
    rows = range(len(store)) if rows is None else rows
    return list(generate(model, store, rows, decoding, device="cpu", autocast=nullcontext))


@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens_as_transformers_one_by_one(family_folders, store, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model.eval()
    for one in _generate(model, store, Decoding(max_new_tokens=9, batch_size=5)):
        inputs = torch.tensor([store.inputs[one.row].tolist()])
        theirs = model.generate(input_ids=inputs, max_new_tokens=9, num_beams=1, do_sample=False)[0, 1:].tolist()
        ended = 1 in theirs
        assert one.token_ids == (theirs[: theirs.index(1)] if ended else theirs)
        assert one.hit_cap is not ended


@pytest.mark.parametrize("family", FAMILIES)
def test_products_of_one_input_need_no_copy_of_their_weights(family_folders, store, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model.eval()
    expected = _generate(model, store, Decoding(9, batch_size=5))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    join_projections(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert _generate(model, store, Decoding(9, batch_size=5)) == expected
    own = model.encoder.block[0].layer[0].SelfAttention
    weights = own.q.weight, own.k.weight, own.v.weight
    with torch.no_grad():
        assert cast_weights(*weights).data_ptr() == own.q.weight.data_ptr()
    cast_weights(*weights).sum().backward()
    assert all(torch.equal(weight.grad, torch.ones_like(weight)) for weight in weights)


def test_every_row_comes_once(model_folder, store):
    model = load_model_and_tokenizer(str(model_folder)).model
    rows = [11, 3, 8, 0]
    assert sorted(one.row for one in _generate(model, store, Decoding(2, batch_size=3), rows)) == sorted(rows)
    assert sorted(one.row for one in _generate(model, store, Decoding(2, batch_size=4))) == list(range(14))
    assert _generate(model, store, Decoding(2), rows=[]) == []


def test_longest_first():
    assert group_by_length([3, 9, 5, 9], 2) == [[1, 3], [2, 0]]
    assert group_by_length([], 4) == []


@pytest.mark.parametrize("cap", [1, 3])
def test_cap_is_a_limit_and_is_told(model_folder, store, cap):
    model = load_model_and_tokenizer(str(model_folder)).model
    generated = _generate(model, store, Decoding(max_new_tokens=cap, suppressed_ids=(1,)))
    assert all(one.hit_cap and len(one.token_ids) == cap for one in generated)


def test_answer_that_ends_within_the_cap_has_not_hit_it(model_folder, store):
    model = load_model_and_tokenizer(str(model_folder)).model
    others = tuple(range(2, 384))
    generated = _generate(model, store, Decoding(max_new_tokens=1, suppressed_ids=(0, *others)))
    assert all(one.token_ids == [] and not one.hit_cap for one in generated)


def test_suppressed_sentinels_are_never_written(model_folder, store):
    """A model that wants to write sentinels: their rows are what the decoder says."""
    loaded = load_model_and_tokenizer(str(model_folder))
    sentinels = set(list_sentinel_ids(loaded.tokenizer))
    free = _generate(loaded.model, store, Decoding(max_new_tokens=6))
    favourite = free[0].token_ids[0]
    with torch.no_grad():
        loaded.model.shared.weight[sorted(sentinels)] = 3 * loaded.model.shared.weight[favourite]
    tempted = _generate(loaded.model, store, Decoding(max_new_tokens=6))
    assert any(sentinels.intersection(one.token_ids) for one in tempted)
    kept = _generate(loaded.model, store, Decoding(max_new_tokens=6, suppressed_ids=tuple(sentinels)))
    assert not any(sentinels.intersection(one.token_ids) for one in kept)


def test_target_and_phrase_loss_are_teacher_forced(model_folder, store):
    loaded = load_model_and_tokenizer(str(model_folder))
    phrase = tuple(loaded.tokenizer("unanswerable").input_ids)
    for one in _generate(loaded.model, store, Decoding(2, batch_size=3, phrase_ids=phrase)):
        alone = pad(collate(store, [one.row]), pad_id=0)
        with torch.no_grad():
            nats = compute_padded_losses(loaded.model.eval(), alone).sum().item()
        assert math.isclose(one.target_loss, nats, rel_tol=1e-5)
        if store.read_example(one.row).targets == "unanswerable":
            assert math.isclose(one.phrase_loss, nats, rel_tol=1e-5)


def test_the_pass_that_scores_a_phrase_is_the_first_step_too(model_folder, store, monkeypatch):
    model = load_model_and_tokenizer(str(model_folder)).model.eval()
    passes: list[tuple[int, ...]] = []
    run_stack = Decoder.run_stack

    def count(self, ids, *rest):
        passes.append(tuple(ids.shape))
        return run_stack(self, ids, *rest)

    monkeypatch.setattr(Decoder, "run_stack", count)
    alone = _generate(model, store, Decoding(9, batch_size=14, score_targets=False))
    num_steps = len(passes)
    passes.clear()
    scored = _generate(model, store, Decoding(9, batch_size=14, score_targets=False, phrase_ids=(7, 8, 1)))
    assert passes[0] == (14, 3) and len(passes) == num_steps > 2
    assert [one.token_ids for one in scored] == [one.token_ids for one in alone]
    assert [one.logprob for one in scored] == pytest.approx([one.logprob for one in alone], abs=1e-4)
    passes.clear()
    _generate(model, store, Decoding(9, batch_size=5, score_targets=False, phrase_ids=(7, 8, 1)))
    assert passes[0] == (5, 3) and (5, 1) in passes  # slots that are filled later begin in a step of all


def test_a_rank_without_rows_gathers_the_weights_of_every_step(model_folder, store, monkeypatch):
    """Beside a rank whose answers take four steps: a step that one of them left out would let the other wait."""
    model = load_model_and_tokenizer(str(model_folder)).model.eval()
    needs = iter([1, 1, RUNNING, RUNNING, RUNNING, DONE, 0])
    monkeypatch.setattr(World, "all_reduce_max", lambda self, own: max(own, next(needs)))
    passes: list[object] = []

    def gather(run, *inputs, module):
        passes.append(module)
        return run(module, *inputs)

    last = model.decoder.block[-1]
    for module in (model, last):
        vars(module)[GATHER] = partial(gather, module=module)
    decoding = Decoding(9, score_targets=False, phrase_ids=(7, 8, 1))
    assert not [*generate(model, store, [], decoding, device="cpu", autocast=nullcontext, world=World(size=2))]
    assert passes.count(last) == 1 + 4  # the phrase and the steps


@pytest.mark.parametrize("mode", [True, False])
def test_model_keeps_its_mode(model_folder, store, mode):
    model = load_model_and_tokenizer(str(model_folder)).model.train(mode)
    generator = generate(model, store, range(14), Decoding(2, batch_size=2), device="cpu", autocast=nullcontext)
    next(generator)
    assert not model.training
    generator.close()  # broken off in the middle
    assert model.training is mode


def test_caller_is_not_under_autocast(model_folder, store):
    model = load_model_and_tokenizer(str(model_folder)).model
    half = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    for _ in generate(model, store, range(5), Decoding(2, batch_size=2), device="cpu", autocast=half):
        assert not torch.is_autocast_enabled("cpu")


def test_cap_from_the_lengths_of_the_targets():
    assert [estimate_max_new_tokens(p99) for p99 in (1, 4, 16, 100)] == [6, 9, 24, 129]


def test_text_of_ids(model_folder):
    words = load_model_and_tokenizer(str(model_folder)).tokenizer
    ids = words("<extra_id_0> red hat", add_special_tokens=False).input_ids
    assert to_text(words, ids) == "red hat"
    assert to_text(words, ids, keep_special=True).startswith("<extra_id_0>")
    assert to_text(words, []) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beams", "num"),
    [({}, 60), ({"num_beams": 4}, 30), kit.release({}, 500), kit.release({"num_beams": 4}, 500)],
    ids=str,
)
def test_real_questions_get_the_same_tokens_as_from_transformers(tmp_path, beams, num):
    """t5-nano is a trained model: it ends its answers itself."""
    dev = kit.SHARED / "data" / "squad_v2" / "dev-v2.0.json.gz"
    if not dev.is_file():
        pytest.skip(kit.NEEDS_SHARED)
    loaded = load_model_and_tokenizer(str(CHECKPOINT))
    source = Source((str(dev),), SQuADV2(), LengthLimits(256, 128, "truncate"), max_examples=num)
    real = load_or_build_store(source, loaded.tokenizer, cache=tmp_path)
    ours = {one.row: one for one in _generate(loaded.model, real, Decoding(16, score_targets=False, **beams))}
    by_length = torch.tensor(sorted(range(len(real)), key=lambda row: len(real.inputs[row])))  # pads little
    for rows in by_length.split(64):
        batch = pad(collate(real, rows.tolist()), pad_id=0)
        options = {"max_new_tokens": 16, "do_sample": False, **beams}
        theirs = loaded.model.eval().generate(batch.input_ids, attention_mask=batch.attention_mask, **options)[:, 1:]
        for row, ids in zip(rows.tolist(), theirs.tolist(), strict=True):
            assert ours[row].token_ids == (ids[: ids.index(1)] if 1 in ids else ids)
    assert 0 < sum(one.hit_cap for one in ours.values()) < len(real)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_log_probabilities_of_finished_rows_stay_fixed_in_large_batches(family_folders, tmp_path, family):
    """In a batch of 64 a row that has ended stays for several steps, until an eighth of the rows can leave."""
    model = lively(family_folders[family])
    many = question_store(tmp_path, family_folders[family], num_questions=64)
    decoding = {"max_new_tokens": 12, "score_targets": False}
    together = {one.row: one for one in _generate(model, many, Decoding(batch_size=64, **decoding))}
    lengths = {len(one.token_ids) for one in together.values()}
    assert len(lengths) > 2
    for one in _generate(model, many, Decoding(batch_size=1, **decoding)):
        assert together[one.row].token_ids == one.token_ids
        assert math.isclose(together[one.row].logprob, one.logprob, rel_tol=1e-4, abs_tol=1e-4)


@pytest.mark.parametrize("beams", [{}, {"num_beams": 3}], ids=str)
def test_a_start_token_other_than_pad(model_folder, store, beams):
    model = load_model_and_tokenizer(str(model_folder)).model.eval()
    from_pad = {one.row: one.token_ids for one in _generate(model, store, Decoding(9, **beams))}
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 7
    ours = {one.row: one for one in _generate(model, store, Decoding(9, **beams))}
    assert {row: one.token_ids for row, one in ours.items()} != from_pad
    for row, one in ours.items():
        inputs = torch.tensor([store.inputs[row].tolist()])
        theirs = model.generate(input_ids=inputs, max_new_tokens=9, do_sample=False, **beams)[0]
        assert theirs[0] == 7
        ids = theirs[1:].tolist()
        assert one.token_ids == (ids[: ids.index(1)] if 1 in ids else ids)
        batch = pad(collate(store, [row]), pad_id=0)
        with torch.no_grad():
            assert math.isclose(one.target_loss, compute_padded_losses(model, batch).sum().item(), rel_tol=1e-5)


def test_slots_are_filled_while_others_run(model_folder, tmp_path, monkeypatch):
    """Batches that are answered one after another need as many steps as the longest answer of each."""
    model = lively(model_folder)
    many = question_store(tmp_path, model_folder, num_questions=64)
    steps = []
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda self, ids, *others: steps.append(len(ids)) or step(self, ids, *others))
    answers = {one.row: one for one in _generate(model, many, Decoding(12, batch_size=8, score_targets=False))}
    in_batches = group_by_length(many.inputs.lengths, 8)
    assert len(steps) < 0.9 * sum(max(answers[row].num_scored_tokens for row in batch) for batch in in_batches)
    assert sum(steps) < 1.3 * sum(one.num_scored_tokens for one in answers.values())
    for one in _generate(model, many, Decoding(12, batch_size=64, score_targets=False)):
        assert answers[one.row].token_ids == one.token_ids
        assert math.isclose(answers[one.row].logprob, one.logprob, rel_tol=1e-4, abs_tol=1e-4)


@pytest.mark.parametrize("family", ["t5", "mt5"])
def test_bf16_scores_as_fp32_does(family_folders, store, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model
    exact = {one.row: one for one in _generate(model, store, Decoding(6))}
    half = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    for one in generate(model, store, range(len(store)), Decoding(6), device="cpu", autocast=half):
        assert one.target_loss == pytest.approx(exact[one.row].target_loss, rel=5e-3)


@pytest.mark.parametrize(
    "rules", [{"suppressed_ids": range(100, 200)}, {"repetition_penalty": 9.0}, {"min_new_tokens": 2}], ids=str
)
@pytest.mark.parametrize("num_beams", [1, 6])
def test_all_that_search_may_choose_is_computed_in_fp32(model_folder, rules, num_beams):
    """In bf16, where a rule puts the tokens with the best logits back; recomputed ones have more bits than bf16."""
    torch.manual_seed(0)
    model, eos = load_model_and_tokenizer(str(model_folder)).model.eval(), 1
    tempting = [eos] if "min_new_tokens" in rules else [*range(100, 200)]
    hidden, head = torch.randn(3, model.config.d_model), torch.randn_like(model.lm_head.weight)
    head[tempting] += hidden.sum(0)
    model.lm_head.weight = torch.nn.Parameter(head)
    processor = LogitsProcessor(Decoding(9, num_beams=num_beams, **rules), eos, "cpu")
    rank = partial(processor.apply, step=0, written=torch.tensor(tempting).expand(3, -1))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = Decoder(model, num_beams=num_beams, max_steps=2).compute_logits(hidden, rank)
    exact, is_exact = hidden @ head.t(), found != found.bfloat16()
    assert is_exact.sum(1).tolist() == [max(8, 2 * num_beams)] * 3 and not is_exact[:, tempting].any()
    torch.testing.assert_close(found[is_exact], exact[is_exact])
    assert torch.equal(rank(found).argmax(1), rank(exact).argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("num", [100, kit.release(500)])
def test_bf16_answers_differ_from_fp32_only_at_ties(tmp_path, num):
    dev = kit.SHARED / "data" / "squad_v2" / "dev-v2.0.json.gz"
    if not dev.is_file():
        pytest.skip(kit.NEEDS_SHARED)
    loaded = load_model_and_tokenizer(str(CHECKPOINT))
    source = Source((str(dev),), SQuADV2(), LengthLimits(256, 128, "truncate"), max_examples=num)
    real = load_or_build_store(source, loaded.tokenizer, cache=tmp_path)
    decoding, rows, half = Decoding(16, score_targets=False), range(num), torch.autocast("cpu", dtype=torch.bfloat16)
    exact = {one.row: one.token_ids for one in _generate(loaded.model, real, decoding)}
    rounded = {
        one.row: one.token_ids
        for one in generate(loaded.model, real, rows, decoding, device="cpu", autocast=lambda: half)
    }
    different = [row for row in rows if exact[row] != rounded[row]]
    # 13 of 500 with AVX512-BF16. This model is not fine-tuned: the tokens that it takes there have probabilities of
    # 0.03 to 0.32, with others as probable. A trained model gives the same answers to 99 %: docs/performance.md.
    assert len(different) < max(10, num // 25)
    for row in different:
        ours, theirs = [*exact[row], 1], [*rounded[row], 1]
        at = next(i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1])
        written = torch.tensor([[0, *ours[:at]]])
        with torch.no_grad():
            logits = loaded.model.eval()(
                input_ids=torch.tensor([real.inputs[row].tolist()]), decoder_input_ids=written
            ).logits[0, -1]
        assert logits[ours[at]] - logits[theirs[at]] < 0.07  # in nats; at most 0.034 with AVX512-BF16
