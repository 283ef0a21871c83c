"""Find out how a table quotes its cells: by double or single quotes, doubled or after a backslash inside, or not.

In: a binary stream at the first line of a table. Out: whether its quotes enclose cells, from one pass over all bytes.
Source: RFC 4180; backslashes as Spark and MySQL write them, single quotes as Weka does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

import numpy as np

from fivetune.data.readers.source_files import MAX_RECORD_BYTES

BLOCK_BYTES = 4 * 2**20
LINE_FEED, CARRIAGE_RETURN, BACKSLASH = 10, 13, 92


class Quoting(NamedTuple):
    """How the cells of a table are quoted.

    Args:
        mark: the quote, "" where quotes are part of the text.
        is_escaped: quotes inside a cell may follow a backslash.
        is_trusted: the quotes of the whole table are well-formed, or most rows have some: a cell of several lines is
            one, whatever these look like.
    """

    mark: str = '"'
    is_escaped: bool = False
    is_trusted: bool = False

    def normalize(self, lines: Iterable[str]) -> Iterator[str]:
        r"""Yield the lines with the escaped quotes inside cells doubled, and without blanks behind a quote at the end.

        >>> list(Quoting(is_escaped=True).normalize([r'1,"say \"no\" \n"' + "  \n"]))
        ['1,"say ""no"" \\n"\n']
        """
        escaped = re.compile(rf"(?<!\\)((?:\\\\)*)\\{self.mark}")
        doubled = rf"\1{self.mark}{self.mark}"
        for line in lines:
            text = line.rstrip(" \r\n")
            ended = text + line[len(text) :].lstrip(" ") if text.endswith(self.mark) else line
            yield escaped.sub(doubled, ended) if self.is_escaped else ended


def are_quotes_well_formed(file: IO[bytes], separator: str, quoting: Quoting) -> bool:
    """Return whether each quote from the file's position on opens a cell, closes one or is doubled, as RFC 4180 says.

    At least one cell must be opened and closed on the same line: a quote that begins a text and another that ends one,
    lines below, enclose nothing.
    """
    mark = ord(quoting.mark)
    divider = ord(separator)
    is_inside = has_cell = False
    while block := file.read(BLOCK_BYTES):
        block += file.readline(MAX_RECORD_BYTES)  # no quote is divided from the one that doubles it
        data = np.frombuffer(b"\n" + block + b"\n", np.uint8)
        quotes = np.flatnonzero(data == mark)
        if quoting.is_escaped:
            is_escaped = (data[quotes - 1] == BACKSLASH) & (data[quotes - 2] != BACKSLASH)
            quotes = quotes[~is_escaped]
        if not quotes.size:
            continue
        before = data[quotes - 1]
        after = data[quotes + 1]
        is_next = np.diff(quotes) == 1
        opens = (before == divider) | (before == LINE_FEED)
        opens[1:] |= is_next
        closes = (after == divider) | (after == LINE_FEED) | (after == CARRIAGE_RETURN)
        closes[:-1] |= is_next
        # Opening and closing quotes alternate; the first of a block closes a cell that began before it.
        first = int(is_inside)
        if not (opens[first::2].all() and closes[1 - first :: 2].all()):
            return False
        if not has_cell:
            starts = quotes[first::2]
            ends = quotes[first + 1 :: 2]
            line_feeds = np.flatnonzero(data == LINE_FEED)
            lines_of_starts = np.searchsorted(line_feeds, starts[: len(ends)])
            has_cell = bool((lines_of_starts == np.searchsorted(line_feeds, ends)).any())
        is_inside ^= bool(quotes.size % 2)
    return has_cell and not is_inside
