"""The data of a run: its files, checked before a model is downloaded, and its tokenised sets.

In: a RunConfig. Out: resolved sources, the config with labels from the data, or DataError; stores of token ids.
"""

from __future__ import annotations

import filecmp
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fivetune.config import RunConfig
from fivetune.config.paths import find_typed_path
from fivetune.data.corpus.reading import write_missing_corpus
from fivetune.data.examples import Source
from fivetune.data.labels import read_label_set
from fivetune.data.readers.records import are_lines, check_source, is_hub_name, list_source_files
from fivetune.data.readers.source_files import split_sheet
from fivetune.data.split import EvalSplit
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.prepared import is_prepared, open_prepared, read_prepared_index
from fivetune.data.store.token_store import TokenStore, get_cache_folder, load_or_build_store
from fivetune.errors import ConfigError, DataError
from fivetune.tasks import find_needed_columns, has_sentinels
from fivetune.tasks.classification import Classification
from fivetune.tasks.mixture import Mixture
from fivetune.training.mixture import build_part_configs, join_stores

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.rundir.progress import ProgressCallback


def find_sources(config: RunConfig, split: str) -> tuple[str, ...]:
    """The sources of "train" or "eval"; relative paths also work from another directory than the run began in."""
    typed = config.data.train if split == "train" else config.data.eval
    return tuple(find_typed_path(source, config.run.dir) for source in typed)


def choose_data_header(config: RunConfig, sources: Sequence[str]) -> tuple[str, ...]:
    """Choose the names of the columns of sources: `data.header`, and of lines of text the only column of a task that
    learns from texts without labels.
    """
    data = config.data
    if data.header or not has_sentinels(config.task):
        return data.header
    needed = [data.columns.get(name, name) for name in find_needed_columns(config.task)]
    files = [source for source in sources if not is_prepared(source)]
    if len(needed) == 1 and files and all(are_lines(source, needed[0]) for source in files):
        return (needed[0],)
    return ()


def list_sources(config: RunConfig) -> list[str]:
    """List the sources of a run, of a mixture those of its parts."""
    return [source for _, source in _iter_part_sources(config)]


def _iter_part_sources(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    parts = [config]
    if isinstance(config.task, Mixture):
        parts = [*build_part_configs(config).values()]
    for part in parts:
        for split in ("train", "eval"):
            for source in find_sources(part, split):
                yield part, source


def check_sources(config: RunConfig) -> None:
    """Raise DataError, naming the file, for a source that is missing, unreadable or not data.

    A missing corpus of the quickstart is written, so that its recipe works in a fresh clone. Hub names are not
    looked up.
    """
    for part, source in _iter_part_sources(config):
        write_missing_corpus(source)
        if is_prepared(source):
            read_prepared_index(source)
        else:
            check_source(source, allows_lines=bool(choose_data_header(part, [source])))


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
    task = config.task
    data = config.data
    sources = find_sources(config, "train") or find_sources(config, "eval")
    if not isinstance(task, Classification) or task.labels or not sources:
        return config
    if is_prepared(sources[0]):  # its targets were tokenised with these labels
        labels = read_prepared_index(sources[0])["settings"]["task"][2]["labels"]
    else:
        labels = read_label_set(task, sources, data.columns, header=data.header, max_records=data.max_train_examples)
    return config.model_copy(update={"task": task.model_copy(update={"labels": labels})})


def prepare_split(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    split: str,
    *,
    on_progress: ProgressCallback,
    labelled: bool = True,
) -> TokenStore | None:
    """Load or build the store of the "train" or "eval" data; None if the config has no such data."""
    if isinstance(config.task, Mixture):
        stores: dict[str, TokenStore | None] = {}
        for name, part in build_part_configs(config).items():
            stores[name] = prepare_split(part, tokenizer, split, on_progress=on_progress, labelled=labelled)
        return join_stores(stores, split)
    source = describe_split(config, split, labelled=labelled)
    if source is None:
        return None
    data = config.data
    cache = get_cache_folder(config.data.cache_dir)
    if data.window_shards:  # a run deletes the shards that it has read: others must not need them
        cache /= f"window-{zlib.crc32(os.path.abspath(config.run.dir).encode()):08x}"
    prepared = [path for path in source.paths if is_prepared(path)]
    if not prepared:
        return load_or_build_store(
            source, tokenizer, cache=cache, num_processes=data.num_processes, on_progress=on_progress
        )
    if len(source.paths) > 1:
        raise ConfigError(
            f"data.{split}: {prepared[0]} is prepared data, and there are {len(source.paths)} sources. Allowed is one "
            "folder or URL of prepared data alone. Prepare all files together."
        )
    if source.split:
        raise ConfigError(
            f"data.eval_share {source.split.share:g}: {prepared[0]} is prepared data, which is split when it is "
            "prepared. Give its two folders: data.train URL/train, data.eval URL/eval, data.eval_share null."
        )
    return open_prepared(
        prepared[0], source, tokenizer, cache=cache, window_shards=data.window_shards, on_progress=on_progress
    )


def describe_split(config: RunConfig, split: str, *, labelled: bool = True) -> Source | None:
    """Describe the "train" or "eval" data of a task that is no mixture; None if the config has no such data."""
    data = config.data
    training = split == "train"
    # Data to predict have no evaluation part, and files of data.eval are used as they are.
    share = data.eval_share if labelled and not data.eval else None
    # With a share both sets are parts of data.train.
    paths = find_sources(config, "train" if training or share is not None else "eval")
    if not paths:
        return None
    max_examples = data.max_train_examples if training else data.max_eval_examples
    division = None
    if share is not None:
        side = "train" if training else "eval"
        division = EvalSplit(side, share, data.eval_seed, data.group_column, data.max_train_examples)
    return Source(
        paths=paths,
        task=config.task,
        columns=data.columns,
        header=choose_data_header(config, paths),
        on_bad_record=data.on_bad_record,
        max_examples=max_examples,
        split=division,
        limits=build_length_limits(config),
        for_training=training,
        labelled=labelled,
    )


def find_shared_files(learnt: Sequence[str], scored: Sequence[str]) -> list[str]:
    """Find the sources of an evaluation that a training has too, by name, and local files with equal content."""
    same = sorted({*learnt} & {*scored})
    files = _list_local_files(learnt)
    for file in _list_local_files(scored):
        if any(filecmp.cmp(other, file, shallow=False) for other in files):
            same.append(str(file))
    return same


def _list_local_files(sources: Sequence[str]) -> list[Path]:
    files: list[Path] = []
    for source in sources:
        if not is_prepared(source) and not is_hub_name(source) and not split_sheet(source)[1]:  # of one file, several
            with suppress(DataError):  # of a finished training, and gone
                files.extend(list_source_files(source))
    return files


def find_learnt_rows(train: TokenStore, evaluation: TokenStore) -> NDArray[np.intp]:
    """Find the rows of an evaluation with an input of the training, case and white space aside; none if unknown."""
    if train.input_hashes is None or evaluation.input_hashes is None:  # prepared by an earlier version
        return np.empty(0, np.intp)
    return np.flatnonzero(np.isin(evaluation.input_hashes, train.input_hashes))


def build_length_limits(config: RunConfig) -> LengthLimits:
    data = config.data
    return LengthLimits(data.max_input_tokens, data.max_target_tokens, data.overlong, data.window_overlap)
