"""transformers' example scripts: run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py.

In: a command line, a shell script with one such command, or the JSON file of arguments that the scripts accept. Out:
settings that train as the script does, its defaults (AdamW 5e-5, linear, 3 epochs, seed 42) included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fivetune.config.aliases import complete_argument
from fivetune.errors import ConfigError
from fivetune.start.importers import (
    Argument,
    ImportedRecipe,
    Importer,
    RawConfig,
    Rules,
    read_json_table,
    set_plain_task,
)
from fivetune.start.importers._arguments import (
    ACCUMULATION,
    EXAMPLE,
    ROUGE,
    TRAINER_DEFAULTS,
    apply_arguments,
    complete_training,
    read_accelerate,
    read_launcher,
)
from fivetune.start.importers._shell import find_command, parse_flags, split_at_script
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
LANGUAGE = ("data.columns", "column of the table `translation`")
OWN_RULES = Rules(  # of arguments that the scripts alone have, and those that several arguments decide
    settings={
        "with_tracking": "report.sinks",
        "num_warmup_steps": "schedule.warmup_steps",
        "max_length": "data.max_input_tokens",
    },
    values={"with_tracking": {True: "tensorboard"}},
    unchanged={
        "num_warmup_steps": ((0,), ""),
        "checkpointing_steps": (
            (),
            "set checkpoint.every_steps; by default a checkpoint is written at each evaluation",
        ),
    },
    no_effect=(),
    joint={
        "source_prefix": ("task.inputs", "the fixed text before the column"),
        "text_column": ("task.inputs", "column of the template"),
        "summary_column": ("task.targets", "column of the template"),
        "source_lang": LANGUAGE,
        "target_lang": LANGUAGE,
        **ACCUMULATION,
    },
)


class TransformersScripts(Importer):
    """Command lines of transformers' example scripts."""

    title = "transformers' run_seq2seq_qa.py, run_qa.py, run_summarization.py and run_translation.py"
    rules = OWN_RULES

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

    def convert(self, source: RawConfig) -> ImportedRecipe:
        arguments = _read_arguments(source)
        recipe = ImportedRecipe(f"{self.title}, {source.name}", "--")
        given = arguments.pop("script", None)
        if given:
            recipe.add(f"{given.value}.py", "set", "the task and its limits", ("task.name",))
        values = apply_arguments(recipe, OWN_RULES, arguments)
        if not given and all(name.startswith("launcher: ") for name in values):  # accelerate's file alone
            complete_training(recipe, values, defaults=TRAINER_DEFAULTS, by="the Trainer")
            recipe.drop(*recipe.defaults)
        else:
            script = str(given.value) if given else _find_script(values)
            complete_training(recipe, values, defaults=TRAINER_DEFAULTS | SCRIPTS[script], by=f"{script}.py")
            if SCRIPTS[script] is TEXT_LIMITS:
                _complete_templates(recipe, values, script)
        recipe.resolve_findings()
        return recipe


def _read_arguments(source: RawConfig) -> dict[str, Argument]:
    """Read the arguments of a file or command line, the launcher's arguments, and the name of the script."""
    if source.name.endswith(".json"):
        return read_json_table(source)
    if source.name.endswith((".yaml", ".yml")):
        return read_accelerate(source)
    words = find_command(source, r"\brun_\w+\.py\b", "one of transformers' scripts, such as run_summarization.py")
    before, path, options = split_at_script(words)
    found: dict[str, Argument] = {}
    if path:
        script = Path(path).stem
        if script not in SCRIPTS:
            raise ConfigError(
                f"{source.name}: {script}.py has no counterpart. Allowed: {', '.join(SCRIPTS)}, or arguments alone. "
                "Leave the script out, and choose the task in the recipe."
            )
        found["script"] = Argument(script)
    found |= read_launcher(before, source)
    given = parse_flags([_complete_word(word) for word in options])
    return found | {name: Argument(value) for name, value in given.items()}


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
    """The script whose arguments they are.

    >>> _find_script({"text_column": "a"}), _find_script({"source_lang": "en"}), _find_script({})
    ('run_summarization', 'run_translation', 'run_seq2seq_qa')
    """
    if {"source_lang", "target_lang"} & values.keys():
        return "run_translation"
    return "run_summarization" if {"text_column", "summary_column"} & values.keys() else "run_seq2seq_qa"


def _complete_templates(recipe: ImportedRecipe, values: Mapping[str, JsonValue], script: str) -> None:
    """Set the two templates of the task jsonl, and the columns of a translation."""
    prefix = str(values.get("source_prefix") or "").replace("{", "{{").replace("}", "}}")
    reason = f"{script}.py reads pairs of texts"
    if script.startswith("run_summarization"):
        usual = COLUMNS.get(str(values.get("dataset_name")).rpartition("/")[2], ("text", "summary"))
        inputs = f"{prefix}{{{values.get('text_column', usual[0])}}}"
        targets = f"{{{values.get('summary_column', usual[1])}}}"
        set_plain_task(recipe, inputs, targets, metrics=[ROUGE], score="rougeLsum_f1", reason=reason)
        return
    columns: dict[str, JsonValue] = {}
    for role in ("source", "target"):
        language = str(values.get(f"{role}_lang", role)).partition("_")[0]  # mBART's en_XX is en
        columns[role] = f"translation.{language}"
    recipe.set("data.columns", columns, "the file has the pairs in a table `translation`")
    set_plain_task(recipe, f"{prefix}{{source}}", "{target}", metrics=["bleu"], score="bleu", reason=reason)
