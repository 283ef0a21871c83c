"""transformers' example scripts: run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py.

In: a command line, a shell script with one such command, or the JSON file of arguments that the scripts accept. Out:
settings that train as the script does, its defaults (AdamW 5e-5, linear, 3 epochs, seed 42) included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fivetune.config.aliases import complete_argument
from fivetune.errors import ConfigError
from fivetune.importers import (
    Argument,
    Entry,
    Finding,
    ImportedRecipe,
    RawConfig,
    read_json_table,
    set_plain_task,
)
from fivetune.importers._arguments import (
    EXAMPLE,
    ROUGE,
    RULES,
    ArgumentsImporter,
    complete_training,
    read_accelerate,
    read_launcher,
)
from fivetune.importers._shell import find_command, parse_flags
from fivetune.types import JsonTable, JsonValue

QUESTION_LIMITS: JsonTable = {"data.max_input_tokens": 384, "data.max_target_tokens": 30}
TEXT_LIMITS: JsonTable = {"data.max_input_tokens": 1024, "data.max_target_tokens": 128}
SCRIPTS: dict[str, JsonTable] = {  # task and limits of each script
    "run_seq2seq_qa": {**QUESTION_LIMITS, "task.name": "squad"},
    "run_qa": {**QUESTION_LIMITS, "task.name": "squad", "task.head": "extractive"},
    "run_qa_no_trainer": {**QUESTION_LIMITS, "task.name": "squad", "task.head": "extractive"},
    "run_summarization": TEXT_LIMITS,
    "run_translation": TEXT_LIMITS,
    "run_summarization_no_trainer": TEXT_LIMITS,
    "run_translation_no_trainer": TEXT_LIMITS,
}
ACCELERATE = re.compile(r"^(distributed_type|num_processes|mixed_precision|compute_environment)\s*:", re.MULTILINE)
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
    "with_tracking": Entry(setting="report.sinks", values={True: "tensorboard"}, note="name another one"),
    "num_warmup_steps": Entry(setting="schedule.warmup_steps", same=(0,)),
    "max_length": Entry(setting="data.max_input_tokens"),
    "checkpointing_steps": Entry(
        note="set checkpoint.every_steps; by default a checkpoint is written at each evaluation"
    ),
    "script": Entry(setting="task.name", joint=True, note="the task and its limits"),
}


class TransformersScripts(ArgumentsImporter):
    """Command lines of transformers' example scripts."""

    title: ClassVar[str] = "transformers' run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py"
    written: ClassVar[str] = "--{}"
    own_rules: ClassVar[Mapping[str, Entry]] = OWN_RULES
    rules: ClassVar[Mapping[str, Entry]] = RULES | OWN_RULES
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
        if source.name.endswith((".yaml", ".yml")):
            return ACCELERATE.search(source.text) is not None
        if source.name.endswith((".py", ".ipynb")):
            return False
        if EXAMPLE.search(source.text):
            return True
        own = re.search(r"\S+\.py\b", source.text)  # a script of one's own, which the importer trainer reads
        is_own = own is not None and (Path(source.name).parent / own[0]).is_file()
        return "--model_name_or_path" in source.text and not is_own

    def read_arguments(self, source: RawConfig) -> dict[str, Argument]:
        if source.name.endswith(".json"):
            return {name: Argument(value) for name, value in read_json_table(source).items()}
        if source.name.endswith((".yaml", ".yml")):
            return read_accelerate(source)
        words = find_command(source, r"\brun_\w+\.py\b", "one of transformers' scripts, such as run_summarization.py")
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
        found |= read_launcher(words[: max(place, 0)], source)
        for name, value in parse_flags([_complete_word(word) for word in words[place + 1 :]]).items():
            found[name] = Argument(value)
        return found

    def apply_rule(
        self,
        recipe: ImportedRecipe,
        name: str,
        argument: Argument,
        rule: Entry | None,
        values: Mapping[str, JsonValue],
    ) -> None:
        if name == "script":
            recipe.findings.append(Finding(f"{argument.value}.py", "set", ("task.name",), ""))
        else:
            super().apply_rule(recipe, name, argument, rule, values)

    def complete(self, recipe: ImportedRecipe, values: Mapping[str, JsonValue]) -> None:
        if all(name.startswith("launcher: ") for name in values):
            complete_training(recipe, values, defaults={}, by="the Trainer")
            recipe.drop(*(name for name in list(recipe.settings) if name in recipe.defaults))
            return
        script = _find_script(values)
        complete_training(recipe, values, defaults=SCRIPTS[script], by=f"{script}.py")
        if SCRIPTS[script] is TEXT_LIMITS:
            _complete_templates(recipe, values, script)


def _complete_word(word: str) -> str:
    """Spell out the name of a flag, with underscores.

    >>> _complete_word("--max-train=5"), _complete_word("5")
    ('--max_train_samples=5', '5')
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{complete_argument(name.replace('-', '_'))}{equals}{value}"


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


def _complete_templates(recipe: ImportedRecipe, values: Mapping[str, JsonValue], script: str) -> None:
    """Set the two templates of the task jsonl, and the columns of a translation."""
    prefix = str(values.get("source_prefix") or "").replace("{", "{{").replace("}", "}}")
    reason = f"{script}.py reads pairs of texts"
    if script.startswith("run_summarization"):
        usual = COLUMNS.get(str(values.get("dataset_name")).rpartition("/")[2], ("text", "summary"))
        text, summary = values.get("text_column", usual[0]), values.get("summary_column", usual[1])
        inputs, targets, score = f"{prefix}{{{text}}}", f"{{{summary}}}", "rougeLsum_f1"
        metric: JsonValue = ROUGE
    else:
        languages = {
            role: str(values.get(f"{role}_lang", default)).partition("_")[0]
            for role, default in (("source", "source"), ("target", "target"))
        }
        columns = {role: f"translation.{language}" for role, language in languages.items()}
        recipe.set("data.columns", columns, "the file has the pairs in a table `translation`")
        inputs, targets, score = f"{prefix}{{source}}", "{target}", "bleu"
        metric = "bleu"
    set_plain_task(recipe, inputs, targets, metrics=[metric], score=score, reason=reason)
