"""Measure text lengths in tokens, and tabulate the truncation and the cost of length limits.

In: TextExamples and a transformers tokenizer. Out: lengths before truncation; tables with a row per limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fivetune.data.letters import tokenize
from fivetune.data.store.encode import TokenizedInput, find_frame, tokenize_inputs
from fivetune.data.store.token_store import NUM_BINS
from fivetune.tasks import find_text
from fivetune.types import JsonTable, TextExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

INPUT_LIMITS = (128, 192, 256, 384, 512, 768, 1024, 2048)
TARGET_LIMITS = (8, 16, 32, 64, 128, 256, 512)
COST_LIMIT = 512  # input limit of cost 1
ATTENTION = 3072  # length at which attention costs as much as the token-wise layers: 6 * d_model of t5-small
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
CHUNK = 1_000  # examples tokenised at once

Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Lengths in tokens, end token included except in contexts, which are a part of the inputs.

    Args:
        inputs, contexts: [N] of each example; the context is the clippable part.
        needed: [N] input limit from which on truncation keeps a reference; 0 if the inputs contain none.
        targets: [M] of each target that is trained on or scored.
    """

    inputs: Lengths
    contexts: Lengths
    needed: Lengths
    targets: Lengths


def measure_lengths(
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[TextExample],
    targets: Sequence[str],
    *,
    answers_can_be_lost: bool = True,
) -> TokenLengths:
    """Tokenise examples and targets, and keep their lengths only.

    Args:
        answers_can_be_lost: false for references that occur in the inputs by chance only, such as labels.
    """
    rows: list[tuple[int, int, int]] = []
    frame = find_frame(tokenizer)
    for first in range(0, len(examples), CHUNK):
        chunk = examples[first : first + CHUNK]
        for example, pieces in zip(chunk, tokenize_inputs(tokenizer, chunk), strict=True):
            least = 0
            if answers_can_be_lost:
                least = _compute_needed_limit(example, pieces, frame.num_input_tokens)
            rows.append((len(pieces.ids) + frame.num_input_tokens, pieces.stop - pieces.start, least))
    inputs, contexts, needed = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return TokenLengths(inputs, contexts, needed, np.array(_measure_targets(tokenizer, targets), dtype=np.int64))


def _measure_targets(tokenizer: PreTrainedTokenizerBase, targets: Sequence[str]) -> list[int]:
    lengths: dict[str, int] = {}
    num_added = find_frame(tokenizer).num_target_tokens
    different = list(dict.fromkeys(targets))  # labels and numbers repeat
    for first in range(0, len(different), CHUNK):
        chunk = different[first : first + CHUNK]
        for target, encoded in zip(chunk, tokenize(tokenizer, chunk), strict=True):
            lengths[target] = len(encoded.ids) + num_added
    return [lengths[target] for target in targets]


def _compute_needed_limit(example: TextExample, pieces: TokenizedInput, num_special: int) -> int:
    """Return the input limit from which on truncation keeps the first answer; 0 without an answer or offsets.

    Truncation removes the end of the context, so an answer in the context also needs room for the tokens behind it.
    """
    ends: list[int] = []
    for reference in example.references:
        span = find_text(example.inputs, reference)
        if span:
            ends.append(span[1])
    if not ends or pieces.offsets is None:
        return 0
    last = int(np.searchsorted(pieces.offsets[:, 0], min(ends))) - 1
    behind = len(pieces.ids) - pieces.stop
    if last < pieces.start:
        return last + 1 + num_special
    if last >= pieces.stop:
        return pieces.start + behind + 1 + num_special
    return last + 1 + behind + num_special


def build_input_limit_table(lengths: TokenLengths, configured: int | None) -> list[JsonTable]:
    """Return for each input limit, the configured one included, the truncations, lost answers and relative cost.

    An example of n tokens after truncation costs n + n² / ATTENTION: the encoder's token-wise layers and attention, for
    t5-small and up to a constant factor. The cost of all examples at COST_LIMIT is 1. Padding is not counted.
    """
    base = max(_estimate_cost(lengths.inputs, COST_LIMIT), 1.0)
    rows: list[JsonTable] = []
    for limit in _add_limit(INPUT_LIMITS, configured):
        num_cut = int((lengths.inputs > limit).sum())
        num_lost = int((lengths.needed > limit).sum())
        cost = round(_estimate_cost(lengths.inputs, limit) / base, 4)
        rows.append({"limit": limit, "num_cut": num_cut, "num_answers_lost": num_lost, "cost": cost})
    return rows


def _estimate_cost(lengths: Lengths, limit: int) -> float:
    kept = np.minimum(lengths, limit).astype(float)
    return float((kept + kept**2 / ATTENTION).sum())


def build_target_limit_table(lengths: TokenLengths, configured: int | None) -> list[dict[str, int]]:
    """Return the number of truncated targets for each limit, the configured one included."""
    rows: list[dict[str, int]] = []
    for limit in _add_limit(TARGET_LIMITS, configured):
        rows.append({"limit": limit, "num_cut": int((lengths.targets > limit).sum())})
    return rows


def _add_limit(limits: Sequence[int], own: int | None) -> list[int]:
    return sorted({*limits, own} if own else limits)


def compute_length_distribution(lengths: Lengths) -> JsonTable | None:
    """Return number, sum, mean, quantiles, maximum and histogram of lengths; None without lengths.

    >>> compute_length_distribution(np.array([3, 4, 5]))["quantiles"]
    {'0.05': 3, '0.25': 3, '0.5': 4, '0.75': 5, '0.95': 5, '0.99': 5}
    """
    if not len(lengths):
        return None
    counts, edges = np.histogram(lengths, bins=NUM_BINS, range=(0, max(int(lengths.max()), NUM_BINS)))
    quantiles = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist()
    return {
        "num": len(lengths),
        "num_tokens": int(lengths.sum()),
        "mean": round(float(lengths.mean()), 2),
        "quantiles": dict(zip(map(str, QUANTILES), quantiles, strict=True)),
        "longest": int(lengths.max()),
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
