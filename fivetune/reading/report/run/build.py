"""The report page of a run: its sections, in the order of a reader's questions.

In: a Run, in which any value may be missing. Out: a Page of printable parts; the templates calculate nothing. A
missing value is printed as "n/a", or as a sentence with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fivetune.config.paths import find_typed_path
from fivetune.errors import FiveTuneError
from fivetune.reading.diagnosis.rules import diagnose_run
from fivetune.reading.report.page.parts import Page, Text, build_section, collect_quiet_sections
from fivetune.reading.report.page.render import render_html
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_plural,
)
from fivetune.reading.report.run.confidence import build_confidence_section
from fivetune.reading.report.run.data import iter_data_parts
from fivetune.reading.report.run.examples import build_run_examples_section
from fivetune.reading.report.run.learning import iter_learning_parts
from fivetune.reading.report.run.load_charts import build_run_load_section
from fivetune.reading.report.run.outcome import build_figures_section, iter_verdict_parts
from fivetune.reading.report.run.problems import build_evidence_section, list_problems
from fivetune.reading.report.run.range_test import build_range_test_sections
from fivetune.reading.report.run.scores import (
    choose_best_eval,
    find_baseline_eval,
    find_line_score_key,
    list_score_keys,
)
from fivetune.reading.report.run.settings import (
    build_run_definitions_section,
    build_settings_section,
    describe_run,
    iter_machine_parts,
    name_run_folder,
)
from fivetune.reading.report.run.slices import build_labels_section, build_slices_section
from fivetune.reading.report.run.speed import build_step_time_section, iter_speed_parts
from fivetune.reading.report.run.trace import build_trace_section
from fivetune.rundir import read_run, write_text
from fivetune.rundir.figures import select_evals_by_step
from fivetune.rundir.records import Run
from fivetune.values import get_nested

STATE_KINDS = {"finished": "good", "interrupted": "warning", "failed": "bad"}  # any other: a note


def build_page(run: Run, *, reference_runs: Sequence[Run] = (), notes: Sequence[str] = ()) -> Page:
    """Build the report page of one run.

    Args:
        reference_runs: other runs, whose best scores serve as baselines.
        notes: problems found while reading, listed among the others.
    """
    best = choose_best_eval(run)
    lines = run.read_predictions(best)
    run.read_predictions(find_baseline_eval(run))  # before the problems are listed, so that they name its damage
    verdicts = diagnose_run(run)
    problems = list_problems(run, verdicts, reference_runs, notes)
    key = find_line_score_key(run, lines)
    is_bad = any(problem.kind == "bad" for problem in problems)
    state, kind = run.status.state, STATE_KINDS.get(run.status.state, "note")
    badges = [Text(state or UNKNOWN, "note" if is_bad and kind == "good" else kind)]
    if any(one.rule == "diverged" for one in verdicts):
        badges.append(Text("diverged", "bad"))
    if run.status.num_resumes:
        badges.append(Text(f"resumed {format_plural(run.status.num_resumes, 'time')}", "note"))
    if problems:
        badges.append(Text(format_plural(len(problems), "problem"), "bad" if is_bad else "warning"))
    else:
        badges.append(Text("no problems", "good"))
    sections = (
        build_section("Verdict", iter_verdict_parts(run, reference_runs, verdicts, problems)),
        build_figures_section(run),
        build_evidence_section(run, verdicts),
        build_section("Learning", iter_learning_parts(run, reference_runs)),
        build_section("Speed", iter_speed_parts(run)),
        build_trace_section(run.trace),
        build_step_time_section(run),
        build_run_load_section(run),
        *build_range_test_sections(run.range_test),
        build_section("Data", iter_data_parts(run)),
        build_confidence_section(
            lines, key, record=best, applied=run.temperature, kept=run.abstention, folder=name_run_folder(run)
        ),
        build_slices_section(lines, key),
        build_labels_section(lines),
        build_run_examples_section(run, lines),
        build_settings_section(run),
        build_section("Reproduce", iter_machine_parts(run)),
        build_run_definitions_section(list_score_keys(select_evals_by_step(run.evals))),
    )
    return Page(
        title=str(get_nested(run.config, "report", "title") or run.name),
        sections=collect_quiet_sections(sections),
        subtitle=describe_run(run),
        badges=tuple(badges),
    )


def write_report(
    folder: str | Path, *, output: str | Path | None = None, on_damage: Callable[[str], object] = lambda text: None
) -> Path:
    """Build report.html of a run directory and write it atomically.

    Args:
        folder: the run directory.
        output: path of the file; default: report.html in the run directory.
        on_damage: called with a sentence for each damaged file of the run; the page lists them too.

    Returns the file's path. Raises RunDirError for another folder, or if the file cannot be written.

    >>> print(write_report("runs/tickets", output="page.html"))
    page.html
    """
    folder = Path(folder)
    run, _, page = read_page(folder)
    path = Path(output) if output else folder / "report.html"
    write_text(path, render_html(page))
    for text in run.damage:
        on_damage(text)
    return path


def read_page(folder: Path) -> tuple[Run, list[Run], Page]:
    """Read a run directory, and the runs of `report.beside`; returns both with the page. Raises RunDirError."""
    run = read_run(folder)
    beside, notes = read_reference_runs(folder, run)
    return run, beside, build_page(run, reference_runs=beside, notes=notes)


def read_reference_runs(folder: Path, run: Run) -> tuple[list[Run], list[str]]:
    """Read the runs of `report.beside`; return them and a note for each unreadable one.

    A relative path is tried from the working directory, from that of the run, from the run, and beside the run, so
    that a moved folder of runs still works.
    """
    found: list[Run] = []
    notes: list[str] = []
    for name in get_nested(run.config, "report", "beside") or ():
        places = (Path(find_typed_path(name, folder)), folder / name, folder.resolve().parent / Path(name).name)
        place = next((place for place in places if place.is_dir()), places[0])
        try:
            found.append(read_run(place))
        except FiveTuneError as error:
            notes.append(f"report.beside: {name} is left out. {error}")
    return found, notes
