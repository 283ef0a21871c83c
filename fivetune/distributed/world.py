"""The ranks of a run: collectives of objects and gradients, and errors that are reported once.

In: the environment that torchrun sets. Out: a World; `connect` joins the process group. With one process every method
is a no-op and torch.distributed is never imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psutil

from fivetune.errors import (
    ConfigError,
    FiveTuneEnvironmentError,
    FiveTuneError,
    InterruptedRunError,
    ReportedByOtherRankError,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, ReduceOp, Store, Work

T = TypeVar("T")
PEER_ERROR_WAIT_SECONDS = 2.0  # for the message of a lost rank; a killed rank gives none
DISCONNECT_WORDS = ("onnection", "NCCL", "gloo", "imed out", "process group", "Process group")


class _Collectives(Protocol):
    """Functions of torch.distributed, with the types that torch leaves out."""

    def rendezvous(self, url: str, *, timeout: timedelta) -> Iterator[tuple[Store, int, int]]: ...
    def all_gather_object(self, object_list: list[T], obj: T, group: ProcessGroup | None = None) -> None: ...
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp.RedOpType = ...,
        group: ProcessGroup | None = None,
    ) -> object: ...
    def broadcast(self, tensor: Tensor, src: int, group: ProcessGroup | None = None) -> object: ...
    def isend(self, tensor: Tensor, dst: int, group: ProcessGroup | None = None) -> Work | None: ...
    def new_group(
        self, ranks: list[int] | None = None, *, timeout: timedelta | None = None, backend: str | None = None
    ) -> Any: ...
    def recv(self, tensor: Tensor, src: int, group: ProcessGroup | None = None) -> int: ...


def import_collectives() -> _Collectives:
    from torch.distributed import distributed_c10d

    return distributed_c10d


class ProcessGroupError(FiveTuneEnvironmentError):
    """Another rank ended or does not respond."""


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a run: `rank` of `size`. Rank 0 writes the run directory and prints.

    `model_size` consecutive ranks share one copy of the model and the same examples; the copies share every global
    batch.

    Args:
        local_rank: rank among the processes of this machine; the number of its device.
        mesh: [data, model], the ranks by copy of the model and by place in it; None if every rank is a copy.
        group: the process group of `gather`, `broadcast_object`, `barrier` and `run_on_all`; None: the default one.
        timeout: longest time that a rank waits for another; new process groups need it, because torch's is 30 min.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    model_size: int = 1
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    group: ProcessGroup | None = field(default=None, repr=False, compare=False)
    timeout: timedelta | None = field(default=None, repr=False, compare=False)
    _store: PrefixStore | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> World:
        """The world that torchrun's environment variables describe; a single process without them.

        >>> World.from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"})
        World(rank=1, size=2, local_rank=1, model_size=1)
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if not all(environ.get(name, "").isdecimal() for name in names):
            return cls()
        rank, size, local_rank = (int(environ[name]) for name in names)
        return cls(rank, size, local_rank)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this rank's copy of the model: which share of every global batch it computes."""
        return self.rank // self.model_size

    @property
    def data_size(self) -> int:
        """Number of copies of the model."""
        return self.size // self.model_size

    @property
    def model_rank(self) -> int:
        """Place of this rank in its copy of the model."""
        return self.rank % self.model_size

    def split(self, model_size: int, device: str) -> World:
        """This world with copies of the model that `model_size` ranks share. Collective: all ranks call it.

        >>> World(rank=3, size=4).split(1, "cpu").data_rank
        3
        """
        if model_size == 1 or self.size == 1:
            return self
        from torch.distributed.device_mesh import init_device_mesh

        shape = (self.size // model_size, model_size)
        mesh = init_device_mesh(device.partition(":")[0], shape, mesh_dim_names=("data", "model"))
        return replace(self, model_size=model_size, mesh=mesh)

    def separate(self) -> World:
        """This world with a process group of its own, for another thread. Collective: all ranks call it."""
        if self.size == 1:
            return self
        group: Any = import_collectives().new_group(backend="gloo", timeout=self.timeout)
        return replace(self, group=group)

    @contextmanager
    def connect(self, *, cuda: bool, timeout_minutes: float) -> Generator[World]:
        """Join the process group inside the block.

        Raises ProcessGroupError if the ranks do not find each other.
        """
        if self.size == 1:
            yield self
            return
        import torch
        from torch import distributed
        from torch.distributed.distributed_c10d import PrefixStore

        timeout = timedelta(minutes=timeout_minutes)
        if cuda:
            torch.cuda.set_device(self.local_rank)
        with self.translate_disconnects():
            every, rank, size = next(import_collectives().rendezvous("env://", timeout=timeout))
            number = every.add(f"fivetune-connections-of-{rank}", 1)  # its store outlives connections
            store = PrefixStore(f"fivetune-{number}", every)
            backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
            distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        try:
            yield replace(self, _store=store, timeout=timeout)
        except BaseException:
            if cuda:  # without this, NCCL waits for a lost rank until its watchdog kills the process
                _stop_process_groups()
            raise
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks in order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[T] = [value] * self.size
        import_collectives().all_gather_object(found, value, group=self.group)
        return found

    def broadcast_object(self, value: T) -> T:
        """Broadcast: the value of rank 0, on every rank."""
        if self.size == 1:
            return value
        from torch import distributed

        held: list[T] = [value]
        distributed.broadcast_object_list(held, src=0, group=self.group)
        return held[0]

    def all_reduce_sum(self, tensor: Tensor) -> None:
        """All-reduce (sum) a tensor in place."""
        if self.size > 1:
            import_collectives().all_reduce(tensor)

    def start_all_reduce_sum(self, tensors: list[Tensor]) -> Work:
        """Start an all-reduce (sum) of tensors in place over the copies of the model; `wait` of the result ends it.

        Nothing is copied under NCCL; gloo copies the tensors of one all-reduce side by side while it runs.
        """
        from torch import distributed

        group: Any = self.mesh.get_group("data") if self.mesh else distributed.group.WORLD
        return group.allreduce_coalesced(tensors)

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast the tensors of rank 0 in place."""
        if self.size == 1:
            return
        from torch import distributed
        from torch.autograd.graph import increment_version

        for tensor in tensors:
            distributed.broadcast(tensor.detach(), src=0)
            increment_version(tensor)  # gloo writes without torch counting it, by which copies of weights are renewed

    def all_reduce_max(self, number: int) -> int:
        """All-reduce (max) a number."""
        (found,) = self.all_reduce_maxima([number])
        return found

    def all_reduce_maxima(self, numbers: list[int]) -> list[int]:
        """All-reduce (max) numbers, each with those of the other ranks at its place."""
        if self.size == 1:
            return numbers
        import torch
        from torch import distributed

        held = torch.tensor(numbers)
        import_collectives().all_reduce(held, distributed.ReduceOp.MAX)
        return [int(value) for value in held]

    def iter_together(self, items: Sequence[T]) -> Iterator[T | None]:
        """Yield the items, then None until every rank has had as many as the rank with the most.

        >>> list(World().iter_together([7, 8]))
        [7, 8]
        """
        for number in range(self.all_reduce_max(len(items))):
            yield items[number] if number < len(items) else None

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Run `work` on every rank; returns all results. If it raises on one rank, it raises on all."""
        mine: list[T] = []
        error = None
        try:
            mine.append(work())
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
        return [value for values, _ in found for value in values]

    def publish(self, key: str, text: str) -> None:
        """Set a text that every rank can find by its key, from any thread. Not collective; no-op with one process."""
        if self._store:
            self._store.set(key, text)

    def find_published(self, key: str) -> str | None:
        """Return the text that a rank has published; None if there is none yet."""
        if self._store is None or not self._store.check([key]):
            return None
        return self._store.get(key).decode()

    @contextmanager
    def run_rank_zero_first(self, key: str) -> Generator[None]:
        """Run the block on rank 0 while the others wait without a time limit, then on the others.

        Args:
            key: name of the block, unique in a run.
        """
        assert not (self._store and self.is_first and self._store.check([key])), f"{key} is used twice"
        while self._store and self.rank and not self._store.check([key]):
            if self._store.check(["told"]):
                raise ProcessGroupError(_DISCONNECTED)
            time.sleep(0.1)
        yield
        if self._store and self.is_first:
            self._store.set(key, "done")

    def barrier(self) -> None:
        """Wait until all ranks have called it."""
        self.gather(None)

    @contextmanager
    def translate_disconnects(self) -> Generator[None]:
        """Raise ProcessGroupError for a lost connection, here or inside torch."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not any(word in str(error) for word in DISCONNECT_WORDS):
                raise
            raise ProcessGroupError(_DISCONNECTED) from error

    @contextmanager
    def report_errors_once(self) -> Generator[None]:
        """Print an error once; the other ranks exit silently with its code."""
        try:
            with self.translate_disconnects():
                yield
        except FiveTuneError as error:
            resolved = self._resolve_error(error)
            if resolved is error:
                raise
            raise resolved from error

    def find_peer_error(self, *, seconds: float = 0.0) -> str | None:
        """The error message of another rank, waiting up to `seconds` for it; None if there is none."""
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

    def explain_disconnect(self, error: ProcessGroupError) -> str:
        """Find the reason of a lost connection: the error of another rank, or which rank ended without one."""
        return self.find_peer_error(seconds=PEER_ERROR_WAIT_SECONDS) or describe_lost_ranks() or str(error)

    def _resolve_error(self, error: FiveTuneError) -> FiveTuneError:
        """The error that this rank raises: a silent one if another rank has reported the same."""
        if self._store is None:  # not connected: every rank raises it
            return error if self.is_first else ReportedByOtherRankError(error.exit_code)
        if isinstance(error, InterruptedRunError) and not self.is_first:  # they agreed to stop
            return ReportedByOtherRankError(error.exit_code)
        if isinstance(error, ProcessGroupError):
            error = ProcessGroupError(self.explain_disconnect(error))
        mine = f"{self.rank}\n{error.exit_code}\n{error}"
        try:
            rank, code, text = self._store.compare_set("told", "", mine).decode().split("\n", 2)
        except RuntimeError:  # the launcher is gone
            return error
        if int(rank) == self.rank:
            return error
        if text == str(error) or isinstance(error, ProcessGroupError | InterruptedRunError):
            return ReportedByOtherRankError(int(code))
        return type(error)(f"process {self.rank}: {error}")


SINGLE_PROCESS = World()


def _stop_process_groups() -> None:
    """End all process groups without waiting for other ranks."""
    from torch.distributed import distributed_c10d

    abort: Callable[[], None] = vars(distributed_c10d)["_abort_process_group"]
    abort()


def describe_lost_ranks(environ: Mapping[str, str] = os.environ) -> str:
    """Name the ranks of this node that have ended, by the processes that torchrun started; empty if all run."""
    if "LOCAL_WORLD_SIZE" not in environ:
        return ""
    running: set[int] = set()
    for process in psutil.Process(os.getppid()).children():
        with suppress(psutil.Error, KeyError):
            if process.status() != psutil.STATUS_ZOMBIE:
                running.add(int(process.environ()["RANK"]))
    first = int(environ["RANK"]) - int(environ["LOCAL_RANK"])
    lost = [str(rank) for rank in range(first, first + int(environ["LOCAL_WORLD_SIZE"])) if rank not in running]
    if not lost:
        return ""
    return (
        f"launch: rank {', '.join(lost)} of this run ended without a message of its own, as a killed process does. "
        "Often memory ran out (see dmesg). The checkpoints are whole: continue with --resume."
    )


_DISCONNECTED = (
    "launch: another process of this run ended, or did not respond in time (launch.timeout_minutes). "
    "Its own message gives the reason; a killed process prints none (memory?). "
    "The checkpoints are whole: continue with --resume."
)


def refuse_wrong_world_size(
    world: World, requested: int, environ: Mapping[str, str] = os.environ, *, nnodes: int = 1
) -> None:
    """Raise ConfigError unless the world has the size that launch.nnodes x launch.nproc and SLURM request.

    >>> refuse_wrong_world_size(World(), requested=2, environ={})
    Traceback (most recent call last):
    fivetune.errors.ConfigError: launch.nproc: world size 1, 2 devices requested. ...
    """
    if world.size != requested and nnodes > 1:
        raise ConfigError(
            f"launch.nnodes: world size {world.size}, {nnodes} nodes with {requested // nnodes} "
            f"{_name_devices(requested // nnodes)} each requested. Start fivetune train once on each node "
            "(fivetune launch does), or set launch.nnodes and launch.nproc to what you start."
        )
    if world.size != requested:
        advice = (
            "The command fivetune train starts the processes itself; from Python, or with a launcher of your own, "
            f"start {requested} with: torchrun --standalone --nproc-per-node {requested} -m fivetune train ..."
            if world.size == 1
            else f"Set launch.nproc to {world.size}, or start {requested} processes."
        )
        raise ConfigError(
            f"launch.nproc: world size {world.size}, {requested} {_name_devices(requested)} requested. {advice}"
        )
    tasks = environ.get("SLURM_NTASKS", "")
    if tasks.isdecimal() and int(tasks) > 1 and int(tasks) not in (world.size, nnodes):
        raise ConfigError(
            f"launch.nproc: world size {world.size}, {tasks} tasks requested from SLURM (SLURM_NTASKS): the "
            f"others would idle, or train the same. Request one task, and {tasks} processes with "
            f"--launch.nproc {tasks} --strategy.name ddp."
        )


def refuse_shared_devices(num_devices: int, environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if torchrun has started more processes on this machine than it has CUDA devices."""
    processes = environ.get("LOCAL_WORLD_SIZE", "1")
    if processes.isdecimal() and int(processes) > num_devices:
        raise ConfigError(
            f"launch.nproc: {processes} processes on this machine, which has {num_devices} CUDA "
            f"{_name_devices(num_devices)}. Each needs one of its own: lower launch.nproc to {num_devices}, "
            "or add --device cpu."
        )


def _name_devices(number: int) -> str:
    return "device" if number == 1 else "devices"
