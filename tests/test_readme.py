"""README and docs are true: commands, files, links, settings, the example task, the reasons for dependencies."""

from __future__ import annotations

import argparse
import doctest
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from docs_kit import PAGES, ROOT, blocks, commands, shell_lines, spans
from test_layers import ROOMS

import fivetune.scores.metrics
import fivetune.tasks
from fivetune import cli, plugins
from fivetune.commands import score
from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import ALIASES, NO_EQUIVALENT
from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, parse_overrides
from fivetune.config.manual import build_manual, build_schema
from fivetune.config.recipes import SWEEPS, find_recipe, list_recipe_names
from fivetune.fleet.experiments.sweep import read_sweep

FILE_SUFFIXES = {"json", "jsonl", "html", "yaml", "csv", "tsv", "py", "md", "txt", "pt", "safetensors", "gz", "parquet"}
PACKAGE_FOLDERS = {*ROOMS, *plugins.KINDS}
ERRORS_ON_PURPOSE = {"optimizer.lrr"}  # shown with the message that refuses them


def each_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """A test that checks all pages and names those that are wrong."""

    @wraps(check)
    def check_pages() -> None:
        wrong = {}
        for page in PAGES:
            try:
                check(page)
            except Exception as error:
                wrong[str(page.relative_to(ROOT))] = error
        assert wrong == {}

    del check_pages.__wrapped__  # pytest would see its argument
    return check_pages


@cache
def _is_setting(key: str) -> bool:
    """Whether a dotted key is a setting, of any plugin of its section if the section picks one."""
    section, _, name = key.partition(".")
    name = name.partition(".")[0]  # data.columns.question
    if section not in RunConfig.model_fields:
        return False
    if section in PLUGIN_SECTIONS:
        kind = PLUGIN_SECTIONS[section]
        return name == "name" or any(
            name in plugins.load_plugin(kind, plugin).model_fields for plugin in plugins.list_plugins(kind)
        )
    if kind := NESTED_PLUGINS.get(".".join(key.split(".")[:2])):
        name = key.split(".")[2] if key.count(".") > 1 else "name"
        return name == "name" or any(
            name in plugins.load_plugin(kind, plugin).model_fields for plugin in plugins.list_plugins(kind)
        )
    annotation = RunConfig.model_fields[section].annotation
    return name in getattr(annotation, "model_fields", {})


@each_page
def test_no_marker_is_left(page):
    assert "@@FILL@@" not in page.read_text(encoding="utf-8")


@each_page
def test_named_commands_exist(page):
    text = page.read_text(encoding="utf-8")
    inline = [span.split()[1] for span in spans(text) if re.match(r"fivetune [a-z]", span)]
    verbs = {words[0] for words in commands(shell_lines(text))} | set(inline)
    assert verbs - {"--help", "--version"} <= {name.replace("_", "-") for name in plugins.list_plugins("commands")}
    targets = set(re.findall(r"^(?:\$ )?make ([\w-]+)", "\n".join(blocks(text, "sh", "console")), re.MULTILINE))
    targets |= {span.split()[1] for span in spans(text) if re.match(r"make [a-z]", span)}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def _build_parser(command: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    command.add_arguments(parser)
    return parser


@each_page
def test_commands_are_understood(page):
    """Every `fivetune ...` of a page by the command's own parser; settings exist, and their values are allowed."""
    for words in commands(shell_lines(page.read_text(encoding="utf-8"))):
        if words[0].startswith("-"):
            continue
        command = import_module(f"fivetune.commands.{words[0].replace('-', '_')}")
        _, rest = _build_parser(command).parse_known_args(words[1:])
        assert not rest or getattr(command, "TAKES_SETTINGS", False), words
        settings = parse_overrides(rest)
        for key in settings:
            assert _is_setting(key) or key in {*RunConfig.model_fields, *ALIASES, *ERRORS_ON_PURPOSE}, words
        given = {key: value for key, value in settings.items() if key not in ERRORS_ON_PURPOSE}
        if words[1:] and words[1] in list_recipe_names() and words[1] != "base":
            assert load_config(words[1], given), words


@each_page
def test_flags_in_sentences_exist(page):
    text = page.read_text(encoding="utf-8")
    for words in commands([span for span in spans(text) if re.match(r"fivetune [a-z]", span)]):
        command = import_module(f"fivetune.commands.{words[0].replace('-', '_')}")
        known = {*_build_parser(command)._option_string_actions, "--traceback"}
        for flag in [word.partition("=")[0] for word in words[1:] if word.startswith("--")]:
            is_setting = getattr(command, "TAKES_SETTINGS", False) and (_is_setting(flag[2:]) or flag[2:] in ALIASES)
            assert flag in known or is_setting or flag == "--device", words


@each_page
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "#")):
            path, _, anchor = target.partition("#")
            assert (page.parent / path).is_file(), target
            assert not anchor or anchor in _anchors((page.parent / path).read_text(encoding="utf-8")), target
    for name in re.findall(r"\b(?:fivetune|tests|docs|recipes|benchmarks)/[\w./-]*\w/?", text):
        assert (ROOT / name).exists(), name
    if page.name == "design.md":  # there modules are named from inside the package
        for name in re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?|[a-z_]+\.py)", text):
            exists = [(ROOT / name).exists(), any((ROOT / "fivetune").rglob(name.rstrip("/")))]
            assert any(exists) or name in ("sweep.py", "train/"), name


def _anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_named_settings_exist(page):
    text = page.read_text(encoding="utf-8")
    sections = "|".join(RunConfig.model_fields)
    for section, name in re.findall(rf"(?<![\w./])({sections})\.([a-z_]+)\b(?![(/])", "\n".join(spans(text))):
        key = f"{section}.{name}"
        assert name in FILE_SUFFIXES or key in ERRORS_ON_PURPOSE or _is_setting(key), key
    for name in re.findall(r"^\| `([a-z_]+)` \| `\w+\.\w+` \|$", text, re.MULTILINE):
        assert name in ALIASES or name in NO_EQUIVALENT


@each_page
def test_named_recipes_load(page):
    for name in re.findall(r"\brecipes/([\w/]+)\.yaml", page.read_text(encoding="utf-8")):
        if name.startswith(f"{SWEEPS}/"):
            assert read_sweep(find_recipe(name)).runs
            continue
        assert name in list_recipe_names()
        if name != "base":
            assert load_config(find_recipe(name)).run.dir


def test_recipes_in_code_blocks_load(tmp_path):
    for page in PAGES:
        for block in blocks(page.read_text(encoding="utf-8"), "yaml"):
            (tmp_path / "recipe.yaml").write_text(block.replace("base: recipes/", f"base: {ROOT}/recipes/"))
            assert load_config(tmp_path / "recipe.yaml"), page


def test_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == build_manual(), (
        "fivetune config --manual > docs/config.md"
    )
    written = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(build_schema())), "fivetune config --schema > docs/recipe.schema.json"


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    core = {_package(entry) for entry in project["dependencies"]}
    rows = re.findall(r"^\| ([\w-]+) \| [^|]{5,} \|$", text.partition("# Why each dependency")[2], re.MULTILINE)
    assert core <= set(rows)
    extra_rows = re.findall(r"^\| ([\w, ]+) \| ([\w-]+) \| [^|]{5,} \|$", text, re.MULTILINE)
    for extra, entries in project["optional-dependencies"].items():
        explained = {package for extras, package in extra_rows if extra in extras.split(", ")}
        assert explained == {_package(entry) for entry in entries}, extra


def _package(entry: str) -> str:
    return re.split(r"[<>=!~\[; ]", entry)[0]


def test_table_of_rooms_is_in_the_order_of_imports():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)/` \|", table, re.MULTILINE)) == ROOMS


def test_exit_codes_are_those_of_the_errors():
    import fivetune.errors as errors

    kinds = (
        errors.ConfigError,
        errors.DataError,
        errors.FiveTuneEnvironmentError,
        errors.NumericError,
        errors.IncompleteError,
    )
    text = (ROOT / "docs" / "run-directory.md").read_text(encoding="utf-8")
    for kind in kinds:
        assert re.search(rf"^\| {kind.exit_code} \| ", text, re.MULTILINE), kind


def test_the_list_of_tasks_is_that_of_the_program(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["list", "tasks"]) == 0
    [block] = [
        one for one in blocks((ROOT / "docs/commands.md").read_text(encoding="utf-8"), "console") if "list tasks" in one
    ]
    assert block.partition("\n")[2] == capsys.readouterr().out


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1_300


def _copy_example(page: str, line: str, path: Path) -> None:
    """Write the Python block of a page that holds a line."""
    [source] = [block for block in blocks((ROOT / page).read_text(encoding="utf-8"), "python") if line in block]
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """The task and the metric of docs/tasks.md, in a plugin folder that is forgotten afterwards."""
    folder = tmp_path / "my_plugins"
    _copy_example("docs/tasks.md", "class YesNo(TaskOptions)", folder / "tasks" / "yes_no.py")
    _copy_example("docs/tasks.md", "class LengthRatio(PerExample)", folder / "metrics" / "length_ratio.py")
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(folder))
    for package in (fivetune.tasks, fivetune.scores.metrics):  # both folders are extended when they are searched
        monkeypatch.setattr(package, "__path__", list(package.__path__))
    yield folder
    for package, name in ((fivetune.tasks, "yes_no"), (fivetune.scores.metrics, "length_ratio")):
        sys.modules.pop(f"{package.__name__}.{name}", None)
        vars(package).pop(name, None)


def test_added_task_works(example, tmp_path, capsys):
    assert "yes_no" in plugins.list_plugins("tasks")
    task, (record, expected) = plugins.load_plugin("tasks", "yes_no")(), plugins.import_plugin("tasks", "yes_no").SAMPLE
    assert task.to_text(record) == expected
    assert task.from_text(" Yes ") in expected.references
    assert task.train_targets(expected) == ("yes",)
    assert task.to_text(record, labelled=False).references == ()
    start, end = expected.clippable
    assert expected.inputs[start:end] == record.fields["passage"]
    other = {"id": "8", "question": "is rust a fuel", "passage": "Rust is an iron oxide.", "label": False}
    records = [dict(record.fields), other]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "guesses.json").write_text('{"7": "yes", "8": "yes"}')
    parser = argparse.ArgumentParser()
    score.add_arguments(parser)
    words = ["yes_no", str(tmp_path / "answers.jsonl"), str(tmp_path / "guesses.json")]
    args, settings = parser.parse_known_args(words)
    assert score.run(argparse.Namespace(**vars(args), settings=settings)) == 0
    assert capsys.readouterr().out in (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")


def test_added_metric_works(example):
    metric = plugins.load_plugin("metrics", "length_ratio")()
    [case] = plugins.import_plugin("metrics", "length_ratio").CASES
    assert metric.score(case.predictions, case.references).corpus == case.expected
    task = {"name": "jsonl", "metrics": ["length_ratio"], "main_metric": "length_ratio"}
    assert load_config({"model": {"path": "m"}, "task": task}).task.main_metric == "length_ratio"


def test_added_task_is_gone_again():
    assert "yes_no" not in plugins.list_plugins("tasks")


# --- the Python page ---


@pytest.mark.release
def test_the_examples_of_the_python_page_hold(tickets_folder: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(tickets_folder, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    done = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert done.attempted > 10 and not done.failed
