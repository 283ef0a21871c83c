"""Grouping of run directories to variants: runs that differ only in the seed are repeats of one variant.

In: Runs. Out: Variants without measures, in the order of the runs, and the settings in which they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, find_plugin_setting
from fivetune.reading.compare.records import Variant
from fivetune.rundir.records import Run
from fivetune.values import flatten_table, get_nested

NOT_WORK = ("run.", "report.", "search.", "telemetry.")  # sections that, except for the seed, do not affect the work
NOT_WORK_KEYS = ("data.cache_dir", "train.log_every_steps", "checkpoint.keep")
ABSENT = "(not there)"


def select_work_settings(run: Run) -> dict[str, Any]:
    """Return the dotted settings of a run that determine its work, without the seed."""
    settings: dict[str, Any] = {}
    for key, value in flatten_table(run.config).items():
        if not key.startswith(NOT_WORK) and key not in NOT_WORK_KEYS:
            # null: no plugin has this name
            settings[f"{key}.name" if key in NESTED_PLUGINS else key] = value
    return settings


def find_differing_settings(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the settings in which runs differ; of different plugins, the name and what their runs vary."""
    tables = [select_work_settings(run) for run in runs]
    keys: dict[str, None] = {}
    for table in tables:
        keys |= dict.fromkeys(table)
    found: list[str] = []
    for key in keys:
        first = tables[0].get(key, ABSENT)
        if any(table.get(key, ABSENT) != first for table in tables):
            found.append(key)
    named = {section for section in (*PLUGIN_SECTIONS, *NESTED_PLUGINS) if f"{section}.name" in found}
    kept: list[str] = []
    for key in found:
        section = find_plugin_setting(key)
        # An option counts that differs between runs with the same plugin: lora of two ranks beside ia3, which has none.
        values: dict[object, set[str]] = {}
        for table in tables:
            if key in table:
                values.setdefault(table.get(f"{section}.name"), set()).add(repr(table[key]))
        is_varied = any(len(own) > 1 for own in values.values())
        if section not in named or is_varied or all(key in table for table in tables):
            kept.append(key)
    return tuple(kept)


def group_runs(runs: Sequence[Run]) -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """Group runs by their settings to variants; return these and the settings in which they differ.

    A variant is named after its first run, without the seed that a sweep appends.
    """
    varied = find_differing_settings(runs)
    groups: dict[str, list[Run]] = {}
    for run in runs:
        table = select_work_settings(run)
        groups.setdefault(repr([table.get(key, ABSENT) for key in varied]), []).append(run)
    variants: dict[str, Variant] = {}
    for members in groups.values():
        table = select_work_settings(members[0])
        own_name = members[0].name.removesuffix(f"-seed{get_seed(members[0])}")
        name = make_unique_name(own_name, variants)
        settings = {key: table.get(key, ABSENT) for key in varied}
        variants[name] = Variant(name, settings, tuple(members), measures={})
    return tuple(variants.values()), varied


def get_seed(run: Run) -> int | None:
    seed = get_nested(run.config, "run", "seed")
    return seed if isinstance(seed, int) else None


def make_unique_name(name: str, taken: Collection[str], *, template: str = "{} ({})") -> str:
    """Return the name; if it is taken, append the lowest number that makes it unique.

    >>> make_unique_name("a", ()), make_unique_name("a", ("a (2)", "a"))
    ('a', 'a (3)')
    """
    unique = name
    number = 2
    while unique in taken:
        unique = template.format(name, number)
        number += 1
    return unique
