"""Weights of CTranslate2, a C++ engine for CPUs and GPUs, also quantised to 8 bits.

Source: https://github.com/OpenNMT/CTranslate2 (MIT licence). T5, mT5 and umT5 with a generative head. Its vocabulary
has the tokenizer's pieces; ids without a piece, and a piece's second id, are named <unused_ID>, so that every id has a
name of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fivetune.delivery.exporters import Exporter

if TYPE_CHECKING:
    from fivetune.model.decode import GenerateAnswers
    from fivetune.types import JsonTable

FAMILIES = ("t5", "mt5", "umt5")
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish")

Quantization = Literal["none", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"]


class CTranslate2(Exporter):
    """A model folder of CTranslate2."""

    packages: ClassVar[tuple[str, ...]] = ("ctranslate2", "transformers")

    quantization: Quantization = Field(
        default="none",
        description="type of the weights: none (fp32), int8, int8_float32, int8_float16, int8_bfloat16, int16, float16 "
        "or bfloat16; a device without it computes in the nearest type that it has",
    )

    def get_folder_name(self) -> str:
        return self.plugin_name() + ("" if self.quantization == "none" else f"-{self.quantization}")

    def explain_unsupported(self, settings: JsonTable, head: str) -> str:
        if head == "extractive":
            return "it has no extractive head (task.head extractive)"
        if (family := settings.get("model_type")) not in FAMILIES:
            return f"model_type {family} is not converted. Allowed: {', '.join(FAMILIES)}"
        name = settings.get("dense_act_fn") or str(settings.get("feed_forward_proj", "relu")).removeprefix("gated-")
        return "" if name in ACTIVATIONS else f"activation {name} is not converted. Allowed: {', '.join(ACTIVATIONS)}"

    def convert(self, source: Path, target: Path) -> None:
        from fivetune.delivery.exporters._ctranslate2 import convert_model

        convert_model(source, target / self.plugin_name(), None if self.quantization == "none" else self.quantization)

    def open(self, folder: Path, *, device: str, num_threads: int) -> GenerateAnswers:
        from fivetune.delivery.exporters._ctranslate2 import Engine

        return Engine(folder / self.plugin_name(), device=device, num_threads=num_threads)
