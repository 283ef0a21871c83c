"""Read records from tables of text: find the separator, the use of quotes and the header, then read row by row.

In: a binary stream. Out: TableRow or BadRecord per row; every line of the file is part of one of them, the header, or
blank. Separators are the comma, tab, semicolon and vertical bar, or a run of several marks (`|||`, `####`).
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import IO, NamedTuple

from fivetune.data.readers.quotes import Quoting, are_quotes_well_formed
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    SUFFIXES,
    BadRecord,
    decode_head,
    format_parallel,
    format_too_long_message,
    get_data_suffix,
    is_workbook,
    make_utf8_error,
    open_bytes,
    open_text,
    quote_in_code,
    quote_value,
    read_lines,
    refuse_unequal,
)
from fivetune.data.readers.workbooks import iter_sheet_rows, take_head
from fivetune.errors import DataError
from fivetune.tasks import list_names
from fivetune.types import RawRecord

BOM = b"\xef\xbb\xbf"
SEPARATORS = "\t;,|"  # of several that divide all lines alike, the first counts: sentences hold it least often
PROSE_SEPARATORS = ";,"  # sentences hold them, followed by a space or at the end of a line
COMMENTS = ("#", "//")
BY_SUFFIX = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
OF_SHEET = "\t"  # in the first rows of a workbook as text
MAX_BLANK_FILLED = 0.1  # share of rows with a value in a last column without a name: texts with a separator
MAX_NAMED = 8  # columns that an example of --header names
MAX_CHECKED = 100_000  # lines below a missing header that are decoded, so that their encoding is told with it
MAX_ABOVE = 20  # lines of a title or a licence above the header; of comments, any number
SAMPLE_ROWS = 100  # that show the separator, and whether there is a header
ROWS_OF_STYLE = 1_000  # most of which have quoted cells: then all quotes are read so
MIN_PROSE_LINES = 5  # that show that nothing divides them alike
MAX_ALIKE, MAX_PROSE_ALIKE = 0.2, 0.5  # share of lines as wide as the first below which nothing divides them
MAX_TRUSTED_LINES = 20  # of a quoted cell, of which each line could be a record
MIN_PADDED = 3  # rows from which on blanks around cells are padding
MIN_WHOLE = 0.1  # share of rows without separators in their texts, from which on others are the exception
MIN_GAIN = 0.05  # share of lines that unusual quotes read more than usual ones, to be believed if not well-formed
MIN_SHARE_ALIKE = 0.9  # of the sampled lines of a file whose suffix does not say that it is a table
RETURN = re.compile(r"\r(?!\n)")
NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)?(?:[eE][-+]?\d+)?")
YEARS = range(1900, 2100)
NAME = re.compile(r"[^\W\d]\w*")
DOTTED_NAME = re.compile(rf"{NAME.pattern}(?:\.\w+)*")
SENTENCE_END = re.compile(r"[.!?。！？।؟][\"'”’»)]*\s*$")
QUESTION_END = re.compile(r"[?？؟][\"'”’»)]*\s*$")
NAMES_AGAIN = "holds the names of the columns again, as of joined files. Allowed is one header. Delete the line."
HEADER_WORDS = re.compile(
    r"id|text|labels?|sentence\d?|title|category|class|review|summary|document|article|questions?|answers?|context|"
    r"inputs?|outputs?|targets?|source|prompt|response|instruction|intent",
    re.IGNORECASE,
)


class HeaderError(DataError):
    """A table has no names of columns.

    Args:
        reason: why its first line is a record.
        num: number of columns.
    """

    def __init__(self, where: str, reason: str, num: int) -> None:
        self.reason = f"no header: {reason}"
        self.num = num
        what = describe_missing_header(reason, num)
        super().__init__(f"{where}: {what}. If that line is the header, give --header its names.")


class TableRow(NamedTuple):
    """A row of a table that is not a record yet; `number` is its first line, from 1; `separator` of its cells."""

    path: Path
    number: int
    header: Sequence[str]
    cells: list[str]
    separator: str = ","

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.cells))

    def parse(self) -> RawRecord | BadRecord:
        where = f"{self.path}:{self.number}"
        num = len(self.header)
        if len(self.cells) >= num and not any(self.cells[num:]):  # separators at the end of lines alone
            return RawRecord(dict(zip(self.header, self.cells[:num], strict=True)), where)
        first = quote_value(self.cells[0], limit=30)
        keep = ""
        if self.separator == "\t" and len(self.cells) > num:
            keep = f", or keep the first {num}: cut -f1-{num} {shlex.quote(str(self.path))} > first.tsv"
        return BadRecord(
            where,
            f"{len(self.cells)} cell{'s' * (len(self.cells) != 1)}, beginning with {first}, but the header has {num}. "
            f"Allowed is one cell per column, in double quotes if it holds a delimiter. Correct the row{keep}.",
        )


@dataclass(frozen=True, slots=True)
class TableForm:
    """How a table of text is written: the separator, a byte order mark or none, and the end of lines.

    Args:
        is_safe: whether a text that a spreadsheet would read as a formula has an apostrophe before it.
    """

    separator: str = ","
    has_mark: bool = False
    line_end: str = "\n"
    is_safe: bool = False


def read_form(path: Path) -> TableForm | None:
    """Read how a table of text is written; None for a file of another format."""
    if SUFFIXES.get(get_data_suffix(path), "csv") != "csv":
        return None
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    text = decode_head(head)
    separator = find_start(text, path)[1]
    if len(separator) != 1:
        return None
    return TableForm(separator, head.startswith(BOM), "\r\n" if text.partition("\n")[0].endswith("\r") else "\n")


# --- separator ---


def find_separator(head: str, path: Path) -> str:
    """Return the separator of a table: it divides all of the first hundred lines alike; "" if nothing does.

    The suffix only breaks ties, and decides where some lines differ. Of several marks in a row all are the separator.

    >>> find_separator('"a,b,c";d\\n"e";f\\n', Path("a.csv")), find_separator("text\\n", Path("a.tsv"))
    (';', '\\t')
    >>> find_separator("Title, short\\tlabel\\nGood, long\\tpos\\n", Path("a.tsv"))
    '\\t'
    >>> find_separator("good ||| pos\\nbad ||| neg\\n", Path("a.txt"))
    '|||'
    """
    suffix = get_data_suffix(path)
    if SUFFIXES.get(suffix) == "workbook":
        return OF_SHEET
    shares: dict[str, float] = {}
    alike: list[str] = []
    enclosing: list[str] = []  # separators of cells in quotes
    for one in SEPARATORS:
        is_prose = not suffix and _is_prose(head, one)  # a suffix says that it is a table
        shares[one] = 0.0 if is_prose else _measure_alike(head, one)
        if shares[one] == 1:
            alike.append(one)
        is_enclosing = _are_cells_enclosed(head, one, '"') or _are_cells_enclosed(head, one, "'")
        if is_enclosing and shares[one] >= MIN_SHARE_ALIKE:
            enclosing.append(one)
    alike = enclosing or alike  # other separators are within quotes
    # Nothing or only the bar divides the lines alike: a run of marks, such as `|||`, may be meant.
    if {*alike} <= {"|"}:
        marks = _find_marks(head)
        if marks:
            return marks
    by_suffix = BY_SUFFIX.get(suffix, "")
    if alike:
        return by_suffix if by_suffix in alike else alike[0]
    # Some lines differ: the separator with the most lines alike.
    best = by_suffix or SEPARATORS[0]
    for one in SEPARATORS:
        if shares[one] > shares[best]:
            best = one
    least = 0 if suffix else MIN_SHARE_ALIKE
    return best if shares[best] > least else by_suffix


def has_columns(head: str, path: Path) -> bool:
    """Return whether something may divide the lines of a file into columns: it is no prose with differing commas.

    >>> has_columns("one, two, three\\nfour, five\\nsix\\nno, no, no, no\\nso, so\\n", Path("a.csv"))
    False
    """
    _, separator, rest = _divide_head(head, path)
    num_lines = sum(bool(line.strip()) for line in rest.split("\n")[:SAMPLE_ROWS])
    first = split_plain(rest.partition("\n")[0], separator)
    if separator not in PROSE_SEPARATORS or len(first) < 2 or _is_known(first) or num_lines < MIN_PROSE_LINES:
        return True
    least = MAX_PROSE_ALIKE if _is_prose(rest, separator) else MAX_ALIKE
    return _measure_alike(rest, separator) >= least


@lru_cache(maxsize=8)  # detecting the format, reading and describing a file ask for the same head
def find_start(head: str, path: Path) -> tuple[int, str]:
    """Return the number of the header's line, from 1, and the separator; "" if nothing divides the lines.

    Above the header may be the line that Excel reads and writes, `sep=;`, and lines with fewer cells than all others: a
    title, a licence, comments.

    >>> find_start("sep=|\\na|b\\n", Path("a.csv"))
    (2, '|')
    >>> find_start("Tickets, all\\n\\nid,text,label\\n1,Late,no\\n2,Lost,yes\\n", Path("a.csv"))
    (3, ',')
    """
    if named := re.match(r'\s*"?sep=([^\n\w"])"?[;,\t]*\r?\n', head, re.IGNORECASE):
        return 2, named[1]
    lines = head.split("\n")
    separator = find_separator(head, path)
    # The header may be each of the first lines, and below more comments the last comment or what follows them.
    num_comments = sum(1 for _ in takewhile(_is_comment, lines))
    for start in (*range(MAX_ABOVE), *range(max(MAX_ABOVE, num_comments - 1), num_comments + 2)):
        if start >= len(lines):
            break
        if not lines[start].strip():
            continue
        rest = "\n".join(lines[start:])
        own = find_separator(rest, path) if start else separator
        if own and _is_header(lines[:start], rest, own):
            return start + 1, own
    return 1, separator


def _divide_head(head: str, path: Path) -> tuple[int, str, str]:
    """Return the number of the header's line, the separator, a comma if nothing divides the lines, and the text from
    the header on.
    """
    start, separator = find_start(head, path)
    return start, separator or ",", "\n".join(head.split("\n")[start - 1 :])


def _find_other_names(head: str, start: int, rows: Sequence[Sequence[str]]) -> list[str]:
    """Find the names of the columns in the line above the rows of a table, divided by another separator than these;
    none if the rows begin with names, or the line is something else.
    """
    if start == 1 or len(rows) < 2 or _is_known(rows[0]) or all(map(NAME.fullmatch, rows[0])):
        return []
    line = head.split("\n")[start - 2].strip(' "\r')
    for separator in (*SEPARATORS, " "):
        cells = line.split(separator)
        names = [name.strip(' "') for name in cells]
        is_plain = all(map(NAME.fullmatch, cells))  # else a title, such as `Tickets, all`
        if len(names) == len(rows[0]) > 1 and all(names) and (is_plain or _is_known(names)):
            return names
    return []


def _is_header(above: Sequence[str], rest: str, separator: str) -> bool:
    """Return whether the first line has as many cells as those below, and the lines above it are text."""
    first, *others = _sample_rows(rest, separator) or [[]]
    width = len(first)
    # Below comments, names may be above rows without their last cells.
    least = width
    if above and all(map(_is_comment, above)) and all(map(DOTTED_NAME.fullmatch, first)):
        least = 1
    num_alike = sum(least <= len(row) <= width for row in others)
    if width < 2 or num_alike < max(2, MIN_SHARE_ALIKE * len(others)):
        return False
    # A title has blank cells at its end, as Excel writes it (Tickets;;;), or stands above names.
    if not _is_known(first) and _is_text(rest.partition("\n")[0], separator):
        is_short = width > 2 and _count_cells(first) < max(map(_count_cells, others))
        if is_short or _is_known(others[0]):
            return False
    are_comments = True
    for line in above:
        if _is_known(split_plain(line, separator)) or not _is_text(line, separator):
            return False
        are_comments = are_comments and line.startswith(COMMENTS)
    return are_comments or not _is_prose(rest, separator)


def _is_known(cells: Sequence[str]) -> bool:
    return any(HEADER_WORDS.fullmatch(cell.strip()) for cell in cells)


def _is_text(line: str, separator: str) -> bool:
    """Return whether a line is a comment, a sentence, one cell or blank."""
    return line.startswith(COMMENTS) or _is_prose(line, separator) or _count_cells(split_plain(line, separator)) < 2


def _is_comment(line: str) -> bool:
    return line.startswith(COMMENTS) or not line.strip()


def _count_cells(cells: Sequence[str]) -> int:
    """Count the cells of a row without empty cells at its end."""
    return max((place for place, cell in enumerate(cells, 1) if cell.strip()), default=0)


def _is_prose(head: str, separator: str) -> bool:
    """Return whether a separator is followed by a space or a line end in most places: it is part of sentences."""
    in_prose = re.findall(rf"{re.escape(separator)}(?=[ \r\n])", head)
    return separator in PROSE_SEPARATORS and 2 * len(in_prose) > head.count(separator)


def _measure_alike(head: str, separator: str) -> float:
    """Return the share of the first lines with as many cells as the first one, 0 if that has one cell.

    Lines are counted by quoted and by plain cells; the larger share counts.
    """
    best = 0.0
    for quoting in (*_list_quotings(head, separator), Quoting("")):
        widths = [*map(len, _sample_rows(head, separator, quoting))]
        if widths and widths[0] > 1:
            best = max(best, widths.count(widths[0]) / len(widths))
    return best


def _are_cells_enclosed(head: str, separator: str, mark: str) -> bool:
    """Return whether most lines have a cell between quotes."""
    divider = re.escape(separator)
    cell = re.compile(rf"(?:^|{divider}){mark}[^{mark}]+{mark}(?={divider}|\r?$)")
    lines = head.split("\n")
    num_enclosed = sum(cell.search(line) is not None for line in lines)
    return 2 * num_enclosed > len(lines)


def _sample_rows(head: str, separator: str, quoting: Quoting | None = None) -> list[list[str]]:
    """Return the cells of the first SAMPLE_ROWS rows, without a row that the head cuts off.

    Args:
        quoting: way of quoting; None: as the head alone shows it.
    """
    if quoting is None:
        quoting = _list_quotings(head, separator)[0] if len(separator) == 1 else Quoting("")
    lines = [line for line in head.split("\n") if line.strip("\r")]
    if len(head) >= HEAD_BYTES // 4 and len(lines) > 1:  # a character of UTF-8 has four bytes at most
        del lines[-1]
    if not quoting.mark:
        return [split_plain(line, separator) for line in lines[:SAMPLE_ROWS]]
    rows: list[list[str]] = []
    with suppress(csv.Error):
        ended = quoting.normalize(f"{line}\n" for line in lines)
        rows.extend(islice(csv.reader(ended, delimiter=separator, quotechar=quoting.mark), SAMPLE_ROWS))
    return rows


def _find_marks(head: str) -> str:
    """Return the run of two or more marks that divides all of the first lines alike; "" if there is none."""
    lines = [line for line in head.split("\n")[:SAMPLE_ROWS] if line.strip()]
    if not lines:
        return ""
    for marks in re.findall(r"[|#:~^@$+*=]{2,}", lines[0]):
        rows = [line.split(marks) for line in lines]
        is_even = len({*map(len, rows)}) == 1
        words = {row[-1].partition(":")[0] for row in rows}  # of a dialogue: ### Human: ... ### Assistant: ...
        if is_even and (len(rows) == 1 or len(words) > 1):
            return marks
    return ""


def split_plain(line: str, separator: str) -> list[str]:
    """Divide a line without quoting; a separator of several marks takes the spaces around it away.

    >>> split_plain('"a" b\\tc\\r\\n', "\\t"), split_plain("a ||| b", "|||")
    (['"a" b', 'c'], ['a', 'b'])
    """
    cells = line.removesuffix("\n").removesuffix("\r").split(separator)
    if len(separator) == 1:
        return cells
    return [cell.strip(" ") for cell in cells]


# --- quotes ---


def _find_quoting(file: IO[bytes], start: int, separator: str, rest: str) -> Quoting:
    """Return how the cells of a table are quoted.

    Quotes that are well-formed over the whole file are trusted where commas or semicolons, which prose holds, divide
    the cells.

    Args:
        start: number of the first line of the table.
        rest: the beginning of the table.
    """
    if len(separator) > 1:
        return Quoting("")
    ways = _list_quotings(rest, separator)
    if separator in PROSE_SEPARATORS:
        for way in ways:
            _skip_to_line(file, start)
            if are_quotes_well_formed(file, separator, way):
                return way._replace(is_trusted=True)
    # Not well-formed: unusual quotes must read more of the beginning, usual ones more of the whole table.
    if _measure_read(rest, separator, ways[0]) > _measure_read(rest, separator, Quoting()) + MIN_GAIN:
        return ways[0]
    _skip_to_line(file, start)
    texts = (line.removeprefix(BOM).decode(errors="replace") for _, line in read_lines(file) if line.strip(b"\r\n"))
    return _weigh_quotes(texts, separator)


def describe_quotes(path: Path) -> str:
    """Describe how the cells of a table are quoted if it is unusual, else ""."""
    with open_bytes(path) as file:
        start, separator, rest = _divide_head(decode_head(file.read(HEAD_BYTES)), path)
        quoting = _find_quoting(file, start, separator, rest)
        sample = _sample_rows(rest, separator, quoting)
        others = find_other_values(sample[0], sample) if sample else []
        joined: list[int] = []
        if others:
            _skip_to_line(file, start)
            for record in _iter_records(_decode_lines(file, path, start), start, separator, quoting):
                if len(record.cells) > len(others) == len(join_cells(record.cells, others, separator)):
                    joined.append(record.number)
    notes: list[str] = []
    if quoting.is_escaped or quoting.mark == "'":
        kind = "single" if quoting.mark == "'" else "double"
        escape = "; inside, a backslash before a quote is left out" if quoting.is_escaped else ""
        notes.append(f"{kind} quotes enclose cells{escape}")
    if joined:
        lines = f"{len(joined):,} line{'s' * (len(joined) > 1)}, the first: {joined[0]}"
        name = name_columns(sample[0])[others.index(frozenset())]
        notes.append(f"{quote_value(separator)} without quotes is part of {name} in {lines}")
    return ". ".join(notes)


def _list_quotings(head: str, separator: str) -> list[Quoting]:
    """List the ways in which quotes may enclose the cells of a table; ways that read more of its lines are first."""
    ways = [Quoting(is_escaped=True)] if '\\"' in head else []
    if re.search(rf"(?:^|{re.escape(separator)})'", head, re.MULTILINE):
        ways += [Quoting("'"), Quoting("'", is_escaped=True)]
    if not ways:
        return [Quoting()]
    usual = _measure_read(head, separator, Quoting())
    is_single = _are_cells_enclosed(head, separator, "'")
    better: dict[Quoting, float] = {}
    for way in ways:
        share = _measure_read(head, separator, way)
        if share > usual or (share == usual and is_single and way.mark == "'"):
            better[way] = share
    return [*sorted(better, key=better.__getitem__, reverse=True), Quoting()]


def _measure_read(head: str, separator: str, quoting: Quoting) -> float:
    """Return the share of the first lines that are in records without an error, as wide as most."""
    lines = [f"{line}\n" for line in head.split("\n")[:ROWS_OF_STYLE]]
    del lines[-1]  # it may be cut off
    num_read: Counter[int] = Counter()  # lines by the width of their records
    times: Counter[int] = Counter()
    for record in _iter_quoted(lines, 1, separator, quoting):
        width = len(record.cells)
        times[width] += width > 0
        num_read[width] += len(record.lines)
    most = max(times, key=times.__getitem__, default=0)
    return num_read[most] / max(1, len(lines)) if most > 1 else 0.0


def _weigh_quotes(lines: Iterable[str], separator: str) -> Quoting:
    """Return whether the double quotes of a table enclose cells, by comparing both ways to read each quote.

    A way is right for a line if its record has as many cells as the first one. Where lines that are whole records by
    themselves would become one cell, the quotes do not enclose it. A table most of whose rows have quoted cells is
    quoted. Commas and semicolons need quotes in prose, so such a table is only read without if rows would vanish.
    """
    needs_quotes = separator in PROSE_SEPARATORS
    plain_width = quoted_width = 0
    num_rows = num_plain = num_quoted = num_swallowed = num_styled = 0
    for record in _iter_quoted(lines, 1, separator, Quoting()):
        own = record.lines
        cells = record.cells
        num_rows += 1
        if plain_width and '"' not in own[0] and not record.error:  # as of a carriage return in a text
            continue
        plain_width = plain_width or len(split_plain(own[0], separator))
        quoted_width = quoted_width or len(cells) or plain_width
        num_plain += sum(len(split_plain(line, separator)) == plain_width for line in own)
        if (cells or not needs_quotes) and is_swallowed(own, cells, separator, plain_width):
            num_swallowed += 1
        elif len(cells) == quoted_width:
            num_quoted += len(own)
            num_styled += own[0].startswith('"') or f'{separator}"' in own[0]
        # So many rows with quoted cells are enough: the rest of a large file is not weighed.
        if num_rows >= ROWS_OF_STYLE and 2 * num_styled > num_rows:
            return Quoting(is_trusted=needs_quotes)
    is_styled = 2 * num_styled > num_rows
    is_quoted = num_quoted >= num_plain
    if needs_quotes or is_styled:
        is_quoted = is_quoted or not num_swallowed
    if not is_quoted:
        return Quoting("")
    return Quoting(is_trusted=is_styled and needs_quotes)


class _Record(NamedTuple):
    """A record's first line, counted from 1, its lines, and its cells; none for a blank line or for an error."""

    number: int
    lines: list[str]
    cells: list[str]
    error: csv.Error | None = None


def _iter_quoted(lines: Iterable[str], start: int, separator: str, quoting: Quoting) -> Iterator[_Record]:
    """Yield each record, whose quoted cells may hold separators and line ends; `start`: number of the first line."""
    taken: list[str] = []

    def take() -> Iterator[str]:
        for line in quoting.normalize(lines):
            taken.append(line)
            yield line

    rows = csv.reader(take(), delimiter=separator, quotechar=quoting.mark, strict=True)
    while True:
        taken.clear()
        cells: list[str] = []
        error = None
        try:
            cells = next(rows)
        except StopIteration:
            return
        except csv.Error as raised:
            error = raised
        yield _Record(start + rows.line_num - len(taken), taken.copy(), cells, error)


def _iter_records(lines: Iterable[str], start: int, separator: str, quoting: Quoting) -> Iterator[_Record]:
    return _iter_quoted(lines, start, separator, quoting) if quoting.mark else _iter_plain(lines, start, separator)


def _iter_plain(lines: Iterable[str], start: int, separator: str) -> Iterator[_Record]:
    """Yield each line that is not empty as a record."""
    for number, line in enumerate(lines, start):
        if line.strip("\r\n"):
            yield _Record(number, [line], split_plain(line, separator))


def is_swallowed(lines: Sequence[str], cells: Sequence[str], separator: str, width: int) -> bool:
    """Return whether the lines of one quoted record are records by themselves: the quotes are part of the text.

    Args:
        cells: cells of the quoted record.
        width: number of cells of each record.

    >>> is_swallowed(['"Where?\\tWo?\\n', 'It is 15"\\tEs\\n'], ["Where?\\tWo?\\nIt is 15", "Es"], "\\t", 2)
    True
    >>> is_swallowed(['"Hello Ann,\\n', 'thanks",pos\\n'], ["Hello Ann,\\nthanks", "pos"], ",", 2)
    False
    """
    if len(lines) < 2 or (width < 2 and separator in PROSE_SEPARATORS):
        return False
    rows = [split_plain(line, separator) for line in lines]
    if any(len(row) != width for row in rows):
        return False
    # A program quotes all cells, or text that begins with a line end; code begins its lines with tabs.
    quoted = separator.join('"{}"'.format(cell.replace('"', '""')) for cell in cells)
    is_written = len(cells) == width and quoted == "".join(lines).removesuffix("\n").removesuffix("\r")
    if is_written or rows[0][-1] == '"':
        return False
    if width > 1 and any(not row[0] for row in rows[1:]):
        return False
    # A comma before a space is part of a sentence, and divides no cells.
    return separator not in PROSE_SEPARATORS or all(cell and cell[0] != " " for cell in chain.from_iterable(rows))


# --- header ---


def name_columns(cells: Sequence[str]) -> list[str]:
    """Return the names of columns without the spaces around them.

    An empty name, as of the index of pandas, becomes the name that pandas gives such a column.

    >>> name_columns(["", "text "]), name_columns(["", "Unnamed: 0"])
    (['Unnamed: 0', 'text'], ['Unnamed: 0.1', 'Unnamed: 0'])
    """
    names = [cell.strip() for cell in cells]
    names[:1] = [name.removeprefix("//").strip() for name in names[:1]]  # a header may be a comment
    for place, name in enumerate(names):
        if name:
            continue
        unused = f"Unnamed: {place}"
        number = 0
        while unused in names:
            number += 1
            unused = f"Unnamed: {place}.{number}"
        names[place] = unused
    return names


def find_data_in_header(rows: Sequence[Sequence[str]]) -> str:
    """Return why the first row of a table is certainly a record, "" if it can be a header.

    A number stands above numbers, a value of a few occurs below, or a sentence stands above sentences.

    >>> find_data_in_header([["ham", "Go on"], ["spam", "Win"], ["ham", "Ok"], ["ham", "Yes"]])
    "'ham' occurs again below"
    >>> find_data_in_header([["Go.", "Geh."], ["Run!", "Lauf!"], ["Hi.", "Hallo."]])
    "'Go.' is a sentence, as those below"
    >>> find_data_in_header([["label", "text"], ["ham", "Ok."], ["ham", "Go."]])
    ''
    """
    first, *others = rows
    below = [row for row in others if len(row) == len(first) and row != first]
    if len(below) < 2 or _are_numbered(first) or _is_known(first):
        return ""
    for place, cell in enumerate(first):
        column = [row[place] for row in below if row[place].strip()]
        if not cell.strip() or len(column) < 2:
            continue
        shown = quote_value(cell, limit=30)
        if _is_number(cell) and all(map(_is_number, column)):
            return f"{shown} is a number, as those below"
        times = Counter(column)
        has_few = len(times) <= len(column) / 2 + 1
        is_ticked = {*times} == {cell} and len(column) < len(below)  # a box with its own name, or blank
        if times[cell] >= max(2, len(column) / 50) and has_few and not is_ticked:
            return f"{shown} occurs again below"
        ending = QUESTION_END if QUESTION_END.search(cell) else SENTENCE_END
        num_ended = sum(ending.search(one) is not None for one in column)
        if ending.search(cell) and num_ended >= 0.8 * len(column):
            return f"{shown} is a sentence, as those below"
    return ""


def _is_number(text: str) -> bool:
    return NUMBER.fullmatch(text.strip()) is not None


def _are_numbered(cells: Sequence[str]) -> bool:
    """Return whether the numbers among cells are names: from 0 in all cells, as pandas gives them, or years.

    >>> _are_numbered(["", "0", "1"]), _are_numbered(["place", "2019", "2020"]), _are_numbered(["0", "Go on", "1"])
    (True, True, False)
    """
    filled = [cell for cell in cells if cell.strip()]
    numbers = [int(cell) for cell in filled if cell.strip().isdecimal()]
    if len(numbers) < 2 or numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
        return False
    return numbers[0] in YEARS or (numbers[0] == 0 and len(numbers) == len(filled))


def describe_missing_header(reason: str, num: int) -> str:
    """Return the error for records whose columns have no names, with the flag and the setting that name them."""
    return (
        f"no header: {reason}. Allowed are records with names of columns. Name the {num:,}, in any words: --header "
        f"{_join_plain_names(num)} (in a recipe data.header)"
    )


def list_plain_names(num: int) -> list[str]:
    """Return names that say nothing of what a column is."""
    return [f"column{number}" for number in range(1, num + 1)]


def _join_plain_names(num: int) -> str:
    names = list_plain_names(min(num, MAX_NAMED))
    if num > MAX_NAMED:
        names.append("...")
    return ",".join(names)


# --- rows ---


def read_csv_rows(
    file: IO[bytes], path: Path, *, columns: Mapping[str, str], header: Sequence[str] = ()
) -> Iterator[TableRow | BadRecord]:
    """Yield each row below the header; `where` is its first line. Quoted cells may hold separators and line ends.

    Args:
        header: names of the columns of a table without a header; a first line with the same names is one.

    Raises DataError for a file without a header, or with a header that has a name twice or lacks one of `columns`.
    """
    head = decode_head(file.read(HEAD_BYTES))
    if _has_return_ends(head, path):
        raise DataError(f"{path}: its lines end in carriage returns alone. {_describe_returns(path)}")
    start, separator, rest = _divide_head(head, path)
    csv.field_size_limit(MAX_RECORD_BYTES)  # process-wide, 131,072 by default; csv.reader has no such option
    quoting = _find_quoting(file, start, separator, rest)
    _skip_to_line(file, start)
    # What is above the table: the names of its columns with another separator, or lines that are no records.
    other = _find_other_names(head, start, _sample_rows(rest, separator))
    header = header or other
    below = "records" if header else "header"
    for number, line in enumerate(head.split("\n")[: start - 1 - bool(other)], 1):
        if line.strip() and not line.lstrip('"').startswith("sep="):
            yield BadRecord(
                f"{path}:{number}",
                f"{quote_value(line, limit=30)} is above the {below}, in line {start}. Allowed is a header in the "
                "first line. Delete the lines above it.",
            )
    lines = _decode_lines(file, path, start)
    names: list[str] = []
    is_padded = False
    num_blank = 0
    others: Sequence[frozenset[str]] = ()
    max_lines = MAX_TRUSTED_LINES if quoting.is_trusted else 1
    for record in _iter_records(lines, start, separator, quoting):
        cells = record.cells
        where = f"{path}:{record.number}"
        if record.error:
            yield _classify_csv_error(record.error, where, path)
        if not cells:
            continue
        # The first row with cells: the header, or the first record below names that were given.
        if not names:
            sample = _sample_rows(rest, separator, quoting)
            try:
                names, is_record = find_names(cells, sample, header, where)
            except DataError as error:
                blocks = "" if header else _describe_blocks(sample, path, separator)
                if blocks:
                    raise DataError(f"{where}: {blocks}") from error
                try:  # what would be refused next
                    deque(islice(lines, MAX_CHECKED), maxlen=0)
                except DataError as unread:
                    raise DataError(f"{error} Then, {unread}") from error
                raise
            is_padded = _is_padded([cells, *sample])
            num_blank = 0 if header else _count_blank_columns([cells, *sample])
            names = names[: len(names) - num_blank]
            others = find_other_values(names, sample)
            wrong = describe_missing_column(names, columns)
            if wrong:
                raise DataError(f"{where}: {wrong}")
            if not is_record:
                continue
        num_lines = len(record.lines)
        if num_lines > max_lines and is_swallowed(record.lines, cells, separator, len(names)):
            yield BadRecord(
                where,
                f"a quoted cell that begins in this line ends in line {record.number + num_lines - 1}, and each of "
                f"these {num_lines:,} lines is a record by itself. Allowed: cells in double quotes, quotes inside them "
                "doubled. Close the quote, or double it.",
            )
            continue
        # The cells of the record: without padding, without blank columns, with the parts of a divided text joined.
        if is_padded:
            cells = [cell.strip() for cell in cells]
        if len(cells) == len(names) + num_blank and not any(map(str.strip, cells[len(names) :])):
            cells = cells[: len(names)]
        if others and len(cells) > len(names):
            cells = join_cells(cells, others, separator)
        if not header and _are_names(cells, names):
            yield BadRecord(where, NAMES_AGAIN)
        else:
            yield TableRow(path, record.number, names, cells, separator)


def _are_names(cells: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the cells of several columns are their names, as where one of several joined files begins."""
    if len(names) < 2 or cells[-1].strip(' "').casefold() != names[-1].casefold():
        return False
    own = name_columns([cell.strip('\ufeff "') for cell in cells])
    return [name.casefold() for name in own] == [name.casefold() for name in names]


def _has_return_ends(head: str, path: Path) -> bool:
    """Return whether most lines of a table end in carriage returns: then a few line ends of other systems are no
    reason to read these as parts of cells.

    >>> _has_return_ends("text,label\\rFine.,yes\\rNo.,no\\r\\n", Path("a.csv"))
    True
    """
    text = head.strip()
    outside = re.sub('"[^"]*"', "", text)  # quoted cells may hold carriage returns
    if len(RETURN.findall(outside)) <= text.count("\n"):
        return False
    _, separator, rest = _divide_head(RETURN.sub("\n", head), path)
    return "\n" not in head or _measure_alike(rest, separator) >= MIN_SHARE_ALIKE


def _describe_returns(path: Path) -> str:
    """Describe the line ends that are allowed, and the command that writes them."""
    name = Path(path.name.removesuffix(".gz"))
    source = shlex.quote(str(path))
    into = shlex.quote(f"{name.stem}-lines{name.suffix}")
    command = f"gzip -dc {source} | tr" if path.suffix == ".gz" else f"tr < {source}"
    return f"Allowed are line feeds, also after carriage returns. Convert it: {command} '\\r' '\\n' > {into}"


def _is_padded(rows: Sequence[Sequence[str]]) -> bool:
    """Whether blanks around cells align columns for the eye: in most cells of the header, and of all rows.

    Fewer than MIN_PADDED rows may have such blanks by chance.

    >>> _is_padded([["id ", " text"]] + [["1  ", " a hat"]] * 3), _is_padded([["id", "text"]] + [["1", " a hat"]] * 3)
    (True, False)
    """
    if len(rows) < MIN_PADDED:
        return False
    for cells in (rows[0], [*chain.from_iterable(rows)]):
        num_filled = num_padded = 0
        for cell in cells:
            num_filled += bool(cell.strip())
            num_padded += bool(cell.strip()) and cell != cell.strip()
        if 2 * num_padded <= num_filled:
            return False
    return True


def _count_blank_columns(rows: Sequence[Sequence[str]]) -> int:
    """Count the last columns without a name and, in nearly all rows, without a value: lines that end in separators.

    >>> _count_blank_columns([["a", "b", ""], ["1", "2", ""]]), _count_blank_columns([["a", ""], ["1", "x"]])
    (1, 0)
    """
    names, *others = rows
    num = len(names) - _count_cells(names)
    num_filled = sum(any(map(str.strip, row[len(names) - num :])) for row in others)
    return num if num < len(names) and num_filled <= MAX_BLANK_FILLED * len(others) else 0


def find_other_values(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[frozenset[str]]:
    """Find the one column whose texts may hold separators without quotes, where rows have more cells than names.

    All others have numbers, or values that repeat, before and behind these texts.

    Returns: the values that repeat in each other column, "0" for numbers, and the empty set for that column; [] if
        none or several columns may be meant.

    >>> rows = [["Good", "pos"], ["Bad", "neg"], ["Well", " yes", "pos"], ["Bad", "neg"], ["No", "neg"], ["Yes", "pos"]]
    >>> [sorted(one) for one in find_other_values(["text", "label"], rows)]
    [[], ['neg', 'pos']]
    """
    full = [row for row in rows if len(row) >= len(names) and [*row] != [*names]]
    num_whole = sum(len(row) == len(names) for row in full)
    if len(names) < 2 or num_whole < max(MIN_PROSE_LINES, MIN_WHOLE * len(full)):
        return []
    found: list[list[frozenset[str]]] = []
    for place in range(len(names)):
        after = len(names) - place - 1
        others = [[*row[:place], *row[len(row) - after :]] for row in full]
        values = [*map(_find_repeated, zip(*others, strict=True))]
        if all(values):
            found.append([*values[:place], frozenset(), *values[place:]])
    return found[0] if len(found) == 1 else []


def _find_repeated(cells: Sequence[str]) -> frozenset[str]:
    """Find the values of nearly all cells that repeat, "0" for numbers; none if there are too many."""
    least = MIN_SHARE_ALIKE * len(cells)
    num_numbers = num_repeated = 0
    repeated: set[str] = set()
    for cell, num in Counter(map(str.strip, cells)).items():
        if _is_number(cell):
            num_numbers += num
        if cell and num > 1:
            repeated.add(cell)
            num_repeated += num
    if num_numbers >= least:
        return frozenset("0")
    return frozenset(repeated) if 3 * len(repeated) <= num_repeated >= least else frozenset()


def join_cells(cells: list[str], others: Sequence[frozenset[str]], separator: str) -> list[str]:
    """Join the cells of a row that a text with separators was divided into.

    All other cells must have values as in other rows, and neither end of the text may be such a value, as in 3,5.

    >>> others = [frozenset("0"), frozenset(), frozenset(["neg", "pos"])]
    >>> join_cells(["7", "Well", " yes", "pos"], others, ","), join_cells(["7", "5", " yes", "pos"], others, ",")
    (['7', 'Well, yes', 'pos'], ['7', '5', ' yes', 'pos'])
    """
    place = others.index(frozenset())
    end = len(cells) - (len(others) - place - 1)
    joined = [*cells[:place], separator.join(cells[place:end]), *cells[end:]]
    for cell, own in zip(joined, others, strict=True):
        if own and not _has_value(cell, own):
            return cells
    # The column before or behind the text may begin or end in it: where, nothing shows.
    if place > 0 and _has_value(cells[place], others[place - 1]):
        return cells
    if place + 1 < len(others) and _has_value(cells[end - 1], others[place + 1]):
        return cells
    return joined


def _has_value(cell: str, values: frozenset[str]) -> bool:
    if "0" in values and _is_number(cell):  # a column of numbers
        return True
    return cell.strip() in values


def read_text_lines(file: IO[bytes], path: Path, header: Sequence[str]) -> Iterator[TableRow]:
    """Yield each line as a row of one column, blank ones too, so that the n-th record is the n-th line."""
    for number, line in enumerate(_decode_lines(file, path, 1), 1):
        yield TableRow(path, number, header, [line.removesuffix("\n").removesuffix("\r")])


def read_parallel_lines(files: Sequence[Path], header: Sequence[str]) -> Iterator[TableRow]:
    """Yield lines of the same number from several files as one row; the columns are named as `name_sides` does.

    Raises DataError for files of different numbers of lines, before the first row.
    """
    refuse_unequal(files)
    names = header or name_sides(files)
    with ExitStack() as stack:
        sides = [read_text_lines(stack.enter_context(open_text(file)), file, ()) for file in files]
        for rows in zip(*sides, strict=True):
            yield TableRow(files[0], rows[0].number, names, [row.cells[0] for row in rows], "\t")


def name_sides(files: Sequence[Path]) -> list[str]:
    """Name the columns that files of lines are: the differing parts of their names.

    >>> name_sides([Path("a/train.de"), Path("a/train.en")]), name_sides([Path("a.txt"), Path("a.txt.gz")])
    (['de', 'en'], ['column1', 'column2'])
    """
    inner = format_parallel([*map(str, files)]).partition("{")[2].rpartition("}")[0]
    names = [Path(part).name.partition(".")[0] for part in inner.split(",")]
    are_names = len({*names}) == len(files) and all(names)
    return names if are_names else list_plain_names(len(files))


def read_first_cells(head: bytes, path: Path) -> list[str]:
    """Return the cells of a table's first row, of lines without a separator the first line."""
    text = take_head(iter_sheet_rows(path))[1] if is_workbook(head) else decode_head(head)
    start, separator, rest = _divide_head(text, path)
    rows = _sample_rows(rest, separator)
    return _find_other_names(text, start, rows) or next(iter(rows), [])


def find_names(
    cells: Sequence[str], sample: Sequence[Sequence[str]], header: Sequence[str], where: str
) -> tuple[list[str], bool]:
    """Return the names of the columns, and whether the first row is a record, not the header."""
    if not header:
        if reason := find_data_in_header(sample or [cells]):
            raise HeaderError(where, reason, len(cells))
        names = name_columns(cells)
        _refuse_repeated_name(names, where)
        return names, False
    _refuse_repeated_name(header, where)
    if len(cells) != len(header):
        raise DataError(
            f"{where}: {len(cells)} cells, but data.header names {len(header)}: {list_names(header)}. Allowed is one "
            "name per column. Correct --header (data.header)."
        )
    return [*header], name_columns(cells) != [*header]


def _describe_blocks(rows: Sequence[Sequence[str]], path: Path, separator: str) -> str:
    """Return the error for rows that hold several records each, with the command that writes a line for each.

    The records are in blocks of columns with the same names, or that begin with a question; "" for other rows.
    """
    if len(rows) < 2 or len(separator) > 1 or path.suffix == ".gz":
        return ""
    first = [*rows[0]]
    columns: list[list[str]] = []  # without empty cells
    for place in range(len(first)):
        columns.append([row[place] for row in rows if place < len(row) and row[place].strip()])

    # Blocks by the first name that repeats, if all names repeat with it.
    times = Counter(first)
    named = next((name for name in first if name.strip() and times[name] > 1), "")
    starts = [place for place, name in enumerate(first) if name == named]
    if not named or first[starts[0] :] != first[starts[0] : starts[1]] * len(starts):
        # Blocks by columns of questions.
        named = ""
        starts = []
        for place, column in enumerate(columns):
            num_asked = sum(QUESTION_END.search(cell) is not None for cell in column)
            if 2 * num_asked > len(column):
                starts.append(place)
    if len(starts) < (2 if named else 3):
        return ""
    before = starts[0]
    size = starts[1] - before
    places = [place for place in range(before, len(first), size) if place in starts or columns[place]]
    is_even = {*starts} <= {*places} and len(starts) >= MIN_SHARE_ALIKE * len(places)
    if size < 2 or not is_even or (len(first) - before) % size:
        return ""
    file = f'open({quote_in_code(str(path))}, encoding="utf-8-sig")'
    loops = f"for n, r in enumerate(csv.reader({file}, delimiter={quote_in_code(separator)}))"
    block = f"r[i:i + {size}]"
    loops += f" for i in range({before}, len(r), {size}) if any({block})"
    if named:  # of the header one block is enough
        loops += f" and (n or i == {before})"
    code = f"import csv, sys; w = csv.writer(sys.stdout); [w.writerow(r[:{before}] + {block}) {loops}]"
    into = shlex.quote(f"{path.stem}-records.csv")
    names = "" if named else f", with --header {_join_plain_names(before + size)}"
    return (
        f"{len(places):,} records in each line, in blocks of {size} columns. Allowed is one record a line. Write each "
        f"on a line: python -c {shlex.quote(code)} > {into}, and name that file{names}."
    )


def _refuse_repeated_name(names: Sequence[str], where: str) -> None:
    times = Counter(names)
    for repeated in names:
        if times[repeated] > 1:
            places = [str(place) for place, name in enumerate(names, 1) if name == repeated]
            raise DataError(
                f"{where}: the columns {' and '.join(places)} are both named {repeated!r}. Names must be unique. "
                "Rename one."
            )


def _skip_to_line(file: IO[bytes], number: int) -> None:
    file.seek(0)
    for _ in range(number - 1):
        file.readline(HEAD_BYTES)


def _decode_lines(file: IO[bytes], path: Path, start: int) -> Iterator[str]:
    """Decode the lines from the file's position on, which is the line `start`."""
    for passed, line in read_lines(file):
        number = start + passed - 1
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"{path}:{number}: {format_too_long_message('the line')}")
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise make_utf8_error(path, error, line=number) from error


def _classify_csv_error(error: csv.Error, where: str, path: Path) -> BadRecord:
    """Return a BadRecord; raise DataError for an unclosed quote, since it swallows all rows after it."""
    if "new-line character" in str(error):
        return BadRecord(
            where, f"a carriage return without a line feed is outside of quotes. {_describe_returns(path)}"
        )
    advice = "Allowed: cells in double quotes, quotes inside them doubled. Correct the row."
    if "field larger" in str(error) or "unexpected end" in str(error):
        raise DataError(f"{where}: a quoted cell that begins in this row is never closed. {advice}") from error
    return BadRecord(where, f"not CSV: {error}. {advice}")


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
                f"There are: {list_names(have)}. Correct data.columns."
            )
    return ""
