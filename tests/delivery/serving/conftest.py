"""A trained run, which the tests of the server share and do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import kit
import pytest

import fivetune
from fivetune.training.answers.inference import LoadedRun, load_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> LoadedRun:
    folder = tmp_path_factory.mktemp("finished")
    fivetune.train(kit.recipe(folder, model_folder), quiet=True, preflight=False)
    return replace(load_run(folder / "run"), threads=None)
