"""What variants reached, beside their baseline: measures as text, the tables of them, and what wins in sentences.

In: a Comparison. Out: sentences and Tables; what was not measured is "n/a".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fivetune.compare import MEASURES, Kind
from fivetune.compare.variants import settings_of
from fivetune.report.scores import label
from fivetune.report.wording import UNKNOWN, change, duration, fixed, percent, plural, setting, short, size
from fivetune.types import Comparison, Measure, Table, Variant
from fivetune.values import number

SCORE, LAST, SPEED = "score_best", "score_last", "examples_per_second"
COSTS = ("seconds", "energy_joules", "cost")
MAIN = (SCORE, LAST, "loss_best", "seconds", "seconds_to_score", SPEED, *COSTS[1:])
MAX_SETTINGS = 3  # varied keys that still have a column of their own beside the figures
NONE = Measure(None)

WORDS: dict[str, Callable[[float], str]] = {
    "score": fixed,
    "loss": lambda value: fixed(value, 3),
    "duration": lambda value: duration(value) if value >= 60 else f"{short(value)} s",
    "bytes": size,
    "share": percent,
    "celsius": lambda value: f"{fixed(value, 0)} \u00b0C",
    "watts": lambda value: f"{short(value)} W",
    "joules": lambda value: f"{short(value)} J" if value < 1e4 else f"{short(value / 1e3)} kJ",
}
MOVES: dict[str, Callable[[float], str]] = {
    "loss": lambda value: change(value, 3),
    "share": lambda value: f"{change(100 * value, 1)} points",
    "celsius": lambda value: f"{change(value, 0)} \u00b0C",
}


def measure(variant: Variant, name: str) -> Measure:
    return variant.measures.get(name, NONE)


def worded(kind: Kind, value: float | None) -> str:
    """A measure's value with its unit."""
    return UNKNOWN if value is None else WORDS.get(kind.kind, short)(value)


def moved(kind: Kind, value: float | None) -> str:
    """A difference to the baseline with its sign, or how many times the baseline's value it is."""
    if value is None:
        return UNKNOWN
    return MOVES.get(kind.kind, change)(value) if kind.compared == "minus" else f"{fixed(value)} x"


def ranged(tell: Callable[[Kind, float | None], str], kind: Kind, one: Measure) -> str:
    """A value as `tell` words it, and in a second line its range where there is one."""
    low, high = tell(kind, one.low), tell(kind, one.high)
    known = one.value is not None and one.low is not None and one.high is not None
    return f"{tell(kind, one.value)}\n{low} to {high}" if known and low != high else tell(kind, one.value)


def certain(kind: Kind, one: Measure) -> bool | None:
    """Whether the range of a difference leaves out "no difference"; None where there is no range."""
    if one.low is None or one.high is None:
        return None
    nothing = 0.0 if kind.compared == "minus" else 1.0
    return not one.low <= nothing <= one.high


def heading(name: str, metric: str) -> str:
    """A measure's name; scores are called by their metric."""
    kind = MEASURES[name]
    return kind.label.replace("score", label(metric)) if kind.kind == "score" else kind.label


def _present(tables: Iterable[Mapping[str, Measure]], *, main: bool) -> list[str]:
    """The main measures, or the others, that some of the tables know, in their usual order."""
    known = {name for table in tables for name, one in table.items() if one.value is not None}
    return [name for name in MEASURES if name in known and (name in MAIN) == main]


def variants_tables(comparison: Comparison) -> list[Table]:
    """Every variant with its settings and what was measured, and folded the less asked-for measures."""
    tables = [variant.measures for variant in comparison.variants]
    first, rest = (_present(tables, main=main) for main in (True, False))
    caption = (
        "Every variant over its runs: of scores and losses the mean with its 95 % interval, of the rest the median "
        "with least and most. A click on a column's name sorts by it."
    )
    more = "The other measures of every variant."
    return [_variants_table(comparison, first, caption), _variants_table(comparison, rest, more, folded=True)]


def _variants_table(comparison: Comparison, names: Sequence[str], caption: str, *, folded: bool = False) -> Table:
    keys = () if folded or len(comparison.varied) > MAX_SETTINGS else comparison.varied
    rows, values = [], []
    for variant in comparison.variants:
        resolved = settings_of(variant.runs[0]) if variant.runs else {}
        changed = [variant.settings.get(key, resolved.get(key, UNKNOWN)) for key in keys]
        told = [setting(key, value) for key, value in zip(keys, changed, strict=True)]
        found = [measure(variant, name) for name in names]
        cells = [ranged(worded, MEASURES[name], one) for name, one in zip(names, found, strict=True)]
        rows.append((_marked(comparison, variant), *told, str(len(variant.runs)), *cells))
        values.append((None, *map(number, changed), float(len(variant.runs)), *(one.value for one in found)))
    columns = (*keys, "runs", *(heading(name, comparison.metric) for name in names))
    return Table(caption, ("variant", *columns), tuple(rows), folded=folded, values=tuple(values))


def _marked(comparison: Comparison, variant: Variant) -> str:
    failed = f"{plural(len(variant.failures), 'run')} missing" if variant.failures else ""
    marks = (
        "baseline" if variant.name == comparison.baseline else "",
        "Pareto front" if variant.pareto else "",
        failed,
    )
    remark = ", ".join(filter(None, marks))
    return f"{variant.name}\n{remark}" if remark else variant.name


def against_tables(comparison: Comparison) -> list[Table]:
    """Every variant beside the baseline: differences or ratios, and folded those of the less asked-for measures."""
    others = [variant for variant in comparison.variants if variant.against]
    first, rest = (_present([variant.against for variant in others], main=main) for main in (True, False))
    caption = (
        f"Against the baseline {comparison.baseline}: scores and losses as differences, seed by seed, the rest as so "
        "many times the baseline's. A range that holds 0 or 1.00 x may be no difference at all."
    )
    more = "The other measures against the baseline; shares as differences in per cent of the whole."
    tables = [_against_table(comparison, others, first, caption)] if first else []
    return [*tables, *([_against_table(comparison, others, rest, more, folded=True)] if rest else [])]


def _against_table(
    comparison: Comparison, others: Sequence[Variant], names: Sequence[str], caption: str, *, folded: bool = False
) -> Table:
    paired = not folded and any(variant.over_examples for variant in others)
    rows, values = [], []
    for variant in others:
        found = [variant.against.get(name, NONE) for name in names]
        cells = [ranged(moved, MEASURES[name], one) for name, one in zip(names, found, strict=True)]
        rows.append((variant.name, *([_paired(variant)] if paired else ()), *cells))
        over = [(variant.over_examples or NONE).value] if paired else ()
        values.append((None, *over, *(one.value for one in found)))
    first = [f"{heading(SCORE, comparison.metric)}, by example"] if paired else []
    columns = (*first, *(heading(name, comparison.metric) for name in names))
    return Table(caption, ("variant", *columns), tuple(rows), folded=folded, values=tuple(values))


def _paired(variant: Variant) -> str:
    """The difference over examples, its interval and how likely chance alone makes one as large."""
    one = variant.over_examples or NONE
    chance = "" if one.p_value is None else f", p {fixed(one.p_value, 3)}"
    return ranged(moved, MEASURES[SCORE], one) + chance


# --- sentences ---


def quoted(variant: Variant) -> str:
    """A variant's name in a sentence: it may hold spaces and commas."""
    return f"\N{LEFT DOUBLE QUOTATION MARK}{variant.name}\N{RIGHT DOUBLE QUOTATION MARK}"


def outcome(comparison: Comparison) -> list[str]:
    """What was compared and what wins, with intervals, in a few sentences."""
    variants = comparison.variants
    runs, failed = sum(len(one.runs) for one in variants), sum(len(one.failures) for one in variants)
    keys = ", ".join(comparison.varied) or "nothing"
    sentences = [f"{plural(len(variants), 'variant')} in {plural(runs, 'run')} were compared; varied: {keys}."]
    if failed:
        sentences.append(f"{plural(failed, 'run')} did not finish and {'is' if failed == 1 else 'are'} left out.")
    return [*sentences, *_best(comparison), *_fastest(comparison), *_front(variants)]


def _ranked(variants: Sequence[Variant], name: str, *, higher: bool) -> list[Variant]:
    """The variants that know a measure, the best first; of equal ones the first."""
    found = [variant for variant in variants if measure(variant, name).value is not None]
    return sorted(found, key=lambda variant: (-1 if higher else 1) * (measure(variant, name).value or 0.0))


def _best(comparison: Comparison) -> list[str]:
    ranked = _ranked(comparison.variants, SCORE, higher=comparison.higher_is_better)
    if not ranked:
        return ["No variant has a score, so nothing is known about quality."]
    best, kind, name = ranked[0], MEASURES[SCORE], label(comparison.metric)
    reached = _inline(ranged(worded, kind, measure(best, SCORE)))
    if best.name == comparison.baseline:
        return [f"No variant has a better {name} than the baseline {quoted(best)}: {reached}."]
    told = f"{quoted(best)} has the best {name}: {reached}"
    gap = _gap(best)
    if gap.value is None:
        return [f"{told}."]
    over = {"seeds": " over seeds", "examples": " over the examples"}.get(gap.spread, "")
    doubt = {
        True: f"that is more than chance{over} explains",
        False: f"that may be chance, since the interval{over} holds 0",
        None: "there are too few runs to tell that from chance",
    }[certain(kind, gap)]
    return [f"{told}, {_inline(ranged(moved, kind, gap))} against the baseline; {doubt}."]


def _gap(variant: Variant) -> Measure:
    """The difference to the baseline's score with the interval that is known: over seeds, else over examples."""
    seeds = variant.against.get(SCORE, NONE)
    return seeds if seeds.low is not None else variant.over_examples or seeds


def _fastest(comparison: Comparison) -> list[str]:
    ranked = _ranked(comparison.variants, SPEED, higher=True)
    if len(ranked) < 2:
        return []
    first = ranked[0]
    reached = f"{worded(MEASURES[SPEED], measure(first, SPEED).value)} examples per second"
    if first.name == comparison.baseline:
        return [f"The baseline is also the fastest: {reached}."]
    ratio = first.against.get(SPEED, NONE)
    told = _inline(ranged(moved, MEASURES[SPEED], ratio)).replace(" x", "")
    times = "" if ratio.value is None else f", {told} times the baseline's"
    return [f"{quoted(first)} is the fastest: {reached}{times}."]


def _front(variants: Sequence[Variant]) -> list[str]:
    names = [quoted(variant) for variant in variants if variant.pareto]
    if not names or len(names) == len(variants):
        return []
    return [f"Of score and time together nothing beats {', '.join(names)}."]


def _inline(text: str) -> str:
    """Value and range in one line: 93.4 (92.1 to 94.5)."""
    value, _, edges = text.partition("\n")
    return f"{value} ({edges})" if edges else value
