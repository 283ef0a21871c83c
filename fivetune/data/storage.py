"""Files in buckets (s3://, gs://, hf:// and every other URL of fsspec) and under local paths.

In: a location, a URL or a local path. Out: its bytes; a file that is there as a whole or not at all. What fails in
passing (network, time-outs, a busy server) is repeated after growing pauses; a missing file, lacking rights and a full
disk are not, because repeating does not help.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from fivetune.errors import ConfigError, FiveTuneEnvironmentError
from fivetune.installation import name_install
from fivetune.rundir.files import fsync_file, fsync_folder, replace_file
from fivetune.values import get_nested

T = TypeVar("T")

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each repetition
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # protocol -> extra of FiveTune that brings its package
LIBRARIES = (
    "botocore",
    "aiobotocore",
    "aiohttp",
    "gcsfs",
    "google",
    "huggingface_hub",
    "httpx",
    "httpcore",
    "requests",
)
"""Packages whose exceptions count as failures of the storage; other exceptions are faults of the program."""
LOCAL_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SERVER_OPTIONS: dict[str, dict[str, Any]] = {
    # One attempt and no cached listings: `try_repeatedly` alone repeats, and other processes write to the same bucket.
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 60},
    }
}
SERVER_OPTIONS["s3a"] = SERVER_OPTIONS["s3"]
SERVER_OPTIONS["file"] = SERVER_OPTIONS["local"] = {"auto_mkdir": True}
REFUSALS = (401, 403, 407)  # HTTP statuses of a server that knows the request and does not allow it
WRITE_TEST = ".write-test"


class StorageError(FiveTuneEnvironmentError):
    """A file in a bucket cannot be read or written."""


class MissingObjectError(StorageError):
    """A file or bucket does not exist."""


class DamagedObjectError(StorageError):
    """A file differs from its checksum, also when it was copied again."""


class FileSystem(Protocol):
    """The methods of fsspec's file systems that are used, which come without types."""

    def cat_file(self, path: str) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def get_file(self, rpath: str, lpath: str) -> None: ...
    def put_file(self, lpath: str, rpath: str) -> None: ...
    def exists(self, path: str) -> bool: ...
    def find(self, path: str) -> list[str]: ...
    def rm_file(self, path: str) -> None: ...


def is_url(location: str) -> bool:
    """Return whether a location is a URL with a protocol, and no local path.

    >>> is_url("s3://bucket/squad/train"), is_url("data/train.jsonl"), is_url("org/name:config:train")
    (True, False, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", location) is not None


def join_location(location: str, *names: str) -> str:
    """Join a location and the names below it.

    >>> join_location("s3://bucket/squad/", "train", "index.json")
    's3://bucket/squad/train/index.json'
    """
    return "/".join([location.rstrip("/"), *names]) if is_url(location) else str(Path(location, *names))


def open_file_system(location: str) -> tuple[FileSystem, str]:
    """Return the file system of a URL, and the path in it.

    Raises ConfigError for an unknown protocol, FiveTuneEnvironmentError without the protocol's package.
    """
    from fsspec.core import url_to_fs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    protocol = location.partition("://")[0].lower()
    try:
        opened = cast(Any, url_to_fs)(location, **SERVER_OPTIONS.get(protocol, {}))
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        install = name_install(extra) if extra else "Install it"
        raise FiveTuneEnvironmentError(f"{location}: {protocol}:// needs a package: {error}. {install}.") from None
    except ValueError as error:
        raise ConfigError(
            f"{location}: {error}. Allowed: a local path, s3://, gs://, hf://, other URLs of fsspec. Correct the URL."
        ) from None
    found = cast(tuple[FileSystem, str], opened)
    if protocol in ("s3", "s3a"):
        cast(Any, found[0]).retries = 1
    return found


def has_object(location: str) -> bool:
    """Return whether a file exists. Raises StorageError if that cannot be found out."""
    if not is_url(location):
        return Path(location).is_file()
    system, path = open_file_system(location)
    return try_repeatedly(lambda: system.exists(path), location, "read")


def get_object(location: str) -> bytes:
    """Return the content of a file. Raises MissingObjectError, StorageError."""
    if not is_url(location):
        return try_repeatedly(Path(location).read_bytes, location, "read")
    system, path = open_file_system(location)
    return try_repeatedly(lambda: system.cat_file(path), location, "read")


def put_object(location: str, content: bytes) -> None:
    """Write a file, replacing one of that name; other processes see the old content or the new. Raises StorageError."""
    if not is_url(location):

        def write() -> None:
            Path(location).parent.mkdir(parents=True, exist_ok=True)
            with replace_file(Path(location)) as file:
                file.write(content)

        try_repeatedly(write, location, "written")
        return
    system, path = open_file_system(location)
    try_repeatedly(lambda: system.pipe_file(path, content), location, "written")


def put_file(source: Path, location: str) -> None:
    """Copy a local file to a location, atomically as in `put_object`. Raises StorageError."""
    if not is_url(location):

        def copy() -> None:
            Path(location).parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as content, replace_file(Path(location)) as file:
                while block := content.read(1 << 20):
                    file.write(block)

        try_repeatedly(copy, location, "written")
        return
    system, path = open_file_system(location)
    try_repeatedly(lambda: system.put_file(str(source), path), location, "written")


def fetch_file(
    location: str,
    target: Path,
    *,
    check: Callable[[Path], str | None] | None = None,
    place: Callable[[Path, Path], object] | None = None,
) -> None:
    """Copy a file to a local path, where it is whole or absent, also after a power cut; by one process at a time.

    Args:
        check: describes what is wrong with the copy, None if it is whole. A wrong copy is fetched once more.
        place: moves the whole copy to `target`, or leaves it, and it is removed.

    Raises MissingObjectError, DamagedObjectError, StorageError; OSError if the local disk refuses the copy.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(f".{target.name}.tmp")  # the next attempt replaces what a killed process left
    try:
        _copy_to(location, staging)
        fault = check and check(staging)
        if fault:  # perhaps damaged on the way
            _copy_to(location, staging)
            fault = check and check(staging)
        if fault:
            raise DamagedObjectError(f"{location}: {fault}.")
        fsync_file(staging)
        if place:
            place(staging, target)
        else:
            staging.replace(target)
        fsync_folder(target.parent)
    finally:
        with suppress(OSError):
            staging.unlink(missing_ok=True)


def _copy_to(location: str, target: Path) -> None:
    if not is_url(location):
        target.write_bytes(get_object(location))
        return
    system, path = open_file_system(location)
    try_repeatedly(lambda: system.get_file(path, str(target)), location, "read")


def list_objects(location: str) -> list[str]:
    """Return the names of all files below a location, relative to it, sorted; [] if there are none."""
    if not is_url(location):
        files = [file for file in Path(location).rglob("*") if file.is_file()]
        return sorted(file.relative_to(location).as_posix() for file in files)
    system, path = open_file_system(location)
    try:
        found = try_repeatedly(lambda: system.find(path), location, "read")
    except MissingObjectError:
        return []
    return sorted(name.removeprefix(path).strip("/") for name in found)


def delete_object(location: str) -> None:
    """Delete a file; none need be there. Raises StorageError."""
    if not is_url(location):
        Path(location).unlink(missing_ok=True)
        return
    system, path = open_file_system(location)
    with suppress(MissingObjectError):
        try_repeatedly(lambda: system.rm_file(path), location, "deleted")


def probe_location(location: str, name: str = WRITE_TEST) -> None:
    """Write a small file to a location and delete it. Raises StorageError if this machine may not, or cannot."""
    put_object(join_location(location, name), b"")
    delete_object(join_location(location, name))


def try_repeatedly(operation: Callable[[], T], location: str, participle: str) -> T:
    """Return the result of an operation on a location, repeated after each of PAUSES while it fails in passing.

    Args:
        participle: what could not be done, for the message: read, written, deleted.

    Raises MissingObjectError or StorageError; OSError for a full or read-only local disk.
    """
    for pause in (*PAUSES, None):
        try:
            return operation()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in LOCAL_FAULTS:
                raise
            if isinstance(error, FileNotFoundError) or _find_status(error) == 404:
                raise MissingObjectError(
                    f"{location}: no such file or bucket ({_describe(error)}). Check the name."
                ) from None
            if _is_refusal(error):
                advice = "Give this user rights to the folder."
                if is_url(location):
                    advice = (
                        "Give this machine credentials with rights to the bucket (AWS_ACCESS_KEY_ID or a role; "
                        "GOOGLE_APPLICATION_CREDENTIALS; HF_TOKEN)."
                    )
                raise StorageError(
                    f"{location}: cannot be {participle}: no rights ({_describe(error)}). {advice}"
                ) from None
            if isinstance(error, ValueError) or type(error).__name__ == "ParamValidationError":  # botocore's
                raise ConfigError(
                    f"{location}: {_describe(error)}. Correct the URL, or the address of the server (AWS_ENDPOINT_URL)."
                ) from None
            library = type(error).__module__.partition(".")[0]
            if not isinstance(error, OSError | TimeoutError) and library not in LIBRARIES:
                raise  # a fault of the program
            if pause is None:
                raise StorageError(
                    f"{location}: cannot be {participle} after {len(PAUSES) + 1} attempts ({_describe(error)}). Check "
                    "the network and the server, then start again: what was done is kept."
                ) from None
            time.sleep(pause)
    raise AssertionError


def _is_refusal(error: Exception) -> bool:
    """Return whether the storage refuses this user, which repeating does not change."""
    if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError):
        return True
    if str(error).startswith("Forbidden: ") or _find_status(error) in REFUSALS:  # the first: gcsfs raises an OSError
        return True
    return any("Credential" in kind.__name__ for kind in type(error).__mro__)


def _find_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error of a library carries; None if it carries none."""
    answer: Any = getattr(error, "response", None)
    found: object = get_nested(answer, "ResponseMetadata", "HTTPStatusCode")  # botocore: a table
    # requests and httpx: an attribute of the answer; aiohttp, gcsfs: of the error.
    for holder, name in ((answer, "status_code"), (error, "status"), (error, "code")):
        if found is None:
            found = getattr(holder, name, None)
    if str(found).isdecimal():
        return int(str(found))
    return _find_status(error.__cause__) if error.__cause__ else None


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
