"""Requests to a hub that does not answer: none waits without a limit, and the cache is used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session, get_session, set_client_factory
from huggingface_hub.utils._http import default_client_factory

from fivetune.data import hub as requests
from fivetune.data.readers.records import list_source_files, read_records
from fivetune.data.readers.table_records import load_hub_dataset
from fivetune.errors import FiveTuneEnvironmentError
from reliability.fake_hub import FakeHub, running_hub

NAME = "org/things"
ROW = {"question": "Who?", "context": "Ann."}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    pytest.importorskip("datasets")
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_HUB_DISABLE_XET", True), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(requests, "MAX_WAIT_SECONDS", 0.3)
    for memory in (requests.DATASETS, requests.FAILURES):
        monkeypatch.setattr(memory, "_known", {})
    monkeypatch.setenv("HF_TOKEN", FakeHub().token)
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    with running_hub() as found:
        found.repos[NAME] = False
        found.files[NAME] = {"train.jsonl": (json.dumps(ROW) + "\n").encode()}
        files = found.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", found.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", found.address)
        yield found


def test_a_data_set_of_the_cache_is_used_while_the_hub_does_not_answer(hub: FakeHub) -> None:
    """It was waited for 100 s and longer, at each of several loads; the hub is asked once."""
    hub.spoils["/"] = "never"
    with pytest.raises(FiveTuneEnvironmentError, match=rf"^{NAME}: cannot be loaded from .*Timeout.*name local files"):
        load_hub_dataset(NAME)
    hub.spoils.clear()
    requests.FAILURES.clear()
    assert load_hub_dataset(NAME)[0] == ROW
    requests.DATASETS.clear()
    hub.spoils["/"], num_before = "never", len(hub.requests)
    assert [load_hub_dataset(NAME)[0] for _ in range(2)] == [ROW, ROW]
    assert len(hub.requests) == num_before + 1


def test_a_file_that_stops_is_given_up_and_the_message_has_the_limits(hub: FakeHub) -> None:
    hub.spoils["train.jsonl"] = "never"
    with pytest.raises(FiveTuneEnvironmentError, match=r"comes for 0\.3 seconds, .* 6 times; HF_HUB_DOWNLOAD_TIMEOUT"):
        load_hub_dataset(NAME)
    assert sum("GET" in line and "train.jsonl" in line for line in hub.requests) == requests.NUM_ATTEMPTS


def test_a_data_set_is_asked_for_once(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store asked at least three times for it, for its files, their sizes and its records."""
    files = list_source_files(NAME)
    num_before = len(hub.requests)
    assert list_source_files(NAME) == files and [record.fields["question"] for record in read_records(NAME)] == ["Who?"]
    assert len(hub.requests) == num_before > 0
    monkeypatch.setattr(requests, "REMEMBERED_SECONDS", 0.0)
    assert list_source_files(NAME) == files and len(hub.requests) > num_before


def test_the_limit_holds_for_the_client_after_a_failed_connection(hub: FakeHub) -> None:
    """The library replaces its client then, and the new one waited without a limit."""
    found: list[dict[str, float]] = []

    def build_own() -> Any:
        client = default_client_factory()
        client.event_hooks["request"].append(lambda request: found.append(request.extensions["timeout"]))
        return client

    set_client_factory(build_own)
    try:
        with requests.restrict_waits(0.3):
            get_session().event_hooks["request"].reverse()  # the limit is set before it is read
            get_session().get(hub.address)
            close_session()
            get_session().event_hooks["request"].reverse()
            get_session().get(hub.address)
        get_session().get(hub.address)
    finally:
        set_client_factory(default_client_factory)
    assert [limits["read"] for limits in found] == [0.3, 0.3, None]
