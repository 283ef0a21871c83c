"""The options of the task of a reading: templates of its columns, and what scores its target.

In: a Survey and a Reading. Out: the Reading with options as a recipe has them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from fivetune.scores.metrics.correlation import parse_number
from fivetune.start.columns import Column
from fivetune.start.roles import USUAL, split_name
from fivetune.start.survey import SAMPLE, Reading, Survey
from fivetune.types import JsonTable

SHORT_TARGET_WORDS = 2.0  # mean words up to which a target is right or wrong as a whole
MIN_PROSE = 0.3  # share of targets in sentences from which on formulas among them are parts of prose
NUM_STEPS = 25  # of numbers that are learned as text, as T5 has them for STS-B
PLAIN_WORDS = 0.5  # share of words of letters alone in a sentence
PLAIN_WORD = re.compile(r"[^\W\d_]{2,}")
CODE_LINE = re.compile(r"(?m)^(?:\s{2,}\S|#|//)|[;{}]\s*$")  # indented, a comment or a statement
SENTENCE_END = re.compile(r"[^\W\d_]{3,}[.!?。！？](?=\s|$)")
TEXT_TASKS = ("jsonl", "classification", "tags", "regression")


def fill_options(survey: Survey, reading: Reading) -> Reading:
    """Return a reading of texts with the options of its task: templates of its columns, and what scores the target.

    Of a target that is a list, the first text is learned, and all of them are scored.
    """
    choices = reading.roles.get("choices", ())
    if len(choices) > 1:
        # a column for each choice
        names, columns = name_slots([name for name in choices if name not in reading.targets])
        if len(names) < len(choices):
            names.insert(0, "answer")  # the right one, if the others are wrong in all records
        return replace(reading, options={**reading.options, "choices": names}, columns={**reading.columns, **columns})
    if reading.task not in TEXT_TASKS:
        return reading
    names, columns = name_slots([*reading.inputs, *reading.targets])
    read, learned = names[: len(reading.inputs)], names[len(reading.inputs) :]
    options: JsonTable = {"inputs": reading.prefix + _build_template(survey, reading.inputs, read), **reading.options}
    warnings = [*reading.warnings]
    if reading.task == "tags":
        options["tags"] = learned
    elif reading.task == "classification":
        options["label"] = learned[0]
    elif reading.task == "regression":
        options |= {"target": learned[0], "step": choose_step(survey.list_examples(reading.targets[0], SAMPLE))}
    else:
        slot = learned[0]
        target = survey.table.describe(reading.targets[0])
        options["targets"] = f"{{{slot}}}"
        if target.kind == "list":
            columns[f"{slot}_first"] = f"{target.name}.0"
            options |= {"targets": f"{{{slot}_first}}", "references": slot}
            if survey.has_several(target.name):
                warnings.append(
                    f"of the texts in each list of {target.name} the first is learned, and all count as right"
                )
        options |= choose_metrics(survey, target, reading.kind)
    return replace(reading, options=options, columns=columns, warnings=warnings)


def _build_template(survey: Survey, columns: Sequence[str], slots: Sequence[str]) -> str:
    """Build the template of inputs; instructions and chats excepted, several have their names."""
    plain = [f"{{{name}}}" for name in slots]
    if split_name(columns[0]) == ["prefix"]:  # simpletransformers
        return ": ".join(plain)
    is_turn = re.search(r"\.\d+\.", columns[0]) is not None  # of a chat
    if len(slots) == 1 or is_turn or survey.rate(columns[0], "instruction") >= USUAL:
        return " ".join(plain)
    return " ".join(f"{name}: {{{name}}}" for name in slots)


def choose_step(values: Sequence[str]) -> float:
    """Choose the step of numbers that are learned as text: 1, 2 or 5 times a power of ten, about 25 in their range.

    That is the 0.2 of T5 for the numbers from 0 to 5 of STS-B. Whole numbers have a step of 1 or more.

    >>> choose_step(["0.0", "2.5", "5.0"]), choose_step(["0", "0.75", "1"]), choose_step(["3", "40"]), choose_step([])
    (0.2, 0.05, 2, 0.2)
    """
    numbers = [number for number in map(parse_number, values) if number is not None]
    if not numbers or min(numbers) == max(numbers):
        return 0.2
    wanted = (max(numbers) - min(numbers)) / NUM_STEPS
    power = 10.0 ** math.floor(math.log10(wanted))
    step = min((power, 2 * power, 5 * power, 10 * power), key=lambda one: abs(math.log(one / wanted)))
    step = float(f"{step:.0e}")  # 0.05, not 0.05000000000000001
    if step >= 1 or all(number.is_integer() for number in numbers):
        return max(1, round(step))
    return step


def choose_metrics(survey: Survey, column: Column, kind: str) -> JsonTable:
    """Choose the metrics of a target, and the score that selects the best weights: one that sees its text.

    Code and answers of a word or two are right or wrong as a whole; of longer texts parts count, also of sentences with
    formulas.
    """
    texts = survey.list_examples(column.name, 200)
    is_ascii = "".join(texts).isascii()
    rouge: object = "rouge" if is_ascii else {"name": "rouge", "words": "unicode"}
    if column.has_code and sum(map(_is_prose, texts)) < MIN_PROSE * len(texts):
        return {"metrics": ["exact_match", rouge], "main_metric": "exact_match"}
    own_words = column.mean_words - count_shared_words(survey, column)
    if column.kind == "number" or (own_words <= SHORT_TARGET_WORDS and column.kind == "text"):
        return {"metrics": ["exact_match"], "main_metric": "exact_match"}
    if kind == "translation" and find_spec("sacrebleu"):
        return {"metrics": ["bleu"], "main_metric": "chrf"}
    return {"metrics": [rouge], "main_metric": "rougeL_f1"}


def _is_prose(text: str) -> bool:
    """Whether a text is in sentences, with formulas perhaps.

    >>> _is_prose("As F = ma here, 2 kg * 3 m/s^2 is the force of both."), _is_prose("SELECT name FROM head")
    (True, False)
    """
    words = [word.strip(".,;:!?()\"'“”«»") for word in text.split()]
    num_plain = sum(PLAIN_WORD.fullmatch(word) is not None for word in words)
    is_sentence = num_plain >= PLAIN_WORDS * len(words) and SENTENCE_END.search(text) is not None
    return is_sentence and not CODE_LINE.search(text)


def count_shared_words(survey: Survey, column: Column) -> int:
    """Count the words that all texts of a column begin with up to a mark: of ANSWER: D the first."""
    num_shared, last = 0, ""
    for words in zip(*map(str.split, survey.list_examples(column.name, 200)), strict=False):
        if len({*words}) > 1:
            break
        num_shared, last = num_shared + 1, words[0]
    return num_shared if last.endswith((":", "：", "=", "#", ">")) else 0


def name_slots(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return names that a template can hold, and data.columns for those that differ.

    >>> name_slots(["Betreff", "was {1}", "info.text"])
    (['Betreff', 'was__1', 'info_text'], {'was__1': 'was {1}', 'info_text': 'info.text'})
    """
    slots: dict[str, str] = {}
    for name in names:
        is_plain = not re.search(r"[{}\[\]!:.,]|^\s|\s$", name)
        slot = name if is_plain else re.sub(r"\W", "_", name).strip("_") or "column"
        slots[slot if slot not in slots else f"{slot}_{len(slots)}"] = name
    return list(slots), {slot: name for slot, name in slots.items() if slot != name}
