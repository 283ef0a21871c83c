"""What to do about a wrong value of a setting: the sentence that ends its message.

In: the kind of a pydantic error, the setting and its value. Out: a sentence, "" where the message suffices.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches

from fivetune.config.aliases import ALIASES

REQUIRED = {
    "model": "Add the model: model: {path: google-t5/t5-small}",
    "task": "Add the task: task: NAME (fivetune list tasks)",
}


def advise_on_value(kind: str, key: str, value: object) -> str:
    """Return the advice for a wrong value.

    Args:
        kind: pydantic's type of the error. key: dotted name of the setting.

    >>> advise_on_value("float_parsing", "optimizer.lr", "0,001")
    ' Write a decimal point: 0.001.'
    >>> advise_on_value("float_parsing", "train.num_epochs", "none")
    ' An empty value is written null.'
    >>> advise_on_value("dict_type", "data.columns", ["{question:", "Frage}"])
    " The shell has divided it into words: put it into quotes: --data.columns '{question: Frage}'."
    """
    if kind == "missing":
        return f" {REQUIRED[key]}." if key in REQUIRED else ""
    if isinstance(value, str) and value.lower() in ("none", "nil") and kind != "literal_error":
        return " An empty value is written null."
    if kind in ("float_parsing", "int_parsing") and isinstance(value, str):
        if re.fullmatch(r"-?\d+,\d+", value):
            return f" Write a decimal point: {value.replace(',', '.')}."
        return " Give a number, such as 1e-3 or 8."
    if isinstance(value, list) and kind in ("dict_type", "model_type", "model_attributes_type", "string_type"):
        words = [str(word) for word in value]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]
        if any(character in "".join(words) for character in "{}"):
            return f" The shell has divided it into words: put it into quotes: --{key} '{' '.join(words)}'."
    if isinstance(value, str) and kind in ("dict_type", "model_type", "model_attributes_type"):
        if found := re.fullmatch(r"(\w+):(\S+)", value):
            return f" YAML needs a space after the colon: {found[1]}: {found[2]}."
        return f" A table is written {{name: value, ...}}, on the command line in quotes: --{key} '{{name: value}}'."
    return ""


def suggest_alias(path: Sequence[str]) -> str:
    """Suggest the setting of a section that has nearly this name in transformers; "" without one.

    >>> suggest_alias(("optimizer", "learning_rat"))
    "Did you mean lr (transformers' learning_rate)? "
    """
    own = {alias: key for alias, key in ALIASES.items() if key.startswith(f"{path[0]}.")}
    near = get_close_matches(path[-1], own, n=1, cutoff=0.75)
    if not near:
        return ""
    return f"Did you mean {own[near[0]].partition('.')[2]} (transformers' {near[0]})? "
