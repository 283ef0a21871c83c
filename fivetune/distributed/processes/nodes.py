"""One node of several: its place among the nodes of a run, and the checks that they make before they train together.

In: the variables that torchrun reads (PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT). Out: a Meeting of all nodes at
the address of node 0, or one error, which node 0 prints. torchrun uses the same port.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING

from fivetune.errors import ConfigError, FiveTuneEnvironmentError, ReportedByOtherRankError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import PrefixStore

RANK_VARIABLE, ADDRESS_VARIABLE, PORT_VARIABLE = "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"
SLURM_RANK_VARIABLE = "SLURM_NODEID"  # srun sets it for each task
JOB_VARIABLES = ("SLURM_JOB_ID", "PET_RDZV_ID")  # another job that took the same port is not answered
DEFAULT_PORT = 29500  # torchrun's
MAX_CLOCK_DIFFERENCE_SECONDS = 30.0  # studies judge processes of other nodes by heartbeats, pages show one time axis
SECONDS_TO_ANSWER = 60.0  # for a node that has arrived
SECONDS_TO_END = 10.0  # for the ranks of other nodes, which read the run's error from node 0
RANK_ZERO_ENDED = "rank-0-ended"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """The place of this node: `rank` of `count`, and the address and port of node 0."""

    rank: int
    count: int
    address: str
    port: int

    @classmethod
    def from_environment(cls, count: int, environ: Mapping[str, str] = os.environ) -> NodePlace:
        """Read the place that a launcher has set. Raises ConfigError for a missing or wrong variable.

        >>> NodePlace.from_environment(2, {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "n1"})
        NodePlace(rank=1, count=2, address='n1', port=29500)
        """
        rank = environ.get(RANK_VARIABLE) or environ.get(SLURM_RANK_VARIABLE, "")
        address = environ.get(ADDRESS_VARIABLE, "")
        port = environ.get(PORT_VARIABLE, str(DEFAULT_PORT))
        if not rank or not address:
            named = {RANK_VARIABLE: rank, ADDRESS_VARIABLE: address}
            missing = " and ".join(name for name, value in named.items() if not value)
            raise ConfigError(
                f"launch.nnodes: {count} nodes, but {missing} is not set, so this node does not know its place. Start "
                f"the nodes with fivetune launch, or set {RANK_VARIABLE} (0, 1, ...), {ADDRESS_VARIABLE} (of node 0) "
                f"and {PORT_VARIABLE} on each."
            )
        if not rank.isdecimal() or int(rank) >= count:
            raise ConfigError(f"{RANK_VARIABLE}: {rank}, with launch.nnodes {count}. Give 0 to {count - 1}.")
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ConfigError(f"{PORT_VARIABLE}: {port}. Give a port number, 1 to 65535.")
        return cls(int(rank), count, address, int(port))


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What a node reports about itself; all nodes must agree in every value but the host."""

    host: str = "unknown"
    fivetune: str = "unknown"
    torch: str = "unknown"
    nnodes: int = 0
    nproc: int = 0

    @classmethod
    def from_this_node(cls, nnodes: int, nproc: int) -> NodeRecord:
        return cls(socket.gethostname(), version("fivetune"), version("torch"), nnodes, nproc)

    @classmethod
    def from_json(cls, text: str | bytes) -> NodeRecord:
        """Read the record of a node whose version of FiveTune may have other fields.

        >>> NodeRecord.from_json('{"host": "b", "fivetune": "0.2", "python": "3.14"}').fivetune
        '0.2'
        """
        return cls(**{name: value for name, value in json.loads(text).items() if name in cls.__slots__})


class Meeting:
    """The connection of a node to node 0, which lasts as long as the run."""

    def __init__(self, place: NodePlace, store: PrefixStore) -> None:
        self.place, self._store = place, store

    def record_end_of_rank_zero(self) -> None:
        with suppress(RuntimeError):
            self._store.set(RANK_ZERO_ENDED, "")

    def has_rank_zero_ended(self) -> bool:
        """Whether rank 0 has ended, or node 0 cannot be reached."""
        try:
            return self._store.check([RANK_ZERO_ENDED])
        except RuntimeError:
            return True

    def leave(self) -> None:
        """Leave after the local ranks have ended; node 0 waits shortly for the others, because its store ends too."""
        with suppress(RuntimeError):
            self._store.set(f"left-{self.place.rank}", "")
            if self.place.rank == 0:
                others = [f"left-{rank}" for rank in range(1, self.place.count)]
                self._store.wait(others, timedelta(seconds=SECONDS_TO_END))


def connect_nodes(
    place: NodePlace, mine: NodeRecord, *, timeout_seconds: float, clock: Callable[[], float] = time.time
) -> Meeting:
    """Wait until all nodes are there, and compare them and their clocks.

    Raises FiveTuneEnvironmentError on node 0 if its port is taken, a node is missing, or one differs; on another node
    if it cannot find node 0. ReportedByOtherRankError on the nodes that read the error of node 0.
    """
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.distributed_c10d import PrefixStore

    timeout = timedelta(seconds=timeout_seconds)
    try:
        server = TCPStore(
            place.address,
            place.port,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # torchrun opens it again on the same port
        )
    except RuntimeError as error:
        raise FiveTuneEnvironmentError(_explain_connection_error(place, str(error), timeout_seconds)) from error
    job = next((os.environ[name] for name in JOB_VARIABLES if name in os.environ), "")
    store = PrefixStore(f"fivetune-nodes-{job}", server)
    if place.rank == 0:
        fault = _find_fault(place, mine, store, timeout)
        store.set("verdict", fault)
        if fault:
            with suppress(RuntimeError):
                arrived = [f"read-{n}" for n in range(1, place.count) if store.check([f"record-{n}"])]
                store.wait(arrived, timedelta(seconds=SECONDS_TO_END))
            raise FiveTuneEnvironmentError(fault)
    else:
        _report_node(place, mine, store, clock)
    return Meeting(place, store)


def compare_nodes(records: Mapping[int, NodeRecord]) -> str:
    """Describe the first difference between node 0 and another node; empty if there is none.

    >>> compare_nodes({0: NodeRecord("a", "0.1", "2.13", 2, 4), 1: NodeRecord("b", "0.2", "2.13", 2, 4)})
    'launch: node 1 (b) has FiveTune 0.2, node 0 (a) has 0.1. Install the same version on all nodes.'
    """
    first = records[0]
    for rank, other in sorted(records.items()):
        who = f"launch: node {rank} ({other.host}) has"
        for name in ("fivetune", "torch"):
            theirs, ours = getattr(other, name), getattr(first, name)
            if theirs != ours:
                shown = {"fivetune": "FiveTune", "torch": "torch"}[name]
                return (
                    f"{who} {shown} {theirs}, node 0 ({first.host}) has {ours}. Install the same version on all nodes."
                )
        if (other.nnodes, other.nproc) != (first.nnodes, first.nproc):
            return (
                f"{who} launch.nnodes {other.nnodes} and launch.nproc {other.nproc}, node 0 ({first.host}) has "
                f"{first.nnodes} and {first.nproc}. Give the same command on all nodes."
            )
    return ""


def _find_fault(place: NodePlace, mine: NodeRecord, store: PrefixStore, timeout: timedelta) -> str:
    """Wait for the other nodes; returns the reason why they cannot train together, or an empty text."""
    others = range(1, place.count)
    with suppress(RuntimeError):
        store.wait([f"record-{rank}" for rank in others], timeout)
    missing = [str(rank) for rank in others if not store.check([f"record-{rank}"])]
    if missing:
        return (
            f"launch: node {', '.join(missing)} of {place.count} did not connect to {place.address}:{place.port} "
            f"within {timeout.total_seconds() / 60:g} minutes (launch.timeout_minutes). Look at its log, and whether "
            f"it can reach this node ({mine.host}) by that address."
        )
    records = {0: mine, **{rank: NodeRecord.from_json(store.get(f"record-{rank}")) for rank in others}}
    return compare_nodes(records) or _find_clock_difference(records, store)


def _find_clock_difference(records: Mapping[int, NodeRecord], store: PrefixStore) -> str:
    """Ask each node for its time; the time between question and answer is no difference."""
    for rank, record in list(records.items())[1:]:
        asked = time.time()
        store.set(f"ask-{rank}", "")
        try:
            store.wait([f"time-{rank}"], timedelta(seconds=SECONDS_TO_ANSWER))
        except RuntimeError:
            return f"launch: node {rank} ({record.host}) ended while the nodes connected. Look at its log."
        answered, theirs = time.time(), float(store.get(f"time-{rank}"))
        difference = max(asked - theirs, theirs - answered)
        if difference > MAX_CLOCK_DIFFERENCE_SECONDS:
            return (
                f"launch: the clock of node {rank} ({record.host}) is {difference:,.0f} s "
                f"{'behind' if theirs < asked else 'ahead of'} that of node 0 ({records[0].host}); at most "
                f"{MAX_CLOCK_DIFFERENCE_SECONDS:g} s are allowed. Set the clocks of the nodes (NTP)."
            )
    return ""


def _report_node(place: NodePlace, mine: NodeRecord, store: PrefixStore, clock: Callable[[], float]) -> None:
    """Report this node to node 0 and wait for its verdict."""
    try:
        store.set(f"record-{place.rank}", json.dumps(asdict(mine)))
        while not store.check(["verdict"]):
            if store.check([f"ask-{place.rank}"]) and not store.check([f"time-{place.rank}"]):
                store.set(f"time-{place.rank}", str(clock()))
            time.sleep(0.05)
        fault = store.get("verdict").decode()
        store.set(f"read-{place.rank}", "")
    except RuntimeError as error:
        raise FiveTuneEnvironmentError(
            f"launch: node 0 ({place.address}:{place.port}) ended while the nodes connected. Look at its log."
        ) from error
    if fault:
        raise ReportedByOtherRankError(FiveTuneEnvironmentError.exit_code)


def _explain_connection_error(place: NodePlace, reason: str, timeout_seconds: float) -> str:
    """Explain why the store at the address of node 0 cannot be opened."""
    where = f"{place.address}:{place.port}"
    if place.rank == 0 and "EADDRINUSE" in reason:
        return (
            f"launch: port {place.port} of {socket.gethostname()} is taken by another program. "
            f"Set {PORT_VARIABLE} to a free port on all nodes."
        )
    if place.rank == 0:
        return (
            f"launch: node 0 cannot be reached at its own address {where}: {reason.splitlines()[0]:.200}. "
            f"Set {ADDRESS_VARIABLE} to an address of {socket.gethostname()}."
        )
    return (
        f"launch: node {place.rank} ({socket.gethostname()}) found no node 0 at {where} within "
        f"{timeout_seconds / 60:g} minutes (launch.timeout_minutes). Look at the log of node 0, and whether this "
        "address can be reached."
    )
