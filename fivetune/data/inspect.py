"""Inspect a data set before training: counts, lengths, duplicates, leakage, missing answers, lossy characters.

In: sources, a task, a tokenizer. Out: a table of facts, as `fivetune inspect --json` prints it. Bad records are
counted, not raised. Memory holds the texts of all examples.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

from fivetune.data.characters import describe_odd_targets, measure_coverage
from fivetune.data.duplicates import find_near_duplicates, normalize_text
from fivetune.data.labels import (
    PLACEHOLDERS,
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
from fivetune.data.readers.records import BadRecord, apply_task, as_bad_record, read_records, refuse_duplicate_ids
from fivetune.data.readers.source_files import quote_value
from fivetune.data.store.convert import MIN_ID_CHARS
from fivetune.data.store.encode import LengthLimits, encode, tokenize_inputs
from fivetune.data.store.windows import split_into_windows
from fivetune.errors import DataError
from fivetune.scores.metrics import Scorer, drop_blank_golds, load_metric, rewards_blank
from fivetune.scores.metrics.tags import Tags
from fivetune.tasks import DROPPED_SYNONYMS, find_text, suggest_language
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
        self.skipped += [bad] if len(self.skipped) < NUM_SHOWN else []

    def convert(self, record: RawRecord, task: Task) -> None:
        """Add the examples of a record, without answers if it has no usable ones."""
        if record.has_own_id and len(record.fields["id"]) >= MIN_ID_CHARS:
            self.given_ids.add(record.fields["id"])
        num_offsets, wrong = find_wrong_offset(record)
        self.num_offsets += num_offsets
        if wrong:
            self.num_wrong_offsets += 1
            self.wrong_offsets += [wrong] if len(self.wrong_offsets) < NUM_SHOWN else []
        try:
            converted = apply_task(task, record)
        except DataError as error:
            bad = as_bad_record(error, record)
            try:
                converted = apply_task(task, record, labelled=False)
            except DataError:
                self.skip(bad)
                return
            self.num_unlabelled += 1
            self.unlabelled += [bad] if len(self.unlabelled) < NUM_SHOWN else []
        self.num_read += 1
        self.num_left_out += not converted
        self.examples += converted if isinstance(converted, tuple) else filter(None, (converted,))


def find_wrong_offset(record: RawRecord) -> tuple[int, BadRecord | None]:
    """Return the number of answers with a start offset, and the first whose offset does not match the context.

    >>> answers = {"text": ["Ann"], "answer_start": [1]}
    >>> find_wrong_offset(RawRecord({"context": "Ann slept.", "answers": answers}, "a.json:1"))[1].reason
    "answer_start 1 points at 'nn ', the answer is 'Ann'"
    """
    context, answers = record.fields.get("context"), record.fields.get("answers")
    if not isinstance(context, str) or not isinstance(answers, Mapping):
        return 0, None
    texts, starts = answers.get("text"), answers.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list):
        return 0, None
    pairs = [
        (text, start)
        for text, start in zip(texts, starts, strict=False)
        if isinstance(text, str) and text and isinstance(start, int) and start >= 0
    ]
    for text, start in pairs:
        if (found := context[start : start + len(text)]) != text:
            reason = f"answer_start {start} points at {quote_value(found)}, the answer is {quote_value(text)}"
            return len(pairs), BadRecord(record.where, reason)
    return len(pairs), None


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
    records = (
        record for path in sources for record in read_records(path, columns=columns, header=header, on_bad=found.skip)
    )
    for record in islice(refuse_duplicate_ids(records, on_bad=found.skip), max_records):
        found.convert(record, task)
        if found.num_read % 1_000 == 0:
            on_progress(f"reading {', '.join(sources)}", found.num_read)
    if not found.examples:
        first = next((f" The first: {bad}" for bad in found.skipped), "")
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
    if isinstance(task, Classification) and not task.labels:
        merged = zip(sets, merge_label_forms([found.examples for found in sets.values()]), strict=True)
        sets = {name: replace(sets[name], examples=own) for name, own in merged}
    facts: JsonTable = {"task": task.plugin_name(), "near": near_threshold, "sets": {}}
    for name, found in sets.items():
        on_progress(f"{name}: lengths", len(found.examples))
        targets = [target for example in found.examples for target in _select_targets(task, example, name)]
        lengths = measure_lengths(tokenizer, found.examples, targets, answers_can_be_lost=not task.labels)
        on_progress(f"{name}: duplicates and characters", len(found.examples))
        texts = [f"{example.inputs} {example.targets}" for example in found.examples]
        facts["sets"][name] = {
            **_summarise_reading(found),
            "num_targets": len(targets),
            "counts": _count_values(found.examples, task, {**KINDS, **kinds}),
            "lengths": {
                part: compute_length_distribution(getattr(lengths, part)) for part in ("inputs", "contexts", "targets")
            },
            "input_limits": build_input_limit_table(lengths, limits.max_input_tokens),
            "target_limits": build_target_limit_table(lengths, limits.max_target_tokens),
            "duplicates": _find_duplicates(found.examples, near_threshold),
            "answers": _find_missing_answers(found.examples) if task.extractive else None,
            "offsets": _summarise_offsets(found),
            "golds": _summarise_golds(found.examples, task),
            "characters": _summarise_characters(tokenizer, texts),
            "odd_targets": describe_odd_targets(tokenizer, found.examples),
        }
    if len(sets) > 1:
        on_progress("leakage", len(sets["eval"].examples))
        facts["leakage"] = _find_leakage(sets["train"].examples, sets["eval"].examples, near_threshold)
        if shared := _find_shared_ids(sets["train"], sets["eval"]):
            facts["leakage"]["id"] = shared
    facts["examples"] = _sample_examples(tokenizer, sets["train"].examples, limits)
    return facts


def _select_targets(task: Task, example: TextExample, name: str) -> tuple[str, ...]:
    """Return the targets to train on, or those of the evaluation set; () without an answer."""
    if not example.targets:
        return ()
    return task.train_targets(example) if name == "train" else (example.targets,)


def _summarise_reading(found: InspectedDataset) -> JsonTable:
    names = ("num_read", "num_skipped", "num_unlabelled", "num_left_out")
    return {
        "sources": list(found.sources),
        **{name: getattr(found, name) for name in names},
        "num_examples": len(found.examples),
        "num_groups": len({example.group or example.id for example in found.examples}),
        **{name: [asdict(bad) for bad in getattr(found, name)] for name in ("skipped", "unlabelled")},
    }


# --- counts ---


def _make_meta_getter(name: str) -> Callable[[TextExample], Sequence[str]]:
    return lambda example: [str(example.meta[name])] if example.meta.get(name) else []


def _get_answerable(example: TextExample) -> Sequence[str]:
    if not example.references:
        return []
    return ["yes" if any(example.references) else "no"]


def _get_topic(example: TextExample) -> Sequence[str]:
    return [str(example.meta.get("title") or "").replace("_", " ")]


KINDS: Kinds = {
    "topic": _get_topic,
    "language": _make_meta_getter("language"),
    "part": _make_meta_getter("source_task"),
}


def _count_values(examples: Sequence[TextExample], task: Task, kinds: Kinds) -> dict[str, JsonTable]:
    """Count the values of each kind that has any: the distinct ones, all, and the most frequent ones."""
    more: dict[str, Callable[[TextExample], Sequence[str]]] = {"target": lambda example: [example.targets]}
    if task.labels is not None:
        more = {"class": lambda example: example.references}
    elif tags := next((metric for metric in map(load_metric, task.metrics) if isinstance(metric, Tags)), None):
        more = {"tag": lambda example: tags.split(example.targets)}
    if task.no_answer_text is not None:
        more["answerable"] = _get_answerable
    found = {}
    for name, values_of in {**more, **kinds}.items():
        counts = Counter(value for example in examples for value in values_of(example) if value)
        common = counts.most_common(MAX_VALUES)
        if common and (name != "target" or common[0][1] >= MIN_SHARE * counts.total()):
            found[name] = {"num_values": len(counts), "num": counts.total(), "common": [list(pair) for pair in common]}
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
    contexts = [normalize_text(example.inputs[slice(*example.clippable)]) for example in examples]
    rests = [example.inputs[: example.clippable[0]] + example.inputs[example.clippable[1] :] for example in examples]
    fixed = len(set(rests)) == 1
    questions = [
        normalize_text(str(example.meta.get("question") or ("" if fixed else rest)))
        for example, rest in zip(examples, rests, strict=True)
    ]
    contexts = ["" if c == q else c for c, q in zip(contexts, questions, strict=True)]
    pairs = [f"{q} | {c}" if q and c else "" for q, c in zip(questions, contexts, strict=True)]
    return {"question": questions, "context": contexts, PAIR: pairs}


def _find_duplicates(examples: Sequence[TextExample], near: float) -> JsonTable:
    """Find repeated inputs, inputs and questions with different answers, and near-duplicate texts of one set."""
    words = _extract_texts(examples)
    inputs = _group_equal_texts([normalize_text(example.inputs) for example in examples])
    repeated = [places for places in inputs.values() if len(places) > 1]
    contradicted = [places for places in repeated if _has_disagreement(examples, places)]
    disputed = [
        places for places in _group_equal_texts(words["question"]).values() if _has_disagreement(examples, places)
    ]
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
    """Return text -> its indices; "" is left out."""
    places = defaultdict(list)
    for place, text in enumerate(texts):
        if text:
            places[text].append(place)
    return places


def _has_disagreement(examples: Sequence[TextExample], places: Sequence[int]) -> bool:
    """Return whether examples of several questions have no gold answer in common; answers are compared by words."""
    golds = [set(map(_normalize_words, examples[place].references)) for place in places if examples[place].references]
    groups = {examples[place].group or examples[place].id for place in places}
    return len(golds) > 1 and len(groups) > 1 and not set.intersection(*golds)


def _normalize_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _summarise_groups(examples: Sequence[TextExample], groups: Sequence[Sequence[int]]) -> JsonTable:
    """Summarise groups of equal examples; `num` counts the repetitions: all but the first of each group."""
    shown = [
        {
            "text": examples[places[0]].inputs,
            "ids": [examples[place].id for place in places[:NUM_SHOWN]],
            "answers": [next(iter(examples[place].references), "") for place in places[:NUM_SHOWN]],
        }
        for places in groups[:NUM_SHOWN]
    ]
    return {"num": sum(len(places) - 1 for places in groups), "of": len(examples), "shown": shown}


def _build_pair(text: str, other: str, similarity: float) -> JsonTable:
    return {"text": text, "other": other, "similarity": round(similarity, 3)}


def _find_leakage(train: Sequence[TextExample], evaluation: Sequence[TextExample], near: float) -> JsonTable:
    """Count the evaluation examples whose texts also occur in the training set, by kind of text."""
    known, asked = _extract_texts(train), _extract_texts(evaluation)
    kinds = [kind for kind in asked if any(asked[kind]) and any(known[kind])]
    return {kind: _compare_texts(known[kind], asked[kind], None if kind == PAIR else near) for kind in kinds}


def _compare_texts(known: Sequence[str], asked: Sequence[str], near: float | None) -> JsonTable:
    """Count equal and near-duplicate texts. `near` None: equal ones only, since all pairs with one context are near."""
    held, places = dict.fromkeys(filter(None, known)), _group_equal_texts(asked)
    exact = [text for text in places if text in held]
    rest, others = [text for text in places if text not in held], list(held)
    found = [] if near is None else list(find_near_duplicates(rest, others, threshold=near))
    pairs = [_build_pair(text, text, 1.0) for text in exact[:NUM_SHOWN]]
    pairs += [_build_pair(rest[one.row], others[one.other_row], one.similarity) for one in found[:NUM_SHOWN]]
    return {
        "num_exact": sum(len(places[text]) for text in exact),
        "num_near": None if near is None else sum(len(places[rest[one.row]]) for one in found),
        "of": sum(map(len, places.values())),
        "shown": pairs,
    }


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


# --- answers and characters ---


def _summarise_offsets(found: InspectedDataset) -> JsonTable:
    shown = list(map(asdict, found.wrong_offsets))
    return {"num": found.num_wrong_offsets, "of": found.num_offsets, "shown": shown}


def _summarise_golds(examples: Sequence[TextExample], task: Task) -> JsonTable:
    """Return the properties of the gold answers that distort scores.

    `num_blank` questions have a blank gold answer among others and so reward an empty prediction; `empty_scores` are
    the scores of empty predictions only, `empty_scores_without_blanks` the same without blank gold answers.
    `num_disjoint` questions have gold answers without a common word: perhaps all are required, but any one counts as
    right. `imbalance` describes uneven labels, `merged_forms` labels in several forms, `placeholders` answers that
    programs write for an empty cell, and `empty_inputs` such inputs.
    """
    firsts = {example.group or example.id: example for example in reversed(examples) if example.references}
    golds = [one.references for one in reversed(firsts.values())]
    scorer, is_label_task = Scorer(task.metrics), task.labels is not None
    forms = Counter(map(get_label_form, firsts.values()))
    placeholders = {} if task.extractive else {form: num for form, num in forms.items() if form in PLACEHOLDERS}
    facts: JsonTable = {
        "num": len(golds),
        "num_blank": sum(rewards_blank(scorer, references) for references in golds),
        "num_disjoint": 0 if is_label_task else sum(map(_are_disjoint, golds)),
        "num_dropped_synonyms": sum(DROPPED_SYNONYMS in example.meta for example in firsts.values()),
        "language": suggest_language(task, golds),
        "imbalance": describe_imbalance(Counter(one[0] for one in golds)) if is_label_task else "",
        "merged_forms": describe_merged_forms(forms, {}) if is_label_task else "",
        "placeholders": describe_placeholders(placeholders, what="label" if is_label_task else "answer"),
        "empty_inputs": describe_placeholders(Counter(map(find_placeholder_input, examples)), what="input"),
    }
    if facts["num_blank"]:
        silence = [""] * len(golds)
        facts["empty_scores"] = scorer.score(silence, golds).corpus
        facts["empty_scores_without_blanks"] = scorer.score(silence, list(map(drop_blank_golds, golds))).corpus
    return facts


def _are_disjoint(references: Sequence[str]) -> bool:
    """Return whether there are several distinct gold answers, no two of which share a word."""
    words = [set(re.findall(r"\w+", gold.casefold())) for gold in references if gold.strip()]
    known = [set(one) for one in {frozenset(one) for one in words if one}]
    return len(known) > 1 and sum(map(len, known)) == len(set().union(*known))


def _find_missing_answers(examples: Sequence[TextExample]) -> JsonTable:
    """Count the examples whose context contains no gold answer, and the questions whose contexts all contain none."""
    holding: dict[str, bool] = {}
    missing, num_other_case, num_answered = [], 0, 0
    for example in examples:
        golds = [reference for reference in example.references if reference.strip()]
        if not golds:
            continue
        num_answered += 1
        context = example.inputs[slice(*example.clippable)]
        group = example.group or example.id
        held = any(gold in context for gold in golds)
        if not held:
            folded = any(find_text(context, gold) for gold in golds)
            num_other_case += folded
            missing += [] if folded else [example]
            held = folded
        holding[group] = holding.get(group, False) or held
    shown = [{"id": e.id, "answer": e.references[0], "text": e.inputs} for e in missing[:NUM_SHOWN]]
    return {
        "num": len(missing),
        "num_other_case": num_other_case,
        "of": num_answered,
        "num_questions": sum(not held for held in holding.values()),
        "of_questions": len(holding),
        "shown": shown,
    }


def _summarise_characters(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> JsonTable:
    found = measure_coverage(tokenizer, texts)
    lost = [one._asdict() for one in found.lossy[:MAX_VALUES]]
    return {"num": found.num_texts_hit, "of": found.num_texts, "num_characters": len(found.lossy), "common": lost}


# --- examples ---


def _sample_examples(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[TextExample], limits: LengthLimits
) -> list[JsonTable]:
    """Return NUM_SHOWN examples from the shortest to the longest inputs, as the model reads them."""
    by_length = sorted(range(len(examples)), key=lambda place: (len(examples[place].inputs), place))
    steps = min(NUM_SHOWN, len(examples))
    places = dict.fromkeys(by_length[(len(examples) - 1) * i // max(steps - 1, 1)] for i in range(steps))
    return [_format_encoded(tokenizer, examples[place], limits) for place in places]


def _format_encoded(tokenizer: PreTrainedTokenizerBase, example: TextExample, limits: LengthLimits) -> JsonTable:
    seen = split_into_windows(tokenizer, [example], limits)[0] if limits.overlong == "windows" else example
    [tokens] = encode(tokenizer, [seen], [seen.targets], limits=limits)
    whole = next(tokenize_inputs(tokenizer, [seen])).ids
    cut = next((i for i, pair in enumerate(zip(tokens.input_ids, whole, strict=False)) if pair[0] != pair[1]), None)
    before, after = tokens.input_ids[:cut], tokens.input_ids[cut:] if cut is not None else []
    return {
        "id": seen.id,
        "text": seen.inputs,
        "inputs": [tokenizer.decode(list(ids)) for ids in (before, after) if len(ids)],
        "num_input_tokens": len(tokens.input_ids),
        "num_cut": tokens.num_clipped_inputs,
        "answer_lost": tokens.answer_clipped,
        "window": seen.meta.get("window"),
        "targets": tokenizer.decode(list(tokens.labels)),
        "num_target_tokens": len(tokens.labels),
        "num_cut_targets": tokens.num_clipped_targets,
        "references": list(example.references),
    }
