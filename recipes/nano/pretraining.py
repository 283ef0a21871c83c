"""Write the pre-training pairs of `t5-nano`: generated notes, and questions about them in other forms than SQuAD's.

In: numbers of examples and a seed. Out: `train.jsonl` and `eval.jsonl` with `{"id", "inputs", "targets", "kind"}`.

A note is a list of facts (owner, relation, value), 1 to 6 of them, each written as a short sentence. Kinds of examples:

    lookup           find R of E in: <note>                         found V        or: absent
    several_lookups  find R of E; S of F in: <note>                 found V; absent
    decision         is R of E told in: <note>                      yes            or: no
    extraction       fill: the R of E is <extra_id_0> <note>        <extra_id_0> V or: <extra_id_0> absent
    listing          all R in: <note>                               found V; W
    copy             say again: A, B, C                             A, B, C
    span_corruption  <note with words replaced by sentinels>        <extra_id_0> ... <extra_id_1> ...

The prompt `question: ... context: ...` and the no-answer text of the fine-tuning task do not occur, and looked-up
values follow the word `found`; so only fine-tuning teaches the form of that task, and the model scores nothing before.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fivetune.data.corpus.names import NameGenerator
from fivetune.data.corpus.reading import draw_absent_pair
from fivetune.tasks.denoising import corrupt_spans

ABSENT = "absent"

RELATIONS = (
    *("colour", "owner", "price", "weight", "keeper", "rival", "song", "food", "river", "tool", "guest", "gift"),
    *("sister", "uncle", "teacher", "seed", "stone", "drink", "key", "flag", "cook", "judge", "doctor", "tailor"),
    *("friend", "number", "height", "street", "horse", "lamp", "guard", "voice", "ring", "roof", "boat"),
)

# Sentences for one fact: r = relation, e = its owner, v = its value. None of them occurs in `reading.py`.
SENTENCES = (
    "The {r} of {e} is {v}.",
    "{v} is the {r} of {e}.",
    "{e} has {v} as {r}.",
    "{e}'s {r} is {v}.",
    "{e}: {r} {v}.",
    "{r} ({e}) = {v};",
    "As {r}, {e} got {v}.",
    "They say {v} is {r} for {e}.",
    "For {e} the {r} was {v}.",
    "{e} - {r} - {v}.",
    "{v}, {r} to {e}.",
    "By {r} {e} meant {v}.",
    "{e} {r} {v}.",
    "{v} {r} {e}.",
    "{e} would {r} {v} at noon.",
    "{v} had {r}ed {e}.",
    "In {e} you see {v} ({r}).",
)

QUERIES = (
    "{r} of {e}",
    "{e} {r}",
    "{r} {e}",
    "{e}'s {r}",
    "{r} for {e}",
    "what {e} has as {r}",
    "the {r} that {e} got",
)

LOOKUPS = (
    "find {q} in: {note}",
    "look up {q}: {note}",
    "tell {q}. {note}",
    "{q}? {note}",
    "{note} => find {q}",
    "note: {note} wanted: {q}",
)


@dataclass(frozen=True, slots=True)
class Fact:
    """`value` is the `relation` of `owner`."""

    owner: str
    relation: str
    value: str


@dataclass(frozen=True, slots=True)
class Note:
    """Facts with distinct (owner, relation) pairs, and the text that states them."""

    facts: tuple[Fact, ...]
    text: str


def write_pretraining_corpus(
    folder: Path, *, num_train: int, num_eval: int, seed: int, max_facts: int = 6
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl` into `folder`; the same arguments give the same bytes.

    Notes have 1 to `max_facts` facts: 1 gives short examples, on which a model first learns to copy and to match, 6 the
    full corpus.

        write_pretraining_corpus(Path("corpus"), num_train=600_000, num_eval=1_000, seed=1)
        ->  {"id": "train-0", "inputs": "find flag of Velka in: The flag of Velka is Torun.",
             "targets": "found Torun", "kind": "lookup"}
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "eval.jsonl"
    for path, num_examples in zip(paths, (num_train, num_eval), strict=True):
        with path.open("w", encoding="utf-8") as file:
            for example in generate_pretraining_examples(num_examples, split=path.stem, seed=seed, max_facts=max_facts):
                file.write(json.dumps(example, ensure_ascii=False) + "\n")
    return paths


def generate_pretraining_examples(
    num_examples: int, *, split: str, seed: int, max_facts: int = 6
) -> Iterator[dict[str, str]]:
    """Yield the examples of one split; names are from the training part only."""
    rng = random.Random(f"pretraining {seed} {split}")
    make = NameGenerator(rng, held_out=False)
    kinds = tuple(MIXTURE)
    weights = tuple(weight for weight, _ in MIXTURE.values())
    for index in range(num_examples):
        kind = rng.choices(kinds, weights)[0]
        inputs, targets = MIXTURE[kind][1](rng, make, max_facts)
        yield {"id": f"{split}-{index}", "inputs": inputs, "targets": targets, "kind": kind}


def _draw_value(rng: random.Random, make: NameGenerator) -> str:
    makers: tuple[Callable[[], str], ...] = (
        make.draw_person,
        make.draw_place,
        make.draw_thing,
        make.draw_word,
        make.draw_number,
        make.draw_date,
    )
    return rng.choices(makers, (5, 3, 3, 4, 1, 1))[0]()


def _draw_owner(rng: random.Random, make: NameGenerator) -> str:
    return rng.choices((make.draw_person, make.draw_place, make.draw_thing, make.draw_word), (2, 2, 2, 4))[0]()


def _draw_relation(rng: random.Random, make: NameGenerator) -> str:
    return rng.choice(RELATIONS) if rng.random() < 0.6 else make.draw_lower_word()


def _make_sentence_pattern(rng: random.Random, make: NameGenerator) -> str:
    """Invent a sentence pattern: owner, relation and value in random order, with one or two invented words."""
    slots = ["{e}", "{r}", "{v}"]
    rng.shuffle(slots)
    for _ in range(rng.randint(1, 2)):
        slots.insert(rng.randint(0, len(slots)), make.draw_lower_word())
    return " ".join(slots) + "."


def _make_note(rng: random.Random, make: NameGenerator, *, max_facts: int) -> Note:
    """Make a note of 1 to `max_facts` facts; owners and relations may repeat, so that a query must match both."""
    num_facts = min(max_facts, rng.choice((1, 2, 3, 4, 5, 6)))
    owners = [_draw_owner(rng, make) for _ in range(rng.randint(1 + num_facts // 4, max(1, num_facts)))]
    relations = [_draw_relation(rng, make) for _ in range(rng.randint(1 + num_facts // 3, max(1, num_facts)))]
    pairs = list(dict.fromkeys((owner, relation) for owner in owners for relation in relations))
    pairs = rng.sample(pairs, min(num_facts, len(pairs)))
    facts = tuple(Fact(owner, relation, _draw_value(rng, make)) for owner, relation in pairs)
    patterns = list(SENTENCES) + [_make_sentence_pattern(rng, make) for _ in range(2)] * 3
    if rng.random() < 0.5:
        patterns = [rng.choice(patterns)]
    text = " ".join(rng.choice(patterns).format(e=f.owner, r=f.relation, v=f.value) for f in facts)
    return Note(facts, text)


def _make_query(rng: random.Random, make: NameGenerator, note: Note, *, share_absent: float) -> tuple[str, str]:
    """Return a query and its answer: on a fact of the note, or on an (owner, relation) pair that it does not state."""
    pattern = rng.choice(QUERIES)
    fact = rng.choice(note.facts)
    if rng.random() >= share_absent:
        return pattern.format(e=fact.owner, r=fact.relation), f"found {fact.value}"
    owner, relation = _draw_pair_absent_from(rng, make, note)
    return pattern.format(e=owner, r=relation), ABSENT


def _draw_pair_absent_from(rng: random.Random, make: NameGenerator, note: Note) -> tuple[str, str]:
    told = [(fact.owner, fact.relation) for fact in note.facts]
    return draw_absent_pair(
        rng, told, new_owner=lambda: _draw_owner(rng, make), new_relation=lambda: _draw_relation(rng, make)
    )


def _make_lookup(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    note = _make_note(rng, make, max_facts=max_facts)
    query, answer = _make_query(rng, make, note, share_absent=0.35)
    return rng.choice(LOOKUPS).format(q=query, note=note.text), answer


def _make_multi_lookup(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    """Return two to four queries about one note: more training signal per word of input."""
    note = _make_note(rng, make, max_facts=max_facts)
    asked = [_make_query(rng, make, note, share_absent=0.25) for _ in range(rng.randint(2, min(4, 1 + max_facts)))]
    query = "; ".join(query for query, _ in asked)
    return rng.choice(LOOKUPS).format(q=query, note=note.text), "; ".join(answer for _, answer in asked)


def _make_decision(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    note = _make_note(rng, make, max_facts=max_facts)
    query, answer = _make_query(rng, make, note, share_absent=0.5)
    return f"is {query} told in: {note.text}", "no" if answer == ABSENT else "yes"


def _make_extraction(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    """Return a statement with a sentinel as its value, as in span corruption, to be filled from the note."""
    note = _make_note(rng, make, max_facts=max_facts)
    fact = rng.choice(note.facts)
    owner, relation, answer = fact.owner, fact.relation, fact.value
    if rng.random() < 0.3:
        (owner, relation), answer = _draw_pair_absent_from(rng, make, note), ABSENT
    statement = rng.choice(SENTENCES).format(e=owner, r=relation, v="<extra_id_0>")
    order = (statement, note.text) if rng.random() < 0.7 else (note.text, statement)
    return "fill: " + " ".join(order), f"<extra_id_0> {answer}"


def _make_listing(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    """Return all values of one owner or of one relation, in the order of the note."""
    note = _make_note(rng, make, max_facts=min(4, max_facts))
    fact = rng.choice(note.facts)
    if rng.random() < 0.5:
        wanted, key = fact.relation, [other.value for other in note.facts if other.relation == fact.relation]
    else:
        wanted, key = fact.owner, [other.value for other in note.facts if other.owner == fact.owner]
    return f"all {wanted} in: {note.text}", "found " + "; ".join(key)


def _make_copy(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    text = ", ".join(_draw_value(rng, make) for _ in range(rng.randint(1, max(1, max_facts - 1))))
    return f"say again: {text}", text


def _make_span_corruption(rng: random.Random, make: NameGenerator, max_facts: int) -> tuple[str, str]:
    """Corrupt spans of a note; 60 % of the notes state every fact twice, so that the removed words can be found."""
    note = _make_note(rng, make, max_facts=min(4, max_facts))
    text = note.text
    if rng.random() < 0.6:
        retold = (rng.choice(SENTENCES).format(e=f.owner, r=f.relation, v=f.value) for f in note.facts)
        text = f"{text} {' '.join(retold)}"
    words = text.split()
    return corrupt_spans(words, _choose_spans(rng, len(words)))


def _choose_spans(rng: random.Random, num_words: int) -> list[tuple[int, int]]:
    """Choose about 15 % of the words in spans of 1 to 3 words that do not touch, at least one span."""
    spans: list[tuple[int, int]] = []
    position = rng.randint(0, min(6, num_words - 1))
    while position < num_words:
        end = min(num_words, position + rng.randint(1, 3))
        spans.append((position, end))
        position = end + rng.randint(5, 15)
    return spans


MIXTURE: dict[str, tuple[float, Callable[[random.Random, NameGenerator, int], tuple[str, str]]]] = {
    "lookup": (0.32, _make_lookup),
    "several_lookups": (0.25, _make_multi_lookup),
    "decision": (0.05, _make_decision),
    "extraction": (0.12, _make_extraction),
    "listing": (0.08, _make_listing),
    "copy": (0.08, _make_copy),
    "span_corruption": (0.10, _make_span_corruption),
}
