"""Adapters, one per file: few new weights that are trained beside a frozen model.

An adapter's file holds one options class with `build_config(targets)`, which returns the configuration of peft
(https://github.com/huggingface/peft) that describes it. Those that change matrices have `target_modules`. peft is
imported inside the methods; `fivetune/model/adapter.py` attaches, merges and saves.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from fivetune.config.layers import parse_names
from fivetune.plugins import Options

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["AdapterOptions", "LowRankOptions", "TargetNames", "VirtualTokenOptions", "has_virtual_tokens"]

TASK_TYPE = "SEQ_2_SEQ_LM"


TargetNames = Annotated[
    tuple[str, ...],
    BeforeValidator(parse_names),
    Field(
        description="matrices that are adapted, by parts of their names as in model.freeze: q, v, EncDecAttention, "
        "encoder.block.0-3; default: those of the paper's method"
    ),
]


def has_virtual_tokens(folder: Path) -> bool:
    """Whether a folder holds an adapter of virtual tokens in peft's format; False without a readable description."""
    try:
        table = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return table.get("peft_type") in ("PROMPT_TUNING", "PREFIX_TUNING")


class AdapterOptions(Options):
    """Base of all adapters, which describes the contract `fivetune.types.Adapter`."""

    base_bits: ClassVar[int] = 32  # of the adapted matrices of the base; 4: NF4
    lr_scale: ClassVar[float] = 10.0  # how much higher learning rates may be than for a whole model
    usual: ClassVar[tuple[str, ...]] = ()  # last parts of the names of matrices adapted by default; (): all

    @property
    def target_names(self) -> tuple[str, ...]:
        """Patterns of the adapted matrices; () for the usual ones."""
        return getattr(self, "target_modules", ())

    @property
    def is_virtual(self) -> bool:
        """Whether it consists of virtual tokens, which cannot be merged into the weights of a model."""
        return False

    @property
    def saved_in(self) -> str:
        """Folder with the weights that the adapter begins with; "" for new ones."""
        return ""

    @abstractmethod
    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        """Build peft's configuration.

        Args:
            targets: names of the adapted matrices.
        """


class LowRankOptions(AdapterOptions):
    """Base of LoRA and what follows from it: a matrix W becomes W + scale B A of rank r."""

    extra: ClassVar[dict[str, Any]] = {}  # arguments of peft's LoraConfig

    r: PositiveInt = Field(16, description="rank: columns of B and rows of A")
    alpha: PositiveFloat = Field(32, description="the scale is alpha / r")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="dropout rate of the input of A")
    target_modules: TargetNames = ()

    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        from peft import LoraConfig

        return LoraConfig(
            task_type=TASK_TYPE,
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # any number
            lora_dropout=self.dropout,
            target_modules=list(targets),
            **self.extra,
        )


class VirtualTokenOptions(AdapterOptions):
    """Base of the adapters that train vectors in the place of tokens, and leave all matrices as they are."""

    lr_scale = 1000.0

    num_virtual_tokens: PositiveInt = Field(20, description="number of trained vectors per layer")

    @property
    def is_virtual(self) -> bool:
        return True
