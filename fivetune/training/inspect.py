"""The inspection of data before a training: counts, lengths, duplicates, leaks, lost characters.

In: data files or tables with their task, or a recipe. Out: an Inspection.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fivetune.config import load_config
from fivetune.config.layers import as_yaml
from fivetune.data.inspect import InspectedDataset, inspect_datasets, read_dataset
from fivetune.data.readers.records import check_source
from fivetune.data.readers.tables import is_table, name_tables, save_table
from fivetune.data.store.encode import LengthLimits
from fivetune.errors import ConfigError
from fivetune.model.added_tokens import add_tokens
from fivetune.model.tokenizer import load_local_tokenizer, load_tokenizer
from fivetune.reading.report.inspect import build_inspection_page
from fivetune.reading.report.page.parts import Page
from fivetune.rundir.progress import ProgressCallback, ignore_progress
from fivetune.scores.analysis.slices import find_question_word
from fivetune.tasks.classification import Classification
from fivetune.training.sources import choose_data_header
from fivetune.types import JsonTable, TextExample

if TYPE_CHECKING:
    from fivetune.config import RunConfig

TOKENIZER = "t5-nano"  # part of the package


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is in data, as `fivetune.inspect` returns it.

    Args:
        facts: the JSON object that `fivetune inspect --json` prints.
    """

    facts: JsonTable

    @property
    def sets(self) -> Mapping[str, JsonTable]:
        """The facts of the sets `train` and `eval`: counts, lengths, limits, duplicates, characters."""
        return self.facts["sets"]

    @property
    def leakage(self) -> JsonTable:
        """The examples of the evaluation data that training data hold too; {} for one set."""
        return self.facts.get("leakage", {})

    @property
    def recipe(self) -> str:
        """A recipe for classification data as YAML; "" for other data."""
        return self.facts["recipe"]

    def build_page(self) -> Page:
        """Build the page that the command prints and writes as HTML."""
        return build_inspection_page(self.facts)


def inspect(
    data: object,
    *,
    task: str | None = None,
    tokenizer: str | None = None,
    against: object = (),
    near: float = 0.8,
    settings: Mapping[str, object] = MappingProxyType({}),
    on_progress: ProgressCallback = ignore_progress,
) -> Inspection:
    """Inspect data: counts, lengths and limits, duplicates, leaks, and characters that the tokenizer loses.

    Args:
        data: a file, a folder, a hub name or a list of them; a DataFrame, a data set of `datasets` or a list of
            records; or a recipe, which has its own task, evaluation data and model.
        task: task that reads the data, such as squad_v2; needed without a recipe.
        tokenizer: folder or hub name of the model to be trained; default: t5-nano's, or the recipe's.
        against: evaluation data, as `data`, to find leaks.
        near: least Jaccard similarity (above 0, at most 1) of the word triples of near duplicates.
        settings: dotted settings of task and data: {"data.columns.question": "Frage"}.
        on_progress: called with what is done, and the number of examples.

    Returns the Inspection. Raises ConfigError for a setting without effect, DataError for data that give no example.

    >>> found = inspect("tickets.csv", task="classification")
    >>> found.sets["train"]["num_examples"], found.leakage
    (40, {})
    """
    if not 0 < near <= 1:
        raise ConfigError(f"--near: {near} is not a similarity. Allowed: above 0, at most 1. Try 0.8.")
    with tempfile.TemporaryDirectory(prefix="fivetune-inspect-") as folder:
        files: dict[Path, str] = {}

        def list_sources(given: Any, where: str) -> list[str]:
            if is_table(given):
                path = save_table(given, Path(folder), where)
                files[path] = where
                return [str(path)]
            sources = [given] if isinstance(given, str | Path) else given
            return [str(one) for one in sources]

        sources = list_sources(data, "data")
        with name_tables(files):
            facts = _collect_facts(
                sources, list_sources(against, "against"), task, tokenizer, near, settings, on_progress
            )
        for path, name in files.items():  # the table is named, not its file, which is removed
            facts = json.loads(json.dumps(facts).replace(str(path), name))
    return Inspection(facts)


def _collect_facts(
    sources: Sequence[str],
    against: Sequence[str],
    task_name: str | None,
    tokenizer_name: str | None,
    near: float,
    settings: Mapping[str, object],
    on_progress: ProgressCallback,
) -> JsonTable:
    for key in settings:
        if not key.startswith(("task.", "data.")):
            raise ConfigError(f"--{key}: not a setting of inspect. Allowed: --task.OPTION VALUE, --data.SETTING VALUE.")
    # A recipe names its data, task and tokenizer; files need --task.
    is_recipe = len(sources) == 1 and sources[0].endswith((".yaml", ".yml")) and task_name is None
    if task_name is None and not is_recipe:
        raise ConfigError("--task: is needed to read data: fivetune new DATA finds it. A recipe has its own.")
    table: JsonTable = {"model": {"path": tokenizer_name or TOKENIZER}, "task": {"name": task_name}}
    config: RunConfig = load_config(sources[0] if is_recipe else table, settings)
    task = config.task
    data = config.data
    if is_recipe:
        sources = data.train
        against = [*against, *data.eval]
        path = config.model.path
        if not tokenizer_name and path is not None and load_local_tokenizer(path) is not None:
            tokenizer_name = path
    absent_model = config.model.path if is_recipe and not tokenizer_name else None
    tokenizer_name = tokenizer_name or TOKENIZER
    for source in (*sources, *against):
        check_source(source, allows_lines=bool(choose_data_header(config, [source])))
    tokenizer, _ = add_tokens(load_tokenizer(tokenizer_name, Path(), key="--tokenizer"), config.model.add_tokens)
    given = {"train": (sources, data.max_train_examples), "eval": (against, data.max_eval_examples)}
    # The sets in full: leaks and duplicates are found between any two records.
    sets: dict[str, InspectedDataset] = {}
    for name, (own_sources, max_records) in given.items():
        if own_sources:
            sets[name] = read_dataset(
                own_sources,
                task,
                data.columns,
                header=choose_data_header(config, own_sources),
                max_records=max_records,
                on_progress=on_progress,
            )
    limits = LengthLimits(data.max_input_tokens, data.max_target_tokens, data.overlong, data.window_overlap)

    def get_question_word(example: TextExample) -> list[str]:
        question = example.meta.get("question")
        return [find_question_word(str(question))] if question else []

    facts = inspect_datasets(
        sets,
        task,
        tokenizer,
        limits=limits,
        near_threshold=near,
        kinds={"question word": get_question_word},
        on_progress=on_progress,
    )
    recipe = ""
    if isinstance(task, Classification) and not is_recipe:  # a recipe that trains on the inspected data
        options = task.model_dump(mode="json", exclude_defaults=True)
        used: JsonTable = {"train": list(sources), "eval_share": 0.1}
        if against:
            used = {"train": list(sources), "eval": list(against)}
        own = {"model": {"path": tokenizer_name}, "task": {"name": task.plugin_name(), **options}, "data": used}
        recipe = as_yaml(own).rstrip()
    return {
        "tokenizer": tokenizer_name,
        "is_default_tokenizer": tokenizer_name == TOKENIZER,
        "absent_model": absent_model,
        "limits": {"input": limits.max_input_tokens, "target": limits.max_target_tokens, "overlong": limits.overlong},
        **facts,
        "recipe": recipe,
    }
