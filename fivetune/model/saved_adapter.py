"""What the folder of a saved adapter describes: its method, its base, and what of it is not supported.

In: a folder in peft's format, a model. Out: peft's configuration and the matrices that it names, or a ConfigError.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn

CONFIG = "adapter_config.json"
BASE = "base.json"  # beside CONFIG, a BaseModel; adapters that peft wrote have none
SPAN_HEAD = "qa_outputs"
METHODS = {
    "LORA": "lora, rslora, dora and qlora",
    "IA3": "ia3",
    "PROMPT_TUNING": "prompt",
    "PREFIX_TUNING": "prefix",
}
UNSUPPORTED = ("prefix_projection", "trainable_token_indices", "target_parameters", "layer_replication", "lora_bias")


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that an adapter belongs to.

    Args:
        name: name as in model.path. checksum: hexadecimal digits of a hash of the weights.
        bits: bits per value of the adapted matrices while the adapter is trained; 4: NF4.
    """

    name: str
    checksum: str
    bits: int = 32


def read_base(folder: Path) -> BaseModel | None:
    """Read what FiveTune wrote of an adapter's base; None beside an adapter that peft wrote."""
    path = folder / BASE
    if not path.is_file():
        return None
    try:
        table = json.loads(path.read_bytes())
        return BaseModel(table["name"], table["checksum"], table.get("bits", 32))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: damaged. Copy the adapter's folder again.") from None


def refuse_other_base(config: PeftConfig, folder: str, base: str) -> None:
    """Raise ConfigError if an adapter was trained on another model: the last part of its name is another one.

    Of model/ of a run, it is the name of the run.
    """
    before = config.base_model_name_or_path
    own = Path(base.removesuffix("/model")).name
    other = Path((before or base).removesuffix("/model")).name
    if own.lower() != other.lower():
        raise ConfigError(
            f"model.adapter.path: {folder} was trained on {before}, and model.path is {base}. Set model.path to its "
            f"base; if both are the same model, correct base_model_name_or_path in {CONFIG}."
        )


def refuse_unsupported(config: PeftConfig, folder: str, model: nn.Module) -> None:
    """Raise ConfigError for a method or an option of peft that is not supported, or a span head without a place."""
    where = f"model.adapter.path: {folder}"
    kind = get_method(config)
    if kind not in METHODS:
        supported = ", ".join(f"{name} ({ours})" for name, ours in METHODS.items())
        raise ConfigError(f"{where}: is of peft's method {kind}, which is not supported. Supported: {supported}.")
    if used := [name for name in UNSUPPORTED if getattr(config, name, None)]:
        raise ConfigError(f"{where}: uses peft's option {used[0]}, which is not supported. Train one without it.")
    whole = set(getattr(config, "modules_to_save", None) or ())
    if others := sorted(whole - {SPAN_HEAD}):
        raise ConfigError(
            f"{where}: holds whole modules beside the adapter (modules_to_save: {', '.join(others)}), which is not "
            "supported. Merge it by peft (merge_and_unload, save_pretrained), and set model.path to the result."
        )
    if whole and not hasattr(model, SPAN_HEAD):
        raise ConfigError(f"{where}: holds a span head, of task.head extractive. Set task.head: extractive.")


def get_method(config: PeftConfig) -> str:
    """peft's name of the method: LORA, IA3, ..."""
    return str(getattr(config.peft_type, "value", config.peft_type))


def list_saved_targets(model: nn.Module, config: PeftConfig, folder: str, allowed: Collection[str]) -> list[str]:
    """List the matrices that a saved adapter of matrices changes.

    Args:
        allowed: names of the matrices of attention and feed-forward layers.

    Raises ConfigError if it changes something else, such as the embedding.
    """
    if config.is_prompt_learning:
        return []
    from peft.tuners.tuners_utils import check_target_module_exists

    # peft's own rule: its target_modules may hold names, ends of names, or a pattern.
    found = [name for name, _ in model.named_modules() if check_target_module_exists(config, name)]
    if others := sorted({*found}.difference(allowed)):
        raise ConfigError(
            f"model.adapter.path: {folder}: adapts {others[0]}, and only matrices of attention and feed-forward layers "
            "are supported. Merge it by peft (merge_and_unload, save_pretrained), and set model.path to the result."
        )
    return found
