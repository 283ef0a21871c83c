"""Print the completion script of a shell.

It completes commands, flags, recipes, run directories, settings and their choices.
"""

from __future__ import annotations

import argparse
from importlib import import_module

from fivetune import plugins

SHELLS = ("bash", "zsh", "fish")
RUN_ARGUMENTS = ("run", "runs", "run_dir", "source")  # names of positional arguments that are run directories, or files
RECIPE_ARGUMENTS = ("recipe", "sources")  # those that are recipes: names, files, run directories
PREAMBLE = {
    "bash": """
_fivetune_file_runs() {
  local run
  for run in "$1"*/config.yaml "$1"*/*/config.yaml; do [ -f "$run" ] && printf '%s\\n' "${run%/config.yaml}"; done
  compgen -f -- "$1"
}
_fivetune_file_recipes() {
  compgen -W "@RECIPES@" -- "$1"
  _fivetune_file_runs "$1"
}
""",
    "zsh": """
_fivetune_recipes() { _alternative 'recipes:recipe:(@RECIPES@)' 'files:file:_files' }
""",
    "fish": "",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)
    parser.epilog = 'bash: eval "$(fivetune completion bash)" in ~/.bashrc; other shells: docs/completion.md'


def run(args: argparse.Namespace) -> int:
    print(build_script(args.shell))
    return 0


def build_script(shell: str) -> str:
    """Build the script. Raises FiveTuneEnvironmentError without shtab."""
    from fivetune.config.recipes import list_recipe_names
    from fivetune.installation import require_package

    require_package("completion", "shtab", "completion")
    import shtab

    recipes = " ".join(list_recipe_names())
    preamble = {name: text.replace("@RECIPES@", recipes) for name, text in PREAMBLE.items()}
    fish_recipes = f"(printf '%s\\n' {recipes}; __fish_complete_path (commandline -ct))"
    kinds = {
        "recipe": {"bash": "_fivetune_file_recipes", "zsh": "_fivetune_recipes", "fish": fish_recipes},
        "run": {**shtab.FILE, "bash": "_fivetune_file_runs"},
        "file": shtab.FILE,
    }
    return shtab.complete(_build_parser(kinds), shell, preamble=preamble[shell])


def _build_parser(kinds: dict[str, dict[str, str]]) -> argparse.ArgumentParser:
    """The parser of all commands, with a flag for each setting; `kinds`: how recipes, runs and files are completed."""
    from fivetune.config.manual import list_settings

    settings = list_settings()
    parser = argparse.ArgumentParser(prog="fivetune", description="Fine-tunes the T5 family")
    commands = parser.add_subparsers()
    for name in plugins.list_plugins("commands"):
        command = import_module(f"fivetune.commands.{name}")
        help_line = str(command.__doc__).partition("\n")[0]
        inner = commands.add_parser(name.replace("_", "-"), help=help_line)
        command.add_arguments(inner)
        for action in inner._actions:
            kind = _find_kind(action)
            if kind and not action.choices:
                action.complete = kinds[kind]  # type: ignore[attr-defined]
        # Settings are flags of each command that takes them.
        if getattr(command, "TAKES_SETTINGS", False):
            for setting, (description, choices) in settings.items():
                if f"--{setting}" in inner._option_string_actions:
                    continue  # a flag of the command's own, such as estimate's --device
                inner.add_argument(f"--{setting}", help=description.replace("%", "%%"), choices=choices or None)
    return parser


def _find_kind(action: argparse.Action) -> str:
    """Return how the values of an argument are completed; "" for flags and numbers."""
    if action.option_strings:
        return "" if action.nargs == 0 or action.type in (int, float) else "file"
    if action.dest in RECIPE_ARGUMENTS:
        return "recipe"
    return "run" if action.dest in RUN_ARGUMENTS else "file"
