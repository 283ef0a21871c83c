"""What names and values say about the columns of a table, and the points of a reading of them.

In: a RawTable, and the columns that the user named. Out: the columns that may have a role; the Evidence of a reading.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivetune.start.columns import MIN_WORDS, Column, RawTable, as_text, describe_column, find_value
from fivetune.start.roles import CLEAR, COPIES, USUAL, Given, rate_name, split_name, split_names

# Points of evidence, beside the 1 to CLEAR of a name (roles.py). Names that leave no doubt on both sides, and values
# that fit them, are 4 + 4 + 2 = 10. A reading is taken with ENOUGH points and a lead of MARGIN: values alone are none.
FORM = 6  # columns that no other layout has: instruction and output, choices, messages, two languages
CODE = 3  # the target is code, a query or a formula: these are written for nothing else
VALUES = 2  # the values are what the task learns: they repeat as labels do, or are lists of answers
IN_TEXT = 4  # the answers are parts of their contexts: no other column would be
ONLY = 3  # no other column could be the target
PAIRED = 2  # inputs with one name and two numbers: sentence1 and sentence2
SHORTER = 1  # the target is much shorter than the inputs, as a summary is
UNKNOWN = -2  # a free text without a known name is not read; for an input without a known name half of it
LONG_WORDS = 5  # mean words from which on a text is more than a name or a heading
ENOUGH = 5
MARGIN = 2

READ = ("text", "inputs", "question", "context", "choices", "instruction")
LEARNED = ("targets", "answer", "label", "tags", "number")
ASIDE = ("id", "date", "link", "person", "place", "fact")


class Evidence(NamedTuple):
    """Points for a reading, and what they are for."""

    points: int
    words: str


@dataclass(frozen=True, slots=True)
class Survey:
    """The columns of a table that hold values, with those that the user named."""

    table: RawTable
    given: Given
    columns: Mapping[str, Column]

    def rate(self, name: str, *roles: str) -> int:
        """Rate how clearly a column's name says one of these roles; a column that the user gave it has CLEAR + 1."""
        if any(name in split_names(role, self.given[role]) for role in roles if role in self.given):
            return CLEAR + 1
        return max(rate_name(role, name) for role in roles)

    def is_aside(self, name: str) -> bool:
        """Whether a column says something about the record that is neither read nor learned: id, date, author ..."""
        column = self.columns[name]
        if any(name in split_names(role, names) for role, names in self.given.items()):
            return "id" in self.given and name == self.given["id"]
        is_constant = column.num_distinct < 2 and self.rate(name, "instruction", "choices", *LEARNED) < USUAL
        if column.kind in ("date", "link") or is_constant:
            return True
        if column.has_codes and self.rate(name, *LEARNED) < USUAL:
            return True
        aside = max(rate_name(role, name) for role in ASIDE)
        return aside >= USUAL and aside > self.rate(name, *READ, *LEARNED)

    def list_columns(self, *roles: str, minimum: int) -> list[str]:
        """List the columns with a role, the clearest name first; those that the user gave the first role, if any."""
        if roles[0] in self.given:
            return split_names(roles[0], self.given[roles[0]])
        taken = {name for role, names in self.given.items() for name in split_names(role, names)}
        free = [name for name in self.columns if name not in taken and not self.is_aside(name)]
        rated = [(-self.rate(name, *roles), len(name), name) for name in free]  # the plainer first: ctx before ctx_a
        return [name for points, _, name in sorted(rated) if -points >= minimum]

    def list_texts(self, target: str, *, only_known: bool = False) -> list[str]:
        """List the texts that a label is given for, in the order of the file; not what is learned by its name.

        Args:
            only_known: leave out those whose names say nothing.
        """
        if "text" in self.given:
            return split_names("text", self.given["text"])
        texts = [
            name
            for name, column in self.columns.items()
            if name != target and column.kind == "text" and not self.is_aside(name)
        ]
        read = {name: self.rate(name, *READ) for name in texts}
        learned = {name: self.rate(name, "targets", "answer", "label") for name in texts}
        known = [name for name in texts if self._is_read(name) and not (self.columns[name].has_code and len(texts) > 1)]
        unknown = [
            name
            for name in texts
            if read[name] < 2 and learned[name] == 0 and self.columns[name].has_text and is_running(self.columns[name])
        ]
        found = known if only_known else known + unknown
        if found:
            copies = [name for name in found if any(word in COPIES for word in split_name(name))]
            kept = [name for name in found if name not in copies] or copies
            return [name for name in texts if name in kept]
        if self.rate(target, "label") >= USUAL:  # code or answers that are classified
            return [name for name in texts if not self.columns[name].has_labels]
        return []

    def _is_read(self, name: str) -> bool:
        """Whether a name says that a column is read, and its other words not that it is learned: replyContent."""
        read, learned = self.rate(name, *READ), self.rate(name, "targets", "answer", "label")
        if self.columns[name].has_labels:  # a question that is cause or effect, but not the source "web"
            return self.rate(name, "text", "question") >= USUAL and read >= learned
        return read >= max(2, learned) and (learned == 0 or learned >= 3 or read >= CLEAR)

    def weigh(
        self,
        target: str,
        roles: Sequence[str],
        inputs: Sequence[str],
        *,
        form: str = "",
        values: str = "",
        points: int = VALUES,
        read: Sequence[str] = (),
    ) -> tuple[tuple[Evidence, ...], tuple[str, ...]]:
        """Weigh a reading: its evidence, and what makes it doubtful however many points it has.

        Args:
            target: the column that is learned.
            roles: what its name should say, one of them.
            inputs: the columns that the model reads.
            form: why no other layout has these columns.
            values: what the values say for it, worth `points`.
            read: further columns that the reading uses.
        """
        used = {target, *inputs, *read}
        found = [Evidence(self.rate(target, *roles), f"{target} is named as {roles[0]}")]
        found.append(Evidence(max((self.rate(name, *READ) for name in inputs), default=0), "names of the inputs"))
        if form:
            found.append(Evidence(FORM, form))
        if values:
            found.append(Evidence(points, values))
        words = [split_name(name) for name in inputs]
        if len(inputs) > 1 and any(words.count(one) > 1 for one in words):
            found.append(Evidence(PAIRED, "inputs with the same name"))
        unread = self.list_unread(used)
        if not any(self.is_learnable(name) for name in unread):
            found.append(Evidence(ONLY, "no other column could be learned"))
        doubts: list[str] = []
        is_guess = self.rate(target, *roles) <= 2 and not form
        if is_guess and (nested := [name for name in unread if self._has_unknown_parts(name)]):
            doubts.append(f"{nested[0]} holds {self.columns[nested[0]].kind}s and is not read")
        for name in unread:
            is_certain = bool(form or self.given.keys() & {"text", "inputs", "context"})
            evidence, doubt = self._weigh_unread(name, is_certain=is_certain)
            found += [evidence] if evidence.points else []
            doubts += [doubt] if doubt else []
        unknown = [name for name in inputs if self.rate(name, *READ) < 2]
        if 0 < len(unknown) < len(inputs):
            found.append(Evidence(UNKNOWN // 2, f"{unknown[0]} has no known name"))
            if words.count(split_name(unknown[0])) == 1:  # not one of several alike, as choices are
                doubts.append(f"{unknown[0]} holds text without a known name, and may be read or not")
        return tuple(found), tuple(doubts)

    def _has_unknown_parts(self, name: str) -> bool:
        is_nested = self.columns[name].kind in ("list", "object")
        return is_nested and self.columns[name].example[1:2] in ("{", "[") and self.rate(name, *READ, *LEARNED) < 2

    def list_unread(self, used: Collection[str]) -> list[str]:
        """List the columns that a reading leaves out, those aside not counted."""
        return [name for name in self.columns if name not in used and not self.is_aside(name)]

    def is_learnable(self, name: str) -> bool:
        column = self.columns[name]
        return column.has_labels or column.has_text or column.kind == "number" or self.rate(name, *LEARNED) >= 2

    def _weigh_unread(self, name: str, *, is_certain: bool) -> tuple[Evidence, str]:
        """Weigh a column that a reading leaves out: one that is named as a target speaks for another reading.

        A text that is left out makes the reading doubtful, unless form or user say what is read.
        """
        column = self.columns[name]
        learned = self.rate(name, "targets", "answer", "label", "tags")
        if learned <= self.rate(name, "text") and not column.has_labels:  # a title is a text, too
            learned = 0
        read = self.rate(name, "context", "choices", "instruction")
        is_choice = self.rate(name, "choices") >= USUAL
        if read >= USUAL > learned and (column.kind in ("list", "object") or is_running(column) or is_choice):
            holds = f"holds {column.kind}s" if column.kind in ("list", "object") else "is named as a text to be read"
            is_doubtful = column.kind in ("list", "object") or not is_certain
            doubt = f"{name} {holds} and is not read" if is_doubtful else ""
            return Evidence(1 - read, f"{name} is not read"), doubt
        if learned >= 2 and column.kind != "object":
            learned = CLEAR if column.has_code else learned
            return Evidence(1 - learned, f"{name} is named as a target and not read"), ""
        if column.has_text and column.mean_words >= LONG_WORDS and self.rate(name, *READ) < 2:
            doubt = "" if is_certain else f"{name} holds text without a known name and is not read"
            return Evidence(UNKNOWN, f"{name} is not read"), doubt
        return Evidence(0, ""), ""

    def list_examples(self, name: str, number: int) -> list[str]:
        """List the first filled values of a column as text."""
        values = (find_value(record.fields, name) for record in self.table.records[: 3 * number])
        return [as_text(value) for value in values if isinstance(value, str | int | float)][:number]


def make_survey(table: RawTable, given: Given) -> Survey:
    """Make the survey of a table; parts of lists that the user named are described too."""
    named = [name for role, names in given.items() for name in split_names(role, names)]
    columns = dict(table.columns)
    for name in named:
        if name not in columns:
            columns[name] = describe_column(name, table.list_values(name))
    filled = {
        name: column
        for name, column in columns.items()
        if name in named or column.num_filled > max(0, 0.02 * table.num_records)
    }
    return Survey(table, given, filled)


def is_running(column: Column) -> bool:
    return column.kind == "text" and column.mean_words >= MIN_WORDS


def iter_same(survey: Survey, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (column, earlier column) of labels that say the same in each record, such as `label` and `label_text`."""
    pairs: dict[str, list[object]] = {name: survey.table.list_values(name) for name in names}
    for place, name in enumerate(names):
        for earlier in names[:place]:
            both = {(as_text(a), as_text(b)) for a, b in zip(pairs[name], pairs[earlier], strict=True)}
            if len(both) == len({a for a, _ in both}) == len({b for _, b in both}):
                yield name, earlier
