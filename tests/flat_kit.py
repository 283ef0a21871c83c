"""Small models and batches of flat tokens, and what the padded forward makes of them."""

from __future__ import annotations

from typing import Any

import kit
import torch
from torch import Tensor

from fivetune.data.store.batch import IGNORE_INDEX, pad
from fivetune.model.forward import compute_padded_losses
from fivetune.types import Batch

SHAPES = {**kit.FAMILIES, "byt5": {**kit.FAMILIES["mt5"], "num_layers": 3, "num_decoder_layers": 1}}


def make_model(family: str, *, dropout: float = 0.0, **changes: Any) -> Any:
    """A random model of a family in training mode, with every weight of a size that shows in the loss."""
    import transformers

    settings = {**kit.SHAPE, **SHAPES[family], "vocab_size": 384, "decoder_start_token_id": 0, **changes}
    kind = settings.pop("model_type").upper()
    config = getattr(transformers, f"{kind}Config")(**settings, dropout_rate=dropout)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config, attn_implementation="eager")
    if not settings.get("tie_word_embeddings", True):
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def make_batch(lengths: list[tuple[int, int]]) -> Batch:
    """Random examples of the given (input, target) lengths."""
    random = torch.Generator().manual_seed(0)
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0)
    inputs, labels = (torch.randint(3, 384, (int(n),), generator=random) for n in ends[-1])
    return Batch(inputs, labels, ends[:, 0], ends[:, 1], tuple(map(str, range(len(lengths)))))


def padded_nats(model: Any, batch: Batch) -> Tensor:
    padded = pad(batch, pad_id=0)
    return compute_padded_losses(model, padded)[padded.labels != IGNORE_INDEX]


def gradients(model: Any, nats: Tensor, weight: Tensor | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    (nats if weight is None else nats * weight).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
