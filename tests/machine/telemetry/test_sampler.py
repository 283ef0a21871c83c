"""The thread that records what the machine does beside the training."""

from __future__ import annotations

import threading
import time
from collections import namedtuple

import psutil
import pytest

from fivetune.config import load_config
from fivetune.distributed.world import World
from fivetune.machine.telemetry import sampler as sampler_module
from fivetune.machine.telemetry.host import HostCounters, ProcessTree
from fivetune.machine.telemetry.nvml import Nvml
from fivetune.machine.telemetry.sampler import Sampler, compute_next_tick
from fivetune.rundir import TELEMETRY, NullRunDir, read_jsonl
from fivetune.rundir.progress import Progress
from fivetune.rundir.records import RunStatus
from fivetune.training.outputs import RunOutputs, open_sampler
from reliability.fake_driver import FakeDriver

Memory = namedtuple("Memory", "total available used")
Disk = namedtuple("Disk", "read_bytes write_bytes")
Card = namedtuple("Card", "bytes_sent bytes_recv")


def wait_until(true, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "telemetry"]


# --- the thread ---


def test_a_run_of_the_thread(tmp_path):
    path = tmp_path / TELEMETRY
    with Sampler(path, every_seconds=0.02, rank=3, nvml=lambda: Nvml(FakeDriver(2), {})) as sampler:
        wait_until(lambda: len(read_jsonl(path)) >= 2)
        sampler.phase, sampler.step = "train", 7
        wait_until(lambda: read_jsonl(path)[-1]["step"] == 7)
    assert threads() == []
    first, *_, last = read_jsonl(path)
    assert (first["phase"], first["step"], first["rank"]) == (None, None, 3)
    assert first["process_cores"] is first["core_utilisation"] is first["disk_read_bytes_per_second"] is None
    assert last["phase"] == "train" and abs(last["seconds"] - time.time()) < 60
    assert len(last["core_utilisation"]) == psutil.cpu_count() and 0 <= last["cpu_utilisation"] <= 1
    assert 0 < last["process_ram_bytes"] <= last["ram_total_bytes"]
    assert [device["index"] for device in last["devices"]] == [0, 1] and last["devices"][1]["utilisation"] == 0.94


@pytest.mark.parametrize("rank", [0, 1])
def test_before_training_only_rank_0_samples(tmp_path, rank):
    """It removes the directory of a refused run, into which no other may write."""
    config, run = load_config({"model": {"path": "m"}, "task": "squad_v2"}), NullRunDir(tmp_path, RunStatus())
    outputs = RunOutputs(run, Progress(silent=True))
    with open_sampler(config, outputs, World(rank, 2, rank)):
        assert len(threads()) == (rank == 0)
    assert threads() == [] and (rank == 0 or not any(tmp_path.iterdir()))


def test_it_ends_at_once_also_when_training_raises():
    taken: list[dict] = []
    with pytest.raises(ZeroDivisionError), Sampler(taken.append, every_seconds=3600, devices=False):
        wait_until(lambda: taken != [])
        started = time.monotonic()
        raise ZeroDivisionError
    assert time.monotonic() - started < 2 and threads() == [] and len(taken) == 1
    assert taken[0]["devices"] == ()


def test_a_driver_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(sampler_module, "SECONDS_TO_STOP", 0.05)
    release, entered = threading.Event(), threading.Event()
    stuck = Nvml(FakeDriver(DeviceGetPowerUsage=lambda handle: entered.set() or release.wait(20)), {})
    sampler = Sampler(lambda _: None, nvml=lambda: stuck).start()
    assert entered.wait(10)
    started = time.monotonic()
    sampler.stop()
    assert time.monotonic() - started < 5 and threads() != []
    release.set()
    wait_until(lambda: threads() == [])


def test_zero_seconds_start_nothing(tmp_path):
    with Sampler(tmp_path / TELEMETRY, every_seconds=0):
        assert threads() == []
    assert not (tmp_path / TELEMETRY).exists()


def test_what_fails_is_counted_told_once_and_tried_again():
    told, taken, broken = [], [], [ValueError("odd"), None, ValueError("odder"), None]

    def write(record):
        if error := broken.pop(0):
            raise error
        taken.append(record)

    sampler = Sampler(write, devices=False, warn=told.append)
    for _ in range(4):
        sampler.take_sample()
    assert (len(taken), sampler.num_failures) == (2, 2)
    assert told == ["telemetry: a record is lost: ValueError: odd. Training continues."]
    assert "odder" in (sampler.failure or "")


def test_looks_do_not_drift_and_do_not_pile_up():
    due, now, looks = 0.0, 0.0, []
    for seconds in (0.1, 0.3, 2.7, 0.1):  # of each look
        looks.append(now)
        due = compute_next_tick(due, 1.0, now + seconds)
        now = due
    assert looks == [0.0, 1.0, 2.0, 5.0]


def test_a_folder_that_is_gone_does_not_stop_it(tmp_path):
    told = []
    sampler = Sampler(tmp_path / "gone" / TELEMETRY, devices=False, warn=told.append)
    sampler.take_sample()
    assert sampler.num_failures == 1 and "FileNotFoundError" in told[0]


# --- the host ---


def no_such_counter(*_, **__):
    raise psutil.AccessDenied


@pytest.mark.parametrize("answer", [no_such_counter, lambda *_, **__: None], ids=["raises", "None"])
def test_a_container_that_hides_everything_gives_none_and_never_0(monkeypatch, answer):
    for name in ("cpu_percent", "virtual_memory", "swap_memory", "disk_io_counters", "net_io_counters"):
        monkeypatch.setattr(psutil, name, answer)
    monkeypatch.setattr(psutil.Process, "cpu_times", no_such_counter)
    host = HostCounters()
    host.sample()
    assert set(host.sample().values()) == {None}


def test_rates_and_shares_are_of_what_happened_between(monkeypatch):
    now, disks, cards = [0.0], {"sda": Disk(100, 50), "sda1": Disk(100, 50)}, {"lo": Card(9, 9), "eth0": Card(1000, 10)}
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "disk_io_counters", lambda **_: disks)
    monkeypatch.setattr(psutil, "net_io_counters", lambda **_: cards)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(1000, 250, 600))
    monkeypatch.setattr(psutil, "swap_memory", lambda: Memory(0, 0, 0))
    host = HostCounters()
    host.sample()
    now[0], disks["sda"], cards["lo"], cards["eth0"] = 2.0, Disk(300, 50), Card(999, 999), Card(500, 30)
    found = host.sample()
    assert (found["disk_read_bytes_per_second"], found["disk_written_bytes_per_second"]) == (100, 0)
    assert (found["network_sent_bytes_per_second"], found["network_received_bytes_per_second"]) == (
        None,
        10,
    )  # went back
    assert (found["ram_used_bytes"], found["ram_share"], found["swap_share"]) == (750, 0.75, None)


def test_work_of_children_counts_and_they_come_and_go(monkeypatch):
    class Process:
        def __init__(self, pid):
            self.pid, self.seconds, self.gone = pid, 10.0, False

        def children(self, recursive):
            return children

        oneshot = psutil.Process().oneshot

        def cpu_times(self):
            if self.gone:
                raise psutil.NoSuchProcess(self.pid)
            return namedtuple("Times", "user system")(self.seconds, 0.0)

        def memory_info(self):
            return namedtuple("Resident", "rss")(100)

    root, children = Process(1), [Process(2)]
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    host = HostCounters()
    host._tree = ProcessTree(root)
    assert host._read_process_usage(0.0) == (None, 200)
    host._time, now[0] = 0.0, 2.0
    root.seconds, children[0].seconds = 11.0, 12.0
    children.append(Process(3))
    assert host._read_process_usage(2.0) == (1.5, 300)
    children[0].gone = True
    host._time, root.seconds, children[1].seconds = 2.0, 13.0, 10.5
    assert host._read_process_usage(4.0) == (1.25, 200)
    assert host.list_pids() == {1, 2, 3}


def test_children_are_looked_for_less_often_where_that_is_slow(monkeypatch):
    now, looks = [0.0], []

    class Root:
        def children(self, recursive):
            looks.append(now[0])
            now[0] += 0.02
            return []

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tree = ProcessTree(Root())
    for second in range(1, 22):
        now[0] = float(second)
        tree.list_processes()
    assert looks == [1.0, 12.0]


# --- what it costs ---


def test_under_one_per_cent_of_a_core(tmp_path):
    sampler = Sampler(tmp_path / TELEMETRY, nvml=lambda: Nvml(FakeDriver(8), {}))
    sampler.take_sample()  # imports, opens, looks for children
    started, num_looks = time.thread_time(), 50
    for _ in range(num_looks):
        sampler.take_sample()
    sampler.stop()
    assert (time.thread_time() - started) / num_looks < 0.01  # seconds, of one
    assert sampler.num_failures == 0
