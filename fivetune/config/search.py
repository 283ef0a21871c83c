"""The recipe's section `search`: the settings that `fivetune tune` varies, and the options of the search.

In: the section of a recipe. Out: a frozen SearchSection. `experiments.space.load_search`, which has the whole recipe,
checks that the settings exist and accept the values.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from fivetune.config.layers import parse_table


def _check_scalar(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"a choice is a number, a text, true, false or null, not {value!r}")


def _check_storage(value: object) -> object:
    if isinstance(value, str) and re.fullmatch(r"sqlite|journal|\w+(\+\w+)?://.+", value):
        return value
    raise ValueError(f"there is no {value!r}. Allowed: sqlite, journal, or the URL of a database")


def _check_sampler(value: object) -> object:
    if value == "grid":
        raise ValueError(
            "grid is no sampler. Allowed: tpe, random. All combinations of values are a sweep: write them under grid: "
            "in a file for fivetune compare (docs/compare.md)"
        )
    return value


Scalar = Annotated[Any, BeforeValidator(_check_scalar)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SearchDimension(_Section):
    """The values of one setting: a range, or a list of choices."""

    low: int | float | None = Field(default=None, description="smallest value")
    high: int | float | None = Field(default=None, description="largest value, included")
    log: bool = Field(default=False, description="log-uniform (1e-4 to 1e-3 as often as 1e-3 to 1e-2)")
    step: Annotated[int | float, Field(gt=0)] | None = Field(default=None, description="distance between two values")
    choices: tuple[Scalar, ...] = Field(default=(), description="the values themselves; excludes low and high")

    @model_validator(mode="after")
    def _check_range_or_choices(self) -> SearchDimension:
        if self.choices:
            if (self.low, self.high, self.log, self.step) != (None, None, False, None):
                raise ValueError("choices exclude low, high, log and step. Drop one or the other")
        elif self.low is None or self.high is None:
            raise ValueError("needs {low: ..., high: ...} or {choices: [...]}")
        elif not self.low < self.high:
            raise ValueError(f"low {self.low} is not below high {self.high}")
        elif self.log and (self.low <= 0 or self.step):
            raise ValueError(f"log needs a low above 0 and no step; low is {self.low}, step {self.step or 'not given'}")
        return self

    @property
    def samples(self) -> tuple[Any, ...]:
        """Values with which to check that the setting accepts the dimension: all choices, or both ends."""
        return self.choices or (self.low, self.high)


class SearchSection(_Section):
    """The search of `fivetune tune` (docs/search.md). Training ignores it."""

    over: Annotated[dict[str, SearchDimension], BeforeValidator(parse_table)] = Field(
        default={},
        description="dotted setting: {low: 1e-4, high: 1e-2, log: true}, or {low, high, step}, or {choices: [...]}",
    )
    num_trials: PositiveInt = Field(default=20, description="number of trials, over all processes that share the study")
    sampler: Annotated[Literal["tpe", "random"], BeforeValidator(_check_sampler)] = Field(
        default="tpe", description="tpe learns from previous trials; a grid is a sweep (fivetune compare)"
    )
    pruner: Literal["median", "hyperband", "none"] = Field(
        default="median",
        description="median stops a trial whose best score so far is below the median of the others' at the same "
        "evaluation; hyperband trains only few trials to the end",
    )
    startup_trials: NonNegativeInt = Field(
        default=5, description="finished trials before tpe models and median stops anything"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of the sampler; trials are seeded by run.seed")
    storage: Annotated[str, BeforeValidator(_check_storage)] = Field(
        default="sqlite",
        description="sqlite: study.db, for processes of one machine; journal: study.journal, also for nodes with a "
        "shared folder; or the URL of a database",
    )
    keep: Literal["best", "all"] = Field(
        default="best", description="trials whose weights are kept; records and reports of all trials are kept"
    )
