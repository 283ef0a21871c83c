"""Tensors of all ranks in one folder, in the format of torch.distributed.checkpoint.

In: tensors by name. Of a sharded one (DTensor) each rank writes its shard, of a replicated one a single rank writes
all; a tensor may also be on one rank alone. Out: `__<rank>_0.distcp` of each rank, and .metadata, from which any
number of ranks reads the parts that it needs, sharded in any way.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load  # pyright: ignore[reportUnknownVariableType]
from torch.distributed.checkpoint.state_dict_saver import save  # pyright: ignore[reportUnknownVariableType]

from fivetune.distributed.world import World

METADATA = ".metadata"
TRUSTED_CLASSES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
"""Modules whose classes .metadata may refer to; others are refused, because unpickling them could run a program."""


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> list[Path]:
    """Write the tensors of this rank; returns the files that it wrote. Collective: all ranks call it.

    If a rank fails, all raise its error.
    """
    with _raise_first_failure():
        writer = FileSystemWriter(folder)
        save(dict(tensors), storage_writer=writer, process_group=world.group)
    return [*folder.glob(f"__{world.rank}_*.distcp")]


def read_tensors(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Read tensors by name into those given, in place; of a sharded one only this rank's shard. Not collective.

    Raises RuntimeError or ValueError if a tensor is missing or has another shape, OSError if a file cannot be read,
    UnpicklingError if .metadata refers to other objects than those of torch.
    """
    with _raise_first_failure(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # with one process
        load(dict(into), storage_reader=_Reader(folder), no_dist=True)


def read_shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Read the full shape and the dtype of every tensor in a folder."""
    entries = _read_metadata(folder).state_dict_metadata.items()
    return {name: (one.size, one.properties.dtype) for name, one in entries if isinstance(one, TensorStorageMetadata)}


class _Reader(FileSystemReader):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)  # pyright: ignore[reportUnknownMemberType]
        self._metadata = _read_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


def _read_metadata(folder: Path) -> Metadata:
    with (folder / METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"{METADATA} holds another kind of object")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("torch", "Size"), ("torch.serialization", "_get_layout")):
            return super().find_class(module, name)
        found: object = super().find_class(module, name) if module in (*TRUSTED_CLASSES, "torch") else None
        if isinstance(found, torch.dtype):
            return found
        if isinstance(found, type) and found.__module__.startswith(TRUSTED_CLASSES):
            return cast(Any, found)
        raise pickle.UnpicklingError(f"{METADATA} refers to {module}.{name}")


@contextmanager
def _raise_first_failure() -> Generator[None]:
    """Raise the error of the first rank that failed, in place of torch's collection of errors."""
    try:
        yield
    except CheckpointException as error:
        raise min(error.failures.items())[1][0] from None
