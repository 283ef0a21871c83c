"""The records that flow through FiveTune, in the order in which they flow.

RawRecord -> TextExample -> TokenExample -> Batch -> StepRecord / EvalRecord -> Run -> Page
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


Line = dict[str, Any]
"""One question of a predictions file: id, inputs, prediction, references, scores and what `Evaluator` knows besides."""


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
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens_src: Tensor
    cu_seqlens_tgt: Tensor
    ids: tuple[str, ...]

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
    the whole step, `data_seconds` the part of it that waited for the batch.
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
    """Rows of printable cells under a header; `caption` says what it shows, `folded` hides it until asked for."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A Plotly figure (`data`, `layout` as plain dicts) with a sentence saying what it shows.

    Colours are the page's CSS variables (`var(--series-1)`). Two neighbours that are not `wide` share a row.
    """

    caption: str
    data: tuple[dict[str, Any], ...]
    layout: dict[str, Any]
    wide: bool = True


@dataclass(frozen=True, slots=True)
class Example:
    """One prediction beside all its gold answers; `verdict` is one of right, near, wrong, unscored.

    `tags` are what a reader may choose examples by: {"truncation": "whole", "answerable": "unanswerable"}.
    """

    id: str
    inputs: str
    prediction: str
    references: tuple[str, ...]
    verdict: str
    remark: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


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
