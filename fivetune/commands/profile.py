"""Profile training steps: kernels, gaps, launches, memory.

Kernel time by class of operation. Captures of Nsight Systems are read, too.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from fivetune.commands import add_flag, print_json, print_page, print_text
from fivetune.errors import ConfigError, DataError

TAKES_SETTINGS = True
CAPTURES, TRACES, REPORTS = (".sqlite", ".sqlite3", ".db"), ("trace.json", ".json.gz"), (".nsys-rep", ".qdrep")
NUM_STEPS, NUM_WARM_UP = 5, 3
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "99"}  # suppress the profiler's start and stop messages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target",
        metavar="RECIPE|CAPTURE",
        help="recipe or run directory, to record its steps; or a file to read: a capture of Nsight Systems (.sqlite), "
        "or a trace of torch.profiler (trace.json, .json.gz)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"number of steps to record, default: {NUM_STEPS}; for a capture: steps in it, for figures per step",
    )
    parser.add_argument(
        "--warm-up", type=int, metavar="N", default=NUM_WARM_UP, help=f"warm-up steps before; default: {NUM_WARM_UP}"
    )
    add_flag(parser, "--nsight", "read the file as an Nsight capture, with any file name")
    parser.add_argument("--html", metavar="FILE", type=Path, help="file of the page; default: in RUN_DIR/trace/")
    add_flag(parser, "--json", "print the summary as one JSON object (seconds, bytes)")
    parser.epilog = "Any setting of a recipe can follow: --train.batch_size 8 --device cuda"


def run(args: argparse.Namespace) -> int:
    for name, value in (("--steps", args.steps), ("--warm-up", args.warm_up)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is not a number of steps. Allowed: 1 or more. Try {name} {NUM_STEPS}.")
    path = Path(args.target)
    if args.target.endswith(REPORTS):
        raise DataError(
            f"{path}: is Nsight's own format. Export it: nsys export --type sqlite {path}, then give the .sqlite file."
        )
    if args.nsight or args.target.endswith((*CAPTURES, *TRACES)):
        if args.settings:
            raise ConfigError(f"{args.settings[0]}: settings have no effect on a trace file. Leave it out.")
        if args.target.endswith(TRACES) and not args.nsight:
            from fivetune.machine.profiling.chrome import read_trace, summarise_trace

            summary = summarise_trace(read_trace(path)).as_dict()
        else:
            from fivetune.machine.profiling.nsight import summarise_capture

            summary = summarise_capture(path, num_steps=args.steps).as_dict()
        _write_and_print(args, summary, title=path.name, about=f"read from {path}", page=args.html, written={})
        return 0
    return _record_steps(args)


def _record_steps(args: argparse.Namespace) -> int:
    """Record the steps of a recipe; writes only the folder trace/ of its run directory."""
    os.environ |= QUIET | os.environ
    from fivetune.config import load_config
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import RunDirError
    from fivetune.machine.profiling.chrome import read_trace, summarise_trace
    from fivetune.rundir import CONFIG, TRACE, TRACE_FOLDER, find_conflict, write_json
    from fivetune.rundir.progress import Progress
    from fivetune.training.window import profile_steps

    config = load_config(args.target, parse_overrides(args.settings))
    folder = Path(config.run.dir)
    # A run directory gains a trace; other contents are not touched.
    if (reason := find_conflict(folder)) and not (folder / CONFIG).is_file():
        raise RunDirError(reason)
    trace = folder / TRACE_FOLDER / "trace.json.gz"
    summary = folder / TRACE
    with Progress() as progress:
        window = profile_steps(
            config, trace, num_steps=args.steps or NUM_STEPS, num_warm_up=args.warm_up, on_progress=progress.update
        )
        progress.update("reading the trace", 0)
        found = summarise_trace(
            read_trace(trace), parts=window.bytes_by_part, plain_step_seconds=window.plain_step_seconds
        ).as_dict()
    write_json(summary, found)
    page = args.html or folder / TRACE_FOLDER / "trace.html"
    about = f"{args.target}: {window.description}"
    written = {"trace": trace, "summary": summary}
    _write_and_print(args, found, title=f"Trace of {folder.name}", about=about, page=page, written=written)
    return 0


def _write_and_print(
    args: argparse.Namespace,
    summary: dict[str, Any],
    *,
    title: str,
    about: str,
    page: Path | None,
    written: dict[str, Path],
) -> None:
    """Print the tables and the paths of the written files; write the page if `page` is given."""
    from fivetune.reading.report.page.render import render_html
    from fivetune.reading.report.run.trace import build_trace_page
    from fivetune.rundir import write_text

    made = build_trace_page(summary, title=title, about=about)
    if page:
        write_text(page, render_html(made))
        written = {**written, "page": page}
    if args.json:
        print_json({**summary, **{name: str(path) for name, path in written.items() if name != "summary"}})
        return
    print_page(made)
    if written:
        print()
    for name, path in written.items():
        print_text(f"{name:<8} {path}")
    if "trace" in written:
        print("The trace opens in https://ui.perfetto.dev; a run's report shows the summary: fivetune report RUN_DIR")
