"""The shape of the package: imports follow the order of the rooms, torch stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from fivetune.plugins import KINDS

PACKAGE = Path(__file__).parents[1] / "fivetune"

# The listing of the package, from the bottom up: a module imports from rooms on the left of its own.
ROOMS = ("config", "rundir", "scores", "tasks", "machine", "distributed", "data", "model", "reading", "start",
         "training", "fleet", "delivery", "commands")  # fmt: skip
HALL = ("redaction", "errors", "types", "plugins", "values", "installation")  # below all rooms
TOP = ("cli", "sklearn", "__main__")
PLACE = {part: place for place, part in enumerate(("", *ROOMS, *TOP))} | dict.fromkeys(HALL, 0)
FREE = {("types", "distributed")}  # the type of the ranks, in the contract of strategies
WITHOUT_TORCH = (
    *HALL, "config", "rundir", "scores", "tasks", "machine.profiling", "machine.telemetry.accelerators", "distributed",
    "data.corpus", "model.family", "model.flops", "model.shapes", "model.adapters", "reading", "start",
    "training.answers.inputs", "training.answers.merge", "training.answers.output", "training.answers.score_file",
    "training.answers.tally", "training.optimizers", "training.schedules", "training.strategies", "training.sinks",
    "fleet", "delivery.exporters", "delivery.hub", "delivery.board", "delivery.page", "commands", "cli",
)  # fmt: skip
WITH_TORCH = ("fivetune.distributed.tensor_parallel", "fivetune.distributed.shards")  # imported when a model is placed
BANNED = {"utils", "util", "common", "helpers", "helper", "manager", "managers", "misc"}


def module_name(path: Path) -> str:
    """`fivetune.data.store.batch` for its file, `fivetune.raw_data` for the folder's __init__.py."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def parse_file(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(encoding="utf-8"))


@cache
def imports(name: str) -> list[tuple[str, int]]:
    """The modules of fivetune that a module imports anywhere in its text, with the line."""
    return list(iter_imports(name))


def iter_imports(name: str) -> Iterator[tuple[str, int]]:
    for node in ast.walk(parse_file(name)):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [module if module in FILES else str(node.module) for module in inner]
        else:
            continue
        yield from ((module, node.lineno) for module in found if module.partition(".")[0] == "fivetune")


def part(module: str) -> str:
    """The top-level file or folder that a module belongs to."""
    return [*module.split("."), ""][1]


def is_private(module: str) -> bool:
    """A file that begins with an underscore is no plugin but a plugin's own machinery, which it imports when used."""
    return module.rpartition(".")[2].startswith("_") and not module.endswith("__")


# --- imports ---


def test_every_part_is_a_room_or_of_the_hall():
    assert {part(name) for name in FILES} == set(PLACE)


def test_imports_point_down():
    wrong = [
        f"{FILES[name]}:{line}: {name} must not import {module}"
        for name in FILES
        if name != "fivetune" and part(name) not in TOP  # they name things lazily
        for module, line in imports(name)
        if part(module) not in ("", part(name)) and (part(name), part(module)) not in FREE
        if PLACE[part(module)] > PLACE[part(name)]
    ]
    assert wrong == []


def test_the_hall_has_no_circle():
    members = {f"fivetune.{name}" for name in HALL}
    graph = {name: {module for module, _ in imports(name)} & members for name in members}
    assert set(TopologicalSorter(graph).static_order()) == members


def test_no_circles_inside_a_folder():
    for folder in {part(name) for name in FILES if name.count(".") > 1}:
        members = {name for name in FILES if part(name) == folder}
        graph = {name: {module for module, _ in imports(name)} & members - {name} for name in members}
        assert set(TopologicalSorter(graph).static_order()) == members


def test_plugins_of_one_kind_never_import_each_other():
    for package in KINDS.values():
        for name in (name for name in FILES if name.startswith(f"{package}.")):
            siblings = [one for one, _ in imports(name) if one.startswith(f"{package}.") and not is_private(one)]
            assert siblings == [], f"{name} imports {siblings}: what they share lives in the folder's __init__.py"


# --- torch ---

CHECK = """
import sys
from importlib import import_module
for name in {names}:
    import_module(name)
    heavy = {{"torch", "transformers"}} & set(sys.modules)
    assert not heavy, f"import {{name}} brings {{heavy}} in"
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_needs_no_torch_does_not_import_it():
    run(
        CHECK.format(
            names=[
                name
                for name in FILES
                if any(f"{name}.".startswith(f"fivetune.{one}.") for one in WITHOUT_TORCH)
                and not is_private(name)
                and name not in WITH_TORCH
                and "__main__" not in name
            ]
        )
    )


def test_reading_a_recipe_needs_no_torch():
    run("import sys, fivetune; fivetune.load_config('squad_v2'); assert 'torch' not in sys.modules")


def test_public_names_exist():
    import fivetune

    assert all(getattr(fivetune, name) for name in fivetune.__all__)
    with pytest.raises(AttributeError, match="module 'fivetune' has no attribute 'trian'"):
        _ = fivetune.trian


# --- budgets ---


def test_files_are_named_after_what_they_do():
    assert [name for name in FILES if BANNED & set(name.split("."))] == []
    assert max(name.count(".") for name in FILES) <= 4


def test_every_module_says_what_it_is():
    assert [name for name in FILES if not ast.get_docstring(parse_file(name))] == []
