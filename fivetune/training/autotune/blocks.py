"""Measurement of what every block costs, by which strategy pipeline divides a model into stages.

In: a model, perhaps without values, and a batch. Out: seconds of forward and backward pass of every block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from fivetune.distributed.world import World
from fivetune.errors import is_out_of_memory
from fivetune.model.attention import SequenceBounds
from fivetune.model.flat import run_stack
from fivetune.model.loss import compute_head_losses
from fivetune.model.modules import T5Model
from fivetune.model.ops import EncoderOutput, Ops
from fivetune.training.autotune.probe import measure_best_seconds, restore_state
from fivetune.training.compute_config import ComputeConfig
from fivetune.types import Batch

NUM_TRIALS = 5
NUM_WARM_UP = 2


def measure_block_seconds(model: T5Model, batch: Batch, compute: ComputeConfig, world: World) -> tuple[float, ...]:
    """Measure forward and backward pass of every block, the encoder's first; the last one's with the output head.

    The blocks of a stack have the same shapes, so one of each is measured, in a model with random weights. Collective:
    all ranks measure at the same time and return the mean; () if memory runs out on one of them.
    """
    mine = None
    with restore_state(model):
        try:
            mine = _measure_parts(model, batch, compute)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
    found = world.gather(mine)
    measured = [one for one in found if one is not None]
    if len(measured) < len(found):
        return ()
    # Every rank computes the same mean: another one would divide the model at another block.
    encoder, decoder, head = [sum(part) / len(measured) for part in zip(*measured, strict=True)]
    costs = [encoder] * model.config.num_layers + [decoder] * model.config.num_decoder_layers
    costs[-1] += head
    return tuple(costs)


def _measure_parts(model: T5Model, batch: Batch, compute: ComputeConfig) -> tuple[float, ...]:
    """Seconds of a block of the encoder, of one of the decoder, and of the head."""
    device = torch.device(compute.device)
    config = copy.copy(model.config)
    config.num_layers = config.num_decoder_layers = 1
    with device:
        single = type(model)(config).train()  # type: ignore[call-arg]
    source = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_src, device)
    target = SequenceBounds.from_cu_seqlens(batch.cu_seqlens_tgt, device)
    x = torch.randn(source.ends[-1], config.d_model, device=device, requires_grad=True)
    y = torch.randn(target.ends[-1], config.d_model, device=device, requires_grad=True)
    labels = batch.labels.to(device)

    def measure(run: Callable[[], Tensor]) -> float:
        def run_passes() -> None:
            with compute.make_autocast():
                loss = run().sum()
            loss.backward()

        return measure_best_seconds(run_passes, compute.device, num_trials=NUM_TRIALS, num_warm_up=NUM_WARM_UP)

    return (
        measure(lambda: run_stack(single.encoder, x, source, Ops())),
        measure(lambda: run_stack(single.decoder, y, target, Ops(), EncoderOutput.cast(x, source))),
        measure(lambda: compute_head_losses(y, single.lm_head.weight, labels, None)),
    )
