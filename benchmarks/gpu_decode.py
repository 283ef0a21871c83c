"""Answers on a GPU: are they those of transformers' `generate`, and how fast? Stages of `benchmarks.gpu_day`.

In: a device. Out: shares of equal answers; answers per second of several ways, in interleaved windows.
    python -m benchmarks.gpu_decode --model t5-base --questions 2048 --json
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode import CAP, Answers, Engine, make_answers_end
from benchmarks.gpu_checks import Findings
from benchmarks.harness import facts, interleaved, make_parser, publish_result, rates, ratio, table
from benchmarks.workloads import MODELS, Examples, share_model, write_examples
from fivetune.data.store.batch import collate, pad
from fivetune.model.decode import Decoding, generate, group_by_length
from fivetune.model.load import load_model_and_tokenizer

BATCH_SIZE, NUM_WINDOWS = 64, 3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="t5-base", choices=list(MODELS))
    parser.add_argument("--questions", type=int, default=2048)
    args = parser.parse_args()
    result = measure_speed(args.device, args.model, args.questions)
    rows = [["way", "answers/s", "FiveTune is faster", "least", "most"]]
    for name, speed in result["answers_per_second"].items():
        rows.append([name, f"{speed[0]:.1f}", *(f"{value:.2f} x" for value in result["ratios"].get(name, ()))])
    print(table([(row + [""] * 5)[:5] for row in rows]))
    publish_result(args, f"gpu-decode-{args.device}-{args.model}", result)


@contextmanager
def open_questions(device: str, model: str, num: int) -> Iterator[tuple[Any, Any]]:
    """A model whose answers end as real ones do (of t5-tiny's few ids: after CAP tokens), and questions in memory."""
    with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as name:
        folder = Path(name)
        write_examples(folder, "translation" if device == "cpu" else "squad", num, vocab_size=4000)
        store = Examples(folder)
        found = load_model_and_tokenizer(str(share_model(model))).model.eval()
        if MODELS[model]["vocab_size"] > 32_000:
            make_answers_end(found, store)  # type: ignore[arg-type]
        yield found.to(device), store


def check_decoding(findings: Findings, device: str) -> None:
    """Answers equal those of `generate`, greedily and with beams; in bf16 nearly all of them."""
    for name, num_other, num, allowed in count_other_answers(device):
        findings.note(f"{name}, other answers", f"{num_other} of {num}")
        findings.check(f"{name}: share of other answers", num_other / num, allowed)


def count_other_answers(device: str) -> Iterator[tuple[str, int, int, float]]:
    """Name, number of other answers, number of answers, share that may differ: greedy and with beams in fp32, in bf16.

    Random weights have near ties: of 4 beams, 1 % may fall otherwise in fp32; in bf16 2.6 % do on a CPU
    (results/decode-cpu.json), 5 % may.
    """
    num, cap = (4, 8) if device == "cpu" else (256, CAP)
    with open_questions(device, "t5-tiny" if device == "cpu" else "t5-small", num) as (model, store):
        rows = list(range(num))
        for num_beams in (1, 4):
            theirs = answer_by_generate(model, store, [rows[:64], *_split(rows[64:])], device, cap, num_beams=num_beams)
            ours = answer_by_fivetune(model, store, rows, device, cap, num_beams=num_beams)
            yield f"{num_beams} beams, fp32", _count_other(ours, theirs), num, 0.0 if num_beams == 1 else 0.01
            if num_beams == 1 and device == "cuda":
                half = answer_by_fivetune(model, store, rows, device, cap, bf16=True)
                yield "greedy, bf16", _count_other(half, theirs), num, 0.05


def measure_speed(device: str, name: str, num: int) -> dict[str, Any]:
    """FiveTune in bf16, with cuDNN's attention too, against `generate` in several ways."""
    with open_questions(device, name, num) as (model, store):
        rows = list(range(num))
        in_order = _split(rows)
        by_length = group_by_length(store.inputs.lengths, BATCH_SIZE)
        ours = partial(answer_by_fivetune, model, store, rows, device, CAP, bf16=device == "cuda")
        theirs = partial(answer_by_generate, model, store, device=device, cap=CAP, bf16=device == "cuda")
        ways: dict[str, Callable[[], Answers]] = {
            "fivetune": ours,
            "generate": lambda: theirs(in_order),
            "generate, sorted": lambda: theirs(by_length),
        }
        if device == "cuda":
            ways["fivetune, cuDNN attention"] = partial(ours, cudnn=True)
        engines = [Engine(way, call) for way, call in ways.items()]
        interleaved(engines, num, 1, device=device)  # compiles and allocates
        windows = interleaved(engines, num, NUM_WINDOWS if device == "cuda" else 1, device=device)
        return {
            "ratios": {way: ratio(windows["fivetune"], windows[way], "units").as_list() for way in list(ways)[1:]},
            "answers_per_second": {way: rates(found, "units").as_list() for way, found in windows.items()},
            "same_answers": {one.name: 1 - _count_other(one.answers, engines[0].answers) / num for one in engines[1:]},
            "num_questions": num,
            "batch_size": BATCH_SIZE,
            "facts": facts(device),
        }


def answer_by_fivetune(
    model: Any,
    store: Any,
    rows: list[int],
    device: str,
    cap: int,
    *,
    num_beams: int = 1,
    bf16: bool = False,
    cudnn: bool = False,
) -> Answers:
    """Answers by row; with cuDNN's attention, which runs turn off, only where that is asked for."""
    decoding = Decoding(cap, num_beams=num_beams, batch_size=BATCH_SIZE, score_targets=False)
    autocast = partial(torch.autocast, device, torch.bfloat16) if bf16 else nullcontext
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        answers = generate(model, store, rows, decoding, device=device, autocast=autocast)
        return {one.row: one.token_ids for one in answers}
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def answer_by_generate(
    model: Any,
    store: Any,
    batches: Sequence[list[int]],
    device: str,
    cap: int,
    *,
    num_beams: int = 1,
    bf16: bool = False,
) -> Answers:
    answers: Answers = {}
    with torch.no_grad(), torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
        for rows in batches:
            batch = pad(collate(store, rows), pad_id=0).to(device)
            written = model.generate(
                input_ids=batch.input_ids,
                attention_mask=batch.attention_mask,
                max_new_tokens=cap,
                num_beams=num_beams,
                do_sample=False,
            )
            for row, ids in zip(rows, written[:, 1:].tolist(), strict=True):
                answers[row] = ids[: ids.index(1)] if 1 in ids else ids
    return answers


def _count_other(ours: Answers, theirs: Answers) -> int:
    """The number of answers that differ, without padding at the end."""
    strip = lambda ids: ids[: len(ids) - next((i for i, x in enumerate(ids[::-1]) if x), len(ids))]  # noqa: E731
    return sum(strip(ours[row]) != strip(ids) for row, ids in theirs.items())


def _split(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


if __name__ == "__main__":
    main()
