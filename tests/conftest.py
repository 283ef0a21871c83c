"""Fixtures: the tiny tokenizer and model are made once per session."""

from __future__ import annotations

from pathlib import Path

import kit
import pytest


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return kit.make_model(tmp_path_factory.mktemp("models") / "tiny-t5", tokenizer_folder)
