"""Clients of `benchmarks.serve`, in a process without torch: each sends its next request when it has an answer.

In: on standard input {"port", "num_clients", "bodies"}. Out: one line of JSON: {"seconds", "latencies", "answers"}.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection


def main() -> None:
    asked = json.load(sys.stdin)
    waiting = deque(enumerate(asked["bodies"]))
    latencies: list[float] = []
    answers: dict[int, str] = {}

    def work() -> None:
        connection = HTTPConnection("127.0.0.1", asked["port"], timeout=120)
        while waiting:
            try:
                number, body = waiting.popleft()
            except IndexError:  # another client was faster
                return
            started = time.perf_counter()
            connection.request("POST", "/predict", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            found = json.loads(answer.read())
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {found}")
            latencies.append(time.perf_counter() - started)
            answers[number] = found["prediction"]

    started = time.perf_counter()
    with ThreadPoolExecutor(asked["num_clients"]) as pool:
        for one in [pool.submit(work) for _ in range(asked["num_clients"])]:
            one.result()
    seconds = time.perf_counter() - started
    ordered = [answers[number] for number in range(len(asked["bodies"]))]
    print(json.dumps({"seconds": seconds, "latencies": latencies, "answers": ordered}))
