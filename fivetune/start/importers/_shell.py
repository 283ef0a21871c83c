"""Words of a command in a shell script: continued lines joined, variables replaced, redirections left out."""

from __future__ import annotations

import re
import shlex

from fivetune.config.layers import parse_overrides
from fivetune.errors import ConfigError
from fivetune.start.importers import Computed, RawConfig
from fivetune.types import JsonValue

OPERATOR = re.compile(r"[|&;<]+|[12&]?>.*")  # between commands, or before the file of a redirection
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?(\w+)=((?:'[^']*'|\"[^\"]*\"|[^\s;|&])*)\s*;?\s*(?:#.*)?$")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")


def find_command(source: RawConfig, pattern: str, kind: str) -> list[str]:
    """Return the words of the only command whose line matches a pattern; for words without a file, all words.

    Variables that the script assigns are replaced; others stay as `$NAME`. Raises ConfigError for no or several such
    commands, which it describes as a `kind`, and for an open quotation mark.

    >>> find_command(RawConfig("a.sh", "N=4\\ntorchrun --nproc_per_node $N run_qa.py --seed 1 | tee a"), "run_qa", "")
    ['torchrun', '--nproc_per_node', '4', 'run_qa.py', '--seed', '1']
    """
    lines = re.sub(r"\\\r?\n", " ", source.text).splitlines()
    if source.name == "the command line":
        return _split_line(source, " ".join(lines), pattern)
    variables: dict[str, str] = {}
    found: list[str] = []
    for line in lines:
        if match := _ASSIGNMENT.match(line):
            variables[match[1]] = _replace_variables(match[2].strip("'\""), variables)
        elif re.search(pattern, line) and not line.lstrip().startswith("#"):
            found.append(_replace_variables(line, variables))
    if len(found) != 1:
        number = "several commands that run" if found else "no command that runs"
        raise ConfigError(
            f"{source.name}: has {number} {kind}, and one is needed. Give the command as text: "
            "fivetune import-config 'COMMAND ...'."
        )
    return _split_line(source, found[0], pattern)


def split_at_script(words: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the words before the first Python file of a command, that file, and its options; without one all words
    are options.

    >>> split_at_script(["torchrun", "run_qa.py", "--seed", "1"]), split_at_script(["--seed", "1"])
    ((['torchrun'], 'run_qa.py', ['--seed', '1']), ([], '', ['--seed', '1']))
    """
    for place, word in enumerate(words):
        if word.endswith(".py"):
            return words[:place], word, words[place + 1 :]
    return [], "", words


def _split_line(source: RawConfig, line: str, pattern: str) -> list[str]:
    """Return the words of the command that matches a pattern, among those of a line, else of the first one."""
    try:
        words = shlex.split(re.sub(r"(?<=\w);(?=\s|$)", " ;", line), comments=source.name != "the command line")
    except ValueError as error:
        raise ConfigError(
            f"{source.name}: cannot be read as a command line: {error}. Close the quotation mark."
        ) from None
    commands: list[list[str]] = [[]]
    for word in words:
        if OPERATOR.fullmatch(word):
            commands.append([])
        else:
            commands[-1].append(word)
    return next((own for own in commands if re.search(pattern, " ".join(own))), commands[0])


def _replace_variables(text: str, variables: dict[str, str]) -> str:
    """Replace variables that are known.

    >>> _replace_variables("$a ${b:-2} $c", {"a": "1"})
    '1 2 $c'
    """
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[3] or match[0]), text)


def read_environment(words: list[str]) -> dict[str, str]:
    """Read the variables that stand before a command.

    >>> read_environment(["CUDA_VISIBLE_DEVICES=0,1", "python", "a.py"])
    {'CUDA_VISIBLE_DEVICES': '0,1'}
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            break
        found[name] = value
    return found


def parse_flags(words: list[str]) -> dict[str, JsonValue | Computed]:
    """Parse the flags of a script: one without a value is a switch; a variable that nothing assigns is Computed.

    >>> parse_flags(["--fp16", "--lr", "1e-3"])
    {'fp16': True, 'lr': 0.001}
    """
    given: list[str] = []
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        is_switch = word.startswith("--") and "=" not in word and after.startswith("--")
        given.append(f"{word}=true" if is_switch else word)
    found: dict[str, JsonValue | Computed] = {}
    for name, value in parse_overrides(given).items():
        unknown = isinstance(value, str) and re.search(r"\$\w|\$\{", value)
        found[name] = Computed(str(value)) if unknown else value
    return found
