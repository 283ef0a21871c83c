"""Virtual tokens: trained vectors in the place of tokens, before the input (prompt) or in the decoder (prefix).

In: a model, a batch. Out: the batch with the ids of the virtual tokens; a cache that holds the prefix. An id from the
size of the vocabulary on is a virtual token: its embedding is a trained vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fivetune.errors import ConfigError
from fivetune.model.family import get_family
from fivetune.model.saved_adapter import get_method

if TYPE_CHECKING:
    from peft import PeftConfig

    from fivetune.data.store.batch import PaddedBatch
    from fivetune.model.modules import T5Model

PARAMETER = "virtual_tokens"
WRAPPED = "embed_tokens.words."  # begin of the embedding's name inside of PromptEmbedding


class PromptEmbedding(nn.Module):
    """An embedding with more rows, of virtual tokens, than its table of words has."""

    def __init__(self, words: nn.Embedding, values: Tensor) -> None:
        super().__init__()
        self.words = words
        self.virtual_tokens = nn.Parameter(values)

    def forward(self, ids: Tensor) -> Tensor:
        number = ids - self.words.num_embeddings  # of a virtual token; negative for words
        # Both tables are read for all ids, within their bounds; one result is taken.
        found = self.words(ids.clamp_max(self.words.num_embeddings - 1))
        return torch.where((number >= 0)[..., None], self.virtual_tokens[number.clamp_min(0)], found)


class Prefix(nn.Module):
    """Trained keys and values of the decoder's self-attention, [n, layers * 2 * heads * size]."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.virtual_tokens = nn.Parameter(values)


def attach_tokens(model: T5Model, config: PeftConfig) -> set[str]:
    """Put virtual tokens as peft's configuration says into a model; returns the names of the new weights.

    Raises ConfigError for a family without T5's blocks.
    """
    settings = model.config
    if not get_family(settings).t5_blocks:
        raise ConfigError(
            f"model.adapter: virtual tokens are for T5, mT5 and umT5, and the model is a {settings.model_type}. "
            "Use lora."
        )
    num: int = config.num_virtual_tokens  # type: ignore[attr-defined]
    # get_peft_model, which is not called, would fill in this shape.
    shape = {"num_layers": settings.num_decoder_layers, "num_attention_heads": settings.num_heads}
    if get_method(config) == "PROMPT_TUNING":
        shape |= {"token_dim": settings.d_model, "num_transformer_submodules": 1}
        words = model.encoder.embed_tokens
        rows = torch.randint(words.num_embeddings, (num,))
        model.encoder.embed_tokens = PromptEmbedding(words, words.weight.detach()[rows].clone())  # type: ignore[assignment]
        place = "encoder.embed_tokens"
    else:
        width = settings.num_heads * settings.d_kv
        shape |= {"token_dim": width, "num_transformer_submodules": 2}
        model.decoder.prefix = Prefix(torch.randn(num, settings.num_decoder_layers * 2 * width))
        place = "decoder.prefix"
    for name, value in shape.items():
        setattr(config, name, value)
    return {f"{place}.{PARAMETER}"}


def find_prompt(model: nn.Module) -> PromptEmbedding | None:
    """The prompt of a model; None if it has none."""
    embedding = getattr(getattr(model, "encoder", None), "embed_tokens", None)
    return embedding if isinstance(embedding, PromptEmbedding) else None


def find_prefix(model: nn.Module) -> Prefix | None:
    """The prefix of a model's decoder; None if it has none."""
    return getattr(getattr(model, "decoder", None), "prefix", None)


def list_virtual_ids(prompt: PromptEmbedding) -> Tensor:
    """Ids of the virtual tokens, [n]."""
    first = prompt.words.num_embeddings
    return torch.arange(first, first + len(prompt.virtual_tokens), device=prompt.words.weight.device)


def add_prompt(model: nn.Module, batch: PaddedBatch) -> PaddedBatch:
    """Put the prompt's ids before every input; without a prompt the batch is returned unchanged."""
    prompt = find_prompt(model)
    if prompt is None:
        return batch
    ids = list_virtual_ids(prompt).expand(len(batch.input_ids), -1)
    return replace(
        batch,
        input_ids=torch.cat([ids, batch.input_ids], 1),
        attention_mask=torch.cat([torch.ones_like(ids), batch.attention_mask], 1),
    )


def add_flat_prompt(model: nn.Module, ids: Tensor, lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """`add_prompt` for flat inputs: ids [N] and B lengths."""
    prompt = find_prompt(model)
    if prompt is None:
        return ids, list(lengths)
    own = list_virtual_ids(prompt)
    parts: list[Tensor] = []
    for inputs in ids.split(list(lengths)):
        parts += [own, inputs]
    return torch.cat(parts), [length + len(own) for length in lengths]


def build_prefix_cache(model: T5Model, num_rows: int) -> Any:
    """A cache of transformers that begins with the prefix, one row per example; None without a prefix.

    The layout is peft's, which reads four entries per layer and uses two: of 2 L entries, layer i has the entries 4 i
    and 4 i + 1, modulo 2 L. With an even number of layers, two of them share their prefix.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    prefix = find_prefix(model)
    if prefix is None:
        return None
    settings = model.config
    values = prefix.virtual_tokens.view(-1, settings.num_decoder_layers * 2, settings.num_heads, settings.d_kv)
    values = values.permute(1, 2, 0, 3).unsqueeze(1).expand(-1, num_rows, -1, -1, -1)  # [layers * 2, B, H, n, D]
    own = DynamicCache()
    for layer in range(settings.num_decoder_layers):
        first = 4 * layer % len(values)
        own.update(values[first], values[first + 1], layer)
    return EncoderDecoderCache(own, DynamicCache())


def build_cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a decoder of transformers its cache; {} for None."""
    return {} if cache is None else {_name_cache_argument(): cache}


@lru_cache  # each step of a generation asks, and the version is read from a file
def _name_cache_argument() -> str:
    major, minor = version("transformers").split(".")[:2]
    return "cache" if (int(major), int(minor)) >= (5, 24) else "past_key_values"
