"""A trained run, which the tests of the server share and do not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import kit
import pytest

import fivetune
from fivetune.training.answers.loading import load_run_model
from fivetune.training.answers.trained_run import TrainedRun


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> TrainedRun:
    folder = tmp_path_factory.mktemp("finished")
    run = fivetune.train(kit.recipe(folder, model_folder), quiet=True, preflight=False)
    return TrainedRun(run.folder, loaded=replace(load_run_model(run.folder), threads=None))
