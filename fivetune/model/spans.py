"""A span head on the T5 family: the model points at the first and the last token of the answer.

In: a model that writes, or a folder of one that points. Out: transformers' `...ForQuestionAnswering` over the same
encoder and decoder, and -log p of given positions. Position 0 stands for no answer (as in transformers' run_qa).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.data.batch import PaddedBatch
from fivetune.errors import ModelError

CLASSES = {"t5": "T5ForQuestionAnswering", "mt5": "MT5ForQuestionAnswering", "umt5": "UMT5ForQuestionAnswering"}


def has_span_head(raw: dict[str, Any]) -> bool:
    """Whether a folder's config.json is that of a model that points."""
    return any(name in CLASSES.values() for name in raw.get("architectures") or ())


def refuse_other_head(head: str, source: Path) -> None:
    """A model that points cannot write: raises ModelError unless it is to point."""
    if head != "extractive":
        raise ModelError(
            f"{source}: the model has a span head and cannot write answers. Set task.head: extractive, or take a model "
            "for conditional generation."
        )


def with_span_head(model: Any) -> Any:
    """The encoder and decoder of a model that writes under a new span head, drawn from torch's global generator."""
    import transformers

    kind = getattr(transformers, CLASSES[model.config.model_type])
    with torch.device("meta"):
        pointing = kind(model.config)
    pointing.shared, pointing.encoder, pointing.decoder = model.shared, model.encoder, model.decoder
    pointing.qa_outputs = nn.Linear(model.config.d_model, 2)
    nn.init.normal_(pointing.qa_outputs.weight, std=model.config.d_model**-0.5)
    nn.init.zeros_(pointing.qa_outputs.bias)
    pointing.generation_config = model.generation_config
    return pointing.train(model.training)


def load_span_model(folder: Path, settings: Any) -> Any:
    """A saved model with a span head. Raises ModelError if the file lacks some of its weights."""
    import transformers

    kind = getattr(transformers, CLASSES[settings.model_type])
    model, told = kind.from_pretrained(
        folder, config=settings, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    if told["missing_keys"] or told["mismatched_keys"]:
        missing = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
        raise ModelError(
            f"{folder}: the weights do not fit config.json: {', '.join(missing[:3])}. Copy the folder again."
        )
    return model


def span_logits(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """[B, S, 2] fp32 logits of every position as first and as last token; -inf at padding."""
    output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    logits = torch.stack([output.start_logits, output.end_logits], dim=2).float()
    return logits.masked_fill(attention_mask[:, :, None] == 0, float("-inf"))


def span_nats(model: Any, batch: PaddedBatch) -> Tensor:
    """[B, 2] fp32: -log p of the first and of the last position in `batch.labels` [B, 2]."""
    logits = span_logits(model, batch.input_ids, batch.attention_mask)
    return F.cross_entropy(logits, batch.labels, reduction="none")
