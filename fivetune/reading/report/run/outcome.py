"""The outcome of a run: the verdict in sentences, its scores beside the baselines, and the key figures.

In: a Run and its reference runs. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from fivetune.reading.compare.changes import compute_paired_difference
from fivetune.reading.diagnosis.learning import MIN_ANSWERED, MIN_SILENT
from fivetune.reading.diagnosis.rules import CAUSES, TITLES
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Chart, Figure, Part, Problem, Section, Table, Text
from fivetune.reading.report.page.series import (
    Series,
    choose_smoothing_span,
    select_latest_by_step,
    smooth_series,
)
from fivetune.reading.report.page.wording import (
    UNKNOWN,
    format_bytes,
    format_count,
    format_decimal,
    format_duration,
    format_large_count,
    format_percent,
    format_plain,
    format_plural,
    format_signed,
    format_significant,
)
from fivetune.reading.report.run.data import count_examples
from fivetune.reading.report.run.problems import describe_resume
from fivetune.reading.report.run.rates import read_majority_score
from fivetune.reading.report.run.scores import (
    EvalRecord,
    choose_best_eval,
    compute_score_interval,
    find_baseline_eval,
    find_main_score_key,
    format_points,
    get_best_scores,
    get_score_label,
    list_score_keys,
    read_score,
    select_headline_scores,
    select_main_evals,
)
from fivetune.rundir.figures import compute_mfu, compute_peak_bytes, compute_tokens_per_second, describe_weights
from fivetune.rundir.records import MachineRecord, Prediction, Run
from fivetune.scores.analysis.bootstrap import format_p_value
from fivetune.types import Verdict
from fivetune.values import divide, get_nested, select_finite, select_numbers

NOTHING_LEARNT = "Nothing was learnt"
BASELINE = "before fine-tuning"
MAJORITY = "most frequent label"
PUBLISHED = "published"


def build_verdict_section(
    run: Run, reference_runs: Sequence[Run], verdicts: Sequence[Verdict], problems: Sequence[Problem]
) -> Section:
    """Build the section: the verdict in sentences, the problems, the main scores, all scores beside their baselines.

    Args:
        verdicts: of the diagnosis.
    """
    best, baseline = choose_best_eval(run), find_baseline_eval(run)
    parts: list[Part] = [Text(" ".join(describe_verdict(run, reference_runs, verdicts)), "lead")]
    if command := describe_resume(run):
        parts.append(Text(command, "code"))
    parts += problems
    if not problems:
        parts.append(
            Text("No problem found with the data, the losses, the predictions, the devices or the speed.", "good")
        )
    if best is None:
        return Section("Verdict", tuple(parts))
    keys = list_score_keys([best])
    parts += [_build_headline_figure(key, best, baseline) for key in select_headline_scores(run, keys)]
    others = {other.name: get_best_scores(other) for other in reference_runs}
    before = {BASELINE: baseline.scores if baseline else {}}
    expected, doubts = get_nested(run.config, "report", "expected"), find_published_doubts(run, best)
    published = {PUBLISHED: select_numbers(expected)} if expected else {}
    drawn = {} if baseline is None or baseline is best else before
    parts += _draw_dots_charts(keys, best, drawn | others | ({} if doubts else published))
    if doubts:
        published = {f"{PUBLISHED}, not comparable": select_numbers(expected)}
    majority = {key: value for key in keys if (value := read_majority_score(best, key)) is not None}
    columns = before | ({MAJORITY: majority} if majority else {}) | others | published
    header = ("score", f"this run, {describe_weights(best, run.status.best)}", "95 % interval", *columns, "change")
    rows = [
        (
            get_score_label(key),
            format_points(read_score(best, key)),
            _format_interval(best, key),
            *(format_points(scores.get(key)) for scores in columns.values()),
            format_difference(read_score(best, key), read_score(baseline, key)),
        )
        for key in keys
    ]
    caption = "All scores of the best evaluation beside the baselines; change is against the model before fine-tuning. "
    parts.append(Table(caption + "(evals.jsonl)", header, tuple(rows)))
    if blank := describe_blank_golds(run.read_predictions(best), find_main_score_key(run) or ""):
        parts.append(Text(blank))
    if doubts:
        parts.append(Text(f"The published scores are not comparable with this run's: {'; '.join(doubts)}."))
    return Section("Verdict", tuple(parts))


def describe_blank_golds(lines: Sequence[Prediction], key: str) -> str:
    """Describe the main score without questions that have a blank gold answer beside others; "" if there are none."""
    scored = [line for line in lines if key in line.scores]
    rest = [line.scores[key] for line in scored if all(line.references) or not any(line.references)]
    if len(rest) == len(scored) or not rest:
        return ""
    without = format_points(100 * sum(rest) / len(rest))
    return (
        "A blank gold answer beside others, which an empty prediction matches: "
        f"{format_plural(len(scored) - len(rest), 'question')}. Without them, {get_score_label(key)} is {without}."
    )


def _build_headline_figure(key: str, best: EvalRecord, baseline: EvalRecord | None) -> Figure:
    if best is baseline:
        return Figure(get_score_label(key), format_points(read_score(best, key), 1), BASELINE)
    before = read_score(baseline, key)
    was = "no baseline" if before is None else f"{format_points(before, 1)} before"
    return Figure(get_score_label(key), format_points(read_score(best, key), 1), was)


def _format_interval(record: EvalRecord, key: str) -> str:
    edges = compute_score_interval(record, key)
    return "" if edges is None else f"{format_decimal(edges[0], 1)} to {format_decimal(edges[1], 1)}"


def find_published_doubts(run: Run, best: EvalRecord | None) -> list[str]:
    """Return why published scores (report.expected) are not comparable with the run: another model, other examples."""
    if not get_nested(run.config, "report", "expected"):
        return []
    model, theirs = (get_nested(run.config, "report", key) for key in ("expected_model", "expected_examples"))
    own = PurePath(str(get_nested(run.config, "model", "path") or get_nested(run.config, "model", "config"))).name
    num = best.num_examples if best else None
    doubts: list[str] = []
    if model is None:
        doubts.append("the settings do not name their model")
    elif PurePath(str(model)).name != own:
        doubts.append(f"they are of {model}, this run trains {own}")
    if theirs is None:
        doubts.append("the settings do not give their number of examples")
    elif theirs != num:
        doubts.append(f"they were measured on {format_plural(theirs, 'example')}, this run on {format_count(num)}")
    return doubts


def _draw_dots_charts(keys: Sequence[str], best: EvalRecord, others: Mapping[str, Mapping[str, float]]) -> list[Chart]:
    if not keys:
        return []
    columns = {**others, "this run": best.scores}
    series: dict[str, Series] = {name: [scores.get(key) for key in keys] for name, scores in columns.items()}
    caption = "This run's best evaluation (filled, with 95 % intervals of the evaluation) beside its baselines."
    intervals = [compute_score_interval(best, key) for key in keys]
    return [charts.build_score_dots_chart([get_score_label(key) for key in keys], series, intervals, caption)]


def build_figures_section(run: Run) -> Section:
    """Build the section of key figures: steps, time, throughput, memory."""
    steps, status = select_latest_by_step(run.steps), run.status
    losses: Series = [record.loss for record in steps]
    level = select_finite(smooth_series(losses, choose_smoothing_span(len(losses))))
    first_loss = next(iter(select_finite(losses)), None)
    seen = steps[-1].num_examples_seen if steps else None
    epochs = divide(seen, count_examples(run.data.train))
    training = divide(status.seconds_by_phase.get("train"), status.seconds)
    figures = [
        Figure("Steps", format_count(status.step), _format_if_known("of {} planned", format_count(run.num_steps))),
        Figure(
            "Examples seen",
            format_count(seen),
            _format_if_known("{} epochs", format_decimal(epochs, 2)),
        ),
        Figure(
            "Time",
            format_duration(run.status.seconds),
            _format_if_known("{} of it training", format_percent(training)),
        ),
        Figure(
            "Training loss",
            format_significant(level[-1] if level else None),
            f"nats per target token, {format_significant(first_loss)} at first",
        ),
        Figure("Throughput", format_large_count(compute_tokens_per_second(steps)), "tokens per second"),
        Figure("Peak memory", format_bytes(compute_peak_bytes(steps)), "highest of all steps"),
        Figure("Model", format_large_count(run.machine.num_parameters), _describe_trained(run.machine)),
        Figure(
            "Precision",
            format_plain(run.machine.precision),
            f"attention: {format_plain(run.machine.attention)}",
        ),
    ]
    if (mfu := compute_mfu(steps)) is not None:
        figures.append(Figure("MFU", format_percent(mfu), _describe_peaks(run.machine, mfu)))
    return Section("Key figures", tuple(figures))


def _describe_peaks(machine: MachineRecord, mfu: float) -> str:
    """What MFU is a share of, and the share of the product that was measured."""
    peak, product = machine.peak_flops, machine.product_flops
    words = "of the dense peak by the data sheet"
    if peak is None:
        return words
    words = f"{words}, {peak / 1e12:,.0f} TFLOP/s"
    return words if product is None else f"{words}; {format_percent(mfu * peak / product)} of a product measured here"


def _format_if_known(words: str, value: str) -> str:
    return "" if value == UNKNOWN else words.format(value)


def describe_verdict(run: Run, reference_runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[str]:
    """Describe the result, its comparison with the reference runs, and the end of the run, a sentence each.

    Args:
        verdicts: of the diagnosis, of which one may be the cause that nothing was learnt.
    """
    cause = next((verdict.rule for verdict in verdicts if verdict.rule in CAUSES), None)
    outcome = _describe_outcome(run)
    if cause == "diverged":
        outcome.insert(0, f"{TITLES[cause]}.")
    elif cause and outcome[0].startswith(NOTHING_LEARNT):
        outcome.append(f"The likely cause: {TITLES[cause][0].lower()}{TITLES[cause][1:]}.")
    return [*outcome, *_describe_comparison(run, reference_runs), _describe_ending(run)]


def _describe_outcome(run: Run) -> list[str]:
    best, baseline, key = choose_best_eval(run), find_baseline_eval(run), find_main_score_key(run)
    if best is None or key is None:
        return ["No evaluation was made, so the quality is not known."]
    reached, before = read_score(best, key), read_score(baseline, key)
    name, now, then = get_score_label(key), format_points(reached, 1), format_points(before, 1)
    measured = f"{describe_weights(best, run.status.best)} on {format_plural(best.num_examples, 'example')}"
    if best.step == 0 and len(select_main_evals(run)) == 1:
        return [f"Only the model before fine-tuning was evaluated: {name} {then}."]
    if best.step == 0:
        return [f"{NOTHING_LEARNT}: no evaluation is better than the one before fine-tuning ({name} {then})."]
    if reached == 0:
        return [f"{NOTHING_LEARNT}: {name} is {now}, measured at {measured}.", *_describe_loss(best, baseline)]
    majority = read_majority_score(best, key)
    if reached is not None and majority is not None and reached <= majority:
        return [
            f"{NOTHING_LEARNT}: {name} is {now}, measured at {measured}; always giving the most frequent label "
            f"reaches {format_points(majority, 1)}."
        ]
    abstaining = _read_abstention_score(best, key)
    if reached is not None and abstaining is not None and reached <= abstaining:
        silent = (read_score(best, f"NoAns_{key}") or 0.0) > MIN_SILENT
        return [
            f"{NOTHING_LEARNT}{' but to abstain' if silent else ''}: {name} is {now}, measured at {measured}, with "
            f"{format_points(best.scores[f'HasAns_{key}'], 1)} on answerable questions; never answering reaches "
            f"{format_points(abstaining, 1)}."
        ]
    if before is None or reached is None:
        return [f"Fine-tuning reached {name} {now} at {measured}; the score before it is not known."]
    if reached == before:
        words = f"{NOTHING_LEARNT}: {name} is {now}, as before fine-tuning, measured at {measured}."
        return [words, *_describe_loss(best, baseline)]
    differs, proof = _test_change(run, baseline, best, key)
    if not differs:
        words = f"{name[0].upper()}{name[1:]} is {now} after fine-tuning and {then} before, measured at {measured}"
        return [f"{words}: not distinguishable, because {proof}."]
    verb = "raised" if reached > before else "lowered"
    words = f"Fine-tuning {verb} {name} from {then} to {now}, measured at {measured}"
    return [f"{words}; {proof}." if proof else f"{words}."]


def _read_abstention_score(record: EvalRecord, key: str) -> float | None:
    """Return the score in points of never answering; None if the run answers, or where no question is unanswerable."""
    answered = read_score(record, f"HasAns_{key}")
    unanswerable, total = read_score(record, "NoAns_total"), read_score(record, "total")
    if answered is None or answered >= MIN_ANSWERED or not unanswerable or not total:
        return None
    return 100 * unanswerable / total


def _test_change(run: Run, before: EvalRecord | None, after: EvalRecord, key: str) -> tuple[bool, str]:
    """Return whether two scores differ by more than chance, and the proof: a paired bootstrap over their examples.

    Without the predictions, scores whose 95 % intervals overlap do not differ; there is no proof that others do.
    """
    change = compute_paired_difference([(run, after)], [(run, before)], metric=key)
    if change and change.low is not None and change.high is not None and change.p_value is not None:
        edges = f"{format_signed(change.low, 1)} to {format_signed(change.high, 1)}"
        proof = f"the 95 % interval of the change on the same examples is {edges}, p {format_p_value(change.p_value)}"
        return not change.low <= 0 <= change.high, proof
    one, other = compute_score_interval(after, key), before and compute_score_interval(before, key)
    if one and other and one[0] <= other[1] and other[0] <= one[1]:
        return False, "the 95 % intervals overlap"
    return True, ""


def _describe_loss(best: EvalRecord, baseline: EvalRecord | None) -> list[str]:
    """Describe the change of the evaluation loss, for runs whose score is uninformative."""
    now, then = best.loss, baseline.loss if baseline else None
    if now is None or then is None or round(now, 3) == round(then, 3):  # equal in print
        return []
    verb = "fell" if now < then else "rose"
    return [f"The evaluation loss {verb} from {format_decimal(then, 3)} to {format_decimal(now, 3)} nats per token."]


def _describe_comparison(run: Run, reference_runs: Sequence[Run]) -> list[str]:
    key, best = find_main_score_key(run), choose_best_eval(run)
    sentences: list[str] = []
    for other in reference_runs:
        theirs, ours = read_score(choose_best_eval(other), key or ""), read_score(best, key or "")
        if key is None or theirs is None or ours is None:
            sentences.append(f"The run {other.name} has no {get_score_label(key or 'score')} to compare with.")
            continue
        difference = round(theirs - ours, 1)  # as printed: no "0.0 below"
        side = "below" if difference < 0 else "above"
        gap = f"{format_points(abs(difference), 1)} {side}" if difference else "the same"
        sentences.append(
            f"Beside it, the run {other.name} reaches {get_score_label(key)} {format_points(theirs, 1)}: {gap}."
        )
    return sentences


def _describe_ending(run: Run) -> str:
    state, why, step, planned = run.status.state, run.status.why, run.status.step, run.num_steps
    done = (
        f"{format_plural(step, 'step')} of {format_count(planned)}" if step != planned else format_plural(step, "step")
    )
    reason = f": {format_plain(why).rstrip('.')}" if why else ""
    seconds = format_duration(run.status.seconds)
    took = "" if run.status.seconds is None else f" in {seconds}"
    model = "model/ was saved before" if run.has_model else "no model was saved"
    ends = {
        "finished": f"The run finished after {done} in {seconds}{reason}.",
        "failed": f"The run failed after {done}{took}; {model}.",
        "interrupted": f"The run was interrupted after {done}{took}{reason}.",
        "pruned": f"The search pruned the run after {done}{reason}.",
        "preparing": "The state is preparing: the run has no step yet, or was killed.",
        "running": f"The state is running, after {done}: the run is active, or was killed.",
    }
    return ends.get(state, f"The end of the run is not known (state {UNKNOWN}).")


def format_difference(reached: float | None, before: float | None) -> str:
    """Format the change of a score: +3.50."""
    return format_signed(None if reached is None or before is None else reached - before)


def _describe_trained(machine: MachineRecord) -> str:
    """What is below the number of parameters: the share that is trained, if some are frozen."""
    count, trained = machine.num_parameters, machine.num_trained_parameters
    if not count or trained is None or trained == count:
        return "parameters"
    return f"parameters, {format_percent(trained / count)} of them trained"
