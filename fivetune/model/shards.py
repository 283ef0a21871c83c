"""Load a model in shards: each rank reads only its part of every weight from the files.

In: a model on torch's meta device, as a strategy has sharded it, and its safetensors files. Out: the same model with
the values of its shards. No rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from fivetune.distributed.pipeline import find_stage
from fivetune.distributed.sharding import compute_shard_slices, get_local
from fivetune.errors import ModelError
from fivetune.model.family import EMBEDDING_COPIES, HEAD, LEFTOVER_WEIGHTS, SHARED
from fivetune.model.modules import T5Model

ROWS = 4096  # rows of two tables that are compared at a time


def find_tensors(files: list[Path]) -> dict[str, Path]:
    """The file of every tensor, by name."""
    found: dict[str, Path] = {}
    for path in files:
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def is_untied(file_of: Mapping[str, Path], *, own_head: bool) -> bool:
    """Whether the files hold an output head that differs from the embedding, or that config.json declares its own."""
    shared = next((name for name in (SHARED, *EMBEDDING_COPIES) if name in file_of), None)
    if HEAD not in file_of or shared is None:
        return False
    if own_head:
        return True
    with safe_open(file_of[HEAD], "pt") as first, safe_open(file_of[shared], "pt") as second:
        head = first.get_slice(HEAD)
        table = second.get_slice(shared)
        if head.get_shape() != table.get_shape():
            return True
        # Some rows at a time: no rank's memory need hold a whole table.
        rows = range(0, head.get_shape()[0], ROWS)
        return any(not torch.equal(head[row : row + ROWS], table[row : row + ROWS]) for row in rows)


def load_shards(model: T5Model, files: list[Path], device: str, *, where: str) -> None:
    """Allocate this rank's shard of every weight on the device, and read it from the files; tied weights once.

    Raises ModelError for a tensor that is missing, unknown, of another shape, or not finite.
    """
    file_of = find_tensors(files)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    names: dict[nn.Parameter, list[str]] = {}
    known: set[str] = set(LEFTOVER_WEIGHTS)
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            known.add(full)
            places.setdefault(parameter, []).append((module, name))
            names.setdefault(parameter, []).append(full)
    if unknown := sorted(file_of.keys() - known):
        raise ModelError(f"{where}: the model has no tensor {unknown[0]} of the file. Does config.json belong to it?")
    # A pipeline's rank reads the weights of its stage only.
    stage = find_stage(model)
    with ExitStack() as stack:
        opened: dict[Path, Any] = {path: stack.enter_context(safe_open(path, "pt")) for path in files}
        for parameter, own in names.items():
            if stage and stage.number not in stage.holders[own[0]]:
                continue
            # Files hold a tied weight under one of its names.
            name = next((name for name in own if name in file_of), None)
            if name is None:
                raise ModelError(f"{where}: tensor {own[0]} is not in the file. Get the model again.")
            loaded = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            with torch.no_grad():
                get_local(loaded).copy_(_read_shard(opened[file_of[name]], name, loaded, where))
            for module, attribute in places[parameter]:
                setattr(module, attribute, loaded)


def _read_shard(file: Any, name: str, parameter: Tensor, where: str) -> Tensor:
    """Read this rank's shard of a tensor from an open safetensors file."""
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        raise ModelError(
            f"{where}: the weights do not fit config.json: {name} has shape {tuple(stored.get_shape())} in the "
            f"file, {tuple(parameter.shape)} in the model."
        )
    # Only this part is read from the disk.
    shard: Tensor = stored[compute_shard_slices(parameter)]
    if not shard.isfinite().all():
        raise ModelError(f"{where}: tensor {name} of the file holds values that are not finite. Get the model again.")
    return shard
