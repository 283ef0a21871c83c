"""An adapter in peft's format from an earlier run or from peft itself, which the training continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from fivetune.model.adapters import AdapterOptions, has_virtual_tokens

if TYPE_CHECKING:
    from peft import PeftConfig


class Saved(AdapterOptions):
    """The adapter of a folder with adapter_config.json and adapter_model.safetensors; `{path: DIR}` suffices."""

    path: str = Field(description="folder with adapter_config.json, such as adapter/ of a run")

    @property
    def saved_in(self) -> str:
        return self.path

    @property
    def is_virtual(self) -> bool:
        return has_virtual_tokens(Path(self.path))

    def build_config(self, targets: Sequence[str]) -> PeftConfig:
        from peft import PeftConfig as Described

        return Described.from_pretrained(self.path)
