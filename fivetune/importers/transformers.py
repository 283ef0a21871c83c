"""transformers' example scripts: run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py.

In: a command line, a shell script with one such command, or the JSON file of arguments that the scripts accept. Out:
settings that train as the script does, its defaults (AdamW 5e-5, linear, 3 epochs, seed 42) included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar, cast

from fivetune.config.aliases import (
    ALIASES,
    ANOTHER_DEFAULT,
    NO_EFFECT,
    NO_EQUIVALENT,
    UNCHANGED,
    VALUE_ALIASES,
    NoEquivalentError,
    complete_argument,
    is_known,
    translate_argument,
)
from fivetune.config.layers import parse_overrides
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
    set_batch,
    set_plain_task,
)
from fivetune.importers._shell import find_command, read_environment
from fivetune.types import JsonTable, JsonValue

TRAINER_DEFAULTS: JsonTable = {  # defaults of transformers' TrainingArguments that differ from FiveTune's
    "run.seed": 42,
    "optimizer.name": "adamw",
    "optimizer.lr": 5e-5,
    "schedule.name": "linear",
    "train.num_epochs": 3,
}
QUESTION_LIMITS: JsonTable = {"data.max_input_tokens": 384, "data.max_target_tokens": 30}
TEXT_LIMITS: JsonTable = {"data.max_input_tokens": 1024, "data.max_target_tokens": 128}
SCRIPTS: dict[str, JsonTable] = {  # task and limits of each script
    "run_seq2seq_qa": {**QUESTION_LIMITS, "task.name": "squad"},
    "run_qa": {**QUESTION_LIMITS, "task.name": "squad", "task.head": "extractive"},
    "run_qa_no_trainer": {**QUESTION_LIMITS, "task.name": "squad", "task.head": "extractive"},
    "run_summarization": TEXT_LIMITS,
    "run_translation": TEXT_LIMITS,
}
NODES = ("nnodes", "num_machines", "num_nodes")
PROCESSES = ("nproc_per_node", "nproc-per-node", "num_processes", "num_gpus")  # num_processes: of all nodes
TEXT_SCRIPTS = ("run_summarization", "run_translation")
COLUMNS = {  # text and summary of known data sets; the script takes the first two columns of others
    "cnn_dailymail": ("article", "highlights"),
    "xsum": ("document", "summary"),
    "samsum": ("dialogue", "summary"),
}
LANGUAGE = Entry(setting="data.columns", joint=True, note="column of the table `translation`")
OWN_RULES: dict[str, Entry] = {  # of the scripts alone, and those that several arguments decide
    "source_prefix": Entry(setting="task.inputs", joint=True, note="the fixed text before the column"),
    "text_column": Entry(setting="task.inputs", joint=True, note="column of the template"),
    "summary_column": Entry(setting="task.targets", joint=True, note="column of the template"),
    "source_lang": LANGUAGE,
    "target_lang": LANGUAGE,
    "forced_bos_token": Entry(same=(None,), note="T5 models begin all answers with the same token"),
    "gradient_accumulation_steps": Entry(
        setting="train.global_batch_size", joint=True, note="batch per device x accumulation x devices"
    ),
    "script": Entry(setting="task.name", joint=True, note="the task and its limits"),
}


def _build_rules() -> dict[str, Entry]:
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
    return rules | OWN_RULES


class TransformersScripts(Importer):
    """Command lines of transformers' example scripts."""

    title: ClassVar[str] = "transformers' run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py"
    written: ClassVar[str] = "--{}"
    rules: ClassVar[Mapping[str, Entry]] = _build_rules()
    differences: ClassVar[tuple[str, ...]] = (
        "The batch is per device there; train.global_batch_size is the number of examples per optimizer step over all "
        "devices, and accumulation is derived from it.",
        "transformers divides the loss by the tokens of a micro-batch unless a model accepts the number of items; "
        "FiveTune divides it by the tokens of the whole step, so that accumulation changes nothing.",
        "Batches hold examples of similar length and are not padded to max_seq_length.",
        "Without an option the scripts train in fp32; train.precision: auto takes bf16 where the device computes it.",
        "--fp16 overflows in T5; set train.precision: bf16 or leave it out.",
        "Answers are as long as 99 % of the targets plus a margin, unless a generation length is given; the scripts "
        "take the config's, 20 tokens.",
        "--adafactor is transformers' Adafactor without parameter scaling: optimizer.preset: hf.",
    )
    examples: ClassVar[Mapping[str, str]] = {
        "": "run_seq2seq_qa.py --model_name_or_path google-t5/t5-small --train_file train.json --validation_file "
        "dev.json --do_train --do_eval --version_2_with_negative --per_device_train_batch_size 8 "
        "--gradient_accumulation_steps 4 --learning_rate 1e-4 --num_train_epochs 2 --max_seq_length 384 "
        "--doc_stride 128 --predict_with_generate --fp16 --colour blue --output_dir runs/qa",
        "summarize.sh": "#!/bin/sh\nMODEL=google-t5/t5-small\n# four GPUs\ntorchrun --nproc_per_node 4 "
        'run_summarization.py \\\n  --model_name_or_path $MODEL --train_file train.csv --source_prefix "summarize: " '
        "\\\n  --text_column article --summary_column highlights --adafactor --learning_rate 1e-3 \\\n"
        "  --lr_scheduler_type constant --warmup_steps 500 --label_smoothing_factor 0.1 --max_steps 2000 \\\n"
        "  --output_dir runs/sums 2>&1 | tee log.txt\n",
        "translate.json": '{"model_name_or_path": "google-t5/t5-small", "source_lang": "en", "target_lang": "ro",\n'
        ' "source_prefix": "translate English to Romanian: ", "train_file": "train.json",\n'
        ' "validation_file": "dev.json", "per_device_train_batch_size": 4, "do_train": true,\n'
        ' "num_beams": 4, "output_dir": "runs/en-ro"}\n',
    }

    def can_read(self, source: RawConfig) -> bool:
        if source.name.endswith(".json"):
            return '"model_name_or_path"' in source.text
        if source.name.endswith((".py", ".ipynb", ".gin", ".yaml", ".yml")):
            return False
        return bool(re.search(rf"\b({'|'.join(SCRIPTS)})\.py\b|--model_name_or_path\b", source.text))

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        if source.name.endswith(".json"):
            return {name: Argument(value) for name, value in _read_json(source).items()}
        words = find_command(source, r"\brun_\w+\.py\b")
        place = next((i for i, word in enumerate(words) if word.endswith(".py")), -1)
        script = re.sub(r".*/|\.py$", "", words[place]) if place >= 0 else ""
        if script and script not in SCRIPTS:
            raise ConfigError(
                f"{source.name}: {script}.py has no counterpart. Allowed: {', '.join(SCRIPTS)}, or arguments alone. "
                "Leave the script out, and choose the task in the recipe."
            )
        found: dict[str, Argument] = {}
        if script:
            found["script"] = Argument(script)
        for name, value in _read_launcher(words[: max(place, 0)]).items():
            found[f"launcher: {name}"] = Argument(value)
        for name, value in parse_overrides([_complete_word(word) for word in words[place + 1 :]]).items():
            unknown = isinstance(value, str) and re.search(r"\$\w|\$\{", value)
            found[name] = Argument(Computed(str(value)) if unknown else cast("JsonValue", value))
        return found

    def apply_rule(
        self,
        recipe: ImportedRecipe,
        name: str,
        argument: Argument,
        rule: Entry | None,
        values: Mapping[str, JsonValue],
    ) -> None:
        written = self.describe_argument(name, cast("JsonValue", argument.value))
        if name.startswith("launcher: "):
            _add_launcher_finding(recipe, name.removeprefix("launcher: "), argument.value)
        elif name == "script":
            recipe.findings.append(Finding(f"{argument.value}.py", "set", ("task.name",), ""))
        elif name in OWN_RULES and (name not in NO_EQUIVALENT or _find_script(values) in TEXT_SCRIPTS):
            super().apply_rule(recipe, name, argument, rule, values)
        elif not is_known(name):
            super().apply_rule(recipe, name, argument, None, values)
        else:
            try:
                found = translate_argument(name, argument.value, where=written, beside=values)
            except NoEquivalentError as error:
                recipe.findings.append(Finding(written, "left out", (), error.advice))
                return
            except ConfigError as error:
                reason = str(error).removeprefix(written).removeprefix(": ")
                recipe.findings.append(Finding(written, "left out", (), reason))
                return
            for setting, value in found.items():
                recipe.set(setting, value, written)
            state = "set" if found else "no effect" if name in NO_EFFECT else "same"
            reason = "" if found else "changes no result" if name in NO_EFFECT else "FiveTune does so without a setting"
            if name == "dataset_config_name":
                reason = "a part of data.train and data.eval"
            recipe.findings.append(Finding(written, state, tuple(found), reason))

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        script = _find_script(values)
        for setting, value in {**TRAINER_DEFAULTS, **SCRIPTS[script]}.items():
            if setting not in recipe.settings:
                recipe.set(setting, value, f"default of {script}.py")
        if "data.eval" in recipe.settings and "data.eval_share" in recipe.settings:
            recipe.drop("data.eval_share")
            reason = "applies only without validation data, which is given"
            _replace_finding(recipe, "--validation_split_percentage", reason)
        _complete_batch(recipe, values)
        if script in TEXT_SCRIPTS:
            _complete_templates(recipe, values, script)
        if "train.num_steps" in recipe.settings:
            recipe.drop("train.num_epochs")
            if "num_train_epochs" in values:
                _replace_finding(recipe, "--num_train_epochs", "--max_steps is given, which wins")
        if values.get("warmup_ratio") and values.get("warmup_steps"):
            recipe.drop("schedule.warmup_fraction")
            _replace_finding(recipe, "--warmup_ratio", "--warmup_steps is given, which wins")
        if recipe.settings["optimizer.name"] == "adafactor":
            recipe.set("optimizer.preset", "hf", "transformers' Adafactor does not scale steps by the weights")
            for name in ("beta1", "beta2", "epsilon"):
                recipe.drop(f"optimizer.{'eps' if name == 'epsilon' else name}")
                _replace_finding(recipe, f"--adam_{name}", "AdamW's; Adafactor does not use it")
        if "model.path" not in recipe.settings and "model.config" in recipe.settings:
            recipe.set("model.init", "random", "no weights are named")


def _read_json(source: RawConfig) -> dict[str, JsonValue]:
    try:
        found = json.loads(source.text)
    except ValueError as error:
        raise ConfigError(f"{source.name}: not valid JSON: {error}. Correct the file.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source.name}: holds no table of arguments. Give a JSON object, {{name: value}}.")
    return cast("dict[str, JsonValue]", found)


def _complete_word(word: str) -> str:
    """Spell out the name of a flag, with underscores.

    >>> _complete_word("--max-train=5"), _complete_word("5")
    ('--max_train_samples=5', '5')
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{complete_argument(name.replace('-', '_'))}{equals}{value}"


def _read_launcher(words: list[str]) -> dict[str, str]:
    """Read what stands before the script: variables, and the flags of torchrun, accelerate or deepspeed.

    >>> _read_launcher(["torchrun", "--nproc_per_node", "4", "--standalone"])
    {'nproc_per_node': '4', 'standalone': ''}
    """
    found = read_environment(words)
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            found[name] = value if equals or after.startswith("-") else after
    return found


def _count_nodes(values: Mapping[str, JsonValue]) -> int:
    given = (str(values.get(f"launcher: {name}") or "") for name in NODES)
    return next((int(one) for one in given if one.isdigit()), 1)


def _count_processes(values: Mapping[str, JsonValue]) -> int:
    """Number of processes of all nodes that a launcher before the script starts, or of GPUs that the Trainer feeds.

    >>> _count_processes({"launcher: nnodes": "2", "launcher: nproc_per_node": "4"})
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
    if name in PROCESSES or (name == "CUDA_VISIBLE_DEVICES" and "," in str(value)):
        recipe.findings.append(Finding(written, "set", ("launch.nproc",), "each device has a batch of its own"))
    elif name in NODES and str(value).isdigit() and value != "1":
        recipe.findings.append(Finding(written, "set", ("launch.nnodes",), "torchrun or fivetune launch starts them"))
    else:
        recipe.findings.append(Finding(written, "left out", (), "of the launcher; fivetune train starts its processes"))


def _find_script(values: Mapping[str, JsonValue]) -> str:
    """The script of the arguments; without its name, the one whose arguments they are.

    >>> _find_script({"text_column": "a"}), _find_script({"source_lang": "en"}), _find_script({})
    ('run_summarization', 'run_translation', 'run_seq2seq_qa')
    """
    if given := values.get("script"):
        return str(given)
    if {"source_lang", "target_lang"} & values.keys():
        return "run_translation"
    return "run_summarization" if {"text_column", "summary_column"} & values.keys() else "run_seq2seq_qa"


def _complete_batch(recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
    accumulation = read_count(values, "gradient_accumulation_steps", 1)
    num_processes, num_nodes = _count_processes(values), _count_nodes(values)
    micro = values.get("per_device_train_batch_size", 8)
    if type(micro) is not int:
        if accumulation * num_processes != 1:
            raise ConfigError(
                f"--per_device_train_batch_size: {micro!r} times accumulation and processes is no number of examples. "
                "Give a whole number."
            )
        return
    auto = recipe.settings.get("train.batch_size") == "auto"
    given = "per_device_train_batch_size" in values
    names = ("--per_device_train_batch_size", "--gradient_accumulation_steps")
    set_batch(recipe, micro=micro, accumulation=accumulation, num_processes=num_processes, names=names, given=given)
    if num_nodes > 1:
        recipe.set("launch.nnodes", num_nodes, f"{num_nodes} nodes")
        recipe.set("launch.nproc", max(1, num_processes // num_nodes), "processes of each node")
    if auto:
        recipe.set("train.batch_size", "auto", "--auto_find_batch_size")
        recipe.set("train.global_batch_size", micro * accumulation * num_processes, "examples per step")


def _complete_templates(recipe: ImportedRecipe, values: Mapping[str, JsonValue], script: str) -> None:
    """Set the two templates of the task jsonl, and the columns of a translation."""
    prefix = values.get("source_prefix") or ""
    reason = f"{script}.py reads pairs of texts"
    if script == "run_summarization":
        usual = COLUMNS.get(str(values.get("dataset_name")).rpartition("/")[2], ("text", "summary"))
        text, summary = values.get("text_column", usual[0]), values.get("summary_column", usual[1])
        inputs, targets, metric, score = f"{prefix}{{{text}}}", f"{{{summary}}}", "rouge", "rougeL_f1"
    else:
        languages = {
            role: str(values.get(f"{role}_lang", default)).partition("_")[0]
            for role, default in (("source", "source"), ("target", "target"))
        }
        columns = {role: f"translation.{language}" for role, language in languages.items()}
        recipe.set("data.columns", columns, "the file has the pairs in a table `translation`")
        inputs, targets, metric, score = f"{prefix}{{source}}", "{target}", "bleu", "bleu"
    set_plain_task(recipe, inputs, targets, metric=metric, score=score, reason=reason)


def _replace_finding(recipe: ImportedRecipe, argument: str, reason: str) -> None:
    """Mark an argument as left out that was set before all arguments were known."""
    for place, finding in enumerate(recipe.findings):
        if finding.argument.partition(" ")[0] == argument:
            recipe.findings[place] = Finding(finding.argument, "left out", (), reason)
