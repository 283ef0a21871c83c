"""Freeze weights that patterns select: they get no gradient and no optimizer state.

In: a model and patterns. Out: the model with `requires_grad` set. A pattern is a part of a dotted name: `shared`,
`encoder`, `relative_attention_bias`, `encoder.block.0-3` (a range of numbers), `decoder.block.*.layer.1` (any name). A
tied head has no name of its own: it is `shared`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from fivetune.errors import ConfigError, suggest_names

if TYPE_CHECKING:
    from torch import nn


NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def is_matched(pattern: str, name: str) -> bool:
    """Return whether the parts of a pattern match neighbouring parts of a weight's name.

    >>> name = "encoder.block.3.layer.0.SelfAttention.q.weight"
    >>> [is_matched(one, name) for one in ("encoder", "encoder.block.0-3", "block.*.layer.0", "block.1")]
    [True, True, True, False]
    """
    return next(_iter_matches(pattern, name), None) is not None


def _iter_matches(pattern: str, name: str) -> Iterator[list[str]]:
    """Yield the neighbouring parts of a name that a pattern matches."""
    wanted = pattern.split(".")
    parts = name.split(".")
    for start in range(len(parts) - len(wanted) + 1):
        found = parts[start : start + len(wanted)]
        if all(map(_is_part_matched, wanted, found)):
            yield found


def _is_part_matched(wanted: str, part: str) -> bool:
    numbers = NUMBERS.fullmatch(wanted)
    if numbers and numbers[2] and part.isdecimal():
        return int(numbers[1]) <= int(part) <= int(numbers[2])
    return fnmatchcase(part, wanted)


def select_names(names: Iterable[str], pattern: str, *, setting: str, what: str = "weight") -> list[str]:
    """Return the names that a pattern matches.

    Raises ConfigError with the nearest parts of names if there is none, or if a number exceeds the model's highest.
    """
    names = list(names)
    _refuse_high_numbers(names, pattern, setting=setting)
    found = [name for name in names if is_matched(pattern, name)]
    if not found:
        parts = dict.fromkeys(part for name in names for part in name.split(".") if not part.isdecimal())
        raise ConfigError(f"{setting}: {pattern!r} matches no {what} of the model. {suggest_names(pattern, parts)}")
    return found


def _refuse_high_numbers(names: Sequence[str], pattern: str, *, setting: str) -> None:
    """Raise ConfigError for a number, or the end of a range of numbers, above the highest one at its place."""
    wanted = pattern.split(".")
    for place, part in enumerate(wanted):
        numbers = NUMBERS.fullmatch(part)
        if not numbers:
            continue
        # The same pattern with any number at this place finds the numbers that the model has.
        any_number = ".".join([*wanted[:place], "*", *wanted[place + 1 :]])
        present: set[int] = set()
        for name in names:
            for parts in _iter_matches(any_number, name):
                if parts[place].isdecimal():
                    present.add(int(parts[place]))
        if present and int(numbers[2] or numbers[1]) > max(present):
            owner = ".".join(wanted[:place]) or "they"
            raise ConfigError(
                f"{setting}: {pattern!r} asks for number {numbers[2] or numbers[1]}, and those of {owner} end at "
                f"{max(present)} ({len(present)} in all, from {min(present)}). Lower it, or write * for all."
            )


def freeze_weights(
    model: nn.Module,
    patterns: Iterable[str],
    *,
    until: Mapping[str, int] | None = None,
) -> None:
    """Freeze the weights that at least one pattern matches.

    Args:
        until: model.unfreeze, by which `Unfreezing` freezes further weights until a step.

    Raises ConfigError for a pattern that matches nothing, and if no weight is left that the first step trains.
    """
    weights = dict(model.named_parameters())
    for pattern in patterns:
        for name in select_names(weights, pattern, setting="model.freeze"):
            weights[name].requires_grad_(False)
    # The first step needs weights that are frozen neither for good nor until a later step.
    trained = {name for name, weight in weights.items() if weight.requires_grad}
    if not trained:
        raise ConfigError("model.freeze: all weights are frozen, so there is nothing to train. Remove a pattern.")
    late = until or {}
    for pattern in late:
        trained.difference_update(select_names(weights, pattern, setting="model.unfreeze"))
    if not trained:
        raise ConfigError(
            f"model.unfreeze: all weights are frozen until step {min(late.values())} "
            f"({', '.join(f'{one}: {step}' for one, step in late.items())}), so the first steps have nothing to train. "
            f"Remove the pattern that shall be trained first, such as {min(late, key=late.__getitem__)}."
        )


class Unfreezing:
    """Weights that are frozen until a number of steps is done; a function of the step, so that a resume repeats it.

    Args:
        until: pattern -> number of steps before the weights that it matches are trained.

    Raises ConfigError for a pattern that matches nothing, or a weight that is frozen for good.
    """

    def __init__(self, model: nn.Module, until: Mapping[str, int]) -> None:
        weights = dict(model.named_parameters())
        self._frozen: list[tuple[int, list[nn.Parameter]]] = []
        # The latest step first: `update` sets the weights in this order, and the last one to set a weight counts.
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
