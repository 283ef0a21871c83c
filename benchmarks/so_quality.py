"""Real text: a T5 from random weights against TF-IDF with logistic regression, on posts of three qualities.

In: a CSV file with columns text and rating. `prepare` splits it and makes the tokenizer from the training
part alone;
`measure` trains the recipe, which sees the held-out part once, after its last step, and writes results/so_quality.json.
    python -m benchmarks.so_quality prepare posts.csv.gz
    python -m benchmarks.so_quality measure
"""

from __future__ import annotations

import csv
import gzip
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fivetune
from benchmarks.harness import facts, make_parser, publish_result, table
from fivetune.model.tokenizer import load_tokenizer
from fivetune.rundir import write_json
from fivetune.rundir.figures import find_exported_eval
from recipes.nano.tokenizer import train_tokenizer

RECIPE = "stackoverflow_quality_nano"
FOLDER = Path("runs/so-quality")
NUM_TRAIN, SEED = 5_400, 0
NUM_PIECES = 4096
SHAPE = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True,
    "d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 256, "num_layers": 1, "num_decoder_layers": 1,
    "feed_forward_proj": "relu", "tie_word_embeddings": True,
    "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
BASELINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tfidf_lr": ({}, {}),
    "tfidf_lr_tuned": ({"sublinear_tf": True, "ngram_range": (1, 2), "min_df": 2}, {"C": 4}),
}
"""Settings of TfidfVectorizer and LogisticRegression beside their defaults. The tuned ones are the best by
cross-validation on the training part of those that see words alone, as T5's tokenizer does: it drops line breaks."""

Posts = Sequence[dict[str, str]]


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="write train.csv, test.csv and model/ (tokenizer and config.json)")
    making.add_argument("source", type=Path, help="CSV file with columns text and rating, also gzipped")
    measuring = commands.add_parser("measure", help="train the recipe, compute the baselines, write the result")
    for command in (making, measuring):
        command.add_argument("--folder", type=Path, default=FOLDER, help=f"default: {FOLDER}, as the recipe has it")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.source, args.folder)
    else:
        publish_result(args, "so_quality", measure(args.folder))


# --- the data ---


def prepare(source: Path, folder: Path) -> None:
    """Write the two parts and what the model is built from; the same file gives the same bytes."""
    train, test = split(read_posts(source))
    model = write_parts(folder, train, test)
    print(f"{folder}: {len(train):,} posts to train on, {len(test):,} held out, {model}")


def split(posts: Posts, *, num_train: int = NUM_TRAIN, seed: int = SEED) -> tuple[Posts, Posts]:
    """A seeded draw: the training part and the held-out part."""
    shuffled = list(posts)
    random.Random(seed).shuffle(shuffled)
    return shuffled[:num_train], shuffled[num_train:]


def read_posts(path: Path) -> Posts:
    """The rows of a CSV file, also gzipped."""
    csv.field_size_limit(sys.maxsize)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_parts(folder: Path, train: Posts, test: Posts) -> Path:
    """Write train.csv, test.csv and model/ with the tokenizer of the training part; returns model/."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, posts in (("train", train), ("test", test)):
        _write_posts(folder / f"{name}.csv", posts)
    model = folder / "model"
    train_tokenizer(model, (f"quality: {post['text']}" for post in train), num_pieces=NUM_PIECES)
    write_json(model / "config.json", {**SHAPE, "vocab_size": len(load_tokenizer(None, model))})
    return model


def _write_posts(path: Path, posts: Posts) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("text", "rating"))
        writer.writerows((post["text"], post["rating"]) for post in posts)


# --- the two sides ---


def measure(folder: Path) -> dict[str, Any]:
    """Train, compare, print a table."""
    train, test = (read_posts(folder / f"{name}.csv") for name in ("train", "test"))
    ours = _run_recipe(folder)
    sides = {
        RECIPE: ours,
        **{name: baseline(train, test, *settings) for name, settings in BASELINES.items()},
        "majority": {"accuracy": _majority(train, test)},
    }
    print(table([["side", "accuracy", "CPU seconds"], *(_row(name, side) for name, side in sides.items())]))
    return {
        "num_train": len(train),
        "num_test": len(test),
        "seed_of_the_split": SEED,
        "sides": sides,
        "ratios": {name: ours["accuracy"] / side["accuracy"] for name, side in sides.items()},
        **facts("cpu"),
    }


def _row(name: str, side: dict[str, float]) -> list[str]:
    return [name, f"{side['accuracy']:.3f}", f"{side['cpu_seconds']:.0f}" if "cpu_seconds" in side else ""]


def _run_recipe(folder: Path) -> dict[str, float]:
    """Accuracy of the recipe on the held-out part, and what the whole run took, pre-flight and evaluation included."""
    wall, cpu = time.perf_counter(), time.process_time()
    run = fivetune.train(
        RECIPE,
        {
            "data.train": str(folder / "train.csv"),
            "data.eval": str(folder / "test.csv"),
            "model.config": str(folder / "model"),
            "run.dir": str(folder / "run"),
        },
        overwrite=True,
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    evaluation = find_exported_eval(run.records)
    assert evaluation is not None  # the recipe evaluates at its end
    scores = evaluation.scores
    return {
        "accuracy": scores["accuracy"] / 100,
        "macro_f1": scores["macro_f1"] / 100,
        "step": evaluation.step,
        "wall_seconds": wall,
        "cpu_seconds": cpu,
    }


def baseline(train: Posts, test: Posts, words: dict[str, Any], regression: dict[str, Any]) -> dict[str, float]:
    """TF-IDF with logistic regression by scikit-learn, trained on one part and scored on the other."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    started = time.process_time()
    model = make_pipeline(TfidfVectorizer(**words), LogisticRegression(max_iter=1000, **regression))
    model.fit([post["text"] for post in train], [post["rating"] for post in train])
    accuracy = model.score([post["text"] for post in test], [post["rating"] for post in test])
    return {"accuracy": float(accuracy), "cpu_seconds": time.process_time() - started}


def _majority(train: Posts, test: Posts) -> float:
    """Accuracy of answering the training part's most frequent label."""
    label = Counter(post["rating"] for post in train).most_common(1)[0][0]
    return sum(post["rating"] == label for post in test) / len(test)


if __name__ == "__main__":
    main()
