"""MLflow: a run on the tracking server at MLFLOW_TRACKING_URI."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

from fivetune.training.sinks import Sink, Writer
from fivetune.types import JsonTable


class MLflow(Sink):
    """Logs with the mlflow client."""

    package = "mlflow"

    def open(self, folder: Path, config: JsonTable, *, first_step: int = 1) -> MLflowWriter:
        client = import_module(self.package)
        client.start_run(run_name=folder.resolve().name)
        settings: dict[str, object] = {}
        for section, table in config.items():
            if isinstance(table, dict):
                settings |= {f"{section}.{key}": value for key, value in table.items()}
        client.log_params(settings)
        return MLflowWriter(client)


class MLflowWriter(Writer):
    """One mlflow run."""

    def __init__(self, client: ModuleType) -> None:
        self._client = client

    def log(self, values: dict[str, float], step: int) -> None:
        self._client.log_metrics({name.replace("/", "."): value for name, value in values.items()}, step=step)

    def close(self) -> None:
        self._client.end_run()
