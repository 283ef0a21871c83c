"""The outcome of a run: the verdict in sentences, its scores beside the baselines, and the key figures.

In: a Run and its reference runs. Out: Sections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from fivetune.reading.compare.changes import compute_paired_difference
from fivetune.reading.compare.measures import get_score
from fivetune.reading.diagnosis.learning import MIN_ANSWERED, MIN_SILENT
from fivetune.reading.diagnosis.rules import TITLES, find_cause
from fivetune.reading.report.page import charts
from fivetune.reading.report.page.parts import Figure, Part, Problem, Section, Table, Text, build_section
from fivetune.reading.report.page.series import Series, choose_smoothing_span, select_latest_by_step, smooth_series
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
from fivetune.reading.report.run.problems import list_next_commands
from fivetune.reading.report.run.rates import read_majority_score
from fivetune.reading.report.run.scores import (
    EvalRecord,
    choose_best_eval,
    compute_score_interval,
    find_baseline_eval,
    find_main_score_key,
    get_best_scores,
    get_score_label,
    list_score_keys,
    select_headline_scores,
)
from fivetune.rundir.figures import (
    compute_mfu,
    compute_peak_bytes,
    compute_tokens_per_second,
    describe_weights,
    select_evals_by_step,
)
from fivetune.rundir.records import Prediction, Run
from fivetune.scores.analysis.bootstrap import format_p_value
from fivetune.types import Verdict
from fivetune.values import divide, get_nested, select_finite, select_numbers

NO_PROBLEM = "No problem found with the data, the losses, the predictions, the devices or the speed."
NOTHING_LEARNT = "Nothing was learnt"
BASELINE = "before fine-tuning"
MAJORITY = "most frequent label"
PUBLISHED = "published"


def iter_verdict_parts(
    run: Run, reference_runs: Sequence[Run], verdicts: Sequence[Verdict], problems: Sequence[Problem]
) -> Iterator[Part]:
    """Yield the verdict in sentences, the problems, the main scores, all scores beside their baselines.

    Args:
        verdicts: verdicts of the diagnosis.
    """
    best = choose_best_eval(run)
    baseline = find_baseline_eval(run)
    yield Text(" ".join(describe_verdict(run, reference_runs, verdicts)), "lead")
    next_commands = list_next_commands(run)
    if next_commands and run.status.state == "interrupted":
        yield Text("\n".join(next_commands), "code")
        next_commands = []
    # The first screen: whether the run is good and what comes next. Warnings follow, of which there may be many.
    bad = [problem for problem in problems if problem.kind == "bad"]
    warnings = [problem for problem in problems if problem.kind != "bad"]
    yield from bad
    if best is None:
        yield from warnings
        if not problems:
            yield Text(NO_PROBLEM, "good")
        return
    keys = list_score_keys([best])
    for key in select_headline_scores(run, keys):
        before = get_score(baseline, key)
        was = "no baseline" if before is None else f"{format_decimal(before, 1)} before"
        now = format_decimal(get_score(best, key), 1)
        yield Figure(get_score_label(key), now, BASELINE if best is baseline else was)
    # What follows: of a run that failed its goal, the change that its problems name.
    if next_commands and not bad:
        yield Text("What next", "heading")
        yield Text("\n".join(next_commands), "code")
    yield from warnings
    if not problems:
        yield Text(NO_PROBLEM, "good")
    # The columns beside the run's own scores.
    others = {other.name: get_best_scores(other) for other in reference_runs}
    expected = get_nested(run.config, "report", "expected")
    doubts = find_published_doubts(run, best)
    published: dict[str, Mapping[str, float]] = {}
    if expected:
        published[f"{PUBLISHED}, not comparable" if doubts else PUBLISHED] = select_numbers(expected)
    intervals = [compute_score_interval(best, key) for key in keys]
    # The chart has the baselines that were measured, and published scores only if they are comparable.
    if keys:
        drawn: dict[str, Mapping[str, float]] = {}
        if baseline is not None and baseline is not best:
            drawn[BASELINE] = baseline.scores
        drawn |= others
        if not doubts:
            drawn |= published
        drawn["this run"] = best.scores
        series: dict[str, Series] = {name: [scores.get(key) for key in keys] for name, scores in drawn.items()}
        caption = "This run's best evaluation (filled, with 95 % intervals of the evaluation) beside its baselines."
        labels = [get_score_label(key) for key in keys]
        yield charts.build_score_dots_chart(labels, series, intervals, caption)
    # The table has all columns, also those without a value.
    columns: dict[str, Mapping[str, float]] = {BASELINE: baseline.scores if baseline else {}}
    majority: dict[str, float] = {}
    for key in keys:
        score = read_majority_score(best, key)
        if score is not None:
            majority[key] = score
    if majority:
        columns[MAJORITY] = majority
    columns |= others | published
    rows: list[Sequence[str]] = []
    for key, edges in zip(keys, intervals, strict=True):
        now = get_score(best, key)
        then = get_score(baseline, key)
        row = [get_score_label(key), format_decimal(now)]
        row.append(format_signed(None if now is None or then is None else now - then))
        row.append("" if edges is None else f"{format_decimal(edges[0], 1)} to {format_decimal(edges[1], 1)}")
        row += [format_decimal(scores.get(key)) for scores in columns.values()]
        rows.append(tuple(row))
    header = ("score", f"this run, {describe_weights(best, run.status.best)}", "change", "95 % interval", *columns)
    caption = "All scores of the best evaluation beside the baselines; change is against the model before fine-tuning. "
    yield Table(caption + "(evals.jsonl)", header, rows)
    blank = describe_blank_golds(run.read_predictions(best), find_main_score_key(run) or "")
    if blank:
        yield Text(blank)
    if doubts:
        yield Text(f"The published scores are not comparable with this run's: {'; '.join(doubts)}.")


def describe_blank_golds(lines: Sequence[Prediction], key: str) -> str:
    """Describe the main score without questions that have a blank gold answer beside others; "" if there are none."""
    scored = [line for line in lines if key in line.scores]
    rest = [line.scores[key] for line in scored if all(line.references) or not any(line.references)]
    if len(rest) == len(scored) or not rest:
        return ""
    without = format_decimal(100 * sum(rest) / len(rest))
    return (
        "A blank gold answer beside others, which an empty prediction matches: "
        f"{format_plural(len(scored) - len(rest), 'question')}. Without them, {get_score_label(key)} is {without}."
    )


def find_published_doubts(run: Run, best: EvalRecord) -> list[str]:
    """Return why published scores (report.expected) are not comparable with the run: another model, other examples."""
    if not get_nested(run.config, "report", "expected"):
        return []
    named = get_nested(run.config, "report", "expected_model")
    num = get_nested(run.config, "report", "expected_examples")
    own = PurePath(str(get_nested(run.config, "model", "path") or get_nested(run.config, "model", "config"))).name
    doubts: list[str] = []
    if named is None:
        doubts.append("the settings do not name their model")
    elif PurePath(str(named)).name != own:
        doubts.append(f"they are of {named}, this run trains {own}")
    if num is None:
        doubts.append("the settings do not give their number of examples")
    elif num != best.num_examples:
        ours = format_count(best.num_examples)
        doubts.append(f"they were measured on {format_plural(num, 'example')}, this run on {ours}")
    return doubts


def build_figures_section(run: Run) -> Section:
    """Build the section of key figures: steps, time, throughput, memory."""
    steps = select_latest_by_step(run.steps)
    status = run.status
    machine = run.machine
    losses: Series = [record.loss for record in steps]
    known = select_finite(losses)
    level = select_finite(smooth_series(losses, choose_smoothing_span(len(losses))))
    first_loss = format_significant(known[0] if known else None)
    planned = "" if run.num_steps is None else f"of {format_count(run.num_steps)} planned"
    seen = steps[-1].num_examples_seen if steps else None
    epochs = divide(seen, count_examples(run.data.train))
    passes = "" if epochs is None else f"{format_decimal(epochs, 2)} epochs"
    training = divide(status.seconds_by_phase.get("train"), status.seconds)
    share = "" if training is None else f"{format_percent(training)} of it training"
    num = machine.num_parameters
    trained = machine.num_trained_parameters
    parameters = "parameters"
    if num and trained is not None and trained != num:
        parameters += f", {format_percent(trained / num)} of them trained"
    figures = [
        Figure("Steps", format_count(status.step), planned),
        Figure("Examples seen", format_count(seen), passes),
        Figure("Time", format_duration(status.seconds), share),
        Figure(
            "Training loss",
            format_significant(level[-1] if level else None),
            f"nats per target token, {first_loss} at first",
        ),
        Figure("Throughput", format_large_count(compute_tokens_per_second(steps)), "tokens per second"),
        Figure("Peak memory", format_bytes(compute_peak_bytes(steps)), "highest of all steps"),
        Figure("Model", format_large_count(num), parameters),
        Figure("Precision", format_plain(machine.precision), f"attention: {format_plain(machine.attention)}"),
    ]
    mfu = compute_mfu(steps)
    if mfu is not None:
        peak = machine.peak_flops
        words = "of the dense peak by the data sheet"
        if peak is not None:
            words += f", {peak / 1e12:,.0f} TFLOP/s"
            if machine.product_flops is not None:
                words += f"; {format_percent(mfu * peak / machine.product_flops)} of a product measured here"
        figures.append(Figure("MFU", format_percent(mfu), words))
    return build_section("Key figures", figures)


def describe_verdict(run: Run, reference_runs: Sequence[Run], verdicts: Sequence[Verdict]) -> list[str]:
    """Describe the result, its comparison with the reference runs, and the end of the run, a sentence each.

    Args:
        verdicts: verdicts of the diagnosis, of which one may be the cause that nothing was learnt.
    """
    best = choose_best_eval(run)
    key = find_main_score_key(run)
    cause = find_cause(verdicts)
    # The cause stands before a score that a diverged run still has, and after one that tells of nothing learnt.
    sentences = _describe_outcome(run, best, key)
    if cause == "diverged":
        sentences.insert(0, f"{TITLES[cause]}.")
    elif cause and sentences[0].startswith(NOTHING_LEARNT):
        sentences.append(f"The likely cause: {TITLES[cause][0].lower()}{TITLES[cause][1:]}.")
    for other in reference_runs:
        theirs = get_score(choose_best_eval(other), key or "")
        ours = get_score(best, key or "")
        if key is None or theirs is None or ours is None:
            sentences.append(f"The run {other.name} has no {get_score_label(key or 'score')} to compare with.")
            continue
        difference = round(theirs - ours, 1)  # as printed: no "0.0 below"
        gap = "the same"
        if difference:
            gap = f"{format_decimal(abs(difference), 1)} {'below' if difference < 0 else 'above'}"
        reached = f"{get_score_label(key)} {format_decimal(theirs, 1)}"
        sentences.append(f"Beside it, the run {other.name} reaches {reached}: {gap}.")
    status = run.status
    done = format_plural(status.step, "step")
    if status.step != run.num_steps:
        done += f" of {format_count(run.num_steps)}"
    why = format_plain(status.why).partition(". Resume with")[0]  # the command follows by itself
    reason = f": {why.rstrip('.')}" if status.why else ""
    seconds = format_duration(status.seconds)
    took = "" if status.seconds is None else f" in {seconds}"
    model = "model/ was saved before" if run.has_model else "no model was saved"
    ends = {
        "finished": f"The run finished after {done} in {seconds}{reason}.",
        "failed": f"The run failed after {done}{took}; {model}.",
        "interrupted": f"The run was interrupted after {done}{took}{reason}.",
        "pruned": f"The search pruned the run after {done}{reason}.",
        "preparing": "The state is preparing: the run has no step yet, or was killed.",
        "running": f"The state is running, after {done}: the run is active, or was killed.",
    }
    return [*sentences, ends.get(status.state, f"The end of the run is not known (state {UNKNOWN}).")]


def _describe_outcome(run: Run, best: EvalRecord | None, key: str | None) -> list[str]:
    """Describe what fine-tuning changed: the best score against the one before, and how sure the difference is."""
    if best is None or key is None:
        return ["No evaluation was made, so the quality is not known."]
    baseline = find_baseline_eval(run)
    reached = get_score(best, key)
    before = get_score(baseline, key)
    name = get_score_label(key)
    now = format_decimal(reached, 1)
    then = format_decimal(before, 1)
    measured = f"{describe_weights(best, run.status.best)} on {format_plural(best.num_examples, 'example')}"
    if best.step == 0 and len(select_evals_by_step(run.evals)) == 1:
        return [f"Only the model before fine-tuning was evaluated: {name} {then}."]
    if best.step == 0:
        return [f"{NOTHING_LEARNT}: no evaluation is better than the one before fine-tuning ({name} {then})."]
    if reached == 0:
        return [f"{NOTHING_LEARNT}: {name} is {now}, measured at {measured}.", *_describe_loss(best, baseline)]
    majority = read_majority_score(best, key)
    if reached is not None and majority is not None and reached <= majority:
        return [
            f"{NOTHING_LEARNT}: {name} is {now}, measured at {measured}; always giving the most frequent label "
            f"reaches {format_decimal(majority, 1)}."
        ]
    # A run that hardly answers is held against never answering, which is right for every unanswerable question.
    answered = get_score(best, f"HasAns_{key}")
    silent = get_score(best, f"NoAns_{key}") or 0.0
    unanswerable = get_score(best, "NoAns_total")
    total = get_score(best, "total")
    if reached is not None and answered is not None and answered < MIN_ANSWERED and unanswerable and total:
        abstaining = 100 * unanswerable / total
        if reached <= abstaining:
            but = " but to abstain" if silent > MIN_SILENT else ""
            return [
                f"{NOTHING_LEARNT}{but}: {name} is {now}, measured at {measured}, with {format_decimal(answered, 1)} "
                f"on answerable questions; never answering reaches {format_decimal(abstaining, 1)}."
            ]
    if before is None or reached is None:
        return [f"Fine-tuning reached {name} {now} at {measured}; the score before it is not known."]
    if reached == before:
        words = f"{NOTHING_LEARNT}: {name} is {now}, as before fine-tuning, measured at {measured}."
        return [words, *_describe_loss(best, baseline)]
    # Two scores of few examples differ by chance too.
    differs, proof = _test_change(run, baseline, best, key)
    if not differs:
        words = f"{name[0].upper()}{name[1:]} is {now} after fine-tuning and {then} before, measured at {measured}"
        return [f"{words}: not distinguishable, because {proof}."]
    verb = "raised" if reached > before else "lowered"
    words = f"Fine-tuning {verb} {name} from {then} to {now}, measured at {measured}"
    return [f"{words}; {proof}." if proof else f"{words}."]


def _test_change(run: Run, before: EvalRecord | None, after: EvalRecord, key: str) -> tuple[bool, str]:
    """Return whether two scores differ by more than chance, and the proof: a paired bootstrap over their examples.

    Without the predictions, scores whose 95 % intervals overlap do not differ; there is no proof that others do.
    """
    change = compute_paired_difference([(run, after)], [(run, before)], metric=key)
    if change and change.low is not None and change.high is not None and change.p_value is not None:
        edges = f"{format_signed(change.low, 1)} to {format_signed(change.high, 1)}"
        proof = f"the 95 % interval of the change on the same examples is {edges}, p {format_p_value(change.p_value)}"
        return not change.low <= 0 <= change.high, proof
    now = compute_score_interval(after, key)
    then = compute_score_interval(before, key) if before else None
    if now and then and now[0] <= then[1] and then[0] <= now[1]:
        return False, "the 95 % intervals overlap"
    return True, ""


def _describe_loss(best: EvalRecord, baseline: EvalRecord | None) -> list[str]:
    """Describe the change of the evaluation loss, for runs whose score is uninformative."""
    now = best.loss
    then = baseline.loss if baseline else None
    if now is None or then is None or round(now, 3) == round(then, 3):  # equal in print
        return []
    verb = "fell" if now < then else "rose"
    return [f"The evaluation loss {verb} from {format_decimal(then, 3)} to {format_decimal(now, 3)} nats per token."]
