"""Answers to SQuAD 2.0 questions: exports to CTranslate2 in fp32 and int8 against generate and FiveTune's own decoding.

The model, its questions and the windows are those of benchmarks/decode.py: the t5-small config with random weights,
whose answers end by themselves. Exports answer through the engine that `fivetune evaluate` and `fivetune predict` load,
with every id of the embedding in their vocabulary. Answers in fp32 must be equal; of int8 and bf16 the share is told.
    OMP_NUM_THREADS=2 python -m benchmarks.export --json
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import (
    BATCH_SIZE,
    CAP,
    OURS,
    OURS_BF16,
    Answers,
    Engine,
    add_arguments,
    answer_with_fivetune,
    answer_with_generate,
    describe_workload,
    make_workload,
    select_batches,
)
from benchmarks.harness import UnequalWork, facts, interleaved, make_parser, publish_result, rates, ratio, table
from fivetune.delivery.exporters._ctranslate2 import Engine as Converted
from fivetune.delivery.exporters._ctranslate2 import convert_model
from fivetune.model.decode import Decoding
from fivetune.model.save import save_model

FORMATS = {"ctranslate2": None, "ctranslate2-int8": "int8"}
PEERS = ("generate", "generate, sorted", OURS, OURS_BF16)


def main() -> None:
    parser = make_parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = _compare(Path(folder), args)
    print(_table(result))
    publish_result(args, "export-cpu", result)


def _compare(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer, store = make_workload(args, folder)
    in_order, by_length = select_batches(store, args.blocks)
    rows = [row for batch in in_order for row in batch]
    engines = [
        Engine("generate", lambda: answer_with_generate(model, store, in_order)),
        Engine("generate, sorted", lambda: answer_with_generate(model, store, by_length)),
        Engine(OURS, lambda: answer_with_fivetune(model, store, rows, nullcontext)),
        Engine(
            OURS_BF16, lambda: answer_with_fivetune(model, store, rows, lambda: torch.autocast("cpu", torch.bfloat16))
        ),
    ]
    save_model(model, tokenizer, folder / "model")
    sizes = {}
    for name, quantization in FORMATS.items():
        convert_model(folder / "model", folder / name, quantization)
        sizes[name] = sum(path.stat().st_size for path in (folder / name).iterdir())
        converted = Converted(folder / name, device="cpu", num_threads=torch.get_num_threads())
        engines.append(Engine(name, partial(_answer, converted, model, store, rows)))
    windows = interleaved(engines, len(rows), args.windows)
    expected = engines[0].answers
    same = {each.name: sum(each.answers[row] == ids for row, ids in expected.items()) / len(rows) for each in engines}
    if min(same[name] for name in ("generate, sorted", OURS, "ctranslate2")) < 1:
        raise UnequalWork(f"answers are not the same: {same}.")
    return {
        "ratio": {
            name: {peer: ratio(windows[name], windows[peer], "units").as_list() for peer in PEERS} for name in FORMATS
        },
        "questions_per_second": {name: rates(found, "units").as_list() for name, found in windows.items()},
        "same_answers": same,
        "bytes": sizes,
        "workload": describe_workload(store, rows, in_order),
        "facts": facts("cpu"),
    }


def _answer(converted: Converted, model: Any, store: Any, rows: list[int]) -> Answers:
    decoding = Decoding(CAP, batch_size=BATCH_SIZE, score_targets=False)
    found = converted(model, store, rows, decoding, device="cpu", autocast=nullcontext)
    return {one.row: one.token_ids for one in found}


def _table(result: dict[str, Any]) -> str:
    rows = [["engine", "questions/s", *(f"{name} is faster" for name in FORMATS), "answers of generate", "MB"]]
    for name, (speed, *_) in result["questions_per_second"].items():
        spreads = [result["ratio"][each].get(name) for each in FORMATS]
        times = [f"{one[0]:.2f} x ({one[1]:.2f} to {one[2]:.2f})" if one else "" for one in spreads]
        size = result["bytes"].get(name)
        same = f"{result['same_answers'][name]:.1%}"
        rows.append([name, f"{speed:.1f}", *times, same, f"{size / 1e6:.0f}" if size else ""])
    return table(rows)


if __name__ == "__main__":
    main()
