"""A folder that transformers loads by from_pretrained, with adapters merged, in safetensors.

model/ of the export is a copy of the run's, which is such a folder already. FiveTune's own decoding answers with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fivetune.delivery.exporters import Exporter

if TYPE_CHECKING:
    from fivetune.model.decode import GenerateAnswers
    from fivetune.types import JsonTable


class HF(Exporter):
    """A model folder of transformers."""

    has_own_engine = False
    packages = ("transformers", "safetensors")

    def explain_unsupported(self, settings: JsonTable, head: str) -> str:
        return ""

    def convert(self, source: Path, target: Path) -> None:
        shutil.copytree(source, target / "model", dirs_exist_ok=True)

    def open(self, folder: Path, *, device: str, num_threads: int) -> GenerateAnswers:
        from fivetune.model.decode import generate

        return generate
