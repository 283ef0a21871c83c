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
from fivetune.reading.report.page.parts import Example, Section, Table, Text
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
MAX_EXAMPLES = 900
MAX_PAIRS = 15  # any two of six variants
KINDS = ("fixed", "broken", "both wrong")

Pair = tuple[str, str]
"""Names of two variants."""


def build_settings_tables(comparison: Comparison) -> list[Table]:
    """Build a table of the differing settings, a row per variant, and a folded table of the shared ones."""
    settings = [flatten_table(variant.runs[0].config) if variant.runs else {} for variant in comparison.variants]
    values = [{key: format_setting(key, value) for key, value in table.items()} for table in settings]
    keys = dict.fromkeys(key for table in values for key in table)
    told = [table for table in values if table]
    differing = [key for key in keys if len({table.get(key) for table in told}) > 1 and key not in OWN_KEYS]
    first = [key for key in comparison.varied if key in differing]
    columns = [*first, *(key for key in differing if key not in first)]
    parts: list[Table] = []
    if columns:
        rows = [
            (variant.name, *(table.get(key, UNKNOWN) for key in columns))
            for variant, table in zip(comparison.variants, values, strict=True)
        ]
        caption = "The settings that differ between variants, the varied ones first; seeds and folders are left out."
        numbers = tuple(tuple(map(_parse_number, row)) for row in rows)
        parts.append(Table(caption, ("variant", *columns), tuple(rows), values=numbers))
    shared = [(key, value) for key, value in (told[0] if told else {}).items() if key not in (*columns, *OWN_KEYS)]
    if shared:
        parts.append(
            Table(
                f"{format_plural(len(shared), 'setting')} that all variants share. (config.yaml)",
                ("key", "value"),
                tuple(shared),
                folded=True,
            )
        )
    return parts


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
    parts: list[Table] = []
    if differing:
        rows = tuple(
            (name, run.name, *(table.get(fact, UNKNOWN) for fact in differing))
            for (name, run), table in zip(runs, found, strict=True)
        )
        caption = "Facts about machine and software in which the runs differ. (machine.json)"
        none = tuple((None,) * len(row) for row in rows)
        parts.append(Table(caption, ("variant", "run", *differing), rows, values=none))
    shared = tuple((fact, found[0][fact]) for fact in facts if fact not in differing and fact in found[0])
    if shared:
        parts.append(Table("Facts that all runs share. (machine.json)", ("fact", "value"), shared))
    return parts


def build_changed_examples_section(comparison: Comparison) -> Section:
    """Build the section on examples that only one of two variants answers correctly; pairs with the baseline first."""
    found: dict[Pair, PredictionChanges] = {}
    for first, second in _list_variant_pairs(comparison):
        before, after = (read_best_predictions(run, comparison.metric) for run in _select_run_pair(first, second))
        if moves := compare_predictions(before, after, metric=comparison.metric):
            found[first.name, second.name] = moves
    if not found:
        return Section("Examples", ())
    most = max(4, min(60, MAX_EXAMPLES // (3 * len(found))))
    words = (
        "From the best evaluations of one run of each of two variants, with the same seed where there is one. At most "
        f"{most} randomly drawn examples are shown of each kind and each two variants."
    )
    drawn = [_sample_examples(pair, moves, kind, most) for kind in KINDS for pair, moves in found.items()]
    shown = [one for row in zip_longest(*drawn) for one in row if one is not None]
    return Section("Examples", (_build_changes_table(found), Text("Single examples", "heading"), Text(words), *shown))


def _list_variant_pairs(comparison: Comparison) -> list[tuple[Variant, Variant]]:
    """List the pairs of the baseline with every other variant; with few variants all pairs, the baseline first."""
    told = sorted((one for one in comparison.variants if one.runs), key=lambda one: one.name != comparison.baseline)
    pairs = list(combinations(told, 2))
    return pairs if len(pairs) <= MAX_PAIRS else pairs[: len(told) - 1]


def _select_run_pair(base: Variant, other: Variant) -> tuple[Run, Run]:
    """Select a run of each variant, with the same seed if they share one."""
    by_seed = {get_seed(run): run for run in reversed(base.runs)}
    for run in other.runs:
        if (seed := get_seed(run)) in by_seed:
            return by_seed[seed], run
    return base.runs[0], other.runs[0]


def _build_changes_table(found: Mapping[Pair, PredictionChanges]) -> Table:
    rows: list[tuple[str, ...]] = []
    values: list[tuple[float | None, ...]] = []
    for pair, moves in found.items():
        counts = [len(group) for group in (moves.fixed, moves.broken, moves.both_wrong, moves.both_right)]
        rows.append((*pair, *map(format_count, counts), f"{counts[0] - counts[1]:+d}".replace("-", "\u2212")))
        values.append((None, None, *map(float, counts), float(counts[0] - counts[1])))
    header = ("first", "second", "fixed", "broken", "both wrong", "both right", "fixed less broken")
    caption = (
        "Examples by outcome: fixed are those that the first variant answers wrongly and the second correctly, broken "
        f"the reverse. Correct means a {get_score_label(next(iter(found.values())).score)} of 1."
    )
    return Table(caption, header, tuple(rows), values=tuple(values))


def _sample_examples(pair: Pair, moves: PredictionChanges, kind: str, max_examples: int) -> list[Example]:
    """Sample examples of a kind, drawn by a hash of their ids."""
    group: tuple[ExampleChange, ...] = getattr(moves, kind.replace(" ", "_"))
    return [
        Example(
            id=one.id,
            inputs=truncate_text(one.inputs),
            prediction=truncate_text(one.after),
            references=show_gold_answers(one.references),
            verdict=kind,
            remark=f"{get_score_label(moves.score)} {format_decimal(one.score_before)}, then "
            f"{format_decimal(one.score_after)}",
            tags={"compared": " \u2192 ".join(pair)},
            before=truncate_text(one.before),
        )
        for one in sorted(group, key=lambda one: sha256(one.id.encode()).digest())[:max_examples]
    ]
