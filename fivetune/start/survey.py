"""What names and values say about the columns of a table, and the points of a reading of them.

In: a RawTable, and the columns that the user named. Out: the columns that may have a role; a Reading with its evidence.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

from fivetune.data.readers.delimited import NUMBER
from fivetune.start.columns import (
    MIN_WORDS,
    Column,
    RawTable,
    as_text,
    count_matches,
    count_words,
    find_value,
    find_wholes,
    is_empty_cell,
    read_list,
)
from fivetune.start.roles import (
    CLEAR,
    COMMENTS,
    COPIES,
    GOLD,
    INNER,
    NOTES,
    PAIRED,
    SUBJECTS,
    SYSTEMS,
    THINGS,
    USUAL,
    Given,
    find_language,
    has_word,
    rate_name,
    split_language,
    split_name,
)
from fivetune.tasks import list_names
from fivetune.tasks.tags import FLAGS
from fivetune.types import JsonTable

# Points of evidence, with the 1 to CLEAR of a name (roles.py). Names that leave no doubt on both sides, and values
# that fit them, are 4 + 4 + 2 = 10. A reading is taken with ENOUGH points and a lead of MARGIN: values alone are none.
FORM = 6  # columns that no other layout has: instruction and output, choices, messages, two languages
CODE = 3  # the target is code, a query or a formula: these are written for nothing else
VALUES = 2  # the values are what the task learns: they repeat as labels do, or are lists of answers
IN_TEXT = 4  # the answers are parts of their contexts: no other column would be
CERTAIN = 100  # a layout that cannot mean anything else
ONLY = 3  # no other column could be the target
SHORTER = 1  # the target is much shorter than the inputs, as a summary is
UNKNOWN = -2  # a free text without a known name is not read; for an input without a known name half of it
LONG_WORDS = 5  # mean words from which on a text is more than a name or a heading
LONG_ID = 9  # digits from which on numbers that differ are ids
MAX_NUMBERED = 20  # distinct whole numbers up to which they may be labels without a name that says so
MAX_TEXTS = 30  # columns of text up to which all of them may be read
SAMPLE = 300  # records whose texts are compared
NUM_ANSWERED = 2_000  # records whose answers are looked for in contexts and choices
MOSTLY_TICKED = 0.8  # share of records that tick a box up to which the others have meant no
MOSTLY_BLANK = 0.5  # share of records with a value up to which a blank cell is the usual one
BLANK = ("", "None")  # an empty cell as text
ENOUGH = 5
MARGIN = 2

ID = re.compile(r"[^\W\d_][\w-]*|[\w-]{8,}")
SMALL_WORD = re.compile(r"\d|\b[a-zß-ÿα-ωа-я]{4,}")  # or a digit: names of persons have neither
COUNT = re.compile(r"(?i)(?:.*[._ ])?(?:n|nb|num|number|count|total)[_ ]")
STATISTICS = "count counts total length len density ratio percent percentage words chars characters sentences std stdev"
FEW_WORDS = 1.1  # mean words up to which a text is one word
SEQUENCE = 0.1  # share of lists with a value twice from which on they are no sets of labels
VERSION = 0.25  # share in common with the shorter text, of a column whose name has a word more
QUESTION = re.compile(r"[?？؟;\u037e][\"'”’»)\s]*$|^(?i:how|what|why|when|where|who|which|can|does|is)\b")
WORD = re.compile(r"\w{3,}|[^\W\x00-\x7f]{2,}")  # of scripts without blanks, two characters may be one
REPEATED = 0.8  # most different values per filled cell of a column of labels
TOLD = 0.7  # share of values that stand in their texts, from which on they are taken from these
FEW_PARTS = 6  # words of such a value, or of a list of them
COPY, NEAR = 0.6, 0.9  # share in common with the shorter text, of a column named as a copy; else with both texts

BLANKS_MEANT = ("tags", "squad_v2")  # tasks of which a record may have nothing to learn
SEVERAL = 0.1  # share of lists with several texts from which on it matters whether these are one target
ALIKE = 0.3  # share in common of two texts of a list that say the same
ALTERNATIVES = (
    "answers references refs ref reference aliases alias paraphrases alternatives variants synonyms golds gold "
    "correct_answers rewrites translations"
)
"""Words for lists of several right texts."""

PARTS = (
    "steps sentences lines keywords keyphrases ingredients bullets highlights paragraphs sections actions points "
    "tokens words plan procedure directions facts subquestions"
)
"""Words for lists of the parts of one text."""

OUTPUTS = "output outputs completion response answer answers reply a chosen gold reference"
AS_TEXT = "numbers are learned as text here, and only equal ones are right: the task regression scores correlation"
OBJECTS = "expected extraction extracted annotation annotations json result parsed structured fields"
"""Words for objects that are learned, with the words of TARGET_ROLES."""

MEASURES = "start end begin stop offset"  # numbers that stand with the text of an answer
ANNOTATIONS = "entities slots"  # what is marked in texts that have a label, too
GENERAL_LABELS = "label labels class y gold"  # what is learned, whatever else is known of the texts
READ = ("text", "inputs", "question", "context", "choices", "instruction")
LEARNED = ("targets", "answer", "label", "tags", "number")
ASIDE = ("id", "date", "link", "person", "place", "fact")
SPEAKERS = "user customer client speaker"  # a column of what they say may have their name
REPLIERS = "assistant bot chatbot agent ai gpt doctor operator support"  # who answers them

TARGET_ROLES: Mapping[str, tuple[str, ...]] = {
    "label": ("label",),
    "tags": ("tags",),
    "answer": ("answer", "label"),
    "targets": ("targets", "answer", "number"),
}
"""Role of what is learned -> the words of roles.py that say so."""


class Evidence(NamedTuple):
    """Points for a reading, and what they are for."""

    points: int
    words: str


@dataclass(frozen=True, slots=True)
class Reading:
    """A task that may be meant by a table.

    Args:
        kind: the task in words.
        roles: role -> columns, as --column names them.
        reason: what was seen of the columns.
        options: of the task, as a recipe has them.
        columns: data.columns.
        warnings: what the user should look at.
        evidence: points for and against it.
        doubts: why it is not taken without a word of the user.
        prefix: what the inputs begin with.
        others, unread: of the reading that is taken: the next ones, the best first, and the columns that it leaves out.
    """

    kind: str
    task: str
    roles: Mapping[str, Sequence[str]]
    reason: str
    options: JsonTable = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    evidence: Sequence[Evidence] = ()
    doubts: Sequence[str] = ()
    prefix: str = ""
    id_column: str | None = None
    group_column: str | None = None
    others: Sequence[Reading] = ()
    unread: Sequence[str] = ()

    @property
    def points(self) -> int:
        return sum(one.points for one in self.evidence)

    @property
    def targets(self) -> list[str]:
        """The columns that are learned; none if the task has its own."""
        return [name for role, names in self.roles.items() if role in TARGET_ROLES for name in names]

    @property
    def inputs(self) -> list[str]:
        """The columns that are read."""
        return [name for names in self.roles.values() for name in names if name not in self.targets]


@dataclass(frozen=True)
class Survey:
    """The columns of a table that hold values, with those that the user named.

    Args:
        wholes: text that is made of others, which is not among the columns -> those others.
        objects: all of an object that is learned, as a column is named -> its members, which are never read.
        overlaps: two columns -> what `measure_overlap` found: each label asks again for the same texts.
    """

    table: RawTable
    given: Given
    columns: Mapping[str, Column]
    wholes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    objects: Mapping[str, Sequence[str]] = field(default_factory=dict)
    overlaps: dict[frozenset[str], tuple[float, float]] = field(default_factory=dict)

    def rate(self, name: str, *roles: str) -> int:
        """Rate how clearly a column's name says one of these roles; a column that the user gave it has CLEAR + 1."""
        if any(name in self.given.get(role, ()) for role in roles):
            return CLEAR + 1
        return max(rate_name(role, name) for role in roles)

    def is_given(self, name: str) -> bool:
        """Whether the user gave a column a role."""
        return any(name in names for names in self.given.values())

    def is_aside(self, name: str) -> bool:
        """Whether a column says something about the record that is neither read nor learned: id, date, author ..."""
        if self.is_given(name):
            return name in self.given.get("id", ())
        column = self.columns[name]
        is_number = column.kind == "number"
        learned = self.rate(name, *LEARNED)
        # by the kind of the values: dates, links, ids, numbers that count or measure a text, or number the texts
        if column.kind in ("date", "link") or (is_number and is_statistic(name)):
            return True
        if is_number and learned < USUAL <= self.rate(name, "context") and column.num_distinct > 2:
            return True
        is_long = is_number and column.mean_chars >= LONG_ID
        if column.has_codes and (learned < USUAL or is_long) and not self._is_quantity(name):
            return True
        # one value in all records teaches nothing, unless a box is ticked or its name asks for the column
        asked = max(learned, self.rate(name, "instruction", "choices"))
        if column.num_distinct < 2 and asked < USUAL and not self.is_ticked(name):
            return True
        if self._is_note(name):
            return True
        # by the name; but 0 and 1 are no ids, and what a person says may be named after the person
        roles = {*ASIDE}
        if is_number and {*column.values} == {"0", "1"}:
            roles.discard("id")
        is_said = has_word(name, SPEAKERS) and (column.is_running or (column.has_text and self._has_replies()))
        if is_said or self._is_name_of_thing(name):
            roles.discard("person")
        aside = max(rate_name(role, name) for role in roles)
        return aside >= USUAL and aside > max(learned, self.rate(name, *READ))

    def _has_replies(self) -> bool:
        """Whether a column holds what an assistant says."""
        return any(one.is_running and has_word(name, REPLIERS) for name, one in self.columns.items())

    def _is_note(self, name: str) -> bool:
        """Whether a column holds what annotators write on a text: one with a clear name is there, or a longer one."""
        column = self.columns[name]
        if column.has_labels or column.kind != "text" or not has_word(name, NOTES):
            return False
        for one, points in self._rate_texts(NOTES).items():
            is_longer = self.columns[one].mean_chars > column.mean_chars
            if points == CLEAR or (points == USUAL and is_longer):
                return True
        return False

    def _is_name_of_thing(self, name: str) -> bool:
        """Whether the names in a column are the texts of a table that has no other texts, such as names of products: by
        the column's name, or as most values have digits or small words, which names of persons have not.
        """
        column = self.columns[name]
        *before, last = split_name(name) or [""]
        is_name = last in ("name", "names") and column.has_text and column.mean_words > FEW_WORDS
        if not is_name or max(self._rate_texts("name names").values(), default=0) >= USUAL:
            return False
        if has_word(name, THINGS):
            return True
        texts = self.list_examples(name, SAMPLE)
        num_unlike = count_matches(SMALL_WORD, texts)
        return column.is_running and num_unlike > len(texts) / 2 and not before

    def _rate_texts(self, others: str) -> dict[str, int]:
        """Rate how clearly columns of running text are named as text; columns with the other words are left out."""
        rated: dict[str, int] = {}
        for name, column in self.columns.items():
            if column.has_text and column.is_running and not has_word(name, others):
                rated[name] = self.rate(name, "text", "question", "inputs")
        return rated

    def is_ticked(self, name: str) -> bool:
        """Whether a column says yes, ticks a box, or repeats its name for some records, and is blank for the others."""
        return _is_ticked(self.columns[name], self.table.num_records)

    def _is_quantity(self, name: str) -> bool:
        """Whether different whole numbers are no ids: by their name, their few digits, and as they do not ascend."""
        column = self.columns[name]
        if column.kind != "number" or column.mean_chars >= LONG_ID or rate_name("id", name) >= USUAL - 1:
            return False
        texts = self.list_examples(name, SAMPLE)
        values = [float(text.replace(",", ".")) for text in texts if NUMBER.fullmatch(text)]
        return values not in (sorted(values), sorted(values, reverse=True))

    @cached_property
    def free(self) -> Sequence[str]:
        """The columns that are not aside; kept, as a survey of people has a thousand, and each reading asks again."""
        return [name for name in self.columns if not self.is_aside(name)]

    def is_id(self, name: str) -> bool:
        """Whether a column tells the records apart: codes in all of them, with the name of an id, or as T-0017."""
        column = self.columns.get(name)
        num = self.table.num_records
        if column is None or not column.has_codes or column.kind == "date" or column.num_filled < num:
            return False
        others = max(rate_name(role, name) for role in ("date", "number", "targets", "answer"))
        if rate_name("id", name) > others:
            return True
        is_code = column.kind == "text" and ID.fullmatch(column.example) is not None
        return is_code and others == 0 and column.num_distinct == num

    def is_mostly_blank(self, name: str) -> bool:
        """Whether most records with a text have nothing in a column."""
        texts = [one.num_filled for one in self.columns.values() if one.name != name and one.has_text]
        return self.table.describe(name).num_filled < MOSTLY_BLANK * max(texts, default=0)

    def is_subject(self, name: str) -> bool:
        """Whether a column says what a text is about: texts that repeat, with such a name."""
        column = self.table.describe(name)
        is_shared = column.kind == "text" and column.share_distinct < 0.7
        return is_shared and has_word(name, SUBJECTS)

    def is_of_system(self, name: str) -> bool:
        """Whether a column holds the answers of a system, next to the right answers: by its name, or as a text without
        a known name next to a gold text and its source.
        """
        if self.is_given(name) or not {*self.golds} - {name}:
            return False
        if has_word(name, SYSTEMS):
            return True
        is_text = name in self.columns and self.columns[name].has_text
        return is_text and self.rate(name, *READ, *LEARNED) == 0 and self._has_source

    @cached_property
    def golds(self) -> Sequence[str]:
        """The columns named as what is right, or as a label, of no system."""
        labels: list[str] = []
        named: list[str] = []
        for name in self.free:
            if has_word(name, SYSTEMS):
                continue
            if self.columns[name].has_labels and self.rate(name, "label") >= USUAL:
                labels.append(name)
            if has_word(name, GOLD):
                named.append(name)
        return labels + named

    @cached_property
    def _has_source(self) -> bool:
        """Whether the table has a gold text and its source."""
        has_text = any(self.columns[name].has_text for name in self.golds)
        return has_text and any(self.rate(name, "inputs") == CLEAR for name in self.free)

    def is_sequence(self, name: str) -> bool:
        """Whether the lists of a column have a value for each word of a text: values repeat, unlike in a set, or are
        numbers without the name of labels, or with the same number at one end, such as 0 or the token of the end.
        """
        lists = self.read_lists(name)
        several = [value for value in lists if len(value) > 1]
        if several and all(isinstance(part, int) for part in chain.from_iterable(several)):
            firsts, lasts = {value[0] for value in several}, {value[-1] for value in several}
            if self.rate(name, "tags") == 0 or len(firsts) == 1 or len(lasts) == 1:
                return True
        if any(count_words(as_text(part)) > 3 for part in chain.from_iterable(lists[:100])):
            return False
        num_repeating = sum(len({*map(as_text, value)}) < len(value) > 2 for value in lists)
        return num_repeating > SEQUENCE * len(lists)

    def has_several(self, name: str) -> bool:
        """Whether a column has lists of texts, and several texts in some of them."""
        lists = self.read_lists(name) if self.columns[name].is_list_of_texts else []
        return sum(len(value) > 1 for value in lists) > SEVERAL * len(lists)

    def has_phrases(self, name: str) -> bool:
        """Whether the texts of lists have several words, unlike lists of the words of a text."""
        texts = chain.from_iterable(self.read_lists(name)[:SAMPLE])
        words = [count_words(as_text(text)) for text in texts]
        return statistics.fmean(words or [0]) > FEW_WORDS

    def has_alternatives(self, name: str) -> bool:
        """Whether the texts of each list are several right ones: by the name of the column, as short answers, or as
        the texts are alike, which the parts of one text are not.
        """
        if has_word(name, PARTS):
            return False
        if has_word(name, ALTERNATIVES):
            return True
        lists = [value for value in self.read_lists(name) if len(value) > 1][:SAMPLE]
        words = [count_words(as_text(text)) for text in chain.from_iterable(lists)]
        if self.rate(name, "answer") >= USUAL and statistics.fmean(words) <= MIN_WORDS:
            return True
        shares = [_measure_share(_list_triples(one), _list_triples(two)) for one, two, *_ in lists]
        return statistics.fmean(shares) >= ALIKE

    def list_forms(self, name: str) -> list[str]:
        """List the forms in which a column can be a target: a text; the first text of a list, if the others are right,
        too; all of a list or an object (`steps.*`).
        """
        column = self.columns[name]
        whole = f"{name}.*"
        if self.has_several(name) and not self.has_alternatives(name):
            return [whole] if has_word(name, PARTS) else [whole, name]
        if column.is_list_of_texts or (column.kind == "text" and not column.has_labels):
            return [name]
        return [whole] if column.kind in ("list", "object") else []

    @cached_property
    def attributes(self) -> Sequence[str]:
        """The columns whose short values stand in the texts of their records, if there are several: what somebody
        marked in these, each kind in a column of its own.
        """
        texts = self.list_texts("")
        found = [name for name in self.list_unread(texts) if self._is_attribute(name, texts)]
        return found if len(found) > 1 else []

    def _is_attribute(self, name: str, texts: Sequence[str]) -> bool:
        column = self.columns[name]
        if column.kind not in ("text", "list") or self.rate(name, *READ, "targets", "answer") >= USUAL:
            return False
        if not 1 < column.num_distinct < REPEATED * column.num_filled:
            return False
        told: list[bool] = []
        for record in self.table.records[:SAMPLE]:
            value = find_value(record.fields, name)
            if is_empty_cell(value):
                continue
            words = WORD.findall(str(value).casefold())
            if words:
                text = " ".join(as_text(find_value(record.fields, one)) for one in texts).casefold()
                told.append(len(words) <= FEW_PARTS and any(word in text for word in words))
        return sum(told) > TOLD * len(told)

    def read_lists(self, name: str) -> list[Sequence[object]]:
        """Read the lists of a column, those that are written as text included."""
        lists = map(read_list, self.table.list_values(name))
        return [found for found in lists if found is not None]

    def measure_overlap(self, name: str, other: str) -> tuple[float, float]:
        """Measure how alike the texts of two columns are, 0 to 1: the mean share of triples of letters that both texts
        have, among the triples of the shorter text, and among all.
        """
        names = frozenset((name, other))
        if names not in self.overlaps:
            of_shorter: list[float] = []
            of_all: list[float] = []
            values = self.table.list_values(name, SAMPLE), self.table.list_values(other, SAMPLE)
            for first, second in zip(*values, strict=True):
                if first and second:
                    one, two = _list_triples(first), _list_triples(second)
                    of_shorter.append(_measure_share(one, two))
                    of_all.append(len(one & two) / max(1, len(one | two)))
            self.overlaps[names] = statistics.fmean(of_shorter or [0]), statistics.fmean(of_all or [0])
        return self.overlaps[names]

    def is_copy(self, name: str, other: str) -> bool:
        """Whether a text is another form of a second one, such as its cleaned words; not one of a pair like premise and
        hypothesis."""
        if {*split_name(name)} == {*split_name(other)} or has_word(name, PAIRED) or has_word(other, PAIRED):
            return False
        of_shorter, of_all = self.measure_overlap(name, other)
        is_one_named = has_word(name, COPIES) != has_word(other, COPIES)
        return of_all >= NEAR or (is_one_named and of_shorter >= COPY)

    def is_form(self, name: str, other: str) -> bool:
        """Whether a text is a copy of a second one, or shares letters with it and has a name with one word more:
        attacked_hypothesis next to hypothesis.
        """
        if self.is_copy(name, other):
            return True
        less, more = sorted(({*split_name(name)}, {*split_name(other)}), key=len)
        return less < more and len(more) == len(less) + 1 and self.measure_overlap(name, other)[0] >= VERSION

    def list_columns(self, *roles: str, minimum: int) -> list[str]:
        """List the columns with a role, the clearest name first; those that the user gave the first role, if any."""
        if roles[0] in self.given:
            return [*self.given[roles[0]]]
        rated: list[tuple[int, int, str]] = []
        for name in self.free:
            points = self.rate(name, *roles)
            if points >= minimum and not self.is_given(name):
                rated.append((-points, len(name), name))  # the plainer first: ctx before ctx_a
        return [name for _, _, name in sorted(rated)]

    def list_texts(self, target: str, *, only_known: bool = False) -> list[str]:
        """List the texts that a label is given for, in the order of the file; not what is learned by its name.

        Args:
            only_known: leave out those whose names say nothing.
        """
        if "text" in self.given:
            return [*self.given["text"]]
        texts = [name for name in self.list_unread([target]) if self.columns[name].kind == "text"]
        found: set[str] = set()
        for name in texts:
            # code is no text of others; posts may hold marks that look like code
            is_code = len(texts) > 1 and self.columns[name].has_code and self.rate(name, "text") < USUAL
            if (self._is_read(name) and not is_code) or (not only_known and self._can_be_read(name)):
                found.add(name)
        if not found and self.rate(target, "label") >= USUAL:  # code or answers that are classified
            rest = [name for name in texts if not self.columns[name].has_labels]
            return rest or [name for name in texts if self._can_repeat(name, target)][:1]
        # of a text and its copies the text is read, if it is there
        named = {name for name in found if has_word(name, COPIES)}
        copied = {name: {one for one in found - {name} if self.is_copy(name, one)} for name in named}
        if any(others - named for others in copied.values()):
            found -= {name for name, others in copied.items() if others}
        kept = [name for name in texts if name in found]
        return kept if len(kept) <= MAX_TEXTS else []

    def _is_read(self, name: str) -> bool:
        """Whether a name says that a column is read, and its other words not that it is learned: replyContent."""
        if any(name in members for members in self.objects.values()):
            return False
        read, learned = self.rate(name, *READ), self.rate(name, "answer", "label")
        if rate_name("summary", name) < 2:  # a title is a text of a label
            learned = max(learned, self.rate(name, "targets"))
        if self.columns[name].has_labels:  # a question that is cause or effect, but not the source "web"
            return self.rate(name, "text", "question") >= USUAL and read >= learned
        return read >= max(2, learned) and (learned == 0 or learned >= USUAL or read >= CLEAR)

    def is_named_input(self, name: str, target: str = "title") -> bool:
        """Whether a column holds running text, or lists of texts, and its name says that it is read; a note may be left
        out, and a title if another summary of the text is learned."""
        column = self.columns[name]
        if not column.is_list_of_texts and not (column.has_text and column.is_running):
            return False
        is_title = rate_name("summary", name) >= 2
        if is_title and rate_name("summary", target) >= 2:
            return False
        if has_word(name, f"{NOTES} {COMMENTS}") or self.rate(name, "choices") >= USUAL:
            return False
        return self._is_read(name) and self.rate(name, *READ) >= (2 if is_title else USUAL)

    def list_named_inputs(self, target: str) -> list[str]:
        """List the texts that are read by their names, in the order of the file; of forms of one text, such as
        seniorDescription and juniorDescription, the first.
        """
        known = self.list_texts(target, only_known=True)
        asked = {name for name in known if self.rate(name, "question") >= USUAL}
        if asked and any(self.rate(name, "context") >= USUAL for name in {*known} - asked):
            known = [name for name in known if rate_name("summary", name) < 2]  # of where the context is from
        found: dict[str, str] = {}  # last word -> name
        for name in known:
            words = [word for word in split_name(name) if word not in INNER.split()] or [name]
            is_copy = any(self.is_copy(name, one) for one in found.values())
            if self.is_named_input(name, target) and not is_copy:
                found.setdefault(words[-1], name)
        return [*found.values()]

    def _can_be_read(self, name: str) -> bool:
        """Whether a column holds running text, and its name says nothing."""
        column = self.columns[name]
        if not column.has_text or not column.is_running or self.is_of_system(name):
            return False
        return self.rate(name, *READ) < 2 and self.rate(name, "targets", "answer", "label") == 0

    def _can_repeat(self, name: str, label: str) -> bool:
        """Whether a label's only text has a few words and is the text of several records: `fast and kind`."""
        column = self.columns[name]
        is_only = all(one == name or self.columns[one].kind != "text" for one in self.list_unread([label]))
        return is_only and column.mean_words >= FEW_WORDS and column.num_distinct > self.columns[label].num_distinct

    def list_unread(self, used: Collection[str]) -> list[str]:
        """List the columns that a reading leaves out, without the columns aside."""
        return [name for name in self.free if name not in used]

    def sort_names(self, names: Collection[str]) -> list[str]:
        """List some columns in the order of the file."""
        return [name for name in self.columns if name in names]

    def list_counts(self) -> list[str]:
        """List the columns that count something other than words or letters: few numbers, which may be learned."""
        numbers = [name for name, one in self.columns.items() if one.kind == "number" and one.has_labels]
        return [name for name in numbers if COUNT.match(name) and not has_word(name, STATISTICS)]

    def list_outputs(self, used: Collection[str]) -> list[str]:
        """List the further columns that are named as what is learned."""
        lists = {name.removesuffix(".*") for name in used}
        unread = self.list_unread(lists.union(used))
        return [name for name in unread if is_named_output(name) and self.list_forms(name)]

    def is_amount(self, name: str) -> bool:
        """Whether a column holds numbers that are no labels: with fractions, or many without the name of a label."""
        column = self.columns[name]
        if column.kind != "number":
            return False
        return not column.has_labels or (column.num_distinct > MAX_NUMBERED and self.rate(name, "label") < CLEAR)

    def is_score(self, name: str) -> bool:
        """Whether a column holds numbers that are learned as such without a word of the user."""
        return self.is_amount(name) and self.rate(name, "number", "label", "targets") >= 2

    def can_learn_other(self, used: Collection[str]) -> bool:
        """Whether a column that a reading leaves out could be learned."""
        for name in self.list_unread(used):
            column = self.columns[name]
            if column.has_labels or column.has_text or column.kind in ("number", "text list"):
                return True
            if self.rate(name, *LEARNED) >= 2:
                return True
        return False

    def weigh(
        self,
        reading: Reading,
        *,
        form: str = "",
        values: str = "",
        points: int = VALUES,
        read: Sequence[str] = (),
        doubts: Sequence[str] = (),
    ) -> Reading:
        """Return a reading with its evidence, and with what makes it doubtful however many points it has.

        Args:
            form: why no other layout has these columns.
            values: what the values say for it, worth `points`.
            read: further columns that the reading uses.
            doubts: further ones.
        """
        target, inputs = reading.targets[0], reading.inputs
        roles = next(words for role, words in TARGET_ROLES.items() if role in reading.roles)
        named = self.rate(target, *roles)
        unknown: list[str] = []  # inputs without a known name
        for name in inputs:
            if self.rate(name, *READ, "answer") < 2 and not self.is_subject(name):
                unknown.append(name)
        is_mixed = 0 < len(unknown) < len(inputs) and "choices" not in reading.roles
        used = {*reading.targets, *inputs, *read, target.removesuffix(".*"), *self.objects.get(target, ())}

        # the columns that are used: names, form, values
        rated = [self.rate(name, *READ) for name in inputs]
        table = [(named, f"{target} is named as {roles[0]}"), (max(rated, default=0), "names of the inputs")]
        if form:
            table.append((FORM, form))
        if values:
            table.append((points, values))
        if not self.can_learn_other(used):
            table.append((ONLY, "no other column could be learned"))
        if is_mixed:
            table.append((UNKNOWN // 2, "an input has no known name"))
        if self.is_of_system(target):
            table.append((-CLEAR, f"{target} holds the answers of a system"))
        told = [*doubts]
        if "tags" not in reading.roles:
            told += self._describe_list(target)

        # the columns that are left out
        is_certain = bool(form or self.given.keys() & {"text", "inputs", "context"})
        is_general = has_word(target, GENERAL_LABELS)
        for name in self.list_unread(used):
            # another form of an input, or what systems answered next to the right answer, is left out on purpose
            is_told = self.is_named_input(name) and any(self.is_form(name, one) for one in inputs)
            if is_told or (target in self.golds and self.is_of_system(name)):
                continue
            weight, doubt = self._weigh_unread(name, is_certain=is_certain, named=0 if form else named)
            column = self.columns[name]
            learned = self.rate(name, "targets", "answer")
            is_rival = learned >= named or (has_word(name, GOLD) and not is_general)
            if is_rival and learned >= USUAL and column.has_text and column.is_running and not is_certain:
                doubt = f"{name} holds text that is named as what is learned, and is not read"
            table.append((weight, f"{name} is not read"))
            told.append(doubt)

        # inputs that may be meant otherwise, and targets that are mostly missing
        if is_mixed and [split_name(name) for name in inputs].count(split_name(unknown[0])) == 1:  # not one of several
            told.append(f"{unknown[0]} holds text without a known name, and may be read or not")
        elif reading.roles.keys() & {"label", "tags"} and "text" not in self.given:
            told += self._describe_answer(unknown, is_general=is_general)
        if self.is_mostly_blank(target) and reading.task not in BLANKS_MEANT:
            told.append(f"{target} is empty in more than half of the records, which are left out")
        evidence = [Evidence(*row) for row in table if row[0]]
        return replace(reading, evidence=evidence, doubts=[*filter(None, told)])

    def _describe_list(self, target: str) -> Iterator[str]:
        """Yield how a list or object that is learned may be meant, if that is not clear."""
        name = target.removesuffix(".*")
        forms = self.list_forms(name) if name in self.columns else []
        if len(forms) > 1:
            mean = statistics.fmean(map(len, self.read_lists(name)))
            yield f"{name} has {mean:.1f} texts on average, which may be one target together, {forms[0]}, or several"
        elif target in self.objects:
            labels = [one for one in self.objects[target] if one in self.columns]
            alone = f", not {list_names(labels)} alone" if labels else ""
            yield f"{name} holds objects, which are learned as text, {target}{alone}"
        elif target in forms and target != name and not self.columns[name].is_list_of_texts:
            yield f"{name} holds {self.columns[name].kind}s, which are learned as text, {target}"

    def _describe_answer(self, unknown: Sequence[str], *, is_general: bool) -> list[str]:
        """Describe which of some texts with unknown names may be learned from another one, rather than read with it:
        a text is an answer by its values, or the label may be no more than the topic of the texts.
        """
        texts = [name for name in unknown if self.columns[name].has_text]
        if len(texts) < 2:
            return []
        first, *_, last = sorted(texts, key=self.has_questions, reverse=True)
        shorter, longer = sorted(self.columns[name].mean_chars for name in (first, last))
        if is_general and longer < 2 * shorter and self.has_questions(first) == self.has_questions(last):
            return []
        return [f"{last} holds text without a known name: it may be read, or be what is learned from {first}"]

    def has_questions(self, name: str) -> bool:
        """Whether most texts of a column end in a question mark, one of Greek and Arabic included, or begin with an
        English question word.
        """
        texts = self.list_examples(name, SAMPLE)
        return count_matches(QUESTION, texts) > 0.5 * len(texts)

    def has_titles_asked(self, name: str, other: str) -> bool:
        """Whether the titles in a column are questions, of which the texts of another column may be the answers."""
        if self.is_given(name) or rate_name("summary", name) < 2 or self.rate(other, "answer", "targets") >= 2:
            return False
        return self.has_questions(name) and not self.has_questions(other)

    def _weigh_unread(self, name: str, *, is_certain: bool, named: int) -> tuple[int, str]:
        """Weigh a column that a reading leaves out: one that is named as a target speaks for another reading.

        A text that is left out makes the reading doubtful, unless form or user say what is read; lists of objects do
        if the target is a guess.
        """
        column = self.columns[name]
        is_nested = column.kind in ("list", "object")
        learned = self.rate(name, "targets", "answer", "label", "tags")
        if learned <= self.rate(name, "text") and not column.has_labels:  # a title is a text, too
            learned = 0
        # what is read by its name
        roles = READ if self.is_named_input(name) else ("context", "choices", "instruction")
        read = self.rate(name, *roles)
        is_readable = is_nested or column.is_running or self.rate(name, "choices") >= USUAL
        if read >= USUAL > learned and is_readable:
            is_doubtful = is_nested or not is_certain
            return 1 - read, f"{name} is named as a text to be read and is not read" if is_doubtful else ""
        # what is learned by its name or as code
        is_object = (column.has_objects or column.kind == "object") and not has_word(name, ANNOTATIONS)
        if is_object and self.rate(name, "targets", "answer") >= max(USUAL, named):
            return 1 - learned, f"{name} is named as what is learned, and holds {column.kind}s"
        if learned >= 2 and column.kind != "object":  # code is written for nothing else
            return 1 - (CLEAR if column.has_code else learned), ""
        # what has no known name
        if column.has_text and column.mean_words >= LONG_WORDS and self.rate(name, *READ) < 2:
            return UNKNOWN, "" if is_certain else f"{name} holds text without a known name and is not read"
        if named <= 2 and column.has_objects and self.rate(name, *READ, *LEARNED) < 2:
            return 0, f"{name} holds {column.kind}s and is not read; a part of one is named as {name}.0.NAME"
        return 0, ""

    def split_by_language(self) -> list[Survey]:
        """Divide a survey whose columns are there in several languages: question_en, answer_en, question_de ...

        A column that is there once belongs to all languages. One column in several languages is a translation.
        """
        by_base: dict[str, dict[str | None, str]] = {}
        for name in self.columns:
            base, language = split_language(name)
            by_base.setdefault(base, {})[language] = name
        several = [names for names in by_base.values() if len(names) > 1]
        if len(several) < 2:
            return [self]
        parts: list[Survey] = []
        for language in dict.fromkeys(chain.from_iterable(several)):
            others: set[str] = set()
            for names in several:
                others.update(name for other, name in names.items() if other != language)
            if not any(map(self.is_given, others)):
                kept = {name: column for name, column in self.columns.items() if name not in others}
                parts.append(replace(self, columns=kept))
        return parts or [self]

    def is_same(self, name: str, other: str) -> bool:
        """Whether two columns of labels say the same in each record, such as `label` and `label_text`."""
        first = [*map(as_text, self.table.list_values(name))]
        second = [*map(as_text, self.table.list_values(other))]
        pairs = {*zip(first, second, strict=True)}
        if any((one in BLANK) != (two in BLANK) for one, two in pairs):
            return False
        return len(pairs) == len({*first}) == len({*second})

    def list_examples(self, name: str, number: int) -> list[str]:
        """List the first filled values of a column as text."""
        filled = (value for value in self.table.list_values(name) if isinstance(value, str | int | float))
        return [as_text(value) for value in islice(filled, number)]


def _measure_share(one: set[str], two: set[str]) -> float:
    """Measure the share of the smaller set that the larger set has, too."""
    return len(one & two) / max(1, min(len(one), len(two)))


def is_statistic(name: str) -> bool:
    """Whether a name says that numbers count or measure a text, or the votes for it.

    >>> [is_statistic(name) for name in ("n_words", "seniorLength", "sum_word_density", "score")]
    [True, True, True, False]
    """
    return COUNT.match(name) is not None or _has_last_word(name, STATISTICS)


def is_named_output(name: str) -> bool:
    """Whether the last word of a name says that the column is learned."""
    return _has_last_word(name, OUTPUTS)


def _has_last_word(name: str, words: str) -> bool:
    last = split_name(name)[-1:]  # none of a name such as `0`
    return bool(last) and last[0] in words.split()


def describe_outputs(outputs: Sequence[str]) -> list[str]:
    return [f"{name} is named as what is learned, too, and is not read" for name in outputs]


def join_names(names: Sequence[str]) -> str:
    return " and ".join(names)


def describe_columns(names: Sequence[str]) -> str:
    """Join names before what they hold.

    >>> describe_columns(["a"]), describe_columns(["a", "b"])
    ('a holds', 'a and b hold')
    """
    return f"{join_names(names)} {'holds' if len(names) == 1 else 'hold'}"


def _list_triples(value: object) -> set[str]:
    letters = re.sub(r"\W", "", str(value).casefold())
    return {letters[place : place + 3] for place in range(max(1, len(letters) - 2))}


def _is_ticked(column: Column, num_records: int) -> bool:
    ticks = {name for name, is_set in FLAGS.items() if is_set} | {column.name.casefold()}
    values = {value.casefold() for value in column.values}  # none of long or many ones
    return column.num_filled <= MOSTLY_TICKED * num_records and bool(values) and values <= ticks


def make_survey(table: RawTable, given: Given) -> Survey:
    """Make the survey of a table; parts of lists that the user named are described too."""
    num = table.num_records
    columns = {name: one for name, one in table.columns.items() if one.num_filled > 0.02 * num or _is_ticked(one, num)}
    if "ResponseId" in columns:  # Qualtrics: whether the answers are a test
        columns.pop("Status", None)
    objects = _find_objects(table, columns)
    for name in chain.from_iterable(objects.values()):
        if not columns[name].has_labels:
            columns.pop(name)
    named = {*chain.from_iterable(given.values())}
    for name in chain.from_iterable(given.values()):
        columns.pop(name.removesuffix(".*"), None)
        columns[name] = table.describe(name)
    wholes = {name: parts for name, parts in find_wholes(table, columns).items() if name not in named}
    for name in wholes:
        columns.pop(name)
    return Survey(table, given, columns, wholes, objects)


def _find_objects(table: RawTable, columns: Mapping[str, Column]) -> dict[str, list[str]]:
    """Find the objects that are learned by their names, such as {"input": text, "output": {...}}: no text with its
    score or place, and no text in several languages.

    Returns: the name of all of an object -> its members.
    """
    members: dict[str, list[str]] = {}
    for name in columns:
        stem, dot, _ = name.rpartition(".")
        if dot:
            members.setdefault(stem, []).append(name)
    found: dict[str, list[str]] = {}
    for stem, names in members.items():
        if not has_word(stem, OBJECTS) and all(rate_name(role, stem) < USUAL for role in TARGET_ROLES):
            continue
        is_object = any(stem in record.fields for record in table.records)  # else a name with a dot
        others = [column for name, column in columns.items() if name not in names]
        has_input = any(one.has_text or one.has_lists for one in others)
        scores = [name for name in names if columns[name].kind == "number" and rate_name("number", name) >= USUAL]
        is_text = any(has_word(name, MEASURES) or name.split(".")[-1] in INNER.split() for name in names)
        is_translation = any(map(find_language, names))
        if is_object and has_input and len(names) - len(scores) > 1 and not is_text and not is_translation:
            found[f"{stem}.*"] = names
    return found
