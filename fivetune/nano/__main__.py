"""python -m fivetune.nano FOLDER: writes the corpora, the tokenizer and the model config that `t5-nano` is made from.

Out: FOLDER/stage-1 .. stage-3/{train,eval}.jsonl (notes of at most 1, 3 and 6 facts) and FOLDER/model/ (tokenizer and
config.json). The recipes in recipes/nano/ then train stage by stage.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from fivetune.nano.pretraining import pretraining_examples, write_pretraining_corpus
from fivetune.nano.reading import write_reading_corpus
from fivetune.nano.tokenizer import train_tokenizer

NUM_PIECES = 2048
NUM_TOKENIZER_TEXTS = 25_000
STAGES = {1: (1, 500_000), 2: (3, 400_000), 3: (6, 400_000)}  # most facts in a note, number of examples
SEED = 1

CONFIG = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": NUM_PIECES,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.0,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}


def main(folder: Path) -> None:
    """Write everything that pre-training reads."""
    train_tokenizer(folder / "model", _tokenizer_texts(folder / "words"), num_pieces=NUM_PIECES)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    for stage, (max_facts, num_train) in STAGES.items():
        target = folder / f"stage-{stage}"
        write_pretraining_corpus(target, num_train=num_train, num_eval=500, seed=SEED + stage, max_facts=max_facts)
        sys.stderr.write(f"{target}: {num_train:,} examples\n")


def _tokenizer_texts(folder: Path) -> Iterator[str]:
    """Pre-training pairs, and the words of the quickstart's training part: else those are spelt letter by letter."""
    for example in pretraining_examples(NUM_TOKENIZER_TEXTS, split="words", seed=SEED):
        yield f"{example['inputs']} {example['targets']}"
    train, _ = write_reading_corpus(folder, num_train=8_000, num_eval=8, seed=SEED)
    for article in json.loads(train.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [answer["text"] for answer in question["answers"]] or ["unanswerable"]
                yield f"question: {question['question']} context: {paragraph['context']} {answers[0]}"


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/nano"))
