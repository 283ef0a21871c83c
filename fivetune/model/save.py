"""A model to a folder that `from_pretrained` loads, here and in older transformers.

The folder is written beside its place and renamed, so that it is there whole or not at all.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fivetune.errors import EnvironmentProblem
from fivetune.model.load import quiet
from fivetune.rundir import fsync_folder


def save_model(model: Any, tokenizer: Any, folder: Path, *, card: str = "") -> None:
    """Write config, weights (safetensors), tokenizer and model card. Raises EnvironmentProblem if the disk refuses."""
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with quiet():
            model.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
        _state_tie(model, staging / "config.json")
        if card:
            (staging / "README.md").write_text(card, encoding="utf-8")
        for file in staging.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        replace_folder(staging, folder)
    except (OSError, SafetensorError) as error:
        raise EnvironmentProblem(
            f"{folder}: the model cannot be written: {error}. Free disk space, then resume."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def replace_folder(staging: Path, folder: Path) -> None:
    """Put a finished folder in its place; what was there before is removed only then."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    staging.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _state_tie(model: Any, path: Path) -> None:
    """Say in config.json whether the head is tied: transformers 5 always writes true."""
    if not hasattr(model, "lm_head"):  # a span head has nothing to tie
        return
    config = json.loads(path.read_text())
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    config["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
