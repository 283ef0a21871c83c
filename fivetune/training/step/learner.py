"""The parts of an optimizer step: model, optimizer, loss scaler, forward, device, strategy, and what runs them.

In: a RunConfig and a model. Out: a Learner, frozen: a step changes weights and optimizer state, not its parts. An
engine updates the weights, or raises before any weight changes: `plain.py` is the mathematics of a step, and
`graphs.py`, `pipeline.py` and `tpu.py` compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from fivetune.config import RunConfig
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.machine.telemetry.devices import (
    count_tpu_chips,
    decide_precision,
    get_peak_memory_bytes,
    pick_device,
    restore_fp32_products,
    set_fp32_products,
)
from fivetune.model.adapter import FOLDER, find_adapter, iter_merged, save_adapter
from fivetune.model.backend import Forward
from fivetune.model.decode import GenerateAnswers, generate
from fivetune.model.save import save_model
from fivetune.training.averaging import Averages
from fivetune.training.state.snapshot import list_weights
from fivetune.training.step.groups import group_weights
from fivetune.training.threads import ThreadControl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Batch, PhaseTimer, Strategy

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
        precision = f"{self.precision} on {self.name} ({self.precision_why})" if self.precision_why else ""
        return "; ".join(filter(None, (precision, self.threads_why)))

    def make_autocast(self) -> AbstractContextManager[object]:
        """Make an autocast context: 16-bit matrix products with fp32 weights; no-op in fp32."""
        kind = self.device.partition(":")[0]
        return torch.autocast(kind, dtype=DTYPES.get(self.precision), enabled=self.precision in DTYPES)

    def make_scaler(self) -> torch.amp.GradScaler:
        """Make a loss scaler for fp16; disabled in other precisions."""
        return torch.amp.GradScaler(self.device.partition(":")[0], enabled=self.precision == "fp16")


@dataclass(frozen=True, slots=True)
class Update:
    """Result of one optimizer step.

    Args:
        values: [3] fp32 on the host: mean loss per token (nats), gradient norm before clipping, positions computed.
            If the host did not wait for the step, they are valid once the device has finished it.
        batch_size: examples per forward pass; less than requested if memory ran out.
        signum: signal that a rank received until its gradients were summed; 0 if none. Equal on all ranks.
    """

    values: Tensor
    batch_size: int
    signum: int = 0

    @property
    def loss(self) -> float:
        return self.values[0].item()

    @property
    def grad_norm(self) -> float:
        return self.values[1].item()

    @property
    def num_positions(self) -> int:
        return int(self.values[2])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What one optimizer step is given, beside the Learner.

    Args:
        group: the micro-batches of this rank.
        number: number of the step, for messages.
        lr: rate of the schedule; None if the optimizer computes its own.
        batch_size: most examples per forward pass.
        num_scored_tokens: target tokens of the groups of all ranks.
        timer: gets each phase as it begins.
        nonfinite_flag: lets the host run ahead of the device; None: each step is checked before the weights change.
        get_signum: returns the signal that this rank has received, 0 if none.
    """

    group: list[Batch]
    number: int
    lr: float | None
    batch_size: int
    num_scored_tokens: int
    timer: PhaseTimer
    nonfinite_flag: Tensor | None
    get_signum: Callable[[], int]


class StepEngine:
    """Runs the steps of a Learner. The defaults are those of torch on one device, where nothing has to be fetched."""

    @property
    def num_graphs(self) -> int:
        """Number of CUDA graphs that the engine replays."""
        return 0

    @property
    def failure(self) -> str:
        """Why a graph could not be recorded; empty if none failed."""
        return ""

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        """Run one optimizer step. Raises NumericError for a non-finite one, of which no weight changes."""
        raise NotImplementedError

    @property
    def generate(self) -> GenerateAnswers:
        """What searches for answers."""
        return generate

    def fetch(self) -> None:
        """Bring model and optimizer on the host up to date; no-op where they are what the steps change."""

    def fetch_rates(self) -> None:
        """Bring what an effective learning rate follows from up to date."""

    def get_peak_memory_bytes(self, device: str) -> int | None:
        """Peak memory so far as `fivetune.machine.telemetry.devices` reads it; None if unknown."""
        return get_peak_memory_bytes(device)


class GradientEngine(StepEngine):
    """A StepEngine that adds gradients to the parameters, which the optimizer then applies."""

    def accumulate(self, learner: Learner, group: list[Batch], inputs: StepInputs) -> Tensor:
        """Add the gradients of micro-batches to the parameters; change nothing else.

        Returns: [2] fp32, the sums of loss / num_scored_tokens and of computed positions.
        """
        raise NotImplementedError

    def clear_gradients(self, learner: Learner) -> None:
        """Clear the gradients of all parameters."""
        learner.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Learner:
    """The parts of an optimizer step.

    Args:
        model: as placed by the strategy; each rank may hold a shard of its weights.
        forward: computes the token losses.
        engine: runs the steps.
        max_grad_norm: largest global gradient norm; None disables clipping.
        world: the ranks of the run.
        averages: evaluated and saved in place of the trained weights; None if those are.
    """

    model: T5Model
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    forward: Forward
    compute: ComputeConfig
    strategy: Strategy
    engine: StepEngine
    max_grad_norm: float | None
    world: World = SINGLE_PROCESS
    averages: Averages | None = None

    def swap_in_averages(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Put the averages into the model for a while, where there are any; yields the trained weights, by name."""
        return self.averages.swap_in() if self.averages else nullcontext({})

    def update_averages(self, step: int, timer: PhaseTimer) -> None:
        """Take the weights after a step (1-based) into the averages, if there are any."""
        if self.averages is not None:
            timer("optimizer")
            self.averages.update(step)
            timer("host")

    def fetch(self) -> None:
        """Bring the model and the optimizer up to date with the engine; no-op where the engine changes them itself."""
        self.engine.fetch()

    def fetch_rates(self) -> torch.optim.Optimizer:
        """Bring what an effective learning rate follows from up to date with the engine; returns the optimizer."""
        self.engine.fetch_rates()
        return self.optimizer

    def get_peak_memory_bytes(self) -> int | None:
        """Peak memory of the device so far; None if unknown."""
        return self.engine.get_peak_memory_bytes(self.compute.device)

    def save_model(self, tokenizer: PreTrainedTokenizerBase, folder: Path, **options: Any) -> None:
        """Save the model as `fivetune.model.save.save_model` does, and an adapter in adapter/ beside it.

        Collective: all ranks call it, rank 0 writes.
        """
        self.fetch()
        weights = iter_merged(self.model, self.strategy.iter_weights(self.model))
        try:
            if self.world.is_first:
                save_model(self.model, tokenizer, folder, weights=weights, **options)
                if find_adapter(self.model):
                    save_adapter(self.model, folder.with_name(FOLDER), run_id=options.get("run_id"))
        finally:  # after a full disk too: the other ranks wait for this one's part of each weight
            for _ in weights:
                pass


def choose_compute(
    config: RunConfig, world: World = SINGLE_PROCESS, resumed_precision: str | None = None
) -> ComputeConfig:
    """Choose device and precision, and set the number of threads; call it before any computation.

    Args:
        resumed_precision: the one that a resumed run began with, which train.precision auto keeps.

    Denormal floats are flushed to 0, because a CPU is many times slower with them; new threads inherit the setting.
    cuDNN's attention is disabled: it builds a plan for every exact shape, and decoding has thousands of shapes.
    These settings and that of fp32 products hold for the process. `train` restores them (`restore_process_settings`);
    `load_run_model` does not, because an open run computes answers until the process ends.
    """
    torch.set_flush_denormal(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = pick_device(config.device)
    threads = ThreadControl.from_setting(config.train.num_threads)
    threads_why = threads.start(measure=device == "cpu")
    if world.size > 1 and device == "cuda":
        device = pick_device(f"cuda:{world.local_rank}")
    precision, why = decide_precision(config.train.precision, device, resumed_precision)
    if device == "tpu":
        return ComputeConfig("cpu", precision, count_tpu_chips(), precision_why=why)
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)
    set_fp32_products(precision)
    return ComputeConfig(device, precision, precision_why=why, threads_why=threads_why)


@contextmanager
def restore_process_settings() -> Iterator[None]:
    """Restore after the block what `choose_compute` sets for the whole process, except the number of threads."""
    flushes = bool(torch.tensor(1e-40).mul(0.5) == 0)  # torch has no function that reads the setting
    has_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        with restore_fp32_products():
            yield
    finally:
        torch.set_flush_denormal(flushes)
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer over all trainable weights."""
    groups = group_weights(model, config.train.param_groups, layer_decay=config.train.layer_decay)
    for group in groups:
        for parameter in group["params"]:
            vars(parameter).pop("table_grad", None)  # left by an earlier optimizer with factored gradients
    build = config.optimizer.build
    # Factored gradients can be neither all-reduced, nor unscaled by a GradScaler, nor computed by TPU chips.
    if not config.strategy.supports_multiple and config.train.precision != "fp16" and config.device != "tpu":
        build = config.optimizer.build_for_tables
    optimizer = build(groups)
    # Fused optimizers write without torch counting it, by which `copy_weights` notices a change.
    optimizer.register_step_post_hook(lambda stepped, *_: increment_version(list_weights(stepped)))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    set_lr(optimizer, get_peak_lr(optimizer))
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float | None) -> None:
    """Set the learning rate of each group to `lr` times its lr_factor; None: the optimizer computes its own."""
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]


def get_peak_lr(optimizer: torch.optim.Optimizer) -> float | None:
    """The learning rate that a schedule scales; None if the optimizer computes its own."""
    return optimizer.param_groups[0]["initial_lr"]
