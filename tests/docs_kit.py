"""The pages of the documentation, their code blocks and commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
OPERATORS = {"|", ">", "2>", "&&", "&", "<"}


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced code blocks of a page in any of these languages."""
    return [body for language, body in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language in languages]


def spans(text: str) -> list[str]:
    """Everything in backquotes outside code blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def shell_lines(text: str) -> list[str]:
    """The commands of a page's blocks, continued lines joined: all lines of `sh`, those after `$ ` of `console`, and
    those of `fivetune` in blocks without a language, fenced or indented."""
    found = []
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        lines = re.sub(r"\\\n\s*", " ", body).splitlines()
        prompted = [line[2:] for line in lines if line.startswith("$ ")]
        plain = [line for line in lines if re.match(r"fivetune [a-z]", line)]
        found += {"sh": lines, "bash": lines, "console": prompted, "": [*prompted, *plain]}.get(language, [])
    found += re.findall(r"^    (fivetune [a-z].*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return [line for line in map(str.strip, found) if line and not line.startswith("#")]


def split_words(line: str) -> list[str]:
    """The words of a command line's first command, variables before it left out.

    >>> split_words("HF_HOME=x python -m fivetune list tasks | head  # all")
    ['fivetune', 'list', 'tasks']
    """
    words = shlex.split(line, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    words = words[2:] if words[:2] == ["python", "-m"] else words
    end = next((place for place, word in enumerate(words) if word in OPERATORS), len(words))
    return words[:end]


def commands(lines: list[str]) -> list[list[str]]:
    """The words after `fivetune` of each line that begins with it, without lines that `...` shortens."""
    found = []
    for line in lines:
        words = split_words(line)
        if words[:1] == ["fivetune"] and words[1:] and "..." not in words:
            found.append(words[1:])
    return found
