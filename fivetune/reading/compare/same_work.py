"""Checks that all runs did the same work under the same conditions: a sentence for every unintended difference.

In: variants with their runs. Out: warnings, the most important first: incomparable results, different work, different
conditions; and the runs whose times other load distorts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, find_plugin_setting
from fivetune.reading.compare.measures import find_best_metric_eval
from fivetune.reading.compare.records import Variant
from fivetune.reading.compare.variants import ABSENT, get_seed, select_work_settings
from fivetune.reading.diagnosis.speed import OTHER_LOAD_SHARE
from fivetune.rundir.figures import (
    HostLoad,
    compute_host_load,
    count_tokens,
    select_comparable_evals,
    select_evals_by_step,
)
from fivetune.rundir.records import Run, SplitSummary, StepRecord
from fivetune.types import Verdict

MAX_NAMED = 4  # names in one sentence
OVERLAP_SECONDS = 5.0  # apparent overlap of consecutive runs, because their starts are rounded
PLACEMENT = ("launch", "strategy")  # sections that count as one factor: devices and division of the work
EVAL_CHOICE = ("data.train", "data.eval", "data.eval_share", "data.eval_seed", "data.group_column")  # which examples
MODEL = ("model.path", "model.config", "model.tokenizer", "model.init", "model.revision")  # one factor: the model

NamedRun = tuple[str, Run]
"""The name of a variant, and one of its runs."""


@dataclass(frozen=True, slots=True)
class ComparedFact:
    """A property of a run, and the sections or settings that explain its differences if they are varied."""

    name: str
    read: Callable[[Run], object]
    explained_by: tuple[str, ...] = ()


def check_same_work(
    variants: Sequence[Variant], verdicts: Mapping[str, Sequence[Sequence[Verdict]]], *, varied: Sequence[str]
) -> Iterator[str]:
    """Yield all warnings about variants.

    Args:
        verdicts: on each run of a variant, by the variant's name.
        varied: settings whose differences are intended.
    """
    compared = [variant for variant in variants if variant.runs]
    runs = _list_runs(compared)
    if not runs:
        return
    # Results that are not what was asked for: another number of processes, an unfinished training, other seeds.
    for variant in compared:
        for run, found in zip(variant.runs, verdicts[variant.name], strict=True):
            yield from [f"{run.name}: {one.message} {one.advice}" for one in found if one.rule == "world_size"]
    for _, run in runs:
        if (state := run.status.state) != "finished":
            last = _get_last_step(run)
            done = f"{_format_value(last.step if last else 0)} of {_format_value(run.num_steps)} steps"
            yield f"{run.name} is {state or 'in an unknown state'} after {done}: its figures end there."
    seeds = {variant.name: sorted(_list_seeds(variant)) for variant in variants}
    if len({tuple(own) for own in seeds.values()}) > 1:
        values = "; ".join(f"{name}: {_join_names(map(str, own)) or 'none'}" for name, own in seeds.items())
        yield f"Variants differ in seeds: {values}. Differences are taken over the seeds that both sides have."
    # Different work.
    for fact in WORK:
        yield from _describe_differences(fact, runs, varied)
    yield from _check_within_seeds(runs, varied)
    yield from _check_settings(runs, varied)
    yield from _check_confounding(compared, varied)
    # Different conditions.
    for fact in CONDITIONS:
        if not _find_causes(fact.explained_by, varied):
            yield from _describe_differences(fact, runs, varied)
    for package in dict.fromkeys(name for _, run in runs for name in run.machine.versions):
        fact = ComparedFact(f"the version of {package}", lambda run, package=package: run.machine.versions.get(package))
        yield from _describe_differences(fact, runs, ())
    if resumed := [run.name for _, run in runs if run.status.num_resumes]:
        verb, times = ("was", "its times include") if len(resumed) == 1 else ("were", "their times include")
        yield f"{_join_names(resumed)} {verb} interrupted and resumed: {times} the cost of starting again."
    for first, second, host in _list_overlaps(compared):
        yield f"{first} and {second} ran at the same time on {host}, which distorts their times."
    if loads := _measure_heavy_loads(compared):
        most = max(loads, key=lambda name: loads[name].other_cores)
        load = loads[most]
        yield (
            f"Other programs kept cores busy while {_join_names(loads)} ran, up to {load.other_cores:.1f} of "
            f"{load.num_cores} cores beside {most}: this distorts their times."
        )


# --- facts ---


def _list_runs(variants: Iterable[Variant]) -> list[NamedRun]:
    return [(variant.name, run) for variant in variants for run in variant.runs]


def _list_seeds(variant: Variant) -> list[int]:
    return [seed for run in variant.runs if (seed := get_seed(run)) is not None]


def _get_last_step(run: Run) -> StepRecord | None:
    return run.steps[-1] if run.steps else None


def _compute_examples_per_update(run: Run) -> float | None:
    last = _get_last_step(run)
    return round(last.num_examples_seen / last.step, 2) if last and last.step else None


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


def _describe_commit(run: Run) -> str | None:
    git = run.machine.git
    return git.commit and f"{git.commit[:10]}{' with changes' if git.dirty else ''}"


def describe_other_eval_sets(variants: Sequence[Variant], metric: str) -> str:
    """Describe why the best scores of runs cannot be compared, in sentences; "" if they are of the same examples.

    Another tokenizer, task or length limit changes the fingerprint of the same examples, so that fingerprints are
    compared only where such settings agree; else files, split and number of examples.
    """
    runs = [(name, run) for name, run in _list_runs(variants) if find_best_metric_eval(run, metric)]
    encodings: set[str] = set()
    for _, run in runs:
        settings = sorted(select_work_settings(run).items())
        kept = [pair for pair in settings if pair[0].startswith(("task.", "model.", "data."))]
        encodings.add(repr([pair for pair in kept if pair[0] not in EVAL_CHOICE]))
    is_known = all(run.data.eval and run.data.eval.fingerprint for _, run in runs)  # data.json may be lost

    def describe(run: Run) -> str:
        record, data = find_best_metric_eval(run, metric), run.data.eval
        words = [f"{record.num_examples:,} examples"] if record else []
        if is_known and data:
            words += [f"of {_join_names(Path(each).name for each in data.source)}"] if data.source else []
            words += [f"split by share {data.split.share} and seed {data.split.seed}"] if data.split else []
            words += [f"fingerprint {(data.fingerprint or '')[:8]}"] if len(encodings) == 1 else []
        return ", ".join(words)

    found = _describe_differences(ComparedFact("the examples that they were evaluated on", describe), runs, ())
    advice = "Evaluate them on the same examples to compare them."
    return f"Scores are not compared, and no variant is named as the best. {found[0]} {advice}" if found else ""


LENGTH = ("train.num_steps", "train.num_epochs", "train.global_batch_size", "train.batch_size", "launch")
CONTENT = ("data", "task", "model")

WORK = (
    ComparedFact("updates", lambda run: run.steps[-1].step if run.steps else None, LENGTH),
    ComparedFact("examples seen", lambda run: run.steps[-1].num_examples_seen if run.steps else None, LENGTH),
    ComparedFact("examples per update", _compute_examples_per_update, LENGTH),
    ComparedFact("the training set", lambda run: _describe_split(run.data.train), CONTENT),
    ComparedFact("the evaluation set", lambda run: _describe_split(run.data.eval), CONTENT),
    ComparedFact("examples of the last evaluation", _count_evaluated_examples, (*CONTENT, "eval")),
    ComparedFact("the version of the task", _describe_task, ("task",)),
)
ORDER = ("train.global_batch_size", "train.batch_size", *CONTENT)  # settings that determine the order of examples

FORWARD = ("train.forward", "device", "model", "strategy")
TOKENS = ComparedFact(
    "tokens trained on", lambda run: sum(map(count_tokens, run.steps)) if run.steps else None, (*LENGTH, *CONTENT)
)
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
    ComparedFact("the commit", _describe_commit),
)


# --- sentences ---


def _find_causes(causes: Sequence[str], varied: Sequence[str]) -> list[str]:
    """Return the varied settings among the given settings or sections."""
    return [key for key in varied if any(key == cause or key.startswith(f"{cause}.") for cause in causes)]


def _describe_differences(fact: ComparedFact, runs: Sequence[NamedRun], varied: Sequence[str]) -> list[str]:
    """Return a sentence if runs differ in a fact, with the varied settings that explain the difference.

    The sentence names a variant instead of its runs if these agree.
    """
    groups: dict[str, list[NamedRun]] = {}
    for name, run in runs:
        groups.setdefault(_format_value(fact.read(run)), []).append((name, run))
    if len(groups) < 2:
        return []
    num_groups = Counter(name for members in groups.values() for name in {name for name, _ in members})
    values: list[str] = []
    for value, members in groups.items():
        shown = dict.fromkeys(name if num_groups[name] == 1 else run.name for name, run in members)
        values.append(f"{value} in {_join_names(shown)}")
    sentence = f"Runs differ in {fact.name}: {'; '.join(values)}."
    if causes := _find_causes(fact.explained_by, varied):
        verb = "is" if len(causes) == 1 else "are"
        sentence += f" This follows from {_join_names(causes)}, which {verb} varied."
    return [sentence]


def _format_value(value: object) -> str:
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
        every[MAX_NAMED:] = [f"{len(every) - MAX_NAMED} more"]
    return " and ".join(filter(None, (", ".join(every[:-1]), *every[-1:])))


# --- work ---


def _check_within_seeds(runs: Sequence[NamedRun], varied: Sequence[str]) -> Iterator[str]:
    """Yield warnings of runs of one seed that trained on other tokens, or on other examples in some update."""
    by_seed: dict[int | None, list[NamedRun]] = {}
    for name, run in runs:
        by_seed.setdefault(get_seed(run), []).append((name, run))
    for seed, own in by_seed.items():
        fact = replace(TOKENS, name=f"{TOKENS.name} (seed {seed})")
        if found := _describe_differences(fact, own, varied):
            yield from found
            break  # the other seeds differ for the same reason
    if _find_causes(ORDER, varied):
        return  # different data or batches have their own warning
    for seed, own in by_seed.items():
        first = own[0][1]
        for _, run in own[1:]:
            for step, (ours, theirs) in enumerate(zip(first.steps, run.steps, strict=False), start=1):
                if _count_step_tokens(ours) != _count_step_tokens(theirs):
                    yield (
                        f"{first.name} and {run.name} have seed {seed} and yet trained on different examples "
                        f"from update {step:,} on: the order of the data differs."
                    )
                    break


def _count_step_tokens(step: StepRecord) -> tuple[int, int]:
    return step.num_input_tokens, step.num_target_tokens


# --- settings ---


def _check_settings(runs: Sequence[NamedRun], varied: Sequence[str]) -> Iterator[str]:
    """Yield warnings of settings that differ without being varied; the options of a varied plugin may differ."""
    tables = {id(run): select_work_settings(run) for _, run in runs}
    free = _list_varied_plugins(varied)
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        is_varied = any(key == one or key.startswith(f"{one}.") for one in varied)  # model.unfreeze: {encoder: 100}
        if not is_varied and find_plugin_setting(key) not in free:
            fact = ComparedFact(f"the setting {key}", lambda run, key=key: tables[id(run)].get(key, ABSENT))
            yield from _describe_differences(fact, runs, ())


def _list_varied_plugins(varied: Sequence[str]) -> set[str]:
    return {section for section in (*PLUGIN_SECTIONS, *NESTED_PLUGINS) if f"{section}.name" in varied}


def _check_confounding(variants: Sequence[Variant], varied: Sequence[str]) -> Iterator[str]:
    """Yield warnings of confounding: a variant that differs from every other one in two or more factors at once.

    Settings of a plugin, of the model or of the placement are one factor.
    """
    tables = {variant.name: select_work_settings(variant.runs[0]) for variant in variants}
    plugins = _list_varied_plugins(varied)
    as_one: dict[str, str] = {}
    for key in varied:
        section = find_plugin_setting(key)
        as_one[key] = section if section in plugins or key in MODEL else key
        if section in PLACEMENT:
            as_one[key] = "strategy"
    for name, ours in tables.items():
        factors: list[list[str]] = []
        for theirs in (table for other, table in tables.items() if other != name):
            differing = (as_one[key] for key in varied if ours.get(key, ABSENT) != theirs.get(key, ABSENT))
            factors.append(list(dict.fromkeys(differing)))
        least = min(factors, key=len) if factors else []
        if len(least) > 1:
            yield (
                f"{name} differs from every other variant in at least {len(least)} settings at once "
                f"({_join_names(least)}): their effects cannot be separated."
            )


# --- conditions ---


def find_disturbed_runs(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return the names of runs that shared their machine with other runs or programs, which distorts their times."""
    overlapping = (name for first, second, _ in _list_overlaps(variants) for name in (first, second))
    return tuple(dict.fromkeys((*overlapping, *_measure_heavy_loads(variants))))


def _list_overlaps(variants: Sequence[Variant]) -> list[tuple[str, str, str]]:
    """List (run, run, host) of every two runs that used one host at the same time."""
    spans: list[tuple[float, float, str, str]] = []
    for _, run in _list_runs(variants):
        host, seconds = next((record.host for record in run.telemetry if record.host), None), run.status.seconds
        try:
            started = datetime.strptime(run.status.started or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
        except ValueError:
            continue
        if host is not None and seconds is not None and not run.status.num_resumes:
            spans.append((started, started + seconds, host, run.name))
    return [
        (name, other, host)
        for (_, end, host, name), (start, _, other_host, other) in pairwise(sorted(spans))
        if host == other_host and start < end - OVERLAP_SECONDS
    ]


def _measure_heavy_loads(variants: Sequence[Variant]) -> dict[str, HostLoad]:
    """Return the host load by run, where other programs used more than OTHER_LOAD_SHARE of the cores."""
    loads = {run.name: load for _, run in _list_runs(variants) if (load := compute_host_load(run.telemetry))}
    return {name: load for name, load in loads.items() if load.other_cores > OTHER_LOAD_SHARE * load.num_cores}
