"""The sections of a recipe: one frozen pydantic model each, and RunConfig with all sections.

In: nested plain values. Out: checked settings. A field's description is its documentation (docs/config.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainValidator,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fivetune import plugins
from fivetune.config.data import DataSection
from fivetune.config.distill import DistillSection, explain_unsupported_distillation
from fivetune.config.layers import PLUGIN_SECTIONS, as_yaml, parse_names, parse_table
from fivetune.config.loss import LossSection, explain_unsupported_loss
from fivetune.config.model import ModelSection, is_for_training, parse_plugin
from fivetune.config.search import SearchSection
from fivetune.config.tpu import explain_unsupported_tpu
from fivetune.config.train import TrainSection
from fivetune.errors import suggest_names
from fivetune.redaction import redact_settings
from fivetune.types import JsonTable, Optimizer, RunSettings, Schedule, Strategy, Task

DEFAULT_OPTIMIZER = "adafactor"
DEFAULT_STRATEGY = "single"
STRATEGY_OF_SEVERAL = "ddp"  # default of several processes

_parse_task = partial(parse_plugin, "tasks", None)
_parse_optimizer = partial(parse_plugin, "optimizers", DEFAULT_OPTIMIZER)
_parse_schedule = partial(parse_plugin, "schedules", "constant")
_parse_strategy = partial(parse_plugin, "strategies", DEFAULT_STRATEGY)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


Table = BeforeValidator(parse_table)
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]


class RunSection(_Section):
    """The run directory and the seed."""

    dir: str = Field(default="runs/{recipe}", description="run directory; {recipe} is the file's name")
    seed: int = Field(default=0, ge=0, lt=2**31, description="seed of new weights, data order and dropout")


class EvalSection(_Section):
    """When and how the model is evaluated: by generation, or by scoring labels."""

    every_steps: PositiveInt | None = Field(
        default=None, description="steps between two evaluations; default: ten evaluations per run"
    )
    at_start: bool = Field(default=True, description="evaluate before the first step: the baseline of the report")
    batch_size: PositiveInt = Field(default=64, description="examples per generation batch")
    max_examples: PositiveInt | None = Field(
        default=None,
        description="size of the subset during training; at the end `eval.final` decides",
    )
    final: Literal["full", "subset"] = Field(
        default="full",
        description="full: the best weights, and those before the first step, are evaluated on all examples; subset: "
        "only the subset of `eval.max_examples` is ever evaluated",
    )
    suppress_sentinels: bool = Field(default=True, description="never generate <extra_id_N>")
    max_new_tokens: PositiveInt | None = Field(
        default=None, description="most tokens of an answer; default: 99th percentile of the targets plus a margin"
    )
    min_new_tokens: NonNegativeInt = Field(default=0, description="fewest tokens of an answer before the end token")
    num_beams: PositiveInt = Field(default=1, description="beams of the beam search; 1: greedy search")
    num_candidates: PositiveInt = Field(
        default=1,
        description="answers kept per input: at most num_beams, 5 for ranked answers such as BioASQ's; with a "
        "temperature, as many are drawn",
    )
    temperature: NonNegativeFloat = Field(
        default=0.0,
        description="above 0, answers are drawn at random, the higher the more varied; 0: the most probable",
    )
    top_k: NonNegativeInt = Field(
        default=0, description="with a temperature: draw among so many of the most probable tokens; 0: among all"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="with a temperature: draw among the most probable tokens that have this share of the probability",
    )
    sampling_seed: int = Field(default=0, ge=0, lt=2**63, description="seed of the answers drawn with a temperature")
    length_penalty: float = Field(
        default=1.0,
        description="exponent of the length in beam search: above 0 favours long answers, below 0 short ones",
    )
    repetition_penalty: PositiveFloat = Field(
        default=1.0, description="above 1 makes tokens that were already generated less probable"
    )
    no_repeat_ngram_size: NonNegativeInt = Field(
        default=0, description="no sequence of so many tokens occurs twice in an answer; 0: off"
    )
    stop: Names = Field(default=(), description="texts before which an answer ends, such as a line end")
    score_labels: bool = Field(
        default=True, description="label tasks: score the labels in one decoder step; false: generate free text"
    )
    metric: str | None = Field(default=None, description="score that selects the best checkpoint; default: the task's")

    @model_validator(mode="after")
    def _check_sampling(self) -> EvalSection:
        if self.temperature:
            if self.num_beams > 1:
                raise ValueError(
                    f"temperature {self.temperature:g} draws answers, and num_beams {self.num_beams} searches for the "
                    "most probable one. Set temperature 0 or num_beams 1"
                )
            return self
        if self.num_candidates > self.num_beams:
            raise ValueError(
                f"num_candidates {self.num_candidates} exceeds num_beams {self.num_beams}. Search with more beams, or "
                "set a temperature, with which answers are drawn"
            )
        for name, value, off in (("top_k", self.top_k, 0), ("top_p", self.top_p, 1)):
            if value != off:
                raise ValueError(
                    f"{name} {value:g} has no effect with temperature 0. Set a temperature, such as 1, or leave "
                    f"{name} out"
                )
        return self

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "" in value:
            raise ValueError("an empty text ends every answer before it begins. Leave it out")
        return value

    @model_validator(mode="after")
    def _check_final(self) -> EvalSection:
        if self.final == "subset" and self.max_examples is None:
            raise ValueError("final is subset, and max_examples is not set. Set eval.max_examples, or final: full")
        return self

    @model_validator(mode="after")
    def _check_min_new_tokens(self) -> EvalSection:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}. "
                "Lower it, or raise max_new_tokens"
            )
        return self


class CheckpointSection(_Section):
    """When checkpoints are saved and how many are kept."""

    every_steps: PositiveInt | None = Field(
        default=None, description="steps between two checkpoints; default: at each evaluation"
    )
    keep: Annotated[int, Field(ge=2)] = Field(
        default=2, description="number of newest checkpoints kept, in addition to the best"
    )
    average_best: Annotated[int, Field(ge=2)] | None = Field(
        default=None,
        description="at the end, average the weights of so many checkpoints with the best evaluations, and export the "
        "mean if it is better than the best one; they are kept, each with its optimizer state; null: off",
    )
    background: bool = Field(
        default=False,
        description="write checkpoints while training continues, from a copy of weights and optimizer in host memory",
    )
    url: str | None = Field(
        default=None,
        description="copy checkpoints, records and the model to this URL too (s3://, gs://, ...), and resume from it "
        "on a machine without them; {run}: the name of run.dir (docs/scale.md)",
    )

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://.", value):
            raise ValueError(
                f"{value!r} is not a URL. Checkpoints are always written to run.dir; this is where they are copied to. "
                "Give s3://bucket/path, gs://bucket/path or file:///path, or remove it"
            )
        return value


class TelemetrySection(_Section):
    """Sampling of the machine: docs/telemetry.md."""

    every_seconds: NonNegativeFloat = Field(
        default=1.0, description="seconds between two samples of processors, memory, disk, network and GPUs; 0: off"
    )


class ReportSection(_Section):
    """The report and the trackers."""

    title: str | None = Field(default=None, description="title of report.html; default: the run's name")
    beside: Names = Field(default=(), description="run directories whose scores are baselines")
    expected: Annotated[dict[str, float], Table] = Field(
        default={}, description="published scores, compared with the run's: {f1: 92.08}"
    )
    expected_model: str | None = Field(
        default=None, description="model of the published scores; compared only if it is `model.path`"
    )
    expected_examples: PositiveInt | None = Field(
        default=None,
        description="number of examples of the published scores; compared only with an evaluation of as many",
    )
    sinks: Names = Field(default=(), description="trackers that receive every record: tensorboard, wandb, mlflow")

    @model_validator(mode="after")
    def _check_sinks(self, info: ValidationInfo) -> ReportSection:
        for name in self.sinks if is_for_training(info) else ():
            if name not in plugins.list_plugins("sinks"):
                raise ValueError(f"sinks: there is no {name!r}. {suggest_names(name, plugins.list_plugins('sinks'))}")
        return self


class LaunchSection(_Section):
    """The processes of a run: docs/parallel.md."""

    nnodes: PositiveInt = Field(
        default=1, description="nodes, each with launch.nproc processes; fivetune launch starts them (docs/parallel.md)"
    )
    nproc: PositiveInt = Field(
        default=1,
        description="processes on each node, one per device; for more than one in all `fivetune train` proposes a "
        "strategy.name if none is given",
    )
    timeout_minutes: PositiveFloat = Field(
        default=30.0, description="longest time that a process waits for another, and a node for the others"
    )

    @property
    def num_processes(self) -> int:
        return self.nnodes * self.nproc


class RunConfig(_Section):
    """All settings of a run. Field descriptions are the documentation (docs/config.md)."""

    run: RunSection = RunSection()
    model: ModelSection
    task: Annotated[Task, PlainValidator(_parse_task)]
    data: DataSection = DataSection()
    optimizer: Annotated[Optimizer, PlainValidator(_parse_optimizer)] = Field(
        default_factory=lambda: plugins.load_plugin("optimizers", DEFAULT_OPTIMIZER)()
    )
    schedule: Annotated[Schedule, PlainValidator(_parse_schedule)] = Field(
        default_factory=lambda: plugins.load_plugin("schedules", "constant")()
    )
    train: TrainSection = TrainSection()
    loss: LossSection = LossSection()
    distill: DistillSection = DistillSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    telemetry: TelemetrySection = TelemetrySection()
    report: ReportSection = ReportSection()
    search: SearchSection = SearchSection()
    strategy: Annotated[Strategy, PlainValidator(_parse_strategy)] = Field(
        default_factory=lambda: plugins.load_plugin("strategies", DEFAULT_STRATEGY)()
    )
    launch: LaunchSection = LaunchSection()
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?|mps|tpu)$",
        description="auto (a GPU if there is one, else cpu), cpu, cuda, cuda:N, mps, tpu (all chips of this machine)",
    )

    @model_validator(mode="after")
    def _check_eval_share(self) -> RunConfig:
        """Refuse a split beside evaluation files, and options of a split that is not made."""
        data = self.data
        if data.eval_share is not None:
            if data.eval:
                raise ValueError(
                    f"data.eval_share ({data.eval_share:g}) and data.eval ({', '.join(data.eval)}) are both given, but "
                    "the evaluation records are a share of data.train or those of files. Keep one (a resumed run "
                    "keeps data.eval_share): add data.eval: [] or data.eval_share: null"
                )
            parts: Mapping[str, Any] = getattr(self.task, "parts", {})
            if parts and all(part.eval for part in parts.values()):
                raise ValueError(
                    f"data.eval_share ({data.eval_share:g}) has no effect: all parts of the mixture "
                    f"({', '.join(parts)}) have evaluation files of their own. Remove it (a resumed run keeps it: add "
                    f"data.eval_share: null), or remove task.parts.{next(iter(parts))}.eval"
                )
            return self
        for name in ("group_column", "eval_seed"):
            if value := getattr(data, name):
                raise ValueError(
                    f"data.{name} ({value}) has no effect without data.eval_share, the share of the training records "
                    f"that becomes evaluation data. Add data.eval_share: 0.1, or remove data.{name}"
                )
        return self

    @model_validator(mode="after")
    def _check_window(self) -> RunConfig:
        if self.data.window_shards and self.task.part_tasks:
            raise ValueError(
                f"data.window_shards {self.data.window_shards}: the steps of a mixture draw from all its parts, which "
                "must be on the disk. Remove data.window_shards"
            )
        return self

    @model_validator(mode="after")
    def _check_average(self) -> RunConfig:
        if self.eval.final == "subset" and self.checkpoint.average_best:
            raise ValueError(
                "checkpoint.average_best compares weights on all examples, and eval.final is subset. Set one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_micro_batches(self) -> RunConfig:
        total, micro = self.train.global_batch_size, self.train.batch_size
        if total and micro != "auto" and total % micro:
            near = f"{total // micro * micro} or {(total // micro + 1) * micro}" if total > micro else f"{micro}"
            raise ValueError(
                f"train.global_batch_size {total} is not a multiple of train.batch_size {micro}. Take {near}"
            )
        return self

    @model_validator(mode="after")
    def _check_processes(self, info: ValidationInfo) -> RunConfig:
        launch, num = self.launch, self.launch.num_processes
        if num == 1 or not is_for_training(info):
            return self
        several = (
            f"launch.nproc {num}"
            if launch.nnodes == 1
            else f"launch.nnodes {launch.nnodes} times launch.nproc {launch.nproc}"
        )
        name = self.strategy.plugin_name()
        if self.model.adapter and self.strategy.sharded:
            raise ValueError(
                f"strategy.name {name} divides the weights of the model, and model.adapter "
                f"{self.model.adapter.plugin_name()} adds others to them. Use ddp, under which each process holds "
                "the frozen weights and the adapter's"
            )
        if not self.strategy.supports_multiple:
            raise ValueError(
                f"{several} needs a strategy for several processes, strategy.name {name} supports "
                "one. Use ddp, or fsdp if the model does not fit into one device"
            )
        if num % (model_size := self.strategy.get_model_size(num)):
            raise ValueError(
                f"strategy.{self.strategy.size_option} {model_size} does not divide {several}. Every copy of "
                "the model has the same number of processes"
            )
        if self.train.examples_per_step % (copies := num // model_size):
            key = "global_batch_size" if self.train.global_batch_size else "batch_size"
            who = f"{several}; the processes" if copies == num else f"{copies}, the copies of the model; they"
            raise ValueError(
                f"train.{key} {self.train.examples_per_step} is not a multiple of {who} share every global batch"
            )
        if self.device == "mps" or ":" in self.device:
            raise ValueError(f"device {self.device} is one device, {several} needs {num}. Use auto, cuda or cpu")
        train = self.train
        settings = RunSettings(
            self.optimizer.plugin_name(),
            self.optimizer.supports_shards,
            train.precision,
            train.forward,
            train.batch_size,
            num_ranks=num,
        )
        if obstacle := self.strategy.explain_incompatibility(settings):
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_unfreezing(self) -> RunConfig:
        patterns = ", ".join(self.model.unfreeze)
        if patterns and self.launch.num_processes > 1:
            raise ValueError(
                f"model.unfreeze ({patterns}) changes during the run which gradients the processes reduce, and "
                f"launch asks for {self.launch.num_processes}. Use one process, or model.freeze"
            )
        length = self.train.num_steps
        if late := {name: step for name, step in self.model.unfreeze.items() if length and step >= length}:
            name, step = next(iter(late.items()))
            raise ValueError(
                f"model.unfreeze {name} at step {step} has no effect: train.num_steps is {length}. Lower the step, "
                "or freeze it for good by model.freeze"
            )
        return self

    @model_validator(mode="after")
    def _check_tpu(self, info: ValidationInfo) -> RunConfig:
        if self.device != "tpu":
            return self
        if obstacle := explain_unsupported_tpu(self.as_dict(), for_training=is_for_training(info)):
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_loss(self) -> RunConfig:
        obstacles = (explain_unsupported_loss(self.loss, task, dropout=self.model.dropout) for task in self.tasks)
        if obstacle := next(filter(None, obstacles), ""):
            raise ValueError(obstacle)
        if self.loss.class_weights and len(self.tasks) > 1:
            raise ValueError("loss.class_weights weighs the labels of one task, not of a mixture. Remove it")
        return self

    @model_validator(mode="after")
    def _check_written(self) -> RunConfig:
        """Refuse settings of written answers where no task writes any; in a mixture one that does is enough."""
        ways: list[str] = []  # how each task answers without writing
        for task in self.tasks:
            if getattr(task, "head", "generate") == "extractive":
                ways.append(f"{task.plugin_name()} with head extractive marks a span")
            elif task.labels is not None and self.eval.score_labels:
                ways.append(f"{task.plugin_name()} scores its labels (eval.score_labels)")
        for name in ("temperature", "no_repeat_ngram_size", "stop"):
            if getattr(self.eval, name) and len(ways) == len(self.tasks):
                raise ValueError(f"eval.{name} has no effect: task {ways[0]}, and no answer is written. Leave it out")
        return self

    @model_validator(mode="after")
    def _check_distillation(self, info: ValidationInfo) -> RunConfig:
        if not is_for_training(info):
            return self
        is_divided = self.strategy.sharded and self.launch.num_processes > 1
        obstacle = explain_unsupported_distillation(
            self.distill,
            is_extractive=any(getattr(task, "head", "generate") == "extractive" for task in self.tasks),
            is_mixture=bool(self.task.part_tasks),
            window_shards=self.data.window_shards,
            sharded_strategy=self.strategy.plugin_name() if is_divided else None,
            r_drop=self.loss.r_drop,
        )
        if obstacle:
            raise ValueError(obstacle)
        return self

    @model_validator(mode="after")
    def _check_single_lr_source(self) -> RunConfig:
        """Refuse a schedule with an optimizer that computes its own learning rate."""
        if not self.optimizer.computes_rate:
            return self
        if self.train.layer_decay or any(group.lr != 1 for group in self.train.param_groups):
            key = "layer_decay" if self.train.layer_decay else "param_groups"
            raise ValueError(
                f"train.{key} changes learning rates, and has no effect with optimizer.relative_step, which computes "
                "its own. Drop one of them"
            )
        warmup = next((n for n in ("warmup_steps", "warmup_fraction") if getattr(self.schedule, n, None)), None)
        name = self.schedule.plugin_name()
        if name != "constant" or warmup:
            key, value = ("name", name) if name != "constant" else (warmup, getattr(self.schedule, str(warmup)))
            raise ValueError(
                f"schedule.{key} {value} has no effect with optimizer.relative_step, which computes its "
                "rate. Drop one of them (warmup_init is its warm-up)"
            )
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> RunConfig:
        """Refuse a decaying schedule with an optimizer that averages the weights instead."""
        name = self.schedule.plugin_name()
        if self.optimizer.replaces_decay and name != "constant":
            raise ValueError(
                f"schedule.name {name} lowers the learning rate, and optimizer.name {self.optimizer.plugin_name()} "
                "averages the weights instead. Use schedule.name constant, with warmup_steps or warmup_fraction"
            )
        if self.optimizer.replaces_decay and self.train.ema:
            raise ValueError(
                f"train.ema {self.train.ema:g} averages the weights, and so does optimizer.name "
                f"{self.optimizer.plugin_name()}. Keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> RunConfig:
        for task in self.tasks:
            if self.data.overlong == "windows" and not task.extractive:
                raise ValueError(
                    f"data.overlong windows splits a context into windows; task {task.plugin_name()} "
                    "is not extractive. Use truncate or head_tail"
                )
        return self

    @model_validator(mode="after")
    def _check_metric(self, info: ValidationInfo) -> RunConfig:
        """Refuse a metric that is not a score of the task, such as a count or a threshold."""
        if not is_for_training(info):
            return self
        name, scores = self.eval.metric, self.task.list_selectable_scores()
        if name is not None and name not in scores:
            raise ValueError(
                f"eval.metric {name!r} is not a score that can select a checkpoint. {suggest_names(name, scores)}"
            )
        watched = self.train.early_stopping.metric if self.train.early_stopping else None
        if watched is not None and watched not in (*scores, "loss"):
            raise ValueError(
                f"train.early_stopping.metric {watched!r} is neither a score of task {self.task.plugin_name()} nor "
                f"loss. {suggest_names(watched, (*scores, 'loss'))}"
            )
        return self

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The task, or the tasks of a mixture's parts."""
        return self.task.part_tasks or (self.task,)

    def replace(self, section: str, **changes: object) -> RunConfig:
        """Return the config with other settings of a section; they are not checked.

        >>> config = RunConfig.model_validate({"model": {"path": "m"}, "task": {"name": "squad"}})
        >>> config.replace("train", batch_size=4).train.batch_size
        4
        """
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})

    @classmethod
    def get_default_plugin(cls, section: str) -> str:
        """Name of the default plugin of a section."""
        return cls.model_fields[section].get_default(call_default_factory=True).plugin_name()

    def as_dict(self) -> JsonTable:
        """Convert to plain values, plugins to tables with their name; reading it back gives an equal config."""
        table = self.model_dump(mode="json")
        for section in PLUGIN_SECTIONS:
            table[section] = {"name": getattr(self, section).plugin_name(), **table[section]}
        return table

    def as_yaml(self) -> str:
        """Convert to the text of a recipe."""
        return as_yaml(self.as_dict())

    def as_redacted_dict(self) -> JsonTable:
        """Convert to plain values with secrets hidden; labels, templates and columns, which a run reads back, stay."""
        return redact_settings(self.as_dict())

    def as_redacted_yaml(self) -> str:
        """Convert to the text of a run's config.yaml, with secrets hidden."""
        return as_yaml(self.as_redacted_dict())
