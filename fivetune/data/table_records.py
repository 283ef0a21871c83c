"""Read records from tables: CSV and TSV, Parquet, a folder saved by `datasets`, a data set of the Hugging Face hub.

In: a binary stream, a folder or a hub name. Out: RawRecord or BadRecord, row by row; of CSV and Parquet rows that
another process can convert to records. `pyarrow` and `datasets` are imported on first use.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from fivetune.data.hub import DATASETS, describe_limit, get_max_wait_seconds, query_hub, restrict_waits
from fivetune.data.source_files import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    BadRecord,
    format_too_long_message,
    get_data_suffix,
    make_utf8_error,
    quote_value,
    read_lines,
)
from fivetune.errors import DataError, FiveTuneEnvironmentError
from fivetune.types import RawRecord

MAX_UNPACKED_RATIO = 100  # of a gzipped Parquet file
BATCH_ROWS = 250  # divides the records of a block, so that no batch is sent to two processes


class TableRow(NamedTuple):
    """A row of a CSV file that is not a record yet; `number` is its first line, from 1."""

    path: Path
    number: int
    header: list[str]
    cells: list[str]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.cells))

    def parse(self) -> RawRecord | BadRecord:
        return _make_row_record(self.cells, self.header, f"{self.path}:{self.number}")


class ArrowRow(NamedTuple):
    """A row of a Parquet file that is not a record yet; `number` counts from 1, `index` is its place in the batch."""

    batch: ArrowBatch
    index: int
    number: int

    @property
    def num_bytes(self) -> int:
        return self.batch.num_bytes_per_row

    def parse(self) -> RawRecord | BadRecord:
        return RawRecord(self.batch.get_row(self.index), f"{self.batch.path}: row {self.number}")


class ArrowBatch:
    """Rows of a Parquet file as Arrow's columns, converted to Python's values when the first row is asked for."""

    def __init__(self, path: Path, batch: Any) -> None:
        self.path, self._batch = path, batch
        self.num_bytes_per_row = batch.nbytes // max(batch.num_rows, 1)
        self._rows: list[dict[str, Any]] = []

    def get_row(self, index: int) -> dict[str, Any]:
        if not self._rows:
            with _translate_parquet_errors(self.path):
                self._rows = self._batch.to_pylist()
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


def detect_delimiter(text: str, path: Path) -> str:
    """Return the most frequent of comma, tab and semicolon outside quotes in a table's first line; else by suffix.

    >>> detect_delimiter('"a,b,c";d\\n', Path("a.csv"))
    ';'
    >>> detect_delimiter("text\\n", Path("a.tsv"))
    '\\t'
    """
    header = re.sub(r'"[^"]*"', "", text).lstrip().partition("\n")[0]
    best = max(",\t;", key=header.count)
    by_suffix = {".csv": ",", ".tsv": "\t", ".tab": "\t"}.get(get_data_suffix(path), "")
    return best if header.count(best) else by_suffix


def describe_missing_column(names: Iterable[str], columns: Mapping[str, str]) -> str:
    """Return the error of a column mapping {task's name: file's name}, else "". Of a dotted name the first part must
    exist.

    >>> describe_missing_column(["Frage", "Antwort"], {"question": "Fragen"})
    "no column 'Fragen', which data.columns names for 'question'. There are: Frage, Antwort. Correct data.columns."
    """
    have = list(names)
    for wanted, name in columns.items():
        if name not in have and name.partition(".")[0] not in have:
            return (
                f"no column {name!r}, which data.columns names for {wanted!r}. "
                f"There are: {', '.join(have[:20]) or 'none'}. Correct data.columns.".replace("\n", "\\n")
            )
    return ""


def read_csv_rows(file: IO[bytes], path: Path, *, columns: Mapping[str, str]) -> Iterator[TableRow | BadRecord]:
    """Yield each row below the header; quoted cells may hold delimiters and line ends; `where`: first line."""
    delimiter = detect_delimiter(file.read(HEAD_BYTES).decode("utf-8-sig", errors="replace"), path) or ","
    file.seek(0)
    csv.field_size_limit(MAX_RECORD_BYTES)  # process-wide, 131,072 by default; csv.reader has no such option
    rows = csv.reader(_decode_lines(file, path), delimiter=delimiter, strict=True)
    header: list[str] = []
    while True:
        number = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield _classify_csv_error(error, f"{path}:{number}")
            continue
        if not row:
            continue
        if header:
            yield TableRow(path, number, header, row)
        else:
            header = row
            _check_header(header, path, columns)


def _decode_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in read_lines(file):
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"{path}:{number}: {format_too_long_message('the line')}")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise make_utf8_error(path, error, line=number) from error


def _classify_csv_error(error: csv.Error, where: str) -> BadRecord:
    """Return a BadRecord; raise DataError for an unclosed quote, since it swallows all rows after it."""
    advice = "Allowed: cells in double quotes, quotes inside them doubled. Correct the row."
    if "field larger" in str(error) or "unexpected end" in str(error):
        raise DataError(f"{where}: a quoted cell that begins in this row is never closed. {advice}") from error
    return BadRecord(where, f"not CSV: {error}. {advice}")


def _check_header(header: list[str], path: Path, columns: Mapping[str, str]) -> None:
    repeated = next((name for name in header if header.count(name) > 1), None)
    if repeated is not None:
        raise DataError(f"{path}:1: the column {repeated!r} occurs more than once. Names must be unique. Rename one.")
    if wrong := describe_missing_column(header, columns):
        raise DataError(f"{path}:1: {wrong}")


def _make_row_record(row: list[str], header: list[str], where: str) -> RawRecord | BadRecord:
    if len(row) == len(header):
        return RawRecord(dict(zip(header, row, strict=True)), where)
    return BadRecord(
        where,
        f"{len(row)} cells, beginning with {quote_value(row[0], limit=30)}, but the header has {len(header)}. "
        f"Allowed is one cell per column, in double quotes if it holds a delimiter. Correct the row.",
    )


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
    """Load the data set of a hub name, from the cache if the hub fails; one that was just loaded is returned again.

    Raises FiveTuneEnvironmentError.
    """
    if (loaded := DATASETS.find(source)) is not None:
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
    try:
        return import_module("datasets")
    except ImportError as error:
        raise FiveTuneEnvironmentError(
            f"{source}: needs the package datasets, which is not installed. Allowed without it: "
            f"JSON, JSONL, CSV, TSV, Parquet files. Install it: pip install datasets"
        ) from error


def _read_dataset_rows(dataset: Any, source: str, columns: Mapping[str, str]) -> Iterator[RawRecord]:
    if wrong := describe_missing_column(dataset.column_names, columns):
        raise DataError(f"{source}: {wrong}")
    number = 0
    for batch in dataset.with_format(None).iter(BATCH_ROWS):
        names = list(batch)
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield RawRecord(dict(zip(names, values, strict=True)), f"{source}: row {number}")
