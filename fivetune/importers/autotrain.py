"""AutoTrain: the YAML configuration of a seq2seq project, or the words of `autotrain seq2seq`.

In: the file with task: seq2seq, or a command line. Out: settings that train as AutoTrain's Seq2SeqTrainer does; its
defaults (AdamW 5e-5, linear, warm-up of a tenth, batch 2, 128 tokens, 3 epochs, seed 42) included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

import yaml

from fivetune.config.aliases import VALUE_ALIASES
from fivetune.config.layers import parse_overrides
from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Entry,
    ImportedRecipe,
    Importer,
    RawConfig,
    convert_patience,
    read_count,
    read_number,
    set_batch,
    set_plain_task,
)
from fivetune.importers._shell import find_command
from fivetune.types import JsonTable, JsonValue

DEFAULTS: JsonTable = {
    "run.seed": 42,
    "model.path": "google/flan-t5-base",
    "data.max_input_tokens": 128,
    "data.max_target_tokens": 128,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "schedule.name": "linear",
    "schedule.warmup_fraction": 0.1,
    "train.num_epochs": 3,
}
RENAMED = {"base_model": "model", "data.path": "data_path", "data.train_split": "train_split",
           "data.valid_split": "valid_split", "data.column_mapping.text_column": "text_column",
           "data.column_mapping.target_column": "target_column"}  # fmt: skip
SUFFIXES = (".csv", ".jsonl", ".json", ".parquet", ".tsv")
LORA = Entry(setting="model.adapter", joint=True, note="counts with peft: true")
EPOCHS = "FiveTune evaluates and saves ten times per run: eval.every_steps, checkpoint.every_steps"
ADAM = {str(key): cast("JsonValue", value) for key, value in VALUE_ALIASES["optim"].items()}


class AutoTrain(Importer):
    """seq2seq projects of AutoTrain."""

    title: ClassVar[str] = "AutoTrain's seq2seq"
    rules: ClassVar[Mapping[str, Entry]] = {
        "task": Entry(same=("seq2seq",), note="the task jsonl reads pairs of texts"),
        "model": Entry(setting="model.path"),
        "project_name": Entry(setting="run.dir", note="below the folder runs/", joint=True),
        "data_path": Entry(setting="data.train, data.eval", joint=True, note="data_path and a split name a file"),
        "train_split": Entry(setting="data.train", joint=True, note="data_path and a split name a file"),
        "valid_split": Entry(setting="data.eval", joint=True, same=(None,), note="data_path and a split name a file"),
        "text_column": Entry(setting="task.inputs", joint=True, note="column of the template"),
        "target_column": Entry(setting="task.targets", joint=True, note="column of the template"),
        "seed": Entry(setting="run.seed"),
        "lr": Entry(setting="optimizer.lr"),
        "epochs": Entry(setting="train.num_epochs"),
        "max_seq_length": Entry(setting="data.max_input_tokens"),
        "max_target_length": Entry(setting="data.max_target_tokens"),
        "batch_size": Entry(setting="train.batch_size", joint=True, note="per device"),
        "gradient_accumulation": Entry(
            setting="train.global_batch_size", joint=True, note="batch_size x gradient_accumulation"
        ),
        "auto_find_batch_size": Entry(setting="train.batch_size", joint=True, same=(False,), note="auto"),
        "warmup_ratio": Entry(setting="schedule.warmup_fraction"),
        "optimizer": Entry(
            setting="optimizer.name", values={**ADAM, "adafactor": "adafactor", "adamw": "adamw"}, closed=True
        ),
        "scheduler": Entry(
            setting="schedule.name",
            values={
                "linear": "linear",
                "cosine": "cosine",
                "constant": "constant",
                "constant_with_warmup": "constant",
                "inverse_sqrt": "inverse_sqrt",
            },
            closed=True,
        ),
        "weight_decay": Entry(setting="optimizer.weight_decay"),
        "max_grad_norm": Entry(setting="train.max_grad_norm"),
        "mixed_precision": Entry(
            setting="train.precision",
            values={"bf16": "bf16"},
            closed=True,
            same=(None, "none", "no"),
            note="T5 overflows in fp16; train.precision: auto takes bf16 where it can",
        ),
        "peft": Entry(setting="model.adapter", joint=True, same=(False,), note="lora"),
        "lora_r": LORA,
        "lora_alpha": LORA,
        "lora_dropout": LORA,
        "target_modules": Entry(setting="model.adapter", joint=True, note="all-linear and q,v are known"),
        "quantization": Entry(same=(None, "none"), note="model.adapter.name: qlora keeps the base in 4 bits"),
        "early_stopping_patience": Entry(
            setting="train.early_stopping", joint=True, note="epochs become evaluations, ten per run"
        ),
        "early_stopping_threshold": Entry(
            setting="train.early_stopping", joint=True, note="an improvement of the loss; below it patience runs"
        ),
        "evaluation_strategy": Entry(same=("steps",), note=EPOCHS),
        "eval_strategy": Entry(same=("steps",), note=EPOCHS),
        "save_strategy": Entry(same=("steps",), note=EPOCHS),
        "save_total_limit": Entry(setting="checkpoint.keep", joint=True, note="at least 2, beside the best"),
        "logging_steps": Entry(setting="train.log_every_steps", same=(-1,)),
        "log": Entry(setting="report.sinks", joint=True, same=("none", None), note="tensorboard, wandb or mlflow"),
        "backend": Entry(ignored=True, note="fivetune trains here; on a cluster: fivetune launch"),
        "username": Entry(ignored=True, note="nothing is uploaded"),
        "repo_id": Entry(ignored=True, note="nothing is uploaded"),
        "token": Entry(ignored=True, note="the hub's client reads it from the environment"),
        "push_to_hub": Entry(same=(False,), note="nothing is uploaded by training"),
        "train": Entry(same=(True,), note="fivetune train RECIPE"),
        "deploy": Entry(same=(False,), note="after training: fivetune serve RUN"),
        "inference": Entry(same=(False,), note="after training: fivetune predict RUN --input FILE"),
    }
    differences: ClassVar[tuple[str, ...]] = (
        "data_path with a split is a file of that folder, or a split of a data set on the hub: org/name:config:split.",
        "max_seq_length and max_target_length are 128 tokens unless they are given, the batch 2.",
        "AutoTrain scores with ROUGE; so does the recipe. Other metrics: task.metrics.",
        "mixed_precision fp16 is left out: T5 overflows in it.",
        "LoRA keeps its r, alpha and dropout; the learning rate of AutoTrain (5e-5) is low for it, and fivetune check "
        "warns.",
    )  # fmt: skip
    examples: ClassVar[Mapping[str, str]] = {
        "config.yml": "task: seq2seq\nbase_model: google-t5/t5-small\nproject_name: my-project\nlog: tensorboard\n"
        "backend: local\ndata:\n  path: data/\n  train_split: train\n  valid_split: dev\n  column_mapping:\n"
        "    text_column: article\n    target_column: summary\nparams:\n  max_seq_length: 512\n  epochs: 3\n"
        "  batch_size: 4\n  lr: 2e-4\n  optimizer: adamw_torch\n  scheduler: linear\n  gradient_accumulation: 8\n"
        "  mixed_precision: fp16\n  colour: blue\nhub:\n  username: ${HF_USERNAME}\n  token: ${HF_TOKEN}\n"
        "  push_to_hub: true\n",
        "": "autotrain seq2seq --train --model google-t5/t5-small --data-path data --train-split train --text-column a "
        "--target-column b --lr 1e-4 --epochs 2 --batch-size 8 --peft --lora-r 8 --lora-alpha 16 --quantization int8 "
        "--project-name p",
    }

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith((".yaml", ".yml")):
            return bool(re.search(r"^base_model:", source.text, re.MULTILINE))
        return not source.name.endswith((".py", ".ipynb", ".json", ".gin")) and "autotrain seq2seq" in source.text

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        if source.name.endswith((".yaml", ".yml")):
            return {name: Argument(value) for name, value in _read_yaml(source).items()}
        words = find_command(source, r"\bautotrain seq2seq\b")
        flags = [re.sub(r"^--([\w-]+)", lambda m: "--" + m[1].replace("-", "_"), word) for word in words]
        start = flags.index("seq2seq") + 1
        switches = {"--train", "--peft", "--auto_find_batch_size", "--push_to_hub", "--deploy", "--inference"}
        typed = [f"{word}=true" if word in switches else word for word in flags[start:]]
        return {name: Argument(cast("JsonValue", value)) for name, value in parse_overrides(typed).items()}

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        for setting, value in DEFAULTS.items():
            if setting not in recipe.settings:
                recipe.set(setting, value, "default of AutoTrain")
        if values.get("project_name"):
            recipe.set("run.dir", f"runs/{values['project_name']}", "project_name")
        for split, setting in (("train_split", "data.train"), ("valid_split", "data.eval")):
            name = values.get(split, "train" if split == "train_split" else None)
            if values.get("data_path") and name:
                recipe.set(setting, _find_data(str(values["data_path"]), str(name)), f"data_path and {split}")
        micro = read_count(values, "batch_size", 2)
        accumulation = read_count(values, "gradient_accumulation", 1)
        given = "batch_size" in values
        names = ("batch_size", "gradient_accumulation")
        set_batch(recipe, micro=micro, accumulation=accumulation, num_processes=1, names=names, given=given)
        if values.get("auto_find_batch_size"):
            recipe.set("train.global_batch_size", micro * accumulation, "batch_size x gradient_accumulation")
            recipe.set("train.batch_size", "auto", "auto_find_batch_size")
        inputs, targets = (f"{{{values.get(f'{role}_column', role)}}}" for role in ("text", "target"))
        reason = "AutoTrain's seq2seq reads pairs of texts"
        set_plain_task(recipe, inputs, targets, metric="rouge", score="rougeL_f1", reason=reason)
        _complete_rest(recipe, values)


def _read_yaml(source: RawConfig) -> dict[str, JsonValue]:
    """Read a configuration as flat arguments, as AutoTrain's parser flattens it."""
    try:
        table = yaml.safe_load(source.text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source.name}: not valid YAML: {' '.join(str(error).split())}. Correct the file.") from None
    if not isinstance(table, dict) or table.get("task") != "seq2seq":
        task = table.get("task") if isinstance(table, dict) else None
        raise ConfigError(f"{source.name}: task is {task!r}. FiveTune has a counterpart of seq2seq alone.")
    found: dict[str, JsonValue] = {}
    for name, value in _flatten_table(cast("JsonTable", table), ""):
        name = name.removeprefix("params.").removeprefix("hub.")
        value = float(value) if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?e-?\d+", value) else value
        found[RENAMED.get(name, name)] = value
    return found


def _flatten_table(table: JsonTable, above: str) -> list[tuple[str, JsonValue]]:
    """Dotted names and values of a nested table.

    >>> _flatten_table({"a": {"b": 1}, "c": 2}, "")
    [('a.b', 1), ('c', 2)]
    """
    found: list[tuple[str, JsonValue]] = []
    for name, value in table.items():
        inner = isinstance(value, dict)
        found += _flatten_table(value, f"{above}{name}.") if inner else [(f"{above}{name}", value)]
    return found


def _find_data(path: str, split: str) -> str:
    """The file of a split in a folder, or the split of a data set on the hub.

    >>> _find_data("abisee/cnn_dailymail", "3.0.0:train"), _find_data("data/", "train")
    ('abisee/cnn_dailymail:3.0.0:train', 'data/train.csv')
    """
    folder = Path(path)
    config, _, name = split.rpartition(":")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not folder.is_dir():
        return f"{path}:{config}:{name}"
    found = next((suffix for suffix in SUFFIXES if (folder / f"{name}{suffix}").is_file()), ".csv")
    return str(folder / f"{name}{found}")


def _complete_rest(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set adapter, early stopping, tracker and the number of checkpoints."""
    if values.get("peft"):
        adapter: JsonTable = {
            "name": "lora",
            "r": read_count(values, "lora_r", 16),
            "alpha": read_number(values, "lora_alpha", 32),
            "dropout": read_number(values, "lora_dropout", 0.05),
        }
        modules = str(values.get("target_modules", "all-linear"))
        if modules != "all-linear":
            adapter["target_modules"] = [one.strip() for one in modules.split(",")]
        recipe.set("model.adapter", adapter, "peft, lora_r, lora_alpha, lora_dropout, target_modules")
    if values.get("early_stopping_patience") and values.get("valid_split"):
        epochs, total = read_count(values, "early_stopping_patience", 5), read_count(values, "epochs", 3)
        stopping: JsonTable = {"patience": convert_patience(epochs, total), "metric": "loss"}
        if values.get("early_stopping_threshold"):
            stopping["min_delta"] = values["early_stopping_threshold"]
        recipe.set("train.early_stopping", stopping, "early_stopping_patience, early_stopping_threshold")
    if values.get("log") in ("tensorboard", "wandb", "mlflow"):
        recipe.set("report.sinks", [values["log"]], "log")
    if "save_total_limit" in values:
        recipe.set("checkpoint.keep", max(2, read_count(values, "save_total_limit", 1)), "save_total_limit")
