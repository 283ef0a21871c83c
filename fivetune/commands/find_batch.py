"""Find the micro-batch size that fits into memory.

The sizes that fit, their throughput, and the setting to use.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivetune.commands import print_json, print_text, write_finder_result

TAKES_SETTINGS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="YAML file or name of a shipped recipe")
    parser.add_argument("--largest", type=int, help="largest size if there is no train.global_batch_size (256)")
    parser.add_argument("--out", type=Path, help="JSON file, with a page beside it; default: RUN_DIR.find-batch.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "The report of the run shows the result. Any setting can follow: --train.precision bf16"


def run(args: argparse.Namespace) -> int:
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import ConfigError
    from fivetune.rundir.progress import Progress
    from fivetune.training.autotune.find_batch import find_batch

    if args.largest is not None and args.largest < 1:
        raise ConfigError(f"--largest {args.largest}: must be at least 1.")
    config = load_config(args.recipe, parse_overrides(args.settings))
    progress = Progress()
    progress.start()
    try:
        found = find_batch(config, largest=args.largest, on_progress=progress.update)
    finally:
        progress.close()
    page = write_finder_result("find-batch", found.as_dict(), run=config.run.dir, out=args.out)
    if args.json:
        print_json({"batch_size": found.batch_size, "largest_fit": found.fit.batch_size, "page": str(page)})
        return 0
    print("examples  tokens/s")
    for one in found.speeds:
        print(f"{one.batch_size:>8}  {one.tokens_per_second:>8,.0f}")
    print_text(f"largest that fits: {found.fit.batch_size}; {found.fit.why}")
    print(f"use   --train.batch_size {found.batch_size}")
    print_text(f"page  {page}")
    return 0
