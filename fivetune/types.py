"""The records that flow through FiveTune, in the order in which they flow.

RawRecord -> TextExample -> TokenExample -> Batch -> StepRecord / EvalRecord / TelemetryRecord -> Run
Run -> Verdict, Comparison, Search -> Page
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from peft import PeftConfig
    from torch import Tensor, nn, optim

    from fivetune.distributed.world import World


PHASES = ("data", "host", "copy", "forward", "backward", "bubble", "exchange", "optimizer")
"""Phases of a step's time: waiting for the batch, work of the host, copy to the device, ..., waiting for another
pipeline stage, all-reduce, update."""

OnNote = Callable[[str], object]
"""Called with a sentence for people."""

PhaseTimer = Callable[[str], None]
"""Called with the phase (of PHASES) that starts; `Meter.enter` is one."""

JsonTable = dict[str, Any]
"""A table with any values of JSON or YAML; read with isinstance, or converted to a typed record."""

JsonValue: TypeAlias = Mapping[str, Any] | Sequence[Any] | str | float | bool | None
"""Any value of JSON or YAML; isinstance gives the type of a table's or a list's elements."""

TorchState = dict[str, Any]
"""A state dict or a parameter group, as torch.optim types them: tensors, numbers, and lists and tables of these."""

Autocast = Callable[[], AbstractContextManager[object]]
"""Returns a new autocast context."""

DrawnRows: TypeAlias = "NDArray[np.int64]"
"""[n] rows of the examples drawn for one resample, repeats allowed."""

Resampler = Callable[[DrawnRows], dict[str, float]]
"""The corpus scores of the examples drawn."""

MetricSpec = str | Mapping[str, Any]
"""A metric in a recipe: its name, or a table of its name and options."""

Merging = Literal["best", "ranked"]

ModelT = TypeVar("ModelT", bound="nn.Module")


def ignore_note(text: str) -> None:
    """An OnNote that shows nothing."""


def ignore_phase(phase: str) -> None:
    """A PhaseTimer that measures nothing."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as its source gave it.

    Args:
        fields: the columns of the record, by the source's names until `read_records` applies `data.columns`.
        where: file and line (or record number) for messages: `train.jsonl:17`.
        has_own_id: the source gave the column `id`; else it was made up from the record's place.
    """

    fields: Mapping[str, Any]
    where: str
    has_own_id: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class TextExample:
    """One example as text.

    Args:
        id: unique in its data set.
        inputs: text for the encoder.
        targets: text that the decoder learns to generate.
        references: all gold answers; () only if they are unknown (prediction).
        clippable: character span [start, end) of `inputs` that may be clipped if the text is too long.
        meta: further facts for reports and metrics.
        group: id of the question, shared by its examples (snippets, windows); "" means `id`.
    """

    id: str
    inputs: str
    targets: str
    references: tuple[str, ...]
    clippable: tuple[int, int] = (0, 0)
    meta: Mapping[str, Any] = field(default_factory=JsonTable)
    group: str = ""


ConversionResult: TypeAlias = TextExample | tuple[TextExample, ...] | None


class PluginOptions(Protocol):
    """What the options classes of all kinds have from `fivetune.plugins.Options`."""

    version: ClassVar[int]

    @classmethod
    def plugin_name(cls) -> str: ...
    def model_dump(self, *, mode: str = ..., exclude_defaults: bool = ...) -> JsonTable: ...
    def model_copy(self, *, update: Mapping[str, object] = ...) -> Self: ...


class Task(PluginOptions, Protocol):
    """Interface of the options class in every file of fivetune/tasks/, whose docstring has the contract."""

    @property
    def metrics(self) -> tuple[MetricSpec, ...]: ...
    @property
    def main_metric(self) -> str: ...
    @property
    def no_answer_text(self) -> str | None: ...
    @property
    def labels(self) -> Mapping[str, str] | None: ...
    @property
    def extractive(self) -> bool: ...
    @property
    def merging(self) -> Merging: ...
    @property
    def part_tasks(self) -> tuple[Task, ...]: ...
    def list_selectable_scores(self) -> tuple[str, ...]: ...
    def to_text(self, record: RawRecord, *, labelled: bool = True) -> ConversionResult: ...
    def from_text(self, text: str) -> str: ...
    def to_score(self, record: RawRecord) -> ConversionResult: ...
    def from_answer(self, text: str) -> str: ...
    def train_targets(self, example: TextExample) -> tuple[str, ...]: ...


class Optimizer(PluginOptions, Protocol):
    """Interface of the options class in every file of training/optimizers/; `OptimizerOptions` there describes it."""

    state_bytes_per_parameter: ClassVar[float]
    lr_range: ClassVar[tuple[float, float]]
    supports_shards: ClassVar[bool]
    supports_graphs: ClassVar[bool]
    supports_tpu: ClassVar[bool]
    gathers_state: ClassVar[bool]
    replaces_decay: ClassVar[bool]

    @property
    def lr(self) -> float | None: ...
    @property
    def computes_rate(self) -> bool: ...
    def get_state_bytes(self, kind: str) -> float: ...
    def refuse_missing_packages(self) -> None: ...
    def build(self, groups: list[TorchState]) -> optim.Optimizer: ...
    def build_for_tables(self, groups: list[TorchState]) -> optim.Optimizer: ...
    def effective_lr(self, optimizer: optim.Optimizer) -> float | None: ...


class Schedule(PluginOptions, Protocol):
    """Interface of the options class in every file of training/schedules/, whose docstring has the contract."""

    def factor(self, step: int, num_steps: int) -> float: ...


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What a strategy must support: names and values of a recipe, and the number of ranks.

    Args:
        supports_shards: whether the optimizer updates tensors that are divided among the ranks.
    """

    optimizer: str
    supports_shards: bool
    precision: str
    forward: str
    batch_size: int | str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Layout:
    """How the ranks of a run share the model and the examples.

    Args:
        world: ranks.
        heads: ranks that share each block's heads and features (tensor parallel).
        stages: ranks that each hold some of the blocks (pipeline).
        shards: ranks among which weights, gradients and state are sharded (FSDP2).
        offload: whether the shards are in the host's memory.
        reduce_once: whether whole gradients are kept until the last micro-batch of a step, else shards after each.
    """

    world: int = 1
    heads: int = 1
    stages: int = 1
    shards: int = 1
    offload: bool = False
    reduce_once: bool = True

    @property
    def copies(self) -> int:
        """Groups of ranks that compute different examples.

        >>> Layout(8, shards=8).copies, Layout(8, heads=4).copies
        (8, 2)
        """
        return self.world // (self.heads * self.stages)

    @property
    def replicas(self) -> int:
        """Copies of the shards, between which gradients are all-reduced."""
        return self.copies // self.shards


class Passes(Protocol):
    """The passes of a step's micro-batches, which a strategy orders."""

    def compute_loss(self, batch: Batch) -> Tensor:
        """Run the forward pass of a micro-batch; returns its share of the step's loss, []."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss."""
        ...

    def count_rows(self, batch: Batch) -> tuple[int, int]:
        """Count the rows of the encoder's and of the decoder's activations of a micro-batch."""
        ...


class Strategy(PluginOptions, Protocol):
    """Interface of the options class in every file of training/strategies/; `StrategyOptions` there describes it.

    A method that training needs is added here and there, where its default is that of an unsharded model.
    """

    supports_multiple: ClassVar[bool]
    sharded: ClassVar[bool]
    supports_tpu: ClassVar[bool]
    complexity: ClassVar[int]
    size_option: ClassVar[str]

    @classmethod
    def list_variants(cls, num_ranks: int, per_node: int) -> Iterator[Self]: ...
    @property
    def needs_block_seconds(self) -> bool: ...
    def get_model_size(self, num_ranks: int) -> int: ...
    def get_layout(self, num_ranks: int) -> Layout: ...
    def explain_incompatibility(self, settings: RunSettings) -> str: ...
    def get_seed_offset(self, world: World) -> int: ...
    def wrap(
        self, model: ModelT, device: str, world: World = ..., *, precision: str = ..., costs: Sequence[float] = ...
    ) -> ModelT: ...
    def get_weight_device(self, device: str) -> str: ...
    def suppress_warnings(self) -> AbstractContextManager[None]: ...
    def accumulate_gradients(
        self, model: nn.Module, world: World, batches: Sequence[Batch], passes: Passes
    ) -> Tensor: ...
    def reduce_gradients(self, model: nn.Module, world: World) -> None: ...
    def clip(self, model: nn.Module, max_norm: float | None) -> Tensor: ...


class Adapter(PluginOptions, Protocol):
    """Interface of the options class in every file of fivetune/model/adapters/; `AdapterOptions` there describes it."""

    base_bits: ClassVar[int]
    lr_scale: ClassVar[float]
    usual: ClassVar[tuple[str, ...]]

    @property
    def target_names(self) -> tuple[str, ...]: ...
    @property
    def is_virtual(self) -> bool: ...
    @property
    def saved_in(self) -> str: ...
    def build_config(self, targets: Sequence[str]) -> PeftConfig: ...


@dataclass(frozen=True, slots=True)
class TokenExample:
    """One example in token ids, each sequence with its end-of-sequence id.

    `num_clipped_*` count the tokens that a length limit cut off; `answer_clipped` is true when the
    inputs held a reference before clipping and hold none after it.
    """

    id: str
    input_ids: Sequence[int]
    labels: Sequence[int]
    num_clipped_inputs: int
    num_clipped_targets: int
    answer_clipped: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """Some examples, flattened: no padding.

    Args:
        input_ids: [N_src] int64, the inputs of all examples one after the other.
        labels: [N_tgt] int64, likewise; every label is scored.
        cu_seqlens_src: [B + 1] int64, where each input starts and ends in `input_ids`.
        cu_seqlens_tgt: [B + 1] int64, likewise for `labels`.
        ids: the B example ids.
        is_filler: computed with zero loss weight, so that every rank runs the same number of passes.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens_src: Tensor
    cu_seqlens_tgt: Tensor
    ids: tuple[str, ...]
    is_filler: bool = False

    @property
    def num_input_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_target_tokens(self) -> int:
        return self.labels.numel()


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of a metric: one dict for the whole corpus and one per example, in input order.

    `resample(rows)` returns the corpus scores of the examples `rows` ([n] ints, repeats allowed), for a bootstrap.
    Without it, a corpus score is 100 times the mean of the examples' scores of the same name.

    `sizes` has the number of examples behind a score where that is not all of them (see `compute_pooled_size` in
    fivetune.scores.metrics): an interval needs it if no resample differs from the others.
    """

    corpus: dict[str, float]
    each: list[dict[str, float]]
    resample: Resampler | None = None
    sizes: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding of a rule: a cause that limits or invalidates a run.

    Args:
        rule: name of the rule: `input_bound`.
        message: a sentence with the evidence in figures.
        figure, threshold: the measured value, and the value at which the rule reports; None for a plain fact.
        confidence: 0-1.
        change: settings that fix it, by dotted key; {} if no setting does.
        advice: the remedy, in a sentence.
        gain: predicted speed-up of the training (1.3 = 1.3 times as fast); None if speed is not affected.
    """

    rule: str
    message: str
    figure: float | None
    threshold: float | None
    confidence: float
    advice: str
    change: Mapping[str, Any] = field(default_factory=JsonTable)
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a search.

    Args:
        state: finished, pruned, failed, running or waiting.
        settings: the searched keys with the values of this trial; {} before it began.
        score: score of the best evaluation, over all examples if the trial finished; None before the first.
        curve: (step, score) of each evaluation.
        why: the reason why a trial failed or was stopped.
        run: name of its run directory in the study's folder.
    """

    number: int
    state: str
    settings: Mapping[str, Any]
    score: float | None
    curve: tuple[tuple[int, float], ...] = ()
    seconds: float | None = None
    why: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Search:
    """The state of a study: its trials by number, and the importance of each setting (shares of 1; {} if unknown).

    Args:
        log_settings: searched settings that are drawn log-uniformly.
        starts_from_recipe: trial 0 has the recipe's own values.
        folder: folder of the study, with best.yaml and search.html.
    """

    name: str
    metric: str
    higher_is_better: bool
    trials: tuple[Trial, ...]
    best: Trial | None
    importances: Mapping[str, float] = field(default_factory=dict[str, float])
    log_settings: tuple[str, ...] = ()
    starts_from_recipe: bool = False
    folder: str = ""
