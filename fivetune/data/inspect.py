"""Inspect a data set before training: counts, lengths, duplicates, leakage, missing answers, lossy characters.

In: sources, a task, a tokenizer. Out: a table of facts, as `fivetune inspect --json` prints it. Bad records are
counted, not raised. Memory holds the texts of all examples.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from fivetune.data.characters import describe_odd_targets, measure_coverage
from fivetune.data.duplicates import find_near_duplicates, normalize_text
from fivetune.data.examples import read_unique_records
from fivetune.data.labels import (
    count_label_forms,
    describe_imbalance,
    describe_merged_forms,
    describe_placeholders,
    find_placeholder_input,
    get_label_form,
    merge_label_forms,
)
from fivetune.data.limits import (
    build_input_limit_table,
    build_target_limit_table,
    compute_length_distribution,
    measure_lengths,
)
from fivetune.data.readers.records import BadRecord, apply_task, as_bad_record
from fivetune.data.readers.source_files import quote_value
from fivetune.data.store.convert import MIN_ID_CHARS
from fivetune.data.store.encode import LengthLimits, encode, tokenize_inputs
from fivetune.data.store.windows import split_into_windows
from fivetune.errors import DataError
from fivetune.scores.metrics import Scorer, drop_blank_golds, load_metric, rewards_blank
from fivetune.scores.metrics.tags import Tags
from fivetune.tasks import DROPPED_SYNONYMS, find_text, has_sentinels, suggest_language
from fivetune.tasks.classification import Classification
from fivetune.types import JsonTable, RawRecord, Task, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_SHOWN = 5  # samples of each finding
MAX_VALUES = 10  # most frequent values listed of one kind
MIN_SHARE = 0.01  # least share of the most frequent target; below it targets are free text and are not counted

Kinds = Mapping[str, Callable[[TextExample], Sequence[str]]]
InspectProgressCallback = Callable[[str, int], None]


@dataclass(slots=True)
class InspectedDataset:
    """The examples of some sources, and counts of skipped, unlabelled and left-out records.

    Unlabelled records have no usable answer and are converted without it; left-out records are excluded by the task.
    `skipped`, `unlabelled` and `wrong_offsets` list the first NUM_SHOWN records.
    """

    sources: tuple[str, ...]
    examples: list[TextExample] = field(default_factory=list)
    num_read: int = 0
    num_skipped: int = 0
    num_unlabelled: int = 0
    num_left_out: int = 0
    skipped: list[BadRecord] = field(default_factory=list)
    unlabelled: list[BadRecord] = field(default_factory=list)
    given_ids: set[str] = field(default_factory=set)
    num_offsets: int = 0
    wrong_offsets: list[BadRecord] = field(default_factory=list)
    num_wrong_offsets: int = 0

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be read or converted."""
        self.num_read += 1
        self.num_skipped += 1
        if len(self.skipped) < NUM_SHOWN:
            self.skipped.append(bad)

    def convert(self, record: RawRecord, task: Task) -> None:
        """Add the examples of a record, without answers if it has no usable ones."""
        if record.has_own_id and len(record.fields["id"]) >= MIN_ID_CHARS:
            self.given_ids.add(record.fields["id"])
        num_offsets, wrong = find_wrong_offset(record)
        self.num_offsets += num_offsets
        if wrong:
            self.num_wrong_offsets += 1
            if len(self.wrong_offsets) < NUM_SHOWN:
                self.wrong_offsets.append(wrong)
        try:
            converted = apply_task(task, record)
        except DataError as error:
            bad = as_bad_record(error, record)
            # Without its answer the record still counts for lengths and duplicates.
            try:
                converted = apply_task(task, record, labelled=False)
            except DataError:
                self.skip(bad)
                return
            self.num_unlabelled += 1
            if len(self.unlabelled) < NUM_SHOWN:
                self.unlabelled.append(bad)
        self.num_read += 1
        self.num_left_out += not converted
        self.examples += converted


def find_wrong_offset(record: RawRecord) -> tuple[int, BadRecord | None]:
    """Return the number of answers with a start offset, and the first answer with an offset that is wrong.

    >>> answers = {"text": ["Ann"], "answer_start": [1]}
    >>> find_wrong_offset(RawRecord({"context": "Ann slept.", "answers": answers}, "a.json:1"))[1].reason
    "answer_start 1 points at 'nn ', the answer is 'Ann'"
    """
    context = record.fields.get("context")
    answers = record.fields.get("answers")
    if not isinstance(context, str) or not isinstance(answers, Mapping):
        return 0, None
    texts = answers.get("text")
    starts = answers.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        return 0, None
    num = 0
    wrong: BadRecord | None = None
    for text, start in zip(texts, starts, strict=False):
        if not isinstance(text, str) or not text or not isinstance(start, int) or start < 0:
            continue
        num += 1
        found = context[start : start + len(text)]
        if found != text and wrong is None:
            reason = f"answer_start {start} points at {quote_value(found)}, the answer is {quote_value(text)}"
            wrong = BadRecord(record.where, reason)
    return num, wrong


def read_dataset(
    sources: Sequence[str],
    task: Task,
    columns: Mapping[str, str],
    *,
    header: Sequence[str] = (),
    max_records: int | None,
    on_progress: InspectProgressCallback,
) -> InspectedDataset:
    """Convert all records of some sources. Raises DataError for a damaged file, or if no record gives an example."""
    found = InspectedDataset(tuple(sources))
    records = read_unique_records(sources, columns=columns, header=header, max_records=max_records, on_bad=found.skip)
    for record in records:
        found.convert(record, task)
        if found.num_read % 1_000 == 0:
            on_progress(f"reading {', '.join(sources)}", found.num_read)
    if not found.examples:
        first = f" The first: {found.skipped[0]}" if found.skipped else ""
        raise DataError(
            f"{', '.join(sources)}: no record gives an example ({found.num_read:,} read). "
            f"Check --task and data.columns.{first}"
        )
    return found


def inspect_datasets(
    sets: Mapping[str, InspectedDataset],
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    limits: LengthLimits,
    near_threshold: float,
    kinds: Kinds,
    on_progress: InspectProgressCallback,
) -> JsonTable:
    """Return the facts of a training set, or of a training and an evaluation set.

    Args:
        sets: {"train": ...} or {"train": ..., "eval": ...}.
        near_threshold: least Jaccard similarity (0-1) of the word shingles of near duplicates.
        kinds: categories to count examples by, in addition to KINDS: name -> function that returns the values
            of an example.
        on_progress: called with the name of the next step and its number of examples.
    """
    # As in training: labels come from the data, and the forms of a label are one.
    if isinstance(task, Classification) and not task.labels:
        merged = merge_label_forms([found.examples for found in sets.values()])
        sets = {name: replace(sets[name], examples=own) for name, own in zip(sets, merged, strict=True)}
    facts: JsonTable = {"task": task.plugin_name(), "near": near_threshold, "sets": {}}
    for name, found in sets.items():
        examples = found.examples
        on_progress(f"{name}: lengths", len(examples))
        targets: list[str] = []
        for example in examples:
            if name == "train" and example.targets:
                targets += task.train_targets(example)
            elif example.targets:
                targets.append(example.targets)
        lengths = measure_lengths(tokenizer, examples, targets, answers_can_be_lost=not task.labels)
        on_progress(f"{name}: duplicates and characters", len(examples))
        coverage = measure_coverage(tokenizer, [f"{example.inputs} {example.targets}" for example in examples])
        facts["sets"][name] = {
            **_summarise_reading(found),
            "num_targets": len(targets),
            "counts": _count_values(examples, task, {**KINDS, **kinds}),
            "lengths": {
                "inputs": compute_length_distribution(lengths.inputs),
                "contexts": compute_length_distribution(lengths.contexts),
                "targets": compute_length_distribution(lengths.targets),
            },
            "input_limits": build_input_limit_table(lengths, limits.max_input_tokens),
            "target_limits": build_target_limit_table(lengths, limits.max_target_tokens),
            "duplicates": _find_duplicates(examples, near_threshold),
            "answers": _find_missing_answers(examples) if task.extractive else None,
            "offsets": {
                "num": found.num_wrong_offsets,
                "of": found.num_offsets,
                "shown": list(map(asdict, found.wrong_offsets)),
            },
            "golds": _summarise_golds(examples, task),
            "characters": {
                "num": coverage.num_texts_hit,
                "of": coverage.num_texts,
                "num_characters": len(coverage.lossy),
                "common": [one._asdict() for one in coverage.lossy[:MAX_VALUES]],
            },
            "odd_targets": describe_odd_targets(tokenizer, examples, keeps_sentinels=has_sentinels(task)),
        }
    if len(sets) > 1:
        on_progress("leakage", len(sets["eval"].examples))
        facts["leakage"] = _find_leakage(sets["train"].examples, sets["eval"].examples, near_threshold)
        if shared := _find_shared_ids(sets["train"], sets["eval"]):
            facts["leakage"]["id"] = shared
    facts["examples"] = _sample_examples(tokenizer, sets["train"].examples, limits)
    return facts


def _summarise_reading(found: InspectedDataset) -> JsonTable:
    return {
        "sources": list(found.sources),
        "num_read": found.num_read,
        "num_skipped": found.num_skipped,
        "num_unlabelled": found.num_unlabelled,
        "num_left_out": found.num_left_out,
        "num_examples": len(found.examples),
        "num_groups": len({example.group or example.id for example in found.examples}),
        "skipped": list(map(asdict, found.skipped)),
        "unlabelled": list(map(asdict, found.unlabelled)),
    }


# --- counts ---


def _get_answerable(example: TextExample) -> Sequence[str]:
    if not example.references:
        return []
    return ["yes" if any(example.references) else "no"]


def _get_topic(example: TextExample) -> Sequence[str]:
    return [str(example.meta.get("title") or "").replace("_", " ")]


def _get_language(example: TextExample) -> Sequence[str]:
    return [str(example.meta.get("language") or "")]


def _get_part(example: TextExample) -> Sequence[str]:
    return [str(example.meta.get("source_task") or "")]


KINDS: Kinds = {"topic": _get_topic, "language": _get_language, "part": _get_part}


def _count_values(examples: Sequence[TextExample], task: Task, kinds: Kinds) -> dict[str, JsonTable]:
    """Count the values of each kind that has any: distinct values, all values, and the most frequent ones."""
    # Answers count as labels, as tags, or as whole targets.
    tags: Tags | None = None
    for name in task.metrics:
        metric = load_metric(name)
        if isinstance(metric, Tags):
            tags = metric
            break

    def get_answer(example: TextExample) -> Sequence[str]:
        if task.labels is not None:
            return example.references
        return tags.split(example.targets) if tags else [example.targets]

    kind = "tag" if tags else "target"
    if task.labels is not None:
        kind = "class"
    own: dict[str, Callable[[TextExample], Sequence[str]]] = {kind: get_answer}
    if task.no_answer_text is not None:
        own["answerable"] = _get_answerable
    found: dict[str, JsonTable] = {}
    for name, get_values in {**own, **kinds}.items():
        counts: Counter[str] = Counter()
        for example in examples:
            counts.update(value for value in get_values(example) if value)
        common = counts.most_common(MAX_VALUES)
        is_free_text = name == "target" and bool(common) and common[0][1] < MIN_SHARE * counts.total()
        if common and not is_free_text:
            found[name] = {"num_values": len(counts), "num": counts.total(), "common": list(map(list, common))}
    if "class" in found:
        found["class"]["forms"] = count_label_forms(examples)
    return found


# --- repetitions ---

PAIR = "question and context"


def _extract_texts(examples: Sequence[TextExample]) -> dict[str, list[str]]:
    """Return the normalised question, context and pair of both of each example; "" where there is none.

    The context is the clippable part, unless that is the question. Without `meta["question"]` the question is the rest
    of the inputs, unless all examples have the same rest: then it is the template.
    """
    rests: list[str] = []
    for example in examples:
        start, end = example.clippable
        rests.append(example.inputs[:start] + example.inputs[end:])
    is_template = len(set(rests)) == 1
    texts: dict[str, list[str]] = {"question": [], "context": [], PAIR: []}
    for example, rest in zip(examples, rests, strict=True):
        question = example.meta.get("question")
        if not question and not is_template:
            question = rest
        question = normalize_text(str(question or ""))
        context = normalize_text(example.inputs[slice(*example.clippable)])
        if context == question:
            context = ""
        texts["question"].append(question)
        texts["context"].append(context)
        texts[PAIR].append(f"{question} | {context}" if question and context else "")
    return texts


def _find_duplicates(examples: Sequence[TextExample], near: float) -> JsonTable:
    """Find repeated inputs, inputs and questions with different answers, and near-duplicate texts of one set."""
    words = _extract_texts(examples)
    inputs = _group_equal_texts([normalize_text(example.inputs) for example in examples])
    repeated: list[Sequence[int]] = []
    contradicted: list[Sequence[int]] = []
    for places in inputs.values():
        if len(places) > 1:
            repeated.append(places)
            if _has_disagreement(examples, places):
                contradicted.append(places)
    questions = _group_equal_texts(words["question"])
    disputed = [places for places in questions.values() if _has_disagreement(examples, places)]
    facts: JsonTable = {
        "inputs": _summarise_groups(examples, repeated),
        "inputs with different answers": _summarise_groups(examples, contradicted),
        "questions with different answers": _summarise_groups(examples, disputed),
    }
    for kind in ("question", "context"):
        texts = [text for text in dict.fromkeys(words[kind]) if text]
        found = list(find_near_duplicates(texts, threshold=near))
        shown = [_build_pair(texts[one.row], texts[one.other_row], one.similarity) for one in found[:NUM_SHOWN]]
        facts[f"near {kind}s"] = {"num": len(found), "of": len(texts), "shown": shown}
    return facts


def _group_equal_texts(texts: Sequence[str]) -> dict[str, list[int]]:
    """Return text -> its indices, without ""."""
    places: dict[str, list[int]] = defaultdict(list)
    for place, text in enumerate(texts):
        if text:
            places[text].append(place)
    return places


def _has_disagreement(examples: Sequence[TextExample], places: Sequence[int]) -> bool:
    """Return whether examples of several questions have no gold answer in common; answers are compared by words."""
    golds: list[set[str]] = []
    groups: set[str] = set()
    for place in places:
        example = examples[place]
        groups.add(example.group or example.id)
        if example.references:
            golds.append({" ".join(re.findall(r"\w+", gold.casefold())) for gold in example.references})
    return len(golds) > 1 and len(groups) > 1 and not set.intersection(*golds)


def _summarise_groups(examples: Sequence[TextExample], groups: Sequence[Sequence[int]]) -> JsonTable:
    """Summarise groups of equal examples; `num` counts the repetitions: all but the first of each group."""
    shown: list[JsonTable] = []
    for places in groups[:NUM_SHOWN]:
        equal = [examples[place] for place in places[:NUM_SHOWN]]
        ids = [example.id for example in equal]
        answers = ["".join(example.references[:1]) for example in equal]
        shown.append({"text": equal[0].inputs, "ids": ids, "answers": answers})
    return {"num": sum(len(places) - 1 for places in groups), "of": len(examples), "shown": shown}


def _build_pair(text: str, other: str, similarity: float) -> JsonTable:
    return {"text": text, "other": other, "similarity": round(similarity, 3)}


def _find_leakage(train: Sequence[TextExample], evaluation: Sequence[TextExample], near: float) -> JsonTable:
    """Count the evaluation examples whose texts also occur in the training set, by kind of text."""
    known = _extract_texts(train)
    asked = _extract_texts(evaluation)
    facts: JsonTable = {}
    for kind in asked:
        if any(asked[kind]) and any(known[kind]):
            # All pairs with one context are near: only equal ones are counted.
            noun = kind if any(asked["question"]) else "input"
            facts[noun] = _compare_texts(known[kind], asked[kind], None if kind == PAIR else near)
    return facts


def _compare_texts(known: Sequence[str], asked: Sequence[str], near: float | None) -> JsonTable:
    """Count equal texts and, unless `near` is None, near duplicates."""
    others = dict.fromkeys(filter(None, known))
    places = _group_equal_texts(asked)
    exact = [text for text in places if text in others]
    facts: JsonTable = {
        "num_exact": sum(len(places[text]) for text in exact),
        "num_near": None,
        "of": sum(map(len, places.values())),
        "shown": [_build_pair(text, text, 1.0) for text in exact[:NUM_SHOWN]],
    }
    if near is not None:
        rest = [text for text in places if text not in others]
        candidates = list(others)
        found = list(find_near_duplicates(rest, candidates, threshold=near))
        facts["num_near"] = sum(len(places[rest[one.row]]) for one in found)
        for one in found[:NUM_SHOWN]:
            facts["shown"].append(_build_pair(rest[one.row], candidates[one.other_row], one.similarity))
    return facts


def _find_shared_ids(train: InspectedDataset, evaluation: InspectedDataset) -> JsonTable:
    """Count the ids that occur in both sources: a translation keeps its original's. {} if a source has no ids."""
    if not train.given_ids or not evaluation.given_ids:
        return {}
    shared = sorted(train.given_ids & evaluation.given_ids)
    return {
        "num_exact": len(shared),
        "num_near": None,
        "of": len(evaluation.given_ids),
        "shown": [_build_pair(id, id, 1.0) for id in shared[:NUM_SHOWN]],
    }


# --- answers ---


def _summarise_golds(examples: Sequence[TextExample], task: Task) -> JsonTable:
    """Return the properties of the gold answers that distort scores.

    `num_blank` questions have a blank gold answer among several and so reward an empty prediction; `empty_scores` are
    the scores of empty predictions only, `empty_scores_without_blanks` the same without blank gold answers.
    `num_disjoint` questions have gold answers without a common word: perhaps all are required, but any one counts as
    right. `imbalance` describes uneven labels, `merged_forms` labels in several forms, `placeholders` answers that
    programs write for an empty cell, and `empty_inputs` such inputs.
    """
    # The first example of each question stands for it: windows and snippets repeat its answers.
    firsts: dict[str, TextExample] = {}
    for example in examples:
        if example.references:
            firsts.setdefault(example.group or example.id, example)
    golds = [example.references for example in firsts.values()]
    forms = Counter(map(get_label_form, firsts.values()))
    scorer = Scorer(task.metrics)
    facts: JsonTable = {
        "num": len(golds),
        "num_blank": sum(rewards_blank(scorer, references) for references in golds),
        "num_disjoint": 0,
        "num_dropped_synonyms": sum(DROPPED_SYNONYMS in example.meta for example in firsts.values()),
        "language": suggest_language(task, golds),
        "imbalance": "",
        "merged_forms": "",
        "placeholders": "",
        "empty_inputs": describe_placeholders(Counter(map(find_placeholder_input, examples)), what="input"),
    }
    if task.labels is not None:
        facts["imbalance"] = describe_imbalance(Counter(references[0] for references in golds))
        facts["merged_forms"] = describe_merged_forms(forms, {})
    else:
        facts["num_disjoint"] = sum(map(_are_disjoint, golds))
    if not task.extractive:  # an answer in a text may be the word "None"
        facts["placeholders"] = describe_placeholders(forms, what="answer" if task.labels is None else "label")
    if facts["num_blank"]:
        silence = [""] * len(golds)
        facts["empty_scores"] = scorer.score(silence, golds).corpus
        facts["empty_scores_without_blanks"] = scorer.score(silence, list(map(drop_blank_golds, golds))).corpus
    return facts


def _are_disjoint(references: Sequence[str]) -> bool:
    """Return whether there are several distinct gold answers without a common word between any two."""
    distinct = {frozenset(re.findall(r"\w+", gold.casefold())) for gold in references} - {frozenset()}
    num_words = sum(map(len, distinct))
    return len(distinct) > 1 and num_words == len(frozenset().union(*distinct))


def _find_missing_answers(examples: Sequence[TextExample]) -> JsonTable:
    """Count the examples whose context contains no gold answer, and the questions whose contexts all contain none."""
    holding: dict[str, bool] = {}  # question -> whether one of its contexts contains an answer
    missing: list[TextExample] = []
    num_other_case = num_answered = 0
    for example, known in zip(examples, _extract_texts(examples)["context"], strict=True):
        golds = [reference for reference in example.references if reference.strip()]
        if not golds or not known:  # a question alone has no context
            continue
        num_answered += 1
        context = example.inputs[slice(*example.clippable)]
        group = example.group or example.id
        held = any(gold in context for gold in golds)
        if not held and any(find_text(context, gold) for gold in golds):
            held = True
            num_other_case += 1
        if not held:
            missing.append(example)
        holding[group] = holding.get(group, False) or held
    shown: list[JsonTable] = []
    for example in missing[:NUM_SHOWN]:
        shown.append({"id": example.id, "answer": example.references[0], "text": example.inputs})
    return {
        "num": len(missing),
        "num_other_case": num_other_case,
        "of": num_answered,
        "num_questions": sum(not held for held in holding.values()),
        "of_questions": len(holding),
        "shown": shown,
    }


# --- examples ---


def _sample_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample], limits: LengthLimits
) -> list[JsonTable]:
    """Return NUM_SHOWN examples from the shortest to the longest inputs, as the model reads them."""
    by_length = sorted(examples, key=lambda example: len(example.inputs))
    num_shown = min(NUM_SHOWN, len(examples))
    shown: list[JsonTable] = []
    for number in range(num_shown):
        place = number * (len(examples) - 1) // max(num_shown - 1, 1)
        shown.append(_format_encoded(tokenizer, by_length[place], limits))
    return shown


def _format_encoded(tokenizer: PreTrainedTokenizerBase, example: TextExample, limits: LengthLimits) -> JsonTable:
    seen = example
    if limits.overlong == "windows":
        seen = split_into_windows(tokenizer, [example], limits)[0]
    [tokens] = encode(tokenizer, [seen], [seen.targets], limits=limits)
    # What is cut out is shown as a gap: the ids are divided where they leave the whole text.
    whole = next(tokenize_inputs(tokenizer, [seen])).ids
    ids = list(tokens.input_ids)
    num = min(len(ids), len(whole))
    cut = 0
    while cut < num and ids[cut] == whole[cut]:
        cut += 1
    parts = [ids[:cut], ids[cut:]] if cut < num else [ids]
    return {
        "id": seen.id,
        "text": seen.inputs,
        "inputs": [tokenizer.decode(part) for part in parts if part],
        "num_input_tokens": len(ids),
        "num_cut": tokens.num_clipped_inputs,
        "answer_lost": tokens.answer_clipped,
        "window": seen.meta.get("window"),
        "targets": tokenizer.decode(list(tokens.labels)),
        "num_target_tokens": len(tokens.labels),
        "num_cut_targets": tokens.num_clipped_targets,
        "references": list(example.references),
    }
