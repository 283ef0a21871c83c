"""The model card: README.md of model/, with the metadata block of the hub, scores and a code example."""

from __future__ import annotations

import yaml

from fivetune.config import RunConfig
from fivetune.config.paths import resolve_adapter
from fivetune.redaction import redact_settings
from fivetune.rundir.figures import describe_weights
from fivetune.rundir.records import BestEval, EvalRecord
from fivetune.tasks import head_of

EXAMPLE = """\
With FiveTune, which applies the run's template, label set and answer format to records:

```python
import fivetune

run = fivetune.open_run("{folder}")
print(run.predict(["{text}"])[0].prediction)
```
"""
PLAIN_EXAMPLE = """\
With transformers alone; generation_config.json holds the run's length limit, beams, penalties and suppressed tokens:

```python
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}/model")
model = AutoModelForSeq2SeqLM.from_pretrained("{folder}/model")
{fix}inputs = tokenizer("{text}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
```
"""
PEFT_EXAMPLE = """\
With transformers and peft (model/ is the unchanged base, adapter/ has the virtual tokens):

```python
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{folder}/model")
model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained("{folder}/model"), "{folder}/adapter")
inputs = tokenizer("{text}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
```
"""
UMT5_FIX = (
    "model.config.tie_word_embeddings = False  # transformers 5 sets it to True for umT5 and scales the logits by it\n"
)
TEXT = "the text as the run's template writes it"


def build_model_card(
    config: RunConfig, evaluation: EvalRecord | None, best: BestEval | None = None, *, name: str, model_type: str
) -> str:
    """Build the card in Markdown: base model, task, scores, usage and the settings of the run.

    Secrets in settings are hidden as in config.yaml: labels and templates are unchanged.

    Args:
        evaluation: evaluation of the exported weights; None without evaluations. best: as in status.json.
        name: name of the run, the title.
        model_type: the family in config.json: t5, mt5 or umt5.
    """
    settings = config.as_redacted_dict()
    folder, name = settings["run"]["dir"], redact_settings(name)
    base = settings["model"]["path"] or f"random weights ({settings['model']['config']})"
    task = config.task.plugin_name()
    metadata: dict[str, str | list[str]] = {"library_name": "transformers", "tags": ["fivetune", task]}
    if config.model.init == "pretrained" and base.count("/") == 1 and not base.startswith((".", "/")):
        metadata["base_model"] = base
    lines = ["---", yaml.safe_dump(metadata, sort_keys=False).strip(), "---", "", f"# {name}", ""]
    lines += [f"Fine-tuned with FiveTune on the task `{task}` from {base}.", ""]
    if evaluation:
        weights = describe_weights(evaluation, best)
        lines += [f"Scores on {evaluation.num_examples:,} evaluation examples at {weights}:", ""]
        lines += ["| score | value |", "|---|---|"]
        lines += [f"| {name} | {format_score(name, value)} |" for name, value in evaluation.scores.items()]
        lines += [""]
    lines += ["## Use", "", EXAMPLE.format(folder=folder, text=TEXT)]
    adapter = resolve_adapter(config.model.adapter, config.run.dir)
    if adapter and adapter.is_virtual:
        lines += [PEFT_EXAMPLE.format(folder=folder, text=TEXT)]
    elif head_of(config.task) != "extractive":
        fix = UMT5_FIX if model_type == "umt5" else ""
        lines += [PLAIN_EXAMPLE.format(folder=folder, text=TEXT, fix=fix)]
    lines += ["## Settings of the run", "", "```yaml", config.as_redacted_yaml().strip(), "```", ""]
    return "\n".join(lines)


def format_score(name: str, value: float) -> str:
    """Format a score with two decimals, a number of examples as an integer.

    >>> format_score("f1", 80.12345), format_score("HasAns_total", 600.0)
    ('80.12', '600')
    """
    return f"{value:,.0f}" if name.endswith("total") else f"{value:.2f}"
