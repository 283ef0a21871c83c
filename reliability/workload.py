"""What the trials train: tiny real models, tokenizers and data, and the runs that no fault touches.

In: a folder. Out: model folders, data files, recipes, and the weights of an undisturbed run of each recipe.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from fivetune.rundir import read_machine, read_run
from fivetune.rundir.checksums import MANIFEST, find_damage
from reliability.faults import train
from reliability.ranks import Ranks
from reliability.warm import WarmProcess, check_success, start_command, wait_until

T = TypeVar("T")
NUM_STEPS = 30
NUM_QUESTIONS = 24  # three steps of 8
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
    from recipes.nano.tokenizer import train_tokenizer

    train_tokenizer(folder, texts, num_pieces=320)
    return folder


def make_model(folder: Path, tokenizer: Path, *, family: str = "t5", seed: int = 0, **shape: Any) -> Path:
    """A saved random model of a family, with the tokenizer in its folder; `shape` changes settings of its config."""
    config = folder.with_name(f"{folder.name}-config")
    config.mkdir(parents=True, exist_ok=True)
    settings = {**SHAPE, **FAMILIES[family], "vocab_size": 384, "decoder_start_token_id": 0, **shape}
    (config / "config.json").write_text(json.dumps(settings))
    import torch

    from fivetune.model.load import load_model_and_tokenizer
    from fivetune.model.save import save_model

    torch.manual_seed(seed)
    loaded = load_model_and_tokenizer(str(config), tokenizer=str(tokenizer), init="random", dropout=0.1)
    save_model(loaded.model, loaded.tokenizer, folder)
    (folder / MANIFEST).unlink()  # tests change such folders, as published models may be changed
    return folder


def squad_file(path: Path, *, num_questions: int = NUM_QUESTIONS, offset: int = 0) -> Path:
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


def recipe(folder: Path, model: Path, *, num_questions: int = NUM_QUESTIONS, **overrides: Any) -> dict[str, Any]:
    """A nested config that trains `model` on a small SQuAD file for 6 steps of 8 examples."""
    base: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "seed": 1},
        "model": {"path": str(model)},
        "task": {"name": "squad_v2"},
        "data": {
            "train": str(squad_file(folder / "train.json", num_questions=num_questions)),
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


def label_file(path: Path, *, num_rows: int = 24) -> Path:
    """A CSV file of two columns: the label is the colour that the text names."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows(
            [f"{OWNERS[i % 5]} has a {COLOURS[i % 3]} {WORDS[9 + i % 5]}.", COLOURS[i % 3]] for i in range(num_rows)
        )
    return path


VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adafactor": {"optimizer": {"name": "adafactor", "lr": 1e-3}},
    "accumulation": {"train__batch_size": 2},
    "lora": {"model__adapter": "lora"},
    "labels": {"task": {"name": "classification", "inputs": "{text}", "label": "label"}},
    "mixture": {},
    "extractive": {"task__head": "extractive"},
    "ddp": {"strategy": "ddp", "launch": {"nproc": 2}},
    "fsdp": {"strategy": "fsdp", "launch": {"nproc": 2}},
}


def count_ranks(variant: str) -> int:
    return VARIANTS[variant].get("launch", {}).get("nproc", 1)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run: the bytes of its exported weights, when its folder appeared and when its command ended."""

    run: Path
    weights: bytes
    begun: float  # seconds since the start of the process
    ended: float

    def find_time(self, share: float, left: float = 1.0) -> float:
        """A time in seconds for a share in 0 to 1: those above 1/4 are while the run's folder is there.

        Args:
            left: the part of the run that a resume still has to do, in 0 to 1.
        """
        ended = self.begun + left * (self.ended - self.begun)
        return share * 4 * ended if share < 0.25 else self.begun + (share - 0.25) / 0.75 * (ended - self.begun)


def time_run(process: WarmProcess, run: Path) -> tuple[float, float]:
    """Seconds after which the run's folder appeared and the process ended; it must succeed."""
    start = time.monotonic()
    with process:
        while process.code is None and not run.exists():
            time.sleep(0.01)
        begun = time.monotonic() - start
        done = process.wait()
    check_success(done)
    return begun, time.monotonic() - start


class OnceEach(Generic[T]):
    """Values by name, each made once, by the thread that asks first; another one that asks for it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._values: dict[str, T] = {}

    def get(self, name: str, make: Callable[[], T]) -> T:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._values:
                self._values[name] = make()
            return self._values[name]


class Workload:
    """Models and data of a campaign, in one folder, which is emptied; each is made once, whichever trial asks first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references = OnceEach[Reference]()
        self.model = folder / "tiny-t5"
        shutil.rmtree(folder, ignore_errors=True)  # an interrupted campaign may have left half of a model
        check_success(WarmProcess(_make_models, str(folder)).finish())

    def make_folder(self, name: str) -> Path:
        """A new, empty folder of the campaign."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def write_recipe(
        self, folder: Path, variant: str = "adamw", *, num_questions: int = NUM_QUESTIONS, **overrides: Any
    ) -> Path:
        """The recipe of a variant with its data in `folder`; its run directory is `folder`/run."""
        cadence = {
            "train__num_steps": NUM_STEPS,
            "eval__every_steps": NUM_STEPS // 2,
            "eval__at_start": False,
            "checkpoint__every_steps": 1,
            "model__dropout": 0.1,
        }
        table = recipe(folder, self.model, num_questions=num_questions, **{**cadence, **VARIANTS[variant], **overrides})
        if variant == "labels":
            table["data"]["train"] = str(label_file(folder / "train.csv"))
            table["data"]["eval"] = str(label_file(folder / "dev.csv", num_rows=6))
        if variant == "mixture":
            _mix(table, folder)
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(table))
        return path

    def run_undisturbed(self, variant: str = "adamw", **overrides: Any) -> Reference:
        """The run of a variant that nothing disturbs, made at the first call."""
        key = json.dumps([variant, overrides], sort_keys=True)

        def make() -> Reference:
            folder = self.make_folder(f"whole-{variant}-{sha256(key.encode()).hexdigest()[:12]}")
            process = start_training(self.write_recipe(folder, variant, **overrides))
            begun, ended = time_run(process, folder / "run")
            return Reference(folder / "run", read_weights(folder / "run"), begun, ended)

        return self.references.get(key, make)


TRAIN_WORDS = ("--no-preflight", "--quiet")


def start_training(recipe: Path, *words: str, environ: Mapping[str, str] | None = None) -> WarmProcess:
    """Start `fivetune train RECIPE` without its pre-flight checks."""
    options = {} if environ is None else {"environ": environ}
    return start_command("train", str(recipe), *TRAIN_WORDS, *words, **options)


def find_resume_words(run: Path) -> list[str]:
    """`--resume` where a run is there, as the script of a user decides it."""
    return ["--resume"] if run.exists() else []


def resume(recipe: Path, run: Path, *words: str, num_ranks: int = 0) -> None:
    """Continue the run, or start it where nothing of it is there yet; it must succeed without any help.

    Args:
        words: further ones of the command.
        num_ranks: which are started here; 0: the command starts its own.

    It must go on from its newest whole checkpoint.
    """
    newest, words = find_newest_step(run), (*find_resume_words(run), *words)
    own = Ranks(train, str(recipe), *words, num=num_ranks) if num_ranks else start_training(recipe, *words)
    check_success(own.finish())
    check_resumed_from(run, newest)


def wait_for_checkpoint(process: WarmProcess | Ranks, run: Path, step: int) -> None:
    """Wait for the checkpoint of a step, before whose end the run must not end."""

    def is_there() -> bool:
        is_over = process.code is not None
        found = (run / "checkpoints" / str(step)).is_dir()
        assert found or not is_over, f"the run ended before step {step}: {process.wait().stderr[-600:]}"
        return found

    wait_until(is_there, 120, every=0.002, explain=lambda: f"no checkpoint of step {step}")


def find_newest_step(run: Path) -> int:
    """The step of the newest whole checkpoint, 0 without one; nothing is changed.

    A process that ends while it replaces the checkpoint of a step leaves it as .STEP.old.
    """
    found = [(re.fullmatch(r"\.?([0-9]+)(\.old)?", path.name), path)
             for path in (run / "checkpoints").glob("*")]  # fmt: skip
    return max((int(name[1]) for name, path in found if name and find_damage(path) is None), default=0)


def check_resumed_from(run: Path, step: int) -> None:
    """The last part of the run began at this step."""
    begun = read_machine(run).parts[-1].step
    assert begun == step, f"the run went on from step {begun}, and its newest whole checkpoint was that of step {step}"


def read_weights(run: Path) -> bytes:
    """The exported weights of a run, byte for byte; those of the adapter, where it trains one."""
    (file,) = (run / "model").glob("*model.safetensors")
    return file.read_bytes()


def check_weights(found: bytes, whole: bytes) -> None:
    assert found == whole, "the weights differ from those of the undisturbed run"


def check_same_run(run: Path, whole: Path) -> None:
    """The run has the weights, the records of steps and evaluations and the predictions of the undisturbed run."""
    check_weights(read_weights(run), read_weights(whole))
    ours, theirs = (describe_results(each) for each in (run, whole))
    differing = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    assert not differing, f"other than in the undisturbed run: {differing}; steps {[one[0] for one in ours['steps']]}"


def describe_results(run: Path) -> dict[str, Any]:
    """What must not depend on surroundings or on a resume: losses, scores, predictions; records in their order."""
    found = read_run(run)
    steps = [(one.step, one.loss, one.grad_norm, one.lr, one.num_examples_seen) for one in found.steps]
    evals = [(one.step, one.split, one.loss, one.scores) for one in found.evals]
    predictions = {path.name: path.read_bytes() for path in sorted((run / "predictions").iterdir())}
    return {"steps": steps, "evaluations": evals, "best": found.status.best, **predictions}


def _make_models(folder: str) -> None:
    tokenizer = make_tokenizer(Path(folder) / "tokenizer")
    make_model(Path(folder) / "tiny-t5", tokenizer)


def _mix(table: dict[str, Any], folder: Path) -> None:
    """Questions and labels, learnt by one model."""
    labels = {"train": str(label_file(folder / "train.csv")), "eval": str(label_file(folder / "dev.csv", num_rows=6))}
    parts = {
        "questions": {"task": "squad_v2", "train": table["data"]["train"], "eval": table["data"]["eval"]},
        "labels": {"task": VARIANTS["labels"]["task"], **labels},
    }
    table["task"] = {"name": "mixture", "parts": parts, "by": "size"}
    table["data"] = {"cache_dir": table["data"]["cache_dir"]}
