"""Read records from tables: Parquet, a workbook, a folder saved by `datasets`, a data set of the Hugging Face hub.

In: a binary stream, a folder or a hub name. Out: RawRecord, row by row; of Parquet rows that another process can
convert to records. `pyarrow` and `datasets` are imported on first use.
"""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from fivetune.data.class_labels import find_class_labels, name_row_labels, read_class_labels
from fivetune.data.hub import DATASETS, describe_limit, get_max_wait_seconds, query_hub, restrict_waits
from fivetune.data.readers.delimited import describe_missing_column, find_names, find_start
from fivetune.data.readers.source_files import HEAD_BYTES, BadRecord, quote_value
from fivetune.data.readers.workbooks import iter_sheet_rows, take_head
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.installation import require_package
from fivetune.types import RawRecord

MAX_UNPACKED_RATIO = 100  # of a gzipped Parquet file
BATCH_ROWS = 250  # divides the records of a block, so that no batch is sent to two processes


class ArrowRow(NamedTuple):
    """A row of a Parquet file that is not a record yet; `number` counts from 1, `index` is its place in the batch."""

    batch: ArrowBatch
    index: int
    number: int

    @property
    def num_bytes(self) -> int:
        return self.batch.num_bytes_per_row

    def parse(self) -> RawRecord:
        return RawRecord(self.batch.get_row(self.index), f"{self.batch.path}: row {self.number}")


class ArrowBatch:
    """Rows of a Parquet file as Arrow's columns, converted to Python's values when the first row is asked for."""

    def __init__(self, path: Path, batch: Any) -> None:
        self.path = path
        self._batch = batch
        self.num_bytes_per_row = batch.nbytes // max(batch.num_rows, 1)
        self._rows: list[dict[str, Any]] = []

    def get_row(self, index: int) -> dict[str, Any]:
        if not self._rows:
            with _translate_parquet_errors(self.path):
                labels = read_class_labels(self._batch.schema.metadata)
                self._rows = [name_row_labels(row, labels) for row in self._batch.to_pylist()]
        return self._rows[index]

    def __reduce__(self) -> tuple[Callable[[Path, bytes], ArrowBatch], tuple[Path, bytes]]:
        """Pickle the rows alone: pyarrow pickles all rows of the group that a batch is a slice of."""
        import pyarrow

        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, self._batch.schema) as writer:
            writer.write_batch(self._batch)
        return _read_arrow_batch, (self.path, sink.getvalue().to_pybytes())


def _read_arrow_batch(path: Path, content: bytes) -> ArrowBatch:
    import pyarrow

    with pyarrow.ipc.open_stream(content) as reader:
        return ArrowBatch(path, reader.read_next_batch())


def read_parquet_rows(file: IO[bytes], path: Path, *, columns: Mapping[str, str]) -> Iterator[ArrowRow]:
    """Yield each row, BATCH_ROWS in memory at a time. A gzipped file is unpacked to a temporary one."""
    from pyarrow import parquet

    with tempfile.TemporaryFile() as unpacked, _translate_parquet_errors(path):
        if isinstance(file, gzip.GzipFile):  # Parquet is read from its end
            _unpack(file, unpacked, path)
            file = unpacked
        table = parquet.ParquetFile(file, page_checksum_verification=True)
        if wrong := describe_missing_column(table.schema_arrow.names, columns):
            raise DataError(f"{path}: {wrong}")
        number = 0
        for arrow in table.iter_batches(BATCH_ROWS):
            batch = ArrowBatch(path, arrow)
            for index in range(arrow.num_rows):
                number += 1
                yield ArrowRow(batch, index, number)


def _unpack(file: IO[bytes], into: IO[bytes], path: Path) -> None:
    """Unpack a gzipped Parquet file. Raises DataError where it is so large that it would fill the disk."""
    most = MAX_UNPACKED_RATIO * path.stat().st_size
    while block := file.read(HEAD_BYTES):
        into.write(block)
        if into.tell() > most:
            raise DataError(
                f"{path}: unpacks to more than {MAX_UNPACKED_RATIO} times its size, which no Parquet file does. "
                "Download it again, or unpack it if you trust it."
            )


@contextmanager
def _translate_parquet_errors(path: Path) -> Generator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # texts are decoded on access
        raise DataError(
            f"{path}: damaged Parquet file: {quote_value(error, limit=120)}. "
            f"Allowed is a complete file. Copy or download it again."
        ) from error


def read_sheet_records(
    path: Path, *, columns: Mapping[str, str], header: Sequence[str] = ()
) -> Iterator[RawRecord | BadRecord]:
    """Yield each row of a workbook's sheet below its header, as `read_csv_rows` yields the rows of a CSV file."""
    rows = iter_sheet_rows(path)
    head, text = take_head(rows)
    if not head:
        return
    start = find_start(text, path)[0] - 1
    first_row = head[start][0]
    sample = [line.split("\t") for line in text.split("\n")[start:]]
    # The first row with cells says how wide the table is; left of it may be nothing.
    filled = [place for place, cell in enumerate(sample[0]) if cell]
    left, right = filled[0], max(filled[-1] + 1, filled[0] + len(header))
    sample = [[*row, *[""] * right][left:right] for row in sample]
    names, is_record = find_names(sample[0], sample, header, f"{path}:{first_row}")
    if wrong := describe_missing_column(names, columns):
        raise DataError(f"{path}: {wrong}")
    for number, cells in chain(head, rows):
        where = f"{path}:{number}"
        outside = [str(value) for value in (*cells[:left], *cells[right:]) if value is not None]
        if number < first_row or outside:
            shown = outside or [str(value) for value in cells if value is not None]
            yield BadRecord(
                where,
                f"{quote_value(shown[0], limit=30)} is outside of the table, which begins in row {first_row} and has "
                f"{len(names)} columns. Allowed are cells below a header. Name the column in it, or delete the cell.",
            )
        elif number > first_row or is_record:
            values = [*cells, *[None] * right][left:right]
            yield RawRecord(dict(zip(names, values, strict=True)), where)


def read_saved_records(path: Path, *, columns: Mapping[str, str]) -> Iterator[RawRecord]:
    """Yield the rows of a folder written by `datasets.save_to_disk`, memory-mapped."""
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        raise DataError(
            f"{path}: a saved data set with several splits: {', '.join(splits)}. Name one: {path / splits[0]}."
        )
    datasets = _import_datasets(str(path))
    try:
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # a damaged file raises errors of many types in `datasets`
        raise DataError(
            f"{path}: the folder saved by datasets cannot be loaded: {quote_value(error, limit=120)}. "
            f"Allowed is a complete folder of save_to_disk. Save it again."
        ) from error
    yield from _read_dataset_rows(dataset, str(path), columns)


def is_hub_form(source: str) -> bool:
    """Return whether a source has the form org/name, org/name:config or org/name:config:split.

    >>> is_hub_form("rajpurkar/squad_v2::validation"), is_hub_form("data/squad/dev.json")
    (True, False)
    """
    return re.fullmatch(r"[\w.-]+/[\w.-]+(:[^:/\\]*(:.*)?)?", source) is not None


def read_hub_records(source: str, *, columns: Mapping[str, str]) -> Iterator[RawRecord]:
    """Yield the rows of `org/name:config:split` from the cache of `datasets`. Defaults: the only config, split train.

    Raises FiveTuneEnvironmentError if the data set cannot be loaded.
    """
    yield from _read_dataset_rows(load_hub_dataset(source), source, columns)


def load_hub_dataset(source: str) -> Any:
    """Load the data set of a hub name, from the cache if the hub fails; a data set just loaded is returned again.

    Raises FiveTuneEnvironmentError.
    """
    loaded = DATASETS.find(source)
    if loaded is not None:
        return loaded
    name, config, split = (*source.split(":", 2), "", "")[:3]
    datasets = _import_datasets(source)
    failure: Exception | None = None
    try:
        with restrict_waits(get_max_wait_seconds()):
            failure = query_hub(name)
            with _read_cache_only(datasets.config, needed=failure is not None):
                loaded = datasets.load_dataset(name, config or None, split=split or "train")
    except Exception as error:  # network, cache, unknown name, config or split: each of another type
        offline = os.environ.get("HF_HUB_OFFLINE", "not set")
        reason = failure or error
        raise FiveTuneEnvironmentError(
            f"{source}: cannot be loaded from the Hugging Face hub or its cache {datasets.config.HF_DATASETS_CACHE} "
            f"(HF_HUB_OFFLINE is {offline}): {type(reason).__name__}: {quote_value(reason, limit=160)}."
            f"{describe_limit(error)} Allowed: org/name:config:split, a local file, a folder. "
            f"Check the name; without network, load it on another machine and copy the cache, or name local files."
        ) from error
    DATASETS.keep(source, loaded)
    return loaded


@contextmanager
def _read_cache_only(config: Any, *, needed: bool) -> Generator[None]:
    """Keep `datasets` from asking a hub that has failed: it would, for minutes."""
    before = config.HF_HUB_OFFLINE
    config.HF_HUB_OFFLINE = before or needed
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _import_datasets(source: str) -> ModuleType:
    require_package(source, "datasets", "hub", ". Or use JSON, CSV or Parquet files")
    return import_module("datasets")


def _read_dataset_rows(dataset: Any, source: str, columns: Mapping[str, str]) -> Iterator[RawRecord]:
    wrong = describe_missing_column(dataset.column_names, columns)
    if wrong:
        raise DataError(f"{source}: {wrong}")
    labels = find_class_labels(dataset.features.to_dict())
    number = 0
    for batch in dataset.with_format(None).iter(BATCH_ROWS):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            row = name_row_labels(dict(zip(names, values, strict=True)), labels)
            yield RawRecord(row, f"{source}: row {number}")
