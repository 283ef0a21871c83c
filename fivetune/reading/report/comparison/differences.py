"""Differences between variants: settings, machines, and examples that only one of two variants answers correctly.

In: a Comparison. Out: Tables and Examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import combinations, zip_longest

from fivetune.reading.compare import ExampleChange, PredictionChanges, compare_predictions
from fivetune.reading.compare.changes import read_best_predictions
from fivetune.reading.compare.records import Comparison, Variant
from fivetune.reading.compare.variants import get_seed
from fivetune.reading.report.page.parts import Cell, Example, Section, Table, Text, build_section, build_sortable_table
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
from fivetune.rundir.records import MachineRecord
from fivetune.values import as_finite_number, flatten_table

OWN_KEYS = ("run.dir", "run.seed", "run.name", "report.title", "report.beside")
MAX_EXAMPLES = 900
MAX_PAIRS = 15  # any two of six variants


def build_settings_tables(comparison: Comparison) -> list[Table]:
    """Build a table of the differing settings, a row per variant, and a folded table of the shared ones."""
    tables: list[Table] = []
    values: list[dict[str, str]] = []
    for variant in comparison.variants:
        settings = flatten_table(variant.runs[0].config) if variant.runs else {}
        values.append({key: format_setting(key, value) for key, value in settings.items()})
    told = [table for table in values if table]
    keys = [key for key in dict.fromkeys(key for table in told for key in table) if key not in OWN_KEYS]
    differing = [key for key in keys if len({table.get(key) for table in told}) > 1]
    differing.sort(key=lambda key: comparison.varied.index(key) if key in comparison.varied else len(keys))
    if differing:
        rows: list[Sequence[Cell]] = []
        for variant, table in zip(comparison.variants, values, strict=True):
            texts = [table.get(key, UNKNOWN) for key in differing]
            rows.append([(text, _parse_number(text)) for text in (variant.name, *texts)])
        caption = "The settings that differ between variants, the varied ones first; seeds and folders are left out."
        tables.append(build_sortable_table(caption, ("variant", *differing), rows))
    shared = [(key, told[0][key]) for key in keys if key not in differing]
    if shared:
        caption = f"{format_plural(len(shared), 'setting')} that all variants share. (config.yaml)"
        tables.append(Table(caption, ("key", "value"), shared, folded=True))
    return tables


def _parse_number(text: str) -> float | None:
    try:
        return as_finite_number(float(text))
    except ValueError:
        return None


def build_machine_tables(variants: Sequence[Variant]) -> list[Table]:
    """Build tables of the machine facts that differ between runs, and of those that all runs share."""
    runs = [(variant.name, run) for variant in variants for run in variant.runs if run.machine != MachineRecord()]
    found = [dict(format_machine_facts(run.machine)) for _, run in runs]
    facts = dict.fromkeys(fact for table in found for fact in table)
    differing = [fact for fact in facts if len({table.get(fact) for table in found}) > 1]
    tables: list[Table] = []
    if differing:
        rows = [
            (name, run.name, *(table.get(fact, UNKNOWN) for fact in differing))
            for (name, run), table in zip(runs, found, strict=True)
        ]
        caption = "Facts about machine and software in which the runs differ. (machine.json)"
        tables.append(build_sortable_table(caption, ("variant", "run", *differing), rows))
    shared = [(fact, found[0][fact]) for fact in facts if fact not in differing and fact in found[0]]
    if shared:
        tables.append(Table("Facts that all runs share. (machine.json)", ("fact", "value"), shared))
    return tables


def build_changed_examples_section(comparison: Comparison) -> Section:
    """Build the section on examples that only one of two variants answers correctly; pairs with the baseline first."""
    ordered = sorted((one for one in comparison.variants if one.runs), key=lambda one: one.name != comparison.baseline)
    pairs = list(combinations(ordered, 2))
    if len(pairs) > MAX_PAIRS:
        pairs = pairs[: len(ordered) - 1]  # the baseline with every other variant
    found: dict[tuple[str, str], PredictionChanges] = {}
    for first, second in pairs:
        # A run of each variant, with the same seed if they share one.
        by_seed = {get_seed(run): run for run in reversed(first.runs)}
        shared = [(by_seed[seed], run) for run in second.runs if (seed := get_seed(run)) in by_seed]
        runs = shared[0] if shared else (first.runs[0], second.runs[0])
        before, after = (read_best_predictions(run, comparison.metric) for run in runs)
        if moves := compare_predictions(before, after, metric=comparison.metric):
            found[first.name, second.name] = moves
    if not found:
        return build_section("Examples")
    rows: list[Sequence[Cell]] = []
    for names, moves in found.items():
        groups = (moves.fixed, moves.broken, moves.both_wrong, moves.both_right)
        counts = [(format_count(len(group)), float(len(group))) for group in groups]
        gain = len(moves.fixed) - len(moves.broken)
        rows.append((*names, *counts, (f"{gain:+d}".replace("-", "\u2212"), float(gain))))
    header = ("first", "second", "fixed", "broken", "both wrong", "both right", "fixed less broken")
    caption = (
        "Examples by outcome: fixed are those that the first variant answers wrongly and the second correctly, broken "
        f"the reverse. Correct means a {get_score_label(next(iter(found.values())).score)} of 1."
    )
    # Few pairs have many examples each, many pairs few: the page stays small enough to open.
    most = max(4, min(60, MAX_EXAMPLES // (3 * len(found))))
    words = (
        "From the best evaluations of one run of each of two variants, with the same seed where there is one. At most "
        f"{most} randomly drawn examples are shown of each kind and each two variants."
    )
    drawn: list[list[Example]] = []
    for i, kind in enumerate(("fixed", "broken", "both wrong")):
        for names, moves in found.items():
            group = (moves.fixed, moves.broken, moves.both_wrong)[i]
            chosen = sorted(group, key=lambda one: sha256(one.id.encode()).digest())[:most]
            drawn.append([_build_example(one, names, kind, moves.score) for one in chosen])
    return build_section(
        "Examples",
        build_sortable_table(caption, header, rows),
        Text("Single examples", "heading"),
        Text(words),
        *(part for row in zip_longest(*drawn) for part in row),
    )


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
