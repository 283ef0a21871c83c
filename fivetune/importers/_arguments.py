"""Arguments of transformers' Trainer, however they are given: what becomes of each, and what several decide together.

In: arguments by name. Out: settings and findings in an ImportedRecipe; the rules are those of `config/aliases.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

import yaml

from fivetune.config.aliases import (
    ALIASES,
    ANOTHER_DEFAULT,
    NO_EFFECT,
    NO_EQUIVALENT,
    UNCHANGED,
    VALUE_ALIASES,
    NoEquivalentError,
    is_known,
    translate_argument,
)
from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Entry,
    Finding,
    ImportedRecipe,
    Importer,
    RawConfig,
    read_count,
    read_source_file,
    set_batch,
)
from fivetune.importers._shell import read_environment
from fivetune.types import JsonTable, JsonValue

TRAINER_DEFAULTS: JsonTable = {  # defaults of transformers' TrainingArguments that differ from FiveTune's
    "run.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "schedule.name": "linear",
    "train.num_epochs": 3,
}
ROUGE: JsonTable = {"name": "rouge", "types": ["rouge1", "rouge2", "rougeL", "rougeLsum"], "stemmer": True}
NODES = ("nnodes", "num_machines", "num_nodes")
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_processes", "num_gpus")  # num_processes: of all nodes
STRATEGIES = {"FSDP": "fsdp", "DEEPSPEED": "fsdp", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}  # of accelerate
EXAMPLE = re.compile(r"\brun_(seq2seq_qa|qa|summarization|translation)(_no_trainer)?\.py\b")  # of transformers
TIMES = {"eval_steps": "eval.every_steps", "save_steps": "checkpoint.every_steps"}


def build_rules() -> dict[str, Entry]:
    """The rules of the manual, from the tables by which a recipe translates the same names."""
    values = {
        name: {
            cast("JsonValue", old): cast("JsonValue", new) for old, new in table.items() if new is not ANOTHER_DEFAULT
        }
        for name, table in VALUE_ALIASES.items()
    }
    rules = {name: Entry(setting=setting, values=values.get(name, {})) for name, setting in ALIASES.items()}
    rules |= {
        name: Entry(same=cast("tuple[JsonValue, ...]", same), note=note) for name, (same, note) in UNCHANGED.items()
    }
    rules |= {name: Entry(ignored=True) for name in NO_EFFECT}
    rules |= {name: Entry(note=note) for name, note in NO_EQUIVALENT.items()}
    for name in ("dataset_name", "dataset_config_name"):
        rules[name] = Entry(setting="data.train, data.eval", joint=True, note="org/name:config:split")
    rules["gradient_accumulation_steps"] = Entry(
        setting="train.global_batch_size", joint=True, note="batch per device x accumulation x devices"
    )
    return rules


RULES = build_rules()


class ArgumentsImporter(Importer):
    """Base of the importers of programs that have the arguments of transformers' Trainer.

    Class attributes:
        own_rules: of arguments that the program alone has, or that several arguments decide.
    """

    own_rules: ClassVar[Mapping[str, Entry]] = {}

    def get_rule(self, name: str) -> Entry | None:
        """The rule for an argument; None for one that is not known."""
        return self.own_rules.get(name) or RULES.get(name)

    def apply_rule(
        self,
        recipe: ImportedRecipe,
        name: str,
        argument: Argument,
        rule: Entry | None,
        values: Mapping[str, JsonValue],
    ) -> None:
        written = self.describe_argument(name, cast("JsonValue", argument.value), argument.where)
        if name.startswith("launcher: "):
            _add_launcher_finding(recipe, name.removeprefix("launcher: "), argument.value)
        elif name in self.own_rules or name == "gradient_accumulation_steps" or not is_known(name):
            super().apply_rule(recipe, name, argument, rule, values)
        elif argument.value is None:
            recipe.findings.append(Finding(written, "same", (), "its default"))
        else:
            _translate(recipe, name, argument.value, written, values)


def _translate(recipe: ImportedRecipe, name: str, value: object, written: str, values: Mapping[str, JsonValue]) -> None:
    """Set what an argument of the Trainer gives, and add the finding."""
    total = values.get("max_steps")
    if name in (*TIMES, "logging_steps") and isinstance(value, float) and 0 < value < 1:
        if name == "logging_steps":
            recipe.findings.append(Finding(written, "left out", (), "a share of the run; train.log_every_steps counts"))
            return
        if not isinstance(total, int) or total < 1:
            reason = f"a share of the run, whose steps are not known here; {TIMES[name]} counts. By default ten times"
            recipe.findings.append(Finding(written, "same" if value == 0.1 else "left out", (), reason))
            return
        value = max(1, round(total * value))
    try:
        found = translate_argument(name, value, where=written, beside=values)
    except NoEquivalentError as error:
        recipe.findings.append(Finding(written, "left out", (), error.advice))
        return
    except ConfigError as error:
        reason = str(error).removeprefix(written).removeprefix(": ")
        recipe.findings.append(Finding(written, "left out", (), reason))
        return
    for setting, one in found.items():
        recipe.set(setting, one, written)
    state = "set" if found else "no effect" if name in NO_EFFECT else "same"
    reason = "" if found else "changes no result" if name in NO_EFFECT else "FiveTune does so without a setting"
    if name == "dataset_config_name":
        reason = "a part of data.train and data.eval"
    recipe.findings.append(Finding(written, state, tuple(found), reason))


def complete_training(recipe: ImportedRecipe, values: Mapping[str, JsonValue], *, defaults: JsonTable, by: str) -> None:
    """Add defaults, the batch, and decide between arguments that exclude each other.

    Args:
        by: what has these defaults. values: all arguments.
    """
    recipe.set_defaults({**TRAINER_DEFAULTS, **defaults}, f"default of {by}")
    if "data.eval" in recipe.settings and "data.eval_share" in recipe.settings:
        recipe.drop("data.eval_share")
        recipe.leave_out("validation_split_percentage", "applies only without validation data, which is given")
    _complete_batch(recipe, values)
    if "train.num_steps" in recipe.settings:
        recipe.drop("train.num_epochs")
        recipe.leave_out("num_train_epochs", "max_steps is given, which wins")
    if values.get("warmup_ratio") and values.get("warmup_steps"):
        recipe.drop("schedule.warmup_fraction")
        recipe.leave_out("warmup_ratio", "warmup_steps is given, which wins")
    if recipe.settings["optimizer.name"] == "adafactor":
        recipe.set("optimizer.preset", "hf", "transformers' Adafactor does not scale steps by the weights")
        for name in ("beta1", "beta2", "epsilon"):
            recipe.drop(f"optimizer.{'eps' if name == 'epsilon' else name}")
            recipe.leave_out(f"adam_{name}", "AdamW's; Adafactor does not use it")
    if "model.path" not in recipe.settings and "model.config" in recipe.settings:
        recipe.set("model.init", "random", "no weights are named")


def _count_nodes(values: Mapping[str, JsonValue]) -> int:
    given = (str(values.get(f"launcher: {name}") or "") for name in NODES)
    return next((int(one) for one in given if one.isdigit()), 1)


def count_processes(values: Mapping[str, JsonValue]) -> int:
    """Number of processes of all nodes that a launcher before the script starts, or of GPUs that the Trainer feeds.

    >>> count_processes({"launcher: nnodes": "2", "launcher: nproc_per_node": "4"})
    8
    """
    for name in PROCESSES:
        given = str(values.get(f"launcher: {name}") or "")
        if given.isdigit():
            return int(given) * (1 if name == "num_processes" else _count_nodes(values))
    devices = str(values.get("launcher: CUDA_VISIBLE_DEVICES") or "")
    return (devices.count(",") + 1) * _count_nodes(values)


def _add_launcher_finding(recipe: ImportedRecipe, name: str, value: object) -> None:
    written = f"{name}={value}" if name.isupper() else f"--{name} {value}".strip()
    text = str(value)
    if name in PROCESSES or (name == "CUDA_VISIBLE_DEVICES" and "," in text):
        recipe.findings.append(Finding(written, "set", ("launch.nproc",), "each device has a batch of its own"))
    elif name in NODES and text.isdigit() and text != "1":
        recipe.findings.append(Finding(written, "set", ("launch.nnodes",), "torchrun or fivetune launch starts them"))
    elif name == "mixed_precision" and text in ("no", "bf16"):
        recipe.set("train.precision", "fp32" if text == "no" else text, written)
        recipe.findings.append(Finding(written, "set", ("train.precision",), ""))
    elif name == "distributed_type" and text in STRATEGIES:
        reason = "DeepSpeed is not offered; fsdp divides weights and optimizer too" if text == "DEEPSPEED" else ""
        recipe.set("strategy.name", STRATEGIES[text], written)
        recipe.findings.append(Finding(written, "set", ("strategy.name",), reason))
    elif name in ("use_cpu", "cpu") and text in ("True", ""):
        recipe.set("device", "cpu", written)
        recipe.findings.append(Finding(written, "set", ("device",), ""))
    elif name == "mixed_precision":
        recipe.findings.append(Finding(written, "left out", (), UNCHANGED["fp16"][1]))
    elif name in ("gradient_clipping", "max_grad_norm") and isinstance(value, int | float):
        recipe.set("train.max_grad_norm", value, written)
        recipe.findings.append(Finding(written, "set", ("train.max_grad_norm",), ""))
    else:
        recipe.findings.append(Finding(written, "left out", (), "of the launcher; fivetune train starts its processes"))


def _complete_batch(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    accumulation = read_count(recipe, values, "gradient_accumulation_steps", 1)
    num_processes, num_nodes = count_processes(values), _count_nodes(values)
    micro = read_count(recipe, values, "per_device_train_batch_size", 8)
    auto = recipe.settings.get("train.batch_size") == "auto"
    given = "per_device_train_batch_size" in values
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    strategy = recipe.settings.get("strategy.name")
    set_batch(recipe, micro=micro, accumulation=accumulation, num_processes=num_processes, names=names, given=given)
    if strategy and num_processes > 1:
        recipe.set("strategy.name", strategy, "distributed_type of accelerate")
    if num_nodes > 1:
        recipe.set("launch.nnodes", num_nodes, f"{num_nodes} nodes")
        recipe.set("launch.nproc", max(1, num_processes // num_nodes), "processes of each node")
    if auto:
        recipe.set("train.batch_size", "auto", "auto_find_batch_size")
        recipe.set("train.global_batch_size", micro * accumulation * num_processes, "examples per step")


def read_accelerate(source: RawConfig) -> dict[str, Argument]:
    """Read accelerate's YAML: how processes are started; the entries of its inner tables by their own names."""
    try:
        found = yaml.safe_load(source.text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source.name}: not valid YAML: {' '.join(str(error).split())}. Correct the file.") from None
    table = cast("dict[str, JsonValue]", found if isinstance(found, dict) else {})
    flat: dict[str, JsonValue] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        else:
            flat[name] = "no" if name == "mixed_precision" and value is False else value
    names = {"deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps"}
    names |= {"deepspeed_config.gradient_clipping": "launcher: gradient_clipping"}
    return {names.get(name, f"launcher: {name}"): Argument(value) for name, value in flat.items()}


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
