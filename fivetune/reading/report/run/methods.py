"""A run for a paper: a paragraph on its methods, and its scores as a table.

In: a Run. Out: a paragraph, in which facts that the records lack are marked, and Results.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path, PurePath
from typing import Any, cast

from jinja2 import ChainableUndefined, Environment, PackageLoader, Template, Undefined

from fivetune.reading.card.facts import format_metric_source, iter_splits
from fivetune.reading.compare.changes import compute_paired_difference
from fivetune.reading.compare.measures import get_score
from fivetune.reading.report.page.parts import Measured, Results
from fivetune.reading.report.page.wording import (
    format_count,
    format_decimal,
    format_duration,
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
from fivetune.rundir import CONFIG, read_machine, read_run_config, read_status
from fivetune.rundir.figures import JOULES_PER_WH, compute_energy_joules
from fivetune.rundir.records import Run
from fivetune.scores.metrics import get_metric_name
from fivetune.tasks import is_higher_better, load_run_task
from fivetune.values import get_nested

OTHER_SETTINGS = (
    "model.freeze",
    "model.unfreeze",
    "train.param_groups",
    "train.layer_decay",
    "train.ema",
    "loss.label_smoothing",
    "loss.z_loss",
    "loss.class_weights",
    "loss.r_drop",
    "distill.teacher",
    "checkpoint.average_best",
)
"""Settings that change the training and are off unless a recipe sets them."""
MARKS = {"*": "marks a change of which the 95 % interval (paired bootstrap over the examples) excludes 0"}


def describe_methods(run: Run) -> str:
    """Describe model, data, optimization, selection, evaluation, machine and versions of a run in one paragraph.

    The words are in templates/methods.txt. A fact that the records do not hold is marked: [energy not recorded].
    """
    best = run.status.best
    batch = get_nested(run.config, "train", "global_batch_size")
    if run.steps and run.steps[0].step == 1:
        batch = run.steps[0].num_examples_seen
    num_examples = run.data.train.num_examples if run.data.train else None
    others: list[str] = []
    for key in OTHER_SETTINGS:
        value = get_nested(run.config, *key.split("."))
        if value:
            others.append(f"{key} {format_setting(key, value)}")
    task = load_run_task(run.config)
    record = choose_best_eval(run)
    metrics: list[str] = []
    for spec in task.metrics if task else ():
        metrics.append(f"{get_metric_name(spec)}{format_metric_source(spec, run, record)}")
    is_highest = best is not None and best.metric != "loss" and is_higher_better([run.config], best.metric)
    templates: list[str] = []
    parts: Mapping[str, Any] = get_nested(run.config, "task", "parts") or {"": get_nested(run.config, "task")}
    for table in parts.values():
        template = get_nested(table, "inputs") or get_nested(table, "template")
        if template:
            templates.append(f'"{template}"'.replace("\n", "\\n"))
    energy = compute_energy_joules(run.telemetry)
    text = _build_template().render(
        config=run.config,
        base=describe_base(run.config, run.machine.working_directory or "", before=run.status.started or ""),
        templates=templates,
        machine=run.machine,
        plan=run.plan,
        status=run.status,
        splits=list(iter_splits(run)),
        batch=batch,
        epochs=format_decimal(run.status.step * batch / num_examples) if batch and num_examples else "",
        others=others,
        best=best,
        choice="highest" if is_highest else "lowest",
        metric=get_score_label(best.metric) if best else "",
        record=record,
        metrics=metrics,
        time=None if run.status.seconds is None else format_duration(run.status.seconds),
        energy=None if energy is None else f"{format_decimal(energy / JOULES_PER_WH)} Wh",
        versions=[f"{name} {version}" for name, version in run.machine.versions.items() if version],
    )
    text = " ".join(text.split()).replace(" ()", "")
    return f"T{text[1:]}" if text.startswith("the ") else text  # of the model of an earlier run


def describe_base(config: Mapping[str, Any], directory: str, *, before: str) -> str:
    """Describe the model from which a run started: its name, or the earlier run that made it, with that run's base.

    Args:
        directory: working directory of the run.
        before: the start of the run. An earlier run that started later has been replaced since, and is not described.
    """
    given: str = get_nested(config, "model", "path") or get_nested(config, "model", "config") or ""
    name = _find_last_part(given)
    if name == "model":  # of an earlier run
        name = f"the local model {PurePath(given).parent.name}/{name}"
    path = Path(directory, given).expanduser()
    if not given or not path.is_dir():
        return name
    # The model's folder is in the run directory, or is the run directory.
    for folder in (path, path.parent):
        if not (folder / CONFIG).is_file():
            continue
        started = read_status(folder).started or ""
        if not started or (before and datetime.fromisoformat(started) >= datetime.fromisoformat(before)):
            break
        earlier = read_run_config(folder)
        base = describe_base(earlier, read_machine(folder).working_directory or "", before=started)
        task = get_nested(earlier, "task", "name")
        files = ", ".join(map(_find_last_part, get_nested(earlier, "data", "train") or ()))
        return f"the model of the earlier run {folder.name} (there, {base} was trained on the task {task} with {files})"
    return name


@cache
def _build_template() -> Template:
    environment = Environment(
        loader=PackageLoader("fivetune.reading.report.run"),
        autoescape=False,  # plain text, which every page and table escapes
        undefined=ChainableUndefined,  # a run without settings has no section either
    )
    filters = {"known": _format_known, "options": _list_options, "last_part": _find_last_part}
    environment.filters |= filters  # pyright: ignore[reportUnknownMemberType]
    return environment.get_template("methods.txt")


def _format_known(value: Any, name: str = "value") -> str:
    """Format a fact; an unknown one becomes a mark with its name."""
    if value is None or value == "" or isinstance(value, Undefined):
        return f"[{name} not recorded]"
    return format_count(value) if type(value) is int else format_plain(value)


def _list_options(section: Any, *left_out: str) -> str:
    """List the options of a section of settings that are set: "weight_decay 0, beta1 0.9"."""
    words: list[str] = []
    table = cast("Mapping[str, Any]", section if isinstance(section, Mapping) else {})
    for key, value in table.items():
        if key not in left_out and value not in (None, "", [], {}):
            words.append(f"{key} {format_setting(key, value)}")
    return ", ".join(words)


def _find_last_part(source: Any) -> str:
    """Return the file of a path, and the whole name of a data set of the hub."""
    text = str(source or "")
    return text if ":" in text else PurePath(text).name


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
    return Measured(write(value), value, interval, f"{write(low)} to {write(high)}", mark)
