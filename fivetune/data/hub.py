"""Requests to the Hugging Face hub, none of which waits without a limit of time.

In: a block that asks the hub by huggingface_hub, or by `datasets`, which uses it. Out: the same, with limited waits.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

T = TypeVar("T")

MAX_WAIT_SECONDS = 5.0  # for a connection, for an answer, and between two pieces of a file
NUM_ATTEMPTS = 6  # of huggingface_hub, for a file of which nothing more comes
REMEMBERED_SECONDS = 60.0


class HubMemory(Generic[T]):
    """Answers of the hub by the name that was asked for, each for REMEMBERED_SECONDS.

    A command loads the same data set several times: for its files, for their sizes, for its records.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, T]] = {}

    def find(self, name: str) -> T | None:
        since, answer = self._known.get(name, (-math.inf, None))
        return answer if time.monotonic() < since + REMEMBERED_SECONDS else None

    def keep(self, name: str, answer: T) -> None:
        self._known[name] = time.monotonic(), answer

    def clear(self) -> None:
        self._known.clear()


DATASETS = HubMemory[Any]()
FAILURES = HubMemory[Exception]()


def get_max_wait_seconds(default: float | None = None) -> float:
    """Seconds that a request waits: HF_HUB_DOWNLOAD_TIMEOUT where it is set, else `default`, else MAX_WAIT_SECONDS."""
    from huggingface_hub import constants

    if "HF_HUB_DOWNLOAD_TIMEOUT" in os.environ:
        return constants.HF_HUB_DOWNLOAD_TIMEOUT
    return MAX_WAIT_SECONDS if default is None else default


def describe_limit(error: Exception) -> str:
    """Describe the limit that ended a download; "" if none did."""
    name = type(error).__name__
    if not name.endswith("Timeout") and name != "RemoteProtocolError":
        return ""
    return (
        f" A file of which nothing comes for {get_max_wait_seconds():g} seconds, or only a part, is asked for "
        f"{NUM_ATTEMPTS} times; HF_HUB_DOWNLOAD_TIMEOUT sets the seconds."
    )


@contextmanager
def restrict_waits(seconds: float) -> Generator[None]:
    """Let no request wait longer than this many seconds: the libraries wait up to 100 s, six times, or without end."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    def shorten(request: Any) -> None:
        given = request.extensions.get("timeout", {})
        limits: dict[str, float] = {}
        for kind in ("connect", "read", "write", "pool"):
            limits[kind] = min(given.get(kind) or seconds, seconds)
        request.extensions["timeout"] = limits

    def build_client() -> Any:
        client = build_unlimited()
        client.event_hooks["request"].append(shorten)
        return client

    # Not a hook of the client that there is: the library replaces its client after each failed connection.
    build_unlimited: Any = _http._GLOBAL_CLIENT_FACTORY  # the user's own, if there is one
    set_client_factory(build_client)
    try:
        yield
    finally:
        set_client_factory(build_unlimited)


def query_hub(name: str) -> Exception | None:
    """Ask for a data set of the hub, unless HF_HUB_OFFLINE is set; returns why the hub does not give it, or None.

    A hub that has failed is not asked again while that is remembered.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    if failure := FAILURES.find(name):
        return failure
    try:
        HfApi().dataset_info(name)
    except Exception as error:  # of the hub, of the network, of its library: each of another type
        FAILURES.keep(name, error)
        return error
    return None
