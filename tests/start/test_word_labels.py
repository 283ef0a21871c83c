"""Labels of words: they are refused with a way that works, whatever stands beside them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

import pytest

from fivetune.errors import DataError
from fivetune.start.choose import infer_task
from fivetune.start.columns import RawTable, build_table
from fivetune.start.roles import parse_columns
from fivetune.types import RawRecord

TOWNS = ("Oslo", "Rome", "Bonn")


def make_words(i: int) -> list[str]:
    return f"Ann{i % 7} flew to {TOWNS[i % 3]} on day {i}".split() + ["with", "her", "hat"][: i % 4] + ["."]


def make_tags(i: int) -> list[str]:
    return ["B-PER", "O", "O", "B-LOC"] + ["O"] * (len(make_words(i)) - 4)


def make_table(*names: str) -> RawTable:
    records: list[RawRecord] = []
    for i in range(40):
        words, tags = make_words(i), make_tags(i)
        values: dict[str, object] = {
            "tokens": words,
            "text": " ".join(words),
            "joined": " ".join(words).replace(" .", "."),
            "ner_tags": tags,
            "numbers": [("O", "B-PER", "B-LOC").index(tag) for tag in tags],
            "short": [tag[0] for tag in tags],
            "written": str(tags),
            "pos_tags": [("x", "y", "z")[len(word) % 3] for word in words],
            "entities": [{"start": 0, "end": 4, "label": "PER", "text": words[0]}],
            "letters": f"我在北京市工作了{'很' * (i % 5)}长时间{chr(0x4E00 + i)}",
            "by_letter": ["O", "O", "B", "I", "I", *"OOO", *("O" * (i % 5)), *"OOOO"],
        }
        facts = {one: f"{one}{i % 2}" for one in ("domain", "source_type", "split", "topic", "intent", "label", "lang")}
        own: dict[str, object] = {"id": f"a-{i}"}
        own |= {name.partition("=")[0]: {**values, **facts}[name.partition("=")[2] or name] for name in names}
        records.append(RawRecord(own, f"a.jsonl:{i + 1}", False))
    return build_table("a.jsonl", records)


@pytest.mark.parametrize(
    "names",
    [
        ("tokens", "ner_tags"),
        ("tokens", "ner_tags", "domain"),
        ("text", "ner_tags", "source_type"),
        ("sentence=text", "tags=ner_tags", "split"),
        ("text", "tokens", "ner_tags", "entities", "source_type"),
        ("text=joined", "words=tokens", "labels=ner_tags", "topic"),
        ("text", "labels=numbers", "domain"),
        ("tokens", "ner_tags=numbers", "pos_tags", "topic"),
        ("text", "ner_tags=written", "domain"),
        ("sentence=text", "labels=ner_tags", "lang"),
        ("text=letters", "labels=by_letter", "domain"),
        ("text", "tags=short", "domain"),
    ],
)
def test_labels_of_words_are_refused_with_a_way_that_works(names: Sequence[str]) -> None:
    table = make_table(*names)
    with pytest.raises(DataError, match="learns texts, not labels of words") as caught:
        infer_task(table)
    found = re.search(r"What works: (.*)\.$", str(caught.value))
    assert found
    given = parse_columns(shlex.split(found[1])[1::2])
    assert ("tags" in given) == ("entities" in names)
    assert infer_task(table, given=given).targets == [*[*given.values()][1]]


def test_a_list_as_long_as_its_text_is_not_several_answers() -> None:
    for role in ("targets", "tags"):
        with pytest.raises(DataError, match="ner_tags has a value for each word of text"):
            infer_task(make_table("text", "ner_tags", "domain"), given={role: ["ner_tags"]})


@pytest.mark.parametrize(
    ("names", "given", "target"),
    [
        (("text", "slots=ner_tags", "intent"), {"label": ["intent"]}, "intent"),
        (("text", "tokens", "label"), {}, "label"),
        (("text", "tokens", "ner_tags", "label"), {}, "label"),
        (("text", "ner_tags", "domain"), {"label": ["domain"]}, "domain"),
    ],
)
def test_labels_of_texts_beside_those_of_words_are_learned(
    names: Sequence[str], given: dict[str, Sequence[str]], target: str
) -> None:
    assert infer_task(make_table(*names), given=given).targets == [target]
