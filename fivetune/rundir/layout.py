"""The files of a run directory by name.

    config.yaml      resolved, re-runnable as is          machine.json   device, versions, commit
    plan.json        numbers resolved at the start        activity.json  while a run prepares or evaluates: how far
    data.json        counts, lengths, truncation          status.json    running, finished, failed: why
    steps.jsonl      one StepRecord a line                evals.jsonl    one EvalRecord a line
    telemetry.jsonl   one TelemetryRecord a line; telemetry-<rank>.jsonl: of ranks above 0
    predictions/<split>-<step>.jsonl                      log.txt        the terminal's output
    checkpoints/<step>/, best -> checkpoints/<step>       model/         loads with from_pretrained
    checksums.json   of the records above, when the run has finished
    adapter/         in peft's format, of a run with one
    report.html                                           trace/         output of `fivetune profile`

Every whole file is written to a temporary name, fsynced and renamed; JSONL files are appended line by
line, and a torn last line is dropped on reading. One process owns a directory, by a lock on `.lock`.
"""

from __future__ import annotations

from pathlib import Path

FORMAT_VERSION = 1
LOCK = ".lock"
PLAN, CHECKSUMS = "plan.json", "checksums.json"
OWN_SPLITS = ("subset", "eval")  # of a run's own evaluations: some examples of data.eval, all examples
AVERAGE = "average"  # the split of the evaluation of averaged weights, on all of data.eval
STEPS, EVALS, STATUS, MACHINE, DATA, CONFIG = (
    "steps.jsonl", "evals.jsonl", "status.json", "machine.json", "data.json", "config.yaml",
)  # fmt: skip
TELEMETRY, TELEMETRY_OF_RANK = "telemetry.jsonl", "telemetry-{rank}.jsonl"
TELEMETRY_FILES = "telemetry*.jsonl"
LOG = "log.txt"
ACTIVITY = "activity.json"  # of a run that is not over
CARD = "README.md"  # the model card, in model/, adapter/ and exports
CONFIDENCE, ABSTENTION = "confidence.json", "abstention.json"  # of model/
TRACE_FOLDER, TRACE = "trace", "trace/summary.json"


def build_sibling_path(folder: str | Path, name: str) -> Path:
    """Return the path of a file next to a run directory, for results that precede the run: runs/squad.find-lr.json."""
    folder = Path(folder).resolve()
    return folder.with_name(f"{folder.name}.{name}")


def find_model_folder(folder: Path) -> Path:
    """Return the folder of a run's model: model/, or the folder itself if it is a published run (`fivetune push`)."""
    return folder if (folder / "config.json").is_file() and not (folder / "model").is_dir() else folder / "model"
