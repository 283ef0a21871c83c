"""The model card: README.md of model/, with the metadata block of the hub."""

from __future__ import annotations

from typing import Any

import yaml

from fivetune.config import RunConfig
from fivetune.rundir import best_eval
from fivetune.types import Run


def model_card(config: RunConfig, run: Run, best: dict[str, Any] | None) -> str:
    """Markdown: what was trained from what, on what, and its scores."""
    base = config.model.path or f"random weights ({config.model.config})"
    task = config.task.plugin_name()
    metadata: dict[str, Any] = {
        "library_name": "transformers",
        "tags": ["fivetune", task],
        "pipeline_tag": "text2text-generation",
    }
    if config.model.init == "pretrained" and base.count("/") == 1 and not base.startswith((".", "/")):
        metadata["base_model"] = base
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {run.name}", ""]
    lines += [f"Fine-tuned with FiveTune on the task `{task}` from {base}.", ""]
    record = best_eval(run.evals, best)
    if record:
        lines += [f"Scores on {record['num_examples']:,} evaluation examples at step {record['step']:,}:", ""]
        lines += ["| score | value |", "|---|---|"]
        lines += [f"| {name} | {value:.2f} |" for name, value in record["scores"].items()]
        lines += [""]
    lines += ["Settings of the run:", "", "```yaml", config.as_yaml().strip(), "```", ""]
    return "\n".join(lines)
