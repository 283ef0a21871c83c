"""Recognise files of lines that are no tables, by their first lines: fastText's, LibSVM's, one token a line, lines of
as many cells as a text has tokens, and JSON below other lines.

In: the beginning of a file. Out: the name of its form, or the error that says what it is and which way works; for
fastText, records.
"""

from __future__ import annotations

import csv
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import IO

from fivetune.data.readers.delimited import HEADER_WORDS, SEPARATORS, list_plain_names
from fivetune.data.readers.json_text import JsonTooLongError, JsonWindow
from fivetune.data.readers.source_files import (
    MAX_RECORD_BYTES,
    BadRecord,
    format_filter,
    format_output,
    format_too_long_message,
    make_utf8_error,
    open_bytes,
    quote_value,
    read_lines,
)
from fivetune.errors import DataError
from fivetune.types import RawRecord

LABEL = "__label__"
LAST_LABEL = re.compile(
    rf"(?<=[^\s,;|])\s+((?:{LABEL}\S+\s+)*{LABEL}\S+)\s*$"
)  # the cell of a table follows a separator
SAMPLE_LINES = 1_000
MIN_LINES = 5
MIN_SHARE = 0.9  # of the lines that have the form
MIN_SENTENCES = 3
MIN_WIDTHS = 3  # different numbers of cells of lines that end in the tokens of a text
MAX_SHARED = 0.2  # share of the values of a column, such as labels, that are tokens of the texts behind it, too
FEATURES = re.compile(r"[-+]?[\d.]+(,[-+]?[\d.]+)*(\s+\d+:[-+\d.eE]+)+\s*(#.*)?")
COMMENT = re.compile(r"-DOCSTART-|# ?[a-z_ ]+=")
MAX_LABELS = 3  # first words of a line that are labels
MIN_LABELLED = 20  # lines
MAX_FIRST_WORDS, MIN_REPEATS = 20, 5  # different first words, and their mean number of lines
MAX_ABOVE = 20  # lines above JSON: comments, a log
JSON = re.compile(r'[ \t]*(?:\{\s*["}]|\[\s*[\[{])')
TAG = re.compile(r"O|[BIESLUM][-_]\S+")


def is_fasttext(head: str) -> bool:
    """Return whether most lines begin with a label of fastText, or end in one that is no cell of a table.

    >>> is_fasttext("__label__pos a good film\\n__label__neg __label__old a bad one\\n")
    True
    >>> is_fasttext("a good film __label__pos\\n"), is_fasttext("a good film, __label__pos\\n")
    (True, False)
    """
    lines = [line for line in _split_head(head) if line.strip()]
    num = sum(line.startswith(LABEL) or bool(LAST_LABEL.search(line)) for line in lines)
    return bool(lines) and num >= MIN_SHARE * len(lines)


def read_fasttext_lines(file: IO[bytes], path: Path) -> Iterator[RawRecord | BadRecord]:
    """Yield {text, label} of each line that is not blank; {text, labels} if a line of the file has several labels."""
    # The columns are the same in all records: one line with several labels decides.
    has_several = False
    for _, line in read_lines(file):
        if line.count(LABEL.encode()) > 1 and len(_split_labels(line)[0]) > 1:
            has_several = True
            break
    file.seek(0)
    for number, line in read_lines(file):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            labels, text = _split_labels(line.removeprefix(b"\xef\xbb\xbf"))
        except UnicodeDecodeError as error:
            raise make_utf8_error(path, error, line=number) from error
        if len(line) > MAX_RECORD_BYTES:
            yield BadRecord(where, format_too_long_message("the line"))
        elif not labels:
            shown = quote_value(text, limit=30)
            yield BadRecord(
                where, f"begins with {shown}. Allowed is {LABEL}NAME before or after the text. Correct the line."
            )
        elif has_several:
            yield RawRecord({"text": text, "labels": labels}, where)
        else:
            yield RawRecord({"text": text, "label": labels[0]}, where)


def _split_labels(line: bytes) -> tuple[list[str], str]:
    """Split a line of fastText into labels and text. Raises UnicodeDecodeError."""
    rest = line.decode().strip()
    labels: list[str] = []
    while rest.startswith(LABEL):
        label, *others = rest.split(None, 1)
        labels.append(label.removeprefix(LABEL))
        rest = others[0] if others else ""
    if not labels and (found := LAST_LABEL.search(rest)):
        labels, rest = [label.removeprefix(LABEL) for label in found[1].split()], rest[: found.start()]
    return labels, rest


def refuse_features_and_tokens(head: str, path: Path) -> None:
    """Raise DataError for a file of feature numbers, or of one token a line, with the way that works."""
    lines = _split_head(head)
    filled = [line for line in lines if line.strip()]
    if len(filled) < MIN_LINES:
        return
    if all(FEATURES.fullmatch(line.strip()) for line in filled):
        raise DataError(
            f"{path}: numbers of features (LibSVM), no text: {quote_value(filled[0], limit=30)}. FiveTune learns from "
            "texts. Name the file that the features were computed from."
        )
    for separator in ("\t", None, ","):
        rows = _split_rows(lines, separator)
        if found := _find_tokens(rows):
            skips = r"/^(-DOCSTART-|# ?[a-z_ ]+=)/ {next} " if any(map(COMMENT.match, lines)) else ""
            raise DataError(f"{path}: {_describe_tokens(rows, found, separator, path, skips)}")
    if '"' in head:  # a text in quotes may hold the separator
        return
    for separator in SEPARATORS:
        rows = [line.split(separator) for line in filled]
        names = rows.pop(0) if any(map(HEADER_WORDS.fullmatch, rows[0])) else []
        if num := _count_leading(rows):
            raise DataError(f"{path}: {_describe_ragged(rows, num, separator, path, names)}")


def _count_leading(rows: Sequence[Sequence[str]]) -> int:
    """Count the cells of an id and labels that stand before the tokens of a text, one in each further cell; 0 for rows
    of another form.
    """
    widths = Counter(map(len, rows))
    if len(rows) < MIN_LINES or len(widths) < MIN_WIDTHS or min(widths) < 2 or 2 * max(widths.values()) > len(rows):
        return 0
    least = min(widths) - 1
    columns = [*islice(zip(*rows, strict=False), least)]
    # An id differs in each row and holds a digit; behind it a label is needed.
    num = 0
    if least > 1 and _are_ids(columns[0], more_than=len(rows) - 1):
        num = 2
    # Labels repeat, and are no words of the texts behind them.
    while num < least:
        values = {*columns[num]}
        behind = {*chain.from_iterable(row[num + 1 :] for row in rows)}
        is_label = 1 < len(values) <= len(rows) / 3
        if not is_label or len(values & behind) > MAX_SHARED * len(values):
            break
        num += 1
    tokens = [*chain.from_iterable(row[num:] for row in rows)]
    num_single = sum(len(cell.split()) == 1 for cell in tokens)
    return num if num_single >= MIN_SHARE * len(tokens) and _count_words(tokens) > len(tokens) / 2 else 0


def _are_ids(cells: Sequence[str], *, more_than: float) -> bool:
    """Return whether each cell holds a digit, and more than so many of the values are different."""
    return len({*cells}) > more_than and all(re.search(r"\d", cell) for cell in cells)


def _count_words(cells: Sequence[str]) -> int:
    """Count the cells with a letter."""
    return sum(any(map(str.isalpha, cell)) for cell in cells)


def _describe_ragged(rows: Sequence[Sequence[str]], num: int, separator: str, path: Path, given: Sequence[str]) -> str:
    widths = [len(row) - num for row in rows]
    cells = "1 cell" if num == 1 else f"{num} cells"
    label = "labels" if any("," in row[num - 1] for row in rows) else "label"
    names = given[:num] or ["id", *list_plain_names(num - 1)[1:], label][-num:]
    code = "NR > 1 " if given else ""
    code += rf'{{sub(/\r$/, ""); t = ${num + 1}; for (i = {num + 2}; i <= NF; i++) t = t " " $i; print '
    code += " ".join(rf'${place} "\t"' for place in range(1, num + 1)) + " t}"
    form = shlex.quote(separator.replace("\t", "\\t"))
    into = format_output(path, "-joined.tsv")
    header = shlex.quote(",".join([*names, "text"]))
    shown = quote_value(" and ".join(rows[0][:num]), limit=30)
    command = format_filter(f"awk -F {form} {shlex.quote(code)}", path)
    return (
        f"each line begins with {cells} ({shown}), then {min(widths):,} to {max(widths):,} in the first {len(rows):,} "
        "lines, of a word each. Allowed is one cell per column. Join the words of each line: "
        f"{command} > {into}, and name that file, with --header {header}."
    )


def describe_first_words(head: str, path: Path) -> str:
    """Describe lines whose first words repeat as labels do, with the command that makes cells of them; "" for others.

    >>> print(describe_first_words("pos a good film\\nneg a bad one\\n" * 10, Path("a.txt")))  # doctest: +ELLIPSIS
    Its lines begin with one of 2 words, such as 'pos': sed -E 's/...' a.txt > a.tsv, with --header label,text.
    """
    rows = [line.split(maxsplit=MAX_LABELS + 2) for line in _split_head(head) if line.strip()]
    if len(rows) < MIN_LABELLED or min(map(len, rows)) < 2:
        return ""
    names: list[str] = []  # of the words before the text: labels, and behind them perhaps an id
    columns = list(zip(*rows, strict=False))
    for name, values in zip(("label", "label_2", "label_3"), columns, strict=False):
        if not 1 < len({*values}) <= min(MAX_FIRST_WORDS, len(rows) / MIN_REPEATS):
            break
        names.append(name)
    if not names:
        return ""
    if len(columns) > len(names) and _are_ids(columns[len(names)], more_than=MIN_SHARE * len(rows)):
        names.append("id")
    pattern = "([^[:blank:]]+)[[:blank:]]+" * len(names)
    cells = "".join(rf"\{number}\t" for number in range(1, len(names) + 1))
    command = f"sed -E 's/^{pattern}/{cells}/' {shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.tsv')))}"
    return (
        f"Its lines begin with one of {len({*columns[0]})} words, such as {quote_value(columns[0][0])}: {command}, "
        f"with --header {','.join([*names, 'text'])}."
    )


def refuse_lines_above(head: str, path: Path) -> None:
    """Raise DataError for JSON below other lines, such as a comment or a log, with the command that skips these."""
    lines = head.split("\n")
    for number in range(1, min(MAX_ABOVE, len(lines))):
        if JSON.match("\n".join(lines[number:])) and (rest := _describe_json(path, number)):
            above = "line 1 is" if number == 1 else f"lines 1 to {number} are"
            command = format_filter(f"tail -n +{number + 1}", path)
            into = format_output(path, "-rest.json")
            raise DataError(
                f"{path}: {above} no JSON: {quote_value(lines[0].strip())}; the rest is {rest}. Allowed is JSON alone. "
                f"Leave out what is above: {command} > {into}, and name that file."
            )


def _describe_json(path: Path, number: int) -> str:
    """Describe the JSON that a file holds below some lines, its objects or its list; "" if that is no JSON."""
    with open_bytes(path) as file:
        for _ in range(number):
            file.readline()
        window = JsonWindow(file, path)
        is_list = window.peek() == "["
        num = 0
        try:
            items = window.iter_indices() if is_list else iter(window.peek, "")
            for _ in items:
                window.read_value()
                num += 1
            if window.peek():  # something is below the list
                return ""
        except JsonTooLongError:  # a document that is read piece by piece
            return "JSON"
        except DataError:
            return ""
    if is_list:
        return f"a list of {num:,} items"
    return "1 object" if num == 1 else f"{num:,} objects"


def _split_head(head: str) -> list[str]:
    lines = head.removeprefix("\ufeff").split("\n")
    return [line.removesuffix("\r") for line in lines[: min(SAMPLE_LINES, max(1, len(lines) - 1))]]


def _split_rows(lines: Sequence[str], separator: str | None) -> list[list[str]]:
    """Split lines into cells, none for a blank line; comments of CoNLL-U are skipped."""
    rows: list[list[str]] = []
    for line in lines:
        if COMMENT.match(line):
            continue
        if separator != ",":
            rows.append(line.strip("\t ").split(separator) if line.strip() else [])
        elif line.strip():
            rows += csv.reader([line.replace("\r", " ")])  # a carriage return within a line is an error to csv
    return rows


def _find_tokens(rows: Sequence[Sequence[str]]) -> tuple[int, int] | None:
    """Return the columns of token and tag, from 1, of rows that hold one token each; None for a table.

    Either the tags say where a unit begins and ends (B-LOC, I-LOC, O), or blank lines divide sentences of tokens.
    """
    filled = [row for row in rows if row]
    if len(filled) < MIN_LINES or len(filled[0]) < 2:
        return None
    alike = [row for row in filled if len(row) == len(filled[0])]
    if len(alike) < MIN_SHARE * len(filled):
        return None
    # What each column may hold: tags of units, below a header perhaps; tokens; values that repeat.
    tagged: list[int] = []
    words: list[int] = []
    repeated: list[int] = []
    are_single = True
    for number, cells in enumerate(zip(*alike, strict=True), 1):
        values = {*cells}
        num_tags = sum(TAG.fullmatch(cell) is not None for cell in cells)
        is_single = not any(" " in cell for cell in values)
        are_single = are_single and is_single
        if num_tags >= MIN_SHARE * len(cells) and "O" in values and any(map(TAG.fullmatch, values - {"O"})):
            tagged.append(number)
        elif is_single and _count_words(cells) > len(cells) / 2:
            words.append(number)
        if number > 1 and len(values) <= len(filled) / 3:
            repeated.append(number)
    if not words:
        return None
    if tagged:
        return words[0], tagged[-1]
    # Without tags of units, blank lines divide several sentences.
    num_sentences = sum(1 for is_filled, _ in groupby(rows, key=bool) if is_filled)
    is_divided = num_sentences >= MIN_SENTENCES and len(filled) >= 2 * num_sentences
    return (words[0], repeated[-1]) if is_divided and are_single and repeated else None


def _describe_tokens(
    rows: Sequence[Sequence[str]], found: tuple[int, int], separator: str | None, path: Path, skips: str
) -> str:
    token, tag = found
    cells = [row for row in rows if len(row) >= max(found)]
    row = next((row for row in cells[1:] if row[tag - 1] != "O"), cells[-1])
    has_header = all(row[tag - 1] != cells[0][tag - 1] for row in cells[1:])
    shown = f"{quote_value(row[token - 1], limit=30)} is {quote_value(row[tag - 1], limit=30)}"
    what = f"one token a line, with its tag ({shown}): sequence labelling (CoNLL)"
    way = "Allowed is one sentence a line, as text and tags"
    if separator == "," or all(rows):
        return f"{what}. {way}. Join the tokens and the tags of each sentence with spaces: columns text and tags."
    code = "NR == 1 {next} " if has_header else skips
    code += (
        r'{sub(/\r$/, "")} NF {w = w " " $' + str(token) + '; t = t " " $' + str(tag) + "} "
        r'!NF && w {print substr(w, 2) "\t" substr(t, 2); w = t = ""} '
        r'END {if (w) print substr(w, 2) "\t" substr(t, 2)}'
    )
    into = format_output(path, "-lines.tsv")
    form = " -F '\\t'" if separator else ""
    return (
        f"{what}. {way}. Join the lines of each sentence: awk{form} {shlex.quote(code)} {shlex.quote(str(path))} > "
        f"{into}, and name its columns: --header text,tags --column inputs=text --column targets=tags"
    )
