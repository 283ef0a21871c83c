"""Convert the records of a source into the task's examples, and count the records that give none.

In: a Source. Out: TextExamples; for data.json, counts of records read, kept, left out and skipped and tokens clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from fivetune.data.encode import LengthLimits
from fivetune.data.labels import PLACEHOLDERS, get_label_form
from fivetune.data.records import (
    BadRecord,
    as_bad_record,
    number_duplicate_ids,
    read_records,
    refuse_duplicate_ids,
)
from fivetune.data.split import EvalSplit, SplitResult, split_records
from fivetune.errors import DataError, MissingLabelError, RecordError
from fivetune.metrics import Scorer, rewards_blank
from fivetune.tasks import DROPPED_SYNONYMS
from fivetune.types import JsonTable, RawRecord, Task, TextExample, TokenExample

MAX_SKIPS_KEPT = 50  # skipped records listed with their reasons; all are counted


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that determines a store except the tokenizer."""

    paths: tuple[str, ...]
    task: Task
    limits: LengthLimits
    columns: dict[str, str] = field(default_factory=dict)
    on_bad_record: str = "fail"
    max_examples: int | None = None
    for_training: bool = False
    labelled: bool = True
    split: EvalSplit | None = None  # the side of `paths` to read; max_examples then counts records of that side


class ReadCounts:
    """Counts of records read, kept and skipped and of tokens clipped, for data.json."""

    OF_READING = (
        *("num_read", "num_records_kept", "num_skipped", "num_skipped_bad", "skips", "first_bad"),
        *("num_unlabelled", "num_blank_golds", "num_blank_synonyms", "label_counts", "label_forms"),
        *("placeholder_counts", "split"),
    )

    def __init__(self) -> None:
        self.num_read = self.num_records_kept = self.num_skipped = self.num_skipped_bad = 0
        self.num_unlabelled = 0  # records left out because they have no label
        self.num_blank_golds = 0  # records whose gold answers, a blank one among them, reward an empty prediction
        self.num_blank_synonyms = 0  # records whose blank synonyms were dropped
        self.label_counts: dict[str, int] = {}  # label tasks: records per gold label
        self.label_forms: dict[str, int] = {}  # records per form of a label, if its case or white space differs
        self.placeholder_counts: dict[str, int] = {}  # records per gold answer that stands for an empty cell
        self.split: JsonTable | None = None  # the split of the training records by data.eval_share
        self.num_kept = 0  # examples of the kept records
        self.num_cut_into_windows = self.num_windows = 0  # over-long examples, and the windows made of them
        self.num_not_learnt = 0  # examples or windows without a target
        self.num_examples_clipped = self.num_clipped_input_tokens = 0
        self.num_clipped_targets = self.num_answers_lost = self.num_unknown_tokens = 0
        self.skips: list[dict[str, str]] = []
        self.first_bad: dict[str, str] | None = None

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be used."""
        self.num_skipped_bad += 1
        named = {"where": bad.where, "reason": bad.reason}
        self.first_bad = self.first_bad or named
        self._record_skip(named, is_news=True)

    def leave_out(self, where: str, reason: str) -> None:
        """Count a record that the task leaves out on purpose; the first record of each reason is listed."""
        is_news = all(reason != skip["reason"] for skip in self.skips)
        self._record_skip({"where": where, "reason": reason}, is_news=is_news)

    def _record_skip(self, named: dict[str, str], *, is_news: bool) -> None:
        self.num_read += 1
        self.num_skipped += 1
        if is_news and len(self.skips) < MAX_SKIPS_KEPT:
            self.skips.append(named)

    @property
    def of_tokenising(self) -> dict[str, int]:
        """The counts that a resumed build continues; those of reading are counted again."""
        return {name: value for name, value in vars(self).items() if name not in self.OF_READING}

    def keep(self, examples: Sequence[TextExample], task: Task, scorer: Scorer) -> None:
        """Count a record that gives examples; in a label task, by its gold label."""
        self.num_read += 1
        self.num_records_kept += 1
        golds = examples[0].references
        self.num_blank_golds += rewards_blank(scorer, golds)
        self.num_blank_synonyms += DROPPED_SYNONYMS in examples[0].meta
        if not golds:
            return
        form = get_label_form(examples[0])
        if task.labels is not None:
            self.label_counts[golds[0]] = self.label_counts.get(golds[0], 0) + 1
            if form != golds[0]:
                self.label_forms[form] = self.label_forms.get(form, 0) + 1
        if form in PLACEHOLDERS and not task.extractive:
            self.placeholder_counts[form] = self.placeholder_counts.get(form, 0) + 1

    def add_windows(self, examples: Sequence[TextExample]) -> None:
        """Count the windows among the examples, and the examples that were split into windows."""
        numbers = [example.meta["window"][0] for example in examples if "window" in example.meta]
        self.num_windows += len(numbers)
        self.num_cut_into_windows += numbers.count(1)

    def add(self, tokens: TokenExample, unknown: int | None) -> None:
        """Count the clipped tokens, the lost answer and the unknown tokens of an example."""
        self.num_examples_clipped += tokens.num_clipped_inputs > 0
        self.num_clipped_input_tokens += tokens.num_clipped_inputs
        self.num_clipped_targets += tokens.num_clipped_targets > 0
        self.num_answers_lost += tokens.answer_clipped
        self.num_unknown_tokens += sum(token == unknown for token in tokens.input_ids)


def iter_examples(source: Source, counts: ReadCounts) -> Iterator[TextExample]:
    """Yield the task's examples, of a split source those of its side. A bad record is counted or raises DataError."""
    side = source.split.side if source.split else ""
    on_bad = (counts.skip if side != "eval" else _ignore) if source.on_bad_record == "skip" else None
    divided = _split_source(source) if source.split else None
    if divided and source.split:
        counts.split = divided.as_dict(source.split)
    task, scorer = source.task, Scorer(source.task.metrics)
    num_kept = 0
    try:
        for record in _iter_records(source, on_bad):
            if divided and not divided.is_on_side(record, side):
                continue
            if divided and num_kept == source.max_examples:
                return
            try:
                converted = task.to_text(record, labelled=source.labelled)
            except MissingLabelError as error:
                counts.leave_out(record.where, error.reason)
                counts.num_unlabelled += 1
                continue
            except DataError as error:
                if on_bad is None:
                    raise
                on_bad(as_bad_record(error, record))
                continue
            if not converted:
                counts.leave_out(record.where, f"left out by task {task.plugin_name()}")
                continue
            several = converted if isinstance(converted, tuple) else (converted,)
            counts.keep(several, task, scorer)
            num_kept += 1
            yield from several
    except RecordError as error:
        if not error.skippable:
            raise
        raise DataError(describe_bad_record(error.where, error.reason)) from None


def _iter_records(source: Source, on_bad: Callable[[BadRecord], None] | None) -> Iterator[RawRecord]:
    """Yield the records of all paths, with unique ids, up to the limit of the split or of the source.

    A prediction needs no unique ids of its own: it numbers the repeated ones.
    """

    def read() -> Iterator[RawRecord]:
        for path in source.paths:
            yield from read_records(path, columns=source.columns, require_columns=source.labelled, on_bad=on_bad)

    limit = source.split.max_records if source.split else source.max_examples
    records = refuse_duplicate_ids(read(), on_bad=on_bad) if source.labelled else number_duplicate_ids(read())
    return islice(records, limit)


def _split_source(source: Source) -> SplitResult:
    """Split the usable records of a source; `iter_examples` reports the bad ones."""
    assert source.split is not None

    def convert() -> Iterator[tuple[RawRecord, Sequence[TextExample]]]:
        for record in _iter_records(source, _ignore):
            with suppress(DataError):
                if converted := source.task.to_text(record):
                    yield record, converted if isinstance(converted, tuple) else (converted,)

    return split_records(convert(), source.split, by_label=source.task.labels is not None)


def _ignore(bad: BadRecord) -> None:
    """No-op: the training side counts bad records."""


def describe_bad_record(where: str, reason: str) -> str:
    """Return the message for a bad record that ends a run, with the setting that skips such records."""
    return f"{where}: {reason} To leave such records out, set data.on_bad_record: skip."


def describe_empty_store(source: Source, counts: ReadCounts) -> str:
    """Return the message for a source that gives no example."""
    why = ""
    if counts.skips:
        first = counts.skips[0]
        why += f"The first: {first['where']}: {first['reason'].rstrip('.')}. "
    if counts.num_not_learnt:
        why += f"{counts.num_not_learnt:,} without their answer in the context give no target. "
    records = "1 record" if counts.num_read == 1 else f"{counts.num_read:,} records"
    return f"{', '.join(source.paths)}: no example is left of {records}. {why}Check task.name and data.columns."
