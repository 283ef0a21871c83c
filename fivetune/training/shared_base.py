"""Several runs on one base: its weights are in memory once, and each run adds its adapter.

In: runs that trained an adapter of the same base. Out: their models, which share its tensors. The matrices of adapters
are not merged, so that answers agree with the answers of model/ up to rounding.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path, resolve_adapter
from fivetune.errors import ConfigError
from fivetune.model.adapter import FOLDER, attach_adapter, compute_base_checksum
from fivetune.model.adapters.saved import Saved
from fivetune.model.decode import GenerateAnswers, generate
from fivetune.model.load import LoadedModel, find_source, load_model_and_tokenizer
from fivetune.model.modules import T5Model
from fivetune.model.saved_adapter import BaseModel, read_base
from fivetune.tasks import head_of
from fivetune.training.compute_config import ComputeConfig

ALONE = "Serve it without --one-base."


class SharedBase:
    """Loads the models of runs; the first one loads the base, which the others must have too."""

    def __init__(self) -> None:
        self._loaded: LoadedModel | None = None
        self._first: tuple[Path, BaseModel] | None = None

    def load_model(
        self, folder: Path, config: RunConfig, compute: ComputeConfig
    ) -> tuple[LoadedModel, GenerateAnswers]:
        """Load a run's model for `load_run_model`.

        Raises ConfigError for a run without adapter, with one whose base was in 4 bits, with an extractive head, and
        for one of another base than the first run's.
        """
        trained_on = self._refuse_other_base(folder, config)
        if self._loaded is None:
            self._loaded = self._load_base(folder, config, trained_on)
            self._loaded.model.to(compute.device)
            self._first = (folder, trained_on)
        # An adapter replaces modules: each run has its own ones, around the same tensors.
        model = copy_modules(self._loaded.model)
        attach_adapter(model, Saved(path=str(folder / FOLDER)), base=trained_on.name, device=str(compute.device))
        return replace(self._loaded, model=model.to(compute.device)), generate

    def _refuse_other_base(self, folder: Path, config: RunConfig) -> BaseModel:
        """Return the base of a run's adapter. Raises ConfigError."""
        trained_on = read_base(folder / FOLDER)
        if resolve_adapter(config.model.adapter, folder) is None or trained_on is None:
            raise ConfigError(f"--one-base: {folder} was not trained with an adapter of a base. {ALONE}")
        if trained_on.bits != 32:
            raise ConfigError(
                f"--one-base: {folder}: the base of its adapter was in {trained_on.bits} bits (qlora), and the common "
                f"one is not. {ALONE}"
            )
        if head_of(config.task) != "generate":
            raise ConfigError(f"--one-base: {folder}: task.head extractive trains another model. {ALONE}")
        if self._first and trained_on.checksum != self._first[1].checksum:
            first, base = self._first
            raise ConfigError(
                f"--one-base: {folder} was trained on {trained_on.name} (weights {trained_on.checksum}), and {first} "
                f"on {base.name} (weights {base.checksum}). Allowed are adapters of one base. {ALONE}"
            )
        return trained_on

    def _load_base(self, folder: Path, config: RunConfig, trained_on: BaseModel) -> LoadedModel:
        """Load the base from where the training had it. Raises ConfigError if its weights have changed."""
        section = config.model
        path, tokenizer = [name and find_typed_path(name, folder) for name in (section.path, section.tokenizer)]
        source = find_source(path, config=None, init="pretrained", revision=section.revision)
        loaded = load_model_and_tokenizer(str(source), tokenizer=tokenizer, any_seq2seq=section.any_seq2seq)
        checksum = compute_base_checksum(loaded.model)
        if checksum != trained_on.checksum:
            raise ConfigError(
                f"--one-base: {folder} was trained on {trained_on.name} with weights {trained_on.checksum}, and "
                f"{path} has weights {checksum}. Restore the base, or serve the runs without --one-base."
            )
        return loaded


def copy_modules(model: T5Model) -> T5Model:
    """Copy the modules of a model, not its parameters and buffers."""
    # deepcopy takes what its memo has under an object's id as that object's copy.
    held = [*model.parameters(), *model.buffers()]
    return deepcopy(model, {id(tensor): tensor for tensor in held})
