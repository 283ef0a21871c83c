"""The records in the files of a run directory, line by line and table by table.

Written by training, evaluation and telemetry; read back by reader.py as the same types, with None or the default in
place of missing and invalid values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fivetune.errors import ConfigError, suggest_names
from fivetune.rundir.abstention_file import Abstention
from fivetune.rundir.plan import Plan
from fivetune.types import JsonTable

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    import polars

TABLE_FIELDS = (
    "id", "inputs", "prediction", "references", "confidence", "no_answer_score", "answer", "num_clipped_tokens",
    "withheld", "reason", "skipped",
)  # fmt: skip
"""Fields of a Prediction that a table of answers has, where an answer has them."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as written to steps.jsonl.

    `loss` is in nats per scored token of the whole global batch, None if it was not finite. `effective_lr` is the
    rate that the optimizer applied (parameter scaling included). `padding_fraction` is the share of padded positions
    (0-1). `step_seconds` is the whole step, `data_seconds` its wait for the batch, `phase_seconds` its PHASES.
    `warm_up` marks steps that timings exclude, `starved` a step that waited for its batch. `encoder_flops` and
    `decoder_flops` count real tokens only (`model/flops.py`); `mfu` is their share of what the devices' data sheets
    name as the peak of dense products in the run's precision.
    """

    step: int
    loss: float | None
    lr: float
    effective_lr: float | None
    grad_norm: float | None
    num_input_tokens: int
    num_target_tokens: int
    padding_fraction: float
    step_seconds: float
    data_seconds: float
    peak_bytes: int | None
    mfu: float | None
    world_size: int
    num_examples_seen: int
    phase_seconds: dict[str, float] = field(default_factory=dict[str, float])
    warm_up: bool = False
    starved: bool = False
    encoder_flops: float | None = None
    decoder_flops: float | None = None

    def as_dict(self) -> JsonTable:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation, as written to evals.jsonl.

    `rates` are shares (0-1) that reveal a broken run: `cap_hit`, `sentinel`, `empty` and more (evaluation/tally.py);
    `loss` is in nats per target token of the first reference. `intervals` are 95 % bootstrap intervals of scores.
    `step` is the step of the weights, `run_step` the run's step at the evaluation; None outside a training run.
    `basis` identifies the evaluation data and the settings of generation: scores of another basis are not comparable.
    `temperature`: temperature of the confidences in its predictions file; None if they are the model's own.
    """

    step: int
    task: str
    task_version: int
    split: str
    num_examples: int
    num_clipped: int
    scores: dict[str, float]
    loss: float | None
    rates: dict[str, float]
    max_new_tokens: int
    seconds: float
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    run_step: int | None = None
    basis: str = ""
    temperature: float | None = None

    def as_dict(self) -> JsonTable:
        """Return the line of evals.jsonl, without `temperature` if there is none."""
        return {name: value for name, value in asdict(self).items() if name != "temperature" or value is not None}


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One accelerator at one moment; values that its driver does not report are None, never 0.

    Args:
        index: number of the device on its node, in the order of the PCI bus.
        mig: number of a MIG instance on that device; None for the whole device.
        cuda_index: CUDA device index in this process; None if the device is invisible to it or the index is unknown.
        utilisation, memory_busy: shares of the time (0-1) in which a kernel ran, in which memory was read or written.
        throttle_reasons: causes of lowered clocks; () without any. energy_joules: since the driver was loaded.
        ours: whether a process of this run uses the device.
    """

    index: int
    name: str | None = None
    utilisation: float | None = None
    memory_busy: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    pcie_sent_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    energy_joules: float | None = None
    ours: bool | None = None
    mig: int | None = None
    cuda_index: int | None = None


@dataclass(frozen=True, slots=True)
class TelemetryRecord:
    """One node and its devices at one moment, as written to telemetry.jsonl; unreadable values are None.

    Args:
        seconds: wall-clock time, since 1970.
        phase: phase of the run (prepare, train, evaluate, checkpoint); None if unknown.
        core_utilisation: of each core of the host, 0-1; cpu_utilisation: mean over the cores.
        ram_share, swap_share: used share of the host's memory and swap, 0-1.
        process_cores: mean busy cores of the process and its children (1.5 = one and a half).
        *_per_second: rates since the previous sample; None in the first.
    """

    seconds: float
    host: str | None = None
    rank: int = 0
    phase: str | None = None
    step: int | None = None
    core_utilisation: tuple[float, ...] | None = None
    process_cores: float | None = None
    ram_used_bytes: int | None = None
    ram_total_bytes: int | None = None
    process_ram_bytes: int | None = None
    swap_used_bytes: int | None = None
    disk_read_bytes_per_second: float | None = None
    disk_written_bytes_per_second: float | None = None
    network_sent_bytes_per_second: float | None = None
    network_received_bytes_per_second: float | None = None
    cpu_utilisation: float | None = None
    ram_share: float | None = None
    swap_share: float | None = None
    devices: tuple[DeviceSample, ...] = ()

    def as_dict(self) -> JsonTable:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BestEval:
    """The evaluation that picks the exported weights.

    Args:
        averaged: steps whose weights were averaged into the exported ones (checkpoint.average_best), whose score and
            loss these are; () if the weights of `step` are exported.
    """

    step: int
    metric: str
    score: float
    loss: float | None = None
    averaged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunWarning:
    """A warning; rules and pages select by its `kind`: a check's name, "frozen_loss", "diverged", or "" for others."""

    message: str
    kind: str = ""


STATES = ("preparing", "running", "finished", "interrupted", "failed", "pruned")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """status.json: progress and ending of a run.

    Args:
        state: one of STATES; "" where it is unknown, because status.json is missing or damaged.
        why: the error that ended the run.
        started: ISO 8601 with offset.
        begun: at least one step was queued, so that the run can be resumed.
        nonfinite_step: step of the non-finite loss or gradient that failed the run.
        incomplete: requested results that a finished run lacks.
        seconds: sum over all parts, without the time between; seconds_by_phase: prepare, train, evaluate, checkpoint.
    """

    state: str = ""
    why: str = ""
    started: str | None = None
    warnings: tuple[RunWarning, ...] = ()
    begun: bool = False
    step: int = 0
    best: BestEval | None = None
    seconds: float | None = None
    seconds_by_phase: dict[str, float] = field(default_factory=dict[str, float])
    num_starved_steps: int | None = None
    num_resumes: int = 0
    nonfinite_step: int | None = None
    incomplete: str | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The device of a run: `kind` is cpu, cuda or mps."""

    kind: str | None = None
    name: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HostFacts:
    cpu: str | None = None
    num_cores: int | None = None
    memory_bytes: int | None = None
    os: str | None = None


@dataclass(frozen=True, slots=True)
class GitFacts:
    """Commit of the sources; `dirty` means uncommitted changes."""

    commit: str | None = None
    dirty: bool | None = None


@dataclass(frozen=True, slots=True)
class ForwardFacts:
    """Implementation of the forward pass (`model/backend.py`)."""

    kind: str | None = None
    why: str = ""
    recompute: bool = False
    parts: str = "torch"


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """How the ranks share the model.

    Args:
        block_seconds: measured cost of every block, the encoder's first; () if it was not measured.
    """

    name: str | None = None
    world_size: int | None = None
    devices: tuple[str, ...] = ()
    block_seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPart:
    """One uninterrupted part of a run, from the 0-based `step` on.

    `changed`: what differs from the previous part, as "key: before -> after"; `model`: fingerprint of local weights.
    """

    step: int
    started: str | None = None
    device: str | None = None
    precision: str | None = None
    num_threads: int | None = None
    model: str | None = None
    versions: dict[str, str | None] = field(default_factory=dict[str, str | None])
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """machine.json: facts of the last part of a run, `parts` has all; `run_id`, random, is its checkpoints' too."""

    format_version: int = 1
    run_id: str | None = None
    device: DeviceFacts = DeviceFacts()
    host: HostFacts = HostFacts()
    versions: dict[str, str | None] = field(default_factory=dict[str, str | None])
    git: GitFacts = GitFacts()
    precision: str | None = None
    precision_why: str = ""
    weights: str = "fp32"  # FiveTune keeps weights in fp32; autocast only computes in 16 bits
    forward: ForwardFacts = ForwardFacts()
    attention: str | None = None
    num_threads: int | None = None
    num_threads_why: str = ""
    peak_flops: float | None = None  # dense, by the data sheet: what mfu is a share of
    product_flops: float | None = None  # of a large matrix product, measured at the start of the run on a GPU
    num_parameters: int | None = None
    num_trained_parameters: int | None = None
    vocab_size: int | None = None
    strategy: StrategyFacts = StrategyFacts()
    command: str | None = None
    working_directory: str | None = None
    batch_size_auto: JsonTable | None = None
    capture: JsonTable | None = None
    parts: tuple[RunPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts[i]` is the number of values in [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several answers to a question, with its score: the probability of the answer (0-1), as `confidence`."""

    text: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One answered question: a line of predictions/<split>-<step>.jsonl. Fields that do not apply are None.

    Args:
        references: all gold answers; () where none is known.
        scores: scores of this example, by name.
        logprob: log-probability of the generated tokens, in nats.
        confidence: probability of the prediction (0-1): of a label among the labels, else exp(logprob), or of both ends
            of a span; calibrated by the temperature of model/ if there is one. The confidence and the scores of all
            further candidates add up to 1 at most.
        hit_cap: generation ended at max_new_tokens.
        sentinel: the text holds a sentinel token (<extra_id_0>).
        unknown_chars: number of unknown tokens in the text.
        answer_clipped: every reference was clipped.
        num_clipped_tokens: input tokens beyond the length limit, at `clipped_spans` of inputs (not in files).
        in_context: the answer is a span of its context.
        candidates: the best answers, best first, or several that were drawn, the prediction first.
        no_answer_score: probability of no answer, on the scale of confidence.
        answer: best answer other than no answer.
        left_label_set: free generation leaves the set of labels.
        teacher_forced_exact, free_running_exact: the reference was reproduced with and without its own prefix.
        num_passages: passages or windows merged into the answer.
        skipped: why a record has no prediction.
        unsure: the answer, `withheld`, is not given because of its low confidence; `reason` says which was needed.
    """

    id: str
    inputs: str = ""
    prediction: str = ""
    references: tuple[str, ...] = ()
    scores: dict[str, float] = field(default_factory=dict[str, float])
    confidence: float | None = None
    logprob: float | None = None
    num_tokens: int | None = None
    hit_cap: bool | None = None
    sentinel: bool | None = None
    unknown_chars: int | None = None
    num_input_tokens: int | None = None
    num_clipped_tokens: int | None = None
    clipped_spans: tuple[tuple[int, int], ...] = ()
    answer_clipped: bool | None = None
    in_context: bool | None = None
    no_answer_score: float | None = None
    answer: str | None = None
    candidates: tuple[Candidate, ...] = ()
    left_label_set: bool | None = None
    teacher_forced_exact: bool | None = None
    free_running_exact: bool | None = None
    num_passages: int | None = None
    meta: JsonTable = field(default_factory=JsonTable)
    skipped: str | None = None
    unsure: bool | None = None
    reason: str | None = None
    withheld: str | None = None

    def as_dict(self) -> JsonTable:
        """Return the JSON object of a predictions file, without the fields that do not apply."""
        line: JsonTable = {}
        for name, value in asdict(self).items():
            is_empty = name in ("scores", "candidates", "clipped_spans") and not value
            if value is not None and not is_empty:
                line[name] = value
        return line


class Predictions(list[Prediction]):
    """The answers of a call, in the order of its inputs; also a table.

    >>> answers = Predictions([Prediction(id="1", inputs="hi", prediction="hello", confidence=0.75)])
    >>> answers.build_rows(), answers.build_rows(["prediction"])
    ([{'id': '1', 'inputs': 'hi', 'prediction': 'hello', 'confidence': 0.75}], [{'prediction': 'hello'}])
    """

    row_index: Any = None  # the index of the DataFrame of pandas that was answered

    def build_rows(self, fields: Sequence[str] = TABLE_FIELDS) -> list[JsonTable]:
        """Return a row of some fields of Prediction per answer, without the fields that no answer has.

        Raises ConfigError for a field that Prediction does not have.
        """
        known = Prediction.__slots__
        for name in fields:
            if name not in known:
                raise ConfigError(f"fields: {name}: Prediction has no such field. {suggest_names(name, known)}")
        tables = [one.as_dict() for one in self]
        kept = [name for name in fields if any(table.get(name) not in (None, ()) for table in tables)]
        return [{name: table.get(name) for name in kept} for table in tables]

    def to_pandas(self, fields: Sequence[str] = TABLE_FIELDS) -> pandas.DataFrame:
        """Return the rows as a DataFrame of pandas, which has the order of the inputs, and the index of a DataFrame of
        pandas among them. Errors: as of `build_rows`.
        """
        import pandas  # pyright: ignore[reportMissingTypeStubs]

        return pandas.DataFrame(self.build_rows(fields), index=self.row_index)

    def to_polars(self, fields: Sequence[str] = TABLE_FIELDS) -> polars.DataFrame:
        """Return the rows as a DataFrame of polars, which has the order of the inputs. Errors: as of `build_rows`."""
        import polars

        return polars.DataFrame(self.build_rows(fields), infer_schema_length=None)


@dataclass(frozen=True, slots=True)
class SkippedRecord:
    """A skipped record of a data file: `where` is file and line."""

    where: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EvalShare:
    """The division of the training records by data.eval_share: related records form a group that is never divided."""

    share: float | None = None
    seed: int | None = None
    group_column: str | None = None
    num_records: int | None = None
    num_groups: int | None = None
    largest_group: int | None = None  # in records
    num_eval_records: int | None = None


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """data.json of one split: counts of records and examples, truncation, lengths.

    Args:
        num_read: records in the files; num_records_kept: used ones; num_skipped: excluded ones.
        num_skipped_bad: excluded because invalid; num_not_learnt: examples that training excludes.
        num_examples: rows of the store (each window and snippet counts); num_groups: questions.
        num_examples_clipped: examples with clipped inputs; num_clipped_input_tokens: tokens clipped from inputs.
        num_answers_lost: examples whose answer was clipped from the inputs.
        input_p99, target_p99: 99th percentile of lengths, in tokens; whole_...: of the lengths before clipping.
        num_unlabelled: records excluded because they have no label; label_counts: records of each gold label;
            label_forms: records of each form of a label, as far as it differs from the label.
        placeholder_counts: records of each gold answer that programs write for an empty cell, such as None;
            empty_input_counts: records of each such input.
        num_blank_golds: records with a blank gold answer among several, which an empty prediction matches;
            num_blank_synonyms: records whose blank synonyms were dropped.
        split: how data.eval_share divided the training records; None where data.eval has files.
        parts: the summaries of a mixture's parts by name.
    """

    fingerprint: str | None = None
    source: tuple[str, ...] = ()
    num_read: int | None = None
    num_records_kept: int | None = None
    num_skipped: int | None = None
    num_skipped_bad: int | None = None
    num_kept: int | None = None
    num_examples: int | None = None
    num_groups: int | None = None
    num_cut_into_windows: int | None = None
    num_windows: int | None = None
    num_not_learnt: int | None = None
    num_unlabelled: int | None = None
    num_blank_golds: int | None = None
    num_blank_synonyms: int | None = None
    num_examples_clipped: int | None = None
    num_clipped_input_tokens: int | None = None
    num_clipped_targets: int | None = None
    num_answers_lost: int | None = None
    num_unknown_tokens: int | None = None
    num_input_tokens: int | None = None
    num_target_tokens: int | None = None
    input_p99: int | None = None
    target_p99: int | None = None
    whole_input_p99: int | None = None
    whole_target_p99: int | None = None
    max_input_tokens: int | None = None
    max_target_tokens: int | None = None
    longest_input: int | None = None
    longest_target: int | None = None
    input_lengths: Histogram | None = None
    target_lengths: Histogram | None = None
    skips: tuple[SkippedRecord, ...] = ()
    first_bad: SkippedRecord | None = None
    label_counts: dict[str, int] = field(default_factory=dict[str, int])
    label_forms: dict[str, int] = field(default_factory=dict[str, int])
    placeholder_counts: dict[str, int] = field(default_factory=dict[str, int])
    empty_input_counts: dict[str, int] = field(default_factory=dict[str, int])
    split: EvalShare | None = None
    parts: dict[str, SplitSummary] = field(default_factory=dict[str, "SplitSummary"])


@dataclass(frozen=True, slots=True)
class DataSummary:
    """data.json: the training and the evaluation data of a run."""

    train: SplitSummary | None = None
    eval: SplitSummary | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory as read back: all data of a report, without torch.

    Missing values are the default; lines without a required field are omitted.

    Args:
        config: config.yaml, nested settings.
        predictions: predictions of each evaluation, by the name of its file (`eval-300`); see `read_predictions`.
        damage: a sentence for each damaged file, with what the reader omitted; a file of predictions is included once
            it has been read.
        temperature: temperature of the confidences that model/ gives; 1 if they are the model's own.
        abstention: errors by confidence and the promise of model/; None without the file.
        has_model: model/ is there, also of a run that failed after it was written.
        trace: the table of a TraceSummary; range_test: the table of a RangeTest (`fivetune find-lr`).
    """

    name: str
    config: JsonTable = field(default_factory=JsonTable)
    machine: MachineRecord = MachineRecord()
    status: RunStatus = RunStatus()
    data: DataSummary = DataSummary()
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    evals: list[EvalRecord] = field(default_factory=list[EvalRecord])
    predictions: Mapping[str, list[Prediction]] = field(default_factory=dict[str, list[Prediction]])
    damage: list[str] = field(default_factory=list[str])
    telemetry: list[TelemetryRecord] = field(default_factory=list[TelemetryRecord])
    trace: JsonTable = field(default_factory=JsonTable)
    range_test: JsonTable = field(default_factory=JsonTable)
    plan: Plan | None = None
    temperature: float = 1.0
    abstention: Abstention | None = None
    has_model: bool = False

    @property
    def num_steps(self) -> int | None:
        """Planned steps of the whole run; None if it ended before its plan was written."""
        return self.plan.num_steps if self.plan else None

    @property
    def warnings(self) -> list[str]:
        """The warnings of the run, and `damage`, of which a resume may have recorded some."""
        return [*dict.fromkeys([*(one.message for one in self.status.warnings), *self.damage])]

    def read_predictions(self, record: EvalRecord | None) -> list[Prediction]:
        """Return the predictions of an evaluation; [] without it or its file.

        Their file is read at the first call only, which adds a sentence about its damage or loss to the damage and the
        warnings of the run.
        """
        return self.predictions.get(f"{record.split}-{record.step}", []) if record else []

    def __repr__(self) -> str:
        status = self.status
        return f"Run({self.name!r}, {status.state or 'unknown'}, step {status.step} of {self.num_steps})"
