"""Files in buckets and folders: whole or absent; what fails in passing is repeated, what stays wrong is named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bucket import bucket, s3_server  # noqa: F401

from fivetune.data import storage
from fivetune.data.storage import (
    MissingObjectError,
    StorageError,
    delete_object,
    fetch_file,
    get_object,
    has_object,
    join_location,
    list_objects,
    open_file_system,
    put_file,
    put_object,
    try_repeatedly,
)
from fivetune.errors import ConfigError, FiveTuneEnvironmentError


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that would have been made."""
    made: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", made.append)
    return made


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "place") if request.param == "folder" else request.getfixturevalue("bucket")


def test_a_file_goes_out_and_comes_back(place, tmp_path):
    one, two = join_location(place, "a", "one.bin"), join_location(place, "two.bin")
    assert list_objects(place) == [] and not has_object(one)
    put_object(one, b"1234")
    (tmp_path / "two").write_bytes(b"56")
    put_file(tmp_path / "two", two)
    assert list_objects(place) == ["a/one.bin", "two.bin"]
    assert (has_object(one), get_object(one), get_object(two)) == (True, b"1234", b"56")
    put_object(one, b"new")
    fetch_file(one, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"new"
    delete_object(one)
    delete_object(one)
    assert list_objects(place) == ["two.bin"]


def test_what_is_missing_is_named_at_once(place, pauses, tmp_path):
    for act in (get_object, lambda location: fetch_file(location, tmp_path / "copy")):
        with pytest.raises(MissingObjectError, match=r"none\.bin: no such file or bucket .*Check the name\."):
            act(join_location(place, "none.bin"))
    assert pauses == [] and not (tmp_path / "copy").exists()


def test_a_damaged_copy_is_fetched_once_more_and_never_kept(place, tmp_path):
    put_object(join_location(place, "x"), b"1234")
    looked: list[Path] = []

    def find_fault(path: Path) -> str | None:
        looked.append(path)
        return "has another checksum" if len(looked) % 3 else None

    with pytest.raises(StorageError, match=r"x: has another checksum\."):
        fetch_file(join_location(place, "x"), tmp_path / "cache" / "x", check=find_fault)
    assert len(looked) == 2 and list((tmp_path / "cache").iterdir()) == []
    fetch_file(join_location(place, "x"), tmp_path / "cache" / "x", check=find_fault)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["x"]


def test_a_bucket_that_does_not_exist(bucket, pauses):  # noqa: F811
    with pytest.raises(MissingObjectError, match=r"-none/x: no such file or bucket"):
        put_object(f"{bucket}-none/x", b"")
    assert pauses == []


def test_lacking_rights_are_named_at_once(bucket, pauses, monkeypatch):  # noqa: F811
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError, match=r"x: cannot be written: no rights .*AWS_ACCESS_KEY_ID or a role"):
        put_object(f"{bucket}/x", b"")
    assert pauses == []


def test_no_network_is_tried_again_and_then_named(bucket, pauses, monkeypatch):  # noqa: F811
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StorageError, match=r"x: cannot be read after 6 attempts .*what was done is kept\."):
        get_object(f"{bucket}/x")
    assert pauses == list(storage.PAUSES)


def test_what_fails_in_passing_succeeds(pauses):
    answers: list[Any] = [TimeoutError("slow"), ConnectionResetError("reset"), "done"]

    def act() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert try_repeatedly(act, "s3://b/x", "read") == "done" and pauses == [0.5, 1.0]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), ZeroDivisionError()])
def test_a_full_disk_and_a_fault_of_the_program_are_not_tried_again(pauses, fault):
    def act() -> None:
        raise fault

    with pytest.raises(type(fault)):
        try_repeatedly(act, "x", "written")
    assert pauses == []


class Answer(OSError):
    """What a library raises for an answer of the server: requests and httpx, aiohttp, gcsfs, botocore."""

    def __init__(self, **values: Any) -> None:
        super().__init__("the server's words")
        self.__dict__ |= values


def wrapped(cause: Exception) -> OSError:
    """As s3fs wraps the errors of botocore that it has no name for."""
    error = OSError("the server's words")
    error.__cause__ = cause
    return error


def answer(status: int) -> list[Exception]:
    return [
        Answer(response=SimpleNamespace(status_code=status)),
        Answer(status=status),
        Answer(code=str(status)),
        wrapped(Answer(response={"ResponseMetadata": {"HTTPStatusCode": status}})),
    ]


@pytest.mark.parametrize(
    ("faults", "error", "words", "num_pauses"),
    [
        (answer(403), StorageError, "no rights", 0),
        (answer(401), StorageError, "no rights", 0),
        ([OSError("Forbidden: bucket/x\nann has no access")], StorageError, "no rights", 0),  # gcsfs
        (answer(404), MissingObjectError, "no such file or bucket", 0),
        (answer(429), StorageError, "after 6 attempts", 5),
        (answer(500) + answer(503), StorageError, "after 6 attempts", 5),
        ([ConnectionResetError(), TimeoutError()], StorageError, "after 6 attempts", 5),
    ],
)
def test_rights_are_not_tried_again_and_a_busy_server_is(pauses, faults, error, words, num_pauses):
    for fault in faults:

        def act(fault: Exception = fault) -> None:
            raise fault

        pauses.clear()
        with pytest.raises(error, match=words):
            try_repeatedly(act, "gs://bucket/x", "read")
        assert len(pauses) == num_pauses


@pytest.mark.parametrize(
    ("url", "server", "words"),
    [("s3://Bad Bucket!/x", None, "Bad Bucket!.*Correct the URL"), ("s3://b/x", "localhost:9", "AWS_ENDPOINT_URL")],
)
def test_names_that_cannot_be_are_not_tried_again(bucket, pauses, monkeypatch, url, server, words):  # noqa: F811
    import s3fs

    if server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=words):
        get_object(url)
    assert pauses == []
    s3fs.S3FileSystem.clear_instance_cache()


def test_advice_for_a_folder_is_not_that_for_a_bucket():
    def act() -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(StorageError, match=r"/data/x: cannot be written: no rights .*Give this user rights to the"):
        try_repeatedly(act, "/data/x", "written")


def test_urls_that_nothing_opens(monkeypatch):
    with pytest.raises(ConfigError, match=r"s4://b/x: Protocol not known: s4\. Allowed: a local path, s3://"):
        open_file_system("s4://b/x")
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(FiveTuneEnvironmentError, match=r"gs:// needs a package: .*pip install .*gcs"):
        open_file_system("gs://b/x")
