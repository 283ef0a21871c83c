"""Targets that stand in their inputs."""

from __future__ import annotations

import pytest

from fivetune.start.leaks import describe_held, describe_marked
from fivetune.types import TextExample

WORDS = ("old river", "red bridge", "new garden", "late train", "small dog", "cold water", "long road")


def make(fill, num=40) -> list[TextExample]:
    pairs = [fill(i) for i in range(num)]
    return [TextExample(str(i), inputs, targets, (targets,)) for i, (inputs, targets) in enumerate(pairs)]


def name(i: int) -> str:
    return f"the {WORDS[i % 7]} of town {i}"


@pytest.mark.parametrize(
    ("fill", "is_usual", "num"),
    [
        (lambda i: (f"What is meant by '{name(i)}'?", name(i)), False, 40),
        (lambda i: (f"What is meant by '{name(i)}'?" if i % 2 else "What is it?", name(i)), False, 20),
        (lambda i: (f"What is meant by '{name(i)}'?" if i % 2 else "What is it?", name(i)), True, 0),
        (lambda i: (f"Who sits at {name(i)}? {name(i)}", name(i)), True, 40),
        (lambda i: (f"What is meant by {name(i)}?" if i % 4 == 0 else "What is it?", name(i)), False, 0),
        (lambda i: (name(i) if i % 2 else name(i).upper(), name(i)), False, 0),  # corrections
        (lambda i: (f"Is it red, or blue as {i}?", "blue"), False, 0),  # by chance
    ],
)
def test_answers_that_stand_in_their_questions_are_told(fill, is_usual, num):
    found = [*describe_held(make(fill), "inputs", is_usual=is_usual)]
    assert len(found) == (num > 0)
    assert all(one.startswith(f"{num} of 40 inputs hold") for one in found)


@pytest.mark.parametrize(
    ("fill", "num"),
    [
        (lambda i: (f"Which one? Show: :: OA {'ABCDE'[i % 5]}\nIt is so.", "ABCDE"[i % 5]), 40),
        (lambda i: (f"Which? Answer: {name(i)}." if i % 4 == 0 else "Which?", name(i)), 10),
        (lambda i: (f"Was ist es? Lösung: {name(i)}", name(i)), 40),
        (lambda i: (f"它是什么？答案：{i}号桥", f"{i}号桥"), 40),
        (lambda i: (f"Category: {WORDS[i % 7]}. It is near.", WORDS[i % 7]), 40),
        (lambda i: ("Answer: A, B or C? It is so.", "ABC"[i % 3]), 0),  # the same in all records
        (lambda i: (f"Is it? Answer: {['yes', 'no'][i % 2]}\nIs it now? Answer:", ["yes", "no"][i % 2]), 0),
        (lambda i: (f"Show: Attachment {i}", "A"), 0),
        (lambda i: (f"Note: {name(i)} is far.", "far"), 0),
    ],
)
def test_answers_behind_a_word_that_says_so_are_told(fill, num):
    found = [*describe_marked(make(fill), "inputs")]
    assert len(found) == (num > 0)
    assert all(one.startswith(f"{num} of 40 inputs give away") for one in found)
