"""Did all runs do the same work, under the same conditions? Whatever differs, but for what is varied, is a sentence.

In: variants with their runs. Out: warnings, what matters most first: results that cannot be compared, work that
differs, conditions that differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from fivetune import rundir
from fivetune.compare.measures import series
from fivetune.compare.variants import ABSENT, seed_of, settings_of
from fivetune.config_layers import PLUGIN_SECTIONS
from fivetune.types import Run, Variant
from fivetune.values import dig, known, number

MAX_NAMED = 4  # names in one sentence
OTHERS_SHARE = 0.2  # of a host's cores; a fifth of the machine taken by others shows in every time
OVERLAP_SECONDS = 5.0  # two runs one after the other may seem to overlap by the rounding of their starts
PLACEMENT = ("launch", "strategy")  # sections that are one matter: how many devices, and how they share the work
MODEL = ("model.path", "model.config", "model.tokenizer", "model.init", "model.revision")  # one matter: which model


class Fact(NamedTuple):
    """Something that a run tells, and the sections or settings that explain it where they are varied."""

    name: str
    of: Callable[[Run], Any]
    explained_by: tuple[str, ...] = ()


def warnings_of(variants: Sequence[Variant], *, varied: Sequence[str]) -> list[str]:
    """All warnings about variants whose `varied` settings are meant to differ."""
    told = [variant for variant in variants if variant.runs]
    if not told:
        return []
    names = _names(told)
    return [
        *_world_sizes(told),
        *_unfinished(told),
        *_missing_seeds(variants),
        *(line for fact in WORK for line in _differences(fact, told, names, varied, always=True)),
        *(line for fact in WORK_OF_A_SEED for line in _by_seed(fact, told, names, varied)),
        *_orders(told, varied),
        *_settings(told, names, varied),
        *_confounded(told, varied),
        *(line for fact in CONDITIONS for line in _differences(fact, told, names, varied, always=False)),
        *_versions(told, names),
        *_resumed(told),
        *_overlaps(told),
        *_other_load(told),
    ]


# --- facts ---


def _last(run: Run) -> Mapping[str, Any]:
    return run.steps[-1] if run.steps else {}


def _per_update(run: Run) -> float | None:
    seen, updates = number(_last(run).get("num_examples_seen")), number(_last(run).get("step"))
    return round(seen / updates, 2) if seen is not None and updates else None


def _tokens(run: Run) -> int | None:
    counts = [number(step.get(key)) for step in run.steps for key in ("num_input_tokens", "num_target_tokens")]
    return None if not counts or None in counts else int(sum(known(counts)))


def _set(split: str) -> Callable[[Run], Any]:
    def fingerprint(run: Run) -> Any:
        summary = dig(run.data, split) or {}
        known = summary.get("fingerprint")
        return f"{str(known)[:8]} with {summary.get('num_examples')} examples" if known else None

    return fingerprint


def _evaluated(run: Run) -> Any:
    evals = series(run)
    return evals[-1].get("num_examples") if evals else None


def _task(run: Run) -> Any:
    found = {(e.get("task"), e.get("task_version")) for e in rundir.own_evals(run.evals)}
    return ", ".join(f"{name} {version}" for name, version in sorted(found, key=str)) or None


def _commit(run: Run) -> Any:
    commit = dig(run.machine, "git", "commit")
    return commit and f"{str(commit)[:10]}{' with changes' if dig(run.machine, 'git', 'dirty') else ''}"


def _machine(*path: str) -> Callable[[Run], Any]:
    return lambda run: dig(run.machine, *path)


LENGTH = ("train.num_steps", "train.num_epochs", "train.global_batch_size", "train.batch_size", "launch")
CONTENT = ("data", "task", "model")

WORK = (
    Fact("updates", lambda run: _last(run).get("step"), LENGTH),
    Fact("examples seen", lambda run: _last(run).get("num_examples_seen"), LENGTH),
    Fact("examples per update", _per_update, LENGTH),
    Fact("the training set", _set("train"), CONTENT),
    Fact("the evaluation set", _set("eval"), CONTENT),
    Fact("examples of the last evaluation", _evaluated, (*CONTENT, "eval")),
    Fact("the version of the task", _task, ("task",)),
)
ORDER = ("train.global_batch_size", "train.batch_size", *CONTENT)  # what decides which example comes when

WORK_OF_A_SEED = (Fact("tokens trained on", _tokens, (*LENGTH, *CONTENT)),)
CONDITIONS = (
    Fact("the kind of device", _machine("device", "kind"), ("device",)),
    Fact("the device", _machine("device", "name"), ("device",)),
    Fact("the processor", _machine("host", "cpu")),
    Fact("processor cores", _machine("host", "num_cores")),
    Fact("the precision", _machine("precision"), ("train.precision", "device")),
    Fact("the forward", _machine("forward", "kind"), ("train.forward", "device", "model", "strategy")),
    Fact("the attention", _machine("attention"), ("train.forward", "device", "model", "strategy")),
    Fact("threads", _machine("num_threads"), ("train.num_threads", "launch", "device")),
    Fact("the number of parameters", _machine("num_parameters"), ("model", "task")),
    Fact("the commit", _commit),
)


# --- sentences ---


def _names(variants: Sequence[Variant]) -> dict[int, str]:
    """Variant of each run, by the run's id()."""
    return {id(run): variant.name for variant in variants for run in variant.runs}


def _explaining(causes: Sequence[str], varied: Sequence[str]) -> list[str]:
    """The varied settings that are among some settings or sections."""
    return [key for key in varied if any(key == cause or key.startswith(f"{cause}.") for cause in causes)]


def _differences(
    fact: Fact, variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str], *, always: bool
) -> list[str]:
    """A sentence if runs differ in a fact; of facts that a varied setting explains only if `always`.

    Runs are called by their variant, where that is alike in the fact.
    """
    groups: dict[str, list[Run]] = {}
    for run in (run for variant in variants for run in variant.runs):
        groups.setdefault(_shown(fact.of(run)), []).append(run)
    if len(groups) < 2:
        return []
    causes = _explaining(fact.explained_by, varied)
    if causes and not always:
        return []
    because = (
        f" This follows from {_joined(causes)}, which {'is' if len(causes) == 1 else 'are'} varied." if causes else ""
    )
    alike = Counter(name for members in groups.values() for name in {names[id(run)] for run in members})
    called = {
        value: dict.fromkeys(names[id(run)] if alike[names[id(run)]] == 1 else run.name for run in members)
        for value, members in groups.items()
    }
    told = "; ".join(f"{value} in {_joined(members)}" for value, members in called.items())
    return [f"Not the same for all: {fact.name}: {told}.{because}"]


def _by_seed(fact: Fact, variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str]) -> list[str]:
    """Facts that depend on the seed are compared between runs of one seed; the first seed that differs is told."""
    for seed, runs in _runs_by_seed(variants).items():
        own = [Variant(names[id(run)], {}, (run,), measures={}) for run in runs]
        named = fact._replace(name=f"{fact.name} (seed {seed})")
        if found := _differences(named, own, names, varied, always=True):
            return found
    return []


def _runs_by_seed(variants: Sequence[Variant]) -> dict[int | None, list[Run]]:
    by_seed: dict[int | None, list[Run]] = {}
    for variant in variants:
        for run in variant.runs:
            by_seed.setdefault(seed_of(run), []).append(run)
    return by_seed


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _joined(names: Iterable[str]) -> str:
    """Names in a row, the first few of many.

    >>> _joined(["a", "b", "c"]), _joined("abcdef")
    ('a, b and c', 'a, b, c, d and 2 more')
    """
    every = list(names)
    if len(every) > MAX_NAMED:
        return f"{', '.join(every[:MAX_NAMED])} and {len(every) - MAX_NAMED} more"
    return f"{', '.join(every[:-1])} and {every[-1]}" if len(every) > 1 else "".join(every)


# --- work ---


def _world_sizes(variants: Sequence[Variant]) -> list[str]:
    """Processes asked for against those that took part: the mistake behind many a speed-up."""
    sentences = []
    for variant in variants:
        for run in variant.runs:
            asked = number(dig(run.config, "launch", "nproc"))
            there = {int(size) for step in run.steps if (size := number(step.get("world_size"))) is not None}
            if asked is not None and there and there != {int(asked)}:
                sentences.append(
                    f"{run.name}: {int(asked)} processes were asked for, {_joined(map(str, sorted(there)))} took part. "
                    "Its times and scores are not those of what was asked."
                )
    return sentences


def _unfinished(variants: Sequence[Variant]) -> list[str]:
    sentences = []
    for variant in variants:
        for run in variant.runs:
            state, step = run.status.get("state"), _last(run).get("step", 0)
            if state != "finished":
                planned = _shown(run.status.get("num_steps"))
                sentences.append(f"{run.name} is {state or 'in an unknown state'} after {_shown(step)} of {planned} "
                                 "steps: its figures are those until there.")  # fmt: skip
    return sentences


def _missing_seeds(variants: Sequence[Variant]) -> list[str]:
    """Variants with other seeds than most are compared over fewer runs."""
    seeds = {variant.name: sorted(seed for run in variant.runs if (seed := seed_of(run)) is not None)
             for variant in variants}  # fmt: skip
    if len({tuple(own) for own in seeds.values()}) < 2:
        return []
    told = "; ".join(f"{name}: {_joined(map(str, own)) or 'none'}" for name, own in seeds.items())
    return [f"Not the same for all: seeds: {told}. Differences are taken over the seeds that both sides have."]


def _orders(variants: Sequence[Variant], varied: Sequence[str]) -> list[str]:
    """Runs of one seed must take the same examples in the same order: told by the tokens of each update."""
    if _explaining(ORDER, varied):
        return []  # other data or other batches, which is told already
    sentences = []
    for seed, runs in _runs_by_seed(variants).items():
        for run in runs[1:]:
            pairs = zip(_sizes(runs[0]), _sizes(run), strict=False)
            first = next((step for step, (a, b) in enumerate(pairs, start=1) if a != b), None)
            if first is not None:
                sentences.append(f"{runs[0].name} and {run.name} have seed {seed} and yet trained on other examples "
                                 f"from update {first:,} on: the order of the data is not the same.")  # fmt: skip
    return sentences


def _sizes(run: Run) -> list[tuple[Any, Any]]:
    return [(step.get("num_input_tokens"), step.get("num_target_tokens")) for step in run.steps]


# --- settings ---


def _settings(variants: Sequence[Variant], names: Mapping[int, str], varied: Sequence[str]) -> list[str]:
    """Settings that differ without being varied; the options of a plugin that is varied go with it."""
    runs = [run for variant in variants for run in variant.runs]
    tables = {id(run): settings_of(run) for run in runs}
    free = {section for section in PLUGIN_SECTIONS if f"{section}.name" in varied}
    sentences: list[str] = []
    for key in dict.fromkeys(key for table in tables.values() for key in table):
        if key in varied or key.partition(".")[0] in free:
            continue
        fact = Fact(f"the setting {key}", lambda run, key=key: tables[id(run)].get(key, ABSENT))
        sentences += _differences(fact, variants, names, (), always=True)
    return sentences


def _confounded(variants: Sequence[Variant], varied: Sequence[str]) -> list[str]:
    """Variants that differ from every other one in two matters at once: the effects of these cannot be told apart."""
    sentences = []
    for variant in variants:
        matters = [_matters(variant, other, varied) for other in variants if other is not variant]
        least = min(matters, key=len, default=[])
        if len(least) > 1:
            sentences.append(
                f"{variant.name} differs from every other variant in at least {len(least)} settings at once "
                f"({_joined(least)}): what each of them does cannot be told from it."
            )
    return sentences


def _matters(a: Variant, b: Variant, varied: Sequence[str]) -> list[str]:
    """What two variants differ in: settings; those of one plugin, of the model and of the placement count as one."""
    ours, theirs = settings_of(a.runs[0]), settings_of(b.runs[0])
    plugin = {section for section in PLUGIN_SECTIONS if f"{section}.name" in varied}
    matters = {}
    for key in varied:
        if ours.get(key, ABSENT) != theirs.get(key, ABSENT):
            section = key.partition(".")[0]
            as_one = "strategy" if section in PLACEMENT else section if section in plugin or key in MODEL else key
            matters[as_one] = None
    return list(matters)


# --- conditions ---


def _versions(variants: Sequence[Variant], names: Mapping[int, str]) -> list[str]:
    packages = dict.fromkeys(
        name for variant in variants for run in variant.runs for name in dig(run.machine, "versions") or {}
    )
    facts = [Fact(f"the version of {package}", _machine("versions", package)) for package in packages]
    return [line for fact in facts for line in _differences(fact, variants, names, (), always=True)]


def _resumed(variants: Sequence[Variant]) -> list[str]:
    resumed = [run.name for variant in variants for run in variant.runs if run.status.get("num_resumes")]
    if not resumed:
        return []
    verb = "was" if len(resumed) == 1 else "were"
    return [f"{_joined(resumed)} {verb} interrupted and gone on with: the times hold what starting again cost."]


def _overlaps(variants: Sequence[Variant]) -> list[str]:
    """Runs that shared a machine at the same time slowed each other down."""
    spans = sorted(span for variant in variants for run in variant.runs if (span := _span(run)))
    sentences = []
    for (_, end, host, name), (start, _, other_host, other) in pairwise(spans):
        if host == other_host and start < end - OVERLAP_SECONDS:
            sentences.append(f"{name} and {other} ran at the same time on {host}: their times are not their own.")
    return sentences


def _span(run: Run) -> tuple[float, float, str, str] | None:
    """Start and end (seconds since 1970), host and name of a run; None where they are unknown."""
    host = next((line.get("host") for line in run.telemetry if line.get("host")), None)
    seconds = number(run.status.get("seconds"))
    try:
        started = datetime.strptime(str(run.status.get("started")), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
    if host is None or seconds is None or run.status.get("num_resumes"):
        return None
    return started, started + seconds, host, run.name


def _other_load(variants: Sequence[Variant]) -> list[str]:
    """Runs beside which other programs kept the cores of the host busy."""
    taken = {run.name: others for variant in variants for run in variant.runs if (others := _others(run))}
    loaded = {name: cores for name, (cores, all_cores) in taken.items() if cores > OTHERS_SHARE * all_cores}
    if not loaded:
        return []
    most = max(loaded, key=lambda name: loaded[name])
    return [
        f"Other programs kept cores busy while {_joined(loaded)} ran, up to {loaded[most]:.1f} of "
        f"{taken[most][1]} beside {most}: these times are not the runs' own."
    ]


def _others(run: Run) -> tuple[float, int] | None:
    """Cores that others than the run kept busy while it trained, on average, and all cores; None if unknown."""
    training = [line for line in run.telemetry if line.get("phase") == "train"]
    hosts = {line.get("host") for line in training}
    cores = [line["core_utilisation"] for line in training if not line.get("rank") and line.get("core_utilisation")]
    ranks = {line.get("rank") for line in training}
    own = [
        [n for line in training if line.get("rank") == rank and (n := number(line.get("process_cores"))) is not None]
        for rank in ranks
    ]
    if len(hosts) != 1 or not cores or not all(own):
        return None
    busy = sum(map(sum, cores)) / len(cores)
    return busy - sum(sum(each) / len(each) for each in own), len(cores[0])
