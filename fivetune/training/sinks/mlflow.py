"""MLflow: a run on the tracking server at MLFLOW_TRACKING_URI."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from fivetune.rundir.records import EvalRecord, StepRecord
from fivetune.training.sinks import Sink, build_eval_values, build_step_values
from fivetune.types import JsonTable


class MLflow(Sink):
    """Logs with the mlflow client."""

    package = "mlflow"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> MLflowWriter:
        client = import_module(self.package)
        client.start_run(run_name=folder.resolve().name)
        client.log_params({f"{s}.{k}": v for s, t in config.items() if isinstance(t, dict) for k, v in t.items()})
        return MLflowWriter(client)


class MLflowWriter:
    """One mlflow run."""

    def __init__(self, client: ModuleType) -> None:
        self._client = client

    def step(self, record: StepRecord) -> None:
        self._client.log_metrics(
            {k.replace("/", "."): v for k, v in build_step_values(record).items()}, step=record.step
        )

    def evaluation(self, record: EvalRecord) -> None:
        self._client.log_metrics(
            {k.replace("/", "."): v for k, v in build_eval_values(record).items()}, step=record.step
        )

    def close(self) -> None:
        self._client.end_run()
