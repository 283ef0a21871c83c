"""The model of a run, loaded once to answer, with the run's own settings.

In: a run directory, or an export of a run, and overrides. Out: a RunModel.
"""

# A caller without types gets FiveTune's error, not Python's.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from fivetune import rundir
from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import find_setting
from fivetune.config.data import NO_SPLIT
from fivetune.config.paths import resolve_adapter
from fivetune.data.readers.source_files import quote_value
from fivetune.data.store.build import INDEX
from fivetune.data.store.token_store import TokenStore
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError, DataError, RunDirError
from fivetune.model.decode import Decoding, GenerateAnswers, generate
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.config_file import find_config_change
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.rundir.reader import read_checksums
from fivetune.rundir.record_checksums import describe_change
from fivetune.tasks import head_of
from fivetune.training.answers.decoding import build_decoding, make_evaluator
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.answers.exported import load_exporter_of, open_export, refuse_fixed_settings
from fivetune.training.answers.model_folder import (
    find_answering_checkpoint,
    refuse_foreign_model,
    refuse_missing_model,
    with_exported_cap,
)
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.mixture import select_part
from fivetune.training.sources import check_sources, prepare_split
from fivetune.training.threads import ThreadControl
from fivetune.types import OnNote, ignore_note

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.load import LoadedModel
    from fivetune.model.modules import T5Model

LoadModel: TypeAlias = "Callable[[Path, RunConfig, ComputeConfig], tuple[LoadedModel, GenerateAnswers]]"
NO_REASONS: Mapping[str, str] = MappingProxyType({})
NO_TARGETS = 0  # lengths of the training targets are not needed: the generation cap of model/ is in the config
HARDWARE = ("device", "train.precision", "train.capture", "train.num_threads")
TRAINING_ONLY = (
    "data.train", "data.max_train_examples", "data.bucket_pool",
    "eval.every_steps", "eval.at_start", "eval.max_examples", "eval.final", "eval.metric",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run, loaded to answer, with the settings of its answers.

    Args:
        config: the run's config with the overrides and the generation cap of model/.
        model: on torch's meta device if the engine of an export holds the weights.
        generate: searches for answers: torch, TPU chips, or the engine of an export.
        threads: chooses the number of CPU threads again while answers are computed; None on other devices.
        temperature: temperature of the confidences.
        checkpoint: the checkpoint whose weights answer; None: the weights of model/.
        has_own_engine: whether the engine of an export answers.
        on_note: called with a sentence if answers are written more slowly than they should be.
    """

    config: RunConfig
    model: T5Model
    tokenizer: PreTrainedTokenizerBase
    compute: ComputeConfig
    generate: GenerateAnswers = field(default=generate)
    threads: ThreadControl | None = None
    temperature: float = 1.0
    checkpoint: Path | None = None
    has_own_engine: bool = False
    on_note: OnNote = ignore_note

    def make_evaluator(self, store: TokenStore, *, decoding: Decoding | None = None) -> Evaluator:
        """Make the evaluator of tokenised questions, which scores the answers where there are references.

        Args:
            decoding: options of the search; default: the run's options.
        """
        evaluator = make_evaluator(
            self.config,
            self.tokenizer,
            store,
            self.compute,
            target_p99=NO_TARGETS,
            generate=self.generate,
            decoding=decoding,
        )
        return replace(evaluator, temperature=self.temperature, on_note=self.on_note)

    def make_predictor(self, store: TokenStore, *, decoding: Decoding | None = None) -> Evaluator:
        """Make the evaluator of tokenised questions without references: it computes no loss of targets."""
        evaluator = self.make_evaluator(store, decoding=decoding)
        return replace(evaluator, decoding=replace(evaluator.decoding, score_targets=False))

    def build_decoding(self) -> Decoding:
        """Build the options of the run's searches for answers without references."""
        own = build_decoding(self.config, self.tokenizer, target_p99=NO_TARGETS)
        return replace(own, score_targets=False)

    def build_evaluator(
        self,
        *,
        on_progress: ProgressCallback = ignore_progress,
        on_damage: OnNote = warnings.warn,
    ) -> Evaluator:
        """Tokenise config.data.eval and make its evaluator. Raises DataError if there is none.

        Args:
            on_damage: called with a sentence if the tokenised data were damaged, and built again.
        """
        store = prepare_split(self.config, self.tokenizer, "eval", on_progress=on_progress)
        if store is None:
            raise DataError("data.eval: no data to evaluate on. Add --data.eval FILE.")
        if store.rebuilt:
            on_damage(store.rebuilt)
        return self.make_evaluator(store)


def check_folder(folder: str | Path) -> Path:
    """Return the path of a run directory that Python code gives. Raises ConfigError for a value of another type."""
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"the run directory is {quote_value(str(folder))}. Allowed is a path. Name the run's folder.")
    return Path(folder)


def load_run_model(
    folder: str | Path,
    overrides: Mapping[str, object] | None = None,
    *,
    unsupported: Mapping[str, str] = NO_REASONS,
    on_damage: OnNote = warnings.warn,
    on_note: OnNote = ignore_note,
    world: World = SINGLE_PROCESS,
    load_model: LoadModel | None = None,
    uses_checkpoint: bool = False,
) -> RunModel:
    """Load model/ of a run directory, or an export of one.

    Args:
        overrides: settings that differ from the run's, by dotted name: {"eval.batch_size": 8, "device": "cpu"}.
        unsupported: settings without effect for the caller, each with the reason; settings of training never have one.
        on_damage: called with a sentence for each damaged file that prediction does not need.
        on_note: called with the reasons of the precision, of the number of CPU threads, and of slower answers, where
            they need one.
        world: the ranks that predict together; each loads the model on its own device, by `load_model`.
        uses_checkpoint: of a run that is not finished, load the newest whole checkpoint, and report it to `on_damage`.

    Raises RunDirError if the run has no model, its files are damaged or another run's, ConfigError for an override
    without effect.
    """
    folder = check_folder(folder)
    rundir.refuse_foreign(folder)

    # Only the files that answers follow from are read: a long run has 100,000 steps.
    damage = rundir.Damage()
    listed = read_checksums(folder, rundir.Damage())
    if changed := find_config_change(folder) or describe_change(folder, rundir.CONFIG, listed):
        damage.append(changed)
    machine = rundir.read_machine(folder, damage)
    status = rundir.read_status(folder, damage)
    for text in damage:
        on_damage(text)

    # The files of an export are verified by its own list; the manifest of model/ says to which run it belongs.
    exporter = load_exporter_of(folder)
    checkpoint = None
    if exporter is None:
        if uses_checkpoint:
            checkpoint = find_answering_checkpoint(folder, status)
        else:
            refuse_missing_model(folder, status)
        if checkpoint is None:
            refuse_foreign_model(folder, machine.run_id)
    config = resolve_config(folder, overrides or {}, unsupported)
    temperature = read_temperature(rundir.find_model_folder(folder))

    # An export may have an engine of its own, which holds the weights, the precision and the threads.
    if exporter and exporter.has_own_engine:
        refuse_fixed_settings(overrides or (), exporter.plugin_name())
        opened = open_export(exporter, folder, config, world)
        return RunModel(
            config=config,
            model=opened.model,
            tokenizer=opened.tokenizer,
            compute=opened.compute,
            generate=opened.generate,
            temperature=temperature,
            has_own_engine=True,
        )
    from fivetune.model.decode.engine import explain_slow_decoding
    from fivetune.model.weight_cache import join_projections
    from fivetune.training.autotune.precision import adopt_trained_precision
    from fivetune.training.compute import choose_compute

    # The precision of the training, unless one is given: in another one answers and scores differ.
    compute = choose_compute(config, world)
    compute = adopt_trained_precision(compute, config.train.precision, machine.precision)
    load = load_model or _load_model
    if checkpoint:
        loaded, answer = _load_checkpoint(checkpoint, config, compute)
        on_damage(f"{folder}: the run is not finished; its checkpoint of step {int(checkpoint.name):,} answers")
    else:
        loaded, answer = load(folder, config, compute)
    join_projections(loaded.model)
    threads = None
    if compute.kind == "cpu":
        threads = ThreadControl.from_setting(config.train.num_threads)
    if compute.reasons:
        on_note(compute.reasons)
    if answer is generate:
        fault = explain_slow_decoding(loaded.model, compute.device, compute.make_autocast)
        if fault:
            on_note(f"answers are computed by transformers' modules, which are slower: {fault}")
    return RunModel(
        config=config,
        model=loaded.model.eval(),
        tokenizer=loaded.tokenizer,
        compute=compute,
        generate=answer,
        threads=threads,
        temperature=temperature,
        checkpoint=checkpoint,
        on_note=on_note,
    )


def resolve_config(
    folder: Path, overrides: Mapping[str, object], unsupported: Mapping[str, str] = NO_REASONS
) -> RunConfig:
    """Return the config of a run for answers: with the overrides, and the generation cap of model/.

    Args:
        unsupported: as for `load_run_model`.

    Raises ConfigError for an override without effect, DataError for a data.eval that is no data.
    """
    config = load_config(folder / rundir.CONFIG, _replace_share(overrides), trained=True)
    config = select_part(config, overrides)
    _refuse_unused_overrides(overrides, unsupported)
    # The working directory may differ from that of the training: relative paths are resolved with machine.json.
    config = config.replace("run", dir=str(folder))
    if "data.eval" in overrides:
        check_sources(config.replace("data", train=()))
    # A run of somebody else does not choose where to write: only where there are tokenised data already.
    is_own = "data.cache_dir" in map(find_setting, overrides)
    cache = config.data.cache_dir
    if cache is not None and not is_own and not any(Path(cache).glob(f"*/{INDEX}")):
        config = config.replace("data", cache_dir=None)
    return with_exported_cap(config, rundir.find_model_folder(folder))


def _load_model(folder: Path, config: RunConfig, compute: ComputeConfig) -> tuple[LoadedModel, GenerateAnswers]:
    """Load model/ of a run, with the virtual tokens that it trained, on the device; also returns what answers."""
    from fivetune.model.adapter import FOLDER, attach_exported, find_adapter
    from fivetune.model.load import load_model_and_tokenizer
    from fivetune.training.step.engine import build_engine

    model = rundir.find_model_folder(folder)
    loaded = load_model_and_tokenizer(str(model), head=head_of(config.task), any_seq2seq=config.model.any_seq2seq)
    attach_exported(loaded.model, model)
    # If virtual tokens are lost, model/ alone is the base, whose answers are not the run's.
    options = resolve_adapter(config.model.adapter, folder)
    if options and options.is_virtual and not find_adapter(loaded.model):
        raise RunDirError(
            f"{folder / FOLDER}: missing or damaged; it holds the virtual tokens that the run trained, and model/ is "
            f"the unchanged base. Copy {FOLDER}/ beside model/, or export again from the checkpoint with --resume."
        )
    loaded.model = loaded.model.to(compute.device)
    return loaded, build_engine(config, loaded.model, compute).generate


def _load_checkpoint(
    checkpoint: Path, config: RunConfig, compute: ComputeConfig
) -> tuple[LoadedModel, GenerateAnswers]:
    """Load the base of a run with the weights of a checkpoint."""
    from fivetune.training.setup import load_configured_model  # the modules of training, not for a finished run
    from fivetune.training.state.checkpoint import load_weights
    from fivetune.training.step.engine import build_engine

    loaded = load_configured_model(config, compute.device)
    load_weights(checkpoint, loaded.model)
    loaded.model = loaded.model.to(compute.device)
    return loaded, build_engine(config, loaded.model, compute).generate


def _replace_share(overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Remove the run's data.eval_share where this call gives a data.eval, unless it gives both."""
    keys = set(map(find_setting, overrides))
    no_split = {f"data.{name}": value for name, value in NO_SPLIT.items()}
    if "data.eval" not in keys or keys & no_split.keys():
        return overrides
    return {**overrides, **no_split}


def _refuse_unused_overrides(overrides: Iterable[str], unsupported: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting without effect."""
    for given in overrides:
        key = find_setting(given)
        if key in unsupported:
            raise ConfigError(f"--{given}: has no effect here: {unsupported[key]}. Leave it out.")
        used = key in HARDWARE or key.partition(".")[0] in ("data", "eval", "task")
        if not used or key in TRAINING_ONLY:
            raise ConfigError(
                f"--{given}: has no effect here: the model is trained. Allowed: {', '.join(HARDWARE)}, and settings of "
                "data.*, eval.* and task.* that affect its predictions. Leave it out."
            )
