"""Where and how a run computes: device, precision, number of CPU threads, and what they set for the whole process.

In: a RunConfig and the ranks. Out: a ComputeConfig, frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
from fivetune.training.compute_config import ComputeConfig
from fivetune.training.threads import ThreadControl


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
