"""Batch assembly: FiveTune's store against transformers' DataCollatorForSeq2Seq over a list of lists.

Same examples in the same order, one core, windows interleaved A B B A: flat batches as training takes them, and padded
ones as transformers' collator makes them.
    python -m benchmarks.data --json
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Work, facts, interleaved, make_parser, publish_result, rates, ratio, same_totals, table
from fivetune.config import load_config
from fivetune.data.corpus import CHECKPOINT
from fivetune.data.corpus.reading import write_reading_corpus
from fivetune.data.store.batch import collate, pad
from fivetune.data.store.stream import BatchPlan, TrainingStream
from fivetune.data.store.token_store import TokenStore
from fivetune.model.tokenizer import load_tokenizer
from fivetune.rundir.progress import ignore_progress
from fivetune.training.sources import prepare_split

BATCH_SIZE, WINDOW, NUM_WINDOWS = 32, 100, 8


class Assembly:
    """A way of making padded batches of the rows of an order."""

    def __init__(self, name: str, order: Iterator[list[int]], batch: Callable[[list[int]], object]) -> None:
        self.name = name
        self._order = order
        self._batch = batch

    def work(self, num_units: int) -> Work:
        num_examples = 0
        for _ in range(num_units):
            rows = next(self._order)
            self._batch(rows)
            num_examples += len(rows)
        return Work(num_units, {"examples": num_examples})


def main() -> None:
    args = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store, tokenizer = _store(Path(folder))
        sides = [
            Assembly("fivetune", _order(store), lambda rows: collate(store, rows)),
            Assembly("fivetune, padded", _order(store), lambda rows: pad(collate(store, rows), pad_id=0)),
            Assembly("transformers", _order(store), _theirs(store, tokenizer)),
        ]
        windows = interleaved(sides, WINDOW, NUM_WINDOWS)
    same_totals(windows, "examples")
    speeds = {name: rates(each, "examples") for name, each in windows.items()}
    ratios = {name: ratio(windows[name], windows["transformers"], "examples") for name in list(windows)[:2]}
    rows = [["assembly of batches", "examples/s", "(least to most)", "times transformers"]]
    for name, speed in speeds.items():
        times = f"{ratios[name].median:.1f}" if name in ratios else ""
        rows.append([name, f"{speed.median:,.0f}", f"{speed.least:,.0f} to {speed.most:,.0f}", times])
    print(table(rows))
    result = {
        "batch_size": BATCH_SIZE,
        "batches_per_window": WINDOW,
        "num_windows": NUM_WINDOWS,
        "machine": facts("cpu"),
        "examples_per_second": {name: speed.as_list() for name, speed in speeds.items()},
        "ratios": {name: each.as_list() for name, each in ratios.items()},
    }
    publish_result(args, "data-cpu", result)


def _store(folder: Path) -> tuple[TokenStore, Any]:
    train, _ = write_reading_corpus(folder, num_train=8_000, num_eval=8, seed=1)
    config = load_config("quickstart", {"data.train": str(train), "data.cache_dir": str(folder / "cache")})
    tokenizer = load_tokenizer(None, CHECKPOINT)
    store = prepare_split(config, tokenizer, "train", on_progress=ignore_progress)
    assert store is not None
    return store, tokenizer


def _order(store: TokenStore) -> Iterator[list[int]]:
    stream = TrainingStream(store, BatchPlan(BATCH_SIZE, BATCH_SIZE, 1, seed=0))
    step = 0
    while True:
        yield stream.select_rows(step)[0].tolist()
        step += 1


def _theirs(store: TokenStore, tokenizer: Any) -> Callable[[list[int]], object]:
    from transformers import DataCollatorForSeq2Seq

    examples = [
        {
            "input_ids": store.inputs[i].tolist(),
            "attention_mask": [1] * len(store.inputs[i]),
            "labels": store.labels[i].tolist(),
        }
        for i in range(len(store))
    ]
    collator = DataCollatorForSeq2Seq(tokenizer)
    return lambda rows: collator([dict(examples[i]) for i in rows])


if __name__ == "__main__":
    main()
