"""Arguments of transformers' Trainer, however they are given: what becomes of each, and what several decide together.

In: arguments by name. Out: settings and findings in an ImportedRecipe; the rules stand in `config/aliases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import yaml

from fivetune.config.aliases import ALIASES, NO_EFFECT, UNCHANGED, NoEquivalentError, is_known, translate_argument
from fivetune.errors import ConfigError
from fivetune.start.importers import NO_EFFECT as CHANGES_NOTHING
from fivetune.start.importers import (
    NOT_LITERAL,
    SAME,
    Argument,
    Computed,
    ImportedRecipe,
    RawConfig,
    Rules,
    list_literals,
    read_count,
    read_source_file,
    set_batch,
)
from fivetune.start.importers._shell import read_environment
from fivetune.types import JsonTable, JsonValue

TRAINER_DEFAULTS: JsonTable = {  # defaults of transformers' TrainingArguments that differ from FiveTune's
    "run.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "schedule.name": "linear",
    "train.num_epochs": 3,
}
ROUGE: JsonTable = {"name": "rouge", "types": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": True}
EXAMPLE = re.compile(r"\brun_(seq2seq_qa|qa|summarization|translation)(_no_trainer)?\.py\b")  # of transformers
NODES = ("nnodes", "num_machines", "num_nodes")
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_processes", "num_gpus")  # num_processes: of all nodes
ACCUMULATION = {"gradient_accumulation_steps": ("train.global_batch_size", "batch per device x accumulation x devices")}
SWITCH: dict[str | float, JsonValue] = {True: "cpu", "True": "cpu", "": "cpu"}
ACCELERATE = {  # entries of accelerate's file with the meaning of an argument
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping": "launcher: gradient_clipping",
}
LAUNCHER = Rules(  # torchrun, accelerate and deepspeed
    settings={
        "mixed_precision": "train.precision",
        "distributed_type": "strategy.name",
        "use_cpu": "device",
        "cpu": "device",
        "gradient_clipping": "train.max_grad_norm",
        "max_grad_norm": "train.max_grad_norm",
    },
    values={
        "mixed_precision": {"no": "fp32", "bf16": "bf16"},
        "distributed_type": {"FSDP": "fsdp", "DEEPSPEED": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"},
        "use_cpu": SWITCH,
        "cpu": SWITCH,
    },
    unchanged={
        "mixed_precision": ((), UNCHANGED["fp16"][1]),
        "distributed_type": (("NO",), ""),
        "use_cpu": ((False,), ""),
        **dict.fromkeys(NODES, ((1, "1"), "")),
    },
    no_effect=(),
    joint={
        **dict.fromkeys((*PROCESSES, "CUDA_VISIBLE_DEVICES"), ("launch.nproc", "each device has a batch of its own")),
        **dict.fromkeys(NODES, ("launch.nnodes", "torchrun or fivetune launch starts them")),
    },
)


def apply_arguments(recipe: ImportedRecipe, own: Rules, arguments: Mapping[str, Argument]) -> dict[str, JsonValue]:
    """Set what the arguments of the Trainer, of the program alone and of the launcher give. Returns the known values.

    Args:
        own: rules of arguments that the program alone has, or that several arguments decide; they win.
    """
    values = list_literals(arguments)
    names = own.list_names()
    for name, argument in arguments.items():
        if name.startswith("launcher: "):
            name = name.removeprefix("launcher: ")
            if name in LAUNCHER.list_names():
                recipe.apply_rule(LAUNCHER, name, argument)
            else:
                reason = "of the launcher; fivetune train starts its processes"
                recipe.add(recipe.describe(name, argument), "left out", reason)
        elif name in names or not is_known(name):
            recipe.apply_rule(own, name, argument)
        else:
            _translate(recipe, name, argument, values)
    return values


def _translate(recipe: ImportedRecipe, name: str, argument: Argument, values: Mapping[str, JsonValue]) -> None:
    """Set what an argument of the Trainer gives, and add the finding."""
    value = argument.value
    written = recipe.describe(name, argument)
    if name in NO_EFFECT:
        recipe.add(written, "no effect", CHANGES_NOTHING)
        return
    if isinstance(value, Computed):
        recipe.add(written, "left out", NOT_LITERAL)
        return
    if name in ("eval_steps", "save_steps", "logging_steps") and isinstance(value, float) and 0 < value < 1:
        total = values.get("max_steps")
        if not isinstance(total, int) or total < 1:
            reason = f"a share of the run, whose steps are not known here; {ALIASES[name]} counts"
            recipe.add(written, "left out", reason)
            return
        value = max(1, round(total * value))
    try:
        # transformers draws no answer without do_sample, whatever else is given.
        beside = {"do_sample": False, **values}
        found = translate_argument(name, value, where=written, beside=beside) if value is not None else {}
    except ConfigError as error:
        reason = error.advice if isinstance(error, NoEquivalentError) else str(error).removeprefix(f"{written}: ")
        recipe.add(written, "left out", reason)
        return
    for setting, one in found.items():
        recipe.set(setting, one, written)
    reason = "" if found else SAME
    if name == "dataset_config_name":
        reason = "a part of data.train and data.eval"
    recipe.add(written, "set" if found else "same", reason, tuple(found))


def complete_training(recipe: ImportedRecipe, values: Mapping[str, JsonValue], *, defaults: JsonTable, by: str) -> None:
    """Add defaults, the batch, and decide between arguments that exclude each other.

    Args:
        by: what has these defaults. values: all arguments.
    """
    recipe.set_defaults(defaults, f"default of {by}")
    if "data.eval" in recipe.settings and "data.eval_share" in recipe.settings:
        recipe.drop("data.eval_share")
        recipe.leave_out("validation_split_percentage", "applies only without validation data, which is given")
    # The Trainer's steps per epoch depend on all devices; so does the global batch.
    name = "per_device_train_batch_size"
    processes, nodes = count_processes(values)
    set_batch(recipe, values, name, micro=read_count(recipe, values, name, 8), processes=processes, nodes=nodes)
    if "train.num_steps" in recipe.settings:
        recipe.drop("train.num_epochs")
        recipe.leave_out("num_train_epochs", "max_steps is given, which wins")
    if values.get("warmup_ratio") and values.get("warmup_steps"):
        recipe.drop("schedule.warmup_fraction")
        recipe.leave_out("warmup_ratio", "warmup_steps is given, which wins")
    if recipe.settings["optimizer.name"] == "adafactor":
        recipe.set("optimizer.preset", "hf", "transformers' Adafactor does not scale steps by the weights")
        for name, setting in (("beta1", "beta1"), ("beta2", "beta2"), ("epsilon", "eps")):
            recipe.drop(f"optimizer.{setting}")
            recipe.leave_out(f"adam_{name}", "AdamW's; Adafactor does not use it")
    metric = recipe.settings.get("eval.metric")
    if metric in ROUGE["types"]:
        recipe.settings["eval.metric"] = f"{metric}_f1"
    if "model.path" not in recipe.settings and "model.config" in recipe.settings:
        recipe.set("model.init", "random", "no weights are named")


def count_processes(values: Mapping[str, JsonValue]) -> tuple[int, int]:
    """Number of processes of all nodes that a launcher starts, or of GPUs that the Trainer feeds; number of nodes.

    >>> count_processes({"launcher: nnodes": "2", "launcher: nproc_per_node": "4"})
    (8, 2)
    """
    devices = str(values.get("launcher: CUDA_VISIBLE_DEVICES")).count(",") + 1
    nodes = _read_digits(values, NODES) or 1
    of_all = _read_digits(values, ("num_processes",))
    return of_all or nodes * (_read_digits(values, PROCESSES) or devices), nodes


def _read_digits(values: Mapping[str, JsonValue], names: tuple[str, ...]) -> int:
    """The first number that a flag of the launcher gives; 0 without one, or for a range such as 1:4."""
    for name in names:
        given = str(values.get(f"launcher: {name}"))
        if given.isdigit():
            return int(given)
    return 0


def read_accelerate(source: RawConfig) -> dict[str, Argument]:
    """Read accelerate's YAML: how processes are started; the entries of its inner tables by their own names."""
    try:
        table = yaml.safe_load(source.text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source.name}: not valid YAML: {' '.join(str(error).split())}. Correct the file.") from None
    found: dict[str, Argument] = {}
    if not isinstance(table, dict):
        return found
    entries: JsonTable = {}
    for name, value in cast("JsonTable", table).items():
        if isinstance(value, dict):
            entries |= {f"{name}.{key}": one for key, one in cast("JsonTable", value).items()}
        else:
            entries[name] = value
    if entries.get("mixed_precision") is False:  # `no` is false in YAML
        entries["mixed_precision"] = "no"
    for name, value in entries.items():
        found[ACCELERATE.get(name, f"launcher: {name}")] = Argument(value)
    return found


def read_launcher(words: list[str], source: RawConfig) -> dict[str, Argument]:
    """Read what stands before the script: variables, and the flags of torchrun, accelerate or deepspeed.

    >>> [one.value for one in read_launcher(["torchrun", "--nproc_per_node", "4"], RawConfig("a.sh", "")).values()]
    ['4']
    """
    found: dict[str, Argument] = {f"launcher: {name}": Argument(one) for name, one in read_environment(words).items()}
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given = value if equals or after.startswith("-") else after
            path = Path(source.name).parent / given
            if name == "config_file" and path.is_file():
                found = read_accelerate(read_source_file(str(path))) | found
            else:
                found[f"launcher: {name}"] = Argument(given)
    return found
