"""Batch assembly: FiveTune's memory-mapped store against transformers' DataCollatorForSeq2Seq over a list of lists.

Same examples in the same order, one core, windows interleaved A B B A; prints examples/s and the ratio of medians.
    python -m benchmarks.data --json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fivetune.config import load_config
from fivetune.data.batch import collate, pad
from fivetune.data.store import TokenStore
from fivetune.data.stream import Order, TrainingStream
from fivetune.model.load import load_tokenizer
from fivetune.nano import CHECKPOINT
from fivetune.nano.reading import write_reading_corpus
from fivetune.progress import uncounted
from fivetune.telemetry.devices import machine_facts
from fivetune.training.setup import prepare_split

BATCH_SIZE, WINDOW, NUM_WINDOWS = 32, 100, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store, tokenizer = _store(Path(folder))
        sides = {"fivetune": _ours(store), "transformers": _theirs(store, tokenizer)}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        for name in ["fivetune", "transformers", "transformers", "fivetune"] * (NUM_WINDOWS // 2):
            rates[name].append(_rate(sides[name]))
    medians = {name: median(values) for name, values in rates.items()}
    ratio = medians["fivetune"] / medians["transformers"]
    for name, values in rates.items():
        print(f"{name:<13}{medians[name]:>12,.0f} examples/s  ({min(values):,.0f} to {max(values):,.0f})")
    print(f"ratio        {ratio:>12.1f}")
    if args.json:
        machine = machine_facts("cpu")
        print(
            json.dumps(
                {
                    "ratio": ratio,
                    "examples_per_second": medians,
                    "machine": machine["host"],
                    "versions": machine["versions"],
                }
            )
        )


def _store(folder: Path) -> tuple[TokenStore, Any]:
    train, _ = write_reading_corpus(folder, num_train=8_000, num_eval=8, seed=1)
    config = load_config("quickstart", {"data.train": str(train), "data.cache_dir": str(folder / "cache")})
    tokenizer = load_tokenizer(None, CHECKPOINT)
    store = prepare_split(config, tokenizer, "train", count=uncounted)
    assert store is not None
    return store, tokenizer


def _order(store: TokenStore) -> Iterator[list[int]]:
    stream = TrainingStream(store, Order(BATCH_SIZE, BATCH_SIZE, 1, seed=0))
    step = 0
    while True:
        yield stream.rows(step)[0].tolist()
        step += 1


def _ours(store: TokenStore) -> Callable[[], object]:
    order = _order(store)
    return lambda: pad(collate(store, next(order)), pad_id=0)


def _theirs(store: TokenStore, tokenizer: Any) -> Callable[[], object]:
    from transformers import DataCollatorForSeq2Seq

    examples = [
        {
            "input_ids": store.inputs[i].tolist(),
            "attention_mask": [1] * len(store.inputs[i]),
            "labels": store.labels[i].tolist(),
        }
        for i in range(len(store))
    ]
    collator, order = DataCollatorForSeq2Seq(tokenizer), _order(store)
    return lambda: collator([dict(examples[i]) for i in next(order)])


def _rate(batch: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(WINDOW):
        batch()
    return WINDOW * BATCH_SIZE / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
