"""LoRA on flat tokens against peft's LoRA on transformers' Seq2SeqTrainer: the same weights, examples and updates.

A run of benchmarks/train.py whose sides all train the adapter; its protocol, its table, its file. All compute in fp32
unless --precision says otherwise. At least 1.5 times the speed of the Trainer as users run it is expected.
    python -m benchmarks.adapters --json
"""

from __future__ import annotations

import sys

import torch

from benchmarks.harness import publish_result
from benchmarks.train import measure_models, parse_arguments, report
from fivetune.machine.telemetry.cores import count_cores

DEFAULTS = ("--adapter", "lora", "--precision", "fp32")
EXPECTED = 1.5  # times the speed of the peer "default", on the same examples


def main() -> int:
    """Measure, print the table and write the result; 1 if it is slower than expected."""
    args = parse_arguments([*DEFAULTS, *sys.argv[1:]])
    torch.set_num_threads(args.threads or count_cores())
    torch.manual_seed(args.seed)
    *_, result = measure_models(args)
    result |= {"name": f"adapters-{result['name']}", "expected": EXPECTED}
    report(result)
    publish_result(args, result["name"], result)
    return 0 if result["ratios"]["default"]["same_examples"] >= EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
