"""The board over many runs: the time to open it, and what an open page costs while one of the runs trains.

200 run directories are written, of which one is locked and appended to as a training does, eight steps a second. The
server is the command in a process of its own. "opened" is the time from the request for the page until its list of
runs is there, read from cold directories; "share of a core" is what the server takes while a page asks every 2 s.
    python -m benchmarks.board
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.harness import facts, make_parser, publish_result, table
from fivetune.rundir import STEPS, RunDir

NUM_RUNS = 200
SECONDS = 30.0
EVERY_SECONDS = 2.0  # between two requests of a page
STEPS_PER_SECOND = 8
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
MAX_OPEN_SECONDS, MAX_SHARE = 2.0, 0.02


def write_runs(folder: Path, num_runs: int) -> Path:
    """Write run directories that differ in rate, batch size and seed; returns the one that will train."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fake_run import fake_run, write_run  # pyright: ignore[reportMissingImports]

    first = write_run(folder / "run-000", fake_run(name="run-000"))
    config = yaml.safe_load((first / "config.yaml").read_text(encoding="utf-8"))
    for number in range(1, num_runs):
        path = folder / f"run-{number:03}"
        shutil.copytree(first, path, ignore=shutil.ignore_patterns("predictions"))
        config["run"] = {"dir": f"runs/{path.name}", "seed": number % 5}
        config["optimizer"]["lr"] = RATES[number % len(RATES)]
        config["train"]["batch_size"] = 16 * (1 + number % 3)
        (path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        status = json.loads((path / "status.json").read_text(encoding="utf-8"))
        status["started"] = f"2026-11-{1 + number % 28:02}T{number % 24:02}:10:24+00:00"
        (path / "status.json").write_text(json.dumps(status), encoding="utf-8")
    return first


def train(folder: Path, stop: threading.Event) -> None:
    """Append steps to a run as a training does, with its lock held."""
    run = RunDir.resume(folder)
    last = json.loads((folder / STEPS).read_text(encoding="utf-8").splitlines()[-1])
    run.update_status(state="running")
    while not stop.wait(1 / STEPS_PER_SECOND):
        last = {**last, "step": last["step"] + 1, "loss": last["loss"] * 0.999}
        run.append(STEPS, last)
    run.close()


def ask(port: int, path: str) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {found[:200]!r}")
    connection.close()
    return found


def measure(folder: Path, live: Path, seconds: float) -> dict[str, Any]:
    """Start the board, open it as a page does, and ask for changes until `seconds` have passed."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "fivetune", "board", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", server.stdout.readline())
            assert found is not None
            port = int(found[1])
            listening = time.perf_counter() - started
            process = psutil.Process(server.pid)
            before = sum(process.cpu_times()[:2])
            opened = time.perf_counter()
            page = ask(port, "/")
            first = json.loads(ask(port, "/runs.json?since=0"))
            first_seconds = time.perf_counter() - opened
            rows = list(first["rows"])
            state = first
            while state["waiting"]:
                state = json.loads(ask(port, f"/runs.json?server={state['server']}&since={state['number']}"))
                rows += state["rows"]
            opened = time.perf_counter() - opened
            open_cpu = sum(process.cpu_times()[:2]) - before
            # The page asks on; the row of the run that trains is in every answer, or is late.
            latencies: list[float] = []
            num_fresh = 0
            num_bytes = 0
            before = sum(process.cpu_times()[:2])
            began = time.perf_counter()
            while time.perf_counter() - began < seconds:
                time.sleep(EVERY_SECONDS)
                asked = time.perf_counter()
                text = ask(port, f"/runs.json?server={state['server']}&since={state['number']}")
                latencies.append(time.perf_counter() - asked)
                state = json.loads(text)
                num_bytes += len(text)
                num_fresh += any(row["name"] == live.name for row in state["rows"])
            share = (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - began)
        finally:
            server.terminate()
    return {
        "listening_seconds": listening,
        "opened_seconds": opened,
        "opened_cpu_seconds": open_cpu,
        "page_bytes": len(page),
        "first_rows": len(first["rows"]),
        "first_seconds": first_seconds,
        "list_bytes": len(json.dumps(rows)),
        "core_share": share,
        "update_seconds": sorted(latencies)[len(latencies) // 2],
        "update_bytes": num_bytes / len(latencies),
        "fresh_updates": f"{num_fresh} of {len(latencies)}",
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        live = write_runs(folder, args.runs)
        stop = threading.Event()
        thread = threading.Thread(target=train, args=(live, stop))
        thread.start()
        try:
            result = measure(folder, live, args.seconds)
        finally:
            stop.set()
            thread.join()
    rows = [["measure", "value", "bar"]]
    rows.append(["start until it listens, s", f"{result['listening_seconds']:.2f}", ""])
    rows.append([f"the first {result['first_rows']} runs shown, s", f"{result['first_seconds']:.2f}", ""])
    rows.append([f"{args.runs} runs opened, s", f"{result['opened_seconds']:.2f}", f"{MAX_OPEN_SECONDS:g}"])
    rows.append(["of it computing, s", f"{result['opened_cpu_seconds']:.2f}", ""])
    rows.append(["share of a core, one run training", f"{100 * result['core_share']:.2f} %", f"{100 * MAX_SHARE:g} %"])
    rows.append(["an update, ms", f"{1000 * result['update_seconds']:.1f}", ""])
    rows.append(["updates with the training run", result["fresh_updates"], "all"])
    print(table(rows))
    publish_result(args, "board", {"facts": facts("cpu"), "runs": args.runs, **result})


if __name__ == "__main__":
    main()
