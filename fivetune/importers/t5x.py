"""The gin file of a fine-tuning by t5x (finetune.gin with a model's file), and operative_config.gin of t5.

In: macros, bindings and the names of included files. Out: settings that train as t5x does: steps counted from the
pre-trained checkpoint, Adafactor scaled by the weights, the learning rate of the steps that fine-tuning sees.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Computed,
    Entry,
    Finding,
    ImportedRecipe,
    Importer,
    RawConfig,
    read_count,
    read_number,
)
from fivetune.importers._gin import parse_gin
from fivetune.types import JsonTable, JsonValue

PRETRAINED_STEPS = 1_000_000  # of the public T5, T5.1.1, mT5 and ByT5 checkpoints
FAMILIES = {
    "t5_1_1": "google/t5-v1_1-{}",
    "t5_1_0": "google-t5/t5-{}",
    "mt5": "google/mt5-{}",
    "byt5": "google/byt5-{}",
    "umt5": "google/umt5-{}",
    "flan_t5": "google/flan-t5-{}",
}
TASKS: dict[str, JsonTable] = {
    "squad_v010": {"task.name": "squad", "task.pad_punctuation": True},
    "squad_v010_allanswers": {"task.name": "squad", "task.pad_punctuation": True},
}
NAMES = {  # parameters of t5x's and t5's functions -> the macro of finetune.gin that they have
    "mixture_or_task_name": "MIXTURE_OR_TASK_NAME",
    "mixture_name": "MIXTURE_OR_TASK_NAME",
    "task_feature_lengths": "TASK_FEATURE_LENGTHS",
    "sequence_length": "TASK_FEATURE_LENGTHS",
    "batch_size": "BATCH_SIZE",
    "total_steps": "TRAIN_STEPS",
    "train_steps": "TRAIN_STEPS",
    "random_seed": "RANDOM_SEED",
    "path": "INITIAL_CHECKPOINT_PATH",
    "init_checkpoint": "INITIAL_CHECKPOINT_PATH",
    "model_dir": "MODEL_DIR",
    "dropout_rate": "DROPOUT_RATE",
    "label_smoothing": "LABEL_SMOOTHING",
    "z_loss": "Z_LOSS",
    "loss_normalizing_factor": "LOSS_NORMALIZING_FACTOR",
    "eval_period": "EVAL_PERIOD",
    "eval_steps": "EVAL_STEPS",
    "num_examples": "EVALUATOR_NUM_EXAMPLES",
    "write_n_results": "JSON_WRITE_N_RESULTS",
    "use_hardware_rng": "USE_HARDWARE_RNG",
    "use_cached": "USE_CACHED_TASKS",
    "use_memory_cache": "EVALUATOR_USE_MEMORY_CACHE",
    "module": "MIXTURE_OR_TASK_MODULE",
    "learning_rate": "base_learning_rate",
    "optimizer": "OPTIMIZER",
    "optimizer_def": "OPTIMIZER",
    "model": "MODEL",
}
PACKED = "a packed row holds several examples: multiply train.global_batch_size by their number for the same step"
EVALUATION = Entry(ignored=True, note="of the evaluation data; FiveTune evaluates all of data.eval")
OVERRIDDEN = Entry(note="another binding of the same parameter counts")
MICRO_BATCH = 8  # examples per forward pass without num_microbatches
SCHEDULE = Entry(setting="optimizer.lr, schedule.name", joint=True, note="the rate of the steps of fine-tuning")


class T5X(Importer):
    """gin files of t5x."""

    title: ClassVar[str] = "t5x"
    written: ClassVar[str] = "{} ="
    rules: ClassVar[Mapping[str, Entry]] = {
        "include": Entry(setting="model.path", joint=True, note="the model's file; t5x's defaults of finetune.gin"),
        "INITIAL_CHECKPOINT_PATH": Entry(setting="model.path, train.num_steps", joint=True, note="its model and step"),
        "MIXTURE_OR_TASK_NAME": Entry(setting="task.name", joint=True, note="squad; others become the task jsonl"),
        "TASK_FEATURE_LENGTHS": Entry(
            setting="data.max_input_tokens, data.max_target_tokens", joint=True, note="inputs and targets"
        ),
        "TRAIN_STEPS": Entry(setting="train.num_steps", joint=True, note="less the steps of pre-training"),
        "BATCH_SIZE": Entry(
            setting="train.global_batch_size, train.batch_size", joint=True,
            note="rows over all devices; ('tokens_per_batch', N) of t5 is divided by the input length",
        ),
        "DROPOUT_RATE": Entry(setting="model.dropout"),
        "RANDOM_SEED": Entry(setting="run.seed", same=(None,), note="without it t5x draws a seed"),
        "MODEL_DIR": Entry(setting="run.dir"),
        "EVAL_PERIOD": Entry(setting="eval.every_steps"),
        "EVAL_STEPS": Entry(ignored=True, note="all of data.eval is evaluated; eval.max_examples bounds it"),
        "LABEL_SMOOTHING": Entry(setting="loss.label_smoothing"),
        "Z_LOSS": Entry(setting="loss.z_loss"),
        "LOSS_NORMALIZING_FACTOR": Entry(
            ignored=True, note="Adafactor's steps do not depend on the scale of the loss, which is a mean over tokens"
        ),
        "factors": SCHEDULE,
        "base_learning_rate": SCHEDULE,
        "warmup_steps": SCHEDULE,
        "step_offset": Entry(setting="schedule.warmup_steps", joint=True, note="steps are counted from it"),
        "min_learning_rate": Entry(setting="schedule.final_fraction", joint=True, note="of linear and cosine decay"),
        "decay_factor": Entry(joint=True, setting="schedule.final_fraction", note="slope of linear_decay"),
        "period": Entry(setting="checkpoint.every_steps", same=(None,)),
        "keep": Entry(setting="checkpoint.keep", joint=True, same=(None,), note="at least 2, beside the best"),
        "num_microbatches": Entry(setting="train.batch_size", joint=True, same=(None,), note="batch / micro-batches"),
        "num_partitions": Entry(same=(1,), note="set strategy.name: tensor or fsdp, and launch.nproc"),
        "model_parallel_submesh": Entry(same=(None,), note="set strategy.name: tensor or fsdp, and launch.nproc"),
        "pack": Entry(same=(False,), note=PACKED),
        "seed": Entry(setting="run.seed", same=(None,), note="of the data; run.seed is that of all"),
        "shuffle": Entry(same=(True,), note="training data is always shuffled"),
        "split": Entry(same=("train",), note="give the files of data.train"),
        "num_decodes": Entry(setting="eval.num_beams", note="of t5x's beam search"),
        "max_decode_len": Entry(setting="eval.max_new_tokens"),
        "alpha": Entry(setting="eval.length_penalty", note="of the beam search; the formulas differ slightly"),
        "decay_rate": Entry(setting="optimizer.decay_rate", joint=True, note="t5x writes it without the sign"),
        "multiply_by_parameter_scale": Entry(
            setting="optimizer.preset", values={True: "t5-paper", False: "hf"}, closed=True
        ),
        "OPTIMIZER": Entry(setting="optimizer.name", joint=True, note="adafactor or adamw"),
        "beta1": Entry(setting="optimizer.beta1"),
        "beta2": Entry(setting="optimizer.beta2"),
        "weight_decay": Entry(setting="optimizer.weight_decay"),
        **{name: Entry(ignored=True, note="FiveTune's cache of tokenised data is always on")
           for name in ("USE_CACHED_TASKS", "EVALUATOR_USE_MEMORY_CACHE")},
        **{name: Entry(ignored=True)
           for name in ("USE_HARDWARE_RNG", "JSON_WRITE_N_RESULTS", "save_dataset", "dtype", "mode",
                        "ACTIVATION_DTYPE", "ACTIVATION_PARTITIONING_DIMS", "use_custom_packing_ops", "mesh_shape",
                        "mesh_devices", "layout_rules", "logical_factor_rules", "RESET_STATE_AFTER",
                        "logger_cls", "summarize_config_fn", "logical_axis_rules")},
        "EVALUATOR_NUM_EXAMPLES": Entry(setting="eval.max_examples", same=(None,)),
        "MIXTURE_OR_TASK_MODULE": Entry(same=(None,), note="tasks of SeqIO are Python; write a task: docs/tasks.md"),
        **{name: Entry(ignored=True, note="an object of t5x; the entries of its file are listed beside it")
           for name in ("MODEL", "VOCABULARY", "input_vocabulary",
                        "output_vocabulary", "trainer_cls", "checkpoint_cfg", "partitioner", "learning_rate_fn",
                        "train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg", "restore", "save",
                        "inference_evaluator_cls")},
        "import": Entry(ignored=True, note="nothing is imported"),
    }  # fmt: skip
    differences: ClassVar[tuple[str, ...]] = (
        "TRAIN_STEPS counts from the first step of pre-training. train.num_steps is the difference to the step in the "
        "name of INITIAL_CHECKPOINT_PATH, 1,000,000 without one.",
        "The schedule sees the same steps: a warm-up of 1,000 steps is over when fine-tuning begins, and rsqrt_decay "
        "falls from 1/sqrt(1,000,000) = 1e-3 hardly at all. The recipe has the rate of those steps.",
        "BATCH_SIZE counts rows of all devices. With pack = True, the default of t5x, a row of TASK_FEATURE_LENGTHS "
        "holds several examples; BATCH_SIZE examples are then a smaller step. Multiply train.global_batch_size by the "
        "mean number of examples per row for the same step. t5's tokens_per_batch is divided by the input length.",
        "Adafactor is that of the T5 paper (optimizer.preset: t5-paper): steps are scaled by the size of the weights.",
        "DROPOUT_RATE is 0.1 in finetune.gin, and so is model.dropout.",
        "Checkpoints of t5x are read as the models that were published from them on the hub. One of your own: convert "
        "it with transformers' convert_t5x_checkpoint_to_pytorch.py, and give the folder as model.path.",
        "Tasks of SeqIO are Python code. squad_v010_allanswers becomes the task squad, which writes the same text if "
        "task.pad_punctuation is true; other tasks become jsonl with the columns inputs and targets.",
        "eval.every_steps counts the steps of fine-tuning.",
    )
    examples: ClassVar[Mapping[str, str]] = {
        "train.gin": "from __gin__ import dynamic_registration\nimport __main__ as train_script\n"
        "from t5.data import mixtures\nfrom t5x import utils\n\n"
        "include 't5x/examples/t5/t5_1_1/small.gin'\ninclude 't5x/configs/runs/finetune.gin'\n\n"
        'MIXTURE_OR_TASK_NAME = "squad_v010_allanswers"\n'
        'TASK_FEATURE_LENGTHS = {"inputs": 512, "targets": 97}\n'
        "TRAIN_STEPS = 1_015_000  # 1,000,000 pre-trained steps + 15,000\nDROPOUT_RATE = 0.1\nBATCH_SIZE = 128\n"
        'INITIAL_CHECKPOINT_PATH = "gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000"\n'
        "LOSS_NORMALIZING_FACTOR = 233472\nCOLOUR = 'blue'\n\n"
        "utils.create_learning_rate_scheduler:\n  factors = 'constant * rsqrt_decay'\n  base_learning_rate = 1.0\n"
        "  warmup_steps = 10000\n\ntrain/utils.DatasetConfig.pack = True\ntrain/utils.DatasetConfig.seed = 3\n"
        "trainer.Trainer.num_microbatches = 8\n"
        "train_script.train:\n  eval_period = 500\nutils.SaveCheckpointConfig:\n  period = 500\n  keep = 3\n",
        "operative_config.gin": "run.batch_size = ('tokens_per_batch', 65536)\n"
        "run.train_steps = 1010000\nutils.get_vocabulary.mixture_or_task_name = 'my_task'\n"
        "run.sequence_length = {'inputs': 512, 'targets': 114}\n"
        "learning_rate_schedules.constant_learning_rate.learning_rate = 0.001\n"
        "run.init_checkpoint = 'gs://t5-data/pretrained_models/base/model.ckpt-999900'\n",
    }

    def can_read(self, source: RawConfig) -> bool:
        return source.name.endswith(".gin")

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        gin = parse_gin(source)
        found = {f"include {name}": Argument("") for name in gin.includes}
        found |= {f"import {name}": Argument("") for name in gin.imports}
        places: dict[str, str] = {}
        for name, argument in gin.bindings.items():
            if name.startswith(("train_eval/", "infer_eval/")):
                found[name] = argument
                continue
            parameter = re.split(r"[./]", name)[-1]
            short = NAMES.get(parameter, parameter)
            if short == "OPTIMIZER" and isinstance(argument.value, Computed):
                kind = re.search(r"(\w+)\(\)", argument.value.code)
                argument = Argument(kind[1].lower() if kind else argument.value.code, argument.where)
            if short in found and found[short].value != argument.value:
                found[f"overridden: {places[short]}"] = found[short]
            places[short], found[short] = name, argument
        return found

    def get_rule(self, name: str) -> Entry | None:
        if name.startswith(("train_eval/", "infer_eval/")):
            return EVALUATION
        if name.startswith("overridden: "):
            return OVERRIDDEN
        return self.rules.get(name.partition(" ")[0])

    def describe_argument(self, name: str, value: JsonValue, where: str = "") -> str:
        if name.startswith(("include ", "import ")):
            return name
        return super().describe_argument(name.removeprefix("overridden: "), value, where)

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        start = _find_first_step(values)
        _complete_model(recipe, values)
        _complete_task(recipe, values)
        total = read_count(values, "TRAIN_STEPS", 0) if "TRAIN_STEPS" in values else None
        if total is None:
            recipe.findings.append(Finding("TRAIN_STEPS", "left out", (), "is not in the file: train.num_epochs is 3"))
        elif total <= start:
            raise ConfigError(
                f"TRAIN_STEPS: {total:,} is not more than {start:,}, the step of the checkpoint from which it counts. "
                "Correct it, or INITIAL_CHECKPOINT_PATH."
            )
        else:
            recipe.set("train.num_steps", total - start, f"TRAIN_STEPS {total:,} less {start:,} of the checkpoint")
        _complete_batch(recipe, values)
        if "pack" not in values and isinstance(values.get("BATCH_SIZE", 128), int):
            recipe.findings.append(Finding("pack = True, the default of t5x", "left out", (), PACKED))
        adamw = "adam" in str(values.get("OPTIMIZER", "")) or any("adamw" in name for name in values)
        recipe.set("optimizer.name", "adamw" if adamw else "adafactor", "OPTIMIZER")
        if adamw:
            recipe.drop("optimizer.preset")
        else:
            recipe.drop("optimizer.beta2")
            if "optimizer.preset" not in recipe.settings:
                recipe.set("optimizer.preset", "t5-paper", "t5x scales steps by the size of the weights")
            if "decay_rate" in values:
                recipe.set("optimizer.decay_rate", -abs(read_number(values, "decay_rate", 0.8)), "decay_rate")
        _complete_schedule(recipe, values, start=start, num_steps=(total or start) - start)
        if "keep" in values and values["keep"] is not None:
            recipe.set("checkpoint.keep", max(2, read_count(values, "keep", 2)), "keep")


def _find_first_step(values: Mapping[str, JsonValue]) -> int:
    """The step of pre-training at which fine-tuning begins."""
    path = str(values.get("INITIAL_CHECKPOINT_PATH") or "")
    if match := re.search(r"(?:checkpoint_|ckpt-)(\d+)", path):
        return int(match[1])
    total = values.get("TRAIN_STEPS")
    return PRETRAINED_STEPS if isinstance(total, int) and total > PRETRAINED_STEPS else 0


def find_published_model(text: str) -> str | None:
    """The hub name of the model of a checkpoint or of a model's gin file; None for others.

    >>> find_published_model("gs://t5-data/pretrained_models/t5x/mt5_base/checkpoint_1000000")
    'google/mt5-base'
    >>> find_published_model("t5x/examples/t5/t5_1_1/small.gin"), find_published_model("gs://mine/checkpoint_5")
    ('google/t5-v1_1-small', None)
    """
    size = r"(small|base|large|xl|xxl|3B|11B)\b"
    text = re.sub(r"/checkpoint.*|/model\.ckpt.*", "", text)
    if match := re.search(rf"t5_1_1_lm100k_{size}", text):
        return f"google/t5-{match[1]}-lm-adapt"
    for family, name in FAMILIES.items():
        if match := re.search(rf"(?:^|/){family}[/_]{size}", text):
            return name.format(match[1].lower())
    match = re.search(rf"pretrained_models/{size}", text)
    return FAMILIES["t5_1_0"].format(match[1].lower()) if match else None


def _complete_model(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set the published model of the checkpoint, else that of the included file."""
    if "DROPOUT_RATE" not in values:
        recipe.set("model.dropout", 0.1, "default of finetune.gin")
    path = str(values.get("INITIAL_CHECKPOINT_PATH") or "")
    includes = [name.removeprefix("include ") for name in values if name.startswith("include ")]
    for text in (path, *includes):
        if model := find_published_model(text):
            recipe.set("model.path", model, f"published from {text}")
            return
    if path:
        recipe.findings.append(
            Finding("INITIAL_CHECKPOINT_PATH", "left out", (), "not a published checkpoint: convert it, see model.path")
        )


def _complete_task(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set task and limits."""
    name = str(values.get("MIXTURE_OR_TASK_NAME") or "")
    for setting, value in TASKS.get(name, {"task.name": "jsonl"}).items():
        recipe.set(setting, value, f"MIXTURE_OR_TASK_NAME {name}")
    lengths = values.get("TASK_FEATURE_LENGTHS")
    if isinstance(lengths, Mapping):
        for feature, setting in (("inputs", "data.max_input_tokens"), ("targets", "data.max_target_tokens")):
            if feature in lengths:
                recipe.set(setting, lengths[feature], "TASK_FEATURE_LENGTHS")


def _complete_batch(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    """Set examples per step and micro-batch; tokens per batch are divided by the length of an input."""
    given, reason = values.get("BATCH_SIZE", 128), "BATCH_SIZE, rows over all devices"
    if isinstance(given, list | tuple) and len(given) == 2 and given[0] == "tokens_per_batch":
        length = read_count(recipe.settings, "data.max_input_tokens", 512)
        reason = f"{given[1]:,} tokens per batch / {length:,} input tokens"
        given = max(1, int(given[1]) // length)
    total = read_count({"BATCH_SIZE": given}, "BATCH_SIZE", 128)
    passes = read_count(values, "num_microbatches", 1) if values.get("num_microbatches") else 0
    if passes and total % passes:
        raise ConfigError(f"num_microbatches: {passes} does not divide BATCH_SIZE {total}. Change one of them.")
    micro = total // passes if passes else math.gcd(total, MICRO_BATCH)
    recipe.set("train.batch_size", micro, "num_microbatches" if passes else "micro-batch, as t5x states none")
    recipe.set("train.global_batch_size", total, reason)


def _complete_schedule(recipe: ImportedRecipe, values: Mapping[str, JsonValue], *, start: int, num_steps: int) -> None:
    """Set learning rate and schedule so that they are those of t5x's steps from `start` on."""
    factors = [one.strip() for one in str(values.get("factors", "constant")).split("*")]
    base, warmup = (read_number(values, *pair) for pair in (("base_learning_rate", 1e-3), ("warmup_steps", 1000)))
    warmup = max(0, int(warmup))
    start = max(0, start - int(read_number(values, "step_offset", 0)))
    first, rest = max(start, warmup, 1), max(0, warmup - start)
    lr, name, reason = base, "constant", f"base_learning_rate {base:g}"
    if "rsqrt_decay" in factors or "rsqrt_normalized_decay" in factors:
        scale = math.sqrt(warmup) if "rsqrt_normalized_decay" in factors else 1.0
        lr, name = base * scale / math.sqrt(first), "inverse_sqrt"
        reason = f"base_learning_rate {base:g} at step {first:,} of t5x"
        recipe.set("schedule.timescale", first, "steps of t5x before fine-tuning, or its warm-up")
    elif "linear_decay" in factors:
        slope, least = read_number(values, "decay_factor", 0.5), read_number(values, "min_learning_rate", 1e-8)
        lr = max(base * (1 + slope * (warmup - first)), least)
        end = max(base * (1 + slope * (warmup - max(first, start + num_steps))), least)
        name = "linear"
        recipe.set("schedule.final_fraction", _round_number(end / lr), "decay_factor, min_learning_rate")
    elif "cosine_decay" in factors:
        name = "cosine"
    for factor in set(factors) & {"decay_every", "cosine_decay"}:
        reason_out = "has no counterpart" if factor == "decay_every" else "its cycles are; the schedule falls once"
        recipe.findings.append(Finding(f"factors: {factor}", "left out", (), reason_out))
    recipe.set("optimizer.lr", _round_number(lr), reason)
    recipe.set("schedule.name", name, f"factors {' * '.join(factors)}")
    if rest and {"linear_warmup", "linear_decay"} & set(factors):
        recipe.set("schedule.warmup_steps", rest, f"warmup_steps {warmup:,} less {start:,} steps before")


def _round_number(number: float) -> float:
    return float(f"{number:.6g}")
