"""Recognition of out-of-memory errors of all devices.

In: an exception. Out: whether an allocation failed.
"""

from __future__ import annotations

OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory", "resource_exhausted")
"""Texts of CUDA and MPS, the CPU twice, and XLA."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on any device: RuntimeErrors are recognised by their text.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory.")), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    if isinstance(error, RuntimeError):
        return any(words in str(error).lower() for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)
