"""Span head of the T5 family: it predicts the first and the last token of the answer.

In: a generative model, or the folder of an extractive one. Out: transformers' `...ForQuestionAnswering` with the same
encoder and decoder; -log p of given positions. Position 0 represents "no answer", as in transformers' run_qa.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivetune.data.store.batch import PaddedBatch
from fivetune.errors import ModelError
from fivetune.model.family import FAMILIES
from fivetune.model.files import find_weight_files
from fivetune.model.misfit import explain_misfit
from fivetune.model.modules import T5Model, T5Settings
from fivetune.model.tokenizer import suppress_output


def refuse_other_head(head: str, source: Path) -> None:
    """Raise ModelError if an extractive model is loaded for generation, because it has no language model head."""
    if head != "extractive":
        raise ModelError(
            f"{source}: the model has a span head and cannot generate answers. Set task.head: extractive, or "
            "use a model for conditional generation."
        )


def attach_span_head(model: T5Model) -> T5Model:
    """Replace the head of a generative model by a random span head (torch's global generator), sharing all weights."""
    import transformers

    kind = getattr(transformers, str(FAMILIES[model.config.model_type].span_class))
    with torch.device("meta"):  # without weights of its own: the model's are put in below
        pointing = kind(model.config)
    pointing.shared = model.shared
    pointing.encoder = model.encoder
    pointing.decoder = model.decoder
    pointing.qa_outputs = nn.Linear(model.config.d_model, 2)
    nn.init.normal_(pointing.qa_outputs.weight, std=model.config.d_model**-0.5)
    nn.init.zeros_(pointing.qa_outputs.bias)
    pointing.generation_config = model.generation_config
    return pointing.train(model.training)


def load_span_model(folder: Path, settings: T5Settings) -> T5Model:
    """Load a saved model with a span head. Raises ModelError if the file lacks some of its weights."""
    import transformers

    kind = getattr(transformers, str(FAMILIES[settings.model_type].span_class))
    files = find_weight_files(folder)
    with suppress_output(), explain_misfit(folder, files, settings, kind):
        model, told = kind.from_pretrained(
            folder, config=settings, dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    if told["missing_keys"] or told["mismatched_keys"]:
        missing = sorted(map(str, [*told["missing_keys"], *told["mismatched_keys"]]))
        raise ModelError(
            f"{folder}: the weights do not fit config.json: {', '.join(missing[:3])}. Copy the folder again."
        )
    return model


def compute_span_logits(model: T5Model, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Compute logits of every position as first and as last token: [B, S, 2] fp32, -inf at padding."""
    output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    logits = torch.stack([output.start_logits, output.end_logits], dim=2).float()
    return logits.masked_fill(attention_mask[:, :, None] == 0, float("-inf"))


def compute_span_losses(model: T5Model, batch: PaddedBatch) -> Tensor:
    """Compute -log p of the first and of the last position in `batch.labels` [B, 2]: [B, 2] fp32."""
    logits = compute_span_logits(model, batch.input_ids, batch.attention_mask)
    return F.cross_entropy(logits, batch.labels, reduction="none")
