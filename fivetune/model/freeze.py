"""Freeze weights that patterns select: they get no gradient and no optimizer state.

In: a model and patterns. Out: the model with `requires_grad` set. A pattern is a part of a dotted name: `shared`,
`encoder`, `relative_attention_bias`, `encoder.block.0-3` (a range of numbers), `decoder.block.*.layer.1` (any name). A
tied head has no name of its own: it is `shared`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fivetune.errors import ConfigError, suggest_names

if TYPE_CHECKING:
    from torch import nn


def is_matched(pattern: str, name: str) -> bool:
    """Return whether the parts of a pattern match neighbouring parts of a weight's name.

    >>> name = "encoder.block.3.layer.0.SelfAttention.q.weight"
    >>> [is_matched(one, name) for one in ("encoder", "encoder.block.0-3", "block.*.layer.0", "block.1")]
    [True, True, True, False]
    """
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(_is_part_matched, wanted, parts[start:])) for start in starts)


def _is_part_matched(wanted: str, part: str) -> bool:
    numbers = re.fullmatch(r"(\d+)-(\d+)", wanted)
    if numbers and part.isdecimal():
        return int(numbers[1]) <= int(part) <= int(numbers[2])
    return fnmatchcase(part, wanted)


def select_names(names: Iterable[str], pattern: str, *, setting: str) -> list[str]:
    """Return the names that a pattern matches. Raises ConfigError with the nearest parts of names if there is none."""
    names = list(names)
    found = [name for name in names if is_matched(pattern, name)]
    if not found:
        parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal())
        raise ConfigError(f"{setting}: {pattern!r} matches no weight of the model. {suggest_names(pattern, parts)}")
    return found


def freeze_weights(model: nn.Module, patterns: Iterable[str], *, setting: str = "model.freeze") -> None:
    """Freeze the weights that at least one pattern matches. Raises ConfigError for a pattern that matches nothing."""
    weights = dict(model.named_parameters())
    for pattern in patterns:
        for name in select_names(weights, pattern, setting=setting):
            weights[name].requires_grad_(False)
    if not any(weight.requires_grad for weight in weights.values()):
        raise ConfigError(f"{setting}: all weights are frozen, so there is nothing to train. Remove a pattern.")


class Unfreezing:
    """Weights that are frozen until a number of steps is done; a function of the step, so that a resume repeats it.

    Args:
        until: pattern -> number of steps before the weights that it matches are trained.

    Raises ConfigError for a pattern that matches nothing, or a weight that is frozen for good.
    """

    def __init__(self, model: nn.Module, until: Mapping[str, int]) -> None:
        weights = dict(model.named_parameters())
        self._frozen: list[tuple[int, list[nn.Parameter]]] = []
        for pattern, step in sorted(until.items(), key=lambda item: item[1], reverse=True):
            names = select_names(weights, pattern, setting="model.unfreeze")
            if fixed := [name for name in names if not weights[name].requires_grad]:
                raise ConfigError(
                    f"model.unfreeze: {pattern!r} matches {fixed[0]}, which model.freeze freezes for good."
                )
            self._frozen.append((step, [weights[name] for name in names]))

    def update(self, num_done: int) -> None:
        """Freeze and unfreeze for the step after `num_done` steps; if two patterns match, the earlier step counts."""
        for step, weights in self._frozen:
            for weight in weights:
                weight.requires_grad_(num_done >= step)
