"""Checks that all runs did the same work under the same conditions: a sentence for every unintended difference.

In: variants with their runs. Out: warnings, the most important first: incomparable results, different work, different
conditions; and the runs whose times other load distorts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, find_plugin_setting
from fivetune.reading.compare.measures import find_best_metric_eval
from fivetune.reading.compare.records import Variant
from fivetune.reading.compare.variants import ABSENT, get_seed, select_work_settings
from fivetune.reading.diagnosis.speed import OTHER_LOAD_SHARE
from fivetune.rundir.figures import HostLoad, compute_host_load, select_comparable_evals, select_evals_by_step
from fivetune.rundir.records import MachineRecord, Run, SplitSummary, StepRecord
from fivetune.types import Verdict

MAX_NAMED = 4  # names in one sentence
OVERLAP_SECONDS = 5.0  # apparent overlap of consecutive runs, because their starts are rounded
PLACEMENT = ("launch", "strategy")  # sections that count as one factor: devices and division of the work
EVAL_CHOICE = ("data.train", "data.eval", "data.eval_share", "data.eval_seed", "data.group_column")  # which examples
MODEL = ("model.path", "model.config", "model.tokenizer", "model.init", "model.revision")  # one factor: the model


@dataclass(frozen=True, slots=True)
class ComparedFact:
    """A property of a run, and the sections or settings that explain its differences if they are varied."""

    name: str
    read: Callable[[Run], object]
    explained_by: tuple[str, ...] = ()


def check_same_work(
    variants: Sequence[Variant], verdicts: Mapping[str, Sequence[Sequence[Verdict]]], *, varied: Sequence[str]
) -> list[str]:
    """Return all warnings about variants.

    Args:
        verdicts: on each run of a variant, by the variant's name.
        varied: settings whose differences are intended.
    """
    compared = [variant for variant in variants if variant.runs]
    if not compared:
        return []
    names = _map_runs_to_variants(compared)
    return [
        *_check_world_sizes(compared, verdicts),
        *_check_unfinished(compared),
        *_check_seeds(variants),
        *(line for fact in WORK for line in _describe_differences(fact, compared, names, varied, always=True)),
        *(line for fact in WORK_OF_A_SEED for line in _compare_within_seeds(fact, compared, names, varied)),
        *_check_data_order(compared, varied),
        *_check_settings(compared, names, varied),
        *_check_confounding(compared, varied),
        *(line for fact in CONDITIONS for line in _describe_differences(fact, compared, names, varied, always=False)),
        *_check_versions(compared, names),
        *_check_resumes(compared),
        *_check_overlaps(compared),
        *_check_other_load(compared),
    ]


# --- facts ---


def _get_last_step(run: Run) -> StepRecord | None:
    return run.steps[-1] if run.steps else None


def _count_updates(run: Run) -> int | None:
    last = _get_last_step(run)
    return last.step if last else None


def _count_examples_seen(run: Run) -> int | None:
    last = _get_last_step(run)
    return last.num_examples_seen if last else None


def _compute_examples_per_update(run: Run) -> float | None:
    last = _get_last_step(run)
    return round(last.num_examples_seen / last.step, 2) if last and last.step else None


def _count_tokens(run: Run) -> int | None:
    return sum(step.num_input_tokens + step.num_target_tokens for step in run.steps) if run.steps else None


def _describe_split(summary: SplitSummary | None) -> str | None:
    if summary is None or not summary.fingerprint:
        return None
    return f"{summary.fingerprint[:8]} with {summary.num_examples} examples"


def _count_evaluated_examples(run: Run) -> int | None:
    evals = select_comparable_evals(run.evals)
    return evals[-1].num_examples if evals else None


def _describe_task(run: Run) -> str | None:
    found = {(record.task, record.task_version) for record in select_evals_by_step(run.evals)}
    return ", ".join(f"{name} {version}" for name, version in sorted(found)) or None


def _describe_commit(machine: MachineRecord) -> str | None:
    commit = machine.git.commit
    return commit and f"{commit[:10]}{' with changes' if machine.git.dirty else ''}"


def describe_other_eval_sets(variants: Sequence[Variant], metric: str) -> str:
    """Describe why the best scores of runs cannot be compared, in sentences; "" if they are of the same examples.

    Another tokenizer, task or length limit changes the fingerprint of the same examples, so that fingerprints are
    compared only where such settings agree; else files, split and number of examples.
    """
    scored = [
        replace(one, runs=tuple(run for run in one.runs if find_best_metric_eval(run, metric))) for one in variants
    ]
    runs = [run for variant in scored for run in variant.runs]
    is_same_encoding = len({tuple(sorted(_select_encoding(run).items())) for run in runs}) == 1
    is_known = all(run.data.eval and run.data.eval.fingerprint for run in runs)  # data.json may be lost

    def describe(run: Run) -> str:
        record, data = find_best_metric_eval(run, metric), run.data.eval
        words = [f"{record.num_examples:,} examples"] if record else []
        if is_known and data:
            words += [f"of {_join_names(Path(each).name for each in data.source)}"] if data.source else []
            words += [f"split by share {data.split.share} and seed {data.split.seed}"] if data.split else []
            words += [f"fingerprint {(data.fingerprint or '')[:8]}"] if is_same_encoding else []
        return ", ".join(words)

    fact = ComparedFact("the examples that they were evaluated on", describe)
    found = _describe_differences(fact, scored, _map_runs_to_variants(scored), (), always=True)
    advice = "Evaluate them on the same examples to compare them."
    return f"Scores are not compared, and no variant is named as the best. {found[0]} {advice}" if found else ""


def _select_encoding(run: Run) -> dict[str, str]:
    """Select the settings, as text, that change the fingerprint of the same evaluation examples."""
    settings = select_work_settings(run)
    keys = [key for key in settings if key.startswith(("task.", "model.", "data.")) and key not in EVAL_CHOICE]
    return {key: repr(settings[key]) for key in keys}


LENGTH = ("train.num_steps", "train.num_epochs", "train.global_batch_size", "train.batch_size", "launch")
CONTENT = ("data", "task", "model")

WORK = (
    ComparedFact("updates", _count_updates, LENGTH),
    ComparedFact("examples seen", _count_examples_seen, LENGTH),
    ComparedFact("examples per update", _compute_examples_per_update, LENGTH),
    ComparedFact("the training set", lambda run: _describe_split(run.data.train), CONTENT),
    ComparedFact("the evaluation set", lambda run: _describe_split(run.data.eval), CONTENT),
    ComparedFact("examples of the last evaluation", _count_evaluated_examples, (*CONTENT, "eval")),
    ComparedFact("the version of the task", _describe_task, ("task",)),
)
ORDER = ("train.global_batch_size", "train.batch_size", *CONTENT)  # settings that determine the order of examples

FORWARD = ("train.forward", "device", "model", "strategy")
WORK_OF_A_SEED = (ComparedFact("tokens trained on", _count_tokens, (*LENGTH, *CONTENT)),)
CONDITIONS = (
    ComparedFact("the kind of device", lambda run: run.machine.device.kind, ("device",)),
    ComparedFact("the device", lambda run: run.machine.device.name, ("device",)),
    ComparedFact("the processor", lambda run: run.machine.host.cpu),
    ComparedFact("processor cores", lambda run: run.machine.host.num_cores),
    ComparedFact("the precision", lambda run: run.machine.precision, ("train.precision", "device")),
    ComparedFact("the forward", lambda run: run.machine.forward.kind, FORWARD),
    ComparedFact("the attention", lambda run: run.machine.attention, FORWARD),
    ComparedFact("threads", lambda run: run.machine.num_threads, ("train.num_threads", "launch", "device")),
    ComparedFact("the number of parameters", lambda run: run.machine.num_parameters, ("model", "task")),
    ComparedFact("the commit", lambda run: _describe_commit(run.machine)),
)


# --- sentences ---


def _map_runs_to_variants(variants: Sequence[Variant]) -> dict[int, str]:
    """Map the id() of each run to the name of its variant."""
    return {id(run): variant.name for variant in variants for run in variant.runs}


def _find_causes(causes: Sequence[str], varied: Sequence[str]) -> list[str]:
    """Return the varied settings among the given settings or sections."""
    return [key for key in varied if any(key == cause or key.startswith(f"{cause}.") for cause in causes)]


def _describe_differences(
    fact: ComparedFact, variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str], *, always: bool
) -> list[str]:
    """Return a sentence if runs differ in a fact; if a varied setting explains the difference, only with `always`.

    The sentence names a variant instead of its runs if these agree.
    """
    groups: dict[str, list[Run]] = {}
    for run in (run for variant in variants for run in variant.runs):
        groups.setdefault(_format_value(fact.read(run)), []).append(run)
    if len(groups) < 2:
        return []
    causes = _find_causes(fact.explained_by, varied)
    if causes and not always:
        return []
    because = (
        f" This follows from {_join_names(causes)}, which {'is' if len(causes) == 1 else 'are'} varied."
        if causes
        else ""
    )
    num_groups = Counter(name for members in groups.values() for name in {names[id(run)] for run in members})
    shown = {
        value: dict.fromkeys(names[id(run)] if num_groups[names[id(run)]] == 1 else run.name for run in members)
        for value, members in groups.items()
    }
    values = "; ".join(f"{value} in {_join_names(members)}" for value, members in shown.items())
    return [f"Runs differ in {fact.name}: {values}.{because}"]


def _compare_within_seeds(
    fact: ComparedFact, variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str]
) -> list[str]:
    """Compare a fact that depends on the seed between runs of one seed; a sentence for the first seed that differs."""
    for seed, runs in _group_by_seed(variants).items():
        own = [Variant(names[id(run)], {}, (run,), measures={}) for run in runs]
        named = replace(fact, name=f"{fact.name} (seed {seed})")
        if found := _describe_differences(named, own, names, varied, always=True):
            return found
    return []


def _group_by_seed(variants: Sequence[Variant]) -> dict[int | None, list[Run]]:
    by_seed: dict[int | None, list[Run]] = {}
    for variant in variants:
        for run in variant.runs:
            by_seed.setdefault(get_seed(run), []).append(run)
    return by_seed


def _format_value(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _join_names(names: Iterable[str]) -> str:
    """Join names to a list in a sentence, shortened to the first few.

    >>> _join_names(["a", "b", "c"]), _join_names("abcdef")
    ('a, b and c', 'a, b, c, d and 2 more')
    """
    every = list(names)
    if len(every) > MAX_NAMED:
        return f"{', '.join(every[:MAX_NAMED])} and {len(every) - MAX_NAMED} more"
    return f"{', '.join(every[:-1])} and {every[-1]}" if len(every) > 1 else "".join(every)


# --- work ---


def _check_world_sizes(variants: Sequence[Variant], verdicts: Mapping[str, Sequence[Sequence[Verdict]]]) -> list[str]:
    """Warn of runs with another number of processes than requested, by the rule of `fivetune diagnose`."""
    sentences: list[str] = []
    for variant in variants:
        for run, found in zip(variant.runs, verdicts[variant.name], strict=True):
            sentences += [f"{run.name}: {one.message} {one.advice}" for one in found if one.rule == "world_size"]
    return sentences


def _check_unfinished(variants: Sequence[Variant]) -> list[str]:
    return [
        f"{run.name} is {run.status.state or 'in an unknown state'} after {_format_value(_count_updates(run) or 0)} of "
        f"{_format_value(run.num_steps)} steps: its figures end there."
        for variant in variants
        for run in variant.runs
        if run.status.state != "finished"
    ]


def _check_seeds(variants: Sequence[Variant]) -> list[str]:
    """Warn of variants with different seeds, because differences are taken over the shared seeds only."""
    seeds = {
        variant.name: sorted(seed for run in variant.runs if (seed := get_seed(run)) is not None)
        for variant in variants
    }
    if len({tuple(own) for own in seeds.values()}) < 2:
        return []
    values = "; ".join(f"{name}: {_join_names(map(str, own)) or 'none'}" for name, own in seeds.items())
    return [f"Variants differ in seeds: {values}. Differences are taken over the seeds that both sides have."]


def _check_data_order(variants: Sequence[Variant], varied: Sequence[str]) -> list[str]:
    """Warn of runs of one seed with a different order of examples, detected by the tokens of each update."""
    if _find_causes(ORDER, varied):
        return []  # different data or batches have their own warning
    sentences: list[str] = []
    for seed, runs in _group_by_seed(variants).items():
        for run in runs[1:]:
            pairs = zip(_list_update_tokens(runs[0]), _list_update_tokens(run), strict=False)
            first = next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)
            if first is not None:
                sentences.append(
                    f"{runs[0].name} and {run.name} have seed {seed} and yet trained on different examples "
                    f"from update {first:,} on: the order of the data differs."
                )
    return sentences


def _list_update_tokens(run: Run) -> list[tuple[int, int]]:
    return [(step.num_input_tokens, step.num_target_tokens) for step in run.steps]


# --- settings ---


def _check_settings(variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str]) -> list[str]:
    """Warn of settings that differ without being varied; the options of a varied plugin may differ."""
    runs = [run for variant in variants for run in variant.runs]
    tables = {id(run): select_work_settings(run) for run in runs}
    free = {section for section in (*PLUGIN_SECTIONS, *NESTED_PLUGINS) if f"{section}.name" in varied}
    sentences: list[str] = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        is_varied = any(key == one or key.startswith(f"{one}.") for one in varied)  # model.unfreeze: {encoder: 100}
        if is_varied or find_plugin_setting(key) in free:
            continue
        fact = ComparedFact(f"the setting {key}", lambda run, key=key: tables[id(run)].get(key, ABSENT))
        sentences += _describe_differences(fact, variants, names, (), always=True)
    return sentences


def _check_confounding(variants: Sequence[Variant], varied: Sequence[str]) -> list[str]:
    """Warn of confounding: a variant that differs from every other one in two or more factors at once."""
    sentences: list[str] = []
    for variant in variants:
        factors = [_list_differing_factors(variant, other, varied) for other in variants if other is not variant]
        least = min(factors, key=len) if factors else []
        if len(least) > 1:
            sentences.append(
                f"{variant.name} differs from every other variant in at least {len(least)} settings at once "
                f"({_join_names(least)}): their effects cannot be separated."
            )
    return sentences


def _list_differing_factors(a: Variant, b: Variant, varied: Sequence[str]) -> list[str]:
    """List the varied factors in which two variants differ; settings of a plugin, model or placement are one factor."""
    ours, theirs = select_work_settings(a.runs[0]), select_work_settings(b.runs[0])
    plugin = {section for section in (*PLUGIN_SECTIONS, *NESTED_PLUGINS) if f"{section}.name" in varied}
    factors: dict[str, None] = {}
    for key in varied:
        if ours.get(key, ABSENT) != theirs.get(key, ABSENT):
            section = find_plugin_setting(key)
            as_one = "strategy" if section in PLACEMENT else section if section in plugin or key in MODEL else key
            factors[as_one] = None
    return list(factors)


# --- conditions ---


def _check_versions(variants: Sequence[Variant], names: Mapping[int, str]) -> list[str]:
    packages = dict.fromkeys(name for variant in variants for run in variant.runs for name in run.machine.versions)
    facts = [
        ComparedFact(f"the version of {package}", lambda run, package=package: run.machine.versions.get(package))
        for package in packages
    ]
    return [line for fact in facts for line in _describe_differences(fact, variants, names, (), always=True)]


def _check_resumes(variants: Sequence[Variant]) -> list[str]:
    resumed = [run.name for variant in variants for run in variant.runs if run.status.num_resumes]
    if not resumed:
        return []
    verb, times = ("was", "its times include") if len(resumed) == 1 else ("were", "their times include")
    return [f"{_join_names(resumed)} {verb} interrupted and resumed: {times} the cost of starting again."]


def find_disturbed_runs(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return the names of runs that shared their machine with other runs or programs, which distorts their times."""
    overlapping = (name for first, second, _ in _list_overlaps(variants) for name in (first, second))
    return tuple(dict.fromkeys((*overlapping, *_measure_heavy_loads(variants))))


def _check_overlaps(variants: Sequence[Variant]) -> list[str]:
    return [
        f"{first} and {second} ran at the same time on {host}, which distorts their times."
        for first, second, host in _list_overlaps(variants)
    ]


def _list_overlaps(variants: Sequence[Variant]) -> list[tuple[str, str, str]]:
    """List (run, run, host) of every two runs that used one host at the same time."""
    spans = sorted(span for variant in variants for run in variant.runs if (span := _get_time_interval(run)))
    return [
        (name, other, host)
        for (_, end, host, name), (start, _, other_host, other) in pairwise(spans)
        if host == other_host and start < end - OVERLAP_SECONDS
    ]


def _get_time_interval(run: Run) -> tuple[float, float, str, str] | None:
    """Return start and end (seconds since 1970), host and name of a run; None if one is unknown."""
    host = next((record.host for record in run.telemetry if record.host), None)
    seconds = run.status.seconds
    try:
        started = datetime.strptime(run.status.started or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
    if host is None or seconds is None or run.status.num_resumes:
        return None
    return started, started + seconds, host, run.name


def _check_other_load(variants: Sequence[Variant]) -> list[str]:
    loads = _measure_heavy_loads(variants)
    if not loads:
        return []
    most = max(loads, key=lambda name: loads[name].other_cores)
    load = loads[most]
    return [
        f"Other programs kept cores busy while {_join_names(loads)} ran, up to {load.other_cores:.1f} of "
        f"{load.num_cores} cores beside {most}: this distorts their times."
    ]


def _measure_heavy_loads(variants: Sequence[Variant]) -> dict[str, HostLoad]:
    """Return the host load by run, where other programs used more than OTHER_LOAD_SHARE of the cores."""
    loads = {
        run.name: load for variant in variants for run in variant.runs if (load := compute_host_load(run.telemetry))
    }
    return {name: load for name, load in loads.items() if load.other_cores > OTHER_LOAD_SHARE * load.num_cores}
