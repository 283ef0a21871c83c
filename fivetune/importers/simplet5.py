"""simpleT5: from_pretrained and train of SimpleT5 in Python source.

In: a script or notebook, which is not executed. Out: settings that train as it does; what it fixes (AdamW at a constant
1e-4, seed 42, no clipping of gradients) included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Entry,
    ImportedRecipe,
    Importer,
    RawConfig,
    convert_patience,
    read_count,
    set_plain_task,
)
from fivetune.importers._python import parse_python
from fivetune.types import JsonTable, JsonValue

FIXED: JsonTable = {
    "run.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 1e-4,
    "schedule.name": "constant",
    "train.max_grad_norm": None,
}
DEFAULTS: JsonTable = {
    "model.path": "t5-base",
    "data.max_input_tokens": 512,
    "data.max_target_tokens": 512,
    "train.batch_size": 8,
    "train.num_epochs": 5,
}
TRAIN = (
    "train_df", "eval_df", "source_max_token_len", "target_max_token_len", "batch_size", "max_epochs", "use_gpu",
    "outputdir", "early_stopping_patience_epochs", "precision", "logger", "dataloader_num_workers",
    "save_only_last_epoch",
)  # fmt: skip


class SimpleT5(Importer):
    """SimpleT5."""

    title: ClassVar[str] = "simpleT5"
    rules: ClassVar[Mapping[str, Entry]] = {
        "model_type": Entry(ignored=True, note="the model's config.json says it"),
        "model_name": Entry(setting="model.path"),
        "train_df": Entry(setting="data.train", note="the file that pandas reads"),
        "eval_df": Entry(setting="data.eval", note="the file that pandas reads"),
        "source_max_token_len": Entry(setting="data.max_input_tokens"),
        "target_max_token_len": Entry(setting="data.max_target_tokens"),
        "batch_size": Entry(setting="train.batch_size"),
        "max_epochs": Entry(setting="train.num_epochs"),
        "use_gpu": Entry(setting="device", values={True: "auto", False: "cpu"}),
        "outputdir": Entry(setting="run.dir"),
        "early_stopping_patience_epochs": Entry(
            setting="train.early_stopping", joint=True, same=(0,), note="epochs become evaluations, ten per run"
        ),
        "precision": Entry(
            setting="train.precision",
            values={32: "fp32", "32": "fp32", "bf16": "bf16"},
            closed=True,
            note="16 is fp16, in which T5 overflows: bf16, or nothing",
        ),
        "logger": Entry(note="set report.sinks: tensorboard, wandb or mlflow", same=("default", None)),
        "dataloader_num_workers": Entry(ignored=True),
        "save_only_last_epoch": Entry(
            ignored=True, note="model/ has the best weights; checkpoint.keep counts the others"
        ),
    }
    differences: ClassVar[tuple[str, ...]] = (
        "simpleT5 trains with AdamW at a constant 1e-4, no clipping, seed 42, and has no argument for them; the recipe "
        "states them, and they can be changed.",
        "It pads every example to the two limits (512 and 512 tokens by default); FiveTune computes real tokens only.",
        "It saves each epoch and selects nothing; model/ of FiveTune has the weights with the best score.",
        "Its evaluation is a loss. FiveTune generates answers and scores them; ROUGE-L chooses the best.",
        "The prefix of a task is part of source_text there, and stays so.",
    )
    examples: ClassVar[Mapping[str, str]] = {
        "train.py": "import pandas as pd\nfrom simplet5 import SimpleT5\n\n"
        'train_df = pd.read_csv("train.csv")\nmodel = SimpleT5()\n'
        'model.from_pretrained(model_type="t5", model_name="google-t5/t5-small")\n'
        'model.train(train_df=train_df, eval_df=pd.read_csv("dev.csv"), source_max_token_len=128,\n'
        "            target_max_token_len=50, batch_size=8, max_epochs=5, use_gpu=True,\n"
        "            early_stopping_patience_epochs=1, precision=32, colour='blue')\n",
        "train.ipynb": '{"nbformat": 4, "cells": [{"cell_type": "markdown", "source": ["# simpleT5"]},\n'
        ' {"cell_type": "code", "source": ["!pip install simplet5\\n", "from simplet5 import SimpleT5"]},\n'
        ' {"cell_type": "code", "source": ["model = SimpleT5()\\n", "model.from_pretrained(\'t5\', \'t5-base\')\\n",\n'
        '  "model.train(train_df=df[:100], max_epochs=3, batch_size=4, use_gpu=False)"]}]}\n',
    }

    def can_read(self, source: RawConfig) -> bool:
        return source.name.endswith((".py", ".ipynb")) and "SimpleT5" in source.text

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        python = parse_python(source)
        trainings = python.find_calls("train")
        if len(trainings) != 1:
            raise ConfigError(
                f"{source.name}: calls train {len(trainings)} times, and one call is needed. Give a file with one."
            )
        found: dict[str, Argument] = {}
        for call in python.find_calls("from_pretrained")[:1]:
            found |= python.read_call(call, ("model_type", "model_name"))
        return found | python.read_call(trainings[0], TRAIN)

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        for setting, value in FIXED.items():
            recipe.set(setting, value, "simpleT5 has no argument for it")
        for setting, value in DEFAULTS.items():
            if setting not in recipe.settings:
                recipe.set(setting, value, "default of simpleT5")
        reason = "simpleT5 reads pairs of texts"
        set_plain_task(recipe, "{source_text}", "{target_text}", metric="rouge", score="rougeL_f1", reason=reason)
        if values.get("early_stopping_patience_epochs"):
            epochs = read_count(values, "early_stopping_patience_epochs", 1)
            total = read_count(values, "max_epochs", 5)
            patience = convert_patience(epochs, total)
            reason = f"early_stopping_patience_epochs {epochs} of {total} epochs; ten evaluations per run"
            recipe.set("train.early_stopping", {"patience": patience, "metric": "loss"}, reason)
