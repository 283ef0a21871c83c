"""The parts of a mixture: their configs, their joined store, the sampler of epochs, and the choice of a single part.

In: a RunConfig whose task is a mixture, or any other. Out: RunConfigs of parts, a ConcatStore, a MixtureSampler.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fivetune.config import RunConfig
from fivetune.data.store.mixture import ConcatStore, MixtureSampler, compute_mixing_rates
from fivetune.data.store.token_store import TokenStore
from fivetune.errors import ConfigError
from fivetune.tasks.mixture import Mixture


def build_part_configs(config: RunConfig) -> dict[str, RunConfig]:
    """The config of each part by name: its task, files and limits; `data` supplies settings that a part leaves out."""
    assert isinstance(config.task, Mixture)
    found: dict[str, RunConfig] = {}
    for name, part in config.task.parts.items():
        # A part has some settings of the section data, by the same names.
        own = {key: value for key, value in part if key in type(config.data).model_fields and value}
        columns = {**config.data.columns, **part.columns}
        data = config.data.model_copy(update={**own, "columns": columns})
        found[name] = config.model_copy(update={"task": part.task, "data": data})
    return found


def select_part(config: RunConfig, overrides: Collection[str] = ()) -> RunConfig:
    """The config of the part that task.part names; the unchanged config if it names none.

    Args:
        overrides: names of the settings given for this call; a data.eval among them overrides the part's own.

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
        return part.replace("data", eval=config.data.eval)
    return part


def require_single_part(config: RunConfig) -> None:
    """Raise ConfigError for a mixture, for callers that need the task of a single part."""
    if isinstance(config.task, Mixture):
        parts = ", ".join(config.task.parts)
        raise ConfigError(
            f"task.part: the run is a mixture of {parts}. Name the one that the inputs are for: "
            f"--task.part {next(iter(config.task.parts))}."
        )


def join_stores(stores: Mapping[str, TokenStore | None], split: str) -> ConcatStore | None:
    """Join the stores of all parts; None if no part has a store. Raises ConfigError if only some have one."""
    # All parts or none: an evaluation of some parts would be compared with evaluations of all.
    there = {name: store for name, store in stores.items() if store is not None}
    lacking = [name for name in stores if name not in there]
    if there and lacking:
        raise ConfigError(
            f"task.parts.{lacking[0]}.{split}: no file is given, though other parts have one. Give it, "
            f"or data.{split} for all parts."
        )
    return ConcatStore(there) if there else None


def build_mixture_sampler(config: RunConfig, store: TokenStore) -> MixtureSampler | None:
    """Build the sampler of a mixture's epochs; None for other tasks. Records the shares in the store's summary."""
    if not isinstance(store, ConcatStore):
        return None
    task = config.task
    sizes = [len(part) for part in store.parts.values()]
    assert isinstance(task, Mixture)
    if task.by == "rate":
        given = [part.rate for part in task.parts.values() if part.rate is not None]  # every part has one
        rates = [rate / sum(given) for rate in given]
    else:
        temperature = task.temperature if task.by == "temperature" else 1.0
        rates = compute_mixing_rates(sizes, limit=task.limit, temperature=temperature)
    # An epoch is as long as all parts together, of which a large one counts up to its limit.
    num_examples = sum(min(size, task.limit or size) for size in sizes)
    draw = MixtureSampler(sizes, rates, num_examples, seed=config.run.seed)
    for name, share in zip(store.parts, draw.shares, strict=True):
        store.summary["parts"][name] |= {"rate": share / len(draw), "num_examples_per_epoch": share}
    return draw
