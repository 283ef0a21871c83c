"""A lease of a GPU: what is right, how fast is it, what else is there to know; each one command of less than 7 minutes.

In: the number of the lease, a folder. Out: one archive in the folder, lease-N.tgz, with lease-N.json, the output of
each stage and the pages that were made; a summary of less than 12,000 characters on the terminal.
    python3 -m benchmarks.gpu_day lease 1 --out results
    python3 -m benchmarks.gpu_day lease 2 --out results --only profile,run
    python3 -m benchmarks.gpu_day lease 1 --device cpu --minutes 5
The stages stand in groups, the most valuable first; those of a group time nothing and run side by side. Each is a
process of its own with a limit: one that fails, hangs, is killed, fills the disk or breaks the device costs nothing but
itself, and the lines that it printed until then count. The archive is written after every group. On a CPU the stages
run in a reduced form: it shows that they run, no figure means anything.

This program needs Python alone: packages that the machine lacks are read from wheels in the folder .whl.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTERPRET = "TRITON_INTERPRET"
INTERPRETED = {
    *("warm", "models", "kernels-64-bf16", "kernels-64-fp32", "capture-fp32", "randomness", "failed-capture", "syncs"),
    "tiles",
}
"""Stages in which Triton's interpreter runs the kernels on a CPU."""
DEVICE_WORKS = "the device works"  # the fact without which a lease ends after its first group
PACKAGES = (
    *("torch", "triton", "transformers", "accelerate", "safetensors", "tokenizers", "numpy", "psutil", "yaml", "rich"),
    *("pydantic", "pynvml"),
)
MINUTES = {"cuda": 5.3, "cpu": 5.0}  # of 7, of which the start of the machine takes up to 1.5
LEAST_SECONDS = {"cuda": 20.0, "cpu": 75.0}  # left, for a stage to begin
SPARE_BYTES = 2**30  # of the disk, or a quarter of what is free at first: with less, the stages that run are ended
WIDEST, LONGEST = 150, 11_000  # characters of a line and of the summary
MOST_OUTPUT = 400_000  # bytes of a stage's output that are kept, the last ones


@dataclass(frozen=True, slots=True)
class Stage:
    """A program that prints JSON lines: checks, facts, or a result, of which the last of its name counts.

    Args:
        limit: seconds on a GPU.
        words: module and arguments; {device} and {folder}, where its own files go, are filled in.
        on_cpu: arguments after those on a CPU; None leaves the stage out there.
        keep: files of its folder that go into the archive.
    """

    name: str
    limit: float
    words: str
    on_cpu: str | None = ""
    keep: tuple[str, ...] = ()


def make_right(name: str, limit: float, on_cpu: str | None = "") -> Stage:
    return Stage(name, limit, f"benchmarks.gpu_right {name} --device {{device}}", on_cpu)


def make_training(
    name: str, limit: float, model: str, batch_sizes: str, peers: str, on_cpu: str | None = None
) -> Stage:
    """Training of a model at these batch sizes against peers."""
    settings = f"--model {model} --batch-size {batch_sizes} --workload squad --peers {peers}"
    return Stage(name, limit, f"benchmarks.train {settings} --device {{device}} --results {{folder}} --json", on_cpu)


TINY = "--model t5-tiny --batch-size 2 --workload translation --peers fivetune-launched --as-on-gpu --threads 1"
PAGE = tuple(f"quickstart/{name}" for name in ("report.html", "machine.json", "steps.jsonl", "telemetry.jsonl"))
WARM = make_right("warm", 80)
LEASES: dict[str, tuple[tuple[Stage, ...], ...]] = {
    "1": (
        (make_right("facts", 60), WARM),
        (
            make_right("models", 165),
            make_right("kernels-64-bf16", 165),
            make_right("kernels-64-fp32", 165),
            make_right("capture-bf16", 165, None),
            make_right("capture-fp32", 165),
            make_right("randomness", 150),
            make_right("decode-right", 150),
            make_right("kernels-128", 150, None),
            make_right("kernels-32", 150, None),
            make_right("kernels-16", 150, None),
            make_right("kernels-8", 150, None),
        ),
        (make_training("small-128", 110, "t5-small", "128", "tuned", TINY),),
        (make_right("syncs", 60),),
    ),
    "2": (
        (WARM,),
        (make_training("base", 170, "t5-base", "128,16", "tuned,default", TINY),),
        (
            Stage(
                "decode",
                100,
                "benchmarks.gpu_decode --model t5-base --questions 512 --device {device} --results {folder} --json",
                "--model t5-tiny --questions 4",
            ),
        ),
        (make_training("small", 110, "t5-small", "128,16", "tuned,default"),),
        (Stage("run", 110, "fivetune quickstart --dir {folder} --steps 400", "--steps 2", PAGE),),
        (make_right("profile", 75),),
        (make_training("compiled", 150, "t5-small", "128", "compiled"),),
    ),
    "3": (
        (WARM,),
        (Stage("tiles", 100, "benchmarks.gpu_tiles --minutes 1.2 --device {device} --json", "--minutes 0.05"),),
        (
            Stage("determinism", 110, "reliability.rows.determinism --device {device}", None),
            make_right("fp16", 90),
            make_right("resume", 100),
            make_right("failed-capture", 100),
        ),
        (make_training("large", 130, "t5-large", "16", "tuned"),),
        (make_right("out-of-memory", 60),),
        (make_right("telemetry", 50),),
        (make_right("memcheck", 120),),
    ),
}


@dataclass(slots=True)
class Lease:
    """What is known so far, and where it is written.

    Args:
        work: folder of this program, for what is not kept.
        spare_bytes: of the disk, which stages must leave.
        results: what was found, by stage.
    """

    number: str
    device: str
    out: Path
    work: Path
    card: dict[str, Any]
    environment: dict[str, str]
    spare_bytes: float = 0.0
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def archive(self) -> Path:
        return self.out / f"lease-{self.number}.tgz"

    def write(self) -> None:
        """Write the archive anew; a disk that is full keeps the one before."""
        content = {"lease": self.number, "device": self.device, "card": self.card, "stages": self.results}
        part = self.archive.with_suffix(".part")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            report = self.work / "logs" / f"lease-{self.number}.json"
            report.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            with tarfile.open(part, "w:gz") as archive:
                for path in sorted((self.work / "logs").iterdir()):
                    archive.add(path, path.name)
            part.replace(self.archive)
        except OSError as error:
            print(f"the archive could not be written: {error}", flush=True)
            with suppress(OSError):
                part.unlink()


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fivetune-lease-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        (work / "logs").mkdir()
        site = unpack_wheels(ROOT / ".whl", work / "site")
        card = describe_card(args.device)
        spare_bytes = min(SPARE_BYTES, shutil.disk_usage(work).free / 4)
        lease = Lease(args.lease, args.device, args.out, work, card, make_environment(work, site), spare_bytes)
        end = started + 60 * args.minutes
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the `finally` runs where this process is ended
        try:
            if missing := find_missing_packages(site):
                card["remarks"].append(f"packages that are missing here: {', '.join(missing)}")
            for line in card["remarks"]:
                print(line, flush=True)
            run_lease(lease, select_stages(args.lease, args.only), end=end, jobs=args.jobs)
        finally:
            lease.write()
            print(f"\n{summarize(lease)}\n\n{time.monotonic() - started:.0f} s, written to {lease.archive}")
    fine = ("passed", "no time left", "left out")
    sys.exit(any(found["state"] not in fine for found in lease.results.values()))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["lease"])
    parser.add_argument("lease", choices=list(LEASES))
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="folder of the archive; default: build")
    parser.add_argument("--minutes", type=float, help="when all of it ends; default: 5.3, on a CPU 5")
    parser.add_argument("--only", default="", help="names of stages of any lease, with commas between them")
    parser.add_argument("--jobs", type=int, help="stages side by side at most; default: the cores")
    args = parser.parse_args(words)
    known = {stage.name for groups in LEASES.values() for group in groups for stage in group}
    args.only = [name for name in args.only.split(",") if name]
    if unknown := [name for name in args.only if name not in known]:
        parser.error(f"--only: there is no {', '.join(unknown)}. Allowed: {', '.join(sorted(known))}.")
    args.minutes = args.minutes or MINUTES[args.device]
    args.jobs = args.jobs or os.cpu_count() or 1
    return args


def select_stages(lease: str, only: Sequence[str]) -> list[list[Stage]]:
    """The groups of a lease; with `only` those of its stages, and of the other leases' after them."""
    if not only:
        return [list(group) for group in LEASES[lease]]
    taken: set[str] = set()
    found = []
    for number in [lease, *(other for other in LEASES if other != lease)]:
        for group in LEASES[number]:
            chosen = [stage for stage in group if stage.name in only and stage.name not in taken]
            taken.update(stage.name for stage in chosen)
            found += [chosen] if chosen else []
    return found


# --- the machine ---


def unpack_wheels(folder: Path, site: Path) -> Path | None:
    """Unpack the wheels of a folder, which is all that installing them takes; None if there are none."""
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as file:
                file.extractall(site)
        except (OSError, zipfile.BadZipFile) as error:
            print(f"{wheel.name}: cannot be unpacked: {error}", flush=True)
    return site if wheels else None


def find_missing_packages(site: Path | None) -> list[str]:
    """Packages that a stage needs and neither the machine nor the wheels have."""
    if site is not None:
        sys.path.insert(0, str(site))
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def make_environment(work: Path, site: Path | None) -> dict[str, str]:
    """The environment of all stages: no network, models made once, packages of the wheels first."""
    environment = {key: value for key, value in os.environ.items() if key != INTERPRET}
    paths = [str(path) for path in (site, environment.get("PYTHONPATH")) if path]
    return environment | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "FIVETUNE_BENCH_MODELS": str(work / "models"),
    }


def describe_card(device: str) -> dict[str, Any]:
    """What nvidia-smi says of the card and of who uses it; in `remarks`, what to know before reading figures."""
    if device == "cpu":
        return {"remarks": []}
    card: dict[str, Any] = {"remarks": []}
    fields = "name,driver_version,memory.total,memory.used,mig.mode.current,compute_mode,clocks.max.sm,power.limit"
    for name, words in (("gpu", f"--query-gpu={fields}"), ("processes", "--query-compute-apps=pid,name,used_memory")):
        try:
            command = ["nvidia-smi", words, "--format=csv,noheader"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=15, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            card["remarks"].append(f"nvidia-smi cannot be run: {error}")
            return card
        card[name] = done.stdout.strip().splitlines() or [done.stderr.strip()]
    card["remarks"].extend(card["gpu"])
    if any("Enabled" in line for line in card["gpu"]):
        card["remarks"].append("MIG is enabled: the figures are those of a part of the card")
    others = [line for line in card["processes"] if "," in line]
    if others:
        card["remarks"].append(f"other processes use the card: {'; '.join(others)}")
    return card


def is_card_gone(card: dict[str, Any]) -> bool:
    """Whether nvidia-smi, which has found the card, finds it no more."""
    if not card.get("gpu"):
        return False
    try:
        command = ["nvidia-smi", "-L"]
        return subprocess.run(command, capture_output=True, timeout=15, check=False).returncode != 0
    except (OSError, subprocess.TimeoutExpired):
        return True


# --- stages ---


@dataclass(slots=True)
class Running:
    """A stage whose process runs."""

    stage: Stage
    process: subprocess.Popen[bytes]
    started: float
    limit: float
    folder: Path


def run_lease(lease: Lease, groups: Sequence[Sequence[Stage]], *, end: float, jobs: int) -> None:
    """Run the groups one after the other, and write the archive after each, until the time or the card is gone."""
    for number, group in enumerate(groups):
        for stage, found in run_group(lease, group, end=end, jobs=jobs):
            lease.results[stage.name] = found
            print(f"{stage.name}: {found['state']}, {found.get('seconds', 0):.0f} s", flush=True)
        lease.write()
        if lease.device == "cpu":
            continue
        facts = lease.results.get("facts", {}).get("facts", {})
        if number == 0 and "facts" in lease.results and DEVICE_WORKS not in facts:
            lease.card["remarks"].append("the lease ends here: the device does not work, see the stage facts")
            return
        if any(found["state"] not in ("passed", "left out") for found in lease.results.values()) and is_card_gone(
            lease.card
        ):
            lease.card["remarks"].append("the lease ends here: nvidia-smi finds the card no more")
            return


def run_group(
    lease: Lease, stages: Sequence[Stage], *, end: float, jobs: int
) -> Iterator[tuple[Stage, dict[str, Any]]]:
    """Run stages side by side, and yield what each has found as soon as it ends."""
    waiting, running = list(stages), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                stage = waiting.pop(0)
                if lease.device == "cpu" and stage.on_cpu is None:
                    yield stage, {"state": "left out"}
                elif end - time.monotonic() < LEAST_SECONDS[lease.device]:
                    yield stage, {"state": "no time left"}
                else:
                    running.append(start_stage(lease, stage, end=end))
            is_full = shutil.disk_usage(lease.work).free < lease.spare_bytes
            for one in list(running):
                code, state = one.process.poll(), ""
                if code is None and is_full:
                    state = "ended, because it had filled the disk"
                elif code is None and time.monotonic() - one.started > one.limit:
                    state = f"more than {one.limit:.0f} s"
                if code is not None or state:
                    running.remove(one)
                    yield one.stage, finish_stage(lease, one, state)
            time.sleep(0.05)
    finally:
        for one in running:
            _kill_group(one.process)


def start_stage(lease: Lease, stage: Stage, *, end: float) -> Running:
    """Start the process of a stage, the leader of a group of its own; its output goes to files."""
    folder = lease.work / "stages" / stage.name  # apart from what the stages share
    folder.mkdir(parents=True)
    words = stage.words.format(device=lease.device, folder=folder).split()
    environment = lease.environment | {"TMPDIR": str(folder)}
    limit = end - time.monotonic()
    if lease.device == "cpu":
        words += (stage.on_cpu or "").split()
        environment |= {INTERPRET: "1"} if stage.name in INTERPRETED else {}
    else:
        limit = min(limit, stage.limit)
    log = lease.work / "logs" / stage.name
    with log.with_suffix(".out").open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            stdout=output,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    return Running(stage, process, time.monotonic(), limit, folder)


def finish_stage(lease: Lease, one: Running, state: str) -> dict[str, Any]:
    """End all processes of a stage. Returns: what it has told, its state and seconds; its last words if it failed."""
    _kill_group(one.process)
    code = one.process.wait()
    log = lease.work / "logs" / one.stage.name
    texts = [_cut_file(log.with_suffix(suffix)) for suffix in (".out", ".err")]
    for name in one.stage.keep:
        path = one.folder / name
        if path.is_file():
            with suppress(OSError):
                shutil.copy(path, lease.work / "logs" / f"{one.stage.name}-{path.name}")
    shutil.rmtree(one.folder, ignore_errors=True)
    found = read_lines(texts[0])
    if not state and found.get("wrong"):
        state = "failed"
    elif not state:
        state = f"ended with code {code}" if code else "passed"
    found |= {"state": state, "seconds": round(time.monotonic() - one.started, 1)}
    return found if state == "passed" else {**found, "end": "\n".join(texts)[-3000:]}


def _cut_file(path: Path) -> str:
    """The text of a file, of which the last MOST_OUTPUT bytes are kept."""
    text = path.read_bytes()[-MOST_OUTPUT:]
    with suppress(OSError):
        path.write_bytes(text)
    return text.decode("utf-8", "replace")


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def read_lines(output: str) -> dict[str, Any]:
    """What the JSON lines of an output say; a last line that was cut off is none.

    >>> found = read_lines('{"facts": {"a": 1}}\\n{"check": ["loss", 0.2, 0.1]}\\n{"name": "x", "sides": {}}\\n{"chec')
    >>> found["facts"], found["wrong"], list(found["results"])
    ({'a': 1}, ['loss: 0.2, allowed 0.1'], ['x'])
    """
    found: dict[str, Any] = {"facts": {}, "checks": [], "wrong": [], "results": {}}
    for line in output.splitlines():
        try:
            told = json.loads(line) if line.startswith("{") else None
        except ValueError:
            continue
        if not isinstance(told, dict):
            continue
        if "check" in told:
            name, value, allowed = told["check"]
            found["checks"].append(told["check"])
            if not value <= allowed:
                found["wrong"].append(f"{name}: {value:.3g}, allowed {allowed:.3g}")
        elif "facts" in told and len(told) == 1:
            found["facts"] |= told["facts"]
        else:
            found["results"][told.get("name", "")] = told
    return {key: value for key, value in found.items() if value}


# --- the summary ---


def summarize(lease: Lease) -> str:
    """The table of the stages, and figures of those that measure; at most LONGEST characters."""
    rows = [f"{'stage':16} {'s':>4}  {'state':24} found"]
    for name, found in lease.results.items():
        line = f"{name:16} {found.get('seconds', 0):4.0f}  {found['state'][:24]:24} {describe_result(found)}"
        rows.append(line[:WIDEST])
    remarks = [line for line in lease.card["remarks"] if "lease ends" in line]
    rows += ["", *remarks, *_list_figures(lease.results), *_list_ends(lease.results)]
    text = "\n".join(rows)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 20]}\n... (see the file)"


def _list_figures(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The figures by which the next step is chosen, a line each."""
    for name, found in results.items():
        for result in found.get("results", {}).values():
            if "sides" in result:
                yield f"{name}: {describe_training(result)}"
            elif "answers_per_second" in result:
                yield f"{name}: {describe_decoding(result)}"
            for line in result.get("lines", ()):  # of tiles
                yield f"{name}: {line}"
        for fact, value in found.get("facts", {}).items():
            if isinstance(value, int | float | str) or name.startswith(("capture", "resume")):
                yield f"{name}: {fact} = {value:.5g}" if isinstance(value, float) else f"{name}: {fact} = {value}"[:300]


def _list_ends(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    """All checks that failed, and the last lines of what did not end well."""
    for name, found in results.items():
        for wrong in found.get("wrong", ())[:12]:
            yield f"{name}: WRONG {wrong}"[:300]
        if "end" in found and not found.get("wrong"):
            yield f"{name}: ... {' | '.join(found['end'].strip().splitlines()[-4:])}"[:600]


def describe_result(found: dict[str, Any]) -> str:
    """
    >>> describe_result({"state": "failed", "checks": [1, 2, 3], "wrong": ["loss: 0.2, allowed 0.1"]})
    '1 of 3 checks failed: loss: 0.2, allowed 0.1'
    """
    checks, wrong = found.get("checks", []), found.get("wrong", [])
    if wrong:
        return f"{len(wrong)} of {len(checks)} checks failed: {'; '.join(wrong[:3])}"
    if "end" in found and not checks:
        return next(iter(found["end"].strip().splitlines()[::-1]), "")
    left_out = found.get("facts", {}).get("left_out")
    return left_out or (f"{len(checks)} checks" if checks else "")


def describe_training(result: dict[str, Any]) -> str:
    """Speed and MFU of FiveTune, how many times faster it is than each peer on the same examples, who died."""
    parts = [f"batch {result['batch_size']}"]
    if ours := result["sides"].get("fivetune"):
        shares = (("MFU", ours["mfu"]), ("of a measured product", ours["product_share"]))
        known = [f"{name} {share:.1%}" for name, share in shares if share is not None]
        parts += [f"{ours['precision']}, {1000 * ours['seconds_per_step']:.1f} ms a step", *known]
        parts += [f"peak {ours['peak_bytes'] / 1e9:.1f} GB"] if ours["peak_bytes"] else []
    for name, figures in result["ratios"].items():
        theirs = result["sides"][name]["peak_bytes"]
        memory = f" (memory {ours['peak_bytes'] / theirs:.2f} x)" if ours and ours["peak_bytes"] and theirs else ""
        parts.append(f"{figures['same_examples']:.2f} x {name}{memory}")
    parts += [f"{name} died: {reason[:80]}" for name, reason in result["died"].items()]
    if result["num_rounds"] < result["num_windows"]:
        parts.append(f"only {result['num_rounds']} of {result['num_windows']} rounds")
    return ", ".join(parts)


def describe_decoding(result: dict[str, Any]) -> str:
    speeds = [f"{name} {speed[0]:.0f}/s" for name, speed in result["answers_per_second"].items()]
    return ", ".join([*speeds, *(f"{ratio[0]:.2f} x {name}" for name, ratio in result["ratios"].items())])


if __name__ == "__main__":
    main()
