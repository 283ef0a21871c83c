"""A recipe with several seeds, as a sweep of one variant.

In: a recipe and seeds. Out: a Sweep in the recipe's run directory, which `fivetune compare` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fivetune.config import RunConfig
from fivetune.errors import ConfigError
from fivetune.fleet.experiments.sweep import PlannedRun, Sweep


def build_seed_sweep(recipe: str, config: RunConfig, seeds: Sequence[int]) -> Sweep:
    """Build the sweep of a recipe that varies the seed alone; its runs are `NAME-seed1`, ... in `run.dir`.

    Raises ConfigError for seeds that are given twice or out of range.
    """
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise ConfigError(f"--seeds {' '.join(map(str, seeds))}: give different whole numbers from 0 to {2**31 - 1}.")
    folder = Path(config.run.dir)
    return Sweep(
        path=Path(recipe),
        title=folder.name,
        folder=folder,
        variants={folder.name: {}},
        varied=(),
        runs=tuple(_plan_runs(config, folder, seeds)),
        baseline=folder.name,
        metric=config.eval.metric or config.task.main_metric,
        retries=0,
        price_per_hour=None,
        corpus=None,
    )


def _plan_runs(config: RunConfig, folder: Path, seeds: Sequence[int]) -> Iterator[PlannedRun]:
    for seed in seeds:
        name = f"{folder.name}-seed{seed}"
        yield PlannedRun(name, folder.name, seed, config.replace("run", seed=seed, dir=str(folder / name)))
