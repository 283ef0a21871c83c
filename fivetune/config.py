"""The configuration of a run: files and overrides in, one frozen and checked RunConfig out.

Layers, later ones win: the field defaults, `base:` files, the file itself, dotted overrides. Every value
remembers where it came from, so that an error can name file and line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    model_validator,
)

from fivetune import plugins
from fivetune.config_layers import PLUGIN_SECTIONS, Layers, as_yaml, read_file, read_table
from fivetune.config_search import Searched, SearchSection
from fivetune.errors import ConfigError, nearest
from fivetune.plugins import Options


def _pick(kind: str, default: str | None, value: Any) -> Any:
    """Turn `{name: adafactor, lr: 1e-3}` or `adafactor` into the options of that plugin."""
    if isinstance(value, Options):
        return value
    table = {"name": value} if isinstance(value, str) else dict(value or {})
    name = table.pop("name", default)
    if not isinstance(name, str):
        given = f", has {', '.join(table)}" if table else ""
        raise ValueError(f"needs a name{given}. {nearest('', plugins.names(kind))}")
    return plugins.load(kind, name).model_validate(table)


def _plugin(kind: str, default: str | None = None) -> Any:
    """Annotation of a section that names a plugin and carries its options."""
    field = Field(default_factory=lambda: plugins.load(kind, default)()) if default else Field()
    return Annotated[SerializeAsAny[Options], BeforeValidator(partial(_pick, kind, default)), field]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


SWEEPS = "compare"  # folder of the shipped sweeps among the recipes

Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError(f"Input should be a valid integer of at least 1, or auto, not {value!r}")


CountOrAuto = Annotated[Count | Literal["auto"], BeforeValidator(_count_or_auto)]
Table = BeforeValidator(read_table)
Sources = Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)]


class RunSection(_Section):
    """Where the run lives and what it is seeded with."""

    dir: str = Field(default="runs/{recipe}", description="run directory; {recipe} stands for the file's name")
    seed: int = Field(default=0, ge=0, lt=2**31, description="seeds weights, data order and dropout")


class ModelSection(_Section):
    """Which model is fine-tuned."""

    path: str | None = Field(default=None, description="local folder, hub name, or t5-nano (carried by the package)")
    config: str | None = Field(default=None, description="folder or config.json to build from, with init: random")
    tokenizer: str | None = Field(default=None, description="folder or hub name; default: the model's own")
    init: Literal["pretrained", "random"] = Field(default="pretrained", description="load weights, or draw them")
    revision: str | None = Field(default=None, description="commit or tag on the hub")
    dropout: Fraction | None = Field(
        default=0.1, description="dropout rate while training; null keeps the checkpoint's (v1.1 and mT5 ship 0)"
    )

    @model_validator(mode="after")
    def _has_a_source(self) -> ModelSection:
        if self.init == "pretrained" and not self.path:
            raise ValueError("path is missing. Give model.path, or model.init: random with model.config")
        if self.init == "random" and not (self.config or self.path):
            raise ValueError("init: random needs model.config (a folder or a config.json)")
        return self


class DataSection(_Section):
    """Which files are read and how they become tokens."""

    train: Sources = Field(default=(), description="training files, folders or hub names (org/name:config:split)")
    eval: Sources = Field(default=(), description="evaluation files, folders or hub names")
    columns: Annotated[dict[str, str], Table] = Field(
        default={}, description="column that the task wants: column in the file"
    )
    on_bad_record: Literal["fail", "skip"] = Field(default="fail", description="stop at a bad record, or count it")
    max_input_tokens: Count | None = Field(default=512, description="longest input, end token included; null: no limit")
    max_target_tokens: Count | None = Field(
        default=128, description="longest target, end token included; null: no limit"
    )
    overlong: Literal["truncate", "head_tail", "windows"] = Field(
        default="truncate",
        description="of an over-long context, cut the end or the middle, or ask all of it in overlapping windows "
        "(tasks whose answers stand in a context only); the question stays whole",
    )
    window_overlap: Annotated[int, Field(ge=0)] = Field(
        default=128, description="tokens that two neighbouring windows share"
    )
    max_train_examples: Count | None = Field(
        default=None, description="read only the first so many records; one may give several examples, or none"
    )
    max_eval_examples: Count | None = Field(default=None, description="read only the first so many records, likewise")
    bucket_pool: Count = Field(
        default=8,
        description="global batches that are sorted by length together; 1 keeps each batch a plain random draw",
    )
    cache_dir: str | None = Field(default=None, description="where tokenised data is kept; default ~/.cache/fivetune")


class TrainSection(_Section):
    """How long and in what pieces the model is trained."""

    num_steps: Count | None = Field(default=None, description="optimizer steps; excludes num_epochs")
    num_epochs: float | None = Field(default=None, gt=0, description="passes over the data; default 3 if no num_steps")
    batch_size: CountOrAuto = Field(
        default=8,
        description="examples per forward pass and device (micro-batch); auto: the largest part of global_batch_size "
        "that fits into memory, measured at the start",
    )
    global_batch_size: Count | None = Field(
        default=None,
        description="examples per optimizer step over all processes; default: batch_size; accumulation is derived",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto", description="auto: bf16 autocast with fp32 weights where the device has it, else fp32"
    )
    forward: Literal["auto", "flat", "padded", "buckets"] = Field(
        default="auto",
        description="flat computes real tokens only; padded a rectangle; buckets rectangles of fixed sizes; "
        "auto: what suits the device, said at the start",
    )
    capture: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="replay steps as CUDA graphs; auto: where they agree with launched kernels and are faster, as "
        "measured and said at the start; on: refuse to train without",
    )
    recompute: bool = Field(
        default=False, description="keep less for the backward pass and compute it again: less memory, a third slower"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] | None = Field(
        default=1.0, description="clip the gradient's norm; null: off"
    )
    log_every_steps: Count = Field(default=10, description="one progress line per so many steps outside a terminal")
    num_threads: Count | None = Field(
        default=None, description="CPU threads of each process; default: OMP_NUM_THREADS, else physical cores, shared"
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainSection:
        if self.num_steps and self.num_epochs:
            raise ValueError("num_steps and num_epochs are both given. Keep one of them")
        return self

    @model_validator(mode="after")
    def _auto_is_a_part(self) -> TrainSection:
        if self.batch_size == "auto" and not self.global_batch_size:
            raise ValueError("batch_size auto needs global_batch_size, of which it takes the largest part that fits. "
                             "Add it (128 in the T5 paper), or give batch_size a number")  # fmt: skip
        return self

    @property
    def examples_per_step(self) -> int:
        if self.global_batch_size:
            return self.global_batch_size
        assert self.batch_size != "auto"
        return self.batch_size


class EvalSection(_Section):
    """When and how the model is evaluated by generation."""

    every_steps: Count | None = Field(
        default=None, description="evaluate every so many steps; default: ten times per run"
    )
    at_start: bool = Field(default=True, description="evaluate before the first step: the baseline of the report")
    batch_size: Count = Field(default=64, description="examples per generation batch")
    max_examples: Count | None = Field(
        default=None, description="subset during training; the last evaluation takes all"
    )
    suppress_sentinels: bool = Field(default=True, description="never write <extra_id_N>")
    max_new_tokens: Count | None = Field(
        default=None, description="generation cap; default: p99 of the targets plus a margin"
    )
    min_new_tokens: Annotated[int, Field(ge=0)] = Field(
        default=0, description="shortest answer in tokens before the end token may come"
    )
    num_beams: Count = Field(default=1, description="beams of the search; 1 is greedy")
    num_candidates: Count = Field(
        default=1, description="best answers kept per input, at most num_beams; 5 for ranked answers such as BioASQ's"
    )
    length_penalty: float = Field(
        default=1.0, description="beam search: above 0 favours long answers, below short ones"
    )
    repetition_penalty: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="above 1 makes words that were written less likely"
    )
    score_labels: bool = Field(
        default=True, description="tasks with labels: score the labels in one decoder step; false generates freely"
    )
    metric: str | None = Field(default=None, description="score that picks the best checkpoint; default: the task's")

    @model_validator(mode="after")
    def _enough_beams(self) -> EvalSection:
        if self.num_candidates > self.num_beams:
            raise ValueError(f"num_candidates {self.num_candidates} needs as many beams, num_beams is {self.num_beams}")
        return self

    @model_validator(mode="after")
    def _room_for_the_shortest(self) -> EvalSection:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}. "
                             "Lower it, or raise max_new_tokens")  # fmt: skip
        return self


class CheckpointSection(_Section):
    """When the state is saved and how many checkpoints are kept."""

    every_steps: Count | None = Field(default=None, description="save every so many steps; default: at each evaluation")
    keep: Annotated[int, Field(ge=2)] = Field(default=2, description="newest checkpoints kept, the best one besides")


class TelemetrySection(_Section):
    """What is recorded beside the steps: docs/telemetry.md."""

    every_seconds: Annotated[float, Field(ge=0)] = Field(
        default=1.0, description="look at processors, memory, disk, network and GPUs every so many seconds; 0: off"
    )


class ReportSection(_Section):
    """What is told, and where."""

    title: str | None = Field(default=None, description="title of report.html; default: the run's name")
    beside: tuple[str, ...] = Field(default=(), description="run directories whose scores are shown as baselines")
    expected: Annotated[dict[str, float], Table] = Field(
        default={}, description="published scores to stand beside the run's: {f1: 92.08}"
    )
    sinks: tuple[str, ...] = Field(default=(), description="trackers that get every record: tensorboard, wandb, mlflow")

    @model_validator(mode="after")
    def _known_sinks(self) -> ReportSection:
        for name in self.sinks:
            if name not in plugins.names("sinks"):
                raise ValueError(f"sinks: there is no {name!r}. {nearest(name, plugins.names('sinks'))}")
        return self


class LaunchSection(_Section):
    """How processes are started: docs/parallel.md."""

    nproc: Count = Field(
        default=1,
        description="processes on this machine, one per device; above 1, strategy.name ddp or fsdp shares the work",
    )
    timeout_minutes: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="a process that waits longer than this for another one of its run gives up"
    )


class RunConfig(_Section):
    """Everything that decides a run. Field descriptions are the documentation (docs/config.md)."""

    run: RunSection = RunSection()
    model: ModelSection
    task: _plugin("tasks")  # type: ignore[valid-type]
    data: DataSection = DataSection()
    optimizer: _plugin("optimizers", "adafactor")  # type: ignore[valid-type]
    schedule: _plugin("schedules", "constant")  # type: ignore[valid-type]
    train: TrainSection = TrainSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    report: ReportSection = ReportSection()
    search: SearchSection = SearchSection()
    strategy: _plugin("strategies", "single")  # type: ignore[valid-type]
    launch: LaunchSection = LaunchSection()
    device: str = Field(
        default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$", description="auto, cpu, cuda, cuda:N or mps"
    )

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> RunConfig:
        total, micro = self.train.global_batch_size, self.train.batch_size
        if total and micro != "auto" and total % micro:
            raise ValueError(f"train.global_batch_size {total} is not a multiple of train.batch_size {micro}")
        return self

    @model_validator(mode="after")
    def _shared_by_the_processes(self) -> RunConfig:
        num = self.launch.nproc
        if num == 1:
            return self
        name = self.strategy.plugin_name()
        if not self.strategy.several:
            raise ValueError(f"launch.nproc {num} needs a strategy for several processes, strategy.name {name} has "
                             "one. Use ddp, or fsdp where the model does not fit into one device")  # fmt: skip
        if self.train.examples_per_step % num:
            key = "global_batch_size" if self.train.global_batch_size else "batch_size"
            raise ValueError(f"train.{key} {self.train.examples_per_step} is not a multiple of launch.nproc {num}, "
                             "whose processes share every global batch")  # fmt: skip
        if self.device == "mps" or ":" in self.device:
            raise ValueError(f"device {self.device} is one device, launch.nproc asks for {num}. Use auto, cuda or cpu")
        obstacle = self.strategy.obstacle(
            optimizer=self.optimizer.plugin_name(), precision=self.train.precision,
            forward=self.train.forward, batch_size=self.train.batch_size,
        )  # fmt: skip
        if obstacle:
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _one_source_of_the_rate(self) -> RunConfig:
        """An optimizer that makes its own learning rate leaves a schedule nothing to multiply."""
        if not getattr(self.optimizer, "relative_step", False):
            return self
        warmup = next((n for n in ("warmup_steps", "warmup_fraction") if getattr(self.schedule, n, None)), None)
        name = self.schedule.plugin_name()
        if name != "constant" or warmup:
            key, value = ("name", name) if name != "constant" else (warmup, getattr(self.schedule, str(warmup)))
            raise ValueError(f"schedule.{key} {value} has no effect with optimizer.relative_step, which makes its own "
                             "rate. Drop one of them (warmup_init is its warm-up)")  # fmt: skip
        return self

    @model_validator(mode="after")
    def _windows_have_a_context(self) -> RunConfig:
        for task in self.tasks:
            if self.data.overlong == "windows" and not task.extractive:
                raise ValueError(f"data.overlong windows asks a context piece by piece; task {task.plugin_name()} "
                                 "takes no answer from one. Use truncate or head_tail")  # fmt: skip
        return self

    @property
    def tasks(self) -> list[Any]:
        """The task, or those of a mixture's parts."""
        return [part.task for part in getattr(self.task, "parts", {}).values()] or [self.task]

    @classmethod
    def default_plugin(cls, section: str) -> str:
        """Name of the plugin that a section takes where none is named."""
        return cls.model_fields[section].get_default(call_default_factory=True).plugin_name()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, plugins as tables with their name; reading it back gives an equal config."""
        table = self.model_dump(mode="json")
        for section in PLUGIN_SECTIONS:
            table[section] = {"name": getattr(self, section).plugin_name(), **table[section]}
        return table

    def as_yaml(self) -> str:
        return as_yaml(self.as_dict())


def load_config(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe (a file or a dict), apply dotted overrides, check everything.

    Args:
        source: path of a YAML or JSON file, name of a shipped recipe, a run directory (its config.yaml, with
            `run.dir` where it is now), or a nested dict.
        overrides: dotted keys (or transformers' names) and their values: {"optimizer.lr": 1e-3}.

    Raises ConfigError with file, line and the nearest allowed names.
    """
    layers, name = layers_of(source, overrides)
    config = _validated(layers)
    folder = config.run.dir.replace("{recipe}", name)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})


def layers_of(source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None) -> tuple[Layers, str]:
    """A recipe's settings with their origins, and its name."""
    layers = Layers()
    if isinstance(source, Mapping):
        layers.add_table(source, where="the given dict")
        name = "run"
    else:
        path = find_recipe(source)
        for table in read_file(path):
            layers.add(table)
        name = path.stem
        if _is_run(source):
            layers.add_table({"run": {"dir": str(source)}}, where=str(source))
            name = Path(source).resolve().name
    layers.add_overrides(overrides or {})
    return layers, name


def _validated(layers: Layers) -> RunConfig:
    try:
        return RunConfig.model_validate(layers.table())
    except ValidationError as error:
        raise ConfigError("\n".join(describe(e, layers) for e in error.errors())) from None


def _is_run(source: str | Path) -> bool:
    """Whether a source is a run directory, not a folder that happens to have a recipe's name."""
    return (Path(source) / "config.yaml").is_file()


def load_task(name: str, options: Mapping[str, Any]) -> Any:
    """A task by name with its options, outside a recipe. Raises ConfigError as `load_config` does."""
    plugin = plugins.load("tasks", name)
    try:
        return plugin.model_validate(dict(options))
    except ValidationError as error:
        layers = Layers()
        layers.add_table({"task": {"name": name, **options}}, where="task")
        located = [{**e, "loc": ("task", *e["loc"])} for e in error.errors()]
        raise ConfigError("\n".join(describe(e, layers) for e in located)) from None


def recipes_folder() -> Path:
    """The recipes beside the sources in a checkout, or inside the installed package."""
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped recipes, as `fivetune train` takes them."""
    folder = recipes_folder()
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(str(name) for name in found if name.parts[0] != SWEEPS)


def find_recipe(source: str | Path) -> Path:
    """A path as given, or the shipped recipe of that name. Raises ConfigError with the nearest names."""
    path = Path(source)
    if _is_run(path):
        return path / "config.yaml"
    shipped = recipes_folder() / f"{source}.yaml"
    for candidate in (path, shipped):
        if candidate.is_file():
            return candidate
    siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    raise ConfigError(f"{source}: no such recipe. {nearest(str(source), [*siblings, *recipe_names()])}")


def describe(error: Any, layers: Layers) -> str:
    """One pydantic error as *where: key: what is wrong, with which value. What is allowed.*"""
    path = tuple(str(part) for part in error["loc"])
    key = ".".join(path)
    where = layers.origin(path)
    if error["type"] == "extra_forbidden":
        return f"{where}: {key} is not a setting. {nearest(path[-1], _field_names(path, layers))}"
    message = error["msg"].removeprefix("Value error, ")
    if not path:  # a rule between sections: its message begins with the key
        return f"{layers.origin(tuple(message.partition(' ')[0].split('.')))}: {message.rstrip('.')}."
    if where not in (key, f"--{key}"):
        where = f"{where}: {key}"
    if error["type"] == "string_pattern_mismatch" and key in RunConfig.model_fields:
        return f"{where}: there is no {error['input']!r}. Allowed: {RunConfig.model_fields[key].description}."
    message = re.sub(r"valid dictionary( or instance of \w+)?", "table", message).replace("valid tuple", "list")
    given = "" if error["type"] in ("missing", "value_error") else f", not {error['input']!r}"
    return f"{where}: {message.rstrip('.')}{given}."


def _field_names(path: tuple[str, ...], layers: Layers) -> list[str]:
    """The settings that are allowed where `path` is not."""
    if len(path) == 1:
        return list(RunConfig.model_fields)
    section = path[0]
    if path[:2] == ("search", "over"):
        return list(Searched.model_fields)
    if section in PLUGIN_SECTIONS:
        name = layers.table()[section].get("name") or RunConfig.default_plugin(section)
        return ["name", *plugins.load(PLUGIN_SECTIONS[section], name).model_fields]
    return list(getattr(RunConfig.model_fields[section].annotation, "model_fields", ()))
