"""The commented recipe of a plan: each setting below the reason for its value.

In: a StartPlan and the paths of the three sets. Out: YAML.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fivetune.config.layers import as_yaml
from fivetune.data.limits import Lengths
from fivetune.redaction import name_invisible
from fivetune.start.plan import LONGEST, StartPlan
from fivetune.types import JsonTable

METRICS: Mapping[str, str] = {
    "exact_match": "short answers, numbers and code are right or wrong as a whole",
    "rougeL_f1": "words in common with the target, as of free texts many are right",
    "chrf": "letters and words in common with the target: chrF and BLEU",
}
"""Main score -> why its metric is chosen."""

OPTIONS: Mapping[str, str] = {
    "inputs": "what the model reads; the text outside the braces is in all inputs",
    "targets": "what the model learns to write",
    "label": "the column of the label",
    "labels": "label: the word that the model writes for it",
    "template": "what the model reads, without a context",
    "format": "the form of the questions",
    "lower_case": "texts keep their case; true for UnifiedQA's own models",
    "choices": "the columns of the choices",
    "numbers_from": "the number of the first choice, in the column of the answers",
    "shuffle_choices": "the right choice has one place in the data, and not in what the model reads",
    "references": "the column with all right answers",
    "tags": "the columns of the labels",
    "separator": "what separates several labels, in the data and in what the model writes",
    "target": "the column of the number",
    "step": "learned numbers are rounded to multiples of it, so that few texts stand for all",
    "main_metric": "the score that selects the best weights",
}
"""Option of a task -> what it says."""

MIN_STEPS, MAX_EPOCHS, MIN_EPOCHS = 300, 20, 3
BATCHES = ((50_000, 128), (2_000, 32), (500, 16))  # least number of examples, examples per step
MANY_CUT = 0.02  # share of inputs over the limit from which on the way of cutting matters
WIDTH = 110  # characters of a comment
NANO = "t5-nano"
PATIENCE = 3  # evaluations


class Line(NamedTuple):
    """One setting and the reason for its value."""

    section: str
    key: str
    value: object
    reason: str


def list_lines(plan: StartPlan, files: Mapping[str, str]) -> list[Line]:
    """List the settings of a plan. `files`: set -> path, as the recipe names it."""
    return [*_list_task_lines(plan), *_list_data_lines(plan, files), *_list_training_lines(plan)]


def build_recipe(plan: StartPlan, lines: Sequence[Line], test: str) -> str:
    """Build the text of the recipe; `test` is the path of the test set."""
    head = (
        f"{plan.reading.kind} from {plan.source} ({plan.split.num_records:,} usable records), written by fivetune new. "
        f"The test set, {test}, is for the end: fivetune evaluate. Every line can be changed; all settings: "
        "fivetune config --help."
    )
    text = "".join(_format_comment(one, "") for one in (head, *plan.warnings))
    section = ""
    for line in lines:
        if line.section != section:
            section = line.section
            text += f"{section}:\n"
        text += _format_comment(line.reason, "  ") + textwrap.indent(as_yaml({line.key: line.value}), "  ")
    return text


def build_settings(lines: Sequence[Line]) -> JsonTable:
    """Return the recipe as nested settings."""
    settings: JsonTable = {}
    for line in lines:
        settings.setdefault(line.section, {})[line.key] = line.value
    return settings


def _format_comment(text: str, indent: str) -> str:
    plain = name_invisible(" ".join(text.split()))  # YAML refuses control characters
    return "".join(f"{indent}# {line}\n" for line in textwrap.wrap(plain, WIDTH, break_on_hyphens=False))


def _list_task_lines(plan: StartPlan) -> Iterator[Line]:
    reading = plan.reading
    yield Line("model", "path", plan.model, plan.model_reason)
    yield Line("task", "name", reading.task, reading.reason)
    for key, value in reading.options.items():
        reason = OPTIONS.get(key) or METRICS[str(reading.options["main_metric"])]
        yield Line("task", key, value, reason)


def _list_data_lines(plan: StartPlan, files: Mapping[str, str]) -> Iterator[Line]:
    sizes, inputs, targets = plan.sizes, plan.lengths.inputs, plan.lengths.targets
    how = f"drawn at random, records with {plan.describe_relations()} on one side"
    if plan.task.labels is not None:
        how += ", with the same shares of the labels"
    if given := plan.describe_given_sets():
        how = f"{given}: {how}" if plan.drawn else given
    yield Line("data", "train", files["train"], f"{sizes['train']:,} records; {how}")
    reason = f"{sizes['validation']:,} records that select the best weights; {sizes['test']:,} others are the test set"
    yield Line("data", "eval", files["validation"], reason)
    if plan.reading.columns:
        reason = "the name that the task reads: the column of the file"
        yield Line("data", "columns", dict(plan.reading.columns), reason)
    how = "" if plan.is_measured else ", estimated from letters and signs as the tokenizer is not here yet"
    half, most = find_percentile(inputs, 0.5), find_percentile(inputs, 0.99)
    limit = round_limit(most, 32)
    reason = f"half of the inputs have up to {half:,} tokens, 99 % up to {most:,}{how}; {describe_cut(inputs, limit)}"
    yield Line("data", "max_input_tokens", limit, reason)
    if find_percentile(inputs, 1 - MANY_CUT) > limit:
        if plan.task.extractive:
            yield Line("data", "overlong", "windows", "contexts are read in several parts, so that no answer is lost")
        elif plan.loses_middle:
            reason = "the middle of a longer text is cut, as beginning and end say most"
            yield Line("data", "overlong", "head_tail", reason)
    longest = find_percentile(targets, 1)
    limit = round_limit(longest, 16)
    reason = f"the longest target has {longest:,} tokens{how}; {describe_cut(targets, limit)}"
    yield Line("data", "max_target_tokens", limit, reason)


def _list_training_lines(plan: StartPlan) -> Iterator[Line]:
    yield Line(
        "optimizer", "name", "adafactor", "the optimizer that T5 was trained with; adamw is the usual alternative"
    )
    yield Line("optimizer", "preset", "t5-paper", "the T5 paper's settings of it")
    rate, reason = 1e-3, "the T5 paper's rate"
    if plan.model == NANO:
        rate, reason = 1e-2, "what t5-nano, a very small model, learns fastest with"
    yield Line("optimizer", "lr", rate, f"{reason}; fivetune find-lr measures it for this data")
    yield Line("schedule", "name", "linear", "falls to 0 at the end of the training")
    yield Line("schedule", "warmup_fraction", 0.05, "the rate rises over the first twentieth of the steps")
    num_train = plan.sizes["train"]
    batch = choose_batch(num_train)
    epochs = choose_epochs(num_train, batch)
    yield Line("train", "batch_size", 8, "examples that are in memory at once; auto finds what fits")
    reason = f"examples per step: {num_train:,} examples give {math.ceil(num_train / batch):,} steps per epoch"
    yield Line("train", "global_batch_size", batch, reason)
    reason = f"about {math.ceil(num_train * epochs / batch):,} steps at most; ten evaluations select the best weights"
    yield Line("train", "num_epochs", epochs, reason)
    reason = "evaluations in a row without a better score, after which the training ends"
    yield Line("train", "early_stopping", PATIENCE, reason)


def find_percentile(lengths: Lengths, share: float) -> int:
    """Return the length that `share` of the lengths do not exceed; 0 without any."""
    return int(np.quantile(lengths, share, method="inverted_cdf")) if len(lengths) else 0


def describe_cut(lengths: Lengths, limit: int) -> str:
    """Describe how many of the lengths exceed a limit.

    >>> describe_cut(np.array([10, 20, 600]), 512), describe_cut(np.array([1]), 512)
    ('this limit cuts 33.3 % of them', 'this limit cuts none of them')
    """
    is_cut = lengths > limit
    share = f"{100 * is_cut.mean():.1f} %" if is_cut.any() else "none"
    return f"this limit cuts {share} of them"


def round_limit(length: int, multiple: int) -> int:
    """Round a length up to a multiple, from that multiple to LONGEST.

    >>> round_limit(33, 32), round_limit(0, 16), round_limit(900, 32)
    (64, 16, 512)
    """
    return min(LONGEST, max(multiple, math.ceil(length / multiple) * multiple))


def choose_batch(num_examples: int) -> int:
    """Choose the examples per step: fewer of small sets, so that an epoch has enough steps.

    >>> [choose_batch(number) for number in (80, 600, 5_000, 100_000)]
    [8, 16, 32, 128]
    """
    return next((batch for least, batch in BATCHES if num_examples >= least), 8)


def choose_epochs(num_examples: int, batch: int) -> int:
    """Choose the passes over the data: MIN_EPOCHS, more if these are less than MIN_STEPS steps.

    >>> [choose_epochs(number, choose_batch(number)) for number in (80, 600, 5_000, 100_000)]
    [20, 8, 3, 3]
    """
    return min(MAX_EPOCHS, max(MIN_EPOCHS, math.ceil(MIN_STEPS * batch / max(1, num_examples))))
