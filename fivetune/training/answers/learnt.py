"""Whether an evaluation has examples that a run has learnt, which must not choose the confidence of a promise.

In: the run directory, the tokenised evaluation. Out: ConfigError, or nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivetune import rundir
from fivetune.config import RunConfig
from fivetune.data.store.prepared import is_prepared
from fivetune.data.store.token_store import TokenStore
from fivetune.errors import ConfigError, DataError, FiveTuneEnvironmentError
from fivetune.rundir.progress import ProgressCallback
from fivetune.training.sources import find_learnt_rows, find_shared_files, find_sources, prepare_split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEARNT_SHARE = 0.05  # of an evaluation: so many short inputs, such as "thank you", are equal by chance


def refuse_learnt_data(
    folder: Path,
    config: RunConfig,
    evaluation: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    *,
    on_progress: ProgressCallback,
) -> None:
    """Raise ConfigError if a run has learnt examples of an evaluation for a promise: it has fewer errors there.

    Args:
        config: of the run, with its training data.

    Files are always compared, inputs if the training data are local and as they were.
    """
    shared: list[str] = []
    if not evaluation.summary.get("split"):  # else it is split off the training data
        shared = find_shared_files(find_sources(config, "train"), evaluation.summary["source"])
    if shared:
        what = f"{shared[0]} has examples that the run has learnt"
    else:
        share = _measure_learnt_share(folder, config, evaluation, tokenizer, on_progress)
        if share <= LEARNT_SHARE:
            return
        what = f"the run has learnt {share:.0%} of the examples"
    raise ConfigError(
        f"max_error: {what}, where it errs less than on new ones. Allowed are examples that it has not seen. Choose "
        "others: --data.eval FILE"
    )


def _measure_learnt_share(
    folder: Path,
    config: RunConfig,
    evaluation: TokenStore,
    tokenizer: PreTrainedTokenizerBase,
    on_progress: ProgressCallback,
) -> float:
    """Measure which share (0-1) of an evaluation has inputs that were learnt, case and white space aside; 0 if
    unknown.
    """
    known = rundir.read_data(folder, rundir.Damage()).train
    # Shards that a training streams are downloaded, or deleted once they are read.
    if known is None or config.data.window_shards or any(map(is_prepared, find_sources(config, "train"))):
        return 0.0
    try:
        train = prepare_split(config, tokenizer, "train", on_progress=on_progress)
    except (DataError, FiveTuneEnvironmentError):  # the files have gone
        return 0.0
    prints = {known.fingerprint, *(part.fingerprint for part in known.parts.values())}
    if train is None or train.fingerprint not in prints:
        return 0.0
    return len(find_learnt_rows(train, evaluation)) / len(evaluation.groups)
