"""The parts of an optimizer step: model, optimizer, loss scaler, forward, device, strategy, and what runs them.

In: the parts, as `training/setup.py` builds them. Out: a Learner, frozen: a step changes weights and optimizer state,
not its parts. An engine updates the weights, or raises before any weight changes: `plain.py` is the mathematics of a
step, and `graphs.py`, `pipeline.py` and `tpu.py` compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fivetune.distributed.sharding import iter_gathered
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.machine.telemetry.devices import get_peak_memory_bytes
from fivetune.model.adapter import FOLDER, find_adapter, iter_merged, save_adapter
from fivetune.model.backend import Forward
from fivetune.model.decode import GenerateAnswers, generate
from fivetune.model.save import save_model
from fivetune.training.averaging import Averages
from fivetune.training.compute_config import ComputeConfig
from fivetune.types import ignore_phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model
    from fivetune.types import Batch, PhaseTimer, Strategy


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
    """The arguments of one optimizer step, except the Learner.

    Args:
        batches: the micro-batches of this rank.
        number: number of the step, for messages.
        lr: rate of the schedule; None if the optimizer computes its own.
        batch_size: most examples per forward pass.
        num_scored_tokens: target tokens of the micro-batches of all ranks.
        timer: gets each phase as it begins.
        nonfinite_flag: lets the host run ahead of the device; None: each step is checked before the weights change.
        get_signum: returns the signal that this rank has received, 0 if none.
    """

    batches: list[Batch]
    number: int
    lr: float | None
    batch_size: int
    num_scored_tokens: int
    timer: PhaseTimer = ignore_phase
    nonfinite_flag: Tensor | None = None
    get_signum: Callable[[], int] = lambda: 0


class StepEngine:
    """Runs the steps of a Learner. By default the host has model and optimizer, so that nothing has to be fetched."""

    @property
    def num_graphs(self) -> int:
        """Number of CUDA graphs that the engine replays."""
        return 0

    @property
    def failure(self) -> str:
        """Why a graph could not be recorded; empty if none failed."""
        return ""

    def step(self, learner: Learner, inputs: StepInputs) -> Update:
        """Run one optimizer step. Raises NumericError for a non-finite step, before any weight changes."""
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

    def accumulate(self, learner: Learner, batches: list[Batch], inputs: StepInputs) -> Tensor:
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
        if self.averages:
            return self.averages.swap_in()
        return nullcontext({})

    def update_averages(self, step: int, timer: PhaseTimer) -> None:
        """Take the weights after a step (1-based) into the averages, if there are any."""
        if self.averages is not None:
            timer("optimizer")  # the phase that changes weights
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
        """Save the model as `fivetune.model.save.save_model` does, and an adapter in adapter/ next to its folder.

        Collective: all ranks call it, rank 0 writes.
        """
        self.fetch()
        weights = iter_merged(self.model, iter_gathered(self.model))
        try:
            if self.world.is_first:
                save_model(self.model, tokenizer, folder, weights=weights, **options)
                if find_adapter(self.model):
                    save_adapter(self.model, folder.with_name(FOLDER), run_id=options.get("run_id"))
        finally:
            # Take what is left, after a full disk too: the other ranks wait for this one's part of each weight.
            for _ in weights:
                pass
