"""The padded forward: token losses by transformers' own modules.

In: a model and a PaddedBatch. Out: -log p of every label in nats, 0 at positions that are not scored, with the
gradient of the objective (`objective.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fivetune.data.store.batch import IGNORE_INDEX, PaddedBatch
from fivetune.model.family import compute_output_scale, get_logit_cap
from fivetune.model.modules import T5Model
from fivetune.model.objective import PLAIN, Objective, compute_token_losses
from fivetune.model.span_head import compute_span_losses
from fivetune.model.virtual_tokens import add_prompt, build_cache_argument, build_prefix_cache


def shift_right(labels: Tensor, *, start_id: int, pad_id: int) -> Tensor:
    """Build the decoder inputs: the start id, then the labels without the last; pad ids in place of -100.

    >>> shift_right(torch.tensor([[7, 8, 1, -100]]), start_id=0, pad_id=0).tolist()
    [[0, 7, 8, 1]]
    """
    shifted = labels.new_full(labels.shape, start_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORE_INDEX, pad_id)


def compute_padded_losses(model: T5Model, batch: PaddedBatch, *, objective: Objective = PLAIN) -> Tensor:
    """Compute the negative log-likelihood of every label (teacher forcing).

    Returns: [B, T] fp32, in nats; 0 at labels of -100; for a model with a span head [B, 2].
    """
    if hasattr(model, "qa_outputs"):
        return compute_span_losses(model, batch)
    config = model.config
    batch = add_prompt(model, batch)
    output = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        decoder_input_ids=shift_right(batch.labels, start_id=config.decoder_start_token_id, pad_id=config.pad_token_id),
        use_cache=False,
        **build_cache_argument(build_prefix_cache(model, len(batch.labels))),
    )
    return compute_token_losses(output.logits.float(), batch.labels, objective)


@torch.no_grad()
def compute_padded_states(model: T5Model, batch: PaddedBatch) -> Tensor:
    """Compute the decoder's output before every scored label, scaled for the head: [N_tgt, d]."""
    ids = shift_right(batch.labels, start_id=model.config.decoder_start_token_id, pad_id=model.config.pad_token_id)
    encoded = encode_padded(model, batch.input_ids, batch.attention_mask)
    return decode_padded(model, ids, encoded, batch.attention_mask)[batch.labels != IGNORE_INDEX]


def encode_padded(model: T5Model, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states of inputs [B, S], [B, S, d]."""
    return model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


def decode_padded(model: T5Model, ids: Tensor, encoded: Tensor, attention_mask: Tensor) -> Tensor:
    """Hidden states of decoder inputs [B, T], scaled for the head, [B, T, d]."""
    found = model.get_decoder()(
        input_ids=ids, encoder_hidden_states=encoded, encoder_attention_mask=attention_mask, use_cache=False
    )
    return found.last_hidden_state * compute_output_scale(model.config)


def compute_logits(model: T5Model, hidden: Tensor) -> Tensor:
    """Scores of all tokens, [..., V] fp32, from the decoder's output, scaled for the head.

    T5Gemma's scores are soft-capped, c tanh(scores / c); Bart's have a bias that is not trained.
    """
    scores = model.get_output_embeddings()(hidden).float()
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None:
        scores = scores + bias
    cap = get_logit_cap(model.config)
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    return scores


@torch.no_grad()
def find_nonfinite_module(model: T5Model, batch: PaddedBatch) -> str:
    """Run another forward pass and return the first module with a non-finite output, or "the loss"."""
    found: list[str] = []

    def watch(name: str):
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            # Later modules only pass on what the first one computed.
            if found or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
                return
            finite = tensor[tensor.isfinite()].abs()
            num_wrong = tensor.numel() - finite.numel()
            if num_wrong:
                others = f", the others up to {finite.max().item():.3g}" if finite.numel() else ""
                found.append(f"{name} ({num_wrong:,} of {tensor.numel():,} values{others})")

        return hook

    # Only modules without parts: the first of them in the order of the pass is where the values began.
    parts = [(name, module) for name, module in model.named_modules() if not list(module.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in parts]
    try:
        compute_padded_losses(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "the loss"
