"""Models by their shapes and examples by their lengths: what is trained in the benchmarks.

In: names. Out: a model folder with random weights from a seed, and examples of random ids.
Speed depends on shapes and lengths, not on what the words mean; so no weights and no corpus are needed.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fivetune.config import load_config
from fivetune.data.corpus import CHECKPOINT
from fivetune.data.store.arrays import read_arrays, write_arrays
from fivetune.data.store.ragged import Ragged
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.save import save_model
from fivetune.model.shapes import KNOWN_SHAPES, build_model_config
from fivetune.model.tokenizer import load_tokenizer
from fivetune.rundir.progress import ignore_progress
from fivetune.training.sources import prepare_split

SHARED = Path(__file__).parents[2] / "shared" / "data"
SQUAD, SQUAD_TOKENIZER = SHARED / "squad_v1.1" / "dev-v1.1.json.gz", SHARED / "tokenizers" / "t5-small"
MODELS_VARIABLE = "FIVETUNE_BENCH_MODELS"
FIRST_ID = 3  # pad, end and unknown stand before it

_TINY = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 4096,
    "feed_forward_proj": "relu",
}  # fmt: skip


_PUBLISHED = {
    "t5-small": "t5", "t5-base": "t5", "t5-large": "t5", "flan-t5-base": "t5", "mt5-small": "mt5", "umt5-small": "umt5",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "t5-tiny": _TINY,
    **{name: build_model_config(KNOWN_SHAPES[name], kind) for name, kind in _PUBLISHED.items()},
}
COMMON: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "dropout_rate": 0.1}


@dataclass(frozen=True, slots=True)
class Law:
    """Log-normal lengths with this mean and standard deviation, in tokens, cut off at `cap`."""

    mean: float
    deviation: float
    cap: int

    def draw(self, random: np.random.Generator, num: int) -> NDArray[np.int64]:
        """
        >>> lengths = Law(175, 65, 512).draw(np.random.default_rng(0), 10_000)
        >>> round(lengths.mean()), round(lengths.std()), int(lengths.max())
        (175, 64, 512)
        """
        variance = math.log(1 + (self.deviation / self.mean) ** 2)
        lengths = random.lognormal(math.log(self.mean) - variance / 2, math.sqrt(variance), num)
        return np.clip(np.rint(lengths), 2, self.cap).astype(np.int64)


WORKLOADS = {
    "squad": (Law(175, 65, 512), Law(5, 3, 32)),
    "summarisation": (Law(440, 160, 512), Law(64, 20, 128)),
    "translation": (Law(40, 20, 128), Law(40, 20, 128)),
    "long": (Law(1800, 600, 2048), Law(200, 60, 256)),
}


class Examples:
    """Examples that `write_examples` wrote: what of a TokenStore a training stream needs, in the same files.

    `lengths_from` says where the lengths come from.
    """

    def __init__(self, folder: Path) -> None:
        self.lengths_from = (folder / "lengths_from.txt").read_text()
        arrays = read_arrays(folder / "examples.safetensors")
        self.inputs, self.labels = (
            Ragged(arrays[f"{name}.values"], arrays[f"{name}.offsets"]) for name in ("inputs", "labels")
        )

    def __len__(self) -> int:
        return len(self.inputs)

    def get_id(self, row: int) -> str:
        return str(row)


def write_examples(folder: Path, workload: str, num: int, *, vocab_size: int, seed: int = 0) -> None:
    """`num` examples of a workload: random ids and an end token. SQuAD has its real lengths where its files are."""
    random = np.random.default_rng(seed)
    if workload == "squad" and SQUAD.is_file():
        source, target = _squad_lengths()
        chosen = random.choice(len(source), num, replace=num > len(source))
        source, target, words = source[chosen], target[chosen], "SQuAD 1.1 dev, T5 tokenizer"
    else:
        laws = WORKLOADS[workload]
        source, target = (law.draw(random, num) for law in laws)
        words = " / ".join(f"log-normal mean {law.mean:g} sd {law.deviation:g} cap {law.cap}" for law in laws)
    (folder / "lengths_from.txt").write_text(words)
    arrays: dict[str, NDArray[Any]] = {}
    for name, lengths in (("inputs", source), ("labels", target)):
        rows = [[*random.integers(FIRST_ID, vocab_size, n - 1).tolist(), COMMON["eos_token_id"]] for n in lengths]
        made = Ragged.from_rows(rows, np.uint32)
        arrays |= {f"{name}.values": made.values, f"{name}.offsets": made.offsets}
    write_arrays(folder / "examples.safetensors", arrays)


def _squad_lengths() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    config = load_config(
        {"model": {"path": str(SQUAD_TOKENIZER)}, "task": {"name": "squad"}, "data": {"train": str(SQUAD)}}
    )
    store = prepare_split(config, load_tokenizer(None, SQUAD_TOKENIZER), "train", on_progress=ignore_progress)
    assert store is not None
    return store.inputs.lengths.astype(np.int64), store.labels.lengths.astype(np.int64)


def share_model(name: str) -> Path:
    """The folder of `make_model` that several programs share: in FIVETUNE_BENCH_MODELS, or in a temporary folder."""
    root = Path(os.environ.get(MODELS_VARIABLE) or tempfile.gettempdir()) / "fivetune-models"
    place = root / f"{name}-{zlib.crc32(json.dumps(MODELS[name]).encode()):08x}"
    if not place.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as folder, suppress(OSError):  # another program was faster
            make_model(name, Path(folder)).rename(place)
    return place


def make_model(name: str, folder: Path, *, seed: int = 0) -> Path:
    """A folder with the model of that name in random weights, and a small tokenizer that nothing is encoded with."""
    shape = folder / "shape"
    shape.mkdir(parents=True)
    (shape / "config.json").write_text(json.dumps({**COMMON, **MODELS[name]}))
    torch.manual_seed(seed)
    loaded = load_model_and_tokenizer(str(shape), tokenizer=str(CHECKPOINT), init="random")
    save_model(loaded.model, loaded.tokenizer, folder / name)
    return folder / name
