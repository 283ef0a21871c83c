"""The command line: finds the command's file, runs it, turns errors into one line and an exit code.

In: the words after `fivetune`. Out: the exit code (see errors.py).
"""

from __future__ import annotations

import argparse
import pkgutil
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import fivetune
from fivetune.errors import ConfigError, FiveTuneError, ToldElsewhere, nearest

COMMANDS = Path(__file__).parent / "commands"


def main(words: list[str] | None = None) -> int:
    """Run one command; never lets a traceback out unless --traceback is given."""
    words = sys.argv[1:] if words is None else words
    show_traceback = "--traceback" in words
    words = [word for word in words if word != "--traceback"]
    try:
        return _dispatch(words)
    except FiveTuneError as error:
        if show_traceback:
            traceback.print_exc()
        if not isinstance(error, ToldElsewhere):
            print(f"fivetune: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("fivetune: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except Exception as error:
        if show_traceback:
            raise
        print(f"fivetune: internal error: {type(error).__name__}: {error}. "
              "Run again with --traceback and report it.", file=sys.stderr)  # fmt: skip
        return 1


def _dispatch(words: list[str]) -> int:
    names = sorted(m.name.replace("_", "-") for m in pkgutil.iter_modules([str(COMMANDS)]))
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help(names))
        return 0
    if words[0] == "--version":
        print(f"fivetune {fivetune.__version__}")
        return 0
    if words[0] not in names:
        print(f"fivetune: there is no command {words[0]!r}. {nearest(words[0], names)}", file=sys.stderr)
        return 2
    command = import_module(f"fivetune.commands.{words[0].replace('-', '_')}")
    parser = _Parser(
        prog=f"fivetune {words[0]}", description=command.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_arguments(parser)
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    if getattr(command, "TAKES_SETTINGS", False):
        if len(words) > 1 and words[1].startswith("--") and "." in words[1]:
            raise ConfigError(f"{words[1]}: settings come last. Write fivetune {words[0]} ... {words[1]} VALUE.")
        args, rest = parser.parse_known_args(words[1:])
        args.settings = rest
    else:
        args = parser.parse_args(words[1:])
    return command.run(args)


class _Parser(argparse.ArgumentParser):
    """Wrong words are told as any other mistake: in one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"error: {message}. Try: {self.prog} --help.")


def _help(names: list[str]) -> str:
    lines = [f"{fivetune.__doc__}", "", "usage: fivetune COMMAND ... [--section.key value ...]", ""]
    for name in names:
        first = _first_docstring_line(COMMANDS / f"{name.replace('-', '_')}.py")
        lines.append(f"  {name:<12} {first}")
    lines += ["", "fivetune COMMAND --help says more. Settings: fivetune config --help."]
    return "\n".join(lines)


def _first_docstring_line(path: Path) -> str:
    """Read the help without importing the command."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.strip('"')
