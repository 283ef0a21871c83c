"""Plan a recipe for a source: the task, the split into three sets, lengths, model, batch and number of epochs.

In: a source, and what its user named. Out: a StartPlan: the settings with their reasons, and the set of each record.
"""

from __future__ import annotations

import math
import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from fivetune.data.characters import describe_odd_targets, find_lossy_characters
from fivetune.data.labels import PLACEHOLDERS, describe_merged_forms, describe_placeholders, describe_rare
from fivetune.data.limits import TokenLengths, measure_lengths
from fivetune.data.readers.delimited import NAMES_AGAIN, HeaderError
from fivetune.data.readers.records import UniqueIds, ignore_bad_record, read_records
from fivetune.data.readers.source_files import BadRecord
from fivetune.data.readers.tables import replace_empty_cell
from fivetune.data.split import EvalSplit, Relation, ThreeWaySplit, hash_text, split_in_three
from fivetune.errors import DataError
from fivetune.start.choose import convert_record, explain_few, infer_divided
from fivetune.start.columns import (
    MIN_RECORDS,
    RawTable,
    are_cells_empty,
    as_text,
    build_table,
    describe_form,
    find_value,
    is_empty_cell,
    read_first_line,
)
from fivetune.start.divisions import find_lines_header
from fivetune.start.headers import explain_missing_header
from fivetune.start.leaks import describe_held, describe_marked
from fivetune.start.roles import MIN_GROUPS, Given, count_names, split_name
from fivetune.start.survey import Reading
from fivetune.start.task_options import TEXT_TASKS
from fivetune.start.vocabulary import (
    FOREIGN,
    MULTILINGUAL,
    choose_start_model,
    estimate_lengths,
    find_lost_characters,
    find_vocabulary,
)
from fivetune.tasks import has_sentinels, list_names, load_task
from fivetune.tasks.denoising import SENTINEL
from fivetune.tasks.tags import FLAGS
from fivetune.types import JsonTable, RawRecord, Task, TextExample

SEED = 0
SET_SHARE, MIN_SET, MAX_SET = 0.1, 50, 2_000  # of validation and test set each; a fifth of the records at most
SAMPLE = 2_000  # examples whose tokens and characters are counted
MAX_EMPTY = 0.1  # share of records without one of several inputs up to which that is told: more are meant so
REPEATED = 0.1  # different inputs per record below which it is told that they repeat
MANY_LOST = 0.01  # share of targets with characters that the model cannot write from which on it is told
FEW = 200  # records from which on a test set says something
LONGEST = 512  # tokens of inputs and of targets
MAX_ABOVE = 3  # lines that are no records, such as a title, which no table is refused for
NUM_HEAD = 50  # first records, of which the first are compared with the others
MAX_UNREAD = 0.05  # share of records that cannot be read, up to which the others are worth a recipe
CUT = 0.05  # share of inputs over the limit from which on it is told

SETS = ("train", "validation", "test")
_SET_WORDS = {
    "train": "train training trn entrenamiento treino 训练",
    "validation": "validation valid val dev development eval evaluation validación validação 验证 开发",
    "test": "test testing tst prueba teste 测试",
}
SET_WORDS: Mapping[str, str] = {word: name for name, words in _SET_WORDS.items() for word in words.split()}
"""What data sets call a set -> the set."""
FEW_IDS = 0.1  # distinct ids per record up to which fewer than MIN_GROUPS of them relate no records


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Everything that the recipe and its three files are written from.

    Args:
        sizes: set -> records.
        label_counts: label -> records, of a task with labels.
        is_measured: whether the lengths are the tokenizer's, not estimated.
        set_column: the column that names the set of each record, if the file has one, or several of 0 and 1.
        drawn: sets that were drawn at random; without such a column all of them.
    """

    table: RawTable
    reading: Reading
    task: Task
    model: str
    model_reason: str
    split: ThreeWaySplit
    sizes: Mapping[str, int]
    label_counts: Mapping[str, int]
    lengths: TokenLengths
    is_measured: bool
    set_column: str | None = None
    drawn: Sequence[str] = SETS
    warnings: Sequence[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        return self.table.source

    @property
    def loses_middle(self) -> bool:
        """Whether an input that is too long loses its middle, not its end: a text that has labels, or that may end with
        what is asked of it, as an instruction or a chat does.
        """
        is_plain = self.reading.kind in ("translation", "summarisation")
        return self.task.labels is not None or (self.reading.task in TEXT_TASKS and not is_plain)

    def describe_given_sets(self) -> str:
        """Describe the sets that the file has itself, and which is drawn beside them; "" without any."""
        if self.set_column is None:
            return ""
        words = f"as the column {self.set_column} says"
        if self.drawn:
            words += f"; the {self.drawn[0]} set is drawn from its training records"
        return words

    def describe_relations(self, *, kept: bool = True) -> str:
        """Describe what records of one set may have in common; with `kept` false, what does not keep them together."""
        nouns: dict[Relation, str] = {"inputs": "inputs"}
        if "question" in self.reading.roles:
            nouns |= {"context": "contexts", "question": "questions"}
        equal = [noun for relation, noun in nouns.items() if (relation in self.split.given_up) != kept]
        found: list[str] = []
        if equal:
            words = ", ".join(equal).rsplit(", ", 1)
            found.append(f"equal {' or '.join(words)}")
        if self.reading.group_column and ("group" in self.split.given_up) != kept:
            found.append(f"the same {self.reading.group_column}")
        return " or ".join(found)


class InputCounts:
    """What is odd about the inputs of all records: cells that are empty, or hold what a program writes for that; texts
    that repeat."""

    def __init__(self, reading: Reading) -> None:
        choices = reading.roles.get("choices", ())  # one may be left out, and "None" is one
        self._columns = [name for name in reading.inputs if name not in choices]
        self._texts: set[int] = set()
        self._written: Counter[str] = Counter()
        self._empty: Counter[str] = Counter()
        self._num_records = 0

    def add(self, record: RawRecord, example: TextExample) -> None:
        """Count a record as it is read, with its example."""
        self._num_records += 1
        self._texts.add(hash(example.inputs))
        for name in self._columns:
            value = find_value(record.fields, name)
            if isinstance(value, str) and value.strip() in PLACEHOLDERS:
                self._written[value.strip()] += 1
            elif is_empty_cell(value):
                self._empty[name] += 1

    def list_warnings(self) -> Iterator[str]:
        """Yield the sentences that the user should read."""
        if note := describe_placeholders(self._written, what="input"):
            yield note
        for name, num in self._empty.items():
            if num <= MAX_EMPTY * self._num_records:
                records = _count_records(num, "has", "have")
                yield f"{records} nothing in {name}: only the other inputs are read. Fill the cells, or leave them out"
        if len(self._texts) < REPEATED * self._num_records:
            yield (
                f"{self._num_records:,} records have {len(self._texts):,} different inputs: the model sees few texts, "
                "and scores of the few in a set mean little. Collect more texts"
            )


def read_examples(
    table: RawTable,
    reading: Reading,
    task: Task,
    on_bad: Callable[[BadRecord], None],
    on_blank: Callable[[str, str], None] = lambda names, where: None,
) -> Iterator[tuple[RawRecord, RawRecord, Sequence[TextExample]]]:
    """Yield (record as it is read, the same with a unique id, its examples) of usable records.

    Args:
        on_blank: called with (columns, its place) of each record that has nothing in the columns of the reading, or in
            the learned columns.
    """
    ids = UniqueIds()
    columns = {"id": reading.id_column} if reading.id_column else {}
    names = [*reading.inputs, *reading.targets]
    records = read_records(table.source, columns=columns, header=table.header, on_bad=on_bad)
    if table.division:
        records = table.division.iter_records(records, on_bad)
    for number, read in enumerate(records):
        numbered = ids.number(read)
        record = replace(numbered, fields=fill_blank_inputs(numbered.fields, reading))
        if number < table.num_names:
            on_bad(BadRecord(read.where, "is a further line of names. Allowed is one header. Delete the line."))
        elif names and are_cells_empty(read.fields, names):
            on_blank(list_names(names), read.where)
        else:
            own_bad: list[BadRecord] = []
            if examples := convert_record(record, reading, task, own_bad.append):
                yield read, record, examples
            elif own_bad and (lacking := _find_lacking(read, reading)):
                on_blank(list_names(lacking), read.where)
            else:
                for one in own_bad:
                    on_bad(one)


def _find_lacking(record: RawRecord, reading: Reading) -> Sequence[str]:
    """Find the columns of what is learned, or of choices, if a record has nothing in them."""
    for names in (reading.targets, reading.roles.get("choices", ())):
        if names and are_cells_empty(record.fields, names):
            return names
    return ()


def fill_blank_inputs(fields: Mapping[str, object], reading: Reading) -> dict[str, object]:
    """Return the fields of a record; of several inputs of a template, those that it has not, or null, are empty text.

    >>> pair = Reading("instructions", "jsonl", {"inputs": ["task", "input"], "targets": ["output"]}, "")
    >>> fill_blank_inputs({"task": "Sing.", "output": "La."}, pair)
    {'task': 'Sing.', 'output': 'La.', 'input': ''}
    """
    filled = dict(fields)
    if reading.task in TEXT_TASKS and len(reading.inputs) > 1:
        for name in reading.inputs:
            is_part = "." in name and name not in fields
            if not is_part and replace_empty_cell(fields.get(name)) is None:
                filled[name] = ""
    return filled


def find_set(value: object) -> str | None:
    """Find the set that a cell names by its first word; a blank one names the training set.

    >>> find_set("Dev"), find_set("test_matched"), find_set("Training Set"), find_set("trainset"), find_set("spam")
    ('validation', 'test', 'train', 'train', None)
    """
    if is_empty_cell(value):
        return "train"
    first = re.search(r"[^\W\d_]+", as_text(value).casefold())
    return SET_WORDS.get(re.sub("(?:set|集)$", "", first[0])) if first else None


def find_set_columns(table: RawTable, reading: Reading, warn: Callable[[str], None]) -> list[str]:
    """Find what divides the file into sets: a column whose values all name one, training among several.

    Of several columns the one that is named after what is learned: `split_hs` for the label `hs`. Without any, columns
    such as `is_test`, of 0 and 1, do together.

    Args:
        warn: called with a sentence on a column of which only some values name sets.
    """
    found: list[str] = []
    used = {*reading.inputs, *reading.targets}
    for name, column in table.columns.items():
        if name in used:
            continue
        known: set[str] = set()
        others: list[str] = []
        for value in column.values:
            one = find_set(value)
            if one is None:
                others.append(value)
            else:
                known.add(one)
        if "train" not in known or len(known) < 2:
            continue
        if others:
            warn(
                f"{name} names sets, and does not divide the file, as it has other values: {list_names(others)}. Write "
                "train, validation or test for them, or leave those records out"
            )
        else:
            found.append(name)
    if found:
        named = [name for name in found if name.endswith(tuple(reading.targets))]
        return [min(named, key=len) if named else found[0]]
    for name, column in table.columns.items():
        if find_flagged_set(name) and name not in used and column.has_flags:
            found.append(name)
    return found


def find_flagged_set(name: str) -> str | None:
    """Find the set that a column of 0 and 1 is named after.

    >>> find_flagged_set("is_test"), find_flagged_set("isTrain"), find_flagged_set("test"), find_flagged_set("is_spam")
    ('test', 'train', None, None)
    """
    words = split_name(name)
    return SET_WORDS.get(words[1]) if len(words) == 2 and words[0] in ("is", "in") else None


def find_own_set(fields: Mapping[str, object], columns: Sequence[str]) -> str:
    """Find the set that a record has in the file; of columns of 0 and 1, the first that is true says it.

    >>> find_own_set({"is_test": 0}, ["is_test"]), find_own_set({"is_train": "False"}, ["is_train"])
    ('train', 'test')
    >>> find_own_set({"split": "dev"}, ["split"]), find_own_set({}, [])
    ('validation', 'train')
    """
    flagged = {one: find_flagged_set(one) for one in columns}
    if not all(flagged.values()):
        return find_set(find_value(fields, columns[0])) or "train"
    for name, one in flagged.items():
        if one and FLAGS.get(as_text(find_value(fields, name)).casefold()):
            return one
    return "test" if [*flagged.values()] == ["train"] else "train"


def build_plan(
    source: str,
    *,
    task: str | None = None,
    model: str | None = None,
    given: Given,
    load_tokenizer: Callable[[str], object | None],
    seed: int = SEED,
    header: Sequence[str] = (),
    flags: Sequence[str] = (),
) -> StartPlan:
    """Plan the recipe of a source. Raises DataError for data without a task, ConfigError for a wrong name.

    Args:
        load_tokenizer: returns the tokenizer of a model that is on this machine, else None.
        flags: further words of the command line, which the commands of a doubt repeat.
    """
    # the task, from a sample of the records
    bad: list[BadRecord] = []
    header = header or find_lines_header(source, task)
    records = read_records(source, header=header, on_bad=bad.append)
    try:
        head = [*islice(records, NUM_HEAD)]
    except HeaderError as error:
        why = f"{error.reason} (if that line has the names, give those)"
        if given:
            raise
        raise explain_missing_header(source, error.num, why, task=task, flags=flags) or error from error
    num_names = count_names(head, has_header=bool(header))
    if num_names and not header and not read_first_line(source):  # records with keys have no further lines of names
        num_names = 0
    table = build_table(source, chain(head[num_names:], records), header=header, flags=flags)
    unread = [one for one in bad if one.reason != NAMES_AGAIN]
    first_line = table.first_line if len(unread) == len(bad) else ()  # names that stand twice are no record
    table = replace(table, num_names=num_names, first_line=first_line)
    if table.num_records < MIN_RECORDS:
        few = DataError(explain_few(table, bad, given, task))
        if bad and bad[0].num_unnamed and not given:
            why = bad[0].reason.partition(". Allowed")[0]
            raise explain_missing_header(source, bad[0].num_unnamed, why, task=task, flags=flags) or few
        raise few
    table, reading = infer_divided(table, task=task, given=given)
    if table.num_records < table.num_read:
        told = [_add_sample(one, table.num_records) for one in (reading.reason, *reading.warnings)]
        reading = replace(reading, reason=told[0], warnings=told[1:])
    loaded = load_task(reading.task, reading.options)
    by_label = loaded.labels is not None
    # the sets, from all records; what else is needed of them is kept on the way
    num_total = table.num_read + len(bad)
    if len(unread) > max(MAX_UNREAD * num_total, MAX_ABOVE):
        share = f"{len(unread):,} of {num_total:,} records cannot be read"
        raise DataError(f"{source}: {share}; the first: {unread[0]} Nothing was written.")
    bad = []
    blank: dict[str, list[str]] = {}  # names of columns -> places
    labels: Counter[str] = Counter()
    ids: list[RawRecord] = []
    renamed: list[str] = []  # ids that an earlier record has
    id_column = table.describe(reading.id_column or "id")
    few_ids = id_column.num_distinct < MIN_GROUPS and id_column.share_distinct <= FEW_IDS
    relates_ids = reading.group_column is None and "group" not in given and not few_ids
    notes: list[str] = []
    set_columns = find_set_columns(table, reading, notes.append)
    set_column = " and ".join(set_columns) or None
    given_sets: dict[str, set[int]] = {one: set() for one in SETS}  # hashes of the ids
    trained: set[str] = set()  # labels of records that the file does not keep for evaluation
    counts = InputCounts(reading)
    sample: list[TextExample] = []  # every so many records one, so that sorted files are sampled evenly
    longest: list[TextExample] = []  # the example with the longest target

    def convert() -> Iterator[tuple[RawRecord, Sequence[TextExample]]]:
        def on_blank(names: str, where: str) -> None:
            blank.setdefault(names, []).append(where)

        for read, record, examples in read_examples(table, reading, loaded, bad.append, on_blank):
            if len(ids) % math.ceil(num_total / SAMPLE) == 0:
                sample.append(examples[0])
            counts.add(read, examples[0])
            if not longest or len(examples[0].targets) > len(longest[0].targets):
                longest[:] = examples[:1]
            own_id, given_id = record.fields["id"], read.fields["id"]
            own_set = find_own_set(read.fields, set_columns)
            given_sets[own_set].add(hash_text(str(own_id)))
            if by_label and examples[0].references:
                label = examples[0].references[0]
                labels[label] += 1
                if own_set == "train":
                    trained.add(label)
            ids.append(RawRecord({"id": own_id}, record.where))
            if own_id != given_id:
                renamed.append(str(given_id))
            if own_set != "train":
                continue
            # a blank cell relates no records; without a group, equal ids do
            value = find_value(read.fields, reading.group_column) if reading.group_column else None
            related_id = given_id if relates_ids else own_id
            group = f"id {related_id}" if is_empty_cell(value) else value
            yield RawRecord({"id": own_id, "group": group}, record.where), examples

    division = EvalSplit("eval", choose_set_share(num_total), seed, "group")
    failure = None
    split = None
    try:
        split = split_in_three(
            convert(), division, by_label=by_label, by_whole=has_sentinels(loaded), is_named="group" in given
        )
    except DataError as error:
        failure = str(error)
    if given_sets["validation"] and given_sets["test"]:  # nothing is drawn
        split = ThreeWaySplit(frozenset(), frozenset(), len(ids), len(ids))
        failure = None
        if not given_sets["train"]:
            failure = f"the column {set_column} leaves no record that can be used in training"
    # those that a task leaves out on purpose are not among the bad ones
    lacking = [f"{places[0]}: has nothing in {names}." for names, places in blank.items()]
    if len(ids) < len(bad) or (lacking and len(ids) < MIN_RECORDS):
        failure = f"{len(ids):,} of {num_total:,} records can be used; the first that cannot: {[*bad, *lacking][0]}"
    if failure or split is None:
        raise DataError(f"{source}: {failure}")
    drawn = [one for one in SETS if not given_sets[one]] if set_column else SETS
    split = replace(
        split,
        validation_ids=frozenset(given_sets["validation"]) or split.validation_ids,
        test_ids=frozenset(given_sets["test"]) or split.test_ids,
        num_records=len(ids),
    )
    if len(drawn) == 2:  # no record of the sets that the column names can be used
        set_column, drawn = None, SETS
    if renamed and relates_ids:
        reading = replace(reading, group_column=reading.id_column or "id")
    reading = replace(reading, unread=[name for name in reading.unread if name not in set_columns])
    # the model, and the lengths in its tokens
    sizes = Counter(split.find_set(record) for record in ids)
    examples = longest + [one for one in sample if one is not longest[0]]
    name, reason = (model, "named with --model") if model else choose_start_model(examples)
    tokenizer: Any = load_tokenizer(name)
    plan = StartPlan(
        table,
        reading,
        loaded,
        name,
        reason,
        split,
        sizes={one: sizes[one] for one in SETS},
        label_counts=labels,
        lengths=measure_texts(examples, tokenizer, name),
        is_measured=tokenizer is not None,
        set_column=set_column,
        drawn=drawn,
    )
    told = [table.division.describe()] if table.division else []
    warnings = [*describe_form(source), *told, *reading.warnings, *notes, *_list_warnings(plan, bad)]
    for names, places in blank.items():
        records = _count_records(len(places), "has", "have")
        verb = "is" if len(places) == 1 else "are"
        warnings.append(f"{records} nothing in {names}, and {verb} left out; the first: {places[0]}")
    if renamed:
        second = f"{renamed[0]} (2)"
        note = f"{len(renamed):,} records have the id of an earlier one, such as {renamed[0]!r}"
        note += f": in the sets it is {second!r}"
        if few_ids:
            note += "; so few ids relate no records"
        warnings.append(note)
    warnings += counts.list_warnings()
    if unknown := labels.keys() - trained:
        warnings.append(
            f"no training record has the label {list_names(sorted(unknown))}: the model cannot learn it, and its "
            "records cannot be scored"
        )
    held: set[str] = set()  # characters
    for one in examples:
        for text in (one.inputs, one.targets):
            held.update(SENTINEL.sub("", text) if has_sentinels(loaded) else text)
    lost = {*find_lossy_characters(tokenizer, held)} if tokenizer else find_lost_characters(name, held)
    drawn_from = "sampled " * (len(examples) < len(ids))
    warnings += describe_odd_targets(
        tokenizer, examples, lost, f"{drawn_from}targets", keeps_sentinels=has_sentinels(loaded)
    )
    warnings += _describe_lost_characters(name, lost, examples, drawn_from)
    inputs = f"{drawn_from}inputs"
    is_part = loaded.extractive and "context" in reading.roles
    if not (by_label or is_part or reading.options.get("format") == "multiple_choice"):
        is_usual = reading.task == "tags" or "context" in reading.roles
        warnings += describe_held(examples, inputs, is_usual=is_usual)
    warnings += describe_marked(examples, inputs)
    return replace(plan, warnings=warnings)


def _add_sample(text: str, num: int) -> str:
    """Add to a text that holds a count that this is of a sample.

    >>> _add_sample("y has 2 values", 20_000), _add_sample("text2 is read", 20_000)
    ('y has 2 values (of a sample of 20,000 records)', 'text2 is read')
    """
    return f"{text} (of a sample of {num:,} records)" if re.search(r"(?<!\S)[\d,]*\d(?!\w)", text) else text


def _count_records(num: int, verb: str, of_several: str) -> str:
    return f"1 record {verb}" if num == 1 else f"{num:,} records {of_several}"


def choose_set_share(num_records: int) -> float:
    """Choose the share of validation and test set each: a tenth, more of few records, 2,000 of many.

    >>> [round(choose_set_share(number) * number) for number in (100, 600, 100_000)]
    [20, 60, 2000]
    """
    share = min(0.2, max(SET_SHARE, MIN_SET / max(1, num_records)))
    return min(share, MAX_SET / max(1, num_records))


def measure_texts(examples: Sequence[TextExample], tokenizer: Any, model: str) -> TokenLengths:
    """Count the tokens of inputs and targets, the end token included; without a tokenizer estimate them."""
    targets = [one.targets for one in examples if one.targets]
    if tokenizer is not None:
        return measure_lengths(tokenizer, examples, targets, answers_can_be_lost=False)
    texts = ([one.inputs for one in examples], targets)
    inputs, learned = (np.array(estimate_lengths(model, part)) for part in texts)
    return TokenLengths(inputs, inputs, inputs, learned)


def _list_warnings(plan: StartPlan, bad: Sequence[BadRecord]) -> Iterator[str]:
    """Yield what the user should look at in the data before training."""
    split = plan.split
    if split.given_up:
        remedy = ""
        if "group" in split.given_up:
            group = plan.reading.group_column
            remedy = f". To keep the same {group} in one: {shlex.join(['--column', f'group={group}'])}"
        yield (
            f"records with {plan.describe_relations(kept=False)} may be in several sets: all that relates records "
            f"would join {split.num_joined:,} of {split.num_records:,} into one group{remedy}"
        )
    if bad:
        yield f"{_count_records(len(bad), 'is', 'are')} left out; the first: {bad[0]}"
    if split.num_records < FEW:
        few = f"{split.num_records:,} records are few"
        yield f"{few}: scores of {plan.sizes['test']} test records are within wide intervals"
    labels = plan.label_counts
    found = (describe_merged_forms(labels, {}), describe_placeholders(labels, what="label"), *describe_rare(labels))
    yield from filter(None, found)
    inputs = plan.lengths.inputs
    share = (inputs > LONGEST).mean()
    if share > CUT and not plan.task.extractive:
        part = "middle" if plan.loses_middle else "end"
        yield (
            f"{100 * share:.0f} % of the inputs have more than {LONGEST} tokens, the longest "
            f"{inputs.max():,}, and lose their {part}. A higher data.max_input_tokens in the recipe keeps more, at the "
            "price of memory"
        )


def _describe_lost_characters(
    model: str, lost: Collection[str], examples: Sequence[TextExample], drawn_from: str
) -> Iterator[str]:
    """Describe the characters that the model's vocabulary lacks, if many inputs or some targets have one.

    Args:
        drawn_from: word before what the counts are of.
    """
    visible = {character for character in lost if not character.isspace()}
    others = "" if find_vocabulary(model) == "multilingual" else f"{MULTILINGUAL} or "
    remedy = f"give --model {others}google/byt5-small, or name them in the recipe's model.add_tokens"
    # others are read in another form, as "..." for the sign of three dots
    unseen = {character for character in visible if unicodedata.normalize("NFKC", character) == character}
    parts = {
        "inputs": (FOREIGN, unseen, f"the model does not see them. To keep them, {remedy}"),
        "targets": (MANY_LOST, visible, f"no answer can equal them. Write others for them, or {remedy}"),
    }
    for part, (share, lacking, words) in parts.items():
        # " \n " with a backslash is the separator of UnifiedQA's models
        texts = [text.replace(" \\n ", " ") for one in examples if (text := getattr(one, part))]
        num_hit = 0
        counts: Counter[str] = Counter()
        for text in texts:
            found = sorted(lacking.intersection(text))
            num_hit += bool(found)
            counts.update(found)
        if num_hit > share * len(texts):
            shown = " ".join(character for character, _ in counts.most_common(10))
            yield (
                f"{num_hit:,} of {len(texts):,} {drawn_from}{part} hold characters that the vocabulary of {model} "
                f"lacks, such as {shown}: {words}"
            )


def read_sets(plan: StartPlan) -> Iterator[tuple[str, JsonTable]]:
    """Yield (set, record) of all usable records, in the order of the source."""
    for _, record, _ in read_examples(plan.table, plan.reading, plan.task, ignore_bad_record):
        yield plan.split.find_set(record), {name: replace_empty_cell(value) for name, value in record.fields.items()}
