"""Floating-point operations of training a loaded model, from its modules.

In: a model and lengths without padding. Out: `Flops`, as of `flops.py`, which has no torch.

A matrix counts 2 operations per weight and row forward, 2 for its own gradient if it is trained, and 2 for the gradient
of its input if something trained lies below it. The four products of attention's backward pass count likewise, each if
its result is needed. So a model without trained weights, such as a teacher, counts its forward pass alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import nn

from fivetune.distributed.pipeline import find_stage
from fivetune.model.backend import Forward
from fivetune.model.flops import Flops
from fivetune.model.modules import T5Model
from fivetune.model.virtual_tokens import find_prefix, find_prompt

QUERIES, KEYS, VALUES = ("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj")
FOREIGN = re.compile(r"^(vision_tower|multi_modal_projector)|\.lora_")  # no matrices of the stack
CROSS, MERGED = ("EncDecAttention", "cross_attn", "encoder_attn"), ("T5Gemma2MergedAttention",)


class StepFlops:
    """Counts the operations of steps: all passes of the objective, and the teacher's.

    What is trained is read once.
    """

    def __init__(self, model: T5Model, forward: Forward) -> None:
        self._computed = [ModelFlops(model)] * forward.objective.num_passes
        if forward.teacher:
            self._computed.append(ModelFlops(forward.teacher.model))

    def count(self, source_lengths: ArrayLike, target_lengths: ArrayLike) -> Flops:
        """Count the operations of a step over examples of these lengths."""
        encoder = decoder = 0.0
        for one in self._computed:
            flops = one.count(source_lengths, target_lengths)
            encoder += flops.encoder
            decoder += flops.decoder
        return Flops(encoder, decoder)


class ModelFlops:
    """Counts the operations of a model's forward and backward pass.

    A model with a span head (`model/span_head.py`) runs its decoder over the inputs and has two outputs per token.
    Linear modules are known by the names above. A layer with a window attends to its window, LongT5's to three blocks
    and, if transient-global, to one token per `global_block_size`. Not counted: images, and the norms of DoRA's
    matrices, which do not depend on the tokens.
    """

    def __init__(self, model: T5Model) -> None:
        self._is_span = hasattr(model, "qa_outputs")
        self._streams = _walk_model(model)
        prompt = find_prompt(model)
        self._num_prompt = len(prompt.virtual_tokens) if prompt else 0

    def count(self, source_lengths: ArrayLike, target_lengths: ArrayLike) -> Flops:
        """Count the operations over examples of these lengths."""
        if self._is_span:
            target_lengths = source_lengths
        source = np.asarray(source_lengths, dtype=np.float64) + self._num_prompt
        target = np.asarray(target_lengths, dtype=np.float64)
        totals: list[float] = []
        for stream in self._streams:
            totals.append(0.0)
            for kind, operations in stream.operations.items():
                totals[-1] += operations * kind.count(source, target)
        return Flops(*totals)


def _walk_model(model: T5Model) -> tuple[_Stream, _Stream]:
    """Collect the operations of encoder and decoder."""
    prefix = find_prefix(model)
    trained = _find_trained(model)
    encoder = _Stream(model.get_encoder(), trained)
    for unit in _iter_units(encoder.stack):
        encoder.add_unit(unit, _Rows("source"), _find_pairs(unit, "source"))
    encoder.end()
    decoder = _Stream(model.get_decoder(), trained)
    rows = _Rows("target")
    has_prefix = bool(prefix and decoder.has_trained(prefix.parameters()))
    for unit in _iter_units(decoder.stack):
        pairs = _find_pairs(unit, "target")
        if prefix:
            pairs = replace(pairs, extra=len(prefix.virtual_tokens))
        if unit.name in CROSS:
            pairs = _Rows("target", to_memory=True)
            decoder.add_unit(unit, rows, pairs, memory=_Rows("source"), needs_memory=encoder.needs, is_cross=True)
        elif type(unit.module).__name__ in MERGED:
            pairs = replace(pairs, to_memory=True)
            decoder.add_unit(unit, rows, pairs, memory=_Rows("source"), needs_memory=encoder.needs)
        else:
            decoder.add_unit(unit, rows, pairs, has_prefix=has_prefix)
    decoder.end()
    # The head, of all rows of the decoder: its own gradient and its input's if they are needed.
    head = model.qa_outputs if hasattr(model, "qa_outputs") else model.get_output_embeddings()
    decoder.operations[rows] += 2 * (1 + (id(head.weight) in trained) + decoder.needs) * head.weight.numel()
    return encoder, decoder


@dataclass(frozen=True, slots=True)
class _Rows:
    """What operations are counted per: tokens of a stack, or pairs of a token and one that it attends to.

    Args:
        of: source, the tokens of the encoder, or target.
        to_own, to_memory: whether a token is paired with tokens of the same stack, and with tokens of the encoder.
        window: most of the same stack that a token attends to; None: all.
        block: number of tokens that have one global token; None: there are none.
        extra: pairs of each token with a prefix.
    """

    of: str
    to_own: bool = False
    to_memory: bool = False
    window: int | None = None
    block: int | None = None
    extra: int = 0

    def count(self, source: NDArray[np.float64], target: NDArray[np.float64]) -> float:
        """Count them over sequences with these numbers of tokens."""
        rows = source if self.of == "source" else target
        if not (self.to_own or self.to_memory):
            return float(rows.sum())
        keys = np.zeros_like(rows)
        if self.to_own:
            own = rows if self.window is None else np.minimum(rows, self.window)
            if self.block:
                own = own + rows // self.block
            if self.of == "target":  # a token sees those before it: half of all, on average
                own = np.minimum(rows / 2, own)
            keys += own + self.extra
        if self.to_memory:
            keys += source
        return float((rows * keys).sum())


@dataclass(frozen=True, slots=True)
class _Unit:
    """An attention or a feed-forward layer.

    Args:
        owner: the module that it is a part of.
        matrices: its linear modules by name, or the modules of an adapter in their place.
    """

    name: str
    module: nn.Module
    owner: nn.Module
    matrices: dict[str, Any]


@dataclass(slots=True)
class _Stream:
    """The residual stream of a stack, from below to above.

    Args:
        trained: the identities of trained weights.
        needs: whether the gradient of the stream is needed: something trained lies below.
        operations: per row, by what the rows are.
    """

    stack: nn.Module
    trained: set[int]
    needs: bool = False
    operations: Counter[_Rows] = field(default_factory=Counter[_Rows])
    ends: list[nn.Parameter] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, weight in self.stack.named_parameters():
            if re.search(r"\.\d+\.", name) or FOREIGN.search(name) or name.startswith("prefix."):
                continue
            if "embed" in name:
                self.needs |= id(weight) in self.trained
            else:
                self.ends.append(weight)

    def end(self) -> None:
        """Pass the norm above all units."""
        self.needs |= self.has_trained(self.ends)

    def has_trained(self, weights: Iterable[nn.Parameter]) -> bool:
        return any(id(weight) in self.trained for weight in weights)

    def add_unit(
        self,
        unit: _Unit,
        rows: _Rows,
        pairs: _Rows,
        *,
        memory: _Rows | None = None,
        needs_memory: bool = False,
        is_cross: bool = False,
        has_prefix: bool = False,
    ) -> None:
        """Add the operations of a unit.

        Args:
            rows: tokens of the stack. pairs: pairs of these tokens with the tokens that they attend to.
            memory: tokens of the encoder that are keys and values too, with `is_cross` the only ones.
            needs_memory: whether the gradient of the encoder's output is needed.
            has_prefix: whether trained keys and values precede the tokens' keys and values.
        """
        # The norm before a unit is its owner's part; Bart's feed-forward layers have it themselves.
        needs = self.needs or self.has_trained(_iter_small_weights(unit.owner))
        is_attention = any(name in QUERIES for name in unit.matrices)
        has_small = self.has_trained(_iter_small_weights(unit.module))
        needs |= has_small and not is_attention
        *first, last = unit.matrices
        if is_attention:
            first = [name for name in unit.matrices if _find_role(name)]
            last = next(name for name in unit.matrices if not _find_role(name))
        outputs: dict[str, bool] = {}  # whether the gradient of a matrix's output is needed
        for name in first:
            outputs[name] = False
            if not (is_cross and _find_role(name) in ("k", "v")):
                outputs[name] = self._add_matrix(unit.matrices[name], rows, needs)
            if memory is not None and _find_role(name) in ("k", "v"):
                outputs[name] |= self._add_matrix(unit.matrices[name], memory, needs_memory)
        result = any(outputs.values())
        if is_attention:
            of = {_find_role(name): has for name, has in outputs.items()}
            scores = of["q"] or of["k"] or has_prefix or has_small
            # Two products forward; backward one each for q, k, v and the scores.
            gradients = sum((of["q"], of["k"] or has_prefix, of["v"] or has_prefix, scores))
            width = unit.matrices[next(name for name in outputs if name in QUERIES)].out_features
            self.operations[pairs] += 2 * (2 + gradients) * width
            result = scores or of["v"]
        self.needs = self._add_matrix(unit.matrices[last], rows, result) or needs

    def _add_matrix(self, module: Any, rows: _Rows, needs: bool) -> bool:
        """Add the operations of a matrix with its adapter; returns whether the gradient of its output is needed."""
        base = getattr(module, "base_layer", module)
        has_adapter = module is not base and self.has_trained(module.parameters())
        for attribute in ("lora_A", "lora_B"):
            # The input of B is the output of A, which is trained with it.
            below = needs or (attribute == "lora_B" and has_adapter)
            for small in getattr(module, attribute, {}).values():
                self.operations[rows] += 2 * (1 + (id(small.weight) in self.trained) + below) * small.weight.numel()
        inputs = needs or (has_adapter and getattr(module, "is_feedforward", False))  # IA3 scales the input
        is_trained = id(base.weight) in self.trained
        # A matrix in 4 bits has fewer stored elements.
        self.operations[rows] += 2 * (1 + is_trained + inputs) * base.in_features * base.out_features
        return inputs or has_adapter or self.has_trained(base.parameters())


def _find_trained(model: nn.Module) -> set[int]:
    """The identities of trained weights; those of other pipeline stages are as they were before the division."""
    stage = find_stage(model)
    trained: set[int] = set()
    for name, weight in model.named_parameters():
        is_elsewhere = stage is not None and weight.is_meta and name not in stage.frozen
        if weight.requires_grad or is_elsewhere:
            trained.add(id(weight))
    return trained


def _iter_small_weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of a module that are in no matrix and no other layer: norms and biases of attention."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, nn.Linear) and next(child.children(), None) is None:
            yield from child.parameters()


def _find_role(name: str) -> str:
    """q, k or v; "" for other matrices."""
    for role, names in (("q", QUERIES), ("k", KEYS), ("v", VALUES)):
        if name in names:
            return role
    return ""


def _iter_units(stack: nn.Module) -> Iterator[_Unit]:
    """Yield the attention and feed-forward layers of a stack in the order of its forward pass."""
    modules = dict(stack.named_modules())
    units = dict[str, _Unit]()
    for path, module in modules.items():
        if isinstance(module, nn.Linear) and not FOREIGN.search(path):
            matrix = path.removesuffix(".base_layer")  # peft's module in the place of the linear one
            parent, _, name = matrix.rpartition(".")
            owner, _, last = parent.rpartition(".")
            unit = units.setdefault(parent, _Unit(last, modules[parent], modules[owner], {}))
            unit.matrices[name] = modules[matrix]
    yield from units.values()


def _find_pairs(unit: _Unit, of: str) -> _Rows:
    """The pairs of self-attention."""
    module: Any = unit.module
    window = getattr(module, "sliding_window", None)
    if hasattr(module, "block_len"):  # LongT5: a block sees its two neighbours and itself
        window = 3 * module.block_len
    return _Rows(of, to_own=True, window=window, block=getattr(module, "global_block_size", None))
