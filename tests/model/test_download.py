"""Models of a hub that fails: the cache is used, else the reason is said; a changed file is no model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivetune.data import hub as requests
from fivetune.errors import FiveTuneEnvironmentError
from fivetune.model.download import fetch_snapshot
from fivetune.model.files import find_folder
from reliability.fake_hub import FakeHub, make_certificate, running_hub

NAME = "org/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", FakeHub().token)
    fetch_snapshot.cache_clear()
    with running_hub() as found:
        found.repos[NAME] = False
        found.files[NAME] = {"config.json": b"{}", "model.safetensors": b"weights"}
        files = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        yield found


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_changed_on_its_way_is_refused_and_not_kept(hub: FakeHub, name: str) -> None:
    """It was loaded: the hub's library compares sizes alone."""
    hub.spoils[name] = "changed"
    with pytest.raises(FiveTuneEnvironmentError, match=rf"{name} has another checksum than the hub's, and is removed"):
        find_folder(NAME)
    hub.spoils.clear()
    folder = find_folder(NAME)
    assert [(folder / name).read_bytes() for name in ("config.json", "model.safetensors")] == [b"{}", b"weights"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, r"^org/tiny: the hub responds: .*403.*\. Check the name, or log in for a gated or private model\."),
        (429, r"^org/tiny: not in the hub's cache, and the hub responds: .*429.*\. Try later\. A first try"),
        (
            0,
            r"not in the hub's cache, and the hub cannot be reached \(\w+\)\. A first try .* download .* HF_HOME sets",
        ),
    ],
)
def test_a_hub_that_fails_is_quoted_and_the_cache_is_used(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    """All of them were "cannot be reached", and one that never answers was waited for without end."""
    monkeypatch.setattr(requests, "MAX_WAIT_SECONDS", 0.3)
    fault = {"fails": {NAME: status}} if status else {"spoils": {NAME: "never"}}

    def break_hub() -> None:
        hub.fails, hub.spoils = fault.get("fails", {}), fault.get("spoils", {})

    break_hub()
    with pytest.raises(FiveTuneEnvironmentError, match=said):
        find_folder(NAME)
    hub.fails, hub.spoils = {}, {}
    folder = find_folder(NAME)
    break_hub()
    fetch_snapshot.cache_clear()
    assert find_folder(NAME) == folder


def test_a_process_asks_the_hub_once(hub: FakeHub) -> None:
    folder, num_requests = find_folder(NAME), len(hub.requests)
    assert num_requests and find_folder(NAME) == folder and len(hub.requests) == num_requests


def test_a_download_that_ends_early_says_that_it_can_go_on(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an internal error."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.spoils["model.safetensors"] = "half"
    with pytest.raises(FiveTuneEnvironmentError, match=r"^org/tiny: the download was not finished: .*Start again"):
        find_folder(NAME)
    hub.spoils.clear()
    assert (find_folder(NAME) / "model.safetensors").read_bytes() == b"weights"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_a_certificate_that_is_not_trusted_is_named_and_can_be_trusted(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was "cannot be reached (ConnectError)"."""
    from huggingface_hub import close_session

    certificate = make_certificate(tmp_path)
    with running_hub(certificate) as secured:
        secured.repos, secured.files = hub.repos, hub.files
        files = secured.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", secured.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        with pytest.raises(FiveTuneEnvironmentError, match=r"certificate is not trusted: .*self-signed.*SSL_CERT_FILE"):
            find_folder(NAME)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        close_session()
        assert (find_folder(NAME) / "config.json").read_bytes() == b"{}"
    close_session()
