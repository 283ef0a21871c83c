"""The shapes of models of the T5 family, without torch: of the published ones by name, of others from config.json.

In: the name or the folder of a model. Out: a ModelShape: its widths, its numbers of layers and of weights.
Source of the table: the published config.json files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune.data.corpus import CHECKPOINT
from fivetune.errors import ModelError, suggest_names
from fivetune.model.family import FAMILIES, find_family, has_own_head
from fivetune.model.files import read_model_config

NUM_BUCKETS = 32  # relative distances of a table of biases


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Widths and numbers of layers.

    Args:
        is_tied: whether the output head is the embedding.
        has_bias_per_layer: whether each layer has its own table of relative biases (umT5), not each stack.
    """

    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    vocab_size: int
    is_gated_act: bool
    is_tied: bool
    has_bias_per_layer: bool = False

    @property
    def inner_size(self) -> int:
        """Width of all heads of an attention."""
        return self.num_heads * self.d_kv

    @property
    def table_size(self) -> int:
        """Weights of the embedding, and of a head of its own."""
        return self.vocab_size * self.d_model

    @property
    def table_share(self) -> float:
        """Share of the weights that are embedding and head."""
        return (1 if self.is_tied else 2) * self.table_size / self.num_weights

    @property
    def num_weights(self) -> int:
        """Weights of the whole model; tied ones count once.

        >>> find_known_shape("t5-base").num_weights, find_known_shape("google/mt5-small").num_weights
        (222903552, 300176768)
        """
        attention = 4 * self.d_model * self.inner_size
        feed_forward = self.count_feed_forward_weights()
        encoder = self.num_layers * (attention + feed_forward + 2 * self.d_model)
        decoder = self.num_decoder_layers * (2 * attention + feed_forward + 3 * self.d_model)
        tables = self.num_layers + self.num_decoder_layers if self.has_bias_per_layer else 2
        rest = 2 * self.d_model + tables * NUM_BUCKETS * self.num_heads
        return (1 if self.is_tied else 2) * self.table_size + encoder + decoder + rest

    def count_feed_forward_weights(self) -> int:
        """Weights of wi and wo; gated models have wi_0, wi_1 and wo."""
        return (3 if self.is_gated_act else 2) * self.d_model * self.d_ff


V1_1_SIZES = {
    # size: d_model, d_kv, d_ff, heads, layers
    "small": (512, 64, 1024, 6, 8),
    "base": (768, 64, 2048, 12, 12),
    "large": (1024, 64, 2816, 16, 24),
    "xl": (2048, 64, 5120, 32, 24),
    "xxl": (4096, 64, 10240, 64, 24),
}
"""T5 1.1, Flan-T5, mT5 and umT5."""


def _build_known_shapes() -> dict[str, ModelShape]:
    # T5 1.0; columns as in V1_1_SIZES.
    first = {
        "small": (512, 64, 2048, 8, 6),
        "base": (768, 64, 3072, 12, 12),
        "large": (1024, 64, 4096, 16, 24),
        "3b": (1024, 128, 16384, 32, 24),
        "11b": (1024, 128, 65536, 128, 24),
    }
    # ByT5, whose decoders have a third of the encoder's layers.
    byte = {
        "small": (1472, 64, 3584, 6, 12, 4),
        "base": (1536, 64, 3968, 12, 18, 6),
        "large": (1536, 64, 3840, 16, 36, 12),
        "xl": (2560, 64, 6720, 32, 36, 12),
        "xxl": (4672, 64, 12352, 64, 36, 12),
    }
    known = {
        f"t5-{size}": ModelShape(*widths, widths[-1], 32128, is_gated_act=False, is_tied=True)
        for size, widths in first.items()
    }
    for family, vocab_size in (("t5-v1_1", 32128), ("flan-t5", 32128), ("mt5", 250112), ("umt5", 256384)):
        for size, widths in V1_1_SIZES.items():
            if (family, size) != ("umt5", "large"):  # never published
                known[f"{family}-{size}"] = ModelShape(
                    *widths, widths[-1], vocab_size, True, False, has_bias_per_layer=family == "umt5"
                )
    known |= {f"byt5-{size}": ModelShape(*widths, 384, True, False) for size, widths in byte.items()}
    return known | dict.fromkeys(("ul2", "flan-ul2"), ModelShape(4096, 256, 16384, 16, 32, 32, 32128, True, False))


KNOWN_SHAPES = _build_known_shapes()


def find_known_shape(name: str) -> ModelShape | None:
    """Find the shape of a published model by its name on the hub; None if it is not in the table.

    >>> find_known_shape("google/mt5-xxl").d_model, find_known_shape("allenai/unifiedqa-v2-t5-11b-1363200").d_ff
    (4096, 65536)
    """
    last = name.rpartition("/")[2].lower()
    if found := re.fullmatch(r"unifiedqa-(?:v2-)?(t5-[a-z0-9]+)(?:-\d+)?", last):
        last = found[1]
    return KNOWN_SHAPES.get(last)


def build_model_config(shape: ModelShape, model_type: str) -> dict[str, object]:
    """Build the entries of config.json that give a shape."""
    return {
        "model_type": model_type, "d_model": shape.d_model, "d_kv": shape.d_kv, "d_ff": shape.d_ff,
        "num_heads": shape.num_heads, "num_layers": shape.num_layers, "vocab_size": shape.vocab_size,
        "num_decoder_layers": shape.num_decoder_layers, "tie_word_embeddings": shape.is_tied,
        "feed_forward_proj": "gated-gelu" if shape.is_gated_act else "relu",
    }  # fmt: skip


def read_shape(path: str | None, config: str | None = None) -> ModelShape:
    """Read the shape of a model: from a local folder or config.json, else from the table by its name.

    Args:
        path: `model.path`. config: `model.config`, which replaces it.

    Raises ModelError for an unknown name, and for a config.json that lacks an entry or has an impossible one.
    """
    name = str(config or path)
    folder = CHECKPOINT if name == CHECKPOINT.name else Path(name)
    if folder.exists():
        return _parse_shape(read_model_config(folder), folder)
    if (known := find_known_shape(name)) is not None:
        return known
    raise ModelError(
        f"{name}: neither a local folder nor a model whose shape is known. "
        f"{suggest_names(name.rpartition('/')[2], sorted(KNOWN_SHAPES))} "
        "For another model give a folder with its config.json, or the file: --model.path FOLDER."
    )


def _parse_shape(raw: Mapping[str, Any], where: Path) -> ModelShape:
    family = find_family(dict(raw), where)
    if not family.t5_blocks:
        allowed = ", ".join(kind for kind, one in FAMILIES.items() if one.t5_blocks)
        raise ModelError(
            f"{where}: estimates count the tensors of T5's blocks, and model_type {family.model_type!r} has others. "
            f"Allowed: {allowed}. fivetune check measures a step of any model."
        )

    def count(name: str, default: int | None = None) -> int:
        value = raw.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(
                f"{where}: {name} is {json.dumps(value)}, not a number of at least 1. Give the model's own config.json."
            )
        return value

    layers = count("num_layers")
    return ModelShape(
        d_model=count("d_model"),
        d_kv=count("d_kv"),
        d_ff=count("d_ff"),
        num_heads=count("num_heads"),
        num_layers=layers,
        num_decoder_layers=count("num_decoder_layers", layers),
        vocab_size=count("vocab_size"),
        is_gated_act=str(raw.get("feed_forward_proj", "relu")).startswith("gated"),
        is_tied=not has_own_head(dict(raw)),
        has_bias_per_layer=family.model_type == "umt5",
    )
