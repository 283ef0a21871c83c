"""Digests of short training runs: proof that a refactoring changes no number.

Trains a tiny random model of each family for 200 steps, with the flat and with the padded forward, under AdamW and
Adafactor, and prints two SHA-256 digests per run: of every loss, gradient norm, learning rate and score, and of the
exported weights. Two versions of the code compute the same if they print the same digests on the same machine.

    python -m benchmarks.losses --output losses.json                  # the version before
    python -m benchmarks.losses --compare losses.json                 # the version after; exits 1 on a difference
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import fivetune
from benchmarks.harness import make_parser
from fivetune.data.corpus import CHECKPOINT

FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5"},
    "v1_1": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"model_type": "umt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1,
         "vocab_size": 2048, "decoder_start_token_id": 0}  # fmt: skip
OPTIMIZERS = {"adamw": 1e-3, "adafactor": 1e-2}
NUM_STEPS = 200


def write_squad(path: Path, *, num_questions: int, offset: int = 0) -> str:
    """A SQuAD 2.0 file with contexts of one to nine sentences; every third question is unanswerable."""
    names, colours, things = (
        ("Ann", "Bob", "Cid", "Dan", "Eve"),
        ("red", "blue", "green", "grey"),
        ("hat", "bag", "coat"),
    )
    paragraphs = []
    for i in range(offset, offset + num_questions):
        answer = f"{colours[i % 4]} {things[i % 3]}"
        context = " ".join(
            [f"{names[i % 5]} has a {answer}."]
            + [f"{names[(i + j) % 5]} likes a {things[j % 3]}." for j in range(i % 9)]
        )
        golds = [] if i % 3 == 0 else [{"text": answer, "answer_start": context.index(answer)}]
        question = {
            "id": f"q{i}",
            "question": f"What has {names[i % 5]}?",
            "answers": golds,
            "is_impossible": not golds,
        }
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "Things", "paragraphs": paragraphs}]}))
    return str(path)


def digest_run(folder: Path, *, family: str, forward: str, optimizer: str) -> dict[str, str]:
    """Train one model and return the digests of its records and of its exported weights."""
    config = folder / "config"
    config.mkdir(parents=True)
    (config / "config.json").write_text(json.dumps({**SHAPE, **FAMILIES[family]}))
    fivetune.train(
        {
            "run": {"dir": str(folder / "run"), "seed": 3},
            "model": {"path": None, "config": str(config), "tokenizer": str(CHECKPOINT), "init": "random"},
            "task": {"name": "squad_v2"},
            "data": {
                "train": write_squad(folder / "train.json", num_questions=120),
                "eval": write_squad(folder / "dev.json", num_questions=30, offset=500),
                "cache_dir": str(folder / "cache"),
            },
            "optimizer": {"name": optimizer, "lr": OPTIMIZERS[optimizer]},
            "schedule": {"name": "linear", "warmup_steps": 10},
            "train": {
                "num_steps": NUM_STEPS,
                "batch_size": 4,
                "global_batch_size": 8,
                "num_threads": 1,
                "forward": forward,
            },
            "eval": {"every_steps": 50, "max_new_tokens": 8},
            "device": "cpu",
        },
        quiet=True,
        preflight=False,
    )
    seen = hashlib.sha256()
    for name, keys in (
        ("steps.jsonl", ("step", "loss", "lr", "grad_norm", "effective_lr", "num_input_tokens", "num_target_tokens")),
        ("evals.jsonl", ("step", "loss", "scores", "intervals", "rates")),
    ):
        for line in (folder / "run" / name).read_text().splitlines():
            record = json.loads(line)
            seen.update(json.dumps([record[key] for key in keys], sort_keys=True).encode())
    weights = (folder / "run" / "model" / "model.safetensors").read_bytes()
    return {"records": seen.hexdigest(), "weights": hashlib.sha256(weights).hexdigest()}


def main() -> int:
    parser = make_parser(__doc__, results=None)
    parser.add_argument("--output", type=Path, help="write the digests to this JSON file")
    parser.add_argument("--compare", type=Path, help="digests of another version, from --output")
    arguments = parser.parse_args()
    digests, changed = {}, []
    for family in FAMILIES:
        for forward in ("flat", "padded"):
            for optimizer in OPTIMIZERS:
                with tempfile.TemporaryDirectory() as folder:
                    found = digest_run(Path(folder), family=family, forward=forward, optimizer=optimizer)
                for part, digest in found.items():
                    digests[f"{family} {forward} {optimizer}: {part}"] = digest
                    print(f"{digest}  {family} {forward} {optimizer}: {part}", flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(digests, indent=1) + "\n")
    if arguments.compare:
        before = json.loads(arguments.compare.read_text())
        changed = [name for name in digests if digests[name] != before.get(name)]
        print(
            f"{len(digests) - len(changed)} of {len(digests)} digests are identical"
            + (f"; changed: {', '.join(changed)}" if changed else "")
        )
    if arguments.json:
        print(json.dumps({"digests": digests, "changed": changed}))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
