"""Split an evaluation set off the training records: seeded, grouped by related records, stratified by label.

In: the records with their examples. Out: the ids of the evaluation records.

Records are related if they share the value of the group column, their inputs, their context or their question; a group
of related records is never divided. An empty cell of the group column is no value. Where the examples of a record are
parts of one text, as of span corruption, they relate records together: two texts may end in the same few words.

Equal inputs and the group column always relate. A context, and then a question, relates its records only as far as the
group is no larger than the evaluation set, which could not hold it: chains of contexts with a common question, of
questions with common contexts, would join nearly all records. A chain by questions, the weakest relation, ends at a
fifth of the evaluation set, so that this consists of several groups.
Inputs and group column may still join nearly all records: a short text that recurs in each dialogue joins the
dialogues. A split in two then has another share, and says so; a split in three gives the weaker relation up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

import numpy as np

from fivetune.data.duplicates import normalize_text
from fivetune.errors import DataError
from fivetune.tasks import is_blank
from fivetune.types import JsonTable, RawRecord, TextExample

Converted = tuple[RawRecord, Sequence[TextExample]]
Relation = Literal["group", "inputs", "context", "question"]

RELATIONS: tuple[Relation, ...] = ("group", "inputs", "context", "question")
LEAST_OF_SHARE = 0.7  # share of the wanted records that a set holds, or a relation is given up
CHAINED_SHARE = 0.2  # share of the evaluation set that a chain of questions may join


@dataclass(frozen=True, slots=True)
class EvalSplit:
    """The settings of a split, and the side that a store holds.

    Args:
        share: share of the evaluation records, above 0 and below 1.
        seed: seed of the draw; not the run's, so that runs of several seeds are scored on the same records.
        group_column: records with the same value of this column stay on one side; null and blank are no value.
        max_records: number of records to split, from the first on; None: all.
    """

    side: Literal["train", "eval"]
    share: float
    seed: int = 0
    group_column: str | None = None
    max_records: int | None = None


@dataclass(frozen=True, slots=True)
class SplitResult:
    """Hashes of the evaluation records' ids, and the counts for data.json."""

    eval_ids: frozenset[int]
    num_records: int
    num_groups: int
    largest_group: int

    def is_on_side(self, record: RawRecord, side: str) -> bool:
        """Return whether a record is on `side`, "train" or "eval"."""
        return (hash_text(str(record.fields["id"])) in self.eval_ids) == (side == "eval")

    def as_dict(self, split: EvalSplit) -> JsonTable:
        return {
            "share": split.share,
            "seed": split.seed,
            "group_column": split.group_column,
            "num_records": self.num_records,
            "num_groups": self.num_groups,
            "largest_group": self.largest_group,
            "num_eval_records": len(self.eval_ids),
        }


@dataclass(frozen=True, slots=True)
class ThreeWaySplit:
    """Hashes of the ids of validation and test records, and the counts.

    Args:
        given_up: relations that relate no records, because with them one group held `num_joined` of the records.
    """

    validation_ids: frozenset[int]
    test_ids: frozenset[int]
    num_records: int
    num_groups: int
    given_up: Sequence[Relation] = ()
    num_joined: int = 0

    def find_set(self, record: RawRecord) -> Literal["train", "validation", "test"]:
        """Return the set of a record."""
        number = hash_text(str(record.fields["id"]))
        if number in self.test_ids:
            return "test"
        return "validation" if number in self.validation_ids else "train"


def hash_text(text: str) -> int:
    """Return the 8-byte BLAKE2b hash of a text, which is the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def split_records(
    converted: Iterable[Converted], split: EvalSplit, *, by_label: bool, by_whole: bool = False
) -> SplitResult:
    """Choose the evaluation side of some records: the wanted number, but for half of the smallest group left.

    Raises DataError if one side would be empty.

    Args:
        by_label: stratify, drawing `share` of the records of each gold label.
        by_whole: the examples of a record are parts of one text, and only all of them relate it to another.
    """
    ids, labels, relations = _find_relations(converted, split, by_label=by_label, by_whole=by_whole)
    groups = _join_related(relations, RELATIONS, split.share * len(ids))
    chosen = _draw_groups(groups, labels, split)
    largest = max(map(len, groups), default=0)
    if not chosen or len(chosen) == len(ids):
        raise DataError(
            f"data.eval_share: {split.share:g} of {len(ids):,} records in {len(groups):,} groups of related records, "
            f"the largest of {largest:,}, leaves one side empty. Records that share inputs, context, question or "
            "data.group_column stay together. Give another share, or data.eval."
        )
    return SplitResult(frozenset(ids[row] for row in chosen), len(ids), len(groups), largest)


def split_in_three(
    converted: Iterable[Converted], split: EvalSplit, *, by_label: bool, by_whole: bool = False, is_named: bool = True
) -> ThreeWaySplit:
    """Choose validation and test records, `share` of all for each; all other records are for training.

    Grouped and stratified as by `split_records`. A label is in no set but the training set unless that has it too.
    Where a group is so large that the sets miss their shares, the group column is given up, or equal inputs.
    Raises DataError if a set would be empty.

    Args:
        is_named: the user named the group column, so that equal inputs are given up before it.
    """
    ids, labels, relations = _find_relations(converted, split, by_label=by_label, by_whole=by_whole)
    wanted = split.share * len(ids)
    groups = _join_related(relations, RELATIONS, wanted)
    sets = _draw_two(groups, labels, split)
    given_up: list[Relation] = []
    largest = max(map(len, groups), default=0)
    # One group holds more records than a set: without the weaker relation it may fall apart.
    if largest > wanted and min(map(len, sets)) < LEAST_OF_SHARE * wanted:
        weaker: Relation = "inputs" if is_named and split.group_column else "group"
        kept: list[Relation] = [relation for relation in RELATIONS if relation != weaker]
        smaller = _join_related(relations, kept, wanted)
        drawn = _draw_two(smaller, labels, split)
        if min(map(len, drawn)) >= LEAST_OF_SHARE * wanted:
            groups = smaller
            sets = drawn
            given_up.append(weaker)
    validation = frozenset(ids[row] for row in sets[0])
    test = frozenset(ids[row] for row in sets[1])
    if not test or not validation or len(test) + len(validation) == len(ids):
        raise DataError(
            f"{len(ids):,} records in {len(groups):,} groups of related records cannot be divided into training, "
            "validation and test set: one would be empty. Records that share inputs, context, question or a group stay "
            "together. Name another group column, or collect more."
        )
    return ThreeWaySplit(validation, test, len(ids), len(groups), given_up, largest)


def _draw_two(groups: Sequence[Sequence[int]], labels: Sequence[str], split: EvalSplit) -> tuple[set[int], set[int]]:
    """Draw the rows of validation and test set; rows with a label that the training set lacks are in neither."""
    num_rows = sum(map(len, groups))
    test = set(_draw_groups(groups, labels, split))
    rest = [rows for rows in groups if rows[0] not in test]
    share = split.share * num_rows / max(1, num_rows - len(test))
    validation = set(_draw_groups(rest, labels, replace(split, share=share, seed=split.seed + 1)))
    held = test | validation
    trained = {label for row, label in enumerate(labels) if row not in held}
    for rows in groups:
        if any(labels[row] not in trained for row in rows):
            test.difference_update(rows)
            validation.difference_update(rows)
    return validation, test


def _find_relations(
    converted: Iterable[Converted], split: EvalSplit, *, by_label: bool, by_whole: bool
) -> tuple[list[int], list[str], list[list[tuple[int, Relation]]]]:
    """Return the hash of the id, the label and the relations of each record."""
    ids: list[int] = []
    labels: list[str] = []
    relations: list[list[tuple[int, Relation]]] = []
    for record, examples in converted:
        ids.append(hash_text(str(record.fields["id"])))
        labels.append(examples[0].references[0] if by_label and examples[0].references else "")
        relations.append(list(_iter_relations(record, examples, split.group_column, by_whole=by_whole)))
    return ids, labels, relations


def _iter_relations(
    record: RawRecord, examples: Sequence[TextExample], group_column: str | None, *, by_whole: bool
) -> Iterator[tuple[int, Relation]]:
    """Yield (hash of a property, what it is) of a record: group, inputs, contexts and questions."""
    if group_column is not None:
        if group_column not in record.fields:
            raise DataError(
                f"{record.where}: there is no column {group_column!r}, which data.group_column names. "
                f"Columns: {', '.join(map(str, record.fields))}. Correct data.group_column."
            )
        if not is_blank(record, group_column):
            yield hash_text(f"group {record.fields[group_column]}"), "group"
    if by_whole:
        whole = " ".join(f"{example.inputs} {example.targets}" for example in examples)
        yield hash_text(f"inputs {normalize_text(whole)}"), "inputs"
        return
    for example in examples:
        yield hash_text(f"inputs {normalize_text(example.inputs)}"), "inputs"
        if context := normalize_text(example.inputs[slice(*example.clippable)]):
            yield hash_text(f"context {context}"), "context"
        if question := normalize_text(str(example.meta.get("question") or "")):
            yield hash_text(f"question {question}"), "question"


def _join_related(
    relations: Sequence[Sequence[tuple[int, Relation]]], kept: Sequence[Relation], wanted: float
) -> list[list[int]]:
    """Return the rows of each group of related records, ordered by their first rows (union-find).

    Args:
        kept: the relations, the strongest first.
        wanted: records of the evaluation set.

    >>> rows = [[(1, "inputs")], [(2, "inputs")], [(1, "inputs"), (3, "context")], [(3, "context")]]
    >>> _join_related(rows, RELATIONS, wanted=3), _join_related(rows, RELATIONS, wanted=2)
    ([[0, 2, 3], [1]], [[0, 2], [1], [3]])
    """
    # The rows of each property that several have; most properties occur once and need no set.
    counts: Counter[int] = Counter()
    for own in relations:
        counts.update(key for key, _ in own)
    sharing: dict[Relation, dict[int, set[int]]] = {relation: {} for relation in RELATIONS}
    for row, own in enumerate(relations):
        for key, relation in own:
            if counts[key] > 1:
                sharing[relation].setdefault(key, set()).add(row)

    # Union-find: a row leads to its group's first row.
    parents = list(range(len(relations)))
    sizes = [1] * len(relations)

    def find_root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    # The strongest relation first: weaker ones join groups only as far as they stay small (see the head).
    for relation in kept:
        for rows in sharing[relation].values():
            roots = {find_root(row) for row in rows}
            size = sum(sizes[root] for root in roots)
            is_chain = relation == "question" and size > len(rows)
            most = max(2, round(wanted * CHAINED_SHARE if is_chain else wanted))
            if relation in ("group", "inputs") or size <= most:
                first = min(roots)
                sizes[first] = size
                for root in roots:
                    parents[root] = first
    groups: dict[int, list[int]] = defaultdict(list)
    for row in range(len(relations)):
        groups[find_root(row)].append(row)
    return list(groups.values())


def _draw_groups(groups: Sequence[Sequence[int]], labels: Sequence[str], split: EvalSplit) -> list[int]:
    """Draw the rows of the evaluation side: groups of each label in seeded order, as far as the share allows.

    The labels with the largest remainders fill up the share of all records: a label with few records has a wanted
    number below a half.
    """
    strata: dict[str, list[Sequence[int]]] = defaultdict(list)
    for rows in groups:
        [(label, _)] = Counter(labels[row] for row in rows).most_common(1)
        strata[label].append(rows)
    chosen: list[int] = []
    num_rows = sum(map(len, groups))
    left: list[tuple[float, Sequence[int]]] = []  # of each label, the share not drawn and the smallest group
    for number, label in enumerate(sorted(strata)):
        members = strata[label]
        wanted = split.share * sum(map(len, members))
        passed: list[Sequence[int]] = []
        for place in np.random.default_rng([split.seed, number]).permutation(len(members)):
            rows = members[place]
            if len(rows) <= wanted:
                chosen += rows
                wanted -= len(rows)
            else:
                passed.append(rows)
        if passed:
            left.append((wanted, min(passed, key=len)))
    order = np.random.default_rng([split.seed, len(strata)]).permutation(len(left))  # among equal remainders
    left = [left[place] for place in order]
    left.sort(key=lambda pair: -pair[0])
    for remainder, rows in left:
        if remainder > 0 and len(chosen) + len(rows) / 2 <= split.share * num_rows:  # closer to the share than without
            chosen += rows
    return chosen
