"""The data files of a run, looked at before anything slow: a wrong path must not wait for a model's download."""

from __future__ import annotations

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path
from fivetune.data.labels import read_label_set
from fivetune.data.records import check_source
from fivetune.nano.reading import write_missing_corpus
from fivetune.tasks.classification import Classification
from fivetune.tasks.mixture import Mixture
from fivetune.training.mixture import build_part_configs


def find_sources(config: RunConfig, split: str) -> tuple[str, ...]:
    """The sources of "train" or "eval", also from another working directory than the run began in."""
    typed = config.data.train if split == "train" else config.data.eval
    return tuple(find_typed_path(source, config.run.dir) for source in typed)


def check_sources(config: RunConfig) -> None:
    """Raise DataError for a source that is missing, unreadable or no data, with the setting's file named.

    The quickstart's corpus is written where it is missing: its recipe works in a fresh clone. Names of the hub are not
    looked up.
    """
    parts = build_part_configs(config).values() if isinstance(config.task, Mixture) else [config]
    for part in parts:
        for source in (*find_sources(part, "train"), *find_sources(part, "eval")):
            write_missing_corpus(source)
            check_source(source)


def with_data_labels(config: RunConfig) -> RunConfig:
    """The config with the labels of every `classification` that names none, read from its training data.

    They are part of the run from then on: config.yaml holds them, and predict and evaluate use them.
    """
    if isinstance(config.task, Mixture):
        parts = {}
        for name, part in build_part_configs(config).items():
            task = with_data_labels(part).task
            parts[name] = config.task.parts[name].model_copy(update={"task": task})
        return config.model_copy(update={"task": config.task.model_copy(update={"parts": parts})})
    task, data = config.task, config.data
    sources = find_sources(config, "train") or find_sources(config, "eval")
    if not isinstance(task, Classification) or task.labels or not sources:
        return config
    labels = read_label_set(task, sources, data.columns, max_records=data.max_train_examples)
    return config.model_copy(update={"task": task.model_copy(update={"labels": labels})})
