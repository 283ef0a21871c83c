"""What makes t5-nano: its pre-training examples and its tokenizer."""

from transformers import AutoTokenizer

from recipes.nano.pretraining import MIXTURE, generate_pretraining_examples
from recipes.nano.tokenizer import train_tokenizer


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
