"""Requests per second and latencies of `fivetune serve`: in batches, one by one, and with transformers' generate.

The model has the t5-small config and random weights, made so that answers are as long as real ones
(`benchmarks.decode.make_answers_end`). All sides are behind the same server and get the same SQuAD 2.0 questions from
1, 8 and 32 clients in another process; each client sends its next request when it has an answer. All decode greedily,
in fp32 and, where the CPU has units for it (`train.precision auto` takes it there), in bf16; the share of answers that
equal FiveTune's in fp32 is counted. transformers' side is what its pipeline did for a request (transformers 5 has no
pipeline for text to text): tokenise, `generate`, decode; in bf16 with weights in bf16.
    OMP_NUM_THREADS=2 python -m benchmarks.serve --json
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.decode import CAP, SHARED, make_answers_end
from benchmarks.harness import abba, facts, make_parser, publish_result, table
from fivetune.config import load_config
from fivetune.data.readers.records import read_records
from fivetune.delivery.serving.app import Service, build_app
from fivetune.delivery.serving.batching import AnswerTogether, Batcher
from fivetune.delivery.serving.schema import RunFacts
from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
from fivetune.distributed.world import SINGLE_PROCESS
from fivetune.machine.telemetry.devices import find_bf16_units
from fivetune.model.decode import Decoding
from fivetune.model.load import load_model_and_tokenizer
from fivetune.model.weight_cache import join_projections
from fivetune.rundir.progress import ignore_progress
from fivetune.rundir.records import Prediction
from fivetune.training.answers.loading import RunModel
from fivetune.training.answers.trained_run import TrainedRun
from fivetune.training.compute import choose_compute
from fivetune.training.sources import prepare_split
from fivetune.types import RawRecord, TextExample

CLIENTS = (1, 8, 32)
BARS = {1: 1.0, 32: 3.0}
"""Times the requests of transformers' server, in fp32, by number of clients."""
BATCHED, ONE_BY_ONE, PEER = "fivetune, batches of 32", "fivetune, one by one", "transformers, one by one"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--squad", type=Path, default=SHARED / "squad_v2" / "dev-v2.0.json.gz")
    parser.add_argument("--model", type=Path, default=SHARED / "tokenizers" / "t5-small", help="config and tokenizer")
    parser.add_argument("--requests", type=int, default=64, help="of a window")
    parser.add_argument("--windows", type=int, default=2, help="of each side")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        runs = _open_runs(args, Path(folder))
        records = _select_records(args.squad, args.requests)
        sides: dict[str, tuple[AnswerTogether, int, Decoding]] = {}
        for precision, run in runs.items():
            own = run.loaded.build_decoding()
            sides[f"{BATCHED}, {precision}"] = run.predict_each, 32, own
            sides[f"{ONE_BY_ONE}, {precision}"] = run.predict_each, 1, own
            sides[f"{PEER}, {precision}"] = _make_peer(run), 1, own
        with ExitStack() as stack:
            ports = {name: stack.enter_context(_serve(*side)) for name, side in sides.items()}
            windows = _measure(ports, records, args.windows)
    result = {"facts": facts("cpu"), "num_requests": args.requests, **_summarise(windows)}
    print(_format(result))
    publish_result(args, "serve-cpu", result)


def _open_runs(args: argparse.Namespace, folder: Path) -> dict[str, TrainedRun]:
    """Runs of t5-small's shape as `fivetune.open_run` returns them, by precision, with the same weights."""
    recipe = {
        "run": {"dir": str(folder / "run")},
        "model": {"config": str(args.model), "tokenizer": str(args.model), "init": "random"},
        "task": {"name": "squad_v2"},
        "data": {"train": str(args.squad), "eval": str(args.squad), "cache_dir": str(folder / "cache")},
        "train": {"num_steps": 1, "precision": "fp32"},
        "eval": {"max_new_tokens": CAP, "suppress_sentinels": False},  # the answers are made of them
        "device": "cpu",
    }
    config = load_config(recipe)
    loaded = load_model_and_tokenizer(str(args.model), tokenizer=str(args.model), init="random")
    store = prepare_split(config, loaded.tokenizer, "eval", on_progress=ignore_progress)
    assert store is not None
    model = loaded.model.eval()
    with torch.no_grad():
        make_answers_end(model, store)
    join_projections(model)
    fp32 = RunModel(config, model, loaded.tokenizer, choose_compute(config, SINGLE_PROCESS))
    sides = {"fp32": fp32}
    if find_bf16_units():
        sides["bf16"] = replace(fp32, compute=replace(fp32.compute, precision="bf16"))
    return {precision: TrainedRun(folder, loaded=side) for precision, side in sides.items()}


def _select_records(source: Path, num: int) -> list[dict[str, object]]:
    """Take questions evenly over the file."""
    records: Sequence[RawRecord] = list(read_records(str(source)))
    chosen = np.linspace(0, len(records) - 1, num).astype(int).tolist()
    return [{name: records[i].fields[name] for name in ("question", "context")} for i in chosen]


def _make_peer(run: TrainedRun) -> AnswerTogether:
    """Answer each record with transformers' generate, in the precision of the run."""
    loaded = run.loaded
    model: Any = loaded.model
    if loaded.compute.precision != "fp32":
        model = copy.deepcopy(loaded.model).to(torch.bfloat16)

    def answer(requests: Sequence[Sequence[Any]], **options: Any) -> list[list[Prediction]]:
        found: list[list[Prediction]] = []
        for request in requests:
            texts = [_format_input(run, one) for one in request]
            encoded = loaded.tokenizer(texts, return_tensors="pt", truncation=True, max_length=512, padding=True)
            with torch.inference_mode():
                written = model.generate(**encoded, max_new_tokens=CAP, do_sample=False, num_beams=1)
            ids = [[one for one in row if one > 1] for row in written.tolist()]  # without padding and end
            found.append([Prediction(id="0", prediction=str(loaded.tokenizer.decode(row)).strip()) for row in ids])
        return found

    return answer


def _format_input(run: TrainedRun, record: dict[str, object]) -> str:
    example = run.loaded.config.task.to_text(RawRecord({"id": "0", **record}, ""), labelled=False)
    assert isinstance(example, TextExample)
    return example.inputs


@contextmanager
def _serve(answer: AnswerTogether, max_batch: int, decoding: Decoding) -> Iterator[int]:
    """Serve on loopback; yields the port."""
    batcher = Batcher({"run": answer}, max_batch=max_batch, max_wait_seconds=0.05 if max_batch > 1 else 0, max_queue=64)
    with bind_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        facts = RunFacts("run", "squad_v2", 0, (), decoding)
        server = build_server(build_app(Service(batcher, {"run": facts})), drain_seconds=1)
        thread = threading.Thread(target=run_until_stopped, args=(server, bound))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield port
        server.should_exit = True
        thread.join()
        batcher.close()


def _measure(
    ports: dict[str, int], records: list[dict[str, object]], num_windows: int
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Measure windows of each side and number of clients, interleaved: the servers that are not asked only wait."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = {(name, num): [] for num in CLIENTS for name in ports}
    for port in ports.values():
        _send(port, 1, records[:4])  # warm
    for place in abba([str(place) for place in range(len(found))], num_windows):
        name, num = list(found)[int(place)]
        found[name, num].append(_send(ports[name], num, records))
    return found


def _send(port: int, num_clients: int, records: list[dict[str, object]]) -> dict[str, Any]:
    asked = json.dumps({"port": port, "num_clients": num_clients, "bodies": records})
    command = [sys.executable, "-c", "from benchmarks.serve_client import main; main()"]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _summarise(measured: dict[tuple[str, int], list[dict[str, Any]]]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for (name, num), windows in measured.items():
        latencies = sorted(one for window in windows for one in window["latencies"])
        rates = [len(window["latencies"]) / window["seconds"] for window in windows]
        row = {"side": name, "clients": num, "per_second": float(np.median(rates)), "each": rates}
        rows.append(row | {f"p{p}_seconds": float(np.percentile(latencies, p)) for p in (50, 99)})
    speeds = {(row["side"], row["clients"]): row["per_second"] for row in rows}
    names = dict.fromkeys(name for name, _ in measured)
    batched = [name for name in names if name.startswith(BATCHED)]
    ratios = {
        ours: {
            other: {num: speeds[ours, num] / speeds[other, num] for num in CLIENTS}
            for other in names
            if other not in batched
        }
        for ours in batched
    }
    own = measured[f"{ONE_BY_ONE}, fp32", 1][0]["answers"]
    equal = {
        f"{name}, {num}": float(np.mean([a == b for a, b in zip(own, windows[0]["answers"], strict=True)]))
        for (name, num), windows in measured.items()
    }
    against = ratios[f"{BATCHED}, fp32"][f"{PEER}, fp32"]
    bars = [
        {"clients": num, "ratio": against[num], "bar": bar, "met": against[num] >= bar} for num, bar in BARS.items()
    ]
    return {"rows": rows, "ratios": ratios, "bars": bars, "equal_answers": equal}


def _format(result: dict[str, Any]) -> str:
    lines = [["side", "clients", "requests/s", "p50 ms", "p99 ms", *(f"{name} is" for name in result["ratios"])]]
    for row in result["rows"]:
        figures = [f"{row['per_second']:.1f}", f"{1000 * row['p50_seconds']:.0f}", f"{1000 * row['p99_seconds']:.0f}"]
        found = [ratios.get(row["side"], {}).get(row["clients"]) for ratios in result["ratios"].values()]
        lines.append([row["side"], str(row["clients"]), *figures, *(f"{one:.2f} x" if one else "" for one in found)])
    bars = [["clients (fp32, times transformers' requests)", "is", "bar"]]
    for one in result["bars"]:
        bars.append([str(one["clients"]), f"{one['ratio']:.2f} x", f"{one['bar']:.2f} x"])
    return f"{table(lines)}\n\n{table(bars)}"


if __name__ == "__main__":
    main()
