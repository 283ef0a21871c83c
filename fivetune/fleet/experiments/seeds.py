"""A recipe with several seeds, as a sweep of one variant.

In: a recipe and seeds. Out: a Sweep in the recipe's run directory, which `fivetune compare` knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fivetune.config import RunConfig
from fivetune.errors import ConfigError
from fivetune.fleet.experiments.sweep import Sweep, plan_run


def build_seed_sweep(recipe: str, config: RunConfig, seeds: Sequence[int]) -> Sweep:
    """Build the sweep of a recipe that varies the seed alone; its runs are `NAME-seed1`, ... in `run.dir`.

    Raises ConfigError for seeds that are given twice or out of range.
    """
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: give different whole numbers from 0 to {2**31 - 1}.")
    folder = Path(config.run.dir)
    name = folder.name
    return Sweep(
        path=Path(recipe),
        title=name,
        folder=folder,
        variants={name: {}},
        varied=(),
        runs=tuple(plan_run(config, folder, name, variant=name, seed=seed) for seed in seeds),
        baseline=name,
        metric=config.eval.metric or config.task.main_metric,
        retries=0,
        price_per_hour=None,
        corpus=None,
    )
