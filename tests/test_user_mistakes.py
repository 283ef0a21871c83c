"""Mistakes that a user made who knew only the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivetune import plugins
from fivetune.commands.list import _first_docstring_line
from fivetune.errors import ConfigError, RunDirError
from fivetune.rundir import CONFIG, RunDir


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot be used: File name too long. Choose another run.dir"):
        RunDir.create(tmp_path / ("a" * 300))


def test_a_directory_in_use_is_told_so_before_anything_else(tmp_path: Path) -> None:
    owner = RunDir.create(tmp_path / "run")
    (tmp_path / "run" / CONFIG).write_text("{}")
    with pytest.raises(RunDirError, match=r"in use by process"):
        RunDir.create(tmp_path / "run")
    owner.close()


def test_a_plugin_with_a_syntax_error_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "kaputt.py").write_text("class X(\n")
    monkeypatch.setenv("FIVETUNE_PLUGINS", str(tmp_path))
    with pytest.raises(ConfigError, match=r"kaputt.py:1: not valid Python"):
        plugins.load("tasks", "kaputt")
    assert _first_docstring_line("class X(", where="kaputt.py").startswith("(broken: kaputt.py:1: ")
    plugins.import_module("fivetune.tasks").__path__.remove(str(tmp_path / "tasks"))
