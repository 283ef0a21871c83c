"""Division of a model of the T5 family into pipeline stages.

In: a model and the ranks that share it. Out: the same model; each rank keeps the weights of its stage, the others have
no memory (meta tensors of the same shape).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fivetune.distributed.pipeline import STAGE, Stage, divide_costs, find_bias_block
from fivetune.distributed.world import World, import_collectives
from fivetune.errors import ConfigError
from fivetune.types import ignore_phase

if TYPE_CHECKING:
    from torch import nn


def assign_stage(model: Any, device: str, world: World, costs: Sequence[float], *, schedule: str = "1f1b") -> None:
    """Place this rank's stage on its device and free the other weights, in place. Collective: all ranks call it.

    Args:
        costs: cost of every block, the encoder's first; () if all cost the same.
        schedule: order of passes, "gpipe" or "1f1b".

    Raises ConfigError if there are fewer blocks than stages, or the model has no language model head.
    """
    import torch

    if not hasattr(model, "lm_head"):
        raise ConfigError("strategy.name: pipeline has no stages for a model with a span head. Use ddp or fsdp.")
    num_encoder = len(model.encoder.block)
    num_decoder = len(model.decoder.block)
    costs = costs or [1.0] * (num_encoder + num_decoder)
    if len(costs) < world.model_size:
        raise ConfigError(
            f"strategy.stages: {world.model_size} stages, the model has {len(costs)} blocks. Set strategy.stages to at "
            f"most {len(costs)}."
        )
    parts = divide_costs(costs, world.model_size)

    # Which stages hold a weight: an embedding, or a table of biases, may be on several of them.
    used = [set(_iter_weights(model, part, num_encoder)) for part in parts]
    holders: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        holders[name] = tuple(number for number, weights in enumerate(used) if parameter in weights)
    frozen = frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad)

    # torch requires that every rank creates every group, of other copies of the model too.
    copies = [range(first, first + world.model_size) for first in range(0, world.size, world.model_size)]
    connected = [_connect_stages(ranks, holders, world) for ranks in copies]
    (whole, downstream, upstream), groups = connected[world.data_rank]
    shared: dict[str, Any] = {}
    for name, numbers in holders.items():
        if numbers in groups and world.model_rank in numbers:
            shared[name] = groups[numbers]

    mine = parts[world.model_rank]
    _release_weights(model, used[world.model_rank], device)
    model.__dict__[STAGE] = Stage(
        number=world.model_rank,
        ranks=copies[world.data_rank],
        schedule=schedule,
        encoder=range(mine.start, min(mine.stop, num_encoder)),
        decoder=range(max(mine.start - num_encoder, 0), max(mine.stop - num_encoder, 0)),
        device=torch.device(device),
        group=whole,
        downstream=downstream,
        upstream=upstream,
        holders=holders,
        frozen=frozen,
        timer=ignore_phase,
        shared=shared,
    )


def count_block_weights(model: Any) -> list[float]:
    """Numbers of weights of every block, the encoder's first; embeddings and head are not counted."""
    counts: list[float] = []
    for block in (*model.encoder.block, *model.decoder.block):
        counts.append(sum(parameter.numel() for parameter in block.parameters()))
    return counts


def _connect_stages(
    ranks: range, holders: dict[str, tuple[int, ...]], world: World
) -> tuple[list[Any], dict[tuple[int, ...], Any]]:
    """Create the groups of a copy's stages: three of all stages, and one of each set of stages that shares weights."""
    # Three groups of the same ranks: activations, gradients and sums do not wait for one another.
    create = import_collectives().new_group
    whole = [create(list(ranks), timeout=world.timeout) for _ in range(3)]
    shared: dict[tuple[int, ...], Any] = {}
    for numbers in sorted(set(holders.values())):
        if len(numbers) > 1:
            shared[numbers] = create([ranks[number] for number in numbers], timeout=world.timeout)
    return whole, shared


def _iter_weights(model: Any, part: range, num_encoder: int) -> Iterator[nn.Parameter]:
    """Yield the weights that the blocks of `part` need, some of them twice."""
    last = num_encoder + len(model.decoder.block) - 1
    for number in part:
        stack = model.encoder
        own = number
        if number >= num_encoder:
            stack = model.decoder
            own = number - num_encoder
        yield from stack.block[own].parameters()
        yield from stack.block[find_bias_block(stack, own)].layer[0].SelfAttention.relative_attention_bias.parameters()
        if own == 0:
            yield from stack.embed_tokens.parameters()
        if own == len(stack.block) - 1:
            yield from stack.final_layer_norm.parameters()
        if number == last:
            yield from model.lm_head.parameters()


def _release_weights(model: nn.Module, kept: set[nn.Parameter], device: str) -> None:
    """Move the weights in `kept` to the device and replace the others by meta tensors; tied weights stay tied."""
    import torch
    from torch import nn

    freed: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter in kept:
                if not parameter.is_meta:  # else its values are loaded later
                    parameter.data = parameter.data.to(device)
                continue
            if parameter not in freed:
                freed[parameter] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            setattr(module, name, freed[parameter])
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
