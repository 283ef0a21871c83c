"""Requests to the Hugging Face hub, none of which waits without a limit of time.

In: a block that asks the hub by huggingface_hub, or by `datasets`, which uses it. Out: the same, with limited waits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

MOST_SECONDS = 5.0  # for a connection, for an answer, and between two pieces of a file
NUM_ATTEMPTS = 6  # of huggingface_hub, for a file of which nothing more comes

FAILED_SECONDS = 60.0
_failed: dict[str, tuple[float, Exception]] = {}  # name -> when the hub has failed, and how


def get_most_seconds(default: float | None = None) -> float:
    """Seconds that a request waits: HF_HUB_DOWNLOAD_TIMEOUT where it is set, else `default`, else MOST_SECONDS."""
    from huggingface_hub import constants

    if "HF_HUB_DOWNLOAD_TIMEOUT" in os.environ:
        return constants.HF_HUB_DOWNLOAD_TIMEOUT
    return MOST_SECONDS if default is None else default


def describe_limit(error: Exception) -> str:
    """How long a file is waited for and what changes it, if that ended a download; else nothing."""
    name = type(error).__name__
    if not name.endswith("Timeout") and name != "RemoteProtocolError":
        return ""
    return (
        f" A file of which nothing comes for {get_most_seconds():g} seconds, or only a part, is asked for "
        f"{NUM_ATTEMPTS} times; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds."
    )


@contextmanager
def restrict_waits(seconds: float) -> Generator[None]:
    """Let no request wait longer than this many seconds: the libraries wait up to 100 s, six times, or without end."""
    from huggingface_hub.utils import get_session

    def shorten(request: Any) -> None:
        limits = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {
            kind: min(limits.get(kind) or seconds, seconds) for kind in ("connect", "read", "write", "pool")
        }

    hooks = get_session().event_hooks["request"]
    hooks.append(shorten)
    try:
        yield
    finally:
        hooks.remove(shorten)


def query_hub(name: str) -> Exception | None:
    """Ask for a data set of the hub, unless HF_HUB_OFFLINE is set; returns why the hub does not give it, or None.

    A hub that has failed is not asked again for FAILED_SECONDS: a command loads the same data set several times.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    since, failure = _failed.get(name, (-math.inf, None))
    if time.monotonic() < since + FAILED_SECONDS:
        return failure
    _failed.pop(name, None)
    try:
        HfApi().dataset_info(name)
    except Exception as error:  # of the hub, of the network, of its library: each of another type
        _failed[name] = (time.monotonic(), error)
        return error
    return None
