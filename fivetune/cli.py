"""The command line: dispatches to the command's module, converts errors to one line and an exit code.

In: the words after `fivetune`. Out: the exit code (see errors.py).
"""

from __future__ import annotations

import argparse
import pkgutil
import shutil
import sys
import textwrap
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import fivetune
from fivetune.errors import (
    ConfigError,
    FiveTuneError,
    ReportedByOtherRankError,
    describe_failure,
    refuse_stripped_python,
    suggest_names,
)
from fivetune.redaction import name_invisible, redact_secrets

MAX_COLUMNS = 100  # of a message on a terminal
SYNONYMS = {
    "finetune": "train",
    "fine-tune": "train",
    "fit": "train",
    "run": "train",
    "eval": "evaluate",
    "generate": "predict",
    "infer": "predict",
    "inference": "predict",
    "test": "evaluate",
    "init": "new",
    "upload": "push",
    "demo": "serve",
    "dashboard": "board",
    "ui": "board",
    "sweep": "compare",
    "env": "doctor",
}
"""Names of commands in other tools, with the nearest command."""
GROUPS = {
    "Start": ("quickstart", "new", "inspect", "check", "import-config"),
    "Train": ("train", "tune", "launch", "prepare", "estimate", "find-lr"),
    "Look": ("watch", "board", "report", "diagnose", "compare", "profile"),
    "Use": ("predict", "evaluate", "score", "serve", "export", "card", "push", "trim-vocab"),
    "Help": ("list", "config", "doctor", "completion"),
}
"""Commands in the order in which a user meets them. A user's own command is in a group of its own, More."""
ADVICE = {
    "find-batch": "train.batch_size: auto finds the largest batch that fits; fivetune check RECIPE tests a given size.",
}
"""What does the work of a name that was a command or that users look for."""
COMMANDS = Path(__file__).parent / "commands"


def main(words: list[str] | None = None) -> int:
    """Run one command and return its exit code; tracebacks are printed only with --traceback."""
    words = sys.argv[1:] if words is None else words
    show_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _dispatch(words, show_traceback=show_traceback)
    except FiveTuneError as error:
        if show_traceback:
            traceback.print_exc()
        if not isinstance(error, ReportedByOtherRankError):
            _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt as stop:
        from fivetune.distributed.processes.signals import get_signum

        print("fivetune: stopped.", file=sys.stderr)
        return 128 + get_signum(stop)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (OSError, MemoryError) as error:  # the system refused: disk, permissions, memory, a name that is too long
        if show_traceback:
            raise
        reason = getattr(error, "strerror", None) or "memory ran out"
        place = getattr(error, "filename", None) or words[0]
        _print_error(f"{name_invisible(redact_secrets(str(place)))[:200]}: {reason}. --traceback shows where.")
        return 4
    except Exception as error:
        if show_traceback:
            raise
        print(
            f"fivetune: {describe_failure(error)} Run again with --traceback and report it.",
            file=sys.stderr,
        )
        return 1


def _print_error(text: str) -> None:
    """Print an error: on a terminal wrapped at words, elsewhere each error on a line of its own."""
    text = f"fivetune: {text}"
    if sys.stderr.isatty():
        text = wrap_message(text, min(shutil.get_terminal_size().columns, MAX_COLUMNS))
    with suppress(OSError):  # of a file on a full disk: the exit code tells it
        print(text, file=sys.stderr)


def wrap_message(text: str, width: int) -> str:
    """Wrap each line of a message at words; paths are not divided, nor a command on a line of its own.

    >>> print(wrap_message("fivetune: a.csv: the file is empty.", 20))
    fivetune: a.csv: the
      file is empty.
    """
    return "\n".join(
        line
        if line.startswith("  fivetune ")
        else textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in text.splitlines()
    )


def _dispatch(words: list[str], *, show_traceback: bool) -> int:
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise ConfigError(f"{word!a}: is not UTF-8, so no file of a run could hold it. Give it in UTF-8.")
    names = sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules([str(COMMANDS)]))
    if not words or words[0] in ("-h", "--help", "help"):
        print(_format_help(names))
        return 0
    if words[0] == "--version":
        print(f"fivetune {fivetune.__version__}")
        return 0
    if words[0] not in names:
        given = words[0].replace("_", "-")
        known = SYNONYMS.get(given, words[0])
        advice = ADVICE.get(given) or suggest_names(known, names, listing="fivetune --help")
        _print_error(f"there is no command {words[0]!r}. {advice}")
        return 2
    refuse_stripped_python()
    command = import_module(f"fivetune.commands.{words[0].replace('-', '_')}")
    parser = _Parser(
        prog=f"fivetune {words[0]}",
        description=command.__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    if getattr(command, "TAKES_SETTINGS", False):
        args, args.settings = parser.parse_known_args(words[1:])
        parser.refuse_early_settings(words[1:], args)
    else:
        args = parser.parse_args(words[1:])
    args.traceback, args.words = show_traceback, words  # a command that starts processes passes them on
    return command.run(args)


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError for invalid arguments, so that they are reported in one line."""

    def refuse_early_settings(self, words: list[str], args: argparse.Namespace) -> None:
        """Raise ConfigError for a setting before the recipe: its value would be parsed as the recipe."""
        first = next((action for action in self._actions if not action.option_strings), None)
        given = getattr(args, first.dest, None) if first else None
        given = given[0] if isinstance(given, list) and given else given
        before = words[: words.index(str(given))] if str(given) in words else words
        flags = self._option_string_actions
        early = [w for w in before if w.startswith("--") and " " not in w and w.partition("=")[0] not in flags]
        if first and early:
            example = f", for example {self.prog} squad_v2 {early[0]} VALUE" if first.dest == "recipe" else ""
            raise ConfigError(
                f"{early[0]}: settings come last. Write {self.prog} {first.dest.upper()} {early[0]} VALUE{example}."
            )

    def error(self, message: str) -> NoReturn:
        if message.endswith("expected one argument"):
            message += " (write one that begins with - after an equals sign: --name=-value)"
        if message.startswith(prefix := "the following arguments are required: "):
            names = message.removeprefix(prefix).split(", ")
            found = {"/".join(one.option_strings) or str(one.metavar or one.dest): one.help for one in self._actions}
            helps = [f"{name}: {found[name]}" for name in names if found.get(name)]
            message = "; ".join([message, *helps])
        raise ConfigError(f"error: {message}. Try: {self.prog} --help.")


def _format_help(names: list[str]) -> str:
    """Format the commands in groups, a line each, which fits into 80 columns."""
    summary = textwrap.fill(str(fivetune.__doc__).partition("\n")[0], 80)
    lines = [summary, "", "usage: fivetune COMMAND ... [--section.key value ...]"]
    more = tuple(name for name in names if not any(name in group for group in GROUPS.values()))
    for title, group in {**GROUPS, "More": more}.items():
        if shown := [name for name in group if name in names]:
            lines += ["", title]
        for name in shown:
            file = COMMANDS / f"{name.replace('-', '_')}.py"
            lines.append(f"  {name:<14} {_read_docstring_line(file)}")
    lines += ["", "Arguments of a command: fivetune COMMAND --help", "All settings: fivetune config --help"]
    return "\n".join(lines)


def _read_docstring_line(path: Path) -> str:
    """Read the first docstring line of a command without importing it, because some import torch."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.strip('"')
