"""confidence.json of model/: the temperature of the model's confidences.

    {"temperature": 1.31, "num": 600, "error_before": 0.039, "error_after": 0.021, ...}

It was fitted on the evaluation of the weights (`FittedTemperature` of analysis/calibration.py has the fields), and is
there if it lowers the calibration error. In: model/. Out: the temperature; 1.0 without the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from fivetune.errors import RunDirError
from fivetune.rundir.checksums import update_checksum
from fivetune.rundir.files import write_json
from fivetune.rundir.layout import CONFIDENCE
from fivetune.values import as_finite_number


def write_confidence_file(folder: Path, fitted: Mapping[str, float]) -> None:
    """Write the file into model/, and into its manifest. Raises RunDirError or OSError if the disk refuses."""
    write_json(folder / CONFIDENCE, dict(fitted))
    update_checksum(folder, CONFIDENCE)


def read_temperature(folder: Path) -> float:
    """Read the temperature of model/; 1.0 without the file. Raises RunDirError for a damaged file."""
    path = folder / CONFIDENCE
    if not path.is_file():
        return 1.0
    try:
        value = as_finite_number(json.loads(path.read_bytes())["temperature"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        value = None
    if value is None or value <= 0:
        raise RunDirError(
            f"{path}: holds no temperature above 0. Delete the file: confidences are then the model's own."
        )
    return value
