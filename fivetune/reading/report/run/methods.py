"""A run for a paper: a paragraph on its methods, and its scores as a table.

In: a Run. Out: a paragraph, which ends with the names of the facts that the records lack, and Results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from fivetune.reading.card.facts import iter_splits
from fivetune.reading.compare.changes import compute_paired_difference
from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page.parts import Measured, Results
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_duration,
    format_percent,
    format_plain,
    format_plural,
    format_setting,
    format_signed,
)
from fivetune.reading.report.run.scores import (
    choose_best_eval,
    compute_score_interval,
    find_baseline_eval,
    get_score_label,
    list_score_keys,
)
from fivetune.rundir.figures import compute_energy_joules
from fivetune.rundir.records import Run, SplitSummary
from fivetune.scores.metrics import find_absent, get_metric_name, load_metric
from fivetune.tasks import is_higher_better, load_run_task
from fivetune.values import get_nested

JOULES_PER_WH = 3600
OTHER_SETTINGS = (
    ("model", "freeze"),
    ("model", "unfreeze"),
    ("train", "param_groups"),
    ("train", "layer_decay"),
    ("train", "ema"),
    ("loss", "label_smoothing"),
    ("loss", "z_loss"),
    ("loss", "class_weights"),
    ("loss", "r_drop"),
    ("distill", "teacher"),
    ("checkpoint", "average_best"),
)
"""Settings that change the training and are off unless a recipe sets them."""
MARKS = {"*": "marks a change of which the 95 % interval (paired bootstrap over the examples) excludes 0"}


def describe_methods(run: Run) -> str:
    """Describe model, data, optimization, selection, evaluation, machine and versions of a run in one paragraph.

    Facts that the records do not hold are left out of their sentences; the last sentence names them.
    """
    facts = _Facts(run)
    sentences = [
        *_iter_model_sentences(run, facts),
        *_iter_data_sentences(run, facts),
        *_iter_optimization_sentences(run, facts),
        *_iter_evaluation_sentences(run, facts),
        *_iter_machine_sentences(run, facts),
    ]
    if facts.missing:
        sentences.append(f"Not recorded: {', '.join(facts.missing)}.")
    return " ".join(sentences)


class _Facts:
    """The settings of a run, and the names of the facts that were asked for and are unknown."""

    def __init__(self, run: Run) -> None:
        self._config = run.config
        self.missing: list[str] = []

    def get(self, *keys: str) -> Any:
        """Return a setting, None if it is not set."""
        return get_nested(self._config, *keys)

    def check(self, name: str, value: Any) -> bool:
        """Whether a fact is known; an unknown one is missing from then on."""
        if value is None or value == "":
            self.missing.append(name)
            return False
        return True

    def list_options(self, section: str, *left_out: str) -> list[str]:
        """List the options of a section that are set: ["warmup_fraction 0.05"]."""
        table: Mapping[str, Any] = self.get(section) or {}
        words: list[str] = []
        for key, value in table.items():
            if key not in ("name", *left_out) and value not in (None, "", [], {}):
                words.append(f"{key} {format_setting(f'{section}.{key}', value)}")
        return words


def _iter_model_sentences(run: Run, facts: _Facts) -> Iterator[str]:
    machine = run.machine
    model = facts.get("model", "path") or facts.get("model", "config")
    name = PurePath(str(model)).name if facts.check("model", model) else "A model"
    revision = facts.get("model", "revision")
    if revision:
        name += f" (revision {revision})"
    words = f"{name} was fine-tuned"
    if facts.get("model", "init") == "random":
        words = f"{name} was trained from random weights"
    if facts.check("number of parameters", machine.num_parameters):
        words += f" ({format_count(machine.num_parameters)} parameters"
        trained = machine.num_trained_parameters
        if trained and trained != machine.num_parameters:
            words += f", of which {format_count(trained)} were trained"
        words += ")"
    task = facts.get("task", "name")
    if facts.check("task", task):
        words += f" on the task {task}"
    yield f"{words}."
    adapter = facts.get("model", "adapter", "name")
    if adapter:
        options = facts.get("model", "adapter")
        shown = [
            f"{key} {format_plain(value)}" for key, value in options.items() if key != "name" and value is not None
        ]
        yield f"The adapter was {adapter} ({', '.join(shown)})."


def _iter_data_sentences(run: Run, facts: _Facts) -> Iterator[str]:
    found = list(iter_splits(run))
    if not facts.check("data", found or None):
        return
    for name, summary in found:
        yield from _describe_set(name, summary, facts)
    split = run.data.eval.split if run.data.eval else None
    if split and split.share:
        groups = f", by groups of {split.group_column}" if split.group_column else ""
        yield (
            f"The evaluation set was a random {format_percent(split.share)} of the records (seed {split.seed}){groups}"
            "; related records stayed together."
        )


def _describe_set(name: str, summary: SplitSummary, facts: _Facts) -> Iterator[str]:
    """Yield a sentence on the size of a set and one on its limits."""
    sources = ", ".join(source if ":" in source else PurePath(source).name for source in summary.source)
    of = f" ({sources})" if sources else ""
    if facts.check(f"size of the {name} data", summary.num_examples):
        words = f"The {name} data{of} had {format_plural(summary.num_examples, 'example')}"
        if summary.num_records_kept is not None:
            words += f" from {format_plural(summary.num_records_kept, 'record')}"
        if summary.num_skipped:
            words += f", with {format_plural(summary.num_skipped, 'record')} left out"
        yield f"{words}."
    limits: list[str] = []
    for what, most, num_longer in (
        ("Inputs", summary.max_input_tokens, summary.num_examples_clipped),
        ("targets", summary.max_target_tokens, summary.num_clipped_targets),
    ):
        if facts.check(f"limit of {what.lower()} of the {name} data", most):
            longer = "" if num_longer is None else f" ({format_count(num_longer)} were longer)"
            limits.append(f"{what} were cut at {format_count(most)} tokens{longer}")
    if limits:
        words = " and ".join(limits)
        if summary.num_cut_into_windows:
            num = format_plural(summary.num_cut_into_windows, "record")
            words += f", but {num} were read in overlapping windows"
        if summary.num_answers_lost:
            words += f"; {format_plural(summary.num_answers_lost, 'input')} lost the answer"
        yield f"{words[0].upper()}{words[1:]}."


def _iter_optimization_sentences(run: Run, facts: _Facts) -> Iterator[str]:
    plan = run.plan
    optimizer = facts.get("optimizer", "name")
    if facts.check("optimizer", optimizer):
        rate = plan.lr if plan and plan.lr else facts.get("optimizer", "lr")
        words = f"The optimizer was {optimizer}"
        if rate is not None:
            words += f" with a peak learning rate of {format_plain(rate)}"
        options = facts.list_options("optimizer", "lr", "preset")
        yield f"{words} ({', '.join(options)})." if options else f"{words}."
    schedule = facts.get("schedule", "name")
    if facts.check("schedule", schedule):
        options = facts.list_options("schedule")
        words = f"The schedule was {schedule}"
        yield f"{words} ({', '.join(options)})." if options else f"{words}."
    batch = None
    if run.steps and run.steps[0].step == 1:
        batch = run.steps[0].num_examples_seen
    batch = batch or facts.get("train", "global_batch_size")
    words = "Training"
    if facts.check("number of steps", run.status.step or None):
        words += f" took {format_plural(run.status.step, 'step')}"
    if facts.check("examples per step", batch):
        words += f" of {format_plural(batch, 'example')}"
        train = run.data.train
        if train and train.num_examples and run.status.step:
            words += f", {format_decimal(run.status.step * batch / train.num_examples)} epochs"
    details: list[str] = []
    for title, value in (
        ("precision", run.machine.precision),
        ("dropout", facts.get("model", "dropout")),
        ("gradient norm clipped at", facts.get("train", "max_grad_norm")),
        ("seed", facts.get("run", "seed")),
    ):
        if value is not None:
            details.append(f"{title} {format_plain(value)}")
    yield f"{words} ({', '.join(details)})." if details else f"{words}."
    planned = plan.num_steps if plan else 0
    if run.status.state == "finished" and 0 < run.status.step < planned:
        yield f"It stopped early: {format_plural(planned, 'step')} were planned."
    others: list[str] = []
    for section, key in OTHER_SETTINGS:
        value = facts.get(section, key)
        if value:
            others.append(f"{section}.{key} {format_setting(f'{section}.{key}', value)}")
    if others:
        yield f"Other settings: {', '.join(others)}."
    if run.status.state not in ("finished", ""):
        yield f"The run did not finish: it is {run.status.state}."


def _iter_evaluation_sentences(run: Run, facts: _Facts) -> Iterator[str]:
    best = run.status.best
    if facts.check("selection of the checkpoint", best):
        assert best is not None
        choice = "highest" if best.metric != "loss" and is_higher_better([run.config], best.metric) else "lowest"
        yield (
            f"The checkpoint with the {choice} {get_score_label(best.metric)} on the evaluation data was kept "
            f"(step {format_count(best.step)}), so that this score is biased upwards."
        )
    record = choose_best_eval(run)
    if not facts.check("evaluation", record):
        return
    assert record is not None
    beams = facts.get("eval", "num_beams") or 1
    search = "greedy search" if beams == 1 else f"beam search with {beams} beams"
    yield (
        f"It was evaluated on {format_plural(record.num_examples, 'example')}; answers were generated by {search} with "
        f"at most {format_plural(record.max_new_tokens, 'new token')}."
    )
    task = load_run_task(run.config)
    sources: dict[str, None] = {}
    for spec in task.metrics if task else ():
        source = "" if find_absent([spec]) else f" ({load_metric(spec).source})"
        sources[f"{get_metric_name(spec)}{source}"] = None
    if facts.check("metrics", list(sources) or None):
        yield f"Metrics: {'; '.join(sources)}."


def _iter_machine_sentences(run: Run, facts: _Facts) -> Iterator[str]:
    machine = run.machine
    world = machine.strategy.world_size or 1
    device = machine.device.name or machine.device.kind
    words = "The run"
    if facts.check("device", device):
        words += f" used {world} x {device}" if world > 1 or machine.device.kind == "cuda" else f" used {device}"
        if world > 1 and machine.strategy.name:
            words += f" by {machine.strategy.name}"
        if machine.host.num_cores:
            words += f" on a host with {format_plural(machine.host.num_cores, 'core')}"
    if facts.check("time", run.status.seconds):
        words += f" and took {format_duration(run.status.seconds)}, evaluations included"
    energy = compute_energy_joules(run.telemetry)
    if facts.check("energy", energy):
        assert energy is not None
        words += f"; the devices used {format_decimal(energy / JOULES_PER_WH)} Wh"
    yield f"{words}."
    versions = [f"{name} {text}" for name, text in machine.versions.items() if text]
    if facts.check("versions", versions or None):
        commit = machine.git.commit
        at = f" (commit {commit[:10]}{', changed' if machine.git.dirty else ''})" if commit else ""
        yield f"Software: {', '.join(versions)}{at}."


def build_run_results(run: Run) -> Results:
    """Build the scores of the best evaluation beside those before fine-tuning, with the paragraph on methods."""
    best = choose_best_eval(run)
    baseline = find_baseline_eval(run)
    if baseline is best:
        baseline = None
    rows: list[list[str | Measured]] = []
    for key in list_score_keys([best]) if best else ():
        now = get_score(best, key)
        then = get_score(baseline, key)
        row: list[str | Measured] = [get_score_label(key)]
        row.append(build_measured(then, compute_score_interval(baseline, key) if baseline else None))
        row.append(build_measured(now, compute_score_interval(best, key) if best else None))
        change = None if now is None or then is None else now - then
        paired = compute_paired_difference([(run, best)], [(run, baseline)], metric=key) if baseline else None
        row.append(build_measured(change, paired.interval if paired else None, is_signed=True))
        rows.append(row)
    num = format_plural(best.num_examples, "evaluation example") if best else "no evaluation"
    after = f"after {format_plural(best.step, 'step')}" if best else ""
    caption = (
        f"Scores of {run.name} {after} on {num}, with 95 % intervals over the examples where they are known; the "
        "change is against the model before fine-tuning."
    )
    header = ("score", "before fine-tuning", "fine-tuned", "change")
    return Results(" ".join(caption.split()), header, rows, marks=MARKS, methods=describe_methods(run))


def build_measured(value: float | None, interval: tuple[float, float] | None, *, is_signed: bool = False) -> Measured:
    """Build a score with its interval, or a change, which is marked where its interval excludes 0."""
    write = format_signed if is_signed else format_decimal
    if interval is None:
        return Measured(write(value), value)
    low, high = interval
    mark = "*" if is_signed and not low <= 0 <= high else ""
    return Measured(write(value), value, interval, f"{write(low, 1)} to {write(high, 1)}", mark)
