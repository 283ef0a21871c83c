"""A server of a test on loopback, in a thread of the test's process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from fivetune.delivery.serving.app import Service, ServingLimits, build_app
from fivetune.delivery.serving.batching import Batcher
from fivetune.delivery.serving.guard import Guard
from fivetune.delivery.serving.measures import ServerMeasures
from fivetune.delivery.serving.schema import FieldFacts, RunFacts
from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
from fivetune.model.decode import Decoding
from fivetune.rundir.records import Prediction
from reliability.requests import RECORDS as RECORDS

FIELDS = tuple(FieldFacts(name, value, True) for name, value in RECORDS[0].items())


@dataclass
class Server:
    client: httpx.Client
    batcher: Any
    port: int

    def post(self, path: str = "/predict", **options: Any) -> tuple[int, Any]:
        answer = self.client.post(path, **options)
        return answer.status_code, answer.json()

    def read_measures(self) -> dict[str, float]:
        lines = self.client.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}

    def send(self, raw: bytes, *, half: bool = False) -> bytes:
        """Send bytes as they are; `half`: cut the connection at once."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.sendall(raw)
            if half:
                return b""
            return b"".join(iter(lambda: connection.recv(65536), b""))


@contextmanager
def serving(
    answers: Any,
    *,
    token: str | None = None,
    max_new_tokens: int = 8,
    facts: dict[str, RunFacts] | None = None,
    **options: Any,
) -> Iterator[Server]:
    """Serve one model, or several: `answers` and `facts` are then by name."""
    limits = ServingLimits(**{key: options.pop(key) for key in ("body_bytes", "records", "seconds") if key in options})
    measures = ServerMeasures()
    batcher = Batcher(
        answers if facts else {"run": answers},
        **{"max_batch": 32, "max_wait_seconds": 0.01, "max_queue": 64, "on_batch": measures.add_batch, **options},
    )
    models = facts or {"run": RunFacts("run", "squad_v2", 6, FIELDS, Decoding(max_new_tokens))}
    service = Service(batcher, models, limits, Guard(token=token), measures)
    with bind_socket("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        server = build_server(build_app(service), drain_seconds=5, idle_seconds=1)
        thread = threading.Thread(target=run_until_stopped, args=(server, bound))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers) as client:
                yield Server(client, batcher, port)
        finally:
            server.should_exit = True
            thread.join(20)
            batcher.close(20)
        assert not thread.is_alive()


class Slow:
    """A model that answers when it may, and keeps what it was asked."""

    def __init__(self) -> None:
        self.may_answer, self.begun, self.asked = threading.Event(), threading.Event(), list[Any]()

    def __call__(self, requests: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.may_answer.wait(20)
        self.asked += requests
        return [[Prediction(id="0", prediction="yes") for _ in one] for one in requests]
