"""The records that flow through FiveTune, in the order in which they flow.

RawRecord -> TextExample -> TokenExample -> Batch -> StepRecord / EvalRecord / TelemetryRecord -> Run
Run -> Verdict, Comparison, Search -> Page
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


PHASES = ("data", "host", "copy", "forward", "backward", "exchange", "optimizer")
"""What a step's seconds go into: waiting for the batch, work of the host between, copy to the device, ..."""

Mark = Callable[[str], None]
"""How the parts of a step say which of PHASES begins; `Meter.enter` is one."""

Line = dict[str, Any]
"""One question of a predictions file: id, inputs, prediction, references, scores and what `Evaluator` knows besides."""


def unmarked(phase: str) -> None:
    """A Mark for when nobody measures."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """One record as its source gave it.

    Args:
        fields: the columns of the record, names as in the source (after `data.columns` was applied).
        where: file and line (or record number) for messages: `train.jsonl:17`.
        has_own_id: the source gave the column `id`; else it was made up from the record's place.
    """

    fields: Mapping[str, Any]
    where: str
    has_own_id: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class TextExample:
    """One example in words.

    Args:
        id: unique in its data set.
        inputs: what the encoder reads.
        targets: what the decoder learns to write.
        references: all answers that count as right; () only where nothing is known (prediction).
        clippable: character span [start, end) of `inputs` that may be cut when the text is too long.
        meta: whatever reports and metrics want to know besides.
        group: id of the question, where several examples (snippets, windows) are asked it; "" stands for `id`.
    """

    id: str
    inputs: str
    targets: str
    references: tuple[str, ...]
    clippable: tuple[int, int] = (0, 0)
    meta: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""


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
        is_lent: another process learns from it: it is computed here to have as many batches, and does not count.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens_src: Tensor
    cu_seqlens_tgt: Tensor
    ids: tuple[str, ...]
    is_lent: bool = False

    @property
    def num_input_tokens(self) -> int:
        return self.input_ids.numel()

    @property
    def num_target_tokens(self) -> int:
        return self.labels.numel()


@dataclass(frozen=True, slots=True)
class Scores:
    """What a metric says: one dict for the whole corpus and one per example, in input order.

    `resample(rows)` gives the corpus scores of the examples `rows` ([n] ints, repeats allowed): what a bootstrap needs.
    Without it every corpus score is 100 times the mean of each example's score of the same name.
    """

    corpus: dict[str, float]
    each: list[dict[str, float]]
    resample: Callable[[Any], dict[str, float]] | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, as written to steps.jsonl.

    `loss` is in nats per scored token of the whole global batch; None stands for a value that was
    not finite. `effective_lr` is the step that the optimizer really took (parameter scaling included).
    `padding_fraction` is the share of padded positions in what the model computed (0-1). `step_seconds` is
    the whole step, `data_seconds` the part of it that waited for the batch. `phase_seconds` splits the step into
    PHASES, those that were measured. `warm_up` marks steps whose times say nothing about the later ones;
    `starved` a step whose batch was not ready when it was wanted. `encoder_flops`, `decoder_flops` are the operations
    that the step needs for its real tokens (`model/flops.py`), `mfu` the share of the devices' peak that they make.
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
    phase_seconds: dict[str, float] = field(default_factory=dict)
    warm_up: bool = False
    starved: bool = False
    encoder_flops: float | None = None
    decoder_flops: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One evaluation, as written to evals.jsonl.

    `rates` are shares (0-1) that reveal a broken run: `cap_hit`, `sentinel`, `empty` and more (`evaluate.RATES`);
    `loss` is in nats per target token of the first reference. `intervals` are 95 % bootstrap intervals of scores.
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
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One accelerator at one moment; what its driver does not tell is None, never 0.

    Args:
        index: number of the device on its node, in the order of the PCI bus.
        mig: number of a MIG instance on that device; None for the whole device.
        cuda_index: number under which this process's CUDA knows it; None where it does not see it, or cannot be told.
        utilisation, memory_busy: shares of the time (0-1) in which a kernel ran, in which memory was read or written.
        throttle_reasons: why the clocks are held down; () where they are not.
        energy_joules: since the driver was loaded.
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
    """One node and its devices at one moment, as written to telemetry.jsonl; what cannot be read is None.

    Args:
        seconds: wall-clock time, since 1970.
        phase: what the run did: prepare, train, evaluate, checkpoint; None where that is unknown.
        core_utilisation: of each core of the host, 0-1; cpu_utilisation: of all of them together.
        ram_share, swap_share: what is used of the host's, 0-1.
        process_cores: cores that the process and its children kept busy (1.5 = one and a half).
        *_per_second: since the sample before; None in the first.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, read back: everything that a report needs, and nothing that needs torch."""

    name: str
    config: dict[str, Any]
    machine: dict[str, Any]
    status: dict[str, Any]
    data: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    predictions: Mapping[str, list[dict[str, Any]]]
    warnings: list[str]
    telemetry: list[dict[str, Any]] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=dict)
    found: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One thing that limits or spoils a run, in plain words.

    Args:
        rule: name of the rule that found it: `input_bound`.
        says: a sentence with the evidence in figures.
        figure, threshold: what was measured, and from where on the rule speaks; None for a plain fact.
        confidence: 0-1.
        change: settings that would mend it, by dotted key; {} where it is not a matter of settings.
        advice: what to do, in a sentence.
        gain: predicted speed-up of the training (1.3 = 1.3 times as fast); None where it is not a matter of speed.
    """

    rule: str
    says: str
    figure: float | None
    threshold: float | None
    confidence: float
    advice: str
    change: Mapping[str, Any] = field(default_factory=dict)
    gain: float | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a variant over its runs, or its difference to the baseline's: value and range.

    `low` and `high` are what `spread` says: of scores a 95 % interval over the "seeds", or over the "examples" of one
    run; of times and the like their "range", least and most; None where `num` runs say nothing about it.
    `p_value` is two-sided, of a difference over examples.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    num: int = 1
    spread: str = ""
    p_value: float | None = None


@dataclass(frozen=True, slots=True)
class Variant:
    """One configuration of a comparison: its runs (one per seed) and what they have in common.

    Args:
        settings: the varied keys with their values.
        measures: by name (`compare.MEASURES`): score_best, score_last, seconds, examples_per_second, ...
        against: the same names: this variant minus the baseline, or divided by it, as `compare.MEASURES` says; over
            runs with the same seed. {} for the baseline.
        over_examples: best score minus the baseline's by a paired bootstrap over the examples, of each the mean over
            the seeds that both have; None where the evaluations were not of the same examples.
        pareto: no other variant is both better and cheaper.
        failures: what became of runs that did not finish, a sentence each.
    """

    name: str
    settings: Mapping[str, Any]
    runs: tuple[Run, ...]
    measures: Mapping[str, Measure]
    against: Mapping[str, Measure] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()
    pareto: bool = False
    failures: tuple[str, ...] = ()
    over_examples: Measure | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Variants beside their baseline; `warnings` are differences other than the varied keys.

    `higher_is_better` is that of `metric`; `price_per_hour` is the machine's, in any currency, if it is known.
    """

    title: str
    baseline: str
    metric: str
    varied: tuple[str, ...]
    variants: tuple[Variant, ...]
    warnings: tuple[str, ...] = ()
    higher_is_better: bool = True
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a search.

    Args:
        state: finished, pruned, failed, running or waiting.
        settings: the searched keys with the values of this trial; {} before it began.
        score: of the best evaluation, over all examples where the trial finished; None before the first.
        curve: (step, score) of each evaluation.
        why: what became of a trial that failed or was stopped.
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
    """A study as it stands: its trials by number, and how much each setting mattered (shares of 1; {} if unknown)."""

    name: str
    metric: str
    higher_is_better: bool
    trials: tuple[Trial, ...]
    best: Trial | None
    importances: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph of plain text; `kind` is one of lead, note, warning, good, code, heading."""

    body: str
    kind: str = "note"


@dataclass(frozen=True, slots=True)
class Figure:
    """One key figure: what it is, its value as printed, and a remark."""

    label: str
    value: str
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of printable cells under a header; `caption` says what it shows, `folded` hides it until asked for.

    Args:
        values: what each cell sorts by, row by row (None: by its text). A table that has them can be sorted and
            filtered by the reader; what follows a line break in its cells is set small.
    """

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False
    values: tuple[tuple[float | None, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A Plotly figure (`data`, `layout` as plain dicts) with a sentence saying what it shows.

    Colours are the page's CSS variables (`var(--series-1)`). Two neighbours that are not `wide` share a row.
    Charts of one `group` show their values at the same x together, and neighbours among them share one legend, whose
    entries are the `meta` of their traces.
    """

    caption: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    wide: bool = True
    group: str = ""


@dataclass(frozen=True, slots=True)
class Example:
    """One prediction beside all its gold answers; `verdict` is one of right, near, wrong, unscored.

    `tags` are what a reader may choose examples by: {"truncation": "whole", "answerable": "unanswerable"}.
    `before` is what the first of two runs said, where two are compared: `verdict` is then fixed, broken or both wrong.
    """

    id: str
    inputs: str
    prediction: str
    references: tuple[str, ...]
    verdict: str
    remark: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    before: str | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A titled part of a page."""

    title: str
    parts: tuple[Text | Figure | Table | Chart | Example, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """One HTML page before it is rendered; `badges` are its state in a word or two each."""

    title: str
    sections: tuple[Section, ...]
    subtitle: str = ""
    badges: tuple[Text, ...] = ()
