"""Conversion of a command line of transformers' example scripts to a recipe: `fivetune config --from-args "..."`.

In: the command line as typed, `python run_seq2seq_qa.py` and line continuations included. Out: a recipe with the
settings that the arguments and the script's defaults (AdamW 5e-5, linear, seed 42) give, so that it trains as the
script does, and a comment for each argument that is not carried over.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from fivetune.config.aliases import (
    NO_EFFECT,
    NoEquivalentError,
    complete_argument,
    is_known,
    translate_argument,
)
from fivetune.config.layers import as_yaml, parse_overrides
from fivetune.errors import ConfigError
from fivetune.types import JsonTable, JsonValue

TRAINER_DEFAULTS: JsonTable = {  # defaults of transformers' TrainingArguments that differ from FiveTune's
    "run.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "schedule.name": "linear",
    "train.num_epochs": 3,
}
QUESTION_DEFAULTS: JsonTable = {"data.max_input_tokens": 384, "data.max_target_tokens": 30}
TEXT_DEFAULTS: JsonTable = {"data.max_input_tokens": 1024, "data.max_target_tokens": 128}
SCRIPTS: dict[str, JsonTable] = {  # task and limits of each script
    "run_seq2seq_qa": {**QUESTION_DEFAULTS, "task.name": "squad"},
    "run_qa": {**QUESTION_DEFAULTS, "task.name": "squad", "task.head": "extractive"},
    "run_qa_no_trainer": {**QUESTION_DEFAULTS, "task.name": "squad", "task.head": "extractive"},
    "run_summarization": {**TEXT_DEFAULTS, "task.name": "jsonl", "task.metrics": ["rouge"]},
}
LAUNCHERS = ("nproc_per_node", "nproc-per-node", "num_processes")
TEXT_ONLY = ("text_column", "summary_column", "source_prefix")


@dataclass(frozen=True, slots=True)
class ConvertedRecipe:
    """The settings of a command line, and a reason for each argument that is left out."""

    settings: Mapping[str, JsonValue]
    left_out: tuple[str, ...]

    def as_yaml(self) -> str:
        """The recipe in YAML: the reasons as comments, then the sections."""
        table: JsonTable = {}
        for key, value in self.settings.items():
            *sections, name = key.split(".")
            inner = table
            for section in sections:
                inner = inner.setdefault(section, {})
            inner[name] = list(value) if isinstance(value, tuple) else value
        comments = "".join(f"# not carried over: {reason}\n" for reason in self.left_out)
        return f"{comments}{as_yaml(table)}"


def convert_arguments(text: str) -> ConvertedRecipe:
    """Convert a transformers command line to a recipe.

    Raises ConfigError for a script without an equivalent task, and for arguments that cannot be parsed.

    >>> recipe = convert_arguments("python run_seq2seq_qa.py --model_name_or_path t5-small --do_train --fp16")
    >>> recipe.settings["model.path"], recipe.settings["task.name"], recipe.left_out[0][:20]
    ('t5-small', 'squad', '--fp16: Set train.pr')
    """
    try:
        words = shlex.split(re.sub(r"\\\r?\n", " ", text))
    except ValueError as error:
        raise ConfigError(
            f"--from-args: cannot be read as a command line: {error}. Close the quotation mark."
        ) from None
    place = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
    script = re.sub(r".*/|\.py$", "", words[place]) if place >= 0 else ""
    if script and script not in SCRIPTS:
        raise ConfigError(
            f"--from-args: {script}.py has no counterpart. Allowed: {', '.join(SCRIPTS)}, or arguments alone. "
            "Leave the script out, and choose the task in the recipe."
        )
    arguments = parse_overrides([_complete_word(word) for word in words[place + 1 :]])
    num_processes = _find_num_processes(words[: max(place, 0)])
    settings = {**TRAINER_DEFAULTS, **SCRIPTS.get(script, SCRIPTS["run_seq2seq_qa"])}
    left_out: list[str] = []
    for name, value in arguments.items():
        if name == "gradient_accumulation_steps" or (name in TEXT_ONLY and settings["task.name"] == "jsonl"):
            continue
        if not is_known(name):
            left_out.append(f"--{name}: not an argument of transformers that FiveTune knows.")
            continue
        try:
            found = translate_argument(name, value, where=f"--{name}", beside=arguments)
        except NoEquivalentError as error:
            left_out.append(f"{error.where}: {error.advice}")
            continue
        except ConfigError as error:
            left_out.append(str(error))
            continue
        if not found and name in NO_EFFECT:
            left_out.append(f"--{name}: changes no result.")
        settings |= found
    if "data.eval" in settings and settings.pop("data.eval_share", None) is not None:
        left_out.append("--validation_split_percentage: applies only without validation data, which is given.")
    settings |= _translate_batch(arguments, num_processes)
    if settings["task.name"] == "jsonl":
        settings |= _translate_templates(arguments)
    if "train.num_steps" in settings:
        del settings["train.num_epochs"]
    if arguments.get("warmup_ratio") and arguments.get("warmup_steps"):
        settings.pop("schedule.warmup_fraction")  # as in TrainingArguments, steps win
    if settings["optimizer.name"] == "adafactor":  # transformers' Adafactor does not scale by the weights
        settings["optimizer.preset"] = "hf"
        for name in [key for key in settings if key in ("optimizer.beta1", "optimizer.beta2", "optimizer.eps")]:
            left_out.append(f"--adam_{name.partition('.')[2]}: AdamW's; Adafactor does not use it.")
            del settings[name]
    if "model.path" not in settings and "model.config" in settings:
        settings["model.init"] = "random"
    return ConvertedRecipe(dict(sorted(settings.items(), key=_rank_section)), tuple(left_out))


def _complete_word(word: str) -> str:
    """Spell out the name of a flag, with underscores.

    >>> _complete_word("--max-train=5"), _complete_word("5")
    ('--max_train_samples=5', '5')
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{complete_argument(name.replace('-', '_'))}{equals}{value}"


def _find_num_processes(words: list[str]) -> int:
    """Number of processes that a launcher before the script (torchrun, accelerate launch) starts; 1 without one.

    >>> _find_num_processes(["torchrun", "--nproc_per_node", "4"]), _find_num_processes(["python"])
    (4, 1)
    """
    joined = " ".join(words)
    match = re.search(rf"--(?:{'|'.join(LAUNCHERS)})[= ](\d+)", joined)
    return int(match[1]) if match else 1


def _translate_batch(arguments: JsonTable, num_processes: int) -> JsonTable:
    """Translate batch size, accumulation and processes; the number of examples per optimizer step is preserved."""
    settings: JsonTable = {}
    micro = arguments.get("per_device_train_batch_size", 8)
    accumulation = arguments.get("gradient_accumulation_steps", 1)
    if accumulation * num_processes != 1 and type(micro) is not int:
        raise ConfigError(
            f"--per_device_train_batch_size: {micro!r} times accumulation and processes is no number of examples. "
            "Give a whole number."
        )
    total = micro * accumulation * num_processes
    if total != micro or arguments.get("auto_find_batch_size"):
        settings["train.global_batch_size"] = total
    if num_processes > 1:
        settings |= {"launch.nproc": num_processes, "strategy.name": "ddp"}
    return settings


def _translate_templates(arguments: JsonTable) -> JsonTable:
    """Translate columns and prefix of run_summarization to the two templates of the task jsonl."""
    text, summary = arguments.get("text_column", "text"), arguments.get("summary_column", "summary")
    prefix = arguments.get("source_prefix") or ""
    return {
        "task.inputs": f"{prefix}{{{text}}}",
        "task.targets": f"{{{summary}}}",
        "task.main_metric": "rougeL_f1",
    }


def _rank_section(setting: tuple[str, object]) -> tuple[int, int]:
    """Sort key: sections in the order of a recipe, a plugin's name before its options."""
    section, _, name = setting[0].partition(".")
    order = ("run", "model", "task", "data", "optimizer", "schedule", "train", "eval", "checkpoint", "report")
    return order.index(section) if section in order else len(order), name != "name"
