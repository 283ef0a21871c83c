"""Data files as files: which ones make up a source, what is inside them, and what is wrong with them before any record.

In: a path. Out: a binary stream (gzip unpacked), the format's name, lines of bounded length. Every complaint is a
DataError or EnvironmentProblem that names the file.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, cast

from fivetune.errors import DataError, EnvironmentProblem

MAX_RECORD_BYTES = 16 * 2**20  # no honest text record is longer; a longer line is a damaged file
HEAD_BYTES = 64 * 2**10  # as much of a file as is looked at to tell its format
SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
}
FORMATS = "Allowed: SQuAD JSON, a JSON array, JSONL, CSV, TSV, Parquet, each also gzipped."

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record that cannot be used.

    Args:
        where: file and line (or record number): `train.jsonl:17`.
        reason: what is wrong, with which value, and what is allowed.
    """

    where: str
    reason: str


def shown(value: object, *, limit: int = 60) -> str:
    """A value as it appears in messages: on one line, quoted, cut at `limit` characters.

    >>> shown("two\\nlines")
    "'two\\\\nlines'"
    >>> shown("abcdef", limit=4)
    "'abcd...'"
    """
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= limit else text[:limit] + "...")


def data_suffix(path: Path) -> str:
    """Suffix that tells the format, `.gz` set aside; "" if it is no data suffix.

    >>> data_suffix(Path("train.jsonl.gz"))
    '.jsonl'
    >>> data_suffix(Path("README.md"))
    ''
    """
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES else ""


def is_saved_dataset(path: Path) -> bool:
    """True iff the folder was written by `datasets.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def local_files(source: str) -> list[Path]:
    """The data file at a path, the data files of a folder, or all files of a saved `datasets` folder; sorted.

    Raises DataError if there is nothing, or nothing of a known kind.
    """
    if not source.strip():
        raise DataError("data: the name of the source is empty. Allowed: a file, a folder, a hub name. Set data.train.")
    path = Path(source).expanduser()
    try:
        if not os.path.exists(path):  # unlike Path.exists, false for an impossible name
            raise DataError(_missing(path, source))
        if path.is_dir():
            return _files_inside(path, source)
    except OSError as error:
        raise EnvironmentProblem(_unreadable(path, error)) from error
    if source.endswith("/"):
        raise DataError(f"{source}: this is a file, not a folder. Allowed are both. Leave out the slash at the end.")
    if not path.is_file():
        raise DataError(f"{source}: neither a file nor a folder. {FORMATS} Write the data to a file first.")
    return [path]


def _files_inside(path: Path, source: str) -> list[Path]:
    if is_saved_dataset(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    inside = sorted(path.iterdir())
    files = [file for file in inside if file.is_file() and data_suffix(file) and not file.name.startswith(".")]
    if not files:
        holds = ", ".join(file.name for file in inside[:5]) or "nothing"
        raise DataError(
            f"{source}: a folder without data files; it holds {holds}. "
            f"Allowed in a folder: {', '.join(SUFFIXES)}, each also with .gz, or what datasets.save_to_disk wrote. "
            f"Name the folder or file that holds the data."
        )
    return files


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, gzip unpacked. Damaged gzip is a DataError, a refusing system an EnvironmentProblem."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield cast(IO[bytes], unpacked)
            else:
                yield file
    except EOFError as error:
        raise DataError(f"{path}: the gzip file is cut off before its end. Copy or download it again.") from error
    except (zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged ({error}). Copy or download it again.") from error
    except OSError as error:
        raise EnvironmentProblem(_unreadable(path, error)) from error


def lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(number from 1, line with its end), each cut at MAX_RECORD_BYTES + 1: a longer one is never loaded whole."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_RECORD_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_RECORD_BYTES + 1)
        yield number, line


def too_long(unit: str) -> str:
    """Reason for a line or record over the limit."""
    return f"{unit} is longer than {MAX_RECORD_BYTES // 2**20} MiB, the limit for one record. Split it or leave it out."


def iconv(encoding: str, path: Path) -> str:
    """The shell command that converts a file to UTF-8."""
    name = path.name.removesuffix(".gz")
    return f"iconv -f {encoding} -t utf-8 {name} > utf8-{name}"


def not_utf8(path: Path, error: UnicodeDecodeError, *, line: int) -> DataError:
    """The complaint about bytes that are not UTF-8, with an encoding that reads them.

    Args:
        error: what decoding raised; its `object` begins at the start of `line`, or of an earlier line.
        line: number of the line in which `error.object` begins.
    """
    data, at = bytes(error.object), error.start
    line += data.count(b"\n", 0, at)
    start = data.rfind(b"\n", 0, at) + 1
    try:
        encoding = "cp1252"
        excerpt = data[max(start, at - 20) : at + 20].decode(encoding)
    except UnicodeDecodeError:
        encoding = "latin-1"
        excerpt = data[max(start, at - 20) : at + 20].decode(encoding)
    return DataError(
        f"{path}:{line}: not UTF-8: byte 0x{data[at]:02x} in {shown(excerpt)}. Allowed is UTF-8. "
        f"{encoding} reads it: {iconv(encoding, path)}"
    )


def _missing(path: Path, source: str) -> str:
    folder = path.parent
    while not os.path.exists(folder):
        folder = folder.parent
    if folder.is_file():
        return f"{source}: {folder} is a file, not a folder. Name the file itself, or the folder it is in."
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    wanted = path.relative_to(folder).parts[0]
    near = get_close_matches(wanted, names, n=3, cutoff=0.5) or names[:3]
    lacking = "no such file or folder" if folder == path.parent else f"the folder {folder / wanted} does not exist"
    around = f"Near it in {folder}: {', '.join(near)}" if near else f"The folder {folder} is empty"
    return f"{source}: {lacking}. {around}. Allowed: a file, a folder, or a hub name like org/name:config:split."


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read: {error.strerror or error}. Check its rights and the disk."
