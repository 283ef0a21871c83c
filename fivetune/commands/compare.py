"""Train a sweep, or compare runs: a table and an HTML page.

In: a sweep file (docs/compare.md), a sweep's directory, or run directories. Out: the runs, and an HTML page.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivetune.commands import (
    add_flag,
    add_launcher_arguments,
    add_output_arguments,
    assign_nodes,
    launch_sweep,
    print_json,
    print_table,
    print_text,
    read_launcher,
    refuse_outputs,
    write_outputs,
)

if TYPE_CHECKING:
    from fivetune.config import RunConfig
    from fivetune.fleet.experiments.sweep import Sweep
    from fivetune.fleet.launchers import Launcher
    from fivetune.reading.compare.records import Comparison, Measure, Variant

TAKES_SETTINGS = True
PAGE = "comparison.html"
PAGE_OPTIONS = ("baseline", "metric", "price_per_hour", "output", "figures")
COLUMNS = ("score_best", "seconds", "examples_per_second", "scaling_efficiency", "energy_joules", "cost")
LABELS = {
    "seconds": "time", "examples_per_second": "examples/s", "scaling_efficiency": "scaling",
    "energy_joules": "energy", "cost": "cost",
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="sweep file, name of a shipped sweep, directory of a sweep, or run directories",
    )
    add_flag(parser, "--dry-run", "show the runs and the estimated time; do not train")
    add_flag(parser, "--resume", "train the missing runs of a sweep")
    add_flag(parser, "--overwrite", "move an existing sweep aside and start over")
    parser.add_argument("--baseline", metavar="NAME", help="the variant or run that the others are compared with")
    parser.add_argument("--metric", metavar="SCORE", help="the score to compare by")
    parser.add_argument(
        "--vary",
        metavar="KEY",
        nargs="+",
        help="for run directories: the settings that are meant to differ; any other difference is a warning "
        "(default: all that differ)",
    )
    parser.add_argument("--price-per-hour", metavar="PRICE", type=float, help="of the machine, in any currency")
    add_output_arguments(parser, page=f"{PAGE} in the sweep's directory, comparison-RUN-RUN.html beside runs")
    add_flag(parser, "--quiet", "print the result only")
    add_flag(parser, "--json", "print one JSON object as the last line")
    add_launcher_arguments(parser, required=False)
    parser.epilog = "Settings for all runs of a sweep can follow: --train.num_steps 100"


def run(args: Namespace) -> int:
    from fivetune.config.layers import parse_overrides
    from fivetune.errors import ConfigError
    from fivetune.fleet.experiments.record import is_sweep
    from fivetune.rundir import refuse_foreign

    settings = parse_overrides(args.settings)
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < inf:
        raise ConfigError(f"--price-per-hour {args.price_per_hour}: give a number, 0 or more.")
    if args.resume and args.overwrite:
        raise ConfigError("--overwrite and --resume exclude each other. Give one of them.")
    # Folders are compared; a file is a sweep, which trains runs.
    folders = [Path(source) for source in args.sources if Path(source).is_dir()]
    if folders:
        for source in args.sources:
            if not Path(source).exists():
                refuse_foreign(Path(source))
    if folders and (settings or args.dry_run or args.resume or args.overwrite or args.on):
        raise ConfigError(
            f"{folders[0]}: is a directory; only a sweep file trains runs. Give the sweep file, "
            "or omit settings, --dry-run, --resume, --overwrite and --on."
        )
    if len(folders) == len(args.sources) > 0 and not (len(folders) == 1 and is_sweep(folders[0])):
        return _compare_runs(args, folders)
    if len(args.sources) > 1:
        raise ConfigError(f"{args.sources[1]}: one sweep at a time, or several run directories. Give one of them.")
    if args.vary:
        raise ConfigError("--vary: a sweep file defines what is varied. Omit --vary, or give run directories.")
    if folders:
        return _compare_sweep_folder(args, folders[0])
    return _compare_sweep_file(args, settings)


def _compare_sweep_file(args: Namespace, settings: dict[str, Any]) -> int:
    """Train the runs of a sweep file, or list them."""
    from fivetune.fleet.experiments.runs import estimate_seconds, run_sweep
    from fivetune.fleet.experiments.sweep import read_sweep

    launcher = read_launcher(args)
    if launcher is not None:
        return _launch_sweep(args, launcher, settings)
    sweep = read_sweep(args.sources[0], settings)
    _refuse_wrong_page(args, sweep)
    if args.dry_run:
        seconds = estimate_seconds(sweep, overwrite=args.overwrite)
        _print_plan(sweep, seconds, overwrite=args.overwrite, as_json=args.json)
        return 0
    return _compare_sweep_folder(args, run_sweep(sweep, resume=args.resume, overwrite=args.overwrite, quiet=args.quiet))


def _launch_sweep(args: Namespace, launcher: Launcher, settings: dict[str, Any]) -> int:
    """Start the runs of a sweep on a cluster: one job per run, and one for the page."""
    from fivetune.errors import ConfigError
    from fivetune.fleet.experiments.sweep import read_sweep

    source = args.sources[0]

    def read_first_config(given: Mapping[str, Any]) -> RunConfig:
        return read_sweep(source, given).runs[0].config

    # All runs have the nodes of the first: one array has one size.
    placed, settings = assign_nodes(launcher, settings, read_first_config)
    sweep = read_sweep(source, settings)
    nodes = {run.config.launch.nnodes for run in sweep.runs}
    if len(nodes) > 1:
        raise ConfigError(f"{source}: launch.nnodes differs between the runs: one array has one size. Give --nodes.")
    if launcher.gpus is None and placed.gpus:
        placed = placed.model_copy(update={"gpus": max(run.config.launch.nproc for run in sweep.runs)})
    _refuse_wrong_page(args, sweep)
    page: list[str] = []
    for name in PAGE_OPTIONS:
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value is not None:
                page += (f"--{name.replace('_', '-')}", str(value))
    if launch_sweep(sweep, placed, args, page=page):
        return 0
    return _compare_sweep_folder(args, sweep.folder)


def _compare_sweep_folder(args: Namespace, folder: Path) -> int:
    """Compare the finished runs of a sweep's directory; then raise IncompleteError if runs are missing."""
    from fivetune.errors import IncompleteError
    from fivetune.fleet.experiments.record import compare_sweep, read_sweep_variants

    variants = read_sweep_variants(folder)
    _refuse_wrong_arguments(args, variants)
    comparison = compare_sweep(
        folder, variants, baseline=args.baseline, metric=args.metric, price_per_hour=args.price_per_hour
    )
    _write_and_print(comparison, args, folder / PAGE)
    # The page is written and printed, also of an incomplete sweep; the exit code tells.
    missing = sum(len(variant.failures) for variant in variants)
    if missing:
        num = missing + sum(len(variant.runs) for variant in variants)
        raise IncompleteError(
            f"{folder}: {missing} of {num} runs are missing, for the reasons above. "
            "Train them with the sweep file and --resume."
        )
    return 0


def _compare_runs(args: Namespace, folders: Sequence[Path]) -> int:
    """Compare any run directories."""
    from fivetune.errors import ConfigError, suggest_names
    from fivetune.reading.compare import compare, group_runs
    from fivetune.rundir import read_run
    from fivetune.values import flatten_table

    runs = [read_run(folder) for folder in folders]
    variants, differing = group_runs(runs)
    if len(variants) < 2:
        why = "no other run is given" if len(folders) < 2 else "all runs have the same settings"
        raise ConfigError(f"{folders[0]}: cannot be compared: {why}. Give runs that differ in more than the seed.")
    _refuse_wrong_arguments(args, variants)
    known: set[str] = set()
    for run in runs:
        known.update(flatten_table(run.config))
    for key in args.vary or ():
        if key not in known:  # the error lists the settings of its section
            section = f"{key.partition('.')[0]}."
            near = {other for other in known if other.startswith(section)}
            allowed = near or {other.partition(".")[0] for other in known}
            raise ConfigError(f"--vary {key}: no run has this setting. {suggest_names(key, allowed)}")
    title = "Runs compared"
    if len(variants) < 4:
        title = " and ".join(variant.name for variant in variants)
    comparison = compare(
        variants,
        title=title,
        metric=args.metric,
        baseline=args.baseline,
        varied=args.vary or differing,
        price_per_hour=args.price_per_hour,
    )
    _write_and_print(comparison, args, folders[0].resolve().with_name(build_page_name([run.name for run in runs])))
    return 0


def build_page_name(names: Sequence[str]) -> str:
    """File name of the page of some runs.

    >>> build_page_name(["a", "b"]), build_page_name(["a", "b", "c", "d"])
    ('comparison-a-b.html', 'comparison-a-and-3-more.html')
    """
    parts = names if len(names) < 4 else [names[0], f"and-{len(names) - 1}-more"]
    return f"comparison-{'-'.join(parts)}.html"


def _write_and_print(comparison: Comparison, args: Namespace, path: Path) -> None:
    """Write the page and the files of --output and --figures, and print a summary."""
    from fivetune.reading.report.comparison import build_comparison_page
    from fivetune.reading.report.comparison.variants import build_comparison_results

    page = build_comparison_page(comparison)
    print_comparison(comparison)
    path, *written = write_outputs(args, page, build_comparison_results(comparison), default=path)
    if args.json:
        print_json({"page": str(path), "written": list(map(str, written)), **build_comparison_result(comparison)})


# --- checks of the arguments ---


def _refuse_wrong_arguments(args: Namespace, variants: Sequence[Variant]) -> None:
    """Raise ConfigError for a baseline that is not a variant, an unknown score, or a page in a missing folder."""
    scores: set[str] = set()
    for variant in variants:
        for run in variant.runs:
            for record in run.evals:
                scores.update(record.scores)
    _refuse_unknown("--baseline", args.baseline, [variant.name for variant in variants])
    if scores:  # else no run has an evaluation, which the page says
        _refuse_unknown("--metric", args.metric, scores)
    refuse_outputs(args)


def _refuse_wrong_page(args: Namespace, sweep: Sweep) -> None:
    """Raise ConfigError for arguments that would fail the page after all runs of a sweep."""
    from fivetune.scores.metrics import list_score_names

    _refuse_unknown("--baseline", args.baseline, sweep.variants)
    _refuse_unknown("--metric", args.metric, list_score_names(sweep.runs[0].config.task.metrics))
    refuse_outputs(args, sweep.folder)


def _refuse_unknown(flag: str, name: str | None, allowed: Collection[str]) -> None:
    from fivetune.errors import ConfigError, suggest_names

    if name is not None and name not in allowed:
        raise ConfigError(f"{flag} {name}: there is no such name. {suggest_names(name, allowed)}")


# --- output ---


def build_comparison_result(comparison: Comparison) -> dict[str, object]:
    """Convert a comparison to JSON values."""
    variants: list[dict[str, object]] = []
    for variant in comparison.variants:
        variants.append(
            {
                "name": variant.name,
                "settings": dict(variant.settings),
                "runs": [run.name for run in variant.runs],
                "measures": _describe_measures(variant.measures),
                "against": _describe_measures(variant.against),
                "over_examples": asdict(variant.over_examples) if variant.over_examples else None,
                "pareto": variant.pareto,
                "failures": list(variant.failures),
                "verdicts": [asdict(verdict) for verdict in variant.verdicts],
            }
        )
    return {
        "title": comparison.title,
        "baseline": comparison.baseline,
        "metric": comparison.metric,
        "varied": list(comparison.varied),
        "warnings": list(comparison.warnings),
        "disturbed": list(comparison.disturbed),
        "incomparable": comparison.incomparable or None,
        "variants": variants,
    }


def _describe_measures(table: Mapping[str, Measure]) -> dict[str, object]:
    return {name: asdict(measure) for name, measure in table.items() if measure.value is not None}


def _print_plan(sweep: Sweep, seconds: Mapping[str, float | None], *, overwrite: bool, as_json: bool) -> None:
    """Print the runs in order, each with its state and estimated time; with `overwrite` all runs start over."""
    from fivetune.fleet.experiments.record import is_sweep, read_run_state
    from fivetune.rundir.progress import format_time_span

    runs: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    for number, run in enumerate(sweep.runs, start=1):
        state = "open" if overwrite else read_run_state(sweep.folder / run.name)
        expected = seconds[run.name]
        takes = "unknown" if expected is None else format_time_span(expected)
        if state == "finished":
            takes = ""
        rows.append((str(number), run.variant, str(run.seed), "" if state == "open" else state, takes))
        runs.append({"name": run.name, "variant": run.variant, "seed": run.seed, "seconds": expected, "state": state})
    if as_json:
        print_json({"dir": str(sweep.folder), "runs": runs})
        return
    print_table(("", "variant", "seed", "state", "takes"), rows)
    # Finished runs take 0 seconds.
    left = [value for value in seconds.values() if value != 0]
    known = [value for value in left if value is not None]
    total = "none"
    if len(known) < len(left):
        total = "unknown, because no run of the sweep has finished"
    elif left:
        total = f"about {format_time_span(sum(known))}"
    print_text(
        f"{len(sweep.variants)} variants, {len(sweep.runs)} runs in {sweep.folder}; baseline {sweep.baseline}, "
        f"score {sweep.metric}\ntime left: {total}"
    )
    if overwrite and is_sweep(sweep.folder):
        print_text(f"{sweep.folder} exists and is moved aside first")


def print_comparison(comparison: Comparison) -> None:
    """Print warnings, the main measures, the outcome, the first verdict of each variant, and failures."""
    from fivetune.reading.compare.measures import TIME_MEASURES
    from fivetune.reading.report.comparison import describe_outcome

    for warning in comparison.warnings:
        print_text(f"warning: {warning}")
    labels = {"score_best": f"best {comparison.metric}", **LABELS}
    known: set[str] = set()
    compared: set[str] = set()
    for variant in comparison.variants:
        known.update(name for name, one in variant.measures.items() if one.value is not None)
        compared.update(name for name, one in variant.against.items() if one.value is not None)
    columns: list[tuple[str, bool]] = []  # a measure, and whether the column is its difference from the baseline
    header = ["variant", "runs"]
    for name in COLUMNS:
        if name not in known:
            continue
        columns.append((name, False))
        header.append(labels[name] + (" !" if comparison.disturbed and name in TIME_MEASURES else ""))
        if name in compared:
            columns.append((name, True))
            header.append("against")
    print_table(header, [_build_row(variant, columns, baseline=comparison.baseline) for variant in comparison.variants])
    note = "Second line: 95 % interval for scores, min-max otherwise."
    if any(variant.pareto for variant in comparison.variants):
        note += " * = Pareto-optimal."
    if comparison.disturbed:
        note += " ! = distorted by other work on the machine."
    print_text(note)
    print_text(" ".join(describe_outcome(comparison)))
    for variant in comparison.variants:
        for verdict in variant.verdicts[:1]:
            print_text(f"{variant.name}: {verdict.message}")
        for failure in variant.failures:
            print_text(f"not compared: {failure}")


def _build_row(variant: Variant, columns: Sequence[tuple[str, bool]], *, baseline: str) -> list[str]:
    """Build the row of a variant: measures with their ranges, and their differences from the baseline."""
    from fivetune.reading.compare import MEASURES
    from fivetune.reading.report.comparison.variants import (
        UNKNOWN_MEASURE,
        format_measure,
        format_measure_difference,
        format_with_range,
    )

    row = [variant.name + (" *" if variant.pareto else ""), str(len(variant.runs))]
    for name, against in columns:
        if not against:
            row.append(format_with_range(format_measure, MEASURES[name], variant.measures[name]))
        elif variant.name == baseline:
            row.append("baseline")
        else:
            one = variant.against.get(name, UNKNOWN_MEASURE)
            row.append(format_with_range(format_measure_difference, MEASURES[name], one))
    return row
