"""T5Args of simpletransformers, or a dict of arguments, with T5Model and train_model in Python source.

In: a script or notebook, which is not executed, or the model_args.json of a saved model. Out: settings that train as
T5Model does; its own defaults (Adafactor without parameter scaling, 1e-3, batch 8, 128 tokens, one epoch) included.
"""

from __future__ import annotations

from collections.abc import Mapping

from fivetune.errors import ConfigError
from fivetune.start.importers import (
    Argument,
    ImportedRecipe,
    Importer,
    RawConfig,
    Rules,
    read_count,
    read_json_table,
    set_batch,
    set_plain_task,
)
from fivetune.start.importers._arguments import apply_arguments
from fivetune.start.importers._changes import Script, format_text, read_changes, resolve_changes
from fivetune.start.importers._python import PythonSource, write_column
from fivetune.types import JsonTable, JsonValue

DEFAULTS: JsonTable = {
    "optimizer.name": "adafactor",
    "optimizer.lr": 1e-3,
    "schedule.name": "constant",
    "data.max_input_tokens": 128,
    "data.max_target_tokens": 128,
    "train.num_epochs": 1,
    "eval.batch_size": 8,
}
EPOCHS = "FiveTune evaluates and saves ten times per run: eval.every_steps, checkpoint.every_steps"
GROUPS = "set train.param_groups: [{match: ..., lr: ...}]"
QUANTIZE = "after training: fivetune export --quantization int8"
NO_POLYNOMIAL = "there is no polynomial decay; use linear"
STOPPING = ("train.early_stopping", "counted in evaluations")
ADAFACTOR = ("relative_step", "warmup_init", "clip_threshold", "decay_rate", "beta1")  # its options alone
SETTINGS = {
    "model_name": "model.path",
    "train_data": "data.train",
    "eval_data": "data.eval",
    "eval_df": "data.eval",
    "manual_seed": "run.seed",
    "optimizer": "optimizer.name",
    "adafactor_relative_step": "optimizer.relative_step",
    "adafactor_warmup_init": "optimizer.warmup_init",
    "adafactor_beta1": "optimizer.beta1",
    "adafactor_clip_threshold": "optimizer.clip_threshold",
    "adafactor_decay_rate": "optimizer.decay_rate",
    "scheduler": "schedule.name",
    "max_length": "eval.max_new_tokens",
    "length_penalty": "eval.length_penalty",
    "warmup_steps": "schedule.warmup_steps",
    "max_steps": "train.num_steps",
    "repetition_penalty": "eval.repetition_penalty",
    "eval_batch_size": "eval.batch_size",
    "evaluate_during_training_steps": "eval.every_steps",
    "save_steps": "checkpoint.every_steps",
    "use_cuda": "device",
}
VALUES: dict[str, dict[str | float, JsonValue]] = {
    "optimizer": {"Adafactor": "adafactor", "AdamW": "adamw"},
    "scheduler": {
        "constant_schedule": "constant",
        "constant_schedule_with_warmup": "constant",
        "linear_schedule_with_warmup": "linear",
        "cosine_schedule_with_warmup": "cosine",
    },
    "use_cuda": {False: "cpu", True: "auto"},
}
UNCHANGED: dict[str, tuple[tuple[JsonValue, ...], str]] = {
    "warmup_steps": ((0,), ""),
    "max_steps": ((-1,), ""),
    "fp16": ((False,), "train.precision: auto takes bf16, or fp16 on GPUs without bf16"),
    "adafactor_relative_step": ((False,), ""),
    "adafactor_warmup_init": ((False,), ""),
    "adafactor_eps": (([1e-30, 1e-3], (1e-30, 1e-3)), "Adafactor's two epsilons are fixed"),
    "n_gpu": ((0, 1), ""),
    "evaluate_during_training_steps": ((-1, 0), ""),
    "save_steps": ((-1, 0), ""),
    "evaluate_each_epoch": ((), EPOCHS),
    "evaluate_generated_text": ((True,), "evaluation always generates answers"),
    "early_stopping_consider_epochs": ((False,), EPOCHS),
    "save_model_every_epoch": ((), EPOCHS),
    "cuda_device": ((-1,), ""),
    "config": (({},), ""),
    "do_lower_case": ((False,), "lower-case the file; the task unifiedqa has lower_case"),
    "custom_layer_parameters": (([],), GROUPS),
    "custom_parameter_groups": (([],), GROUPS),
    "train_custom_parameters_only": ((False,), "set model.freeze"),
    "special_tokens_list": (([],), "the vocabulary stays that of the model"),
    "dataset_class": ((), "write a task: docs/tasks.md"),
    "dynamic_quantize": ((False,), QUANTIZE),
    "quantized_model": ((False,), QUANTIZE),
    "cosine_schedule_num_cycles": ((0.5,), "schedule cosine falls once"),
    "polynomial_decay_schedule_lr_end": ((1e-7,), NO_POLYNOMIAL),
    "polynomial_decay_schedule_power": ((1.0,), NO_POLYNOMIAL),
}
NO_EFFECT = (
    "args", "best_model_dir", "cache_dir", "dataloader_num_workers", "early_stopping", "early_stopping_metric_minimize",
    "encoding", "evaluate_during_training", "evaluate_during_training_silent", "evaluate_during_training_verbose",
    "local_rank", "logging_steps", "model_class", "model_type", "multiprocessing_chunksize", "no_cache", "no_save",
    "not_saved_args", "overwrite_output_dir", "process_count", "reprocess_input_data", "save_best_model",
    "save_eval_checkpoints", "save_optimizer_and_scheduler", "silent", "skip_special_tokens", "thread_count",
    "tokenizer_type", "use_cached_eval_features", "use_hf_datasets", "use_multiprocessed_decoding",
    "use_multiprocessing", "use_multiprocessing_for_evaluation", "verbose", "wandb_kwargs",
)  # fmt: skip
JOINT = {
    "adafactor_scale_parameter": ("optimizer.preset", "hf: false, t5-paper: true"),
    "adam_epsilon": ("optimizer.eps", "AdamW's; Adafactor does not use it"),
    "adam_betas": ("optimizer.beta1, optimizer.beta2", "AdamW's"),
    "warmup_ratio": ("schedule.warmup_fraction", "counts unless warmup_steps is given"),
    "train_batch_size": ("train.batch_size", "all GPUs share it"),
    "gradient_accumulation_steps": ("train.global_batch_size", "train_batch_size x gradient_accumulation_steps"),
    "n_gpu": ("launch.nproc", "each process computes a share of the batch"),
    "max_seq_length": ("data.max_input_tokens, data.max_target_tokens", "bounds inputs and targets"),
    "preprocess_inputs": ("task.inputs", "true puts a colon between prefix and text"),
    "use_early_stopping": STOPPING,
    "early_stopping_patience": STOPPING,
    "early_stopping_delta": STOPPING,
    "early_stopping_metric": STOPPING,
    "tensorboard_dir": ("report.sinks", "adds tensorboard"),
    "wandb_project": ("report.sinks", "adds wandb; set WANDB_PROJECT"),
    "cuda_device": ("device", "cuda:N"),
    "config": ("model.dropout", "dropout_rate alone; the model keeps the rest of its own config.json"),
}


class SimpleTransformers(Importer):
    """T5Model of simpletransformers."""

    title = "simpletransformers' T5Model"
    rules = Rules(SETTINGS, VALUES, UNCHANGED, NO_EFFECT, JOINT)

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith(".json"):
            return '"train_batch_size"' in source.text or '"model_class"' in source.text
        return source.name.endswith((".py", ".ipynb")) and "T5Model(" in source.text

    def convert(self, source: RawConfig) -> ImportedRecipe:
        python = None if source.name.endswith(".json") else PythonSource(source)
        arguments = _read_calls(python) if python else read_json_table(source)
        recipe = ImportedRecipe(f"{self.title}, {source.name}")
        _complete(recipe, apply_arguments(recipe, self.rules, arguments))
        recipe.resolve_findings()
        if python:
            _resolve_templates(recipe, Script(python, "trainer"))
        return recipe


def _read_calls(python: PythonSource) -> dict[str, Argument]:
    """Read the arguments of T5Model and of train_model. Raises ConfigError unless T5Model is called once."""
    models = python.find_calls("T5Model")
    if len(models) != 1:
        reason = f"calls T5Model {len(models)} times, and one call is needed. Give a file with one."
        raise ConfigError(f"{python.name}: {reason}")
    found = python.read_table(models[0], ("model_type", "model_name", "args", "tokenizer", "use_cuda"))
    tables = [one.value for one in models[0].keywords if one.arg == "args"] or models[0].args[2:3]
    for node in tables:
        found.pop("args", None)
        found |= python.read_table(node)
    for call in python.find_calls("train_model")[:1]:
        found |= python.read_table(call, ("train_data", "output_dir", "show_running_loss", "args", "eval_data"))
    found.pop("show_running_loss", None)
    return found


def _complete(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Add T5Model's defaults and the settings that several arguments decide."""
    recipe.set_defaults(DEFAULTS, "default of T5Args")
    length = values.get("max_seq_length")
    if length is not None:
        recipe.set("data.max_input_tokens", length, f"max_seq_length {length}")
        recipe.set("data.max_target_tokens", length, f"max_seq_length {length}, which bounds targets too")
    _complete_optimizer(recipe, values)
    if not values.get("warmup_steps") and values.get("scheduler") != "constant_schedule":
        recipe.set("schedule.warmup_fraction", values.get("warmup_ratio", 0.06), "warmup_ratio")
    micro = read_count(recipe, values, "train_batch_size", 8)
    num_processes = read_count(recipe, values, "n_gpu", 1) if values.get("n_gpu") else 1
    if micro % num_processes:
        recipe.leave_out("n_gpu", f"train_batch_size {micro} is not a multiple of it, and the GPUs share the batch")
        num_processes = 1
    name = "train_batch_size"
    set_batch(recipe, values, name, micro=micro // num_processes, processes=num_processes, nodes=1)
    between = ": " if values.get("preprocess_inputs", True) else ""
    reason = "T5Model reads pairs of texts with a prefix"
    inputs = f"{{prefix}}{between}{{input_text}}"
    set_plain_task(recipe, inputs, "{target_text}", metrics=["rouge"], score="rougeL_f1", reason=reason)
    _complete_rest(recipe, values)


def _resolve_templates(recipe: ImportedRecipe, script: Script) -> None:
    """Replace the columns of the templates that the script makes of others."""
    read_changes(script)
    recipe.findings += script.findings
    between = str(recipe.settings["task.inputs"]).removeprefix("{prefix}").removesuffix("{input_text}")
    inputs = write_column("prefix") + between + write_column("input_text")
    recipe.settings["task.inputs"] = format_text(resolve_changes(script, inputs))
    recipe.settings["task.targets"] = format_text(resolve_changes(script, write_column("target_text")))


def _complete_optimizer(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set the options of the chosen optimizer, and remove the options of the other optimizer."""
    if recipe.settings["optimizer.name"] == "adafactor":
        scaled = bool(values.get("adafactor_scale_parameter", False))
        recipe.set("optimizer.preset", "t5-paper" if scaled else "hf", f"adafactor_scale_parameter {scaled}")
        if recipe.settings.get("optimizer.relative_step"):
            recipe.drop("optimizer.lr")
        return
    recipe.drop(*(f"optimizer.{name}" for name in ADAFACTOR))
    if "adam_epsilon" in values:
        recipe.set("optimizer.eps", values["adam_epsilon"], "adam_epsilon")
    betas = values.get("adam_betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        recipe.set("optimizer.beta1", betas[0], "adam_betas")
        recipe.set("optimizer.beta2", betas[1], "adam_betas")


def _complete_rest(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set early stopping, trackers, device and dropout."""
    if "train.num_steps" in recipe.settings:
        recipe.drop("train.num_epochs")
    if values.get("use_early_stopping"):
        patience = read_count(recipe, values, "early_stopping_patience", 3)
        recipe.set("train.early_stopping.patience", patience, "use_early_stopping")
        if values.get("early_stopping_delta"):
            recipe.set("train.early_stopping.min_delta", values["early_stopping_delta"], "")
        if values.get("early_stopping_metric", "eval_loss") == "eval_loss":
            recipe.set("train.early_stopping.metric", "loss", "")
    trackers = {"tensorboard_dir": "tensorboard", "wandb_project": "wandb"}
    sinks: list[JsonValue] = [sink for name, sink in trackers.items() if values.get(name)]
    if sinks:
        recipe.set("report.sinks", sinks, "tensorboard_dir, wandb_project")
    device = values.get("cuda_device")
    if type(device) is int and device >= 0 and values.get("use_cuda", True):
        recipe.set("device", f"cuda:{device}", "cuda_device")
    config = values.get("config")
    if isinstance(config, Mapping) and "dropout_rate" in config:
        recipe.set("model.dropout", config["dropout_rate"], "config")
