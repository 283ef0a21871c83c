"""Tiny real things for tests: a tokenizer, models of every family, SQuAD files, a recipe that trains in a second."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from fivetune.config import load_config
from fivetune.evaluation.evaluator import Evaluator
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.nano.tokenizer import train_tokenizer
from fivetune.rundir.checksums import MANIFEST
from fivetune.rundir.records import EvalRecord
from fivetune.training.setup import Setup, set_up

SHARED = Path(__file__).parents[2] / "shared"
NEEDS_SHARED = "the shared data folder is not beside the checkout"

COLOURS, OWNERS = ["red", "blue", "green", "grey"], ["Ann", "Bob", "Cid", "Dan", "Eve"]
WORDS = [*COLOURS, *OWNERS, "hat", "coat", "shoe", "bag", "ring"]
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5"},
    "v1_1": {"model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "mt5": {"model_type": "mt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"model_type": "umt5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
SHAPE = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1}


def make_tokenizer(folder: Path) -> Path:
    """A real unigram tokenizer of about 250 pieces, trained on the sentences of `squad_file`."""
    texts = [
        f"question: What has {a}? context: {a} has a {c} {t}. unanswerable"
        for a in WORDS
        for c in WORDS[:4]
        for t in WORDS[9:]
    ]
    train_tokenizer(folder, texts, num_pieces=320)
    return folder


def make_model(folder: Path, tokenizer: Path, *, family: str = "t5", seed: int = 0, **shape: Any) -> Path:
    """A saved random model of a family, with the tokenizer in its folder; `shape` changes settings of its config."""
    config = folder.with_name(f"{folder.name}-config")
    config.mkdir(parents=True, exist_ok=True)
    settings = {**SHAPE, **FAMILIES[family], "vocab_size": 384, "decoder_start_token_id": 0, **shape}
    (config / "config.json").write_text(json.dumps(settings))
    torch.manual_seed(seed)
    loaded = load_model_and_tokenizer(None, config=str(config), tokenizer=str(tokenizer), init="random", dropout=0.1)
    save_model(loaded.model, loaded.tokenizer, folder)
    (folder / MANIFEST).unlink()  # tests change such folders, as published models may be changed
    return folder


def squad_file(path: Path, *, num_questions: int = 24, offset: int = 0) -> Path:
    """An official-schema SQuAD 2.0 file: who has what; every third question is unanswerable."""
    paragraphs = []
    for i in range(offset, offset + num_questions):
        owner, colour, thing = WORDS[4 + i % 5], WORDS[i % 4], WORDS[9 + i % 5]
        context = f"{owner} has a {colour} {thing}."
        asked = WORDS[4 + (i + 1) % 5] if i % 3 == 0 else owner
        answer = f"{colour} {thing}"
        golds = [] if i % 3 == 0 else [{"text": answer, "answer_start": context.index(answer)}]
        question = {"id": f"q{i}", "question": f"What has {asked}?", "answers": golds, "is_impossible": i % 3 == 0}
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "v2.0", "data": [{"title": "Things", "paragraphs": paragraphs}]}))
    return path


def recipe(folder: Path, model: Path, **overrides: Any) -> dict[str, Any]:
    """A nested config that trains `model` on a small SQuAD file for 6 steps of 8 examples."""
    base: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "seed": 1},
        "model": {"path": str(model)},
        "task": {"name": "squad_v2"},
        "data": {
            "train": str(squad_file(folder / "train.json")),
            "eval": str(squad_file(folder / "dev.json", num_questions=12, offset=100)),
            "cache_dir": str(folder / "cache"),
        },
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "train": {"num_steps": 6, "batch_size": 4, "global_batch_size": 8, "num_threads": 1},
        "eval": {"every_steps": 3, "max_new_tokens": 8},
        "device": "cpu",
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        if name:
            base.setdefault(section, {})[name] = value
        else:
            base[section] = value
    return base


def changed_config(folder: Path, **changes: Any) -> Path:
    """Edit config.json of a model folder; None takes a key out."""
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return folder


def changed_weights(folder: Path, *, drop: tuple[str, ...] = (), **changes: torch.Tensor) -> Path:
    """Edit model.safetensors of a folder; `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    weights = {name: tensor for name, tensor in load_file(path).items() if name not in drop}
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, metadata={"format": "pt"})
    return folder


def ready(folder: Path, model: Path, **overrides: Any) -> Setup:
    """The set-up of `recipe`, as `fivetune train` makes it."""
    return set_up(load_config(recipe(folder, model, **overrides)))


def weights_of(run: Path) -> bytes:
    """The exported weights of a run, byte for byte."""
    return (run / "model" / "model.safetensors").read_bytes()


def scored(
    monkeypatch: Any, f1: list[float] | dict[int, float], losses: list[float] | None = None, *, name: str = "f1"
) -> None:
    """Evaluations after the first step give these scores, by order or by step, and these losses."""
    whole, values, given = Evaluator.run, iter(f1), iter(losses or [])

    def run(self: Evaluator, *args: Any, **kwargs: Any) -> EvalRecord:
        record = whole(self, *args, **kwargs)
        if kwargs["step"] == 0:
            return record
        record.scores[name] = f1[record.step] if isinstance(f1, dict) else next(values)
        return replace(record, loss=next(given)) if losses else record

    monkeypatch.setattr(Evaluator, "run", run)
