"""A trained run, opened again to answer and to be scored.

In: a run directory and overrides. Out: its model on a device, with the settings that it was trained with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivetune import rundir
from fivetune.config import RunConfig, load_config
from fivetune.data.encode import Limits
from fivetune.data.store import Source, TokenStore, prepare
from fivetune.decode import generate, to_text
from fivetune.errors import DataError, RunDirError
from fivetune.evaluate import Evaluator
from fivetune.model.load import load
from fivetune.progress import Count, uncounted
from fivetune.tasks.jsonl import Jsonl
from fivetune.telemetry.devices import enough_memory
from fivetune.training.setup import Place, find_place, make_evaluator, prepare_split

FALLBACK_P99 = 64  # target length, for a run directory without data.json


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
        """One line per record of `source` or per text, in their order: id, prediction, hit_cap."""
        lines: dict[int, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory(prefix="fivetune-predict-") as folder, enough_memory():
            store = self._store(source, texts, Path(folder), count)
            evaluator = make_evaluator(self.config, self.tokenizer, store, self.place, target_p99=self.target_p99)
            generated = generate(
                self.model, store, range(len(store)), evaluator.decoding,
                device=self.place.device, autocast=self.place.autocast,
            )  # fmt: skip
            for done, one in enumerate(generated, start=1):
                written = to_text(self.tokenizer, one.token_ids, keep_special=evaluator.keep_special)
                lines[one.row] = {
                    "id": store.id(one.row),
                    "prediction": self.config.task.from_text(written),
                    "hit_cap": one.hit_cap,
                }
                count("answering", done, len(store))
        return [lines[row] for row in sorted(lines)]

    def _store(self, source: str | None, texts: Sequence[str] | None, folder: Path, count: Count) -> TokenStore:
        limits = Limits(
            self.config.data.max_input_tokens, self.config.data.max_target_tokens, self.config.data.overlong
        )
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


def open_run(folder: Path, overrides: Mapping[str, Any] | None = None) -> TrainedRun:
    """Load model/ of a run. Raises RunDirError if the run has none yet."""
    rundir.refuse_foreign(folder)
    if not (folder / "model").is_dir():
        raise RunDirError(
            f"{folder}: has no model/ yet: the run is not finished. Go on with: fivetune train {folder} --resume"
        )
    config = load_config(folder / rundir.CONFIG, overrides)
    status = rundir.read_status(folder)
    place = find_place(config)
    loaded = load(str(folder / "model"))
    best = status.get("best") or {}
    return TrainedRun(
        config=config,
        model=loaded.model.to(place.device).eval(),
        tokenizer=loaded.tokenizer,
        place=place,
        target_p99=rundir.read_data(folder).get("train", {}).get("target_p99", FALLBACK_P99),
        step=best.get("step", status.get("step", 0)),
    )


def _as_line(index: int, text: str) -> str:
    return json.dumps({"id": str(index), "inputs": text}, ensure_ascii=False) + "\n"
