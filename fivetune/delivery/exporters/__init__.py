"""Exporters: a trained run in another format, one per file.

An exporter's file holds one subclass of `Exporter`, whose fields are its options (`--quantization int8`). In: model/ of
a run. Out: a folder that `fivetune evaluate` and `fivetune predict` run, with the proof of what changed.

    export.json    format, options, source run, versions, sha256 of the files, the proof and its verdict
    config.yaml, machine.json, data.json, status.json    copies of the run's
    model/         config.json, tokenizer, generation_config.json; of the format hf also the weights
    <format>/      the files of another engine
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import ValidationError

from fivetune import plugins
from fivetune.errors import ConfigError, suggest_names
from fivetune.plugins import Options

if TYPE_CHECKING:
    from fivetune.model.decode import GenerateAnswers
    from fivetune.types import JsonTable


NOT_OFFERED = {
    "onnx": "no kept exporter supports transformers 5: optimum-onnx requires transformers below 4.58",
    "gguf": "it is unproved: the converter of T5 is a script of llama.cpp's repository, which no package holds",
}


class Exporter(Options, ABC):
    """Options and methods of a format.

    Class attributes:
        has_own_engine: whether another engine than FiveTune's computes the answers, with weights of its own; else
            model/ holds the weights.
        packages: names of the packages whose versions export.json records.
    """

    has_own_engine: ClassVar[bool] = True
    packages: ClassVar[tuple[str, ...]] = ()

    def get_folder_name(self) -> str:
        """The name of the export's folder if the user gives none."""
        return self.plugin_name()

    @abstractmethod
    def explain_unsupported(self, settings: JsonTable, head: str) -> str:
        """Explain why a model cannot be converted; "" if it can.

        Args:
            settings: content of its config.json. head: task.head of its run.
        """

    def has_same_probabilities(self, settings: JsonTable) -> bool:
        """Whether answers have the probabilities that the run gives them, so that a promise about them holds.

        Args:
            settings: content of config.json.
        """
        return True

    @abstractmethod
    def convert(self, source: Path, target: Path) -> None:
        """Write the weights of model/ of a run into an export.

        Args:
            target: folder of the export; its model/ has the files of `source` without the weights.

        Raises FiveTuneEnvironmentError if a package is not installed.
        """

    @abstractmethod
    def open(self, folder: Path, *, device: str, num_threads: int) -> GenerateAnswers:
        """Load an export for answers.

        Args:
            folder: of the export. device: cpu, cuda or cuda:N. num_threads: of a CPU.

        Raises FiveTuneEnvironmentError if a package is not installed.
        """


def load_format(name: str, values: Mapping[str, object]) -> Exporter:
    """Load a format with its options. Raises ConfigError for an option that it does not have, or a wrong value."""
    if reason := NOT_OFFERED.get(name):
        allowed = ", ".join(plugins.list_plugins("exporters"))
        raise ConfigError(f"--format {name}: is not offered: {reason}. Allowed: {allowed}.")
    kind = plugins.load_plugin("exporters", name)
    for option, value in values.items():
        if option not in kind.model_fields:
            known = ", ".join(f"--{one}" for one in kind.model_fields) or "none"
            raise ConfigError(f"--{option} {value}: --format {name} has no such option. Its options: {known}. Omit it.")
    try:
        return kind.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0])
        allowed = str(first.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
        advice = suggest_names(str(values[option]), allowed)
        raise ConfigError(f"--{option} {values[option]}: --format {name} has no such value. {advice}") from None
