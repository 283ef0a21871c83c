"""A bucket that fails while a checkpoint is written into it, and a machine that is lost at that moment."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import yaml

from fivetune.rundir import read_run
from fivetune.rundir.checksums import MANIFEST
from reliability.campaign import Row, Trial
from reliability.warm import WarmProcess, check_no_trace, check_success
from reliability.workload import Workload, check_weights, read_weights, start_training

STEPS: dict[str, Any] = {"train__num_steps": 6, "eval__every_steps": 6}
FAULTS = ("cut", "500", "silent")
REFUSAL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
SILENCE = 1.0  # seconds
WRITE_OF_MANIFEST = re.compile(rb"PUT \S*/checkpoints/(\d+)/" + MANIFEST.encode())


def serve_bucket() -> None:
    """An S3 server of moto on loopback, with an empty bucket named `bucket`; prints its port."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")
    print(f"bucket at {port}", flush=True)
    threading.Event().wait()


class Proxy:
    """Passes bytes on to the server; from its write `first` on, `num` writes meet the fault.

    `newest` is the last step whose manifest, which makes its checkpoint whole, passed before them.

    Args:
        on_fault: called at the first of them.
    """

    newest = 0

    def __init__(self, port: int, fault: str, first: int, num: int, on_fault: Callable[[], None]) -> None:
        self._server, self._fault, self._on_fault = port, fault, on_fault
        self._first, self._range = first, range(first, first + num)
        self._num_writes, self._lock = 0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def stop_failing(self) -> None:
        """From now on no write meets the fault."""
        self._range = range(0)

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._server)) as server:
            threading.Thread(target=self._pass_back, args=(server, client), daemon=True).start()
            while content := client.recv(65536):
                if content.startswith(b"PUT ") and self._is_faulty(content):
                    if self._fault == "cut":
                        server.sendall(content[: len(content) // 2])
                        return
                    if self._fault == "500":
                        client.sendall(REFUSAL)
                        return
                    time.sleep(SILENCE)
                server.sendall(content)

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while content := server.recv(65536):
                client.sendall(content)
            client.shutdown(socket.SHUT_WR)

    def _is_faulty(self, content: bytes) -> bool:
        manifest = WRITE_OF_MANIFEST.match(content)
        with self._lock:
            self._num_writes += 1
            if manifest and self._num_writes < self._first:
                self.newest = int(manifest[1])
            is_first, is_faulty = self._num_writes == self._range.start, self._num_writes in self._range
        if is_first:
            self._on_fault()
        return is_faulty


@contextmanager
def start_bucket(
    fault: str, first: int, num: int, on_fault: Callable[[], None]
) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """An empty bucket behind a proxy with a fault, and the environment that leads there."""
    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    with WarmProcess(serve_bucket, environ={**os.environ, **keys}) as server:
        proxy = Proxy(int(server.wait_for(r"bucket at (\d+)")), fault, first, num, on_fault)
        try:
            yield proxy, {**os.environ, **keys, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}"}
        finally:
            proxy.close()


def fail_at_a_write(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each fault in turn; every second time the machine is lost when it appears."""
    for number, fault in enumerate(cycle(random.sample(FAULTS, len(FAULTS)))):
        is_lost = number % 2 == 0
        first, num = random.randint(1, 40), random.randint(1, 12)

        def run(folder: Path, fault: str = fault, first: int = first, num: int = num, is_lost: bool = is_lost) -> None:
            whole, begun = workload.run_undisturbed(**STEPS), threading.Event()
            recipe = workload.write_recipe(folder, **STEPS, checkpoint__url="s3://bucket/run")
            with start_bucket(fault, first, num, begun.set) as (proxy, environ):
                with start_training(recipe, environ=environ) as process:
                    while is_lost and process.code is None and not begun.wait(0.02):
                        pass
                    if is_lost:
                        process.kill_tree()
                    done = process.wait()
                check_no_trace(done.stderr)
                assert begun.is_set(), f"the bucket was never written for the {first}th time"
                proxy.stop_failing()
                newest = find_newest_copy(environ["AWS_ENDPOINT_URL"])
                assert newest >= proxy.newest, f"step {proxy.newest} was whole in the bucket, which has step {newest}"
                if done.returncode >= 0:
                    check_end(done, newest)
                    check_weights(read_weights(folder / "run"), whole.weights)
                check_resumed(folder, recipe, environ, whole.weights, newest)

        yield Trial(f"{number} {fault} at write {first}, {num} times{', machine lost' * is_lost}", run)


def check_end(done: CompletedProcess[str], newest: int) -> None:
    """A run that ended well has its last checkpoint in the bucket, or the reason names what is not there."""
    assert done.returncode in (0, 6), f"exit code {done.returncode}: {done.stderr[-600:]}"
    last = STEPS["train__num_steps"]
    is_named = f"the checkpoint of step {last} is not at s3://bucket/run" in done.stderr
    assert newest == last or (done.returncode == 6 and is_named), (
        f"exit code {done.returncode}, the bucket has step {newest}: {done.stderr[-600:]}"
    )
    assert done.returncode == 0 or is_named or "s3://bucket/run/" in done.stderr, f"not named: {done.stderr[-600:]}"


def check_resumed(folder: Path, recipe: Path, environ: dict[str, str], weights: bytes, newest: int) -> None:
    """On an empty machine the run goes on from the newest whole copy, to the same weights."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    table = yaml.safe_load(recipe.read_text())
    table["run"]["dir"] = str(folder / "elsewhere")
    recipe.write_text(yaml.safe_dump(table))
    done = start_training(recipe, "--resume", environ=environ).finish()
    check_success(done)
    check_weights(read_weights(folder / "elsewhere"), weights)
    begun = max(part.step for part in read_run(folder / "elsewhere").machine.parts)
    assert begun == newest, f"it went on at step {begun}, the bucket had step {newest}; {done.stderr[-600:]}"


def find_newest_copy(address: str) -> int:
    """The last step of which the bucket has a checkpoint with its manifest; 0 without any."""
    import boto3

    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
    found = boto3.client("s3", endpoint_url=address, **keys).list_objects_v2(Bucket="bucket", Prefix="run/checkpoints/")
    names = [Path(one["Key"]) for one in found.get("Contents", [])]
    return max((int(name.parent.name) for name in names if name.name == MANIFEST), default=0)


def explain_absence() -> str:
    """Why no bucket can be started here; empty if one can."""
    missing = [name for name in ("s3fs", "moto", "flask_cors", "boto3") if not find_spec(name)]
    return f"no {', '.join(missing)} (pip install -e '.[test]')" if missing else ""


ROWS = [
    Row("R37", "a bucket cuts, refuses or delays writes of a checkpoint; every second time the machine is lost then",
        "training goes on; the bucket keeps whole checkpoints, and an empty machine resumes from them",
        fail_at_a_write, 2, 20, explain_absence=explain_absence),
]  # fmt: skip
