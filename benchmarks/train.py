"""Training: FiveTune against transformers' Seq2SeqTrainer in several set-ups, and a plain loop.

Same weights, examples, updates, optimizer and dropout. Each side lives in a process of its own, so that no side's
memory is in another's way; windows of optimizer steps are interleaved A B B A, one process working at a time.
Every side goes once through the same examples, in an order of its own: so the ratio of the seconds is that of the same
work. Windows differ in length where a side sorts (the Trainer's length grouping goes from long to short), so the spread
is told in tokens. The result is written after each round of windows; of a side that dies, it has the reason.

On a CPU the sides start one after the other, and first steps decide how long the windows are. On a GPU they start
together, are built once, and go through all examples before the windows: what is compiled, recorded and allocated is
there, and the peaks of memory are those of the windows.

Peers run as their users start them; FiveTune's sides have what `import fivetune` sets in the environment. Where
FiveTune computes in bf16 on a CPU, its own fp32 takes part too.
    python -m benchmarks.train --device cpu --model t5-small --workload squad --peers default,tuned,tuned-bf16 --json
    python -m benchmarks.train --device cuda --model t5-base --batch-size 128,16 --peers tuned,default
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness import (
    UnequalWork,
    Window,
    Work,
    facts,
    make_parser,
    num_units_in,
    peak_resident,
    publish_result,
    rates,
    ratio,
    same_totals,
    table,
    timed_window,
)
from benchmarks.plan import OWN, PEERS, Plan
from benchmarks.sides import make_side
from benchmarks.workloads import (
    MODELS,
    MODELS_VARIABLE,
    WORKLOADS,
    Examples,
    make_model,
    share_model,
    write_examples,
)
from fivetune import ENVIRONMENT
from fivetune.errors import is_out_of_memory
from fivetune.machine.telemetry.cores import count_cores
from fivetune.machine.telemetry.devices import get_device_peak_flops, measure_product_flops
from fivetune.model.load import count_parameters

NUM_WINDOWS = {False: 6, True: 4}  # as on a CPU, as on a GPU
WARM_UP = 2  # steps on a CPU that decide how many a window has
MOST_STEPS = {"cpu": 5, "cuda": 25}  # of a window
GPU_EXAMPLES = 1280  # of a window
SHARE_OF_WINDOWS = 0.65  # of --minutes; the rest is start-up and warm-up
LONGEST_ANSWER = 900.0  # seconds; a side that takes longer has died


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads or count_cores())
    torch.manual_seed(args.seed)
    if args.side:
        serve(args)
        return
    results: dict[str, dict[str, Any]] = {}
    for result in measure_models(args):
        results[result["name"]] = result
        publish_result(args, result["name"], result)
    for result in results.values():
        report(result)
    if args.json and results:
        print(json.dumps(result))


def measure_models(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results of all sides, on a model in a temporary folder, as `measure` yields them."""
    with tempfile.TemporaryDirectory(prefix="fivetune-bench-") as folder:
        args.folder = Path(folder)
        if os.environ.get(MODELS_VARIABLE) and not args.seed:
            (args.folder / args.model).symlink_to(share_model(args.model))
        else:
            make_model(args.model, args.folder, seed=args.seed)
        yield from measure(args)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--model", default="t5-small", choices=list(MODELS))
    parser.add_argument("--workload", default="squad", choices=list(WORKLOADS))
    known = [*PEERS, *list(OWN)[1:]]
    parser.add_argument("--peers", default="default,tuned", help=f"of {', '.join(known)}")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "tf32"), help="of all sides")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "adafactor"))
    parser.add_argument("--adapter", default="", help="name of the adapter that all sides train; default: all weights")
    parser.add_argument(
        "--batch-size",
        help="examples per step, or several numbers with commas; default 16 (mt5-small on a CPU: 8), GPU 32",
    )
    parser.add_argument("--minutes", type=float, default=9, help="about how long all of it may take on a CPU")
    parser.add_argument("--threads", type=int, help="CPU threads; default: physical cores")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-on-gpu", action="store_true", help="the protocol of a GPU on a CPU, with short windows")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # be the process of this side
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    unknown = [name for name in args.peers.split(",") if name not in known]
    if unknown:
        parser.error(f"--peers: there is no {', '.join(unknown)}. Allowed: {', '.join(known)}.")
    args.kind = args.device.partition(":")[0]
    args.as_on_gpu |= args.kind == "cuda"
    default = "32" if args.kind == "cuda" else {"mt5-small": "8"}.get(args.model, "16")
    sizes = (args.batch_size or default).split(",")
    if not all(size.isdecimal() and int(size) for size in sizes):
        parser.error(f"--batch-size: {args.batch_size} is no number. Allowed: 16, or 16,128.")
    args.batch_sizes = [int(size) for size in sizes]
    return args


def prepare(args: argparse.Namespace, name: str, num_examples: int) -> None:
    """Write so many examples, which all sides, in whatever process, go through once."""
    folder = args.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = MODELS[args.model]["vocab_size"]
    write_examples(folder, args.workload, num_examples, vocab_size=vocab_size, seed=args.seed)


def make_plan(args: argparse.Namespace, name: str, examples: str, batch_size: int) -> Plan:
    """The plan of the model and the examples that were written, with a folder for the side `name`."""
    own = args.folder / examples / name
    own.mkdir(parents=True, exist_ok=True)
    model = args.folder / args.model
    lines = Examples(args.folder / examples)
    return Plan(model, lines, args.workload, batch_size, args.device, own, args.adapter, args.precision, args.optimizer)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Start all sides, and let them take turns, one batch size after the other. Yields a result after every round."""
    product = measure_product_flops(args.device, "bf16" if args.kind == "cuda" else "fp32")
    if args.kind == "cuda":
        torch.cuda.empty_cache()
    sides = Sides(args)
    try:
        for name in ("fivetune", *args.peers.split(",")):
            sides.start(name)
        for batch_size in args.batch_sizes:
            yield from _measure_batch_size(args, sides, batch_size, product)
    finally:
        sides.close()


def _measure_batch_size(
    args: argparse.Namespace, sides: Sides, batch_size: int, product: float | None
) -> Iterator[dict[str, Any]]:
    num_windows, examples = NUM_WINDOWS[args.as_on_gpu], f"measured-{batch_size}"
    starts: dict[str, Any] = {}
    if args.kind == "cuda":
        num_steps = min(MOST_STEPS["cuda"], max(5, GPU_EXAMPLES // batch_size))
    elif args.as_on_gpu:
        num_steps = WARM_UP
    else:
        starts, num_steps = _warm_up_cpu(args, sides, batch_size)
    prepare(args, examples, num_windows * num_steps * batch_size)
    built = sides.build(examples, batch_size)
    if args.as_on_gpu:
        starts = sides.warm_up(built, num_windows * num_steps)
    same_weights({name: built[name]["weights"] for name in sides.names})
    print(f"batch {batch_size}: {num_windows} windows of {num_steps} steps each", flush=True)
    windows: dict[str, list[Window]] = {name: [] for name in starts}
    machine = facts(args.device)
    for number in range(num_windows):
        for name in sides.names[:: -1 if number % 2 else 1]:
            if window := sides.time(name, num_steps):
                windows[name].append(window)
        is_last = number == num_windows - 1
        ends = sides.ask_each("end") if is_last else {}
        alive = {name: windows[name] for name in sides.names}
        if is_last:
            same_totals(alive, "examples")
            same_totals(alive, "tokens")
        figures = {
            name: starts[name]
            | side_figures(found, get_device_peak_flops(args.device, starts[name]["precision"]), product)
            | ends.get(name, {"peak_bytes": None})
            for name, found in alive.items()
        }
        plan = make_plan(args, "facts", examples, batch_size)
        yield {
            "name": f"{args.adapter or 'train'}-{args.device}-{args.model}-{args.workload}-{batch_size}",
            "adapter": args.adapter,
            "model": args.model,
            "workload": args.workload,
            "lengths": plan.examples.lengths_from,
            "num_examples": len(plan.examples),
            "batch_size": batch_size,
            "precision": args.precision,
            "optimizer": args.optimizer,
            "attention_of_tuned": sides.attention,
            "steps_per_window": num_steps,
            "num_windows": num_windows,
            "num_rounds": number + 1,
            "warm_up_steps": num_windows * num_steps if args.as_on_gpu else WARM_UP,
            "product_flops": product,
            "machine": machine,
            "died": sides.died,
            "sides": figures,
            "ratios": {name: peer_figures(alive, name) for name in alive if name != "fivetune"}
            if "fivetune" in alive
            else {},
        }


def _warm_up_cpu(args: argparse.Namespace, sides: Sides, batch_size: int) -> tuple[dict[str, Any], int]:
    """First steps of each side, one after the other: what they say of its start, and the steps of a window."""
    print(f"start-up and warm-up: {WARM_UP} steps of each side", flush=True)
    prepare(args, "warm-up", WARM_UP * batch_size)
    starts = sides.warm_up(sides.build("warm-up", batch_size), WARM_UP)
    last = [start["last_step_seconds"] for start in starts.values()]
    seconds = 60 * args.minutes * SHARE_OF_WINDOWS / len(args.batch_sizes)
    return starts, num_units_in(seconds, last, NUM_WINDOWS[False], most=MOST_STEPS["cpu"])


class SideDiedError(Exception):
    """The process of a side has ended, or does not answer; the text says why."""


class Sides:
    """The sides of a comparison. One that dies takes no further part, and `died` has the reason.

    Attributes:
        attention: the faster attention of the tuned peers, by name, in the precision of each.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._remotes: dict[str, Remote] = {}
        self.died: dict[str, str] = {}
        self.attention: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return list(self._remotes)

    def start(self, name: str) -> None:
        """Add a side; on a GPU its process starts now and imports what it needs, on a CPU when it is asked first."""
        self._remotes[name] = Remote(self._args, name)
        if self._args.as_on_gpu:
            self._remotes[name].start()

    def build(self, examples: str, batch_size: int) -> dict[str, Any]:
        """Build every side on these examples: on a GPU all at once, on a CPU one after the other."""
        self._choose_attentions(examples, batch_size)
        request = {"examples": examples, "batch_size": batch_size}
        found = self.ask_each("build", **request, together=self._args.as_on_gpu)
        if not self._args.as_on_gpu and found.get("fivetune", {}).get("precision") == "bf16":
            found |= self._add_fp32(request)
        return found

    def _add_fp32(self, request: dict[str, Any]) -> dict[str, Any]:
        """FiveTune's fp32 takes part although nobody asked for it: where its own choice on a CPU is bf16."""
        if "fivetune-fp32" in self._remotes or "fivetune-fp32" in self.died:
            return {}
        self.start("fivetune-fp32")
        answer = self._try("fivetune-fp32", lambda remote: remote.ask("build", **request))
        return {} if answer is None else {"fivetune-fp32": answer}

    def warm_up(self, built: dict[str, Any], num_steps: int) -> dict[str, Any]:
        """First steps of every side, one after the other. Returns: what is known of its start."""
        starts = {name: built[name] | each for name, each in self.ask_each("warm-up", num_steps=num_steps).items()}
        for start in starts.values():
            start["warmed_up_seconds"] = start["start_up_seconds"] + start.pop("warm_up_seconds")
        return starts

    def _choose_attentions(self, examples: str, batch_size: int) -> None:
        """The faster attention of every tuned side, measured by the first of its precision while the others wait."""
        chosen: dict[bool, str] = {}
        for name in [name for name in self.names if name.startswith(("tuned", "compiled"))]:
            kind = name == "tuned-bf16"
            if kind not in chosen and name not in self.attention:
                request = {"examples": examples, "batch_size": batch_size}
                answer = self._try(name, lambda remote, request=request: remote.ask("choose", **request))
                if answer is None:
                    continue
                chosen[kind] = answer["attention"]
            self.attention.setdefault(name, chosen.get(kind, ""))

    def ask_each(self, what: str, *, together: bool = False, **values: Any) -> dict[str, Any]:
        """The answers of all sides that give one."""

        def word(name: str) -> dict[str, Any]:
            return values | ({"attention": self.attention.get(name)} if what == "build" else {})

        if together:
            for name in self.names:
                self._try(name, lambda remote, name=name: remote.send(what, **word(name)))
        answers = {}
        for name in self.names:
            ask: Callable[[Remote], Any] = lambda remote, name=name: (  # noqa: E731
                remote.receive() if together else remote.ask(what, **word(name))
            )
            if (answer := self._try(name, ask)) is not None:
                answers[name] = answer
        return answers

    def time(self, name: str, num_steps: int) -> Window | None:
        """A window of a side; None if it died."""
        return self._try(name, lambda remote: timed_window(remote, num_steps))

    def _try(self, name: str, ask: Callable[[Remote], Any]) -> Any:
        try:
            return ask(self._remotes[name])
        except SideDiedError as error:
            self.died[name] = str(error)
            print(f"{name}: {error}", flush=True)
            self._remotes.pop(name).close()
            return None

    def close(self) -> None:
        for remote in self._remotes.values():
            remote.close()


def make_environment(name: str) -> dict[str, str]:
    """The environment of a side: FiveTune's has what `import fivetune` sets, a peer's only what the user set."""
    given = psutil.Process().environ()
    added = set[str]() if name in OWN else ENVIRONMENT.keys() - given
    return {key: value for key, value in os.environ.items() if key not in added}


class Remote:
    """A side in a process of its own, which does what it is asked for and waits in between."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.name = name
        settings = {
            "side": name,
            "device": args.device,
            "model": args.model,
            "workload": args.workload,
            "folder": args.folder,
            "threads": torch.get_num_threads(),
            "seed": args.seed,
            "precision": args.precision,
            "optimizer": args.optimizer,
            "adapter": args.adapter,
        }
        words = [f"--{key}={value}" for key, value in settings.items()]
        self._command = [sys.executable, "-m", "benchmarks.train", *words]
        self._log = args.folder / f"{name}.log"
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def start(self) -> subprocess.Popen[str]:
        """Start the process unless it runs."""
        if self._process is None:
            with self._log.open("w", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=Path(__file__).parents[1],
                    env=make_environment(self.name),
                )
            threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        return self._process

    def _read(self, lines: Iterable[str]) -> None:
        """Hand on the lines of the process; an empty one when it has ended."""
        for line in lines:
            self._answers.put(line)
        self._answers.put("")

    def send(self, what: str, **values: Any) -> None:
        """Ask, without waiting for the answer. Raises SideDiedError."""
        stdin = self.start().stdin
        assert stdin
        try:
            stdin.write(json.dumps([what, values]) + "\n")
            stdin.flush()
        except OSError:
            raise SideDiedError(self._explain_death()) from None

    def receive(self) -> dict[str, Any]:
        """The answer to what was asked. Raises SideDiedError."""
        try:
            line = self._answers.get(timeout=LONGEST_ANSWER)
        except queue.Empty:
            raise SideDiedError(f"no answer within {LONGEST_ANSWER:.0f} s") from None
        if not line:
            raise SideDiedError(self._explain_death())
        return json.loads(line)

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        self.send(what, **values)
        return self.receive()

    def work(self, num_units: int) -> Work:
        return Work(**self.ask("work", num_steps=num_units))

    def _explain_death(self) -> str:
        code = self.start().wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if code < 0:
            return f"it was killed by signal {-code}"
        last = lines[-1][:300] if lines else f"it ended with code {code}"
        return f"out of memory: {last}" if is_out_of_memory(RuntimeError(last)) else last

    def close(self) -> None:
        if self._process is not None:
            with suppress(OSError), self._process as process:  # closes the pipes and waits
                process.terminate()


def serve(args: argparse.Namespace) -> None:
    """The process of a side: answers the questions of `Remote.ask`, one per line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import_seconds = time.time() - psutil.Process().create_time()
    gc.disable()
    side = None
    for line in sys.stdin:
        what, values = json.loads(line)
        gc.collect()
        started = time.time()
        if what == "choose":
            from benchmarks.peers import best_attention

            plan = make_plan(args, "choice", values["examples"], values["batch_size"])
            answer = {"attention": best_attention(plan, bf16=args.side == "tuned-bf16")}
        elif what == "build":
            if side is not None:
                side.close()
                side = None
                gc.collect()
            plan = make_plan(args, args.side, values["examples"], values["batch_size"])
            side = make_side(args.side, plan, attention=values["attention"] or None)
            answer = {
                "start_up_seconds": import_seconds + time.time() - started,
                "precision": side.precision,
                "wait_policy": psutil.Process().environ().get("OMP_WAIT_POLICY"),
                "weights": _weights(side, args.adapter),
            }
        else:
            assert side is not None
            answer = ANSWERS[what](side, args, **values)
        print(json.dumps(answer), file=answers, flush=True)
        if platform.libc_ver()[0] == "glibc":  # which keeps what was freed: five sides of t5-small would fill 24 GiB
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    if side is not None:
        side.close()


def _weights(side: Any, adapter: str) -> list[float]:
    """What tells one set of weights from another: how many, and their mean sizes together, without an adapter's."""
    sizes = sum(float(p.detach().abs().mean()) for p in side.model.parameters() if p.requires_grad != bool(adapter))
    return [count_parameters(side.model), round(sizes, 4)]


def _warm_up(side: Any, args: argparse.Namespace, *, num_steps: int) -> dict[str, Any]:
    """Steps before the windows, after which peaks of memory begin again; the seconds of all and of the last one."""
    started = time.perf_counter()
    if num_steps > 1:
        _work(side, args, num_steps=num_steps - 1)
    last = timed_window(side, 1, device=args.device).seconds
    found = {"warm_up_seconds": time.perf_counter() - started, "last_step_seconds": last}
    gc.collect()
    if args.kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return found


def _work(side: Any, args: argparse.Namespace, *, num_steps: int) -> dict[str, Any]:
    """What was done, with the CPU seconds of this process, which other programs change little (workers apart)."""
    before = time.process_time()
    work = side.work(num_steps)
    work.counts["cpu_seconds"] = time.process_time() - before
    if args.kind == "cuda":
        torch.cuda.synchronize()
    return {"num_units": work.num_units, "counts": work.counts}


def _end(side: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Most memory in use at once: on a GPU during the windows, on a CPU since the process began."""
    peak = torch.cuda.max_memory_allocated() if args.kind == "cuda" else peak_resident()
    return {"peak_bytes": peak, **side.facts()}


ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {"warm-up": _warm_up, "work": _work, "end": _end}


def same_weights(found: dict[str, Any]) -> None:
    """Raises UnequalWork unless all sides hold as many weights, of the same values."""
    if len({tuple(weights) for weights in found.values()}) > 1:
        raise UnequalWork(f"the sides do not start from the same weights (number, mean sizes): {found}.")


def side_figures(windows: list[Window], peak: float | None, product: float | None) -> dict[str, Any]:
    """What one side did: median, least and most over its windows, and over all of them together.

    Args:
        peak: dense operations per second by the data sheet, which MFU is a share of; None if unknown.
        product: those of a large matrix product, measured on this machine.
    """
    seconds = sum(w.seconds for w in windows)
    total = {name: sum(w.work.counts[name] for w in windows) for name in windows[0].work.counts}
    num_steps = sum(w.work.num_units for w in windows)
    return {
        "tokens_per_second": rates(windows, "tokens").as_list(),
        "examples_per_second": rates(windows, "examples").as_list(),
        "tokens_per_second_overall": total["tokens"] / seconds,
        "examples_per_second_overall": total["examples"] / seconds,
        "seconds_per_step": seconds / num_steps,
        "padding_fraction": 1 - total["tokens"] / total["positions"],
        "mfu": None if peak is None else total["flops"] / seconds / peak,
        "product_share": None if product is None else total["flops"] / seconds / product,
        "mean_loss": total["nats"] / num_steps,
        "windows": [{"seconds": w.seconds, **w.work.counts} for w in windows],
    }


def peer_figures(windows: dict[str, list[Window]], peer: str) -> dict[str, Any]:
    """How many times faster FiveTune is than a peer: on the same examples, and in tokens per second over windows."""
    ours, theirs = (sum(w.seconds for w in windows[name]) for name in ("fivetune", peer))
    cpu = {name: sum(w.work.counts["cpu_seconds"] for w in windows[name]) for name in ("fivetune", peer)}
    return {
        "same_examples": theirs / ours,
        "same_examples_cpu_seconds": cpu[peer] / cpu["fivetune"],
        "tokens_per_second": ratio(windows["fivetune"], windows[peer], "tokens").as_list(),
    }


def report(result: dict[str, Any]) -> None:
    """Print the tables."""
    sides = result["sides"]
    head = [
        "side",
        "precision",
        "tokens/s",
        "(least to most)",
        "examples/s",
        "s/step",
        "padding",
        "MFU",
        "of a product",
        "loss",
        "start-up s",
        f"s to {result['warm_up_steps']} steps",
        "peak GB",
    ]
    rows = [head]
    for name, side in sides.items():
        speed = side["tokens_per_second"]
        rows.append(
            [
                name,
                _name_precision(result, name),
                f"{speed[0]:,.0f}",
                f"{speed[1]:,.0f} to {speed[2]:,.0f}",
                f"{side['examples_per_second_overall']:.2f}",
                f"{side['seconds_per_step']:.3g}",
                f"{side['padding_fraction']:.0%}",
                _format_share(side["mfu"]),
                _format_share(side["product_share"]),
                f"{side['mean_loss']:.3f}",
                f"{side['start_up_seconds']:.1f}",
                f"{side['warmed_up_seconds']:.1f}",
                _gigabytes(side["peak_bytes"]),
            ]
        )
    print(
        f"\n{result['model']}, {result['workload']}, batch {result['batch_size']}; lengths: "
        f"{result['num_examples']} of {result['lengths']}; {result['machine']['num_threads']} threads\n"
    )
    print(table(rows), "\n")
    for name, reason in result.get("died", {}).items():
        print(f"{name} died: {reason}\n")
    if not result["ratios"]:
        return
    ours = sides["fivetune"]
    rows = [
        [
            f"FiveTune ({_name_precision(result, 'fivetune')}) against",
            "same examples",
            "CPU seconds",
            "tokens/s",
            "(least to most)",
            f"to step {result['warm_up_steps']}",
            "memory",
        ]
    ]
    for name, figures in result["ratios"].items():
        speed = figures["tokens_per_second"]
        rows.append(
            [
                f"{name} ({_name_precision(result, name)})",
                f"{figures['same_examples']:.2f}x",
                f"{figures['same_examples_cpu_seconds']:.2f}x",
                f"{speed[0]:.2f}x",
                f"{speed[1]:.2f} to {speed[2]:.2f}",
                f"{sides[name]['warmed_up_seconds'] / ours['warmed_up_seconds']:.2f}x",
                f"{ours['peak_bytes'] / sides[name]['peak_bytes']:.2f}x" if ours["peak_bytes"] else "n/a",
            ]
        )
    print(table(rows), "\n")
    product = result["product_flops"]
    measured = "not measured" if product is None else f"{product / 1e9:,.0f} GFLOP/s"
    print(
        "MFU: of the dense peak by the device's data sheet; beside it of a matrix product measured here, "
        f"{measured}. tokens: without padding, source and target."
    )


def _name_precision(result: dict[str, Any], side: str) -> str:
    """What a side computed in; results of old files have one precision for all."""
    return str(result["sides"][side].get("precision", result["precision"]))


def _gigabytes(num_bytes: int | None) -> str:
    return "n/a" if num_bytes is None else f"{num_bytes / 1e9:.2f}"


def _format_share(share: float | None) -> str:
    return "n/a" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    main()
