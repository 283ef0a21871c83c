"""The code examples of a model card, which run as they stand.

In: where the model is found, and its kind. Out: Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from fivetune.tasks import find_needed_columns
from fivetune.types import Task

TEXT = "the text as the run's template writes it"
OPEN_LOCAL = """\
import fivetune

run = fivetune.open_run({place!r}{options})
"""
OPEN_PUBLISHED = """\
import fivetune
from huggingface_hub import snapshot_download

run = fivetune.open_run(snapshot_download({place!r}){options})
"""
PLAIN = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model!r})
model = AutoModelForSeq2SeqLM.from_pretrained({model!r})
"""
PEFT = """\
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model!r})
model = PeftModel.from_pretrained(AutoModelForSeq2SeqLM.from_pretrained({model!r}), {adapter!r}{subfolder})
"""
GENERATE = """\
inputs = tokenizer({text!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
"""
UMT5_FIX = (
    "model.config.tie_word_embeddings = False  # transformers 5 sets it to True for umT5 and scales the logits by it\n"
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the reader of a card finds the model.

    Args:
        name: the run directory, or the repository (org/name).
        is_published: whether `name` is a repository, at whose root the model's files are.
    """

    name: str
    is_published: bool = False

    @property
    def model(self) -> str:
        return self.name if self.is_published else f"{self.name}/model"


def build_fivetune_example(place: Place, task: Task, columns: Mapping[str, str]) -> str:
    """Build the example with FiveTune: a record with the run's columns, or a text where a record needs more.

    Args:
        columns: data.columns.
    """
    part = next(iter(getattr(task, "parts", ())), None)
    options = f', {{"task.part": {json.dumps(part)}}}' if part else ""
    opening = _format(OPEN_PUBLISHED if place.is_published else OPEN_LOCAL, place=place.name)
    needed = {} if part else find_needed_columns(task)
    record = {columns.get(name, name): f"the {name}" for name in needed}
    if not all(isinstance(value, str) for value in needed.values()):
        record = {}  # one of its columns is no text
    given = json.dumps(record or TEXT, ensure_ascii=False)
    code = opening.replace("{options}", options) + f"print(run.predict([{given}])[0].prediction)\n"
    words = "With FiveTune, which applies the run's template, label set and answer format to records:"
    return f"{words}\n\n```python\n{code}```\n"


def build_plain_example(place: Place, *, model_type: str) -> str:
    """Build the example with transformers alone."""
    fix = UMT5_FIX if model_type == "umt5" else ""
    words = (
        "With transformers alone; generation_config.json holds the run's length limit, beams, penalties and suppressed "
        "tokens:"
    )
    code = _format(PLAIN, model=place.model) + fix + _format(GENERATE, text=TEXT)
    return f"{words}\n\n```python\n{code}```\n"


def build_peft_example(place: Place, *, base: str | None) -> str:
    """Build the example with transformers and peft.

    Args:
        base: the name of the base model if the place holds the adapter alone; None if it holds both.
    """
    folder, subfolder = f"{place.name}/adapter", ""
    if place.is_published:
        folder, subfolder = place.name, "" if base else ', subfolder="adapter"'
    words = "With transformers and peft:" if base else "With transformers and peft, from the base and adapter/:"
    code = _format(PEFT, model=base or place.model, adapter=folder).replace("{subfolder}", subfolder)
    return f"{words}\n\n```python\n{code}{_format(GENERATE, text=TEXT)}```\n"


def _format(code: str, **values: str) -> str:
    """Fill a template with values as double-quoted strings.

    >>> _format("x = {name!r}", name="a")
    'x = "a"'
    """
    for name, value in values.items():
        code = code.replace(f"{{{name}!r}}", json.dumps(value, ensure_ascii=False))
    return code
