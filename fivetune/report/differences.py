"""What variants differ in: settings, machines, and the examples that one gets right and the other wrong.

In: a Comparison. Out: Tables and Examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import combinations, zip_longest

from fivetune.compare import Change, Changes, changes
from fivetune.compare.variants import seed_of
from fivetune.report.examples import shortened
from fivetune.report.provenance import machine_facts
from fivetune.report.scores import label
from fivetune.report.wording import UNKNOWN, fixed, grouped, plural, setting, whole
from fivetune.types import Comparison, Example, Run, Section, Table, Text, Variant
from fivetune.values import flat, number

OWN_KEYS = ("run.dir", "run.seed", "run.name", "report.title", "report.beside")
MAX_EXAMPLES = 900
MAX_PAIRS = 15  # any two of six variants
KINDS = ("fixed", "broken", "both wrong")

Pair = tuple[str, str]
"""Names of two variants."""


def settings_tables(comparison: Comparison) -> list[Table]:
    """The settings in which variants differ, a row per variant, and folded those that all of them share."""
    settings = [flat(variant.runs[0].config) if variant.runs else {} for variant in comparison.variants]
    values = [{key: setting(key, value) for key, value in table.items()} for table in settings]
    keys = dict.fromkeys(key for table in values for key in table)
    told = [table for table in values if table]
    differing = [key for key in keys if len({table.get(key) for table in told}) > 1 and key not in OWN_KEYS]
    first = [key for key in comparison.varied if key in differing]
    columns = [*first, *(key for key in differing if key not in first)]
    parts = []
    if columns:
        rows = [
            (variant.name, *(table.get(key, UNKNOWN) for key in columns))
            for variant, table in zip(comparison.variants, values, strict=True)
        ]
        caption = "The settings that differ between variants, the varied ones first; seeds and folders are left out."
        numbers = tuple(tuple(map(_as_number, row)) for row in rows)
        parts.append(Table(caption, ("variant", *columns), tuple(rows), values=numbers))
    shared = [(key, value) for key, value in (told[0] if told else {}).items() if key not in (*columns, *OWN_KEYS)]
    if shared:
        parts.append(Table(f"{plural(len(shared), 'setting')} that all variants share. (config.yaml)",
                           ("key", "value"), tuple(shared), folded=True))  # fmt: skip
    return parts


def _as_number(text: str) -> float | None:
    try:
        return number(float(text))
    except ValueError:
        return None


def machine_tables(variants: Sequence[Variant]) -> list[Table]:
    """Facts about the machine that differ between runs, and folded those that all runs share."""
    runs = [(variant.name, run) for variant in variants for run in variant.runs if run.machine]
    found = [dict(machine_facts(run.machine)) for _, run in runs]
    facts = dict.fromkeys(fact for table in found for fact in table)
    differing = [fact for fact in facts if len({table.get(fact) for table in found}) > 1]
    parts = []
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
        parts.append(Table("What all runs had in common. (machine.json)", ("fact", "value"), shared))
    return parts


def examples_section(comparison: Comparison) -> Section:
    """Which examples one variant gets right and another wrong: the baseline beside each, and any other two of a few."""
    found: dict[Pair, Changes] = {}
    for first, second in _pairs(comparison):
        before, after = _alike(first, second)
        if moves := changes(before, after, metric=comparison.metric):
            found[first.name, second.name] = moves
    if not found:
        return Section("Examples", ())
    most = max(4, min(60, MAX_EXAMPLES // (3 * len(found))))
    words = (
        "The best evaluations of one run of each of two variants, with the same seed where there is one. Of each two "
        f"and of each kind at most {most} examples are shown, drawn by chance."
    )
    drawn = [_examples(pair, moves, kind, most) for kind in KINDS for pair, moves in found.items()]
    shown = [one for row in zip_longest(*drawn) for one in row if one is not None]
    return Section("Examples", (_moves_table(found), Text("Single examples", "heading"), Text(words), *shown))


def _pairs(comparison: Comparison) -> list[tuple[Variant, Variant]]:
    """The baseline with every other variant; with few variants any two, the baseline first."""
    told = sorted((one for one in comparison.variants if one.runs), key=lambda one: one.name != comparison.baseline)
    pairs = list(combinations(told, 2))
    return pairs if len(pairs) <= MAX_PAIRS else pairs[: len(told) - 1]


def _alike(base: Variant, other: Variant) -> tuple[Run, Run]:
    """A run of each, of one seed if they have one in common."""
    by_seed = {seed_of(run): run for run in reversed(base.runs)}
    for run in other.runs:
        if (seed := seed_of(run)) in by_seed:
            return by_seed[seed], run
    return base.runs[0], other.runs[0]


def _moves_table(found: Mapping[Pair, Changes]) -> Table:
    rows, values = [], []
    for pair, moves in found.items():
        counts = [len(group) for group in (moves.fixed, moves.broken, moves.both_wrong, moves.both_right)]
        rows.append((*pair, *map(whole, counts), f"{counts[0] - counts[1]:+d}".replace("-", "\u2212")))
        values.append((None, None, *map(float, counts), float(counts[0] - counts[1])))
    header = ("first", "second", "fixed", "broken", "both wrong", "both right", "fixed less broken")
    caption = (
        "What became of each example: fixed are those that the first has wrong and the second right, broken the other "
        f"way round. Right is a {label(next(iter(found.values())).score)} of 1."
    )
    return Table(caption, header, tuple(rows), values=tuple(values))


def _examples(pair: Pair, moves: Changes, kind: str, most: int) -> list[Example]:
    """Some examples of a kind, drawn by their ids."""
    group: tuple[Change, ...] = getattr(moves, kind.replace(" ", "_"))
    return [
        Example(
            id=one.id,
            inputs=shortened(one.inputs),
            prediction=shortened(one.after),
            references=tuple(grouped(shortened(reference) for reference in one.references if reference)),
            verdict=kind,
            remark=f"{label(moves.score)} {fixed(one.score_before)}, then {fixed(one.score_after)}",
            tags={"compared": " \u2192 ".join(pair)},
            before=shortened(one.before),
        )
        for one in sorted(group, key=lambda one: sha256(one.id.encode()).digest())[:most]
    ]
