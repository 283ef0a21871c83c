"""One node of several: its place, and what the nodes compare before they train."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest

from fivetune.config import load_config
from fivetune.distributed import processes as launch
from fivetune.distributed.processes.nodes import Meeting, NodePlace, NodeRecord, connect_nodes
from fivetune.distributed.world import World, refuse_wrong_world_size
from fivetune.errors import ConfigError, FiveTuneEnvironmentError, FiveTuneError, ReportedByOtherRankError

RECORD = NodeRecord(host="a", fivetune="0.1", torch="2.13", nnodes=2, nproc=4)


@pytest.fixture
def port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def meet(port: int, *records: NodeRecord, seconds: float = 20.0, offset: float = 0.0) -> list[Meeting | FiveTuneError]:
    """What each node gets, in two threads of this process."""

    def run(rank: int) -> Meeting | FiveTuneError:
        place = NodePlace(rank, 2, "127.0.0.1", port)
        try:
            return connect_nodes(place, records[rank], timeout_seconds=seconds, clock=lambda: time.time() + offset)
        except FiveTuneError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(len(records))))


def test_nodes_meet_and_leave(port):
    first, second = meet(port, RECORD, replace(RECORD, host="b"))
    assert isinstance(first, Meeting) and isinstance(second, Meeting)
    assert not second.has_rank_zero_ended()
    first.record_end_of_rank_zero()
    until = time.monotonic() + 10
    while not second.has_rank_zero_ended():  # the store does not confirm what it is told
        assert time.monotonic() < until
    second.leave()
    first.leave()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fivetune": "0.2"}, "launch: node 1 (b) has FiveTune 0.2, node 0 (a) has 0.1. Install the same version on"),
        ({"torch": "2.12"}, "launch: node 1 (b) has torch 2.12, node 0 (a) has 2.13. Install the same version on"),
        ({"nproc": 8}, "launch: node 1 (b) has launch.nnodes 2 and launch.nproc 8, node 0 (a) has 2 and 4. Give the"),
    ],
)
def test_a_node_that_differs_is_named_once(port, change, message):
    first, second = meet(port, RECORD, replace(RECORD, host="b", **change))
    assert isinstance(first, FiveTuneEnvironmentError) and str(first).startswith(message)
    assert isinstance(second, ReportedByOtherRankError) and second.exit_code == first.exit_code == 4


def test_a_version_with_other_fields_is_named(port):
    @dataclass(frozen=True, slots=True)
    class LaterRecord(NodeRecord):
        python: str = "3.14"

    first, second = meet(port, RECORD, LaterRecord("b", "0.2", "2.13", 2, 4))
    assert str(first).startswith("launch: node 1 (b) has FiveTune 0.2, node 0 (a) has 0.1. Install the same version")
    assert isinstance(second, ReportedByOtherRankError)


@pytest.mark.parametrize(("offset", "words"), [(95, "95 s ahead of"), (-95, "95 s behind")])
def test_clocks_that_differ_are_named(port, offset, words):
    first, second = meet(port, RECORD, replace(RECORD, host="b"), offset=offset)
    assert str(first).startswith(f"launch: the clock of node 1 (b) is {words} that of node 0 (a); at most 30 s are")
    assert isinstance(second, ReportedByOtherRankError)


def test_a_node_that_does_not_come_is_named_with_the_timeout(port):
    (error,) = meet(port, RECORD, seconds=0.3)
    assert str(error).startswith(
        f"launch: node 1 of 2 did not connect to 127.0.0.1:{port} within 0.005 minutes (launch.timeout_minutes). "
    )


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        (error,) = meet(port, RECORD, seconds=5)
    assert f"launch: port {port} of {socket.gethostname()} is taken by another program. Set PET_MASTER_PORT" in str(
        error
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "launch.nnodes: 2 nodes, but PET_NODE_RANK and PET_MASTER_ADDR is not set"),
        ({"PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"}, "PET_NODE_RANK: 2, with launch.nnodes 2. Give 0 to 1."),
        ({"SLURM_NODEID": "1"}, "launch.nnodes: 2 nodes, but PET_MASTER_ADDR is not set"),
        (
            {"PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "99999"},
            "PET_MASTER_PORT: 99999. Give a port number, 1 to 65535.",
        ),
    ],
)
def test_a_place_that_is_missing_or_wrong_is_refused(environ, message):
    with pytest.raises(ConfigError) as caught:
        NodePlace.from_environment(2, environ)
    assert str(caught.value).startswith(message)


def test_slurm_gives_the_place():
    place = NodePlace.from_environment(2, {"SLURM_NODEID": "1", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "20001"})
    assert place == NodePlace(1, 2, "n1", 20001)


def test_srun_starts_the_command_once_per_node():
    assert launch.is_needed(4, 2, {"SLURM_STEP_NUM_TASKS": "2"})
    with pytest.raises(ConfigError, match=r"srun starts this command 8 times, .* srun --ntasks=2 \(launch\.nnodes\)"):
        launch.is_needed(4, 2, {"SLURM_STEP_NUM_TASKS": "8"})


def test_the_world_has_all_processes_of_all_nodes():
    refuse_wrong_world_size(World(0, 8), 8, {"SLURM_NTASKS": "2"}, nnodes=2)
    with pytest.raises(ConfigError, match=r"^launch\.nnodes: world size 4, 2 nodes with 4 devices each requested\."):
        refuse_wrong_world_size(World(0, 4), 8, {}, nnodes=2)
    recipe = {"model": {"path": "m"}, "task": "squad", "launch": {"nnodes": 2, "nproc": 3}}
    with pytest.raises(ConfigError, match=r"launch\.nnodes 2 times launch\.nproc 3 needs a strategy for several"):
        load_config(recipe)
