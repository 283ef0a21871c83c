"""Run directories that nobody planned together, as variants: runs with the same settings are repeats of one.

In: Runs. Out: Variants without measures, in the order of the runs, and which settings they differ in.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import count
from typing import Any

from fivetune.config_layers import PLUGIN_SECTIONS
from fivetune.types import Run, Variant
from fivetune.values import flat

NOT_WORK = ("run.", "report.", "search.", "telemetry.")  # settings that say where and how a run is told, and its seed
NOT_WORK_KEYS = ("data.cache_dir", "train.log_every_steps", "checkpoint.keep")
ABSENT = "(not there)"


def settings_of(run: Run) -> dict[str, Any]:
    """The dotted settings of a run that decide its work, the seed apart."""
    return {
        key: value
        for key, value in flat(run.config).items()
        if not key.startswith(NOT_WORK) and key not in NOT_WORK_KEYS
    }


def differing(runs: Sequence[Run]) -> tuple[str, ...]:
    """The settings in which runs differ; of sections whose plugins differ only the name."""
    tables = [settings_of(run) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    found = [key for key in keys if any(table.get(key, ABSENT) != tables[0].get(key, ABSENT) for table in tables)]
    named = {section for section in PLUGIN_SECTIONS if f"{section}.name" in found}
    return tuple(
        key for key in found
        if key.partition(".")[0] not in named or all(key in table for table in tables)
    )  # fmt: skip


def group_runs(runs: Sequence[Run]) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """Runs as variants by their settings, and the settings in which they differ.

    A variant is called after the first of its runs, without the seed that a sweep writes behind the name.
    """
    varied = differing(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        table = settings_of(run)
        groups.setdefault(repr([table.get(key, ABSENT) for key in varied]), []).append(run)
    variants: dict[str, Variant] = {}
    for members in groups.values():
        table = settings_of(members[0])
        name = free_name(_name(members[0]), variants)
        settings = {key: table.get(key, ABSENT) for key in varied}
        variants[name] = Variant(name, settings, tuple(members), measures={})
    return tuple(variants.values()), varied


def seed_of(run: Run) -> int | None:
    seed = (run.config.get("run") or {}).get("seed")
    return seed if isinstance(seed, int) else None


def _name(run: Run) -> str:
    return run.name.removesuffix(f"-seed{seed_of(run)}")


def free_name(name: str, taken: Collection[str], *, numbered: str = "{} ({})") -> str:
    """The name, with the least number that makes it another one if it is taken.

    >>> free_name("a", ()), free_name("a", ("a (2)", "a"))
    ('a', 'a (3)')
    """
    if name not in taken:
        return name
    return next(other for number in count(2) if (other := numbered.format(name, number)) not in taken)
