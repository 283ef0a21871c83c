"""The generated corpora and the tokenizer of t5-nano: held-out names stay apart, the files are valid, seeds decide."""

import json
import random

from transformers import AutoTokenizer

from fivetune.data.corpus.names import NameGenerator, extract_invented_words, is_held_out, is_in_split
from fivetune.data.corpus.pretraining import (
    MIXTURE,
    corrupt_spans,
    draw_absent_pair,
    generate_pretraining_examples,
    write_pretraining_corpus,
)
from fivetune.data.corpus.reading import build_reading_corpus, write_reading_corpus
from fivetune.data.corpus.tokenizer import train_tokenizer


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


def test_corrupt_spans_literal():
    assert corrupt_spans(["the", "flag", "of", "Velka", "is", "red"], [(1, 2), (4, 6)]) == (
        "the <extra_id_0> of Velka <extra_id_1>",
        "<extra_id_0> flag <extra_id_1> is red <extra_id_2>",
    )


def test_absent_pair_is_never_told():
    told = [("Velka", "flag"), ("Torun", "river")]
    rng = random.Random(0)
    draw = {"new_owner": lambda: "Marpol", "new_relation": lambda: "boat"}
    pairs = {draw_absent_pair(rng, told, **draw) for _ in range(100)}
    assert pairs == {
        *[("Velka", "river"), ("Torun", "flag"), ("Velka", "boat")],
        *[("Torun", "boat"), ("Marpol", "flag"), ("Marpol", "river")],
    }


def test_pretraining_has_every_kind_and_neither_the_prompt_nor_the_phrase_of_fine_tuning():
    examples = list(generate_pretraining_examples(500, split="train", seed=2))
    assert {example["kind"] for example in examples} == set(MIXTURE)
    texts = " ".join(example["inputs"] + example["targets"] for example in examples)
    assert not any(word in texts for word in ("question:", "context:", "unanswerable", "no answer"))


def test_short_notes_hold_one_fact():
    examples = generate_pretraining_examples(200, split="train", seed=2, max_facts=1)
    assert max(len(e["inputs"].split()) for e in examples if e["kind"] == "lookup") < 24


def test_tokenizer_round_trip(tmp_path):
    texts = [e["inputs"] + " " + e["targets"] for e in generate_pretraining_examples(600, split="train", seed=1)]
    train_tokenizer(tmp_path / "a", texts, num_pieces=900)
    train_tokenizer(tmp_path / "b", texts, num_pieces=900)
    assert (tmp_path / "a/tokenizer.json").read_bytes() == (tmp_path / "b/tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "“Ñandú” (O'Torun-Müller & Co.) paid 1,234 on 4 March 1871; who?"
    ids = tokenizer(text).input_ids
    assert ids[-1] == tokenizer.eos_token_id == 1 and 2 not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_has_the_t5_vocabulary(tmp_path):
    train_tokenizer(
        tmp_path, (e["inputs"] for e in generate_pretraining_examples(600, split="train", seed=1)), num_pieces=900
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_tokens_to_ids(["<pad>", "</s>", "<unk>"]) == [0, 1, 2]
    last = len(tokenizer) - 1
    assert tokenizer.convert_tokens_to_ids(["<extra_id_99>", "<extra_id_0>"]) == [
        len(tokenizer) - 100,
        len(tokenizer) - 1,
    ]
    assert tokenizer("<extra_id_0>").input_ids == [last, 1]
    assert "<extra_id_7>" in tokenizer.all_special_tokens
