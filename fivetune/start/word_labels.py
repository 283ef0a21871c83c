"""Labels of words in a table: lists with a value for each word of a text, or of its list of words, such as BIO tags.

In: a Survey. Out: the columns of the words and of their labels, which no reading of whole texts may take for its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import and_
from typing import NamedTuple

from fivetune.start.columns import as_text, read_list
from fivetune.start.roles import CLEAR, INNER, USUAL
from fivetune.start.survey import LEARNED, SAMPLE, Reading, Survey

MIN_LENGTH = 4  # mean values of lists that belong to words: fewer may be answers or tags
ALIKE = 0.9  # share of records whose lists are as long
PART = re.compile(r"\w+|[^\w\s]")  # words and signs, as tokenizers of word labels divide a text


class WordLabels(NamedTuple):
    """The columns of a table whose texts have a label for each word.

    Args:
        words: the text, or the list of words, that the labels belong to.
        lists: all lists with a value for each word; a list of the words is among them.
        labels: the lists of labels.
    """

    words: str
    lists: Sequence[str]
    labels: Sequence[str]

    def is_guess(self, survey: Survey, reading: Reading) -> bool:
        """Whether a reading learns a list of these or a part of an annotation, or a column that the user did not name
        and whose name leaves doubts, such as the source of a text.
        """
        least = CLEAR if reading.task == "classification" else USUAL
        for name in reading.targets:
            is_known = survey.is_given(name) or (".0." not in name and survey.rate(name, *LEARNED) >= least)
            if name in self.lists or not is_known:
                return True
        return False


def find_word_labels(survey: Survey) -> WordLabels | None:
    """Find the lists that have a value for each word; None if there are no labels among them."""
    lists = {name: values for name in survey.columns if (values := _read_words(survey, name))}
    if not lists:
        return None
    # column -> the lengths that each record may have: lists in their items, texts in words, tokens or letters
    sizes = {name: [{len(value)} for value in values] for name, values in lists.items()}
    texts: dict[str, list[str]] = {}
    for name, column in survey.columns.items():
        if column.has_text:
            texts[name] = [as_text(value) for value in survey.table.list_values(name, SAMPLE)]
            sizes[name] = [{len(text.split()), len(PART.findall(text)), len(text)} for text in texts[name]]
    for words in (*texts, *lists):
        # lists as long as one that is as long as the words belong to them, too
        known = [words, *_list_alike(sizes, lists, [words])]
        every = _list_alike(sizes, lists, known)
        items = {name: {*chain.from_iterable(lists[name])} for name in every}
        if words in texts:
            text = "\n".join(texts[words])
            said = {*text.split(), *PART.findall(text), *(letter for letter in text if not letter.isascii())}
            spoken = [name for name in every if len(items[name] & said) > len(items[name]) / 2]
        else:
            # the words themselves are the list of the most different texts
            of_texts = [name for name in every if all(isinstance(item, str) for item in items[name])]
            if not of_texts:
                continue
            words = max(of_texts, key=lambda name: len(items[name]))
            spoken = [words]
        labels = [name for name in every if name not in spoken]
        if labels:
            return WordLabels(words, every, labels)
    return None


def _list_alike(sizes: Mapping[str, Sequence[set[int]]], lists: Iterable[str], names: Sequence[str]) -> list[str]:
    """List the lists that have a length in common with one of some columns in nearly all records."""
    found: list[str] = []
    for one in lists:
        for name in names:
            num_equal = sum(map(bool, map(and_, sizes[one], sizes[name])))
            if num_equal >= ALIKE * len(sizes[one]):
                found.append(one)
                break
    return found


def _read_words(survey: Survey, name: str) -> list[Sequence[object]]:
    """Read the lists of a column whose items are single words or numbers; none of others, or of short ones."""
    if not survey.columns[name].has_lists or name.endswith(".*"):
        return []
    values = [read_list(value) or () for value in survey.table.list_values(name, SAMPLE)]
    items = [*chain.from_iterable(values)]
    is_plain = all(isinstance(item, str | int) and " " not in str(item).strip() for item in items)
    return values if is_plain and len(items) >= MIN_LENGTH * len(values) else []


def iter_ways(survey: Survey, found: WordLabels) -> Iterator[Mapping[str, Sequence[str]]]:
    """Yield the columns by which what is marked in texts may be learned: the marked texts, else all labels."""
    words = found.words
    if words in found.lists:
        words = f"{words}.*"
    else:
        for name in survey.columns:
            stem = name.partition(".0.")[0]
            items: list[object] = []
            for value in survey.table.list_values(stem, SAMPLE):
                items += read_list(value) or ()
            for member in INNER.split():
                if items and all(isinstance(item, Mapping) and isinstance(item.get(member), str) for item in items):
                    yield {"text": [words], "tags": [f"{stem}.*.{member}"]}
    yield {"inputs": [words], "targets": [f"{found.labels[0]}.*"]}
