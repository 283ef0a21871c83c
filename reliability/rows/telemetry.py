"""A driver of GPUs that is missing, knows little, answers nonsense or fails during a run: the run does not notice."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reliability.campaign import Row, Trial
from reliability.fake_driver import FakeDriver, NVMLError
from reliability.faults import train
from reliability.warm import WarmProcess, check_success, run_command
from reliability.workload import Workload, check_weights, read_weights

OFTEN: dict[str, Any] = {"telemetry__every_seconds": 0.1}
UNKNOWN = NVMLError("Not Supported")
KNOWN = ("Init", "Shutdown", "DeviceGetCount", "DeviceGetHandleByIndex")
NUMBERS = (
    "utilisation", "memory_busy", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts",
    "power_limit_watts", "sm_clock_mhz", "memory_clock_mhz", "pcie_sent_bytes_per_second",
    "pcie_received_bytes_per_second", "energy_joules",
)  # fmt: skip
ALL_BITS = 2**64 - 1


def make_driver(kind: str) -> FakeDriver | None:
    """The driver of a kind; None: the package is not installed."""
    if kind == "no package":
        return None
    if kind == "no driver":
        return FakeDriver(Init=NVMLError("Driver Not Loaded"))
    if kind in ("8 devices", "1 device"):
        return FakeDriver(int(kind[0]))
    driver = FakeDriver(2)
    if kind == "no field is known":
        driver.answers = {name: value if name in KNOWN else UNKNOWN for name, value in driver.answers.items()}
    elif kind == "all bits are set":
        driver.answers |= {name: ALL_BITS for name in driver.answers if name not in (*KNOWN, "DeviceGetMigMode")}
    elif kind == "MIG":
        driver.answers |= {
            "DeviceGetMigMode": [1, 1],
            "DeviceGetMaxMigDeviceCount": 2,
            "DeviceGetMigDeviceHandleByIndex": lambda handle, mig: 10 * (handle + 1) + mig,
            "DeviceGetUtilizationRates": UNKNOWN,
        }
    else:
        fail_later(driver, kind)
    return driver


def fail_later(driver: FakeDriver, kind: str) -> None:
    """After 40 calls each call fails, or those to the second device do."""
    number = 0

    def wrap(answer: Any) -> Any:
        def call(*values: Any, **named: Any) -> Any:
            nonlocal number
            number += 1
            if number > 40 and (kind == "fails during the run" or values[:1] == (1,)):
                raise NVMLError("GPU is lost")
            if isinstance(answer, Exception):
                raise answer
            return answer(*values, **named) if callable(answer) else answer

        return call

    driver.answers = {name: wrap(answer) for name, answer in driver.answers.items()}


KINDS = {  # devices of a record, whether their numbers are known at the start
    "no package": (0, False), "no driver": (0, False), "1 device": (1, True), "8 devices": (8, True),
    "no field is known": (2, False), "all bits are set": (2, False), "MIG": (6, True),
    "fails during the run": (2, True), "a device is lost": (2, True),
}  # fmt: skip
LOST = {"fails during the run": (0, 1), "a device is lost": (1,)}  # devices that have no numbers at the end


def train_with_driver(recipe: str, kind: str) -> int:
    """Run `fivetune train RECIPE` where the driver is of this kind."""
    modules: dict[str, Any] = sys.modules
    modules["pynvml"] = make_driver(kind)
    return train(recipe)


def change_driver(workload: Workload, random: random.Random) -> Iterator[Trial]:
    """Each kind of driver."""
    for kind in random.sample(sorted(KINDS), len(KINDS)):

        def run(folder: Path, kind: str = kind) -> None:
            recipe = workload.write_recipe(folder, **OFTEN)
            done = WarmProcess(train_with_driver, str(recipe), kind).finish()
            check_success(done)
            check_weights(read_weights(folder / "run"), workload.run_undisturbed().weights)
            check_records(folder / "run", *KINDS[kind], lost=LOST.get(kind, ()))
            check_success(run_command("report", str(folder / "run")))

        yield Trial(kind, run)


def check_records(run: Path, num_devices: int, is_known: bool, *, lost: Sequence[int]) -> None:
    """Each record has the devices; what the driver does not know is absent, and no number is 0 or negative. At the end
    the lost devices have no numbers, and where there are any, the others have.
    """
    lines = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    samples = [line for line in lines if "devices" in line or "phase" in line]
    counts = {len(line.get("devices") or ()) for line in samples}
    assert counts == {num_devices}, f"{counts} devices in a record, not {num_devices}"
    values = [[device.get(name) for name in NUMBERS] for line in samples for device in line.get("devices") or ()]
    assert all(value is None or value > 0 for one in values for value in one), "an unknown number is written as 0"
    if num_devices:
        assert any(value is not None for value in values[0]) == is_known, f"known numbers: {values[0]}"
    for number, device in enumerate(values[-num_devices:] if lost else ()):
        has_numbers = any(value is not None for value in device)
        assert has_numbers == (number not in lost), f"{lost} were lost, and device {number} has {device} at the end"


ROWS = [
    Row("R30", "the GPUs' driver is missing, knows no field, sets all bits, fails during a run; 8 devices, MIG",
        "identical weights; unknown values are absent, never 0; the report is built", change_driver, 3),
]  # fmt: skip
