"""All facts about the families of models, in one place and without torch.

In: the content of config.json, or the config of a transformers model. Out: transformers' model classes, what of
FiveTune a family supports, whether the output head is tied to the embedding, whether the decoder's output is scaled.

    variant                model_type  head     decoder output    feed-forward   positions
    T5 1.0                 t5          tied     x d_model^-1/2    relu           one table of biases per stack
    T5 1.1, Flan-T5, ByT5  t5 / mt5    untied   not scaled        gated GELU     one table of biases per stack
    mT5                    mt5         untied   not scaled        gated GELU     one table of biases per stack
    umT5                   umt5        untied   not scaled        gated GELU     one table of biases per layer
    LongT5                 longt5      both     1.0: scaled       both           one table of biases per stack
    T5Gemma                t5gemma     tied     logits capped     gated GELU     rotary
    T5Gemma 2              t5gemma2    tied     not scaled        gated GELU     rotary

Sources: Raffel et al. 2020 (T5), Shazeer 2020 (gated GELU), Xue et al. 2021 (mT5), Chung et al. 2023 (umT5), Guo et al.
2022 (LongT5), Zhang et al. 2025 (T5Gemma), and the published config.json files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, cast

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
        generation_class, span_class: transformers' classes with a language model head, with a span head (None: no
            extractive answers).
        scale_flag: the config entry that makes transformers scale the decoder's output; None if it never does.
        t5_blocks: it is built from T5's blocks, which the kernels, the decoder of `decode/steps.py` and the strategies
            that divide a model compute; other families are computed by transformers' modules.
        flat: the flat forward computes it.
        on_tpu: whether device tpu computes it.
        start: the config entry with the first input of the decoder, where decoder_start_token_id is not given.
        t5_tables: it has T5's names of the embedding and the head, and T5's rules of tying and scaling.
        longest_input: tokens of the longest inputs that its authors report results for; None: not limited. Longer
            ones are computed, because positions are relative.
        models: published models of the family.
    """

    model_type: str
    generation_class: str
    span_class: str | None = None
    scale_flag: str | None = None
    t5_blocks: bool = False
    flat: bool = False
    on_tpu: bool = False
    start: str = "pad_token_id"
    t5_tables: bool = False
    longest_input: int | None = None
    models: str = ""


T5_LIKE: dict[str, Any] = {"t5_blocks": True, "flat": True, "on_tpu": True, "t5_tables": True}
FAMILIES = {
    family.model_type: family
    for family in (
        Family(
            "t5",
            "T5ForConditionalGeneration",
            "T5ForQuestionAnswering",
            "scale_decoder_outputs",
            models="T5, T5 1.1, Flan-T5, ByT5 and MyT5, UL2 and Flan-UL2, MADLAD-400, CodeT5 and CodeT5+ (220M, 770M)",
            **T5_LIKE,
        ),
        Family("mt5", "MT5ForConditionalGeneration", "MT5ForQuestionAnswering", models="mT5", **T5_LIKE),
        Family(
            "umt5",
            "UMT5ForConditionalGeneration",
            "UMT5ForQuestionAnswering",
            "tie_word_embeddings",
            models="umT5",
            **T5_LIKE,
        ),
        Family(
            "longt5",
            "LongT5ForConditionalGeneration",
            scale_flag="scale_decoder_outputs",
            t5_tables=True,
            longest_input=16_384,
            models="LongT5 with local or transient-global attention",
        ),
        Family("t5gemma", "T5GemmaForConditionalGeneration", flat=True, start="bos_token_id", models="T5Gemma"),
        Family(
            "t5gemma2",
            "T5Gemma2ForConditionalGeneration",
            flat=True,
            start="bos_token_id",
            models="T5Gemma 2, text only",
        ),
    )
}
GENERATION_CLASSES = tuple(family.generation_class for family in FAMILIES.values() if family.t5_blocks)
SPAN_CLASSES = tuple(family.span_class for family in FAMILIES.values() if family.span_class)


class ModelConfig(Protocol):
    """The fields of transformers' T5Config, MT5Config and UMT5Config that this module reads."""

    model_type: str
    d_model: int
    get_text_config: Callable[..., object]


def find_family(raw: JsonTable, where: Path | str, *, any_seq2seq: bool | None = False) -> Family:
    """The family that config.json names; with `any_seq2seq` also that of another sequence-to-sequence model.

    Args:
        any_seq2seq: the setting model.any_seq2seq; None where it has no effect.

    Raises ModelError for any other model.
    """
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        wrong = "has no model_type" if kind is None else f"model_type {json.dumps(kind)[:60]} is no name"
        raise ModelError(f"{where}: config.json: {wrong}. Allowed: {', '.join(FAMILIES)}. Copy the file again.")
    if kind in FAMILIES:
        return FAMILIES[kind]
    # Only the other models need transformers, whose import takes seconds.
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    others = {name: one for name, one in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(one, str)}
    if kind in others and any_seq2seq:
        return Family(kind, others[kind])
    allowed = f"Allowed: {', '.join(FAMILIES)}."
    if kind in others and any_seq2seq is not None:
        raise ModelError(
            f"{where}: model_type {kind!r} is not of the T5 family. {allowed} model.any_seq2seq: true trains "
            "it with transformers' own forward, at your own risk."
        )
    near = get_close_matches(kind, FAMILIES, n=3, cutoff=0.6)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise ModelError(
        f"{where}: model_type {kind!r} is not of the T5 family{_describe_kind(kind)}.{hint} {allowed} "
        "Take one of them: fivetune list models."
    )


def _describe_kind(kind: str) -> str:
    """Describe an architecture of transformers that has no encoder or no decoder; "" for others."""
    from transformers.models.auto import modeling_auto

    if kind in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return ""
    if kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return ": it has no decoder, and writes no answers"
    if kind in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return ": it has no encoder"
    return ""


def get_family(config: ModelConfig) -> Family:
    """The family of a loaded model: one that is not in FAMILIES was allowed by model.any_seq2seq."""
    return FAMILIES.get(config.model_type) or Family(config.model_type, "")


def explain_unsupported_parts(family: Family, *, strategy: str, sharded: bool, device: str) -> str:
    """Explain which setting a family does not support, beginning with its key; empty if it supports all.

    Args:
        sharded: whether the strategy divides the weights among several ranks.
    """
    name = f"model_type {family.model_type!r}"
    if device == "tpu" and not family.on_tpu:
        return f"device tpu: {name} is not computed there. Use device cpu or cuda."
    if sharded and not family.t5_blocks:
        return f"strategy.name {strategy}: it divides T5's blocks, and {name} has others. Use single or ddp."
    return ""


def has_span_head(raw: JsonTable) -> bool:
    """Whether config.json belongs to a model with a span head.

    >>> has_span_head({"architectures": ["T5ForQuestionAnswering"]}), has_span_head({})
    (True, False)
    """
    names = raw.get("architectures")
    return isinstance(names, list) and any(name in SPAN_CLASSES for name in cast("list[object]", names))


def has_own_head(raw: JsonTable) -> bool:
    """Whether config.json declares an untied output head."""
    return raw.get("tie_word_embeddings") is False


def should_scale_output(config: ModelConfig) -> bool:
    """Whether transformers multiplies the decoder's output by d_model^-1/2 before the head."""
    flag = get_family(config).scale_flag
    if flag is None:
        return False
    # umT5 has a flag of its own from transformers 5.24 on.
    return bool(getattr(config, "scale_decoder_outputs", getattr(config, flag)))


def set_output_scale(config: Any, scale: bool) -> None:
    """Set by the files of a model what `should_scale_output` returns.

    Only for umT5 it may differ: transformers 5.23 forces its tie flag to True and scales by it, 5.24 scales by a flag
    of its own; the published models do not scale.
    """
    if get_family(config).scale_flag == "tie_word_embeddings":
        config.tie_word_embeddings = config.scale_decoder_outputs = scale


def compute_output_scale(config: ModelConfig) -> float:
    """The factor of the decoder's output before the head: d_model^-1/2 or 1."""
    return config.d_model**-0.5 if should_scale_output(config) else 1.0


def get_logit_cap(config: ModelConfig) -> float | None:
    """The bound of the logits, which T5Gemma caps softly; None for models without."""
    return getattr(config.get_text_config(decoder=True), "final_logit_softcapping", None)


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
    if own_head and not untied and raw["model_type"] == "longt5":
        return False  # published files of LongT5 may hold the embedding only: transformers ties it, without scaling
    if own_head and not untied:
        raise ModelError(
            f"{where}: config.json declares an output head of its own, but the file holds no {HEAD}. "
            "The file is incomplete; get the model again."
        )
    flag = FAMILIES[str(raw["model_type"])].scale_flag
    if flag is None:
        return False
    # umT5: the published models have their own head, and are not scaled.
    if flag == "tie_word_embeddings":
        return not untied
    # Files of T5 1.0 lack the entry, and scale where the head is tied.
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
