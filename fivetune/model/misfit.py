"""Say why transformers cannot build or load a model: which weight does not fit config.json, or that memory ran out.

In: a folder's weights and settings. Out: ModelError or FiveTuneEnvironmentError.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from fivetune.errors import FiveTuneEnvironmentError, FiveTuneError, ModelError, format_size, is_out_of_memory
from fivetune.model.files import read_tensor_shapes
from fivetune.model.modules import T5Settings


@contextmanager
def explain_misfit(
    folder: Path, files: list[Path], settings: T5Settings, build: Callable[[T5Settings], nn.Module]
) -> Generator[None]:
    """Raise ModelError for weights that do not fit config.json, or a config.json of which no model can be built, and
    FiveTuneEnvironmentError for too little memory: transformers names neither.

    Args:
        build: builds the model of `settings`.
    """
    try:
        yield
    except (FiveTuneError, ImportError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            size = format_size(sum(path.stat().st_size for path in files))
            raise FiveTuneEnvironmentError(
                f"{folder}: too little memory to load weights of {size}. Free memory, or choose a smaller model."
            ) from None
        wrong = _find_misfit(files, settings, build) or f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        raise ModelError(
            f"{folder}: the weights do not fit config.json: {wrong}. Use the config.json that belongs to the weights."
        ) from error


def _find_misfit(files: list[Path], settings: T5Settings, build: Callable[[T5Settings], nn.Module]) -> str:
    """Describe the first tensor of another shape than config.json gives it; "" without one."""
    try:
        with torch.device("meta"):
            wanted = build(settings).state_dict()
    except Exception as error:  # sizes that no tensor can have
        return f"no model has these settings: {type(error).__name__}: {error}"
    for name, shape in read_tensor_shapes(files).items():
        if name in wanted and list(wanted[name].shape) != shape:
            return f"{name} is {shape} in the file, and {list(wanted[name].shape)} by config.json"
    return ""
