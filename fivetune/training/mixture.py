"""A mixture's parts as runs of their own: what each reads, how they are joined, and one part alone.

In: a RunConfig whose task is a mixture, or any other. Out: the RunConfig of a part, the joined store, the draw.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fivetune.config import RunConfig
from fivetune.data.mixture import ConcatStore, MixtureSampler, compute_mixing_rates
from fivetune.data.store import TokenStore
from fivetune.errors import ConfigError
from fivetune.tasks.mixture import Mixture


def build_part_configs(config: RunConfig) -> dict[str, RunConfig]:
    """The config of each part by name: its task, its files and limits, those of `data` where it has none."""
    found = {}
    for name, part in config.task.parts.items():
        own = {key: value for key, value in part if key in type(config.data).model_fields and value}
        columns = {**config.data.columns, **part.columns}
        data = config.data.model_copy(update={**own, "columns": columns})
        found[name] = config.model_copy(update={"task": part.task, "data": data})
    return found


def select_part(config: RunConfig, overrides: Collection[str] = ()) -> RunConfig:
    """The config of the part that task.part names; the config as it is where none is named.

    Args:
        overrides: settings that were given for this call; a data.eval among them wins over the part's own.

    Raises ConfigError for a data.eval that no part would read.
    """
    if not isinstance(config.task, Mixture):
        return config
    if config.task.part is None:
        own = [name for name, part in config.task.parts.items() if part.eval]
        if "data.eval" in overrides and own:
            raise ConfigError(
                f"--data.eval: {', '.join(own)} have files of their own. Give --task.parts.{own[0]}.eval "
                f"FILE, or take one part alone: --task.part {own[0]}."
            )
        return config
    part = build_part_configs(config)[config.task.part]
    if "data.eval" in overrides:
        return part.model_copy(update={"data": part.data.model_copy(update={"eval": config.data.eval})})
    return part


def require_single_part(config: RunConfig) -> None:
    """Raise ConfigError for a mixture where one part is needed."""
    if isinstance(config.task, Mixture):
        parts = ", ".join(config.task.parts)
        raise ConfigError(
            f"task.part: the run is a mixture of {parts}. Name the one that the inputs are for: "
            f"--task.part {next(iter(config.task.parts))}."
        )


def join_stores(stores: Mapping[str, TokenStore | None], split: str) -> ConcatStore | None:
    """The stores of all parts as one; None if no part has one. Raises ConfigError if only some have."""
    there = {name: store for name, store in stores.items() if store is not None}
    lacking = [name for name in stores if name not in there]
    if there and lacking:
        raise ConfigError(
            f"task.parts.{lacking[0]}.{split}: no file is given, though other parts have one. Give it, "
            f"or data.{split} for all parts."
        )
    return ConcatStore(there) if there else None


def build_mixture_sampler(config: RunConfig, store: TokenStore) -> MixtureSampler | None:
    """Which examples each epoch of a mixture takes; None for a task of its own. The shares are noted in the summary."""
    if not isinstance(store, ConcatStore):
        return None
    task, sizes = config.task, [len(part) for part in store.parts.values()]
    if task.by == "rate":
        total = sum(part.rate for part in task.parts.values())
        rates = [part.rate / total for part in task.parts.values()]
    else:
        temperature = task.temperature if task.by == "temperature" else 1.0
        rates = compute_mixing_rates(sizes, limit=task.limit, temperature=temperature)
    num_examples = sum(min(size, task.limit or size) for size in sizes)
    draw = MixtureSampler(sizes, rates, num_examples, seed=config.run.seed)
    for name, share in zip(store.parts, draw.shares, strict=True):
        store.summary["parts"][name] |= {"rate": share / len(draw), "num_examples_per_epoch": share}
    return draw
