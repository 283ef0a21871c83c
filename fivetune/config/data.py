"""The section `data` of a recipe.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt

from fivetune.config.layers import parse_listed_names, parse_sources, parse_table
from fivetune.types import JsonTable

Sources = Annotated[tuple[str, ...], BeforeValidator(parse_sources)]


class DataSection(BaseModel):
    """The data files and their tokenisation."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    train: Sources = Field(
        default=(),
        description="training files, folders or hub names (org/name:config:split); or prepared data, a folder or URL",
    )
    eval: Sources = Field(default=(), description="evaluation files, folders or hub names; or prepared data")
    eval_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="if eval is empty: share of the training records that becomes evaluation data; records with a "
        "common input are not separated, nor, as far as the share allows, with a common context or question; labels "
        "keep their shares",
    )
    eval_seed: NonNegativeInt = Field(
        default=0, description="seed of the split by eval_share, so that runs with another run.seed share the split"
    )
    group_column: str | None = Field(
        default=None,
        description="records with the same value of this column are not separated by eval_share; an empty cell is "
        "no value",
    )
    columns: Annotated[dict[str, str], BeforeValidator(parse_table)] = Field(
        default={}, description="column that the task reads: column in the file; a nested one is dotted (info.topic)"
    )
    header: Annotated[tuple[str, ...], BeforeValidator(parse_listed_names)] = Field(
        default=(),
        description="names of the columns of a table without a header line (en,de), and of the values of JSON records "
        "that are lists",
    )
    on_bad_record: Literal["fail", "skip"] = Field(
        default="fail", description="stop at a bad record, or skip and count it"
    )
    max_input_tokens: PositiveInt | None = Field(
        default=512, description="longest input, end token included; null: no limit"
    )
    max_target_tokens: PositiveInt | None = Field(
        default=128, description="longest target, end token included; null: no limit"
    )
    overlong: Literal["truncate", "head_tail", "windows"] = Field(
        default="truncate",
        description="truncate removes the end of an over-long context, head_tail its middle; windows splits it into "
        "overlapping windows (extractive tasks only); the question is never truncated",
    )
    window_overlap: NonNegativeInt = Field(default=128, description="tokens shared by two consecutive windows")
    max_train_examples: PositiveInt | None = Field(
        default=None, description="read only the first N records; a record can yield several examples, or none"
    )
    max_eval_examples: PositiveInt | None = Field(default=None, description="read only the first N records")
    bucket_pool: PositiveInt = Field(
        default=8,
        description="number of global batches per pool, which is sorted by length, at most a quarter of the epoch; 1 "
        "draws each batch at random",
    )
    cache_dir: str | None = Field(default=None, description="folder of the tokenised data; default ~/.cache/fivetune")
    num_processes: PositiveInt | None = Field(
        default=None,
        description="processes that read, convert and tokenise records; default: one per core for files of more than "
        "32 MiB, else one",
    )
    window_shards: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="for prepared data that is larger than the disk: shards in the cache at once; examples are "
        "shuffled among half as many shards, in a seeded order of shards; null: among all",
    )


NO_SPLIT: JsonTable = {"eval_share": None, "eval_seed": 0, "group_column": None}
"""Settings of `data` by which no evaluation set is split off the training records."""
