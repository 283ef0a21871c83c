"""The processes of a run, and what they tell each other besides gradients.

In: what torchrun put into the environment. Out: a World; `connected` opens it. Alone, everything is as if nobody else
had anything to say, and torch.distributed is not touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

from fivetune.errors import ConfigError, EnvironmentProblem, FiveTuneError, Interrupted, ToldElsewhere

T = TypeVar("T")
SECONDS_TO_TELL = 5.0  # that a process which lost another one waits for that one's last words
GONE = ("onnection", "NCCL", "gloo", "imed out", "process group", "Process group")


class Lost(EnvironmentProblem):
    """Another process of the run ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run: `rank` of `size`; the first one writes the run directory and speaks to the user.

    Args:
        local_rank: number among the processes of this machine; that of its device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _store: Any = field(default=None, repr=False, compare=False)

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> World:
        """The world as torchrun tells it to its processes; alone without it.

        >>> World.here({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
        World(rank=1, size=2, local_rank=1)
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not all(environ.get(name, "").isdecimal() for name in names):
            return cls()
        return cls(*(int(environ[name]) for name in names))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def connected(self, *, cuda: bool, timeout_minutes: float) -> Iterator[World]:
        """The world with its processes connected; leaving it cuts the connection.

        Raises EnvironmentProblem if they do not find each other.
        """
        if self.size == 1:
            yield self
            return
        import torch
        from torch import distributed
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(minutes=timeout_minutes)
        if cuda:
            torch.cuda.set_device(self.local_rank)
        with self.reaching_all():
            every, rank, size = next(rendezvous("env://", timeout=timeout))
            number = every.add(f"fivetune-connections-of-{rank}", 1)  # torchrun keeps what was said in earlier ones
            store = PrefixStore(f"fivetune-{number}", every)
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            yield replace(self, _store=store)
        finally:
            distributed.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """What each process gives, in the order of ranks, in all of them."""
        if self.size == 1:
            return [value]
        from torch import distributed

        found: list[Any] = [None] * self.size
        distributed.all_gather_object(found, value)
        return found

    def from_first(self, value: T) -> T:
        """What the first process gives, in all of them."""
        if self.size == 1:
            return value
        from torch import distributed

        held: list[Any] = [value]
        distributed.broadcast_object_list(held, src=0)
        return held[0]

    def add_up(self, tensor: Any) -> None:
        """Make a tensor the sum of those of all processes, in place."""
        if self.size == 1:
            return
        from torch import distributed

        distributed.all_reduce(tensor)

    def send_first(self, tensors: Sequence[Any]) -> None:
        """Make tensors those of the first process, in place."""
        if self.size == 1:
            return
        from torch import distributed

        for tensor in tensors:
            distributed.broadcast(tensor.detach(), src=0)

    def largest(self, number: int) -> int:
        """The largest of each process's numbers."""
        if self.size == 1:
            return number
        import torch
        from torch import distributed

        held = torch.tensor([number])
        distributed.all_reduce(held, op=distributed.ReduceOp.MAX)
        return int(held)

    def alike(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives in each process. If it raises in one of them, it raises in all."""
        mine, error = None, None
        try:
            mine = work()
        except Exception as raised:
            if self.size == 1:
                raise
            error = raised
        found = self.gather((mine, error))
        if error:
            raise error
        for _, raised in found:
            if raised:
                raise raised
        return [value for value, _ in found]  # type: ignore[misc]

    @contextmanager
    def first_alone(self, what: str) -> Iterator[None]:
        """The first process does the block while the others wait, however long; then they do.

        Args:
            what: a name for the block, another one for each.
        """
        while self._store and self.rank and not self._store.check([what]):
            if self._store.check(["told"]):
                raise Lost(_LOST)
            time.sleep(0.1)
        yield
        if self._store and self.is_first:
            self._store.set(what, "done")

    def wait(self) -> None:
        """Go on when all processes are here."""
        self.gather(None)

    @contextmanager
    def reaching_all(self) -> Iterator[None]:
        """Turn a connection that breaks, here or inside of torch, into an error in plain words."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in GONE):
                raise
            raise Lost(_LOST) from error

    @contextmanager
    def telling_once(self) -> Iterator[None]:
        """An error that ends several processes leaves the block with words in the first of them only."""
        try:
            with self.reaching_all():
                yield
        except FiveTuneError as error:
            told = self._told(error)
            if told is error:
                raise
            raise told from error

    def said_elsewhere(self, *, seconds: float = 0.0) -> str | None:
        """What another process said before it ended, waiting so long for it; None if there is nothing."""
        if self._store is None:
            return None
        end = time.monotonic() + seconds
        with suppress(RuntimeError):  # the launcher may be gone
            while not self._store.check(["told"]):
                if time.monotonic() >= end:
                    return None
                time.sleep(0.1)
            rank, _, words = self._store.get("told").decode().split("\n", 2)
            return f"process {rank}: {words}"
        return None

    def _told(self, error: FiveTuneError) -> FiveTuneError:
        """The error as this process is to raise it: without words where another process has said the same."""
        if self._store is None:  # not connected: it comes in all of them
            return error if self.is_first else ToldElsewhere(error.exit_code)
        if isinstance(error, Interrupted) and not self.is_first:  # they agreed to stop
            return ToldElsewhere(error.exit_code)
        if isinstance(error, Lost):
            self.said_elsewhere(seconds=SECONDS_TO_TELL)
        mine = f"{self.rank}\n{error.exit_code}\n{error}"
        try:
            rank, code, text = self._store.compare_set("told", "", mine).decode().split("\n", 2)
        except RuntimeError:  # the launcher is gone
            return error
        if int(rank) == self.rank:
            return error
        if text == str(error) or isinstance(error, Lost | Interrupted):
            return ToldElsewhere(int(code))
        return type(error)(f"process {self.rank}: {error}")


ALONE = World()

_LOST = ("launch: another process of this run ended, or did not answer in time (launch.timeout_minutes). "
         "Its own message, if it could give one, says why; a killed one has none (memory?). "
         "The checkpoints are whole: go on with --resume.")  # fmt: skip


def refuse_other_world(world: World, asked: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError unless there are as many processes as were asked for, by launch.nproc and by SLURM.

    >>> refuse_other_world(World(), asked=2, environ={})
    Traceback (most recent call last):
    fivetune.errors.ConfigError: launch.nproc: world size 1, 2 devices asked. ...
    """
    if world.size != asked:
        advice = (
            "The command fivetune train starts the processes itself; from Python, or with a launcher of your own, "
            f"start {asked} with: torchrun --standalone --nproc-per-node {asked} -m fivetune train ..."
            if world.size == 1
            else f"Set launch.nproc to {world.size}, or start {asked} processes."
        )
        raise ConfigError(f"launch.nproc: world size {world.size}, {asked} {_devices(asked)} asked. {advice}")
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1 and int(tasks) != world.size:
        raise ConfigError(f"launch.nproc: world size {world.size}, {tasks} tasks asked of SLURM (SLURM_NTASKS): the "
                          f"others would idle, or train the same. Ask for one task, and for {tasks} processes with "
                          f"--launch.nproc {tasks} --strategy.name ddp.")  # fmt: skip


def refuse_shared_devices(num_devices: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError where torchrun has started more processes on this machine than it has CUDA devices."""
    processes = environ.get("LOCAL_WORLD_SIZE", "1")
    if processes.isdecimal() and int(processes) > num_devices:
        raise ConfigError(f"launch.nproc: {processes} processes on this machine, which has {num_devices} CUDA "
                          f"{_devices(num_devices)}. Each needs one of its own: lower launch.nproc to {num_devices}, "
                          "or add --device cpu.")  # fmt: skip


def _devices(number: int) -> str:
    return "device" if number == 1 else "devices"
