"""The NVIDIA devices of a node, with a driver that answers as we like."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest

from fivetune.machine.telemetry.nvml import Nvml, NvmlDevice, find_cuda_order
from fivetune.rundir.records import DeviceSample
from reliability.fake_driver import FakeDriver, NVMLError

WHOLE = DeviceSample(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    utilisation=0.95,
    memory_busy=0.65,
    memory_used_bytes=2**30,
    memory_total_bytes=80 * 2**30,
    temperature_celsius=61.0,
    power_watts=402.5,
    power_limit_watts=700.0,
    sm_clock_mhz=1980.0,
    memory_clock_mhz=2619.0,
    throttle_reasons=("sw_power_cap",),
    pcie_sent_bytes_per_second=1_500_000.0,
    pcie_received_bytes_per_second=250_000.0,
    energy_joules=123.456,
    ours=True,
    cuda_index=0,
)
LOST = {  # call that fails: the counters that are gone, or have a second way
    "DeviceGetName": {"name"},
    "DeviceGetUtilizationRates": {"utilisation", "memory_busy"},
    "DeviceGetMemoryInfo": {"memory_used_bytes", "memory_total_bytes"},
    "DeviceGetTemperatureV": set(),
    "DeviceGetPowerUsage": {"power_watts"},
    "DeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "DeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
    "DeviceGetCurrentClocksEventReasons": set(),
    "DeviceGetPcieThroughput": {"pcie_sent_bytes_per_second", "pcie_received_bytes_per_second"},
    "DeviceGetTotalEnergyConsumption": {"energy_joules"},
    "DeviceGetComputeRunningProcesses": {"ours"},
}


def sample(pids: frozenset[int] = frozenset({77}), num_devices: int = 1, environ=None, **answers):
    return Nvml(FakeDriver(num_devices, **answers), environ or {}).sample(pids)


def missing(sample: DeviceSample) -> set[str]:
    """Counters that a healthy driver gives and this sample lacks; all others must be right."""
    gone = {f.name for f in fields(sample) if getattr(sample, f.name) is None} - {"mig"}
    wrong = {f.name for f in fields(sample) if getattr(sample, f.name) != getattr(WHOLE, f.name)} - gone
    assert wrong == set()
    return gone


def test_a_healthy_driver_gives_every_counter():
    assert sample() == (WHOLE,)


@pytest.mark.parametrize("call", LOST)
@pytest.mark.parametrize("answer", [NVMLError("GPU is lost"), OSError("driver"), None, object()], ids=type)
def test_a_call_that_fails_costs_its_own_counter_only(call, answer):
    assert missing(*sample(**{call: answer})) == LOST[call]


@pytest.mark.parametrize("call", ["DeviceGetPowerUsage", "DeviceGetClockInfo", "DeviceGetTotalEnergyConsumption"])
@pytest.mark.parametrize("answer", [2**64 - 1, -1, float("nan"), True], ids=repr)
def test_a_figure_that_cannot_be_is_none(call, answer):
    assert missing(*sample(**{call: lambda *_: answer})) == LOST[call]


def test_shares_and_memory_that_cannot_be_are_none():
    (found,) = sample(
        DeviceGetUtilizationRates=SimpleNamespace(gpu=4294967295, memory=12),
        DeviceGetMemoryInfo=lambda handle, version=None: SimpleNamespace(used=90 * 2**30, total=80 * 2**30),
    )
    assert (found.utilisation, found.memory_busy) == (None, 0.12)
    assert (found.memory_used_bytes, found.memory_total_bytes) == (None, 80 * 2**30)


def test_a_driver_that_dies_leaves_the_device_with_nothing_known():
    driver = FakeDriver()
    nvml = Nvml(driver, {})
    nvml.sample()
    driver.answers |= {name: NVMLError("GPU is lost") for name in driver.answers}
    assert nvml.sample() == (DeviceSample(index=0, name=WHOLE.name, cuda_index=0),)
    nvml.close()


def test_a_driver_that_fails_at_first_is_asked_again():
    def not_yet(index):
        if index == 1:
            raise NVMLError("In use by another client")
        return index

    driver = FakeDriver(DeviceGetCount=NVMLError("Timeout"))
    nvml = Nvml(driver, {})
    assert nvml.sample() == ()
    driver.answers |= {"DeviceGetCount": 2, "DeviceGetHandleByIndex": not_yet}
    assert nvml.sample()[0].utilisation == 0.95
    driver.answers["DeviceGetHandleByIndex"] = lambda index: index
    assert [device.utilisation for device in nvml.sample()] == [0.95, 0.94]


@pytest.mark.parametrize("error", [NVMLError("Driver Not Loaded"), OSError("libnvidia-ml.so.1"), ImportError()])
def test_without_a_driver_there_are_no_devices(error):
    assert sample(Init=error) == ()


def test_without_the_package_there_are_no_devices(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert Nvml().sample() == ()


def test_an_old_driver_has_other_names_for_calls():
    old = FakeDriver()
    for name in ("DeviceGetTemperatureV", "DeviceGetCurrentClocksEventReasons"):
        del old.answers[name]
    old.answers["DeviceGetMemoryInfo"] = lambda handle: SimpleNamespace(used=2**30, total=80 * 2**30)
    old.answers["DeviceGetName"] = b"NVIDIA H100 80GB HBM3"
    assert Nvml(old, {}).sample(frozenset({77})) == (WHOLE,)


@pytest.mark.parametrize("bits, names", [(0, ()), (1, ()), (0x60, ("sw_thermal_slowdown", "hw_thermal_slowdown"))])
def test_throttle_reasons_have_names_and_idle_is_none(bits, names):
    assert sample(DeviceGetCurrentClocksEventReasons=bits)[0].throttle_reasons == names


def test_whose_device_it_is():
    driver = FakeDriver(2, DeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=77 + handle)])
    nvml = Nvml(driver, {})
    nvml._sees_all_processes = True
    assert [device.ours for device in nvml.sample(frozenset({77}))] == [True, False]
    nvml._sees_all_processes = False  # a container shows other numbers than the process has
    assert [device.ours for device in nvml.sample(frozenset({77}))] == [True, None]


def test_all_devices_of_the_node_also_those_that_cuda_does_not_see():
    found = sample(num_devices=8, environ={"CUDA_VISIBLE_DEVICES": "6,GPU-2"})
    assert [device.utilisation for device in found] == [round(0.95 - i / 100, 4) for i in range(8)]
    assert {device.index: device.cuda_index for device in found if device.cuda_index is not None} == {6: 0, 2: 1}


def test_mig_instances_stand_behind_their_device():
    def instance(handle, number):
        if number > 1:
            raise NVMLError("Not Found")
        return f"mig{number}"

    def not_on_mig(handle):
        raise NVMLError("Not Supported")

    found = sample(
        environ={"CUDA_VISIBLE_DEVICES": "MIG-b"},
        DeviceGetMigMode=[1, 1],
        DeviceGetMaxMigDeviceCount=7,
        DeviceGetMigDeviceHandleByIndex=instance,
        DeviceGetUtilizationRates=not_on_mig,
        DeviceGetUUID=lambda handle: {0: "GPU-0", "mig0": "MIG-a", "mig1": "MIG-b"}[handle],
    )
    assert [(device.index, device.mig, device.cuda_index) for device in found] == [
        (0, None, None),
        (0, 0, None),
        (0, 1, 0),
    ]
    assert [device.utilisation for device in found] == [None] * 3
    assert found[2].memory_used_bytes == 2**30


@pytest.mark.parametrize(
    "asked, order, places",
    [
        (None, None, []),  # a mixed node counts by speed, which is not known here
        (None, "PCI_BUS_ID", [0, 1]),
        ("1", None, []),
        ("1, 0", "PCI_BUS_ID", [1, 0]),
        ("GPU-b", None, [1]),
        ("", None, []),
        ("1,1", "PCI_BUS_ID", []),
        ("0,7,1", "PCI_BUS_ID", [0]),
        ("GPU-", None, []),  # fits both
    ],
)
def test_cuda_order_of_unlike_devices(asked, order, places):
    devices = [NvmlDevice(None, 0, name="A100", uuid="GPU-a"), NvmlDevice(None, 1, name="T4", uuid="GPU-b")]
    environ = {"CUDA_VISIBLE_DEVICES": asked, "CUDA_DEVICE_ORDER": order}
    assert find_cuda_order(devices, {key: value for key, value in environ.items() if value is not None}) == places
