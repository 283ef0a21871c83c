"""Whether each row can fail: its trials run on a product with one fault written into it, until one of them fails.

python -m reliability.row_mutants                    all rows
python -m reliability.row_mutants --only R9,R11      some rows

In: a mutant of each row. Out: a line of a table for each, with the trial that failed and what it said; exit code 1 if
a row's trials, as many as those of a release, all hold beside its mutant.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

from reliability.__main__ import list_rows, select_rows
from reliability.campaign import Row, run_trial
from reliability.mutants import MUTANTS, Mutant
from reliability.rows.mutants import copy_checkout, plant
from reliability.warm import prepare_peer
from reliability.workload import Workload

SURVIVED = 3
NAMED = {one.name: one for one in MUTANTS}
ORDER = "    random = np.random.default_rng([plan.seed, epoch])\n    if order"

ROW_MUTANTS: dict[str, Mutant] = {
    "R1": NAMED["a resumed run draws other dropout masks"],
    "R2": NAMED["a checkpoint has its name before its checksums"],
    "R3": NAMED["a resumed run has lost its moments"],
    "R4": NAMED["a signal's exit code is that of success or of another error"],
    "R5": NAMED["a second Ctrl-C is not heard"],
    "R7a": Mutant("the space that a checkpoint needs is not said", "rundir/files.py",
        'return f"It needs {format_size(needed)}, {format_size(free)} are free. {advice}"', "return advice"),
    "R7b": Mutant("earlier checkpoints are removed before the next one is whole", "training/state/checkpoint.py",
        "    _remove(staging)\n    staging.mkdir(parents=True)\n",
        '    for old in (staging, *staging.parent.glob("[0-9]*")):\n        _remove(old)\n'
        "    staging.mkdir(parents=True)\n"),
    "R7c": Mutant("the reason of a file that is too large is not said", "training/state/checkpoint.py",
        'if re.search("inline_container|iostream error", str(error)):', "if False:"),
    "R7d": Mutant("a log on a full disk ends the run", "rundir/progress.py",
        "        except OSError as error:\n            self._give_up_log(error)\n\n    def _give_up_log",
        "        except PermissionError as error:\n            self._give_up_log(error)\n\n    def _give_up_log"),
    "R8": NAMED["a flipped bit is not seen"],
    "R9": NAMED["a resumed run begins with the first examples again"],
    "R10": Mutant("each rank learns from the examples of the first", "data/store/stream.py",
        "share = rows[self.world.data_rank :: self.world.data_size]", "share = rows[:: self.world.data_size]"),
    "R11": NAMED["a run is resumed with edited settings"],
    "R12": NAMED["a NaN loss is applied"],
    "R13": NAMED["a run in fp16 skips every step"],
    "R14": NAMED["a step that is repeated after memory ran out keeps half a gradient"],
    "R16": NAMED["skipped records are not counted"],
    "R17": Mutant("a line of any length is a record", "data/readers/source_files.py",
        "MAX_RECORD_BYTES = 16 * 2**20", "MAX_RECORD_BYTES = 2**40"),
    "R18": Mutant("a process that hung is taken for one that crashed", "data/store/worker.py",
        "        if worker in self._hung:\n", "        if False:\n"),
    "R19": Mutant("steps are timed by the wall clock", "machine/telemetry/meter.py",
        "return time.perf_counter()", "return time.time()"),
    "R20": NAMED["two runs write one folder"],
    "R21": Mutant("why a folder cannot be written is not said", "rundir/writer.py",
        'cannot be written: {error.strerror}. Choose another run.dir.") from None\n    return path',
        'cannot be written. Choose another run.dir.") from None\n    return path'),
    "R22": Mutant("a file that changed on its way is used", "model/download.py",
        "    _refuse_other_content(name, folder, info, since=begun)\n", ""),
    "R23": Mutant("each saved file leaves a folder open", "rundir/files.py",
        "    finally:\n        os.close(handle)\n", "    finally:\n        pass\n"),
    "R24": NAMED["text from data is HTML"],
    "R24b": NAMED["text from data is HTML"],
    "R25": NAMED["a checkpoint may run code"],
    "R26": Mutant("predictions are written through a link", "rundir/writer.py",
        "if path.parent.is_symlink():", "if False:"),
    "R27": NAMED["secrets are written into the run's files"],
    "R28": NAMED["a web page of another server may ask"],
    "R29": Mutant("the order of the data follows the hash seed", "data/store/stream.py",
        ORDER, ORDER.replace("epoch]", 'epoch, hash("order") % 2**31]')),
    "R30": Mutant("a driver's 'not available' is a number", "machine/telemetry/nvml.py",
        "MAX_COUNTER = 2**50", "MAX_COUNTER = 2**70"),
    "R31": Mutant("the torn line of a killed process is damage", "rundir/reader.py",
        "if is_growing and lines[-1].startswith(b\"{\") and", "if not is_growing and"),
    "R32": Mutant("a command sends a message home", "model/files.py",
        "    path = Path(name)\n    if path.is_dir():\n        return path\n    if name ==",
        "    path = Path(name)\n    import socket\n\n"
        '    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"used", ("192.0.2.1", 9))\n'
        "    if path.is_dir():\n        return path\n    if name =="),
    "R33": Mutant("two commands answer into one folder", "data/store/partial.py",
        "if lock_file(file, wait=waits)", "if lock_file(file, shared=True)"),
    "R34": Mutant("a trial that diverges is tried again", "fleet/experiments/search.py",
        "elif job.code == NumericError.exit_code:", "elif False:"),
    "R35": Mutant("tests pass whatever they find", "../conftest.py", "@pytest.fixture(scope=\"session\")\n",
        "@pytest.hookimpl(wrapper=True)\ndef pytest_runtest_makereport(item, call):\n    report = yield\n"
        '    report.outcome = "passed"\n    return report\n\n\n@pytest.fixture(scope="session")\n'),
    "R36": Mutant("the order of the data follows the number of threads", "data/store/stream.py",
        ORDER, "    import torch\n\n" + ORDER.replace("epoch]", "epoch, torch.get_num_threads()]")),
    "R37": Mutant("a checkpoint of a bucket counts before it is whole", "training/state/bucket.py",
        "        others = {_find_rank(name", "        put_file(source / MANIFEST, join_location(place, MANIFEST))\n"
        "        others = {_find_rank(name"),
    "R38": NAMED["a resumed run has lost its moments"],  # its runs have no dropout
}  # fmt: skip


def main() -> int:
    """Exit code 0 if a trial of each row that can run here failed, 1 if those of one held, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m reliability.row_mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", metavar="R9,R11", help="these rows")
    parser.add_argument("--seed", type=int, default=0, help="of random times and places (default: 0)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the copy of the checkout
    args = parser.parse_args()
    rows = select_rows(parser, list_rows(), args.only)
    if args.here:
        return run_until_failure(rows[0], args.seed)
    print("| row | mutant of the product | fails at trial | what the trial says |\n|---|---|---|---|")
    codes = [test_row(row, args.seed) for row in rows]
    return int(any(codes))


def test_row(row: Row, seed: int) -> int:
    """Print a row's line of the table; returns the exit code of its trials."""
    mutant = ROW_MUTANTS[row.name]
    if reason := row.explain_absence():
        print(f"| {row.name} | {mutant.name} | not run: {reason} | |", flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix=f"{row.name}-mutant-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        folder.chmod(0o755)  # R21 trains as another user
        copy_checkout(folder)
        plant(folder / "fivetune" / mutant.file, mutant.old, mutant.new)
        (folder / "scratch").mkdir()
        environ = {**os.environ, "PYTHONPATH": place, "TMPDIR": f"{place}/scratch"}
        words = ["-m", "reliability.row_mutants", "--here", "--only", row.name, "--seed", str(seed)]
        done = subprocess.run([sys.executable, *words], cwd=folder, env=environ, capture_output=True, text=True)
    told = done.stdout.replace(place, "").strip() or f"ended with {done.returncode}: {done.stderr[-300:]} | "
    print(f"| {row.name} | {mutant.name} | {told} |", flush=True)
    return done.returncode


def run_until_failure(row: Row, seed: int) -> int:
    """Run a row's trials one after the other up to the first that fails, and print its number and its message."""
    prepare_peer()
    workload = Workload(Path(tempfile.gettempdir()) / "workload")
    trials = islice(row.make_trials(workload, random.Random(f"{seed} {row.name}")), row.num_release)
    number = 0
    for number, trial in enumerate(trials, start=1):
        if failure := run_trial(row.name, trial).failure:
            print(f"{number}: {shorten(trial.name)} | {shorten(failure)}")
            return 0
    print(f"none of {number} | ")
    return SURVIVED


def shorten(text: str, width: int = 160) -> str:
    """One line of a table's cell."""
    line = " ".join(text.partition("; files: ")[0].split()).replace("|", "\\|")
    return line if len(line) <= width else f"{line[: width - 3]}..."


if __name__ == "__main__":
    sys.exit(main())
