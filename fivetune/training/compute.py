"""Where and how a run computes: device, precision, number of CPU threads, and what they set for the whole process.

In: a RunConfig and the ranks. Out: a ComputeConfig, frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from fivetune.config import RunConfig
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.machine.telemetry.devices import (
    count_tpu_chips,
    decide_precision,
    pick_device,
    restore_fp32_products,
    set_fp32_products,
)
from fivetune.training.threads import ThreadControl

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class ComputeConfig:
    """Device and autocast precision of a run.

    Args:
        device: torch's device; cpu with TPU chips, where the model is kept between their steps.
        num_chips: TPU chips that run steps and answers; 0 if torch does.
        precision_why: reason of a measured or replaced precision, for the log and machine.json; "" if it needs none.
        threads_why: reason of fewer CPU threads than cores; "" if it needs none.
    """

    device: str
    precision: str
    num_chips: int = 0
    precision_why: str = ""
    threads_why: str = ""

    @property
    def step_device(self) -> str:
        """The device that runs steps and answers: torch's, or tpu."""
        return "tpu" if self.num_chips else self.device

    @property
    def kind(self) -> str:
        """The kind of `step_device`: cpu, cuda, mps or tpu."""
        return self.step_device.partition(":")[0]

    @property
    def name(self) -> str:
        """The device for messages: cuda:1, 4 x tpu."""
        return f"{self.num_chips} x tpu" if self.num_chips else self.device

    @property
    def reasons(self) -> str:
        """Why the precision and the number of CPU threads are what they are; "" if they need no reason."""
        reasons: list[str] = []
        if self.precision_why:
            reasons.append(f"{self.precision} on {self.name} ({self.precision_why})")
        if self.threads_why:
            reasons.append(self.threads_why)
        return "; ".join(reasons)

    def make_autocast(self) -> AbstractContextManager[object]:
        """Make an autocast context: 16-bit matrix products with fp32 weights; no-op in fp32."""
        kind = self.device.partition(":")[0]
        return torch.autocast(kind, dtype=DTYPES.get(self.precision), enabled=self.precision in DTYPES)

    def make_scaler(self) -> torch.amp.GradScaler:
        """Make a loss scaler for fp16; disabled in other precisions."""
        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.precision == "fp16")


def choose_compute(
    config: RunConfig, world: World = SINGLE_PROCESS, resumed_precision: str | None = None
) -> ComputeConfig:
    """Choose device and precision, and set the number of threads; call it before any computation.

    Args:
        resumed_precision: precision that a resumed run began with, which train.precision auto keeps.

    The settings of denormal floats, cuDNN and fp32 products hold for the process. `train` restores them by
    `restore_process_settings`; `load_run_model` does not, because an open run answers until the process ends.
    """
    # A CPU is many times slower with denormal floats; threads that are started later inherit the setting.
    torch.set_flush_denormal(True)
    # cuDNN's attention builds a plan for every exact shape, and decoding has thousands of shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # A product in fp16 may be a sum of partial products, which must not be rounded to fp16 before it.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    device = pick_device(config.device)
    threads = ThreadControl.from_setting(config.train.num_threads)
    threads_why = threads.start(measure=device == "cpu")
    # Each rank has a GPU of its machine for itself.
    if world.size > 1 and device == "cuda":
        device = pick_device(f"cuda:{world.local_rank}")
    precision, why = decide_precision(config.train.precision, device, resumed_precision)
    if device == "tpu":
        return ComputeConfig("cpu", precision, count_tpu_chips(), precision_why=why)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # kernels and collectives of libraries use the current device
    set_fp32_products(precision)
    return ComputeConfig(device, precision, precision_why=why, threads_why=threads_why)


@contextmanager
def restore_process_settings() -> Iterator[None]:
    """Restore after the block what `choose_compute` sets for the whole process, except the number of threads."""
    flushes = bool(torch.tensor(1e-40).mul(0.5) == 0)  # torch has no function that reads the setting
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    rounds_parts = torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    try:
        with restore_fp32_products():
            yield
    finally:
        torch.set_flush_denormal(flushes)
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = rounds_parts
