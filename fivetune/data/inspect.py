"""What a data set holds, before anything is trained on it: counts, lengths, repetitions, leaks, lost characters.

In: sources, a task, a tokenizer. Out: plain facts, as `fivetune inspect --json` prints them. A record that cannot be
used is counted, never raised. Memory holds the texts of all examples.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from fivetune.data.characters import coverage
from fivetune.data.duplicates import near_texts, plain
from fivetune.data.encode import Limits, encode, pieces_of
from fivetune.data.limits import distribution, input_limits, measured, target_limits
from fivetune.data.records import BadRecord, read_records, refuse_duplicate_ids
from fivetune.data.windows import windows
from fivetune.errors import DataError
from fivetune.tasks import Task, find_text
from fivetune.types import RawRecord, TextExample

NUM_SHOWN = 5  # of everything that is counted
MAX_VALUES = 10  # values of one kind that are counted apart
LEAST_SHARE = 0.01  # of the most frequent target, below which targets are not counted: each is another one

Kinds = Mapping[str, Callable[[TextExample], Sequence[str]]]
Count = Callable[[str, int], None]


@dataclass(slots=True)
class DataSet:
    """The examples of some sources, and what became of the records that are none.

    `unlabelled` records are converted without their answers, `left_out` ones are none of the task's; of these and of
    the `skipped` ones the first are named.
    """

    sources: tuple[str, ...]
    examples: list[TextExample] = field(default_factory=list)
    num_read: int = 0
    num_skipped: int = 0
    num_unlabelled: int = 0
    num_left_out: int = 0
    skipped: list[BadRecord] = field(default_factory=list)
    unlabelled: list[BadRecord] = field(default_factory=list)

    def skip(self, bad: BadRecord) -> None:
        """Count a record that cannot be read or converted."""
        self.num_read += 1
        self.num_skipped += 1
        self.skipped += [bad] if len(self.skipped) < NUM_SHOWN else []

    def convert(self, record: RawRecord, task: Task) -> None:
        """Add the examples of a record, without answers where it has none that can be used."""
        try:
            converted = task.to_text(record)
        except DataError as error:
            bad = BadRecord(record.where, str(error).removeprefix(f"{record.where}: "))
            try:
                converted = task.to_text(record, labelled=False)
            except DataError:
                self.skip(bad)
                return
            self.num_unlabelled += 1
            self.unlabelled += [bad] if len(self.unlabelled) < NUM_SHOWN else []
        self.num_read += 1
        self.num_left_out += not converted
        self.examples += converted if isinstance(converted, tuple) else filter(None, (converted,))


def read(
    sources: Sequence[str], task: Task, columns: Mapping[str, str], *, max_records: int | None, count: Count
) -> DataSet:
    """All records of some sources as examples. Raises DataError for a file that cannot be read, or makes no example."""
    found = DataSet(tuple(sources))
    records = (record for path in sources for record in read_records(path, columns=columns, on_bad=found.skip))
    for record in islice(refuse_duplicate_ids(records, on_bad=found.skip), max_records):
        found.convert(record, task)
        if found.num_read % 1_000 == 0:
            count(f"reading {', '.join(sources)}", found.num_read)
    if not found.examples:
        first = next((f" The first: {bad.where}: {bad.reason}" for bad in found.skipped), "")
        raise DataError(f"{', '.join(sources)}: none of {found.num_read} records makes an example. "
                        f"Check --task and data.columns.{first}")  # fmt: skip
    return found


def inspect(
    sets: Mapping[str, DataSet], task: Task, tokenizer: Any, *, limits: Limits, near: float, kinds: Kinds, count: Count
) -> dict[str, Any]:
    """The facts of one set, or of a training and an evaluation set.

    Args:
        sets: {"train": ...} or {"train": ..., "eval": ...}.
        near: Jaccard similarity of word shingles (0-1) from which on two texts are near.
        kinds: what examples are counted by, besides KINDS: name -> the values of an example.
        count: told what is being done, and how many examples it concerns.
    """
    facts: dict[str, Any] = {"task": task.plugin_name(), "near": near, "sets": {}}
    for name, found in sets.items():
        count(f"{name}: lengths", len(found.examples))
        targets = [target for example in found.examples for target in _targets(task, example, name)]
        lengths = measured(tokenizer, found.examples, targets, answers_can_be_lost=not task.labels)
        count(f"{name}: duplicates and characters", len(found.examples))
        texts = [f"{example.inputs} {example.targets}" for example in found.examples]
        facts["sets"][name] = {
            **_read_facts(found),
            "num_targets": len(targets),
            "counts": _counts(found.examples, task, {**KINDS, **kinds}),
            "lengths": {part: distribution(getattr(lengths, part)) for part in ("inputs", "contexts", "targets")},
            "input_limits": input_limits(lengths, limits.max_input_tokens),
            "target_limits": target_limits(lengths, limits.max_target_tokens),
            "duplicates": _duplicates(found.examples, near),
            "answers": _answers(found.examples) if task.extractive else None,
            "characters": _characters(tokenizer, texts),
        }
    if len(sets) > 1:
        count("leakage", len(sets["eval"].examples))
        facts["leakage"] = _leakage(sets["train"].examples, sets["eval"].examples, near)
    facts["examples"] = _shown(tokenizer, sets["train"].examples, limits)
    return facts


def _targets(task: Task, example: TextExample, name: str) -> tuple[str, ...]:
    """What is learnt from an example, or scored by it; nothing where the answer is not known."""
    if not example.targets:
        return ()
    return task.train_targets(example) if name == "train" else (example.targets,)


def _read_facts(found: DataSet) -> dict[str, Any]:
    names = ("num_read", "num_skipped", "num_unlabelled", "num_left_out")
    return {
        "sources": list(found.sources),
        **{name: getattr(found, name) for name in names},
        "num_examples": len(found.examples),
        "num_groups": len({example.group or example.id for example in found.examples}),
        **{name: [asdict(bad) for bad in getattr(found, name)] for name in ("skipped", "unlabelled")},
    }


# --- counts ---


def _meta(name: str) -> Callable[[TextExample], Sequence[str]]:
    return lambda example: [str(example.meta[name])] if example.meta.get(name) else []


def _answerable(example: TextExample) -> Sequence[str]:
    return ["yes" if any(example.references) else "no"] if example.references else []


def _topic(example: TextExample) -> Sequence[str]:
    return [str(example.meta.get("title") or "").replace("_", " ")]


KINDS: Kinds = {"topic": _topic, "language": _meta("language"), "part": _meta("source_task")}


def _counts(examples: Sequence[TextExample], task: Task, kinds: Kinds) -> dict[str, dict[str, Any]]:
    """By each kind of which something is known: how many examples are counted, and the most frequent values."""
    more: dict[str, Callable[[TextExample], Sequence[str]]] = {"target": lambda example: [example.targets]}
    if task.labels:
        more = {"class": lambda example: example.references}
    elif "tags" in task.metrics:
        more = {"tag": lambda example: example.targets.split(", ")}
    if task.no_answer_text is not None:
        more["answerable"] = _answerable
    found = {}
    for name, values_of in {**more, **kinds}.items():
        counts = Counter(value for example in examples for value in values_of(example) if value)
        common = counts.most_common(MAX_VALUES)
        if common and (name != "target" or common[0][1] >= LEAST_SHARE * counts.total()):
            found[name] = {"num_values": len(counts), "num": counts.total(), "common": [list(pair) for pair in common]}
    return found


# --- repetitions ---

PAIR = "question and context"


def _words(examples: Sequence[TextExample]) -> dict[str, list[str]]:
    """The comparable texts of examples: question, context, both; "" where there is none.

    The context is the part that may be cut, unless that is the question. A question that the task does not name is
    the rest of the inputs, unless that is the same words everywhere.
    """
    contexts = [plain(example.inputs[slice(*example.clippable)]) for example in examples]
    rests = [example.inputs[: example.clippable[0]] + example.inputs[example.clippable[1] :] for example in examples]
    fixed = len(set(rests)) == 1
    questions = [
        plain(str(example.meta.get("question") or ("" if fixed else rest)))
        for example, rest in zip(examples, rests, strict=True)
    ]
    contexts = ["" if c == q else c for c, q in zip(contexts, questions, strict=True)]
    pairs = [f"{q} | {c}" if q and c else "" for q, c in zip(questions, contexts, strict=True)]
    return {"question": questions, "context": contexts, PAIR: pairs}


def _duplicates(examples: Sequence[TextExample], near: float) -> dict[str, Any]:
    """Inputs that stand twice, questions that are answered differently, and nearly equal texts of one set."""
    words = _words(examples)
    inputs = _same([plain(example.inputs) for example in examples])
    repeated = [places for places in inputs.values() if len(places) > 1]
    contradicted = [places for places in repeated if _disagree(examples, places)]
    disputed = [places for places in _same(words["question"]).values() if _disagree(examples, places)]
    facts: dict[str, Any] = {
        "inputs": _groups(examples, repeated),
        "inputs with different answers": _groups(examples, contradicted),
        "questions with different answers": _groups(examples, disputed),
    }
    for kind in ("question", "context"):
        texts = [text for text in dict.fromkeys(words[kind]) if text]
        found = list(near_texts(texts, threshold=near))
        shown = [_pair(texts[one.place], texts[one.other], one.similarity) for one in found[:NUM_SHOWN]]
        facts[f"near {kind}s"] = {"num": len(found), "of": len(texts), "shown": shown}
    return facts


def _same(texts: Sequence[str]) -> dict[str, list[int]]:
    """Text -> the places where it stands; "" is none."""
    places = defaultdict(list)
    for place, text in enumerate(texts):
        if text:
            places[text].append(place)
    return places


def _disagree(examples: Sequence[TextExample], places: Sequence[int]) -> bool:
    """Whether examples of several questions have no answer in common, by its words."""
    golds = [set(map(_bare, examples[place].references)) for place in places if examples[place].references]
    groups = {examples[place].group or examples[place].id for place in places}
    return len(golds) > 1 and len(groups) > 1 and not set.intersection(*golds)


def _bare(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _groups(examples: Sequence[TextExample], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    """`num` examples stand there again, after the first of their group."""
    shown = [
        {
            "text": examples[places[0]].inputs,
            "ids": [examples[place].id for place in places[:NUM_SHOWN]],
            "answers": [next(iter(examples[place].references), "") for place in places[:NUM_SHOWN]],
        }
        for places in groups[:NUM_SHOWN]
    ]
    return {"num": sum(len(places) - 1 for places in groups), "of": len(examples), "shown": shown}


def _pair(text: str, other: str, similarity: float) -> dict[str, Any]:
    return {"text": text, "other": other, "similarity": round(similarity, 3)}


def _leakage(train: Sequence[TextExample], evaluation: Sequence[TextExample], near: float) -> dict[str, Any]:
    """Which texts of the evaluation set stand in the training set, too, and how many examples that touches."""
    known, asked = _words(train), _words(evaluation)
    kinds = [kind for kind in asked if any(asked[kind]) and any(known[kind])]
    return {kind: _leaks(known[kind], asked[kind], None if kind == PAIR else near) for kind in kinds}


def _leaks(known: Sequence[str], asked: Sequence[str], near: float | None) -> dict[str, Any]:
    """`near` None looks for equal texts only: pairs of one context are near whatever is asked."""
    held, places = dict.fromkeys(filter(None, known)), _same(asked)
    exact = [text for text in places if text in held]
    rest, others = [text for text in places if text not in held], list(held)
    found = [] if near is None else list(near_texts(rest, others, threshold=near))
    pairs = [_pair(text, text, 1.0) for text in exact[:NUM_SHOWN]]
    pairs += [_pair(rest[one.place], others[one.other], one.similarity) for one in found[:NUM_SHOWN]]
    return {
        "num_exact": sum(len(places[text]) for text in exact),
        "num_near": None if near is None else sum(len(places[rest[one.place]]) for one in found),
        "of": sum(map(len, places.values())),
        "shown": pairs,
    }


# --- answers and characters ---


def _answers(examples: Sequence[TextExample]) -> dict[str, Any]:
    """How many answers do not stand in their context; of a question asked of several contexts, in none of them."""
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
        "num": len(missing), "num_other_case": num_other_case, "of": num_answered,
        "num_questions": sum(not held for held in holding.values()), "of_questions": len(holding), "shown": shown,
    }  # fmt: skip


def _characters(tokenizer: Any, texts: Sequence[str]) -> dict[str, Any]:
    found = coverage(tokenizer, texts)
    lost = [one._asdict() for one in found.lost[:MAX_VALUES]]
    return {"num": found.num_texts_hit, "of": found.num_texts, "num_characters": len(found.lost), "common": lost}


# --- examples ---


def _shown(tokenizer: Any, examples: Sequence[TextExample], limits: Limits) -> list[dict[str, Any]]:
    """Five examples from the shortest to the longest, as the model reads them."""
    by_length = sorted(range(len(examples)), key=lambda place: (len(examples[place].inputs), place))
    steps = min(NUM_SHOWN, len(examples))
    places = dict.fromkeys(by_length[(len(examples) - 1) * i // max(steps - 1, 1)] for i in range(steps))
    return [_as_read(tokenizer, examples[place], limits) for place in places]


def _as_read(tokenizer: Any, example: TextExample, limits: Limits) -> dict[str, Any]:
    seen = windows(tokenizer, [example], limits)[0] if limits.overlong == "windows" else example
    [tokens] = encode(tokenizer, [seen], [seen.targets], limits=limits)
    whole = pieces_of(tokenizer, [seen])[0].ids
    cut = next((i for i, pair in enumerate(zip(tokens.input_ids, whole, strict=False)) if pair[0] != pair[1]), None)
    before, after = tokens.input_ids[:cut], tokens.input_ids[cut:] if cut is not None else []
    return {
        "id": seen.id,
        "inputs": [tokenizer.decode(ids) for ids in (before, after) if len(ids)],
        "num_input_tokens": len(tokens.input_ids),
        "num_cut": tokens.num_clipped_inputs,
        "answer_lost": tokens.answer_clipped,
        "window": seen.meta.get("window"),
        "targets": tokenizer.decode(tokens.labels),
        "num_target_tokens": len(tokens.labels),
        "num_cut_targets": tokens.num_clipped_targets,
        "references": list(example.references),
    }
