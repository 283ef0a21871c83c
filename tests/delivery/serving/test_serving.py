"""`fivetune serve`: a real server on loopback answers as `predict` does, in batches, within its limits."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import kit
import psutil
import pytest
from serving_kit import FIELDS, Server, Slow, serving
from starlette.responses import PlainTextResponse

from fivetune.cli import main
from fivetune.delivery.serving.batching import Batcher, QueueFullError
from fivetune.delivery.serving.body import RequestError, parse_json, read_inputs
from fivetune.delivery.serving.guard import Guard
from fivetune.delivery.serving.schema import RunFacts, list_fields
from fivetune.delivery.serving.server import bind_socket, build_server, run_until_stopped
from fivetune.errors import NumericError
from fivetune.rundir.records import Prediction
from fivetune.scores.analysis.abstention import Silence
from fivetune.training.answers.trained_run import TrainedRun
from reliability.requests import CUT, RECORDS, build_request, open_slow_clients, send_fuzzed
from reliability.warm import WarmProcess, start_command

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
NUM_FUZZED = int(os.environ.get("FIVETUNE_FUZZ", "300"))


@pytest.fixture(scope="module")
def server(trained: TrainedRun) -> Generator[Server]:
    own = trained.loaded.build_decoding()
    facts = {"run": RunFacts("run", "squad_v2", 6, FIELDS, own, sends_tokens=False)}
    answers = {"run": partial(trained.predict_each, max_input_tokens=200)}
    with serving(answers, facts=facts, seconds=2) as found:
        yield found


# --- answers ---


def test_answers_below_the_confidence_are_unsure(trained: TrainedRun) -> None:
    expected = trained.predict(RECORDS[:1], min_confidence=0)[0]
    facts = RunFacts("run", "squad_v2", 6, FIELDS, trained.loaded.build_decoding(), silence=Silence(1.0))
    with serving({"run": trained.predict_each}, facts={"run": facts}) as server:
        code, one = server.post(json=RECORDS[0])
        assert code == 200 and (one["prediction"], one["unsure"], one["withheld"]) == (None, True, expected.prediction)
        assert one["reason"].endswith("is below 1")
        # A request has the last word.
        code, one = server.post(json={**RECORDS[0], "min_confidence": 0})
        assert code == 200 and one["prediction"] == expected.prediction and "unsure" not in one
        code, found = server.post(json={"inputs": RECORDS[:2], "min_confidence": 0.999})
        assert code == 200 and all(one["unsure"] for one in found["predictions"])
        for wrong in (1.5, "0.5", None, True):
            code, found = server.post(json={**RECORDS[0], "min_confidence": wrong})
            assert code == 422 and "0 to 1" in found["error"]["message"]
        # OpenAI's form has no place for it.
        for streams in (False, True):
            code, found = server.post("/v1/completions", json={"prompt": "question: Who?", "stream": streams})
            assert (code, found["error"]["type"]) == (422, "unsure")


def test_answers_are_those_of_predict(server: Server, trained: TrainedRun) -> None:
    code, found = server.post(json={"inputs": RECORDS[:9]})
    expected = trained.predict(RECORDS[:9])
    assert code == 200 and [one["prediction"] for one in found["predictions"]] == [one.prediction for one in expected]
    assert [one["id"] for one in found["predictions"]] == [one.id for one in expected]
    for one, other in zip(found["predictions"], expected, strict=True):
        assert one["confidence"] == pytest.approx(other.confidence, rel=1e-4)
        assert one["num_input_tokens"] == other.num_input_tokens
    code, one = server.post(json=RECORDS[3])
    assert code == 200 and (one["prediction"], one["id"]) == (expected[3].prediction, "0")
    text = expected[0].inputs
    assert server.post(json={"inputs": [text]})[1]["predictions"][0]["prediction"] == expected[0].prediction


def test_requests_that_share_a_batch_do_not_mix(trained: TrainedRun) -> None:
    """Equal ids, records beside texts, and unusable records stay with their request."""
    a, b = {"id": "q", **RECORDS[0]}, {"id": "q", **RECORDS[30]}
    text = trained.predict([b])[0].inputs
    requests = [[a], [b, b], [], [text], [{"x": 1}], [{"question": "long " * 300, "context": "c"}, a]]
    together = trained.predict_each(requests, max_input_tokens=200)
    for given, found in zip(requests[:5], together[:5], strict=True):
        (alone,) = trained.predict_each([given])
        assert [(one.id, one.prediction, one.skipped) for one in found] == [
            (one.id, one.prediction, one.skipped) for one in alone
        ]
    long, short = together[5]
    assert re.fullmatch(r"the input has [\d,]+ tokens\. Allowed are 200\. Shorten it, .*", long.skipped or "")
    assert short.prediction == together[0][0].prediction and not short.skipped
    assert trained.predict_each([requests[5][:1]], max_input_tokens=200)[0][0].skipped == long.skipped


def test_completions_in_openai_s_form(server: Server, trained: TrainedRun) -> None:
    expected = trained.predict(RECORDS[:2])
    prompts = [one.inputs for one in expected]
    code, found = server.post("/v1/completions", json={"prompt": prompts, "temperature": 0, "max_tokens": 16, "n": 1})
    assert code == 200 and found["object"] == "text_completion"
    assert [(one["index"], one["text"]) for one in found["choices"]] == list(
        enumerate(one.prediction for one in expected)
    )
    numbers = [sum(one.num_input_tokens or 0 for one in expected), sum(one.num_tokens or 0 for one in expected)]
    assert list(found["usage"].values()) == [*numbers, sum(numbers)]
    assert (
        server.post("/v1/completions", json={"prompt": prompts[0]})[1]["choices"][0]["text"] == expected[0].prediction
    )


def test_200_clients_at_once_share_batches(trained: TrainedRun) -> None:
    with serving(trained.predict_each, max_queue=256) as many:
        before = many.read_measures()["fivetune_batch_records_count"]
        unlimited = httpx.Limits(max_connections=None)
        with (
            httpx.Client(base_url=many.client.base_url, limits=unlimited, timeout=60) as clients,
            ThreadPoolExecutor(200) as pool,
        ):
            asked = [RECORDS[i % len(RECORDS)] for i in range(200)]
            found = list(pool.map(lambda one: clients.post("/predict", json=one), asked))
        assert [one.status_code for one in found] == [200] * 200
        expected = [one.prediction for one in trained.predict(asked)]
        assert [one.json()["prediction"] for one in found] == expected
        measures = many.read_measures()
        num_batches = measures["fivetune_batch_records_count"] - before
        assert measures["fivetune_batch_records_sum"] == 200 and num_batches < 100
        assert measures['fivetune_requests_total{code="200",route="/predict"}'] == 200
        assert measures["fivetune_queue_requests"] == 0 and measures['fivetune_input_tokens_total{model="run"}'] > 200


# --- the queue ---


def test_a_full_queue_is_429_and_waiting_requests_are_answered() -> None:
    model = Slow()
    with serving(model, max_queue=2, max_batch=1) as small, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(small.post, json={"inputs": ["first"]})]
        assert model.begun.wait(10)
        waiting += [pool.submit(small.post, json={"inputs": ["next"]}) for _ in range(2)]
        while len(small.batcher) < 2:
            time.sleep(0.01)
        refused = small.client.post("/predict", json={"inputs": ["last"]})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
        assert refused.json() == {
            "error": {"message": "the queue is full. Send the request again later.", "type": "queue_full"}
        }
        model.may_answer.set()
        assert [one.result()[0] for one in waiting] == [200] * 3


def test_a_client_that_has_gone_is_not_computed() -> None:
    model = Slow()
    with serving(model, max_batch=1) as slow, ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow.post, json={"inputs": ["first"]})
        assert model.begun.wait(10)
        slow.send(build_request(b'{"inputs": ["gone"]}'), half=True)
        while not any('code="499"' in name for name in slow.read_measures()):
            time.sleep(0.01)
        model.may_answer.set()
        assert first.result()[0] == 200
        assert slow.post(json={"inputs": ["after"]})[0] == 200
        assert [one[0] for one in model.asked] == ["first", "after"]


def test_no_answer_in_time_is_503_and_a_slow_body_408() -> None:
    model = Slow()
    with serving(model, seconds=0.3) as slow:
        code, found = slow.post(json={"inputs": ["a"]})
        assert (code, found["error"]["type"]) == (503, "timeout")
        head = (
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
        )
        answer = slow.send(head)
        assert b" 408 " in answer and b'"request_timeout"' in answer
        model.may_answer.set()
        assert slow.post(json={"inputs": ["b"]})[0] == 200


def test_a_batch_waits_while_requests_keep_coming_and_not_longer() -> None:
    sizes: list[int] = []
    batcher = Batcher(
        {"run": lambda batch, **options: [[Prediction(id="0", prediction="yes")] for _ in batch]},
        max_batch=100,
        max_wait_seconds=5,
        max_queue=9,
        on_batch=lambda num_records, seconds: sizes.append(num_records),
    )
    started = time.monotonic()
    last = [batcher.submit("run", [str(i)]) for i in range(3) if not time.sleep(0.1)][-1]
    last.result(timeout=9)
    assert sizes == [3] and 1 <= time.monotonic() - started < 4
    batcher.close()


@contextmanager
def queueing(model: Slow, **options: Any) -> Iterator[tuple[Batcher, list[int]]]:
    """A batcher whose model is busy with a first request; also the sizes of its batches, of which that is the first."""
    sizes: list[int] = []
    limits = {"max_batch": 1, "max_wait_seconds": 0, "max_queue": 9} | options
    batcher = Batcher({"run": model}, **limits, on_batch=lambda num_records, seconds: sizes.append(num_records))
    batcher.submit("run", ["first"])
    assert model.begun.wait(10)
    try:
        yield batcher, sizes
        assert not batcher.close(0)
    finally:
        model.may_answer.set()
        assert batcher.close(20)


def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    model = Slow()
    with queueing(model, max_queue=2) as (batcher, _):
        gone = [batcher.submit("run", ["gone"]) for _ in range(2)]
        with pytest.raises(QueueFullError):
            batcher.submit("run", ["refused"])
        assert all(one.cancel() for one in gone) and len(batcher) == 0
        batcher.submit("run", ["next"])
    assert [one[0] for one in model.asked] == ["first", "next"]


def test_a_batch_has_no_more_records_than_it_may() -> None:
    with queueing(Slow(), max_batch=4) as (batcher, sizes):
        for size in (3, 3, 1, 2, 5, 1):
            batcher.submit("run", ["a"] * size)
    assert sizes == [1, 3, 4, 2, 5, 1]


def test_one_request_cannot_fail_the_others_of_its_batch() -> None:
    def answer(requests: Any, **options: Any) -> Any:
        if any("bad" in one for one in requests):
            raise NumericError("/secret/path: not finite")
        return [[Prediction(id="0", prediction="yes")] for _ in requests]

    with serving(answer, max_batch=4, max_wait_seconds=0.3) as faulty, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: faulty.post(json={"inputs": [text]}), ["a", "bad", "b", "c"]))
        assert [code for code, _ in found] == [200, 500, 200, 200]
        message = "internal error. The server's log has the cause."
        assert found[1][1] == {"error": {"message": message, "type": "internal_error"}}


def test_all_origins_count() -> None:
    origins = [("Origin", "http://localhost"), ("Origin", "http://evil.example")]
    with serving(Slow()) as server:
        answer = server.client.get("/health", headers=[("Host", "localhost"), *origins])
        assert answer.status_code == 403 and "evil.example" in answer.text


def test_half_open_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivetune.delivery.serving.server.MAX_CONNECTIONS", 3)
    with serving(Slow()) as server:
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
        for one in held:
            with suppress(OSError):  # the first ones are closed
                one.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        assert server.send(HEALTH).startswith(b"HTTP/1.1 200")
        held[0].settimeout(5)
        with suppress(ConnectionResetError):
            assert held[0].recv(1) == b""
        for one in held:
            one.close()


def test_connections_beyond_the_limit_of_requests_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivetune.delivery.serving.server.MAX_CONNECTIONS", 3)
    model = Slow()
    with serving(model, max_batch=1) as server, ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(server.send, build_request(b'{"inputs": ["a"]}', Connection="close")) for _ in range(3)]
        while not model.begun.is_set() or len(server.batcher) < 2:
            time.sleep(0.01)
        answer = server.send(HEALTH)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable") and b"too_many_connections" in answer
        model.may_answer.set()
        assert [one.result()[:12] for one in waiting] == [b"HTTP/1.1 200"] * 3


def test_a_client_that_does_not_read_is_dropped() -> None:
    with serving(Slow(), seconds=1) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.settimeout(1)
        with pytest.raises(OSError, match=r"reset|Broken pipe|timed out"):
            for _ in range(100_000):
                connection.sendall(b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        until = time.monotonic() + 20
        own = psutil.Process().net_connections()
        while any(one.laddr and one.laddr.port == server.port and one.status == "ESTABLISHED" for one in own):
            assert time.monotonic() < until
            time.sleep(0.1)
            own = psutil.Process().net_connections()
        assert server.client.get("/health").status_code == 200


def test_idle_connections_are_closed() -> None:
    with serving(Slow()) as idle:
        started = time.monotonic()
        assert idle.send(b"POST /predict HTTP/1.1\r\nHost: loc") == b""
        assert time.monotonic() - started < 10
        assert idle.client.get("/health").json() == {"status": "ok"}


# --- what is refused ---


@pytest.mark.parametrize(
    ("path", "options", "code", "message"),
    [
        ("/predict", {"content": b"{"}, 400, "body: malformed JSON at column 2"),
        ("/predict", {"content": b'{"a": "\xff"}'}, 400, "body: not UTF-8 at byte 7. Send JSON in UTF-8."),
        ("/predict", {"content": b'{"a": NaN}'}, 400, "body: field 'a': NaN is not JSON"),
        ("/predict", {"content": b'{"a": 1, "a": 2}'}, 400, "body: the key 'a' occurs more than once"),
        ("/predict", {"content": b'{"a": 1e999}'}, 400, "body: a number is too large for a double"),
        ("/predict", {"content": b'{"a": 9223372036854775808}'}, 400, "body: a whole number has more than 64 bits"),
        ("/predict", {"content": b'{"a": "\\ud800"}'}, 400, "half a surrogate pair"),
        ("/predict", {"content": b"[" * 60_000}, 400, "body: malformed JSON"),
        ("/predict", {"content": b"[" * 40 + b"]" * 40}, 400, "body: nested too deeply. Allowed are 32 levels."),
        ("/predict", {"content": b" " * 100_000}, 413, "body: too many bytes. Allowed are 65,536."),
        ("/predict", {"json": {"inputs": ["a"] * 17}}, 413, "inputs: 17 records. Allowed are 16."),
        ("/predict", {"json": ["a"]}, 422, 'body: a list. Allowed is one record, or {"inputs"'),
        ("/predict", {"json": {"inputs": []}}, 422, "inputs: an empty list. Give at least one."),
        ("/predict", {"json": {"inputs": ["a", {}]}}, 422, "inputs: texts and records are mixed."),
        ("/predict", {"json": {"inputs": [1]}}, 422, "inputs[0]: a number: 1. Allowed are records and texts."),
        ("/predict", {"json": {"inputs": ["a"], "beams": 9}}, 422, "body: 'beams' beside the list 'inputs'."),
        (
            "/predict",
            {"json": {"context": "c", "x": 1}},
            422,
            "missing: question. A record needs the fields question, context. This one has 'context', 'x'. Add what is "
            "missing.",
        ),
        ("/predict", {"json": {"question": "long " * 300, "context": "c"}}, 422, "Allowed are 200. Shorten it"),
        (
            "/v1/completions",
            {"json": {"prompt": 1}},
            422,
            "prompt: a number: 1. Allowed is a text, or a list of texts.",
        ),
        ("/v1/completions", {"json": [1]}, 422, 'body: a list. Allowed is {"prompt": TEXT}.'),
        ("/predict", {"content": b"[" + b"1" * 5000 + b"]"}, 400, "a whole number of more than 4,300 digits"),
        *(
            ("/v1/completions", {"json": {"prompt": "a", **options}}, 422, message)
            for options, message in (
                ({"temperature": 2.5}, "temperature: 2.5 is out of range. Allowed is a number, 0 to 2."),
                ({"temperature": True}, "temperature: true or false: true. Allowed is a number"),
                ({"top_p": -0.1}, "top_p: -0.1 is out of range. Allowed"),
                ({"n": "2"}, "n: text: '2'. Allowed is a whole number, 1 to 8."),
                ({"n": 9}, "n: 9 is out of range. Allowed"),
                ({"seed": 1.5}, "seed: a number: 1.5. Allowed"),
                ({"logprobs": True}, "logprobs: true or false: true. Allowed"),
                ({"stream": 1}, "stream: a number: 1. Allowed is true or false."),
                ({"stop": [1]}, "stop: a list"),
                ({"stop": [""]}, "stop: a list"),
                ({"best_of": 2}, "best_of: 2 is not offered. Allowed is n, 1."),
                ({"echo": True}, "echo: true is not offered. Allowed is false."),
                ({"logit_bias": {"5": 1}}, "logit_bias: "),
                ({"presence_penalty": 1}, "presence_penalty: 1 is not offered. Allowed is 0."),
                ({"max_tokens": 0}, "max_tokens: 0 is out of range. Allowed is"),
                ({"tempreature": 0}, "Did you mean temperature?"),
            )
        ),
        *(
            ("/v1/chat/completions", {"json": body}, 422, message)
            for body, message in (
                ({}, "messages: missing. Allowed is a list"),
                ({"messages": []}, "messages: an empty list. Allowed is a list"),
                (
                    {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
                    "top_logprobs: 2 without logprobs.",
                ),
                ({"messages": ["a"]}, "messages[0]: text: 'a'. Allowed is"),
                ({"messages": [{"role": "system", "content": "a"}]}, "messages: no turn of the user."),
                ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content: a list."),
                (
                    {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
                    "tools: [{}] is not offered. Leave it out.",
                ),
                ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, "'prompt': no option of chats."),
            )
        ),
        ("/nothing", {"json": {}}, 404, "POST /nothing: Not Found. See /docs."),
        ("/predict/", {"json": {}}, 404, "POST /predict/: Not Found."),
        ("/health", {"json": {}}, 405, "POST /health: Method Not Allowed."),
        ("/predict", {"content": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "Allowed is application/json"),
        ("/predict", {"json": {}, "headers": {"Host": "evil.example"}}, 403, "Host 'evil.example': not a name of this"),
        ("/predict", {"json": {}, "headers": {"Host": "[evil"}}, 403, "Host '[evil': not a name"),
        *(
            ("/predict", {"json": {}, "headers": {"Host": host}}, 403, f"Host {host!r}: not a name")
            for host in ("evil.example@127.0.0.1", "localhost#.evil.example", "localhost/x", "localhost:abc", "::1")
        ),
        ("/predict", {"json": {}, "headers": {"Origin": "http://evil.example"}}, 403, "Origin 'http://evil.example': "),
        ("/predict", {"json": {}, "headers": {"Origin": "null"}}, 403, "Origin 'null': pages of other servers"),
    ],
)
def test_faulty_requests_are_refused_by_code(
    server: Server, path: str, options: dict[str, Any], code: int, message: str
) -> None:
    headers = {"Content-Type": "application/json"} | options.pop("headers", {})
    answer = server.client.post(path, headers=headers, **options)
    found = answer.json()
    assert (answer.status_code, list(found), set(found["error"])) == (code, ["error"], {"message", "type"})
    assert message in found["error"]["message"] and "Traceback" not in answer.text and "/tmp" not in answer.text
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("origin", ["http://localhost:9", "http://localhost:1.evil.example", "http://localhost"])
def test_pages_of_names_and_ports_beside_the_own_may_not_send(server: Server, origin: str) -> None:
    answer = server.client.get("/health", headers={"Host": "localhost:1", "Origin": origin})
    assert (answer.status_code, answer.json()["error"]["type"]) == (403, "forbidden_origin")


def test_own_names_and_origins_pass(server: Server) -> None:
    for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert server.client.get("/health", headers=headers).status_code == 200
    assert Guard(frozenset({"t5.example"})).check("/", {"host": "T5.example:80"}) is None


def test_a_token_is_needed_but_for_probes() -> None:
    model, token = Slow(), "0123456789abcdef"
    model.may_answer.set()
    with serving(model, token=token) as guarded:
        assert guarded.post(json={"inputs": ["a"]})[0] == 200
        for given in ("", "Bearer 0123456789abcdeX", f"Basic {token}", "Bearer é"):
            answer = guarded.client.post("/predict", json={}, headers={"Authorization": given.encode()})
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert answer.json()["error"]["type"] == "unauthorized"
            assert guarded.client.get("/metrics", headers={"Authorization": given.encode()}).status_code == 401
        assert guarded.client.get("/ready", headers={"Authorization": ""}).status_code == 200


@pytest.mark.parametrize("given", ["Bearer", "Bearer ", "Bearer 0", "Bearer 0123456789abcde", "0123456789abcdef"])
def test_a_part_of_the_token_is_none(given: str) -> None:
    guard = Guard(token="0123456789abcdef")
    for path in ("/predict", "/docs"):
        with pytest.raises(RequestError, match="missing or wrong"):
            guard.check(path, {"host": "localhost", "authorization": given})
    for wrong in ("0123456789abcdef0", "00123456789abcdef"):
        with pytest.raises(RequestError, match="missing or wrong"):
            guard.check("/predict", {"host": "localhost", "authorization": f"Bearer {wrong}"})


def test_a_browser_reads_the_docs_by_password_and_may_send_it_nowhere_else() -> None:
    """A password is sent again with every request of the browser, also with one that another site's page starts."""
    token = "0123456789abcdef"
    with serving(Slow(), token=token) as guarded:
        for path in ("/docs", "/openapi.json"):
            answer = guarded.client.get(path, headers={"Authorization": ""})
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert guarded.client.get(path).status_code == 200
            assert guarded.client.get(path, headers={"Authorization": ""}, auth=("me", token)).status_code == 200
            for wrong in ("", token[:-1], f"{token}x"):
                assert guarded.client.get(path, auth=("me", wrong)).status_code == 401
        for path in ("/metrics", "/v1/models", "/demo.json"):
            assert guarded.client.get(path, auth=("me", token)).status_code == 401
        assert guarded.client.post("/predict", json={}, auth=("me", token)).status_code == 401


def test_a_body_with_two_lengths_ends_the_connection() -> None:
    """A proxy that believes Content-Length would take the second request for the body of the first (RFC 9112, 6.1)."""
    second = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for names in (
        ["Content-Length: 2", "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked", "content-length: 2"],
    ):
        head = "\r\n".join(["POST /predict HTTP/1.1", "Host: localhost", "Content-Type: application/json", *names])
        with serving(Slow()) as server:
            answer = server.send(head.encode() + b"\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + second)
        assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
        assert b'"invalid_http"' in answer and b"connection: close" in answer.lower()


def test_ready_ends_with_the_queue_and_requests_are_503() -> None:
    with serving(Slow()) as closed:
        assert closed.client.get("/ready").json()["status"] == "ready"
        closed.batcher.close()
        assert closed.client.get("/ready").status_code == 503
        code, found = closed.post(json={"inputs": ["a"]})
        assert (code, found["error"]["type"]) == (503, "stopping")
        assert closed.client.get("/health").status_code == 200


def test_docs_need_no_other_server(server: Server, trained: TrainedRun) -> None:
    page, openapi = server.client.get("/docs"), server.client.get("/openapi.json").json()
    assert openapi["openapi"] == "3.1.0" and {"/predict", "/v1/completions"} < set(openapi["paths"])
    assert not re.search(r"(src|href|url)\s*[=(]", page.text) and "<script" not in page.text
    assert page.headers["Content-Security-Policy"].startswith("default-src 'none'")
    fields = list_fields(trained.loaded.config.task, {"question": "Frage"})
    assert [(one.name, one.is_required) for one in fields] == [("Frage", True), ("context", True)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines could send requests. Set FIVETUNE_TOKEN, or leave"),
        (["--token", "0" * 16], "--token: is not taken: a token on the command line stays in the shell's history"),
        (["--max-batch", "0"], "--max-batch 0: must be above 0."),
        (["--drain-seconds", "-1"], "--drain-seconds -1.0: must be 0 or more."),
        (["--port", "99999"], "--port 99999: Allowed are 1 to 65535, and 0 for a free one."),
        (["--eval.num_beams", "9"], "eval.num_beams 9: serve allows 8 at most. Add --eval.num_beams 8."),
        (["--data.eval", "x.json"], "--data.eval: has no effect here: serve answers the records of requests."),
    ],
)
def test_the_command_refuses(
    trained: TrainedRun, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(trained.folder), *words]) in (2, 4)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("short", "FIVETUNE_TOKEN: has 5 characters. Allowed are 16 or more, printable ASCII."),
        ("0" * 16, "--host 192.0.2.1 --port 8000: Cannot assign requested address."),
    ],
)
def test_the_token_is_that_of_the_environment(
    trained: TrainedRun, token: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FIVETUNE_TOKEN", token)
    assert main(["serve", str(trained.folder), "--host", "192.0.2.1"]) in (2, 4)
    assert message in capsys.readouterr().err


def test_the_address_is_announced_when_it_takes_connections() -> None:
    codes: list[int] = []

    def announce() -> None:
        codes.append(after.connect_ex(bound.getsockname()))
        server.should_exit = True

    with bind_socket("127.0.0.1", 0) as bound, socket.socket() as before, socket.socket() as after:
        server = build_server(PlainTextResponse("hello"), drain_seconds=1, on_listening=announce)
        assert before.connect_ex(bound.getsockname()) != 0
        run_until_stopped(server, bound)
    assert codes == [0]


def test_without_its_packages_the_command_names_them(
    trained: TrainedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "fivetune.delivery.serving.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", str(trained.folder)]) == 4
    assert "serve: the package uvicorn is missing. Install it: pip install " in capsys.readouterr().err


# --- faults ---


def test_fuzzed_requests_get_the_right_codes(server: Server) -> None:
    codes = set(send_fuzzed(server.port, range(NUM_FUZZED))) - {CUT}
    common, rare = {200, 400, 403, 404, 405, 415, 422}, {408, 413, 429, 503}
    assert common <= codes <= common | rare
    assert server.post(json=RECORDS[0])[0] == 200


@contextmanager
def serving_process(folder: Path, *words: str) -> Iterator[tuple[WarmProcess, str]]:
    """`fivetune serve` as a process; yields it, and its address when it takes requests."""
    with start_command("serve", str(folder), "--port", "0", *words) as process:
        address = process.wait_for(r"serving on (http://\S+)")
        assert httpx.get(f"{address}/ready").status_code == 200
        yield process, address


@pytest.mark.release
def test_a_server_process_outlives_its_clients(trained: TrainedRun) -> None:
    """Fuzzed requests, 200 clients at once, 200 slow ones: all are answered, and memory is flat within 5 %."""
    with (
        serving_process(trained.folder, "--max-queue", "256", "--max-seconds", "20") as (process, address),
        ThreadPoolExecutor(200) as pool,
        httpx.Client(base_url=address, timeout=60) as client,
    ):
        server = Server(client, None, int(address.rpartition(":")[2]))
        measured = psutil.Process(process.pid)

        def ask(number: int) -> int:
            return httpx.post(f"{address}/predict", json=RECORDS[number % len(RECORDS)], timeout=60).status_code

        def load(first_seed: int) -> Counter[int]:
            seeds = [range(first_seed + part, first_seed + NUM_FUZZED, 32) for part in range(32)]
            codes = sum(pool.map(lambda own: send_fuzzed(server.port, own), seeds), Counter[int]())
            with open_slow_clients(server.port, 200):
                return codes + Counter(pool.map(ask, range(200)))

        load(10_000)  # fills the memory that each thread and batch size takes once
        before = measured.memory_info().rss
        codes = load(20_000 + NUM_FUZZED)
        after = measured.memory_info().rss
        sizes = " and ".join(f"{size / 2**20:.0f} MiB" for size in (before, after))
        print(f"{NUM_FUZZED:,} fuzzed requests: {sizes} before and after, answers {dict(sorted(codes.items()))}")
        assert after < 1.05 * before
        assert codes[500] == codes[503] == 0 and codes[200] >= 200
        assert server.post(json=RECORDS[0])[0] == 200 and process.code is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, kit.release(signal.SIGINT)])
def test_a_stop_signal_drains(trained: TrainedRun, signum: signal.Signals) -> None:
    """The queue holds a request when the signal comes: it is answered, new ones are not, and the exit code is 0."""
    with serving_process(trained.folder, "--max-wait-ms", "10000") as (process, address), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, f"{address}/predict", json=RECORDS[0], timeout=30)
        while "fivetune_queue_requests 1.0" not in httpx.get(f"{address}/metrics").text:
            time.sleep(0.02)
        process.send_signal(signum)
        assert waiting.result().status_code == 200
        done = process.wait(30)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("stopped\n")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health")


SLOW_SERVER = """
import sys, time, torch
from pathlib import Path
from fivetune.cli import main
from fivetune.delivery.serving import models, schema
from fivetune.model.decode import Decoding

def compute(requests, **options):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        torch.ones(500, 500) @ torch.ones(500, 500)

facts = schema.RunFacts("run", "squad_v2", 6, (), Decoding(8))
models.open_models = lambda *args, **options: {"run": models.ServedModel(facts, compute, Path())}
sys.exit(main(["serve", "run", "--port", "0", "--drain-seconds", "0"]))
"""


@pytest.mark.release
def test_a_batch_that_outlasts_the_drain_does_not_abort_the_process() -> None:
    """An interpreter that ends while a thread computes with torch is killed by an exception of C++."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SLOW_SERVER], **pipes) as process, ThreadPoolExecutor(1) as pool:
        assert process.stdout
        lines = iter(process.stdout.readline, "")
        address = next(found[1] for line in lines if (found := re.search(r"serving on (http://\S+)", line)))
        waiting = pool.submit(httpx.post, f"{address}/predict", json={"inputs": ["a"]}, timeout=60)
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        said, wrong = process.communicate(timeout=30)
        assert process.returncode == 0 and said.endswith("stopped\n") and "terminate" not in wrong
        assert waiting.result().status_code == 503


def test_bodies_are_read_as_they_are() -> None:
    assert parse_json(b'\n{"a": [1, 2.5, null]}') == {"a": [1, 2.5, None]}
    assert read_inputs({"inputs": "text of a jsonl record"}, max_records=1) == (
        [{"inputs": "text of a jsonl record"}],
        None,
    )
