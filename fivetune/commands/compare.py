"""Run a sweep and compare its variants, or compare runs that are there: a table, and one HTML page.

In: a sweep file (docs/compare.md), a sweep's directory, or run directories. Out: the runs, and an HTML page.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any

from fivetune.commands import print_json, print_table

TAKES_SETTINGS = True
PAGE = "comparison.html"
COLUMNS = ("score_best", "seconds", "examples_per_second", "scaling_efficiency", "energy_joules", "cost")
LABELS = {
    "seconds": "time", "examples_per_second": "examples/s", "scaling_efficiency": "scaling",
    "energy_joules": "energy", "cost": "cost",
}  # fmt: skip


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("sources", metavar="SOURCE", nargs="+", help="sweep file, name of a shipped sweep, directory "
                        "of a sweep, or run directories")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="show the runs and the estimated time, make none")
    parser.add_argument("--resume", action="store_true", help="make the runs that a sweep in its directory still lacks")
    parser.add_argument("--overwrite", action="store_true", help="move a sweep that is in the directory aside")
    parser.add_argument("--baseline", metavar="NAME", help="the variant or run that the others are held against")
    parser.add_argument("--metric", metavar="SCORE", help="the score that counts")
    parser.add_argument("--vary", metavar="KEY", nargs="+", help="of run directories: the settings that are meant to "
                        "differ; any other difference is a warning (default: all that differ)")  # fmt: skip
    parser.add_argument("--price-per-hour", metavar="PRICE", type=float, help="of the machine, in any currency")
    parser.add_argument("--output", metavar="FILE", type=Path, help=f"the page; default: {PAGE} in the sweep's "
                        "directory, comparison-RUN-RUN.html beside runs")  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="print the result only")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.epilog = "Settings of all runs of a sweep can follow: --train.num_steps 100"


def run(args: Namespace) -> int:
    from fivetune.config_layers import parse_overrides
    from fivetune.errors import ConfigError
    from fivetune.rundir import refuse_foreign
    from fivetune.sweep import is_sweep

    settings = parse_overrides(args.settings)
    if args.price_per_hour is not None and not 0 <= args.price_per_hour < inf:
        raise ConfigError(f"--price-per-hour {args.price_per_hour}: give a number, 0 or more.")
    if args.resume and args.overwrite:
        raise ConfigError("--overwrite: begins anew, --resume goes on. Give one of them.")
    folders = [Path(source) for source in args.sources if Path(source).is_dir()]
    for source in args.sources if folders else ():
        if not Path(source).exists():
            refuse_foreign(Path(source))
    if folders and (settings or args.dry_run or args.resume or args.overwrite):
        raise ConfigError(f"{folders[0]}: is a directory, in which nothing is run. Give the sweep file, "
                          "or leave settings, --dry-run, --resume and --overwrite out.")  # fmt: skip
    if len(folders) == len(args.sources) > 0 and not (len(folders) == 1 and is_sweep(folders[0])):
        return _of_runs(args, folders)
    if len(args.sources) > 1:
        raise ConfigError(f"{args.sources[1]}: one sweep at a time, or several run directories. Give one of them.")
    if args.vary:
        raise ConfigError("--vary: a sweep says itself what is varied. Leave it out, or give run directories.")
    return _of_directory(args, folders[0]) if folders else _of_file(args, settings)


def _of_file(args: Namespace, settings: dict[str, Any]) -> int:
    """Make the runs of a sweep file, or show which they are."""
    from fivetune.metrics import score_names
    from fivetune.sweep import estimates, read_sweep, run_sweep

    sweep = read_sweep(args.sources[0], settings)
    _refuse_unknown("--baseline", args.baseline, sweep.variants)
    _refuse_unknown("--metric", args.metric, score_names(sweep.runs[0].config.task.metrics))
    _refuse_output(args.output, sweep.folder)
    if args.dry_run:
        seconds = estimates(sweep, overwrite=args.overwrite)
        _print_plan(sweep, seconds, overwrite=args.overwrite, as_json=args.json)
        return 0
    return _of_directory(args, run_sweep(sweep, resume=args.resume, overwrite=args.overwrite, quiet=args.quiet))


def _of_directory(args: Namespace, folder: Path) -> int:
    """Compare what a sweep's directory holds. Raises Incomplete, after telling the rest, if runs are missing."""
    from fivetune.errors import Incomplete
    from fivetune.sweep import comparison_of, variants_of

    variants = variants_of(folder)
    _refuse_asked(args, variants)
    asked = {"baseline": args.baseline, "metric": args.metric, "price_per_hour": args.price_per_hour}
    _tell(comparison_of(folder, variants, **asked), args, folder / PAGE)
    missing = sum(len(variant.failures) for variant in variants)
    if missing:
        num = missing + sum(len(variant.runs) for variant in variants)
        raise Incomplete(f"{folder}: {missing} of {num} runs are missing. What became of them is above. "
                         "Make them with the sweep file and --resume.")  # fmt: skip
    return 0


def _of_runs(args: Namespace, folders: Sequence[Path]) -> int:
    """Compare run directories that nobody planned together."""
    from fivetune.compare import compare, group_runs
    from fivetune.errors import ConfigError
    from fivetune.rundir import read

    runs = [read(folder) for folder in folders]
    variants, differing = group_runs(runs)
    if len(variants) < 2:
        raise ConfigError(f"{folders[0]}: there is nothing to compare it with: "
                          f"{'no other run is given' if len(folders) < 2 else 'all runs have the same settings'}. "
                          "Give runs that differ in more than the seed.")  # fmt: skip
    _refuse_asked(args, variants)
    _refuse_unknown_settings(args.vary or (), runs)
    comparison = compare(
        variants, title=" and ".join(variant.name for variant in variants) if len(variants) < 4 else "Runs compared",
        metric=args.metric, baseline=args.baseline, varied=args.vary or differing, price_per_hour=args.price_per_hour,
    )  # fmt: skip
    _tell(comparison, args, folders[0].resolve().with_name(page_of([run.name for run in runs])))
    return 0


def page_of(names: Sequence[str]) -> str:
    """File name of the page of some runs.

    >>> page_of(["a", "b"]), page_of(["a", "b", "c", "d"])
    ('comparison-a-b.html', 'comparison-a-and-3-more.html')
    """
    told = names if len(names) < 4 else [names[0], f"and-{len(names) - 1}-more"]
    return f"comparison-{'-'.join(told)}.html"


def _tell(comparison: Any, args: Namespace, page: Path) -> None:
    """Write the page, to --output if it is given, and print what it says in short."""
    from fivetune.report.comparison import write_comparison

    page = args.output or page
    write_comparison(comparison, page)
    _print_comparison(comparison)
    print(f"page  {page}")
    if args.json:
        print_json({"page": str(page), **as_table(comparison)})


# --- what is refused ---


def _refuse_asked(args: Namespace, variants: Sequence[Any]) -> None:
    """A baseline that is no variant, a score that no run has, a page in a folder that is not there."""
    scores = {
        name for one in variants for run in one.runs for record in run.evals for name in record.get("scores") or ()
    }
    _refuse_unknown("--baseline", args.baseline, [variant.name for variant in variants])
    _refuse_unknown("--metric", args.metric if scores else None, scores)
    _refuse_output(args.output)


def _refuse_unknown(flag: str, name: str | None, allowed: Collection[str]) -> None:
    from fivetune.errors import ConfigError, nearest

    if name is not None and name not in allowed:
        raise ConfigError(f"{flag} {name}: there is none of this name. {nearest(name, allowed)}")


def _refuse_output(page: Path | None, *made: Path) -> None:
    """A page in a folder that is neither there nor among those that will be `made`."""
    from fivetune.errors import ConfigError

    if page is None:
        return
    if page.is_dir():
        raise ConfigError(f"--output {page}: is a folder. Give a file in it, such as {page / PAGE}.")
    if not page.parent.is_dir() and page.parent not in made:
        raise ConfigError(f"--output {page}: there is no folder {page.parent}. Make it, or give another file.")


def _refuse_unknown_settings(keys: Iterable[str], runs: Sequence[Any]) -> None:
    """Settings that none of the runs has; those of the same section are told."""
    from fivetune.errors import ConfigError, nearest
    from fivetune.values import flat

    known = {key for run in runs for key in flat(run.config)}
    for key in keys:
        if key not in known:
            section = key.partition(".")[0]
            beside = {other for other in known if other.startswith(f"{section}.")}
            allowed = beside or {other.partition(".")[0] for other in known}
            raise ConfigError(f"--vary {key}: no run has this setting. {nearest(key, allowed)}")


# --- what is printed ---


def as_table(comparison: Any) -> dict[str, Any]:
    """A comparison as plain values, for scripts."""
    from dataclasses import asdict

    def measures(table: Any) -> dict[str, Any]:
        return {name: asdict(measure) for name, measure in table.items() if measure.value is not None}

    return {
        "title": comparison.title, "baseline": comparison.baseline, "metric": comparison.metric,
        "varied": list(comparison.varied), "warnings": list(comparison.warnings),
        "variants": [
            {
                "name": variant.name, "settings": dict(variant.settings), "runs": [run.name for run in variant.runs],
                "measures": measures(variant.measures), "against": measures(variant.against),
                "over_examples": asdict(variant.over_examples) if variant.over_examples else None,
                "pareto": variant.pareto, "failures": list(variant.failures),
                "verdicts": [asdict(verdict) for verdict in variant.verdicts],
            }
            for variant in comparison.variants
        ],
    }  # fmt: skip


def _print_plan(sweep: Any, seconds: dict[str, float | None], *, overwrite: bool, as_json: bool) -> None:
    """The runs in their order, with the time that each will take as far as finished ones tell.

    With `overwrite` what is there is moved aside, so that no run is begun.
    """
    from fivetune.progress import duration
    from fivetune.sweep.record import is_sweep, state_of

    states = {run.name: "open" if overwrite else state_of(sweep.folder / run.name) for run in sweep.runs}
    if as_json:
        runs = [{"name": run.name, "variant": run.variant, "seed": run.seed, "seconds": seconds[run.name],
                 "state": states[run.name]} for run in sweep.runs]  # fmt: skip
        print_json({"dir": str(sweep.folder), "runs": runs})
        return
    rows = []
    for number, run in enumerate(sweep.runs, start=1):
        state, expected = states[run.name], seconds[run.name]
        takes = "" if state == "finished" else "unknown" if expected is None else duration(expected)
        rows.append((str(number), run.variant, str(run.seed), "" if state == "open" else state, takes))
    print_table(("", "variant", "seed", "state", "takes"), rows)
    left = [value for value in seconds.values() if value != 0]
    known = [value for value in left if value is not None]
    total = (
        f"about {duration(sum(known))}" if len(known) == len(left) else "unknown, as no run of the sweep is finished"
    )
    print(f"{len(sweep.variants)} variants, {len(sweep.runs)} runs in {sweep.folder}; baseline {sweep.baseline}, "
          f"score {sweep.metric}\ntime left: {total if left else 'none'}")  # fmt: skip
    if overwrite and is_sweep(sweep.folder):
        print(f"{sweep.folder}, which is there, is moved aside first")


def _print_comparison(comparison: Any) -> None:
    """The page in short: warnings, the main figures, what wins, the first verdict of each variant, failures."""
    from fivetune.report.comparison import outcome

    for warning in comparison.warnings:
        print(f"warning: {warning}")
    shown = [name for name in COLUMNS if any(v.measures[name].value is not None for v in comparison.variants)]
    labels = {"score_best": f"best {comparison.metric}", **LABELS}
    held = {name for v in comparison.variants for name, one in v.against.items() if one.value is not None}
    columns = [(name, beside) for name in shown for beside in (False, True) if not beside or name in held]
    header = ["variant", "runs", *("against" if beside else labels[name] for name, beside in columns)]
    print_table(header, [_row(variant, columns, baseline=comparison.baseline) for variant in comparison.variants])
    print("Below a figure: 95 % interval of scores, least and most of the rest. * nothing is both better and quicker.")
    print(*outcome(comparison))
    for variant in comparison.variants:
        for verdict in variant.verdicts[:1]:
            print(f"{variant.name}: {verdict.says}")
        for failure in variant.failures:
            print(f"not compared: {failure}")


def _row(variant: Any, columns: Sequence[tuple[str, bool]], *, baseline: str) -> list[str]:
    """A variant's figures with their ranges; `columns` are measures, and whether each stands beside the baseline's."""
    from fivetune.compare import MEASURES
    from fivetune.report.variants import NONE, moved, ranged, worded

    row = [variant.name + (" *" if variant.pareto else ""), str(len(variant.runs))]
    for name, beside in columns:
        if beside:
            is_baseline = variant.name == baseline
            row.append("baseline" if is_baseline else ranged(moved, MEASURES[name], variant.against.get(name, NONE)))
        else:
            row.append(ranged(worded, MEASURES[name], variant.measures[name]))
    return row
