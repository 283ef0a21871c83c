"""The generated corpora: held-out names stay apart, the files are valid, seeds decide."""

import json
import random

from fivetune.data.corpus.names import NameGenerator, extract_invented_words, is_held_out, is_in_split
from fivetune.data.corpus.reading import build_reading_corpus, draw_absent_pair, write_reading_corpus
from recipes.nano.pretraining import generate_pretraining_examples, write_pretraining_corpus


def questions(corpus: dict) -> list[tuple[str, dict]]:
    """(context, question record) of a whole SQuAD file."""
    return [(p["context"], qa) for article in corpus["data"] for p in article["paragraphs"] for qa in p["qas"]]


def test_hash_rule_is_fixed_and_ignores_case():
    assert [is_held_out(name) for name in ("Velka", "Torun", "Marpol", "Dresh", "Éloso")] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert all(is_held_out(name) == is_held_out(name.upper()) for name in ("Velka", "Torun"))


def test_invented_words_are_found_inside_decorated_names():
    assert extract_invented_words("Dr J. Velka-Torun of Port O'Dresh") == ["Velka", "Torun", "Dresh"]


def test_names_of_a_part_are_of_that_part_with_every_word():
    for held_out in (True, False):
        make = NameGenerator(random.Random(0), held_out=held_out)
        names = [
            draw() for draw in (make.draw_word, make.draw_person, make.draw_place, make.draw_thing) for _ in range(50)
        ]
        assert all(is_in_split(name, held_out=held_out) for name in names)


def test_dev_words_occur_in_no_training_text():
    made = {word for name in _dev_answers() for word in extract_invented_words(name)} - {
        "The",
        "the",
        "metres",
        "people",
    }
    assert all(map(is_held_out, made))
    train_texts = [
        context + qa["question"] for context, qa in questions(build_reading_corpus(400, split="train", seed=1))
    ]
    train_texts += [e["inputs"] + " " + e["targets"] for e in generate_pretraining_examples(400, split="train", seed=1)]
    seen = {word for text in train_texts for word in extract_invented_words(text)}
    assert len(made) > 50 and not made & seen


def _dev_answers() -> list[str]:
    corpus = build_reading_corpus(400, split="dev", seed=1)
    return [answer["text"] for _, qa in questions(corpus) for answer in qa["answers"]]


def test_reading_corpus_is_valid_squad(tmp_path):
    for path in write_reading_corpus(tmp_path, num_train=203, num_eval=101, seed=3):
        corpus = json.loads(path.read_text(encoding="utf-8"))
        asked = questions(corpus)
        assert corpus["version"] == "v2.0" and len({qa["id"] for _, qa in asked}) == len(asked) in (203, 101)
        assert 0.45 <= sum(qa["is_impossible"] for _, qa in asked) / len(asked) <= 0.55
        assert all(bool(qa["answers"]) != qa["is_impossible"] for _, qa in asked)
        for context, qa in asked:
            for answer in qa["answers"]:
                assert context[answer["answer_start"] :].startswith(answer["text"])


def test_some_questions_have_several_gold_answers():
    counts = {len(qa["answers"]) for _, qa in questions(build_reading_corpus(400, split="dev", seed=1))}
    assert counts == {0, 1, 2}


def test_same_seed_same_bytes(tmp_path):
    for write in (write_reading_corpus, write_pretraining_corpus):
        first = write(tmp_path / "a", num_train=40, num_eval=8, seed=5)
        again = write(tmp_path / "b", num_train=40, num_eval=8, seed=5)
        other = write(tmp_path / "c", num_train=40, num_eval=8, seed=6)
        assert [p.read_bytes() for p in first] == [p.read_bytes() for p in again]
        assert first[0].read_bytes() != other[0].read_bytes()


def test_absent_pair_is_never_told():
    told = [("Velka", "flag"), ("Torun", "river")]
    rng = random.Random(0)
    draw = {"new_owner": lambda: "Marpol", "new_relation": lambda: "boat"}
    pairs = {draw_absent_pair(rng, told, **draw) for _ in range(100)}
    assert pairs == {
        *[("Velka", "river"), ("Torun", "flag"), ("Velka", "boat")],
        *[("Torun", "boat"), ("Marpol", "flag"), ("Marpol", "river")],
    }
