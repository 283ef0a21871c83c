"""A trained run, loaded once for prediction and evaluation.

In: a run directory and overrides. Out: predictions, or an EvalRecord, computed with the run's own settings.
"""

# A caller without types gets FiveTune's error, not Python's.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fivetune import rundir
from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import find_setting
from fivetune.config.data import NO_SPLIT
from fivetune.config.paths import resolve_adapter
from fivetune.data.examples import Source
from fivetune.data.readers.source_files import quote_value
from fivetune.data.store.build import INDEX
from fivetune.data.store.token_store import TokenStore, describe_data, load_or_build_store
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.errors import ConfigError, DataError, RunDirError
from fivetune.machine.telemetry.devices import translate_oom_errors
from fivetune.model.adapter import FOLDER, attach_exported, find_adapter
from fivetune.model.decode import GenerateAnswers, explain_slow_decoding, generate
from fivetune.model.load import LoadedModel, load_model_and_tokenizer, load_without_weights
from fivetune.rundir.checksums import MANIFEST
from fivetune.rundir.confidence_file import read_temperature
from fivetune.rundir.config_file import find_config_change
from fivetune.rundir.export_file import EXPORT
from fivetune.rundir.files import replace_file
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.rundir.reader import read_checksums
from fivetune.rundir.record_checksums import describe_change
from fivetune.rundir.records import Prediction
from fivetune.tasks import head_of
from fivetune.tasks.mixture import Mixture
from fivetune.training.answers.answer_log import FORMAT as ANSWERS_FORMAT
from fivetune.training.answers.answer_log import PATTERN as ANSWERS
from fivetune.training.answers.answer_log import AnswerLog, AnswerWriter
from fivetune.training.answers.batch_size import AutoBatchSize
from fivetune.training.answers.evaluator import Evaluator
from fivetune.training.answers.exported import load_exporter_of, open_engine, refuse_fixed_settings
from fivetune.training.answers.inputs import choose_header
from fivetune.training.answers.model_folder import (
    find_exported_step,
    refuse_foreign_model,
    refuse_missing_model,
    with_exported_cap,
)
from fivetune.training.answers.predicted_file import ANSWERED, PredictedFile
from fivetune.training.answers.requests import answer_requests, list_inputs, name_texts, read_requests
from fivetune.training.autotune.precision import adopt_trained_precision
from fivetune.training.mixture import build_part_configs, require_single_part, select_part
from fivetune.training.setup import build_engine, make_evaluator
from fivetune.training.sources import build_length_limits, check_sources, prepare_split
from fivetune.training.state.resume import select_scored_settings
from fivetune.training.step.learner import ComputeConfig, choose_compute
from fivetune.training.threads import ThreadControl, watch_threads
from fivetune.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model

LoadModel: TypeAlias = Callable[[Path, RunConfig, ComputeConfig], tuple[LoadedModel, GenerateAnswers]]
NO_REASONS: Mapping[str, str] = MappingProxyType({})
NO_TARGETS = 0  # lengths of the training targets are not needed: `load_run` has set the generation cap
HARDWARE = ("device", "train.precision", "train.num_threads")
TRAINING_ONLY = (
    "data.train", "data.max_train_examples", "data.bucket_pool",
    "eval.every_steps", "eval.at_start", "eval.max_examples", "eval.final", "eval.metric",
)  # fmt: skip


def ignore_note(text: str) -> None:
    """An on_note that shows nothing."""


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The exported model of a run directory, loaded for prediction.

    Args:
        folder: the run directory.
        config: the run's config with the overrides and the generation cap of model/.
        step: optimizer step of the weights.
        model: on torch's meta device if the engine of an export holds the weights.
        generate: searches for answers: torch, TPU chips, or the engine of an export.
        threads: chooses the number of CPU threads again while answers are computed; None on other devices.
        temperature: of the confidences.
    """

    folder: Path
    config: RunConfig
    model: T5Model
    tokenizer: PreTrainedTokenizerBase
    compute: ComputeConfig
    step: int
    generate: GenerateAnswers = field(default=generate)
    threads: ThreadControl | None = None
    temperature: float = 1.0

    @property
    def is_export(self) -> bool:
        return (self.folder / EXPORT).is_file()

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.folder)!r}, {self.config.task.plugin_name()}, step {self.step})"

    def build_evaluator(
        self,
        *,
        on_progress: ProgressCallback = ignore_progress,
        on_damage: Callable[[str], object] = warnings.warn,
    ) -> Evaluator:
        """Build the evaluator of the run's task on config.data.eval. Raises DataError if that is empty.

        Args:
            on_damage: called with a sentence if the tokenised data were damaged, and built again.
        """
        store = prepare_split(self.config, self.tokenizer, "eval", on_progress=on_progress)
        if store is None:
            raise DataError("data.eval: no data to evaluate on. Add --data.eval FILE.")
        if store.rebuilt:
            on_damage(store.rebuilt)
        return self._make_evaluator(store)

    def predict(
        self,
        inputs: Iterable[Mapping[str, object] | str],
        *,
        batch_size: AutoBatchSize | int | None = None,
        on_progress: ProgressCallback = ignore_progress,
        on_note: Callable[[str], object] = ignore_note,
    ) -> list[Prediction]:
        """Predict for records or texts; returns one Prediction each, in order.

        Args:
            inputs: records with the columns of the run's data (answers are not needed), or texts. A text is the value
                of the only column that the task reads; for a task of several columns it is the whole input, exactly
                as the model reads it.
            batch_size: examples per generation batch; default: eval.batch_size of the run.
            on_note: called with a sentence when the number of CPU threads changes.

        A record or text that cannot be used gets a Prediction with the reason in `skipped`, also where none can be
        used and whatever data.on_bad_record is. Raises DataError for inputs that are neither records nor texts.
        """
        require_single_part(self.config)
        requests = [name_texts(list_inputs(inputs), self.config.task, self.config.data.columns)]
        return self.predict_each(requests, batch_size=batch_size, on_progress=on_progress, on_note=on_note)[0]

    def predict_each(
        self,
        requests: Sequence[Sequence[Mapping[str, object] | str]],
        *,
        batch_size: AutoBatchSize | int | None = None,
        max_input_tokens: int | None = None,
        on_progress: ProgressCallback = ignore_progress,
        on_note: Callable[[str], object] = ignore_note,
    ) -> list[list[Prediction]]:
        """Predict for several lists of records or texts in common batches; each gets what `predict` returns for it.

        Args:
            requests: unlike for `predict`, a text is always the whole input, exactly as the model reads it.
            max_input_tokens: most tokens of an input before clipping; one with more has a reason in `skipped`.
        """
        require_single_part(self.config)
        report = watch_threads(self.threads, on_progress, on_note)
        columns = self.config.data.columns
        with translate_oom_errors():
            read = read_requests(
                requests, self.tokenizer, task=self.config.task, columns=columns, describe=self._describe_source
            )
            return answer_requests(
                read,
                self.model,
                build_evaluator=self._make_predictor,
                batch_size=batch_size,
                max_input_tokens=max_input_tokens,
                on_progress=partial(report, "answering"),
            )

    def predict_file(
        self,
        source: str | Path,
        *,
        folder: Path | None = None,
        on_progress: ProgressCallback = ignore_progress,
        on_note: Callable[[str], object] = warnings.warn,
        world: World = SINGLE_PROCESS,
    ) -> PredictedFile:
        """Predict for every record of a file; iterating the result yields rows in order, read from the disk.

        Args:
            folder: holds the answers while they are computed and after that; a call that was killed goes on from
                there if weights, settings and data are the same. Default: a temporary one.
            on_note: called with a sentence about answers that an earlier call has left in the folder, and when the
                number of CPU threads changes.
            world: the ranks that share the questions; each needs the same folder.

        A record that cannot be used has the reason in `prediction.skipped`, also where none can be used.
        """
        is_temporary = folder is None
        folder = Path(tempfile.mkdtemp(prefix="fivetune-predict-")) if folder is None else folder
        try:
            watched = watch_threads(self.threads, on_progress, on_note)
            found = self._answer(str(source), folder, watched, on_note, world)
        except BaseException:
            if is_temporary:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return replace(found, temporary=is_temporary)

    def list_parts(self) -> dict[str, LoadedRun]:
        """The run by the name of its task; for a mixture, one run per part, by the name of the part's task."""
        if not isinstance(self.config.task, Mixture):
            return {self.config.task.plugin_name(): self}
        parts = build_part_configs(self.config).values()
        return {part.task.plugin_name(): replace(self, config=part) for part in parts}

    def _answer(
        self,
        source: str,
        folder: Path,
        on_progress: ProgressCallback,
        on_note: Callable[[str], object],
        world: World,
    ) -> PredictedFile:
        """Answer the questions of a source that the folder has no answer to."""
        require_single_part(self.config)
        task, columns = self.config.task, self.config.data.columns
        described = self._describe_source(source, task, columns)
        _, guard = describe_data(described, self.tokenizer)
        found = PredictedFile(source, task, dict(columns), folder, guard, header=self.config.data.header)
        if all(row.skipped for row in found.iter_records()):
            return found
        with translate_oom_errors():
            with world.run_rank_zero_first(f"answers in {folder}"), guard.explain_errors(ANSWERED):
                store = load_or_build_store(
                    described, self.tokenizer, cache=folder / "data", cache_setting="--output", on_progress=on_progress
                )
                guard.refuse_change(ANSWERED)
                if store.rebuilt:
                    on_note(store.rebuilt)
                if world.is_first:
                    self._discard_other_answers(folder, store, on_note)
            evaluator = self._make_predictor(store)
            with AnswerLog(folder) as answers:
                missing = np.setdiff1d(np.arange(store.num_groups), answers.questions)
            world.barrier()  # no rank reads what another already writes
            before, total = store.num_groups - len(missing), store.num_groups
            if before and world.is_first:
                on_note(f"{before:,} of {total:,} records are answered already in {folder}.")
            with AnswerWriter(folder, world.rank) as writer:
                answered = evaluator.predict(self.model, questions=missing, world=world)
                for number, (question, prediction) in enumerate(answered, start=1):
                    writer.append(question, prediction)
                    on_progress("answering", min(before + number * world.size, total), total)
            world.barrier()
        return found

    def _discard_other_answers(self, folder: Path, store: TokenStore, on_note: Callable[[str], object]) -> None:
        """Remove the answers of other weights, settings or data; writes what the next ones belong to."""
        listed = self.folder / EXPORT if self.is_export else rundir.find_model_folder(self.folder) / MANIFEST
        weights = sha256(listed.read_bytes())
        for path in sorted((self.folder / FOLDER).glob("*.safetensors")):  # virtual tokens are not in model/
            weights.update(path.read_bytes())
        settings = {
            **select_scored_settings(self.config),
            "task": self.config.task.model_dump(mode="json"),
            "data": store.fingerprint,
            "format": ANSWERS_FORMAT,
            "precision": self.compute.precision,
            "weights": weights.hexdigest(),
        }
        path = folder / "answers.json"
        old = path.read_text(encoding="utf-8") if path.is_file() else None
        if old == (new := json.dumps(settings, sort_keys=True)):
            return
        for answers in (stale := sorted(folder.glob(ANSWERS))):
            answers.unlink()
        if stale:
            on_note(f"{folder}: its answers are of other weights, settings or data, and are computed again.")
        with replace_file(path) as file:
            file.write(new.encode())

    def _describe_source(self, path: str, task: Task, columns: Mapping[str, str]) -> Source:
        """Describe a source of questions without gold answers."""
        return Source(
            paths=(path,),
            task=task,
            limits=build_length_limits(self.config),
            columns=dict(columns),
            header=choose_header(path, task, columns, self.config.data.header),
            on_bad_record="skip",
            labelled=False,
        )

    def _make_predictor(self, store: TokenStore) -> Evaluator:
        evaluator = self._make_evaluator(store)
        return replace(evaluator, decoding=replace(evaluator.decoding, score_targets=False))

    def _make_evaluator(self, store: TokenStore) -> Evaluator:
        evaluator = make_evaluator(
            self.config, self.tokenizer, store, self.compute, target_p99=NO_TARGETS, generate=self.generate
        )
        return replace(evaluator, temperature=self.temperature)


def load_run(
    folder: str | Path,
    overrides: Mapping[str, object] | None = None,
    *,
    unsupported: Mapping[str, str] = NO_REASONS,
    on_damage: Callable[[str], object] = warnings.warn,
    on_note: Callable[[str], object] = ignore_note,
    world: World = SINGLE_PROCESS,
    load_model: LoadModel | None = None,
) -> LoadedRun:
    """Load model/ of a run directory, or an export of one.

    Args:
        overrides: settings that differ from the run's, by dotted name: {"eval.batch_size": 8, "device": "cpu"}.
        unsupported: settings without effect for the caller, each with the reason; those of training never have one.
        on_damage: called with a sentence for each damaged file that prediction does not need.
        on_note: called with the reasons of the precision, of the number of CPU threads, and of slower answers, where
            they need one.
        world: the ranks that predict together; each loads the model on its own device, by `load_model`.

    Raises RunDirError if the run has no model, its files are damaged or another run's, ConfigError for an override
    without effect.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"the run directory is {quote_value(str(folder))}. Allowed is a path. Name the run's folder.")
    folder = Path(folder)
    rundir.refuse_foreign(folder)
    listed = read_checksums(folder, rundir.Damage())
    damage = rundir.Damage()
    if changed := find_config_change(folder) or describe_change(folder, rundir.CONFIG, listed):
        damage.append(changed)
    machine = rundir.read_machine(folder, damage)
    status = rundir.read_status(folder, damage)
    for text in damage:
        on_damage(text)
    if (exporter := load_exporter_of(folder)) is None:
        refuse_missing_model(folder, status)
        refuse_foreign_model(folder, machine.run_id)
    config = resolve_config(folder, overrides or {}, unsupported)
    compute = choose_compute(config, world)
    if exporter and exporter.has_own_engine:
        refuse_fixed_settings(overrides or (), exporter.plugin_name())
        loaded, answer = load_without_weights(folder / "model"), open_engine(exporter, folder, compute)
        compute, threads = replace(compute, precision="fp32", precision_why=""), None
    else:
        compute = adopt_trained_precision(compute, config.train.precision, machine.precision)
        loaded, answer = (load_model or _load_model)(folder, config, compute)
        threads = ThreadControl.from_setting(config.train.num_threads) if compute.kind == "cpu" else None
    if compute.reasons:
        on_note(compute.reasons)
    if answer is generate and (fault := explain_slow_decoding(loaded.model, compute.device, compute.make_autocast)):
        on_note(f"answers are computed by transformers' modules, which are slower: {fault}")
    return LoadedRun(
        folder=folder,
        config=config,
        model=loaded.model.eval(),
        tokenizer=loaded.tokenizer,
        compute=compute,
        step=find_exported_step(folder, status),
        generate=answer,
        threads=threads,
        temperature=read_temperature(rundir.find_model_folder(folder)),
    )


def resolve_config(
    folder: Path, overrides: Mapping[str, object], unsupported: Mapping[str, str] = NO_REASONS
) -> RunConfig:
    """Return the config of a run for answers: with the overrides, and the generation cap of model/.

    Args:
        unsupported: as for `load_run`.

    Raises ConfigError for an override without effect, DataError for a data.eval that is no data.
    """
    config = load_config(folder / rundir.CONFIG, _replace_share(overrides), trained=True)
    config = select_part(config, overrides)
    _refuse_unused_overrides(overrides, unsupported)
    # The working directory may differ from that of the training: relative paths are resolved with machine.json.
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
    if "data.eval" in overrides:
        check_sources(config.model_copy(update={"data": config.data.model_copy(update={"train": ()})}))
    if "data.cache_dir" not in map(find_setting, overrides):
        config = _leave_foreign_cache(config)
    return with_exported_cap(config, rundir.find_model_folder(folder))


def _leave_foreign_cache(config: RunConfig) -> RunConfig:
    """Replace a data.cache_dir that holds no tokenised data: a run of somebody else does not choose where to write."""
    cache = config.data.cache_dir
    if cache is None or any(Path(cache).glob(f"*/{INDEX}")):
        return config
    return config.model_copy(update={"data": config.data.model_copy(update={"cache_dir": None})})


def _load_model(folder: Path, config: RunConfig, compute: ComputeConfig) -> tuple[LoadedModel, GenerateAnswers]:
    """Load model/ of a run, with the virtual tokens that it trained, on the device; also returns what answers."""
    model = rundir.find_model_folder(folder)
    loaded = load_model_and_tokenizer(str(model), head=head_of(config.task), any_seq2seq=config.model.any_seq2seq)
    attach_exported(loaded.model, model)
    _refuse_missing_adapter(folder, config, loaded.model)
    loaded.model = loaded.model.to(compute.device)
    return loaded, build_engine(config, loaded.model, compute).generate


def _refuse_missing_adapter(folder: Path, config: RunConfig, model: T5Model) -> None:
    """Raise RunDirError if the run trained virtual tokens and they are lost: model/ alone is the base."""
    options = resolve_adapter(config.model.adapter, folder)
    if options and options.is_virtual and not find_adapter(model):
        raise RunDirError(
            f"{folder / FOLDER}: missing or damaged; it holds the virtual tokens that the run trained, and model/ is "
            f"the unchanged base. Copy {FOLDER}/ beside model/, or export again from the checkpoint with --resume."
        )


def _replace_share(overrides: Mapping[str, object]) -> Mapping[str, object]:
    """Remove the run's data.eval_share where this call gives a data.eval, unless it gives both."""
    keys = set(map(find_setting, overrides))
    no_split = {f"data.{name}": value for name, value in NO_SPLIT.items()}
    return overrides if "data.eval" not in keys or keys & no_split.keys() else {**overrides, **no_split}


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
