"""Requests to `fivetune serve` on loopback: right, faulty, cut, slow; and what of their answers is right.

In: the port of a server. Out: how many answers have each code.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from reliability.warm import WarmProcess, check_success, start_command
from reliability.workload import COLOURS, OWNERS, WORDS

RECORDS = [
    {"question": f"What has {owner}?", "context": f"{owner} has a {colour} {thing}."}
    for owner in OWNERS
    for colour in COLOURS
    for thing in WORDS[9:]
]
CUT = 0  # the code of a request that is not answered: its client has cut it, or has gone, or does not end its headers
HEADERS_END = re.compile(rb"\n\r?\n")


def build_request(body: bytes, *, path: str = "/predict", **headers: str) -> bytes:
    """A POST request as bytes; a header's name has `_` for `-`."""
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def make_fuzzed_request(draw: random.Random) -> bytes:
    """A request of which most are faulty: cut, with changed bytes, wrong types, wrong headers, or no HTTP at all."""
    values: list[Any] = [None, 1, -1e308, "", "\0", "é", [], {}, [[]], {"inputs": {}}, True, "x" * 3000, "<b>&"]
    body: Any = draw.choice([draw.choice(values), {"inputs": [draw.choice(values)]}, draw.choice(RECORDS)])
    if draw.random() < 0.3:
        body = {
            draw.choice(["inputs", "question", "prompt", "id"]): draw.choice(values),
            "context": draw.choice(values),
        }
    raw = bytearray(json.dumps(body).encode())
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 4)):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
    path = draw.choice(["/predict", "/predict", "/v1/completions", "/%00", "/docs", "/../x"])
    headers = draw.choice(
        [{}, {}, {}, {"Content_Type": "text/x"}, {"Origin": "x"}, {"Host": ""}, {"Expect": "100-continue"}]
    )
    whole = bytearray(build_request(bytes(raw), path=path, Connection="close", **headers))
    if draw.random() < 0.15:
        whole[draw.randrange(len(whole))] = draw.randrange(256)
    return bytes(whole) if draw.random() < 0.9 else draw.randbytes(draw.randint(1, 200)) + b"\r\n\r\n"


def send_fuzzed(port: int, seeds: Iterable[int]) -> Counter[int]:
    """Send a fuzzed request for each seed; each answer must be whole, an error in JSON and without a trace."""
    codes: Counter[int] = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        raw = make_fuzzed_request(draw)
        is_cut = draw.random() < 0.1
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(raw[: draw.randrange(len(raw))] if is_cut else raw)
            if is_cut:
                codes[CUT] += 1
                continue
            if is_closed := draw.random() < 0.1:
                connection.shutdown(socket.SHUT_WR)
            connection.settimeout(40)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        if not answer:  # the client is gone, or its headers never end: the server waits, and closes
            assert is_closed or not HEADERS_END.search(raw), f"no answer: {(seed, raw)}"
            codes[CUT] += 1
            continue
        code, body = split_answer(answer)
        if is_closed and code == 100:  # the server has seen that the client is gone
            continue
        codes[code] += 1
        assert code == 200 or set(json.loads(body)["error"]) == {"message", "type"}, (seed, raw, answer)
        assert b"Traceback" not in answer, (seed, raw, answer)
    return codes


def send(port: int, raw: bytes, *, seconds: float = 60) -> tuple[int, bytes]:
    """Send one request as bytes; returns code and body of its answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(raw)
        return split_answer(b"".join(iter(lambda: connection.recv(65536), b"")))


@contextmanager
def open_slow_clients(port: int, num_clients: int) -> Iterator[list[socket.socket]]:
    """Connections of which each has sent a part of its request byte by byte, and stays open."""
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(num_clients)
        ]
        for byte in build_request(b"{}")[:40]:
            for connection in connections:
                connection.sendall(bytes([byte]))
        yield connections


def split_answer(answer: bytes) -> tuple[int, bytes]:
    """Code and body of the last answer in these bytes.

    >>> split_answer(b"HTTP/1.1 100 Continue\\r\\n\\r\\nHTTP/1.1 200 OK\\r\\na: b\\r\\n\\r\\n{}")
    (200, b'{}')
    """
    final = answer.rpartition(b"HTTP/1.1 ")[2]
    return int(final[:3]), final.partition(b"\r\n\r\n")[2]


@contextmanager
def start_server(
    model: Path, *words: str, environ: Mapping[str, str] = os.environ
) -> Iterator[tuple[WarmProcess, int]]:
    """`fivetune serve` of a run on a free port; yields the process and the port when it takes requests.

    SIGTERM ends it; it must end well, and have printed no trace.
    """
    with start_command("serve", str(model), "--port", "0", *words, environ=environ) as process:
        yield process, int(process.wait_for(r"serving on http://127\.0\.0\.1:(\d+)"))
        stop_server(process)


def stop_server(process: WarmProcess) -> str:
    """End a server by SIGTERM, unless it has ended; returns what it said."""
    if process.code is None:
        process.send_signal(signal.SIGTERM)
    done = process.wait(60)
    check_success(done)
    return done.stdout + done.stderr
