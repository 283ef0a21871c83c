"""Commands, one per file (`find-lr` is find_lr.py): the first line of its docstring is the help; `run(args)` returns
the exit code.

A command with TAKES_SETTINGS = True receives unknown arguments as dotted overrides in `args.settings`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_origin

from fivetune.redaction import name_invisible

if TYPE_CHECKING:
    from rich.console import Console

    from fivetune.config import RunConfig
    from fivetune.fleet.experiments.sweep import Sweep
    from fivetune.fleet.launchers import JobPlan, JobRun, Launcher, SharedWork
    from fivetune.reading.report.page.parts import Page, Results
    from fivetune.start.choose import DoubtError
    from fivetune.start.columns import RawTable
    from fivetune.start.files import Started
    from fivetune.start.survey import Reading
    from fivetune.training.checks.preflight import Check

WIDTH = 160  # characters of a table that is not printed to a terminal
MAX_LISTED = 10  # shards
MAX_COLUMNS = 20  # of a data file that are listed; those that the task reads always are
MAX_LINE = 10_000  # characters of a cell that are measured
WHOLE_DIGITS = 6  # before the decimal point of scores and counts
MAX_CELL_CHARS = 90  # of a page's cell
CHECK_WIDTH, CHECK_CHARS = 100, 17  # characters of a check's line outside a terminal, and of its name
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


def print_json(result: dict[str, Any] | list[Any]) -> None:
    """Print the machine-readable result: one JSON object (or array) as the last line of standard output."""
    print(json.dumps(result, ensure_ascii=False), flush=True)


def print_checks(checks: Iterable[Check], *, json_wanted: bool, facts: Mapping[str, Any] = NO_FACTS) -> int:
    """Print each check as it is made, then their numbers; returns the exit code of the first that failed, else 0.

    Args:
        json_wanted: print one JSON object as the last line, with `facts`.
    """
    from rich.console import Console

    from fivetune.errors import FiveTuneError

    console = Console(highlight=False, soft_wrap=True)
    made: list[Check] = []
    exit_code = 0
    num_errors = 0
    try:
        for check in checks:
            made.append(check)
            _print_check(console, check.state, f"{check.name:<{CHECK_CHARS}}", check.detail)
            if check.state == "fail":
                exit_code = exit_code or check.error_class.exit_code
    except FiveTuneError as error:  # ends the checks, and counts as one that failed
        exit_code = error.exit_code
        num_errors = 1
        _print_check(console, "fail", "", str(error))
    states = [check.state for check in made]
    num_failed = states.count("fail") + num_errors
    print(f"{states.count('pass')} passed, {states.count('warn')} to look at, {num_failed} failed")
    if json_wanted:
        listed = [{"name": one.name, "state": one.state, "detail": one.detail} for one in made]
        print_json({"checks": listed, "failed": num_failed, "exit_code": exit_code, **facts})
    return exit_code


def _print_check(console: Console, state: str, name: str, detail: str) -> None:
    """Print a check, its detail wrapped to the terminal under its beginning; each set has a paragraph of its own."""
    indent = 6 + len(name)
    width = console.width if console.is_terminal else CHECK_WIDTH
    width = max(width - indent, 20)
    lines: list[str] = []
    for paragraph in re.split(r"; (?=(?:train|eval)[ :])", detail):
        lines += textwrap.wrap(name_invisible(paragraph), width, break_long_words=False, break_on_hyphens=False)
    console.print(state, style={"pass": "green", "warn": "yellow", "fail": "red"}[state], end="")
    console.print(f"  {name}" + ("\n" + " " * indent).join(lines), markup=False)


def print_text(text: str) -> None:
    """Print a text that holds names or values of files; invisible characters are named."""
    print(name_invisible(text), flush=True)


def print_warning(text: str) -> None:
    """Print a warning to standard error."""
    print(name_invisible(f"warning: {text}"), file=sys.stderr, flush=True)


def format_open_shards(numbers: Sequence[int], count: int) -> str:
    """Format the numbers of the shards, from 1, that are not done yet.

    >>> format_open_shards([1, 3], 4)
    '2 of 4 shards are missing: 1, 3'
    """
    listed = ", ".join(map(str, numbers[:MAX_LISTED])) + (" ..." if len(numbers) > MAX_LISTED else "")
    return f"{len(numbers)} of {count} shards are missing: {listed}"


def refuse_token_flag(given: str | None, variable: str) -> None:
    """Raise ConfigError for a token on the command line; commands read it from an environment variable alone."""
    from fivetune.errors import ConfigError

    if given is not None:
        raise ConfigError(
            "--token: is not taken: a token on the command line stays in the shell's history and is seen by other "
            f"users. Set the environment variable {variable} to it."
        )


def add_flag(parser: ArgumentParser, name: str, text: str) -> None:
    """Add an option without a value; `text` is its line in --help."""
    parser.add_argument(name, action="store_true", help=text)


def add_silence_arguments(parser: ArgumentParser) -> None:
    """Add the arguments that say when answers are withheld."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--max-error",
        metavar="SHARE",
        help="withhold unsure answers, so that at most this share of the others is wrong: 5%%; by the run's evaluation "
        "with a confidence of 95 %%; default: what evaluate --max-error has kept in the run, if anything",
    )
    group.add_argument(
        "--min-confidence",
        metavar="P",
        help="withhold answers below this confidence: 0.9 or 90%%; 0: none, whatever the run keeps",
    )


def refuse_wrong_silence(args: Namespace) -> None:
    """Raise ConfigError, before a model is loaded, for values of `add_silence_arguments` that are none."""
    from fivetune.scores.analysis.abstention import parse_probability, parse_share

    if args.max_error is not None:
        parse_share(args.max_error, "--max-error")
    if args.min_confidence is not None:
        parse_probability(args.min_confidence, "--min-confidence")


def add_strategy(recipe: str, settings: Mapping[str, Any], *, quiet: bool) -> dict[str, Any]:
    """Propose a strategy for a run of several processes of which neither recipe nor settings name one, and print why.

    Returns: its dotted settings; empty for one process, and if a strategy is named.
    """
    from fivetune.config import load_config, load_layers

    # Read as layers: a strategy that has a default must not count as named.
    table = load_layers(recipe, settings)[0].to_dict()
    launch = table.get("launch", {})
    nnodes = launch.get("nnodes", 1)
    nproc = launch.get("nproc", 1)
    if "strategy" in table or type(nnodes) is not int or type(nproc) is not int or max(nnodes, nproc) < 2:
        return {}
    from fivetune.fleet.estimation.recipe import suggest_strategy

    config = load_config(recipe, {**settings, "launch.nnodes": 1, "launch.nproc": 1})
    proposed, reason = suggest_strategy(config, nnodes, nproc)
    if not quiet:
        print(f"strategy: {proposed['strategy.name']}, {reason}; --strategy.name sets another", flush=True)
    return proposed


def print_scores(scores: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> None:
    """Print scores with two decimals, their points aligned, and their 95 % intervals if known."""
    rows: list[tuple[str, str, str]] = []
    for name, value in scores.items():
        text = f"{value:,.0f}" if name.endswith("total") else f"{value:.2f}"
        whole, point, rest = text.partition(".")
        interval = "{:.1f} to {:.1f}".format(*intervals[name]) if name in intervals else ""
        rows.append((name, f"{whole:>{WHOLE_DIGITS}}{point}{rest}", interval))
    print_table(("score", "value", "95 % interval"), rows)


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, columns of numbers to the right.

    It is as wide as the variable COLUMNS, else the terminal; WIDTH characters if the output is none. A narrow one has
    less space between columns, then columns that break between words, and words that break where nothing else helps.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import measure_renderables
    from rich.table import Table
    from rich.text import Text

    from fivetune.values import are_numbers

    width = shutil.get_terminal_size((WIDTH, 24)).columns
    columns = [[Text(name_invisible(cell)) for cell in column] for column in zip(header, *rows, strict=True)]
    console = Console(highlight=False, width=width)
    # The longest word and the longest line of each column.
    measured = [measure_renderables(console, console.options.update(width=MAX_LINE), column) for column in columns]
    sizes = [max(1, one.maximum) for one in measured]
    is_narrow = sum(sizes) + 3 * (len(sizes) - 1) > width
    if is_narrow:
        _fit_columns(sizes, [one.minimum for one in measured], width - 2 * (len(sizes) - 1))
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=is_narrow)
    for column, size in zip(columns, sizes, strict=True):
        numeric = are_numbers([text.plain for text in column[1:]])
        grid.add_column(column[0], justify="right" if numeric else "left", overflow="fold", width=size)
    for row in [*zip(*columns, strict=True)][1:]:  # `list` is a module of this package
        grid.add_row(*row)
    with console.capture() as captured:
        console.print(grid)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)  # rich fills each line


def _fit_columns(sizes: list[int], words: Sequence[int], room: int) -> None:
    """Narrow the widest columns until all fit into `room` characters; words break only where no column has spaces."""
    for least in (words, [1] * len(words)):
        while sum(sizes) > room:
            spare = [(size, number) for number, size in enumerate(sizes) if size > least[number]]
            if not spare:
                break
            sizes[max(spare)[1]] -= 1


def print_page(page: Page) -> None:
    """Print the texts and tables of a page; charts, figures and examples are shown in HTML only."""
    from fivetune.reading.report.page.parts import Problem, Table, Text
    from fivetune.reading.report.page.wording import escape_hidden

    print(escape_hidden(f"{page.title}\n{page.subtitle}"))
    for section in page.sections:
        print(f"\n== {section.title} ==")
        for part in section.parts:
            if isinstance(part, Text):
                kind = "warning: " if part.kind == "warning" else ""
                print(escape_hidden(f"\n{kind}{part.body}"))
            elif isinstance(part, Problem):
                print(escape_hidden(f"\nwarning: {part.message} {part.advice}").rstrip())
            elif isinstance(part, Table):
                print(escape_hidden(f"\n{part.caption}"))
                rows: list[list[str]] = []
                for row in part.rows:
                    cells: list[str] = []
                    for cell in row:  # it may be a whole example, of a language without blanks
                        line = escape_hidden(" ".join(cell.split()))
                        if len(line) > MAX_CELL_CHARS:
                            line = f"{line[: MAX_CELL_CHARS - 4]} ..."
                        cells.append(line)
                    rows.append(cells)
                print_table(part.header, rows)


# --- files for a paper ---


def add_output_arguments(parser: ArgumentParser, *, page: str = "") -> None:
    """Add --output and --figures.

    Args:
        page: where the page is written without --output; "" for a command without a page.
    """
    html = f"of the page (.html; default: {page}) or " if page else ""
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help=f"file {html}of a table of the results (.csv, .md, .tex); several may be given",
    )
    parser.add_argument(
        "--figures", metavar="DIR", type=Path, help="folder for the charts: each as SVG, PDF, and CSV of its data"
    )


def refuse_outputs(args: Namespace, *made: Path, page: bool = True) -> None:
    """Raise an error for files and folders that cannot be written, before work begins.

    Args:
        made: folders that the command creates.
        page: whether the command has a page.
    """
    from fivetune.errors import ConfigError
    from fivetune.installation import require_package
    from fivetune.reading.report.page.tables import SUFFIXES

    allowed = (*([".html"] if page else []), *SUFFIXES)
    for path in args.output:
        if path.is_dir():
            raise ConfigError(
                f"--output {path}: is a folder. Give a file in it, such as {path / f'table{allowed[0]}'}."
            )
        if path.suffix.lower() not in allowed:
            raise ConfigError(f"--output {path}: has none of the suffixes {', '.join(allowed)}. Give it one of them.")
        if not path.parent.is_dir() and path.parent not in made:
            raise ConfigError(f"--output {path}: there is no folder {path.parent}. Create it, or give another file.")
    if args.figures is not None:
        if args.figures.exists() and not args.figures.is_dir():
            raise ConfigError(f"--figures {args.figures}: is a file. Give a folder, which is created.")
        require_package("--figures", "matplotlib", "paper")


def write_outputs(args: Namespace, page: Page, results: Results, *, default: Path | None = None) -> list[Path]:
    """Write the page, tables and figures that were asked for, and name them unless JSON is; returns their paths.

    Args:
        default: file of the page, the first of the paths, unless --output has one; None: no page is written then.
    """
    from fivetune.reading.report.page.figures import write_figures
    from fivetune.reading.report.page.render import render_html
    from fivetune.reading.report.page.tables import write_results
    from fivetune.rundir import write_text

    pages = [path for path in args.output if path.suffix.lower() == ".html"]
    tables = [path for path in args.output if path not in pages]
    if default and not pages:
        pages = [default]
    written: list[tuple[str, Path, str]] = []
    for path in pages:
        write_text(path, render_html(page))
        written.append(("page", path, ""))
    for path in tables:
        write_results(results, path)
        written.append(("table", path, ""))
    if args.figures is not None:
        num = write_figures(page, args.figures, warn=print_warning)
        written.append(("figures", args.figures, f": {num}, each as .svg, .pdf and .csv"))
    if not args.json:
        for kind, path, more in written:
            print_text(f"{kind:<7} {path}{more}")
    return [path for _, path, _ in written]


# --- a recipe from data ---


def describe_start(started: Started) -> dict[str, Any]:
    """Describe a recipe that was written from data, as --json prints it."""
    plan = started.plan
    reading = plan.reading
    return {
        "recipe": str(started.recipe),
        "files": {name: str(path) for name, path in started.files.items()},
        "sizes": dict(plan.sizes),
        **_describe_reading(plan.table, reading),
        "others": [_describe_reading(plan.table, one) for one in reading.others],
        "unread": [*reading.unread],  # `list` is a module of this package
        "options": reading.options,
        "model": plan.model,
        "group": None if "group" in plan.split.given_up else reading.group_column,
        "set_column": plan.set_column,
        "labels": dict(plan.label_counts),
        "columns": [column.as_dict() for column in plan.table.columns.values()],
        "warnings": plan.warnings,
        "next": started.list_commands(),
    }


def describe_doubt(doubt: DoubtError) -> dict[str, Any]:
    """Describe the readings among which the user must choose, as --json prints them."""
    return {"error": str(doubt), "readings": [_describe_reading(*one) for one in doubt.choices]}


def _describe_reading(table: RawTable, reading: Reading) -> dict[str, Any]:
    from fivetune.start.choose import build_command

    return {
        "task": reading.task,
        "kind": reading.kind,
        "reason": reading.reason,
        "roles": {role: [*names] for role, names in reading.roles.items()},
        "evidence": [[*one] for one in reading.evidence],
        "points": reading.points,
        "doubts": [*reading.doubts],
        "command": build_command(table, reading),
    }


def print_start(started: Started) -> None:
    """Print what was read, the task with its reasons and the flags that change it, the sets, and the next commands."""
    from fivetune.start.choose import describe_reading, list_flags

    plan = started.plan
    reading = plan.reading
    _print_columns(started)
    # What was chosen, each with its reason and the flags that choose otherwise.
    kind = reading.task if reading.kind == reading.task else f"{reading.task} ({reading.kind})"
    fields: list[tuple[str, str]] = [("task", f"{kind}: {reading.reason}")]
    if reading.id_column:
        fields.append(("", f"id: {reading.id_column}"))
    texts = [name for name in reading.unread if plan.table.describe(name).has_text]
    rest = [name for name in reading.unread if name not in texts]
    for what, names in (("text that is not read", texts), ("not read", rest)):
        if names:
            fields.append(("", f"{what}: {', '.join(names[:MAX_COLUMNS])}"))
    for other in reading.others:
        fields.append(("", f"or {describe_reading(other)}: {shlex.join(list_flags(other))}"))
    flags = shlex.join(list_flags(reading))
    fields.append(("", f"these flags change it: {flags}"))
    fields.append(("model", f"{plan.model}: {plan.model_reason}; another one: --model NAME"))
    sizes = ", ".join(f"{size:,} {name}" for name, size in plan.sizes.items())
    how = plan.describe_given_sets()
    if not how:
        groups = f"in {plan.split.num_groups:,} groups of records with {plan.describe_relations()}"
        how = f"{groups}; another group: --column group=NAME or none"
    fields.append(("sets", f"{sizes}, {how}"))
    width = min(CHECK_WIDTH, shutil.get_terminal_size((CHECK_WIDTH, 24)).columns)
    for head, text in fields:
        print_text(
            textwrap.fill(
                text,
                width,
                initial_indent=f"{head:<8}",
                subsequent_indent=" " * 10,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    # The next commands are last, where the user looks.
    for warning in plan.warnings:
        print_warning(warning)
    print_text(f"recipe  {started.recipe}")
    print_text("\n".join(f"next    {words}" for words in started.list_commands()))


def _print_columns(started: Started) -> None:
    """Print the columns of the data; of many the first, and those that the task reads."""
    plan = started.plan
    table = plan.table
    num_columns = len(table.columns)
    read = {*plan.reading.inputs, *plan.reading.targets}
    rows: list[list[str]] = []
    for number, column in enumerate(table.columns.values(), start=1):
        # of many columns the last line is their number
        if num_columns > MAX_COLUMNS and number >= MAX_COLUMNS and column.name not in read:
            continue
        rows.append(
            [
                column.name,
                column.kind,
                f"{column.num_filled:,}",
                f"{column.num_distinct:,}",
                f"{column.mean_chars:.0f}",
                f"{column.max_chars:,}",
                textwrap.shorten(column.example, 40, placeholder=" ..."),
            ]
        )
    sample = f"; the columns of a sample of {table.num_records:,}" if table.num_read > table.num_records else ""
    print_text(f"{plan.source}: {table.num_read:,} records, {num_columns} columns{sample}")
    print_table(["column", "kind", "filled", "distinct", "mean chars", "longest", "first value"], rows)
    if num_columns > MAX_COLUMNS:
        print_text(f"... {num_columns - len(rows):,} others")


# --- jobs of a cluster ---


def add_plugin_options(parser: ArgumentParser, kind: str, *, title: str) -> None:
    """Add the options of all plugins of a kind as a group; an option that only some have names them."""
    from fivetune import plugins

    names = plugins.list_plugins(kind)
    group = parser.add_argument_group(title)
    for option, having in plugins.list_options(kind).items():
        field = plugins.load_plugin(kind, having[0]).model_fields[option]
        only = "" if having == names else f"{', '.join(having)}: "
        group.add_argument(
            f"--{option.replace('_', '-')}",
            dest=f"{kind}_{option}",
            metavar=option.upper(),
            action="append" if get_origin(field.annotation) is tuple else "store",
            help=(only + str(field.description)).replace("%", "%%"),
        )


def read_plugin_options(args: Namespace, kind: str) -> dict[str, Any]:
    """Read the options that were given for plugins of a kind."""
    prefix = f"{kind}_"
    found: dict[str, Any] = {}
    for name, value in vars(args).items():
        if name.startswith(prefix) and value is not None:
            found[name.removeprefix(prefix)] = value
    return found


def add_launcher_arguments(parser: ArgumentParser, *, required: bool) -> None:
    """Add --on and the options of all launchers."""
    from fivetune import plugins

    names = plugins.list_plugins("launchers")
    parser.add_argument("--on", choices=names, required=required, help="where to start: a scheduler or a cluster")
    add_plugin_options(parser, "launchers", title="options of the cluster (with --on)")


def read_launcher(args: Namespace) -> Launcher | None:
    """Read the launcher of a command line; None without --on. Raises ConfigError for an option without --on."""
    from fivetune.errors import ConfigError
    from fivetune.fleet.launchers import load_launcher

    given = read_plugin_options(args, "launchers")
    if args.on is not None:
        return load_launcher(args.on, given)
    if given:
        option, value = next(iter(given.items()))
        flag = f"--{option.replace('_', '-')} {value}"
        raise ConfigError(f"{flag}: is an option of a cluster. Add --on slurm, or omit it.")
    return None


def assign_nodes(
    launcher: Launcher, given: Mapping[str, Any], read: Callable[[Mapping[str, Any]], RunConfig]
) -> tuple[Launcher, dict[str, Any]]:
    """Place a run on nodes: returns the launcher with its number of GPUs, and all settings of the run.

    Several processes need a strategy that supports them: ddp, if the recipe names none.

    Args:
        given: dotted settings of the command line.
        read: reads the config of a recipe with such settings.

    Raises ConfigError if an option of the launcher contradicts a setting of the command line.
    """
    from fivetune.config.sections import STRATEGY_OF_SEVERAL
    from fivetune.errors import ConfigError

    counts = ("launch.nnodes", "launch.nproc")
    for option, key in zip(("nodes", "gpus"), counts, strict=True):
        asked = getattr(launcher, option)
        count = given.get(key)
        if count is not None and (type(count) is not int or count < 1):
            raise ConfigError(f"--{key} {count}: give a whole number, 1 or more.")
        if asked and count and asked != count:
            raise ConfigError(f"--{option} {asked}: contradicts --{key} {count}. Give one of them.")
    config = read({key: value for key, value in given.items() if key not in counts})
    nodes = launcher.nodes or given.get(counts[0], config.launch.nnodes)
    nproc = launcher.gpus or given.get(counts[1], config.launch.nproc)
    gpus = launcher.gpus
    if gpus is None and config.device != "cpu":
        gpus = nproc
    settings = dict(given)
    if nodes != config.launch.nnodes:
        settings["launch.nnodes"] = nodes
    if nproc != config.launch.nproc:
        settings["launch.nproc"] = nproc
    if nodes * nproc > 1 and not config.strategy.supports_multiple and "strategy.name" not in given:
        settings["strategy.name"] = STRATEGY_OF_SEVERAL
    return launcher.model_copy(update={"nodes": nodes, "gpus": gpus}), settings


def build_job(
    name: str,
    runs: Sequence[JobRun],
    folder: Path,
    *,
    nnodes: int = 1,
    nproc: int = 1,
    page: Sequence[str] = (),
    work: SharedWork | None = None,
    paths: Iterable[str | Path] = (),
) -> JobPlan:
    """Build the plan of a job that starts this FiveTune in this directory.

    Args:
        paths: files and folders that the job reads or writes.
    """
    from huggingface_hub.constants import HF_HOME

    from fivetune import __version__
    from fivetune.data.store.token_store import get_cache_folder
    from fivetune.fleet.launchers import JobPlan

    caches = {"HF_HOME": HF_HOME, "XDG_CACHE_HOME": str(get_cache_folder(None).parent)}
    return JobPlan(
        name=name,
        runs=tuple(runs),
        nnodes=nnodes,
        nproc=nproc,
        program=(sys.executable, "-m", "fivetune"),
        directory=Path.cwd(),
        folder=folder.resolve(),
        version=__version__,
        launch_id=uuid.uuid4().hex[:8],
        page=tuple(page),
        work=work,
        folders=_find_outer_folders([*paths, *caches.values()]),
        caches=caches,
    )


def _find_outer_folders(paths: Iterable[str | Path]) -> tuple[Path, ...]:
    """Find the folders of paths that are not in the working directory, each once, without folders in one another."""
    found = [Path.cwd()]
    for path in sorted({Path(path).expanduser().resolve() for path in paths}):
        # A file may not exist yet; a name of the hub has no folder.
        folder = path if path.is_dir() else path.parent
        if folder.is_dir() and not any(folder.is_relative_to(other) for other in found):
            found.append(folder)
    return tuple(found[1:])


def list_paths(config: RunConfig) -> list[str]:
    """List the files and folders of this machine that a run reads or writes."""
    from fivetune.training.sources import list_sources

    model = config.model
    found = [config.run.dir, model.path, model.config, model.tokenizer, config.data.cache_dir, *list_sources(config)]
    return [path for path in found if path and "://" not in path]


def launch_sweep(
    sweep: Sweep, launcher: Launcher, args: Namespace, *, page: Sequence[str] = (), flags: Sequence[str] = ()
) -> bool:
    """Submit the unfinished runs of a sweep and the job of its page; returns False if all are finished.

    The sweep's directory is written last before the submission, so that an error before it leaves nothing behind.

    Args:
        args: of a command with --on, --resume, --overwrite, --dry-run and --json.
        page: further words of the command that writes the page.
        flags: flags of `fivetune train`, in addition to the flags that continue a run.

    Raises ConfigError for several runs on a cluster that has no arrays, RunDirError if the directory is in use.
    """
    from fivetune.errors import ConfigError, RunDirError
    from fivetune.fleet.experiments.runs import RECIPES, list_unfinished, refuse_wrong_start, write_corpus, write_sweep
    from fivetune.fleet.launchers import JobRun, SubmissionError
    from fivetune.rundir import build_sibling_path, find_conflict

    if len(sweep.runs) > 1 and not launcher.supports_arrays:
        raise ConfigError(
            f"--on {args.on}: has no arrays, and {sweep.path} has {len(sweep.runs)} runs. Use --on slurm."
        )
    # Everything that can be refused is, before a file is written.
    refusal = ""
    try:
        refuse_wrong_start(sweep, resume=args.resume, overwrite=args.overwrite)
    except RunDirError as error:
        if not args.dry_run:
            raise
        refusal = str(error)
    # Finished runs are not submitted again.
    left = [(run, []) for run in sweep.runs] if args.overwrite else list_unfinished(sweep)
    if not left:
        return False
    runs: list[JobRun] = []
    for run, own in left:
        recipe = sweep.folder / RECIPES / f"{run.name}.yaml"
        runs.append(JobRun(run.name, run.config.run.dir, str(recipe), flags=(*own, *flags)))
    folder = build_sibling_path(str(sweep.folder), args.on)
    words = ["compare", str(sweep.folder), *page]
    configs = [run.config for run, _ in left]
    sizes = configs[0].launch
    paths: list[str] = [str(sweep.folder)]
    for config in configs:
        paths += list_paths(config)
    plan = build_job(sweep.folder.name, runs, folder, nnodes=sizes.nnodes, nproc=sizes.nproc, page=words, paths=paths)
    files = launcher.render(plan)
    # The nodes often have no network.
    if launcher.shares_files:
        write_corpus(sweep.corpus)
        fetch_inputs(configs, models=not args.dry_run)
    # A sweep that would be refused, or moved aside, stays as it is in a dry run.
    if not (args.dry_run and (refusal or (args.overwrite and find_conflict(sweep.folder)))):
        write_sweep(sweep, resume=args.resume, overwrite=args.overwrite)
    try:
        submit_job(launcher, plan, files, args, refusal)
    except SubmissionError as error:
        instead = " instead of --overwrite" if args.overwrite else ""
        raise SubmissionError(f"{error} Nothing was submitted; launch it again with --resume{instead}.") from None
    return True


def fetch_inputs(configs: Iterable[RunConfig], *, models: bool = True) -> None:
    """Download models to the hub's cache, and write or check the data files, before a node needs them."""
    from fivetune.model.load import find_source
    from fivetune.training.sources import check_sources

    distinct = {repr((config.model, config.data, config.task)): config for config in configs}
    for config in distinct.values():
        model = config.model
        check_sources(config)
        if models:
            find_source(model.path, config=model.config, init=model.init, revision=model.revision)


def format_settings(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Format dotted settings as the words of a command line.

    >>> format_settings({"launch.nnodes": 2, "strategy.name": "ddp"})
    ('--launch.nnodes', '2', '--strategy.name', 'ddp')
    """
    words: list[str] = []
    for key, value in settings.items():
        words += (f"--{key}", str(value))
    return tuple(words)


def submit_job(launcher: Launcher, plan: JobPlan, files: Mapping[str, str], args: Namespace, refusal: str = "") -> None:
    """Write the job's files, submit them, and print what to do next; with --dry-run print them instead.

    Args:
        args: of a command with --dry-run and --json.
        refusal: why the job would not be submitted now.
    """
    from fivetune.rundir import write_text

    for name, text in files.items():
        write_text(plan.folder / name, text)
    if args.dry_run:
        if args.json:
            print_json({"folder": str(plan.folder), "files": dict(files), "refused": refusal or None})
        else:
            print("\n".join(files.values()), end="")
        listed = ", ".join(str(plan.folder / name) for name in files)
        print(f"fivetune: written, not submitted: {listed}", file=sys.stderr)
        if refusal:
            print(f"fivetune: without --dry-run this is refused: {refusal}", file=sys.stderr)
        return
    job = launcher.submit(plan.folder)
    if args.json:
        facts: dict[str, Any] = {"job": job, "files": [str(plan.folder / name) for name in files]}
        facts["runs"] = {run.name: run.run_dir for run in plan.runs}
        if plan.work:
            facts["shards"] = [*plan.work.numbers]
        print_json(facts)
        return
    print_text(f"job     {job}: {plan.describe()}")
    for name in files:
        print_text(f"file    {plan.folder / name}")
    print_text(f"logs    {plan.folder}")
    for words in launcher.explain_next_steps(job):
        print_text(f"next    {words}")
    if launcher.shares_files and plan.runs:  # this machine sees the run's files
        folder = plan.runs[0].run_dir
        if len(plan.runs) > 1:
            folder = str(Path(folder).parent)
        print_text(f"next    {shlex.join(['fivetune', 'watch', folder])}")
