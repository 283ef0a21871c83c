"""Read the texts of a data set, of which only the vocabulary matters: record by record, in constant memory.

In: sources, and the task whose examples they are, if any. Out: a tuple of texts per example or record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fivetune.data.readers.records import BadRecord, apply_task, as_bad_record, read_records
from fivetune.errors import DataError
from fivetune.types import RawRecord, Task, TextExample


@dataclass(slots=True)
class TextReader:
    """Reads texts, and counts the records; `first_bad` is the first of `num_skipped` that cannot be used.

    Args:
        task: gives the inputs, targets and gold answers of its examples; None: all texts of a record but its id.
    """

    sources: Sequence[str]
    task: Task | None
    columns: Mapping[str, str]
    header: Sequence[str] = ()
    num_read: int = 0
    num_skipped: int = 0
    first_bad: str = ""
    label_words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.label_words = tuple((self.task.labels or {}).values()) if self.task else ()

    def read(self) -> Iterator[tuple[str, ...]]:
        """Yield the texts of each example: inputs, targets and gold answers, or all texts of a record; none is blank.

        Raises DataError for a damaged file, or if there is no text at all.
        """
        self.num_read = self.num_skipped = num_yielded = 0
        for source in self.sources:
            for record in read_records(source, columns=self.columns, header=self.header, on_bad=self._skip):
                self.num_read += 1
                for texts in self._convert(record):
                    if texts:
                        num_yielded += 1
                        yield texts
        if not num_yielded:
            first = f" The first: {self.first_bad}" if self.first_bad else ""
            raise DataError(
                f"{', '.join(self.sources)}: no record holds a text ({self.num_read:,} read, {self.num_skipped:,} of "
                f"them skipped). Check the files, or name their task with --task.{first}"
            )

    def _convert(self, record: RawRecord) -> Iterator[tuple[str, ...]]:
        if self.task is None:
            texts: list[str] = []
            for name, value in record.fields.items():
                if name != "id":
                    texts += iter_texts(value)
            yield tuple(texts)
            return
        try:
            converted = _convert_with_or_without_label(self.task, record)
        except DataError as error:
            self.num_read -= 1
            self._skip(as_bad_record(error, record))
            return
        for one in converted:
            yield tuple(filter(str.strip, (one.inputs, one.targets, *one.references)))

    def _skip(self, bad: BadRecord) -> None:
        self.num_read += 1
        self.num_skipped += 1
        self.first_bad = self.first_bad or str(bad)


def _convert_with_or_without_label(task: Task, record: RawRecord) -> tuple[TextExample, ...]:
    try:
        return apply_task(task, record)
    except DataError:
        return apply_task(task, record, labelled=False)


def iter_texts(value: object) -> Iterator[str]:
    """Yield the texts of a value that are not blank, also the texts in lists and objects.

    >>> list(iter_texts({"a": "one", "b": [2, "two", " "]}))
    ['one', 'two']
    """
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from iter_texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from iter_texts(part)
