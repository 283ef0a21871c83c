"""Weights of CTranslate2, a C++ engine for CPUs and GPUs, also quantised to 8 bits.

Source: https://github.com/OpenNMT/CTranslate2 (MIT licence). T5, mT5, umT5 and T5Gemma with a generative head. Its
vocabulary has the tokenizer's pieces; ids without a piece, and a piece's second id, are named <unused_ID>, so that
every id has a name of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fivetune.delivery.exporters import Exporter

if TYPE_CHECKING:
    from fivetune.model.decode import GenerateAnswers
    from fivetune.types import JsonTable

FAMILIES = ("t5", "mt5", "umt5", "t5gemma")
GEMMA_WINDOW = 4096
"""Sliding window, in tokens, that CTranslate2's converter writes for every layer of T5Gemma."""
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")

Quantization = Literal["none", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]


class CTranslate2(Exporter):
    """A model folder of CTranslate2."""

    packages = ("ctranslate2", "transformers")

    quantization: Quantization = Field(
        default="none",
        description="type of the weights: none (fp32), int8, int8_float32, int8_float16, int8_bfloat16, int16, float16 "
        "or bfloat16; a device without it computes in the nearest type that it has",
    )

    def get_folder_name(self) -> str:
        if self.quantization == "none":
            return self.plugin_name()
        return f"{self.plugin_name()}-{self.quantization}"

    def explain_unsupported(self, settings: JsonTable, head: str) -> str:
        if head == "extractive":
            return "it has no extractive head (task.head extractive)"
        family = settings.get("model_type")
        if family == "t5gemma2":
            # Measured with CTranslate2 4.8.5: the score of a token changes with the tokens after it.
            return "CTranslate2 scores given texts of T5Gemma 2 with attention to later tokens"
        if family not in FAMILIES:
            return f"model_type {family} is not converted. Allowed: {', '.join(FAMILIES)}"
        if family == "t5gemma":
            return _explain_unsupported_gemma(settings)
        name = settings.get("dense_act_fn") or str(settings.get("feed_forward_proj", "relu")).removeprefix("gated-")
        if name not in ACTIVATIONS:
            return f"activation {name} is not converted. Allowed: {', '.join(ACTIVATIONS)}"
        return ""

    def has_same_probabilities(self, settings: JsonTable) -> bool:
        # The converter drops T5Gemma's cap of the logits; other types of weights round each product.
        return self.quantization == "none" and settings.get("model_type") != "t5gemma"

    def convert(self, source: Path, target: Path) -> None:
        from fivetune.delivery.exporters._ctranslate2 import convert_model

        quantization = None if self.quantization == "none" else self.quantization
        convert_model(source, target / self.plugin_name(), quantization)

    def open(self, folder: Path, *, device: str, num_threads: int) -> GenerateAnswers:
        from fivetune.delivery.exporters._ctranslate2 import Engine

        return Engine(folder / self.plugin_name(), device=device, num_threads=num_threads)


def _explain_unsupported_gemma(settings: JsonTable) -> str:
    """Explain which value of a T5Gemma model the converter would lose; "" if none."""
    for side in ("encoder", "decoder"):
        if side not in settings:  # a family by its name alone
            continue
        values: JsonTable = settings[side]
        scale, width = values["query_pre_attn_scalar"], values["head_dim"]
        if scale != width:
            return f"{side}.query_pre_attn_scalar {scale} is not converted. Allowed is head_dim, {width}"
        if values["sliding_window"] < GEMMA_WINDOW:
            return (
                f"{side}.sliding_window {values['sliding_window']} is not converted. Allowed: at least {GEMMA_WINDOW}"
            )
    return ""
