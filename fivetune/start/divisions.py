"""Records that hold several parts in one column, or one part in several rows: find what divides them, and divide them.

In: a RawTable whose columns fit no task as they are. Out: a Division: what it does in words, and its records, with a
column for each part. The files of `fivetune new` have these columns; the source stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product
from operator import attrgetter
from pathlib import Path

from fivetune.data.readers.records import RUN_LENGTH, are_lines, detect_format, is_hub_name
from fivetune.data.readers.source_files import (
    HEAD_BYTES,
    BadRecord,
    decode_head,
    get_data_suffix,
    open_bytes,
    quote_value,
)
from fivetune.errors import DataError
from fivetune.start.columns import (
    MIN_WORDS,
    WITHOUT_BLANKS,
    Column,
    Division,
    RawTable,
    as_text,
    count_words,
    find_value,
    is_empty_cell,
    read_list,
)
from fivetune.start.marks import MIN_SHARE, SPEAKERS, Marks, find_marks
from fivetune.start.roles import CLEAR, REFERENCES, has_word, rate_name
from fivetune.start.survey import FEW_WORDS, READ, SAMPLE
from fivetune.tasks import list_names
from fivetune.tasks._choices import parse_literal
from fivetune.types import RawRecord

LABEL_TASKS = frozenset(("classification", "tags"))
MIN_LINES = 5  # of text that show marks
MIN_LIST, MAX_LIST = 2, 4  # texts of a list that are columns
MAX_SPEAKERS = 10
MIN_DISTINCT = 0.7  # of the texts of turns
MIN_TURNS = 0.8  # share of neighbouring rows of one dialogue whose speakers differ
IN_WORDS = 0.8  # share of excerpts that begin and end with words
PLACE = re.compile(  # the name of a column of places
    r"(?P<stem>.*?)(?:^|_)(?P<side>start|begin|from|end|stop|to)(?:s|ing)?(?P<unit>_?(?:char|idx|index|pos|position|offset))?"
)
ENDS = {"start": ("end", "stop"), "begin": ("end",), "from": ("to",)}
PAIR = ("prompt", "response")
ANSWERED = re.compile(r"(?s:(.+?[?？؟])\s*?\n\s*(\S.*))")  # a question and what follows it on further lines


@dataclass(frozen=True)
class Parts:
    """Divides each record by itself.

    Args:
        column: the column that holds the parts, which replace it.
        names: columns of the parts.
    """

    column: str
    names: Sequence[str]

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        """Find the parts of a record, in the order of `names`; None if it has another form."""
        raise NotImplementedError

    def describe(self) -> str:
        raise NotImplementedError

    @property
    def replaced(self) -> Sequence[str]:
        """The columns that the parts replace."""
        return (self.column,)

    def is_meant(self, learned: Collection[str], tasks: Collection[str]) -> bool:
        """Whether the names of the parts leave no doubt that they may be meant, and other readings learn labels, or
        what may be a document.
        """
        is_read = any(rate_name(role, self.names[0]) == CLEAR for role in READ)
        is_learned = any(rate_name(role, self.names[-1]) == CLEAR for role in ("targets", "answer"))
        is_document = all(has_word(name, REFERENCES) for name in learned)
        return is_read and is_learned and ({*tasks} <= LABEL_TASKS or is_document)

    def iter_records(self, records: Iterable[RawRecord], on_bad: Callable[[BadRecord], None]) -> Iterator[RawRecord]:
        """Yield the records with a column for each part; one without the parts goes to `on_bad`."""
        for record in records:
            value = find_value(record.fields, self.column)
            parts = self.find_parts(record.fields)
            if is_empty_cell(value):
                parts = [None] * len(self.names)
            if not parts:
                shown = quote_value(value, limit=30)
                on_bad(BadRecord(record.where, f"{shown} has another form: {self.describe()}. Correct it."))
                continue
            fields = {name: one for name, one in record.fields.items() if name not in self.replaced}
            yield replace(record, fields={**fields, **dict(zip(self.names, parts, strict=True))})


@dataclass(frozen=True)
class TextParts(Parts):
    """Divides a text at its marks."""

    marks: Marks
    num_longer: int = 0  # texts, of the first SAMPLE, with more marks behind the last part

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        found = self.marks.split(as_text(find_value(fields, self.column)))
        if found is None:
            return None
        return [part for part, name in zip(found[0], self.marks.names, strict=True) if name]

    def describe(self) -> str:
        marks = " and ".join(dict.fromkeys(map(quote_value, self.marks.marks)))
        told = f"{self.column} is divided at {marks} into {list_names(self.names)}"
        if self.num_longer:
            told += f"; {self.num_longer} of the first {SAMPLE} texts have more marks, and the rest is not read"
        return told


@dataclass(frozen=True)
class QuestionParts(Parts):
    """Divides a text at the first line end behind a question mark."""

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        match = ANSWERED.fullmatch(as_text(find_value(fields, self.column)))
        return match.groups() if match else None

    def describe(self) -> str:
        return f"{self.column} is divided at the first line end behind a question mark into {list_names(self.names)}"


@dataclass(frozen=True)
class Written(Parts):
    """Reads objects, and lists of objects such as the turns of a chat, that are written as text."""

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        found = _read_written(find_value(fields, self.column))
        return [found] if found else None

    def describe(self) -> str:
        return f"{self.column} holds objects that are written as text, which are read"


@dataclass(frozen=True)
class ListParts(Parts):
    """Divides a list of texts, also one that is written as text."""

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        found = read_list(find_value(fields, self.column))
        return found if found and len(found) == len(self.names) else None

    def describe(self) -> str:
        return f"the texts of each list in {self.column} are the columns {list_names(self.names)}"


@dataclass(frozen=True)
class Excerpt(Parts):
    """Takes the text between two places of another text.

    Args:
        context: the column of the other text.
        start, end: columns of the places, in characters from 0.
        is_inclusive: whether the character at the end belongs to the part.
    """

    context: str
    start: str
    end: str
    is_inclusive: bool = False

    def find_parts(self, fields: Mapping[str, object]) -> Sequence[object] | None:
        text = _read_text(find_value(fields, self.context))
        start, end = _read_place(fields, self.start), _read_place(fields, self.end)
        if start is None or end is None:
            return None
        part = text[start : end + self.is_inclusive]
        return [part] if part.strip() else None

    @property
    def replaced(self) -> Sequence[str]:
        return (self.column, self.start, self.end)

    def is_meant(self, learned: Collection[str], tasks: Collection[str]) -> bool:
        return True

    def describe(self) -> str:
        return f"{self.names[0]} is the part of {self.context} from {self.start} to {self.end}"


@dataclass(frozen=True)
class Turns:
    """Joins each row of a dialogue to the row before, which it replies to.

    Args:
        text: the column of the turns.
        dialogue: the column with one value in all rows of a dialogue.
        speaker: the column of the speaker, if there is one.
        replying: the speakers of replies; all if empty.
    """

    text: str
    dialogue: str
    speaker: str = ""
    replying: frozenset[str] = frozenset()

    def is_meant(self, learned: Collection[str], tasks: Collection[str]) -> bool:
        """Whether other readings would learn who speaks, or which dialogue it is."""
        return {*learned} <= {self.dialogue, self.speaker} and {*tasks} <= LABEL_TASKS

    def iter_records(self, records: Iterable[RawRecord], on_bad: Callable[[BadRecord], None]) -> Iterator[RawRecord]:
        """Yield the replies, each with the text of the row before."""
        for before, record in pairwise(records):
            first, second = before.fields, record.fields
            if as_text(find_value(first, self.dialogue)) != as_text(find_value(second, self.dialogue)):
                continue
            if self.speaker:
                speaker = as_text(find_value(second, self.speaker))
                is_other = speaker != as_text(find_value(first, self.speaker))
                if not is_other or (self.replying and speaker not in self.replying):
                    continue
            fields = {name: value for name, value in second.items() if name not in (self.text, self.speaker)}
            yield replace(record, fields={**fields, PAIR[0]: first.get(self.text), PAIR[1]: second.get(self.text)})

    def describe(self) -> str:
        by = f" by {list_names(sorted(self.replying))}" if self.replying else ""
        return (
            f"the rows of one {self.dialogue} are the turns of a dialogue: each {self.text}{by} is the response to the "
            "row before, its prompt"
        )


def find_lines_header(source: str, task: str | None = None) -> Sequence[str]:
    """Find the name of the column of a file of lines, each a text that the same marks divide, or, with the task
    denoising, any text; none for other data.
    """
    if task == "denoising":
        return ("text",) if are_lines(source, "text") else ()
    path = Path(source).expanduser()
    if is_hub_name(source) or not path.is_file() or get_data_suffix(path):
        return ()
    with open_bytes(path) as file:
        head = file.read(HEAD_BYTES)
    try:
        is_lines = detect_format(head, path) == "lines"
    except DataError:  # told by the reader
        return ()
    lines = [line for line in decode_head(head).split("\n")[:-1] if line.strip()][:SAMPLE]
    return ("text",) if is_lines and len(lines) >= MIN_LINES and find_marks(lines) else ()


def find_division(table: RawTable) -> Division | None:
    """Find what divides the records of a table, or joins its rows; None if nothing does."""
    for find in (_find_written, _find_excerpt, _find_turns, _find_text_parts, _find_question_parts, _find_list_parts):
        if found := find(table):
            return found
    return None


def _iter_texts(table: RawTable) -> Iterator[tuple[Column, list[str]]]:
    """Yield each column of different texts, the longest texts first, with the texts of the first records."""
    texts = [column for column in table.columns.values() if column.kind == "text" and column.num_distinct > 1]
    for column in sorted(texts, key=attrgetter("mean_chars"), reverse=True):
        values = table.list_values(column.name, SAMPLE)
        yield column, [as_text(value) for value in values if not is_empty_cell(value)]


def _find_text_parts(table: RawTable) -> TextParts | None:
    for column, filled in _iter_texts(table):
        marks = find_marks(filled)
        if marks and len(filled) >= _count_needed(table):
            num_longer = sum(found[1] for found in map(marks.split, filled) if found)
            names = [_find_free_name(table, column.name, name) for name in marks.names if name]
            return TextParts(column.name, names, marks, num_longer)
    return None


def _find_question_parts(table: RawTable) -> QuestionParts | None:
    for column, filled in _iter_texts(table):
        num_answered = sum(ANSWERED.fullmatch(text) is not None for text in filled)
        if num_answered >= _count_needed(table):
            names = [_find_free_name(table, column.name, name) for name in ("question", "answer")]
            return QuestionParts(column.name, names)
    return None


def _count_needed(table: RawTable) -> float:
    """Count the texts, among the first SAMPLE records, that have to be divided alike."""
    return MIN_SHARE * min(SAMPLE, table.num_records)


def _find_free_name(table: RawTable, column: str, name: str) -> str:
    """Find a name for a part of a column that no other column has."""
    return f"{column}_{name}" if name in table.columns and name != column else name


def _find_written(table: RawTable) -> Written | None:
    for column, filled in _iter_texts(table):
        if filled and all(map(_read_written, filled)):
            return Written(column.name, [column.name])
    return None


def _read_written(value: object) -> object:
    """Read an object, or a list of objects, that is written as text; None for anything else."""
    if not isinstance(value, str) or not re.match(r"\s*[\[(]?\s*\{", value):
        return None
    found = parse_literal(value.strip())
    items = found if isinstance(found, list | tuple) else [found]
    return found if all(isinstance(item, dict) for item in items) else None


def _find_list_parts(table: RawTable) -> ListParts | None:
    for column in table.columns.values():
        if not column.has_lists:
            continue
        lists = [read_list(value) or () for value in table.list_values(column.name, SAMPLE) if value]
        texts = [part for part in chain.from_iterable(lists) if isinstance(part, str)]
        # of one length, and of running texts alone
        if not lists or len(texts) < sum(map(len, lists)) or sum(map(count_words, texts)) < MIN_WORDS * len(texts):
            continue
        size, times = Counter(map(len, lists)).most_common(1)[0]
        if MIN_LIST <= size <= MAX_LIST and times >= MIN_SHARE * len(lists):
            return ListParts(column.name, [f"{column.name}_{number}" for number in range(1, size + 1)])
    return None


def _find_excerpt(table: RawTable) -> Excerpt | None:
    """Find two columns, or members of an object, with the places where a part of a text begins and ends; none if
    another column, or that object, holds the part itself.
    """
    places: dict[str, tuple[str, str, str, str]] = {}
    for column in table.columns:
        objects = [value for value in table.list_values(column, SAMPLE) if isinstance(value, Mapping)]
        names = [f"{column}.{member}" for member in objects[0]] if objects else [column]
        places |= {name: split_place(name) for name in names}
    texts = [name for name, column in table.columns.items() if column.is_running]
    for start, (outer, stem, side, unit) in places.items():
        opposite = [(outer, stem, one, unit) for one in ENDS.get(side, ())]
        ends = [name for name, place in places.items() if place in opposite]
        for end, context, is_inclusive in product(ends, texts, (False, True)):
            name = outer or _find_free_name(table, start, stem or "span")
            found = Excerpt(outer or start, [name], context, start, end, is_inclusive)
            if _is_excerpt(found, table.records[:SAMPLE]):
                return found
    return None


def split_place(name: str) -> tuple[str, str, str, str]:
    """Split the name of a column of places into its object, what begins or ends, the side, and the unit; empty for
    other names.

    >>> split_place("answers.answer_start"), split_place("spanEndChar"), split_place("age")
    (('answers', 'answer', 'start', ''), ('', 'span', 'end', '_char'), ('', '', '', ''))
    """
    outer, _, inner = name.rpartition(".")
    match = PLACE.fullmatch(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", inner).casefold())
    return (outer, match["stem"], match["side"], match["unit"] or "") if match else ("", "", "", "")


def _is_excerpt(found: Excerpt, records: Sequence[RawRecord]) -> bool:
    """Whether nearly all records have places in the text, most at the ends of words, and not the part itself."""
    num_found = num_whole = num_told = 0
    for record in records:
        parts = found.find_parts(record.fields)
        start, end = _read_place(record.fields, found.start), _read_place(record.fields, found.end)
        text = _read_text(find_value(record.fields, found.context))
        if parts is None or start is None or end is None or end > len(text):
            continue
        num_found += 1
        # two letters around a place are the middle of a word
        edges = [f" {text} "[place : place + 2] for place in (start, end + found.is_inclusive)]
        num_whole += not any(edge.isalnum() and not WITHOUT_BLANKS.match(edge) for edge in edges)
        outer = find_value(record.fields, found.column)
        members = outer.values() if isinstance(outer, Mapping) else ()
        num_told += as_text(parts[0]) in map(as_text, (*record.fields.values(), *members))
    if num_found < MIN_SHARE * len(records) or num_whole < IN_WORDS * num_found:
        return False
    return num_told < IN_WORDS * num_found


def _read_text(value: object) -> str:
    """Return a text with the space around it, which places count."""
    return value if isinstance(value, str) else ""


def _read_place(fields: Mapping[str, object], name: str) -> int | None:
    """Read a place in a text, also as text or as the only item of a list."""
    value = find_value(fields, name)
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return _read_whole(as_text(value))


def _read_whole(text: str) -> int | None:
    return int(float(text)) if re.fullmatch(r"\d+(\.0)?", text) else None


def _find_turns(table: RawTable) -> Turns | None:
    """Find the rows of dialogues: a text, a value that neighbouring rows share, and a number that counts the rows or a
    speaker who changes.
    """
    columns = table.columns
    texts = [column for column in columns.values() if column.has_text and column.mean_words > FEW_WORDS]
    texts = [column for column in texts if column.share_distinct > MIN_DISTINCT]
    if not texts or not columns.keys().isdisjoint(PAIR):
        return None
    text = max(texts, key=attrgetter("mean_chars")).name
    cells = {name: [*map(as_text, table.list_values(name))] for name in columns if name != text}
    for dialogue, values in cells.items():
        # the rows that the next row continues: neither few nor all, and equal values are together
        same = {place for place, (one, two) in enumerate(pairwise(values)) if one == two}
        num_distinct = columns[dialogue].num_distinct
        if not 0.3 * len(values) < len(same) < len(values) - 2 or num_distinct < 3:
            continue
        num_gaps = len(values) / RUN_LENGTH if table.num_read > len(values) else 0  # between runs that were drawn
        if len(values) - len(same) > 1.1 * num_distinct + num_gaps:
            continue
        counters = {name for name in cells if columns[name].kind == "number" and _is_counter(cells[name], same)}
        # without a counter, many who alternate are no speakers; of several columns the one of fewest is meant
        most = len(values) if counters else MAX_SPEAKERS
        speakers: list[tuple[int, str]] = []
        for name in cells.keys() - counters - {dialogue}:
            column = columns[name]
            if column.num_distinct <= most and column.mean_words <= 2 and _is_alternating(cells[name], same):
                speakers.append((column.num_distinct, name))
        if speakers:
            speaker = min(speakers)[1]
            names = columns[speaker].values.keys()
            assistants = frozenset(filter(_is_assistant, names))
            return Turns(text, dialogue, speaker, assistants if assistants < names else frozenset())
        if counters:
            return Turns(text, dialogue)
    return None


def _is_counter(cells: Sequence[str], same: Collection[int]) -> bool:
    """Whether numbers are one higher in the next row of the same dialogue, and not in the first one of another."""
    places = [*map(_read_whole, cells)]
    higher = {place for place, (one, two) in enumerate(pairwise(places)) if one is not None and two == one + 1}
    num_within = len(higher.intersection(same))
    return num_within >= MIN_SHARE * len(same) and len(higher) - num_within < (len(cells) - len(same)) / 2


def _is_alternating(cells: Sequence[str], same: Collection[int]) -> bool:
    """Whether values differ in neighbouring rows of a dialogue, and most are the value of the second row before."""
    num_unlike = sum(cells[place] != cells[place + 1] for place in same)
    inner = [place for place in same if place + 1 in same]
    num_back = sum(cells[place] == cells[place + 2] for place in inner)
    return num_unlike >= MIN_TURNS * len(same) and 2 * num_back > len(inner)


def _is_assistant(value: str) -> bool:
    word = value.strip().casefold()
    return word == "system" or SPEAKERS.get(word) == "response"
