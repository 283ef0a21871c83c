"""Predictions and evaluations that are killed, and two on one file."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from fivetune.rundir import read_evals
from reliability.campaign import Row, Trial
from reliability.rows.damage import STEPS, copy_run
from reliability.rows.kills import kill_during
from reliability.warm import check_no_trace, check_success, run_command, start_command
from reliability.workload import Workload, squad_file

NUM_QUESTIONS = 400
FAULTS = ("predict is killed", "two predict into one file", "evaluate is killed", "two evaluate one run")


def disturb_answers(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each fault in turn, at a time that is uniform over the command."""
    whole = workload.run_undisturbed(**STEPS).run
    place = workload.make_folder("answers")
    questions = squad_file(place / "questions.json", num_questions=NUM_QUESTIONS)
    seconds: dict[str, float] = {}
    for words in (make_words(copy_run(whole, place), questions, place), ("evaluate", str(place / "run"))):
        start = time.monotonic()
        done = run_command(*words)
        seconds[words[0]] = time.monotonic() - start
        check_success(done)
    answers, scores = read_answers(place), read_evals(place / "run")[-1].scores
    for number in count():
        fault, share = FAULTS[number % len(FAULTS)], random.random()

        def run(folder: Path, fault: str = fault, share: float = share) -> None:
            place = folder / "place"
            place.mkdir()
            run = copy_run(whole, place)
            words = make_words(run, questions, place) if "predict" in fault else ("evaluate", str(run))
            if "killed" in fault:
                kill_during(partial(start_command, *words), place, share * seconds[words[0]])
                is_finished = check_whole_or_absent(place, answers)
                done = run_command(*words, *(["--overwrite"] if is_finished else []))
                check_success(done)
            else:
                with start_command(*words) as first:
                    time.sleep(share * seconds[words[0]])
                    with start_command(*words) as second:
                        ended = [first.wait(), second.wait()]
                check_two(ended)
                num_ended = sum(one.returncode == 0 for one in ended)
            if "predict" in fault:
                check_same(read_answers(place), answers)
                left = sorted(path.name for path in place.iterdir())
                assert left == ["answers.jsonl", "run"], f"left behind: {left}"
            else:
                check_evaluations(run, scores, {1, 2} if "killed" in fault else {num_ended})

        yield Trial(f"{number} {fault} at {share:.3f}", run)


def make_words(run: Path, questions: Path, folder: Path) -> tuple[str, ...]:
    output = str(folder / "answers.jsonl")
    return ("predict", str(run), "--input", str(questions), "--output", output, "--eval.batch_size", "8")


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The answers of a file, one for each question, in order."""
    found = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [one["id"] for one in found] == [f"q{number}" for number in range(NUM_QUESTIONS)], "ids are not those asked"
    return found


def check_whole_or_absent(folder: Path, answers: list[dict[str, Any]]) -> bool:
    """A file that a killed command left is whole. Returns whether there is one."""
    if is_there := (folder / "answers.jsonl").exists():
        check_same(read_answers(folder), answers)
    return is_there


def check_same(found: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    """The answers are those of the undisturbed command, with its confidence but for the rounding of other batches."""
    for one, whole in zip(found, answers, strict=True):
        assert one["prediction"] == whole["prediction"], f"another answer to {one['id']}"
        assert abs(one["confidence"] - whole["confidence"]) < 1e-5, f"another confidence of {one['id']}"


def check_two(ended: list[Any]) -> None:
    """Each of two commands succeeds, or refuses because of the other."""
    codes = sorted(one.returncode for one in ended)
    told = "".join(one.stderr for one in ended)
    check_no_trace(told)
    reasons = {0: "", 2: "Add --overwrite to replace it", 4: "process"}  # 2: the first had finished
    assert codes[0] == 0 and codes[1] in reasons, f"exit codes {codes}: {told[-600:]}"
    assert reasons[codes[1]] in told, f"the reason of the second is not told: {told[-600:]}"


def check_evaluations(run: Path, scores: dict[str, float], numbers: set[int]) -> None:
    """There is one of these numbers of records, all with the same scores, and the file has each question once."""
    records = [record for record in read_evals(run) if record.split not in ("eval", "subset")]
    assert len(records) in numbers, f"{len(records)} records of the evaluation, not {numbers}"
    for record in records:
        assert record.scores == scores, f"scores differ: {record.scores}"
    own = records[-1]
    lines = (run / "predictions" / f"{own.split}-{own.step}.jsonl").read_text().splitlines()
    ids = [json.loads(line)["id"] for line in lines]
    assert len(ids) == len(set(ids)) == own.num_examples, "an answer is missing or there twice"


ROWS = [
    Row("R33", "predict or evaluate is killed and started again; two run at a time on one file or run",
        "each question is answered once, with the same scores; the second of two refuses or agrees",
        disturb_answers, 4, 40),
]  # fmt: skip
