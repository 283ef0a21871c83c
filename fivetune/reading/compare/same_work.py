"""Checks that all runs did the same work under the same conditions: a sentence for every unintended difference.

In: variants with their runs. Out: warnings, the most important first: incomparable results, different work, different
conditions; and the runs whose times other load distorts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from fivetune.rundir.records import EvalRecord, Run, SplitSummary, StepRecord
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
        verdicts: verdicts on each run of a variant, by the variant's name.
        varied: settings whose differences are intended.
    """
    compared = [variant for variant in variants if variant.runs]
    runs = _list_runs(compared)
    if not runs:
        return
    # Results that are not what was asked for: another number of processes, an unfinished training, other seeds.
    for variant in compared:
        for run, found in zip(variant.runs, verdicts[variant.name], strict=True):
            for one in found:
                if one.rule == "world_size":
                    yield f"{run.name}: {one.message} {one.advice}"
    for _, run in runs:
        state = run.status.state
        if state != "finished":
            last_step = run.steps[-1].step if run.steps else 0
            done = f"{_format_value(last_step)} of {_format_value(run.num_steps)} steps"
            yield f"{run.name} is {state or 'in an unknown state'} after {done}: its figures end there."
    yield from _check_seeds(variants)
    # Different work.
    for fact in WORK:
        yield from _describe_fact(fact, runs, varied)
    yield from _check_within_seeds(runs, varied)
    yield from _check_settings(runs, varied)
    yield from _check_confounding(compared, varied)
    # Different conditions.
    for fact in CONDITIONS:
        if not _find_causes(fact.explained_by, varied):
            yield from _describe_fact(fact, runs, varied)
    packages: dict[str, None] = {}
    for _, run in runs:
        packages |= dict.fromkeys(run.machine.versions)
    for package in packages:
        versions = [run.machine.versions.get(package) for _, run in runs]
        yield from _describe_differences(f"the version of {package}", runs, versions)
    resumed = [run.name for _, run in runs if run.status.num_resumes]
    if resumed:
        verb, times = ("was", "its times include") if len(resumed) == 1 else ("were", "their times include")
        yield f"{_join_names(resumed)} {verb} interrupted and resumed: {times} the cost of starting again."
    for first, second, host in _list_overlaps(compared):
        yield f"{first} and {second} ran at the same time on {host}, which distorts their times."
    loads = _measure_heavy_loads(compared)
    if loads:
        most = max(loads, key=lambda name: loads[name].other_cores)
        load = loads[most]
        yield (
            f"Other programs kept cores busy while {_join_names(loads)} ran, up to {load.other_cores:.1f} of "
            f"{load.num_cores} cores beside {most}: this distorts their times."
        )


def _check_seeds(variants: Sequence[Variant]) -> Iterator[str]:
    """Yield a warning if the variants have other seeds."""
    seeds: dict[str, list[int]] = {}
    for variant in variants:
        known = [get_seed(run) for run in variant.runs]
        seeds[variant.name] = sorted(seed for seed in known if seed is not None)
    every = list(seeds.values())
    if all(own == every[0] for own in every):
        return
    values: list[str] = []
    for name, own in seeds.items():
        values.append(f"{name}: {_join_names(map(str, own)) or 'none'}")
    yield (f"Variants differ in seeds: {'; '.join(values)}. Differences are taken over the seeds that both sides have.")


# --- facts ---


def _list_runs(variants: Iterable[Variant]) -> list[NamedRun]:
    return [(variant.name, run) for variant in variants for run in variant.runs]


def _compute_examples_per_update(run: Run) -> float | None:
    last = run.steps[-1] if run.steps else None
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
    runs: list[NamedRun] = []
    records: list[EvalRecord] = []
    encodings: set[str] = set()
    for name, run in _list_runs(variants):
        record = find_best_metric_eval(run, metric)
        if record is None:
            continue
        runs.append((name, run))
        records.append(record)
        encoding: list[tuple[str, object]] = []
        for key, value in sorted(select_work_settings(run).items()):
            if key.startswith(("task.", "model.", "data.")) and key not in EVAL_CHOICE:
                encoding.append((key, value))
        encodings.add(repr(encoding))
    is_known = all(run.data.eval and run.data.eval.fingerprint for _, run in runs)  # data.json may be lost
    descriptions: list[str] = []
    for (_, run), record in zip(runs, records, strict=True):
        words = [f"{record.num_examples:,} examples"]
        data = run.data.eval
        if is_known and data:
            if data.source:
                words.append(f"of {_join_names(Path(each).name for each in data.source)}")
            if data.split:
                words.append(f"split by share {data.split.share} and seed {data.split.seed}")
            if len(encodings) == 1:
                words.append(f"fingerprint {(data.fingerprint or '')[:8]}")
        descriptions.append(", ".join(words))
    found = _describe_differences("the examples that they were evaluated on", runs, descriptions)
    if not found:
        return ""
    advice = "Evaluate them on the same examples to compare them."
    return f"Scores are not compared, and no variant is named as the best. {found[0]} {advice}"


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


def _describe_fact(fact: ComparedFact, runs: Sequence[NamedRun], varied: Sequence[str]) -> list[str]:
    """Return a sentence if runs differ in a fact, with the varied settings that explain the difference."""
    values = [fact.read(run) for _, run in runs]
    return _describe_differences(fact.name, runs, values, _find_causes(fact.explained_by, varied))


def _describe_differences(
    what: str, runs: Sequence[NamedRun], values: Sequence[object], causes: Sequence[str] = ()
) -> list[str]:
    """Return a sentence if runs have several values, which names a variant instead of its runs if these agree.

    Args:
        values: value of each run.
        causes: varied settings that explain the differences.
    """
    groups: dict[str, list[NamedRun]] = {}
    values_of: dict[str, set[str]] = {}  # by variant
    for (name, run), value in zip(runs, values, strict=True):
        words = _format_value(value)
        groups.setdefault(words, []).append((name, run))
        values_of.setdefault(name, set()).add(words)
    if len(groups) < 2:
        return []
    told: list[str] = []
    for words, members in groups.items():
        shown = dict.fromkeys(name if len(values_of[name]) == 1 else run.name for name, run in members)
        told.append(f"{words} in {_join_names(shown)}")
    sentence = f"Runs differ in {what}: {'; '.join(told)}."
    if causes:
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
    if len(every) < 2:
        return "".join(every)
    return f"{', '.join(every[:-1])} and {every[-1]}"


# --- work ---


def _check_within_seeds(runs: Sequence[NamedRun], varied: Sequence[str]) -> Iterator[str]:
    """Yield warnings of runs of one seed that trained on other tokens, or on other examples in some update."""
    by_seed: dict[int | None, list[NamedRun]] = {}
    for name, run in runs:
        by_seed.setdefault(get_seed(run), []).append((name, run))
    causes = _find_causes(TOKENS.explained_by, varied)
    for seed, own in by_seed.items():
        values = [TOKENS.read(run) for _, run in own]
        found = _describe_differences(f"{TOKENS.name} (seed {seed})", own, values, causes)
        if found:
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
    tables = [select_work_settings(run) for _, run in runs]
    keys: dict[str, None] = {}
    for table in tables:
        keys |= dict.fromkeys(table)
    free = _list_varied_plugins(varied)
    for key in keys:
        is_varied = bool(_find_causes(varied, [key]))  # also below a varied one, as in model.unfreeze: {encoder: 100}
        if not is_varied and find_plugin_setting(key) not in free:
            values = [table.get(key, ABSENT) for table in tables]
            yield from _describe_differences(f"the setting {key}", runs, values)


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
        least: list[str] | None = None  # factors in which the variant differs from the most similar one
        for other, theirs in tables.items():
            if other == name:
                continue
            differing = [as_one[key] for key in varied if ours.get(key, ABSENT) != theirs.get(key, ABSENT)]
            factors = list(dict.fromkeys(differing))
            if least is None or len(factors) < len(least):
                least = factors
        if least and len(least) > 1:
            yield (
                f"{name} differs from every other variant in at least {len(least)} settings at once "
                f"({_join_names(least)}): their effects cannot be separated."
            )


# --- conditions ---


def find_disturbed_runs(variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return the names of runs that shared their machine with other runs or programs, which distorts their times."""
    disturbed: dict[str, None] = {}
    for first, second, _ in _list_overlaps(variants):
        disturbed |= {first: None, second: None}
    return tuple(disturbed | dict.fromkeys(_measure_heavy_loads(variants)))


def _list_overlaps(variants: Sequence[Variant]) -> list[tuple[str, str, str]]:
    """List (run, run, host) of every two runs that used one host at the same time."""
    spans: list[tuple[float, float, str, str]] = []
    for _, run in _list_runs(variants):
        host = next((record.host for record in run.telemetry if record.host), None)
        seconds = run.status.seconds
        try:
            started = datetime.strptime(run.status.started or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
        except ValueError:
            continue
        # The seconds of a resumed run leave out its pauses, so that its end is unknown.
        if host is not None and seconds is not None and not run.status.num_resumes:
            spans.append((started, started + seconds, host, run.name))
    overlaps: list[tuple[str, str, str]] = []
    for (_, end, host, name), (start, _, other_host, other) in pairwise(sorted(spans)):
        if host == other_host and start < end - OVERLAP_SECONDS:
            overlaps.append((name, other, host))
    return overlaps


def _measure_heavy_loads(variants: Sequence[Variant]) -> dict[str, HostLoad]:
    """Return the host load by run, where other programs used more than OTHER_LOAD_SHARE of the cores."""
    heavy: dict[str, HostLoad] = {}
    for _, run in _list_runs(variants):
        load = compute_host_load(run.telemetry)
        if load and load.other_cores > OTHER_LOAD_SHARE * load.num_cores:
            heavy[run.name] = load
    return heavy
