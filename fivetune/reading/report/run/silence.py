"""When to stay silent: errors over the share of answers that are given, and the confidence that keeps a promise.

In: the errors of an evaluation by confidence. Out: parts of the section on confidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Part, Table, Text
from fivetune.reading.report.page.wording import (
    format_count,
    format_percent,
    format_plural,
    format_significant,
)
from fivetune.reading.report.run.scores import get_score_label
from fivetune.rundir.abstention_file import Abstention, Level
from fivetune.rundir.records import EvalRecord, Prediction
from fivetune.scores.analysis.abstention import (
    choose_level,
    compute_min_confidence,
    compute_upper_bound,
    count_needed,
    describe_promise,
    find_error_score,
    format_promise,
    list_promise_facts,
    measure_abstention,
)

PROMISES = (0.01, 0.02, 0.05, 0.1)
OFFERED = (0.05, 0.1)  # promises of the command, the first that can be kept
MIN_DRAWN = 20  # answers, below which a share of errors is noise


def iter_silence_parts(
    lines: Sequence[Prediction],
    key: str,
    record: EvalRecord | None,
    kept: Abstention | None,
    temperature: float,
    folder: str,
) -> Iterator[Part]:
    """Yield the errors over the share of answers, with the confidence for each promise.

    Args:
        lines: predictions with the model's own probabilities, of the evaluation `record`.
        key: the main score of a prediction.
        kept: errors by confidence of model/, perhaps of another evaluation; None without them.
        temperature: temperature of the confidences.
        folder: path of the run, as commands name it.
    """
    found = kept
    score = find_error_score(lines, key)
    if found is None and record and score:
        found = measure_abstention(lines, score, split=record.split, step=record.step)
    if found is None and (score or not all(key in line.scores for line in lines)):
        return
    yield Text("When to stay silent", "heading")
    if found is None:
        yield Text(
            f"{get_score_label(key)} is graded: fivetune evaluate {folder} --max-error 5% --error-below 50 "
            "counts answers below 50 as wrong, and shows how many can be given."
        )
        return
    facts = list_promise_facts(found, temperature)
    promise = describe_promise(facts) if facts else "Nothing is withheld."
    possible = [share for share in OFFERED if choose_level(found.levels, share)]
    if possible and not facts:
        promise += f" fivetune evaluate {folder} --max-error {format_promise(possible[0])} keeps a promise."
    wrong = f"{get_score_label(found.score)} below {100 * found.error_below:g}"
    yield Text(
        f"Share of wrong answers ({wrong}) if only the most confident are given, on "
        f"{format_plural(found.num, 'prediction')} of the evaluation {found.split}. {promise}"
    )
    if found.levels[-1].wrong:
        yield _build_chart(found)
    shares = sorted({*PROMISES, found.max_error or PROMISES[0]})
    rows = [_build_row(found, share, temperature) for share in shares]
    header = ("at most wrong", "confidence at least", "answered", "examples", "wrong", "upper bound", "needed")
    caption = (
        "The confidence that keeps a promise with a confidence of 95 %. Needed: predictions with which it would be "
        "kept, if errors stay as measured."
    )
    yield Table(caption, header, rows)


def _build_chart(found: Abstention) -> Part:
    drawn = [level for level in found.levels if level.answered >= min(MIN_DRAWN, found.num)]
    chosen: list[Level] = []
    for share in PROMISES:
        level = choose_level(found.levels, share)
        if level and level not in chosen:
            chosen.append(level)
    bounds: list[float | None] = [100 * compute_upper_bound(level.wrong, level.answered) for level in drawn]
    traces = [
        _build_trace("Wrong", drawn, found.num, charts.COLORS[0], mode="lines"),
        charts.build_line_trace(
            "Upper bound (95 %)",
            _list_shares(drawn, found.num),
            bounds,
            charts.MUTED,
            mode="lines",
            line={"dash": "dash"},
        ),
    ]
    if chosen:
        traces.append(_build_trace("Promises of the table", chosen, found.num, charts.COLORS[1], mode="markers"))
    caption = "Errors over the share of answers that are given, the most confident first."
    return charts.build_coverage_chart(caption, traces, "answered (%)", "wrong (%)")


def _build_trace(name: str, levels: Sequence[Level], num: int, color: str, *, mode: str) -> charts.Trace:
    errors: list[float | None] = [100 * level.wrong / level.answered for level in levels]
    return charts.build_line_trace(name, _list_shares(levels, num), errors, color, mode=mode)


def _list_shares(levels: Sequence[Level], num: int) -> list[float]:
    return [100 * level.answered / num for level in levels]


def _build_row(found: Abstention, share: float, temperature: float) -> Sequence[str]:
    level = choose_level(found.levels, share)
    name = format_promise(share)
    if share == found.max_error:
        name += " (kept)"
    if level is None:
        needed = count_needed(found.levels, share)
        return (name, "none", "", "", "", "", format_count(needed) if needed else "no number")
    return (
        name,
        format_significant(compute_min_confidence(level, temperature)),
        format_percent(level.answered / found.num),
        format_count(level.answered),
        format_percent(level.wrong / level.answered),
        format_percent(compute_upper_bound(level.wrong, level.answered)),
        "",
    )
