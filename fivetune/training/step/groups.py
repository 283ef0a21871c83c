"""The optimizer of a run and its parameter groups: by kind of weight, by pattern, and by the depth of a layer.

In: a model and the settings train.param_groups and train.layer_decay. Out: groups of trainable weights with the keys
weight_decay (0 for norms), kind ("norm": all vectors; "table": embeddings and heads; "matrix") and lr_factor; with an
adapter of matrices also scales_by_size: False, because steps in proportion to its size hardly move a matrix that begins
at 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

import torch
from torch import nn
from torch.autograd.graph import increment_version

from fivetune.config import RunConfig
from fivetune.config.train import ParamGroup
from fivetune.model.adapter import find_adapter
from fivetune.model.freeze import is_matched, select_names
from fivetune.training.state.snapshot import list_weights
from fivetune.types import Optimizer, TorchState

FP32 = 4  # bytes
KINDS = ("matrix", "table", "norm")  # in the order of the groups: norms, without weight decay, come last
IA3_FACTORS = ".ia3_l."  # in their names; peft stores the vectors as matrices with one row or column
BLOCK_NAME = re.compile(r"\b(encoder|decoder)\.(?:block|layers)\.(\d+)\.")


def group_weights(
    model: nn.Module, rules: Sequence[ParamGroup] = (), *, layer_decay: float | None = None
) -> list[TorchState]:
    """Divide the trainable weights into an optimizer's groups, the one with the largest lr_factor first.

    torch's fused steps refuse a group with both sharded and other weights, or with shards over two meshes.

    Args:
        rules: the first one whose pattern matches a weight applies to it; norms stay without weight decay.
        layer_decay: factor of the learning rate per layer, as `compute_depth_factor` says.

    Raises ConfigError for a pattern that matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    for rule in rules:
        select_names(names, rule.match, setting="train.param_groups")
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    adapter = find_adapter(model)
    unscaled = {"scales_by_size": False} if adapter and not adapter.is_virtual else {}
    groups: dict[tuple[float, int, str, str], TorchState] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_embedding = id(weight) in embeddings
        if weight.dim() <= 1 or IA3_FACTORS in name:
            kind = "norm"
        elif is_embedding or name.startswith("lm_head."):
            kind = "table"
        else:
            kind = "matrix"

        # The first rule that matches; without one the optimizer's own rate and weight decay.
        rule = next((rule for rule in rules if is_matched(rule.match, name)), None)
        factor = rule.lr if rule else 1.0
        if layer_decay:
            factor *= compute_depth_factor(names, name, layer_decay, is_embedding=is_embedding)
        decay = rule.weight_decay if rule else None
        if kind == "norm":
            decay = 0.0

        # torch's fused steps refuse a group with weights of two meshes.
        key = (-factor, KINDS.index(kind), str(getattr(weight, "device_mesh", "")), str(decay))
        group = groups.setdefault(key, {"params": [], "kind": kind, "lr_factor": factor, **unscaled})
        if decay is not None:
            group["weight_decay"] = decay
        group["params"].append(weight)
    return [groups[key] for key in sorted(groups)]


def count_state_bytes(model: nn.Module, optimizer: Optimizer, *, has_average: bool = False) -> int:
    """Count the bytes of an optimizer's state, and of a moving average; frozen weights have none."""
    average = FP32 if has_average else 0
    total = 0.0
    for group in group_weights(model):
        each = average + optimizer.get_state_bytes(group["kind"])
        total += each * sum(weight.numel() for weight in group["params"])
    return ceil(total)


def compute_depth_factor(names: Sequence[str], name: str, decay: float, *, is_embedding: bool) -> float:
    """Compute the factor of the learning rate of a weight by the depth of its layer (Clark et al. 2020, ELECTRA).

    Block i of a stack of n has decay^(n - 1 - i), the embedding decay^n of the deeper stack, everything above the
    blocks 1.

    Args:
        names: names of all weights. is_embedding: whether the weight is an embedding outside of the blocks.

    >>> names = [f"encoder.block.{i}.layer.0.layer_norm.weight" for i in range(3)]
    >>> [compute_depth_factor(names, name, 0.5, is_embedding=False) for name in names]
    [0.25, 0.5, 1.0]
    >>> compute_depth_factor(names, "shared.weight", 0.5, is_embedding=True)
    0.125
    """
    last: dict[str, int] = {}  # the number of the last block of each stack
    for one in names:
        if found := BLOCK_NAME.search(one):
            stack = found[1]
            last[stack] = max(last.get(stack, 0), int(found[2]))
    if own := BLOCK_NAME.search(name):
        return decay ** (last[own[1]] - int(own[2]))
    return decay ** (1 + max(last.values())) if is_embedding else 1.0


def build_optimizer(config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer over all trainable weights."""
    groups = group_weights(model, config.train.param_groups, layer_decay=config.train.layer_decay)
    # An earlier optimizer with factored gradients left an attribute, into which the backward pass would go on writing.
    for group in groups:
        for parameter in group["params"]:
            vars(parameter).pop("table_grad", None)
    build = config.optimizer.build
    # Factored gradients can be neither all-reduced, nor unscaled by a GradScaler, nor computed by TPU chips.
    if not config.strategy.supports_multiple and config.train.precision != "fp16" and config.device != "tpu":
        build = config.optimizer.build_for_tables
    optimizer = build(groups)
    # Fused optimizers write without torch counting it, by which `copy_weights` notices a change.
    optimizer.register_step_post_hook(lambda stepped, *_: increment_version(list_weights(stepped)))
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    # From the beginning each group has its own rate.
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
