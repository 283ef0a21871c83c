"""Answers to SQuAD 2.0 questions: FiveTune's decoding in fp32 and bf16 against transformers' generate and CTranslate2.

The model has the t5-small config and random weights, made so that every answer ends by itself where a real one would:
see `make_answers_end`. The peers compute in fp32, greedily. All engines get the same token ids; those in fp32 write the
same tokens, which is checked, and those in bf16 the same but for rounding, of which the share is told. Sampling draws
with temperature, top-k and top-p, so cold that it writes the same answers but for ties. Blocks of 64
neighbouring questions are taken evenly over the whole file, so that batches in data-set order pad as they do in it.
Windows are interleaved A B B A; the ratio is that of the medians, beside it the least and the most.
    OMP_NUM_THREADS=2 python -m benchmarks.decode --json
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import UnequalWork, Work, facts, interleaved, make_parser, publish_result, rates, ratio, table
from fivetune.data.examples import Source
from fivetune.data.store.batch import collate, pad
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import TokenStore, load_or_build_store
from fivetune.model.decode import Decoding, Sampling, generate, group_by_length
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.tokenizer import suppress_output
from fivetune.plugins import load_plugin as load_plugin
from fivetune.rundir.progress import ignore_progress
from fivetune.types import Autocast

SHARED = Path(__file__).parents[2] / "shared" / "data"
BATCH_SIZE, NUM_FIRST, CAP = 64, 64, 48
CHAIN = 32_064  # ids from here on and the 64 before them stand in no text

OURS, OURS_BF16 = "fivetune fp32", "fivetune bf16"
DRAWN = "fivetune fp32, sampled"
SAMPLING = Sampling(temperature=1e-4, top_k=50, top_p=0.95)  # so cold that the work is equal, but for ties

Answers = dict[int, list[int]]


def main() -> None:
    parser = make_parser(__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer, store = make_workload(args, Path(folder))
        result = _compare(model, tokenizer, store, Path(folder), args)
    print(_table(result))
    publish_result(args, "decode-cpu", result)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the questions and the windows."""
    parser.add_argument("--squad", type=Path, default=SHARED / "squad_v2" / "dev-v2.0.json.gz")
    parser.add_argument("--model", type=Path, default=SHARED / "tokenizers" / "t5-small", help="config and tokenizer")
    parser.add_argument("--blocks", type=int, default=6, help="blocks of 64 questions in a window")
    parser.add_argument("--windows", type=int, default=4, help="windows of each engine")
    parser.add_argument("--sampling", action="store_true", help="greedy search and sampling in fp32 alone")


def make_workload(args: argparse.Namespace, folder: Path) -> tuple[Any, Any, TokenStore]:
    """A model whose answers end by themselves, its tokenizer, and all questions."""
    torch.manual_seed(0)
    loaded = load_model_and_tokenizer(str(args.model), tokenizer=str(args.model), init="random")
    source = Source(
        paths=(str(args.squad),), task=load_plugin("tasks", "squad_v2")(), limits=LengthLimits(512, 128, "truncate")
    )
    store = load_or_build_store(source, loaded.tokenizer, cache=folder, on_progress=ignore_progress)
    model = loaded.model.eval()
    make_answers_end(model, store)
    return model, loaded.tokenizer, store


def select_batches(store: TokenStore, num_blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Blocks of neighbouring questions, evenly over the file; and the same rows in batches of similar lengths."""
    starts = np.linspace(0, len(store) - BATCH_SIZE, num_blocks).astype(int)
    in_order = [list(range(start, start + BATCH_SIZE)) for start in starts.tolist()]
    rows = [row for batch in in_order for row in batch]
    return in_order, [[rows[i] for i in batch] for batch in group_by_length(store.inputs.lengths[rows], BATCH_SIZE)]


@dataclass(slots=True)
class Engine:
    """A side of the comparison: answers the same questions in every window, and keeps what it wrote last."""

    name: str
    answer: Callable[[], Answers]
    answers: Answers = field(default_factory=dict)

    def work(self, num_units: int) -> Work:
        self.answers = self.answer()
        return Work(num_units)


def _compare(model: Any, tokenizer: Any, store: TokenStore, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    in_order, by_length = select_batches(store, args.blocks)
    rows = [row for batch in in_order for row in batch]
    engines = [
        Engine(OURS, lambda: answer_with_fivetune(model, store, rows, nullcontext)),
        Engine(
            OURS_BF16, lambda: answer_with_fivetune(model, store, rows, lambda: torch.autocast("cpu", torch.bfloat16))
        ),
        Engine(DRAWN, lambda: answer_with_fivetune(model, store, rows, nullcontext, SAMPLING)),
        Engine("generate", lambda: answer_with_generate(model, store, in_order)),
        Engine("generate, sorted", lambda: answer_with_generate(model, store, by_length)),
    ]
    peer: Engine | str = "left out by --sampling"
    if args.sampling:
        engines = [engine for engine in engines if engine.name in (OURS, DRAWN)]
    else:
        peer = _ctranslate2(model, tokenizer, store, rows, folder)
    if isinstance(peer, Engine):
        engines.append(peer)
    windows = interleaved(engines, len(rows), args.windows)
    same = _agreement(engines)
    least = {DRAWN: 0.95, "generate": 1.0, "generate, sorted": 1.0}
    if any(share < least.get(name, 0.0) for name, share in same.items()):
        raise UnequalWork(f"answers are not the same: {same}.")
    speeds = {name: rates(found, "units").as_list() for name, found in windows.items()}
    ours = {name: windows.pop(name) for name in (OURS, OURS_BF16) if name in windows}
    return {
        "ratio": {
            name: {peer: ratio(found, theirs, "units").as_list() for peer, theirs in windows.items()}
            for name, found in ours.items()
        },
        "questions_per_second": speeds,
        "same_answers": same,
        "skipped": {} if isinstance(peer, Engine) else {"ctranslate2": peer},
        "workload": describe_workload(store, rows, in_order),
        "facts": facts("cpu"),
    }


def answer_with_fivetune(
    model: Any, store: TokenStore, rows: list[int], autocast: Autocast, sampling: Sampling | None = None
) -> Answers:
    decoding = Decoding(CAP, batch_size=BATCH_SIZE, score_targets=False, sampling=sampling)
    answers = generate(model, store, rows, decoding, device="cpu", autocast=autocast)
    return {one.row: one.token_ids for one in answers}


def answer_with_generate(model: Any, store: TokenStore, batches: list[list[int]]) -> Answers:
    answers = {}
    for rows in batches:
        batch = pad(collate(store, rows), pad_id=0)
        written = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=CAP,
            num_beams=1,
            do_sample=False,
        )
        for row, ids in zip(rows, written[:, 1:].tolist(), strict=True):
            answers[row] = ids[: ids.index(1)] if 1 in ids else ids
    return answers


def _ctranslate2(model: Any, tokenizer: Any, store: TokenStore, rows: list[int], folder: Path) -> Engine | str:
    """The converted model as an engine, or why there is none."""
    try:
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        with suppress_output():
            TransformersConverter(str(folder / "model")).convert(str(folder / "converted"))
        translator = ctranslate2.Translator(
            str(folder / "converted"), device="cpu", compute_type="float32", intra_threads=torch.get_num_threads()
        )
    except Exception as error:  # whatever keeps a peer from running must not keep the benchmark from it
        return f"{type(error).__name__}: {error}"
    words = [tokenizer.convert_ids_to_tokens(store.inputs[row].tolist()) for row in rows]

    def answer() -> Answers:
        found = translator.translate_batch(words, max_batch_size=BATCH_SIZE, beam_size=1, max_decoding_length=CAP)
        written = [one.hypotheses[0] for one in found]
        return {row: tokenizer.convert_tokens_to_ids(words) for row, words in zip(rows, written, strict=True)}

    return Engine("ctranslate2", answer)


@torch.no_grad()
def make_answers_end(model: Any, store: TokenStore) -> None:
    """Change weights so that greedy answers are as long as real ones, without a hook in any engine.

    The first token depends on what the encoder says: its row of the head is the direction that one of 64 sample
    questions gives to the decoder. It stands for that question's answer length. The tokens after it count down to the
    end token: the head of each is the embedding of the one before it.
    """
    shared = model.shared.weight
    sample = np.linspace(0, len(store) - 1, NUM_FIRST).astype(int).tolist()
    shared[0] *= 0.01  # the start token says nothing, so that the question does
    states = torch.cat([_first_state(model, store, row) for row in sample])
    common = torch.nn.functional.normalize(states.mean(0), dim=0)
    firsts = torch.nn.functional.normalize(_without(states - states.mean(0), common), dim=1)
    words = torch.nn.functional.normalize(_without(torch.randn(2 * NUM_FIRST, model.config.d_model), common), dim=1)
    shared[CHAIN - NUM_FIRST : CHAIN + NUM_FIRST] = 1_000 * words  # far above what the layers add
    head = torch.zeros_like(shared)
    head[CHAIN - NUM_FIRST : CHAIN] = firsts
    for i, row in enumerate(sample):
        rest = min(len(store.labels[row]), NUM_FIRST) - 2
        head[CHAIN + rest if rest else 1] += words[i]
    for rest in range(1, NUM_FIRST):
        head[CHAIN + rest - 1 if rest > 1 else 1] += words[NUM_FIRST + rest]
    model.lm_head.weight = torch.nn.Parameter(head)
    model.config.tie_word_embeddings = model.config.scale_decoder_outputs = False


def _first_state(model: Any, store: TokenStore, row: int) -> torch.Tensor:
    ids = torch.tensor([store.inputs[row].tolist()])
    out = model(input_ids=ids, decoder_input_ids=torch.zeros(1, 1, dtype=torch.int64), output_hidden_states=True)
    return out.decoder_hidden_states[-1][:, 0]


def _without(vectors: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    return vectors - (vectors @ direction)[:, None] * direction


def _agreement(engines: list[Engine]) -> dict[str, float]:
    """Share of the answers that are those of FiveTune in fp32; of CTranslate2's, that are as long.

    CTranslate2 knows the tokenizer's pieces only: the ids above them, which these answers are made of, are one to it.
    """
    ours, *others = engines
    shares = {}
    for engine in others:
        known = len if engine.name == "ctranslate2" else list
        same = [known(engine.answers[row]) == known(ids) for row, ids in ours.answers.items()]
        shares[engine.name] = sum(same) / len(same)
    return shares


def describe_workload(store: TokenStore, rows: list[int], batches: list[list[int]]) -> dict[str, float]:
    """What the window holds; padding as batches in data-set order have it."""
    inputs, targets = store.inputs.lengths, store.labels.lengths
    padded = sum(int(inputs[batch].max()) * len(batch) for batch in batches)
    return {
        "questions": len(rows),
        "mean_input_tokens": float(inputs[rows].mean()),
        "mean_input_tokens_of_all": float(inputs.mean()),
        "mean_answer_tokens_of_all": float(targets.mean()),
        "positions_per_token": padded / float(inputs[rows].sum()),
    }


def _table(result: dict[str, Any]) -> str:
    head = ["engine", "questions/s", *(f"{name} is faster" for name in result["ratio"]), "same answers as fp32"]
    rows = []
    for name, (speed, *_) in result["questions_per_second"].items():
        spreads = [found.get(name) for found in result["ratio"].values()]
        times = [f"{spread[0]:.2f} x ({spread[1]:.2f} to {spread[2]:.2f})" if spread else "" for spread in spreads]
        same = result["same_answers"].get(name)
        rows.append([name, f"{speed:.1f}", *times, "" if same is None else f"{same:.1%}"])
    skipped = [f"{name} skipped: {reason}" for name, reason in result["skipped"].items()]
    return "\n".join([table([head, *rows]), *skipped])


if __name__ == "__main__":
    main()
