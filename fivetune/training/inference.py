"""A trained run, opened again to answer and to be scored.

In: a run directory and overrides. Out: its model on a device, with the settings that it was trained with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivetune import rundir
from fivetune.config import RunConfig, load_config
from fivetune.config_layers import ALIASES
from fivetune.data.store import Source, TokenStore, prepare
from fivetune.errors import ConfigError, DataError, RunDirError
from fivetune.evaluate import Evaluator
from fivetune.model.load import load
from fivetune.progress import Count, uncounted
from fivetune.tasks import head_of
from fivetune.tasks.jsonl import Jsonl
from fivetune.telemetry.devices import enough_memory
from fivetune.training.mixture import alone, refuse_whole
from fivetune.training.setup import Place, find_place, limits_of, make_evaluator, prepare_split

NOTHING: Mapping[str, str] = MappingProxyType({})
FALLBACK_P99 = 64  # target length, for a run directory without data.json
HARDWARE = ("device", "train.precision", "train.num_threads")
TRAINING_ONLY = (
    "data.train", "data.max_train_examples", "data.bucket_pool",
    "eval.every_steps", "eval.at_start", "eval.max_examples", "eval.metric",
)  # fmt: skip
PREDICTED = ("id", "prediction", "confidence", "logprob", "no_answer_score", "candidates", "hit_cap")


@dataclass(slots=True)
class TrainedRun:
    """A model of a run directory, ready to generate; `step` is the one that its weights are of."""

    config: RunConfig
    model: Any
    tokenizer: Any
    place: Place
    target_p99: int
    step: int

    def evaluator(self, *, count: Count = uncounted) -> Evaluator:
        """How the run's task is scored on config.data.eval."""
        store = prepare_split(self.config, self.tokenizer, "eval", count=count)
        if store is None:
            raise DataError("data.eval: no data to evaluate on. Add --data.eval FILE.")
        return make_evaluator(self.config, self.tokenizer, store, self.place, target_p99=self.target_p99)

    def answers(
        self, *, source: str | None, texts: Sequence[str] | None, count: Count = uncounted
    ) -> list[dict[str, Any]]:
        """One line per question of `source` or per text, in their order; PREDICTED says what is in it."""
        refuse_whole(self.config)
        lines: dict[int, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="fivetune-predict-") as folder, enough_memory():
            store = self._store(source, texts, Path(folder), count)
            evaluator = make_evaluator(self.config, self.tokenizer, store, self.place, target_p99=self.target_p99)
            evaluator = replace(evaluator, decoding=replace(evaluator.decoding, score_targets=False))
            for line in evaluator.lines(self.model, progress=partial(count, "answering")):
                lines[line["question"]] = {key: line[key] for key in PREDICTED if key in line}
        return [lines[question] for question in sorted(lines)]

    def _store(self, source: str | None, texts: Sequence[str] | None, folder: Path, count: Count) -> TokenStore:
        limits = limits_of(self.config)
        if source is not None:
            described = Source(
                paths=(source,), task=self.config.task, limits=limits, columns=self.config.data.columns,
                on_bad_record=self.config.data.on_bad_record, labelled=False,
            )  # fmt: skip
            return prepare(described, self.tokenizer, cache=folder, progress=count)
        empty = [str(i) for i, text in enumerate(texts or (), start=1) if not text.strip()]
        if empty:
            raise DataError(f"--inputs: text {', '.join(empty)} is empty. Give each text as the model reads it.")
        table = folder / "texts.jsonl"
        rundir.write_text(table, "".join(_as_line(i, text) for i, text in enumerate(texts or ())))
        return prepare(
            Source(paths=(str(table),), task=Jsonl(), limits=limits, labelled=False), self.tokenizer, cache=folder
        )


def open_run(
    folder: Path, overrides: Mapping[str, Any] | None = None, *, without: Mapping[str, str] = NOTHING
) -> TrainedRun:
    """Load model/ of a run.

    Args:
        overrides: settings that are others than in the run.
        without: settings that have no effect for the caller, each with the reason, besides those of training.

    Raises RunDirError if the run has no model yet, ConfigError for an override without effect.
    """
    rundir.refuse_foreign(folder)
    if not (folder / "model").is_dir():
        raise RunDirError(
            f"{folder}: has no model/ yet: the run is not finished. Go on with: fivetune train {folder} --resume"
        )
    config = alone(load_config(folder / rundir.CONFIG, overrides), overrides or ())
    _refuse_idle(overrides or (), without)
    status = rundir.read_status(folder)
    place = find_place(config)
    loaded = load(str(folder / "model"), head=head_of(config.task))
    best = status.get("best") or {}
    return TrainedRun(
        config=config,
        model=loaded.model.to(place.device).eval(),
        tokenizer=loaded.tokenizer,
        place=place,
        target_p99=rundir.read_data(folder).get("train", {}).get("target_p99", FALLBACK_P99),
        step=best.get("step", status.get("step", 0)),
    )


def _refuse_idle(overrides: Iterable[str], without: Mapping[str, str]) -> None:
    """Raise ConfigError for a setting that would change nothing."""
    for given in overrides:
        key = ALIASES.get(given.replace("-", "_"), given)
        if key in without:
            raise ConfigError(f"--{given}: has no effect here: {without[key]}. Leave it out.")
        used = key in HARDWARE or key.partition(".")[0] in ("data", "eval", "task")
        if not used or key in TRAINING_ONLY:
            raise ConfigError(
                f"--{given}: has no effect here: the model is trained. Allowed: {', '.join(HARDWARE)}, and of data.*, "
                "eval.* and task.* what decides how it answers. Leave it out."
            )


def _as_line(index: int, text: str) -> str:
    return json.dumps({"id": str(index), "inputs": text}, ensure_ascii=False) + "\n"
