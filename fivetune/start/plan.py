"""Plan a recipe for a source: the task, the split into three sets, lengths, model, batch and number of epochs.

In: a source, and what its user named. Out: a StartPlan: the settings with their reasons, and the set of each record.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from fivetune.data.characters import measure_coverage
from fivetune.data.labels import choose_form
from fivetune.data.records import UniqueIds, as_bad_record, read_records
from fivetune.data.source_files import BadRecord
from fivetune.data.split import EvalSplit, ThreeWaySplit, split_in_three
from fivetune.data.tables import replace_empty_cell
from fivetune.errors import DataError
from fivetune.start.choose import Choice, infer_task
from fivetune.start.columns import RawTable, build_table, find_foreign_share, find_value, is_empty_cell
from fivetune.start.readings import Reading
from fivetune.tasks import load_task, normalize_label
from fivetune.types import JsonTable, RawRecord, Task, TextExample

MODEL = "google-t5/t5-small"
MULTILINGUAL = "google/mt5-small"
SEED = 0
SET_SHARE, MIN_SET, MAX_SET = 0.1, 50, 2_000  # of validation and test set each; a fifth of the records at most
CHARS_PER_TOKEN = 3  # T5's tokenizer has about 4 characters of English text per token: 3 is on the safe side
INPUT_LIMIT, TARGET_LIMIT = 512, 512
SAMPLE = 2_000  # examples whose tokens and characters are counted
MIN_STEPS, MAX_EPOCHS, MIN_EPOCHS = 300, 20, 3
FOREIGN = 0.1  # share of letters or texts from which on T5's vocabulary does not suit
RARE, MISSPELT = 10, 0.8  # records of a rare label; similarity of a misspelling

T5_LETTERS = "ÉÎÜßàáâäçèéêîóôöùûüăşţșț"  # beside ASCII: English, German, French, Romanian

SETS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of inputs and targets, measured with the model's tokenizer or estimated from characters."""

    inputs: Sequence[int]
    targets: Sequence[int]
    is_measured: bool


@dataclass(slots=True)
class StartPlan:
    """Everything that the recipe and its three files are written from."""

    source: str
    table: RawTable
    choice: Choice
    task: Task
    model: str
    model_reason: str
    split: ThreeWaySplit
    sizes: Mapping[str, int]
    label_counts: Mapping[str, int]
    lengths: Lengths
    warnings: list[str] = field(default_factory=list)
    num_left_out: int = 0

    @property
    def reading(self) -> Reading:
        return self.choice.reading

    def describe_relations(self, *, kept: bool = True) -> str:
        """Describe what records of one set may have in common; with `kept` false, what does not keep them together."""
        names = {"inputs": "equal inputs", "context": "equal contexts", "question": "equal questions"}
        if self.split.group_column:
            names["group"] = f"the same {self.split.group_column}"
        found = [name for relation, name in names.items() if (relation in self.split.given_up) != kept]
        return " or ".join(found)


class RecordSource:
    """Reads the records of a source that the task can use, always the same ones; counts the others."""

    def __init__(self, table: RawTable, reading: Reading, task: Task) -> None:
        self.table, self.reading, self.task = table, reading, task
        self.bad: list[BadRecord] = []
        self.num_skipped = 0

    def read(self) -> Iterator[tuple[RawRecord, RawRecord, Sequence[TextExample]]]:
        """Yield (record with the source's columns and a unique id, the task's record, its examples)."""
        self.bad, self.num_skipped = [], 0
        ids, columns = UniqueIds(), {"id": self.reading.id_column} if self.reading.id_column else {}
        source, header = self.table.source, self.table.header
        for read in read_records(source, columns=columns, header=header, on_bad=self.bad.append):
            record = ids.number(read)
            try:
                named = rename_columns(record, self.reading.columns)
                converted = self.task.to_text(named)
            except DataError as error:
                self.bad.append(as_bad_record(error, record))
                continue
            examples = converted if isinstance(converted, tuple) else (converted,) if converted else ()
            if examples:
                yield record, named, examples
            else:
                self.num_skipped += 1


class ExampleSample:
    """A seeded sample of SAMPLE of the examples that are added, and the one with the longest target (reservoir)."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sampled: list[TextExample] = []
        self._longest: TextExample | None = None
        self._num_added = 0

    def add(self, example: TextExample) -> None:
        self._num_added += 1
        place = self._random.randrange(self._num_added)
        if len(self._sampled) < SAMPLE:
            self._sampled.append(example)
        elif place < SAMPLE:
            self._sampled[place] = example
        if self._longest is None or len(example.targets) > len(self._longest.targets):
            self._longest = example

    def list_examples(self) -> list[TextExample]:
        return [*self._sampled, *([self._longest] if self._longest and self._longest not in self._sampled else [])]


def rename_columns(record: RawRecord, columns: Mapping[str, str]) -> RawRecord:
    """Apply data.columns to a record, as `read_records` does."""
    from fivetune.data.records import parse_item

    renamed = parse_item(record, columns, {}, str(record.fields["id"]))
    if isinstance(renamed, BadRecord):
        raise DataError(f"{renamed.where}: {renamed.reason}")
    return renamed


def build_plan(
    source: str,
    *,
    task: str | None = None,
    model: str | None = None,
    given: Mapping[str, str],
    load_tokenizer: Callable[[str], object | None],
    seed: int = SEED,
    header: Sequence[str] = (),
) -> StartPlan:
    """Plan the recipe of a source. Raises DataError for data without a task, ConfigError for a wrong name.

    Args:
        load_tokenizer: returns the tokenizer of a model that is on this machine, else None.
    """
    bad: list[BadRecord] = []
    table = build_table(source, read_records(source, header=header, on_bad=bad.append), bad, header)
    choice = infer_task(table, task=task, given=given)
    reading = choice.reading
    loaded = load_task(reading.task, reading.options)
    reader = RecordSource(table, reading, loaded)
    sample = ExampleSample(seed)
    labels: Counter[str] = Counter()
    ids: list[RawRecord] = []

    def convert() -> Iterator[tuple[RawRecord, Sequence[TextExample]]]:
        for record, named, examples in reader.read():
            ids.append(RawRecord({"id": record.fields["id"]}, record.where))
            sample.add(examples[0])
            if loaded.labels is not None and examples[0].references:
                labels[examples[0].references[0]] += 1
            own_id, fields = record.fields["id"], dict(named.fields)
            if (name := reading.group_column) is not None:
                value = find_value(record.fields, name)
                fields[name] = f"id {own_id}" if is_empty_cell(value) else value  # a blank cell relates no records
            yield RawRecord({**fields, "id": own_id}, record.where), examples

    num_total = sum(1 for _ in read_records(source, header=header, on_bad=lambda bad: None))
    division = EvalSplit("eval", choose_set_share(num_total), seed, reading.group_column)
    try:
        by_label = loaded.labels is not None
        split = split_in_three(convert(), division, by_label=by_label, is_named="group" in given)
    except DataError as error:
        raise DataError(f"{source}: {_explain_unusable(reader, ids) or error}") from None
    if why := _explain_unusable(reader, ids):
        raise DataError(f"{source}: {why}")
    sizes = Counter(split.find_set(record) for record in ids)
    sampled = sample.list_examples()
    name, reason, tokenizer = _choose_model(model, sampled, load_tokenizer)
    plan = StartPlan(
        *(source, table, choice, loaded, name, reason, split, {one: sizes[one] for one in SETS}, labels),
        lengths=count_lengths(sampled, tokenizer),
        num_left_out=len(reader.bad),
    )
    plan.warnings = [*reading.warnings, *_list_warnings(plan, reader, sampled, tokenizer)]
    return plan


def choose_set_share(num_records: int) -> float:
    """Choose the share of validation and test set each: a tenth, more of few records, 2,000 of many.

    >>> [round(choose_set_share(number) * number) for number in (100, 600, 100_000)]
    [20, 60, 2000]
    """
    share = min(0.2, max(SET_SHARE, MIN_SET / max(1, num_records)))
    return min(share, MAX_SET / max(1, num_records))


def count_lengths(examples: Sequence[TextExample], tokenizer: object | None) -> Lengths:
    """Count tokens with a tokenizer, the end token included; without one estimate them from characters."""
    inputs, targets = [one.inputs for one in examples], [one.targets for one in examples if one.targets]
    if tokenizer is None:
        counts = [[math.ceil(len(text) / CHARS_PER_TOKEN) + 1 for text in texts] for texts in (inputs, targets)]
    else:
        counts = [[len(ids) for ids in _encode(tokenizer, texts)] for texts in (inputs, targets)]
    return Lengths(sorted(counts[0]), sorted(counts[1]), tokenizer is not None)


def _encode(tokenizer: object, texts: Sequence[str]) -> Iterable[Sequence[int]]:
    return tokenizer(list(texts), verbose=False)["input_ids"] if texts else []  # pyright: ignore


def find_percentile(lengths: Sequence[int], share: float) -> int:
    """Return the length that `share` of the sorted lengths do not exceed; 0 without any.

    >>> find_percentile([1, 2, 3, 4], 0.5), find_percentile([], 0.5)
    (2, 0)
    """
    return lengths[max(0, math.ceil(share * len(lengths)) - 1)] if lengths else 0


def _choose_model(
    model: str | None, examples: Sequence[TextExample], load_tokenizer: Callable[[str], object | None]
) -> tuple[str, str, object | None]:
    """Return the model, the reason and its tokenizer, if that is on this machine."""
    if model is not None:
        return model, "named with --model", load_tokenizer(model)
    texts = [text for one in examples for text in (one.inputs, one.targets)]
    share, script = find_foreign_share(texts[:400])
    if share >= FOREIGN:
        reason = f"{share:.0%} of the letters are {script}, which T5's vocabulary lacks; mT5's has 101 languages"
        return MULTILINGUAL, reason, load_tokenizer(MULTILINGUAL)
    lost = Counter(letter for text in texts for letter in {*text} if letter.isalpha() and not is_in_t5(letter))
    if lost and lost.most_common(1)[0][1] >= FOREIGN * len(examples):
        letters = " ".join(letter for letter, _ in lost.most_common(5))
        reason = f"T5's vocabulary lacks letters of these texts, such as {letters}; mT5's has 101 languages"
        return MULTILINGUAL, reason, load_tokenizer(MULTILINGUAL)
    return MODEL, "the smallest T5 that is useful: trains on a CPU too", load_tokenizer(MODEL)


def is_in_t5(letter: str) -> bool:
    """Whether T5's vocabulary has a letter; known for Latin ones up to U+024F, as its tokenizer.json keeps them.

    >>> is_in_t5("ä"), is_in_t5("ñ")
    (True, False)
    """
    return letter.isascii() or letter in T5_LETTERS


def _explain_unusable(reader: RecordSource, usable: Sequence[RawRecord]) -> str:
    """Return why most records cannot be used, else ""; those that the task leaves out on purpose do not count."""
    if len(usable) >= len(reader.bad):
        return ""
    num_read = len(usable) + len(reader.bad) + reader.num_skipped
    first = reader.bad[0]
    return f"{len(usable):,} of {num_read:,} records can be used; the first that cannot: {first.where}: {first.reason}"


def _list_warnings(
    plan: StartPlan, reader: RecordSource, examples: Sequence[TextExample], tokenizer: object | None
) -> Iterator[str]:
    """Yield what the user should look at before training."""
    num_usable = plan.split.num_records
    split = plan.split
    if split.given_up:
        group = split.group_column
        remedy = f". To keep the same {group} in one: --column group={group}" if "group" in split.given_up else ""
        yield (
            f"records with {plan.describe_relations(kept=False)} may be in several sets: all that relates records "
            f"would join {split.num_joined:,} of {split.num_records:,} into one group{remedy}"
        )
    if reader.bad:
        first = reader.bad[0]
        number = f"{len(reader.bad):,} records are" if len(reader.bad) > 1 else "1 record is"
        yield f"{number} left out; the first: {first.where}: {first.reason}"
    if num_usable < 200:
        yield f"{num_usable:,} records are few: scores of {plan.sizes['test']} test records are within wide intervals"
    labels = _count_labels(plan.label_counts)
    misspelt = find_misspelt_labels(labels)
    if misspelt:
        shown = ", ".join(f"{label!r} ({labels[label]}) for {meant!r}" for label, meant in list(misspelt.items())[:5])
        yield f"labels that may be misspelt: {shown}. Correct them in {plan.source}: the model learns them as they are"
    if rare := [label for label, count in labels.items() if count < RARE and label not in misspelt]:
        shown = ", ".join(repr(label) for label in rare[:5])
        number = f"{len(rare)} labels have" if len(rare) > 1 else "1 label has"
        yield f"{number} less than 10 records ({shown}): their scores mean little. Collect more"
    if tokenizer is not None:
        texts = [text for one in examples for text in (one.inputs, one.targets)]
        coverage = measure_coverage(tokenizer, texts)  # pyright: ignore
        lost = "".join(one.character for one in coverage.lossy[:10] if not one.character.isspace())
        if coverage.num_texts_hit > FOREIGN * len(examples) and lost:
            yield (
                f"the tokenizer of {plan.model} does not represent all characters of {coverage.num_texts_hit:,} of "
                f"{len(texts):,} texts, such as {lost}. --model {MULTILINGUAL} or google/byt5-small would"
            )


def _count_labels(counts: Mapping[str, int]) -> dict[str, int]:
    """Count the forms of a label that differ in case or white space as one, as training does."""
    forms: dict[str, dict[str, int]] = {}
    for label, count in counts.items():
        forms.setdefault(normalize_label(label), {})[label] = count
    return {choose_form(of_one): sum(of_one.values()) for of_one in forms.values()}


def find_misspelt_labels(counts: Mapping[str, int]) -> dict[str, str]:
    """Find rare labels that look like a misspelling of one at least ten times as frequent; label -> that one.

    Both begin with the same letter, have the same digits, and a difflib ratio of MISSPELT or more.

    >>> find_misspelt_labels({"Rückgabe": 90, "Rueckgabe": 1, "happy": 80, "unhappy": 3, "grade 1": 60, "grade 2": 2})
    {'Rueckgabe': 'Rückgabe'}
    """
    found: dict[str, str] = {}
    for label, count in counts.items():
        likely = [one for one, number in counts.items() if count < RARE and number >= 10 * count]
        for meant in sorted(likely, key=counts.__getitem__, reverse=True):
            pair = label.casefold(), meant.casefold()
            is_like = pair[0][:1] == pair[1][:1] and re.findall(r"\d", pair[0]) == re.findall(r"\d", pair[1])
            if is_like and SequenceMatcher(None, *pair).ratio() >= MISSPELT:
                found[label] = meant
                break
    return found


def read_sets(plan: StartPlan) -> Iterator[tuple[str, JsonTable]]:
    """Yield (set, record) of all usable records, in the order of the source."""
    for record, _, _ in RecordSource(plan.table, plan.reading, plan.task).read():
        yield plan.split.find_set(record), {name: replace_empty_cell(value) for name, value in record.fields.items()}
