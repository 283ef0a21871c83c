"""Write the quickstart's reading-comprehension corpus as two SQuAD 2.0 files.

In: numbers of questions and a seed. Out: `train.json` and `dev.json`, four questions per paragraph.

A paragraph states 3 to 5 facts (3 or 4 in the quickstart) about 2 or 3 owners (ships, towns, books, firms, people),
with 2 or 3 relations among them:

    The Velka was launched in 1871. Torun Dresh commands the Velka. The Marpol was launched in 1902.
    When was the Marpol launched?   -> 1902
    Who commands the Marpol?        -> no answer: both are in the text, but not together

Owner and relation must both be matched. Half of the questions have no answer: the pair is crossed as above (about half
of them), or the relation is stated of no owner, or the owner is not in the text. All sentence patterns and questions
are in `DOMAINS` below; pre-training uses none of them. Names in `dev.json` are from the held-out part (`names.py`),
those in `train.json` from the training part; numbers, years and dates are common to both. Some answers have several
gold texts ("84 metres", "84").
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivetune.data.corpus.names import NameGenerator

QUESTIONS_PER_PARAGRAPH = 4
PARAGRAPHS_PER_ARTICLE = 10

MakeValue = Callable[[NameGenerator], str]


@dataclass(frozen=True, slots=True)
class Relation:
    """Patterns of a relation ({e} = owner, {v} = value); a second gold answer omits `before` and `after`."""

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    value: MakeValue
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of owner and its relations by name."""

    title: str
    owner: MakeValue
    relations: dict[str, Relation]


@dataclass(frozen=True, slots=True)
class StatedFact:
    """One fact in a paragraph: the gold answers are (text, position in the paragraph)."""

    owner: str
    relation: str
    golds: tuple[tuple[str, int], ...]


SHIPS = Domain(
    "Ships",
    lambda make: f"the {make.draw_thing()}",
    {
        "launch": Relation(
            ("{e} was launched in {v}.", "In {v}, {e} left the slipway."),
            ("When was {e} launched?",),
            NameGenerator.draw_year,
        ),
        "captain": Relation(
            ("{v} commands {e}.", "The captain of {e} is called {v}."),
            ("Who commands {e}?", "Who is the captain of {e}?"),
            NameGenerator.draw_person,
            before="Captain ",
        ),
        "mooring": Relation(
            ("{e} is moored at {v}.", "You can visit {e} at {v}."), ("Where is {e} moored?",), NameGenerator.draw_place
        ),
        "length": Relation(
            ("{e} measures {v} from bow to stern.",), ("How long is {e}?",), NameGenerator.draw_number, after=" metres"
        ),
        "designer": Relation(
            ("{v} drew the plans of {e}.", "{e} was designed by {v}."),
            ("Who designed {e}?",),
            NameGenerator.draw_person,
        ),
    },
)

TOWNS = Domain(
    "Towns",
    NameGenerator.draw_place,
    {
        "founder": Relation(
            ("{e} was founded by {v}.", "{v} founded {e}."),
            ("Who founded {e}?", "By whom was {e} founded?"),
            NameGenerator.draw_person,
        ),
        "people": Relation(
            ("About {v} people live in {e}.",), ("How many people live in {e}?",), NameGenerator.draw_number
        ),
        "water": Relation(
            ("{e} lies on the banks of {v}.", "{v} flows through {e}."),
            ("Which water does {e} lie on?",),
            NameGenerator.draw_word,
            before="the ",
        ),
        "twin": Relation(
            ("{e} has been twinned with {v} for years.", "The twin town of {e} is named {v}."),
            ("Which town is {e} twinned with?",),
            NameGenerator.draw_place,
        ),
        "charter": Relation(
            ("{e} received its charter on {v}.",), ("When did {e} receive its charter?",), NameGenerator.draw_date
        ),
    },
)

BOOKS = Domain(
    "Books",
    lambda make: f"“{make.draw_thing()}”",
    {
        "author": Relation(
            ("{v} wrote {e}.", "{e} was written by {v}."),
            ("Who wrote {e}?", "Who is the author of {e}?"),
            NameGenerator.draw_person,
        ),
        "print": Relation(
            ("{e} was first printed in {v}.",), ("When was {e} first printed?",), NameGenerator.draw_year
        ),
        "publisher": Relation(
            ("{v} published {e}.", "{e} came out with {v}."),
            ("Who published {e}?",),
            NameGenerator.draw_thing,
            after=" & Sons",
        ),
        "translator": Relation(
            ("{v} translated {e} into English.",), ("Who translated {e}?",), NameGenerator.draw_person
        ),
        "scene": Relation(
            ("The story of {e} is set in {v}.", "{e} plays in {v}."), ("Where is {e} set?",), NameGenerator.draw_place
        ),
    },
)

FIRMS = Domain(
    "Firms",
    lambda make: f"{make.draw_word()} Ltd",
    {
        "seat": Relation(
            ("{e} has its headquarters in {v}.", "{e} is based in {v}."),
            ("Where is {e} based?",),
            NameGenerator.draw_place,
        ),
        "director": Relation(
            ("{e} is run by {v}.", "{v} directs {e}."),
            ("Who runs {e}?", "Who directs {e}?"),
            NameGenerator.draw_person,
            before="Dr ",
        ),
        "product": Relation(
            ("{e} makes the {v} engine.", "The {v} engine comes from {e}."),
            ("Which engine does {e} make?",),
            NameGenerator.draw_word,
        ),
        "staff": Relation(
            ("{e} employs {v}.",), ("How many people does {e} employ?",), NameGenerator.draw_number, after=" people"
        ),
        "rival": Relation(
            ("{e} competes with {v}.",),
            ("Which company does {e} compete with?",),
            NameGenerator.draw_thing,
            after=" Inc.",
        ),
    },
)

PEOPLE = Domain(
    "People",
    NameGenerator.draw_person,
    {
        "birthplace": Relation(
            ("{e} was born in {v}.", "{e} grew up in {v}."), ("Where was {e} born?",), NameGenerator.draw_place
        ),
        "birthday": Relation(("{e} was born on {v}.",), ("When was {e} born?",), NameGenerator.draw_date),
        "spouse": Relation(
            ("{e} married {v}.", "{e} and {v} are married."), ("Who did {e} marry?",), NameGenerator.draw_person
        ),
        "teacher": Relation(
            ("{e} studied under {v}.", "{v} taught {e}."),
            ("Who taught {e}?",),
            NameGenerator.draw_person,
            before="Professor ",
        ),
        "employer": Relation(
            ("{e} worked for {v}.",), ("Who did {e} work for?",), NameGenerator.draw_thing, after=" & Co."
        ),
    },
)

QUICKSTART_FOLDER = Path("runs/quickstart-corpus")  # as in recipes/quickstart.yaml
QUICKSTART_TRAIN, QUICKSTART_EVAL = 16_000, 600
DOMAINS = (SHIPS, TOWNS, BOOKS, FIRMS, PEOPLE)


def write_reading_corpus(
    folder: Path,
    *,
    num_train: int,
    num_eval: int,
    seed: int,
    domains: Sequence[Domain] = DOMAINS,
    max_facts: int = 5,
) -> tuple[Path, Path]:
    """Write `train.json` and `dev.json` with that many questions into `folder`; the same arguments give the same bytes.

    A paragraph belongs to one of the `domains` and states 3 to `max_facts` facts.

    write_reading_corpus(Path("quickstart"), num_train=12_000, num_eval=1_000, seed=1)
    ->  {"version": "v2.0", "data": [{"title": "Ships 1", "paragraphs": [{
          "context": "The Velka was launched in 1871. ...",
          "qas": [{"id": "train-0", "question": "When was the Velka launched?", "is_impossible": false,
                   "answers": [{"text": "1871", "answer_start": 26}]}, ...]}, ...]}]}
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.json", folder / "dev.json"
    for path, num_questions in zip(paths, (num_train, num_eval), strict=True):
        corpus = build_reading_corpus(num_questions, split=path.stem, seed=seed, domains=domains, max_facts=max_facts)
        path.write_text(json.dumps(corpus, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return paths


def write_quickstart_corpus(folder: Path = QUICKSTART_FOLDER) -> tuple[Path, Path]:
    """Write the corpus that the recipe `quickstart` trains on."""
    return write_reading_corpus(
        folder,
        num_train=QUICKSTART_TRAIN,
        num_eval=QUICKSTART_EVAL,
        seed=7,
        domains=(SHIPS, FIRMS, PEOPLE),
        max_facts=4,
    )


def write_missing_corpus(source: str) -> None:
    """Write the quickstart's corpus if `source` is one of its files, as the recipe names them, and does not exist."""
    path = Path(source)
    if path.parent == QUICKSTART_FOLDER and path.name in ("train.json", "dev.json") and not path.exists():
        write_quickstart_corpus()


def build_reading_corpus(
    num_questions: int, *, split: str, seed: int, domains: Sequence[Domain] = DOMAINS, max_facts: int = 5
) -> dict:
    """Return one split in SQuAD 2.0's form; `dev` has names of the held-out part, all others the remaining names."""
    rng = random.Random(f"reading {seed} {split}")
    make = NameGenerator(rng, held_out=split == "dev")
    articles: list[dict] = []
    for start in range(0, num_questions, QUESTIONS_PER_PARAGRAPH * PARAGRAPHS_PER_ARTICLE):
        domain = rng.choice(domains)
        end = min(num_questions, start + QUESTIONS_PER_PARAGRAPH * PARAGRAPHS_PER_ARTICLE)
        paragraphs = [
            _build_paragraph(
                rng,
                make,
                domain,
                ids=[f"{split}-{i}" for i in range(first, min(end, first + QUESTIONS_PER_PARAGRAPH))],
                max_facts=max_facts,
            )
            for first in range(start, end, QUESTIONS_PER_PARAGRAPH)
        ]
        articles.append({"title": f"{domain.title} {len(articles) + 1}", "paragraphs": paragraphs})
    return {"version": "v2.0", "data": articles}


def _build_paragraph(
    rng: random.Random, make: NameGenerator, domain: Domain, *, ids: list[str], max_facts: int
) -> dict:
    """Return a context and one question per id, answerable and unanswerable in turn, without repeats."""
    context, facts = _make_context(rng, make, domain, max_facts)
    told = [(fact.owner, fact.relation) for fact in facts]
    answerable = rng.sample(facts, len(facts))
    asked: set[tuple[str, str]] = set()
    qas = []
    first_impossible = rng.random() < 0.5
    for index, question_id in enumerate(ids):
        if (index % 2 == 0) == first_impossible:
            pair, golds = _draw_new_absent_pair(rng, make, domain, told, asked), ()
        else:
            fact = answerable.pop()
            pair, golds = (fact.owner, fact.relation), fact.golds
        asked.add(pair)
        question = _capitalise(rng.choice(domain.relations[pair[1]].questions).format(e=pair[0]))
        answers = [{"text": text, "answer_start": start} for text, start in golds]
        qas.append({"id": question_id, "question": question, "answers": answers, "is_impossible": not golds})
    return {"context": context, "qas": qas}


def _draw_new_absent_pair(
    rng: random.Random,
    make: NameGenerator,
    domain: Domain,
    stated_pairs: list[tuple[str, str]],
    previous_pairs: set[tuple[str, str]],
) -> tuple[str, str]:
    """Draw an (owner, relation) pair that is neither stated in the text nor the pair of an earlier question."""
    while True:
        pair = draw_absent_pair(
            rng,
            stated_pairs,
            new_owner=lambda: domain.owner(make),
            new_relation=lambda: rng.choice(tuple(domain.relations)),
        )
        if pair not in previous_pairs:
            return pair


def _make_context(
    rng: random.Random, make: NameGenerator, domain: Domain, max_facts: int
) -> tuple[str, list[StatedFact]]:
    """Return a text of 3 to `max_facts` facts over 2 or 3 owners and 2 or 3 relations, and its facts."""
    num_facts = rng.randint(3, max_facts)
    owners = _draw_distinct(lambda: domain.owner(make), 2 if num_facts == 3 else 3)
    relations = rng.sample(tuple(domain.relations), rng.randint(2, 3))
    pairs = rng.sample([(owner, relation) for owner in owners for relation in relations], num_facts)
    text = ""
    facts = []
    for owner, relation in pairs:
        sentence, golds = _make_sentence(rng, make, domain.relations[relation], owner)
        offset = len(text)
        facts.append(StatedFact(owner, relation, tuple((gold, offset + start) for gold, start in golds)))
        text += sentence + " "
    return text.rstrip(), facts


def _draw_distinct(draw: Callable[[], str], num_draws: int) -> list[str]:
    drawn: dict[str, None] = {}
    while len(drawn) < num_draws:
        drawn[draw()] = None
    return list(drawn)


def _make_sentence(
    rng: random.Random, make: NameGenerator, relation: Relation, owner: str
) -> tuple[str, list[tuple[str, int]]]:
    """Return a fact as a sentence, with its gold answers: the whole value, then the value without title or unit."""
    core = relation.value(make)
    whole = relation.before + core + relation.after
    pattern = rng.choice(relation.statements)
    start = (
        pattern.index("{v}")
        if pattern.index("{v}") < pattern.index("{e}")
        else len(pattern.split("{v}")[0].format(e=owner))
    )
    sentence = _capitalise(pattern.format(e=owner, v=whole))
    shown = sentence[start : start + len(whole)]
    golds = [(shown, start)]
    if whole != core:
        golds.append((core, start + len(relation.before)))
    return sentence, golds


def _capitalise(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def draw_absent_pair(
    rng: random.Random,
    stated_pairs: list[tuple[str, str]],
    *,
    new_owner: Callable[[], str],
    new_relation: Callable[[], str],
) -> tuple[str, str]:
    """Draw a plausible (owner, relation) pair that is not stated.

    With probability 1/2, if one exists, it is a crossed pair: owner and relation are both stated, but not together;
    else one of them is stated and the other is new. With stated_pairs [("Velka", "flag"), ("Torun", "river")] the
    crossed pairs are ("Velka", "river") and ("Torun", "flag").
    """
    owners = list(dict.fromkeys(owner for owner, _ in stated_pairs))
    relations = list(dict.fromkeys(relation for _, relation in stated_pairs))
    crossed = [(owner, relation) for owner in owners for relation in relations if (owner, relation) not in stated_pairs]
    if crossed and rng.random() < 0.5:
        return rng.choice(crossed)
    if rng.random() < 0.5:
        return rng.choice(owners), _draw_other(new_relation, relations)
    return _draw_other(new_owner, owners), rng.choice(relations)


def _draw_other(draw: Callable[[], str], taken: list[str]) -> str:
    while (drawn := draw()) in taken:
        pass
    return drawn
