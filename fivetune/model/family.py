"""All facts about the variants of T5, in one place and without torch.

In: the content of config.json, or the config of a transformers model. Out: transformers' model and tokenizer classes,
whether the output head is tied to the embedding, whether the decoder's output is scaled.

    variant                model_type  head     decoder output    feed-forward   relative bias
    T5 1.0                 t5          tied     x d_model^-1/2    relu           one table per stack
    T5 1.1, Flan-T5, ByT5  t5 / mt5    untied   not scaled        gated GELU     one table per stack
    mT5                    mt5         untied   not scaled        gated GELU     one table per stack
    umT5                   umt5        untied   not scaled        gated GELU     one table per layer

Sources: Raffel et al. 2020 (T5), Shazeer 2020 (gated GELU), Xue et al. 2021 (mT5), Chung et al. 2023 (umT5), and the
published config.json files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fivetune.errors import ModelError
from fivetune.types import JsonTable

SENTINEL = "<extra_id_"  # prefix of the tokens that mask spans in pre-training, <extra_id_0> to <extra_id_99>
SHARED, HEAD = "shared.weight", "lm_head.weight"
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LEFTOVER_WEIGHTS = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
"""Tensors of old T5 1.0 files that no forward pass uses."""

ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")
"""Activations of the feed-forward layers, by transformers' names."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model_type of config.json.

    Args:
        model_type: its name in config.json.
        generation_class, span_class: transformers' classes with a language model head, with a span head.
        tokenizer_class: transformers' class for its SentencePiece file.
        scale_flag: the config entry that makes transformers scale the decoder's output; None if it never does.
    """

    model_type: str
    generation_class: str
    span_class: str
    tokenizer_class: str
    scale_flag: str | None


FAMILIES = {
    family.model_type: family
    for family in (
        Family("t5", "T5ForConditionalGeneration", "T5ForQuestionAnswering", "T5Tokenizer", "scale_decoder_outputs"),
        Family("mt5", "MT5ForConditionalGeneration", "MT5ForQuestionAnswering", "T5Tokenizer", None),
        Family(
            "umt5", "UMT5ForConditionalGeneration", "UMT5ForQuestionAnswering", "T5Tokenizer", "tie_word_embeddings"
        ),
    )
}
GENERATION_CLASSES = tuple(family.generation_class for family in FAMILIES.values())
SPAN_CLASSES = tuple(family.span_class for family in FAMILIES.values())


class ModelConfig(Protocol):
    """The fields of transformers' T5Config, MT5Config and UMT5Config that this module reads."""

    model_type: str
    d_model: int


def find_family(raw: JsonTable, where: Path) -> Family:
    """The family that config.json names. Raises ModelError for any other model."""
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ModelError(f"{where}: model_type {kind!r} is not of the T5 family. Allowed: {', '.join(FAMILIES)}.")
    return FAMILIES[str(kind)]


def has_span_head(raw: JsonTable) -> bool:
    """Whether config.json belongs to a model with a span head.

    >>> has_span_head({"architectures": ["T5ForQuestionAnswering"]}), has_span_head({})
    (True, False)
    """
    return any(name in SPAN_CLASSES for name in raw.get("architectures") or ())


def has_own_head(raw: JsonTable) -> bool:
    """Whether config.json declares an untied output head."""
    return raw.get("tie_word_embeddings") is False


def should_scale_output(config: ModelConfig) -> bool:
    """Whether transformers multiplies the decoder's output by d_model^-1/2 before the head."""
    flag = FAMILIES[config.model_type].scale_flag
    return bool(flag and getattr(config, flag))


def compute_output_scale(config: ModelConfig) -> float:
    """The factor of the decoder's output before the head: d_model^-1/2 or 1."""
    return config.d_model**-0.5 if should_scale_output(config) else 1.0


def infer_output_scale(raw: JsonTable, *, untied: bool, where: str) -> bool:
    """Infer whether the decoder's output must be scaled. Raises ModelError if config.json and `untied` contradict.

    Args:
        raw: content of config.json. untied: whether the weights hold an untied head.

    >>> infer_output_scale({"model_type": "t5"}, untied=False, where="")
    True
    >>> infer_output_scale({"model_type": "t5", "tie_word_embeddings": False}, untied=True, where="")
    False
    """
    own_head = has_own_head(raw)
    if own_head and not untied:
        raise ModelError(
            f"{where}: config.json declares an output head of its own, but the file holds no {HEAD}. "
            "The file is incomplete; get the model again."
        )
    if raw["model_type"] == "mt5":
        return False
    if raw["model_type"] == "umt5":
        return not untied
    scale = raw.get("scale_decoder_outputs", not own_head)
    if untied and scale and own_head:
        raise ModelError(
            f"{where}: config.json declares an output head of its own, but the decoder's output is scaled "
            '(scale_decoder_outputs), which only tied models do. Set "scale_decoder_outputs": false.'
        )
    if untied and scale:
        raise ModelError(
            f"{where}: the file holds an output head of its own ({HEAD}), but config.json declares a tied one. "
            'Set "tie_word_embeddings": false in config.json if this is a v1.1 or Flan model.'
        )
    return bool(scale)


def is_gated(feed_forward: object) -> bool:
    """Whether a feed-forward layer is gated: it has wi_0 and wi_1 in place of wi."""
    return hasattr(feed_forward, "wi_0")
