"""FiveTune fine-tunes the T5 family: one command from text to an official score, a model and a report.

    run = fivetune.train("quickstart")                       fine-tune, as `fivetune train` does
    run = fivetune.open_run("runs/quickstart")               the same TrainedRun, later
    run.predict([{"question": "...", "context": "..."}])     -> Predictions, a list; loads the model once

The function of a command has its name: new, train, evaluate, predict, score, diagnose, inspect, tune, export, serve.
The public names are imported at their first use, so that `import fivetune` does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fivetune.config import RunConfig, load_config
    from fivetune.delivery.exporters._export import export
    from fivetune.delivery.serving.serve import serve
    from fivetune.fleet.experiments.search import tune
    from fivetune.reading.compare import compare_runs
    from fivetune.reading.diagnosis.diagnose import diagnose
    from fivetune.reading.report import write_report
    from fivetune.rundir import read_run
    from fivetune.rundir.records import Prediction
    from fivetune.start.files import new
    from fivetune.training.answers.score import score
    from fivetune.training.answers.trained_run import TrainedRun, evaluate, open_run, predict
    from fivetune.training.inspect import inspect
    from fivetune.training.run import train

ENVIRONMENT = {
    # A thread of OpenMP that waits for the others by spinning keeps them from their core where other programs use the
    # cores: two threads then take many times as long as one.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Products in bf16 on a CPU are compiled for each shape, 0.4 to 1.2 MB each, and flat batches have new shapes all
    # the time. oneDNN and torch keep 1,024 each by default; the layers of a model repeat those of the last 256.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
}
"""Variables that libraries read when torch is imported, where the user has not set them."""
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

__version__ = "0.1.0"
__all__ = [
    "Prediction",
    "RunConfig",
    "TrainedRun",
    "__version__",
    "compare_runs",
    "diagnose",
    "evaluate",
    "export",
    "inspect",
    "load_config",
    "new",
    "open_run",
    "predict",
    "read_run",
    "score",
    "serve",
    "train",
    "tune",
    "write_report",
]

_PUBLIC_MODULES = {
    "Prediction": "fivetune.rundir.records",
    "RunConfig": "fivetune.config",
    "TrainedRun": "fivetune.training.answers.trained_run",
    "compare_runs": "fivetune.reading.compare",
    "diagnose": "fivetune.reading.diagnosis.diagnose",
    "evaluate": "fivetune.training.answers.trained_run",
    "export": "fivetune.delivery.exporters._export",
    "inspect": "fivetune.training.inspect",
    "load_config": "fivetune.config",
    "new": "fivetune.start.files",
    "open_run": "fivetune.training.answers.trained_run",
    "predict": "fivetune.training.answers.trained_run",
    "read_run": "fivetune.rundir",
    "score": "fivetune.training.answers.score",
    "serve": "fivetune.delivery.serving.serve",
    "train": "fivetune.training.run",
    "tune": "fivetune.fleet.experiments.search",
    "write_report": "fivetune.reading.report",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_MODULES:
        raise AttributeError(f"module 'fivetune' has no attribute {name!r}")
    errors = import_module("fivetune.errors")
    errors.refuse_stripped_python()
    with import_module("fivetune.distributed.processes.signals").defer_interrupts():
        import_module("fivetune.rundir.notebook").prepare_imports()
        found = getattr(import_module(_PUBLIC_MODULES[name]), name)
    if not isinstance(found, type):
        found = errors.name_arguments(found)
        found.__module__ = "fivetune"  # pickle finds it here
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__") and name not in __all__)]
