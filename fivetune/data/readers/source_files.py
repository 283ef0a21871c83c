"""Data files: list the files of a source, open and unpack them, and refuse foreign formats before a record is read.

In: a path. Out: its files, a binary stream (gzip unpacked), lines of bounded length. Errors are DataError or
FiveTuneEnvironmentError and name the file.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from io import BytesIO
from itertools import chain, combinations
from pathlib import Path
from typing import IO, cast

from fivetune.data.storage import is_url
from fivetune.errors import DataError, FiveTuneEnvironmentError

MAX_RECORD_BYTES = 16 * 2**20  # longer than any real text record; a longer line is a damaged file
HEAD_BYTES = 64 * 2**10  # read to detect the format of a file
SUFFIXES = {
    ".json": "json",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".parquet": "parquet",
    ".xlsx": "workbook",
    ".xlsm": "workbook",
}
FORMATS = "Allowed: SQuAD JSON, a JSON array, JSONL, CSV, TSV, Parquet, each also gzipped; an Excel workbook (.xlsx)."

IN_ICONV = {"mac-roman": "macintosh", "iso8859-5": "iso-8859-5"}  # names of Python that iconv lacks
SIDES = (  # names of the files of pairs
    "source target targets src tgt trg input inputs output outputs in out x y question questions answer answers text "
    "texts label labels sentences tags data article articles document documents summary summaries prompts responses "
    "queries"
)
SPLIT = re.compile(
    r"(?<![a-z])(train|test|valid|val|dev|eval)(ing|ation)?(?![a-z])", re.IGNORECASE
)  # in a name of a set
DOCUMENTS = (".md", ".py", ".pdf", ".html", ".rst", ".ipynb", ".zip", ".gz", ".png", ".sh")  # are no files of lines
MAX_LINE_BYTES = 1_000  # mean bytes of a line up to which each is a text of its own
MAX_COMPARED = 20  # files of a folder whose lines are counted
MIN_LINES = 5  # of files that have as many
MIN_RATIO = 3  # of the lengths of texts and of their labels
MAX_FOLDERS = 2  # levels of folders above the folders of labels
MAX_CONTROL_SHARE = 0.05  # largest share of control bytes in text; random bytes have 11 %
MIN_CONTROL_BYTES = 100  # a file with fewer is accepted here; its records are checked one by one

_GZIP = b"\x1f\x8b"
_CONTROL_BYTES = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"})
_WORKBOOK = re.compile(rb"xl/(?:workbook\.xml|worksheets|_rels|theme|styles|sharedStrings)")  # files in its archive
_FOREIGN = {  # first bytes, compared in lower case -> kind of file, advice
    b"pk\x03\x04": ("a zip archive", "Unpack it and name the file inside"),
    b"\xfd7zXZ": ("an xz archive", "Unpack it with xz -d"),
    b"(\xb5/\xfd": ("a zstd archive", "Unpack it with zstd -d"),
    b"BZh": ("a bzip2 archive", "Unpack it with bzip2 -d"),
    b"ARROW1": ("an Arrow file", "Name the folder written by datasets.save_to_disk, or write Parquet"),
    b"version https://git-lfs.github.com/spec/": (
        "a Git-LFS pointer, not the data",
        "Fetch the data with git lfs pull",
    ),
    b"\x89png": ("no text file (PNG)", "Name the file that holds the data"),
    b"\xff\xd8\xff": ("no text file (JPEG)", "Name the file that holds the data"),
    b"gif8": ("no text file (GIF)", "Name the file that holds the data"),
    b"%pdf-": ("no text file (PDF)", "Extract its text first"),
    b"sqlite format 3": ("no text file (SQLite)", "Export its table as CSV"),
    b"\x7felf": ("no text file (ELF program)", "Name the file that holds the data"),
    b"<!doctype html": ("an HTML page, not data", "Download the file itself (its raw link)"),
    b"<html": ("an HTML page, not data", "Download the file itself (its raw link)"),
}


@dataclass(frozen=True, slots=True)
class BadRecord:
    """One record that cannot be used.

    Args:
        where: file and line (or record number): `train.jsonl:17`.
        reason: what is wrong, with which value, and what is allowed.
        skippable: false if the cause affects all records, so that skipping would leave none.
        num_unnamed: number of its values, if it has no names for them.
    """

    where: str
    reason: str
    skippable: bool = True
    num_unnamed: int = 0

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def quote_value(value: object, *, limit: int = 60) -> str:
    """Format a value for messages: on one line, truncated to `limit` characters; a text is quoted, others are JSON.

    >>> quote_value("two\\nlines")
    "'two\\\\nlines'"
    >>> quote_value("abcdef", limit=4), quote_value({"a": [True, None]})
    ("'abcd...'", '{"a": [true, null]}')
    """
    is_json = value is None or isinstance(value, bool | int | float | list | dict)
    text = json.dumps(value, ensure_ascii=False, default=str) if is_json else str(value)
    shown = text if len(text) <= limit else text[:limit] + "..."
    if is_json:
        return shown.encode(errors="backslashreplace").decode()  # half a surrogate pair cannot be printed
    return repr(shown)


def quote_in_code(text: str) -> str:
    """Quote a text for a program of Python that a command runs, in double quotes: single ones are the shell's."""
    return json.dumps(text, ensure_ascii=False)


def get_data_suffix(path: Path) -> str:
    """Return the suffix that names the format, `.gz` ignored; "" if it is no data suffix.

    >>> get_data_suffix(Path("train.jsonl.gz"))
    '.jsonl'
    >>> get_data_suffix(Path("README.md"))
    ''
    """
    suffix = Path(split_sheet(path.name)[0].lower().removesuffix(".gz")).suffix
    return suffix if suffix in SUFFIXES else ""


def split_sheet(source: str) -> tuple[str, str]:
    """Split the sheet off the name of a workbook; "" if none is named: then its first one is meant.

    >>> split_sheet("data/tickets.xlsx#May #2"), split_sheet("a#b.csv")
    (('data/tickets.xlsx', 'May #2'), ('a#b.csv', ''))
    """
    found = re.fullmatch(r"(.+?\.xls[xm])#(.+)", source, re.IGNORECASE)
    return (found[1], found[2]) if found else (source, "")


def is_workbook(head: bytes) -> bool:
    """Return whether a file begins as an Excel workbook (.xlsx, .xlsm), however it is named."""
    return head.startswith(b"PK\x03\x04") and _WORKBOOK.search(head) is not None


def is_saved_dataset(path: Path) -> bool:
    """Return whether the folder was written by `datasets.save_to_disk`."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def list_local_files(source: str) -> list[Path]:
    """Return the data file at a path, the data files of a folder, or all files of a saved `datasets` folder; sorted.

    Raises DataError if there is no file of a supported format, FiveTuneEnvironmentError if the path is unreadable.
    """
    if not source.strip():
        raise DataError("data: the name of the source is empty. Allowed: a file, a folder, a hub name. Set data.train.")
    if is_url(source):
        raise DataError(
            f"{source}: a URL. Allowed here: a file, a folder, a hub name; a URL leads to prepared data, which only "
            "train, check and evaluate read. Copy the file to this machine."
        )
    if parts := list_parallel(source):
        return parts
    path = Path(split_sheet(source)[0]).expanduser()
    try:
        if not os.path.exists(path):  # unlike Path.exists, false for an impossible name
            raise DataError(_describe_missing_path(path, source))
        if path.is_dir():
            return _list_folder_files(path, source)
    except OSError as error:
        raise FiveTuneEnvironmentError(_describe_read_error(path, error)) from error
    if source.endswith("/"):
        raise DataError(f"{source}: this is a file, not a folder. Allowed are both. Remove the slash at the end.")
    if not path.is_file():
        raise DataError(f"{source}: neither a file nor a folder. {FORMATS} Write the data to a file first.")
    return [path]


def list_tables(source: str) -> list[Path]:
    """Return the files of a source as `list_local_files` does; the one of a named sheet keeps its name, for readers."""
    sheet = split_sheet(source)[1]
    return [file.with_name(f"{file.name}#{sheet}") if sheet else file for file in list_local_files(source)]


def list_parallel(source: str) -> list[Path]:
    """Return the files of lines that belong together, which one name in braces stands for; none for other sources.

    Raises DataError for a part that is absent, or that is a file of records.

    >>> list_parallel("train.csv"), format_parallel(["par/train.de.gz", "par/train.en.gz"])
    ([], 'par/train.{de,en}.gz')
    """
    found = re.fullmatch(r"(.*)\{([^{}]+,[^{}]+)\}(.*)", source)
    if found is None or os.path.exists(source):
        return []
    parts: list[Path] = []
    for part in found[2].split(","):
        files = list_local_files(f"{found[1]}{part.strip()}{found[3]}")
        if len(files) > 1 or get_data_suffix(files[0]):
            raise DataError(
                f"{source}: {files[0]} is no file of lines. Allowed in braces are plain texts whose lines belong "
                "together. Files of records are a list: [A, B]."
            )
        parts += files
    return parts


def format_parallel(files: Sequence[str]) -> str:
    """Format the name of files of lines that belong together: what they share, and their differing parts in braces."""
    words = [re.findall(r"[^/._-]+|[/._-]", file) for file in files]
    start = end = ""
    while min(map(len, words)) > 1 and len({one[0] for one in words}) == 1:
        start += words[0][0]
        words = [one[1:] for one in words]
    while min(map(len, words)) > 1 and len({one[-1] for one in words}) == 1:
        end = words[0][-1] + end
        words = [one[:-1] for one in words]
    return f"{start}{{{','.join(map(''.join, words))}}}{end}"


def refuse_unequal(files: Sequence[Path]) -> None:
    """Raise DataError for files of lines that belong together, but differ in their number."""
    sizes = [_measure_lines(file)[0] for file in files]
    if len({*sizes}) > 1:
        told = ", ".join(f"{file} has {size:,}" for file, size in zip(files, sizes, strict=True))
        raise DataError(
            f"Files whose lines belong together have as many lines: {told}. Find the lines that are missing, or write "
            "the texts that belong together into one line of one file."
        )


def _list_folder_files(path: Path, source: str) -> list[Path]:
    if is_saved_dataset(path):
        return sorted(file for file in path.rglob("*") if file.is_file())
    inside = sorted(path.iterdir())
    visible = [file for file in inside if file.is_file() and not file.name.startswith((".", "~$"))]  # Excel's lock
    files = [file for file in visible if get_data_suffix(file)]
    if files:
        return files
    # Without a data file: what else the folder may hold, the most certain first.
    for folder in inside:
        if (folder / "index.json").is_file():
            raise DataError(f"{source}: holds prepared data in folders. Name one of them, such as {folder}.")
    if command := _format_folders_command(path):
        raise DataError(
            f"{source}: a folder of folders. Allowed is one file of records. Write each text or record on a "
            f"line, with the name of its folder as label: {command}, and name that file."
        )
    if parallel := _find_parallel(visible):
        raise DataError(f"{source}: a folder of {len(visible)} files. {describe_paste([*map(str, parallel)])}")
    if visible and all(file.suffix == ".txt" for file in visible):
        raise DataError(f"{source}: a folder of texts. {FORMATS} {describe_label_files([*map(str, visible)])}")
    holds = ", ".join(file.name for file in inside[:5]) or "nothing"
    raise DataError(
        f"{source}: a folder without data files; it holds {holds}. "
        f"Allowed in a folder: {', '.join(SUFFIXES)}, each also with .gz, or a folder of datasets.save_to_disk. "
        f"Name the folder or file that holds the data."
    )


@contextmanager
def open_bytes(path: Path, on_open: Callable[[IO[bytes]], None] = lambda file: None) -> Iterator[IO[bytes]]:
    """Open a file, unpacking gzip. Raises DataError for damaged gzip, FiveTuneEnvironmentError if reading fails.

    Args:
        on_open: called with the file on disk, whose position shows how much was read.
    """
    try:
        with Path(split_sheet(str(path))[0]).open("rb") as file:
            on_open(file)
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
        raise FiveTuneEnvironmentError(_describe_read_error(path, error)) from error


def refuse_foreign_format(head: bytes, path: Path) -> None:
    """Raise DataError if the first bytes are not UTF-8 text: empty, an archive, an image, UTF-16, a Git-LFS pointer."""
    start = head[:200].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if not head:
        raise DataError(f"{path}: the file is empty. {FORMATS} Write or download it again.")
    if not head.strip(b"\0"):
        raise DataError(f"{path}: holds NUL bytes instead of text. {FORMATS} Copy or download it again.")
    if not head.removeprefix(b"\xef\xbb\xbf").strip():
        raise DataError(f"{path}: the file holds white space only. {FORMATS} Write or download it again.")
    if encoding := _detect_wide_encoding(head):
        raise DataError(
            f"{path}: the text is {encoding}. Allowed is UTF-8. Convert it: {format_iconv_command(encoding, path)}"
        )
    if start.startswith(b"\xd0\xcf\x11\xe0"):
        is_old = get_data_suffix(path) == ""
        what = "of Excel 97 (.xls)" if is_old else "with a password"
        way = "Open it, and save it as .xlsx" if is_old else "Open it, and save it without"
        raise DataError(f"{path}: this is a workbook {what}. {FORMATS} {way}.")
    if start.startswith(b"pk") and (b"opendocument" in head or b"xl/workbook.bin" in head):
        raise DataError(f"{path}: this is no workbook in the form of Excel. {FORMATS} Open it, and save it as .xlsx.")
    for magic, (what, advice) in _FOREIGN.items():
        if start.startswith(magic.lower()):
            raise DataError(f"{path}: this is {what}. {FORMATS} {advice}.")
    if MIN_CONTROL_BYTES < _count_control_bytes(head) > MAX_CONTROL_SHARE * len(head):
        raise DataError(f"{path}: this is no text file. {FORMATS} Name the file that holds the data.")


def _detect_wide_encoding(head: bytes) -> str:
    """Return the name of a UTF-16 or UTF-32 encoding, else "": by byte order mark, else by the positions of NULs."""
    if head.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    text = head[:1024]
    # Letters of European scripts have a NUL as every other byte.
    even = text[::2].count(0)
    odd = text[1::2].count(0)
    if max(even, odd) > len(text) // 4 and min(even, odd) <= len(text) // 50:
        return "utf-16-be" if even > odd else "utf-16-le"
    return ""


def _count_control_bytes(head: bytes) -> int:
    return len(head) - len(head.translate(None, _CONTROL_BYTES))


def decode_head(head: bytes) -> str:
    """Decode the first bytes of a file; what is no UTF-8, such as a character that they cut off, is replaced."""
    return head.decode("utf-8-sig", errors="replace")


@contextmanager
def open_text(path: Path) -> Iterator[IO[bytes]]:
    """Open a text file with `open_bytes`, and check its first bytes with `refuse_foreign_format`."""
    with open_bytes(path) as file:
        refuse_foreign_format(file.read(HEAD_BYTES), path)
        file.seek(0)
        yield file


def read_lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end), truncated to MAX_RECORD_BYTES + 1, which bounds the memory."""
    number = 0
    while line := file.readline(MAX_RECORD_BYTES + 1):
        number += 1
        rest = line
        while len(rest) > MAX_RECORD_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_RECORD_BYTES + 1)
        yield number, line


def format_too_long_message(unit: str) -> str:
    """Return the error for a line or record over MAX_RECORD_BYTES."""
    return f"{unit} is longer than {MAX_RECORD_BYTES // 2**20} MiB, the limit for one record. Split it or leave it out."


def format_iconv_command(encoding: str, path: Path) -> str:
    """Return the shell command that converts a file to UTF-8; a gzipped file is unpacked first.

    >>> format_iconv_command("cp1252", Path("data/train.csv.gz"))
    'gzip -dc data/train.csv.gz | iconv -f cp1252 -t utf-8 > data/utf8-train.csv'
    """
    command = f"iconv -f {IN_ICONV.get(encoding, encoding)} -t utf-8"
    return f"{format_filter(command, path)} > {_format_converted(path)}"


def _format_repair_command(encoding: str, path: Path) -> str:
    """Return the shell command that reads the damaged bytes of a file of UTF-8 in another encoding."""
    handle = f'lambda e: (e.object[e.start : e.end].decode("{encoding}", "replace"), e.end)'
    code = f'import codecs, sys; codecs.register_error("damaged", {handle}); '
    code += 'sys.stdout.buffer.writelines(line.decode("utf-8", "damaged").encode() for line in sys.stdin.buffer)'
    command = f"python -c {shlex.quote(code)}"
    return f"{format_filter(command, path, reads_name=False)} > {_format_converted(path)}"


def _format_converted(path: Path) -> str:
    """Format the name of a file's copy in UTF-8 as an argument of a shell command."""
    return shlex.quote(str(path.with_name(f"utf8-{path.name.removesuffix('.gz')}")))


def format_filter(command: str, path: Path, *, reads_name: bool = True) -> str:
    """Return a shell command with the file that it reads; a gzipped file is unpacked first.

    Args:
        reads_name: whether the command takes the name of a file, not its standard input alone.

    >>> format_filter("tail -n +2", Path("a.csv")), format_filter("tail -n +2", Path("a.csv.gz"))
    ('tail -n +2 a.csv', 'gzip -dc a.csv.gz | tail -n +2')
    """
    source = shlex.quote(str(path))
    if path.name.endswith(".gz"):
        return f"gzip -dc {source} | {command}"
    return f"{command} {source}" if reads_name else f"{command} < {source}"


def format_output(path: Path, ending: str) -> str:
    """Format the name of a file that a shell command makes of another file.

    >>> format_output(Path("data/train.json.gz"), "-records.jsonl")
    'train-records.jsonl'
    """
    return shlex.quote(path.name.removesuffix(".gz").partition(".")[0] + ending)


def make_utf8_error(path: Path, error: UnicodeDecodeError, *, line: int) -> DataError:
    """Return the error for bytes that are not UTF-8, with their probable encoding.

    Args:
        error: raised by decoding; its `object` may span several lines.
        line: number of the line in which `error.object` begins.
    """
    data = bytes(error.object)
    at = error.start
    line += data.count(b"\n", 0, at)
    start = data.rfind(b"\n", 0, at) + 1
    excerpt = data[max(start, at - 20) : at + 20]
    if _count_control_bytes(excerpt) > MAX_CONTROL_SHARE * len(excerpt):
        return DataError(f"{path}:{line}: this is no text: byte 0x{data[at]:02x}. {FORMATS} Download the file again.")
    end = data.find(b"\n", at) + 1 or len(data)
    damaged_as, ranked = _rank_encodings(path, data)
    if damaged_as:
        way = f"read such bytes as {damaged_as}" if damaged_as != "utf-8" else "write the sign U+FFFD for such bytes"
        command = _format_repair_command(damaged_as, path)
        advice = f"Other letters of the file are UTF-8: this one is damaged. Correct it, or {way}: {command}"
    elif not ranked:
        advice = "No known encoding reads the whole file. Export it again."
    else:
        advice = f"{ranked[0]} reads it: {format_iconv_command(ranked[0], path)}"
    place = f"{path}:{line}: not UTF-8: byte 0x{data[at]:02x} in"
    readers = ["utf-8"] if damaged_as else ranked or ["latin-1"]
    shown, *others = [_quote_around(data[start:end], at - start, name) for name in readers]
    if others and others[0] != shown:
        advice += f". If that is no text: {ranked[1]}, which reads {others[0]}"
    return DataError(f"{place} {shown}. Allowed is UTF-8. {advice}")


def _quote_around(line: bytes, at: int, encoding: str) -> str:
    """Quote what an encoding reads around a byte of a line."""
    text = line.decode(encoding, errors="replace")
    place = len(line[:at].decode(encoding, errors="replace"))
    return quote_value(text[max(0, place - 20) : place + 20])


def _rank_encodings(path: Path, data: bytes) -> tuple[str, list[str]]:
    """Return the encoding of damaged bytes, and the likeliest encoding of the whole file, two if a second is close.

    Damaged bytes of a file of UTF-8 are in "cp1252", or in "utf-8" if no encoding reads them; other files have "".
    """
    from fivetune.data.readers.encodings import (
        MARGIN,
        are_damaged_bytes_of,
        can_read_all,
        is_damaged_utf8,
        rank_encodings,
        sample_lines,
    )

    with open_bytes(path) if path.is_file() else nullcontext(BytesIO(data)) as file:
        lines, present = sample_lines(file)
        ranked: list[tuple[str, float]] = []
        for name, points in rank_encodings(lines, present):
            file.seek(0)
            if (not ranked or points > ranked[0][1] - MARGIN) and can_read_all(file, name):
                ranked.append((name, points))
            if len(ranked) == 2:
                break
    names = [name for name, _ in ranked]
    if not is_damaged_utf8(lines, names):
        return "", names
    return "cp1252" if are_damaged_bytes_of("cp1252", lines) else "utf-8", names


def _format_folders_command(path: Path, depth: int = 0) -> str:
    """Return the shell command that joins the texts or objects in folders, one folder for each label.

    Returns "" if there are no such folders, also not within one of them, such as `train`.
    """
    folders = [one for one in sorted(path.iterdir()) if one.is_dir() and one.name[0] not in "._"]
    files: dict[str, list[Path]] = {}
    for folder in folders:
        files[folder.name] = [file for file in sorted(folder.glob("[!.]*")) if file.is_file()]
    every = [*chain.from_iterable(files.values())]
    if sum(map(bool, files.values())) < 2 or len(every) <= len(folders) or all(map(SPLIT.fullmatch, files)):
        # Not labels but sets or levels: the folders of labels may be within, of the training set first.
        if depth == MAX_FOLDERS:
            return ""
        for folder in sorted(folders, key=lambda one: "train" not in one.name.casefold()):
            command = _format_folders_command(folder, depth + 1)
            if command:
                return command
        return ""
    [(suffix, times)] = Counter(file.suffix.lower() for file in every).most_common(1)
    suffix = suffix if times > len(every) / 2 else ""
    first = next(file for file in every if file.name.lower().endswith(suffix)).read_bytes()
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(first)
    if suffix == ".json" and isinstance(found, dict) and not {"data", "paragraphs"} & {*found}:
        fields = '**json.loads(p.read_text("utf-8-sig", "replace"))'
    elif suffix in ("", ".txt", ".text") and b"\0" not in first:
        fields = '"text": p.read_text("utf-8-sig", "replace")'
    else:
        return ""
    label = "folder" if isinstance(found, dict) and "label" in found else "label"
    paths = f'pathlib.Path({quote_in_code(str(path))}).glob("[!._]*/[!.]*{suffix}")'
    # A few files of many short lines: each line is a text of its own.
    lines = first.splitlines()
    is_short = len(lines) >= MIN_LINES and len(first) < MAX_LINE_BYTES * len(lines)
    each = ""
    if is_short and found is None and len(every) <= MAX_COMPARED:
        fields = '"text": t'
        each = ' for t in p.read_text("utf-8-sig", "replace").splitlines() if t.strip()'
    place = "" if each else '"id": p.parent.name + "/" + p.name, '
    record = f'{{{place}{fields}, "{label}": p.parent.name}}'
    code = f"import json, pathlib; [print(json.dumps({record})) for p in sorted({paths}) if p.is_file(){each}]"
    return f"python -c {shlex.quote(code)} > {shlex.quote(f'{path.resolve().name}.jsonl')}"


def _find_parallel(files: Sequence[Path]) -> Sequence[Path]:
    """Find files with lines that belong together: the names of two neighbours differ in one part.

    The part is not the first one, unless it says what a file holds. Among other files, such files have as many lines;
    so have texts and their labels.
    """
    if len(files) > MAX_COMPARED:
        return ()
    pairs = [*zip(files[::2], files[1::2], strict=False)]
    if len(files) % 2 or not all(map(_find_sides, pairs)):
        sizes = {file: _measure_lines(file) for file in files if file.suffix.lower() not in DOCUMENTS}
        alike = [(a, b) for a, b in combinations(sizes, 2) if sizes[a][0] == sizes[b][0] >= MIN_LINES]
        pairs = [pair for pair in alike if _find_sides(pair)]
        if not pairs:  # texts and their labels, by their lengths
            for first, second in alike:
                shorter, longer = sorted((sizes[first][1], sizes[second][1]))
                if longer > MIN_RATIO * shorter:
                    return [file for file in sizes if sizes[file][0] == sizes[first][0]]
    for pair in pairs:
        if "train" in pair[0].name:
            return pair
    return pairs[0] if pairs else ()


def _measure_lines(path: Path) -> tuple[int, int]:
    """Count the lines of a file, and its bytes."""
    num_lines = num_bytes = 0
    last = b""
    with open_bytes(path) as file:
        while block := file.read(2**20):
            num_lines += block.count(b"\n")
            num_bytes += len(block)
            last = block
    if num_bytes and not last.endswith(b"\n"):  # a last line without an end
        num_lines += 1
    return num_lines, num_bytes


def _find_sides(files: Sequence[Path]) -> list[str]:
    """Find the part in which the names of files differ, if it is one of each name.

    >>> _find_sides([Path("train.en.txt"), Path("train.de.txt")]), _find_sides([Path("neg.txt"), Path("pos.txt")])
    (['en', 'de'], [])
    """
    names = [re.split(r"[._-]", file.name.removesuffix(".gz")) for file in files]
    if len({*map(len, names)}) > 1:
        return []
    parts = [*zip(*names, strict=True)]
    places = [place for place, part in enumerate(parts) if len({*part}) > 1]
    if len(places) != 1:
        return []
    sides = [*parts[places[0]]]
    if any(map(SPLIT.fullmatch, sides)):  # two sets
        return []
    # The first part names a file, unless it says what the file holds.
    if places[0] == 0 and not {*map(str.casefold, sides)} <= {*SIDES.split()}:
        return []
    return sides


def find_partner(path: Path) -> Path | None:
    """Find a file of the same folder with records that may belong to this file's records.

    Its name differs in one part, and it has as many lines, or nearly so.
    """
    alike: list[Path] = []
    for one in sorted(path.parent.iterdir()):
        is_data = one.is_file() and one.name[0] not in "._" and one.suffix.lower() not in DOCUMENTS
        if is_data and one != path and _find_sides([path, one]):
            alike.append(one)
    if not alike:
        return None
    num_lines = _measure_lines(path)[0]
    return min(alike[:MAX_COMPARED], key=lambda one: abs(_measure_lines(one)[0] - num_lines))


def describe_label_files(files: Sequence[str]) -> str:
    """Describe how files of lines, each the texts of one label, become a table."""
    names = " ".join(map(shlex.quote, files))
    command = f"""awk '{{gsub(/[\\t\\r]/, " "); n = split(FILENAME, p, "/"); print $0 "\\t" p[n]}}' {names} > all.tsv"""
    return f"Files of one label each make a table: {command}, with --header text,label."


def describe_paste(parts: Sequence[str]) -> str:
    """Describe how files whose lines belong together are named, or that they do not."""
    try:
        refuse_unequal([Path(part).expanduser() for part in parts])
    except DataError as error:
        return str(error)
    return f"Files of lines that belong together are read as one table. Name them so: '{format_parallel(parts)}'."


def _describe_missing_path(path: Path, source: str) -> str:
    parts = source.split(",")
    if len(parts) > 1 and all(os.path.isfile(Path(part).expanduser()) for part in parts):
        return f"{source}: several files in one name. {describe_paste(parts)} Other files are a list: [A, B]."
    folder = path.parent
    while not os.path.exists(folder):
        folder = folder.parent
    if folder.is_file():
        return f"{source}: {folder} is a file, not a folder. Name the file itself, or the folder it is in."
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    wanted = path.relative_to(folder).parts[0]
    stems = {name: Path(name).stem for name in names}  # equal suffixes make no two names alike
    close = get_close_matches(Path(wanted).stem, stems.values(), n=3)
    near = [name for name, stem in stems.items() if stem in close][:3]
    lacking = "no such file or folder" if folder == path.parent else f"the folder {folder / wanted} does not exist"
    around = f" Near it in {folder}: {', '.join(near)}." if near else ""
    if not names:
        around = f" The folder {folder} is empty."
    return f"{source}: {lacking}.{around} Allowed: a file, a folder, or a hub name like org/name:config:split."


def _describe_read_error(path: Path, error: OSError) -> str:
    return f"{path}: cannot be read: {error.strerror or error}. Check its rights and the disk."
