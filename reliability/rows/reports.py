"""Reports of runs that went wrong: killed, without numbers, with one point or a million."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reliability.campaign import Row, Trial
from reliability.rows.damage import STEPS, copy_run, write_page
from reliability.warm import check_success
from reliability.workload import Workload

MOST_SECONDS, MOST_BYTES = 10.0, 5 * 2**20
SECONDS_PER_STEP = 1.2e-4  # beyond, of a run of very many steps
SAME = ("the page of the whole run",)
Edit = Callable[[Path], object]


def edit_status(run: Path, **values: Any) -> None:
    path = run / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_steps(run: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path = run / "steps.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in change(records)))


def append(run: Path, name: str, content: bytes) -> None:
    with (run / name).open("ab") as file:
        file.write(content)


def kill_run(run: Path) -> None:
    """What a killed run leaves: an active state whose owner is gone, no model, no score of its last steps."""
    edit_status(run, state="running", best=None)
    (run / "evals.jsonl").unlink()


def lose_losses(run: Path, *, all_of_them: bool) -> None:
    edit_steps(run, lambda steps: [{**one, "loss": None if all_of_them or one["step"] > 2 else one["loss"],
                                    "grad_norm": None} for one in steps])  # fmt: skip
    edit_status(run, state="failed", why="ended by the trial")


def write_many_steps(run: Path, num: int) -> None:
    """Record `num` steps, each of them the last one."""
    path = run / "steps.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    head, tail = json.dumps(last).split(f'"step": {last["step"]},', 1)
    with path.open("w") as file:
        for step in range(1, num + 1):
            file.write(f'{head}"step": {step},{tail}\n')
    edit_status(run, step=num)


def write_many_samples(run: Path, num: int) -> None:
    """Record `num` samples of the machine, one a second."""
    path = run / "telemetry.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    with path.open("w") as file:
        for second in range(num):
            file.write(json.dumps({**first, "seconds": first["seconds"] + second}) + "\n")


CASES: dict[str, tuple[Edit, tuple[str, ...]]] = {  # what is done to the run, what its page must say
    "killed": (kill_run, ("interrupted after 4 steps", "No evaluation was made")),
    "killed before its first step": (
        lambda run: [kill_run(run), edit_status(run, step=0), (run / "steps.jsonl").write_text("")],
        ("interrupted after 0 steps of 4", "No evaluation was made"),
    ),
    "some losses are not finite": (
        lambda run: lose_losses(run, all_of_them=False), ("not finite at step 3 and in 1 more step.",)
    ),
    "no loss is finite": (
        lambda run: lose_losses(run, all_of_them=True), ("not finite at step 1 and in 3 more steps.",)
    ),
    "NaN as Python writes it": (
        lambda run: append(run, "steps.jsonl", b'{"step": 5, "loss": NaN}\n'),
        ("steps.jsonl: damaged: values that are no finite number",),
    ),
    "one point": (lambda run: edit_steps(run, lambda steps: steps[:1]), ("3 of 4 steps are missing",)),
    "no evaluation": (lambda run: (run / "evals.jsonl").write_text(""), ("evals.jsonl: lacks the evaluation",)),
    "no predictions": (
        lambda run: (run / "predictions" / "eval-4.jsonl").unlink(), ("eval-4.jsonl: missing: the evaluation made",)
    ),
    "the last line is torn": (lambda run: append(run, "steps.jsonl", b'{"step": 5, "lo'), SAME),
    "lines of other bytes": (lambda run: append(run, "evals.jsonl", b"\xff\xfe\n[]\n7\n"), ("evals.jsonl:3: damaged",)),
    "only config.yaml": (
        lambda run: [path.unlink() for path in run.iterdir() if path.is_file() and path.name != "config.yaml"],
        ("No evaluation was made", "The end of the run is not known"),
    ),
    "50,000 samples of the machine": (lambda run: write_many_samples(run, 50_000), ("whole host",)),
    "50,000 steps": (lambda run: write_many_steps(run, 50_000), ("50,000 steps of 4",)),
    "1,000,000 steps": (lambda run: write_many_steps(run, 1_000_000), ("1,000,000 steps of 4",)),
}  # fmt: skip


def report_each(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Make the report of each case."""
    whole, place = workload.run_undisturbed(**STEPS).run, workload.make_folder("reports")
    undisturbed = write_page(copy_without_checksums(whole, place), place)[1]
    for name, (edit, said) in CASES.items():

        def run(folder: Path, edit: Edit = edit, said: tuple[str, ...] = said) -> None:
            run = copy_without_checksums(whole, folder)
            edit(run)
            start = time.monotonic()
            done, page = write_page(run, folder)
            seconds = time.monotonic() - start
            check_success(done)
            lost = [text for text in said if text not in page] if said != SAME else [said] * (page != undisturbed)
            assert not lost, f"the page does not say {lost}"
            num_steps = (run / "steps.jsonl").read_bytes().count(b"\n") if (run / "steps.jsonl").exists() else 0
            assert seconds < MOST_SECONDS + num_steps * SECONDS_PER_STEP, f"the report took {seconds:.1f} s"
            assert len(page) < MOST_BYTES, f"the page has {len(page):,} characters"

        yield Trial(name, run)


def copy_without_checksums(whole: Path, folder: Path) -> Path:
    """A copy of a run without its report, and without checksums, by which any change would be named."""
    run = copy_run(whole, folder)
    for name in ("report.html", "checksums.json"):
        (run / name).unlink()
    return run


ROWS = [
    Row("R31", "the report of a run that was killed, has NaN, 1 point, no evaluation, torn lines, 1,000,000 steps",
        "a page that says so, below 5 MiB, within 12 s for 100,000 steps", report_each, 11),
]  # fmt: skip
