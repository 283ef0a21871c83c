"""Worker processes that convert blocks of records: python -m fivetune.data.store.worker, started by ConverterPool.

In: a Converter, then RecordBlocks, pickled on the standard input. Out: ConvertedRows, or the error of a block, pickled.
Each is a plain process without torch. It ends when the process that started it ends, because its input is closed then.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, cast

from fivetune import plugins
from fivetune.data.store.convert import ConvertedRows, Converter, RecordBlock
from fivetune.errors import DataError, FiveTuneEnvironmentError, FiveTuneError

HUNG_SECONDS = 60.0  # after which a worker that has a block and computes nothing counts as hung
NUM_SAMPLES = 20  # of its CPU time in them; time in which this process is stopped too (Ctrl-Z) has none
ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # a process per core is all parallelism


class ConverterPool:
    """Converts blocks, in `num_processes` worker processes or, with one, in this process when asked.

    Args:
        converter: sent to each worker once.
    """

    def __init__(self, converter: Converter, num_processes: int) -> None:
        self._converter = converter
        self._workers: list[subprocess.Popen[bytes]] = []
        # Free workers, each with the state that it must receive before its first block.
        self._free: queue.SimpleQueue[tuple[subprocess.Popen[bytes], bytes]] = queue.SimpleQueue()
        self._busy: set[subprocess.Popen[bytes]] = set()
        self._hung: set[subprocess.Popen[bytes]] = set()
        self._closed = threading.Event()
        self._threads = None
        self.num_ahead = 1
        if num_processes > 1:
            task = converter.source.task.plugin_name()
            state = pickle.dumps((task, pickle.dumps(converter)))
            for _ in range(num_processes):
                command = [sys.executable, "-m", __name__]
                worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT}
                )
                self._workers.append(worker)
                self._free.put((worker, state))
            self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="convert")
            self.num_ahead = 2 * num_processes
            threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def begin(self, block: RecordBlock) -> Future[ConvertedRows]:
        """Begin to convert a block."""
        if self._threads is not None:
            return self._threads.submit(self._convert_in_worker, block)
        done: Future[ConvertedRows] = Future()
        try:
            done.set_result(self._converter.convert(block))
        except FiveTuneError as error:
            done.set_exception(error)
        return done

    def _convert_in_worker(self, block: RecordBlock) -> ConvertedRows:
        worker, state = self._free.get()
        self._busy.add(worker)
        try:
            if state:
                _write_frame(cast(IO[bytes], worker.stdin), state)
            _write_frame(cast(IO[bytes], worker.stdin), pickle.dumps(block))
            answer = _read_frame(cast(IO[bytes], worker.stdout))
        except (OSError, EOFError):
            raise FiveTuneEnvironmentError(self._describe_end(worker, block)) from None
        finally:
            self._busy.discard(worker)
            self._free.put((worker, b""))
        kind, value = pickle.loads(answer)  # noqa: S301  (written by the process that this one started)
        if kind == "rows":
            return value
        error: dict[str, type[Exception]] = {"data": DataError, "environment": FiveTuneEnvironmentError}
        raise error.get(kind, RuntimeError)(value)

    def _describe_end(self, worker: subprocess.Popen[bytes], block: RecordBlock) -> str:
        code = worker.wait()
        records = f"records {block.first_number:,} to {block.first_number + len(block.items) - 1:,}"
        where = f"{records} of {block.stem}" if block.stem else records
        if worker in self._hung:
            return (
                f"a process that converts {where} did nothing for {HUNG_SECONDS:g} s, and was ended. If a task of your "
                "own waits for something, make it answer; then start again: what was done is kept."
            )
        return (
            f"a process that converts {where} ended (exit code {code}). The machine's memory may be too small for "
            "them. Give a smaller data.num_processes, then start again: what was done is kept."
        )

    def _watch(self) -> None:
        """Kill each worker that has a block and computes nothing for HUNG_SECONDS."""
        import psutil

        samples = dict[int, tuple[float, int]]()  # seconds computed, and how often they were the same
        while not self._closed.wait(HUNG_SECONDS / NUM_SAMPLES):
            for worker in self._workers:
                try:
                    seconds = sum(psutil.Process(worker.pid).cpu_times()[:2])
                except psutil.Error:  # it has ended
                    continue
                before, num = samples.get(worker.pid, (0.0, 0))
                num = num + 1 if worker in self._busy and seconds == before else 0
                samples[worker.pid] = seconds, num
                if num >= NUM_SAMPLES:
                    self._hung.add(worker)
                    worker.kill()

    def close(self) -> None:
        """End the workers."""
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                with suppress(OSError):  # of the rest of a frame for the worker that was ended
                    cast(IO[bytes], stream).close()


def _write_frame(stream: IO[bytes], content: bytes) -> None:
    stream.write(len(content).to_bytes(8, "little"))
    stream.write(content)
    stream.flush()


def _read_frame(stream: IO[bytes]) -> bytes:
    size = int.from_bytes(_read_exactly(stream, 8), "little")
    return _read_exactly(stream, size)


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def main() -> None:
    """Convert blocks until the input ends."""
    source = sys.stdin.buffer
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a task prints must not stand between the frames
    task, state = pickle.loads(_read_frame(source))  # noqa: S301  (written by the process that started this one)
    plugins.import_plugin("tasks", task)  # one of FIVETUNE_PLUGINS is found by that
    converter: Converter = pickle.loads(state)  # noqa: S301
    while True:
        try:
            block: RecordBlock = pickle.loads(_read_frame(source))  # noqa: S301
        except EOFError:
            return
        answer: tuple[str, Any]
        try:
            answer = "rows", converter.convert(block)
        except DataError as error:
            answer = "data", str(error)
        except FiveTuneError as error:
            answer = "environment", str(error)
        except MemoryError:  # the process ends, which its parent reports with advice
            sys.exit(1)
        except Exception:
            answer = "fault", traceback.format_exc()
        _write_frame(sink, pickle.dumps(answer))


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        sys.exit(1)
