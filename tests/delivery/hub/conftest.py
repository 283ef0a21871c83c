"""A trained run, which each test gets a copy of."""

from __future__ import annotations

import shutil
from pathlib import Path

import kit
import pytest

import fivetune


@pytest.fixture(scope="package")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("published")
    fivetune.train(kit.recipe(folder, model_folder, train__num_steps=1), quiet=True, preflight=False)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))
