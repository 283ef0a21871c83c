"""README and docs are true: commands, files, links, settings, the example task, the reasons for dependencies."""

from __future__ import annotations

import argparse
import doctest
import json
import re
import shlex
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from test_layers import ROWS as LAYERS

import fivetune.metrics
import fivetune.tasks
from fivetune import plugins
from fivetune.commands import score
from fivetune.config import RunConfig, load_config
from fivetune.config.aliases import ALIASES, NO_EQUIVALENT
from fivetune.config.layers import NESTED_PLUGINS, PLUGIN_SECTIONS, parse_overrides
from fivetune.config.manual import build_manual, build_schema
from fivetune.config.recipes import SWEEPS, find_recipe, list_recipe_names
from fivetune.experiments.sweep import read_sweep

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE_SUFFIXES = {"json", "jsonl", "html", "yaml", "csv", "tsv", "py", "md", "txt", "pt", "safetensors", "gz", "parquet"}
PACKAGE_FOLDERS = {"commands", "data", "model", "report", "training", "nano", "telemetry", *plugins.KINDS}
ERRORS_ON_PURPOSE = {"optimizer.lrr"}  # shown with the message that refuses them

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _blocks(text: str, *languages: str) -> list[str]:
    """The fenced code blocks of a page in any of these languages."""
    return [body for language, body in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language in languages]


def _commands(text: str) -> list[list[str]]:
    """The words of every `fivetune ...` line of the shell blocks, without pipes and what follows."""
    found = []
    for block in _blocks(text, "sh", "console"):
        for line in block.splitlines():
            match = re.match(r"(?:\$ )?fivetune (.+)", line)
            if match and not line.startswith("fivetune:"):
                words = shlex.split(match[1], comments=True)
                found.append(words[: words.index("|")] if "|" in words else words)
    return found


def _spans(text: str) -> list[str]:
    """Everything in backquotes outside code blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


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
    inline = [span.split()[1] for span in _spans(text) if re.match(r"fivetune [a-z]", span)]
    verbs = {words[0] for words in _commands(text)} | set(inline)
    assert verbs - {"--help", "--version"} <= {name.replace("_", "-") for name in plugins.list_plugins("commands")}
    targets = set(re.findall(r"^(?:\$ )?make ([\w-]+)", "\n".join(_blocks(text, "sh", "console")), re.MULTILINE))
    targets |= {span.split()[1] for span in _spans(text) if re.match(r"make [a-z]", span)}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@each_page
def test_shell_lines_are_understood(page):
    for words in _commands(page.read_text(encoding="utf-8")):
        command = import_module(f"fivetune.commands.{words[0].replace('-', '_')}")
        parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
        command.add_arguments(parser)
        _, rest = parser.parse_known_args(words[1:])
        assert not rest or getattr(command, "TAKES_SETTINGS", False), words
        for key in parse_overrides(rest):
            assert _is_setting(key) or key in {*RunConfig.model_fields, *ALIASES, *ERRORS_ON_PURPOSE}, words


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
    for section, name in re.findall(rf"(?<![\w./])({sections})\.([a-z_]+)\b(?![(/])", "\n".join(_spans(text))):
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


@each_page
def test_recipes_in_code_blocks_load(page, tmp_path):
    for block in _blocks(page.read_text(encoding="utf-8"), "yaml"):
        (tmp_path / "recipe.yaml").write_text(block.replace("base: recipes/", f"base: {ROOT}/recipes/"))
        assert load_config(tmp_path / "recipe.yaml")


def test_generated_pages_are_up_to_date():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == build_manual(), (
        "fivetune config --manual > docs/config.md"
    )
    written = json.loads((ROOT / "docs" / "recipe.schema.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(build_schema())), "fivetune config --schema > docs/recipe.schema.json"


def test_every_dependency_has_its_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    core = {_package(entry) for entry in project["dependencies"]}
    rows = re.findall(r"^\| ([\w-]+) \| [^|]{5,} \|$", text.partition("## Why each dependency")[2], re.MULTILINE)
    assert core <= set(rows)
    extra_rows = re.findall(r"^\| ([\w, ]+) \| ([\w-]+) \| [^|]{5,} \|$", text, re.MULTILINE)
    for extra, entries in project["optional-dependencies"].items():
        explained = {package for extras, package in extra_rows if extra in extras.split(", ")}
        assert explained == {_package(entry) for entry in entries}, extra


def _package(entry: str) -> str:
    return re.split(r"[<>=!~\[; ]", entry)[0]


def test_layer_table_is_the_tested_one():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (`fivetune/.*) \|$", text, re.MULTILINE)
    told = {int(row): re.findall(r"`fivetune/(\w+)", parts) for row, parts in rows}
    there = {path.stem for path in (ROOT / "fivetune").iterdir()}
    assert told == {row: [part for part in parts if part in there] for row, parts in enumerate(LAYERS)}


def test_exit_codes_are_those_of_the_errors():
    import fivetune.errors as errors

    kinds = (
        errors.ConfigError,
        errors.DataError,
        errors.FiveTuneEnvironmentError,
        errors.NumericError,
        errors.IncompleteError,
    )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for kind in kinds:
        assert re.search(rf"^\| {kind.exit_code} \| ", text, re.MULTILINE), kind


def _copy_example(page: str, line: str, path: Path) -> None:
    """Write the Python block of a page that holds a line."""
    [source] = [block for block in _blocks((ROOT / page).read_text(encoding="utf-8"), "python") if line in block]
    path.parent.mkdir(parents=True)
    path.write_text(source, encoding="utf-8")


@pytest.fixture
def example(tmp_path, monkeypatch) -> Path:
    """The task of README and the metric of docs/tasks.md, in a plugin folder that is forgotten afterwards."""
    folder = tmp_path / "my_plugins"
    _copy_example("README.md", "class YesNo(TaskOptions)", folder / "tasks" / "yes_no.py")
    _copy_example("docs/tasks.md", "class LengthRatio(PerExample)", folder / "metrics" / "length_ratio.py")
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(folder))
    for package in (fivetune.tasks, fivetune.metrics):  # both folders are extended when they are searched
        monkeypatch.setattr(package, "__path__", list(package.__path__))
    yield folder
    for package, name in ((fivetune.tasks, "yes_no"), (fivetune.metrics, "length_ratio")):
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
    assert capsys.readouterr().out in (ROOT / "README.md").read_text(encoding="utf-8")


def test_added_metric_works(example):
    metric = plugins.load_plugin("metrics", "length_ratio")()
    [case] = plugins.import_plugin("metrics", "length_ratio").CASES
    assert metric.score(case.predictions, case.references).corpus == case.expected
    task = {"name": "jsonl", "metrics": ["length_ratio"], "main_metric": "length_ratio"}
    assert load_config({"model": {"path": "m"}, "task": task}).task.main_metric == "length_ratio"


def test_added_task_is_gone_again():
    assert "yes_no" not in plugins.list_plugins("tasks")


# --- the Python page ---


def test_the_examples_of_the_python_page_hold(tickets_folder: Path, tmp_path: Path, monkeypatch) -> None:
    shutil.copytree(tickets_folder, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    done = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False)
    assert done.attempted > 10 and not done.failed
