"""MLflow: a run at the server that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fivetune.plugins import Options
from fivetune.sinks import eval_values, need, step_values
from fivetune.types import EvalRecord, StepRecord


class MLflow(Options):
    """Logs with the mlflow client."""

    def open(self, folder: Path, config: dict[str, Any], *, first_step: int = 1) -> Writer:
        client = need("mlflow", "mlflow")
        client.start_run(run_name=folder.resolve().name)
        client.log_params({f"{s}.{k}": v for s, t in config.items() if isinstance(t, dict) for k, v in t.items()})
        return Writer(client)


class Writer:
    """One mlflow run."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def step(self, record: StepRecord) -> None:
        self._client.log_metrics({k.replace("/", "."): v for k, v in step_values(record).items()}, step=record.step)

    def evaluation(self, record: EvalRecord) -> None:
        self._client.log_metrics({k.replace("/", "."): v for k, v in eval_values(record).items()}, step=record.step)

    def close(self) -> None:
        self._client.end_run()
