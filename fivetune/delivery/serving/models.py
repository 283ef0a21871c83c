"""The models of a server: runs and exports, opened under names of their own, some with a base in common.

In: folders. Out: a ServedModel each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.delivery.serving.batching import AnswerTogether
from fivetune.delivery.serving.demo import find_examples
from fivetune.delivery.serving.schema import RunFacts, list_fields
from fivetune.errors import ConfigError
from fivetune.rundir.export_file import read_export
from fivetune.tasks import TaskOptions, head_of
from fivetune.training.answers.loading import load_run_model
from fivetune.training.answers.trained_run import TrainedRun
from fivetune.training.mixture import require_single_part
from fivetune.types import OnNote

if TYPE_CHECKING:
    from fivetune.training.shared_base import SharedBase

MAX_BEAMS, MAX_NEW_TOKENS = 8, 256
WITHOUT_EFFECT: dict[str, str] = dict.fromkeys(
    ("data.eval", "data.max_eval_examples", "data.cache_dir"), "serve answers the records of requests"
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What answers, and what is shown of it."""

    facts: RunFacts
    answer: AnswerTogether
    folder: Path


def open_models(
    folders: Sequence[str],
    settings: Mapping[str, object],
    *,
    shares_base: bool,
    max_input_tokens: int,
    num_examples: int,
    withheld: Mapping[str, Any] | None = None,
    on_warning: OnNote,
    on_note: OnNote,
) -> dict[str, ServedModel]:
    """Open runs and exports; returns them by name, in order.

    Args:
        settings: overrides, which apply to all.
        shares_base: whether all are adapters of one base, whose weights are held once.
        num_examples: right ones and wrong ones of each run's evaluation, for the page.
        withheld: max_error and min_confidence, as for `TrainedRun.predict`; None: what each run keeps.

    Raises ConfigError for a folder given twice, a mixture, a search that costs too much, and runs without that base.
    """
    warned: set[str] = set()

    def warn_once(text: str) -> None:  # a damaged record is read for the model, and again for the examples
        if text not in warned:
            warned.add(text)
            on_warning(text)

    base: SharedBase | None = None
    if shares_base:
        from fivetune.training.shared_base import SharedBase  # needs torch

        base = SharedBase()
    found: dict[str, ServedModel] = {}
    for folder, name in zip(folders, name_folders(folders), strict=True):
        if base and read_export(Path(folder)):
            raise ConfigError(f"--one-base: {folder} is an export, whose weights are its own. Give the run directory.")
        loaded = load_run_model(
            folder,
            settings,
            unsupported=WITHOUT_EFFECT,
            on_damage=warn_once,
            on_note=on_note,
            load_model=base.load_model if base else None,
        )
        loaded = replace(loaded, threads=None)  # one thread computes, with the cores that it began with
        trained = TrainedRun(Path(folder), settings, loaded=loaded)
        require_single_part(loaded.config)
        refuse_costly_search(trained)
        warn_of_bad_export(trained, warn_once)
        task = loaded.config.task
        fields = list_fields(task, loaded.config.data.columns)
        examples = find_examples(trained, fields, num=num_examples, on_warning=warn_once)
        facts = RunFacts(
            name=name,
            task=task.plugin_name(),
            step=trained.step,
            fields=fields,
            decoding=loaded.build_decoding(),
            writes=head_of(task) != "extractive",
            takes_seed=not loaded.has_own_engine,
            sends_tokens=type(task).from_text is TaskOptions.from_text,
            examples=examples,
            silence=trained.find_silence(**(withheld or {})),
        )
        found[name] = ServedModel(
            facts, partial(trained.predict_each, max_input_tokens=max_input_tokens), trained.folder
        )
    return found


def name_folders(folders: Sequence[str]) -> list[str]:
    """Name folders by as few of their last parts as differ from the last parts of all others.

    >>> name_folders(["runs/a", "runs/b/export/hf", "runs/c/export/hf"])
    ['a', 'b/export/hf', 'c/export/hf']
    """
    paths = [Path(folder).resolve() for folder in folders]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"{folders[number]}: is given twice. Leave one out.")
    names: list[str] = []
    for path in paths:
        length = 1
        while [other.parts[-length:] for other in paths].count(path.parts[-length:]) > 1:
            length += 1
        names.append("/".join(path.parts[-length:]))
    return names


def refuse_costly_search(trained: TrainedRun) -> None:
    """Raise ConfigError for a search that costs too much per request."""
    settings = trained.loaded.config.eval
    for name, value, most in (
        ("num_beams", settings.num_beams, MAX_BEAMS),
        ("max_new_tokens", settings.max_new_tokens or 0, MAX_NEW_TOKENS),
    ):
        if value > most:
            raise ConfigError(
                f"{trained.folder}: eval.{name} {value}: serve allows {most} at most. Add --eval.{name} {most}."
            )


def warn_of_bad_export(trained: TrainedRun, on_warning: OnNote) -> None:
    """Warn of an export whose proof did not end with "use"."""
    proof = (read_export(trained.folder) or {}).get("proof", {})
    if (verdict := proof.get("verdict", "use")) != "use":
        on_warning(f"{trained.folder}: the verdict of this export is: {verdict}. " + " ".join(proof.get("reasons", ())))
