"""python -m recipes.nano FOLDER [publish]: write the pre-training data of `t5-nano`; publish the trained model.

Out: FOLDER/stage-1 .. stage-3/{train,eval}.jsonl (notes of at most 1, 3 and 6 facts) and FOLDER/model/ (tokenizer and
config.json). The recipes beside this file then train stage by stage. `publish` copies the last stage's model into the
package, with its card and the curves of the three runs.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from fivetune.data.corpus import CHECKPOINT
from fivetune.data.corpus.reading import write_reading_corpus
from recipes.nano.pretraining import generate_pretraining_examples, write_pretraining_corpus
from recipes.nano.tokenizer import train_tokenizer

NUM_PIECES = 2048
NUM_TOKENIZER_TEXTS = 25_000
STAGES = {1: (1, 500_000), 2: (3, 400_000), 3: (6, 400_000)}  # most facts in a note, number of examples
SEED = 1
RUNS = ("pretrain", "pretrain_2", "pretrain_3")

CARD = """---
license: apache-2.0
library_name: transformers
tags: [fivetune, t5]
---

# t5-nano

A T5 1.0 of 0.9 million parameters (2 + 2 layers, d_model 128, 2,048 pieces), for showing and testing fine-tuning in
minutes on a CPU. It was pre-trained by FiveTune on generated English-like notes about invented names: span corruption,
copying, and looking up who has what. It knows no facts and no language beyond that.

Made by `make nano`: `python -m recipes.nano runs/nano` writes the text (seed 1), `recipes/nano/pretrain.yaml`,
`pretrain_2.yaml` and `pretrain_3.yaml` train it (seed 1), and the same command with `publish` copies it here.
`curve.csv` holds the three runs' losses (nats per target token; training: mean of the 50 steps before) and the exact
match on 500 evaluation examples of each stage.
"""

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
    """Write the corpora, the tokenizer and the config of pre-training."""
    train_tokenizer(folder / "model", _iter_tokenizer_texts(folder / "words"), num_pieces=NUM_PIECES)
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    for stage, (max_facts, num_train) in STAGES.items():
        target = folder / f"stage-{stage}"
        write_pretraining_corpus(target, num_train=num_train, num_eval=500, seed=SEED + stage, max_facts=max_facts)
        sys.stderr.write(f"{target}: {num_train:,} examples\n")


def _iter_tokenizer_texts(folder: Path) -> Iterator[str]:
    """Yield pre-training pairs and the quickstart's training texts, whose words would else be split into letters."""
    for example in generate_pretraining_examples(NUM_TOKENIZER_TEXTS, split="words", seed=SEED):
        yield f"{example['inputs']} {example['targets']}"
    train, _ = write_reading_corpus(folder, num_train=8_000, num_eval=8, seed=SEED)
    for article in json.loads(train.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                answers = [answer["text"] for answer in question["answers"]] or ["unanswerable"]
                yield f"question: {question['question']} context: {paragraph['context']} {answers[0]}"


def publish(folder: Path) -> None:
    """Copy the model of the last stage into the package, with its card and its curves."""
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    shutil.copytree(folder / RUNS[-1] / "model", CHECKPOINT)
    (CHECKPOINT / "README.md").write_text(CARD, encoding="utf-8")
    rows = ["run,step,training_loss,evaluation_loss,exact_match"]
    for name in RUNS:
        losses = {line["step"]: line["loss"] for line in _read_jsonl(folder / name / "steps.jsonl")}
        for record in _read_jsonl(folder / name / "evals.jsonl"):
            around = [losses[step] for step in range(record["step"] - 49, record["step"] + 1) if step in losses]
            mean = f"{sum(around) / len(around):.4f}" if around else ""
            rows.append(f"{name},{record['step']},{mean},{record['loss']:.4f},{record['scores']['exact_match']:.1f}")
    (CHECKPOINT / "curve.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def _read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/nano")
    publish(target) if sys.argv[2:] == ["publish"] else main(target)
