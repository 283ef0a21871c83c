"""Floating-point operations of training an encoder-decoder, counted from the lengths of its examples.

In: a T5 config and lengths without padding. Out: operations of the encoder and of the decoder, forward and backward.
A multiply-add counts 2, training 3 times the forward pass; embeddings, norms and softmax are not counted. A
model with frozen weights costs less: `module_flops.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from fivetune.model.modules import T5Settings
    from fivetune.model.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations by stack. The decoder's include the head and the keys and values of cross-attention."""

    encoder: float
    decoder: float

    @property
    def total(self) -> float:
        return self.encoder + self.decoder


def count_train_flops(config: T5Settings | ModelShape, source_lengths: ArrayLike, target_lengths: ArrayLike) -> Flops:
    """Count the operations of forward and backward over examples of these lengths.

    Args:
        config: a T5Config, MT5Config or UMT5Config of transformers, or the shape of a model.
        source_lengths, target_lengths: [B] tokens of each example, end tokens included.

    With d = d_model, i = num_heads * d_kv, f = d_ff, m matrices in the feed-forward (2, or 3 if gated), L layers:
    encoder, per token 6 L (4 d i + m d f) and 12 i L S^2 for attention; decoder, per target token
    6 (L (6 d i + m d f) + d V) with V pieces, per source token 12 L d i, and 12 i L (T^2 / 2 + S T) for attention.

    >>> from transformers import T5Config
    >>> flops = count_train_flops(T5Config(), [175], [5])
    >>> round(flops.encoder / 1e9, 1), round(flops.decoder / 1e9, 1)
    (20.9, 4.5)
    """
    source = np.asarray(source_lengths, dtype=np.float64)
    target = np.asarray(target_lengths, dtype=np.float64)
    width = config.d_model
    inner = config.num_heads * config.d_kv
    feed_forward = (3 if config.is_gated_act else 2) * width * config.d_ff
    encoder = 6 * config.num_layers * (4 * width * inner + feed_forward) * source.sum()
    encoder += 12 * inner * config.num_layers * (source**2).sum()
    layers = config.num_decoder_layers
    decoder = 6 * (layers * (6 * width * inner + feed_forward) + width * config.vocab_size) * target.sum()
    decoder += 12 * layers * width * inner * source.sum()
    decoder += 12 * inner * layers * (target**2 / 2 + source * target).sum()
    return Flops(float(encoder), float(decoder))


def list_block_flops(
    config: T5Settings | ModelShape, source_lengths: ArrayLike, target_lengths: ArrayLike
) -> list[float]:
    """Operations of every block over examples of these lengths, the encoder's first; the last one's with the head."""
    flops = count_train_flops(config, source_lengths, target_lengths)
    head = 6.0 * config.d_model * config.vocab_size * float(np.sum(target_lengths))
    encoder = config.num_layers
    decoder = config.num_decoder_layers
    costs = [flops.encoder / encoder] * encoder + [(flops.decoder - head) / decoder] * decoder
    costs[-1] += head
    return costs
