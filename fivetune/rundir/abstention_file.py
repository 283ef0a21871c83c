"""abstention.json of model/: how many answers are wrong from each confidence on, and the promise that answers keep.

    {"score": "exact", "error_below": 1.0, "num": 600, "split": "eval", "step": 1600, "max_error": 0.05,
     "settings": {}, "levels": [[0.9995, 214, 1], [0.9993, 251, 1], ...]}

A level is the model's own probability of an answer, before a temperature, the number of answers that have at least this
probability, and how many of these are wrong. In: model/. Out: an Abstention; None without the file.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from fivetune.errors import RunDirError
from fivetune.rundir.checksums import MANIFEST, update_checksum
from fivetune.rundir.files import write_json
from fivetune.rundir.layout import ABSTENTION
from fivetune.rundir.parse import parse_record
from fivetune.types import JsonTable


class Level(NamedTuple):
    """Answers whose own probability is at least `probability` (0-1): their number, and how many are wrong."""

    probability: float
    answered: int
    wrong: int


@dataclass(frozen=True, slots=True)
class Abstention:
    """Errors of an evaluation by confidence, and the promise about them.

    Args:
        score: name of the score of each prediction that says whether it is wrong.
        error_below: score (0-1) below which it is.
        num: predictions of the evaluation.
        split, step: the evaluation.
        levels: strictest first; the last one has all predictions.
        max_error: share of wrong answers (0-1) that the answers of the model keep below; None: nothing is withheld
            unless a call asks for it.
        settings: settings of the answers that differ from the run's, by dotted name.
    """

    score: str
    error_below: float
    num: int
    split: str
    step: int
    levels: tuple[Level, ...]
    max_error: float | None = None
    settings: JsonTable = field(default_factory=JsonTable)


def write_abstention(folder: Path, abstention: Abstention) -> None:
    """Write the file into model/, and into its manifest. Raises RunDirError or OSError if the disk refuses."""
    write_json(folder / ABSTENTION, asdict(abstention))
    if (folder / MANIFEST).is_file():  # an export whose weights another engine holds has none
        update_checksum(folder, ABSTENTION)


def read_abstention(folder: Path) -> Abstention | None:
    """Read the file of model/; None without it. Raises RunDirError for a damaged file."""
    path = folder / ABSTENTION
    if not path.is_file():
        return None
    invalid: list[str] = []
    try:
        found = parse_record(Abstention, json.loads(path.read_bytes()), invalid=invalid)
    except (OSError, ValueError, RecursionError):
        found = None
    if found is None or invalid or not found.levels or not 0 < (found.max_error or 0.5) < 1:
        raise RunDirError(
            f"{path}: damaged. Write it again with `fivetune evaluate RUN --max-error 5%`, or delete it: nothing is "
            "withheld then."
        )
    return found
