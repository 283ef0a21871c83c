"""Floating-point operations of training a loaded model: from its config, or from its modules.

In: a model and lengths without padding. Out: `Flops`, as of `flops.py`, which has no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fivetune.model.family import get_family
from fivetune.model.flops import Flops, count_train_flops

if TYPE_CHECKING:
    from fivetune.model.modules import T5Model


def count_model_flops(model: T5Model, source_lengths: ArrayLike, target_lengths: ArrayLike) -> Flops:
    """Count the operations of forward and backward over examples of these lengths.

    A model with a span head (`model/span_head.py`) runs its decoder over the inputs and has two outputs per token.
    Families without T5's blocks are counted from their modules.
    """
    if not get_family(model.config).t5_blocks:
        return count_module_flops(model, source_lengths, target_lengths)
    if hasattr(model, "qa_outputs"):
        return count_train_flops(model.config, source_lengths, source_lengths, num_outputs=2)
    return count_train_flops(model.config, source_lengths, target_lengths)


QUERIES, KEYS_VALUES = ("q", "q_proj"), ("k", "v", "k_proj", "v_proj")
FOREIGN = re.compile(r"^(vision_tower|multi_modal_projector)|\.lora_")  # not counted
CROSS, MERGED = ("EncDecAttention", "cross_attn", "encoder_attn"), ("T5Gemma2MergedAttention",)


def count_module_flops(model: T5Model, source_lengths: ArrayLike, target_lengths: ArrayLike) -> Flops:
    """Count the operations of any encoder-decoder from its linear modules, which have one of the names above.

    A layer with a window attends to its window, LongT5's to three blocks and, if transient-global, to one token per
    `global_block_size`. Images and the small matrices of an adapter are not counted.
    """
    source, target = np.asarray(source_lengths, dtype=np.float64), np.asarray(target_lengths, dtype=np.float64)
    encoder = decoder = 0.0
    for attention, name, linear in _iter_linears(model.get_encoder()):
        encoder += _count_operations(linear) * source.sum()
        if name in QUERIES:
            encoder += 12 * linear.out_features * (source * _count_keys(attention, source)).sum()
    for attention, name, linear in _iter_linears(model.get_decoder()):
        is_cross, is_merged = attention[0] in CROSS, type(attention[1]).__name__ in MERGED
        if is_cross and name in KEYS_VALUES:
            decoder += _count_operations(linear) * source.sum()
            continue
        num_rows = target.sum() + (source.sum() if is_merged and name in KEYS_VALUES else 0)
        decoder += _count_operations(linear) * num_rows
        if name in QUERIES:
            own = 0 if is_cross else np.minimum(target / 2, _count_keys(attention, target))
            across = source if is_cross or is_merged else 0
            decoder += 12 * linear.out_features * (target * (own + across)).sum()
    decoder += 6 * model.get_output_embeddings().weight.numel() * target.sum()
    return Flops(float(encoder), float(decoder))


def _count_operations(linear: nn.Linear) -> int:
    """Operations of forward and backward per row; a matrix in 4 bits has fewer stored elements."""
    return 6 * linear.in_features * linear.out_features


def _iter_linears(stack: nn.Module) -> Iterator[tuple[tuple[str, nn.Module], str, nn.Linear]]:
    """Yield the linear modules of a stack with their names, and name and module of what each is a part of."""
    modules = dict(stack.named_modules())
    for path, module in modules.items():
        if isinstance(module, nn.Linear) and not FOREIGN.search(path):
            path = path.removesuffix(".base_layer")  # of a module with an adapter
            parent, _, name = path.rpartition(".")
            yield (parent.rpartition(".")[2], modules[parent]), name, module


def _count_keys(attention: tuple[str, nn.Module], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """The number of keys that a query of self-attention attends to, by length of its sequence."""
    module = attention[1]
    window = getattr(module, "sliding_window", None) or 3 * getattr(module, "block_len", 0)
    keys = np.minimum(lengths, window) if window else lengths
    block = getattr(module, "global_block_size", None)
    return keys + lengths // block if block else keys
