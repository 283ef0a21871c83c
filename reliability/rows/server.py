"""`fivetune serve` under requests that are faulty, slow, many, large or from another site."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email.message import Message
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from reliability.campaign import Row, Trial
from reliability.requests import CUT, RECORDS, build_request, open_slow_clients, send, send_fuzzed, start_server
from reliability.rows.kills import FEW_STEPS
from reliability.warm import WarmProcess
from reliability.workload import Workload

NUM_CLIENTS, FUZZED_PER_TRIAL = 200, 100
CODES = {CUT, 200, 400, 403, 404, 405, 408, 413, 415, 422, 429, 503}
MOST_SECONDS = 5.0  # of an answer beside slow clients, and of 99 % of those beside many or fuzzed ones
SLOW_SECONDS = 45.0  # within which a connection without a whole request is closed
OPTIONS = ("--max-queue", "256", "--max-seconds", f"{MOST_SECONDS:g}")


def attack_server(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each trial has a server of its own: first one of each kind, then fuzzed requests only."""
    run = workload.run_undisturbed(**FEW_STEPS).run
    yield Trial("200 clients at once", lambda folder: ask_at_once(run))
    yield Trial("200 clients that send slowly", lambda folder: ask_slowly(run))
    yield Trial("more clients than the queue has places", lambda folder: fill_queue(run))
    yield Trial("bodies, bytes, hosts and origins", lambda folder: ask_wrongly(run))
    yield Trial("memory", lambda folder: measure_memory(run))
    for number in count():
        seeds = range(FUZZED_PER_TRIAL * number, FUZZED_PER_TRIAL * (number + 1))

        def fuzz(folder: Path, seeds: range = seeds) -> None:
            with start_server(run, *OPTIONS) as (process, port), ThreadPoolExecutor(1) as pool:
                fuzzing, seconds = pool.submit(send_fuzzed, port, seeds), list[float]()
                while not fuzzing.done():
                    code, taken = ask_and_time(port, len(seconds))
                    assert code == 200, f"beside fuzzed requests, a right one has code {code}"
                    seconds.append(taken)
                    time.sleep(0.05)
                codes = fuzzing.result()
                assert set(codes) <= CODES, f"codes {dict(codes)}"
                check_latency(seconds)
                check_alive(process, port)

        yield Trial(f"fuzzed requests {seeds.start} to {seeds.stop - 1}", fuzz)


def check_alive(process: WarmProcess, port: int) -> None:
    """The server runs and answers a right request."""
    assert process.code is None, f"the server ended with code {process.code}"
    assert ask(port, 0) == 200, "a right request is not answered"


def ask(port: int, number: int) -> int:
    """Code of the answer to a right request."""
    body = json.dumps(RECORDS[number % len(RECORDS)]).encode()
    return send(port, build_request(body, Connection="close"))[0]


def ask_and_time(port: int, number: int) -> tuple[int, float]:
    """Code and seconds of the answer to a right request."""
    start = time.monotonic()
    return ask(port, number), time.monotonic() - start


def check_latency(seconds: Sequence[float]) -> None:
    """99 % of the answers came within the time that the server allows itself."""
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    assert p99 < MOST_SECONDS, f"the 99th percentile of {len(seconds)} answers is {p99:.2f} s, not below {MOST_SECONDS}"


def ask_at_once(run: Path) -> None:
    """All clients are answered, 99 % of them within the time that the server allows itself."""
    with start_server(run, *OPTIONS) as (process, port), ThreadPoolExecutor(NUM_CLIENTS) as pool:
        codes, seconds = zip(*pool.map(lambda number: ask_and_time(port, number), range(NUM_CLIENTS)), strict=True)
        assert set(codes) == {200}, f"codes {dict(Counter(codes))}"
        check_latency(seconds)
        check_alive(process, port)


def ask_slowly(run: Path) -> None:
    """While the slow clients send on, others are answered; the server closes the slow ones."""
    with start_server(run, *OPTIONS) as (process, port), open_slow_clients(port, NUM_CLIENTS) as clients:
        waiting, until = list(clients), time.monotonic() + SLOW_SECONDS
        while waiting:
            start = time.monotonic()
            assert start < until, f"{len(waiting)} slow clients are connected after {SLOW_SECONDS:g} s"
            check_alive(process, port)
            seconds = time.monotonic() - start
            assert seconds < MOST_SECONDS, f"beside {len(waiting)} slow clients, an answer took {seconds:.1f} s"
            waiting = [client for client in waiting if send_a_byte(client)]
            time.sleep(0.5)


def send_a_byte(client: socket.socket) -> bool:
    """Send one more byte of a header; False if the server has closed the connection."""
    try:
        client.sendall(b"x")
        client.setblocking(False)
        return bool(client.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        client.setblocking(True)


def fill_queue(run: Path) -> None:
    """Of 64 clients at once, those that the queue has no place for get 429 and a time, the others their own answers."""
    with start_server(run, "--max-queue", "4", "--max-batch", "2") as (process, port):
        with ThreadPoolExecutor(64) as pool:
            answers = list(pool.map(lambda number: post_numbered(port, number), range(64)))
        codes = Counter(code for code, _, _ in answers)
        assert set(codes) == {200, 429}, f"codes {dict(codes)}"
        for number, (code, headers, found) in enumerate(answers):
            if code == 429:
                assert int(headers.get("Retry-After", 0)) >= 1, f"429 without Retry-After: {dict(headers)}"
                assert found["error"]["type"] == "queue_full", found
                code, _, found = post_numbered(port, number)
            assert (code, found.get("id")) == (200, f"record {number}"), (number, code, found)
        check_alive(process, port)


def post_numbered(port: int, number: int) -> tuple[int, Message, dict[str, Any]]:
    """Code, headers and table of the answer to a right request with an id of its own."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        body = json.dumps({"id": f"record {number}", **RECORDS[number % len(RECORDS)]})
        connection.request("POST", "/predict", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


def ask_wrongly(run: Path) -> None:
    """Wrong bodies and headers have their codes, and only loopback listens."""
    with start_server(run, *OPTIONS) as (process, port):
        right = json.dumps(RECORDS[0]).encode()
        requests = [
            (413, build_request(b"x" * 10 * 2**20, Connection="close")),
            (413, build_request(b"x" * 65_537, Connection="close")),
            (400, build_request(b'{"question": "\xff\xfe", "context": "c"}', Connection="close")),
            (400, build_request(b"[" * 10_000, Connection="close")),
            (400, build_request(b'{"question": NaN, "context": "c"}', Connection="close")),
            (403, build_request(right, Connection="close", Host="evil.invalid")),
            (403, build_request(right, Connection="close", Origin="https://evil.invalid")),
            (403, build_request(right, Connection="close", Origin="null")),
            (404, build_request(right, path="/../../etc/passwd", Connection="close")),
            (415, build_request(right, Connection="close", Content_Type="text/plain")),
        ]
        for code, raw in requests:
            try:
                found, body = send(port, raw)
            except (BrokenPipeError, ConnectionResetError):  # it does not read what is too large to its end
                assert code == 413
                continue
            assert found == code, f"code {found}, not {code}: {raw[:200]!r}"
            assert "error" in json.loads(body) and os.fsencode(run.parent) not in body, body[:600]
        listening = {one.laddr.ip for one in psutil.Process(process.pid).net_connections() if one.status == "LISTEN"}
        assert listening == {"127.0.0.1"}, f"listens at {listening}"
        check_alive(process, port)


def measure_memory(run: Path) -> None:
    """After the first round, which fills what each thread takes once, a second one takes less than 5 % more."""
    with start_server(run, *OPTIONS) as (process, port), ThreadPoolExecutor(32) as pool:
        sizes: list[int] = []
        for first in (10_000, 20_000):
            seeds = [range(first + part, first + 320, 32) for part in range(32)]
            list(pool.map(lambda own: send_fuzzed(port, own), seeds))
            list(pool.map(lambda number: ask(port, number), range(NUM_CLIENTS)))
            sizes.append(psutil.Process(process.pid).memory_info().rss)
        assert sizes[1] < 1.05 * sizes[0], f"{sizes[0] / 2**20:.0f} MiB became {sizes[1] / 2**20:.0f} MiB"
        check_alive(process, port)


ROWS = [
    Row("R28", "a server gets 100 fuzzed requests, 200 clients at once, 200 that send byte by byte and stay, more than "
        "its queue holds, wrong bodies, hosts and origins",
        "answers whole requests with their code, closes slow clients; memory is flat within 5 %",
        attack_server, 6, 55),
]  # fmt: skip
