"""Device and precision of a run, as they were chosen; torch is imported where it computes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
        import torch

        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
        kind = self.device.partition(":")[0]
        return torch.autocast(kind, dtype=dtypes.get(self.precision), enabled=self.precision in dtypes)

    def make_scaler(self) -> torch.amp.GradScaler:
        """Make a loss scaler for fp16; disabled in other precisions."""
        import torch

        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.precision == "fp16")
