"""Differences between variants: settings, machines, and examples that only one of two variants answers correctly.

In: a Comparison. Out: Tables and Examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import combinations, zip_longest

from fivetune.reading.compare import ExampleChange, PredictionChanges, compare_predictions
from fivetune.reading.compare.changes import read_best_predictions
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.reading.compare.variants import get_seed
from fivetune.reading.report.page.parts import (
    Cell,
    Example,
    Part,
    Section,
    Table,
    Text,
    build_section,
    build_sortable_table,
)
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_count,
    format_decimal,
    format_plural,
    format_setting,
)
from fivetune.reading.report.run.examples import show_gold_answers, truncate_text
from fivetune.reading.report.run.scores import get_score_label
from fivetune.reading.report.run.settings import format_machine_facts
from fivetune.rundir.records import MachineRecord, Run
from fivetune.values import as_finite_number, flatten_table

OWN_KEYS = ("run.dir", "run.seed", "run.name", "report.title", "report.beside")
MAX_EXAMPLES = 300
MAX_PAIRS = 15  # any two of six variants


def build_settings_tables(comparison: Comparison) -> list[Table]:
    """Build a table of the differing settings, a row per variant, and a folded table of the shared ones."""
    values: list[dict[str, str]] = []
    for variant in comparison.variants:
        settings = flatten_table(variant.runs[0].config) if variant.runs else {}
        values.append({key: format_setting(key, value) for key, value in settings.items()})
    told = [table for table in values if table]
    differing, shared = _divide_keys(told)
    varied = comparison.varied
    differing = [key for key in differing if key not in OWN_KEYS]
    differing.sort(key=lambda key: varied.index(key) if key in varied else len(varied))
    tables: list[Table] = []
    if differing:
        rows: list[Sequence[Cell]] = []
        for variant, table in zip(comparison.variants, values, strict=True):
            texts = [variant.name, *(table.get(key, UNKNOWN) for key in differing)]
            rows.append([(text, _parse_number(text)) for text in texts])
        caption = "The settings that differ between variants, the varied ones first; seeds and folders are left out."
        tables.append(build_sortable_table(caption, ("variant", *differing), rows))
    pairs = [(key, told[0][key]) for key in shared if key not in OWN_KEYS]
    if pairs:
        caption = f"{format_plural(len(pairs), 'setting')} that all variants share. (config.yaml)"
        tables.append(Table(caption, ("key", "value"), pairs, folded=True))
    return tables


def _divide_keys(tables: Sequence[Mapping[str, str]]) -> tuple[list[str], list[str]]:
    """Return the keys in which tables differ, and the keys that all have with one value, in their order."""
    keys: dict[str, None] = {}
    for table in tables:
        keys |= dict.fromkeys(table)
    differing: list[str] = []
    shared: list[str] = []
    for key in keys:
        values = {table.get(key) for table in tables}
        if len(values) > 1:
            differing.append(key)
        else:
            shared.append(key)
    return differing, shared


def _parse_number(text: str) -> float | None:
    try:
        return as_finite_number(float(text))
    except ValueError:
        return None


def build_machine_tables(variants: Sequence[Variant]) -> list[Table]:
    """Build tables of the machine facts that differ between runs, and of the facts that all runs share."""
    runs: list[tuple[str, str]] = []  # names of the variant and of the run
    found: list[dict[str, str]] = []
    for variant in variants:
        for run in variant.runs:
            if run.machine != MachineRecord():
                runs.append((variant.name, run.name))
                found.append(dict(format_machine_facts(run.machine)))
    differing, shared = _divide_keys(found)
    tables: list[Table] = []
    if differing:
        rows: list[Sequence[Cell]] = []
        for names, table in zip(runs, found, strict=True):
            rows.append([*names, *(table.get(fact, UNKNOWN) for fact in differing)])
        caption = "Facts about machine and software in which the runs differ. (machine.json)"
        tables.append(build_sortable_table(caption, ("variant", "run", *differing), rows))
    if shared:
        pairs = [(fact, found[0][fact]) for fact in shared]
        tables.append(Table("Facts that all runs share. (machine.json)", ("fact", "value"), pairs))
    return tables


def build_changed_examples_section(comparison: Comparison) -> Section:
    """Build the section on examples that only one of two variants answers correctly; pairs with the baseline first."""
    trained = [variant for variant in comparison.variants if variant.runs]
    ordered = sorted(trained, key=lambda variant: variant.name != comparison.baseline)
    pairs = list(combinations(ordered, 2))
    if len(pairs) > MAX_PAIRS:
        pairs = pairs[: len(ordered) - 1]  # the baseline with every other variant
    found: dict[tuple[str, str], PredictionChanges] = {}
    for first, second in pairs:
        earlier, later = _choose_pair(first.runs, second.runs)
        before = read_best_predictions(earlier, comparison.metric)
        after = read_best_predictions(later, comparison.metric)
        moves = compare_predictions(before, after, metric=comparison.metric)
        if moves:
            found[first.name, second.name] = moves
    if not found:
        return build_section("Examples")
    rows: list[Sequence[Cell]] = []
    for names, moves in found.items():
        cells: list[Cell] = [*names]
        for group in (moves.fixed, moves.broken, moves.both_wrong, moves.both_right):
            cells.append((format_count(len(group)), float(len(group))))
        gain = len(moves.fixed) - len(moves.broken)
        cells.append((f"{gain:+d}".replace("-", "\u2212"), float(gain)))
        rows.append(cells)
    header = ("first", "second", "fixed", "broken", "both wrong", "both right", "fixed less broken")
    caption = (
        "Examples by outcome: fixed are those that the first variant answers wrongly and the second correctly, broken "
        f"the reverse. Correct means a {get_score_label(next(iter(found.values())).score)} of 1."
    )
    # Few pairs have many examples each, many pairs few: the page stays small enough to open.
    most = max(2, min(30, MAX_EXAMPLES // (3 * len(found))))
    words = (
        "From the best evaluations of one run of each of two variants, with the same seed where there is one. At most "
        f"{most} randomly drawn examples are shown of each kind and each two variants."
    )
    drawn: list[list[Example]] = []
    for kind in ("fixed", "broken", "both wrong"):
        for names, moves in found.items():
            group = {"fixed": moves.fixed, "broken": moves.broken, "both wrong": moves.both_wrong}[kind]
            # The hash of an id is a random order that does not change.
            chosen = sorted(group, key=lambda one: sha256(one.id.encode()).digest())[:most]
            drawn.append([_build_example(one, names, kind, moves.score) for one in chosen])
    # One example of each kind and pair, then the next of each.
    mixed: list[Part] = []
    for row in zip_longest(*drawn):
        mixed += [part for part in row if part is not None]
    return build_section(
        "Examples",
        build_sortable_table(caption, header, rows),
        Text("Single examples", "heading"),
        Text(words),
        mixed,
    )


def _choose_pair(ours: Sequence[Run], theirs: Sequence[Run]) -> tuple[Run, Run]:
    """Choose a run of each of two variants, with the same seed if there is one."""
    for other in theirs:
        for run in ours:
            if get_seed(run) == get_seed(other):
                return run, other
    return ours[0], theirs[0]


def _build_example(one: ExampleChange, names: tuple[str, str], kind: str, score: str) -> Example:
    return Example(
        id=one.id,
        inputs=truncate_text(one.inputs),
        prediction=truncate_text(one.after),
        references=show_gold_answers(one.references),
        verdict=kind,
        remark=f"{get_score_label(score)} {format_decimal(one.score_before)}, then {format_decimal(one.score_after)}",
        tags={"compared": " \u2192 ".join(names)},
        before=truncate_text(one.before),
    )
