"""T5Args of simpletransformers, or a dict of arguments, with T5Model and train_model in Python source.

In: a script or notebook, which is not executed, or the model_args.json of a saved model. Out: settings that train as
T5Model does; its own defaults (Adafactor without parameter scaling, 1e-3, batch 8, 128 tokens, one epoch) included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Entry,
    Finding,
    ImportedRecipe,
    Importer,
    RawConfig,
    read_count,
    read_json_table,
    read_number,
    set_batch,
    set_plain_task,
)
from fivetune.importers._changes import Script, format_text, read_changes, resolve_changes
from fivetune.importers._python import Column, PythonSource, Text, parse_python
from fivetune.types import JsonTable, JsonValue

ADAFACTOR_DEFAULTS: JsonTable = {"optimizer.lr": 1e-3, "schedule.name": "constant"}
DEFAULTS: JsonTable = {
    "optimizer.name": "adafactor",
    "data.max_input_tokens": 128,
    "data.max_target_tokens": 128,
    "train.num_epochs": 1,
    "eval.batch_size": 8,
}
EPOCHS = "FiveTune evaluates and saves ten times per run: eval.every_steps, checkpoint.every_steps"
NO_SAMPLING = "answers are decoded greedily or by beam search"
STOPPING = Entry(setting="train.early_stopping", joint=True, note="counted in evaluations")
IGNORED = (
    "best_model_dir", "cache_dir", "dataloader_num_workers", "early_stopping", "encoding",
    "evaluate_during_training_silent", "evaluate_during_training_verbose", "local_rank", "logging_steps", "model_class",
    "model_type", "multiprocessing_chunksize", "no_cache", "no_save", "not_saved_args", "overwrite_output_dir",
    "process_count", "reprocess_input_data", "save_best_model", "save_eval_checkpoints",
    "save_optimizer_and_scheduler", "silent", "skip_special_tokens", "thread_count", "tokenizer_type",
    "use_cached_eval_features", "use_hf_datasets", "use_multiprocessed_decoding", "use_multiprocessing",
    "use_multiprocessing_for_evaluation", "verbose", "wandb_kwargs",
)  # fmt: skip
RULES: dict[str, Entry] = {
    **{name: Entry(ignored=True) for name in IGNORED},
    "model_name": Entry(setting="model.path"),
    "tokenizer_name": Entry(setting="model.tokenizer", same=(None,)),
    "train_data": Entry(setting="data.train", note="the file that pandas reads"),
    "eval_data": Entry(setting="data.eval", note="the file that pandas reads"),
    "output_dir": Entry(setting="run.dir"),
    "manual_seed": Entry(setting="run.seed", same=(None,), note="without it simpletransformers draws a seed"),
    "learning_rate": Entry(setting="optimizer.lr"),
    "optimizer": Entry(setting="optimizer.name", values={"Adafactor": "adafactor", "AdamW": "adamw"}, closed=True),
    "adafactor_scale_parameter": Entry(setting="optimizer.preset", joint=True, note="hf: false, t5-paper: true"),
    "adafactor_relative_step": Entry(setting="optimizer.relative_step", same=(False,)),
    "adafactor_warmup_init": Entry(setting="optimizer.warmup_init", same=(False,)),
    "adafactor_beta1": Entry(setting="optimizer.beta1", same=(None,)),
    "adafactor_clip_threshold": Entry(setting="optimizer.clip_threshold"),
    "adafactor_decay_rate": Entry(setting="optimizer.decay_rate"),
    "adafactor_eps": Entry(same=([1e-30, 1e-3], (1e-30, 1e-3)), note="Adafactor's two epsilons are fixed"),
    "adam_epsilon": Entry(setting="optimizer.eps", joint=True, note="AdamW's; Adafactor does not use it"),
    "adam_betas": Entry(setting="optimizer.beta1, optimizer.beta2", joint=True, note="AdamW's"),
    "weight_decay": Entry(setting="optimizer.weight_decay"),
    "scheduler": Entry(
        setting="schedule.name",
        values={
            "constant_schedule": "constant",
            "constant_schedule_with_warmup": "constant",
            "linear_schedule_with_warmup": "linear",
            "cosine_schedule_with_warmup": "cosine",
        },
        closed=True,
    ),
    "warmup_steps": Entry(setting="schedule.warmup_steps", same=(0,), note="0: warmup_ratio counts"),
    "warmup_ratio": Entry(setting="schedule.warmup_fraction", joint=True, note="counts unless warmup_steps is given"),
    "max_grad_norm": Entry(setting="train.max_grad_norm"),
    "train_batch_size": Entry(setting="train.batch_size", joint=True, note="all GPUs share it"),
    "gradient_accumulation_steps": Entry(
        setting="train.global_batch_size", joint=True, note="train_batch_size x gradient_accumulation_steps"
    ),
    "n_gpu": Entry(setting="launch.nproc", same=(0, 1), joint=True, note="each process computes a share of the batch"),
    "num_train_epochs": Entry(setting="train.num_epochs"),
    "max_steps": Entry(setting="train.num_steps", same=(-1,), note="excludes num_train_epochs"),
    "max_seq_length": Entry(
        setting="data.max_input_tokens, data.max_target_tokens", joint=True, note="bounds inputs and targets"
    ),
    "preprocess_inputs": Entry(setting="task.inputs", joint=True, note="true puts a colon between prefix and text"),
    "max_length": Entry(setting="eval.max_new_tokens"),
    "num_beams": Entry(setting="eval.num_beams"),
    "num_return_sequences": Entry(setting="eval.num_candidates", note="at most num_beams"),
    "length_penalty": Entry(setting="eval.length_penalty", note="of the beam search"),
    "repetition_penalty": Entry(setting="eval.repetition_penalty"),
    "do_sample": Entry(same=(False,), note=NO_SAMPLING),
    "top_k": Entry(same=(None,), note=NO_SAMPLING),
    "top_p": Entry(same=(None,), note=NO_SAMPLING),
    "eval_batch_size": Entry(setting="eval.batch_size"),
    "evaluate_during_training": Entry(ignored=True, note="data.eval is evaluated ten times per run"),
    "evaluate_during_training_steps": Entry(setting="eval.every_steps", same=(-1, 0)),
    "evaluate_each_epoch": Entry(note=EPOCHS),
    "evaluate_generated_text": Entry(same=(True,), note="evaluation always generates answers"),
    "use_early_stopping": STOPPING,
    "early_stopping_patience": STOPPING,
    "early_stopping_delta": STOPPING,
    "early_stopping_metric": STOPPING,
    "early_stopping_metric_minimize": Entry(ignored=True, note="each score states its direction"),
    "early_stopping_consider_epochs": Entry(same=(False,), note=EPOCHS),
    "save_steps": Entry(setting="checkpoint.every_steps", same=(-1, 0)),
    "save_model_every_epoch": Entry(note=EPOCHS),
    "fp16": Entry(same=(False,), note="T5 overflows in fp16; train.precision: auto takes bf16 where it can"),
    "tensorboard_dir": Entry(setting="report.sinks", joint=True, same=(None,), note="adds tensorboard"),
    "wandb_project": Entry(setting="report.sinks", joint=True, same=(None,), note="adds wandb; set WANDB_PROJECT"),
    "use_cuda": Entry(setting="device", values={False: "cpu", True: "auto"}),
    "cuda_device": Entry(setting="device", joint=True, same=(-1,), note="cuda:N"),
    "config": Entry(setting="model.dropout", joint=True, same=({},), note="dropout_rate alone"),
    "do_lower_case": Entry(same=(False,), note="lower-case the file; the task unifiedqa has lower_case"),
    "custom_layer_parameters": Entry(same=([],), note="set train.param_groups: [{match: ..., lr: ...}]"),
    "custom_parameter_groups": Entry(same=([],), note="set train.param_groups: [{match: ..., lr: ...}]"),
    "train_custom_parameters_only": Entry(same=(False,), note="set model.freeze"),
    "special_tokens_list": Entry(same=([],), note="the vocabulary stays that of the model"),
    "dataset_class": Entry(same=(None,), note="write a task: docs/tasks.md"),
    "dynamic_quantize": Entry(same=(False,), note="after training: fivetune export --quantization int8"),
    "quantized_model": Entry(same=(False,), note="after training: fivetune export --quantization int8"),
    "trust_remote_code": Entry(same=(False,), note="code from a model's repository is never run"),
    "cosine_schedule_num_cycles": Entry(same=(0.5,), note="schedule cosine falls once"),
    "polynomial_decay_schedule_lr_end": Entry(same=(1e-7,), note="there is no polynomial decay; use linear"),
    "polynomial_decay_schedule_power": Entry(same=(1.0,), note="there is no polynomial decay; use linear"),
    "eval_df": Entry(setting="data.eval", note="the file that pandas reads"),
    "args": Entry(ignored=True, note="the table whose entries are listed"),
}  # fmt: skip


class SimpleTransformers(Importer):
    """T5Model of simpletransformers."""

    title: ClassVar[str] = "simpletransformers' T5Model"
    rules: ClassVar[Mapping[str, Entry]] = RULES
    differences: ClassVar[tuple[str, ...]] = (
        "The columns prefix, input_text and target_text become templates of the task jsonl: {prefix}: {input_text}. "
        "With preprocess_inputs false there is no colon.",
        "max_seq_length bounds inputs and targets (128 by default); FiveTune has a limit for each.",
        "max_length, the cap of generated answers, is 20 tokens there unless it is given; FiveTune takes 99 % of the "
        "targets plus a margin.",
        "train_batch_size is the batch of all GPUs together, times gradient_accumulation_steps.",
        "The default optimizer is Adafactor at a constant 1e-3 without parameter scaling: optimizer.preset: hf. The T5 "
        "paper's (t5-paper) scales each step by the size of the weights.",
        "fp16 is on by default there; T5 overflows in it.",
        "The tokenised data is identified by content, tokenizer and template, not by model name and number of rows.",
        "With evaluate_during_training simpletransformers selects by the loss, FiveTune by a score: eval.metric.",
    )
    examples: ClassVar[Mapping[str, str]] = {
        "train.py": "import pandas as pd\nfrom simpletransformers.t5 import T5Args, T5Model\n\n"
        'train_df = pd.read_csv("train.csv")\neval_df = pd.read_csv("dev.csv")\nmodel_args = T5Args()\n'
        "model_args.max_seq_length = 196\nmodel_args.train_batch_size = 8\nmodel_args.gradient_accumulation_steps = 4\n"
        "model_args.num_train_epochs = 3\nmodel_args.fp16 = False\nmodel_args.evaluate_during_training = True\n"
        "model_args.use_early_stopping = True\nmodel_args.early_stopping_patience = 2\nmodel_args.colour = 'blue'\n"
        "model_args.save_steps = -1\n"
        'model = T5Model("t5", "google-t5/t5-small", args=model_args)\n'
        "model.train_model(train_df, eval_data=eval_df)\n",
        "dict.py": 'import pandas as pd\n\nargs = {"learning_rate": 3e-4, "optimizer": "AdamW", "max_seq_length": 64, '
        '"scheduler": "linear_schedule_with_warmup", "warmup_ratio": 0.1, "manual_seed": 7, "num_beams": 4, '
        '"max_length": 50, "preprocess_inputs": False}\n'
        'model = T5Model("mt5", "google/mt5-small", args=args, use_cuda=False)\n'
        'model.train_model(pd.read_csv("train.tsv", sep="\\t"))\n',
        "model_args.json": '{"model_class": "T5Model", "model_name": "t5-base", "adafactor_relative_step": false, '
        '"adafactor_scale_parameter": false, "learning_rate": 0.001, "max_seq_length": 512, "train_batch_size": 16, '
        '"optimizer": "Adafactor", "scheduler": "constant_schedule_with_warmup", "warmup_ratio": 0.06}\n',
    }

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith(".json"):
            return '"train_batch_size"' in source.text or '"model_class"' in source.text
        return source.name.endswith((".py", ".ipynb")) and "T5Model(" in source.text

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        if source.name.endswith(".json"):
            return {name: Argument(value) for name, value in read_json_table(source).items()}
        return _read_calls(parse_python(source), source.name)

    def convert(self, source: RawConfig) -> ImportedRecipe:
        recipe = super().convert(source)
        if source.name.endswith(".json") or "task.inputs" not in recipe.settings:
            return recipe
        script = Script(parse_python(source))
        read_changes(script)
        recipe.findings += script.findings
        between = str(recipe.settings["task.inputs"]).removeprefix("{prefix}").removesuffix("{input_text}")
        inputs = Text((Column("prefix"), between, Column("input_text")))
        for name, text in (("inputs", inputs), ("targets", Text((Column("target_text"),)))):
            recipe.settings[f"task.{name}"] = format_text(resolve_changes(script, text))
        return recipe

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        recipe.set_defaults({**DEFAULTS, **ADAFACTOR_DEFAULTS}, "default of T5Args")
        length = values.get("max_seq_length")
        if length is not None:
            recipe.set("data.max_input_tokens", length, f"max_seq_length {length}")
            recipe.set("data.max_target_tokens", length, f"max_seq_length {length}, which bounds targets too")
        _complete_optimizer(recipe, values)
        if not values.get("warmup_steps") and values.get("scheduler") != "constant_schedule":
            recipe.set("schedule.warmup_fraction", read_number(recipe, values, "warmup_ratio", 0.06), "warmup_ratio")
        num_processes = max(1, int(read_number(recipe, values, "n_gpu", 1)))
        micro = read_count(recipe, values, "train_batch_size", 8)
        if micro % num_processes:
            recipe.leave_out("n_gpu", f"train_batch_size {micro} is not a multiple of it, and the GPUs share the batch")
            num_processes = 1
        accumulation = read_count(recipe, values, "gradient_accumulation_steps", 1)
        given = "train_batch_size" in values
        names = ("train_batch_size", "gradient_accumulation_steps")
        micro //= num_processes
        set_batch(recipe, micro=micro, accumulation=accumulation, num_processes=num_processes, names=names, given=given)
        between = ": " if values.get("preprocess_inputs", True) else ""
        reason = "T5Model reads pairs of texts with a prefix"
        inputs = f"{{prefix}}{between}{{input_text}}"
        set_plain_task(recipe, inputs, "{target_text}", metrics=["rouge"], score="rougeL_f1", reason=reason)
        _complete_rest(recipe, values)


def _read_calls(python: PythonSource, name: str) -> dict[str, Argument]:
    """Read the arguments of T5Model and of train_model. Raises ConfigError unless T5Model is called once."""
    models = python.find_calls("T5Model")
    if len(models) != 1:
        raise ConfigError(f"{name}: calls T5Model {len(models)} times, and one call is needed. Give a file with one.")
    found = python.read_call(models[0], ("model_type", "model_name", "args", "tokenizer", "use_cuda"))
    tables = [one.value for one in models[0].keywords if one.arg == "args"] or models[0].args[2:3]
    for node in tables:
        found.pop("args", None)
        found |= python.read_table(node)
    trainings = python.find_calls("train_model")
    for call in trainings[:1]:
        found |= python.read_call(call, ("train_data", "output_dir", "show_running_loss", "args", "eval_data"))
    return {key: one for key, one in found.items() if key not in ("show_running_loss",)}


def _complete_optimizer(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set the options of the chosen optimizer, and remove those of the other."""
    if recipe.settings["optimizer.name"] == "adafactor":
        scaled = bool(values.get("adafactor_scale_parameter", False))
        recipe.set("optimizer.preset", "t5-paper" if scaled else "hf", f"adafactor_scale_parameter {scaled}")
        if recipe.settings.get("optimizer.relative_step"):
            recipe.drop("optimizer.lr")
        return
    for name in ("relative_step", "warmup_init", "clip_threshold", "decay_rate", "beta1"):
        recipe.drop(f"optimizer.{name}")
    if "adam_epsilon" in values:
        recipe.set("optimizer.eps", values["adam_epsilon"], "adam_epsilon")
    betas = values.get("adam_betas")
    if isinstance(betas, list | tuple) and len(betas) == 2:
        for name, beta in zip(("beta1", "beta2"), betas, strict=True):
            recipe.set(f"optimizer.{name}", beta, "adam_betas")


def _complete_rest(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set early stopping, trackers, device and dropout."""
    if "train.num_steps" in recipe.settings:
        recipe.drop("train.num_epochs")
    if values.get("use_early_stopping"):
        stopping: JsonTable = {"patience": read_count(recipe, values, "early_stopping_patience", 3)}
        if values.get("early_stopping_delta"):
            stopping["min_delta"] = values["early_stopping_delta"]
        if str(values.get("early_stopping_metric", "eval_loss")) == "eval_loss":
            stopping["metric"] = "loss"
        recipe.set("train.early_stopping", stopping, "use_early_stopping")
    sinks = [
        sink for sink, name in (("tensorboard", "tensorboard_dir"), ("wandb", "wandb_project")) if values.get(name)
    ]
    if sinks:
        recipe.set("report.sinks", sinks, "tensorboard_dir, wandb_project")
    device = values.get("cuda_device")
    if type(device) is int and device >= 0 and values.get("use_cuda", True):
        recipe.set("device", f"cuda:{device}", "cuda_device")
    config = values.get("config")
    if isinstance(config, Mapping) and config:
        if "dropout_rate" in config:
            recipe.set("model.dropout", config["dropout_rate"], "config")
        for name in config.keys() - {"dropout_rate"}:
            recipe.findings.append(Finding(f"config: {name}", "left out", (), "the model keeps its own config.json"))
