"""Measures of variants and their differences to the baseline as text and tables, and the outcome in sentences.

In: a Comparison. Out: sentences and Tables, with "n/a" for missing measures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fivetune.reading.compare import MEASURES, MeasureSpec
from fivetune.reading.compare.records import Comparison, Measure, Variant
from fivetune.reading.compare.variants import select_work_settings
from fivetune.reading.report.page.parts import Cell, Measured, Results, Table, build_sortable_table
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_bytes,
    format_decimal,
    format_duration,
    format_percent,
    format_plural,
    format_setting,
    format_signed,
    format_significant,
)
from fivetune.reading.report.run.scores import get_score_label
from fivetune.scores.analysis.bootstrap import format_p_value
from fivetune.values import as_finite_number

SCORE, LAST, LOSS, SPEED = "score_best", "score_last", "loss_best", "examples_per_second"
COSTS = ("seconds", "energy_joules", "cost")
MAIN_MEASURES = (SCORE, LAST, LOSS, "seconds", "seconds_to_score", SPEED, *COSTS[1:])
MAX_SETTINGS = 3  # maximum number of varied keys with their own column
MAX_WARNINGS = 3  # of a table for a paper
MAX_LEFT_OUT = 3  # variants whose reason the outcome tells
UNKNOWN_MEASURE = Measure(None)
CONSTANTS = {"abstention": "learnt to give no answer", "majority_label": "learnt one label"}

MEASURE_FORMATTERS: dict[str, Callable[[float], str]] = {
    "score": format_decimal,
    "loss": lambda value: format_decimal(value, 3),
    "duration": lambda value: format_duration(value) if value >= 60 else f"{format_significant(value)} s",
    "bytes": format_bytes,
    "share": format_percent,
    "celsius": lambda value: f"{format_decimal(value, 0)} \u00b0C",
    "watts": lambda value: f"{format_significant(value)} W",
    "joules": lambda value: (
        f"{format_significant(value)} J" if value < 1e4 else f"{format_significant(value / 1e3)} kJ"
    ),
}
DIFFERENCE_FORMATTERS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: format_signed(value, 3),
    "share": lambda value: f"{format_signed(100 * value, 1)} points",
    "celsius": lambda value: f"{format_signed(value, 0)} \u00b0C",
}


def get_measure(variant: Variant, name: str) -> Measure:
    return variant.measures.get(name, UNKNOWN_MEASURE)


def format_measure(kind: MeasureSpec, value: float | None) -> str:
    """Format a measure's value with its unit."""
    return UNKNOWN if value is None else MEASURE_FORMATTERS.get(kind.kind, format_significant)(value)


def format_measure_difference(kind: MeasureSpec, value: float | None) -> str:
    """Format a difference to the baseline with its sign, or a ratio as a multiple of the baseline's value."""
    if value is None:
        return UNKNOWN
    if kind.compared == "ratio":
        return f"{format_decimal(value)} x"
    return DIFFERENCE_FORMATTERS.get(kind.kind, format_signed)(value)


def _format_range(format_value: Callable[[MeasureSpec, float | None], str], kind: MeasureSpec, one: Measure) -> str:
    """Format the range of a value, or the two values of two runs; "" without any."""
    if one.value is None or one.low is None or one.high is None:
        return ""
    low = format_value(kind, one.low)
    high = format_value(kind, one.high)
    if low == high:  # as printed
        return ""
    between = "and" if one.spread == "values" else "to"
    return f"{low} {between} {high}"


def format_with_range(format_value: Callable[[MeasureSpec, float | None], str], kind: MeasureSpec, one: Measure) -> str:
    """Format a value, with its range in a second line if there is one."""
    value = format_value(kind, one.value)
    edges = _format_range(format_value, kind, one)
    return f"{value}\n{edges}" if edges else value


def is_significant(kind: MeasureSpec, one: Measure) -> bool | None:
    """Whether the range of a difference excludes "no difference"; None without a range, or with two values."""
    if one.interval is None:
        return None
    low, high = one.interval
    nothing = 0.0 if kind.compared == "minus" else 1.0
    return not low <= nothing <= high


def _select_known_measures(tables: Iterable[Mapping[str, Measure]], *, main: bool) -> list[str]:
    """Select the main or the other measures that at least one table has, in the order of MEASURES."""
    known: set[str] = set()
    for table in tables:
        known.update(name for name, one in table.items() if one.value is not None)
    return [name for name in MEASURES if name in known and (name in MAIN_MEASURES) == main]


def _list_headings(names: Sequence[str], metric: str) -> list[str]:
    """List the names of measures as they are printed; scores are named after their metric."""
    headings: list[str] = []
    for name in names:
        spec = MEASURES[name]
        heading = spec.label
        if spec.kind == "score":
            heading = heading.replace("score", get_score_label(metric))
        headings.append(heading)
    return headings


def _select_settings(variant: Variant, keys: Sequence[str]) -> dict[str, Any]:
    """Select the values of settings: of the variant, else as its first run resolved them."""
    resolved = select_work_settings(variant.runs[0]) if variant.runs else {}
    return {key: variant.settings.get(key, resolved.get(key, UNKNOWN)) for key in keys}


def build_variants_tables(comparison: Comparison) -> list[Table]:
    """Build a table of variants with settings and main measures, and a folded table of the other measures."""
    tables: list[Table] = []
    captions = (
        "Every variant over its runs: scores and losses as mean with 95 % interval, of two runs with both values, "
        "which are too few seeds for an interval; other measures as median with minimum and maximum. Click a column's "
        "name to sort by it.",
        "The other measures of every variant.",
    )
    for caption, main in zip(captions, (True, False), strict=True):
        names = _select_known_measures((variant.measures for variant in comparison.variants), main=main)
        keys = comparison.varied if main and len(comparison.varied) <= MAX_SETTINGS else ()
        rows: list[Sequence[Cell]] = []
        for variant in comparison.variants:
            marks: list[str] = []
            if variant.name == comparison.baseline:
                marks.append("baseline")
            if variant.pareto:
                marks.append("Pareto front")
            if variant.constant:
                marks.append(CONSTANTS[variant.constant.rule])
            if variant.failures:
                marks.append(f"{format_plural(len(variant.failures), 'run')} missing")
            name_and_marks = f"{variant.name}\n{', '.join(marks)}" if marks else variant.name
            row: list[Cell] = [name_and_marks]
            for key, value in _select_settings(variant, keys).items():
                row.append((format_setting(key, value), as_finite_number(value)))
            num = len(variant.runs)
            row.append((str(num), float(num)))
            for name in names:
                one = get_measure(variant, name)
                row.append((format_with_range(format_measure, MEASURES[name], one), one.value))
            rows.append(row)
        header = ("variant", *keys, "runs", *_list_headings(names, comparison.metric))
        tables.append(build_sortable_table(caption, header, rows, folded=not main))
    return tables


def build_baseline_tables(comparison: Comparison) -> list[Table]:
    """Build a table of differences or ratios to the baseline, and a folded table of the other measures."""
    others = [variant for variant in comparison.variants if variant.against]
    tables: list[Table] = []
    captions = (
        f"Against the baseline {comparison.baseline}: scores and losses as differences, seed by seed; other measures "
        "as multiples of the baseline's. A difference whose range contains 0 or 1.00 x may be chance. The column "
        "by example has the interval over the examples for these trained models, the next one that over the seeds.",
        "The other measures against the baseline; shares as differences in per cent of the whole.",
    )
    for caption, main in zip(captions, (True, False), strict=True):
        names = _select_known_measures((variant.against for variant in others), main=main)
        if not names:
            continue
        header = ["variant"]
        paired = main and any(variant.over_examples for variant in others)
        if paired:
            header += [f"{heading}, by example" for heading in _list_headings([SCORE], comparison.metric)]
        rows: list[Sequence[Cell]] = []
        for variant in others:
            row: list[Cell] = [variant.name]
            if paired:
                one = variant.over_examples or UNKNOWN_MEASURE
                chance = "" if one.p_value is None else f", p {format_p_value(one.p_value)}"
                row.append((format_with_range(format_measure_difference, MEASURES[SCORE], one) + chance, one.value))
            for name in names:
                one = variant.against.get(name, UNKNOWN_MEASURE)
                row.append((format_with_range(format_measure_difference, MEASURES[name], one), one.value))
            rows.append(row)
        header += _list_headings(names, comparison.metric)
        tables.append(build_sortable_table(caption, header, rows, folded=not main))
    return tables


MARKS = {
    "*": "marks a difference from the baseline that is significant over the seeds: its 95 % interval excludes 0",
    "\u2020": "marks a difference from the baseline that is significant over the examples, for these trained models: "
    "its 95 % interval excludes 0, and other seeds may differ",
}


def build_comparison_results(comparison: Comparison) -> Results:
    """Build the variants with their main measures as a table for a paper; significant differences are marked."""
    variants = comparison.variants
    names = _select_known_measures((variant.measures for variant in variants), main=True)
    is_last_best = LAST in names and all(get_measure(one, LAST) == get_measure(one, SCORE) for one in variants)
    if is_last_best:
        names.remove(LAST)
    headings = _list_headings(names, comparison.metric)
    keys = comparison.varied if len(comparison.varied) <= MAX_SETTINGS else ()
    score = get_score_label(comparison.metric)
    difference = f"{score} against the baseline"
    rows: list[list[str | Measured]] = []
    for variant in variants:
        remark = f" ({CONSTANTS[variant.constant.rule]})" if variant.constant else ""
        row: list[str | Measured] = [variant.name + remark]
        row += [format_setting(key, value) for key, value in _select_settings(variant, keys).items()]
        row.append(str(len(variant.runs)))
        gap = find_score_gap(variant)
        measured = _build_measured(format_measure_difference, SCORE, gap, _choose_mark(SCORE, gap))
        row.append("baseline" if variant.name == comparison.baseline else measured)
        for name in names:
            mark = _choose_mark(name, variant.against.get(name, UNKNOWN_MEASURE))
            row.append(_build_measured(format_measure, name, get_measure(variant, name), mark))
        rows.append(row)
    caption = (
        f"{len(variants)} variants compared by {score}; the baseline is {comparison.baseline}. Scores and losses are "
        "means with 95 % intervals, over seeds from three runs on and over examples for one run, and with both values "
        "of two runs; other measures are medians with minimum and maximum. Intervals are not corrected for the number "
        "of comparisons."
    )
    if is_last_best:
        caption += " The last scores are equal to the best ones."
    if comparison.incomparable:
        caption += f" {comparison.incomparable}"
    num_failed = sum(len(variant.failures) for variant in variants)
    if num_failed:
        caption += f" {format_plural(num_failed, 'run')} did not finish and are left out."
    if comparison.warnings:
        caption += f" More than the varied settings differs: {' '.join(comparison.warnings[:MAX_WARNINGS])}"
    if len(comparison.warnings) > MAX_WARNINGS:
        caption += f" The page has {len(comparison.warnings) - MAX_WARNINGS} more warnings."
    units = {difference: "points"}
    for heading, name in zip(headings, names, strict=True):
        if MEASURES[name].unit:
            units[heading] = MEASURES[name].unit
    return Results(caption, ("variant", *keys, "runs", difference, *headings), rows, units, MARKS)


def find_score_gap(variant: Variant) -> Measure:
    """Find the difference of the best score from the baseline's: over seeds, else over the examples."""
    gap = variant.against.get(SCORE, UNKNOWN_MEASURE)
    if gap.spread != "seeds" and variant.over_examples:
        return variant.over_examples
    return gap


def _choose_mark(name: str, gap: Measure) -> str:
    """Choose the mark of a significant difference; ranges of minimum and maximum say nothing of chance."""
    if not is_significant(MEASURES[name], gap):
        return ""
    if gap.spread == "seeds":
        return "*"
    return "\u2020" if gap.spread == "examples" else ""


def _build_measured(
    format_value: Callable[[MeasureSpec, float | None], str], name: str, one: Measure, mark: str
) -> Measured:
    kind = MEASURES[name]
    interval = None if one.low is None or one.high is None else (one.low, one.high)
    return Measured(format_value(kind, one.value), one.value, interval, _format_range(format_value, kind, one), mark)


# --- sentences ---


def quote_name(variant: Variant) -> str:
    """Quote a variant's name for a sentence, because it may contain spaces and commas."""
    return f"\N{LEFT DOUBLE QUOTATION MARK}{variant.name}\N{RIGHT DOUBLE QUOTATION MARK}"


def describe_outcome(comparison: Comparison) -> list[str]:
    """Describe the compared variants and the best one, with intervals, in a few sentences."""
    variants = comparison.variants
    runs = sum(len(variant.runs) for variant in variants)
    failed = sum(len(variant.failures) for variant in variants)
    keys = ", ".join(comparison.varied) or "nothing"
    sentences = [
        f"{format_plural(len(variants), 'variant')} in {format_plural(runs, 'run')} were compared; varied: {keys}."
    ]
    if failed:
        verb = "is" if failed == 1 else "are"
        sentences.append(f"{format_plural(failed, 'run')} did not finish and {verb} excluded.")
    sentences += _describe_best(comparison)
    ranked = _rank_variants(variants, SPEED, higher=True)
    # Other load distorts the times, so that neither the fastest nor the Pareto front is known.
    if comparison.disturbed:
        if len(ranked) > 1:
            disturbed = format_plural(len(comparison.disturbed), "run")
            sentences.append(
                f"Speeds are not compared: other work used the machine beside {disturbed} (see the warnings)."
            )
        return sentences
    if len(ranked) > 1:
        first = ranked[0]
        reached = f"{format_measure(MEASURES[SPEED], get_measure(first, SPEED).value)} examples per second"
        ratio = first.against.get(SPEED, UNKNOWN_MEASURE)
        if first.name == comparison.baseline:
            sentences.append(f"The baseline is also the fastest: {reached}.")
        elif ratio.value is None:
            sentences.append(f"{quote_name(first)} is the fastest: {reached}.")
        else:
            factor = _format_inline(format_measure_difference, SPEED, ratio).replace(" x", "")
            sentences.append(f"{quote_name(first)} is the fastest: {reached}, {factor} times the baseline's.")
    front = [quote_name(variant) for variant in variants if variant.pareto]
    if 0 < len(front) < len(variants) and has_nonzero_scores(comparison):
        sentences.append(f"The Pareto front of score and time: {', '.join(front)}.")
    return sentences


def _rank_variants(variants: Sequence[Variant], name: str, *, higher: bool) -> list[Variant]:
    """Rank the variants that have a measure, the best first; ties keep their order."""
    sign = -1 if higher else 1
    found = [variant for variant in variants if get_measure(variant, name).value is not None]
    return sorted(found, key=lambda variant: sign * (get_measure(variant, name).value or 0.0))


def _describe_best(comparison: Comparison) -> list[str]:
    """Describe the variant with the best score; if all scores are equal, the one with the lowest evaluation loss.

    No variant is the best if their scores cannot be compared.
    """
    every = _rank_variants(comparison.variants, SCORE, higher=comparison.higher_is_better)
    if comparison.incomparable:
        return [comparison.incomparable]
    if not every:
        return ["No variant has a score, so their quality is unknown."]
    name = get_score_label(comparison.metric)
    ranked: list[Variant] = []
    hollow: list[str] = []  # sentences on the variants whose score does not count
    for variant in every:
        if variant.constant is None:
            ranked.append(variant)
            continue
        reached = format_measure(MEASURES[SCORE], get_measure(variant, SCORE).value)
        why = f"{CONSTANTS[variant.constant.rule]}. {variant.constant.message}"
        hollow.append(f"{quote_name(variant)} ({name} {reached}) is left out: {why}")
    if len(hollow) > MAX_LEFT_OUT:
        num = len(hollow) - MAX_LEFT_OUT
        hollow[MAX_LEFT_OUT:] = [f"So are {num} more, for reasons of this kind (see the verdicts)."]
    if not ranked:
        return ["No variant is the best, because none has learnt the task.", *hollow]
    scores = {format_decimal(get_measure(variant, SCORE).value) for variant in ranked}  # means of equal scores round
    # The loss decides only if all have one: a variant without a loss may be the best.
    by_loss = _rank_variants(ranked, LOSS, higher=False)
    if len(ranked) > 1 and len(scores) == 1 and len(by_loss) == len(ranked):
        same = f"All variants have the same {name}, {next(iter(scores))}; the evaluation loss decides."
        return [same, _describe_leader(comparison, by_loss[0], LOSS, "evaluation loss", "lower"), *hollow]
    return [_describe_leader(comparison, ranked[0], SCORE, name, "better"), *hollow]


def _describe_leader(comparison: Comparison, best: Variant, measure: str, name: str, better: str) -> str:
    """Describe the best variant of a measure: its value, and its difference to the baseline with its significance."""
    reached = _format_inline(format_measure, measure, get_measure(best, measure))
    doubted = f" Note how: {best.abstaining.message}" if best.abstaining and measure == SCORE else ""
    if best.name == comparison.baseline:
        return f"No variant has a {better} {name} than the baseline {quote_name(best)}: {reached}.{doubted}"
    superlative = "best" if better == "better" else "lowest"
    leads = f"{quote_name(best)} has the {superlative} {name}: {reached}"
    gap = find_score_gap(best) if measure == SCORE else best.against.get(measure, UNKNOWN_MEASURE)
    if gap.value is None:
        return f"{leads}.{doubted}"
    over = trained = ""
    if gap.spread == "seeds":
        over = " over seeds"
    elif gap.spread == "examples":
        over = " over the examples"
        trained = " for these trained models; other seeds may differ"
    significant = is_significant(MEASURES[measure], gap)
    if significant is None:
        doubt = "there are too few seeds for an interval"
    elif significant:
        doubt = f"that is significant, because the interval{over} excludes 0{trained}"
    else:
        doubt = f"that may be chance, because the interval{over} contains 0"
    difference = _format_inline(format_measure_difference, measure, gap)
    return f"{leads}, {difference} against the baseline; {doubt}.{doubted}"


def has_nonzero_scores(comparison: Comparison) -> bool:
    """Whether any variant has a score other than 0; scores that are all 0 do not distinguish variants."""
    return any(get_measure(variant, SCORE).value or get_measure(variant, LAST).value for variant in comparison.variants)


def _format_inline(format_value: Callable[[MeasureSpec, float | None], str], name: str, one: Measure) -> str:
    """Format value and range of a measure in one line: 93.4 (92.1 to 94.5)."""
    value = format_value(MEASURES[name], one.value)
    edges = _format_range(format_value, MEASURES[name], one)
    return f"{value} ({edges})" if edges else value
