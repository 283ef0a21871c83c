"""Answers on a GPU: are they those of transformers' `generate`, and how fast? Stages of `benchmarks.gpu_day`.

In: a device. Out: shares of equal answers; answers per second of several ways, in interleaved windows.
    python -m benchmarks.gpu_decode --model t5-base --questions 2048 --json
    python -m benchmarks.gpu_decode --count     operators per step, counted on a CPU
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from benchmarks.decode import CAP, Answers, Engine, make_answers_end
from benchmarks.gpu_checks import Findings
from benchmarks.gpu_warm import replace_launches
from benchmarks.harness import facts, interleaved, make_parser, publish_result, rates, ratio, table
from benchmarks.workloads import COMMON, MODELS, Examples, share_model, write_examples
from fivetune.data.store.batch import collate, pad
from fivetune.model.cuda import dispatch
from fivetune.model.decode import Decoding, captured, generate, group_by_length
from fivetune.model.decode.greedy import GreedySearch
from fivetune.model.load import load_model_and_tokenizer
from fivetune.types import OnNote, ignore_note

BATCH_SIZE, NUM_WINDOWS = 64, 3


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="t5-base", choices=list(MODELS))
    parser.add_argument("--questions", type=int, default=2048)
    parser.add_argument("--count", action="store_true", help="count operators on a CPU; time nothing")
    args = parser.parse_args()
    if args.count:
        print(table(count_operators()))
        return
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


@dataclass(slots=True)
class Steps:
    """What the steps of captured searches were; `notes` are the reasons for which others were launched."""

    num: int = 0
    num_replayed: int = 0
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def watch(self, device: str) -> Iterator[None]:
        """Count the steps of the block; on a CPU, a graph calls its function."""
        run = captured.CapturedSteps.run

        def count(steps: captured.CapturedSteps, longest: int, age: int) -> None:
            before = steps.num_replayed
            run(steps, longest, age)
            self.num += 1
            self.num_replayed += steps.num_replayed - before

        with ExitStack() as stack:
            stack.enter_context(patch.object(captured.CapturedSteps, "run", count))
            if device == "cpu":
                stack.enter_context(patch.object(captured, "supports_graphs", lambda _: True))
                stack.enter_context(patch.object(captured, "get_recorder", lambda _: lambda function: function))
            yield


def check_decoding(findings: Findings, device: str) -> None:
    """Answers equal those of `generate`, greedily and with beams; in bf16 nearly all; graphs replay the steps."""
    steps = Steps()
    with steps.watch(device):
        for name, num_other, num, allowed in count_other_answers(device, steps):
            findings.note(f"{name}, other answers", f"{num_other} of {num}")
            findings.check(f"{name}: share of other answers", num_other / num, allowed)
    findings.note("steps, and those that graphs replayed", [steps.num, steps.num_replayed, *steps.notes])
    findings.require("graphs replay steps, and none fails", steps.num_replayed > 0 and not steps.notes)


def count_other_answers(device: str, steps: Steps) -> Iterator[tuple[str, int, int, float]]:
    """Name, number of other answers, number of answers, share that may differ: greedy and with beams in fp32, in bf16.

    Random weights have near ties: of 4 beams, 1 % may fall otherwise in fp32, and of launched steps, whose products
    have other shapes than captured ones; in bf16 2.6 % do on a CPU (results/decode-cpu.json), 5 % may.
    """
    num, cap = (4, 8) if device == "cpu" else (256, CAP)
    with open_questions(device, "t5-tiny" if device == "cpu" else "t5-small", num) as (model, store):
        rows = list(range(num))
        for num_beams in (1, 4):
            theirs = answer_by_generate(model, store, [rows[:64], *_split(rows[64:])], device, cap, num_beams=num_beams)
            ours = answer_by_fivetune(model, store, rows, device, cap, num_beams=num_beams, on_note=steps.notes.append)
            yield f"{num_beams} beams, fp32", _count_other(ours, theirs), num, 0.0 if num_beams == 1 else 0.01
            if num_beams == 1:
                launched = answer_by_fivetune(model, store, rows, device, cap, capture=False)
                yield "launched steps, fp32", _count_other(launched, ours), num, 0.01
            if num_beams == 1 and device == "cuda":
                half = answer_by_fivetune(model, store, rows, device, cap, bf16=True)
                yield "greedy, bf16", _count_other(half, theirs), num, 0.05


def measure_speed(device: str, name: str, num: int) -> dict[str, Any]:
    """FiveTune in bf16, with launched steps and with cuDNN's attention too, against `generate` in several ways."""
    steps = Steps()
    with open_questions(device, name, num) as (model, store), steps.watch(device):
        rows = list(range(num))
        in_order = _split(rows)
        by_length = group_by_length(store.inputs.lengths, BATCH_SIZE)
        ours = partial(answer_by_fivetune, model, store, rows, device, CAP, bf16=device == "cuda")
        theirs = partial(answer_by_generate, model, store, device=device, cap=CAP, bf16=device == "cuda")
        ways: dict[str, Callable[[], Answers]] = {
            "fivetune": partial(ours, on_note=steps.notes.append),
            "fivetune, launched steps": partial(ours, capture=False),
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
            "steps_replayed": [steps.num_replayed, steps.num, *steps.notes],
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
    capture: bool = True,
    on_note: OnNote = ignore_note,
) -> Answers:
    """Answers by row; with cuDNN's attention, which runs turn off, only where that is asked for."""
    decoding = Decoding(cap, num_beams=num_beams, batch_size=BATCH_SIZE, score_targets=False, capture=capture)
    autocast = partial(torch.autocast, device, torch.bfloat16) if bf16 else nullcontext
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    try:
        answers = generate(model, store, rows, decoding, device=device, autocast=autocast, on_note=on_note)
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


# --- counts on a CPU ---

VIEWS = {
    *("view", "_unsafe_view", "t", "transpose", "permute", "split", "unbind", "as_strided", "expand", "slice"),
    *("select", "detach", "alias", "squeeze", "unsqueeze", "empty", "new_empty", "empty_like", "empty_strided"),
}
COUNTED = {"t5-small": 6, "t5-base": 12, "t5-large": 24}  # layers


class Operators(TorchDispatchMode):
    """Counts what computes: operators that are no views, and launches of kernels."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))

    def launch(self, *_: Any, **__: Any) -> None:
        """Stands in for the launch of a kernel of Triton."""
        self.num += 1


def count_operators() -> list[list[str]]:
    """Operators of a step in bf16 that a GPU runs, launched and captured; what kernels compute does not matter."""
    found: dict[tuple[bool, int], int] = {}
    for capture, layers in product((False, True), (1, 2)):
        counter = Operators()
        settings: dict[str, Any] = COMMON | MODELS["t5-tiny"] | {"num_layers": layers, "num_decoder_layers": layers}
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
        owner = captured.CapturedSteps if capture else GreedySearch
        counts: list[int] = []
        write = owner._write_token

        def count(*args: Any, write: Any = write, counts: list[int] = counts, counter: Operators = counter) -> Any:
            before = counter.num
            with counter:
                out = write(*args)
            counts.append(counter.num - before)
            return out

        with tempfile.TemporaryDirectory(prefix="fivetune-gpu-") as folder, ExitStack() as stack:
            write_examples(Path(folder), "translation", 24, vocab_size=config.vocab_size)
            stack.enter_context(Steps().watch("cpu"))
            stack.enter_context(patch.object(dispatch, "DEVICES", ("cuda", "cpu")))
            stack.enter_context(replace_launches(counter.launch))
            stack.enter_context(patch.object(owner, "_write_token", count))
            half = partial(torch.autocast, "cpu", torch.bfloat16)
            decoding = Decoding(8, batch_size=8, score_targets=False, capture=capture)
            store: Any = Examples(Path(folder))
            list(generate(model, store, range(24), decoding, device="cpu", autocast=half))
        found[capture, layers] = sorted(counts)[len(counts) // 2]
    rows = [["model", "layer, launched", "captured", "step, launched", "captured", "launched by the host"]]
    for name, layers in COUNTED.items():
        of_layer = [found[capture, 2] - found[capture, 1] for capture in (False, True)]
        totals = [found[capture, 1] + (layers - 1) * of_layer[capture] for capture in (False, True)]
        rows.append([name, *map(str, (*of_layer, *totals)), "1 graph, 1 copy"])
    return rows


def _count_other(ours: Answers, theirs: Answers) -> int:
    """The number of answers that differ, without padding at the end."""
    strip = lambda ids: ids[: len(ids) - next((i for i, x in enumerate(ids[::-1]) if x), len(ids))]  # noqa: E731
    return sum(strip(ours[row]) != strip(ids) for row, ids in theirs.items())


def _split(rows: list[int]) -> list[list[int]]:
    return [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]


if __name__ == "__main__":
    main()
