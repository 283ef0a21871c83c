"""Convert the records of a source into the task's examples, and count the records that give none.

In: a Source. Out: TextExamples; for data.json, counts of records read, kept, excluded and skipped, of tokens clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from fivetune.data.labels import PLACEHOLDERS, find_placeholder_input, get_label_form
from fivetune.data.readers.records import (
    BadRecord,
    apply_task,
    as_bad_record,
    ignore_bad_record,
    read_records,
    refuse_duplicate_ids,
)
from fivetune.data.shard import WHOLE, Shard
from fivetune.data.split import EvalSplit, SplitResult, split_records
from fivetune.data.store.encode import LengthLimits
from fivetune.errors import DataError, MissingLabelError, RecordError
from fivetune.scores.metrics import Scorer, rewards_blank
from fivetune.tasks import DROPPED_SYNONYMS, has_sentinels
from fivetune.types import JsonTable, RawRecord, Task, TextExample, TokenExample

MAX_SKIPS_KEPT = 50  # skipped records listed with their reasons; all are counted


@dataclass(frozen=True, slots=True)
class Source:
    """Everything that determines a store except the tokenizer."""

    paths: tuple[str, ...]
    task: Task
    limits: LengthLimits
    columns: dict[str, str] = field(default_factory=dict)
    header: tuple[str, ...] = ()
    on_bad_record: str = "fail"
    max_examples: int | None = None
    for_training: bool = False
    labelled: bool = True
    split: EvalSplit | None = None  # the side of `paths` to read; max_examples then counts records of that side
    shard: Shard = WHOLE  # which records are read; no part of what the data are


class ReadCounts:
    """Counts of records read, kept and skipped and of tokens clipped, for data.json."""

    def __init__(self) -> None:
        self.num_read = self.num_records_kept = self.num_skipped = self.num_skipped_bad = 0
        self.num_unlabelled = 0  # records without a label, which are excluded
        self.num_blank_golds = 0  # records whose gold answers, a blank one among them, reward an empty prediction
        self.num_blank_synonyms = 0  # records whose blank synonyms were dropped
        self.label_counts: dict[str, int] = {}  # label tasks: records per gold label
        self.label_forms: dict[str, int] = {}  # records per form of a label, if it differs from the label
        self.placeholder_counts: dict[str, int] = {}  # records per gold answer that stands for an empty cell
        self.empty_input_counts: dict[str, int] = {}  # records per input that stands for an empty cell
        self.split: JsonTable | None = None  # the split of the training records by data.eval_share
        self.num_kept = 0  # examples of the kept records
        self.num_cut_into_windows = self.num_windows = 0  # over-long examples, and the windows made of them
        self.num_not_learnt = 0  # examples or windows without a target
        self.num_examples_clipped = self.num_clipped_input_tokens = 0
        self.num_clipped_targets = self.num_answers_lost = self.num_unknown_tokens = 0
        self.skips: list[dict[str, str]] = []
        self.first_bad: dict[str, str] | None = None
        self._left_out: set[str] = set()  # reasons of `leave_out` in `skips`

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be used."""
        self.num_skipped_bad += 1
        named = {"where": bad.where, "reason": bad.reason}
        self.first_bad = self.first_bad or named
        self._record_skip(named, is_news=True)

    def leave_out(self, where: str, reason: str) -> None:
        """Count a record that the task leaves out on purpose; the first record of each reason is listed."""
        is_news = all(reason != skip["reason"] for skip in self.skips)
        self._left_out.add(reason)
        self._record_skip({"where": where, "reason": reason}, is_news=is_news)

    def _record_skip(self, named: dict[str, str], *, is_news: bool) -> None:
        self.num_read += 1
        self.num_skipped += 1
        if is_news and len(self.skips) < MAX_SKIPS_KEPT:
            self.skips.append(named)

    def merge(self, other: ReadCounts) -> None:
        """Add the counts of the records that follow."""
        named = {skip["reason"] for skip in self.skips}
        for skip in other.skips:
            if len(self.skips) < MAX_SKIPS_KEPT and skip["reason"] not in other._left_out & named:
                self.skips.append(skip)
        self._left_out |= other._left_out
        self.first_bad = self.first_bad or other.first_bad
        for name, value in vars(other).items():
            if name.startswith("num_"):
                setattr(self, name, getattr(self, name) + value)
            elif name.endswith(("_counts", "_forms")):
                for key, number in value.items():
                    _count_up(getattr(self, name), key, number)

    def as_dict(self) -> JsonTable:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], left_out: Iterable[str]) -> ReadCounts:
        counts = cls()
        vars(counts).update(table)
        counts._left_out = set(left_out)
        return counts

    @property
    def left_out(self) -> list[str]:
        """Reasons of records that the task excluded on purpose."""
        return sorted(self._left_out)

    def keep(self, examples: Sequence[TextExample], task: Task, scorer: Scorer | None) -> None:
        """Count a record that gives examples; in a label task, by its gold label.

        Args:
            scorer: scores blank gold answers; None where answers are not scored.
        """
        self.num_read += 1
        self.num_records_kept += 1
        golds = examples[0].references
        self.num_blank_golds += scorer is not None and rewards_blank(scorer, golds)
        self.num_blank_synonyms += DROPPED_SYNONYMS in examples[0].meta
        empty = find_placeholder_input(examples[0])
        if empty:
            _count_up(self.empty_input_counts, empty)
        if not golds:
            return
        form = get_label_form(examples[0])
        if task.labels is not None:
            _count_up(self.label_counts, golds[0])
            if form != golds[0]:
                _count_up(self.label_forms, form)
        if form.strip() in PLACEHOLDERS and not task.extractive:  # an answer in a text may be the word "None"
            _count_up(self.placeholder_counts, form.strip())

    def add_windows(self, examples: Sequence[TextExample]) -> None:
        """Count the windows among the examples, and the examples that were split into windows."""
        numbers = [example.meta["window"][0] for example in examples if "window" in example.meta]
        self.num_windows += len(numbers)
        self.num_cut_into_windows += numbers.count(1)

    def add(self, tokens: TokenExample) -> None:
        """Count the clipped tokens and the lost answer of an example."""
        self.num_examples_clipped += tokens.num_clipped_inputs > 0
        self.num_clipped_input_tokens += tokens.num_clipped_inputs
        self.num_clipped_targets += tokens.num_clipped_targets > 0
        self.num_answers_lost += tokens.answer_clipped


def _count_up(counts: dict[str, int], key: str, number: int = 1) -> None:
    counts[key] = counts.get(key, 0) + number


def convert_records(
    records: Iterable[RawRecord],
    source: Source,
    counts: ReadCounts,
    divided: SplitResult | None,
    on_bad: Callable[[BadRecord], None] | None,
) -> Iterator[TextExample]:
    """Yield the task's examples of records, of a split source only of the records on its side; all are counted.

    Args:
        on_bad: called with each record that the task refuses; None raises DataError at the first.
    """
    task = source.task
    side = source.split.side if source.split else ""
    scorer = Scorer(task.metrics) if source.labelled else None
    try:
        for record in records:
            if divided and not divided.is_on_side(record, side):  # the store of its own side counts it
                continue
            try:
                converted = apply_task(task, record, labelled=source.labelled)
            except MissingLabelError as error:  # excluded, not bad: on_bad_record fail does not end a run for it
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
            counts.keep(converted, task, scorer)
            yield from converted
    # A record that cannot be read ends the generator of records: its error gets the setting that skips such records.
    except RecordError as error:
        if not error.skippable:
            raise
        raise DataError(describe_bad_record(error.where, error.reason)) from None


def choose_bad_record_handler(source: Source, counts: ReadCounts) -> Callable[[BadRecord], None] | None:
    """Return what is called with a bad record: a count, on the evaluation side of a split nothing; None raises."""
    if source.on_bad_record != "skip":
        return None
    if source.split and source.split.side == "eval":
        return ignore_bad_record  # the training side counts it
    return counts.skip


def read_unique_records(
    paths: Iterable[str],
    *,
    columns: Mapping[str, str],
    header: Sequence[str],
    max_records: int | None,
    on_bad: Callable[[BadRecord], None],
) -> Iterator[RawRecord]:
    """Yield the first `max_records` usable records of several sources; a repeated id makes a record a bad one."""

    def read() -> Iterator[RawRecord]:
        for path in paths:
            yield from read_records(path, columns=columns, header=header, on_bad=on_bad)

    return islice(refuse_duplicate_ids(read(), on_bad=on_bad), max_records)


def split_source(source: Source) -> SplitResult | None:
    """Split the usable records of a source; `convert_records` reports the bad ones. None without a split."""
    if source.split is None:
        return None
    split = source.split

    def convert() -> Iterator[tuple[RawRecord, Sequence[TextExample]]]:
        records = read_unique_records(
            source.paths,
            columns=source.columns,
            header=source.header,
            max_records=split.max_records,
            on_bad=ignore_bad_record,
        )
        for record in records:
            with suppress(DataError):
                if converted := apply_task(source.task, record):
                    yield record, converted

    return split_records(convert(), split, by_label=source.task.labels is not None, by_whole=has_sentinels(source.task))


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
