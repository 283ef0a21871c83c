"""Nats of labels: the same as transformers' own loss, whatever the padding."""

from __future__ import annotations

import kit
import pytest
import torch

from fivetune.data.store.batch import IGNORE_INDEX, PaddedBatch
from fivetune.model.forward import compute_padded_losses, find_nonfinite_module, shift_right
from fivetune.model.load import load_model_and_tokenizer

FAMILIES = list(kit.FAMILIES)


def _batch(lengths: list[tuple[int, int]]) -> PaddedBatch:
    """Random examples of the given (input, target) lengths, padded."""
    random = torch.Generator().manual_seed(0)
    width, depth = max(s for s, _ in lengths), max(t for _, t in lengths)
    inputs, labels = torch.zeros(len(lengths), width, dtype=torch.long), torch.full((len(lengths), depth), IGNORE_INDEX)
    for row, (source, target) in enumerate(lengths):
        inputs[row, :source] = torch.randint(3, 200, (source,), generator=random)
        labels[row, :target] = torch.randint(3, 200, (target,), generator=random)
    return PaddedBatch(inputs, (inputs != 0).long(), labels)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_same_as_transformers_loss(family_folders, family):
    model, batch = load_model_and_tokenizer(str(family_folders[family])).model.eval(), _batch([(5, 2), (9, 6), (3, 1)])
    nats = compute_padded_losses(model, batch)
    theirs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
    assert nats.shape == batch.labels.shape and nats.dtype == torch.float32
    assert torch.allclose(nats.sum() / 9, theirs, rtol=1e-6)
    assert (nats[batch.labels == IGNORE_INDEX] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_padding_does_not_change_an_example(family_folders, family):
    model = load_model_and_tokenizer(str(family_folders[family])).model.eval()
    together = _batch([(4, 3), (40, 12), (11, 1)])
    nats = compute_padded_losses(model, together)
    for row, (source, target) in enumerate([(4, 3), (40, 12), (11, 1)]):
        alone = PaddedBatch(
            together.input_ids[row : row + 1, :source],
            together.attention_mask[row : row + 1, :source],
            together.labels[row : row + 1, :target],
        )
        assert torch.allclose(compute_padded_losses(model, alone)[0], nats[row, :target], rtol=1e-5, atol=1e-5)


def test_shift_right_starts_with_the_start_id_and_hides_unscored_labels():
    labels = torch.tensor([[5, 6, 1], [9, 1, IGNORE_INDEX], [1, IGNORE_INDEX, IGNORE_INDEX]])
    assert shift_right(labels, start_id=2, pad_id=0).tolist() == [[2, 5, 6], [2, 9, 1], [2, 1, 0]]
    assert labels[1, 2] == IGNORE_INDEX


def test_first_bad_module_names_where_it_starts(model_folder):
    model, batch = load_model_and_tokenizer(str(model_folder)).model.eval(), _batch([(5, 2)])
    assert find_nonfinite_module(model, batch) == "the loss"
    with torch.no_grad():
        model.decoder.block[1].layer[2].DenseReluDense.wi.weight[0, 0] = float("inf")
    found = find_nonfinite_module(model, batch)
    assert found.startswith("decoder.block.1.layer.2.DenseReluDense.wi (2 of 96 values, the others up to ")
