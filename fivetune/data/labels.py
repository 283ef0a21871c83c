"""Read the label set of a classification task from its data, and describe what is odd about labels and answers.

In: sources and the task. Out: label -> target word, in sorted order.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from fivetune.data.readers.records import ignore_bad_record, read_records
from fivetune.data.readers.source_files import quote_value
from fivetune.errors import ConfigError
from fivetune.tasks import INVISIBLE_IN_LABELS, LABEL_FORM, normalize_label
from fivetune.tasks.classification import Classification
from fivetune.types import JsonTable, TextExample

MAX_LABELS = 1_000
NEARLY_ALL = 0.9  # share of records with one label, from which on accuracy means little
RARE, MISSPELT = 10, 0.8  # records of a rare label; similarity of a misspelling
MAX_TOLD = 5  # labels, and forms of a label, that a sentence lists
PLACEHOLDERS = frozenset(
    ("None", "NONE", "null", "NULL", "Null", "N/A", "n/a", "NA", "<NA>", "#N/A", "nan", "NaN", "NAN", "NaT")
)
"""What pandas, databases and spreadsheets write for an empty cell; people write "none", so it is not among them."""

UNEVEN = 10  # ratio of the most frequent label's examples to the rarest one's, from which on labels are uneven


def read_label_set(
    task: Classification,
    sources: Sequence[str],
    columns: Mapping[str, str],
    *,
    header: Sequence[str] = (),
    max_records: int | None = None,
) -> dict[str, str]:
    """Return the labels of some files in sorted order, each with itself as target word.

    Of spellings that differ in case, white space or invisible characters the most frequent one counts. Raises
    ConfigError for fewer than two labels, or for more than MAX_LABELS: such a column is no label.
    """
    writings: dict[str, Counter[str]] = defaultdict(Counter)  # normalised label -> the forms in the data
    num_read = 0
    for source in sources:
        for record in read_records(source, columns=columns, header=header, on_bad=ignore_bad_record):
            if num_read == max_records:
                break
            num_read += 1
            text = task.read_label(record)
            if text:
                writings[normalize_label(text)][text] += 1
        if len(writings) > MAX_LABELS:
            raise ConfigError(
                f"task.label: the column {task.label!r} holds more than {MAX_LABELS:,} different texts. A label is one "
                "of a few. Name the column of the label, or set task.name: jsonl for free text."
            )
    if len(writings) < 2:
        texts: list[str] = []
        for counts in writings.values():
            texts += map(repr, counts)
        held = ", ".join(texts) or "no label"
        raise ConfigError(
            f"task.label: the column {task.label!r} of {', '.join(sources)} holds {held}. A classification needs two "
            "labels or more. Name the column of the label with task.label."
        )
    return {label: label for label in sorted(map(choose_form, writings.values()))}


def choose_form(counts: Mapping[str, int]) -> str:
    """Choose the form of a label that counts as the label: the most frequent one, without invisible characters.

    >>> choose_form({"yes": 5, "Yes": 10}), choose_form({"yes": 5, "y\u200bes": 10})
    ('Yes', 'yes')
    """
    return min(counts, key=lambda text: (bool(INVISIBLE_IN_LABELS.search(text)), -counts[text], text))


def merge_label_forms(sets: Sequence[Sequence[TextExample]]) -> list[list[TextExample]]:
    """Merge the forms of each label, as training does that reads the labels from the first set.

    The label replaces its form, which `meta` keeps, in the references and the target of each example.
    """
    labels: dict[str, str] = {}
    for examples in sets:
        forms: dict[str, Counter[str]] = defaultdict(Counter)
        for example in examples:
            if example.references:
                forms[normalize_label(example.references[0])][example.references[0]] += 1
        for group, counts in forms.items():
            labels.setdefault(group, choose_form(counts))  # the first set decides

    def merge(example: TextExample) -> TextExample:
        if not example.references:
            return example
        form = example.references[0]
        label = labels[normalize_label(form)]
        if form == label:
            return example
        return replace(example, targets=label, references=(label,), meta={LABEL_FORM: form, **example.meta})

    return [list(map(merge, examples)) for examples in sets]


def get_label_form(example: TextExample) -> str:
    """Return the gold label of an example as its record has it."""
    return str(example.meta.get(LABEL_FORM, example.references[0]))


def count_label_forms(examples: Sequence[TextExample]) -> JsonTable:
    """Count the forms in the data of each label that has several or another one, the most frequent first."""
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for example in examples:
        if example.references:
            forms[example.references[0]][get_label_form(example)] += 1
    told: JsonTable = {}
    for label, own in forms.items():
        if set(own) != {label}:
            told[label] = list(map(list, own.most_common()))
    return told


def describe_merged_forms(counts: Mapping[str, int], forms: Mapping[str, int]) -> str:
    """Return a sentence on labels that the data has in several forms, which count as one label, else "".

    Args:
        counts: records by label.
        forms: records by the form in the data, as far as it differs from the label.

    >>> print(describe_merged_forms({"yes": 50, "no": 40}, {"Yes": 8, "yes\u200b": 4}).replace(": ", "\\n", 1))
    forms that differ only in case, white space or invisible characters count as one label
    'yes' (38 records), 'Yes' (8), 'yes\\u200b' (4); rename those that are another label
    >>> describe_merged_forms({"yes": 50}, {"YES": 50})
    ''
    """
    merged: dict[str, Counter[str]] = defaultdict(Counter)
    for form, num in forms.items():
        merged[normalize_label(form)][form] += num
    # The records of a label include those of its forms: what is left has the label's own form.
    others = {group: own.total() for group, own in merged.items()}
    for label, num in counts.items():
        group = normalize_label(label)
        merged[group][label] += num - others.get(group, 0)
    several: list[Counter[str]] = []
    for own in merged.values():
        present = +own  # without forms of no record
        if len(present) > 1:
            several.append(present)
    several.sort(key=lambda own: (-own.total(), min(own)))
    if not several:
        return ""
    told = "; ".join(_list_counts(own) for own in several[:MAX_TOLD])
    more = f"; and {len(several) - MAX_TOLD:,} more labels" if len(several) > MAX_TOLD else ""
    return (
        f"forms that differ only in case, white space or invisible characters count as one label: {told}{more}; rename "
        "those that are another label"
    )


def describe_rare(counts: Mapping[str, int]) -> list[str]:
    """Return sentences on labels of few records, perhaps misspelt or only rare, and on a label of nearly all records.

    Args:
        counts: records by the form of the label in the data.
    """
    # Forms that differ in case or white space are one label, as in training.
    forms: dict[str, dict[str, int]] = {}
    for form, count in counts.items():
        forms.setdefault(normalize_label(form), {})[form] = count
    labels = {choose_form(own): sum(own.values()) for own in forms.values()}
    misspelt = find_misspelt_labels(labels)
    found: list[str] = []
    if misspelt:
        pairs = [f"{label!r} ({labels[label]}) for {meant!r}" for label, meant in misspelt.items()]
        shown = ", ".join(pairs[:MAX_TOLD])
        found.append(f"labels that may be misspelt: {shown}. Correct them: the model learns them as they are")
    rare = [repr(label) for label, count in labels.items() if count < RARE and label not in misspelt]
    if rare:
        number = f"{len(rare)} labels have" if len(rare) > 1 else "1 label has"
        found.append(
            f"{number} less than {RARE} records ({', '.join(rare[:MAX_TOLD])}): their scores mean little. Collect more"
        )
    for label, count in Counter(labels).most_common(1):
        if count >= NEARLY_ALL * sum(labels.values()):
            found.append(
                f"{label!r} has {100 * count / sum(labels.values()):.1f} % of the records: answering it always is "
                "right as often, so accuracy means little. Look at macro_f1, and collect more of the others"
            )
    return found


def find_misspelt_labels(counts: Mapping[str, int]) -> dict[str, str]:
    """Find rare labels that look like a misspelling of a label at least ten times as frequent; rare -> frequent label.

    Both begin with the same letter, have the same digits and signs, and a difflib ratio of MISSPELT or more. Codes and
    flags are no misspellings: the words that differ have four letters, words in capitals seven.

    >>> find_misspelt_labels({"Rückgabe": 90, "Rueckgabe": 1, "happy": 80, "unhappy": 3, "grade 1": 60, "grade 2": 2})
    {'Rueckgabe': 'Rückgabe'}
    >>> find_misspelt_labels({"4i": 90, "4is": 1, "high": 80, "high+": 2, "type II": 60, "type I": 2, "VVFIN": 50})
    {}
    """
    found: dict[str, str] = {}
    by_count = sorted(counts, key=counts.__getitem__)
    for label, count in counts.items():
        if count >= RARE:
            continue
        for meant in by_count:  # the most frequent one is the last, and stays
            if counts[meant] >= 10 * count and _is_like(label, meant):
                found[label] = meant
    return found


def _is_like(label: str, meant: str) -> bool:
    """Return whether a label looks like a misspelling of another one."""
    signs = r"\d|[^\w\s.'’-]"
    if label[:1].casefold() != meant[:1].casefold() or re.findall(signs, label) != re.findall(signs, meant):
        return False
    words = re.findall(r"[^\W_]+", label)
    others = re.findall(r"[^\W_]+", meant)
    if len(words) == len(others) and words != others:
        num_misspelt = 0
        for word, other in zip(words, others, strict=True):
            least = 7 if other.isupper() else 4
            num_misspelt += word != other and min(len(word), len(other)) >= least
        if not num_misspelt:  # only codes and flags differ
            return False
    return SequenceMatcher(None, label.casefold(), meant.casefold()).ratio() >= MISSPELT


def find_placeholder_input(example: TextExample) -> str:
    """Find what a program wrote for an empty cell as the whole text of an example, its instruction aside; else ""."""
    text = example.inputs[slice(*example.clippable)].strip()
    if text in PLACEHOLDERS:
        return text
    return ""


def describe_placeholders(counts: Mapping[str, int], *, what: str) -> str:
    """Return a sentence on gold answers or inputs that programs write for an empty cell, else "".

    Args:
        counts: records by text, of which only the PLACEHOLDERS matter.
        what: "label", "answer" or "input".

    >>> describe_placeholders({"None": 3, "late": 90}, what="label")
    "3 records have a label that programs write for an empty cell: 'None' (3 records); it counts as a label"
    """
    found = Counter({text: num for text, num in counts.items() if text in PLACEHOLDERS})
    if not found:
        return ""
    article = "a" if what == "label" else "an"
    records = "1 record has" if found.total() == 1 else f"{found.total():,} records have"
    return (
        f"{records} {article} {what} that programs write for an empty cell: {_list_counts(found)}; "
        f"it counts as {article} {what}"
    )


def _list_counts(counts: Counter[str]) -> str:
    """List texts with their number of records, the most frequent first.

    >>> _list_counts(Counter({"yes": 1, "Yes": 2}))
    "'Yes' (2 records), 'yes' (1)"
    """
    pairs = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{quote_value(text)} ({num:,})" for text, num in pairs[:MAX_TOLD]]
    shown[0] = f"{shown[0][:-1]} {'record' if pairs[0][1] == 1 else 'records'})"
    return ", ".join(shown) + (" and others" if len(counts) > MAX_TOLD else "")


def describe_imbalance(counts: Mapping[str, int]) -> str:
    """Return a sentence if the most frequent label is UNEVEN times as frequent as the rarest or more, else "".

    >>> print(describe_imbalance({"high": 700, "low": 50}).replace("; ", "\\n"))
    labels are uneven: high has 93.3 % of 750 examples, low 6.7 %
    accuracy rewards high, macro_f1 weighs all alike, as loss.class_weights: balanced does in training
    >>> describe_imbalance({"high": 60, "low": 40})
    ''
    """
    if not counts or max(counts.values()) < UNEVEN * max(min(counts.values()), 1):
        return ""
    most = max(counts, key=counts.__getitem__)
    least = min(counts, key=counts.__getitem__)
    total = sum(counts.values())
    return (
        f"labels are uneven: {most} has {counts[most] / total:.1%} of {total:,} examples, "
        f"{least} {counts[least] / total:.1%}; accuracy rewards {most}, macro_f1 weighs all alike, "
        "as loss.class_weights: balanced does in training"
    ).replace("%", " %")
