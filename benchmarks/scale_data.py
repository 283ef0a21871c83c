"""Data at scale: records prepared per second beside `datasets.map`, the memory of a million examples, and of answers.

Both sides read the same JSONL file, tokenise with the same tokenizer on the same cores, and write token ids to disk.
They alternate A B B A, each window in new processes with an empty cache. `datasets.map` gets a process per core, and
batches of 1,000 and the fast tokenizer; FiveTune also checks the ids, counts, and keeps the texts.
    python -m benchmarks.scale_data speed
    python -m benchmarks.scale_data memory
    python -m benchmarks.scale_data readers
    python -m benchmarks.scale_data predict
The second prepares synthetic examples, trains some steps from the shards, and records the largest resident memory of
all processes together (proportional set size: pages that processes share count once). The third compares, by format,
the process that reads with one that converts. The fourth answers records with a model of t5-small's shape, and a fifth
of them, and records the largest anonymous memory of each process, which mapped files are no part of.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml

from benchmarks.harness import abba, facts, make_parser, publish_result, table
from benchmarks.workloads import COMMON, MODELS
from fivetune.data.corpus import CHECKPOINT

TOKENIZER = Path(__file__).parents[2] / "shared" / "data" / "tokenizers" / "t5-small"
NUM_RECORDS, NUM_WINDOWS, NUM_READ = 100_000, 4, 20_000
NUM_EXAMPLES, NUM_STEPS = 1_000_000, 50
NUM_ANSWERED, ANSWER_TOKENS = 10_000, 8
SAMPLE_SECONDS = 0.2

THEIRS = """
import json, sys, time
from datasets import disable_progress_bars, load_dataset
from transformers import AutoTokenizer
source, folder, tokenizer, processes = sys.argv[1:]
disable_progress_bars()
tokenizer = AutoTokenizer.from_pretrained(tokenizer)

def convert(batch):
    found = tokenizer(batch["inputs"], max_length=512, truncation=True)
    found["labels"] = tokenizer(text_target=batch["targets"], max_length=128, truncation=True)["input_ids"]
    return found

started = time.perf_counter()
data = load_dataset("json", data_files=source, split="train", cache_dir=folder)
data = data.map(convert, batched=True, batch_size=1000, num_proc=int(processes), remove_columns=["inputs", "targets"])
print(json.dumps({"seconds": time.perf_counter() - started, "num": len(data),
                  "num_tokens": sum(map(len, data[:2000]["input_ids"]))}))
"""

OURS = """
import json, sys, time
from pathlib import Path
from fivetune.data.store.encode import LengthLimits
from fivetune.data.examples import Source
from fivetune.data.store.prepared import open_prepared, write_prepared
from fivetune.model.tokenizer import load_tokenizer
from fivetune.tasks.jsonl import JSONL
source, folder, tokenizer, processes = sys.argv[1:]
tokenizer = load_tokenizer(None, Path(tokenizer))
given = Source((source,), JSONL(), LengthLimits(512, 128), for_training=True)
started = time.perf_counter()
write_prepared(folder + "/out", given, tokenizer, num_processes=int(processes))
seconds = time.perf_counter() - started
store = open_prepared(folder + "/out", given, tokenizer, cache=Path(folder))
print(json.dumps({"seconds": seconds, "num": len(store), "num_tokens": sum(len(store.inputs[i]) for i in range(2000))}))
"""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("measure", choices=("speed", "memory", "readers", "predict"))
    parser.add_argument(
        "--num",
        type=int,
        help=f"records: {NUM_RECORDS:,} for speed, {NUM_EXAMPLES:,} for memory, {NUM_READ:,} for readers, "
        f"{NUM_ANSWERED:,} for predict",
    )
    parser.add_argument("--windows", type=int, default=NUM_WINDOWS, help="windows of each side")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fivetune-scale-") as folder:
        if args.measure == "speed":
            name, result = "scale-data-speed", measure_speed(Path(folder), args.num or NUM_RECORDS, args.windows)
        elif args.measure == "readers":
            name, result = "scale-data-readers", measure_readers(Path(folder), args.num or NUM_READ)
        elif args.measure == "predict":
            name, result = "scale-data-predict", measure_predict(Path(folder), args.num or NUM_ANSWERED)
        else:
            name, result = "scale-data-memory", measure_memory(Path(folder), args.num or NUM_EXAMPLES)
    publish_result(args, name, {**result, "machine": facts("cpu")})


def measure_speed(folder: Path, num: int, num_windows: int) -> dict[str, Any]:
    """Prepare the same records by both sides; every window starts from the file."""
    source = folder / "records.jsonl"
    write_records(source, num)
    cores = len(os.sched_getaffinity(0))
    tokenizer = TOKENIZER if TOKENIZER.is_dir() else CHECKPOINT
    programs = {"fivetune": OURS, "datasets.map": THEIRS}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    totals: set[tuple[int, int]] = set()
    for name in abba(list(programs), num_windows):
        place = folder / "window"
        place.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", programs[name], str(source), str(place), str(tokenizer), str(cores)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        found = json.loads(done.stdout.splitlines()[-1])
        seconds[name].append(found["seconds"])
        totals.add((found["num"], found["num_tokens"]))
        shutil.rmtree(place)
    if len(totals) != 1:
        raise AssertionError(f"the sides made different examples: {totals}")
    rates = {name: [num / one for one in each] for name, each in seconds.items()}
    ratios = [theirs / ours for ours, theirs in zip(seconds["fivetune"], seconds["datasets.map"], strict=True)]
    rows = [["records prepared", "records/s", "(least to most)"]]
    rows += [[name, f"{median(each):,.0f}", f"{min(each):,.0f} to {max(each):,.0f}"] for name, each in rates.items()]
    print(table(rows))
    print(f"fivetune is {median(ratios):.2f} times as fast as datasets.map ({min(ratios):.2f} to {max(ratios):.2f})")
    return {
        "num_records": num,
        "records": "20 to 80 words of docs/*.md and a new name each",
        "num_processes": cores,
        "tokenizer": tokenizer.name,
        "records_per_second": rates,
        "ratio": {"median": median(ratios), "least": min(ratios), "most": max(ratios)},
    }


def measure_readers(folder: Path, num: int) -> dict[str, Any]:
    """Measure, by format, how many worker processes the process that reads can feed: processor time of both."""
    import pyarrow
    from pyarrow import parquet

    from fivetune.data.examples import Source
    from fivetune.data.store.blocks import BlockReader
    from fivetune.data.store.convert import Converter
    from fivetune.data.store.encode import LengthLimits
    from fivetune.model.tokenizer import load_tokenizer
    from fivetune.tasks.jsonl import JSONL

    write_records(folder / "records.jsonl", num)
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()]
    with (folder / "records.csv").open("w", newline="", encoding="utf-8") as file:
        table_writer = csv.DictWriter(file, list(records[0]))
        table_writer.writeheader()
        table_writer.writerows(records)
    parquet.write_table(pyarrow.Table.from_pylist(records), folder / "records.parquet")
    (folder / "records.json").write_text(json.dumps({"data": records}), encoding="utf-8")
    place = TOKENIZER if TOKENIZER.is_dir() else CHECKPOINT
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    result: dict[str, Any] = {"num_records": num, "tokenizer": place.name}
    rows = [["format", "read and sent, records/s", "converted by a worker, records/s", "workers that it feeds"]]
    for suffix in ("jsonl", "csv", "parquet", "json"):
        source = Source((str(folder / f"records.{suffix}"),), JSONL(), LengthLimits(512, 128), for_training=True)
        reader, sent = BlockReader(source), []
        started = time.process_time()
        while block := reader.read(1000):
            sent.append(pickle.dumps(block))
        read_seconds = time.process_time() - started
        converter = Converter(source, load_tokenizer(None, place))  # a new one: it remembers words
        converter.convert(pickle.loads(sent[0]))  # noqa: S301  (the first block fills the tokenizer's table of words)
        started = time.process_time()
        for one in sent:
            converter.convert(pickle.loads(one))  # noqa: S301
        convert_seconds = time.process_time() - started
        found = {"read": num / read_seconds, "converted": num / convert_seconds}
        result[suffix] = {**found, "num_workers_fed": convert_seconds / read_seconds}
        rows.append([suffix, *(f"{rate:,.0f}" for rate in found.values()), f"{convert_seconds / read_seconds:.0f}"])
    print(table(rows))
    return result


def write_records(path: Path, num: int, *, seed: int = 0) -> None:
    """Write records of words of this project's documents, which repeat as those of other texts do, with new names."""
    draw = random.Random(seed)
    documents = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    words = [word for one in documents for word in one.read_text(encoding="utf-8").split() if "<" not in word]
    with path.open("w", encoding="utf-8") as file:
        for number in range(num):
            named = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)).title()
            start = draw.randrange(len(words) - 100)
            text = " ".join([named, *words[start : start + draw.randint(20, 80)]])
            record = {"id": f"record-{number:09d}", "inputs": text, "targets": f"{named} {words[start]}"}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def measure_memory(folder: Path, num: int) -> dict[str, Any]:
    """Prepare and train `num` examples from the command line, and watch the memory of all processes."""
    write_records(folder / "train.jsonl", num)
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"path": "t5-nano"},
        "task": {"name": "jsonl"},
        "data": {"train": str(folder / "train.jsonl"), "cache_dir": str(folder / "cache")},
        "train": {"num_steps": NUM_STEPS, "batch_size": 16},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "device": "cpu",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "fivetune"]
    result: dict[str, Any] = {"num_examples": num, "num_steps": NUM_STEPS}
    steps = {
        "prepare": ["prepare", str(folder / "recipe.yaml"), "--output", str(folder / "out"), "--quiet"],
        "train": ["train", str(folder / "recipe.yaml"), "--data.train", str(folder / "out" / "train"), "--quiet"],
    }
    rows = [["", "peak memory of all processes", "seconds"]]
    for name, arguments in steps.items():
        started = time.perf_counter()
        with subprocess.Popen([*command, *arguments]) as process, watch_memory(process.pid) as peak:
            if process.wait():
                raise AssertionError(f"fivetune {name} failed")
        seconds = time.perf_counter() - started
        result[name] = {"peak_bytes": peak[0], "seconds": seconds}
        rows.append([name, f"{peak[0] / 1e9:.2f} GB", f"{seconds:,.0f}"])
    result["shard_bytes"] = sum(path.stat().st_size for path in (folder / "out" / "train").iterdir())
    print(table(rows))
    return result


def measure_predict(folder: Path, num: int) -> dict[str, Any]:
    """Answer `num` records and a fifth of them from the command line, each in a process of its own."""
    place = TOKENIZER if TOKENIZER.is_dir() else CHECKPOINT
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps({**COMMON, **MODELS["t5-small"]}))
    write_records(folder / "train.jsonl", 1)
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"init": "random", "config": str(folder / "shape"), "tokenizer": str(place)},
        "task": {"name": "jsonl"},
        "data": {"train": str(folder / "train.jsonl")},
        "train": {"num_steps": 1, "batch_size": 1},
        "eval": {"max_new_tokens": ANSWER_TOKENS},
        "optimizer": {"name": "adamw", "lr": 1e-9},
        "device": "cpu",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "fivetune"]
    subprocess.run([*command, "train", str(folder / "recipe.yaml"), "--quiet"], check=True)
    result: dict[str, Any] = {"answer_tokens": ANSWER_TOKENS, "tokenizer": place.name}
    rows = [["records", "peak anonymous memory", "seconds"]]
    for count in (num // 5, num):
        source, target = folder / f"{count}.jsonl", folder / f"answers-{count}.jsonl"
        write_records(source, count)
        started = time.perf_counter()
        words = [*command, "predict", str(folder / "run"), "--input", str(source), "--output", str(target)]
        with subprocess.Popen(words) as process, watch_memory(process.pid, read_anonymous_bytes) as peak:
            if process.wait():
                raise AssertionError("fivetune predict failed")
        seconds = time.perf_counter() - started
        ids = [json.loads(line)["id"] for line in target.read_text(encoding="utf-8").splitlines()]
        if ids != [f"record-{number:09d}" for number in range(count)]:
            raise AssertionError(f"{target}: records are missing or in another order")
        result[str(count)] = {"peak_anonymous_bytes": peak[0], "seconds": seconds}
        rows.append([f"{count:,}", f"{peak[0] / 1e6:,.0f} MB", f"{seconds:,.0f}"])
    print(table(rows))
    return result


def read_anonymous_bytes(process: psutil.Process) -> int:
    """Resident bytes of a process that belong to no file (Linux)."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return next(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:"))


def read_proportional_bytes(process: psutil.Process) -> int:
    """Proportional set size of a process (Linux)."""
    return process.memory_full_info().pss


@contextlib.contextmanager
def watch_memory(pid: int, measure: Callable[[psutil.Process], int] = read_proportional_bytes) -> Iterator[list[int]]:
    """Record the largest sum of `measure` over a process and its children; the list's only element."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            total = 0
            with contextlib.suppress(psutil.Error):
                root = psutil.Process(pid)
                for one in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error, OSError, StopIteration):
                        total += measure(one)
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
