"""A stand-in for CUDA graphs: what is recorded is replayed on the very tensors of the recording, whatever Python says.

A replay runs the operators again, with the numbers and shapes that they had, from the memory that they read to the
memory that they wrote. What Python has replaced by another tensor since is read as it was, as on a device; a tensor
that is gone is an error, and so is an operator that asks the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_copy_from", "lift_fresh")


def tensors_of(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def alias(value: Any) -> Any:
    """The same memory, which does not keep the tensor; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    made = torch.empty(0, dtype=value.dtype)
    return made.set_(value.untyped_storage(), value.storage_offset(), value.shape, value.stride())


class Tape(TorchDispatchMode):
    """The operators of a function; `before` holds what memory from outside held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.own: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.read: list[ref[Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(word in str(func) for word in HOST):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(value)
        found = func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        outer = [each if each._base is None else each._base for each in given if place(each) not in self.own]
        self.read += map(ref, outer)
        old = {place(each) for each in given}
        new = [each for each in tensors_of(found) if place(each) not in old]
        self.own.update(map(place, new))
        self.calls.append((func, tree_map(alias, args), tree_map(alias, kwargs), [*map(alias, new)]))
        return found

    def keep(self, tensor: Tensor) -> None:
        if place(tensor) not in self.own and place(tensor) not in self.before:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.before[place(tensor)] = whole, whole.clone()

    def run(self) -> None:
        if any(each() is None for each in self.read):
            raise RuntimeError("an illegal read: a tensor of the recording is gone")
        for func, args, kwargs, new in self.calls:
            found = tensors_of(func(*args, **kwargs))
            for old, one in zip(new, found, strict=False):
                old.copy_(one)


class Recorder:
    """The `record` of CUDA graphs.

    Args:
        watch: called with "record" or "replay" before each; may raise.

    Attributes:
        tapes: those of all recordings, which may be gone.
    """

    def __init__(self, watch: Callable[[str], object] = str) -> None:
        self.watch = watch
        self.tapes: list[ref[Tape]] = []

    @property
    def num_alive(self) -> int:
        return sum(tape() is not None for tape in self.tapes)

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.watch("record")
        tape = Tape()
        with tape:
            result = function()
        for whole, before in tape.before.values():  # a capture runs nothing
            whole.copy_(before)
        self.tapes.append(ref(tape))

        def replay() -> Tensor:
            self.watch("replay")
            tape.run()
            return result

        return replay
