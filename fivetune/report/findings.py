"""What a run's records say in plain sentences: the verdict, and what to be wary of.

In: a Run and the evaluations that count. Out: sentences, most important first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from fivetune.report.lengths import num_rows
from fivetune.report.rates import of_written, rate_warnings
from fivetune.report.scores import (
    Eval,
    baseline_eval,
    best_eval,
    label,
    main_evals,
    main_score,
    points,
    predictions_of,
    score,
)
from fivetune.report.series import by_step, column
from fivetune.report.wording import change, duration, fixed, grouped, percent, plain, plural, share, whole
from fivetune.types import Run
from fivetune.values import dig, number

UNKNOWN_LIMIT = 0.001
FROZEN_STEPS = 5
STARVED_LIMIT = 0.01
BASELINE = "before fine-tuning"


def verdict(run: Run, beside: Sequence[Run]) -> list[str]:
    """A few sentences: what came out, against what, and how the run ended."""
    return [*_outcome(run), *_beside(run, beside), _ending(run)]


def _outcome(run: Run) -> list[str]:
    best, baseline, key = best_eval(run), baseline_eval(run), main_score(run)
    if best is None or key is None:
        return ["No evaluation was made, so nothing is known about quality."]
    reached, before = score(best, key), score(baseline, key)
    name, now, then = label(key), points(reached, 1), points(before, 1)
    if best["step"] == 0 and len(main_evals(run)) == 1:
        return [f"Only the model before fine-tuning was evaluated: {name} {then}."]
    if best["step"] == 0:
        return [f"No evaluation is better than the one before fine-tuning: {name} {then}. Fine-tuning has not helped."]
    if before is None or reached is None:
        return [f"Fine-tuning reached {name} {now} at step {whole(best['step'])}; the score before it is not known."]
    verb = "raised" if reached > before else "lowered" if reached < before else "left unchanged"
    moved = f"{verb} {name} from {then} to {now}" if reached != before else f"left {name} unchanged at {now}"
    return [
        f"Fine-tuning {moved}, measured at step {whole(best['step'])} on {plural(best.get('num_examples'), 'example')}."
    ]


def _beside(run: Run, beside: Sequence[Run]) -> list[str]:
    key, best = main_score(run), best_eval(run)
    sentences = []
    for other in beside:
        theirs, ours = score(best_eval(other), key or ""), score(best, key or "")
        if key is None or theirs is None or ours is None:
            sentences.append(f"The run {other.name} has no score to compare with.")
            continue
        side = "below" if theirs < ours else "above" if theirs > ours else "the same"
        gap = f"{points(abs(ours - theirs), 1)} {side}" if theirs != ours else side
        sentences.append(f"Beside it, the run {other.name} reaches {label(key)} {points(theirs, 1)}: {gap}.")
    return sentences


def _ending(run: Run) -> str:
    state, why = dig(run.status, "state"), dig(run.status, "why")
    step, planned = dig(run.status, "step"), dig(run.status, "num_steps")
    done = f"{plural(step, 'step')} of {whole(planned)}" if step != planned else plural(step, "step")
    reason = f": {plain(why).rstrip('.')}" if why else ""
    ends = {
        "finished": f"The run finished after {done} in {duration(dig(run.status, 'seconds'))}.",
        "failed": f"The run failed after {done}{reason}.",
        "interrupted": f"The run was interrupted after {done}{reason}; it can be resumed.",
        "pruned": f"The search stopped the run after {done}, as others were better{reason}.",
        "preparing": "The run is marked as preparing: it has not made a step yet, or it was killed.",
        "running": f"The run is marked as running, after {done}: it goes on, or it was killed.",
    }
    return ends.get(str(state), f"How the run ended is not known (state {plain(state)}).")


def warnings(run: Run, beside: Sequence[Run] = ()) -> list[str]:
    """What the records themselves give reason to doubt."""
    best = best_eval(run)
    return [
        *_numeric_warnings(run.steps),
        *_starvation(run),
        *_abstaining(run, best),
        *rate_warnings(of_written(best, predictions_of(run, best))),
        *_size_warnings(run, best, beside),
        *_data_warnings(run.data or {}),
    ]


def _starvation(run: Run) -> list[str]:
    """Steps that waited for their batches."""
    part = share(dig(run.status, "num_starved_steps"), len(run.steps))
    if part is None or part <= STARVED_LIMIT:
        return []
    return [
        f"{percent(part)} of the steps had to wait for their batches: reading is slower than training. "
        "Put data.cache_dir on a faster disk, or leave a core to the thread that assembles batches."
    ]


def _numeric_warnings(steps: Sequence[dict[str, Any]]) -> list[str]:
    records = by_step(steps)
    missing = [record["step"] for record in records if number(record.get("loss")) is None]
    sentences = []
    if missing:
        sentences.append(
            f"The loss was not finite in {plural(len(missing), 'step')} of {whole(len(records))}, "
            f"first in step {whole(missing[0])}. The curves have gaps there."
        )
    frozen, first = _longest_freeze(records)
    if frozen >= FROZEN_STEPS:
        sentences.append(
            f"The loss stayed exactly the same for {whole(frozen)} steps from step {whole(first)} on: "
            "the weights did not move. Check the learning rate, the precision and what is frozen."
        )
    return sentences


def _longest_freeze(records: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Length and first step of the longest stretch of exactly equal losses."""
    longest, first, place = 0, 0, 0
    for loss, stretch in groupby(column(records, "loss")):
        length = len(list(stretch))
        if loss is not None and length > longest:
            longest, first = length, records[place]["step"]
        place += length
    return longest, first


def _abstaining(run: Run, best: Eval | None) -> list[str]:
    """The best evaluation answers nothing, or less well than an earlier one, and gained by abstaining."""
    answered, left_out = score(best, "HasAns_f1"), score(best, "NoAns_f1")
    if best is None or answered is None or left_out is None:
        return []
    if answered < 1 and left_out > 50:
        return [
            f"The score was gained by abstaining alone: F1 on answerable questions is {fixed(answered, 1)}, on "
            f"unanswerable ones {fixed(left_out, 1)}. The model does not answer yet. Train longer."
        ]
    drops = []
    for earlier in main_evals(run):
        had, abstained = score(earlier, "HasAns_f1"), score(earlier, "NoAns_f1")
        if earlier["step"] >= best["step"] or had is None or abstained is None:
            continue
        if had - answered > 1 and left_out - abstained > 1:
            drops.append((had - answered, earlier["step"], had, abstained))
    if not drops:
        return []
    _, step, had, abstained = max(drops)
    return [
        f"Part of the score was gained by abstaining: since step {whole(step)} F1 on answerable questions fell "
        f"from {fixed(had, 1)} to {fixed(answered, 1)}, on unanswerable ones it rose from {fixed(abstained, 1)} to "
        f"{fixed(left_out, 1)}."
    ]


def _size_warnings(run: Run, best: Eval | None, beside: Sequence[Run]) -> list[str]:
    """Evaluations that do not measure the same thing."""
    sizes = Counter(record.get("num_examples") for record in main_evals(run))
    sentences = []
    if len(sizes) > 1:
        listed = ", ".join(sorted((whole(num) for num in sizes), key=lambda text: (len(text), text)))
        sentences.append(f"The evaluations differ in size ({listed} examples): their scores differ by chance as well.")
    for other in beside:
        theirs = best_eval(other)
        if best and theirs and theirs.get("num_examples") != best.get("num_examples"):
            sentences.append(
                f"The run {other.name} was evaluated on {plural(theirs.get('num_examples'), 'example')}, "
                f"this one on {whole(best.get('num_examples'))}."
            )
    return sentences


def _data_warnings(data: dict[str, Any]) -> list[str]:
    sentences = []
    for split in data:
        facts = data[split]
        lost, bad = number(dig(facts, "num_answers_lost")), number(dig(facts, "num_skipped_bad"))
        clipped = number(dig(facts, "num_clipped_targets"))
        if lost:
            part = percent(share(lost, num_rows(facts)))
            sentences.append(
                f"{split}: in {plural(lost, 'example')} ({part}) truncation cut the answer out of the input. "
                "Raise data.max_input_tokens."
            )
        if clipped:
            sentences.append(f"{split}: {plural(clipped, 'target')} longer than data.max_target_tokens lost the end.")
        if bad:
            read = plural(dig(facts, "num_read"), "record")
            sentences.append(f"{split}: {whole(bad)} of {read} could not be used and were left out.")
        unknown = share(dig(facts, "num_unknown_tokens"), dig(facts, "num_input_tokens"))
        if unknown is not None and unknown > UNKNOWN_LIMIT:
            sentences.append(f"{split}: {percent(unknown, 2)} of the input tokens are unknown to the tokenizer.")
    return sentences


def own_warnings(run: Run) -> list[str]:
    """What the run itself warned of, less what pre-flight says of truncation where the counts of data.json say it."""
    return grouped(text for text in run.warnings if not (run.data and text.startswith("truncation: ")))


def difference(reached: float | None, before: float | None) -> str:
    """How much a score moved: +3.50."""
    return change(None if reached is None or before is None else reached - before)
