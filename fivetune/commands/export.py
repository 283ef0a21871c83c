"""Export a run to another format, with a proof.

The proof compares answers, score, speed and size on the run's evaluation data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fivetune.commands import add_flag, add_plugin_options, print_json, print_table, print_text, read_plugin_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from fivetune import plugins

    formats = plugins.list_plugins("exporters")
    parser.add_argument("run", help="run directory")
    parser.add_argument("--format", required=True, metavar="FORMAT", help=f"one of: {', '.join(formats)}")
    add_plugin_options(parser, "exporters", title="options of the format")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder to write; default: RUN/export/FORMAT")
    add_flag(parser, "--overwrite", "replace an existing export")
    parser.add_argument(
        "--examples",
        metavar="N",
        type=int,
        default=200,
        help="questions of the evaluation data in the proof; default: 200",
    )
    add_flag(parser, "--json", "print one JSON object as the last line")


def run(args: argparse.Namespace) -> int:
    from fivetune.delivery.exporters import load_format
    from fivetune.errors import IncompleteError
    from fivetune.rundir.progress import Progress

    options = read_plugin_options(args, "exporters")
    load_format(args.format, options)  # what is wrong is reported before torch is imported
    from fivetune.delivery.exporters._export import export

    # Converted, then both sides answer the same questions.
    with Progress() as progress:
        found = export(
            args.run,
            args.format,
            options,
            output=args.output,
            overwrite=args.overwrite,
            examples=args.examples,
            on_progress=progress.update,
            on_note=progress.log,
        )
    _print_proof(found.facts)
    print_text(f"verdict  {': '.join([found.verdict, *found.reasons])}")
    print_text(f"export   {found.folder}")
    if args.json:
        result = {name: value for name, value in found.facts.items() if name != "files"}
        print_json({"output": str(found.folder), **result})
    if found.proof.get("failed"):
        raise IncompleteError(f"{found.folder}: the export is written, but {found.reasons[0]}")
    return 0


def _print_proof(export: dict[str, Any]) -> None:
    """Print the proof as a table of the original and the export."""
    from fivetune.errors import format_size

    proof = export["proof"]
    sizes = [format_size(export["bytes"][side]) for side in ("original", "export")]
    rows = [["size", *sizes]]
    if "examples" in proof:
        rows.append([f"same predictions of {proof['examples']:,}", "", f"{proof['identical_predictions']:.1%}"])
    if "original" in proof:
        scores: list[str] = []
        for found in (proof["original"], proof["export"]):
            interval = " ({:.1f} to {:.1f})".format(*found["interval"]) if found["interval"] else ""
            scores.append(f"{found['score']:.2f}{interval}")
        rows.append([proof["metric"], *scores])
    for one in proof.get("speed", ()):
        name = f"batches of {one['batch_size']}"
        latencies = [f"{name}: p50, p99"]
        rates = [name]
        for side in (one["original"], one["export"]):
            latencies.append(f"{side['p50_ms']:.1f} ms, {side['p99_ms']:.1f} ms")
            rates.append(f"{side['examples_per_second']:.1f} examples/s")
        rows += [latencies, rates]
    print_table(["", "original", "export"], rows)
