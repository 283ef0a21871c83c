"""Label sets and teacher-forced scores: one pass over a tree says what transformers says sequence by sequence."""

from __future__ import annotations

from contextlib import nullcontext

import kit
import pytest
import torch
from decoding_kit import lively, question_store

from fivetune.data.store.batch import PaddedBatch, collate, pad
from fivetune.data.store.ragged import concatenate_rows
from fivetune.model.decode import Decoding, generate
from fivetune.model.forward import compute_padded_losses
from fivetune.model.load import load_model_and_tokenizer

LABELS = ((7, 1), (9, 1), (7, 12, 1), (7, 12, 30, 1), (1,), (40, 41, 1))


@pytest.fixture(scope="module")
def store(tmp_path_factory, model_folder):
    return question_store(tmp_path_factory.mktemp("data"), model_folder, num_questions=9)


def answers(model, store, **settings):
    decoding = Decoding(**{"max_new_tokens": 6, "batch_size": 4, **settings})
    found = generate(model, store, range(len(store)), decoding, device="cpu", autocast=nullcontext)
    return {one.row: one for one in found}


@torch.no_grad()
def logprob(model, store, row, ids) -> float:
    batch = pad(collate(store, [row]), pad_id=0)
    return (
        -compute_padded_losses(model.eval(), PaddedBatch(batch.input_ids, batch.attention_mask, torch.tensor([ids])))
        .sum()
        .item()
    )


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_labels_are_scored_as_sequences(family_folders, store, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model
    for row, one in answers(model, store, label_ids=LABELS).items():
        expected = [logprob(model, store, row, ids) for ids in LABELS]
        assert one.label_logprobs == pytest.approx(expected, rel=1e-5)
        best = LABELS[expected.index(max(expected))]
        assert (one.token_ids, one.num_scored_tokens) == (list(best[:-1]), len(best))
        assert one.logprob == max(one.label_logprobs)
        assert not one.hit_cap


def test_a_label_task_encodes_once_and_decodes_in_one_pass(model_folder, store, monkeypatch):
    """Four positions for three one-token labels: the start token, and each label's first."""
    model = load_model_and_tokenizer(str(model_folder)).model
    embedded = []
    for stack in (model.encoder, model.decoder):
        stack.embed_tokens.register_forward_hook(lambda _m, ids, _out: embedded.append(tuple(ids[0].shape)))
    answers(model, store, label_ids=((7, 1), (8, 1), (9, 1)), batch_size=9, score_targets=False)
    num_tokens = int(store.inputs.lengths.sum())
    assert embedded in ([(num_tokens,), (9, 4)], [(num_tokens,), (num_tokens,), (9, 4), (9, 4)])  # one module or two


def test_leaving_the_label_set_is_what_generation_would_do(model_folder, store):
    model = lively(model_folder)
    free = answers(model, store)
    written = sorted({(*one.token_ids, 1) for one in free.values() if not one.hit_cap})
    assert len(written) > 3
    for labels in ([(7, 1)], written[:1], [*written[2:], (300, 1)]):
        chosen = answers(model, store, label_ids=tuple(labels))
        for row, one in chosen.items():
            assert one.left_label_set is ((*free[row].token_ids, 1) not in labels)


def test_leaving_the_label_set_heeds_what_is_suppressed(model_folder, store):
    model = load_model_and_tokenizer(str(model_folder)).model
    others = tuple(i for i in range(384) if i not in (1, 7))
    kept = answers(model, store, label_ids=((7, 1), (1,)), suppressed_ids=others)
    free = answers(model, store, suppressed_ids=others)
    assert {row: one.left_label_set for row, one in kept.items()} == {
        row: one.token_ids not in ([7], []) or one.hit_cap for row, one in free.items()
    }


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_target_phrase_and_labels_in_one_pass(family_folders, store, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model
    everything = answers(model, store, label_ids=LABELS[:2], phrase_ids=LABELS[2])
    for row, one in everything.items():
        assert -one.target_loss == pytest.approx(logprob(model, store, row, store.labels[row].tolist()), rel=1e-5)
        assert -one.phrase_loss == pytest.approx(logprob(model, store, row, LABELS[2]), rel=1e-5)


def test_a_target_is_correct_if_greedy_decoding_writes_it(model_folder, store, monkeypatch):
    model = load_model_and_tokenizer(str(model_folder)).model
    assert not any(one.target_correct for one in answers(model, store).values())
    written = {row: one.token_ids for row, one in answers(model, store).items()}
    own = [torch.tensor(written[row]).numpy() for row in range(len(store))]
    own[3] = own[3][::-1].copy() + 2
    monkeypatch.setattr(store, "labels", Rows(own))
    assert [one.target_correct for _, one in sorted(answers(model, store).items())] == [row != 3 for row in range(9)]


class Rows(list):
    """Stands in for a store's ragged array."""

    @property
    def lengths(self):
        return torch.tensor([len(row) for row in self]).numpy()

    def gather(self, rows):
        return concatenate_rows([self[row] for row in rows])


def test_targets_are_left_alone_if_nobody_asks(model_folder, store):
    one = answers(load_model_and_tokenizer(str(model_folder)).model, store, score_targets=False)[0]
    assert (one.target_loss, one.target_correct, one.phrase_loss, one.label_logprobs) == (0.0, None, None, None)
