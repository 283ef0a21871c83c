"""The state of a run on its ranks: weights, optimizer, loss scaler, random generators.

In: a model with its optimizer. Out: a snapshot that a checkpoint holds, whole or as the shards of this rank; and back:
the optimizer's state and the random states of a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivetune.distributed.sharding import gather_tensor, iter_held, shard_like
from fivetune.distributed.world import SINGLE_PROCESS, World
from fivetune.model.adapter import select_own_weights
from fivetune.types import TorchState


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state on the host: weights by name, and the content of state.pt.

    Tensors that are on the host already are not copied: a snapshot of a CPU run is written before the next step, or
    `copy` is.
    """

    weights: dict[str, Tensor]
    state: TorchState

    def copy(self) -> Snapshot:
        """Copy all tensors, so that later steps do not change them."""
        return Snapshot(_copy_to_host(self.weights), _copy_to_host(self.state))


@dataclass(frozen=True, slots=True)
class ShardedSnapshot:
    """What this rank holds of the state: tensors by name, on their devices, and on rank 0 the content of state.pt.

    The names: weights/<name>, optimizer/<name of the weight>/<field>, and trained/<name> if the weights are averages. A
    pipeline's rank has the tensors of its stage only.
    """

    tensors: dict[str, Tensor]
    state: TorchState

    def copy(self) -> ShardedSnapshot:
        """Copy all tensors to the host, so that later steps do not change them."""
        return ShardedSnapshot(_copy_to_host(self.tensors), self.state)


def _copy_to_host(tree: Any) -> Any:
    return map_tensors(tree, lambda tensor: tensor.detach().to("cpu", copy=True))


def take_shards(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    world: World,
    trained: Mapping[str, Tensor] = MappingProxyType({}),
) -> ShardedSnapshot:
    """List what this rank holds, without a copy. Collective: all ranks call it.

    Args:
        trained: the trained weights by name, if the model holds their averages.
    """
    optimizer_state = _collect_states(model, optimizer)
    tensors = {f"weights/{name}": parameter.detach() for name, parameter in iter_held(model)}
    tensors |= {f"trained/{name}": weight for name, weight in trained.items()}
    values: TorchState = {}  # of the optimizer, without tensors
    for name, state in optimizer_state["state"].items():
        tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        values[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    # A pipeline's rank has the weights of its stage only, and rank 0 writes the values of all.
    for of_rank in world.gather(values):
        values |= of_rank
    return ShardedSnapshot(tensors, _build_state({**optimizer_state, "state": values}, scaler, world))


def take_snapshot(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    world: World = SINGLE_PROCESS,
    trained: Mapping[str, Tensor] = MappingProxyType({}),
) -> Snapshot:
    """Gather the current state on the host, as `take_shards`; the snapshot is complete on rank 0."""

    # All ranks gather, one tensor at a time; only rank 0 keeps what it writes.
    def taken(tensor: Tensor) -> Tensor:
        full = gather_tensor(tensor.detach())
        return full.cpu().contiguous() if world.is_first else full.new_empty(0)

    state = _build_state(map_tensors(_collect_states(model, optimizer), taken), scaler, world)
    if trained:
        state["trained"] = map_tensors(dict(trained), taken)
    return Snapshot({name: taken(parameter) for name, parameter in select_own_weights(model)}, state)


def _build_state(optimizer_state: TorchState, scaler: torch.amp.GradScaler, world: World) -> TorchState:
    """Build the content of state.pt. Collective."""
    states = world.gather(get_random_states())
    return {
        "optimizer": optimizer_state,
        "scaler": scaler.state_dict(),
        "random": states[0],
        "random_of_others": states[1:],
    }


def _collect_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> TorchState:
    """The optimizer's state, by the names of weights; its groups hold settings only, and differ by strategy."""
    name_of = map_names(model)
    parameters = list_weights(optimizer)
    taken = optimizer.state_dict()
    # Groups list weights by number, which differ from strategy to strategy.
    del taken["param_groups"]
    taken["state"] = {name_of[parameters[number]]: state for number, state in taken["state"].items()}
    return taken


def map_names(model: nn.Module) -> dict[Tensor, str]:
    """The names of a model's weights."""
    return {parameter: name for name, parameter in model.named_parameters()}


def list_weights(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All weights of an optimizer, in the order of its state_dict."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def map_tensors(tree: Any, change: Callable[[Tensor], object]) -> Any:
    """Apply `change` to every tensor in a tree of dicts and lists."""
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(value, change) for value in tree]
    return change(tree) if isinstance(tree, Tensor) else tree


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved: TorchState,
    shards: dict[str, dict[str, Tensor]] | None,
    world: World,
) -> None:
    """Load an optimizer state; each rank keeps the shard that belongs to its weights.

    Args:
        shards: the tensors by weight and field, from a sharded checkpoint; None if they are whole, in `saved`.
    """
    parameters = list_weights(optimizer)
    name_of = map_names(model)
    names = [name_of[parameter] for parameter in parameters]
    if saved["state"].keys() - set().union(*world.gather(names)):
        raise ValueError("its optimizer has other weights")
    # Shards were read as this rank holds them; whole tensors are divided here, unless the optimizer keeps them whole.
    is_placed = shards is not None or getattr(optimizer, "keeps_whole_state", False)
    states: dict[int, TorchState] = {}
    for number, parameter in enumerate(parameters):
        name = names[number]
        if name not in saved["state"]:
            continue
        state = {**saved["state"][name], **(shards or {}).get(name, {})}
        if not is_placed:
            state = map_tensors(state, partial(shard_like, other=parameter))
        states[number] = state
    # The groups are the optimizer's own: settings of the recipe, and numbers of weights under this strategy.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({**saved, "state": states, "param_groups": groups})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def get_random_states() -> TorchState:
    """States of all random generators, in types that torch loads with weights_only."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    # Of the run's device alone: the other devices are other ranks'.
    return {
        "python": random.getstate(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],
        "mps": torch.mps.get_rng_state() if torch.backends.mps.is_available() else None,
    }


def set_random_states(states: TorchState) -> None:
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        held = states["cuda"]  # of the run's device, or of all devices in a checkpoint of an earlier version
        torch.cuda.set_rng_state(held[min(torch.cuda.current_device(), len(held) - 1)])
    if states.get("mps") is not None and torch.backends.mps.is_available():
        torch.mps.set_rng_state(states["mps"])
