"""Compare a model with one whose vocabulary is trimmed, on a sample: scores of all kept pieces, and answers.

In: a model, its tokenizer and pairs of input and target. Out: a SampleResult; of two of them a TrimProof.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fivetune.data.examples import Source
from fivetune.data.store.encode import LengthLimits
from fivetune.data.store.token_store import TokenStore, load_or_build_store
from fivetune.errors import ModelError
from fivetune.model.decode import Decoding, generate
from fivetune.model.forward import shift_right
from fivetune.tasks.jsonl import JSONL
from fivetune.training.answers.inputs import write_records

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivetune.model.modules import T5Model

TOLERANCE = 1e-5  # of logits, relative to the largest one
LIMITS = LengthLimits(max_input_tokens=512, max_target_tokens=32)
DECODING = Decoding(max_new_tokens=32, batch_size=16, score_targets=False)


@dataclass(frozen=True, slots=True)
class SampleResult:
    """What a model computes for each pair.

    Args:
        logits: [T, V] of the target, teacher-forced.
        answers: ids of the greedy answer to the input.
        restricted: ids of the answer without the pieces that are dropped.
    """

    logits: list[Tensor]
    answers: list[list[int]]
    restricted: list[list[int]]


@dataclass(frozen=True, slots=True)
class TrimProof:
    """What a comparison of `num_pairs` pairs found.

    Args:
        logit_error: largest difference, relative to the largest logit.
        num_equal: answers that are equal.
        num_restricted: answers that equal the whole model's answers without the dropped pieces; others are ties.
        num_dropped: answers of the whole model that contain a dropped piece, which no trimmed model can generate.
    """

    num_pairs: int
    logit_error: float
    num_equal: int
    num_restricted: int
    num_dropped: int


def compute_sample(
    model: T5Model,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[str, str]],
    *,
    kept: NDArray[np.int64] | None = None,
) -> SampleResult:
    """Compute logits and greedy answers on the CPU.

    Args:
        kept: ids that are kept, of a model that is not trimmed yet; the logits are of these ids.
    """
    with tempfile.TemporaryDirectory(prefix="fivetune-sample-") as folder:
        path = Path(folder) / "pairs.jsonl"
        write_records(path, [{"inputs": inputs, "targets": targets} for inputs, targets in pairs], {})
        source = Source(paths=(str(path),), task=JSONL(), limits=LIMITS)
        store = load_or_build_store(source, tokenizer, cache=Path(folder))
        # The trimmed model cannot write what was dropped: its answers are compared with what the whole one writes
        # without these pieces, too.
        answers = restricted = _answer(model, store, DECODING)
        if kept is not None:
            dropped = np.setdiff1d(np.arange(model.config.vocab_size), kept)
            restricted = _answer(model, store, replace(DECODING, suppressed_ids=tuple(dropped.tolist())))
        logits = [_compute_logits(model, store, row, kept) for row in range(len(pairs))]
    return SampleResult(logits, answers, restricted)


def _answer(model: T5Model, store: TokenStore, decoding: Decoding) -> list[list[int]]:
    rows = range(len(store))
    answers = generate(model, store, rows, decoding, device="cpu", autocast=nullcontext)
    found = {one.row: one.token_ids for one in answers}
    return [found[row] for row in rows]


@torch.no_grad()
def _compute_logits(model: T5Model, store: TokenStore, row: int, columns: NDArray[np.int64] | None) -> Tensor:
    model.eval()
    input_ids = torch.tensor(np.asarray(store.inputs[row], dtype=np.int64))
    labels = torch.tensor(np.asarray(store.labels[row], dtype=np.int64))
    config = model.config
    decoder_ids = shift_right(labels[None], start_id=config.decoder_start_token_id, pad_id=config.pad_token_id)
    logits = model(input_ids=input_ids[None], decoder_input_ids=decoder_ids, use_cache=False).logits[0]
    if columns is None:
        return logits
    return logits[:, torch.tensor(columns)]


def compare_samples(whole: SampleResult, trimmed: SampleResult, kept: NDArray[np.int64]) -> TrimProof:
    """Compare the results of a whole and a trimmed model. Raises ModelError if logits differ by more than TOLERANCE.

    Args:
        whole: result of the whole model, with the logits of `kept`.
        kept: old id of each new id.
    """
    errors: list[float] = []
    for before, after in zip(whole.logits, trimmed.logits, strict=True):
        difference = (before - after).abs().max() / before.abs().max().clamp_min(1e-12)
        errors.append(difference.item())
    if not max(errors) <= TOLERANCE:  # true for NaN
        raise ModelError(
            f"trim-vocab: the trimmed model's logits differ by {max(errors):.2g} (relative), allowed is {TOLERANCE:g}. "
            "Nothing is written; report it with the model's name."
        )
    # The ids of a trimmed model are places in `kept`.
    known = set(kept.tolist())
    answers: list[list[int]] = [kept[ids].tolist() for ids in trimmed.answers]
    return TrimProof(
        num_pairs=len(answers),
        logit_error=max(errors),
        num_equal=_count_equal(whole.answers, answers),
        num_restricted=_count_equal(whole.restricted, answers),
        num_dropped=sum(not known.issuperset(ids) for ids in whole.answers),
    )


def _count_equal(some: Sequence[list[int]], others: Sequence[list[int]]) -> int:
    return sum(one == other for one, other in zip(some, others, strict=True))
