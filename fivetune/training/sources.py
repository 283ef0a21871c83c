"""Early checks of a run's data files: a wrong path must not wait for the download of a model.

In: a RunConfig. Out: resolved sources, the config with labels from the data, or DataError.
"""

from __future__ import annotations

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path
from fivetune.data.labels import read_label_set
from fivetune.data.prepared import is_prepared, read_prepared_index
from fivetune.data.records import check_source
from fivetune.nano.reading import write_missing_corpus
from fivetune.tasks.classification import Classification
from fivetune.tasks.mixture import Mixture
from fivetune.training.mixture import build_part_configs


def find_sources(config: RunConfig, split: str) -> tuple[str, ...]:
    """The sources of "train" or "eval"; relative paths also work from another directory than the run began in."""
    typed = config.data.train if split == "train" else config.data.eval
    return tuple(find_typed_path(source, config.run.dir) for source in typed)


def check_sources(config: RunConfig) -> None:
    """Raise DataError, naming the file, for a source that is missing, unreadable or not data.

    A missing corpus of the quickstart is written, so that its recipe works in a fresh clone. Hub names are not
    looked up.
    """
    parts = build_part_configs(config).values() if isinstance(config.task, Mixture) else [config]
    for part in parts:
        for source in (*find_sources(part, "train"), *find_sources(part, "eval")):
            write_missing_corpus(source)
            if is_prepared(source):
                read_prepared_index(source)
            else:
                check_source(source)


def with_data_labels(config: RunConfig) -> RunConfig:
    """Fill in the labels of every `classification` task without labels, read from its training data.

    They become settings of the run: config.yaml records them, and predict and evaluate use them.
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
    if is_prepared(sources[0]):
        labels = read_prepared_index(sources[0])["settings"]["task"][2]["labels"]
        return config.model_copy(update={"task": task.model_copy(update={"labels": labels})})
    labels = read_label_set(task, sources, data.columns, max_records=data.max_train_examples)
    return config.model_copy(update={"task": task.model_copy(update={"labels": labels})})
