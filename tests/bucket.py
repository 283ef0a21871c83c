"""A bucket behind a real S3 API on this machine: moto's server, reached by s3fs as any other endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of the server; one for all tests, which have buckets of their own."""
    for package in ("s3fs", "boto3", "flask_cors"):
        pytest.importorskip(package, reason=f"the test extra is not installed: {package}")
    server: Any = pytest.importorskip("moto.server", reason="the test extra is not installed: moto").ThreadedMotoServer(
        "127.0.0.1", 0, verbose=False
    )
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty bucket; the environment leads to it, as a user's does."""
    import boto3
    import s3fs

    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_server}.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    boto3.client("s3").create_bucket(Bucket=name)
    yield f"s3://{name}"
    s3fs.S3FileSystem.clear_instance_cache()
